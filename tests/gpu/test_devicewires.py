"""Redistribution between GPUs over the double: bit for bit as NumPy, and mutations are seen."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pes import Crew, Mutation, crew
from redistribute_scenes import Chunk

from dask_redist.packing import run_in_chunk
from dask_redist.segment import part

ALL_PAIRS = frozenset(itertools.combinations(range(5), 2))


@pytest.fixture
def pes() -> Crew:
    return crew()


# ------------------------------------------------------------------------ any boxes at all
@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...], n_pes: int) -> list[Chunk]:
    """Boxes that tile an array, each with its owner; a PE may have several, or none."""
    axes = []
    for length in shape:
        inner = st.integers(0, length)
        cuts = sorted({0, length, *draw(st.lists(inner, max_size=2))})
        axes.append(list(itertools.pairwise(cuts)) or [(0, 0)])
    return [
        (
            draw(st.integers(0, n_pes - 1)),
            tuple(lower for lower, _ in box),
            tuple(upper for _, upper in box),
        )
        for box in itertools.product(*axes)
    ]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    n_pes = draw(st.integers(1, 5))
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    pairs = sorted(itertools.combinations(range(n_pes), 2))
    cut_off = draw(
        st.one_of(
            st.just(frozenset()),
            st.just(frozenset(pairs)),
            st.frozensets(st.sampled_from(pairs)) if pairs else st.just(frozenset()),
        )
    )
    return {
        "n_pes": n_pes,
        "seed": draw(st.integers(0, 1 << 20)),
        "options": {"cut_off": cut_off},
        "shape": shape,
        "dtype": draw(st.sampled_from(["f8", "f4", "i2", "?", "c16", "u1", "M8[s]", "V5"])),
        "inputs": draw(tilings(shape, n_pes)),
        "outputs": draw(tilings(shape, n_pes)),
        "fortran": draw(st.booleans()),
        "limit": draw(st.sampled_from([16, 100, 1 << 12])),
        "alone": draw(st.sampled_from([1, 40, 1 << 20])),
        "capacity": 1 << 20,
        "runs": 2,
    }


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(case=cases())
def test_every_wire_agrees_with_numpy(pes: Crew, case: dict[str, Any]) -> None:
    cut_off = case["options"]["cut_off"]
    expected: Counter[tuple[int, str]] = Counter()
    item = np.dtype(case["dtype"]).itemsize
    for (owner, lower, upper), (to, low, up) in itertools.product(case["inputs"], case["outputs"]):
        shape = np.minimum(upper, up) - np.maximum(lower, low)
        pair = (min(owner, to), max(owner, to))
        if (shape > 0).all():
            name = "nvshmem" if pair in cut_off else "peer memory"
            expected[owner, name] += 2 * int(np.prod(shape, dtype=np.int64)) * item
    answers = pes.play("redistribute_scenes:redistribution", **case)
    sent = {(pe, name): n for pe, told in enumerate(answers) for name, n in told.items()}
    assert sent == dict(expected)


def slabs(shape: tuple[int, ...], axis: int, n_pes: int) -> list[Chunk]:
    cuts = [k * shape[axis] // n_pes for k in range(n_pes + 1)]
    return [
        (
            pe,
            tuple(a if k == axis else 0 for k in range(len(shape))),
            tuple(b if k == axis else n for k, n in enumerate(shape)),
        )
        for pe, (a, b) in enumerate(itertools.pairwise(cuts))
    ]


def uneven(shape: tuple[int, ...], n_pes: int) -> list[Chunk]:
    """Other slabs of axis 0: what moves is in one run in its chunk."""
    cuts = [0, *(k * shape[0] // n_pes + 1 for k in range(1, n_pes)), shape[0]]
    return [
        (pe, (a, *[0] * (len(shape) - 1)), (b, *shape[1:]))
        for pe, (a, b) in enumerate(itertools.pairwise(cuts))
    ]


@pytest.mark.parametrize("n_pes", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("cut_off", [frozenset(), ALL_PAIRS], ids=["direct", "staged"])
def test_slabs_to_slabs_on_any_number_of_pes(
    pes: Crew, n_pes: int, cut_off: frozenset[tuple[int, int]]
) -> None:
    shape = (11, 13, 7)
    for outputs in (slabs(shape, 1, n_pes), uneven(shape, n_pes)):
        pes.play(
            "redistribute_scenes:redistribution",
            n_pes,
            seed=n_pes,
            options={"cut_off": cut_off},
            shape=shape,
            dtype="f8",
            inputs=slabs(shape, 0, n_pes),
            outputs=outputs,
            limit=1 << 10,
            alone=100,
            runs=3,
        )


@pytest.mark.parametrize("cut_off", [frozenset(), ALL_PAIRS], ids=["direct", "staged"])
def test_several_threads_write_at_once(pes: Crew, cut_off: frozenset[tuple[int, int]]) -> None:
    shape = (12, 9)
    inputs = [(k % 2, (k, 0), (k + 1, 9)) for k in range(12)]
    for seed in range(4):
        pes.play(
            "redistribute_scenes:redistribution",
            2,
            seed=seed,
            options={"cut_off": cut_off},
            shape=shape,
            dtype="f4",
            inputs=inputs,
            outputs=[(0, (0, 0), (6, 9)), (1, (6, 0), (12, 5)), (1, (6, 5), (12, 9))],
            limit=100,
            alone=30,
            threads=4,
        )


def test_a_message_that_cannot_be_unpacked_leaves_no_room_behind(pes: Crew) -> None:
    pes.play("wire_scenes:bad_headers", 2, options={"cut_off": ALL_PAIRS})


def test_an_owner_without_room_refuses_with_bytes(pes: Crew) -> None:
    pes.play("wire_scenes:no_room", 2, options={"cut_off": ALL_PAIRS})


def test_what_a_run_has_put_that_is_given_up_lands_before_its_memory_is_reused(pes: Crew) -> None:
    pes.play("wire_scenes:given_up", 2, options={"cut_off": ALL_PAIRS})
    for mutation in (
        ("symmetric", "                self._out.settle()\n", ""),
        ("symmetric", "self.pe.quiet(self.stream)", "pass"),
    ):
        with pytest.raises(AssertionError, match=r"there.tolist\(\) == values"):
            pes.play("wire_scenes:given_up", 2, mutation=mutation, options={"cut_off": ALL_PAIRS})


def test_pes_that_share_a_gpu_need_each_others_memory(pes: Crew) -> None:
    pes.play("wire_scenes:shared_gpu", 2, options={"status": 3})
    with pytest.raises(AssertionError, match="without CUDA's multi-process service"):
        pes.play("wire_scenes:shared_gpu", 2, options={"status": 3, "cut_off": ALL_PAIRS})


def test_views_are_what_cupy_makes_of_them(pes: Crew) -> None:
    pes.play("arena_scenes:cupy_views", 1)


def test_a_piece_outside_the_arena_of_its_owner_is_refused(pes: Crew) -> None:
    pes.play("wire_scenes:outside", 2)
    pes.play("wire_scenes:outside", 2, options={"cut_off": ALL_PAIRS})


@given(st.data())
def test_a_run_in_a_chunk_is_what_numpy_calls_contiguous(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4)))
    corners = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    box = tuple(slice(a, b) for a, b in corners)
    whole = np.arange(int(np.prod(shape)), dtype="i8").reshape(shape)
    piece = part(whole, box)
    begin = run_in_chunk(shape, box)
    if not piece.size:
        return
    if piece.flags.c_contiguous:
        assert begin == piece.ravel()[0]
    else:
        assert begin is None


# ------------------------------------------------------- break it, and see that it is seen
SHAPE = (8, 6)
ROWS, COLUMNS = slabs(SHAPE, 0, 2), slabs(SHAPE, 1, 2)
# An output with its canaries takes 3 grains: each run has the memory of the one before.
DIRECT: dict[str, Any] = {
    "options": {},
    "inputs": ROWS,
    "outputs": COLUMNS,
    "slow": 0.01,
    "capacity": 3 * 512,
}
# Half rows of a chunk are in no run, so they travel in messages.
STAGED: dict[str, Any] = {
    "options": {"cut_off": ALL_PAIRS},
    "inputs": COLUMNS,
    "outputs": ROWS,
}
# All goes to the other PE: what a PE keeps has a quiet of its own.
IN_PLACE: dict[str, Any] = {
    "options": {"cut_off": ALL_PAIRS},
    "inputs": COLUMNS,
    "outputs": [(1 - owner, lower, upper) for owner, lower, upper in COLUMNS],
}
INTO_A_CHUNK = IN_PLACE | {"inputs": ROWS, "outputs": uneven(SHAPE, 2)}
CAPACITY = (
    6 * 512
)  # an output with its canaries takes 3 grains, so each run has what one before had
MUTATIONS: dict[str, tuple[dict[str, Any], Mutation]] = {
    "drop the quiet": (
        IN_PLACE,
        ("devicemail", "self._pe.quiet(self._out.stream)", "pass"),
    ),
    "drop the wait before the fence": (
        DIRECT,
        ("symmetric", "self.stream.synchronize()", "pass"),
    ),
    "drop the guard of what a kernel still reads": (
        DIRECT,
        ("symmetric", "                self.gpu.synchronize()\n", ""),
    ),
    "drop the guard of a message's room": (
        STAGED,
        ("devicemail", "done.synchronize()  #", "pass  #"),
    ),
    "swap target and source": (
        IN_PLACE,
        ("devicemail", "(target, buffer.block.address,", "(buffer.block.address, target,"),
    ),
    "write another chunk's place": (
        DIRECT,
        ("devicewires", "self._address + place.offset, place", "self._address + 512, place"),
    ),
    "put at the chunk's begin": (
        INTO_A_CHUNK,
        ("devicewires", "place.offset + begin * dtype.itemsize", "place.offset + begin"),
    ),
    "use another rank's slot": (
        STAGED,
        ("devicemail", "self._arena.slots + 8 * sender", "self._arena.slots + 8 - 8 * sender"),
    ),
    "use an epoch again": (
        STAGED,
        ("devicemail", "self._epochs[pe] += 1", "self._epochs[pe] = 1"),
    ),
    "wait for the epoch before": (
        STAGED,
        ("devicemail", "8 * sender, epoch, self", "8 * sender, max(1, epoch - 1), self"),
    ),
    "skip the event of what is computed": (
        DIRECT,
        ("symmetric", "self.stream.wait_event(here.record())", "pass"),
    ),
    "skip the event of what is copied": (
        DIRECT,
        ("symmetric", "here.wait_event(copied)", "pass"),
    ),
    "free what is not written": (
        STAGED,
        ("devicemail", "self._granted[block.offset] = block", "block.release()"),
    ),
    "leave the slots as they were allocated": (
        STAGED,
        ("symmetric", "self.gpu.copy(zeros, 0, out.stream)", "pass"),
    ),
}


def play_mutated(pes: Crew, given: dict[str, Any], mutation: Mutation | None, seed: int) -> None:
    arguments = {"capacity": 6 * 512} | given
    if mutation:
        arguments["options"] = given["options"] | {"patience": 2.0}
    pes.play(
        "redistribute_scenes:redistribution",
        2,
        seed=seed,
        mutation=mutation,
        shape=SHAPE,
        dtype="f8",
        limit=64,
        alone=32,
        runs=4,
        **arguments,
    )


@pytest.mark.parametrize("given", [DIRECT, STAGED, IN_PLACE], ids=["direct", "staged", "in place"])
def test_what_is_mutated_below_passes_as_it_is(pes: Crew, given: dict[str, Any]) -> None:
    for seed in range(4):
        play_mutated(pes, given, None, seed)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_caught(pes: Crew, name: str) -> None:
    given, mutation = MUTATIONS[name]
    for seed in range(12):
        try:
            play_mutated(pes, given, mutation, seed)
        except AssertionError as error:
            print(str(error).strip().splitlines()[-1])
            return
    pytest.fail(f"nothing sees it if one should {name}")


def test_outputs_that_were_taken_for_each_other_are_seen(pes: Crew) -> None:
    with pytest.raises(AssertionError, match=r"output \d of run 0"):
        pes.play(
            "redistribute_scenes:redistribution",
            2,
            shape=(4, 4),
            dtype="u1",
            inputs=slabs((4, 4), 0, 2),
            outputs=[(0, (0, 0), (4, 2)), (0, (0, 2), (4, 4))],
            swapped=True,
        )
