"""`Redistribute` on ranks: every element where its index says, errors the same on all ranks."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
from cluster import ar, memory, same
from distributed import Client
from numpy.typing import NDArray
from test_rankcomm import layouts, on_ranks, told_by_all

import dask_redist as dr
from dask_redist import RankComm

CANARY = 0xA5


def guarded(shape: tuple[int, ...], dtype: Any, order: Any = "C") -> tuple[Any, Any]:
    """A poisoned array for results, and the bytes around it, which nobody may touch."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    around = np.full(size + 128, CANARY, "u1")
    return around[64 : 64 + size].view(kind).reshape(shape, order=order), around


def intact(around: NDArray[Any]) -> bool:
    return bool((around[:64] == CANARY).all() and (around[-64:] == CANARY).all())


def variants(local: NDArray[Any]) -> list[NDArray[Any]]:
    """The same elements in other memory: F order, reversed strides, every other element."""
    wide = np.repeat(local, 2, axis=-1)[..., ::2]
    return [local, np.asfortranarray(local), local[::-1].copy()[::-1], wide]


@pytest.mark.sample
@pytest.mark.wires
@pytest.mark.parametrize("shape", [(7, 5, 6), (2, 3), (3,), (0, 5), (5, 0, 2)], ids=str)
def test_one_plan_many_operands(client: Client, ranks: int, shape: tuple[int, ...]) -> None:
    """Uneven and empty boxes, more ranks than elements, any strides; poisoned outputs."""

    def code(nothing: None, comm: RankComm) -> int:
        named, count = list(layouts(shape, comm.size).values()), 0
        pairs = [(k, (k + 1 + k % 2) % len(named)) for k in range(len(named))]
        for k, other in pairs if comm.size < 4 else pairs[::2]:
            source, target = named[k], named[other]
            whole = ar(*shape, dtype="i4")
            at, to = (each.box(comm.rank, shape, comm.size).slices for each in (source, target))
            with dr.Redistribute(whole[at], source, target, comm) as change:
                change.plan()
                for turn, local in enumerate(variants(whole[at])):
                    change.reset_operand(local + 1000 * turn if turn % 2 else local)
                    want = whole[to] + (1000 * turn if turn % 2 else 0)
                    same(change.execute(), want.astype("i4"))
                    out, around = guarded(want.shape, "i4", "CF"[turn % 2])
                    assert change.execute(out=out) is out
                    same(out, want.astype("i4"))
                    assert intact(around)
                    count += 1
        return count

    assert min(on_ranks(code, client)) >= 4


@pytest.mark.ranks(1, 3)
@pytest.mark.wires
@pytest.mark.parametrize(
    "dtype", ["?", "i1", "f2", ">i4", "<f8", "c8", "c16", "S3", "<M8[s]", "i4,>f8"], ids=str
)
def test_elements_of_every_size(client: Client, dtype: str) -> None:
    def code(nothing: None, comm: RankComm) -> None:
        kind, shape = np.dtype(dtype), (7, 50)
        count = 350 * kind.itemsize
        whole = (np.arange(count) % 251 if kind != "?" else np.arange(count) % 2).astype("u1")
        whole = whole.view(kind).reshape(shape)
        local = whole[dr.Slab.X.box(comm.rank, shape, comm.size).slices]
        box = dr.Slab.Y.box(comm.rank, shape, comm.size)
        with dr.Redistribute(local, dr.Slab.X, dr.Slab.Y, comm) as change:
            change.plan()
            out, around = guarded(box.shape, kind)
            same(change.execute(out=out), whole[box.slices])
            assert intact(around)
            same(change.execute(), whole[box.slices])

    on_ranks(code, client)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("ndim", [1, 2, 3, 4, 5])
def test_any_number_of_axes(client: Client, ndim: int) -> None:
    def code(nothing: None, comm: RankComm) -> None:
        shape = (3, 5, 2, 3, 4)[:ndim]
        whole = ar(*shape)
        at = dr.Slab(0).box(comm.rank, shape, comm.size).slices
        target = dr.Slab(-1)
        got = comm.redistribute(whole[at], dr.Slab(0), target)
        same(got, whole[target.box(comm.rank, shape, comm.size).slices])

    on_ranks(code, client)


