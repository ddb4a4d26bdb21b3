"""Where a Dask array is: its layout, its local shapes, the rank of each chunk.

A lazy array is asked through its graph: the redistribution that made it, below any elementwise
work. A persisted array is asked through the scheduler, which knows who has each chunk; nothing
has to be remembered, so the answer survives ``persist`` and pickle.
"""

from __future__ import annotations

import pickle
from typing import Any

import dask.array as da
import numpy as np
from dask.blockwise import Blockwise
from distributed import Client, Future
from numpy.typing import NDArray

from dask_redist import config
from dask_redist.connect import ask_now, find_client, ranks_of
from dask_redist.errors import LayoutError, RunTimeoutError
from dask_redist.layer import RedistributeLayer
from dask_redist.layouts import Boxes, Layout, Replicated, match_layout


def layout_of(x: da.Array, *, client: Client | None = None) -> Layout | None:
    """The layout of an array; None where nobody laid it out.

    Parameters
    ----------
    x : dask.array.Array
        A result of :func:`redistribute`, elementwise work on one, or a persisted array.
    client : distributed.Client, optional
        Default: the current one; needed for persisted arrays only, which are waited for.

    Returns
    -------
    Layout or None
        Lazy: the layout that the graph was built for. Persisted: the simplest layout that has
        exactly these chunks on exactly these ranks, or one that was asked for lately and has.

    Raises
    ------
    RedistError
        A persisted array and no client, or an asynchronous one.
    RunTimeoutError
        The chunks of a persisted array did not come within ``redist.timeout``.

    Examples
    --------
    >>> import dask.array as da, dask_redist as dr
    >>> from distributed import Client, wait
    >>> with Client(n_workers=2, threads_per_worker=1, processes=False,
    ...             dashboard_address=":0") as client:
    ...     y = dr.redistribute(da.ones((4, 6), chunks=2), dr.Slab.Y)
    ...     z = y.persist()
    ...     done = wait(z)
    ...     dr.layout_of(y + 1), dr.layout_of(z), dr.layout_of(da.ones(4))
    (Slab.Y, Slab.Y, None)
    """
    return _layout(x, client, guess=True)


def named_layout(x: da.Array, *, client: Client) -> Layout | None:
    """As :func:`layout_of`, but boxes of a persisted array must have been asked for.

    Chunks that nobody laid out are on some ranks all the same, and any placement is one of boxes.
    """
    return _layout(x, client, guess=False)


def is_persisted(x: da.Array) -> bool:
    """Whether the array is made of futures only."""
    return isinstance(made := _made_by(x), str) and made == x.name


def _layout(x: da.Array, client: Client | None, guess: bool) -> Layout | None:
    made = _made_by(x)
    if made is None:
        return None
    if isinstance(made, RedistributeLayer):
        return made.layout
    found = find_client(client)
    ranks = ranks_of(found).size
    owners, asked_for, copies = _placed(made, x, found, wait=True)
    if copies and owners.size == 1:
        return Replicated() if len(copies) == ranks else Replicated(copies)
    named = match_layout(x.chunks, owners, ranks)
    if named is not None and (guess or not isinstance(named, Boxes)):
        return named
    return next((at for at in asked_for if _is(at, x, owners, ranks)), None)


def lshape_map(x: da.Array, *, client: Client | None = None) -> NDArray[np.int64]:
    """The local shape of each rank, as Heat's ``lshape_map``.

    Parameters
    ----------
    x : dask.array.Array
        As for :func:`layout_of`.
    client : distributed.Client, optional
        Default: the current one.

    Returns
    -------
    ndarray of int64, (ranks, ndim)
        Row r: the shape of what rank r holds; a rank that holds nothing has a zero.

    Raises
    ------
    LayoutError
        Nobody laid the array out; :func:`owners` says where each chunk is.

    Examples
    --------
    >>> import dask.array as da, dask_redist as dr
    >>> from distributed import Client, wait
    >>> with Client(n_workers=2, threads_per_worker=1, processes=False,
    ...             dashboard_address=":0") as client:
    ...     dr.lshape_map(dr.redistribute(da.ones((4, 7), chunks=2), dr.Slab.Y))
    array([[4, 4],
           [4, 3]])
    """
    layout = layout_of(x, client=client)
    if layout is None:
        raise LayoutError(
            "this array has no layout: redistribute it first, or ask dask_redist.owners(x) for "
            "the rank of each chunk"
        )
    made = _made_by(x)
    ranks = (
        made.ranks if isinstance(made, RedistributeLayer) else ranks_of(find_client(client)).size
    )
    return layout.lshape_map(x.shape, ranks)


