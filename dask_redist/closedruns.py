"""The runs that are closed on a rank and not over: they wait for their ticket, or are read.

A redistribution is here while its wires hold pieces back; a reduction until its end, since other
ranks read what it has laid out, and then what it has merged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from functools import partial
from typing import Any

from distributed import Worker

from dask_redist.deposits import ReduceRun, Unread, dumped, loaded
from dask_redist.errors import dump, has_left
from dask_redist.lane import Lane, insist
from dask_redist.openruns import AnyRun
from dask_redist.reach import Reach
from dask_redist.run import RunClosed


class ClosedRuns:
    """The closed runs of a rank.

    Parameters
    ----------
    worker
        The rank's worker.
    reach
        The rank's wires.
    lane
        Executes exchanges by ticket.
    threads
        Does what would block the event loop.
    call
        Runs a coroutine on the worker's event loop, from another thread.
    """

    def __init__(
        self,
        worker: Worker,
        reach: Reach,
        lane: Lane,
        threads: Executor,
        call: Callable[[Coroutine[Any, Any, Any]], Any],
    ) -> None:
        self.seat = -1  # until the scheduler has given us one
        self._worker, self._reach, self._lane = worker, reach, lane
        self._threads, self._call = threads, call
        #: runs that have something for an exchange, until their ticket comes
        self._rests: dict[int, AnyRun] = {}
        #: runs of reductions
        self._reductions: dict[int, ReduceRun] = {}

    def __len__(self) -> int:
        return len(self._rests.keys() | self._reductions.keys())

    async def add(self, run: AnyRun) -> dict[str, Any]:
        """A run is closed: whether it waits for a ticket, and what it has laid out."""
        number = run.table.number
        if run.over or not run.rest:
            return {"rest": False}
        self._rests[number] = run
        if not isinstance(run, ReduceRun):
            return {"rest": True}
        self._reductions[number] = run
        loop = asyncio.get_running_loop()
        laid = await loop.run_in_executor(self._threads, lambda: dumped(run.lay_out()))
        return {"rest": number in self._rests, "laid": laid}

    def forget(self, number: int) -> None:
        """The run is over."""
        self._rests.pop(number, None)
        self._reductions.pop(number, None)

    def is_read(self, number: int) -> bool:
        """Whether others may read what a reduction has laid out here."""
        return number in self._reductions

    async def vote(self, number: int) -> bool:
        """Whether the exchange of run ``number`` can go: its owners are all there."""
        run = self._rests.get(number)
        return run is not None and self._reach.all_there(run.table.owners)

    def ticket(self, ticket: int, number: int, table: bytes | None = None) -> None:
        """It is the turn of a run's exchange; ``table``: what all have laid out for a reduction."""
        run = self._rests.pop(number, None)
        self._lane.submit(ticket, partial(self._exchange, run, table) if run is not None else None)

    def _exchange(self, run: AnyRun, table: bytes | None) -> None:
        """In the lane: send what was held back, or merge our cuts, and tell the conductor."""
        answer: dict[str, Any] = {"failed": False, "error": None}
        try:
            if isinstance(run, ReduceRun):
                merged = run.exchange(loaded(table or b""), self.seat)
                answer |= {"merged": dumped(merged), "read": dict(run.tally.sent)}
            else:
                run.exchange()
        except (RunClosed, Unread):
            answer = {"failed": True, "error": None}
        except Exception as failure:
            left = not isinstance(run, ReduceRun) and has_left(failure)  # else it is the user's
            answer = {"failed": True, "error": None if left else dump(failure)}
        number, scheduler = run.table.number, self._worker.scheduler
        tell = partial(scheduler.redist_exchanged, number=number, seat=self.seat)
        insist(lambda: self._call(tell(**answer)))
