"""Public bug reports as data: reductions of every family, and several of them in one graph.

See ``reports`` for what a :class:`Report` says. Most have no change of chunks: they must come out
right whoever does the reduction. Where Dask alone is wrong (``stock``), the hook is right.
"""

from functools import partial
from typing import Any

import dask.array as da
import dask.base
import numpy as np
from cluster import ar, fa
from reports import GH, Report

GATHERED = "partials that small are gathered by tasks"


def _joined(x: da.Array) -> da.Array:
    def chunk(block: Any, axis: Any, keepdims: bool) -> Any:
        return block

    def aggregate(blocks: Any, axis: Any, keepdims: bool) -> Any:
        def flat(z: Any) -> list[Any]:
            return [v for q in z for v in flat(q)] if isinstance(z, list) else [z]

        text = "".join("".join(v.ravel().tolist()) for v in flat(blocks))
        return np.array([text], dtype=object) if keepdims else np.array(text, dtype=object)

    joined: da.Array = da.reduction(
        x,
        chunk,
        aggregate,
        axis=0,
        dtype=object,
        concatenate=False,
        split_every=2,
        meta=np.array("", dtype=object),
    )
    return joined


COMPLEX = np.array([1 + 2j, -3j, 4, 2 - 2j, 5j])
LARGE = np.array([70000, -70000, 69999, 5], "i4")

#: a reduction starts from what was laid out, so that nothing is laid out for it
LEFT_OUT = "the change of layout is left out"

