"""A block: a range of an arena that lives as long as the last array over it.

NumPy follows `base` from every view to the object that owns the memory. Here that object is the
block, which offers its bytes through ``__array_interface__``; when it dies, the range returns.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dask_redist.segment import Bytes, view_bytes
from dask_redist.syscalls import PAGE, round_up

__all__ = ["Block", "Owner", "block_of", "room_for"]

_SMALL = 32 * 1024  # blocks below this share pages
_GRAIN = 64  # bytes: a cache line, and more than any dtype's alignment


def room_for(nbytes: int) -> tuple[int, int]:
    """What a block of so many bytes takes in an arena, and what its offset is a multiple of.

    Examples
    --------
    >>> room_for(65), room_for(40_000)      # with pages of 4 KiB
    ((128, 64), (40960, 4096))
    """
    align = _GRAIN if nbytes < _SMALL else PAGE
    return round_up(nbytes, align), align


class Owner(Protocol):
    """What blocks return to: an arena."""

    def take_back(self, block: "Block") -> None:
        """Called once, when a block dies: in any thread, inside the garbage collector too."""


class Block:
    """A range of an arena. It returns when this object and every array over it have died.

    Attributes
    ----------
    offset : int
        Where it begins in the arena; a multiple of 64, and of the page size from 32 KiB on.
    nbytes : int
        Its bytes, as asked for.
    """

    __slots__ = ("__weakref__", "_arena", "condemned", "cooled", "memory", "nbytes", "offset")

    def __init__(self, arena: Owner, memory: Bytes, offset: int, nbytes: int) -> None:
        self.memory = memory  # keeps the mapping when the arena is closed before the block dies
        self.offset = offset
        self.nbytes = nbytes
        self.cooled = False
        self.condemned = False
        self._arena = arena  # last: a block without it has nothing to return

    @property
    def __array_interface__(self) -> dict[str, Any]:
        address = self.memory.__array_interface__["data"][0] + self.offset
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (address, False)}

    def __repr__(self) -> str:
        return f"Block(offset={self.offset}, nbytes={self.nbytes})"

    def array(self, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """An array over the block: C-contiguous and writable; it keeps the block alive.

        Raises
        ------
        TypeError
            The dtype holds Python objects.
        ValueError
            The array is larger than the block.
        """
        return view_bytes(np.asarray(self), 0, shape, np.dtype(dtype))

    def cool(self) -> None:
        """Give the block's pages back when it returns, instead of keeping them warm."""
        self.cooled = True

    def condemn(self) -> None:
        """Never hand this range out again: someone may write it whom nobody can stop."""
        self.condemned = True

    def __del__(self, _finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        try:
            self._arena.take_back(self)
        except Exception:
            if not _finalizing():
                raise


def block_of(array: Any) -> Block | None:
    """The block that an array lies in, or None.

    Follows `base` through views and the exporters of memoryviews; a copy lies in no block.
    """
    while array is not None and not isinstance(array, Block):
        array = array.obj if isinstance(array, memoryview) else getattr(array, "base", None)
    return array
