"""Admission: refused before it kills, and rolled back."""

import contextlib
from collections.abc import Iterator

import pytest
from memory_tools import CANARY, SMALL, pages_there

from dask_redist import admission, syscalls
from dask_redist.arena import Arena
from dask_redist.errors import AdmissionError
from dask_redist.syscalls import PAGE


@pytest.fixture
def arena() -> Iterator[Arena]:
    with contextlib.closing(Arena(64 << 20, keep=1 << 20)) as opened:
        yield opened


def test_no_room_is_refused_before_a_page_is_touched(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "available_memory", lambda: (16 << 20) + 5 * PAGE)
    monkeypatch.setattr(admission, "populate", lambda *_: pytest.fail("touched"))
    with pytest.raises(AdmissionError, match=rf"{16 * PAGE} bytes are needed, {5 * PAGE} are"):
        arena.allocate([100, 15 * PAGE])
    assert (arena.in_use, arena.idle, pages_there(arena)) == (0, 0, 0)


def test_idle_pages_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(64 << 20, keep=1 << 30)
    arena.allocate([50 * PAGE]).clear()
    monkeypatch.setattr(
        admission,
        "available_memory",
        lambda: (16 << 20) + 60 * PAGE - pages_there(arena),
    )
    (block,) = arena.allocate([60 * PAGE])
    assert arena.idle == 0
    del block
    arena.close()


def test_room_is_looked_at_again_between_portions(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for 20 pages, then another process takes some of it."""
    others = 0
    monkeypatch.setattr(admission, "_PORTION", 8 * PAGE)
    monkeypatch.setattr(
        admission,
        "available_memory",
        lambda: (16 << 20) + 20 * PAGE - pages_there(arena) - others * bool(pages_there(arena)),
    )
    arena.allocate([20 * PAGE]).clear()
    arena.trim()
    others = PAGE
    with pytest.raises(AdmissionError, match=rf"{12 * PAGE} bytes are needed, {11 * PAGE} are"):
        arena.allocate([20 * PAGE])
    assert (arena.in_use, arena.idle, pages_there(arena)) == (0, 0, 0)


@pytest.mark.parametrize("good", [0, 1])
def test_a_full_file_system_rolls_back(
    good: int, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm, live = arena.allocate([3 * PAGE + 64, 100])
    marks = live.array((100,), "u1")
    marks[:] = CANARY
    del warm
    before = (arena.in_use, arena.idle, pages_there(arena), arena._warm.ranges())
    real = syscalls.populate
    calls: list[int] = []

    def full(fd: int, address: int, offset: int, length: int) -> None:
        real(fd, address, offset, length)
        calls.append(length)
        if len(calls) > good:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(admission, "populate", full)
    monkeypatch.setattr(admission, "_PORTION", 8 * PAGE)
    with pytest.raises(AdmissionError, match="No space left on device"):
        arena.allocate([200, 3 * PAGE, 20 * PAGE, 100, SMALL - 1])
    assert len(calls) == good + 1
    assert (arena.in_use, arena.idle, pages_there(arena), arena._warm.ranges()) == before
    assert (marks == CANARY).all()
