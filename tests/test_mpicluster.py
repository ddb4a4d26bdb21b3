"""Clusters of MPI ranks: what works, what is refused, and that nothing is left behind."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import distributed.system
import numpy as np
import pytest
from cluster import Clusters, ar, check, owners, placed
from distributed import Client
from waiting import until

import dask_redist as dr
from dask_redist import mpijob
from dask_redist.process import Process
from dask_redist.world import find_mpiexec

NO_DASHBOARD: dict[str, Any] = {"dashboard_address": None}


@pytest.fixture(scope="module")
def cluster() -> Iterator[dr.LocalMPICluster]:
    with dr.LocalMPICluster(n_workers=3, **NO_DASHBOARD) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: dr.LocalMPICluster) -> Iterator[Client]:
    with cluster.get_client() as client:  # type: ignore[no-untyped-call]
        yield client


def alive(processes: list[Process]) -> list[Process]:
    """Those that have not ended after ten seconds."""
    deadline = time.monotonic() + 10
    while left := [p for p in processes if not p.is_dead()]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return left


def processes(client: Client) -> list[Process]:
    return [Process(*found) for found in client.run(lambda: tuple(Process.current())).values()]


def world() -> tuple[int, int]:
    from mpi4py import MPI  # on the rank

    return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


# ------------------------------------------------------------------------------------- it works
def test_ranks_are_those_of_mpi(client: Client) -> None:
    ranks = dr.connect(client, 3)
    assert [seat.mpi_rank for seat in ranks.seats] == [0, 1, 2]
    assert [seat.name for seat in ranks.seats] == ["0", "1", "2"]
    found = client.run(world)
    assert [found[address] for address in ranks.addresses] == [(0, 3), (1, 3), (2, 3)]


def test_a_change_of_layout(client: Client) -> None:
    dr.connect(client, 3)
    array = ar(7, 5, 4)
    x = placed(client, array, (3, -1, -1))
    y = dr.redistribute(x, dr.Slab.Y).persist()
    assert owners(client, y).ravel().tolist() == [0, 1, 2]
    check(y, array)


def test_each_rank_has_its_share_of_memory(client: Client) -> None:
    limits = [w["memory_limit"] for w in client.scheduler_info(n_workers=-1)["workers"].values()]
    assert len(limits) == 3
    assert sum(limits) == pytest.approx(dr.connect(client).seats[0].memory_limit * 3)
    assert sum(limits) == pytest.approx(distributed.system.MEMORY_LIMIT, rel=1e-6)


def test_it_looks_like_any_cluster(cluster: dr.LocalMPICluster, client: Client) -> None:
    assert "workers=3" in repr(cluster)
    cluster._repr_html_()  # type: ignore[no-untyped-call]
    assert cluster.dashboard_link is not None
    client.run(print, "said by a rank", flush=True)
    logs = cluster.get_logs()  # type: ignore[no-untyped-call]
    assert {"Cluster", "Scheduler", "mpiexec"} < set(logs)
    assert logs["mpiexec"].count("said by a rank") == 3


def test_settings_and_modules_reach_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text("def answer():\n    return 42\n")
    sys.path.insert(0, str(tmp_path))
    try:
        import only_here  # type: ignore[import-not-found]

        with dask.config.set({"redist.wire": "dask comm"}):
            cluster = dr.LocalMPICluster(n_workers=2, **NO_DASHBOARD)
        with cluster, Client(cluster) as client:
            assert set(dr.connect(client, 2).wires.values()) >= {"dask comm"}
            assert client.submit(only_here.answer).result() == 42
    finally:
        sys.path.remove(str(tmp_path))


@pytest.mark.parametrize("what", ["scale", "adapt"])
def test_the_number_of_ranks_is_fixed(cluster: dr.LocalMPICluster, what: str) -> None:
    with pytest.raises(dr.RedistError, match="mpiexec fixes the number of MPI ranks"):
        getattr(cluster, what)(**({"n": 5} if what == "scale" else {}))


def test_asynchronous(tmp_path: Path) -> None:
    async def run() -> int:
        async with (
            dr.LocalMPICluster(2, asynchronous=True, **NO_DASHBOARD) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            assert (await dr.connect(client)).size == 2
            found: int = await client.submit(sum, [1, 2, 3])
            return found

    assert asyncio.run(run()) == 6


def test_beside_a_running_event_loop() -> None:
    """As in Jupyter, whose cells run inside one."""

    async def cell() -> float:
        with dr.LocalMPICluster(2, **NO_DASHBOARD) as cluster, Client(cluster) as client:
            dr.connect(client)
            x = da.ones((4, 4), chunks=2)
            return float(dr.redistribute(x, dr.Slab.X).sum().compute())

    assert asyncio.run(cell()) == 16


# ---------------------------------------------------------------------------- what goes wrong
@pytest.mark.parametrize("n", [0, -1, 1.5, "2"])
def test_a_number_that_is_none(n: Any) -> None:
    with pytest.raises(ValueError, match="n_workers is"):
        dr.LocalMPICluster(n)


def test_no_mpiexec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(dr.RedistError, match=r"no mpiexec beside .*dask-redist.mpich"):
        dr.LocalMPICluster(2)


def fake_mpiexec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (tmp_path / "mpiexec").write_text("#!/bin/sh\n" + script)
    (tmp_path / "mpiexec").chmod(0o755)
    monkeypatch.setattr("dask_redist.world.find_mpiexec", lambda: str(tmp_path / "mpiexec"))


def test_mpiexec_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpiexec(tmp_path, monkeypatch, "echo 'no slots left' >&2; exit 7")
    with pytest.raises(dr.RedistError, match=r"exit code 7.* before its 2 ranks .*no slots left"):
        dr.LocalMPICluster(2, **NO_DASHBOARD)


def test_mpiexec_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpiexec(tmp_path, monkeypatch, f"echo $$ > {tmp_path}/pid; exec sleep 100")
    with pytest.raises(dr.RedistError, match=r"0 of 2 MPI ranks came within 1 s"):
        dr.LocalMPICluster(2, timeout="1s", **NO_DASHBOARD)
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_ranks_that_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(dr.RedistError, match=r"before its 2 ranks .*NotADirectoryError"):
        dr.LocalMPICluster(2, local_directory=str(tmp_path / "file"), **NO_DASHBOARD)


def test_mpiexec_of_another_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts two processes, each of which is alone for the MPI that mpi4py has."""
    script = """
shift 2
OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 "$@" &
OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 "$@"; code=$?
wait
exit $code
"""
    fake_mpiexec(tmp_path, monkeypatch, script)
    with pytest.raises(dr.RedistError, match=r"Open MPI launched this .*mpi4py runs on MPICH"):
        dr.LocalMPICluster(2, **NO_DASHBOARD)


