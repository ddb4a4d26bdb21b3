"""The ingredients of a race: Dask's ways, what is timed, how memory is given back, a plain copy.

A step is timed from persisted input to persisted output. A plain memory copy of the same bytes, by
all ranks at once, shows what this machine could do at best.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import dask
import dask.array as da
import numpy as np
from distributed import Client, futures_of, wait

from dask_redist.boxes import Chunks
from dask_redist.errors import RedistError, RunTimeoutError


def by_p2p(x: da.Array, chunks: Chunks, disk: bool = False) -> da.Array:
    """Dask's p2p rechunk, in memory or over the disk."""
    with dask.config.set({"distributed.p2p.storage.disk": disk}):
        y: da.Array = x.rechunk(chunks, method="p2p")
    return y


def by_tasks(x: da.Array, chunks: Chunks) -> da.Array:
    """Dask's rechunk in tasks."""
    y: da.Array = x.rechunk(chunks, method="tasks")
    return y


class Timed(NamedTuple):
    """What was made of a persisted input, persisted itself, and seconds from start to end."""

    made: da.Array
    seconds: float
    #: of these, until the graph was built, and then until it was sent
    build: float
    submit: float


def timed(make: Callable[..., da.Array], *arguments: Any) -> Timed:
    """Time a step from persisted input, among the arguments of ``make``, to persisted output."""
    start = time.perf_counter()
    lazy = make(*arguments)
    built = time.perf_counter()
    y = lazy.persist()
    sent = time.perf_counter()
    wait(y)
    end = time.perf_counter()
    for future in futures_of(y):
        if future.status == "error":
            future.result()
    return Timed(y, end - start, built - start, sent - built)


def let_go(client: Client, y: da.Array) -> None:
    """Release an array and wait until no rank holds it, so that its memory is there again."""
    for future in futures_of(y):
        future.release()
    deadline = time.monotonic() + 30
    while any(client.run(_chunks, y.name).values()):
        if time.monotonic() > deadline:
            raise RunTimeoutError(f"ranks still hold {y.name}, 30 s after it was released")
        time.sleep(0.005)


def _chunks(name: str, dask_worker: Any = None) -> dict[tuple[int, ...], Any]:
    """The keys of an array's chunks on a worker, by index."""
    return {k[1:]: k for k in dask_worker.data if isinstance(k, tuple) and k[0] == name}


def copy(client: Client, x: da.Array, given: da.Array) -> float:
    """Seconds in which all ranks at once copy their chunks into warm memory of their own."""
    copied, starts, ends = zip(*client.run(_copy_here, x.name, given.name).values(), strict=True)
    if sum(copied) != x.nbytes:
        raise RedistError(f"{sum(copied)} of {x.nbytes} bytes were copied: a chunk is not there")
    # Each by its own clock: ranks may be on several machines.
    return float(max(end - start for start, end in zip(starts, ends, strict=True)))


def _copy_here(name: str, into: str, dask_worker: Any = None) -> tuple[int, float, float]:
    data, mine, theirs = dask_worker.data, _chunks(name, dask_worker), _chunks(into, dask_worker)
    pairs = [(data[theirs[i]], data[mine[i]]) for i in mine.keys() & theirs.keys()]
    start = time.monotonic()
    for to, what in pairs:
        np.copyto(to, what)
    return sum(to.nbytes for to, _ in pairs), start, time.monotonic()
