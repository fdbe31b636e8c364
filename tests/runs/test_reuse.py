"""Tests of `embed --reuse`: what another output has is taken from it, and the rest is embedded."""

import contextlib
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import redis
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

import embedfarm
from embedfarm.collector import known_vectors
from embedfarm.collector.export import export
from embedfarm.collector.journal import JournalLine
from embedfarm.collector.known_vectors import Known, KnownVectors
from embedfarm.collector.manifest import (
    Manifest,
    OutputError,
    Part,
    read_failures,
    read_manifest,
    write_manifest,
)
from embedfarm.collector.output import Output
from embedfarm.collector.text_digests import DIGESTS_FILE, text_digests
from embedfarm.contract.canaries import canaries_of
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_reports import ModelRefused
from embedfarm.contract.records import Result, text_checksums
from tests.farm.failed_chunks import fail_chunks
from tests.farm.harness import (
    Embedding,
    check_output,
    manifest,
    null_vectors,
    role,
    run,
    texts_of,
    write_corpus,
)
from tests.support import LiveServer, wait_until
from tests.workers.tiny_models import DIMENSIONS as TINY_DIMENSIONS
from tests.workers.tiny_models import bert

DIMENSIONS = 16
MODEL = ("--model", f"null:{DIMENSIONS}", "--devices", "cpu", "--workers", "1")
SMALL_PARTS = {
    "EMBEDFARM_PART_BYTES_MAX": str(100 * 4 * DIMENSIONS),
    "EMBEDFARM_BLOCK_CHUNKS_MAX": "100",
}
# Some hundred parts take their time, so that a command can be killed between two of them.
SLOW_PARTS = {"EMBEDFARM_BLOCK_CHUNKS_MAX": "4", "EMBEDFARM_PART_BYTES_MAX": "1"}
TEXTS = list(texts_of(1000))


def changed(texts: Sequence[str]) -> list[str]:
    """Return texts of which some are others, some are gone, some are there twice, in new order."""
    generator = random.Random(0)
    made = [f"new {text}" if n % 20 == 0 else text for n, text in enumerate(texts) if n % 50 != 1]
    generator.shuffle(made)
    return [*made, *made[:100], "all new", "all new"]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory, shared_farm: tuple[str, ...]) -> Path:
    """A finished output of a thousand texts, in parts of a hundred."""
    home = tmp_path_factory.mktemp("old")
    corpus = write_corpus(home / "corpus.jsonl", TEXTS)
    done = run("embed", corpus, "--out", home / "old", *shared_farm, environment=SMALL_PARTS)
    assert done.returncode == 0, done.stderr
    return home / "old"


def embedded(out: Path) -> int:
    """Return the number of chunks that workers embedded for an output."""
    return sum(each["chunks"] for each in manifest(out)["workers"].values())


@pytest.mark.parametrize(
    ("before", "sink"), [("parquet", "npy"), ("npy", "parquet"), ("", "jsonl")]
)
def test_what_is_known_is_not_embedded(
    old: Path, tmp_path: Path, before: str, sink: str, shared_farm: tuple[str, ...]
) -> None:
    """The output is that of a full run, bit for bit, and each new text was embedded once."""
    texts = changed(TEXTS)
    new = set(texts) - set(TEXTS)
    ids = [f"id {n}" for n in range(len(texts))]
    if before:
        export(old, tmp_path / "old", before)
        old = tmp_path / "old"
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts, ids)
    out = tmp_path / "out"
    words = ("embed", corpus, "--id-field", "id", "--format", sink, *shared_farm, "--out", out)
    done = run(*words, "--reuse", old, "--json", environment=SMALL_PARTS)
    assert done.returncode == 0, done.stderr
    assert embedded(out) == len(new) == 51
    taken = sum(text not in new for text in texts)
    reused = {str(old): taken, ".": len(texts) - taken - len(new)}
    assert manifest(out)["reused"] == json.loads(done.stdout)["reused"] == reused
    made = embedfarm.open(out)
    assert np.array_equal(made.matrix, null_vectors(texts, DIMENSIONS))
    assert list(made.ids or ()) == ids
    assert run("verify", out, "--against", corpus).returncode == 0
    assert (out / DIGESTS_FILE).read_bytes() == text_digests(texts)
    assert not (out / ".embedfarm").exists()
    again = run(*words, "--reuse", old)
    assert (again.returncode, "finished already" in again.stdout) == (0, True)


