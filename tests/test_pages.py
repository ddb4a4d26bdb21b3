"""The page budget: what a write touches, how it is cut, and what stays mapped."""

import json
import math
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_tools import run

from dask_redist.arena import Arena
from dask_redist.pages import GRANULE, PageBudget, Store, portions, touched
from dask_redist.segment import part


@st.composite
def views(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """A box of a C-contiguous array of bytes, of some item size, and an origin before it."""
    item = draw(st.sampled_from([1, 7, 8, 1000]))
    sizes = st.sampled_from([1, 2, 3, 5, 40, 300])
    shape = draw(st.lists(sizes, max_size=4).filter(lambda s: math.prod(s) * item < 3_000_000))
    before = draw(st.integers(0, 3 * GRANULE))
    memory = np.empty(before + math.prod(shape) * item, "u1")
    array: np.ndarray = np.ndarray(shape, f"V{item}", buffer=memory, offset=before)
    box = []
    for length in shape:
        lower = draw(st.integers(0, length))
        box.append(slice(lower, draw(st.integers(lower, length))))
    view = part(array, box)
    for axis in range(view.ndim):
        if draw(st.integers(0, 5)) == 0:
            view = np.flip(view, axis)
    return view, memory.ctypes.data


def truly_touched(view: np.ndarray, origin: int) -> set[int]:
    starts = np.full(view.shape, view.ctypes.data - origin, "i8") if view.size else np.empty(0)
    for axis, stride in enumerate(view.strides):
        if view.size:
            index = np.arange(view.shape[axis]) * stride
            starts = starts + index.reshape([-1 if k == axis else 1 for k in range(view.ndim)])
    last = starts + view.itemsize - 1
    return set(np.unique(starts // GRANULE)) | set(np.unique(last // GRANULE))


@given(views())
@settings(deadline=None, max_examples=300)
def test_what_a_write_touches(drawn: tuple[np.ndarray, int]) -> None:
    view, origin = drawn
    found = list(touched(view, origin))
    true = truly_touched(view, origin)
    assert found == sorted(true)


@pytest.mark.parametrize("gap", [-1, 0, 1, GRANULE, 2 * GRANULE])
@pytest.mark.parametrize("before", [0, 5, GRANULE - 5])
def test_rows_about_a_granule_apart(gap: int, before: int) -> None:
    memory = np.empty(30 * GRANULE, "u1")
    rows = np.lib.stride_tricks.as_strided(memory[before:], (7, 10), (10 + GRANULE + gap, 1))
    origin = memory.ctypes.data
    assert list(touched(rows, origin)) == sorted(truly_touched(rows, origin))


@given(
    shape=st.lists(st.integers(0, 7), max_size=4),
    most=st.integers(1, 60),
    weight=st.integers(1, 3),
)
def test_portions_cover_a_box_once(shape: list[int], most: int, weight: int) -> None:
    seen = np.zeros(shape, int)

    def cost(box: Sequence[slice]) -> int:
        return weight * part(seen, box).size

    for box in portions(shape, cost, most):
        assert cost(box) <= most or part(seen, box).size == 1
        part(seen, box)[...] += 1
    assert (seen == 1).all()


def test_portions_are_few() -> None:
    boxes = list(portions((1000,), lambda box: box[0].stop - box[0].start, 100))
    assert [box[0].stop - box[0].start for box in boxes] == [100] * 10


def copied(budget: PageBudget, memory: np.ndarray, slot: int, at: int, size: int) -> None:
    target = memory[at * GRANULE : at * GRANULE + size]
    budget.write([Store(target, np.full(size, at % 251, "u1"), budget, slot, memory.ctypes.data)])
    assert (target == at % 251).all()


def test_the_least_recently_written_leaves_first(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[tuple[int, int]] = []
    arena = Arena(1 << 24, keep=0)
    arena.allocate([1 << 24])
    memory = arena.memory
    monkeypatch.setattr(
        "dask_redist.pages.drop_mapped",
        lambda address, length: dropped.append((address - memory.ctypes.data, length)),
    )
    budget = PageBudget(4 * GRANULE)
    slot = budget.enrol(memory)
    for at in (0, 1, 2, 3, 0):
        copied(budget, memory, slot, at, 10)
    assert (dropped, budget.mapped) == ([], 4 * GRANULE)
    copied(budget, memory, slot, 9, 10)
    assert dropped == [(GRANULE, GRANULE)]
    dropped.clear()
    copied(budget, memory, slot, 12, 2 * GRANULE)  # in portions of one granule each
    assert dropped == [(2 * GRANULE, GRANULE), (3 * GRANULE, GRANULE)]
    budget.leave(slot)
    assert budget.mapped == 0
    budget.leave(slot)
    arena.close()


def test_neighbours_are_dropped_together_and_never_beyond_the_mapping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dropped: list[tuple[int, int]] = []
    size = 40 * GRANULE + 4096
    memory = np.zeros(size, "u1")
    monkeypatch.setattr(
        "dask_redist.pages.drop_mapped",
        lambda address, length: dropped.append((address - memory.ctypes.data, length)),
    )
    budget = PageBudget(32 * GRANULE)
    slot = budget.enrol(memory)
    copied(budget, memory, slot, 40, 4096)
    for at in range(0, 32, 2):
        copied(budget, memory, slot, at, 2 * GRANULE)
    assert dropped == [(40 * GRANULE, 4096)]
    copied(budget, memory, slot, 32, 2 * GRANULE)
    assert dropped[1:] == [(0, 2 * GRANULE)]


def test_a_write_after_the_mapping_left_is_not_counted() -> None:
    memory = np.zeros(GRANULE, "u1")
    budget = PageBudget(GRANULE)
    slot = budget.enrol(memory)
    budget.leave(slot)
    copied(budget, memory, slot, 0, 100)
    assert budget.mapped == 0


def test_a_granule_dropped_under_a_writer_counts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread writes a whole budget between the registration of a granule and its copy."""
    monkeypatch.setattr("dask_redist.pages.drop_mapped", lambda *_: None)
    memory = np.zeros(40 * GRANULE, "u1")
    budget = PageBudget(16 * GRANULE)
    slot = budget.enrol(memory)
    real = np.copyto

    def others() -> None:
        for at in range(20, 36):
            copied(budget, memory, slot, at, 1)

    def interrupted(target: np.ndarray, piece: np.ndarray) -> None:
        monkeypatch.setattr(np, "copyto", real)
        thread = threading.Thread(target=others)
        thread.start()
        thread.join()
        assert slot * (1 << 40) not in budget._lru
        real(target, piece)

    monkeypatch.setattr(np, "copyto", interrupted)
    copied(budget, memory, slot, 0, 1)
    assert slot * (1 << 40) in budget._lru
    assert budget.mapped == 16 * GRANULE


WRITER = """
import json, os, sys, threading
import numpy as np
from dask_redist.arena import ArenaCard
from dask_redist.peers import PageBudget, attach

def rss():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")

card, offset, shape, limit, turn = json.loads(sys.argv[1])
budget = PageBudget(limit)
peer = attach(card, budget)
assert peer.wire == "shared memory"
rows, columns = shape
peer.write(peer.view(offset, shape, "<i8"), (slice(0, 0), slice(0, 0)), np.empty((0, 0), "i8"))
start, most, done = rss(), 0, False
def watch():
    global most
    while not done:
        most = max(most, rss())
thread = threading.Thread(target=watch)
thread.start()
if turn == "rows":
    pieces = [(slice(k, k + rows // 8), slice(None)) for k in range(0, rows, rows // 8)]
else:
    pieces = [(slice(None), slice(k, k + columns // 8)) for k in range(0, columns, columns // 8)]
for place in pieces:
    i, j = np.ogrid[place[0].indices(rows)[0]:place[0].indices(rows)[1],
                    place[1].indices(columns)[0]:place[1].indices(columns)[1]]
    piece = np.broadcast_to(i, (i.shape[0], j.shape[1]))     # takes no memory of its own
    peer.write(peer.view(offset, shape, "<i8"), place, piece)
done = True
thread.join()
end = rss()
peer.close()
print(json.dumps([most - start, end - start, rss() - start]))
"""


@pytest.mark.parametrize("turn", ["rows", "columns"])
def test_a_writers_memory_stays_within_its_budget(turn: str) -> None:
    limit = 8 << 20
    shape = (1280, 8192)  # 80 MiB, ten budgets
    arena = Arena(1 << 28, keep=0)
    (block,) = arena.allocate([math.prod(shape) * 8])
    array = block.array(shape, "i8")
    array[:] = -1
    arguments = json.dumps([arena.card, block.offset, shape, limit, turn])
    most, end, closed = json.loads(run(WRITER, arguments))
    slack = 3 << 20  # the interpreter's own
    # Columns touch an eighth of each granule, so they map less than what is counted.
    assert limit // (2 if turn == "rows" else 16) < end < limit + slack
    assert most < limit + slack
    assert closed < slack
    assert (array == np.arange(shape[0])[:, None]).all()
    del array, block
    arena.close()
