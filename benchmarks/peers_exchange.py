"""The ranks of `exchange.py`: what each of them has and does in a round.

The ranks that need MPI are started by ``mpiexec`` with this file as the script; ours are spawned.
Both are told over a socket what to do, because a process that waits in MPI keeps its core busy.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from importlib import import_module
from math import prod
from multiprocessing.connection import Client
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dask_redist import Pencil, Slab, config
from dask_redist.arena import Arena
from dask_redist.grids import GridLayout
from dask_redist.peers import PageBudget, attach
from dask_redist.process import Process
from dask_redist.ranks import Seat
from dask_redist.run import RankRun, RunTable
from dask_redist.spec import Index, PartSpec
from dask_redist.wires import MemoryWire, Wire

OURS, MEMCPY, FFT, HEAT = "dask_redist", "memcpy", "mpi4py-fft", "heat"
MEMORY_LIMIT = 6 * 2**30

Array = NDArray[np.float64]


class Case(NamedTuple):
    """One change of layout of one array."""

    before: Slab
    after: Slab | Pencil
    shape: Index

    def __str__(self) -> str:
        return f"{self.before!r} to {self.after!r}"


def spec_of(case: Case, ranks: int) -> PartSpec:
    """The case as a change of layout of one part."""
    return PartSpec(
        name="out",
        name_input="in",
        chunks_in=case.before.chunks(case.shape, ranks),
        chunks_out=case.after.chunks(case.shape, ranks),
        first_in=(0, 0, 0),
        first_out=(0, 0, 0),
        dtype=np.dtype("f8"),
        owners=case.after.owners(case.shape, ranks).ravel(),
        ranks=ranks,
        layout=case.after,
    )


def numbered(layout: GridLayout, rank: int, shape: Index, ranks: int) -> Array:
    """A rank's chunk of the array whose elements are their own global index."""
    x, y, z = (np.arange(s.start, s.stop) for s in layout.box(rank, shape, ranks).slices)
    return ((x[:, None, None] * shape[1] + y[:, None]) * shape[2] + z).astype("f8")


class Side(Protocol):
    """A rank's side of some ways."""

    #: what is timed, and returns what it made
    ways: dict[str, Callable[[], Array]]

    def prepare(self, case: Case, ranks: int) -> Any:
        """Have input and poisoned outputs; returns what other ranks need to know."""

    def meet(self, facts: list[Any]) -> Any:
        """Learn what all ranks have returned."""

    def settle(self) -> None:
        """Let others end their round, too; not timed."""


def serve(address: str, rank: int, side: Side) -> None:
    """Do what the parent says, until it goes."""
    case, ranks, made = Case(Slab.X, Slab.X, ()), 0, dict[str, Array]()
    with suppress(EOFError, ConnectionError), Client(address) as parent:
        parent.send(rank)
        while True:
            match parent.recv():
                case "prepare", case, ranks:
                    made.clear()
                    parent.send(side.prepare(case, ranks))
                case "meet", facts:
                    parent.send(side.meet(facts))
                case "go", way, appointed:
                    time.sleep(max(0.0, appointed - time.monotonic()))
                    start = time.monotonic()
                    result = side.ways[way]()
                    end = time.monotonic()
                    side.settle()
                    parent.send((start, end))
                    made[way] = result  # what it replaces goes now, which takes time too
                case "wrong", way:
                    layout = case.before if way == MEMCPY else case.after
                    right = numbered(layout, rank, case.shape, ranks)
                    parent.send(int((made[way] != right).sum()))


