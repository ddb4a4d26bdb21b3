"""The life of a run, as the conductor sees it.

A *run* is one execution of one redistribution. Its ``id`` is the key of its fence task, its
``number`` is unique and rising, so a late message of an earlier run can never be mistaken for
one of the present run::

    ALLOCATING --all owners answered--> OPEN --fence--> CLOSING --all closed--> PUBLISHED
         |                               |                 |                       |
         |                               |                 +----> EXCHANGING ------+
         |                               |                             |           |
         +---- failure, loss of an owner or a writer, fence no longer wanted ------+
                                         v
                     ENDING (close whoever may still write, then free) --> gone

In each state the run waits for something that is under way; the sets of seats say for whom.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class State(Enum):
    """Where a run is in its life."""

    ALLOCATING = "allocating"
    OPEN = "open"
    CLOSING = "closing"
    EXCHANGING = "exchanging"
    PUBLISHED = "published"
    ENDING = "ending"


@dataclass
class Run:
    """One run, as the conductor sees it."""

    id: Hashable
    number: int
    #: output chunk (number inside the run) -> seat that owns it
    owners: dict[int, int]
    state: State = State.ALLOCATING
    #: output chunk -> offset in its owner's arena
    offsets: dict[int, int] = field(default_factory=dict)
    #: seats that have been asked to allocate and have not answered
    allocating: set[int] = field(default_factory=set)
    #: seats that hold memory of this run
    holders: set[int] = field(default_factory=set)
    #: seats that may write (they joined and have not closed)
    writers: set[int] = field(default_factory=set)
    #: seats whose Close or Prove is under way
    closing: set[int] = field(default_factory=set)
    #: writers whose worker has left; they must be proven dead
    lost: set[int] = field(default_factory=set)
    #: seats that are there and hold pieces back, those that have not voted, that are exchanging
    rest: set[int] = field(default_factory=set)
    voting: set[int] = field(default_factory=set)
    exchanging: set[int] = field(default_factory=set)
    #: join requests that wait for the memory: request -> seat
    joins: dict[Hashable, int] = field(default_factory=dict)
    fence: Hashable | None = None
    condemned: bool = False
    #: whether seats vote before they exchange; those that only read each other's memory need not
    votes: bool = True


class Restarts(NamedTuple):
    """How often the run of one fence was started again."""

    #: because of lost workers and what follows from that, since it was published the last time
    losses: int = 0
    #: because a take did not find its block, since the takes of one run were over the last time
    misses: int = 0
    #: the last run number that had been given when it was started again the last time
    last: int = 0
