"""The overlap of two chunkings of one shape: which pieces go from which chunk to which.

`Overlap` is all a redistribution needs to know of the two chunkings; with the owners of the chunks
it says what a rank sends and receives (`rank_plan`) and what all ranks exchange (`traffic`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import numpy.typing as npt

from dask_redist.boxes import Chunks, IntArray, edges
from dask_redist.errors import LayoutError
from dask_redist.parts import Part, Parts
from dask_redist.pieces import AxisPieces, Piece, Pieces, all_pieces, pieces_of

__all__ = [
    "Overlap",
    "Part",
    "Parts",
    "Piece",
    "PieceTable",
    "Pieces",
    "RankPlan",
    "rank_plan",
    "traffic",
]


class Overlap:
    """The map between the input chunks and the output chunks of one array.

    Parameters
    ----------
    chunks_in, chunks_out : tuple of tuple of int
        Chunk sizes, one tuple an axis; both sum to the same shape.
    together : bool
        Whether all parts are one.

    Raises
    ------
    LayoutError
        If the two are chunkings of different shapes, or an axis has no chunk.

    Examples
    --------
    >>> overlap = Overlap(((4, 4),), ((3, 3, 2),))
    >>> for piece in overlap.pieces_of_input((0,)):
    ...     print(piece.chunk, piece.source, piece.target, piece.size)
    (0,) (slice(0, 3, None),) (slice(0, 3, None),) 3
    (1,) (slice(3, 4, None),) (slice(0, 1, None),) 1
    """

    def __init__(self, chunks_in: Chunks, chunks_out: Chunks, together: bool = False) -> None:
        for side, chunks in (("input", chunks_in), ("output", chunks_out)):
            if any(not sizes for sizes in chunks):
                axis = [len(sizes) for sizes in chunks].index(0)
                raise LayoutError(
                    f"axis {axis} of the {side} has no chunk; an axis of length 0 has chunks (0,)"
                )
        shape_in, shape_out = (tuple(map(sum, chunks)) for chunks in (chunks_in, chunks_out))
        if shape_in != shape_out:
            raise LayoutError(
                f"input chunks of shape {shape_in} and output chunks of shape {shape_out};"
                " both must be chunkings of one shape"
            )
        self.chunks_in, self.chunks_out = chunks_in, chunks_out
        self.together = together
        self.shape: tuple[int, ...] = shape_in
        self.axes = tuple(map(AxisPieces, edges(chunks_in), edges(chunks_out)))

    def __reduce__(self) -> tuple[type[Overlap], tuple[Chunks, Chunks, bool]]:
        return Overlap, (self.chunks_in, self.chunks_out, self.together)

    def __len__(self) -> int:
        """Return the number of pieces."""
        return math.prod(map(len, self.axes))

    @property
    def numblocks_in(self) -> tuple[int, ...]:
        """Input chunks along each axis."""
        return tuple(map(len, self.chunks_in))

    @property
    def numblocks_out(self) -> tuple[int, ...]:
        """Output chunks along each axis."""
        return tuple(map(len, self.chunks_out))

    @cached_property
    def parts(self) -> Parts:
        """The connected components, or all of them together; see `Parts`."""
        edges_in, edges_out = [a.edges_in for a in self.axes], [a.edges_out for a in self.axes]
        return Parts(edges_in, edges_out, self.together)

    def pieces_of_input(self, index: Sequence[int]) -> Pieces:
        """Return the pieces of one input chunk; `Piece.chunk` is the output chunk."""
        return Pieces(self.axes, index, of_input=True)

    def pieces_of_output(self, index: Sequence[int]) -> Pieces:
        """Return the pieces of one output chunk; `Piece.chunk` is the input chunk."""
        return Pieces(self.axes, index, of_input=False)

    def touched_inputs(self, out_indices: Iterable[Sequence[int]]) -> set[tuple[int, ...]]:
        """Return the indices of the input chunks that overlap these output chunks.

        Examples
        --------
        >>> sorted(Overlap(((4, 4),), ((3, 3, 2),)).touched_inputs([(1,), (2,)]))
        [(0,), (1,)]
        """
        wanted = {tuple(index) for index in out_indices}
        if not wanted:
            return set()
        columns = [sorted(set(column)) for column in zip(*wanted, strict=True)]
        if len(wanted) == math.prod(map(len, columns)):
            return set(product(*map(self._touched_along, self.axes, columns)))
        # Not a product: one product for each set of last coordinates with the same others.
        rows: dict[tuple[int, ...], list[int]] = {}
        for index in wanted:
            rows.setdefault(index[:-1], []).append(index[-1])
        touched: set[tuple[int, ...]] = set()
        for lead, last in rows.items():
            sides = [[i] for i in lead] + [last]
            touched.update(product(*map(self._touched_along, self.axes, sides)))
        return touched

    @staticmethod
    def _touched_along(axis: AxisPieces, outputs: list[int]) -> set[int]:
        of_out, inputs = axis.ranges[1], axis.columns[0]
        return {i for j in outputs for i in inputs[of_out[j] : of_out[j + 1]]}


@dataclass(frozen=True)
class PieceTable:
    """Pieces as columns: flat input chunk, flat output chunk, the other rank, elements."""

    inputs: IntArray
    outputs: IntArray
    peers: IntArray
    elements: IntArray

    def __len__(self) -> int:
        return len(self.peers)

    @property
    def total(self) -> int:
        """Elements of all pieces together."""
        return int(self.elements.sum())


@dataclass(frozen=True)
class RankPlan:
    """What one rank does in a redistribution: pieces sent, pieces received, elements kept.

    ``sent`` and ``received`` hold only pieces of other ranks; ``kept`` counts the elements that
    stay on this one.
    """

    rank: int
    sent: PieceTable
    received: PieceTable
    kept: int

    @property
    def moved(self) -> int:
        """Elements that leave this rank."""
        return self.sent.total

    @property
    def peers_sent(self) -> IntArray:
        """Ranks that get something from this one, ascending."""
        return np.unique(self.sent.peers)

    @property
    def peers_received(self) -> IntArray:
        """Ranks that this one gets something from, ascending."""
        return np.unique(self.received.peers)


def rank_plan(
    overlap: Overlap, owners_in: npt.ArrayLike, owners_out: npt.ArrayLike, rank: int
) -> RankPlan:
    """Return what one rank sends, receives and keeps.

    Parameters
    ----------
    overlap : Overlap
        The two chunkings.
    owners_in, owners_out : array_like of int
        The rank of each chunk, shaped like the chunk grids; pieces of a chunk whose owner is -1
        (unknown) are left out.
    rank : int
        The rank.

    Returns
    -------
    RankPlan
        Time and memory grow with the pieces of this rank, not with those of all.
    """
    ranks_in = flat_owners(owners_in, overlap.numblocks_in, "input")
    ranks_out = flat_owners(owners_out, overlap.numblocks_out, "output")
    inputs, outputs, elements = pieces_of(
        overlap.axes, np.flatnonzero(ranks_in == rank), of_input=True
    )
    peers = ranks_out[outputs]
    kept = int(elements[peers == rank].sum())
    sent = _table((peers >= 0) & (peers != rank), inputs, outputs, peers, elements)
    inputs, outputs, elements = pieces_of(
        overlap.axes, np.flatnonzero(ranks_out == rank), of_input=False
    )
    peers = ranks_in[inputs]
    received = _table((peers >= 0) & (peers != rank), inputs, outputs, peers, elements)
    return RankPlan(rank, sent, received, kept)


def _table(keep: npt.NDArray[np.bool_], *columns: IntArray) -> PieceTable:
    return PieceTable(*(column[keep] for column in columns))


def traffic(
    overlap: Overlap, owners_in: npt.ArrayLike, owners_out: npt.ArrayLike, ranks: int
) -> IntArray:
    """Return how many elements each rank has for each other one.

    Parameters
    ----------
    overlap : Overlap
        The two chunkings.
    owners_in, owners_out : array_like of int
        The rank of each chunk, shaped like the chunk grids; chunks of owner -1 are left out.
    ranks : int
        The number of ranks.

    Returns
    -------
    ndarray of int64, (ranks, ranks)
        Row: the rank that has the elements; column: the rank that gets them.  The diagonal stays.

    Examples
    --------
    >>> traffic(Overlap(((4, 4),), ((3, 5),)), [0, 1], [0, 1], ranks=2)
    array([[3, 1],
           [0, 4]])
    """
    ranks_in = flat_owners(owners_in, overlap.numblocks_in, "input", ranks)
    ranks_out = flat_owners(owners_out, overlap.numblocks_out, "output", ranks)
    return count_elements(overlap, ranks_in, ranks_out, (ranks, ranks))


def count_elements(
    overlap: Overlap, rows: IntArray, columns: IntArray, shape: tuple[int, int]
) -> IntArray:
    """Return a matrix of elements, given each input chunk's row and each output chunk's column.

    Chunks whose row or column is negative are left out.
    """
    table = np.zeros(shape, dtype=np.int64)
    complete = not ((rows < 0).any() or (columns < 0).any())
    for inputs, outputs, elements in all_pieces(overlap.axes):
        row, column = rows[inputs], columns[outputs]
        if not complete:
            known = (row >= 0) & (column >= 0)
            row, column, elements = row[known], column[known], elements[known]
        np.add.at(table.reshape(-1), row * shape[1] + column, elements)
    return table


def flat_owners(
    owners: npt.ArrayLike, numblocks: tuple[int, ...], side: str, ranks: int | None = None
) -> IntArray:
    """Return the owners of one side as a flat array, or raise `LayoutError`."""
    found = np.asarray(owners, dtype=np.int64)
    if found.shape != numblocks:
        raise LayoutError(
            f"the owners of the {side} have shape {found.shape}, but its chunk grid is {numblocks}"
        )
    if ranks is not None and found.size and found.max() >= ranks:
        raise LayoutError(
            f"the {side} has a chunk of rank {found.max()}; ranks are 0 to {ranks - 1}"
        )
    return found.reshape(-1)
