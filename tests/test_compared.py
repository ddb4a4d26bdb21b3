"""What docs/compared.md says is shown by tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TEXT = (TESTS.parent / "docs" / "compared.md").read_text()
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def missing(text: str) -> list[str]:
    """The tests that a text names and that are not there."""
    return [
        f"{file}::{name}"
        for file, name in NAMED.findall(text)
        if not (TESTS / file).exists() or f"\ndef {name}(" not in (TESTS / file).read_text()
    ]


def test_each_test_that_is_named_exists() -> None:
    assert missing(TEXT) == []


def test_each_limit_names_a_test() -> None:
    rows = [line for line in TEXT.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row.split("|")[1]) for row in rows] == list(range(1, 14))
    assert [row for row in rows if not NAMED.search(row)] == []


@pytest.mark.parametrize("name", ["test_compared.py::test_nothing", "test_none.py::test_work"])
def test_the_check_sees(name: str) -> None:
    assert missing(f"`{name}`") == [name]
