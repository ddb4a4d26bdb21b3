"""xarray through the hook: real data and unmodified code give the in-memory result, in collectives.

Each change of layout in a graph is a layer of ours, named like the runs that carry it out; so a
change that was left to Dask, or computed without a run, shows.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr
from cluster import ar, new_runs, same
from distributed import Client

import dask_redist as dr
from dask_redist.layer import RedistributeLayer

SAMPLES = files("iris_sample_data") / "sample_data"


def sample(file: str, variable: str) -> xr.DataArray:
    """Real data, in memory."""
    with xr.open_dataset(Path(str(SAMPLES / file)), engine="netcdf4") as source:
        return source[variable].load()


@pytest.fixture
def sea() -> xr.DataArray:
    """Sea surface temperature: 54 months, NaN over land."""
    return sample("ostia_monthly.nc", "surface_temperature")


@pytest.fixture
def air() -> xr.DataArray:
    """Air temperature over North America: 240 years, in a calendar of 360 days."""
    return sample("A1B_north_america.nc", "air_temperature")


def changes(*arrays: xr.DataArray) -> set[str]:
    """The changes of layout in the graphs of lazy arrays."""
    return {
        name
        for array in arrays
        for name, layer in array.data.dask.layers.items()
        if isinstance(layer, RedistributeLayer)
    }


@contextmanager
def runs_for(client: Client, wanted: set[str]) -> Iterator[Counter[str]]:
    """Fail unless each of these changes has at least one run inside the block; how many it has."""
    counted: Counter[str] = Counter()
    with new_runs(client) as ran:
        yield counted
        counted.update(run.name for run in ran() if run.state == "published")
    missing = wanted - set(counted)
    assert not missing, f"computed without a run: {missing}"


def equal(got: xr.DataArray, want: xr.DataArray) -> None:
    """Fail unless both have the same elements, bit for bit, and the same labels."""
    xr.testing.assert_identical(got, want)
    same(got.values, want.values)


def anomaly(t: xr.DataArray) -> xr.DataArray:
    """How far each month is from the mean of all months of its name."""
    months = t.groupby("time.month")
    found: xr.DataArray = months - months.mean("time")
    return found


@pytest.mark.parametrize("relaid", [False, True], ids=["months as stored", "whole time series"])
def test_monthly_anomaly_with_nan_over_land(
    client: Client, sea: xr.DataArray, relaid: bool
) -> None:
    want = anomaly(sea)
    assert 0.1 < np.isnan(want.values).mean() < 0.9
    with dr.enable(policy="always"):
        months = sea.chunk(time=9, longitude=216)
        series = months.chunk(time=-1, longitude=150) if relaid else months
        lazy = anomaly(series)  # xarray brings both operands of the minus to the same chunks
    named = changes(lazy)
    assert len(named) == (2 if relaid else 1)
    with runs_for(client, named):
        got = lazy.compute()
    equal(got, want)


def test_correlation_along_time(client: Client, air: xr.DataArray) -> None:
    air = air.astype("f8")
    index = air.mean(("latitude", "longitude"))
    maps = air.chunk(time=20)
    with dr.enable(policy="always"):
        series = maps.chunk(time=-1, latitude=10)
        lazy = xr.corr(series, index, dim="time")
    assert changes(lazy) == changes(series) == {series.data.name}
    with runs_for(client, changes(lazy)):
        got = lazy.compute()
    # Dask sums the same chunks in the same order: its own rechunk gives the same bits.
    relaid = maps.data.rechunk(series.data.chunks, method="tasks")
    same(got.values, xr.corr(maps.copy(data=relaid), index, dim="time").values)
    want = xr.corr(air, index, dim="time")
    xr.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)
    assert np.ptp(want.values) > 0.2
    with runs_for(client, changes(series)):
        equal(series.compute(), air)


def test_zarr_to_zarr(client: Client, air: xr.DataArray, tmp_path: Path) -> None:
    maps = {air.name: {"chunks": (1, *air.shape[1:])}}
    source = air.to_dataset().drop_encoding()
    source.to_zarr(tmp_path / "maps.zarr", encoding=maps, consolidated=False)
    with xr.open_zarr(tmp_path / "maps.zarr", consolidated=False) as stored:
        assert stored[air.name].data.numblocks == (240, 1, 1)
        with dr.enable(policy="always"):
            series = stored.drop_encoding().chunk(time=-1, latitude=13, longitude=20)
            with runs_for(client, changes(series[air.name])) as counted:
                series.to_zarr(tmp_path / "series.zarr", consolidated=False)
    assert counted[series[air.name].data.name] == 1  # slabs to pencils are one part
    with xr.open_zarr(tmp_path / "series.zarr", chunks=None, consolidated=False) as written:
        assert written[air.name].encoding["chunks"] == (240, 13, 20)
        assert written.time.dt.calendar == "360_day"
        equal(written[air.name].load(), air)


def test_thirty_variables_in_one_compute(client: Client) -> None:
    shape = (12, 7, 10)
    held = {
        f"v{i}": (("time", "y", "x"), ar(*shape, dtype=dtype, start=1000 * i))
        for i, dtype in enumerate(["f8", "f4", "i4"] * 10)
    }
    want = xr.Dataset(held)
    with dr.enable(policy="always"):
        lazy = want.chunk(time=4, y=3).chunk(time=-1, y=2, x=5)
    named = changes(*lazy.values())
    assert named == {lazy[name].data.name for name in held}
    assert len(named) == 30
    with runs_for(client, named) as counted:
        got = lazy.compute()
    assert counted.total() >= 30
    for name in held:
        equal(got[name], want[name])


@pytest.mark.ranks(2)
def test_the_oracle_sees_a_change_without_a_run(client: Client, sea: xr.DataArray) -> None:
    with dr.enable(policy="always"):
        series = sea.chunk(time=6).chunk(time=-1, longitude=100)
    with (
        pytest.raises(AssertionError, match="computed without a run"),
        runs_for(client, changes(series)),
        dask.config.set(scheduler="sync"),
    ):
        equal(series.compute(), sea)
    plain: Any = sea.chunk(time=6).chunk(time=-1, longitude=100).data
    assert isinstance(plain, da.Array)
    assert changes(sea.copy(data=plain)) == set()
