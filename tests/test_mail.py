"""Messages over MPI, on ranks of real MPI jobs: bounded memory, and nobody waits for ever."""

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from cluster import MPI, Relayout, check, leftovers, placed
from distributed import Client, LocalCluster, Worker
from mpi_ranks import MPIEXEC, MpiCluster

import dask_redist as dr
from dask_redist import mpigroup
from dask_redist.arena import Arena
from dask_redist.mail import Mail
from dask_redist.mpigroup import Groups
from dask_redist.post import Post
from dask_redist.rank import _telling, rank_of
from dask_redist.ranks import Seat
from dask_redist.tags import Tags
from dask_redist.wires import Place

VALUES = np.arange(60 * 40 * 30.0).reshape(60, 40, 30)


@contextlib.contextmanager
def mpi_ranks(n: int, **options: Any) -> Iterator[Client]:
    """Ranks that no other test has."""
    with (
        dask.config.set({"redist.wire": MPI, **options}),
        dr.LocalMPICluster(n, dashboard_address=None, silence_logs=50, timeout=60) as cluster,
        Client(cluster) as client,
    ):
        yield client


def until(true: Any) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ------------------------------------------------------------------------------------ bounds
def watch_staging(dask_worker: Worker) -> None:
    """Remember the most that was out."""
    rank = rank_of(dask_worker)
    assert rank is not None
    most = vars(dask_worker)["most"] = {"outgoing": 0, "incoming": 0}
    for which in most:
        staging = getattr(rank.reach.mail, f"_{which}")

        def take(nbytes: int, staging: Any = staging, which: str = which) -> Any:
            buffer = type(staging).take(staging, nbytes)
            most[which] = max(most[which], staging.used)
            return buffer

        staging.take = take


def pack_any_amount(dask_worker: Worker) -> None:
    """Leave the bound to those who receive."""
    rank = rank_of(dask_worker)
    assert rank is not None
    rank.reach.mail._outgoing.limit = 1 << 30


def staged(dask_worker: Worker) -> dict[str, int]:
    """The most that was out."""
    most: dict[str, int] = vars(dask_worker)["most"]
    return most


def test_any_amount_goes_through_bounded_memory() -> None:
    options = {"redist.mpi.staging-bytes": 64 * 1024, "redist.message-bytes": 4096}
    with mpi_ranks(3, **options) as client:
        assert set(dr.connect(client).wires.values()) == {"direct", MPI}
        client.run(watch_staging)
        x = placed(client, VALUES, (7, -1, -1))
        check(dr.redistribute(x, dr.Slab.Z, client=client), VALUES)
        y = dr.redistribute(x, (20, 5, 30), client=client)
        z = dr.redistribute(y, dr.Pencil.Y, client=client)
        check(z, VALUES)
        columns = placed(client, VALUES, (-1, 7, -1))  # these come to rows that are apart
        check(dr.redistribute(columns, dr.Slab.X, client=client), VALUES)
        with dr.enable():
            got = da.median(x, axis=0).compute(), x.std(axis=0).compute()
        np.testing.assert_array_equal(got[0], np.median(VALUES, axis=0))
        np.testing.assert_allclose(got[1], VALUES.std(axis=0))
        for most in client.run(staged).values():
            assert all(0 < nbytes <= 32 * 1024 for nbytes in most.values()), most
        client.run(pack_any_amount)
        check(dr.redistribute(columns, (20, 40, 30), client=client), VALUES)
        for most in client.run(staged).values():
            assert most["incoming"] <= 32 * 1024 < most["outgoing"], most
        del x, y, z, columns
        until(lambda: not leftovers(client))


@pytest.mark.parametrize("straight", [True, pytest.param(False, marks=pytest.mark.everything)])
def test_what_lies_in_one_run_is_received_where_it_belongs(straight: bool) -> None:
    rows, columns = (30, -1, -1), (-1, 20, -1)
    with mpi_ranks(2) as client:
        x = placed(client, VALUES, rows if straight else columns)
        client.run(watch_staging)
        y = dr.redistribute(x, dr.Slab.Z if straight else dr.Slab.X, client=client).persist()
        check(y, VALUES)
        assert {most["incoming"] == 0 for most in client.run(staged).values()} == {straight}
        del x, y
        until(lambda: not leftovers(client))


