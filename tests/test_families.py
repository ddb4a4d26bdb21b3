"""Dask's families of reductions: what may be done with which, and the corners put right.

Each corner is one in which Dask alone is wrong; that is checked too, so that a corner which Dask
has mended shows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import dask.array as da
import numpy as np
import pytest
from cluster import ar, fa, same
from dask.array import chunk, reductions
from lowered import close, lowered

from dask_redist import lower
from dask_redist.families import COMMUTATIVE, UFUNCS, family, is_wrong_for_one_chunk
from dask_redist.pairs import Elementwise, Extremes
from dask_redist.reduction import Nothing

pytestmark = pytest.mark.filterwarnings("ignore:::dask", "ignore:::numpy")


# ----------------------------------------------------------------------------- who is of which
def test_families_of_dask_are_known_by_their_function() -> None:
    total = family(partial(chunk.sum, dtype="f8"), None, "f8")
    assert total.is_known
    assert total.commutes
    assert total.pair == Elementwise(np.add, np.dtype("f8"))
    mean = family(partial(reductions.mean_agg, dtype="f8"), reductions.mean_combine, "f8")
    assert mean.is_known
    assert mean.commutes
    arg = family(partial(reductions.arg_agg, chunk.argmax), None, "i8")
    assert arg.is_known
    assert arg.pair == Extremes(np.greater, skips_nan=False)


def test_a_function_of_a_user_is_of_none() -> None:
    def mine(x: Any, axis: Any, keepdims: bool) -> Any:
        return x

    found = family(mine, mine, "f8")
    assert not found.is_known
    assert not found.commutes
    assert found.pair is None
    assert (found.aggregate, found.combine, found.mend(mine)) == (mine, mine, mine)


@pytest.mark.parametrize("function", COMMUTATIVE)
def test_python_objects_keep_their_order(function: Any) -> None:
    assert family(function, None, "f8").commutes
    assert not family(function, None, object).commutes


@pytest.mark.parametrize("function", UFUNCS.keys() - {reductions.mean_agg})
def test_ufuncs_do_what_their_functions_do(function: Any) -> None:
    for a in (ar(4, 3) % 2, np.array([[np.nan, 1.0], [-0.0, np.inf], [0.0, -np.inf]])):
        flags = function in (chunk.any, chunk.all)
        parts = [function(row, axis=0, keepdims=True) for row in np.split(a, len(a))]
        whole, found = function(np.concatenate(parts), axis=0), parts[0]
        for part in parts[1:]:
            with np.errstate(invalid="ignore"):
                found = UFUNCS[function](found, part)
        close(found[0], whole, np.dtype("?" if flags else "f8"))


def test_where_one_chunk_is_wrong_already() -> None:
    variance = partial(reductions.moment_agg, ddof=1)
    assert is_wrong_for_one_chunk(variance, "f8")
    assert not is_wrong_for_one_chunk(partial(reductions.moment_agg, ddof=0), "f8")
    assert is_wrong_for_one_chunk(chunk.sum, "m8[s]")
    assert not is_wrong_for_one_chunk(chunk.sum, "f8")


# ------------------------------------------------------------------------------------- corners
EMPTY, ALONE = ((4, 0, 6),), ((0, 6, 0), (2, 2))
NARROW = np.full(3000, 100.0, "f2")
FAR = (1e7 + ar(30) % 3).astype("f4")
HOLES = np.where(ar(6, 4) % 5 == 0, np.nan, ar(6, 4))
LATER = np.zeros((2, 4))
LATER[0, 2] = LATER[1, 0] = 9
SPANS = np.array([3, 5, 9, 11], "m8[s]")
NO_TIME = np.array([3, "NaT", 9, 11], "m8[s]")
GONE = np.full((4, 3), np.nan)
GONE[:2, 0] = [1, 2]


def of(a: Any, chunks: Any, function: str, **options: Any) -> tuple[Any, Callable[[], Any]]:
    """NumPy's value, and Dask's array."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = getattr(np, function)(a, **options)
    return want, lambda: getattr(da, function)(fa(a, chunks), **options)