@pytest.mark.ranks(2, 3)
@pytest.mark.wires
def test_broadcast_and_read_only_operands(client: Client) -> None:
    def code(nothing: None, comm: RankComm) -> None:
        shape = (6, 40)
        row = ar(40)
        local = np.broadcast_to(row, dr.Slab.X.shape(comm.rank, shape, comm.size))
        assert not local.flags.writeable
        got = comm.redistribute(local, dr.Slab.X, dr.Slab.Y)
        box = dr.Slab.Y.box(comm.rank, shape, comm.size)
        same(got, np.broadcast_to(row, shape)[box.slices])

    on_ranks(code, client)


@pytest.mark.ranks(2, 3)
def test_a_result_is_written_in_place_and_needs_no_workspace(client: Client) -> None:
    """Execute after execute into one output: the arena holds that, and nothing is allocated."""

    def code(nothing: None, comm: RankComm) -> None:
        shape = (60, 4000)
        rows = ar(*shape)[dr.Slab.X.box(comm.rank, shape, comm.size).slices]
        arena = comm._program.means.arena
        before = arena.in_use
        with dr.Redistribute(rows, dr.Slab.X, dr.Slab.Y, comm) as change:
            change.plan()
            assert arena.in_use == before  # a plan holds no memory
            out = change.execute()
            held = arena.in_use
            assert out.nbytes <= held - before <= out.nbytes + 8192
            comm._program.allocate = None  # type: ignore[assignment,method-assign]
            try:
                for turn in range(3):
                    out[...] = -1
                    change.reset_operand(rows + turn)
                    assert change.execute(out=out) is out
                    same(
                        out, (ar(*shape) + turn)[dr.Slab.Y.box(comm.rank, shape, comm.size).slices]
                    )
                    assert arena.in_use == held
            finally:
                del comm._program.allocate

    on_ranks(code, client)


@pytest.mark.ranks(2, 3)
def test_a_plan_is_one_step_and_an_execute_two(client: Client) -> None:
    """And no letter grows with the number of boxes that a layout lists."""

    def code(nothing: None, comm: RankComm) -> None:
        letters: list[int] = []
        exchange = comm._program.exchange

        def counted(letter: bytes) -> list[bytes]:
            letters.append(len(letter))
            return exchange(letter)

        comm._program.exchange = counted  # type: ignore[method-assign]
        shape = (comm.size * 2, comm.size)
        boxes = dr.Boxes([dr.Slab.X.box(r, shape, comm.size) for r in range(comm.size)])
        with dr.Redistribute(np.ones((2, comm.size)), boxes, dr.Slab.Y, comm) as change:
            change.plan()
            assert len(letters) == 1
            change.execute()
            assert len(letters) == 3
        wide = dr.Boxes([dr.Box((r, 0), (r + 1, 1)) for r in range(500)])
        with pytest.raises(dr.LayoutError, match="500"):
            comm.redistribute(np.ones((1, 1)), wide, dr.Slab.Y)
        assert max(letters) < 1000
        del comm._program.exchange

    on_ranks(code, client)


# ------------------------------------------------------------------------------ other libraries
class Foreign:
    """An array of another library: what it has is the DLPack protocol."""

    def __init__(self, array: NDArray[Any], device: tuple[int, int] = (1, 0)) -> None:
        self.array, self.device = array, device

    def __dlpack__(self, **kwargs: Any) -> Any:
        if self.device[0] != 1:
            raise BufferError("not in the CPU's memory")
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


