"""What the ranks of a program have said to each other, step by step.

In a program (see :mod:`dask_redist.program`) each operation of all ranks is a *step*; a rank
says one thing in it, to all others. Letters of later steps may come before those of this one.
"""

from __future__ import annotations

import threading

from dask_redist.errors import RedistError

#: the letter of a rank whose function has returned: it says no more
RETURNED = b""


class ProgramEnded(RedistError):
    """The program has failed on another rank, or was given up: nobody can be waited for."""


class Mailbox:
    """The letters to one rank of a program.

    Parameters
    ----------
    ranks
        How many ranks there are.

    Examples
    --------
    >>> mailbox = Mailbox(2)
    >>> mailbox.put(1, 1, b"from rank 1")
    >>> mailbox.wait(1, timeout=0)
    [0]
    >>> mailbox.put(1, 0, b"from rank 0")
    >>> mailbox.wait(1, timeout=0), mailbox.take(1)
    ([], [b'from rank 0', b'from rank 1'])
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._changed = threading.Condition()
        self._letters: dict[int, dict[int, bytes]] = {}
        #: ranks whose function has returned, and from which step on they say no more
        self._returned: dict[int, int] = {}
        #: why the program has ended
        self.ended: str | None = None

    def put(self, step: int, sender: int, letter: bytes) -> None:
        """A letter of a rank has come; once more changes nothing."""
        with self._changed:
            self._letters.setdefault(step, {}).setdefault(sender, letter)
            if letter == RETURNED:
                self._returned[sender] = step
            self._changed.notify_all()

    def end(self, why: str) -> None:
        """Let go whoever waits here, now and later."""
        with self._changed:
            self.ended = self.ended or why
            self._changed.notify_all()

    def wait(self, step: int, timeout: float) -> list[int]:
        """Wait until all letters of a step are there; the ranks whose letters are not, in time.

        Raises
        ------
        ProgramEnded
            None are to be expected.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.ended or not self._missing(step), timeout)
            if self.ended:
                raise ProgramEnded(self.ended)
            return self._missing(step)

    def take(self, step: int) -> list[bytes]:
        """The letters of a step, by rank."""
        with self._changed:
            letters = self._letters.pop(step, {})
            return [letters.get(rank, RETURNED) for rank in range(self._ranks)]

    def _missing(self, step: int) -> list[int]:
        there = self._letters.get(step, {})
        silent = {rank for rank, last in self._returned.items() if step >= last}
        return [rank for rank in range(self._ranks) if rank not in there and rank not in silent]
