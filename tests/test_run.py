"""One run on its ranks: gates, pieces that find their place, outputs that are taken once."""

import contextlib
import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_tools import CANARY
from numpy.typing import NDArray
from test_overlap import overlaps
from test_spec import part_of

from dask_redist import stream
from dask_redist.arena import Arena, block_of
from dask_redist.errors import ChunkMismatchError
from dask_redist.overlap import Overlap
from dask_redist.pages import GRANULE
from dask_redist.peers import LocalPeer, PageBudget, attach
from dask_redist.run import Gate, Outputs, RankRun, RunClosed, RunTable, Tally, checked
from dask_redist.segment import view_bytes
from dask_redist.spec import PartSpec
from dask_redist.wires import MemoryWire as MemoryWireOfPeer
from dask_redist.wires import MessageWire, Place, Wire

MARGIN = 64


# ------------------------------------------------------------------------------------------ gates
def test_a_gate_is_quiet_when_it_is_closed_and_all_are_out() -> None:
    gate = Gate()
    assert not gate.quiet
    with gate.enter(), gate.enter():
        gate.close()
        assert not gate.quiet
    assert gate.quiet
    gate.close()
    assert gate.quiet


def test_one_writer_of_two_is_still_inside() -> None:
    gate = Gate()
    with gate.enter():
        with gate.enter():
            gate.close()
        assert not gate.quiet
    assert gate.quiet


def test_a_closed_gate_refuses_and_counts_nobody() -> None:
    gate = Gate()
    gate.close()
    with pytest.raises(RunClosed, match="closed on this rank"), gate.enter():
        pytest.fail("inside a closed gate")
    assert gate.quiet


def test_a_writer_that_raises_is_out() -> None:
    gate = Gate()
    with pytest.raises(KeyError), gate.enter():
        raise KeyError
    gate.close()
    assert gate.quiet


def test_nobody_is_inside_once_a_gate_was_seen_quiet() -> None:
    gate, inside, seen = Gate(), Counter[str](), threading.Event()
    late = []

    def writer() -> None:
        with contextlib.suppress(RunClosed):
            while True:
                with gate.enter():
                    if seen.is_set():
                        late.append(threading.get_ident())
                    inside["entered"] += 1

    threads = [threading.Thread(target=writer) for _ in range(4)]
    for thread in threads:
        thread.start()
    while inside["entered"] < 100:
        time.sleep(0)
    gate.close()
    while not gate.quiet:
        time.sleep(0)
    seen.set()
    for thread in threads:
        thread.join()
    assert not late


