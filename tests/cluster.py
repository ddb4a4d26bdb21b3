"""What the tests on real worker processes share: clusters, oracles and the watch on silent paths.

A test array carries each element's global index, so that a misplaced element shows. Whoever
redistributes through :class:`Relayout` is watched: each redistribution that a test computes must
have left a report of a run, so that Dask's own rechunk or the in-process path cannot pass for it.
"""

import logging
import math
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import product
from operator import attrgetter
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from dask.delayed import delayed
from dask.highlevelgraph import HighLevelGraph
from distributed import Client, LocalCluster, wait
from numpy.typing import NDArray

import dask_redist as dr
from dask_redist import worth
from dask_redist.layer import RedistributeLayer
from dask_redist.reports import RunReport

SHARED_MEMORY, DASK_COMM, MPI = "shared memory", "dask comm", "mpi"


# ------------------------------------------------------------------------------------ clusters
@contextmanager
def ranks_in_threads(n: int) -> Iterator[Client]:
    """A client of n ranks that live in this process, and talk over TCP all the same."""
    with (
        LocalCluster(
            n_workers=n,
            threads_per_worker=1,
            processes=False,
            protocol="tcp",
            host="127.0.0.1",
            dashboard_address=":0",
            scheduler_kwargs={"dashboard_address": "127.0.0.1:0"},
        ) as local,
        Client(local) as client,
    ):
        dr.connect(client, n)
        yield client


@contextmanager
def ranks_of_its_own(n: int) -> Iterator[Client]:
    """A client of n workers that no other test has; not connected yet."""
    with (
        LocalCluster(
            n_workers=n, threads_per_worker=1, host="127.0.0.1", dashboard_address=":0"
        ) as local,
        Client(local) as client,
    ):
        yield client


def patient_with_the_dead() -> Any:
    """Dask's settings where workers are killed.

    It would give up, and replace, a worker that its nanny is just restarting. And a worker would go
    on connecting to a dead one for as long as tests wait for results.
    """
    return dask.config.set(
        {
            "distributed.deploy.lost-worker-timeout": "1h",
            "distributed.comm.timeouts.connect": "10s",
        }
    )


class Clusters:
    """Local clusters, started when a test asks, never two at a time; of MPI ranks if asked."""

    def __init__(self, mpi: bool = False) -> None:
        self._mpi = mpi
        self._key: tuple[int, str | None] | None = None
        self._cluster: LocalCluster | dr.LocalMPICluster | None = None
        self._client: Client | None = None
        self._processes: set[int] = set()

    def client(self, ranks: int, wire: str | None = None) -> Client:
        """A client of a healthy cluster of so many ranks; ``wire`` is forced on its workers."""
        if self._client is None or self._key != (ranks, wire) or not self._healthy():
            self.close()
            with dask.config.set({"redist.wire": wire}), warnings.catch_warnings():
                # The workers inherit the wire; that port 8787 is taken is of no interest.
                warnings.filterwarnings("ignore", "Port 8787")
                self._cluster = self._start(ranks, wire)
            self._client = Client(self._cluster)
            dr.connect(self._client, n_ranks=ranks)
            self._key, self._processes = (ranks, wire), self._pids()
        return self._client

    def _start(self, ranks: int, wire: str | None) -> LocalCluster | dr.LocalMPICluster:
        quiet: dict[str, Any] = {"dashboard_address": ":0", "silence_logs": logging.CRITICAL}
        if self._mpi or wire == MPI:
            return dr.LocalMPICluster(ranks, **quiet)
        return LocalCluster(
            n_workers=ranks, threads_per_worker=1, processes=True, host="127.0.0.1", **quiet
        )

    def close(self) -> None:
        """Leave no process behind."""
        if self._client is not None:
            self._client.close()
        if self._cluster is not None:
            self._cluster.close()
        self._client = self._cluster = self._key = None

    def _healthy(self) -> bool:
        """Whether the processes are those that were started: no test replaced one."""
        assert self._client is not None
        return self._client.status == "running" and self._pids() == self._processes

    def _pids(self) -> set[int]:
        assert self._client is not None
        return set(self._client.run(_pid).values())


def _pid() -> int:
    return os.getpid()


def memory(client: Client) -> dict[str, dict[str, int]]:
    """What each rank's arena holds, by address."""
    scheduler: Any = client.scheduler
    found: dict[str, dict[str, int]] = client.sync(scheduler.redist_memory)
    return found


def leftovers(client: Client) -> str:
    """The ranks that still hold arena bytes or runs, in words; empty where none does."""
    seats = dr.connect(client).addresses
    return "; ".join(
        f"rank {seats.index(address)}: {held}"
        for address, held in memory(client).items()
        if held["in_use"] or held["condemned"] or held["runs"]
    )


def runs(client: Client) -> list[RunReport]:
    """The reports of all runs, oldest first."""
    scheduler: Any = client.scheduler
    reports: list[RunReport] = pickle.loads(client.sync(scheduler.redist_runs))
    return reports


def last_run(client: Client) -> int:
    """The number of the newest run."""
    return max((report.number for report in runs(client)), default=0)


def since(client: Client, number: int) -> list[RunReport]:
    """The runs newer than ``number``."""
    return [report for report in runs(client) if report.number > number]


# ------------------------------------------------------------------------------------- arrays
def ar(*shape: int, dtype: Any = "f8", start: int = 0) -> NDArray[Any]:
    """Unique values: each element carries its global index."""
    return (np.arange(math.prod(shape)) + start).reshape(shape).astype(dtype)


def fa(array: NDArray[Any], chunks: Any) -> da.Array:
    """The array in chunks."""
    x: da.Array = da.from_array(array, chunks=chunks)
    return x


