"""Contributions that wait until the outputs of other runs have been taken.

Outputs that nobody has taken yet cannot be spilled. A run that would fit without them is not
refused: the contribution that asked for it is *parked* on the scheduler, where it holds no thread,
no slot and no chunk on its worker (the takes that make room need the thread, and what they wait for
needs the slot), and asks again from time to time. Dask's state for a parked task is "no-worker":
it may run in no place that there is.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from distributed import Scheduler

NOWHERE = {"where there is room for the outputs of dask_redist"}
_PERIOD = 0.1


class Crowd:
    """The parked contributions of a scheduler.

    Parameters
    ----------
    scheduler
        The scheduler.
    timeout
        Seconds without any task's end on the cluster, after which nobody is waited for.
    """

    def __init__(self, scheduler: Scheduler, timeout: float) -> None:
        self._scheduler = scheduler
        self._timeout = timeout
        #: by redistribution: parked contributions, and where they were allowed to run before
        self._parked: dict[Any, dict[Any, Any]] = {}
        self._since: dict[Any, float] = {}
        self._moved = 0.0
        self._task: asyncio.Task[None] | None = None

    def moved(self) -> None:
        """A task has come to its end: there may be room soon."""
        self._moved = time.monotonic()

    def park(self, id: Any, key: Any) -> bool:
        """Have the contribution ``key`` ask again later; False: it has waited too long."""
        now = time.monotonic()
        if now - max(self._since.setdefault(id, now), self._moved) >= self._timeout:
            return False
        ts = self._scheduler.tasks[key]
        self._parked.setdefault(id, {})[key] = ts.worker_restrictions
        ts.worker_restrictions = NOWHERE
        self._release(key)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._ask_again())
        return True

    def leave(self, id: Any) -> None:
        """There is room for the redistribution ``id``, or no need of it: all its tasks can run."""
        self._since.pop(id, None)
        while id in self._parked:
            self._unpark(id)

    def cancel(self) -> None:
        """Stop; the scheduler closes."""
        if self._task is not None:
            self._task.cancel()

    async def _ask_again(self) -> None:
        while self._parked:
            await asyncio.sleep(_PERIOD)
            for id in list(self._parked):
                self._unpark(id)

    def _unpark(self, id: Any) -> None:
        """Have one contribution run."""
        parked = self._parked[id]
        key, places = parked.popitem()
        if not parked:
            del self._parked[id]
        if (ts := self._scheduler.tasks.get(key)) is not None:
            there = {place for place in places or () if place in self._scheduler.workers}
            ts.worker_restrictions = there or None
            # Not at once: this may be called amid transitions.
            asyncio.get_running_loop().call_soon(self._release, key)

    def _release(self, key: Any) -> None:
        """Have Dask decide again where a task goes, and who gets the slot that it had."""
        ts = self._scheduler.tasks.get(key)
        if ts is not None and ts.state in ("processing", "no-worker"):
            stimulus = f"redist-room-{time.time()}"
            self._scheduler.transitions({key: "released"}, stimulus_id=stimulus)
            self._scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus)
