"""What stands in for Dask's ``_tree_reduce``: results as NumPy's, errors as Dask's; in process."""

import warnings
from collections.abc import Iterator
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from cluster import ar, fa, same
from lowered import ranks_of_4_gib

from dask_redist import lower
from dask_redist.reducehook import ReduceHook
from dask_redist.reducing import ReduceTask

TWO = ranks_of_4_gib(2)


@pytest.fixture(autouse=True, params=["small", "large"])
def lowered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reductions are lowered for two ranks, as small or large ones, and made in process."""
    if request.param == "large":
        monkeypatch.setattr(lower, "SMALL", 0)
    hook = ReduceHook(lambda: ("error", False), lambda: TWO)
    hook.put_in()
    try:
        with dask.config.set(scheduler="sync"):
            yield
    finally:
        hook.take_out()


@pytest.mark.parametrize("keepdims", [False, True])
def test_no_axis_at_all(keepdims: bool) -> None:
    """Where Dask is wrong for one chunk, so is it for none."""
    x = ar(2, 3, dtype="m8[s]")
    kwargs: Any = {"axis": (), "keepdims": keepdims}
    same(fa(x, (1, 2)).sum(**kwargs).compute(), x.sum(**kwargs))
    y = ar(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        same(fa(y, (1, 2)).var(ddof=1, **kwargs).compute(), y.var(ddof=1, **kwargs))


def _total(x: Any, axis: Any, keepdims: bool) -> Any:
    """Counts how often it merges: not made for partials of partials."""
    return np.sum(x, axis=axis, keepdims=keepdims) + 1000


@pytest.mark.parametrize("configured", [False, True])
def test_what_split_every_allows(configured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partials of partials are for functions that Dask would have called with such."""
    monkeypatch.setattr(lower, "LEAST", 2)
    monkeypatch.setattr(lower, "MOST", 2)
    kwargs: Any = {} if configured else {"split_every": 8}
    with dask.config.set({"split_every": 8} if configured else {}):
        made = da.reduction(fa(ar(8), 1), np.sum, _total, dtype="f8", **kwargs)
    assert made.compute() == 28 + 1000


def test_the_name_tells_whether_partials_are_combined() -> None:
    x = fa(ar(8), 1)
    names = [
        da.reduction(x, np.sum, _total, dtype="f8", split_every=n).name for n in (2, 2, 8, {0: 8})
    ]
    assert names[0] == names[1] != names[2]
    assert names[2] == names[3]


@pytest.mark.parametrize("split_every", ["two", 2.5])
def test_a_split_every_that_there_is_not(split_every: Any) -> None:
    with pytest.raises(ValueError, match="must be a int or a dict"):
        fa(ar(8), 1).sum(split_every=split_every)


def _whole(x: Any, axis: Any, keepdims: bool) -> Any:
    """A partial, and a result, that is all of its chunks."""
    return x


@pytest.mark.parametrize("axis", [(0, 1), (1, 2), (0, 1, 2), (2,)])
@pytest.mark.parametrize("most", [2, 3, 5, 100])
def test_partials_that_keep_their_length(
    axis: tuple[int, ...], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is merged at once is a box of the grid of chunks, put together as it was."""
    monkeypatch.setattr(lower, "LEAST", most)
    monkeypatch.setattr(lower, "MOST", most)
    x = ar(5, 6, 7)
    kwargs: Any = {"axis": axis, "keepdims": True, "split_every": 2, "dtype": x.dtype}
    made = da.reduction(fa(x, (2, 1, 3)), _whole, _whole, meta=np.empty((0, 0, 0)), **kwargs)
    parts = made.to_delayed()
    same(np.block([[[p.compute() for p in q] for q in r] for r in parts]), x)


def test_names_tell_what_is_made() -> None:
    """A reduction's partials and its result are called what Dask calls them."""
    x = fa(ar(8), 2)
    for made, partials, result in ((da.nansum(x), "nansum", "sum"), (x.mean(), "mean_", "mean")):
        assert made.name.startswith(result)
        assert any(name.startswith(partials) for name in made.dask.layers)


@pytest.mark.parametrize(
    ("chunks", "ahead"), [((1, 5), "neighbours"), ((4, 1), "none"), ((2, 1), "none")]
)
def test_ranks_combine_ahead_what_is_a_box(
    chunks: Any, ahead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a user's partials, neighbours in the line are one along the first axis only."""
    monkeypatch.setattr(lower, "SMALL", 0)
    x = fa(ar(4, 5), chunks)
    made = da.reduction(x, _whole, _whole, keepdims=True, combine=_whole, dtype=x.dtype)
    (fence,) = (task for task in made.dask.values() if isinstance(task, ReduceTask))
    assert fence.spec.ahead == ahead  # type: ignore[attr-defined]
