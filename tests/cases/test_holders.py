"""Who holds what, who waits for whom, and what the plan of a large change costs."""

import time
import tracemalloc

import dask
import dask.array as da
import numpy as np
import pytest
from cluster import DASK_COMM, Relayout, ar, check, fa, owners, placed, same
from distributed import Client

import dask_redist as dr
from dask_redist.overlap import Overlap


@pytest.mark.sample
def test_th04_ranks_come_at_different_times(relayout: Relayout, client: Client) -> None:
    # https://github.com/NVIDIA/nccl/issues/296
    addresses = list(dr.connect(client).addresses)

    def late(block: np.ndarray) -> np.ndarray:
        from distributed import get_worker

        time.sleep(0.05 * addresses.index(get_worker().address))
        return block

    x = da.map_blocks(late, placed(client, ar(9, 8), (4, 3)), dtype="f8")
    found = dask.base.compute(relayout(x, (9, 2)), x.sum(0), relayout(x, (3, 8)), x.max(1))
    wanted = (ar(9, 8), ar(9, 8).sum(0), ar(9, 8), ar(9, 8).max(1))
    for got, want in zip(found, wanted, strict=True):
        same(got, want)


@pytest.mark.wires
@pytest.mark.ranks(2, 3)
def test_sz02_more_than_one_message_holds(relayout: Relayout, client: Client, wire: str) -> None:
    # https://github.com/helmholtz-analytics/heat/issues/1932, with the limit lowered
    client.run(dask.config.set, {"redist.message-bytes": 1000})
    try:
        x = placed(client, ar(1500, 2), (500, 2))
        check(relayout(x, ((1500,), (1, 1))), ar(1500, 2))
    finally:
        client.run(dask.config.set, {"redist.message-bytes": "32MiB"})
    (report,) = relayout.reports()
    assert report.wires[wire] == report.bytes_moved > 0
    assert wire != DASK_COMM or report.bytes_moved > 1000


def test_sz05_the_plan_grows_with_the_chunks_of_an_axis_not_with_the_pieces() -> None:
    # https://github.com/dask/distributed/issues/7757
    shape = (100_000, 700, 1400)
    thin = ((1,) * shape[0], (700,), (1400,))
    wide = da.core.normalize_chunks((9000, 70, 140), shape)
    tracemalloc.start()
    try:
        overlap = Overlap(thin, wide)
        first = next(iter(overlap.pieces_of_input((99_999, 0, 0))))
        parts = len(overlap.parts)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(overlap) == 100_000 * 10 * 10
    assert parts == 12  # 11 of 9000 rows, one of the rest
    assert first.chunk == (11, 0, 0)
    assert first.target[0] == slice(999, 1000)
    assert peak < 64 * 2**20


def test_sz07_a_middle_layout_with_the_largest_share(relayout: Relayout) -> None:
    # https://github.com/amirgholami/accfft/issues/18
    y = relayout(relayout(fa(ar(9, 8, 7), (9, 8, 2)), (9, 3, 7)), (2, 8, 7))
    check(y, ar(9, 8, 7))


@pytest.mark.sample
def test_zm01_ranks_that_send_and_receive_nothing(relayout: Relayout) -> None:
    # https://github.com/NVIDIA/nccl/issues/695
    check(relayout(fa(ar(2, 6), (1, 6)), (2, 6)), ar(2, 6))


@pytest.mark.erring
def test_zm03_other_lengths_than_declared(relayout: Relayout) -> None:
    # https://github.com/NVIDIA/nccl/issues/1417
    x = da.map_blocks(lambda b: b[:3], fa(ar(7), ((3, 4),)), dtype="f8")
    with pytest.raises(dr.ChunkMismatchError, match=r"chunk \(1,\).*shape \(3,\).*shape \(4,\)"):
        relayout(x, 7).compute()
    assert relayout.reports()


@pytest.mark.erring
def test_zm04_other_types_on_other_ranks(relayout: Relayout) -> None:
    # https://github.com/pytorch/pytorch/issues/150248
    x = da.map_blocks(
        lambda b, block_id: b.astype("f4") if block_id == (1,) else b, fa(ar(6), 3), dtype="f8"
    )
    with pytest.raises(dr.ChunkMismatchError, match=r"chunk \(1,\).*dtype float32"):
        relayout(x, 6).compute()
    assert relayout.reports()


@pytest.mark.sample
@pytest.mark.wires
def test_zm07_source_and_destination_offsets_differ(relayout: Relayout, client: Client) -> None:
    # https://github.com/NVIDIA/cuDecomp/pull/146
    x = placed(client, ar(10, 9), ((1, 4, 5), (2, 7)))
    check(relayout(x, ((6, 4), (4, 4, 1))), ar(10, 9), ((6, 4), (4, 4, 1)))


@pytest.mark.sample
def test_sh01_length_that_the_ranks_do_not_divide(relayout: Relayout, client: Client) -> None:
    # https://github.com/jax-ml/jax/issues/26946
    y = relayout(fa(ar(19, 4), (19, 1)), (3, 4)).persist()
    rows = [3, 3, 3, 3, 3, 3, 1]
    held = owners(client, y).ravel()  # fails for an element held twice
    same(y.compute(), ar(19, 4))
    shares = np.bincount(held, rows, minlength=dr.connect(client).size)
    assert shares.sum() == 19
    assert shares.max() <= 19 / dr.connect(client).size + 3


@pytest.mark.sample
def test_sh03_owners_that_are_not_in_block_order(
    relayout: Relayout, client: Client, ranks: int
) -> None:
    # https://github.com/jax-ml/jax/issues/5861
    x = placed(client, ar(4, 2), (1, 2), [rank % ranks for rank in (0, 2, 1, 3)])
    check(relayout(x, (2, 2)), ar(4, 2))


@pytest.mark.sample
def test_sh04_shift_by_one_across_chunks(relayout: Relayout) -> None:
    # https://github.com/jax-ml/jax/issues/18434
    x = fa(ar(12, 5), (2, 5))
    y = relayout(da.concatenate([x[1:], x[:1] * 0 + 2.5]), (2, 5))
    check(y, np.vstack([ar(12, 5)[1:], ar(12, 5)[:1] * 0 + 2.5]))


@pytest.mark.sample
def test_sh06_slice_over_shuffled_owners(relayout: Relayout, client: Client, ranks: int) -> None:
    # https://github.com/mpi4py/mpi4py-fft/issues/43
    x = placed(client, ar(8, 3), (1, 3), [rank % ranks for rank in (5, 2, 7, 0, 3, 6, 1, 4)])
    check(relayout(x, (1, 3))[2:7], ar(8, 3)[2:7])


def test_sh10_asking_for_values_moves_nothing(relayout: Relayout, client: Client) -> None:
    # https://github.com/helmholtz-analytics/heat/pull/345
    x = placed(client, ar(6, 6), (2, 6))
    before = owners(client, x)
    same(relayout(x, (6, 2)).compute(), ar(6, 6))
    assert (owners(client, x) == before).all()
    same(x.compute(), ar(6, 6))


@pytest.mark.sample
def test_nv05_owners_of_very_different_size(relayout: Relayout) -> None:
    # https://github.com/Sandia-OpenSHMEM/SOS/pull/1082
    check(relayout(fa(ar(100, 8), ((97, 1, 2), (8,))), (100, 3)), ar(100, 8))