reduce = partial(Report, "reduce", no_run=GATHERED)
REDUCE = [
    reduce(
        "RD01",
        "uneven blocks: the mean of the block means is 10.5, the mean is 9.5",
        GH + "pytorch/pytorch/issues/162692",
        lambda: fa(ar(5, 4), (3, 4)),
        lambda x: x.mean(),
        ar(5, 4).mean(),
    ),
    reduce(
        "RD02",
        "a rank without rows must contribute weight 0, not nan",
        GH + "pytorch/pytorch/issues/162692",
        lambda: fa(ar(1, 3), (1, 3)),
        lambda x: x.mean(axis=0),
        ar(1, 3).mean(0),
    ),
    reduce(
        "RD04",
        "the split axis moves down by one after the reduction",
        GH + "helmholtz-analytics/heat/issues/730",
        lambda: fa(ar(2, 2), (2, 1)),
        lambda x: x.sum(axis=0),
        ar(2, 2).sum(0),
        chunks=((1, 1),),
    ),
    reduce(
        "RD05",
        "negative axes and tuples",
        GH + "dask/dask/issues/264",
        lambda: fa(ar(4, 5, 6), (3, 2, 4)),
        lambda x: (x.sum(axis=-1), x.sum(axis=(-1, 0)), x.prod(axis=-2)),
        (ar(4, 5, 6).sum(-1), ar(4, 5, 6).sum((-1, 0)), ar(4, 5, 6).prod(-2)),
    ),
    reduce(
        "RD07",
        "user combine that is not commutative (concatenate=False)",
        GH + "dask/dask/issues/8541",
        lambda: fa(np.array(list("abcdefghij")), 3),
        _joined,
        np.array("abcdefghij", dtype=object),
    ),
    reduce(
        "RD08",
        "order-dependent rounding: |err| <= n*eps*sum|x| may be asked, never bits",
        GH + "NVIDIA/nccl/issues/2360",
        lambda: fa(np.array([1e16, 1.0, -1e16, 1.0]), 1),
        lambda x: x.sum(),
        np.float64(2.0),
        atol=4 * 2.3e-16 * 2e16,
    ),
    reduce(
        "RD10",
        "reductions of transposed blocks: partials are not C-contiguous",
        GH + "kunpengcompute/hmpi/pull/4",
        lambda: fa(ar(7, 9), (7, 4)).T,
        lambda x: (x.sum(axis=0), x.max(axis=1)),
        (ar(7, 9).T.sum(0), ar(7, 9).T.max(1)),
    ),
    reduce(
        "RD11",
        "one owner only, odd length: an averaging shortcut dropped the tail",
        GH + "NVIDIA/nccl/issues/1950",
        lambda: fa(np.linspace(-1, 1, 37), 37),
        lambda x: (x.mean(), x.mean(keepdims=True)),
        (np.linspace(-1, 1, 37).mean(), np.linspace(-1, 1, 37).mean(keepdims=True)),
        atol=1e-15,
    ),
    Report(
        "reduce",
        "RD13",
        "reduce straight after a rechunk keeps the new chunks",
        GH + "dask/dask/issues/10226",
        lambda: fa(ar(6, 10), (2, 5)),
        lambda x: x.rechunk((3, 4)).sum(axis=0),
        ar(6, 10).sum(0),
        chunks=((4, 4, 2),),
        no_run=LEFT_OUT,
    ),
    reduce(
        "RD14",
        "ddof must be applied once, at the end",
        GH + "cupy/cupy/pull/693",
        lambda: fa(ar(9, 4), (2, 4)),
        lambda x: (x.var(), x.var(ddof=1), x.std(axis=0, ddof=1)),
        (ar(9, 4).var(), ar(9, 4).var(ddof=1), ar(9, 4).std(0, ddof=1)),
    ),
    reduce(
        "RD23",
        "ddof above the count: numpy clamps the divisor to 0 (inf)",
        GH + "numpy/numpy/pull/3534",
        lambda: fa(np.arange(3.0), 2),
        lambda x: x.var(ddof=4),
        np.float64("inf"),
        stock="fails: nan",
    ),
    reduce(
        "RD16",
        "variance of complex data is real and uses |x|^2",
        GH + "dask/dask/issues/5679",
        lambda: fa(COMPLEX, 2),
        lambda x: (x.var(), x.std(axis=0)),
        (COMPLEX.var(), COMPLEX.std()),
    ),
    reduce(
        "RD18",
        "int32 squares overflow",
        GH + "scikit-hep/awkward/issues/3525",
        lambda: fa(LARGE, 3),
        lambda x: (x.var(), x.std()),
        (LARGE.var(), LARGE.std()),
    ),
    reduce(
        "RD19",
        "reductions built from others",
        GH + "dask/dask/pull/2023",
        lambda: fa(ar(4, 6), (3, 2)),
        lambda x: (da.linalg.norm(x), da.trace(x), da.count_nonzero(x > 5)),
        (np.linalg.norm(ar(4, 6)), np.trace(ar(4, 6)), np.count_nonzero(ar(4, 6) > 5)),
        any_dtype=True,
    ),
    reduce(
        "RD21",
        "reductions that return more than one element per axis",
        GH + "dask/dask/issues/2953",
        lambda: fa(ar(40), 7),
        lambda x: (x.topk(5), x.topk(-3), x.argtopk(4)),
        (np.array([39.0, 38, 37, 36, 35]), np.array([0.0, 1, 2]), np.array([39, 38, 37, 36])),
    ),
    reduce(
        "RD22",
        "0-d input; NumPy turns 0-d results into scalars",
        GH + "dask/dask/issues/494",
        lambda: fa(np.array(3.5), ()),
        lambda x: (x.sum(), (x + x).sum(), (x == x).all(), x.max()),
        (np.float64(3.5), np.float64(7), np.bool_(True), np.float64(3.5)),
    ),
]

EMPTY = ((4, 0, 6),)
FAMILIES = ("sum", "prod", "min", "max", "mean", "std", "any", "all")
HOLES = np.where(ar(6, 4) % 5 == 0, np.nan, ar(6, 4))

