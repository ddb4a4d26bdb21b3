"""A script and its ranks as one MPI job: ``with dask_redist.mpi() as client``.

All ranks run the script up to the ``with``. There they part: one goes on as the script, the others
serve it, as scheduler or workers, until it is done; :mod:`dask_redist.crew` sees to that.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dask.utils import parse_timedelta
from distributed import Client
from distributed.utils import silence_logging_cmgr
from numpy.typing import NDArray

from dask_redist import config, world
from dask_redist.connect import connect
from dask_redist.crew import Crew, RankWatch
from dask_redist.errors import RedistError
from dask_redist.local import offer, withdraw
from dask_redist.mpirank import be_silent

logger = logging.getLogger(__name__)


@contextmanager
def mpi(
    *,
    exclusive: bool = True,
    comm: Any = None,
    exit: bool = True,
    local: Mapping[str, NDArray[Any]] | None = None,
    interface: str | None = None,
    nthreads: int = 1,
    memory_limit: str | float = "auto",
    local_directory: str | None = None,
    dashboard: str | None = None,
    timeout: float | str | None = None,
) -> Iterator[Any]:
    """Run the script on one rank of an MPI job, with the others as its Dask cluster.

    Start it with ``mpiexec -n 6 python script.py`` (or ``srun``, or ``mpirun``). Only the rank that
    is the script enters the body of the ``with``; the others serve it and exit when the script
    does. The exit code of the job is that of the script. Without a launcher there is one rank, and
    a warning that says so.

    Parameters
    ----------
    exclusive : bool, optional
        True: rank 0 is the scheduler, rank 1 the script, and the rest, at least one, are workers.
        False: all ranks are workers, and rank 0 is scheduler and script too.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks that take part, all of which must call this; default: all.
    exit : bool, optional
        False: for an MPI program that goes on. The ranks that serve enter the body when the script
        has left it, with None for a client, and all ranks go on after it.
    local : dict of str to numpy.ndarray, optional
        Arrays of each rank that ``from_ranks(name)`` joins, without a copy.
    interface : str, optional
        Network interface that Dask uses, such as "ib0".
    nthreads : int, optional
        Threads that compute, in each worker.
    memory_limit : str, int or float, optional
        Memory of each worker, as Dask takes it; default: its share of its host's.
    local_directory : str, optional
        Where workers spill to; default: Dask's temporary directory.
    dashboard : str, optional
        Address of the scheduler's dashboard, such as ":8787"; default: none.
    timeout : float or str, optional
        Seconds, or a text such as "60s", in which all workers must be there; default:
        ``redist.timeout``.

    Yields
    ------
    distributed.Client or None
        A client that is connected to the ranks; None in ranks that have only served.

    Raises
    ------
    RedistError
        No MPI, one that is not the launcher's, or too few ranks; or one rank cannot take part, such
        as for an array that cannot be offered: then all ranks raise it, and it names that one.
    RunTimeoutError
        The workers were not there in time.

    Examples
    --------
    >>> import dask.array as da
    >>> with mpi() as client:
    ...     float(da.ones((4, 4), chunks=2).sum().compute())
    16.0
    """
    crew = _crew(comm, exclusive, exit)
    share = crew.share_of_memory()
    work = {
        "interface": interface,
        "nthreads": nthreads,
        "memory_limit": share if memory_limit == "auto" else memory_limit,
        "local_directory": local_directory,
    }
    schedule = {
        "interface": interface,
        "dashboard": dashboard is not None,
        "dashboard_address": dashboard or ":0",  # it serves more than that
    }

    offers: dict[str, Any] = {}

    def prepare() -> float:
        offer(local or {})
        offers.update(local or {})
        return config.seconds("timeout") if timeout is None else parse_timedelta(timeout, "s")

    try:
        seconds = crew.agree(prepare)[crew.rank]
        crew.hold(interface)
        with _news_only():
            if crew.rank == crew.script:
                with crew.served(work, schedule) as address, _client(address, seconds) as client:
                    connect(client, crew.workers, seconds)
                    if crew.size > 1:
                        client.register_plugin(RankWatch(crew.size))
                    yield client
                return
            crew.serve(work, schedule)
    finally:
        withdraw(offers)
    if exit:
        sys.exit()
    yield None


def _crew(comm: Any, exclusive: bool, exit: bool) -> Crew:
    """Who takes part.

    Raises
    ------
    RedistError
        No MPI, one that is not the launcher's, or too few ranks.
    """
    if world.launched() is None and not world.is_started():
        logger.warning(
            "no MPI launcher started this process: 1 rank, in this process; "
            "for more: mpiexec -n 6 python %s",
            sys.argv[0] or "SCRIPT",
        )
        return Crew(None, exclusive=False, exit=exit)
    started = world.start()
    comm = started.COMM_WORLD if comm is None else comm
    if exclusive and comm.size < 3:
        if exit and comm.rank > 0:
            sys.exit(1)  # rank 0 says it
        ranks = f"there {'is' if comm.size == 1 else 'are'} {comm.size}"
        raise RedistError(
            "dask_redist.mpi() needs 3 MPI ranks or more, for scheduler, script and workers, and "
            f"{ranks}: start more (mpiexec -n 3 ...), or use mpi(exclusive=False), where all ranks "
            "are workers"
        )
    return Crew(comm.Dup(), exclusive, exit)


@contextmanager
def _news_only() -> Iterator[None]:
    """Leave out what Dask says of its normal doings."""
    dasks = logging.getLogger("distributed")
    level = dasks.level
    try:
        with silence_logging_cmgr(level=logging.WARNING):
            yield
    finally:
        dasks.setLevel(level)


@contextmanager
def _client(address: str, timeout: float) -> Iterator[Client]:
    """A client that is closed quietly, whatever its user has done to it."""
    client = Client(address, timeout=timeout)
    try:
        yield client
    finally:
        be_silent()
        client.close()
