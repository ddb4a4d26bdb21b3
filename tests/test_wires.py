"""Wires: the same pieces arrive through memory and through messages."""

import itertools
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_redist.arena import Arena
from dask_redist.packing import unpack
from dask_redist.peers import LocalPeer
from dask_redist.segment import part
from dask_redist.wires import MemoryWire, MessageWire, Place, Wire

Message = tuple[list[list[int]], np.ndarray]


class Outbox:
    """Gathers messages, and holds each to its limit."""

    def __init__(self, limit: int, item: int = 1) -> None:
        self.limit = limit
        self.item = item
        self.messages: list[Message] = []

    def __call__(self, headers: list[list[int]], buffer: np.ndarray) -> None:
        assert headers
        assert all(type(n) is int for header in headers for n in header)
        assert buffer.dtype == "u1"
        assert buffer.ndim == 1
        assert buffer.flags.c_contiguous
        assert 0 < buffer.nbytes <= max(self.limit, self.item)  # one element is not cut
        self.messages.append((headers, buffer))


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[slice, ...]]]:
    """A shape, and boxes that tile it."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    cuts = [sorted({0, n, draw(st.integers(0, n)), draw(st.integers(0, n))}) for n in shape]
    axes = [[slice(a, b) for a, b in itertools.pairwise(c)] for c in cuts]
    boxes: list[tuple[slice, ...]] = [()]
    for axis in axes:
        boxes = [(*box, s) for box in boxes for s in axis]
    return shape, boxes


DTYPES = ["u1", "<i8", ">f4", "<c16", "<M8[s]", "S3", "V5", [("a", "i2"), ("b", "f8")]]


@settings(max_examples=150, deadline=None)
@given(
    tiling=tilings(),
    dtype=st.sampled_from(DTYPES),
    limit=st.sampled_from([1, 16, 100, 1 << 20]),
    fortran=st.booleans(),
)
def test_both_wires_agree_with_numpy(
    tiling: tuple[tuple[int, ...], list[tuple[slice, ...]]], dtype: Any, limit: int, fortran: bool
) -> None:
    shape, boxes = tiling
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    raw = np.random.default_rng(size).integers(0, 2, size + 1).astype("u1")
    whole: np.ndarray = np.ndarray(shape, dtype, buffer=raw)
    source = whole.copy(order="F") if fortran else whole
    arena = Arena(1 << 20, keep=0)
    (block,) = arena.allocate([size])
    place = Place(3, block.offset, shape, dtype.str)
    outbox = Outbox(limit, dtype.itemsize)
    received = np.full(shape, 1, "u1").astype(f"V{dtype.itemsize}").view(dtype)
    packer = MessageWire(outbox, limit)
    wires: list[Wire] = [MemoryWire(LocalPeer(arena)), packer]
    for wire in wires:
        for box in boxes:
            wire.write(place, box, part(source, box))
        wire.flush()
        wire.flush()
        assert wire.held == 0
    for headers, buffer in outbox.messages:
        unpack(headers, buffer, {3: received}.__getitem__)
    assert received.tobytes() == whole.tobytes()
    assert block.array(shape, dtype).tobytes() == whole.tobytes()
    assert [wire.name for wire in wires] == ["direct", "messages"]
    assert (packer.sent, packer.messages) == (size, len(outbox.messages))
    arena.close()


def test_what_a_failed_message_held_goes_with_the_next_one() -> None:
    out = np.zeros(12, "u1")
    working = False

    def send(headers: list[list[int]], buffer: Any) -> None:
        if not working:
            raise OSError("the connection broke")
        unpack(headers, buffer, lambda number: out)

    wire = MessageWire(send, limit=8)
    values = np.arange(1, 13, dtype="u1")
    place = Place(0, 0, (12,), "u1")
    wire.write(place, (slice(0, 4),), values[:4])  # one contribution: packed, it succeeds
    with pytest.raises(OSError, match="broke"):
        wire.write(place, (slice(4, 12),), values[4:])  # another one finds the message full
    assert wire.held >= 4
    working = True
    wire.write(place, (slice(4, 12),), values[4:])
    wire.flush()
    assert out.tolist() == values.tolist()
    assert wire.held == 0


def test_messages_go_when_they_are_full_and_not_before() -> None:
    outbox = Outbox(100)
    wire = MessageWire(outbox, limit=100)
    place = Place(1, 0, (10, 10), "u1")
    piece = np.zeros((4, 10), "u1")
    wire.write(place, (slice(0, 4), slice(None)), piece)
    wire.write(place, (slice(4, 8), slice(None)), piece)
    assert not outbox.messages
    wire.write(place, (slice(6, 10), slice(None)), piece)
    assert [[h[1] for h in headers] for headers, _ in outbox.messages] == [[0, 4]]
    assert (wire.sent, wire.messages) == (80, 1)
    wire.flush()
    assert [[h[1] for h in headers] for headers, _ in outbox.messages] == [[0, 4], [6]]
    assert (wire.sent, wire.messages) == (120, 2)


def test_a_piece_may_change_once_it_is_written() -> None:
    outbox = Outbox(1 << 20)
    wire = MessageWire(outbox)
    piece = np.arange(6.0)
    wire.write(Place(0, 0, (6,), "<f8"), (slice(None),), piece)
    piece[:] = -1
    wire.flush()
    out = np.zeros(6)
    unpack(*outbox.messages[0], lambda _: out)
    assert out.tolist() == [0, 1, 2, 3, 4, 5]


def test_many_threads_pack_into_one_wire() -> None:
    outbox = Outbox(500)
    wire = MessageWire(outbox, limit=500)
    out = np.full((6, 300), -1)

    def work(row: int) -> None:
        for k in range(300):
            place = Place(row, 0, (300,), "<i8")
            wire.write(place, (slice(k, k + 1),), np.array([300 * row + k]))

    threads = [threading.Thread(target=work, args=(row,)) for row in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wire.flush()
    for headers, buffer in outbox.messages:
        unpack(headers, buffer, lambda row: out[row])
    assert (out == np.arange(1800).reshape(6, 300)).all()
    assert wire.sent == 1800 * 8


def test_a_message_goes_when_the_last_thread_has_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third thread finds the message full while two others still copy into it."""
    outbox = Outbox(16)
    wire = MessageWire(outbox, limit=16)
    copying = {value: threading.Event() for value in (6, 7)}
    go_on = {value: threading.Event() for value in (6, 7)}
    copyto = np.copyto

    def slow(target: np.ndarray, source: np.ndarray) -> None:
        if value := int(source[0]) if int(source[0]) in copying else 0:
            copying[value].set()
            assert go_on[value].wait(30)
        copyto(target, source)

    monkeypatch.setattr("dask_redist.wires.np.copyto", slow)

    def write(number: int, value: int) -> None:
        wire.write(Place(number, 0, (1,), "<i8"), (slice(0, 1),), np.array([value]))

    threads = {value: threading.Thread(target=write, args=(value - 6, value)) for value in (6, 7)}
    for value, thread in threads.items():
        thread.start()
        assert copying[value].wait(30)
    write(2, 8)
    for value, thread in threads.items():
        assert not outbox.messages
        assert wire.held == 24
        go_on[value].set()
        thread.join()
    assert [headers for headers, _ in outbox.messages] == [[[0, 0, 1], [1, 0, 1]]]
    wire.flush()
    monkeypatch.undo()
    out = np.full((3, 1), -1)
    for headers, buffer in outbox.messages:
        unpack(headers, buffer, lambda number: out[number])
    assert out.ravel().tolist() == [6, 7, 8]
    assert wire.held == 0


