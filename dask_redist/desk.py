"""What clients ask the scheduler: where chunks are, what ran, what memory is used, what is done."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Collection
from typing import Any

from dask_redist.conductor import Conductor
from dask_redist.fences import NEEDED
from dask_redist.replicas import Replicas
from dask_redist.roster import Roster
from dask_redist.runbook import RunBook


class Desk:
    """Answers clients; nothing is changed here."""

    def __init__(
        self, roster: Roster, conductor: Conductor, book: RunBook, replicas: Replicas
    ) -> None:
        self._roster, self._conductor = roster, conductor
        self._book, self._replicas = book, replicas

    async def owners(self, keys: Collection[Any], timeout: float) -> dict[str, Any]:
        """The rank of each chunk, -1 where it is not in memory; layouts lately asked for;
        the ranks that have all chunks, where that is by layout or all ranks do.

        Chunks that are being computed are waited for; ``pending``: how many did not come.
        """
        deadline = time.monotonic() + timeout
        tasks = self._roster.scheduler.tasks
        while pending := sum(key in tasks and tasks[key].state in NEEDED for key in keys):
            if time.monotonic() >= deadline:
                break
            await asyncio.sleep(0.02)
        layouts = pickle.dumps(list(self._book.layouts))
        numbers = self._roster.numbers()
        copies = set(numbers).intersection(*map(self._roster.holders, keys))
        kept = len(copies) == len(numbers) or all(key in self._replicas for key in keys)
        return {
            "owners": self._roster.owners(keys),
            "layouts": layouts,
            "pending": pending,
            "copies": sorted(numbers[a] for a in copies) if kept and len(copies) > 1 else [],
        }

    async def barrier(self, ranks: Collection[int]) -> dict[str, Any]:
        """Wait until all that the lanes of these ranks had to do is done; who did not answer."""
        table = self._roster.ranks.table()
        seats = [seat for rank, seat in enumerate(table) if rank in ranks]
        asked = (
            self._roster.ask(s, "redist_barrier", ticket=self._conductor.ticket) for s in seats
        )
        answers = await asyncio.gather(*asked, return_exceptions=True)
        late = [s for s, answer in zip(seats, answers, strict=True) if answer is not True]
        return {"late": [self._roster.name(s) for s in late]}

    def runs(self) -> bytes:
        """Reports of the last runs."""
        return pickle.dumps(list(self._book.reports))

    async def memory(self) -> dict[str, dict[str, int]]:
        """Arena bytes of each rank, by address."""
        replies = await self._roster.ask_all("redist_memory")
        return {seat.address: reply for seat, reply in replies.items()}
