"""A cluster whose workers are MPI ranks; as a script, one of these workers.

Workers are plain ones, without a nanny: a process that is started by mpiexec must not start others
that would take part in MPI.
"""

import asyncio
import logging
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import dask
from distributed import Client, LocalCluster, Worker

MPIEXEC = str(Path(sys.executable).with_name("mpiexec"))


class MpiCluster:
    """A scheduler here, and one mpiexec that starts the workers."""

    def __init__(self, n: int, launcher: tuple[str, ...] = (MPIEXEC,), host: str = "127.0.0.1"):
        self._folder = TemporaryDirectory(prefix="dask-redist-mpi-")
        self._cluster = LocalCluster(
            n_workers=0,
            host=host,
            dashboard_address=":0",
            silence_logs=logging.CRITICAL,
            scheduler_kwargs={"dashboard_address": f"{host}:0"},
        )
        self.scheduler_address: str = self._cluster.scheduler_address
        self.log = Path(self._folder.name, "log").open("w+b")  # noqa: SIM115
        script = (sys.executable, __file__, self.scheduler_address, self._folder.name)
        self.mpiexec = subprocess.Popen(
            (*launcher, "-n", str(n), *script),
            # As LocalCluster's workers, they inherit the settings.
            env={
                **os.environ,
                "DASK_INTERNAL_INHERIT_CONFIG": dask.config.serialize(dask.config.global_config),
            },
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        with Client(self._cluster) as client:
            try:
                client.wait_for_workers(n, timeout=60)
            except BaseException:
                print(Path(self.log.name).read_text())
                self.close()
                raise

    def close(self) -> None:
        """Leave no process behind."""
        self._cluster.close()
        try:
            self.mpiexec.wait(10)
        except subprocess.TimeoutExpired:
            self.mpiexec.terminate()
            self.mpiexec.wait(10)
        self.log.close()
        self._folder.cleanup()

    def __enter__(self) -> "MpiCluster":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


async def work(scheduler: str, folder: str, host: str) -> None:
    """Be a worker until the scheduler ends."""
    from mpi4py import MPI  # in ranks only: to import it is to start it

    logging.getLogger("distributed").setLevel(logging.ERROR)
    worker = Worker(
        scheduler,
        nthreads=1,
        name=f"rank-{MPI.COMM_WORLD.rank}",
        host=host,
        dashboard=False,
        memory_limit=1.0 / MPI.COMM_WORLD.size,
        local_directory=folder,
    )
    await worker
    await worker.finished()


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], sys.argv[2], sys.argv[3] if sys.argv[3:] else "127.0.0.1"))
