"""What the tests of shared memory look at: files, processes, mappings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dask_redist import peers
from dask_redist.arena import Arena
from dask_redist.peers import PageBudget, Peer, attach
from dask_redist.syscalls import PAGE

ROOT = Path(__file__).parent.parent
SMALL = 32 * 1024
CANARY = 0xA5


def reserved(nbytes: int) -> int:
    grain = 64 if nbytes < SMALL else PAGE
    return -(-nbytes // grain) * grain


def pages_there(arena: Arena) -> int:
    """Bytes that the arena's file really takes, but for its header."""
    return os.stat(arena.card.path).st_blocks * 512 - PAGE


def run(script: str, *arguments: object) -> str:
    """A script's output, from a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings(text: str = "dask_redist") -> int:
    return sum(text in line for line in Path("/proc/self/maps").read_text().splitlines())


def second_mapping(arena: Arena, budget: int, monkeypatch: pytest.MonkeyPatch) -> Peer:
    """Attach this process's own arena as if it were another's."""
    with monkeypatch.context() as patch:
        patch.setattr(peers, "arena_here", lambda _: None)
        return attach(arena.card, PageBudget(budget))
