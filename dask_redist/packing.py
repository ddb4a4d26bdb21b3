"""What a message of pieces is: headers that say where each belongs, and one packed buffer."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_redist.pages import portions
from dask_redist.segment import Bytes, part, view_bytes

__all__ = ["Header", "box_parts", "cut_up", "in_place", "pack", "pairs", "run_in_chunk", "unpack"]

#: a piece in a message: the output chunk's number, the lower corner of the piece's box in that
#: chunk, and its upper corner (excluded)
Header = list[int]


def box_parts(shape: Sequence[int], itemsize: int, limit: int) -> Iterator[tuple[slice, ...]]:
    """A box in parts of up to ``limit`` bytes each; a single element may have more."""

    def nbytes(box: tuple[slice, ...]) -> int:
        lengths: list[int] = [s.stop - s.start for s in box]
        return math.prod(lengths) * itemsize

    return portions(shape, nbytes, limit)


def unpack(
    headers: Sequence[Sequence[int]], buffer: Any, view_of: Callable[[int], NDArray[Any]]
) -> None:
    """Write the pieces of a received message to their places.

    Parameters
    ----------
    headers : sequence of sequence of int
        As `MessageWire` sends them.
    buffer : bytes-like
        The pieces' bytes.
    view_of : callable
        Output chunk's number to the array over its block.

    Raises
    ------
    ValueError
        A box does not lie inside its chunk, or the buffer is not as long as all boxes together.
        Nothing has been written.

    Examples
    --------
    >>> out = np.zeros((2, 3), "u1")
    >>> unpack([[0, 1, 1, 2, 3]], b"ab", lambda number: out)
    >>> out
    array([[ 0,  0,  0],
           [ 0, 97, 98]], dtype=uint8)
    """
    data = np.frombuffer(buffer, np.uint8) if len(memoryview(buffer)) else np.empty(0, np.uint8)
    for target, source in pairs(headers, data.nbytes, view_of, partial(view_bytes, data)):
        np.copyto(target, source)


def in_place(headers: Sequence[Header], view_of: Callable[[int], NDArray[Any]]) -> Bytes | None:
    """The bytes of an output chunk that a message's pieces are, one behind the other.

    None where they are not: pieces of several chunks, or rows that are apart.

    Parameters
    ----------
    headers : list of list of int
        As `MessageWire` sends them.
    view_of : callable
        Output chunk's number to the array over its block.

    Examples
    --------
    >>> out = np.zeros((4, 3), "u1")
    >>> in_place([[0, 1, 0, 2, 3], [0, 2, 0, 4, 3]], lambda number: out).shape
    (9,)
    >>> in_place([[0, 0, 0, 4, 2]], lambda number: out) is None
    True
    """
    chunk, view, first, last = -1, None, 0, 0
    for number, *corners in headers:
        if view is None:
            chunk, view = number, view_of(number)
            if not view.flags.c_contiguous:
                return None
        if number != chunk:
            return None
        lower, upper = corners[: view.ndim], corners[view.ndim :]
        inside = zip(lower, upper, view.shape, strict=True)
        if not all(0 <= k < u <= length for k, u, length in inside):
            return None
        box = tuple(slice(k, u) for k, u in zip(lower, upper, strict=True))
        begin = run_in_chunk(view.shape, box)
        if begin is None or (last and begin != last):
            return None
        first = first if last else begin
        last = begin + math.prod(u - k for k, u in zip(lower, upper, strict=True))
    if view is None:
        return None
    return view.reshape(-1)[first:last].view(np.uint8)


def run_in_chunk(shape: Sequence[int], box: Sequence[slice]) -> int | None:
    """Where a box begins in a C-contiguous array, in elements; None if it is not in one run.

    Examples
    --------
    >>> run_in_chunk((4, 5), (slice(2, 4), slice(0, 5)))
    10
    >>> run_in_chunk((4, 5), (slice(2, 4), slice(0, 4))) is None
    True
    """
    begin, full = 0, True  # full: all axes so far, from the last one, are whole
    stride = 1
    for length, one in zip(reversed(shape), reversed(box), strict=True):
        lower, upper, _ = one.indices(length)
        if not full and upper - lower > 1:
            return None
        begin += lower * stride
        stride *= length
        full = full and upper - lower == length
    return begin


def pack(
    headers: Sequence[Sequence[int]], buffer: Bytes, view_of: Callable[[int], NDArray[Any]]
) -> None:
    """Gather pieces into a buffer, for a reader who asks for them by their headers; see `unpack`.

    Examples
    --------
    >>> buffer = np.zeros(2, "u1")
    >>> pack([[0, 1, 1, 2, 3]], buffer, lambda number: np.arange(6, dtype="u1").reshape(2, 3))
    >>> buffer
    array([4, 5], dtype=uint8)
    """
    for source, target in pairs(headers, buffer.nbytes, view_of, partial(view_bytes, buffer)):
        np.copyto(target, source)


def pairs(
    headers: Sequence[Sequence[int]],
    nbytes: int,
    view_of: Callable[[int], Any],
    bytes_at: Callable[[int, tuple[int, ...], np.dtype[Any]], Any],
) -> list[tuple[Any, Any]]:
    """For each piece of a message its place in an array, and in the message.

    Parameters
    ----------
    headers : sequence of sequence of int
        As `MessageWire` sends them.
    nbytes : int
        The length of the message.
    view_of : callable
        Output chunk's number to the array over its block.
    bytes_at : callable
        A view of the message's bytes, from where they begin, a shape and a dtype.
    """
    found, begin = [], 0
    for number, *corners in headers:
        view = view_of(number)
        lower, upper = corners[: view.ndim], corners[view.ndim :]
        if len(corners) != 2 * view.ndim or not all(
            0 <= k <= u <= length for k, u, length in zip(lower, upper, view.shape, strict=True)
        ):
            raise ValueError(
                f"box {lower} to {upper} does not lie in output chunk {number}, "
                f"whose shape is {view.shape}"
            )
        piece = part(view, [slice(k, u) for k, u in zip(lower, upper, strict=True)])
        if begin + piece.nbytes > nbytes:
            raise ValueError(
                f"{nbytes - begin} bytes for box {lower} to {upper} of output chunk {number}, "
                f"which holds {piece.nbytes}"
            )
        found.append((piece, bytes_at(begin, piece.shape, piece.dtype)))
        begin += piece.nbytes
    if begin != nbytes:
        raise ValueError(f"{nbytes} bytes in a message whose boxes hold {begin}")
    return found


def cut_up(arrays: Sequence[NDArray[Any]], limit: int) -> Iterator[list[Header]]:
    """The headers of messages that carry whole arrays, each of up to ``limit`` bytes.

    Examples
    --------
    >>> list(cut_up([np.zeros((2, 3), "u1"), np.zeros(2, "u1")], limit=5))
    [[[0, 0, 0, 1, 3]], [[0, 1, 0, 2, 3], [1, 0, 2]]]
    """
    headers: list[Header] = []
    used = 0
    for number, array in enumerate(arrays):
        if not array.nbytes:
            continue
        for box in box_parts(array.shape, array.itemsize, limit):
            nbytes = part(array, box).nbytes
            if headers and used + nbytes > limit:
                yield headers
                headers, used = [], 0
            headers.append([number, *(s.start for s in box), *(s.stop for s in box)])
            used += nbytes
    if headers:
        yield headers
