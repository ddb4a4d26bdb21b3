"""Arrays that the ranks have already, joined: by name, made by a function, sent from here."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import dask.array as da
import numpy as np
import pytest
from cluster import ar, check, fa, ranks_of_its_own, same
from distributed import Client, wait
from distributed.client import FutureCancelledError
from numpy.typing import NDArray

import dask_redist as dr
from dask_redist.local import offer, offered


def offer_on(client: Client, **arrays: list[Any]) -> None:
    """Have each rank offer its own of each list; None: nothing under that name."""

    def put(dask_worker: Any, mine: dict[str, Any]) -> None:
        from dask_redist import local

        for name, array in mine.items():
            local._offered.pop(name, None)
            if array is not None:
                local.offer({name: array})

    for rank, address in enumerate(dr.connect(client).addresses):
        mine = {name: parts[rank] for name, parts in arrays.items()}
        client.run(put, mine=mine, workers=[address])


def parts_of(want: NDArray[Any], sizes: list[int], axis: int = 0) -> list[NDArray[Any]]:
    return np.split(want, np.cumsum(sizes)[:-1], axis)


@pytest.mark.sample
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_uneven_parts(client: Client, ranks: int, axis: int) -> None:
    sizes = [(3 * rank + 2) % 4 for rank in range(ranks)]
    shape = [3, 4]
    shape[axis] = sum(sizes)
    want = ar(*shape, dtype="f4")
    parts = parts_of(want, sizes, axis)
    offer_on(client, u=parts)
    sources: list[Any] = ["u", lambda rank, size: parts[rank], parts]
    for source in sources:
        x = dr.from_ranks(source, axis)
        holders = [rank for rank in range(ranks) if sizes[rank]] or [0]
        assert x.chunks[axis] == (tuple(n for n in sizes if n) or (0,))
        assert dr.owners(x).ravel().tolist() == holders
        assert dr.lshape_map(x).tolist() == [list(part.shape) for part in parts]
        layout = dr.layout_of(x)
        if ranks > 1:
            assert layout == dr.Uneven(axis % 2, sizes) or layout == dr.Slab(axis % 2)
        check(x, want, x.chunks)
        moved = dr.redistribute(x, dr.Slab(1 - axis % 2))
        check(moved, want)
        same((x + 1).sum().compute(), (want + 1).sum())


@pytest.mark.parametrize("way", ["function", "list"])
def test_four_arrays_of_three_rows(client: Client, ranks: int, way: str) -> None:
    """Arrays of shape (3, 4) one below the other, and side by side."""
    parts = [ar(3, 4, start=100 * rank) for rank in range(ranks)]
    source: Any = parts if way == "list" else (lambda rank, size: ar(3, 4, start=100 * rank))
    below = dr.from_ranks(source)
    assert below.chunks == ((3,) * ranks, (4,))
    assert dr.layout_of(below) == dr.Slab.X
    check(below, np.concatenate(parts))
    beside = dr.from_ranks(source, axis=1)
    assert beside.chunks == ((3,), (4,) * ranks)
    assert dr.layout_of(beside) == (dr.Slab.Y if ranks > 1 else dr.Slab.X)
    check(beside, np.concatenate(parts, 1))


@pytest.mark.ranks(1, 3)
def test_an_offered_array_is_not_copied(client: Client, ranks: int) -> None:
    offer_on(client, u=[ar(2, 3, start=rank) for rank in range(ranks)])
    x = dr.from_ranks("u")

    def is_it(dask_worker: Any, name: str) -> list[bool]:
        from dask_redist.local import offered

        return [v is offered("u") for key, v in dask_worker.data.items() if key[0] == name]

    assert client.run(is_it, name=x.name) == {a: [True] for a in dr.connect(client).addresses}

    def change(dask_worker: Any) -> None:
        from dask_redist.local import offered

        offered("u")[0, 0] = -7

    client.run(change)
    assert (x.compute()[::2, 0] == -7).all()


@pytest.mark.ranks(3)
def test_copies_do_not_change_who_owns_what(client: Client) -> None:
    x = dr.from_ranks(lambda rank, size: np.full(3, rank))
    client.amm.stop()  # it drops copies
    try:
        client.replicate(client.futures_of(x))
        assert dr.owners(x).tolist() == [0, 1, 2]
    finally:
        client.amm.start()


@pytest.mark.ranks(3)
def test_a_function_is_called_once_a_rank_in_a_thread(client: Client) -> None:
    def made(rank: int, size: int) -> NDArray[Any]:
        name = threading.current_thread().name
        return np.array([[rank, size, "redist-lane" in name]])

    same(dr.from_ranks(made).compute(), np.array([[0, 3, 1], [1, 3, 1], [2, 3, 1]]))


@pytest.mark.ranks(3)
def test_what_does_not_fit(client: Client) -> None:
    def refused(*parts: Any, axis: int = 0) -> str:
        told = set()
        with pytest.raises(dr.LayoutError) as caught:
            dr.from_ranks(list(parts), axis=axis)
        told.add(str(caught.value))
        with pytest.raises(dr.LayoutError) as caught:
            dr.from_ranks(lambda rank, size: parts[rank], axis=axis)
        told.add(str(caught.value))
        if all(isinstance(part, np.ndarray) for part in parts):
            offer_on(client, v=list(parts))
            with pytest.raises(dr.LayoutError) as caught:
                dr.from_ranks("v", axis=axis)
            told.add(str(caught.value))
        (text,) = told
        return text

    one = np.ones((2, 3))
    assert "(2, 3) on ranks 0, 2; (2, 4) on rank 1" in refused(one, np.ones((2, 4)), one)
    assert "(2, 3) on ranks 0, 1; (6,) on rank 2" in refused(one, one, np.ones(6))
    assert "float64 on ranks 0, 2; float32 on rank 1" in refused(one, one.astype("f4"), one)
    assert "a list on rank 0; an array on ranks 1, 2" in refused([1], one, one)
    assert "axis is 2, but the ranks' arrays have 2 axes" in refused(one, one, one, axis=2)
    with pytest.raises(dr.LayoutError, match="2 arrays, but 3 ranks"):
        dr.from_ranks([one, one])


@pytest.mark.ranks(3)
def test_what_is_not_offered(client: Client) -> None:
    one = np.ones(2)
    offer_on(client, u=[one, one, None], w=[None, None, one])
    with pytest.raises(dr.RedistError, match="no array is offered as 'u'; there is") as caught:
        dr.from_ranks("u")
    assert "raised on rank 2 on" in caught.value.__notes__[0]
    with pytest.raises(dr.RedistError, match="'nobody'"):
        dr.from_ranks("nobody")


@pytest.mark.ranks(2)
def test_a_function_that_fails(client: Client) -> None:
    def made(rank: int, size: int) -> NDArray[Any]:
        if rank == 1:
            raise OSError(28, "no space")
        return np.ones(3)

    with pytest.raises(OSError, match="no space") as caught:
        dr.from_ranks(made)
    assert "raised on rank 1 on" in caught.value.__notes__[0]


def test_offers() -> None:
    first, second = np.ones(2), np.ones(3)
    offer({"a test's own": first})
    assert offered("a test's own") is first
    offer({"a test's own": second})
    assert offered("a test's own") is second
    with pytest.raises(TypeError, match="'b' is a list"):
        offer({"b": [1]})  # type: ignore[dict-item]


def test_a_rank_that_is_retired_gives_its_part_away() -> None:
    with ranks_of_its_own(2) as client:
        dr.connect(client, 2)
        x = dr.from_ranks(lambda rank, size: np.full(3, rank))
        y = fa(ar(6), 3).persist()
        wait(y)
        leaving = dr.connect(client).addresses[1]
        client.retire_workers([leaving], close_workers=True, remove=True)
        assert dr.connect(client).size == 1
        same(client.compute(x[:3]).result(timeout=30), np.zeros(3, int))
        same(x.compute(), np.repeat([0, 1], 3))  # Dask moved it before the worker left


def test_a_rank_that_dies_takes_its_part_along() -> None:
    with ranks_of_its_own(2) as client:
        dr.connect(client, 2)
        x = dr.from_ranks(lambda rank, size: np.full(3, rank))
        os.kill(dr.connect(client).seats[1].process.pid, signal.SIGKILL)
        with pytest.raises(FutureCancelledError):
            client.compute(da.concatenate([x, x])).result(timeout=30)
