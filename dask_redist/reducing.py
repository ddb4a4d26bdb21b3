"""The three tasks of a reduction: contribute (a chunk's partial) -> reduce (the fence) -> take.

As those of a redistribution (see :mod:`dask_redist.tasks`), they work in process where no ranks
are: a contribution is the partial itself, the fence passes them on, the take merges them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dask_redist.errors import RedistError
from dask_redist.rank import Rank
from dask_redist.reduction import Reduction
from dask_redist.spec import Held, Index
from dask_redist.tasks import FenceTask, PlacedTask, here, on_loop


class Partials(NamedTuple):
    """The partials of a part, in the order of the line, where no ranks are."""

    partials: list[Any]


class ReduceTask(FenceTask):
    """The fence of one run of a reduction."""

    __slots__ = ()


class TakeTask(PlacedTask):
    """Makes the chunk of a result from what the ranks have merged."""

    __slots__ = ()


def contribute_step(
    fence: str, kept: Index, step: Callable[..., Any], *args: Any, **kwargs: Any
) -> int | Held:
    """Make the partial of a chunk and give it to its part's run: the run's number.

    The last argument is the chunk's index; the key of the part's fence is made of ``fence`` and the
    index along the axes ``kept``. The others are those of ``step``.
    """
    index: Index = args[-1]
    partial = step(*args[:-1], **kwargs)
    rank = here()
    number = None
    if rank is not None:
        number = rank.deposit((fence, *(index[axis] for axis in kept)), index, partial)
    return Held(index, partial) if number is None else number


def reduce(spec: Reduction, id: Any, contributions: Sequence[int | Held]) -> Any:
    """The fence: every partial exists; have each rank merge its cut of them."""
    held = [c for c in contributions if isinstance(c, Held)]
    if held and len(held) < len(contributions):
        raise RedistError(
            f"{len(held)} of {len(contributions)} partials of {spec.name!r} are on workers without "
            "a rank; call dask_redist.connect(client) and compute again"
        )
    if held:
        held.sort(key=lambda c: spec.place(c.place))
        partials = Partials([c.chunk for c in held])
        return _now(partials) if on_loop() else partials
    rank = here()
    if rank is None:
        raise RedistError(f"the fence of {spec.name!r} runs where there is no rank")
    return rank.reduce(id, {c for c in contributions if isinstance(c, int)})


async def _now(value: Any) -> Any:
    return value


def take_result(owner: int, ranks: int, spec: Reduction, receipt: Any) -> Any:
    """The chunk of the result."""
    if isinstance(receipt, Partials):
        return spec.merge.result(receipt.partials, spec.lengths)
    rank: Rank | None = here()
    if rank is None:
        raise RedistError(f"a chunk of {spec.name!r} is taken where there is no rank")
    return rank.take_result(receipt, spec)
