"""Unmodified Dask reductions as one collective reduce: what stands in for Dask's tree.

Every reduction of Dask makes an array of partials and hands it to one function, ``_tree_reduce``.
What stands in for it builds, for each chunk of the result, one of two graphs:

- *reduced*: where a few large results are made of large partials, each partial is contributed to a
  run (fused with what makes it), the ranks merge a cut each, and the fence of the run is the result
  (:mod:`dask_redist.deposits`);
- *gathered*: where partials are small, or where there are results for all ranks anyway, one task
  gathers the partials of a result, or a few levels of such tasks where they are many.

Either way there are n_in + n_out tasks, or a few more where there are levels.

A reduction straight after a change of layout starts from what was laid out: the change is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from math import ceil, log, prod
from numbers import Integral
from typing import Any, NamedTuple

import dask
import dask.array as da
import numpy as np
from dask._task_spec import GraphNode, List, Task, TaskRef
from dask.blockwise import Blockwise
from dask.highlevelgraph import HighLevelGraph, Layer, MaterializedLayer
from dask.tokenize import tokenize
from dask.utils import funcname
from distributed.protocol import pickle

from dask_redist.connect import Ranks
from dask_redist.families import Family, as_if_moved, family, is_dasks
from dask_redist.layer import RedistributeLayer
from dask_redist.pairs import Extremes
from dask_redist.reducing import ReduceTask, as_it_is, contribute_step, reduce
from dask_redist.reduction import Merge, Reduction
from dask_redist.spec import Index
from dask_redist.steps import by_step, function_of, like

#: bytes of a result's partials up to which one task gathers them: sooner than a run has begun
SMALL = 16 << 20
#: bytes that one task gathers at most, where partials are many
GATHERED = 64 << 20
#: partials that one task gathers at most and at least
MOST, LEAST = 100, 4
#: share of all ranks' memory that the partials of a result may have in a run
ROOM = 1 / 8
#: results from which ranks have one each, and bytes of partials up to which there is a run, where
#: the ranks must not matter
MANY, BULK = 8, 1 << 30


class Tree(NamedTuple):
    """What Dask hands to ``_tree_reduce``."""

    x: da.Array
    aggregate: Callable[..., Any]
    axis: Index
    keepdims: bool
    dtype: Any
    split_every: Any = None
    combine: Callable[..., Any] | None = None
    name: str | None = None
    concatenate: bool = True
    reduced_meta: Any = None


def lower(
    tree: Tree, original: Callable[..., da.Array], ranks: Ranks, deterministic: bool
) -> da.Array:
    """A reduction as ranks make it.

    Parameters
    ----------
    tree
        The reduction.
    original
        Dask's function: the chunks and meta of what it makes are those of the result.
    ranks
        The ranks.
    deterministic
        Whether the result must have the same bits on any number of ranks.
    """
    kind = family(tree.aggregate, tree.combine, tree.dtype)
    one_step = {a: max(tree.x.numblocks[a], 2) for a in tree.axis}
    meta = None if np.dtype(tree.dtype).kind == "m" else tree.reduced_meta
    plain = original(
        *tree._replace(aggregate=kind.aggregate, split_every=one_step, reduced_meta=meta)
    )
    if kind.is_known and not deterministic:  # whether there is a change depends on the ranks
        tree = _before_relayout(tree)
    lowering = _Lowering(tree, kind, ranks, deterministic)
    graph = lowering.gathered() if lowering.is_gathered else lowering.reduced()
    chunks = _result_chunks(tree)
    found = da.Array(graph, lowering.name, chunks, meta=plain._meta, dtype=plain.dtype)
    return found if _same(chunks, plain.chunks) else found.rechunk(plain.chunks, method="tasks")


def _split_every(tree: Tree) -> dict[int, int]:
    """Partials that Dask would merge at once along each reduced axis.

    Raises
    ------
    ValueError
        Dask's own, where there is no such number.
    """
    split = tree.split_every or dask.config.get("split_every", 4)
    if isinstance(split, dict):
        return {a: split.get(a, 2) for a in tree.axis}
    if isinstance(split, Integral):
        return dict.fromkeys(tree.axis, max(int(split ** (1 / (len(tree.axis) or 1))), 2))
    raise ValueError("split_every must be a int or a dict")


def _same(these: Any, those: Any) -> bool:
    """Whether chunks are equal; unknown sizes are."""
    return len(these) == len(those) and all(
        np.array_equal(a, b, equal_nan=True) for a, b in zip(these, those, strict=True)
    )


def _result_chunks(tree: Tree) -> Any:
    chunks = [(1,) if a in tree.axis else sizes for a, sizes in enumerate(tree.x.chunks)]
    if tree.keepdims:
        return tuple(chunks)
    return tuple(sizes for a, sizes in enumerate(chunks) if a not in tree.axis)


def _before_relayout(tree: Tree) -> Tree:
    """The reduction of what a change of layout started from, where partials are plainly made."""
    x = tree.x
    layer = x.dask.layers[x.name]
    if not isinstance(layer, Blockwise) or len(layer.indices) != 1 or layer.io_deps:
        return tree
    ((source, indices),) = layer.indices
    change = x.dask.layers.get(source)
    if not isinstance(change, RedistributeLayer) or indices != layer.output_indices:
        return tree
    fewer = change.copied or prod(map(len, change.chunks_in)) < change.ranks
    if fewer or not is_dasks(layer.task.func):  # users may mean these very chunks
        return tree
    token = tokenize(x.name, change.name_input)
    name = f"{funcname(layer.task.func)}-{token}"
    blocks = tuple(map(len, change.chunks_in))
    made = like(layer, name, layer.task.func, [(change.name_input, indices)])
    made.numblocks = {change.name_input: blocks}
    layers = {k: v for k, v in x.dask.layers.items() if k != x.name} | {name: made}
    needs = {k: v for k, v in x.dask.dependencies.items() if k != x.name}
    graph = HighLevelGraph(layers, needs | {name: {change.name_input}})
    chunks = tuple(
        (1,) * len(sizes) if a in tree.axis else sizes for a, sizes in enumerate(change.chunks_in)
    )
    return tree._replace(x=da.Array(graph, name, chunks, meta=x._meta))


class _Lowering:
    """One reduction on its way into a graph."""

    def __init__(self, tree: Tree, kind: Family, ranks: Ranks, deterministic: bool) -> None:
        self.tree, self.kind, self.deterministic = tree, kind, deterministic
        self.ranks = ranks.size
        self._room = ROOM * sum(seat.memory_limit for seat in ranks.seats)
        x = tree.x
        self.axis = tuple(sorted(tree.axis))
        self.kept = tuple(a for a in range(x.ndim) if a not in self.axis)
        self.lengths = tuple(x.numblocks[a] for a in self.axis)
        self.line = list(product(*map(range, self.lengths)))
        self.indices = list(product(*(range(x.numblocks[a]) for a in self.kept)))
        prefix = (tree.name or funcname(tree.aggregate)).removesuffix("_agg").strip("_")
        self._prefix = prefix or "reduction"
        self._token = tokenize(
            x.name,
            *(tree.aggregate, tree.combine, tree.axis, tree.keepdims, tree.dtype),
            *(tree.concatenate, self.may_combine, deterministic, self.is_gathered or self.ranks),
        )
        step = "aggregate" if self.is_gathered else "reduce"
        self.name = f"{self._prefix}-{step}-{self._token}"

    # --------------------------------------------------------------------------- which graph
    @property
    def is_gathered(self) -> bool:
        """Whether one task gathers the partials of a result."""
        many, room = (MANY, BULK) if self.deterministic else (self.ranks, self._room)
        held = len(self.line) * self.nbytes
        # Partials of a run are no chunks: Dask cannot spill them, nor does it know of them.
        is_much = held > room and (self.deterministic or not self.kind.commutes)
        return len(self.indices) >= many or held <= SMALL or is_much

    @property
    def nbytes(self) -> float:
        """Bytes of the largest partial, about; infinite where sizes are unknown."""
        sizes = (max(self.tree.x.chunks[a], default=0) for a in self.kept)
        count = prod(float(size) for size in sizes)
        return count * np.dtype(self.tree.dtype).itemsize if count == count else float("inf")

    @property
    def may_combine(self) -> bool:
        """Whether the functions are made for partials of partials."""
        split = _split_every(self.tree)
        steps = [
            log(n, split[a])
            for a, n in zip(self.axis, self.lengths, strict=True)
            if n > 1 and split[a] > 1
        ]
        depth = max(map(ceil, steps), default=1)
        return self.kind.is_known or self.tree.combine is not None or depth > 1

    @property
    def merge(self) -> Merge:
        """How partials are merged."""
        kind, tree = self.kind, self.tree
        # Of equal extremes the first in the line is the first in the array along one axis only.
        pair = None if isinstance(kind.pair, Extremes) and len(self.axis) > 1 else kind.pair
        return Merge(self.axis, tree.keepdims, kind.aggregate, kind.combine, tree.concatenate, pair)

    def _source(self, index: Index, place: Index) -> Index:
        """The index of a partial: that of its result, and its place in the line."""
        found = dict(zip(self.kept, index, strict=True)) | dict(zip(self.axis, place, strict=True))
        return tuple(found[a] for a in range(self.tree.x.ndim))

    def _result_key(self, index: Index) -> Any:
        if not self.tree.keepdims:
            return (self.name, *index)
        return (self.name, *self._source(index, (0,) * len(self.axis)))

    def _step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What makes a partial, of the function that Dask has for it."""
        step = self.kind.mend(function)
        return partial(as_if_moved, step) if self.deterministic else step

    # ----------------------------------------------------------------------------- gathered
    def gathered(self) -> HighLevelGraph:
        """One task a result, or a few levels."""
        partials, layers, needs = self._mended()
        graph: dict[Any, GraphNode] = {}
        merge, size = self.merge, max(LEAST, int(min(MOST, GATHERED // max(self.nbytes, 1))))
        for index in self.indices:
            keys: dict[Index, Any] = {p: (partials, *self._source(index, p)) for p in self.line}
            lengths, level = self.lengths, 0
            while len(keys) > size and self.may_combine:
                steps = _steps(lengths, size)
                boxes: dict[Index, list[Any]] = {}
                for place, key in keys.items():
                    box = tuple(p // s for p, s in zip(place, steps, strict=True))
                    boxes.setdefault(box, []).append(TaskRef(key))
                keys = {}
                for number, (box, refs) in enumerate(boxes.items()):
                    key = (f"{self._prefix}-combine-{self._token}", level, number, *index)
                    each = zip(box, steps, lengths, strict=True)
                    shape = tuple(min(s, n - b * s) for b, s, n in each)
                    graph[key] = Task(key, Merge.combined, merge, List(*refs), False, shape)
                    keys[box] = key
                lengths = tuple(-(-n // s) for n, s in zip(lengths, steps, strict=True))
                level += 1
            key = self._result_key(index)
            last = List(*map(TaskRef, keys.values()))
            graph[key] = Task(key, Merge.result, merge, last, lengths)
        layers[self.name] = MaterializedLayer(graph)
        return HighLevelGraph(layers, needs | {self.name: {partials}})

    def _mended(self) -> tuple[str, dict[str, Layer], dict[str, set[str]]]:
        """The partials by functions that are put right: their name, and a graph that has them."""
        x = self.tree.x
        function = function_of(x)
        if function is None or (mended := self._step(function)) is function:
            return x.name, dict(x.dask.layers), dict(x.dask.dependencies)
        name = f"{x.name.rpartition('-')[0]}-{self._token}"
        return name, *by_step(x, name, mended)

    # ------------------------------------------------------------------------------ reduced
    def reduced(self) -> HighLevelGraph:
        """Contributions, and a fence for each result."""
        made = self.tree.x.name.rpartition("-")[0] or self._prefix
        name = f"{made}-contribute-{self._token}"
        layers, needs = self._contributions(name)
        ahead = "none"
        # A user's partials need not have length one along reduced axes: boxes of the grid only.
        is_flat = self.kind.is_known or all(n == 1 for n in self.lengths[1:])
        # NaN among objects has no order: what is least depends on how partials are paired.
        is_ordered = not self.kind.is_known or np.dtype(self.tree.dtype).kind != "O"
        if self.may_combine and is_flat and is_ordered and not self.deterministic:
            ahead = "any" if self.kind.commutes else "neighbours"
        spec = Reduction(
            name=self.name,
            index=(),
            axis=self.axis,
            grid=self.tree.x.numblocks,
            owner=0,
            ranks=self.ranks,
            ahead=ahead,
            cuttable=self.kind.is_known,
            deterministic=self.deterministic,
            merging=pickle.dumps(self.merge),
        )
        graph: dict[Any, GraphNode] = {}
        for number, index in enumerate(self.indices):
            owner = number * self.ranks // len(self.indices)
            part, key = replace(spec, index=index, owner=owner), self._result_key(index)
            keys: list[Any] = [(name, *self._source(index, place)) for place in self.line]
            graph[key] = ReduceTask(key, reduce, part, key, List(*(TaskRef(k) for k in keys)))
        layers[self.name] = MaterializedLayer(graph)
        return HighLevelGraph(layers, needs | {self.name: {name}})

    def _contributions(self, name: str) -> tuple[dict[str, Layer], dict[str, set[str]]]:
        """A graph that has the contributions: the steps that make partials, contributing them."""
        x = self.tree.x
        kept = self.kept
        if self.tree.keepdims:
            kept = tuple(-1 if a in self.axis else a for a in range(x.ndim))
        function = function_of(x)
        step = as_it_is if function is None else self._step(function)
        return by_step(x, name, partial(contribute_step, self.name, kept, step), indexed=True)


def _steps(lengths: Index, size: int) -> Index:
    """How many partials to merge at once along each axis: a box of places that follow each other.

    Examples
    --------
    >>> _steps((5, 3), 2), _steps((5, 3), 7)
    ((1, 2), (2, 3))
    """
    steps = []
    for length in reversed(lengths):
        steps.append(min(length, size))
        size = max(size // length, 1)
    return tuple(reversed(steps))
