"""Wires: how the pieces of a redistribution get from one rank into the blocks of another.

All wires take the same call: a place in an output chunk, and the piece that belongs there. A
memory wire copies it there at once. A message wire packs it behind others into one buffer, and
sends that when it is full, and at the flush; the receiver unpacks it into its own block. Whatever
the wire, a piece must not change while `write` runs, and may change afterwards.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dask_redist.packing import Header, box_parts
from dask_redist.pages import Store, store
from dask_redist.peers import Peer, matching
from dask_redist.segment import Bytes, part, view_bytes

__all__ = ["MemoryWire", "MessageWire", "Place", "Wire", "flush_all"]

#: bytes of a wire's first message; each that is filled makes the next one twice as large
_FIRST = 1 << 20


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
        Bytes that have been written and have not arrived yet.
    far : bool
        Whether the other rank is on another host.
    """

    name: str
    far: bool

    @property
    def held(self) -> int: ...

    def write(self, place: Place, target_slices: tuple[slice, ...], piece: NDArray[Any]) -> None:
        """Move one piece to its place; it has left the piece's memory when this returns."""

    def start(self) -> None:
        """Begin to send what is still held back."""

    def flush(self) -> None:
        """Send what is still held back; it has arrived when this returns."""


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
        self.far = False
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

    def start(self) -> None:
        """Nothing: every write has arrived already."""

    def flush(self) -> None:
        """Nothing, either."""


class _Message:
    """A message that is being packed, or is on its way."""

    def __init__(self, buffer: Any) -> None:
        self.headers: list[Header] = []
        self.buffer = buffer
        self.used = 0
        self.packing = 0  # threads that copy into it just now
        self.complete = False  # nothing is added any more


