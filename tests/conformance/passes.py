"""Dask's own tests of arrays with the hook on: run, compared, and reported.

Three passes of pytest over the tests of the installed Dask: as it is, in one process; every change
of chunks a collective and reductions ours, on two ranks; and those tests that ``lists.toml`` says
fail on any cluster, there without the hook. ``plugin.py`` notes what happens, ``judge.py``
compares.

    python tests/conformance/passes.py [--quick | NAME ...]
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click
import dask
from facts import read
from judge import FILES, Lists, Row, Tests, Verdict, judge, only_in_process
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
#: where Dask is installed
SITE = Path(dask.__file__).parent.parent
NAMES = (
    "rechunk",
    "reductions",
    "reshape",
    "overlap",
    "linalg",
    "routines",
    "slicing",
    "shuffle",
    "array_core",
    "stats",
    "masked",
)
#: what ``make test`` runs: rechunk but for tests of many chunks, which take long on a cluster, and
#: some of the reductions
QUICK = (
    ("rechunk", "reductions"),
    "not (x3 or x4 or x5 or non_perfect or squashing) and (not test_reductions.py or "
    "test_arg_reductions and argmax or negative_axes or empty or moment or nanarg_reductions or "
    "nan_object or topk_argtopk2 and (1-None or 3-2 or 4-4) or weighted or "
    "test_array_reduction_out or 0d or "
    "does_not_warn or chunk_structure and axes6-2-chunks1 or depth or set_options or names)",
)
#: without these, tests would be skipped
PACKAGES = ("pandas", "pyarrow", "pytest_mock", "pytest_timeout", "scipy", "xarray", "zarr")


class Passes:
    """Runs pytest over Dask's tests and gathers what the plugin notes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: what is wrong with a pass as a whole
        self.faults: list[str] = []

    def run(self, which: str, *arguments: str) -> Tests:
        """Notes on each test of one pass.

        Raises
        ------
        SystemExit
            Pytest did not come to its end.
        """
        notes = self.folder / f"{which}.json"
        path = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider"]
        command += ["-c", str(HERE / "dask.ini"), "--rootdir", str(SITE), "-p", "plugin"]
        command += ["--pass", which, "--notes", str(notes), *arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        code = subprocess.run(command, cwd=SITE, env=environment, check=False).returncode
        if code not in (0, 1):  # 1: tests failed
            raise SystemExit(f"pytest ended with {code} in pass {which}")
        found = read(notes)
        self.faults += [f"pass {which}: {fault}" for fault in found.faults]
        return found.tests


def conformance(names: Sequence[str], chosen: str = "") -> Verdict:
    """Run the files of these names, or the tests chosen from them, and judge.

    Raises
    ------
    SystemExit
        A package is missing, or pytest did not come to its end.
    """
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise SystemExit(f"without {', '.join(missing)} Dask skips tests: pip install '.[test]'")
    lists = Lists()
    files = [f"{FILES}test_{name}.py" for name in names]
    choose = ["-k", chosen] if chosen else []
    with tempfile.TemporaryDirectory() as folder:
        passes = Passes(Path(folder))
        record = passes.run("record", *files, *choose)
        left_out = [f"--deselect={t}" for t, facts in record.items() if only_in_process(facts)]
        hook = passes.run("hook", *files, *choose, *left_out)
        fail_anyway = [test for test in hook if lists.reason("cluster", test)]
        stock = passes.run("stock", *fail_anyway) if fail_anyway else {}
    verdict = judge(lists, record, hook, stock)
    verdict.faults += passes.faults
    if not chosen:
        ran = {f"test_{name}.py" for name in names}
        verdict.faults += [f"no test is named {p}" for p in lists.without_test(ran, record)]
    return verdict


def report(verdict: Verdict) -> None:
    """Print the table, what is explained, and what is not."""
    console = Console(highlight=False, markup=False)
    title = "Dask's own tests with dask_redist enabled, on 2 ranks"
    table = Table(title=title, box=None, padding=(0, 1, 0, 0))
    table.add_column("file", no_wrap=True)
    for heading in (
        *("collected", "passed", "failed", "skipped", "should\nreach", "did\nreach"),
        *("should\nreduce", "did\nreduce"),
    ):
        table.add_column(heading, justify="right")
    total = Row()
    for name, row in verdict.rows.items():
        table.add_row(name.removesuffix(".py"), *map(str, vars(row).values()))
        for column, count in vars(row).items():
            setattr(total, column, getattr(total, column) + count)
    table.add_section()
    table.add_row("all", *map(str, vars(total).values()))
    console.print(table)
    for title, reasons in (
        ("failed, explained", verdict.failed),
        ("skipped", verdict.skipped),
        ("change chunks, without a collective", verdict.no_collective),
        ("reduce, and none is ours", verdict.not_reduced),
    ):
        _print(console, title, reasons)
    console.print(f"\nnot explained: {len(verdict.faults)}")
    for fault in verdict.faults:
        console.print(fault, soft_wrap=True)


def _print(console: Console, title: str, reasons: Counter[str]) -> None:
    if reasons:
        console.print(f"\n{title}: {reasons.total()}")
    for reason, count in reasons.most_common():
        console.print(f"{count:6}  {reason}", soft_wrap=True)


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
@click.option("--quick", is_flag=True, help="The part that make test runs.")
def main(names: tuple[str, ...], quick: bool) -> None:
    """Run Dask's own tests of these NAMES, or all, with the hook on."""
    verdict = conformance(*QUICK) if quick else conformance(names or NAMES)
    report(verdict)
    sys.exit(bool(verdict.faults))


if __name__ == "__main__":
    main()
