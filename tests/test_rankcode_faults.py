"""Ranks that die, are stopped or interrupted while a function runs on all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import dask
import numpy as np
import psutil
import pytest
from cluster import ar, check, fa, memory, patient_with_the_dead
from distributed import Client, LocalCluster
from waiting import nothing_held, until

import dask_redist as dr
from dask_redist import RankComm

TIMEOUT = "3s"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with (
        patient_with_the_dead(),
        dask.config.set({"redist.timeout": TIMEOUT}),
        LocalCluster(
            n_workers=3, threads_per_worker=1, host="127.0.0.1", dashboard_address=":0"
        ) as cluster,
    ):
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        client.wait_for_workers(3, timeout=60)
        dr.connect(client, n_ranks=3, timeout=60)
        yield client


def works(client: Client) -> None:
    """The ranks are usable, and nothing of what was before is held."""

    def code(local: Any, comm: RankComm) -> Any:
        comm.all_reduce(np.ones(4000))
        return comm.redistribute(local, dr.Slab.X, dr.Slab.Y)

    x = dr.redistribute(fa(ar(9, 7), 4), dr.Slab.X)
    check(dr.map_ranks(code, x, axis=1), ar(9, 7))
    until(lambda: nothing_held(client))


def pid(client: Client, rank: int) -> int:
    found: int = dr.connect(client).seats[rank].process.pid
    return found


class InAThread(threading.Thread):
    """A call of `map_ranks`, and what it raised."""

    def __init__(self, code: Callable[..., Any], client: Client, *args: Any) -> None:
        super().__init__(daemon=True)
        self.error: BaseException | None = None
        self._call = partial(dr.map_ranks, code, None, *args, client=client)
        self.start()

    def run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = error

    def ended(self) -> BaseException:
        self.join(60)
        assert not self.is_alive()
        assert self.error is not None
        return self.error


def started(folder: Path, count: int = 3) -> None:
    until(lambda: len(list(folder.glob("started-*"))) == count)


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.everything)])
@pytest.mark.parametrize("where", ["barrier", "redistribute", "all_reduce", "alone"])
def test_a_rank_is_killed(client: Client, tmp_path: Path, where: str, victim: int) -> None:
    def code(nothing: None, comm: RankComm, folder: Path) -> None:
        shape = (comm.size * 40, 200)
        local = ar(40, 200)
        (folder / f"started-{comm.rank}").touch()
        if where == "barrier" and comm.rank == 1:
            time.sleep(600)
        while True:
            if where in ("barrier", "alone"):
                comm.barrier()
            elif where == "redistribute":
                local = comm.redistribute(local, dr.Slab.X, dr.Slab.Y)
                local = comm.redistribute(local, dr.Slab.Y, dr.Slab.X)
                assert local.shape == (shape[0] // comm.size, shape[1])
            else:
                comm.all_reduce(local)

    if where == "barrier":  # the others wait for a rank that computes, which is not killed
        where_killed, expected = 1, 1
    else:
        where_killed = expected = victim
    call = InAThread(code, client, tmp_path)
    started(tmp_path)
    time.sleep(0.3)
    address = dr.connect(client).addresses[where_killed]
    os.kill(pid(client, where_killed), signal.SIGKILL)
    error = call.ended()
    assert isinstance(error, dr.RankLostError)
    assert f"rank {expected} on {address} has left" in str(error)
    client.wait_for_workers(3, timeout=60)
    dr.connect(client, n_ranks=3, timeout=60)
    works(client)
    assert all(held["condemned"] == 0 for held in memory(client).values())


def barrier_behind_a_gate() -> Callable[..., None]:
    """A barrier to which rank 1 comes when the gate is there; made here, so that it travels."""

    def code(nothing: None, comm: RankComm, folder: Path) -> None:
        (folder / f"started-{comm.rank}").touch()
        while comm.rank == 1 and not (folder / "gate").exists():
            time.sleep(0.01)
        comm.barrier()

    return code


@pytest.mark.everything
def test_a_rank_that_waits_in_a_barrier_is_killed(client: Client, tmp_path: Path) -> None:
    call = InAThread(barrier_behind_a_gate(), client, tmp_path)
    started(tmp_path)
    os.kill(pid(client, 2), signal.SIGKILL)
    until(lambda: len(client.scheduler_info()["workers"]) < 3 or not call.is_alive())
    (tmp_path / "gate").touch()
    assert "rank 2 on" in str(call.ended())
    client.wait_for_workers(3, timeout=60)
    works(client)


@pytest.mark.everything
def test_a_rank_that_computes_is_waited_for(client: Client) -> None:
    def code(nothing: None, comm: RankComm) -> int:
        if comm.rank == 1:
            time.sleep(7)  # more than twice the timeout
        comm.barrier()
        return comm.rank

    assert dr.map_ranks(code, None) == [0, 1, 2]


@pytest.mark.everything
def test_a_rank_that_is_stopped(client: Client, tmp_path: Path) -> None:
    call = InAThread(barrier_behind_a_gate(), client, tmp_path)
    started(tmp_path)
    address, process = dr.connect(client).addresses[1], psutil.Process(pid(client, 1))
    process.suspend()
    try:
        error = call.ended()
    finally:
        process.resume()
        (tmp_path / "gate").touch()
    assert isinstance(error, dr.RunTimeoutError)
    assert f"rank 1 on {address}" in str(error)
    works(client)


def test_a_failure_ends_the_wait_of_the_others(client: Client, tmp_path: Path) -> None:
    def code(nothing: None, comm: RankComm, folder: Path) -> None:
        try:
            if comm.rank == 2:
                raise KeyError("rank 2 fails")
            comm.barrier()
        except dr.RedistError as error:
            (folder / f"let-go-{comm.rank}").write_text(str(error))
            raise ValueError("what follows from it") from error

    with pytest.raises(KeyError, match="rank 2 fails"):
        dr.map_ranks(code, None, tmp_path)
    for rank in (0, 1):
        assert "rank 2 has failed" in (tmp_path / f"let-go-{rank}").read_text()
    works(client)


INTERRUPTED = """
import sys, time
from pathlib import Path
from distributed import Client
import dask_redist as dr

