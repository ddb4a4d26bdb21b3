"""Which rank owns which output chunk, when nobody said.

`balanced` cuts the chunks, in C order, into runs of about equal numbers of elements.
`fewest_moved` looks at where the elements are: since the chunks' places are free, ranks can be
relabelled so that as much as possible stays where it is.
"""

from __future__ import annotations

import math
from functools import reduce

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from dask_redist.boxes import Chunks, IntArray
from dask_redist.errors import LayoutError
from dask_redist.overlap import Overlap, count_elements, flat_owners

__all__ = ["balanced", "fewest_moved"]

_FEW_CHUNKS = 512
"""Up to here each output chunk is placed by itself; the assignment grows with the cube."""


def balanced(chunks: Chunks, ranks: int) -> IntArray:
    """Place chunks in C order, balanced by elements.

    Parameters
    ----------
    chunks : tuple of tuple of int
        Chunk sizes, one tuple an axis.
    ranks : int
        The number of ranks.

    Returns
    -------
    ndarray of int64
        The rank of each chunk, shaped like the chunk grid.  Ranks ascend in C order, and no
        rank's load differs by more than the largest chunk from an equal share.  With no more
        chunks than ranks each rank up to the number of chunks has one.

    Examples
    --------
    >>> balanced(((1, 1, 1, 1, 4),), ranks=2)
    array([0, 0, 0, 0, 1])
    """
    if ranks < 1:
        raise LayoutError(f"the number of ranks must be at least 1, not {ranks}")
    numblocks = tuple(map(len, chunks))
    sizes = _elements(chunks)
    count, total = sizes.size, int(sizes.sum())
    if count <= ranks:
        owners = np.arange(count)
    elif total == 0:
        owners = np.arange(count) * ranks // count
    else:
        # A chunk goes to the rank whose equal share holds its middle.
        middle = np.cumsum(sizes) - sizes / 2
        owners = np.minimum((middle * ranks / total).astype(np.int64), ranks - 1)
    return owners.astype(np.int64).reshape(numblocks)


def fewest_moved(
    overlap: Overlap, owners_in: npt.ArrayLike, ranks: int, start: IntArray | None = None
) -> IntArray:
    """Place the output chunks so that few elements move, and the ranks stay balanced.

    Parameters
    ----------
    overlap : Overlap
        The input and the output chunking.
    owners_in : array_like of int
        The rank of each input chunk, shaped like its chunk grid; -1 where it is unknown.
    ranks : int
        The number of ranks.
    start : ndarray of int64, optional
        A balanced placement to begin with; default: that of `balanced`.

    Returns
    -------
    ndarray of int64
        The rank of each output chunk, shaped like the output's chunk grid.  Never moves more than
        `start`, and is `start` if nothing moves less; no rank's load exceeds twice its heaviest.

    Examples
    --------
    >>> fewest_moved(Overlap(((3, 3),), ((3, 3),)), [1, 0], ranks=2)
    array([1, 0])
    """
    held = flat_owners(owners_in, overlap.numblocks_in, "input", ranks)
    if start is None:
        start = balanced(overlap.chunks_out, ranks)
    # COSTA's relabelling: give each balanced group to the rank that holds most of it.
    names, group_of = np.unique(start, return_inverse=True)
    here = count_elements(overlap, held, group_of.ravel(), (ranks, len(names)))
    best, stays = start, int(here[names, np.arange(len(names))].sum())
    holder, group = linear_sum_assignment(here, maximize=True)
    if here[holder, group].sum() > stays:
        label = np.empty(len(names), dtype=np.int64)
        label[group] = holder
        best, stays = label[group_of].reshape(start.shape), int(here[holder, group].sum())
    if ranks < start.size <= _FEW_CHUNKS:
        placed, kept = _place_each(overlap, held, ranks)
        sizes = _elements(overlap.chunks_out)
        heaviest = np.bincount(start.ravel(), sizes).max()
        if kept > stays and np.bincount(placed, sizes).max() <= 2 * heaviest:
            best = placed.reshape(start.shape)
    return best


def _place_each(overlap: Overlap, held: IntArray, ranks: int) -> tuple[IntArray, int]:
    """Return the best rank of each output chunk, as many a rank as needed, and what stays."""
    count = math.prod(overlap.numblocks_out)
    slots = -(-count // ranks)
    here = count_elements(overlap, held, np.arange(count), (ranks, count))
    slot, chunk = linear_sum_assignment(np.repeat(here, slots, axis=0), maximize=True)
    owners = np.empty(count, dtype=np.int64)
    owners[chunk] = slot // slots
    return owners, int(here[owners, np.arange(count)].sum())


def _elements(chunks: Chunks) -> IntArray:
    """Return the elements of each chunk, in C order."""
    rows = [np.asarray(sizes, dtype=np.int64) for sizes in chunks]
    return reduce(lambda left, right: np.multiply.outer(left, right).ravel(), rows, np.ones(1, int))
