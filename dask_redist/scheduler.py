"""The scheduler's side: the conductor in a thin shell of Dask handlers.

Messages and Dask's own hooks (a task changed state, a worker left, a graph came) become events of
the :class:`~dask_redist.conductor.Conductor`; the actions that it returns become messages,
restrictions and transitions.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any

import numpy as np
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from dask_redist import config
from dask_redist.arena import ArenaCard
from dask_redist.assign import assign
from dask_redist.conductor import (
    AGAIN,
    Action,
    Allocate,
    Answer,
    Close,
    Conductor,
    Free,
    Prove,
    Recompute,
    Ticket,
    Vote,
)
from dask_redist.errors import AdmissionError, RunTimeoutError
from dask_redist.layouts import Layout
from dask_redist.ranks import RankSet, Seat
from dask_redist.reports import RunReport
from dask_redist.run import RunTable
from dask_redist.spec import PartSpec
from dask_redist.tasks import FenceTask

logger = logging.getLogger(__name__)

PLUGIN = "dask_redist"
_NEEDED = {"waiting", "no-worker", "queued", "processing"}


class SchedulerShell(SchedulerPlugin):
    """The conductor on a scheduler."""

    name = PLUGIN
    idempotent = True

    # ------------------------------------------------------------------------------- start
    async def start(self, scheduler: Scheduler) -> None:
        """Install the handlers that ranks and clients call."""
        self.scheduler = scheduler
        self.timeout = config.seconds("timeout")
        self.ranks = RankSet()
        self.conductor = Conductor()
        self.reports: deque[RunReport] = deque(maxlen=1000)
        self._live: dict[int, RunReport] = {}
        self._tables: dict[int, bytes] = {}
        self._specs: dict[Any, PartSpec] = {}
        self._layouts: deque[Layout] = deque(maxlen=64)
        self._spec_bytes: dict[int, bytes] = {}
        self._requests: dict[int, asyncio.Future[Any]] = {}
        self._count = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._left: dict[int, Seat] = {}
        self._wires: tuple[tuple[int, ...], dict[int, dict[int, str]]] = (), {}
        #: contributions and takes that may run in one place only: key -> addresses
        self._pins: dict[Any, set[str]] = {}
        #: who computed a chunk; others may get copies of it
        self._makers: dict[Any, str] = {}
        scheduler.handlers.update(
            {
                "redist_hello": self._hello,
                "redist_connect": self._connect,
                "redist_owners": self._owners,
                "redist_join": self._join,
                "redist_fence": self._fence,
                "redist_exchanged": self._exchanged,
                "redist_missing": self._missing,
                "redist_runs": self._runs,
                "redist_memory": self._memory,
            }
        )

    async def close(self) -> None:
        """Stop what is under way."""
        for task in self._tasks:
            task.cancel()

    # ------------------------------------------------------------------------------- ranks
    def _hello(self, card: Iterable[Any], **facts: Any) -> dict[str, Any]:
        self._leave(facts["address"])
        seat = self.ranks.arrive(card=ArenaCard(*card), **facts)
        return {"seat": seat.seat, "ticket": self.conductor.ticket}

    async def _connect(self, n_ranks: int | None, timeout: float) -> dict[str, Any]:
        """Number the ranks when all workers are there; their table, and who reaches whom how."""
        deadline = time.monotonic() + timeout
        while True:
            here = {s.address for s in (*self.ranks.arrived, *self.ranks.seated.values())}
            missing = [w for w in self.scheduler.workers if w not in here]
            if not missing and len(here) >= (n_ranks or 1):
                break
            if time.monotonic() > deadline:
                raise RunTimeoutError(
                    f"{len(here)} of {n_ranks or len(self.scheduler.workers) or 1} ranks came "
                    f"within {timeout:g} s"
                    + (f"; no answer from {', '.join(missing)}" if missing else "")
                    + "; start more workers or raise timeout="
                )
            await asyncio.sleep(0.02)
        self.ranks.seal()
        return {"ranks": self._table(), "wires": await self._reach()}

    async def _reach(self) -> dict[int, dict[int, str]]:
        """The wire between each two ranks, asked once for each set of ranks."""
        seats = self.ranks.table()
        numbers = tuple(seat.seat for seat in seats)
        if self._wires[0] != numbers:
            replies = await asyncio.gather(
                *(self._ask(s, "redist_reach", seats=self._table()) for s in seats)
            )
            self._wires = numbers, dict(zip(numbers, replies, strict=True))
        return self._wires[1]

    def _table(self) -> list[Any]:
        return [tuple(seat) for seat in self.ranks.table()]

    def _owners(self, keys: Iterable[Any]) -> dict[str, Any]:
        """The rank of each chunk, -1 where it is not in memory; layouts lately asked for."""
        ranks = {seat.address: rank for rank, seat in enumerate(self.ranks.table())}
        owners = [ranks.get(self._owner(self.scheduler.tasks.get(key)), -1) for key in keys]
        return {"owners": owners, "layouts": pickle.dumps(list(self._layouts))}

    def _owner(self, ts: Any) -> str:
        """The address that owns a chunk: whoever computed it, not those who got a copy."""
        holders = sorted(ws.address for ws in (ts.who_has or ())) if ts is not None else []
        if not holders:
            return ""
        maker = self._makers.get(ts.key, "")
        return maker if maker in holders else str(holders[0])

    async def _memory(self) -> dict[str, dict[str, int]]:
        """Arena bytes of each rank, by address."""
        seats = self.ranks.table()
        replies = await asyncio.gather(*(self._ask(s, "redist_memory") for s in seats))
        return {s.address: reply for s, reply in zip(seats, replies, strict=True)}

    async def _ask(self, seat: Seat, op: str, **arguments: Any) -> Any:
        """Call a rank's handler.

        Raises
        ------
        RunTimeoutError
            It did not answer within ``redist.timeout``; names the rank.
        OSError
            It has left.
        """
        call = getattr(self.scheduler.rpc(seat.address), op)(**arguments)
        try:
            return await asyncio.wait_for(call, self.timeout)
        except TimeoutError:
            raise RunTimeoutError(
                f"rank {self._rank(seat)} on {seat.address} did not answer {op} within "
                f"{self.timeout:g} s (redist.timeout)"
            ) from None

    # ------------------------------------------------------------------------------ events
    async def _join(self, id: Any, key: Any, seat: int) -> dict[str, Any]:
        fence = self.scheduler.tasks.get(id)
        contribution = self.scheduler.tasks.get(key)
        if (
            fence is None
            or not isinstance(fence.run_spec, FenceTask)
            or contribution not in fence.dependencies
        ):
            return {"unknown": True}
        if seat not in self.ranks.by_number:
            return {"again": True}
        address = self.ranks.by_number[seat].address
        if contribution.processing_on is None or contribution.processing_on.address != address:
            return {"stray": True}  # Dask has given this execution up
        if id not in self.conductor.runs:
            self._create(id, fence)
        value = await self._request(lambda r: self.conductor.join(id, seat, r))
        if isinstance(value, Exception):
            return {"error": pickle.dumps(value)}
        if value == AGAIN or value not in self._live:
            return {"again": True}
        return {"table": self._run_table(value)}

    async def _fence(self, id: Any, numbers: list[int]) -> dict[str, Any]:
        if id not in self._specs:
            return {"again": True}
        if report := self._live.get(max(numbers)):
            report.mark("contribute")
        value = await self._request(lambda r: self.conductor.fence(id, set(numbers), r))
        if isinstance(value, Exception):
            return {"error": pickle.dumps(value)}
        if value == AGAIN:
            return {"again": True}
        if report := self._live.get(value):
            report.mark("fence")
        return {"number": value}

    def _exchanged(self, number: int, seat: int, failed: bool, error: bytes | None) -> None:
        if failed:
            reason = pickle.loads(error) if error else None
            self._do(self.conductor.not_exchanged(number, seat, reason))
        else:
            self._do(self.conductor.exchanged(number, seat))

    def _missing(self, id: Any, number: int, key: Any, address: str) -> None:
        """A take found no block: send it to the owner, or have the run made again."""
        run, spec = self.conductor.runs.get(id), self._specs.get(id)
        if spec is None:
            return  # forgotten meanwhile
        if run is not None and run.number == number:
            owner = self.ranks.by_number.get(run.owners.get(spec.out_number(key[1:]), -1))
            if owner is not None and owner.address != address:
                return self._restrict(key, {owner.address})
        self._do(self.conductor.missing(id, number))

    def transition(
        self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **kwargs: Any
    ) -> None:
        """Dask's hook: the end of a fence is the end of its run."""
        if finish == "memory":
            if start == "processing" and isinstance(key, tuple):
                self._makers[key] = kwargs["worker"]
            return
        self._makers.pop(key, None)
        if finish in ("released", "erred", "forgotten") and key in self._specs:
            self._do(self.conductor.gone(key))
            if finish == "forgotten":
                self.conductor.forget(key)
                del self._specs[key]
        if finish == "forgotten":
            self._pins.pop(key, None)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Dask's hook: a worker has left."""
        stranded: dict[Any, Any] = {}
        for key in [key for key, addresses in self._pins.items() if worker in addresses]:
            self._restrict(key, self._pins[key] - {worker})
            if scheduler.tasks[key].state == "no-worker":
                stranded[key] = "released"
        self._leave(worker)
        if stranded:
            scheduler.transitions(stranded, stimulus_id=f"redist-stranded-{time.time()}")

    def _leave(self, address: str) -> None:
        seat = self.ranks.leave(address)
        if seat is not None:
            self._left[seat.seat] = seat
            self._tell_all({"op": "redist-left", "seat": seat.seat})
            self._do(self.conductor.lost(seat.seat))

    def _tell_all(self, message: dict[str, Any]) -> None:
        for seat in self.ranks.table():
            self.scheduler.worker_send(seat.address, message)

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list[Any]) -> list[Any]:
        """Dask's hook: a rank that takes part in a run stays."""
        busy = {
            seat
            for run in self.conductor.by_number.values()
            for seat in run.holders | run.writers | run.allocating | run.rest
        }
        addresses = {s.address for s in self.ranks.table() if s.seat in busy}
        return [ws for ws in workers if ws.address not in addresses]

    def restart(self, scheduler: Scheduler) -> None:
        """Dask's hook: all tasks are forgotten and all workers are restarted."""
        for id in list(self._specs):
            self._do(self.conductor.gone(id))
        self._specs.clear()
        self._pins.clear()
        self._makers.clear()

    def update_graph(self, scheduler: Scheduler, *, tasks: Collection[Any], **kwargs: Any) -> None:
        """Dask's hook: contributions run where their chunk is; later takes go to their owner."""
        for key in tasks:
            ts = scheduler.tasks[key]
            if not isinstance(ts.run_spec, FenceTask):
                continue
            for dependent in ts.dependents:
                self._pin(key, dependent)
            for contribution in ts.dependencies:
                if len(contribution.dependencies) == 1 and contribution.state == "released":
                    (chunk,) = contribution.dependencies
                    name = chunk.key[0] if isinstance(chunk.key, tuple) else None
                    if name == ts.run_spec.spec.name_input and chunk.who_has:
                        self._restrict(contribution.key, {self._owner(chunk)})

    def _restrict(self, key: Any, addresses: set[str]) -> None:
        """Have a task run at these addresses only; none: anywhere."""
        self.scheduler.set_restrictions({key: addresses or None})
        if addresses:
            self._pins[key] = addresses
        else:
            self._pins.pop(key, None)

    def _pin(self, id: Any, take: Any) -> None:
        """Have a take run where its block is; one that is in no run runs anywhere and asks."""
        run, spec = self.conductor.runs.get(id), self._specs.get(id)
        if run is None or spec is None:
            return
        owner = self.ranks.by_number.get(run.owners.get(spec.out_number(take.key[1:]), -1))
        self._restrict(take.key, {owner.address} if owner is not None else set())

    # ---------------------------------------------------------------------------- creation
    def _create(self, id: Any, fence: Any) -> None:
        spec: PartSpec = fence.run_spec.spec
        self._specs[id] = spec
        if spec.layout is not None and spec.layout not in self._layouts:
            self._layouts.append(spec.layout)
        seats = self.ranks.table()
        ranks = {seat.address: rank for rank, seat in enumerate(seats)}
        owners = assign(spec, len(seats), self._held(fence, spec, ranks))
        wanted = {
            spec.out_number(take.key[1:]): take
            for take in fence.dependents
            if take.state in _NEEDED
        }
        actions = self.conductor.create(
            id, {out: seats[int(owners[out])].seat for out in sorted(wanted)}
        )
        number = self.conductor.runs[id].number
        for take in wanted.values():
            self._pin(id, take)
        report = RunReport.start(number, spec, len(seats), len(wanted))
        self._live[number] = report
        self.reports.append(report)
        self._spec_bytes[number] = pickle.dumps(spec)
        self._do(actions)

    def _held(self, fence: Any, spec: PartSpec, ranks: dict[str, int]) -> np.ndarray[Any, Any]:
        """The rank of each input chunk of the part, -1 where it is not in memory."""
        held = np.full(spec.grid_in, -1, np.int64)
        for contribution in fence.dependencies:
            for chunk in contribution.dependencies:
                if isinstance(chunk.key, tuple) and chunk.key[0] == spec.name_input:
                    held[spec.local_in(chunk.key[1:])] = ranks.get(self._owner(chunk), -1)
        return held

    def _run_table(self, number: int) -> bytes:
        if number not in self._tables:
            run = self.conductor.by_number[number]
            spec = self._specs[run.id]
            seats = np.full(spec.n_out, -1, np.int64)
            offsets = np.zeros(spec.n_out, np.int64)
            for out, seat in run.owners.items():
                seats[out] = seat
                offsets[out] = run.offsets[out]
            owners = {s: self.ranks.by_number[s] for s in set(run.owners.values())}
            self._tables[number] = pickle.dumps(
                RunTable(run.id, number, spec, seats, offsets, owners)
            )
            self._live[number].mark("create")
        return self._tables[number]

    # ----------------------------------------------------------------------------- actions
    async def _request(self, event: Callable[[int], list[Action]]) -> Any:
        """Hand a request to the conductor and wait for its answer."""
        request = next(self._count)
        future = self._requests[request] = asyncio.get_running_loop().create_future()
        try:
            self._do(event(request))
            return await future
        finally:
            del self._requests[request]

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Answer(request, value):
                    future = self._requests.get(request)  # type: ignore[call-overload]
                    if future is not None and not future.done():
                        future.set_result(value)
                case Allocate():
                    self._spawn(self._do_allocate(action))
                case Close():
                    self._spawn(self._do_close(action))
                case Prove():
                    self._spawn(self._do_prove(action))
                case Vote():
                    self._spawn(self._do_vote(action))
                case Ticket(ticket, number, go):
                    message = {"op": "redist-ticket", "ticket": ticket, "number": number, "go": go}
                    self._tell_all(message)
                    if go:
                        self._spawn(self._watch_exchange(number))
                case Free():
                    self._spawn(self._do_free(action))
                case Recompute(id):
                    self._recompute(id)
        self._sweep()

    def _sweep(self) -> None:
        """Forget what belongs to runs that are over."""
        for number in [n for n in self._live if n not in self.conductor.by_number]:
            self._live.pop(number).mark("take")
            self._tables.pop(number, None)
            self._spec_bytes.pop(number, None)
        if not self.conductor.by_number:
            self._left.clear()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("an action of the conductor failed", exc_info=task.exception())

    async def _do_allocate(self, action: Allocate) -> None:
        number, number_of_seat, outputs = action
        seat = self.ranks.by_number.get(number_of_seat)
        if seat is None:
            return self._do(self.conductor.not_allocated(number, number_of_seat, None))
        error: Exception | None = None
        try:
            reply = await self._ask(
                seat,
                "redist_allocate",
                number=number,
                spec=self._spec_bytes[number],
                outs=outputs,
            )
        except RunTimeoutError as timeout:
            error = timeout
        except OSError:
            pass  # it has left; who waits asks again
        except Exception as unexpected:  # whoever waits must hear of it
            error = unexpected
        else:
            if "offsets" in reply:
                offsets = dict(zip(outputs, reply["offsets"], strict=True))
                return self._do(self.conductor.allocated(number, seat.seat, offsets))
            error = AdmissionError(f"rank {self._rank(seat)}: {reply['error']}")
        if number in self.conductor.by_number:
            self._do(self.conductor.not_allocated(number, seat.seat, error))

    async def _do_close(self, action: Close) -> None:
        number, seat_number = action
        seat = self.ranks.by_number.get(seat_number)
        if seat is None:
            return  # the conductor asks for a proof instead
        try:
            reply = await self._ask(seat, "redist_close", number=number)
        except OSError as error:
            if not isinstance(error, RunTimeoutError):
                return await self._until_lost(number, seat)
            return self._do(self.conductor.not_closed(number, seat_number, error))
        except Exception as unexpected:  # whoever waits must hear of it
            return self._do(self.conductor.not_closed(number, seat_number, unexpected))
        if report := self._live.get(number):
            report.add(seat_number, reply)
        self._do(self.conductor.closed(number, seat_number, reply["rest"]))

    async def _until_lost(self, number: int, seat: Seat) -> None:
        """The connection broke: Dask will say that the worker has left, or it does not answer."""
        deadline = time.monotonic() + self.timeout
        while seat.seat in self.ranks.by_number:
            if time.monotonic() > deadline:
                error = RunTimeoutError(
                    f"rank {self._rank(seat)} on {seat.address} cannot be reached for "
                    f"{self.timeout:g} s (redist.timeout)"
                )
                return self._do(self.conductor.not_closed(number, seat.seat, error))
            await asyncio.sleep(0.05)

    async def _do_prove(self, action: Prove) -> None:
        number, seat_number, witnesses = action
        lost = self._left[seat_number]
        seats = [s for w in witnesses if (s := self.ranks.by_number.get(w)) is not None]
        proofs = await asyncio.gather(
            *(
                self._ask(
                    s,
                    "redist_dead",
                    number=number,
                    lost=seat_number,
                    pid=lost.pid,
                    started=lost.started,
                )
                for s in seats
            ),
            return_exceptions=True,
        )
        if number not in self.conductor.by_number:
            return
        # A witness that has left itself cannot be harmed; one that is silent can.
        if all(
            proof is True or (isinstance(proof, OSError) and not isinstance(proof, RunTimeoutError))
            for proof in proofs
        ):
            self._do(self.conductor.closed(number, seat_number))
        else:
            logger.warning(
                "the process of %s cannot be proven dead: the memory of run %d is not used again",
                lost.address,
                number,
            )
            self._do(self.conductor.not_closed(number, seat_number, None))

    async def _do_vote(self, action: Vote) -> None:
        number, seat_number = action
        seat = self.ranks.by_number.get(seat_number)
        if seat is None:
            return  # the conductor knows
        try:
            ready = await self._ask(seat, "redist_vote", number=number)
        except Exception as error:
            logger.info("rank on %s cannot exchange run %d: %s", seat.address, number, error)
            ready = False
        self._do(self.conductor.voted(number, seat_number, ready))

    async def _watch_exchange(self, number: int) -> None:
        """Whoever has not exchanged in time is named to the fence."""
        deadline = time.monotonic() + self.timeout
        while (run := self.conductor.by_number.get(number)) is not None and run.exchanging:
            if time.monotonic() > deadline:
                ranks = [
                    f"{self._rank(s)} on {s.address}"
                    for n in sorted(run.exchanging)
                    if (s := self.ranks.by_number.get(n))
                ]
                error = RunTimeoutError(
                    f"rank {', rank '.join(ranks)} did not exchange run {number} within "
                    f"{self.timeout:g} s (redist.timeout)"
                )
                for seat in sorted(run.exchanging):
                    self._do(self.conductor.not_exchanged(number, seat, error))
                return
            await asyncio.sleep(0.1)

    async def _do_free(self, action: Free) -> None:
        seat = self.ranks.by_number.get(action.seat)
        if seat is not None:
            try:
                await self._ask(seat, "redist_free", number=action.number, condemn=action.condemn)
            except (OSError, RunTimeoutError) as error:
                logger.info("rank on %s frees no more: %s", seat.address, error)

    def _recompute(self, id: Any) -> None:
        """Have Dask run the contributions and the fence again, as its own p2p rechunk does."""
        fence = self.scheduler.tasks.get(id)
        if fence is None:
            return
        tasks = [*(t for t in fence.dependents if t.state != "memory"), fence, *fence.dependencies]
        if any(ts.state == "erred" for ts in tasks):
            return
        stimulus = f"redist-recompute-{time.time()}"
        released: dict[Any, Any] = {ts.key: "released" for ts in tasks}
        self.scheduler.transitions(released, stimulus_id=stimulus)
        self.scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus)

    def _rank(self, seat: Seat) -> int | str:
        return next((r for r, s in enumerate(self.ranks.table()) if s.seat == seat.seat), "?")

    def _runs(self) -> bytes:
        return pickle.dumps(list(self.reports))
