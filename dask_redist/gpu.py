"""What wires need of a GPU: streams, views of memory, and copies in the order of a stream.

`Gpu` says what that is; `Cupy` gives it, and is all that uses CuPy. Nothing here waits for the GPU
but what is called synchronize.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

__all__ = ["Cupy", "Event", "Gpu", "Stream", "cupy_nccl"]


class Event(Protocol):
    """A point in a stream."""

    @property
    def done(self) -> bool:
        """Whether the GPU has come to this point."""

    def synchronize(self) -> None:
        """Wait until the GPU has come to this point."""


class Stream(Protocol):
    """A queue of the GPU: what is put into it is done in this order."""

    def __cuda_stream__(self) -> tuple[int, int]: ...

    def record(self) -> Event:
        """The point behind all that is in the queue now."""

    def wait_event(self, event: Any) -> None:
        """Let all that comes later in this queue wait for a point in another one."""

    def synchronize(self) -> None:
        """Wait until the queue is empty."""


class Gpu(Protocol):
    """The GPU of a rank."""

    def use(self) -> None:
        """Make it the one of the calling thread."""

    def stream(self) -> Stream:
        """A new stream, which does not wait for the default one."""

    def current(self) -> Stream:
        """The stream in which the calling thread computes."""

    def view(self, address: int, shape: Sequence[int], dtype: DTypeLike, owner: Any) -> Any:
        """A C-contiguous array over memory that this GPU can address; it keeps ``owner`` alive."""

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Any:
        """A new C-contiguous array, for use in the calling thread's stream."""

    def address(self, array: Any) -> int:
        """Where an array begins."""

    def copy(self, target: Any, source: Any, stream: Stream) -> None:
        """Assign an array, or a number, to an array of the same shape, in a stream."""

    def synchronize(self) -> None:
        """Wait until all streams of the GPU are empty."""


class Cupy:
    """The GPU as CuPy gives it.

    Parameters
    ----------
    device : int
        Its index among those that this process sees.
    """

    def __init__(self, device: int) -> None:
        import cupy
        from cupy import cuda

        self._array, self._cuda = cupy.ndarray, cuda
        self._index = device
        self._device = cuda.Device(device)

    def use(self) -> None:
        self._device.use()

    def stream(self) -> Stream:
        with self._device:
            made: Stream = self._cuda.Stream(non_blocking=True)
        return made

    def current(self) -> Stream:
        found: Stream = self._cuda.get_current_stream(self._index)
        return found

    def view(self, address: int, shape: Sequence[int], dtype: DTypeLike, owner: Any) -> Any:
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        # Told the device, CuPy does not ask the driver, which may name the peer's for its memory.
        memory = self._cuda.UnownedMemory(address, nbytes, owner, self._index)
        return self._array(tuple(shape), dtype, self._cuda.MemoryPointer(memory, 0))

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Any:
        with self._device:
            return self._array(tuple(shape), np.dtype(dtype))

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def copy(self, target: Any, source: Any, stream: Stream) -> None:
        # Where both sides are contiguous CuPy has the copy engine do it, else one kernel, which
        # stores straight into the peer's memory.
        with self._device, stream:  # type: ignore[attr-defined]
            target[...] = source

    def synchronize(self) -> None:
        self._device.synchronize()


def cupy_nccl() -> Any:
    """CuPy's NCCL; None where there is no CuPy, or it finds no NCCL, of which it warns."""
    try:
        from cupy.cuda import nccl as found
    except ImportError:
        return None
    return found if found.available else None
