"""A double of one GPU a process: arrays are NumPy's, and streams are queues.

Nothing that is queued in a stream is done before somebody waits, then in a random interleaving,
which a seed decides.
"""

import mmap
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from meeting import CONTROL, HEAP, LETTERS, MOST, Meeting

LATENCIES = (0.0, 0.0, 0.0, 0.001, 0.004)  # seconds before a stream begins with what it was given


class _Owned:
    """Bytes at an address; an array over it keeps the owner alive."""

    def __init__(self, address: int, nbytes: int, owner: Any) -> None:
        self.owner = owner
        self.__array_interface__ = {
            **{"version": 3, "shape": (nbytes,), "typestr": "|u1"},
            "data": (address, False),
        }


def array_at(address: int, shape: Any, dtype: Any, owner: Any) -> Any:
    """A NumPy array over memory."""
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.asarray(_Owned(address, nbytes, owner))
    return np.ndarray(tuple(shape), dtype, buffer=memory)


class FakeMachine(Meeting):
    """A PE whose GPU is this process.

    Parameters
    ----------
    memory, case, pe, n_pes, patience
        As `Meeting` takes them.
    seed
        Decides what is left to chance.
    """

    def __init__(
        self, memory: mmap.mmap, case: int, pe: int, n_pes: int, seed: int, patience: float
    ) -> None:
        super().__init__(memory, case, pe, n_pes, patience)
        self.heaps = [self._base + CONTROL + MOST * LETTERS + k * HEAP for k in range(MOST)]
        self.random = random.Random(seed * 31 + self.pe)
        self.streams: list[FakeStream] = []

    def new_stream(self) -> "FakeStream":
        with self.lock:
            stream = FakeStream(self, len(self.streams))
            self.streams.append(stream)
        return stream

    def busy_streams(self) -> "list[FakeStream]":
        return [stream for stream in self.streams if stream.queue]

    def go_on(self) -> None:
        """The GPU goes on, whoever looks."""
        with self.lock:
            self._step()

    def _step(self) -> bool:
        now = time.monotonic()
        streams = [stream for stream in self.busy_streams() if stream.begins <= now]
        self.random.shuffle(streams)
        for stream in streams:
            _, operation = stream.queue[0]
            if operation():
                stream.queue.popleft()
                return True
        return False

    def _where(self) -> str:
        return f"; its streams stand at {[stream.queue[0][0] for stream in self.busy_streams()]}"

    def in_a_heap(self, address: int) -> bool:
        return self.heaps[0] <= address < self.heaps[-1] + HEAP


class FakeEvent:
    def __init__(self, machine: FakeMachine) -> None:
        self.reached = False
        self._machine = machine

    @property
    def done(self) -> bool:
        self._machine.go_on()
        return self.reached

    def synchronize(self) -> None:
        self._machine.run_until(lambda: self.reached, "an event")


Operation = Callable[[], bool]


class FakeStream:
    """A queue of operations, each of which says whether it could be done."""

    def __init__(self, machine: FakeMachine, number: int) -> None:
        self.queue: deque[tuple[str, Operation]] = deque()
        self.begins = 0.0
        self._machine, self._number = machine, number

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._number

    def add(self, words: str, operation: Operation) -> None:
        with self._machine.lock:
            if not self.queue:
                self.begins = time.monotonic() + self._machine.random.choice(LATENCIES)
            self.queue.append((words, operation))

    def kernel(self, work: Callable[[], object], words: str = "a kernel") -> None:
        """Queue work that can always be done."""
        self.add(words, lambda: work() is None or True)

    def takes(self, seconds: float) -> None:
        """Queue work that takes a while."""
        until: list[float] = []

        def work() -> bool:
            if not until:
                until.append(time.monotonic() + seconds)
            return time.monotonic() >= until[0]

        self.add("a slow kernel", work)

    def record(self) -> FakeEvent:
        event = FakeEvent(self._machine)
        self.kernel(lambda: setattr(event, "reached", True), "an event")
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.add("a wait for an event", lambda: event.reached)

    def synchronize(self) -> None:
        self._machine.run_until(lambda: not self.queue, "a stream")


class FakeGpu:
    """Stands for `dask_redist.gpu.Cupy`: arrays are NumPy's, streams are queues."""

    def __init__(self, machine: FakeMachine) -> None:
        self.machine = machine
        self._null = machine.new_stream()

    def use(self) -> None:
        pass

    def stream(self) -> FakeStream:
        return self.machine.new_stream()

    def current(self) -> FakeStream:
        return self._null

    def view(self, address: int, shape: Any, dtype: Any, owner: Any) -> Any:
        return array_at(address, shape, dtype, owner)

    def empty(self, shape: Any, dtype: Any) -> Any:
        made = np.empty(shape, dtype)
        made.reshape(-1).view("u1")[:] = 0xA5
        return made

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def copy(self, target: Any, source: Any, stream: FakeStream) -> None:
        target, source = self._unowned(target), self._unowned(source)

        def work() -> None:
            np.copyto(target, source, casting="unsafe")

        stream.kernel(work, "a copy")

    def _unowned(self, array: Any) -> Any:
        """An array as a kernel has it: what is queued keeps no block of a heap alive."""
        if not isinstance(array, np.ndarray) or not self.machine.in_a_heap(array.ctypes.data):
            return array
        bare = _Owned(0, 0, None)
        bare.__array_interface__ = dict(array.__array_interface__)
        return np.asarray(bare).view(array.dtype)

    def synchronize(self) -> None:
        self.machine.run_until(lambda: not self.machine.busy_streams(), "the GPU")
