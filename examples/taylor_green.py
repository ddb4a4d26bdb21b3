"""The Taylor-Green vortex: 3-D Navier-Stokes steps, pseudo-spectral, on slabs or on pencils.

    mpiexec -n 6 python examples/taylor_green.py --layout pencil    # four of the six are ranks
    python examples/taylor_green.py --local 4                       # without MPI

A vortex in a periodic box breaks up and decays. Fields are (n, n, n, 3): X, Y, Z and the component
of the vector, which each rank has whole. In Fourier space derivatives are products; products are
taken in physical space. An FFT needs its axis whole, so between the axes the layout changes, in
one collective for all ranks; the physics is NumPy on the box that a rank has.
"""

from math import isqrt, pi
from typing import Any

import click
import dask.array as da
import numpy as np
from distributed import Client

import dask_redist as dr

X, Y, Z = 0, 1, 2
VISCOSITY = 0.01
DT = 0.02


def stages(layout: str, ranks: int) -> list[tuple[dr.Layout, tuple[int, ...]]]:
    """From physical to Fourier space: the layouts, and the axes that are transformed in each."""
    if layout == "slab":
        return [(dr.Slab.X, (Y, Z)), (dr.Slab.Y, (X,))]
    rows = max(n for n in range(1, isqrt(ranks) + 1) if ranks % n == 0)
    grid = (rows, ranks // rows, 1)
    return [(dr.Pencil(axis, grid), (axis,)) for axis in (Z, Y, X)]


class Fourier:
    """``numpy.fft.rfftn`` over X, Y, Z and its inverse, for n points along each."""

    def __init__(self, n: int, layout: str, ranks: int) -> None:
        self.n, self.stages = n, stages(layout, ranks)
        self.physical, self.spectral = self.stages[0][0], self.stages[-1][0]

    def forward(self, u: da.Array) -> da.Array:
        (_, axes), *later = self.stages
        u = da.fft.rfftn(u, axes=axes)
        for layout, axes in later:
            u = da.fft.fftn(dr.redistribute(u, layout), axes=axes)
        return u

    def inverse(self, u: da.Array) -> da.Array:
        *earlier, (_, axes) = self.stages
        for layout, axes_there in reversed(earlier):
            u = dr.redistribute(da.fft.ifftn(u, axes=axes), layout)
            axes = axes_there
        physical: da.Array = da.fft.irfftn(u, s=[self.n] * len(axes), axes=axes)
        return physical


# ------------------------------------------------- the physics, in NumPy, on the box of one rank
def taylor_green(n: int) -> Any:
    x, y, z = np.meshgrid(*[np.arange(n) * 2 * pi / n] * 3, indexing="ij")
    u = np.sin(x) * np.cos(y) * np.cos(z)
    v = -np.cos(x) * np.sin(y) * np.cos(z)
    return np.stack([u, v, 0 * z], axis=-1)


def wavenumbers(n: int) -> Any:
    all_of_them, half = np.fft.fftfreq(n, 1 / n), np.fft.rfftfreq(n, 1 / n)
    return np.stack(np.meshgrid(all_of_them, all_of_them, half, indexing="ij"), axis=-1)


def curl(k: Any, u_hat: Any) -> Any:
    return 1j * np.cross(k, u_hat)


def acceleration(k: Any, u_hat: Any, force: Any, n: int) -> Any:
    """What of the force is left by the gradient of pressure, and friction."""
    k2 = (k**2).sum(axis=-1, keepdims=True)
    pressure = (k * force).sum(axis=-1, keepdims=True) / np.where(k2 == 0, 1, k2)
    resolved = (abs(k) < n / 3).all(axis=-1, keepdims=True)  # products alias into the last third
    return resolved * (force - k * pressure) - VISCOSITY * k2 * u_hat


class Flow:
    """Velocity in Fourier space, spread over the ranks."""

    def __init__(self, fourier: Fourier) -> None:
        self.fourier = fourier
        start = dr.redistribute(da.from_array(taylor_green(fourier.n)), fourier.physical)
        self.u_hat = fourier.forward(start).persist()
        k = da.from_array(wavenumbers(fourier.n))
        self.k = dr.redistribute(k, fourier.spectral).persist()

    def rate(self, u_hat: da.Array) -> da.Array:
        """Navier-Stokes: du/dt = u x curl u - grad p + viscosity laplace u, where div u = 0."""
        u = self.fourier.inverse(u_hat)
        vorticity = self.fourier.inverse(da.map_blocks(curl, self.k, u_hat, dtype=complex))
        force = self.fourier.forward(da.map_blocks(np.cross, u, vorticity, dtype=float))
        rate: da.Array = da.map_blocks(
            acceleration, self.k, u_hat, force, n=self.fourier.n, dtype=complex
        )
        return rate

    def step(self) -> None:
        """One step of the classical Runge-Kutta scheme; persisted, so that graphs stay small."""
        u = self.u_hat
        a = self.rate(u)
        b = self.rate(u + DT / 2 * a)
        c = self.rate(u + DT / 2 * b)
        d = self.rate(u + DT * c)
        self.u_hat = (u + DT / 6 * (a + 2 * b + 2 * c + d)).persist()

    def energy(self) -> float:
        """Kinetic, per volume."""
        u = self.fourier.inverse(self.u_hat)
        return float((u**2).sum(axis=-1).mean().compute()) / 2

    def divergence(self) -> float:
        """The largest of all modes, where the largest mode of velocity is 1."""
        div = abs((self.k * self.u_hat).sum(axis=-1)).max()
        return float((div / abs(self.u_hat).max()).compute())


@click.command()
@click.option("--n", default=64, show_default=True, help="Points along each axis.")
@click.option("--steps", default=5, show_default=True, help=f"Steps of {DT}.")
@click.option("--layout", default="slab", show_default=True, type=click.Choice(["slab", "pencil"]))
@click.option("--interface", help="Network that MPI ranks use for Dask, such as ib0.")
@click.option("--local", metavar="RANKS", type=int, help="A local cluster instead of MPI.")
def main(n: int, steps: int, layout: str, interface: str | None, local: int | None) -> None:
    here = {"n_workers": local, "threads_per_worker": 1, "dashboard_address": ":0"}
    with Client(**here) if local else dr.mpi(interface=interface) as client:
        ranks = dr.connect(client)
        fourier = Fourier(n, layout, ranks.size)
        print(ranks, *(at for at, _ in fourier.stages), sep="\n")

        flow = Flow(fourier)
        want = np.fft.rfftn(taylor_green(n), axes=(X, Y, Z))
        error = abs(flow.u_hat.compute() - want).max() / abs(want).max()
        print("equal to numpy.fft.rfftn:", bool(error < 1e-12))

        print(f"t = 0.00  energy {flow.energy():.9f}")
        for step in range(1, steps + 1):
            flow.step()
            print(f"t = {step * DT:.2f}  energy {flow.energy():.9f}")
        print("divergence stays zero:", flow.divergence() < 1e-12)


if __name__ == "__main__":
    main()
