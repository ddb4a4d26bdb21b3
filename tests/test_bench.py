"""The benchmark for users: what it compares, that it sees a wrong result, what it writes."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import dask.array as da
import pytest
from click.testing import CliRunner
from cluster import ranks_in_threads
from distributed import Client

from dask_redist import bench, cli, connect
from dask_redist.connect import Ranks
from dask_redist.errors import RedistError
from dask_redist.field import indexed_field
from dask_redist.grids import Slab
from dask_redist.relayout import redistribute

MIB = 2**20
STAGES = {"build", "submit", "create", "contribute", "fence", "take", "writing"}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with ranks_in_threads(3) as client:
        yield client


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("nbytes", [2**16, 2**20, 512 * 2**20])
def test_the_changes(nbytes: int, ranks: int) -> None:
    found = bench.changes(nbytes, ranks)
    names = {change.name for change in found}
    assert names == {
        "Slab.X -> Slab.Y",
        "Slab.X -> Slab.Z",
        "Slab.X -> Pencil.Y",
        "uneven Slab.X -> Slab.Y",
        "slices -> series",
    }
    assert len({str(change) for change in found}) == len(found)
    for change in found:
        assert list(map(sum, change.before)) == list(map(sum, change.after)), change
        assert change.before != change.after
        if not change.name.startswith("uneven"):
            assert 0.8 * nbytes < change.nbytes < 1.2 * max(nbytes, 2**20)


def test_of_512_mib_they_are_the_ones_that_are_published() -> None:
    shapes = {tuple(map(sum, change.before)) for change in bench.changes(512 * 2**20, 4)}
    assert shapes == {(512, 512, 256), (509, 487, 251)}


def test_the_graph_alone_has_the_tasks_of_ours(client: Client) -> None:
    x = indexed_field(Slab.X.chunks((6, 8, 4), 3))
    chunks = Slab.Y.chunks((6, 8, 4), 3)
    ours, alone = dict(redistribute(x, chunks).dask), dict(bench._graph_alone(x, chunks).dask)
    assert len(ours) == len(alone) == 3 + 3 + 1 + 3

    def shape_of(graph: dict[Any, Any]) -> list[tuple[int, int]]:
        needs = {key: set(task.dependencies) for key, task in graph.items()}
        return sorted((len(n), sum(key in m for m in needs.values())) for key, n in needs.items())

    assert shape_of(ours) == shape_of(alone)
    made = client.compute(list(bench._graph_alone(x, chunks).to_delayed().ravel()), sync=True)
    assert [block.size for block in made] == [0, 0, 0]


def test_a_comparison(client: Client) -> None:
    change = bench.Change("test", Slab.X.chunks((7, 5, 11), 3), Slab.Y.chunks((7, 5, 11), 3))
    ticks: list[None] = []
    result = bench.compare(client, connect(client), change, 2, lambda: ticks.append(None))
    assert (result.change, result.ranks, result.rounds) == ("test 3:3", 3, 2)
    assert result.nbytes == 8 * prod((7, 5, 11))
    assert list(result.seconds) == list(bench.WAYS)
    assert all(seconds > 0 for seconds in result.seconds.values())
    assert set(result.stages) == STAGES
    assert len(ticks) == 3 * len(bench.WAYS)
    assert not client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks))


@pytest.mark.parametrize("way", [bench.OURS, "tasks"])
def test_a_wrong_element_is_seen(client: Client, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_wrong(x: da.Array, chunks: Any) -> da.Array:
        y: da.Array = da.where(x == 3, 4, x).rechunk(chunks)
        return y

    monkeypatch.setitem(bench.MAKERS, way, one_wrong)
    change = bench.Change("test", Slab.X.chunks((6, 8, 4), 3), Slab.Y.chunks((6, 8, 4), 3))
    with pytest.raises(RedistError, match=f"^{way}: 1 of 192 elements are wrong"):
        bench.compare(client, connect(client), change, 1, lambda: None)


def result(ours: float, p2p: float, tasks: float) -> bench.Result:
    taken = (ours, ours, p2p, 0.001, tasks, 0.3, 0.2)
    return bench.Result("test", 2, 10**9, 1, dict(zip(bench.WAYS, taken, strict=True)))


def test_the_figures() -> None:
    assert result(1.0, 4.0, 2.0).ratio == 2.0
    assert result(1.0, 4.0, 5.0).ratio == 4.0  # over the disk does not count
    assert result(1.0, 4.0, 2.0).over_floor == 2.0


def test_the_command(tmp_path: Path) -> None:
    arguments = ["--ranks", "2", "--size", "64 KiB", "--rounds", "1", "--only", "Slab.Y 2:2"]
    files = ["--json", str(tmp_path / "b.json"), "--png", str(tmp_path / "b.png")]
    said = CliRunner().invoke(cli.main, ["bench", *arguments, *files], env={"COLUMNS": "120"})
    assert said.exit_code == 0, said.output
    assert "2 ranks on 1 host" in said.output
    even, uneven = json.loads((tmp_path / "b.json").read_text())
    assert (even["change"], uneven["change"]) == (
        "Slab.X -> Slab.Y 2:2",
        "uneven Slab.X -> Slab.Y 2:2",
    )
    for found in (even, uneven):
        assert found["change"] in said.output
        assert set(found["stages"]) == STAGES
        fastest = min(found["seconds"]["p2p"], found["seconds"]["tasks"])
        assert found["over_dask"] == fastest / found["seconds"]["ours"]
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def lend(client: Client, memory: int, monkeypatch: pytest.MonkeyPatch) -> list[bench.Change]:
    """Have the command use these ranks, as if they had so much memory; what it is to measure."""
    found = connect(client)
    seats = (seat._replace(memory_limit=memory // found.size) for seat in found.seats)
    poorer = replace(found, seats=tuple(seats))
    monkeypatch.setattr(cli, "local_ranks", lambda n: nullcontext((client, poorer)))
    wanted: list[bench.Change] = []

    def compare(client: Client, ranks: Ranks, change: bench.Change, *rest: Any) -> bench.Result:
        wanted.append(change)
        return result(1.0, 2.0, 3.0)

    monkeypatch.setattr(cli, "compare", compare)
    return wanted


@pytest.mark.parametrize(
    ("memory", "mib"),
    [(2**40, 1024), (6 * 2**30, 1024), (6 * 2**30 - 3, 512), (600 * MIB, 64), (192 * MIB, 32)],
)
def test_without_a_size_it_takes_one_that_fits(
    client: Client, monkeypatch: pytest.MonkeyPatch, memory: int, mib: int
) -> None:
    wanted = lend(client, memory, monkeypatch)
    said = CliRunner().invoke(cli.main, ["bench", "--only", "Slab.X -> Slab.Y 32:32"])
    assert said.exit_code == 0, said.output
    size = "1.00 GiB" if mib == 1024 else f"{mib}.00 MiB"
    assert f"fields of {size}, the largest that fit\n" in said.output
    assert wanted[0] in bench.changes(mib * MIB, 3)


def test_a_size_that_fits_is_taken(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = lend(client, 6 * MIB, monkeypatch)
    said = CliRunner().invoke(cli.main, ["bench", "--size", "1 MiB", "--only", "Slab.Z 32:32"])
    assert said.exit_code == 0, said.output
    assert "the largest" not in said.output
    assert [change.nbytes for change in wanted] == [MIB]


@pytest.mark.parametrize(
    ("arguments", "size"), [(["--size", "32MiB"], "32MiB"), ([], "32.00 MiB")], ids=str
)
def test_what_does_not_fit_is_refused(
    client: Client, monkeypatch: pytest.MonkeyPatch, arguments: list[str], size: str
) -> None:
    wanted = lend(client, 6 * 17 * MIB - 3, monkeypatch)
    said = CliRunner().invoke(cli.main, ["bench", *arguments])
    assert said.exit_code == 1
    assert f"six fields of {size} do not fit in memory: use --size '16 MiB'" in said.output
    assert not wanted


def test_no_such_change() -> None:
    said = CliRunner().invoke(cli.main, ["bench", "--size", "64 KiB", "--only", "Slab.Q"])
    assert said.exit_code == 1
    assert "no change has 'Slab.Q' in its name: Slab.X -> Slab.Y 2:2; " in said.output


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    with pytest.raises(RedistError, match=r"pip install 'dask-redist\[bench\]'"):
        bench.require_matplotlib()
