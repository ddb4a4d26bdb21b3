"""Daily maps in a Zarr store become whole time series: one collective between read and work.

Run it with `python examples/time_series.py` after `pip install "dask-redist[io]"`; it starts a Dask
cluster of two ranks on this machine.
"""

import tempfile

import dask.array as da
import numpy as np
import xarray as xr
import zarr
from distributed import Client

import dask_redist as dr

if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as folder,
        Client(n_workers=2, threads_per_worker=1) as client,
    ):
        dr.connect(client)

        # A year of maps, one a chunk, as models write them.
        days = np.arange(365)
        maps = 10 + np.sin(2 * np.pi * days / 365)[:, None, None] + np.zeros((365, 30, 40))
        maps += np.random.default_rng(0).normal(size=maps.shape)
        store = zarr.create_array(
            f"{folder}/t.zarr", shape=maps.shape, chunks=(1, 30, 40), dtype="f8"
        )
        store[:] = maps

        air = xr.DataArray(da.from_zarr(store), dims=("time", "lat", "lon"), name="air")
        print(dr.plan(air.data, {0: -1, 1: 10}).explain())

        # xarray keeps its labels around the array that is redistributed.
        series = air.copy(data=dr.redistribute(air.data, {0: -1, 1: 10}))
        median = series.median("time").compute()
        print("equal to numpy.median:", bool(np.array_equal(median, np.median(maps, axis=0))))