def test_of_a_corpus_that_is_known_nothing_is_embedded(old: Path, tmp_path: Path) -> None:
    """Where no text is new, all vectors are taken, and the model has nothing to do."""
    texts = TEXTS[::-1]
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    assert embed(corpus, tmp_path / "out", old).reused == {str(old): len(texts)}
    check_output(tmp_path / "out", texts, DIMENSIONS)
    assert embedded(tmp_path / "out") == 0
    assert manifest(tmp_path / "out")["tokens"] == 0


@pytest.mark.parametrize("sink", ["parquet", "npy"])
def test_what_has_changed_is_listed(
    tmp_path: Path, sink: str, shared_farm: tuple[str, ...]
) -> None:
    """Where both outputs have ids, a list has what was added, changed, moved and removed."""
    texts = TEXTS[:300]
    ids = [f"id {n}" for n in range(300)]
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts, ids)
    words = ("--id-field", "id", "--format", sink, *shared_farm)
    assert run("embed", corpus, "--out", tmp_path / "old", *words).returncode == 0
    assert manifest(tmp_path / "old").get("changes") is None
    texts[7] = "changed"
    texts[20], texts[21], ids[20], ids[21] = texts[21], texts[20], ids[21], ids[20]
    write_corpus(corpus, [*texts[:-2], "new"], [*ids[:-2], "new id"])
    out, copy = tmp_path / "new", tmp_path / "copy"
    done = run("embed", corpus, "--out", out, *words, "--reuse", tmp_path / "old")
    assert done.returncode == 0, done.stderr
    assert "1 added, 1 changed, 2 moved, 2 removed since" in done.stdout.replace("\n", " ")
    table = pq.read_table(out / "_changes.parquet")
    assert [(row["id"], row["change"]) for row in table.to_pylist()] == [
        ("id 7", "changed"), ("id 21", "moved"), ("id 20", "moved"), ("new id", "added"),
        ("id 298", "removed"), ("id 299", "removed"),
    ]  # fmt: skip
    assert table.column("index").to_pylist() == [7, 20, 21, 298, None, None]
    assert table.column("index_before").to_pylist() == [7, 21, 20, None, 298, 299]
    assert run("verify", out).returncode == 0
    assert run("export", out, "--out", copy, "--format", "jsonl").returncode == 0
    assert run("verify", copy).returncode == 0
    with (copy / "_changes.parquet").open("ab") as file:
        file.write(b"more")
    damaged = run("verify", copy)
    assert (damaged.returncode, "_changes.parquet" in damaged.stdout + damaged.stderr) == (1, True)


def test_each_text_is_embedded_once(tmp_path: Path, shared_farm: tuple[str, ...]) -> None:
    """--deduplicate embeds texts once that stand anywhere in the corpus; without it all are."""
    texts = [*TEXTS, *TEXTS[::-1], *TEXTS[:500]]
    random.Random(0).shuffle(texts)
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    for words, count in (((), len(texts)), (("--deduplicate",), len(TEXTS))):
        out = tmp_path / f"out {count}"
        done = run("embed", corpus, "--out", out, *shared_farm, *words)
        assert done.returncode == 0, done.stderr
        assert embedded(out) == count
        check_output(out, texts, DIMENSIONS)
    assert manifest(out)["reused"] == {".": len(texts) - len(TEXTS)}
    assert run("verify", out, "--against", corpus).returncode == 0


