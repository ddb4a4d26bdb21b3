"""Wires: how the pieces of a redistribution get from one rank into the blocks of another.

All wires take the same call: a place in an output chunk, and the piece that belongs there. A
memory wire copies it there at once. A message wire packs it, and sends what has gathered when that
is worth a message, and at the flush; the receiver unpacks it into its own block. Whatever the wire,
a piece must not change while `write` runs, and may change afterwards.
"""

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dask_redist.pages import Store, portions, store
from dask_redist.peers import Peer, matching
from dask_redist.segment import Bytes, part, view_bytes

__all__ = ["MemoryWire", "MessageWire", "Place", "Wire", "unpack"]


class Place(NamedTuple):
    """Where an output chunk lies.

    Attributes
    ----------
    out : int
        The output chunk's number in its run.
    offset : int
        Where its block begins in its owner's arena, in bytes.
    shape : tuple of int
        Its shape.
    dtype : str or numpy.dtype
        Its dtype; as `numpy.dtype.str` it travels, and structured ones are plain bytes then.
    """

    out: int
    offset: int
    shape: tuple[int, ...]
    dtype: str | np.dtype[Any]


class Wire(Protocol):
    """Moves pieces from this rank to one other.

    Attributes
    ----------
    name : str
        What reports call it.
    held : int
        Bytes that have gathered and are not sent yet.
    """

    name: str

    @property
    def held(self) -> int: ...

    def write(self, place: Place, target_slices: tuple[slice, ...], piece: NDArray[Any]) -> None:
        """Move one piece to its place; it has left the piece's memory when this returns."""

    def flush(self) -> None:
        """Send what is still held back."""


class MemoryWire:
    """Writes pieces straight to their final place in a peer's memory.

    Parameters
    ----------
    peer : Peer
        The attached arena of the rank at the other end; it is closed by who attached it.
    """

    def __init__(self, peer: Peer) -> None:
        self.name = peer.wire
        self.held = 0
        self._peer = peer
        self._views: dict[Place, NDArray[Any]] = {}

    def write(self, place: Place, target_slices: tuple[slice, ...], piece: NDArray[Any]) -> None:
        store([self.store(place, target_slices, piece)])

    def store(self, place: Place, target_slices: tuple[slice, ...], piece: NDArray[Any]) -> Store:
        """What `write` does, not done yet: pieces of one chunk are better written together."""
        view = self._views.get(place)
        if view is None:
            view = self._views[place] = self._peer.view(place.offset, place.shape, place.dtype)
        return self._peer.store(view, target_slices, piece)

    def flush(self) -> None:
        """Nothing: every write has arrived already."""


