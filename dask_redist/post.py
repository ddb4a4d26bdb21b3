"""The post: the one thread of a rank that makes all its MPI calls for messages.

Who sends or receives hands a buffer in and gets a future. The thread starts the nonblocking call,
tests what is under way until it is done, and sleeps while nothing is: MPI burns a core while it
waits, so nobody waits in it. There is no clock here: who has no patience left cancels the future.

MPI is used through the communicators that callers bring; nothing is imported.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from dask_redist.segment import Bytes

__all__ = ["Post"]

logger = logging.getLogger(__name__)

#: rounds of tests in a row without a result after which the thread sleeps between them
_EAGER = 200
#: seconds that it sleeps then: at first, at most
_SHORT, _LONG = 2e-5, 1e-3


class _Transfer(NamedTuple):
    """A call under way."""

    request: Any
    buffer: Any  # MPI's until the call is done, also where nobody waits any more
    future: Future[None]
    sends: bool


#: calls that a post has left under way: their buffers are MPI's until the process ends
_unfinished: list[_Transfer] = []


class Post:
    """Moves bytes over MPI; thread-safe.

    Parameters
    ----------
    name
        Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._orders: deque[tuple[Callable[[], Any], Any, Future[Any], bool]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._in_vain = 0  # rounds of tests in a row without a result

    def send(self, comm: Any, dest: int, tag: int, buffer: Bytes) -> Future[None]:
        """Send a buffer; it must not change before the future is done.

        Cancelling the future only means that nobody waits for it.
        """
        return self._order(lambda: comm.Isend(buffer, dest, tag), buffer, True)

    def receive(self, comm: Any, source: int, tag: int, buffer: Bytes) -> Future[None]:
        """Receive into a buffer; cancelling the future takes the receive back."""
        return self._order(lambda: comm.Irecv(buffer, source, tag), buffer, False)

    def collective(self, start: Callable[[], Any], buffers: Any) -> Future[None]:
        """Start a nonblocking collective, which all ranks of its communicator do in one order.

        The buffers are MPI's until the future is done; cancelling it only means that nobody waits.
        """
        return self._order(start, buffers, True)

    def call(self, make: Callable[[], Any]) -> Future[Any]:
        """Make an MPI call in the thread, while all transfers rest; the future has its value."""
        return self._order(make, None, True)

    def close(self, timeout: float = 5.0) -> None:
        """End the thread, and what is under way as far as MPI lets go of it."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
            if thread.is_alive():
                logger.warning(
                    "%s is in an MPI call that has not ended for %g s", self._name, timeout
                )

    def _order(self, start: Callable[[], Any], buffer: Any, sends: bool) -> Future[Any]:
        future: Future[Any] = Future()
        with self._changed:
            if self._closed:
                future.set_exception(OSError("the rank is closed: nothing moves over MPI any more"))
                return future
            self._orders.append((start, buffer, future, sends))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()
        return future

    # ----------------------------------------------------------------------- in the thread
    def _work(self) -> None:
        under_way: list[_Transfer] = []
        while self._turn(under_way):
            pass
        for transfer in under_way:
            transfer.future.cancel()
            if not _is_done(transfer):
                _unfinished.append(transfer)

    def _turn(self, under_way: list[_Transfer]) -> bool:
        """Start what has come, and test what is under way; False when the post is closed.

        On its own so that buffers are let go before the next wait.
        """
        with self._changed:
            if not under_way:
                self._changed.wait_for(lambda: self._orders or self._closed)
            elif self._in_vain > _EAGER and not self._orders:
                pause = _SHORT * 2 ** min((self._in_vain - _EAGER) // 16, 20)
                self._changed.wait(min(pause, _LONG))
            orders, closed = list(self._orders), self._closed
            self._orders.clear()
        begun = [_begun(*order) for order in orders]
        under_way += [transfer for transfer in begun if transfer is not None]
        before = len(under_way)
        under_way[:] = [transfer for transfer in under_way if not _is_done(transfer)]
        self._in_vain = self._in_vain + 1 if len(under_way) == before else 0
        return not closed


def _begun(
    start: Callable[[], Any], buffer: Any, future: Future[Any], sends: bool
) -> _Transfer | None:
    """Make the call; None if nothing is left to wait for."""
    if future.cancelled():
        return None
    try:
        found = start()
    except Exception as error:
        _settle(future, error)
        return None
    if buffer is None:
        _settle(future, found)
        return None
    return _Transfer(found, buffer, future, sends)


def _is_done(transfer: _Transfer) -> bool:
    """Test a call; whoever waits for it is told."""
    try:
        if transfer.future.cancelled() and not transfer.sends:
            transfer.request.Cancel()
            return bool(transfer.request.Test())  # matched already, it takes as long as it takes
        if not transfer.request.Test():
            return False
    except Exception as error:
        _settle(transfer.future, error)
        return True
    _settle(transfer.future, None)
    return True


def _settle(future: Future[Any], value: Any) -> None:
    """Tell whoever waits for a future, if anybody does still."""
    if not future.set_running_or_notify_cancel():
        if isinstance(value, Exception):
            logger.warning("a message that nobody waited for any more failed: %r", value)
    elif isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
