"""Partials become a result: in the order of the line, by Dask's functions, over any ranks.

The oracle of order is a sum of strings, which is associative and not commutative: each chunk's
string names its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import pytest
from cluster import ar, same
from dask.array import chunk
from distributed.protocol import pickle as by_value
from hypothesis import given, settings
from hypothesis import strategies as st
from reduce_ranks import NONE, LocalRanks, loaded_row

from dask_redist import deposits
from dask_redist.deposits import Entry, Plan, ReduceRun
from dask_redist.pairs import Elementwise
from dask_redist.partials import Cut, pack
from dask_redist.ranks import Seat
from dask_redist.reduction import Line, Merge, Nothing, Reduction, Stretch
from dask_redist.run import RunClosed, RunTable


def words(blocks: Any, axis: Any, keepdims: bool) -> Any:
    """Strings one after the other."""
    text = "".join(np.asarray(blocks).ravel().tolist())
    return np.full((1,) * np.ndim(blocks) if keepdims else (), text, dtype=object)


def word(place: int) -> Any:
    return np.array([f"<{place}>"], dtype=object)


def reduction(merge: Merge, grid: tuple[int, ...], **facts: Any) -> Reduction:
    given: dict[str, Any] = {
        "name": "sum-reduce-0",
        "index": (),
        "axis": merge.axis,
        "grid": grid,
        "owner": 0,
        "ranks": 3,
        "ahead": "none",
        "cuttable": True,
        "deterministic": False,
        "merging": by_value.dumps(merge),
    }
    return Reduction(**given | facts)


SUM = Merge((0,), False, partial(chunk.sum, dtype="f8"), None, True, Elementwise(np.add))
WIDE = Elementwise(np.add, np.dtype("f8"))
PLAIN_SUM = Merge((0,), False, partial(chunk.sum, dtype="f8"), None, True)
WORDS = Merge((0,), False, words, words, True)


# ------------------------------------------------------------------------------------ merging
def test_combine_is_dasks_combine_or_else_aggregate() -> None:
    def tagged(tag: str, blocks: Any, axis: Any, keepdims: bool) -> Any:
        return (tag, np.shape(blocks), axis, keepdims)

    aggregate, combine = partial(tagged, "aggregate"), partial(tagged, "combine")
    parts = [ar(1, 4), ar(1, 4)]
    both = Merge((0,), False, aggregate, combine, True)
    assert both.combined(parts) == ("combine", (2, 4), (0,), True)
    assert both.result(parts) == ("aggregate", (2, 4), (0,), False)
    one = Merge((0,), True, aggregate, None, True)
    assert one.combined(parts) == ("aggregate", (2, 4), (0,), True)
    assert one.result(parts) == ("aggregate", (2, 4), (0,), True)


def test_one_partial_is_what_it_is_until_the_aggregate() -> None:
    only = ar(1, 4)
    assert WORDS.combined([only]) is only
    assert WORDS.combined([Nothing(ar(0, 4)), only]) is only
    same(SUM.result([only]), ar(4))


def test_without_concatenate_partials_are_nested_as_the_chunks_are() -> None:
    seen = []

    def look(blocks: Any, axis: Any, keepdims: bool) -> Any:
        seen.append(blocks)
        return ar(1)

    merge = Merge((0, 2), True, look, look, False)
    merge.result(list("abcdef"), (2, 3))
    merge.result(list("abcdef"))
    merge.combined(list("abc"))
    assert seen == [
        [["a", "b", "c"], ["d", "e", "f"]],
        [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]],
        [["a"], ["b"], ["c"]],
    ]


def test_what_is_nothing_is_passed_over_unless_there_is_nothing_else() -> None:
    largest = Merge((0,), False, chunk.max, None, True, Elementwise(np.maximum))
    nothing = Nothing(ar(0, 2))
    same(largest.result([nothing, ar(1, 2), nothing, ar(1, 2, start=5)], (4,)), ar(2, start=5))
    assert largest.combined([nothing, nothing]) is nothing
    with pytest.raises(ValueError, match="zero-size array to reduction operation maximum"):
        largest.result([nothing, nothing], (2,))


@pytest.mark.parametrize("dtype", ["f8", "i4", "u1", "?", "c16", "m8[s]", "f2", "object"])
def test_a_ufunc_in_place_gives_what_the_functions_do(dtype: str) -> None:
    parts = [(ar(1, 5, start=k) % 7).astype("i8").astype(dtype) for k in range(4)]
    total = chunk.sum if dtype == "m8[s]" else partial(chunk.sum, dtype=dtype)
    without = Merge((0,), True, total, None, True)
    with_ufunc = replace(without, pair=Elementwise(np.add, np.dtype(dtype)))
    same(with_ufunc.result(parts), without.result(parts))
    same(with_ufunc.combined(parts), without.combined(parts))


@pytest.mark.parametrize("narrow", ["?", "i1", "f4"])
def test_partials_that_the_functions_widen_are_left_to_them(narrow: str) -> None:
    parts = [np.full((1, 2), 100).astype(narrow)] * 3
    merge = Merge((0,), False, partial(chunk.sum, dtype="f8"), None, True, WIDE)
    same(merge.result(parts), np.full(2, 3.0 if narrow == "?" else 300.0))
    same(merge.combined(parts), np.full((1, 2), 3.0 if narrow == "?" else 300.0))


def test_only_what_is_its_own_is_overwritten() -> None:
    first, second = ar(1, 3), ar(1, 3)
    kept = SUM.combined([first, second])
    same(first, ar(1, 3))
    assert SUM.combined([kept, second], own=True) is kept
    same(kept, 3 * ar(1, 3))
    same(SUM.result([first, second, second]), 3 * ar(3))
    same(first, ar(1, 3))
    nothing: Any = Nothing(ar(0, 3))
    SUM.combined([nothing, first, second], own=True)  # the first that is there is not the own one
    same(first, ar(1, 3))


def test_partials_of_other_types_are_left_to_the_functions() -> None:
    wide, narrow = np.full((1, 2), 2.0), np.full((1, 2), 1, "f4")
    same(SUM.combined([narrow, wide]), np.full((1, 2), 3.0))
    masked = np.ma.MaskedArray([[1.0, 2.0]], [[True, False]])
    same(SUM.result([masked, wide]), np.ma.MaskedArray([2.0, 4.0], [False, False]))
    same(SUM.result([np.full((1, 2), 1.0), np.full((1, 1), 1.0)][:1]), np.ones(2))


# --------------------------------------------------------------------------------------- lines
@given(
    order=st.permutations(range(9)),
    least=st.integers(2, 5),
    ahead=st.sampled_from(["none", "neighbours", "any"]),
    fails=st.integers(0, 9),
)
def test_neighbours_are_combined_in_order(
    order: list[int], least: int, ahead: str, fails: int
) -> None:
    line = Line()
    for count, place in enumerate(order):
        line.put(place, f"<{place}>")
        line.put(place, "twice")
        while batch := line.batch(ahead, least):
            assert len(batch) >= least
            if count == fails:
                line.put_back(batch)
                break
            line.join(batch, "".join(stretch.partial for stretch in batch))
    stretches = line.stretches
    assert [s.start for s in stretches] == sorted(s.start for s in stretches)
    text = "".join(s.partial for s in stretches)
    if ahead == "none":
        assert stretches == [Stretch((k,), f"<{k}>") for k in range(9)]
    if ahead != "any":
        assert text == "".join(f"<{k}>" for k in range(9))
        assert [place for s in stretches for place in s.places] == list(range(9))
    assert sorted(text) == sorted("".join(f"<{k}>" for k in range(9)))
    assert ahead == "none" or fails < 9 or len(stretches) < 2 * least


def test_a_batch_that_is_being_combined_is_not_there() -> None:
    line = Line()
    for place in range(4):
        line.put(place, place)
    batch = line.batch("neighbours", 4)
    assert [s.start for s in batch] == [0, 1, 2, 3]
    line.put(4, 4)
    line.put(5, 5)
    assert [s.start for s in line.batch("neighbours", 2)] == [4, 5]
    assert line.batch("any", 1) == []


def test_places_are_numbered_in_c_order_of_the_reduced_axes() -> None:
    spec = reduction(Merge((0, 2), False, words, words, True), (2, 5, 3))
    places = [spec.place((i, 4, k)) for i in range(2) for k in range(3)]
    assert places == list(range(6))
    assert spec.lengths == (2, 3)


# --------------------------------------------------------------------------------------- plans
def seat(number: int) -> Seat:
    fields: list[Any] = [number, "w", "here", f"tcp://here:{number}", None, None, 1, 1]
    return Seat(*fields)


def table(
    seats: Sequence[int], partials: Sequence[Any], owner: Callable[[int], int]
) -> list[tuple[Seat, list[Entry]]]:
    rows: dict[int, list[Entry]] = {number: [] for number in seats}
    for place, part in enumerate(partials):
        nothing = isinstance(part, Nothing)
        laid = pack(part, lambda arrays: [64] * len(arrays))
        rows[owner(place)].append(Entry((place,), laid, nothing))
    return [(seat(number), entries) for number, entries in rows.items()]


@given(
    seats=st.lists(st.integers(0, 20), min_size=1, max_size=7, unique=True),
    shape=st.tuples(st.just(1), st.integers(1, 400), st.integers(1, 60)),
    deterministic=st.booleans(),
    grain=st.sampled_from([64, 1000, 32 * 1024]),
)
def test_cuts_cover_the_result_once(
    seats: list[int], shape: tuple[int, int, int], deterministic: bool, grain: int
) -> None:
    merge = Merge((0,), False, np.sum, None, True)
    spec = reduction(merge, (4, 1, 1), deterministic=deterministic)
    row = np.lib.stride_tricks.as_strided(np.zeros(1), shape, (0, 0, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deposits, "GRAIN", grain)
        laid = table(seats, [row] * 4, lambda place: seats[place % len(seats)])
        plan = Plan(spec, laid)
        again = Plan(spec, laid[::-1])
        cuts = {number: list(plan.cuts_of(number)) for number in seats}
        assert cuts == {number: list(again.cuts_of(number)) for number in seats}
    assert [entry.places[0] for _, entry in plan.line] == [0, 1, 2, 3]
    every = [cut for several in cuts.values() for cut in several]
    if None in every:
        assert every == [None]
        assert 4 * prod(shape) * 8 <= deposits.WHOLE or max(shape[1:]) == 1
        return
    cut_axis = 1 if shape[1] >= shape[2] else 2
    pieces = sorted((cut.start, cut.stop) for cut in every if cut)
    assert {cut.axis for cut in every if cut} == {cut_axis}
    assert pieces[0][0] == 0
    assert pieces[-1][1] == shape[cut_axis]
    assert all(start < stop for start, stop in pieces)
    assert [start for start, _ in pieces[1:]] == [stop for _, stop in pieces[:-1]]
    if deterministic:
        nbytes = prod(shape) * 8 // shape[cut_axis]
        assert len({stop - start for start, stop in pieces[:-1]}) <= 1
        assert all(stop - start <= max(1, grain // nbytes) for start, stop in pieces)
    else:
        assert len(pieces) <= len(seats)
        assert max(stop - start for start, stop in pieces) <= -(-shape[cut_axis] // len(seats))


def test_bounds_of_cuts_do_not_depend_on_the_ranks_where_bits_must_not() -> None:
    merge = Merge((0,), False, np.sum, None, True)
    spec = reduction(merge, (3, 1), deterministic=True)
    found = set()
    for n in range(1, 8):
        owner = [place % n for place in range(3)].__getitem__
        plan = Plan(spec, table(range(n), [np.ones((1, 50_000))] * 3, owner))
        found.add(frozenset(cut for number in range(n) for cut in plan.cuts_of(number)))
    assert len(found) == 1


BIG = np.ones((1, 8000))
WHOLE = {
    "not cuttable": ({"cuttable": False}, [BIG] * 3),
    "small": ({}, [np.ones((1, 8))] * 3),
    "objects": ({}, [BIG.astype(object)] * 3),
    "of several shapes": ({}, [BIG, BIG, BIG[:, 1:]]),
    "no kept axis": ({}, [np.ones((8000, 1))] * 3),
}


@pytest.mark.parametrize(("facts", "partials"), WHOLE.values(), ids=WHOLE)
def test_what_cannot_be_cut_is_merged_by_the_rank_that_holds_most(
    facts: dict[str, Any], partials: list[Any]
) -> None:
    spec = reduction(Merge((0,), False, np.sum, None, True), (3, 1), **facts)
    plan = Plan(spec, table((3, 9, 4), partials, lambda place: 9 if place else 3))
    assert [list(plan.cuts_of(s)) for s in (3, 9, 4)] == [[], [None], []]
    spec = reduction(Merge((0,), False, np.sum, None, True), (2, 1), **facts)
    even = Plan(spec, table((9, 3), partials[1:], lambda place: 3 if place else 9))
    assert [list(even.cuts_of(s)) for s in (3, 9)] in ([[], [None]], [[None], []])


def test_nothing_is_no_partial_to_be_cut() -> None:
    spec = reduction(Merge((0,), False, np.max, None, True), (4, 1))
    partials = [Nothing(BIG[:0]), BIG, BIG, BIG]
    plan = Plan(spec, table((0, 1), partials, lambda place: place % 2))
    assert [list(plan.cuts_of(s)) for s in (0, 1)] == [[Cut(1, 0, 4000)], [Cut(1, 4000, 8000)]]
    spec = reduction(Merge((0,), False, np.max, None, True), (2, 1))
    none = Plan(spec, table((0, 1), [Nothing(BIG[:0])] * 2, lambda place: place))
    assert [list(none.cuts_of(s)) for s in (0, 1)] in ([[None], []], [[], [None]])


def test_a_chunk_that_was_contributed_twice_is_not_counted_twice() -> None:
    """By a task that Dask had given up, and by the one that ran instead of it."""
    spec = reduction(Merge((0,), False, np.sum, None, True), (3, 1))
    rows = table((0, 1), [BIG] * 3, lambda place: place % 2)
    assert Plan(spec, rows)
    (_, there), (_, other) = rows
    other.append(there[0])
    with pytest.raises(RunClosed, match="once"):
        Plan(spec, rows)
    del there[0], other[-1]
    with pytest.raises(RunClosed, match="once"):
        Plan(spec, rows)


# --------------------------------------------------------------- a run on ranks of this process
@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that can be is laid out and cut, however small."""
    make_small(monkeypatch)


