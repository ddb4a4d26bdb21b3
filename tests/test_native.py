"""Reductions that MPI does: exactly those that are right in any order, over the MPI wire only."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cluster import MPI, same
from distributed import Client
from test_dist import total
from test_mail import mpi_ranks
from test_rankcomm import on_ranks

import dask_redist as dr
from dask_redist.native import mpi_name
from dask_redist.post import Post
from dask_redist.rankcomm import RankComm
from dask_redist.reduceop import ReduceOp, as_op

DTYPES = ["?", "i1", "u2", "i4", "i8", "u8", ">i4", "f4", "f8", "c16"]


def exact(op: ReduceOp, dtype: np.dtype[Any]) -> bool:
    """Whether combining is the same in any order, by what the elements are."""
    if dtype.kind == "b":
        return op in (ReduceOp.LAND, ReduceOp.LOR)
    return dtype.kind in "iu" and dtype.isnative


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ReduceOp)
def test_only_what_is_exact_is_left_to_mpi(op: ReduceOp, dtype: str) -> None:
    kind = np.dtype(dtype)
    try:
        as_op(op, kind)
    except TypeError:
        assert kind.kind not in "iu" or op is ReduceOp.AVG
    else:
        assert (mpi_name(op, kind) is not None) == exact(op, kind)


def parts_of(ranks: int, dtype: str, size: int) -> list[Any]:
    """The ranks' tensors: with zeros, the greatest and the smallest values, and NaN."""
    rng = np.random.default_rng(ranks)
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return [rng.integers(0, 2, size).astype(kind) for _ in range(ranks)]
    if kind.kind in "iu":
        low, high = np.iinfo(kind).min, np.iinfo(kind).max
        parts = [rng.integers(low, high, size, kind.newbyteorder("="), True) for _ in range(ranks)]
        return [np.where(rng.random(size) < 0.2, 0, part).astype(kind) for part in parts]
    parts = [rng.standard_normal(size).astype(kind) for _ in range(ranks)]
    parts[-1][::7] = np.nan
    return parts


@pytest.mark.ranks(1, 3)
@pytest.mark.wires
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_by_mpi(client: Client, ranks: int, dtype: str) -> None:
    parts = parts_of(ranks, dtype, 5003)
    names = ["sum", "product", "min", "max", "band", "bor", "bxor", "land", "lor"]
    kind = np.dtype(dtype)

    def code(nothing: None, comm: RankComm) -> Any:
        started = []
        original = Post.collective
        Post.collective = lambda *a: started.append(1) or original(*a)  # type: ignore[func-returns-value, method-assign]
        found = {}
        try:
            for name in names:
                try:
                    found[name] = (
                        comm.all_reduce(parts[comm.rank], name),
                        comm.reduce(parts[comm.rank], comm.size - 1, name),
                        len(started),
                    )
                except TypeError:
                    continue
                started.clear()
        finally:
            Post.collective = original  # type: ignore[method-assign]
        return found

    by_mpi = MPI in dr.connect(client).wires.values()
    for rank, found in enumerate(on_ranks(code, client)):
        assert "max" in found
        for name, (everywhere, on_last, started) in found.items():
            want = total(parts, name)
            same(everywhere, want)
            assert (on_last is None) == (rank != ranks - 1)
            if on_last is not None:
                same(on_last, want)
            assert started == (2 if by_mpi and exact(ReduceOp(name), kind) else 0), name


@pytest.mark.everything
def test_where_a_rank_has_failed_mpi_reduces_no_more() -> None:
    """The others' call is never over: what comes next would be taken for it."""

    def code(nothing: None, comm: RankComm) -> Any:
        comm._program.means = replace(comm._program.means, timeout=3.0)
        values = np.arange(5000) + comm.rank
        original = Post.collective
        started: list[int] = []

        def collective(*given: Any) -> Any:
            if comm.rank == 2 and not started:
                started.append(0)
                raise MemoryError("no room on this rank")
            started.append(1)
            return original(*given)

        Post.collective = collective  # type: ignore[assignment, method-assign]
        try:
            with pytest.raises((MemoryError, dr.RunTimeoutError)) as error:
                comm.all_reduce(values)
            if comm.rank == 2:
                time.sleep(2)
            later = comm.all_reduce(10 * values), comm.reduce(values, 1, "max")
        finally:
            Post.collective = original  # type: ignore[method-assign]
        return str(error.value), later, started

    with mpi_ranks(3) as client:
        dr.connect(client)
        for rank, (error, (everywhere, on_one), started) in enumerate(dr.map_ranks(code, None)):
            assert ("no room" if rank == 2 else "did not reduce 40000 bytes over 3") in error
            same(everywhere, 30 * np.arange(5000) + 30)
            assert (on_one is None) == (rank != 1)
            if on_one is not None:
                same(on_one, np.arange(5000) + 2)
            assert len(started) == 1
