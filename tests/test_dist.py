"""Collectives on the ranks' tensors, against NumPy: what comes out, and which ranks hold it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from cluster import ar, fa, memory, new_runs, placed, ranks_in_threads, ranks_of_its_own, same
from distributed import Client, wait
from numpy.typing import NDArray
from waiting import until

import dask_redist as dr
from dask_redist import dist, lower
from dask_redist.reduceop import as_op, combine

Tensors = list[NDArray[Any]]

#: what each operation is, of two tensors
ORACLES: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "land": np.logical_and,
    "lor": np.logical_or,
}


def tensors(ranks: int, *shape: int, dtype: Any = "i8") -> Tensors:
    """One tensor a rank; no two elements are equal."""
    return list(ar(ranks, *shape, dtype=dtype, start=3))


def joined(parts: Sequence[NDArray[Any]], axis: int = 0) -> da.Array:
    """An array whose chunk r is tensor r; made by whichever rank Dask chooses."""
    sizes = list(parts[0].shape[:axis]), [p.shape[axis] for p in parts], parts[0].shape[axis + 1 :]
    chunks = (*((n,) for n in sizes[0]), tuple(sizes[1]), *((n,) for n in sizes[2]))
    return fa(np.concatenate(parts, axis), chunks)


def total(parts: Sequence[NDArray[Any]], op: str = "sum") -> NDArray[Any]:
    """The tensors combined in the order of the ranks, in their own dtype."""
    if op == "avg":
        return np.asarray(np.mean(np.stack(parts), axis=0))
    if op in ("land", "lor") and len(parts) == 1:
        return parts[0].astype(bool).astype(parts[0].dtype)
    found: NDArray[Any] = np.asarray(reduce(ORACLES[op], parts))
    return found.astype(parts[0].dtype)


def held_on(client: Client, y: da.Array) -> list[list[int]]:
    """The ranks that have each chunk of a persisted array in memory."""
    rank = {address: r for r, address in enumerate(dr.connect(client).addresses)}
    wait(y)
    found = client.who_has(client.futures_of(y))
    keys = [str((y.name, *index)) for index in np.ndindex(*y.numblocks)]
    by_key = {str(key): sorted(rank[a] for a in where) for key, where in found.items()}
    return [by_key[key] for key in keys]


def groups(ranks: int) -> list[dist.Group | None]:
    """All ranks, the last one, the first and the last one, where these are not the same."""
    some = [[ranks - 1]] * (ranks > 1) + [[0, ranks - 1]] * (ranks > 2)
    return [None, *map(dist.new_group, some)]


def members(group: dist.Group | None, ranks: int) -> list[int]:
    return list(range(ranks)) if group is None else list(group.ranks)


@contextmanager
def of_ranks(n: int) -> Iterator[Client]:
    """Ranks of a test's own."""
    with ranks_of_its_own(n) as client:
        dr.connect(client, n)
        yield client


# -------------------------------------------------------------- the examples of torch's manual
@pytest.mark.ranks(2)
def test_a_sum_on_rank_0(client: Client) -> None:
    x = placed(client, np.array([1, 2, 3, 4, 5] * 2), 5)
    y = dist.reduce(x, dst=0, op=dist.ReduceOp.SUM)
    assert y.chunks == ((5,),)
    y = y.persist()
    assert held_on(client, y) == [[0]]
    assert y.compute().tolist() == [2, 4, 6, 8, 10]
    assert x.compute().tolist() == [1, 2, 3, 4, 5] * 2


@pytest.mark.ranks(2, 3)
def test_a_product_on_rank_1(client: Client, ranks: int) -> None:
    x = placed(client, np.array([2, 3, 4] * ranks), 3)
    y = dist.reduce(x, dst=1, op=dist.ReduceOp.PRODUCT).persist()
    assert held_on(client, y) == [[1]]
    assert dr.owners(y).tolist() == [1]
    assert y.compute().tolist() == {2: [4, 9, 16], 3: [8, 27, 64]}[ranks]


@pytest.mark.ranks(2)
def test_a_sum_that_runs_meanwhile(client: Client) -> None:
    x = placed(client, np.array([10, 20, 30] * 2), 3)
    work = dist.reduce(x, dst=0, op=dist.ReduceOp.SUM, async_op=True)
    assert work.wait() is True
    assert work.is_completed()
    assert work.exception() is None
    assert held_on(client, work.result()) == [[0]]
    assert work.result().compute().tolist() == [20, 40, 60]


