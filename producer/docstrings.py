"""A corpus every machine has: the docstrings of this Python's own standard library.

    python -m embedfarm.producer.docstrings OUT.jsonl

It is read with `ast`; nothing is imported or run.
"""

import argparse
import ast
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

CHARACTERS_MIN: Final = 10
CHARACTERS_MAX: Final = 2_000

_SKIPPED: Final = {"site-packages", "dist-packages", "test", "tests", "idle_test"}

_Definition: TypeAlias = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield dotted names, such as "csv.DictReader.fieldnames", with their dedented docstrings.

    Modules, classes and functions, each name once, in order of file and line; docstrings of
    `CHARACTERS_MIN` to `CHARACTERS_MAX` characters. Tests, installed packages and files that do
    not parse are left out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if _SKIPPED.isdisjoint(parts):
            yield from _file_docstrings(path, ".".join(parts).removesuffix(".__init__"))


def _file_docstrings(path: Path, module: str) -> Iterator[tuple[str, str]]:
    """Yield the names and docstrings of one file; none where it does not parse."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Old files are full of escapes that will be errors one day
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return
    # Of a name defined more than once, as for several platforms, the last definition counts.
    yield from dict(_docstrings_below(tree, module)).items()


def _docstrings_below(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Yield the docstring of a node, then those of its definitions, at any depth."""
    if isinstance(node, ast.Module | _Definition):
        text = ast.get_docstring(node) or ""
        if CHARACTERS_MIN <= len(text) <= CHARACTERS_MAX:
            yield name, text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            yield from _docstrings_below(child, f"{name}.{child.name}")
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _docstrings_below(child, name)


def write_corpus(path: str | Path) -> int:
    """Write docstrings to `path` as JSON Lines of "id" (the name) and "text"; return their number.

    The text begins with the name, as the heading that it is in the documentation.
    """
    encode = msgspec.json.Encoder().encode
    count = 0
    with Path(path).open("wb") as file:
        for name, text in docstrings():
            file.write(encode({"id": name, "text": f"{name}: {text}"}) + b"\n")
            count += 1
    return count


def main() -> None:
    """Write the corpus to the path on the command line, and print how much it is."""
    parser = argparse.ArgumentParser(
        prog="python -m embedfarm.producer.docstrings", description=__doc__
    )
    parser.add_argument("path", metavar="OUT.jsonl")
    path = parser.parse_args().path
    sys.stdout.write(f"{write_corpus(path):,} docstrings written to {path}\n")


if __name__ == "__main__":
    main()
