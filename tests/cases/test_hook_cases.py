"""Every public report with the hook enabled: unmodified Dask code gives what NumPy does.

The reports are data: ``reports``, ``reports_elements``, ``reports_reductions``. Under
``policy="always"`` a report whose operation changes chunks must have left a run, so that none
passes because it quietly took Dask's own rechunk.
"""

import warnings
from typing import Any

import dask
import dask.array as da
import dask.base
import numpy as np
import pytest
from cluster import new_runs, same
from distributed import Client
from lowered import force
from numpy.typing import NDArray
from reports import CHUNKS_API, GEOMETRY, LAYOUT, Report
from reports_elements import DTYPE, MASKED, PIPELINE, REUSE, UNKNOWN
from reports_reductions import (
    REDUCE,
    REDUCE_ARG,
    REDUCE_DTYPE,
    REDUCE_EMPTY,
    REDUCE_MULTI,
    REDUCE_NAN,
)

import dask_redist as dr

CHANGES: list[Report] = [
    *(GEOMETRY + CHUNKS_API + LAYOUT + DTYPE + MASKED + UNKNOWN + REUSE + PIPELINE),
]
REDUCTIONS: list[Report] = [
    *(REDUCE + REDUCE_EMPTY + REDUCE_NAN + REDUCE_ARG + REDUCE_DTYPE + REDUCE_MULTI),
]
REPORTS = CHANGES + REDUCTIONS
#: these run on 4, 5 and 7 ranks always
SAMPLE = (
    *("RG01", "RG07", "RG08", "RG11", "RG14", "RG19", "RG20", "RG26", "LY01", "LY04"),
    *("DT02", "DT14", "RU01", "RU07", "PL04", "RM01"),
)
RTOL = {"f2": 2e-3, "f4": 1e-5, "f8": 1e-12, "c8": 1e-5, "c16": 1e-12}

pytestmark = pytest.mark.filterwarnings("ignore:::dask", "ignore:::numpy")


def test_reports_have_ids_of_their_own() -> None:
    ids = [report.id for report in REPORTS]
    assert len(set(ids)) == len(ids)
    assert set(SAMPLE) <= set(ids)


@pytest.mark.erring
@pytest.mark.parametrize("report", REPORTS, ids=str)
def test_every_change_is_a_collective(client: Client, report: Report) -> None:
    always(client, report)


@pytest.mark.erring
@pytest.mark.ranks(4, 5, 7)
@pytest.mark.parametrize("report", [r for r in REPORTS if r.id in SAMPLE], ids=str)
def test_every_change_is_a_collective_on_more_ranks(client: Client, report: Report) -> None:
    always(client, report)


@pytest.mark.erring
@pytest.mark.parametrize("report", CHANGES, ids=str)
def test_with_the_default_policy(client: Client, report: Report) -> None:
    by_default(client, report)


@pytest.mark.erring
@pytest.mark.ranks(2)  # most change no chunks, so that the policy does not matter to them
@pytest.mark.parametrize("report", REDUCTIONS, ids=str)
def test_reductions_with_the_default_policy(client: Client, report: Report) -> None:
    by_default(client, report)


#: reductions that are no run anyhow: one chunk, or cumulative
NO_REDUCTION = ("RD02", "RD04", "RD11", "RD22", "RA07", "RE04", "RE05", "RE09", "RE10")


@pytest.mark.erring
@pytest.mark.ranks(2)
@pytest.mark.parametrize("report", REDUCTIONS, ids=str)
def test_every_reduction_is_a_run(
    client: Client, monkeypatch: pytest.MonkeyPatch, report: Report
) -> None:
    """However small its partials."""
    force(monkeypatch, "reduced")
    with new_runs(client) as new, dr.enable(policy="always"):
        fault = fault_of(report)
    if report.theirs and fault is not None:
        same_fault_without_the_hook(report, fault)
    else:
        assert fault is None, repr(fault)
    is_run = any(run.layout == "reduction" for run in new())
    assert is_run == (report.id not in NO_REDUCTION)


