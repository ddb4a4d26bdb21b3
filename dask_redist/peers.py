"""Peers: the arenas of other ranks, attached so that this process can write into their blocks.

A peer in the same process is written directly. A peer in another process of the same host is
mapped a second time, through the file that its card names; `attach` proves by the arena's nonce
that it is the same memory. Either way a write is one copy to the piece's final place.
"""

import errno
import os
import stat
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dask_redist.arena import Arena, arena_here
from dask_redist.pages import PageBudget, Store, store
from dask_redist.segment import CREDITS, NONCE, ArenaCard, Bytes, map_file, part, view_bytes
from dask_redist.syscalls import PAGE

__all__ = ["LocalPeer", "NotAttached", "PageBudget", "Peer", "SharedPeer", "attach"]


class NotAttached(OSError):
    """The arena cannot be reached through shared memory; another wire has to be used."""


def matching(piece: NDArray[Any], shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """The piece as the target wants it, without a copy.

    Places name dtypes by `numpy.dtype.str`, which spells structured ones as plain bytes (``|V12``):
    a piece may be written to plain bytes of its own item size.

    Raises
    ------
    TypeError
        Another dtype; nothing is ever converted.
    ValueError
        Another shape; nothing is ever broadcast.
    """
    if not hasattr(type(piece), "__cuda_array_interface__"):
        piece = np.asarray(piece)
    if piece.dtype != dtype:
        if dtype.str != piece.dtype.str or piece.dtype.hasobject:
            raise TypeError(f"a piece of dtype {piece.dtype} cannot be written to one of {dtype}")
        piece = piece.view(dtype)
    if piece.shape != shape:
        raise ValueError(f"a piece of shape {piece.shape} cannot be written to {shape} elements")
    return piece


class Peer:
    """An arena that this process can write. Made by `attach`.

    Attributes
    ----------
    wire : str
        "direct" in one process, "shared memory" between processes of one host.
    """

    wire: str

    def __init__(self, memory: Bytes) -> None:
        self._memory: Bytes | None = memory
        self._crediting = threading.Lock()

    def view(self, offset: int, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """An array over a block of the peer; it keeps the memory mapped, also after `close`.

        Raises
        ------
        TypeError
            The dtype holds Python objects.
        ValueError
            The array does not lie inside the arena.
        NotAttached
            The peer is closed.
        """
        memory = self._memory
        if memory is None:
            raise NotAttached(errno.ESHUTDOWN, f"the peer is closed: no view at {offset}")
        if offset < PAGE:
            raise ValueError(f"offset {offset} lies in the arena's first page, which is no block")
        return view_bytes(memory, offset, shape, np.dtype(dtype))

    def store(
        self, view: NDArray[Any], target_slices: tuple[slice, ...], piece: NDArray[Any]
    ) -> Store:
        """A piece and its place in a block of the peer, for `dask_redist.pages.store`.

        Parameters
        ----------
        view : numpy.ndarray
            The `view` of the whole array that lies in the block.
        target_slices : tuple of slice
            The place of the piece in that array, one slice an axis.
        piece : numpy.ndarray
            Of the place's shape and the array's dtype; in any memory order, read-only or not.

        Raises
        ------
        TypeError
            The piece has another dtype.
        ValueError
            The piece has another shape than its place.
        NotAttached
            The peer is closed.
        """
        if self._memory is None:
            raise NotAttached(errno.ESHUTDOWN, "the peer is closed: nothing is written")
        target = part(view, target_slices)
        return self._store(target, matching(piece, target.shape, target.dtype))

    def write(
        self, view: NDArray[Any], target_slices: tuple[slice, ...], piece: NDArray[Any]
    ) -> None:
        """Write a piece to its place, as `store` takes them. Thread-safe for disjoint places."""
        store([self.store(view, target_slices, piece)])

    def read(self, view: NDArray[Any]) -> NDArray[Any]:
        """A `view`, or a part of one, to be read soon: itself, or a copy."""
        return view

    def credit(self, writer: int, nbytes: int) -> None:
        """Tell the owner how much has been written; a writer has a number, and its own counter."""
        memory = self._memory
        if memory is not None:
            counters = memory[CREDITS].view(np.int64)
            with self._crediting:
                counters[writer % len(counters)] += nbytes

    def _store(self, target: NDArray[Any], piece: NDArray[Any]) -> Store:
        return Store(target, piece)

    def close(self) -> None:
        """Unmap the peer's memory, as soon as writes that are under way have ended."""
        self._memory = None


class LocalPeer(Peer):
    """An arena of this process: its own, or that of another rank that lives here too."""

    wire = "direct"

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena.memory)


class SharedPeer(Peer):
    """An arena of another process on this host."""

    wire = "shared memory"

    def __init__(self, card: ArenaCard, pages: PageBudget) -> None:
        memory = _open(card)
        super().__init__(memory)
        self._origin: int = memory.ctypes.data
        self._pages = pages
        self._slot = pages.enrol(memory)

    def _store(self, target: NDArray[Any], piece: NDArray[Any]) -> Store:
        return Store(target, piece, self._pages, self._slot, self._origin)

    def read(self, view: NDArray[Any]) -> NDArray[Any]:
        return self._pages.read(self._slot, self._origin, view)

    def close(self) -> None:
        self._pages.leave(self._slot)
        super().close()


def attach(card: ArenaCard, pages: PageBudget) -> Peer:
    """Reach an arena through memory.

    Parameters
    ----------
    card : ArenaCard
        The arena's `card`; a plain tuple of the same four does as well.
    pages : PageBudget
        Shared by all peers of this process.

    Returns
    -------
    Peer
        Its `wire` is "direct" for an arena of this process, else "shared memory".

    Raises
    ------
    NotAttached
        The memory is not this host's, belongs to another user, or is gone.

    Examples
    --------
    >>> arena = Arena(1 << 20, keep=0)
    >>> (block,) = arena.allocate([32])
    >>> block.array((4,), "f8")[:] = 0
    >>> peer = attach(arena.card, PageBudget(1 << 20))
    >>> peer.write(peer.view(block.offset, (4,), "f8"), (slice(1, 3),), np.array([5.0, 6.0]))
    >>> block.array((4,), "f8")
    array([0., 5., 6., 0.])
    >>> peer.wire
    'direct'
    """
    card = ArenaCard(*card)
    arena = arena_here(card)
    return SharedPeer(card, pages) if arena is None else LocalPeer(arena)


def _open(card: ArenaCard) -> Bytes:
    """Map the file that a card names, if it is the arena that it names."""
    try:
        fd = os.open(card.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != card.capacity:
                raise NotAttached(
                    errno.ESTALE, f"not the arena of process {card.pid}: another file", card.path
                )
            memory = map_file(fd, card.capacity)
        finally:
            os.close(fd)
    except NotAttached:
        raise
    except OSError as error:
        raise NotAttached(
            error.errno, f"the arena of process {card.pid} cannot be opened: {error}", card.path
        ) from error
    if memory[:NONCE].tobytes().hex() != card.nonce:
        raise NotAttached(
            errno.ESTALE, f"not the arena of process {card.pid}: another nonce", card.path
        )
    return memory
