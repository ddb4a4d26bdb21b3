"""The process of one PE in one section of `check.py`."""

import importlib
import mmap
import os
import sys
import traceback
from typing import Any


class NotHereError(Exception):
    """This machine, or the double, cannot show it; why."""


def play(
    folders: list[str],
    path: str,
    pe: int,
    n_pes: int,
    double: bool,
    scene: str,
    requests: Any,
    replies: Any,
    pipe: Any,
    log: str,
) -> None:
    """Play a section, and tell its status, rows and words through the pipe."""
    os.setpgid(0, 0)
    printed = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.path[:0] = folders
    try:
        answer = ("passed", _rows(path, pe, n_pes, double, scene, requests, replies), "")
    except NotHereError as why:
        answer = ("not here", [], str(why))
    except BaseException:
        answer = ("failed", [], f"PE {pe}: {traceback.format_exc()}")
    pipe.send(answer)
    pipe.close()
    os._exit(0)  # a library's own end may hang after a failure


def _rows(
    path: str, pe: int, n_pes: int, double: bool, scene: str, requests: Any, replies: Any
) -> list[tuple[str, str]]:
    # Only here are the folders on the path.
    from double import Double
    from install import install
    from meeting import CASE, FAILED, SIZE, Meeting, OtherFailed
    from pes import Office, World

    fd = os.open(path, os.O_RDWR)
    memory = mmap.mmap(fd, SIZE)
    os.close(fd)
    place: Meeting
    if double:
        place, gpu = Double(memory, 1, pe, n_pes, seed=1), None
        install(place)
    else:
        from dask_redist.gpu import Cupy

        place, gpu = Meeting(memory, 1, pe, n_pes), Cupy(0)
        gpu.use()
    assert place.control[CASE] == 1
    office = Office(pe, requests, replies)
    office.world = world = World(place, requests, None, gpu)
    module, _, name = scene.partition(":")
    try:
        rows: list[tuple[str, str]] = getattr(importlib.import_module(module), name)(world, double)
        place.host_barrier("the end")
    except (OtherFailed, NotHereError):
        raise
    except BaseException:
        place.control[FAILED] = 1
        raise
    return rows
