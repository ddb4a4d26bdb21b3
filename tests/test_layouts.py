"""Layouts against arrays painted with the rank of each element."""

import math
import pickle
import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_boxes import cut_boxes

from dask_redist.boxes import Box, Chunks, IntArray
from dask_redist.errors import LayoutError
from dask_redist.layouts import (
    Block,
    BlockCyclic,
    Boxes,
    Layout,
    Pencil,
    Replicated,
    Slab,
    Uneven,
    as_layout,
    match_layout,
)
from dask_redist.partition import square_grid

RANKS = st.integers(1, 7)
LENGTHS = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 11])


def shapes(least: int = 0, most: int = 6) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of few enough elements to paint, whose last axes are cut short where needed."""

    def cut(lengths: list[int]) -> tuple[int, ...]:
        shape: tuple[int, ...] = ()
        for length in lengths:
            shape += (min(length, 2000 // max(1, math.prod(shape))),)
        return shape

    return st.lists(LENGTHS, min_size=least, max_size=most).map(cut)


@st.composite
def grids(draw: st.DrawFn, ndim: int, ranks: int) -> tuple[int, ...]:
    """A process grid: the ranks' prime factors dealt to random axes."""
    grid = [1] * ndim
    for prime in (2, 3, 5, 7):
        while ranks % prime == 0:
            ranks //= prime
            grid[draw(st.integers(0, ndim - 1))] *= prime
    return tuple(grid)


@st.composite
def grid_cases(draw: st.DrawFn) -> tuple[Layout, tuple[int, ...], int, tuple[int, ...]]:
    """A layout of one box a rank that is a chunk grid, with shape, ranks and its grid."""
    ranks, shape = draw(RANKS), draw(shapes(1))
    ndim = len(shape)
    axis = draw(st.integers(-ndim, ndim - 1))
    kind = draw(st.sampled_from(["slab", "block", "pencil"] if ndim > 1 else ["slab", "block"]))
    if kind == "slab":
        at = axis % ndim
        return Slab(axis), shape, ranks, (1,) * at + (ranks,) + (1,) * (ndim - 1 - at)
    if kind == "block":
        grid = draw(grids(ndim, ranks))
        return Block(grid), shape, ranks, grid
    rest = draw(st.none() | grids(ndim - 1, ranks))
    used = square_grid(ranks, ndim - 1) if rest is None else rest
    at = axis % ndim
    return Pencil(axis, rest), shape, ranks, (*used[:at], 1, *used[at:])


@st.composite
def uneven_cases(draw: st.DrawFn) -> tuple[Uneven, tuple[int, ...], int]:
    ranks, shape = draw(RANKS), draw(shapes(1))
    axis = draw(st.integers(0, len(shape) - 1))
    cuts = draw(st.lists(st.integers(0, shape[axis]), min_size=ranks - 1, max_size=ranks - 1))
    sizes = np.diff([0, *sorted(cuts), shape[axis]]).tolist()
    return Uneven(axis, sizes), shape, ranks


@st.composite
def boxes_cases(draw: st.DrawFn) -> tuple[Boxes, tuple[int, ...], int]:
    shape = draw(shapes(0, 4))
    boxes = draw(cut_boxes(shape))
    return Boxes(boxes), shape, len(boxes)


@st.composite
def cyclic_cases(draw: st.DrawFn) -> tuple[BlockCyclic, tuple[int, ...], int]:
    ranks, shape = draw(RANKS), draw(shapes(1))
    block = draw(st.lists(st.integers(1, 4), min_size=len(shape), max_size=len(shape)))
    return BlockCyclic(draw(grids(len(shape), ranks)), block), shape, ranks


def paint_chunks(chunks: Chunks, owners: IntArray) -> IntArray:
    """The rank of each element, after each chunk and its owner."""
    painted = np.full(tuple(map(sum, chunks)), -7)
    starts = [np.cumsum([0, *sizes]) for sizes in chunks]
    for index in np.ndindex(owners.shape):
        place = tuple(slice(row[i], row[i + 1]) for row, i in zip(starts, index, strict=True))
        assert (painted[place] == -7).all()
        painted[place] = owners[index]
    return painted


