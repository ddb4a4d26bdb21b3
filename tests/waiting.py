"""What tests wait for: a condition, and that the ranks hold nothing."""

import time
from collections.abc import Callable

from cluster import memory
from distributed import Client


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until something is true; it is an error if it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not come true within {seconds:g} s"
        time.sleep(0.02)


def nothing_held(client: Client) -> bool:
    """Whether no rank has memory in use or a run that is not over."""
    try:
        held = memory(client).values()
    except OSError:  # a rank has just left
        return False
    return all(m["in_use"] == 0 and m["runs"] == 0 for m in held)
