"""Reductions between GPUs by NCCL.

NCCL reduces runs of plain numbers. `form_of` says as what an array's elements can be reduced there
so that the result is NumPy's; what has no form takes another way. All ranks have to make the same
calls in the same order: a lane sees to that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dask_redist.errors import RedistError, RunTimeoutError
from dask_redist.gpu import Gpu
from dask_redist.ncclcalls import Communicator, communicator, new_nccl_uid

__all__ = ["Form", "Nccl", "form_of", "new_nccl_uid"]

_OPS = ("sum", "product", "min", "max")


class Form(NamedTuple):
    """As what elements are reduced.

    Attributes
    ----------
    op : str
        "sum", "product", "min" or "max".
    view : numpy.dtype
        What their bytes are taken for.
    wide : numpy.dtype or None
        What they are converted to before; the result is converted back.
    """

    op: str
    view: np.dtype[Any]
    wide: np.dtype[Any] | None = None


def form_of(dtype: np.dtype[Any], op: str) -> Form | None:
    """How NCCL reduces elements of a dtype as NumPy does; None where it cannot.

    It has no 16-bit integers: they are widened, and wrap around when they are converted back. Sums
    of complex numbers are sums of their parts. Of bool, "sum" is "or" and "product" is "and".
    Extremes of floats are left out: where there is a NaN, NumPy's result is NaN.

    Examples
    --------
    >>> form_of(np.dtype("c16"), "sum")
    Form(op='sum', view=dtype('float64'), wide=None)
    >>> form_of(np.dtype("i2"), "max")
    Form(op='max', view=dtype('int16'), wide=dtype('int32'))
    >>> form_of(np.dtype("c16"), "max") is form_of(np.dtype("f8"), "max") is None
    True
    """
    if op not in _OPS or not dtype.isnative:
        return None
    kind, size = dtype.kind, dtype.itemsize
    if kind == "b":
        return Form({"sum": "max", "product": "min"}.get(op, op), np.dtype("u1"))
    if kind in "iu" and size == 2:
        return Form(op, dtype, np.dtype(f"{kind}4"))
    if kind in "iu":
        return Form(op, dtype)
    if kind == "f" and size <= 8 and op in ("sum", "product"):
        return Form(op, dtype)
    if kind == "c" and size <= 16 and op == "sum":
        return Form(op, np.dtype(f"f{size // 2}"))
    return None


class Nccl:
    """A rank's communicator. Made, and closed, by all ranks together.

    Parameters
    ----------
    uid : bytes
        The same for all: `new_nccl_uid` of one of them.
    rank, size : int
        Which of how many this is.
    gpu : Gpu
        Its GPU.
    """

    def __init__(self, uid: bytes, rank: int, size: int, gpu: Gpu) -> None:
        gpu.use()
        self._begin(communicator(uid, rank, size, gpu), rank, size, gpu)

    def _begin(self, comm: Communicator, rank: int, size: int, gpu: Gpu) -> None:
        self.rank, self.size = rank, size
        self._comm, self._gpu = comm, gpu
        self._stream = gpu.stream()
        self._lock = threading.Lock()
        self._alive = True

    def group(self, ranks: Sequence[int], timeout: float) -> Nccl | None:
        """A communicator of some ranks, which are numbered in this order; None on the others.

        All ranks call it together; waits first, as `wait` does. It is closed before this one.

        Raises
        ------
        ValueError
            There are no ranks, or one is there twice or does not exist.
        """
        chosen = list(ranks)
        if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(self.size)):
            raise ValueError(f"{chosen} is no group of {self.size} ranks: each at most once")
        self._check_alive()
        self.wait(timeout)  # NCCL cannot split what is under way
        inside = self.rank in chosen
        with self._lock:
            self._check_alive()
            self._gpu.use()
            comm = self._comm.split(*((0, chosen.index(self.rank)) if inside else (-1, 0)))
        if comm is None:
            return None
        made = Nccl.__new__(Nccl)
        made._begin(comm, chosen.index(self.rank), len(chosen), self._gpu)
        return made

    def all_reduce(self, array: Any, op: str) -> Any:
        """The reduction of all ranks' arrays, of the same shape and dtype, on each rank.

        It is queued when this returns: what the calling thread queues later comes after it.

        Raises
        ------
        TypeError
            There is no form for this, see `form_of`.
        RedistError
            The communicator has been given up.
        """
        return self._queue(array, op, "all_reduce", array.shape, True)

    def reduce(self, array: Any, op: str, root: int) -> Any:
        """As `all_reduce`, on the rank ``root``; None on the others."""
        if not 0 <= root < self.size:
            raise ValueError(f"rank {root} is none of the {self.size} ranks")
        return self._queue(array, op, "reduce", array.shape, self.rank == root, root)

    def reduce_scatter(self, array: Any, op: str) -> Any:
        """As `all_reduce`, of which each rank gets its equal share along the first axis.

        Raises
        ------
        ValueError
            That axis cannot be cut into as many equal parts as there are ranks.
        """
        if not array.ndim or array.shape[0] % self.size:
            raise ValueError(
                f"an array of shape {array.shape} has no {self.size} equal parts along axis 0"
            )
        share = (array.shape[0] // self.size, *array.shape[1:])
        return self._queue(array, op, "reduce_scatter", share, True)

    def wait(self, timeout: float) -> None:
        """Wait until all that was queued is done; gives the communicator up if it cannot be.

        Raises
        ------
        RedistError
            NCCL has failed.
        RunTimeoutError
            It is not done after ``timeout`` seconds.
        """
        event = self._stream.record()
        deadline = time.monotonic() + timeout
        while not event.done:
            if error := self._comm.failure():
                self.abort()
                raise RedistError(f"NCCL has failed on rank {self.rank}: {error}")
            if time.monotonic() > deadline:
                self.abort()
                raise RunTimeoutError(
                    f"rank {self.rank} has waited {timeout} s for a reduction of {self.size} ranks"
                )
            time.sleep(0.0005)

    def abort(self) -> None:
        """Give the communicator up, with all that is under way."""
        with self._lock:
            if self._alive:
                self._alive = False
                self._comm.abort()

    def close(self) -> None:
        """End the communicator, when nothing is under way any more."""
        with self._lock:
            if self._alive:
                self._alive = False
                self._comm.destroy()

    def _check_alive(self) -> None:
        if not self._alive:
            raise RedistError(f"the NCCL communicator of rank {self.rank} has been given up")

    def _queue(self, array: Any, op: str, call: str, shape: Any, gets: bool, *root: int) -> Any:
        form = form_of(array.dtype, op)
        if form is None:
            raise TypeError(f"NCCL has no {op} of {array.dtype} that is NumPy's")
        # What is allocated belongs to the caller's stream, which waits for NCCL's below.
        result = self._gpu.empty(shape, array.dtype) if gets else None
        if not array.size:
            return result
        here = self._gpu.current()
        source = array
        if form.wide is not None or not array.flags.c_contiguous:  # NCCL would not notice
            source = self._gpu.empty(array.shape, form.wide or array.dtype)
            self._gpu.copy(source, array, here)
        target = result
        if result is not None and form.wide is not None:
            target = self._gpu.empty(shape, form.wide)
        with self._lock:
            self._check_alive()
            self._stream.wait_event(here.record())
            getattr(self._comm, call)(
                *(_numbers(source, form), None if target is None else _numbers(target, form)),
                *(form.op, *root, self._stream),
            )
            done = self._stream.record()
        here.wait_event(done)
        if target is not result:
            self._gpu.copy(result, target, here)
        return result


def _numbers(array: Any, form: Form) -> Any:
    """A contiguous array as one run of what NCCL reduces."""
    return array.reshape(-1).view(form.wide or form.view)
