"""Tests of the index of texts by their digests."""

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.collector import digest_index
from embedfarm.collector.digest_index import NOWHERE, DigestIndex
from embedfarm.collector.text_digests import DIGEST_BYTES

# Few values, many of them with the same first half, or the same second half.
DIGESTS = st.tuples(st.integers(0, 5), st.integers(0, 3)).map(
    lambda halves: b"".join((half << 61).to_bytes(8, "little") for half in halves)
)


@given(
    added=st.lists(st.lists(DIGESTS, min_size=1, max_size=12), max_size=40),
    asked=st.lists(DIGESTS, max_size=30),
)
def test_the_first_place_of_each_text_is_found(
    added: list[list[bytes]], asked: list[bytes]
) -> None:
    """What is found is what a dictionary holds, in runs of all sizes, in memory and on the disk."""
    with TemporaryDirectory() as home, pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest_index, "FANOUT", 3)
        patch.setattr(digest_index, "IN_MEMORY_MAX", 10)
        patch.setattr(digest_index, "MERGED_MAX", 5)
        index, places, count = DigestIndex(Path(home)), dict[bytes, int](), 0
        for batch in added:
            numbers = range(count, count + len(batch))
            index.add(b"".join(batch), np.array(numbers))
            for number, digest in zip(numbers, batch, strict=True):
                places.setdefault(digest, number)
            count += len(batch)
        found = index.find(b"".join(asked))
        assert found.tolist() == [places.get(each, NOWHERE) for each in asked]


def test_places_are_those_that_came_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is added again keeps its first place, also where runs are merged."""
    monkeypatch.setattr(digest_index, "IN_MEMORY_MAX", 1000)
    monkeypatch.setattr(digest_index, "MERGED_MAX", 500)
    generator = np.random.default_rng(0)
    texts = generator.bytes(DIGEST_BYTES * 3000)
    index, first = DigestIndex(tmp_path), dict[bytes, int]()
    for place in range(0, 40_000, 400):
        chosen = generator.integers(0, 3000, 400).tolist()
        digests = [texts[n * DIGEST_BYTES : (n + 1) * DIGEST_BYTES] for n in chosen]
        index.add(b"".join(digests), np.arange(place, place + 400))
        for number, digest in enumerate(digests):
            first.setdefault(digest, place + number)
    asked = [texts[n * DIGEST_BYTES : (n + 1) * DIGEST_BYTES] for n in range(3000)]
    unknown = generator.bytes(DIGEST_BYTES * 500)
    found = index.find(b"".join(asked) + unknown)
    assert found[:3000].tolist() == [first.get(digest, NOWHERE) for digest in asked]
    assert (found[3000:] == NOWHERE).all()
    assert len(list(tmp_path.iterdir())) < 2 * 2 * 8, "merged runs go"


@pytest.mark.slow
def test_twenty_million_texts_in_flat_memory(tmp_path: Path) -> None:
    """An index of 20 million texts takes no more memory than one of two, and is quick."""
    generator = np.random.default_rng(0)
    index, step, kept = DigestIndex(tmp_path), 1 << 16, []
    peaks = []
    for place in range(0, 20_000_000, step):
        digests = generator.bytes(DIGEST_BYTES * step)
        index.add(digests, np.arange(place, place + step))
        kept.append((place, digests[: DIGEST_BYTES * 2048]))
        peaks.append(_anonymous_bytes())
    began = time.process_time()
    for place, digests in kept:
        known = len(digests) // DIGEST_BYTES
        found = index.find(digests + generator.bytes(len(digests)))
        assert (found[:known] == np.arange(place, place + known)).all()
        assert (found[known:] == NOWHERE).all()
    rate = 2 * sum(len(each) // DIGEST_BYTES for _, each in kept) / (time.process_time() - began)
    disk = sum(path.stat().st_size for path in tmp_path.iterdir())
    sys.stdout.write(
        f"{rate:,.0f} look-ups/s, {max(peaks) / 1e6:,.0f} MB, {disk / 1e6:,.0f} MB on disk\n"
    )
    assert rate >= 200_000
    assert max(peaks) - max(peaks[: len(peaks) // 10]) < 64 << 20


def _anonymous_bytes() -> int:
    """Return the memory of this process that is not a file's."""
    fields = Path("/proc/self/status").read_text().split("RssAnon:")[1].split()
    return int(fields[0]) * 1024
