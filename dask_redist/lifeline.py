"""Which process of an MPI job has died: rank 0 starts an observer that all ranks connect to.

A launcher ends a job when one of its processes dies, but does not say which rank it was, and leaves
the others some milliseconds. So the one who says it must stand outside: see
:mod:`dask_redist.observer`. It is a new process, not a fork of a rank, and has none of the files by
which the rank talks to its launcher.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys

from dask_redist import observer

logger = logging.getLogger(__name__)


class Lifeline:
    """The connection of one rank to the observer. All ranks make theirs at the same time.

    Parameters
    ----------
    rank
        Which rank this is.
    address, secret
        What :func:`start_observer` gave rank 0.
    """

    def __init__(self, rank: int, address: tuple[str, int], secret: bytes) -> None:
        self._peer: socket.socket | None = None
        with contextlib.suppress(OSError):  # nobody is there to say it; the launcher still ends us
            self._peer = socket.create_connection(address, observer.CONNECTING)
            self._peer.sendall(secret + rank.to_bytes(4, "big"))

    def _send(self, what: bytes) -> None:
        if self._peer is not None:
            with contextlib.suppress(OSError):
                self._peer.sendall(what)

    def close(self) -> None:
        """Say goodbye: what becomes of this process now is no loss."""
        self._send(observer.BYE)
        if self._peer is not None:
            self._peer.close()

    def hush(self) -> None:
        """What ends the job is told already."""
        self._send(observer.HUSH)


def start_observer(host: str, size: int, exclusive: bool) -> tuple[tuple[str, int], bytes]:
    """Start the observer; its address, and the secret of this job.

    Parameters
    ----------
    host
        Address that this rank can be reached at.
    size
        How many ranks there are.
    exclusive
        Whether the first two ranks are scheduler and script, and no workers.
    """
    secret = os.urandom(observer.SECRET)
    with socket.create_server((host, 0), backlog=size) as server:
        address = server.getsockname()[:2]
        number = server.fileno()
        command = [sys.executable, "-I", "-S", observer.__file__]
        try:
            process = subprocess.Popen(
                [*command, str(number), str(size), str(int(exclusive))],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[number],
                start_new_session=True,  # the launcher must not end it with us
            )
        except OSError as error:
            logger.warning("if a rank dies, nothing will say which one: %s", error)
            return address, secret
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(secret)
    process.returncode = 0  # it ends after us: nobody is to wait for it, or to warn
    return address, secret
