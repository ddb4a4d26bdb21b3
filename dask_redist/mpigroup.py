"""The communicators of the ranks: which of them share an MPI world, and how they meet there.

That two processes call themselves ranks of a world proves nothing: there may be several worlds on
one cluster. So each rank asks the first one for a random number, over Dask, and gets the same
number over MPI from it, or is in another world. Those who have it make communicators of their own,
which no program of the user's knows.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from distributed import Worker

from dask_redist.post import Post
from dask_redist.world import is_started

logger = logging.getLogger(__name__)

HOW = (
    "start all ranks by one mpiexec: dask_redist.LocalMPICluster here, else "
    "mpiexec -n 5 dask-mpi --scheduler-file FILE --worker-class distributed.Worker"
)

#: bytes of the number that proves a world
_PROOF = 16
#: seconds in which it has to come, once it was sent
_PATIENCE = 5.0
#: tag of the messages that prove; of the meetings
_TAG = 7077


class Group(NamedTuple):
    """The ranks that met, in their order.

    Attributes
    ----------
    number
        Which meeting: all its ranks call it so.
    comm
        A communicator for messages.
    users
        One for programs of the user's, which may receive from anybody with any tag.
    ranks
        Seat to rank in both.
    """

    number: int
    comm: Any
    users: Any
    ranks: dict[int, int]


def mpi_here() -> Any:
    """The module mpi4py.MPI where it has been started in this process, else None."""
    return sys.modules["mpi4py.MPI"] if is_started() else None


def world_rank() -> int | None:
    """The rank of this process in its MPI world; None where it is not in one, or alone."""
    mpi = mpi_here()
    return None if mpi is None or mpi.COMM_WORLD.size == 1 else int(mpi.COMM_WORLD.rank)


class Groups:
    """The communicators that a rank is in.

    Parameters
    ----------
    worker
        The rank's worker.
    post
        Makes the MPI calls.
    """

    def __init__(self, worker: Worker, post: Post) -> None:
        self._worker = worker
        self._post = post
        self._made: dict[int, Group] = {}
        self._not_proven = ""
        #: communicators in which a collective was begun, and not by all
        self._spoiled: set[int] = set()

    def spoil(self, number: int) -> None:
        """No collective can be right any more in communicator ``number``."""
        self._spoiled.add(number)

    def is_spoiled(self, number: int) -> bool:
        """Whether a collective can be wrong in communicator ``number``."""
        return number in self._spoiled

    @property
    def newest(self) -> Group | None:
        """The communicator of the present ranks."""
        return self._made[max(self._made)] if self._made else None

    def __getitem__(self, number: int) -> Group:
        """A communicator by its number.

        Raises
        ------
        OSError
            This rank is not in it (yet).
        """
        try:
            return self._made[number]
        except KeyError:
            address = self._worker.address
            raise OSError(f"the rank on {address} is not in communicator {number}") from None

    def why_not(self) -> str:
        """Why this rank reaches nobody over MPI; empty where nothing speaks against it."""
        mpi = mpi_here()
        if mpi is None:
            return "mpi4py has not been started in its process"
        if mpi.COMM_WORLD.size == 1:
            return "its process is alone in its MPI world"
        if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
            return (
                f"its MPI was started with thread level {mpi.Query_thread()} and messages need "
                f"{mpi.THREAD_SERIALIZED} (MPI_THREAD_SERIALIZED)"
            )
        return self._not_proven

    # ------------------------------------------------------------ called by the scheduler
    async def prove(self, address: str, rank: int) -> bool:
        """Whether this rank is in the MPI world of the one at ``address``, there ``rank``."""
        self._not_proven = ""
        if not self.why_not() and address != self._worker.address:
            self._not_proven = await self._try(address, rank)
        if reason := self.why_not():
            logger.info("rank on %s: no messages over MPI: %s", self._worker.address, reason)
        return not reason

    async def _try(self, address: str, rank: int) -> str:
        """Ask for the proof; why there is none."""
        mpi = mpi_here()
        stranger = f"it is in another MPI world than the rank on {address}"
        if rank >= mpi.COMM_WORLD.size or rank == mpi.COMM_WORLD.rank:
            return stranger
        buffer = np.zeros(_PROOF, np.uint8)
        arrival = self._post.receive(mpi.COMM_WORLD, rank, _TAG, buffer)
        try:
            proof = await self._worker.rpc(address).redist_proof(rank=int(mpi.COMM_WORLD.rank))
            await asyncio.wait_for(asyncio.wrap_future(arrival), _PATIENCE)
        except TimeoutError:
            return stranger
        finally:
            arrival.cancel()
        return "" if buffer.tobytes() == proof else stranger

    async def proof(self, rank: int) -> bytes:
        """A random number, which rank ``rank`` of this rank's world gets over MPI too."""
        mpi, number = mpi_here(), secrets.token_bytes(_PROOF)
        if mpi is not None and 0 <= rank < mpi.COMM_WORLD.size:
            self._post.send(mpi.COMM_WORLD, rank, _TAG, np.frombuffer(number, np.uint8))
        return number

    async def meet(self, number: int, members: Iterable[Sequence[int]]) -> Group:
        """Make communicator ``number`` with the others; ``members``: seats and world ranks."""
        seats, ranks = zip(*members, strict=True)
        comm, users = await asyncio.wrap_future(self._post.call(lambda: _make(ranks)))
        self._made[number] = Group(number, comm, users, {s: r for r, s in enumerate(seats)})
        return self._made[number]


def _make(ranks: Sequence[int]) -> tuple[Any, Any]:
    world = mpi_here().COMM_WORLD
    group = world.Get_group()
    chosen = group.Incl(list(ranks))
    try:
        return world.Create_group(chosen, _TAG), world.Create_group(chosen, _TAG)
    finally:
        group.Free()
        chosen.Free()