def make_small(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(deposits, "INLINE", 0)
    patch.setattr(deposits, "WHOLE", 0)
    patch.setattr(deposits, "GRAIN", 24)


def contributed(
    partials: Sequence[Any], ranks: int, order: Sequence[int], owner: Callable[[int], int]
) -> Iterator[tuple[int, tuple[int, ...], Any]]:
    for place in order:
        yield owner(place) % ranks, (place, 0), partials[place]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("ahead", ["none", "neighbours"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("batch", [2, 3, 16])
def test_order_of_arrival_does_not_matter(
    ranks: int, ahead: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deposits, "BATCH", batch)
    spec = reduction(WORDS, (12, 1), ahead=ahead, cuttable=False)
    local, rng = LocalRanks(ranks), np.random.default_rng(ranks)
    for owner in (lambda k: k, lambda k: k // 5, lambda k: 0):
        order = rng.permutation(12).tolist()
        parts = [word(k) for k in range(12)]
        got = local.result(
            spec, ((r, i[:1], p) for r, i, p in contributed(parts, ranks, order, owner))
        )
        assert got.item() == "".join(f"<{k}>" for k in range(12))
    local.close()


@pytest.fixture(scope="module")
def local() -> Iterator[dict[int, LocalRanks]]:
    made = {n: LocalRanks(n) for n in (1, 2, 3, 4, 5, 7)}
    yield made
    for ranks in made.values():
        ranks.close()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_run_gives_what_one_merge_gives(
    data: st.DataObject, local: dict[int, LocalRanks]
) -> None:
    """Whoever has which partial, whatever comes first, whoever is combined ahead."""
    ranks = data.draw(st.sampled_from(sorted(local)))
    shape = data.draw(st.tuples(*(st.integers(0, 9),) * 2))
    places = data.draw(st.integers(1, 7))
    order = data.draw(st.permutations(range(places)))
    owner = data.draw(st.lists(st.integers(0, ranks - 1), min_size=places, max_size=places))
    ahead = data.draw(st.sampled_from(["none", "neighbours", "any"]))
    keepdims = data.draw(st.booleans())
    merge = data.draw(st.sampled_from([SUM, PLAIN_SUM]))
    merge = Merge((0,), keepdims, merge.aggregate, None, True, merge.pair)
    spec = reduction(merge, (places, 1, 1), ahead=ahead)
    parts = [ar(1, *shape, start=100 * k) for k in range(places)]
    kept = [part.copy() for part in parts]
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        got = local[ranks].result(spec, contributed(parts, ranks, order, lambda k: owner[k]))
    same(got, merge.result(kept))
    assert got.flags.writeable
    for part, before in zip(parts, kept, strict=True):
        same(part, before)  # a chunk's partial may be the user's own array


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_same_bits_on_any_number_of_ranks(
    data: st.DataObject, local: dict[int, LocalRanks]
) -> None:
    merge = data.draw(st.sampled_from([SUM, PLAIN_SUM]))
    spec = reduction(merge, (6, 1), deterministic=True)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    length = data.draw(st.integers(1, 60))
    parts = [rng.standard_normal((1, length)) * 10.0 ** rng.integers(-8, 8) for _ in range(6)]
    found = set()
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        for ranks, there in local.items():
            order = rng.permutation(6).tolist()
            owner = rng.integers(0, ranks, 6)
            given = contributed(parts, ranks, order, owner.tolist().__getitem__)
            found.add(there.result(spec, given).tobytes())
    assert len(found) == 1


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("ranks", [2, 3, 5, 7])
def test_no_rank_reads_more_than_its_share(ranks: int, local: dict[int, LocalRanks]) -> None:
    there = local[ranks]
    there.received.clear()
    parts = [ar(1, 105, start=k) for k in range(2 * ranks)]
    spec = reduction(SUM, (2 * ranks, 1))
    got = there.result(spec, contributed(parts, ranks, range(2 * ranks), lambda k: k))
    same(got, sum(parts[1:], parts[0])[0])
    every = sum(part.nbytes for part in parts)
    assert sum(there.received.values()) == every - every // ranks
    assert max(there.received.values()) <= every / ranks


@pytest.mark.usefixtures("small_pieces")
def test_masked_partials_are_cut_with_their_masks(local: dict[int, LocalRanks]) -> None:
    whole = np.ma.MaskedArray(ar(6, 9), ar(6, 9) % 4 == 0)
    spec = reduction(Merge((0,), False, partial(np.ma.sum), None, True), (3, 1))
    parts = [whole[2 * k : 2 * k + 2].sum(axis=0, keepdims=True) for k in range(3)]
    got = local[2].result(spec, contributed(parts, 2, (2, 0, 1), lambda k: k))
    same(got, whole.sum(axis=0))


@pytest.mark.usefixtures("small_pieces")
def test_an_error_in_the_merge_leaves_nothing(local: dict[int, LocalRanks]) -> None:
    def refuse(blocks: Any, axis: Any, keepdims: bool) -> Any:
        raise KeyError("refused")

    merge = Merge((0,), False, refuse, None, True)
    spec = reduction(merge, (2, 1))
    with pytest.raises(KeyError, match="refused"):
        local[2].result(spec, contributed([ar(1, 9)] * 2, 2, (0, 1), lambda k: k))


def test_an_error_in_place_ends_the_run(local: dict[int, LocalRanks]) -> None:
    """The total may have taken some of the partial: nobody may go on with it."""
    spec = reduction(SUM, (3, 1), ahead="any")
    largest = np.finfo("f8").max
    run = ReduceRun(RunTable(("id",), 1, spec, NONE, NONE, {}), local[1].arenas[0], local[1].read)
    with np.errstate(over="raise"):
        run.contribute((0, 0), np.array([[1.0, largest]]))
        run.contribute((1, 0), np.array([[1.0, 0.0]]))
        with pytest.raises(FloatingPointError):
            run.contribute((2, 0), np.array([[1.0, largest]]))
    run.contribute((2, 0), np.array([[1.0, largest]]))  # as a task that is tried again does
    assert loaded_row(run.lay_out()) is None
    with pytest.raises(FloatingPointError):
        run.exchange([], 0)


def test_an_error_while_partials_are_laid_is_told_in_the_exchange(
    local: dict[int, LocalRanks],
) -> None:
    spec = reduction(WORDS, (2, 1))
    unpicklable = [(line for line in "ab")] * 2
    with pytest.raises(TypeError, match="generator"):
        local[2].result(spec, contributed(unpicklable, 2, (0, 1), lambda k: k))


def test_batches_bound_what_a_rank_holds(
    local: dict[int, LocalRanks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 partials, of which a rank keeps few."""
    most = []
    put = Line.put

    def watched(line: Line, place: int, part: Any) -> None:
        put(line, place, part)
        most.append(len(line.stretches))

    monkeypatch.setattr(Line, "put", watched)
    for merge, bound in ((SUM, 2), (PLAIN_SUM, deposits.BATCH)):
        most.clear()
        spec = reduction(merge, (100, 1), ahead="neighbours")
        parts = [ar(1, 3)] * 100
        got = local[1].result(spec, contributed(parts, 1, range(100), lambda k: 0))
        same(got, 100 * ar(3))
        assert max(most) <= bound


@pytest.mark.parametrize("ahead", ["neighbours", "any"])
def test_threads_that_contribute_side_by_side(local: dict[int, LocalRanks], ahead: str) -> None:
    there, (seat_here,) = local[1], local[1].seats
    for _ in range(5):
        spec = reduction(SUM, (64, 1), ahead=ahead)
        table = RunTable(("id",), 1, spec, NONE, NONE, {})
        run = ReduceRun(table, there.arenas[0], there.read)
        parts = [((k, 0), ar(1, 50, start=k)) for k in range(64)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(run.contribute, *zip(*parts, strict=True)))
        merged = run.exchange([(seat_here, run.lay_out())], seat_here.seat)
        got = deposits.assemble_result(spec, [(seat_here, merged)], 1, there.read)
        same(got, sum(ar(50, start=k) for k in range(64)))
