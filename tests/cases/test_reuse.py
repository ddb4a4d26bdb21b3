"""One array redistributed several times, by several threads, in part, or under one name."""

import gc
import time
from concurrent.futures import ThreadPoolExecutor

import dask.array as da
import dask.base
import numpy as np
import pytest
from cluster import Relayout, ar, check, fa, new_runs, same
from distributed import Client, wait

import dask_redist as dr


def test_ru01_several_collectives_in_one_compute(relayout: Relayout) -> None:
    # https://github.com/dask/distributed/issues/8424
    x = fa(ar(10, 12), (3, 12))
    found = dask.base.compute(
        relayout(x, (10, 4)), relayout(x, (5, 6)), x.sum(axis=0), relayout(x, (10, 4)).max()
    )
    wanted = (ar(10, 12), ar(10, 12), ar(10, 12).sum(0), ar(10, 12).max())
    for got, want in zip(found, wanted, strict=True):
        same(got, want)


def test_ru02_the_same_one_again_after_it_was_forgotten(relayout: Relayout) -> None:
    # https://github.com/dask/distributed/issues/7452
    y = relayout(fa(ar(10, 12), (3, 12)), (10, 4))
    same(y.compute(), ar(10, 12))
    same(y.compute(), ar(10, 12))
    same(y.sum().compute(), ar(10, 12).sum())
    assert len(relayout.reports()) == 3


def test_ru04_two_arrays_under_one_name(relayout: Relayout, client: Client) -> None:
    # https://github.com/dask/dask/issues/6036
    first = da.from_array(ar(4, 6), chunks=(1, 6), name="src")
    same(relayout(first, (4, 3)).compute(), ar(4, 6))
    # Dask itself mixes the two up as long as the scheduler remembers the first.
    deadline = time.monotonic() + 20
    while known := client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks)):
        assert time.monotonic() < deadline, f"the scheduler still knows {known}"
        gc.collect()  # an error's frames in another test may hold futures
        time.sleep(0.01)
    second = da.from_array(ar(6, 6, start=100), chunks=(2, 6), name="src")
    same(relayout(second, (6, 3)).compute(), ar(6, 6, start=100))


def test_ru05_four_client_threads(relayout: Relayout) -> None:
    # https://github.com/mpi4py/mpi4py/issues/784
    x = fa(ar(10, 12), (3, 12))
    lazy = [relayout(x, (10, 4)), relayout(x, (2, 12)), x.sum(axis=1)]
    lazy.append(relayout(x, (5, 3)).max(axis=0))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda y: y.compute(), lazy))
    wanted = (ar(10, 12), ar(10, 12), ar(10, 12).sum(1), ar(10, 12).max(0))
    for got, want in zip(found, wanted, strict=True):
        same(got, want)


def test_ru07_a_part_of_the_output_is_wanted(relayout: Relayout) -> None:
    # https://github.com/dask/distributed/issues/8326
    x = fa(ar(20, 20), ((1,) + (2,) * 9 + (1,),) * 2)
    check(relayout(x, 2)[:, :3], ar(20, 20)[:, :3])


def test_ru08_one_output_chunk_of_all_inputs(relayout: Relayout) -> None:
    # https://github.com/dask/dask/issues/11163
    y = relayout(fa(ar(20, 21), (1, 21)), (20, 4))[..., 17:18]
    check(y, ar(20, 21)[..., 17:18])
    assert {report.n_out for report in relayout.reports()} == {1}


def test_ru10_contraction_over_everything(relayout: Relayout) -> None:
    # https://github.com/dask/dask/issues/5472
    x, y = fa(ar(4, 5), (4, 5)), fa(ar(4, 5), (2, 5))
    z = da.tensordot(relayout(x, y.chunks), y, axes=2)
    np.testing.assert_allclose(z.compute(), np.tensordot(ar(4, 5), ar(4, 5), axes=2), rtol=1e-12)


def test_rd13_reduced_straight_afterwards(relayout: Relayout) -> None:
    # https://github.com/dask/dask/issues/10226
    y = relayout(fa(ar(6, 10), (2, 5)), (3, 4)).sum(axis=0)
    check(y, ar(6, 10).sum(0), ((4, 4, 2),))


def test_rm01_many_results_of_one_graph(relayout: Relayout) -> None:
    # https://github.com/dask/dask/issues/12507
    x, a = fa(ar(9, 8), (4, 3)), ar(9, 8)
    found = dask.base.compute(
        x.sum(), x.mean(axis=0), x.max(axis=1), relayout(x, (9, 2)).sum(axis=1), x.any()
    )
    wanted = (a.sum(), a.mean(0), a.max(1), a.sum(1), a.any())
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("finished", [True, False])
def test_rm04_forty_small_computes_with_garbage_in_between(client: Client, finished: bool) -> None:
    # https://github.com/pytorch/pytorch/issues/195500; not finished: given up under way
    x, held = fa(ar(9, 8), (4, 3)), []
    with new_runs(client) as new:
        for i in range(40):
            held.append(dr.redistribute(x, (9, 1 + i % 8)).persist())
            if finished:
                wait(held[-1])
            if i % 3 == 1:
                held.clear()
        same(held[-1].compute(), ar(9, 8))
        assert not finished or len(new()) >= 40


def test_th02_four_threads_and_four_chunkings(relayout: Relayout) -> None:
    # https://github.com/open-mpi/ompi/issues/2427
    x = fa(ar(9, 8), (4, 3))
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda k: relayout(x, (9, k)).compute(), [1, 2, 3, 4]):
            same(got, ar(9, 8))


def test_pp02_a_contribution_that_runs_twice_counts_once(relayout: Relayout) -> None:
    # https://github.com/dask/distributed/issues/7324
    y = relayout(da.map_blocks(lambda b: b, fa(ar(12), 3), dtype="f8"), 4)
    first, second = dask.base.compute(y, y + 1)
    same(first, ar(12))
    same(second, ar(12) + 1)
    assert sum(sum(report.sent.values()) for report in relayout.reports()) == ar(12).nbytes


@pytest.mark.ranks(3)
def test_pp03_no_message_of_an_earlier_run_is_taken_for_a_later_one(relayout: Relayout) -> None:
    # https://github.com/dask/distributed/pull/8262
    y = relayout(fa(ar(10, 12), (3, 12)), (10, 4)).sum()
    for _ in range(50):
        assert y.compute() == ar(10, 12).sum()
    assert len({report.number for report in relayout.reports()}) == 50


def test_pp06_a_busy_rank_owns_its_share(relayout: Relayout, client: Client, ranks: int) -> None:
    # https://github.com/dask/distributed/issues/8673
    busy = client.submit(time.sleep, 1, workers=[dr.connect(client).addresses[0]], pure=False)
    y = relayout(fa(ar(14, 6), (2, 6)), dr.Slab.X)
    check(y, ar(14, 6))
    owners = {target for report in relayout.reports() for _, target in report.sent}
    assert len(owners) == ranks
    busy.release()


@pytest.mark.erring
def test_ml05_an_error_in_one_task_leaves_nobody_behind(relayout: Relayout) -> None:
    # https://github.com/dask/distributed/issues/1469
    def fail_in_the_second(block: np.ndarray, block_id: tuple[int, int]) -> np.ndarray:
        if block_id == (1, 0):
            raise KeyError("block 1")
        return block

    x = fa(ar(12, 8), (3, 8))
    with pytest.raises(KeyError, match="block 1"):
        relayout(da.map_blocks(fail_in_the_second, x, dtype="f8"), (12, 2)).compute()
    same(relayout(x, (12, 2)).compute(), ar(12, 8))
    assert relayout.reports()
