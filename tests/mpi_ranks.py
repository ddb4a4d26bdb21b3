"""A cluster whose workers are MPI ranks; as a script, one of these workers.

Workers are plain ones, without a nanny: a process that is started by mpiexec must not start others
that would take part in MPI.
"""

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import dask
from distributed import Client, LocalCluster, Worker

MPIEXEC = str(Path(sys.executable).with_name("mpiexec"))


class MpiCluster:
    """A scheduler here, and commands that start its workers: by default one mpiexec."""

    def __init__(
        self,
        n: int,
        launchers: Sequence[Sequence[str]] = (),
        interface: str = "lo",
    ) -> None:
        self._folder = TemporaryDirectory(prefix="dask-redist-mpi-")
        self._cluster = LocalCluster(
            n_workers=0,
            interface=interface,
            dashboard_address=":0",
            silence_logs=logging.CRITICAL,
            scheduler_kwargs={"dashboard_address": "127.0.0.1:0"},
        )
        self.scheduler_address: str = self._cluster.scheduler_address
        self.log = Path(self._folder.name, "log").open("w+b")  # noqa: SIM115
        script = (sys.executable, __file__, self.scheduler_address, self._folder.name, interface)
        inherited = dask.config.serialize(dask.config.global_config)  # as LocalCluster's workers
        self.processes = [
            subprocess.Popen(
                (*launcher, *script),
                env={**os.environ, "DASK_INTERNAL_INHERIT_CONFIG": inherited},
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=subprocess.STDOUT,
            )
            for launcher in launchers or [(MPIEXEC, "-n", str(n))]
        ]
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
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        self.log.close()
        self._folder.cleanup()

    def __enter__(self) -> "MpiCluster":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


async def work(scheduler: str, folder: str, interface: str) -> None:
    """Be a worker until the scheduler ends; a rank, where an mpiexec has started us."""
    name, size = f"{socket.gethostname()}-{os.getpid()}", 4
    if "PMI_RANK" in os.environ:
        from mpi4py import MPI  # to import it is to start it

        name, size = f"rank-{MPI.COMM_WORLD.rank}-{os.getpid()}", MPI.COMM_WORLD.size
    logging.getLogger("distributed").setLevel(logging.ERROR)
    worker = Worker(
        scheduler,
        nthreads=1,
        name=name,
        interface=interface,
        dashboard=False,
        memory_limit=1.0 / size,
        local_directory=folder,
    )
    await worker
    await worker.finished()


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:]))
