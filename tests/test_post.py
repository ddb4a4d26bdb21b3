"""The post: one thread that moves bytes, here over a communicator in the hands of the tests."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from dask_redist import post as post_module
from dask_redist.post import Post


class Request:
    """A call under way, until the test lets it end."""

    def __init__(self, comm: "Comm", buffer: Any) -> None:
        self.comm, self.buffer = comm, buffer
        self.done = self.cancelled = False

    def Test(self) -> bool:
        self.comm.tests.append(threading.get_ident())
        if self.comm.broken:
            raise RuntimeError("MPI_ERR_OTHER")
        return self.done or self.cancelled

    def Cancel(self) -> None:
        self.cancelled = self.comm.cancels


class Comm:
    """Keeps what was asked of it."""

    def __init__(self) -> None:
        self.sends: list[Request] = []
        self.receives: list[Request] = []
        self.tests: list[int] = []
        self.broken = False
        self.cancels = True

    def Isend(self, buffer: Any, dest: int, tag: int) -> Request:
        if dest < 0:
            raise RuntimeError("Invalid rank")
        self.sends.append(Request(self, buffer))
        return self.sends[-1]

    def Irecv(self, buffer: Any, source: int, tag: int) -> Request:
        self.receives.append(Request(self, buffer))
        return self.receives[-1]


@pytest.fixture
def post() -> Iterator[Post]:
    post = Post("post of a test")
    yield post
    post.close()


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def buffer() -> np.ndarray:
    return np.zeros(8, "u1")


def test_futures_end_when_the_calls_do(post: Post) -> None:
    comm = Comm()
    sent, received = post.send(comm, 1, 2, buffer()), post.receive(comm, 1, 3, buffer())
    until(lambda: comm.sends and comm.receives)
    assert not sent.done()
    comm.receives[0].done = True
    received.result(30)
    assert not sent.done()
    comm.sends[0].done = True
    sent.result(30)


def test_one_thread_makes_all_calls_and_sleeps_between(post: Post) -> None:
    comm = Comm()
    futures = [post.send(comm, 1, tag, buffer()) for tag in range(3)]
    who = post.call(threading.get_ident).result(30)
    until(lambda: len(comm.sends) == 3)
    for request in comm.sends:
        request.done = True
    for future in futures:
        future.result(30)
    assert set(comm.tests) == {who} != {threading.get_ident()}
    tests = len(comm.tests)
    time.sleep(0.05)
    assert len(comm.tests) == tests


def test_who_cancels_a_receive_takes_it_back(post: Post) -> None:
    comm = Comm()
    comm.cancels = False  # it has been matched: MPI writes into the buffer still
    first = buffer()
    alive = weakref.ref(first)
    future = post.receive(comm, 1, 2, first)
    until(lambda: comm.receives)
    del first
    comm.receives[0].buffer = None
    assert future.cancel()
    tests = len(comm.tests)
    until(lambda: len(comm.tests) > tests + 3)
    gc.collect()
    assert alive() is not None
    comm.cancels = True
    until(lambda: alive() is None)


def test_a_send_that_nobody_waits_for_goes_on(post: Post) -> None:
    comm = Comm()
    post.send(comm, 1, 2, buffer()).cancel()
    later = post.send(comm, 1, 2, buffer())
    until(lambda: comm.sends)
    later.cancel()
    time.sleep(0.01)
    assert not any(request.cancelled for request in comm.sends)


def test_what_fails_reaches_who_waits_and_nobody_else(post: Post) -> None:
    comm, broken = Comm(), Comm()
    with pytest.raises(RuntimeError, match="Invalid rank"):
        post.send(comm, -1, 0, buffer()).result(30)
    broken.broken = True
    good, bad = post.send(comm, 1, 0, buffer()), post.receive(broken, 1, 0, buffer())
    with pytest.raises(RuntimeError, match="MPI_ERR_OTHER"):
        bad.result(30)
    comm.sends[0].done = True
    good.result(30)
    with pytest.raises(ZeroDivisionError):
        post.call(lambda: 1 // 0).result(30)


def test_buffers_are_let_go_while_nothing_moves(post: Post) -> None:
    comm, sent = Comm(), buffer()
    alive = weakref.ref(sent)
    future = post.send(comm, 1, 2, sent)
    until(lambda: comm.sends)
    comm.sends.pop().done = True
    future.result(30)
    del sent, future
    until(lambda: alive() is None)


def test_a_closed_post_refuses_and_lets_nobody_wait() -> None:
    post, comm = Post("post of a test"), Comm()
    waiting = post.receive(comm, 1, 2, buffer())
    until(lambda: comm.receives)
    post.close()
    until(waiting.done)
    assert waiting.cancelled()
    assert comm.receives[0].cancelled
    with pytest.raises(OSError, match="closed"):
        post.send(comm, 1, 2, buffer()).result(30)


def test_close_ends_the_thread_and_keeps_what_mpi_still_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(post_module, "_unfinished", kept)
    post, comm = Post("post that closes"), Comm()
    comm.cancels = False
    post.send(comm, 1, 2, buffer())
    received = buffer()
    alive = weakref.ref(received)
    post.receive(comm, 1, 2, received)
    until(lambda: comm.sends and comm.receives)
    comm.receives[0].buffer = None
    del received
    post.close()
    assert not any(thread.name == "post that closes" for thread in threading.enumerate())
    gc.collect()
    assert alive() is not None
    assert len(kept) == 2
