"""The conductor: what happens to every run, as a pure state machine.

Events go in (a rank joins, memory was allocated, the fence was reached, a rank was lost ...),
actions come out (allocate, answer, close, free, recompute ...). No I/O, no clock and no Dask
here: :mod:`dask_redist.scheduler` turns messages into events and actions into messages.

The two rules that keep users' memory safe:

- nothing is published and nothing is freed before every seat that joined the run has *closed* it
  (refused new writers and waited for the running ones);
- a seat that does not answer must be proven dead; otherwise the run's memory is *condemned*: freed
  for nobody.

Seats that hold pieces back (wires that gather them into messages) exchange the rest when all have
closed: each votes, and with the last yes a *ticket* goes to the lanes of all ranks, which execute
tickets in one order. It is given then and not before: the numbers stay dense, a slow vote holds no
other run up, and a run that ends before its ticket leaves no gap.
What a seat holds back is lost with it, and nobody knows before its close whether it does: a run
that loses a writer is made again.

A run that is made again and again has to end with an error; a result that lives long must not, so
restarts are counted up to :data:`MAX_RESTARTS`, and taken back. A publication takes back those for
losses and what follows from them: after it only the loss of one more worker can cause another, so
the workers that leave bound them. It takes no *misses* back: a take that never finds its block
would have its run made again for ever, each time with a publication. They are taken back when
Dask lets the fence of a published run go: its takes are over, while a miss ends the run before.

Ranks change when workers come and go. A *seat* is one incarnation of a rank: a number that is
given once and never again, so the tables of a run stay true while ranks are renumbered.

Messages cross: a seat's answer may come after its loss, or after the run's end. An answer that
nobody waits for any more changes nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from dask_redist.actions import (
    AGAIN,
    Action,
    Allocate,
    Answer,
    Close,
    Free,
    Prove,
    Recompute,
    Ticket,
    Vote,
)
from dask_redist.errors import RankLostError
from dask_redist.life import Restarts, Run, State

MAX_RESTARTS = 10


class Conductor:
    """All runs of one cluster. Every method is an event and returns the actions it causes."""

    def __init__(self) -> None:
        self.runs: dict[Hashable, Run] = {}
        self.by_number: dict[int, Run] = {}
        #: numbers of runs that are over, for whoever keeps facts about them
        self.over: list[int] = []
        #: how often each run was started again
        self.restarts: dict[Hashable, Restarts] = {}
        #: the last ticket that was given
        self.ticket = 0
        self._last = 0

    # ------------------------------------------------------------------------------ programs
    def begin(self) -> int:
        """A number for what runs on all ranks and is no run."""
        self._last += 1
        return self._last

    def turn(self, number: int) -> list[Action]:
        """All ranks hold what ``number`` needs: it is its turn."""
        self.ticket += 1
        return [Ticket(self.ticket, number)]

    # ------------------------------------------------------------------------------ creation
    def create(self, id: Hashable, owners: Mapping[int, int], votes: bool = True) -> list[Action]:
        """A first contribution asks for a run; ``owners`` says which seat gets which output.

        Without ``votes`` it is a reduction: what its seats exchange they hold until its end.
        """
        if id in self.runs:
            raise ValueError(f"run {id!r} exists already")
        run = Run(id, self.begin(), dict(owners), votes=votes)
        self.runs[id] = self.by_number[run.number] = run
        outputs: dict[int, list[int]] = {}
        for out, seat in run.owners.items():
            outputs.setdefault(seat, []).append(out)
        run.allocating = set(outputs)
        if not outputs:
            run.state = State.OPEN
        return [Allocate(run.number, s, tuple(outs)) for s, outs in sorted(outputs.items())]

    def allocated(self, number: int, seat: int, offsets: Mapping[int, int]) -> list[Action]:
        """``seat`` has its memory for run ``number``."""
        run = self.by_number.get(number)
        if run is None or seat not in run.allocating:
            return []
        run.allocating.remove(seat)
        run.holders.add(seat)
        if run.state is State.ENDING:
            return self._settle(run)
        run.offsets.update(offsets)
        if run.allocating:
            return []
        run.state = State.OPEN
        joins, run.joins = run.joins, {}
        return [action for request, s in joins.items() for action in self.join(run.id, s, request)]

    def not_allocated(self, number: int, seat: int, error: Exception | None) -> list[Action]:
        """``seat`` could not allocate: all who wait for the run get the error.

        Without an ``error`` (the rank could not be reached) they ask again.
        """
        run = self.by_number.get(number)
        actions: list[Action] = []
        if run is not None and seat in run.allocating and run.state is not State.ENDING:
            actions = self._end(run, error)
        return [*actions, *self.allocated(number, seat, {})]  # late, it may hold some: to be freed

    def join(self, id: Hashable, seat: int, request: Hashable) -> list[Action]:
        """A rank asks for the run before its first byte; it is a writer from the answer on."""
        run = self.runs[id]
        if run.state is State.ALLOCATING:
            run.joins[request] = seat
            return []
        if run.state is State.OPEN:
            run.writers.add(seat)
            return [Answer(request, run.number)]
        # A contribution to a run whose contributions are over: its fence has to come again too.
        return [*self._restart(id), Answer(request, AGAIN)]

    # ----------------------------------------------------------------------------- the fence
    def fence(self, id: Hashable, numbers: set[int], request: Hashable) -> list[Action]:
        """All contributions exist; they went to the runs ``numbers``."""
        run = self.runs.get(id)
        restarts = self.restarts.get(id, Restarts())
        if restarts.losses + restarts.misses > MAX_RESTARTS:
            del self.restarts[id]  # the fence errs; a retry by the user begins anew
            error = RankLostError(
                f"{id!r} was restarted more than {MAX_RESTARTS} times and given up; "
                "ranks are lost, or blocks are missing, again and again"
            )
            return [*(self._end(run) if run else []), Answer(request, error)]
        if run is None or numbers != {run.number} or run.state is not State.OPEN:
            return [*self._restart(id), Answer(request, AGAIN)]
        run.fence = request
        run.state = State.CLOSING
        return self._close(run)

    def closed(self, number: int, seat: int, rest: bool = False) -> list[Action]:
        """``seat`` has closed run ``number`` (holding pieces back: ``rest``), or is proven dead."""
        run = self.by_number.get(number)
        if run is None or seat not in run.closing:
            return []
        if rest and seat not in run.lost:
            run.rest.add(seat)
        for seats in (run.writers, run.closing, run.lost):
            seats.discard(seat)
        return self._settle(run)

    def not_closed(self, number: int, seat: int, error: Exception | None) -> list[Action]:
        """``seat`` may still be writing: the run's memory can be given to nobody.

        With an ``error`` the fence gets it (a rank that is there does not answer); without one,
        a rank that left is not proven dead, and the run is being made again on other memory.
        """
        run = self.by_number.get(number)
        if run is None or seat not in run.closing or (error is not None and seat in run.lost):
            return []  # late; or it left while its Close was under way, and the proof decides
        run.condemned = True
        actions = self._end(run, error) if run.state is not State.ENDING else []
        return [*actions, *self.closed(number, seat, rest=True)]  # perhaps; it is freed there too

    # -------------------------------------------------------------------------- the exchange
    def voted(self, number: int, seat: int, ready: bool) -> list[Action]:
        """``seat`` can exchange what it holds back, or cannot."""
        run = self.by_number.get(number)
        if run is None or seat not in run.voting:
            return []
        run.voting.discard(seat)
        if not ready:
            return self._restart(run.id)
        return [] if run.voting else self._give_ticket(run)

    def exchanged(self, number: int, seat: int) -> list[Action]:
        """``seat`` has exchanged what it held back."""
        run = self.by_number.get(number)
        if run is None or seat not in run.exchanging:
            return []
        run.exchanging.discard(seat)
        run.rest.discard(seat)
        if not run.votes:
            run.holders.add(seat)
        return self._settle(run)

    def not_exchanged(self, number: int, seat: int, error: Exception | None) -> list[Action]:
        """The exchange failed on ``seat``: the fence gets the error; without one, start again."""
        run = self.by_number.get(number)
        if run is None or seat not in run.exchanging:
            return []
        run.exchanging.discard(seat)
        if run.state is State.ENDING:
            return self._settle(run)
        return self._restart(run.id) if error is None else self._end(run, error)

    # -------------------------------------------------------------------------- loss and end
    def lost(self, seat: int) -> list[Action]:
        """The worker of ``seat`` has left."""
        actions: list[Action] = []
        for run in list(self.by_number.values()):
            parts = (run.holders, run.allocating, run.writers, run.rest)
            needed = any(seat in seats for seats in parts)
            for seats in (run.rest, run.exchanging):
                seats.discard(seat)
            run.holders.discard(seat)
            run.allocating.discard(seat)
            actions += [Answer(r, AGAIN) for r, s in run.joins.items() if s == seat]
            run.joins = {r: s for r, s in run.joins.items() if s != seat}
            if seat in run.writers:
                run.lost.add(seat)
            if seat in run.closing:  # its answer will never come
                actions.append(self._ask(run, seat))
            if run.state is State.ENDING:
                actions += self._settle(run)
            elif needed:
                actions += self._restart(run.id)
        return actions

    def gone(self, id: Hashable) -> list[Action]:
        """The fence was released, erred or forgotten: what was not taken is garbage."""
        run = self.runs.get(id)
        if run is None:
            return []
        if run.state is State.PUBLISHED and id in self.restarts:
            self.restarts[id] = self.restarts[id]._replace(misses=0)
        return self._end(run)

    def forget(self, id: Hashable) -> None:
        """The fence's key is known to nobody any more."""
        self.restarts.pop(id, None)

    def missing(self, id: Hashable, number: int) -> list[Action]:
        """A take did not find its block in run ``number``."""
        run = self.runs.get(id)
        last = self.restarts.get(id, Restarts()).last
        if number <= last or (run is not None and run.number != number):
            return []  # it is being made again already, the take will be run again after it
        return self._restart(id, missed=True)

    # -------------------------------------------------------------------------------- helpers
    def _restart(self, id: Hashable, missed: bool = False) -> list[Action]:
        losses, misses, _ = self.restarts.get(id, Restarts())
        self.restarts[id] = Restarts(losses + (not missed), misses + missed, self._last)
        run = self.runs.get(id)
        return [*(self._end(run) if run else []), Recompute(id)]

    def _end(self, run: Run, error: Exception | None = None) -> list[Action]:
        value: str | Exception = AGAIN if error is None else error
        actions: list[Action] = [Answer(request, value) for request in run.joins]
        if run.fence is not None:
            actions.append(Answer(run.fence, value))
        run.joins, run.fence = {}, None
        run.voting.clear()
        run.state = State.ENDING
        del self.runs[run.id]
        return [*actions, *self._close(run)]

    def _ask(self, run: Run, seat: int) -> Action:
        run.closing.add(seat)
        if seat in run.lost:
            return Prove(run.number, seat, tuple(sorted(run.holders - {seat})))
        return Close(run.number, seat)

    def _close(self, run: Run) -> list[Action]:
        actions = [self._ask(run, seat) for seat in sorted(run.writers - run.closing)]
        return [*actions, *self._settle(run)]

    def _give_ticket(self, run: Run) -> list[Action]:
        run.exchanging = set(run.rest)
        self.ticket += 1
        return [Ticket(self.ticket, run.number)]

    def _settle(self, run: Run) -> list[Action]:
        """What can happen now that fewer seats can write."""
        if run.writers or run.allocating or run.exchanging or run.number not in self.by_number:
            return []
        if run.state is State.CLOSING and run.rest:
            run.state = State.EXCHANGING
            if not run.votes:
                return self._give_ticket(run)
            run.voting = set(run.rest)
            return [Vote(run.number, seat) for seat in sorted(run.rest)]
        if run.state in (State.CLOSING, State.EXCHANGING) and not run.rest:
            run.state = State.PUBLISHED
            if run.id in self.restarts:
                self.restarts[run.id] = self.restarts[run.id]._replace(losses=0)
            request, run.fence = run.fence, None
            return [Answer(request, run.number)]
        if run.state is State.ENDING:
            del self.by_number[run.number]
            self.over.append(run.number)
            seats = sorted(run.holders | run.rest)
            return [Free(run.number, seat, run.condemned) for seat in seats]
        return []
