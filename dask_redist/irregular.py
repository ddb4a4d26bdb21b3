"""Layouts that are no even grid: cyclic, uneven, any boxes, and every rank holding everything.

`Boxes` need not line up.  Their chunks are then the coarsest rectilinear grid that refines them, so
that a rank may hold several chunks that together are its box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dask_redist.boxes import Box, Chunks, IntArray, check_tiling
from dask_redist.errors import LayoutError
from dask_redist.grids import GridLayout, Layout
from dask_redist.partition import (
    MAX_CHUNKS,
    Split,
    admit,
    check_axis,
    check_dims,
    check_grid,
    check_rank,
    integer,
    integers,
    refuse_many,
    split_cyclic,
    split_evenly,
    split_sizes,
)

_SHOWN = 8


@dataclass(frozen=True, repr=False, init=False)
class BlockCyclic(GridLayout):
    """Deal blocks of elements to a process grid in turn, as ScaLAPACK does.

    Parameters
    ----------
    grid : sequence of int
        Number of parts of each axis; the product is the number of ranks.
    block : sequence of int
        Elements of a block along each axis; the last block of an axis may be shorter.

    Examples
    --------
    >>> BlockCyclic((2,), (3,)).chunks((8,), ranks=2)
    ((3, 3, 2),)
    >>> BlockCyclic((2,), (3,)).owners((8,), ranks=2)
    array([0, 1, 0])
    >>> BlockCyclic((2,), (3,)).lshape_map((8,), ranks=2)
    array([[5],
           [3]])
    """

    grid: tuple[int, ...]
    block: tuple[int, ...]

    def __init__(self, grid: Sequence[int], block: Sequence[int]) -> None:
        object.__setattr__(self, "grid", integers(grid, "BlockCyclic grid", least=1))
        object.__setattr__(self, "block", integers(block, "BlockCyclic block", least=1))
        if len(self.grid) != len(self.block):
            raise LayoutError(
                f"{self!r}: grid and block have {len(self.grid)} and {len(self.block)} entries;"
                " both need one an axis"
            )

    def __repr__(self) -> str:
        return f"BlockCyclic({self.grid}, {self.block})"

    def _splits(self, shape: tuple[int, ...], ranks: int) -> tuple[Split, ...]:
        check_dims(self, len(self.grid), len(shape), "grid entries")
        check_grid(self, self.grid, ranks)
        return tuple(map(split_cyclic, shape, self.block, self.grid))

    def box(self, rank: int, shape: Sequence[int], ranks: int) -> Box:
        """Raise `LayoutError`: a rank holds several boxes."""
        raise LayoutError(
            f"{self!r}: rank {rank} holds several boxes; use chunks() and owners() for the boxes,"
            " shape() or lshape_map() for the local shape"
        )

    def spell(self, shape: Sequence[int], ranks: int) -> str:
        """Return the name and, in parentheses, block and grid."""
        self.check(shape, ranks)
        block, grid = (" x ".join(map(str, row)) for row in (self.block, self.grid))
        return f"{self!r} (blocks of {block or 1} dealt to {grid or 1} ranks)"


@dataclass(frozen=True, repr=False, init=False)
class Uneven(GridLayout):
    """Split one axis over all ranks in parts of given sizes; the others stay whole.

    Parameters
    ----------
    axis : int
        The axis to split; negative axes count from the end.
    sizes : sequence of int
        Elements of each rank along that axis, one entry a rank; 0 leaves a rank empty.

    Examples
    --------
    >>> layout = Uneven(0, (5, 0, 2))
    >>> layout.chunks((7, 4), ranks=3)
    ((5, 2), (4,))
    >>> layout.owners((7, 4), ranks=3).ravel()
    array([0, 2])
    """

    axis: int
    sizes: tuple[int, ...]

    def __init__(self, axis: int, sizes: Sequence[int]) -> None:
        object.__setattr__(self, "axis", integer(axis, "Uneven axis"))
        object.__setattr__(self, "sizes", integers(sizes, "Uneven sizes", least=0))

    def __repr__(self) -> str:
        return f"Uneven({self.axis}, {_brief(self.sizes)})"

    def _splits(self, shape: tuple[int, ...], ranks: int) -> tuple[Split, ...]:
        split = check_axis(self, self.axis, len(shape))
        if len(self.sizes) != ranks:
            raise LayoutError(
                f"{self!r} has {len(self.sizes)} sizes, but there are {ranks} ranks; it needs one"
                " size a rank"
            )
        if sum(self.sizes) != shape[split]:
            raise LayoutError(
                f"{self!r}: the sizes sum to {sum(self.sizes)}, but axis {split} has"
                f" {shape[split]} elements"
            )
        sizes = np.array(self.sizes, dtype=np.int64)
        return tuple(
            split_sizes(sizes) if axis == split else split_evenly(length, 1)
            for axis, length in enumerate(shape)
        )

    def spell(self, shape: Sequence[int], ranks: int) -> str:
        """Return the name and, in parentheses, the axis that is split and the sizes."""
        self.check(shape, ranks)
        axis = check_axis(self, self.axis, len(shape))
        return f"{self!r} (axis {axis} split over {ranks}: {min(self.sizes)} to {max(self.sizes)})"


@dataclass(frozen=True, repr=False, init=False)
class Boxes(Layout):
    """Give each rank a box of its own choice; together they hold every element once.

    Parameters
    ----------
    boxes : sequence of Box
        One box a rank; a box may be empty.

    Examples
    --------
    >>> layout = Boxes([Box((0, 0), (2, 3)), Box((2, 0), (4, 1)), Box((2, 1), (4, 3))])
    >>> layout.chunks((4, 3), ranks=3)
    ((2, 2), (1, 2))
    >>> layout.owners((4, 3), ranks=3)
    array([[0, 0],
           [1, 2]])
    """

    boxes: tuple[Box, ...]

    def __init__(self, boxes: Sequence[Box]) -> None:
        try:
            boxes = tuple(boxes)
        except TypeError as error:
            raise LayoutError(f"Boxes takes a sequence of Box, not {boxes!r}") from error
        for rank, box in enumerate(boxes):
            if not isinstance(box, Box):
                raise LayoutError(f"entry {rank} of Boxes must be a Box(lower, upper), not {box!r}")
        object.__setattr__(self, "boxes", boxes)

    def __repr__(self) -> str:
        return f"Boxes({_brief(self.boxes, '[]')})"

    def check(self, shape: Sequence[int], ranks: int) -> None:
        """Raise `LayoutError` unless there is one box a rank and they hold each element once."""
        self._check_count(ranks)
        check_tiling(self.boxes, admit(shape, ranks)[0])

    def _check_count(self, ranks: int) -> None:
        if len(self.boxes) != ranks:
            raise LayoutError(
                f"Boxes has {len(self.boxes)} boxes, but there are {ranks} ranks; it needs one box"
                " a rank"
            )

    def _edges(self, shape: Sequence[int], ranks: int) -> list[IntArray]:
        """Return the refined grid's edges along each axis."""
        self.check(shape, ranks)
        held = [box for box in self.boxes if box.size]
        return [
            np.unique([0, length] + [at for b in held for at in (b.lower[axis], b.upper[axis])])
            for axis, length in enumerate(shape)
        ]

    def chunks(self, shape: Sequence[int], ranks: int, max_chunks: int = MAX_CHUNKS) -> Chunks:
        """Return the coarsest chunks that refine the boxes; see `Layout.chunks`."""
        edges = self._edges(shape, ranks)
        refuse_many(self, [max(1, len(row) - 1) for row in edges], max_chunks)
        return tuple(tuple(np.diff(row).tolist()) or (0,) for row in edges)

    def owners(self, shape: Sequence[int], ranks: int, max_chunks: int = MAX_CHUNKS) -> IntArray:
        """Return the rank of each chunk; see `Layout.owners`."""
        edges = self._edges(shape, ranks)
        numblocks = [max(1, len(row) - 1) for row in edges]
        refuse_many(self, numblocks, max_chunks)
        owners = np.zeros(numblocks, dtype=np.int64)
        for rank, box in enumerate(self.boxes):
            if box.size:
                ends = zip(edges, box.lower, box.upper, strict=True)
                owners[tuple(slice(*np.searchsorted(row, pair)) for row, *pair in ends)] = rank
        return owners

    def box(self, rank: int, shape: Sequence[int], ranks: int) -> Box:
        """Return the box of `rank` as it was given."""
        self._check_count(ranks)
        check_rank(rank, ranks)
        check_dims(self, self.boxes[rank].ndim, len(shape))
        return self.boxes[rank]

    def lshape_map(self, shape: Sequence[int], ranks: int) -> IntArray:
        """Return every rank's local shape; see `Layout.lshape_map`."""
        self.check(shape, ranks)
        return np.array([b.shape for b in self.boxes], dtype=np.int64).reshape(ranks, len(shape))

    def spell(self, shape: Sequence[int], ranks: int) -> str:
        """Return the name and, in parentheses, how many boxes hold how many elements."""
        self.check(shape, ranks)
        sizes = [box.size for box in self.boxes]
        return f"Boxes ({ranks} boxes of {min(sizes)} to {max(sizes)} elements, one a rank)"


