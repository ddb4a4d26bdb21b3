"""The overlap of two chunkings against arrays painted with chunk numbers."""

import itertools
import math
import pickle
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_redist.boxes import Chunks, IntArray
from dask_redist.errors import LayoutError
from dask_redist.layouts import Block, Pencil, Slab
from dask_redist.overlap import Overlap, Piece, rank_plan, traffic

LENGTHS = (0, 1, 2, 3, 5, 7, 11)


@st.composite
def axis_chunks(draw: st.DrawFn, length: int, most: int = 5) -> tuple[int, ...]:
    """At most so many sizes that sum to the length, zeros among them."""
    cuts = draw(st.lists(st.integers(0, length), max_size=most - 1))
    return tuple(np.diff([0, *sorted(cuts), length]).tolist())


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """Up to 6 axes, with few enough elements to paint."""
    shape: list[int] = []
    for _ in range(draw(st.integers(0, 6))):
        room = 1000 // max(1, math.prod(shape))
        shape.append(draw(st.sampled_from([n for n in LENGTHS if n <= room])))
    return tuple(shape)


@st.composite
def overlaps(draw: st.DrawFn) -> Overlap:
    shape = draw(shapes())
    most = 5 if len(shape) < 4 else 2
    return Overlap(
        tuple(draw(axis_chunks(length, most)) for length in shape),
        tuple(draw(axis_chunks(length, most)) for length in shape),
    )


@st.composite
def some_owners(draw: st.DrawFn, numblocks: tuple[int, ...], ranks: int) -> IntArray:
    """Any owners, -1 among them."""
    seed = draw(st.integers(0, 2**32 - 1))
    return np.random.default_rng(seed).integers(-1, ranks, numblocks, dtype=np.int64)


@st.composite
def owned_overlaps(draw: st.DrawFn) -> tuple[Overlap, IntArray, IntArray, int]:
    overlap, ranks = draw(overlaps()), draw(st.integers(1, 7))
    owners_in = draw(some_owners(overlap.numblocks_in, ranks))
    return overlap, owners_in, draw(some_owners(overlap.numblocks_out, ranks)), ranks


def paint(chunks: Chunks) -> IntArray:
    """The flat number of the chunk that holds each element."""
    painted = np.zeros(tuple(map(sum, chunks)), dtype=np.int64)
    for axis, sizes in enumerate(chunks):
        others = [a for a in range(len(chunks)) if a != axis]
        along = np.expand_dims(np.repeat(np.arange(len(sizes)), sizes), others)
        painted = painted * len(sizes) + along
    return painted


def cut(array: IntArray, chunks: Chunks) -> dict[tuple[int, ...], IntArray]:
    """The chunks of an array by index."""
    starts = [np.cumsum([0, *sizes]) for sizes in chunks]
    return {
        index: array[tuple(slice(e[i], e[i + 1]) for e, i in zip(starts, index, strict=True))]
        for index in np.ndindex(*map(len, chunks))
    }


def numbered(overlap: Overlap) -> IntArray:
    return np.arange(math.prod(overlap.shape), dtype=np.int64).reshape(overlap.shape)


@settings(deadline=None)
@given(overlaps())
def test_pieces_carry_every_element_to_its_place(overlap: Overlap) -> None:
    inputs = cut(numbered(overlap), overlap.chunks_in)
    outputs = cut(numbered(overlap), overlap.chunks_out)
    filled = {index: np.full_like(chunk, -1) for index, chunk in outputs.items()}
    found = {}
    for index, chunk in inputs.items():
        pieces = overlap.pieces_of_input(index)
        assert len(pieces) == len(list(pieces))
        for piece in pieces:
            assert piece.size > 0
            assert chunk[piece.source].size == piece.size
            # The slices must stay inside: NumPy would clip them silently.
            for side, slices in ((chunk, piece.source), (filled[piece.chunk], piece.target)):
                for s, length in zip(slices, side.shape, strict=True):
                    assert 0 <= s.start < s.stop <= length
            assert (filled[piece.chunk][piece.target] == -1).all()
            filled[piece.chunk][piece.target] = chunk[piece.source]
            found[index, piece.chunk] = piece
    for index, chunk in outputs.items():
        assert np.array_equal(filled[index], chunk)
    assert len(overlap) == len(found)
    # The view from the outputs is the same set of pieces.
    mirrored = {
        (piece.chunk, index): piece._replace(chunk=index)
        for index in outputs
        for piece in overlap.pieces_of_output(index)
    }
    assert mirrored == found


