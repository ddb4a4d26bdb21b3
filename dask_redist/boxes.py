"""Boxes of indices, and chunk sizes as edges.

A *box* is a rectangle of global indices: ``lower`` included, ``upper`` excluded.  A chunked axis is
a row of sizes; its *edges* are 0 and the cumulative sums.  `check_tiling` says whether boxes cover
an array exactly once.  It never looks at single elements: boxes that overlap are found by a sweep
along one axis, and without overlaps the sizes alone tell whether there is a hole.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dask_redist.errors import LayoutError

__all__ = ["Box", "Chunks", "IntArray", "check_tiling", "edges"]

Chunks: TypeAlias = tuple[tuple[int, ...], ...]
"""Chunk sizes, one tuple an axis, as in `dask.array.Array.chunks`."""

IntArray: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, init=False)
class Box:
    """A rectangle of global indices, from ``lower`` up to but not including ``upper``.

    Parameters
    ----------
    lower, upper : sequence of int
        One index an axis.

    Raises
    ------
    LayoutError
        If the two have different lengths, or an upper index is below its lower one.

    Examples
    --------
    >>> box = Box([0, 2], [4, 5])
    >>> box.shape, box.size
    ((4, 3), 12)
    >>> box.intersection(Box((3, 0), (9, 3)))
    Box(lower=(3, 2), upper=(4, 3))
    """

    lower: tuple[int, ...]
    upper: tuple[int, ...]

    def __init__(self, lower: Sequence[int], upper: Sequence[int]) -> None:
        try:
            lower = tuple(operator.index(i) for i in lower)
            upper = tuple(operator.index(i) for i in upper)
        except TypeError as error:
            raise LayoutError(
                f"box from {lower!r} to {upper!r}: corners are sequences of integers"
            ) from error
        if len(lower) != len(upper):
            raise LayoutError(
                f"box from {lower} to {upper}: the corners have {len(lower)} and {len(upper)}"
                " indices; both need one an axis"
            )
        for axis, (low, high) in enumerate(zip(lower, upper, strict=True)):
            if high < low:
                raise LayoutError(
                    f"box from {lower} to {upper}: on axis {axis} the upper index {high} is below"
                    f" the lower {low}; the upper index is the first one outside the box"
                )
        object.__setattr__(self, "lower", lower)
        object.__setattr__(self, "upper", upper)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.lower)

    @property
    def shape(self) -> tuple[int, ...]:
        """Length along each axis."""
        return tuple(map(operator.sub, self.upper, self.lower))

    @property
    def size(self) -> int:
        """Number of elements; 1 for a box without axes."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the global array."""
        return tuple(map(slice, self.lower, self.upper))

    def intersection(self, other: Box) -> Box | None:
        """Return what both boxes hold, or None where they share no element."""
        if self.ndim != other.ndim:
            raise LayoutError(f"{self} and {other} have {self.ndim} and {other.ndim} axes")
        lower = tuple(map(max, self.lower, other.lower))
        upper = tuple(map(min, self.upper, other.upper))
        if all(map(operator.lt, lower, upper)):
            return Box(lower, upper)
        return None


def edges(chunks: Chunks) -> tuple[IntArray, ...]:
    """Return for each axis 0 and the cumulative sums of its chunk sizes.

    Parameters
    ----------
    chunks : tuple of tuple of int
        Chunk sizes, one tuple an axis.

    Returns
    -------
    tuple of ndarray of int64
        One array an axis, of length ``len(chunks[axis]) + 1``; chunk ``i`` is ``[e[i], e[i+1])``.

    Examples
    --------
    >>> edges(((3, 2), (4,)))
    (array([0, 3, 5]), array([0, 4]))
    """
    return tuple(
        np.concatenate(([0], np.cumsum(np.asarray(sizes, dtype=np.int64)))) for sizes in chunks
    )


