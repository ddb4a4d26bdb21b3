"""Copies past the cache are copies: any box, any order of axes, nothing beside it."""

import math
import platform
import shutil
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dask_redist import stream
from dask_redist.segment import part


@pytest.fixture(autouse=True)
def every_box(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "LEAST", 1)
    monkeypatch.setattr(stream, "ROW", 0)


def test_it_is_compiled_where_there_is_a_compiler() -> None:
    compiles = platform.machine() == "x86_64" and shutil.which("cc") is not None
    assert stream.is_compiled() == compiles


@st.composite
def boxes(draw: st.DrawFn) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """An array of canaries, a box in it, and what belongs there: each element its own index."""
    ndim = draw(st.integers(0, 5))
    most = {0: 1, 1: 3000, 2: 200, 3: 30, 4: 10, 5: 6}[ndim]
    shape = tuple(draw(st.lists(st.integers(0, most), min_size=ndim, max_size=ndim)))
    dtype = draw(st.sampled_from(["u1", "i2", "f4", "f8", "c16", "M8[ns]", "S7", "i4,f8"]))

    def box(array: NDArray[Any]) -> NDArray[Any]:
        steps = [draw(st.sampled_from([1, 1, 1, 2, -1])) for _ in shape]
        starts = [draw(st.integers(0, 2)) for _ in shape]
        cut = tuple(
            slice(k, k + n * abs(s), abs(s)) for k, n, s in zip(starts, shape, steps, strict=True)
        )
        return part(part(array, cut), [slice(None, None, -1 if s < 0 else 1) for s in steps])

    def around(fill: int) -> NDArray[Any]:
        order = draw(st.permutations(range(ndim)))
        size = [2 * shape[k] + 3 for k in order]
        count = math.prod(size) * np.dtype(dtype).itemsize
        memory = np.full(count + 64, fill, np.uint8)
        shift = draw(st.integers(0, 63))
        return memory[shift : shift + count].view(dtype).reshape(size).transpose(np.argsort(order))

    target, source = around(0xA5), around(0x5A)
    what = box(source)
    index = np.arange(math.prod(shape) * what.itemsize, dtype=np.uint32).astype(np.uint8)
    what[...] = index.view(dtype).reshape(shape)
    return target, box(target), what


@given(boxes())
def test_a_box_is_copied_and_nothing_else(case: tuple[NDArray[Any], ...]) -> None:
    target, place, what = case
    before = target.copy(order="K")
    np.copyto(place, what)
    expected = target.copy(order="K")
    np.copyto(target, before)
    stream.copy(place, what)
    assert target.tobytes() == expected.tobytes()


def cut(array: NDArray[Any], lengths: list[int]) -> list[NDArray[Any]]:
    """An array in parts along its last axis."""
    edges = np.cumsum([0, *lengths])
    return [array[..., k:u] for k, u in pairwise(edges)]


@given(boxes(), st.data())
def test_parts_of_a_row_are_copied_and_nothing_else(
    case: tuple[NDArray[Any], ...], data: st.DataObject
) -> None:
    """In one call or not; into targets of their own or of others; some of them not at all."""
    target, place, what = case
    if not what.ndim:
        return
    cuts = data.draw(st.lists(st.integers(0, what.shape[-1]), max_size=6))
    edges = sorted({0, *cuts, what.shape[-1]})
    pairs = []
    for k, u in pairwise(edges):
        kind = data.draw(st.sampled_from(["in the box", "apart", "unwanted"]))
        if kind == "in the box":
            pairs.append((place[..., k:u], what[..., k:u]))
        elif kind == "apart":  # contiguous, as the outputs of a change of layout are
            shape = (*what.shape[:-1], u - k)
            shift, nbytes = data.draw(st.integers(0, 63)), math.prod(shape) * what.itemsize
            memory = np.full(nbytes + 128, 0xA5, np.uint8)
            aside = np.ndarray(shape, what.dtype, buffer=memory, offset=shift)
            pairs.append((aside, what[..., k:u]))
    memories = [target, *(to.base for to, _ in pairs if isinstance(to.base, np.ndarray))]
    before = [memory.copy(order="K") for memory in memories]
    for to, part_of_it in pairs:
        np.copyto(to, part_of_it)
    expected = [memory.tobytes() for memory in memories]
    for memory, old in zip(memories, before, strict=True):
        np.copyto(memory, old)
    stream.copy_all(pairs)
    assert [memory.tobytes() for memory in memories] == expected


