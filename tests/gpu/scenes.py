"""What scenes share: the start, and arrays whose elements say where they belong; see `pes.py`."""

from typing import Any

import numpy as np
from pes import Asked, World


def element(shape: Any, dtype: Any, run: int) -> Any:
    """An array whose elements are their global index, in another way in each run."""
    index = np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.int64) + 97 * run
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return (index % 3 == 0).reshape(shape)
    if dtype.kind == "c":
        return (index - 1j * index).astype(dtype).reshape(shape)
    return index.astype(dtype).reshape(shape)


def start(world: World, capacity: int, view_of: Any) -> Any:
    """This PE's reach."""
    pe = world.modules["nvshmem"].Pe(0, world.uid(), world.pe, world.n_pes)
    reach = world.modules["devicewires"].DeviceReach(
        pe, world.gpu, capacity, lambda other: Asked(world, other), view_of
    )
    world.mail = reach.mail
    world.double.host_barrier("the start")
    return reach


def fill(chunk: Any) -> None:
    """Make an array wrong."""
    chunk[...] = np.frombuffer(b"\x5a" * chunk.dtype.itemsize, chunk.dtype)[0]


def refusal(call: Any, *args: Any) -> BaseException:
    """What a call raises."""
    try:
        call(*args)
    except Exception as error:
        return error
    raise AssertionError(f"{call} was not refused")
