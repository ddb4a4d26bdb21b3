"""The ranks of an MPI job, as each of them sees it: serve the script, and end together.

The script's rank closes Dask, hears from every rank that its Dask has ended, and lets them go when
it ends itself, so that all leave MPI together. Ranks that wait sleep, since an MPI that waits keeps
a core busy. A rank that fails, is lost or does not end is named, and the job aborted.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import dask
from distributed import Scheduler
from distributed.comm.core import connect as dial
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.utils import LoopRunner, get_ip, get_ip_interface

from dask_redist import mpigroup, world
from dask_redist.errors import RedistError
from dask_redist.lifeline import Lifeline, start_observer
from dask_redist.mpirank import HEARD, RankWorker, abort, be_silent, serve, wait_quietly

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: the job that this process serves, for the scheduler's plugin
_here: Crew | None = None

#: message tags on the job's own communicator
DONE, GO = 1, 2
#: seconds that all ranks have to end their Dask
ENDING = 20.0


class Crew:
    """The ranks of a job, as one of them sees them.

    Parameters
    ----------
    comm
        A communicator of the job's own over its ranks; None for a process that is alone.
    exclusive
        Whether scheduler and script have ranks of their own.
    exit
        Whether the ranks that serve exit with the script.
    """

    def __init__(self, comm: Any, exclusive: bool, exit: bool) -> None:
        self.comm, self.exclusive, self.exit = comm, exclusive, exit
        self.rank = comm.rank if comm is not None else 0
        self.size = comm.size if comm is not None else 1
        self.script = int(exclusive)
        self.first_worker = 2 * int(exclusive)
        self.workers = self.size - self.first_worker
        self.lifeline: Lifeline | None = None

    def agree(self, prepare: Callable[[], T]) -> list[T]:
        """What all ranks have prepared, by rank; what fails on one is the error of all.

        Raises
        ------
        RedistError
            On all ranks, where it failed on one; names that rank. In a job that exits with its
            script the others exit, and leave it to the script's rank to say so.
        """
        if self.comm is None:
            return [prepare()]
        found, told, cause = None, "", None
        try:
            found = prepare()
        except Exception as error:
            told, cause = f"{type(error).__name__}: {error}", error
        both = self.comm.allgather((found, told))
        if failed := [rank for rank, (_, told) in enumerate(both) if told]:
            self.comm.Free()
            if self.exit and self.rank != self.script:
                sys.exit(1)
            raise RedistError(f"rank {failed[0]} of {self.size}: {both[failed[0]][1]}") from cause
        return [found for found, _ in both]

    def hold(self, interface: str | None) -> None:
        """Be heard of, should this process die."""
        if self.size == 1:
            return
        hosts = self.agree(lambda: get_ip_interface(interface) if interface else get_ip())

        def observer() -> Any:  # which waits for us: nothing else may fail now
            return start_observer(hosts[0], self.size, self.exclusive) if self.rank == 0 else None

        self.lifeline = Lifeline(self.rank, *self.agree(observer)[0])
        global _here
        _here = self

    def share_of_memory(self) -> float:
        """The part of its host's memory that each worker on this host may use."""
        if self.comm is None:
            return 1.0
        from_here = self.comm.Split_type(world.start().COMM_TYPE_SHARED)
        workers = sum(from_here.allgather(self.rank >= self.first_worker))
        from_here.Free()
        return 1.0 / max(1, int(workers))

    # --------------------------------------------------------------- the ranks that serve
    def serve(self, work: dict[str, Any], schedule: dict[str, Any]) -> None:
        """Be scheduler or worker until the script is done, and wait until it lets us go."""
        with _deaf():
            try:
                if self.exclusive:
                    self._dask_mpi(work, schedule)
                else:
                    serve(self.comm.bcast(None, root=0), {"name": self.rank, **work})
            except BaseException as error:
                self._fail(error)
            done = self.comm.Isend(bytearray(1), dest=self.script, tag=DONE)
            wait_quietly(self.comm.Irecv(bytearray(1), source=self.script, tag=GO))
            wait_quietly(done)
        self.part()

    def part(self) -> None:
        """The job is over for this rank."""
        global _here
        _here = None
        if self.lifeline is not None:
            self.lifeline.close()
        if not self.exit and self.comm is not None:
            mpigroup.free_all()
            self.comm.Free()

    def _dask_mpi(self, work: dict[str, Any], schedule: dict[str, Any]) -> None:
        from dask_mpi import initialize

        del schedule["interface"]
        name = f"{RankWorker.__module__}.{RankWorker.__name__}"
        initialize(comm=self.comm, exit=False, worker_class=name, **work, **schedule)

    def _fail(self, error: BaseException) -> NoReturn:
        """End the job: this rank cannot do its part."""
        traceback.print_exception(error)
        self.abort(f"rank {self.rank} of {self.size} failed", 1)

    def abort(self, reason: str, code: int) -> NoReturn:
        """Say why, and end all ranks at once."""
        logger.error("%s: the job ends", reason)
        if self.lifeline is not None:
            self.lifeline.hush()
        abort(self.comm, code)

    # ------------------------------------------------------------------ the script's rank
    @contextmanager
    def served(self, work: dict[str, Any], schedule: dict[str, Any]) -> Iterator[str]:
        """The scheduler's address, while all others serve; they end with the block."""
        beside: _Beside | None = None
        try:
            if self.exclusive:
                self._dask_mpi(work, schedule)
                address = dask.config.get("scheduler_address")
            else:
                beside = _Beside(work, schedule)
                address = beside.address
                if self.comm is not None:
                    self.comm.bcast(address, root=0)
        except BaseException as error:
            if self.size == 1:
                raise
            self._fail(error)
        orders = _Orders(self) if self.size > 1 else None
        try:
            yield address
        finally:
            be_silent()
            try:
                if beside is not None:
                    beside.close()
                else:
                    _shut_down(address)
            except Exception as error:  # the others must be let go nevertheless
                logger.warning("Dask did not end as it should: %r", error)
            finally:
                if orders is not None:
                    orders.end()
                else:
                    self.part()


