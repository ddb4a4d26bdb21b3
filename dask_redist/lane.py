"""The lane: the one thread of a rank that takes part in exchanges of two sides.

Wires that hold pieces back exchange the rest at the fence. Such a step may block on other ranks, so
all ranks have to take the steps in one order, whatever order their messages arrive in. The
conductor gives every exchange a *ticket* when all who take part have agreed: dense numbers, each
told to every rank. A lane executes strictly by ticket; where a rank holds nothing of the run, it
does nothing in that turn.

A rank is told tickets from the moment at which it is seated, so they may come before the answer
that says which ticket was the last one before. The lane collects them until then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

#: seconds before somebody is told again who may not have heard
PAUSES = (0.1, 1.0, 5.0)


def insist(tell: Callable[[], object]) -> None:
    """Tell what came of a job, and again where no answer comes: others wait to hear of it.

    Who is told must not mind to hear it twice, since only the answer may have been lost.

    Raises
    ------
    OSError
        It failed each time.
    """
    for pause in PAUSES:
        try:
            tell()
            return
        except OSError as error:
            logger.warning("told again in %g s: %r", pause, error)
        time.sleep(pause)
    tell()


class Lane:
    """Executes jobs in the order of their tickets, in a thread of its own.

    Parameters
    ----------
    name
        Name of the thread.

    Examples
    --------
    >>> done = []
    >>> lane = Lane("example")
    >>> lane.submit(6, lambda: done.append(6))
    >>> lane.begin(4)
    >>> lane.submit(5, None)
    >>> lane.submit(7, lambda: done.append(7))
    >>> lane.close()
    >>> done
    [6, 7]
    """

    def __init__(self, name: str) -> None:
        self._next = 0  # no ticket has this number: nothing is executed before begin
        #: the last ticket of which nothing is left to do
        self.done = 0
        self._jobs: dict[int, Callable[[], object] | None] = {}
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._name = name

    def begin(self, last: int) -> None:
        """Execute what comes after ``last``, the last ticket before this rank joined."""
        with self._changed:
            self._next = last + 1
            self.done = last
            self._jobs = {t: job for t, job in self._jobs.items() if t > last}
            self._changed.notify()

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
        self.done = self._next - 1
        return True