def _die(how: str) -> None:
    if how == "exits":
        os._exit(5)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("how", ["exits", "killed"])
def test_a_rank_that_dies_is_named(caplog: pytest.LogCaptureFixture, how: str) -> None:
    with dr.LocalMPICluster(3, **NO_DASHBOARD) as cluster, Client(cluster) as client:
        ranks = dr.connect(client, 3)
        there = processes(client)
        x = placed(client, ar(6, 6), (2, -1))
        with caplog.at_level(logging.ERROR, "dask_redist"):
            dying = client.submit(_die, how, workers=[ranks.addresses[1]])
            with pytest.raises(dr.RankLostError, match=r"rank 1 of 3 \(PID \d+\) has died"):
                dying.result(timeout=30)
        (line,) = [record.getMessage() for record in caplog.records]
        assert line.startswith("rank 1 of 3 ")
        # Nor does anything else wait for ranks that will not come.
        with pytest.raises(dr.RankLostError, match="rank 1 of 3"):
            (x + 1).sum().compute()
        until(lambda: cluster.scheduler.plugins["dask_redist"].roster.lost is not None)
        with pytest.raises(dr.RankLostError, match="rank 1 of 3"):
            dr.map_ranks(lambda nothing, comm: 0, None)
        logs = cluster.get_logs(workers=False)
        assert "rank 1 is PID" in logs["mpiexec"]
    assert alive(there) == []


# --------------------------------------------------------------------------------- it ends
def test_close_leaves_nothing(tmp_path: Path) -> None:
    cluster = dr.LocalMPICluster(2, **NO_DASHBOARD)
    client = Client(cluster)
    there = processes(client)
    folders = client.run(lambda dask_worker: dask_worker.local_directory).values()
    busy = client.submit(time.sleep, 60, pure=False)
    client.close()
    start = time.monotonic()
    cluster.close()
    assert time.monotonic() - start < 9, "close waited for a task"
    cluster.close()
    assert alive(there) == []
    assert not [folder for folder in folders if Path(folder).exists()]
    del busy


@pytest.mark.everything
def test_a_retired_rank_sleeps(cluster: dr.LocalMPICluster) -> None:
    with dr.LocalMPICluster(2, **NO_DASHBOARD) as other, Client(other) as client:
        there = client.run(os.getpid)
        first = next(iter(there))
        client.retire_workers([first])
        assert client.submit(sum, [1, 2]).result(timeout=20) == 3
        time.sleep(1)
        before = _cpu_seconds(there[first])
        time.sleep(1)
        assert _cpu_seconds(there[first]) - before < 0.5


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_killed_parent_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, time, dask_redist as dr\n"
        "from dask_redist.process import Process\n"
        "if __name__ == '__main__':\n"
        "    with dr.LocalMPICluster(2, dashboard_address=None) as cluster:\n"
        "        client = cluster.get_client()\n"
        "        busy = client.submit(time.sleep, 60)\n"
        "        me = lambda: tuple(Process.current())\n"
        "        print([*client.run(me).values()], flush=True)\n"
        "        time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    there = [Process(*found) for found in eval(parent.stdout.readline())]
    assert len(there) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert alive(there) == []


def test_values_are_exact_on_mpi_ranks(client: Client) -> None:
    dr.connect(client, 3)
    array = ar(10, 9)
    with dr.enable(policy="always"):
        x = da.from_array(array, chunks=(4, 3))
        np.testing.assert_array_equal(x.rechunk((9, 2)).compute(), array)
        assert float(x.sum().compute()) == array.sum()


