"""An arena: memory of one rank that its peers can write, handed out in blocks and kept warm.

An arena is one sparse shared file (see `segment`), mapped once, as large as the rank could ever
need; peers open it through its `ArenaCard`. Its first page is the header, blocks begin after it.

A `Block` is a range of the arena. NumPy arrays over a block keep it alive (it is their `base`),
and when the last of them dies the range returns. First touch of fresh memory costs several times
the copy into it, so returned ranges stay *warm*, with their pages, up to `keep` bytes; the rest is
punched out of the file and is *cold*, and fresh pages are asked for in one call, not by faults.

Destructors run anywhere: in any thread, inside the garbage collector, while this very thread holds
the arena's lock. So a dying block only appends itself to a queue, and whoever gets the lock without
waiting sorts the queue into the free lists; who held the lock looks again after releasing it.
"""

import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from dask_redist.admission import admit, enough
from dask_redist.block import Block, block_of, room_for
from dask_redist.errors import AdmissionError
from dask_redist.freelist import FreeList, Range
from dask_redist.segment import (
    CREDITS,
    NONCE,
    ArenaCard,
    Bytes,
    close_segment,
    map_file,
    open_segment,
)
from dask_redist.syscalls import PAGE, give_back, round_up

__all__ = ["Arena", "ArenaCard", "Block", "arena_here", "block_of"]

_here: "weakref.WeakValueDictionary[str, Arena]" = weakref.WeakValueDictionary()


def arena_here(card: ArenaCard) -> "Arena | None":
    """The open arena of this very process that a card names, or None."""
    return _here.get(card.nonce) if card.pid == os.getpid() else None


