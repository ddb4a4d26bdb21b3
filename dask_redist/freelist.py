"""Free ranges of one address space: coalesced when added, best fit when taken.

Two indexes over the same ranges, both sorted lists: by offset, to find a range's neighbours, and by
length, to find the smallest range that is large enough. Both are searched by bisection, so the
cost does not grow with the number of ranges (insertion moves pointers, which is a memmove).

Blocks may be smaller than a page, but pages are what the system gives and takes. `FreeList.whole`
counts the bytes of pages that are entirely free, and `FreeList.take_pages` takes only such pages.
"""

from bisect import bisect_left, bisect_right, insort

from dask_redist.syscalls import PAGE, round_up

__all__ = ["FreeList", "Range"]

Range = tuple[int, int]  # offset, length; bytes


def _whole(offset: int, length: int) -> int:
    """Bytes of the pages that lie entirely inside a range."""
    return max(0, ((offset + length) & -PAGE) - round_up(offset, PAGE))


class FreeList:
    """Free ranges, none of which touch or overlap.

    Attributes
    ----------
    total : int
        Free bytes.
    whole : int
        Free bytes in pages that are entirely free.

    Examples
    --------
    >>> free = FreeList()
    >>> free.add(0, 128)
    >>> free.add(192, 64)
    >>> free.take(64, align=64)     # the smallest range that fits
    192
    >>> free.add(128, 64)           # joins its neighbour
    >>> free.ranges()
    [(0, 192)]
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._lengths: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []  # length, offset
        self.total = 0
        self.whole = 0

    def __len__(self) -> int:
        return len(self._starts)

    def ranges(self) -> list[Range]:
        """Every free range, by offset."""
        return [(start, self._lengths[start]) for start in self._starts]

    def add(self, offset: int, length: int) -> None:
        """Free a range; it joins the ranges that it touches.

        Raises
        ------
        ValueError
            Part of the range is free already.
        """
        if length <= 0:
            return
        k = bisect_right(self._starts, offset)
        before = self._starts[k - 1] if k else None
        after = self._starts[k] if k < len(self._starts) else None
        if before is not None and before + self._lengths[before] > offset:
            raise ValueError(
                f"range at {offset} of {length} bytes overlaps the free one at {before}"
            )
        if after is not None and offset + length > after:
            raise ValueError(
                f"range at {offset} of {length} bytes overlaps the free one at {after}"
            )
        if after == offset + length:
            length += self._remove(after)
        if before is not None and before + self._lengths[before] == offset:
            length += self._remove(before)
            offset = before
        self._insert(offset, length)

    def take(self, length: int, align: int) -> int | None:
        """Take `length` bytes at a multiple of `align`, from the smallest range that has them.

        Returns the offset, or None where no range is large enough.
        """
        for k in range(bisect_left(self._by_size, (length, -1)), len(self._by_size)):
            size, start = self._by_size[k]
            offset = round_up(start, align)
            if offset + length <= start + size:
                self._cut(start, offset, length)
                return offset
        return None

    def take_pages(self, offset: int, length: int) -> Range | None:
        """Take the entirely free pages that hold a part of a free range, if there are any."""
        start = self._starts[bisect_right(self._starts, offset) - 1]
        first = max(round_up(start, PAGE), offset & -PAGE)
        last = min((start + self._lengths[start]) & -PAGE, round_up(offset + length, PAGE))
        if first >= last:
            return None
        self._cut(start, first, last - first)
        return first, last - first

    def take_smallest_pages(self, at_most: int) -> Range | None:
        """Take up to `at_most` bytes of entirely free pages, from the smallest range with any.

        They come from the range's upper end. Large ranges are worth more: they fit more requests.
        """
        for k in range(bisect_left(self._by_size, (PAGE, -1)), len(self._by_size)):
            size, start = self._by_size[k]
            if _whole(start, size):
                upper = (start + size) & -PAGE
                lower = max(round_up(start, PAGE), upper - round_up(at_most, PAGE))
                self._cut(start, lower, upper - lower)
                return lower, upper - lower
        return None

    def _cut(self, start: int, offset: int, length: int) -> None:
        """Take a part out of the range that begins at `start`."""
        size = self._remove(start)
        if offset > start:
            self._insert(start, offset - start)
        if offset + length < start + size:
            self._insert(offset + length, start + size - offset - length)

    def _insert(self, offset: int, length: int) -> None:
        insort(self._starts, offset)
        insort(self._by_size, (length, offset))
        self._lengths[offset] = length
        self.total += length
        self.whole += _whole(offset, length)

    def _remove(self, offset: int) -> int:
        length = self._lengths.pop(offset)
        del self._starts[bisect_left(self._starts, offset)]
        del self._by_size[bisect_left(self._by_size, (length, offset))]
        self.total -= length
        self.whole -= _whole(offset, length)
        return length
