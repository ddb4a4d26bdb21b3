"""Slabs to pencils: one array, two layouts, and what is known before and after.

Run it with `python examples/slab_to_pencil.py`; it starts a Dask cluster of four ranks on this
machine. The array has 512 MiB.
"""

import dask.array as da
from distributed import Client

import dask_redist as dr

if __name__ == "__main__":
    # Any Dask cluster will do: processes, threads, SSH, jobqueue.
    with Client(n_workers=4, threads_per_worker=1) as client:
        ranks = dr.connect(client)
        print(ranks)

        x = da.random.random((512, 512, 256), chunks=(128, -1, -1)).persist()
        print("in: ", dr.layout_of(x))

        # What a change of layout would cost, before anything moves.
        print(dr.plan(x, dr.Pencil.X).explain())

        # An ordinary da.Array: n_in + 1 + n_out tasks.
        y = dr.redistribute(x, dr.Slab.Y).persist()
        z = dr.redistribute(y, dr.Pencil.X).persist()
        print("out:", dr.layout_of(y), "then", dr.layout_of(z))
        print(dr.lshape_map(z))  # a row a rank: the shape that it owns

        # The numbers are where they belong, whatever rank owns them.
        same = (x == z).all().compute()
        print("same numbers:", bool(same))
