"""Dask's families of reductions: which may be cut and combined how, and their functions put right.

The functions of chunk, combine and aggregate are Dask's own. Some are wrong in corners, and are
replaced there:

- min, max and their like, and argmin and argmax, of a chunk without elements;
- ties of argmin and argmax over several axes: the first in the array, not in the first chunk;
- mean of float16 and var of float16 and float32, which overflow or cancel: they are summed in
  float64;
- sum and mean of timedeltas;
- var of chunks without elements, or of which all are NaN, and with ``ddof`` above the number of
  elements: NumPy's inf.

One corner stays Dask's: nanvar and nanstd of integers and booleans with ``ddof`` not below the
number of elements are nan, where NumPy (which looks for no NaN in them, and takes var) has inf.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from dask.array import chunk, reductions, routines
from dask.array.core import _concatenate2

from dask_redist.pairs import Elementwise, Extremes, Moments, Pair
from dask_redist.reduction import Nothing

Function = Callable[..., Any]

#: reductions of which partials may be combined in any order
COMMUTATIVE = (
    *(chunk.sum, chunk.prod, chunk.any, chunk.all, chunk.min, chunk.max, np.sum),
    reductions.mean_agg,  # two sums
)
#: reductions of which each element depends on the same place of all partials
ELEMENTWISE = (
    *COMMUTATIVE,
    *(reductions.moment_agg, reductions.arg_agg, reductions.nanarg_agg),
    *(reductions._nanmin_skip, reductions._nanmax_skip, routines._chunk_sum),
    *(chunk.topk_aggregate, chunk.argtopk_aggregate),
)
EXTREMES = {
    reductions.chunk_min: np.min,
    reductions.chunk_max: np.max,
    reductions._nanmin_skip: np.nanmin,
    reductions._nanmax_skip: np.nanmax,
}
#: what merges plain partials of a family, element by element, with the same results
UFUNCS = {
    chunk.sum: np.add,
    np.sum: np.add,
    chunk.prod: np.multiply,
    chunk.min: np.minimum,
    chunk.max: np.maximum,
    chunk.any: np.logical_or,
    chunk.all: np.logical_and,
    reductions.mean_agg: np.add,
}
#: what merges extremes and their places, by the function that finds them
BETTER = {
    chunk.argmin: Extremes(np.less, skips_nan=False),
    chunk.argmax: Extremes(np.greater, skips_nan=False),
    reductions._nanargmin: Extremes(np.less, skips_nan=True),
    reductions._nanargmax: Extremes(np.greater, skips_nan=True),
}
#: of sums and products, the ones whose results are wider than narrow partials
WIDENING = (chunk.sum, np.sum, chunk.prod)
NARROW = ("float16", "float32")


@dataclass(frozen=True)
class Family:
    """How a reduction is made.

    Attributes
    ----------
    aggregate, combine
        Dask's functions, put right.
    mend
        What makes a right one of the function for chunks.
    pair
        What merges plain partials one after the other.
    is_known
        Whether it is one of Dask's own, not a user's.
    commutes
        Whether partials may be combined in any order.
    """

    aggregate: Function
    combine: Function | None
    mend: Callable[[Function], Function]
    pair: Pair | None
    is_known: bool
    commutes: bool


def family(aggregate: Function, combine: Function | None, dtype: Any) -> Family:
    """The family of a reduction, by the functions that Dask has for it."""
    base, dtype = _base(aggregate), np.dtype(dtype)
    known = _is_one_of(base, ELEMENTWISE) and (combine is None or is_dasks(combine))
    if not known:
        return Family(aggregate, combine, _as_it_is, None, False, False)
    commutes = _is_one_of(base, COMMUTATIVE) and dtype.kind != "O"
    mend: Callable[[Function], Function] = _extreme
    pair = _pair(aggregate, dtype)
    if _is_one_of(_base(combine), EXTREMES):
        combine = partial(_merge_extremes, EXTREMES[_base(combine)])
    if base in (reductions.arg_agg, reductions.nanarg_agg):
        aggregate, combine, mend = _FirstTie(aggregate), _FirstTie(combine), _arg
    elif base is reductions.mean_agg and dtype.kind == "m":
        aggregate, combine, mend = _timedelta_mean, _timedelta_totals, _timedelta_chunk
    elif base in (chunk.sum, np.sum) and dtype.kind == "m":
        aggregate, combine, mend = _without_dtype(aggregate), None, _without_dtype
    elif base in EXTREMES:
        aggregate = combine = partial(_merge_extremes, EXTREMES[base])
    elif base is reductions.moment_agg and isinstance(aggregate, partial):
        aggregate, combine = _Variance(aggregate), _combined_moments(combine)
        if dtype.name in NARROW:
            aggregate, mend = _Narrowed(aggregate, dtype), _wide
    elif base is reductions.mean_agg and dtype == np.float16:
        aggregate, mend = _Narrowed(aggregate, dtype), _wide
    return Family(aggregate, combine, mend, pair, known, commutes)


def _pair(aggregate: Any, dtype: np.dtype[Any]) -> Pair | None:
    base = _base(aggregate)
    if base in UFUNCS:
        return Elementwise(UFUNCS[base], dtype if base in WIDENING else None)
    if base is reductions.moment_agg:
        return Moments()
    if base in (reductions.arg_agg, reductions.nanarg_agg):
        # Callables of users need not be hashable.
        found = (pair for function, pair in BETTER.items() if function is aggregate.args[0])
        return next(found, None)
    return None


def is_wrong_for_one_chunk(aggregate: Function, dtype: Any) -> bool:
    """Whether Dask's own functions are wrong even where there is nothing to merge."""
    if np.dtype(dtype).kind == "m":
        return True
    ddof = getattr(aggregate, "keywords", {}).get("ddof", 0)
    return _base(aggregate) is reductions.moment_agg and ddof > 0


