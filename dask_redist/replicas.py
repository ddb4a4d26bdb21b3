"""Chunks of which every rank has a copy: one key, in memory on all ranks.

The run of a replicated output writes the whole array into a block of each rank. The take makes an
array of one block; before it returns, the other ranks put arrays of theirs under the same key in
their workers' data, where Dask counts and spills them. The scheduler learns of the copies in the
moment in which the key is in memory: tasks that need it are not placed before.

Dask's memory manager takes copies for waste and drops them within seconds; :class:`KeepReplicas`
stands in for that policy and leaves these keys alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from distributed import Scheduler
from distributed.active_memory_manager import ReduceReplicas, SuggestionGenerator


class Replicas:
    """The replicated keys of a scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        #: workers that have a copy of a key that is not in memory yet
        self._placed: dict[Any, Sequence[str]] = {}
        self._kept: set[Any] = set()
        amm: Any = scheduler.extensions["amm"]
        for policy in [p for p in amm.policies if type(p) is ReduceReplicas]:
            amm.policies.remove(policy)
            amm.add_policy(KeepReplicas(self))

    def __contains__(self, key: Any) -> bool:
        return key in self._kept

    def place(self, key: Any, addresses: Sequence[str]) -> None:
        """Workers have copies of a key whose take returns next, unless it was cancelled."""
        self._placed[key] = addresses
        ts = self._scheduler.tasks.get(key)
        if ts is None or ts.state != "processing":  # no transition will tell us of its end
            self.forget(key)

    def in_memory(self, key: Any) -> None:
        """A key is in memory: so are its copies."""
        if key in self._placed:
            self._kept.add(key)
            ts = self._scheduler.tasks[key]
            for address in self._placed.pop(key):
                if (worker := self._scheduler.workers.get(address)) is not None:
                    self._scheduler.add_replica(ts, worker)

    def forget(self, key: Any) -> None:
        """A key is in memory no more, or will not be: copies that Dask does not know of go."""
        self._kept.discard(key)
        for address in self._placed.pop(key, ()):
            message = {"keys": [key], "stimulus_id": f"redist-replicas-{time.time()}"}
            self._scheduler.worker_send(address, {"op": "free-keys", **message})


class KeepReplicas(ReduceReplicas):
    """Dask's policy, for all keys but the replicated ones."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def run(self) -> SuggestionGenerator:
        """Suggest what Dask's policy does, except drops of replicated keys."""
        suggestions = super().run()
        answer = None
        while True:
            try:
                suggestion = suggestions.send(answer)
            except StopIteration:
                return
            answer = None if suggestion.ts.key in self._replicas else (yield suggestion)
