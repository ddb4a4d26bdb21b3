"""Arrays that this process offers to :func:`dask_redist.from_ranks`, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_redist.errors import RedistError

_offered: dict[str, NDArray[Any]] = {}


def offer(arrays: Mapping[str, NDArray[Any]]) -> None:
    """Offer arrays of this process under names; a name that was offered before is replaced.

    Raises
    ------
    TypeError
        One is no NumPy array.

    Examples
    --------
    >>> offer({"u": np.arange(3)})
    >>> offered("u")
    array([0, 1, 2])
    """
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name!r} is a {type(array).__name__}; offer numpy arrays")
    _offered.update(arrays)


def withdraw(arrays: Mapping[str, NDArray[Any]]) -> None:
    """Offer these arrays no more.

    Examples
    --------
    >>> array = np.arange(3)
    >>> offer({"w": array})
    >>> withdraw({"w": array})
    >>> "w" in _offered
    False
    """
    for name, array in arrays.items():
        if _offered.get(name) is array:
            del _offered[name]


def offered(name: str) -> NDArray[Any]:
    """The array that this process offers under a name: that very array.

    Raises
    ------
    RedistError
        There is none; says which names there are.
    """
    try:
        return _offered[name]
    except KeyError:
        names = ", ".join(map(repr, sorted(_offered))) or "nothing"
        raise RedistError(f"no array is offered as {name!r}; there is {names}") from None
