"""Reductions of Dask as the package lowers them, without a cluster; NumPy says what is right.

A lowered graph can be computed in process, by any of Dask's schedulers, or by ranks of this process
(``LocalRanks``): its contributions anywhere, in any order, then the run that its fences stand for.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
import pytest
from dask.local import get_sync
from hypothesis import strategies as st
from numpy.typing import NDArray
from reduce_ranks import LocalRanks

from dask_redist import lower
from dask_redist.connect import Ranks
from dask_redist.ranks import Seat
from dask_redist.reducehook import ReduceHook
from dask_redist.reducing import ReduceTask

#: functions that are there in NumPy and in Dask, and what they take beside the axis
PLAIN = ("sum", "prod", "min", "max", "any", "all", "mean", "ptp", "nansum", "nanprod")
SPREAD = ("var", "std", "nanvar", "nanstd")
EXTREMES = ("nanmin", "nanmax", "nanmean")
ARGS = ("argmin", "argmax", "nanargmin", "nanargmax")
FUNCTIONS = (*PLAIN, *SPREAD, *EXTREMES, *ARGS)
DTYPES = ("f8", "f4", "f2", "i4", "u1", "?", "c16", "m8[s]", "M8[s]", "i2", "u8", "c8")
RTOL = {"f2": 2e-2, "f4": 1e-5, "c8": 1e-5}


@contextmanager
def lowered(
    ranks: int = 3, deterministic: bool = False, way: str = "", fallback: str = "dask"
) -> Iterator[None]:
    """Dask's reductions are lowered here; ``way``: all of them are "reduced", or "gathered"."""
    hook = ReduceHook(lambda: (fallback, deterministic), lambda: ranks_of_4_gib(ranks))
    with pytest.MonkeyPatch.context() as patch:
        force(patch, way)
        hook.put_in()
        try:
            yield
        finally:
            hook.take_out()


def ranks_of_4_gib(n: int) -> Ranks:
    """Ranks that are nowhere."""
    facts: list[Any] = ["w", "here", "tcp://here:1", None, None, 4 << 30, 1]
    return Ranks(tuple(Seat(number, *facts) for number in range(n)), {})


def force(patch: pytest.MonkeyPatch, way: str) -> None:
    """Have all reductions made this one of the two ways; empty: as they are."""
    if way:
        reduced = way == "reduced"
        patch.setattr(lower._Lowering, "is_gathered", not reduced)


class Case(NamedTuple):
    """One call, as NumPy and Dask know it."""

    array: NDArray[Any]
    chunks: tuple[tuple[int, ...], ...]
    function: str
    axis: Any
    options: dict[str, Any]

    def want(self) -> Any:
        """NumPy's result, or its error."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return getattr(np, self.function)(self.array, axis=self.axis, **self.options)
        except Exception as error:
            return error

    def lazy(self, **more: Any) -> da.Array:
        x = da.from_array(self.array, chunks=self.chunks)
        y: da.Array = getattr(da, self.function)(x, axis=self.axis, **self.options, **more)
        return y


def sizes(length: int) -> st.SearchStrategy[tuple[int, ...]]:
    """How an axis may be cut: chunks of any size, none at all too."""
    cuts = st.lists(st.integers(0, length), max_size=4).map(sorted)
    return cuts.map(lambda c: tuple(b - a for a, b in zip([0, *c], [*c, length], strict=True)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any call on any array in any chunks; floats may have NaN and infinities."""
    shape = draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    array = rng.integers(0, 5, shape).astype(dtype if dtype[0] not in "c" else "f8")
    if dtype[0] == "c":
        array = (array + 1j * rng.integers(0, 5, shape)).astype(dtype)
    if dtype[0] in "fc":
        for value in draw(st.lists(st.sampled_from([np.nan, np.inf, -np.inf]), max_size=2)):
            array[rng.random(shape) < draw(st.sampled_from([0.1, 0.5, 1.0]))] = value
    function = draw(st.sampled_from(FUNCTIONS))
    ndim = array.ndim
    one: list[Any] = [None, *range(-ndim, ndim)]
    axis = draw(st.sampled_from(one if function in ARGS else [*one, (0, -1), (0,)]))
    if axis == (0, -1) and ndim == 1:
        axis = 0
    options: dict[str, Any] = {}
    if function != "ptp" and draw(st.booleans()):
        options["keepdims"] = True
    if function in SPREAD:
        options["ddof"] = draw(st.integers(0, 4))
    if function in ("sum", "prod") and dtype in ("i4", "u1", "f4"):
        options["dtype"] = draw(st.sampled_from(["f8", "i1", "c16"]))
    return Case(array, tuple(draw(sizes(n)) for n in shape), function, axis, options)


def close(got: Any, want: Any, dtype: np.dtype[Any]) -> None:
    """Fail unless values are equal, or as close as sums of this type are; type and shape too."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if want.dtype.kind in "fc":
        rtol = RTOL.get(np.dtype(dtype).str[1:], RTOL.get(want.dtype.str[1:], 1e-9))
        np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol)
    else:
        np.testing.assert_array_equal(got, want)


def fences(y: da.Array) -> dict[Any, ReduceTask]:
    """The fences of the runs that make an array; none where it is gathered."""
    return {key: task for key, task in dict(y.dask).items() if isinstance(task, ReduceTask)}


def by_ranks(y: da.Array, local: LocalRanks, rng: np.random.Generator) -> NDArray[Any]:
    """What ranks make of a reduced array: partials anywhere, in any order, as runs merge them."""
    graph, blocks = dict(y.dask), {}
    for index in product(*map(range, y.numblocks)):
        fence: Any = graph[(y.name, *index)]
        assert isinstance(fence, ReduceTask)
        spec, keys = fence.args[0], sorted(fence.dependencies, key=str)
        held = get_sync(graph, keys)
        there = [
            (int(rng.integers(len(local.seats))), *held[k]) for k in rng.permutation(len(held))
        ]
        blocks[index] = local.result(spec, there)
    return assembled(y, blocks)


def assembled(y: da.Array, blocks: dict[tuple[int, ...], Any]) -> NDArray[Any]:
    """An array of its blocks, each of which has the shape that the array says."""
    out = np.empty(y.shape, y.dtype)
    ends = [np.cumsum([0, *sizes]) for sizes in y.chunks]
    for index, block in blocks.items():
        box: Any = tuple(slice(e[i], e[i + 1]) for e, i in zip(ends, index, strict=True))
        assert np.asarray(block).dtype == y.dtype
        assert out[(*box, ...)].shape == np.shape(block)
        out[(*box, ...)] = block
    return out