@pytest.mark.ranks(1, 2, 3)
def test_operands_by_dlpack_come_back_as_their_kind(client: Client) -> None:
    def code(nothing: None, comm: RankComm) -> None:
        shape = (6, 8)
        whole = ar(*shape, dtype="f4")
        rows = whole[dr.Slab.X.box(comm.rank, shape, comm.size).slices].copy()
        want = whole[dr.Slab.Y.box(comm.rank, shape, comm.size).slices]
        plain: Any = Foreign(rows)
        same(comm.redistribute(plain, dr.Slab.X, dr.Slab.Y), want)  # no way back: NumPy's

        library: Any = types.ModuleType("foreign_library")
        library.from_dlpack = lambda array: Own(np.from_dlpack(array))
        sys.modules["foreign_library"] = library
        try:

            class Own(Foreign):
                __module__ = "foreign_library.tensors"

            with dr.Redistribute(Own(rows), dr.Slab.X, dr.Slab.Y, comm) as change:  # type: ignore[arg-type]
                change.plan()
                got = change.execute()
                assert type(got) is Own
                same(got.array, want)
                rows += 1  # the operand is read where it is
                same(change.execute().array, want + 1)
                to = Own(np.full(want.shape, -1, "f4"))
                assert change.execute(out=to) is to
                same(to.array, want + 1)
                del got, to
        finally:
            del sys.modules["foreign_library"]

    on_ranks(code, client)


@pytest.mark.ranks(2)
def test_memory_that_numpy_cannot_see(client: Client) -> None:
    def code(nothing: None, comm: RankComm) -> None:
        local: Any = np.ones((1, 2))
        if comm.rank == 1:
            local = Foreign(local, (2, 0))
        comm.redistribute(local, dr.Slab.X, dr.Slab.Y)

    told = told_by_all(code, client)
    assert told.startswith("TypeError: rank 1: a Foreign on DLPack device (2, 0) cannot be seen")


# --------------------------------------------------------------------------------- what is refused
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("who", ["all", "last"])
def test_what_is_wrong_on_one_rank_all_are_told(client: Client, ranks: int, who: str) -> None:
    last = ranks - 1

    def told(what: str, who: str = who) -> str:
        def code(nothing: None, comm: RankComm) -> None:
            rows = np.ones((2, 3))
            here = who == "all" or comm.rank == last
            change = dr.Redistribute(rows, dr.Slab.X, dr.Slab.Y, comm)
            if what == "not planned":
                change.execute()
            if what == "not planned, reset":
                change.reset_operand(rows)
            change.plan()
            if what == "shape":
                change.reset_operand(np.ones((2, 4)) if here else rows)
            if what == "dtype":
                change.reset_operand(np.ones((2, 3), "f4") if here else rows)
            if what == "stream":
                change.execute(stream=7 if here else None)  # type: ignore[arg-type]
            if what == "out":
                change.execute(out=[1] if here else None)
            if what.startswith("freed"):
                if here:
                    change.free()
                    change.free()
                call = what.split()[1]
                getattr(change, call)(*[rows] * (call == "reset_operand"))

        return told_by_all(code, client)

    first = 0 if who == "all" else last
    mine = dr.Slab.Y.shape(first, (2 * ranks, 3), ranks)
    assert told("not planned", "all") == (
        "RedistError: rank 0: execute() before plan(): call plan() first"
    )
    assert "reset_operand() before plan()" in told("not planned, reset")
    assert told("shape") == (
        f"LayoutError: rank {first}: the operand has shape (2, 4), but the plan is for (2, 3)"
    )
    assert told("dtype") == (
        f"TypeError: rank {first}: the operand has dtype float32, but the plan is for float64"
    )
    assert told("stream").startswith(f"TypeError: rank {first}: stream is 7")
    assert told("out") == (
        f"LayoutError: rank {first}: out must be an array of shape {mine} and dtype float64, "
        "not list"
    )
    for call in ("plan", "execute", "reset_operand"):
        assert told(f"freed {call}") == (
            f"RedistError: rank {first}: {call}() after free(): make a new Redistribute"
        )


