"""Wires between the GPUs of ranks: through peer memory where it reaches, else across the network.

All run.py sees is the `Wire` of `dask_redist.wires`. What differs on a GPU is that a write is only
queued when it returns: the bytes count as held until the flush has waited for the GPU.

Across the network pieces travel in messages, see `dask_redist.devicemail`. A large one that lies in
one run in its chunk is put straight to its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from dask_redist.devicemail import DeviceMail, Owner, Staging
from dask_redist.errors import RedistError
from dask_redist.gpu import Gpu
from dask_redist.nvshmem import Pe
from dask_redist.packing import run_in_chunk
from dask_redist.peers import matching
from dask_redist.segment import part
from dask_redist.symmetric import Outgoing, SymmetricArena
from dask_redist.wires import MessageWire, Place, Wire

__all__ = ["DeviceReach", "NetworkWire", "PeerWire", "run_in_chunk"]

#: bytes from which on a piece in one run travels alone instead of in a message
_ALONE = 1 << 20


class PeerWire:
    """Copies pieces to their final place in memory that this GPU can address.

    Parameters
    ----------
    out : Outgoing
        The rank's outgoing stream.
    address, nbytes : int
        Where the arena of the rank at the other end is, and its size.
    """

    name = "peer memory"
    far = False

    def __init__(self, out: Outgoing, address: int, nbytes: int) -> None:
        self._out = out
        self._address, self._nbytes = address, nbytes
        self._held = 0
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        """Bytes that have been queued, and not waited for."""
        return self._held

    def write(self, place: Place, target_slices: tuple[slice, ...], piece: Any) -> None:
        """Queue the copy of a piece; the calling thread's stream may change it afterwards."""
        dtype = np.dtype(place.dtype)
        view = self._out.gpu.view(self._address + place.offset, place.shape, dtype, None)
        if not 0 <= place.offset <= self._nbytes - view.nbytes:
            raise ValueError(
                f"output chunk {place.out} has {view.nbytes} bytes at {place.offset}, "
                f"the arena has {self._nbytes}"
            )
        target = part(view, target_slices)
        piece = matching(piece, target.shape, dtype)
        if not piece.nbytes:
            return
        self._out.copy(target, piece)
        with self._lock:
            self._held += piece.nbytes

    def start(self) -> None:
        """Nothing: it is under way."""

    def flush(self) -> None:
        """Wait until all that was queued has arrived."""
        held = self._held
        if held:
            self._out.settle()
            with self._lock:
                self._held -= held


class NetworkWire:
    """Moves pieces to a rank whose memory this GPU cannot address.

    Parameters
    ----------
    mail : DeviceMail
        The rank's.
    pe, run : int
        The rank at the other end, and the run.
    limit : int
        Bytes of the largest message.
    alone : int
        Pieces from this many bytes on, if in one run in their chunk, are put to their place.
    """

    name = "nvshmem"
    far = True

    def __init__(
        self, mail: DeviceMail, pe: int, run: int, limit: int = 32 << 20, alone: int = _ALONE
    ) -> None:
        self._mail, self._pe, self._run, self._alone = mail, pe, run, alone
        self._messages = MessageWire(
            partial(mail.send, pe, run), limit, self.name, self.far, mail.take, mail.pack
        )
        self._put: list[Staging] = []
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        """Bytes that have been written and have not arrived yet."""
        with self._lock:
            return self._messages.held + sum(buffer.nbytes for buffer in self._put)

    def write(self, place: Place, target_slices: tuple[slice, ...], piece: Any) -> None:
        """Queue the copy of a piece, and its way; it may be changed in the thread's stream then."""
        begin = run_in_chunk(place.shape, target_slices)
        if begin is None or piece.nbytes < self._alone:
            return self._messages.write(place, target_slices, piece)
        dtype = np.dtype(place.dtype)
        bounds = [s.indices(n) for s, n in zip(target_slices, place.shape, strict=True)]
        piece = matching(piece, tuple(upper - lower for lower, upper, _ in bounds), dtype)
        buffer = self._mail.take(piece.nbytes)
        self._mail.pack(buffer, 0, piece)
        self._mail.put(self._pe, place.offset + begin * dtype.itemsize, buffer)
        with self._lock:
            self._put.append(buffer)

    def start(self) -> None:
        """Send the messages that are not full."""
        self._messages.start()

    def flush(self) -> None:
        """Send what is left; all has arrived when this returns."""
        self._messages.flush()
        with self._lock:
            put = self._put[:]
        if put:
            self._mail.landed(self._pe, self._run, put)
            with self._lock:
                del self._put[: len(put)]


class DeviceReach:
    """A rank's GPU wires. Made, and closed, by all ranks together.

    Parameters
    ----------
    pe : Pe
        The rank.
    gpu : Gpu
        Its GPU.
    capacity : int
        Bytes of each rank's arena; the same on all.
    owner_of, view_of : callable
        As `DeviceMail` takes them.
    """

    def __init__(
        self,
        pe: Pe,
        gpu: Gpu,
        capacity: int,
        owner_of: Callable[[int], Owner],
        view_of: Callable[[int, int], Any],
    ) -> None:
        self.out = Outgoing(gpu, pe)
        self.arena = SymmetricArena(self.out, capacity)
        self.mail = DeviceMail(self.out, self.arena, owner_of, view_of)
        self._pe = pe
        self._addresses: dict[int, int | None] = {
            other: pe.peer_address(self.arena.memory, other)
            for other in range(pe.n_pes)
            if other != pe.pe
        }
        self._addresses[pe.pe] = self.arena.address
        cut_off = [other for other, address in self._addresses.items() if address is None]
        if cut_off and not pe.has_signals:
            raise RedistError(
                f"PE {pe.pe} does not reach the memory of PE {cut_off[0]}, and shares its GPU: "
                "without CUDA's multi-process service (MPS) it cannot receive messages"
            )

    def wire_to(self, pe: int, run: int, **sizes: int) -> Wire:
        """A new wire to a rank, for one run; ``sizes`` as `NetworkWire` takes them."""
        address = self._addresses[pe]
        if address is not None:
            return PeerWire(self.out, address, self.arena.memory.nbytes)
        return NetworkWire(self.mail, pe, run, **sizes)

    def close(self) -> None:
        """Free the arenas and end NVSHMEM, when nothing is under way any more."""
        self.out.settle()
        self.out.gpu.synchronize()
        self._pe.close()
