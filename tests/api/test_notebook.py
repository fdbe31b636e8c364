"""Tests that the notebook of the documents runs from its first cell to its last."""

from pathlib import Path
from typing import Final

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK: Final = Path(__file__).parents[2] / "docs" / "examples" / "notebook.ipynb"


@pytest.mark.document
@pytest.mark.filterwarnings("ignore")  # those of the kernel's client, which nobody here can mend
def test_the_notebook_runs(tmp_path: Path) -> None:
    """Every cell runs, and the progress bar of a notebook is drawn as text where there is none."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=place).execute()
    answers = [
        output["data"]["text/plain"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output["output_type"] == "execute_result"
    ]
    assert any(
        "300 embeddings of sentence-transformers/all-MiniLM-L6-v2" in each for each in answers
    )
