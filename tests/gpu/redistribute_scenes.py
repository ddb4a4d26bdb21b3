"""Redistributions that PEs make together over the double; see `pes.py`."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from fakegpu import FakeStream, array_at
from pes import World
from scenes import element, fill, start

from dask_redist.segment import part
from dask_redist.wires import Place

MARGIN = 512  # bytes of canaries on each side of an output

Chunk = tuple[int, tuple[int, ...], tuple[int, ...]]  # owner, lower and upper corner


def redistribution(
    world: World,
    shape: tuple[int, ...],
    dtype: str,
    inputs: list[Chunk],
    outputs: list[Chunk],
    runs: int = 2,
    capacity: int = 1 << 16,
    fortran: bool = False,
    swapped: bool = False,
    slow: float = 0.0,
    threads: int = 1,
    **sizes: int,
) -> dict[str, int]:
    """Redistribute an array several times through the same arena; all is compared with NumPy.

    Chunks are computed on the GPU: what is read before is wrong. They are overwritten there as soon
    as they have been written. Results are read on the GPU too, ``slow`` seconds after their last
    array has died.
    """
    views: dict[tuple[int, int], Any] = {}
    reach = start(world, capacity, lambda run, number: views[run, number])
    item = np.dtype(dtype).itemsize
    user = world.gpu.current()
    sent: dict[str, int] = {}
    reads: list[Any] = []
    for run in range(runs):
        expected = element(shape, dtype, run)
        mine = [k for k, (owner, _, _) in enumerate(outputs) if owner == world.pe]
        shapes = {k: tuple(np.subtract(outputs[k][2], outputs[k][1]).tolist()) for k in mine}
        sizes_of = [int(np.prod(shapes[k], dtype=np.int64)) * item for k in mine]
        blocks = dict(
            zip(mine, reach.arena.allocate([2 * MARGIN + n for n in sizes_of]), strict=True)
        )
        for k, nbytes in zip(mine, sizes_of, strict=True):
            blocks[k].array((nbytes + 2 * MARGIN,), "u1")[...] = 0xEE
            views[run, k] = blocks[k].array(shapes[k], dtype, MARGIN)
        table: dict[int, int] = {}
        for told in world.all_tell({k: block.offset + MARGIN for k, block in blocks.items()}):
            table |= told
        if swapped and len(table) > 1:
            one, other = sorted(table)[:2]
            table[one], table[other] = table[other], table[one]
        wires: dict[int, Any] = {to: reach.wire_to(to, run, **sizes) for to in range(world.n_pes)}

        def contribute(
            lower: Any,
            upper: Any,
            expected: Any = expected,
            table: dict[int, int] = table,
            wires: dict[int, Any] = wires,
        ) -> None:
            true = expected[tuple(map(slice, lower, upper))]
            chunk = np.empty(true.shape, dtype, order="F" if fortran else "C")
            fill(chunk)
            user.kernel(partial(np.copyto, chunk, true))
            for k, (to, low, up) in enumerate(outputs):
                a, b = np.maximum(lower, low), np.minimum(upper, up)
                if not (a < b).all():
                    continue
                source = tuple(map(slice, a - lower, b - lower))
                target = tuple(map(slice, (a - low).tolist(), (b - low).tolist()))
                place = Place(k, table[k], tuple(np.subtract(up, low).tolist()), dtype)
                wires[to].write(place, target, part(chunk, source))
                nbytes = int(np.prod(b - a, dtype=np.int64)) * item
                with world.double.lock:
                    sent[wires[to].name] = sent.get(wires[to].name, 0) + nbytes
            user.kernel(partial(fill, chunk))  # the user's own business, from here on

        with ThreadPoolExecutor(threads) as pool:
            boxes = [(lower, upper) for owner, lower, upper in inputs if owner == world.pe]
            list(pool.map(contribute, *zip(*boxes, strict=True)) if boxes else ())
        for wire in wires.values():
            wire.start()
        for wire in wires.values():
            wire.flush()
            assert wire.held == 0
        world.double.host_barrier("the fence")
        for k, nbytes in zip(mine, sizes_of, strict=True):
            box = tuple(map(slice, *outputs[k][1:]))
            assert views[run, k].tobytes() == expected[box].tobytes(), f"output {k} of run {run}"
            whole = blocks[k].array((nbytes + 2 * MARGIN,), "u1")
            assert (whole[:MARGIN] == 0xEE).all(), f"before output {k} of run {run}"
            assert (whole[MARGIN + nbytes :] == 0xEE).all(), f"behind output {k} of run {run}"
            user.takes(slow)
            read_later(user, blocks[k].address + MARGIN, shapes[k], dtype, expected[box], reads)
            del views[run, k], whole
        blocks.clear()
    user.synchronize()
    for read, true in reads:
        assert read.tobytes() == true.tobytes(), "what a queued kernel reads was overwritten"
    world.double.host_barrier("closing")
    reach.close()
    return sent


def read_later(
    user: FakeStream, address: int, shape: Any, dtype: str, true: Any, reads: list[Any]
) -> None:
    """Queue a kernel that reads memory, which nothing but the queue knows of then."""
    read = np.empty(shape, dtype)
    view = array_at(address, shape, dtype, None)
    user.kernel(lambda: np.copyto(read, view))
    reads.append((read, true))
