"""Functions on all ranks: what they get, what comes of what they return, what they cannot do."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from cluster import DASK_COMM, ar, check, fa, new_runs, placed, ranks_in_threads, same, since
from distributed import Client, wait
from numpy.typing import NDArray
from waiting import until

import dask_redist as dr
from dask_redist import RankComm


def echo(local: NDArray[Any], comm: RankComm) -> tuple[int, NDArray[Any]]:
    return comm.rank, np.array(local)


def whole(local: NDArray[Any], comm: RankComm) -> NDArray[Any]:
    return local


def data_of(dask_worker: Any) -> dict[Any, int]:
    """The address of each array in the worker's data."""
    return {
        key: value.ctypes.data
        for key, value in dask_worker.data.items()
        if isinstance(value, np.ndarray)
    }


# -------------------------------------------------------------------------------- what they get
@pytest.mark.sample
@pytest.mark.wires
@pytest.mark.parametrize("shape", [(7, 3), (2, 3), (11,)], ids=str)
def test_each_rank_gets_its_box(client: Client, ranks: int, shape: tuple[int, ...]) -> None:
    want = ar(*shape)
    turned = [dr.Slab.X.box(ranks - 1 - rank, shape, ranks) for rank in range(ranks)]
    for at in (
        dr.Slab.X,
        dr.Slab(-1),
        dr.Block((1,) * (len(shape) - 1) + (ranks,)),
        dr.Uneven(0, (*[0] * (ranks - 1), shape[0])),
        dr.Boxes(turned),
    ):
        lazy = dr.redistribute(fa(want, 2), at)
        for x in (lazy, lazy.persist()):
            found = dr.map_ranks(echo, x, axis=0)
            assert [rank for rank, _ in found] == list(range(ranks))
            for rank, local in found:
                same(local, want[at.box(rank, shape, ranks).slices])


def test_pencils_come_back_as_pencils(client: Client, ranks: int) -> None:
    want = ar(5, 6, 7)
    for layout in (dr.Pencil.X, dr.Pencil.Z, dr.Slab.Y):
        x = dr.redistribute(fa(want, 3), layout)
        y = dr.map_ranks(lambda local, comm: local + 1, x)
        assert y.chunks == x.chunks
        assert np.array_equal(dr.owners(y), layout.owners(want.shape, ranks))
        check(y, want + 1, x.chunks)


@pytest.mark.ranks(2, 3)
@pytest.mark.wires
def test_chunk_r_is_rank_r_wherever_it_was(client: Client, ranks: int) -> None:
    want = ar(ranks * 2, 3)
    there = list(range(ranks))
    for owners in (there, [*range(1, ranks), 0], [0] * ranks, [ranks - 1] * ranks):
        x = placed(client, want, (2, 3), owners)
        with new_runs(client) as new:
            for rank, local in dr.map_ranks(echo, x, axis=2):
                same(local, want[2 * rank : 2 * rank + 2])
        assert len(new()) == (owners != there)
    for rank, local in dr.map_ranks(echo, fa(want, (2, 3)) + 1, axis=2):
        same(local, want[2 * rank : 2 * rank + 2] + 1)


@pytest.mark.ranks(2, 3)
def test_a_permutation_that_was_asked_for_stays(client: Client, ranks: int) -> None:
    shape = (2 * ranks, 2)
    boxes = dr.Boxes([dr.Slab.X.box((r + 1) % ranks, shape, ranks) for r in range(ranks)])
    x = dr.redistribute(fa(ar(*shape), 1), boxes).persist()
    wait(x)
    for rank, local in dr.map_ranks(echo, x, axis=5):
        same(local, ar(*shape)[boxes.box(rank, shape, ranks).slices])


def test_replicated_several_and_none(client: Client, ranks: int) -> None:
    want = ar(4, 3)
    everywhere = dr.resplit(fa(want, 2), None)
    for array in (everywhere, everywhere.persist()):
        for _, local in dr.map_ranks(echo, array, axis=7):
            same(local, want)
    on_last = dr.redistribute(fa(want, 2), dr.Replicated([ranks - 1]))
    found = dr.map_ranks(echo, on_last, axis=7)
    assert [local.shape for _, local in found] == [(0, 0)] * (ranks - 1) + [(4, 3)]

    def sums(local: Any, comm: RankComm, factor: int, *, more: int) -> float:
        a, b = local
        return float(a.sum() + b.sum() * factor + more)

    rows = dr.redistribute(fa(want, 2), dr.Slab.X)
    columns = dr.redistribute(fa(want, 2), dr.Slab.Y)
    got = dr.map_ranks(sums, (rows, columns), 10, more=1)
    assert sum(got) == want.sum() * 11 + ranks
    assert dr.map_ranks(lambda nothing, comm: (nothing, comm.size), None) == [(None, ranks)] * ranks


