"""Bytes: what the writers sent, what the owners got, what the plan said."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from cluster import memory
from distributed import Client, wait

import dask_redist as dr

TARGETS = [dr.Slab.X, dr.Slab.Y, dr.Pencil.X, dr.Pencil.Z, {0: 3, 2: 4}, -1]


def received(client: Client) -> np.ndarray:
    found = memory(client)
    return np.array([found[address]["received"] for address in dr.connect(client).addresses])


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.wires
def test_sent_is_received_is_moved_is_planned(client: Client, target: object) -> None:
    values = np.arange(7 * 9 * 11).reshape(7, 9, 11)
    x = da.from_array(values, chunks=(2, 9, 4)).persist()
    wait(x)
    plan = dr.plan(x, target)
    assert not plan.assumed
    before = received(client)
    last = max((report.number for report in dr.runs()), default=0)
    y = dr.redistribute(x, target).persist()
    wait(y)
    got = received(client) - before
    reports = [report for report in dr.runs() if report.number > last]
    sent = sum((report.traffic for report in reports), np.zeros_like(plan.traffic))
    np.testing.assert_array_equal(sent, plan.traffic)
    np.testing.assert_array_equal(got, sent.sum(0) - np.diag(sent))
    moved = sum(report.bytes_moved for report in reports)
    assert moved == plan.bytes_moved == got.sum()
    before_owner, after_owner = dr.owners(x), dr.owners(y)
    changed = sum(
        values[shared].nbytes
        for piece, source in zip(slices(x), before_owner.ravel(), strict=True)
        for other, to in zip(slices(y), after_owner.ravel(), strict=True)
        if source != to and (shared := meet(piece, other)) is not None
    )
    assert moved == changed
    assert np.array_equal(y.compute(), values)


def slices(x: da.Array) -> list[tuple[slice, ...]]:
    return list(da.core.slices_from_chunks(x.chunks))


def meet(a: tuple[slice, ...], b: tuple[slice, ...]) -> tuple[slice, ...] | None:
    both = tuple(
        slice(max(i.start, j.start), min(i.stop, j.stop)) for i, j in zip(a, b, strict=True)
    )
    return both if all(s.start < s.stop for s in both) else None
