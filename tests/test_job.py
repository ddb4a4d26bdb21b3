"""``with dr.mpi()``: real MPI jobs, their exit codes, what they say, and that nothing stays alive.

Each job is a script under ``mpiexec``. Whatever it ends like, ten seconds later no process of it is
there, its exit code is that of the script, and its stderr has nothing that is ours to explain.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dask_redist import observer
from dask_redist.world import clean_environment, find_mpiexec

#: whole jobs, which ``make test`` has a sample of
LONG = pytest.mark.everything

HEAD = r"""
import os, signal, sys, threading, time
import numpy as np, dask.array as da
import dask_redist as dr

def lo(**kwargs):
    return dr.mpi(interface="lo", **kwargs)

def print(*words, **kwargs):  # in one piece, among the others'
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()

"""
#: what launchers say of a job that failed; not ours
LAUNCHERS = (
    "=",
    "YOUR APPLICATION TERMINATED",
    "This typically refers to a problem",
    "Please see the FAQ",
    "Abort(",
)
WORK = """
    array = np.arange(9 * 8.0).reshape(9, 8)
    x = da.from_array(array, chunks=(4, 8)).persist()
    assert (dr.redistribute(x, dr.Slab.Y).compute() == array).all()
"""


@dataclass
class Ended:
    """A job that has ended."""

    code: int
    out: str
    err: list[str]
    left: list[str]


def members(mark: str) -> list[str]:
    """The processes whose environment has a mark."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                if mark.encode() in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
    return found


