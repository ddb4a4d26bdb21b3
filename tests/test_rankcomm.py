"""Communicators: what each rank gets, against NumPy; what does not fit is refused on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cluster import ar, check, fa, memory, ranks_in_threads, same
from distributed import Client
from numpy.typing import NDArray
from test_dist import ORACLES, tensors, total

import dask_redist as dr
from dask_redist import RankComm
from dask_redist.dist import ReduceOp
from dask_redist.joining import Piece, join_along, join_on_grid, whole_shape
from dask_redist.mailbox import RETURNED, Mailbox, ProgramEnded

Code = Callable[..., Any]


def on_ranks(code: Code, client: Client, *args: Any) -> list[Any]:
    """What each rank returns, in a list of one, so that nothing is joined."""
    found = dr.map_ranks(
        lambda nothing, comm, *args: [code(nothing, comm, *args)], None, *args, client=client
    )
    return [value for (value,) in found]


def told_by_all(code: Code, client: Client, *args: Any) -> str:
    """The error that all ranks raise alike, after which they still can talk; in words."""

    def caught(nothing: None, comm: RankComm, *args: Any) -> tuple[str, float]:
        try:
            code(nothing, comm, *args)
        except (dr.RedistError, TypeError, ValueError) as error:
            told = f"{type(error).__name__}: {error}"
        else:
            told = "no error"
        return told, comm.all_reduce(np.ones(3)).sum()

    found = dr.map_ranks(caught, None, *args, client=client)
    assert len(set(found)) == 1, found
    assert found[0][1] == 3 * len(found)
    return str(found[0][0])


# ---------------------------------------------------------------- the examples of the manuals
@pytest.mark.ranks(2)
def test_a_sum_on_rank_0(client: Client) -> None:
    def code(nothing: None, comm: RankComm) -> Any:
        return comm.reduce(np.array([1, 2, 3, 4, 5]), dst=0, op=ReduceOp.SUM)

    found = on_ranks(code, client)
    assert found[0].tolist() == [2, 4, 6, 8, 10]
    assert found[1] is None


@pytest.mark.ranks(2, 3)
def test_a_product_on_rank_1(client: Client, ranks: int) -> None:
    def code(nothing: None, comm: RankComm) -> Any:
        return comm.reduce(tensor=np.array([2, 3, 4]), dst=1, op=ReduceOp.PRODUCT)

    found = on_ranks(code, client)
    assert found[1].tolist() == {2: [4, 9, 16], 3: [8, 27, 64]}[ranks]
    assert [value is None for value in found] == [rank != 1 for rank in range(ranks)]


@pytest.mark.ranks(2)
def test_a_sum_of_whatever_was_computed_meanwhile(client: Client) -> None:
    def code(nothing: None, comm: RankComm) -> Any:
        tensor = np.array([10, 20, 30])
        found = comm.reduce(tensor, dst=0)
        comm.barrier()
        assert tensor.tolist() == [10, 20, 30]
        return found

    assert on_ranks(code, client)[0].tolist() == [20, 40, 60]


@pytest.mark.sample
@pytest.mark.wires
def test_slab_x_to_slab_y(client: Client, ranks: int) -> None:
    """Each rank has planes of x, gets planes of y; a rank checks its own against the index."""
    shape = (16, 24, 10)

    def code(nothing: None, comm: RankComm) -> Any:
        whole = ar(*shape, dtype="c8")
        a = whole[dr.Slab.X.box(comm.rank, shape, comm.size).slices]
        b = comm.redistribute(a, dr.Slab.X, dr.Slab.Y)
        assert b.shape == dr.Slab.Y.shape(comm.rank, shape, comm.size)
        same(b, whole[dr.Slab.Y.box(comm.rank, shape, comm.size).slices])
        return b

    y = dr.map_ranks(code, None, axis=1)
    assert dr.layout_of(y) == (dr.Slab.Y if ranks > 1 else dr.Slab.X)
    check(y, ar(*shape, dtype="c8"))


def test_ten_rows_to_one_three_three_three(client: Client, ranks: int) -> None:
    sizes = [1, 3, 3, 3] if ranks == 4 else [10 - 2 * (ranks - 1), *[2] * (ranks - 1)]
    if ranks == 7:
        sizes = [1, 3, 0, 0, 0, 3, 3]
    x = dr.redistribute(fa(ar(10, 4), 4), dr.Slab.X)

    def code(local: NDArray[Any], comm: RankComm) -> Any:
        return comm.redistribute(local, dr.Slab.X, dr.Uneven(0, sizes))

    y = dr.map_ranks(code, x)
    assert dr.lshape_map(y).tolist() == [[n, 4] for n in sizes]
    z = dr.map_ranks(
        lambda local, comm: comm.redistribute(local, dr.Uneven(0, sizes), dr.Slab.X), y
    )
    assert dr.layout_of(z) == dr.Slab.X
    check(y, ar(10, 4))  # Dask may move chunks while it computes with them
    check(z, ar(10, 4))


# ---------------------------------------------------------------------------------- layouts
def layouts(shape: tuple[int, ...], ranks: int) -> dict[str, dr.Layout]:
    turned = [dr.Slab(-1).box((r + 1) % ranks, shape, ranks) for r in range(ranks)]
    found: dict[str, dr.Layout] = {
        "slab x": dr.Slab.X,
        "slab last": dr.Slab(-1),
        "uneven": dr.Uneven(-1, (*[0] * (ranks - 1), shape[-1])),
        "boxes": dr.Boxes(turned),
        "block": dr.Block((*[1] * (len(shape) - 1), ranks)),
        "everywhere": dr.Replicated(),
        "on the last": dr.Replicated([ranks - 1]),
    }
    if len(shape) > 1:
        found |= {"pencil x": dr.Pencil.X, "pencil last": dr.Pencil(-1)}
    return found


@pytest.mark.wires
@pytest.mark.parametrize("shape", [(7, 5, 6), (2, 3), (4,), (0, 5), (60, 400)], ids=str)
def test_every_layout_to_others(client: Client, ranks: int, shape: tuple[int, ...]) -> None:
    """Each rank checks its box against the index, in memory that was poisoned before."""

    def code(nothing: None, comm: RankComm) -> int:
        whole, named = ar(*shape, dtype="i4"), list(layouts(shape, comm.size).values())
        steps = (0, 1, 2, 4) if comm.size < 4 else (1, 4)
        pairs = [(k, (k + step) % len(named)) for k in range(len(named)) for step in steps]
        for turn, (k, other) in enumerate(pairs):
            source, target = named[k], named[other]
            local = whole[source.box(comm.rank, shape, comm.size).slices]
            box = target.box(comm.rank, shape, comm.size)
            got = comm.redistribute(np.asfortranarray(local), source, target)
            same(got, whole[box.slices])
            assert got.flags.c_contiguous
            assert got.flags.writeable
            # A result of before is written in place by the others, another array by a copy.
            outs = (got, np.empty(box.shape, "i4"), np.empty(box.shape[::-1], "i4").T)
            out = outs[turn % 3]
            out[...] = -1
            again = comm.redistribute(local, source, target, out=out)
            assert again is out
            same(out, whole[box.slices])
        return len(pairs)

    wanted = (4 if ranks < 4 else 2) * len(layouts(shape, 1))
    assert set(on_ranks(code, client)) == {wanted}


@pytest.mark.ranks(2, 3)
@pytest.mark.wires
def test_an_output_that_is_an_input(client: Client) -> None:
    """What others read meanwhile is not written by them."""

    def code(nothing: None, comm: RankComm) -> None:
        shape = (comm.size * 4, comm.size * 4)
        whole = ar(*shape)
        rows = comm.redistribute(whole, dr.Replicated(), dr.Slab.X)
        turned = dr.Boxes(
            [dr.Slab.X.box((r + 1) % comm.size, shape, comm.size) for r in range(comm.size)]
        )
        for _ in range(10):
            rows[...] = whole[dr.Slab.X.box(comm.rank, shape, comm.size).slices]
            comm.redistribute(rows, dr.Slab.X, turned, out=rows)
            same(rows, whole[turned.box(comm.rank, shape, comm.size).slices])

    on_ranks(code, client)


@pytest.mark.ranks(3)
@pytest.mark.wires
@pytest.mark.parametrize(
    "dtype", ["?", "u1", "f2", "<M8[ns]", ">f8", "c16", "S3", "U2", "i4,f8"], ids=str
)
def test_every_dtype(client: Client, dtype: str) -> None:
    kind = np.dtype(dtype)

    def code(nothing: None, comm: RankComm) -> None:
        size = 6 * 5000
        whole = np.frombuffer(np.arange(size * kind.itemsize, dtype="u1").tobytes(), kind)
        if kind.kind == "U":
            whole = np.arange(size).astype(kind)
        whole = whole.reshape(6, 5000)
        at = dr.Slab.X.box(comm.rank, whole.shape, comm.size).slices
        got = comm.redistribute(whole[at], dr.Slab.X, dr.Slab.Y)
        same(got, whole[dr.Slab.Y.box(comm.rank, whole.shape, comm.size).slices])
        for part in (whole[:2], whole[:1, :7]):
            for got in (*comm.all_gather(part), comm.broadcast(part, src=1)):
                same(got, part)

    on_ranks(code, client)


# -------------------------------------------------------------------------------- collectives
@pytest.mark.wires
@pytest.mark.parametrize("shape", [(5,), (), (7, 0), (40_009,), (3, 700)], ids=str)
def test_collectives(client: Client, ranks: int, shape: tuple[int, ...]) -> None:
    parts = tensors(ranks, *shape)

    def code(nothing: None, comm: RankComm) -> Any:
        mine = parts[comm.rank]
        found: list[Any] = [comm.reduce(mine, dst, "sum") for dst in {0, comm.size - 1}]
        found.append(comm.all_reduce(mine, ReduceOp.MAX))
        found.append(comm.broadcast(mine, src=comm.size - 1))
        found.append(comm.broadcast(mine if comm.rank == 0 else None))
        found.append(comm.all_gather(mine))
        same(mine, parts[comm.rank])
        for new in (*found[:-1], *found[-1]):
            assert new is None or (type(new) is np.ndarray and not np.shares_memory(new, mine))
        return found

    for rank, (*reduced, most, last, first, gathered) in enumerate(on_ranks(code, client)):
        for dst, value in zip({0, ranks - 1}, reduced, strict=True):
            if rank == dst:
                same(value, total(parts))
            else:
                assert value is None
        same(most, total(parts, "max"))
        same(last, parts[-1])
        same(first, parts[0])
        for got, want in zip(gathered, parts, strict=True):
            same(got, want)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("op", [op.value for op in ReduceOp])
def test_every_operation_in_the_order_of_the_ranks(client: Client, ranks: int, op: str) -> None:
    rng = np.random.default_rng(5)
    for size in (3, 5000):
        if op in ORACLES and op not in ("sum", "product"):
            parts = [rng.integers(0, 3, size).astype("i2") for _ in range(ranks)]
        else:
            parts = [rng.standard_normal(size).astype("f4") for _ in range(ranks)]
        code = lambda nothing, comm, own: comm.all_reduce(own[comm.rank], op)  # noqa: E731
        found = on_ranks(code, client, parts)
        for value in found:
            same(value, total(parts, op))


@pytest.mark.ranks(2, 3)
def test_what_was_laid_out_may_change_soon(client: Client) -> None:
    """A tensor that lies in the arena is read where it is, and only until the call returns."""

    def code(nothing: None, comm: RankComm) -> None:
        shape = (comm.size, 5000)
        mine = comm.redistribute(ar(*shape), dr.Replicated(), dr.Slab.X)
        for turn in range(20):
            mine[...] = comm.rank + turn
            got = comm.all_reduce(mine)
            mine[...] = comm.rank + turn
            want = comm.size * (comm.size - 1) / 2 + turn * comm.size
            assert (got == want).all(), (turn, np.unique(got))
            (first, *_) = comm.all_gather(mine)
            mine[...] = -1
            assert (first == turn).all()
            last = comm.broadcast(mine + turn, src=comm.size - 1)
            assert (last == turn - 1).all()

    on_ranks(code, client)


@pytest.mark.ranks(5, 2)
@pytest.mark.wires
@pytest.mark.parametrize("name", ["reduce", "all_reduce", "broadcast"])
def test_no_rank_receives_much_more_than_twice_a_tensor(
    client: Client, ranks: int, name: str
) -> None:
    before = memory(client)
    on_ranks(lambda nothing, comm: getattr(comm, name)(np.ones(200_000)).size, client) if (
        name != "reduce"
    ) else on_ranks(lambda nothing, comm: comm.reduce(np.ones(200_000)), client)
    after = memory(client)
    received = [after[a]["received"] - before[a]["received"] for a in after]
    assert max(received) <= 2 * 200_000 * 8
    assert max(received) >= 200_000 * 8 * (ranks - 1) // ranks


# -------------------------------------------------------------------------------- what is refused
@pytest.mark.ranks(2, 3)
def test_calls_that_differ(client: Client) -> None:
    def op(nothing: None, comm: RankComm) -> None:
        if comm.rank == 0:
            comm.reduce(np.ones(3))
        else:
            comm.barrier()

    told = told_by_all(op, client)
    assert "reduce(dst=0, op=SUM) on rank 0; barrier() on rank" in told

    def dst(nothing: None, comm: RankComm) -> None:
        comm.reduce(np.ones(3), dst=min(comm.rank, 1))

    told = told_by_all(dst, client)
    assert "reduce(dst=0, op=SUM) on rank 0; reduce(dst=1, op=SUM) on rank" in told

    def layout(nothing: None, comm: RankComm) -> None:
        layouts = dr.Slab.X, dr.Slab.Y
        comm.redistribute(np.ones((2, 2)), dr.Slab.X, layouts[min(comm.rank, 1)])

    assert "out_layout=Slab.X) on rank 0; redistribute(" in told_by_all(layout, client)


@pytest.mark.ranks(2, 3)
def test_a_rank_that_has_returned(client: Client) -> None:
    def code(nothing: None, comm: RankComm) -> None:
        if comm.rank != 1:
            comm.barrier()

    def some(nothing: None, comm: RankComm) -> None:
        tensors = {0: np.ones(2), 1: None, 2: np.ones(3)}
        comm.broadcast(tensors[comm.rank])

    if dr.connect(client).size == 3:
        assert "(2,) on rank 0; (3,) on rank 2" in told_by_all(some, client)
    with pytest.raises(
        dr.RedistError, match=r"barrier\(\) on rank.* 0.*; the end of the function on rank 1"
    ):
        on_ranks(code, client)

    def stubborn(nothing: None, comm: RankComm) -> None:
        for _ in range(3 if comm.rank != 1 else 0):
            with pytest.raises(dr.RedistError):
                comm.barrier()

    on_ranks(stubborn, client)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("call", ["reduce", "all_reduce", "broadcast", "all_gather"])
@pytest.mark.parametrize("size", [3, 3000])
def test_tensors_that_differ(client: Client, ranks: int, call: str, size: int) -> None:
    def shape(nothing: None, comm: RankComm) -> None:
        getattr(comm, call)(np.ones(size + (comm.rank == 1)))

    others = "on rank 0" if ranks == 2 else "on ranks 0, 2"
    told = told_by_all(shape, client)
    assert f"LayoutError: the tensors must all have one shape, but there is ({size},) {others}; "
    assert f"({size + 1},) on rank 1" in told

    def dtype(nothing: None, comm: RankComm) -> None:
        getattr(comm, call)(np.ones(size, "f4" if comm.rank == 1 else "f8"))

    told = told_by_all(dtype, client)
    assert told.startswith("TypeError: the arrays of all ranks must have one dtype")
    assert f"float64 {others}; float32 on rank 1" in told

    def objects(nothing: None, comm: RankComm) -> None:
        getattr(comm, call)(np.full(size, None) if comm.rank == 1 else np.ones(size))

    if call != "broadcast":
        assert told_by_all(objects, client).startswith("TypeError: rank 1: ")


@pytest.mark.ranks(2)
def test_arguments_that_are_none(client: Client) -> None:
    def refused(call: Callable[[RankComm], Any]) -> str:
        return told_by_all(lambda nothing, comm: call(comm), client)

    assert "LayoutError: rank 0: there is no rank 5" in refused(lambda c: c.reduce(np.ones(2), 5))
    assert "no rank -1" in refused(lambda c: c.broadcast(np.ones(2), -1))
    assert "ValueError: rank 0: op is 'median'" in refused(
        lambda c: c.all_reduce(np.ones(2), "median")
    )
    assert "no BAND of float64" in refused(lambda c: c.reduce(np.ones(2), op="band"))
    assert "no AVG of int64" in refused(
        lambda c: c.reduce(np.ones(2, "i8" if c.rank else "f8"), op="avg")
    )
    assert "rank src has to give" in refused(lambda c: c.broadcast(None))
    assert "dst must be an integer" in refused(lambda c: c.reduce(np.ones(2), dst="one"))  # type: ignore[arg-type]
    one: Any = np.ones((2, 2))
    assert "'X' is no layout" in refused(lambda c: c.redistribute(one, "X", dr.Slab.X))  # type: ignore[arg-type]
    assert "several boxes" in refused(
        lambda c: c.redistribute(one, dr.BlockCyclic((2, 1), (1, 1)), dr.Slab.X)
    )
    assert "several boxes" in refused(
        lambda c: c.redistribute(one, dr.Slab.X, dr.BlockCyclic((2, 1), (1, 1)))
    )
    assert "axis 4 is out of range" in refused(lambda c: c.redistribute(one, dr.Slab.X, dr.Slab(4)))
    assert "no plain bytes" in refused(
        lambda c: c.redistribute(np.full((2, 2), None), dr.Slab.X, dr.Slab.Y)
    )


@pytest.mark.ranks(2)
def test_local_arrays_that_are_not_those_of_the_layout(client: Client) -> None:
    def move(shape: Any, dtype: Any = "f8", out: Any = None) -> str:
        def code(nothing: None, comm: RankComm) -> None:
            local = np.ones(shape[comm.rank], dtype[comm.rank] if dtype != "f8" else dtype)
            to = out[comm.rank] if out else None
            comm.redistribute(local, dr.Slab.X, dr.Slab.Y, out=to)

        return told_by_all(code, client)

    assert "no error" in move([(3, 4), (2, 4)])
    told = move([(2, 4), (3, 4)])
    assert told.startswith("LayoutError: Slab.X of an array of shape (5, 4) gives rank 0 (3, 4), ")
    assert "(2, 4) on rank 0; (3, 4) on rank 1" in told
    assert "local shapes are (2, 4) on rank 0; (2, 5) on rank 1" in move([(2, 4), (2, 5)])
    assert "axes" in move([(2, 4), (2,)])
    assert "float32 on rank 0; float64 on rank 1" in move([(2, 4), (2, 4)], ["f4", "f8"])
    outs = [np.ones((4, 2)), np.ones((2, 2))]
    assert "LayoutError: rank 1: out must be an array of shape (4, 2)" in move(
        [(2, 4), (2, 4)], out=outs
    )
    outs = [np.ones((4, 2)), np.ones((4, 2), "f4")]
    assert "rank 1: out must be" in move([(2, 4), (2, 4)], out=outs)


@pytest.mark.ranks(2)
def test_an_output_that_is_read_only(client: Client) -> None:
    def code(nothing: None, comm: RankComm) -> None:
        out = np.ones((4, 2))
        out.flags.writeable = comm.rank == 0
        comm.redistribute(np.ones((2, 4)), dr.Slab.X, dr.Slab.Y, out=out)

    assert told_by_all(code, client) == "LayoutError: rank 1: out is read-only"


@pytest.mark.ranks(2)
def test_too_little_memory_on_one_rank(client: Client) -> None:
    huge = 1 << 50

    def moves(nothing: None, comm: RankComm) -> None:
        # Without an element of its own, rank 1 would get them all.
        local = np.broadcast_to(np.int8(1), (huge if comm.rank == 0 else 0,))
        comm.redistribute(local, dr.Uneven(0, (huge, 0)), dr.Uneven(0, (0, huge)))

    assert told_by_all(moves, client).startswith("AdmissionError: rank 1: needs")

    def lays(nothing: None, comm: RankComm) -> None:
        comm.all_reduce(np.broadcast_to(np.int8(1), (huge,)))

    assert told_by_all(lays, client).startswith("AdmissionError: rank 0: needs")


@pytest.mark.ranks(2)
def test_a_communicator_that_is_used_elsewhere(client: Client) -> None:
    kept: list[str] = []

    def in_a_thread(nothing: None, comm: RankComm) -> str:
        told = []

        def run() -> None:
            try:
                comm.barrier()
            except dr.RedistError as error:
                told.append(str(error))

        thread = threading.Thread(target=run, name="mine")
        thread.start()
        thread.join()
        return f"{comm!r} {told[0]}"

    for rank, text in enumerate(on_ranks(in_a_thread, client)):
        assert text.startswith(f"<RankComm: rank {rank} of 2> <RankComm")
        assert "another thread than that of its function, 'mine'" in text
    assert not kept

    with ranks_in_threads(1) as local:
        comms: list[RankComm] = []

        class Keep:
            def __reduce__(self) -> Any:
                return _kept_by, (id(comms),)

        _KEPT[id(comms)] = comms
        dr.map_ranks(lambda nothing, comm, keep: keep.append(comm), None, Keep(), client=local)
        (comm,) = comms
        for use in (comm.barrier, lambda: comm.mpi, lambda: comm.all_reduce(1)):
            with pytest.raises(dr.RedistError, match="after its function has returned"):
                use()


_KEPT: dict[int, list[RankComm]] = {}


def _kept_by(number: int) -> list[RankComm]:
    return _KEPT[number]


# ------------------------------------------------------------------------------ the parts below
def test_mailbox() -> None:
    box = Mailbox(3)
    box.put(2, 0, b"early")
    box.put(1, 0, b"a")
    box.put(1, 0, b"once more")
    assert box.wait(1, 0) == [1, 2]
    box.put(1, 1, b"b")
    box.put(1, 2, RETURNED)
    assert box.wait(1, 0) == []
    assert box.take(1) == [b"a", b"b", RETURNED]
    assert box.wait(2, 0) == [1]  # rank 2 says no more
    box.put(2, 1, b"c")
    assert box.take(2) == [b"early", b"c", RETURNED]
    overtaken = Mailbox(2)
    overtaken.put(2, 1, RETURNED)  # before its letter of step 1
    assert overtaken.wait(1, 0) == [0, 1]
    overtaken.put(1, 1, b"d")
    assert overtaken.wait(1, 0) == [0]
    waiting = threading.Timer(0.05, box.end, ["the reason"])
    waiting.start()
    with pytest.raises(ProgramEnded, match="the reason"):
        box.wait(3, 20)
    box.end("another")
    with pytest.raises(ProgramEnded, match="the reason"):
        box.wait(4, 0)


F8 = np.dtype("f8")


def test_joining() -> None:
    with pytest.raises(dr.LayoutError, match=r"an array on ranks 0, 2; None on rank 1"):
        join_along([Piece((2,), F8), "None", Piece((2,), F8)], 0)
    with pytest.raises(dr.LayoutError, match="axis is 1"):
        join_along([Piece((2,), F8)], 1)
    assert join_along([Piece((2, 0), F8)] * 2, 1).chunks == ((2,), (0,))
    assert join_along([Piece((2, 0), F8)] * 2, 1).ranks.tolist() == [[0]]
    grid = np.array([[0, 1], [2, 3]])
    boxes = [Piece(shape, F8) for shape in [(2, 3), (2, 1), (5, 3), (5, 1)]]
    assert join_on_grid(boxes, grid).chunks == ((2, 5), (3, 1))
    assert join_on_grid([*boxes, Piece((0, 7), F8)], grid).chunks == ((2, 5), (3, 1))
    for wrong in (
        [*boxes[:3], Piece((5, 2), F8)],
        [*boxes, Piece((1, 1), F8)],
        [Piece(shape, F8) for shape in [(0, 3), (0, 1), (5, 3), (5, 1)]],
        [Piece((3,), F8)] * 4,
    ):
        with pytest.raises(dr.LayoutError, match="grid of 2 x 2"):
            join_on_grid(wrong, grid)


@pytest.mark.parametrize("ranks", range(1, 8))
@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 4), (0, 3), (1, 1)])
def test_the_whole_of_local_shapes(shape: tuple[int, ...], ranks: int) -> None:
    for layout in layouts(shape, ranks).values():
        local = [layout.shape(rank, shape, ranks) for rank in range(ranks)]
        assert whole_shape(layout, local) == shape
        longer = [*local[:-1], (*local[-1][:-1], local[-1][-1] + 1)]
        try:  # it may be that of another array
            found = whole_shape(layout, longer)
        except dr.LayoutError:
            continue
        assert layout.lshape_map(found, ranks).tolist() == [list(each) for each in longer]
