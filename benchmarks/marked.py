"""Marked parts of documents, which commands write."""

from pathlib import Path


def write_marked(path: Path, name: str, text: str) -> None:
    """Put Markdown between `<!-- name -->` and `<!-- end of name -->` in a document.

    Raises:
        ValueError: The document has no such part.
    """
    mark, mark_end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, found, rest = path.read_text(encoding="utf-8").partition(mark)
    _, ended, after = rest.partition(mark_end)
    if not found or not ended:
        raise ValueError(f"{path} has no {mark.strip()} … {mark_end.strip()}")
    path.write_text(f"{before}{mark}\n{text.strip()}\n\n{mark_end}{after}", encoding="utf-8")
