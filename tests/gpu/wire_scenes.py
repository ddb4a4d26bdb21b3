"""What wires refuse, and what they leave behind then; see `pes.py`."""

from typing import Any

import numpy as np
from fakegpu import array_at
from pes import World
from scenes import refusal, start

from dask_redist.wires import Place


def bad_headers(world: World) -> None:
    """A message whose headers are wrong is refused, and its room is free again."""
    out: dict[tuple[int, int], Any] = {}
    reach = start(world, 2048, lambda run, number: out[run, number])
    if world.pe == 0:
        buffer = reach.mail.take(8)
        reach.mail.pack(buffer, 0, np.arange(8, dtype="u1"))
        for headers, kind in (([[3, 0, 8]], KeyError), ([[0, 0, 9]], ValueError)):
            for _ in range(8):
                error = refusal(reach.mail.send, 1, 0, headers, buffer)
                assert isinstance(error, kind), repr(error)
        reach.mail.send(1, 0, [[0, 0, 8]], buffer)
        del buffer
    else:
        out[0, 0] = np.zeros(8, "u1")
    world.double.host_barrier("the message")
    if world.pe == 1:
        assert out[0, 0].tolist() == list(range(8))
    reach.arena.allocate([2048])
    reach.close()


def no_room(world: World) -> None:
    """An owner without room refuses before anything is sent; the sender may try again."""
    out = np.zeros((6, 4), "u1")
    reach = start(world, 1024, lambda run, number: out)
    held = reach.arena.allocate([1024]) if world.pe == 1 else []
    world.double.host_barrier("full")
    wire = reach.wire_to(1, 0, limit=16)
    place, box = Place(0, 512, (6, 4), "u1"), (slice(1, 5), slice(0, 2))
    if world.pe == 0:
        wire.write(place, box, np.arange(8, dtype="u1").reshape(4, 2))
        error = refusal(wire.flush)
        assert "no room for 8 bytes" in str(error), error
        assert wire.held == 8
    world.double.host_barrier("refused")
    held.clear()
    world.double.host_barrier("free")
    if world.pe == 0:
        wire.flush()
        assert wire.held == 0
    world.double.host_barrier("sent")
    if world.pe == 1:
        assert out[1:5, :2].ravel().tolist() == list(range(8))
        assert out.sum() == sum(range(8))
    reach.close()


def given_up(world: World) -> None:
    """A run is given up before its flush: what it has put keeps its source until it has landed."""
    reach = start(world, 1024, lambda run, number: None)
    values = np.arange(16, dtype="u1")
    if world.pe == 0:
        wire = reach.wire_to(1, 0, alone=1)
        wire.write(Place(0, 512, (16,), "u1"), (slice(0, 16),), values)
        assert wire.held == 16
        del wire
        for block in reach.arena.allocate([512, 512]):
            block.array((512,), "u1")[:] = 0xDD
    reach.out.settle()
    world.double.host_barrier("settled")
    if world.pe == 1:
        there = array_at(reach.arena.address + 512, (16,), "u1", None)
        assert there.tolist() == values.tolist()
    reach.close()


def shared_gpu(world: World) -> None:
    """Without signals all goes through peer memory, or the start says why not."""
    reach = start(world, 1024, lambda run, number: None)
    assert "MPS" in str(
        refusal(reach.mail._pe.signal_wait, reach.arena.slots, 1, world.gpu.stream())
    )
    reach.close()


def outside(world: World) -> None:
    """A place that does not lie in its owner's arena is refused before it is written."""
    reach = start(world, 1024, lambda run, number: None)
    for offset in (-1, 1024 + 512 - 3):
        piece, box = np.zeros(4, "u1"), (slice(0, 4),)
        wire = reach.wire_to(1 - world.pe, 0, alone=1)
        error = str(refusal(wire.write, Place(7, offset, (4,), "u1"), box, piece))
        assert f"4 bytes at {offset}" in error, error
        assert wire.held == 0
    reach.close()
