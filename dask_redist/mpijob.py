"""The MPI job under a :class:`dask_redist.LocalMPICluster`: one mpiexec, and what it says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

import dask
from distributed import Scheduler
from distributed.core import Status, rpc
from distributed.deploy.spec import ProcessInterface
from distributed.protocol.pickle import dumps

from dask_redist import world
from dask_redist.errors import RankLostError, RedistError
from dask_redist.process import Process
from dask_redist.scheduler import PLUGIN

if TYPE_CHECKING:
    from dask_redist.mpicluster import LocalMPICluster

logger = logging.getLogger(__name__)

#: MPI before distributed, which some MPIs need to find each other among many ranks
CODE = "from mpi4py import MPI; from dask_redist.mpirank import main; main()"
#: seconds in which ranks end by themselves, then on request
ENDING = 10.0, 3.0
#: bytes of what was printed first, where ranks say who they are, and of what was printed last
FIRST, LAST = 2**17, 2**20


class MPIRanks(ProcessInterface):
    """All ranks of an MPI job, which Dask's cluster takes for one worker."""

    #: set by Dask once all ranks are there
    _cluster: weakref.ReferenceType[LocalMPICluster] | None = None

    def __init__(
        self,
        scheduler: str,
        mpiexec: str,
        n_ranks: int,
        timeout: float,
        worker: dict[str, Any],
        name: str,
    ) -> None:
        super().__init__(scheduler, name)  # type: ignore[no-untyped-call]
        self.scheduler, self.mpiexec, self.n_ranks = scheduler, mpiexec, n_ranks
        self.timeout, self.options = timeout, worker
        self.process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._log: IO[bytes] | None = None
        self._printed = ""  # when the log is closed
        self._watching: asyncio.Task[None] | None = None

    # ---------------------------------------------------------------------------- start
    async def start(self) -> None:
        """Start the ranks, and wait until all are workers of the scheduler."""
        self._folder = tempfile.TemporaryDirectory(prefix="dask-redist-mpi-")
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        options = {
            **self.options,
            "local_directory": self.options["local_directory"] or self._folder.name,
            "size": self.n_ranks,
            "parent": tuple(Process.current()),
        }
        command = [self.mpiexec, "-n", str(self.n_ranks)]
        command += [sys.executable, "-c", CODE, self.scheduler, json.dumps(options)]
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for this process; it ends the ranks
            )
            await self._all_there(time.monotonic() + self.timeout)
        except BaseException:
            self.status = Status.failed
            await self.close()
            raise
        self._watching = asyncio.create_task(self._watch())
        await super().start()  # type: ignore[no-untyped-call]

    async def _all_there(self, deadline: float) -> None:
        assert self.process is not None
        async with rpc(self.scheduler) as scheduler:
            while (
                there := len((await scheduler.identity(n_workers=-1))["workers"])
            ) < self.n_ranks:
                if (code := self.process.poll()) is not None:
                    raise RedistError(
                        f"mpiexec ended ({_ending(code)}) before its {self.n_ranks} ranks were "
                        f"there: {self._reason()} (does {self.mpiexec} fit mpi4py? "
                        "dask-redist info says so)"
                    )
                if time.monotonic() > deadline:
                    raise RedistError(
                        f"{there} of {self.n_ranks} MPI ranks came within {self.timeout:g} s: "
                        f"{self._reason()}; raise timeout= or start fewer ranks"
                    )
                await asyncio.sleep(0.05)

    # ------------------------------------------------------------------- while it runs
    def output(self) -> str:
        """What the ranks and mpiexec have printed: its beginning and its end, where it is long."""
        return ends_of(self._log) if self._log is not None else self._printed

    async def _watch(self) -> None:
        """Say which rank has died, and let what is computed fail with that line."""
        assert self.process is not None
        while (code := self.process.poll()) is None:
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)  # until the cluster has heard who left
        cluster = self._its_cluster()
        who = who_died(self.output(), self.n_ranks, cluster.gone if cluster is not None else ())
        del cluster
        lost = RankLostError(
            f"{who} ({_ending(code)}), and with it the whole MPI "
            "job: make another LocalMPICluster; get_logs()['mpiexec'] has what the ranks printed"
        )
        logger.error("%s", lost)
        while (cluster := self._its_cluster()) is not None and cluster.status == Status.running:
            fail_what_waits(cluster.scheduler, lost)
            if (shell := cluster.scheduler.plugins.get(PLUGIN)) is not None:
                shell.roster.lost = lost
            del cluster
            await asyncio.sleep(0.2)

    def _its_cluster(self) -> Any:
        return self._cluster() if self._cluster is not None else None

    # ------------------------------------------------------------------------------ end
    async def close(self) -> None:
        """End all ranks: asked, then told, then killed."""
        if self._watching is not None:
            self._watching.cancel()
        cluster, process = self._its_cluster(), self.process
        if cluster is not None:
            for address in list(cluster.scheduler.workers):
                cluster.scheduler.close_worker(address)
        if process is not None:
            # Ranks that were never all there do not end by themselves.
            await _end(process, ENDING[0] if cluster is not None else 0.0)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.cleanup()
        if self._log is not None:
            self._printed = self.output()
            self._log.close()
            self._log = None
        await super().close()  # type: ignore[no-untyped-call]

    def _reason(self) -> str:
        """The most telling line that was printed."""
        return telling(self.output()) or "it printed nothing"


