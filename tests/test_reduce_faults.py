"""Reductions of which a rank dies, an error is raised, or nobody wants the result any more.

Each ends in the right values or the user's own error, and nothing is held. What is to happen in the
middle of a run waits for a file: a chunk, a merge, or the reading of a result.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import dask.base
import numpy as np
import pytest
from cluster import fa, new_runs, patient_with_the_dead, same
from dask.delayed import delayed
from distributed import Client, LocalCluster, wait
from lowered import force
from test_faults import kill, three_ranks
from waiting import nothing_held, until

import dask_redist as dr
from dask_redist import deposits, dist

VALUES = np.arange(8.0 * 30).reshape(8, 30)
pytestmark = pytest.mark.filterwarnings("ignore:::dask", "ignore:::numpy")


@pytest.fixture(autouse=True)
def reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reduction is a run."""
    force(monkeypatch, "reduced")


@pytest.fixture(scope="module")
def mortals() -> Iterator[list[LocalCluster]]:
    """A cluster whose ranks may be killed, in a list of one."""
    with patient_with_the_dead():
        running = [three_ranks()]
        yield running
        running[0].close()


@pytest.fixture
def mortal(mortals: list[LocalCluster]) -> Iterator[Client]:
    """A client of three ranks."""
    for attempt in range(2):
        with Client(mortals[0]) as client:
            with contextlib.suppress(TimeoutError):
                client.wait_for_workers(3, timeout=15)
            if len(client.nthreads()) == 3:
                dr.connect(client, n_ranks=3, timeout=30)
                yield client
                return
        assert attempt == 0
        mortals[0].close()
        mortals[0] = three_ranks()


def wait_for(gate: Path) -> None:
    """Say that somebody is here, and go on when the file is there."""
    (gate.parent / f"here-{time.time_ns()}").touch()
    while not gate.exists():
        time.sleep(0.01)


def is_here(gate: Path, count: int = 1) -> bool:
    return len(list(gate.parent.glob("here-*"))) >= count


def gated(gate: Path, first: int) -> da.Array:
    """The values in four slabs; those from ``first`` on wait for the gate."""

    def block(chunk: Any, block_id: tuple[int, ...] = ()) -> Any:
        if block_id[0] >= first:
            wait_for(gate)
        return chunk

    x: da.Array = da.from_array(VALUES, chunks=(2, -1), name=False)
    y: da.Array = da.map_blocks(block, x, dtype="f8", meta=np.empty((0, 0)))
    return y


def added(gate: Path | None, blocks: Any, axis: Any, keepdims: bool) -> Any:
    """A sum that waits for the gate."""
    if gate is not None and blocks.size:
        wait_for(gate)
    return blocks.sum(axis=axis, keepdims=keepdims)


def total(x: da.Array, merge: Path | None = None) -> da.Array:
    """The sum of the rows; its merge waits for a gate."""
    plain = partial(added, None)
    with dr.enable():
        y: da.Array = (
            x.sum(axis=0)
            if merge is None
            else da.reduction(x, plain, partial(added, merge), axis=0, dtype="f8", combine=plain)
        )
    return y


def hold_reading(gate: Path, dask_worker: Any) -> None:
    """Have the rank wait before it reads its next result."""
    from dask_redist import taskside as module

    rank: Any = module
    assemble = rank.assemble_result

    def held(*args: Any) -> Any:
        rank.assemble_result = assemble
        wait_for(gate)
        return assemble(*args)

    rank.assemble_result = held


def brought_to(client: Client, moment: str, gate: Path) -> da.Array:
    """The persisted sum of the rows, as far as that moment."""
    if moment == "the chunks compute":
        y = total(gated(gate, 0)).persist()
        until(lambda: is_here(gate, 3))
    elif moment == "it is contributed":
        y = total(gated(gate, 3)).persist()
        until(lambda: bool(dr.runs()) and is_here(gate))
        time.sleep(0.2)  # the other contributions get in
    elif moment == "it is merged":
        y = total(da.from_array(VALUES, chunks=(2, -1), name=False), gate).persist()
        until(lambda: is_here(gate))
    elif moment == "the result is read":
        client.run(partial(hold_reading, gate), workers=[dr.connect(client).addresses[0]])
        y = total(da.from_array(VALUES, chunks=(2, -1), name=False)).persist()
        until(lambda: is_here(gate))
    else:
        y = total(da.from_array(VALUES, chunks=(2, -1), name=False)).persist()
        wait(y, timeout=30)
    found: da.Array = y
    return found


MOMENTS = (
    *("the chunks compute", "it is contributed", "it is merged", "the result is read"),
    "it is there",
)


def check_next(client: Client) -> None:
    """What comes after the fault is right, and then nothing is held."""
    with dr.enable(policy="always"):
        x = da.from_array(VALUES, chunks=(3, 10), name=False)
        got = dask.base.compute(x.mean(axis=0), x.rechunk((8, 5)).argmax(axis=1))
    np.testing.assert_allclose(got[0], VALUES.mean(axis=0))
    same(got[1], VALUES.argmax(axis=1))
    until(lambda: nothing_held(client))


