"""Reductions that MPI does: exactly those that are right in any order, over the MPI wire only."""

from typing import Any

import numpy as np
import pytest
from cluster import MPI, same
from distributed import Client
from test_dist import total
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