@pytest.mark.wires
@pytest.mark.ranks(3)
def test_a_plan_says_what_is_staged(client: Client, wire: str) -> None:
    x = placed(client, VALUES, (20, -1, -1))
    plan = dr.plan(x, dr.Slab.Y)
    off = plan.traffic - np.diag(np.diag(plan.traffic))
    with dask.config.set({"redist.mpi.staging-bytes": 100_000}):
        small = [plan.staging_bytes(rank) for rank in range(3)]
    for rank in range(3):
        moved = [int(off[rank].sum()), int(off[:, rank].sum())]
        assert plan.staging_bytes(rank) == (sum(moved) if wire == MPI else 0)
        assert small[rank] == (sum(min(n, 50_000) for n in moved) if wire == MPI else 0)
        plain = int(plan.traffic[rank].sum() + plan.traffic[:, rank].sum())
        assert plan.peak_bytes(rank) == plain + plan.staging_bytes(rank)


@pytest.mark.wires
@pytest.mark.ranks(2)
def test_sz01_a_piece_of_more_than_2_gib(
    request: pytest.FixtureRequest, relayout: Relayout, client: Client, wire: str
) -> None:
    # https://github.com/mpi4py/mpi4py/issues/575
    if not (request.config.getoption("everything") and wire == MPI):
        pytest.skip("takes 5 GiB: with --everything, and over MPI")
    large, period = 2**31 + 8, 251
    step = period << 12
    pattern = np.tile(np.arange(period, dtype="u1"), (step // period) + 1)

    def number(length: int) -> np.ndarray:
        return np.concatenate([pattern[: min(step, length - k)] for k in range(0, length, step)])

    def errors(block: np.ndarray, block_info: Any) -> np.ndarray:
        first = block_info[0]["array-location"][0][0]
        right = pattern[first % period :][:step]
        parts = (block[k : k + step] for k in range(0, len(block), step))
        return np.array([sum(int((part != right[: len(part)]).sum()) for part in parts)])

    first = client.submit(number, large, workers=[dr.connect(client).addresses[0]])
    x = da.from_delayed(first, (large,), "u1").rechunk((large,))
    y = relayout(x, dr.Uneven(0, (8, large - 8)))
    wrong = da.map_blocks(errors, y, dtype="i8", chunks=(1,))
    assert wrong.compute().tolist() == [0, 0]
    (report,) = relayout.reports()
    assert report.wires[MPI] == large - 8


# ------------------------------------------------------------------------ who does not answer
def impatient(dask_worker: Worker) -> None:
    """Wait 2 seconds for messages."""
    rank = rank_of(dask_worker)
    assert rank is not None
    rank.reach.mail._timeout = 2.0


async def never_gives(dask_worker: Worker, silent: bool) -> None:
    """Do not answer who asks for what was offered."""
    rank = rank_of(dask_worker)
    assert rank is not None
    handlers: dict[str, Any] = dask_worker.handlers

    async def agree(serial: int) -> bool:
        await asyncio.sleep(4)
        raise OSError("too late")

    handlers["redist_give"] = agree if silent else rank.reach.mail.give


def test_a_message_that_never_comes_is_given_up_by_name() -> None:
    with mpi_ranks(2) as client:
        first, second = dr.connect(client).addresses
        x = placed(client, VALUES, (30, -1, -1))
        client.run(impatient)
        client.run(never_gives, silent=True, workers=[first])
        with pytest.raises(dr.RunTimeoutError, match="over MPI from the rank on") as error:
            dr.redistribute(x, dr.Slab.Y, client=client).compute()
        assert first in str(error.value)
        assert second in str(error.value)
        client.run(never_gives, silent=False, workers=[first])
        check(dr.redistribute(x, dr.Slab.Z, client=client), VALUES)
        del x, error
        until(lambda: not leftovers(client))


async def sends_late(dask_worker: Worker, seconds: float) -> None:
    """Begin to send only so long after it was said."""
    rank = rank_of(dask_worker)
    assert rank is not None
    post = rank.reach.mail._post

    def send(comm: Any, dest: int, tag: int, buffer: Any) -> Any:
        time.sleep(seconds)
        return comm.Isend(buffer, dest, tag)

    def late(comm: Any, dest: int, tag: int, buffer: Any) -> Any:
        return post.collective(lambda: send(comm, dest, tag, buffer), buffer)

    vars(post)["send"] = late


@pytest.mark.everything
def test_a_message_that_comes_late_is_taken_all_the_same() -> None:
    """MPI takes no send back: its buffer would be out for ever."""
    with mpi_ranks(2) as client:
        first, _ = dr.connect(client).addresses
        x = placed(client, VALUES, (30, -1, -1))
        client.run(impatient)
        client.run(sends_late, seconds=4, workers=[first])
        with pytest.raises(dr.RunTimeoutError, match="over MPI"):
            dr.redistribute(x, dr.Slab.Y, client=client).compute()
        client.run(sends_late, seconds=0, workers=[first])
        until(lambda: all(not any(out.values()) for out in client.run(out_now).values()))
        check(dr.redistribute(x, dr.Slab.Z, client=client), VALUES)
        del x
        until(lambda: not leftovers(client))


async def out_now(dask_worker: Worker) -> dict[str, int]:
    """Bytes that messages have."""
    rank = rank_of(dask_worker)
    assert rank is not None
    mail = rank.reach.mail
    gc.collect()
    return {
        "outgoing": mail._outgoing.used,
        "incoming": mail._incoming.used,
    }


class Alone:
    """A worker as far as mail needs one."""

    name, address = "alone", "tcp://alone:1"

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.asyncio_loop = self, loop


def test_who_waits_for_room_has_open_messages_sent() -> None:
    sent: list[int] = []

    async def offer(group: Any, number: int, owner: Any, headers: Any, buffer: Any) -> None:
        sent.append(len(buffer))

    async def main() -> None:
        worker: Any = Alone(asyncio.get_running_loop())
        nobody: Any = None
        with dask.config.set({"redist.mpi.staging-bytes": 4000, "redist.timeout": "1s"}):
            mail = Mail(worker, Arena(1 << 20, keep=0), nobody)
        mail._offer = offer  # type: ignore[method-assign]
        mail._group = lambda owner: nobody  # type: ignore[assignment, method-assign]
        owner = Seat(1, "tcp://there:1", "there", *[nobody] * (len(Seat._fields) - 3))
        wire = mail.wire_to(1, owner, far=True)
        place = Place(0, 0, (100,), "u1")
        wire.write(place, (slice(0, 100),), np.zeros(100, "u1"))
        assert not sent
        buffer = await mail._room(mail._outgoing, 1950)
        assert (len(buffer), sent) == (1950, [100])
        mail.close()

    asyncio.run(main())


def test_no_tag_is_used_twice_at_a_time() -> None:
    tags = Tags(odd=0, count=3)
    assert [tags.take() for _ in range(3)] == [0, 2, 4]
    with pytest.raises(OSError, match="3 messages are under way"):
        tags.take()
    tags.free(2)
    assert tags.take() == 2


# --------------------------------------------------------------------------------- the world
@pytest.mark.wires
@pytest.mark.ranks(3)
def test_the_ranks_have_a_communicator_in_their_order(client: Client, wire: str) -> None:
    def where(dask_worker: Worker) -> Any:
        rank = rank_of(dask_worker)
        assert rank is not None
        group = rank.reach.mail.groups.newest
        if group is None:
            return None
        return group.users.rank, group.users.size, group.users is group.comm

    found = client.run(where)
    for rank, address in enumerate(dr.connect(client).addresses):
        assert found[address] == ((rank, 3, False) if wire == MPI else None)


@pytest.mark.wires
@pytest.mark.ranks(3)
def test_programs_on_the_ranks_have_it_while_messages_move(client: Client, wire: str) -> None:
    def code(nothing: Any, comm: Any) -> Any:
        found = np.zeros(comm.size, "i8")
        comm.mpi.Allgather(np.array([10 * comm.rank]), found)
        return found.tolist()

    if wire != MPI:
        with pytest.raises(dr.RedistError, match="LocalMPICluster"):
            dr.map_ranks(code, None)
        return
    x = placed(client, VALUES, (20, -1, -1))
    for target in (dr.Slab.Y, dr.Slab.Z, dr.Pencil.X):
        y = dr.redistribute(x, target).persist()
        assert dr.map_ranks(code, None) == [[0, 10, 20]] * 3
        check(y, VALUES)
        del y


@pytest.mark.everything
def test_two_worlds_are_told_apart() -> None:
    """Both have a rank 0 and a rank 1; that proves nothing."""
    with dask.config.set({"redist.wire": MPI}):
        cluster = MpiCluster(4, [(MPIEXEC, "-n", "2")] * 2)
    with cluster, Client(cluster.scheduler_address) as client:
        with pytest.raises(dr.RedistError, match="MPI world") as error:
            dr.connect(client, 4)
        assert "LocalMPICluster" in str(error.value)


def test_mpi_cannot_be_forced_where_there_is_none() -> None:
    with (
        dask.config.set({"redist.wire": MPI}),
        LocalCluster(2, threads_per_worker=1, host="127.0.0.1", dashboard_address=":0") as local,
        Client(local) as client,
    ):
        with pytest.raises(dr.RedistError, match="mpi4py has not been started") as error:
            dr.connect(client)
        assert "LocalMPICluster" in str(error.value)
        assert "tcp://127.0.0.1" in str(error.value)


@pytest.mark.everything
def test_ranks_of_two_jobs_use_mpi_within_each() -> None:
    """Here all share memory, so what could go over MPI is looked up; the values are right too."""

    def group(dask_worker: Worker) -> Any:
        rank = rank_of(dask_worker)
        assert rank is not None
        newest = rank.reach.mail.groups.newest
        assert newest is not None
        return newest.number, sorted(newest.ranks), newest.users.allreduce(1), newest.users.rank

    def mpi(nothing: None, comm: dr.RankComm) -> str:
        with pytest.raises(dr.RedistError) as error:
            comm.mpi.Barrier()
        return str(error.value)

    with (
        MpiCluster(4, [(MPIEXEC, "-n", "2")] * 2) as cluster,
        Client(cluster.scheduler_address) as client,
    ):
        ranks = dr.connect(client, 4)
        found = client.run(group)
        assert {number for number, *_ in found.values()} == {1, 2}
        (first, second) = (seats for _, seats, _, rank in found.values() if not rank)
        assert sorted(first + second) == sorted(seat.seat for seat in ranks.seats)
        assert {size for _, _, size, _ in found.values()} == {2}
        assert all("has no communicator" in told for told in dr.map_ranks(mpi, None))
        x = placed(client, VALUES, (15, -1, -1))
        check(dr.redistribute(x, dr.Slab.Y, client=client), VALUES)
        del x


def address_of(client: Client, name: int) -> str:
    """The address of a worker that is no rank yet."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    (found,) = [address for address, worker in workers.items() if worker["name"] == name]
    return str(found)


def be_late(dask_worker: Worker) -> None:
    """Come to the first roll when the others have gone."""
    roll = Groups.roll

    async def late(self: Groups, *told: Any, **arguments: Any) -> None:
        Groups.roll = roll  # type: ignore[method-assign]
        await asyncio.sleep(3)
        await roll(self, *told, **arguments)

    Groups.roll = late  # type: ignore[method-assign]


def as_it_was(dask_worker: Worker) -> None:
    """Answer rolls at once again."""
    rank = rank_of(dask_worker)
    assert rank is not None
    dask_worker.handlers["redist_roll"] = _telling(rank.reach.mail.groups.roll)


@pytest.mark.everything
def test_a_rank_that_does_not_come_to_the_meeting_keeps_nobody_in_mpi() -> None:
    """The others are told, are free, and meet when it comes."""
    with mpi_ranks(3, **{"redist.timeout": "4s"}) as client:
        absent = address_of(client, 1)
        client.run(be_late, workers=[absent])
        with pytest.raises(dr.RunTimeoutError, match="rank 1 ") as error:
            dr.connect(client)
        assert absent in str(error.value) or "of the MPI world" in str(error.value)
        client.run(as_it_was, workers=[absent])
        time.sleep(4)  # it hears what the others have said, and is not to meet anybody for that
        assert set(dr.connect(client).wires.values()) == {"direct", MPI}
        x = placed(client, VALUES, (20, -1, -1))
        check(dr.redistribute(x, dr.Slab.Y, client=client), VALUES)
        del x


def enter_late(dask_worker: Worker) -> None:
    """Answer the roll, and stop before the collective call."""
    make = mpigroup._make

    def late(ranks: Any, tag: int) -> Any:
        mpigroup._make = make
        time.sleep(6)
        return make(ranks, tag)

    mpigroup._make = late


@pytest.mark.everything
def test_a_rank_that_waits_in_mpi_says_so_and_uses_none_until_it_comes_out() -> None:
    with mpi_ranks(3, **{"redist.timeout": "8s"}) as client:
        late = address_of(client, 2)
        client.run(enter_late, workers=[late])
        with pytest.raises(dr.RunTimeoutError, match="MPI_Comm_create_group for rank"):
            dr.connect(client)
        with pytest.raises(dr.RedistError, match="it waits in MPI_Comm_create_group"):
            dr.connect(client)  # the wire is forced
        time.sleep(5)
        assert set(dr.connect(client).wires.values()) == {"direct", MPI}


def test_programs_may_wait_in_mpi_while_python_goes_on() -> None:
    """In the first lower-case collective of a communicator, too."""

    def code(nothing: Any, comm: Any) -> float:
        beats, over = [time.monotonic()], threading.Event()

        def beat() -> None:
            while not over.wait(0.01):
                beats.append(time.monotonic())

        thread = threading.Thread(target=beat)
        thread.start()
        if comm.rank > 0:
            time.sleep(2)
        assert comm.mpi.allreduce(comm.rank) == 3
        over.set()
        thread.join()
        return float(np.diff(beats).max())

    with mpi_ranks(3) as client:
        dr.connect(client)
        pause, *_ = dr.map_ranks(code, None)
        assert pause < 1.5  # not the 2 seconds for which rank 0 waits


class Letters:
    """A post whose messages arrive when the test says so; a receive gets what has its tag."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, Any, Future[None]]] = []

    def receive(self, comm: Any, source: int, tag: int, buffer: Any) -> "Future[None]":
        self.waiting.append((tag, buffer, Future()))
        return self.waiting[-1][2]

    def arrive(self, tag: int, content: bytes) -> None:
        for wanted, buffer, future in self.waiting:
            if wanted == tag and not future.done():
                buffer[:] = np.frombuffer(content, "u1")
                future.set_result(None)


def test_a_proof_that_comes_late_is_not_taken_for_the_next(monkeypatch: Any) -> None:
    monkeypatch.setattr(mpigroup, "mpi_here", lambda: World(3))
    monkeypatch.setattr(mpigroup, "_PATIENCE", 0.1)
    letters, asked = Letters(), []
    any_letters: Any = letters

    class Here:
        address = "tcp://here:1"

        def rpc(self, address: str) -> Any:
            return self

        async def redist_proof(self, rank: int, tag: int) -> bytes:
            asked.append(tag)
            proof = bytes([len(asked)]) * 16
            if len(asked) == 2:
                letters.arrive(asked[0], bytes([1]) * 16)  # that of the first attempt, late
                letters.arrive(tag, proof)
            return proof

    here: Any = Here()
    groups = Groups(here, any_letters)
    assert not asyncio.run(groups.prove("tcp://there:1", 1))
    assert "another MPI world" in groups.why_not()
    assert asyncio.run(groups.prove("tcp://there:1", 1))
    assert asked[0] != asked[1]


class World:
    """What a module mpi4py.MPI says."""

    THREAD_SERIALIZED = 2

    def __init__(self, level: int, size: int = 2, rank: int = 0) -> None:
        self.COMM_WORLD = self
        self.level, self.size, self.rank = level, size, rank
        self.sent: list[tuple[Any, int, int]] = []

    def Query_thread(self) -> int:
        return self.level


@pytest.mark.parametrize(
    ("world", "reason"),
    [
        (None, "has not been started"),
        (World(3, size=1), "alone"),
        (World(1), "thread level 1"),
        (World(2), ""),
        (World(3), ""),
    ],
)
def test_why_a_rank_has_no_mpi(
    monkeypatch: pytest.MonkeyPatch, world: World | None, reason: str
) -> None:
    monkeypatch.setattr(mpigroup, "mpi_here", lambda: world)

    class Here:
        address = "tcp://here:1"

    here: Any = Here()
    groups = Groups(here, Post("no thread"))
    assert reason in groups.why_not()
    assert bool(groups.why_not()) == bool(reason)
    assert asyncio.run(groups.prove("tcp://here:1", 0)) == (not reason)
    assert groups.newest is None
    with pytest.raises(OSError, match="communicator 3"):
        groups[3]
