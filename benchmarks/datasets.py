"""Several arrays in one compute: a Dataset of 30 variables changes its layout.

Each variable is (64, 96, 96) float64 in 16 chunks of whole maps, in memory; its chunks become 16 of
whole time series. All variables in one ``persist`` against one after the other, with dask_redist's
hook (``policy="always"``) and as Dask does it by itself. Ways take turns in every round, each with
inputs of its own; the first round is not counted, and what it makes is compared with the index that
each element carries.

Run it with ``python benchmarks/datasets.py``; it prints a table and writes JSON.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import click
import dask.array as da
import numpy as np
import xarray as xr
from distributed import Client, LocalCluster, futures_of, wait
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import dask_redist as dr

SHAPE = (64, 96, 96)
MAPS = (4, 96, 96)
SERIES = {"time": -1, "y": 24, "x": 24}
OURS, DASKS = "dask_redist", "Dask"
TOGETHER, IN_TURN = "one compute", "one after the other"
WAYS = list(product((OURS, DASKS), (TOGETHER, IN_TURN)))

Way = tuple[str, str]


def index(variable: int, *places: NDArray[Any]) -> NDArray[Any]:
    """The number of an element, counted through all variables."""
    number = np.full_like(places[0], variable)
    for length, place in zip(SHAPE, places, strict=True):
        number = number * length + place
    return number


def maps(variables: int) -> xr.Dataset:
    """A Dataset of maps, in memory."""
    token = time.monotonic_ns()
    held = {
        f"v{i}": (
            ("time", "y", "x"),
            da.fromfunction(
                lambda *places, i=i: index(i, *places), shape=SHAPE, chunks=MAPS, dtype="f8"
            ).map_blocks(np.copy, name=f"maps-{i}-{token}"),
        )
        for i in range(variables)
    }
    found = xr.Dataset(held).persist()
    wait(found)
    return found


def relay(given: xr.Dataset, way: Way) -> tuple[float, xr.Dataset]:
    """Seconds from maps in memory to series in memory, and the series."""
    who, how = way
    start = time.perf_counter()
    with dr.enable(policy="always") if who == OURS else nullcontext():
        lazy = given.chunk(SERIES)
    if how == TOGETHER:
        found = lazy.persist()
        wait(found)
    else:
        held = {}
        for name in lazy:
            held[name] = lazy[name].persist()
            wait(held[name])
        found = xr.Dataset(held)
    seconds = time.perf_counter() - start
    for future in futures_of(found):
        if future.status == "error":
            future.result()
    return seconds, found


def check(series: xr.Dataset) -> None:
    """Refuse a wrong element.

    Raises
    ------
    SystemExit
        Names the variable.
    """
    places = np.indices(SHAPE, dtype="f8")
    for i, name in enumerate(series):
        if not np.array_equal(series[name].values, index(i, *places)):
            raise SystemExit(f"elements of {name} are wrong")


def let_go(client: Client, *datasets: xr.Dataset) -> None:
    """Release arrays and wait until no worker holds them."""
    for future in futures_of(datasets):
        future.release()
    while any(client.run(lambda dask_worker: len(dask_worker.data)).values()):
        time.sleep(0.005)


@click.command()
@click.option("--variables", default=30, help="Variables in the Dataset.")
@click.option("--workers", default=2, help="Worker processes of one thread.")
@click.option("--rounds", default=5, help="Rounds that count.")
@click.option("--json", "path", default="datasets.json", type=click.Path(path_type=Path))
def main(variables: int, workers: int, rounds: int, path: Path) -> None:
    """A Dataset changes its layout in one compute, and one variable after the other."""
    taken: dict[Way, list[float]] = {way: [] for way in WAYS}
    with (
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address=":0",
            silence_logs=logging.ERROR,
        ) as cluster,
        Client(cluster) as client,
    ):
        dr.connect(client)
        for turn in range(rounds + 1):
            for way in WAYS:
                given = maps(variables)
                seconds, series = relay(given, way)
                if turn == 0:
                    check(series)
                taken[way].append(seconds)
                let_go(client, given, series)
    medians = {way: median(seconds[1:]) for way, seconds in taken.items()}
    nbytes = variables * 8 * int(np.prod(SHAPE))
    table = Table("way", "how", "seconds", "GB/s", "in turn takes", "Dask takes")
    table.title = f"{variables} variables, {nbytes / 2**20:.0f} MiB, {workers} workers"
    for (who, how), seconds in medians.items():
        ratios = medians[who, IN_TURN] / seconds, medians[DASKS, how] / seconds
        figures = (f"x {ratio:.2f}" for ratio in ratios)
        table.add_row(who, how, f"{seconds:.3f}", f"{nbytes / seconds / 1e9:.2f}", *figures)
    Console(width=100).print(table)
    found = [{"way": w, "how": h, "seconds": s, "bytes": nbytes} for (w, h), s in medians.items()]
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
