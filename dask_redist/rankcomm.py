"""What a function that runs on all ranks has to talk with the others: a communicator.

Every operation begins with a step in which all ranks say what they call, with which arguments, and
what they bring. Whatever does not fit is found there, by all ranks alike: they raise one and the
same error, and may go on.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dask_redist import native
from dask_redist.boxes import Box
from dask_redist.errors import AdmissionError, LayoutError, RedistError
from dask_redist.grids import Layout
from dask_redist.irregular import Replicated
from dask_redist.joining import by_value, whole_shape
from dask_redist.mailbox import RETURNED
from dask_redist.partials import Cut, Leaf
from dask_redist.partition import check_rank, integer
from dask_redist.program import Program, Targeted
from dask_redist.reduceop import ReduceOp, as_op, combine
from dask_redist.wires import Place

#: bytes up to which a tensor travels in letters
INLINE = 4096


class Call(NamedTuple):
    """An operation and its arguments that must be the same on all ranks."""

    name: str
    arguments: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.arguments)})"


class Tensor(NamedTuple):
    """What a rank brings: shape and dtype, and the array itself or where it lies."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    array: NDArray[Any] | None = None
    leaf: Leaf | None = None
    #: of what is to be reduced by MPI: the number of the communicator
    meeting: int | None = None


