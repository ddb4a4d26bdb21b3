"""Two hosts: memory inside each, messages between them, in the same run."""

from collections.abc import Iterator

import pytest
from two_hosts import run_on, two_hosts


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[int]]:
    try:
        hosts = two_hosts()
        pids = hosts.__enter__()
    except OSError as error:
        pytest.skip(f"no two hosts can be made here: {error}")
    yield pids
    hosts.__exit__(None, None, None)


@pytest.mark.parametrize("way", ["mpi", pytest.param("dask comm", marks=pytest.mark.everything)])
def test_memory_inside_a_host_and_messages_between(hosts: list[int], way: str) -> None:
    found = run_on(hosts, way)
    near, far = ("01", "23"), ("02", "03", "12", "13")
    assert found["hosts"] == 2
    assert found["pairs"] == dict.fromkeys(near, "shared memory") | dict.fromkeys(far, way)
    assert set(found["bytes"]) == {"direct", "shared memory", way}
