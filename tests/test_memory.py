"""Memory on real workers: pages of peers, spilling, idle pages, admission."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import psutil
import pytest
from cluster import memory
from distributed import Client, LocalCluster, Worker, wait
from waiting import until

import dask_redist as dr

MIB = 2**20


@contextmanager
def limited(memory_limit: int, n_workers: int = 2) -> Iterator[Client]:
    with (
        LocalCluster(
            n_workers=n_workers,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address=":0",
            memory_limit=memory_limit,
        ) as local,
        Client(local) as client,
    ):
        dr.connect(client)
        yield client


def rss(client: Client, rank: int) -> int:
    """Resident bytes of a rank's process, as Dask's Nanny reads them: from outside."""
    return int(psutil.Process(dr.connect(client).seats[rank].process.pid).memory_info().rss)


def arenas(client: Client) -> list[dict[str, int]]:
    found = memory(client)
    return [found[address] for address in dr.connect(client).addresses]


def field(nbytes: int, ranks: int) -> da.Array:
    """Float64 of so many bytes, each element its own index, one slab a rank."""
    rows = nbytes // 8 // 4096
    x: da.Array = da.arange(rows * 4096, chunks=(rows // ranks * 4096,), dtype="f8").reshape(
        rows, 4096
    )
    return x


def events(client: Client) -> list[str]:
    """What the workers' memory monitors did: paused, spilled, restarted."""

    def states(dask_worker: Worker) -> str:
        spilled = len(getattr(dask_worker.data, "slow", ()) or ())
        return f"{dask_worker.status.name} {spilled}"

    return sorted(client.run(states).values())


def test_pages_that_a_rank_wrote_at_a_peer_do_not_count_as_its_memory() -> None:
    limit = 800 * MIB
    with limited(limit) as client:
        x = field(200 * MIB, 2).persist()
        wait(x)
        pids = [seat.process.pid for seat in dr.connect(client).seats]
        before = rss(client, 0)
        y = dr.redistribute(x, dr.Uneven(0, (0, x.shape[0]))).persist()  # rank 0 sends its half
        wait(y)
        assert dr.runs()[-1].bytes_moved == 100 * MIB
        grown = rss(client, 0) - before
        assert grown < 0.05 * limit + 10 * MIB, f"{grown / MIB:.0f} MiB of a peer's pages"
        time.sleep(0.5)  # the monitors look every 100 ms
        assert [seat.process.pid for seat in dr.connect(client).seats] == pids
        assert [state.split()[0] for state in events(client)] == ["running", "running"]


def test_spilling_one_array_lowers_the_resident_memory_by_its_bytes() -> None:
    with limited(2000 * MIB) as client:
        y = dr.redistribute(field(256 * MIB, 2), dr.Slab.X).persist()
        wait(y)
        before = [rss(client, rank) for rank in range(2)]
        assert [a["in_use"] for a in arenas(client)] == [128 * MIB] * 2

        def spill(dask_worker: Worker) -> int:
            data: Any = dask_worker.data
            return int(data.evict())

        assert list(client.run(spill).values()) == [128 * MIB] * 2
        until(lambda: all(a["in_use"] == 0 for a in arenas(client)))
        assert [a["idle"] for a in arenas(client)] == [0, 0]
        for rank in range(2):
            fell = before[rank] - rss(client, rank)
            assert fell > 0.9 * 128 * MIB, f"rank {rank}: {fell / MIB:.0f} MiB fell"
        index = np.arange(y.size, dtype="f8").reshape(y.shape)
        assert np.array_equal(y.compute(), index)  # read back from disk


def test_idle_pages_are_bounded_and_do_not_make_dask_spill() -> None:
    limit = 1000 * MIB
    with limited(limit) as client:
        x = field(400 * MIB, 2)
        y = dr.redistribute(x, dr.Slab.Y).persist()
        wait(y)
        del y
        until(lambda: all(a["in_use"] == 0 for a in arenas(client)))
        assert all(a["idle"] <= 0.1 * limit for a in arenas(client))
        until(lambda: all(rss(client, rank) < 0.1 * limit + 250 * MIB for rank in range(2)))