reduce_empty = partial(Report, "reduce-empty", no_run=GATHERED)
REDUCE_EMPTY = [
    reduce_empty(
        "RE01",
        "an empty chunk in the middle",
        GH + "dask/dask/issues/2794",
        lambda: fa(ar(10), EMPTY),
        lambda x: tuple(getattr(x, name)() for name in FAMILIES),
        tuple(getattr(ar(10), name)() for name in FAMILIES),
    ),
    reduce_empty(
        "RE02",
        "arg-reductions over an empty chunk",
        GH + "dask/dask/issues/2794",
        lambda: fa(ar(10), EMPTY),
        lambda x: (x.argmax(), x.argmin()),
        (np.int64(9), np.int64(0)),
        stock="fails: ValueError zero-size array to reduction operation",
    ),
    reduce_empty(
        "RE04",
        "max of nothing must raise",
        GH + "dask/dask/pull/9268",
        lambda: fa(np.zeros(0), 0),
        lambda x: x.max(),
        raises=(ValueError,),
    ),
    reduce_empty(
        "RE05",
        "identities of nothing",
        GH + "dask/dask/pull/2316",
        lambda: fa(np.zeros(0), 0),
        lambda x: (x.sum(), x.prod(), x.any(), x.all(), x.mean()),
        (np.float64(0), np.float64(1), np.bool_(False), np.bool_(True), np.float64("nan")),
    ),
    reduce_empty(
        "RE07",
        "empty result: zero-count collective",
        GH + "nv-legate/cupynumeric/pull/727",
        lambda: fa(np.zeros((5, 0)), (2, 0)),
        lambda x: (x.max(axis=0), x.sum(axis=0)),
        (np.zeros(0), np.zeros(0)),
    ),
    reduce_empty(
        "RE08",
        "2-d extrema with empty chunks at both ends of the reduced axis",
        GH + "helmholtz-analytics/heat/issues/369",
        lambda: fa(ar(6, 4), ((0, 6, 0), (4,))),
        lambda x: (x.max(axis=0), x.max(axis=1), x.min()),
        (ar(6, 4).max(0), ar(6, 4).max(1), ar(6, 4).min()),
        stock="fails: ValueError in concatenate",
    ),
    reduce_empty(
        "RE09",
        "running sum across an empty chunk",
        GH + "mars-project/mars/pull/3134",
        lambda: fa(ar(10), EMPTY),
        lambda x: x.cumsum(axis=0),
        ar(10).cumsum(),
        stock="fails: ValueError could not broadcast (0,) with (6,)",
        theirs="a cumulative sum is Dask's, and changes no chunks",
    ),
    reduce_empty(
        "RE10",
        "the same by the tree method, first chunk empty",
        GH + "mars-project/mars/pull/3134",
        lambda: fa(ar(10), ((0, 4, 0, 6),)),
        lambda x: da.cumsum(x, axis=0, method="blelloch"),
        ar(10).cumsum(),
    ),
    reduce_empty(
        "RE12",
        "all -inf: lowest-finite as neutral element would win",
        GH + "sonots/cumo/pull/219",
        lambda: fa(np.array([-np.inf, -np.inf]), ((1, 0, 1),)),
        lambda x: x.max(),
        np.float64("-inf"),
    ),
    reduce_empty(
        "RE14",
        "2-d nan-aware extrema with an empty chunk",
        GH + "dask/dask/issues/8352",
        lambda: fa(HOLES, ((3, 0, 3), (4,))),
        lambda x: (da.nanmax(x, axis=0), da.nanmin(x, axis=1), da.nanmax(x)),
        (np.nanmax(HOLES, axis=0), np.nanmin(HOLES, axis=1), np.nanmax(HOLES)),
        stock="fails: ValueError/AxisError",
    ),
]

ONE_NAN_EACH = np.array([[np.nan, 4.0], [6.0, np.nan]])
TWO_NANS = np.array([1.0, np.nan, 5, np.nan, 9])
DAYS = np.array(["2020-01-01", "NaT", "2021-05-01", "2019-01-01"], "M8[D]")


def _nan_at(place: int) -> da.Array:
    a = np.array([3.0, 1, 7, 2, 9, 4])
    a[place] = np.nan
    return fa(a, 2)


