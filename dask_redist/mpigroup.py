"""The communicators of the ranks: which of them share an MPI world, and how they meet there.

That two processes call themselves ranks of a world proves nothing: there may be several worlds on
one cluster. So each rank asks the first one for a random number, over Dask, and gets the same
number over MPI from it, or is in another world. Those who have it make communicators of their own,
which no program of the user's knows.

To make one is collective, and MPI has no clock: who enters waits for ever for one who never does.
So the ranks call the roll before, in messages that can be taken back, and enter only when all
others have said that they are about to.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from distributed import Worker

from dask_redist import config
from dask_redist.errors import RedistError, RunTimeoutError
from dask_redist.post import Post
from dask_redist.ranks import Seat
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
#: tags of the messages that prove, and of the meetings, from as many as every MPI has: each attempt
#: has one of its own, so that what comes late from another one is not taken for its answer
_TAGS = range(16384, 32768)
_attempts = itertools.count(secrets.randbelow(len(_TAGS)))


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


#: the communicators of this process that all their ranks have made, to be freed
_chosen: list[Group] = []


def mpi_here() -> Any:
    """The module mpi4py.MPI where it has been started in this process, else None."""
    return sys.modules["mpi4py.MPI"] if is_started() else None


def world_rank() -> int | None:
    """The rank of this process in its MPI world; None where it is not in one, or alone."""
    mpi = mpi_here()
    return None if mpi is None or mpi.COMM_WORLD.size == 1 else int(mpi.COMM_WORLD.rank)


def free_all() -> None:
    """Free all communicators that this process has made; all their ranks call this."""
    while _chosen:
        group = _chosen.pop(0)
        group.comm.Free()
        group.users.Free()


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
        self._present: int | None = None
        self._not_proven = self._stuck = ""
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
        """The communicator of the present ranks, which all of them have made."""
        stays_away = self._present is None or self._stuck
        return None if stays_away else self._made.get(self._present or 0)

    def of(self, seats: Sequence[int]) -> Group | None:
        """The first communicator of exactly these ranks, in this order; the same on all of them."""
        same = (number for number, group in self._made.items() if list(group.ranks) == list(seats))
        chosen = sorted(number for number in same if self._made[number] in _chosen)
        return self._made[chosen[0]] if chosen else None

    def users_of(self, seats: Sequence[Seat]) -> Any:
        """The mpi4py communicator of exactly these ranks, in this order; None where nobody has one.

        Messages have another one.

        Raises
        ------
        RedistError
            The ranks are of several MPI jobs, or are not those that have met.
        """
        if (same := self.of([seat.seat for seat in seats])) is not None:
            return same.users
        group = self.newest
        if group is None:
            return None
        if others := [seat.address for seat in seats if seat.seat not in group.ranks]:
            raise RedistError(
                f"the ranks are not all of one MPI job: {', '.join(others)} has no communicator "
                f"with {self._worker.address}; start all ranks by one mpiexec"
            )
        raise RedistError(
            f"the MPI communicator is of {len(group.ranks)} ranks that are not these any more: "
            "call dask_redist.connect(client) again"
        )

    def choose(self, number: int | None) -> None:
        """Use this communicator from now on, or none: all have made it, says the scheduler."""
        self._present = number
        group = self._made.get(number or 0)
        if group is not None and group not in _chosen:
            _chosen.append(group)

    def __getitem__(self, number: int) -> Group:
        """A communicator by its number.

        Raises
        ------
        OSError
            This rank is not in it.
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
        return self._stuck or self._not_proven

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
        buffer, tag = np.zeros(_PROOF, np.uint8), _TAGS[next(_attempts) % len(_TAGS)]
        arrival = self._post.receive(mpi.COMM_WORLD, rank, tag, buffer)
        asked = self._worker.rpc(address).redist_proof(rank=int(mpi.COMM_WORLD.rank), tag=tag)
        try:
            proof = await asked
            await asyncio.wait_for(asyncio.wrap_future(arrival), _PATIENCE)
        except TimeoutError:
            return stranger
        finally:
            arrival.cancel()
        return "" if buffer.tobytes() == proof else stranger

    async def proof(self, rank: int, tag: int) -> bytes:
        """A random number, which rank ``rank`` of this rank's world gets over MPI too."""
        mpi, number = mpi_here(), secrets.token_bytes(_PROOF)
        if mpi is not None and 0 <= rank < mpi.COMM_WORLD.size:
            self._post.send(mpi.COMM_WORLD, rank, tag, np.frombuffer(number, np.uint8))
        return number

    async def roll(self, number: int, members: Iterable[Sequence[int]], word: bytes) -> None:
        """Hear from all others over MPI, before any of them enters `meet`; the same arguments.

        Raises
        ------
        RunTimeoutError
            Not all were heard in time; says who was not.
        """
        _, ranks = zip(*members, strict=True)
        await self._call_the_roll(ranks, _tag(word), word, _patience())

    async def meet(self, number: int, members: Iterable[Sequence[int]], word: bytes) -> None:
        """Make communicator ``number`` with the others, who have all heard each other.

        Parameters
        ----------
        number
            Its number.
        members
            Seats and world ranks.
        word
            Random bytes that all are told, for this attempt.

        Raises
        ------
        RunTimeoutError
            Not all came in time. This rank is in MPI then, and uses it only when it has come out.
        """
        seats, ranks = zip(*members, strict=True)
        made = self._post.call(lambda: _make(ranks, _tag(word)))
        others = [rank for rank in ranks if rank != world_rank()]
        self._stuck = f"it waits in MPI_Comm_create_group for {_names(others)}"
        made.add_done_callback(self._came_out)
        waiting = asyncio.wrap_future(made)
        await asyncio.wait({waiting}, timeout=_patience())  # which does not cancel what nobody can
        if not waiting.done():
            here = self._worker.address
            raise RunTimeoutError(f"the rank on {here} can use no MPI: {self._stuck}")
        comm, users = waiting.result()
        self._made[number] = Group(number, comm, users, {s: r for r, s in enumerate(seats)})

    def _came_out(self, _: object) -> None:
        self._stuck = ""

    async def _call_the_roll(
        self, ranks: Sequence[int], tag: int, word: bytes, patience: float
    ) -> None:
        """Tell all others that we are here, and wait until they have told us."""
        world, said = mpi_here().COMM_WORLD, np.frombuffer(word, np.uint8)
        heard = {rank: np.zeros(len(word), np.uint8) for rank in ranks if rank != world.rank}
        arrivals = {
            asyncio.wrap_future(self._post.receive(world, rank, tag, buffer)): rank
            for rank, buffer in heard.items()
        }
        for rank in heard:
            self._post.send(world, rank, tag, said)
        done, late = await asyncio.wait(arrivals, timeout=patience)
        for arrival in late:
            arrival.cancel()
        for arrival in done:
            arrival.result()
        missing = {arrivals[arrival] for arrival in late}
        missing |= {rank for rank, buffer in heard.items() if buffer.tobytes() != word}
        if missing:
            raise RunTimeoutError(
                f"the rank on {self._worker.address} waited {patience:g} s (a quarter of "
                f"redist.timeout) for {_names(sorted(missing))} to make a communicator"
            )


def _patience() -> float:
    """Seconds for a step of a meeting; the scheduler, which asks, has more."""
    return config.seconds("timeout") / 4


def _tag(word: bytes) -> int:
    return _TAGS[int.from_bytes(word[:4], "big") % len(_TAGS)]


def _names(ranks: Iterable[int]) -> str:
    return f"rank {', '.join(map(str, ranks))} of the MPI world"


def _make(ranks: Sequence[int], tag: int) -> tuple[Any, Any]:
    world = mpi_here().COMM_WORLD
    group = world.Get_group()
    chosen = group.Incl(list(ranks))
    try:
        comm, users = world.Create_group(chosen, tag), world.Create_group(chosen, tag)
    finally:
        group.Free()
        chosen.Free()
    # With the first lower-case collective of a communicator mpi4py makes a hidden one, and holds
    # Python's lock until all ranks have come, who may wait for a letter that cannot leave then.
    users.allreduce(0)
    return comm, users
