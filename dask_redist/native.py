"""Reductions by MPI itself: where ranks do not share memory, and the answer is the same.

MPI combines in an order of its own, so only operations that are exact in any order are left to it:
those of integers, and the logical ones of booleans. Its MIN and MAX of floats depend on the rank
where there is a NaN; there is no SUM of booleans, and no MAX of complex numbers.

What can fail on one rank is done before all agree. Where a rank does not come all the same, the
others' call is never over, and the next one of the late rank would be taken for it: each rank that
sees that leaves no further reduction to that communicator.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dask_redist.errors import RunTimeoutError
from dask_redist.mpigroup import Group, mpi_here
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


class Meeting(NamedTuple):
    """A reduction that MPI can do, as far as this rank can say; it has all that it takes.

    Attributes
    ----------
    group
        Where.
    how
        MPI's operation.
    mine, found
        What this rank brings, and where the result comes to; None: not here.
    """

    group: Group
    how: Any
    mine: NDArray[Any]
    found: NDArray[Any] | None


def meeting(program: Program, array: NDArray[Any], op: ReduceOp, dst: int | None) -> Meeting | None:
    """What this rank needs to have MPI reduce ``array`` to rank ``dst`` (None: to all).

    None where it is not worth it, since all memory can be seen, or where MPI is not exact.
    """
    groups = program.means.reach.mail.groups
    group, seats = groups.newest, [seat.seat for seat in program.seats]
    name = mpi_name(op, array.dtype)
    if group is None or list(group.ranks) != seats or name is None:
        return None
    if groups.is_spoiled(group.number):
        return None
    if "mpi" not in program.means.reach.wires(program.seats).values():
        return None
    mine = np.ascontiguousarray(array)
    found = np.empty_like(mine) if dst in (None, program.rank) else None
    return Meeting(group, getattr(mpi_here(), name), mine, found)


def reduce(program: Program, meeting: Meeting, dst: int | None) -> NDArray[Any] | None:
    """The arrays of all ranks, combined by MPI, on rank ``dst`` (None: on all).

    All ranks call it, when all have agreed on the communicator.

    Raises
    ------
    RunTimeoutError
        Not all ranks came, though all had said that they would.
    """
    mail = program.means.reach.mail
    group, how, mine, found = meeting

    def start() -> Any:
        if dst is None:
            return group.comm.Iallreduce(mine, found, how)
        return group.comm.Ireduce(mine, found, how, dst)

    async def done() -> None:
        await asyncio.wait_for(
            asyncio.wrap_future(mail.collective(start, (mine, found))), program.means.timeout
        )

    done_here = False
    try:
        program.means.call(done())
        done_here = True
    except TimeoutError as error:
        if isinstance(error, RunTimeoutError):
            raise
        raise RunTimeoutError(
            f"rank {program.rank}: MPI did not reduce {mine.nbytes} bytes over {program.size} "
            f"ranks within {program.means.timeout:g} s (redist.timeout)"
        ) from None
    finally:
        if not done_here:
            mail.groups.spoil(group.number)
    return found
