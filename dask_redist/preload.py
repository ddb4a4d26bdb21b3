"""Dask's ``--preload dask_redist``: ranks from the start, for code that is not changed.

On the scheduler it installs the conductor, and a rank on every worker that comes; on a worker it
only imports the package, so that the rank is up at once. A client connects by itself.
"""

from __future__ import annotations

from typing import Any

from distributed import Scheduler
from distributed.protocol.pickle import dumps

from dask_redist.rank import Rank
from dask_redist.scheduler import SchedulerShell


async def dask_setup(process: Any) -> None:
    """What Dask calls in a process that preloads the package."""
    if isinstance(process, Scheduler):
        process.add_plugin(SchedulerShell())  # Dask starts its plugins after the preloads
        process.worker_plugins[Rank.name] = dumps(Rank())