@pytest.mark.ranks(2)
def test_their_array_is_the_chunk_itself_and_read_only(client: Client, ranks: int) -> None:
    x = dr.redistribute(fa(ar(4, 3), 2), dr.Slab.X).persist()
    wait(x)

    def look(local: NDArray[Any], comm: RankComm) -> tuple[int, bool]:
        return local.ctypes.data, local.flags.writeable

    there = client.run(data_of)
    for rank, (address, writeable) in enumerate(dr.map_ranks(look, x)):
        assert there[dr.connect(client).addresses[rank]][x.name, rank, 0] == address
        assert not writeable

    def spoil(local: NDArray[Any], comm: RankComm) -> None:
        local[:] = 0

    with pytest.raises(ValueError, match="read-only"):
        dr.map_ranks(spoil, x)
    same(x.compute(), ar(4, 3))


@pytest.mark.ranks(2, 3)
def test_not_one_chunk_a_rank(client: Client, ranks: int) -> None:
    for x in (
        da.ones((8, 2), chunks=1),
        da.ones((3, 0), chunks=3),
        dr.redistribute(da.ones((4, 4)), dr.BlockCyclic((ranks, 1), (1, 1))),
    ):
        with pytest.raises(dr.LayoutError, match=r"redistribute\(x, dask_redist.Slab.X\) first"):
            dr.map_ranks(echo, x)
    with pytest.raises(dr.LayoutError, match=r"Replicated\(\)\) first"):
        dr.map_ranks(echo, da.ones(()))
    x = da.ones(4, chunks=2)
    with pytest.raises(dr.LayoutError, match="nan"):
        dr.map_ranks(echo, x[x > 0])
    with pytest.raises(TypeError, match="no plain bytes"):
        dr.map_ranks(echo, da.from_array(np.array([None, 1], object), chunks=1))
    with pytest.raises(TypeError, match="a list is not a dask array"):
        dr.map_ranks(echo, [1, 2])  # type: ignore[arg-type]


@pytest.mark.ranks(2)
@pytest.mark.erring
def test_an_array_that_cannot_be_computed(client: Client) -> None:
    def fails(block: NDArray[Any]) -> NDArray[Any]:
        raise KeyError("block")

    x = da.ones((4, 2), chunks=2).map_blocks(fails, dtype="f8", meta=np.empty((0, 0)))
    with pytest.raises(KeyError, match="block"):
        dr.map_ranks(echo, dr.redistribute(x, dr.Slab.X))

    y = da.ones(4, chunks=2).map_blocks(lambda block: block[:1], dtype="f8")
    with pytest.raises(dr.ChunkMismatchError, match="chunk"):
        dr.map_ranks(echo, y)


# ------------------------------------------------------------------------------ what they return
@pytest.mark.wires
def test_arrays_are_joined_and_not_copied(client: Client, ranks: int) -> None:
    def rows(nothing: None, comm: RankComm) -> NDArray[Any]:
        found = np.full((comm.rank % 3, 4), comm.rank)
        get_worker_of(comm).kept = found
        return found

    y = dr.map_ranks(rows, None)
    want = np.concatenate([np.full((r % 3, 4), r) for r in range(ranks)])
    sizes = [r % 3 for r in range(ranks)]
    assert y.chunks == (tuple(n for n in sizes if n) or (0,), (4,))
    assert dr.lshape_map(y).tolist() == [[n, 4] for n in sizes]
    holders = [rank for rank, n in enumerate(sizes) if n] or [0]
    assert dr.owners(y).ravel().tolist() == holders
    there = client.run(lambda dask_worker: (data_of(dask_worker), dask_worker.kept.ctypes.data))
    for index, rank in enumerate(holders):
        data, address = there[dr.connect(client).addresses[rank]]
        assert data[y.name, index, 0] == address
    check(y, want, y.chunks)


def get_worker_of(comm: RankComm) -> Any:
    return comm._program.means.worker


@pytest.mark.ranks(3)
def test_values_where_arrays_do_not_fit(client: Client) -> None:
    def of(*shapes: Any) -> Any:
        return dr.map_ranks(
            lambda nothing, comm: (
                np.zeros(shapes[comm.rank]) if shapes[comm.rank] is not None else None
            ),
            None,
        )

    for shapes in [((2, 3), (2, 4), (2, 3)), ((2,), (2, 3), (2, 3)), ((2,), None, (2,)), ((),) * 3]:
        found = of(*shapes)
        assert isinstance(found, list)
        assert [None if v is None else v.shape for v in found] == list(shapes)
    assert of((2, 3), (0, 3), (1, 3)).chunks == ((2, 1), (3,))
    found = dr.map_ranks(lambda nothing, comm: np.zeros(2, "f4" if comm.rank else "f8"), None)
    assert [v.dtype for v in found] == ["f8", "f4", "f4"]
    found = dr.map_ranks(lambda nothing, comm: np.ma.masked_less(np.arange(3), 1), None)
    assert all(isinstance(v, np.ma.MaskedArray) for v in found)


