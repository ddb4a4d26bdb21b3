"""The runs that are open on a rank: task threads join them, the conductor closes them."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any

from distributed import Reschedule, Worker

from dask_redist.deposits import ReduceRun
from dask_redist.errors import load
from dask_redist.run import RankRun, RunTable

AnyRun = RankRun | ReduceRun


class OpenRuns:
    """The open runs of a rank.

    Parameters
    ----------
    worker
        The rank's worker.
    begin
        Makes a run of its table.
    call
        Runs a coroutine on the worker's event loop, from another thread.
    """

    def __init__(
        self,
        worker: Worker,
        begin: Callable[[RunTable], AnyRun],
        call: Callable[[Coroutine[Any, Any, Any]], Any],
    ) -> None:
        self.seat = -1  # until the scheduler has given us one
        self._worker = worker
        self._begin = begin
        self._call = call
        self._runs: dict[int, AnyRun] = {}
        self._joins: dict[Any, Future[AnyRun | None]] = {}
        #: for each join under way, the runs that were closed here since it began
        self._closed_since: dict[object, set[int]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def quiet(self) -> bool:
        """Whether nobody here writes to any run, and nobody ever will."""
        return all(run.gate.quiet for run in self._runs.values())

    # ----------------------------------------------------------------- called by task threads
    def join(self, id: Any) -> AnyRun | None:
        """The run of ``id``, None if there is none; the first to ask here asks the conductor."""
        while True:
            with self._lock:
                future = self._joins.get(id)
                first = future is None
                if future is None:
                    future = self._joins[id] = Future()
            try:
                if first:
                    return self._first(id, future)
                with contextlib.suppress(CancelledError):
                    return future.result()  # as long as the first one waits
            finally:
                # An error holds its frames, and they the chunk: no frame may hold the error.
                del future

    def _first(self, id: Any, future: Future[AnyRun | None]) -> AnyRun | None:
        try:
            run: AnyRun | None = self._call(self._ask(id, self._worker.get_current_task()))
        except BaseException as error:
            self._forget(id, future)
            if isinstance(error, Reschedule):
                future.cancel()  # that concerns the first task only; the next one asks
            else:
                future.set_exception(error)
            raise
        else:
            if run is None:
                self._forget(id, future)
            future.set_result(run)
            return run
        finally:
            del future

    def leave(self, run: AnyRun) -> None:
        """Whoever comes next asks for the run again."""
        id = run.table.id
        with self._lock:
            future = self._joins.get(id)
            if future is None or not future.done() or future.cancelled():
                return
            if future.exception() is None and future.result() is run:
                del self._joins[id]

    def _forget(self, id: Any, future: Future[AnyRun | None]) -> None:
        with self._lock:
            if self._joins.get(id) is future:
                del self._joins[id]

    # ------------------------------------------------------------------- on the event loop
    async def _ask(self, id: Any, key: Any) -> AnyRun | None:
        me, closed = object(), set[int]()
        self._closed_since[me] = closed
        try:
            while True:
                reply = await self._worker.scheduler.redist_join(id=id, key=key, seat=self.seat)
                if "error" in reply:
                    raise load(reply["error"])
                if "unknown" in reply:
                    return None
                if "stray" in reply:
                    raise Reschedule
                if "table" in reply:
                    table: RunTable = pickle.loads(reply["table"])
                    if table.number not in closed:
                        if table.number not in self._runs:
                            self._runs[table.number] = self._begin(table)
                        return self._runs[table.number]
                await asyncio.sleep(0.05)
        finally:
            del self._closed_since[me]

    async def close(self, number: int) -> AnyRun | None:
        """Refuse new writers, wait for the running ones; the run, if it was open here."""
        for closed in self._closed_since.values():
            closed.add(number)
        run = self._runs.get(number)
        if run is None:
            return None
        run.gate.close()
        self.leave(run)
        while not run.gate.quiet:  # the conductor gives up after the timeout
            await asyncio.sleep(0.005)
        self._runs.pop(number, None)
        return run

    async def end(self, number: int) -> None:
        """The run is over: whatever it holds back goes nowhere, whoever writes is refused."""
        if number in self._runs:
            self._runs[number].over = True
        await self.close(number)

    def refuse(self) -> None:
        """Refuse all writers; the rank closes."""
        for run in self._runs.values():
            run.gate.close()
