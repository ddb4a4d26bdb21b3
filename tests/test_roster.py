"""The roster's messages to ranks, on a scheduler that only notes them."""

import asyncio
import time
from typing import Any

import pytest

import dask_redist as dr
from dask_redist.roster import Roster


class Noted:
    """A scheduler's connections; as Dask's, it knows nobody whose connection has gone."""

    def __init__(self) -> None:
        self.stream_comms: dict[str, list[Any]] = {}

    def worker_send(self, worker: str, message: Any) -> None:
        self.stream_comms[worker].append(message)


def three_ranks(timeout: float = 1.0) -> Any:
    """A roster of three ranks of an MPI world."""
    scheduler: Any = Noted()
    scheduler.workers = {f"tcp://here:{k}": None for k in range(3)}
    roster = Roster(scheduler, timeout)
    for k in range(3):
        scheduler.stream_comms[f"tcp://here:{k}"] = []
        roster.arrive(
            name=f"w{k}", host="here", address=f"tcp://here:{k}", process=(1, "here", "1"),
            card=("path", "nonce", k, 4096), memory_limit=1, nthreads=1, mpi_rank=k % 2,
        )  # fmt: skip
    roster.ranks.seal()
    return roster


def test_a_worker_that_is_just_leaving_is_told_nothing() -> None:
    """Dask ends its tasks when its connection has gone and its seat has not: others are told."""
    roster = three_ranks()
    scheduler = roster.scheduler
    del scheduler.stream_comms["tcp://here:1"]
    roster.tell_all({"op": "redist-free"})
    assert scheduler.stream_comms == {
        "tcp://here:0": [{"op": "redist-free"}],
        "tcp://here:2": [{"op": "redist-free"}],
    }


class Ranks:
    """What ranks answer: the worlds of seats, and what goes wrong when they meet."""

    def __init__(self, worlds: dict[str, int], errors: list[Exception]) -> None:
        self.worlds, self.errors = worlds, errors
        self.met: list[list[int]] = []
        self.told: Any = None

    async def ask(self, seat: Any, op: str, **arguments: Any) -> Any:
        if op == "redist_prove":
            return self.worlds[arguments["address"]] == self.worlds[seat.address]
        if op == "redist_roll":
            return {}
        if op == "redist_meet":
            members = [number for number, _ in arguments["members"]]
            if members not in self.met:
                self.met.append(members)
            if self.errors:
                raise self.errors.pop()
            return {}
        self.told = arguments["communicators"]
        return {"wires": {}}


@pytest.mark.parametrize(
    ("worlds", "groups", "told"),
    [
        ([1, 1, 1], [[1, 3, 2]], {1: 1, 2: 1, 3: 1}),
        ([1, 2, 1], [[1, 3]], {1: 1, 3: 1}),
        ([2, 1, 1], [[3, 2]], {2: 1, 3: 1}),
        ([1, 2, 3], [], {}),
    ],
)
def test_each_world_meets_for_itself(
    worlds: list[int],
    groups: list[list[int]],
    told: dict[int, int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    roster = three_ranks()
    ranks = Ranks({f"tcp://here:{k}": world for k, world in enumerate(worlds)}, [])
    roster.ask = ranks.ask
    asyncio.run(roster.complete(3, 1.0))
    assert (ranks.met, ranks.told) == (groups, told)
    asyncio.run(roster.complete(3, 1.0))
    assert len(caplog.messages) == (len(set(worlds)) > 1)  # once for each set of ranks
    assert all("not all of one MPI job" in message for message in caplog.messages)


def test_a_rank_that_does_not_answer_is_told_at_once_and_nobody_has_met() -> None:
    """An error of ours is also an OSError: it is not taken for a rank that has left."""
    roster = three_ranks()
    late = dr.RunTimeoutError("rank 1 did not answer")
    ranks = Ranks({f"tcp://here:{k}": 0 for k in range(3)}, [late])
    roster.ask = ranks.ask
    began = time.monotonic()
    with pytest.raises(dr.RunTimeoutError, match="rank 1 did not answer"):
        asyncio.run(roster.complete(3, 30.0))
    assert time.monotonic() - began < 20
    ranks.met.clear()
    asyncio.run(roster.complete(3, 30.0))
    assert ranks.met == [[1, 3, 2]]
    assert set(ranks.told) == {1, 2, 3}


def test_a_rank_that_left_is_told_when_time_is_up() -> None:
    roster = three_ranks()
    ranks = Ranks({f"tcp://here:{k}": 0 for k in range(3)}, [OSError("it has left")] * 99)
    roster.ask = ranks.ask
    with pytest.raises(dr.RunTimeoutError, match="the last that was tried: it has left"):
        asyncio.run(roster.complete(3, 0.1))
