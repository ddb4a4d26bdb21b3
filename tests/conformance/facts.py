"""What is noted of each test in a pass: its outcome, its changes of chunks, its reductions."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np

#: a change that leads back to the array from which the last one came; seen with the hook only
BACK = "there and back again"


@dataclass
class Change:
    """A rechunk that really changed the chunks, or a reduction."""

    #: of the array that it made
    name: str
    #: the fact for which it cannot be expected to be ours; None where it is to be
    reason: str | None
    #: whether the array is ours, should it be computed
    collective: bool
    #: whether it was, on the default client
    computed: bool = False
    #: whether it takes a run
    run: bool = True


@dataclass
class Facts:
    """What was seen of one test."""

    #: passed, failed, skipped or xfailed
    outcome: str = "passed"
    #: why
    text: str = ""
    #: Dask marks it as slow
    slow: bool = False
    changes: list[Change] = field(default_factory=list)
    reductions: list[Change] = field(default_factory=list)
    #: names of the arrays that collectives made
    made: list[str] = field(default_factory=list)


@dataclass
class Notes:
    """What was seen in a pass."""

    #: by the names that pytest gives
    tests: dict[str, Facts] = field(default_factory=dict)
    #: what is wrong with the pass, in words
    faults: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Keep the notes."""
        path.write_text(json.dumps(asdict(self)))


def read(path: Path) -> Notes:
    """The notes that were kept."""
    notes = Notes(**json.loads(path.read_text()))
    found: dict[str, Any] = dict(notes.tests)
    for name, facts in found.items():
        for kind in ("changes", "reductions"):
            facts[kind] = [Change(**step) for step in facts[kind]]
        notes.tests[name] = Facts(**facts)
    return notes


def why_not_reduced(x: da.Array, axis: tuple[int, ...]) -> str | None:
    """The fact for which a reduction of the partials ``x`` need not be ours."""
    if not isinstance(x._meta, (np.ndarray, np.generic)):
        return f"the partials are of type {type(x._meta).__name__}"
    if all(x.numblocks[a] == 1 for a in axis):
        return "there is one chunk along the reduced axes"
    return None


def reason(x: da.Array, y: da.Array, method: str | None) -> str | None:
    """The fact for which a rechunk of ``x``, which gave ``y``, can be no collective."""
    configured = dask.config.get("array.rechunk.method", None)
    if method == "tasks" or (method is None and configured == "tasks"):
        return 'the test asks for method="tasks"'
    if any(np.isnan(size) for sizes in x.chunks for size in sizes):
        return "chunk sizes are unknown"
    if x.size == 0:
        return "the array has no elements"
    if x.dtype.hasobject:
        return "the elements are Python objects"
    if type(x._meta) is not np.ndarray:
        return f"the chunks are of type {type(x._meta).__name__}"
    return BACK if y.name in x.dask.layers else None
