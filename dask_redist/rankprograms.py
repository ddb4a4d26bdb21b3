"""A rank's side of programs: what it is told of them, and what it says when one has run."""

from __future__ import annotations

import asyncio
import pickle
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from distributed.protocol import pickle as by_value
from distributed.utils_comm import gather_from_workers
from numpy.typing import NDArray

from dask_redist.errors import RedistError
from dask_redist.joining import Piece
from dask_redist.lane import insist
from dask_redist.mailbox import ProgramEnded
from dask_redist.program import Means, Program
from dask_redist.rankcomm import RankComm
from dask_redist.ranks import Seat
from dask_redist.run import as_declared
from dask_redist.spec import Index


class Local(NamedTuple):
    """A rank's own array of a Dask array.

    Attributes
    ----------
    name : str
        The Dask array's.
    chunk : tuple of int, or None
        Which chunk it is; None: the rank has none, its array has no element.
    shape : tuple of int
        Its shape.
    dtype : numpy.dtype
        Its dtype.
    """

    name: str
    chunk: Index | None
    shape: Index
    dtype: np.dtype[Any]

    @property
    def key(self) -> Any:
        """The chunk's key; None where there is none."""
        return None if self.chunk is None else (self.name, *self.chunk)


class RankPrograms:
    """The programs of a rank.

    Parameters
    ----------
    means
        What the rank has.
    threads
        Does what would block the event loop.
    """

    def __init__(self, means: Means, threads: Executor) -> None:
        self.seat = -1  # until the scheduler has given us one
        self._means = means
        self._threads = threads
        self._programs: dict[int, Program] = {}
        self._running: set[int] = set()
        #: programs that were over before they were held here (the last ones)
        self._freed: deque[int] = deque(maxlen=1000)

    @property
    def quiet(self) -> bool:
        """Whether no function is running here."""
        return not self._running

    # ------------------------------------------------------------------- on the event loop
    async def begin(
        self,
        number: int,
        seats: Sequence[Any],
        code: bytes,
        locals: bytes,
        who_has: Sequence[Collection[str]],
        piece: Any = None,
    ) -> dict[str, Any]:
        """Hold what a program needs: its function, and this rank's arrays; or what is wrong.

        ``piece``: the array itself, where it comes with the message.
        """
        table = [Seat.of(row) for row in seats]
        rank = [seat.seat for seat in table].index(self.seat)
        program = Program(number, rank, table, self._means)
        loop = asyncio.get_running_loop()
        try:
            arrays = await self._arrays(pickle.loads(locals), who_has) if piece is None else piece
            program.code = await loop.run_in_executor(self._threads, _code, code, arrays)
        except Exception as error:
            return {"error": self._told(error, rank)}
        if number not in self._freed:
            self._programs[number] = program
            self._means.holdings.open(number, program.landing)
        return {}

    async def _arrays(self, wanted: Any, who_has: Sequence[Collection[str]]) -> Any:
        """The rank's own arrays: one, a tuple of them, or None."""
        if wanted is None or isinstance(wanted, Local):
            return wanted and await self._local(wanted, who_has[0])
        pairs = zip(wanted, who_has, strict=True)
        return tuple([await self._local(each, where) for each, where in pairs])

    async def _local(self, local: Local, who_has: Collection[str]) -> NDArray[Any]:
        """The array of this rank of a Dask array; read-only."""
        worker = self._means.worker
        if local.chunk is None:
            return np.empty(local.shape, local.dtype)
        if local.key in worker.data:
            found = worker.data[local.key]
        else:
            data, *_ = await gather_from_workers({local.key: who_has}, worker.rpc)
            if local.key not in data:
                raise RedistError(f"chunk {local.chunk} of {local.name!r} is in memory nowhere")
            found = data[local.key]
        view = as_declared(found, local.shape, local.dtype, local.name, local.chunk).view()
        view.flags.writeable = False
        return view

    async def mail(self, number: int, step: int, sender: int, letter: bytes) -> None:
        """A letter of another rank."""
        if program := self._programs.get(number):
            program.mailbox.put(step, sender, letter)

    def abort(self, number: int, why: str) -> None:
        """A program is not to go on; whoever waits in it is let go."""
        if program := self._programs.get(number):
            program.end(why)

    def job(self, number: int) -> Callable[[], None] | None:
        """What the lane does in the turn of a program."""
        program = self._programs.get(number)
        return None if program is None else partial(self._run, program)

    async def keep(self, number: int, key: Any) -> int:
        """Put the array that came of a program into the worker's data; its bytes."""
        value = self._programs[number].value
        reply = self._means.worker.update_data({key: value}, f"redist-keep-{number}")
        nbytes: int = reply["nbytes"][key]
        return nbytes

    async def value(self, number: int) -> dict[str, Any]:
        """What came of a program, pickled; or why it cannot be."""
        loop, program = asyncio.get_running_loop(), self._programs[number]
        dumps = partial(by_value.dumps, program.value)
        try:
            return {"value": await loop.run_in_executor(self._threads, dumps)}
        except Exception as error:
            return {"error": self._told(error, program.rank)}

    def forget(self, number: int) -> None:
        """A program is over, on all ranks."""
        program = self._programs.pop(number, None)
        if program is None:
            self._freed.append(number)
        else:
            program.end("the program is over")
            program.let_go()

    def close(self) -> None:
        """Let all go."""
        for program in self._programs.values():
            program.end(f"the rank on {self._means.worker.address} is closed")

    def __contains__(self, number: object) -> bool:
        return number in self._programs

    # ------------------------------------------------------------------------- in the lane
    def _run(self, program: Program) -> None:
        """Run the function, and tell the scheduler what came of it."""
        self._running.add(program.number)
        report: dict[str, Any] = {"fact": None, "error": None, "released": False}
        comm = RankComm(program)
        try:
            if program.mailbox.ended is not None:  # before its turn
                raise ProgramEnded(program.mailbox.ended)
            code, program.code = program.code, None
            assert code is not None
            program.value = code(comm)
            report["fact"] = pickle.dumps(_fact(program.value))
            program.leave()
        except BaseException as error:
            report["error"] = self._told(error, program.rank)
            report["released"] = _is_released(error)
        finally:
            comm.close()
            self._running.discard(program.number)
        tell = partial(
            self._means.worker.scheduler.redist_ran, number=program.number, seat=self.seat
        )
        insist(lambda: self._means.call(tell(**report)))

    def _told(self, error: BaseException, rank: int) -> bytes:
        """An error for the caller: itself, with a note where it comes from."""
        text = "".join(traceback.format_exception(error)).rstrip()
        told = error
        if not isinstance(error, Exception):  # SystemExit and the like are for one process
            told = RedistError(f"the function raised {error!r}")
        told.add_note(f"raised on rank {rank} on {self._means.worker.address}:\n{text}")
        try:
            found: bytes = by_value.dumps(told)
            by_value.loads(found)
        except Exception:
            plain = RedistError(repr(error))
            plain.add_note(told.__notes__[-1])
            return pickle.dumps(plain)
        return found


def _code(code: bytes, arrays: Any) -> Callable[[RankComm], Any]:
    function, args, kwargs = by_value.loads(code)
    return lambda comm: function(arrays, comm, *args, **kwargs)


def _fact(value: Any) -> Piece | str:
    """What a function returned, in short."""
    if type(value) is np.ndarray and value.ndim:
        return Piece(value.shape, value.dtype)
    return f"a {type(value).__name__}" if value is not None else "None"


def _is_released(error: BaseException | None) -> bool:
    """Whether an error only follows from what happened on another rank."""
    while error is not None:
        if isinstance(error, ProgramEnded):
            return True
        error = error.__cause__ or error.__context__
    return False