def is_dasks(function: Any) -> bool:
    """Whether a function is one of Dask's own."""
    base = _base(function)
    module = getattr(base, "__module__", "") or ""
    own = (*COMMUTATIVE, chunk.nansum, chunk.nanprod)
    return module.startswith("dask.array.") or _is_one_of(base, own)


def _is_one_of(function: Any, functions: Iterable[Any]) -> bool:
    # Callables of users need not be hashable, nor comparable.
    return any(function is one for one in functions)


def _base(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return function


# ----------------------------------------------------------------------------- the same bits
def as_if_moved(function: Function, *args: Any, **kwargs: Any) -> Any:
    """The function of arrays in one piece and aligned, wherever they come from.

    NumPy adds in another order where they are not, and Dask lays what it moved to another worker
    anywhere in a message.
    """
    return function(*map(_in_one_piece, args), **kwargs)


def _in_one_piece(x: Any) -> Any:
    if type(x) is not np.ndarray or (x.flags.aligned and x.flags.forc):
        return x
    return x.copy()


def _as_it_is(function: Function) -> Function:
    return function


# ------------------------------------------------------------------- chunks without elements
def _extreme(function: Function) -> Function:
    base = _base(function)
    extreme = EXTREMES[base] if _is_one_of(base, EXTREMES) else None
    return function if extreme is None else partial(_extreme_chunk, extreme)


def _extreme_chunk(
    function: Function, x: Any, axis: Any, keepdims: bool, computing_meta: bool = False
) -> Any:
    if any(x.shape[a] == 0 for a in axis):
        return Nothing(_without_elements(x, axis))
    return _merge_extremes(function, x, axis, keepdims)


def _merge_extremes(function: Function, x: Any, axis: Any, keepdims: bool) -> Any:
    with warnings.catch_warnings():
        if function in (np.nanmin, np.nanmax):
            warnings.filterwarnings("ignore", "All-NaN slice encountered", RuntimeWarning)
        return function(x, axis=axis, keepdims=keepdims)


def _without_elements(x: Any, axis: Any) -> Any:
    return x[tuple(slice(0, 0) if a in axis else slice(None) for a in range(x.ndim))]


def _arg(function: Function) -> Function:
    return partial(_arg_chunk, function)


def _arg_chunk(function: Function, x: Any, axis: Any, offset: Any) -> Any:
    if any(x.shape[a] == 0 for a in axis):
        empty = _without_elements(x, axis)
        return Nothing(np.empty(empty.shape, [("vals", x.dtype), ("arg", np.intp)]))
    return function(x, axis, offset)


# ------------------------------------------------------------------------------------- ties
class _FirstTie:
    """Of equal extremes in several chunks, the first in the array."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, data: Any, axis: Any, keepdims: bool = False) -> Any:
        if data.ndim > 1 and len(axis) == data.ndim and data.size > 1:
            argfunc = self.function.args[0]
            values = data["vals"].ravel()
            best = values[argfunc(values, axis=None)]
            same = (values == best) | ((values != values) & (best != best))
            places = np.flatnonzero(same)
            first = places[np.argmin(data["arg"].ravel()[places])]
            data = data.ravel()[first].reshape((1,) * data.ndim)
        return self.function(data, axis=axis, keepdims=keepdims)


# ----------------------------------------------------------------------------- narrow floats
def _wide(function: Function) -> Function:
    return partial(function, dtype=np.dtype("f8"))


class _Narrowed:
    """Merges in float64 and gives what NumPy would have."""

    def __init__(self, function: Function, dtype: np.dtype[Any]) -> None:
        self.function, self.dtype = function, dtype

    def __call__(self, pairs: Any, **kwargs: Any) -> Any:
        with np.errstate(over="ignore"):
            return self.function(pairs, **kwargs | {"dtype": np.dtype("f8")}).astype(self.dtype)


class _Variance:
    """Dask's variance; where ``ddof`` is not below the number of elements, NumPy's."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, pairs: Any, axis: Any, keepdims: bool, **kwargs: Any) -> Any:
        found = self.function(pairs, axis=axis, keepdims=keepdims, **kwargs)
        ddof = self.function.keywords.get("ddof", 0)
        if kwargs.get("computing_meta") or not ddof or np.ma.isMaskedArray(found):
            return found
        n = _concatenate2(_each(pairs, "n"), axes=list(axis)).sum(axis=axis, keepdims=keepdims)
        if np.all(n > ddof):
            return found
        if "sum" in self.function.keywords:  # nanvar
            return np.where(n <= ddof, np.nan, found).astype(found.dtype)[()]
        plain = self.function(pairs, axis=axis, keepdims=keepdims, **kwargs | {"ddof": 0})
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(n < ddof, plain / 0.0, found).astype(found.dtype)[()]


def _combined_moments(function: Any) -> Function:
    order = function.keywords.get("order", 2) if isinstance(function, partial) else 2
    return partial(_combine_moments, order)


def _combine_moments(order: int, pairs: Any, axis: Any, keepdims: bool = True, **_: Any) -> Any:
    """Dask's, but for partials of no elements.

    Pebay (2008), Formulas for robust, one-pass parallel computation of covariances and
    arbitrary-order statistical moments, SAND2008-6212.
    """
    ns, totals, ms = (_concatenate2(_each(pairs, k), axes=list(axis)) for k in ("n", "total", "M"))
    n, total = (each.sum(axis=axis, keepdims=True) for each in (ns, totals))
    with np.errstate(divide="ignore", invalid="ignore"):
        from_mean = totals / ns - total / n
    if np.iscomplexobj(from_mean):
        from_mean = np.abs(from_mean)
    where: Any = np.ma.where if np.ma.isMaskedArray(ns) else np.where
    from_mean = where(ns == 0, 0, from_mean)
    moments = [
        reductions._moment_helper(ms, ns, from_mean, o, np.sum, axis, {"keepdims": True})
        for o in range(2, order + 1)
    ]
    return {"total": total, "n": n, "M": np.stack(moments, axis=-1)}


# -------------------------------------------------------------------------------- timedeltas
def _without_dtype(function: Any) -> Function:
    if not isinstance(function, partial):
        return function  # type: ignore[no-any-return]
    keywords = {k: v for k, v in function.keywords.items() if k != "dtype"}
    return partial(function.func, *function.args, **keywords)


def _timedelta_chunk(function: Function) -> Function:
    return _timedelta_partial


def _timedelta_partial(x: Any, axis: Any, keepdims: bool, computing_meta: bool = False) -> Any:
    return {
        "n": reductions.numel(x, axis=axis, keepdims=keepdims, dtype=np.int64),
        "total": np.sum(x, axis=axis, keepdims=keepdims),
    }


def _timedelta_totals(pairs: Any, axis: Any, keepdims: bool, **kwargs: Any) -> Any:
    return {
        name: _concatenate2(_each(pairs, name), axes=list(axis)).sum(axis=axis, keepdims=keepdims)
        for name in ("n", "total")
    }


def _timedelta_mean(pairs: Any, axis: Any, keepdims: bool, **kwargs: Any) -> Any:
    sums = _timedelta_totals(pairs, axis, keepdims)
    with np.errstate(divide="ignore", invalid="ignore"):
        return sums["total"] / sums["n"]


def _each(pairs: Any, name: str) -> Any:
    """One member of each of nested partials."""
    return [_each(pair, name) for pair in pairs] if isinstance(pairs, list) else pairs[name]