def test_the_first_output_that_has_a_text_is_preferred(
    old: Path, tmp_path: Path, shared_farm: tuple[str, ...]
) -> None:
    """A text that several outputs have is taken from the one that is named first."""
    some, corpus = TEXTS[:300], tmp_path / "corpus.jsonl"
    assert (
        run(
            "embed", write_corpus(corpus, some), "--out", tmp_path / "some", *shared_farm
        ).returncode
        == 0
    )
    write_corpus(corpus, TEXTS[100:500])
    out = tmp_path / "out"
    words = ("--reuse", tmp_path / "some", "--reuse", old)
    assert run("embed", corpus, "--out", out, *shared_farm, *words).returncode == 0
    assert manifest(out)["reused"] == {str(tmp_path / "some"): 200, str(old): 200}
    check_output(out, TEXTS[100:500], DIMENSIONS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--prompt", "p: "), "prompt: none before, p:  now"),
        (("--model", "null:8"), "model: null:16 before, null:8 now"),
        (("--vector-dtype", "float16"), "vector dtype: float32 before, float16 now"),
    ],
)
def test_what_was_made_in_another_way_is_not_mixed(
    old: Path, tmp_path: Path, words: tuple[str, ...], said: str, shared_farm: tuple[str, ...]
) -> None:
    """An output of other settings is refused by name, and nothing is left of the attempt."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", TEXTS[:10])
    out = tmp_path / "out"
    done = run("embed", corpus, "--out", out, *shared_farm, *words, "--reuse", old)
    assert done.returncode == 2
    assert f"{old} cannot be reused: {said}" in done.stderr.replace("\n", " ")
    assert not out.exists()


def remade(old: Path, new: Path, **facts: Any) -> Path:  # noqa: ANN401 # any of a manifest
    """Copy an output, whose manifest then says something else."""
    shutil.copytree(old, new)
    write_manifest(new, msgspec.structs.replace(read_manifest(new), **facts))
    return new


def embed(corpus: Path, out: Path, *reuse: Path) -> Manifest:
    """Embed a corpus in this process, with what others have, and return the manifest."""
    embedfarm.embed(corpus, out=out, model=f"null:{DIMENSIONS}", reuse=reuse, progress=False)
    return read_manifest(out)


def test_another_model_behind_the_name_is_refused(old: Path, tmp_path: Path) -> None:
    """Workers are held to the model that the other output was made with, and outputs to one."""
    fingerprint = read_manifest(old).fingerprint | {"weights": "others"}
    other = remade(old, tmp_path / "other", fingerprint=fingerprint)
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["all new", *TEXTS])
    with pytest.raises(ModelRefused, match="weights"):
        embed(corpus, tmp_path / "out", other)
    with pytest.raises(OutputError, match="are of two models: weights: "):
        embed(corpus, tmp_path / "another", old, other)


def test_other_vectors_of_one_model_are_refused(old: Path, tmp_path: Path) -> None:
    """Workers are held to the canaries of what is reused, and outputs to one another's."""
    canaries = read_manifest(old).canaries
    assert canaries is not None
    turned = canaries_of(canaries.matrix()[:, ::-1])
    other = remade(old, tmp_path / "other", canaries=turned)
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["all new", *TEXTS])
    with pytest.raises(ModelRefused, match="other vectors than the job has: a cosine of"):
        embed(corpus, tmp_path / "out", other)
    with pytest.raises(OutputError, match=r"has other vectors than .* for one model"):
        embed(corpus, tmp_path / "another", old, other)
    untold = remade(old, tmp_path / "untold", canaries=None)
    assert embed(corpus, tmp_path / "third", untold).canaries == canaries


def test_damage_is_not_taken_over(old: Path, tmp_path: Path) -> None:
    """A part, or a list of digests, with other bytes than were written ends the run by name."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", TEXTS[::-1])
    for name in (DIGESTS_FILE, read_manifest(old).parts[5].file):
        broken = tmp_path / f"broken {name}"
        shutil.copytree(old, broken)
        data = bytearray((broken / name).read_bytes())
        data[len(data) // 2] ^= 1
        (broken / name).write_bytes(data)
        with pytest.raises(OutputError, match=f"{name} has other bytes than were written"):
            embed(corpus, tmp_path / f"out {name}", broken)
        problems = run("verify", broken)
        assert (problems.returncode, name in problems.stdout + problems.stderr) == (1, True)


def test_outputs_without_digests_are_told_apart(old: Path, tmp_path: Path) -> None:
    """An output of an earlier version, or none that is finished, is refused with the reason."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", TEXTS)
    earlier = remade(old, tmp_path / "earlier", digests_sha256="")
    (earlier / DIGESTS_FILE).unlink()
    assert run("verify", earlier).returncode == 0
    with pytest.raises(OutputError, match="an earlier version made it"):
        embed(corpus, tmp_path / "out", earlier)
    with pytest.raises(OutputError, match="no finished output is here"):
        embed(corpus, tmp_path / "out", tmp_path)


def test_a_corpus_without_a_good_row_is_told_apart(
    old: Path, tmp_path: Path, shared_farm: tuple[str, ...]
) -> None:
    """Where all rows are bad the error says so, and not that there are none."""
    corpus = tmp_path / "corpus.jsonl"
    for lines, said in (("", "the corpus is empty"), ("nonsense\n", "1 were left out")):
        corpus.write_text(lines)
        words = (*shared_farm, "--on-bad-row", "skip", "--reuse", old)
        done = run("embed", corpus, "--out", tmp_path / "out", *words)
        assert (done.returncode, said in done.stderr.replace("\n", " ")) == (2, True), done.stderr


