"""Reports: what a run did, how long each stage took, and over which wires."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from dask.utils import format_bytes
from numpy.typing import NDArray


@dataclass(repr=False)
class RunReport:
    """One run of one part, kept by the scheduler; :func:`dask_redist.runs` returns them.

    Attributes
    ----------
    number
        The run's number; rising.
    name
        Name of the array that it made.
    layout
        What the outputs are for, in words.
    ranks
        How many ranks there were.
    n_in, n_out
        Input chunks that contribute, and output chunks that were wanted.
    state
        ``open``, ``published`` (all outputs were there), or ``ended`` before that.
    seconds
        Wall time by stage: ``create`` (owners, memory), ``contribute`` (until the fence),
        ``fence``, ``take`` (until the last output was taken).
    seats
        The seat that each rank had.
    sent
        Bytes written by a seat for a seat: ``{(from, to): bytes}``; by rank: ``traffic``.
    wires
        Bytes over each wire.
    pieces
        Copies made.
    writing
        Seconds in which task threads wrote, summed over threads and ranks.
    """

    number: int
    name: str
    layout: str
    ranks: int
    n_in: int
    n_out: int
    state: str = "open"
    seconds: dict[str, float] = field(default_factory=dict)
    seats: tuple[int, ...] = ()
    sent: dict[tuple[int, int], int] = field(default_factory=dict)
    wires: Counter[str] = field(default_factory=Counter)
    pieces: int = 0
    writing: float = 0.0
    _last: float = field(default_factory=time.perf_counter, compare=False)

    def mark(self, stage: str) -> None:
        """The stage ends now."""
        if stage == "fence":
            self.state = "published"
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def end(self) -> None:
        """The run is over."""
        if self.state == "published":
            self.mark("take")
        else:
            self.state = "ended"

    def add(self, seat: int, tally: dict[str, Any]) -> None:
        """Count what a rank wrote."""
        for to, nbytes in tally["sent"].items():
            key = seat, int(to)
            self.sent[key] = self.sent.get(key, 0) + nbytes
        self.wires.update(tally["wires"])
        self.pieces += tally["pieces"]
        self.writing += tally["writing"]

    def received(self, seat: int, read: dict[int, int]) -> None:
        """Count what a rank read from others."""
        for source, nbytes in read.items():
            key = int(source), seat
            self.sent[key] = self.sent.get(key, 0) + nbytes

    @property
    def traffic(self) -> NDArray[np.int64]:
        """Bytes from each rank (row) to each rank (column), (ranks, ranks)."""
        found = np.zeros((self.ranks, self.ranks), np.int64)
        for (source, target), nbytes in self.sent.items():
            if source in self.seats and target in self.seats:
                found[self.seats.index(source), self.seats.index(target)] += nbytes
        return found

    def __repr__(self) -> str:
        stages = ", ".join(f"{stage} {s:.3f} s" for stage, s in self.seconds.items())
        wires = ", ".join(f"{format_bytes(n)} {wire}" for wire, n in self.wires.items())
        return (
            f"<Run {self.number}: {self.layout}, {self.n_in} -> {self.n_out} chunks on "
            f"{self.ranks} ranks, {self.state}; {stages or 'nothing yet'}; {wires or 'no bytes'}>"
        )

    @property
    def bytes_moved(self) -> int:
        """Bytes whose owner changed."""
        return sum(n for (source, target), n in self.sent.items() if source != target)

    @property
    def bytes_kept(self) -> int:
        """Bytes that stayed on their rank (they are copied once, never aliased)."""
        return sum(n for (source, target), n in self.sent.items() if source == target)
