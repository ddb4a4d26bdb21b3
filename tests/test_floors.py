"""Who may import whom: modules stand on floors, and a floor imports from itself and from below.

The check reads the sources, so that an import inside a function counts too. A second part imports
the package in a fresh process: that starts nothing and needs no optional package.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dask_redist"

FLOORS = {
    0: "errors boxes partition grids irregular layouts pieces parts overlap placement joining "
    "moves pinning",
    1: "partials stream syscalls process admission freelist segment block pages arena peers wires "
    "packing post staging tags world lifeline observer gpu nvshmem symmetric "
    "devicemail devicewires nccl ncclcalls",
    2: "spec assign actions life conductor orders pins replicas roster runbook scheduler "
    "crowd holdings lane openruns rank taskside ranks reach run reports config tasks watch "
    "deposits reducing reduction pairs desk fences closedruns reduceop mail mpigroup "
    "local mailbox program programs native rankcomm rankprograms "
    "agreement tensors operands redistribution",
    3: "relayout layer connect planning inspection hook preload "
    "families lower steps reducehook worth dist collectives rankcode ownarrays",
    4: "cli about demo field race cluster bench mpicluster mpirank job launch crew mpijob",
    5: "__init__",  # the public namespace: may import all
}
FLOOR = {module: floor for floor, modules in FLOORS.items() for module in modules.split()}

# Outside packages that a floor may not do without noticing: floor 0 is index arithmetic, without
# I/O and clock; floor 1 is memory and knows no Dask.
ARITHMETIC = {"numpy", "scipy"}
IO_AND_CLOCK = {
    *("asyncio", "io", "logging", "mmap", "multiprocessing", "os", "pathlib", "random", "select"),
    *("selectors", "shutil", "signal", "socket", "subprocess", "tempfile", "threading", "time"),
}
DASK = {"dask", "distributed"}
OPTIONAL = {"mpi4py", "cupy", "cuda", "nvshmem", "nccl"}
ALIAS = {"yaml": "pyyaml", "dask_mpi": "dask-mpi"}


def modules() -> dict[str, Path]:
    """Return the package's modules by their dotted names inside the package."""
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def imports(source: str, module: str = "") -> Iterator[str]:
    """Yield the dotted names that a source imports, wherever in it, as absolute names."""
    package = ["dask_redist", *module.split(".")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            # `from dask_redist import arena` imports the module dask_redist.arena.
            yield from (".".join([*base, alias.name]) for alias in node.names)


def floor_of(name: str) -> int | None:
    """Return the floor of the dask_redist module that an imported name is, or is in."""
    parts = name.split(".")[1:]
    return next(
        (
            FLOOR[".".join(parts[:n])]
            for n in range(len(parts), 0, -1)
            if ".".join(parts[:n]) in FLOOR
        ),
        None,
    )


def wrong_imports(module: str, source: str) -> list[str]:
    """Return what a module imports and may not, each in words."""
    floor, wrong = FLOOR[module], []
    for name in imports(source, module):
        root = name.partition(".")[0]
        if root == "dask_redist":
            theirs = floor_of(name)
            if theirs is None and floor < 5:
                wrong.append(f"{name} is no module on a floor: import from where it is defined")
            elif theirs is not None and theirs > floor:
                wrong.append(f"{name} is on floor {theirs}, above {floor}")
        elif floor == 0 and (
            root in IO_AND_CLOCK or root not in sys.stdlib_module_names | ARITHMETIC
        ):
            wrong.append(f"{root}: floor 0 is index arithmetic on numpy and scipy only")
        elif floor == 1 and root in DASK:
            wrong.append(f"{root}: floor 1 is memory and knows no Dask")
    return wrong


def test_every_module_has_a_floor() -> None:
    assert modules(), "the package is empty"
    assert sorted(set(modules()) - set(FLOOR)) == [], "give the new module a floor in FLOORS"


@pytest.mark.parametrize("module", sorted(set(modules()) & set(FLOOR)))
def test_imports_go_downwards(module: str) -> None:
    assert wrong_imports(module, modules()[module].read_text()) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("boxes", "from dask_redist.arena import Arena"),
        ("boxes", "from dask_redist import arena"),
        ("boxes", "from . import arena"),
        ("boxes", "from .arena import Arena"),
        ("boxes", "def late():\n    import dask_redist.cli"),
        ("boxes", "import dask_redist"),
        ("boxes", "from dask_redist import Slab"),
        ("boxes", "import dask.array as da"),
        ("boxes", "from os import path"),
        ("boxes", "import time"),
        ("arena", "from distributed import Worker"),
        ("arena", "from dask_redist.run import Run"),
        ("connect", "from dask_redist.cli import main"),
    ],
)
def test_the_floor_check_sees(module: str, line: str) -> None:
    assert len(wrong_imports(module, line)) == 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("boxes", "import math\nimport numpy as np\nfrom dask_redist.errors import LayoutError"),
        ("arena", "import os\nimport mmap\nfrom dask_redist.errors import AdmissionError"),
        ("connect", "from distributed import Client\nfrom dask_redist import config"),
        ("__init__", "from dask_redist.cli import main\nfrom dask_redist.layouts import Slab"),
    ],
)
def test_the_floor_check_allows(module: str, line: str) -> None:
    assert wrong_imports(module, line) == []


