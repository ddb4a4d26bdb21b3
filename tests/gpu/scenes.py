"""What PEs do together over the double; see `pes.py`. Each function runs on every PE."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from double import FakeStream, Misuse, array_at
from pes import Asked, World

from dask_redist.peers import matching
from dask_redist.segment import part
from dask_redist.wires import Place

MARGIN = 512  # bytes of canaries on each side of an output

Chunk = tuple[int, tuple[int, ...], tuple[int, ...]]  # owner, lower and upper corner


def element(shape: Any, dtype: Any, run: int) -> Any:
    """An array whose elements are their global index, in another way in each run."""
    index = np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.int64) + 97 * run
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return (index % 3 == 0).reshape(shape)
    if dtype.kind == "c":
        return (index - 1j * index).astype(dtype).reshape(shape)
    return index.astype(dtype).reshape(shape)


def start(world: World, capacity: int, view_of: Any) -> Any:
    """This PE's reach."""
    pe = world.modules["nvshmem"].Pe(0, world.uid(), world.pe, world.n_pes)
    reach = world.modules["devicewires"].DeviceReach(
        pe, world.gpu, capacity, lambda other: Asked(world, other), view_of
    )
    world.mail = reach.mail
    world.double.host_barrier("the start")
    return reach


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


def fill(chunk: Any) -> None:
    """Make an array wrong."""
    chunk[...] = np.frombuffer(b"\x5a" * chunk.dtype.itemsize, chunk.dtype)[0]


def read_later(
    user: FakeStream, address: int, shape: Any, dtype: str, true: Any, reads: list[Any]
) -> None:
    """Queue a kernel that reads memory, which nothing but the queue knows of then."""
    read = np.empty(shape, dtype)
    view = array_at(address, shape, dtype, None)
    user.kernel(lambda: np.copyto(read, view))
    reads.append((read, true))


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


def refusal(call: Any, *args: Any) -> BaseException:
    """What a call raises."""
    try:
        call(*args)
    except Exception as error:
        return error
    raise AssertionError(f"{call} was not refused")


# ------------------------------------------------------------------------ the arena, a PE
def arena(world: World) -> None:
    """Blocks are all or none, return when their last array dies, and are apart."""
    reach = start(world, 8 * 512, lambda run, number: None)
    made = reach.arena
    first = made.allocate([0, 1, 512, 513])
    offsets = [block.offset for block in first]
    assert [block.nbytes for block in first] == [0, 1, 512, 513]
    assert all(offset % 512 == 0 for offset in offsets)
    assert made.in_use == 4 * 512
    assert "room for 2100 bytes in 2 blocks: of its 4096 bytes 2048 are in use" in str(
        refusal(made.allocate, [1, 2099])
    )
    assert made.in_use == 4 * 512
    array = first[3].array((3, 5), "f8", 8)
    assert array.ctypes.data == made.address + offsets[3] + 8
    assert "does not fit" in str(refusal(first[3].array, (65,), "f8"))
    assert "does not fit" in str(refusal(first[3].array, (64,), "f8", 8))
    assert isinstance(refusal(first[0].array, (1,), "O"), TypeError)
    corner = array[1:, 2:]
    del array
    first.clear()
    assert len(made.allocate([512] * 6)) == 6  # all but what the corner lies in
    assert "no room" in str(refusal(made.allocate, [512] * 7))
    del corner
    condemned = made.allocate([512] * 8)
    for block in condemned[:3]:
        block.condemn()
    condemned.clear()
    assert "1536 are in use" in str(refusal(made.allocate, [512] * 6))
    made.allocate([512] * 5)
    reach.close()


