"""Memory for messages: never more than the limit, and all of it comes back."""

import threading
from collections.abc import Iterator

import pytest

from dask_redist.arena import Arena
from dask_redist.errors import AdmissionError
from dask_redist.staging import Staging


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(1 << 20, keep=1 << 20)
    yield arena
    assert arena.in_use == 0
    arena.close()


def test_a_buffer_comes_back_when_the_last_array_over_it_dies(arena: Arena) -> None:
    staging = Staging(arena, 100)
    buffer = staging.take(100)
    assert buffer is not None
    part = buffer[10:20]
    del buffer
    assert staging.used == 100
    assert staging.take(1) is None
    del part
    assert staging.used == 0
    assert staging.take(100) is not None


def test_what_the_arena_refuses_is_not_counted(arena: Arena) -> None:
    staging = Staging(arena, 1 << 30)
    with pytest.raises(AdmissionError):
        staging.take(1 << 29)
    assert staging.used == 0


def test_many_threads_never_have_more_than_the_limit(arena: Arena) -> None:
    staging, out, most, lock = Staging(arena, 1000), [0], [0], threading.Lock()

    def work(nbytes: int) -> None:
        for _ in range(300):
            if (buffer := staging.take(nbytes)) is not None:
                with lock:
                    out[0] += nbytes
                    most[0] = max(most[0], out[0])
                with lock:
                    out[0] -= nbytes
                del buffer

    threads = [threading.Thread(target=work, args=(nbytes,)) for nbytes in (300, 400, 500, 600)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < most[0] <= 1000
    assert staging.used == 0
