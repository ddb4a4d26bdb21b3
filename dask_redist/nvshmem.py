"""A rank as a processing element (PE) of NVSHMEM; all that uses nvshmem4py.

NVSHMEM takes one call at a time from a process, and where it is misused it does not raise: it
hangs, or ends the process. So here is one lock around all calls, each argument is checked before,
and each call is made on the rank's own GPU. Calls that all PEs have to make together say so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from dask_redist.errors import RedistError
from dask_redist.gpu import Stream

__all__ = ["Pe", "Symmetric", "new_uid"]


def new_uid() -> bytes:
    """What one PE makes and tells all others, by any means, so that they find each other."""
    import nvshmem.core as _nv

    uid: bytes = _nv.get_unique_id(empty=False)._data.tobytes()
    return uid


class Symmetric(NamedTuple):
    """Memory that each PE has, of the same size.

    Attributes
    ----------
    address : int
        Where this PE's own part is.
    nbytes : int
        Its size.
    buffer : cuda.core.Buffer
        What nvshmem4py calls it.
    """

    address: int
    nbytes: int
    buffer: Any


class Pe:
    """The PE that this process is. Made by all PEs together; thread-safe.

    Parameters
    ----------
    device : int
        The GPU's index among those that this process sees.
    uid : bytes
        The same for all: `new_uid` of one of them.
    pe, n_pes : int
        Which of how many this is.
    """

    def __init__(self, device: int, uid: bytes, pe: int, n_pes: int) -> None:
        import nvshmem.bindings
        import nvshmem.core
        from cuda.core import Buffer, Device

        self.pe, self.n_pes = pe, n_pes
        self._nv, self._bindings, self._buffer = nvshmem.core, nvshmem.bindings, Buffer
        self._lock = threading.Lock()
        self._allocated: list[Symmetric] = []
        self._device = Device(device)
        self._device.set_current()  # init does not
        found = self._nv.get_unique_id(empty=True)
        found._data.view(np.uint8)[...] = np.frombuffer(uid, np.uint8)
        self._nv.init(
            device=self._device, uid=found, rank=pe, nranks=n_pes, initializer_method="uid"
        )
        status, names = int(self._nv.init_status()), self._nv.InitStatus
        #: Whether PEs can wait for each other's signals. Where several processes share a GPU
        #: without CUDA's multi-process service, such a wait ends the process.
        self.has_signals = status != names.STATUS_LIMITED_MPG
        self._open = names.STATUS_IS_INITIALIZED <= status <= names.STATUS_FULL_MPG
        if not self._open:
            raise RedistError(f"NVSHMEM did not start on PE {pe}: its status is {status}")

    def allocate(self, nbytes: int) -> Symmetric:
        """Memory of the same size on each PE. Called by all PEs together; blocks.

        Raises
        ------
        ValueError
            No bytes: the library would leave the other PEs waiting.
        """
        if nbytes < 1:
            raise ValueError(f"{nbytes} bytes of symmetric memory: it takes at least one")
        with self._calling():
            buffer = self._nv.buffer(nbytes)
            memory = Symmetric(int(buffer.handle), nbytes, buffer)
            self._allocated.append(memory)
        return memory

    def peer_address(self, memory: Symmetric, pe: int) -> int | None:
        """Where this GPU can address another PE's part; None where it cannot.

        Raises
        ------
        ValueError
            The own PE: nvshmem4py would count it as a second owner, and never free it.
        """
        self._check_other(pe)
        with self._calling():
            if not self._bindings.ptr(memory.address, pe):
                return None
            return int(self._nv.get_peer_buffer(memory.buffer, pe).handle)

    def put_nbi(self, target: int, source: int, nbytes: int, pe: int, stream: Stream) -> None:
        """Begin to copy to another PE; it is there, and the source free, after a `quiet`.

        Parameters
        ----------
        target : int
            The address in this PE's own part of what is written in the other's.
        source : int
            An address in symmetric memory of this PE.
        nbytes : int
            How much.
        pe : int
            The other PE.
        stream : Stream
            In whose order.
        """
        self._check_other(pe)
        with self._calling():
            self._nv.put_nbi(
                self._bytes(target, nbytes), self._bytes(source, nbytes), pe, stream=stream
            )

    def put_signal(
        self, target: int, source: int, nbytes: int, slot: int, value: int, pe: int, stream: Stream
    ) -> None:
        """Copy to another PE, and then set a number there; in the stream the source is free then.

        The parameters are those of `put_nbi`; ``slot`` is the number's address in this PE's part.
        """
        self._check_other(pe)
        with self._calling():
            self._nv.put_signal(
                *(self._bytes(target, nbytes), self._bytes(source, nbytes), self._bytes(slot, 8)),
                *(value, self._nv.SignalOp.SIGNAL_SET, pe),
                stream=stream,
            )

    def signal(self, slot: int, value: int, pe: int, stream: Stream) -> None:
        """Set a number in another PE; ``slot`` is its address in this PE's part."""
        self._check_other(pe)
        with self._calling():
            self._nv.signal_op(
                self._bytes(slot, 8), value, self._nv.SignalOp.SIGNAL_SET, pe, stream=stream
            )

    def signal_wait(self, slot: int, value: int, stream: Stream) -> None:
        """Let a stream wait until the number at an own address is at least ``value``.

        Raises
        ------
        RedistError
            There are no signals here.
        """
        if not self.has_signals:
            raise RedistError(
                f"PE {self.pe} shares its GPU without CUDA's multi-process service (MPS): it "
                "cannot wait for signals; start MPS, or give each rank a GPU of its own"
            )
        with self._calling():
            self._nv.signal_wait(
                self._bytes(slot, 8), value, self._nv.ComparisonType.CMP_GE, stream=stream
            )

    def quiet(self, stream: Stream) -> None:
        """Let a stream wait until all that it has put before is there."""
        with self._calling():
            self._nv.quiet(stream=stream)

    def close(self) -> None:
        """Free all symmetric memory and end NVSHMEM. Called by all PEs together; blocks."""
        with self._calling():
            while self._allocated:
                self._nv.free(self._allocated.pop().buffer)
            self._nv.finalize()
            self._open = False

    @contextmanager
    def _calling(self) -> Iterator[None]:
        with self._lock:
            if not self._open:
                raise RedistError(f"NVSHMEM has ended on PE {self.pe}")
            self._device.set_current()  # this thread may have another one, or none
            yield

    def _check_other(self, pe: int) -> None:
        if pe == self.pe or not 0 <= pe < self.n_pes:
            raise ValueError(f"PE {pe} is no other one of {self.n_pes} for PE {self.pe}")

    def _bytes(self, address: int, nbytes: int) -> Any:
        """A range as nvshmem4py takes it: of an array it would move the whole allocation."""
        return self._buffer.from_handle(address, nbytes)
