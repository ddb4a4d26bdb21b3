"""What the double refuses, and when it does what it is told; see `pes.py`."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from fakegpu import array_at
from meeting import Misuse
from pes import World
from scenes import refusal, start


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