def bind(rank: int) -> None:
    """Bind this process to one core; Ctrl-C is the parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


# ------------------------------------------------------------------------------ dask_redist, memcpy
class Ours:
    """Arena, wires and run of one rank; and the copy of its chunk."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.arena = Arena(2 * MEMORY_LIMIT, keep=0)
        self.pages = PageBudget(int(config.get("arena.peer-pages") * MEMORY_LIMIT))
        self.ways = {OURS: self.exchange, MEMCPY: self.copy}
        self._peers = ExitStack()

    def prepare(self, case: Case, ranks: int) -> tuple[Seat, int]:
        """Make input and outputs; returns whose and where the output is."""
        self._peers.close()
        self.spec = spec_of(case, ranks)
        (self.index,) = np.argwhere(case.before.owners(case.shape, ranks) == self.rank).tolist()
        self.chunk = numbered(case.before, self.rank, case.shape, ranks)
        shape = case.after.shape(self.rank, case.shape, ranks)
        (block,) = self.arena.allocate([prod(shape) * 8])
        self.output, self.private = block.array(shape, "f8"), np.empty_like(self.chunk)
        for array in (self.output, self.private):
            array.fill(np.nan)
        seat = Seat(
            seat=self.rank,
            name=str(self.rank),
            host="",
            address="",
            process=Process.current(),
            card=self.arena.card,
            memory_limit=MEMORY_LIMIT,
            nthreads=1,
        )
        return seat, block.offset

    def meet(self, facts: list[tuple[Seat, int]]) -> None:
        """Open the run of this change."""
        owners = {seat.seat: seat for seat, _ in facts}
        seats = self.spec.owners
        offsets = np.array([facts[seat][1] for seat in seats], np.int64)
        self.run = RankRun(RunTable("run", 1, self.spec, seats, offsets, owners), self._wire_to)

    def _wire_to(self, table: RunTable, seat: int) -> Wire:
        peer = self._peers.enter_context(closing(attach(table.owners[seat].card, self.pages)))
        return MemoryWire(peer)

    def settle(self) -> None:
        """Nothing: what is written has arrived."""

    def exchange(self) -> Array:
        """Write all pieces of the chunk."""
        self.run.contribute(tuple(self.index), self.chunk)
        return self.output

    def copy(self) -> Array:
        """Copy the chunk."""
        np.copyto(self.private, self.chunk)
        return self.private


def spawned(address: str, rank: int) -> None:
    """One of our ranks."""
    bind(rank)
    serve(address, rank, Ours(rank))


# --------------------------------------------------------------------------------------------- MPI
class Mpi:
    """The MPI packages that are installed, on one rank."""

    def __init__(self, world: Any, there: list[str]) -> None:
        self.world = world
        self.ways: dict[str, Callable[[], Array]] = {}
        self._plans = [{FFT: self._fft, HEAT: self._heat}[way] for way in there]

    def prepare(self, case: Case, ranks: int) -> None:
        """Plan each way, with an input of its own."""
        self.ways.clear()
        if isinstance(case.after, Slab):
            chunk = numbered(case.before, self.world.rank, case.shape, ranks)
            for plan in self._plans:
                plan(case, chunk)

    def meet(self, facts: list[None]) -> None:
        """Wait for all: MPI knows the rest."""
        self.settle()

    def settle(self) -> None:
        """Wait for all, in MPI: a rank that sleeps elsewhere may still have to send to others."""
        self.world.Barrier()

    def _fft(self, case: Case, chunk: Array) -> None:
        pencils: Any = import_module("mpi4py_fft.pencil")
        before, after = case.before.axis, case.after.axis
        split = pencils.Subcomm(self.world, [int(axis != before) for axis in range(3)], False)
        start = pencils.Pencil(split, case.shape, axis=after)  # split along `before`
        end = start.pencil(before)
        made = np.full(end.subshape, np.nan)
        transfer = start.transfer(end, float)

        def forward() -> Array:
            transfer.forward(chunk, made)
            return made

        self.ways[FFT] = forward

    def _heat(self, case: Case, chunk: Array) -> None:
        heat: Any = import_module("heat")
        torch: Any = import_module("torch")
        array = heat.array(torch.from_numpy(chunk), is_split=case.before.axis)

        def resplit() -> Array:
            made: Array = heat.resplit(array, case.after.axis).larray.numpy()
            return made

        self.ways[HEAT] = resplit


if __name__ == "__main__":
    from mpi4py import MPI

    bind(MPI.COMM_WORLD.rank)
    serve(sys.argv[1], MPI.COMM_WORLD.rank, Mpi(MPI.COMM_WORLD, sys.argv[2:]))
