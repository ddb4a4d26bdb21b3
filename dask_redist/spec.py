"""What one part of a redistribution is: the facts that its fence task carries.

A *part* is a connected piece of the overlap of two chunkings: it has its own contributions, its
own fence and its own run. Chunks inside a part are numbered from zero; ``first_in`` and
``first_out`` are the part's place in the whole array.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dask_redist.boxes import Chunks
from dask_redist.layouts import Layout, Replicated
from dask_redist.overlap import Overlap

Index = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PartSpec:
    """One part of one redistribution.

    Attributes
    ----------
    name, name_input
        Names of the output and of the input array; chunk keys are ``(name, *index)``.
    chunks_in, chunks_out
        The part's chunks along each axis.
    first_in, first_out
        Index of the part's first chunk in the whole array.
    dtype
        Declared type of the elements.
    owners
        The rank of each output chunk, numbered in C order.
    ranks
        How many ranks there were when the graph was built.
    layout
        The layout that the owners follow; None where whoever holds most of a chunk may own it.
    """

    name: str
    name_input: str
    chunks_in: Chunks
    chunks_out: Chunks
    first_in: Index
    first_out: Index
    dtype: np.dtype[Any]
    owners: NDArray[np.int64]
    ranks: int
    layout: Layout | None

    @cached_property
    def overlap(self) -> Overlap:
        """The index map of the part."""
        return Overlap(self.chunks_in, self.chunks_out)

    @cached_property
    def grid_in(self) -> Index:
        """Input chunks along each axis."""
        return tuple(map(len, self.chunks_in))

    @cached_property
    def grid_out(self) -> Index:
        """Output chunks along each axis."""
        return tuple(map(len, self.chunks_out))

    @property
    def replicated(self) -> bool:
        """Whether several ranks get the output; then the outputs are its copies."""
        return isinstance(self.layout, Replicated)

    @property
    def n_out(self) -> int:
        """How many output chunks the part has."""
        return prod(self.grid_out)

    def local_in(self, index: Index) -> Index:
        """Index inside the part of the input chunk ``index`` of the whole array."""
        return tuple(i - f for i, f in zip(index, self.first_in, strict=True))

    def out_number(self, index: Index) -> int:
        """Number inside the part of the output chunk ``index`` of the whole array."""
        return self.flat_out(tuple(i - f for i, f in zip(index, self.first_out, strict=True)))

    def flat_out(self, local: Index) -> int:
        """Number inside the part of the output chunk ``local``, in C order."""
        number = 0
        for i, n in zip(local, self.grid_out, strict=True):
            number = number * n + i
        return number

    def local_out(self, number: int) -> Index:
        """Index inside the part of the output chunk ``number``."""
        local = []
        for n in reversed(self.grid_out):
            number, i = divmod(number, n)
            local.append(i)
        return tuple(reversed(local))

    def in_shape(self, local: Index) -> Index:
        """Shape of the input chunk ``local``."""
        return tuple(c[i] for c, i in zip(self.chunks_in, local, strict=True))

    def out_shape(self, local: Index) -> Index:
        """Shape of the output chunk ``local``."""
        return tuple(c[i] for c, i in zip(self.chunks_out, local, strict=True))

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __dask_tokenize__(self) -> object:
        return (self.name, self.name_input, self.first_in, self.first_out, self.grid_out)


class Held(NamedTuple):
    """A contribution where no ranks are: the chunk itself."""

    place: Index
    chunk: Any


class Receipt(NamedTuple):
    """What the fence of a run hands to the takes: nothing but the run's name and number."""

    id: Any
    number: int
    replicated: bool


def fence_key(name: str, part: Index, keep: str | None) -> tuple[Any, ...]:
    """The key of a part's fence, which is also the id of its runs.

    Examples
    --------
    >>> fence_key("redistribute-0123", (2, 0), None)
    ('redistribute-fence-0123', 2, 0)
    """
    prefix, _, token = name.rpartition("-")
    return (f"{prefix}-fence-{token}", *part, *(() if keep is None else (keep,)))


def contribution_key(fence: tuple[Any, ...], index: Index) -> tuple[Any, ...]:
    """The key of the contribution of an input chunk, which belongs to one fence only.

    Examples
    --------
    >>> contribution_key(("redistribute-fence-0123", 2, 0, "keep-45"), (7, 8))
    ('redistribute-contribute-0123', 7, 8, 'keep-45')
    """
    name = fence[0].replace("-fence-", "-contribute-")
    return (name, *index, *(part for part in fence[1:] if isinstance(part, str)))
