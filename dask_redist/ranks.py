"""Who the ranks are: seats of workers, in an order that lasts.

Ranks are numbered by MPI world rank, else by (host, worker name) in natural order. Workers that
come later get the next numbers; a worker that is restarted under its name gets its number back.
A *seat* is one incarnation of a rank: a number that is never given again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dask_redist.arena import ArenaCard
from dask_redist.process import Process


class Seat(NamedTuple):
    """One worker process (or in-process worker) that holds chunks."""

    seat: int
    name: str
    host: str
    address: str
    process: Process
    card: ArenaCard
    memory_limit: int
    nthreads: int
    mpi_rank: int | None = None

    @classmethod
    def of(cls, row: Sequence[Any]) -> Seat:
        """A seat from the plain tuple that a message makes of it."""
        seat = cls(*row)
        return seat._replace(card=ArenaCard(*seat.card), process=Process(*seat.process))


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key in which ``w10`` comes after ``w9``.

    Examples
    --------
    >>> sorted(["w10", "w9", "w1"], key=natural)
    ['w1', 'w9', 'w10']
    """
    parts = re.split(r"(\d+)", name)
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts if p]


def _order(seat: Seat) -> tuple[Any, ...]:
    world = (0, seat.mpi_rank) if seat.mpi_rank is not None else (1, 0)
    return (*world, natural(seat.host), natural(seat.name))


@dataclass
class RankSet:
    """The seats of a cluster in rank order."""

    #: worker names in rank order, the vacant ones too
    order: list[str] = field(default_factory=list)
    seated: dict[str, Seat] = field(default_factory=dict)
    #: arrived before anybody connected; put in order by :meth:`seal`
    arrived: list[Seat] = field(default_factory=list)
    sealed: bool = False
    by_number: dict[int, Seat] = field(default_factory=dict)
    _last: int = 0

    def arrive(self, **facts: Any) -> Seat:
        """A worker says who it is; returns its seat."""
        self._last += 1
        seat = Seat(seat=self._last, **facts)
        self.arrived.append(seat)
        if self.sealed:
            self.seal()
        return seat

    def seal(self) -> None:
        """Number all who have arrived; those who had a number keep it."""
        for seat in sorted(self.arrived, key=_order):
            if seat.name not in self.order:
                self.order.append(seat.name)
            self.seated[seat.name] = self.by_number[seat.seat] = seat
        self.arrived.clear()
        self.sealed = True

    def leave(self, address: str) -> Seat | None:
        """The worker at ``address`` has left; returns its seat if it had one."""
        self.arrived = [s for s in self.arrived if s.address != address]
        for seat in self.by_number.values():
            if seat.address == address:
                del self.by_number[seat.seat]
                if self.seated.get(seat.name) is seat:  # nobody has come under its name meanwhile
                    del self.seated[seat.name]
                return seat
        return None

    def table(self) -> list[Seat]:
        """The seats by rank."""
        return [self.seated[name] for name in self.order if name in self.seated]
