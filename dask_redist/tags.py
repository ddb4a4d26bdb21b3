"""Tags of messages: what tells those between two ranks apart."""

__all__ = ["Tags"]

#: as many as every MPI has: even ones for senders, odd ones for readers
_TAGS = 32768


class Tags:
    """Tags that are taken in turn, and not again while a message may have them.

    Examples
    --------
    >>> tags = Tags(odd=1, count=2)
    >>> tags.take(), tags.take()
    (1, 3)
    >>> tags.free(3)
    >>> tags.take()
    3
    """

    def __init__(self, odd: int, count: int = _TAGS // 2) -> None:
        self._tags = [2 * k + odd for k in range(count)]
        self._last = -1
        self._used: set[int] = set()

    def take(self) -> int:
        """A tag that no message has.

        Raises
        ------
        OSError
            All are in use.
        """
        for _ in self._tags:
            self._last = (self._last + 1) % len(self._tags)
            tag = self._tags[self._last]
            if tag not in self._used:
                self._used.add(tag)
                return tag
        raise OSError(f"{len(self._tags)} messages are under way over MPI: no tag is left")

    def free(self, tag: int) -> None:
        """No message has it any more."""
        self._used.discard(tag)