folder = Path(sys.argv[2])

def code(nothing, comm, folder):
    (folder / f"started-{comm.rank}").touch()
    while comm.rank == 1 and not (folder / "gate").exists():
        time.sleep(0.01)
    try:
        comm.barrier()
    except dr.RedistError as error:
        (folder / f"let-go-{comm.rank}").write_text(str(error))
        raise

with Client(sys.argv[1]) as client:
    try:
        dr.map_ranks(code, None, folder)
    except KeyboardInterrupt:
        (folder / "interrupted").touch()
        time.sleep(600)  # it does not leave
"""


@pytest.mark.parametrize("how", ["interrupted", "killed"])
def test_the_caller_is(client: Client, tmp_path: Path, how: str) -> None:
    address = client.scheduler_info()["address"]
    caller = subprocess.Popen([sys.executable, "-c", INTERRUPTED, address, str(tmp_path)])
    try:
        started(tmp_path)
        if how == "interrupted":
            caller.send_signal(signal.SIGINT)
            until((tmp_path / "interrupted").exists)
        else:
            caller.kill()
        until(lambda: len(list(tmp_path.glob("let-go-*"))) == 2)
        assert "the caller" in (tmp_path / "let-go-0").read_text()
        (tmp_path / "gate").touch()
        until(lambda: len(list(tmp_path.glob("let-go-*"))) == 3)
        works(client)
        assert not client.run_on_scheduler(
            lambda dask_scheduler: [k for k in dask_scheduler.tasks if "map_ranks" in str(k)]
        )
    finally:
        with contextlib.suppress(ProcessLookupError):
            caller.kill()
        caller.wait(30)


def test_a_call_while_another_one_computes_is_given_up(client: Client, tmp_path: Path) -> None:
    """A function that has not begun yet never does."""

    def long(nothing: None, comm: RankComm, folder: Path) -> None:
        (folder / f"started-{comm.rank}").touch()
        while not (folder / "gate").exists():
            time.sleep(0.01)

    def late(nothing: None, comm: RankComm, folder: Path) -> None:
        (folder / "late").touch()

    first = InAThread(long, client, tmp_path)
    started(tmp_path)
    with Client(client.scheduler_info()["address"], set_as_default=False) as other:
        InAThread(late, other, tmp_path)
        until(lambda: len(running(client)) == 2)
    until(lambda: sum(why is not None for why in running(client)) == 1)
    (tmp_path / "gate").touch()
    first.join(30)
    assert first.error is None
    works(client)
    assert not (tmp_path / "late").exists()


def running(client: Client) -> list[str | None]:
    """Why each program that the scheduler knows is not to go on."""
    found: list[str | None] = client.run_on_scheduler(
        lambda dask_scheduler: [
            each.ended for each in dask_scheduler.plugins["dask_redist"].programs._live.values()
        ]
    )
    return found


@pytest.mark.everything
def test_memory_that_a_stopped_rank_may_write_is_handed_out_to_nobody(
    client: Client, tmp_path: Path
) -> None:
    """Rank 1 stops between saying where its memory is and writing: what it got is condemned."""

    def code(nothing: None, comm: RankComm, folder: Path) -> None:
        if comm.rank == 1:
            write = comm._program.write

            def stop(*args: Any) -> None:
                (folder / "started-1").touch()
                os.kill(os.getpid(), signal.SIGSTOP)
                write(*args)

            comm._program.write = stop  # type: ignore[assignment,method-assign]
        comm.redistribute(np.ones((4, 30_000)), dr.Slab.X, dr.Slab.Y)

    process = psutil.Process(pid(client, 1))
    call = InAThread(code, client, tmp_path)
    try:
        started(tmp_path, 1)
        error = call.ended()
        assert isinstance(error, dr.RunTimeoutError)
        assert "rank 1 on" in str(error)
    finally:
        process.resume()
    until(lambda: sum(held["condemned"] > 0 for held in memory(client).values()) >= 2)
    works(client)
