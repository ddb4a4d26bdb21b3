"""What Dask's scheduler knows of a fence: its contributions, where they run, how to run them again.

A fence depends on its contributions. One that was fused with what makes its chunk has another key,
and the fence depends on an alias of it.
"""

from __future__ import annotations

import time
from typing import Any

from dask._task_spec import Alias
from distributed import Scheduler

from dask_redist.ranks import Seat
from dask_redist.spec import PartSpec

#: states of tasks that somebody waits for
NEEDED = {"waiting", "no-worker", "queued", "processing"}


def runs_on(ts: Any, seat: Seat) -> bool:
    """Whether Dask has a task run on a rank's worker."""
    return ts.processing_on is not None and ts.processing_on.address == seat.address


def is_part_of(ts: Any, fence: Any) -> bool:
    """Whether a task is a contribution to a fence; fused with its producer, it has an alias."""
    return ts is not None and (
        ts in fence.dependencies or any(alias in fence.dependencies for alias in ts.dependents)
    )


def is_chunk(key: Any, spec: PartSpec) -> bool:
    """Whether a key is that of an input chunk."""
    return isinstance(key, tuple) and key[0] == spec.name_input


def recompute(scheduler: Scheduler, id: Any) -> None:
    """Have Dask run the contributions and the fence again, as its own p2p rechunk does."""
    fence = scheduler.tasks.get(id)
    if fence is None:
        return
    tasks = [*(t for t in fence.dependents if t.state != "memory"), fence]
    for contribution in fence.dependencies:
        tasks.append(contribution)
        if isinstance(contribution.run_spec, Alias):  # it was fused with its producer
            tasks += contribution.dependencies
    if any(ts.state == "erred" for ts in tasks):
        return
    stimulus = f"redist-recompute-{time.time()}"
    released: dict[Any, Any] = {ts.key: "released" for ts in tasks}
    scheduler.transitions(released, stimulus_id=stimulus)
    scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus)
