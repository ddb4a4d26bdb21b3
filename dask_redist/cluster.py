"""The clusters of the commands: ranks started here for a while, or those of a running scheduler."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from tempfile import TemporaryDirectory

import dask
from distributed import Client, LocalCluster
from distributed.utils import LoopRunner

from dask_redist.connect import Ranks, connect
from dask_redist.errors import RedistError

#: seconds in which a scheduler, and then its ranks, must answer
PATIENCE = 10.0


@contextmanager
def local_ranks(n: int) -> Iterator[tuple[Client, Ranks]]:
    """Ranks on this machine: n processes of one thread, on 127.0.0.1 only, gone afterwards.

    Dask's warnings, which are many about its shuffles, are not shown meanwhile.
    """
    # A terminal sends Ctrl-C to all processes. The ranks inherit this mask from the loop's
    # thread and leave it to us, and we heed it once there is a cluster that can be closed.
    # A stream that an interrupt cut off is reported when it is collected, after the cluster's end.
    logging.getLogger("distributed.comm.tcp").setLevel(logging.ERROR)
    resource_tracker.ensure_running()  # it would unblock the signal in the thread that starts it
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    runner = LoopRunner()
    runner.start()
    try:
        with (
            TemporaryDirectory(prefix="dask-redist-") as folder,
            LocalCluster(
                n_workers=0,
                threads_per_worker=1,
                memory_limit=1.0 / n,
                host="127.0.0.1",
                dashboard_address=None,
                scheduler_kwargs={"dashboard_address": "127.0.0.1:0"},  # port 8787 may be taken
                local_directory=folder,
                silence_logs=logging.ERROR,
                loop=runner.loop,
            ) as cluster,
        ):
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            with Client(cluster) as client:
                cluster.scale(n)
                ranks = connect(client, n)
                with dask.config.set({"temporary-directory": folder}):
                    yield client, ranks
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        runner.stop()


@contextmanager
def ranks_at(address: str | None, file: str | None) -> Iterator[tuple[Client, Ranks]]:
    """The ranks of a cluster that runs already, and goes on running.

    Raises
    ------
    RedistError
        Nobody answers there, it has no workers, or they cannot become ranks.
    """
    where = address or f"the address in {file}"
    try:
        client = Client(address, scheduler_file=file, timeout=PATIENCE, set_as_default=False)
    except (OSError, ValueError, KeyError) as error:
        raise RedistError(
            f"no scheduler answers at {where} ({_one_line(error)}): is it running, and can this "
            "machine reach it?"
        ) from error
    with client:
        if not client.scheduler_info(n_workers=-1)["workers"]:
            raise RedistError(f"the scheduler at {where} has no workers: start some")
        try:
            ranks = connect(client, timeout=PATIENCE)
        except (OSError, ImportError) as error:
            raise RedistError(
                f"the workers of {where} become no ranks ({_one_line(error)}): dask_redist must "
                "be installed on scheduler and workers too"
            ) from error
        yield client, ranks


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 100 else f"{text[:97]}..."
