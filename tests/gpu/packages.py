"""Where the Python sides of the GPU packages are, and child processes that import them.

`make test` puts them into a folder of their own, ``.venv/gpu``, which only child processes of the
tests here have on their path: everything else runs as on a machine without them.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / ".venv" / "gpu"


def child_path() -> str:
    """PYTHONPATH of a child process that finds the GPU packages, these tests and dask_redist."""
    folders = [ROOT, Path(__file__).parent]
    if FOLDER.is_dir():
        folders.append(FOLDER)
    elif find_spec("nvshmem") is None:
        how = "the GPU packages are not installed: pip install --no-deps -r tests/gpu/packages.txt"
        if Path(sys.prefix) == ROOT / ".venv":  # here make has installed them
            pytest.fail(f"{how} --target .venv/gpu, or make test")
        pytest.skip(how)
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, folders), *([given] if given else [])])
