"""Owners of a part, when the ranks and the holders of its inputs are known."""

import logging
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_overlap import overlaps
from test_spec import part_of

from dask_redist.assign import assign
from dask_redist.boxes import IntArray
from dask_redist.layouts import Replicated
from dask_redist.overlap import Overlap
from dask_redist.placement import balanced, fewest_moved


def moved(overlap: Overlap, held: IntArray, owners: IntArray) -> int:
    """Elements whose input chunk and output chunk have different ranks, piece by piece."""
    owners = owners.reshape(overlap.numblocks_out)
    return sum(
        piece.size
        for index in np.ndindex(*overlap.numblocks_in)
        for piece in overlap.pieces_of_input(index)
        if owners[piece.chunk] != held[index]
    )


@given(st.data(), overlaps(), st.integers(1, 7))
def test_a_layouts_owners_are_kept(data: st.DataObject, overlap: Overlap, ranks: int) -> None:
    count = math.prod(overlap.numblocks_out)
    drawn = data.draw(st.lists(st.integers(0, ranks - 1), min_size=count, max_size=count))
    spec = part_of(overlap, owners=np.array(drawn, np.int64), ranks=ranks)
    held = np.zeros(overlap.numblocks_in, np.int64)
    assert assign(spec, ranks, held).tolist() == drawn


@given(st.data(), overlaps(), st.integers(1, 7))
def test_without_a_layout_no_more_moves_than_in_c_order(
    data: st.DataObject, overlap: Overlap, ranks: int
) -> None:
    count = math.prod(overlap.numblocks_in)
    drawn = data.draw(st.lists(st.integers(0, ranks - 1), min_size=count, max_size=count))
    held = np.array(drawn, np.int64).reshape(overlap.numblocks_in)
    start = balanced(overlap.chunks_out, ranks).ravel()
    spec = part_of(overlap, owners=start, ranks=ranks, layout=None)
    owners = assign(spec, ranks, held)
    assert owners.shape == (spec.n_out,)
    assert owners.dtype == np.int64
    best = fewest_moved(overlap, held, ranks).ravel()
    assert moved(overlap, held, owners) == min(
        moved(overlap, held, start), moved(overlap, held, best)
    )
    if moved(overlap, held, owners) == moved(overlap, held, start):
        assert np.array_equal(owners, start)  # nothing gained: what the plan said


def test_chunks_in_memory_stay_where_they_are() -> None:
    overlap = Overlap(((2, 2, 2),), ((2, 2, 2),))
    spec = part_of(overlap, owners=np.arange(3), ranks=3, layout=None)
    assert assign(spec, 3, np.array([2, 0, 1])).tolist() == [2, 0, 1]


def test_owners_that_move_as_little_are_kept() -> None:
    """Half of the one chunk moves whichever rank gets which half."""
    overlap = Overlap(((4,),), ((2, 2),))
    spec = part_of(overlap, owners=np.array([1, 0]), ranks=2, layout=None)
    assert assign(spec, 2, np.array([0])).tolist() == [1, 0]


def test_one_input_that_is_not_in_memory_leaves_c_order() -> None:
    overlap = Overlap(((2, 2, 2),), ((2, 2, 2),))
    spec = part_of(overlap, owners=np.arange(3), ranks=3, layout=None)
    assert assign(spec, 3, np.array([2, -1, 1])).tolist() == [0, 1, 2]


def test_a_layout_is_kept_wherever_the_inputs_are() -> None:
    overlap = Overlap(((2, 2, 2),), ((2, 2, 2),))
    spec = part_of(overlap, owners=np.arange(3), ranks=3)
    assert assign(spec, 3, np.array([2, 0, 1])).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (1, [0, 0, 0, 0, 0, 0]),
        (2, [0, 0, 0, 1, 1, 1]),
        (3, [0, 0, 1, 1, 2, 2]),
        (5, [0, 0, 1, 2, 3, 4]),
        (7, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_other_ranks_than_laid_out_for(
    ranks: int, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Spread over the ranks there are, in order, with one line in the log."""
    overlap = Overlap(((12,),), ((2,) * 6,))
    spec = part_of(overlap, owners=np.arange(6), ranks=6)
    with caplog.at_level(logging.INFO, "dask_redist.assign"):
        assert assign(spec, ranks, np.array([-1])).tolist() == expected
    (record,) = caplog.records
    assert f"was laid out for 6 ranks and runs on {ranks}" in record.getMessage()


@pytest.mark.parametrize(
    ("ranks", "expected"), [(1, [0]), (2, [0, 1]), (5, [0, 1, 4]), (6, [1, 2, 5]), (7, [1, 2, 5])]
)
def test_copies_are_on_the_ranks_that_the_layout_names(ranks: int, expected: list[int]) -> None:
    """One each; spread where there are other ranks than it was laid out for."""
    spec = replace(part_of(Overlap(((4,),), ((4,),)), ranks=6), layout=Replicated([1, 5, 2]))
    assert assign(spec, ranks, np.array([0])).tolist() == expected
    everywhere = replace(spec, layout=Replicated())
    assert assign(everywhere, ranks, np.array([0])).tolist() == list(range(ranks))


def test_as_many_ranks_as_laid_out_for_are_not_worth_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec = part_of(Overlap(((4,),), ((2, 2),)), owners=np.arange(2), ranks=2)
    with caplog.at_level(logging.INFO, "dask_redist.assign"):
        assign(spec, 2, np.array([-1]))
    assert not caplog.records


@given(st.integers(1, 9), st.integers(1, 9))
def test_every_owner_is_a_rank_that_is_there(laid_out: int, ranks: int) -> None:
    overlap = Overlap(((2,) * laid_out,), ((2,) * laid_out,))
    spec = part_of(overlap, owners=np.arange(laid_out), ranks=laid_out)
    owners = assign(spec, ranks, np.full(laid_out, -1))
    assert owners.min() >= 0
    assert owners.max() < ranks
    assert (np.diff(owners) >= 0).all()
    assert np.bincount(owners, minlength=ranks).max() == -(-laid_out // ranks)