def paint_grid(shape: tuple[int, ...], grid: tuple[int, ...]) -> IntArray:
    """The rank of each element, by numpy.array_split and C order."""
    painted = np.zeros(shape, dtype=np.int64)
    for axis, (length, parts) in enumerate(zip(shape, grid, strict=True)):
        coords = np.empty(length, dtype=np.int64)
        for coord, piece in enumerate(np.array_split(np.arange(length), parts)):
            coords[piece] = coord
        painted = painted * parts + np.expand_dims(
            coords, [a for a in range(len(shape)) if a != axis]
        )
    return painted


def check_layout(layout: Layout, shape: tuple[int, ...], ranks: int, painted: IntArray) -> None:
    """Hold every method of a layout against the painted array."""
    layout.check(shape, ranks)
    chunks, owners = layout.chunks(shape, ranks), layout.owners(shape, ranks)
    assert owners.dtype == np.int64
    assert owners.shape == tuple(map(len, chunks))
    assert all(type(size) is int for sizes in chunks for size in sizes)
    for length, sizes in zip(shape, chunks, strict=True):
        assert sizes == (0,) if length == 0 else min(sizes) > 0
    assert np.array_equal(paint_chunks(chunks, owners), painted)
    table = layout.lshape_map(shape, ranks)
    assert table.dtype == np.int64
    assert table.shape == (ranks, len(shape))
    index = np.arange(math.prod(shape)).reshape(shape)
    for rank in range(ranks):
        held = index[painted == rank]
        assert tuple(table[rank]) == layout.shape(rank, shape, ranks)
        assert math.prod(table[rank].tolist()) == held.size
        if isinstance(layout, BlockCyclic):
            continue
        box = layout.box(rank, shape, ranks)
        assert box.shape == tuple(table[rank])
        assert np.array_equal(index[box.slices].ravel(), held)
    assert layout.spell(shape, ranks)
    again = pickle.loads(pickle.dumps(layout))
    assert again == layout
    assert hash(again) == hash(layout)


@settings(deadline=None)
@given(grid_cases())
def test_grids_split_as_numpy_does(
    case: tuple[Layout, tuple[int, ...], int, tuple[int, ...]],
) -> None:
    layout, shape, ranks, grid = case
    check_layout(layout, shape, ranks, paint_grid(shape, grid))


@settings(deadline=None)
@given(uneven_cases())
def test_uneven(case: tuple[Uneven, tuple[int, ...], int]) -> None:
    layout, shape, ranks = case
    along = np.repeat(np.arange(ranks, dtype=np.int64), layout.sizes)
    others = [axis for axis in range(len(shape)) if axis != layout.axis]
    check_layout(layout, shape, ranks, np.zeros(shape, np.int64) + np.expand_dims(along, others))


@settings(deadline=None)
@given(boxes_cases())
def test_boxes(case: tuple[Boxes, tuple[int, ...], int]) -> None:
    layout, shape, ranks = case
    painted = np.full(shape, -1)
    for rank, box in enumerate(layout.boxes):
        painted[box.slices] = rank
    check_layout(layout, shape, ranks, painted)
    # Coarsest: across each edge of the chunk grid some element changes its rank.
    for axis, sizes in enumerate(layout.chunks(shape, ranks) if painted.size else ()):
        for edge in np.cumsum(sizes)[:-1]:
            before, after = np.take(painted, edge - 1, axis), np.take(painted, edge, axis)
            assert (before != after).any()


