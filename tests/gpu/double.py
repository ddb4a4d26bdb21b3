"""A double of NVSHMEM's C library, of one GPU a process, and of its streams; strict.

nvshmem4py's own Python layer runs over it: only what it calls in C is replaced. All PEs' heaps are
one mapped file. What the real library leaves to chance is decided by a seed, and what it answers
with a hang, an exit or wrong data is an error here:

- nothing that is queued in a stream is done before somebody waits, then in a random interleaving;
- what is put without waiting reads its source and lands only at a quiet or a barrier;
- allocations must be equal on all PEs, puts must stay inside one live allocation, and go from
  symmetric memory, to another PE; nobody asks for a peer view of itself; signals must rise;
- two threads must not be in the library at once, and at the end nothing may be left.
"""

import ctypes
import mmap
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

HEAP = 8 << 20  # bytes a PE
CONTROL = 1 << 16
LETTERS = 1 << 16  # bytes a PE for what the harness tells all
MOST = 5  # PEs
SIZE = CONTROL + MOST * (HEAP + LETTERS)
LATENCIES = (0.0, 0.0, 0.0, 0.001, 0.004)  # seconds before a stream begins with what it was given

FAILED, CASE, HOST, ON_STREAM, SIZES, UID = 0, 1, 16, 32, 48, 64  # numbers in the control page


class Misuse(Exception):
    """What the real library answers with a hang, an exit, or wrong data."""


class Stuck(Misuse):
    """A wait that nothing will end."""


class OtherFailed(Exception):
    """Another PE has failed, so this one gives up."""


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


class FakeEvent:
    def __init__(self, machine: "Double") -> None:
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

    def __init__(self, machine: "Double", number: int) -> None:
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

    def __init__(self, machine: "Double") -> None:
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


