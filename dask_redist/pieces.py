"""Pieces: what one input chunk and one output chunk have in common, axis by axis.

Chunk grids are separable, so the overlap of two chunkings is too.  Along one axis the merged edges
of both sides cut it into *axis pieces*, each in one input and one output chunk; a piece of the
array is one axis piece an axis.  Memory is that of the axes, never of their product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dask_redist.boxes import IntArray

__all__ = ["AxisPieces", "Piece", "Pieces", "all_pieces", "pieces_of"]

_BLOCK = 1 << 18
"""Pieces that `all_pieces` yields at once: columns of 2 MiB."""


class Piece(NamedTuple):
    """What an input chunk and an output chunk share.

    ``chunk`` is the index of the chunk on the other side, ``source`` the place inside the input
    chunk, ``target`` the place inside the output chunk, ``size`` the number of elements.
    """

    chunk: tuple[int, ...]
    source: tuple[slice, ...]
    target: tuple[slice, ...]
    size: int


class AxisPieces:
    """The pieces of one axis, in order: input chunk, output chunk, and size of each.

    Input chunk ``i`` has the pieces ``of_in[i]`` to ``of_in[i + 1]``, output chunk ``j`` the pieces
    ``of_out[j]`` to ``of_out[j + 1]``.  Zero-size chunks have none.
    """

    def __init__(self, edges_in: IntArray, edges_out: IntArray) -> None:
        self.edges_in, self.edges_out = edges_in, edges_out
        cuts = np.unique(np.concatenate((edges_in, edges_out)))
        self.lower, self.upper = cuts[:-1], cuts[1:]
        # The last chunk that starts at or before a piece is the one that is not empty.
        self.chunk_in = np.searchsorted(edges_in, self.lower, side="right") - 1
        self.chunk_out = np.searchsorted(edges_out, self.lower, side="right") - 1
        self.of_in = np.searchsorted(self.chunk_in, np.arange(len(edges_in)))
        self.of_out = np.searchsorted(self.chunk_out, np.arange(len(edges_out)))

    def __len__(self) -> int:
        return len(self.lower)

    @cached_property
    def sizes(self) -> IntArray:
        """Elements of each piece."""
        return self.upper - self.lower

    # Plain lists for the loop over single pieces, where NumPy scalars would cost most of the time.

    @cached_property
    def ranges(self) -> tuple[list[int], list[int]]:
        """Pointers of the input chunks and of the output chunks."""
        return self.of_in.tolist(), self.of_out.tolist()

    @cached_property
    def columns(self) -> tuple[list[int], list[int], list[slice], list[slice], list[int]]:
        """Input chunk, output chunk, place in the input and in the output chunk, and size."""
        start_in, start_out = self.edges_in[self.chunk_in], self.edges_out[self.chunk_out]
        source = map(slice, (self.lower - start_in).tolist(), (self.upper - start_in).tolist())
        target = map(slice, (self.lower - start_out).tolist(), (self.upper - start_out).tolist())
        return (
            self.chunk_in.tolist(),
            self.chunk_out.tolist(),
            list(source),
            list(target),
            self.sizes.tolist(),
        )


class Pieces:
    """The pieces of one chunk, in C order of the chunks on the other side.

    Iterating yields each `Piece`; ``len()`` counts them without iterating.
    """

    __slots__ = ("_chunks", "_sizes", "_sources", "_targets")

    def __init__(self, axes: Sequence[AxisPieces], index: Sequence[int], *, of_input: bool) -> None:
        self._chunks: list[list[int]] = []
        self._sources: list[list[slice]] = []
        self._targets: list[list[slice]] = []
        self._sizes: list[list[int]] = []
        for axis, i in zip(axes, index, strict=True):
            of_in, of_out = axis.ranges
            chunk_in, chunk_out, source, target, sizes = axis.columns
            pointers, others = (of_in, chunk_out) if of_input else (of_out, chunk_in)
            first, last = pointers[i], pointers[i + 1]
            self._chunks.append(others[first:last])
            self._sources.append(source[first:last])
            self._targets.append(target[first:last])
            self._sizes.append(sizes[first:last])

    def __len__(self) -> int:
        return math.prod(map(len, self._sizes))

    def __iter__(self) -> Iterator[Piece]:
        # All loops run in C: a chunk can have many thousand pieces.
        return map(
            Piece,
            product(*self._chunks),
            product(*self._sources),
            product(*self._targets),
            map(math.prod, product(*self._sizes)),
        )

    def rows(self) -> Iterator[tuple[Piece, ...]]:
        """Yield the pieces that differ only along the last axis together."""
        length = len(self._sizes[-1]) if self._sizes else 1
        return zip(*[iter(self)] * length, strict=True)


def all_pieces(axes: Sequence[AxisPieces]) -> Iterator[tuple[IntArray, IntArray, IntArray]]:
    """Yield all pieces in blocks: flat input chunk, flat output chunk, elements."""
    grid = tuple(map(len, axes))
    total = math.prod(grid)
    for start in range(0, total, _BLOCK):
        count = min(_BLOCK, total - start)
        flat = np.arange(start, start + count)
        yield _look_up(axes, np.unravel_index(flat, grid) if grid else (), count)


def pieces_of(
    axes: Sequence[AxisPieces], chunks: npt.NDArray[np.intp], *, of_input: bool
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the pieces of some chunks, given by flat index, of the one side or the other.

    Returns flat input chunk, flat output chunk and elements, ordered by the given chunks.
    """
    pointers = [axis.of_in if of_input else axis.of_out for axis in axes]
    coords = np.unravel_index(chunks, tuple(len(row) - 1 for row in pointers)) if axes else ()
    firsts = [row[at] for row, at in zip(pointers, coords, strict=True)]
    counts = [row[at + 1] - row[at] for row, at in zip(pointers, coords, strict=True)]
    per_chunk = np.ones(len(chunks), dtype=np.int64)
    for count in counts:
        per_chunk *= count
    total = int(per_chunk.sum())
    # Number the pieces within each chunk, and read the numbers as mixed-radix digits.
    row = np.repeat(np.arange(len(chunks)), per_chunk)
    within = np.arange(total) - np.repeat(np.cumsum(per_chunk) - per_chunk, per_chunk)
    places = []
    for first, count in zip(reversed(firsts), reversed(counts), strict=True):
        within, digit = np.divmod(within, count[row])
        places.append(first[row] + digit)
    return _look_up(axes, tuple(reversed(places)), total)


def _look_up(
    axes: Sequence[AxisPieces], places: tuple[npt.NDArray[np.intp], ...], count: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Turn numbers of axis pieces into flat input chunk, flat output chunk and elements."""
    inputs, outputs = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    elements = np.ones(count, dtype=np.int64)
    for axis, at in zip(axes, places, strict=True):
        inputs = inputs * (len(axis.edges_in) - 1) + axis.chunk_in[at]
        outputs = outputs * (len(axis.edges_out) - 1) + axis.chunk_out[at]
        elements *= axis.sizes[at]
    return inputs, outputs, elements
