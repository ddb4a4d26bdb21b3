"""The end of arenas: arrays outlive them, and nothing is left."""

import os
from pathlib import Path

import numpy as np
import pytest
from memory_tools import descriptors, mappings, pages_there, reserved, run

from dask_redist.arena import Arena
from dask_redist.syscalls import PAGE


@pytest.mark.parametrize("named", [False, True])
def test_arrays_outlive_their_arena(named: bool, tmp_path: Path) -> None:
    before = descriptors(), mappings()
    arena = Arena(64 << 20, keep=1 << 20, directory=str(tmp_path) if named else None)
    assert len(list(tmp_path.iterdir())) == named
    one, two = arena.allocate([80_000, 80_000])
    arrays = [one.array((10_000,), "f8"), two.array((10_000,), "f8")]
    del one, two
    arrays[1][:] = np.arange(10_000)
    arena.close()
    arena.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="closed"):
        arena.allocate([1])
    assert (arrays[1] == np.arange(10_000)).all()
    del arrays[0]
    assert arena.in_use == reserved(80_000)
    assert mappings() == before[1] + 1
    assert (arrays[0] == np.arange(10_000)).all()
    del arrays
    assert (descriptors(), mappings()) == before
    assert arena.in_use == 0


def test_pages_of_blocks_that_die_after_the_close_go_at_once() -> None:
    arena = Arena(64 << 20, keep=1 << 30)
    one, two = arena.allocate([80_000, 80_000])
    fd = os.open(arena.card.path, os.O_RDONLY)
    arena.close()
    assert os.fstat(fd).st_blocks * 512 == PAGE + 2 * reserved(80_000)
    del one
    assert os.fstat(fd).st_blocks * 512 == PAGE + reserved(80_000)
    os.close(fd)
    del two


def test_an_arena_nobody_closed_leaves_nothing(tmp_path: Path) -> None:
    before = descriptors(), mappings()
    arena = Arena(1 << 20, keep=0, directory=str(tmp_path))
    assert (tmp_path / Path(arena.card.path).name).stat().st_mode & 0o777 == 0o600
    arena.allocate([10])
    del arena
    assert (descriptors(), mappings()) == before
    assert not list(tmp_path.iterdir())


EXIT = """
import sys, threading
import numpy as np
from dask_redist.arena import Arena
arena = Arena(1 << 24, keep=1 << 20, directory=sys.argv[1])
array = arena.allocate([100_000])[0].array((100_000,), "u1")
ring = [arena.allocate([100])[0]]
ring.append(ring)
def late(blocks=arena.allocate([100] * 3)):
    blocks.clear()
import atexit
atexit.register(late)
"""


def test_an_exit_with_live_blocks_is_silent(tmp_path: Path) -> None:
    run(EXIT, tmp_path)
    assert not list(tmp_path.iterdir())


FORK = """
import os, sys, warnings
warnings.simplefilter("ignore")
from dask_redist.arena import Arena
arena = Arena(1 << 24, keep=1 << 20, directory=sys.argv[1])
(block,) = arena.allocate([100_000])
array = block.array((100_000,), "u1")
array[:] = 7
(idle,) = arena.allocate([100_000])
at = idle.offset
del idle
begin, go = os.pipe()
pid = os.fork()
if not pid:
    os.read(begin, 1)
    del array, block
    arena.trim()
    try:
        arena.allocate([1])
    except ValueError as error:
        sys.exit(9 if "forked child" in str(error) else 1)
(again,) = arena.allocate([100_000])
assert again.offset == at
reused = again.array((100_000,), "u1")
reused[:] = 7
os.write(go, b"x")
_, status = os.waitpid(pid, 0)
whole = (array == 7).all() and (reused == 7).all()
print(os.waitstatus_to_exitcode(status), whole, len(os.listdir(sys.argv[1])))
"""


def test_a_forked_child_frees_nothing_of_its_parent(tmp_path: Path) -> None:
    assert run(FORK, tmp_path).split() == ["9", "True", "1"]
    assert not list(tmp_path.iterdir())


def test_without_memfd_a_named_file_takes_its_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    arena = Arena(1 << 20, keep=0)
    assert Path(arena.card.path).parent == tmp_path
    (block,) = arena.allocate([100_000])
    block.array((100_000,), "u1")[:] = 3
    assert pages_there(arena) > 0
    del block
    assert pages_there(arena) == 0
    arena.close()
