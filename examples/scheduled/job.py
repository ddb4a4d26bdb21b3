"""A climatology, made by a schedule: maps in a Zarr store in, mean, spread and anomalies out.

    srun python job.py maps.zarr climatology.zarr          # mpiexec likewise
    python job.py maps.zarr climatology.nc --local 4       # without MPI

Models write maps, one a chunk; statistics over time need whole time series. One collective makes
the maps bands of whole series, one band a rank. The result appears under its name when it is
complete and replaces an older one; until then nothing changes.

What goes wrong is one line on stderr and an exit code of sysexits.h:

    65  the store lacks a chunk, or one cannot be read        69  no ranks, or one was lost
    66  there is no such store                                73  the result cannot be written there
    74  anything else went wrong while it computed or wrote  143  it was told to end (SIGTERM)
"""

import logging
import os
import shutil
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import click
import xarray as xr
import zarr
from distributed import Client, KilledWorker

import dask_redist as dr

NAME = "air_temperature"


def fail(code: int, why: str, error: BaseException | None = None) -> NoReturn:
    """End with one line that says why there is no result."""
    words = f"{why}: {error or type(error).__name__}" if error is not None else why
    print("Error:", *words.split(), file=sys.stderr)
    sys.exit(code)


def start(stack: ExitStack, local: int | None, interface: str | None) -> tuple[Client, int]:
    """Ranks: those of the MPI job that this process is in, or processes of this machine."""
    try:
        here = {"n_workers": local, "threads_per_worker": 1, "dashboard_address": ":0"}
        client = stack.enter_context(Client(**here) if local else dr.mpi(interface=interface))
        ranks = dr.connect(client, n_ranks=local)
    except (dr.RedistError, OSError) as error:
        fail(os.EX_UNAVAILABLE, "no ranks", error)
    # What fails is told once, by this script, and not by each rank too.
    client.run(logging.disable, logging.ERROR)
    client.run_on_scheduler(logging.disable, logging.ERROR)
    logging.disable(logging.ERROR)
    return client, ranks.size


def end(*_: object) -> NoReturn:
    """End in order when a scheduler says so, as at a time limit."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fail(128 + signal.SIGTERM, "told to end (SIGTERM)")


def open_maps(store: Path) -> xr.DataArray:
    """The maps, lazily; Zarr would read a chunk that is missing as one without values."""
    try:
        maps: xr.DataArray = xr.open_zarr(store, consolidated=False)[NAME]
        array = zarr.open_array(store / NAME, mode="r")
    except FileNotFoundError:
        fail(os.EX_NOINPUT, f"there is no Zarr store {store}")
    except (KeyError, ValueError) as error:
        fail(os.EX_DATAERR, f"{store} is no store of {NAME}", error)
    if missing := array.nchunks - array.nchunks_initialized:
        fail(os.EX_DATAERR, f"{store} lacks {missing} of {array.nchunks} chunks")
    return maps


def climatology(maps: xr.DataArray, ranks: int) -> xr.Dataset:
    """Mean and standard deviation over time, and what each map differs from the mean; lazy."""
    rows = -(-maps.shape[1] // ranks)
    series = maps.copy(data=dr.redistribute(maps.data, {0: -1, 1: rows})).astype("f8")
    mean = series.mean("time")
    return xr.Dataset({"mean": mean, "std": series.std("time"), "anomaly": series - mean})


def write(made: xr.Dataset, part: Path, result: Path) -> None:
    """Write under another name, then move: there is never half a result."""
    if result.suffix == ".nc":
        made.load().to_netcdf(part)
    else:
        made.to_zarr(part, mode="w", consolidated=False)
    old = part.with_suffix(".old")
    if result.is_dir():  # of folders only an empty one can be replaced
        result.rename(old)
    part.rename(result)
    shutil.rmtree(old, ignore_errors=True)


def remove(part: Path) -> None:
    """Remove what was not moved."""
    if part.is_dir():
        shutil.rmtree(part, ignore_errors=True)
    else:
        part.unlink(missing_ok=True)


def unreadable(client: Client, store: Path) -> list[int]:
    """The maps that cannot be read."""

    def fails(at: int) -> bool:
        try:
            zarr.open_array(store / NAME, mode="r")[at]
        except Exception:
            return True
        return False

    maps = range(zarr.open_array(store / NAME, mode="r").shape[0])
    failed: list[bool] = client.gather(client.map(fails, maps))
    return [at for at in maps if failed[at]]


@click.command()
@click.argument("store", type=click.Path(path_type=Path))
@click.argument("result", type=click.Path(path_type=Path))
@click.option("--interface", help="Network that MPI ranks use for Dask, such as ib0.")
@click.option("--local", metavar="RANKS", type=int, help="A local cluster instead of MPI.")
def main(store: Path, result: Path, interface: str | None, local: int | None) -> None:
    """Write the climatology of the maps in STORE to RESULT, a Zarr store or a .nc file."""
    with ExitStack() as at_last, ExitStack() as stack:
        client, ranks = start(stack, local, interface)
        signal.signal(signal.SIGTERM, end)  # of MPI ranks the one that is the script
        maps = open_maps(store)
        part = result.with_name(f".{result.name}.{os.getpid()}.part")
        at_last.callback(remove, part)  # when the ranks have ended, which may write until then
        try:
            part.touch() if result.suffix == ".nc" else part.mkdir()
        except OSError as error:
            fail(os.EX_CANTCREAT, f"cannot write {result}", error)
        try:
            write(climatology(maps, ranks), part, result)
        except (dr.RedistError, KilledWorker) as error:
            fail(os.EX_UNAVAILABLE, "the ranks failed", error)
        except Exception as error:
            if bad := unreadable(client, store):
                fail(os.EX_DATAERR, f"cannot read map {', '.join(map(str, bad))} of {store}", error)
            fail(os.EX_IOERR, "failed", error)
        print(f"{result}: {len(maps)} maps, {ranks} ranks, {len(dr.runs())} collective")


if __name__ == "__main__":
    main()
