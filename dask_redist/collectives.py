"""The graphs of the collectives on the ranks' tensors (see :mod:`dask_redist.dist`).

- *reduced*: the tensors are contributed to a run of a reduction, whose fence on the target rank is
  the result (see :mod:`dask_redist.deposits`); small ones are gathered there by one task;
- *scattered*: one change of layout gives each rank its slab of all tensors, which it combines;
- what is the same on several ranks is a change to :class:`~dask_redist.layouts.Replicated`.

Tensors are always combined in the order of the ranks, so all ways give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask._task_spec import List, TaskRef
from dask.blockwise import BlockIndex, blockwise
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.tokenize import tokenize
from distributed import Client, Future, wait
from distributed.protocol import pickle
from numpy.typing import NDArray

from dask_redist import lower
from dask_redist.boxes import Chunks
from dask_redist.connect import Ranks, find_client, ranks_of
from dask_redist.errors import LayoutError, RedistError, RunTimeoutError
from dask_redist.layouts import Replicated, Uneven
from dask_redist.partition import check_rank, integer, integers, split_evenly
from dask_redist.reduceop import ReduceOp, combine
from dask_redist.reducing import ReduceTask, as_it_is, contribute_step, reduce
from dask_redist.reduction import Merge, Reduction
from dask_redist.relayout import check_plain, lay, resolve, source_of
from dask_redist.tasks import CopyTask


@dataclass(frozen=True, init=False, repr=False)
class Group:
    """Ranks that take part in collectives; see :func:`dask_redist.dist.new_group`.

    Attributes
    ----------
    ranks : tuple of int
        Their global numbers, rising.
    """

    ranks: tuple[int, ...]

    def __init__(self, ranks: Sequence[int]) -> None:
        found = tuple(sorted(integers(ranks, "the ranks of a group", least=0)))
        if not found or len(set(found)) < len(found):
            raise LayoutError(f"the ranks of a group, {found}: name at least one, and each once")
        object.__setattr__(self, "ranks", found)

    def __repr__(self) -> str:
        return f"Group({self.ranks})"

    def __len__(self) -> int:
        return len(self.ranks)


class Tensors(NamedTuple):
    """The tensors of a group: chunk k is that of rank ``ranks[k]``."""

    x: da.Array
    axis: int
    #: the ranks of the group, by their global numbers
    ranks: tuple[int, ...]
    #: all ranks
    cluster: Ranks

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.cluster.size

    def of(self, rank: int) -> da.Array:
        """The tensor of one rank."""
        return _chunks(self.x, self.axis, [self.ranks.index(rank)])

    def member(self, rank: object, what: str) -> int:
        """A rank of the group, by its global number.

        Raises
        ------
        LayoutError
            It is none; ``what`` says what it was to be.
        """
        number = integer(rank, what)
        check_rank(number, self.size)
        if number not in self.ranks:
            raise LayoutError(f"{what} is rank {number}, which is not in the group {self.ranks}")
        return number

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each tensor."""
        return tuple(sizes[0] for sizes in self.x.chunks)

    @property
    def chunks(self) -> Chunks:
        """One chunk of that shape."""
        return tuple((length,) for length in self.shape)


def members(group: Group | None, size: int) -> tuple[int, ...]:
    """The ranks of a group; None: all.

    Raises
    ------
    LayoutError
        One of them does not exist.
    """
    if group is None:
        return tuple(range(size))
    if not isinstance(group, Group):
        raise TypeError(f"group is {group!r}; make one with dist.new_group([0, 2])")
    for rank in group.ranks:
        if rank >= size:
            raise LayoutError(f"{group!r}: there is no rank {rank}; ranks are 0 to {size - 1}")
    return group.ranks


