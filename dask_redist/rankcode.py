"""Running a function on all ranks at once, each with its own array: what users call."""

from __future__ import annotations

import math
import pickle
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import dask.array as da
import numpy as np
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from distributed import Client, Future, wait
from distributed.protocol import pickle as by_value
from distributed.protocol.serialize import to_serialize
from numpy.typing import NDArray

from dask_redist.boxes import IntArray
from dask_redist.connect import Ranks, ask, find_client, ranks_of
from dask_redist.errors import LayoutError, RedistError
from dask_redist.inspection import is_persisted, layout_of, named_layout, owners
from dask_redist.joining import Joined
from dask_redist.layouts import Layout, Replicated, match_layout
from dask_redist.partition import integer
from dask_redist.programs import Join
from dask_redist.rankprograms import Local
from dask_redist.relayout import check_plain, redistribute


def map_ranks(
    fn: Callable[..., Any],
    x: da.Array | tuple[da.Array, ...] | None,
    *args: Any,
    axis: int | None = None,
    client: Client | None = None,
    **kwargs: Any,
) -> Any:
    """Run a function on all ranks at once, each with its own chunk and a communicator.

    Parameters
    ----------
    fn : callable
        ``fn(local_array, comm, *args, **kwargs)``; `comm` is a :class:`RankComm`. It travels by
        value, with its arguments: keep these small.
    x : dask.array.Array, tuple of them, or None
        With one chunk a rank, in any layout; without a layout chunk ``r`` is rank ``r``'s. It is
        computed, and laid where it belongs, first. `local_array` is the rank's chunk itself,
        read-only; of a rank that owns nothing an array of size zero; for a tuple a tuple; for None
        None.
    *args, **kwargs
        Handed to `fn`.
    axis : int, optional
        The axis along which the ranks' arrays are joined. Default: the one along which `x` (the
        first of several) is split, else 0; arrays of an `x` that is split along several axes are
        joined on its grid.
    client : distributed.Client, optional
        Default: the current one. It is connected if nobody did.

    Returns
    -------
    dask.array.Array or list
        Where all ranks return arrays that fit: a Dask array of them, in memory, each on its rank
        and not copied; a rank without elements has no chunk. Else what each rank returned, by rank.

    Raises
    ------
    LayoutError
        `x` has not one chunk a rank; says which ``redistribute`` to call. Or `axis` is no integer,
        or none of the axes of the arrays that the ranks return.
    RankLostError
        A rank has left meanwhile; names it.
    Exception
        What `fn` raised: that of the lowest rank which failed by itself, with a note that names the
        rank. The others are let go from what they wait for.

    Notes
    -----
    It waits until all ranks are done. The function runs in the thread in which the rank exchanges
    data with others, and in the same order on all ranks: two calls at once run one after the other,
    and whatever else has to be exchanged waits meanwhile, as long as ``redist.timeout``. So a
    function must end, and must not compute with Dask. An interrupt (Ctrl-C) lets ranks go that
    wait for others; one that computes goes on until it has to do with the others again.

    The arrays that are returned are data without a recipe, as scattered ones are: if their rank
    leaves, they are lost.

    Examples
    --------
    Each rank subtracts the mean of all ranks from its rows, then tells how many it has:

    >>> import dask.array as da, dask_redist as dr
    >>> from distributed import Client
    >>> def anomaly(rows, comm):
    ...     total = comm.all_reduce(rows.sum(axis=0))
    ...     count = comm.all_reduce(len(rows))
    ...     return rows - total / count
    >>> with Client(n_workers=2, threads_per_worker=1, processes=False,
    ...             dashboard_address=":0") as client:
    ...     x = dr.redistribute(da.arange(6, chunks=3).reshape(3, 2), dr.Slab.X)
    ...     y = dr.map_ranks(anomaly, x)
    ...     print(y.compute())
    ...     print(dr.lshape_map(y).tolist())
    ...     print(dr.map_ranks(lambda rows, comm: (comm.rank, len(rows)), x))
    [[-2. -2.]
     [ 0.  0.]
     [ 2.  2.]]
    [[2, 2], [1, 2]]
    [(0, 2), (1, 1)]
    """
    if isinstance(axis, bool):
        raise LayoutError(f"axis must be an integer, not {axis!r}")
    join = Join(None if axis is None else integer(axis, "axis"), asked=True)
    client = find_client(client)
    ranks = ranks_of(client)
    arrays = x if isinstance(x, tuple) else () if x is None else (x,)
    held = [_at_home(array, client, ranks) for array in arrays]
    rows = [[_local(*each, rank, ranks.size) for each in held] for rank in range(ranks.size)]
    if axis is None:
        join = _as(*held[0][:2]) if held else Join(0)
    wanted: list[Any] = [
        None if x is None else tuple(row) if isinstance(x, tuple) else row[0] for row in rows
    ]
    name = f"map_ranks-{getattr(fn, '__name__', type(fn).__name__)}"
    code = by_value.dumps((fn, args, kwargs))
    return run(
        client, ranks, name, code, join, wanted, [[each.key for each in row] for row in rows]
    )