# ---------------------------------------------------------------------------- ranks that die
@pytest.mark.parametrize(
    ("moment", "victim"),
    [*((moment, victim) for moment in MOMENTS[2:4] for victim in (0, 1)),
     *((moment, 0) for moment in (*MOMENTS[:2], MOMENTS[4]))],
)  # fmt: skip
def test_a_rank_is_killed(mortal: Client, tmp_path: Path, moment: str, victim: int) -> None:
    gate = tmp_path / "gate"
    y = brought_to(mortal, moment, gate)
    kill(mortal, victim)
    gate.touch()
    same(mortal.compute(y).result(timeout=60), VALUES.sum(axis=0))
    del y
    check_next(mortal)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_reduction_is_cancelled(mortal: Client, tmp_path: Path, moment: str) -> None:
    gate = tmp_path / "gate"
    y = brought_to(mortal, moment, gate)
    mortal.cancel(y)
    time.sleep(0.2)
    gate.touch()
    del y
    check_next(mortal)


TENSORS = VALUES[:6].reshape(3, 2, 30)
COLLECTIVES: dict[str, tuple[Any, Any]] = {
    "reduce": (partial(dist.reduce, dst=1), TENSORS.sum(axis=0)),
    "all_reduce": (dist.all_reduce, TENSORS.sum(axis=0)),
    "reduce_scatter": (dist.reduce_scatter, TENSORS.sum(axis=0)),
    "broadcast": (partial(dist.broadcast, src=2), TENSORS[2]),
    "all_gather": (dist.all_gather, VALUES[:6]),
}


@pytest.mark.parametrize("victim", [1, pytest.param(2, marks=pytest.mark.everything)])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_rank_is_killed_in_a_collective(
    mortal: Client, tmp_path: Path, name: str, victim: int
) -> None:
    gate = tmp_path / "gate"
    collective, expected = COLLECTIVES[name]
    y = collective(gated(gate, 2)[:6]).persist()
    until(lambda: is_here(gate))
    kill(mortal, victim)
    gate.touch()
    same(mortal.compute(y).result(timeout=60), expected)
    del y
    check_next(mortal)


def test_what_nobody_could_read_of_a_forgotten_reduction_changes_nothing(client: Client) -> None:
    scheduler: Any = client.scheduler
    client.sync(scheduler.redist_unread, id=("no-such-fence",), number=1)
    known = client.run_on_scheduler(
        lambda dask_scheduler: dict(dask_scheduler.plugins["dask_redist"].conductor.restarts)
    )
    assert ("no-such-fence",) not in known


def test_a_result_is_lost_and_made_again(mortal: Client) -> None:
    """Its contributions are forgotten by then, those of a persisted input are not computed."""
    x = da.from_array(VALUES, chunks=(2, -1), name=False).persist()
    y = total(x).persist()
    wait(y)
    kill(mortal, 0)
    same(mortal.compute(y + 1).result(timeout=60), VALUES.sum(axis=0) + 1)
    del x, y
    check_next(mortal)


# ----------------------------------------------------------------------------- errors of users
class Refusal(Exception):
    """What the users' functions raise."""


def refuse(where: str, blocks: Any, axis: Any, keepdims: bool, **_: Any) -> Any:
    if np.size(blocks) and np.max(blocks) > 0:
        raise Refusal(where)
    return np.sum(blocks, axis=axis, keepdims=keepdims)


def plainly(blocks: Any, axis: Any, keepdims: bool) -> Any:
    return np.sum(blocks, axis=axis, keepdims=keepdims)


def combine_at(count: int) -> None:
    """On a worker: partials that a rank holds before it combines them."""
    deposits.BATCH = count


def refusing(where: str, rows: int = 2) -> da.Array:
    """A sum of which one of three functions raises; many chunks have a rank combine ahead."""
    names = ("chunk", "combine", "aggregate")
    functions = {name: plainly for name in names} | {where: partial(refuse, where)}
    values = np.arange(8.0 * 30 * 16).reshape(8 * 16, 30)
    x = da.from_array(values, chunks=(rows, -1), name=False)
    with dr.enable():
        y: da.Array = da.reduction(
            x, functions["chunk"], functions["aggregate"], combine=functions["combine"],
            axis=0, dtype="f8", meta=np.empty(0), split_every=4,
        )  # fmt: skip
    return y


@pytest.mark.erring
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.wires
@pytest.mark.parametrize("where", ["chunk", "combine", "aggregate"])
def test_the_users_error_comes_out(client: Client, where: str) -> None:
    client.run(combine_at, 2)
    try:
        with pytest.raises(Refusal, match=where):
            refusing(where).compute()
    finally:
        client.run(combine_at, deposits.BATCH)
    until(lambda: nothing_held(client))
    with dr.enable():
        same(fa(VALUES, (2, 30)).sum(axis=0).compute(), VALUES.sum(axis=0))