@pytest.mark.parametrize("shift", [0, 1, 32])
@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        ((700, 256), [8] * 32),  # lines
        ((700, 250), [8] * 26 + [7] * 6),  # parts of lines, which make whole ones
        ((3, 200, 256), [64] * 4),
        ((5, 3, 40, 129), [100, 1, 28]),
        ((9, 5000), [2500, 2499, 1]),  # a row is more than a block of rows
        ((3, 12000), [2048, 9952]),
        ((4097, 11), [1] * 11),
    ],
)
def test_rows_that_are_cut(shape: tuple[int, ...], lengths: list[int], shift: int) -> None:
    source = np.arange(math.prod(shape), dtype="f8").reshape(shape)
    memories, targets = [], []
    for length in lengths:
        inner = (*shape[:-1], length)
        memories.append(np.full(math.prod(inner) * 8 + 128, 0xA5, np.uint8))
        start = -memories[-1].ctypes.data % 64 + shift
        targets.append(np.ndarray(inner, "f8", buffer=memories[-1], offset=start))
    stream.copy_all(list(zip(targets, cut(source, lengths), strict=True)))
    for memory, target, expected in zip(memories, targets, cut(source, lengths), strict=True):
        assert (target == expected).all()
        start = target.__array_interface__["data"][0] - memory.ctypes.data
        assert (memory[:start] == 0xA5).all()
        assert (memory[start + target.nbytes :] == 0xA5).all()


@pytest.mark.skipif(not stream.is_compiled(), reason="needs the compiled copy")
def test_parts_of_a_row_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(stream, "_stream", lambda count, *_: calls.append(count))
    wide = np.arange(80 * 40).reshape(80, 40)
    reverse, narrow = wide[:, ::-1], np.asfortranarray(wide)
    for source, expected in ((wide, [3]), (reverse, [1] * 3), (narrow, [1] * 3)):
        calls.clear()
        pairs = [(np.empty(p.shape, p.dtype), p) for p in cut(source, [8, 15, 17])]
        stream.copy_all(pairs)
        assert calls == expected
    calls.clear()
    stream.copy_all([(np.empty(40, wide.dtype), wide[k]) for k in range(2)])
    assert calls == [1, 1]


@pytest.mark.parametrize("shift", [0, 1, 8, 63])
@pytest.mark.parametrize(
    "row", [1, 63, 64, 65, 448, 511, 512, 513, 640, 4097, 16383, 16384, 16512, 70001]
)
def test_rows_of_all_lengths(row: int, shift: int) -> None:
    source = np.arange(5 * (row + 11), dtype=np.uint32).astype(np.uint8).reshape(5, row + 11)
    memory = np.full(5 * (row + 7) + shift + 64, 0xA5, np.uint8)
    target = memory[shift : shift + 5 * (row + 7)].reshape(5, row + 7)
    expected = np.full_like(memory, 0xA5)
    expected[shift : shift + 5 * (row + 7)].reshape(5, row + 7)[:, 3 : 3 + row] = source[:, 5:-6]
    stream.copy(target[:, 3 : 3 + row], source[:, 5:-6])
    assert (memory == expected).all()


def test_read_only_sources_and_zero_strides() -> None:
    source = np.broadcast_to(np.arange(300.0), (70, 300))
    target = np.zeros((70, 300))
    stream.copy(target, source)
    assert (target == source).all()


@pytest.mark.parametrize("compiled", [True, False])
def test_small_and_large_boxes(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    monkeypatch.undo()
    if not compiled:
        monkeypatch.setattr(stream, "_stream", None)
    index = np.arange(300 * 400.0).reshape(300, 400)
    for rows in (10, 300):
        target = np.full((rows, 300), np.nan)
        stream.copy(target, index[:rows, 50:350])
        assert (target == index[:rows, 50:350]).all()
