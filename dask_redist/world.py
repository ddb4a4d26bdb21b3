"""The MPI world: what launched this process, which MPI it runs on, and whether the two agree.

The one module that imports mpi4py, and only when asked: importing ``mpi4py.MPI`` starts MPI. (Ranks
of a ``LocalMPICluster`` have done so before they import this package: see ``mpijob.CODE``.) What
the launcher says is read from the environment, without starting anything. Where an mpi4py belongs
to another MPI than the launcher, each process believes that it is rank 0 of 1, and n of them do the
same work over each other; :func:`start` refuses that.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dask_redist.errors import RedistError

OPEN_MPI = "Open MPI"
#: libraries that its launcher works with
ITS_KIN = ("Open MPI", "IBM Spectrum MPI")
#: what launchers put into the environment: who they are, variable of the size, and of the rank
LAUNCHERS = (
    (OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("MPICH or one of its kin", "PMI_SIZE", "PMI_RANK"),
    ("Slurm's srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)
#: how the variables begin that tie a process to its launcher: its own children must not have them,
#: but what a user sets for launchers (OMPI_ALLOW_..., PRTE_MCA_..., HYDRA_...) they must have
TIES = (
    *("PMI_", "PMIX_RANK", "PMIX_NAMESPACE", "PMIX_SERVER", "PMIX_SECURITY", "HYDI_", "MPI_LOCAL"),
    *("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "OMPI_MCA_ess_", "OMPI_MCA_orte_"),
)

#: for an mpiexec that is to start its ranks on this host, even inside a batch job, and more than
#: there are cores (MPICH does that anyway)
ON_THIS_HOST = {
    "HYDRA_LAUNCHER": "fork",
    "HYDRA_RMK": "user",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}

INSTALL = "pip install 'dask-redist[mpi]' for the site's MPI, 'dask-redist[mpich]' to bring one"


@dataclass(frozen=True)
class Launch:
    """What the launcher says about this process."""

    launcher: str
    variable: str
    rank: int
    size: int


@dataclass(frozen=True)
class World:
    """A process in the MPI world, and the MPI that made it.

    Attributes
    ----------
    rank, size
        In ``COMM_WORLD``.
    implementation
        Name and version of the MPI.
    standard
        Version of the MPI standard.
    thread_level
        "single", "funneled", "serialized" or "multiple".
    """

    rank: int
    size: int
    implementation: str
    standard: str
    thread_level: str


def launched(environ: Mapping[str, str] | None = None) -> Launch | None:
    """What launched this process as one of several, from its environment; None if nothing did.

    Examples
    --------
    >>> launched({"PMI_SIZE": "4", "PMI_RANK": "2"}).rank
    2
    >>> launched({}) is None
    True
    """
    environ = os.environ if environ is None else environ
    for launcher, size, rank in LAUNCHERS:
        if environ.get(size, "").isdecimal():
            found = environ.get(rank, "0")
            return Launch(
                launcher, size, int(found) if found.isdecimal() else 0, int(environ[size])
            )
    return None


def is_started() -> bool:
    """Whether MPI runs in this process; starts nothing."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()


def start() -> Any:
    """Return the module ``mpi4py.MPI``, with MPI started.

    Raises
    ------
    RedistError
        mpi4py or its MPI is not there, or it belongs to another MPI than the launcher.
    """
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules and mpi4py.rc.initialize:
            # We start it below: one that is of another MPI ends the process when it is started.
            mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py is there, and finds no MPI library
        raise RedistError(f"no MPI in this Python ({_one_line(error)}): {INSTALL}") from error
    launch, library = launched(), library_name(MPI.Get_library_version())
    if launch is not None and launch.launcher == OPEN_MPI and not library.startswith(ITS_KIN):
        raise RedistError(mismatch(launch, library))
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if launch is not None and launch.size > 1 and MPI.COMM_WORLD.size == 1:
        raise RedistError(mismatch(launch, library))
    return MPI


def look(mpi: Any) -> World:
    """The process in the world of a started MPI."""
    levels = {
        mpi.THREAD_SINGLE: "single",
        mpi.THREAD_FUNNELED: "funneled",
        mpi.THREAD_SERIALIZED: "serialized",
        mpi.THREAD_MULTIPLE: "multiple",
    }
    return World(
        mpi.COMM_WORLD.rank,
        mpi.COMM_WORLD.size,
        library_name(mpi.Get_library_version()),
        ".".join(map(str, mpi.Get_version())),
        levels.get(mpi.Query_thread(), "unknown"),
    )


def library_name(text: str) -> str:
    r"""Name and version in what an MPI says about itself.

    Examples
    --------
    >>> library_name("MPICH Version:      5.0.2\nMPICH Release date: ...")
    'MPICH 5.0.2'
    >>> library_name("Open MPI v5.0.8, package: Open MPI root@host, ident: 5.0.8")
    'Open MPI v5.0.8'
    """
    line = text.strip("\0 \n").splitlines()[0] if text.strip("\0 \n") else "an unknown MPI"
    return " ".join(line.split(",")[0].replace("Version:", " ").split())


def mismatch(launch: Launch, library: str) -> str:
    """Say that launcher and MPI are not of one kind, and what would be right.

    Examples
    --------
    >>> print(mismatch(Launch(OPEN_MPI, "OMPI_COMM_WORLD_SIZE", 2, 4), "MPICH 5.0.2"))
    Open MPI launched this process as rank 2 of 4 (OMPI_COMM_WORLD_SIZE=4), but mpi4py runs on ...
    """
    here = find_mpiexec()
    return (
        f"{launch.launcher} launched this process as rank {launch.rank} of {launch.size} "
        f"({launch.variable}={launch.size}), but mpi4py runs on {library}, which has no part in "
        "that: start it with that MPI's own mpiexec"
        + (f" ({here})" if here else "")
        + ", or install an mpi4py for the launcher's MPI"
    )


def find_mpiexec() -> str | None:
    """The mpiexec of this Python's environment, else the one on PATH; None if there is none."""
    beside = Path(sys.executable).parent / "mpiexec"
    if os.access(beside, os.X_OK):
        return str(beside)
    return shutil.which("mpiexec") or shutil.which("mpirun")


def require_mpiexec() -> str:
    """The mpiexec to use.

    Raises
    ------
    RedistError
        There is no mpi4py or no mpiexec.
    """
    if find_spec("mpi4py") is None:
        raise RedistError(f"mpi4py is not installed: {INSTALL}")
    mpiexec = find_mpiexec()
    if mpiexec is None:
        raise RedistError(
            f"no mpiexec beside {sys.executable} or on PATH: load the site's MPI (module "
            "load ...), or pip install 'dask-redist[mpich]'"
        )
    return mpiexec


def clean_environment() -> dict[str, str]:
    """The environment without what ties this process to its launcher, for another mpiexec."""
    return {name: value for name, value in os.environ.items() if not name.startswith(TIES)}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def main() -> None:
    """Print the process's world as JSON, or why it has none: what ``dask-redist info`` asks for."""
    try:
        found: dict[str, Any] = {"world": asdict(look(start()))}
    except RedistError as error:
        found = {"error": str(error)}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
