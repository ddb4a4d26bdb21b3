"""A pytest plugin that runs Dask's tests and notes what their rechunks and reductions became.

What a test computes without naming a scheduler goes, by the pass, to

- ``record``: Dask as it is, in this process;
- ``hook``: two ranks, with ``dr.enable(policy="always")`` around each test;
- ``stock``: the same two workers, without the hook.

Of each test is noted: its outcome; each rechunk that really changed the chunks and each reduction,
with the fact, if there is one, for which no collective can be expected of it; and the collectives
that ran.

With the hook, a test's reductions go one of three ways, by a hash of its name: small ones are
gathered, as by default; all with fewer results than ranks are runs; or all with fewer than 16 are,
with ``deterministic=True``. In runs the ranks cut partials that are larger than a few numbers.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import dask.array as da
import dask.array.utils
import numpy as np
import pytest
from cluster import Clusters, leftovers
from dask._expr import Expr, HLGExpr
from dask._task_spec import Task
from dask.core import flatten
from dask.delayed import Delayed
from dask.local import get_sync
from distributed import Client, Scheduler
from facts import Change, Facts, Notes, reason, why_not_reduced
from waiting import until

import dask_redist as dr
from dask_redist import deposits, lower
from dask_redist.layer import RedistributeLayer
from dask_redist.reducehook import NAMES, ReduceHook
from dask_redist.reducing import ReduceTask
from dask_redist.reduction import Merge

RANKS = 2
PASSES = ("record", "hook", "stock")
#: how reductions are lowered: ``SMALL`` and ``MANY`` of `lower`, and whether deterministic
WAYS = (
    (lower.SMALL, lower.MANY, False),
    (0, lower.MANY, False),
    (0, 16, True),
)


class Watch:
    """Sees each rechunk and each graph that goes to the cluster."""

    def __init__(self) -> None:
        self.facts = Facts()
        self.client: Client | None = None
        self._depth = 0

    def rechunk(self, original: Callable[..., da.Array]) -> Callable[..., da.Array]:
        """Dask's rechunk, watched."""

        def rechunk(x: da.Array, chunks: Any = "auto", *args: Any, **kwargs: Any) -> da.Array:
            self._depth += 1
            try:
                y = original(x, chunks, *args, **kwargs)
            finally:
                self._depth -= 1
            if self._depth == 0 and y is not x and not _same(x.chunks, y.chunks):
                method = kwargs.get("method", args[3] if len(args) > 3 else None)
                made = isinstance(y.dask.layers.get(y.name), RedistributeLayer)
                self.facts.changes.append(Change(y.name, reason(x, y, method), made))
            return y

        return rechunk

    def tree_reduce(self, original: Callable[..., da.Array]) -> Callable[..., da.Array]:
        """Where Dask's reductions end, its own function or the hook, watched."""

        @functools.wraps(original)
        def tree_reduce(*args: Any, **kwargs: Any) -> da.Array:
            y = original(*args, **kwargs)
            arguments = [arg for arg in args if not isinstance(arg, ReduceHook)]
            x, _, axis, *_ = lower.Tree(*arguments, **kwargs)
            made = _reduced_by(y)
            self.facts.reductions.append(
                Change(y.name, why_not_reduced(x, axis), made != "Dask", run=made == "a run")
            )
            return y

        return tree_reduce

    def get(self, expr: Any, keys: Any, **kwargs: Any) -> Any:
        """A scheduler that computes here what nobody names a scheduler for, watched."""
        self._see(expr)
        return get_sync(expr, keys, **kwargs)

    def submit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A client's way to its scheduler, watched."""

        def submit(client: Client, expr: Any, *args: Any, **kwargs: Any) -> Any:
            if client is self.client:
                self._see(expr)
            return original(client, expr, *args, **kwargs)

        return submit

    def _see(self, expr: Any) -> None:
        steps = [*self.facts.changes, *self.facts.reductions]
        if any(not step.computed for step in steps):
            names = _arrays(expr)
            for step in steps:
                step.computed |= step.name in names


def _reduced_by(y: da.Array) -> str:
    """Who makes the result of a reduction: "Dask", "one task" or "a run"."""
    task = y.dask.layers[y.name].get(next(flatten(y.__dask_keys__())))
    if isinstance(task, ReduceTask):
        return "a run"
    return "one task" if isinstance(task, Task) and task.func is Merge.result else "Dask"


def _same(old: Any, new: Any) -> bool:
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(old, new, strict=True))


def _arrays(expr: Any) -> set[str]:
    """Names of the arrays of which an expression computes something."""
    if not isinstance(expr, Expr):  # a graph, optimised
        return {key[0] for key in expr if isinstance(key, tuple)}
    found: set[str] = set()
    for part in expr.walk():
        if isinstance(part, HLGExpr):
            needed = part.hlg.cull(set(flatten(part.__dask_keys__())))
            found |= {key[0] for key in needed if isinstance(key, tuple)}
    return found