def test_pieces_are_plain_and_in_order() -> None:
    overlap = Overlap(((4,), (6,)), ((2, 2), (3, 3)))
    pieces = overlap.pieces_of_input((0, 0))
    assert [piece.chunk for piece in pieces] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert next(iter(pieces)) == Piece(
        (0, 0), (slice(0, 2), slice(0, 3)), (slice(0, 2), slice(0, 3)), 6
    )
    assert all(type(i) is int for piece in pieces for i in (*piece.chunk, piece.size))
    assert len(list(pieces)) == len(list(pieces)) == 4  # may be iterated again


def test_overlap_pickles_small() -> None:
    overlap = Overlap(((1,) * 1000,), ((10,) * 100,))
    list(overlap.pieces_of_input((0,)))
    dumped = pickle.dumps(overlap)
    assert len(dumped) < 10_000
    assert list(pickle.loads(dumped).pieces_of_input((55,))) == list(overlap.pieces_of_input((55,)))


@pytest.mark.parametrize(
    ("chunks_in", "chunks_out", "message"),
    [
        (((3,),), ((4,),), r"shape \(3,\) and output chunks of shape \(4,\)"),
        (((3,),), ((3,), (1,)), r"shape \(3,\) and output chunks of shape \(3, 1\)"),
        (((3,), ()), ((3,), (0,)), "axis 1 of the input has no chunk"),
        (((0,),), ((),), "axis 0 of the output has no chunk"),
    ],
)
def test_chunkings_of_other_shapes(chunks_in: Chunks, chunks_out: Chunks, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Overlap(chunks_in, chunks_out)


@settings(deadline=None)
@given(st.data(), overlaps())
def test_touched_inputs(data: st.DataObject, overlap: Overlap) -> None:
    every = list(np.ndindex(overlap.numblocks_out))
    wanted = data.draw(st.lists(st.sampled_from(every), max_size=8))
    if data.draw(st.booleans()):  # a product
        sides = [data.draw(st.sets(st.integers(0, n - 1))) for n in overlap.numblocks_out]
        wanted = list(itertools.product(*sides))
    inputs, outputs = paint(overlap.chunks_in), paint(overlap.chunks_out)
    flat = {int(np.ravel_multi_index(i, overlap.numblocks_out)) if i else 0 for i in wanted}
    touched = np.unique(inputs[np.isin(outputs, list(flat))])
    numblocks = overlap.numblocks_in
    expected = {
        tuple(map(int, np.unravel_index(i, numblocks))) if numblocks else () for i in touched
    }
    assert overlap.touched_inputs(wanted) == expected


def components(overlap: Overlap) -> list[tuple[set[int], set[int]]]:
    """Connected components of chunks that share elements, by joining sets."""
    groups: list[tuple[set[int], set[int]]] = []
    pairs = zip(paint(overlap.chunks_in).flat, paint(overlap.chunks_out).flat, strict=True)
    for i, j in set(pairs):
        touching = [group for group in groups if i in group[0] or j in group[1]]
        groups = [group for group in groups if group not in touching]
        lefts = {int(i)}.union(*(group[0] for group in touching))
        groups.append((lefts, {int(j)}.union(*(group[1] for group in touching))))
    return groups


@settings(deadline=None)
@given(overlaps())
def test_parts_are_the_connected_components(overlap: Overlap) -> None:
    parts = list(overlap.parts)
    assert len(parts) == len(overlap.parts) == math.prod(overlap.parts.shape)
    assert [part.index for part in parts] == list(np.ndindex(overlap.parts.shape))
    seen: tuple[Counter[tuple[int, ...]], Counter[tuple[int, ...]]] = (Counter(), Counter())
    for part in parts:
        assert overlap.parts[part.index] == part
        assert all(part.inputs)
        assert all(part.outputs)
        for index in itertools.product(*part.inputs):
            seen[0][index] += 1
            assert overlap.parts.part_of_input(index) == part.index
        for index in itertools.product(*part.outputs):
            seen[1][index] += 1
            assert overlap.parts.part_of_output(index) == part.index
    # Every chunk, of size zero too, is in exactly one part.
    assert seen[0] == Counter(np.ndindex(overlap.numblocks_in))
    assert seen[1] == Counter(np.ndindex(overlap.numblocks_out))
    # Each component is in one part, and each part holds one component.
    homes: set[tuple[int, ...]] = set()
    inputs_at = list(np.ndindex(overlap.numblocks_in))
    outputs_at = list(np.ndindex(overlap.numblocks_out))
    for inputs, outputs in components(overlap):
        home = {overlap.parts.part_of_input(inputs_at[i]) for i in inputs}
        home |= {overlap.parts.part_of_output(outputs_at[j]) for j in outputs}
        assert len(home) == 1
        assert not home & homes
        homes |= home
    if math.prod(overlap.shape):
        assert homes == {part.index for part in parts}


def test_parts_of_slabs_and_of_merges() -> None:
    shape = (16, 16, 16)
    slabs = Overlap(Slab.X.chunks(shape, 4), Slab.Y.chunks(shape, 4))
    assert len(slabs.parts) == 1
    merge = Overlap(((1,) * 16, (16,), (16,)), ((4,) * 4, (16,), (16,)))
    assert merge.parts.shape == (4, 1, 1)
    assert merge.parts[1, 0, 0].inputs == (range(4, 8), range(1), range(1))
    assert merge.parts[1, 0, 0].outputs == (range(1, 2), range(1), range(1))


@settings(deadline=None)
@given(owned_overlaps())
def test_traffic_counts_elements(case: tuple[Overlap, IntArray, IntArray, int]) -> None:
    overlap, owners_in, owners_out, ranks = case
    have = owners_in.ravel()[paint(overlap.chunks_in)]
    want = owners_out.ravel()[paint(overlap.chunks_out)]
    expected = np.array(
        [[((have == a) & (want == b)).sum() for b in range(ranks)] for a in range(ranks)]
    )
    assert np.array_equal(traffic(overlap, owners_in, owners_out, ranks), expected)


@settings(deadline=None)
@given(owned_overlaps())
def test_rank_plans_agree_with_pieces_and_with_each_other(
    case: tuple[Overlap, IntArray, IntArray, int],
) -> None:
    overlap, owners_in, owners_out, ranks = case
    matrix = traffic(overlap, owners_in, owners_out, ranks)
    expected: dict[int, list[tuple[int, int, int, int]]] = {rank: [] for rank in range(ranks)}
    numbers = np.arange(owners_out.size).reshape(owners_out.shape)
    for number, index in enumerate(np.ndindex(owners_in.shape)):
        owner = int(owners_in[index])
        for piece in overlap.pieces_of_input(index):
            peer = int(owners_out[piece.chunk])
            if owner >= 0 and peer >= 0 and peer != owner:
                expected[owner].append((number, int(numbers[piece.chunk]), peer, piece.size))
    received: Counter[tuple[int, int, int, int, int]] = Counter()
    for rank in range(ranks):
        plan = rank_plan(overlap, owners_in, owners_out, rank)
        sent = plan.sent
        rows = zip(sent.inputs, sent.outputs, sent.peers, sent.elements, strict=True)
        assert sorted(tuple(map(int, row)) for row in rows) == sorted(expected[rank])
        assert plan.kept == matrix[rank, rank]
        assert plan.moved == sent.total == matrix[rank].sum() - matrix[rank, rank]
        assert plan.received.total == matrix[:, rank].sum() - matrix[rank, rank]
        others = np.arange(ranks) != rank
        assert plan.peers_sent.tolist() == np.flatnonzero((matrix[rank] > 0) & others).tolist()
        assert plan.peers_received.tolist() == np.flatnonzero(matrix[:, rank] * others).tolist()
        got = plan.received
        columns = zip(got.inputs, got.outputs, got.peers, got.elements, strict=True)
        received.update((rank, int(i), int(j), int(p), int(n)) for i, j, p, n in columns)
    mirrored = [(p, i, o, r, n) for r, rows in expected.items() for i, o, p, n in rows]
    assert received == Counter(mirrored)


@pytest.mark.parametrize(("p1", "p2"), [(2, 2), (3, 2), (5, 3), (1, 7)])
def test_pencils_exchange_within_one_row_of_the_grid(p1: int, p2: int) -> None:
    shape, ranks = (30, 31, 32), p1 * p2
    pencils = [Pencil(axis, (p1, p2)) for axis in range(3)]
    for one, two, most in ((0, 1, p1 - 1), (1, 0, p1 - 1), (1, 2, p2 - 1), (2, 1, p2 - 1)):
        overlap = Overlap(pencils[one].chunks(shape, ranks), pencils[two].chunks(shape, ranks))
        owners_in, owners_out = (pencils[axis].owners(shape, ranks) for axis in (one, two))
        for rank in range(ranks):
            plan = rank_plan(overlap, owners_in, owners_out, rank)
            assert len(plan.peers_sent) == len(plan.peers_received) == most


def test_wrong_owners_are_refused() -> None:
    overlap = Overlap(((4, 4),), ((8,),))
    with pytest.raises(LayoutError, match=r"input have shape \(1,\), but its chunk grid is \(2,\)"):
        traffic(overlap, [0], [0], 1)
    with pytest.raises(LayoutError, match=r"output have shape \(2,\)"):
        rank_plan(overlap, [0, 0], [0, 0], 0)
    with pytest.raises(LayoutError, match="the input has a chunk of rank 2; ranks are 0 to 1"):
        traffic(overlap, [0, 2], [0], 2)


def test_a_rank_plan_needs_memory_for_its_own_pieces_only() -> None:
    """One rank of 4,096 with 16,384 chunks on each side: 0.4 ms and 90 kB on one core.

    All pieces together are 2 million, 16 MiB a column.
    """
    shape = (1024, 1024, 1024)
    one, two = Block((128, 128, 1)), Block((1, 128, 128))
    overlap = Overlap(one.chunks(shape, 16384), two.chunks(shape, 16384))
    owners = np.arange(16384) // 4
    assert len(overlap) == 128**3
    tracemalloc.start()
    plan = rank_plan(overlap, owners.reshape(128, 128, 1), owners.reshape(1, 128, 128), 77)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(plan.sent) == 4 * 128
    assert peak < 1 << 20


def test_traffic_of_ten_million_pieces_needs_bounded_memory() -> None:
    """0.5 s on one core; a column of all pieces would be 80 MB."""
    overlap = Overlap(((1,) * 100_000, (10,), (10,)), ((8_333,) * 12 + (4,), (1,) * 10, (1,) * 10))
    assert len(overlap) == 10_000_000
    owners_in = (np.arange(100_000) * 7 // 100_000).reshape(overlap.numblocks_in)
    owners_out = (np.arange(1300) % 7).reshape(overlap.numblocks_out)
    tracemalloc.start()
    matrix = traffic(overlap, owners_in, owners_out, 7)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert matrix.sum() == 10_000_000
    assert matrix.sum(axis=1).tolist() == (np.bincount(owners_in.ravel()) * 100).tolist()
    assert peak < 40_000_000


@given(overlaps())
def test_rows_are_the_pieces_that_differ_along_the_last_axis_only(overlap: Overlap) -> None:
    for index in np.ndindex(*overlap.numblocks_in):
        pieces = overlap.pieces_of_input(index)
        rows = list(pieces.rows())
        assert [piece for row in rows for piece in row] == list(pieces)
        leads = [{piece.chunk[:-1] for piece in row} for row in rows]
        assert all(len(lead) == 1 for lead in leads)
        assert len(set().union(*leads)) == len(rows)
