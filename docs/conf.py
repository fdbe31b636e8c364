"""How `make docs` builds the documentation site, out of the documents as they lie in the tree."""

import json
import shutil
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from myst_parser.parsers.sphinx_ import MystParser

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

# What `sphinx-build -c docs . build/site` reads. The source directory is the tree itself, so that a
# link between documents is the same here and where the code is hosted.
project = "embedfarm"
author = "the authors of embedfarm"
release = metadata.version("embedfarm")
root_doc = "README"
include_patterns = [
    "*.md",
    "deploy/*.md",
    "deploy/*/*.md",
    "docs/*.md",
    "docs/*.rst",
    "docs/examples/*.ipynb",
]
exclude_patterns = [".*", "**/node_modules", "build", "dist", "tests", "embedfarm"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext", ".ipynb": "notebook"}
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]

# Anchors are those of the hosted pages; a link to none of them is a warning, and so an error.
myst_heading_anchors = 4
highlight_language = "none"

# Names of ours must lead to what is documented; there is no network to look others up in.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!embedfarm\.).*|.*\.(BadRow|LaneAnswer)")]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
add_module_names = False
default_role = "code"  # what docstrings have between single backticks

html_theme = "furo"
html_title = f"embedfarm {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sourcelink = False
templates_path: list[str] = []

CONTENTS: Final = {
    "Use it": [
        "docs/tutorial",
        "docs/corpora",
        "docs/python",
        "docs/outputs",
        "docs/stores",
        "docs/examples/notebook",
        "docs/api",
        "docs/extending",
        "docs/http",
        "docs/rq",
        "docs/protocol",
    ],
    "Run it": [
        "deploy/README",
        "deploy/kubernetes/README",
        "deploy/slurm/README",
        "deploy/ray/README",
        "docs/endpoints",
        "docs/settings",
        "docs/security",
        "docs/scheduling",
        "docs/runbook",
    ],
    "What it is worth": [
        "docs/performance",
        "docs/scale",
        "docs/gpu",
        "docs/clients",
        "docs/reliability",
    ],
    "How it is made": [
        "docs/architecture",
        "docs/glossary",
        "docs/testing",
        "docs/decisions",
        "CONTRIBUTING",
        "SECURITY",
        "CHANGELOG",
    ],
}


class NotebookParser(MystParser):
    """Reads a notebook as the document that its cells make; it has no outputs."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: "nodes.document") -> None:
        """Parse the cells, those of code as code."""
        cells = json.loads(inputstring)["cells"]
        super().parse("\n\n".join(map(_as_markdown, cells)), document)


def _as_markdown(cell: dict[str, str | list[str]]) -> str:
    text = "".join(cell["source"])
    return f"```python\n{text}\n```" if cell["cell_type"] == "code" else text


def _add_contents(_app: "Sphinx", document: str, source: list[str]) -> None:
    """Put the contents of the site under its first page, where readers of the file need none."""
    if document == root_doc:
        source[0] += "".join(
            f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"
            for caption, pages in CONTENTS.items()
        )


def _without_arguments(
    _app: "Sphinx", kind: str, _name: str, thing: object, _options: object, *_signature: object
) -> tuple[str, None] | None:
    """Leave out what would make a protocol, which nobody calls."""
    return ("", None) if kind == "class" and getattr(thing, "_is_protocol", False) else None


def _add_index(app: "Sphinx", error: Exception | None) -> None:
    """Let the site begin at index.html, which web servers look for."""
    if error is None:
        shutil.copy(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: "Sphinx") -> None:
    """Add to Sphinx what it does not bring."""
    app.add_source_parser(NotebookParser)
    app.connect("autodoc-process-signature", _without_arguments)
    app.connect("source-read", _add_contents)
    app.connect("build-finished", _add_index)
