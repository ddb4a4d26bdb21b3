"""The climatology as a Prefect flow: tried again where trying helps, failed where it does not.

    pip install "dask-redist[prefect]"
    python flow.py maps.zarr climatology.zarr

Or on a schedule: `climatology.serve(cron="15 3 * * *", parameters={...})`.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.client.schemas.objects import State, TaskRun

JOB = Path(__file__).with_name("job.py")


def may_pass(_task: Any, _run: TaskRun, state: State[Any]) -> bool:
    """Ranks may be there next time; a store without its chunks stays without them."""
    error = state.result(raise_on_failure=False)
    return getattr(error, "returncode", None) == os.EX_UNAVAILABLE


@task(retries=2, retry_delay_seconds=30, retry_condition_fn=may_pass)
def run_job(store: str, result: str, ranks: int) -> str:
    """In a process of its own: a worker of Prefect's outlives a job that crashes."""
    command = [sys.executable, str(JOB), store, result, "--local", str(ranks)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


@flow(log_prints=True)
def climatology(store: str, result: str, ranks: int = 4) -> None:
    print(run_job(store, result, ranks))


if __name__ == "__main__":
    store, result = sys.argv[1:]
    try:
        climatology(store, result)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)  # job.py has said why