def owners(x: da.Array, *, client: Client | None = None) -> NDArray[np.int64]:
    """The rank that has each chunk in memory.

    Parameters
    ----------
    x : dask.array.Array
        Any array.
    client : distributed.Client, optional
        Default: the current one.

    Returns
    -------
    ndarray of int64, ``x.numblocks``
        -1 where a chunk is not in memory; the rank that computed it where several have a copy.

    Examples
    --------
    >>> import dask.array as da, dask_redist as dr
    >>> from distributed import Client, wait
    >>> with Client(n_workers=2, threads_per_worker=1, processes=False,
    ...             dashboard_address=":0") as client:
    ...     y = dr.redistribute(da.ones((4, 6), chunks=2), dr.Slab.Y)
    ...     z = y.persist()
    ...     done = wait(z)
    ...     dr.owners(y + 1).tolist(), dr.owners(z).tolist()
    ([[-1, -1]], [[0, 1]])
    """
    return _placed(x.name, x, find_client(client))[0]


def is_replicated(x: da.Array, *, client: Client) -> bool:
    """Whether every one of several ranks has the one chunk of a persisted array in memory."""
    if x.npartitions != 1 or _made_by(x) != x.name or client.asynchronous:
        return False
    copies = _placed(x.name, x, client)[2]
    return len(copies) > 1 and len(copies) == ranks_of(client).size


def _made_by(x: da.Array) -> RedistributeLayer | str | None:
    """The redistribution behind an array, or the name of the persisted array behind it."""
    layers = x.dask.layers
    seen: set[str] = set()
    names: list[str] = [x.name]
    while names:
        name = names.pop()
        if name in seen or name not in layers:
            continue
        seen.add(name)
        layer = layers[name]
        if isinstance(layer, RedistributeLayer):
            if layer.chunks == x.chunks:
                return layer
        elif isinstance(layer, Blockwise):
            names += [str(n) for n, ind in layer.indices if ind == layer.output_indices]
        elif all(
            isinstance(layer.get((name, *index)), Future) for index in np.ndindex(*x.numblocks)
        ):
            return name
    return None


def _is(layout: Layout, x: da.Array, owners: NDArray[np.int64], ranks: int) -> bool:
    try:
        same = layout.chunks(x.shape, ranks) == x.chunks
        return same and np.array_equal(layout.owners(x.shape, ranks), owners)
    except LayoutError:
        return False


def _placed(
    name: str, x: da.Array, client: Client, wait: bool = False
) -> tuple[NDArray[np.int64], list[Layout], list[int]]:
    """The rank of each chunk of the array ``name``, chunked like x; layouts lately asked for;
    the ranks that have all of it by layout, or all ranks.

    ``wait``: until nothing of it is being computed any more.
    """
    ranks_of(client)
    keys: list[Any] = [(name, *index) for index in np.ndindex(*x.numblocks)]
    seconds = config.seconds("timeout") if wait else 0.0
    found = ask_now(client, "redist_owners", keys=keys, timeout=seconds)
    if wait and found["pending"]:
        raise RunTimeoutError(
            f"{found['pending']} chunks of {name!r} are not in memory after {seconds:g} s "
            "(redist.timeout); wait for them: distributed.wait(x)"
        )
    owners = np.array(found["owners"], np.int64).reshape(x.numblocks)
    return owners, pickle.loads(found["layouts"]), found["copies"]
