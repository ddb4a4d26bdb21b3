"""Whether a process is dead, told by its id and its start time (ids are used again)."""

from __future__ import annotations

from pathlib import Path


def started(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 where the system does not tell.

    Examples
    --------
    >>> import os
    >>> started(os.getpid()) == started(os.getpid())
    True
    """
    state_and_start = _stat(pid)
    return state_and_start[1] if state_and_start else 0


def is_dead(pid: int, start: int) -> bool:
    """Whether the process ``pid`` that started at ``start`` exists no more.

    A process of another host is dead to this one: it cannot have mapped our memory.

    Examples
    --------
    >>> import os
    >>> is_dead(os.getpid(), started(os.getpid()))
    False
    >>> is_dead(os.getpid(), 1)
    True
    """
    if not Path("/proc/self/stat").exists():
        return False
    state_and_start = _stat(pid)
    return state_and_start is None or state_and_start[0] in "ZX" or state_and_start[1] != start


def _stat(pid: int) -> tuple[str, int] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])
