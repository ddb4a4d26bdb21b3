"""A 3-D FFT by pencils: each axis is transformed where it is whole.

Run it with `python examples/pencil_fft.py`; it starts a Dask cluster of four ranks on this machine.
"""

import dask.array as da
import numpy as np
from distributed import Client

import dask_redist as dr

if __name__ == "__main__":
    with Client(n_workers=4, threads_per_worker=1) as client:
        dr.connect(client)
        values = np.random.default_rng(0).random((60, 45, 32))

        u = dr.redistribute(da.from_array(values, chunks=(15, -1, -1)), dr.Pencil.Z)
        u = da.fft.fft(u, axis=2)
        u = da.fft.fft(dr.redistribute(u, dr.Pencil.Y), axis=1)
        u = da.fft.fft(dr.redistribute(u, dr.Pencil.X), axis=0)

        error = abs(u.compute() - np.fft.fftn(values)).max()
        print("collectives:", len(dr.runs()), "each like", dr.runs()[-1])
        print("equal to numpy.fft.fftn:", bool(error < 1e-9))
