"""What a change of layout costs before anything moves: tasks, and seconds to build and to submit.

Two changes of n chunks into n others, each chunk of 128 MiB, so that no way may join small ones:

- *slabs*: a matrix in n slabs of rows becomes n slabs of columns. Every chunk meets every other.
- *shifted*: n chunks of equal length become n of one and three quarters of the half of that. The
  change falls into n / 2 parts of two chunks on each side.

Three ways: dask_redist's hook with ``policy="always"``, Dask's "p2p" and Dask's "tasks". No chunk
is ever computed: whoever asks for the first ones waits until the figures are taken. "tasks" is left
out where it would make more than ten million of them (slabs, 10,000 to 10,000). Times are those
of one process that holds client, scheduler and two worker threads; ways take turns in every round.

Building ends when ``x.rechunk`` returns, submission when ``persist`` has returned and the scheduler
has every task. All results are kept, so with many chunks most of the submission is Dask's ordering
of the tasks: its time grows with the chunks at the start times those at the end, for every way.

Run it with ``python benchmarks/graph_build.py``; it prints a table and writes JSON.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
import dask.array as da
import numpy as np
from distributed import Client, Event, LocalCluster, Scheduler
from rich.console import Console
from rich.table import Table

import dask_redist as dr

OURS, TASKS = "dask_redist", "Dask tasks"
CHUNK = 128 * 2**20 // 8
#: pieces above which a way is left out that makes a task of each: it would not end
MOST_TASKS = 10**7
#: seconds after which a case begins no further round, once it has one
ENOUGH = 60.0
GATE = "dask-redist-benchmark"

Chunks = tuple[tuple[int, ...], ...]


class Case(NamedTuple):
    """One change of layout."""

    name: str
    n: int
    before: Chunks
    after: Chunks


class Cost(NamedTuple):
    """What one way costs: medians over the rounds."""

    case: str
    n: int
    way: str
    tasks: int
    build: float
    submit: float
    rounds: int


def slabs(n: int) -> Case:
    """Rows to columns."""
    width = max(1, math.isqrt(CHUNK // n))
    cut, whole = (width,) * n, (n * width,)
    return Case("slabs", n, (cut, whole), (whole, cut))


def shifted(n: int) -> Case:
    """Equal chunks to chunks of one and three quarters of a pair."""
    quarter = CHUNK // 2**10
    columns = (2**9,)
    return Case(
        "shifted", n, ((2 * quarter,) * n, columns), ((quarter, 3 * quarter) * (n // 2), columns)
    )


# ------------------------------------------------------------------------------ the three ways
def _ours(x: da.Array, chunks: Chunks) -> da.Array:
    with dr.enable(policy="always"):
        y: da.Array = x.rechunk(chunks)
    return y


def _dasks(x: da.Array, chunks: Chunks, method: str) -> da.Array:
    y: da.Array = x.rechunk(chunks, method=method)
    return y


WAYS: dict[str, Callable[[da.Array, Chunks], da.Array]] = {
    OURS: _ours,
    "Dask p2p": partial(_dasks, method="p2p"),
    TASKS: partial(_dasks, method="tasks"),
}


# -------------------------------------------------------------------------------- measurements
def _never(*_: Any, **__: Any) -> Any:
    """A chunk that is not made before all is measured, and then is not wanted any more."""
    Event(GATE).wait()


def source(case: Case) -> da.Array:
    """An array of which no chunk is ever made, with keys of its own."""
    token = f"source-{time.monotonic_ns()}"
    x: da.Array = da.map_blocks(
        _never, chunks=case.before, dtype="f8", meta=np.empty((0, 0)), token=token
    )
    return x


def measure(client: Client, case: Case, way: str) -> tuple[int, float, float]:
    """Tasks of one change, seconds to build it and seconds to submit it."""
    x = source(case)
    start = time.perf_counter()
    y = WAYS[way](x, case.after)
    build = time.perf_counter() - start
    scheduler = _scheduler(client)
    last = (y.name, *(n - 1 for n in y.numblocks))
    start = time.perf_counter()
    held = y.persist()
    while last not in scheduler.tasks:
        time.sleep(0.001)
    client.run_on_scheduler(str)  # it answers when it has done with the graph
    submit = time.perf_counter() - start
    tasks = len(dict(y.dask)) - len(dict(x.dask))
    del held, y
    gate = Event(GATE, client=client)
    gate.set()
    while scheduler.tasks:
        time.sleep(0.01)
    gate.clear()
    return tasks, build, submit


def _scheduler(client: Client) -> Scheduler:
    cluster: Any = client.cluster
    found: Scheduler = cluster.scheduler
    return found


def compare(client: Client, case: Case, rounds: int) -> list[Cost]:
    """All ways, in turns."""
    pieces = case.n**2 if case.name == "slabs" else 2 * case.n
    ways = [way for way in WAYS if way != TASKS or pieces <= MOST_TASKS]
    taken: dict[str, list[tuple[int, float, float]]] = {way: [] for way in ways}
    enough = time.monotonic() + ENOUGH
    for turn in range(rounds):
        if turn and time.monotonic() > enough:
            break
        for way in ways:
            taken[way].append(measure(client, case, way))
    costs = []
    for way, all_of in taken.items():
        tasks, build, submit = (median(column) for column in zip(*all_of, strict=True))
        costs.append(Cost(case.name, case.n, way, int(tasks), build, submit, len(all_of)))
    return costs


# -------------------------------------------------------------------------------------- output
def table(costs: list[Cost]) -> Table:
    """The figures; ratio: how many times as long as dask_redist takes from the call to the end."""
    found = Table("change", "way", "tasks", "build s", "submit s", "both s", "ratio")
    for column in found.columns[2:]:
        column.justify = "right"
    ours = 0.0
    for cost in costs:
        total = cost.build + cost.submit
        if cost.way == OURS:
            ours = total
        seconds = (f"{s:.4f}" for s in (cost.build, cost.submit, total))
        change = f"{cost.case}, {cost.n:,} to {cost.n:,}"
        found.add_row(change, cost.way, f"{cost.tasks:,}", *seconds, f"{total / ours:.1f}")
    return found


@click.command()
@click.option("--chunks", default="100,1000,10000", help="Numbers of chunks on each side.")
@click.option("--rounds", default=5, help="Rounds; fewer where a case takes more than a minute.")
@click.option("--json", "path", default="graph_build.json", type=click.Path(path_type=Path))
def main(chunks: str, rounds: int, path: Path) -> None:
    """Graph size, build and submission time against Dask's p2p and tasks."""
    costs: list[Cost] = []
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=False,
            protocol="tcp://",
            host="127.0.0.1",
            dashboard_address=":0",
            silence_logs=logging.CRITICAL,  # a task that waits is interrupted
        ) as cluster,
        Client(cluster) as client,
    ):
        dr.connect(client)
        compare(client, slabs(10), 1)  # warm
        for n in map(int, chunks.split(",")):
            for case in (slabs(n), shifted(n)):
                costs += compare(client, case, rounds)
    Console(width=110).print(table(costs))
    path.write_text(json.dumps([cost._asdict() for cost in costs], indent=1) + "\n")


if __name__ == "__main__":
    main()
