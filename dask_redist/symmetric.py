"""A rank's arena on its GPU: symmetric memory that is allocated once, and handed out in blocks.

All ranks allocate it together when they start. After that each hands out ranges of its own part
without asking anybody; the others are told offsets. A block returns when the last array over it
dies. Work that was queued on the GPU before may still read it then, so what has returned is handed
out again only when the GPU has been idle once since; nobody waits for that before there is need.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dask_redist.errors import AdmissionError
from dask_redist.freelist import FreeList, Range
from dask_redist.gpu import Gpu
from dask_redist.nvshmem import Pe
from dask_redist.syscalls import round_up

__all__ = ["DeviceBlock", "Outgoing", "SymmetricArena", "agreed_capacity"]

_GRAIN = 512  # bytes: what a GPU's memory is aligned to


def agreed_capacity(offers: Sequence[int]) -> int:
    """The size of all arenas: the least that a rank can give, in whole grains of 512 bytes.

    Raises
    ------
    AdmissionError
        A rank has no room at all.

    Examples
    --------
    >>> agreed_capacity([5000, 4000, 6000])
    3584
    """
    least = min(offers)
    if least < _GRAIN:
        raise AdmissionError(
            f"rank {list(offers).index(least)} has {least} bytes for its arena on the GPU; "
            f"it takes at least {_GRAIN}"
        )
    return least & -_GRAIN


class Outgoing:
    """The stream in which a rank writes: copies into peers' memory, messages, puts.

    Parameters
    ----------
    gpu : Gpu
        The rank's GPU.
    pe : Pe
        The rank.
    """

    def __init__(self, gpu: Gpu, pe: Pe) -> None:
        self.gpu, self.pe = gpu, pe
        self.stream = gpu.stream()
        self._lock = threading.Lock()

    def copy(self, target: Any, piece: Any) -> None:
        """Copy a piece that the calling thread has computed, or is computing, in its stream.

        What the thread queues later waits for the copy: it may change the piece, or let it go.
        """
        here = self.gpu.current()
        with self._lock:
            self.stream.wait_event(here.record())
            self.gpu.copy(target, piece, self.stream)
            copied = self.stream.record()
        here.wait_event(copied)

    def settle(self) -> None:
        """Wait until all that was written before is where it belongs."""
        self.pe.quiet(self.stream)
        self.stream.synchronize()


class DeviceBlock:
    """A range of an arena. It returns when this object and every array over it have died.

    Attributes
    ----------
    offset, address, nbytes : int
        Where it begins in the arena, where that is, and its bytes as asked for.
    """

    __slots__ = ("__weakref__", "_arena", "_kept", "address", "nbytes", "offset")

    def __init__(self, arena: SymmetricArena, offset: int, nbytes: int) -> None:
        self.offset, self.nbytes = offset, nbytes
        self.address = arena.address + offset
        self._kept = True
        self._arena = arena  # last: a block without it has nothing to return

    def array(self, shape: Sequence[int], dtype: DTypeLike, begin: int = 0) -> Any:
        """A C-contiguous array over the block, ``begin`` bytes into it.

        Raises
        ------
        TypeError
            The dtype holds Python objects.
        ValueError
            The array does not fit.
        """
        dtype = np.dtype(dtype)
        if dtype.hasobject:
            raise TypeError(f"dtype {dtype} holds Python objects, which cannot lie on a GPU")
        nbytes = math.prod(shape) * dtype.itemsize
        if not 0 <= begin <= self.nbytes - nbytes:
            raise ValueError(
                f"an array of {nbytes} bytes at {begin} does not fit a block of {self.nbytes}"
            )
        return self._arena.gpu.view(self.address + begin, shape, dtype, self)

    def condemn(self) -> None:
        """Never hand this range out again: someone may write it whom nobody can stop."""
        self._kept = False

    def release(self) -> None:
        """Return it now, because nothing on the GPU uses it any more."""
        if self._kept:
            self._kept = False
            self._arena.take_back(self, settled=True)

    def __del__(self, _finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        try:
            if self._kept:
                self._arena.take_back(self, settled=False)
        except Exception:
            if not _finalizing():
                raise


class SymmetricArena:
    """Memory of this rank's GPU that other ranks can write. Made by all ranks together.

    Parameters
    ----------
    out : Outgoing
        The rank's outgoing stream.
    capacity : int
        Bytes; the same on all ranks, see `agreed_capacity`.

    Attributes
    ----------
    slots : int
        The address of one number for each PE, zero at first, which that PE alone sets.
    """

    def __init__(self, out: Outgoing, capacity: int) -> None:
        self.gpu = out.gpu
        self.capacity = capacity
        self._out = out
        header = round_up(8 * out.pe.n_pes, _GRAIN)
        self.memory = out.pe.allocate(header + capacity)
        self.address = self.slots = self.memory.address
        self._free = FreeList()
        self._free.add(header, capacity)
        self._lock = threading.Lock()
        self._returned: deque[tuple[int, int, bool]] = deque()
        self._waiting: list[Range] = []
        self.in_use = 0
        zeros = self.gpu.view(self.slots, (out.pe.n_pes,), "u8", self)
        self.gpu.copy(zeros, 0, out.stream)
        out.stream.synchronize()  # nobody knows an offset in this arena before, so none signals

    def allocate(self, sizes: Sequence[int]) -> list[DeviceBlock]:
        """Blocks of so many bytes each, all or none.

        Raises
        ------
        AdmissionError
            There is no room.
        """
        with self._lock:
            self._sort_in()
            ranges = self._take(sizes)
            if ranges is None and self._waiting:
                self._out.settle()
                self.gpu.synchronize()
                for offset, length in self._waiting:
                    self._free.add(offset, length)
                self._waiting.clear()
                ranges = self._take(sizes)
            if ranges is None:
                raise AdmissionError(
                    f"the arena on the GPU has no room for {sum(sizes)} bytes in {len(sizes)} "
                    f"blocks: of its {self.capacity} bytes {self.in_use} are in use, and the "
                    f"rest is in {len(self._free)} ranges"
                )
            return [
                DeviceBlock(self, offset, size)
                for (offset, _), size in zip(ranges, sizes, strict=True)
            ]

    def take_back(self, block: DeviceBlock, settled: bool) -> None:
        """Take a block back; called by destructors, so it never waits.

        ``settled``: nothing on the GPU uses it any more.
        """
        self._returned.append((block.offset, round_up(block.nbytes, _GRAIN), settled))

    def _sort_in(self) -> None:
        while self._returned:
            offset, length, settled = self._returned.popleft()
            self.in_use -= length
            if settled:
                self._free.add(offset, length)
            elif length:
                self._waiting.append((offset, length))

    def _take(self, sizes: Sequence[int]) -> list[Range] | None:
        taken: list[Range] = []
        for size in sizes:
            length = round_up(size, _GRAIN)
            offset = self._free.take(length, _GRAIN) if length else 0
            if offset is None:
                for begin, used in taken:
                    self._free.add(begin, used)
                return None
            taken.append((offset, length))
        self.in_use += sum(length for _, length in taken)
        return taken
