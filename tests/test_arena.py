"""The arena: blocks never overlap, counts are exact, pages really come and go."""

import contextlib
import ctypes
import itertools
import os
import pickle
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from memory_tools import SMALL, pages_there, reserved, run

from dask_redist.arena import Arena, Block, block_of
from dask_redist.errors import AdmissionError
from dask_redist.syscalls import PAGE


@pytest.fixture
def arena() -> Iterator[Arena]:
    with contextlib.closing(Arena(64 << 20, keep=1 << 20)) as opened:
        yield opened


class Machine(RuleBasedStateMachine):
    """Blocks are filled with a number of their own, which nothing may change while they live."""

    capacity = 60 * PAGE

    def __init__(self) -> None:
        super().__init__()
        self.pressed = False
        self.keep = 5 * PAGE + 100
        self.arena = Arena(self.capacity, self.keep, pressure=lambda: self.pressed)
        self.live: list[tuple[np.ndarray, int, int]] = []  # bytes of a block, mark, offset
        self.marks = 0
        self.condemned: list[tuple[int, int]] = []

    def teardown(self) -> None:
        self.arena.close()

    @rule(
        sizes=st.lists(
            st.one_of(st.integers(0, 300), st.integers(0, SMALL), st.integers(SMALL, 12 * PAGE)),
            max_size=6,
        )
    )
    def allocate(self, sizes: list[int]) -> None:
        before = self.arena.in_use
        try:
            blocks = self.arena.allocate(sizes)
        except AdmissionError:
            assert self.arena.in_use == before
            assert sum(sizes) > 0
            return
        for block, nbytes in zip(blocks, sizes, strict=True):
            assert block.nbytes == nbytes
            assert block.offset % (64 if nbytes < SMALL else PAGE) == 0
            self.marks = self.marks % 250 + 1
            array = block.array((nbytes,), "u1")
            array[:] = self.marks
            if nbytes:
                self.live.append((array, self.marks, block.offset))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), how=st.sampled_from(["free", "cool", "condemn"]))
    def give(self, data: st.DataObject, how: str) -> None:
        array, _, offset = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        block = block_of(array)
        assert block is not None
        if how == "cool":
            block.cool()
        if how == "condemn" and len(self.condemned) < 4 and array.size < 2 * PAGE:
            block.condemn()
            self.condemned.append((offset, reserved(array.size)))

    @rule()
    def trim(self) -> None:
        idle = self.arena.idle
        assert self.arena.trim() == idle
        assert self.arena.idle == 0

    @rule(pressed=st.booleans())
    def press(self, pressed: bool) -> None:
        self.pressed = pressed

    @precondition(lambda self: self.pressed and self.live)
    @rule()
    def nothing_is_kept_under_pressure(self) -> None:
        self.live.pop()
        assert self.arena.idle == 0

    @invariant()
    def agrees(self) -> None:
        ranges = sorted([(offset, reserved(a.size)) for a, _, offset in self.live] + self.condemned)
        for (a, n), (b, _) in itertools.pairwise(ranges):
            assert a + n <= b
        assert all(a >= PAGE and a + n <= self.arena.capacity for a, n in ranges)
        for array, mark, _ in self.live:
            assert (array == mark).all()
        in_use = sum(reserved(a.size) for a, _, _ in self.live)
        assert self.arena.in_use == in_use
        assert self.arena.idle <= self.keep
        assert self.arena.condemned == sum(n for _, n in self.condemned)
        # Pages are under live blocks, idle, or the edges of a condemned range; nowhere else.
        touched = {
            page
            for offset, nbytes in ranges
            for page in range(offset // PAGE, (offset + nbytes - 1) // PAGE + 1)
        }
        assert pages_there(self.arena) <= len(touched) * PAGE + self.arena.idle


TestArena = Machine.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_returned_block_is_handed_out_again_warm(arena: Arena) -> None:
    (block,) = arena.allocate([300_000])
    offset = block.offset
    block.array((300_000,), "u1")[:] = 9
    del block
    assert arena.idle == pages_there(arena) == reserved(300_000)
    (again,) = arena.allocate([300_000])
    assert again.offset == offset
    assert (again.array((300_000,), "u1") == 9).all()  # the very pages: nothing zeroed them
    assert arena.idle == 0


def test_small_blocks_share_pages(arena: Arena) -> None:
    blocks = arena.allocate([100] * 40)
    assert arena.in_use == 40 * 128
    assert pages_there(arena) == 2 * PAGE
    del blocks


def test_cool_gives_the_pages_back(arena: Arena) -> None:
    blocks = arena.allocate([100_000, 100_000, 64, 64])
    blocks[0].cool()
    blocks[2].cool()
    before = pages_there(arena)
    del blocks[0]
    assert pages_there(arena) == before - reserved(100_000)
    del blocks[1]  # shares its page with a live one
    assert pages_there(arena) == before - reserved(100_000)
    assert arena.idle == 0
    blocks[1].cool()
    del blocks[1]
    assert pages_there(arena) == before - reserved(100_000) - PAGE
    assert arena.idle == 0
    assert arena.in_use == reserved(100_000)


def test_keep_bounds_what_stays_warm() -> None:
    arena = Arena(64 << 20, keep=10 * PAGE)
    blocks = arena.allocate([8 * PAGE] * 3)
    del blocks[1]
    assert arena.idle == 8 * PAGE
    del blocks
    assert arena.idle == 10 * PAGE == pages_there(arena)
    arena.close()


def test_under_pressure_nothing_stays_warm() -> None:
    pressed: list[bool] = []
    arena = Arena(64 << 20, keep=1 << 30, pressure=lambda: bool(pressed))
    blocks = arena.allocate([8 * PAGE] * 3)
    del blocks[0]
    assert arena.idle == 8 * PAGE
    pressed.append(True)
    del blocks[0]
    assert arena.idle == 0
    assert pages_there(arena) == 8 * PAGE
    del blocks
    arena.close()


def test_a_condemned_range_is_never_handed_out_again() -> None:
    arena = Arena(8 * PAGE, keep=0)
    (block,) = arena.allocate([8 * PAGE])
    block.condemn()
    assert arena.condemned == 0
    del block
    assert (arena.condemned, arena.in_use, arena.idle) == (8 * PAGE, 0, 0)
    assert pages_there(arena) == 0
    with pytest.raises(AdmissionError, match=f"{8 * PAGE} condemned"):
        arena.allocate([1])
    assert [b.nbytes for b in arena.allocate([0, 0])] == [0, 0]
    arena.close()


def test_warm_and_cold_together_when_neither_has_room() -> None:
    arena = Arena(10 * PAGE, keep=1 << 30)
    blocks = arena.allocate([8 * PAGE])
    blocks.clear()
    assert arena.idle == 8 * PAGE
    (block,) = arena.allocate([10 * PAGE])
    assert arena.in_use == 10 * PAGE
    del block
    arena.close()


RSS = """
import os, sys
from dask_redist.arena import Arena
def rss():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")
arena = Arena(1 << 30, keep=8 << 20)
start = rss()
(block,) = arena.allocate([96 << 20])
array = block.array((96 << 20,), "u1")
print(rss() - start)
array[:] = 1
print(rss() - start)
del array, block
print(rss() - start)
arena.trim()
print(rss() - start)
"""


def test_resident_memory_rises_with_blocks_and_falls_with_them() -> None:
    populated, written, kept, trimmed = (int(n) / (1 << 20) for n in run(RSS).split())
    assert 95 < populated < 98  # before the first touch
    assert 95 < written < 98
    assert 7 < kept < 10
    assert trimmed < 2


def test_a_card_is_plain(arena: Arena) -> None:
    pid, path, nonce, capacity = arena.card
    assert [type(field) for field in arena.card] == [int, str, str, int]
    assert (pid, capacity) == (os.getpid(), arena.capacity)
    assert len(bytes.fromhex(nonce)) == 16
    with open(path, "rb") as file:
        assert file.read(16).hex() == nonce
    assert pickle.loads(pickle.dumps(arena.card)) == arena.card


def test_blocks_are_placed_where_they_say(arena: Arena) -> None:
    block: Block
    for block in arena.allocate([64, 100_000]):
        array = block.array((8,), "i8")
        array[:] = range(8)
        at = array.ctypes.data - block.offset
        assert ctypes.string_at(at, 16).hex() == arena.card.nonce