def test_what_is_on_its_way_is_held_and_waited_for() -> None:
    arrivals: list[Future[None]] = []

    def send(headers: object, buffer: object) -> Future[None]:
        arrivals.append(Future())
        return arrivals[-1]

    wire = MessageWire(send, limit=2)
    place = Place(0, 0, (6,), "u1")
    wire.write(place, (slice(0, 6),), np.zeros(6, "u1"))  # three messages, of which two are full
    assert (len(arrivals), wire.held, wire.waiting, wire.sent) == (2, 6, 2, 0)
    arrivals[0].set_result(None)
    assert (wire.held, wire.sent) == (4, 2)
    arrivals[1].set_exception(OSError("it broke"))
    with pytest.raises(OSError, match="it broke"):
        wire.write(place, (slice(0, 1),), np.zeros(1, "u1"))
    assert (wire.held, wire.waiting) == (4, 4)
    flushed = threading.Thread(target=wire.flush)
    flushed.start()  # the failed message goes again, and the open one
    while len(arrivals) < 4:
        time.sleep(0.001)
    arrivals[2].set_result(None)
    assert flushed.is_alive()
    arrivals[3].set_result(None)
    flushed.join()
    assert (wire.held, wire.waiting, wire.sent, wire.messages) == (0, 0, 6, 3)


