"""The first change of layout in a cluster: nothing is warm, no memory has been used before.

Slab.X -> Slab.Y of a float64 field that is in memory, one chunk a rank and 32. Each way runs once
in each round, in a cluster of its own: the workers have started, and dask_redist has connected, but
no way has moved a byte. What is made is checked: every element is its own index.

Run it with ``python benchmarks/cold.py``; it prints a table and writes JSON.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from statistics import median

import click
from dask.utils import parse_bytes
from distributed import wait
from rich.console import Console
from rich.table import Table

from dask_redist.bench import MAKERS, OURS, P2P, TASKS, Change, changes
from dask_redist.cluster import local_ranks
from dask_redist.field import count_right, indexed_field
from dask_redist.race import timed

WAYS = (OURS, P2P, TASKS)


def measure(way: str, change: Change, ranks: int) -> float:
    """Seconds of one change in a new cluster."""
    with local_ranks(ranks) as (client, _):
        x = indexed_field(change.before).persist()
        wait(x)
        took = timed(MAKERS[way], x, change.after)
        if (right := count_right(client, took.made)) != x.size:
            raise SystemExit(f"{way}: {x.size - right} of {x.size} elements are wrong")
        return took.seconds


@click.command()
@click.option("--ranks", default="2,4", help="Numbers of ranks.")
@click.option("--size", default="512 MiB", help="Bytes of the field.")
@click.option("--rounds", default=5, help="Rounds.")
@click.option("--json", "file", default="cold.json", type=click.Path(path_type=Path))
def main(ranks: str, size: str, rounds: int, file: Path) -> None:
    """The first change of layout in a cluster, against Dask's p2p and tasks."""
    table = Table("ranks", "change", *(f"{way} s" for way in WAYS), "ratio")
    found = []
    for n in map(int, ranks.split(",")):
        wanted = [c for c in changes(parse_bytes(size), n) if c.name == "Slab.X -> Slab.Y"]
        for change in wanted:
            taken: dict[str, list[float]] = {way: [] for way in WAYS}
            for _, way in product(range(rounds), WAYS):
                taken[way].append(measure(way, change, n))
            seconds = {way: median(of_one) for way, of_one in taken.items()}
            ratio = min(seconds[P2P], seconds[TASKS]) / seconds[OURS]
            shown = (f"{s:.3f}" for s in seconds.values())
            table.add_row(str(n), str(change), *shown, f"{ratio:.2f}")
            found.append({"ranks": n, "change": str(change), "seconds": seconds, "ratio": ratio})
    Console(width=100).print(table)
    file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