@settings(deadline=None)
@given(cyclic_cases())
def test_block_cyclic(case: tuple[BlockCyclic, tuple[int, ...], int]) -> None:
    layout, shape, ranks = case
    painted = np.zeros(shape, dtype=np.int64)
    for axis, (length, parts) in enumerate(zip(shape, layout.grid, strict=True)):
        coords = np.arange(length) // layout.block[axis] % parts
        others = [a for a in range(len(shape)) if a != axis]
        painted = painted * parts + np.expand_dims(coords, others)
    check_layout(layout, shape, ranks, painted)
    for axis, sizes in enumerate(layout.chunks(shape, ranks)):
        if layout.grid[axis] == 1:
            assert sizes == (shape[axis],)
    with pytest.raises(LayoutError, match=r"several boxes; use chunks\(\) and owners\(\)"):
        layout.box(0, shape, ranks)


@settings(deadline=None)
@given(shapes(), RANKS)
def test_replicated(shape: tuple[int, ...], ranks: int) -> None:
    layout = Replicated()
    assert layout.chunks(shape, ranks) == tuple((length,) for length in shape)
    owners = layout.owners(shape, ranks)
    assert owners.shape == (1,) * len(shape)
    assert not owners.any()
    assert layout.lshape_map(shape, ranks).tolist() == [list(shape)] * ranks
    for rank in range(ranks):
        assert layout.box(rank, shape, ranks) == Box((0,) * len(shape), shape)
        assert layout.shape(rank, shape, ranks) == shape


@settings(deadline=None)
@given(shapes(), RANKS, st.data())
def test_replicated_on_some(shape: tuple[int, ...], ranks: int, data: st.DataObject) -> None:
    held = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1))
    layout = Replicated(data.draw(st.permutations(sorted(held))))
    assert layout == Replicated(sorted(held))
    assert layout.held_by(ranks).tolist() == sorted(held)
    assert layout.chunks(shape, ranks) == tuple((length,) for length in shape)
    assert layout.owners(shape, ranks).ravel().tolist() == [min(held)]
    nothing = (0,) * len(shape)
    for rank, row in enumerate(layout.lshape_map(shape, ranks).tolist()):
        whole = shape if rank in held else nothing
        assert row == list(whole)
        assert layout.box(rank, shape, ranks) == Box(nothing, whole)


