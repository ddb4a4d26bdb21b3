"""The watch on paused ranks, which would otherwise be waited for without end.

Outputs cannot be spilled before they are taken, and a worker that Dask has paused takes nothing. If
the outputs themselves are what is too much, it stays paused: nothing will happen any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from dask.utils import format_bytes
from distributed import Status

from dask_redist.ranks import Seat
from dask_redist.roster import Roster

#: share of its memory limit that a worker's spillable memory must exceed to be of any help
SPILLABLE = 0.05


class PauseWatch:
    """Looks after paused ranks while there are runs.

    Parameters
    ----------
    roster
        The ranks.
    needed
        Whether there are runs.
    fail
        Told the seat and the reason when a rank has been stuck too long.
    """

    def __init__(
        self, roster: Roster, needed: Callable[[], bool], fail: Callable[[Seat, str], None]
    ) -> None:
        self._roster = roster
        self._needed = needed
        self._fail = fail
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Look, from now until there are no runs."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look())

    def cancel(self) -> None:
        """Look no more; the scheduler closes."""
        if self._task is not None:
            self._task.cancel()

    async def _look(self) -> None:
        since: dict[int, float] = {}
        patience = min(self._roster.timeout, 10.0)
        while self._needed():
            await asyncio.sleep(0.25)
            for seat in self._roster.ranks.table():
                if not self._is_stuck(seat):
                    since.pop(seat.seat, None)
                elif time.monotonic() - since.setdefault(seat.seat, time.monotonic()) > patience:
                    self._fail(
                        seat,
                        f"was paused by Dask for {patience:g} s with nothing left to spill: its "
                        "outputs do not fit under its memory limit of "
                        f"{format_bytes(seat.memory_limit)}; use more or larger "
                        "workers, or smaller arrays",
                    )

    def _is_stuck(self, seat: Seat) -> bool:
        """Whether a rank is paused, and Dask has nothing there that it could spill."""
        worker = self._roster.scheduler.workers.get(seat.address)
        if worker is None or worker.status is not Status.paused:
            return False
        return worker.memory.managed < SPILLABLE * seat.memory_limit