# --------------------------------------------------------------------------------- contributions
class Memory:
    """The arenas of all seats as one array each, full of canaries."""

    def __init__(self, spec: PartSpec, seats: NDArray[np.int64]) -> None:
        self.spec, self.seats = spec, seats
        self.offsets = np.zeros(spec.n_out, np.int64)
        ends = Counter[int]()
        for out, seat in enumerate(seats.tolist()):
            self.offsets[out] = ends[seat] + MARGIN
            ends[seat] += 2 * MARGIN + -(-self.nbytes(out) // MARGIN) * MARGIN
        self.bytes = {seat: np.full(end, CANARY, np.uint8) for seat, end in ends.items()}
        self.wires: list[MemoryWire] = []

    def nbytes(self, out: int) -> int:
        return math.prod(self.spec.out_shape(self.spec.local_out(out))) * self.spec.dtype.itemsize

    def table(self, number: int = 1) -> RunTable:
        return RunTable("id", number, self.spec, self.seats, self.offsets, {})

    def wire(self, table: RunTable, seat: int) -> Wire:
        wire = MemoryWire(self.bytes[seat], seat)
        self.wires.append(wire)
        return wire

    def output(self, out: int) -> NDArray[Any]:
        memory = self.bytes[int(self.seats[out])]
        shape = self.spec.out_shape(self.spec.local_out(out))
        return view_bytes(memory, int(self.offsets[out]), shape, self.spec.dtype)

    def untouched(self, outs: set[int]) -> bool:
        """Whether nothing but these outputs was written."""
        mask = {seat: np.ones(len(memory), bool) for seat, memory in self.bytes.items()}
        for out in outs:
            start = int(self.offsets[out])
            mask[int(self.seats[out])][start : start + self.nbytes(out)] = False
        return all((memory[mask[seat]] == CANARY).all() for seat, memory in self.bytes.items())


class MemoryWire:
    """Writes into an array."""

    def __init__(self, memory: NDArray[np.uint8], seat: int) -> None:
        self.name = "even" if seat % 2 == 0 else "odd"
        self.sent = self.held = 0
        self.far = False
        self._memory = memory

    def write(self, place: Place, target_slices: tuple[slice, ...], piece: NDArray[Any]) -> None:
        target = view_bytes(self._memory, place.offset, place.shape, np.dtype(place.dtype))
        assert piece.shape == target[target_slices].shape
        target[target_slices] = piece
        self.sent += piece.nbytes

    def start(self) -> None:
        """Nothing."""

    def flush(self) -> None:
        """Nothing."""


def indices_in(spec: PartSpec) -> list[tuple[int, ...]]:
    """Indices in the whole array of the part's input chunks."""
    firsts = zip(spec.first_in, spec.grid_in, strict=True)
    return list(itertools.product(*(range(f, f + n) for f, n in firsts)))


def in_part(spec: PartSpec, array: NDArray[Any], index: tuple[int, ...]) -> NDArray[Any]:
    """The input chunk ``index`` of the part, which is ``array``."""
    edges = [np.cumsum([0, *sizes]) for sizes in spec.chunks_in]
    local = [i - f for i, f in zip(index, spec.first_in, strict=True)]
    slices = tuple(slice(e[i], e[i + 1]) for e, i in zip(edges, local, strict=True))
    return np.asarray(array[slices], array.dtype)  # a chunk of no axes would be a native scalar


def out_part(spec: PartSpec, array: NDArray[Any], out: int) -> NDArray[Any]:
    edges = [np.cumsum([0, *sizes]) for sizes in spec.chunks_out]
    local = spec.local_out(out)
    return array[tuple(slice(e[i], e[i + 1]) for e, i in zip(edges, local, strict=True))]


def numbered(shape: tuple[int, ...], dtype: Any = "i8") -> NDArray[Any]:
    """Each element carries its global index."""
    return np.arange(math.prod(shape)).reshape(shape).astype(dtype)


@settings(deadline=None)
@given(
    data=st.data(),
    overlap=overlaps(),
    ranks=st.integers(1, 7),
    dtype=st.sampled_from(["i8", ">i4", "c16", "M8[s]", "S4"]),
    twice=st.booleans(),
)
def test_every_wanted_element_arrives_and_nothing_else(
    data: st.DataObject, overlap: Overlap, ranks: int, dtype: str, twice: bool
) -> None:
    corner = st.tuples(*[st.integers(0, 3)] * len(overlap.shape))
    spec = part_of(overlap, data.draw(corner), data.draw(corner), dtype=np.dtype(dtype))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    # Seats are not ranks: they may be any numbers. -1: nobody wants this output.
    memory = Memory(spec, rng.choice([-1, *range(11, 11 + ranks)], spec.n_out))
    runs = [RankRun(memory.table(), memory.wire) for _ in range(ranks)]
    array = numbered(overlap.shape, dtype)
    array.flags.writeable = False
    indices = indices_in(spec) * (1 + twice)
    rng.shuffle(indices)
    for index in indices:
        runs[rng.integers(ranks)].contribute(index, in_part(spec, array, index))
    assert not any(run.rest for run in runs)
    wanted = {out for out in range(spec.n_out) if memory.seats[out] >= 0}
    for out in wanted:
        assert np.array_equal(memory.output(out), out_part(spec, array, out))
    assert memory.untouched(wanted)

    total = Tally()
    for run in runs:
        total.add(run.tally)
    expected = Counter[int]()
    for out in wanted:
        expected[int(memory.seats[out])] += memory.nbytes(out) * (1 + twice)
    assert +total.sent == +expected
    names = Counter[str]()
    for seat, nbytes in expected.items():
        names["even" if seat % 2 == 0 else "odd"] += nbytes
    assert +total.wires == +names
    assert total.pieces == (1 + twice) * sum(
        memory.seats[spec.flat_out(piece.chunk)] >= 0
        for local in np.ndindex(*spec.grid_in)
        for piece in overlap.pieces_of_input(local)
    )


@settings(deadline=None)
@given(data=st.data(), overlap=overlaps(), order=st.sampled_from(["C", "F", "reversed"]))
def test_pieces_of_a_row_through_wires_of_all_kinds(
    data: st.DataObject, overlap: Overlap, order: str
) -> None:
    """Memory of this process, of another one within a small budget, and messages."""
    spec = part_of(overlap)
    chosen = st.lists(st.integers(-1, 2), min_size=spec.n_out, max_size=spec.n_out)
    seats = np.array(data.draw(chosen), np.int64)
    array, pages = numbered(overlap.shape), PageBudget(GRANULE)
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "LEAST", 1)
        patch.setattr(stream, "ROW", 0)
        patch.setattr("dask_redist.peers.arena_here", lambda _: None)
        arenas = [stack.enter_context(contextlib.closing(Arena(1 << 20, keep=0))) for _ in range(3)]
        shared = stack.enter_context(contextlib.closing(attach(arenas[1].card, pages)))
        blocks = [
            arenas[max(seat, 0)].allocate([math.prod(spec.out_shape(spec.local_out(out))) * 8])[0]
            for out, seat in enumerate(seats.tolist())
        ]
        for block in blocks:
            block.array((block.nbytes,), "u1")[:] = CANARY
        outputs = Outputs(spec, dict(enumerate(blocks)))
        kinds: dict[int, Wire] = {
            0: MemoryWireOfPeer(LocalPeer(arenas[0])),
            1: MemoryWireOfPeer(shared),
            2: MessageWire(outputs.receive, 64),
        }
        offsets = np.array([block.offset for block in blocks], np.int64)
        run = RankRun(RunTable("id", 1, spec, seats, offsets, {}), lambda table, seat: kinds[seat])
        for index in data.draw(st.permutations(indices_in(spec))):
            chunk = in_part(spec, array, index)
            if order == "F":
                chunk = chunk.copy(order="F")
            elif order == "reversed":
                chunk = np.flip(np.flip(chunk).copy())
            run.contribute(index, chunk)
        run.exchange()
        assert run.tally.pieces == sum(
            seats[spec.flat_out(piece.chunk)] >= 0
            for local in np.ndindex(*spec.grid_in)
            for piece in overlap.pieces_of_input(local)
        )
        for out, block in enumerate(blocks):
            if seats[out] >= 0:
                found = block.array(spec.out_shape(spec.local_out(out)), "i8")
                assert np.array_equal(found, out_part(spec, array, out))
            else:
                assert (block.array((block.nbytes,), "u1") == CANARY).all()


