"""A change of layout of an array of which each rank has its box: planned once, executed often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dask_redist.agreement import call, check_dtypes, no_bytes, settle
from dask_redist.errors import AdmissionError, LayoutError, RedistError
from dask_redist.grids import Layout
from dask_redist.joining import whole_shape
from dask_redist.mailbox import ProgramEnded
from dask_redist.moves import Planned, moves_of
from dask_redist.operands import as_numpy, like
from dask_redist.program import Targeted
from dask_redist.wires import Place

if TYPE_CHECKING:
    from dask_redist.rankcomm import RankComm


class Redistribute:
    """A change of layout in code that runs on the ranks: planned once, executed often.

    For :func:`map_ranks`, with nvmath's names. ``plan``, ``execute`` and ``reset_operand`` are
    called by all ranks, in the same order; what is wrong on one rank is one and the same error
    on all, after which they may go on.

    Parameters
    ----------
    local : array_like
        This rank's box of the array by `in_layout`; an array of size zero where it has none. A
        NumPy array of any strides, or what has the DLPack protocol and lies in the CPU's memory,
        as torch's tensors. It is read when it is executed, and never written.
    in_layout, out_layout : Layout
        How the array is laid out, and how it is to be. Each must give a rank one box.
    comm : RankComm
        The communicator.

    Notes
    -----
    Results are NumPy arrays; for an operand that came by DLPack they are arrays of its library,
    over the same memory, where that has a function ``from_dlpack``.

    Examples
    --------
    Rows become columns, twice with one plan, on 2 ranks:

    >>> import numpy as np, dask_redist as dr
    >>> from distributed import Client
    >>> def code(nothing, comm):
    ...     rows = np.arange(4.0).reshape(1, 4) + 10 * comm.rank
    ...     with dr.Redistribute(rows, dr.Slab.X, dr.Slab.Y, comm) as change:
    ...         change.plan()
    ...         first = change.execute()
    ...         change.reset_operand(-rows)
    ...         second = change.execute()
    ...     return [first.tolist(), second.tolist()]
    >>> with Client(n_workers=2, threads_per_worker=1, processes=False,
    ...             dashboard_address=":0") as client:
    ...     dr.map_ranks(code, None)[1]
    [[[2.0, 3.0], [12.0, 13.0]], [[-2.0, -3.0], [-12.0, -13.0]]]
    """

    def __init__(
        self, local: ArrayLike, in_layout: Layout, out_layout: Layout, comm: RankComm
    ) -> None:
        self._talk = comm._talk
        self._layouts = in_layout, out_layout
        self._given: Any = local
        self._planned: Planned | None = None
        self._freed = False

    def __repr__(self) -> str:
        state = "freed" if self._freed else "planned" if self._planned else "not planned"
        return f"<Redistribute: {' to '.join(map(repr, self._layouts))}, {state}>"

    def __enter__(self) -> Redistribute:
        return self

    def __exit__(self, *raised: object) -> None:
        self.free()

    def plan(self) -> None:
        """Check everything, and tell who gives what to whom; moves nothing.

        Raises
        ------
        LayoutError
            On all ranks: local shapes are not those of `in_layout`, or a layout does not fit.
        TypeError
            On all ranks: dtypes differ, or are no plain bytes.
        RedistError
            On all ranks: it was freed, or not all ranks plan the same.
        """
        program, (source, target) = self._talk.program, self._layouts
        array, problem = self._operand()
        problem = (
            problem or self._freed_problem("plan") or no_bytes(array) or _no_layout(*self._layouts)
        )
        what = call("redistribute", in_layout=source, out_layout=target)
        brought = self._talk.agree(what, (array.shape, array.dtype), problem)
        check_dtypes([dtype for _, dtype in brought])
        shape, rank, size = whole_shape(source, [s for s, _ in brought]), program.rank, program.size
        target.check(shape, size)
        moves = moves_of(source, target, shape, rank, size)
        self._planned = Planned(
            program.step, array.shape, target.box(rank, shape, size).shape, array.dtype, moves
        )

    def execute(self, stream: None = None, out: Any = None) -> Any:
        """Move the operand's elements to where they belong.

        Parameters
        ----------
        stream : None
            For operands on a GPU; on the CPU there is none.
        out : ndarray, optional
            Where this rank's new box goes: an array of its shape and dtype. Written in place by the
            other ranks if it is a result of this function, else copied there.

        Returns
        -------
        ndarray
            `out`, or a new array: this rank's box by `out_layout`, in memory that the other ranks
            have written straight into; C-contiguous. It is complete.

        Raises
        ------
        RedistError
            On all ranks: it is not planned, or was freed; or a rank could not write.
        LayoutError
            On all ranks: an `out` does not fit.
        AdmissionError
            On all ranks: one has too little memory.
        """
        program, planned = self._talk.program, self._planned
        array, problem = self._operand()
        problem = problem or self._state_problem("execute")
        if stream is not None:
            problem = problem or TypeError(
                f"stream is {stream!r}, but operands on the CPU have none"
            )
        target, result = np.empty(0), np.empty(0)
        if problem is None and planned is not None:
            target, result, problem = self._target(array, planned, out)
        what = call("execute", plan=planned and planned.number)
        landing, number = program.landing, program.step
        landing.open(number, target)
        # Where not all have spoken, one may still write: the array stays open with the program.
        heard = self._talk.hear(what, program.offset(target), problem)
        try:
            offsets = settle(heard)
        except BaseException:
            landing.close(number)
            raise
        assert planned is not None
        problem = self._write(array, planned, number, offsets)
        heard = self._talk.hear(what, None, problem)
        landing.close(number)
        settle(heard)
        if out is None:
            return like(self._given, target)
        if target is not result:
            np.copyto(result, target)
        return out

    def reset_operand(self, local: ArrayLike) -> None:
        """Take another operand, for which the plan holds too.

        Parameters
        ----------
        local : array_like
            Of the shape and dtype of the one before; its strides may differ.

        Raises
        ------
        LayoutError, TypeError
            On all ranks: shape or dtype are not those of the plan. The operand stays what it was.
        RedistError
            On all ranks: it is not planned, or was freed.
        """
        planned = self._planned
        array, problem = _seen(local)
        problem = problem or self._state_problem("reset_operand")
        if problem is None and planned is not None:
            if array.shape != planned.source:
                problem = LayoutError(
                    f"the operand has shape {array.shape}, but the plan is for {planned.source}"
                )
            elif array.dtype != planned.dtype:
                problem = TypeError(
                    f"the operand has dtype {array.dtype}, but the plan is for {planned.dtype}"
                )
        self._talk.agree(call("reset_operand", plan=planned and planned.number), None, problem)
        self._given = local

    def free(self) -> None:
        """Forget the operand and the plan; results stay. Waits for nobody, may be called again."""
        self._freed, self._given = True, None

    # ------------------------------------------------------------------------------- helpers
    def _operand(self) -> tuple[NDArray[Any], Exception | None]:
        return (np.empty(0), None) if self._freed else _seen(self._given)

    def _freed_problem(self, name: str) -> Exception | None:
        return (
            RedistError(f"{name}() after free(): make a new Redistribute") if self._freed else None
        )

    def _state_problem(self, name: str) -> Exception | None:
        if self._planned is None and not self._freed:
            return RedistError(f"{name}() before plan(): call plan() first")
        return self._freed_problem(name)

    def _target(
        self, array: NDArray[Any], planned: Planned, out: Any
    ) -> tuple[NDArray[Any], NDArray[Any], Exception | None]:
        """The array that the others write, `out` as NumPy sees it, and what is wrong with them."""
        program, (shape, dtype) = self._talk.program, (planned.target, planned.dtype)
        nothing = np.empty((0,) * len(shape), dtype)
        result = nothing
        if out is not None:
            is_array = isinstance(out, np.ndarray) or hasattr(out, "__dlpack__")
            result, problem = _seen(out) if is_array else (nothing, None)
            if problem is not None:
                return nothing, nothing, problem
            if not is_array or (result.shape, result.dtype) != (shape, dtype):
                has = f"{result.shape}, {result.dtype}" if is_array else type(out).__name__
                return (
                    nothing,
                    nothing,
                    LayoutError(
                        f"out must be an array of shape {shape} and dtype {dtype}, not {has}"
                    ),
                )
            if not result.flags.writeable:
                return nothing, nothing, LayoutError("out is read-only")
            if program.offset(result) is not None and not np.may_share_memory(result, array):
                return result, result, None
        try:
            return program.allocate(shape, dtype), result, None
        except AdmissionError as error:
            return nothing, nothing, error

    def _write(
        self, array: NDArray[Any], planned: Planned, number: int, offsets: Sequence[int]
    ) -> Exception | None:
        """Write what this rank gives; what went wrong, which all ranks have to hear."""
        try:
            self._talk.program.write(
                Targeted(
                    move.rank,
                    Place(number, offsets[move.rank], move.shape, planned.dtype),
                    move.target,
                    array[move.source],
                )
                for move in planned.moves
            )
        except ProgramEnded:
            raise
        except RedistError as error:
            return type(error)(str(error))  # without its frames, which hold the target
        except Exception as error:
            return RedistError(
                f"could not write to the other ranks: {type(error).__name__}: {error}"
            )
        return None


def _seen(local: Any) -> tuple[NDArray[Any], Exception | None]:
    """An operand as NumPy sees it, and what is wrong with it."""
    try:
        return as_numpy(local), None
    except (TypeError, ValueError) as error:
        return np.empty(0), error


def _no_layout(*layouts: object) -> Exception | None:
    for layout in layouts:
        if not isinstance(layout, Layout):
            return LayoutError(f"{layout!r} is no layout: use one, such as Slab.Y")
    return None
