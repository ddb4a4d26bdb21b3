"""Blocks: arrays of every kind over them, and their return from anywhere."""

import contextlib
import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from memory_tools import CANARY, SMALL, pages_there

from dask_redist.arena import Arena, block_of
from dask_redist.syscalls import give_back


@pytest.fixture
def arena() -> Iterator[Arena]:
    with contextlib.closing(Arena(64 << 20, keep=1 << 20)) as opened:
        yield opened


DTYPES = [
    "u1", "i4", ">i2", "f2", "f8", ">f8", "g", "G", "c16", "?", "M8[ns]", "m8[D]", "S5", "U3", "V7",
    "V0", "S0", [], [("a", "i2"), ("b", ">f8", (2,))],
    np.dtype([("a", "i1"), ("b", "f8")], align=True),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (3, 0, 2), (2, 3, 4), (1, 20_011)], ids=str)
def test_arrays_of_every_dtype(arena: Arena, dtype: Any, shape: tuple[int, ...]) -> None:
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    left, block, right = arena.allocate([64, size, 64])
    fences = [b.array((64,), "u1") for b in (left, right)]
    for fence in fences:
        fence[:] = CANARY
    array = block.array(shape, dtype)
    assert array.dtype == dtype
    assert array.shape == shape
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert array.flags.aligned
    assert block_of(array) is block
    assert block_of(array[..., None][::-1]) is block
    pattern = (np.arange(size) % 251).astype("u1")
    block.array((size,), "u1")[:] = pattern
    assert array.tobytes() == pattern.tobytes()
    zeros = np.ndarray(shape, dtype, buffer=np.zeros(max(size, 1), "u1"))
    array[...] = zeros
    assert str(array.tolist()) == str(zeros.tolist())
    assert all((fence == CANARY).all() for fence in fences)


@pytest.mark.parametrize(
    "dtype", ["O", [("a", "i4"), ("b", "O")], np.dtypes.StringDType()], ids=str
)
def test_objects_are_refused(arena: Arena, dtype: Any) -> None:
    (block,) = arena.allocate([160])
    with pytest.raises(TypeError, match="Python objects"):
        block.array((2,), dtype)


def test_an_array_larger_than_its_block_is_refused(arena: Arena) -> None:
    # 56 bytes are reserved as 64: the rounding belongs to nobody.
    (block,) = arena.allocate([56])
    with pytest.raises(ValueError, match=r"needs 64 bytes .* there are 56"):
        block.array((8,), "f8")
    assert block.array((7,), "f8").shape == (7,)


@pytest.mark.parametrize("sizes", [[-1], [5, -3]])
def test_negative_sizes_are_refused(arena: Arena, sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="negative"):
        arena.allocate(sizes)
    assert arena.in_use == 0


def test_views_and_exports_keep_a_block_and_copies_do_not(arena: Arena) -> None:
    (block,) = arena.allocate([800])
    array = block.array((10, 10), "f8")
    held: list[Any] = [
        array[3:, ::-2].T,
        memoryview(array[2:].data),
        np.asarray(array.data),
        pickle.PickleBuffer(array.data).raw(),
        array.view("u1").reshape(-1)[5:],
        np.lib.stride_tricks.as_strided(array, (2,), (8,)),
    ]
    assert block_of(held[1]) is block
    assert block_of(array.copy()) is None
    assert block_of(pickle.loads(pickle.dumps(array))) is None
    gone = weakref.ref(block)
    del block, array
    while held:
        assert arena.in_use == 832
        assert gone() is not None
        held.pop()
    assert gone() is None
    assert arena.in_use == 0


@pytest.mark.parametrize("stranger", [None, 5, "x", np.arange(3), memoryview(b"x")])
def test_what_lies_in_no_block(stranger: object) -> None:
    assert block_of(stranger) is None


def test_a_cycle_returns_its_block_when_it_is_collected(arena: Arena) -> None:
    (block,) = arena.allocate([1000])
    ring: list[Any] = [block.array((1000,), "u1")]
    ring.append(ring)
    gc.disable()
    try:
        del block, ring
        assert arena.in_use == 1024
    finally:
        gc.enable()
    gc.collect()
    assert arena.in_use == 0


def test_a_block_that_dies_while_its_thread_holds_the_lock(arena: Arena) -> None:
    blocks = arena.allocate([1000, 1000])
    with arena._locked():
        del blocks[0]  # as the garbage collector may do at any allocation of an object
        assert arena._in_use == 2048
    assert arena._in_use == 1024  # whoever held the lock has looked again


def test_a_block_that_dies_while_others_are_sorted_in(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(1 << 24, keep=0)
    blocks = arena.allocate([100_000, 200_000])

    def collecting(address: int, length: int) -> bool:
        blocks.clear()  # after the queue was read, before the lock is released
        return give_back(address, length)

    monkeypatch.setattr("dask_redist.arena.give_back", collecting)
    del blocks[0]
    assert not blocks
    assert arena._in_use == 0  # without a further call that would look
    monkeypatch.undo()
    arena.close()


def test_release_from_many_threads(arena: Arena) -> None:
    start = threading.Barrier(6)
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        mine: list[np.ndarray] = []
        start.wait()
        for _ in range(200):
            sizes = rng.choice([1, 64, 500, SMALL, 70_000], size=rng.integers(1, 4)).tolist()
            for block in arena.allocate(sizes):
                array = block.array((block.nbytes,), "u1")
                array[:] = seed
                mine.append(array)
            while len(mine) > 5:
                array = mine.pop(int(rng.integers(len(mine))))
                wrong.extend(array[array != seed].tolist())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert arena.in_use == 0
    assert arena.idle <= arena.keep
    assert pages_there(arena) == arena.idle
