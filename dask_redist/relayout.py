"""Changing the layout of a Dask array: what users call."""

from __future__ import annotations

import logging
import math
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask.array.core import normalize_chunks
from dask.highlevelgraph import HighLevelGraph
from distributed import Client
from numpy.typing import NDArray

from dask_redist import config
from dask_redist.boxes import Chunks
from dask_redist.connect import Ranks, find_client, ranks_of
from dask_redist.errors import LayoutError, RedistError
from dask_redist.inspection import is_replicated
from dask_redist.layer import RedistributeLayer
from dask_redist.layouts import Layout, Replicated, Slab, as_layout
from dask_redist.overlap import Overlap
from dask_redist.placement import balanced

logger = logging.getLogger(__name__)

#: share of all ranks' memory up to which an array is laid out by one run
TOGETHER = 1 / 8


class Target(NamedTuple):
    """What an array is to become: its chunks, and the rank of each."""

    chunks: Chunks
    owners: NDArray[np.int64]
    #: None where the owners are open: chosen at run time to move few bytes
    layout: Layout | None


def resolve(x: da.Array, target: Any, ranks: int) -> Target:
    """The chunks and owners that a layout, a target map or rechunk's own values ask for.

    Raises
    ------
    LayoutError
        The target does not fit the array or the ranks; names the value and what would fit.
    """
    if not isinstance(x, da.Array):
        raise TypeError(
            f"a {type(x).__name__} is not a dask array: use dask.array.from_array(...), or the "
            ".data of an xarray object"
        )
    for axis, sizes in enumerate(x.chunks):
        if any(math.isnan(size) for size in sizes):
            raise LayoutError(
                f"chunk sizes along axis {axis} are unknown (nan): call x.compute_chunk_sizes(), "
                "then redistribute"
            )
    limit = int(config.get("max-chunks"))
    layout = as_layout(target, x.shape, ranks)
    if layout is not None:
        chunks = layout.chunks(x.shape, ranks, max_chunks=limit)
        return Target(chunks, layout.owners(x.shape, ranks, max_chunks=limit), layout)
    chunks = _rechunk_chunks(x, target, limit)
    return Target(chunks, balanced(chunks, ranks), None)


def _rechunk_chunks(x: da.Array, value: Any, limit: int) -> Chunks:
    """Chunks as ``x.rechunk(value)`` reads them; at most ``limit`` of them."""
    if isinstance(value, type) and issubclass(value, Layout):
        raise LayoutError(f"{value.__name__} is a class of layouts: use one, such as Slab.Y")
    wanted: list[Any] = list(value) if isinstance(value, (tuple, list)) else [value] * x.ndim
    if isinstance(value, dict):
        wanted = list(x.chunks)
        for axis, sizes in value.items():
            if not isinstance(axis, (int, np.integer)) or not -x.ndim <= axis < x.ndim:
                raise LayoutError(
                    f"axis {axis!r} is out of range for an array of {x.ndim} dimensions: "
                    f"use {-x.ndim} to {x.ndim - 1}"
                )
            wanted[axis] = x.chunks[axis] if sizes is None else sizes
    elif len(wanted) == x.ndim:
        wanted = [old if new is None else new for new, old in zip(wanted, x.chunks, strict=True)]
    elif x.ndim != 1:
        raise LayoutError(
            f"{value!r} names {len(wanted)} axes, the array has {x.ndim} (a target map is an "
            "integer array of shape (ranks, ndim))"
        )
    if 0 in x.shape:  # "auto" and sizes in bytes mean nothing, and Dask would divide by zero
        wanted = [-1 if isinstance(sizes, str) else sizes for sizes in wanted]
    if len(wanted) == x.ndim:
        _refuse_many(wanted, x, limit)
    try:
        found = normalize_chunks(tuple(wanted), x.shape, dtype=x.dtype, previous_chunks=x.chunks)
    except (ValueError, TypeError) as error:
        raise LayoutError(
            f"{value!r} is neither a layout (such as dask_redist.Slab.Y) nor chunks for shape "
            f"{x.shape}: {error}"
        ) from error
    return tuple(tuple(int(size) for size in sizes) for sizes in found)


