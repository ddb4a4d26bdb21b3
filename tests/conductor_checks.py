"""What must be true in the conductor's world after every event, and at the end.

Nobody who can still write a run's memory does so where that memory is a published result, a user's
array or another run's; every request waits for something that is under way; tickets are
dense, and every lane gets each; whoever holds pieces back is waited for.
"""

from __future__ import annotations

from conductor_lanes import Turns
from conductor_messages import Allocated, Closed, Exchange, Exchanged, Quiet, Told, Voted, Watch
from conductor_world import CONDEMNED, Happenings

from dask_redist.actions import Allocate, Close, Prove, Vote
from dask_redist.life import Run, State


class World(Happenings):
    """A world that checks itself."""

    def check(self) -> None:
        """What must be true after every event."""
        for seat, number in self.may_write:
            assert number not in self.published, f"seat {seat} can write published run {number}"
            for block in self.blocks[number].values():
                if block[0] in self.present:
                    has = self.memory.get(block, "nobody")
                    assert has in (number, CONDEMNED), f"seat {seat} can write {block} of {has}"
        runs, by_number = self.conductor.runs, self.conductor.by_number
        for id, number in self.receipts.items():
            now = runs[id].number if id in runs else None
            assert now == number, f"run {number} is over, but its fence does not come again"
        assert {r.number for r in runs.values()} == {
            n for n, r in by_number.items() if r.state is not State.ENDING
        }
        waiting = {r for run in by_number.values() for r in (*run.joins, run.fence)} - {None}
        assert waiting == {*self.joins, *self.fences}, "a request that waits is forgotten"
        assert len(self.tickets) == self.conductor.ticket, "a ticket was given and not told"
        for seat, lane in self.lanes.items():
            on_the_way = {m.ticket for m in self.flying if isinstance(m, Told) and m.seat == seat}
            there = {*lane.told, *on_the_way}
            assert {*range(lane.next, self.conductor.ticket + 1)} <= there, "a lane misses a ticket"
        for run in by_number.values():
            assert not run.holders - self.present, "memory of a seat that left is counted on"
            assert not run.rest - self.present, "pieces of a seat that left are counted on"
            self._exchanges(run)
            self._waits_for(run.number, run.allocating, (Allocate, Allocated))
            self._waits_for(run.number, run.closing, (Close, Quiet, Closed, Prove))
            if run.state in (State.CLOSING, State.ENDING):
                assert run.writers == run.closing
                waits = run.writers or run.allocating or run.exchanging
                assert waits, f"run {run.number} waits for nothing"
            assert run.state is not State.ALLOCATING or run.allocating

    def _exchanges(self, run: Run) -> None:
        """Whoever holds pieces back takes part, and each step comes to an end."""
        self._waits_for(run.number, run.voting, (Vote, Voted))
        lanes = self.lanes.items()
        queued = {s for s, lane in lanes for t in lane.told.values() if t.number == run.number}
        self._waits_for(run.number, run.exchanging - queued, (Told, Exchange, Exchanged))
        if run.state is State.EXCHANGING:
            assert bool(run.voting) != bool(run.exchanging), "it votes, and then it exchanges"
            held = {s for s, n in self.rests if n == run.number}
            assert held <= run.rest, f"run {run.number} does not wait for {held - run.rest}"
            assert run.voting <= run.rest
            assert run.exchanging in (set(), run.rest)
        else:
            assert not run.voting
            assert run.state is State.ENDING or not run.exchanging

    def _waits_for(self, number: int, seats: set[int], kinds: tuple[type, ...]) -> None:
        about = [m for m in self.flying if isinstance(m, kinds) and not isinstance(m, Watch)]
        under_way = {message.seat for message in about if message.number == number}
        assert seats <= under_way, "it waits for an answer for ever"

    def finish(self) -> None:
        """No fence is wanted any more, and all messages arrive: then nothing is left."""
        for id in {*self.ids.values(), *self.recomputed}:
            self.forget(id)
        while self.flying:
            self.deliver(0)
            self.check()
        assert not self.conductor.runs
        assert not self.conductor.by_number
        assert not self.conductor.restarts
        assert not self.joins
        assert not self.fences
        left = {b: n for b, n in self.memory.items() if b[0] in self.present and n in self.ids}
        assert not left, f"blocks that nobody will free: {left}"
        held = {(s, n) for s, n in self.rests if s in self.present}
        assert not held, f"pieces that nobody will let go: {held}"
        laid = {(s, n) for s, n in self.laid if s in self.present}
        assert not laid, f"partials that nobody will let go: {laid}"
        assert not self.due
        for seat, lane in self.lanes.items():
            assert lane == Turns(self.conductor.ticket + 1), f"the lane of {seat} is stuck"
