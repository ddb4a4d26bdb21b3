"""The conductor's actions, carried out: messages to ranks, whose answers are events again.

Every order ends in an event, whatever happens to it: an answer that is lost would be a hang.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from dask_redist.actions import Action, Allocate, Close, Free, Prove, Ticket, Vote
from dask_redist.conductor import Conductor
from dask_redist.errors import AdmissionError, CrowdedError, RunTimeoutError, has_left
from dask_redist.ranks import Seat
from dask_redist.roster import Roster
from dask_redist.runbook import RunBook

logger = logging.getLogger(__name__)


class Orders:
    """Carries out what concerns ranks.

    Parameters
    ----------
    conductor, roster, book
        Whose actions, to whom, about what.
    act
        Takes the actions that an event causes.
    """

    def __init__(
        self,
        conductor: Conductor,
        roster: Roster,
        book: RunBook,
        act: Callable[[list[Action]], None],
    ) -> None:
        self.conductor = conductor
        self.roster = roster
        self.book = book
        self.act = act
        self._tasks: set[asyncio.Task[None]] = set()

    def carry_out(self, action: Allocate | Close | Prove | Vote | Ticket | Free) -> None:
        """Begin what an action asks for."""
        match action:
            case Allocate():
                self._begin(self._allocate(action))
            case Close():
                self._begin(self._close(action))
            case Prove():
                self._begin(self._prove(action))
            case Vote():
                self._begin(self._vote(action))
            case Ticket():
                table = self.book.laid(action.number, self.roster.ranks.by_number)
                self.roster.tell_all({"op": "redist-ticket", **action._asdict(), "table": table})
                self._begin(self._watch_exchange(action.number))
            case Free(number, seat, condemn):
                # In order, without an answer: a rank that is stopped hears of it when it goes on.
                self.roster.tell(seat, {"op": "redist-free", "number": number, "condemn": condemn})

    def cancel(self) -> None:
        """Stop what is under way; the scheduler closes."""
        for task in self._tasks:
            task.cancel()

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("an action of the conductor failed", exc_info=task.exception())

    async def _allocate(self, action: Allocate) -> None:
        number, seat_number, outputs = action
        seat = self.roster.find(seat_number)
        error: Exception | None = None
        try:
            if seat is not None:
                spec = self.book.spec_bytes(number)
                reply = await self.roster.ask(
                    seat, "redist_allocate", number=number, spec=spec, outs=outputs
                )
                if "offsets" in reply:
                    offsets = dict(zip(outputs, reply["offsets"], strict=True))
                    return self.act(self.conductor.allocated(number, seat_number, offsets))
                kind = CrowdedError if reply["crowded"] else AdmissionError
                error = kind(f"{self.roster.name(seat)} {reply['error']}")
        except Exception as failure:
            error = None if has_left(failure) else failure
        self.act(self.conductor.not_allocated(number, seat_number, error))

    async def _close(self, action: Close) -> None:
        number, seat_number = action
        seat = self.roster.find(seat_number)
        if seat is None:
            return  # the conductor asks for a proof instead
        try:
            reply = await self.roster.ask(seat, "redist_close", number=number)
        except Exception as failure:
            error = failure
            if has_left(failure):
                if await self._is_lost(seat):
                    return
                error = RunTimeoutError(
                    f"{self.roster.name(seat)} cannot be reached for "
                    f"{self.roster.timeout:g} s (redist.timeout)"
                )
            return self.act(self.conductor.not_closed(number, seat_number, error))
        if "laid" in reply:
            self.book.lay(number, seat_number, reply["laid"])
        self.book.wrote(number, seat_number, reply)
        self.act(self.conductor.closed(number, seat_number, reply["rest"]))

    async def _is_lost(self, seat: Seat) -> bool:
        """A connection broke: whether Dask says in time that the worker has left."""
        deadline = time.monotonic() + self.roster.timeout
        while self.roster.find(seat.seat) is not None:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    async def _prove(self, action: Prove) -> None:
        number, seat_number, witnesses = action
        lost = self.roster.left.get(seat_number)
        if lost is None:
            return  # the run is over
        seats = [s for w in witnesses if (s := self.roster.find(w)) is not None]
        asked = {"number": number, "lost": lost.seat, "process": tuple(lost.process)}
        proofs = await asyncio.gather(
            *(self.roster.ask(s, "redist_dead", **asked) for s in seats), return_exceptions=True
        )
        # A witness that has left itself cannot be harmed; one that is silent can.
        if all(proof is True or has_left(proof) for proof in proofs):
            return self.act(self.conductor.closed(number, seat_number))
        logger.warning(
            "the process of %s cannot be proven dead: the memory of run %d is not used again",
            lost.address,
            number,
        )
        self.act(self.conductor.not_closed(number, seat_number, None))

    async def _vote(self, action: Vote) -> None:
        number, seat_number = action
        seat = self.roster.find(seat_number)
        ready = False
        try:
            if seat is not None:
                ready = await self.roster.ask(seat, "redist_vote", number=number)
        except Exception as failure:
            logger.info("seat %d cannot exchange run %d: %s", seat_number, number, failure)
        self.act(self.conductor.voted(number, seat_number, ready))

    async def _silent(self, seats: list[Seat]) -> list[Seat]:
        """Which of the ranks do not answer."""
        asked = (self.roster.ask(seat, "redist_memory") for seat in seats)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        there = zip(seats, answers, strict=True)
        return [seat for seat, answer in there if isinstance(answer, RunTimeoutError)]

    async def _watch_exchange(self, number: int) -> None:
        """Whoever has not exchanged in time is named to the fence."""
        deadline = time.monotonic() + self.roster.timeout
        while (run := self.conductor.by_number.get(number)) is not None and run.exchanging:
            if time.monotonic() > deadline:
                late = [s for n in sorted(run.exchanging) if (s := self.roster.find(n))]
                if not run.votes and not (late := await self._silent(late)):
                    deadline = time.monotonic() + self.roster.timeout  # they compute for the user
                    continue
                names = ", ".join(self.roster.name(s) for s in late)
                error = RunTimeoutError(
                    f"{names} did not exchange run {number} within {self.roster.timeout:g} s "
                    "(redist.timeout)"
                )
                for seat_number in sorted(run.exchanging):
                    self.act(self.conductor.not_exchanged(number, seat_number, error))
                return
            await asyncio.sleep(0.1)
