"""The command: what it says, how it fails, and that nothing is left of what it started."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import psutil
import pytest
from click.testing import CliRunner, Result
from cluster import ranks_in_threads
from distributed import Client, LocalCluster

from dask_redist import about, cli, cluster, demo
from dask_redist.connect import Ranks, connect
from dask_redist.errors import RedistError
from dask_redist.field import check_field, indexed_field
from dask_redist.grids import Layout, Slab
from dask_redist.relayout import redistribute

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, list(arguments), env={"COLUMNS": "120"})


def start(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    """Start the command as the leader of a session, with a temporary folder of its own."""
    environment = os.environ | {"TMPDIR": str(folder), "COLUMNS": "120", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "dask_redist.cli", *arguments],
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        # Whoever runs the tests in the background may have told them to ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def files_in(folder: Path) -> list[Path]:
    """What is left in a folder, but for the scratch folder and its locks that every Dask leaves."""
    scratch = folder / "dask-scratch-space"
    left = [path for path in folder.rglob("*") if path != scratch]
    return [path for path in left if path.parent != scratch or path.suffix != ".lock"]


def left_of(session: int) -> list[psutil.Process]:
    """Processes of a session that still run, once each had a moment to end."""

    def belongs(process: psutil.Process) -> bool:
        try:
            return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False

    _, alive = psutil.wait_procs([p for p in psutil.process_iter() if belongs(p)], timeout=5)
    return list(alive)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with ranks_in_threads(3) as client:
        yield client


# ---- Whole commands, in processes of their own. ----


def test_demo(tmp_path: Path) -> None:
    process = start(tmp_path, "demo", "--ranks", "2", "--size", "1 MiB")
    out, err = process.communicate(timeout=110)
    assert (process.returncode, err) == (0, "")
    assert "(240, 37, 49): 240 maps in Zarr, one a chunk -> 2 chunks" in out
    assert "1860 to 2099, calendar 360_day" in out
    found = re.search(r"equal to NumPy bit for bit; collectives that ran: (\d+)", out)
    assert found
    assert int(found[1]) > 0
    for way in demo.WAYS:
        rows = re.findall(rf"│ {way} +│ +\d+\.\d{{3}} │ +\d+\.\d\d │ +\d+\.\d │", out)
        assert len(rows) == demo.STEPS, way
    for step in ("Slab.X -> Slab.Y", "Slab.Y -> Slab.Z", "Slab.Z -> Slab.X"):
        assert step in out
    assert "checked on the ranks, exactly: 131,200 elements in each step" in out
    assert left_of(process.pid) == []
    assert files_in(tmp_path) == []


def test_info(tmp_path: Path) -> None:
    process = start(tmp_path, "info")
    out, err = process.communicate(timeout=110)
    assert (process.returncode, err) == (0, "")
    assert out.startswith("2 ranks on 1 host, ")
    assert "2 of 2 pairs share memory" in out
    for package in ("python", "dask_redist", "distributed", "numpy", "mpi4py", "nccl4py", "zarr"):
        assert re.search(rf"│ {package} +│ [\w.]", out), package
    assert f"│ {np.__version__} " in out
    assert re.search(r"│ copies +│ (compiled|plain) ", out)
    assert left_of(process.pid) == []
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(
    "moment", [pytest.param("at once", marks=pytest.mark.everything), "with ranks"]
)
def test_ctrl_c_leaves_nothing(tmp_path: Path, moment: str) -> None:
    process = start(tmp_path, "demo", "--ranks", "2", "--size", "64 MiB")
    if moment == "with ranks":
        assert process.stdout
        assert process.stdout.readline().startswith("2 ranks on 1 host")
    else:
        while not any(tmp_path.glob("dask-redist-*")):
            assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process
    _, err = process.communicate(timeout=100)
    assert (process.returncode, err.strip()) == (1, "Aborted!")
    assert left_of(process.pid) == []
    assert files_in(tmp_path) == []


# ---- A cluster that runs already. ----


@pytest.mark.everything
@pytest.mark.parametrize("by_file", [True, False])
def test_info_of_a_cluster(client: Client, tmp_path: Path, by_file: bool) -> None:
    address = client.scheduler_info()["address"]
    (tmp_path / "scheduler.json").write_text(json.dumps({"address": address}))
    file = str(tmp_path / "scheduler.json")
    result = run("info", *(["--scheduler-file", file] if by_file else ["--scheduler", address]))
    assert result.exit_code == 0, result.output
    assert result.output.startswith("3 ranks on 1 host, ")
    assert (file if by_file else address) in result.output
    for worker in client.scheduler_info(n_workers=-1)["workers"]:
        assert worker in result.output
    assert client.submit(sum, [1, 2]).result() == 3  # it goes on running


def one_line(result: Result) -> str:
    assert result.exit_code == 1, result.output
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "PATIENCE", 0.3)
    said = one_line(run("info", "--scheduler", "tcp://127.0.0.1:1"))
    assert said.startswith("Error: no scheduler answers at tcp://127.0.0.1:1 (")


def test_no_such_address() -> None:
    said = one_line(run("info", "--scheduler", "pigeon://here"))
    assert said.startswith("Error: no scheduler answers at pigeon://here (")


def test_no_workers() -> None:
    with LocalCluster(
        n_workers=0,
        processes=False,
        protocol="tcp",
        host="127.0.0.1",
        dashboard_address=":0",
        scheduler_kwargs={"dashboard_address": "127.0.0.1:0"},
    ) as empty:
        said = one_line(run("info", "--scheduler", empty.scheduler_address))
    assert "has no workers" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["info", "--scheduler", "tcp://127.0.0.1:1", "--ranks", "2"], "give one of"),
        (["info", "--scheduler-file", "no_such_file"], "does not exist"),
        (["info", "--ranks", "0"], "0 is not in the range"),
        (["demo", "--ranks", "1"], "1 is not in the range"),
        (["demo", "--size", "much"], "'much' is no size"),
        (["demo", "--size", "1 kiB"], "at least 64 KiB"),
    ],
)
def test_wrong_usage(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.output


# ---- How the demo fails. ----


def test_missing_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == "xarray" else name)
    assert one_line(run("demo")) == (
        "Error: the demo needs xarray: pip install 'dask-redist[demo]'\n"
    )


def test_too_large(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lent:
        def __enter__(self) -> tuple[Client, Ranks]:
            return client, connect(client)

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(cli, "local_ranks", lambda n: Lent())
    said = one_line(run("demo", "--size", "1 PiB"))
    assert "six fields of 1 PiB do not fit" in said


def test_wrong_series(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        demo, "redistribute", lambda x, layout, client: redistribute(x[::-1], layout, client=client)
    )
    with pytest.raises(RedistError, match="not those that NumPy reads"):
        demo.series_from_maps(client)


def test_series_without_a_collective(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "redistribute", lambda x, layout, client: x.rechunk((-1, 20, 20)))
    with pytest.raises(RedistError, match="0 collectives ran"):
        demo.series_from_maps(client)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("layout", [Slab.X, Slab.Y, Slab.Z], ids=repr)
def test_the_field_is_its_index(layout: Layout, ranks: int) -> None:
    shape = (7, 5, 11)
    field = indexed_field(layout.chunks(shape, ranks)).compute(scheduler="sync")
    assert field.dtype == np.float64
    assert (field == np.arange(7 * 5 * 11).reshape(shape)).all()


def laid_out(client: Client, field: Any) -> Any:
    return client.persist(redistribute(field, Slab.Y, client=client))


def test_check_field(client: Client) -> None:
    shape = (5, 7, 4)
    field = indexed_field(Slab.X.chunks(shape, 3))
    assert check_field(client, laid_out(client, field), Slab.Y, 3) == 140
    one_wrong = da.where(field == 139, 0, field)
    with pytest.raises(RedistError, match=r"1 of 140 elements are wrong in Slab\.Y"):
        check_field(client, laid_out(client, one_wrong), Slab.Y, 3)
    with pytest.raises(RedistError, match=r"elements are wrong in Slab\.Y"):
        check_field(client, laid_out(client, field[::-1]), Slab.Y, 3)


def test_check_field_knows_the_owners(client: Client) -> None:
    field = indexed_field(Slab.Y.chunks((5, 7, 4), 3))
    first = connect(client).addresses[0]
    here = client.persist(field, workers=[first], allow_other_workers=False, optimize_graph=False)
    with pytest.raises(RedistError, match=r"chunk \(0, 1, 0\) is on rank 0; Slab\.Y names rank 1"):
        check_field(client, here, Slab.Y, 3)


# ---- What is said. ----


def step(ours: float, p2p: float, tasks: float) -> demo.Step:
    seconds = dict(zip(demo.WAYS, (ours, p2p, tasks, 0.1), strict=True))
    return demo.Step("Slab.X", "Slab.Y", 10**9, 3, seconds)


def test_the_verdict_is_honest() -> None:
    won, lost = step(1.0, 4.0, 2.0), step(1.0, 0.5, 2.0)
    assert won.ratio(demo.OURS) == 2.0
    assert won.ratio("Dask tasks") == 1.0
    assert cli.verdict([won, won]) == "dask_redist won every step: 2.0 to 2.0 times as fast as Dask"
    assert cli.verdict([won, lost]) == "dask_redist won 1 of 2 steps; Dask was faster in the others"


@pytest.mark.parametrize(
    ("wires", "words"),
    [
        ([], ["One rank"]),
        (["shared memory", "direct"], ["2 of 2 pairs share memory"]),
        (["dask comm"], ["1 of 1 pairs talk over Dask's connections"]),
        (
            ["shared memory", "dask comm", "dask comm"],
            ["1 of 3 pairs share", "2 of 3 pairs talk"],
        ),
        (
            ["shared memory", "mpi", "mpi", "dask comm"],
            ["1 of 4 pairs share memory", "2 of 4 pairs talk over MPI", "1 of 4 pairs talk over D"],
        ),
    ],
)
def test_wires_in_plain_words(wires: list[str], words: list[str]) -> None:
    pairs = {(0, other): wire for other, wire in enumerate(wires, start=1)}
    said = about.in_plain_words(Ranks((), {(0, 0): "direct"} | pairs))
    assert len(said) == len(words)
    for line, start_of_line in zip(said, words, strict=True):
        assert line.startswith(start_of_line)


def test_versions_are_found_without_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "explosive.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert about.version_of("explosive") == "from its sources"
    assert about.version_of("no_such_module") is None
    assert about.version_of("numpy") == np.__version__
