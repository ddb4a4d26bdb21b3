"""What combines the tensors of ranks, element by element: NumPy's ufuncs under torch's names."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

_WORDS = {
    "b": "bool",
    "i": "int",
    "u": "uint",
    "f": "float",
    "c": "complex",
    "m": "timedelta64",
    "M": "datetime64",
}


class ReduceOp(Enum):
    """How a collective combines tensors; functions take the lower-case names, too.

    The result has the tensors' dtype, as in torch: a SUM of int8 wraps around at 127, and of bool,
    SUM is "or" and PRODUCT "and", as NumPy's ``add`` and ``multiply`` are.

    Attributes
    ----------
    SUM, PRODUCT
        Of numbers and, SUM only, of timedelta64.
    MIN, MAX
        NumPy's ``minimum`` and ``maximum``: where there is a NaN, the result is NaN.
    AVG
        The SUM, divided by the number of tensors, as NumPy's ``mean``: of float, complex and
        timedelta64.
    BAND, BOR, BXOR
        Bit by bit, of integers and bool.
    LAND, LOR
        Whether all, or any, are not zero: 1 or 0 in the tensors' dtype.

    Examples
    --------
    >>> ReduceOp("sum"), [op.value for op in ReduceOp][-2:]
    (<ReduceOp.SUM: 'sum'>, ['land', 'lor'])
    """

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    AVG = "avg"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
    LAND = "land"
    LOR = "lor"


#: ufunc, and the kinds of dtypes that it is for
_MADE_BY: dict[ReduceOp, tuple[np.ufunc, str]] = {
    ReduceOp.SUM: (np.add, "biufcm"),
    ReduceOp.PRODUCT: (np.multiply, "biufc"),
    ReduceOp.MIN: (np.minimum, "biufcmM"),
    ReduceOp.MAX: (np.maximum, "biufcmM"),
    ReduceOp.AVG: (np.add, "fcm"),
    ReduceOp.BAND: (np.bitwise_and, "biu"),
    ReduceOp.BOR: (np.bitwise_or, "biu"),
    ReduceOp.BXOR: (np.bitwise_xor, "biu"),
    ReduceOp.LAND: (np.logical_and, "biufc"),
    ReduceOp.LOR: (np.logical_or, "biufc"),
}


def as_op(op: object, dtype: np.dtype[Any]) -> ReduceOp:
    """The operation that a value names.

    Raises
    ------
    ValueError
        It names none.
    TypeError
        There is none of that kind for elements of ``dtype``.

    Examples
    --------
    >>> as_op("band", np.dtype("f8"))
    Traceback (most recent call last):
    TypeError: there is no BAND of float64 elements; it takes bool, int, uint
    """
    try:
        found = op if isinstance(op, ReduceOp) else ReduceOp(str(op).lower())
    except ValueError:
        names = ", ".join(each.name for each in ReduceOp)
        raise ValueError(f"op is {op!r}; it must be one of ReduceOp's {names}") from None
    _, kinds = _MADE_BY[found]
    if dtype.kind not in kinds:
        words = ", ".join(_WORDS[kind] for kind in kinds)
        raise TypeError(f"there is no {found.name} of {dtype} elements; it takes {words}")
    return found


def combine(op: ReduceOp, tensors: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Tensors of one shape and dtype, combined in their order; a new array of that dtype.

    Examples
    --------
    >>> combine(ReduceOp.LAND, [np.array([0, 2]), np.array([3, 4])])
    array([0, 1])
    """
    first, *others = tensors
    ufunc, _ = _MADE_BY[op]
    narrow = op is ReduceOp.AVG and first.dtype == np.float16  # NumPy's mean sums it as float32
    total = np.array(first, dtype=np.float32 if narrow else first.dtype, order="C", subok=False)
    if op in (ReduceOp.LAND, ReduceOp.LOR):
        ufunc(total, total, out=total)
    for other in others:
        ufunc(total, other, out=total)
    if op is ReduceOp.AVG:
        np.true_divide(total, np.intp(len(tensors)), out=total, casting="unsafe")  # as mean does
    return total.astype(first.dtype, copy=False)
