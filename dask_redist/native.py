"""Reductions by MPI itself: where ranks do not share memory, and the answer is the same.

MPI combines in an order of its own, so only operations that are exact in any order are left to it:
those of integers, and the logical ones of booleans. Its MIN and MAX of floats depend on the rank
where there is a NaN; there is no SUM of booleans, and no MAX of complex numbers.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_redist.errors import RunTimeoutError
from dask_redist.mpigroup import mpi_here
from dask_redist.program import Program
from dask_redist.reduceop import ReduceOp

#: what MPI calls the operations that it does exactly, by kind of dtype
_OF_INTEGERS = {
    ReduceOp.SUM: "SUM",
    ReduceOp.PRODUCT: "PROD",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
    ReduceOp.BAND: "BAND",
    ReduceOp.BOR: "BOR",
    ReduceOp.BXOR: "BXOR",
    ReduceOp.LAND: "LAND",
    ReduceOp.LOR: "LOR",
}
_OF_BOOLEANS = {ReduceOp.LAND: "LAND", ReduceOp.LOR: "LOR"}


def mpi_name(op: ReduceOp, dtype: np.dtype[Any]) -> str | None:
    """What MPI calls an operation that it does as NumPy does; None where it does not.

    Examples
    --------
    >>> mpi_name(ReduceOp.PRODUCT, np.dtype("i4")), mpi_name(ReduceOp.MAX, np.dtype("f8"))
    ('PROD', None)
    """
    if not dtype.isnative:
        return None
    return {"i": _OF_INTEGERS, "u": _OF_INTEGERS, "b": _OF_BOOLEANS}.get(dtype.kind, {}).get(op)


def meeting(program: Program, op: ReduceOp, dtype: np.dtype[Any]) -> int | None:
    """The number of the communicator in which MPI may reduce, as far as this rank can say.

    None where it is not worth it, since all memory can be seen, or where MPI is not exact.
    """
    group = program.means.reach.mail.groups.newest
    seats = [seat.seat for seat in program.seats]
    if group is None or list(group.ranks) != seats or mpi_name(op, dtype) is None:
        return None
    return group.number if "mpi" in program.means.reach.wires(program.seats).values() else None


def reduce(
    program: Program, number: int, array: NDArray[Any], op: ReduceOp, dst: int | None
) -> NDArray[Any] | None:
    """The arrays of all ranks, combined by MPI, on rank ``dst`` (None: on all); for all ranks.

    ``number``: that of the communicator, on which all ranks have agreed.

    Raises
    ------
    RunTimeoutError
        Not all ranks came, though all had said that they would.
    """
    mail = program.means.reach.mail
    group, mpi = mail.groups[number], mpi_here()
    how = getattr(mpi, mpi_name(op, array.dtype) or "")
    mine = np.ascontiguousarray(array)
    found = np.empty_like(mine) if dst in (None, program.rank) else None

    def start() -> Any:
        if dst is None:
            return group.comm.Iallreduce(mine, found, how)
        return group.comm.Ireduce(mine, found, how, dst)

    async def done() -> None:
        await asyncio.wait_for(
            asyncio.wrap_future(mail.collective(start, (mine, found))), program.means.timeout
        )

    try:
        program.means.call(done())
    except TimeoutError as error:
        if isinstance(error, RunTimeoutError):
            raise
        raise RunTimeoutError(
            f"rank {program.rank}: MPI did not reduce {mine.nbytes} bytes over {program.size} "
            f"ranks within {program.means.timeout:g} s (redist.timeout)"
        ) from None
    return found