#: name: (NumPy's value, Dask's array, how Dask alone is wrong)
CORNERS = {
    "min of an empty chunk": (*of(ar(10), EMPTY, "min"), ""),
    "max of empty chunks in 2-d": (*of(ar(6, 4), ALONE, "max", axis=0), "error"),
    "max along the other axis": (*of(ar(6, 4), ALONE, "max", axis=1), ""),
    "argmax of an empty chunk": (*of(ar(10), EMPTY, "argmax"), "error"),
    "argmin along an axis": (*of(ar(6, 4), ALONE, "argmin", axis=0), "error"),
    "nanmin of an empty chunk": (*of(HOLES, ((3, 0, 3), (4,)), "nanmin", axis=0), "error"),
    "nanmax of an empty chunk": (*of(HOLES, ((3, 0, 3), (4,)), "nanmax"), "error"),
    "nanmin of all NaN": (*of(np.full((4, 2), np.nan), (1, 2), "nanmin", axis=0), ""),
    "float16 mean": (*of(NARROW, 1000, "mean"), "value"),
    "float16 var": (np.float16(0), lambda: fa(NARROW, 1000).var(), "value"),  # NumPy's overflows
    "float32 var, far from 0": (*of(FAR, 7, "var"), "value"),
    "ties": (*of(LATER, (2, 2), "argmax"), "value"),
    "nan ties": (*of(np.where(LATER > 0, np.nan, 0), (2, 2), "argmin"), "value"),
    "timedelta sum": (*of(SPANS, 2, "sum"), "error"),
    "timedelta mean": (*of(SPANS, 2, "mean"), "error"),
    "timedelta mean of one chunk": (*of(SPANS, 4, "mean"), "error"),
    "timedelta mean with NaT": (*of(NO_TIME, 2, "mean"), "error"),
    "timedelta max": (*of(SPANS, 2, "max"), ""),
    "var of an empty chunk": (*of(ar(10), EMPTY, "var"), ""),
    "std in 2-d of empty chunks": (*of(ar(6, 4), ALONE, "std", axis=0), ""),
    "ddof above n": (*of(ar(3), 2, "var", ddof=4), "value"),
    "ddof above n, one chunk": (*of(ar(3), 3, "std", ddof=4), "value"),
    "ddof of n": (*of(ar(3), 2, "var", ddof=3), ""),
    "ddof by column": (*of(ar(3, 2), (2, 1), "std", axis=0, ddof=4), "value"),
    "nanvar of all NaN": (*of(GONE, (1, 3), "nanvar", axis=0), ""),
    "nanvar with ddof": (*of(GONE, (1, 3), "nanvar", axis=0, ddof=2), ""),
    "complex var of an empty chunk": (*of(ar(10) * 1j, EMPTY, "var"), ""),
}


@pytest.mark.parametrize("way", ["reduced", "gathered"])
@pytest.mark.parametrize(("want", "make", "wrong"), CORNERS.values(), ids=CORNERS)
def test_a_corner_is_as_in_numpy(
    want: Any, make: Callable[[], da.Array], wrong: str, way: str
) -> None:
    with lowered(way=way):
        y = make()
    got = y.compute(scheduler="sync")
    assert y.dtype == got.dtype
    close(got, want, np.dtype("f8"))


@pytest.mark.parametrize("name", [name for name, corner in CORNERS.items() if corner[2]])
def test_dask_alone_is_wrong_there(name: str) -> None:
    want, make, wrong = CORNERS[name]
    try:
        got = make().compute(scheduler="sync")
    except Exception:
        assert wrong == "error"
        return
    with pytest.raises(AssertionError):
        close(got, want, np.dtype("f8"))
    assert wrong == "value"


def test_masked_arrays_keep_their_masks() -> None:
    a = np.ma.MaskedArray(ar(6, 4), ar(6, 4) % 3 == 0)
    a[:, 2] = np.ma.masked
    for way in ("reduced", "gathered"):
        for name in ("sum", "mean", "var", "max", "min", "std", "any"):
            with lowered(way=way):
                y = getattr(da, name)(da.from_array(a, chunks=(2, 4)), axis=0)
            got, want = y.compute(scheduler="sync"), getattr(a, name)(axis=0)
            np.testing.assert_array_equal(np.ma.getmaskarray(got), np.ma.getmaskarray(want))
            np.testing.assert_allclose(got.filled(0), want.filled(0), rtol=1e-12)


def test_a_chunk_without_elements_has_no_extreme() -> None:
    mended = family(chunk.max, None, "f8").mend(reductions.chunk_max)
    found = mended(ar(0, 3), axis=(0,), keepdims=True)
    assert isinstance(found, Nothing)
    assert found.empty.shape == (0, 3)
    same(mended(ar(2, 3), axis=(0,), keepdims=True), ar(2, 3)[1:])
    same(mended(ar(2, 0), axis=(0,), keepdims=True), ar(1, 0))


@pytest.mark.parametrize("name", ["var", "nanstd", "mean"])
def test_partials_of_no_elements_are_combined_too(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower, "GATHERED", 1)
    monkeypatch.setattr(lower, "LEAST", 2)
    with lowered(way="gathered"):
        y = getattr(da, name)(fa(ar(10), ((2, 0, 0, 3, 0, 4, 1),)))
    np.testing.assert_allclose(y.compute(scheduler="sync"), getattr(np, name)(ar(10)), rtol=1e-14)


def test_a_count_of_flags_is_a_count() -> None:
    """A sum of booleans by a user's own chunk function: not the "or" of them."""
    x = fa(ar(12), 2)
    for way in ("reduced", "gathered"):
        with lowered(way=way):
            y = da.reduction(x, chunk.any, chunk.sum, axis=0, dtype="i8", split_every=2)
        assert y.compute(scheduler="sync") == 6