# ------------------------------------------------------------------ every collective and rank
@pytest.fixture(params=["a run", "gathered"])
def is_run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a reduce is a run whatever its size; else small tensors are gathered."""
    if request.param == "a run":
        monkeypatch.setattr(lower, "SMALL", -1)
    return bool(request.param == "a run")


@pytest.mark.sample
@pytest.mark.wires
@pytest.mark.parametrize("shape", [(5,), (7, 3), (40_009,), (0,), (2, 0)], ids=str)
def test_reduce(client: Client, ranks: int, shape: tuple[int, ...], is_run: bool) -> None:
    parts = tensors(ranks, *shape)
    x = placed(client, np.concatenate(parts), joined(parts).chunks)
    for group in groups(ranks):
        among = members(group, ranks)
        for dst in {among[0], among[-1]}:
            with new_runs(client) as new:
                y = dist.reduce(x, dst, group=group)
                assert y.chunks == tuple((n,) for n in shape)
                y = y.persist()
                assert held_on(client, y) == [[dst]]
                assert len(new()) == is_run
            same(y.compute(), total([parts[r] for r in among]))


@pytest.mark.sample
@pytest.mark.wires
@pytest.mark.parametrize("shape", [(5,), (7, 3), (40_009,), (0,)], ids=str)
def test_all_reduce_reduce_scatter(client: Client, ranks: int, shape: tuple[int, ...]) -> None:
    parts = tensors(ranks, *shape)
    x = placed(client, np.concatenate(parts), joined(parts).chunks)
    for group in groups(ranks):
        among = members(group, ranks)
        want = total([parts[r] for r in among])
        y = dist.all_reduce(x, group=group).persist()
        assert y.chunks == tuple((n,) for n in shape)
        assert held_on(client, y) == [among]
        same(y.compute(), want)
        z = dist.reduce_scatter(x, group=group).persist()
        sizes = [len(slab) for slab in np.array_split(want, len(among))]
        assert z.chunks[0] == (tuple(n for n in sizes if n) or (0,))
        assert held_on(client, z) == [[r] for r in among[: len(z.chunks[0])]]
        same(z.compute(), want)


@pytest.mark.sample
@pytest.mark.wires
@pytest.mark.parametrize("shape", [(5,), (3, 2), (0,)], ids=str)
def test_broadcast_all_gather(client: Client, ranks: int, shape: tuple[int, ...]) -> None:
    parts = tensors(ranks, *shape)
    x = placed(client, np.concatenate(parts), joined(parts).chunks)
    for group in groups(ranks):
        among = members(group, ranks)
        for src in {among[0], among[-1]}:
            y = dist.broadcast(x, src, group).persist()
            assert held_on(client, y) == [among]
            same(y.compute(), parts[src])
        z = dist.all_gather(x, group).persist()
        assert held_on(client, z) == [among]
        same(z.compute(), np.concatenate([parts[r] for r in among]))


@pytest.mark.ranks(3)
def test_copies_are_each_ranks_own(client: Client) -> None:
    """No copy comes from another rank when a task asks for it, and no two share memory."""
    parts = tensors(3, 11)
    y = dist.all_reduce(joined(parts), group=dist.new_group([2, 0])).persist()
    wait(y)
    assert dr.layout_of(y) == dr.Replicated([0, 2])
    assert dr.lshape_map(y).tolist() == [[11], [0], [11]]
    (future,) = client.futures_of(y)

    def spoil(key: Any, dask_worker: Any) -> None:
        dask_worker.data[key][:] = -1

    first, _, last = dr.connect(client).addresses
    client.run(spoil, future.key, workers=[first])
    kept = client.run(
        lambda key, dask_worker: dask_worker.data[key].tolist(), future.key, workers=[last]
    )
    assert kept == {last: total(parts[::2]).tolist()}
    # Rank 1 has none, so the next change is a run like any other.
    z = dist.all_gather(joined(parts), dist.new_group([2, 0])).persist()
    wait(z)
    with new_runs(client) as new:
        same(dr.redistribute(z, dr.Slab.X).compute(), np.concatenate(parts[::2]))
        assert len(new()) == 1


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.usefixtures("is_run")
def test_an_axis(client: Client, ranks: int, axis: int) -> None:
    parts = tensors(ranks, 4, 5, 3)
    x = joined(parts, axis % 3)
    same(dist.reduce(x, axis=axis).compute(), total(parts))
    same(dist.all_reduce(x, axis=axis).compute(), total(parts))
    same(dist.broadcast(x, ranks - 1, axis=axis).compute(), parts[-1])
    same(dist.all_gather(x, axis=axis).compute(), np.concatenate(parts, axis % 3))
    z = dist.reduce_scatter(x, axis=axis)
    assert z.numblocks[axis % 3] == min(ranks, parts[0].shape[axis])
    same(z.compute(), total(parts))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("where", [(2, 0, 1), (1, 1, 1)], ids=str)
@pytest.mark.usefixtures("is_run")
def test_wherever_dask_holds_them(client: Client, where: tuple[int, ...]) -> None:
    """Chunk r is rank r's tensor all the same; floats are added in the order of the ranks."""
    parts = [np.array([1e16] * 9), np.array([-1e16] * 9), np.array([1.0] * 9)]
    x = placed(client, np.concatenate(parts), 9, where)
    assert total(parts)[0] == 1
    assert total(parts[::-1])[0] == total([parts[0], parts[2], parts[1]])[0] == 0
    y = dist.reduce(x, 1).persist()
    assert held_on(client, y) == [[1]]
    same(y.compute(), total(parts))
    same(dist.all_reduce(x).compute(), total(parts))
    same(dist.broadcast(x, 1).compute(), parts[1])


