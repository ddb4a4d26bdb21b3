"""What the scheduler keeps of runs: their parts, their tables, their reports."""

from __future__ import annotations

import pickle
from collections import Counter, deque
from typing import Any

import numpy as np

from dask_redist.layouts import Layout
from dask_redist.life import Run
from dask_redist.ranks import Seat
from dask_redist.reduction import Reduction
from dask_redist.reports import RunReport
from dask_redist.run import RunTable
from dask_redist.spec import PartSpec


class RunBook:
    """Facts about runs, by fence and by number."""

    def __init__(self) -> None:
        #: the part (PartSpec or Reduction) that each fence closes
        self.specs: dict[Any, Any] = {}
        #: reports of the last runs, newest last
        self.reports: deque[RunReport] = deque(maxlen=1000)
        #: layouts that were asked for lately
        self.layouts: deque[Layout] = deque(maxlen=64)
        self._live: dict[int, RunReport] = {}
        self._spec_bytes: dict[int, bytes] = {}
        self._tables: dict[int, bytes] = {}
        #: of a reduction: what each seat has laid out for the exchange, and what came of it
        self._laid: dict[int, dict[int, bytes]] = {}
        self._merged: dict[int, dict[int, bytes]] = {}

    def open(
        self,
        run: Run,
        spec: PartSpec | Reduction,
        seats: tuple[int, ...],
        n_in: int,
        takers: Counter[int],
    ) -> None:
        """A run begins; ``takers``: how many takes each output has."""
        self.specs[run.id] = spec
        if spec.layout is not None and spec.layout not in self.layouts:
            self.layouts.append(spec.layout)
        layout = "reduction" if not run.votes else str(spec.layout or "owners open")
        n_out = len(run.owners) if run.votes else 1
        report = RunReport(run.number, spec.name, layout, len(seats), n_in, n_out, seats=seats)
        self._live[run.number] = report
        several = {out: count for out, count in takers.items() if count > 1}
        self._spec_bytes[run.number] = pickle.dumps((spec, several))

    def spec_bytes(self, number: int) -> bytes:
        """The part of a run and its takers, for a rank."""
        return self._spec_bytes[number]

    def table(self, run: Run, seats: dict[int, Seat]) -> bytes:
        """Where the outputs of a run are, for a rank that joins."""
        if run.number not in self._tables:
            spec = self.specs[run.id]
            count = len(run.owners) if spec.replicated else spec.n_out
            owners = np.full(count, -1, np.int64)
            offsets = np.zeros(count, np.int64)
            for out, seat in run.owners.items():
                owners[out], offsets[out] = seat, run.offsets[out]
            holders = {seat: seats[seat] for seat in set(run.owners.values())}
            table = RunTable(run.id, run.number, spec, owners, offsets, holders)
            self._tables[run.number] = pickle.dumps(table)
            self.mark(run.number, "create")
            self.reports.append(self._live[run.number])
        return self._tables[run.number]

    def lay(self, number: int, seat: int, row: bytes) -> None:
        """What a seat has laid out for the exchange of a reduction."""
        if number in self._live:
            self._laid.setdefault(number, {})[seat] = row

    def laid(self, number: int, seats: dict[int, Seat]) -> bytes | None:
        """What all seats have laid out, for those that exchange; None: it is no reduction."""
        return _rows(self._laid.pop(number, None), seats)

    def merge(self, number: int, seat: int, row: bytes, read: dict[int, int]) -> None:
        """What a seat has made of it, and how many bytes it read from whom."""
        if report := self._live.get(number):
            self._merged.setdefault(number, {})[seat] = row
            report.received(seat, read)

    def merged(self, number: int, seats: dict[int, Seat]) -> bytes | None:
        """What all seats have made, for those that take; None: it is no reduction."""
        return _rows(self._merged.pop(number, None), seats)

    def mark(self, number: int, stage: str) -> None:
        """A stage of a run ends."""
        if report := self._live.get(number):
            report.mark(stage)

    def wrote(self, number: int, seat: int, tally: dict[str, Any]) -> None:
        """What a rank wrote in a run."""
        if report := self._live.get(number):
            report.add(seat, tally)

    def close(self, number: int) -> None:
        """A run is over."""
        if report := self._live.get(number):
            report.end()
        for kept in (self._live, self._tables, self._spec_bytes, self._laid, self._merged):
            kept.pop(number, None)


def _rows(rows: dict[int, bytes] | None, seats: dict[int, Seat]) -> bytes | None:
    """Rows that are pickled already, each with its seat; a seat that has left has none."""
    if rows is None:
        return None
    return pickle.dumps([(seats[seat], row) for seat, row in rows.items() if seat in seats])
