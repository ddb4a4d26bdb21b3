"""Pipelines stream: a merge of neighbours goes from Zarr to Zarr in a fraction of its memory.

Parts of few chunks stay plain tasks, larger parts run each on their own; either way what a
pipeline holds at one time is a few outputs, whatever the array's size.

How memory is measured. Two workers have 550 MB each, of which Python and its packages take some
190 before any data: what is left is the workers' memory here, and the array is four times as large.
All pipelines, Dask's own too, run on one cluster. Before each, every process gives back what it
does not use: the arena its idle pages, malloc its free ones. Then the resident memory of the two
processes is read every few milliseconds from outside, as Dask's Nanny does. A peak is that of whole
processes, as Dask's limits are; an output has 34 MB, so that three more of them on a rank are seen.
(Above the base, peaks jump by a third with a single output that is stored a moment later.)

All that runs with ``--everything`` only; merges of few chunks, whose graphs are Dask's own, and
policy "always" with two sevenths of the array.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
import psutil
import pytest
import zarr
from cluster import ar, auto_as_if_large, check, fa, new_runs
from distributed import Client, LocalCluster, Worker
from numpy.typing import NDArray
from zarr.codecs import BloscCodec

import dask_redist as dr
from dask_redist.layer import RedistributeLayer
from dask_redist.rank import rank_of
from dask_redist.tasks import FenceTask

MB = 10**6
LIMIT = 550 * MB
RANKS = 2
ROWS, COLUMNS = 100, 2500  # a stored chunk: 2 MB of float64
STRIPES = range(0, COLUMNS, 100)  # columns that are looked at
FAST = BloscCodec(cname="lz4", clevel=1, shuffle="noshuffle")


class Merge(NamedTuple):
    """A merge of neighbours."""

    #: stored chunks in an input chunk
    stored: int
    #: input chunks in an output
    merged: int
    #: share of the array that goes through, from its beginning
    share: float


FEW, MANY = Merge(3, 4, 2 / 7), Merge(1, 17, 1)

#: the merge, the policy, and whether its parts are runs
MERGES = {
    "17 to 1, auto": (MANY, "auto", True),
    "4 to 1, auto": (FEW, "auto", False),
    "4 to 1, always": (FEW, "always", True),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "policy" in metafunc.fixturenames:
        metafunc.parametrize(("merge", "policy", "runs"), MERGES.values(), ids=list(MERGES))


class Peak(NamedTuple):
    """Bytes of process memory at most: of the largest process, and of all together."""

    largest: int
    together: int


def values(rows: NDArray[Any], columns: NDArray[Any]) -> NDArray[np.float64]:
    """The elements at these places: they tell the row and the eighth of the row that they are in.

    Eighths are alike inside, so that the array compresses well and a test need not wait for disks.
    """
    found: NDArray[np.float64] = (8.0 * rows)[:, None] + columns * 8 // COLUMNS
    return found


def make(block_info: Any = None) -> NDArray[np.float64]:
    rows, columns = block_info[None]["array-location"]
    return values(np.arange(*rows), np.arange(*columns))


def right(block: NDArray[np.float64], block_info: Any = None) -> NDArray[np.int64]:
    """How many elements of a few columns of a block are what they should be."""
    rows, columns = (np.arange(*bounds) for bounds in block_info[0]["array-location"])
    found = np.count_nonzero(block[:, STRIPES] == values(rows, columns[STRIPES]))
    return np.full((1, 1), found)


def tidy(dask_worker: Worker) -> int:
    """Give back to the system what this process does not use; its resident memory then."""
    rank = rank_of(dask_worker)
    assert rank is not None
    rank.arena.trim()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


class LostWorker(Exception):
    """A nanny has ended a worker that went over its memory limit."""


class Watch:
    """The peak of processes' memory inside the block."""

    def __init__(self, pids: list[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._largest = self._together = 0

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.004):
            try:
                now = [process.memory_info().rss for process in self._processes]
            except psutil.NoSuchProcess:  # whoever merges sees that a worker is lost
                return
            self._largest = max(self._largest, *now)
            self._together = max(self._together, sum(now))

    @property
    def peak(self) -> Peak:
        return Peak(self._largest, self._together)


class Pipelines:
    """Pipelines from Zarr to Zarr on one cluster."""

    def __init__(self, client: Client, folder: Path) -> None:
        self.client, self.folder = client, folder
        self._stock: dict[Merge, Peak] = {}
        self.source = self._zarr("small", 8, 1)
        for policy in (None, "always"):  # imports, and whatever else is done once
            self._store(self._merged(Merge(1, 4, 1), policy), 4)
        room = sum(LIMIT - base for base in client.run(tidy).values())
        whole = 7 * FEW.stored * FEW.merged * MANY.merged  # outputs of either merge
        length = -(-4 * room // (ROWS * COLUMNS * 8 * whole)) * whole
        self.source = self._zarr("source", length, 1)
        da.map_blocks(
            make,
            chunks=((ROWS,) * length, (COLUMNS,)),
            dtype="f8",
            meta=np.empty((0, 0)),
        ).store(self.source, lock=False)

    def _zarr(self, name: str, length: int, stored: int) -> Any:
        return zarr.create_array(
            str(self.folder / name),
            shape=(length * ROWS, COLUMNS),
            chunks=(stored * ROWS, COLUMNS),
            dtype="f8",
            compressors=FAST,
            overwrite=True,
        )

    def _merged(self, merge: Merge, policy: str | None) -> da.Array:
        x = da.from_zarr(self.source, chunks=(merge.stored * ROWS, COLUMNS))
        x = x[: round(merge.share * x.shape[0])]
        with dr.enable(policy=policy) if policy else nullcontext():
            y: da.Array = x.rechunk((merge.stored * merge.merged * ROWS, COLUMNS))
        return y

    def _store(self, y: da.Array, stored: int) -> Any:
        target = self._zarr("target", y.shape[0] // ROWS, stored)
        self.client.compute(da.store(y, target, lock=False, compute=False)).result()
        return target

    def merge(self, merge: Merge, policy: str | None) -> tuple[da.Array, Peak]:
        """Read, merge and write the array, check what the hook wrote; what was made, the peak."""
        y = self._merged(merge, policy)
        self.client.run(tidy)
        pids = [seat.process.pid for seat in dr.connect(self.client).seats]
        with Watch(pids) as watch:
            target = self._store(y, merge.stored * merge.merged)
        if [seat.process.pid for seat in dr.connect(self.client).seats] != pids:
            raise LostWorker("a worker went over its memory limit")
        if policy:
            counts = da.from_zarr(target).map_blocks(right, chunks=(1, 1), dtype="i8")
            assert counts.sum().compute() == y.shape[0] * len(STRIPES)
        return y, watch.peak

    def stock(self, merge: Merge) -> Peak:
        """The peak without the hook."""
        for _ in range(3):  # now and then Dask's own tasks need more than the limit
            if merge not in self._stock:
                with suppress(LostWorker):
                    y, self._stock[merge] = self.merge(merge, None)
                    layers = y.dask.layers.values()
                    assert not any(isinstance(layer, RedistributeLayer) for layer in layers)
                dr.connect(self.client, n_ranks=RANKS)
        return self._stock[merge]


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipelines]:
    with (
        LocalCluster(
            n_workers=RANKS,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address=":0",
            memory_limit=LIMIT,
        ) as local,
        Client(local) as client,
    ):
        dr.connect(client, n_ranks=RANKS)
        yield Pipelines(client, tmp_path_factory.mktemp("streams"))


@pytest.mark.everything
@pytest.mark.timeout(300)
def test_a_merge_of_neighbours_streams(
    pipelines: Pipelines, merge: Merge, policy: str, runs: bool
) -> None:
    stock = pipelines.stock(merge)
    with new_runs(pipelines.client) as ran:
        y, peak = pipelines.merge(merge, policy)
        reports = ran()
    assert len(reports) == (y.npartitions if runs else 0)  # each part on its own
    assert {(report.name, report.n_in) for report in reports} <= {(y.name, merge.merged)}
    for name, ours, dasks in zip(Peak._fields, peak, stock, strict=True):
        assert ours <= 1.2 * dasks, f"{name}: {ours / MB:.0f} MB, {dasks / MB:.0f} without the hook"


@pytest.mark.ranks(2)
def test_parts_of_few_chunks_stay_plain_tasks(client: Client) -> None:
    """Merges and splits of 4, 16 and 17 chunks in one change of layout: only those of 17 run."""
    array = ar(74, 6)
    many, few = (1,) * 37, (4, 16, 17)
    with auto_as_if_large():
        y = fa(array, (many + few, 6)).rechunk((few + many, 6))
    tasks = dict(y.dask.layers[y.name]).values()
    assert sum(isinstance(task, FenceTask) for task in tasks) == 2
    with new_runs(client) as ran:
        check(y, array)
        assert sorted((run.n_in, run.n_out) for run in ran()) == [(1, 17), (17, 1)]
    with new_runs(client) as ran:
        check(y[:20], array[:20])
        assert not ran()
