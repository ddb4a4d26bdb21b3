"""What ``dask-redist demo`` shows: real maps become time series, and a race against Dask.

Nothing here prints. Real data are compared with NumPy bit for bit. The raced field carries its
global index in every element, so that each rank can tell by itself, without gathering anything,
whether what it holds belongs there. All ways run from the same persisted input to a persisted
output, warm, one after the other in every round; a plain memory copy of the same bytes shows what
this machine could do at best.
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
import numpy as np
from distributed import Client, futures_of, wait
from numpy.typing import NDArray

from dask_redist.connect import Ranks
from dask_redist.errors import RedistError, RunTimeoutError
from dask_redist.grids import Layout, Pencil, Slab
from dask_redist.inspection import owners
from dask_redist.planning import runs
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

Shape = tuple[int, int, int]


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
def series_from_maps(client: Client) -> RealData:
    """Read real maps, one a chunk, and make them whole time series, one region a rank.

    The data are 240 yearly maps of air temperature over North America, in a calendar of 360 days.
    They are written to Zarr in a temporary folder and read lazily from there.

    Raises
    ------
    RedistError
        The series differ from NumPy's in any bit, or no collective ran.
    """
    xarray = importlib.import_module("xarray")
    (package,) = importlib.import_module("iris_sample_data").__path__
    path = Path(package) / "sample_data" / "A1B_north_america.nc"
    with TemporaryDirectory(prefix="dask-redist-") as folder:
        with xarray.open_dataset(path, engine="netcdf4") as source:
            air = source["air_temperature"].load()
            one_map = {air.name: {"chunks": (1, *air.shape[1:])}}
            air.to_dataset().drop_encoding().to_zarr(folder, encoding=one_map, consolidated=False)
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


# ------------------------------------------------------------------------- the indexed field
def indexed_field(shape: Shape, layout: Layout, ranks: int) -> da.Array:
    """A lazy float64 field in which every element is its own global index, counted in C order."""
    meta = np.empty((0, 0, 0))
    chunks = layout.chunks(shape, ranks)
    field: da.Array = da.map_blocks(_indices, chunks=chunks, dtype="f8", meta=meta)
    return field


def _indices(block_info: Any = None) -> NDArray[np.float64]:
    block = block_info[None]
    planes, *rest = block["array-location"]
    found = np.empty(block["chunk-shape"])
    for i, plane in enumerate(range(*planes)):
        found[i] = _plane(plane, rest, block["shape"])
    return found


def _plane(plane: int, box: Any, shape: Any) -> NDArray[np.float64]:
    """The global indices in one plane of a box."""
    rows, columns = (np.arange(*bounds, dtype="f8") for bounds in box)
    indices: NDArray[np.float64] = (plane * shape[1] + rows[:, None]) * shape[2] + columns
    return indices


def check_field(client: Client, y: da.Array, layout: Layout, ranks: int) -> int:
    """Have each rank compare what it holds with the global index; returns how many are right.

    ``y`` is persisted; the check waits for it.

    Raises
    ------
    RedistError
        Elements are wrong, or a chunk is not on the rank that the layout names.
    """
    wait(y)
    named = layout.owners(y.shape, ranks)
    there = owners(y, client=client)
    if (there != named).any():
        i = tuple(np.argwhere(there != named)[0].tolist())
        raise RedistError(f"chunk {i} is on rank {there[i]}; {layout!r} names rank {named[i]}")
    ones = tuple((1,) * n for n in y.numblocks)
    counts = da.map_blocks(_right, y, chunks=ones, dtype="i8", meta=np.empty((0, 0, 0), "i8"))
    right = int(client.compute(counts.sum()).result())
    if right != y.size:
        raise RedistError(f"{y.size - right} of {y.size} elements are wrong in {layout!r}")
    return right


def _right(block: NDArray[np.float64], block_info: Any = None) -> NDArray[np.int64]:
    planes, *rest = block_info[0]["array-location"]
    right = sum(
        np.count_nonzero(block[i] == _plane(plane, rest, block_info[0]["shape"]))
        for i, plane in enumerate(range(*planes))
    )
    return np.full((1, 1, 1), right, "i8")


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
    x = redistribute(indexed_field(shape, Slab.X, n), Slab.X, client=client).persist()
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
        "Dask p2p": lambda given: given.rechunk(chunks, method="p2p"),
        "Dask tasks": lambda given: given.rechunk(chunks, method="tasks"),
        OURS: lambda given: redistribute(given, target, client=client),
    }
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    made: list[da.Array] = []
    enough = time.monotonic() + ENOUGH
    for turn in range(ROUNDS + 1):
        if turn > 1 and time.monotonic() > enough:
            break
        while made:
            _let_go(client, made.pop())
        for way, seconds in taken.items():
            # Each way gets an input of its own: Dask's ways leave copies of chunks on other
            # ranks, which would spare the next one the transfer.
            given = redistribute(x, source, client=client).persist()
            wait(given)
            if way == COPY:
                seconds.append(_copy(client, x, given))
            else:
                took, y = _timed(makers[way], given)
                seconds.append(took)
                if way == OURS:
                    made.append(y)
                else:
                    _let_go(client, y)
            _let_go(client, given)
            tick()
    medians = {way: float(median(seconds[1:])) for way, seconds in taken.items()}
    step = Step(repr(source), repr(target), int(x.nbytes), len(taken[OURS][1:]), medians)
    return step, made[0]


def _timed(make: Callable[[da.Array], da.Array], given: da.Array) -> tuple[float, da.Array]:
    """Seconds from persisted input to persisted output, and the output."""
    start = time.perf_counter()
    with dask.config.set({"distributed.p2p.storage.disk": False}):
        y = make(given).persist()
    wait(y)
    seconds = time.perf_counter() - start
    for future in futures_of(y):
        if future.status == "error":
            future.result()
    return seconds, y


def _let_go(client: Client, y: da.Array) -> None:
    """Release an array and wait until no rank holds it, so that its memory is there again."""
    for future in futures_of(y):
        future.release()
    deadline = time.monotonic() + 30
    while any(client.run(_chunks, y.name).values()):
        if time.monotonic() > deadline:
            raise RunTimeoutError(f"ranks still hold {y.name}, 30 s after it was released")
        time.sleep(0.005)


def _chunks(name: str, dask_worker: Any = None) -> dict[tuple[int, ...], Any]:
    """The keys of an array's chunks on a worker, by index."""
    return {k[1:]: k for k in dask_worker.data if isinstance(k, tuple) and k[0] == name}


def _copy(client: Client, x: da.Array, given: da.Array) -> float:
    """Seconds in which all ranks at once copy their chunks into warm memory of their own."""
    copied, starts, ends = zip(*client.run(_copy_here, x.name, given.name).values(), strict=True)
    if sum(copied) != x.nbytes:
        raise RedistError(f"{sum(copied)} of {x.nbytes} bytes were copied: a chunk is not there")
    # One clock for all processes of a machine.
    return float(max(ends) - min(starts))


def _copy_here(name: str, into: str, dask_worker: Any = None) -> tuple[int, float, float]:
    data, mine, theirs = dask_worker.data, _chunks(name, dask_worker), _chunks(into, dask_worker)
    pairs = [(data[theirs[i]], data[mine[i]]) for i in mine.keys() & theirs.keys()]
    start = time.monotonic()
    for to, what in pairs:
        np.copyto(to, what)
    return sum(to.nbytes for to, _ in pairs), start, time.monotonic()
