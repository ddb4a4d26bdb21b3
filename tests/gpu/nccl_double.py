"""A double of NCCL's C library beside that of NVSHMEM; nccl4py's own Python layer runs over it.

A collective is queued in a stream. It is done when all ranks of its communicator have come to it,
each with the same number of it, kind, count, dtype, op and root; anything else is an error here, a
hang or wrong data there. CuPy's module is doubled as a whole: it needs NCCL's library to load.
"""

import ctypes
import functools
import importlib
import sys
from typing import Any

import numpy as np
from double import Double
from fakegpu import array_at
from meeting import LETTERS, Misuse

CAME, LEFT, DESTROYED, EACH = 80, 96, 112, 48  # numbers in the control page, of each communicator
MOST, ROOM = 4, LETTERS // 8  # communicators, and bytes of each in a rank's letter

DTYPES = ["i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]  # by NCCL's numbers
OPS: list[Any] = [np.add, np.multiply, np.maximum, np.minimum]


class FakeComm:
    """A communicator: its PEs, by their ranks, and which of all communicators it is."""

    def __init__(self, pes: list[int], number: int) -> None:
        self.pes, self.count, self.alive = pes, 0, True
        self.came, self.left, self.destroyed = (
            at + EACH * number for at in (CAME, LEFT, DESTROYED)
        )
        self.words = LETTERS // 2 + ROOM * number
        self.data, self.end = self.words + 128, self.words + ROOM


class NcclDouble:
    """NCCL of one rank."""

    def __init__(self, machine: Double) -> None:
        self.machine = machine
        self.rank, self.size = machine.pe, machine.n_pes
        self.error = 0
        self.comms: list[FakeComm] = []

    def at(self, comm: Any) -> FakeComm:
        return self.comms[int(comm) - 1]

    def comm_init_rank_scalable(
        self, nranks: int, myrank: int, n_id: int, comm_ids: Any, config: int
    ) -> Any:
        import nccl.bindings.nccl

        if (nranks, myrank, n_id) != (self.size, self.rank, 1):
            raise Misuse(f"rank {self.rank} of {self.size} says that it is {myrank} of {nranks}")
        if len(set(self.machine.all_tell(bytes(comm_ids)))) != 1:
            raise Misuse("the ranks have different unique ids")
        self.comms = [FakeComm(list(range(self.size)), 0)]
        return nccl.bindings.nccl.Comm(1)

    def comm_split(self, comm: Any, color: int, key: int, config: int) -> Any:
        """Only the first communicator is split, into one: all that is asked for here."""
        import nccl.bindings.nccl

        whole = self.at(comm)
        if (
            len(whole.pes) != self.size
            or self.machine.control[whole.left + self.rank] != whole.count
        ):
            raise Misuse(f"rank {self.rank} splits what is not the whole, or is under way")
        told = [letter.split() for letter in self.machine.all_tell(b"%d %d" % (color, key))]
        keys = {pe: int(k) for pe, (c, k) in enumerate(told) if int(c) == 0}
        if any(int(c) not in (0, -1) for c, _ in told) or len(set(keys.values())) < len(keys):
            raise Misuse(f"colors and keys {told}")
        assert len(self.comms) < MOST
        self.comms.append(FakeComm(sorted(keys, key=keys.__getitem__), len(self.comms)))
        return nccl.bindings.nccl.Comm(len(self.comms) if color == 0 else 0)

    def comm_count(self, comm: Any) -> int:
        return len(self.at(comm).pes)

    def comm_user_rank(self, comm: Any) -> int:
        return self.at(comm).pes.index(self.rank)

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
        self._queue(comm, "all_reduce", sendbuff, recvbuff, count, count, datatype, op, -1, stream)

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
        pes = self.at(comm).pes
        if not 0 <= root < len(pes) or (pes[root] == self.rank) != bool(recvbuff):
            raise Misuse(f"rank {self.rank} reduces to rank {root} at {recvbuff}")
        self._queue(comm, "reduce", sendbuff, recvbuff, count, count, datatype, op, root, stream)

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
            comm,
            "reduce_scatter",
            sendbuff,
            recvbuff,
            recvcount * self.comm_count(comm),
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
        self.at(comm).alive = False
        for stream in self.machine.busy_streams():
            stream.queue.clear()

    def comm_destroy(self, comm: Any) -> None:
        made, control = self.at(comm), self.machine.control
        if control[made.left + self.rank] != made.count:
            raise Misuse(f"rank {self.rank} destroys its communicator before all is done")
        made.alive = False
        control[made.destroyed + self.rank] = 1
        self.machine.run_until(
            lambda: all(control[made.destroyed + pe] for pe in made.pes), "all ranks in destroy"
        )

    def _queue(
        self,
        comm: Any,
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
        made = self.at(comm)
        if not made.alive or datatype >= len(DTYPES) or op >= len(OPS) or count < 1:
            raise Misuse(f"{kind} of {count} elements of type {datatype} by {op}")
        made.count += 1
        number, dtype = made.count, np.dtype(DTYPES[datatype])
        control, letters = self.machine.control, self.machine.letters
        words = f"{number} {kind} {count} {dtype} {op} {root}".encode().ljust(128)
        nbytes = count * dtype.itemsize
        words_at = slice(made.words, made.data)
        data_at = slice(made.data, made.data + nbytes)
        assert made.data + nbytes <= made.end

        def work() -> bool:
            pes = made.pes
            if control[made.came + self.rank] < number:
                if any(control[made.left + k] < number - 1 for k in pes):
                    return False  # somebody still reads the one before
                letters[self.rank, words_at] = np.frombuffer(words, "u1")
                letters[self.rank, data_at] = array_at(source, (nbytes,), "u1", None)
                control[made.came + self.rank] = number
            if any(control[made.came + k] < number for k in pes):
                return False
            said = {letters[k, words_at].tobytes() for k in pes}
            if len(said) > 1:
                raise Misuse(f"the ranks are in different collectives: {sorted(said)}")
            if target:
                parts = [letters[k, data_at].view(dtype) for k in pes]
                with np.errstate(over="ignore"):
                    total = np.ascontiguousarray(functools.reduce(OPS[op], parts))
                mine = total[pes.index(self.rank) * gets :][:gets] if gets != count else total
                ctypes.memmove(target, mine.ctypes.data, mine.nbytes)
            control[made.left + self.rank] = number
            return True

        self.machine.streams[stream].add(f"{kind} {number}", work)


class FakeCupyNccl:
    """What `cupy.cuda.nccl` is, over the double."""

    available = True

    def __init__(self, double: NcclDouble) -> None:
        self._double = double

    def get_unique_id(self) -> bytes:
        return bytes(range(128))

    def NcclCommunicator(self, ndev: int, commId: bytes, rank: int) -> "FakeCupyComm":
        made = self._double.comm_init_rank_scalable(ndev, rank, 1, commId, 0)
        return FakeCupyComm(self._double, made)


class FakeCupyComm:
    """CuPy's communicator."""

    def __init__(self, double: Any, comm: Any) -> None:
        self._double, self._comm = double, comm

    def reduce(self, *numbers: int) -> None:
        self._double.reduce(*numbers[:-1], comm=self._comm, stream=numbers[-1])

    def allReduce(self, *numbers: int) -> None:
        self._double.all_reduce(*numbers[:-1], comm=self._comm, stream=numbers[-1])

    def reduceScatter(self, *numbers: int) -> None:
        self._double.reduce_scatter(*numbers[:-1], comm=self._comm, stream=numbers[-1])

    def commSplit(self, color: int, key: int) -> "FakeCupyComm | None":
        made = self._double.comm_split(self._comm, color, key, 0)
        return FakeCupyComm(self._double, made) if color >= 0 else None

    def check_async_error(self) -> None:
        if self._double.error:
            raise RuntimeError(f"<Result.RemoteError: {self._double.error}>")

    def abort(self) -> None:
        self._double.comm_abort(self._comm)

    def destroy(self) -> None:
        self._double.comm_destroy(self._comm)


def install_nccl(double: NcclDouble, by: str = "nccl4py") -> None:
    """Put a double in the place of what nccl4py calls; or of CuPy's module, without nccl4py."""
    if sys.modules.get("nccl.core", ...) is None:
        sys.modules["nccl.core"] = HIDDEN.pop()
    import nccl.bindings.nccl
    import nccl.core.communicator

    class Device:
        device_id = -1  # what DLPack says of NumPy's arrays

        def __init__(self, device_id: int) -> None:
            pass

    nccl.core.communicator.Device = Device
    for name in REPLACED:
        setattr(nccl.bindings.nccl, name, getattr(double, name))
    nccl.bindings.nccl.comm_cu_device = lambda comm: 0
    if by == "cupy":
        HIDDEN.append(nccl.core)
        sys.modules["nccl.core"] = None  # type: ignore[assignment]
        importlib.import_module("cupy.cuda").nccl = FakeCupyNccl(double)  # type: ignore[attr-defined]


HIDDEN: list[Any] = []
REPLACED = [
    *("comm_init_rank_scalable", "all_reduce", "reduce", "reduce_scatter", "comm_split"),
    *("comm_get_async_error", "comm_abort", "comm_destroy", "comm_count", "comm_user_rank"),
]
