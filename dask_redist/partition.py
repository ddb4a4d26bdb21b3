"""How one axis falls into chunks and parts, and the checks that all layouts share.

A `Split` is one axis cut into chunks, each with a coordinate among the parts of that axis.  The
process grid is the product of the axes' parts.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dask_redist.boxes import IntArray
from dask_redist.errors import LayoutError

MAX_CHUNKS = 10_000_000


class Split(NamedTuple):
    """One axis cut into chunks: their sizes, their coordinates, and how many parts there are."""

    sizes: IntArray
    coords: IntArray
    parts: int

    @property
    def lengths(self) -> IntArray:
        """Elements of each part, zero for the surplus ones."""
        lengths = np.zeros(self.parts, dtype=np.int64)
        np.add.at(lengths, self.coords, self.sizes)
        return lengths


def split_sizes(sizes: IntArray) -> Split:
    """Return one chunk a part, of these sizes; parts of size zero have no chunk."""
    coords = np.flatnonzero(sizes)
    if not coords.size:  # an axis of length 0 keeps one chunk, so that the array has chunks at all
        coords = np.zeros(1, dtype=np.int64)
    return Split(sizes[coords], coords, len(sizes))


def split_evenly(length: int, parts: int) -> Split:
    """Return the axis in `parts` chunks, the first ``length % parts`` one element longer."""
    sizes = np.full(parts, length // parts, dtype=np.int64)
    sizes[: length % parts] += 1
    return split_sizes(sizes)


def split_cyclic(length: int, block: int, parts: int) -> Split:
    """Return the axis in chunks of `block` elements, dealt to the parts in turn."""
    if parts == 1:  # neighbours of one part are one chunk
        return split_evenly(length, 1)
    sizes = np.full(max(1, -(-length // block)), block, dtype=np.int64)
    sizes[-1] = length - block * (len(sizes) - 1)
    return Split(sizes, np.arange(len(sizes), dtype=np.int64) % parts, parts)


@lru_cache(maxsize=256)
def square_grid(ranks: int, ndim: int) -> tuple[int, ...]:
    """Return `ndim` factors of `ranks`, as equal as possible, the largest first.

    Examples
    --------
    >>> square_grid(12, 2), square_grid(7, 3), square_grid(72, 2)
    ((4, 3), (7, 1, 1), (9, 8))
    """
    if ndim == 1:
        return (ranks,)
    for first in range(1, ranks + 1):
        if ranks % first == 0 and first**ndim >= ranks:
            rest = square_grid(ranks // first, ndim - 1)
            if rest[0] <= first:
                return (first, *rest)
    raise ValueError(f"{ranks} ranks over {ndim} axes: both must be at least 1")


def integer(value: object, what: str) -> int:
    """Return `value` as an int, or raise `LayoutError` naming `what` it is."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise LayoutError(f"{what} must be an integer, not {value!r}") from error


def integers(values: Iterable[object], what: str, least: int) -> tuple[int, ...]:
    """Return `values` as a tuple of int, none below `least`, or raise `LayoutError`."""
    try:
        found = tuple(operator.index(value) for value in values)  # type: ignore[arg-type]
    except TypeError as error:
        raise LayoutError(f"{what} must be a sequence of integers, not {values!r}") from error
    if min(found, default=least) < least:
        raise LayoutError(f"{what} {found}: every entry must be at least {least}")
    return found


def admit(shape: Sequence[int], ranks: int) -> tuple[tuple[int, ...], int]:
    """Return shape and number of ranks as ints, or raise `LayoutError`."""
    ranks = integer(ranks, "the number of ranks")
    if ranks < 1:
        raise LayoutError(f"the number of ranks must be at least 1, not {ranks}")
    return integers(shape, "the shape", least=0), ranks


def check_rank(rank: int, ranks: int) -> None:
    """Raise `LayoutError` for a rank that does not exist."""
    if not 0 <= rank < ranks:
        raise LayoutError(f"there is no rank {rank}; ranks are 0 to {ranks - 1}")


def check_axis(layout: object, axis: int, ndim: int) -> int:
    """Return the axis counted from the front, or raise `LayoutError`."""
    if ndim == 0:
        raise LayoutError(f"{layout!r} needs an axis, but the array has 0 dimensions")
    if not -ndim <= axis < ndim:
        raise LayoutError(
            f"{layout!r}: axis {axis} is out of range for an array of {ndim} dimensions;"
            f" its axes are 0 to {ndim - 1}"
        )
    return axis % ndim


def check_dims(layout: object, found: int, ndim: int, what: str = "dimensions") -> None:
    """Raise `LayoutError` where a layout is made for arrays of other dimensions."""
    if found != ndim:
        raise LayoutError(
            f"{layout!r} has {found} {what}, but an array of {ndim} dimensions needs {ndim}"
        )


def check_grid(layout: object, grid: Sequence[int], ranks: int) -> None:
    """Raise `LayoutError` unless the grid is one for this number of ranks."""
    if math.prod(grid) != ranks:
        product = " x ".join(map(str, grid)) or "()"
        raise LayoutError(
            f"{layout!r}: a grid of {product} is for {math.prod(grid)} ranks, but there are"
            f" {ranks}; the grid's product must be the number of ranks"
        )


def refuse_many(layout: object, numblocks: Sequence[int], max_chunks: int) -> None:
    """Raise `LayoutError` for more chunks than allowed."""
    count = math.prod(numblocks)
    if count > max_chunks:
        raise LayoutError(
            f"{layout!r} needs {count} chunks ({' x '.join(map(str, numblocks))}), more than the"
            f" {max_chunks} allowed; use larger or more regular boxes or blocks"
        )


def describe(parts: Sequence[int], whole: Sequence[int]) -> str:
    """Say in words which axes are whole and which are split over how many parts."""
    split = [axis for axis in range(len(parts)) if axis not in whole]
    words = []
    if whole:
        words.append(f"{_name_axes(whole)} whole")
    if len(split) == 1:
        words.append(f"{_name_axes(split)} split over {parts[split[0]]}")
    elif split:
        words.append(f"{_name_axes(split)} split {' x '.join(str(parts[a]) for a in split)}")
    return "; ".join(words) or "no axes"


def _name_axes(axes: Sequence[int]) -> str:
    return f"{'axis' if len(axes) == 1 else 'axes'} {', '.join(map(str, axes))}"
