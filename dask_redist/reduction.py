"""What one part of a reduction is, and how partials become a result.

A reduction has one *part* for each chunk of its result: the chunks that it is made of, which differ
in their index along the reduced axes only. Read in C order these are a *line*, and a partial's
place in it is a number. Dask's own functions merge partials: ``combine`` makes one partial of
several, ``aggregate`` makes the result. Both get them in the order of the line; a *stretch* is one
partial of several places.

Chunks without elements along the reduced axes have no partial where their family of reductions has
no identity (min, argmax): they leave :class:`Nothing`, which is passed over, unless there is
nothing else; then it is what the functions get, and NumPy's own error comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np
from dask.array.core import _concatenate2
from distributed.protocol import pickle

from dask_redist.pairs import Pair, paired
from dask_redist.spec import Index

Function = Callable[..., Any]


class Nothing(NamedTuple):
    """The partial of a chunk without elements along the reduced axes."""

    #: what has its type and shape, and no element along the reduced axes
    empty: Any


class Stretch(NamedTuple):
    """One partial for several places of a line, rising."""

    places: Index
    partial: Any

    @property
    def start(self) -> int:
        """The first place."""
        return self.places[0]


@dataclass(frozen=True)
class Merge:
    """How partials are merged.

    Attributes
    ----------
    axis
        The reduced axes, rising.
    keepdims
        Whether results keep them, with length one.
    aggregate, combine
        Dask's functions; ``combine`` is None where Dask would not have made use of one.
    concatenate
        Whether they get one array, or nested lists of partials.
    pair
        What merges partials one after the other, where they are plain ones.
    """

    axis: Index
    keepdims: bool
    aggregate: Function
    combine: Function | None
    concatenate: bool
    pair: Pair | None = None

    def is_paired(self, partials: Sequence[Any]) -> bool:
        """Whether these partials are merged one after the other."""
        return self.pair is not None and self.pair.fits(partials)

    def combined(
        self, partials: Sequence[Any], own: bool = False, lengths: Index | None = None
    ) -> Any:
        """One partial of several, which follow each other in the line.

        ``own``: the first one is nobody else's, and may be overwritten. ``lengths``: how many there
        are along each reduced axis, where they are a box of the grid.
        """
        there = [p for p in partials if type(p) is not Nothing]
        if len(there) < 2:
            return (there or partials)[0]
        if self.pair is not None and self.is_paired(there):
            return paired(self.pair, there, own and partials[0] is there[0])
        function = self.combine or self.aggregate
        return self._apply(function, self._nested(there, lengths), keepdims=True)

    def result(self, partials: Sequence[Any], lengths: Index | None = None) -> Any:
        """The result; ``lengths``: how many chunks there are along each reduced axis.

        Where the partials are those of all chunks, the functions get them nested as the chunks are.
        """
        there = [p for p in partials if type(p) is not Nothing] or [p.empty for p in partials]
        if self.pair is not None and len(there) > 1 and self.is_paired(there):
            there = [paired(self.pair, there)]
        return self._apply(self.aggregate, self._nested(there, lengths), keepdims=self.keepdims)

    def _nested(self, partials: Sequence[Any], lengths: Index | None) -> Any:
        """Nested lists, as the chunks are; where they are no box, along the first axis."""
        if lengths is None or len(partials) != prod(lengths):
            lengths = (len(partials), *(1 for _ in self.axis[1:]))
        return _nest(partials, lengths)

    def _apply(self, function: Function, nested: Any, keepdims: bool) -> Any:
        if self.concatenate:
            nested = _concatenate2(nested, axes=list(self.axis))
        return function(nested, axis=self.axis, keepdims=keepdims)


def _nest(partials: Sequence[Any], lengths: Sequence[int]) -> Any:
    """Partials in C order as nested lists.

    Examples
    --------
    >>> _nest("abcdef", (2, 3))
    [['a', 'b', 'c'], ['d', 'e', 'f']]
    """
    if not lengths:
        return partials[0]
    step = len(partials) // lengths[0]
    return [_nest(partials[k * step : (k + 1) * step], lengths[1:]) for k in range(lengths[0])]


@dataclass(frozen=True, eq=False)
class Reduction:
    """One part of one reduction: what its fence carries.

    Attributes
    ----------
    name, index
        The array that is made, and the index of this part's chunk in it.
    grid
        Chunks along each axis of what is reduced.
    owner, ranks
        The rank that gets the result, and the number of ranks that there were when the graph was
        built.
    ahead
        Which partials a rank may combine before the reduce: "none", "neighbours" in the line, or
        "any".
    cuttable
        Whether each element of the result depends on the same place of all partials along the axes
        that are kept, so that ranks can make a cut of the result each.
    deterministic
        Whether the result must have the same bits on any number of ranks.
    merging
        The pickled :class:`Merge`: functions of users are unpickled where they run only.
    """

    name: str
    index: Index
    axis: Index
    grid: Index
    owner: int
    ranks: int
    ahead: str
    cuttable: bool
    deterministic: bool
    merging: bytes

    #: what a run asks of its part; a reduction's outputs are nobody's before its end
    layout = None
    replicated = False
    n_out = 0

    @cached_property
    def merge(self) -> Merge:
        """How partials are merged."""
        merge: Merge = pickle.loads(self.merging)
        return merge

    @property
    def lengths(self) -> Index:
        """Chunks along each reduced axis."""
        return tuple(self.grid[a] for a in self.axis)

    def place(self, index: Index) -> int:
        """Where a chunk is in the line."""
        return int(np.ravel_multi_index([index[a] for a in self.axis], self.lengths))

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __dask_tokenize__(self) -> object:
        return (self.name, self.index)


class Line:
    """The stretches of a part that a rank holds; not thread-safe.

    Examples
    --------
    >>> line = Line()
    >>> for place in (0, 2, 1, 5):
    ...     line.put(place, [place])
    ...     if batch := line.batch("neighbours", 3):
    ...         line.join(batch, sum((stretch.partial for stretch in batch), []))
    >>> [(stretch.places, stretch.partial) for stretch in line.stretches]
    [((0, 1, 2), [0, 1, 2]), ((5,), [5])]
    """

    def __init__(self) -> None:
        self._stretches: dict[int, Stretch] = {}
        self._seen: set[int] = set()

    def pop(self) -> Stretch | None:
        """The first stretch, which is let go; None: there is none."""
        return self._stretches.pop(min(self._stretches)) if self._stretches else None

    @property
    def stretches(self) -> list[Stretch]:
        """In the order of the line."""
        return [self._stretches[start] for start in sorted(self._stretches)]

    def put(self, place: int, partial: Any) -> None:
        """Add a partial; one that came twice counts once."""
        if place not in self._seen:
            self._seen.add(place)
            self._stretches[place] = Stretch((place,), partial)

    def batch(self, ahead: str, least: int) -> list[Stretch]:
        """Stretches that may be combined, at least so many, taken out until they are joined."""
        if ahead == "none" or len(self._stretches) < least:
            return []
        found: list[Stretch] = []
        for stretch in self.stretches:
            if found and ahead != "any" and found[-1].places[-1] + 1 != stretch.start:
                if len(found) >= least:
                    break
                found = []
            found.append(stretch)
        if len(found) < least:
            return []
        for stretch in found:
            del self._stretches[stretch.start]
        return found

    def put_back(self, batch: Sequence[Stretch]) -> None:
        """They could not be combined."""
        self._stretches.update((stretch.start, stretch) for stretch in batch)

    def join(self, batch: Sequence[Stretch], partial: Any) -> None:
        """Put what a batch was combined to in its place."""
        places = sorted(place for stretch in batch for place in stretch.places)
        self._stretches[places[0]] = Stretch(tuple(places), partial)
