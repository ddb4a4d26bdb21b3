"""Arrays that every rank holds whole: one key, in memory on all ranks, each copy its own."""

from __future__ import annotations

import time
from typing import Any

import dask.array as da
import numpy as np
import pytest
from cluster import ar, fa, new_runs
from distributed import Client, Future, get_worker, wait
from waiting import nothing_held, until

import dask_redist as dr

VALUES = ar(13, 7, 5)
TARGETS = [dr.Slab.X, dr.Slab.Z, dr.Pencil.Y, {0: 3}, (5, 4, 2)]


def replicated(client: Client, chunks: Any = (4, 3, 5)) -> tuple[da.Array, Future[Any]]:
    """A persisted array that every rank holds, and its one future."""
    y = dr.resplit(fa(VALUES, chunks), None, client=client).persist()
    (future,) = client.futures_of(y)
    return y, future


def holders(client: Client, future: Future[Any]) -> set[str]:
    return set(client.who_has([future])[future.key])


def transfers(client: Client) -> dict[str, int]:
    """How many transfers each worker has asked for."""
    found: dict[str, int] = client.run(
        lambda dask_worker: dask_worker.state.transfer_incoming_count_total
    )
    return found


def look(block: np.ndarray) -> tuple[np.ndarray, int, str]:
    return block.copy(), block.__array_interface__["data"][0], get_worker().address


@pytest.mark.sample
@pytest.mark.wires
def test_every_rank_holds_its_own_copy(client: Client) -> None:
    addresses = dr.connect(client).addresses
    y, future = replicated(client)
    # Not waited for: the copies must be there before any task that needs them is placed.
    found = [client.submit(look, future, workers=[a], pure=False) for a in addresses]
    blocks = client.gather(found)
    assert holders(client, future) == set(addresses)
    assert [where for *_, where in blocks] == list(addresses)
    for block, *_ in blocks:
        assert np.array_equal(block, VALUES)
    assert np.array_equal(y.compute(), VALUES)
    assert y.chunks == ((13,), (7,), (5,))


@pytest.mark.ranks(2, 3)
def test_a_task_on_each_rank_transfers_nothing(client: Client) -> None:
    y, future = replicated(client)
    wait(y)
    before = transfers(client)
    client.gather([client.submit(look, future, workers=[a]) for a in dr.connect(client).addresses])
    assert transfers(client) == before


@pytest.mark.ranks(3)
def test_a_copy_that_is_changed_changes_no_other(client: Client) -> None:
    def spoil(key: Any, dask_worker: Any) -> None:
        dask_worker.data[key][:] = -1

    def whole(key: Any, dask_worker: Any) -> bool:
        return bool((dask_worker.data[key] == VALUES).all())

    y, future = replicated(client)
    wait(y)
    first, *others = dr.connect(client).addresses
    client.run(spoil, future.key, workers=[first])
    assert client.run(whole, future.key) == {first: False} | dict.fromkeys(others, True)


@pytest.mark.everything
@pytest.mark.ranks(3)
def test_the_memory_manager_leaves_them_alone(client: Client) -> None:
    addresses = set(dr.connect(client).addresses)
    y, future = replicated(client)
    plain = client.submit(np.ones, 3)
    wait([y, plain])
    client.replicate([plain])
    assert holders(client, plain) == addresses
    assert client.amm.running()
    time.sleep(10)
    assert holders(client, future) == addresses
    assert len(holders(client, plain)) == 1, "other copies are Dask's to drop"


@pytest.mark.wires
def test_bytes_are_those_of_the_plan(client: Client) -> None:
    ranks = dr.connect(client).size
    x = fa(VALUES, (4, 3, 5)).persist()
    wait(x)
    plan = dr.plan(x, dr.Replicated())
    assert plan.bytes_moved == VALUES.nbytes * (ranks - 1)
    with new_runs(client) as new:
        y = dr.redistribute(x, dr.Replicated()).persist()
        wait(y)
        (report,) = new()
    np.testing.assert_array_equal(report.traffic, plan.traffic)


@pytest.mark.ranks(2, 3, 5)
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_from_there_no_byte_moves(client: Client, target: Any) -> None:
    y, _ = replicated(client)
    wait(y)
    plan = dr.plan(y, target)
    assert plan.bytes_moved == 0
    assert "whole on every rank" in plan.explain()
    before = transfers(client)
    with new_runs(client) as new:
        z = dr.redistribute(y, target).persist()
        wait(z)
        assert not new()
    assert transfers(client) == before
    assert z.chunks == plan.target.chunks
    np.testing.assert_array_equal(dr.owners(z), plan.target.owners)
    assert np.array_equal(z.compute(), VALUES)
    assert np.array_equal(z.blocks[0].compute(), VALUES[: z.chunks[0][0]])