@dataclass(frozen=True, repr=False, init=False)
class Replicated(Layout):
    """Let every rank hold the whole array, as one chunk.

    Parameters
    ----------
    ranks : sequence of int, optional
        These ranks only, the others hold nothing; default: all.

    Examples
    --------
    >>> Replicated().chunks((4, 3), ranks=2), Replicated().box(1, (4, 3), ranks=2).shape
    (((4,), (3,)), (4, 3))
    >>> Replicated([0, 2]).lshape_map((4, 3), ranks=3).tolist()
    [[4, 3], [0, 0], [4, 3]]
    """

    ranks: tuple[int, ...] | None

    def __init__(self, ranks: Sequence[int] | None = None) -> None:
        if ranks is not None:
            ranks = integers(ranks, "Replicated ranks", least=0)
            if not ranks or len(set(ranks)) < len(ranks):
                raise LayoutError(f"Replicated ranks {ranks}: name at least one, and each once")
        object.__setattr__(self, "ranks", ranks and tuple(sorted(ranks)))

    def __repr__(self) -> str:
        return f"Replicated({'' if self.ranks is None else _brief(self.ranks)})"

    def held_by(self, ranks: int) -> IntArray:
        """Return the ranks that hold a copy."""
        held = range(ranks) if self.ranks is None else self.ranks
        return np.array(held, dtype=np.int64)

    def check(self, shape: Sequence[int], ranks: int) -> None:
        """Raise `LayoutError` for a shape or a number of ranks that cannot be."""
        admit(shape, ranks)
        for rank in self.ranks or ():
            check_rank(rank, ranks)

    def chunks(self, shape: Sequence[int], ranks: int, max_chunks: int = MAX_CHUNKS) -> Chunks:
        """Return one chunk; see `Layout.chunks`."""
        self.check(shape, ranks)
        return tuple((length,) for length in admit(shape, ranks)[0])

    def owners(self, shape: Sequence[int], ranks: int, max_chunks: int = MAX_CHUNKS) -> IntArray:
        """Return the first rank that holds the one chunk; every other one holds a copy."""
        self.check(shape, ranks)
        return np.full((1,) * len(shape), self.held_by(ranks)[0], dtype=np.int64)

    def box(self, rank: int, shape: Sequence[int], ranks: int) -> Box:
        """Return the whole array's box, or an empty one."""
        self.check(shape, ranks)
        check_rank(rank, ranks)
        lengths = admit(shape, ranks)[0]
        lower = (0,) * len(lengths)
        return Box(lower, lengths if rank in self.held_by(ranks) else lower)

    def lshape_map(self, shape: Sequence[int], ranks: int) -> IntArray:
        """Return the whole shape for every rank that holds it; see `Layout.lshape_map`."""
        self.check(shape, ranks)
        shapes = np.zeros((ranks, len(shape)), dtype=np.int64)
        shapes[self.held_by(ranks)] = shape
        return shapes

    def spell(self, shape: Sequence[int], ranks: int) -> str:
        """Return the name and, in parentheses, on how many ranks the copies are."""
        self.check(shape, ranks)
        return f"{self!r} (whole on each of {len(self.held_by(ranks))})"


def _brief(row: Sequence[object], brackets: str = "()") -> str:
    """Write a long sequence with its middle left out."""
    shown = [*map(repr, row[:_SHOWN])]
    if len(row) > _SHOWN:
        shown[_SHOWN - 1 :] = ["...", f"{row[-1]!r}"]
    comma = "," if len(row) == 1 and brackets == "()" else ""
    return f"{brackets[0]}{', '.join(shown)}{comma}{brackets[1]}"
