import dask.array as da
import numpy as np
import pytest
from cluster import *
import dask_redist as dr

@pytest.mark.erring
def test_err(client, relayout):
    x = fa(ar(6),3).map_blocks(lambda b: 1/0, dtype='f8')
    with pytest.raises(ZeroDivisionError):
        relayout(x, dr.Slab.X).compute()
    print(client.get_worker_logs())

@pytest.mark.wires
def test_a(client, relayout, ranks, wire):
    x = placed(client, ar(9,8), (3,3))
    print(owners(client, x))
    y = relayout(x, dr.Slab.X)
    check(y, ar(9,8))
    z = y.persist()
    print(owners(client,z), dr.connect(client))
    print(relayout.reports()[-1])

