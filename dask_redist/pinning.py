"""Which GPU a rank has: its position among the ranks of its host, over the GPUs that it sees.

Pure arithmetic on what each rank tells of itself. Only ranks count that are workers: a scheduler
or a client on the same host takes no GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from dask_redist.errors import RedistError

__all__ = ["Pin", "check_pins", "device_index", "is_rotated"]


def device_index(position: int, visible: int, rotated: bool) -> int:
    """The index of a rank's GPU among those that are visible to it.

    Parameters
    ----------
    position : int
        The rank's position among the worker ranks of its host.
    visible : int
        How many GPUs its process sees.
    rotated : bool
        Whether each worker of this host has a CUDA_VISIBLE_DEVICES of its own that begins with its
        own GPU, as dask-cuda sets it.

    Raises
    ------
    RedistError
        The process sees no GPU.

    Examples
    --------
    >>> [device_index(position, 4, rotated=False) for position in range(6)]
    [0, 1, 2, 3, 0, 1]
    >>> [device_index(position, 4, rotated=True) for position in range(6)]
    [0, 0, 0, 0, 0, 0]
    """
    if visible < 1:
        raise RedistError(
            f"the process of the rank at position {position} on its host sees no GPU; "
            "its CUDA_VISIBLE_DEVICES must name one"
        )
    return 0 if rotated else position % visible


def is_rotated(of_host: Sequence[str | None]) -> bool:
    """Whether the workers of one host have lists of GPUs that begin with different ones.

    Parameters
    ----------
    of_host : sequence of str or None
        CUDA_VISIBLE_DEVICES of each worker of the host; None where it is not set.

    Examples
    --------
    >>> is_rotated(["0,1", "1,0"]), is_rotated(["0,1", "0,1"]), is_rotated([None, None])
    (True, False, False)
    """
    first = [(given or "").split(",")[0].strip() for given in of_host]
    return all(first) and len(set(first)) > 1


class Pin(NamedTuple):
    """What a rank tells of its GPU.

    Attributes
    ----------
    rank : int
        Its number.
    host : str
        Its host.
    uuid : str
        The UUID that the GPU reports; an index or a name proves nothing.
    on_purpose : bool
        Whether the user asked for several ranks on one GPU.
    """

    rank: int
    host: str
    uuid: str
    on_purpose: bool = False


def check_pins(pins: Sequence[Pin]) -> list[str]:
    """Check that no two ranks of a host have one GPU.

    Returns
    -------
    list of str
        A warning for each GPU that several ranks have on purpose.

    Raises
    ------
    RedistError
        Two ranks have one GPU, and not both on purpose.

    Examples
    --------
    >>> check_pins([Pin(0, "a", "GPU-1"), Pin(1, "a", "GPU-2"), Pin(2, "b", "GPU-1")])
    []
    >>> check_pins([Pin(0, "a", "GPU-1"), Pin(1, "a", "GPU-1")])
    Traceback (most recent call last):
        ...
    dask_redist.errors.RedistError: ranks 0 and 1 on host a both have the GPU GPU-1; ...
    """
    on = defaultdict(list)
    for pin in pins:
        on[pin.host, pin.uuid].append(pin)
    warnings = []
    for (host, uuid), several in on.items():
        if len(several) < 2:
            continue
        numbers = [str(pin.rank) for pin in several]
        names = f"ranks {', '.join(numbers[:-1])} and {numbers[-1]} on host {host}"
        if not all(pin.on_purpose for pin in several):
            raise RedistError(
                f"{names} {'both' if len(several) == 2 else 'all'} have the GPU {uuid}; "
                "start no more ranks on a host than it has GPUs, each with a GPU of its own"
            )
        warnings.append(
            f"{names} share the GPU {uuid}: NCCL refuses that, so reductions go through the host; "
            "without CUDA's multi-process service NVSHMEM has no signals there, so ranks reach "
            "each other by peer memory only"
        )
    return warnings
