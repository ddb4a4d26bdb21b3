"""The notebook runs, and prints what is stored in it; what is stored is what Heat's prints."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "examples" / "heat_notebook.ipynb"

# The ranks, and the one before each.
RING = [(0, 3), (1, 0), (2, 1), (3, 2)]


def read() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def outputs(notebook: Any) -> list[str]:
    """What each code cell prints and shows; where it is to go, such as stderr, counts too."""
    shown = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            parts: dict[str, str] = {}
            for out in cell.outputs:
                text = out.get("text") or out.get("data", {}).get("text/plain")
                where = out.get("name", out.output_type)
                parts[where] = parts.get(where, "") + str(text)
            shown.append("\n".join(f"{where}: {text}" for where, text in sorted(parts.items())))
    return shown


def test_outputs_are_what_is_stored() -> None:
    stored, notebook = outputs(read()), read()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    assert outputs(notebook) == stored


def table(*rows: tuple[int, ...]) -> str:
    return r"\s+".join(r"\[\s*" + r",?\s+".join(map(str, row)) + r"\]," + "?" for row in rows)


@pytest.mark.parametrize(
    "expected",
    [
        *(
            rf"Rank {rank} of 4 holds a slice of a with local shape \({rows}, 4, 3\)"
            for rank, rows in enumerate((2, 2, 2, 1))
        ),
        table((2, 4, 3), (2, 4, 3), (2, 4, 3), (1, 4, 3)),
        table((1, 4, 3), (2, 4, 3), (2, 4, 3), (2, 4, 3)),
        table((7, 1, 3), (7, 1, 3), (7, 1, 3), (7, 1, 3)),
        table((7, 4, 3), (7, 4, 3), (7, 4, 3), (7, 4, 3)),
        r"\(12, 4\)\n",
        r"\(3, 16\)\n",
        # The sum of the four arrays 100 r + arange(12), their first rows, the last row of before.
        table(*(tuple(600 + 4 * (4 * i + j) for j in range(4)) for i in range(3))),
        table(*(tuple(100 * rank + j for j in range(4)) for rank in range(4))),
        *(
            f"rank {at} received {table(tuple(range(100 * of + 8, 100 * of + 12)))}"
            for at, of in RING
        ),
        table((1, 4), (3, 4), (3, 4), (3, 4)),
        r"rank 0: \[0\]\nrank 1: \[ 4  8 12\]\nrank 2: \[16 20 24\]\nrank 3: \[28 32 36\]",
    ],
)
def test_what_is_stored(expected: str) -> None:
    assert re.search(expected, "\n".join(outputs(read())))


def test_no_error_is_stored() -> None:
    kinds = {line.split(":")[0] for text in outputs(read()) for line in text.splitlines()[:1]}
    assert kinds <= {"stdout", "execute_result"}
