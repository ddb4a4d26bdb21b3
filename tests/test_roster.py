"""The roster's messages to ranks, on a scheduler that only notes them."""

from typing import Any

from dask_redist.roster import Roster


class Noted:
    """A scheduler's connections; as Dask's, it knows nobody whose connection has gone."""

    def __init__(self) -> None:
        self.stream_comms: dict[str, list[Any]] = {}

    def worker_send(self, worker: str, message: Any) -> None:
        self.stream_comms[worker].append(message)


def test_a_worker_that_is_just_leaving_is_told_nothing() -> None:
    """Dask ends its tasks when its connection has gone and its seat has not: others are told."""
    scheduler: Any = Noted()
    roster = Roster(scheduler, 1.0)
    for k in range(3):
        scheduler.stream_comms[f"tcp://here:{k}"] = []
        roster.arrive(
            name=f"w{k}", host="here", address=f"tcp://here:{k}", process=(1, "here", "1"),
            card=("path", "nonce", k, 4096), memory_limit=1, nthreads=1,
        )  # fmt: skip
    roster.ranks.seal()
    del scheduler.stream_comms["tcp://here:1"]
    roster.tell_all({"op": "redist-free"})
    assert scheduler.stream_comms == {
        "tcp://here:0": [{"op": "redist-free"}],
        "tcp://here:2": [{"op": "redist-free"}],
    }