class MessageWire:
    """Packs pieces into messages; thread-safe.

    Parameters
    ----------
    send : callable
        ``send(headers, buffers)`` sends one message; the buffers are its own from then on. A
        header is a list of ints: the output chunk's number, the lower corner of the piece's box
        in that chunk, and its upper corner (excluded). The buffer of the same index holds the
        piece's bytes in C order.
    limit : int
        A message goes out before it would exceed so many bytes; larger pieces are cut.
    name : str
        What reports call the wire.

    Examples
    --------
    >>> outbox = []
    >>> wire = MessageWire(lambda headers, buffers: outbox.append((headers, buffers)), limit=16)
    >>> place = Place(out=7, offset=0, shape=(4, 4), dtype="<i4")
    >>> wire.write(place, (slice(0, 2), slice(1, 4)), np.arange(6, dtype="i4").reshape(2, 3))
    >>> wire.flush()
    >>> [headers for headers, _ in outbox]
    [[[7, 0, 1, 1, 4]], [[7, 1, 1, 2, 4]]]
    """

    def __init__(
        self,
        send: Callable[[list[list[int]], list[Bytes]], object],
        limit: int = 32 << 20,
        name: str = "messages",
    ) -> None:
        self.name = name
        self.sent = 0
        self.messages = 0
        self._send = send
        self._limit = limit
        self._lock = threading.Lock()
        self._headers: list[list[int]] = []
        self._buffers: list[Bytes] = []
        self._held = 0

    def write(self, place: Place, target_slices: tuple[slice, ...], piece: NDArray[Any]) -> None:
        """Pack a piece; send a message if one is full.

        Raises
        ------
        TypeError
            The piece has another dtype than its place, or one that holds Python objects.
        ValueError
            The piece has another shape than its place, or the place does not lie in its chunk.
        """
        dtype = np.dtype(place.dtype)
        lower, upper = _corners(place, target_slices)
        piece = matching(piece, tuple(u - k for k, u in zip(lower, upper, strict=True)), dtype)

        def nbytes(box: tuple[slice, ...]) -> int:
            lengths: list[int] = [s.stop - s.start for s in box]
            return math.prod(lengths) * dtype.itemsize

        if not piece.nbytes:
            return
        for box in portions(piece.shape, nbytes, self._limit):
            portion = part(piece, box)
            buffer = np.empty(portion.nbytes, np.uint8)
            np.copyto(view_bytes(buffer, 0, portion.shape, dtype), portion)
            header = [
                place.out,
                *(k + s.start for k, s in zip(lower, box, strict=True)),
                *(k + s.stop for k, s in zip(lower, box, strict=True)),
            ]
            self._queue(header, buffer)

    @property
    def held(self) -> int:
        """Bytes that have gathered and are not sent yet."""
        with self._lock:
            return self._held

    def flush(self) -> None:
        """Send what has gathered, if anything has."""
        with self._lock:
            message = self._take()
        self._post(message)

    def _queue(self, header: list[int], buffer: Bytes) -> None:
        message: tuple[list[list[int]], list[Bytes]] = [], []
        with self._lock:
            if self._held + buffer.nbytes > self._limit:
                message = self._take()
            self._headers.append(header)
            self._buffers.append(buffer)
            self._held += buffer.nbytes
        self._post(message)

    def _take(self) -> tuple[list[list[int]], list[Bytes]]:
        message = self._headers, self._buffers
        self._headers, self._buffers, self._held = [], [], 0
        return message

    def _post(self, message: tuple[list[list[int]], list[Bytes]]) -> None:
        """Send outside the lock: other threads go on packing meanwhile."""
        headers, buffers = message
        if not headers:
            return
        nbytes = sum(buffer.nbytes for buffer in buffers)
        try:
            self._send(headers, buffers)
        except BaseException:
            # Pieces of other contributions are among them: they go with the next message.
            with self._lock:
                self._headers[:0], self._buffers[:0] = headers, buffers
                self._held += nbytes
            raise
        with self._lock:
            self.sent += nbytes
            self.messages += 1


def _corners(place: Place, slices: tuple[slice, ...]) -> tuple[list[int], list[int]]:
    """The lower and upper corner that slices name in an output chunk."""
    if len(slices) != len(place.shape):
        raise ValueError(
            f"{len(slices)} slices for output chunk {place.out} of shape {place.shape}"
        )
    bounds = [s.indices(length) for s, length in zip(slices, place.shape, strict=True)]
    return [lower for lower, _, _ in bounds], [max(lower, upper) for lower, upper, _ in bounds]


def unpack(
    headers: Sequence[Sequence[int]],
    buffers: Sequence[Any],
    view_of: Callable[[int], NDArray[Any]],
) -> None:
    """Write the pieces of a received message to their places.

    Parameters
    ----------
    headers : sequence of sequence of int
        As `MessageWire` sends them.
    buffers : sequence of bytes-like
        The pieces' bytes.
    view_of : callable
        Output chunk's number to the array over its block.

    Raises
    ------
    ValueError
        A box does not lie inside its chunk, or a buffer is not as long as its box is large.
        Pieces before it have been written.

    Examples
    --------
    >>> out = np.zeros((2, 3), "u1")
    >>> unpack([[0, 1, 1, 2, 3]], [b"ab"], lambda number: out)
    >>> out
    array([[ 0,  0,  0],
           [ 0, 97, 98]], dtype=uint8)
    """
    for header, buffer in zip(headers, buffers, strict=True):
        number, *corners = header
        view = view_of(number)
        lower, upper = corners[: view.ndim], corners[view.ndim :]
        if len(corners) != 2 * view.ndim or not all(
            0 <= k <= u <= length for k, u, length in zip(lower, upper, view.shape, strict=True)
        ):
            raise ValueError(
                f"box {lower} to {upper} does not lie in output chunk {number}, "
                f"whose shape is {view.shape}"
            )
        target = part(view, [slice(k, u) for k, u in zip(lower, upper, strict=True)])
        data = np.frombuffer(buffer, np.uint8) if len(memoryview(buffer)) else np.empty(0, np.uint8)
        if data.nbytes != target.nbytes:
            raise ValueError(
                f"{data.nbytes} bytes for box {lower} to {upper} of output chunk {number}, "
                f"which holds {target.nbytes}"
            )
        np.copyto(target, view_bytes(data, 0, target.shape, target.dtype))