def test_arrays_without_axes() -> None:
    for layout in (Block(()), BlockCyclic((), ()), Boxes([Box((), ())])):
        assert layout.chunks((), 1) == ()
        assert layout.owners((), 1).shape == ()
        assert layout.lshape_map((), 1).shape == (1, 0)
        assert layout.spell((), 1)
    assert Block(()).box(0, (), 1) == Box((), ())


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(1, 4))
def test_square_grid_is_the_squarest(ranks: int, ndim: int) -> None:
    grid = square_grid(ranks, ndim)
    assert math.prod(grid) == ranks
    assert list(grid) == sorted(grid, reverse=True)

    def factorings(rest: int, count: int, cap: int) -> Iterator[tuple[int, ...]]:
        if count == 0:
            yield from [()] if rest == 1 else []
            return
        for first in range(1, min(rest, cap) + 1):
            if rest % first == 0:
                yield from ((first, *more) for more in factorings(rest // first, count - 1, first))

    assert grid == min(factorings(ranks, ndim, ranks))


def test_names() -> None:
    assert Slab(0) == Slab.X
    assert Pencil(2) == Pencil.Z
    assert hash(Slab(1)) != hash(Slab(2))
    assert {Slab(1), Pencil(1)} == {Pencil(1), Slab(1), Slab.Y}
    assert len({Slab.X, Slab(0), Slab.Y}) == 2
    names = [Slab.Y, Slab(3), Slab(-1), Pencil.X, Pencil(0, [2, 2]), Block([4]), Uneven(1, [2, 3])]
    assert list(map(repr, names)) == [
        "Slab.Y",
        "Slab(3)",
        "Slab(-1)",
        "Pencil.X",
        "Pencil(0, grid=(2, 2))",
        "Block((4,))",
        "Uneven(1, (2, 3))",
    ]
    assert repr(Uneven(0, range(100))) == "Uneven(0, (0, 1, 2, 3, 4, 5, 6, ..., 99))"
    for layout in [*names, Boxes([Box((0,), (3,))]), BlockCyclic((2,), (3,)), Replicated()]:
        assert eval(repr(layout)) == layout


@pytest.mark.parametrize(
    ("layout", "shape", "ranks", "spelled"),
    [
        (Slab.X, (8, 8), 4, "Slab.X (axis 0 split over 4)"),
        (Slab(-1), (8, 8, 8), 4, "Slab(-1) (axis 2 split over 4)"),
        (Pencil.X, (8, 8, 8), 4, "Pencil.X (axis 0 whole; axes 1, 2 split 2 x 2)"),
        (Pencil.Y, (8, 8, 8), 6, "Pencil.Y (axis 1 whole; axes 0, 2 split 3 x 2)"),
        (Pencil.X, (8, 8), 4, "Pencil.X (axis 0 whole; axis 1 split over 4)"),
        (Block((1, 4)), (8, 8), 4, "Block((1, 4)) (axis 0 whole; axis 1 split over 4)"),
        (Block((2, 3)), (8, 8), 6, "Block((2, 3)) (axes 0, 1 split 2 x 3)"),
        (Uneven(0, (5, 3)), (8,), 2, "Uneven(0, (5, 3)) (axis 0 split over 2: 3 to 5)"),
        (Replicated(), (8,), 2, "Replicated() (whole on each of 2)"),
        (Replicated([2, 0]), (8,), 3, "Replicated((0, 2)) (whole on each of 2)"),
    ],
)
def test_spell(layout: Layout, shape: tuple[int, ...], ranks: int, spelled: str) -> None:
    assert layout.spell(shape, ranks) == spelled


@pytest.mark.parametrize(
    ("layout", "shape", "ranks", "message"),
    [
        (Slab.X, (), 1, "Slab.X needs an axis, but the array has 0 dimensions"),
        (Pencil.X, (), 1, "Pencil.X needs an axis, but the array has 0 dimensions"),
        (Slab.Z, (4, 4), 2, "axis 2 is out of range for an array of 2 dimensions"),
        (Slab(-3), (4, 4), 2, "axis -3 is out of range"),
        (Pencil.X, (4,), 2, "needs an array of at least 2 dimensions, not 1"),
        (Pencil(0, (2, 2)), (4, 4), 4, "a grid of 2 entries; an array of 2 dimensions has 1 axes"),
        (Pencil(0, (2, 2)), (4, 4, 4), 5, "2 x 2 is for 4 ranks, but there are 5"),
        (Pencil(0, ()), (4, 4), 1, "a grid of 0 entries"),
        (Block((2, 2)), (4,), 4, "2 grid entries, but an array of 1 dimensions needs 1"),
        (Block((2, 3)), (4, 4), 5, "2 x 3 is for 6 ranks, but there are 5"),
        (BlockCyclic((2,), (3,)), (4, 4), 2, "1 grid entries"),
        (BlockCyclic((2,), (3,)), (4,), 3, "2 is for 2 ranks, but there are 3"),
        (Uneven(0, (2, 2)), (5,), 2, "the sizes sum to 4, but axis 0 has 5 elements"),
        (Uneven(0, (2, 2)), (4,), 3, "has 2 sizes, but there are 3 ranks"),
        (Uneven(2, (2, 2)), (4,), 2, "axis 2 is out of range"),
        (Boxes([Box((0,), (4,))]), (4,), 2, "has 1 boxes, but there are 2 ranks"),
        (Boxes([Box((0,), (3,)), Box((2,), (4,))]), (4,), 2, "ranks 0 and 1 overlap"),
        (Boxes([Box((0,), (1,)), Box((2,), (4,))]), (4,), 2, "no rank holds the element at (1,)"),
        (Slab.X, (4,), 0, "the number of ranks must be at least 1, not 0"),
        (Slab.X, (4,), 1.5, "the number of ranks must be an integer, not 1.5"),
        (Slab.X, (4, math.nan), 2, "the shape must be a sequence of integers"),
        (Slab.X, (4, -1), 2, "the shape (4, -1): every entry must be at least 0"),
        (Replicated(), (4,), 0, "the number of ranks must be at least 1"),
        (Replicated([0, 2]), (4,), 2, "there is no rank 2; ranks are 0 to 1"),
    ],
)
def test_what_does_not_fit_is_refused(
    layout: Layout, shape: tuple[int, ...], ranks: int, message: str
) -> None:
    for method in (layout.check, layout.chunks, layout.owners, layout.lshape_map, layout.spell):
        with pytest.raises(LayoutError, match=re.escape(message)) as caught:
            method(shape, ranks)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Slab("x"), "Slab axis must be an integer, not 'x'"),  # type: ignore[arg-type]
        (lambda: Block(4), "Block grid must be a sequence of integers, not 4"),  # type: ignore[arg-type]
        (lambda: Block((0, 2)), "every entry must be at least 1"),
        (lambda: Uneven(0, (3, -1)), "every entry must be at least 0"),
        (lambda: BlockCyclic((2, 2), (3,)), "2 and 1 entries"),
        (lambda: Boxes([(0, 1)]), "entry 0 of Boxes must be a Box"),  # type: ignore[list-item]
        (lambda: Boxes(3), "takes a sequence of Box"),  # type: ignore[arg-type]
        (lambda: Slab.X.box(4, (4,), 4), "no rank 4; ranks are 0 to 3"),
        (lambda: Slab.X.shape(-1, (4,), 4), "no rank -1"),
        (lambda: Replicated().shape(4, (4,), 4), "no rank 4"),
        (lambda: Replicated([]), "Replicated ranks (): name at least one, and each once"),
        (lambda: Replicated([1, 1]), "each once"),
        (lambda: Replicated([-1]), "every entry must be at least 0"),
        (lambda: Boxes([Box((0,), (4,))]).box(1, (4,), 1), "no rank 1"),
        (lambda: Boxes([Box((0,), (4,))]).box(0, (4, 4), 1), "1 dimensions"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        make()


def test_too_many_chunks_are_refused_with_the_number() -> None:
    boxes = [Box((i, i), (i + 1, i + 1)) for i in range(10)]
    boxes += [Box((i, 0), (i + 1, i)) for i in range(10)]
    boxes += [Box((i, i + 1), (i + 1, 10)) for i in range(10)]
    layouts = [(Boxes(boxes), 30), (BlockCyclic((3, 10), (1, 1)), 30)]
    for layout, ranks in layouts:
        assert len(layout.owners((10, 10), ranks, max_chunks=100).ravel()) == 100
        for method in (layout.chunks, layout.owners):
            with pytest.raises(LayoutError, match=r"100 chunks \(10 x 10\), more than the 99"):
                method((10, 10), ranks, max_chunks=99)
    with pytest.raises(LayoutError, match="more than the 10000000 allowed"):
        BlockCyclic((2, 1), (1, 1)).chunks((10_000_001, 1), 2)


def test_as_layout_passes_layouts_and_knows_nothing_else() -> None:
    assert as_layout(Slab.Y, (4, 4), 2) is Slab.Y
    others = [None, -1, "auto", {0: 2}, (2, 2), [[2, 4], [2, 4]], np.ones((2, 2)), np.array([2, 2])]
    assert all(as_layout(value, (4, 4), 2) is None for value in others)


@settings(deadline=None)
@given(uneven_cases())
def test_target_map_of_an_uneven_layout(case: tuple[Uneven, tuple[int, ...], int]) -> None:
    layout, shape, ranks = case
    found = as_layout(layout.lshape_map(shape, ranks), shape, ranks)
    assert isinstance(found, Layout)
    if ranks == 1:
        assert found == Slab(0)
    elif 0 not in shape:
        assert np.array_equal(found.owners(shape, ranks), layout.owners(shape, ranks))
    assert np.array_equal(found.lshape_map(shape, ranks), layout.lshape_map(shape, ranks))


@pytest.mark.parametrize(
    ("rows", "shape", "message"),
    [
        ([[2, 4]], (4, 4), "has shape (1, 2); 2 ranks and 2 dimensions need (2, 2)"),
        ([[2, 4, 1], [2, 4, 1]], (4, 4), "has shape (2, 3)"),
        ([[2, 4], [3, 4]], (4, 4), "column 0 of the target map sums to 5, but axis 0 has 4"),
        ([[2, 4], [1, 4]], (4, 4), "column 0 of the target map sums to 3, but axis 0 has 4"),
        ([[2, 4], [2, 3]], (4, 4), "row 1, column 1 is 3 instead of the whole 4"),
        ([[5, 4], [-1, 4]], (4, 4), "row 1, column 0 of the target map is -1"),
        ([[4, 4], [4, 4]], (4, 4), "every row of the target map is the whole shape (4, 4)"),
        (np.empty((2, 0), int), (), "the array has 0 dimensions"),
    ],
)
def test_no_target_map(rows: list[list[int]], shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        as_layout(np.array(rows), shape, 2)


@settings(deadline=None)
@given(st.one_of(grid_cases().map(lambda case: case[:3]), uneven_cases(), boxes_cases()))
def test_match_finds_a_layout_of_the_same_chunks_and_owners(
    case: tuple[Layout, tuple[int, ...], int],
) -> None:
    layout, shape, ranks = case
    chunks, owners = layout.chunks(shape, ranks), layout.owners(shape, ranks)
    found = match_layout(chunks, owners, ranks)
    if not shape:
        assert found is None
        return
    assert found is not None
    assert found.chunks(shape, ranks) == chunks
    assert np.array_equal(found.owners(shape, ranks), owners)


@pytest.mark.parametrize(
    "layout",
    [
        Slab.X,
        Slab.Z,
        Pencil.X,
        Pencil.Y,
        Pencil(1, (2, 3)),
        Block((3, 2, 1)),
        Uneven(1, (1, 3, 0, 0, 2, 1)),
        Boxes(
            [*(Box((0, 0, i), (6, 7, i + 1)) for i in range(5)), Box((0, 0, 5), (6, 7, 8))][::-1]
        ),
    ],
    ids=repr,
)
def test_match_prefers_the_simplest(layout: Layout) -> None:
    shape, ranks = (6, 7, 8), 6
    found = match_layout(layout.chunks(shape, ranks), layout.owners(shape, ranks), ranks)
    # Block((3, 2, 1)) keeps axis 2 whole: with the default grid that is Pencil.Z
    assert found == (Pencil.Z if layout == Block((3, 2, 1)) else layout)


def test_match_of_a_full_grid_is_a_block() -> None:
    layout = Block((2, 3, 2))
    chunks, owners = layout.chunks((6, 7, 8), 12), layout.owners((6, 7, 8), 12)
    assert match_layout(chunks, owners, 12) == layout


def test_match_knows_when_there_is_none() -> None:
    assert match_layout((), np.zeros((), int), 1) is None
    assert match_layout(((4,),), [0], 1) == Slab(0)
    assert match_layout(((2, 2),), [0, 0], 1) is None
    assert match_layout(((2, 2),), [0, -1], 2) is None
    assert match_layout(((2, 2),), [0, 2], 2) is None
    assert match_layout(((2, 2, 2),), [0, 1, 0], 2) is None
    assert match_layout(((2, 0, 2),), [0, 1, 2], 3) is None
    assert match_layout(((2, 2), (2, 2)), [[0, 1], [1, 1]], 2) is None
    with pytest.raises(LayoutError, match=r"shape \(3,\), but the chunk grid is \(2,\)"):
        match_layout(((2, 2),), [0, 1, 2], 3)


def test_layouts_of_many_ranks() -> None:
    shape = (4096, 64, 64)
    for layout in (Slab.X, Pencil.X, Block((16, 16, 16))):
        table = layout.lshape_map(shape, 4096)
        assert table.prod(axis=1).sum() == math.prod(shape)
        assert match_layout(layout.chunks(shape, 4096), layout.owners(shape, 4096), 4096) == layout
