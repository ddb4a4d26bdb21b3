"""Reductions on ranks: NumPy's values, whoever has which partial, and what has moved for them.

Partials stay small here, so that most tests force runs; what is laid out and cut needs large ones,
which have rows of 20000.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import dask
import dask.array as da
import dask.base
import numpy as np
import pytest
from cluster import ar, fa, memory, new_runs, owners, placed, same
from distributed import Client, wait
from lowered import by_ranks, close, fences, force
from numpy.typing import NDArray
from reduce_ranks import LocalRanks
from test_lower import joined

import dask_redist as dr
from dask_redist import lower

pytestmark = pytest.mark.filterwarnings("ignore:::dask", "ignore:::numpy")

A = ar(12, 10)
ROW = 20_000
HOLES = np.where(A % 7 == 0, np.nan, A)
TIES = np.zeros((12, 10))
TIES[2, 7] = TIES[5, 1] = TIES[11, 0] = 3
MASKED = np.ma.MaskedArray(A, A % 3 == 0)
MASKED[:, 4] = np.ma.masked
WEIGHTS = np.arange(1.0, 13)


@pytest.fixture(params=["reduced", "gathered"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every reduction is made this way."""
    force(monkeypatch, request.param)
    return str(request.param)


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reduction is a run."""
    force(monkeypatch, "reduced")


def large(chunks: int = 6) -> tuple[NDArray[Any], Any]:
    """Rows of which the partials are laid out and cut, and their chunks."""
    values = ar(2 * chunks, ROW)
    values[:, ::7] = -values[:, ::7]
    return values, (2, ROW)


def block_sums(block: Any, axis: Any, keepdims: bool, computing_meta: bool = False) -> Any:
    if computing_meta:
        return block
    return {"total": block.sum(axis=axis, keepdims=keepdims), "rows": len(block)}


def block_merge(pairs: Any, axis: Any, keepdims: bool) -> Any:
    flat = list(_flat(pairs))
    total = np.concatenate([p["total"] for p in flat]).sum(axis=0, keepdims=True)
    return {"total": total, "rows": sum(p["rows"] for p in flat)}


def block_mean(pairs: Any, axis: Any, keepdims: bool) -> Any:
    merged = block_merge(pairs, axis, keepdims)
    mean = merged["total"] / merged["rows"]
    return mean if keepdims else mean[0]


def _flat(nested: Any) -> Any:
    if isinstance(nested, list):
        for each in nested:
            yield from _flat(each)
    else:
        yield nested


def of_dicts(x: da.Array, **options: Any) -> da.Array:
    y: da.Array = da.reduction(
        x, block_sums, block_mean, combine=block_merge, axis=0, dtype="f8", concatenate=False,
        meta=np.empty(0), **options,
    )  # fmt: skip
    return y


def along_rows(name: str, x: da.Array) -> Any:
    return getattr(da, name)(x, axis=0)


Calls = dict[str, tuple[Callable[[da.Array], Any], Any]]
CALLS: Calls = {
    **{
        name: (partial(along_rows, name), getattr(np, name)(A, axis=0))
        for name in ("sum", "prod", "min", "max", "mean", "std", "var", "argmin", "ptp")
    },
    "any": (lambda x: (x > 115).any(axis=0), (A > 115).any(axis=0)),
    "all": (lambda x: (x > 3).all(), (A > 3).all()),
    "moment": (lambda x: da.moment(x, 3, axis=0), ((A - A.mean(0)) ** 3).mean(0)),
    "nansum": (lambda x: da.nansum(fa(HOLES, (3, 5)), axis=0), np.nansum(HOLES, axis=0)),
    "nanmax": (lambda x: da.nanmax(fa(HOLES, (3, 5))), np.nanmax(HOLES)),
    "nanmean": (lambda x: da.nanmean(fa(HOLES, (3, 5)), axis=1), np.nanmean(HOLES, axis=1)),
    "nanargmax": (lambda x: da.nanargmax(fa(HOLES, (3, 5)), axis=0), np.nanargmax(HOLES, axis=0)),
    "ties": (lambda x: fa(TIES, (3, 5)).argmax(), TIES.argmax()),
    "ties along an axis": (lambda x: fa(TIES, (3, 5)).argmax(axis=0), TIES.argmax(axis=0)),
    "norm": (lambda x: da.linalg.norm(x), np.linalg.norm(A)),
    "trace": (lambda x: da.trace(x), np.trace(A)),
    "tensordot": (lambda x: da.tensordot(x, x.T, axes=1), A @ A.T),
    "matmul": (lambda x: x.T @ x, A.T @ A),
    "average": (lambda x: da.average(x, axis=0, weights=fa(WEIGHTS, 3)), WEIGHTS @ A / 78),
    "cov": (lambda x: da.cov(x), np.cov(A)),
    "count_nonzero": (lambda x: da.count_nonzero(x % 2, axis=0), np.count_nonzero(A % 2, axis=0)),
    "bincount": (
        lambda x: da.bincount(x.ravel().astype("i8") % 7, minlength=9),
        np.bincount(A.ravel().astype("i8") % 7, minlength=9),
    ),
    "histogram": (
        lambda x: da.histogram(x, bins=4, range=(0, 100))[0],
        np.histogram(A, bins=4, range=(0, 100))[0],
    ),
    "topk": (lambda x: da.topk(x, 2, axis=0), np.sort(A, axis=0)[:-3:-1]),
    "dtype": (lambda x: x.sum(axis=0, dtype="i1"), A.astype("i1").sum(axis=0, dtype="i1")),
    "ddof": (lambda x: x.std(axis=0, ddof=2), A.std(axis=0, ddof=2)),
    "ddof above n": (lambda x: x.var(axis=0, ddof=14), np.full(10, np.inf)),
    "split_every": (lambda x: x.sum(axis=0, split_every=2), A.sum(axis=0)),
    "keepdims": (lambda x: x.mean(axis=(0, 1), keepdims=True), A.mean(keepdims=True)),
    "objects": (lambda x: x.astype(object).sum(axis=0), A.sum(axis=0).astype(object)),
    "complex": (lambda x: (x * 1j).var(axis=0), A.var(axis=0)),
    "float16": (lambda x: fa(np.full(9, 3e4, "f2"), 2).mean(), np.float16(3e4)),
    "spans": (lambda x: x.astype("m8[s]").sum(axis=0), A.sum(axis=0).astype("m8[s]")),
    "dates": (lambda x: x.astype("M8[s]").max(axis=0), A.max(axis=0).astype("M8[s]")),
    "dicts": (of_dicts, A.mean(axis=0)),
    "text": (lambda x: joined(), np.array("abcdefghijklm", dtype=object)),
    "text, nested": (lambda x: joined(concatenate=False), np.array("abcdefghijklm", dtype=object)),
}


@pytest.mark.sample
@pytest.mark.wires
def test_every_family_gives_what_numpy_gives(client: Client, ranks: int, way: str) -> None:
    """All of them in one graph."""
    x = placed(client, A, (3, 5))
    with new_runs(client) as new, dr.enable():
        lazy = {name: call(x) for name, (call, _) in CALLS.items()}
        asked = len({key for y in lazy.values() for key in fences(y)})
        got = dict(zip(lazy, dask.base.compute(*lazy.values()), strict=True))
    for name, (_, want) in CALLS.items():
        assert lazy[name].dtype == np.asarray(got[name]).dtype, name
        close(got[name], want, np.dtype("f8"))
    assert asked > 40 if way == "reduced" else asked == 0
    assert sum(report.layout == "reduction" for report in new()) == asked


def test_masked_arrays(client: Client, way: str) -> None:
    with dr.enable():
        x = da.from_array(MASKED, chunks=(3, 5))
        lazy = [getattr(x, name)(axis=0) for name in ("sum", "mean", "var", "min", "max")]
    got = dask.base.compute(*lazy)
    for name, found in zip(("sum", "mean", "var", "min", "max"), got, strict=True):
        want = getattr(MASKED, name)(axis=0)
        np.testing.assert_array_equal(np.ma.getmaskarray(found), np.ma.getmaskarray(want))
        np.testing.assert_allclose(found.filled(0), want.filled(0), rtol=1e-12)


@pytest.mark.wires
def test_masks_of_large_partials_are_cut_with_them(client: Client, reduced: None) -> None:
    values, chunks = large(4)
    masked = np.ma.MaskedArray(values, values % 3 == 0)
    with dr.enable():
        y = da.from_array(masked, chunks=chunks).sum(axis=0)
    same(y.compute(), masked.sum(axis=0))


def test_out_gets_the_result(client: Client, way: str) -> None:
    with dr.enable():
        x, out = fa(A, (3, 5)), da.zeros(10, chunks=10)
        da.sum(x, axis=0, out=out)
        one = da.zeros((), dtype="i8")
        x.argmax(out=one)
    same(out.compute(), A.sum(axis=0))
    assert one.compute() == A.argmax()


def test_unknown_chunk_sizes(client: Client, way: str) -> None:
    with dr.enable():
        x = fa(A, (3, 5))
        some = x[x[:, 0] > 45]
        lazy = [some.sum(axis=0), some.sum(axis=1), some.max(), some.mean(axis=0)]
    few = A[A[:, 0] > 45]
    got = dask.base.compute(*lazy)
    for found, want in zip(got, (few.sum(0), few.sum(1), few.max(), few.mean(0)), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-14)


@pytest.mark.ranks(3, 7)
def test_fewer_chunks_than_ranks(client: Client, way: str) -> None:
    x = placed(client, A, (6, 10), owners=[2, 2])
    with dr.enable():
        y, z = x.sum(axis=0), x.max()
    same(y.compute(), A.sum(axis=0))
    assert z.compute() == A.max()


def test_empty_chunks(client: Client, way: str) -> None:
    with dr.enable():
        x = fa(A, ((0, 5, 0, 7, 0), (10, 0)))
        lazy = [x.min(axis=0), x.argmax(axis=0), x.argmin(), x.mean(axis=1), x.std(), x.sum(axis=0)]
        got = dask.base.compute(*lazy)
    wants = (A.min(0), A.argmax(0), A.argmin(), A.mean(1), A.std(), A.sum(0))
    for found, want in zip(got, wants, strict=True):
        close(found, want, np.dtype("f8"))


@pytest.mark.erring
def test_no_elements_are_numpys_error(client: Client, way: str) -> None:
    with dr.enable():
        none = fa(ar(0, 4), ((0, 0), (2, 2)))
        same(none.sum(axis=0).compute(), np.zeros(4))
        same(none.max(axis=1).compute(), ar(0))
        for name in ("max", "min", "argmax"):
            with pytest.raises(ValueError, match=r"zero-size array to reduction|empty sequence"):
                getattr(none, name)(axis=0).compute()


# ------------------------------------------------------------------------------ what has moved
def received(client: Client) -> NDArray[np.int64]:
    """Bytes that others have sent to each rank, ever."""
    found = memory(client)
    return np.array([found[address]["received"] for address in dr.connect(client).addresses])


@pytest.mark.sample
@pytest.mark.wires
@pytest.mark.parametrize("deterministic", [False, True])
def test_no_rank_receives_more_than_its_share(
    client: Client, ranks: int, reduced: None, deterministic: bool
) -> None:
    values, chunks = large(2 * ranks)
    x = placed(client, values, chunks)
    before = received(client)
    with new_runs(client) as new, dr.enable(deterministic=deterministic):
        y = x.sum(axis=0).persist()
    wait(y)
    now = received(client) - before
    output = values[0].nbytes
    partials = output * (2 * ranks if deterministic else ranks)  # neighbours are on other ranks
    if not deterministic:
        partials = output * 2 * ranks
    assert (now <= 2 / ranks * partials + output).all(), now
    (report,) = new()
    assert (report.n_in, report.n_out, report.ranks) == (2 * ranks, 1, ranks)
    columns = report.traffic.sum(axis=0)
    assert columns.sum() in (partials, partials // 2)  # all partials, or one that each rank made
    if deterministic:
        assert columns.sum() == partials
    assert columns.max() <= columns.sum() / ranks + 2 * ranks * 32 * 1024
    same(y.compute(), values.sum(axis=0))


def _moved_by_dask(dask_worker: Any) -> int:
    return int(dask_worker.transfer_outgoing_bytes_total)


@pytest.mark.wires
def test_dask_moves_no_partial(client: Client, reduced: None) -> None:
    values, chunks = large(6)
    x = placed(client, values, chunks)
    before = client.run(_moved_by_dask)
    with dr.enable():
        y = x.mean(axis=0).persist()
    wait(y)
    moved = {w: n - before[w] for w, n in client.run(_moved_by_dask).items()}
    assert sum(moved.values()) < 2**16, moved
    close(y.compute(), values.mean(axis=0), np.dtype("f8"))


@pytest.mark.ranks(2, 3)
def test_large_partials_are_reduced_unasked(
    client: Client, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower, "SMALL", 1 << 20)
    values = ar(8, 70_000)  # four partials of 560 kB
    with new_runs(client) as new, dr.enable():
        y = da.from_array(values, chunks=(2, 70_000)).sum(axis=0)
        small = fa(A, (3, 10)).sum(axis=0)
    same(y.compute(), values.sum(axis=0))
    assert len(new()) == 1
    same(small.compute(), A.sum(axis=0))
    assert len(new()) == 1


@pytest.mark.sample
def test_results_are_on_their_owners_and_the_users_own(
    client: Client, ranks: int, reduced: None
) -> None:
    x = placed(client, A, (3, 2))
    with dr.enable():
        y = x.sum(axis=0).persist()
    np.testing.assert_array_equal(owners(client, y), [k * ranks // 5 for k in range(5)])
    got = y.compute()
    got[:] = 0
    same(y.compute(), A.sum(axis=0))
    same(x.compute(), A)


def test_a_users_array_is_not_overwritten(client: Client, reduced: None) -> None:
    """A partial may be the chunk itself."""

    def itself(block: Any, axis: Any, keepdims: bool) -> Any:
        return block

    values, _ = large(4)
    x = placed(client, values, (1, ROW))
    with dr.enable():
        y = da.reduction(x, itself, da.chunk.sum, axis=0, dtype="f8", split_every=2)
    same(y.compute(), values.sum(axis=0))
    same(x.compute(), values)


# ---------------------------------------------------------------------------------- together
def test_several_in_one_graph_and_their_results_again(client: Client, way: str) -> None:
    with dr.enable():
        x = fa(A, (3, 5))
        y = x - x.mean(axis=0) + x.sum() / x.max(axis=1, keepdims=True)[1:].sum()
        z = (y - y.min(axis=0, keepdims=True)).std(axis=1)
    b = A - A.mean(0) + A.sum() / A.max(1, keepdims=True)[1:].sum()
    np.testing.assert_allclose(z.compute(), (b - b.min(0)).std(1), rtol=1e-12)


@pytest.mark.sample
@pytest.mark.wires
def test_a_chain_with_changes_of_layout(client: Client, ranks: int, way: str) -> None:
    with new_runs(client) as new, dr.enable(policy="always"):
        x = fa(A, (3, 10)).rechunk((12, 2))
        y = (x - x.mean(axis=1, keepdims=True)).rechunk((2, 10))
        total, least = y.sum(axis=0), (y * 1).rechunk((5, 4)).argmin(axis=0)
        got = dask.base.compute(total, least, y)
    b = A - A.mean(1, keepdims=True)
    np.testing.assert_allclose(got[0], b.sum(0), atol=1e-9)
    np.testing.assert_array_equal(got[1], b.argmin(0))
    np.testing.assert_allclose(got[2], b, rtol=1e-12)
    assert {"reduction"} < {r.layout for r in new()} if way == "reduced" else new()


def test_nothing_is_laid_out_first_for_a_reduction(
    client: Client, ranks: int, reduced: None
) -> None:
    for chunks in ((1, 10), (12, 10)):
        x = placed(client, A, chunks)
        with new_runs(client) as new, dr.enable(policy="always"):
            y = x.rechunk((4, 2)).sum(axis=0)
        assert y.chunks == ((2,) * 5,)
        same(y.compute(), A.sum(axis=0))
        # Fewer chunks than ranks would leave some without work: they are laid out first.
        laid = x.npartitions < ranks
        assert [report.layout for report in new()] == ["owners open"] * laid + ["reduction"] * (
            5 if laid else 1
        )


def test_computed_twice_and_in_two_graphs(client: Client, reduced: None) -> None:
    x = placed(client, A, (3, 5))
    with dr.enable():
        y = x.sum(axis=0)
    for _ in range(2):
        same(y.compute(), A.sum(axis=0))
    held = y.persist()
    same((y + held).compute(), 2 * A.sum(axis=0))
    same((y.blocks[1] + 1).compute(), A.sum(axis=0)[5:] + 1)


# -------------------------------------------------------------------------------- deterministic
@pytest.mark.sample
@pytest.mark.wires
def test_the_same_bits_on_any_number_of_ranks(client: Client, ranks: int, reduced: None) -> None:
    """Those of one rank in this process."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((14, 3 * ROW)) * 10.0 ** rng.integers(-6, 6, (14, 1))
    found = []
    one = LocalRanks(1)
    for seed in range(2):
        at = np.random.default_rng(seed).integers(0, ranks, 7).tolist()
        x = placed(client, values, (2, 3 * ROW), at)
        with dr.enable(deterministic=True):
            lazy = [x.sum(axis=0), x.mean(axis=0), x.var(axis=0), x.sum()]
            here = da.from_array(values, chunks=(2, 3 * ROW))
            plain = [here.sum(axis=0), here.mean(axis=0), here.var(axis=0), here.sum()]
        got = dask.base.compute(*lazy)
        found.append([array.tobytes() for array in got])
        for y, array in zip(plain, got, strict=True):
            same(array, by_ranks(y, one, rng))
        np.testing.assert_allclose(got[0], values.sum(axis=0), rtol=1e-6, atol=1e-6)
    one.close()
    assert found[0] == found[1]
