"""Ranks of a reduction in this process: partials come in, cuts are merged, a result comes out.

Each rank has an arena of its own; what others read there goes by offset, as between processes.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_redist.arena import Arena
from dask_redist.deposits import (
    Entry,
    Merged,
    Plan,
    ReduceRun,
    assemble_result,
    dumped,
    loaded,
)
from dask_redist.partials import Cut, Leaf
from dask_redist.peers import LocalPeer
from dask_redist.process import Process
from dask_redist.ranks import Seat
from dask_redist.reduction import Reduction
from dask_redist.run import RunTable

NONE = np.zeros(0, np.int64)


class LocalRanks:
    """So many ranks; their seats do not begin at 0, and are not dense."""

    def __init__(self, ranks: int) -> None:
        self.arenas = [Arena(64 << 20, keep=0) for _ in range(ranks)]
        self.seats = [
            Seat(5 + 2 * r, f"w{r}", "here", f"tcp://here:{r}", Process.current(), arena.card, 1, 1)
            for r, arena in enumerate(self.arenas)
        ]
        #: bytes that each rank has read of others while it merged, by rank
        self.received: Counter[int] = Counter()
        self.plan: Plan | None = None
        self._me = -1

    def close(self) -> None:
        for arena in self.arenas:
            arena.close()

    def read(
        self, seat: Seat, number: int, leaves: Sequence[Leaf], cut: Cut | None
    ) -> list[NDArray[Any]]:
        assert number == 1
        peer = LocalPeer(self.arenas[self.seats.index(seat)])
        views = [peer.view(leaf.offset, leaf.shape, leaf.dtype) for leaf in leaves]
        found = [view if cut is None else cut.of(view) for view in views]
        for view in found:
            view.flags.writeable = False  # nobody may write where others read
            if self._me >= 0 and seat is not self.seats[self._me]:
                self.received[self._me] += view.nbytes
        return found

    def result(
        self, spec: Reduction, partials: Iterable[tuple[int, tuple[int, ...], Any]], reader: int = 0
    ) -> Any:
        """What rank ``reader`` gets of (rank, index, partial), contributed in this order."""
        runs = [
            ReduceRun(RunTable(("id",), 1, spec, NONE, NONE, {}), arena, self.read)
            for arena in self.arenas
        ]
        joined: dict[int, Hashable] = {}
        for rank, index, partial in partials:
            runs[rank].contribute(index, partial)
            joined[rank] = None
        laid = [(self.seats[r], loaded_row(runs[r].lay_out())) for r in joined]
        if all(row is not None for _, row in laid):
            self.plan = Plan(spec, laid)
        merged = []
        for self._me in joined:
            row = runs[self._me].exchange(laid, self.seats[self._me].seat)
            merged.append((self.seats[self._me], loaded_row(row)))
        self._me = -1
        result = assemble_result(spec, merged, 1, self.read)
        del runs, merged, laid
        assert all(arena.in_use == 0 for arena in self.arenas), "the runs are over"
        return result


def loaded_row(row: list[Entry] | list[Merged] | None) -> Any:
    """The row of a table after its way through messages."""
    ((_, found),) = loaded(pickle.dumps([(0, dumped(row))]))
    return found
