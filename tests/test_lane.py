"""Lanes: one order, whatever order the tickets come in."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_redist.lane import Lane, insist

NAME = "lane-under-test"
BEGIN = None


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    for thread in threads():
        thread.join(30)
    assert not threads()


def begun(last: int = 0) -> Lane:
    lane = Lane(NAME)
    lane.begin(last)
    return lane


def noted(done: list[int], ticket: int) -> Callable[[], None]:
    return lambda: done.append(ticket)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never comes"
        time.sleep(0.001)


@settings(deadline=None, max_examples=60)
@given(
    data=st.data(),
    last=st.integers(0, 9),
    n=st.integers(0, 30),
    ranks=st.integers(1, 3),
    senders=st.integers(1, 5),
)
def test_all_lanes_execute_in_one_order(
    data: st.DataObject, last: int, n: int, ranks: int, senders: int
) -> None:
    """From several threads at once, in another order at each rank, old tickets and some twice.

    Each rank learns at another moment which ticket was the last one before.
    """
    tickets = range(last + 1, last + n + 1)
    done: list[list[int]] = [[] for _ in range(ranks)]
    lanes = [Lane(f"{NAME}-{rank}") for rank in range(ranks)]
    jobs = [data.draw(st.sets(st.sampled_from(tickets) if n else st.nothing())) for _ in lanes]
    start = threading.Barrier(senders)
    told: list[tuple[int, int | None]] = []
    for rank in range(ranks):
        order = data.draw(st.permutations(tickets))
        old = data.draw(st.lists(st.sampled_from(range(1, last + 1)), max_size=3)) if last else []
        again = data.draw(st.lists(st.sampled_from(tickets), max_size=3)) if n else []
        messages: list[int | None] = [*old, *order, *again]
        messages.insert(data.draw(st.integers(0, len(messages))), BEGIN)
        told += [(rank, message) for message in messages]

    def send(part: list[tuple[int, int | None]]) -> None:
        start.wait(30)
        for rank, ticket in part:
            if ticket is BEGIN:
                lanes[rank].begin(last)
                continue
            job = ticket <= last or ticket in jobs[rank]
            lanes[rank].submit(ticket, noted(done[rank], ticket) if job else None)

    parts = [told[k::senders] for k in range(senders)]
    sending = [threading.Thread(target=send, args=(part,)) for part in parts]
    for thread in sending:
        thread.start()
    for thread in sending:
        thread.join()
    for lane in lanes:
        lane.close()
    assert done == [sorted(wanted) for wanted in jobs]
    assert not threads()


def test_a_job_waits_for_all_tickets_before_its_own() -> None:
    lane, done = begun(), list[int]()
    lane.submit(3, noted(done, 3))
    lane.submit(1, noted(done, 1))
    wait_for(lambda: done == [1])
    time.sleep(0.05)  # time enough for a lane that does not wait
    assert done == [1]
    lane.submit(2, None)
    wait_for(lambda: done == [1, 3])
    lane.close()


def test_one_job_at_a_time() -> None:
    lane, inside, most = begun(), list[int](), list[int]()

    def job() -> None:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.001)
        inside.pop()

    for ticket in range(1, 20):
        lane.submit(ticket, job)
    lane.close()
    assert most == [1] * 19


def test_submit_does_not_wait_for_the_job() -> None:
    lane, go_on, done = begun(), threading.Event(), list[int]()
    lane.submit(1, lambda: go_on.wait(30))
    lane.submit(2, noted(done, 2))
    assert not done
    go_on.set()
    lane.close()
    assert done == [2]


def test_of_one_ticket_the_first_job_counts() -> None:
    """The second telling finds nothing left to do, and must not take the first one's place."""
    lane, done = begun(), list[int]()
    lane.submit(2, noted(done, 2))
    lane.submit(2, None)
    lane.submit(1, None)
    wait_for(lambda: done == [2])
    lane.submit(2, noted(done, -2))
    lane.submit(3, noted(done, 3))
    lane.close()
    assert done == [2, 3]


def test_a_lane_that_joins_late_leaves_older_tickets_alone() -> None:
    lane, done = begun(last=7), list[int]()
    for ticket in (9, 7, 6, 8, 1):
        lane.submit(ticket, noted(done, ticket))
    lane.close()
    assert done == [8, 9]


def test_tickets_that_outrun_the_last_one_before_are_collected() -> None:
    """None is executed before the order is known, and none that is not this lane's own."""
    lane, done = Lane(NAME), list[int]()
    for ticket in (1, 9, 7, 8):
        lane.submit(ticket, noted(done, ticket))
    time.sleep(0.05)  # time enough for a lane that does not wait
    assert not done
    lane.begin(7)
    wait_for(lambda: done == [8, 9])
    lane.submit(10, noted(done, 10))
    lane.close()
    assert done == [8, 9, 10]


