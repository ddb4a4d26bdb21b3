"""Ranks that agree on what they do together, or all raise one and the same error.

Every operation of a communicator begins with a step in which all ranks say what they call, with
which arguments, what they bring, and what is wrong. Whatever does not fit is found there,
by all alike.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from dask.base import tokenize
from numpy.typing import NDArray

from dask_redist.errors import LayoutError, RedistError
from dask_redist.grids import Layout
from dask_redist.joining import by_value
from dask_redist.mailbox import RETURNED
from dask_redist.partition import check_rank
from dask_redist.program import Program


class Call(NamedTuple):
    """An operation and its arguments that must be the same on all ranks, in short.

    It goes from each rank to each other, so a layout that lists a box a rank is a token in it.
    """

    text: str
    token: str = ""

    def __str__(self) -> str:
        return self.text


def call(name: str, **arguments: Any) -> Call:
    """An operation and its arguments.

    Examples
    --------
    >>> print(call("reduce", dst=0, op="SUM"))
    reduce(dst=0, op=SUM)
    """
    text = f"{name}({', '.join(f'{key}={value}' for key, value in arguments.items())})"
    listed = [value for value in arguments.values() if isinstance(value, Layout)]
    return Call(text, tokenize(listed) if listed else "")


class Heard(NamedTuple):
    """What one rank has said in a step."""

    call: Call
    fact: Any = None
    problem: Exception | None = None


class Agreement:
    """A program, as those use it who want all ranks to do the same.

    Parameters
    ----------
    program
        The program; the thread that makes this is the one that may use it.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._thread = threading.get_ident()
        self._over = False

    def __repr__(self) -> str:
        return f"<RankComm: rank {self.program.rank} of {self.program.size}>"

    def close(self) -> None:
        """The function has returned: nothing can be called any more."""
        self._over = True

    def check_use(self) -> None:
        """Raise unless it is used while its function runs, and by the thread of that."""
        if self._over:
            raise RedistError(
                f"{self!r} is used after its function has returned; there is nobody to answer"
            )
        if threading.get_ident() != self._thread:
            raise RedistError(
                f"{self!r} is used by another thread than that of its function, "
                f"{threading.current_thread().name!r}; the ranks' calls would have no order"
            )

    def agree(self, what: Call, fact: Any = None, problem: Exception | None = None) -> list[Any]:
        """Hear what all ranks bring to an operation; see `hear` and `settle`."""
        return settle(self.hear(what, fact, problem))

    def hear(self, what: Call, fact: Any = None, problem: Exception | None = None) -> list[Heard]:
        """Say something to all ranks, and hear what they say; by rank.

        Raises
        ------
        RedistError
            Not all ranks have spoken: one has failed, left or does not answer.
        """
        self.check_use()
        # NumPy pickles the byte order of an array in protocol 5 only, and of contiguous ones only.
        letter = pickle.dumps((what, fact, problem), protocol=5)
        letters = self.program.exchange(letter)
        returned = Heard(Call("the end of the function"))
        return [Heard(*pickle.loads(each)) if each != RETURNED else returned for each in letters]

    def no_rank(self, rank: int) -> Exception | None:
        """What is wrong with the number of a rank."""
        try:
            check_rank(rank, self.program.size)
        except LayoutError as error:
            return error
        return None


def settle(heard: Sequence[Heard]) -> list[Any]:
    """What all ranks bring, by rank.

    Raises
    ------
    RedistError
        They do not call the same.
    Exception
        The problem of the lowest rank that has one.

    Examples
    --------
    >>> settle([Heard(call("barrier"), 7), Heard(call("barrier"), 8)])
    [7, 8]
    >>> settle([Heard(call("barrier")), Heard(call("barrier"), problem=TypeError("no"))])
    Traceback (most recent call last):
    TypeError: rank 1: no
    """
    calls = [each.call for each in heard]
    if len(set(calls)) > 1:
        texts = [each.text for each in calls]
        if len(set(texts)) == 1:  # they read alike
            texts = [f"{each.text} #{each.token[:6]}" for each in calls]
        raise RedistError(
            f"all ranks must call the same with the same arguments, but there is {by_value(texts)}"
        )
    for rank, each in enumerate(heard):
        if each.problem is not None:
            raise type(each.problem)(f"rank {rank}: {each.problem}")
    return [each.fact for each in heard]


def check_dtypes(dtypes: Sequence[np.dtype[Any] | None]) -> None:
    """Raise unless all ranks that have a dtype have one; on all ranks, since all know them."""
    if len({dtype for dtype in dtypes if dtype is not None}) > 1:
        raise TypeError(
            f"the arrays of all ranks must have one dtype, but there is {by_value(dtypes)}"
        )


def no_bytes(array: NDArray[Any]) -> Exception | None:
    """What is wrong with an array whose elements cannot travel."""
    if array.dtype.hasobject or array.dtype.kind == "T":
        return TypeError(f"elements of dtype {array.dtype} are no plain bytes")
    return None
