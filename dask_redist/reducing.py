"""The tasks of a reduction: contribute (a chunk's partial) -> reduce (the fence, and the result).

As those of a redistribution (see :mod:`dask_redist.tasks`), they work in process where no ranks
are: a contribution is the partial itself, the fence merges them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from dask_redist.reduction import Reduction
from dask_redist.spec import Held, Index
from dask_redist.tasks import FenceTask, fence_here, give, held_here, on_loop


class ReduceTask(FenceTask):
    """The fence of one run of a reduction, which is also its result; the conductor pins it."""

    __slots__ = ()

    @property
    def owner(self) -> tuple[int, int]:
        """The owner, and the number of ranks that there were when the graph was built."""
        spec: Reduction = self.args[0]
        return spec.owner, spec.ranks


def contribute_step(
    fence: str, kept: Index, step: Callable[..., Any], *args: Any, **kwargs: Any
) -> int | Held:
    """Make the partial of a chunk and give it to its part's run: the run's number.

    The last argument is the chunk's index, the others are those of ``step``. The key of the part's
    fence is ``fence`` and the index along the axes ``kept``, 0 for -1.
    """
    index: Index = args[-1]
    partial = step(*args[:-1], **kwargs)
    id = (fence, *(index[axis] if axis >= 0 else 0 for axis in kept))
    return give(index, partial, lambda rank: rank.tasks.deposit(id, index, partial))


def reduce(spec: Reduction, id: Any, contributions: Sequence[int | Held]) -> Any:
    """The fence: every partial exists; have each rank merge its cut of them, and get the result."""
    if held := held_here(contributions, spec.name):
        held.sort(key=lambda c: spec.place(c.place))
        partials = [c.chunk for c in held]
        if on_loop():
            return asyncio.to_thread(spec.merge.result, partials, spec.lengths)
        return spec.merge.result(partials, spec.lengths)
    numbers = {c for c in contributions if isinstance(c, int)}
    return fence_here(spec.name).tasks.reduce(id, spec, numbers)


def as_it_is(chunk: Any) -> Any:
    """The step where chunks are partials already."""
    return chunk