@pytest.mark.ranks(2, 3)
def test_after_an_error_the_plan_still_holds(client: Client) -> None:
    def code(nothing: None, comm: RankComm) -> None:
        shape = (2 * comm.size, 3)
        whole = ar(*shape)
        want = whole[dr.Slab.Y.box(comm.rank, shape, comm.size).slices]
        rows = whole[2 * comm.rank : 2 * comm.rank + 2]
        with dr.Redistribute(rows, dr.Slab.X, dr.Slab.Y, comm) as change:
            change.plan()
            with pytest.raises(dr.LayoutError, match="rank 1: the operand"):
                change.reset_operand(rows if comm.rank != 1 else rows[:1])
            same(change.execute(), want)
            with pytest.raises(dr.LayoutError, match="rank 0: out"):
                change.execute(out=np.ones(1) if comm.rank == 0 else None)
            same(change.execute(), want)
        assert "freed" in repr(change)

    on_ranks(code, client)


@pytest.mark.ranks(2, 3)
def test_plans_that_are_mixed_up(client: Client) -> None:
    def code(nothing: None, comm: RankComm) -> None:
        rows = np.ones((1, 2))
        changes = [dr.Redistribute(rows, dr.Slab.X, dr.Slab.Y, comm) for _ in range(2)]
        for change in changes:
            change.plan()
        changes[min(comm.rank, 1)].execute()

    told = told_by_all(code, client)
    assert "execute(plan=1) on rank 0; execute(plan=2) on rank" in told

    def alike(nothing: None, comm: RankComm) -> None:
        sizes = [1] * 40
        sizes[20 + min(comm.rank, 1)] = 2
        comm.redistribute(np.ones((1, 2)), dr.Uneven(0, sizes), dr.Slab.Y)

    told = told_by_all(alike, client)
    assert told.startswith("RedistError: all ranks must call the same")
    assert "on rank 0; " in told


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("error", [OSError("the wire is cut"), dr.RedistError("the wire is cut")])
def test_a_write_that_fails_is_told_by_all(client: Client, error: Exception) -> None:
    """And whatever was open to the others is closed: the next change is right."""

    def code(nothing: None, comm: RankComm) -> None:
        def fail(pieces: Any) -> None:
            raise type(error)(*error.args)  # a new one: it holds the frames that it passed

        if comm.rank == 1:
            comm._program.write = fail  # type: ignore[method-assign]
        try:
            comm.redistribute(np.ones((1, 2)), dr.Slab.X, dr.Slab.Y)
        finally:
            if comm.rank == 1:
                del comm._program.write
            assert not comm._program.landing._arrays

    told = told_by_all(code, client)
    assert told.startswith("RedistError: rank 1: ")
    assert "the wire is cut" in told
    assert all(held["condemned"] == 0 for held in memory(client).values())


@pytest.mark.ranks(2, 3)
def test_boxes_with_a_hole_or_an_overlap(client: Client, ranks: int) -> None:
    def move(boxes: dr.Boxes) -> str:
        def code(nothing: None, comm: RankComm) -> None:
            comm.redistribute(ar(2), dr.Slab.X, boxes)

        return told_by_all(code, client)

    spread = [dr.Box((2 * r,), (2 * r + 2,)) for r in range(ranks)]
    assert move(dr.Boxes(spread)) == "no error"
    assert "LayoutError" in move(dr.Boxes([*spread[:-1], dr.Box((0,), (2,))]))
    assert "LayoutError" in move(dr.Boxes([*spread[:-1], dr.Box((2 * ranks - 1,), (2 * ranks,))]))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("axis", "message"),
    [
        (5, "axis is 5, but the ranks' arrays have 2 axes"),
        (-3, "axis is -3, but the ranks' arrays have 2 axes"),
        ("rows", "axis must be an integer, not 'rows'"),
        (1.5, "axis must be an integer, not 1.5"),
        (True, "axis must be an integer, not True"),
    ],
)
def test_an_axis_that_is_none_of_the_arrays(client: Client, axis: Any, message: str) -> None:
    with pytest.raises(dr.LayoutError, match=message):
        dr.map_ranks(lambda nothing, comm: np.ones((2, 2)), None, axis=axis, client=client)
