"""The scheduler's side of programs: functions that run on all ranks at once.

All ranks are given the function and their arrays; when all hold them, the conductor gives a ticket,
and each runs it in its lane, in that turn. When one fails or leaves, the others are let go. When
all have said what came of it, their arrays become the chunks of one Dask array, as scattered data
does; or their values go to the caller.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from distributed import Scheduler

from dask_redist.actions import Action
from dask_redist.boxes import IntArray
from dask_redist.conductor import Conductor
from dask_redist.errors import (
    LayoutError,
    RankLostError,
    RedistError,
    dump,
    has_left,
)
from dask_redist.joining import Joined, NoAxis, Piece, join_along, join_on_grid
from dask_redist.ranks import Seat
from dask_redist.roster import Roster

logger = logging.getLogger(__name__)


class Join(NamedTuple):
    """How the ranks' arrays are to be one Dask array.

    Attributes
    ----------
    axis : int or None
        One after the other along this axis.
    grid : ndarray of int64 or None
        Or as the chunks of this grid of ranks.
    strict : bool
        Whether what does not fit is an error; else the ranks' values are the result.
    asked : bool
        Whether it is an error that arrays have no such axis: somebody has asked for it.
    """

    axis: int | None = None
    grid: IntArray | None = None
    strict: bool = False
    asked: bool = False

    def of(self, pieces: Sequence[Piece | str]) -> Joined | None:
        """The Dask array of what the ranks have; None: their values are the result.

        Raises
        ------
        LayoutError
            They do not fit, and must.
        """
        try:
            if self.axis is not None:
                return join_along(pieces, self.axis)
            assert self.grid is not None
            return join_on_grid(pieces, self.grid)
        except LayoutError as error:
            if self.strict or (self.asked and isinstance(error, NoAxis)):
                raise
            return None


@dataclass
class Program:
    """A program, as the scheduler sees it."""

    number: int
    client: str
    name: str
    seats: list[Seat]
    #: what came of it, by seat
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    #: why it is not to go on
    ended: str | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def waits_for(self) -> list[Seat]:
        """The ranks that are still at it."""
        done = self.reports.keys() | self.lost
        return [seat for seat in self.seats if seat.seat not in done]


class Programs:
    """The programs of a scheduler.

    Parameters
    ----------
    scheduler, roster, conductor
        The scheduler, its ranks, who gives tickets.
    act
        Takes the actions that an event causes.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        roster: Roster,
        conductor: Conductor,
        act: Callable[[list[Action]], None],
    ) -> None:
        self._scheduler, self._roster = scheduler, roster
        self._conductor, self._act = conductor, act
        self._live: dict[str, Program] = {}
        self._by_number: dict[int, Program] = {}

    @property
    def busy(self) -> set[int]:
        """The seats that run a program."""
        return {seat.seat for program in self._live.values() for seat in program.seats}

    # ------------------------------------------------------------------- asked by clients
    async def run(
        self,
        token: str,
        seats: Sequence[int],
        code: bytes,
        locals: Sequence[bytes],
        keys: Sequence[Sequence[Any]],
        join: bytes,
        name: str,
        caller: str,
        pieces: Sequence[Any] | None = None,
    ) -> dict[str, Any]:
        """Run a function on all ranks.

        Parameters
        ----------
        token
            Names the program for whoever gives it up.
        seats
            The ranks for which it was prepared.
        code
            The function and its arguments, pickled.
        locals, keys
            What each rank has: pickled, and the keys of its chunks (None: no chunk).
        join
            A pickled `Join`.
        name
            Of the array that comes of it.
        caller
            The client that wants that array.
        pieces
            The array of each rank, where these come with the message.
        """
        table = self._roster.ranks.table()
        if [seat.seat for seat in table] != list(seats):
            return _failed(RankLostError("ranks have come or gone since the call began; try again"))
        program = Program(self._conductor.begin(), caller, name, table)
        self._live[token] = self._by_number[program.number] = program
        try:
            error = await self._begin(program, code, locals, keys, pieces)
            if error is None:
                self._act(self._conductor.turn(program.number))
                error = await self._outcome(program)
            if error is not None:
                return {"error": error}
            return await self._result(program, pickle.loads(join))
        finally:
            del self._live[token], self._by_number[program.number]
            await self._free(program)

    def give_up(self, token: str) -> None:
        """The caller was interrupted: nobody wants the result."""
        if program := self._live.get(token):
            self._end(program, "the caller was interrupted")

    def client_left(self, client: str) -> None:
        """Nobody wants the results of a client's programs."""
        for program in self._live.values():
            if program.client == client:
                self._end(program, "the caller has left")

    # --------------------------------------------------------------------- told by ranks
    def ran(self, number: int, seat: int, **report: Any) -> None:
        """A rank has run a program."""
        if program := self._by_number.get(number):
            program.reports[seat] = report
            if report["error"] is not None:
                rank = [s.seat for s in program.seats].index(seat)
                self._end(program, f"rank {rank} has failed")
            program.changed.set()

    def left(self, seat: int) -> None:
        """The worker of a rank has left."""
        for program in self._live.values():
            numbers = [s.seat for s in program.seats]
            if seat in numbers and seat not in program.reports:
                program.lost.add(seat)
                self._end(program, f"rank {numbers.index(seat)} has left")
                program.changed.set()

    # ------------------------------------------------------------------------------- helpers
    def _end(self, program: Program, why: str) -> None:
        if program.ended is None:
            program.ended = why
            for seat in program.seats:
                self._roster.tell(
                    seat.seat, {"op": "redist-abort", "number": program.number, "why": why}
                )
            program.changed.set()

    async def _begin(
        self,
        program: Program,
        code: bytes,
        locals: Sequence[bytes],
        keys: Sequence[Sequence[Any]],
        pieces: Sequence[Any] | None,
    ) -> bytes | None:
        """Have all ranks hold what they need; what is wrong."""
        table = [tuple(seat) for seat in program.seats]
        asked = (
            self._roster.ask(
                *(seat, "redist_begin"),
                number=program.number,
                seats=table,
                code=code,
                locals=locals[rank],
                who_has=[sorted(self._roster.holders(key)) for key in keys[rank]],
                piece=None if pieces is None else pieces[rank],
            )
            for rank, seat in enumerate(program.seats)
        )
        answers = await asyncio.gather(*asked, return_exceptions=True)
        if error := self._wrong(program, answers):
            return error
        if program.ended is not None:
            return self._lost(program) or self._given_up(program)
        return None

    def _wrong(self, program: Program, answers: Sequence[Any]) -> bytes | None:
        """The error of the lowest rank that has one, among the answers of all."""
        for rank, answer in enumerate(answers):
            if isinstance(answer, Exception):
                return self._lost(program) or self._named(program, rank, answer)
            if "error" in answer:
                found: bytes = answer["error"]
                return found
        return None

    def _given_up(self, program: Program) -> bytes:
        return dump(RedistError(f"{program.name!r} was given up: {program.ended}"))

    def _named(self, program: Program, rank: int, error: Exception) -> bytes:
        seat = program.seats[rank]
        if has_left(error):
            error = RankLostError(f"rank {rank} on {seat.address} cannot be reached: {error}")
        return dump(error)

    def _lost(self, program: Program) -> bytes | None:
        names = [
            f"rank {rank} on {seat.address}"
            for rank, seat in enumerate(program.seats)
            if seat.seat in program.lost
        ]
        if not names:
            return None
        return dump(RankLostError(f"{', '.join(names)} has left while {program.name!r} was made"))

    async def _outcome(self, program: Program) -> bytes | None:
        """Wait until all ranks have run it; what is wrong."""
        deadline: float | None = None
        while late := program.waits_for:
            if program.ended is not None and deadline is None:  # all others are let go
                deadline = time.monotonic() + self._roster.timeout
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                names = ", ".join(map(self._roster.name, late))
                logger.warning("%s is still at %r, which has ended", names, program.name)
                break
            program.changed.clear()
            try:
                await asyncio.wait_for(program.changed.wait(), left)
            except TimeoutError:
                continue
        if gone := self._lost(program):
            return gone
        reports = [program.reports.get(seat.seat) for seat in program.seats]
        failed = [report for report in reports if report and report["error"] is not None]
        for report in sorted(failed, key=lambda each: bool(each["released"])):
            found: bytes = report["error"]
            return found
        if program.ended is not None:
            return self._given_up(program)
        return None

    async def _result(self, program: Program, join: Join) -> dict[str, Any]:
        """The Dask array or the values that come of it."""
        facts = [pickle.loads(program.reports[seat.seat]["fact"]) for seat in program.seats]
        try:
            joined = join.of(facts)
        except LayoutError as error:
            return _failed(error)
        if joined is not None:
            return await self._keep(program, joined)
        asked = (
            self._roster.ask(seat, "redist_value", number=program.number) for seat in program.seats
        )
        answers: list[Any] = await asyncio.gather(*asked, return_exceptions=True)
        if wrong := self._wrong(program, answers):
            return {"error": wrong}
        return {"values": [answer["value"] for answer in answers]}

    async def _keep(self, program: Program, joined: Joined) -> dict[str, Any]:
        """Make the ranks' arrays chunks in memory."""
        where: dict[Any, Seat] = {
            (program.name, *index): program.seats[rank]
            for index, rank in np.ndenumerate(joined.ranks)
        }
        asked = (
            self._roster.ask(seat, "redist_keep_value", number=program.number, key=key)
            for key, seat in where.items()
        )
        sizes = await asyncio.gather(*asked, return_exceptions=True)
        problem: bytes | None = self._lost(program)
        for (_, seat), size in zip(where.items(), sizes, strict=True):
            if isinstance(size, Exception):
                problem = problem or self._named(program, program.seats.index(seat), size)
            elif seat.address not in self._scheduler.workers:
                gone = RankLostError(f"{self._roster.name(seat)} has left")
                problem = problem or dump(gone)
        if problem is not None or program.ended is not None:
            for key, seat in where.items():
                stimulus = f"redist-program-{time.time()}"
                self._roster.tell(
                    seat.seat, {"op": "free-keys", "keys": [key], "stimulus_id": stimulus}
                )
            return {"error": problem or self._given_up(program)}
        self._scheduler.update_data(
            who_has={key: [seat.address] for key, seat in where.items()},
            nbytes={key: int(size) for key, size in zip(where, sizes, strict=True)},  # type: ignore[arg-type]
            client=program.client,
        )
        for key, seat in where.items():
            self._roster.computed(key, seat.address)
        return {"joined": pickle.dumps(joined)}

    async def _free(self, program: Program) -> None:
        """Have all ranks forget it; memory that one may still write is handed out to nobody."""
        condemn = bool(program.waits_for) and bool(program.reports or program.ended)
        for lost in program.lost:
            condemn = condemn or not await self._is_dead(program, lost)
        for seat in program.seats:
            self._roster.tell(
                seat.seat, {"op": "redist-free", "number": program.number, "condemn": condemn}
            )

    async def _is_dead(self, program: Program, lost: int) -> bool:
        """Whether a rank that has left can write no more."""
        (gone,) = (seat for seat in program.seats if seat.seat == lost)
        there = [seat for seat in program.seats if self._roster.find(seat.seat) is not None]
        asked = {"number": program.number, "lost": lost, "process": tuple(gone.process)}
        proofs = await asyncio.gather(
            *(self._roster.ask(seat, "redist_dead", **asked) for seat in there),
            return_exceptions=True,
        )
        return all(proof is True or has_left(proof) for proof in proofs)


def _failed(error: Exception) -> dict[str, Any]:
    return {"error": dump(error)}
