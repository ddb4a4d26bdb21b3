"""What a rank holds for runs: blocks for its outputs, from their allocation until each is taken."""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import dask
from dask.utils import format_bytes
from distributed import Worker
from numpy.typing import NDArray

from dask_redist.arena import Arena
from dask_redist.errors import AdmissionError
from dask_redist.run import Outputs, RunClosed
from dask_redist.spec import Index

#: share of a worker's memory that stays free below the level at which Dask pauses it
SLACK = 0.05


class Holdings:
    """The outputs that a rank owns.

    Parameters
    ----------
    worker
        The rank's worker.
    arena
        Where the blocks come from.
    memory_limit
        Bytes that the worker may use.
    collect
        Fetches a message that was announced by a letter; to a place, if one is given.
    """

    def __init__(
        self,
        worker: Worker,
        arena: Arena,
        memory_limit: int,
        collect: Callable[[Sequence[Any], Any], Awaitable[Any]],
    ) -> None:
        #: bytes that came in messages, ever
        self.received = 0
        self._worker = worker
        #: the least memory that the process was seen to use
        self._least = memory_limit
        self._arena = arena
        self._memory_limit = memory_limit
        #: of its own: it must not wait behind threads that wait for other ranks
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="dask-redist-holdings")
        self._collect = collect
        self._outputs: dict[int, Outputs] = {}
        #: bytes that fit and are being allocated
        self._promised = 0
        #: runs that were freed before their memory was allocated here (the last ones)
        self._freed: deque[int] = deque(maxlen=1000)

    def __len__(self) -> int:
        return len(self._outputs)

    async def allocate(self, number: int, spec: bytes, outs: Iterable[int]) -> dict[str, Any]:
        """Blocks for the outputs ``outs`` of a run: their offsets, or why not.

        ``crowded``: there was room for them once: what takes it now may go, or be spilled, when
        the outputs of other runs have been taken and tasks have ended.
        """
        part, takers = pickle.loads(spec)
        outs = list(outs)
        shapes = (part.out_shape(part.local_out(out)) for out in outs)
        sizes = [prod(shape) * part.dtype.itemsize for shape in shapes]
        loop = asyncio.get_running_loop()
        needed = sum(sizes)
        try:
            await self.make_room(needed)
        except AdmissionError as error:
            return {"error": str(error), "crowded": needed <= self._limit - self._least}
        self._promised += needed
        try:
            blocks = await loop.run_in_executor(self._threads, self._arena.allocate, sizes)
        except MemoryError as error:
            return {"error": str(error), "crowded": False}
        finally:
            self._promised -= needed
        if number not in self._freed:
            # Of a replicated output a rank has one copy, under the number that its writers know.
            blocks_of = {out % part.n_out: b for out, b in zip(outs, blocks, strict=True)}
            self._outputs[number] = Outputs(part, blocks_of, takers)
        return {"offsets": [block.offset for block in blocks]}

    async def make_room(self, needed: int) -> None:
        """Have Dask spill until ``needed`` bytes fit under the worker's limit.

        Raises
        ------
        AdmissionError
            They do not fit.
        """
        if not self._worker.memory_manager.memory_limit:
            return
        data: Any = self._worker.data
        while True:
            used = self._worker.monitor.get_process_memory()
            self._least = min(self._least, used)
            there = self._limit - used - self._promised
            if needed <= there + self._arena.idle:
                return
            if not getattr(data, "fast", None) or data.evict() <= 0:  # all that Dask could spill
                break
            await asyncio.sleep(0)
        raise AdmissionError(
            f"needs {needed} bytes ({format_bytes(needed)}) for its outputs, {max(there, 0)} bytes "
            f"({format_bytes(max(there, 0))}) are there under its memory limit of "
            f"{format_bytes(self._memory_limit)}; use more or larger workers, or smaller arrays"
        )

    @property
    def _limit(self) -> int:
        """Bytes that the process may use."""
        # Outputs cannot be spilled before they are taken, and a paused worker takes nothing.
        pause = self._worker.memory_manager.memory_pause_fraction or 1.0
        terminate = dask.config.get("distributed.worker.memory.terminate") or 1.0
        return int((min(pause, terminate) - SLACK) * self._memory_limit)

    def open(self, number: int, outputs: Outputs) -> None:
        """Have arrays written that are nobody's output, until run ``number`` is freed."""
        self._outputs[number] = outputs

    def take(self, number: int, index: Index) -> NDArray[Any] | None:
        """The output chunk ``index``, once; None where it is not here (any more)."""
        outputs = self._outputs.get(number)
        return None if outputs is None else outputs.take(outputs.spec.out_number(index))

    async def receive(
        self,
        number: int,
        headers: Any,
        buffer: Any = None,
        letter: Any = None,
    ) -> dict[str, Any]:
        """Write pieces that a peer sent as a message, or has to be asked for by a letter.

        Raises
        ------
        OSError
            The run is over here.
        """
        outputs = self._outputs.get(number)
        if outputs is None:
            raise OSError(f"run {number} is over on {self._worker.address}")
        loop = asyncio.get_running_loop()
        try:
            if letter is not None:
                with outputs.gate.enter():
                    place = outputs.in_place(headers)
                    if place is not None:
                        await self._collect(letter, place)
                        self.received += place.nbytes
                        return {}
                buffer = await self._collect(letter, None)
            await loop.run_in_executor(self._threads, outputs.receive, headers, buffer)
        except RunClosed as error:
            raise OSError(str(error)) from error
        self.received += memoryview(buffer).nbytes
        return {}

    def receiving(self, number: int) -> bool:
        """Whether a message is just being written."""
        outputs = self._outputs.get(number)
        return outputs is not None and not outputs.gate.empty

    async def free(self, number: int, condemn: bool) -> None:
        """Forget a run; what was not taken goes back, or (``condemn``) to nobody."""
        outputs = self._outputs.pop(number, None)
        if outputs is not None:
            outputs.gate.close()
            while not outputs.gate.quiet:
                await asyncio.sleep(0.005)
            outputs.drop(condemn)
        else:  # its allocation may be under way still, or come yet
            self._freed.append(number)

    def close(self) -> None:
        """Give back everything."""
        self._threads.shutdown(wait=False)
        while self._outputs:
            _, outputs = self._outputs.popitem()
            outputs.drop(condemn=False)