def test_messages_grow_as_they_are_filled() -> None:
    sizes: list[int] = []

    def take(nbytes: int) -> np.ndarray:
        sizes.append(nbytes)
        return np.empty(nbytes, np.uint8)

    wire = MessageWire(lambda headers, buffer: None, limit=5 << 20, take=take)
    place, piece = Place(0, 0, (1 << 20,), "u1"), np.zeros(1 << 20, "u1")
    for _ in range(20):
        wire.write(place, (slice(None),), piece)
    assert sizes == [n << 20 for n in (1, 2, 4, 5, 5, 5)]


def test_a_failed_send_reaches_the_writer() -> None:
    def fail(headers: object, buffer: object) -> None:
        raise ConnectionError("gone")

    wire = MessageWire(fail, limit=1)
    place = Place(0, 0, (2,), "u1")
    wire.write(place, (slice(0, 1),), np.zeros(1, "u1"))
    with pytest.raises(ConnectionError, match="gone"):
        wire.flush()
    assert (wire.sent, wire.messages) == (0, 0)


@pytest.mark.parametrize(
    ("place", "box", "piece", "error", "match"),
    [
        (Place(4, 0, (5,), "<f8"), (slice(0, 2),), np.zeros(2, "f4"), TypeError, "float32"),
        (Place(4, 0, (5,), "<f8"), (slice(0, 2),), np.zeros(3), ValueError, r"\(3,\)"),
        (Place(4, 0, (5,), "<f8"), (slice(3, 6),), np.zeros(3), ValueError, r"\(3,\)"),
        (Place(4, 0, (5,), "<f8"), (slice(0, 2),) * 2, np.zeros((2, 2)), ValueError, "chunk 4"),
        (Place(4, 0, (5,), "O"), (slice(0, 1),), np.zeros(1, object), TypeError, "objects"),
    ],
)
def test_what_does_not_match_is_not_packed(
    place: Place, box: tuple[slice, ...], piece: np.ndarray, error: type[Exception], match: str
) -> None:
    outbox = Outbox(100)
    wire = MessageWire(outbox, limit=100)
    with pytest.raises(error, match=match):
        wire.write(place, box, piece)
    wire.flush()
    assert not outbox.messages


@pytest.mark.parametrize(
    ("header", "buffer", "match"),
    [
        ([0, -1, 0, 1, 2], bytes(4), "box .-1, 0. to .1, 2. does not lie"),
        ([0, 0, 0, 4, 2], bytes(8), r"shape is \(3, 2\)"),
        ([0, 2, 0, 1, 2], bytes(2), "does not lie"),
        ([0, 0, 1], bytes(1), "does not lie"),
        ([0, 0, 0, 1, 2, 9], bytes(2), "does not lie"),
        ([0, 0, 0, 1, 2], bytes(3), "3 bytes in a message whose boxes hold 2"),
        ([0, 0, 0, 1, 2], b"", "0 bytes"),
        ([0, 0, 0, 1, 2], bytes(1), "1 bytes for box"),
    ],
)
def test_a_bad_message_is_refused(header: list[int], buffer: bytes, match: str) -> None:
    frame = np.full((5, 4), 77, "u1")
    view = frame[1:4, 1:3]
    with pytest.raises(ValueError, match=match):
        unpack([[0, 2, 0, 2, 2], header], buffer, lambda _: view)
    assert (frame == 77).all()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, "u1")])
def test_buffers_may_be_anything_with_bytes(kind: Callable[[bytes], Any]) -> None:
    out = np.zeros((2,), "<i4")
    unpack([[0, 1, 2]], kind(b"\1\0\0\0"), lambda _: out)
    assert out.tolist() == [0, 1]