reduce_nan = partial(Report, "reduce-nan", no_run=GATHERED)
REDUCE_NAN = [
    *(
        reduce_nan(
            f"RN01.{place}",
            "NaN must win whichever rank holds it (MPI/NCCL/std::min are not symmetric)",
            GH + "ml-explore/mlx/issues/4072",
            partial(_nan_at, place),
            lambda x: (x.max(), x.min(), x.sum(), x.mean()),
            (np.float64("nan"),) * 4,
        )
        for place in (0, 3, 5)
    ),
    reduce_nan(
        "RN02",
        "all-NaN block inside a good row",
        GH + "dask/dask/issues/773",
        lambda: fa(ONE_NAN_EACH, 1),
        lambda x: (da.nanmax(x, axis=1), da.nanmin(x, axis=0), da.nanmean(x, axis=1)),
        (np.array([4.0, 6]), np.array([6.0, 4]), np.array([4.0, 6])),
    ),
    reduce_nan(
        "RN03",
        "arg version",
        GH + "dask/dask/issues/777",
        lambda: fa(ONE_NAN_EACH, 1),
        lambda x: (da.nanargmax(x, axis=1), da.nanargmin(x, axis=0)),
        (np.array([1, 0]), np.array([1, 0])),
    ),
    reduce_nan(
        "RN05",
        "nothing but NaN: nan, not DBL_MAX",
        GH + "sonots/cumo/pull/219",
        lambda: fa(np.full(4, np.nan), 2),
        lambda x: (da.nanmax(x), da.nansum(x), da.nanmean(x)),
        (np.float64("nan"), np.float64(0), np.float64("nan")),
    ),
    reduce_nan(
        "RN06",
        "arg-reductions return the first NaN",
        GH + "numpy/numpy/issues/5222",
        lambda: fa(TWO_NANS, 2),
        lambda x: (x.argmax(), x.argmin()),
        (np.int64(1), np.int64(1)),
    ),
    reduce_nan(
        "RN08",
        "NaN is true",
        GH + "numpy/numpy/pull/11857",
        lambda: fa(np.array([np.nan, 1.0, 0.0]), 1),
        lambda x: (x[:2].all(), x[:1].any(), x.all()),
        (np.bool_(True), np.bool_(True), np.bool_(False)),
    ),
    reduce_nan(
        "RN09",
        "NaT behaves like NaN; as int64 it is the smallest number and would win min only",
        GH + "numpy/numpy/issues/12797",
        lambda: fa(DAYS, 2),
        lambda x: (x.min(), x.max(), da.nanmin(x)),
        (np.datetime64("NaT", "D"), np.datetime64("NaT", "D"), np.datetime64("2019-01-01", "D")),
    ),
]

#: the first 5 in C order is (1, 4), which is in a later block column
TIES = np.zeros((4, 6))
TIES[1, 4] = TIES[2, 1] = TIES[3, 0] = 5
BACKWARDS = ar(3, 3, 3)[::-1].copy()

