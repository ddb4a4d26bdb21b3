"""Who owns the outputs of a part, once the ranks and the holders of its inputs are known.

The client asks the same question when it plans, so the answer lives here, once.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dask_redist.layouts import Replicated
from dask_redist.placement import fewest_moved
from dask_redist.spec import PartSpec

logger = logging.getLogger(__name__)


def assign(spec: PartSpec, ranks: int, held: NDArray[Any]) -> NDArray[np.int64]:
    """The rank of each output chunk of a part, numbered in C order.

    Parameters
    ----------
    spec
        The part.
    ranks
        How many ranks there are now.
    held
        The rank of each input chunk, -1 where it is not in memory yet.

    Returns
    -------
    ndarray of int64, (spec.n_out,), or one for each copy of a replicated one
        A layout's owners as they are. Without a layout: where all inputs are in memory, the
        balanced placement that moves the fewest bytes; otherwise C order balanced by bytes.
    """
    owners = spec.owners
    if isinstance(spec.layout, Replicated):
        if spec.layout.ranks is None:
            return np.arange(ranks)
        owners = spec.layout.held_by(spec.ranks)
    if spec.ranks != ranks:
        logger.info(
            "%s was laid out for %d ranks and runs on %d: its chunks are spread over those",
            spec.name,
            spec.ranks,
            ranks,
        )
        owners = owners * ranks // spec.ranks
        owners = np.unique(owners) if spec.replicated else owners
    if spec.layout is not None or (held < 0).any():
        return owners
    start = owners.reshape(spec.grid_out)
    return fewest_moved(spec.overlap, held, ranks, start).ravel()
