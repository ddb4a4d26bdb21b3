"""Staging: bounded memory in which messages are packed, and into which they are received.

A buffer is a block of the rank's arena, so it is warm when it is used again, and it returns when
the last array over it dies. What is out is counted, and nothing is given out beyond the limit.
"""

import threading
import weakref
from collections import deque

from dask_redist.arena import Arena
from dask_redist.segment import Bytes

__all__ = ["Staging"]


class Staging:
    """Memory for messages, up to a limit; thread-safe.

    Parameters
    ----------
    arena : Arena
        Where buffers come from.
    limit : int
        Bytes that may be out at once.

    Examples
    --------
    >>> arena = Arena(1 << 20, keep=0)
    >>> staging = Staging(arena, limit=100)
    >>> first, second = staging.take(60), staging.take(60)
    >>> len(first), second is None
    (60, True)
    >>> del first
    >>> staging.used
    0
    >>> len(staging.take(200))      # alone, a buffer may be larger
    200
    """

    def __init__(self, arena: Arena, limit: int) -> None:
        self.limit = limit
        self._arena = arena
        self._used = 0
        self._lock = threading.Lock()
        #: bytes that came back; destructors append, in any thread, and never wait
        self._returned: deque[int] = deque()

    @property
    def used(self) -> int:
        """Bytes that are out."""
        with self._lock:
            return self._counted()

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes would be given just now."""
        with self._lock:
            return not self._counted() or self._used + nbytes <= self.limit

    def take(self, nbytes: int) -> Bytes | None:
        """A buffer of so many bytes; None while there is no room for it.

        Raises
        ------
        AdmissionError
            The arena has no memory for it.
        """
        with self._lock:
            if self._counted() and self._used + nbytes > self.limit:
                return None
            self._used += nbytes
        try:
            (block,) = self._arena.allocate([nbytes])
        except BaseException:
            self._returned.append(nbytes)
            raise
        weakref.finalize(block, self._returned.append, nbytes).atexit = False
        return block.array((nbytes,), "u1")

    def _counted(self) -> int:
        while self._returned:
            self._used -= self._returned.popleft()
        return self._used
