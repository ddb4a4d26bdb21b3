"""Who gives what to whom when an array of which each rank has its box changes its layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dask_redist.boxes import Box
from dask_redist.grids import Layout
from dask_redist.irregular import Replicated

Slices = tuple[slice, ...]


class Move(NamedTuple):
    """What this rank gives another: the rank, the shape of its box, where in it, what of ours."""

    rank: int
    shape: tuple[int, ...]
    target: Slices
    source: Slices


class Planned(NamedTuple):
    """What all that is executed has in common.

    Attributes
    ----------
    number : int
        The same on all ranks, another for each plan.
    source, target : tuple of int
        The shapes of this rank's box, before and after.
    dtype : numpy.dtype
        Of the elements.
    moves : tuple of Move
        What this rank gives.
    """

    number: int
    source: tuple[int, ...]
    target: tuple[int, ...]
    dtype: np.dtype[Any]
    moves: tuple[Move, ...]


def moves_of(
    source: Layout, target: Layout, shape: tuple[int, ...], rank: int, size: int
) -> tuple[Move, ...]:
    """What a rank gives, to itself first; each needs to know the layouts only.

    Examples
    --------
    >>> from dask_redist.grids import Slab
    >>> for move in moves_of(Slab.X, Slab.Y, (2, 4), rank=1, size=2):
    ...     print(move.rank, move.target, move.source)
    1 (slice(1, 2, None), slice(0, 2, None)) (slice(0, 1, None), slice(2, 4, None))
    0 (slice(1, 2, None), slice(0, 2, None)) (slice(0, 1, None), slice(0, 2, None))
    """
    mine = source.box(rank, shape, size)
    boxes = [target.box(r, shape, size) for r in range(size)]  # what is wrong is so on all ranks
    holders = source.held_by(size).tolist() if isinstance(source, Replicated) else None
    found = []
    for k in range(size):  # each begins with itself: they do not all write to one at once
        to = (rank + k) % size
        if holders is not None and rank != _giver(to, holders):
            continue
        theirs = boxes[to]
        both = mine.intersection(theirs)
        if both is not None:
            found.append(Move(to, theirs.shape, _within(both, theirs), _within(both, mine)))
    return tuple(found)


def _giver(rank: int, holders: Sequence[int]) -> int:
    """Of those who hold everything, the one who gives a rank its box."""
    return rank if rank in holders else holders[rank % len(holders)]


def _within(both: Box, box: Box) -> Slices:
    """Where in a box what it has in common with another lies."""
    corners = zip(both.lower, both.upper, box.lower, strict=True)
    return tuple(slice(lower - start, upper - start) for lower, upper, start in corners)