@pytest.mark.ranks(1, 3)
def test_layouts(client: Client) -> None:
    ranks = dr.connect(client).size
    lazy = dr.resplit(fa(VALUES, 4), None)
    assert dr.layout_of(lazy) == dr.Replicated()
    assert dr.lshape_map(lazy).tolist() == [[13, 7, 5]] * ranks
    y, _ = replicated(client)
    if ranks > 1:
        assert dr.layout_of(y) == dr.Replicated()
        assert dr.lshape_map(y).tolist() == [[13, 7, 5]] * ranks
    # Work on it is done once, so its result is on one rank.
    assert np.array_equal(dr.redistribute(y + 1, dr.Slab.Y).compute(), VALUES + 1)


def test_when_nobody_wants_it_all_copies_go(client: Client) -> None:
    def stored(dask_worker: Any) -> list[Any]:
        return [k for k in dask_worker.data if str(k).startswith("('redistribute-")]

    y, future = replicated(client)
    wait(y)
    assert all(client.run(stored).values())
    del y, future
    until(lambda: not any(client.run(stored).values()))
    until(lambda: nothing_held(client))


@pytest.mark.ranks(3)
def test_copies_for_a_key_that_never_comes_go(client: Client) -> None:
    """The take may be cancelled while the others put their copies."""
    key = ("redistribute-lost", 0)

    def put(key: Any, dask_worker: Any) -> None:
        dask_worker.update_data({key: np.ones(3)})

    def too_late(key: Any, addresses: list[str], dask_scheduler: Any) -> None:
        dask_scheduler.plugins["dask_redist"].replicas.place(key, addresses)

    others = list(dr.connect(client).addresses[1:])
    client.run(put, key, workers=others)
    client.run_on_scheduler(too_late, key, others)
    until(lambda: not any(client.run(lambda dask_worker: list(dask_worker.data)).values()))


@pytest.mark.ranks(2)
def test_elements_that_are_no_bytes_are_not_replicated(client: Client) -> None:
    x = fa(np.array(["a", None, 3], dtype=object), 1)
    assert dr.resplit(x, None).compute().tolist() == ["a", None, 3]
    with pytest.raises(dr.RedistError, match="no plain bytes"):
        dr.resplit(x, None, fallback="error")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2)])
def test_small_and_empty(client: Client, shape: tuple[int, ...]) -> None:
    values = ar(*shape)
    with new_runs(client) as new:
        y = dr.redistribute(fa(values, shape), dr.Replicated()).persist()
        (future,) = client.futures_of(y)
        wait(y)
        assert len(new()) == 1
    assert len(holders(client, future)) == 2
    assert np.array_equal(y.compute(), values)


@pytest.mark.ranks(3)
@pytest.mark.wires
@pytest.mark.parametrize("some", [(0, 2), (1, 2), (1,)], ids=str)
def test_on_some_ranks(client: Client, some: tuple[int, ...]) -> None:
    addresses = dr.connect(client).addresses
    layout = dr.Replicated(some)
    x = fa(VALUES, (4, 3, 5)).persist()
    wait(x)
    plan = dr.plan(x, layout)
    assert plan.bytes_total == VALUES.nbytes * len(some)
    with new_runs(client) as new:
        y = dr.redistribute(x, layout).persist()
        (future,) = client.futures_of(y)
        wait(y)
        (report,) = new()
    np.testing.assert_array_equal(report.traffic, plan.traffic)
    held = [plan.peak_bytes(r) - plan.staging_bytes(r) for r in range(3)]
    assert [nbytes >= VALUES.nbytes for nbytes in held] == [r in some for r in range(3)]
    assert holders(client, future) == {addresses[r] for r in some}
    if len(some) > 1:  # else it is a chunk like any other
        assert dr.layout_of(y) == layout
        assert dr.lshape_map(y).tolist() == [
            list(VALUES.shape) if r in some else [0] * 3 for r in range(3)
        ]
    # From there it is a change like any other: not every rank has it.
    with new_runs(client) as new:
        assert np.array_equal(dr.redistribute(y, dr.Slab.Y).compute(), VALUES)
        assert len(new()) == 1