class Double:
    """The library and the GPU of one PE.

    Parameters
    ----------
    memory
        The file that all PEs map.
    case
        A number that only rises.
    pe, n_pes
        Which of how many.
    seed
        Decides what is left to chance.
    cut_off
        Pairs of PEs that do not reach each other's memory.
    status
        What `init_status` says after the start.
    patience
        Seconds without any progress after which a wait is taken to be endless.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        case: int,
        pe: int,
        n_pes: int,
        seed: int,
        cut_off: frozenset[tuple[int, int]] = frozenset(),
        status: int = 2,
        patience: float = 30.0,
    ) -> None:
        self.case, self.pe, self.n_pes = case, pe, n_pes
        self._cut_off = cut_off
        self._status, self._patience = status, patience
        self._memory = memory
        bytes_of_all = np.frombuffer(memory, np.uint8)
        self._base: int = bytes_of_all.ctypes.data
        self.control = bytes_of_all[:CONTROL].view(np.uint64)
        self.letters = bytes_of_all[CONTROL : CONTROL + MOST * LETTERS].reshape(MOST, LETTERS)
        self._heaps = [self._base + CONTROL + MOST * LETTERS + k * HEAP for k in range(MOST)]
        self.random = random.Random(seed * 31 + pe)
        self.lock = threading.RLock()
        self._inside = threading.Lock()
        self.streams: list[FakeStream] = []
        self._live: dict[int, int] = {}
        self._brk = self._heaps[pe]
        self._pending: list[tuple[int, Callable[[], None]]] = []
        self._barriers = 0
        self._initialized = False
        self.calls: list[str] = []

    # ----------------------------------------------------------------------------- progress
    def new_stream(self) -> FakeStream:
        with self.lock:
            stream = FakeStream(self, len(self.streams))
            self.streams.append(stream)
        return stream

    def busy_streams(self) -> list[FakeStream]:
        return [stream for stream in self.streams if stream.queue]

    def run_until(self, done: Callable[[], bool], words: str) -> None:
        """Do what is queued, in a random interleaving, until something has come about."""
        deadline = time.monotonic() + self._patience
        while True:
            with self.lock:
                if done():
                    return
                moved = self._step()
            self.give_up_if_failed()
            if moved:
                deadline = time.monotonic() + self._patience
            elif time.monotonic() > deadline:
                heads = [stream.queue[0][0] for stream in self.busy_streams()]
                raise Stuck(f"PE {self.pe} waits for {words}; its streams stand at {heads}")
            else:
                time.sleep(0.0003)

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

    def give_up_if_failed(self) -> None:
        if self.control[FAILED] >= self.case or self.control[CASE] != self.case:
            raise OtherFailed(f"PE {self.pe} gives up: another one has failed")

    def host_barrier(self, words: str) -> None:
        """Wait on the host for all PEs; the GPU goes on meanwhile."""
        mine = HOST + self.pe
        self.control[mine] += np.uint64(1)
        count = int(self.control[mine])
        self.run_until(
            lambda: all(self.control[HOST + k] >= count for k in range(self.n_pes)),
            f"all PEs in {words}",
        )

    def all_tell(self, letter: bytes) -> list[bytes]:
        """What each PE tells all others."""
        size = len(letter)
        assert size + 8 <= LETTERS
        self.letters[self.pe, :8].view(np.uint64)[0] = size
        self.letters[self.pe, 8 : 8 + size] = np.frombuffer(letter, np.uint8)
        self.host_barrier("telling")
        sizes = [int(self.letters[k, :8].view(np.uint64)[0]) for k in range(self.n_pes)]
        told = [self.letters[k, 8 : 8 + n].tobytes() for k, n in enumerate(sizes)]
        self.host_barrier("hearing")
        return told

    # ------------------------------------------------------------------------------- checks
    @contextmanager
    def _call(self, name: str) -> Iterator[None]:
        if not self._inside.acquire(blocking=False):
            raise Misuse(f"two threads of PE {self.pe} are in the library, one in {name}")
        try:
            self.calls.append(name)
            time.sleep(0)  # let another thread in, if it wants to
            if not self._initialized and name != "init":
                raise Misuse(f"{name} on PE {self.pe} before init or after finalize")
            yield
        finally:
            self._inside.release()

    def _own_range(self, name: str, address: int, nbytes: int) -> None:
        """A range must lie in one allocation of this PE that is alive."""
        if not any(
            start <= address and address + nbytes <= start + size
            for start, size in self._live.items()
        ):
            offset = address - self._heaps[self.pe]
            raise Misuse(
                f"{name} on PE {self.pe}: {nbytes} bytes at {offset} of its heap are in no live "
                "allocation"
            )

    def _other(self, name: str, pe: int) -> int:
        if pe == self.pe or not 0 <= pe < self.n_pes:
            raise Misuse(f"{name} on PE {self.pe} names PE {pe}")
        return pe

    def _there(self, address: int, pe: int) -> int:
        return address - self._heaps[self.pe] + self._heaps[pe]

    def in_a_heap(self, address: int) -> bool:
        return self._heaps[0] <= address < self._heaps[-1] + HEAP

    def reaches(self, pe: int) -> bool:
        return (min(pe, self.pe), max(pe, self.pe)) not in self._cut_off

    # --------------------------------------------------- init and memory: all PEs together
    def set_attr_uniqueid_args(self, myrank: int, nranks: int, uniqueid: int, attr: int) -> None:
        if (myrank, nranks) != (self.pe, self.n_pes):
            raise Misuse(f"PE {self.pe} of {self.n_pes} says that it is {myrank} of {nranks}")
        found = ctypes.c_uint64.from_address(uniqueid + 8).value
        self.control[UID + self.pe] = found

    def get_uniqueid(self, uniqueid: int) -> None:
        ctypes.memmove(uniqueid, os.urandom(128), 128)

    def hostlib_init_attr(self, flags: int, attr: int) -> None:
        with self._call("init"):
            self.host_barrier("init")
            if len(set(self.control[UID : UID + self.n_pes].tolist())) != 1:
                raise Misuse("the PEs have different unique ids")
            self._initialized = True

    def hostlib_finalize(self) -> None:
        with self._call("finalize"):
            if self._live:
                raise Misuse(f"{len(self._live)} allocations are alive at the end")
            if busy := self.busy_streams():
                raise Misuse(f"{busy[0].queue[0][0]} is queued at the end")
            if self._pending:
                raise Misuse(f"{len(self._pending)} puts have not landed at the end")
            self.host_barrier("finalize")
            self._initialized = False

    def init_status(self) -> int:
        return self._status if self._initialized else 0

    def malloc(self, size: int) -> int:
        with self._call("malloc"):
            if size < 1:
                raise Misuse(f"an allocation of {size} bytes: other PEs would hang")
            self.control[SIZES + self.pe] = size
            self.host_barrier("malloc")
            sizes = self.control[SIZES : SIZES + self.n_pes].tolist()
            self.host_barrier("malloc")
            if len(set(sizes)) != 1:
                raise Misuse(f"PEs allocate different sizes: {sizes}")
            address = self._brk
            self._brk += (size + 511) // 512 * 512 + 512
            if self._brk > self._heaps[self.pe] + HEAP:
                return 0
            ctypes.memset(address, 0xA5, size)
            self._live[address] = size
            return address

    def free(self, ptr: int) -> None:
        with self._call("free"):
            self.host_barrier("free")
            if self._live.pop(ptr, None) is None:
                raise Misuse(f"PE {self.pe} frees what is no live allocation")

    def ptr(self, dest: int, pe: int) -> int:
        with self._call("ptr"):
            self._other("ptr", pe)
            self._own_range("ptr", dest, 1)
            return self._there(dest, pe) if self.reaches(pe) else 0

    # ------------------------------------------------------------------ queued in a stream
    def putmem_nbi_on_stream(
        self, dest: int, source: int, nbytes: int, pe: int, cstrm: int
    ) -> None:
        def land() -> None:
            ctypes.memmove(self._there(dest, pe), source, nbytes)

        def begin() -> bool:
            self._pending.append((cstrm, land))
            return True

        with self._call("put_nbi"):
            self._check_put("put_nbi", dest, source, nbytes, pe)
            self.streams[cstrm].add("a put", begin)

    def putmem_signal_on_stream(
        self,
        dest: int,
        source: int,
        nbytes: int,
        sig_addr: int,
        signal: int,
        op: int,
        pe: int,
        cstrm: int,
    ) -> None:
        def put() -> bool:
            ctypes.memmove(self._there(dest, pe), source, nbytes)
            return self._set(sig_addr, signal, pe)

        with self._call("put_signal"):
            self._check_put("put_signal", dest, source, nbytes, pe)
            self._check_signal("put_signal", sig_addr, op, pe)
            self.streams[cstrm].add("a put with a signal", put)

    def signal_op_on_stream(self, sig_addr: int, signal: int, op: int, pe: int, cstrm: int) -> None:
        with self._call("signal_op"):
            self._check_signal("signal_op", sig_addr, op, pe)
            self.streams[cstrm].add("a signal", lambda: self._set(sig_addr, signal, pe))

    def signal_wait_until_on_stream(
        self, sig_addr: int, cmp: int, value: int, cstream: int
    ) -> None:
        with self._call("signal_wait"):
            self._own_range("signal_wait", sig_addr, 8)
            if cmp != 5 or value < 1:
                raise Misuse(f"a wait for a number by comparison {cmp} with {value}")
            if self._status == 3:
                raise Misuse("signal_wait with limited MPG ends the process")
            number = ctypes.c_uint64.from_address(sig_addr)
            self.streams[cstream].add(f"a wait for {value}", lambda: number.value >= value)

    def quiet_on_stream(self, cstrm: int) -> None:
        with self._call("quiet"):
            self.streams[cstrm].kernel(lambda: self._land(cstrm), "a quiet")

    def barrier_all_on_stream(self, stream: int) -> None:
        self._barriers += 1
        count = self._barriers

        def arrive() -> bool:
            if self.control[ON_STREAM + self.pe] < count:
                self._land(None)
                self.control[ON_STREAM + self.pe] = count
            return all(self.control[ON_STREAM + k] >= count for k in range(self.n_pes))

        with self._call("barrier_all"):
            self.streams[stream].add("a barrier", arrive)

    def _check_put(self, name: str, dest: int, source: int, nbytes: int, pe: int) -> None:
        self._other(name, pe)
        self._own_range(name, dest, nbytes)
        self._own_range(name, source, nbytes)
        if nbytes < 1:
            raise Misuse(f"{name} of {nbytes} bytes")

    def _check_signal(self, name: str, sig_addr: int, op: int, pe: int) -> None:
        self._other(name, pe)
        self._own_range(name, sig_addr, 8)
        if op != 9 or sig_addr % 8:
            raise Misuse(f"{name}: operation {op} at {sig_addr}")

    def _set(self, sig_addr: int, value: int, pe: int) -> bool:
        number = ctypes.c_uint64.from_address(self._there(sig_addr, pe))
        if number.value >= value:
            raise Misuse(f"PE {self.pe} sets {value} in PE {pe}, which has {number.value}")
        number.value = value
        return True

    def _land(self, cstrm: int | None) -> None:
        landing = [put for put in self._pending if cstrm in (None, put[0])]
        self._pending = [put for put in self._pending if put not in landing]
        self.random.shuffle(landing)
        for _, put in landing:
            put()


def install(double: Double) -> None:
    """Put a double in the place of what nvshmem4py calls, and forget what it knew of another."""
    import cuda.core
    import nvshmem.bindings
    from nvshmem.core import _internal_tracking as tracking
    from nvshmem.core import direct, init_fini, nvshmem_types

    class Device:
        def __init__(self, device_id: int) -> None:
            self.device_id = device_id

        def set_current(self) -> None:
            pass

    tracking._mr_references.clear()
    tracking._cached_device["device"] = None
    tracking._is_initialized["status"] = tracking.InternalInitStatus.UNINITIALIZED
    cuda.core.Device = Device
    for module in (direct, init_fini):
        module.load_nvidia_dynamic_lib = lambda name: None
    for name in ("malloc", "free", "ptr"):
        setattr(nvshmem_types, name, getattr(double, name))
    for name in REPLACED:
        setattr(nvshmem.bindings, name, getattr(double, name))
    nvshmem.bindings.my_pe = lambda: double.pe
    nvshmem.bindings.n_pes = lambda: double.n_pes
    # Then a buffer needs no driver.
    nvshmem_types.NvshmemResource.is_device_accessible = property(lambda self: False)
    nvshmem_types.NvshmemResource.is_host_accessible = property(lambda self: True)


REPLACED = [
    *("ptr", "init_status", "get_uniqueid", "set_attr_uniqueid_args", "hostlib_init_attr"),
    *("hostlib_finalize", "putmem_nbi_on_stream", "putmem_signal_on_stream", "quiet_on_stream"),
    *("signal_op_on_stream", "signal_wait_until_on_stream", "barrier_all_on_stream"),
]
