"""NCCL as Python calls it: by nccl4py or, where that is missing, by CuPy.

All that uses nccl4py; CuPy's part comes from `dask_redist.gpu`. Nothing here checks what NCCL does
not: `dask_redist.nccl` does. Arrays are flat, contiguous, and of a dtype that NCCL has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from dask_redist.errors import RedistError
from dask_redist.gpu import Gpu, Stream, cupy_nccl

__all__ = ["Communicator", "CupyCommunicator", "NcclCommunicator", "communicator", "new_nccl_uid"]

#: NCCL's numbers, which CuPy takes: of what is reduced, and how
_DTYPES = {
    **{"int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5},
    **{"float16": 6, "float32": 7, "float64": 8},
}
_OPS = {"sum": 0, "product": 1, "max": 2, "min": 3}
_NAMES = {"sum": "SUM", "product": "PROD", "min": "MIN", "max": "MAX"}


class Communicator(Protocol):
    """Some ranks. All make the same calls in the same order; ``target`` is None if it gets none."""

    def reduce(self, source: Any, target: Any, op: str, root: int, stream: Stream) -> None: ...

    def all_reduce(self, source: Any, target: Any, op: str, stream: Stream) -> None: ...

    def reduce_scatter(self, source: Any, target: Any, op: str, stream: Stream) -> None: ...

    def failure(self) -> str:
        """What has failed since, in words; empty if nothing has."""

    def split(self, color: int, key: int) -> Communicator | None:
        """One of those with the same color, by their keys; None if the color is negative."""

    def abort(self) -> None: ...

    def destroy(self) -> None: ...


class NcclCommunicator:
    """By nccl4py."""

    def __init__(self, comm: Any, ops: Any) -> None:
        self._nccl, self._ops = comm, ops

    def reduce(self, source: Any, target: Any, op: str, root: int, stream: Stream) -> None:
        self._nccl.reduce(source, target, self._op(op), root, stream=stream)

    def all_reduce(self, source: Any, target: Any, op: str, stream: Stream) -> None:
        self._nccl.allreduce(source, target, self._op(op), stream=stream)

    def reduce_scatter(self, source: Any, target: Any, op: str, stream: Stream) -> None:
        self._nccl.reduce_scatter(source, target, self._op(op), stream=stream)

    def failure(self) -> str:
        error = self._nccl.get_async_error()
        return repr(error) if int(error) else ""

    def split(self, color: int, key: int) -> Communicator | None:
        made = self._nccl.split(None if color < 0 else color, key)
        return None if color < 0 else NcclCommunicator(made, self._ops)

    def abort(self) -> None:
        self._nccl.abort()

    def destroy(self) -> None:
        self._nccl.destroy()

    def _op(self, name: str) -> Any:
        return getattr(self._ops, _NAMES[name])


class CupyCommunicator:
    """By CuPy, which takes addresses and NCCL's numbers."""

    def __init__(self, comm: Any, gpu: Gpu) -> None:
        self._cupy, self._gpu = comm, gpu

    def reduce(self, source: Any, target: Any, op: str, root: int, stream: Stream) -> None:
        self._call(self._cupy.reduce, source, target, source.size, op, stream, root)

    def all_reduce(self, source: Any, target: Any, op: str, stream: Stream) -> None:
        self._call(self._cupy.allReduce, source, target, source.size, op, stream)

    def reduce_scatter(self, source: Any, target: Any, op: str, stream: Stream) -> None:
        self._call(self._cupy.reduceScatter, source, target, target.size, op, stream)

    def failure(self) -> str:
        try:
            self._cupy.check_async_error()
        except Exception as error:  # of a status that it does not know CuPy raises a KeyError
            return repr(error)
        return ""

    def split(self, color: int, key: int) -> Communicator | None:
        made = self._cupy.commSplit(color, key)
        return None if color < 0 else CupyCommunicator(made, self._gpu)

    def abort(self) -> None:
        self._cupy.abort()

    def destroy(self) -> None:
        self._cupy.destroy()

    def _call(
        self,
        call: Callable[..., None],
        source: Any,
        target: Any,
        count: int,
        op: str,
        stream: Stream,
        *root: int,
    ) -> None:
        _, handle = stream.__cuda_stream__()
        address = 0 if target is None else self._gpu.address(target)
        numbers = (_DTYPES[source.dtype.name], _OPS[op], *root)
        call(self._gpu.address(source), address, count, *numbers, handle)


def new_nccl_uid() -> bytes:
    """What one rank makes and tells all others, by any means, so that they find each other."""
    if (nccl := _nccl4py()) is not None:
        return bytes(nccl.get_unique_id())
    uid: bytes = _of_cupy().get_unique_id()
    return uid


def communicator(uid: bytes, rank: int, size: int, gpu: Gpu) -> Communicator:
    """A rank's communicator of all ranks, on the calling thread's GPU. Made by all together."""
    if (nccl := _nccl4py()) is not None:
        made = nccl.Communicator.init(size, rank, nccl.UniqueId.from_bytes(uid))
        return NcclCommunicator(made, nccl.NcclRedOp)
    return CupyCommunicator(_of_cupy().NcclCommunicator(size, uid, rank), gpu)


def _nccl4py() -> Any:
    try:
        import nccl.core
    except ImportError:
        return None
    return nccl.core


def _of_cupy() -> Any:
    found = cupy_nccl()
    if found is None:
        raise RedistError(
            "there is no NCCL: nccl4py is not installed, and CuPy finds no libnccl.so.2; "
            "install dask-redist[cuda12] or dask-redist[cuda13]"
        )
    return found
