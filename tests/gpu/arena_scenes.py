"""A PE and its arena, and CuPy's views of memory; see `pes.py`."""

from typing import Any

import numpy as np
from pes import World
from scenes import refusal, start

from dask_redist.peers import matching
from dask_redist.segment import part


def arena(world: World) -> None:
    """Blocks are all or none, return when their last array dies, and are apart."""
    reach = start(world, 8 * 512, lambda run, number: None)
    made = reach.arena
    first = made.allocate([0, 1, 512, 513])
    offsets = [block.offset for block in first]
    assert [block.nbytes for block in first] == [0, 1, 512, 513]
    assert all(offset % 512 == 0 for offset in offsets)
    assert made.in_use == 4 * 512
    assert "room for 2100 bytes in 2 blocks: of its 4096 bytes 2048 are in use" in str(
        refusal(made.allocate, [1, 2099])
    )
    assert made.in_use == 4 * 512
    array = first[3].array((3, 5), "f8", 8)
    assert array.ctypes.data == made.address + offsets[3] + 8
    assert "does not fit" in str(refusal(first[3].array, (65,), "f8"))
    assert "does not fit" in str(refusal(first[3].array, (64,), "f8", 8))
    assert isinstance(refusal(first[0].array, (1,), "O"), TypeError)
    corner = array[1:, 2:]
    del array
    first.clear()
    assert len(made.allocate([512] * 6)) == 6  # all but what the corner lies in
    assert "no room" in str(refusal(made.allocate, [512] * 7))
    del corner
    condemned = made.allocate([512] * 8)
    for block in condemned[:3]:
        block.condemn()
    condemned.clear()
    assert "1536 are in use" in str(refusal(made.allocate, [512] * 6))
    made.allocate([512] * 5)
    reach.close()


def pe_itself(world: World) -> None:
    """What a PE refuses before the library hangs or exits."""
    nvshmem = world.modules["nvshmem"]
    pe = nvshmem.Pe(0, world.uid(), world.pe, world.n_pes)
    other, stream = 1 - world.pe, world.gpu.stream()
    for wrong in (world.pe, -1, 2):
        memory = nvshmem.Symmetric(0, 8, None)
        assert "is no other one of 2" in str(refusal(pe.peer_address, memory, wrong))
        assert "is no other one of 2" in str(refusal(pe.put_nbi, 0, 0, 8, wrong, stream))
        assert "is no other one of 2" in str(refusal(pe.put_signal, 0, 0, 8, 0, 1, wrong, stream))
        assert "is no other one of 2" in str(refusal(pe.signal, 0, 1, wrong, stream))
    assert "at least one" in str(refusal(pe.allocate, 0))
    memories = [pe.allocate(64), pe.allocate(4096)]
    address = pe.peer_address(memories[1], other)
    assert address == world.double._there(memories[1].address, other)
    pe.close()
    assert world.double.calls[-2] == "free", "not all that was allocated is free"
    assert "has ended" in str(refusal(pe.quiet, stream))
    assert world.double.init_status() == 0


def cupy_views(world: World) -> None:
    """CuPy's own arithmetic of addresses and strides, on memory that nobody touches."""
    import cupy

    base = 1 << 30
    one = world.modules["gpu"].Cupy(0)
    for dtype in ("f8", "f4", "i2", "?", "c16", "u1"):
        mine = np.empty((4, 5, 6), dtype)
        origin = mine.ctypes.data
        owner = bytearray(1)
        theirs = one.view(base, (4, 5, 6), dtype, owner)
        assert isinstance(theirs, cupy.ndarray)
        assert theirs.flags.c_contiguous
        assert theirs.data.device_id == 0
        box = (slice(1, 3), slice(2, 5), slice(3, 6))
        for a, b in ((mine, theirs), (part(mine, box), part(theirs, box))):
            assert a.shape == b.shape
            assert a.strides == b.strides
            assert a.nbytes == b.nbytes
            assert a.dtype == b.dtype
            assert a.flags.c_contiguous == b.flags.c_contiguous
            pointer: Any = b.data
            assert a.ctypes.data - origin == pointer.ptr - base
        piece: Any = part(theirs, box)
        assert matching(piece, (2, 3, 3), np.dtype(dtype)) is piece
        assert isinstance(refusal(matching, theirs, (4, 5), np.dtype(dtype)), ValueError)
        assert isinstance(refusal(matching, theirs, (4, 5, 6), np.dtype("i8")), TypeError)
    assert one.view(base, (3, 0), "f8", None).size == 0
    assert part(one.view(base, (), "f8", None), ()).shape == ()