def forget(client: Client) -> list[str]:
    """Leave nothing of a test on the cluster: some give different arrays the same name.

    Returns the names of tasks that did not go.
    """
    # A failure holds the frames of the test, and they the futures.
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)
    for state in client.futures.values():
        if state.exception is not None:
            state.exception.__traceback__ = None
    if client.futures:
        gc.collect()
    left: list[str] = client.run_on_scheduler(_forget_tasks)
    return left


async def _forget_tasks(dask_scheduler: Scheduler) -> list[str]:
    """Wait for tasks to go; what nobody has ever wanted, Dask keeps."""
    deadline = time.monotonic() + 10
    while (tasks := dask_scheduler.tasks) and time.monotonic() < deadline:
        idle = {key: "forgotten" for key, ts in tasks.items() if ts.state == "released"}
        dask_scheduler.transitions(idle, stimulus_id="forget-tests")  # type: ignore[arg-type]
        await asyncio.sleep(0.002)
    return sorted({str(key) for key in tasks})


def _cut_all_but_the_smallest() -> None:
    deposits.INLINE, deposits.WHOLE = 64, 0


class Conformance:
    """The plugin for one pass."""

    def __init__(self, which: str, notes: Path) -> None:
        self.which, self.path = which, notes
        self.clusters, self.watch, self.notes = Clusters(), Watch(), Notes()
        self._last_run = 0

    # ------------------------------------------------------------------------- the session
    def pytest_sessionfinish(self) -> None:
        if (client := self.watch.client) is not None:
            gc.collect()
            with suppress(AssertionError):
                until(lambda: not leftovers(client))
            if held := leftovers(client):
                self.notes.faults.append(f"after the last test ranks hold something: {held}")
        self.clusters.close()
        self.notes.write(self.path)

    # ---------------------------------------------------------------------------- each test
    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        slow = item.get_closest_marker("slow") is not None
        self.facts = self.watch.facts = self.notes.tests[item.nodeid] = Facts(slow=slow)
        random.seed(item.nodeid)  # some draw what they do
        if self.which == "record":
            return (yield)
        client = self.clusters.client(RANKS)
        if self.watch.client not in (None, client):
            self.notes.faults.append(f"{item.nodeid} finds that workers are gone")
            self._last_run = 0
        if self.watch.client is not client:
            client.run(_cut_all_but_the_smallest)
        self.watch.client = client
        way = zlib.crc32(item.nodeid.encode()) % len(WAYS)
        lower.SMALL, lower.MANY, deterministic = WAYS[way]
        try:
            if self.which == "stock":
                return (yield)
            with dr.enable(policy="always", deterministic=deterministic):
                return (yield)
        finally:
            if left := forget(client):
                self.notes.faults.append(f"{item.nodeid} leaves tasks on the cluster: {left}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        facts = self.facts
        if report.skipped:
            facts.outcome = "xfailed" if hasattr(report, "wasxfail") else "skipped"
        elif report.failed:
            facts.outcome = "failed"
        if isinstance(report.longrepr, tuple):  # of a skip
            facts.text = report.longrepr[2]
        elif report.longrepr is not None:
            facts.text = report.longreprtext
        steps = [*facts.changes, *facts.reductions]
        if report.when == "teardown" and any(s.computed and s.collective and s.run for s in steps):
            facts.made = self._made()

    def _made(self) -> list[str]:
        """Names of the arrays whose collectives published since it was asked last."""
        reports = [r for r in dr.runs(client=self.watch.client) if r.number > self._last_run]
        self._last_run = max([self._last_run, *(r.number for r in reports)])
        return sorted({r.name for r in reports if r.state == "published"})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pass", dest="which", choices=PASSES, help="with or without the hook")
    parser.addoption("--notes", type=Path, help="file for what was seen")


def pytest_configure(config: pytest.Config) -> None:
    which = config.getoption("which")
    plugin = Conformance(which, config.getoption("notes"))
    config.pluginmanager.register(plugin)
    watch = plugin.watch
    # The name dask.array.rechunk stands for the function.
    module: Any = importlib.import_module("dask.array.rechunk")
    module.rechunk = da.rechunk = watch.rechunk(module.rechunk)
    if which == "record":
        kinds: tuple[Any, ...] = (da.Array, Delayed)
        for kind in kinds:
            kind.__dask_scheduler__ = staticmethod(watch.get)
        for module in NAMES:
            module._tree_reduce = watch.tree_reduce(module._tree_reduce)
    elif which == "hook":
        hook: Any = ReduceHook
        hook.__call__ = watch.tree_reduce(hook.__call__)
    clients: Any = Client
    clients._graph_to_futures = watch.submit(clients._graph_to_futures)
    # Dask's tests compare with scheduler="sync"; here, where everything else is computed.
    assert_eq: Any = dask.array.utils.assert_eq
    *others, scheduler = assert_eq.__defaults__
    if scheduler != "sync":
        raise pytest.UsageError(f'assert_eq computes on {scheduler!r}, not "sync", by default')
    assert_eq.__defaults__ = (*others, None)
