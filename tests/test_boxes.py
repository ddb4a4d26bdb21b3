"""Boxes, edges, and tilings against arrays painted element by element."""

import itertools
import pickle
import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_redist.boxes import Box, IntArray, check_tiling, edges
from dask_redist.errors import LayoutError

SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def boxes_inside(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ends = [sorted(draw(st.tuples(*[st.integers(0, length)] * 2))) for length in shape]
    return Box(tuple(low for low, _ in ends), tuple(high for _, high in ends))


@st.composite
def cut_boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A tiling by cutting the whole array again and again at random places."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(box.lower[axis], box.upper[axis]))
        cut = [*box.upper[:axis], at, *box.upper[axis + 1 :]]
        start = [*box.lower[:axis], at, *box.lower[axis + 1 :]]
        boxes += [Box(box.lower, cut), Box(start, box.upper)]
    return draw(st.permutations(boxes))


def paint(boxes: Sequence[Box], shape: tuple[int, ...]) -> IntArray:
    """How many boxes hold each element."""
    held = np.zeros(shape, dtype=np.int64)
    for box in boxes:
        held[box.slices] += 1
    return held


def test_box_normalises_sequences() -> None:
    box = Box(np.array([1, 2]).tolist(), list(np.array([4, 2])))
    assert box == Box((1, 2), (4, 2))
    assert hash(box) == hash(Box((1, 2), (4, 2)))
    assert all(type(i) is int for i in box.lower + box.upper)
    assert (box.ndim, box.shape, box.size, box.slices) == (2, (3, 0), 0, (slice(1, 4), slice(2, 2)))
    assert pickle.loads(pickle.dumps(box)) == box
    assert Box((), ()).size == 1


@pytest.mark.parametrize(
    ("lower", "upper", "message"),
    [
        ((0, 3), (1, 2), "on axis 1 the upper index 2 is below the lower 3"),
        ((0,), (1, 2), "the corners have 1 and 2 indices"),
        ((0.5,), (1,), "sequences of integers"),
        (0, 1, "sequences of integers"),
    ],
)
def test_no_box(lower: Sequence[int], upper: Sequence[int], message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        Box(lower, upper)


@settings(deadline=None)
@given(st.data(), SHAPES)
def test_intersection_is_where_both_are_painted(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    one, two = data.draw(boxes_inside(shape)), data.draw(boxes_inside(shape))
    both = paint([one, two], shape) == 2
    common = one.intersection(two)
    assert common == two.intersection(one)
    if common is None:
        assert not both.any()
    else:
        assert np.array_equal(paint([common], shape) == 1, both)
        assert common.size > 0


def numbers(pattern: str, message: str) -> list[tuple[int, ...]]:
    """The numbers in each group of the pattern."""
    found = re.search(pattern, message)
    assert found, message
    return [tuple(map(int, re.findall(r"\d+", group))) for group in found.groups()]


def test_intersection_of_other_dimensions() -> None:
    with pytest.raises(LayoutError, match="1 and 2 axes"):
        Box((0,), (1,)).intersection(Box((0, 0), (1, 1)))


def test_edges() -> None:
    found = edges(((3, 0, 2), (0,), ()))
    assert [row.tolist() for row in found] == [[0, 3, 3, 5], [0, 0], [0]]
    assert all(row.dtype == np.int64 for row in found)
    assert edges(()) == ()


@settings(deadline=None)
@given(st.data(), SHAPES)
def test_tilings_pass(data: st.DataObject, shape: tuple[int, ...]) -> None:
    boxes = data.draw(cut_boxes(shape))
    assert (paint(boxes, shape) == 1).all()  # the oracle agrees that this is one
    check_tiling(boxes, shape)


@settings(deadline=None)
@given(st.data(), SHAPES)
def test_any_boxes_judged_as_painted(data: st.DataObject, shape: tuple[int, ...]) -> None:
    boxes = data.draw(st.lists(boxes_inside(shape), max_size=4))
    if data.draw(st.booleans()):
        tiling = data.draw(cut_boxes(shape))
        boxes += tiling[data.draw(st.integers(0, 1)) :]
    held = paint(boxes, shape)
    if (held == 1).all():
        check_tiling(boxes, shape)
        return
    with pytest.raises(LayoutError) as caught:
        check_tiling(boxes, shape)
    message = str(caught.value)
    if (held > 1).any():
        if not shape:
            assert "both hold the single element" in message
            return
        ((first, second),) = numbers(r"ranks (\d+ and \d+)", message)
        low, high = numbers(r"from \((.*?)\) to \((.*?)\)", message)
        assert first < second
        assert boxes[first].intersection(boxes[second]) == Box(low, high)
    else:
        (hole,) = numbers(r"at \((.*?)\)", message)
        assert hole == tuple(np.argwhere(held == 0)[0])


def test_overlap_is_found_in_any_order() -> None:
    ends = [(0, 2), (3, 6), (5, 8), (8, 9), (2, 3)]
    for order in itertools.permutations(range(5)):
        boxes = [Box((ends[i][0],), (ends[i][1],)) for i in order]
        first, second = sorted((order.index(1), order.index(2)))
        message = rf"ranks {first} and {second} overlap from \(5,\) to \(6,\)"
        with pytest.raises(LayoutError, match=message):
            check_tiling(boxes, (9,))


def test_box_outside_names_its_rank() -> None:
    good = Box((0,), (4,))
    with pytest.raises(LayoutError, match=r"rank 1 is outside the shape \(4,\)"):
        check_tiling([good, Box((4,), (5,))], (4,))
    with pytest.raises(LayoutError, match=r"rank 0 is outside"):
        check_tiling([Box((-1,), (4,))], (4,))
    with pytest.raises(LayoutError, match=r"rank 1 has 2 axes, the array has 1"):
        check_tiling([good, Box((0, 0), (0, 0))], (4,))


def test_tiling_of_a_huge_array_touches_no_element() -> None:
    side = 1 << 20
    boxes = [Box((i * 1024, 0, 0), ((i + 1) * 1024, side, side)) for i in range(1024)]
    check_tiling(boxes, (side,) * 3)
    boxes[500] = Box((500 * 1024, 0, 0), (501 * 1024, side, side - 1))
    with pytest.raises(LayoutError, match=rf"at \({500 * 1024}, 0, {side - 1}\)"):
        check_tiling(boxes, (side,) * 3)
