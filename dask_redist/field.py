"""A field that is its own oracle: every element is its global index.

Each rank can tell by itself, without gathering anything, whether what it holds belongs there.
"""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
from distributed import Client, wait
from numpy.typing import NDArray

from dask_redist.boxes import Chunks
from dask_redist.errors import RedistError
from dask_redist.grids import Layout
from dask_redist.inspection import owners

Shape = tuple[int, int, int]


def indexed_field(chunks: Chunks) -> da.Array:
    """A lazy float64 field in which every element is its own global index, counted in C order."""
    meta = np.empty((0, 0, 0))
    field: da.Array = da.map_blocks(_indices, chunks=chunks, dtype="f8", meta=meta)
    return field


def _indices(block_info: Any = None) -> NDArray[np.float64]:
    block = block_info[None]
    planes, *rest = block["array-location"]
    found = np.empty(block["chunk-shape"])
    for i, plane in enumerate(range(*planes)):
        found[i] = _plane(plane, rest, block["shape"])
    return found


def _plane(plane: int, box: Any, shape: Any) -> NDArray[np.float64]:
    """The global indices in one plane of a box."""
    rows, columns = (np.arange(*bounds, dtype="f8") for bounds in box)
    indices: NDArray[np.float64] = (plane * shape[1] + rows[:, None]) * shape[2] + columns
    return indices


def check_field(client: Client, y: da.Array, layout: Layout, ranks: int) -> int:
    """See that each rank has what the layout names; returns how many elements are right: all.

    ``y`` is persisted; the check waits for it.

    Raises
    ------
    RedistError
        Elements are wrong, or a chunk is not on the rank that the layout names.
    """
    wait(y)
    named = layout.owners(y.shape, ranks)
    there = owners(y, client=client)
    if (there != named).any():
        i = tuple(np.argwhere(there != named)[0].tolist())
        raise RedistError(f"chunk {i} is on rank {there[i]}; {layout!r} names rank {named[i]}")
    right = count_right(client, y)
    if right != y.size:
        raise RedistError(f"{y.size - right} of {y.size} elements are wrong in {layout!r}")
    return right


def count_right(client: Client, y: da.Array) -> int:
    """How many elements are their own global index; each rank compares what it holds."""
    ones = tuple((1,) * n for n in y.numblocks)
    counts = da.map_blocks(_right, y, chunks=ones, dtype="i8", meta=np.empty((0, 0, 0), "i8"))
    return int(client.compute(counts.sum()).result())


def _right(block: NDArray[np.float64], block_info: Any = None) -> NDArray[np.int64]:
    planes, *rest = block_info[0]["array-location"]
    right = sum(
        np.count_nonzero(block[i] == _plane(plane, rest, block_info[0]["shape"]))
        for i, plane in enumerate(range(*planes))
    )
    return np.full((1, 1, 1), right, "i8")