class Job:
    """A script under mpiexec."""

    count = 0

    def __init__(self, folder: Path, body: str, n: int | None = 4, **environ: str) -> None:
        Job.count += 1
        script = folder / f"job{Job.count}.py"
        script.write_text(HEAD + body)
        self.mark = f"DASK_REDIST_TEST=job-{os.getpid()}-{Job.count}-"
        name, value = self.mark.split("=")
        mpiexec = find_mpiexec()
        assert mpiexec is not None, "the tests need an mpiexec"
        launch = [] if n is None else [mpiexec, "-n", str(n)]
        self.process = subprocess.Popen(
            [*launch, sys.executable, str(script)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**clean_environment(), name: value, **environ},
            start_new_session=True,
        )

    def line(self) -> str:
        """Wait for the next line on its stdout."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self, timeout: float = 60) -> Ended:
        """Wait for its end, and some seconds for that of all its processes."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            out, err = self.process.communicate()
            pytest.fail(f"the job hangs\n{out}\n{err}")
        deadline = time.monotonic() + 10
        while (left := members(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        said = "".join(f"{line}\n" for line in _ours(out))
        return Ended(self.process.returncode, said, _ours(err), left)


def _ours(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith(LAUNCHERS)]


def run(folder: Path, body: str, n: int | None = 4, **environ: str) -> Ended:
    done = Job(folder, body, n, **environ).end()
    assert done.left == [], "still alive after ten seconds"
    return done


# ------------------------------------------------------------------- the body, and who runs it
@pytest.mark.parametrize(
    ("n", "arguments", "ranks"),
    [
        (3, "", [2]),
        (5, "", [2, 3, 4]),
        (1, "exclusive=False", [0]),
        (2, "exclusive=False", [0, 1]),
        (4, "exclusive=False", [0, 1, 2, 3]),
    ],
)
def test_only_the_script_enters_the_body(
    tmp_path: Path, n: int, arguments: str, ranks: list[int]
) -> None:
    body = f"""
from mpi4py import MPI
print("all")
with lo({arguments}) as client:
    print("body", MPI.COMM_WORLD.rank, [s.mpi_rank for s in dr.connect(client).seats])
    {WORK.strip()}
print("after", MPI.COMM_WORLD.rank)
"""
    done = run(tmp_path, body, n)
    assert (done.code, done.err) == (0, [])
    # In a world of one rank there is nothing to order the ranks by.
    shown = [None] if n == 1 else ranks
    script = 0 if "False" in arguments else 1
    assert sorted(done.out.splitlines()) == sorted(
        ["all"] * n + [f"body {script} {shown}", f"after {script}"]
    )


@LONG
def test_memory_is_shared_out(tmp_path: Path) -> None:
    body = """
from distributed.system import MEMORY_LIMIT
with lo() as client:
    print(round(sum(s.memory_limit for s in dr.connect(client).seats) / MEMORY_LIMIT, 3))
"""
    assert run(tmp_path, body, 5).out == "1.0\n"


@LONG
def test_options(tmp_path: Path) -> None:
    (tmp_path / "spill").mkdir()
    body = """
with lo(nthreads=2, memory_limit="200 MiB", local_directory="spill", dashboard=":0") as client:
    info = client.scheduler_info()
    (worker,) = info["workers"].values()
    print(worker["nthreads"], worker["memory_limit"], "dashboard" in info["services"])
    print(os.path.realpath(worker["local_directory"]).startswith(os.path.realpath("spill")))
    print(client.scheduler.address.startswith("tcp://127.0.0.1:"))
"""
    done = run(tmp_path, body, 3)
    assert (done.code, done.err) == (0, [])
    assert done.out.split() == ["2", str(200 * 2**20), "True", "True", "True"]


def test_ml11_not_launched_is_one_rank_and_one_line(tmp_path: Path) -> None:
    body = f"if True:\n  with lo() as client:\n    print(dr.connect(client))\n{WORK}"
    done = run(tmp_path, body, None)
    assert done.code == 0
    assert done.out == "<Ranks: 1 on 1 host, wires: none needed>\n"
    (line,) = done.err
    assert "1 rank, in this process; for more: mpiexec -n" in line


def test_an_error_in_a_task_is_only_that(tmp_path: Path) -> None:
    body = f"""
def f(b, block_id=None):
    if block_id == (1, 0): raise KeyError("block 1")
    return b
with lo() as client:
    y = da.ones((12, 8), chunks=(3, 8)).map_blocks(f, dtype="f8", meta=np.empty((0, 0)))
    try: dr.redistribute(y, dr.Slab.Y).compute()
    except KeyError as error: print(error)
    {WORK.strip()}
"""
    done = run(tmp_path, body)
    assert (done.code, done.out) == (0, "'block 1'\n")
    assert "Compute Failed" in done.err[0]


@LONG
def test_ml07_a_task_may_start_processes(tmp_path: Path) -> None:
    body = """
import subprocess
with lo() as client:
    print(client.submit(lambda: subprocess.run(["true"]).returncode).result())
"""
    assert run(tmp_path, body).out == "0\n"


# ------------------------------------------------------------------------------ MPI programs
def test_an_mpi_program_keeps_its_communicator(tmp_path: Path) -> None:
    body = """
from mpi4py import MPI
world = MPI.COMM_WORLD
sub = world.Split(world.rank == 0, world.rank)  # rank 0 does something else
u = np.full((world.rank, 2), world.rank, "f8")
if world.rank > 0:
    for again in range(2):
        with lo(comm=sub, exit=False, exclusive=False, local={"u": u}) as client:
            if client is None:
                print("none", sub.rank)
            else:
                x = dr.from_ranks("u", axis=0)
                print("u", x.shape, x.chunks[0], x.sum().compute())
    assert sub.allreduce(1) == 3
assert world.allreduce(world.rank) == 6
print("end", world.rank)
"""
    done = run(tmp_path, body)
    assert (done.code, done.err) == (0, [])
    want = ["none 1", "none 2", "u (6, 2) (1, 2, 3) 28.0"] * 2 + [f"end {r}" for r in range(4)]
    assert sorted(done.out.splitlines()) == sorted(want)


@LONG
def test_exclusive_in_an_mpi_program(tmp_path: Path) -> None:
    body = """
from mpi4py import MPI
with lo(exit=False) as client:
    print(MPI.COMM_WORLD.rank, client is None)
    if client is not None:
        assert dr.connect(client).size == 2
MPI.COMM_WORLD.Barrier()
"""
    done = run(tmp_path, body)
    assert (done.code, done.err) == (0, [])
    assert sorted(done.out.splitlines()) == ["0 True", "1 False", "2 True", "3 True"]


@LONG
@pytest.mark.parametrize("exclusive", [True, False])
def test_a_program_that_goes_on_has_nothing_of_ours(tmp_path: Path, exclusive: bool) -> None:
    """No socket listens, no array is offered, no communicator is left, on any rank."""
    body = f"""
import gc, weakref, psutil
from mpi4py import MPI
from dask_redist import crew, local, mpigroup
crews, makes, groups = [], crew.Crew.__init__, []
def make(self, *args, **kwargs):
    makes(self, *args, **kwargs)
    crews.append(self)
crew.Crew.__init__ = make
choose = mpigroup.Groups.choose
def chosen(self, number):
    choose(self, number)
    groups.append(self.newest)
mpigroup.Groups.choose = chosen
def listening():
    return [c for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
before = listening()
for again in range(2):
    u = np.ones((3, 2))
    alive = weakref.ref(u)
    with lo(exclusive={exclusive}, exit=False, local={{"u": u}}) as client:
        if client is not None:
            x = dr.from_ranks(lambda rank, size: np.ones((3, 2)), axis=0)
            assert x.sum().compute() == 6 * len(dr.connect(client).seats)
    assert listening() == before, listening()
    assert local._offered == {{}}
    del u
    gc.collect()
    assert alive() is None
    assert all(c.comm == MPI.COMM_NULL for c in crews) and len(crews) == again + 1
    assert all(c == MPI.COMM_NULL for g in groups for c in (g.comm, g.users)), groups
works = {"MPI.COMM_WORLD.rank > 1" if exclusive else "True"}
assert len(groups) == 2 * works
MPI.COMM_WORLD.Barrier()
print("end")
"""
    done = run(tmp_path, body)
    assert (done.code, done.err, done.out) == (0, [], "end\n" * 4)


WRONG = {
    "an array": ("local={'u': [1] if rank == 2 else np.ones(3)}", "TypeError: 'u' is a list"),
    "a network": ("interface='none' if rank == 2 else 'lo'", "ValueError: 'none' is not a valid"),
    "a time": ("timeout='soon' if rank == 2 else '9s'", "rank 2 of 4: "),
}


@pytest.mark.parametrize(
    "what", ["an array", *(pytest.param(w, marks=LONG) for w in ("a network", "a time"))]
)
def test_what_one_rank_cannot_do_all_raise(tmp_path: Path, what: str) -> None:
    """One error, on all ranks, which go on; before, the others waited for that one."""
    argument, told = WRONG[what]
    body = f"""
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
for exclusive in (True, False):
    try:
        with dr.mpi(exclusive=exclusive, exit=False, **({{"interface": "lo"}} | dict({argument}))):
            print("body")
    except dr.RedistError as error:
        print(error)
with lo(exit=False) as client:
    pass
MPI.COMM_WORLD.Barrier()
"""
    done = run(tmp_path, body)
    assert (done.code, done.err) == (0, [])
    (line,) = set(done.out.splitlines())
    assert len(done.out.splitlines()) == 8
    assert line.startswith("rank 2 of 4: ")
    assert told in line


@LONG
def test_what_one_rank_cannot_do_is_told_once_where_all_exit(tmp_path: Path) -> None:
    argument, told = WRONG["an array"]
    body = f"""
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
with lo({argument}) as client:
    print("body")
"""
    done = run(tmp_path, body)
    assert (done.code, done.out) == (1, "")
    assert f"RedistError: rank 2 of 4: {told}" in done.err[-1]
    assert sum("Traceback" in line for line in done.err) == 1


@pytest.mark.parametrize("exclusive", [True, pytest.param(False, marks=LONG)])
def test_ranks_are_let_go_whatever_dask_does_at_its_end(tmp_path: Path, exclusive: bool) -> None:
    body = f"""
from mpi4py import MPI
from dask_redist import crew
ends = crew._shut_down, crew._Beside.close
def fails(*args):
    ends[not {exclusive}](*args)
    raise ZeroDivisionError("at the end")
crew._shut_down = crew._Beside.close = fails
with lo(exclusive={exclusive}, exit=False) as client:
    pass
print("end", MPI.COMM_WORLD.allreduce(1))
"""
    done = run(tmp_path, body)
    assert (done.code, done.out) == (0, "end 4\n" * 4)
    (line,) = done.err
    assert "Dask did not end as it should: ZeroDivisionError('at the end')" in line


# --------------------------------------------------------------------------------- the life cycle
def times(config: pytest.Config) -> int:
    return 20 if config.getoption("everything") else 1


ENDS = {
    "ends": ("pass", 0, ""),
    "raises": ("raise KeyError('mine')", 1, "KeyError: 'mine'"),
    "exits": ("sys.exit(3)", 3, ""),
    "speaks": ("sys.exit('no such file')", 1, "no such file"),
}


@pytest.mark.timeout(600)  # 20 jobs
@pytest.mark.parametrize(
    ("how", "exclusive"),
    [
        ("ends", False),
        ("exits", True),
        *(
            pytest.param(how, exclusive, marks=LONG)
            for how, exclusive in [
                *(("ends", True), ("exits", False), ("raises", True), ("raises", False)),
                *(("speaks", True), ("speaks", False)),
            ]
        ),
    ],
)
def test_ml01_life_cycle(
    tmp_path: Path, pytestconfig: pytest.Config, how: str, exclusive: bool
) -> None:
    statement, code, last = ENDS[how]
    body = f"with lo(exclusive={exclusive}) as client:\n{WORK}\n    {statement}\n"
    for _ in range(times(pytestconfig)):
        done = run(tmp_path, body)
        assert done.code == code
        assert done.out == ""
        if how == "raises":  # the script's own traceback, and nothing else
            assert done.err[0] == "Traceback (most recent call last):"
            assert sum("Traceback" in line for line in done.err) == 1
            assert done.err[-1] == last
            assert not [line for line in done.err if "dask_redist" in line]
        else:
            assert done.err == ([last] if last else [])


@pytest.mark.timeout(600)  # 20 jobs
@pytest.mark.parametrize("exclusive", [True, pytest.param(False, marks=LONG)])
def test_life_cycle_interrupted(
    tmp_path: Path, pytestconfig: pytest.Config, exclusive: bool
) -> None:
    body = (
        f"with lo(exclusive={exclusive}) as client:\n{WORK}\n"
        "    print('ready', flush=True)\n    time.sleep(100)\n"
    )
    for _ in range(times(pytestconfig)):
        job = Job(tmp_path, body)
        assert job.line() == "ready"
        job.process.send_signal(signal.SIGINT)  # as a terminal does; mpiexec passes it on
        done = job.end()
        assert done.left == []
        # The launcher kills ranks that are still on their way out, and joins the bits of all codes.
        assert done.code in (signal.SIGINT, signal.SIGINT | signal.SIGKILL, 128 + signal.SIGINT)
        assert sum("Traceback" in line for line in done.err) == 1
        assert done.err[-1] == "KeyboardInterrupt"


@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("what", ["client.close()", "client.shutdown()"])
@LONG
def test_a_user_who_closes_things(tmp_path: Path, what: str, exclusive: bool) -> None:
    body = f"with lo(exclusive={exclusive}) as client:\n{WORK}\n    {what}\nprint('after')\n"
    done = run(tmp_path, body)
    assert (done.code, done.out, done.err) == (0, "after\n", [])


@pytest.mark.parametrize("exclusive", [True, False])
@LONG
def test_tasks_that_run_on_keep_nobody(tmp_path: Path, exclusive: bool) -> None:
    body = f"""
with lo(exclusive={exclusive}) as client:
    busy = client.map(time.sleep, [300, 301, 302, 303])
    time.sleep(0.5)
    sys.exit(3)
"""
    done = run(tmp_path, body)
    assert (done.code, done.err) == (3, [])


@LONG
def test_ranks_that_wait_sleep(tmp_path: Path) -> None:
    """What the script does after the cluster has ended is no reason to keep cores busy."""
    body = """
from pathlib import Path
def seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
with lo() as client:
    pids = [*client.run(os.getpid).values(), client.run_on_scheduler(os.getpid)]
time.sleep(0.5)
before = [seconds(pid) for pid in pids]
time.sleep(1.5)
print(max(seconds(pid) - b for pid, b in zip(pids, before)) < 0.75)
"""
    done = run(tmp_path, body)
    assert (done.code, done.out, done.err) == (0, "True\n", [])


# ------------------------------------------------------------------------------ what goes wrong
@pytest.mark.parametrize("n", [1, 2])
def test_too_few_ranks(tmp_path: Path, n: int) -> None:
    done = run(tmp_path, "with lo() as client:\n    print('body')\n", n)
    assert done.code == 1
    assert done.out == ""
    assert sum("Traceback" in line for line in done.err) == 1
    assert "needs 3 MPI ranks or more" in done.err[-1]
    assert "mpi(exclusive=False)" in done.err[-1]


def test_ml08_an_mpi_of_another_kind(tmp_path: Path) -> None:
    body = "with lo() as client:\n    print('body')\n"
    done = run(tmp_path, body, None, OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="1")
    assert done.code == 1
    assert done.out == ""
    assert "Open MPI launched this process as rank 1 of 4" in done.err[-1]
    assert "MPICH" in done.err[-1]


@pytest.mark.parametrize("exclusive", [True, pytest.param(False, marks=LONG)])
def test_a_worker_that_cannot_start(tmp_path: Path, exclusive: bool) -> None:
    (tmp_path / "file").touch()
    body = f"""
from mpi4py import MPI
where = "file" if MPI.COMM_WORLD.rank == 3 else None
with lo(exclusive={exclusive}, local_directory=where) as client:
    print("body")
"""
    done = run(tmp_path, body)
    assert done.code != 0
    assert "rank 3 of 4 failed: the job ends" in done.err
    assert any("NotADirectoryError" in line for line in done.err)


@pytest.mark.parametrize("exclusive", [True, False])
@LONG
def test_a_scheduler_that_cannot_start(tmp_path: Path, exclusive: bool) -> None:
    body = f"with lo(exclusive={exclusive}, dashboard='nonsense:x') as client:\n    print('body')\n"
    done = run(tmp_path, body)
    assert done.code != 0
    assert done.out == ""
    assert "rank 0 of 4 failed: the job ends" in done.err


@LONG
def test_workers_that_do_not_come(tmp_path: Path) -> None:
    """The script is told, and the job ends."""
    body = """
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 3:
    from dask_redist.rank import Rank
    async def setup(self, worker): time.sleep(4)
    Rank.setup = setup
with lo(timeout="1s") as client:
    print("body")
"""
    done = run(tmp_path, body)
    assert (done.code, done.out) == (1, "")
    assert "RunTimeoutError" in done.err[-1]


DEATHS = {
    "a task exits": (
        "client.submit(os._exit, 5, workers=[dr.connect(client).addresses[1]]).result()",
        3,
        "a worker",
    ),
    "a task is killed": (
        "client.run(lambda: os.kill(os.getpid(), 9), workers=[dr.connect(client).addresses[1]])",
        3,
        "a worker",
    ),
    "the script is killed": ("os.kill(os.getpid(), 9)", 1, "the script"),
    "the scheduler is killed": (
        "client.run_on_scheduler(lambda: os.kill(os.getpid(), 9))",
        0,
        "the scheduler",
    ),
}


@pytest.mark.parametrize(
    "how",
    ["a task is killed", *(pytest.param(h, marks=LONG) for h in DEATHS if h != "a task is killed")],
)
def test_a_dead_rank_is_named_and_ends_the_job(tmp_path: Path, how: str) -> None:
    statement, rank, part = DEATHS[how]
    body = f"with lo() as client:\n{WORK}\n    {statement}\n    time.sleep(100)\n"
    done = run(tmp_path, body)
    assert done.code != 0
    assert f"rank {rank} of 4 ({part}) has died: the job ends" in done.err


def test_ml04_a_dead_rank_inside_a_collective(tmp_path: Path) -> None:
    body = """
def f(b, block_id=None):
    if block_id == (2, 0): os.kill(os.getpid(), 9)
    return b
with lo(exclusive=False) as client:
    y = da.ones((12, 8), chunks=(3, 8)).map_blocks(f, dtype="f8", meta=np.empty((0, 0)))
    print(dr.redistribute(y, dr.Slab.Y).compute())
"""
    done = run(tmp_path, body)
    assert done.code != 0
    assert done.out == ""
    assert sum("has died: the job ends" in line for line in done.err) == 1


@LONG
def test_a_worker_that_leaves_while_its_process_lives(tmp_path: Path) -> None:
    body = """
with lo() as client:
    client.run(lambda dask_worker: dask_worker.loop.add_callback(dask_worker.close), workers=["3"])
    time.sleep(100)
"""
    body = body.replace('workers=["3"]', "workers=[dr.connect(client).addresses[1]]")
    done = run(tmp_path, body)
    assert done.code != 0
    assert any(line.startswith("rank 3 of 4 (tcp://") for line in done.err)


@LONG
def test_a_worker_that_is_sent_away_does_not_end_the_job(tmp_path: Path) -> None:
    body = f"""
with lo() as client:
    client.retire_workers([dr.connect(client).addresses[1]])
    {WORK.strip()}
    print(dr.connect(client))
"""
    done = run(tmp_path, body)
    assert (done.code, done.err) == (0, [])
    assert done.out.startswith("<Ranks: 1 ")


# ------------------------------------------------------------------------------ the observer
@pytest.fixture
def pairs() -> Iterator[dict[int, tuple[socket.socket, socket.socket]]]:
    made = {rank: socket.socketpair() for rank in range(4)}
    yield made
    for pair in made.values():
        for end in pair:
            end.close()


Peers = dict[int, tuple[int, socket.socket]]


def watched(pairs: dict[int, tuple[socket.socket, socket.socket]]) -> Peers:
    return {theirs.fileno(): (rank, theirs) for rank, (_, theirs) in pairs.items()}


def test_the_first_to_die_is_named_however_late_we_look(pairs: Any) -> None:
    peers = watched(pairs)
    found: list[int | None] = []
    pairs[0][0].sendall(observer.BYE)
    watcher = threading.Thread(target=lambda: found.append(observer.first_dead(peers)))
    watcher.start()
    time.sleep(0.1)
    pairs[2][0].close()
    pairs[1][0].close()
    watcher.join(10)
    assert found == [2]


@pytest.mark.parametrize("last", [observer.BYE, observer.HUSH])
def test_goodbyes_are_no_deaths(pairs: Any, last: bytes) -> None:
    for rank in (0, 1, 2):
        pairs[rank][0].sendall(observer.BYE)
    pairs[3][0].sendall(last)
    assert observer.first_dead(watched(pairs)) is None


def test_all_told_is_enough(pairs: Any) -> None:
    pairs[3][0].sendall(observer.HUSH)
    assert observer.first_dead(watched(pairs)) is None


def test_strangers_are_sent_away() -> None:
    secret = os.urandom(observer.SECRET)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        stranger, rank = (socket.create_connection(address) for _ in range(2))
        with stranger, rank:
            stranger.sendall(os.urandom(observer.SECRET) + bytes(4))
            rank.sendall(secret + (7).to_bytes(4, "big"))
            ((number, peer),) = observer.accept(server, 1, secret).values()
            assert number == 7
            assert stranger.recv(1) == b""
            peer.close()
