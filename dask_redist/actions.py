"""What the conductor has others do: its actions, and the answer that means "once more".

They are plain data. :mod:`dask_redist.scheduler` turns them into messages to ranks, answers to
requests and transitions of tasks.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple


class Allocate(NamedTuple):
    """Have ``seat`` allocate its outputs of run ``number``."""

    number: int
    seat: int
    outputs: tuple[int, ...]


class Answer(NamedTuple):
    """Answer a waiting request: the run's number, :data:`AGAIN`, or an error."""

    request: Hashable
    value: int | str | Exception


class Close(NamedTuple):
    """Have ``seat`` refuse new writers of run ``number`` and wait for the running ones."""

    number: int
    seat: int


class Prove(NamedTuple):
    """Find out, from the ``witnesses``, whether the process of ``seat`` is dead."""

    number: int
    seat: int
    witnesses: tuple[int, ...]


class Vote(NamedTuple):
    """Ask ``seat`` whether it can exchange what it holds back of run ``number``."""

    number: int
    seat: int


class Ticket(NamedTuple):
    """Tell all lanes that the turn of ``ticket`` is the exchange of run ``number``."""

    ticket: int
    number: int


class Free(NamedTuple):
    """Have ``seat`` forget run ``number``; ``condemn``: its memory is never handed out again."""

    number: int
    seat: int
    condemn: bool


class Recompute(NamedTuple):
    """Have Dask run the contributions and the fence of ``id`` again."""

    id: Hashable


Action = Allocate | Answer | Close | Prove | Vote | Ticket | Free | Recompute

#: Answer to a request that has to be made again: the run that it belongs to is over.
AGAIN = "again"
