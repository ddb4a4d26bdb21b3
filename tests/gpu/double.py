"""A double of NVSHMEM's C library; strict.

nvshmem4py's own Python layer runs over it: only what it calls in C is replaced, see `install.py`.
All PEs' heaps are one mapped file. What the real library answers with a hang, an exit or wrong data
is an error here:

- what is put without waiting reads its source and lands only at a quiet or a barrier;
- allocations must be equal on all PEs, puts must stay inside one live allocation, and go from
  symmetric memory, to another PE; nobody asks for a peer view of itself; signals must rise;
- two threads must not be in the library at once, and at the end nothing may be left.
"""

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fakegpu import FakeMachine
from meeting import HEAP, Misuse

ON_STREAM, SIZES, UID = 32, 48, 64  # numbers in the control page


class Double(FakeMachine):
    """The library and the GPU of one PE.

    Parameters
    ----------
    memory, case, pe, n_pes, patience
        As `Meeting` takes them.
    seed
        Decides what is left to chance.
    cut_off
        Pairs of PEs that do not reach each other's memory.
    status
        What `init_status` says after the start.
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
        super().__init__(memory, case, pe, n_pes, seed, patience)
        self._cut_off, self._status = cut_off, status
        self._inside = threading.Lock()
        self._live: dict[int, int] = {}
        self._brk = self.heaps[pe]
        self._pending: list[tuple[int, Callable[[], None]]] = []
        self._barriers = 0
        self._initialized = False
        self.calls: list[str] = []

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
            offset = address - self.heaps[self.pe]
            raise Misuse(
                f"{name} on PE {self.pe}: {nbytes} bytes at {offset} of its heap are in no live "
                "allocation"
            )

    def _other(self, name: str, pe: int) -> int:
        if pe == self.pe or not 0 <= pe < self.n_pes:
            raise Misuse(f"{name} on PE {self.pe} names PE {pe}")
        return pe

    def _there(self, address: int, pe: int) -> int:
        return address - self.heaps[self.pe] + self.heaps[pe]

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
            if self._brk > self.heaps[self.pe] + HEAP:
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
