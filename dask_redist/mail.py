"""Messages over MPI: both sides agree by their workers' own RPC, then both enter MPI.

A sender packs a message and offers it to its owner, with headers, size and tag. The owner posts
its receive, when it has room, and asks for the message; only then it is sent. So nobody waits in
MPI for a partner who is not there, pieces leave while others are still computed, any amount goes
through bounded memory, and no two ranks can wait for each other: receiving needs no room but its
own.
Arrays of a reduction go the other way round: whoever reads them asks, and names the tag.

MPI takes no send back. Once a sender has said that it sends, its message is received, also where
nobody waits for it any more: else its buffer was MPI's for ever, and the next message under its tag
might be mistaken for it. And no tag is used again before all of that is known to be over.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import pickle
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
from distributed import Worker
from numpy.typing import NDArray

from dask_redist import config
from dask_redist.arena import Arena
from dask_redist.errors import RunTimeoutError
from dask_redist.mpigroup import Group, Groups
from dask_redist.packing import Header, cut_up, pack, unpack
from dask_redist.partials import Cut, Leaf
from dask_redist.post import Post
from dask_redist.ranks import Seat
from dask_redist.segment import Bytes
from dask_redist.staging import Staging
from dask_redist.tags import Tags
from dask_redist.wires import MessageWire

logger = logging.getLogger(__name__)


class _Offer(NamedTuple):
    group: Group
    seat: int
    tag: int
    buffer: Bytes


class Mail:
    """What a rank sends and receives over MPI.

    Parameters
    ----------
    worker
        The rank's worker.
    arena
        Where messages are packed and received.
    unless_left
        Awaits an answer, and gives up when the other rank has left.
    """

    def __init__(
        self,
        worker: Worker,
        arena: Arena,
        unless_left: Callable[[int, str, Coroutine[Any, Any, Any]], Coroutine[Any, Any, Any]],
    ) -> None:
        self.seat = -1  # until the scheduler has given us one
        self._worker, self._unless_left = worker, unless_left
        self._post = Post(f"dask-redist-post-{worker.name}")
        self.groups = Groups(worker, self._post)
        self._timeout = config.seconds("timeout")
        share = config.nbytes("mpi.staging-bytes") // 2
        self._outgoing, self._incoming = Staging(arena, share), Staging(arena, share)
        self._queues = {self._outgoing: asyncio.Lock(), self._incoming: asyncio.Lock()}
        #: copies what must not wait behind threads that wait for other ranks
        self._copies = ThreadPoolExecutor(1, thread_name_prefix="dask-redist-mail")
        #: by serial numbers, which are given once: a question that is late must find nothing
        self._offers: dict[int, _Offer] = {}
        self._serials = itertools.count()
        self._even, self._odd = Tags(0), Tags(1)
        self._wires: WeakSet[MessageWire] = WeakSet()
        self._lock = threading.Lock()
        self._collecting = False
        #: when there was room for a message last, and how often there was, or one was received
        self._given = dict.fromkeys(self._queues, time.monotonic())
        self._steps = 0
        #: of the messages that an owner has been offered
        self._limits: dict[int, set[asyncio.Timeout]] = defaultdict(set)

    def reaches(self, seat: int) -> bool:
        """Whether a rank is in the newest communicator."""
        group = self.groups.newest
        return group is not None and seat in group.ranks

    def close(self) -> None:
        """End what is under way."""
        self._post.close()
        self._copies.shutdown(wait=False)

    def collective(self, start: Callable[[], Any], buffers: Any) -> Future[None]:
        """Start a collective of a communicator; see :meth:`Post.collective`."""
        return self._post.collective(start, buffers)

    # ---------------------------------------------------------------------------- messages
    def wire_to(self, number: int, owner: Seat, far: bool) -> MessageWire:
        """A wire to an owner of run ``number``."""
        loop = self._worker.loop.asyncio_loop  # type: ignore[attr-defined]
        group = self._group(owner)

        def send(headers: list[Header], buffer: Bytes) -> Future[None]:
            return asyncio.run_coroutine_threadsafe(
                self._offer(group, number, owner, headers, buffer), loop
            )

        wire = MessageWire(send, self._limit(), name="mpi", far=far, take=self._take)
        with self._lock:
            self._wires.add(wire)
        return wire

    def _take(self, nbytes: int) -> Bytes:
        """A buffer for a message; from a thread."""
        buffer = None if self._queues[self._outgoing].locked() else self._outgoing.take(nbytes)
        return self._wait(self._room(self._outgoing, nbytes)) if buffer is None else buffer

    async def _offer(
        self, group: Group, number: int, owner: Seat, headers: list[Header], buffer: Bytes
    ) -> None:
        """Offer a message; it has arrived when this returns."""
        serial, tag = next(self._serials), self._even.take()
        self._offers[serial] = _Offer(group, owner.seat, tag, buffer)
        letter = (group.number, self.seat, self._worker.address, serial, tag, len(buffer))
        try:
            answer = self._worker.rpc(owner.address).redist_write(
                number=number, headers=headers, letter=letter
            )
            limits = self._limits[owner.seat]
            async with asyncio.timeout(2 * self._timeout) as limit:
                limits.add(limit)
                try:
                    await self._unless_left(owner.seat, owner.address, answer)
                finally:
                    limits.discard(limit)
            for other in limits:  # the owner gets on
                if not other.expired():
                    other.reschedule(asyncio.get_running_loop().time() + 2 * self._timeout)
            self._even.free(tag)  # not where that failed: the message may be on its way
        except TimeoutError as error:
            self._collect_soon()
            if isinstance(error, RunTimeoutError):
                raise
            raise self._late(
                f"offered {len(buffer)} bytes to the rank on {owner.address}, which did not take "
                "them over MPI"
            ) from None
        except BaseException:
            self._collect_soon()
            raise
        finally:
            if self._offers.pop(serial, None) is not None:  # it was not asked for
                self._even.free(tag)

    async def give(self, serial: int) -> bool:
        """The owner has posted its receive: send what was offered.

        Raises
        ------
        OSError
            It is offered no more.
        """
        offer = self._offers.pop(serial, None)
        if offer is None:
            raise OSError(f"message {serial} of the rank on {self._worker.address} was given up")
        self._send(offer.group, offer.seat, offer.tag, offer.buffer)
        return True

    async def collect(self, letter: Sequence[Any], into: Bytes | None = None) -> Bytes:
        """Have an offered message sent, and receive it; ``into``: straight to its place."""
        number, seat, address, serial, tag, nbytes = letter
        ask = self._worker.rpc(address).redist_give
        message = self._receive(
            *(self.groups[number], seat, address, tag, nbytes),
            lambda: ask(serial=serial),
            offered=True,
            into=into,
        )
        buffer: Bytes = await self._unless_left(seat, address, message)
        return buffer

    # ------------------------------------------------------------- arrays of a reduction
    def read(
        self, owner: Seat, number: int, leaves: Sequence[Leaf], cut: Cut | None
    ) -> list[NDArray[Any]]:
        """Arrays that a rank has laid out, or a cut of each; from a thread."""
        arrays = [np.empty(_cut_shape(leaf, cut), leaf.dtype) for leaf in leaves]
        group, dumped = self._group(owner), pickle.dumps(leaves)

        async def fetch(headers: list[Header]) -> None:
            tag = self._odd.take()
            ask = self._worker.rpc(owner.address).redist_read
            letter = (group.number, self.seat, tag, headers)
            buffer = await self._receive(
                *(group, owner.seat, owner.address, tag, _nbytes(headers, arrays)),
                lambda: ask(number=number, leaves=dumped, cut=cut, letter=letter),
            )
            self._odd.free(tag)  # not where that failed: the message may come yet
            await self._copy(unpack, headers, buffer, arrays.__getitem__)

        async def fetch_all() -> None:
            async with asyncio.TaskGroup() as tasks:
                for headers in cut_up(arrays, self._limit()):
                    message = self._unless_left(owner.seat, owner.address, fetch(headers))
                    tasks.create_task(message)

        try:
            self._wait(fetch_all())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return arrays

    async def serve(self, letter: Sequence[Any], arrays: Sequence[NDArray[Any]]) -> None:
        """Send a reader the parts of arrays that it has posted a receive for."""
        number, seat, tag, headers = letter
        group = self.groups[number]
        buffer = await self._room(self._outgoing, _nbytes(headers, arrays))
        await self._copy(pack, headers, buffer, arrays.__getitem__)
        self._send(group, seat, tag, buffer)

    # ------------------------------------------------------------------------------ helpers
    def _limit(self) -> int:
        """Bytes of a message: few enough for some to be under way at once."""
        return max(1, min(config.nbytes("message-bytes"), self._outgoing.limit // 4))

    def _group(self, other: Seat) -> Group:
        """The communicator with another rank."""
        group = self.groups.newest
        if group is None or other.seat not in group.ranks:
            raise OSError(
                f"the ranks on {self._worker.address} and {other.address} are in no communicator "
                "together any more"
            )
        return group

    def _late(self, what: str) -> RunTimeoutError:
        return RunTimeoutError(
            f"the rank on {self._worker.address} {what} within {self._timeout:g} s (redist.timeout)"
        )

    def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """What comes of a coroutine on the event loop, as long as messages come; from a thread."""
        loop = self._worker.loop.asyncio_loop  # type: ignore[attr-defined]
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        while True:
            steps = self._steps
            try:
                return future.result(5 * self._timeout)  # it gives up itself, after less
            except TimeoutError:
                if future.done():  # the answer itself was an error of this kind
                    raise
                if self._steps == steps:
                    future.cancel()
                    raise self._late("neither got nor sent a message") from None

    def _send(self, group: Group, seat: int, tag: int, buffer: Bytes) -> None:
        def tell(sent: Future[None]) -> None:
            if not sent.cancelled() and (error := sent.exception()) is not None:
                logger.error("a message of %d bytes was not sent: %r", len(buffer), error)

        self._post.send(group.comm, group.ranks[seat], tag, buffer).add_done_callback(tell)

    async def _receive(
        self,
        group: Group,
        seat: int,
        address: str,
        tag: int,
        nbytes: int,
        ask: Callable[[], Coroutine[Any, Any, Any]],
        offered: bool = False,
        into: Bytes | None = None,
    ) -> Bytes:
        """Post a receive, ask for the message, and wait for it."""
        buffer = await self._room(self._incoming, nbytes) if into is None else into
        arrival = self._post.receive(group.comm, group.ranks[seat], tag, buffer)
        asked = asyncio.ensure_future(ask())
        asked.add_done_callback(lambda asked: _is_failed(asked) and arrival.cancel())
        try:
            # Who has offered it sends at once; who lays it out then may have to wait for room.
            async with asyncio.timeout((1 if offered else 2) * self._timeout):
                await asyncio.shield(asked)
                await asyncio.shield(asyncio.wrap_future(arrival))
        except TimeoutError:
            self._collect_soon()
            raise self._late(
                f"did not get {nbytes} bytes over MPI from the rank on {address}"
            ) from None
        except BaseException:
            self._collect_soon()
            raise
        self._steps += 1
        return buffer

    def _collect_soon(self) -> None:
        """Have garbage collected: an error and its frames, which hold buffers, are a cycle."""
        if not self._collecting:
            self._collecting = True
            asyncio.get_running_loop().call_later(0.5, self._collect)

    def _collect(self) -> None:
        self._collecting = False
        gc.collect()

    async def _room(self, staging: Staging, nbytes: int) -> Bytes:
        """Room for a message, in the order in which it was asked for.

        While there is none, what was packed for others is sent.
        """
        asked, looks = time.monotonic(), 0
        async with self._queues[staging]:
            while True:
                # A hop to a thread at each look would cost more than the messages do.
                if staging.has_room(nbytes):
                    buffer: Bytes | None = await self._copy(staging.take, nbytes)
                    if buffer is not None:
                        self._given[staging] = time.monotonic()
                        self._steps += 1
                        return buffer
                if time.monotonic() > max(asked, self._given[staging]) + 2 * self._timeout:
                    raise self._late(
                        f"had no room for a message of {nbytes} bytes (redist.mpi.staging-bytes)"
                    )
                if staging is self._outgoing and looks % 32 == 0:
                    await self._copy(self._start_fullest)
                looks += 1
                await asyncio.sleep(0.0005)

    def _start_fullest(self) -> None:
        """Have the wire send that has most to send."""
        with self._lock:
            wire = max(self._wires, key=lambda wire: wire.waiting, default=None)
        if wire is not None:
            wire.start()

    async def _copy(self, do: Callable[..., Any], *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._copies, do, *arguments)


def _is_failed(answer: asyncio.Future[Any]) -> bool:
    return answer.cancelled() or answer.exception() is not None


def _cut_shape(leaf: Leaf, cut: Cut | None) -> tuple[int, ...]:
    shape = list(leaf.shape)
    if cut is not None:
        shape[cut.axis] = len(range(shape[cut.axis])[cut.start : cut.stop])
    return tuple(shape)


def _nbytes(headers: Sequence[Header], arrays: Sequence[NDArray[Any]]) -> int:
    """Bytes of a message of parts of arrays."""
    total = 0
    for number, *corners in headers:
        array = arrays[number]
        lengths = np.subtract(corners[array.ndim :], corners[: array.ndim])
        total += int(np.prod(lengths)) * array.itemsize
    return total
