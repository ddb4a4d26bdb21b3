"""Layouts that split each axis by itself over a grid of ranks.

A layout says which part of an array each rank holds, for any shape and any number of ranks.  Most
split every axis on its own: the axis falls into chunks, each chunk has a coordinate in the process
grid, and the rank of a chunk is the C-order index of its coordinates.  `Slab` and `Pencil` are
grids with a name; `Block` is any grid.

An axis of ``S`` elements over ``P`` parts gives the first ``S % P`` parts one element more
(`numpy.array_split`).  Where ``P`` exceeds ``S`` the surplus ranks hold nothing, and the array has
no zero-size chunk (an axis of length 0 has the one chunk 0).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dask_redist.boxes import Box, Chunks, IntArray
from dask_redist.errors import LayoutError
from dask_redist.partition import (
    MAX_CHUNKS,
    Split,
    admit,
    check_axis,
    check_dims,
    check_grid,
    check_rank,
    describe,
    integer,
    integers,
    refuse_many,
    split_evenly,
    square_grid,
)


class Layout(ABC):
    """Which part of an array each rank holds.

    Layouts are small values: frozen, hashable, comparable, picklable.  They know no array; every
    method takes the array's ``shape`` and the number of ``ranks``, and raises `LayoutError` where
    the layout does not fit them.
    """

    @abstractmethod
    def check(self, shape: Sequence[int], ranks: int) -> None:
        """Raise `LayoutError`, naming the value and what would be right, unless all fits."""

    @abstractmethod
    def chunks(self, shape: Sequence[int], ranks: int, max_chunks: int = MAX_CHUNKS) -> Chunks:
        """Return the chunk sizes, one tuple an axis, for use as ``chunks=`` of a Dask array.

        No chunk has size zero, except that an axis of length 0 has the one chunk 0.  More than
        `max_chunks` chunks are refused with a `LayoutError` that has the number.
        """

    @abstractmethod
    def owners(self, shape: Sequence[int], ranks: int, max_chunks: int = MAX_CHUNKS) -> IntArray:
        """Return the rank of each chunk: int64, one entry a chunk, shaped like the chunk grid."""

    @abstractmethod
    def box(self, rank: int, shape: Sequence[int], ranks: int) -> Box:
        """Return the box of global indices that `rank` holds; an empty one for a surplus rank."""

    @abstractmethod
    def lshape_map(self, shape: Sequence[int], ranks: int) -> IntArray:
        """Return every rank's local shape: int64, ``(ranks, ndim)``, row ``r`` for rank ``r``."""

    @abstractmethod
    def spell(self, shape: Sequence[int], ranks: int) -> str:
        """Return the layout's name and, in parentheses, what it does to this shape."""

    def shape(self, rank: int, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
        """Return the local shape of `rank`, in elements."""
        check_rank(rank, ranks)
        return tuple(self.lshape_map(shape, ranks)[rank].tolist())


class GridLayout(Layout):
    """A layout that splits every axis by itself; see the module's text."""

    @abstractmethod
    def _splits(self, shape: tuple[int, ...], ranks: int) -> tuple[Split, ...]:
        """Return how each axis is cut, or raise `LayoutError`."""

    def check(self, shape: Sequence[int], ranks: int) -> None:
        """Raise `LayoutError`, naming the value and what would be right, unless all fits."""
        self._splits(*admit(shape, ranks))

    def chunks(self, shape: Sequence[int], ranks: int, max_chunks: int = MAX_CHUNKS) -> Chunks:
        """Return the chunk sizes, one tuple an axis; see `Layout.chunks`."""
        splits = self._splits(*admit(shape, ranks))
        refuse_many(self, [len(split.sizes) for split in splits], max_chunks)
        return tuple(tuple(split.sizes.tolist()) for split in splits)

    def owners(self, shape: Sequence[int], ranks: int, max_chunks: int = MAX_CHUNKS) -> IntArray:
        """Return the rank of each chunk; see `Layout.owners`."""
        splits = self._splits(*admit(shape, ranks))
        refuse_many(self, [len(split.sizes) for split in splits], max_chunks)
        owners = np.zeros((1,) * len(splits), dtype=np.int64)
        for axis, split in enumerate(splits):
            along = [1] * len(splits)
            along[axis] = -1
            owners = owners * split.parts + split.coords.reshape(along)
        return owners

    def box(self, rank: int, shape: Sequence[int], ranks: int) -> Box:
        """Return the box of global indices that `rank` holds; see `Layout.box`."""
        splits = self._splits(*admit(shape, ranks))
        place = self._place(rank, ranks, splits)
        lengths = [split.lengths for split in splits]
        lower = [int(sizes[:at].sum()) for at, sizes in zip(place, lengths, strict=True)]
        upper = [int(sizes[: at + 1].sum()) for at, sizes in zip(place, lengths, strict=True)]
        return Box(tuple(lower), tuple(upper))

    def shape(self, rank: int, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
        """Return the local shape of `rank`, in elements."""
        splits = self._splits(*admit(shape, ranks))
        place = self._place(rank, ranks, splits)
        return tuple(int(s.lengths[at]) for at, s in zip(place, splits, strict=True))

    def lshape_map(self, shape: Sequence[int], ranks: int) -> IntArray:
        """Return every rank's local shape; see `Layout.lshape_map`."""
        splits = self._splits(*admit(shape, ranks))
        coords = np.unravel_index(np.arange(ranks), tuple(split.parts for split in splits) or (1,))
        table = np.empty((ranks, len(splits)), dtype=np.int64)
        for axis, (split, at) in enumerate(zip(splits, coords, strict=False)):
            table[:, axis] = split.lengths[at]
        return table

    def spell(self, shape: Sequence[int], ranks: int) -> str:
        """Return the name and, in parentheses, which axes are split and which stay whole."""
        parts = [split.parts for split in self._splits(*admit(shape, ranks))]
        whole = [axis for axis, count in enumerate(parts) if count == 1]
        return f"{self!r} ({describe(parts, whole)})"

    @staticmethod
    def _place(rank: int, ranks: int, splits: Sequence[Split]) -> tuple[int, ...]:
        """Return the coordinates of `rank` in the process grid."""
        check_rank(rank, ranks)
        place = []
        for split in reversed(splits):
            rank, at = divmod(rank, split.parts)
            place.append(at)
        return tuple(reversed(place))


@dataclass(frozen=True, repr=False, init=False)
class Block(GridLayout):
    """Split every axis evenly over a process grid.

    Parameters
    ----------
    grid : sequence of int
        Number of parts of each axis; the product is the number of ranks.

    Examples
    --------
    >>> Block((2, 2)).chunks((5, 4), ranks=4)
    ((3, 2), (2, 2))
    >>> Block((2, 2)).box(3, (5, 4), ranks=4)
    Box(lower=(3, 2), upper=(5, 4))
    """

    grid: tuple[int, ...]

    def __init__(self, grid: Sequence[int]) -> None:
        object.__setattr__(self, "grid", integers(grid, "Block grid", least=1))

    def __repr__(self) -> str:
        return f"Block({self.grid})"

    def _splits(self, shape: tuple[int, ...], ranks: int) -> tuple[Split, ...]:
        check_dims(self, len(self.grid), len(shape), "grid entries")
        check_grid(self, self.grid, ranks)
        return tuple(map(split_evenly, shape, self.grid))


@dataclass(frozen=True, repr=False, init=False)
class Slab(GridLayout):
    """Split one axis over all ranks; the others stay whole.

    Parameters
    ----------
    axis : int
        The axis to split; negative axes count from the end.  ``Slab.X``, ``Slab.Y`` and ``Slab.Z``
        are axes 0, 1 and 2.

    Examples
    --------
    >>> Slab.X.chunks((10, 6), ranks=4)
    ((3, 3, 2, 2), (6,))
    >>> Slab.X.spell((10, 6), ranks=4)
    'Slab.X (axis 0 split over 4)'
    """

    axis: int
    X: ClassVar[Slab]
    Y: ClassVar[Slab]
    Z: ClassVar[Slab]

    def __init__(self, axis: int) -> None:
        object.__setattr__(self, "axis", integer(axis, "Slab axis"))

    def __repr__(self) -> str:
        return f"Slab.{'XYZ'[self.axis]}" if self.axis in (0, 1, 2) else f"Slab({self.axis})"

    def _splits(self, shape: tuple[int, ...], ranks: int) -> tuple[Split, ...]:
        split = check_axis(self, self.axis, len(shape))
        return tuple(
            split_evenly(size, ranks if axis == split else 1) for axis, size in enumerate(shape)
        )

    def spell(self, shape: Sequence[int], ranks: int) -> str:
        """Return the name and, in parentheses, the axis that is split."""
        self.check(shape, ranks)
        return f"{self!r} (axis {check_axis(self, self.axis, len(shape))} split over {ranks})"


@dataclass(frozen=True, repr=False, init=False)
class Pencil(GridLayout):
    """Keep one axis whole and split the others over a process grid.

    Parameters
    ----------
    axis : int
        The axis that stays whole; negative axes count from the end.  ``Pencil.X``, ``Pencil.Y``
        and ``Pencil.Z`` are axes 0, 1 and 2.
    grid : sequence of int, optional
        Number of parts of each other axis, in order of the axes; the product is the number of
        ranks.  By default as square as possible, the largest factor on the lowest axis.

    Examples
    --------
    >>> Pencil.X.chunks((4, 6, 8), ranks=4)
    ((4,), (3, 3), (4, 4))
    >>> Pencil.X.spell((4, 6, 8), ranks=4)
    'Pencil.X (axis 0 whole; axes 1, 2 split 2 x 2)'
    """

    axis: int
    grid: tuple[int, ...] | None = None
    X: ClassVar[Pencil]
    Y: ClassVar[Pencil]
    Z: ClassVar[Pencil]

    def __init__(self, axis: int, grid: Sequence[int] | None = None) -> None:
        object.__setattr__(self, "axis", integer(axis, "Pencil axis"))
        found = None if grid is None else integers(grid, "Pencil grid", least=1)
        object.__setattr__(self, "grid", found)

    def __repr__(self) -> str:
        if self.grid is not None:
            return f"Pencil({self.axis}, grid={self.grid})"
        return f"Pencil.{'XYZ'[self.axis]}" if self.axis in (0, 1, 2) else f"Pencil({self.axis})"

    def _splits(self, shape: tuple[int, ...], ranks: int) -> tuple[Split, ...]:
        whole = check_axis(self, self.axis, len(shape))
        if len(shape) < 2:
            raise LayoutError(
                f"{self!r} needs an array of at least 2 dimensions, not 1; use Slab(0)"
            )
        grid = square_grid(ranks, len(shape) - 1) if self.grid is None else self.grid
        if len(grid) != len(shape) - 1:
            raise LayoutError(
                f"{self!r} has a grid of {len(grid)} entries; an array of {len(shape)} dimensions"
                f" has {len(shape) - 1} axes to split"
            )
        check_grid(self, grid, ranks)
        return tuple(map(split_evenly, shape, (*grid[:whole], 1, *grid[whole:])))

    def spell(self, shape: Sequence[int], ranks: int) -> str:
        """Return the name and, in parentheses, the whole axis and the split ones."""
        parts = [split.parts for split in self._splits(*admit(shape, ranks))]
        return f"{self!r} ({describe(parts, [check_axis(self, self.axis, len(shape))])})"


Slab.X, Slab.Y, Slab.Z = Slab(0), Slab(1), Slab(2)
Pencil.X, Pencil.Y, Pencil.Z = Pencil(0), Pencil(1), Pencil(2)
