"""The three tasks of a redistribution: contribute -> redistribute (the fence) -> take.

On a worker that has a rank, they run the collective. Anywhere else (``scheduler="sync"``,
``"threads"``, ``"processes"``, a closed client, a nested compute) the same graph works in process:
a contribution is the chunk itself, the fence passes the chunks on, takes assemble theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from dask._task_spec import Task
from distributed.worker import get_worker
from numpy.typing import NDArray

from dask_redist.errors import RedistError
from dask_redist.rank import Rank, rank_of
from dask_redist.run import as_declared
from dask_redist.spec import Held, Index, PartSpec, Receipt


class Gathered(NamedTuple):
    """The chunks of a part, where no ranks are."""

    spec: PartSpec
    chunks: dict[Index, Any]


class Cut(NamedTuple):
    """A piece of an input chunk: the chunk's index and declared shape, from where to where."""

    chunk: Index
    shape: Index
    source: tuple[slice, ...]
    target: tuple[slice, ...]


class OwnTask(Task):
    """A contribute or take task: never fused.

    The conductor pins takes, and knows contributions as the fence's dependencies; a fused task
    would have another key, with an alias before the fence.
    """

    __slots__ = ()

    @property
    def block_fusion(self) -> bool:
        """Whether neighbours may not be fused with this task."""
        return True


class CopyTask(OwnTask):
    """Makes a chunk on its owner from chunks that are there; the conductor pins it."""

    __slots__ = ()

    @property
    def owner(self) -> tuple[int, int]:
        """The owner, and the number of ranks that there were when the graph was built."""
        owner, ranks = self.args[:2]
        return owner, ranks


class FenceTask(OwnTask):
    """The fence of one run; the conductor finds it under its key."""

    __slots__ = ()

    @property
    def spec(self) -> PartSpec:
        """The part that this fence closes."""
        spec: PartSpec = self.args[0]
        return spec

    @property
    def is_coro(self) -> bool:
        """On a worker the task is a coroutine: it holds a slot but no thread."""
        return True


def here() -> Rank | None:
    """The rank of the worker that runs this task, if there is one."""
    try:
        worker = get_worker()
    except ValueError:
        return None
    return rank_of(worker)


def give(index: Index, what: Any, to: Callable[[Rank], int | None]) -> int | Held:
    """Give what a chunk contributes to a run: the run's number; where there is none, itself."""
    rank = here()
    if rank is None:
        return Held(index, what)
    try:
        number = to(rank)
    except RedistError:
        rank.tasks.collect_soon()
        raise
    return Held(index, what) if number is None else number


def held_here(contributions: Sequence[int | Held], name: str) -> list[Held]:
    """What was contributed where no ranks are: all, or nothing.

    Raises
    ------
    RedistError
        Some of it.
    """
    held = [c for c in contributions if isinstance(c, Held)]
    if held and len(held) < len(contributions):
        raise RedistError(
            f"{len(held)} of {len(contributions)} chunks of {name!r} are on workers without a "
            "rank; call dask_redist.connect(client) and compute again"
        )
    return held


def fence_here(name: str) -> Rank:
    """The rank that a fence runs on.

    Raises
    ------
    RedistError
        There is none.
    """
    rank = here()
    if rank is None:
        raise RedistError(
            f"the fence of {name!r} runs where there is no rank; call dask_redist.connect(client) "
            "and compute again"
        )
    return rank


def contribute(id: Any, index: Index, chunk: Any) -> int | Held:
    """Write the pieces of one input chunk; returns the number of the run that they went to."""
    return give(index, chunk, lambda rank: rank.tasks.contribute(id, index, chunk))


def redistribute(spec: PartSpec, id: Any, contributions: Sequence[int | Held]) -> Any:
    """The fence: every contribution exists; close the run and let the takes in."""
    if held := held_here(contributions, spec.name_input):
        gathered = Gathered(spec, {c.place: c.chunk for c in held})
        return _done(gathered) if on_loop() else gathered
    numbers = {c for c in contributions if isinstance(c, int)}
    return fence_here(spec.name).tasks.fence(id, spec, numbers)


def on_loop() -> bool:
    """Whether a worker's event loop runs this task (it awaits what the task returns)."""
    try:
        get_worker()
        asyncio.get_running_loop()
    except (ValueError, RuntimeError):
        return False
    return True


async def _done(value: Any) -> Any:
    return value


def take(index: Index, receipt: Receipt | Gathered) -> NDArray[Any]:
    """One output chunk: the array over the rank's block, or assembled from the chunks."""
    if isinstance(receipt, Gathered):
        return _gather(receipt, index)
    rank = here()
    if rank is None:
        raise RedistError(f"output chunk {index} is taken where there is no rank")
    return rank.tasks.take(receipt, index)


def _gather(gathered: Gathered, index: Index) -> NDArray[Any]:
    spec, chunks = gathered
    local = tuple(i - f for i, f in zip(index, spec.first_out, strict=True))
    cuts = []
    for piece in spec.overlap.pieces_of_output(local):
        source = tuple(i + f for i, f in zip(piece.chunk, spec.first_in, strict=True))
        cuts.append(Cut(source, spec.in_shape(piece.chunk), piece.source, piece.target))
    wanted = [chunks[cut.chunk] for cut in cuts]
    return assemble(spec.out_shape(local), spec.dtype, spec.name_input, cuts, wanted)


def assemble(
    shape: Index, dtype: np.dtype[Any], name: str, cuts: Sequence[Cut], chunks: Sequence[Any]
) -> NDArray[Any]:
    """One output chunk, made of pieces of the input chunks of the array ``name``."""
    out = np.empty(shape, dtype)
    for cut, chunk in zip(cuts, chunks, strict=True):
        out[cut.target] = as_declared(chunk, cut.shape, dtype, name, cut.chunk)[cut.source]
    return out


def local_copy(owner: int, ranks: int, *pieces: Any) -> NDArray[Any]:
    """One chunk of an array that every rank has, made by its ``owner``; see :func:`assemble`."""
    return assemble(*pieces)