def placed(
    client: Client, array: NDArray[Any], chunks: Any, owners: Sequence[int] | None = None
) -> da.Array:
    """The array in chunks, in memory; chunk ``i`` in C order on rank ``owners[i]``.

    By default chunk ``i`` is on rank ``i`` modulo the number of ranks.
    """
    addresses = dr.connect(client).addresses
    lazy = da.from_array(array, chunks=chunks)
    indices = list(product(*map(range, lazy.numblocks)))
    if owners is None:
        owners = [i % len(addresses) for i in range(len(indices))]
    name = f"placed-{dask.base.tokenize(array, lazy.chunks, owners, object())}"
    ends = [np.cumsum([0, *sizes]) for sizes in lazy.chunks]
    graph: dict[Any, Any] = {}
    for index, owner in zip(indices, owners, strict=True):
        box = tuple(slice(e[i], e[i + 1]) for e, i in zip(ends, index, strict=True))
        key: Any = (name, *index)  # as a persisted array's: another key would mean one more task
        graph[key] = client.submit(np.array, array[box], workers=[addresses[owner]], key=key)
    return da.Array(
        HighLevelGraph.from_collections(name, graph, dependencies=[]),
        name,
        lazy.chunks,
        meta=lazy._meta,
    )


def owners(client: Client, x: da.Array) -> NDArray[np.int64]:
    """The rank of each persisted chunk, shaped like the chunk grid; fails unless it is one.

    Ask before anything is computed from ``x``: Dask leaves copies where its tasks ran.
    """
    rank = {address: r for r, address in enumerate(dr.connect(client).addresses)}
    wait(x)
    holders = client.who_has(client.futures_of(x))
    graph = dict(x.dask)
    found = np.full(x.numblocks, -1, np.int64)
    for index in product(*map(range, x.numblocks)):
        held = holders[graph[(x.name, *index)].key]
        assert len(held) == 1, f"chunk {index} is on {held}"
        found[index] = rank[held[0]]
    return found


# ------------------------------------------------------------------------------------ oracles
def same(got: Any, want: Any) -> None:
    """Fail unless two arrays are equal bit for bit, in shape and in dtype."""
    if isinstance(want, np.ma.MaskedArray):
        assert isinstance(got, np.ma.MaskedArray), f"the mask is lost: {type(got).__name__}"
        np.testing.assert_array_equal(np.ma.getmaskarray(got), np.ma.getmaskarray(want))
        return same(got.filled(0), want.filled(0))
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if want.dtype.hasobject:
        assert got.tolist() == want.tolist()
        assert [type(v) for v in got.flat] == [type(v) for v in want.flat]
    elif want.dtype == np.longdouble:  # six of its sixteen bytes are padding
        np.testing.assert_array_equal(got, want)
    else:
        assert np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(want).tobytes()


def check(y: da.Array, want: NDArray[Any], chunks: Any = None) -> None:
    """Fail unless ``y`` has the wanted elements, dtype and chunks, and its blocks what it says."""
    if chunks is not None:
        assert y.chunks == chunks
    assert y.dtype == want.dtype
    assert y.shape == want.shape
    held = y.persist()
    same(held.compute(), want)
    for index, shape, dtype in facts(held, "shape", "dtype"):
        assert shape == tuple(sizes[i] for sizes, i in zip(y.chunks, index, strict=True))
        assert dtype == y.dtype


def facts(y: da.Array, *names: str) -> Iterator[tuple[Any, ...]]:
    """Index and the named (dotted) attributes of each block of a persisted array."""
    blocks = y.to_delayed().ravel()
    look = delayed(lambda block: tuple(attrgetter(name)(block) for name in names))
    indices = product(*map(range, y.numblocks))
    for index, found in zip(indices, dask.base.compute(*map(look, blocks)), strict=True):
        yield index, *found


# ---------------------------------------------------------------------- the watched operation
class Relayout:
    """``redistribute``, watched: see the module's text.

    Rechunk's own arguments that ``redistribute`` does not have (``balance=True``) are turned into
    chunks by Dask first; no arguments at all mean "auto", as with rechunk.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.first = last_run(client)
        self.names: set[str] = set()

    def __call__(self, x: da.Array, target: Any = "auto", **kwargs: Any) -> da.Array:
        if kwargs.pop("balance", False):
            target = x.rechunk(target, balance=True).chunks
        y = dr.redistribute(x, target, client=self.client, **kwargs)
        layer = y.dask.layers[y.name]
        assert isinstance(layer, RedistributeLayer), f"{y.name} is Dask's own rechunk"
        self.names.add(y.name)
        if layer.name_input != x.name:  # it starts from the input of x, which may run for nobody
            self.names.discard(x.name)
        return y

    def reports(self) -> list[RunReport]:
        """The runs since the test began."""
        return since(self.client, self.first)

    def verify(self) -> None:
        """Fail unless each redistribution ran as one."""
        missing = self.names - {report.name for report in self.reports()}
        assert not missing, f"computed without a run: {missing}"


@contextmanager
def new_runs(client: Client) -> Iterator[Callable[[], list[RunReport]]]:
    """The runs that begin inside the block."""
    before = last_run(client)
    yield lambda: since(client, before)


@lru_cache
def rank_counts(text: str) -> tuple[int, ...]:
    """The rank counts of a command line option."""
    return tuple(int(word) for word in text.split(","))


@contextmanager
def auto_as_if_large() -> Iterator[None]:
    """Policy "auto", which does not count tasks here: as for an array that is not small."""
    with pytest.MonkeyPatch.context() as patch, dr.enable(policy="auto"):
        patch.setattr(worth, "SMALL", 0)
        yield
