"""Peers in other processes and in this one: attached, watched, let go."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from memory_tools import ROOT, descriptors, mappings, second_mapping

from dask_redist.arena import Arena, ArenaCard
from dask_redist.pages import GRANULE
from dask_redist.peers import LocalPeer, NotAttached, PageBudget, attach

OWNER = """
import json, sys
import numpy as np
from dask_redist.arena import Arena
arena = Arena(1 << 26, keep=0, directory=sys.argv[1] or None)
left, block, right = arena.allocate([4096, 1_000_000, 4096])
fences = [b.array((4096,), "u1") for b in (left, right)]
array = block.array((500, 250), "i8")
for a in (*fences, array.view("u1")):
    a[...] = 0xA5
print(json.dumps([arena.card, block.offset]), flush=True)
for line in sys.stdin:
    wrong = array != np.arange(array.size).reshape(array.shape)
    print(int(wrong.sum()), all((f == 0xA5).all() for f in fences), flush=True)
"""


class Owner:
    """A process that owns an arena with one block: (500, 250) int64, poisoned."""

    def __init__(self, directory: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, directory],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        self.inbox, self.outbox = self.process.stdout, self.process.stdin
        card, self.offset = json.loads(self.inbox.readline())
        self.card = ArenaCard(*card)

    def wrong(self) -> str:
        """How many elements are not their own index, and whether the fences stand."""
        self.outbox.write("?\n")
        self.outbox.flush()
        return self.inbox.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)

    def end(self) -> None:
        self.kill()
        self.inbox.close()
        with contextlib.suppress(BrokenPipeError):
            self.outbox.close()


@pytest.fixture(params=["memfd", "named file"])
def owner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Owner]:
    started = Owner(str(tmp_path) if request.param == "named file" else "")
    yield started
    started.end()


def test_every_piece_arrives_in_another_process(owner: Owner) -> None:
    budget = PageBudget(4 * GRANULE)
    peer = attach(owner.card, budget)
    assert peer.wire == "shared memory"
    whole = np.arange(125_000).reshape(500, 250)
    for rows in (slice(0, 7), slice(7, 400), slice(400, 500)):
        for columns in (slice(0, 1), slice(1, 250)):
            place = (rows, columns)
            peer.write(peer.view(owner.offset, (500, 250), "<i8"), place, whole[place])
    assert owner.wrong() == "0 True"
    assert budget.mapped <= 4 * GRANULE
    piece = whole[:1, :3] + 1
    peer.write(peer.view(owner.offset, (500, 250), "<i8"), (slice(0, 1), slice(0, 3)), piece)
    assert owner.wrong() == "3 True"  # so the check can fail
    peer.close()


def test_the_pages_of_a_killed_owner_stay_until_the_close(owner: Owner) -> None:
    before = descriptors(), mappings()
    peer = attach(owner.card, PageBudget(1 << 20))
    whole = np.arange(125_000).reshape(500, 250)
    peer.write(peer.view(owner.offset, (500, 250), "<i8"), (slice(None), slice(None)), whole)
    owner.kill()
    view = peer.view(owner.offset, (500, 250), "i8")
    assert (view == whole).all()
    peer.write(peer.view(owner.offset, (500, 250), "<i8"), (slice(0, 1), slice(None)), whole[:1])
    del view
    peer.close()
    assert (descriptors(), mappings()) == before
    if owner.card.path.startswith("/proc/"):
        with pytest.raises(NotAttached, match=f"process {owner.card.pid} cannot be opened"):
            attach(owner.card, PageBudget(1 << 20))
    assert (descriptors(), mappings()) == before


def test_a_wrong_card_is_refused_and_leaves_nothing(owner: Owner, tmp_path: Path) -> None:
    before = descriptors(), mappings()
    other = tmp_path / "other"
    other.write_bytes(b"x")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    wrong = {
        "another nonce": owner.card._replace(nonce="00" * 16),
        "another file": owner.card._replace(capacity=owner.card.capacity + 4096),
        "cannot be opened": owner.card._replace(path="/proc/self/fd/9999"),
        "not the arena": owner.card._replace(path=str(other)),
        "process": owner.card._replace(path=str(fifo)),
    }
    for match, card in wrong.items():
        with pytest.raises(NotAttached, match=match):
            attach(card, PageBudget(1 << 20))
    assert (descriptors(), mappings()) == before


def test_ranks_of_one_process_share_one_mapping() -> None:
    arena = Arena(1 << 24, keep=0)
    before = descriptors(), mappings()
    peer = attach(ArenaCard(*json.loads(json.dumps(arena.card))), PageBudget(1 << 20))
    assert isinstance(peer, LocalPeer)
    assert peer.wire == "direct"
    assert (descriptors(), mappings()) == before
    arena.close()
    assert mappings() == before[1]  # the peer's now
    peer.close()
    assert mappings() == before[1] - 1
    with pytest.raises(NotAttached):
        attach(arena.card, PageBudget(1 << 20))


def test_a_close_waits_for_no_write_and_breaks_none(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(1 << 24, keep=0)
    (block,) = arena.allocate([8000])
    array = block.array((1000,), "f8")
    before = mappings()
    peer = second_mapping(arena, 1 << 20, monkeypatch)
    real = np.copyto

    def closing(place: np.ndarray, piece: np.ndarray) -> None:
        peer.close()
        assert mappings() == before + 1
        real(place, piece)

    monkeypatch.setattr(np, "copyto", closing)
    peer.write(peer.view(block.offset, (1000,), "<f8"), (slice(None),), np.arange(1000.0))
    monkeypatch.undo()
    assert (array == np.arange(1000.0)).all()
    assert mappings() == before
    peer.close()
    arena.close()