def run(
    client: Client,
    ranks: Ranks,
    name: str,
    code: bytes,
    join: Join,
    locals: Sequence[Any] | None = None,
    keys: Sequence[Sequence[Any]] | None = None,
    pieces: Sequence[NDArray[Any]] | None = None,
) -> Any:
    """Run what is pickled in ``code`` on all ranks; see `dask_redist.programs.Programs.run`.

    Raises
    ------
    RedistError
        The client is asynchronous.
    Exception
        What went wrong.
    """
    if client.asynchronous:
        raise RedistError("this client is asynchronous and cannot wait: use one that is not")
    token = uuid.uuid4().hex
    name = f"{name}-{token}"
    try:
        return client.sync(
            *(_run, client, name),
            token=token,
            seats=[seat.seat for seat in ranks.seats],
            code=code,
            locals=[pickle.dumps(each) for each in locals or [None] * ranks.size],
            keys=keys or [[]] * ranks.size,
            join=pickle.dumps(join),
            pieces=None if pieces is None else [to_serialize(piece) for piece in pieces],
        )
    except KeyboardInterrupt:
        client.sync(ask, client, "redist_give_up", token=token)
        raise


async def _run(client: Client, name: str, **arguments: Any) -> Any:
    reply = await ask(client, "redist_program", name=name, caller=client.id, **arguments)
    if "error" in reply:
        raise by_value.loads(reply["error"])
    if "values" in reply:
        return [by_value.loads(value) for value in reply["values"]]
    joined: Joined = pickle.loads(reply["joined"])
    chunks: dict[Any, Any] = {}
    for index in np.ndindex(*joined.ranks.shape):
        key: Any = (name, *index)
        chunks[key] = Future(key, client)
        client.futures[key].finish(type=np.ndarray)
    graph = HighLevelGraph({name: MaterializedLayer(chunks)}, {name: set()})
    return da.Array(graph, name, joined.chunks, dtype=joined.dtype)


# ------------------------------------------------------------------------ the ranks' own arrays
def _at_home(x: da.Array, client: Client, ranks: Ranks) -> tuple[Layout, IntArray, da.Array]:
    """An array in memory, each chunk on its rank: its layout, the rank of each chunk, itself.

    Raises
    ------
    LayoutError
        It has not one chunk a rank.
    TypeError
        It is no Dask array, or its elements are no plain bytes.
    """
    check_plain(x, "have")
    if any(math.isnan(length) for sizes in x.chunks for length in sizes):
        raise LayoutError("chunk sizes are unknown (nan): call x.compute_chunk_sizes() first")
    persisted = is_persisted(x)
    if persisted:  # where it is can be told when it is there
        _wait(x, client)
    layout, where = _layout(x, client, ranks.size)
    if not persisted:
        x = _in_memory(x, client)
    if not _is_there(x, layout, where, client):
        x = _in_memory(redistribute(x, layout, client=client), client)
    return layout, where, x


def _layout(x: da.Array, client: Client, size: int) -> tuple[Layout, IntArray]:
    """The layout of an array, and the rank of each chunk."""
    layout = named_layout(x, client=client)
    if layout is None and x.npartitions == size and x.ndim:
        layout = match_layout(x.chunks, np.arange(size).reshape(x.numblocks), size)
    if layout is not None and layout.chunks(x.shape, size) == x.chunks:
        where = layout.owners(x.shape, size)
        if np.unique(where).size == where.size:
            return layout, where
    advice = "Slab.X" if x.ndim else "Replicated()"
    raise LayoutError(
        f"the array has {' x '.join(map(str, x.numblocks)) or 1} chunks and there are {size} ranks;"
        f" each rank needs one chunk: call dask_redist.redistribute(x, dask_redist.{advice}) first"
    )


def _in_memory(x: da.Array, client: Client) -> da.Array:
    """The array, computed; raises what went wrong."""
    found: da.Array = client.persist(x)
    _wait(found, client)
    return found


def _wait(x: da.Array, client: Client) -> None:
    """Wait until an array of futures is in memory; raises what went wrong."""
    futures = client.futures_of(x)
    with client.as_current():
        wait(futures)
    for future in futures:
        if future.status != "finished":
            future.result()


def _is_there(x: da.Array, layout: Layout, where: IntArray, client: Client) -> bool:
    """Whether each chunk of an array in memory is on its rank."""
    if isinstance(layout, Replicated):
        return layout_of(x, client=client) == layout
    return np.array_equal(owners(x, client=client), where)


def _local(layout: Layout, where: IntArray, x: da.Array, rank: int, size: int) -> Local:
    """What one rank has of an array."""
    shape = layout.shape(rank, x.shape, size)
    if isinstance(layout, Replicated):
        mine = np.zeros((int(rank in layout.held_by(size)), x.ndim), np.int64)
    else:
        mine = np.argwhere(where == rank)
    chunk = tuple(mine[0].tolist()) if len(mine) else None
    return Local(x.name, chunk, shape, x.dtype)


def _as(layout: Layout, where: IntArray) -> Join:
    """How arrays are joined that come from those of a layout."""
    split = [axis for axis, blocks in enumerate(where.shape) if blocks > 1]
    if len(split) > 1:
        return Join(grid=where)
    if split:
        return Join(split[0])
    axis = getattr(layout, "axis", 0)  # all is on one rank: a slab's axis is the one that it names
    return Join(axis)