def pe_itself(world: World) -> None:
    """What a PE refuses before the library hangs or exits."""
    nvshmem = world.modules["nvshmem"]
    pe = nvshmem.Pe(0, world.uid(), world.pe, world.n_pes)
    other, stream = 1 - world.pe, world.gpu.stream()
    for wrong in (world.pe, -1, 2):
        memory = nvshmem.Symmetric(0, 8, None)
        assert "is no other one of 2" in str(refusal(pe.peer_address, memory, wrong))
        assert "is no other one of 2" in str(refusal(pe.put_nbi, 0, 0, 8, wrong, stream))
        assert "is no other one of 2" in str(refusal(pe.put_signal, 0, 0, 8, 0, 1, wrong, stream))
        assert "is no other one of 2" in str(refusal(pe.signal, 0, 1, wrong, stream))
    assert "at least one" in str(refusal(pe.allocate, 0))
    memories = [pe.allocate(64), pe.allocate(4096)]
    address = pe.peer_address(memories[1], other)
    assert address == world.double._there(memories[1].address, other)
    pe.close()
    assert world.double.calls[-2] == "free", "not all that was allocated is free"
    assert "has ended" in str(refusal(pe.quiet, stream))
    assert world.double.init_status() == 0


def cupy_views(world: World) -> None:
    """CuPy's own arithmetic of addresses and strides, on memory that nobody touches."""
    import cupy

    base = 1 << 30
    one = world.modules["gpu"].Cupy(0)
    for dtype in ("f8", "f4", "i2", "?", "c16", "u1"):
        mine = np.empty((4, 5, 6), dtype)
        origin = mine.ctypes.data
        owner = bytearray(1)
        theirs = one.view(base, (4, 5, 6), dtype, owner)
        assert isinstance(theirs, cupy.ndarray)
        assert theirs.flags.c_contiguous
        assert theirs.data.device_id == 0
        box = (slice(1, 3), slice(2, 5), slice(3, 6))
        for a, b in ((mine, theirs), (part(mine, box), part(theirs, box))):
            assert a.shape == b.shape
            assert a.strides == b.strides
            assert a.nbytes == b.nbytes
            assert a.dtype == b.dtype
            assert a.flags.c_contiguous == b.flags.c_contiguous
            pointer: Any = b.data
            assert a.ctypes.data - origin == pointer.ptr - base
        piece: Any = part(theirs, box)
        assert matching(piece, (2, 3, 3), np.dtype(dtype)) is piece
        assert isinstance(refusal(matching, theirs, (4, 5), np.dtype(dtype)), ValueError)
        assert isinstance(refusal(matching, theirs, (4, 5, 6), np.dtype("i8")), TypeError)
    assert one.view(base, (3, 0), "f8", None).size == 0
    assert part(one.view(base, (), "f8", None), ()).shape == ()


# ---------------------------------------------------------------------- the double itself
def refused(call: Any, *args: Any, **named: Any) -> str:
    """What a call is refused with."""
    try:
        call(*args, **named)
    except Misuse as error:
        return str(error)
    raise AssertionError(f"{call} was not refused")


def misuses(world: World) -> list[str]:
    """What the double refuses, through nvshmem4py where that lets it pass."""
    import nvshmem.core as nv
    from cuda.core import Buffer

    pe, stream = world.pe, world.gpu.stream()
    other = 1 - pe
    assert "before init" in refused(world.double.malloc, 8)
    made = world.modules["nvshmem"].Pe(0, world.uid(), pe, 2)
    one, two = made.allocate(64), made.allocate(64)
    far = world.double._there(one.address, other)

    def put(target: int, source: int, nbytes: int, to: int) -> str:
        where = Buffer.from_handle(target, nbytes), Buffer.from_handle(source, nbytes)
        return refused(nv.put_nbi, *where, to, stream=stream)

    def signal(value: int, slot: int = one.address) -> None:
        nv.signal_op(Buffer.from_handle(slot, 8), value, nv.SignalOp.SIGNAL_SET, other, stream)

    said = [
        put(one.address, two.address, 64, pe),  # to itself
        put(one.address, two.address, 64, 2),
        put(one.address, two.address, 64, -1),
        put(one.address, two.address, 65, other),
        put(one.address + 8, two.address, 64, other),
        put(one.address, two.address - 8, 16, other),
        put(far, two.address, 64, other),  # a peer's address
        put(one.address, world.double.control.ctypes.data, 8, other),  # from other memory
        refused(nv.get_peer_buffer, one.buffer, pe),
        refused(signal, 1, one.address + 4),
        refused(signal, 1, one.address + 64),
        refused(nv.signal_wait, one.buffer, 1, nv.ComparisonType.CMP_EQ, stream),
        refused(world.double.malloc, 0),
    ]
    assert all(said)
    for number in (3, 3):  # in the stream: it does not rise
        signal(number, two.address)
    assert "sets 3" in refused(stream.synchronize)
    stream.queue.clear()
    nv.free(two.buffer)
    assert "no live allocation" in put(one.address, two.address, 64, other)
    nv.put_nbi(
        Buffer.from_handle(one.address, 8),
        Buffer.from_handle(one.address + 8, 8),
        other,
        stream=stream,
    )
    made._allocated = [one]
    stream.synchronize()
    assert "have not landed" in refused(made.close)
    nv.quiet(stream)
    nv.barrier_all(stream)
    made._allocated = []
    error = refused(made.close)
    assert "is queued at the end" in error, error
    stream.synchronize()
    made.close()
    return said


