"""The scheduled jobs: each script as its scheduler starts it, and what becomes of its failures.

Nobody looks at a scheduled job until it has failed: so a failure is one line on stderr and an exit
code that says what kind it is, and leaves neither half a result nor a changed one.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

FOLDER = Path(__file__).parent.parent / "examples" / "scheduled"
BIN = Path(sys.executable).parent
JOB = (sys.executable, str(FOLDER / "job.py"))
LOCAL = ("--local", "2")
CORRUPT, NO_STORE, NO_RANKS, NO_PLACE, LATER = 65, 66, 69, 73, 75

Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def maps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("maps") / "maps.zarr"
    subprocess.run([sys.executable, str(FOLDER / "maps.py"), str(store)], check=True, timeout=60)
    return store


@pytest.fixture
def broken(maps: Path, tmp_path: Path) -> Path:
    """A copy of the store that a test may damage."""
    return Path(shutil.copytree(maps, tmp_path / "broken.zarr"))


def run(*command: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> Done:
    return subprocess.run(
        command,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def check_result(maps: Path, result: Path) -> None:
    """Compare with what NumPy makes of the same maps."""
    air = xr.open_zarr(maps, consolidated=False, chunks=None)["air_temperature"].values.astype("f8")
    assert air.shape == (240, 37, 49)
    opened: Any = xr.open_dataset if result.suffix == ".nc" else xr.open_zarr
    kwargs = {} if result.suffix == ".nc" else {"consolidated": False, "chunks": None}
    with opened(result, **kwargs) as made:
        mean = air.mean(axis=0)
        for name, want in (("mean", mean), ("std", air.std(axis=0)), ("anomaly", air - mean)):
            assert made[name].shape == want.shape
            np.testing.assert_allclose(made[name].values, want, rtol=1e-11, atol=1e-11)
        assert made["anomaly"].dims == ("time", "latitude", "longitude")
        assert made["time"].dt.calendar == "360_day"
        assert made["anomaly"].attrs["units"] == "K"
    assert left_beside(result) == []


def left_beside(result: Path) -> list[str]:
    return [path.name for path in result.parent.glob(".*")]


def check_failure(done: Done, code: int, said: str, result: Path) -> None:
    assert done.returncode == code, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert re.search(said, lines[0]), lines[0]
    assert not result.exists()
    assert left_beside(result) == []


# ---- The job itself. ----


@pytest.mark.parametrize(
    "name", ["climatology.zarr", pytest.param("climatology.nc", marks=pytest.mark.everything)]
)
def test_result(maps: Path, tmp_path: Path, name: str) -> None:
    result = tmp_path / name
    done = run(*JOB, str(maps), str(result), *LOCAL)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{result}: 240 maps, 2 ranks, 1 collective\n"
    check_result(maps, result)


@pytest.mark.parametrize("name", ["climatology.zarr", "climatology.nc"])
@pytest.mark.everything
def test_an_older_result_is_replaced_whole_or_not_at_all(
    maps: Path, broken: Path, tmp_path: Path, name: str
) -> None:
    result = tmp_path / name
    older = result
    if result.suffix == ".zarr":
        result.mkdir()
        older = result / "older"
    older.write_text("older")
    damage(broken, 17)
    assert run(*JOB, str(broken), str(result), *LOCAL).returncode == CORRUPT
    assert older.read_text() == "older"
    assert left_beside(result) == []
    assert run(*JOB, str(maps), str(result), *LOCAL).returncode == 0
    check_result(maps, result)
    assert not (result / "older").exists()


@pytest.mark.parametrize(
    "name", ["climatology.zarr", pytest.param("climatology.nc", marks=pytest.mark.everything)]
)
@pytest.mark.parametrize(
    "ranks", [LOCAL, pytest.param((), marks=pytest.mark.everything)], ids=["local", "mpi"]
)
def test_told_to_end_it_leaves_nothing(
    maps: Path, tmp_path: Path, name: str, ranks: tuple[str, ...]
) -> None:
    """As at the time limit of a batch system."""
    result = tmp_path / name
    launcher = () if ranks else (str(BIN / "mpiexec"), "-n", "4")
    command = (*launcher, *JOB, str(maps), str(result), *(ranks or ("--interface", "lo")))
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as job:
        deadline = time.monotonic() + 60
        while not (parts := left_beside(result)) and time.monotonic() < deadline:
            time.sleep(0.002)
        assert parts
        (pid,) = {int(part.split(".")[-2]) for part in parts}
        os.kill(pid, signal.SIGTERM)
        _, said = job.communicate(timeout=60)
    assert "Error: told to end (SIGTERM)" in said.splitlines()
    assert job.returncode == 143
    assert not result.exists()
    assert left_beside(result) == []


def chunk(store: Path, at: int) -> Path:
    return store / "air_temperature" / "c" / str(at) / "0" / "0"


def damage(store: Path, at: int) -> None:
    chunk(store, at).write_bytes(b"no chunk")


@pytest.mark.everything
def test_no_store(tmp_path: Path) -> None:
    result = tmp_path / "result.zarr"
    done = run(*JOB, str(tmp_path / "none.zarr"), str(result), *LOCAL)
    check_failure(done, NO_STORE, r"^Error: there is no Zarr store .*none\.zarr$", result)


@pytest.mark.everything
def test_a_chunk_is_missing(broken: Path, tmp_path: Path) -> None:
    chunk(broken, 17).unlink()
    result = tmp_path / "result.zarr"
    done = run(*JOB, str(broken), str(result), *LOCAL)
    check_failure(done, CORRUPT, r"broken\.zarr lacks 1 of 240 chunks$", result)


@pytest.mark.parametrize("name", ["result.zarr", "result.nc"])
@pytest.mark.everything
def test_a_chunk_is_broken(broken: Path, tmp_path: Path, name: str) -> None:
    damage(broken, 17)
    result = tmp_path / name
    done = run(*JOB, str(broken), str(result), *LOCAL)
    check_failure(done, CORRUPT, r"cannot read map 17 of .*broken\.zarr: ", result)


@pytest.mark.everything
def test_the_store_is_another(broken: Path, tmp_path: Path) -> None:
    (broken / "air_temperature").rename(broken / "pressure")
    result = tmp_path / "result.zarr"
    done = run(*JOB, str(broken), str(result), *LOCAL)
    check_failure(done, CORRUPT, r"is no store of air_temperature", result)


@pytest.mark.parametrize("name", ["none/result.zarr", "none/result.nc"])
@pytest.mark.everything
def test_no_place_for_the_result(maps: Path, tmp_path: Path, name: str) -> None:
    result = tmp_path / name
    done = run(*JOB, str(maps), str(result), *LOCAL)
    check_failure(done, NO_PLACE, r"cannot write .*result\.(zarr|nc): ", result)


# ---- Slurm. ----

SLURM = FOLDER / "climatology.slurm"
SBATCH = {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "mem-per-cpu", "time", "output"}


def test_slurm_options() -> None:
    """Slurm reads #SBATCH lines up to the first command, and knows each of them."""
    before, command = SLURM.read_text().split("\nset -eu\n")
    lines = before.splitlines()
    assert lines[0] == "#!/bin/sh"
    assert all(line.startswith("#") for line in lines)
    assert "#SBATCH" not in command
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    found = dict(option.removeprefix("--").split("=") for option in options)
    assert all(re.fullmatch(r"--[a-z-]+=\S+", option) for option in options), options
    assert set(found) == SBATCH
    assert int(found["nodes"]) * int(found["ntasks-per-node"]) >= 3
    assert re.fullmatch(r"\d\d:\d\d:\d\d", found["time"])


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """What sbatch sets, and an srun that has mpiexec start the tasks."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(
        '#!/bin/sh\nwhile case "$1" in --*) true;; *) false;; esac; do shift; done\n'
        f'exec timeout 100 {shlex.quote(str(BIN / "mpiexec"))} -n "$SLURM_NTASKS" "$@"\n'
    )
    srun.chmod(0o755)
    return os.environ | {
        "PATH": f"{srun.parent}:{BIN}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(FOLDER),
        "SLURM_NTASKS": "4",
        "SLURM_CPUS_PER_TASK": "1",
    }


def sbatch(slurm: dict[str, str], store: Path, result: Path) -> Done:
    """Run a copy of the script from elsewhere, as Slurm does."""
    spool = result.parent / "spool"
    spool.mkdir()
    script = str(shutil.copy(SLURM, spool / "slurm_script"))
    return run(*("sh", script, str(store), str(result), "--interface", "lo"), env=slurm, cwd=spool)


def test_slurm(slurm: dict[str, str], maps: Path, tmp_path: Path) -> None:
    result = tmp_path / "climatology.zarr"
    done = sbatch(slurm, maps, result)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{result}: 240 maps, 2 ranks, 1 collective\n"
    check_result(maps, result)


@pytest.mark.everything
def test_slurm_keeps_the_exit_code(slurm: dict[str, str], broken: Path, tmp_path: Path) -> None:
    damage(broken, 17)
    result = tmp_path / "climatology.zarr"
    done = sbatch(slurm, broken, result)
    check_failure(done, CORRUPT, r"cannot read map 17", result)


@pytest.mark.everything
def test_slurm_gave_too_few_tasks(slurm: dict[str, str], maps: Path, tmp_path: Path) -> None:
    result = tmp_path / "climatology.zarr"
    done = sbatch(slurm | {"SLURM_NTASKS": "2"}, maps, result)
    check_failure(done, NO_RANKS, r"no ranks", result)


# ---- cron. ----


def cron(store: Path, result: Path) -> Done:
    """With as little as cron gives, from the folder that cron starts in."""
    env = {"HOME": str(result.parent), "LOGNAME": "me", "SHELL": "/bin/sh", "PATH": "/usr/bin:/bin"}
    env |= {"PYTHON": sys.executable, "RANKS": "2"}
    if "PYTHONPATH" in os.environ:
        env["PYTHONPATH"] = os.environ["PYTHONPATH"]
    script = str(FOLDER / "climatology.cron.sh")
    return run(script, str(store), str(result), env=env, cwd=result.parent)


@pytest.mark.everything
def test_cron(maps: Path, tmp_path: Path) -> None:
    result = tmp_path / "climatology.nc"
    done = cron(maps, result)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    check_result(maps, result)


@pytest.mark.everything
def test_cron_says_what_failed(tmp_path: Path) -> None:
    result = tmp_path / "climatology.nc"
    done = cron(tmp_path / "none.zarr", result)
    assert done.returncode == NO_STORE
    assert re.fullmatch(
        r"Error: there is no Zarr store \S+\nclimatology of \S+ failed, exit code 66\n", done.stderr
    ), done.stderr
    assert not result.exists()


@pytest.mark.everything
def test_cron_does_not_run_twice_at_once(maps: Path, tmp_path: Path) -> None:
    result = tmp_path / "climatology.nc"
    with subprocess.Popen(
        ["flock", f"{result}.lock", "sh", "-c", "echo held; read line"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout
        assert other.stdout.readline() == "held\n"
        done = cron(maps, result)
        other.communicate("\n", timeout=10)
    assert done.returncode == LATER
    assert not result.exists()


# ---- Prefect. ----


def flow(store: Path, result: Path) -> Done:
    home = result.parent / "prefect"
    env = os.environ | {
        "PREFECT_HOME": str(home),
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    return run(sys.executable, str(FOLDER / "flow.py"), str(store), str(result), env=env)


@pytest.mark.everything
def test_prefect(maps: Path, tmp_path: Path) -> None:
    result = tmp_path / "climatology.zarr"
    done = flow(maps, result)
    assert done.returncode == 0, done.stderr
    assert "Finished in state Completed()" in done.stderr + done.stdout
    assert f"{result}: 240 maps, 4 ranks, 1 collective" in done.stderr + done.stdout
    check_result(maps, result)


@pytest.mark.everything
def test_prefect_keeps_the_exit_code(tmp_path: Path) -> None:
    result = tmp_path / "climatology.zarr"
    done = flow(tmp_path / "none.zarr", result)
    assert done.returncode == NO_STORE, done.stderr
    assert "Error: there is no Zarr store" in done.stderr
    assert "AwaitingRetry" not in done.stderr  # which cannot help
    assert not result.exists()