class RankComm:
    """The communicator of a function that runs on all ranks, see :func:`map_ranks`.

    Its operations have torch's names and arguments. Each is called by all ranks, in the same order
    and by the thread in which the function runs; each waits for the others. Nothing is changed in
    place: results are new arrays.

    Attributes
    ----------
    rank : int
        Which rank this is, from 0.
    size : int
        How many ranks there are.

    Examples
    --------
    >>> import dask_redist as dr
    >>> from distributed import Client
    >>> def code(local, comm, base):
    ...     comm.barrier()
    ...     return comm.all_reduce(base + comm.rank, op="max").item()
    >>> with Client(n_workers=2, threads_per_worker=1, processes=False,
    ...             dashboard_address=":0") as client:
    ...     dr.map_ranks(code, None, 10)
    [11, 11]
    """

    def __init__(self, program: Program) -> None:
        self.rank, self.size = program.rank, program.size
        self._program = program
        self._thread = threading.get_ident()
        self._over = False

    def __repr__(self) -> str:
        return f"<RankComm: rank {self.rank} of {self.size}>"

    @property
    def mpi(self) -> Any:
        """The ``mpi4py`` communicator of all ranks, in their order; this rank is its ``rank``.

        Raises
        ------
        RedistError
            The ranks are no MPI processes, or not of one MPI job; says how to start them as such.
        """
        self._check_use()
        found = self._program.means.mpi(self._program.seats)
        if found is None:
            raise RedistError(
                "these ranks have no MPI communicator: start them as MPI processes, with "
                "dask_redist.LocalMPICluster(n_workers=4), or with mpiexec and dask_redist.mpi()"
            )
        return found

    def barrier(self) -> None:
        """Wait until all ranks are here.

        Raises
        ------
        RedistError
            Another rank calls something else, or its function has returned.
        RunTimeoutError
            Another rank does not answer within ``redist.timeout``. One that computes does.
        """
        self._agree(Call("barrier"))

    def reduce(
        self, tensor: ArrayLike, dst: int = 0, op: ReduceOp | str = ReduceOp.SUM
    ) -> NDArray[Any] | None:
        """Combine the tensors of all ranks on one of them.

        Parameters
        ----------
        tensor : array_like
            Of one shape and dtype on all ranks; left as it is.
        dst : int
            The rank that gets the result.
        op : ReduceOp or str
            How. Tensors are combined in the order of the ranks.

        Returns
        -------
        ndarray or None
            A new array on rank `dst`, None on the others. No rank receives more than twice the
            bytes of a tensor, unless that is small (4 KiB).

        Raises
        ------
        LayoutError, TypeError, ValueError
            On all ranks: shapes or dtypes differ (names the ranks), there is no rank `dst`, no
            such `op`, or none for this dtype.
        """
        return self._combine("reduce", tensor, op, integer(dst, "dst"))

    def all_reduce(self, tensor: ArrayLike, op: ReduceOp | str = ReduceOp.SUM) -> NDArray[Any]:
        """Combine the tensors of all ranks on each of them; as :meth:`reduce`."""
        found = self._combine("all_reduce", tensor, op, None)
        assert found is not None
        return found

    def broadcast(self, tensor: ArrayLike | None, src: int = 0) -> NDArray[Any]:
        """Give the tensor of one rank to all.

        Parameters
        ----------
        tensor : array_like or None
            On rank `src` the tensor. On the others one of its shape and dtype, as torch wants it
            and which is left as it is; or None.
        src : int
            The rank whose tensor it is.

        Returns
        -------
        ndarray
            A new array, equal to the tensor of rank `src`.

        Raises
        ------
        LayoutError, TypeError
            On all ranks: shapes or dtypes differ, there is no rank `src`, or it has no tensor.
        """
        src = integer(src, "src")
        problem = self._no_rank(src)
        mine: Tensor | None = None
        if tensor is not None:
            array = np.asarray(tensor)
            mine, problem = self._bring(array, problem, self.rank == src)
        elif self.rank == src:
            problem = problem or TypeError("broadcast of None: the rank src has to give a tensor")
        brought = self._agree(Call("broadcast", (("src", src),)), mine, problem)
        self._check_alike(brought)
        found: Tensor = brought[src]
        return self._read_whole(src, found)

    def all_gather(self, tensor: ArrayLike) -> list[NDArray[Any]]:
        """Give the tensors of all ranks to each of them.

        Parameters
        ----------
        tensor : array_like
            Of one shape and dtype on all ranks; left as it is.

        Returns
        -------
        list of ndarray
            New arrays, by rank.

        Raises
        ------
        LayoutError, TypeError
            On all ranks: shapes or dtypes differ.
        """
        mine, problem = self._bring(np.asarray(tensor))
        brought = self._agree(Call("all_gather"), mine, problem)
        self._check_alike(brought)
        return [self._read_whole(rank, each) for rank, each in enumerate(brought)]

    def redistribute(
        self,
        local: ArrayLike,
        in_layout: Layout,
        out_layout: Layout,
        out: NDArray[Any] | None = None,
    ) -> NDArray[Any]:
        """Change the layout of an array of which each rank has its box.

        Parameters
        ----------
        local : array_like
            This rank's box of the array by `in_layout`; an array of size zero where it has none.
        in_layout, out_layout : Layout
            How the array is laid out, and how it is to be. Each must give a rank one box.
        out : ndarray, optional
            Where this rank's box by `out_layout` goes. Written in place by the others if it is
            a result of this function, else copied there.

        Returns
        -------
        ndarray
            `out`, or a new array: this rank's box by `out_layout`, in memory that the other ranks
            have written straight into; C-contiguous.

        Raises
        ------
        LayoutError
            On all ranks: local shapes are not those of `in_layout`, or a layout or `out` does not
            fit.
        TypeError
            On all ranks: dtypes differ, or are no plain bytes.
        AdmissionError
            On all ranks: one has too little memory.

        Examples
        --------
        Rows become columns, on 2 ranks:

        >>> import dask.array as da, dask_redist as dr
        >>> from distributed import Client
        >>> def code(local, comm):
        ...     return comm.redistribute(local, dr.Slab.X, dr.Slab.Y)
        >>> with Client(n_workers=2, threads_per_worker=1, processes=False,
        ...             dashboard_address=":0") as client:
        ...     x = da.arange(8, chunks=4).reshape(4, 2)
        ...     y = dr.map_ranks(code, x, axis=1)
        ...     y.chunks, dr.layout_of(y), bool((x == y).all().compute())
        (((4,), (1, 1)), Slab.Y, True)
        """
        array = np.asarray(local)
        call = Call("redistribute", (("in_layout", in_layout), ("out_layout", out_layout)))
        mine = Tensor(array.shape, array.dtype)
        brought = self._agree(call, mine, _no_bytes(array) or _no_layout(in_layout, out_layout))
        self._check_dtypes(brought)
        shape = whole_shape(in_layout, [each.shape for each in brought])
        out_layout.check(shape, self.size)
        sources = [in_layout.box(r, shape, self.size) for r in range(self.size)]
        targets = [out_layout.box(r, shape, self.size) for r in range(self.size)]

        target, problem = self._target(array, targets[self.rank].shape, out)
        landing, number = self._program.landing, self._program.step
        landing.open(number, target)
        offsets = self._agree(call, self._program.offset(target), problem)
        holders = in_layout.held_by(self.size) if isinstance(in_layout, Replicated) else None
        pieces = []
        for k in range(self.size):  # each begins with itself: they do not all write to one at once
            rank = (self.rank + k) % self.size
            if holders is not None and self.rank != _giver(rank, holders.tolist()):
                continue
            piece = _piece(array, sources[self.rank], targets[rank])
            if piece is not None:
                place = Place(number, offsets[rank], targets[rank].shape, array.dtype)
                pieces.append(Targeted(rank, place, *piece))
        self._program.write(pieces)
        self._agree(call)
        landing.close(number)
        if out is None:
            return target
        if target is not out:
            np.copyto(out, target)
        return out

    # ------------------------------------------------------------------------------- helpers
    def close(self) -> None:
        """The function has returned: nothing can be called any more."""
        self._over = True

    def _check_use(self) -> None:
        if self._over:
            raise RedistError(
                f"{self!r} is used after its function has returned; there is nobody to answer"
            )
        if threading.get_ident() != self._thread:
            raise RedistError(
                f"{self!r} is used by another thread than that of its function, "
                f"{threading.current_thread().name!r}; the ranks' calls would have no order"
            )

    def _agree(self, call: Call, fact: Any = None, problem: Exception | None = None) -> list[Any]:
        """Hear what all ranks bring to an operation.

        Raises
        ------
        RedistError
            They do not call the same.
        Exception
            The problem of the lowest rank that has one; on all ranks.
        """
        self._check_use()
        # NumPy pickles the byte order of an array in protocol 5 only, and of contiguous ones only.
        letters = self._program.exchange(pickle.dumps((call, fact, problem), protocol=5))
        returned = Call("return"), None, None
        said = [pickle.loads(letter) if letter != RETURNED else returned for letter in letters]
        if any(theirs != call for theirs, _, _ in said):
            raise RedistError(
                "all ranks must call the same with the same arguments, but there is "
                + by_value([str(theirs) for theirs, _, _ in said])
            )
        for rank, (_, _, theirs) in enumerate(said):
            if theirs is not None:
                raise type(theirs)(f"rank {rank}: {theirs}")
        return [theirs for _, theirs, _ in said]

    def _bring(
        self,
        array: NDArray[Any],
        problem: Exception | None = None,
        itself: bool = True,
        copied: bool = True,
    ) -> tuple[Tensor, Exception | None]:
        """A tensor for the others to read, or (not ``itself``) only what it is; what is wrong.

        They read it when this rank has gone on, and may change it: unless ``copied``, the caller
        takes one more step.
        """
        tensor = Tensor(array.shape, array.dtype)
        problem = problem or _no_bytes(array)
        if problem is None and itself:
            if array.nbytes <= INLINE:
                return tensor._replace(array=np.array(array, order="C")), None
            try:
                return tensor._replace(leaf=self._program.lay(array, copied)), None
            except AdmissionError as error:
                problem = error
        return tensor, problem

    def _check_alike(self, brought: Sequence[Tensor | None]) -> None:
        """Raise unless the tensors have one dtype and shape; on all ranks, since all know them."""
        self._check_dtypes(brought)
        shapes = [each and each.shape for each in brought]
        if len({shape for shape in shapes if shape is not None}) > 1:
            raise LayoutError(
                f"the tensors must all have one shape, but there is {by_value(shapes)}"
            )

    @staticmethod
    def _check_dtypes(brought: Sequence[Tensor | None]) -> None:
        dtypes = [each and each.dtype for each in brought]
        if len({dtype for dtype in dtypes if dtype is not None}) > 1:
            raise TypeError(f"the tensors must all have one dtype, but there is {by_value(dtypes)}")

    def _no_rank(self, rank: int) -> Exception | None:
        try:
            check_rank(rank, self.size)
        except LayoutError as error:
            return error
        return None

    def _read_whole(self, rank: int, tensor: Tensor) -> NDArray[Any]:
        """The tensor of a rank, as a new array."""
        if tensor.leaf is None:
            return np.array(tensor.array, order="C")
        found = np.empty(tensor.shape, tensor.dtype)
        np.copyto(found.reshape(-1), self._program.read(rank, tensor.leaf))
        return found

    def _combine(
        self, name: str, tensor: ArrayLike, op: ReduceOp | str, dst: int | None
    ) -> NDArray[Any] | None:
        """The tensors, combined; None where that is not for this rank."""
        array = np.asarray(tensor)
        problem = None if dst is None else self._no_rank(dst)
        try:
            how = as_op(op, array.dtype)
        except (TypeError, ValueError) as error:
            how, problem = ReduceOp.SUM, problem or error
        meeting = None
        if problem is None and INLINE < array.nbytes < 2**31:  # counts of older MPIs end there
            meeting = native.meeting(self._program, array, how, dst)
        mine, problem = self._bring(array, problem, itself=meeting is None, copied=False)
        mine = mine._replace(meeting=meeting and meeting.group.number)
        said = (("dst", dst),) if dst is not None else ()
        word = op.name if isinstance(op, ReduceOp) else str(op).upper()
        call = Call(name, (*said, ("op", word)))
        brought = self._agree(call, mine, problem)
        self._check_alike(brought)
        meetings = {each.meeting for each in brought}
        if len(meetings) == 1 and meeting is not None:
            return native.reduce(self._program, meeting, dst)
        if meetings != {None}:  # not all ranks can
            mine, problem = self._bring(array, copied=False)
            brought = self._agree(call, mine, problem)
        for_us = dst in (None, self.rank)
        if mine.leaf is None:
            return combine(how, [each.array for each in brought]) if for_us else None

        start, stop = (array.size * r // self.size for r in (self.rank, self.rank + 1))
        read = partial(self._program.read, cut=Cut(0, start, stop))
        merged = combine(how, [read(rank, each.leaf) for rank, each in enumerate(brought)])
        part, problem = self._bring(merged)
        parts = self._agree(call, part, problem)
        if not for_us:
            return None
        found = np.empty(array.shape, array.dtype)
        row, at = found.reshape(-1), 0
        for rank, each in enumerate(parts):
            (length,) = each.shape
            whole = each.array if each.leaf is None else self._program.read(rank, each.leaf)
            np.copyto(row[at : at + length], whole)
            at += length
        return found

    def _target(
        self, array: NDArray[Any], shape: tuple[int, ...], out: NDArray[Any] | None
    ) -> tuple[NDArray[Any], Exception | None]:
        """The array that the others write, and what is wrong with it."""
        nothing = np.empty((0,) * len(shape), array.dtype)
        if out is not None:
            if not isinstance(out, np.ndarray) or (out.shape, out.dtype) != (shape, array.dtype):
                return nothing, LayoutError(
                    f"out must be an array of shape {shape} and dtype {array.dtype}, not "
                    f"{getattr(out, 'shape', type(out).__name__)}, {getattr(out, 'dtype', '')}"
                )
            if not out.flags.writeable:
                return nothing, LayoutError("out is read-only")
            if self._program.offset(out) is not None and not np.may_share_memory(out, array):
                return out, None
        try:
            return self._program.allocate(shape, array.dtype), None
        except AdmissionError as error:
            return nothing, error


def _no_bytes(array: NDArray[Any]) -> Exception | None:
    if array.dtype.hasobject or array.dtype.kind == "T":
        return TypeError(f"elements of dtype {array.dtype} are no plain bytes")
    return None


def _no_layout(*layouts: object) -> Exception | None:
    for layout in layouts:
        if not isinstance(layout, Layout):
            return LayoutError(f"{layout!r} is no layout: use one, such as Slab.Y")
    return None


def _giver(rank: int, holders: Sequence[int]) -> int:
    """Of those who hold everything, the one who gives a rank its box."""
    return rank if rank in holders else holders[rank % len(holders)]


def _piece(
    array: NDArray[Any], source: Box, target: Box
) -> tuple[tuple[slice, ...], NDArray[Any]] | None:
    """What two boxes have in common: its place in the target, and its elements."""
    both = source.intersection(target)
    if both is None:
        return None

    def within(box: Box) -> tuple[slice, ...]:
        corners = zip(both.lower, both.upper, box.lower, strict=True)
        return tuple(slice(lower - start, upper - start) for lower, upper, start in corners)

    return within(target), array[within(source)]
