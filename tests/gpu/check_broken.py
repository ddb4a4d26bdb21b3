"""Sections of `check.py` that go wrong, to see that the others are not lost."""

import os
import time

from check_child import NotHereError
from check_one import Rows
from pes import World


def hangs(world: World, double: bool) -> Rows:
    print("it hangs", flush=True)
    while True:
        time.sleep(1)


def exits(world: World, double: bool) -> Rows:
    """As a library does that is misused."""
    os.write(2, b"it exits\n")
    os._exit(255)


def raises(world: World, double: bool) -> Rows:
    if world.pe == 0:
        raise ValueError("it raises")
    world.double.host_barrier("what never comes")
    return []


def is_not_here(world: World, double: bool) -> Rows:
    raise NotHereError("it is not here")