def unequal(world: World) -> None:
    """The PEs allocate different sizes."""
    start(world, 1024 + 512 * world.pe, lambda run, number: None)


def no_start(world: World) -> None:
    """The library comes up in another state than it should."""
    error = str(refusal(world.modules["nvshmem"].Pe, 0, world.uid(), world.pe, world.n_pes))
    assert "did not start" in error, error


def different_ids(world: World) -> None:
    """Each PE makes an id of its own."""
    nvshmem = world.modules["nvshmem"]
    nvshmem.Pe(0, nvshmem.new_uid(), world.pe, world.n_pes)


def self_view(world: World) -> None:
    """nvshmem4py counts a view of the own memory as a second owner: it is never freed then."""
    import nvshmem.bindings
    import nvshmem.core as nv
    from nvshmem.core import nvshmem_types

    made = world.modules["nvshmem"].Pe(0, world.uid(), world.pe, world.n_pes)
    memory = made.allocate(64)
    nvshmem_types.ptr = nvshmem.bindings.ptr = lambda dest, pe: dest
    nv.get_peer_buffer(memory.buffer, world.pe)
    assert "1 allocations are alive" in refused(made.close)
    world.double._live.clear()


def landing(world: World) -> list[str]:
    """When a put without waiting lands: what is there after each step, seen by PE 1."""
    import nvshmem.core as nv
    from cuda.core import Buffer

    made = world.modules["nvshmem"].Pe(0, world.uid(), world.pe, world.n_pes)
    memory = made.allocate(16)
    stream, elsewhere = world.gpu.stream(), world.gpu.stream()
    view = array_at(memory.address, (16,), "u1", None)
    view[:8], view[8:] = 0, 7
    seen = []

    def look(step: Any) -> None:
        world.double.host_barrier("before")
        if world.pe == 0 and step is not None:
            step()
            stream.synchronize()
            elsewhere.synchronize()
        world.double.host_barrier("after")
        seen.append(int(view[0]))

    def put() -> None:
        where = (Buffer.from_handle(memory.address + k, 8) for k in (0, 8))
        nv.put_nbi(*where, 1, stream=stream)

    look(put)
    look(lambda: nv.quiet(elsewhere))  # another stream's
    look(lambda: view.__setitem__(slice(8, 16), 9))  # the source was not free yet
    look(lambda: nv.quiet(stream))
    view[8:] = 5
    look(put)
    world.double.host_barrier("all")
    nv.barrier_all(stream)
    stream.synchronize()
    look(None)
    made.close()
    return [str(value) for value in seen]


def interleaving(world: World) -> str:
    """In which order two streams of three kernels each go."""
    order: list[str] = []
    streams = [world.gpu.stream(), world.gpu.stream()]
    for name, stream in zip("ab", streams, strict=True):
        for _ in range(3):
            stream.kernel(partial(order.append, name))
    assert not order, "something was done before anybody waited"
    world.gpu.synchronize()
    return "".join(order)


def endless(world: World) -> None:
    """A wait for a signal that nobody sends."""
    made = world.modules["nvshmem"].Pe(0, world.uid(), world.pe, world.n_pes)
    memory, stream = made.allocate(8), world.gpu.stream()
    array_at(memory.address, (8,), "u1", None)[:] = 0
    made.signal_wait(memory.address, 1, stream)
    stream.synchronize()


def two_threads(world: World) -> None:
    """Two threads are in the library at once."""
    with world.double._call("init"), ThreadPoolExecutor(1) as pool:
        pool.submit(world.double.hostlib_init_attr, 0, 0).result()
