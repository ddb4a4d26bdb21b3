"""The MPI wire: against mpi4py-fft on the same ranks, and end to end against Dask's own ways.

The ranks are those of a `LocalMPICluster`. First the exchange alone, without Dask's tasks: each
rank has one chunk, and all give it to a run at the same time, whose wires are forced to MPI; the
round ends when the last message has been unpacked into its owner's output. It takes turns with
mpi4py-fft's `Transfer` between the two `Pencil` objects, on a communicator of the same processes.
Our messages are packed, and agreed upon over Dask's connections first.

Then changes of layout end to end, from persisted input to persisted output, as `dask-redist bench`
measures them: with the wires that these ranks choose by themselves (shared memory: they are on one
host), and with MPI forced.

Run it with ``python benchmarks/mpi.py``; it prints tables and writes JSON. It needs mpi4py-fft,
which needs Debian's libfftw3-dev.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import time
from contextlib import contextmanager
from math import prod
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click
import dask
import numpy as np
from distributed import Client, Worker
from peers_exchange import FFT, Case, Mpi, numbered, spec_of
from rich.console import Console
from rich.table import Table

import dask_redist as dr
from dask_redist.bench import changes
from dask_redist.bench import compare as end_to_end
from dask_redist.peers import LocalPeer
from dask_redist.rank import Rank, rank_of
from dask_redist.ranks import Seat
from dask_redist.run import RankRun, RunTable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

OURS = "dask_redist, mpi"
#: the number of our run: no other one has it
NUMBER = 10**9
#: from the appointment of a round to its begin
LEAD = 0.1


# ------------------------------------------------------------------------------- on the ranks
class Side:
    """What a rank has of a case."""

    def __init__(self, rank: Rank, case: Case, me: int, ranks: int) -> None:
        self.rank, self.case, self.me, self.ranks = rank, case, me, ranks
        self.chunk = numbered(case.before, me, case.shape, ranks)
        self.spec = spec_of(case, ranks)
        (self.index,) = np.argwhere(case.before.owners(case.shape, ranks) == me).tolist()
        (self.out,) = np.flatnonzero(self.spec.owners == me).tolist()
        group = rank.reach.mail.groups.newest
        assert group is not None
        self.fft = Mpi(group.users, [FFT])

    async def allocate(self) -> int:
        """Have an output, full of NaN; returns where it is."""
        given = pickle.dumps((self.spec, {}))
        (offset,) = (await self.rank.holdings.allocate(NUMBER, given, [self.out]))["offsets"]
        shape = self.case.after.shape(self.me, self.case.shape, self.ranks)
        self.output = LocalPeer(self.rank.arena).view(offset, shape, "f8")
        self.output.fill(np.nan)
        return int(offset)

    def open(self, seats: Sequence[Seat], offsets: Sequence[int]) -> None:
        """Learn where all outputs are."""
        owners = self.spec.owners.tolist()
        numbers = np.array([seats[owner].seat for owner in owners])
        places = np.array([offsets[owner] for owner in owners], np.int64)
        self.table = RunTable(
            "run", NUMBER, self.spec, numbers, places, {seat.seat: seat for seat in seats}
        )
        self.fft.prepare(self.case, self.ranks)

    def go(self, way: str, appointed: float) -> tuple[float, float, int]:
        """A round: its begin, its end, and how many elements are wrong."""
        time.sleep(max(0.0, appointed - time.monotonic()))
        start = time.monotonic()
        if way == OURS:
            run = RankRun(self.table, self.rank.reach.wire_to)
            run.contribute(tuple(self.index), self.chunk)
            run.exchange()
            end, made = time.monotonic(), self.output
        else:
            made = self.fft.ways[way]()
            end = time.monotonic()
        self.fft.settle()
        right = numbered(self.case.after, self.me, self.case.shape, self.ranks)
        return start, end, int((made != right).sum())


def side_of(worker: Worker) -> Side:
    """What the rank of a worker has: kept there, since this script is no module for it."""
    side: Side = vars(worker)["mpi_benchmark"]
    return side


async def prepare(dask_worker: Worker, case: Case, addresses: Sequence[str]) -> int:
    """Have input and output."""
    rank, me = rank_of(dask_worker), addresses.index(dask_worker.address)
    assert rank is not None
    side = vars(dask_worker)["mpi_benchmark"] = Side(rank, case, me, len(addresses))
    return await side.allocate()


async def meet(dask_worker: Worker, seats: Sequence[Seat], offsets: Sequence[int]) -> None:
    """Learn of the others."""
    await asyncio.to_thread(side_of(dask_worker).open, seats, offsets)


async def go(dask_worker: Worker, way: str, appointed: float) -> tuple[float, float, int]:
    """A round."""
    return await asyncio.to_thread(side_of(dask_worker).go, way, appointed)


async def end(dask_worker: Worker) -> None:
    """Let go what the case had."""
    side = side_of(dask_worker)
    del vars(dask_worker)["mpi_benchmark"]
    await side.rank.holdings.free(NUMBER, condemn=False)


# ------------------------------------------------------------------------------- in the client
@contextmanager
def mpi_ranks(n: int, wire: str | None) -> Iterator[tuple[Client, dr.Ranks]]:
    """A client of n MPI ranks on this machine."""
    with (
        dask.config.set({"redist.wire": wire}),
        dr.LocalMPICluster(n, dashboard_address=None, silence_logs=logging.ERROR) as cluster,
        Client(cluster) as client,
    ):
        yield client, dr.connect(client, n)


def exchange(client: Client, ranks: dr.Ranks, case: Case, rounds: int) -> dict[str, Any]:
    """Median seconds of both ways, in turns."""
    addresses = list(ranks.addresses)
    offsets = client.run(prepare, case=case, addresses=addresses)
    client.run(meet, seats=ranks.seats, offsets=[offsets[address] for address in addresses])
    taken: dict[str, list[float]] = {OURS: [], FFT: []}
    for _ in range(rounds):
        for way, seconds in taken.items():
            found = client.run(go, way=way, appointed=time.monotonic() + LEAD).values()
            starts, ends, wrong = zip(*found, strict=True)
            seconds.append(max(ends) - min(starts))
            if sum(wrong):
                raise click.ClickException(f"{way}, {case}: {sum(wrong)} elements are wrong")
    client.run(end)
    medians = {way: median(seconds[1:]) for way, seconds in taken.items()}
    return {
        "ranks": ranks.size,
        "change": str(case),
        "shape": case.shape,
        "seconds": medians,
        "ratio": medians[FFT] / medians[OURS],
    }


@click.command()
@click.option("--ranks", default=2, type=click.IntRange(2), help="Number of ranks.")
@click.option("--n", default=512, help="The field has (n, n, n / 2) elements of float64.")
@click.option("--rounds", default=7, type=click.IntRange(2), help="Rounds; the first not counted.")
@click.option("--part", type=click.Choice(["exchange", "end", "all"]), default="all")
@click.option("--json", "path", default="mpi.json", type=click.Path(path_type=Path))
def main(ranks: int, n: int, rounds: int, part: str, path: Path) -> None:
    """Speed of the MPI wire against mpi4py-fft and, end to end, against Dask."""
    console, rows = Console(), list[dict[str, Any]]()
    shapes = (n, n, n // 2), (n - 3, n - 25, n // 2 - 5)
    if part != "end":
        table = Table("change", "shape", OURS, FFT, "ratio", title="GB/s of the whole field")
        with mpi_ranks(ranks, "mpi") as (client, found):
            for shape in shapes:
                for after in (dr.Slab.Y, dr.Slab.Z):
                    row = exchange(client, found, Case(dr.Slab.X, after, shape), rounds)
                    rows.append(row)
                    gbs = [prod(shape) * 8 / row["seconds"][way] / 1e9 for way in (OURS, FFT)]
                    cells = *(f"{speed:.2f}" for speed in gbs), f"{row['ratio']:.2f}"
                    table.add_row(row["change"], "x".join(map(str, shape)), *cells)
        console.print(table)
    if part != "exchange":
        table = Table(
            "wires", "change", "ours s", "p2p s", "tasks s", "over p2p", title="end to end"
        )
        for wire in (None, "mpi"):
            with mpi_ranks(ranks, wire) as (client, found):
                every = changes(prod(shapes[0]) * 8, ranks, 32)
                for change in [c for c in every if c.name == "Slab.X -> Slab.Y"]:
                    result = end_to_end(client, found, change, rounds, lambda: None)
                    ours, p2p, tasks = (result.seconds[w] for w in ("ours", "p2p", "tasks"))
                    rows.append(result.as_json() | {"wire": wire, "over_p2p": p2p / ours})
                    seconds = f"{ours:.3f}", f"{p2p:.3f}", f"{tasks:.3f}"
                    table.add_row(wire or "chosen", str(change), *seconds, f"{p2p / ours:.1f}")
        console.print(table)
    path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
