"""What ``dask-redist bench`` measures: changes of layout, by all ways, from memory to memory.

Ways take turns in every round (A B A B ...), each with a fresh input, and figures are medians of
the rounds after the first. What each way makes first is checked: every element is its own index.

``ours`` is the hook with ``policy="always"``, ``auto`` the default policy; ``p2p`` (in memory, and
over the disk) and ``tasks`` are Dask's. Two ways move nothing. The ``graph`` has the keys and the
dependencies of ours and its tasks do nothing: what Dask takes for that many tasks. The ``copy`` is
all ranks copying as many bytes at once. Their sum is the *floor*: what a change of layout that is
made of so many Dask tasks has to take.
"""

from __future__ import annotations

import importlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import product
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import dask.array as da
import numpy as np
from dask._task_spec import Task, TaskRef
from dask.highlevelgraph import HighLevelGraph
from distributed import Client, wait
from numpy.typing import NDArray

from dask_redist.boxes import Chunks
from dask_redist.connect import Ranks
from dask_redist.errors import RedistError
from dask_redist.field import Shape, count_right, indexed_field
from dask_redist.grids import Layout, Pencil, Slab
from dask_redist.hook import enable
from dask_redist.planning import runs
from dask_redist.race import Timed, by_p2p, by_tasks, copy, let_go, timed
from dask_redist.relayout import redistribute

OURS, AUTO = "ours", "auto"
P2P, DISK, TASKS = "p2p", "p2p disk", "tasks"
GRAPH, COPY = "graph", "copy"
WAYS = (OURS, AUTO, P2P, DISK, TASKS, GRAPH, COPY)
#: bytes of a field whose size nobody gave: the largest of these that fits
SIZES = tuple(mib * 2**20 for mib in (1024, 512, 256, 128, 64, 32))
#: fields that have to be in memory at once
FIELDS = 6
#: seconds after which a change begins no further round, once it has one
ENOUGH = 60.0

Maker = Callable[[da.Array, Chunks], da.Array]


@dataclass(frozen=True)
class Change:
    """A change of layout: the chunks of a float64 field before and after."""

    name: str
    before: Chunks
    after: Chunks

    @property
    def nbytes(self) -> int:
        """Bytes of the field."""
        return 8 * prod(map(sum, self.before))

    def __str__(self) -> str:
        n_in, n_out = (prod(map(len, chunks)) for chunks in (self.before, self.after))
        return f"{self.name} {n_in}:{n_out}"


@dataclass
class Result:
    """What one change took: median seconds of each way, and where ours went, in seconds."""

    change: str
    ranks: int
    nbytes: int
    rounds: int
    seconds: dict[str, float]
    stages: dict[str, float] = field(default_factory=dict)

    @property
    def floor(self) -> float:
        """Seconds that the graph alone and a copy of the bytes take."""
        return self.seconds[GRAPH] + self.seconds[COPY]

    @property
    def ratio(self) -> float:
        """How many times as fast as the faster of Dask's ways in memory."""
        return min(self.seconds[P2P], self.seconds[TASKS]) / self.seconds[OURS]

    @property
    def over_floor(self) -> float:
        """Our time over the floor."""
        return self.seconds[OURS] / self.floor

    def as_json(self) -> dict[str, Any]:
        """All that, and the two figures that it comes to."""
        return asdict(self) | {"over_dask": self.ratio, "over_floor": self.over_floor}


# ---------------------------------------------------------------------------------- the size
def room(ranks: Ranks) -> int:
    """Bytes of the largest field that fits in the memory of the ranks."""
    return sum(seat.memory_limit for seat in ranks.seats) // FIELDS


def largest(ranks: Ranks) -> int:
    """The largest of `SIZES` that fits; the smallest where none does."""
    return next((nbytes for nbytes in SIZES if nbytes <= room(ranks)), SIZES[-1])


