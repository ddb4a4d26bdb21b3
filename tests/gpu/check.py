"""What one GPU can show, as a table and as JSON; nothing here is needed to run the tests.

    python tests/gpu/check.py --json gpu.json      on a machine with a GPU, under 5 minutes
    python tests/gpu/check.py --double             the script itself, over the double, in seconds

Each section is played by processes of its own, with a deadline: one that hangs, or is ended by a
library, does not lose the others. The exit code is 0 when no section failed, 1 when one did, and 2
without a GPU.
"""

import argparse
import json
import mmap
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from check_child import play
from meeting import CASE, SIZE
from packages import ROOT, child_path
from rich.console import Console
from rich.table import Table


class Section(NamedTuple):
    """One section: a function in a module, on how many PEs, and for how long at most."""

    name: str
    scene: str
    n_pes: int
    seconds: float


SECTIONS = [
    Section("versions and device", "check_one:versions", 1, 15),
    Section("NVSHMEM starts by an id", "check_one:start", 1, 20),
    Section("symmetric arena", "check_one:arena", 1, 20),
    Section("put and signal to itself", "check_one:to_itself", 1, 15),
    Section("copies and packing", "check_one:copies", 1, 30),
    Section("NCCL with one rank", "check_one:reductions", 1, 30),
    Section("two PEs by barrier_all", "check_two:barrier", 2, 20),
    Section("boxes by peer memory", "check_two:direct", 2, 25),
    Section("boxes by messages", "check_two:staged", 2, 25),
    Section("Dask's tests of CuPy", "check_one:dask_tests", 1, 90),
]


class Outcome(NamedTuple):
    """What became of a section: "passed", "failed" or "not here", and what it said."""

    name: str
    status: str
    seconds: float
    rows: list[tuple[str, str]]
    words: str


def run(section: Section, double: bool, folders: Sequence[str]) -> Outcome:
    """Play a section in processes of its own, and end them when its time is over."""
    began = time.monotonic()
    context = mp.get_context("spawn")
    fd = os.memfd_create("check")
    os.ftruncate(fd, SIZE)
    with mmap.mmap(fd, SIZE) as memory:
        memory[8 * CASE] = 1
    path = f"/proc/{os.getpid()}/fd/{fd}"
    requests, replies = ([context.Queue() for _ in range(section.n_pes)] for _ in range(2))
    pipes, processes, answers = [], [], []
    with tempfile.TemporaryDirectory() as logs:
        for pe in range(section.n_pes):
            ours, theirs = context.Pipe()
            place = (list(folders), path, pe, section.n_pes, double, section.scene)
            log = os.path.join(logs, str(pe))
            process = context.Process(target=play, args=(*place, requests, replies, theirs, log))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pe, (pipe, process) in enumerate(zip(pipes, processes, strict=True)):
            left = began + section.seconds - time.monotonic()
            try:
                if pipe.poll(max(0.0, left)):
                    status, rows, words = pipe.recv()
                    printed = f"{_tail(logs, pe)}\n" if status == "failed" else ""
                    answers.append((status, rows, printed + words))
                else:
                    words = f"PE {pe} has not ended after {section.seconds:g} s"
                    answers.append(("failed", [], f"{words}\n{_tail(logs, pe)}"))
            except EOFError:
                process.join(5)
                words = f"PE {pe} was ended with exit code {process.exitcode}"
                answers.append(("failed", [], f"{words}\n{_tail(logs, pe)}"))
        for process in processes:
            _end(process)
    os.close(fd)
    status = next(
        (s for s in ("failed", "not here") if s in [answer[0] for answer in answers]), "passed"
    )
    said = [words for _, _, words in answers if words]
    return Outcome(
        section.name, status, time.monotonic() - began, answers[0][1], "\n".join(said).strip()
    )


def _tail(logs: str, pe: int) -> str:
    """The last that a PE's process, or a library in it, has printed."""
    try:
        return Path(logs, str(pe)).read_text(errors="replace")[-2000:].strip()
    except FileNotFoundError:
        return ""


def _end(process: Any) -> None:
    """End a process that may hang in a library, and what it has started."""
    process.join(1)
    try:
        os.killpg(process.pid, signal.SIGKILL)  # it leads a group of its own
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.join(5)


def why_no_gpu() -> str:
    """Why there is no GPU to check; empty if there is one."""
    try:
        from cupy import cuda

        return "" if cuda.is_available() else "CuPy finds no GPU"
    except ImportError as error:
        return f"CuPy is missing ({error})"


def table(outcomes: Sequence[Outcome]) -> Table:
    """The outcomes, with what each section measured."""
    made = Table("section", "", "seconds", "", "", title="What one GPU shows")
    colors = {"passed": "green", "failed": "red", "not here": "yellow"}
    for name, status, seconds, rows, words in outcomes:
        last = words.splitlines()[-1] if words else ""
        lines = [*rows, *([("", last)] if last else [])] or [("", "")]
        for k, (what, value) in enumerate(lines):
            first = (name, f"[{colors[status]}]{status}", f"{seconds:.1f}")
            made.add_row(*(("", "", "") if k else first), what, value)
        made.add_section()
    return made


def main(given: Sequence[str] | None = None) -> int:
    """Play all sections, or some; the exit code."""
    parser = argparse.ArgumentParser(description="Check what one GPU can show.")
    parser.add_argument("--double", action="store_true", help="over the double, without a GPU")
    parser.add_argument("--json", metavar="FILE", help="write the outcomes there too")
    options = parser.parse_args(given)
    console = Console(width=None if sys.stdout.isatty() else 120)
    if not options.double and (why := why_no_gpu()):
        console.print(f"There is no GPU to check: {why}; --double checks the script without one.")
        return 2
    if options.double:
        folders = child_path().split(os.pathsep)
    else:  # not the packages without CUDA's libraries that `make test` installs
        folders = [str(ROOT), str(Path(__file__).parent)]
    outcomes = []
    for section in SECTIONS:
        if options.double:  # a busy machine without a GPU is no fault
            section = section._replace(seconds=3 * section.seconds)
        outcomes.append(run(section, options.double, folders))
        console.print(f"{section.name}: {outcomes[-1].status}", highlight=False)
        if outcomes[-1].status == "failed":
            console.print(outcomes[-1].words, markup=False, highlight=False)
        if options.json:  # after each: what is there is not lost
            found = {"double": options.double, "sections": [o._asdict() for o in outcomes]}
            Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    console.print(table(outcomes))
    return int(any(outcome.status == "failed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