class Arena:
    """Memory of this process that peers can write, handed out in blocks.

    Parameters
    ----------
    capacity : int
        Bytes of address space, rounded up to pages. Pages exist only under blocks and warm ranges,
        so twice the memory limit is a sound choice: it leaves room for fragmentation.
    keep : int
        Most bytes that stay warm while free. They count as this process's memory.
    directory : str, optional
        Use a named file there, removed by `close`, instead of an anonymous one.
    pressure : callable, optional
        Asked when blocks return; while it is true nothing stays warm. It runs inside destructors:
        it must neither block, nor raise, nor use the arena.

    Examples
    --------
    >>> arena = Arena(capacity=1 << 20, keep=0)
    >>> (block,) = arena.allocate([48])
    >>> x = block.array((2, 3), "f8")
    >>> block_of(x[1:]) is block
    True
    >>> del block, x
    >>> arena.in_use
    0
    >>> arena.close()
    """

    def __init__(
        self,
        capacity: int,
        keep: int,
        directory: str | None = None,
        pressure: Callable[[], bool] = lambda: False,
    ) -> None:
        self.capacity = round_up(max(capacity, PAGE) + PAGE, PAGE)
        self.keep = keep
        self._pressure = pressure
        self._pid = os.getpid()
        nonce = secrets.token_bytes(NONCE)
        fd, path = open_segment(directory, nonce.hex())
        self._discard = weakref.finalize(self, close_segment, fd, path, self._pid)
        os.ftruncate(fd, self.capacity)
        self._fd = fd
        self._memory: Bytes | None = map_file(fd, self.capacity)
        self._address: int = self._memory.ctypes.data
        self._memory[:NONCE] = np.frombuffer(nonce, dtype=np.uint8)
        path = path or f"/proc/{self._pid}/fd/{fd}"
        self.card = ArenaCard(self._pid, path, nonce.hex(), self.capacity)
        self._lock = threading.Lock()  # the free lists and the counters
        self._filling = threading.Lock()  # one thread populates; taken before the other lock
        self._returned: deque[tuple[Bytes, int, int, bool, bool]] = deque()
        self._warm, self._cold = FreeList(), FreeList()
        self._cold.add(PAGE, self.capacity - PAGE)
        self._in_use = self._condemned = 0
        _here[self.card.nonce] = self

    def __repr__(self) -> str:
        return f"Arena({self._in_use} bytes in use, {self._warm.whole} idle, of {self.capacity})"

    @property
    def memory(self) -> Bytes:
        """All bytes of the arena; for peers within the process."""
        if self._memory is None:
            raise ValueError("the arena is closed")
        return self._memory

    @property
    def in_use(self) -> int:
        """Bytes of the blocks that live, each rounded up as it was reserved."""
        with self._locked():
            return self._in_use

    @property
    def idle(self) -> int:
        """Bytes of pages that are warm and entirely free."""
        with self._locked():
            return self._warm.whole

    @property
    def condemned(self) -> int:
        """Bytes of ranges that are never handed out again."""
        with self._locked():
            return self._condemned

    @property
    def received(self) -> int:
        """Bytes that peers say they have written into this arena, ever."""
        return int(self.memory[CREDITS].view(np.int64).sum())

    def allocate(self, sizes: Sequence[int]) -> list[Block]:
        """Blocks of these sizes in bytes: all of them, or none.

        Their contents are arbitrary. A block of zero bytes takes no memory. Thread-safe.

        Raises
        ------
        AdmissionError
            The capacity, the memory cgroup, the host or the file system has no such room.
        ValueError
            The arena is closed, or a size is negative.
        """
        if min(sizes, default=0) < 0:
            raise ValueError(f"a block of {min(sizes)} bytes: sizes must not be negative")
        if os.getpid() != self._pid:
            raise ValueError(f"the arena belongs to process {self._pid}, not to its forked child")
        memory = self.memory
        with self._locked():
            taken, fresh, spare = self._reserve(sizes)
        try:
            if fresh:
                self._populate(fresh, memory)
        except BaseException:
            with self._locked():
                self._undo(taken, fresh, spare)
            raise
        with self._locked():
            for offset, length in spare:
                self._warm.add(offset, length)
            self._in_use += sum(length for _, length in taken)
            self._shrink(self.keep)
        return [
            Block(self, memory, offset, nbytes)
            for (offset, _), nbytes in zip(taken, sizes, strict=True)
        ]

    def trim(self) -> int:
        """Give every idle page back to the system; returns how many bytes that were."""
        with self._locked():
            idle = self._warm.whole
            self._shrink(0)
            return idle - self._warm.whole

    def close(self) -> None:
        """Hand out no more blocks. What live arrays lie in stays theirs until they die."""
        _here.pop(self.card.nonce, None)
        with self._filling, self._locked():  # nobody may populate through a descriptor that is gone
            self._shrink(0)
            self._memory = None
            self._discard()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock:
                self._sort_in()
                yield
        finally:
            self._drain()

    def take_back(self, block: Block) -> None:
        """Take a block back; called by destructors, so it never waits."""
        length, _ = room_for(block.nbytes)
        if length and os.getpid() == self._pid:  # a forked child must not free its parent's blocks
            # With its mapping, so that the address is mapped until the range has been dealt with.
            self._returned.append(
                (block.memory, block.offset, length, block.cooled, block.condemned)
            )
            self._drain()

    def _drain(self) -> None:
        # Who appends while the lock is held leaves its range to the holder, who looks here again.
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._sort_in()
            finally:
                self._lock.release()

    def _sort_in(self) -> None:
        if not self._returned:
            return
        keep = 0 if self._memory is None or self._pressure() else self.keep
        alive = []  # mappings
        while self._returned:
            memory, offset, length, cool, condemned = self._returned.popleft()
            alive.append(memory)
            self._in_use -= length
            if condemned:
                self._condemned += length
                first, last = round_up(offset, PAGE), (offset + length) & -PAGE
                if first < last:
                    self._punch(first, last - first)
                continue
            self._warm.add(offset, length)
            if cool and (pages := self._warm.take_pages(offset, length)):
                self._chill(*pages)
        self._shrink(keep)

    def _shrink(self, keep: int) -> None:
        excess = self._warm.whole - keep
        while excess > 0 and (pages := self._warm.take_smallest_pages(excess)):
            self._chill(*pages)
            excess = self._warm.whole - keep

    def _chill(self, offset: int, length: int) -> None:
        self._punch(offset, length)
        self._cold.add(offset, length)

    def _punch(self, offset: int, length: int) -> None:
        if os.getpid() == self._pid:  # what a forked child holds to be free may be in use by now
            give_back(self._address + offset, length)

    def _reserve(self, sizes: Sequence[int]) -> tuple[list[Range], list[Range], list[Range]]:
        """Ranges for blocks, fresh pages to be populated for them, and what they leave of those."""
        taken: list[Range] = []
        fresh: list[Range] = []
        spare = FreeList()
        for nbytes in sizes:
            length, align = room_for(nbytes)
            if not length:
                taken.append((PAGE, 0))
                continue
            offset = self._warm.take(length, align)
            if offset is None:
                offset = spare.take(length, align)
            if offset is None:
                pages = round_up(length, PAGE)
                offset = self._cold.take(pages, PAGE)
                if offset is None and self._warm.whole:  # warm and cold may only fit together
                    self._shrink(0)
                    offset = self._cold.take(pages, PAGE)
                if offset is None:
                    self._undo(taken, fresh, spare.ranges())
                    raise AdmissionError(
                        f"the arena has no free range of {pages} bytes: of its {self.capacity} "
                        f"bytes {self._in_use} are in use and {self._condemned} condemned"
                    )
                fresh.append((offset, pages))
                spare.add(offset + length, pages - length)
            taken.append((offset, length))
        return taken, fresh, spare.ranges()

    def _undo(self, taken: list[Range], fresh: list[Range], spare: list[Range]) -> None:
        # Fresh pages hold nothing but taken and spare ranges, so they are entirely free again.
        for offset, length in (*taken, *spare):
            self._warm.add(offset, length)
        for offset, length in fresh:
            if pages := self._warm.take_pages(offset, length):
                self._chill(*pages)
        self._shrink(self.keep)

    def _populate(self, fresh: list[Range], memory: Bytes) -> None:
        with self._filling:
            if self._memory is None:
                raise ValueError("the arena is closed")
            if not enough(fresh):
                self.trim()
            admit(self._fd, memory.ctypes.data, fresh)
