"""Every element type and every way an array may lie in memory, bit for bit."""

from typing import Any

import dask.array as da
import numpy as np
import pytest
from cluster import Relayout, ar, check, fa, placed
from distributed import Client
from numpy.typing import NDArray

import dask_redist as dr

pytestmark = pytest.mark.ranks(2, 3)

RECORD = np.dtype([("v", "f4", (3,)), ("k", ">i2"), ("s", "S3"), ("t", "M8[ns]")])
DTYPES = [
    *("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "g", "c8", "c16", "G"),
    *(">i4", ">f8", ">c16", "M8[ns]", ">M8[D]", "m8[s]", "S5", "U3", ">U2", "V7", RECORD),
]


def filled(dtype: Any, *shape: int) -> NDArray[Any]:
    """Elements of any type that carry their index in their bytes."""
    index = ar(*shape, dtype="i8")
    dtype = np.dtype(dtype)
    if dtype.kind == "V":
        raw = (index[..., None] * 7 + np.arange(dtype.itemsize)).astype("u1")
        items: NDArray[Any] = np.ascontiguousarray(raw).view(dtype)[..., 0]
        return items
    if dtype.kind in "SU":
        return index.astype("U5").astype(dtype)
    if dtype.kind == "b":
        third: NDArray[Any] = index % 3 == 0
        return third
    if dtype.kind == "c":
        return (index - 0.5j * index).astype(dtype)
    return (index % 120).astype(dtype)


@pytest.mark.wires
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_of_every_type(relayout: Relayout, dtype: Any) -> None:
    a = filled(dtype, 9, 7)
    x = fa(a, (4, 3))
    assert x.dtype == np.dtype(dtype)  # the byte order too
    check(relayout(x, dr.Slab.Y), a)


BASE = ar(9, 14, 4, dtype="i4")


def read_only(a: NDArray[Any]) -> NDArray[Any]:
    a = a.copy()
    a.flags.writeable = False
    return a


WAYS = {
    "Fortran order": np.asfortranarray(BASE),
    "every second": BASE[:, ::2],
    "backwards": BASE[::-1, :, ::-1],
    "axes swapped": BASE.transpose(2, 0, 1),
    "one element for all": np.broadcast_to(np.int32(5), (9, 7, 2)),
    "one row for all": np.broadcast_to(BASE[:1], (5, 14, 4)),
    "read-only": read_only(BASE),
    "not aligned": np.frombuffer(b"x" + BASE.tobytes(), "i4", offset=1).reshape(BASE.shape),
}


@pytest.mark.wires
@pytest.mark.parametrize("way", WAYS)
def test_blocks_that_lie_in_memory_in_every_way(relayout: Relayout, way: str) -> None:
    a = WAYS[way]

    def made_so(block_info: Any = None) -> NDArray[Any]:
        """The block with the strides of the whole, which Dask would not keep on its way here."""
        (box,) = (info["array-location"] for k, info in block_info.items() if k is None)
        return WAYS[way][tuple(slice(*ends) for ends in box)]

    chunks = da.core.normalize_chunks((4, 3, 2), a.shape)
    x = da.map_blocks(made_so, chunks=chunks, dtype=a.dtype, meta=np.empty((0, 0, 0), a.dtype))
    check(relayout(x, dr.Slab.Y), np.ascontiguousarray(a))


def test_a_transposed_array_in_memory(relayout: Relayout, client: Client) -> None:
    x = placed(client, ar(9, 7), (4, 3)).T
    check(relayout(x, dr.Slab.X), np.ascontiguousarray(ar(9, 7).T))


def test_zero_bytes_an_element(relayout: Relayout) -> None:
    a = np.zeros((5, 3), dtype=np.dtype([]))
    y = relayout(fa(a, (2, 3)), dr.Slab.Y)
    assert y.compute().dtype == a.dtype
    assert y.compute().shape == a.shape
