"""Arrays of other libraries that NumPy can look at: by DLPack, without a copy, and back."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray


def as_numpy(operand: Any) -> NDArray[Any]:
    """An array as NumPy sees it: the same memory, if it is an array; else a new one.

    Raises
    ------
    TypeError
        It is where NumPy cannot see it, such as on a GPU, or of a dtype that NumPy has not.

    Examples
    --------
    >>> as_numpy([1, 2])
    array([1, 2])
    """
    if isinstance(operand, np.ndarray) or not hasattr(operand, "__dlpack__"):
        return np.asarray(operand)
    try:
        return np.from_dlpack(operand)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        device = getattr(operand, "__dlpack_device__", lambda: "unknown")()
        raise TypeError(
            f"a {type(operand).__name__} on DLPack device {device} cannot be seen by NumPy "
            f"({error}); move it to the CPU, and to a dtype of NumPy's"
        ) from None


def like(operand: Any, array: NDArray[Any]) -> Any:
    """An array as one of an operand's library, over the same memory; itself if that has no way."""
    if isinstance(operand, np.ndarray) or not hasattr(operand, "__dlpack__"):
        return array
    if hasattr(operand, "__array_namespace__"):
        library = operand.__array_namespace__()
    else:
        library = sys.modules.get(type(operand).__module__.partition(".")[0])
    from_dlpack = getattr(library, "from_dlpack", None)
    return array if from_dlpack is None else from_dlpack(array)
