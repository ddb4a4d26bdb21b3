"""An MPI rank as a Dask worker: what ``mpiexec`` starts for :class:`dask_redist.LocalMPICluster`.

A rank is a plain worker: no nanny and no fork, which MPI does not allow. It ends when its scheduler
closes it, or some seconds after the process that started the cluster has died. Ranks leave MPI
together, and sleep until then: an MPI that waits keeps a core busy.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

from distributed import Worker

from dask_redist import world
from dask_redist.process import Process

#: seconds that a rank may go on when the process that started it has died
GRACE = 5.0
#: seconds that a launcher may take to pass on what a rank has printed, before it kills the ranks
HEARD = 1.0


class RankWorker(Worker):
    """A worker whose process ends: it does not wait for tasks that still run."""

    async def close(  # type: ignore[override]
        self, timeout: float = 10, executor_wait: bool = False, **kwargs: Any
    ) -> str | None:
        """Close, leaving running tasks to the end of the process."""
        be_silent()
        return await super().close(timeout, executor_wait=False, **kwargs)


def be_silent() -> None:
    """Dask has much to say of connections and tasks that end, where all is meant to end."""
    logging.getLogger("distributed").setLevel(logging.CRITICAL)


def wait_quietly(request: Any, timeout: float | None = None) -> bool:
    """Whether an MPI request completes in time; the core is free meanwhile."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while not request.Test():
        if deadline is not None and time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def leave_together(comm: Any, timeout: float | None = None) -> bool:
    """Whether all ranks of a communicator have come to their end, in time."""
    return wait_quietly(comm.Ibarrier(), timeout)


def abort(comm: Any, code: int) -> NoReturn:
    """End all ranks of the MPI job at once, when what was printed has reached the launcher."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(HEARD)
    comm.Abort(code)
    os._exit(code)  # where an MPI returns from it


def _end_with(parent: Process) -> None:
    """End the process some seconds after another one has died."""
    while not parent.is_dead():
        time.sleep(1.0)
    time.sleep(GRACE)
    os._exit(1)


def serve(scheduler: str, options: dict[str, Any]) -> None:
    """Be a worker of a scheduler until it closes us."""

    async def work() -> None:
        async with RankWorker(scheduler, **options) as worker:
            await worker.finished()

    asyncio.run(work())


def main() -> None:
    """Be a rank: ``mpiexec -n N python -c ... SCHEDULER OPTIONS``, options and parent as JSON."""
    scheduler, text = sys.argv[1:]
    given = json.loads(text)
    parent = Process(*given.pop("parent"))
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        mpi = world.start()
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
    comm = mpi.COMM_WORLD
    # Who is who, for the one that reads the launcher's messages.
    print(f"rank {comm.rank} is PID {os.getpid()}", flush=True)
    if comm.size != given.pop("size"):
        sys.exit(f"RedistError: mpiexec started {comm.size} ranks")
    try:
        serve(scheduler, {"name": comm.rank, **given})
    except BaseException:
        traceback.print_exc()
        abort(comm, 1)
    leave_together(comm)