def check_tiling(boxes: Sequence[Box], shape: Sequence[int]) -> None:
    """Check that boxes, one a rank, cover an array of this shape exactly once.

    Parameters
    ----------
    boxes : sequence of Box
        Box ``r`` belongs to rank ``r``; empty boxes hold nothing and are fine anywhere inside.
    shape : sequence of int
        The array's shape.

    Raises
    ------
    LayoutError
        Naming the two ranks whose boxes overlap and where, or the rank whose box is outside the
        array, or the first indices (in C order) that no box holds.

    Examples
    --------
    >>> check_tiling([Box((0,), (3,)), Box((2,), (4,))], (4,))
    Traceback (most recent call last):
        ...
    dask_redist.errors.LayoutError: the boxes of ranks 0 and 1 overlap from (2,) to (3,); ...
    """
    shape = tuple(shape)
    for rank, box in enumerate(boxes):
        if box.ndim != len(shape):
            raise LayoutError(
                f"the box of rank {rank} has {box.ndim} axes, the array has {len(shape)}: {box}"
            )
        if any(low < 0 for low in box.lower) or any(map(operator.gt, box.upper, shape)):
            raise LayoutError(f"the box of rank {rank} is outside the shape {shape}: {box}")
    held = np.array([rank for rank, box in enumerate(boxes) if box.size], dtype=np.int64)
    corners = (len(held), len(shape))
    lower = np.array([boxes[r].lower for r in held], dtype=np.int64).reshape(corners)
    upper = np.array([boxes[r].upper for r in held], dtype=np.int64).reshape(corners)
    _refuse_overlap(held, lower, upper)
    if sum(boxes[r].size for r in held) != math.prod(shape):
        hole = _first_hole(lower, upper, shape)
        raise LayoutError(
            f"no rank holds the element at {hole}; the boxes must cover all of shape {shape}"
        )


def _refuse_overlap(ranks: IntArray, lower: IntArray, upper: IntArray) -> None:
    """Raise for the first two boxes found that share elements (none of the boxes is empty)."""
    count, ndim = lower.shape
    if count < 2:
        return
    if ndim == 0:
        raise LayoutError(
            f"ranks {ranks[0]} and {ranks[1]} both hold the single element of a 0-d array"
        )
    # Sweep the axis with most starting points: fewest boxes stand beside each other along it.
    sweep = max(range(ndim), key=lambda axis: np.unique(lower[:, axis]).size)
    order = np.argsort(lower[:, sweep], kind="stable")
    ranks, lower, upper = ranks[order], lower[order], upper[order]
    ends = np.searchsorted(lower[:, sweep], upper[:, sweep])
    for i in range(count):
        near = slice(i + 1, int(ends[i]))
        low, high = np.maximum(lower[i], lower[near]), np.minimum(upper[i], upper[near])
        meets = (low < high).all(axis=1)
        if meets.any():
            j = int(meets.argmax())
            first, second = sorted((int(ranks[i]), int(ranks[i + 1 + j])))
            raise LayoutError(
                f"the boxes of ranks {first} and {second} overlap from {tuple(low[j].tolist())}"
                f" to {tuple(high[j].tolist())}; every element belongs to one rank"
            )


def _first_hole(lower: IntArray, upper: IntArray, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first indices, in C order, that none of these disjoint boxes holds.

    Between two neighbouring edges of axis 0 the boxes' cross-section stays the same, so the first
    interval whose cross-section is not full has the hole; the other axes follow by recursion.
    """
    if not shape:
        return ()
    steps = np.unique(np.concatenate((lower[:, 0], upper[:, 0], [0])))
    steps = steps[steps < shape[0]]
    section = np.prod(upper[:, 1:] - lower[:, 1:], axis=1, dtype=np.int64)
    change = np.zeros(len(steps) + 1, dtype=np.int64)
    np.add.at(change, np.searchsorted(steps, lower[:, 0]), section)
    np.add.at(change, np.searchsorted(steps, upper[:, 0]), -section)
    covered = np.cumsum(change)[: len(steps)]
    start = int(steps[(covered < math.prod(shape[1:])).argmax()])
    inside = (lower[:, 0] <= start) & (start < upper[:, 0])
    return (start, *_first_hole(lower[inside, 1:], upper[inside, 1:], shape[1:]))
