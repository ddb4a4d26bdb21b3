"""A Dask array of arrays that the ranks have already, or make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dask.array as da
import numpy as np
from distributed import Client
from distributed.protocol import pickle as by_value
from numpy.typing import NDArray

from dask_redist import joining
from dask_redist.connect import find_client, ranks_of
from dask_redist.errors import LayoutError
from dask_redist.local import offered
from dask_redist.partition import integer
from dask_redist.programs import Join
from dask_redist.rankcode import run
from dask_redist.rankcomm import RankComm

Made = Callable[[int, int], NDArray[Any]]


def from_ranks(
    source: str | Made | Sequence[NDArray[Any]], axis: int = 0, *, client: Client | None = None
) -> da.Array:
    """Join arrays of the ranks into one Dask array.

    Parameters
    ----------
    source : str, callable or sequence of ndarray
        A name: the array that each rank's process offers under it (``dr.mpi(local={"u": u})``),
        which is not copied: changes that the process makes to it later show. A callable:
        ``source(rank, size)`` is called on each rank, in a thread. A sequence: one array a rank,
        which are sent there.
    axis : int
        The axis along which they are joined, in the order of the ranks. They may differ along it.
    client : distributed.Client, optional
        Default: the current one. It is connected if nobody did.

    Returns
    -------
    dask.array.Array
        With one chunk a rank along `axis`, in memory on its rank. A rank whose array has no element
        along `axis` has no chunk; :func:`lshape_map` has a row for it all the same.

    Raises
    ------
    LayoutError
        The arrays do not fit: other axes, dtypes, what is no array, or not as many as ranks; says
        which ranks have what.
    RedistError
        A rank offers nothing under that name.
    Exception
        What the callable raised, with a note that names the rank.

    Notes
    -----
    The arrays are data without a recipe, as scattered ones are: if a rank leaves, its part is lost
    and whoever computes with it gets Dask's ``FutureCancelledError``.

    Examples
    --------
    >>> import numpy as np, dask_redist as dr
    >>> from distributed import Client
    >>> with Client(n_workers=2, threads_per_worker=1, processes=False,
    ...             dashboard_address=":0") as client:
    ...     x = dr.from_ranks(lambda rank, size: np.full((rank + 1, 2), rank))
    ...     print(x.compute().tolist(), dr.layout_of(x))
    ...     y = dr.from_ranks([np.zeros((3, 2)), np.zeros((3, 1))], axis=1)
    ...     print(y.chunks, dr.owners(y).tolist())
    [[0, 0], [1, 1], [1, 1]] Uneven(0, (1, 2))
    ((3,), (2, 1)) [[0, 1]]
    """
    client = find_client(client)
    ranks = ranks_of(client)
    join = Join(integer(axis, "axis"), strict=True)
    if isinstance(source, str):
        code = by_value.dumps((_offered, (source,), {}))
        found: da.Array = run(client, ranks, f"from_ranks-{source}", code, join)
        return found
    if callable(source):
        code = by_value.dumps((_made, (source,), {}))
        found = run(client, ranks, "from_ranks", code, join)
        return found
    arrays = list(source)
    if len(arrays) != ranks.size:
        raise LayoutError(
            f"there are {len(arrays)} arrays, but {ranks.size} ranks: give one array a rank"
        )
    pieces = [
        joining.Piece(array.shape, array.dtype)
        if isinstance(array, np.ndarray)
        else f"a {type(array).__name__}"
        for array in arrays
    ]
    join.of(pieces)  # what does not fit is not sent
    code = by_value.dumps((_given, (), {}))
    found = run(client, ranks, "from_ranks", code, join, pieces=arrays)
    return found


def _offered(nothing: None, comm: RankComm, name: str) -> NDArray[Any]:
    return offered(name)


def _made(nothing: None, comm: RankComm, source: Made) -> NDArray[Any]:
    return source(comm.rank, comm.size)


def _given(array: NDArray[Any], comm: RankComm) -> NDArray[Any]:
    return array