reduce_arg = partial(Report, "reduce-arg", no_run=GATHERED)
REDUCE_ARG = [
    reduce_arg(
        "RA01",
        "ties: first in C order of the whole array, not of the chunk grid",
        GH + "dask/dask/pull/41",
        lambda: fa(TIES, (2, 3)),
        lambda x: (x.argmax(), x.argmax(axis=0), x.argmax(axis=1)),
        (TIES.argmax(), TIES.argmax(0), TIES.argmax(1)),
    ),
    reduce_arg(
        "RA02",
        "axis=None while split along axis 1",
        GH + "helmholtz-analytics/heat/issues/441",
        lambda: fa(BACKWARDS, (3, 1, 3)),
        lambda x: (x.argmin(), x.argmax()),
        (BACKWARDS.argmin(), BACKWARDS.argmax()),
    ),
    reduce_arg(
        "RA04",
        "reducing the local indices with MAX gives 1",
        GH + "pytorch/pytorch/pull/173936",
        lambda: fa(np.array([9.0, 2, 1, 7]), 2),
        lambda x: x.argmax(),
        np.int64(0),
    ),
    reduce_arg(
        "RA05",
        "local index without the block offset",
        GH + "helmholtz-analytics/heat/pull/112",
        lambda: fa(np.array([7, 8, 9, 6, 5, 3]), 3),
        lambda x: (x.argmin(), x.argmin(axis=0, keepdims=True)),
        (np.int64(5), np.array([5])),
    ),
    reduce_arg(
        "RA07",
        "3-d, one chunk",
        GH + "dask/dask/issues/984",
        lambda: fa(ar(2, 3, 4), (2, 3, 4)),
        lambda x: x.argmin(axis=0),
        ar(2, 3, 4).argmin(0),
    ),
    reduce_arg(
        "RA08",
        "signed zeros tie",
        GH + "dask/dask/pull/41",
        lambda: fa(np.array([0.0, -0.0, 0.0]), 1),
        lambda x: (x.argmax(), x.argmin()),
        (np.int64(0), np.int64(0)),
    ),
]

FULL_I1 = np.full(300, 127, "i1")
FULL_I8 = np.full(9, 2**40, "i8")
ROOTS = np.sqrt(ar(9, dtype="g"))

reduce_dtype = partial(Report, "reduce-dtype", no_run=GATHERED)
REDUCE_DTYPE = [
    reduce_dtype(
        "RT01",
        "small ints widen before the collective; an explicit dtype wraps as NumPy does",
        GH + "NVIDIA/nccl/issues/422",
        lambda: fa(FULL_I1, 64),
        lambda x: (x.sum(), x.sum(dtype="i1")),
        (FULL_I1.sum(), FULL_I1.sum(dtype="i1")),
    ),
    reduce_dtype(
        "RT02",
        "int64 overflow wraps",
        GH + "dask/dask/issues/2951",
        lambda: fa(FULL_I8, 4),
        lambda x: (x.prod(), x.sum()),
        (FULL_I8.prod(), FULL_I8.sum()),
    ),
    reduce_dtype(
        "RT04",
        "sum of bools counts (3), it is not OR (1); all is not sum",
        GH + "pytorch/pytorch/issues/165923",
        lambda: fa(np.array([True, True, False, True]), 2),
        lambda x: (x.sum(), x.prod(), x.all(), x.any()),
        (np.int64(3), np.int64(0), np.bool_(False), np.bool_(True)),
    ),
    reduce_dtype(
        "RT05",
        "float32 in, float32 out, declared and computed",
        GH + "dask/dask/issues/1394",
        lambda: fa(ar(10, 10, dtype="f4"), (5, 5)),
        lambda x: (x.mean(axis=0), x.sum(), x.var()),
        (ar(10, 10, dtype="f4").mean(0), ar(10, 10, dtype="f4").sum(), ar(100, dtype="f4").var()),
        rtol=1e-5,
    ),
    reduce_dtype(
        "RT07",
        "float16 sum sticks when the step falls below one ulp",
        GH + "numpy/numpy/issues/7933",
        lambda: fa(np.full(5000, 0.5, "f2"), 1000),
        lambda x: x.sum(),
        np.float16(2500),
        rtol=2e-3,
    ),
    reduce_dtype(
        "RT08",
        "naive float32 accumulation drifts by several units",
        GH + "pydata/xarray/issues/1346",
        lambda: fa(np.full(200_000, 291.3, "f4"), 9_999),
        lambda x: x.mean(),
        np.float32(291.3),
        rtol=1e-5,
    ),
    reduce_dtype(
        "RT10",
        "big-endian ints",
        GH + "cupy/cupy/issues/4288",
        lambda: fa(ar(10, dtype=">i4"), 3),
        lambda x: (x.min(), x.max(), x.argmax()),
        (np.int32(0), np.int32(9), np.int64(9)),
        any_dtype=True,
    ),
    reduce_dtype(
        "RT11",
        "object dtype reductions cannot be lowered",
        GH + "dask/dask/issues/3133",
        lambda: fa(np.array([True, False, True, True, np.nan], dtype=object), 2),
        lambda x: x.sum(),
        np.float64("nan"),
        any_dtype=True,
    ),
    reduce_dtype(
        "RT13",
        "timedelta sums keep their unit",
        GH + "pydata/xarray/issues/3409",
        lambda: fa(np.arange(7).astype("m8[s]"), 3),
        lambda x: (x.sum(), x.mean()),
        (np.timedelta64(21, "s"), np.timedelta64(3, "s")),
        stock="fails: TypeError/IndexError",
    ),
    reduce_dtype(
        "RT14",
        "timedelta extrema",
        GH + "numpy/numpy/issues/5222",
        lambda: fa(np.arange(9).astype("m8[s]"), 4),
        lambda x: (x.max(), x.min()),
        (np.timedelta64(8, "s"), np.timedelta64(0, "s")),
    ),
    reduce_dtype(
        "RT16",
        "long double sums",
        GH + "mpi4py/mpi4py/pull/626",
        lambda: fa(ROOTS, 4),
        lambda x: x.sum(),
        ROOTS.sum(),
        rtol=1e-17,
    ),
    reduce_dtype(
        "RT17",
        "uint64 sum wraps; max must not be read as -1",
        GH + "dask/dask/issues/2951",
        lambda: fa(np.array([2**64 - 1, 1, 5], "u8"), 1),
        lambda x: (x.sum(), x.max(), x.min()),
        (np.uint64(5), np.uint64(2**64 - 1), np.uint64(1)),
    ),
    reduce_dtype(
        "RT19",
        "blocks promoted to one dtype before the collective",
        GH + "pytorch/pytorch/issues/150248",
        lambda: da.concatenate([fa(np.array([1, 2], "i4"), 2), fa(np.array([0.5]), 1)]),
        lambda x: (x.sum(), x.max()),
        (np.float64(3.5), np.float64(2)),
    ),
]


