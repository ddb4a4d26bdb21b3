"""Contributions that wait until the outputs of other runs have been taken.

Outputs that nobody has taken yet cannot be spilled. A run that would fit without them is not
refused: the contribution that asked for it is *parked* on the scheduler, where it holds no thread,
no slot and no chunk on its worker (the takes that make room need the thread, and what they wait for
needs the slot), and asks again from time to time, one for all of its redistribution. Dask's state
for a parked task is "no-worker": it may run in no place that there is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, NamedTuple

from distributed import Scheduler

logger = logging.getLogger(__name__)

NOWHERE = {"where there is room for the outputs of dask_redist"}
_PERIOD = 0.1


class Places(NamedTuple):
    """Where a task was allowed to run before it was parked."""

    workers: Any
    hosts: Any
    loose: bool


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
        #: the parked contributions of each redistribution, in the order in which they ask again
        self._parked: dict[Any, dict[Any, Places]] = {}
        #: who asks for those that are parked
        self._asking: dict[Any, Any] = {}
        self._since: dict[Any, float] = {}
        self._moved = 0.0
        self._task: asyncio.Task[None] | None = None

    def moved(self) -> None:
        """A task has come to its end: there may be room soon."""
        self._moved = time.monotonic()

    def holds(self, id: Any, key: Any) -> bool:
        """Whether the contribution ``key`` need not ask, because another one does."""
        return id in self._parked and self._asking.get(id) != key

    def park(self, id: Any, key: Any) -> bool:
        """Have the contribution ``key`` ask again later; False: it has waited too long."""
        now = time.monotonic()
        if id not in self._since:
            logger.info("%s waits for room: outputs of others have not been taken yet", id)
        if now - max(self._since.setdefault(id, now), self._moved) >= self._timeout:
            return False
        ts = self._scheduler.tasks[key]
        if ts.worker_restrictions is not NOWHERE:
            places = Places(ts.worker_restrictions, ts.host_restrictions, ts.loose_restrictions)
            self._parked.setdefault(id, {})[key] = places
            ts.worker_restrictions, ts.host_restrictions, ts.loose_restrictions = (
                NOWHERE,
                None,
                False,
            )
        self._release(key)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._ask_again())
        return True

    def leave(self, id: Any) -> None:
        """There is room for the redistribution ``id``, or no need of it: all its tasks can run."""
        self._since.pop(id, None)
        self._asking.pop(id, None)
        while id in self._parked:
            self._unpark(id)

    def cancel(self) -> None:
        """Stop; the scheduler closes."""
        if self._task is not None:
            self._task.cancel()

    async def _ask_again(self) -> None:
        """One at a time: two that each got half of their memory would refuse each other."""
        while self._parked:
            for id in list(self._parked):
                await asyncio.sleep(_PERIOD)
                if id in self._parked:
                    self._asking[id] = self._unpark(id)

    def _unpark(self, id: Any) -> Any:
        """Have the contribution run that waits longest."""
        parked = self._parked[id]
        key = next(iter(parked))
        places = parked.pop(key)
        if not parked:
            del self._parked[id]
        ts = self._scheduler.tasks.get(key)
        if ts is not None and ts.worker_restrictions is NOWHERE:
            ts.worker_restrictions, ts.host_restrictions, ts.loose_restrictions = places
            # Not at once: this may be called amid transitions.
            asyncio.get_running_loop().call_soon(self._release, key)
        return key

    def _release(self, key: Any) -> None:
        """Have Dask decide again where a task goes, and who gets the slot that it had."""
        ts = self._scheduler.tasks.get(key)
        if ts is not None and ts.state in ("processing", "no-worker"):
            stimulus = f"redist-room-{time.time()}"
            self._scheduler.transitions({key: "released"}, stimulus_id=stimulus)
            self._scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus)
