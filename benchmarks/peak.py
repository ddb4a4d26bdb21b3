"""The most memory that a change of layout takes, over the bytes of the array.

Slab.X -> Slab.Y of a float64 field, its input in memory before (*persisted*) or made on the fly
(*made*: ``da.random``; *read*: ``from_zarr``, uncompressed). Each way runs once in each round, in a
cluster of its own, after a small change of layout that has everything imported and connected.

Peak is the highest sum of the workers' PSS (``/proc/PID/smaps_rollup``: pages that several
processes map are shared out among them) while the array is there, minus that sum before it was.
``planned`` is what ``dask_redist.plan(...).peak_bytes`` says before anything runs.

Run it with ``python benchmarks/peak.py``; it prints a table and writes JSON.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from math import prod
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click
import dask.array as da
import zarr
from distributed import Client, wait
from rich.console import Console
from rich.table import Table

import dask_redist as dr
from dask_redist.bench import MAKERS, OURS, P2P, TASKS
from dask_redist.cluster import local_ranks

WAYS = (OURS, P2P, TASKS)
INPUTS = ("persisted", "made", "read")
SMALL = (64, 64, 8)


class Sampler(threading.Thread):
    """Looks at the workers' memory until it is stopped."""

    def __init__(self, pids: list[int]) -> None:
        super().__init__(daemon=True)
        self._pids = pids
        self._stop_now = threading.Event()
        self.before = self.peak = self.pss()

    def pss(self) -> int:
        """Bytes of all workers now."""
        return sum(map(_pss, self._pids))

    def run(self) -> None:
        """Look every few milliseconds."""
        while not self._stop_now.wait(0.005):
            self.peak = max(self.peak, self.pss())

    def stop(self) -> int:
        """Stop; the bytes at the peak that were not there before."""
        self._stop_now.set()
        self.join()
        return max(self.peak, self.pss()) - self.before


def _pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"process {pid} has no Pss")


@contextmanager
def stored(shape: tuple[int, ...], chunks: tuple[int, ...]) -> Iterator[Path]:
    """A Zarr array on disk."""
    with TemporaryDirectory(prefix="dask-redist-") as folder:
        path = Path(folder) / "field"
        array = zarr.create_array(path, shape=shape, chunks=chunks, dtype="f8", compressors=None)
        da.random.random(shape, chunks=chunks).store(array, lock=False)
        yield path


def measure(way: str, kind: str, ranks: int, before: Any, path: Path) -> tuple[int, int]:
    """Bytes at the peak, and the bytes planned (of our way)."""
    shape = tuple(map(sum, before))
    after = dr.Slab.Y.chunks(shape, ranks)
    with local_ranks(ranks) as (client, _):
        small = da.random.random(SMALL, chunks=(8, -1, -1)).persist()
        MAKERS[way](small, dr.Slab.Y.chunks(SMALL, ranks)).compute()
        del small
        sampler = Sampler(list(client.run(_pid).values()))
        sampler.start()
        x = da.from_zarr(path) if kind == "read" else da.random.random(shape, chunks=before)
        if kind == "persisted":
            x = dr.redistribute(x, before).persist()  # as many on each rank
            wait(x)
        planned = dr.plan(x, dr.Slab.Y)
        y = MAKERS[way](x, after).persist()
        wait(y)
        peak = sampler.stop()
        _check(client, y)
        return peak, sum(planned.peak_bytes(rank) for rank in range(ranks))


def _pid(dask_worker: Any = None) -> int:
    return os.getpid()


def _check(client: Client, y: da.Array) -> None:
    """An array of random numbers between 0 and 1 is there, whole."""
    mean = float(client.compute(y.mean()).result())
    if not 0.49 < mean < 0.51:
        raise SystemExit(f"the mean of the result is {mean}")


@click.command()
@click.option("--ranks", default="2,4", help="Numbers of ranks.")
@click.option("--shape", default="512,512,256", help="Shape of the field.")
@click.option("--chunks", default=32, help="Chunks of the input.")
@click.option("--rounds", default=3, help="Rounds.")
@click.option("--json", "file", default="peak.json", type=click.Path(path_type=Path))
def main(ranks: str, shape: str, chunks: int, rounds: int, file: Path) -> None:
    """Peak memory of a change of layout, over the bytes of the array."""
    sizes = tuple(map(int, shape.split(",")))
    nbytes = 8 * prod(sizes)
    before = dr.Slab.X.chunks(sizes, chunks)
    table = Table("ranks", "input", "way", "peak", "planned")
    table.title = f"peak over the array's {nbytes / 2**20:.0f} MiB"
    found = []
    with stored(sizes, tuple(c[0] for c in before)) as path:
        for n, kind in product(map(int, ranks.split(",")), INPUTS):
            taken: dict[str, list[tuple[int, int]]] = {way: [] for way in WAYS}
            for _, way in product(range(rounds), WAYS):
                taken[way].append(measure(way, kind, n, before, path))
            for way, figures in taken.items():
                peak, planned = (median(column) / nbytes for column in zip(*figures, strict=True))
                said = f"{planned:.2f}" if way == OURS else ""
                table.add_row(str(n), kind, way, f"{peak:.2f}", said)
                found.append(
                    {"ranks": n, "input": kind, "way": way, "peak": peak, "planned": planned}
                )
    Console(width=100).print(table)
    file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
