"""Collectives on the ranks' own arrays, under the names of ``torch.distributed``.

A Dask array with one chunk a rank along ``axis`` is the ranks' tensors: chunk r is rank r's,
wherever Dask holds it just now. Ranks that are named (``dst``, ``src``, groups) are global numbers,
those of :func:`dask_redist.connect`. Unlike torch's, these functions change nothing in place: each
returns a new array, or with ``async_op=True`` a :class:`Work` whose result that is.

>>> from dask_redist import dist
>>> dist.ReduceOp.SUM, dist.new_group([2, 0])
(<ReduceOp.SUM: 'sum'>, Group((0, 2)))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dask.array as da
from distributed import Client

from dask_redist.collectives import (
    Group,
    Work,
    members,
    reduced,
    replicated,
    scattered,
    tensors_of,
)
from dask_redist.connect import ask_now, find_client, ranks_of
from dask_redist.errors import RunTimeoutError
from dask_redist.reduceop import ReduceOp, as_op

__all__ = [
    "Group",
    "ReduceOp",
    "Work",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "new_group",
    "reduce",
    "reduce_scatter",
]


def new_group(ranks: Sequence[int] | None = None) -> Group | None:
    """Name the ranks that take part in a collective; the others hold nothing of its result.

    Parameters
    ----------
    ranks : sequence of int, optional
        Their global numbers, in any order. None: all, as ``group=None`` says too.

    Returns
    -------
    Group or None

    Raises
    ------
    LayoutError
        No ranks, or one that is named twice or negative. One that does not exist is refused by the
        collective.

    Examples
    --------
    >>> new_group([0, 2]).ranks
    (0, 2)
    """
    return None if ranks is None else Group(ranks)


def reduce(
    x: da.Array,
    dst: int = 0,
    op: ReduceOp | str = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    *,
    axis: int = 0,
    client: Client | None = None,
) -> Any:
    """Combine the tensors of all ranks on one of them.

    Parameters
    ----------
    x : dask.array.Array
        One chunk a rank along `axis`, all of one shape; chunk r is rank r's tensor. It is left as
        it is, where torch overwrites the tensor of rank `dst`.
    dst : int
        The rank that gets the result.
    op : ReduceOp or str
        How, such as ``ReduceOp.MAX`` or ``"max"``. Tensors are combined in the order of the ranks.
    group : Group, optional
        The ranks that take part, see :func:`new_group`; default: all.
    async_op : bool
        Whether the work starts at once.
    axis : int
        The axis along which there is one chunk a rank.
    client : distributed.Client, optional
        Default: the current one. It is connected if nobody did.

    Returns
    -------
    dask.array.Array or Work
        One chunk, of the shape and dtype of one tensor, held by rank `dst` alone. It is lazy; with
        `async_op` it is the result of the :class:`Work` that is returned instead.

    Raises
    ------
    LayoutError
        Not one chunk a rank, tensors of unequal shapes (names the ranks), or `dst` outside the
        group. All errors come before anything runs.
    ValueError
        An unknown `op`.
    TypeError
        An `op` that the dtype has not, such as AVG of integers.

    Examples
    --------
    On 2 ranks that hold [1, 2, 3, 4, 5] each, the sum on rank 0; and one that runs meanwhile:

    >>> import dask.array as da, numpy as np
    >>> from dask_redist import dist
    >>> from distributed import Client
    >>> with Client(n_workers=2, threads_per_worker=1, processes=False,
    ...             dashboard_address=":0") as client:
    ...     x = da.from_array(np.array([1, 2, 3, 4, 5] * 2), chunks=5)
    ...     print(dist.reduce(x, dst=0, op=dist.ReduceOp.SUM).compute())
    ...     x = da.from_array(np.array([10, 20, 30] * 2), chunks=3)
    ...     work = dist.reduce(x, dst=0, async_op=True)
    ...     print(work.wait(), work.result().compute())
    [ 2  4  6  8 10]
    True [20 40 60]

    On 3 ranks that hold [2, 3, 4] each, the product on rank 1:

    >>> import dask_redist as dr
    >>> with Client(n_workers=3, threads_per_worker=1, processes=False,
    ...             dashboard_address=":0") as client:
    ...     x = da.from_array(np.array([2, 3, 4] * 3), chunks=3)
    ...     work = dist.reduce(x, dst=1, op=dist.ReduceOp.PRODUCT, async_op=True)
    ...     print(work.result().compute(), dr.owners(work.result()))
    [ 8 27 64] [1]
    """
    client = find_client(client)
    tensors = tensors_of(x, axis, group, client)
    found = reduced(tensors, tensors.member(dst, "dst"), as_op(op, x.dtype))
    return Work(found, client) if async_op else found


def all_reduce(
    x: da.Array,
    op: ReduceOp | str = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    *,
    axis: int = 0,
    client: Client | None = None,
) -> Any:
    """Combine the tensors of all ranks on each of them.

    Parameters
    ----------
    x, op, group, async_op, axis, client
        As for :func:`reduce`; `x` is left as it is, where torch overwrites each rank's tensor.

    Returns
    -------
    dask.array.Array or Work
        One chunk, of the shape and dtype of one tensor, in the memory of every rank of the group.

    Raises
    ------
    LayoutError, ValueError, TypeError
        As :func:`reduce`.

    Examples
    --------
    >>> import dask.array as da, numpy as np
    >>> from dask_redist import dist
    >>> from distributed import Client
    >>> with Client(n_workers=2, threads_per_worker=1, processes=False,
    ...             dashboard_address=":0") as client:
    ...     x = da.from_array(np.array([1., 5., 3., 2.]), chunks=2)
    ...     print(dist.all_reduce(x).compute(), dist.all_reduce(x, "avg").compute())
    [4. 7.] [2.  3.5]
    """
    client = find_client(client)
    tensors = tensors_of(x, axis, group, client)
    found = replicated(scattered(tensors, as_op(op, x.dtype)), tensors)
    return Work(found, client) if async_op else found


def reduce_scatter(
    x: da.Array,
    op: ReduceOp | str = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    *,
    axis: int = 0,
    client: Client | None = None,
) -> Any:
    """Combine the tensors of all ranks, and leave each rank a slab of the result.

    Parameters
    ----------
    x, op, group, async_op, axis, client
        As for :func:`reduce`.

    Returns
    -------
    dask.array.Array or Work
        Of the shape and dtype of one tensor, split along `axis`: slab k is on the k-th rank of the
        group. As in all layouts the first ranks get one element more where it does not split
        evenly, and ranks for which none is left hold nothing.

    Raises
    ------
    LayoutError, ValueError, TypeError
        As :func:`reduce`.

    Examples
    --------
    >>> import dask.array as da, numpy as np
    >>> from dask_redist import dist
    >>> from distributed import Client
    >>> with Client(n_workers=2, threads_per_worker=1, processes=False,
    ...             dashboard_address=":0") as client:
    ...     y = dist.reduce_scatter(da.from_array(np.array([1, 2, 3, 10, 20, 30]), chunks=3))
    ...     print(y.chunks, y.compute())
    ((2, 1),) [11 22 33]
    """
    client = find_client(client)
    tensors = tensors_of(x, axis, group, client)
    found = scattered(tensors, as_op(op, x.dtype))
    return Work(found, client) if async_op else found


def broadcast(
    x: da.Array,
    src: int = 0,
    group: Group | None = None,
    async_op: bool = False,
    *,
    axis: int = 0,
    client: Client | None = None,
) -> Any:
    """Give the tensor of one rank to all.

    Parameters
    ----------
    x, group, async_op, axis, client
        As for :func:`reduce`; `x` is left as it is, where torch overwrites the other tensors.
    src : int
        The rank whose tensor it is.

    Returns
    -------
    dask.array.Array or Work
        One chunk, equal to the tensor of rank `src`, in the memory of every rank of the group.

    Raises
    ------
    LayoutError, TypeError
        As :func:`reduce`; or `src` is not in the group.

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_redist import dist
    >>> from distributed import Client
    >>> with Client(n_workers=2, threads_per_worker=1, processes=False,
    ...             dashboard_address=":0") as client:
    ...     print(dist.broadcast(da.arange(6, chunks=3), src=1).compute())
    [3 4 5]
    """
    client = find_client(client)
    tensors = tensors_of(x, axis, group, client)
    found = replicated(tensors.of(tensors.member(src, "src")), tensors)
    return Work(found, client) if async_op else found


def all_gather(
    x: da.Array,
    group: Group | None = None,
    async_op: bool = False,
    *,
    axis: int = 0,
    client: Client | None = None,
) -> Any:
    """Give the tensors of all ranks to each of them.

    Parameters
    ----------
    x, group, async_op, axis, client
        As for :func:`reduce`.

    Returns
    -------
    dask.array.Array or Work
        One chunk: the group's tensors one after the other along `axis` (those of all ranks are
        `x`), in the memory of every rank of the group.

    Raises
    ------
    LayoutError, TypeError
        As :func:`reduce`.

    Examples
    --------
    >>> import dask.array as da
    >>> from dask_redist import dist
    >>> from distributed import Client
    >>> with Client(n_workers=2, threads_per_worker=1, processes=False,
    ...             dashboard_address=":0") as client:
    ...     y = dist.all_gather(da.arange(6, chunks=3))
    ...     print(y.chunks, y.compute())
    ((6,),) [0 1 2 3 4 5]
    """
    client = find_client(client)
    tensors = tensors_of(x, axis, group, client)
    found = replicated(tensors.x, tensors)
    return Work(found, client) if async_op else found


def barrier(group: Group | None = None, *, client: Client | None = None) -> None:
    """Wait until all ranks answer and have done what exchanges they had been told to do.

    Parameters
    ----------
    group : Group, optional
        The ranks that are waited for; default: all.
    client : distributed.Client, optional
        Default: the current one. It is connected if nobody did.

    Raises
    ------
    RunTimeoutError
        Some did not answer within ``redist.timeout``; names them.

    Notes
    -----
    There are no programs on the ranks that could meet: it is the caller who waits. For the result
    of a collective wait for its :class:`Work`.

    Examples
    --------
    >>> from dask_redist import dist
    >>> from distributed import Client
    >>> with Client(n_workers=2, threads_per_worker=1, processes=False,
    ...             dashboard_address=":0") as client:
    ...     dist.barrier()
    """
    client = find_client(client)
    ranks = members(group, ranks_of(client).size)
    if late := ask_now(client, "redist_barrier", ranks=ranks)["late"]:
        raise RunTimeoutError(f"{', '.join(late)} did not reach the barrier (redist.timeout)")
