"""Pieces of every kind arrive where they belong, through either mapping."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_tools import CANARY, second_mapping

from dask_redist import stream
from dask_redist.arena import Arena, Block
from dask_redist.pages import GRANULE, PageBudget, store, touched
from dask_redist.peers import LocalPeer, NotAttached, Peer, attach
from dask_redist.segment import part


@pytest.fixture(params=["direct", "shared memory"])
def target(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Peer, Block, list[np.ndarray]]]:
    """A peer and a poisoned block of 4,100,000 bytes in it, with fences around."""
    arena = Arena(1 << 26, keep=0)
    left, block, right = arena.allocate([4096, 4_100_000, 4096])
    fences = [b.array((4096,), "u1") for b in (left, right)]
    for array in (*fences, block.array((4_100_000,), "u1")):
        array[:] = CANARY
    if request.param == "direct":
        peer: Peer = LocalPeer(arena)
    else:
        peer = second_mapping(arena, 17 * GRANULE, monkeypatch)
    assert peer.wire == request.param
    yield peer, block, fences
    assert all((fence == CANARY).all() for fence in fences)
    peer.close()
    arena.close()


Target = tuple[Peer, Block, list[np.ndarray]]


def check(target: Target, shape: tuple[int, ...], place: tuple[slice, ...], piece: Any) -> None:
    """Write, and compare every byte of the block with what NumPy makes of it."""
    peer, block, _ = target
    size = math.prod(shape) * piece.dtype.itemsize
    expected = np.full(size + 100, CANARY, "u1")
    array: np.ndarray = np.ndarray(shape, piece.dtype, buffer=expected)
    part(array, place)[...] = piece
    block.array((4_100_000,), "u1")[: size + 100] = CANARY
    peer.write(peer.view(block.offset, shape, piece.dtype.str), place, piece)
    assert block.array((size + 100,), "u1").tobytes() == expected.tobytes()


def test_pieces_in_every_memory_order(target: Target) -> None:
    shape, place = (300, 40, 11), (slice(7, 260), slice(1, 40), slice(3, 8))
    inner = (253, 39, 5)
    index = np.arange(math.prod(inner)).reshape(inner)
    frozen = index.copy()
    frozen.flags.writeable = False
    for piece in (
        index,
        np.asfortranarray(index),
        index[::-1, :, ::-1],
        np.repeat(index, 2, axis=1)[:, ::2],
        np.broadcast_to(np.arange(5), inner),
        np.broadcast_to(np.int64(4), inner),
        frozen,
    ):
        check(target, shape, place, piece)


DTYPES = [
    "u1",
    ">i2",
    "f2",
    "g",
    "c16",
    "?",
    "M8[ns]",
    "S5",
    "U3",
    "V7",
    [("a", "i4"), ("b", "S3")],
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pieces_of_every_dtype(target: Target, dtype: Any) -> None:
    dtype = np.dtype(dtype)
    raw = (np.arange(60 * dtype.itemsize) % 2).astype("u1")
    check(target, (9, 13), (slice(2, 8), slice(3, 13)), np.ndarray((6, 10), dtype, buffer=raw))


def test_no_dimension_and_no_element(target: Target) -> None:
    check(target, (), (), np.array(5.0))
    check(target, (3, 4), (slice(1, 1), slice(0, 4)), np.empty((0, 4)))
    check(target, (0, 4), (slice(0, 0), slice(0, 4)), np.empty((0, 4)))
    check(target, (5,), (slice(1, 3),), np.empty(2, "V0"))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_boxes_of_every_kind(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), max_size=6)))
    corners = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
    place = tuple(slice(*pair) for pair in corners)
    whole = np.arange(math.prod(shape), dtype="i4").reshape(shape)
    order = data.draw(st.permutations(range(len(shape))))
    piece = part(whole, place).transpose(order).copy().transpose(np.argsort(order))
    arena = Arena(1 << 23, keep=0)
    (block,) = arena.allocate([whole.nbytes])
    with pytest.MonkeyPatch.context() as patch:
        shared = second_mapping(arena, GRANULE, patch)
    for peer in (LocalPeer(arena), shared):
        array = block.array(shape, "i4")
        array[...] = -1
        expected = np.full(shape, -1)
        part(expected, place)[...] = part(whole, place)
        peer.write(peer.view(block.offset, shape, "<i4"), place, piece)
        assert (array == expected).all()
        peer.close()
    arena.close()


def test_large_pieces_through_a_small_budget(target: Target) -> None:
    for shape in [(500_000,), (50, 10_000), (4, 125_000), (5, 1, 100_000)]:
        index = np.arange(math.prod(shape)).reshape(shape)
        for skip in range(len(shape)):
            place = tuple(slice(k == skip and n > 1, n) for k, n in enumerate(shape))
            check(target, shape, place, index[place])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pieces_that_are_written_together(data: st.DataObject) -> None:
    """Cut along the last axis, into blocks of arenas of both kinds, whatever the budget."""
    outer = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    lengths = data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=8))
    edges = np.cumsum([0, *lengths])
    shape = (*outer, int(edges[-1]))
    whole = np.arange(math.prod(shape), dtype="i4").reshape(shape)
    kind = data.draw(st.sampled_from(["C", "F", "reversed", "read-only", "broadcast"]))
    if kind == "F":
        whole = np.asfortranarray(whole)
    elif kind == "reversed":
        whole = whole[::-1, ..., ::-1]
    elif kind == "broadcast":
        whole = np.broadcast_to(whole[:1], shape)
    whole.flags.writeable = False
    sizes = [math.prod(outer) * (length + 1) * 4 for length in lengths]
    arenas = [Arena(1 << 26, keep=0) for _ in range(3)]
    pages = PageBudget(data.draw(st.sampled_from([1, 16, 17, 160, 4000])) * GRANULE)
    peers: list[Peer] = [LocalPeer(arenas[0])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dask_redist.peers.arena_here", lambda _: None)
        peers += [attach(arena.card, pages) for arena in arenas[1:]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "LEAST", 1)
        patch.setattr(stream, "ROW", 0)
        blocks, stores = [], []
        for size, k, u in zip(sizes, edges[:-1], edges[1:], strict=True):
            owner = data.draw(st.integers(0, 2))
            (block,) = arenas[owner].allocate([size])
            block.array((size,), "u1")[:] = CANARY
            blocks.append(block)
            view = peers[owner].view(block.offset, (*outer, u - k + 1), "<i4")
            at = (*map(slice, outer), slice(1, None))
            stores.append(peers[owner].store(view, at, whole[..., k:u]))
        store(stores)
    assert pages.mapped <= pages.limit * GRANULE
    for block, k, u in zip(blocks, edges[:-1], edges[1:], strict=True):
        expected = np.full((*outer, (u - k + 1) * 4), CANARY, "u1").view("i4")
        expected[..., 1:] = whole[..., k:u]
        assert (block.array(expected.shape, "i4") == expected).all()
    for peer, arena in zip(peers, arenas, strict=True):
        peer.close()
        arena.close()


@pytest.mark.parametrize(("portion", "together"), [(16, 8), (4, 1)])
def test_pieces_together_take_a_portion_of_the_budget_at_a_time(
    monkeypatch: pytest.MonkeyPatch, portion: int, together: int
) -> None:
    arena, pages, calls = Arena(1 << 26, keep=0), PageBudget(16 * portion * GRANULE), []
    monkeypatch.setattr("dask_redist.peers.arena_here", lambda _: None)
    peer = attach(arena.card, pages)
    whole = np.arange(400 * 800.0).reshape(400, 800)
    blocks = arena.allocate([400 * 100 * 8] * 8)
    stores = []
    for k, block in enumerate(blocks):
        view = peer.view(block.offset, (400, 100), "<f8")
        stores.append(peer.store(view, (slice(None),) * 2, whole[:, 100 * k : 100 * (k + 1)]))
    copy_all = stream.copy_all

    def watched(copies: list[tuple[np.ndarray, np.ndarray]]) -> None:
        origin = stores[0].origin
        assert sum(len(touched(to, origin)) for to, _ in copies) <= portion
        calls.append(len(copies))
        copy_all(copies)

    monkeypatch.setattr(stream, "copy_all", watched)
    store(stores)
    assert set(calls) == {together}
    assert pages.mapped == len({g for one in stores for g in one.granules()}) * GRANULE
    for k, block in enumerate(blocks):
        assert (block.array((400, 100), "f8") == whole[:, 100 * k : 100 * (k + 1)]).all()
    peer.close()
    arena.close()


def test_what_does_not_match_is_refused(target: Target) -> None:
    peer, block, _ = target
    at, piece = block.offset, np.zeros(3)
    with pytest.raises(TypeError, match="dtype float64 cannot be written to one of float32"):
        peer.write(peer.view(at, (5,), "<f4"), (slice(0, 3),), piece)
    with pytest.raises(TypeError, match="dtype float64"):
        peer.write(peer.view(at, (5,), ">f8"), (slice(0, 3),), piece)
    with pytest.raises(TypeError, match="dtype float64"):
        peer.write(peer.view(at, (5,), "V8"), (slice(0, 3),), piece)
    with pytest.raises(TypeError, match="Python objects"):
        peer.write(peer.view(at, (5,), "O"), (slice(0, 3),), piece.astype(object))
    with pytest.raises(ValueError, match=r"shape \(3,\) cannot be written to \(2,\)"):
        peer.write(peer.view(at, (5,), "<f8"), (slice(0, 2),), piece)
    with pytest.raises(ValueError, match=r"shape \(1,\) cannot"):  # nothing is broadcast
        peer.write(peer.view(at, (5,), "<f8"), (slice(0, 3),), piece[:1])
    with pytest.raises(ValueError, match="first page"):
        peer.write(peer.view(0, (5,), "<f8"), (slice(0, 3),), piece)
    with pytest.raises(ValueError, match="of which there are"):
        peer.write(peer.view(1 << 26, (1000,), "<f8"), (slice(0, 3),), piece)
    assert (block.array((4_100_000,), "u1") == CANARY).all()
    before = peer.view(at, (5,), "<f8")
    peer.close()
    with pytest.raises(NotAttached, match="closed: no view"):
        peer.view(at, (5,), "<f8")
    with pytest.raises(NotAttached, match="closed: nothing is written"):
        peer.write(before, (slice(0, 3),), piece)
    assert (block.array((4_100_000,), "u1") == CANARY).all()
