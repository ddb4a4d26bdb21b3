"""Two partials made into one, in place: what merges them as they come.

Dask's functions stack all partials that they merge, and need some times their bytes for that. A
*pair* takes a partial to the total so far, element by element, with the same result but for
rounding, so that a rank has one partial to lay out for the others, not one for each of its chunks.

A pair is for plain partials: arrays of numbers of one shape and type. Others (masked, objects,
unequal) are merged by Dask's functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

#: elements that are merged at a time where that takes several steps: they stay in the cache
BLOCK = 8192


class Pair(Protocol):
    """Makes one partial of two that follow each other."""

    def fits(self, partials: Sequence[Any]) -> bool:
        """Whether these partials can be merged by it."""

    def merge(self, first: Any, second: Any, own: bool) -> Any:
        """Both; ``own``: the first one may be overwritten."""


def paired(pair: Pair, partials: Sequence[Any], own: bool = False) -> Any:
    """Partials that fit, merged in their order; in the first one where it is ``own``."""
    total, second, *others = partials
    total = pair.merge(total, second, own)
    for other in others:
        total = pair.merge(total, other, True)
    return total


@dataclass(frozen=True)
class Elementwise:
    """By a ufunc: sums, products, least and largest elements.

    Attributes
    ----------
    ufunc
        What merges arrays, or each array of dicts of such.
    dtype
        The type that they must have: Dask's functions widen others. None: any.
    """

    ufunc: np.ufunc
    dtype: np.dtype[Any] | None = None

    def fits(self, partials: Sequence[Any]) -> bool:
        """Whether all are alike: arrays, or dicts of arrays."""
        first = partials[0]
        if type(first) is dict:
            return _same_keys(partials) and all(
                self.fits([p[key] for p in partials]) for key in first
            )
        # None in a comparison is float64
        return _alike(partials, "bifucm") and (self.dtype is None or first.dtype == self.dtype)

    def merge(self, first: Any, second: Any, own: bool) -> Any:
        """Both, element by element."""
        if type(first) is dict:
            return {key: self.merge(first[key], second[key], own) for key in first}
        return self.ufunc(first, second, out=first if own else _like(first))


class Moments:
    """Numbers of elements, their totals and their squares' distance from the mean: variances.

    Chan, Golub, LeVeque (1983), Algorithms for computing the sample variance: analysis and
    recommendations, The American Statistician 37 (3).
    """

    def fits(self, partials: Sequence[Any]) -> bool:
        """Whether all have real second moments."""
        return (
            type(partials[0]) is dict
            and partials[0].keys() == {"n", "total", "M"}
            and _same_keys(partials)
            and _alike([p["n"] for p in partials], "iuf")
            and all(_alike([p[key] for p in partials], "f") for key in ("total", "M"))
            and partials[0]["M"].shape == (*partials[0]["n"].shape, 1)
            and partials[0]["M"].dtype == partials[0]["total"].dtype
        )

    def merge(self, first: Any, second: Any, own: bool) -> Any:
        """Both, as if their elements had been one chunk's."""
        found = {
            key: first[key] if own and first[key].flags.c_contiguous else first[key].copy()
            for key in ("n", "total", "M")
        }
        into, other = ([each[key].reshape(-1) for key in found] for each in (found, second))
        for start in range(0, into[0].size, BLOCK):
            (n, total, moment), (m, added, more) = (
                [array[start : start + BLOCK] for array in arrays] for arrays in (into, other)
            )
            full = n.all() and m.all()
            with np.errstate(invalid="ignore", divide="ignore"):  # infinities, no elements
                between = total / n
                between -= added / m
                between *= between
                between *= n
                between *= m
                if not full:
                    between[(n == 0) | (m == 0)] = 0
                n += m
                between /= n if full else np.maximum(n, 1)
            between += more
            moment += between
            total += added
        return found


@dataclass(frozen=True)
class Extremes:
    """Least or largest elements, and where they are: of equal ones the first.

    Attributes
    ----------
    better
        Whether an element takes the place of another: ``numpy.less`` or ``numpy.greater``.
    skips_nan
        Whether NaN is taken only where there is nothing else; it is what wins otherwise.
    """

    better: np.ufunc
    skips_nan: bool

    def fits(self, partials: Sequence[Any]) -> bool:
        """Whether all have numbers and places, and are alike."""
        if not _alike(partials, "V"):
            return False
        dtype = partials[0].dtype
        return dtype.names == ("vals", "arg") and dtype["vals"].kind in "biuf"

    def merge(self, first: Any, second: Any, own: bool) -> Any:
        """The better one of each two elements."""
        old, new = first["vals"], second["vals"]
        taken = self.better(new, old)
        if old.dtype.kind == "f":
            one, other = (old, new) if self.skips_nan else (new, old)
            taken |= np.isnan(one) & ~np.isnan(other)
        if not own:
            first = first.copy()
        np.copyto(first, second, where=taken)
        return first


def _same_keys(partials: Sequence[Any]) -> bool:
    return all(type(p) is dict and p.keys() == partials[0].keys() for p in partials)


def _alike(partials: Sequence[Any], kinds: str) -> bool:
    """Whether all are plain arrays of these kinds, of one shape and type, and not float16."""
    first = partials[0]
    return (
        all(
            type(p) is np.ndarray and p.dtype == first.dtype and p.shape == first.shape
            for p in partials
        )
        and first.dtype.kind in kinds
        and first.dtype != np.float16
    )


def _like(array: NDArray[Any]) -> NDArray[Any]:
    return np.empty_like(array, order="C", subok=False)
