"""What merges two partials gives what NumPy gives for the whole, and what Dask's functions give."""

from typing import Any

import numpy as np
import pytest
from cluster import ar, same
from dask.array import chunk, reductions
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dask_redist import pairs
from dask_redist.pairs import Elementwise, Extremes, Moments, Pair, paired

MOMENTS = Moments()
MAXIMA = Extremes(np.greater, skips_nan=False)
#: NumPy's function, Dask's for the least or largest of a chunk and for where it is, what is better
ARGS = {
    "argmin": (np.argmin, chunk.min, chunk.argmin, Extremes(np.less, False)),
    "argmax": (np.argmax, chunk.max, chunk.argmax, MAXIMA),
    "nanargmin": (np.nanargmin, chunk.nanmin, reductions._nanargmin, Extremes(np.less, True)),
    "nanargmax": (np.nanargmax, chunk.nanmax, reductions._nanargmax, Extremes(np.greater, True)),
}

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value")


def moments(x: Any, **given: Any) -> Any:
    return reductions.moment_chunk(x, axis=(0,), keepdims=True, **given)


def fields(*dtypes: str) -> Any:
    """Two to seven chunks along axis 0 of a field: the field, and where it is cut."""
    shape = st.tuples(st.integers(2, 12), st.integers(0, 3), st.integers(1, 3))
    arrays = st.tuples(st.sampled_from(dtypes), shape).flatmap(
        lambda x: hnp.arrays(*x, elements=VALUES)
    )
    return arrays.flatmap(
        lambda x: st.tuples(
            st.just(x),
            st.lists(st.integers(1, len(x) - 1), min_size=1, max_size=6, unique=True).map(sorted),
        )
    )


#: few, so that there are ties
VALUES = st.sampled_from([0, 1, 2, 3, 7])


@settings(max_examples=60, deadline=None)
@given(cut=fields("f8", "i4"))
def test_moments_are_those_of_the_whole(cut: Any) -> None:
    array, places = cut
    array = array + (1e7 if array.dtype.kind == "f" else 0)  # squares of these would cancel
    parts = [moments(part) for part in np.split(array, places)]
    kept = [{key: part[key].copy() for key in part} for part in parts]
    assert MOMENTS.fits(parts)
    found = paired(MOMENTS, parts)
    variance = reductions.moment_agg([found], axis=(0,), keepdims=False)
    np.testing.assert_allclose(variance, array.var(axis=0), rtol=1e-7, atol=1e-12)  # means to 1e-16
    assert (found["n"] == len(array)).all()
    for part, before in zip(parts, kept, strict=True):
        for key in part:  # the first one was not given away
            same(part[key], before[key])


def test_moments_of_infinities_are_nan() -> None:
    array = np.array([[1.0, np.inf, np.nan], [2.0, 1.0, 1.0]])
    found = paired(MOMENTS, [moments(row) for row in np.split(array, 2)])
    same(np.isnan(found["M"][0, :, 0]), np.array([False, True, True]))
    assert found["M"][0, 0, 0] == 0.5


@pytest.mark.parametrize("order", "CF")
def test_moments_in_place_are_the_same_bits(monkeypatch: pytest.MonkeyPatch, order: Any) -> None:
    monkeypatch.setattr(pairs, "BLOCK", 4)
    first, second = (moments(np.random.default_rng(k).normal(size=(3, 5, 2))) for k in range(2))
    second = {key: np.array(second[key], order=order) for key in second}
    whole = np.concatenate([np.random.default_rng(k).normal(size=(3, 5, 2)) for k in range(2)])
    found = MOMENTS.merge(first, second, own=False)
    assert not np.shares_memory(found["M"], first["M"])
    np.testing.assert_allclose(found["M"][0, ..., 0] / 6, whole.var(axis=0), rtol=1e-13)
    again = MOMENTS.merge(first, second, own=True)
    for key in ("n", "total", "M"):
        assert again[key] is first[key]
        same(again[key], found[key])


