"""Redistributions inside something larger: halos, FFTs, products, stores."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
import zarr
from cluster import Relayout, ar, check, fa, same
from numpy.typing import NDArray


def test_pl01_halo_deeper_than_a_chunk(relayout: Relayout) -> None:
    # https://github.com/dask/dask/issues/6688
    y = relayout(fa(ar(12, 9), (1, 9)), (4, 9))
    z = y.map_overlap(lambda b: b + 0, depth=(2, 0), boundary="reflect")
    check(z, ar(12, 9))
    check(relayout(z, (1, 9)), ar(12, 9))


def test_pl02_halo_with_a_short_last_chunk(relayout: Relayout) -> None:
    # https://github.com/dask/dask/issues/6597
    y = relayout(fa(ar(11), 5), 4)
    z = y.map_overlap(lambda b: np.convolve(b, [1, 1, 1], "same"), depth=1, boundary=0)
    check(z, np.convolve(ar(11), [1, 1, 1], "same"))


def test_pl04_there_and_back_around_an_fft(relayout: Relayout) -> None:
    # https://github.com/mpi4py/mpi4py-fft/issues/43
    f = da.fft.fft(relayout(fa(ar(10, 12), (3, 12)), (10, 4)), axis=0)
    back = relayout(da.fft.ifft(f, axis=0).real, (3, 12))
    np.testing.assert_allclose(back.compute(), ar(10, 12), atol=1e-10)
    spectrum = relayout(f, (3, 12)).compute()
    np.testing.assert_allclose(spectrum, np.fft.fft(ar(10, 12), axis=0), atol=1e-10)


def test_pl05_to_the_chunks_of_a_store(relayout: Relayout, tmp_path: Path) -> None:
    # https://github.com/dask/dask/issues/12583
    z: Any = zarr.create_array(tmp_path / "z", shape=(9, 12), chunks=(6, 5), dtype="f8")
    da.store(relayout(fa(ar(9, 12), (3, 2)), (6, 5)), z, lock=False)
    same(z[:], ar(9, 12))


def test_pl07_product_of_mismatched_chunks(relayout: Relayout) -> None:
    # https://github.com/helmholtz-analytics/heat/issues/1739
    x = fa(ar(6, 10), (3, 4))
    y = relayout(x, (2, 10)) @ relayout(relayout(x, (6, 2)).T, (10, 6))
    np.testing.assert_allclose(y.compute(), ar(6, 10) @ ar(6, 10).T, rtol=1e-12)


@pytest.mark.parametrize("axis", [0, 1])
def test_pl08_medians(relayout: Relayout, axis: int) -> None:
    # https://github.com/dask/dask/issues/7780
    y = da.median(relayout(fa(ar(5, 7), (2, 3)), {axis: -1}), axis=axis)
    np.testing.assert_allclose(y.compute(), np.median(ar(5, 7), axis), rtol=1e-12)


def test_st01_whole_shards_written_at_once(relayout: Relayout, tmp_path: Path) -> None:
    # https://github.com/dask/dask/issues/12583
    z: Any = zarr.create_array(
        tmp_path / "z", shape=(12, 9), chunks=(3, 3), shards=(6, 6), dtype="f8"
    )
    da.store(relayout(fa(ar(12, 9), (3, 3)), (6, 6)), z, lock=False)
    same(z[:], ar(12, 9))


def stored(path: Path, array: NDArray[Any], chunks: tuple[int, ...]) -> da.Array:
    z: Any = zarr.create_array(path, shape=array.shape, chunks=chunks, dtype=array.dtype)
    z[:] = array
    x: da.Array = da.from_zarr(z)
    return x


def test_st04_from_one_group_of_a_store_to_another(relayout: Relayout, tmp_path: Path) -> None:
    # https://github.com/cubed-dev/cubed/issues/896
    x = stored(tmp_path / "store" / "a", ar(12, 9), (3, 9))
    z: Any = zarr.create_array(tmp_path / "store" / "b", shape=(12, 9), chunks=(12, 2), dtype="f8")
    da.store(relayout(x, (12, 2)), z, lock=False)
    same(z[:], ar(12, 9))
    same(zarr.open_array(tmp_path / "store" / "a", mode="r")[:], ar(12, 9))


@pytest.mark.ranks(2, 3)
def test_pp05_batch_after_batch_from_three_threads(relayout: Relayout, tmp_path: Path) -> None:
    # https://github.com/dask/distributed/issues/9163
    def batch(number: int) -> None:
        a = ar(12, 9, start=1000 * number)
        x = stored(tmp_path / f"in{number}", a, (3, 9))
        z: Any = zarr.create_array(
            tmp_path / f"out{number}", shape=(12, 9), chunks=(12, 2), dtype="f8"
        )
        da.store(relayout(x, (12, 2)), z, lock=False)
        same(z[:], a)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(batch, range(12)))
