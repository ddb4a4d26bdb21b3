import dataclasses
from typing import Any

import pytest
from facts import BACK, Change, Facts, Notes, read
from judge import FILES, Lists, judge, matches
from passes import QUICK, conformance, report

FILE = FILES + "test_rechunk.py::"


@pytest.mark.timeout(600)
def test_the_part_of_dasks_own_tests_that_is_quick() -> None:
    verdict = conformance(*QUICK)
    report(verdict)
    rows = verdict.rows
    assert verdict.faults == []
    assert all(row.did == row.should and row.reduced == row.to_reduce for row in rows.values())
    assert all(row.should + row.to_reduce > 0 for row in rows.values())


# ---- The judge sees what it is there for. ----


class Given(Lists):
    def __init__(self, **entries: dict[str, str]) -> None:
        names = ("graph", "cluster", "no-collective")
        self.entries = {name: entries.get(name.replace("-", "_"), {}) for name in names}


DONE = Change("y", None, collective=True, computed=True)
PLAIN = dataclasses.replace(DONE, collective=False)
LAZY = dataclasses.replace(DONE, computed=False)
EMPTY = dataclasses.replace(PLAIN, reason="the array has no elements")
WENT_BACK = dataclasses.replace(PLAIN, reason=BACK)
BEFORE = Facts(changes=[PLAIN])
REACHED = Facts(changes=[DONE], made=["y"])
FAILED = Facts("failed", changes=[DONE])
GATHERED = dataclasses.replace(DONE, run=False)
REDUCE = Facts(reductions=[PLAIN])
REDUCED = Facts(reductions=[DONE], made=["y"])
ONE_CHUNK = dataclasses.replace(PLAIN, reason="there is one chunk along the reduced axes")
ON = {"test_rechunk.py::a": "reason"}


def faults(before: Facts, after: Facts | None, stock: Facts | None = None, **lists: Any) -> str:
    """What the judge finds in one test."""
    test = FILE + "a"
    hook = {} if after is None else {test: after}
    verdict = judge(Given(**lists), {test: before}, hook, {} if stock is None else {test: stock})
    return "; ".join(verdict.faults).removeprefix(test + " ")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (BEFORE, REACHED),
        (Facts(), Facts()),
        (Facts("skipped"), Facts("skipped")),
        (Facts("xfailed"), Facts("xfailed")),
        (Facts(slow=True), None),
        (Facts(changes=[EMPTY]), Facts(changes=[EMPTY])),
        (Facts(changes=[LAZY]), Facts(changes=[LAZY])),
        (BEFORE, Facts(changes=[LAZY, WENT_BACK])),
        (REDUCE, REDUCED),
        (REDUCE, Facts(reductions=[GATHERED])),
        (Facts(reductions=[ONE_CHUNK]), Facts(reductions=[ONE_CHUNK])),
        (Facts(reductions=[LAZY]), Facts(reductions=[LAZY])),
    ],
)
def test_what_is_as_it_should_be(before: Facts, after: Facts | None) -> None:
    assert faults(before, after) == ""


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        (BEFORE, FAILED, "fails\n"),
        (Facts("failed"), Facts("failed"), "fails without hook and cluster"),
        (BEFORE, None, "did not run with the hook"),
        (Facts(slow=True, changes=[PLAIN]), None, "did not run with the hook"),
        (BEFORE, Facts("skipped"), "skipped with the hook, passed without"),
        (Facts("xfailed"), Facts(), "passed with the hook, xfailed without"),
        (BEFORE, Facts(), "no collective ran"),
        (BEFORE, Facts(changes=[PLAIN]), "leaves y to Dask"),
        (BEFORE, Facts(changes=[DONE, PLAIN], made=["y"]), "leaves y to Dask"),
        (Facts(changes=[LAZY]), Facts(changes=[PLAIN]), "leaves y to Dask"),
        (BEFORE, Facts(changes=[DONE], made=["z"]), "computes y without a run"),
        (Facts(slow=True, reductions=[PLAIN]), None, "did not run with the hook"),
        (REDUCE, Facts(), "no reduction is ours"),
        (REDUCE, Facts(reductions=[LAZY]), "no reduction is ours"),
        (REDUCE, Facts(reductions=[PLAIN]), "leaves y to Dask"),
        (REDUCE, Facts(reductions=[GATHERED, PLAIN]), "leaves y to Dask"),
        (REDUCE, Facts(reductions=[DONE]), "computes y without a run"),
    ],
)
def test_what_is_not(before: Facts, after: Facts | None, fault: str) -> None:
    assert fault in faults(before, after)


def test_a_list_explains() -> None:
    assert faults(BEFORE, FAILED, graph=ON) == ""
    assert faults(BEFORE, FAILED, FAILED, cluster=ON) == ""
    assert faults(BEFORE, Facts(changes=[PLAIN]), no_collective=ON) == ""


def test_a_list_names_none_without_need() -> None:
    assert "does not fail; it is on a list" in faults(BEFORE, REACHED, graph=ON)
    assert "does not fail; it is on a list" in faults(BEFORE, REACHED, FAILED, cluster=ON)
    assert "cluster without the hook" in faults(BEFORE, FAILED, BEFORE, cluster=ON)
    assert "need not be on the list" in faults(BEFORE, REACHED, no_collective=ON)
    assert Given(graph=ON).without_test({"test_rechunk.py"}, {}) == list(ON)
    assert Given(graph=ON).without_test({"test_rechunk.py"}, {FILE + "a[1]": BEFORE}) == []


def test_a_pattern_names_tests() -> None:
    assert matches("test_rechunk.py::a", FILE + "a")
    assert matches("test_rechunk.py::a", FILE + "a[x-y]")
    assert matches("test_rechunk.py::a[*-y]", FILE + "a[x-y]")
    assert not matches("test_rechunk.py::a[*-y]", FILE + "a[y-x]")
    assert not matches("test_rechunk.py::a", FILE + "ab")


def test_notes_are_kept(tmp_path: Any) -> None:
    notes = Notes({FILE + "a": REACHED, FILE + "b": REDUCED}, ["a rank holds a block"])
    notes.write(tmp_path / "notes.json")
    assert read(tmp_path / "notes.json") == notes
