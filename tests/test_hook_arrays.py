"""What the hook does to arrays: right values whichever way they are computed, and what has run.

The values are NumPy's; a run that should have been is looked for in the reports, and where there
should be none, none may be there.
"""

import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dask.array as da
import dask.base
import numpy as np
import pytest
from cluster import ar, auto_as_if_large, check, fa, facts, leftovers, new_runs, placed, same
from dask._task_spec import Alias
from dask.delayed import delayed
from distributed import Client, wait
from numpy.typing import NDArray
from waiting import nothing_held, until

import dask_redist as dr
from dask_redist import relayout, worth
from dask_redist.layer import RedistributeLayer
from dask_redist.tasks import FenceTask, contribute, take

A = ar(12, 10)


def rows() -> da.Array:
    """Four slabs of rows, under a name of their own: nothing is left of them from before."""
    x: da.Array = da.from_array(A, chunks=(3, 10), name=False)
    return x


def of(x: da.Array, function: Any, **declared: Any) -> da.Array:
    """The function of each block; float64 unless something else is declared."""
    given = {"dtype": "f8", "meta": np.empty((0, 0)), **declared}
    y: da.Array = da.map_blocks(function, x, **given)
    return y


def columns() -> da.Array:
    """The slabs become five slabs of columns: one collective, lazy."""
    with dr.enable(policy="always"):
        y: da.Array = rows().rechunk((12, 2))
    return y


def layer_of(y: da.Array) -> RedistributeLayer:
    layer = y.dask.layers[y.name]
    assert isinstance(layer, RedistributeLayer), y.name
    return layer


def is_lazy_change(y: da.Array) -> bool:
    return isinstance(y.dask.layers[y.name], RedistributeLayer)


def tasks_of(y: da.Array) -> dict[str, int]:
    """How many contributions, fences and takes are left of an array's graph after culling."""
    (culled,) = dask.base.optimize(y)
    nodes = dict(culled.dask).values()
    return {
        "contribute": sum(getattr(node, "func", None) is contribute for node in nodes),
        "fence": sum(isinstance(node, FenceTask) for node in nodes),
        "take": sum(getattr(node, "func", None) is take for node in nodes),
    }


