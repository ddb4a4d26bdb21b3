"""The ranks, as the scheduler knows them: who they are, how to call them, who owns which chunk."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from distributed import Scheduler

from dask_redist.arena import ArenaCard
from dask_redist.errors import RunTimeoutError, has_left, load
from dask_redist.process import Process
from dask_redist.ranks import RankSet, Seat

logger = logging.getLogger(__name__)


class Roster:
    """The rank set of a scheduler, and calls to its ranks.

    Parameters
    ----------
    scheduler
        The scheduler.
    timeout
        Seconds that a rank may take to answer.
    """

    def __init__(self, scheduler: Scheduler, timeout: float) -> None:
        self.scheduler = scheduler
        self.timeout = timeout
        self.ranks = RankSet()
        #: seats of workers that have left, while a run may need a proof of their death
        self.left: dict[int, Seat] = {}
        self._makers: dict[Any, str] = {}
        self._wires: tuple[tuple[int, ...], dict[int, dict[int, str]]] = (), {}
        #: the MPI ranks that met last, each one's communicator, and how many there have been
        self._met: tuple[Seat, ...] = ()
        self._communicators: dict[int, int] = {}
        self._meetings = 0
        self._meeting = asyncio.Lock()
        #: why there will be no ranks any more: the job that they were has ended
        self.lost: Exception | None = None

    def arrive(self, card: Iterable[Any], process: Iterable[Any], **facts: Any) -> Seat:
        """Seat a worker."""
        return self.ranks.arrive(card=ArenaCard(*card), process=Process(*process), **facts)

    def leave(self, address: str) -> Seat | None:
        """Take a worker's seat away and tell the others; its seat if it had one."""
        seat = self.ranks.leave(address)
        if seat is not None:
            self.left[seat.seat] = seat
            self.tell_all({"op": "redist-left", "seat": seat.seat, "path": seat.card.path})
        return seat

    def find(self, seat: int) -> Seat | None:
        """A seat by its number, if its worker is there."""
        return self.ranks.by_number.get(seat)

    def rank(self, seat: Seat) -> int | str:
        """The rank that a seat has now, for messages."""
        return next((r for r, s in enumerate(self.ranks.table()) if s.seat == seat.seat), "?")

    def name(self, seat: Seat) -> str:
        """A rank in words."""
        return f"rank {self.rank(seat)} on {seat.address}"

    def numbers(self) -> dict[str, int]:
        """Address to rank."""
        return {seat.address: rank for rank, seat in enumerate(self.ranks.table())}

    async def ask(self, seat: Seat, op: str, **arguments: Any) -> Any:
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
                f"{self.name(seat)} did not answer {op} within {self.timeout:g} s (redist.timeout)"
            ) from None

    async def ask_all(self, op: str, **arguments: Any) -> dict[Seat, Any]:
        """Call a handler of every rank."""
        seats = self.ranks.table()
        replies = await asyncio.gather(*(self.ask(s, op, **arguments) for s in seats))
        return dict(zip(seats, replies, strict=True))

    def tell(self, seat: int, message: dict[str, Any]) -> None:
        """Send a rank a message; messages to one rank stay in order."""
        here = self.find(seat)
        # Dask ends the tasks of a worker that leaves before it says so: it cannot be told any more.
        if here is not None and here.address in self.scheduler.stream_comms:
            self.scheduler.worker_send(here.address, message)

    def tell_all(self, message: dict[str, Any]) -> None:
        """Send every rank a message."""
        for seat in self.ranks.table():
            self.tell(seat.seat, message)

    async def complete(
        self, n_ranks: int | None, timeout: float, known: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Number the ranks when all workers are there; their table, and who reaches whom how.

        Nothing of that where the asker knows these seats already.

        Raises
        ------
        RankLostError
            The ranks were those of a job that has ended.
        RunTimeoutError
            They did not come in time; says how many did and who is missing.
        """
        deadline, left = time.monotonic() + timeout, ""
        while True:
            if self.lost is not None:
                raise self.lost
            here = {s.address for s in (*self.ranks.arrived, *self.ranks.seated.values())}
            missing = [w for w in self.scheduler.workers if w not in here]
            if not missing and len(here) >= (1 if n_ranks is None else n_ranks):
                if here:  # else those who come next are put in order when all are there
                    self.ranks.seal()
                seats = tuple(seat.seat for seat in self.ranks.table())
                if seats and seats == tuple(known):
                    return {"same": True}
                try:
                    return {"ranks": list(map(tuple, self.ranks.table())), **await self._reach()}
                except OSError as error:  # one has left meanwhile: once more
                    if not has_left(error):
                        raise
                    left = f"; the last that was tried: {error}"
            if time.monotonic() > deadline:
                raise RunTimeoutError(
                    f"{len(here)} of {n_ranks or len(self.scheduler.workers) or 1} ranks came "
                    f"within {timeout:g} s"
                    + (f"; no answer from {', '.join(missing)}" if missing else "")
                    + left
                    + "; start more workers or raise timeout="
                )
            await asyncio.sleep(0.02)

    async def _reach(self) -> dict[str, Any]:
        """The wire between each two ranks, asked once for each set of ranks."""
        async with self._meeting:
            table = self.ranks.table()
            seats = tuple(seat.seat for seat in table)
            if self._wires[0] != seats:
                await self._meet()
                replies = await self.ask_all(
                    "redist_reach",
                    seats=[tuple(seat) for seat in table],
                    communicators=self._communicators,
                )
                _raise_first(replies.values())
                self._wires = seats, {seat.seat: reply["wires"] for seat, reply in replies.items()}
                self._met = tuple(seat for seat in table if seat.mpi_rank is not None)
        return {"wires": self._wires[1]}

    async def _meet(self) -> None:
        """Have the ranks of each MPI world make a communicator, once for each set of ranks."""
        members = tuple(seat for seat in self.ranks.table() if seat.mpi_rank is not None)
        if members == self._met:
            return
        self._met, self._communicators, self._wires = (), {}, ((), {})
        rest, worlds = list(members), []
        while len(rest) > 1:
            first = rest[0]
            proofs = (
                self.ask(seat, "redist_prove", address=first.address, rank=first.mpi_rank)
                for seat in rest
            )
            proven = await asyncio.gather(*proofs)
            world = [seat for seat, there in zip(rest, proven, strict=True) if there]
            if first in world and len(world) > 1:
                await self._make_communicator(world)
                worlds.append(world)
            rest = [seat for seat in rest if seat not in (first, *world)]
        if members and len(members) > max(map(len, worlds), default=1):
            groups = "; ".join(", ".join(str(self.rank(s)) for s in world) for world in worlds)
            logger.warning(
                "the ranks are not all of one MPI job: MPI within ranks %s only",
                groups or "of none",
            )

    async def _make_communicator(self, world: list[Seat]) -> None:
        """Have ranks make a communicator, when all have heard each other over MPI.

        Who is late for the roll keeps nobody in MPI, and nobody enters it who then is alone there.
        """
        self._meetings += 1
        meeting = {
            "number": self._meetings,
            "members": [(seat.seat, seat.mpi_rank) for seat in world],
            "word": secrets.token_bytes(16),
        }
        for step in ("redist_roll", "redist_meet"):
            asked = (self.ask(seat, step, **meeting) for seat in world)
            _raise_first(await asyncio.gather(*asked))
        self._communicators |= {seat.seat: self._meetings for seat in world}

    # ------------------------------------------------------------------------------- chunks
    def computed(self, key: Any, address: str) -> None:
        """A worker has computed a chunk: it owns it, whoever gets copies."""
        self._makers[key] = address

    def forget(self, key: Any) -> None:
        """A chunk is in memory no more."""
        self._makers.pop(key, None)

    def owner(self, ts: Any) -> str:
        """The address that owns a chunk; empty where it is not in memory."""
        holders = sorted(ws.address for ws in (ts.who_has or ())) if ts is not None else []
        if not holders:
            return ""
        maker = self._makers.get(ts.key, "")
        return maker if maker in holders else str(holders[0])

    def holders(self, key: Any) -> set[str]:
        """The addresses that have a chunk."""
        ts = self.scheduler.tasks.get(key)
        return {ws.address for ws in ((ts.who_has if ts else None) or ())}

    def owners(self, keys: Iterable[Any]) -> list[int]:
        """The rank that owns each chunk, -1 where it is not in memory."""
        ranks, tasks = self.numbers(), self.scheduler.tasks
        return [ranks.get(self.owner(tasks.get(key)), -1) for key in keys]


def _raise_first(replies: Iterable[dict[str, Any]]) -> None:
    """Raise the first error that a rank has answered with."""
    for reply in replies:
        if "error" in reply:
            raise load(reply["error"])
