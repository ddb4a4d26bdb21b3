"""The command about MPI: which one there is, said without hanging, and scripts started with it."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dask_redist import about, cli, launch, world
from dask_redist.launch import find_mpi


def mpiexec(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put an mpiexec of our own in place of the real one."""
    (folder / "mpiexec").write_text("#!/bin/sh\n" + script)
    (folder / "mpiexec").chmod(0o755)
    monkeypatch.setattr(world, "find_mpiexec", lambda: str(folder / "mpiexec"))


def test_the_mpi_that_is_there() -> None:
    found = find_mpi()
    assert found.implementation is not None
    assert found.implementation.startswith("MPICH ")
    assert found.words == f"MPI 5.0, thread level multiple; {world.find_mpiexec()}"


def test_no_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    found = find_mpi()
    assert found.implementation is None
    assert "pip install" in found.words


def test_no_mpiexec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "find_mpiexec", lambda: None)
    found = find_mpi()
    assert found.implementation is not None
    assert "no mpiexec beside Python or on PATH" in found.words


TWICE = 'shift 2; {0} "$@" & {1} "$@"; wait'


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            TWICE.format(
                "env OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0",
                "env OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1",
            ),
            "Open MPI launched this process as rank",
        ),
        (TWICE.format("", ""), "whose two ranks are rank 0 of 1 each"),
    ],
)
def test_an_mpiexec_of_another_mpi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    mpiexec(tmp_path, monkeypatch, script)
    found = find_mpi()
    assert words in found.words
    assert "MPICH" in found.words


def test_an_mpiexec_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mpiexec(tmp_path, monkeypatch, "echo no slots left >&2; exit 7")
    assert find_mpi() == (None, f"{tmp_path}/mpiexec failed (7): no slots left")


def test_an_mpi_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PATIENCE", 0.5)
    mpiexec(tmp_path, monkeypatch, "sleep 1000 & sleep 1000")
    library, words = find_mpi()
    assert library is None
    assert words.endswith("mpiexec -n 2 did not answer within 0.5 s")


def test_info_tells_of_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(about, "find_mpi", lambda: launch.Found("MPICH 5.0.2", "level of threads"))
    done = CliRunner().invoke(cli.main, ["info", "--ranks", "1"], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    (line,) = [line for line in done.output.splitlines() if "MPICH 5.0.2" in line]
    assert "level of threads" in line


# ------------------------------------------------------------------------------------- scripts
def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dask_redist.cli", "run", *arguments],
        input="said on stdin\n",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_script_as_a_job(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import sys, dask_redist as dr\n"
        "with dr.mpi(exclusive=False, interface='lo') as client:\n"
        "    print(dr.connect(client).size, sys.argv[1:], input())\n"
        "    sys.exit(3)\n"
    )
    done = run(str(script), "-n", "2", "in.zarr", "--steps", "4", "--", "-n", "7")
    assert done.stdout.splitlines()[0] == (
        "2 ['in.zarr', '--steps', '4', '-n', '7'] said on stdin"
    ), done.stderr
    assert done.returncode == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no such file", "-n", "2"], "does not exist"),
        ([__file__], "Missing option '-n'"),
        ([__file__, "-n", "0"], "0 is not in the range"),
    ],
)
def test_what_cannot_be_run(arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_nothing_to_run_it_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "find_mpiexec", lambda: None)
    done = CliRunner().invoke(cli.main, ["run", __file__, "-n", "2"])
    assert done.exit_code == 1
    assert done.output.startswith("Error: no mpiexec beside ")
