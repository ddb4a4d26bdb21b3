"""How a rank reaches others: through their memory where that is proven, else by messages.

Messages go over MPI between ranks of one MPI world, and over the workers' own connections else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from distributed import Worker
from distributed.protocol.serialize import to_serialize
from numpy.typing import NDArray

from dask_redist import config
from dask_redist.arena import Arena
from dask_redist.errors import RedistError
from dask_redist.mail import Mail
from dask_redist.mpigroup import HOW
from dask_redist.partials import Cut, Leaf
from dask_redist.peers import LocalPeer, NotAttached, PageBudget, Peer, attach
from dask_redist.ranks import Seat
from dask_redist.run import RunTable
from dask_redist.wires import MemoryWire, MessageWire, Wire

#: what redist.wire may be: forced, or (None) the best for each pair
WIRES = (None, "shared memory", "mpi", "dask comm")

logger = logging.getLogger(__name__)


class Reach:
    """A rank's wires.

    Parameters
    ----------
    worker
        The rank's worker; messages go over its own RPC (TLS included).
    arena
        The rank's own memory.
    budget
        Bytes of peers' pages that may stay mapped.
    call
        Runs a coroutine on the worker's event loop, from another thread.
    """

    def __init__(
        self,
        worker: Worker,
        arena: Arena,
        budget: int,
        call: Callable[[Coroutine[Any, Any, Any]], Any],
    ) -> None:
        self.seat = -1  # until the scheduler has given us one
        self.mail = Mail(worker, arena, self._unless_left)
        self._worker = worker
        self._arena = arena
        self._pages = PageBudget(budget)
        self._call = call
        self._peers: dict[int, Peer | None] = {}
        self._gone: set[int] = set()
        self._sending: dict[int, set[asyncio.Future[Any]]] = {}
        self._forced = config.get("wire")
        if self._forced not in WIRES:
            raise RedistError(
                f"redist.wire is {self._forced!r}; it must be one of {', '.join(map(repr, WIRES))}"
            )
        self._lock = threading.Lock()
        #: bytes that were read from others, ever
        self.received = 0

    def wire_to(self, table: RunTable, seat: int) -> Wire:
        """The best wire to one owner of a run.

        Raises
        ------
        OSError
            The owner has left.
        """
        owner = table.owners[seat]
        peer = self._peer(owner)
        if peer is not None:
            return MemoryWire(peer)
        if self._by_mail(owner):
            here = self._worker.address.rpartition(":")[0]
            return self.mail.wire_to(table.number, owner, far=owner.host != here)
        send = partial(self._send, table.number, owner)
        return MessageWire(send, config.nbytes("message-bytes"), name="dask comm")

    def read(
        self, owner: Seat, number: int, leaves: Sequence[Leaf], cut: Cut | None
    ) -> list[NDArray[Any]]:
        """Arrays that a rank has laid out in a reduction, or a cut of each; views where possible.

        Raises
        ------
        OSError
            The owner has left, or the run is over there.
        """
        if not leaves:
            return []
        peer = self._peer(owner)
        if peer is not None:
            arrays = [_read(peer, leaf, cut) for leaf in leaves]
        elif self._by_mail(owner):
            arrays = self.mail.read(owner, number, leaves, cut)
        else:
            arrays = self._call(self._fetch(owner, number, leaves, cut))
        if owner.seat != self.seat:
            with self._lock:
                self.received += sum(array.nbytes for array in arrays)
        return arrays

    async def serve(
        self, leaves: Sequence[Leaf], cut: Cut | None, letter: Any = None
    ) -> dict[str, Any]:
        """Arrays in this rank's arena, or a cut of each; for a peer, who asks by `letter` for MPI.

        Views, at once: threads of ours may all wait for peers, whose threads wait for us.
        """
        peer = LocalPeer(self._arena)
        arrays = [_read(peer, leaf, cut) for leaf in leaves]
        if letter is not None:
            await self.mail.serve(letter, arrays)
            return {}
        return {"arrays": [to_serialize(array) for array in arrays]}

    def wires(self, seats: Iterable[Any]) -> dict[int, str]:
        """The kind of wire to each of the ``seats``."""
        return {seat.seat: self._kind(seat) for seat in map(Seat.of, seats)}

    def _kind(self, owner: Seat) -> str:
        peer = self._peer(owner)
        if peer is not None:
            return peer.wire
        return "mpi" if self._by_mail(owner) else "dask comm"

    def credit(self, seat: int, nbytes: int) -> None:
        """Tell a rank how much has been written into its memory."""
        peer = self._peers.get(seat)
        if peer is not None and seat != self.seat:
            peer.credit(self.seat, nbytes)

    def all_there(self, seats: Iterable[int]) -> bool:
        """Whether none of the ``seats`` is known to have left."""
        return self._gone.isdisjoint(seats)

    def left(self, seat: int, path: str = "") -> None:
        """A rank has left: its memory stays until the last peer unmaps it, its name does not."""
        if path and not path.startswith("/proc/"):
            with contextlib.suppress(OSError):
                os.unlink(path)
        with self._lock:
            self._gone.add(seat)
            peer = self._peers.pop(seat, None)
        if peer is not None:
            peer.close()
        for message in self._sending.pop(seat, ()):
            message.cancel()

    def close(self) -> None:
        """Unmap all peers, and end what is under way."""
        for seat in self._peers.keys() | self._sending.keys():
            self.left(seat)
        self.mail.close()

    def _peer(self, owner: Seat) -> Peer | None:
        """A view of the owner's arena; None where only messages reach it."""
        with self._lock:
            self._refuse_gone(owner)
            if owner.seat not in self._peers:
                self._peers[owner.seat] = self._attach(owner)
            return self._peers[owner.seat]

    def _attach(self, owner: Seat) -> Peer | None:
        if owner.seat == self.seat:
            return LocalPeer(self._arena)
        if self._forced not in (None, "shared memory"):
            return None
        try:
            return attach(owner.card, self._pages)
        except NotAttached as error:
            if self._forced:
                raise RedistError(
                    f"redist.wire is {self._forced!r}, but the memory of the rank on "
                    f"{owner.address} cannot be attached: {error}"
                ) from error
            logger.info("rank on %s is reached by messages: %s", owner.address, error)
            return None

    def _by_mail(self, owner: Seat) -> bool:
        """Whether messages to a rank go over MPI.

        Raises
        ------
        RedistError
            They have to, and cannot.
        """
        if self._forced not in (None, "mpi"):
            return False
        if self.mail.reaches(owner.seat):
            return True
        if self._forced:
            here = self._worker.address
            reason = self.mail.groups.why_not() or "the other one is in no MPI world with it"
            raise RedistError(
                f"redist.wire is {self._forced!r}, but the rank on {here} does not reach the one "
                f"on {owner.address} over MPI ({reason}); {HOW}"
            )
        return False

    def _refuse_gone(self, owner: Seat) -> None:
        if owner.seat in self._gone:
            raise OSError(f"rank on {owner.address} has left")

    async def _fetch(
        self, owner: Seat, number: int, leaves: Sequence[Leaf], cut: Cut | None
    ) -> list[NDArray[Any]]:
        message = self._worker.rpc(owner.address).redist_read(
            number=number, leaves=pickle.dumps(leaves), cut=cut
        )
        reply = await self._unless_left(owner.seat, owner.address, message)
        return [np.asarray(array) for array in reply["arrays"]]

    def _send(self, number: int, owner: Seat, headers: Any, buffer: Any) -> None:
        self._call(self._post(number, owner, headers, buffer))

    async def _post(self, number: int, owner: Seat, headers: Any, buffer: Any) -> None:
        """Send one message of pieces."""
        message = self._worker.rpc(owner.address).redist_write(
            number=number, headers=headers, buffer=to_serialize(buffer)
        )
        await self._unless_left(owner.seat, owner.address, message)

    async def _unless_left(self, seat: int, address: str, answer: Coroutine[Any, Any, Any]) -> Any:
        """An answer; given up as soon as the rank that gives it is known to have left."""
        if seat in self._gone:
            answer.close()
            raise OSError(f"rank on {address} has left")
        message = asyncio.ensure_future(answer)
        sending = self._sending.setdefault(seat, set())
        sending.add(message)
        try:
            return await message
        except asyncio.CancelledError:
            if seat in self._gone:
                raise OSError(f"rank on {address} has left") from None
            raise
        finally:
            sending.discard(message)


def _read(peer: Peer, leaf: Leaf, cut: Cut | None) -> NDArray[Any]:
    view = peer.view(leaf.offset, leaf.shape, leaf.dtype)
    return peer.read(view if cut is None else cut.of(view))
