"""Admission: pages are taken only while there is room for them.

A page beyond a memory cgroup's limit does not fail, it kills. So the room is read first, and read
again every few pages, because the other ranks of a host take theirs at the same time.
"""

from collections.abc import Sequence

from dask_redist.errors import AdmissionError
from dask_redist.freelist import FreeList, Range
from dask_redist.syscalls import available_memory, populate

__all__ = ["admit", "enough"]

_PORTION = 64 << 20  # bytes populated between two looks
_RESERVE = 16 << 20  # bytes left to the process, which lives in the same cgroup


def enough(ranges: Sequence[Range]) -> bool:
    """Whether there is room for all these ranges now."""
    return sum(length for _, length in ranges) + _RESERVE <= available_memory()


def admit(fd: int, address: int, ranges: Sequence[Range]) -> None:
    """Populate ranges of a file that is mapped at an address.

    Raises
    ------
    AdmissionError
        There is no room, or the system refuses; some of the pages may exist then.
    """
    joined = FreeList()  # neighbours in one system call
    for offset, length in ranges:
        joined.add(offset, length)
    needed = joined.total
    for offset, length in joined.ranges():
        for start in range(offset, offset + length, _PORTION):
            there = max(0, available_memory() - _RESERVE)
            if needed > there:
                raise AdmissionError(f"{needed} bytes are needed, {there} are there")
            portion = min(_PORTION, offset + length - start)
            try:
                populate(fd, address + start, start, portion)
            except OSError as error:
                raise AdmissionError(
                    f"{needed} bytes are needed, {there} seemed there, "
                    f"but the system refused: {error}"
                ) from error
            needed -= portion
