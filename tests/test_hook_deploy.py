"""The hook and the cluster that it finds: none, a closed one, an empty one, one without the
package, one that preloads it, one that does not answer; and scripts that nobody edits.
"""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import pytest
from cluster import ar, fa, same
from distributed import Client, LocalCluster
from waiting import until

import dask_redist as dr
from dask_redist import hook
from dask_redist.layer import RedistributeLayer

A = ar(12, 10)
#: makes the package one that is not installed
BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "dask_redist":
            raise ModuleNotFoundError("No module named 'dask_redist'", name=name)

sys.meta_path.insert(0, Block())
"""


def change(columns: int = 2) -> da.Array:
    y: da.Array = fa(A, (3, 10)).rechunk((12, columns))
    return y


def is_ours(y: da.Array) -> bool:
    return isinstance(y.dask.layers[y.name], RedistributeLayer)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the hook has logged."""
    return [r.getMessage() for r in caplog.records if r.name == "dask_redist.hook"]


@contextmanager
def threads(**options: Any) -> Iterator[Client]:
    """A cluster in this process."""
    given = {"n_workers": 2, "threads_per_worker": 1, "processes": False, **options}
    with Client(dashboard_address=":0", **given) as client:
        yield client


# ------------------------------------------------------------------------- whom it finds
def test_without_a_client(caplog: pytest.LogCaptureFixture) -> None:
    stock = change()
    with dr.enable(policy="always"):
        assert change().name == stock.name
        same(change().compute(scheduler="sync"), A)
    with dr.enable(fallback="error"), pytest.raises(dr.RedistError, match="no Dask client"):
        change()
    assert not lines(caplog)  # whoever has no cluster needs no advice


def test_after_the_client_is_closed() -> None:
    client = Client(n_workers=2, processes=False, dashboard_address=":0")
    with dr.enable(policy="always"):
        y = change()
        assert is_ours(y)
        same(y.compute(), A)
        client.close()
        z = change(5)
        assert not is_ours(z)
        same(z.compute(), A)
        same(y.compute(), A)  # in process
    with threads(), dr.enable(policy="always"):  # another client, another cluster
        assert is_ours(change())
        same(change().compute(), A)


def test_a_cluster_without_workers_is_not_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "PATIENCE", 1e6)
    with (
        dask.config.set({"redist.timeout": "1e6 s"}),
        threads(n_workers=0) as client,
        dr.enable(policy="always"),
    ):
        y = change()
        assert not is_ours(y)
        assert not lines(caplog)
        local: Any = client.cluster
        local.scale(1)
        client.wait_for_workers(1, timeout=30)
        assert is_ours(change())
        same(change().compute(), A)
        same(y.compute(), A)


def test_an_asynchronous_client(caplog: pytest.LogCaptureFixture) -> None:
    async def job() -> None:
        async with (
            LocalCluster(
                n_workers=2,
                threads_per_worker=1,
                processes=False,
                dashboard_address=":0",
                asynchronous=True,
            ) as local,
            Client(local, asynchronous=True) as client,
        ):
            with dr.enable(policy="always"):
                assert not is_ours(change())
                same(await client.compute(change()), A)
                (line,) = lines(caplog)
                assert "await dask_redist.connect(client)" in line
                assert (await dr.connect(client)).size == 2
                y = change()
                assert is_ours(y)
                same(await client.compute(y), A)

    asyncio.run(job())


def test_an_asynchronous_client_where_nothing_but_a_collective_will_do() -> None:
    async def job() -> None:
        async with Client(
            n_workers=1, processes=False, dashboard_address=":0", asynchronous=True
        ) as client:
            with dr.enable(fallback="error"):
                with pytest.raises(dr.RedistError, match=r"await dask_redist\.connect"):
                    change()
                await dr.connect(client)
                assert is_ours(change())

    asyncio.run(job())


def test_a_cluster_that_changes_its_size() -> None:
    with threads(n_workers=1) as client, dr.enable(policy="always"):
        alone = change()
        local: Any = client.cluster
        local.scale(3)
        client.wait_for_workers(3, timeout=30)
        three = change()
        assert [y.dask.layers[y.name].ranks for y in (alone, three)] == [1, 3]
        same(alone.compute(), A)
        same(three.compute(), A)


