"""Copies past the cache are copies: any box, any order of axes, nothing beside it."""

import math
import platform
import shutil
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
