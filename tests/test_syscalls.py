"""What memory there is, read from trees of files as cgroup v1 and v2 lay them out."""

import os
from pathlib import Path

import numpy as np
import pytest

from dask_redist import syscalls
from dask_redist.segment import map_file
from dask_redist.syscalls import PAGE


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_version_2_takes_the_tightest_group_up_to_the_mount(tmp_path: Path) -> None:
    group(tmp_path, memory__max=10, memory__current=10)  # above the mount: never read
    mount = tmp_path / "cgroup"
    group(mount / "a", memory__max=1000, memory__current=400)
    group(mount / "a" / "b", memory__max=900, memory__current=100)
    assert syscalls._cgroup_room("0::/a/b\n", mount) == 600
    group(mount / "a" / "b", memory__max=450, memory__current=100)
    assert syscalls._cgroup_room("0::/a/b\n", mount) == 350
    group(mount / "a" / "b", memory__max=900, memory__current=100)
    group(mount / "a", memory__max="max", memory__current=400)
    assert syscalls._cgroup_room("0::/a/b\n", mount) == 800
    group(mount / "a" / "b", memory__max="max", memory__current=400)
    assert syscalls._cgroup_room("0::/a/b\n", mount) is None


def test_clean_page_cache_counts_as_there(tmp_path: Path) -> None:
    stat = "anon 5\ninactive_file 70\nactive_file 11"
    group(tmp_path, memory__max=1000, memory__current=990, memory__stat=stat)
    assert syscalls._cgroup_room("0::/\n", tmp_path) == 80


def test_a_group_beyond_its_limit_has_nothing(tmp_path: Path) -> None:
    group(tmp_path, memory__max=1000, memory__current=1001)
    assert syscalls._cgroup_room("0::/\n", tmp_path) == 0


def test_version_1_in_a_container_whose_path_is_the_hosts(tmp_path: Path) -> None:
    stat = "inactive_file 1\ntotal_inactive_file 30"
    group(
        tmp_path / "memory",
        memory__limit_in_bytes=500,
        memory__usage_in_bytes=100,
        memory__stat=stat,
    )
    text = "9:name=systemd:/\n5:cpu,cpuacct:/x\n4:memory:/docker/0123\n0::/\n"
    assert syscalls._cgroup_room(text, tmp_path) == 430


def test_the_host_and_the_group_limit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "MemTotal:  9 kB\nMemAvailable:     3 kB\n"
    assert syscalls._host_room(text) == 3072
    monkeypatch.setattr(syscalls, "_cgroup_room", lambda *_: 7)
    assert syscalls.available_memory() == 7
    monkeypatch.setattr(syscalls, "_cgroup_room", lambda *_: None)
    monkeypatch.setattr(syscalls, "_host_room", lambda _: 9)
    assert syscalls.available_memory() == 9
    monkeypatch.setattr(syscalls, "_host_room", lambda _: None)
    assert syscalls.available_memory() > 1 << 60


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd on this system")
def test_pages_come_and_go() -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 8 * PAGE)
    memory = map_file(fd, 8 * PAGE)

    def there() -> int:
        return os.fstat(fd).st_blocks * 512

    assert there() == 0
    syscalls.populate(fd, memory.ctypes.data + PAGE, PAGE, 4 * PAGE)
    assert there() == 4 * PAGE
    memory[PAGE : 5 * PAGE] = 7
    syscalls.drop_mapped(memory.ctypes.data, 8 * PAGE)
    assert there() == 4 * PAGE
    assert (memory[PAGE : 5 * PAGE] == 7).all()
    assert syscalls.give_back(memory.ctypes.data + 2 * PAGE, PAGE)
    assert there() == 3 * PAGE
    assert np.unique(memory[2 * PAGE : 3 * PAGE]).tolist() == [0]
    assert (memory[PAGE : 2 * PAGE] == 7).all()
    os.close(fd)