def _seven(x: da.Array) -> Any:
    return dask.base.compute(
        x.sum(),
        x.mean(axis=0),
        x.max(axis=1),
        x.argmin(),
        x.std(),
        x.any(),
        x.rechunk((9, 2)).sum(axis=1),
    )


def _many_small(x: da.Array) -> Any:
    kept = []
    for i in range(12):
        kept.append(x.rechunk((9, 1 + i % 8)).sum().compute())
        if i % 3 == 1:
            kept.clear()
    return kept[-1]


GRID = ar(9, 8)

reduce_multi = partial(Report, "reduce-multi", no_run=GATHERED)
REDUCE_MULTI = [
    Report(
        "reduce-multi",
        "RM01",
        "seven collectives in one graph; dict/set order must not decide who goes first",
        GH + "dask/dask/issues/12507",
        lambda: fa(GRID, (4, 3)),
        _seven,
        (
            *(GRID.sum(), GRID.mean(0), GRID.max(1), GRID.argmin()),
            *(GRID.std(), GRID.any(), GRID.sum(1)),
        ),
        no_run=LEFT_OUT,
    ),
    reduce_multi(
        "RM02",
        "reduced values needed again on every rank",
        GH + "pytorch/pytorch/issues/76527",
        lambda: fa(GRID, (4, 3)),
        lambda x: x - x.mean(axis=0, keepdims=True) + x.sum() / x.size,
        GRID - GRID.mean(0) + GRID.mean(),
    ),
    Report(
        "reduce-multi",
        "RM04",
        "many small computes with garbage in between: symmetric memory must be freed in the same "
        "order on all ranks, not by gc",
        GH + "pytorch/pytorch/issues/195500",
        lambda: fa(GRID, (4, 3)),
        _many_small,
        GRID.sum(),
    ),
]
