"""Plans: what a redistribution will move, before it runs; and reports of those that ran."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from html import escape
from math import prod
from typing import Any

import dask.array as da
import numpy as np
from dask.utils import format_bytes
from distributed import Client
from numpy.typing import NDArray

from dask_redist import config
from dask_redist.assign import assign
from dask_redist.boxes import Chunks
from dask_redist.connect import Ranks, ask_now, find_client, ranks_of
from dask_redist.errors import LayoutError
from dask_redist.inspection import is_replicated, owners
from dask_redist.layer import RedistributeLayer
from dask_redist.layouts import Replicated
from dask_redist.overlap import Overlap, RankPlan, rank_plan
from dask_redist.overlap import traffic as count_traffic
from dask_redist.placement import balanced
from dask_redist.relayout import Target, are_together, resolve, source_of, why_not
from dask_redist.reports import RunReport


@dataclass(frozen=True, eq=False)
class Plan:
    """What ``redistribute(x, layout)`` will do, as far as it can be known now.

    Attributes
    ----------
    target
        Chunks, owners and layout of the result.
    chunks_in
        Chunks of the input.
    owners_in
        The rank of each input chunk.
    assumed
        Whether ``owners_in`` is an assumption, because the input is not in memory yet.
    dtype
        Type of the elements.
    ranks
        The ranks.
    fallback
        Why Dask's own rechunk will be used instead; None if it will not.
    copied
        Whether every rank has the whole input and copies its outputs from that.
    together
        Whether all parts are one run.
    """

    target: Target
    chunks_in: Chunks
    owners_in: NDArray[np.int64]
    assumed: bool
    dtype: np.dtype[Any]
    ranks: Ranks
    fallback: str | None
    copied: bool = False
    together: bool = False

    @cached_property
    def overlap(self) -> Overlap:
        """The index map between the two chunkings."""
        return Overlap(self.chunks_in, self.target.chunks, self.together)

    @cached_property
    def traffic(self) -> NDArray[np.int64]:
        """Bytes from each rank (row) to each rank (column), (ranks, ranks)."""
        owners, ranks = self.target.owners, self.ranks.size
        if self.copied:
            elements = count_traffic(self.overlap, np.zeros_like(self.owners_in), owners, ranks)
            return np.diag(elements[0]) * self.dtype.itemsize
        elements = count_traffic(self.overlap, self.owners_in, owners, ranks)
        if isinstance(self.target.layout, Replicated):  # each copy gets what its owner gets
            held = self.target.layout.held_by(ranks)
            elements[:, held] = elements[:, held[:1]]
        return elements * self.dtype.itemsize

    @property
    def bytes_moved(self) -> int:
        """Bytes whose owner changes."""
        return int(self.traffic.sum() - np.trace(self.traffic))

    @property
    def bytes_total(self) -> int:
        """Bytes of the result, all copies of a replicated one counted."""
        return int(self.traffic.sum())

    @property
    def messages(self) -> int:
        """Ordered pairs of ranks that exchange something."""
        return int(np.count_nonzero(self.traffic) - np.count_nonzero(np.diag(self.traffic)))

    @property
    def n_tasks(self) -> int:
        """Tasks in the graph: input chunks, fences, output chunks."""
        overlap = self.overlap
        if self.copied:
            return prod(overlap.numblocks_out)
        return prod(overlap.numblocks_in) + len(overlap.parts) + prod(overlap.numblocks_out)

    @property
    def wires(self) -> dict[str, int]:
        """Bytes over each wire; what stays on its rank counts as "direct"."""
        found: Counter[str] = Counter()
        for a, b in np.argwhere(self.traffic).tolist():
            found[self.ranks.wires.get((a, b), "direct")] += int(self.traffic[a, b])
        return dict(found)

    def peak_bytes(self, rank: int) -> int:
        """The most that a rank holds of input and output together.

        With the input in memory both are held until the input is let go; an input that is made on
        the fly is let go chunk by chunk, so only its largest chunk counts. Where pieces go over
        MPI, what may be packed and received at once comes on top.

        Raises
        ------
        LayoutError
            There is no such rank.
        """
        if not 0 <= rank < self.ranks.size:
            raise LayoutError(f"rank {rank}: there are ranks 0 to {self.ranks.size - 1}")
        outputs = int(self.traffic[:, rank].sum()) + self.staging_bytes(rank)
        if not self.assumed:
            return outputs + self._held(rank)
        largest = prod(max(sizes) for sizes in self.chunks_in)
        return outputs + largest * self.dtype.itemsize

    def staging_bytes(self, rank: int) -> int:
        """The most that a rank holds of messages over MPI, packed and received; in the peak."""
        share = config.nbytes("mpi.staging-bytes") // 2
        peers = [r for r in range(self.ranks.size) if self.ranks.wires.get((rank, r)) == "mpi"]
        sent, received = self.traffic[rank, peers].sum(), self.traffic[peers, rank].sum()
        return min(share, int(sent)) + min(share, int(received))

    def _held(self, rank: int) -> int:
        """Bytes of the input on a rank."""
        if isinstance(self.target.layout, Replicated):
            return int(self.traffic[rank].max())
        return int(self.traffic.sum() if self.copied else self.traffic[rank].sum())

    def rank(self, rank: int) -> RankPlan:
        """The pieces that one rank sends and receives, in elements."""
        return rank_plan(self.overlap, self.owners_in, self.target.owners, rank)

    def explain(self) -> str:
        """The plan in words."""
        if self.fallback:
            return f"Dask's own rechunk: {self.fallback}."
        n = self.ranks.size
        shape = tuple(map(sum, self.chunks_in))
        layout = self.target.layout
        used = len(np.unique(self.target.owners))
        words = layout.spell(shape, n) if layout else f"owners open, chunks on {used} of {n} ranks"
        fullest = max(range(n), key=self.peak_bytes)
        peak, limit = self.peak_bytes(fullest), self.ranks.seats[fullest].memory_limit
        fits = "" if peak <= limit else f", MORE than its limit of {format_bytes(limit)}"
        moved = 100 * self.bytes_moved / max(self.bytes_total, 1)
        wires = ", ".join(f"{format_bytes(b)} {wire}" for wire, b in sorted(self.wires.items()))
        n_in, n_out = prod(self.overlap.numblocks_in), prod(self.overlap.numblocks_out)
        tasks = f"{n_in} contribute, {len(self.overlap.parts)} redistribute, {n_out} take"
        assumed = "input: in memory, each chunk on a known rank"
        if self.assumed:
            assumed = "input: not in memory yet, assumed in C order over the ranks"
        if self.copied:
            tasks = f"{n_out} copy"
            assumed = "input: in memory, whole on every rank"
        return "\n".join(
            [
                f"{shape} {self.dtype} -> {words}",
                assumed,
                f"tasks: {self.n_tasks} ({tasks})",
                f"moves {format_bytes(self.bytes_moved)} of {format_bytes(self.bytes_total)} "
                f"({moved:.0f} %) between {self.messages} pairs of ranks, in {len(self.overlap)} "
                "pieces",
                f"wires: {wires or 'nothing to carry'}",
                f"peak: {format_bytes(peak)} on the fullest rank ({fullest}){fits}",
            ]
        )

    def __repr__(self) -> str:
        return f"<Plan: {self.explain().splitlines()[0]}, {format_bytes(self.bytes_moved)} move>"

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><th>{r}</th>" + "".join(f"<td>{format_bytes(int(b))}</td>" for b in row) + "</tr>"
            for r, row in enumerate(self.traffic[:16, :16])
        )
        heads = "".join(f"<th>{r}</th>" for r in range(min(self.ranks.size, 16)))
        return (
            f"<pre>{escape(self.explain())}</pre>"
            f"<table><caption>bytes from rank (row) to rank (column)</caption>"
            f"<tr><th></th>{heads}</tr>{cells}</table>"
        )


def plan(x: da.Array, layout: Any, *, client: Client | None = None) -> Plan:
    """What ``redistribute(x, layout)`` would do; nothing is moved.

    Parameters
    ----------
    x : dask.array.Array
        The array; if it is persisted, the plan knows where each chunk is.
    layout
        As for :func:`redistribute`.
    client : distributed.Client, optional
        Default: the current one.

    Returns
    -------
    Plan
        ``bytes_moved``, ``messages``, ``peak_bytes(rank)``, ``wires``, ``fallback``, ``explain()``.

    Raises
    ------
    LayoutError
        As :func:`redistribute`.

    Examples
    --------
    >>> import dask.array as da, dask_redist as dr
    >>> from distributed import Client
    >>> with Client(n_workers=2, threads_per_worker=1, processes=False,
    ...             dashboard_address=":0") as client:
    ...     plan = dr.plan(da.ones((4, 6), chunks=(2, 6)), dr.Slab.Y)
    ...     print(plan.bytes_moved, plan.n_tasks)
    96 5
    """
    client = find_client(client)
    ranks = ranks_of(client)
    target = resolve(x, layout, ranks.size)
    x = source_of(x)
    held = owners(x, client=client)
    sizes = np.ones(x.numblocks, bool)
    for axis, chunks in enumerate(x.chunks):
        sizes &= (np.array(chunks) > 0).reshape((-1,) + (1,) * (x.ndim - axis - 1))
    assumed = bool((held[sizes] < 0).any())
    copied = is_replicated(x, client=client)
    together = are_together(x, target.chunks, ranks)
    if target.layout is None and not assumed and not copied:
        target = _placed_openly(x, target, held, ranks.size, together)
    if assumed:
        held = balanced(x.chunks, ranks.size)
    reason = why_not(x)
    return Plan(target, x.chunks, held, assumed, x.dtype, ranks, reason, copied, together)


def _placed_openly(
    x: da.Array, target: Target, held: NDArray[np.int64], ranks: int, together: bool
) -> Target:
    """The target with the owners that the scheduler will choose."""
    layer = RedistributeLayer(
        *(x.name, x.chunks, target.chunks, x.dtype, target.owners, None, ranks), together=together
    )
    chosen = target.owners.copy()
    for part in layer.overlap.parts:
        spec = layer.part_spec(part)
        inputs = held[tuple(slice(r.start, r.stop) for r in part.inputs)]
        outputs = tuple(slice(r.start, r.stop) for r in part.outputs)
        chosen[outputs] = assign(spec, ranks, inputs).reshape(spec.grid_out)
    return target._replace(owners=chosen)


def runs(*, client: Client | None = None) -> list[RunReport]:
    """Reports of the runs that the cluster made, newest last (the last 1,000).

    Parameters
    ----------
    client : distributed.Client, optional
        Default: the current one.

    Returns
    -------
    list of RunReport
        One a part: chunks, seconds by stage, bytes moved, bytes over each wire.

    Examples
    --------
    >>> import dask.array as da, dask_redist as dr
    >>> from distributed import Client
    >>> with Client(n_workers=2, threads_per_worker=1, processes=False,
    ...             dashboard_address=":0") as client:
    ...     y = dr.redistribute(da.ones((4, 6), chunks=(2, 6)), dr.Slab.Y).compute()
    ...     report = dr.runs()[-1]
    ...     report.n_in, report.n_out
    (2, 2)
    """
    client = find_client(client)
    ranks_of(client)
    reports: list[RunReport] = pickle.loads(ask_now(client, "redist_runs"))
    return reports
