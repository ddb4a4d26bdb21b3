"""Partials as bytes: what chunks leave of a reduction, put where other ranks can read parts of it.

A partial is any Python object: an array, a masked array, a dict of arrays (mean, var), a string.
Its plain arrays are taken out and laid into memory that peers can read; what is left, with a
:class:`Slot` for each of them, is pickled. Whoever reads it may want a *cut* only: elements
``start`` to ``stop`` along one axis, of every array. That works where all that a partial holds are
arrays that have this axis, of the same length.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Cut", "Leaf", "Packed", "cut_lengths", "pack", "unpack"]


#: bytes up to which a pickle is never laid: that of slots alone
LEAST = 4096


class Leaf(NamedTuple):
    """Where an array of a partial lies.

    Attributes
    ----------
    offset : int
        Where it begins in its owner's arena, in bytes; its elements are in C order.
    shape : tuple of int
        Its shape.
    dtype : numpy.dtype
        Its dtype.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Packed(NamedTuple):
    """A partial: its arrays, and the pickle of the rest; None: that is the last of the arrays."""

    rest: bytes | None
    leaves: tuple[Leaf, ...]


class Cut(NamedTuple):
    """Elements ``start`` to ``stop`` along ``axis``."""

    axis: int
    start: int
    stop: int

    def of(self, array: NDArray[Any]) -> NDArray[Any]:
        """That part of an array."""
        return array[(slice(None),) * self.axis + (slice(self.start, self.stop),)]


class Slot(NamedTuple):
    """Stands for an array that was taken out."""

    number: int


class Masked(NamedTuple):
    """A masked array in its parts."""

    data: Any
    mask: Any
    fill_value: Any


def pack(
    partial: Any,
    lay: Callable[[Sequence[NDArray[Any]]], Sequence[int]],
    inline: int = 0,
    dumps: Callable[[Any], bytes] = pickle.dumps,
) -> Packed:
    """Take the arrays out of a partial.

    Parameters
    ----------
    partial : object
        Any object that can be pickled; it is left as it is.
    lay : callable
        Copies arrays to where they can be read, in C order; returns their offsets.
    inline : int
        A partial of up to so many bytes is pickled as it is, and a longer pickle is laid, too.
    dumps : callable
        Pickles what is left, which may be of classes that no module has.

    Examples
    --------
    >>> laid = []
    >>> packed = pack({"n": 3, "total": np.ones((1, 2))}, lambda a: laid.extend(a) or [64])
    >>> packed.leaves
    (Leaf(offset=64, shape=(1, 2), dtype=dtype('float64')),)
    >>> unpack(packed, laid)
    {'n': 3, 'total': array([[1., 1.]])}
    """
    arrays: list[NDArray[Any]] = []
    rest: bytes | None = dumps(_take_out(partial, arrays))
    length = len(rest or b"")
    if arrays and length + sum(array.nbytes for array in arrays) <= inline:
        rest, arrays = dumps(partial), []
    elif length > max(inline, LEAST):
        arrays.append(np.frombuffer(rest or b"", np.uint8))
        rest = None
    offsets = lay(arrays) if arrays else ()
    leaves = tuple(Leaf(o, a.shape, a.dtype) for o, a in zip(offsets, arrays, strict=True))
    return Packed(rest, leaves)


def unpack(packed: Packed, arrays: Sequence[NDArray[Any]]) -> Any:
    """The partial, made of its arrays or of one cut of all of them; see `pack`."""
    rest = packed.rest
    if rest is None:
        *arrays, last = arrays
        rest = last.tobytes()
    return _put_in(pickle.loads(rest), arrays)


def cut_lengths(packed: Packed) -> tuple[int, ...]:
    """The axes along which a partial can be cut: their lengths, -1 where it cannot.

    Examples
    --------
    >>> leaves = (Leaf(0, (1, 6), np.dtype("i8")), Leaf(0, (1, 6, 2), np.dtype("f8")))
    >>> cut_lengths(Packed(pickle.dumps({"n": Slot(0), "M": Slot(1)}), leaves))
    (1, 6)
    >>> cut_lengths(Packed(pickle.dumps({"n": 7, "M": Slot(0)}), leaves[1:]))
    ()
    """
    if not packed.leaves or packed.rest is None or not _is_all_slots(pickle.loads(packed.rest)):
        return ()
    shapes = [leaf.shape for leaf in packed.leaves]
    return tuple(
        lengths[0] if len(set(lengths)) == 1 else -1 for lengths in zip(*shapes, strict=False)
    )


def _take_out(value: Any, arrays: list[NDArray[Any]]) -> Any:
    if type(value) is np.ndarray and not value.dtype.hasobject and value.dtype.kind != "T":
        arrays.append(value)
        return Slot(len(arrays) - 1)
    if type(value) is np.ma.MaskedArray and not value.dtype.hasobject:
        data, mask = np.ma.getdata(value), np.ma.getmaskarray(value)
        return Masked(_take_out(data, arrays), _take_out(mask, arrays), value.fill_value)
    if type(value) is dict:
        return {key: _take_out(item, arrays) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_take_out(item, arrays) for item in value)
    return value


def _put_in(value: Any, arrays: Sequence[NDArray[Any]]) -> Any:
    if type(value) is Slot:
        return arrays[value.number]
    if type(value) is Masked:
        data, mask = _put_in(value.data, arrays), _put_in(value.mask, arrays)
        return np.ma.MaskedArray(data, mask, fill_value=value.fill_value)
    if type(value) is dict:
        return {key: _put_in(item, arrays) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_put_in(item, arrays) for item in value)
    return value


def _is_all_slots(value: Any) -> bool:
    if type(value) is dict:
        return all(map(_is_all_slots, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_all_slots, value))
    return type(value) in (Slot, Masked)
