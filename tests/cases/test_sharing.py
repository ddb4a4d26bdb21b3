"""Results belong to whoever asked: they alias nothing, outlast their makers, and meet in any order.

After each test all arenas must be empty again; the fixtures see to that.
"""

import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dask.array as da
import dask.base
import numpy as np
import pytest
from cluster import Relayout, ar, fa, new_runs, owners, placed, same
from distributed import Client, wait

import dask_redist as dr


def spoil(block: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What users do to results in place."""
    block[...] = -1
    return block


def test_a_result_shares_memory_with_nothing(relayout: Relayout, client: Client) -> None:
    x = placed(client, ar(9, 8), (3, 8))
    y = relayout(x, x.chunks).persist()
    z = relayout(x, dr.Slab.Y).persist()
    wait([y, z])
    wait(da.map_blocks(spoil, y, dtype=y.dtype).persist())
    same(x.compute(), ar(9, 8))
    same(z.compute(), ar(9, 8))


def test_an_input_that_is_spoiled_leaves_the_result(relayout: Relayout, client: Client) -> None:
    x = placed(client, ar(9, 8), (3, 8))
    y = relayout(x, x.chunks).persist()
    wait(y)
    wait(da.map_blocks(spoil, x, dtype=x.dtype).persist())
    same(y.compute(), ar(9, 8))


def test_memory_handed_out_again_holds_nothing_of_the_last_run(relayout: Relayout) -> None:
    x = fa(ar(12, 9), (5, 9))
    for _ in range(5):
        y = da.map_blocks(spoil, relayout(x, (12, 2)), dtype="f8")
        same(y.compute(), np.full((12, 9), -1.0))
        del y
        same(relayout(x, (12, 4)).compute(), ar(12, 9))


def test_results_spoiled_while_other_runs_go_on(relayout: Relayout) -> None:
    x = fa(ar(12, 9), (5, 9))

    def work(number: int) -> None:
        chunks = (12, 1 + number % 4)
        if number % 2:
            spoiled = da.map_blocks(spoil, relayout(x, chunks), dtype="f8")
            same(spoiled.compute(), -np.ones((12, 9)))
        else:
            same(relayout(x, chunks).compute(), ar(12, 9))

    # spoil() works in place on what Dask may have handed to the even ones: their chunks differ.
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(16)))


def test_eight_client_threads(relayout: Relayout, ranks: int) -> None:
    def work(number: int) -> None:
        a = ar(13, 7, start=1000 * number)
        layout = (dr.Slab.X, dr.Slab.Y, dr.Pencil.X, dr.Block((1, ranks)))[number % 4]
        same(relayout(relayout(fa(a, (4, 3)), layout), (2, 7)).compute(), a)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(16)))


def test_sum_and_mean_from_two_threads(relayout: Relayout) -> None:
    y = relayout(fa(ar(12, 9), (5, 9)), dr.Slab.Y)
    for _ in range(5):
        with ThreadPoolExecutor(2) as pool:
            total, mean = pool.map(lambda z: z.compute(), (y.sum(), y.mean()))
        assert (total, mean) == (ar(12, 9).sum(), ar(12, 9).mean())


@pytest.mark.sample
@pytest.mark.parametrize("part_first", [True, False])
def test_a_part_and_the_whole_alive_at_once(relayout: Relayout, part_first: bool) -> None:
    x = fa(ar(30, 6), (1, 6))
    y = relayout(x, (5, 2))
    wanted = {True: [y[:10], y], False: [y, y[:10]]}[part_first]
    held = [z.persist() for z in wanted]
    for z in held:
        same(z.compute(), ar(30, 6)[: z.shape[0]])


@pytest.mark.sample
@pytest.mark.parametrize("part_first", [True, False])
def test_a_part_of_one_fence_and_the_whole(relayout: Relayout, part_first: bool) -> None:
    x = fa(ar(12, 12), (3, 12))
    y = relayout(x, (12, 3))
    held = [z.persist() for z in ([y[:, :5], y] if part_first else [y, y[:, :5]])]
    for z in held:
        same(z.compute(), ar(12, 12)[:, : z.shape[1]])


@pytest.mark.parametrize("part_first", [True, False])
def test_a_part_and_the_whole_from_two_clients(
    relayout: Relayout, client: Client, part_first: bool
) -> None:
    assert client.cluster is not None
    with Client(client.cluster.scheduler_address, set_as_default=False) as other:
        dr.connect(other)
        x = da.from_array(ar(12, 12), chunks=(3, 12), name="shared-by-two-clients")
        y, z = relayout(x, (12, 3)), dr.redistribute(x, (12, 3), client=other)
        assert y.name == z.name
        first = [client.persist(y[:, :5]), other.persist(z)]
        if not part_first:
            first = [other.persist(z), client.persist(y[:, :5])]
        for held in first:
            owner = client if held.shape[1] == 5 else other
            same(owner.compute(held, sync=True), ar(12, 12)[:, : held.shape[1]])
        del first, held


def test_a_chain_that_meets_what_it_came_from(relayout: Relayout) -> None:
    w, x = fa(ar(4, 6), (4, 2)), fa(ar(8, 6, start=24), (3, 6))
    y = da.concatenate([w, relayout(x, dr.Slab.Y)])
    same(relayout(y, dr.Slab.X).compute(), ar(12, 6))


def test_an_input_that_two_runs_share(relayout: Relayout) -> None:
    x = fa(ar(12, 9), (5, 9)) + 1
    columns, rows = dask.base.compute(relayout(x, dr.Slab.Y), relayout(x, dr.Slab.X))
    same(columns, ar(12, 9) + 1)
    same(rows, ar(12, 9) + 1)
    y = relayout(x, dr.Slab.Y)
    same((y + relayout(x, y.chunks)).compute(), 2 * (ar(12, 9) + 1))


def test_an_input_keeps_its_place(relayout: Relayout, client: Client) -> None:
    x = placed(client, ar(9, 8), (3, 8))
    before = owners(client, x)
    wait(relayout(x, dr.Slab.Y).persist())
    np.testing.assert_array_equal(owners(client, x), before)


@pytest.mark.parametrize("scheduler", ["sync", "threads", "processes"])
def test_the_same_graph_without_the_cluster(client: Client, scheduler: str) -> None:
    y = dr.redistribute(dr.redistribute(fa(ar(9, 8), (4, 3)), dr.Slab.Y), (2, 5))
    with new_runs(client) as new:
        same(y.compute(scheduler=scheduler), ar(9, 8))
        assert not new()
        same(y.compute(), ar(9, 8))
        assert new()


def test_inside_a_task_it_works_in_process(client: Client) -> None:
    y = dr.redistribute(fa(ar(9, 8), (4, 3)), dr.Slab.Y)
    nested = client.submit(lambda z: z.compute(scheduler="sync"), y, pure=False)
    same(nested.result(), ar(9, 8))


def test_a_result_outlasts_its_client(client: Client) -> None:
    assert client.cluster is not None
    with Client(client.cluster.scheduler_address, set_as_default=False) as other:
        y = dr.redistribute(fa(ar(9, 8), (4, 3)), dr.Slab.Y, client=other)
        kept = other.compute(y, sync=True)
        held = client.persist(y)
    kept += 1
    same(held.compute(), ar(9, 8))
    same(kept, ar(9, 8) + 1)
    same(y.compute(scheduler="sync"), ar(9, 8))


def test_a_pickled_graph(relayout: Relayout) -> None:
    y = relayout(fa(ar(9, 8), (4, 3)), dr.Slab.Y)
    same(pickle.loads(pickle.dumps(y)).compute(), ar(9, 8))


def test_a_graph_that_was_optimized_before(relayout: Relayout) -> None:
    y = relayout(fa(ar(9, 8), (4, 3)) + 1, dr.Slab.Y)[:, 2:]
    (optimized,) = dask.base.optimize(y)
    same(optimized.compute(), ar(9, 8)[:, 2:] + 1)


def test_results_that_nobody_waits_for(client: Client) -> None:
    x = fa(ar(40, 9), (1, 9))
    for number in range(12):
        held = dr.redistribute(x, (40, 1 + number % 3)).persist()
        time.sleep(0.01 * number)
        del held
    same(dr.redistribute(x, (40, 2)).compute(), ar(40, 9))
