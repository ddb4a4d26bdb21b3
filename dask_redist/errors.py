"""The errors of this package, each also an exception that callers already catch.

Every class carries one plain message string, so that all of them survive pickling between workers,
scheduler and client.
"""

from __future__ import annotations

import pickle

__all__ = [
    "AdmissionError",
    "ChunkMismatchError",
    "LayoutError",
    "RankLostError",
    "RedistError",
    "RunTimeoutError",
]


class RedistError(Exception):
    """Base class of every error that this package raises on purpose."""


class LayoutError(RedistError, ValueError):
    """A layout does not fit the array or the number of ranks."""


# MemoryError comes first: it has an allocator of its own, and tblib, with which distributed pickles
# exceptions, calls ``__new__`` directly; Python refuses that under any other order.
class AdmissionError(MemoryError, RedistError):
    """A rank has too little memory for the chunks that it would have to hold."""


class CrowdedError(AdmissionError):
    """There would be enough memory if what other tasks use went; the rank asks again later."""


class RankLostError(RedistError, RuntimeError):
    """A rank disappeared and the run could not be finished without it."""


class RunTimeoutError(RedistError, TimeoutError):
    """A rank did not do its part of a run in time."""


class ChunkMismatchError(RedistError, TypeError):
    """A computed chunk has another shape or dtype than the array's metadata declares."""


def has_left(failure: object) -> bool:
    """Whether a failure only says that the other side is gone or cannot be reached."""
    return isinstance(failure, OSError) and not isinstance(failure, RunTimeoutError)


def dump(error: Exception) -> bytes:
    """Pickle an error for another process; one that cannot be pickled, or read, goes in words."""
    try:
        found = pickle.dumps(error)
        pickle.loads(found)
    except Exception:
        return pickle.dumps(RedistError(repr(error)))
    return found


def load(dumped: bytes) -> Exception:
    """An error of another process; in words where its class is not known here."""
    try:
        error: Exception = pickle.loads(dumped)
    except Exception as failure:
        return RedistError(f"an error that cannot be read here: {failure!r}")
    return error
