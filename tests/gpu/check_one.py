"""The sections of `check.py` that one PE plays alone."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from check_child import NotHereError
from pes import World
from scenes import element
from scenes import start as reach_of

Rows = list[tuple[str, str]]
PACKAGES = [
    *("nvshmem4py-cu12", "nvshmem4py-cu13", "nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13"),
    *("nccl4py", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "cupy-cuda12x", "cupy-cuda13x"),
    *("cuda-core", "cuda-bindings", "numpy", "dask"),
]
OPS = ("sum", "product", "min", "max")
DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]


def on_gpu(array: Any, double: bool) -> Any:
    """An array as the GPU has it, in the same order of memory."""
    if double:
        return array.copy(order="K")
    import cupy

    made = cupy.asarray(array, order="K")
    cupy.cuda.Device().synchronize()
    return made


def on_host(array: Any, double: bool) -> Any:
    """A GPU's array, when all is done, as NumPy has it."""
    return np.array(array) if double else array.get()


def versions(world: World, double: bool) -> Rows:
    """What is installed, and what the GPU is."""
    rows = [("Python", sys.version.split()[0])]
    for package in PACKAGES:
        try:
            rows.append((package, version(package)))
        except PackageNotFoundError:
            continue
    if not double:
        from cupy.cuda import runtime

        found = runtime.getDeviceProperties(0)
        rows.append(("GPU", found["name"].decode()))
        rows.append(("memory", f"{found['totalGlobalMem'] / 2**30:.0f} GiB"))
        rows.append(
            ("driver, runtime", f"{runtime.driverGetVersion()}, {runtime.runtimeGetVersion()}")
        )
    return rows


def start(world: World, double: bool) -> Rows:
    """NVSHMEM comes up by a unique id, and ends."""
    pe = world.modules["nvshmem"].Pe(0, world.uid(), world.pe, world.n_pes)
    status = pe._nv.init_status()
    pe.close()
    return [("status", str(status)), ("signals", "yes" if pe.has_signals else "no")]


