"""A Dask cluster whose workers are MPI ranks on this machine, for Jupyter and for tests.

The scheduler runs here, as with ``LocalCluster``; one ``mpiexec`` starts all ranks at once. MPI
fixes their number then, and ends all of them when one dies; the cluster says which one that was,
and what is computed afterwards fails with that line instead of waiting for workers for ever.
"""

from __future__ import annotations

import logging
from typing import Any, NoReturn

from dask.system import CPU_COUNT
from dask.utils import parse_timedelta
from distributed import Scheduler
from distributed.core import Status
from distributed.deploy.spec import SpecCluster
from distributed.utils import Log, Logs

from dask_redist import config, world
from dask_redist.errors import RedistError
from dask_redist.mpijob import MPIRanks


class LocalMPICluster(SpecCluster):
    """Workers that are the ranks of one MPI job on this machine; the scheduler is in this process.

    Parameters
    ----------
    n_workers : int, optional
        Number of MPI ranks; default: as many as there are cores. It cannot be changed later.
    nthreads : int, optional
        Threads that compute, in each rank.
    memory_limit : str, int or float, optional
        Memory of each rank, as Dask takes it; default: its share of the machine's.
    local_directory : str, optional
        Where ranks spill to; default: a folder that goes away with the cluster.
    host : str, optional
        Address that scheduler and ranks listen on.
    dashboard_address : str, optional
        Of the scheduler's dashboard; None for none.
    timeout : float or str, optional
        Seconds, or a text such as "60s", in which all ranks must be there; default:
        ``redist.timeout``.
    asynchronous : bool, optional
        For use with ``async with`` or ``await``.
    **kwargs
        ``name``, ``loop``, ``silence_logs`` and all else that Dask's ``SpecCluster`` takes.

    Raises
    ------
    RedistError
        There is no mpi4py or no mpiexec, or the ranks were not all there in time; in one line.

    Notes
    -----
    What ranks print, and the launcher's messages, are in ``cluster.get_logs()["mpiexec"]``.

    Examples
    --------
    >>> with LocalMPICluster(n_workers=2, dashboard_address=None) as cluster:
    ...     with cluster.get_client() as client:
    ...         client.submit(sum, [1, 2, 3]).result()
    6
    """

    def __init__(
        self,
        n_workers: int | None = None,
        nthreads: int = 1,
        memory_limit: str | float = "auto",
        local_directory: str | None = None,
        host: str = "127.0.0.1",
        dashboard_address: str | None = ":8787",
        timeout: float | str | None = None,
        asynchronous: bool = False,
        **kwargs: Any,
    ) -> None:
        n = CPU_COUNT if n_workers is None else n_workers
        if not isinstance(n, int) or n < 1:
            raise ValueError(f"n_workers is {n!r}; it must be a whole number from 1")
        seconds = config.seconds("timeout") if timeout is None else parse_timedelta(timeout, "s")
        ranks = {
            "mpiexec": world.require_mpiexec(),
            "n_ranks": n,
            "timeout": seconds,
            "worker": {
                "nthreads": nthreads,
                "memory_limit": 1.0 / n if memory_limit == "auto" else memory_limit,
                "host": host,
                "local_directory": local_directory,
            },
        }
        listening = {
            "host": host,
            "dashboard": dashboard_address is not None,
            "dashboard_address": dashboard_address or f"{host}:0",  # it serves more than that
        }
        #: names of the workers that have left, in that order
        self.gone: list[Any] = []
        super().__init__(  # type: ignore[no-untyped-call]
            scheduler={"cls": Scheduler, "options": listening},
            workers={"mpiexec": {"cls": MPIRanks, "options": ranks}},
            asynchronous=asynchronous,
            **{"silence_logs": logging.WARNING, **kwargs},
        )

    def scale(self, n: int = 0, memory: Any = None, cores: Any = None) -> Any:
        """Refuse: the number of ranks is that of the MPI job."""
        if self.status in (Status.closing, Status.closed):  # Dask closes a cluster by it
            return super().scale(n, memory, cores)  # type: ignore[no-untyped-call]
        _refuse(f"scale to {n}")

    def adapt(self, **kwargs: Any) -> NoReturn:  # type: ignore[override]
        """Refuse: the number of ranks is that of the MPI job."""
        _refuse("adapt")

    def _update_worker_status(self, op: str, msg: Any) -> None:
        if op == "remove":
            self.gone.append(self.scheduler_info["workers"][msg]["name"])
        super()._update_worker_status(op, msg)  # type: ignore[no-untyped-call]

    @property
    def _ranks(self) -> MPIRanks | None:
        found: MPIRanks | None = self.workers.get("mpiexec")
        return found

    async def _get_logs(
        self, cluster: bool = True, scheduler: bool = True, workers: Any = True
    ) -> Logs:
        logs: Logs
        logs = await super()._get_logs(cluster, scheduler, workers)  # type: ignore[no-untyped-call]
        if cluster and self._ranks is not None:
            logs["mpiexec"] = Log(self._ranks.output())
        return logs


def _refuse(what: str) -> NoReturn:
    raise RedistError(
        f"cannot {what}: mpiexec fixes the number of MPI ranks when it starts them; close this "
        "cluster and make another one with LocalMPICluster(n_workers=...)"
    )
