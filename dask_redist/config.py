"""Settings: the ``redist`` namespace of Dask's configuration, with defaults from ``redist.yaml``.

Every option is described in that file. They are read where they act: layouts, ``policy`` and
``fallback`` in the client's process, ``timeout`` in each process that waits, ``arena``, ``wire``,
``message-bytes`` and ``mpi`` on the workers when they start; a plan reads ``mpi`` in the client's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask
import yaml
from dask.utils import parse_bytes, parse_timedelta

_defaults = yaml.safe_load((Path(__file__).parent / "redist.yaml").read_text())
dask.config.update_defaults(_defaults)


def get(name: str) -> Any:
    """The option ``redist.<name>``.

    Examples
    --------
    >>> get("arena.keep")
    0.1
    """
    return dask.config.get(f"redist.{name}")


def seconds(name: str) -> float:
    """The option ``redist.<name>`` as seconds.

    Examples
    --------
    >>> seconds("timeout")
    60.0
    """
    return float(parse_timedelta(get(name), default="s"))


def nbytes(name: str) -> int:
    """The option ``redist.<name>`` as bytes.

    Examples
    --------
    >>> nbytes("message-bytes")
    33554432
    """
    return int(parse_bytes(get(name)))