HALVES = Overlap(((2, 2),), ((4,),))


def test_a_contribution_to_a_closed_run_writes_nothing() -> None:
    memory = Memory(part_of(HALVES), np.array([3]))
    run = RankRun(memory.table(), memory.wire)
    run.gate.close()
    with pytest.raises(RunClosed):
        run.contribute((0,), np.zeros(2, "i8"))
    assert memory.untouched(set())
    assert run.gate.quiet


def test_a_run_has_one_wire_to_each_owner() -> None:
    memory = Memory(part_of(Overlap(((6, 6),), ((2, 1, 2, 1, 6),))), np.array([3, 5, 3, -1, 5]))
    run = RankRun(memory.table(), memory.wire)
    run.contribute((0,), np.arange(6))
    run.contribute((1,), np.arange(6))
    run.contribute((0,), np.arange(6))
    assert [(wire.name, wire.sent) for wire in memory.wires] == [("odd", 64), ("odd", 64)]
    assert run.tally.sent == {3: 64, 5: 64}


def test_two_threads_get_one_wire() -> None:
    """A second message wire to the same owner would hold pieces back that nobody sends."""
    memory = Memory(part_of(Overlap(((2, 2),), ((4,),))), np.array([3]))
    start = threading.Barrier(2)

    def slow(table: RunTable, seat: int) -> Wire:
        time.sleep(0.02)
        return memory.wire(table, seat)

    run = RankRun(memory.table(), slow)

    def work(index: int) -> None:
        start.wait(30)
        run.contribute((index,), np.arange(2))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [wire.sent for wire in memory.wires] == [32]


def test_a_run_is_not_quiet_before_the_last_byte() -> None:
    memory = Memory(part_of(HALVES), np.array([3]))
    entered, go_on = threading.Event(), threading.Event()

    class Slow(MemoryWire):
        def write(self, *args: Any) -> None:
            entered.set()
            assert go_on.wait(30)
            super().write(*args)

    run = RankRun(memory.table(), lambda table, seat: Slow(memory.bytes[seat], seat))
    thread = threading.Thread(target=run.contribute, args=((1,), np.array([5, 6])))
    thread.start()
    assert entered.wait(30)
    run.gate.close()
    assert not run.gate.quiet
    assert not run.tally.sent
    go_on.set()
    thread.join()
    assert run.gate.quiet
    assert memory.output(0)[2:].tolist() == [5, 6]
    assert run.tally.sent == {3: 16}
    assert run.tally.writing > 0