class MessageWire:
    """Packs pieces into messages; thread-safe.

    Parameters
    ----------
    send : callable
        ``send(headers, buffer)`` sends one message; the buffer is its own from then on. A header is
        a list of ints: the output chunk's number, the lower corner of the piece's box in that
        chunk, and its upper corner (excluded). The buffer holds the pieces' bytes, each in C order,
        one behind the other. It returns when the message has arrived, or at once a future of that.
    limit : int
        A message goes out before it would exceed so many bytes; larger pieces are cut.
    name : str
        What reports call the wire.
    far : bool
        Whether the other rank is on another host.
    take : callable
        ``take(nbytes)`` gives the buffer of a message, and may wait for one; default: new memory.
    pack : callable
        ``pack(buffer, begin, piece)`` copies a piece into a buffer; default: for NumPy arrays.

    Examples
    --------
    >>> outbox = []
    >>> wire = MessageWire(lambda headers, buffer: outbox.append((headers, buffer)), limit=16)
    >>> place = Place(out=7, offset=0, shape=(4, 4), dtype="<i4")
    >>> wire.write(place, (slice(0, 2), slice(1, 4)), np.arange(6, dtype="i4").reshape(2, 3))
    >>> wire.flush()
    >>> [(headers, len(buffer)) for headers, buffer in outbox]
    [([[7, 0, 1, 1, 4]], 12), ([[7, 1, 1, 2, 4]], 12)]
    """

    def __init__(
        self,
        send: Callable[[list[Header], Any], Future[Any] | None],
        limit: int = 32 << 20,
        name: str = "messages",
        far: bool = False,
        take: Callable[[int], Any] | None = None,
        pack: Callable[[Any, int, Any], None] | None = None,
    ) -> None:
        self.name = name
        self.far = far
        self.sent = 0
        self.messages = 0
        self._send = send
        self._limit = limit
        self._take = take or _new
        self._pack = pack or _pack
        self._size = min(limit, _FIRST)
        self._held = 0
        self._open: _Message | None = None
        #: messages that are complete and neither arrived nor failed
        self._away = 0
        #: they go again with the next flush: pieces of several contributions are in them
        self._failed: list[_Message] = []
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def write(self, place: Place, target_slices: tuple[slice, ...], piece: NDArray[Any]) -> None:
        """Pack a piece; send a message if one is full.

        Raises
        ------
        TypeError
            The piece has another dtype than its place, or one that holds Python objects.
        ValueError
            The piece has another shape than its place, or the place does not lie in its chunk.
        """
        self._raise()
        dtype = np.dtype(place.dtype)
        lower, upper = _corners(place, target_slices)
        piece = matching(piece, tuple(u - k for k, u in zip(lower, upper, strict=True)), dtype)
        if dtype.hasobject:
            raise TypeError(f"dtype {dtype} holds Python objects, which no message can carry")
        if not piece.nbytes:
            return
        for box in box_parts(piece.shape, dtype.itemsize, self._limit):
            portion = part(piece, box)
            header = [
                place.out,
                *(k + s.start for k, s in zip(lower, box, strict=True)),
                *(k + s.stop for k, s in zip(lower, box, strict=True)),
            ]
            message, begin = self._reserve(header, portion.nbytes)
            try:
                self._pack(message.buffer, begin, portion)
            finally:
                with self._changed:
                    message.packing -= 1
                    goes = message.complete and not message.packing
                if goes:
                    self._ship(message)

    @property
    def held(self) -> int:
        """Bytes that have been written and have not arrived yet."""
        with self._changed:
            return self._held

    @property
    def waiting(self) -> int:
        """Bytes that nobody has begun to send."""
        with self._changed:
            return sum(m.used for m in (*self._failed, *([self._open] if self._open else ())))

    def start(self) -> None:
        """Begin to send what has gathered, if anything has, and what failed before."""
        with self._changed:
            failed, self._failed, self._failure = self._failed, [], None
            self._away += len(failed)
            last = self._complete()
        try:
            while failed:
                self._ship(failed.pop(0))
        finally:
            with self._changed:
                self._away -= len(failed)
                self._failed += failed
            if last is not None:
                self._ship(last)

    def flush(self) -> None:
        """Send what has gathered, if anything has; it has arrived when this returns."""
        self.start()
        with self._changed:
            self._changed.wait_for(lambda: not self._away)
        self._raise()

    def _reserve(self, header: Header, nbytes: int) -> tuple[_Message, int]:
        """A place for a piece: the message, and where in its buffer."""
        while True:
            with self._changed:
                message, full = self._open, None
                if message is not None and message.used + nbytes <= len(message.buffer):
                    begin = message.used
                    message.headers.append(header)
                    message.used += nbytes
                    message.packing += 1
                    self._held += nbytes
                    return message, begin
                if message is not None:
                    self._size = min(2 * self._size, self._limit)
                    full = self._complete()
                size = max(self._size, nbytes)
            if full is not None:
                self._ship(full)
                del full
            fresh = _Message(self._take(size))
            with self._changed:
                if self._open is None:
                    self._open = fresh
            del fresh

    def _complete(self) -> _Message | None:
        """Add nothing more to the open message; itself, if it can go at once. With the lock."""
        message, self._open = self._open, None
        if message is None:
            return None
        message.complete = True
        self._away += 1
        return None if message.packing else message

    def _ship(self, message: _Message) -> None:
        """Send outside the lock: other threads go on packing meanwhile."""
        try:
            arrival = self._send(message.headers, message.buffer[: message.used])
        except BaseException:
            with self._changed:
                self._away -= 1
                self._failed.append(message)
                self._changed.notify_all()
            raise
        if arrival is None:
            self._arrived(message)
        else:
            arrival.add_done_callback(partial(self._done, message))

    def _done(self, message: _Message, arrival: Future[Any]) -> None:
        failure = OSError("given up") if arrival.cancelled() else arrival.exception()
        if failure is None:
            return self._arrived(message)
        with self._changed:
            self._away -= 1
            self._failed.append(message)
            self._failure = failure
            self._changed.notify_all()

    def _arrived(self, message: _Message) -> None:
        with self._changed:
            self._away -= 1
            self._held -= message.used
            self.sent += message.used
            self.messages += 1
            self._changed.notify_all()

    def _raise(self) -> None:
        """Tell the writer, or who flushes, that a message failed on its way."""
        with self._changed:
            failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure


def _new(nbytes: int) -> Bytes:
    return np.empty(nbytes, np.uint8)


def _pack(buffer: Bytes, begin: int, piece: NDArray[Any]) -> None:
    np.copyto(view_bytes(buffer, begin, piece.shape, piece.dtype), piece)


def _corners(place: Place, slices: tuple[slice, ...]) -> tuple[list[int], list[int]]:
    """The lower and upper corner that slices name in an output chunk."""
    if len(slices) != len(place.shape):
        raise ValueError(
            f"{len(slices)} slices for output chunk {place.out} of shape {place.shape}"
        )
    bounds = [s.indices(length) for s, length in zip(slices, place.shape, strict=True)]
    return [lower for lower, _, _ in bounds], [max(lower, upper) for lower, upper, _ in bounds]


def flush_all(wires: Iterable[Wire]) -> None:
    """Send what wires hold back: to the far ranks first, and to those that get most."""
    ordered = sorted(wires, key=lambda wire: (not wire.far, -wire.held))
    for wire in ordered:
        wire.start()
    for wire in ordered:
        wire.flush()
