"""The command ``dask-redist``: look at a cluster, see a redistribution work, measure it.

This is the one module that prints. All commands close what they opened, on Ctrl-C too; what a
user can mend ends as one line and exit code 1.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import click
from dask.utils import format_bytes, parse_bytes
from distributed import Client
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from dask_redist import demo as show
from dask_redist.about import in_plain_words, package_table, rank_table, ranks_in_words
from dask_redist.bench import (
    GRAPH,
    P2P,
    SIZES,
    TASKS,
    Result,
    changes,
    compare,
    largest,
    picture,
    require_matplotlib,
    room,
)
from dask_redist.bench import WAYS as BENCH_WAYS
from dask_redist.cluster import local_ranks, ranks_at
from dask_redist.connect import Ranks
from dask_redist.errors import RedistError
from dask_redist.field import Shape
from dask_redist.launch import run_script


def shape_of(nbytes: int) -> Shape:
    """A shape (2n, n, n), or nearly, of about so many bytes of float64.

    Examples
    --------
    >>> shape_of(256 * 2**20), shape_of(10**6)
    ((512, 256, 256), (78, 40, 40))
    """
    n = round((nbytes / 16) ** (1 / 3))
    return round(nbytes / 8 / n**2), n, n


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """What a user can mend is one line, not a traceback."""
    try:
        yield
    except RedistError as error:
        raise click.ClickException(str(error)) from error


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dask-redist", prog_name="dask-redist")
def main() -> None:
    """Dask arrays whose chunks belong to ranks: a change of layout is one collective."""


# -------------------------------------------------------------------------------------- info
def _on_a_cluster(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say which cluster, or how many ranks to start here."""
    at = click.option("--scheduler", metavar="ADDRESS", help="Use the cluster of this scheduler.")
    file = click.option(
        "--scheduler-file",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False),
        help="Use the cluster that this file describes.",
    )
    here = click.option("--ranks", type=click.IntRange(1), help="Else: start so many here (2).")
    return at(file(here(command)))


def _cluster(
    scheduler: str | None, scheduler_file: str | None, ranks: int | None
) -> AbstractContextManager[tuple[Client, Ranks]]:
    """The cluster that the options name."""
    if sum(option is not None for option in (scheduler, scheduler_file, ranks)) > 1:
        raise click.UsageError("give one of --scheduler, --scheduler-file and --ranks")
    if scheduler or scheduler_file:
        return ranks_at(scheduler, scheduler_file)
    return local_ranks(ranks or 2)


@main.command()
@_on_a_cluster
def info(scheduler: str | None, scheduler_file: str | None, ranks: int | None) -> None:
    """Ranks, wires, memory, and what is installed; of a cluster, or of ranks started here.

    On a cluster, every worker becomes a rank and stays one; nothing else changes.
    """
    cluster = _cluster(scheduler, scheduler_file, ranks)
    console = Console()
    elsewhere = scheduler or scheduler_file
    with _one_line_errors(), cluster as (_, found):
        where = f"at {elsewhere}" if elsewhere else "started on 127.0.0.1 for this look"
        console.print(f"{ranks_in_words(found)}, {escape(where)}", soft_wrap=True)
        console.print(rank_table(found))
        for line in in_plain_words(found):
            console.print(line, soft_wrap=True)
    console.print(package_table())


# --------------------------------------------------------------------------------------- run
@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.option("-n", "n", type=click.IntRange(1), required=True, help="Number of MPI ranks.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(script: str, n: int, arguments: tuple[str, ...]) -> None:
    """Run a script that says `with dask_redist.mpi()` as an MPI job of n ranks.

    As mpiexec -n N python SCRIPT ARGUMENTS does, with the mpiexec that belongs to this Python. What
    comes after -- is for the script only. The exit code is that of the script.
    """
    with _one_line_errors():
        run_script(script, arguments, n)


# -------------------------------------------------------------------------------------- demo
@main.command()
@click.option("--ranks", type=click.IntRange(2), default=4, show_default=True)
@click.option("--size", default="256 MiB", show_default=True, help="Bytes of the raced field.")
def demo(ranks: int, size: str) -> None:
    """Real maps become time series; then a race against Dask, checked element by element."""
    nbytes = _bytes(size)
    with _one_line_errors():
        show.require_extras()
    with _one_line_errors(), _progress() as progress:
        task = progress.add_task("starting ranks", total=show.TICKS + 1)
        with local_ranks(ranks) as (client, found):
            _six_fit(found, nbytes, size)
            _demo(client, found, shape_of(nbytes), progress, task)


def _bytes(size: str) -> int:
    try:
        nbytes: int = parse_bytes(size)
    except ValueError as error:
        raise click.BadParameter(f'{size!r} is no size such as "256 MiB"') from error
    if nbytes < 2**16:
        raise click.BadParameter(f"{size} is too little to share out: at least 64 KiB")
    return nbytes


def _six_fit(ranks: Ranks, nbytes: int, size: str) -> None:
    if nbytes > room(ranks):
        fits = f"{room(ranks) // 2**20} MiB"
        raise RedistError(f"six fields of {size} do not fit in memory: use --size {fits!r}")


def _progress() -> Progress:
    bar = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*bar, console=Console(), transient=True)


