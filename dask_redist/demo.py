"""What ``dask-redist demo`` shows: real maps become time series, and a race against Dask.

Nothing here prints. Real data are compared with NumPy bit for bit; the raced field is its own
oracle. All ways run from the same persisted input to a persisted output, warm, one after the other
in every round; a plain memory copy of the same bytes shows what this machine could do at best.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import dask
import dask.array as da
from distributed import Client, wait

from dask_redist.connect import Ranks
from dask_redist.errors import RedistError
from dask_redist.field import Shape, check_field, indexed_field
from dask_redist.grids import Layout, Pencil, Slab
from dask_redist.planning import runs
from dask_redist.race import by_p2p, by_tasks, copy, let_go, timed
from dask_redist.relayout import redistribute

EXTRAS = ("xarray", "zarr", "netCDF4", "cftime", "iris_sample_data")
INSTALL = "pip install 'dask-redist[demo]'"
ROUNDS = 3
#: seconds after which a step begins no further round, once it has one
ENOUGH = 10.0
OURS = "dask_redist"
COPY = "memory copy"
WAYS = (OURS, "Dask p2p", "Dask tasks", COPY)
STEPS = 3
#: calls of ``tick`` in a race, at most: each way in each round and in the warm-up
TICKS = STEPS * (ROUNDS + 1) * len(WAYS)


class RealData(NamedTuple):
    """What became of the real data."""

    shape: tuple[int, ...]
    years: str
    maps: int
    series: int
    collectives: int


class Step(NamedTuple):
    """One change of layout, raced: median seconds of each way, after a warm-up round."""

    source: str
    target: str
    nbytes: int
    rounds: int
    seconds: dict[str, float]

    def ratio(self, way: str) -> float:
        """How many times as fast as the faster of Dask's two ways."""
        dasks = min(self.seconds[w] for w in WAYS if w not in (OURS, COPY))
        return dasks / self.seconds[way]


def require_extras() -> None:
    """See that the packages of the demo are there.

    Raises
    ------
    RedistError
        Some are not; names them and what to install.
    """
    missing = [name for name in EXTRAS if find_spec(name) is None]
    if missing:
        raise RedistError(f"the demo needs {', '.join(missing)}: {INSTALL}")


# --------------------------------------------------------------------------------- real data
def store_maps(folder: str | Path) -> Any:
    """Write real maps to a Zarr store, one map a chunk, and return them as an xarray.DataArray.

    The data are 240 yearly maps of air temperature (K) over North America, float32, ``(time,
    latitude, longitude)``, in a calendar of 360 days.
    """
    xarray = importlib.import_module("xarray")
    (package,) = importlib.import_module("iris_sample_data").__path__
    path = Path(package) / "sample_data" / "A1B_north_america.nc"
    with xarray.open_dataset(path, engine="netcdf4") as source:
        air = source["air_temperature"].load()
    one_map = {air.name: {"chunks": (1, *air.shape[1:])}}
    air.to_dataset().drop_encoding().to_zarr(folder, encoding=one_map, consolidated=False)
    return air


def series_from_maps(client: Client) -> RealData:
    """Read real maps, one a chunk, and make them whole time series, one region a rank.

    The data are those of :func:`store_maps`, in a temporary folder, and read lazily from there.

    Raises
    ------
    RedistError
        The series differ from NumPy's in any bit, or no collective ran.
    """
    xarray = importlib.import_module("xarray")
    # Zarr writes in threads of its own. After an interrupt they may make this folder again; the
    # one around it goes last.
    around = dask.config.get("temporary-directory")
    with TemporaryDirectory(prefix="dask-redist-", dir=around) as folder:
        air = store_maps(folder)
        with xarray.open_zarr(folder, consolidated=False) as stored:
            maps = stored[air.name].data
            before = [run.number for run in runs(client=client)]
            series = redistribute(maps, Pencil.X, client=client)
            found = client.compute(series).result()
    expected = air.values
    if found.dtype != expected.dtype or found.tobytes() != expected.tobytes():
        raise RedistError("the time series are not those that NumPy reads from the maps")
    ran = [run for run in runs(client=client) if run.number not in before]
    if sum(run.n_in for run in ran) < maps.npartitions:
        raise RedistError(
            f"{len(ran)} collectives ran; they did not carry all {maps.npartitions} maps"
        )
    times = air["time"]
    first, *_, last = times.dt.year.values
    return RealData(
        air.shape,
        f"{first} to {last}, calendar {times.dt.calendar}",
        maps.npartitions,
        series.npartitions,
        len(ran),
    )


# ---------------------------------------------------------------------------------- the race
def race(client: Client, ranks: Ranks, shape: Shape, tick: Callable[[], object]) -> list[Step]:
    """Race Slab.X -> Slab.Y -> Pencil.X -> Slab.X and check each step on the ranks.

    The field is float64 of that shape; ``tick`` is called up to :data:`TICKS` times.

    Raises
    ------
    RedistError
        A result of dask_redist is wrong.
    """
    n = ranks.size
    layouts: list[Layout] = [Slab.X, Slab.Y, Pencil.X, Slab.X]
    if Pencil.X.chunks(shape, n) == Slab.Y.chunks(shape, n):
        layouts[2] = Slab.Z  # a prime number of ranks: the only other way to keep X whole
    x = redistribute(indexed_field(Slab.X.chunks(shape, n)), Slab.X, client=client).persist()
    check_field(client, x, Slab.X, n)
    steps = []
    for source, target in pairwise(layouts):
        step, y = _race_step(client, x, source, target, n, tick)
        check_field(client, y, target, n)
        steps.append(step)
        x = y
    return steps


def _race_step(
    client: Client, x: da.Array, source: Layout, target: Layout, n: int, tick: Callable[[], object]
) -> tuple[Step, da.Array]:
    """The step, and what dask_redist made in its last round."""
    chunks = target.chunks(x.shape, n)
    makers: dict[str, Callable[[da.Array], da.Array]] = {
        "Dask p2p": lambda given: by_p2p(given, chunks),
        "Dask tasks": lambda given: by_tasks(given, chunks),
        OURS: lambda given: redistribute(given, target, client=client),
    }
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    made: list[da.Array] = []
    enough = time.monotonic() + ENOUGH
    for turn in range(ROUNDS + 1):
        if turn > 1 and time.monotonic() > enough:
            break
        while made:
            let_go(client, made.pop())
        for way, seconds in taken.items():
            # Each way gets an input of its own: Dask's ways leave copies of chunks on other
            # ranks, which would spare the next one the transfer.
            given = redistribute(x, source, client=client).persist()
            wait(given)
            if way == COPY:
                seconds.append(copy(client, x, given))
            else:
                took = timed(makers[way], given)
                seconds.append(took.seconds)
                if way == OURS:
                    made.append(took.made)
                else:
                    let_go(client, took.made)
            let_go(client, given)
            tick()
    medians = {way: float(median(seconds[1:])) for way, seconds in taken.items()}
    step = Step(repr(source), repr(target), int(x.nbytes), len(taken[OURS][1:]), medians)
    return step, made[0]
