"""Messages that are received where they belong, without a buffer between."""

import itertools

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dask_redist.packing import in_place, unpack


@st.composite
def messages(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[int]]]:
    """The shape of two chunks, and the boxes of one or a few pieces, often one behind the other."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    cuts = [sorted(draw(st.sets(st.integers(0, n), min_size=2, max_size=3))) for n in shape]
    boxes = list(itertools.product(*(itertools.pairwise(cut) for cut in cuts)))
    first = draw(st.integers(0, len(boxes) - 1))
    chosen = boxes[first : first + draw(st.integers(1, 3))]
    if draw(st.booleans()):
        chosen = draw(st.permutations(chosen))
    chunks = draw(st.lists(st.sampled_from([0, 0, 0, 1]), min_size=3, max_size=3))
    return shape, [
        [number, *(lower for lower, _ in box), *(upper for _, upper in box)]
        for number, box in zip(chunks, chosen, strict=False)
    ]


@settings(max_examples=300, deadline=None)
@given(message=messages())
@example(message=((4, 3), [[0, 0, 0, 2, 3], [0, 2, 0, 3, 3]]))
@example(message=((4, 3), [[0, 2, 0, 3, 3], [0, 0, 0, 2, 3]]))
@example(message=((4, 3), [[0, 0, 0, 2, 3], [1, 2, 0, 3, 3]]))
@example(message=((4, 3), [[0, 1, 1, 2, 2], [0, 1, 2, 2, 3]]))
def test_in_place_is_where_the_bytes_go(message: tuple[tuple[int, ...], list[list[int]]]) -> None:
    shape, headers = message
    ndim = len(shape)
    size = sum(int(np.prod(np.subtract(corners[ndim:], corners[:ndim]))) for _, *corners in headers)
    buffer = np.arange(size, dtype="i4").view("u1")
    chunks = [np.full(shape, -1, "i4") for _ in range(2)]
    unpack(headers, buffer, chunks.__getitem__)
    row = np.concatenate([chunk.ravel() for chunk in chunks])
    begin = int(np.flatnonzero(row == 0)[0])
    same_chunk = len({number for number, *_ in headers}) == 1
    is_run = same_chunk and np.array_equal(row[begin : begin + size], np.arange(size))

    direct = [np.full(shape, -1, "i4") for _ in range(2)]
    place = in_place(headers, direct.__getitem__)
    assert (place is not None) == is_run
    if place is not None:
        np.copyto(place, buffer)
        for got, want in zip(direct, chunks, strict=True):
            np.testing.assert_array_equal(got, want)


def test_what_does_not_lie_in_its_chunk_is_left_to_who_says_so() -> None:
    chunk = np.zeros((4, 3), "u1")
    assert in_place([[0, 0, 0, 5, 3]], lambda number: chunk) is None
    assert in_place([[0, 0, 0, 2, 3]], lambda number: np.asfortranarray(chunk)) is None
    assert in_place([], lambda number: chunk) is None
