"""Elements of all types and arrays of all memory layouts.

Plain bytes travel as they are; what is no plain bytes takes Dask's own rechunk, and says so.
"""

import logging
from typing import Any

import dask.array as da
import numpy as np
import pytest
from cluster import Relayout, ar, check, fa, new_runs, same
from distributed import Client
from numpy.typing import NDArray

import dask_redist as dr


# ------------------------------------------------------------------------------ memory layouts
def test_ly01_transposed_blocks(relayout: Relayout) -> None:
    # https://github.com/numba-mpi/numba-mpi/pull/31
    check(relayout(fa(ar(9, 10), (4, 3)).T, ((5, 5), (2, 7))), ar(9, 10).T.copy())


def test_ly02_fortran_order(relayout: Relayout) -> None:
    # https://github.com/numba-mpi/numba-mpi/pull/31
    x = fa(np.asfortranarray(ar(7, 6, 5)), (7, 2, 5))
    check(relayout(x, ((3, 4), (6,), (1, 4))), ar(7, 6, 5))


def test_ly04_stride_0_and_read_only(relayout: Relayout) -> None:
    # https://github.com/dask/dask/pull/2943
    x = da.broadcast_to(fa(ar(1, 6), (1, 4)), (9, 6))
    check(relayout(x, ((2, 7), (6,))), np.broadcast_to(ar(1, 6), (9, 6)).copy())


def test_ly05_blocks_that_are_one_element(relayout: Relayout) -> None:
    # https://github.com/dask/dask/issues/7208
    x = da.full((9, 6), 7, dtype="i2", chunks=(4, 6))
    check(relayout(x, ((9,), (1, 5))), np.full((9, 6), 7, "i2"))


def test_ly07_read_only_source(relayout: Relayout) -> None:
    # https://github.com/dask/distributed/issues/1978
    a = np.frombuffer(ar(40, dtype="i4").tobytes(), "i4").reshape(8, 5)
    assert not a.flags.writeable
    check(relayout(fa(a, (3, 5)), ((8,), (2, 3))), ar(8, 5, dtype="i4"))


def test_ly08_writing_into_a_result_leaves_the_source(relayout: Relayout) -> None:
    # https://github.com/dask/dask/issues/5942
    x = fa(ar(8, 8), (4, 4))
    result = relayout(x, (4, 8)).compute()
    result[...] = -1
    check(relayout(x, (8, 4)), ar(8, 8))


def test_ly10_field_of_a_packed_record(relayout: Relayout) -> None:
    # https://github.com/dask/dask/issues/1482
    records = np.array([(i, i * 0.5) for i in range(10)], dtype=[("a", "i4"), ("b", "f8")])
    check(relayout(fa(records, 3)["b"], ((4, 6),)), np.arange(10) * 0.5)


# ---------------------------------------------------------------------------------------- types
def records(n: int = 11) -> NDArray[Any]:
    a = np.zeros(n, dtype=[("v", "f4", (3,)), ("k", "i2"), ("s", "S3")])
    a["v"] = ar(n, 3, dtype="f4")
    a["k"] = np.arange(n) - 5
    a["s"] = [b"q%d" % i for i in range(n)]
    return a


def durations() -> NDArray[Any]:
    a = (np.arange(15) * 3600).astype("m8[s]").reshape(3, 5)
    a[0, 0] = "NaT"
    return a


def test_dt02_record_with_a_sub_array(relayout: Relayout) -> None:
    # https://github.com/dask/dask/issues/1482
    check(relayout(fa(records(), 4), ((1, 7, 3),)), records())


def test_dt04_durations_keep_their_unit(relayout: Relayout) -> None:
    # https://github.com/dask/distributed/pull/8875
    check(relayout(fa(durations(), (1, 5)), ((3,), (2, 3))), durations())


def test_dt05_booleans(relayout: Relayout) -> None:
    # https://github.com/pytorch/pytorch/issues/24137
    check(relayout(fa(ar(6, 7) % 3 == 0, (4, 3)), ((6,), (1, 6))), ar(6, 7) % 3 == 0)


@pytest.mark.parametrize("dtype", ["f2", "g"])
def test_dt07_dt08_half_and_long_double(relayout: Relayout, dtype: str) -> None:
    # https://github.com/mpi4py/mpi4py/pull/626
    a = np.sqrt(ar(6, 7, dtype=dtype))
    check(relayout(fa(a, (4, 3)), ((6,), (1, 6))), a)


def test_dt10_native_byte_order_spelled_out(relayout: Relayout) -> None:
    # https://github.com/mpi4py/mpi4py/issues/177
    a = ar(9, dtype="<i8").view(np.dtype("i8").newbyteorder("<"))
    check(relayout(fa(a, 4), ((9,),)), ar(9, dtype="i8"))


