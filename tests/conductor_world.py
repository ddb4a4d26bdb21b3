"""A world for the conductor: seats with memory, writers that are slow, messages that cross.

The world knows what the conductor can only conclude: which block belongs to whom, and which seat
could still write into the memory of which run. Every action of the conductor becomes a message;
messages are delivered in any order. Two only keep theirs, as a rank's handlers do: a run's memory
is freed at a seat after its allocation has begun there, and a Close refuses a table that comes
after it.

What it hears from the conductor is checked here at once, what must be true after every event in
`conductor_checks.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from conductor_lanes import Lanes, Turns
from conductor_messages import Allocated, Closed, Late, Quiet, Table

from dask_redist.actions import (
    Action,
    Allocate,
    Answer,
    Close,
    Free,
    Prove,
    Recompute,
    Ticket,
)
from dask_redist.errors import AdmissionError, RunTimeoutError
from dask_redist.life import State

USER = "user"
CONDEMNED = "condemned"


@dataclass
class Happenings(Lanes):
    """Seats, their memory and what is in flight; drives one conductor."""

    #: seats whose process has ended (one that left may live on)
    dead: set[int] = field(default_factory=set)
    #: block -> who has it: a run's number, a user, nobody ever again; free blocks are not here
    memory: dict[tuple[int, int], int | str] = field(default_factory=dict)
    #: block of each output of a run, as far as it was allocated
    blocks: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    #: (seat, run) that could write now or as soon as its table arrives
    may_write: set[tuple[int, int]] = field(default_factory=set)
    #: (seat, run) of the tables that have arrived, and of those that are refused: it was closed
    tables: set[tuple[int, int]] = field(default_factory=set)
    refused: set[tuple[int, int]] = field(default_factory=set)
    #: requests without an answer: (id, seat) of a join, the numbers of a fence
    joins: dict[Hashable, tuple[str, int]] = field(default_factory=dict)
    fences: dict[Hashable, tuple[str, set[int]]] = field(default_factory=dict)
    answers: dict[Hashable, int | str | Exception] = field(default_factory=dict)
    ids: dict[int, str] = field(default_factory=dict)
    published: dict[int, str] = field(default_factory=dict)
    #: fences that Dask holds the result of: the run that takes will ask for
    receipts: dict[str, int] = field(default_factory=dict)
    #: runs that nobody may join any more
    over: set[int] = field(default_factory=set)
    #: runs of which a seat was reported as not closed
    doubted: set[int] = field(default_factory=set)
    freed: set[tuple[int, int]] = field(default_factory=set)
    recomputed: list[str] = field(default_factory=list)
    count: itertools.count[int] = field(default_factory=itertools.count)
    seats: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    # -------------------------------------------------------------------- what Dask and users do
    def arrive(self, *, far: bool = False) -> int:
        seat = next(self.seats)
        self.present.add(seat)
        self.lanes[seat] = Turns(self.conductor.ticket + 1)
        if far:
            self.far.add(seat)
        return seat

    def join(self, id: str, seat: int, owners: Mapping[int, int]) -> Hashable:
        """A contribution on ``seat``; if there is no run yet, its outputs get these owners.

        Ids that begin with "r" are those of reductions, which have no outputs.
        """
        request = f"join {next(self.count)}"
        if id not in self.conductor.runs:
            owners = {} if id.startswith("r") else owners
            actions = self.conductor.create(id, owners, votes=not id.startswith("r"))
            if id.startswith("r"):
                self.reductions.add(self.conductor.runs[id].number)
            number = self.conductor.runs[id].number
            assert number > max(self.ids, default=0), "numbers rise"
            self.ids[number] = id
            self.blocks[number] = {}
            self.owners[number] = set(owners.values())
            self.do(actions)
        self.joins[request] = id, seat
        self.do(self.conductor.join(id, seat, request))
        return request

    def fence(self, id: str, numbers: set[int]) -> Hashable:
        request = f"fence {next(self.count)}"
        self.fences[request] = id, numbers
        self.receipts.pop(id, None)
        self.do(self.conductor.fence(id, numbers, request))
        return request

    def read(self, number: int) -> None:
        """The result of a reduction is read: all who merged are there, or it is made again."""
        id, run = self.published[number], self.conductor.runs.get(self.published[number])
        if not {s for s, n in self.laid if n == number} <= self.present:
            self.do(self.conductor.missing(id, number))
        elif run is not None and run.number == number:
            self.receipts.pop(id, None)
            self.do(self.conductor.gone(id))

    def take(self, number: int, out: int) -> None:
        """A take of a published run: the block, once, or the run is made again."""
        if number in self.reductions:
            return self.read(number)
        block = self.blocks[number].get(out)
        if block is not None and block[0] in self.present and self.memory.get(block) == number:
            self.memory[block] = USER
        else:
            self.do(self.conductor.missing(self.published[number], number))

    def drop(self, block: tuple[int, int]) -> None:
        """A user's array dies: its block may be handed out again."""
        assert self.memory.pop(block) == USER

    def leave(self, seat: int, *, dead: bool) -> None:
        """The worker has left; its process may be dead, or live on for a while."""
        self.present.remove(seat)
        del self.lanes[seat]
        self.due = {(s, n) for s, n in self.due if s != seat}
        self.do(self.conductor.lost(seat))
        if dead:
            self.die(seat)

    def die(self, seat: int) -> None:
        self.dead.add(seat)
        self.may_write = {(s, n) for s, n in self.may_write if s != seat}

    def gone(self, id: str) -> None:
        self.receipts.pop(id, None)
        self.do(self.conductor.gone(id))
        assert id not in self.conductor.runs

    def forget(self, id: str) -> None:
        self.gone(id)
        self.conductor.forget(id)

    # --------------------------------------------------------------------------------- delivery
    def do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Answer):
                self._answer(action)
            elif isinstance(action, Recompute):
                self.recomputed.append(str(action.id))
                assert action.id not in self.conductor.runs, "a run goes on while it is made again"
                self.gone(str(action.id))  # Dask releases the fence
            elif isinstance(action, Ticket):
                self.over.add(action.number)
                self.ticket(action)
            else:
                if not isinstance(action, Allocate):
                    self.over.add(action.number)
                if isinstance(action, Prove):
                    holders = {s for (s, _), n in self.memory.items() if n == action.number}
                    assert holders & self.present <= set(action.witnesses) <= self.present
                self.flying.append(action)

    def _answer(self, answer: Answer) -> None:
        request, value = answer
        assert request not in self.answers, f"{request} is answered twice"
        self.answers[request] = value
        if request in self.joins:
            id, seat = self.joins.pop(request)
            if isinstance(value, int):
                run = self.conductor.runs[id]
                assert (run.number, run.state) == (value, State.OPEN)
                assert value not in self.over, f"run {value} is over and was joined again"
                self.may_write.add((seat, value))
                self.flying.append(Table(value, seat))
            return
        id, numbers = self.fences.pop(request)
        if isinstance(value, int):
            assert numbers == {value}, "published without all contributions"
            assert value not in self.published, f"run {value} is published twice"
            self.published[value] = id
            self.receipts[id] = value
            self.over.add(value)
            writing = {s for s, n in self.may_write if n == value}
            assert not writing, f"run {value} is published while {writing} may write"
            held = {s for s, n in self.rests if n == value}
            assert not held, f"run {value} is published without the pieces of {held}"
            there = {s for (s, _), n in self.memory.items() if n == value}
            assert there >= self.owners[value]
            merged = {s for s, n in self.laid if n == value}
            assert merged <= self.present, f"run {value} is published without {merged}"

    def deliver(self, index: int, how: int = 0) -> None:
        """Deliver one message; ``how`` chooses among what can become of it, 0 is all well."""
        message = self.flying.pop(index)
        match message:
            case Allocate():
                self._allocate(message, how)
            case Late(number, seat, outputs):
                if seat in self.present and (number, seat) not in self.freed:
                    self._give(number, seat, outputs)
            case Allocated(number, seat, offsets):
                if seat in self.present or how % 2 == 0:
                    self.do(self.conductor.allocated(number, seat, offsets))
                else:
                    self.do(self.conductor.not_allocated(number, seat, None))
            case Table(number, seat):
                if (seat, number) not in self.refused:
                    self.tables.add((seat, number))
                    if seat in self.far or number in self.reductions:
                        self.rests.add((seat, number))
            case Close(number, seat):
                self._close(number, seat, how)
            case Quiet(number, seat):
                self.may_write.discard((seat, number))
                if number in self.reductions and (seat, number) in self.rests:
                    self.laid.add((seat, number))
                if seat not in self.dead:
                    self.flying.append(Closed(number, seat, (seat, number) in self.rests))
            case Closed():
                self._closed(message, how)
            case Prove(number, seat, _):
                if (seat, number) not in self.may_write:
                    self.do(self.conductor.closed(number, seat))
                else:
                    self.doubted.add(number)
                    self.do(self.conductor.not_closed(number, seat, None))
            case Free():
                self._free(message)
            case _:
                self.exchange(message, how)

    def _allocate(self, message: Allocate, how: int) -> None:
        number, seat, outputs = message
        if seat not in self.present:
            return self.do(self.conductor.not_allocated(number, seat, None))
        if how in (0, 3):
            offsets = self._give(number, seat, outputs)
            return self.flying.append(Allocated(number, seat, offsets))
        if how == 1:
            return self.do(self.conductor.not_allocated(number, seat, AdmissionError("full")))
        self.flying.append(Late(number, seat, outputs))
        self.do(self.conductor.not_allocated(number, seat, RunTimeoutError("slow")))

    def _give(self, number: int, seat: int, outputs: tuple[int, ...]) -> dict[int, int]:
        """First fit, so that what is given back is handed out again at once."""
        offsets = {}
        for out in outputs:
            offset = next(o for o in itertools.count() if (seat, o) not in self.memory)
            offsets[out] = offset
            self.memory[seat, offset] = number
            self.blocks[number][out] = seat, offset
        return offsets

    def _close(self, number: int, seat: int, how: int) -> None:
        if seat not in self.present:
            return  # nobody is there: the proof decides
        self.refused.add((seat, number))
        if (seat, number) not in self.tables:
            self.may_write.discard((seat, number))
            self.flying.append(Closed(number, seat, False))
        elif how == 1:  # a writer hangs: the conductor is told so, and the writer goes on
            self.doubted.add(number)
            self.do(self.conductor.not_closed(number, seat, RunTimeoutError("hangs")))
        else:
            self.flying.append(Quiet(number, seat))

    def _closed(self, message: Closed, how: int) -> None:
        number, seat, rest = message
        if seat in self.present or how == 0:
            return self.do(self.conductor.closed(number, seat, rest))
        if how != 2:  # the timeout ran out when the seat had left: the proof has to decide
            self.do(self.conductor.not_closed(number, seat, RunTimeoutError("left")))

    def _free(self, message: Free) -> None:
        number, seat, condemn = message
        assert (number, seat) not in self.freed, f"run {number} is freed twice on seat {seat}"
        assert number in self.doubted or not condemn, f"run {number} is condemned without need"
        self.freed.add((number, seat))
        assert not {s for s, n in self.due if n == number}, f"run {number} is freed while it moves"
        if seat not in self.present:
            return
        self.rests.discard((seat, number))
        self.laid.discard((seat, number))
        for block in [b for b, n in self.memory.items() if n == number and b[0] == seat]:
            if condemn:
                self.memory[block] = CONDEMNED
            else:
                del self.memory[block]
