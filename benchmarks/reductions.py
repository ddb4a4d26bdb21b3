"""Reductions as one collective reduce, against Dask's trees and against the chunk tasks alone.

A float64 field in memory, one chunk a rank and 32, is reduced by dask_redist (the hook), by Dask,
and not at all: *chunks* are the tasks that make a partial of each chunk, which both need. What the
hook makes of the rest of Dask's time is the question. Ways take turns in every round (A B A B ...),
each with a new reduction; results are compared with Dask's.

Run it with ``python benchmarks/reductions.py``; it prints a table and writes JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import click
import dask.array as da
import numpy as np
from dask.utils import parse_bytes
from distributed import Client, wait
from rich.console import Console
from rich.table import Table

from dask_redist.cluster import local_ranks
from dask_redist.field import indexed_field
from dask_redist.grids import Slab
from dask_redist.hook import enable
from dask_redist.race import let_go, timed
from dask_redist.relayout import redistribute

OURS, DASK, CHUNKS = WAYS = ("ours", "dask", "chunks")
REDUCTIONS: dict[str, Callable[[da.Array], da.Array]] = {
    "sum()": lambda x: x.sum(),
    "sum(0)": lambda x: x.sum(0),
    "mean(0)": lambda x: x.mean(0),
    "std(0)": lambda x: x.std(0),
    "max(0)": lambda x: x.max(0),
    "argmax(0)": lambda x: x.argmax(0),
}


def made(x: da.Array, way: str, reduction: str) -> da.Array:
    """The reduction, or (chunks) the partials that Dask makes of the chunks."""
    if way == OURS:
        with enable(policy="always"):
            return REDUCTIONS[reduction](x)
    y = REDUCTIONS[reduction](x)
    if way == DASK:
        return y
    (partials,) = (name for name, needs in y.dask.dependencies.items() if needs == {x.name})
    chunks = tuple((1,) * n for n in x.numblocks)
    return da.Array(y.dask, partials, chunks, dtype="f8")


def seconds(client: Client, x: da.Array, reduction: str, rounds: int) -> dict[str, float]:
    """Median seconds of each way."""
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn, way in product(range(rounds + 1), WAYS):
        took = timed(made, x, way, reduction)
        taken[way].append(took.seconds)
        if turn == 0 and way == OURS:
            _check(took.made, made(x, DASK, reduction))
        let_go(client, took.made)
    return {way: float(median(several[1:])) for way, several in taken.items()}


def _check(ours: da.Array, theirs: da.Array) -> None:
    a, b = ours.compute(), theirs.compute()
    if not np.allclose(a, b):
        raise SystemExit(f"{ours.name}: {np.count_nonzero(~np.isclose(a, b))} elements differ")


@click.command()
@click.option("--ranks", default=4, help="How many ranks.")
@click.option("--size", default="512 MiB", help="Bytes of the field.")
@click.option("--chunks", default="4,32", help="How many chunks.")
@click.option("--rounds", default=7, help="Rounds.")
@click.option("--json", "file", default="reductions.json", type=click.Path(path_type=Path))
def main(ranks: int, size: str, chunks: str, rounds: int, file: Path) -> None:
    """Reductions against Dask's, and against the chunk tasks alone."""
    table = Table(
        "chunks", "reduction", *(f"{way} ms" for way in WAYS), "times Dask", "over chunks"
    )
    found: list[dict[str, Any]] = []
    n = round((parse_bytes(size) / 4) ** (1 / 3))
    with local_ranks(ranks) as (client, _):
        for count in map(int, chunks.split(",")):
            cut = Slab.X.chunks((n, n, n // 2), count)
            x = redistribute(indexed_field(cut), cut).persist()
            wait(x)
            for reduction in REDUCTIONS:
                took = seconds(client, x, reduction, rounds)
                # of the time that Dask takes beyond the chunk tasks: how much we take
                over = (took[OURS] - took[CHUNKS]) / max(took[DASK] - took[CHUNKS], 1e-9)
                ratio = took[DASK] / took[OURS]
                shown = (f"{1000 * s:.0f}" for s in took.values())
                table.add_row(str(count), reduction, *shown, f"{ratio:.2f}", f"{over:.2f}")
                found.append(
                    {"chunks": count, "reduction": reduction, "seconds": took, "ratio": ratio}
                    | {"over_chunks": over}
                )
            ratios = [one["ratio"] for one in found if one["chunks"] == count]
            table.add_row(str(count), "all", *3 * [""], f"{geometric_mean(ratios):.2f}", "")
            let_go(client, x)
    Console(width=100).print(table)
    file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