def test_failed_chunks_are_embedded_again(
    old: Path, tmp_path: Path, shared_farm: tuple[str, ...]
) -> None:
    """A chunk that had failed in another output is no vector to take."""
    bad = tmp_path / "bad"
    shutil.copytree(old, bad)
    fail_chunks(bad, TEXTS, {7, 500})
    digests = text_digests(TEXTS)
    (bad / DIGESTS_FILE).write_bytes(digests)
    sha256 = read_manifest(old).digests_sha256
    write_manifest(bad, msgspec.structs.replace(read_manifest(bad), digests_sha256=sha256))
    texts = [*TEXTS, "far too long " * 20, "short", "far too long " * 20]
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    out = tmp_path / "out"
    made = run("embed", corpus, "--out", out, *shared_farm, "--reuse", bad)
    assert made.returncode == 0, made.stderr
    assert embedded(out) == 4
    check_output(out, texts, DIMENSIONS)


def test_a_text_that_fails_fails_wherever_it_stands(tmp_path: Path) -> None:
    """Repeated texts that are over the limit fail one and all, with the reason."""
    corpus, model = tmp_path / "corpus.jsonl", tmp_path / "model"
    modules = [bert(tmp_path / "transformer"), Pooling(TINY_DIMENSIONS, "mean")]
    SentenceTransformer(modules=modules, device="cpu").save(str(model))
    words = (
        "--model", model, "--engine", "torch", "--dtype", "float32",
        "--long", "error", "--devices", "cpu", "--workers", 1,
    )  # fmt: skip
    write_corpus(corpus, ["a river", "a bank"])
    assert run("embed", corpus, "--out", tmp_path / "old", *words).returncode == 0
    texts = ["the river bank " * 1000, "a bank", "a river", "the river bank " * 1000, "river"]
    write_corpus(corpus, texts)
    out = tmp_path / "out"
    done = run("embed", corpus, "--out", out, *words, "--reuse", tmp_path / "old")
    assert done.returncode == 3, done.stderr
    failures = list(read_failures(out))
    assert [each.index for each in failures] == [0, 3]
    assert len({each.reason for each in failures}) == 1
    assert pq.read_table(out)["index"].to_pylist() == [1, 2, 4]
    assert embedded(out) == 2


def test_the_job_of_a_shared_farm_says_what_is_reused(
    server: LiveServer, client: redis.Redis, old: Path, tmp_path: Path
) -> None:
    """The job of a shared farm has all chunks of the corpus, and counts those that were known."""
    texts = changed(TEXTS)
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    words = ("--redis", server.url, "--model", MODEL[1], "--job-id", "nightly", "--reuse", old)
    with role(server, tmp_path, "work", "--devices", "cpu", "--workers", "1"):
        done = run("embed", corpus, "--out", tmp_path / "out", *words)
    assert done.returncode == 0, done.stderr
    status = FarmClient(client).job("nightly").status()
    facts = (status.state, status.chunks_in, status.chunks_reused)
    assert facts == ("finished", len(texts), len(texts) - 51)
    assert manifest(tmp_path / "out")["job"] == "nightly"
    check_output(tmp_path / "out", texts, DIMENSIONS)