def test_a_wire_that_fails_leaves_the_gate_and_counts_nothing() -> None:
    class Broken(MemoryWire):
        def write(self, *args: Any) -> None:
            raise OSError("the peer is gone")

    memory = Memory(part_of(HALVES), np.array([3]))
    run = RankRun(memory.table(), lambda table, seat: Broken(memory.bytes[seat], seat))
    with pytest.raises(OSError, match="the peer is gone"):
        run.contribute((0,), np.zeros(2, "i8"))
    assert run.tally == Tally()
    run.gate.close()
    assert run.gate.quiet


def test_a_wrong_chunk_never_enters_the_run() -> None:
    memory = Memory(part_of(HALVES), np.array([3]))
    run = RankRun(memory.table(), memory.wire)
    with pytest.raises(ChunkMismatchError):
        run.contribute((0,), np.zeros(3, "i8"))
    assert not memory.wires
    assert memory.untouched(set())


def test_contributions_from_many_threads_are_all_counted() -> None:
    overlap = Overlap(((3,) * 64,), ((48,) * 4,))
    spec = part_of(overlap)
    memory = Memory(spec, np.array([1, 2, 1, 2]))
    run = RankRun(memory.table(), memory.wire)
    array = numbered((192,))
    todo = iter(indices_in(spec))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                index = next(todo, None)
            if index is None:
                return
            run.contribute(index, in_part(spec, array, index))

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.concatenate([memory.output(out) for out in range(4)]).tolist() == list(range(192))
    assert run.tally.sent == {1: 96 * 8, 2: 96 * 8}
    assert run.tally.pieces == 64


# ---------------------------------------------------------------------------------------- outputs
@pytest.fixture
def arena() -> Iterator[Arena]:
    with contextlib.closing(Arena(1 << 20, keep=0)) as opened:
        yield opened


THIRDS = Overlap(((2, 4),), ((2, 2, 2),))


def outputs_in(arena: Arena, spec: PartSpec) -> Outputs:
    sizes = [math.prod(spec.out_shape(spec.local_out(out))) * 8 for out in range(spec.n_out)]
    blocks = dict(enumerate(arena.allocate(sizes)))
    for block in blocks.values():
        block.array((block.nbytes,), "u1")[:] = CANARY
    return Outputs(spec, blocks)


def test_an_output_is_taken_once_and_aliases_nothing(arena: Arena) -> None:
    outputs = outputs_in(arena, part_of(THIRDS))
    first, second = outputs.take(0), outputs.take(1)
    assert first is not None
    assert second is not None
    assert outputs.take(0) is None
    assert outputs.take(3) is None  # another rank's
    assert first.shape == (2,)
    assert first.dtype == np.dtype("i8")
    assert first.flags.writeable
    assert first.flags.c_contiguous
    assert block_of(first) is not block_of(second)
    first[:] = -1
    assert second.tobytes() == bytes([CANARY]) * 16


def test_one_of_many_takes_wins(arena: Arena) -> None:
    outputs = outputs_in(arena, part_of(THIRDS))
    start = threading.Barrier(6)
    taken: list[Any] = []

    def take() -> None:
        start.wait(30)
        taken.append(outputs.take(1))

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(array is not None for array in taken) == 1


def test_what_is_dropped_returns_to_the_arena_and_what_was_taken_stays(arena: Arena) -> None:
    outputs = outputs_in(arena, part_of(THIRDS))
    kept = outputs.take(1)
    outputs.drop(condemn=False)
    assert outputs.take(0) is None
    assert arena.in_use == 64
    assert arena.condemned == 0
    del kept
    assert arena.in_use == 0


def test_what_is_condemned_is_given_to_nobody(arena: Arena) -> None:
    outputs = outputs_in(arena, part_of(THIRDS))
    outputs.drop(condemn=True)
    assert arena.condemned == 3 * 64
    outputs.drop(condemn=True)
    assert arena.condemned == 3 * 64


