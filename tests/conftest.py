"""Options, rank counts and the cluster that each test on worker processes gets.

Every test that asks for ``client`` (or ``relayout``) runs once for each number of ranks: 1, 2 and
3, with ``--everything`` 5 and 7 and 4 too. Tests marked ``sample`` run on all six always;
``ranks(2, 3)`` names the counts of a test that makes sense on these only, ``everything`` a test
that runs with ``--everything`` only. Tests are ordered by
number of ranks, so that each cluster is started once. Tests marked ``wires`` run over Dask's comms
and on MPI ranks over MPI too, on 3 ranks; with ``--everything`` over each wire that can be forced.

With ``--mpi`` the ranks of these clusters are the ranks of an MPI job.
"""

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
from cluster import DASK_COMM, MPI, SHARED_MEMORY, Clusters, Relayout, leftovers, rank_counts
from distributed import Client

USUAL, MANY = (1, 2, 3), (1, 2, 3, 4, 5, 7)
FORCED = [(3, DASK_COMM), (3, MPI)]
ALL_FORCED = [
    *((2, DASK_COMM), (3, DASK_COMM), (3, SHARED_MEMORY)),
    *((n, MPI) for n in (1, 2, 3, 4, 5)),
]

failed = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ranks", help="numbers of ranks for the tests on clusters, such as 2 or 2,5")
    parser.addoption(
        "--everything", action="store_true", help="all tests on 1, 2, 3, 4, 5 and 7 ranks"
    )
    parser.addoption("--mpi", action="store_true", help="the ranks are MPI ranks")


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "ranks(*counts): the numbers of ranks that this test is for",
        "sample: runs on 4, 5 and 7 ranks too, always",
        "wires: runs over wires that have to be forced, too",
        "everything: with --everything only",
        "erring: its tasks raise, so worker logs may say that a computation failed",
    ):
        config.addinivalue_line("markers", line)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cluster_of" not in metafunc.fixturenames:
        return
    node = metafunc.definition
    counts = _counts(node, metafunc.config)
    chosen: list[tuple[int, str | None]] = [(n, None) for n in counts]
    if node.get_closest_marker("wires"):
        forced = ALL_FORCED if metafunc.config.getoption("everything") else FORCED
        chosen += [(n, wire) for n, wire in forced if n in counts]
    metafunc.parametrize(
        "cluster_of",
        chosen,
        ids=[f"{n} ranks" + (f", {wire}" if wire else "") for n, wire in chosen],
        indirect=True,
    )


def _counts(node: Any, config: pytest.Config) -> tuple[int, ...]:
    marked, option = node.get_closest_marker("ranks"), config.getoption("ranks")
    wanted = rank_counts(option) if option else None
    if marked:
        return tuple(n for n in marked.args if wanted is None or n in wanted)
    if wanted:
        return wanted
    many = config.getoption("everything") or node.get_closest_marker("sample")
    return MANY if many else USUAL


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def cluster_of(item: pytest.Item) -> Any:
        callspec = getattr(item, "callspec", None)
        return callspec.params.get("cluster_of", (0, None)) if callspec else (0, None)

    def is_chosen(item: pytest.Item) -> bool:
        usual = item.get_closest_marker("everything") is None or config.getoption("everything")
        # A test that --ranks leaves no number of ranks has no tuple.
        return bool(usual) and isinstance(cluster_of(item), tuple)

    others = [item for item in items if not is_chosen(item)]
    if others:  # deselected, not skipped
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if is_chosen(item)]
    items.sort(key=lambda item: (cluster_of(item)[0], cluster_of(item)[1] or ""))


def pytest_collection_finish() -> None:
    """Let the garbage collection after each of many tests skip what was there before them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    outcome: Any = yield
    if outcome.get_result().failed:
        item.stash[failed] = True


@pytest.fixture(scope="session")
def clusters(request: pytest.FixtureRequest) -> Iterator[Clusters]:
    """The one cluster that is alive."""
    held = Clusters(mpi=request.config.getoption("mpi"))
    yield held
    held.close()


@pytest.fixture
def cluster_of(request: pytest.FixtureRequest) -> tuple[int, str | None]:
    """Number of ranks and forced wire of this test."""
    found: tuple[int, str | None] = request.param
    return found


@pytest.fixture
def ranks(cluster_of: tuple[int, str | None]) -> int:
    """How many ranks there are."""
    return cluster_of[0]


@pytest.fixture
def wire(cluster_of: tuple[int, str | None]) -> str:
    """The wire between two ranks."""
    return cluster_of[1] or SHARED_MEMORY


@pytest.fixture
def client(
    request: pytest.FixtureRequest, clusters: Clusters, cluster_of: tuple[int, str | None]
) -> Iterator[Client]:
    """A connected client; afterwards every arena must be empty and every log free of errors."""
    client = clusters.client(*cluster_of)
    erring = request.node.get_closest_marker("erring") is not None
    before = len(_errors(client, erring))
    with client.as_current():
        yield client
    if request.node.stash.get(failed, False):
        clusters.close()  # what the failed test still holds must not fail the next one
        return
    try:
        _no_leftovers(client)
        errors = _errors(client, erring)
        assert len(errors) == before, f"in the logs: {errors[before:]}"
    except BaseException:
        clusters.close()
        raise


@pytest.fixture
def relayout(request: pytest.FixtureRequest, client: Client) -> Iterator[Relayout]:
    """``redistribute``, watched: each one that the test made must have run as a collective."""
    watched = Relayout(client)
    yield watched
    if not request.node.get_closest_marker("erring"):
        watched.verify()


def _no_leftovers(client: Client) -> None:
    """Fail unless all arenas are empty soon, naming the ranks that hold something."""
    deadline = time.monotonic() + 10
    while held := leftovers(client):
        if time.monotonic() > deadline:
            pytest.fail(f"10 s after the test arenas still hold memory or runs: {held}")
        time.sleep(0.02)
        gc.collect()  # a failure's frames may hold arrays


def _errors(client: Client, erring: bool) -> list[str]:
    """Lines of level ERROR or above in the logs of the workers and the scheduler."""
    logs = [*client.get_worker_logs().values(), client.get_scheduler_logs()]
    return [
        line
        for log in logs
        for level, line in log
        if level in ("ERROR", "CRITICAL") and not (erring and "Compute Failed" in line)
    ]