def test_a_run_goes_on_after_each_kill(old: Path, tmp_path: Path) -> None:
    """A command that is killed again and again ends with the output of one that was not."""
    texts = changed(TEXTS)
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    out, generator = tmp_path / "out", random.Random(1)
    words = (corpus, *MODEL, "--reuse", old)
    for seconds in (generator.uniform(0.2, 1.6) for _ in range(8)):
        embedding = Embedding(words, out, SMALL_PARTS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert embedding.wait(seconds) == 0, embedding.log()
        embedding.kill()
    embedding = Embedding(words, out, SMALL_PARTS)
    assert embedding.wait() == 0, embedding.log()
    check_output(out, texts, DIMENSIONS)
    assert run("verify", out, "--against", corpus).returncode == 0
    assert embedded(out) == 51
    assert not (out / ".embedfarm").exists()


@pytest.fixture
def stopped(old: Path, tmp_path: Path) -> tuple[Path, list[str]]:
    """An output that was killed after its first parts, and the texts of its corpus.

    Beside other tests this process may be too late, so that it tries more than once.
    """
    texts = changed(TEXTS)
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    for attempt in range(5):
        out = tmp_path / f"out-{attempt}"
        if kill_between_parts((corpus, *MODEL, "--reuse", old), out) < len(texts) - 100:
            return out, texts
    pytest.fail("each was done before it was killed")


def kill_between_parts(words: Sequence[object], out: Path) -> int:
    """Kill a command after its first parts; return how many rows it wrote, all if it had ended."""
    embedding = Embedding(words, out, SLOW_PARTS)
    wait_until(lambda: len(parts_of(out)) > 1 or embedding.process.poll() is not None)
    embedding.kill()
    parts = parts_of(out)
    return parts[-1].end if parts else sys.maxsize


def parts_of(out: Path) -> Sequence[Part]:
    """Return the parts of an unfinished output."""
    journal = out / ".embedfarm" / "parts.jsonl"
    lines = journal.read_bytes().splitlines() if journal.exists() else []
    return [msgspec.json.decode(line, type=JournalLine).part for line in lines]


def test_a_corpus_may_change_before_a_run_goes_on(
    old: Path, stopped: tuple[Path, list[str]]
) -> None:
    """Rows that changed after a kill are embedded as they are now, or taken from where they are."""
    out, texts = stopped
    texts[-3], texts[-40] = "changed after the kill", texts[0]
    corpus = write_corpus(out.with_name("corpus.jsonl"), texts)
    done = run("embed", corpus, *MODEL, "--reuse", old, "--out", out)
    assert done.returncode == 0, done.stderr
    check_output(out, texts, DIMENSIONS)
    assert run("verify", out, "--against", corpus).returncode == 0


def test_rows_on_disk_that_changed_are_refused(old: Path, stopped: tuple[Path, list[str]]) -> None:
    """What is on disk is compared with the corpus, and made anew only when that is asked for."""
    out, texts = stopped
    texts[parts_of(out)[0].end] = "new"
    corpus = write_corpus(out.with_name("corpus.jsonl"), texts)
    words = ("embed", corpus, *MODEL, "--reuse", old, "--out", out)
    first = parts_of(out)[0]
    refused = run(*words)
    assert (refused.returncode, "--embed-changed" in refused.stderr) == (2, True), refused.stderr
    done = run(*words, "--embed-changed")
    assert done.returncode == 0, done.stderr
    assert read_manifest(out).parts[0] == first
    check_output(out, texts, DIMENSIONS)


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_a_run_may_go_on_with_other_outputs_or_none(
    old: Path,
    tmp_path: Path,
    before: bool,  # noqa: FBT001 -- of the parameters
    after: bool,  # noqa: FBT001 -- of the parameters
) -> None:
    """What a stopped run has left to others to fill is embedded if nobody can fill it any more."""
    texts, out = changed(TEXTS), tmp_path / "out"
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    words = ("--reuse", old)
    embedding = Embedding((corpus, *MODEL, *(words if before else ())), out, SLOW_PARTS)
    wait_until(lambda: parts_of(out) or embedding.process.poll() is not None)
    embedding.kill()
    done = run("embed", corpus, *MODEL, *(words if after else ()), "--out", out)
    assert done.returncode == 0, done.stderr
    check_output(out, texts, DIMENSIONS)
    assert run("verify", out, "--against", corpus).returncode == 0


def test_what_was_begun_with_another_model_is_not_filled(
    old: Path, stopped: tuple[Path, list[str]]
) -> None:
    """An output of two models cannot come about, whichever of the outputs is named later."""
    out, _ = stopped
    fingerprint = read_manifest(old).fingerprint | {"weights": "others"}
    other = remade(old, out.with_name("other"), fingerprint=fingerprint)
    corpus = out.with_name("corpus.jsonl")
    done = run("embed", corpus, *MODEL, "--reuse", other, "--out", out)
    assert done.returncode == 2
    assert "are of two models: weights" in done.stderr.replace("\n", " ")


def test_each_part_is_decoded_twice_at_most(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part is read twice at most, in whatever order texts come, with room for one in memory."""
    decoded: list[int] = []
    decode = known_vectors._decode

    def counting(directory: Path, part: Part) -> Any:  # noqa: ANN401 # a matrix
        decoded.append(part.start)
        return decode(directory, part)

    monkeypatch.setattr(known_vectors, "_decode", counting)
    manifest = read_manifest(old)
    known = KnownVectors(tmp_path / "known", 1, tmp_path, [Known(old, manifest)])
    generator = random.Random(0)
    with Output(tmp_path / "out", {}, sink="npy", part_bytes_max=1) as output:
        for _ in range(30):
            texts = generator.sample(TEXTS, 40)
            result = Result(
                start=0, count=40, dimensions=DIMENSIONS, dtype="<f4", vectors=b"",
                checksums=text_checksums(texts), known=bytes([1] * 40),
            )  # fmt: skip
            filled = known.fill(result, known.find(text_digests(texts), 0), output)
            assert filled.reused == {str(old): 40}
            assert np.array_equal(filled.result.matrix(), null_vectors(texts, DIMENSIONS))
    parts = len(manifest.parts)
    assert parts <= len(decoded) <= 2 * parts
    assert parts >= 8
