"""The launcher seen from outside MPI: which MPI there is, and starting a script with it.

This process does not start MPI: a broken one can hang, or end the process. What is to be known is
asked in processes of their own, started as the ranks of a job are, within a time limit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from typing import NamedTuple, NoReturn

from dask_redist import world
from dask_redist.mpijob import telling

#: seconds that two ranks may take to say what MPI they are on
PATIENCE = 30.0
ASK = "from dask_redist.world import main; main()"


class Found(NamedTuple):
    """Which MPI there is, if one works, and what that means."""

    implementation: str | None
    words: str


def find_mpi() -> Found:
    """Start two ranks, and look whether they are two."""
    if find_spec("mpi4py") is None:
        return Found(None, f"ranks on several hosts, batch jobs: {world.INSTALL}")
    mpiexec = world.find_mpiexec()
    launch = [mpiexec, "-n", "2"] if mpiexec is not None else []
    process = subprocess.Popen(
        [*launch, sys.executable, "-c", ASK],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**world.clean_environment(), **world.ON_THIS_HOST},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Found(None, f"{' '.join(launch) or 'MPI'} did not answer within {PATIENCE:g} s")
    rows = [json.loads(line) for line in out.splitlines() if line.startswith(('{"w', '{"e'))]
    if not rows:
        said = telling(out + err) or "it said nothing"
        return Found(None, f"{mpiexec or sys.executable} failed ({process.returncode}): {said}")
    for row in rows:
        if "error" in row:
            return Found(None, row["error"])
    one = world.World(**rows[0]["world"])
    level = f"MPI {one.standard}, thread level {one.thread_level}"
    if mpiexec is None:
        return Found(
            one.implementation, f"{level}; no mpiexec beside Python or on PATH: {world.INSTALL}"
        )
    if one.size == 1:
        return Found(
            one.implementation,
            f"does not fit {mpiexec}, whose two ranks are rank 0 of 1 each: start ranks with "
            f"the mpiexec of {one.implementation}, or install an mpi4py for that of mpiexec",
        )
    return Found(one.implementation, f"{level}; {mpiexec}")


def run_script(script: str, arguments: tuple[str, ...], n: int) -> NoReturn:
    """Become mpiexec, with a script on n ranks.

    Raises
    ------
    RedistError
        There is no mpi4py or no mpiexec.
    """
    mpiexec = world.require_mpiexec()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(mpiexec, [mpiexec, "-n", str(n), sys.executable, script, *arguments])
