"""The MPI world: what launchers say, which MPI there is, and an mpi4py that is of another MPI."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from dask_redist.world import (
    Launch,
    clean_environment,
    find_mpiexec,
    launched,
    library_name,
    mismatch,
)


@pytest.mark.parametrize(
    ("environ", "launcher", "rank", "size"),
    [
        ({"PMI_SIZE": "4", "PMI_RANK": "3"}, "MPICH or one of its kin", 3, 4),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "Open MPI", 1, 2),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5"}, "Slurm's srun", 5, 8),
        # srun starts mpiexec, or an MPI that speaks PMI: that is who counts
        (
            {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "PMI_SIZE": "4", "PMI_RANK": "2"},
            "MPICH or one of its kin",
            2,
            4,
        ),
    ],
)
def test_launchers(environ: Mapping[str, str], launcher: str, rank: int, size: int) -> None:
    found = launched(environ)
    assert found is not None
    assert (found.launcher, found.rank, found.size) == (launcher, rank, size)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PMI_SIZE": "many"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # a batch script: srun has not started it
    ],
)
def test_nothing_launched_it(environ: Mapping[str, str]) -> None:
    assert launched(environ) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("MPICH Version:      5.0.2\nMPICH Release date: Fri\n\0", "MPICH 5.0.2"),
        ("Open MPI v5.0.8, package: x, ident: 5.0.8, repo rev: v5, May", "Open MPI v5.0.8"),
        (
            "Intel(R) MPI Library 2021.10 for Linux* OS\n",
            "Intel(R) MPI Library 2021.10 for Linux* OS",
        ),
        ("\0", "an unknown MPI"),
    ],
)
def test_library_names(text: str, name: str) -> None:
    assert library_name(text) == name


def test_a_mismatch_names_both() -> None:
    text = mismatch(Launch("Open MPI", "OMPI_COMM_WORLD_SIZE", 2, 4), "MPICH 5.0.2")
    for word in ("Open MPI launched", "rank 2 of 4", "MPICH 5.0.2", "mpiexec"):
        assert word in text


def test_children_are_not_tied_to_our_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PMI_RANK", "PMI_FD", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS"):
        monkeypatch.setenv(name, "1")
    users = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "PRTE_MCA_rmaps_default_mapping_policy": "x"}
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    left = clean_environment()
    assert launched(left) is None
    assert not [name for name in left if name.startswith(("PMI", "OMPI_COMM", "MPI_"))]
    assert users.items() <= left.items()


def test_mpiexec_beside_python_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("beside", "on_path"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mpiexec").write_text("#!/bin/sh\n")
        (tmp_path / folder / "mpiexec").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "on_path"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "beside" / "python"))
    assert find_mpiexec() == str(tmp_path / "beside" / "mpiexec")
    (tmp_path / "beside" / "mpiexec").unlink()
    assert find_mpiexec() == str(tmp_path / "on_path" / "mpiexec")
    (tmp_path / "on_path" / "mpiexec").unlink()
    assert find_mpiexec() is None


# ------------------------------------------------------------------------ processes of their own
def python(code: str, *before: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**clean_environment(), **environ},
    )


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, "Open MPI"),
        # This one shows only when MPI has been started.
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}, "Slurm's srun"),
    ],
)
@pytest.mark.parametrize("first", ["", "from mpi4py import MPI; "])
def test_an_mpi_of_another_kind_is_an_error_at_start(
    environ: dict[str, str], launcher: str, first: str
) -> None:
    done = python(first + "from dask_redist import world; world.start()", **environ)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert f"RedistError: {launcher} launched this process as rank 3 of 4" in last
    assert "mpi4py runs on MPICH" in last


def test_no_mpi4py_says_how_to_get_it() -> None:
    code = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "from dask_redist import world; assert not world.is_started(); world.start()"
    )
    done = python(code)
    assert done.returncode == 1
    assert "pip install 'dask-redist[mpi]'" in done.stderr.splitlines()[-1]


def test_the_world_of_each_rank() -> None:
    mpiexec = find_mpiexec()
    assert mpiexec is not None, "the tests need an mpiexec"
    code = "from dask_redist.world import main; main()"
    done = python(code, mpiexec, "-n", "3")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(row["world"]["rank"] for row in found) == [0, 1, 2]
    for row in found:
        assert row["world"]["size"] == 3
        assert row["world"]["implementation"].startswith("MPICH ")
        assert row["world"]["thread_level"] == "multiple"


def test_asking_what_launched_us_starts_nothing() -> None:
    code = (
        "from dask_redist import world; import sys\n"
        "world.launched(); print(world.is_started(), 'mpi4py' in sys.modules)\n"
        "world.start(); print(world.is_started())"
    )
    done = python(code)
    assert done.stdout.split() == ["False", "False", "True"], done.stderr
