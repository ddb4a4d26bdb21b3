"""What the scheduler keeps of runs: their parts, their tables, their reports."""

from __future__ import annotations

import pickle
from collections import Counter, deque
from typing import Any

import numpy as np

from dask_redist.layouts import Layout
from dask_redist.life import Run
from dask_redist.ranks import Seat
from dask_redist.reports import RunReport
from dask_redist.run import RunTable
from dask_redist.spec import PartSpec


class RunBook:
    """Facts about runs, by fence and by number."""

    def __init__(self) -> None:
        #: the part that each fence closes
        self.specs: dict[Any, PartSpec] = {}
        #: reports of the last runs, newest last
        self.reports: deque[RunReport] = deque(maxlen=1000)
        #: layouts that were asked for lately
        self.layouts: deque[Layout] = deque(maxlen=64)
        self._live: dict[int, RunReport] = {}
        self._spec_bytes: dict[int, bytes] = {}
        self._tables: dict[int, bytes] = {}

    def open(
        self, run: Run, spec: PartSpec, seats: tuple[int, ...], n_in: int, takers: Counter[int]
    ) -> None:
        """A run begins; ``takers``: how many takes each output has."""
        self.specs[run.id] = spec
        if spec.layout is not None and spec.layout not in self.layouts:
            self.layouts.append(spec.layout)
        layout = str(spec.layout or "owners open")
        report = RunReport(
            run.number, spec.name, layout, len(seats), n_in, len(run.owners), seats=seats
        )
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
        for kept in (self._live, self._tables, self._spec_bytes):
            kept.pop(number, None)
