"""Whether a process is dead, told by its id and its start time (ids are used again)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process, such that no other one is ever taken for it.

    Attributes
    ----------
    pid
        Its id.
    started
        When it began, in clock ticks since boot; 0 where the system does not tell.
    namespace
        Where its id has a meaning: ids of a container mean nothing to another one.
    """

    pid: int
    started: int
    namespace: str

    @classmethod
    def current(cls) -> Process:
        """The process that asks.

        Examples
        --------
        >>> Process.current().is_dead()
        False
        """
        pid = os.getpid()
        try:
            namespace = os.readlink("/proc/self/ns/pid")
        except OSError:
            namespace = ""
        found = _stat(pid)
        return cls(pid, found[1] if found else 0, namespace)

    def is_dead(self) -> bool | None:
        """Whether the process exists no more; None where that cannot be told from here.

        Examples
        --------
        >>> me = Process.current()
        >>> me._replace(started=me.started + 1).is_dead()
        True
        >>> me._replace(namespace="pid:[0]").is_dead() is None
        True
        """
        if self.namespace != Process.current().namespace or not self.namespace:
            return None
        found = _stat(self.pid)
        return found is None or found[0] in "ZX" or found[1] != self.started


def _stat(pid: int) -> tuple[str, int] | None:
    """State and start time of a process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])