@pytest.mark.ranks(2, 3)
@pytest.mark.usefixtures("is_run")
def test_nothing_is_changed_in_place(client: Client, ranks: int) -> None:
    parts = tensors(ranks, 9000)
    x = placed(client, np.concatenate(parts), 9000)
    for found in (
        dist.reduce(x, op="max"),
        dist.all_reduce(x, "max"),
        dist.reduce_scatter(x, "max"),
        dist.broadcast(x),
        dist.all_gather(x),
    ):
        spoiled = found.map_blocks(_spoiled, dtype=x.dtype).compute()
        assert (spoiled == -1).all()
        same(x.compute(), np.concatenate(parts))


def _spoiled(block: NDArray[Any]) -> NDArray[Any]:
    block[:] = -1
    return block


@pytest.mark.ranks(3)
@pytest.mark.usefixtures("is_run")
def test_in_process_it_is_the_same(client: Client) -> None:
    parts = tensors(3, 5)
    x, group = joined(parts), dist.new_group([1, 2])
    for scheduler in ("sync", "threads"):
        same(dist.reduce(x, 1, group=group).compute(scheduler=scheduler), total(parts[1:]))
        same(dist.all_reduce(x).compute(scheduler=scheduler), total(parts))
        same(dist.reduce_scatter(x).compute(scheduler=scheduler), total(parts))
        same(dist.broadcast(x, 2).compute(scheduler=scheduler), parts[2])
        same(dist.all_gather(x, group).compute(scheduler=scheduler), np.concatenate(parts[1:]))


@pytest.mark.ranks(2, 3, 5)
def test_no_rank_gets_more_than_its_share(
    client: Client, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower, "SMALL", -1)
    parts = tensors(ranks, 30_000)
    whole = parts[0].nbytes * ranks
    x = placed(client, np.concatenate(parts), 30_000)
    addresses = dr.connect(client).addresses

    def received(y: da.Array) -> list[int]:
        before = memory(client)
        wait(y.persist())
        after = memory(client)
        return [after[a]["received"] - before[a]["received"] for a in addresses]

    for y, output in (
        (dist.reduce(x), parts[0].nbytes),
        (dist.all_reduce(x), parts[0].nbytes),
        (dist.reduce_scatter(x), 0),
    ):
        got = received(y)
        assert sum(got) > 0
        assert max(got) <= 2 * whole // ranks + output


# --------------------------------------------------------------------------------- operations
@pytest.mark.ranks(3)
@pytest.mark.parametrize("op", [*ORACLES, "avg"])
def test_operations(client: Client, op: str) -> None:
    parts = list(np.random.default_rng(5).integers(-3, 9, (3, 6)))
    parts = [part.astype("f8") for part in parts] if op == "avg" else parts
    by_name = dist.ReduceOp[op.upper()]
    same(dist.reduce(joined(parts), 2, by_name).compute(), total(parts, op))
    same(dist.all_reduce(joined(parts), op).compute(), total(parts, op))
    same(dist.reduce_scatter(joined(parts), op.upper()).compute(), total(parts, op))


