"""Tests of Arrow arrays that are made of their buffers."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.collector.sinks.arrow_columns import numbers, strings


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_strings_are_those_of_arrow(texts: list[str]) -> None:
    """Texts make the array that Arrow makes of them."""
    made = strings(texts)
    made.validate(full=True)
    assert made.equals(pa.array(texts, pa.string()))


@pytest.mark.parametrize("dtype", ["<f4", "<f2", "i1", "u1", "<i4", "<i8"])
@pytest.mark.parametrize("step", [1, 2])
def test_numbers_are_those_of_arrow(dtype: str, step: int) -> None:
    """Numbers make the array that Arrow makes of them, wherever they lie."""
    values = np.arange(20).astype(dtype)[::step]
    made = numbers(values)
    made.validate(full=True)
    assert made.equals(pa.array(values))


def test_pandas_stays_out(tmp_path: Path) -> None:
    """A process that writes Parquet does not import pandas, which takes a quarter of a second."""
    code = (
        "import sys, numpy as np\n"
        "from pathlib import Path\n"
        "from embedfarm.collector.sinks.parquet import Parquet\n"
        "from embedfarm.collector.sinks.part_rows import PartRows\n"
        "rows = PartRows(0, ['a'], np.ones((1, 2), '<f4'), np.array([True]))\n"
        "Parquet(Path(sys.argv[1])).write(rows)\n"
        "print('pandas' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False"]
