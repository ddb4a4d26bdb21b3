"""What ``dask-redist info`` tells: ranks, their wires in plain words, and what is installed."""

from __future__ import annotations

import platform
from collections import Counter
from importlib import metadata
from importlib.util import find_spec

from dask.utils import format_bytes
from rich.markup import escape
from rich.table import Table

from dask_redist import world
from dask_redist.connect import Ranks
from dask_redist.demo import INSTALL
from dask_redist.launch import find_mpi
from dask_redist.stream import is_compiled

IO = "pip install 'dask-redist[io]'"
FILES = "reads and writes Zarr and NetCDF files"
GPU = "no GPU wire yet: ranks are on CPUs, with it or not"
#: optional packages: name, module, what it is for, how to get it where that helps
OPTIONAL = (
    ("zarr", "zarr", FILES, IO),
    ("xarray", "xarray", FILES, IO),
    ("netCDF4", "netCDF4", FILES, IO),
    ("cftime", "cftime", "calendars of climate models", IO),
    ("iris-sample-data", "iris_sample_data", "real data of the demo", INSTALL),
    ("mpi4py", "mpi4py", "MPI jobs and clusters of MPI ranks", world.INSTALL),
    ("dask-mpi", "dask_mpi", "scripts as MPI jobs", world.INSTALL),
    ("cupy", "cupy", GPU, ""),
    ("nvshmem4py", "nvshmem", GPU, ""),
    ("nccl4py", "nccl", GPU, ""),
)


def version_of(module: str) -> str | None:
    """The version of an installed module, found without importing it; None if it is not there.

    Examples
    --------
    >>> version_of("no_such_module") is None
    True
    """
    if find_spec(module) is None:
        return None
    names = metadata.packages_distributions().get(module, [])
    return metadata.version(names[0]) if names else "from its sources"


def in_plain_words(ranks: Ranks) -> list[str]:
    """What the wires between the ranks mean."""
    pairs = Counter(wire for (a, b), wire in ranks.wires.items() if a != b)
    if not pairs:
        return ["One rank: a change of layout is a copy in its own memory."]
    words = []
    if near := pairs["shared memory"] + pairs["direct"]:
        words.append(
            f"{near} of {pairs.total()} pairs share memory: each piece is written once, straight "
            "to its final place in its owner's memory."
        )
    if far := pairs["mpi"]:
        words.append(
            f"{far} of {pairs.total()} pairs talk over MPI: pieces are packed into messages, and "
            "leave while others are still computed."
        )
    if far := pairs["dask comm"]:
        words.append(
            f"{far} of {pairs.total()} pairs talk over Dask's connections, which is slower: they "
            "are on different hosts, or one may not open the other's memory."
        )
    return words


def ranks_in_words(ranks: Ranks) -> str:
    """How many ranks, on how many hosts, with how much memory."""
    n, hosts = ranks.size, len(set(ranks.hosts))
    memory = format_bytes(sum(seat.memory_limit for seat in ranks.seats))
    return (
        f"{n} rank{'s' * (n != 1)} on {hosts} host{'s' * (hosts != 1)}, {memory} of memory in all"
    )


def rank_table(ranks: Ranks) -> Table:
    """A line for each rank."""
    table = Table("rank", "worker", "address", "device", "threads", "memory limit")
    for rank, seat in enumerate(ranks.seats):
        memory = format_bytes(seat.memory_limit)
        row = seat.name, seat.address, ranks.devices[rank], str(seat.nthreads), memory
        table.add_row(str(rank), *map(escape, row))
    return table


def package_table() -> Table:
    """What is installed here, and what that means."""
    table = Table("here", "version", "what that means")
    table.add_row("python", platform.python_version())
    for module in ("dask_redist", "dask", "distributed", "numpy"):
        table.add_row(module, version_of(module))
    past = "large pieces are written past the cache"
    lacking = "pieces are written by NumPy: install again on x86-64 with a C compiler"
    table.add_row("copies", *(("compiled", past) if is_compiled() else ("plain", lacking)))
    table.add_section()
    for package, module, purpose, remedy in OPTIONAL:
        version = version_of(module)
        advice = f"{purpose}: {remedy}" if remedy and version is None else purpose
        table.add_row(package, version or "not installed", escape(advice))
    mpi = find_mpi()
    table.add_row("MPI", mpi.implementation or "not usable", escape(mpi.words))
    return table
