"""What tasks ask of the rank that they run on: contributions, takes, and the fence between them.

Task threads give what chunks contribute and take outputs; the fence is a coroutine, which holds no
thread while the ranks close its run.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from functools import partial
from typing import Any

from distributed import Reschedule, Worker
from numpy.typing import NDArray

from dask_redist.deposits import Reader, Unread, assemble_result, loaded
from dask_redist.errors import RunTimeoutError, has_left, load
from dask_redist.holdings import Holdings
from dask_redist.openruns import OpenRuns
from dask_redist.reduction import Reduction
from dask_redist.run import RunClosed
from dask_redist.spec import Index, PartSpec, Receipt, contribution_key


class TaskSide:
    """The tasks' side of a rank.

    Parameters
    ----------
    worker
        The rank's worker.
    runs
        The runs that are open.
    holdings
        The outputs that the rank owns.
    read
        Reads what other ranks have laid out.
    threads
        Does what would block the event loop.
    call
        Runs a coroutine on the worker's event loop, from another thread.
    timeout
        Seconds in which another rank must be there.
    """

    def __init__(
        self,
        worker: Worker,
        runs: OpenRuns,
        holdings: Holdings,
        read: Reader,
        threads: Executor,
        call: Callable[[Coroutine[Any, Any, Any]], Any],
        timeout: float,
    ) -> None:
        self._worker, self._runs, self._holdings = worker, runs, holdings
        self._read, self._threads, self._call, self._timeout = read, threads, call, timeout

    # ------------------------------------------------------------------------- in task threads
    def contribute(self, id: Any, index: Index, chunk: Any) -> int | None:
        """Write one input chunk's pieces; the run's number, or None where there is no run.

        Raises
        ------
        ChunkMismatchError
            The chunk is not what the array declares.
        AdmissionError
            A rank has not enough memory for its outputs.
        RunTimeoutError
            Nobody answered in time.
        """
        if self._worker.get_current_task() != contribution_key(id, index):
            return None  # a copy of the task, or a compute inside another task
        deadline = None
        while True:
            try:
                return self._contribute(id, index, chunk)
            except OSError as error:
                if not has_left(error):
                    raise
                # If an owner has left, the conductor ends the run; else what failed is tried again.
                deadline = deadline or time.monotonic() + self._timeout
                if time.monotonic() > deadline:
                    raise RunTimeoutError(
                        f"the rank on {self._worker.address} could not write to another one for "
                        f"{self._timeout:g} s (redist.timeout): {error}"
                    ) from error
                time.sleep(0.1)

    def deposit(self, id: Any, index: Index, partial: Any) -> int | None:
        """Give one chunk's partial to a reduction; the run's number, or None where there is none.

        Raises
        ------
        RunTimeoutError
            Nobody answered in time.
        """
        # Fused with its producer, the task has the end of the name; in a task that computes
        # something else, its own.
        key: Any = self._worker.get_current_task()
        if not isinstance(key, tuple) or not isinstance(key[0], str):
            return None
        name, *place = key
        token = id[0].rpartition("-")[2]
        if tuple(place) != index or not name.endswith(f"-contribute-{token}"):
            return None
        return self._contribute(id, index, partial)

    def _contribute(self, id: Any, index: Index, what: Any) -> int | None:
        """Give what a chunk contributes to the run that is open, whichever that is."""
        while True:
            run = self._runs.join(id)
            if run is None:
                return None
            try:
                run.contribute(index, what)
                return run.table.number
            except RunClosed:
                self._runs.leave(run)

    def collect_soon(self) -> None:
        """Have garbage collected: a failed task's arguments stay in a cycle of Dask's frames."""
        loop = self._worker.loop.asyncio_loop  # type: ignore[attr-defined]
        loop.call_soon_threadsafe(loop.call_later, 0.5, gc.collect)

    def take(self, receipt: Receipt, index: Index) -> NDArray[Any]:
        """The output chunk ``index``, once: an array over this rank's block."""
        array = self._holdings.take(receipt.number, index)
        if array is not None:
            if receipt.replicated:
                self._call(self._worker.scheduler.redist_copy(**self._taking(receipt)))
            return array
        self._call(self._worker.scheduler.redist_missing(**self._taking(receipt)))
        raise Reschedule

    def _taking(self, receipt: Receipt) -> dict[str, Any]:
        """What this thread is taking, for the scheduler."""
        return {
            "id": receipt.id,
            "number": receipt.number,
            "key": self._worker.get_current_task(),
            "address": self._worker.address,
        }

    # ------------------------------------------------------------------------- on the event loop
    async def fence(self, id: Any, spec: PartSpec, numbers: set[int]) -> Receipt:
        """All contributions exist: have the run closed on every rank that wrote."""
        reply = await self._fence(id, numbers)
        return Receipt(id, reply["number"], spec.replicated)

    async def reduce(self, id: Any, spec: Reduction, numbers: set[int]) -> Any:
        """All partials exist: have them merged by the ranks that hold them; the result."""
        reply = await self._fence(id, numbers)
        number, loop = reply["number"], asyncio.get_running_loop()
        read = partial(assemble_result, spec, loaded(reply["merged"]), number, self._read)
        try:
            result = await loop.run_in_executor(self._threads, read)
        except Unread:
            result = None
            await self._worker.scheduler.redist_unread(id=id, number=number)
        # What was read is the result if the run was not over meanwhile, and its memory reused.
        if not await self._worker.scheduler.redist_stands(id=id, number=number):
            raise Reschedule
        return result

    async def _fence(self, id: Any, numbers: set[int]) -> dict[str, Any]:
        reply: dict[str, Any] = await self._worker.scheduler.redist_fence(
            id=id, numbers=sorted(numbers)
        )
        if "error" in reply:
            raise load(reply["error"])
        if "number" not in reply:
            raise Reschedule
        return reply
