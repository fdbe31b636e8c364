"""Tests of texts that are shown beside the chunks of an output: only those that were embedded."""

import json
import os
from pathlib import Path
from typing import Final

import msgspec

import embedfarm
from embedfarm.collector.manifest import read_manifest, write_manifest
from embedfarm.collector.text_digests import DIGESTS_FILE
from embedfarm.contract.records import text_checksums
from embedfarm.contract.settings import Settings
from embedfarm.runs.embedded_texts import read_texts
from tests.farm.harness import run, write_corpus

TEXTS: Final = ["cats purr", "dogs bark", "ships sail"]
EARLIER: Final = "a new first row about tax law"
ALL: Final = dict(enumerate(TEXTS))


def embed(home: Path) -> tuple[Path, Path]:
    """Embed some texts, and return their corpus and the output."""
    corpus = write_corpus(home / "corpus.jsonl", TEXTS)
    embedfarm.embed(corpus, out=home / "out", model="null:16", progress=False)
    return corpus, home / "out"


def read(out: Path, **options: dict[int, bytes]) -> dict[int, str]:
    """Read the texts of all chunks of an output."""
    return read_texts(out, read_manifest(out).settings, range(3), Settings(), **options)


def test_only_texts_that_were_embedded_are_shown(tmp_path: Path) -> None:
    """A row that has another text since has none, and the others keep theirs."""
    corpus, out = embed(tmp_path)
    assert read(out) == ALL
    write_corpus(corpus, [*TEXTS[:2], "ships sink"])
    assert read(out) == dict(enumerate(TEXTS[:2]))
    write_corpus(corpus, TEXTS[:1])
    assert read(out) == {0: TEXTS[0]}
    write_corpus(corpus, [EARLIER, *TEXTS])
    assert read(out) == {}
    found = json.loads(run("search", out, TEXTS[0], "--json").stdout)
    assert [(hit["index"], hit["text"]) for hit in found][:1] == [(0, None)]
    write_corpus(corpus, TEXTS)
    assert read(out) == ALL


def test_texts_of_outputs_without_digests(tmp_path: Path) -> None:
    """The output of an earlier version has its texts while the files of its corpus are the same."""
    corpus, out = embed(tmp_path)
    (out / DIGESTS_FILE).unlink()
    write_manifest(out, msgspec.structs.replace(read_manifest(out), digests_sha256=""))
    assert read(out) == ALL
    before = corpus.stat()
    write_corpus(corpus, [TEXTS[0], "pigs oink", TEXTS[2]])
    os.utime(corpus, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert read(out) == {}


def test_texts_that_are_not_on_the_disk_yet(tmp_path: Path) -> None:
    """A chunk of an unfinished output is known by the checksum that the server has of its text."""
    corpus, out = embed(tmp_path)
    identity = read_manifest(out).settings
    checksums = {1: text_checksums([TEXTS[1]]), 2: text_checksums(["ships sank"])}
    begun = tmp_path / "begun"
    begun.mkdir()
    assert read_texts(begun, identity, range(3), Settings(), checksums) == {1: TEXTS[1]}
    write_corpus(corpus, [EARLIER, *TEXTS])
    assert read_texts(begun, identity, range(3), Settings(), checksums) == {}
