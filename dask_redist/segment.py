"""A segment: one shared file of a process, the card that lets others find it, and views of it.

A memfd where the system has them: no name, no /dev/shm limit, nothing left after kill -9. Others of
the same user open it through /proc. Elsewhere, or on request, a named file.

The first bytes of a segment are a random nonce. Who follows a card and reads the same nonce has
proven to share this host's memory; names, addresses and boot ids prove nothing.
"""

import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "NONCE",
    "ArenaCard",
    "Bytes",
    "close_segment",
    "map_file",
    "open_segment",
    "part",
    "view_bytes",
]

NONCE = 16  # bytes at the start of the file
CREDITS = slice(64, 4096)  # then, in its first page: what each writer has written, as int64

Bytes = NDArray[np.uint8]


class ArenaCard(NamedTuple):
    """What a peer needs to attach an arena; plain enough for msgpack.

    Attributes
    ----------
    pid : int
        The process that owns the arena.
    path : str
        Opens the arena's file.
    nonce : str
        What its first bytes must be, in hexadecimal.
    capacity : int
        Its size in bytes.
    """

    pid: int
    path: str
    nonce: str
    capacity: int


def open_segment(directory: str | None, nonce: str) -> tuple[int, str | None]:
    """Create the file of a segment; returns its descriptor, and its path if it has a name."""
    if directory is None and hasattr(os, "memfd_create"):
        return os.memfd_create("dask_redist", os.MFD_CLOEXEC), None
    if directory is None:
        directory = tempfile.gettempdir()
    path = os.path.join(os.path.abspath(directory), f"dask_redist-{nonce}")
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), path


def close_segment(fd: int, path: str | None, pid: int) -> None:
    """Close a segment's file, and remove its name if it has one and this process gave it."""
    os.close(fd)
    if path is not None and pid == os.getpid():  # never by a forked child
        Path(path).unlink(missing_ok=True)


def map_file(fd: int, capacity: int) -> Bytes:
    """Map a file, shared and writable; it is unmapped when the last array over it has died."""
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_NORESERVE", 0)
    mapping = mmap.mmap(fd, capacity, flags=flags)
    if hasattr(mmap, "MADV_DONTDUMP"):
        mapping.madvise(mmap.MADV_DONTDUMP)
    return np.frombuffer(mapping, dtype=np.uint8)


def view_bytes(
    memory: Bytes, offset: int, shape: Sequence[int], dtype: np.dtype[Any]
) -> NDArray[Any]:
    """A C-contiguous array over bytes, whatever the dtype: also structured, V7 or of itemsize 0.

    Raises
    ------
    TypeError
        The dtype holds Python objects, which mean nothing to another process.
    ValueError
        The array does not fit.
    """
    if dtype.hasobject:
        raise TypeError(f"dtype {dtype} holds Python objects, which cannot lie in shared memory")
    nbytes = math.prod(shape) * dtype.itemsize
    if offset < 0 or offset + nbytes > memory.size:
        raise ValueError(
            f"an array of shape {tuple(shape)} and dtype {dtype} needs {nbytes} bytes at "
            f"{offset}, of which there are {memory.size}"
        )
    return np.ndarray(shape, dtype, buffer=memory, offset=offset)


def part(array: NDArray[Any], box: Sequence[slice]) -> NDArray[Any]:
    """A part of an array, always as a view: indexing a 0-d array by () would give a scalar."""
    index: tuple[Any, ...] = (*box, ...)
    view: NDArray[Any] = array[index]
    return view
