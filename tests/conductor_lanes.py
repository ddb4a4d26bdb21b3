"""Seats of the conductor's world that hold pieces back, and the lanes that exchange them.

Some seats are *far*: what they write is held back, and is where it belongs only after an exchange.
Tickets reach each lane in any order; a lane executes them in theirs, one at a time, and its answer
may come when the conductor has given up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from conductor_messages import Exchange, Exchanged, Message, Told, Voted, Watch

from dask_redist.actions import Action, Ticket, Vote
from dask_redist.conductor import Conductor
from dask_redist.errors import RunTimeoutError


@dataclass
class Turns:
    """The lane of one seat: tickets in their order, each when the one before is over."""

    next: int
    told: dict[int, Told] = field(default_factory=dict)
    busy: bool = False


@dataclass
class Lanes:
    """The seats that are there, and what of each run is not where it belongs."""

    conductor: Conductor = field(default_factory=Conductor)
    #: seats whose worker is there
    present: set[int] = field(default_factory=set)
    #: seats that reach others by messages, which they hold back
    far: set[int] = field(default_factory=set)
    flying: list[Message] = field(default_factory=list)
    #: (seat, run) whose pieces are not where they belong; with the seat they are lost
    rests: set[tuple[int, int]] = field(default_factory=set)
    #: (seat, run) that were told to exchange: it will end, or the conductor was told that it fails
    due: set[tuple[int, int]] = field(default_factory=set)
    lanes: dict[int, Turns] = field(default_factory=dict)
    #: each ticket that was told, and its run
    tickets: dict[int, int] = field(default_factory=dict)
    #: (seat, run) that voted for the exchange
    ready: set[tuple[int, int]] = field(default_factory=set)
    #: the owners of each run
    owners: dict[int, set[int]] = field(default_factory=dict)
    #: the runs that are reductions: all who join have a rest, and nobody votes
    reductions: set[int] = field(default_factory=set)
    #: (seat, run) that hold what others read until the run's end
    laid: set[tuple[int, int]] = field(default_factory=set)

    def do(self, actions: Iterable[Action]) -> None:
        raise NotImplementedError

    def ticket(self, action: Ticket) -> None:
        """The conductor tells a ticket to all lanes that are there."""
        ticket, number = action
        assert ticket == len(self.tickets) + 1, f"ticket {ticket} comes after {len(self.tickets)}"
        assert number not in self.tickets.values(), f"run {number} gets two tickets"
        self.tickets[ticket] = number
        self.flying += [Told(number, seat, ticket) for seat in sorted(self.present)]
        self.flying.append(Watch(number))
        held = {(s, n) for s, n in self.rests if n == number}
        unasked = number in self.reductions
        assert unasked or held <= self.ready, (
            f"run {number} goes without the vote of {held - self.ready}"
        )
        assert {s for s, _ in held} <= self.present
        self.due |= held

    def exchange(self, message: Message, how: int) -> None:
        """Deliver a message; ``how`` chooses among what can become of it, 0 is all well."""
        match message:
            case Vote(number, seat):
                assert number not in self.reductions, f"run {number} has nothing to vote on"
                if seat in self.present:
                    ready = self._can_exchange(number, seat) and how != 1
                    self.flying.append(Voted(number, seat, ready))
            case Voted(number, seat, ready):
                if seat in self.present or how == 0:
                    if ready:
                        self.ready.add((seat, number))
                    self.do(self.conductor.voted(number, seat, ready))
            case Told(_, seat, ticket):
                if seat in self.present and ticket >= self.lanes[seat].next:
                    self.lanes[seat].told[ticket] = message
                    self._turn(seat)
            case Exchange():
                self._end(message, how)
            case Exchanged(number, seat, failed, error):
                self.due.discard((seat, number))
                if failed:
                    self.do(self.conductor.not_exchanged(number, seat, error))
                else:
                    self.do(self.conductor.exchanged(number, seat))
            case Watch(number):
                run = self.conductor.by_number.get(number)
                if run is not None and how == 1:
                    for seat in sorted(run.exchanging):
                        self._overdue(number, seat)

    def _can_exchange(self, number: int, seat: int) -> bool:
        return (seat, number) in self.rests and self.owners[number] <= self.present

    def _turn(self, seat: int) -> None:
        """Execute tickets up to one that takes time, or that has not come."""
        lane = self.lanes[seat]
        while not lane.busy and lane.next in lane.told:
            told = lane.told.pop(lane.next)
            lane.next += 1
            if (seat, told.number) in self.rests:
                lane.busy = True
                self.flying.append(Exchange(told.number, seat))

    def _overdue(self, number: int, seat: int) -> None:
        """The conductor stops to wait for a seat whose lane has not come to an end."""
        self.due.discard((seat, number))
        self.do(self.conductor.not_exchanged(number, seat, RunTimeoutError("slow")))

    def _end(self, message: Exchange, how: int) -> None:
        number, seat = message
        if seat not in self.present:
            return
        if how == 2:  # it hangs, and the lane with it
            self._overdue(number, seat)
            return self.flying.append(message)
        self.lanes[seat].busy = False
        readable = {s for s, n in self.laid if n == number} <= self.present
        if how == 0 and self._can_exchange(number, seat) and readable:
            self.rests.discard((seat, number))
            self.flying.append(Exchanged(number, seat, False, None))
        else:  # the owners have left, or there is some other reason
            error = OSError("no") if how == 1 else None
            self.flying.append(Exchanged(number, seat, True, error))
        self._turn(seat)