# --------------------------------------------------------------- what is built on rechunk
Operation = tuple[Callable[[da.Array], Any], Callable[[NDArray[Any]], Any]]
OPERATIONS: dict[str, Operation] = {
    "rechunk": (lambda x: x.rechunk((12, 2)), lambda a: a),
    "da.rechunk": (lambda x: da.rechunk(x, {0: -1, 1: "auto"}, block_size_limit=400), lambda a: a),
    "balance": (lambda x: x.rechunk((5, 4), balance=True), lambda a: a),
    "reshape": (lambda x: x.T.reshape(10, 3, 4), lambda a: a.T.reshape(10, 3, 4)),
    "ravel": (lambda x: (x + 1).rechunk((12, 2)).ravel(), lambda a: (a + 1).ravel()),
    "median": (lambda x: da.median(x, axis=0), lambda a: np.median(a, axis=0)),
    "np.median": (lambda x: np.median(x, axis=0), lambda a: np.median(a, axis=0)),
    "quantile": (lambda x: da.quantile(x, 0.3, axis=0), lambda a: np.quantile(a, 0.3, axis=0)),
    "x + x.T": (lambda x: x[:10] + x[:10].T, lambda a: a[:10] + a[:10].T),
    "where": (lambda x: da.where(x > 50, fa(A, (5, 3)), x), lambda a: a),
    "stack": (lambda x: da.stack([x, fa(A, (12, 2))]), lambda a: np.stack([a, a])),
    "concatenate": (
        lambda x: np.concatenate([x, fa(A, (12, 3))], axis=1),
        lambda a: np.concatenate([a, a], axis=1),
    ),
    "apply_gufunc": (
        lambda x: da.apply_gufunc(
            lambda b: b.sum(-1), "(i)->()", x.T, allow_rechunk=True, output_dtypes="f8"
        ),
        lambda a: a.sum(0),
    ),
    "diff": (lambda x: da.diff(x, axis=0), lambda a: np.diff(a, axis=0)),
    "unique": (lambda x: da.unique(x.rechunk((4, 5)) % 7), lambda a: np.unique(a % 7)),
    "map_overlap": (
        lambda x: x.map_overlap(lambda b: b + 0, depth=(4, 0), boundary="reflect"),
        lambda a: a,
    ),
    "cumsum": (lambda x: da.cumsum(x.rechunk((5, 4)), axis=None), lambda a: np.cumsum(a)),
    "matmul": (lambda x: x.T @ fa(A, (5, 3)), lambda a: a.T @ a),
    "svd": (
        lambda x: da.linalg.svd(x.rechunk((5, 3)).rechunk((4, 10)))[1],
        lambda a: np.linalg.svd(a)[1],
    ),
    "fft": (lambda x: da.fft.fft(x.rechunk((12, 2)), axis=0), lambda a: np.fft.fft(a, axis=0)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_built_on_rechunk(client: Client, name: str) -> None:
    operation, numpy = OPERATIONS[name]
    stock = operation(rows())
    with new_runs(client) as new, dr.enable(policy="always"):
        y = operation(rows())
        assert (y.dtype, str(y.chunks)) == (stock.dtype, str(stock.chunks))  # nan is not nan
        got = y.compute()
        assert new(), "no collective has run"
    assert got.dtype == stock.dtype
    np.testing.assert_allclose(got, numpy(A), rtol=1e-9, atol=1e-9)


# ------------------------------------------------------------------------ however computed
WAYS: dict[str, Callable[[Client, da.Array], Any]] = {
    "compute": lambda client, y: y.compute(),
    "unoptimised": lambda client, y: y.compute(optimize_graph=False),
    "client.compute": lambda client, y: client.compute(y).result(),
    "client.compute of a list": lambda client, y: client.compute([y, y.sum()])[0].result(),
    "client.gather": lambda client, y: client.gather(client.compute(y)),
    "dask.compute": lambda client, y: dask.base.compute(y, y.sum(), y + 1)[0],
    "optimize": lambda client, y: dask.base.optimize(y)[0].compute(),
    "persist": lambda client, y: y.persist().compute(),
    "dask.persist": lambda client, y: dask.base.persist(y, y.T)[0].compute(),
    "client.persist": lambda client, y: client.persist(y).compute(),
    "blocks": lambda client, y: np.hstack(dask.base.compute(*y.to_delayed().ravel())),
    "pickle": lambda client, y: pickle.loads(pickle.dumps(y)).compute(),
    "np.asarray": lambda client, y: np.asarray(y),
}
LOCAL: dict[str, Callable[[Client, da.Array], Any]] = {
    "sync": lambda client, y: y.compute(scheduler="sync"),
    "threads": lambda client, y: y.compute(scheduler="threads"),
    # Dask makes copies of all tasks under other keys, and a copy takes part in no run.
    "delayed": lambda client, y: delayed(np.array)(y).compute(),
    "sync, unoptimised": lambda client, y: y.compute(scheduler="sync", optimize_graph=False),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_computed_in_every_way(client: Client, way: str) -> None:
    with new_runs(client) as new:
        same(WAYS[way](client, columns()), A)
        assert [report.n_out for report in new()] == [5]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", LOCAL)
def test_computed_without_a_run(client: Client, way: str) -> None:
    with new_runs(client) as new:
        same(LOCAL[way](client, columns()), A)
        assert not new()


@pytest.mark.ranks(2)
def test_as_an_argument_of_tasks(client: Client) -> None:
    y = columns()
    total = client.submit(lambda b: float(b.sum()), client.compute(y))
    assert total.result() == A.sum()
    z = da.map_blocks(lambda b, s: b + s, rows(), y.sum(), dtype="f8")
    same(z.compute(), A + A.sum())
    inside = client.submit(lambda lazy: lazy.compute(scheduler="sync"), y)
    same(inside.result(), A)


@pytest.mark.ranks(2)
def test_made_of_futures(client: Client) -> None:
    parts = [client.submit(np.full, (2, 6), i, dtype="f8") for i in range(3)]
    x = da.concatenate([da.from_delayed(part, (2, 6), "f8") for part in parts])
    with new_runs(client) as new, dr.enable(policy="always"):
        same(x.rechunk((6, 2)).compute(), np.repeat(np.arange(3.0), 2)[:, None] + np.zeros(6))
        assert len(new()) == 1


@pytest.mark.ranks(2)
def test_built_inside_and_computed_outside(client: Client) -> None:
    with dr.enable(policy="always"):
        inside = rows().rechunk((12, 2))
    outside = rows().rechunk((12, 5))
    with new_runs(client) as new, dr.enable(policy="always"):
        same(outside.compute(), A)
        assert not new()
    with new_runs(client) as new:
        same(inside.compute(), A)
        assert len(new()) == 1


@pytest.mark.ranks(2)
def test_from_eight_threads(client: Client) -> None:
    held = dr.enable(policy="always")

    def work(number: int) -> None:
        a = ar(13, 7, start=1000 * number)
        same((fa(a, (4, 7)).rechunk((13, 2)) + 1).rechunk((5, 7)).compute(), a + 1)

    try:
        with new_runs(client) as new, ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(12)))
            assert len(new()) >= 24
    finally:
        held.disable()


@pytest.mark.ranks(2)
def test_two_clients_of_one_cluster(client: Client) -> None:
    with (
        Client(client.scheduler_info()["address"], set_as_default=False) as other,
        dr.enable(policy="always"),
    ):
        x = rows()
        y = x.rechunk((12, 2))
        with other.as_current():
            z = x.rechunk((12, 2))
            assert z.name == y.name
            part = other.compute(z[:, :3])
        same(client.compute(y).result(), A)
        same(part.result(), A[:, :3].copy())
        del part


@pytest.mark.ranks(2)
def test_a_build_computes_nothing(client: Client) -> None:
    def boom(block: NDArray[Any]) -> NDArray[Any]:
        raise AssertionError("computed")

    x = of(rows(), boom)
    with new_runs(client) as new, dr.enable(policy="always"):
        for operation, _ in OPERATIONS.values():
            operation(x)
        assert not new()
    assert nothing_held(client)


@pytest.mark.ranks(2)
def test_the_graph_is_shown(client: Client) -> None:
    y = columns()
    for text in (repr(y), y._repr_html_(), repr(y.dask), y.dask._repr_html_()):
        assert text
    assert y.dask.layers[y.name].collection_annotations["chunks"] == y.chunks


@pytest.mark.erring
@pytest.mark.ranks(2)
def test_errors_and_cancelled_computations_leave_nothing(client: Client) -> None:
    def third_fails(block: NDArray[Any], block_info: Any = None) -> NDArray[Any]:
        if block_info[0]["chunk-location"][0] == 2:
            raise OSError("the disk is gone")
        return block

    def slowly(block: NDArray[Any]) -> NDArray[Any]:
        time.sleep(0.2)
        return block

    with dr.enable(policy="always"):
        y = of(rows(), third_fails).rechunk((12, 2))
        z = of(rows(), slowly).rechunk((12, 2))
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            y.compute()
    with new_runs(client) as new:
        future = client.compute(z)
        until(lambda: leftovers(client) != "")
        future.cancel()
        del future
        until(lambda: nothing_held(client))
        assert len(new()) <= 1


# --------------------------------------------------------------------------- policy "auto"
NEIGHBOURS: dict[str, tuple[Any, Any]] = {
    "merge two": ((3, 10), (6, 10)),
    "merge all": ((3, 10), (12, 10)),
    "split": ((12, 10), (3, 5)),
    "split in sixteen": ((12, 10), ((3,) * 4, (3, 3, 3, 1))),
    "merge and split apart": (((3, 3, 6), (10,)), ((6, 2, 4), (10,))),
    "merge sixteen": (((3,) * 4, (3, 3, 3, 1)), ((12,), (10,))),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_stay_with_dask(client: Client, name: str) -> None:
    before, after = NEIGHBOURS[name]
    x = fa(A, before)
    stock = x.rechunk(after)
    with new_runs(client) as new:
        with dr.enable():
            y = x.rechunk(after)
        assert y.name == stock.name
        assert dict(y.dask).keys() == dict(stock.dask).keys()
        same(y.compute(), A)
        assert not new()
        with dr.enable(policy="always"):
            same(x.rechunk(after).compute(), A)
        assert new()


@pytest.mark.ranks(2)
def test_seventeen_neighbours_are_many(client: Client) -> None:
    a = ar(17, 3)
    with new_runs(client) as new:
        with auto_as_if_large():
            same(fa(a, (1, 3)).rechunk((17, 3)).compute(), a)
            same(fa(a, (17, 3)).rechunk((1, 3)).compute(), a)
        assert len(new()) == 2


#: parts: one chunk as it is; two that become one; three that become two; one that becomes three
MIXED_IN, MIXED_OUT = ((6, 4, 4, 5, 5, 5, 9), (7,)), ((6, 8, 7, 8, 3, 3, 3), (7,))
MIXED = ar(38, 7)


def mixed(x: da.Array | None = None) -> da.Array:
    x = da.from_array(MIXED, chunks=MIXED_IN, name=False) if x is None else x
    with auto_as_if_large():
        y: da.Array = x.rechunk(MIXED_OUT)
    assert layer_of(y).simple
    return y


@pytest.mark.sample
def test_of_a_mixed_array_the_big_parts_run(client: Client) -> None:
    with new_runs(client) as new:
        check(mixed(), MIXED, MIXED_OUT)
        (report,) = new()
        assert (report.n_in, report.n_out) == (3, 2)


MIXED_2D_IN, MIXED_2D_OUT = ((4, 4, 3, 3), (3, 3, 5)), ((8, 2, 4), (6, 5))


@pytest.mark.parametrize("unoptimised", [False, True])
def test_a_mixed_array_in_two_dimensions(client: Client, unoptimised: bool) -> None:
    a = ar(14, 11)
    with auto_as_if_large():
        y = fa(a, MIXED_2D_IN).rechunk(MIXED_2D_OUT)
    same(y.compute(scheduler="sync", optimize_graph=not unoptimised), a)
    with new_runs(client) as new:
        same(y.compute(optimize_graph=not unoptimised), a)
        assert sorted((r.n_in, r.n_out) for r in new()) == [(2, 2), (4, 2)]


@pytest.mark.ranks(2)
def test_mixed_persisted_and_changed_again(client: Client) -> None:
    y = mixed().persist()
    with dr.enable(policy="always"):
        z = y.rechunk((38, 2))
    assert layer_of(z).name_input == y.name
    same(z.compute(), MIXED)
    same(mixed(fa(MIXED, MIXED_IN).persist()).compute(), MIXED)
    held = mixed().persist()
    wait(held)
    assert (dr.owners(held) >= 0).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("box", "runs"),
    [
        (np.s_[:6], 0),
        (np.s_[2:13, 1:], 0),
        (np.s_[14:20], 1),
        (np.s_[13:22:2, ::-1], 1),
        (np.s_[30:], 0),
        (np.s_[5], 0),
        (np.s_[[3, 16, 35]], 1),
    ],
    ids=str,
)
def test_slices_of_a_mixed_array(client: Client, box: Any, runs: int) -> None:
    y = mixed()[box]
    same(y.compute(scheduler="sync"), np.ascontiguousarray(MIXED[box]))
    with new_runs(client) as new:
        same(y.compute(), np.ascontiguousarray(MIXED[box]))
        assert len(new()) == runs


@pytest.mark.ranks(1)
def test_chunks_that_stay_as_they_are_are_not_copied(client: Client) -> None:
    x = fa(MIXED, MIXED_IN).persist()
    y = mixed(x)
    key: Any = (y.name, 0, 0)
    assert isinstance(dict(layer_of(y))[key], Alias)
    held = y.persist()
    wait(held)
    before, after = (dict(facts(z, "ctypes.data")) for z in (x, held))
    assert after[0, 0] == before[0, 0]
    assert not set(list(after.values())[1:]) & set(before.values())


@pytest.mark.ranks(2)
def test_what_does_not_fit_is_left_to_dask(client: Client) -> None:
    room = worth.ROOM * sum(seat.memory_limit for seat in dr.connect(client).seats)
    fits, chunk = int(room) // (8 * 32), 8
    for length, ours in ((fits, True), (2 * fits, False)):
        x = da.zeros((length, 32), chunks=(length, chunk))
        stock = x.rechunk((-(-length // 4), 32))
        with dr.enable():
            y = x.rechunk((-(-length // 4), 32))
        assert is_lazy_change(y) is ours
        assert (y.name == stock.name) is not ours
        with dr.enable(policy="always"):
            assert is_lazy_change(x.rechunk((-(-length // 4), 32)))


#: the shape, chunks before and after, and whether Dask's tasks are so few that they are taken
SMALL: dict[str, tuple[tuple[int, ...], Any, Any, bool]] = {
    "through one chunk": ((61, 39), (1, -1), (-1, 1), True),  # 79 tasks, ours are 101
    "through one chunk, as many": ((64, 64), (1, -1), (-1, 1), False),
    "through one chunk to few": ((64, 8), (1, -1), (-1, 1), True),
    "through one chunk to many": ((8, 64), (1, -1), (-1, 1), False),
    "two parts": ((4, 5, 4), (1, -1, -1), (2, -1, 2), True),
    "four parts": ((16, 5, 16), (1, -1, -1), (4, -1, 4), False),
    "eight parts, each through one chunk": ((64, 5, 8), (1, -1, -1), (8, -1, 1), False),
    "all to all": ((4, 4), (1, -1), (-1, 1), False),
    "all to two": ((4, 4), (1, -1), (-1, 2), True),
    "edges that move": ((12,), 3, 4, True),
    "more edges that move": ((1333,), 31, 43, False),
    "more edges that move, in parts": ((128,), 2, 3, True),
    "squares": ((30, 30), (6, 6), (5, 5), False),
    "a merge of many": ((40, 3), (1, -1), (20, -1), True),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_arrays_stay_with_dask_where_tasks_are_few(client: Client, name: str) -> None:
    shape, before, after, are_few = SMALL[name]
    a = ar(*shape)
    x = fa(a, before)
    tasks = x.rechunk(after, method="tasks")
    with new_runs(client) as new:
        with dr.enable():
            y = x.rechunk(after)
        assert (y.name == tasks.name) is are_few
        assert is_lazy_change(y) is not are_few
        same(y.compute(), a)
        assert bool(new()) is not are_few
    with dr.enable(policy="always"):
        assert is_lazy_change(x.rechunk(after))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("more", [0, 1])
def test_of_larger_arrays_tasks_are_not_counted(client: Client, more: int) -> None:
    length = worth.SMALL // 64 + more
    x = da.zeros((64, length), dtype="i1", chunks=(1, length))
    with dr.enable():
        y = x.rechunk((64, -(-length // 8)))
    assert is_lazy_change(y) is bool(more)


@pytest.mark.ranks(2)
def test_what_stays_with_dask_is_planned_as_the_user_says(client: Client) -> None:
    x = fa(ar(61, 39), (1, 39))
    told = x.rechunk((61, 1), threshold=100, method="tasks")
    with dr.enable():
        y = x.rechunk((61, 1), threshold=100)  # no way through one chunk: 2418 tasks
    assert len(told.dask.layers) == len(x.dask.layers) + 1
    assert is_lazy_change(y)


# ------------------------------------------------------------------- one change after another
@pytest.mark.ranks(2)
def test_a_change_of_a_change_starts_from_the_first_input(client: Client) -> None:
    x = rows()
    with new_runs(client) as new, dr.enable(policy="always"):
        y = x.rechunk((12, 2)).rechunk((5, 4)).rechunk((4, 5))
        assert sum(isinstance(layer, RedistributeLayer) for layer in y.dask.layers.values()) == 1
        assert layer_of(y).name_input == x.name
        check(y, A, ((4, 4, 4), (5, 5)))
        assert {report.name for report in new()} == {y.name}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("policy", ["auto", "always"])
def test_there_and_back_is_the_array_itself(client: Client, policy: str) -> None:
    x = rows() + 1
    with new_runs(client) as new, dr.enable(policy=policy):
        back = x.rechunk((12, 2)).rechunk((3, 10))
        assert back.name == x.name
        assert dict(back.dask).keys() == dict(x.dask).keys()
        same(back.compute(), A + 1)
        assert not new()


@pytest.mark.ranks(2)
def test_what_is_persisted_in_between_is_used(client: Client) -> None:
    with dr.enable(policy="always"):
        y = rows().rechunk((12, 2)).persist()
        z = y.rechunk((3, 10))
        assert layer_of(z).name_input == y.name
        (optimised,) = dask.base.optimize(rows().rechunk((12, 2)))
        assert layer_of(optimised.rechunk((3, 10))).name_input == optimised.name
    same(z.compute(), A)
    same(optimised.rechunk((3, 10)).compute(), A)


def test_what_lies_in_between_is_wanted_too(client: Client) -> None:
    with dr.enable(policy="always"):
        y = rows().rechunk((12, 2))
        z = y.rechunk((5, 4))
        w = (y + 1).rechunk((5, 4))
        back = z.rechunk((3, 10))
    for got, want in zip(
        dask.base.compute(y, z, w, back, z.sum()), (A, A, A + 1, A, A.sum()), strict=True
    ):
        same(got, want)
    held = [array.persist() for array in (z, y, w)]
    same(held[1].compute(), A)
    same(held[0].compute(), A)


@pytest.mark.ranks(2)
def test_written_to_in_between(client: Client) -> None:
    want = A.copy()
    want[2:5, 3] = -1
    with dr.enable(policy="always"):
        y = rows().rechunk((12, 2))
        y[2:5, 3] = -1
        same(y.rechunk((3, 10)).compute(), want)
        same(y.view("i8").rechunk((5, 5)).compute(), want.view("i8"))


# ------------------------------------------------------------------------ what is not asked for
@pytest.mark.ranks(2)
@pytest.mark.parametrize("share", [0, 1 / 8], ids=["part by part", "together"])
def test_only_what_is_touched_takes_part(
    client: Client, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relayout, "TOGETHER", share)
    a = ar(32, 40)
    with dr.enable(policy="always"):
        y = fa(a, (8, 20)).rechunk((32, 5))
    assert tasks_of(y) == {"contribute": 8, "fence": 1 if share else 2, "take": 8}
    assert tasks_of(y[:, :10]) == {"contribute": 4, "fence": 1, "take": 2}
    assert tasks_of(y[3, 38:]) == {"contribute": 4, "fence": 1, "take": 1}
    with new_runs(client) as new:
        same(y[:, :10].compute(), a[:, :10].copy())
        (report,) = new()
        assert (report.n_in, report.n_out) == (4, 2)


@pytest.mark.ranks(2)
def test_only_the_touched_inputs_of_one_part_take_part(client: Client) -> None:
    a = ar(12)
    with dr.enable(policy="always"):
        y = fa(a, 4).rechunk(((3, 3, 3, 3),))
    assert tasks_of(y) == {"contribute": 3, "fence": 1, "take": 4}
    assert tasks_of(y[:3]) == {"contribute": 1, "fence": 1, "take": 1}
    assert tasks_of(y[4:8]) == {"contribute": 3, "fence": 1, "take": 2}
    same(y[:3].compute(), a[:3])


# ----------------------------------------------------------------------- no collective possible
def unlike_bytes(name: str) -> tuple[da.Array, Any]:
    """An array that cannot be redistributed, and its elements."""
    if name == "masked":
        masked = np.ma.array(A, mask=A % 3 == 0)
        return fa(masked, (3, 10)), masked
    if name == "objects":
        return fa(A.astype(object), (3, 10)), A.astype(object)
    if name == "strings":
        strings: Any = np.array([["a", "bc"] * 5, ["def", "g" * 50] * 5] * 6)
        strings = strings.astype(np.dtypes.StringDType())
        return fa(strings, (3, 10)), strings
    x = rows()
    return x[x[:, 0] > 35], A[A[:, 0] > 35]  # unknown sizes along axis 0


UNLIKE = ("masked", "objects", "strings", "unknown")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("policy", ["auto", "always"])
@pytest.mark.parametrize("name", UNLIKE)
def test_what_is_no_plain_bytes_is_left_to_dask(client: Client, name: str, policy: str) -> None:
    x, want = unlike_bytes(name)
    stock = x.rechunk({1: 2})
    with new_runs(client) as new, dr.enable(policy=policy):
        y = x.rechunk({1: 2})
        assert y.name == stock.name
        got = y.compute()
        assert not new()
    if name == "strings":
        assert got.dtype == want.dtype
        assert (got == want).all()
    else:
        same(got, want)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", UNLIKE)
def test_or_refused(client: Client, name: str) -> None:
    x, _ = unlike_bytes(name)
    with dr.enable(fallback="error"):
        with pytest.raises(dr.RedistError, match=r"plain bytes|unknown|MaskedArray.*fallback="):
            x.rechunk({1: 2})
        same(rows().rechunk((12, 2)).compute(), A)
        same(rows().rechunk((6, 10)).compute(), A)  # Dask's own, by choice: nothing is wrong
    assert x.rechunk({1: 2}).name.startswith("rechunk-merge")


@pytest.mark.ranks(2)
def test_empty_arrays_are_left_to_dask(client: Client) -> None:
    a = np.zeros((0, 10))
    with new_runs(client) as new, dr.enable(policy="always", fallback="error"):
        y = fa(a, (0, 5)).rechunk((0, 2))
        assert y.chunks == ((0,), (2,) * 5)
        same(y.compute(), a)
        assert not new()


# -------------------------------------------------------------------- tables that do not match
@pytest.mark.erring
@pytest.mark.ranks(2)
def test_chunks_that_are_not_what_is_declared(client: Client) -> None:
    lies: list[Any] = [lambda b: b.astype("f4"), lambda b: np.ma.masked_greater(b, 7)]
    kinds: list[Any] = [np.asmatrix, np.asfortranarray]
    with dr.enable(policy="always"):
        for lie in lies:
            with pytest.raises(dr.ChunkMismatchError, match="meta="):
                of(rows(), lie).rechunk((12, 2)).compute()
        for kind in kinds:
            same(np.asarray(of(rows(), kind).rechunk((12, 2)).compute()), A)


def test_placed_arrays_stay_what_they_are(client: Client) -> None:
    x = placed(client, A, (3, 10))
    with dr.enable(policy="always"):
        y = x.rechunk((12, 2)).persist()
    wait(y)

    def spoil(block: NDArray[Any]) -> NDArray[Any]:
        block[...] = -1
        return block

    wait(of(y, spoil).persist())
    same(x.compute(), A)
