"""Two hosts on one machine: namespaces of their own each, joined by a pair of network devices.

Each host has its own network, process ids, host name, System V memory and mounts, with its own
/proc and /sys: a process of one can open no memory of a process of the other. As a script, this is
what runs on the first host's network: a scheduler, two ranks a host, and checks.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import dask.array as da
import numpy as np
from distributed import Client
from mpi_ranks import MPIEXEC, MpiCluster

import dask_redist as dr

LINK, HOSTS, NET = "link0", ("host-a", "host-b"), "10.73.0.{}/30"
SHAPE = (13, 24, 10)


@contextmanager
def two_hosts() -> Iterator[list[int]]:
    """A process on each host, which lives as long as it.

    Raises
    ------
    OSError
        This machine or user may not make namespaces, or lacks the tools.
    """
    spaces = ("--net", "--pid", "--uts", "--ipc", "--mount", "--mount-proc", "--fork")
    script = "hostname $0 && mount -t sysfs none /sys && echo up && exec sleep 1000"
    hosts = [
        subprocess.Popen(
            ("unshare", *spaces, "--kill-child", "sh", "-c", script, name),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in HOSTS
    ]
    try:
        for host in hosts:
            assert host.stdout is not None
            if (said := host.stdout.readline().strip()) != "up":
                raise OSError(said or "unshare failed")
        pids = [_child(host.pid) for host in hosts]
        first, second = map(str, pids)
        _run("ip", "link", "add", LINK, "netns", first, *("type", "veth", "peer", "name", LINK),
             *("netns", second))  # fmt: skip
        for k, pid in enumerate(pids):
            inside = ("nsenter", "-t", str(pid), "-a")
            _run(*inside, "ip", "addr", "add", NET.format(k + 1), "dev", LINK)
            _run(*inside, "ip", "link", "set", LINK, "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
        for pid in pids:
            state = ("nsenter", "-t", str(pid), "-a", "cat", f"/sys/class/net/{LINK}/operstate")
            while _run(*state) != "up":
                time.sleep(0.01)
        yield pids
    finally:
        for host in hosts:  # and all that runs on it
            host.kill()
            host.wait()
            assert host.stdout is not None
            host.stdout.close()


def _child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def run_on(pids: list[int], way: str) -> dict[str, Any]:
    """Run this script on the first host's network; what it found."""
    command = ("nsenter", "-t", str(pids[0]), "-n", sys.executable, __file__, way, *map(str, pids))
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(way: str, *pids: str) -> None:
    """Start ranks on both hosts, and use them."""
    with TemporaryDirectory() as folder:
        launcher = Path(folder, "launcher")
        inside = [f"{name}) exec nsenter -t {pid} -a sh -c \"$*\";;"
                  for name, pid in zip(HOSTS, pids, strict=True)]  # fmt: skip
        words = ("#!/bin/sh", "shift", "host=$1", "shift", "case $host in", *inside, "esac", "")
        launcher.write_text("\n".join(words))
        launcher.chmod(0o755)
        mpiexec = (MPIEXEC, "-launcher", "ssh", "-launcher-exec", str(launcher), "-iface", LINK)
        ways: dict[str, list[tuple[str, ...]]] = {
            "mpi": [(*mpiexec, "-hosts", ",".join(HOSTS), "-ppn", "2", "-n", "4")],
            "dask comm": [("nsenter", "-t", pid, "-a") for pid in pids for _ in range(2)],
        }
        with MpiCluster(4, ways[way], LINK) as cluster, Client(cluster.scheduler_address) as client:
            print(json.dumps(use(client)))


def use(client: Client) -> dict[str, Any]:
    """Re-lay and reduce an array whose elements are their global index; all that came out."""
    ranks = dr.connect(client, 4)
    index = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    wires: dict[str, int] = {}
    for source, target in (
        (dr.Slab.X, dr.Slab.Y),
        (dr.Slab.Y, dr.Slab.Z),
        (dr.Slab.Z, dr.Pencil.X),
    ):
        x = da.from_array(index, chunks=source.chunks(SHAPE, 4)).persist()
        y = dr.redistribute(x, target).persist()
        for block, at in zip(y.to_delayed().ravel(), np.ndindex(*y.numblocks), strict=True):
            ends = [np.cumsum((0, *sizes)) for sizes in y.chunks]
            box = tuple(slice(e[k], e[k + 1]) for e, k in zip(ends, at, strict=True))
            assert (block.compute() == index[box]).all(), (target, at)
        for wire, nbytes in dr.runs()[-1].wires.items():
            wires[wire] = wires.get(wire, 0) + nbytes
        del x, y
    large = da.from_array(np.arange(4 * 50_000.0).reshape(4, 50_000), chunks=(1, 50_000))
    total = dr.dist.reduce_scatter(large).compute()
    assert (total == large.sum(axis=0).compute()).all()
    return {
        "hosts": len(set(ranks.hosts)),
        "pairs": {f"{a}{b}": wire for (a, b), wire in ranks.wires.items() if a < b},
        "bytes": wires,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
