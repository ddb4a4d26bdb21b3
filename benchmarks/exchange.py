"""The exchange alone, without Dask: how fast pieces get to their places in other ranks' memory.

Each rank is a process with one chunk. Its output chunk lies in its arena, and all ranks write their
pieces at the same time, as tasks do (`RankRun.contribute`), over the wires and under the bound on
peers' pages that a worker with a memory limit of 6 GiB has. Four changes of float64 arrays: Slab.X
to Slab.Y, to Slab.Z and to Pencil.Y (with 2 ranks that is Slab.X again, so it is left out), and
Slab.X to Slab.Y with lengths that are primes.

What it is compared with, rank for rank on the same cores (rank r is bound to core r, modulo cores):

- *memcpy*: each process copies its own chunk into warm private memory, all at once. It is the same
  number of bytes with no change of layout.
- *mpi4py-fft*: the `Transfer` between the two `Pencil` objects, into a warm array. A slab becomes a
  pencil by no single transfer, so that place stays empty.
- *heat*: `heat.resplit`, which makes a new array each time and knows slabs only.

The last two run under ``mpiexec``, in processes that sleep while others are measured. Ways take
turns in every round. A round begins at an appointed time and takes from the earliest start to the
latest end on the system's one monotonic clock. The first round is not counted: outputs are full of
NaN before it, and every element is compared with its global index after it.

Run it with ``python benchmarks/exchange.py``; it prints a table and writes JSON. GB/s are bytes of
the array by seconds. `mpi4py-fft` and `heat` are left out where they are not installed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import click
import peers_exchange
from peers_exchange import FFT, HEAT, MEMCPY, OURS, Case, spawned
from rich.console import Console
from rich.table import Table

from dask_redist import Pencil, Slab

PACKAGES = {FFT: "mpi4py_fft", HEAT: "heat"}
#: from the appointment of a round to its begin
LEAD = 0.02
#: seconds until all processes must have started; until those of MPI must have ended
PATIENCE = 60


class Speed(NamedTuple):
    """What one way takes: the median over the rounds."""

    ranks: int
    change: str
    shape: tuple[int, ...]
    way: str
    seconds: float
    rounds: int

    @property
    def gbs(self) -> float:
        """Gigabytes of the array a second."""
        return prod(self.shape) * 8 / self.seconds / 1e9


def cases(shape: tuple[int, ...], ranks: int) -> list[Case]:
    """All changes that change something."""
    uneven = tuple(length - less for length, less in zip(shape, (3, 25, 5), strict=True))
    found = [Case(Slab.X, after, shape) for after in (Slab.Y, Slab.Z, Pencil.Y)]
    found.append(Case(Slab.X, Slab.Y, uneven))
    return [c for c in found if c.before.chunks(c.shape, ranks) != c.after.chunks(c.shape, ranks)]


# ------------------------------------------------------------------------------------- the ranks
class Crew:
    """All ranks of one kind."""

    def __init__(self, ranks: list[Connection[Any, Any]]) -> None:
        self._ranks = ranks

    def ask(self, *words: Any) -> list[Any]:
        """Say the same to all ranks; returns the answers in order of the ranks."""
        try:
            for rank in self._ranks:
                rank.send(words)
            return [rank.recv() for rank in self._ranks]
        except (EOFError, ConnectionError) as error:
            raise click.ClickException("a rank has failed; what it said is above") from error

    def seconds(self, way: str) -> float:
        """From the first start to the last end of one round."""
        starts, ends = zip(*self.ask("go", way, time.monotonic() + LEAD), strict=True)
        seconds: float = max(ends) - min(starts)
        return seconds


Launch = Callable[[str, int], AbstractContextManager[None]]


@contextmanager
def crew(launch: Launch, ranks: int) -> Iterator[Crew]:
    """Ranks that have started; they end when they see their connections closed."""
    with ExitStack() as stack:
        address = os.path.join(stack.enter_context(TemporaryDirectory()), "parent")
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(address)
        server.listen(ranks)
        server.settimeout(PATIENCE)
        stack.enter_context(launch(address, ranks))
        arrived = {}
        for _ in range(ranks):
            rank: Connection[Any, Any] = stack.enter_context(
                Connection(server.accept()[0].detach())
            )
            arrived[rank.recv()] = rank
        yield Crew([arrived[rank] for rank in range(ranks)])


@contextmanager
def processes(address: str, ranks: int) -> Iterator[None]:
    """Our ranks."""
    context, started = multiprocessing.get_context("spawn"), []
    try:
        for rank in range(ranks):
            process = context.Process(target=spawned, args=(address, rank), daemon=True)
            process.start()
            started.append(process)
        yield
    except BaseException:
        for process in started:
            process.terminate()
        raise
    finally:
        for process in started:
            process.join()


@contextmanager
def mpi(there: list[str], address: str, ranks: int) -> Iterator[None]:
    """Ranks of MPI for these packages; a session of their own, so that Ctrl-C is ours alone."""
    command = [str(_mpiexec()), "-n", str(ranks), sys.executable, "-m", "mpi4py"]
    command += [peers_exchange.__file__, address, *there]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()


def _mpiexec() -> str | None:
    """The one beside this Python before any other."""
    beside = os.path.dirname(sys.executable)
    return shutil.which("mpiexec", path=os.pathsep.join((beside, os.environ.get("PATH", ""))))


def installed() -> list[str]:
    """The peers that can run here."""
    if not _mpiexec() or not find_spec("mpi4py"):
        return []
    return [way for way, package in PACKAGES.items() if find_spec(package)]


def compare(crews: dict[str, Crew], case: Case, ranks: int, rounds: int) -> list[Speed]:
    """All ways, in turns."""
    for one in dict.fromkeys(crews.values()):
        one.ask("meet", one.ask("prepare", case, ranks))
    ways = [way for way in crews if way not in PACKAGES or isinstance(case.after, Slab)]
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds):
        for way, seconds in taken.items():
            seconds.append(crews[way].seconds(way))
            if turn == 0 and (wrong := sum(crews[way].ask("wrong", way))):
                raise click.ClickException(f"{way}, {case}: {wrong} elements are wrong")
    return [
        Speed(ranks, str(case), case.shape, way, median(seconds[1:]), len(seconds) - 1)
        for way, seconds in taken.items()
    ]


# ---------------------------------------------------------------------------------------- output
def table(speeds: list[Speed], there: list[str]) -> Table:
    """The figures; the last columns: how many times as fast dask_redist is."""
    ways = (OURS, MEMCPY, FFT, HEAT)
    found = Table("ranks", "change", "shape", *(f"{way}\nGB/s" for way in ways))
    for way in ways[1:]:
        found.add_column(f"ratio to\n{way}")
    for column in found.columns[3:]:
        column.justify = "right"
    rows: dict[tuple[str, str, str], dict[str, float]] = {}
    for speed in speeds:
        row = str(speed.ranks), speed.change, "×".join(map(str, speed.shape))
        rows.setdefault(row, {})[speed.way] = speed.gbs
    for row, gbs in rows.items():
        cells = [
            f"{gbs[way]:.2f}" if way in gbs else "" if way in there else "not installed"
            for way in ways
        ]
        ratios = [f"{gbs[OURS] / gbs[way]:.2f}" if way in gbs else "" for way in ways[1:]]
        found.add_row(*row, *cells, *ratios)
    return found


def _ints(context: click.Context, option: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a list of integers, like 2,4") from error


@click.command()
@click.option("--ranks", default="2,4", callback=_ints, help="Numbers of ranks.")
@click.option("--shape", default="512,512,256", callback=_ints, help="The array; 3 axes.")
@click.option("--rounds", default=7, type=click.IntRange(2), help="Rounds; the first not counted.")
@click.option("--json", "path", default="exchange.json", type=click.Path(path_type=Path))
def main(ranks: tuple[int, ...], shape: tuple[int, ...], rounds: int, path: Path) -> None:
    """Speed of the exchange against memcpy, mpi4py-fft and heat."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ended or interrupted: clean up
    speeds, peers = list[Speed](), installed()
    for size in ranks:
        with ExitStack() as stack:
            ours = stack.enter_context(crew(processes, size))
            crews = {OURS: ours, MEMCPY: ours}
            if peers:
                crews |= dict.fromkeys(peers, stack.enter_context(crew(partial(mpi, peers), size)))
            for case in cases(shape, size):
                speeds += compare(crews, case, size, rounds)
    Console(width=140).print(table(speeds, [OURS, MEMCPY, *peers]))
    found = [speed._asdict() | {"GB/s": speed.gbs} for speed in speeds]
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
