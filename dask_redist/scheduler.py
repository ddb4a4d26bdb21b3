"""The scheduler's side: the conductor in a thin shell of Dask handlers.

Messages and Dask's own hooks (a task changed state, a worker left, a graph came) become events of
the :class:`~dask_redist.conductor.Conductor`; the actions that it returns become answers,
transitions, and orders to ranks.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from numpy.typing import NDArray

from dask_redist import config
from dask_redist.actions import AGAIN, Action, Answer, Recompute
from dask_redist.assign import assign
from dask_redist.conductor import Conductor
from dask_redist.crowd import Crowd
from dask_redist.desk import Desk
from dask_redist.errors import AdmissionError, CrowdedError, dump, load
from dask_redist.fences import NEEDED, is_chunk, is_part_of, recompute, runs_on
from dask_redist.orders import Orders
from dask_redist.pins import Pins
from dask_redist.programs import Programs
from dask_redist.ranks import Seat
from dask_redist.reducing import ReduceTask
from dask_redist.replicas import Replicas
from dask_redist.roster import Roster
from dask_redist.runbook import RunBook
from dask_redist.spec import PartSpec
from dask_redist.tasks import CopyTask, FenceTask
from dask_redist.watch import PauseWatch

PLUGIN = "dask_redist"


class SchedulerShell(SchedulerPlugin):
    """The conductor on a scheduler."""

    name = PLUGIN
    idempotent = True

    # ------------------------------------------------------------------------------- start
    async def start(self, scheduler: Scheduler) -> None:
        """Install the handlers that ranks and clients call."""
        self.scheduler = scheduler
        self.roster = Roster(scheduler, config.seconds("timeout"))
        self.conductor = Conductor()
        self.book = RunBook()
        self.pins = Pins(scheduler)
        self.replicas = Replicas(scheduler)
        self.crowd = Crowd(scheduler, self.roster.timeout)
        self.orders = Orders(self.conductor, self.roster, self.book, self._act)
        self._requests: dict[Any, asyncio.Future[Any]] = {}
        self._count = itertools.count()
        #: redistributions that have failed, until a contribution hears of it
        self._failed: dict[Any, Exception] = {}
        self.watch = PauseWatch(self.roster, lambda: bool(self.conductor.by_number), self._fail)
        self.programs = Programs(scheduler, self.roster, self.conductor, self._act)
        desk = Desk(self.roster, self.conductor, self.book, self.replicas)
        scheduler.handlers.update(
            {
                "redist_hello": self._hello,
                "redist_connect": self.roster.complete,
                "redist_owners": desk.owners,
                "redist_join": self._join,
                "redist_fence": self._fence,
                "redist_exchanged": self._exchanged,
                "redist_missing": self._missing,
                "redist_unread": self._unread,
                "redist_stands": self._stands,
                "redist_copy": self._copy,
                "redist_program": self.programs.run,
                "redist_ran": self.programs.ran,
                "redist_give_up": self.programs.give_up,
                "redist_barrier": desk.barrier,
                "redist_runs": desk.runs,
                "redist_memory": desk.memory,
            }
        )

    async def close(self) -> None:
        """Stop what is under way."""
        self.orders.cancel()
        self.watch.cancel()
        self.crowd.cancel()

    # ------------------------------------------------------------------------ asked by ranks
    def _hello(self, **facts: Any) -> dict[str, Any]:
        self._leave(facts["address"])
        seat = self.roster.arrive(**facts)
        return {"seat": seat.seat, "ticket": self.conductor.ticket}

    async def _join(self, id: Any, key: Any, seat: int) -> dict[str, Any]:
        fence = self.scheduler.tasks.get(id)
        contribution = self.scheduler.tasks.get(key)
        if (
            fence is None
            or not isinstance(fence.run_spec, FenceTask)
            or not is_part_of(contribution, fence)
        ):
            return {"unknown": True}
        here = self.roster.find(seat)
        if here is None:
            return {"again": True}
        if not runs_on(contribution, here):
            return {"stray": True}  # Dask has given this execution up
        if id not in self.conductor.runs and self.crowd.holds(id, key):
            self.crowd.park(id, key)
            return {"stray": True}
        if error := self._failed.pop(id, None):
            return {"error": dump(error)}
        if id not in self.conductor.runs:
            self._create(id, fence)
        value = await self._request(lambda r: self.conductor.join(id, seat, r))
        if isinstance(value, CrowdedError):
            if not runs_on(contribution, here) or self.crowd.park(id, key):
                return {"stray": True}  # given up meanwhile, or until there is room
            value = AdmissionError(
                f"{value}; no task has ended for {self.roster.timeout:g} s (redist.timeout)"
            )
        self.crowd.leave(id)
        if isinstance(value, Exception):
            return {"error": dump(value)}
        run = self.conductor.runs.get(id)
        if value == AGAIN or run is None or run.number != value:
            return {"again": True}
        return {"table": self.book.table(run, self.roster.ranks.by_number)}

    async def _fence(self, id: Any, numbers: list[int]) -> dict[str, Any]:
        if id not in self.book.specs:
            return {"again": True}
        self.book.mark(max(numbers), "contribute")
        value = await self._request(lambda r: self.conductor.fence(id, set(numbers), r))
        if isinstance(value, Exception):
            return {"error": dump(value)}
        if value == AGAIN:
            return {"again": True}
        self.book.mark(value, "fence")
        run = self.conductor.runs.get(id)
        merged = self.book.merged(value, self.roster.ranks.by_number)
        if run is None or (merged is None and not run.votes):
            return {"again": True}  # a rank has left since
        return {"number": value, "merged": merged}

    def _exchanged(
        self,
        number: int,
        seat: int,
        failed: bool,
        error: bytes | None,
        merged: bytes | None = None,
        read: dict[int, int] | None = None,
    ) -> None:
        if failed:
            reason = load(error) if error else None
            self._act(self.conductor.not_exchanged(number, seat, reason))
            return
        run = self.conductor.by_number.get(number)
        if merged is not None and run is not None and seat in run.exchanging:  # else told before
            self.book.merge(number, seat, merged, read or {})
        self._act(self.conductor.exchanged(number, seat))

    def _missing(self, id: Any, number: int, key: Any, address: str) -> None:
        """A take found no block: send it to the owner, or have the run made again."""
        if id not in self.book.specs:
            return  # forgotten meanwhile
        run = self.conductor.runs.get(id)
        if run is not None and run.number == number:
            owner = self._address(id, key)
            if owner is not None and owner != address:
                return self.pins.pin(key, owner)
        self._act(self.conductor.missing(id, number))

    def _unread(self, id: Any, number: int) -> None:
        """The result of a reduction could not be read: a rank that merged some has left."""
        if id in self.book.specs:  # else it is forgotten meanwhile
            self._act(self.conductor.missing(id, number))

    def _stands(self, id: Any, number: int) -> bool:
        """Whether a run is still the one whose results count."""
        run = self.conductor.runs.get(id)
        return run is not None and run.number == number

    async def _copy(self, id: Any, number: int, key: Any, address: str) -> None:
        """A replicated chunk is being taken at ``address``: have the other ranks take theirs."""
        run = self.conductor.runs.get(id)
        if run is None or run.number != number:
            return
        seats = [s for n in run.holders if (s := self.roster.find(n)) and s.address != address]
        asked = (self.roster.ask(s, "redist_keep", number=number, key=key) for s in seats)
        kept = await asyncio.gather(*asked, return_exceptions=True)
        there = [seat.address for seat, done in zip(seats, kept, strict=True) if done is True]
        self.replicas.place(key, there)

    # --------------------------------------------------------------------------- Dask's hooks
    def update_graph(self, scheduler: Scheduler, *, tasks: Collection[Any], **kwargs: Any) -> None:
        """Contributions run where their chunk is; later takes go to their owner."""
        for key in tasks:
            ts = scheduler.tasks.get(key)
            if ts is not None and isinstance(ts.run_spec, (CopyTask, ReduceTask)):
                self._place(ts)
            if ts is None or not isinstance(ts.run_spec, FenceTask):
                continue
            if not ts.dependents and not ts.who_wants and ts.state == "released":
                # All its takes are known already, with another fence: Dask keeps the first one.
                scheduler.transitions({key: "forgotten"}, stimulus_id=kwargs["stimulus_id"])
                continue
            if isinstance(ts.run_spec, ReduceTask):
                continue
            if key in self.conductor.runs:
                for take in ts.dependents:
                    self.pins.pin(take.key, self._address(key, take.key))
            for contribution in ts.dependencies:
                if contribution.state == "released" and len(contribution.dependencies) == 1:
                    (chunk,) = contribution.dependencies
                    if chunk.who_has and is_chunk(chunk.key, ts.run_spec.spec):
                        self.pins.pin(contribution.key, self.roster.owner(chunk))

    def transition(
        self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **kwargs: Any
    ) -> None:
        """The end of a fence is the end of its run."""
        if finish == "memory":
            self.crowd.moved()
            if start == "processing" and isinstance(key, tuple):
                self.roster.computed(key, kwargs["worker"])
            self.replicas.in_memory(key)
            run = self.conductor.runs.get(key)
            if run is not None and not run.votes:  # a reduction: what was merged has been read
                self._act(self.conductor.gone(key))
            return
        self.roster.forget(key)
        if finish in ("released", "erred", "forgotten"):
            self.replicas.forget(key)
        if finish in ("released", "erred", "forgotten") and key in self.book.specs:
            self._act(self.conductor.gone(key))
            self.crowd.leave(key)
            if finish == "forgotten":
                self.conductor.forget(key)
                self._failed.pop(key, None)
                del self.book.specs[key]
        if finish == "forgotten":
            self.pins.forget(key)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """A worker has left: so has its rank."""
        stranded: dict[Any, Any] = dict.fromkeys(self.pins.unpin(worker), "released")
        self._leave(worker)
        scheduler.transitions(stranded, stimulus_id=f"redist-stranded-{time.time()}")

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """A client has left."""
        self.programs.client_left(client)

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list[Any]) -> list[Any]:
        """A rank that takes part in a run, or in a program, stays."""
        busy = {
            seat
            for run in self.conductor.by_number.values()
            for seat in run.holders | run.writers | run.allocating | run.rest
        } | self.programs.busy
        addresses = {s.address for s in self.roster.ranks.table() if s.seat in busy}
        return [ws for ws in workers if ws.address not in addresses]

    # ------------------------------------------------------------------------------- helpers
    def _leave(self, address: str) -> None:
        seat = self.roster.leave(address)
        if seat is not None:
            self._act(self.conductor.lost(seat.seat))
            self.programs.left(seat.seat)

    def _address(self, id: Any, take: Any) -> str | None:
        """Where the block of a take is; None if it is in no run."""
        run, spec = self.conductor.runs[id], self.book.specs[id]
        owner = self.roster.find(run.owners.get(spec.out_number(take[1:]), -1))
        return owner.address if owner is not None else None

    def _place(self, ts: Any) -> None:
        """Have a chunk made by its owner."""
        seats, (owner, ranks) = self.roster.ranks.table(), ts.run_spec.owner
        if seats and ts.state == "released":
            self.pins.pin(ts.key, seats[owner * len(seats) // ranks].address)

    def _create(self, id: Any, fence: Any) -> None:
        """Begin a run: its owners, its outputs' memory, the place of its takes."""
        spec: PartSpec = fence.run_spec.spec
        seats = self.roster.ranks.table()
        numbers = tuple(seat.seat for seat in seats)
        if isinstance(fence.run_spec, ReduceTask):
            actions = self.conductor.create(id, {}, votes=False)
            run = self.conductor.runs[id]
            self.book.open(run, spec, numbers, len(fence.dependencies), Counter())
            self._act(actions)
            return self.watch.begin()
        owners = assign(spec, len(seats), self._held(fence, spec))
        wanted = [take.key for take in fence.dependents if take.state in NEEDED]
        takers = Counter(spec.out_number(key[1:]) for key in wanted)
        outs = range(len(owners)) if spec.replicated and takers else sorted(takers)
        actions = self.conductor.create(id, {out: seats[int(owners[out])].seat for out in outs})
        self.book.open(self.conductor.runs[id], spec, numbers, len(fence.dependencies), takers)
        for key in wanted:
            self.pins.pin(key, self._address(id, key))
        self._act(actions)
        self.watch.begin()

    def _fail(self, seat: Seat, reason: str) -> None:
        """End the runs that a rank holds something of; the next contribution gets the reason."""
        runs = list(self.conductor.runs.values())
        for run in (r for r in runs if seat.seat in (r.holders if r.votes else r.writers)):
            self._failed[run.id] = AdmissionError(f"{self.roster.name(seat)} {reason}")
            self._act(self.conductor.missing(run.id, run.number))

    def _held(self, fence: Any, spec: PartSpec) -> NDArray[np.int64]:
        """The rank of each input chunk of the part, -1 where it is not in memory."""
        held = np.full(spec.grid_in, -1, np.int64)
        ranks = self.roster.numbers()
        for contribution in fence.dependencies:
            for chunk in contribution.dependencies:
                if is_chunk(chunk.key, spec):
                    held[spec.local_in(chunk.key[1:])] = ranks.get(self.roster.owner(chunk), -1)
        return held

    async def _request(self, event: Callable[[int], list[Action]]) -> Any:
        """Hand a request to the conductor and wait for its answer."""
        request = next(self._count)
        future = self._requests[request] = asyncio.get_running_loop().create_future()
        try:
            self._act(event(request))
            return await future
        finally:
            del self._requests[request]

    def _act(self, actions: list[Action]) -> None:
        """Do what an event causes."""
        for action in actions:  # answers first: whatever fails, nobody is left waiting
            if isinstance(action, Answer):
                future = self._requests.get(action.request)
                if future is not None and not future.done():
                    future.set_result(action.value)
        for action in actions:
            match action:
                case Answer():
                    pass
                case Recompute(id):
                    recompute(self.scheduler, id)
                case _:
                    self.orders.carry_out(action)
        while self.conductor.over:
            self.book.close(self.conductor.over.pop())
        if not self.conductor.by_number:
            self.roster.left.clear()
