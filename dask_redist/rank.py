"""The worker's side: a rank with its arena, its peers and its runs.

One :class:`Rank` is installed on every worker by :func:`dask_redist.connect` as a worker plugin.
Task threads call :meth:`Rank.contribute` and :meth:`Rank.take`; the fence coroutine awaits
:meth:`Rank.fence`; everything else is a handler that the scheduler or a peer calls.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import dask
import psutil
from distributed import Reschedule, Worker
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.protocol.serialize import to_serialize
from numpy.typing import NDArray

from dask_redist import config
from dask_redist.arena import Arena, block_of
from dask_redist.errors import AdmissionError, RunTimeoutError
from dask_redist.lane import Lane
from dask_redist.peers import LocalPeer, NotAttached, PageBudget, Peer, attach
from dask_redist.process import is_dead, started
from dask_redist.ranks import Seat
from dask_redist.run import Outputs, RankRun, RunClosed, RunTable
from dask_redist.spec import Index, PartSpec, Receipt
from dask_redist.wires import MemoryWire, MessageWire, Wire

logger = logging.getLogger(__name__)

PLUGIN = "dask_redist"

#: ranks of this process, by seat (several where workers are threads)
_here: dict[tuple[str, int], Rank] = {}


def rank_of(worker: Worker) -> Rank | None:
    """The rank of a worker, or None where nobody connected."""
    plugin = worker.plugins.get(PLUGIN)
    return plugin if isinstance(plugin, Rank) else None


class Rank(WorkerPlugin):
    """A rank on its worker."""

    name = PLUGIN
    idempotent = True

    # ---------------------------------------------------------------------- start and stop
    async def setup(self, worker: Worker) -> None:
        """Make the arena and tell the scheduler who we are."""
        self.worker = worker
        self.timeout = config.seconds("timeout")
        self.runs: dict[int, RankRun] = {}
        self.outputs: dict[int, Outputs] = {}
        self._joins: dict[Any, Future[RankRun | None]] = {}
        #: closed runs that hold pieces back until their ticket comes
        self._rests: dict[int, RankRun] = {}
        #: for each join under way, the runs that were closed here since it began
        self._closed_since: list[set[int]] = []
        #: runs that were freed before their memory was allocated here, and those refused it
        self._freed: set[int] = set()
        self._refused: set[int] = set()
        self._peers: dict[int, Peer | None] = {}
        #: seats that have left, and the messages under way to each seat
        self._gone: set[int] = set()
        self._sending: dict[int, set[asyncio.Future[Any]]] = {}
        self._messages_received = 0
        self._lock = threading.Lock()
        limit = worker.memory_manager.memory_limit or psutil.virtual_memory().total
        self.memory_limit = int(limit)
        self.arena = Arena(
            2 * self.memory_limit,
            int(config.get("arena.keep") * limit),
            directory=config.get("arena.directory"),
            pressure=self._pressed,
        )
        self.pages = PageBudget(int(config.get("arena.peer-pages") * limit))
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="dask-redist")
        worker.handlers.update(self._handlers())
        worker.stream_handlers["redist-left"] = self._left
        worker.stream_handlers["redist-ticket"] = self._ticket
        if hasattr(worker.data, "fast_to_slow_callbacks"):
            worker.data.fast_to_slow_callbacks.append(_cool)
        reply = await worker.scheduler.redist_hello(
            name=str(worker.name),
            host=worker.address.rpartition(":")[0],
            address=worker.address,
            pid=os.getpid(),
            started=started(os.getpid()),
            card=tuple(self.arena.card),
            memory_limit=self.memory_limit,
            nthreads=worker.state.nthreads,
        )
        self.seat: int = reply["seat"]
        self.lane = Lane(f"dask-redist-lane-{self.seat}", last=reply["ticket"])
        _here[worker.scheduler.address, self.seat] = self

    async def teardown(self, worker: Worker) -> None:
        """Refuse all writers and give everything back."""
        for name in self._handlers():
            worker.handlers.pop(name, None)
        if hasattr(worker.data, "fast_to_slow_callbacks"):
            worker.data.fast_to_slow_callbacks.remove(_cool)
        for run in self.runs.values():
            run.gate.close()
        for outputs in self.outputs.values():
            outputs.drop(condemn=False)
        self.outputs.clear()
        for peer in self._peers.values():
            if peer is not None:
                peer.close()
        self._peers.clear()
        self.lane.close(timeout=0)
        self.arena.close()
        self.threads.shutdown(wait=False)
        if all(run.gate.quiet for run in self.runs.values()):
            _here.pop((worker.scheduler.address, self.seat), None)

    def _handlers(self) -> dict[str, Callable[..., Any]]:
        return {
            "redist_allocate": self._allocate,
            "redist_close": self._close,
            "redist_free": self._free,
            "redist_dead": self._dead,
            "redist_vote": self._vote,
            "redist_write": self._write,
            "redist_reach": self._reach,
            "redist_memory": self._memory,
        }

    def _pressed(self) -> bool:
        """Whether Dask has begun to spill: then nothing idle is kept."""
        target = self.worker.memory_manager.memory_target_fraction
        used: int = self.worker.monitor.get_process_memory()
        return bool(target) and used > target * self.memory_limit

    # ----------------------------------------------------------------- called by task threads
    def contribute(self, id: Any, index: Index, chunk: Any) -> int | None:
        """Write one input chunk's pieces; the run's number, or None where there is no run.

        Raises
        ------
        ChunkMismatchError
            The chunk is not what the array declares.
        AdmissionError
            A rank has not enough memory for its outputs.
        RunTimeoutError
            Nobody answered in time.
        """
        while True:
            run = self._join(id)
            if run is None:
                return None
            try:
                run.contribute(index, chunk)
            except RunClosed:
                self._leave(id, run)
            except OSError as error:
                if not _has_left(error):
                    raise
                # The conductor will hear of it too, and make the run again.
                logger.info("contribution %s to %s comes again: %s", index, id, error)
                self._leave(id, run)
                time.sleep(0.1)
                raise Reschedule from error
            else:
                return run.table.number

    def take(self, receipt: Receipt, index: Index) -> NDArray[Any]:
        """The output chunk ``index``, once: an array over this rank's block."""
        outputs = self.outputs.get(receipt.number)
        array = outputs.take(outputs.spec.out_number(index)) if outputs is not None else None
        if array is not None:
            return array
        self._call(
            self.worker.scheduler.redist_missing(
                id=receipt.id,
                number=receipt.number,
                key=self.worker.get_current_task(),
                address=self.worker.address,
            )
        )
        raise Reschedule

    def _join(self, id: Any) -> RankRun | None:
        """The run of ``id`` on this rank; the first contribution here asks the conductor."""
        with self._lock:
            future = self._joins.get(id)
            if future is not None and future.done() and future.exception() is not None:
                future = None  # whoever comes after a failure asks again
            first = future is None
            if future is None:
                future = self._joins[id] = Future()
        if first:
            try:
                future.set_result(self._call(self._ask(id, self.worker.get_current_task())))
            except BaseException as error:
                future.set_exception(error)
                raise
        run = future.result(2 * self.timeout)
        if run is None:
            with self._lock:
                if self._joins.get(id) is future:
                    del self._joins[id]
        return run

    def _leave(self, id: Any, run: RankRun) -> None:
        with self._lock:
            future = self._joins.get(id)
            if future is not None and future.done() and future.result() is run:
                del self._joins[id]

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the worker's event loop, from a task thread."""
        loop = self.worker.loop.asyncio_loop  # type: ignore[attr-defined]
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        try:
            return future.result(2 * self.timeout)
        except TimeoutError:
            if future.done():  # the answer itself was an error of this kind
                raise
            future.cancel()
            raise RunTimeoutError(
                f"rank on {self.worker.address}: no answer after {2 * self.timeout:g} s from "
                f"the scheduler at {self.worker.scheduler.address} or a peer"
            ) from None

    # ------------------------------------------------------------------- on the event loop
    async def _ask(self, id: Any, key: Any) -> RankRun | None:
        closed: set[int] = set()
        self._closed_since.append(closed)
        try:
            while True:
                reply = await self.worker.scheduler.redist_join(id=id, key=key, seat=self.seat)
                if "error" in reply:
                    raise pickle.loads(reply["error"])
                if "unknown" in reply:
                    return None
                if "stray" in reply:
                    raise Reschedule
                if "table" in reply:
                    table: RunTable = pickle.loads(reply["table"])
                    if table.number not in closed:
                        new = RankRun(table, self._wire_to)
                        return self.runs.setdefault(table.number, new)
                await asyncio.sleep(0.05)
        finally:
            self._closed_since.remove(closed)

    async def fence(self, id: Any, numbers: set[int]) -> Receipt:
        """All contributions exist: have the run closed on every rank that wrote."""
        reply = await self.worker.scheduler.redist_fence(id=id, numbers=sorted(numbers))
        if "error" in reply:
            raise pickle.loads(reply["error"])
        if "number" not in reply:
            raise Reschedule
        return Receipt(id, reply["number"])

    async def _allocate(self, number: int, spec: bytes, outs: Iterable[int]) -> dict[str, Any]:
        part: PartSpec = pickle.loads(spec)
        outs = list(outs)
        shapes = [part.out_shape(out) for out in outs]
        sizes = [_nbytes(shape, part.dtype.itemsize) for shape in shapes]
        loop = asyncio.get_running_loop()
        try:
            await self._make_room(sum(sizes))
            blocks = await loop.run_in_executor(self.threads, self.arena.allocate, sizes)
        except MemoryError as error:
            self._refused.add(number)
            return {"error": str(error)}
        if number in self._freed:
            self._freed.discard(number)
        else:
            self.outputs[number] = Outputs(part, dict(zip(outs, blocks, strict=True)))
        return {"offsets": [block.offset for block in blocks]}

    async def _make_room(self, needed: int) -> None:
        """Have Dask spill until ``needed`` bytes fit under the worker's limit.

        Raises
        ------
        AdmissionError
            They do not fit.
        """
        if not self.worker.memory_manager.memory_limit:
            return
        fraction = dask.config.get("distributed.worker.memory.terminate") or 1.0
        limit = int(fraction * self.memory_limit)
        while True:
            there = limit - self.worker.monitor.get_process_memory() + self.arena.idle
            if needed <= there:
                return
            self.arena.trim()
            data: Any = self.worker.data  # what Dask could spill
            if not getattr(data, "fast", None) or data.evict() <= 0:
                break
            await asyncio.sleep(0)
        raise AdmissionError(
            f"rank on {self.worker.address} needs {needed} bytes for its outputs, {max(there, 0)} "
            f"bytes are there under its memory limit of {self.memory_limit}; use more or "
            "larger workers, or smaller arrays"
        )

    async def _close(self, number: int) -> dict[str, Any]:
        for closed in self._closed_since:
            closed.add(number)
        run = self.runs.get(number)
        if run is None:
            return {"sent": {}, "wires": {}, "pieces": 0, "writing": 0.0, "rest": False}
        run.gate.close()
        self._leave(run.table.id, run)
        while not run.gate.quiet:  # the conductor gives up after the timeout
            await asyncio.sleep(0.005)
        self.runs.pop(number, None)
        if rest := run.settle():
            self._rests[number] = run
        tally = run.tally
        return {
            "sent": dict(tally.sent),
            "wires": dict(tally.wires),
            "pieces": tally.pieces,
            "writing": tally.writing,
            "rest": rest,
        }

    async def _vote(self, number: int) -> bool:
        """Whether the exchange of run ``number`` can go: its owners are all there."""
        run = self._rests.get(number)
        return run is not None and self._gone.isdisjoint(run.table.owners)

    def _ticket(self, ticket: int, number: int, go: bool) -> None:
        run = self._rests.pop(number, None) if go else None
        self.lane.submit(ticket, partial(self._exchange, run) if run is not None else None)

    def _exchange(self, run: RankRun) -> None:
        """In the lane: send what was held back, and tell the conductor."""
        error = None
        try:
            run.exchange()
        except Exception as failure:
            error = None if _has_left(failure) else pickle.dumps(failure)
            answer = {"failed": True, "error": error}
        else:
            answer = {"failed": False, "error": None}
        self._call(
            self.worker.scheduler.redist_exchanged(
                number=run.table.number, seat=self.seat, **answer
            )
        )

    async def _free(self, number: int, condemn: bool) -> None:
        self._rests.pop(number, None)
        outputs = self.outputs.pop(number, None)
        if outputs is None:
            if number in self._refused:
                self._refused.discard(number)
            else:  # its allocation is under way still, or will come yet
                self._freed.add(number)
            return
        outputs.gate.close()
        while not outputs.gate.quiet:
            await asyncio.sleep(0.005)
        outputs.drop(condemn)

    async def _dead(self, number: int, lost: int, pid: int, started: int) -> bool:
        """Whether the process of a lost rank can write to us no more."""
        deadline = time.monotonic() + min(self.timeout, 10.0)
        while time.monotonic() < deadline:
            if pid == os.getpid():
                rank = _here.get((self.worker.scheduler.address, lost))
                gone = rank is None or all(run.gate.quiet for run in rank.runs.values())
            else:
                gone = is_dead(pid, started)
            outputs = self.outputs.get(number)
            if gone and (outputs is None or outputs.gate.empty):
                return True
            await asyncio.sleep(0.02)
        return False

    async def _write(self, number: int, headers: Any, buffers: Any) -> dict[str, Any]:
        outputs = self.outputs.get(number)
        if outputs is None:
            raise OSError(f"run {number} is over on {self.worker.address}")
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self.threads, outputs.receive, headers, buffers)
            self._messages_received += sum(memoryview(buffer).nbytes for buffer in buffers)
        except RunClosed as error:
            raise OSError(str(error)) from error
        return {}

    def _left(self, seat: int) -> None:
        """A rank has left: its memory stays until the last peer unmaps it."""
        self._gone.add(seat)
        for message in self._sending.pop(seat, ()):
            message.cancel()
        peer = self._peers.pop(seat, None)
        if peer is not None:
            peer.close()

    async def _reach(self, seats: Iterable[Any]) -> dict[int, str]:
        """The wire to each of the ``seats``."""
        peers = ((Seat(*s).seat, self._peer(Seat(*s))) for s in seats)
        return {seat: "dask comm" if peer is None else peer.wire for seat, peer in peers}

    async def _memory(self) -> dict[str, int]:
        """Bytes in this rank's arena, bytes that others wrote here, runs that are not over."""
        arena = self.arena
        return {
            "received": arena.received + self._messages_received,
            "in_use": arena.in_use,
            "idle": arena.idle,
            "condemned": arena.condemned,
            "runs": len(self.runs) + len(self.outputs) + len(self._rests),
        }

    # ------------------------------------------------------------------------------- wires
    def _wire_to(self, table: RunTable, seat: int) -> Wire:
        owner = table.owners[seat]
        peer = self._peer(owner)
        if peer is not None:
            return MemoryWire(peer, writer=self.seat if seat != self.seat else None)
        send = partial(self._send, table.number, owner)
        return MessageWire(send, config.nbytes("message-bytes"), name="dask comm")

    def _send(self, number: int, owner: Seat, headers: Any, buffers: Any) -> None:
        self._call(self._post(number, owner, headers, buffers))

    async def _post(self, number: int, owner: Seat, headers: Any, buffers: Any) -> None:
        """Send one message of pieces; given up as soon as the owner is known to have left."""
        if owner.seat in self._gone:
            raise OSError(f"rank on {owner.address} has left")
        message = asyncio.ensure_future(
            self.worker.rpc(owner.address).redist_write(
                number=number, headers=headers, buffers=[to_serialize(b) for b in buffers]
            )
        )
        sending = self._sending.setdefault(owner.seat, set())
        sending.add(message)
        try:
            await message
        except asyncio.CancelledError:
            raise OSError(f"rank on {owner.address} has left") from None
        finally:
            sending.discard(message)

    def _peer(self, owner: Seat) -> Peer | None:
        """A view of the owner's arena; None where only messages reach it."""
        if owner.seat in self._gone:
            raise OSError(f"rank on {owner.address} has left")
        try:
            return self._peers[owner.seat]
        except KeyError:
            pass
        forced = config.get("wire")
        peer: Peer | None = None
        if owner.seat == self.seat:
            peer = LocalPeer(self.arena)
        elif forced in (None, "shared memory"):
            try:
                peer = attach(owner.card, self.pages)
            except NotAttached as error:
                if forced:
                    raise
                logger.info("rank on %s is reached by messages: %s", owner.address, error)
        with self._lock:
            return self._peers.setdefault(owner.seat, peer)


def _cool(key: Any, value: Any) -> None:
    """Dask spilled an array: the pages of its block go back to the system at once."""
    block = block_of(value)
    if block is not None:
        block.cool()


def _has_left(error: Exception) -> bool:
    """Whether an error only says that the other side is gone."""
    return isinstance(error, OSError) and not isinstance(error, RunTimeoutError)


def _nbytes(shape: Index, itemsize: int) -> int:
    n = itemsize
    for length in shape:
        n *= length
    return n
