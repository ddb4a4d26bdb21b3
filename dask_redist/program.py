"""A program: one function that runs on all ranks at once, each with its own array.

It runs in the rank's lane, in the turn of its ticket, which is given when all ranks hold what it
needs. So no two programs, and no program and exchange of a redistribution, can wait for each other.

Ranks of a program talk by one means only: in each *step* all say something small to all, over the
workers' own connections, and wait until they have heard everyone. Arrays go through arenas: a rank
lays one out, or makes a place for one, and says where; the others read or write by the wire that
reaches it. What was laid out stays until the step after: then all have read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
from distributed import Worker
from numpy.typing import NDArray

from dask_redist.arena import Arena, block_of
from dask_redist.errors import RunTimeoutError
from dask_redist.holdings import Holdings
from dask_redist.mailbox import RETURNED, Mailbox
from dask_redist.partials import Cut, Leaf
from dask_redist.ranks import Seat
from dask_redist.reach import Reach
from dask_redist.run import Outputs, RunTable
from dask_redist.wires import Place, Wire, flush_all


class Targeted(NamedTuple):
    """A piece, and where it goes: the rank, its array, the place in that."""

    rank: int
    place: Place
    target: tuple[slice, ...]
    piece: NDArray[Any]


@dataclass(frozen=True)
class Means:
    """What a rank has, for its programs.

    Attributes
    ----------
    worker, arena, holdings, reach
        The rank's own.
    timeout
        Seconds after which another rank must answer.
    call
        Runs a coroutine on the worker's event loop, from another thread.
    mpi
        The MPI communicator of these ranks, if there is one.
    """

    worker: Worker
    arena: Arena
    holdings: Holdings
    reach: Reach
    timeout: float
    call: Callable[[Coroutine[Any, Any, Any]], Any]
    mpi: Callable[[Sequence[Seat]], Any]


class Landing(Outputs):
    """Arrays of this rank that others write just now, by number."""

    def __init__(self) -> None:
        nothing: Any = None  # there is no part: each array knows its own shape
        super().__init__(nothing, {})
        self._arrays: dict[int, NDArray[Any]] = {}

    def open(self, out: int, array: NDArray[Any]) -> None:
        """Others may write into an array from now on."""
        self._arrays[out] = array

    def close(self, out: int) -> None:
        """All have written."""
        self._arrays.pop(out, None)

    def _view(self, out: int) -> NDArray[Any]:
        return self._arrays[out]

    def drop(self, condemn: bool) -> None:
        """The program is over; ``condemn``: whoever is still writing cannot be stopped."""
        while self._arrays:
            _, array = self._arrays.popitem()
            block = block_of(array)
            if condemn and block is not None:
                block.condemn()


class Program:
    """A program on one of its ranks.

    Parameters
    ----------
    number
        The program's; unique among those of runs.
    rank
        Which rank this is.
    seats
        Those of all ranks.
    means
        What this rank has.
    """

    def __init__(self, number: int, rank: int, seats: Sequence[Seat], means: Means) -> None:
        self.number, self.rank, self.seats = number, rank, tuple(seats)
        self.means = means
        self.mailbox = Mailbox(len(self.seats))
        self.landing = Landing()
        #: steps that this rank has begun
        self.step = 0
        #: what it runs, and then what came of it
        self.code: Callable[[Any], Any] | None = None
        self.value: Any = None
        none = np.zeros(0, np.int64)
        owners = {seat.seat: seat for seat in self.seats}
        self._table = RunTable(("program", number), number, None, none, none, owners)
        #: what was laid out for the step to come, and for the last one
        self._laid: list[NDArray[Any]] = []
        self._read_now: list[NDArray[Any]] = []

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.seats)

    # ------------------------------------------------------------------------------- letters
    def exchange(self, letter: bytes) -> list[bytes]:
        """Say something to all ranks and hear what they say; by rank.

        A rank that computes is waited for, as long as it answers at all.

        Raises
        ------
        ProgramEnded
            Another rank has failed or left, or the program was given up.
        RunTimeoutError
            A rank is silent; names it.
        """
        self.step += 1
        self._say(letter)
        while late := self.mailbox.wait(self.step, self.means.timeout):
            if silent := self.means.call(self._silent(late)):
                names = ", ".join(f"rank {r} on {self.seats[r].address}" for r in silent)
                raise RunTimeoutError(
                    f"{names} did not come to step {self.step} of the rank code, and has not "
                    f"answered for {self.means.timeout:g} s (redist.timeout)"
                )
        self._read_now, self._laid = self._laid, []
        return self.mailbox.take(self.step)

    def leave(self) -> None:
        """The function has returned here: whoever waits for this rank may know.

        That it has failed they are told by the scheduler.
        """
        self.step += 1
        self._say(RETURNED)

    def end(self, why: str) -> None:
        """Let go whoever waits here."""
        self.mailbox.end(why)

    def let_go(self) -> None:
        """Forget what it holds; the program is over."""
        self.code = self.value = None
        self._laid, self._read_now = [], []

    def _say(self, letter: bytes) -> None:
        self.mailbox.put(self.step, self.rank, letter)
        loop = self.means.worker.loop.asyncio_loop  # type: ignore[attr-defined]
        for rank in range(1, self.size):
            to = self.seats[(self.rank + rank) % self.size]
            asyncio.run_coroutine_threadsafe(self._post(to, self.step, letter), loop)

    async def _post(self, to: Seat, step: int, letter: bytes) -> None:
        """Send a letter; whether it arrives, the one who waits for it will know."""
        while self.mailbox.ended is None:
            try:
                await self.means.worker.rpc(to.address).redist_mail(
                    number=self.number, step=step, sender=self.rank, letter=letter
                )
            except OSError:  # the other one has left, which we shall be told, or it is busy
                await asyncio.sleep(0.1)
            else:
                return

    async def _silent(self, ranks: Sequence[int]) -> list[int]:
        """Which of the ranks do not answer."""

        async def answers(rank: int) -> bool:
            asked = self.means.worker.rpc(self.seats[rank].address).redist_memory()
            try:
                await asyncio.wait_for(asked, self.means.timeout)
            except (OSError, TimeoutError):
                return False
            return True

        there = await asyncio.gather(*map(answers, ranks))
        return [rank for rank, answer in zip(ranks, there, strict=True) if not answer]

    # -------------------------------------------------------------------------------- arrays
    def allocate(self, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """A new array in this rank's arena.

        Raises
        ------
        AdmissionError
            There is no room for it.
        """
        nbytes = prod(shape) * dtype.itemsize
        self.means.call(self.means.holdings.make_room(nbytes))
        (block,) = self.means.arena.allocate([nbytes])
        return block.array(shape, dtype)

    def offset(self, array: NDArray[Any]) -> int | None:
        """Where an array begins in this rank's arena; None where others cannot reach it so."""
        block = block_of(array)
        if block is None or block.memory is not self.means.arena.memory:
            return None
        if not array.flags.c_contiguous or not array.size:
            return None
        return int(array.ctypes.data - self.means.arena.memory.ctypes.data)

    def lay(self, array: NDArray[Any], copied: bool) -> Leaf:
        """Have others read an array, as a row of elements, from the next step to the one after.

        Unless ``copied``, it must not change meanwhile.
        """
        offset = None if copied else self.offset(array)
        if offset is None:
            laid = self.allocate(array.shape, array.dtype)
            np.copyto(laid, array)
            array = laid
            offset = int(laid.ctypes.data - self.means.arena.memory.ctypes.data)
        self._laid.append(array)
        return Leaf(offset, (array.size,), array.dtype)

    def read(self, rank: int, leaf: Leaf, cut: Cut | None = None) -> NDArray[Any]:
        """What another rank has laid out, or a cut of it; to be used before the next step."""
        (array,) = self.means.reach.read(self.seats[rank], self.number, [leaf], cut)
        return array

    def write(self, pieces: Iterable[Targeted]) -> None:
        """Write pieces to their places in arrays that ranks have opened; all have arrived then."""
        wires: list[Wire] = []
        for rank, place, target, piece in pieces:
            seat = self.seats[rank].seat
            wire = self.means.reach.wire_to(self._table, seat)
            wire.write(place, target, piece)
            wires.append(wire)
            self.means.reach.credit(seat, piece.nbytes)
        flush_all(wires)
