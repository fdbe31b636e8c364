"""Tests of texts that are made of several fields."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.readers import BadRow, CorpusError, CorpusOptions, read_corpus
from embedfarm.readers.fields import parse_template

ROWS: list[dict[str, Any]] = [
    {"title": "One", "body": "{not} a field", "doc": {"year": 1999}},
    {"title": "", "body": "two", "doc": {"year": 2000}},
]
TEMPLATE = r"{{title}}: {title}\n{body} ({doc.year})\\n"
WANTED = ["{title}: One\n{not} a field (1999)\\n", "{title}: \ntwo (2000)\\n"]


def write(path: Path) -> Path:
    """Write the rows in the format that the suffix of a path says."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        between = {".csv": ",", ".tsv": "\t"}[path.suffix]
        cells = [["title", "body", "doc.year"]]
        cells += [[row["title"], row["body"], str(row["doc"]["year"])] for row in ROWS]
        path.write_text("".join(between.join(row) + "\n" for row in cells))
    return path


def read(path: Path, template: str, id_field: str | None = None) -> tuple[list[str], list[BadRow]]:
    """Return the texts of a file, and its bad rows."""
    bad: list[BadRow] = []
    options = CorpusOptions(template=template, id_field=id_field)
    return [
        text for rows in read_corpus([str(path)], options, bad.append) for text in rows.texts
    ], bad


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv", "parquet"])
def test_fields_make_a_text(tmp_path: Path, suffix: str) -> None:
    """A text has what stands around its fields, and their values as they are, in each format."""
    path = write(tmp_path / f"corpus.{suffix}")
    assert read(path, TEMPLATE) == (WANTED, [])
    assert read(path, TEMPLATE, "title") == (WANTED, [])  # a field may be the id, too
    with pytest.raises(CorpusError, match="colour"):
        list(read_corpus([str(path)], CorpusOptions(template="{title} {colour}"), _fail))


def _fail(row: BadRow) -> None:
    raise CorpusError(str(row))


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))), st.text())
def test_any_text_stands_around_a_field(values: list[str], around: str) -> None:
    """Braces and backslashes written twice stand in the text once; values are not parsed."""
    escaped = around.replace("\\", r"\\").replace("{", "{{").replace("}", "}}")
    template = parse_template(
        escaped + "".join(f"{{{n}x}}{escaped}" for n in range(len(values) + 1))
    )
    assert template.fill(["{a}", *values]) == around + "".join(
        value + around for value in ("{a}", *values)
    )


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("no field", "names no field"),
        ("{", "is no template"),
        ("a } b", "is no template"),
        ("{}", "braces hold the name of a field"),
        ("{title!r}", "braces hold the name of a field"),
        ("{title:>9}", "braces hold the name of a field"),
        ("{title:{body}}", "braces hold the name of a field"),
    ],
)
def test_what_is_no_template(template: str, problem: str) -> None:
    """What would be more than the value of a field is refused."""
    with pytest.raises(CorpusError, match=problem):
        CorpusOptions(template=template)


def test_names_are_no_code(tmp_path: Path) -> None:
    """A name is looked up among the fields, and nothing of Python's objects is reached by it."""
    path = write(tmp_path / "corpus.jsonl")
    for name in ("title.__class__", "title[0]", "0"):
        assert read(path, f"{{{name}}}")[0] == []


def test_a_missing_field_is_a_bad_row(tmp_path: Path) -> None:
    """A row without one of the fields, or with one that holds no text, is a bad row."""
    path = tmp_path / "corpus.jsonl"
    lines = ['{"a": "1"}', '{"a": "1", "b": 2.5}', '{"a": [], "b": "3"}', '{"a": "1", "b": null}']
    path.write_text("\n".join(lines))
    texts, bad = read(path, "{a}-{b}")
    assert texts == ["1-2.5"]
    assert [(each.line, each.field) for each in bad] == [(1, "b"), (3, "a"), (4, "b")]
    assert "and --text says which it is" in bad[0].reason
    table = pa.table({"a": ["1", None], "b": pa.array([1, 2])})
    pq.write_table(table, tmp_path / "corpus.parquet")
    texts, bad = read(tmp_path / "corpus.parquet", "{a}-{b}")
    assert (texts, [(each.line, each.field) for each in bad]) == (["1-1"], [(2, "a")])


def test_what_has_no_fields(tmp_path: Path) -> None:
    """Plain text and documents have no fields to make a text of."""
    (tmp_path / "corpus.txt").write_text("a\n")
    with pytest.raises(CorpusError, match="plain text has no field 'title'"):
        read(tmp_path / "corpus.txt", "{title}")
    with pytest.raises(CorpusError, match="files of a directory have no fields"):
        read(tmp_path, "{title}")