# ------------------------------------------------------------------------------- the changes
def changes(nbytes: int, ranks: int, many: int = 32) -> list[Change]:
    """Changes of a field of about ``nbytes``: with a chunk a rank, with ``many``, and of slices.

    Examples
    --------
    >>> for change in changes(512 * 2**20, 4)[::4]:
    ...     print(change)
    Slab.X -> Slab.Y 4:4
    Slab.X -> Slab.Y 32:32
    slices -> series 512:128
    """
    n = max(32, round((nbytes / 4) ** (1 / 3)))
    even, uneven = (n, n, n // 2), (n - 3, n - 25, n // 2 - 5)
    found = []
    for count in dict.fromkeys((ranks, many)):
        found += [
            _between(Slab.X, Slab.Y, even, count),
            _between(Slab.X, Slab.Z, even, count),
            _between(Slab.X, Pencil.Y, even, count),
            _between(Slab.X, Slab.Y, uneven, count, "uneven "),
        ]
    side = max(1, n // 16)
    slices = da.core.normalize_chunks((1, -1, -1), even, dtype="f8")
    series = da.core.normalize_chunks((-1, side, side), even, dtype="f8")
    found.append(Change("slices -> series", slices, series))
    return [change for change in found if change.before != change.after]


def _between(source: Layout, target: Layout, shape: Shape, count: int, kind: str = "") -> Change:
    name = f"{kind}{_short(source)} -> {_short(target)}"
    return Change(name, source.chunks(shape, count), target.chunks(shape, count))


def _short(layout: Layout) -> str:
    return repr(layout).split(" ")[0]


# ---------------------------------------------------------------------------------- the ways
def _hooked(x: da.Array, chunks: Chunks, policy: str) -> da.Array:
    with enable(policy=policy):
        y: da.Array = x.rechunk(chunks)
    return y


def _graph_alone(x: da.Array, chunks: Chunks) -> da.Array:
    """The keys and dependencies of ours, with tasks that do nothing."""
    y = redistribute(x, chunks)
    name = f"no-op-{y.name}"

    def renamed(key: Any) -> Any:
        if isinstance(key, tuple):
            return key if key[0] == x.name else (f"no-op-{key[0]}", *key[1:])
        return f"no-op-{key}"

    layer: Any = y.dask.layers[y.name]
    tasks = {
        renamed(key): Task(renamed(key), _nothing, *map(TaskRef, map(renamed, task.dependencies)))
        for key, task in layer.items()
    }
    needs: list[Any] = [x]
    graph = HighLevelGraph.from_collections(name, tasks, needs)
    z: da.Array = da.Array(graph, name, y.chunks, meta=y._meta)
    return z


def _nothing(*_: Any) -> NDArray[np.float64]:
    return np.empty((0, 0, 0))


MAKERS: dict[str, Maker] = {
    OURS: partial(_hooked, policy="always"),
    AUTO: partial(_hooked, policy="auto"),
    P2P: by_p2p,
    DISK: partial(by_p2p, disk=True),
    TASKS: by_tasks,
    GRAPH: _graph_alone,
}


# --------------------------------------------------------------------------------- measuring
def compare(
    client: Client, ranks: Ranks, change: Change, rounds: int, tick: Callable[[], object]
) -> Result:
    """All ways, in turns; ``tick`` is called after each.

    Raises
    ------
    RedistError
        An element is wrong.
    """
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    stages: dict[str, list[float]] = {}
    x = redistribute(indexed_field(change.before), change.before, client=client).persist()
    wait(x)
    enough = time.monotonic() + ENOUGH
    for turn, way in product(range(rounds + 1), WAYS):
        if turn > 1 and way == WAYS[0] and time.monotonic() > enough:
            break
        # Dask's ways leave copies of chunks on other ranks: each gets an input of its own.
        given = redistribute(x, change.before, client=client).persist()
        wait(given)
        if way == COPY:
            taken[way].append(copy(client, x, given))
        else:
            before = max(run.number for run in runs(client=client))
            with client.as_current():
                took = timed(MAKERS[way], given, change.after)
            taken[way].append(took.seconds)
            if turn == 0 and way != GRAPH:
                _check(client, took.made, way)
            let_go(client, took.made)
            if way == OURS and turn:
                for stage, spent in _stages(client, before, took).items():
                    stages.setdefault(stage, []).append(spent)
        let_go(client, given)
        tick()
    let_go(client, x)
    medians = {way: float(median(seconds[1:])) for way, seconds in taken.items()}
    where = {stage: float(median(seconds)) for stage, seconds in stages.items()}
    return Result(str(change), ranks.size, change.nbytes, len(taken[OURS]) - 1, medians, where)


def _check(client: Client, y: da.Array, way: str) -> None:
    if (right := count_right(client, y)) != y.size:
        raise RedistError(f"{way}: {y.size - right} of {y.size} elements are wrong")


def _stages(client: Client, before: int, took: Timed) -> dict[str, float]:
    """Seconds of each stage of the runs since one, summed over parts; of writing, over ranks."""
    found: Any = Counter({"build": took.build, "submit": took.submit})
    for run in runs(client=client):
        if run.number > before:
            found.update(run.seconds)
            found["writing"] += run.writing
    return dict(found)


# ------------------------------------------------------------------------------------ output
def require_matplotlib() -> None:
    """See that pictures can be drawn.

    Raises
    ------
    RedistError
        They cannot; says what to install.
    """
    if find_spec("matplotlib") is None:
        raise RedistError("a picture needs matplotlib: pip install 'dask-redist[bench]'")


def picture(results: list[Result], path: Path) -> None:
    """Draw seconds of each way as bars, a row of bars a change; see `require_matplotlib`."""
    figure_of = importlib.import_module("matplotlib.figure").Figure
    figure = figure_of(figsize=(9, 1 + 1.1 * len(results)), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(results))[::-1]
    shown = [way for way in WAYS if way not in (GRAPH, COPY)]
    for i, way in enumerate(shown):
        height = 0.8 / len(shown)
        seconds = [result.seconds[way] for result in results]
        axes.barh(places + 0.4 - (i + 0.5) * height, seconds, height, label=way)
    floors = [result.floor for result in results]
    axes.vlines(floors, places - 0.4, places + 0.4, "black", label=f"{GRAPH} + {COPY}")
    axes.set_yticks(places, [result.change for result in results])
    axes.set_xlabel(f"seconds on {results[0].ranks} ranks")
    axes.set_xscale("log")
    axes.legend()
    figure.savefig(path, dpi=120)
