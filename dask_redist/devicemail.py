"""Messages between the GPUs of ranks over NVSHMEM, where no memory of the other can be addressed.

A message is packed, and put into room that its owner gave, with a signal behind it: a number that
only rises. The owner lets a stream wait for that number and unpacks there; the room is free again
when that has been done. A wait is queued only after the put that it waits for, and never in the
stream that puts, so no two ranks can wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from dask_redist.packing import Header, pairs
from dask_redist.symmetric import DeviceBlock, Outgoing, SymmetricArena

__all__ = ["DeviceMail", "Owner", "Staging"]


class Owner(Protocol):
    """Another rank's `DeviceMail`, as it is asked: by any means that answers or raises."""

    def room(self, nbytes: int) -> int: ...

    def arrived(
        self, sender: int, epoch: int, run: int, offset: int, headers: Sequence[Header]
    ) -> None: ...


class Staging:
    """A buffer of a message in this rank's arena."""

    def __init__(self, block: DeviceBlock, nbytes: int) -> None:
        self.block, self.nbytes = block, nbytes

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, used: slice) -> Staging:
        return Staging(self.block, used.stop)


class DeviceMail:
    """Sends and receives messages over NVSHMEM.

    Parameters
    ----------
    out : Outgoing
        The rank's outgoing stream.
    arena : SymmetricArena
        The rank's arena: messages are packed in it, and arrive in it.
    owner_of : callable
        Another PE's `Owner`.
    view_of : callable
        ``view_of(run, number)`` is the array over the block of an output chunk of this rank.
    """

    def __init__(
        self,
        out: Outgoing,
        arena: SymmetricArena,
        owner_of: Callable[[int], Owner],
        view_of: Callable[[int, int], Any],
    ) -> None:
        self._out, self._arena = out, arena
        self._pe, self._gpu = out.pe, out.gpu
        self._owner_of, self._view_of = owner_of, view_of
        self._arrivals = out.gpu.stream()
        self._arriving = threading.Lock()
        self._granted: dict[int, DeviceBlock] = {}
        self._epochs = [0] * out.pe.n_pes
        self._rising = threading.Lock()

    # ------------------------------------------------------------------------------ sender
    def take(self, nbytes: int) -> Staging:
        """A buffer for a message."""
        (block,) = self._arena.allocate([nbytes])
        return Staging(block, nbytes)

    def pack(self, buffer: Staging, begin: int, piece: Any) -> None:
        """Queue the copy of a piece into a buffer."""
        self._out.copy(buffer.block.array(piece.shape, piece.dtype, begin), piece)

    def send(self, pe: int, run: int, headers: list[Header], buffer: Staging) -> None:
        """Send a message; it has been unpacked when this returns."""
        owner = self._owner_of(pe)
        offset = owner.room(buffer.nbytes)
        with self._rising:
            epoch = self._next(pe)
            self._pe.put_signal(
                self._arena.address + offset,
                buffer.block.address,
                buffer.nbytes,
                self._slot,
                epoch,
                pe,
                self._out.stream,
            )
        owner.arrived(self._pe.pe, epoch, run, offset, headers)
        buffer.block.release()

    def put(self, pe: int, offset: int, buffer: Staging) -> None:
        """Queue that a buffer is put to an offset in another rank's arena; then see `landed`."""
        if not 0 <= offset <= self._arena.memory.nbytes - buffer.nbytes:
            raise ValueError(
                f"{buffer.nbytes} bytes at {offset} do not lie in the arena of PE {pe}, "
                f"which has {self._arena.memory.nbytes}"
            )
        target = self._arena.address + offset
        self._pe.put_nbi(target, buffer.block.address, buffer.nbytes, pe, self._out.stream)

    def landed(self, pe: int, run: int, buffers: Sequence[Staging]) -> None:
        """Wait until what was put is there, and the owner's GPU sees it; the buffers are free."""
        with self._rising:
            self._pe.quiet(self._out.stream)
            epoch = self._next(pe)
            self._pe.signal(self._slot, epoch, pe, self._out.stream)
        self._owner_of(pe).arrived(self._pe.pe, epoch, run, -1, [])
        for buffer in buffers:
            buffer.block.release()

    # ------------------------------------------------------------------------------- owner
    def room(self, nbytes: int) -> int:
        """Room in this rank's arena for a message; its offset.

        Raises
        ------
        AdmissionError
            There is none.
        """
        (block,) = self._arena.allocate([nbytes])
        self._granted[block.offset] = block
        return block.offset

    def arrived(
        self, sender: int, epoch: int, run: int, offset: int, headers: Sequence[Header]
    ) -> None:
        """Unpack a message that a PE has put, and signalled with its number; returns when done.

        Parameters
        ----------
        sender, epoch : int
            Who sent it, and its number.
        run : int
            The run that its pieces belong to.
        offset : int
            The room that it was given; -1: its pieces are in their places.
        headers : sequence of sequence of int
            Its pieces, as `MessageWire` sends them.
        """
        done = None
        try:
            with self._arriving:
                self._pe.signal_wait(self._arena.slots + 8 * sender, epoch, self._arrivals)
                try:
                    if offset >= 0:
                        self._unpack(run, self._granted[offset], headers)
                finally:
                    done = self._arrivals.record()
        finally:
            if done is not None:
                done.synchronize()  # nobody gets this room before it has been read
                if offset >= 0:
                    self._granted.pop(offset).release()

    def _unpack(self, run: int, block: DeviceBlock, headers: Sequence[Header]) -> None:
        def bytes_at(begin: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
            return block.array(shape, dtype, begin)

        # A message is as long as its room: that was asked for when it was complete.
        for place, piece in pairs(headers, block.nbytes, partial(self._view_of, run), bytes_at):
            self._gpu.copy(place, piece, self._arrivals)

    @property
    def _slot(self) -> int:
        """Where others find this rank's number, as an address in its own part."""
        return self._arena.slots + 8 * self._pe.pe

    def _next(self, pe: int) -> int:
        self._epochs[pe] += 1
        return self._epochs[pe]
