"""Every layout on every number of ranks: the right elements on the right ranks, and only they.

Who shares what with whom, and for how long, is in cases/test_sharing.py; element types in
cases/test_types.py; what is refused in cases/test_refusals.py.
"""

from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Any

import dask.array as da
import numpy as np
import pytest
from cluster import DASK_COMM, MPI, Relayout, ar, fa, facts, owners, placed, same
from distributed import Client, wait
from numpy.typing import NDArray

import dask_redist as dr
from dask_redist.boxes import Chunks
from dask_redist.layer import RedistributeLayer
from dask_redist.overlap import Overlap, traffic
from dask_redist.partition import square_grid

SHAPE = (7, 9, 5)


def uneven(ranks: int) -> dr.Layout:
    """Two ranks hold something, those between them nothing."""
    return dr.Uneven(1, (9,) if ranks == 1 else (4, *(0,) * (ranks - 2), 5))


def boxes(ranks: int) -> dr.Layout:
    """No chunk grid: rank 0 has three rows, the others share the rest by columns."""
    if ranks == 1:
        return dr.Boxes([dr.Box((0, 0, 0), SHAPE)])
    ends = [9 * r // (ranks - 1) for r in range(ranks)]
    rest = (dr.Box((3, a, 0), (7, b, 5)) for a, b in pairwise(ends))
    return dr.Boxes([dr.Box((0, 0, 0), (3, 9, 5)), *rest])


LAYOUTS: dict[str, Callable[[int], dr.Layout]] = {
    "Slab.X": lambda ranks: dr.Slab.X,
    "Slab.Y": lambda ranks: dr.Slab.Y,
    "Slab.Z": lambda ranks: dr.Slab.Z,
    "Slab(-1)": lambda ranks: dr.Slab(-1),
    "Pencil.X": lambda ranks: dr.Pencil.X,
    "Pencil.Y": lambda ranks: dr.Pencil.Y,
    "Pencil.Z": lambda ranks: dr.Pencil.Z,
    "Block": lambda ranks: dr.Block(square_grid(ranks, 3)),
    "BlockCyclic": lambda ranks: dr.BlockCyclic(square_grid(ranks, 3), (2, 3, 2)),
    "Uneven": uneven,
    "Boxes": boxes,
}


def owner_of_each(chunks: Chunks, held: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rank of each element."""
    for axis, sizes in enumerate(chunks):
        held = np.repeat(held, sizes, axis=axis)
    return held


def check_traffic(
    relayout: Relayout, x: da.Array, held: NDArray[Any], y: da.Array, now: NDArray[Any]
) -> None:
    """Fail unless each pair of ranks exchanged just the bytes whose owner changed."""
    seats = {s.seat: rank for rank, s in enumerate(dr.connect(relayout.client).seats)}
    ranks = len(seats)
    sent = np.zeros((ranks, ranks), np.int64)
    reports = [report for report in relayout.reports() if report.name == y.name]
    for report in reports:
        for (source, target), nbytes in report.sent.items():
            sent[seats[source], seats[target]] += nbytes
    want = np.zeros((ranks, ranks), np.int64)
    np.add.at(want, (owner_of_each(x.chunks, held), owner_of_each(y.chunks, now)), 1)
    want *= x.dtype.itemsize
    np.testing.assert_array_equal(sent, want)
    planned = traffic(Overlap(x.chunks, y.chunks), held, now, ranks) * x.dtype.itemsize
    np.testing.assert_array_equal(sent, planned)
    moved = sum(report.bytes_moved for report in reports)
    assert moved == want.sum() - np.trace(want)


@pytest.mark.sample
@pytest.mark.wires
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_names_chunks_and_owners(
    relayout: Relayout, client: Client, ranks: int, wire: str, name: str
) -> None:
    layout = LAYOUTS[name](ranks)
    x = placed(client, ar(*SHAPE), (3, 4, 5))
    held = owners(client, x)
    lazy = relayout(x, layout)
    assert lazy.chunks == layout.chunks(SHAPE, ranks)
    y = lazy.persist()
    now = owners(client, y)
    np.testing.assert_array_equal(now, layout.owners(SHAPE, ranks))
    check_traffic(relayout, x, held, y, now)
    for report in relayout.reports():
        assert report.wires[wire] == report.bytes_moved
        assert report.wires["direct"] == report.bytes_kept
    same(y.compute(), ar(*SHAPE))
    same(x.compute(), ar(*SHAPE))
    for _, c_order, writable in facts(y, "flags.c_contiguous", "flags.writeable"):
        assert c_order
        assert writable


@pytest.mark.sample
def test_a_target_map_is_the_local_shape_of_each_rank(
    relayout: Relayout, client: Client, ranks: int
) -> None:
    x = placed(client, ar(*SHAPE), (3, 4, 5))
    target = np.tile(SHAPE, (ranks, 1))
    target[:, 1] = [9, *(0,) * (ranks - 1)][::-1] if ranks < 3 else [2, *(0,) * (ranks - 3), 3, 4]
    y = relayout(x, target).persist()
    now = owners(client, y)
    rows = np.bincount(now.ravel(), y.chunks[1], minlength=ranks)
    np.testing.assert_array_equal(rows, target[:, 1])
    same(y.compute(), ar(*SHAPE))


OPEN = {
    "dict": {0: -1, 1: 2},
    "-1": -1,
    "auto": "auto",
    "sizes": (2, 9, 3),
    "tuples": ((1, 6), (0, 9), (2, 3)),
}


@pytest.mark.sample
@pytest.mark.parametrize("target", OPEN.values(), ids=OPEN)
def test_with_chunks_only_the_owners_are_open(
    relayout: Relayout, client: Client, ranks: int, target: Any
) -> None:
    x = placed(client, ar(*SHAPE), (3, 4, 5))
    held = owners(client, x)
    lazy = relayout(x, target)
    assert lazy.chunks == x.rechunk(target).chunks
    y = lazy.persist()
    check_traffic(relayout, x, held, y, owners(client, y))
    same(y.compute(), ar(*SHAPE))


@pytest.mark.sample
def test_owners_that_are_merely_permuted_move_nothing(
    relayout: Relayout, client: Client, ranks: int
) -> None:
    x = placed(client, ar(14, 6), (1, 6), [(i + 1) % ranks for i in range(14)])
    held = owners(client, x)
    y = relayout(x, (1, 6)).persist()
    np.testing.assert_array_equal(owners(client, y), held)
    assert sum(report.bytes_moved for report in relayout.reports()) == 0
    same(y.compute(), ar(14, 6))


@pytest.mark.sample
def test_one_part_whose_owners_are_permuted_moves_less_than_c_order(
    relayout: Relayout, client: Client, ranks: int
) -> None:
    shifted = [(i + 1) % ranks for i in range(ranks)]
    x = placed(client, ar(2 * ranks, 3), (2, 3), shifted)
    y = relayout(x, ((*(2,) * (ranks - 1), 1, 1), 3)).persist()
    same(y.compute(), ar(2 * ranks, 3))
    assert sum(report.bytes_moved for report in relayout.reports()) <= 3 * 8


@pytest.mark.sample
def test_equal_chunks_do_not_mean_equal_owners(
    relayout: Relayout, client: Client, ranks: int
) -> None:
    a = ar(2 * ranks, 3)
    x = placed(client, a, (2, 3), list(range(ranks))[::-1])
    held = owners(client, x)
    y = relayout(x, dr.Slab.X).persist()
    now = owners(client, y)
    np.testing.assert_array_equal(now.ravel(), range(ranks))
    check_traffic(relayout, x, held, y, now)
    same(y.compute(), a)


@pytest.mark.sample
def test_n_in_and_n_parts_and_n_out_tasks_run(
    relayout: Relayout, client: Client, ranks: int
) -> None:
    y = relayout(fa(ar(*SHAPE), (3, 4, 5)), dr.Slab.Z)
    layer = y.dask.layers[y.name]
    assert isinstance(layer, RedistributeLayer)
    assert len(layer) == 3 * 3 + 1 + y.npartitions
    assert y.npartitions == min(ranks, 5)
    same(y.compute(), ar(*SHAPE))
    assert [(r.n_in, r.n_out, r.ranks) for r in relayout.reports()] == [(9, min(ranks, 5), ranks)]


def _moved_by_dask(dask_worker: Any) -> int:
    return int(dask_worker.transfer_outgoing_bytes_total)


@pytest.mark.wires
def test_dask_moves_no_chunk(relayout: Relayout, client: Client, wire: str) -> None:
    x = placed(client, ar(512, 1024), (128, 1024))
    wait(x)
    before = client.run(_moved_by_dask)
    y = relayout(x, dr.Slab.Y).persist()
    wait(y)
    moved = {w: n - before[w] for w, n in client.run(_moved_by_dask).items()}
    assert sum(moved.values()) < 2**16, moved  # receipts and numbers, of 4 MiB of elements
    (report,) = relayout.reports()
    assert report.wires[wire] == report.bytes_moved
    same(y.compute(), ar(512, 1024))


@pytest.mark.sample
@pytest.mark.wires
def test_chained_through_every_axis(relayout: Relayout, client: Client) -> None:
    y = fa(ar(11, 13, 2), (4, 5, 1))
    for layout in (dr.Slab.X, dr.Pencil.X, dr.Slab.Y, dr.Pencil.Z, dr.Slab.X):
        y = relayout(y, layout) * 1
    same(y.compute(), ar(11, 13, 2))


@pytest.mark.sample
def test_more_ranks_than_elements(relayout: Relayout, client: Client, ranks: int) -> None:
    y = relayout(fa(ar(2, 1), (1, 1)), dr.Slab.X).persist()
    assert y.chunks == (((1, 1) if ranks > 1 else (2,)), (1,))
    np.testing.assert_array_equal(owners(client, y).ravel(), range(min(ranks, 2)))
    same(y.compute(), ar(2, 1))


@pytest.mark.sample
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_axes_of_length_0(relayout: Relayout, client: Client, shape: tuple[int, ...]) -> None:
    y = relayout(fa(ar(*shape), shape), dr.Slab.X)
    same(y.compute(), ar(*shape))
    assert prod(y.shape) == 0


@pytest.mark.wires
def test_a_wire_that_is_forced_is_the_one(client: Client, ranks: int, wire: str) -> None:
    between = {w for (a, b), w in dr.connect(client).wires.items() if a != b}
    assert between == ({wire} if ranks > 1 else set())
    assert wire in ("shared memory", DASK_COMM, MPI)


def test_resplit_is_a_slab(relayout: Relayout, client: Client, ranks: int) -> None:
    y = dr.resplit(fa(ar(6, 8), (2, 8)), -1)
    assert y.chunks == dr.Slab.Y.chunks((6, 8), ranks)
    assert y.name == relayout(fa(ar(6, 8), (2, 8)), dr.Slab(-1)).name
    same(y.compute(), ar(6, 8))
