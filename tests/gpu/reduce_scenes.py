"""Reductions that PEs do together over the double of NCCL; see `pes.py`."""

from functools import partial
from typing import Any

import numpy as np
from meeting import Misuse
from nccl_double import NcclDouble, install_nccl
from pes import World
from scenes import fill, refusal


def start(world: World, uid: bytes = b"", by: str = "nccl4py") -> tuple[Any, NcclDouble]:
    """This rank's communicator, and what is below it."""
    double = NcclDouble(world.double)
    install_nccl(double, by)
    uid = uid or world.all_tell(bytes(range(128)))[0]
    return world.modules["nccl"].Nccl(uid, world.pe, world.n_pes, world.gpu), double


def values(rank: int, shape: tuple[int, ...], dtype: str) -> Any:
    """A rank's array: small whole numbers, so that every order gives the same sum."""
    raw = np.random.default_rng(rank).integers(-9, 9, (*shape, 2))
    kind = np.dtype(dtype).kind
    if kind == "c":
        return (raw[..., 0] + 1j * raw[..., 1]).astype(dtype)
    return (raw[..., 0] > 3 if kind == "b" else raw[..., 0]).astype(dtype)


def reductions(
    world: World,
    shape: tuple[int, ...],
    dtype: str,
    op: str,
    order: str,
    root: int,
    by: str = "nccl4py",
) -> None:
    """All three, one behind the other, before anybody waits; each as NumPy has it."""
    ufunc = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}[op]
    comm, _ = start(world, by=by)
    kind = type(comm._comm).__name__
    assert kind == {"nccl4py": "NcclCommunicator", "cupy": "CupyCommunicator"}[by]
    all_of_them = [values(rank, shape, dtype) for rank in range(world.n_pes)]
    expected = all_of_them[0]
    for other in all_of_them[1:]:
        expected = ufunc(expected, other)
    user = world.gpu.current()
    true = all_of_them[world.pe]
    if order == "strided":
        mine = np.empty((*shape[:-1], 2 * shape[-1]), dtype)[..., ::2]
    else:
        mine = np.empty(shape, dtype, order="F" if order == "F" else "C")
    fill(mine)
    user.kernel(partial(np.copyto, mine, true))
    results = [comm.all_reduce(mine, op), comm.reduce(mine, op, root)]
    results.append(comm.reduce_scatter(mine, op) if shape[0] % world.n_pes == 0 else None)
    user.kernel(partial(fill, mine))
    seen: list[Any] = [None if result is None else np.empty_like(result) for result in results]
    for copy, result in zip(seen, results, strict=True):
        if copy is not None:
            user.kernel(partial(np.copyto, copy, result))
    comm.wait(30.0)
    user.synchronize()
    assert seen[0].dtype == expected.dtype
    assert seen[0].tobytes() == expected.tobytes()
    assert (seen[1] is not None) == (world.pe == root)
    assert seen[1] is None or seen[1].tobytes() == expected.tobytes()
    if seen[2] is not None:
        length = shape[0] // world.n_pes
        part = expected[world.pe * length :][:length]
        assert seen[2].tobytes() == part.tobytes()
    comm.close()


def refusals(world: World) -> None:
    """What is refused before NCCL is asked."""
    comm, double = start(world)
    ones = np.ones((world.n_pes + 1, 2), "f8")
    assert isinstance(refusal(comm.all_reduce, ones, "max"), TypeError)
    assert isinstance(refusal(comm.all_reduce, ones.astype("M8[s]"), "sum"), TypeError)
    assert "equal parts" in str(refusal(comm.reduce_scatter, ones, "sum"))
    assert "equal parts" in str(refusal(comm.reduce_scatter, np.ones(()), "sum"))
    assert "is none of" in str(refusal(comm.reduce, ones, "sum", world.n_pes))
    assert comm.all_reduce(ones[:0], "sum").shape == (0, 2)
    comm.close()
    comm.close()
    assert "given up" in str(refusal(comm.all_reduce, ones, "sum"))
    assert double.machine.busy_streams() == []


def groups(world: World, by: str) -> None:
    """Two groups and the whole reduce in turns; a group's ranks are in the order as told."""
    comm, _ = start(world, by=by)
    for wrong in ([], [0, 0], [world.n_pes], [-1]):
        assert "is no group of" in str(refusal(comm.group, wrong, 1.0))
    chosen = [[world.n_pes - 1, 0], list(range(1, world.n_pes))]
    ones = np.full(3, world.pe + 1)  # what is queued keeps no array alive
    whole = comm.all_reduce(ones, "sum")
    made = [comm.group(ranks, 30.0) for ranks in chosen]
    assert whole.tolist() == [sum(range(world.n_pes + 1))] * 3
    for ranks, group in zip(chosen, made, strict=True):
        assert (group is not None) == (world.pe in ranks)
        if group is None:
            continue
        assert (group.rank, group.size) == (ranks.index(world.pe), len(ranks))
        mine = np.full(2, 10**world.pe)
        total = group.all_reduce(mine, "sum")
        root = group.reduce(mine, "sum", 0)
        rows = np.arange(group.size) + world.pe
        share = group.reduce_scatter(rows, "sum")
        group.wait(30.0)
        world.gpu.synchronize()
        assert total.tolist() == [sum(10**pe for pe in ranks)] * 2
        assert (root is not None) == (world.pe == ranks[0])
        assert root is None or root.tolist() == total.tolist()
        assert share.tolist() == [sum(ranks) + group.size * group.rank]
    again = comm.all_reduce(ones, "sum")
    comm.wait(30.0)
    world.gpu.synchronize()
    assert again.tolist() == whole.tolist()
    for group in made:
        if group is not None:
            group.close()
    comm.close()
    assert "given up" in str(refusal(comm.group, [0], 1.0))


def failing(world: World, by: str = "nccl4py") -> None:
    """An error that NCCL finds later, and a rank that never comes."""
    comm, double = start(world, by=by)
    ones = np.ones(3, "f8")
    if world.pe == 0:
        comm.all_reduce(ones, "sum")
        assert "waited 0.1 s for a reduction of 2 ranks" in str(refusal(comm.wait, 0.1))
        assert "given up" in str(refusal(comm.all_reduce, ones, "sum"))
        comm.abort()
    else:
        double.error = 6
        comm.all_reduce(ones[:2], "sum")
        world.double.control[80] = 0  # the other one has not come
        error = str(refusal(comm.wait, 30.0))
        assert "NCCL has failed on rank 1: " in error, error
        assert "<Result.RemoteError" in error, error


def different(world: World, what: str) -> None:
    """The ranks make different calls."""
    comm, _ = start(world, bytes([world.pe if what == "id" else 0]) * 128)
    first = world.pe == 0
    if what == "count":
        comm.all_reduce(np.ones(3 + first), "sum")
    elif what == "op":
        comm.all_reduce(np.ones(3), "sum" if first else "product")
    elif what == "root":
        comm.reduce(np.ones(3), "sum", int(first))
    elif what == "dtype":
        comm.all_reduce(np.ones(3, "f8" if first else "i8"), "sum")
    elif what == "order":
        calls = [partial(comm.all_reduce, np.ones(2), "sum")]
        calls.append(partial(comm.reduce_scatter, np.ones(2), "sum"))
        for call in calls if first else reversed(calls):
            call()
    comm.wait(30.0)
    raise Misuse("nothing was seen")
