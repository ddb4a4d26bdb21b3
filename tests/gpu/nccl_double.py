"""A double of NCCL's C library beside that of NVSHMEM; nccl4py's own Python layer runs over it.

A collective is queued in a stream. It is done when all ranks have come to it, each with the same
number of it, kind, count, dtype, op and root; anything else is an error here, a hang or wrong data
there.
"""

import ctypes
import functools
from typing import Any

import numpy as np
from double import Double
from fakegpu import array_at
from meeting import LETTERS, Misuse

CAME, LEFT, DESTROYED = 80, 96, 112  # numbers in the control page
WORDS, DATA = LETTERS // 2, LETTERS // 2 + 128  # where a rank's letter has its collective

DTYPES = ["i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]  # by NCCL's numbers
OPS: list[Any] = [np.add, np.multiply, np.maximum, np.minimum]


class NcclDouble:
    """NCCL of one rank."""

    def __init__(self, machine: Double) -> None:
        self.machine = machine
        self.rank, self.size = machine.pe, machine.n_pes
        self.error = 0
        self._count = 0
        self._alive = False

    def comm_init_rank_scalable(
        self, nranks: int, myrank: int, n_id: int, comm_ids: Any, config: int
    ) -> Any:
        import nccl.bindings.nccl

        if (nranks, myrank, n_id) != (self.size, self.rank, 1):
            raise Misuse(f"rank {self.rank} of {self.size} says that it is {myrank} of {nranks}")
        if len(set(self.machine.all_tell(bytes(comm_ids)))) != 1:
            raise Misuse("the ranks have different unique ids")
        self._alive = True
        return nccl.bindings.nccl.Comm(1)

    def all_reduce(
        self,
        sendbuff: int,
        recvbuff: int,
        count: int,
        datatype: int,
        op: int,
        comm: Any,
        stream: int,
    ) -> None:
        self._queue("all_reduce", sendbuff, recvbuff, count, count, datatype, op, -1, stream)

    def reduce(
        self,
        sendbuff: int,
        recvbuff: int,
        count: int,
        datatype: int,
        op: int,
        root: int,
        comm: Any,
        stream: int,
    ) -> None:
        if not 0 <= root < self.size or (root == self.rank) != bool(recvbuff):
            raise Misuse(f"rank {self.rank} reduces to rank {root} at {recvbuff}")
        self._queue("reduce", sendbuff, recvbuff, count, count, datatype, op, root, stream)

    def reduce_scatter(
        self,
        sendbuff: int,
        recvbuff: int,
        recvcount: int,
        datatype: int,
        op: int,
        comm: Any,
        stream: int,
    ) -> None:
        self._queue(
            "reduce_scatter",
            sendbuff,
            recvbuff,
            recvcount * self.size,
            recvcount,
            datatype,
            op,
            -1,
            stream,
        )

    def comm_get_async_error(self, comm: Any) -> Any:
        import nccl.bindings.nccl

        return nccl.bindings.nccl.Result(self.error)

    def comm_abort(self, comm: Any) -> None:
        self._alive = False
        for stream in self.machine.busy_streams():
            stream.queue.clear()

    def comm_destroy(self, comm: Any) -> None:
        if self.machine.control[LEFT + self.rank] != self._count:
            raise Misuse(f"rank {self.rank} destroys its communicator before all is done")
        self._alive = False
        self.machine.host_barrier("destroy")

    def _queue(
        self,
        kind: str,
        source: int,
        target: int,
        count: int,
        gets: int,
        datatype: int,
        op: int,
        root: int,
        stream: int,
    ) -> None:
        if not self._alive or datatype >= len(DTYPES) or op >= len(OPS) or count < 1:
            raise Misuse(f"{kind} of {count} elements of type {datatype} by {op}")
        self._count += 1
        number, dtype = self._count, np.dtype(DTYPES[datatype])
        control, letters = self.machine.control, self.machine.letters
        words = f"{number} {kind} {count} {dtype} {op} {root}".encode().ljust(128)
        nbytes = count * dtype.itemsize
        assert DATA + nbytes <= LETTERS

        def work() -> bool:
            ranks = range(self.size)
            if control[CAME + self.rank] < number:
                if any(control[LEFT + k] < number - 1 for k in ranks):
                    return False  # somebody still reads the one before
                letters[self.rank, WORDS:DATA] = np.frombuffer(words, "u1")
                letters[self.rank, DATA : DATA + nbytes] = array_at(source, (nbytes,), "u1", None)
                control[CAME + self.rank] = number
            if any(control[CAME + k] < number for k in ranks):
                return False
            said = {letters[k, WORDS:DATA].tobytes() for k in ranks}
            if len(said) > 1:
                raise Misuse(f"the ranks are in different collectives: {sorted(said)}")
            if target:
                parts = [letters[k, DATA : DATA + nbytes].view(dtype) for k in ranks]
                with np.errstate(over="ignore"):
                    total = np.ascontiguousarray(functools.reduce(OPS[op], parts))
                mine = total[self.rank * gets :][:gets] if gets != count else total
                ctypes.memmove(target, mine.ctypes.data, mine.nbytes)
            control[LEFT + self.rank] = number
            return True

        self.machine.streams[stream].add(f"{kind} {number}", work)


def install_nccl(double: NcclDouble) -> None:
    """Put a double in the place of what nccl4py calls."""
    import nccl.bindings.nccl
    import nccl.core.communicator

    class Device:
        device_id = -1  # what DLPack says of NumPy's arrays

        def __init__(self, device_id: int) -> None:
            pass

    nccl.core.communicator.Device = Device
    for name in REPLACED:
        setattr(nccl.bindings.nccl, name, getattr(double, name))
    nccl.bindings.nccl.comm_count = lambda comm: double.size
    nccl.bindings.nccl.comm_user_rank = lambda comm: double.rank
    nccl.bindings.nccl.comm_cu_device = lambda comm: 0


REPLACED = [
    *("comm_init_rank_scalable", "all_reduce", "reduce", "reduce_scatter"),
    *("comm_get_async_error", "comm_abort", "comm_destroy"),
]