DTYPES = ["?", "i1", "u8", ">i4", "f2", "f4", "f8", ">f8", "g", "c8", "m8[s]", "M8[D]"]


@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [op.value for op in dist.ReduceOp])
def test_operations_keep_the_dtype(op: str, dtype: str, n: int) -> None:
    parts = list(np.random.default_rng(6).integers(0, 4, (n, 5)).astype(dtype))
    if (op, np.dtype(dtype).kind) in REFUSED:
        with pytest.raises(TypeError, match=f"no {op.upper()} of"):
            as_op(op, np.dtype(dtype))
    else:
        found = as_op(op, np.dtype(dtype))
        same(combine(found, parts), total(parts, op).astype(dtype))


BITS = {(op, kind) for op in ("band", "bor", "bxor") for kind in "fcmM"}
REFUSED = BITS | {("avg", kind) for kind in "biuM"} | {("sum", "M")}
REFUSED |= {(op, kind) for op in ("product", "land", "lor") for kind in "mM"}


def test_nan_and_overflow() -> None:
    nan = [np.array([1.0, np.nan]), np.array([np.nan, 2.0])]
    for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        assert np.isnan(combine(op, nan)).all()
    narrow = [np.array([60000], "f2")] * 3
    same(combine(dist.ReduceOp.AVG, narrow), narrow[0])
    same(combine(dist.ReduceOp.SUM, [np.array([100], "i1")] * 2), np.array([-56], "i1"))
    view = np.arange(12.0).reshape(3, 4).T
    out = combine(dist.ReduceOp.SUM, [view])
    assert out.flags.c_contiguous
    assert not np.shares_memory(out, view)


# ------------------------------------------------------------------------------------ refusals
@pytest.mark.ranks(3)
def test_refusals(client: Client) -> None:
    x = fa(ar(6), 2)
    no_group: Any = [0, 2]
    no_array: Any = np.ones(3)
    group = dist.new_group([0, 2])
    with new_runs(client) as new:
        for wrong, error, words in (
            (
                lambda: dist.reduce(fa(ar(6), (2, 1, 3))),
                dr.LayoutError,
                r"\(2,\) on rank 0; \(1,\) on rank 1; \(3,\) on rank 2",
            ),
            (
                lambda: dist.all_gather(fa(ar(5), (2, 1, 2))),
                dr.LayoutError,
                r"\(2,\) on ranks 0, 2; \(1,\) on rank 1",
            ),
            (
                lambda: dist.all_reduce(fa(ar(6), 3)),
                dr.LayoutError,
                "2 chunks along axis 0, but there are 3 ranks",
            ),
            (
                lambda: dist.reduce(fa(ar(8), 2), group=group),
                dr.LayoutError,
                "4 chunks along axis 0, but there are 3 ranks",
            ),
            (lambda: dist.broadcast(fa(ar(3, 4), (1, 2))), dr.LayoutError, "2 chunks along axis 1"),
            (lambda: dist.reduce(x, axis=1), dr.LayoutError, "axis is 1"),
            (lambda: dist.reduce(fa(ar(), ())), dr.LayoutError, "0 dimensions"),
            (lambda: dist.reduce(x, 3), dr.LayoutError, "there is no rank 3; ranks are 0 to 2"),
            (lambda: dist.reduce(x, -1), dr.LayoutError, "there is no rank -1"),
            (
                lambda: dist.reduce(x, 1, group=group),
                dr.LayoutError,
                r"dst is rank 1, which is not in the group \(0, 2\)",
            ),
            (lambda: dist.broadcast(x, 1, group), dr.LayoutError, "src is rank 1, which is not in"),
            (lambda: dist.reduce(x, group=dist.new_group([0, 7])), dr.LayoutError, "no rank 7"),
            (lambda: dist.barrier(dist.new_group([7])), dr.LayoutError, "no rank 7"),
            (lambda: dist.reduce(x, group=no_group), TypeError, "dist.new_group"),
            (lambda: dist.new_group([0, 0]), dr.LayoutError, "each once"),
            (lambda: dist.new_group([]), dr.LayoutError, "at least one"),
            (lambda: dist.reduce(x, op="median"), ValueError, "'median'.*SUM, PRODUCT"),
            (lambda: dist.reduce(x.astype("i8"), op="avg"), TypeError, "no AVG of int64"),
            (lambda: dist.all_reduce(x, "bxor"), TypeError, "no BXOR of float64"),
            (lambda: dist.reduce(fa(ar(3).astype(object), 1)), TypeError, "no plain bytes"),
            (lambda: dist.reduce(no_array), TypeError, "not a dask array"),
            (lambda: dist.reduce(x[x > 1]), dr.LayoutError, "compute_chunk_sizes"),
        ):
            with pytest.raises(error, match=words) as found:
                wrong()
            assert "\n" not in str(found.value)
        assert not new()


