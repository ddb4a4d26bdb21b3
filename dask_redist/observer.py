"""The process that says which rank of an MPI job died: started by :mod:`dask_redist.lifeline`.

Each rank holds a connection to it. The system closes those of a dead process at once, and tells of
closed connections in the order in which they closed; so the first one is the rank that died, even
if the launcher has killed all the others by then. The launcher waits for what is printed here.

It is a script that needs no more than the standard library, so that it is there within
milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys

#: what ranks send: goodbye, for what becomes of this process is no loss; and all is told already
BYE, HUSH = b"\1", b"\2"
#: bytes of the secret that shows that who connects is of this job
SECRET = 16
#: seconds in which a rank must connect
CONNECTING = 20.0


def accept(server: socket.socket, n: int, secret: bytes) -> dict[int, tuple[int, socket.socket]]:
    """The connections of n ranks, by file number; who does not know the secret is sent away."""
    found: dict[int, tuple[int, socket.socket]] = {}
    while len(found) < n:
        server.settimeout(CONNECTING)
        peer, _ = server.accept()
        peer.settimeout(CONNECTING)
        said = b""
        with contextlib.suppress(OSError):
            said = peer.recv(SECRET + 4, socket.MSG_WAITALL)
        if said[:SECRET] == secret and len(said) == SECRET + 4:
            found[peer.fileno()] = int.from_bytes(said[SECRET:], "big"), peer
        else:
            peer.close()
    return found


def first_dead(peers: dict[int, tuple[int, socket.socket]]) -> int | None:
    """The rank that dies first; None when all have said goodbye, or one that all is told."""
    poll = select.epoll()
    for number in peers:
        poll.register(number, select.EPOLLIN)
    while peers:
        for number, _ in poll.poll():  # in the order of what happened
            rank, peer = peers.pop(number)
            poll.unregister(number)
            said = b""
            with contextlib.suppress(OSError):
                said = peer.recv(1)
            if said == HUSH:
                return None
            if said != BYE:
                return rank
    return None


def main() -> None:
    """Watch: number of the listening socket, number of ranks, 1 if the first two do not work."""
    number, n, exclusive = map(int, sys.argv[1:])
    secret = sys.stdin.buffer.read(SECRET)
    with contextlib.suppress(OSError):
        rank = first_dead(accept(socket.socket(fileno=number), n, secret))
        if rank is not None:
            part = ("the scheduler", "the script", "a worker")[min(rank, 2) if exclusive else 2]
            os.write(2, f"rank {rank} of {n} ({part}) has died: the job ends\n".encode())


if __name__ == "__main__":
    main()