def test_moments_of_no_elements() -> None:
    array = ar(6, 3)
    array[:2, 0] = array[2:4, 1] = array[:, 2] = np.nan
    array[4:, 0] = np.nan
    nan = {"sum": chunk.nansum, "numel": reductions.nannumel}
    parts = [moments(part, **nan) for part in np.split(array, 3)]
    found = paired(MOMENTS, [moments(ar(0, 3)), *parts, moments(ar(0, 3))])
    same(found["n"][0], np.array([2, 4, 0]))
    same(found["M"][0, :2, 0], np.nanvar(array[:, :2], axis=0) * [2, 4])
    same(found["M"][0, 2], np.array([0.0]))


def test_moments_in_another_order() -> None:
    first, second = (moments(np.random.default_rng(k).normal(size=(3, 5, 2))) for k in range(2))
    wanted = MOMENTS.merge(first, second, own=False)
    turned = {key: np.asfortranarray(first[key]) for key in first}
    found = MOMENTS.merge(turned, second, own=True)
    for key in wanted:
        same(found[key], wanted[key])


@pytest.mark.parametrize("name", ARGS)
@settings(max_examples=40, deadline=None)
@given(cut=fields("f8", "i4", "u1"), data=st.data())
def test_extremes_are_those_of_the_whole(name: str, cut: Any, data: st.DataObject) -> None:
    whole, extreme, place, pair = ARGS[name]
    array, places = cut
    if array.dtype.kind == "f" and array.size:
        nan = data.draw(hnp.arrays("?", array.shape))
        array = np.where(nan, np.nan, array)
        if pair.skips_nan:
            array[data.draw(st.integers(0, len(array) - 1))] = 3
    starts = [0, *places]
    chunks = zip(np.split(array, places), starts, strict=True)
    parts = [reductions.arg_chunk(extreme, place, part, (0,), start) for part, start in chunks]
    assert pair.fits(parts)
    kept = [part.copy() for part in parts]
    found = paired(pair, parts)
    if array.size:
        same(found["arg"][0], whole(array, axis=0))
    for part, before in zip(parts, kept, strict=True):
        same(part["arg"], before["arg"])
    for part in parts[1:]:
        assert pair.merge(parts[0], part, own=True) is parts[0]
    same(parts[0]["arg"], found["arg"])


@pytest.mark.parametrize(
    ("pair", "partials"),
    [
        (Elementwise(np.add), [ar(1, 2), ar(1, 3)]),
        (Elementwise(np.add), [ar(1, 2), ar(1, 2, dtype="f4")]),
        (Elementwise(np.add), [np.ma.array(ar(1, 2))] * 2),
        (Elementwise(np.add), [ar(1, 2).astype(object)] * 2),
        (Elementwise(np.add), [ar(1, 2, dtype="f2")] * 2),
        (Elementwise(np.add, np.dtype("f8")), [ar(1, 2, dtype="f4")] * 2),
        (Elementwise(np.add), [{"n": ar(1, 2)}, {"total": ar(1, 2)}]),
        (MOMENTS, [ar(1, 2)] * 2),
        (MOMENTS, [moments(ar(2, 2), order=3)] * 2),
        (MOMENTS, [moments(ar(2, 2) * 1j, implicit_complex_dtype=True)] * 2),
        (MOMENTS, [moments(np.ma.array(ar(2, 2), mask=np.eye(2, dtype=bool)))] * 2),
        (MOMENTS, [moments(ar(2, 2)), moments(ar(2, 3))]),
        (MOMENTS, [moments(ar(2, 2, dtype="i8"), dtype="i8")] * 2),
        (MAXIMA, [ar(1, 2)] * 2),
        (MAXIMA, [np.zeros((1, 2), [("vals", "O"), ("arg", "i8")])] * 2),
        (MAXIMA, [np.zeros((1, 2), [("vals", "M8[s]"), ("arg", "i8")])] * 2),
        (MAXIMA, [np.zeros((1, n), [("vals", "f8"), ("arg", "i8")]) for n in (2, 3)]),
    ],
)
def test_what_is_not_plain_does_not_fit(pair: Pair, partials: list[Any]) -> None:
    assert not pair.fits(partials)