class _Beside:
    """Scheduler and worker in the script's own process."""

    def __init__(self, work: dict[str, Any], schedule: dict[str, Any]) -> None:
        self.runner = LoopRunner()
        self.runner.start()
        try:
            self.address: str = self.runner.run_sync(self._start, work, schedule)
        except BaseException:
            self.runner.stop()
            raise

    async def _start(self, work: dict[str, Any], schedule: dict[str, Any]) -> str:
        self.scheduler = await Scheduler(**schedule)
        self.worker = await RankWorker(self.scheduler.address, name=0, **work)
        return str(self.scheduler.address)

    async def _close(self) -> None:
        try:
            await self.scheduler.close()
        finally:
            await self.worker.close()

    def close(self) -> None:
        """End both; the workers elsewhere end with the scheduler."""
        try:
            self.runner.run_sync(self._close, callback_timeout=ENDING)
        finally:
            self.runner.stop(ENDING)


class _Orders:
    """What the script's rank hears from the others, and tells them."""

    def __init__(self, crew: Crew) -> None:
        self.crew, self.comm = crew, crew.comm
        self.others = [rank for rank in range(crew.size) if rank != crew.script]
        self.done = {r: self.comm.Irecv(bytearray(1), source=r, tag=DONE) for r in self.others}

    def end(self) -> None:
        """Hear that all ranks have ended their Dask; let them go, now or when this process ends."""
        deadline = time.monotonic() + ENDING
        late = [
            rank
            for rank, request in self.done.items()
            if not wait_quietly(request, max(0.0, deadline - time.monotonic()))
        ]
        if late:
            error = sys.exc_info()[1]
            if error is not None and not isinstance(error, SystemExit):
                sys.excepthook(type(error), error, error.__traceback__)
            ranks = ", ".join(map(str, late))
            reason = f"rank {ranks} of {self.crew.size} did not end within {ENDING:g} s"
            self.crew.abort(reason, _exit_code(error) or 1)
        if self.crew.exit:
            atexit.register(self.let_go)
        else:
            self.let_go()

    def let_go(self) -> None:
        """Let all ranks leave MPI, as this one is about to."""
        going = [self.comm.Isend(bytearray(1), dest=rank, tag=GO) for rank in self.others]
        for request in going:
            wait_quietly(request, ENDING)
        self.crew.part()


def _shut_down(address: str) -> None:
    """End the scheduler, and with it the workers, if it is there."""

    async def terminate() -> None:
        with contextlib.suppress(OSError):
            comm = await dial(address, timeout=2)
            await comm.write({"op": "terminate", "reply": False})
            await comm.close()

    asyncio.run(asyncio.wait_for(terminate(), ENDING))


def _exit_code(error: BaseException | None) -> int:
    """The exit code of a process that such an error ends."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return int(error is not None)


@contextmanager
def _deaf() -> Iterator[None]:
    """Leave Ctrl-C, which a terminal sends to all ranks, to the script's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: None)  # children get the default again
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class RankWatch(SchedulerPlugin):
    """On the scheduler: a worker that leaves unasked is named, and ends the job.

    Its process may go on, so that no launcher notices.
    """

    name = "dask_redist-watch"

    def __init__(self, size: int) -> None:
        self.size = size

    async def start(self, scheduler: Scheduler) -> None:
        """Remember who is who."""
        self.names = {ws.address: ws.name for ws in scheduler.workers.values()}

    async def before_close(self) -> None:
        """Workers that leave now are no news."""
        be_silent()

    def remove_worker(
        self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any
    ) -> None:
        """Say who has left, unless it was sent away, and abort."""
        if scheduler.status != Status.running or stimulus_id.startswith("retire-workers"):
            return
        if _here is not None:
            reason = f"rank {self.names.get(worker, '?')} of {self.size} ({worker}) has left"
            # Were it dead, the launcher would end the job before this is said again.
            later = threading.Timer(HEARD, _here.abort, args=(reason, 1))
            later.daemon = True
            later.start()
