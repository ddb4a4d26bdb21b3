"""Whether a change of layout gains by being a collective: what policy "auto" decides."""

from __future__ import annotations

from math import prod

import dask.array as da
from dask.array.rechunk import rechunk as dask_rechunk

from dask_redist.boxes import Chunks
from dask_redist.connect import Ranks
from dask_redist.overlap import Overlap

#: share of all ranks' memory that the largest part of an array may have under policy "auto"
ROOM = 0.5
#: bytes up to which a change takes as long as its tasks, not as its bytes
SMALL = 8 * 2**20
#: tasks that take as long as a fence
FENCE = 10
#: Dask's tasks, as a share of ours, up to which they are faster (they also wait for data)
FEW = 0.75


def is_worth(x: da.Array, chunks: Chunks, ranks: Ranks, policy: str) -> bool:
    """Whether the change is to be a collective."""
    if x.size == 0:
        return False  # nothing moves
    if policy == "always":
        return True
    parts = Overlap(x.chunks, chunks).parts
    room = ROOM * sum(seat.memory_limit for seat in ranks.seats)
    return not parts.are_simple and parts.largest * x.dtype.itemsize <= room


def few_tasks(
    x: da.Array, chunks: Chunks, threshold: int | None, block_size_limit: int | None
) -> da.Array | None:
    """Dask's own rechunk in tasks, where the array is small and they are few."""
    if x.nbytes > SMALL:
        return None
    ours, overlap = 0, Overlap(x.chunks, chunks)
    # A small array is one run, unless some parts are plain tasks.
    for part in Overlap(x.chunks, chunks, together=not overlap.parts.some_simple).parts:
        n_in, n_out = (prod(map(len, side)) for side in (part.inputs, part.outputs))
        ours += n_out if part.is_simple else n_in + n_out + FENCE
    plain: da.Array = dask_rechunk(x, chunks, threshold, block_size_limit, method="tasks")
    layers = plain.dask.layers
    theirs = sum(len(layers[name]) for name in layers.keys() - x.dask.layers.keys())
    return plain if theirs <= FEW * ours else None
