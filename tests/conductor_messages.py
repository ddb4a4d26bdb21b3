"""What flies between the conductor and the seats of its world: its actions, and their answers."""

from __future__ import annotations

from typing import NamedTuple

from dask_redist.actions import Allocate, Close, Free, Prove, Vote


class Late(NamedTuple):
    """A seat goes on allocating after the conductor has stopped to wait for it."""

    number: int
    seat: int
    outputs: tuple[int, ...]


class Allocated(NamedTuple):
    """A seat's answer to an Allocate."""

    number: int
    seat: int
    offsets: dict[int, int]


class Table(NamedTuple):
    """The answer to a join, on its way to the seat: it may write from now on."""

    number: int
    seat: int


class Quiet(NamedTuple):
    """The last writer of a seat leaves a run that was closed there."""

    number: int
    seat: int


class Closed(NamedTuple):
    """A seat's answer to a Close; ``rest``: it holds pieces back."""

    number: int
    seat: int
    rest: bool


class Voted(NamedTuple):
    """A seat's answer to a Vote."""

    number: int
    seat: int
    ready: bool


class Told(NamedTuple):
    """A ticket on its way to the lane of a seat."""

    number: int
    seat: int
    ticket: int


class Exchange(NamedTuple):
    """The lane of a seat is sending what was held back, and waits for nothing else."""

    number: int
    seat: int


class Exchanged(NamedTuple):
    """A seat's answer after its exchange."""

    number: int
    seat: int
    failed: bool
    error: Exception | None


class Watch(NamedTuple):
    """The time for an exchange runs out, or it does not."""

    number: int


Message = (
    Allocate | Late | Allocated | Table | Close | Quiet | Closed | Prove | Free
    | Vote | Voted | Told | Exchange | Exchanged | Watch
)  # fmt: skip
