"""Connecting: idempotent, asynchronous, late workers, ranks that do not come or do not answer."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from cluster import ranks_of_its_own
from distributed import Client, LocalCluster, wait
from distributed.security import Security

import dask_redist as dr

VALUES = np.arange(60).reshape(6, 10)


def scale(client: Client, n_workers: int) -> None:
    local: Any = client.cluster
    local.scale(n_workers)


def test_connect_is_idempotent_and_late_workers_join() -> None:
    with ranks_of_its_own(1) as client:
        first = dr.connect(client)
        assert dr.connect(client).seats == first.seats
        assert first.size == 1
        assert first.devices == ("cpu",)
        assert "1 on 1 host" in repr(first)
        assert first.addresses[0] in first._repr_html_()
        scale(client, 3)
        ranks = dr.connect(client, n_ranks=3, timeout=30)
        assert ranks.seats[0] == first.seats[0]
        assert sorted(seat.name for seat in ranks.seats) == ["0", "1", "2"]
        assert set(ranks.wires.values()) == {"direct", "shared memory"}
        y = dr.redistribute(da.from_array(VALUES, chunks=2), dr.Slab.Y).persist()
        wait(y)
        assert dr.owners(y).tolist() == [[0, 1, 2]]
        assert np.array_equal(y.compute(), VALUES)


def test_a_graph_for_other_ranks_is_right_and_spread_over_those_there_are() -> None:
    with ranks_of_its_own(1) as client:
        x = da.from_array(VALUES, chunks=(2, 10))
        alone = dr.redistribute(x, dr.Slab.Y)
        scale(client, 3)
        dr.connect(client, n_ranks=3, timeout=30)
        three = dr.redistribute(x, dr.Slab.Y)
        assert np.array_equal(alone.compute(), VALUES)
        scale(client, 2)
        deadline = time.monotonic() + 20
        while dr.connect(client).size != 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        three = three.persist()
        wait(three)
        assert np.array_equal(three.compute(), VALUES)
        assert sorted(set(dr.owners(three).ravel().tolist())) == [0, 1]


def test_ranks_that_do_not_come() -> None:
    with (
        ranks_of_its_own(1) as client,
        pytest.raises(dr.RunTimeoutError, match=r"1 of 2 ranks came within 0\.5 s; start more"),
    ):
        dr.connect(client, n_ranks=2, timeout=0.5)


def test_no_client() -> None:
    with pytest.raises(dr.RedistError, match=r"distributed\.Client\(n_workers=4\)"):
        dr.redistribute(da.ones(4), dr.Slab.X)


def test_asynchronous_client() -> None:
    async def job() -> None:
        async with (
            LocalCluster(
                n_workers=2,
                threads_per_worker=1,
                host="127.0.0.1",
                dashboard_address=":0",
                asynchronous=True,
            ) as local,
            Client(local, asynchronous=True) as client,
        ):
            x = da.from_array(VALUES, chunks=3)
            with pytest.raises(dr.RedistError, match=r"await dask_redist\.connect"):
                dr.redistribute(x, dr.Slab.Y, client=client)
            ranks = await dr.connect(client)
            assert ranks.size == 2
            y = dr.redistribute(x, dr.Slab.Y, client=client)
            assert np.array_equal(await client.compute(y), VALUES)

    asyncio.run(job())


@pytest.mark.everything
def test_a_rank_that_is_stopped_is_named() -> None:
    with dask.config.set({"redist.timeout": "2s"}), ranks_of_its_own(2) as client:
        ranks = dr.connect(client)
        x = da.from_array(VALUES, chunks=(6, 10)).persist(workers=[ranks.addresses[0]])
        wait(x)
        y = dr.redistribute(x, dr.Slab.Y)
        os.kill(ranks.seats[1].process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(dr.RunTimeoutError, match=r"rank 1 on tcp://.* within 2 s"):
                y.compute()
        finally:
            os.kill(ranks.seats[1].process.pid, signal.SIGCONT)
        assert np.array_equal(dr.redistribute(x, dr.Slab.X).compute(), VALUES)


def test_two_clients_of_one_cluster() -> None:
    with ranks_of_its_own(2) as client, Client(client.cluster) as other:
        assert dr.connect(client).seats == dr.connect(other).seats
        x = da.from_array(VALUES, chunks=3)
        a = dr.redistribute(x, dr.Slab.Y, client=client)
        b = dr.redistribute(x, dr.Slab.Y, client=other)
        assert a.name == b.name
        assert np.array_equal(client.compute(a).result(), VALUES)
        assert np.array_equal(other.compute(b[:, 3:4]).result(), VALUES[:, 3:4])


def test_threads_as_ranks_use_the_direct_wire() -> None:
    with Client(n_workers=3, threads_per_worker=2, processes=False, dashboard_address=":0") as c:
        assert set(dr.connect(c).wires.values()) == {"direct"}
        x = da.from_array(VALUES, chunks=(1, 10)).persist()
        wait(x)
        y = dr.redistribute(x, dr.Slab.Y).persist()
        wait(y)
        assert dr.owners(y).tolist() == [[0, 1, 2]]
        assert np.array_equal(y.compute(), VALUES)
        assert set(dr.runs()[-1].wires) == {"direct"}


def test_messages_go_over_tls_where_the_cluster_does() -> None:
    security = Security.temporary()
    with (
        dask.config.set({"redist.wire": "dask comm"}),
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            host="127.0.0.1",
            protocol="tls",
            security=security,
            dashboard_address=":0",
        ) as local,
        Client(local, security=security) as client,
    ):
        assert all(address.startswith("tls://") for address in dr.connect(client).addresses)
        y = dr.redistribute(da.from_array(VALUES, chunks=(2, 10)), dr.Slab.Y)
        assert np.array_equal(y.compute(), VALUES)
        assert dr.runs()[-1].wires["dask comm"] == dr.runs()[-1].bytes_moved > 0