@pytest.mark.ranks(1, 2, 3)
def test_the_axis_of_the_result(client: Client, ranks: int) -> None:
    x = dr.redistribute(fa(ar(4, 6), 2), dr.Slab.Y)
    check(dr.map_ranks(whole, x), ar(4, 6), x.chunks)
    found = dr.map_ranks(whole, x, axis=0)  # as tall as before, side by side or not at all
    assert found.shape == (4 * ranks, 6 // ranks)
    transposed = dr.map_ranks(lambda local, comm: local.T, x, axis=0)
    check(transposed, ar(4, 6).T)
    assert dr.layout_of(transposed) == dr.Slab.X


@pytest.mark.ranks(3)
def test_a_result_is_let_go(client: Client) -> None:
    y = dr.map_ranks(lambda nothing, comm: np.ones(5), None)
    assert sum(len(found) for found in client.run(data_of).values()) == 3
    name = y.name
    z = (y + 1).compute()
    same(z, np.full(15, 2.0))
    del y

    def gone() -> bool:
        return not any(name in key for found in client.run(data_of).values() for key in found)

    until(gone)


# --------------------------------------------------------------------------------- in what order
@pytest.mark.ranks(2, 3)
@pytest.mark.wires
def test_two_at_once(client: Client, ranks: int) -> None:
    def code(nothing: None, comm: RankComm, base: int) -> float:
        total = 0.0
        for step in range(10):
            total += comm.all_reduce(np.full(2000, base + step + comm.rank, "f8"))[7]
        return total

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda base: dr.map_ranks(code, None, base), range(8)))
    for base, values in enumerate(found):
        want = sum((base + step) * ranks + ranks * (ranks - 1) / 2 for step in range(10))
        assert values == [want] * ranks


@pytest.mark.ranks(3)
def test_one_after_the_other_in_one_order(client: Client, ranks: int, tmp_path: Path) -> None:
    def code(nothing: None, comm: RankComm, number: int) -> None:
        with open(tmp_path / f"rank-{comm.rank}", "a") as log:
            log.write(f"{number} begins\n")
            log.flush()
            time.sleep(0.01 * comm.rank)
            log.write(f"{number} ends\n")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: dr.map_ranks(code, None, number), range(12)))
    (first, *others) = [(tmp_path / f"rank-{r}").read_text().splitlines() for r in range(ranks)]
    numbers = [line.split()[0] for line in first[::2]]
    assert sorted(map(int, numbers)) == list(range(12))
    assert first == [f"{n} {what}" for n in numbers for what in ("begins", "ends")]
    assert others == [first] * (ranks - 1)


@pytest.mark.ranks(2, 3)
@pytest.mark.wires
def test_beside_redistributions(client: Client, ranks: int, wire: str) -> None:
    """Exchanges over Dask's comm have their turn in the same lanes."""
    want = ar(60, 50)
    failed: list[BaseException] = []

    def relay() -> None:
        try:
            for k in range(6):
                x = fa(want + k, (7, 50))
                same(dr.redistribute(x, dr.Slab.Y, client=client).compute(), want + k)
        except BaseException as error:
            failed.append(error)

    def code(local: NDArray[Any], comm: RankComm) -> Any:
        columns = comm.redistribute(local, dr.Slab.X, dr.Slab.Y)
        return comm.redistribute(columns + 1, dr.Slab.Y, dr.Slab.X)

    x = dr.redistribute(fa(want, 13), dr.Slab.X).persist()
    beside = threading.Thread(target=relay)
    before = max((report.number for report in dr.runs()), default=0)
    beside.start()
    while beside.is_alive():
        same(dr.map_ranks(code, x).compute(), want + 1)
    beside.join()
    assert not failed
    if wire == DASK_COMM and ranks > 1:
        assert any(DASK_COMM in report.wires for report in since(client, before))