def _refuse_many(wanted: list[Any], x: da.Array, limit: int) -> None:
    """Refuse what would be too many chunks before they are listed.

    Raises
    ------
    LayoutError
        Too many, or a size that is none.
    """
    count = 1
    for axis, (sizes, length) in enumerate(zip(wanted, x.shape, strict=True)):
        if isinstance(sizes, (tuple, list)):
            count *= len(sizes)
        elif isinstance(sizes, (int, np.integer)) and sizes != -1:
            if sizes < 0 or (sizes == 0 and length > 0):
                raise LayoutError(f"chunk size {sizes} along axis {axis}; use -1, or at least 1")
            count *= max(1, -(-length // max(int(sizes), 1)))
    if count > limit:
        raise LayoutError(
            f"that cuts the array into {count} chunks, more than redist.max-chunks = {limit}"
        )


def why_not(x: da.Array) -> str | None:
    """Why an array cannot be redistributed as bytes; None if it can."""
    if x.dtype.hasobject or x.dtype.kind == "T":
        return f"elements of dtype {x.dtype} are no plain bytes"
    if type(x._meta) is not np.ndarray:
        return f"chunks are declared as {type(x._meta).__name__}, not numpy.ndarray"
    return None


def check_plain(x: object, do: str) -> None:
    """Raise `TypeError` unless ``x`` is a Dask array that ranks can ``do`` something with."""
    if not isinstance(x, da.Array):
        raise TypeError(f"a {type(x).__name__} is not a dask array: use dask.array.from_array(...)")
    if reason := why_not(x):
        raise TypeError(f"{reason}: ranks cannot {do} them")


def redistribute(
    x: da.Array, layout: Any, *, client: Client | None = None, fallback: str | None = None
) -> da.Array:
    """Change the layout of an array in one collective.

    Parameters
    ----------
    x : dask.array.Array
        Any array whose chunk sizes are known, lazy or persisted.
    layout : Layout, integer array, or what ``x.rechunk`` takes
        A layout such as ``Slab.Y`` or ``Pencil.X`` names the owner of each chunk. An integer array
        ``(ranks, ndim)`` is a target map: the local shape of each rank. With a dict, -1, "auto" or
        tuples of chunks the owners are open: the balanced placement that moves the fewest bytes
        where ``x`` is in memory, otherwise C order balanced by bytes.
    client : distributed.Client, optional
        Default: the current one. It is connected if nobody did.
    fallback : {"dask", "error"}, optional
        What to do with elements that are no plain bytes (object, StringDType, masked, sparse):
        Dask's own rechunk, or :class:`RedistError`. Default: ``redist.fallback``.

    Returns
    -------
    dask.array.Array
        Of the same shape and dtype, lazy: a graph of n_in + n_parts + n_out tasks (up to an
        eighth of all ranks' memory the parts are one). Once computed,
        chunk ``i`` is on the rank that the layout names, C-contiguous, writable, and shares memory
        with nothing; ``x`` is left as it is. Of ``Replicated()`` the one chunk is in memory on
        every rank; from there to another layout no byte moves between ranks.

    Raises
    ------
    LayoutError
        The layout does not fit the array or the ranks.
    RedistError
        No client, or ``fallback="error"`` and elements that are no plain bytes.

    Notes
    -----
    While it runs: :class:`ChunkMismatchError` where a chunk is not what ``x`` declares,
    :class:`AdmissionError` before anything moves where a rank has too little memory,
    :class:`RunTimeoutError` where a rank does not answer.

    Examples
    --------
    >>> import dask.array as da, dask_redist as dr
    >>> from distributed import Client, wait
    >>> with Client(n_workers=2, threads_per_worker=1, processes=False,
    ...             dashboard_address=":0") as client:
    ...     ranks = dr.connect(client)
    ...     x = da.arange(12, chunks=6).reshape(2, 6).persist()
    ...     y = dr.redistribute(x, dr.Slab.Y).persist()
    ...     done = wait(y)
    ...     y.chunks, dr.owners(y).tolist(), y.compute().sum()
    (((2,), (3, 3)), [[0, 1]], np.int64(66))
    """
    fallback = fallback or config.get("fallback")
    if fallback not in ("dask", "error"):
        raise ValueError(f'fallback is {fallback!r}; it must be "dask" or "error"')
    client = find_client(client)
    ranks = ranks_of(client)
    target = resolve(x, layout, ranks.size)
    if reason := why_not(x):
        if fallback == "error":
            raise RedistError(f'{reason}; fallback="dask" takes Dask\'s own rechunk')
        logger.warning("%s: Dask's own rechunk is used", reason)
        plain: da.Array = x.rechunk(target.chunks)
        return plain
    copied = is_replicated(x, client=client)
    return lay(source_of(x), target, ranks, copied=copied)


def are_together(x: da.Array, chunks: Chunks, ranks: Ranks, simple: bool = False) -> bool:
    """Whether all parts of a change are one run, which has fewer round trips than many.

    Parts of their own let a pipeline stream: they are for arrays that memory could not hold several
    times. ``simple``: some parts may be plain tasks.
    """
    parts = Overlap(x.chunks, chunks).parts
    room = TOGETHER * sum(seat.memory_limit for seat in ranks.seats)
    return x.nbytes <= room and len(parts) > 1 and not (simple and parts.some_simple)


def lay(
    x: da.Array, target: Target, ranks: Ranks, *, simple: bool = False, copied: bool = False
) -> da.Array:
    """The array as it is to become; see :class:`RedistributeLayer`."""
    layer = RedistributeLayer(
        x.name,
        x.chunks,
        target.chunks,
        x.dtype,
        target.owners,
        target.layout,
        ranks.size,
        simple=simple,
        copied=copied,
        together=are_together(x, target.chunks, ranks, simple),
    )
    graph = HighLevelGraph.from_collections(layer.name, layer, dependencies=[x])  # type: ignore[list-item]
    return da.Array(graph, layer.name, target.chunks, meta=x._meta)


def source_of(x: da.Array) -> da.Array:
    """What a change of layout starts from: where ``x`` is a lazy change itself, its own input."""
    while True:
        layer = x.dask.layers.get(x.name)
        if not isinstance(layer, RedistributeLayer) or layer.chunks != x.chunks:
            return x
        graph = _below(x.dask, layer.name)
        x = da.Array(graph, layer.name_input, layer.chunks_in, meta=x._meta)


def _below(graph: HighLevelGraph, name: str) -> HighLevelGraph:
    """The layers that ``name`` is made from."""
    needed: set[str] = set()
    names = set(graph.dependencies[name])
    while names:
        needed |= names
        names = {d for n in names for d in graph.dependencies[n]} - needed
    return HighLevelGraph(
        {n: graph.layers[n] for n in graph.layers if n in needed},
        {n: graph.dependencies[n] for n in graph.layers if n in needed},
    )


def resplit(
    x: da.Array, axis: int | None, *, client: Client | None = None, fallback: str | None = None
) -> da.Array:
    """Split an array along another axis, or un-split it, as Heat's ``resplit`` does.

    Parameters
    ----------
    x : dask.array.Array
        The array.
    axis : int or None
        The axis to split, one slab a rank; negative ones count from the end. None: no axis, every
        rank holds the whole array.
    client, fallback
        As for :func:`redistribute`.

    Returns
    -------
    dask.array.Array
        ``redistribute(x, Slab(axis))``, or ``redistribute(x, Replicated())``.

    Examples
    --------
    >>> import dask.array as da, dask_redist as dr
    >>> from distributed import Client
    >>> with Client(n_workers=2, threads_per_worker=1, processes=False,
    ...             dashboard_address=":0") as client:
    ...     dr.resplit(da.ones((4, 6), chunks=2), 1).chunks
    ((4,), (3, 3))
    """
    layout = Replicated() if axis is None else Slab(axis)
    return redistribute(x, layout, client=client, fallback=fallback)