def test_a_lane_that_never_began_drops_what_it_collected() -> None:
    lane, done = Lane(NAME), list[int]()
    lane.submit(1, noted(done, 1))
    lane.close()
    assert not done
    assert not threads()


@pytest.mark.parametrize("error", [OSError, RuntimeError, SystemExit, KeyboardInterrupt])
def test_a_job_that_raises_does_not_stop_the_lane(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    lane, done = begun(), list[int]()

    def fails() -> None:
        done.append(1)
        raise error("no")

    lane.submit(2, noted(done, 2))
    lane.submit(1, fails)
    lane.close()
    assert done == [1, 2]
    assert [record.getMessage() for record in caplog.records] == ["ticket 1 failed"]


def test_a_job_may_submit() -> None:
    lane, done = begun(), list[int]()
    lane.submit(1, lambda: lane.submit(2, noted(done, 2)))
    wait_for(lambda: done == [2])
    lane.close()


# -------------------------------------------------------------------------------------- the end
def test_close_executes_what_is_there() -> None:
    lane, go_on, done = begun(), threading.Event(), list[int]()
    lane.submit(1, lambda: go_on.wait(30))
    for ticket in (4, 2, 3):
        lane.submit(ticket, noted(done, ticket))
    threading.Timer(0.05, go_on.set).start()
    lane.close()
    assert done == [2, 3, 4]
    assert not threads()


def test_close_drops_what_is_behind_a_missing_ticket() -> None:
    lane, done = begun(), list[int]()
    for ticket in (1, 2, 4, 5):
        lane.submit(ticket, noted(done, ticket))
    lane.close()
    assert done == [1, 2]
    assert not threads()
    lane.submit(3, noted(done, 3))
    lane.close()
    assert done == [1, 2]
    assert not threads()


def test_close_gives_up_waiting_after_the_timeout() -> None:
    lane, go_on, done = begun(), threading.Event(), list[int]()
    lane.submit(1, lambda: go_on.wait(30))
    lane.submit(2, noted(done, 2))
    lane.close(timeout=0)
    assert threads()
    go_on.set()
    wait_for(lambda: not threads())
    assert done == [2]


def test_a_lane_without_tickets_has_no_thread() -> None:
    lane = begun()
    lane.submit(0, lambda: None)
    assert not threads()
    lane.close()


class Job:
    """A job that can be watched."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def __call__(self) -> None:
        self.done.set()


def test_a_job_is_let_go_when_it_is_over() -> None:
    """It holds the pieces of its run; the next ticket may come in an hour, or never."""
    lane, job = begun(), Job()
    done, alive = job.done, weakref.ref(job)
    lane.submit(1, job)
    del job
    assert done.wait(30)

    def is_gone() -> bool:
        gc.collect()
        return alive() is None

    wait_for(is_gone)
    lane.close()


def test_jobs_that_are_dropped_are_let_go() -> None:
    lane, job = begun(), Job()
    alive = weakref.ref(job)
    lane.submit(2, job)
    del job
    lane.close()
    gc.collect()
    assert alive() is None


def test_jobs_that_came_too_early_for_this_lane_are_let_go() -> None:
    lane, job = Lane(NAME), Job()
    alive = weakref.ref(job)
    lane.submit(3, job)
    del job
    lane.begin(3)
    gc.collect()
    assert alive() is None
    lane.close()


@pytest.mark.parametrize("busy", [False, True])
def test_a_closed_lane_takes_no_ticket(busy: bool) -> None:
    lane, go_on, done = begun(), threading.Event(), list[int]()
    if busy:
        lane.submit(1, lambda: go_on.wait(30))
    lane.close(timeout=0)
    lane.submit(1 + busy, noted(done, 1 + busy))
    assert len(threads()) == busy
    go_on.set()
    wait_for(lambda: not threads())
    assert not done


def test_done_says_what_has_been_executed() -> None:
    lane, go = begun(4), threading.Event()
    assert lane.done == 4
    lane.submit(6, None)
    lane.submit(5, go.wait)
    time.sleep(0.05)
    assert lane.done == 4, "5 is being executed"
    go.set()
    wait_for(lambda: lane.done == 6)
    lane.close()


def test_who_must_hear_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dask_redist.lane.PAUSES", (0.0, 0.0))
    told: list[int] = []

    def tell(failures: int) -> None:
        told.append(failures)
        if len(told) <= failures:
            raise OSError("the connection is closed")

    insist(lambda: tell(2))
    assert told == [2, 2, 2]
    told.clear()
    with pytest.raises(OSError, match="closed"):
        insist(lambda: tell(3))
    told.clear()
    with pytest.raises(ZeroDivisionError):
        insist(lambda: told.append(1 // 0))
