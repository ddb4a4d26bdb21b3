"""Tensors that ranks bring to each other: laid out to be read, read whole or in cuts, combined."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dask_redist import native
from dask_redist.agreement import Agreement, call, check_dtypes, no_bytes
from dask_redist.errors import AdmissionError, LayoutError
from dask_redist.joining import by_value
from dask_redist.partials import Cut, Leaf
from dask_redist.reduceop import ReduceOp, as_op, combine

#: bytes up to which a tensor travels in letters
INLINE = 4096


class Tensor(NamedTuple):
    """What a rank brings: shape and dtype, and the array itself or where it lies."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    array: NDArray[Any] | None = None
    leaf: Leaf | None = None
    #: of what is to be reduced by MPI: the number of the communicator
    meeting: int | None = None


def bring(
    talk: Agreement,
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
    problem = problem or no_bytes(array)
    if problem is None and itself:
        if array.nbytes <= INLINE:
            return tensor._replace(array=np.array(array, order="C")), None
        try:
            return tensor._replace(leaf=talk.program.lay(array, copied)), None
        except AdmissionError as error:
            problem = error
    return tensor, problem


def check_alike(brought: Sequence[Tensor | None]) -> None:
    """Raise unless the tensors have one dtype and shape; on all ranks, since all know them."""
    check_dtypes([each and each.dtype for each in brought])
    shapes = [each and each.shape for each in brought]
    if len({shape for shape in shapes if shape is not None}) > 1:
        raise LayoutError(f"the tensors must all have one shape, but there is {by_value(shapes)}")


def read_whole(talk: Agreement, rank: int, tensor: Tensor) -> NDArray[Any]:
    """The tensor of a rank, as a new array."""
    if tensor.leaf is None:
        return np.array(tensor.array, order="C")
    found = np.empty(tensor.shape, tensor.dtype)
    np.copyto(found.reshape(-1), talk.program.read(rank, tensor.leaf))
    return found


def combined(
    talk: Agreement, name: str, tensor: ArrayLike, op: ReduceOp | str, dst: int | None
) -> NDArray[Any] | None:
    """The tensors of all ranks, combined; None where that is not for this rank.

    Each rank combines a cut of all, unless they are small or MPI does it.
    """
    program, array = talk.program, np.asarray(tensor)
    problem = None if dst is None else talk.no_rank(dst)
    try:
        how = as_op(op, array.dtype)
    except (TypeError, ValueError) as error:
        how, problem = ReduceOp.SUM, problem or error
    meeting = None
    if problem is None and INLINE < array.nbytes < 2**31:  # counts of older MPIs end there
        meeting = native.meeting(program, array, how, dst)
    mine, problem = bring(talk, array, problem, itself=meeting is None, copied=False)
    mine = mine._replace(meeting=meeting and meeting.group.number)
    said = {} if dst is None else {"dst": dst}
    word = op.name if isinstance(op, ReduceOp) else str(op).upper()
    what = call(name, **said, op=word)
    brought = talk.agree(what, mine, problem)
    check_alike(brought)
    meetings = {each.meeting for each in brought}
    if len(meetings) == 1 and meeting is not None:
        return native.reduce(program, meeting, dst)
    if meetings != {None}:  # not all ranks can
        mine, problem = bring(talk, array, copied=False)
        brought = talk.agree(what, mine, problem)
    for_us = dst in (None, program.rank)
    if mine.leaf is None:
        return combine(how, [each.array for each in brought]) if for_us else None

    start, stop = (array.size * r // program.size for r in (program.rank, program.rank + 1))
    read = partial(program.read, cut=Cut(0, start, stop))
    merged = combine(how, [read(rank, each.leaf) for rank, each in enumerate(brought)])
    part, problem = bring(talk, merged)
    parts = talk.agree(what, part, problem)
    if not for_us:
        return None
    found = np.empty(array.shape, array.dtype)
    row, at = found.reshape(-1), 0
    for rank, each in enumerate(parts):
        (length,) = each.shape
        whole = each.array if each.leaf is None else program.read(rank, each.leaf)
        np.copyto(row[at : at + length], whole)
        at += length
    return found
