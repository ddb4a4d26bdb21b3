"""Parts: the connected components of the overlap of two chunkings.

Where an edge of the input coincides with one of the output, no piece crosses it.  The common edges
cut each axis into segments; a part is one segment an axis.  Parts share no chunk, so each can be
redistributed, and its memory let go, by itself.

A zero-size chunk has no pieces; it belongs to the segment that starts where it lies (at the end of
the axis, to the last one), so every chunk of either side is in exactly one part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product, repeat

import numpy as np

from dask_redist.boxes import IntArray

__all__ = ["FEW", "Part", "Parts"]

#: chunks that one task may merge, or one chunk be split into, without a collective
FEW = 16


@dataclass(frozen=True, slots=True)
class Part:
    """One part: its index, and the ranges of input and output chunks in it along each axis."""

    index: tuple[int, ...]
    inputs: tuple[range, ...]
    outputs: tuple[range, ...]

    @property
    def is_simple(self) -> bool:
        """Whether it merges a few neighbours into one chunk, or splits one chunk into a few."""
        return _is_simple(map(len, self.inputs), map(len, self.outputs))


def _is_simple(inputs: Iterable[int], outputs: Iterable[int]) -> bool:
    sides = math.prod(inputs), math.prod(outputs)
    return min(sides) == 1 and max(sides) <= FEW


class _Segments:
    """The segments of one axis: the segment of each chunk, the chunks of each segment."""

    def __init__(self, edges_in: IntArray, edges_out: IntArray, together: bool) -> None:
        starts = np.intersect1d(edges_in, edges_out)
        starts = starts[:1] if together else starts[: max(1, len(starts) - 1)]
        self.count = len(starts)
        self.longest = int(np.diff(starts, append=edges_in[-1]).max(initial=0))
        self.of_in, self.inputs = self._place(edges_in, starts)
        self.of_out, self.outputs = self._place(edges_out, starts)

    @staticmethod
    def _place(edges: IntArray, starts: IntArray) -> tuple[list[int], list[range]]:
        segment = np.searchsorted(starts, edges[:-1], side="right") - 1
        bounds = np.searchsorted(segment, np.arange(len(starts) + 1)).tolist()
        return segment.tolist(), list(map(range, bounds[:-1], bounds[1:]))


class Parts:
    """The parts of an overlap, in C order; ``parts[index]`` is one of them.

    ``shape`` is the number of segments along each axis. ``together``: there is but one, of all.
    """

    def __init__(
        self,
        edges_in: Sequence[IntArray],
        edges_out: Sequence[IntArray],
        together: bool = False,
    ) -> None:
        self._axes = tuple(map(_Segments, edges_in, edges_out, repeat(together)))
        self.shape = tuple(axis.count for axis in self._axes)

    def __len__(self) -> int:
        return math.prod(self.shape)

    def __iter__(self) -> Iterator[Part]:
        return map(
            Part,
            product(*(range(count) for count in self.shape)),
            product(*(axis.inputs for axis in self._axes)),
            product(*(axis.outputs for axis in self._axes)),
        )

    def __getitem__(self, index: Sequence[int]) -> Part:
        pairs = tuple(zip(self._axes, index, strict=True))
        inputs = tuple(axis.inputs[i] for axis, i in pairs)
        return Part(tuple(index), inputs, tuple(axis.outputs[i] for axis, i in pairs))

    @property
    def are_simple(self) -> bool:
        """Whether all parts are; see `Part.is_simple`."""
        return all(self._kinds())

    @property
    def some_simple(self) -> bool:
        """Whether some part is; see `Part.is_simple`."""
        return any(self._kinds())

    def _kinds(self) -> Iterator[bool]:
        """Whether parts of each kind are simple."""
        kinds = [
            {(len(i), len(o)) for i, o in zip(axis.inputs, axis.outputs, strict=True)}
            for axis in self._axes
        ]
        return (_is_simple(*zip(*sides, strict=True)) for sides in product(*kinds) if sides)

    @property
    def largest(self) -> int:
        """Elements of the largest part."""
        return math.prod(axis.longest for axis in self._axes)

    def part_of_input(self, index: Sequence[int]) -> tuple[int, ...]:
        """Return the index of the part that an input chunk is in."""
        return tuple(axis.of_in[i] for axis, i in zip(self._axes, index, strict=True))

    def part_of_output(self, index: Sequence[int]) -> tuple[int, ...]:
        """Return the index of the part that an output chunk is in."""
        return tuple(axis.of_out[i] for axis, i in zip(self._axes, index, strict=True))
