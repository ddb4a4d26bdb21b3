"""The graph layer of one redistribution: contributions, one fence a part, takes.

Lazy and cullable. Keys are deterministic: the layer's name is made of the input's name, the target
chunks and the owners; a part of which only some outputs are wanted has the wanted set in the keys
of its contributions and its fence, never in the keys of its takes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy
from itertools import product
from math import prod
from typing import Any

import numpy as np
from dask._task_spec import Alias, GraphNode, List, Task, TaskRef
from dask.highlevelgraph import Layer
from dask.tokenize import tokenize
from numpy.typing import NDArray

from dask_redist.boxes import Chunks
from dask_redist.layouts import Layout
from dask_redist.overlap import Overlap, Part
from dask_redist.spec import Index, PartSpec, contribution_key, fence_key
from dask_redist.tasks import (
    CopyTask,
    Cut,
    FenceTask,
    OwnTask,
    assemble,
    contribute,
    local_copy,
    redistribute,
    take,
)

Graph = dict[Any, GraphNode]


class RedistributeLayer(Layer):
    """One redistribution in a graph.

    Parameters
    ----------
    name_input, chunks_in
        The array that is redistributed.
    chunks
        The chunks of the result.
    dtype
        Type of the elements.
    owners
        The rank of each output chunk, shaped like the chunk grid.
    layout
        The layout that the owners follow, or None where they may be chosen at run time.
    ranks
        How many ranks the owners are made for.
    simple
        Whether merges and splits of a few neighbours may be plain tasks; then owners are open.
    copied
        Whether every rank has the whole input: each owner copies its outputs from that.
    together
        Whether all parts are one run.
    keep
        Indices of the wanted output chunks; None for all.
    """

    def __init__(
        self,
        name_input: str,
        chunks_in: Chunks,
        chunks: Chunks,
        dtype: np.dtype[Any],
        owners: NDArray[np.int64],
        layout: Layout | None,
        ranks: int,
        simple: bool = False,
        copied: bool = False,
        together: bool = False,
        keep: frozenset[Index] | None = None,
        annotations: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(annotations=annotations)
        self.name_input = name_input
        self.chunks_in = chunks_in
        self.chunks = chunks
        self.dtype = dtype
        self.owners = owners
        self.layout = layout
        self.ranks = ranks
        self.simple = simple
        self.copied = copied
        self.keep = keep
        token = tokenize(
            *(name_input, chunks, layout, owners if layout else ranks),
            *(simple, copied, together),
        )
        self.name = f"redistribute-{token}"
        self.overlap = Overlap(chunks_in, chunks, together)
        self._graph: Graph | None = None

    def __repr__(self) -> str:
        return f"RedistributeLayer<{self.name}, {self.layout or 'owners open'}>"

    # ------------------------------------------------------------------- what Dask asks for
    def get_output_keys(self) -> set[Any]:
        """The keys of the wanted output chunks."""
        return {(self.name, *index) for index in self._kept()}

    def is_materialized(self) -> bool:
        """Whether the tasks have been made."""
        return self._graph is not None

    def __getitem__(self, key: Any) -> GraphNode:
        return self._dict[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dict)

    def __len__(self) -> int:
        return len(self._dict)

    def cull(
        self, keys: set[Any], all_keys: Collection[Any]
    ) -> tuple[RedistributeLayer, dict[Any, set[Any]]]:
        """The layer that makes only ``keys``, and which input chunks they need."""
        keep = frozenset(key[1:] for key in keys if isinstance(key, tuple) and key[0] == self.name)
        culled = copy(self)
        culled.keep = None if len(keep) == prod(map(len, self.chunks)) else keep
        culled._graph = None
        needs: dict[Any, set[Any]] = {}
        for part, wanted in culled._parts():
            for outputs in [[i] for i in wanted] if self._is_plain(part) else [wanted]:
                keys_out = [(self.name, *index) for index in outputs]
                needs.update((key, set()) for key in keys_out)
                # Dask unites all these sets, so one output speaks for those that need the same.
                needs[keys_out[0]] = {
                    (self.name_input, *index) for index in culled._inputs(part, outputs)
                }
        return culled, needs

    # ------------------------------------------------------------------------------- tasks
    @property
    def _dict(self) -> Graph:
        if self._graph is None:
            self._graph = {}
            for part, wanted in self._parts():
                if self._is_plain(part):
                    self._graph.update((key, task) for key, task in map(self._plain, wanted))
                else:
                    self._add(self._graph, part, wanted)
        return self._graph

    def _is_plain(self, part: Part) -> bool:
        """Whether a part is plain tasks, without a run."""
        return self.copied or (self.simple and part.is_simple)

    def _plain(self, index: Index) -> tuple[Any, GraphNode]:
        """The plain task that makes an output chunk."""
        key: Any = (self.name, *index)
        shape = tuple(c[i] for c, i in zip(self.chunks, index, strict=True))
        cuts, refs = [], []
        for piece in self.overlap.pieces_of_output(index):
            source = tuple(c[i] for c, i in zip(self.chunks_in, piece.chunk, strict=True))
            cuts.append(Cut(piece.chunk, source, piece.source, piece.target))
            source_key: Any = (self.name_input, *piece.chunk)
            refs.append(TaskRef(source_key))
        args = shape, self.dtype, self.name_input, cuts, List(*refs)
        if self.copied:
            return key, CopyTask(key, local_copy, int(self.owners[index]), self.ranks, *args)
        if len(cuts) == 1 and cuts[0].shape == shape:
            return key, Alias(key, refs[0])
        return key, Task(key, assemble, *args)

    def _kept(self) -> Iterable[Index]:
        if self.keep is not None:
            return self.keep
        return product(*(range(len(sizes)) for sizes in self.chunks))

    def _parts(self) -> Iterator[tuple[Part, list[Index]]]:
        """The parts of which something is wanted, and what."""
        parts = self.overlap.parts
        if self.keep is None:
            for part in parts:
                yield part, list(product(*part.outputs))
            return
        wanted: dict[Index, list[Index]] = {}
        for index in sorted(self.keep):
            wanted.setdefault(parts.part_of_output(index), []).append(index)
        for number, indices in wanted.items():
            yield parts[number], indices

    def _inputs(self, part: Part, wanted: list[Index]) -> list[Index]:
        """The input chunks that contribute to the wanted outputs of a part, in C order."""
        if len(wanted) == prod(map(len, part.outputs)):
            return list(product(*part.inputs))
        touched = sorted(self.overlap.touched_inputs(wanted))
        return touched or [next(product(*part.inputs))]  # only empty outputs: one names the run

    def _add(self, graph: Graph, part: Part, wanted: list[Index]) -> None:
        """Add the tasks of one part."""
        whole = len(wanted) == prod(map(len, part.outputs))
        fence = fence_key(self.name, part.index, None if whole else f"keep-{tokenize(wanted)}")
        spec = self.part_spec(part)
        refs = []
        for index in self._inputs(part, wanted):
            key = contribution_key(fence, index)
            chunk = TaskRef((self.name_input, *index))
            graph[key] = OwnTask(key, contribute, fence, index, chunk)
            refs.append(TaskRef(key))
        graph[fence] = FenceTask(fence, redistribute, spec, fence, List(*refs))
        for index in wanted:
            key = (self.name, *index)
            graph[key] = OwnTask(key, take, index, TaskRef(fence))

    def part_spec(self, part: Part) -> PartSpec:
        """What the fence of a part carries."""
        first_in = tuple(r.start for r in part.inputs)
        first_out = tuple(r.start for r in part.outputs)
        return PartSpec(
            name=self.name,
            name_input=self.name_input,
            chunks_in=_cut(self.chunks_in, part.inputs),
            chunks_out=_cut(self.chunks, part.outputs),
            first_in=first_in,
            first_out=first_out,
            dtype=self.dtype,
            owners=self.owners[tuple(slice(r.start, r.stop) for r in part.outputs)].ravel(),
            ranks=self.ranks,
            layout=self.layout,
        )


def _cut(chunks: Chunks, ranges: tuple[range, ...]) -> Chunks:
    return tuple(sizes[r.start : r.stop] for sizes, r in zip(chunks, ranges, strict=True))