# ----------------------------------------------------------------------- processes of Dask
@contextmanager
def deployed(
    folder: Path, scheduler_lacks: bool = False, workers_lack: bool = False, preload: bool = False
) -> Iterator[tuple[Client, Callable[..., None]]]:
    """A scheduler and a worker as processes: their client, and how to start one more worker."""
    (folder / "sitecustomize.py").write_text(BLOCK)
    found = folder / "scheduler.json"
    dask_command = sys.executable, "-m", "dask"
    where = "--scheduler-file", str(found), "--host", "127.0.0.1", "--no-dashboard"
    options = ("--preload", "dask_redist") if preload else ()

    with ExitStack() as stack:

        def start(kind: str, *arguments: str, lacks: bool) -> None:
            path = [str(folder)] if lacks else []
            process = subprocess.Popen(
                [*dask_command, kind, *where, *arguments, *options],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(process.wait, 20)
            stack.callback(process.kill)

        def more(lacks: bool = workers_lack) -> None:
            start("worker", "--no-nanny", "--nthreads", "1", lacks=lacks)

        start("scheduler", "--port", "0", lacks=scheduler_lacks)
        more()
        until(found.exists, 60)
        client = stack.enter_context(Client(scheduler_file=str(found)))
        client.wait_for_workers(1, timeout=60)
        yield client, more


def test_a_scheduler_that_lacks_the_package(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with deployed(tmp_path, scheduler_lacks=True), dr.enable(policy="always"):
        for columns in (2, 5):
            y = change(columns)
            assert not is_ours(y)
            same(y.compute(), A)
        (line,) = lines(caplog)
        assert "the scheduler of" in line
        assert "pip install dask-redist" in line
        with dr.enable(fallback="error"), pytest.raises(dr.RedistError, match="connected"):
            change()


def test_workers_that_lack_the_package(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with deployed(tmp_path, workers_lack=True) as (client, more), dr.enable(policy="always"):
        for columns in (2, 5):
            y = change(columns)
            assert not is_ours(y)
            same(y.compute(), A)
        (line,) = lines(caplog)
        assert "a worker of" in line
        assert "pip install dask-redist" in line
        more()  # such workers can still come
        client.wait_for_workers(2, timeout=30)
        same(change(2).compute(), A)


def test_ranks_that_are_there_before_any_client(tmp_path: Path) -> None:
    def seat(dask_worker: Any) -> int:
        return int(dask_worker.plugins["dask_redist"].seat)

    with deployed(tmp_path, preload=True) as (client, more):
        (first,) = client.run(seat).values()  # nobody has connected
        ranks = dr.connect(client, timeout=0)
        assert [s.seat for s in ranks.seats] == [first]
        more()
        client.wait_for_workers(2, timeout=60)
        with dr.enable(policy="always"):
            y = change()
        assert y.dask.layers[y.name].ranks == 2
        same(y.compute(), A)
        assert len(dr.runs()) == 1


@pytest.mark.everything
def test_a_scheduler_that_does_not_answer_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "PATIENCE", 0.5)
    resumed = threading.Event()
    with deployed(tmp_path) as (client, _), dr.enable(policy="always"):
        same(change().compute(), A)
        scheduler = client.run_on_scheduler(os.getpid)

        def resume() -> None:
            resumed.set()
            os.kill(scheduler, signal.SIGCONT)

        later = threading.Timer(8, resume)
        os.kill(scheduler, signal.SIGSTOP)
        later.start()
        try:
            y = change(5)
            assert not resumed.is_set(), "the array was built when the scheduler answered again"
        finally:
            later.cancel()
            resume()
        same(y.compute(), A)


# ----------------------------------------------------------------- scripts that nobody edits
SCRIPT = """
import dask.array as da, numpy as np
from distributed import Client

if __name__ == "__main__":
    a = np.arange(120.0).reshape(12, 10)
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=":0", OPTION):
        y = da.from_array(a, chunks=(3, 10)).rechunk((12, 2))
        assert y.name.startswith("redistribute-"), y.name
        assert (y.compute() == a).all()
        assert (da.median(y, axis=0).compute() == np.median(a, axis=0)).all()
"""


@pytest.mark.parametrize(
    ("start", "preload", "option"),
    [
        ("import dask_redist", None, "host='127.0.0.1'"),
        ("", '["dask_redist"]', "processes=False"),
        ("", "dask_redist", "processes=False"),
    ],
    ids=["imported", "preloaded", "preloaded by name"],
)
def test_a_script(tmp_path: Path, start: str, preload: str | None, option: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{start}\n{SCRIPT.replace('OPTION', option)}")
    environment = {"DASK_REDIST__ENABLE": "true", "DASK_REDIST__POLICY": "always"}
    if preload:
        environment["DASK_DISTRIBUTED__CLIENT__PRELOAD"] = preload
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_log_is_quiet_where_all_is_well(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "dask_redist.hook"), threads(), dr.enable(policy="always"):
        same(change().compute(), A)
    assert not lines(caplog)