# ------------------------------------------------------- ranks that somebody else has started
def dask_mpi(folder: Path, n: int, *arguments: str) -> "subprocess.Popen[bytes]":
    mpiexec = find_mpiexec()
    assert mpiexec is not None
    command = [mpiexec, "-n", str(n), str(Path(sys.executable).parent / "dask-mpi")]
    command += ["--scheduler-file", str(folder / "s.json"), "--interface", "lo", "--no-dashboard"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([*command, *arguments], cwd=folder, start_new_session=True, **quiet)


def at_file(folder: Path) -> Client:
    deadline = time.monotonic() + 60
    while not (folder / "s.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return Client(scheduler_file=str(folder / "s.json"))


@pytest.mark.everything
def test_ranks_outlive_their_clients(tmp_path: Path) -> None:
    """A kernel that is restarted finds its ranks again."""
    job = dask_mpi(tmp_path, 3, "--worker-class", "distributed.Worker", "--nthreads", "1")
    try:
        kernel = (
            "from distributed import Client; import dask_redist as dr, os, signal\n"
            f"dr.connect(Client(scheduler_file={str(tmp_path / 's.json')!r}), 2)\n"
            "os.kill(os.getpid(), signal.SIGKILL)"
        )
        at_file(tmp_path).close()
        killed = subprocess.run([sys.executable, "-c", kernel], timeout=100, check=False)
        assert killed.returncode == -signal.SIGKILL
        with at_file(tmp_path) as client, warnings.catch_warnings():
            warnings.simplefilter("error")
            assert [seat.mpi_rank for seat in dr.connect(client, 2).seats] == [1, 2]
            array = ar(5, 6)
            check(dr.redistribute(placed(client, array, (2, -1)), dr.Slab.Y), array)
            there = processes(client)
            client.shutdown()
        job.wait(30)
    finally:
        os.killpg(job.pid, signal.SIGKILL) if job.poll() is None else None
    assert alive(there) == []


@pytest.mark.everything
def test_nannies_get_the_line_that_names_the_flag(tmp_path: Path) -> None:
    job = dask_mpi(tmp_path, 2, "--nthreads", "1")
    try:
        with at_file(tmp_path) as client:
            client.wait_for_workers(1, timeout=60)
            words = r"no MPI ranks.*--worker-class distributed.Worker"
            with pytest.warns(UserWarning, match=words):
                _connected_and_warned(client)
            client.shutdown()
        job.wait(30)
    finally:
        os.killpg(job.pid, signal.SIGKILL) if job.poll() is None else None


def _connected_and_warned(client: Client) -> None:
    dr.connect(client, 1)
    deadline = time.monotonic() + 10
    while not client.get_events("warn") and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)  # the client hears of it by another way


def test_the_tests_on_mpi_ranks_are_on_mpi_ranks() -> None:
    clusters = Clusters(mpi=True)
    try:
        client = clusters.client(2)
        assert [seat.mpi_rank for seat in dr.connect(client).seats] == [0, 1]
    finally:
        clusters.close()


# ------------------------------------------------------------------------------------ the log
@pytest.mark.parametrize("size", [0, 1, mpijob.FIRST + mpijob.LAST, 3 * mpijob.LAST, 50 * 2**20])
def test_of_a_long_log_both_ends_are_read(size: int) -> None:
    """Who the ranks are stands at the beginning, and what went wrong at the end."""
    first, last = b"rank 0 is PID 7\n", b"ValueError: why\n"
    with tempfile.TemporaryFile() as log:
        log.write(first + b"talk\n" * (size // 5) + last)
        log.flush()
        text = mpijob.ends_of(log)
    assert text.startswith("rank 0 is PID 7\n")
    assert text.endswith("ValueError: why\n")
    assert set(text.splitlines()[1:-1]) <= {
        "talk",
        "",
        *[s for s in text.splitlines() if "..." in s],
    }
    assert len(text) <= mpijob.FIRST + mpijob.LAST + 100
    left = [int(line.split()[1]) for line in text.splitlines() if line.startswith("... ")]
    assert len(text) + sum(left) - sum(len(f"\n... {n} bytes ...\n") for n in left) == (
        len(first) + 5 * (size // 5) + len(last)
    )
    assert mpijob.telling(text) == "ValueError: why"


def test_the_log_is_closed_with_the_cluster() -> None:
    with dr.LocalMPICluster(n_workers=1, **NO_DASHBOARD) as cluster:
        ranks = cluster._ranks
        assert ranks is not None
        log = ranks._log
        assert log is not None
        assert "rank 0 is PID" in cluster.get_logs()["mpiexec"]
    assert log.closed
    assert "rank 0 is PID" in ranks.output()


def test_what_cannot_be_started_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dask_redist.world.find_mpiexec", lambda: "/no/such/mpiexec")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Exception, match="/no/such/mpiexec"):
        dr.LocalMPICluster(n_workers=1, **NO_DASHBOARD)
    assert len(os.listdir("/proc/self/fd")) <= before
