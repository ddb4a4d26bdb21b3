"""What the passes over Dask's tests amount to: a row for each file, and what is not explained.

``lists.toml`` names tests, with a reason each. The lists are held to be complete and needed: a
failure or a missing collective that is on none is a fault, and so is an entry that is not needed.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from facts import BACK, Change, Facts

FILES = "dask/array/tests/"
Tests = dict[str, Facts]


class Lists:
    """The lists, by name: what each says of which tests."""

    def __init__(self) -> None:
        path = Path(__file__).with_name("lists.toml")
        self.entries: dict[str, dict[str, str]] = tomllib.loads(path.read_text())

    def reason(self, name: str, test: str) -> str | None:
        """What a list says of a test; None if the test is not on it."""
        return next((r for p, r in self.entries[name].items() if matches(p, test)), None)

    def without_test(self, files: set[str], tests: Tests) -> list[str]:
        """The entries on tests of these files that there are not."""
        patterns = [p for entries in self.entries.values() for p in entries]
        return [
            pattern
            for pattern in patterns
            if pattern.split("::")[0] in files and not any(matches(pattern, t) for t in tests)
        ]


def matches(pattern: str, test: str) -> bool:
    """Whether a pattern names a test; ``*`` stands for anything, no ``[...]`` for every case."""
    expression = re.escape(FILES + pattern).replace(r"\*", ".*") + r"(\[.*)?"
    return re.fullmatch(expression, test, re.DOTALL) is not None


@dataclass
class Row:
    """How many tests of one file ...; ``should``, ``did``: reach a collective.

    ``to_reduce``, ``reduced``: that should have reductions of ours, and that had.
    """

    collected: int = 0
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    should: int = 0
    did: int = 0
    to_reduce: int = 0
    reduced: int = 0


@dataclass
class Verdict:
    """A row for each file, how many tests have which reason, and what is wrong."""

    rows: dict[str, Row] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    no_collective: Counter[str] = field(default_factory=Counter)
    not_reduced: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def only_in_process(facts: Facts) -> bool:
    """Whether a test is left out on the cluster, where it would take minutes to no purpose."""
    return facts.slow and not facts.changes and not facts.reductions


def judge(lists: Lists, record: Tests, hook: Tests, stock: Tests) -> Verdict:
    """Compare what was noted of each test in the three passes."""
    verdict = Verdict()
    for test, before in record.items():
        row = verdict.rows.setdefault(test.split("::")[0].removeprefix(FILES), Row())
        row.collected += 1
        if before.outcome == "failed":
            verdict.faults.append(f"{test} fails without hook and cluster\n{before.text}")
        if test in hook:
            case = Case(lists, verdict, row, test, before, hook[test])
            case.ended(stock.get(test))
            case.reached()
            case.reduced()
        elif only_in_process(before):
            row.skipped += 1
            verdict.skipped["on the cluster: marked as slow, and nothing is ours"] += 1
        else:
            verdict.faults.append(f"{test} did not run with the hook")
    verdict.faults += [f"{test} ran with the hook only" for test in hook.keys() - record.keys()]
    return verdict


@dataclass
class Case:
    """One test, without and with the hook."""

    lists: Lists
    verdict: Verdict
    row: Row
    test: str
    before: Facts
    after: Facts

    def ended(self, stock: Facts | None) -> None:
        """Count how it ended with the hook; ``stock``: on the cluster without."""
        outcome = self.after.outcome
        graph, cluster = (self.lists.reason(name, self.test) for name in ("graph", "cluster"))
        explained = graph or cluster
        if outcome == "failed":
            self.row.failed += 1
            if explained is None:
                self._fault(f"fails\n{self.after.text}")
            else:
                self.verdict.failed[explained] += 1
            if cluster and (stock is None or stock.outcome != "failed"):
                self._fault("does not fail on the cluster without the hook")
            return
        if explained:
            self._fault("does not fail; it is on a list")
        if self.before.outcome not in ("failed", outcome):
            self._fault(f"{outcome} with the hook, {self.before.outcome} without")
        if outcome == "skipped":
            self.row.skipped += 1
            self.verdict.skipped[self.after.text] += 1
        else:
            self.row.passed += 1

    def reached(self) -> None:
        """Count whether it reached a collective, if it changes chunks, or why not."""
        if not self.before.changes:
            return
        reason = self._reason(self.before.changes, self.after.changes)
        faults = self._missing(self.after.changes)
        if reason is None and not self.after.made:
            faults.append("no collective ran")
        if listed := self.lists.reason("no-collective", self.test):
            if not faults:
                self._fault("need not be on the list no-collective")
            reason, faults = listed, []
        for fault in faults:
            self._fault(fault)
        if reason is None:
            self.row.should += 1
            self.row.did += bool(self.after.made)
        else:
            self.verdict.no_collective[reason] += 1

    def reduced(self) -> None:
        """Count whether its reductions are ours, if it has any, or why not."""
        if not self.before.reductions:
            return
        for fault in self._missing(self.after.reductions):
            self._fault(fault)
        reason = self._reason(self.before.reductions, self.after.reductions)
        if reason is not None:
            self.verdict.not_reduced[reason] += 1
            return
        self.row.to_reduce += 1
        if any(step.computed and step.collective for step in self.after.reductions):
            self.row.reduced += 1
        else:
            self._fault("no reduction is ours")

    def _fault(self, text: str) -> None:
        self.verdict.faults.append(f"{self.test} {text}")

    def _reason(self, before: list[Change], after: list[Change]) -> str | None:
        """The fact for which nothing of ours can be expected."""
        possible = [step for step in before if step.reason is None]
        if not possible:
            return before[0].reason
        if not any(step.computed for step in possible):
            return "it is not computed, or on a scheduler that the test names"
        if self.after.outcome == "failed":
            return "the test fails"
        there = {step.reason for step in after if step.computed}
        return BACK if BACK in there and None not in there else None

    def _missing(self, steps: list[Change]) -> list[str]:
        """What the hook left to Dask, and what is computed without its run."""
        left, without_run = "leaves {} to Dask", "computes {} without a run"
        finished = self.after.outcome != "failed"
        return [
            (without_run if step.collective else left).format(step.name)
            for step in steps
            if step.reason is None
            if not step.collective
            or (finished and step.computed and step.run and step.name not in self.after.made)
        ]
