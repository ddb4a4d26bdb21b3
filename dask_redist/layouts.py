"""Layouts by name, and the layout behind a target map or behind chunks and their owners.

Examples
--------
>>> Slab.Y.chunks((4, 7), ranks=3)
((4,), (3, 2, 2))
>>> match_layout(((4,), (3, 2, 2)), np.array([[0, 1, 2]]), ranks=3)
Slab.Y
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from dask_redist.boxes import Box, Chunks, IntArray, edges
from dask_redist.errors import LayoutError
from dask_redist.grids import Block, Layout, Pencil, Slab
from dask_redist.irregular import BlockCyclic, Boxes, Replicated, Uneven
from dask_redist.partition import admit

__all__ = [
    "Block",
    "BlockCyclic",
    "Boxes",
    "Layout",
    "Pencil",
    "Replicated",
    "Slab",
    "Uneven",
    "as_layout",
    "match_layout",
]


def as_layout(value: object, shape: Sequence[int], ranks: int) -> Layout | None:
    """Return the layout that a value names, or None where it names none.

    Parameters
    ----------
    value : object
        A `Layout`, which is returned as it is, or a target map: an integer array of shape
        ``(ranks, ndim)`` whose rows are the ranks' local shapes, equal to `shape` along all axes
        but one, where they sum to it.
    shape : sequence of int
        The array's shape.
    ranks : int
        The number of ranks.

    Returns
    -------
    Layout or None
        For a target map an `Uneven`; None for anything else than a layout or a 2-D integer array.

    Raises
    ------
    LayoutError
        For a target map that is none, naming the row or column that is wrong.

    Examples
    --------
    >>> as_layout(np.array([[3, 4], [1, 4]]), (4, 4), ranks=2)
    Uneven(0, (3, 1))
    """
    if isinstance(value, Layout):
        return value
    if not isinstance(value, np.ndarray) or value.ndim != 2 or value.dtype.kind not in "iu":
        return None
    lengths, ranks = admit(shape, ranks)
    if value.shape != (ranks, len(lengths)):
        raise LayoutError(
            f"the target map has shape {value.shape}; {ranks} ranks and {len(lengths)} dimensions"
            f" need {(ranks, len(lengths))}"
        )
    if not lengths:
        raise LayoutError("a target map needs an axis to split, but the array has 0 dimensions")
    if (value < 0).any():
        rank, axis = np.argwhere(value < 0)[0]
        raise LayoutError(
            f"row {rank}, column {axis} of the target map is {value[rank, axis]}; local lengths"
            " are at least 0"
        )
    differs = value != np.array(lengths)
    split = np.flatnonzero(differs.any(axis=0))
    if split.size == 0:
        return _unsplit(lengths, ranks)
    if split.size > 1:
        axis = int(split[1])
        rank = int(differs[:, axis].argmax())
        raise LayoutError(
            f"the target map splits axes {split[0]} and {axis}: row {rank}, column {axis} is"
            f" {value[rank, axis]} instead of the whole {lengths[axis]}; only one axis may differ"
        )
    axis, sizes = int(split[0]), [int(size) for size in value[:, split[0]]]
    if sum(sizes) != lengths[axis]:
        raise LayoutError(
            f"column {axis} of the target map sums to {sum(sizes)}, but axis {axis} has"
            f" {lengths[axis]} elements"
        )
    return Uneven(axis, tuple(sizes))


def _unsplit(lengths: tuple[int, ...], ranks: int) -> Layout:
    """Return the layout of a target map whose rows are all the whole shape."""
    if ranks == 1:
        return Slab(0)
    if 0 in lengths:
        return Uneven(lengths.index(0), (0,) * ranks)
    raise LayoutError(
        f"every row of the target map is the whole shape {lengths}; on {ranks} ranks one column"
        " must sum to its axis (Replicated() gives each rank everything)"
    )


def match_layout(chunks: Chunks, owners: npt.ArrayLike, ranks: int) -> Layout | None:
    """Return the simplest layout that gives exactly these chunks to these owners.

    Parameters
    ----------
    chunks : tuple of tuple of int
        Chunk sizes, one tuple an axis.
    owners : array_like of int
        The rank of each chunk, shaped like the chunk grid; -1 for a chunk that is nowhere.
    ranks : int
        The number of ranks.

    Returns
    -------
    Layout or None
        The first that fits of `Slab`, `Pencil`, `Block`, `Uneven` and `Boxes`; None where none
        does, where a chunk is nowhere, and for 0-d arrays.

    Examples
    --------
    >>> match_layout(((5,), (2, 2), (3, 3)), np.arange(4).reshape(1, 2, 2), ranks=4)
    Pencil.X
    >>> match_layout(((5, 5),), [1, 0], ranks=2)
    Boxes([Box(lower=(5,), upper=(10,)), Box(lower=(0,), upper=(5,))])
    """
    held = np.asarray(owners, dtype=np.int64)
    numblocks = tuple(map(len, chunks))
    if held.shape != numblocks:
        raise LayoutError(f"owners has shape {held.shape}, but the chunk grid is {numblocks}")
    if not numblocks or 0 in numblocks or held.min() < 0 or held.max() >= ranks:
        return None
    shape = tuple(map(sum, chunks))
    for layout in _candidates(chunks, held, ranks):
        try:
            # Chunks first: they are cheap and mostly differ already.
            if layout.chunks(shape, ranks) == chunks and np.array_equal(
                layout.owners(shape, ranks), held
            ):
                return layout
        except LayoutError:
            continue
    return None


def _candidates(chunks: Chunks, owners: IntArray, ranks: int) -> Iterator[Layout]:
    """Yield layouts that might give these chunks, simplest first."""
    numblocks = owners.shape
    ndim = len(numblocks)
    for axis in range(ndim):
        yield Slab(axis)
    for axis in range(ndim):
        yield Pencil(axis)
    for axis in range(ndim):
        if numblocks[axis] == 1:
            yield Pencil(axis, numblocks[:axis] + numblocks[axis + 1 :])
    yield Block(numblocks)
    for axis in range(ndim):
        if numblocks[axis] == owners.size:
            sizes = np.zeros(ranks, dtype=np.int64)
            np.add.at(sizes, owners.ravel(), chunks[axis])
            yield Uneven(axis, tuple(sizes.tolist()))
    yield _bounding_boxes(chunks, owners, ranks)


def _bounding_boxes(chunks: Chunks, owners: IntArray, ranks: int) -> Boxes:
    """Return the smallest box around each rank's chunks; they overlap where a rank has no box."""
    coords = np.indices(owners.shape).reshape(owners.ndim, -1).T
    flat = owners.ravel()
    first = np.full((ranks, owners.ndim), owners.size, dtype=np.int64)
    last = np.full((ranks, owners.ndim), -1, dtype=np.int64)
    np.minimum.at(first, flat, coords)
    np.maximum.at(last, flat, coords)
    # Surplus ranks get the empty box at the origin.
    first[last[:, 0] < 0] = 0
    ends = edges(chunks)
    lower = np.stack([ends[axis][first[:, axis]] for axis in range(owners.ndim)], axis=1)
    upper = np.stack([ends[axis][last[:, axis] + 1] for axis in range(owners.ndim)], axis=1)
    return Boxes(tuple(map(Box, lower.tolist(), upper.tolist())))
