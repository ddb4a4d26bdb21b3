"""What a function that runs on all ranks has to talk with the others: a communicator.

Every operation begins with a step in which all ranks say what they call, with which arguments, and
what they bring. Whatever does not fit is found there, by all ranks alike: they raise one and the
same error, and may go on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dask_redist.agreement import Agreement, call
from dask_redist.errors import RedistError
from dask_redist.grids import Layout
from dask_redist.partition import integer
from dask_redist.program import Program
from dask_redist.redistribution import Redistribute
from dask_redist.reduceop import ReduceOp
from dask_redist.tensors import Tensor, bring, check_alike, combined, read_whole


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
        self._talk = Agreement(program)

    def __repr__(self) -> str:
        return repr(self._talk)

    @property
    def mpi(self) -> Any:
        """The ``mpi4py`` communicator of all ranks, in their order; this rank is its ``rank``.

        Raises
        ------
        RedistError
            The ranks are no MPI processes, or not of one MPI job; says how to start them as such.
        """
        self._talk.check_use()
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
        self._talk.agree(call("barrier"))

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
        return combined(self._talk, "reduce", tensor, op, integer(dst, "dst"))

    def all_reduce(self, tensor: ArrayLike, op: ReduceOp | str = ReduceOp.SUM) -> NDArray[Any]:
        """Combine the tensors of all ranks on each of them; as :meth:`reduce`."""
        found = combined(self._talk, "all_reduce", tensor, op, None)
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
        problem = self._talk.no_rank(src)
        mine: Tensor | None = None
        if tensor is not None:
            array = np.asarray(tensor)
            mine, problem = bring(self._talk, array, problem, self.rank == src)
        elif self.rank == src:
            problem = problem or TypeError("broadcast of None: the rank src has to give a tensor")
        brought = self._talk.agree(call("broadcast", src=src), mine, problem)
        check_alike(brought)
        found: Tensor = brought[src]
        return read_whole(self._talk, src, found)

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
        mine, problem = bring(self._talk, np.asarray(tensor))
        brought = self._talk.agree(call("all_gather"), mine, problem)
        check_alike(brought)
        return [read_whole(self._talk, rank, each) for rank, each in enumerate(brought)]

    def redistribute(
        self,
        local: ArrayLike,
        in_layout: Layout,
        out_layout: Layout,
        out: Any = None,
    ) -> Any:
        """Change the layout of an array of which each rank has its box.

        :class:`Redistribute` in one call; that one is for changes that are made again and again.

        Parameters
        ----------
        local : array_like
            This rank's box of the array by `in_layout`; an array of size zero where it has none. A
            NumPy array, or by DLPack another library's in the CPU's memory.
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
        with Redistribute(local, in_layout, out_layout, self) as change:
            change.plan()
            return change.execute(out=out)

    def close(self) -> None:
        """The function has returned: nothing can be called any more."""
        self._talk.close()
