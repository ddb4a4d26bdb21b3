"""The Taylor-Green example: its transforms are NumPy's, its energy that of plain NumPy."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask.array as da
import numpy as np
import pytest
from distributed import Client

import dask_redist as dr

SCRIPT = Path(__file__).parent.parent / "examples" / "taylor_green.py"
MPIEXEC = Path(sys.executable).with_name("mpiexec")
LAYOUTS = ("slab", "pencil")


@pytest.fixture(scope="module")
def example() -> SimpleNamespace:
    """What the script defines; as it has no name that ranks could import, it travels by value."""
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def vortex(n: int) -> list[Any]:
    """The Taylor-Green vortex, one component at a time."""
    x, y, z = np.meshgrid(*[np.arange(n) * 2 * np.pi / n] * 3, indexing="ij")
    return [np.sin(x) * np.cos(y) * np.cos(z), -np.cos(x) * np.sin(y) * np.cos(z), 0 * x]


def energies(flow: list[Any], steps: int, dt: float, viscosity: float) -> list[float]:
    """Of the same scheme, written again: complex transforms, one component at a time."""
    n = len(flow[0])
    f = np.fft.fftfreq(n) * n
    k = [f.reshape(shape) for shape in [(-1, 1, 1), (-1, 1), (-1,)]]
    k2 = sum(a**2 for a in k)
    keep = (3 * abs(k[0]) < n) & (3 * abs(k[1]) < n) & (3 * abs(k[2]) < n)
    cyclic = [(1, 2), (2, 0), (0, 1)]

    def back(a: Any) -> Any:
        return np.fft.ifftn(a).real

    def rate(u_hat: list[Any]) -> list[Any]:
        u = [back(a) for a in u_hat]
        w = [back(1j * (k[i] * u_hat[j] - k[j] * u_hat[i])) for i, j in cyclic]
        force = [np.fft.fftn(u[i] * w[j] - u[j] * w[i]) * keep for i, j in cyclic]
        p = sum(a * b for a, b in zip(k, force, strict=True)) / np.maximum(k2, 1)
        return [a - b * p - viscosity * k2 * c for a, b, c in zip(force, k, u_hat, strict=True)]

    def plus(u_hat: list[Any], h: float, slope: list[Any]) -> list[Any]:
        return [a + h * b for a, b in zip(u_hat, slope, strict=True)]

    def energy(u_hat: list[Any]) -> float:
        return float(sum((back(a) ** 2).mean() for a in u_hat)) / 2

    u_hat = [np.fft.fftn(a) for a in flow]
    found = [energy(u_hat)]
    for _ in range(steps):
        a = rate(u_hat)
        b = rate(plus(u_hat, dt / 2, a))
        c = rate(plus(u_hat, dt / 2, b))
        d = rate(plus(u_hat, dt, c))
        for h, slope in [(dt / 6, a), (dt / 3, b), (dt / 3, c), (dt / 6, d)]:
            u_hat = plus(u_hat, h, slope)
        found.append(energy(u_hat))
    return found


def test_the_reference_flows() -> None:
    """Energy starts at 1/8 and falls as the viscosity of a vortex of wave vector (1, 1, 1) says."""
    first, second = energies(vortex(12), 1, 0.001, 0.01)
    assert first == pytest.approx(1 / 8, rel=1e-14)
    assert (first - second) / 0.001 == pytest.approx(2 * 0.01 * 3 / 8, rel=1e-3)


@pytest.mark.parametrize("n", [8, 9])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_transforms(client: Client, example: SimpleNamespace, layout: str, n: int) -> None:
    check_transforms(client, example, layout, n)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("n", [64, 45])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_transforms_of_full_size(
    client: Client, example: SimpleNamespace, layout: str, n: int
) -> None:
    check_transforms(client, example, layout, n)


def check_transforms(client: Client, example: SimpleNamespace, layout: str, n: int) -> None:
    ranks = dr.connect(client).size
    fourier = example.Fourier(n, layout, ranks)
    u = np.random.default_rng(n).normal(size=(n, n, n, 3))
    u_hat = fourier.forward(dr.redistribute(da.from_array(u), fourier.physical)).persist()
    assert u_hat.chunks == fourier.spectral.chunks(u_hat.shape, ranks)
    close(u_hat.compute(), np.fft.rfftn(u, axes=(0, 1, 2)))
    close(u_hat.compute(), np.fft.fftn(u, axes=(0, 1, 2))[:, :, : n // 2 + 1])
    close(fourier.inverse(u_hat).compute(), u)


def close(got: Any, want: Any) -> None:
    assert got.shape == want.shape
    assert abs(got - want).max() < 1e-12 * abs(want).max()


@pytest.mark.parametrize(("layout", "n"), [("slab", 15), ("pencil", 12)])
def test_energy_decays_as_in_numpy(
    client: Client, example: SimpleNamespace, layout: str, n: int
) -> None:
    flow = example.Flow(example.Fourier(n, layout, dr.connect(client).size))
    found = [flow.energy()]
    for _ in range(2):
        flow.step()
        found.append(flow.energy())
    assert found == pytest.approx(energies(vortex(n), 2, example.DT, example.VISCOSITY), rel=1e-12)
    assert found[0] > found[1] > found[2]
    assert flow.divergence() < 1e-14


@pytest.mark.parametrize(("layout", "n"), [("slab", 9), ("pencil", 15)])
def test_a_field_of_all_waves(
    client: Client, example: SimpleNamespace, layout: str, n: int
) -> None:
    """Short waves alias where the last third of them is not kept out."""
    fourier = example.Fourier(n, layout, dr.connect(client).size)
    flow = example.Flow(fourier)
    start = np.random.default_rng(n).normal(size=(n, n, n, 3))
    flow.u_hat = fourier.forward(dr.redistribute(da.from_array(start), fourier.physical)).persist()
    flow.step()
    want = energies(list(np.moveaxis(start, -1, 0)), 1, example.DT, example.VISCOSITY)
    assert flow.energy() == pytest.approx(want[1], rel=1e-12)


# ---- The script, as users start it. ----


def run(*command: str) -> list[str]:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=110, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.splitlines()


def check_output(lines: list[str], n: int, steps: int) -> None:
    assert "equal to numpy.fft.rfftn: True" in lines
    assert "divergence stays zero: True" in lines
    printed = [float(e) for e in re.findall(r"energy (0\.\d+)", "\n".join(lines))]
    assert printed == pytest.approx(energies(vortex(n), steps, 0.02, 0.01), abs=1e-9)


@pytest.mark.everything
def test_with_a_local_cluster() -> None:
    lines = run(
        *(sys.executable, str(SCRIPT), "--local", "3", "--layout", "pencil", "--n", "45"),
        *("--steps", "2"),
    )
    assert "3 on 1 host" in lines[0]
    assert lines[1:4] == [f"Pencil({axis}, grid=(1, 3, 1))" for axis in (2, 1, 0)]
    check_output(lines, 45, 2)


@pytest.mark.parametrize(
    ("layout", "n"), [("slab", 64), pytest.param("pencil", 45, marks=pytest.mark.everything)]
)
def test_with_mpiexec(layout: str, n: int) -> None:
    lines = run(
        *("timeout", "100", str(MPIEXEC), "-n", "6", sys.executable, str(SCRIPT)),
        *("--layout", layout, "--n", str(n), "--steps", "2", "--interface", "lo"),
    )
    assert "4 on 1 host" in lines[0]
    check_output(lines, n, 2)
