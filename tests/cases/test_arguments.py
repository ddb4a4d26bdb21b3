"""What ``x.rechunk`` takes as chunks, and chunk sizes that nobody knows yet."""

import re

import dask.array as da
import numpy as np
import pytest
from cluster import Relayout, ar, check, fa, new_runs
from distributed import Client

import dask_redist as dr


def test_ca01_auto_makes_no_chunk_of_size_0(client: Client) -> None:
    # https://github.com/dask/dask/issues/11618
    x = da.zeros((60, 720, 1440), dtype="f4", chunks=((36, 24), (720,), (1440,)))
    for n in range(37, 61):
        assert min(map(min, dr.redistribute(x[:n], "auto").chunks)) > 0


def test_ca02_auto_beside_an_axis_of_length_0(relayout: Relayout) -> None:
    # https://github.com/dask/dask/issues/12537 (Dask's own rechunk divides by zero)
    for chunks in ({1: "auto"}, "auto", ("auto", 2), {1: "1kiB"}):
        check(relayout(fa(np.zeros((0, 4)), ((0,), (4,))), chunks), np.zeros((0, 4)))


def test_ca04_negative_axes_and_minus_one(relayout: Relayout) -> None:
    # https://github.com/dask/dask/pull/3820
    check(relayout(fa(ar(6, 8), (4, 3)), {-2: 5, -1: -1}), ar(6, 8), ((5, 1), (8,)))


def test_ca05_axis_out_of_range(client: Client) -> None:
    # https://github.com/dask/dask/pull/3820
    with new_runs(client) as new, pytest.raises(dr.LayoutError, match=r"axis 2 .*-2 to 1"):
        dr.redistribute(fa(ar(6, 8), (4, 3)), {2: 3})
    assert not new()


def test_ca07_none_keeps_an_axis(relayout: Relayout) -> None:
    # https://github.com/dask/dask/issues/351
    x = fa(ar(6, 8), ((4, 2), (3, 3, 2)))
    check(relayout(x, (None, 4)), ar(6, 8), ((4, 2), (4, 4)))


@pytest.mark.filterwarnings("ignore:chunk size balancing not possible")
def test_ca08_same_chunks_but_balanced(relayout: Relayout) -> None:
    # https://github.com/dask/dask/pull/6735
    check(relayout(fa(ar(10), ((6, 3, 1),)), ((6, 3, 1),), balance=True), ar(10))
    check(relayout(fa(ar(10), ((6, 4),)), ((6, 4),), balance=True), ar(10), ((5, 5),))


def test_ca10_auto_needs_an_item_size(client: Client) -> None:
    # https://github.com/pangeo-data/rechunker/issues/96
    x = fa(np.array(["a", {}, 3.0, None], dtype=object), 2)
    with pytest.raises(NotImplementedError, match="object"):
        dr.redistribute(x, "auto")


def test_ca11_the_same_axis_twice(relayout: Relayout) -> None:
    # https://github.com/dask/dask/pull/3820
    check(relayout(fa(np.zeros((3, 1)), (3, 1)), {0: 1, -2: 3}), np.zeros((3, 1)))


# ------------------------------------------------------------------------------- unknown sizes
UNKNOWN = re.compile(r"axis 0 are unknown \(nan\).*compute_chunk_sizes\(\)")


def rows_above_20() -> da.Array:
    x = fa(ar(12, 6), (4, 6))
    found: da.Array = x[x[:, 0] > 20]
    return found


def tail() -> da.Array:
    x = fa(ar(13), ((4, 4, 4, 1),))
    found: da.Array = x[x > 5]
    return found


def test_un01_unknown_lengths_on_an_axis_that_stays(client: Client, relayout: Relayout) -> None:
    # https://github.com/dask/dask/pull/2251: without sizes nobody can allocate the outputs
    x = rows_above_20()
    with pytest.raises(dr.LayoutError, match=UNKNOWN):
        dr.redistribute(x, {1: 3})
    check(relayout(x.compute_chunk_sizes(), {1: 3}), ar(12, 6)[ar(12, 6)[:, 0] > 20])


def test_un02_along_the_unknown_axis(client: Client) -> None:
    # https://github.com/dask/dask/issues/10028
    with new_runs(client) as new, pytest.raises(ValueError, match=UNKNOWN):
        dr.redistribute(rows_above_20(), {0: 3})
    assert not new()


def test_un04_sizes_found_late_and_the_first_chunk_empty(relayout: Relayout) -> None:
    # https://github.com/dask/dask/pull/5312
    x = tail().compute_chunk_sizes()
    assert x.chunks == ((0, 2, 4, 1),)
    check(relayout(x, ((3, 4),)), ar(13)[6:], ((3, 4),))


def test_un05_reductions_over_what_was_unknown(relayout: Relayout) -> None:
    # https://github.com/dask/dask/issues/3906
    y = relayout(tail().compute_chunk_sizes(), dr.Slab.X)
    found = da.compute(y.min(), y.max(), y.sum(), y.std())
    np.testing.assert_allclose(found, (6, 12, 63, np.std(ar(13)[6:])), rtol=1e-12)


def test_un07_a_fresh_nan_is_a_nan(client: Client) -> None:
    # https://github.com/dask/dask/issues/10026
    with pytest.raises(dr.LayoutError, match=UNKNOWN):
        dr.redistribute(rows_above_20(), ((float("nan"),) * 3, (6,)))