@given(data=st.data(), overlap=overlaps(), limit=st.sampled_from([8, 64, 1 << 20]))
@settings(deadline=None)
def test_pieces_that_come_as_messages(data: st.DataObject, overlap: Overlap, limit: int) -> None:
    spec = part_of(overlap)
    seats = np.zeros(spec.n_out, np.int64)
    array = numbered(overlap.shape)
    with contextlib.closing(Arena(1 << 20, keep=0)) as arena:
        outputs = outputs_in(arena, spec)
        table = RunTable("id", 1, spec, seats, np.zeros(spec.n_out, np.int64), {})
        run = RankRun(table, lambda table, seat: MessageWire(outputs.receive, limit))
        for index in data.draw(st.permutations(indices_in(spec))):
            run.contribute(index, in_part(spec, array, index))
        assert run.rest == (array.size > 0)  # the last message is never full
        run.exchange()
        assert not run.rest
        for out in range(spec.n_out):
            taken = outputs.take(out)
            assert taken is not None
            assert np.array_equal(taken, out_part(spec, array, out))


class Post:
    """What message wires send, by owner."""

    def __init__(self, limit: int = 1 << 20) -> None:
        self.limit = limit
        self.sent: dict[int, list[list[int]]] = {}
        self.broken: set[int] = set()

    def wire(self, table: RunTable, seat: int) -> Wire:
        def send(headers: list[list[int]], buffer: NDArray[Any]) -> None:
            if seat in self.broken:
                raise OSError(f"rank {seat} has left")
            self.sent.setdefault(seat, []).append(np.frombuffer(buffer, "i8").tolist())

        return MessageWire(send, self.limit)


def test_message_wires_hold_back_until_the_exchange() -> None:
    """The end of a run on a rank sends no message: its owners may not be there."""
    post = Post()
    memory = Memory(part_of(Overlap(((2, 4),), ((3, 3),))), np.array([4, 6]))
    run = RankRun(memory.table(), post.wire)
    run.contribute((0,), np.arange(2))
    run.contribute((1,), np.arange(2, 6))
    assert not post.sent
    assert run.rest
    assert run.rest
    assert not post.sent
    run.exchange()
    assert post.sent == {4: [[0, 1, 2]], 6: [[3, 4, 5]]}
    assert not run.rest
    run.exchange()
    assert post.sent == {4: [[0, 1, 2]], 6: [[3, 4, 5]]}
    assert run.tally.sent == {4: 24, 6: 24}
    assert run.tally.wires == {"messages": 48}


def test_full_messages_do_not_wait_for_the_exchange() -> None:
    post = Post(limit=16)
    memory = Memory(part_of(Overlap(((2,) * 3,), ((6,),))), np.array([4]))
    run = RankRun(memory.table(), post.wire)
    for index in range(3):
        run.contribute((index,), np.arange(2 * index, 2 * index + 2))
    assert post.sent == {4: [[0, 1], [2, 3]]}
    assert run.rest
    run.exchange()
    assert post.sent == {4: [[0, 1], [2, 3], [4, 5]]}


@pytest.mark.parametrize("empty", [0, 1])
def test_one_wire_of_two_holds_something_back(empty: int) -> None:
    post, wires = Post(), list[Wire]()
    memory = Memory(part_of(Overlap(((4,),), ((2, 2),))), np.array([4, 6]))

    def wire_to(table: RunTable, seat: int) -> Wire:
        wires.append(post.wire(table, seat))
        return wires[-1]

    run = RankRun(memory.table(), wire_to)
    run.contribute((0,), np.arange(4))
    wires[empty].flush()
    assert run.rest
    wires[1 - empty].flush()
    assert not run.rest


def test_both_kinds_of_wire_in_one_run() -> None:
    post = Post()
    memory = Memory(part_of(Overlap(((4,),), ((2, 2),))), np.array([3, 8]))
    run = RankRun(
        memory.table(), lambda table, seat: (memory if seat == 3 else post).wire(table, seat)
    )
    run.contribute((0,), np.arange(4))
    assert run.rest
    assert memory.output(0).tolist() == [0, 1]
    run.exchange()
    assert post.sent == {8: [[2, 3]]}


def test_an_exchange_begins_with_far_ranks_and_large_messages() -> None:
    order: list[int] = []

    def wire_to(table: RunTable, seat: int) -> Wire:
        return MessageWire(lambda headers, buffer: order.append(seat), far=seat >= 4)

    memory = Memory(part_of(Overlap(((10,),), ((1, 3, 2, 4),))), np.array([1, 4, 5, 2]))
    run = RankRun(memory.table(), wire_to)
    run.contribute((0,), np.arange(10))
    run.exchange()
    assert order == [4, 5, 2, 1]