@pytest.mark.parametrize("package", sorted(OPTIONAL))
def test_an_optional_package_is_wrapped_by_one_module(package: str) -> None:
    users = [
        module
        for module, path in modules().items()
        if any(name.partition(".")[0] == package for name in imports(path.read_text(), module))
    ]
    assert len(users) <= 1


#: collectives of mpi4py that pickle: the first one on a communicator duplicates it, under Python's
#: lock, so a second thread that uses MPI meanwhile can make ranks wait for each other for ever
PICKLING = {
    *("allgather", "allreduce", "alltoall", "bcast", "gather", "reduce", "scan", "scatter"),
    *("exscan", "barrier"),
}


def pickling(source: str) -> list[int]:
    """Return the lines that call such a collective of a communicator called ``comm`` or so."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in PICKLING
        and re.search(r"(comm|users|from_here|COMM_WORLD)$", ast.unparse(node.func.value))
    ]


def test_th01_collectives_that_pickle_are_made_before_there_are_threads() -> None:
    # https://github.com/mpi4py/mpi4py/issues/784
    """By the ranks of a job, in their main threads and on a communicator of its own only.

    And once in a communicator that nobody else knows yet.
    """
    found = {name for name, path in modules().items() if pickling(path.read_text())}
    assert found == {"crew", "mpigroup"}
    assert pickling("group.comm.allreduce(1)\nself.comm.Allreduce(a, b)") == [1]


def undeclared(names: Iterator[str]) -> set[str]:
    """Return the outside packages among imported names that pyproject.toml does not ask for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = list(chain(project["dependencies"], *project["optional-dependencies"].values()))
    # `dask[array,distributed] >=1` asks for dask and distributed.
    declared = {word.lower() for line in asked for word in re.findall(r"[A-Za-z][\w-]*", line)}
    packages = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - OPTIONAL
    return {package for package in packages if ALIAS.get(package, package).lower() not in declared}


@pytest.mark.parametrize("module", sorted(modules()))
def test_imported_packages_are_declared(module: str) -> None:
    assert undeclared(imports(modules()[module].read_text(), module)) == set()


def test_the_declaration_check_sees() -> None:
    found = undeclared(imports("import os, yaml, netCDF4, distributed, polars\nimport torch.nn"))
    assert found == {"polars", "torch"}


# ---- `import dask_redist` starts nothing and needs no optional package. ----

IMPORT = """
import sys, threading
import dask.array, distributed

class Watch:
    '''Note and refuse each try to import an optional package, whether it is installed or not.'''
    asked = []
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OPTIONAL:
            self.asked.append(name)
            raise ImportError(name)

before = set(threading.enumerate())
sys.meta_path.insert(0, Watch())
BODY
print("threads", [t.name for t in threading.enumerate() if t not in before])
print("asked", Watch.asked)
"""


def import_in_fresh_process(body: str) -> str:
    code = f"OPTIONAL = {OPTIONAL | {'zarr', 'xarray', 'netCDF4', 'cftime'}}\n"
    return subprocess.run(
        [sys.executable, "-c", code + IMPORT.replace("BODY", body)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    ).stdout


def test_ml10_import_starts_nothing_and_needs_nothing_optional() -> None:
    assert import_in_fresh_process("import dask_redist") == "threads []\nasked []\n"


def test_the_import_check_sees() -> None:
    printed = import_in_fresh_process(
        "threading.Thread(target=threading.Event().wait, name='t', daemon=True).start()\n"
        "try:\n    import mpi4py.MPI\nexcept ImportError:\n    pass"
    )
    assert printed == "threads ['t']\nasked ['mpi4py']\n"
