"""Copies past the cache: what is written into other ranks' memory is not read here again.

An ordinary store reads the line that it will overwrite. Stores past the cache spare that, a third
of the memory's traffic, and keep the cache for others. NumPy does not use them, and `memcpy` only
for single copies of many megabytes; so the rows of a box are copied by a few lines of C
(``_stream.c``), which are compiled when the package is installed. Where there was no compiler, and
for boxes that fit into a cache, `numpy.copyto` copies.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["copy", "is_compiled"]

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
    function.argtypes = [address, address, ctypes.c_int, *3 * [address], ctypes.c_size_t]
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
    if _stream is None or to.nbytes < LEAST:
        np.copyto(to, what)
        return
    # Longest steps in the target first; what is without gaps in both is one row.
    axes = sorted(
        (axis for axis in zip(to.shape, to.strides, what.strides, strict=True) if axis[0] > 1),
        key=lambda axis: -abs(axis[1]),
    )
    row: int = to.itemsize
    while axes and axes[-1][1] == axes[-1][2] == row:
        row *= axes.pop()[0]
    if row < ROW:
        np.copyto(to, what)
        return
    counts = ctypes.c_ssize_t * len(axes)
    columns = [counts(*(axis[k] for axis in axes)) for k in range(3)]
    start, source = (a.__array_interface__["data"][0] for a in (to, what))
    _stream(start, source, len(axes), *columns, row)