def test_too_little_memory_is_said_before_anything_moves() -> None:
    with limited(400 * MIB) as client:
        x = field(1600 * MIB, 64).rechunk((800, -1), method="tasks")
        y = dr.redistribute(x, dr.Slab.Y)
        with pytest.raises(
            dr.AdmissionError, match=r"rank [01] on tcp.*needs 838860800 bytes.*bytes .*are there"
        ):
            y.compute()
        assert all(arena["received"] == 0 for arena in arenas(client))
        assert dr.runs() == []
        small = np.arange(60).reshape(6, 10)
        z = dr.redistribute(da.from_array(small, chunks=3), dr.Slab.Y)
        assert np.array_equal(z.compute(), small)
        until(lambda: all(a["in_use"] == 0 and a["runs"] == 0 for a in arenas(client)))


def _last_run(dask_scheduler: Any) -> int:
    number: int = dask_scheduler.plugins["dask_redist"].conductor._last
    return number


def held_up(chunk: np.ndarray, gate: str, block_id: tuple[int, ...] = ()) -> np.ndarray:
    while block_id[0] == 0 and not Path(gate).exists():
        time.sleep(0.02)
    return chunk


@contextmanager
def a_run_that_is_held_up(gate: Path) -> Iterator[tuple[Client, da.Array, da.Array]]:
    """A client, an array of which there is room for one, and its redistribution under way."""
    with limited(600 * MIB) as client:
        x = field(320 * MIB, 64)
        held = da.map_blocks(held_up, x, gate=str(gate), dtype="f8")
        y = dr.redistribute(held, dr.Slab.Y).persist()
        until(lambda: len(dr.runs()) == 1)
        yield client, x, y


@pytest.mark.everything
def test_outputs_that_wait_to_be_taken_are_waited_for(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with a_run_that_is_held_up(gate) as (client, x, first):
        everywhere = {"workers": dr.connect(client).addresses, "allow_other_workers": True}
        second = client.persist(dr.redistribute(x + 1, dr.Slab.Y), **everywhere)
        time.sleep(2)
        assert client.run_on_scheduler(_last_run) < 40  # it asks now and then
        assert all(future.status == "pending" for future in client.futures_of(second))
        assert len(dr.runs()) == 1  # what was not begun is no run
        third = dr.redistribute(x + 2, dr.Slab.Y).persist()
        time.sleep(0.5)
        client.cancel(third)  # while it waits
        gate.touch()
        index = np.arange(x.size, dtype="f8").reshape(x.shape)
        assert np.array_equal(second[::7].compute(), index[::7] + 1)
        assert np.array_equal(first[::7].compute(), index[::7])
        assert len(dr.runs()) == 2
        del first, second, third
        until(lambda: all(a["in_use"] == 0 and a["runs"] == 0 for a in arenas(client)))


@pytest.mark.everything
def test_outputs_that_nobody_takes_are_not_waited_for_without_end(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with (
        dask.config.set({"redist.timeout": "3s"}),
        a_run_that_is_held_up(gate) as (_, x, first),
    ):
        sevens = da.full(x.shape, 7.0, chunks=x.chunks)
        with pytest.raises(
            dr.AdmissionError, match=r"needs 167772160 bytes.* no task has ended for 3 s \(redist"
        ):
            dr.redistribute(sevens, dr.Slab.Y).compute()
        gate.touch()
        wait(first)
        assert (dr.redistribute(sevens, dr.Slab.Y)[::7].compute() == 7.0).all()
        index = np.arange(x.size, dtype="f8").reshape(x.shape)
        assert np.array_equal(first[::7].compute(), index[::7])


def test_managed_memory_is_spilled_to_make_room() -> None:
    with limited(600 * MIB):
        x = field(400 * MIB, 16).persist()
        wait(x)
        y = dr.redistribute(x, dr.Slab.X).persist()  # 200 + 200 MiB a rank, and Python itself
        wait(y)
        assert y.map_blocks(lambda b: b[:1, :1]).compute().ravel().tolist() == [
            0.0,
            float(x.size // 2),
        ]