def _demo(client: Client, ranks: Ranks, shape: Shape, progress: Progress, task: TaskID) -> None:
    console = progress.console
    console.print(ranks_in_words(ranks))
    progress.update(task, description="real data")
    real = show.series_from_maps(client)
    console.print(
        f"\n[bold]Real data[/bold]: air temperature over North America, {real.years}\n"
        f"  {real.shape}: {real.maps} maps in Zarr, one a chunk -> "
        f"{real.series} chunks of whole time series\n"
        f"  equal to NumPy bit for bit; collectives that ran: {real.collectives}"
    )
    progress.update(task, description="race", advance=1)
    steps = show.race(client, ranks, shape, lambda: progress.advance(task))
    console.print(
        f"\n[bold]Race[/bold]: {shape} float64, {format_bytes(steps[0].nbytes)}; each element is "
        "its global index\n  persisted input to persisted output, warm; medians of "
        f"{min(step.rounds for step in steps)} interleaved rounds\n"
        "  ratio: how many times as fast as the faster of Dask's two ways",
        _race_table(steps),
        f"checked on the ranks, exactly: {steps[0].nbytes // 8:,} elements in each step",
        verdict(steps),
        sep="\n",
    )


def _race_table(steps: list[show.Step]) -> Table:
    table = Table("step", "way")
    for column in ("seconds", "GB/s", "ratio"):
        table.add_column(column, justify="right")
    for step in steps:
        fastest = min((w for w in show.WAYS if w != show.COPY), key=lambda w: step.seconds[w])
        for way, seconds in step.seconds.items():
            table.add_row(
                f"{step.source} -> {step.target}" if way == show.WAYS[0] else "",
                way,
                f"{seconds:.3f}",
                f"{step.nbytes / seconds / 1e9:.2f}",
                f"{step.ratio(way):.1f}",
                style="bold" if way == fastest else None,
            )
        table.add_section()
    return table


def verdict(steps: list[show.Step]) -> str:
    """Who won, in one sentence."""
    ratios = [step.ratio(show.OURS) for step in steps]
    won = sum(ratio > 1 for ratio in ratios)
    if won == len(ratios):
        fewest, most = min(ratios), max(ratios)
        return f"dask_redist won every step: {fewest:.1f} to {most:.1f} times as fast as Dask"
    return f"dask_redist won {won} of {len(ratios)} steps; Dask was faster in the others"


# ------------------------------------------------------------------------------------- bench
@main.command()
@_on_a_cluster
@click.option(
    "--size",
    show_default=f"the largest of {', '.join(f'{n // 2**20}' for n in SIZES)} MiB that fits",
    help="Bytes of the field.",
)
@click.option(
    "--chunks",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Chunks before and after, beside one a rank.",
)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--only", default="", metavar="TEXT", help="Only changes whose name has this in it.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write JSON.")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Draw the seconds.")
def bench(
    scheduler: str | None,
    scheduler_file: str | None,
    ranks: int | None,
    size: str | None,
    chunks: int,
    rounds: int,
    only: str,
    file: Path | None,
    png: Path | None,
) -> None:
    """Measure changes of layout against Dask's ways, and against what is possible here.

    Slabs, pencils, uneven fields and slices, with one chunk a rank and with --chunks of them;
    persisted input to persisted output, warm, medians of interleaved rounds; all is checked.
    """
    cluster = _cluster(scheduler, scheduler_file, ranks)
    given = None if size is None else _bytes(size)
    results = []
    with _one_line_errors(), _progress() as progress, cluster as (client, found):
        nbytes = largest(found) if given is None else given
        _six_fit(found, nbytes, size or format_bytes(nbytes))
        if png is not None:
            require_matplotlib()
        every = changes(nbytes, found.size, chunks)
        wanted = [change for change in every if only in str(change)]
        if not wanted:
            names = "; ".join(map(str, every))
            raise RedistError(f"no change has {only!r} in its name: {names}")
        progress.console.print(ranks_in_words(found))
        if given is None:
            progress.console.print(f"fields of {format_bytes(nbytes)}, the largest that fit")
        task = progress.add_task("", total=len(wanted) * (rounds + 1) * len(BENCH_WAYS))
        for change in wanted:
            progress.update(task, description=str(change))
            results.append(compare(client, found, change, rounds, lambda: progress.advance(task)))
            if file is not None:  # what there is, should a later change fail
                rows = [result.as_json() for result in results]
                file.write_text(json.dumps(rows, indent=1) + "\n")
        if png is not None:
            picture(results, png)
    console = Console()
    console.print(_bench_table(results), _stage_table(results), sep="\n")
    console.print(
        "32:32 is chunks before and after\n"
        f"x Dask: how many times as fast as the faster of {P2P} and {TASKS}\n"
        f"/ floor: over {GRAPH} (as many tasks that do nothing) + copy (of the bytes, all at once)",
        soft_wrap=True,
        emoji=False,
    )


def _table(title: str) -> Table:
    return Table("change", title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")


def _bench_table(results: list[Result]) -> Table:
    table = _table(f"milliseconds, medians of {results[0].rounds} rounds")
    for column in (*BENCH_WAYS, "x Dask", "/ floor"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        seconds = (f"{1e3 * result.seconds[way]:.0f}" for way in BENCH_WAYS)
        over = result.over_floor
        table.add_row(result.change, *seconds, f"{result.ratio:.2f}", f"{over:.2f}")
    return table


def _stage_table(results: list[Result]) -> Table:
    """Where the time of ours went: what the client does, then the stages of the runs."""
    table = _table("where the milliseconds of ours went")
    stages = list(results[0].stages)
    for stage in stages:
        table.add_column(stage, justify="right", no_wrap=True)
    for result in results:
        table.add_row(result.change, *(f"{1e3 * result.stages[s]:.1f}" for s in stages))
    return table


if __name__ == "__main__":
    main()
