"""The worker's side: a rank and its runs.

One :class:`Rank` is installed on every worker by :func:`dask_redist.connect` as a worker plugin. It
puts the rank's parts together, and has the handlers that the scheduler and peers call.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
from distributed import Worker
from distributed.diagnostics.plugin import WorkerPlugin

from dask_redist import config, world
from dask_redist.arena import Arena, block_of
from dask_redist.closedruns import ClosedRuns
from dask_redist.deposits import ReduceRun
from dask_redist.errors import RedistError, RunTimeoutError, dump
from dask_redist.holdings import Holdings
from dask_redist.lane import Lane
from dask_redist.mpigroup import world_rank
from dask_redist.openruns import AnyRun, OpenRuns
from dask_redist.partials import Cut
from dask_redist.process import Process
from dask_redist.program import Means
from dask_redist.rankprograms import RankPrograms
from dask_redist.reach import Reach
from dask_redist.reduction import Reduction
from dask_redist.run import RankRun, RunTable
from dask_redist.taskside import TaskSide

PLUGIN = "dask_redist"

#: ranks of this process, by scheduler and seat (several where workers are threads)
_here: dict[tuple[str, int], Rank] = {}


def rank_of(worker: Worker) -> Rank | None:
    """The rank of a worker, or None where nobody connected."""
    plugin = worker.plugins.get(PLUGIN)
    return plugin if isinstance(plugin, Rank) else None


class Rank(WorkerPlugin):
    """A rank on its worker."""

    name = PLUGIN
    idempotent = True

    # ---------------------------------------------------------------------- start and stop
    async def setup(self, worker: Worker) -> None:
        """Make the arena and tell the scheduler who we are."""
        self.worker = worker
        self.timeout = config.seconds("timeout")
        self.memory_limit = int(worker.memory_manager.memory_limit or psutil.virtual_memory().total)
        self.arena = Arena(
            2 * self.memory_limit,
            int(config.get("arena.keep") * self.memory_limit),
            directory=config.get("arena.directory"),
            pressure=self._pressed,
        )
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="dask-redist")
        pages = int(config.get("arena.peer-pages") * self.memory_limit)
        self.reach = Reach(worker, self.arena, pages, self._call)
        collect = self.reach.mail.collect
        self.holdings = Holdings(worker, self.arena, self.memory_limit, collect)
        self.runs = OpenRuns(worker, self._begin, self._call)
        self.tasks = TaskSide(
            *(worker, self.runs, self.holdings, self.reach.read, self.threads),
            *(self._call, self.timeout),
        )
        self._closed = False
        self.lane = Lane(f"dask-redist-lane-{worker.name}")  # tickets may outrun the hello's answer
        self.closed_runs = ClosedRuns(worker, self.reach, self.lane, self.threads, self._call)
        means = Means(
            *(worker, self.arena, self.holdings, self.reach, self.timeout, self._call),
            mpi=self.reach.mail.groups.users_of,
        )
        self.programs = RankPrograms(means, self.threads)
        worker.handlers.update({op: self._guard(h) for op, h in self._handlers().items()})
        worker.stream_handlers["redist-left"] = self.reach.left
        worker.stream_handlers["redist-ticket"] = self._ticket
        worker.stream_handlers["redist-abort"] = self.programs.abort
        worker.stream_handlers["redist-free"] = self._free
        if hasattr(worker.data, "fast_to_slow_callbacks"):
            worker.data.fast_to_slow_callbacks.append(_cool)
        reply = await worker.scheduler.redist_hello(
            name=str(worker.name),
            host=worker.address.rpartition(":")[0],
            address=worker.address,
            process=tuple(Process.current()),
            card=tuple(self.arena.card),
            memory_limit=self.memory_limit,
            nthreads=worker.state.nthreads,
            mpi_rank=world_rank(),
        )
        self.seat: int = reply["seat"]
        for part in (self.reach, self.runs, self.closed_runs, self.programs, self.reach.mail):
            part.seat = self.seat
        self.lane.begin(reply["ticket"])
        _here[worker.scheduler.address, self.seat] = self
        if worker.nanny and (launch := world.launched()) is not None and launch.size > 1:
            _warn_of_nanny(worker)

    async def teardown(self, worker: Worker) -> None:
        """Refuse all writers and give everything back."""
        self._closed = True
        if hasattr(worker.data, "fast_to_slow_callbacks"):
            worker.data.fast_to_slow_callbacks.remove(_cool)
        self.runs.refuse()
        self.programs.close()
        self.holdings.close()
        self.reach.close()
        self.lane.close(timeout=0)
        self.arena.close()
        self.threads.shutdown(wait=False)
        if self.runs.quiet and self.programs.quiet:
            _here.pop((worker.scheduler.address, self.seat), None)

    def _handlers(self) -> dict[str, Callable[..., Any]]:
        mail = self.reach.mail
        return {
            "redist_allocate": self.holdings.allocate,
            "redist_write": self.holdings.receive,
            "redist_give": mail.give,
            "redist_prove": mail.groups.prove,
            "redist_proof": mail.groups.proof,
            "redist_roll": _telling(mail.groups.roll),
            "redist_meet": _telling(mail.groups.meet),
            "redist_keep": self._keep,
            "redist_read": self._read,
            "redist_begin": self.programs.begin,
            "redist_mail": self.programs.mail,
            "redist_keep_value": self.programs.keep,
            "redist_value": self.programs.value,
            "redist_close": self._close,
            "redist_vote": self.closed_runs.vote,
            "redist_dead": self._dead,
            "redist_barrier": self._barrier,
            "redist_reach": self._reach,
            "redist_memory": self._memory,
        }

    def _guard(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        """The handler; once the rank is closed, an answer that says so."""

        async def guarded(**arguments: Any) -> Any:
            if self._closed:
                raise OSError(f"the rank on {self.worker.address} is closed")
            return await handler(**arguments)

        return guarded

    def _pressed(self) -> bool:
        """Whether Dask has begun to spill: then nothing idle is kept."""
        target = self.worker.memory_manager.memory_target_fraction
        used: int = self.worker.monitor.get_process_memory()
        return bool(target) and used > target * self.memory_limit

    # ---------------------------------------------------------------------- for its parts
    def _begin(self, table: RunTable) -> AnyRun:
        """A run as its table says."""
        if isinstance(table.spec, Reduction):
            return ReduceRun(table, self.arena, self.reach.read)
        return RankRun(table, self.reach.wire_to)

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the worker's event loop, from another thread."""
        loop = self.worker.loop.asyncio_loop  # type: ignore[attr-defined]
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        try:
            return future.result(2 * self.timeout)
        except TimeoutError:
            if future.done():  # the answer itself was an error of this kind
                raise
            future.cancel()
            raise RunTimeoutError(
                f"rank on {self.worker.address}: no answer after {2 * self.timeout:g} s from "
                f"the scheduler at {self.worker.scheduler.address} or a peer"
            ) from None
        finally:
            del future  # it holds the error, whose frames hold the chunk

    # ------------------------------------------------------------------- on the event loop
    async def _close(self, number: int) -> dict[str, Any]:
        """Refuse new writers, wait for the running ones, and say what was written."""
        run = await self.runs.close(number)
        if run is None:
            return {"sent": {}, "wires": {}, "pieces": 0, "writing": 0.0, "rest": False}
        tally = run.tally
        for seat, nbytes in tally.sent.items():
            self.reach.credit(seat, nbytes)
        return {
            "sent": dict(tally.sent),
            "wires": dict(tally.wires),
            "pieces": tally.pieces,
            "writing": tally.writing,
            **await self.closed_runs.add(run),
        }

    def _ticket(self, ticket: int, number: int, table: bytes | None = None) -> None:
        """It is the turn of a program, or of a run's exchange."""
        job = self.programs.job(number)
        if job is not None:
            self.lane.submit(ticket, job)
        else:
            self.closed_runs.ticket(ticket, number, table)

    async def _read(
        self, number: int, leaves: bytes, cut: Any, letter: Any = None
    ) -> dict[str, Any]:
        """Arrays that a program or a reduction has laid out here, for a peer.

        Raises
        ------
        OSError
            The run is over here.
        """
        if number not in self.programs and not self.closed_runs.is_read(number):
            raise OSError(f"run {number} is over on {self.worker.address}")
        return await self.reach.serve(pickle.loads(leaves), cut and Cut(*cut), letter)

    async def _keep(self, number: int, key: Any) -> bool:
        """Put our copy of a replicated chunk into the worker's data."""
        array = self.holdings.take(number, key[1:])
        if array is not None:
            self.worker.update_data({key: array}, stimulus_id=f"redist-keep-{number}")
        return array is not None

    async def _free(self, number: int, condemn: bool) -> None:
        """The run is over; told in order, and even to a rank that did not answer a while."""
        self.closed_runs.forget(number)
        self.programs.forget(number)
        await self.runs.end(number)
        await self.holdings.free(number, condemn)

    async def _dead(self, number: int, lost: int, process: Iterable[Any]) -> bool:
        """Whether the process of a lost rank can write to us no more."""
        suspect = Process(*process)
        deadline = time.monotonic() + min(self.timeout, 10.0)
        while time.monotonic() < deadline:
            if suspect == Process.current():
                rank = _here.get((self.worker.scheduler.address, lost))
                gone = rank is None or (rank.runs.quiet and rank.programs.quiet)
            else:
                # Only a named segment can be mapped from where our process ids mean nothing.
                dead = suspect.is_dead()
                gone = config.get("arena.directory") is None if dead is None else dead
            if gone and not self.holdings.receiving(number):
                return True
            await asyncio.sleep(0.02)
        return False

    async def _barrier(self, ticket: int) -> bool:
        """Whether all that the lane had to do up to a ticket is done, in time."""
        deadline = time.monotonic() + self.timeout
        while self.lane.done < ticket and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        return self.lane.done >= ticket

    async def _reach(
        self, seats: Iterable[Any], communicators: Mapping[int, int]
    ) -> dict[str, Any]:
        self.reach.mail.groups.choose(communicators.get(self.seat))
        try:
            return {"wires": self.reach.wires(seats)}
        except RedistError as error:  # the scheduler would pass its text on only
            return {"error": dump(error)}

    async def _memory(self) -> dict[str, int]:
        """Bytes in this rank's arena, bytes that others wrote here, runs that are not over."""
        return {
            "received": self.arena.received + self.holdings.received + self.reach.received,
            "in_use": self.arena.in_use,
            "idle": self.arena.idle,
            "condemned": self.arena.condemned,
            "runs": len(self.runs) + len(self.holdings) + len(self.closed_runs),
        }


def _telling(handler: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Any]:
    """A handler that answers with its error: of an error that is raised Dask passes on its text."""

    async def telling(**arguments: Any) -> dict[str, Any]:
        try:
            await handler(**arguments)
        except RedistError as error:
            return {"error": dump(error)}
        return {}

    return telling


def _warn_of_nanny(worker: Worker) -> None:
    """Tell all clients, as Dask's ``warn`` does from tasks."""
    text = (
        "these workers run under a nanny, in processes that are no MPI ranks: start them with "
        "dask-mpi --worker-class distributed.Worker"
    )
    worker.log_event("warn", {"message": pickle.dumps(text), "category": pickle.dumps(UserWarning)})


def _cool(key: Any, value: Any) -> None:
    """Dask spilled an array: the pages of its block go back to the system at once."""
    block = block_of(value)
    if block is not None:
        block.cool()