def by_default(client: Client, report: Report) -> None:
    """Check a report where the hook may leave a change to Dask."""
    with new_runs(client) as new, dr.enable():
        fault = fault_of(report)
    if fault is not None and not new() and report.stock:  # Dask's own way after all
        same_fault_without_the_hook(report, fault)
    elif fault is not None:
        raise fault


def always(client: Client, report: Report) -> None:
    """Check a report where every change of chunks is a collective."""
    with new_runs(client) as new, dr.enable(policy="always"):
        fault = fault_of(report)
    if not report.no_run:
        assert new(), "no collective has run"
    elif not report.kind.startswith("reduce"):
        assert not new(), f"a collective has run although {report.no_run}"
    if report.refused:
        assert isinstance(fault, report.refused)
    elif fault is not None and report.theirs:
        same_fault_without_the_hook(report, fault)
    elif fault is not None:
        raise fault


def same_fault_without_the_hook(report: Report, fault: Exception) -> None:
    """Fail unless it is Dask that is wrong: no values, or these very values."""
    stock = fault_of(report)
    assert stock is not None, f"right without the hook, with it: {fault!r}"
    if isinstance(fault, AssertionError) or isinstance(stock, AssertionError):
        assert repr(fault) == repr(stock)


def fault_of(report: Report) -> Exception | None:
    """What is wrong with what a report gives; None if nothing."""
    scheduler = "sync" if report.in_process else None
    try:
        with warnings.catch_warnings(), dask.config.set(scheduler=scheduler):
            warnings.simplefilter("ignore")
            if report.raises:
                with pytest.raises(report.raises):
                    in_memory(report.op(report.make()))
            else:
                verify(report)
    except (Exception, pytest.fail.Exception) as fault:
        return fault if isinstance(fault, Exception) else AssertionError(str(fault))
    return None


# -------------------------------------------------------------------------------- the oracle
def in_memory(value: Any) -> Any:
    """A value of which all that is lazy has been computed, at once."""
    many = value if isinstance(value, tuple) else (value,)
    held = dask.base.compute(*many)
    return held if isinstance(value, tuple) else held[0]


def verify(report: Report) -> None:
    """Compute, and compare with NumPy: elements, chunks, and what blocks say of themselves."""
    lazy = report.op(report.make())
    if report.chunks is not None:
        assert lazy.chunks == report.chunks
    if not report.any_dtype:
        lazy = tuple(map(watched, lazy)) if isinstance(lazy, tuple) else watched(lazy)
    compare(in_memory(lazy), report.want, report)


def watched(x: Any) -> Any:
    """An array of which each block is looked at on its way."""
    if not isinstance(x, da.Array) or any(size != size for sizes in x.chunks for size in sizes):
        return x
    return da.map_blocks(as_advertised, x, dtype=x.dtype, meta=x._meta)


def as_advertised(block: Any, block_info: Any = None) -> Any:
    """The block; fails unless it has the shape and the dtype that the array says."""
    assert np.shape(block) == block_info[None]["chunk-shape"]
    assert block.dtype == block_info[None]["dtype"]
    return block


def compare(got: Any, want: Any, report: Report) -> None:
    """Fail unless equal: bit for bit, or as close as the report asks."""
    if isinstance(want, tuple):
        assert isinstance(got, tuple)
        for one, other in zip(got, want, strict=True):
            compare(one, other, report)
        return
    exact = report.rtol is None and report.atol is None
    if report.any_dtype:
        assert np.shape(got) == np.shape(want)
        close(np.asarray(got), np.asarray(want), report)
    elif exact and not report.kind.startswith("reduce"):
        same(got, want)
    else:
        got, want = np.asarray(got), np.asarray(want)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        if want.dtype.hasobject:
            same(got, want)
        else:
            close(got, want, report)


def close(got: NDArray[Any], want: NDArray[Any], report: Report) -> None:
    """Fail unless numbers are as close as the report, or their type, asks; others are equal."""
    if want.dtype.kind not in "fc":
        np.testing.assert_array_equal(got, want)
        return
    rtol = report.rtol if report.rtol is not None else RTOL.get(want.dtype.str[1:], 1e-15)
    wide = np.complex128 if want.dtype.kind == "c" else np.longdouble
    np.testing.assert_allclose(got.astype(wide), want.astype(wide), rtol, report.atol or 0)
