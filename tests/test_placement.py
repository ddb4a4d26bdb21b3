"""Placements: balance, and elements that stay."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_overlap import axis_chunks, overlaps, shapes, some_owners

from dask_redist.boxes import Chunks, IntArray
from dask_redist.errors import LayoutError
from dask_redist.layouts import Block, Pencil, Slab, match_layout
from dask_redist.overlap import Overlap, traffic
from dask_redist.placement import balanced, fewest_moved


def element_counts(chunks: Chunks) -> IntArray:
    counts = [math.prod(sizes) for sizes in itertools.product(*chunks)]
    return np.array(counts, dtype=np.int64)


def loads(owners: IntArray, chunks: Chunks, ranks: int) -> IntArray:
    held = np.zeros(ranks, dtype=np.int64)
    np.add.at(held, owners.ravel(), element_counts(chunks))
    return held


def moved(overlap: Overlap, owners_in: IntArray, owners_out: IntArray, ranks: int) -> int:
    matrix = traffic(overlap, owners_in, owners_out, ranks)
    return int(matrix.sum() - np.trace(matrix))


@st.composite
def chunkings(draw: st.DrawFn) -> Chunks:
    return tuple(draw(axis_chunks(length, 4)) for length in draw(shapes()))


@settings(deadline=None)
@given(chunkings(), st.integers(1, 7))
def test_balanced_is_contiguous_and_within_one_chunk(chunks: Chunks, ranks: int) -> None:
    owners = balanced(chunks, ranks)
    assert owners.dtype == np.int64
    assert owners.shape == tuple(map(len, chunks))
    assert (np.diff(owners.ravel()) >= 0).all()
    assert owners.min() >= 0
    assert owners.max() < ranks
    counts = element_counts(chunks)
    ideal = counts.sum() / ranks
    assert (abs(loads(owners, chunks, ranks) - ideal) <= counts.max() + 1e-9).all()
    if owners.size <= ranks:
        assert owners.ravel().tolist() == list(range(owners.size))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("layout", [Slab.X, Slab.Y, Pencil.X, Pencil.Z])
def test_balanced_on_a_layouts_chunks_is_the_layout(layout: Slab | Pencil, ranks: int) -> None:
    shape = (13, 11, 17)
    chunks = layout.chunks(shape, ranks)
    assert np.array_equal(balanced(chunks, ranks), layout.owners(shape, ranks))


def test_balanced_spreads_chunks_of_no_elements() -> None:
    assert balanced(((0,), (1,) * 6), 3).ravel().tolist() == [0, 0, 1, 1, 2, 2]
    with pytest.raises(LayoutError, match="must be at least 1, not 0"):
        balanced(((1,),), 0)


@settings(deadline=None)
@given(st.data(), overlaps(), st.integers(1, 7))
def test_fewest_moved_never_moves_more_than_balanced(
    data: st.DataObject, overlap: Overlap, ranks: int
) -> None:
    owners_in = data.draw(some_owners(overlap.numblocks_in, ranks))
    owners = fewest_moved(overlap, owners_in, ranks)
    start = balanced(overlap.chunks_out, ranks)
    assert owners.shape == start.shape
    assert owners.min() >= 0
    assert owners.max() < ranks
    assert moved(overlap, owners_in, owners, ranks) <= moved(overlap, owners_in, start, ranks)
    chunks = overlap.chunks_out
    assert loads(owners, chunks, ranks).max() <= 2 * loads(start, chunks, ranks).max()
    assert np.array_equal(owners, fewest_moved(overlap, owners_in, ranks))
    if (owners_in == -1).all():
        assert np.array_equal(owners, start)


@settings(deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 3))
def test_each_chunk_goes_where_an_exhaustive_search_puts_it(
    data: st.DataObject, chunks: int, ranks: int
) -> None:
    """Chunks of equal size: no placement of as many chunks a rank moves fewer elements."""
    cuts = data.draw(st.lists(st.integers(0, 4 * chunks), max_size=5))
    chunks_in = tuple(np.diff([0, *sorted(cuts), 4 * chunks]).tolist())
    overlap = Overlap((chunks_in,), ((4,) * chunks,))
    drawn = data.draw(
        st.lists(st.integers(0, ranks - 1), min_size=len(chunks_in), max_size=len(chunks_in))
    )
    owners_in = np.array(drawn)
    slots = -(-chunks // ranks)
    fewest = min(
        moved(overlap, owners_in, np.array(owners), ranks)
        for owners in itertools.product(range(ranks), repeat=chunks)
        if np.bincount(owners).max() <= slots
    )
    owners = fewest_moved(overlap, owners_in, ranks)
    assert moved(overlap, owners_in, owners, ranks) == fewest


@settings(deadline=None)
@given(st.data(), st.integers(1, 7), st.integers(1, 4))
def test_permuted_owners_move_nothing(data: st.DataObject, ranks: int, each: int) -> None:
    chunks = ((2,) * (ranks * each), (3,))
    owners_in = np.array(data.draw(st.permutations([*range(ranks)] * each))).reshape(-1, 1)
    assert np.array_equal(fewest_moved(Overlap(chunks, chunks), owners_in, ranks), owners_in)


def test_permuted_ranks_of_many_chunks_move_nothing() -> None:
    """Too many chunks to place one by one: whole groups are relabelled."""
    chunks = ((1,) * 700, (5,))
    label = np.array([3, 0, 6, 1, 5, 2, 4])
    owners_in = label[balanced(chunks, 7)]
    assert np.array_equal(fewest_moved(Overlap(chunks, chunks), owners_in, 7), owners_in)


def test_one_huge_chunk_beside_small_ones_stays_balanced() -> None:
    """Placed one by one, rank 0 would keep all large chunks: the load decides for groups."""
    sizes = (100, 100, 100, 1, 1, 1, 1, 1, 1)
    overlap = Overlap((sizes,), (sizes,))
    owners_in = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])
    owners = fewest_moved(overlap, owners_in, 3)
    assert (
        loads(owners, overlap.chunks_out, 3).max()
        <= 2 * loads(balanced(overlap.chunks_out, 3), overlap.chunks_out, 3).max()
    )
    assert moved(overlap, owners_in, owners, 3) > 0


def test_relabelling_keeps_slabs_at_home() -> None:
    shape, ranks = (12, 12, 12), 4
    overlap = Overlap(Block((2, 2, 1)).chunks(shape, ranks), Slab.X.chunks(shape, ranks))
    owners_in = np.array([3, 2, 1, 0]).reshape(2, 2, 1)
    owners = fewest_moved(overlap, owners_in, ranks)
    assert sorted(owners.ravel()) == [0, 1, 2, 3]
    assert moved(overlap, owners_in, owners, ranks) == math.prod(shape) // 2
    # In C order every slab but none of its elements would be at home.
    assert moved(overlap, owners_in, balanced(overlap.chunks_out, ranks), ranks) == math.prod(shape)
    assert match_layout(overlap.chunks_out, owners, ranks) is not None
