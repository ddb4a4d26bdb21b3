"""What once went wrong: under memory pressure, with stopped ranks, with tasks that are copies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from cluster import memory
from dask.graph_manipulation import clone
from distributed import Client, LocalCluster, wait
from distributed.protocol.pickle import dumps, loads
from waiting import nothing_held, until

import dask_redist as dr

VALUES = np.arange(36 * 6 * 20).reshape(36, 6, 20)


@contextmanager
def started(n_workers: int, threads: int = 1, **options: Any) -> Iterator[Client]:
    with (
        LocalCluster(
            n_workers=n_workers,
            threads_per_worker=threads,
            host="127.0.0.1",
            dashboard_address=":0",
            **options,
        ) as local,
        Client(local) as client,
    ):
        dr.connect(client)
        yield client


def slowly(chunk: np.ndarray, seconds: float = 0.02) -> np.ndarray:
    time.sleep(seconds)
    return chunk


def test_more_than_a_paused_worker_can_hold_ends_in_an_error() -> None:
    """Untaken outputs cannot be spilled; a worker that they pause must not wait for ever."""
    values = np.random.default_rng(0).integers(0, 1 << 60, (4000, 2000))
    with dask.config.set({"redist.timeout": "5s"}), started(2, memory_limit="300MB") as client:
        kept = []
        for i in range(4):
            x = da.from_array(values, chunks=(250, -1)) + i
            y = dr.redistribute(x, dr.Slab.Y).persist()
            wait(y, timeout=60)
            if any(future.status == "error" for future in client.futures_of(y)):
                with pytest.raises(dr.AdmissionError, match="memory limit"):
                    y.compute()
                break
            kept.append(y)
        for i, y in enumerate(kept):
            assert np.array_equal(y[:, ::500].compute(), values[:, ::500] + i)


@pytest.mark.everything
def test_a_rank_that_stays_paused_is_not_waited_for(tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def gated(chunk: np.ndarray, block_id: tuple[int, ...] = ()) -> np.ndarray:
        while block_id[0] == 3 and not gate.exists():
            time.sleep(0.02)
        return chunk

    def pause_at(fraction: float, dask_worker: Any) -> None:
        dask_worker.memory_manager.memory_pause_fraction = fraction

    with dask.config.set({"redist.timeout": "2s"}), started(2) as client:
        x = da.from_array(VALUES, chunks=(9, -1, -1)).map_blocks(gated, dtype=VALUES.dtype)
        future = client.compute(dr.redistribute(x, dr.Slab.Y))
        until(lambda: bool(dr.runs()))
        busy = str(client.processing())
        idle = [address for address in dr.connect(client).addresses if busy.count(address) == 1]
        client.run(pause_at, 1e-6, workers=idle[:1])
        time.sleep(4)
        gate.touch()
        wait(future, timeout=30)
        with pytest.raises(dr.AdmissionError, match=r"rank [01] on tcp.* was paused by Dask for"):
            future.result()
        client.run(pause_at, 0.8)
        until(lambda: nothing_held(client))
        y = dr.redistribute(da.from_array(VALUES, chunks=(9, -1, -1)), dr.Slab.Y)
        assert np.array_equal(y.compute(), VALUES)


def test_many_joins_at_once_on_a_rank() -> None:
    with started(3, threads=2) as client:
        values = np.arange(120).reshape(6, 5, 4)
        for i in range(60):
            y = dr.redistribute(da.from_array(values + i, chunks=(2, 3, -1)), dr.Pencil.Z)
            assert np.array_equal(y.compute(), values + i)
        until(lambda: nothing_held(client))
        assert all(m["condemned"] == 0 for m in memory(client).values())


@pytest.mark.everything
def test_a_rank_that_was_stopped_while_its_runs_ended() -> None:
    with dask.config.set({"redist.timeout": "3s"}), started(3) as client:
        x = da.from_array(VALUES, chunks=(1, -1, -1)).map_blocks(slowly, dtype=VALUES.dtype)
        x = x.persist()
        wait(x)
        y = dr.redistribute(x, (6, 3, -1))  # six parts
        future = client.compute(y)
        time.sleep(0.1)
        pid = dr.connect(client).seats[1].process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(0.3)
            client.cancel(future)
            time.sleep(5)
        finally:
            os.kill(pid, signal.SIGCONT)
        del future
        for _ in range(2):
            assert np.array_equal(client.compute(y).result(timeout=30), VALUES)
        del x, y
        until(lambda: nothing_held(client))


def test_nothing_is_held_after_a_refusal() -> None:
    values = np.arange(1_000_000).reshape(1000, 1000)
    with started(2, memory_limit="400MB") as client:
        for i in range(2):
            y = dr.redistribute(da.from_array(values + i, chunks=(500, -1)), dr.Slab.Y).persist()
            wait(y)
            wide = da.broadcast_to(y[None], (60, 1000, 1000), chunks=((60,), *y.chunks))
            future = client.compute(dr.redistribute(wide, dr.Slab.X))
            wait(future)
            assert isinstance(future.exception(), dr.AdmissionError)
            del y, wide, future
        until(lambda: nothing_held(client))


def test_a_compute_inside_a_task_and_a_clone_beside_the_original() -> None:
    with started(3, threads=2) as client:
        x = da.from_array(VALUES, chunks=(6, -1, -1)).map_blocks(slowly, dtype=VALUES.dtype)
        y = dr.redistribute(x, dr.Slab.Y)
        outer = client.compute(y)
        pickled = dumps(y)

        def inside(number: int) -> np.ndarray:
            found: np.ndarray = loads(pickled).compute(scheduler="sync")
            return found

        inner = client.map(inside, range(3), pure=False, priority=10)
        assert np.array_equal(outer.result(timeout=30), VALUES)
        assert all(np.array_equal(found, VALUES) for found in client.gather(inner))

        x = x.persist()
        z = dr.redistribute(x, dr.Slab.Y)
        original, copy = client.compute([z, clone(z, omit=x)])
        assert np.array_equal(original.result(timeout=30), VALUES)
        assert np.array_equal(copy.result(timeout=30), VALUES)


def test_resources_do_not_keep_takes_from_their_rank() -> None:
    values = np.arange(600).reshape(20, 30)
    with started(2) as client:
        address = dr.connect(client).addresses[0]
        client.run(_set_resource, workers=[address])
        y = dr.redistribute(da.from_array(values, chunks=(5, -1)), dr.Slab.Y)
        found = client.compute(y, resources={"mem": 1}).result(timeout=30)
        assert np.array_equal(found, values)


async def _set_resource(dask_worker: Any) -> None:
    await dask_worker.set_resources(mem=5)


def test_overlapping_slices_leave_no_task_behind() -> None:
    with started(2) as client, Client(client.cluster) as other:
        x = da.from_array(VALUES, chunks=(6, -1, -1)).map_blocks(slowly, dtype=VALUES.dtype)
        y = dr.redistribute(x, {0: -1, 2: 4})
        for _ in range(2):
            parts: list[Any] = [np.s_[:, :, :8], np.s_[:], np.s_[:, :, 10:]]
            clients = (client, other, other)
            futures = [(c.compute(y[p]), p) for c, p in zip(clients, parts, strict=True)]
            for future, part in futures:
                assert np.array_equal(future.result(timeout=30), VALUES[part])
            del futures, future
        scheduler: Any = client.cluster
        until(lambda: not scheduler.scheduler.tasks)


def test_named_segments_of_killed_ranks_are_removed(tmp_path: Path) -> None:
    with dask.config.set({"redist.arena.directory": str(tmp_path)}), started(2) as client:
        assert len(list(tmp_path.iterdir())) == 2
        victim = dr.connect(client).seats[0]
        y = dr.redistribute(da.from_array(VALUES, chunks=(6, -1, -1)), dr.Slab.Y).persist()
        wait(y)
        os.kill(victim.process.pid, signal.SIGKILL)
        until(lambda: not Path(victim.card.path).exists())
        assert np.array_equal(y.compute(), VALUES)
    assert list(tmp_path.iterdir()) == []