def fails_once(flag: Path, where: str, here: str, blocks: Any, axis: Any, keepdims: bool) -> Any:
    if where == here and np.size(blocks) and np.max(blocks) > 0 and not flag.exists():
        flag.touch()
        raise Refusal(here)
    return np.sum(blocks, axis=axis, keepdims=keepdims)


def looks_for_a_file(blocks: Any, axis: Any, keepdims: bool) -> Any:
    raise FileNotFoundError("no such weights")


@pytest.mark.erring
@pytest.mark.ranks(2)
def test_an_error_of_the_system_is_the_users_too(client: Client) -> None:
    """It is no rank that has left, though that would be an OSError as well."""
    x = da.from_array(VALUES, chunks=(2, -1), name=False)
    with dr.enable(), new_runs(client) as new:
        y = da.reduction(x, np.sum, looks_for_a_file, axis=0, dtype="f8", meta=np.empty(0))
        with pytest.raises(FileNotFoundError, match="weights"):
            y.compute()
        assert len(new()) == 1
    until(lambda: nothing_held(client))


@pytest.mark.erring
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("where", ["chunk", "aggregate"])
def test_retries_go_on_with_the_run(client: Client, tmp_path: Path, where: str) -> None:
    chunk, aggregate = (
        partial(fails_once, tmp_path / "flag", where, here) for here in ("chunk", "aggregate")
    )
    x = da.from_array(VALUES, chunks=(2, -1), name=False)
    with dr.enable():
        y = da.reduction(x, chunk, aggregate, axis=0, dtype="f8", meta=np.empty(0))
    same(client.compute(y, retries=2).result(timeout=60), VALUES.sum(axis=0))


@pytest.mark.erring
@pytest.mark.ranks(3)
def test_errors_are_the_users_however_often(client: Client) -> None:
    for _ in range(3):
        with pytest.raises(Refusal):
            client.compute(refusing("aggregate"), retries=1).result(timeout=60)
    until(lambda: nothing_held(client))


# --------------------------------------------------------------------------------- others' work
@pytest.mark.ranks(2, 3)
def test_two_clients_reduce_the_same(client: Client) -> None:
    assert client.scheduler is not None
    x = da.from_array(VALUES, chunks=(2, -1))
    with Client(client.scheduler.address, set_as_default=False) as other:
        with new_runs(client) as new:
            y = total(x)
            one, two = client.compute(y), other.compute(y)
            same(one.result(timeout=30), VALUES.sum(axis=0))
            same(two.result(timeout=30), VALUES.sum(axis=0))
            assert len(new()) >= 1
        one.release()
        same(other.compute(y + 1).result(timeout=30), VALUES.sum(axis=0) + 1)
        del two


@pytest.mark.ranks(2, 3)
def test_a_compute_inside_a_task(client: Client) -> None:
    """No contribution of the graph that it is in: it works in its own thread."""
    y = total(da.from_array(VALUES, chunks=(2, -1), name=False))

    def nested() -> Any:
        return y.compute(scheduler="sync")

    same(delayed(nested)().compute(), VALUES.sum(axis=0))

    def inside(block: Any) -> Any:
        return block + y.compute(scheduler="sync")[: block.shape[-1]].sum()

    with dr.enable():
        z = da.from_array(VALUES, chunks=(2, -1)).map_blocks(inside, dtype="f8").sum(axis=0)
    same(z.compute(), (VALUES + VALUES.sum()).sum(axis=0))


@pytest.mark.ranks(2)
def test_a_compute_by_a_client_inside_a_task(client: Client) -> None:
    from distributed import worker_client

    x = da.from_array(VALUES, chunks=(2, -1), name=False)
    y = total(x)

    def nested() -> Any:
        with worker_client():
            return y.compute()

    same(delayed(nested)().compute(), VALUES.sum(axis=0))


@pytest.mark.ranks(1, 3)
def test_made_again_and_again(client: Client) -> None:
    x = da.from_array(VALUES, chunks=(2, -1), name=False)
    y = total(x)
    for _ in range(3):
        same(y.compute(), VALUES.sum(axis=0))
        until(lambda: nothing_held(client))
    for held in (y.persist(), y.persist()):
        same(held.compute(), VALUES.sum(axis=0))


@pytest.mark.ranks(3)
def test_a_contribution_that_is_left_alone_is_none(client: Client) -> None:
    """Some partials are asked for without the result: no run begins, and none is left."""
    y = total(da.from_array(VALUES, chunks=(2, -1), name=False))
    graph: Any = y.__dask_graph__()
    keys = [key for key in dict(graph) if "contribute" in str(key)]
    with new_runs(client) as new:
        held = client.get(graph, keys[:2], sync=True)
    assert len(held) == 2
    assert new() == []
    same(y.compute(), VALUES.sum(axis=0))
