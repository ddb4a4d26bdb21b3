"""What a rank holds for runs: blocks for its outputs, from their allocation until each is taken."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterable
from concurrent.futures import Executor
from math import prod
from typing import Any

import dask
from distributed import Worker
from numpy.typing import NDArray

from dask_redist.arena import Arena
from dask_redist.errors import AdmissionError
from dask_redist.run import Outputs, RunClosed
from dask_redist.spec import Index, PartSpec


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
    threads
        Does what would block the event loop.
    """

    def __init__(self, worker: Worker, arena: Arena, memory_limit: int, threads: Executor) -> None:
        #: bytes that came in messages, ever
        self.received = 0
        self._worker = worker
        self._arena = arena
        self._memory_limit = memory_limit
        self._threads = threads
        self._outputs: dict[int, Outputs] = {}
        #: runs that were freed before their memory was allocated here, and those refused it
        self._freed: set[int] = set()
        self._refused: set[int] = set()

    def __len__(self) -> int:
        return len(self._outputs)

    async def allocate(self, number: int, spec: bytes, outs: Iterable[int]) -> dict[str, Any]:
        """Blocks for the outputs ``outs`` of a run: their offsets, or why not."""
        part: PartSpec = pickle.loads(spec)
        outs = list(outs)
        sizes = [prod(part.out_shape(out)) * part.dtype.itemsize for out in outs]
        loop = asyncio.get_running_loop()
        try:
            await self._make_room(sum(sizes))
            blocks = await loop.run_in_executor(self._threads, self._arena.allocate, sizes)
        except MemoryError as error:
            self._refused.add(number)
            return {"error": str(error)}
        if number in self._freed:
            self._freed.discard(number)
        else:
            self._outputs[number] = Outputs(part, dict(zip(outs, blocks, strict=True)))
        return {"offsets": [block.offset for block in blocks]}

    async def _make_room(self, needed: int) -> None:
        """Have Dask spill until ``needed`` bytes fit under the worker's limit.

        Raises
        ------
        AdmissionError
            They do not fit.
        """
        if not self._worker.memory_manager.memory_limit:
            return
        fraction = dask.config.get("distributed.worker.memory.terminate") or 1.0
        limit = int(fraction * self._memory_limit)
        data: Any = self._worker.data
        while True:
            there = limit - self._worker.monitor.get_process_memory() + self._arena.idle
            if needed <= there:
                return
            self._arena.trim()
            if not getattr(data, "fast", None) or data.evict() <= 0:  # all that Dask could spill
                break
            await asyncio.sleep(0)
        raise AdmissionError(
            f"rank on {self._worker.address} needs {needed} bytes for its outputs, "
            f"{max(there, 0)} bytes are there under its memory limit of {self._memory_limit}; "
            "use more or larger workers, or smaller arrays"
        )

    def take(self, number: int, index: Index) -> NDArray[Any] | None:
        """The output chunk ``index``, once; None where it is not here (any more)."""
        outputs = self._outputs.get(number)
        return None if outputs is None else outputs.take(outputs.spec.out_number(index))

    async def receive(self, number: int, headers: Any, buffers: Any) -> dict[str, Any]:
        """Write pieces that a peer sent as a message.

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
            await loop.run_in_executor(self._threads, outputs.receive, headers, buffers)
        except RunClosed as error:
            raise OSError(str(error)) from error
        self.received += sum(memoryview(buffer).nbytes for buffer in buffers)
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
        elif number in self._refused:
            self._refused.discard(number)
        else:  # its allocation is under way still, or will come yet
            self._freed.add(number)

    def close(self) -> None:
        """Give back everything."""
        while self._outputs:
            _, outputs = self._outputs.popitem()
            outputs.drop(condemn=False)
