"""What is refused, when, and in which words: each message names the value and what would fit."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from cluster import ar, fa, new_runs
from distributed import Client

import dask_redist as dr

pytestmark = pytest.mark.ranks(2)

Box = dr.Box
BAD: dict[str, tuple[Any, str]] = {
    "slab axis": (dr.Slab(2), r"Slab\.Z: axis 2 is out of range .* 2 dimensions"),
    "negative slab axis": (dr.Slab(-3), r"axis -3 is out of range"),
    "pencil axis": (dr.Pencil(5), r"Pencil\(5\): axis 5 is out of range"),
    "pencil grid": (dr.Pencil(0, (3,)), r"grid of 3 is for 3 ranks, but there are 2"),
    "pencil grid entries": (dr.Pencil(0, (1, 2)), r"has a grid of 2 entries.*has 1 axes"),
    "block dimensions": (dr.Block((2,)), r"Block\(\(2,\)\) has 1 grid entries.*needs 2"),
    "block product": (dr.Block((2, 2)), r"2 x 2 is for 4 ranks, but there are 2"),
    "cyclic product": (dr.BlockCyclic((1, 3), (2, 2)), r"1 x 3 is for 3 ranks, but there are 2"),
    "uneven sum": (dr.Uneven(0, (4, 4)), r"sizes sum to 8, but axis 0 has 6 elements"),
    "uneven count": (dr.Uneven(0, (2, 2, 2)), r"has 3 sizes, but there are 2 ranks"),
    "boxes count": (dr.Boxes([Box((0, 0), (6, 8))]), r"has 1 boxes, but there are 2 ranks"),
    "boxes overlap": (
        dr.Boxes([Box((0, 0), (4, 8)), Box((3, 0), (6, 8))]),
        r"(?i)overlap|both hold",
    ),
    "boxes hole": (
        dr.Boxes([Box((0, 0), (3, 8)), Box((4, 0), (6, 8))]),
        r"no rank holds the element at \(3, 0\)",
    ),
    "boxes outside": (dr.Boxes([Box((0, 0), (3, 8)), Box((3, 0), (7, 8))]), r"7"),
    "target rows": (np.array([[2, 8], [2, 8], [2, 8]]), r"shape \(3, 2\); 2 ranks .* \(2, 2\)"),
    "target sum": (np.array([[2, 8], [3, 8]]), r"column 0 .* sums to 5, but axis 0 has 6"),
    "target negative": (np.array([[-1, 8], [7, 8]]), r"row 0, column 0 .* is -1"),
    "dict axis": ({2: 3}, r"axis 2 is out of range .* 2 dimensions: use -2 to 1"),
    "chunks sum": (((3, 4), (8,)), r"\(3, 4\).*shape \(6, 8\)"),
    "chunks axes": ((3, 4, 5), r"\(3, 4, 5\) names 3 axes, the array has 2"),
    "a word": ("no such thing", r"no such thing"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_layout_that_does_not_fit(client: Client, name: str) -> None:
    target, words = BAD[name]
    x = fa(ar(6, 8), (3, 4))
    with new_runs(client) as new:
        with pytest.raises(dr.LayoutError, match=words):
            dr.redistribute(x, target)
        with pytest.raises(ValueError, match=words):
            dr.redistribute(x, target)
        assert not new()


def test_no_axes_to_split(client: Client) -> None:
    with pytest.raises(dr.LayoutError, match="0 dimensions"):
        dr.redistribute(fa(np.array(1.0), ()), dr.Slab.X)


def test_a_vector_has_no_pencil(client: Client) -> None:
    with pytest.raises(dr.LayoutError, match=r"Pencil\.X .* at least 2 dimensions, not 1"):
        dr.redistribute(fa(ar(6), 3), dr.Pencil.X)


def test_unknown_chunk_sizes(client: Client) -> None:
    x = fa(ar(6, 8), (3, 4))
    with pytest.raises(dr.LayoutError, match=r"axis 0 are unknown \(nan\).*compute_chunk_sizes"):
        dr.redistribute(x[x[:, 0] > 8], dr.Slab.X)


@pytest.mark.parametrize("target", [(10, 1), dr.BlockCyclic((1, 2), (10, 1))], ids=repr)
def test_too_many_chunks(client: Client, target: Any) -> None:
    x = da.zeros((10, 2_000_000), chunks=(10, 200_000))
    with pytest.raises(dr.LayoutError, match=r"2000000 chunks.*1000000"):
        dr.redistribute(x, target)


def test_fallback_is_one_of_two_words(client: Client) -> None:
    with pytest.raises(
        ValueError, match=r'"sometimes"|\'sometimes\'; it must be "dask" or "error"'
    ):
        dr.redistribute(fa(ar(6), 3), dr.Slab.X, fallback="sometimes")


def test_an_asynchronous_client_is_connected_first(client: Client) -> None:
    assert client.cluster is not None
    address = client.cluster.scheduler_address

    async def use() -> np.ndarray[Any, Any]:
        async with Client(address, asynchronous=True, set_as_default=False) as other:
            x = fa(ar(6, 8), (3, 8))
            with pytest.raises(dr.RedistError, match=r"await dask_redist\.connect"):
                dr.redistribute(x, dr.Slab.Y, client=other)
            ranks = await dr.connect(other)
            assert ranks.size == 2
            y = dr.redistribute(x, dr.Slab.Y, client=other)
            result: np.ndarray[Any, Any] = await other.compute(y)
            return result

    np.testing.assert_array_equal(asyncio.run(use()), ar(6, 8))


def test_without_a_client() -> None:
    script = (
        "import dask.array as da, dask_redist as dr\n"
        "try:\n    dr.redistribute(da.ones(4, chunks=2), dr.Slab.X)\n"
        "except dr.RedistError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "no Dask client" in done.stdout
    assert "Client(n_workers" in done.stdout