def tensors_of(x: da.Array, axis: int, group: Group | None, client: Client | None) -> Tensors:
    """The tensors of a group's ranks in an array.

    Raises
    ------
    LayoutError
        The array has not one chunk a rank, or the chunks have unequal shapes.
    TypeError
        It is no Dask array, or its elements are no plain bytes.
    """
    check_plain(x, "combine or copy")
    cluster = ranks_of(find_client(client))
    size = cluster.size
    ranks = members(group, size)
    number = integer(axis, "axis")
    if not -x.ndim <= number < x.ndim:
        raise LayoutError(f"axis is {number}, but the array has {x.ndim} dimensions")
    split = number % x.ndim
    for other, blocks in enumerate(x.numblocks):
        if other != split and blocks != 1:
            raise LayoutError(
                f"the array has {blocks} chunks along axis {other}, but a rank's tensor is one "
                f"chunk: only axis {split} may be split"
            )
    if x.numblocks[split] != size:
        raise LayoutError(
            f"the array has {x.numblocks[split]} chunks along axis {split}, but there are {size} "
            "ranks: chunk r is rank r's tensor, so it needs one chunk a rank"
        )
    _check_equal(x, split, ranks)
    chosen = x if len(ranks) == size else _chunks(x, split, ranks)
    return Tensors(chosen, split, ranks, cluster)


def _check_equal(x: da.Array, axis: int, ranks: Sequence[int]) -> None:
    """Raise `LayoutError` unless the tensors of the ranks have equal, known shapes."""
    if any(math.isnan(length) for sizes in x.chunks for length in sizes):
        raise LayoutError("chunk sizes are unknown (nan): call x.compute_chunk_sizes() first")
    by_length: dict[int, list[int]] = {}
    for rank in ranks:
        by_length.setdefault(x.chunks[axis][rank], []).append(rank)
    if len(by_length) > 1:
        shapes = "; ".join(
            f"{(*x.shape[:axis], length, *x.shape[axis + 1 :])} on rank{'s'[: len(on) - 1]} "
            + ", ".join(map(str, on))
            for length, on in by_length.items()
        )
        raise LayoutError(f"the tensors must all have one shape, but they have {shapes}")


def _chunks(x: da.Array, axis: int, numbers: Sequence[int]) -> da.Array:
    found: da.Array = x.blocks[(slice(None),) * axis + (list(numbers),)]
    return found


# ------------------------------------------------------------------------------------ graphs
def reduced(tensors: Tensors, dst: int, op: ReduceOp) -> da.Array:
    """The tensors, combined, as one chunk on rank ``dst``."""
    x, axis = tensors.x, tensors.axis
    small = x.nbytes <= lower.SMALL
    token = tokenize(x.name, axis, tensors.ranks, tensors.size, dst, op, small)
    name, source = f"dist-reduce-{token}", f"dist-contribute-{token}"
    key: Any = (name, *(0 for _ in x.shape))
    if small:
        found = List(*(TaskRef((x.name, *index)) for index in np.ndindex(*x.numblocks)))
        task = CopyTask(key, _combine_here, dst, tensors.size, op, found)
        return _array(x, {name: MaterializedLayer({key: task})}, tensors.chunks)
    axes = "".join(chr(ord("a") + a) for a in range(x.ndim))
    contribute = blockwise(
        *(partial(contribute_step, name, (-1,) * x.ndim, as_it_is), source, axes, x.name, axes),
        *(BlockIndex(x.numblocks), axes),
        numblocks={x.name: x.numblocks},
    )
    spec = Reduction(
        name=name,
        index=key[1:],
        axis=(axis,),
        grid=x.numblocks,
        owner=dst,
        ranks=tensors.size,
        ahead="none",
        cuttable=True,
        deterministic=False,
        # Of tensors, unlike partials, the axis of the ranks may be cut as well as any other.
        merging=pickle.dumps(Merge((), True, partial(_aggregate, op), None, False)),
    )
    keys = List(*(TaskRef((source, *index)) for index in np.ndindex(*x.numblocks)))
    fence = MaterializedLayer({key: ReduceTask(key, reduce, spec, key, keys)})
    return _array(tensors.x, {source: contribute, name: fence}, tensors.chunks)


