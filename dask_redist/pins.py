"""Pins: tasks that may run in one place only, because their chunk or their block is there.

The array optimizer drops annotations, so restrictions are set on the scheduler. A pin to a worker
that has left would keep its task waiting for ever: it is taken away.
"""

from __future__ import annotations

from typing import Any

from distributed import Scheduler


class Pins:
    """The pinned tasks of a scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._places: dict[Any, str] = {}

    def pin(self, key: Any, address: str | None) -> None:
        """Have a task run at ``address`` only, whatever resources it names; None: anywhere."""
        self._scheduler.set_restrictions({key: {address} if address else None})
        self._scheduler.tasks[key].resource_restrictions = {}
        if address:
            self._places[key] = address
        else:
            self._places.pop(key, None)

    def forget(self, key: Any) -> None:
        """A task is known no more."""
        self._places.pop(key, None)

    def unpin(self, address: str) -> list[Any]:
        """Let the tasks of a worker that has left run anywhere; those that nobody would run."""
        stranded = []
        for key in [key for key, place in self._places.items() if place == address]:
            self.pin(key, None)
            if self._scheduler.tasks[key].state == "no-worker":
                stranded.append(key)
        return stranded