# ----------------------------------------------------------------------------- what goes wrong
@pytest.mark.ranks(1, 2, 3)
def test_the_error_of_the_lowest_rank_that_failed(client: Client, ranks: int) -> None:
    class Broken(Exception):
        def __init__(self, rank: int, reason: str) -> None:
            super().__init__(rank, reason)

    def code(nothing: None, comm: RankComm) -> None:
        if comm.rank == ranks - 1 or (ranks == 3 and comm.rank == 1):
            raise Broken(comm.rank, "as planned")
        comm.barrier()

    at = {1: 0, 2: 1, 3: 1}[ranks]
    with pytest.raises(Broken) as caught:
        dr.map_ranks(code, None)
    assert caught.value.args == (at, "as planned")
    (note,) = caught.value.__notes__
    assert f"raised on rank {at} on {dr.connect(client).addresses[at]}" in note
    assert "in code" in note
    assert dr.map_ranks(lambda nothing, comm: comm.rank, None) == list(range(ranks))


@pytest.mark.ranks(2)
def test_errors_that_cannot_travel(client: Client) -> None:
    def unpicklable(nothing: None, comm: RankComm) -> None:
        error = ValueError("told in words")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    def odd(nothing: None, comm: RankComm) -> None:
        class Odd(Exception):
            def __init__(self, a: int, b: int) -> None:
                super().__init__("told in words")

        raise Odd(1, 2)

    for code in (unpicklable, odd):
        with pytest.raises(dr.RedistError, match="told in words"):
            dr.map_ranks(code, None)

    def leaves(nothing: None, comm: RankComm) -> None:
        raise SystemExit(3)

    with pytest.raises(dr.RedistError, match=r"SystemExit\(3\)"):
        dr.map_ranks(leaves, None)
    with pytest.raises(TypeError, match="pickle"):
        dr.map_ranks(lambda nothing, comm: threading.Lock(), None)
    assert dr.map_ranks(lambda nothing, comm: comm.rank, None) == [0, 1]


@pytest.mark.ranks(2)
def test_a_function_that_ranks_cannot_load(client: Client) -> None:
    class Unloadable:
        def __reduce__(self) -> Any:
            return _refuse, ()

    with pytest.raises(ImportError, match="only the caller") as caught:
        dr.map_ranks(lambda nothing, comm, what: what, None, Unloadable())
    assert "raised on rank 0" in caught.value.__notes__[0]
    with pytest.raises(TypeError, match="pickle"):
        dr.map_ranks(lambda nothing, comm, what: what, None, threading.Lock())


def _refuse() -> None:
    raise ImportError("only the caller has this")


def test_without_a_client() -> None:
    with pytest.raises(dr.RedistError, match="no Dask client"):
        dr.map_ranks(echo, None)


def test_an_asynchronous_client() -> None:
    import asyncio

    async def main() -> None:
        async with Client(
            n_workers=1, processes=False, asynchronous=True, dashboard_address=":0"
        ) as client:
            await dr.connect(client)
            with pytest.raises(dr.RedistError, match="asynchronous"):
                dr.map_ranks(echo, None)

    asyncio.run(main())


def test_ranks_in_threads() -> None:
    with ranks_in_threads(3) as client:
        x = dr.redistribute(fa(ar(7, 5), 3), dr.Slab.X)

        def code(local: NDArray[Any], comm: RankComm) -> Any:
            comm.all_reduce(np.ones(3000))
            return comm.redistribute(local, dr.Slab.X, dr.Slab.Y)

        check(dr.map_ranks(code, x, client=client, axis=1), ar(7, 5))


def test_no_mpi_on_ranks_that_have_none(client: Client) -> None:
    with pytest.raises(dr.RedistError, match="LocalMPICluster"):
        dr.map_ranks(lambda nothing, comm: comm.mpi, None)


class Stands:
    """In the place of a communicator."""

    def __init__(self, seats: list[int]) -> None:
        self.ranks = {seat: rank for rank, seat in enumerate(seats)}
        self.users = "stands for one"


@pytest.mark.ranks(3)
def test_mpi_is_the_communicator_of_exactly_these_ranks(client: Client) -> None:
    seats = [seat.seat for seat in dr.connect(client).seats]

    def put(dask_worker: Any, group: Any) -> None:
        groups = dask_worker.plugins["dask_redist"].reach.mail.groups
        groups._made[99] = group
        groups.choose(99 if group is not None else None)

    def mpi(nothing: None, comm: RankComm) -> str:
        try:
            return str(comm.mpi)
        except dr.RedistError as error:
            return str(error)

    told = {
        tuple(seats): "stands for one",
        tuple(seats[::-1]): "not these any more",
        (*seats, 77): "of 4 ranks",
        tuple(seats[:2]): "has no communicator with",
    }
    try:
        for members, words in told.items():
            client.run(put, group=Stands(list(members)))
            assert all(words in found for found in dr.map_ranks(mpi, None)), members
    finally:
        client.run(put, group=None)