@pytest.mark.parametrize("broken", [4, 6])
def test_an_exchange_that_fails_says_so(broken: int) -> None:
    post = Post()
    post.broken = {broken}
    memory = Memory(part_of(Overlap(((4,),), ((2, 2),))), np.array([4, 6]))
    run = RankRun(memory.table(), post.wire)
    run.contribute((0,), np.arange(4))
    assert run.rest
    with pytest.raises(OSError, match=f"rank {broken} has left"):
        run.exchange()


def test_a_rank_that_wrote_nothing_holds_nothing_back() -> None:
    memory = Memory(part_of(HALVES), np.array([3]))
    run = RankRun(memory.table(), Post().wire)
    assert not run.rest
    run.exchange()


def test_a_message_after_the_end_of_the_run_is_refused(arena: Arena) -> None:
    outputs = outputs_in(arena, part_of(THIRDS))
    outputs.gate.close()
    with pytest.raises(RunClosed):
        outputs.receive([[0, 0, 2]], bytes(16))
    taken = outputs.take(0)
    assert taken is not None
    assert taken.tobytes() == bytes([CANARY]) * 16


# ----------------------------------------------------------------------------------------- chunks
class Tagged(np.ndarray[Any, Any]):
    """An array of another type, over plain memory."""


GRID = Overlap(((2, 3), (4,)), ((5,), (4,)))


@pytest.mark.parametrize(
    "chunk",
    [
        np.zeros((3, 4)),
        np.zeros((3, 4), order="F"),
        np.zeros((6, 4))[::-2],
        np.zeros((3, 4)).view(Tagged),
        np.broadcast_to(np.float64(1), (3, 4)),
    ],
    ids=["C", "F", "strided", "subclass", "broadcast"],
)
def test_chunks_as_declared(chunk: Any) -> None:
    found = checked(chunk, part_of(GRID, dtype=np.dtype("f8")), (1, 0))
    assert type(found) is np.ndarray
    assert np.shares_memory(found, chunk)


@pytest.mark.parametrize(("real", "declared"), [(">f8", "<f8"), ("<f8", ">f8")])
def test_a_chunk_of_the_other_byte_order_keeps_its_values(real: str, declared: str) -> None:
    chunk = np.arange(12, dtype=real).reshape(3, 4)
    found = checked(chunk, part_of(GRID, dtype=np.dtype(declared)), (1, 0))
    assert found.dtype.str == declared
    assert np.array_equal(found, np.arange(12).reshape(3, 4))


def test_a_scalar_is_a_chunk_of_no_axes() -> None:
    spec = part_of(Overlap((), ()), dtype=np.dtype("f8"))
    assert checked(np.float64(7), spec, ()).shape == ()
    assert checked(np.array(7.0), spec, ()) == 7


@pytest.mark.parametrize(
    ("chunk", "real"),
    [
        (np.zeros((2, 4)), r"ndarray of shape \(2, 4\) and dtype float64"),
        (np.zeros((3, 4, 1)), r"ndarray of shape \(3, 4, 1\)"),
        (np.float64(0), r"float64 of shape \(\)"),
        (np.zeros((3, 4), "f4"), "dtype float32"),
        (np.zeros((3, 4), ">f4"), "dtype >f4"),
        (np.zeros((3, 4), "i8"), "dtype int64"),
        (np.ma.masked_array(np.zeros((3, 4))), r"MaskedArray of shape \(3, 4\)"),
        ([[0.0] * 4] * 3, r"list of shape \? and dtype \?"),
        (None, r"NoneType of shape \?"),
    ],
    ids=itertools.count(),
)
def test_other_chunks_are_refused_by_name(chunk: Any, real: str) -> None:
    spec = part_of(GRID, first_in=(5, 6), dtype=np.dtype("f8"), name_input="sst-0a1b")
    with pytest.raises(ChunkMismatchError, match=real) as caught:
        checked(chunk, spec, (6, 6))
    message = str(caught.value)
    assert "chunk (6, 6) of 'sst-0a1b'" in message
    assert "declares an ndarray of shape (3, 4) and dtype float64" in message


def test_the_oracle_sees_a_piece_in_a_wrong_place() -> None:
    memory = Memory(part_of(HALVES), np.array([3]))
    run = RankRun(memory.table(), memory.wire)
    run.contribute((1,), np.array([0, 1]))
    run.contribute((0,), np.array([2, 3]))
    assert not np.array_equal(memory.output(0), numbered((4,)))
    memory.bytes[3][0] = 0
    assert not memory.untouched({0})
