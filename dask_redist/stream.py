"""Copies past the cache: what is written into other ranks' memory is not read here again.

An ordinary store reads the line that it will overwrite. Stores past the cache spare that, a third
of the memory's traffic, and keep the cache for others. NumPy does not use them, and `memcpy` only
for single copies of many megabytes; so the rows of a box are copied by a few lines of C
(``_stream.c``), which are compiled when the package is installed. Where there was no compiler, and
for boxes that fit into a cache, `numpy.copyto` copies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Copy", "copy", "copy_all", "is_compiled"]

#: target and source of one copy
Copy: TypeAlias = tuple[NDArray[Any], NDArray[Any]]

#: bytes from which a box is copied past the cache
LEAST = 256 * 1024
#: a row in bytes from which the C code is called; shorter ones are NumPy's
ROW = 32

_FILE = Path(__file__).with_name("_stream.so")


def _load() -> Any:
    try:
        function = ctypes.CDLL(str(_FILE)).dask_redist_stream
    except (OSError, AttributeError):  # not compiled, or for another machine
        return None
    function.restype = None
    address = ctypes.c_void_p
    function.argtypes = [ctypes.c_int, *3 * [address], ctypes.c_int, *3 * [address]]
    return function


_stream = _load()


def is_compiled() -> bool:
    """Whether large boxes are copied past the cache."""
    return _stream is not None


def copy(to: NDArray[Any], what: NDArray[Any]) -> None:
    """Copy an array to another one of the same shape and dtype; the GIL is released.

    Parameters
    ----------
    to, what
        In any memory order; they do not overlap, and hold no Python objects.

    Examples
    --------
    >>> source = np.arange(2**20).reshape(2**10, 2**10)
    >>> target = np.empty((2**10, 2**9), source.dtype)
    >>> copy(target, source[:, 7 : 7 + 2**9])
    >>> bool((target == source[:, 7 : 7 + 2**9]).all())
    True
    """
    copy_all([(to, what)])


def copy_all(copies: Sequence[Copy]) -> None:
    """Copy several arrays, each to another one.

    Parts of one C-ordered array that differ only in where they cut its last axis are copied in one
    walk over it, a few rows at a time: what lies between them is read once, not once for each.

    Parameters
    ----------
    copies
        Pairs of target and source, as in `copy`.

    Examples
    --------
    >>> source = np.arange(2**20).reshape(2**10, 2**10)
    >>> left, right = np.empty((2**10, 2**8), source.dtype), np.empty((2**10, 2**9), source.dtype)
    >>> copy_all([(left, source[:, : 2**8]), (right, source[:, 2**8 : 3 * 2**8])])
    >>> bool((left == source[:, : 2**8]).all() and (right == source[:, 2**8 : 3 * 2**8]).all())
    True
    """
    if _stream is not None and sum([to.nbytes for to, _ in copies]) >= LEAST:
        if len(copies) > 1 and not _is_row(copies):
            for pair in copies:
                copy_all([pair])
            return
        if _past_cache(copies):
            return
    for to, what in copies:
        np.copyto(to, what)


def _is_row(copies: Sequence[Copy]) -> bool:
    """Whether these are parts of one array, without gaps along its last axis, the only one cut."""
    first = copies[0][1]
    return first.ndim > 1 and all(
        what.shape[:-1] == first.shape[:-1]
        and what.strides == first.strides
        and what.itemsize == what.strides[-1] == to.strides[-1]
        for to, what in copies
    )


def _past_cache(copies: Sequence[Copy]) -> bool:
    """Copy one array, or a row of them, past the cache; False where NumPy does as well."""
    what, targets = copies[0][1], [to for to, _ in copies]
    lengths, rows = what.shape, [what.itemsize]
    if len(copies) > 1:
        lengths, rows = lengths[:-1], [to.shape[-1] * to.itemsize for to in targets]
    # Of each axis its length, the step in the source, and that in each target; longest steps in the
    # targets first; what is without gaps in all is one row.
    steps = zip(lengths, *(a.strides[: len(lengths)] for a in (what, *targets)), strict=True)
    axes = sorted((axis for axis in steps if axis[0] > 1), key=lambda axis: -abs(axis[2]))
    while axes and list(axes[-1][2:]) == rows and set(rows) == {axes[-1][1]}:
        length = axes.pop()[0]
        rows = [row * length for row in rows]
    if min(rows) < ROW:
        return False
    axes = axes or [(1, 0, *(0 for _ in targets))]  # a single row
    columns = list(zip(*axes, strict=True))
    starts = [[a.__array_interface__["data"][0] for a in pair] for pair in copies]
    _stream(
        len(copies),
        _c(ctypes.c_void_p, [to for to, _ in starts]),
        _c(ctypes.c_void_p, [source for _, source in starts]),
        _c(ctypes.c_size_t, rows),
        len(axes),
        _c(ctypes.c_ssize_t, columns[0]),
        _c(ctypes.c_ssize_t, columns[1]),
        _c(ctypes.c_ssize_t, [step for column in columns[2:] for step in column]),
    )
    return True


def _c(kind: Any, values: Sequence[int]) -> Any:
    return (kind * len(values))(*values)