def test_dt11_strings_of_two_widths(relayout: Relayout) -> None:
    # https://github.com/dask/dask/issues/1050
    x = da.concatenate(
        [fa(np.array(["ab", "cd"]), 2), fa(np.array(["north", "e", "southwest"]), 2)]
    )
    check(relayout(x, ((1, 4),)), np.array(["ab", "cd", "north", "e", "southwest"]))


def test_dt13_opaque_items_of_7_bytes(relayout: Relayout) -> None:
    # https://github.com/dask/dask/issues/4352
    a = np.frombuffer(bytes(range(56)), "V7")
    check(relayout(fa(a, 3), ((5, 3),)), a)


def test_dt14_bits_survive(relayout: Relayout) -> None:
    # https://github.com/openshmem-org/specification/issues/467
    # -0.0, NaN payloads, the smallest denormal, both infinities
    bits = [1 << 63, 0x7FF8000000000001, 0xFFF8DEADBEEF0000, 1, 0x7FF << 52, 0xFFF << 52, 0]
    a = np.array(bits, "u8").view("f8")
    check(relayout(fa(a, 3), ((2, 5),)), a)


@pytest.mark.erring
def test_dt16_blocks_of_another_type_than_declared(relayout: Relayout) -> None:
    # https://github.com/dask/dask/issues/6690
    x = da.map_blocks(
        lambda b: (b * 0.25).astype("f4"), fa(ar(8), 3), dtype="f8", meta=np.empty(0, "f8")
    )
    with pytest.raises(dr.ChunkMismatchError, match=r"dtype float32.*float64"):
        relayout(x, ((8,),)).compute()
    assert relayout.reports()


@pytest.mark.erring
def test_dt17_blocks_shorter_than_declared(relayout: Relayout) -> None:
    # https://github.com/dask/dask/issues/4292 (Dask's own rechunk returns 4 of 6 elements)
    x = da.map_blocks(lambda b: b[:2], fa(ar(6), 3), dtype="f8")
    with pytest.raises(dr.ChunkMismatchError, match=r"shape \(2,\).*shape \(3,\)"):
        relayout(x, ((6,),)).compute()
    assert relayout.reports()


# ------------------------------------------------------------------------- what is no plain bytes
def fallen_back(client: Client, x: da.Array, chunks: Any, caplog: Any) -> da.Array:
    """Dask's own rechunk, taken with a warning; refused where the caller says so."""
    with pytest.raises(dr.RedistError, match='fallback="dask"'):
        dr.redistribute(x, chunks, fallback="error")
    with new_runs(client) as new, caplog.at_level(logging.WARNING, "dask_redist"):
        y = dr.redistribute(x, chunks, fallback="dask")
        assert "Dask's own rechunk" in caplog.text
        assert not new()
    return y


def test_dt01_python_objects(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    # https://github.com/dask/distributed/pull/7425
    a = np.empty((2, 3), dtype=object)
    a[0], a[1] = [None, "x", 3], [(1, 2), {"k": 1}, 2.5]
    check(fallen_back(client, fa(a, (1, 3)), ((2,), (1, 2)), caplog), a)


def test_ma01_the_mask_travels(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    # https://github.com/dask/dask/issues/11296
    a = np.ma.array(ar(8, 5), mask=(ar(8, 5) % 3 == 0))
    check(fallen_back(client, fa(a, (3, 5)), ((8,), (2, 3)), caplog), a)


def test_ma02_some_blocks_masked(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    # https://github.com/dask/dask/issues/5911
    x = da.map_blocks(
        lambda b: np.ma.masked_greater(b, 6) if b[0] > 2 else b,
        fa(ar(9), 3),
        dtype="f8",
        meta=np.ma.array(np.empty(0)),
    )
    y = fallen_back(client, x, ((4, 5),), caplog)
    same(y.compute(), np.ma.masked_greater(ar(9), 6))


def test_ma04_ma05_masked_reductions(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    # https://github.com/dask/dask/issues/11574, https://github.com/dask/dask/pull/2301
    # (no uint8: a worker cannot even receive such a block, the default fill value does not fit)
    small = fa(np.ma.masked_equal(np.arange(10, dtype="i4"), 9), 4)
    assert fallen_back(client, small, ((7, 3),), caplog).max().compute() == 8
    holes = fa(np.ma.array([5.0, -900, 1, 3], mask=[False, True, False, False]), 2)
    y = fallen_back(client, holes, ((1, 3),), caplog)
    assert da.compute(y.mean(), y.sum()) == (3.0, 9.0)


@pytest.mark.erring
def test_masked_blocks_under_a_plain_array_are_refused(relayout: Relayout) -> None:
    x = da.map_blocks(
        lambda b: np.ma.masked_greater(b, 6), fa(ar(9), 3), dtype="f8", meta=np.empty(0)
    )
    with pytest.raises(dr.ChunkMismatchError, match="MaskedArray"):
        relayout(x, ((4, 5),)).compute()