def _environment() -> dict[str, str]:
    """For the ranks: our settings and modules, and on this host only, wherever we are ourselves."""
    before_start = dask.config.get("distributed.nanny.pre-spawn-environ")
    return {
        **world.clean_environment(),
        **{name: str(value) for name, value in before_start.items() if value is not None},
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "DASK_INTERNAL_INHERIT_CONFIG": dask.config.serialize(dask.config.global_config),
        **world.ON_THIS_HOST,
    }


def ends_of(log: IO[bytes]) -> str:
    """The beginning and the end of a log; all of it where it is short."""
    number, size = log.fileno(), os.fstat(log.fileno()).st_size
    if size <= FIRST + LAST:
        return os.pread(number, size, 0).decode(errors="replace")
    first, last = os.pread(number, FIRST, 0), os.pread(number, LAST, size - LAST)
    # Whole lines, as far as there are any.
    first, last = first[: first.rfind(b"\n") + 1] or first, last[last.find(b"\n") + 1 :] or last
    left_out = f"\n... {size - len(first) - len(last)} bytes ...\n"
    return first.decode(errors="replace") + left_out + last.decode(errors="replace")


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def who_died(output: str, n_ranks: int, gone: Sequence[Any] = ()) -> str:
    r"""Which rank died first: that left the scheduler first, else what the launcher says.

    The launcher comes second because MPICH also names ranks that it has killed itself.

    Examples
    --------
    >>> who_died("rank 1 is PID 77\nrank 0 is PID 76", 2, [1, 0])
    'rank 1 of 2 (PID 77) has died'
    >>> who_died("rank 1 is PID 77\n=   PID 77 RUNNING AT here", 2)
    'rank 1 of 2 (PID 77) has died'
    >>> who_died("mpirun noticed that process rank 0 with PID 7 on node x exited", 2)
    'rank 0 of 2 (PID 7) has died'
    """
    pids = dict(re.findall(r"rank (\d+) is PID (\d+)", output))
    said = re.findall(r"process rank (\d+) with PID (\d+)", output)
    blamed = re.findall(r"PID (\d+) RUNNING AT", output)
    found = [(str(rank), pids.get(str(rank), "?")) for rank in gone]
    found += said + [(rank, pid) for rank, pid in pids.items() if pid in blamed]
    if not found:
        return f"one of {n_ranks} ranks has died"
    rank, pid = found[0]
    return f"rank {rank} of {n_ranks} (PID {pid}) has died"


def telling(output: str) -> str | None:
    r"""Return the line of an error, else the first one that is not of a worker's usual log.

    Examples
    --------
    >>> telling("rank 0 is PID 7\nTraceback ...\nOSError: [Errno 5] x\n====\nMPI_Abort")
    'OSError: [Errno 5] x'
    >>> telling("-------\nThere are not enough slots.\nEither ...\n-----")
    'There are not enough slots.'
    """
    lines = [line.strip() for line in output.splitlines() if re.search(r"\w", line)]
    lines = [line for line in lines if " - INFO - " not in line]
    lines = [line for line in lines if not line.startswith(("=", "rank "))]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return errors[-1] if errors else next(iter(lines), None)


def fail_what_waits(scheduler: Scheduler, error: Exception) -> None:
    """Fail all tasks that wait for a worker, where none will come."""
    pickled: Any = dumps(error)
    recommendations: dict[Any, Any] = {}
    stimulus = f"redist-no-ranks-{time.time()}"
    for ts in [*scheduler.unrunnable, *scheduler.queued]:
        recommendations |= scheduler.transition(
            ts.key, "erred", exception=pickled, cause=ts.key, stimulus_id=stimulus
        )
    scheduler.transitions(recommendations, stimulus_id=stimulus)


async def _end(process: subprocess.Popen[bytes], patience: float) -> None:
    """Wait for a process to end, then tell it to, then kill it and what it started."""
    if not await _ends(process, patience):
        process.terminate()
    if not await _ends(process, ENDING[1]):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def _ends(process: subprocess.Popen[bytes], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return process.poll() is not None
