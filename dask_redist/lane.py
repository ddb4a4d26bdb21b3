"""The lane: the one thread of a rank that takes part in exchanges of two sides.

Wires that hold pieces back exchange the rest at the fence. Such a step may block on other ranks, so
all ranks have to take the steps in one order, whatever order their messages arrive in. The
conductor gives every exchange a *ticket* when all contributions of its run exist: dense numbers,
each told to every rank, to those that have nothing to do as well. A lane executes strictly by
ticket; one that was not agreed on, or that came to nothing, is executed as a no-op.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Lane:
    """Executes jobs in the order of their tickets, in a thread of its own.

    Parameters
    ----------
    name
        Name of the thread.
    last
        The last ticket that had been given when this rank joined; later ones are its own.

    Examples
    --------
    >>> done = []
    >>> lane = Lane("example", last=4)
    >>> lane.submit(6, lambda: done.append(6))
    >>> lane.submit(5, None)
    >>> lane.submit(7, lambda: done.append(7))
    >>> lane.close()
    >>> done
    [6, 7]
    """

    def __init__(self, name: str, last: int) -> None:
        self._next = last + 1
        self._jobs: dict[int, Callable[[], object] | None] = {}
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._name = name

    def submit(self, ticket: int, job: Callable[[], object] | None) -> None:
        """Execute ``job`` when it is the turn of ``ticket``; None: nothing to do here.

        A ticket that was submitted before, or that is not this lane's own, changes nothing.
        """
        with self._changed:
            if ticket < self._next or ticket in self._jobs or self._closed:
                return
            self._jobs[ticket] = job
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self, timeout: float | None = None) -> None:
        """Execute what can be executed, then end the thread.

        Jobs behind a ticket that is missing are dropped. With a ``timeout`` (seconds) it returns
        after that time, whatever is left to do.
        """
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout)

    def _work(self) -> None:
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Execute the next ticket; False when the lane is closed and its ticket is missing.

        On its own so that a job, and the pieces that it holds, are let go before the next wait.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._next in self._jobs or self._closed)
            if self._next not in self._jobs:
                self._jobs.clear()
                return False
            job = self._jobs.pop(self._next)
            self._next += 1
        if job is not None:
            try:
                job()
            except BaseException:  # the job tells its run; all other runs need this thread
                logger.exception("ticket %d failed", self._next - 1)
        return True
