"""The sections of `check.py` that two PEs play together, both on one GPU."""

import itertools
import time
from typing import Any

import numpy as np
from check_child import NotHereError
from check_one import Rows, on_gpu, on_host
from pes import World
from scenes import element, start

from dask_redist.segment import part
from dask_redist.wires import Place, Wire


def barrier(world: World, double: bool) -> Rows:
    """Two PEs on one GPU write each other's memory between two barriers."""
    import nvshmem.core as nv

    pe = world.modules["nvshmem"].Pe(0, world.uid(), world.pe, 2)
    memory, stream = pe.allocate(4096), world.gpu.stream()
    theirs = pe.peer_address(memory, 1 - world.pe)
    mine = world.gpu.view(memory.address, (512,), "u8", None)
    world.gpu.copy(mine, 0, stream)
    nv.barrier_all(stream=stream)
    if theirs is not None:
        there = world.gpu.view(theirs, (512,), "u8", None)
        world.gpu.copy(there, on_gpu(element((512,), "u8", world.pe), double), stream)
    nv.barrier_all(stream=stream)
    stream.synchronize()
    seen = on_host(mine, double)
    world.double.host_barrier("seen")
    assert theirs is None or (seen == element((512,), "u8", 1 - world.pe)).all()
    pe.close()
    words = {True: "yes", False: "no"}
    return [("signals", words[pe.has_signals]), ("peer memory", words[theirs is not None])]


def direct(world: World, double: bool) -> Rows:
    """Boxes through peer memory."""
    return _redistributions(world, double, False)


def staged(world: World, double: bool) -> Rows:
    """Boxes in messages, and put in place, as between machines."""
    return _redistributions(world, double, True)


def _redistributions(world: World, double: bool, messages: bool) -> Rows:
    capacity = 1 << 20 if double else 1 << 28
    views: dict[tuple[int, int], Any] = {}
    reach = start(world, capacity, lambda run, number: views[run, number])
    if messages and not reach._pe.has_signals:
        reach.close()
        raise NotHereError("PEs that share a GPU have no signals without CUDA's MPS")
    if not messages and any(address is None for address in reach._addresses.values()):
        reach.close()
        raise NotHereError("the PEs do not reach each other's memory")
    rows, run = [], 0
    shapes = [(11, 13, 7), (64, 5), (3, 0), (32, 32, 32) if double else (256, 256, 128)]
    for shape, dtype in itertools.product(shapes, ("f8", "i2", "?", "c16")):
        if np.dtype(dtype) != "f8" and int(np.prod(shape)) > 2000:
            continue
        for before, after in ((0, 1), (1, 0), (0, 0)):
            took = _one(world, double, reach, views, run, shape, dtype, before, after, messages)
            run += 1
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        speed = "right" if double else f"right, {nbytes / took / 1e9:.2f} GB/s"
        rows.append((f"{shape} {np.dtype(dtype)}", speed))
    reach.close()
    return rows


def _one(
    world: World,
    double: bool,
    reach: Any,
    views: Any,
    run: int,
    shape: tuple[int, ...],
    dtype: str,
    before: int,
    after: int,
    messages: bool,
) -> float:
    """Slabs of one axis to slabs of another one, cut elsewhere; the seconds that it took."""
    expected = element(shape, dtype, run)
    inputs, outputs = _slabs(shape, before, 0), _slabs(shape, after, 1)
    here = expected[outputs[world.pe]]
    (block,) = reach.arena.allocate([here.nbytes])
    views[run, world.pe] = view = block.array(here.shape, dtype)
    if here.nbytes:
        world.gpu.copy(view, 0, reach.out.stream)
    chunk = on_gpu(np.ascontiguousarray(expected[inputs[world.pe]]), double)
    world.gpu.synchronize()
    offsets = world.all_tell(block.offset)
    began = time.perf_counter()
    wires = [_wire(reach, to, run, messages) for to in range(2)]
    for to, wire in enumerate(wires):
        pairs = list(zip(inputs[world.pe], outputs[to], strict=True))
        both = [(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs]
        if all(low < up for low, up in both):
            source = tuple(
                slice(low - a.start, up - a.start)
                for (low, up), (a, _) in zip(both, pairs, strict=True)
            )
            target = tuple(
                slice(low - b.start, up - b.start)
                for (low, up), (_, b) in zip(both, pairs, strict=True)
            )
            place = Place(to, offsets[to], expected[outputs[to]].shape, dtype)
            wire.write(place, target, part(chunk, source))
    for wire in wires:
        wire.start()
    for wire in wires:
        wire.flush()
    world.double.host_barrier("the fence")
    took = time.perf_counter() - began
    assert on_host(view, double).tobytes() == here.tobytes(), (shape, dtype, before, after)
    world.double.host_barrier("compared")
    del views[run, world.pe]
    return took


def _slabs(shape: tuple[int, ...], axis: int, more: int) -> list[tuple[slice, ...]]:
    cut = min(shape[axis], shape[axis] // 2 + more)
    cuts = (slice(0, cut), slice(cut, shape[axis]))
    return [tuple(one if k == axis else slice(0, n) for k, n in enumerate(shape)) for one in cuts]


def _wire(reach: Any, to: int, run: int, messages: bool) -> Wire:
    from dask_redist.devicewires import NetworkWire

    if messages and to != reach._pe.pe:
        return NetworkWire(reach.mail, to, run, 1 << 16, 1 << 12)
    made: Wire = reach.wire_to(to, run)
    return made