def arena(world: World, double: bool) -> Rows:
    """Blocks of the arena hold what is written into them, and are handed out again."""
    capacity = 1 << 20 if double else 1 << 30
    reach = reach_of(world, capacity, lambda run, number: None)
    for run in range(3):
        blocks = reach.arena.allocate([capacity // 4, 1000, capacity // 2])
        numbers = [element((block.nbytes // 8,), "i8", run + k) for k, block in enumerate(blocks)]
        for block, values in zip(blocks, numbers, strict=True):
            reach.out.copy(block.array(values.shape, "i8"), on_gpu(values, double))
        world.gpu.synchronize()
        for block, values in zip(blocks, numbers, strict=True):
            assert (on_host(block.array(values.shape, "i8"), double) == values).all()
        del block
        blocks.clear()
    reach.close()
    return [("capacity", f"{capacity >> 20} MiB")]


def to_itself(world: World, double: bool) -> Rows:
    """What travels to a PE itself, as nvshmem4py lets it: `Pe` refuses that."""
    if double:
        raise NotHereError("the double refuses what a PE sends to itself")
    import nvshmem.core as nv
    from cuda.core import Buffer

    pe = world.modules["nvshmem"].Pe(0, world.uid(), 0, 1)
    memory, stream = pe.allocate(4096), world.gpu.stream()
    whole = world.gpu.view(memory.address, (512,), "u8", None)
    world.gpu.copy(whole, 0, stream)
    world.gpu.copy(whole[256:], on_gpu(element((256,), "u8", 1), double), stream)
    where = [Buffer.from_handle(memory.address + at, n) for at, n in ((0, 1024), (2048, 1024))]
    slot = Buffer.from_handle(memory.address + 1032, 8)
    nv.put_nbi(*where, 0, stream=stream)
    nv.quiet(stream=stream)
    nv.signal_op(slot, 7, nv.SignalOp.SIGNAL_SET, 0, stream=stream)
    nv.signal_wait(slot, 7, nv.ComparisonType.CMP_GE, stream=stream)
    nv.barrier_all(stream=stream)
    stream.synchronize()
    seen = on_host(whole, double)
    assert (seen[:128] == element((256,), "u8", 1)[:128]).all()
    assert seen[129] == 7
    pe.close()
    return [("put, signal, wait, quiet, barrier_all", "as they should be")]


def copies(world: World, double: bool) -> Rows:
    """Strided copies and packing, in GB/s, and as a part of what a device copy gives."""
    rows: Rows = []
    for mib in (1,) if double else (1, 16, 64, 256):
        shape = (16, 64, (mib << 20) // (16 * 64 * 8))
        values = element(shape, "f8", mib)
        wide = (shape[0], 2 * shape[1], shape[2] + 3)
        box = (slice(None), slice(5, 5 + shape[1]), slice(1, 1 + shape[2]))
        source, packed = on_gpu(values, double), on_gpu(np.zeros(shape), double)
        strided, other = (on_gpu(np.zeros(wide), double) for _ in range(2))
        stream = world.gpu.stream()
        pairs = {
            "device copy": (packed, source),
            "into a box": (strided[box], packed),
            "box to box": (other[box], strided[box]),
            "packing": (packed, other[box]),
        }
        took: dict[str, list[float]] = {name: [] for name in pairs}
        for _ in range(2 if double else 7):
            for name, (target, piece) in pairs.items():
                took[name].append(_seconds(world, stream, target, piece, 1 if double else 10))
        for array in (packed, strided[box], other[box]):
            assert on_host(array, double).tobytes() == values.tobytes()
        speed = {name: values.nbytes / statistics.median(t[1:]) / 1e9 for name, t in took.items()}
        for name, fast in speed.items():
            part = f"{fast:.1f} GB/s, {fast / speed['device copy']:.2f} of a device copy"
            rows.append((f"{name}, {mib} MiB", "right" if double else part))
    return rows


def _seconds(world: World, stream: Any, target: Any, piece: Any, times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        world.gpu.copy(target, piece, stream)
    stream.synchronize()
    return (time.perf_counter() - began) / times


def reductions(world: World, double: bool) -> Rows:
    """Each dtype and operation that NCCL has a form for, in each call, as NumPy has it."""
    nccl = world.modules["nccl"]
    if double:
        from nccl_double import NcclDouble, install_nccl

        install_nccl(NcclDouble(world.double))
    uid = bytes(range(128)) if double else nccl.new_nccl_uid()
    comm = nccl.Nccl(uid, 0, 1, world.gpu)
    rows: Rows = []
    orders: list[Callable[[Any], Any]] = [lambda a: a, lambda a: a.T.copy().T, lambda a: a[:, ::2]]
    for dtype in (
        "?",
        "i1",
        "u1",
        "i2",
        "u2",
        "i4",
        "u4",
        "i8",
        "u8",
        "f2",
        "f4",
        "f8",
        "c8",
        "c16",
    ):
        ops = [op for op in OPS if nccl.form_of(np.dtype(dtype), op)]
        for op in ops:
            for order in orders:
                values = element((6, 8), dtype, 3)
                mine, true = order(on_gpu(values, double)), order(values)
                world.gpu.synchronize()
                results = [comm.all_reduce(mine, op), comm.reduce(mine, op, 0)]
                results.append(comm.reduce_scatter(mine, op))
                comm.wait(10.0)
                world.gpu.synchronize()
                for result in results:
                    assert result.dtype == true.dtype
                    assert on_host(result, double).tobytes() == true.tobytes(), (dtype, op)
        rows.append((np.dtype(dtype).name, ", ".join(ops)))
    comm.close()
    return rows


def dask_tests(world: World, double: bool) -> Rows:
    """Dask's own tests of CuPy chunks, where CuPy works."""
    if double:
        raise NotHereError("CuPy needs a GPU")
    import dask.array.tests

    folder = Path(next(iter(dask.array.tests.__path__)))
    files = sorted(str(path) for path in folder.glob("test_cupy_*.py"))
    ran = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ran.stdout is not None
    last = ""
    for line in ran.stdout:  # so that a deadline does not lose what was printed before
        print(line, end="", flush=True)
        last = line.strip("= \n") or last
    assert ran.wait() == 0, last
    return [("tests", last)]
