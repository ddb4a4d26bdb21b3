"""The budget of peers' pages: how much of other ranks' memory this process keeps mapped.

A page of a peer that this process has written counts in its own RSS, which Dask's workers and
nannies read to pause, spill and terminate. So a bounded set of such pages stays mapped: hot places
are rewritten without a fault, and the least recently written ones are unmapped (MADV_DONTNEED on a
shared mapping: the data stays, only the next write faults again).

Pages are counted in granules of 64 KiB. Large pieces are written in portions that touch a
sixteenth of the budget each, so that no single write can exceed it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dask_redist import stream
from dask_redist.segment import Bytes, part
from dask_redist.syscalls import drop_mapped

__all__ = ["GRANULE", "PageBudget", "Store", "portions", "store", "touched"]

GRANULE = 64 * 1024
_SLOT = 1 << 40  # granule numbers of one mapping; more than any address space has


def touched(view: NDArray[Any], origin: int) -> Sequence[int]:
    """The granules that a write to a view touches, counted from an address; in order.

    Rows whose gap is less than a granule merge into one run, since no granule fits between them; so
    there are never more runs than granules, however narrow the rows are.

    Examples
    --------
    >>> block = np.empty((8, 100_000), "u1")
    >>> touched(block[2:4], block.ctypes.data)          # 200 kB, one run
    range(3, 7)
    >>> touched(block[::4, :10], block.ctypes.data)     # two runs, 400 kB apart
    [0, 6]
    """
    if not view.size:
        return range(0)
    start = view.__array_interface__["data"][0] - origin
    run = view.itemsize
    outer: list[tuple[int, int]] = []  # length, stride
    for length, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if length == 1:
            continue
        if stride < 0:
            start, stride = start + (length - 1) * stride, -stride
        if not outer and stride - run < GRANULE:
            run += (length - 1) * stride
        else:
            outer.append((length, stride))
    if not outer:
        return range(start // GRANULE, (start + run - 1) // GRANULE + 1)
    starts = np.array([start], np.int64)
    for length, stride in reversed(outer):
        starts = np.add.outer(starts, np.arange(length, dtype=np.int64) * stride).ravel()
    first, last = starts // GRANULE, (starts + run - 1) // GRANULE
    most = int((last - first).max()) + 1
    granules = np.add.outer(np.arange(most, dtype=np.int64), first)
    found: list[int] = np.unique(np.minimum(granules, last)).tolist()
    return found


def portions(
    shape: Sequence[int], cost: Callable[[tuple[slice, ...]], int], most: int
) -> Iterator[tuple[slice, ...]]:
    """Cut a box along its first axes into boxes that cost no more than `most` each.

    A single element may cost more. The boxes come in C order; their union is the whole.

    Examples
    --------
    >>> size = lambda box: (box[0].stop - box[0].start) * (box[1].stop - box[1].start)
    >>> [tuple((s.start, s.stop) for s in box) for box in portions((2, 3), size, 2)]
    [((0, 1), (0, 2)), ((0, 1), (2, 3)), ((1, 2), (0, 2)), ((1, 2), (2, 3))]
    """
    todo = [tuple(slice(0, length) for length in shape)]
    while todo:
        box = todo.pop()
        price = cost(box)
        axis = next((k for k, s in enumerate(box) if s.stop - s.start > 1), None)
        if price <= most or axis is None:
            yield box
            continue
        lower, upper = box[axis].start, box[axis].stop
        step = max(1, (upper - lower) * most // price)
        cuts = range(lower, upper, step)
        todo += [
            (*box[:axis], slice(k, min(k + step, upper)), *box[axis + 1 :]) for k in reversed(cuts)
        ]


class Store(NamedTuple):
    """A piece that is to be copied to its target.

    Attributes
    ----------
    target, piece : numpy.ndarray
        Of the same shape and dtype.
    pages : PageBudget or None
        This process's budget, if the target lies in another one's memory.
    slot, origin : int
        The target's mapping in the budget, and where it begins.
    """

    target: NDArray[Any]
    piece: NDArray[Any]
    pages: PageBudget | None = None
    slot: int = 0
    origin: int = 0

    def part(self, box: Sequence[slice]) -> Store:
        """A part of the piece, and its target."""
        return self._replace(target=part(self.target, box), piece=part(self.piece, box))

    def granules(self) -> Sequence[int]:
        """The granules that this store maps."""
        if self.pages is None or not self.target.nbytes:
            return range(0)
        return touched(self.target, self.origin)


def store(stores: Sequence[Store]) -> None:
    """Copy a piece to its target, or pieces that differ only along the last axis of one array.

    Those are copied together, see `dask_redist.stream.copy_all`.
    """
    pages = next((one.pages for one in stores if one.pages), None)
    if pages is None:
        stream.copy_all([(one.target, one.piece) for one in stores])
    else:
        pages.write(stores)


class PageBudget:
    """Bounds the bytes of peers' memory that this process keeps mapped; thread-safe.

    Parameters
    ----------
    limit : int
        Bytes over all peers; at least one granule of 64 KiB.
    """

    def __init__(self, limit: int) -> None:
        self.limit = max(1, limit // GRANULE)  # granules
        self.portion = max(1, self.limit // 16)
        self._lock = threading.Lock()
        # Mappings are held here until they leave: an address must never outlive its mapping,
        # because dropping pages of whatever is mapped there next would destroy them.
        self._mappings: dict[int, Bytes] = {}
        self._slots = 0
        self._lru: OrderedDict[int, None] = OrderedDict()  # slot * _SLOT + granule
        self._dropped = 0

    @property
    def mapped(self) -> int:
        """Bytes of the granules that count as mapped now."""
        return len(self._lru) * GRANULE

    def enrol(self, memory: Bytes) -> int:
        """Count a peer's mapping from now on; returns its slot."""
        with self._lock:
            self._slots += 1
            self._mappings[self._slots] = memory
            return self._slots

    def leave(self, slot: int) -> None:
        """Forget a mapping: its pages no longer count, and nothing touches its addresses again."""
        with self._lock:
            if self._mappings.pop(slot, None) is not None:
                for key in [key for key in self._lru if key // _SLOT == slot]:
                    del self._lru[key]

    def write(self, stores: Sequence[Store]) -> None:
        """Do what `store` does, a portion of the budget at a time."""

        def cost(box: tuple[slice, ...]) -> int:
            return sum(len(one.part(box).granules()) for one in stores)

        granules = [one.granules() for one in stores]
        if sum(map(len, granules)) <= self.portion:
            self._copy(stores, granules)
            return
        shape, alone = stores[0].target.shape, len(stores) == 1
        # Along the last axis each of several has its own length.
        for box in portions(shape if alone else shape[:-1], cost, self.portion):
            parts = [one.part(box) for one in stores]
            if alone or cost(box) <= self.portion:
                self._copy(parts, [one.granules() for one in parts])
            else:
                for one in parts:
                    self.write([one])

    def read(self, slot: int, origin: int, view: NDArray[Any]) -> NDArray[Any]:
        """A view of a mapping whose pages count from now on; a copy where they are too many."""

        def cost(box: tuple[slice, ...]) -> int:
            return len(touched(part(view, box), origin))

        granules = touched(view, origin)
        if len(granules) <= self.portion:
            self._register([(slot, granules)])
            return view
        array = np.empty(view.shape, view.dtype)
        for box in portions(view.shape, cost, self.portion):
            source = part(view, box)
            keys = [(slot, touched(source, origin))]
            mark = self._register(keys)
            np.copyto(part(array, box), source)
            if mark != self._dropped:
                self._register(keys)
        return array

    def _copy(self, stores: Sequence[Store], granules: Sequence[Sequence[int]]) -> None:
        keys = [
            (one.slot, touches) for one, touches in zip(stores, granules, strict=True) if one.pages
        ]
        mark = self._register(keys)
        stream.copy_all([(one.target, one.piece) for one in stores])
        if mark != self._dropped:  # another thread may have dropped what was being written
            self._register(keys)

    def _register(self, keys: Iterable[tuple[int, Iterable[int]]]) -> int:
        with self._lock:
            for slot, granules in keys:
                if slot in self._mappings:
                    for granule in granules:
                        key = slot * _SLOT + granule
                        self._lru[key] = None
                        self._lru.move_to_end(key)
            excess = len(self._lru) - self.limit
            if excess > 0:
                self._drop([self._lru.popitem(last=False)[0] for _ in range(excess)])
            return self._dropped

    def _drop(self, keys: list[int]) -> None:
        self._dropped += 1
        keys.sort()
        first = 0
        for k in range(1, len(keys) + 1):
            if k == len(keys) or keys[k] != keys[k - 1] + 1:  # neighbours go in one call
                slot, granule = divmod(keys[first], _SLOT)
                memory = self._mappings[slot]
                start = granule * GRANULE
                length = min((k - first) * GRANULE, memory.size - start)
                drop_mapped(memory.ctypes.data + start, length)
                first = k