def scattered(tensors: Tensors, op: ReduceOp) -> da.Array:
    """The tensors, combined; slab k along the axis is on rank ``ranks[k]``."""
    x, axis, size = tensors.x, tensors.axis, tensors.size
    even = split_evenly(tensors.shape[axis], len(tensors.ranks)).lengths
    sizes = np.zeros(size, np.int64)
    sizes[list(tensors.ranks)] = even
    stacked = _stacked(tensors)
    target = resolve(stacked, Uneven(axis + 1, sizes.tolist()), size)
    moved = lay(stacked, target, tensors.cluster)
    name = f"dist-scatter-{tokenize(moved.name, op)}"
    graph: dict[Any, Any] = {}
    for index in np.ndindex(*moved.numblocks[1:]):
        key: Any = (name, *index)
        slab: Any = (moved.name, 0, *index)
        owner = tensors.ranks[index[axis]]
        graph[key] = CopyTask(key, _combine_here, owner, size, op, TaskRef(slab))
    return _array(moved, {name: MaterializedLayer(graph)}, moved.chunks[1:], meta=x._meta)


def replicated(y: da.Array, tensors: Tensors) -> da.Array:
    """An array, whole on each rank of the tensors' group."""
    everywhere = len(tensors.ranks) == tensors.size
    layout = Replicated() if everywhere else Replicated(tensors.ranks)
    y = source_of(y)
    return lay(y, resolve(y, layout, tensors.size), tensors.cluster)


def _stacked(tensors: Tensors) -> da.Array:
    """The tensors along an axis of their own, the first."""
    x, axis = tensors.x, tensors.axis
    inner = [a if a != axis else x.ndim for a in range(x.ndim)]
    stacked: da.Array = da.blockwise(
        *(_with_axis, (axis, *inner), x, tuple(range(x.ndim))),
        new_axes={x.ndim: tensors.shape[axis]},
        adjust_chunks={axis: 1},
        dtype=x.dtype,
        meta=np.empty((0,) * (x.ndim + 1), x.dtype),
    )
    return stacked


def _array(source: da.Array, layers: dict[str, Any], chunks: Chunks, meta: Any = None) -> da.Array:
    """An array made from ``source`` by layers, each from the one before."""
    graph, needs = dict(source.dask.layers), dict(source.dask.dependencies)
    name = source.name
    for made, layer in layers.items():
        graph[made], needs[made] = layer, {name}
        name = made
    return da.Array(
        HighLevelGraph(graph, needs), name, chunks, meta=source._meta if meta is None else meta
    )


def _with_axis(tensor: NDArray[Any]) -> NDArray[Any]:
    return tensor[np.newaxis]


def _aggregate(op: ReduceOp, tensors: list[Any], axis: Any, keepdims: bool) -> NDArray[Any]:
    return combine(op, tensors)


def _combine_here(owner: int, ranks: int, op: ReduceOp, tensors: Any) -> NDArray[Any]:
    """All tensors, or one slab of each, combined by the ``owner`` of the result."""
    return combine(op, list(tensors))


# -------------------------------------------------------------------------------------- work
class Work:
    """A collective that is under way, as torch's ``Work``.

    Parameters
    ----------
    y : dask.array.Array
        What it makes.
    client : distributed.Client
        Whose cluster makes it.
    """

    def __init__(self, y: da.Array, client: Client) -> None:
        if client.asynchronous:
            raise RedistError(
                "an asynchronous client cannot wait: await the array's futures instead"
            )
        self._client = client
        self._y: da.Array = client.persist(y)
        self._futures: list[Future[Any]] = client.futures_of(self._y)

    def __repr__(self) -> str:
        return f"<Work: {self._y.name}, {'complete' if self.is_completed() else 'under way'}>"

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is complete.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most; default: as long as it takes.

        Returns
        -------
        bool
            True.

        Raises
        ------
        RunTimeoutError
            It is not complete yet; it goes on.
        Exception
            What it failed with.
        """
        if (error := self.exception(timeout)) is not None:
            raise error
        return True

    def is_completed(self) -> bool:
        """Whether it has come to its end, with a result or with an error."""
        return all(future.done() for future in self._futures)

    def result(self, timeout: float | None = None) -> da.Array:
        """Wait as :meth:`wait` does; the array that was made, in memory."""
        self.wait(timeout)
        return self._y

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as :meth:`wait` does; what it failed with, or None."""
        try:
            with self._client.as_current():
                wait(self._futures, timeout=timeout)
        except TimeoutError:
            raise RunTimeoutError(
                f"{self._y.name} is not complete after {timeout:g} s; it goes on"
            ) from None
        errors = (future.exception() for future in self._futures if future.status == "error")
        found: BaseException | None = next(errors, None)
        return found