@pytest.mark.ranks(3)
def test_tensors_outside_the_group_may_be_of_any_shape(client: Client) -> None:
    x = fa(ar(9), (2, 5, 2))
    same(dist.reduce(x, 2, group=dist.new_group([2, 0])).compute(), np.array([7.0, 9.0]))


# --------------------------------------------------------------------------------- work, barrier
@pytest.mark.ranks(2)
@pytest.mark.erring
@pytest.mark.usefixtures("is_run")
def test_work(client: Client) -> None:
    def slow(block: Any) -> Any:
        time.sleep(0.4)
        return block

    def broken(block: Any) -> Any:
        raise ArithmeticError("no such block")

    x = fa(ar(8), 4)
    begin: Any
    for begin in (dist.reduce, dist.all_reduce, dist.reduce_scatter):
        # Under a name of its own: what another collective has made may still be there.
        tensors = da.map_blocks(slow, x, dtype=x.dtype, token=f"slow-{time.time_ns()}")
        work = begin(tensors, async_op=True)
        assert not work.is_completed()
        with pytest.raises(dr.RunTimeoutError, match=r"not complete after 0\.01 s"):
            work.wait(0.01)
        assert "under way" in repr(work)
        same(work.result().compute(), total(list(ar(2, 4))))
        assert work.is_completed()
    for begin in (dist.broadcast, dist.all_gather):
        work = begin(da.map_blocks(broken, x, dtype=x.dtype), async_op=True)
        assert isinstance(work.exception(), ArithmeticError)
        for end in (work.wait, work.result):
            with pytest.raises(ArithmeticError, match="no such block"):
                end()


def test_barrier(client: Client, ranks: int) -> None:
    dist.barrier()
    dist.barrier(dist.new_group([ranks - 1]))
    # Whatever was exchanged before is done by then.
    work = dist.reduce(joined(tensors(ranks, 40_000)), async_op=True)
    dist.barrier()
    work.wait()
    dist.barrier()


def test_a_barrier_waits_for_the_lanes(tmp_path: Path) -> None:
    go, done = tmp_path / "go", tmp_path / "done"

    def job() -> None:
        until(go.exists)
        done.touch()

    def occupy(dask_worker: Any) -> None:
        dask_worker.plugins["dask_redist"].lane.submit(1, job)

    def give_ticket(dask_scheduler: Any) -> None:
        plugin = dask_scheduler.plugins["dask_redist"]
        plugin.conductor.ticket = 1
        plugin.roster.tell_all({"op": "redist-ticket", "ticket": 1, "number": -1})

    with ranks_in_threads(2) as client:
        client.run(occupy, workers=[dr.connect(client).addresses[1]])
        client.run_on_scheduler(give_ticket)
        dist.barrier(dist.new_group([0]))
        thread = threading.Thread(target=dist.barrier, kwargs={"client": client})
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        assert not done.exists()
        go.touch()
        thread.join(30)
        assert done.exists()


@pytest.mark.everything
def test_a_barrier_names_who_is_missing() -> None:
    with dask.config.set({"redist.timeout": "2s"}), of_ranks(3) as client:
        ranks = dr.connect(client)
        stopped = ranks.seats[1]
        os.kill(stopped.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(dr.RunTimeoutError) as error:
                dist.barrier()
            assert f"rank 1 on {stopped.address} did not reach the barrier" in str(error.value)
            assert "rank 0" not in str(error.value)
            dist.barrier(dist.new_group([0, 2]))
        finally:
            os.kill(stopped.process.pid, signal.SIGCONT)
        dist.barrier()
