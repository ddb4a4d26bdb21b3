"""Free lists against a model that is a set of 64-byte units."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dask_redist.freelist import FreeList
from dask_redist.syscalls import PAGE

UNIT = 64
UNITS = 6 * PAGE // UNIT  # of the whole address space
PER_PAGE = PAGE // UNIT


class Machine(RuleBasedStateMachine):
    @initialize(first=st.integers(0, PER_PAGE))
    def start(self, first: int) -> None:
        self.list = FreeList()
        self.free = set(range(first, UNITS))
        self.held: list[tuple[int, int]] = []
        self.list.add(first * UNIT, (UNITS - first) * UNIT)

    def _took(self, offset: int, length: int) -> None:
        units = set(range(offset // UNIT, (offset + length) // UNIT))
        assert length > 0
        assert units <= self.free
        self.free -= units
        self.held.append((offset, length))

    def _runs(self) -> list[tuple[int, int]]:
        """Maximal runs of free units: first, length."""
        runs: list[tuple[int, int]] = []
        for unit in sorted(self.free):
            if runs and sum(runs[-1]) == unit:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((unit, 1))
        return runs

    def _whole_pages(self) -> set[int]:
        pages = range(UNITS // PER_PAGE)
        return {p for p in pages if set(range(p * PER_PAGE, (p + 1) * PER_PAGE)) <= self.free}

    @rule(units=st.integers(1, 2 * PER_PAGE), pages=st.booleans())
    def take(self, units: int, pages: bool) -> None:
        align = PER_PAGE if pages else 1
        fits = [
            (length, first) for first, length in self._runs() if -first % align + units <= length
        ]
        offset = self.list.take(units * UNIT, align * UNIT)
        if not fits:
            assert offset is None
            return
        first = min(fits)[1]  # the smallest run that fits, lowest first
        assert offset == (first + -first % align) * UNIT
        self._took(offset, units * UNIT)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        offset, length = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.list.add(offset, length)
        self.free |= set(range(offset // UNIT, (offset + length) // UNIT))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_and_take_its_pages(self, data: st.DataObject) -> None:
        offset, length = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.list.add(offset, length)
        self.free |= set(range(offset // UNIT, (offset + length) // UNIT))
        mine = range(offset // PAGE, (offset + length - 1) // PAGE + 1)
        pages = sorted(self._whole_pages() & set(mine))
        found = self.list.take_pages(offset, length)
        if not pages:
            assert found is None
        else:
            assert found == (pages[0] * PAGE, len(pages) * PAGE)
            assert pages == list(range(pages[0], pages[-1] + 1))
            self._took(*found)

    @rule(at_most=st.integers(1, 3 * PAGE))
    def take_smallest_pages(self, at_most: int) -> None:
        there = self._whole_pages()
        found = self.list.take_smallest_pages(at_most)
        if not there:
            assert found is None
            return
        assert found is not None
        offset, length = found
        assert offset % PAGE == length % PAGE == 0
        assert 0 < length < at_most + PAGE
        owner = next(r for r in self._runs() if r[0] * UNIT <= offset < sum(r) * UNIT)
        pages = [
            (size, first)
            for first, size in self._runs()
            if (first + size) // PER_PAGE > -(-first // PER_PAGE)
        ]
        assert (owner[1], owner[0]) == min(pages)
        self._took(offset, length)

    @precondition(lambda self: self.free)
    @rule(data=st.data(), length=st.integers(1, PER_PAGE))
    def freeing_twice_is_refused(self, data: st.DataObject, length: int) -> None:
        unit = data.draw(st.sampled_from(sorted(self.free)))
        first = max(0, unit - data.draw(st.integers(0, length - 1)))
        with pytest.raises(ValueError, match="overlaps"):
            self.list.add(first * UNIT, (unit - first + 1) * UNIT)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "list"):
            assert self.list.ranges() == [(a * UNIT, n * UNIT) for a, n in self._runs()]
            assert self.list.total == len(self.free) * UNIT
            assert self.list.whole == len(self._whole_pages()) * PAGE
            assert len(self.list) == len(self._runs())


TestFreeList = Machine.TestCase
TestFreeList.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_an_empty_list_has_nothing() -> None:
    free = FreeList()
    free.add(PAGE, 0)
    assert free.take(64, 64) is None
    assert free.take_smallest_pages(1 << 40) is None
    assert (free.total, free.whole, len(free)) == (0, 0, 0)
