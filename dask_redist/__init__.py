"""dask_redist: a Dask array changes layout in one collective.

Chunks belong to ranks (Dask workers); ``redistribute`` writes each piece of each chunk straight to
its final place in its owner's memory. Users keep holding ordinary ``dask.array.Array`` objects.

>>> import dask_redist as dr
>>> dr.Slab.Y
Slab.Y
"""

from dask_redist import config as _config  # defaults of redist.*
from dask_redist import dist
from dask_redist.boxes import Box
from dask_redist.connect import Ranks, connect
from dask_redist.errors import (
    AdmissionError,
    ChunkMismatchError,
    LayoutError,
    RankLostError,
    RedistError,
    RunTimeoutError,
)
from dask_redist.hook import enable
from dask_redist.inspection import layout_of, lshape_map, owners
from dask_redist.job import mpi
from dask_redist.layouts import (
    Block,
    BlockCyclic,
    Boxes,
    Layout,
    Pencil,
    Replicated,
    Slab,
    Uneven,
)
from dask_redist.mpicluster import LocalMPICluster
from dask_redist.ownarrays import from_ranks
from dask_redist.planning import Plan, plan, runs
from dask_redist.preload import dask_setup as dask_setup
from dask_redist.rankcode import map_ranks
from dask_redist.rankcomm import RankComm
from dask_redist.redistribution import Redistribute
from dask_redist.relayout import redistribute, resplit
from dask_redist.reports import RunReport

__version__ = "0.1.0"

__all__ = [
    "AdmissionError",
    "Block",
    "BlockCyclic",
    "Box",
    "Boxes",
    "ChunkMismatchError",
    "Layout",
    "LayoutError",
    "LocalMPICluster",
    "Pencil",
    "Plan",
    "RankComm",
    "RankLostError",
    "Ranks",
    "RedistError",
    "Redistribute",
    "Replicated",
    "RunReport",
    "RunTimeoutError",
    "Slab",
    "Uneven",
    "connect",
    "dist",
    "enable",
    "from_ranks",
    "layout_of",
    "lshape_map",
    "map_ranks",
    "mpi",
    "owners",
    "plan",
    "redistribute",
    "resplit",
    "runs",
]


def __dir__() -> list[str]:
    """What is for users; modules are not."""
    return __all__


if _config.get("enable"):
    enable()
