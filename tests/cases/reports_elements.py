"""Public bug reports as data: element types, masks, unknown chunks, reuse, pipelines.

See ``reports`` for what a :class:`Report` says.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import dask.array as da
import dask.base
import numpy as np
import zarr
from cluster import ar, fa
from numpy.typing import NDArray
from reports import GH, Report, to

OBJECTS = np.array([None, "x", 3, (1, 2), {"k": 1}, 2.5], dtype=object).reshape(2, 3)


def _records(n: int = 11) -> NDArray[Any]:
    a = np.zeros(n, dtype=[("v", "f4", (3,)), ("k", "i2"), ("s", "S3")])
    a["v"] = ar(n, 3, dtype="f4")
    a["k"] = np.arange(n) - 5
    a["s"] = [b"q%d" % i for i in range(n)]
    return a


def _durations() -> NDArray[Any]:
    a = (np.arange(15) * 3600).astype("m8[s]").reshape(3, 5)
    a[0, 0] = "NaT"
    return a


BITS = np.array(
    [
        *(0x8000000000000000, 0x7FF8000000000001, 0xFFF8DEADBEEF0000, 0x0000000000000001),
        *(0x7FF0000000000000, 0xFFF0000000000000, 0x3FF0000000000000, 0x0),
    ],
    "u8",
).view("f8")

dtype = partial(Report, "dtype")
DTYPE = [
    dtype(
        "DT01",
        "Python objects cannot travel as raw bytes (pointers!): pickle them or refuse plainly",
        GH + "dask/distributed/pull/7425",
        lambda: fa(OBJECTS, (1, 3)),
        to((2,), (1, 2)),
        OBJECTS,
        no_run="objects are no plain bytes",
    ),
    dtype(
        "DT02",
        "packed record with a sub-array field, 17-byte items",
        GH + "dask/dask/issues/1482",
        lambda: fa(_records(), 4),
        to((1, 7, 3)),
        _records(),
    ),
    dtype(
        "DT04",
        "timedelta64; the unit must survive",
        GH + "dask/distributed/pull/8875",
        lambda: fa(_durations(), (1, 5)),
        to((3,), (2, 3)),
        _durations(),
    ),
    dtype(
        "DT05",
        "bool has no native type in NCCL",
        GH + "pytorch/pytorch/issues/24137",
        lambda: fa(ar(6, 7) % 3 == 0, (4, 3)),
        to((6,), (1, 6)),
        ar(6, 7) % 3 == 0,
    ),
    dtype(
        "DT07",
        "float16 is not an MPI type before MPI 4.1 / needs opaque bytes",
        GH + "mpi4py/mpi4py/pull/626",
        lambda: fa(ar(6, 7, dtype="f2"), (4, 3)),
        to((6,), (1, 6)),
        ar(6, 7, dtype="f2"),
    ),
    dtype(
        "DT08",
        "long double (16-byte items, 10 used)",
        GH + "mpi4py/mpi4py/pull/626",
        lambda: fa(np.sqrt(ar(6, 7, dtype="g")), (4, 3)),
        to((6,), (1, 6)),
        np.sqrt(ar(6, 7, dtype="g")),
    ),
    dtype(
        "DT10",
        "explicit native byte order in the format string was a KeyError",
        GH + "mpi4py/mpi4py/issues/177",
        lambda: fa(ar(9, dtype="<i8").view(np.dtype("i8").newbyteorder("<")), 4),
        to((9,)),
        ar(9, dtype="i8"),
    ),
    dtype(
        "DT11",
        "string pieces of different item size: must not be cut to the first one's width",
        GH + "dask/dask/issues/1050",
        lambda: da.concatenate(
            [fa(np.array(["ab", "cd"]), 2), fa(np.array(["north", "e", "southwest"]), 2)]
        ),
        to((1, 4)),
        np.array(["ab", "cd", "north", "e", "southwest"]),
    ),
    dtype(
        "DT13",
        "opaque 7-byte void items",
        GH + "dask/dask/issues/4352",
        lambda: fa(np.frombuffer(bytes(range(56)), "V7"), 3),
        to((5, 3)),
        np.frombuffer(bytes(range(56)), "V7"),
    ),
    dtype(
        "DT14",
        "bits must survive: -0.0, NaN payloads, denormals, infinities (no summing into zeros)",
        GH + "openshmem-org/specification/issues/467",
        lambda: fa(BITS, 3),
        to((2, 6)),
        BITS,
    ),
    dtype(
        "DT16",
        "declared float64, blocks really float32: receive sizes computed from the declared dtype "
        "read garbage; convert or raise",
        GH + "dask/dask/issues/6690",
        lambda: da.map_blocks(
            lambda b: (b * 0.25).astype("f4"),
            fa(ar(8, dtype="f8"), 3),
            dtype="f8",
            meta=np.empty((0,), "f8"),
        ),
        to((8,)),
        ar(8) * 0.25,
        any_dtype=True,
        refused=TypeError,
    ),
    dtype(
        "DT17",
        "blocks are shorter than their declared chunks (4 values really): a clear error, never a "
        "hang or stale memory",
        GH + "dask/dask/issues/4292",
        lambda: da.map_blocks(lambda b: b[:2], fa(ar(6), 3), dtype="f8"),
        to((6,)),
        raises=(ValueError, RuntimeError, TypeError, AssertionError),
        stock="no error: returns the 4 real values under shape (6,)",
    ),
]

MASKED_2D = np.ma.array(ar(8, 5), mask=(ar(8, 5) % 3 == 0))

masked = partial(Report, "masked")
MASKED = [
    masked(
        "MA01",
        "mask must travel with the data",
        GH + "dask/dask/issues/11296",
        lambda: fa(MASKED_2D, (3, 5)),
        to((8,), (2, 3)),
        MASKED_2D,
        no_run="masked chunks are no plain bytes",
    ),
    masked(
        "MA02",
        "some blocks plain, some masked, some with an all-False mask",
        GH + "dask/dask/issues/5911",
        lambda: da.map_blocks(
            lambda b: np.ma.masked_greater(b, 6) if b[0] > 2 else b,
            fa(ar(9), 3),
            dtype="f8",
            meta=np.ma.array(np.empty((0,))),
        ),
        to((4, 5)),
        np.ma.masked_greater(ar(9), 6),
        no_run="masked chunks are no plain bytes",
    ),
    masked(
        "MA04",
        "uint8 with a mask: NumPy 2's default fill value does not fit",
        GH + "dask/dask/issues/11574",
        lambda: fa(np.ma.masked_equal(np.arange(10, dtype="u1"), 9), 4),
        lambda x: x.max(),
        np.uint8(8),
        no_run="Dask reduces it",
        in_process="Dask cannot send such a chunk to another worker, and waits for ever",
    ),
    masked(
        "MA05",
        "masked values must not enter the sum or the count",
        GH + "dask/dask/pull/2301",
        lambda: fa(np.ma.array([5.0, -900, 1, 3], mask=[False, True, False, False]), 2),
        lambda x: (x.mean(), x.sum()),
        (np.float64(3.0), np.float64(9.0)),
        no_run="Dask reduces it",
    ),
]


def _unknown_rows() -> da.Array:
    x = fa(ar(12, 6), (4, 6))
    rows: da.Array = x[x[:, 0] > 20]
    return rows


def _above_five() -> da.Array:
    x = fa(ar(13), ((4, 4, 4, 1),))
    above: da.Array = x[x > 5]
    return above


unknown = partial(Report, "unknown")
UNKNOWN = [
    unknown(
        "UN01",
        "unknown lengths on an axis that is not rechunked: allowed",
        GH + "dask/dask/pull/2251",
        _unknown_rows,
        lambda x: x.rechunk({1: 3}),
        ar(12, 6)[ar(12, 6)[:, 0] > 20],
        no_run="unknown chunk sizes",
    ),
    unknown(
        "UN02",
        "rechunk along the unknown axis: clear error at graph time",
        GH + "dask/dask/issues/10028",
        _unknown_rows,
        lambda x: x.rechunk({0: 3}),
        raises=(ValueError,),
        no_run="it raises",
    ),
    unknown(
        "UN04",
        "sizes found late, first chunk turns out empty",
        GH + "dask/dask/pull/5312",
        lambda: _above_five().compute_chunk_sizes(),
        to((3, 4)),
        ar(13)[6:],
    ),
    unknown(
        "UN05",
        "reductions over unknown, partly empty chunks",
        GH + "dask/dask/issues/3906",
        _above_five,
        lambda x: (x.min(), x.max(), x.sum(), x.std()),
        (np.float64(6), np.float64(12), np.float64(63), np.std(ar(13)[6:])),
        no_run="Dask reduces it",
    ),
    unknown(
        "UN07",
        "a fresh nan object is not np.nan: same layout must still be recognised",
        GH + "dask/dask/issues/10026",
        _unknown_rows,
        lambda x: x.rechunk(((float("nan"),) * 3, (6,))).name == x.name,
        True,
        any_dtype=True,
        no_run="nothing is computed",
    ),
]


def _twice(x: da.Array) -> Any:
    y = x.rechunk((10, 4))
    return y.compute(), y.compute(), y.sum().compute()


def _same_name(_: da.Array) -> Any:
    a = da.from_array(ar(4, 6), chunks=(1, 6), name="src")
    first = a.rechunk((4, 3)).compute()
    del a
    b = da.from_array(ar(6, 6, start=100), chunks=(2, 6), name="src")
    return first, b.rechunk((6, 3)).compute()


def _four_threads(x: da.Array) -> Any:
    ys = [x.rechunk((10, 4)), x.rechunk((2, 12)), x.sum(axis=1), x.rechunk((5, 3)).max(axis=0)]
    with ThreadPoolExecutor(4) as pool:
        return tuple(pool.map(lambda y: y.compute(), ys))


reuse = partial(Report, "reuse")
REUSE = [
    reuse(
        "RU01",
        "one compute, several collectives off one input: every rank must enter them in one order",
        GH + "dask/distributed/issues/8424",
        lambda: fa(ar(10, 12), (3, 12)),
        lambda x: dask.base.compute(
            x.rechunk((10, 4)), x.rechunk((5, 6)), x.sum(axis=0), x.rechunk((10, 4)).max()
        ),
        (ar(10, 12), ar(10, 12), ar(10, 12).sum(0), ar(10, 12).max()),
    ),
    reuse(
        "RU02",
        "the same rechunk executed again after it was forgotten",
        GH + "dask/distributed/issues/7452",
        lambda: fa(ar(10, 12), (3, 12)),
        _twice,
        (ar(10, 12), ar(10, 12), ar(10, 12).sum()),
    ),
    reuse(
        "RU04",
        "two different arrays under one name: a store keyed by name serves stale blocks",
        GH + "dask/dask/issues/6036",
        lambda: fa(ar(2), 2),
        _same_name,
        (ar(4, 6), ar(6, 6, start=100)),
    ),
    reuse(
        "RU05",
        "four client threads compute at once: their collectives must be serialised",
        GH + "mpi4py/mpi4py/issues/784",
        lambda: fa(ar(10, 12), (3, 12)),
        _four_threads,
        (ar(10, 12), ar(10, 12), ar(10, 12).sum(1), ar(10, 12).max(0)),
    ),
    reuse(
        "RU07",
        "slice after rechunk: part of the output is wanted, other ranks may have nothing to do",
        GH + "dask/distributed/issues/8326",
        lambda: fa(ar(20, 20), ((1,) + (2,) * 9 + (1,),) * 2),
        lambda x: x.rechunk(2)[:, :3],
        ar(20, 20)[:, :3].copy(),
    ),
    reuse(
        "RU08",
        "one output chunk kept by culling, all input chunks needed",
        GH + "dask/dask/issues/11163",
        lambda: fa(ar(20, 21), (1, 21)),
        lambda x: x.rechunk((20, 4))[..., 17:18],
        ar(20, 21)[..., 17:18].copy(),
    ),
    reuse(
        "RU10",
        "contraction over everything, rechunk inside, 0-d result",
        GH + "dask/dask/issues/5472",
        lambda: (fa(ar(4, 5), (4, 5)), fa(ar(4, 5), (2, 5))),
        lambda xs: da.tensordot(*xs, axes=2),
        np.tensordot(ar(4, 5), ar(4, 5), axes=2),
    ),
]


def _stored(x: da.Array) -> NDArray[Any]:
    with TemporaryDirectory() as folder:
        z: Any = zarr.create_array(Path(folder) / "z", shape=x.shape, chunks=(6, 5), dtype=x.dtype)
        da.store(x.rechunk((6, 5)), z, lock=False)
        written: NDArray[Any] = z[:]
        return written


def _around_fft(x: da.Array) -> da.Array:
    back: da.Array = da.fft.ifft(da.fft.fft(x.rechunk((10, 4)), axis=0), axis=0)
    relaid: da.Array = back.real.rechunk((3, 12))
    return relaid


pipeline = partial(Report, "pipeline")
PIPELINE = [
    pipeline(
        "PL01",
        "depth larger than the chunk forces a rechunk inside map_overlap",
        GH + "dask/dask/issues/6688",
        lambda: fa(ar(12, 9), (1, 9)),
        lambda x: x.map_overlap(lambda b: b + 0, depth=(2, 0), boundary="reflect"),
        ar(12, 9),
    ),
    pipeline(
        "PL02",
        "rechunk, then halo exchange, last chunk short",
        GH + "dask/dask/issues/6597",
        lambda: fa(ar(11), 5),
        lambda x: x.rechunk(4).map_overlap(
            lambda b: np.convolve(b, [1, 1, 1], "same"), depth=1, boundary=0
        ),
        np.convolve(ar(11), [1, 1, 1], "same"),
    ),
    pipeline(
        "PL04",
        "transpose-style round trip around an FFT",
        GH + "mpi4py/mpi4py-fft/issues/43",
        lambda: fa(ar(10, 12), (3, 12)),
        _around_fft,
        ar(10, 12),
        atol=1e-10,
    ),
    pipeline(
        "PL05",
        "rechunk to the store's chunks before a parallel write",
        GH + "dask/dask/issues/12583",
        lambda: fa(ar(9, 12), (3, 2)),
        _stored,
        ar(9, 12),
    ),
    pipeline(
        "PL07",
        "matmul on mismatched chunks",
        GH + "helmholtz-analytics/heat/issues/1739",
        lambda: fa(ar(6, 10), (3, 4)),
        lambda x: x.rechunk((2, 10)) @ x.rechunk((6, 2)).T,
        ar(6, 10) @ ar(6, 10).T,
        rtol=1e-12,
    ),
    pipeline(
        "PL08",
        "median rechunks along its axis",
        GH + "dask/dask/issues/7780",
        lambda: fa(ar(5, 7), (2, 3)),
        lambda x: (da.median(x, axis=0), da.median(x, axis=1)),
        (np.median(ar(5, 7), 0), np.median(ar(5, 7), 1)),
        rtol=1e-12,
    ),
]
