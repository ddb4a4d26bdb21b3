"""The conductor's rules, one by one; `test_conductor_world.py` has all of them at once."""

import pytest

from dask_redist.actions import AGAIN, Allocate, Answer, Close, Free, Prove, Recompute
from dask_redist.conductor import Conductor
from dask_redist.errors import AdmissionError, RunTimeoutError
from dask_redist.life import State

LATE = RunTimeoutError("rank 1 still writes")


def opened(owners: dict[int, int], writers: tuple[int, ...] = ()) -> Conductor:
    """Run 1 of "a", allocated, with these writers."""
    conductor = Conductor()
    conductor.create("a", owners)
    for seat in sorted(set(owners.values())):
        mine = [out for out, s in owners.items() if s == seat]
        conductor.allocated(1, seat, {out: 100 * seat + out for out in mine})
    for seat in writers:
        assert conductor.join("a", seat, f"join {seat}") == [Answer(f"join {seat}", 1)]
    return conductor


def published(owners: dict[int, int], writers: tuple[int, ...] = ()) -> Conductor:
    conductor = opened(owners, writers)
    actions = conductor.fence("a", {1}, "fence")
    for seat in writers:
        actions = conductor.closed(1, seat)
    assert actions == [Answer("fence", 1)]
    return conductor


def test_the_life_of_a_run() -> None:
    conductor = Conductor()
    assert conductor.create("a", {0: 2, 1: 1, 2: 2}) == [
        Allocate(1, 1, (1,)),
        Allocate(1, 2, (0, 2)),
    ]
    assert conductor.join("a", 1, "first") == []
    assert conductor.allocated(1, 2, {0: 0, 2: 64}) == []
    assert conductor.join("a", 3, "second") == []
    assert conductor.allocated(1, 1, {1: 128}) == [Answer("first", 1), Answer("second", 1)]
    assert conductor.runs["a"].offsets == {0: 0, 1: 128, 2: 64}
    assert conductor.fence("a", {1}, "fence") == [Close(1, 1), Close(1, 3)]
    assert conductor.closed(1, 3) == []
    assert conductor.closed(1, 1) == [Answer("fence", 1)]
    assert conductor.runs["a"].state is State.PUBLISHED
    assert conductor.gone("a") == [Free(1, 1, condemn=False), Free(1, 2, condemn=False)]
    assert not conductor.runs
    assert not conductor.by_number


def test_a_run_without_outputs_is_open_at_once() -> None:
    conductor = Conductor()
    assert conductor.create("a", {}) == []
    assert conductor.join("a", 1, "join") == [Answer("join", 1)]


def test_a_run_that_nobody_joined_is_published_at_its_fence() -> None:
    assert opened({0: 1}).fence("a", {1}, "fence") == [Answer("fence", 1)]


def test_numbers_rise_and_two_runs_of_one_id_are_refused() -> None:
    conductor = opened({0: 1})
    with pytest.raises(ValueError, match="run 'a' exists already"):
        conductor.create("a", {0: 1})
    conductor.gone("a")
    assert conductor.create("b", {0: 1}) == [Allocate(2, 1, (0,))]
    assert conductor.create("a", {0: 1}) == [Allocate(3, 1, (0,))]


@pytest.mark.parametrize("numbers", [{1}, {1, 2}, {3}, set()])
def test_a_fence_with_stale_numbers_makes_the_run_again(numbers: set[int]) -> None:
    conductor = opened({0: 1})
    conductor.gone("a")
    conductor.create("a", {0: 1})
    conductor.allocated(2, 1, {0: 0})
    conductor.join("a", 1, "join")
    assert conductor.fence("a", numbers, "fence") == [
        Close(2, 1),
        Recompute("a"),
        Answer("fence", AGAIN),
    ]
    assert conductor.closed(2, 1) == [Free(2, 1, condemn=False)]


def test_a_fence_without_a_run_makes_one() -> None:
    assert Conductor().fence("a", {7}, "fence") == [Recompute("a"), Answer("fence", AGAIN)]


def test_a_second_fence_ends_the_first() -> None:
    conductor = opened({0: 1}, writers=(1,))
    conductor.fence("a", {1}, "first")
    assert conductor.fence("a", {1}, "second") == [
        Answer("first", AGAIN),
        Recompute("a"),
        Answer("second", AGAIN),
    ]


@pytest.mark.parametrize("closed", [False, True])
def test_a_contribution_after_the_fence_makes_the_run_again(closed: bool) -> None:
    """Its takes hold a receipt of the old run: without a new fence they would wait for ever."""
    conductor = opened({0: 1}, writers=(1,))
    conductor.fence("a", {1}, "fence")
    if closed:
        conductor.closed(1, 1)
    actions = conductor.join("a", 2, "late")
    assert Answer("late", AGAIN) in actions
    assert Recompute("a") in actions
    assert (Answer("fence", AGAIN) in actions) is not closed
    assert "a" not in conductor.runs


# ------------------------------------------------------------------------------------ allocation
def test_an_allocation_that_fails_is_everybodys_error() -> None:
    conductor = Conductor()
    conductor.create("a", {0: 1, 1: 2})
    conductor.join("a", 1, "one")
    conductor.join("a", 3, "three")
    full = AdmissionError("rank 1 is full")
    assert conductor.not_allocated(1, 1, full) == [Answer("one", full), Answer("three", full)]
    # The other seat has not answered: its memory is freed when it has; seat 1 may have some too.
    assert conductor.allocated(1, 2, {1: 0}) == [
        Free(1, 1, condemn=False),
        Free(1, 2, condemn=False),
    ]
    assert not conductor.by_number


def test_a_seat_that_cannot_be_reached_makes_the_joins_ask_again() -> None:
    conductor = Conductor()
    conductor.create("a", {0: 1})
    conductor.join("a", 2, "join")
    assert conductor.not_allocated(1, 1, None) == [
        Answer("join", AGAIN),
        Free(1, 1, condemn=False),
    ]


def test_two_failed_allocations_are_answered_once() -> None:
    conductor = Conductor()
    conductor.create("a", {0: 1, 1: 2})
    conductor.join("a", 1, "join")
    assert len(conductor.not_allocated(1, 1, MemoryError())) == 1
    assert conductor.not_allocated(1, 2, MemoryError()) == [
        Free(1, 1, condemn=False),
        Free(1, 2, condemn=False),
    ]


# ---------------------------------------------------------------------- writers that do not close
def test_a_writer_that_hangs_condemns_the_memory_and_the_fence_says_so() -> None:
    conductor = opened({0: 1, 1: 2}, writers=(1, 2))
    conductor.fence("a", {1}, "fence")
    assert conductor.not_closed(1, 1, LATE) == [Answer("fence", LATE)]
    assert conductor.closed(1, 2) == [Free(1, 1, condemn=True), Free(1, 2, condemn=True)]


def test_a_writer_that_hangs_is_told_to_let_go_of_what_it_may_hold_back() -> None:
    conductor = opened({0: 1}, writers=(2, 3))
    conductor.fence("a", {1}, "fence")
    assert conductor.closed(1, 2) == []
    assert conductor.not_closed(1, 3, LATE) == [
        Answer("fence", LATE),
        Free(1, 1, condemn=True),
        Free(1, 3, condemn=True),
    ]


def test_the_run_of_a_lost_writer_is_made_again() -> None:
    """What it held back is lost; a proof that it is dead says nothing about that."""
    conductor = opened({0: 1, 1: 2}, writers=(1, 3))
    assert conductor.lost(3) == [Close(1, 1), Prove(1, 3, (1, 2)), Recompute("a")]
    assert conductor.closed(1, 1) == []
    assert conductor.closed(1, 3) == [Free(1, 1, condemn=False), Free(1, 2, condemn=False)]


def test_a_writer_not_proven_dead_condemns_the_memory() -> None:
    conductor = opened({0: 1}, writers=(3,))
    conductor.fence("a", {1}, "fence")
    assert conductor.lost(3) == [
        Prove(1, 3, (1,)),
        Answer("fence", AGAIN),
        Recompute("a"),
    ]
    assert conductor.not_closed(1, 3, None) == [Free(1, 1, condemn=True)]


def test_the_proof_decides_when_the_close_failed_because_the_seat_left() -> None:
    conductor = opened({0: 1}, writers=(3,))
    conductor.fence("a", {1}, "fence")
    conductor.lost(3)
    assert conductor.not_closed(1, 3, LATE) == []
    assert conductor.closed(1, 3) == [Free(1, 1, condemn=False)]
    assert conductor.not_closed(1, 3, LATE) == []


@pytest.mark.parametrize("rest", [False, True])
def test_a_close_that_was_answered_before_the_loss_needs_no_proof(rest: bool) -> None:
    conductor = opened({0: 1}, writers=(3,))
    conductor.fence("a", {1}, "fence")
    conductor.lost(3)
    assert conductor.closed(1, 3, rest) == [Free(1, 1, condemn=False)]
    assert conductor.not_closed(1, 3, None) == []


def test_a_seat_lost_after_its_close_is_no_loss() -> None:
    conductor = opened({0: 1}, writers=(1, 3))
    conductor.fence("a", {1}, "fence")
    assert conductor.closed(1, 3) == []
    assert conductor.lost(3) == []
    assert conductor.closed(1, 1) == [Answer("fence", 1)]


# ----------------------------------------------------------------------------------------- losses
def test_lost_while_allocating() -> None:
    conductor = Conductor()
    conductor.create("a", {0: 1, 1: 2})
    conductor.join("a", 1, "one")
    conductor.join("a", 3, "three")
    assert conductor.lost(3) == [Answer("three", AGAIN)]  # no owner: the run goes on
    assert conductor.lost(1) == [Answer("one", AGAIN), Recompute("a")]
    assert conductor.allocated(1, 1, {0: 0}) == []  # its answer was under way
    assert conductor.allocated(1, 2, {1: 0}) == [Free(1, 2, condemn=False)]


def test_all_owners_lost_while_allocating() -> None:
    conductor = Conductor()
    conductor.create("a", {0: 1, 1: 2})
    conductor.join("a", 3, "join")
    assert conductor.lost(2) == [Answer("join", AGAIN), Recompute("a")]
    assert conductor.lost(1) == []
    assert not conductor.by_number
    assert conductor.not_allocated(1, 1, None) == []
    assert conductor.allocated(1, 2, {1: 0}) == []


def test_an_owner_lost_while_open() -> None:
    conductor = opened({0: 1, 1: 2}, writers=(1, 2))
    assert conductor.lost(1) == [Prove(1, 1, (2,)), Close(1, 2), Recompute("a")]
    assert conductor.closed(1, 2) == []
    assert conductor.closed(1, 1) == [Free(1, 2, condemn=False)]


def test_an_owner_lost_while_closing() -> None:
    conductor = opened({0: 1, 1: 2}, writers=(1, 2))
    conductor.fence("a", {1}, "fence")
    assert conductor.lost(1) == [Prove(1, 1, (2,)), Answer("fence", AGAIN), Recompute("a")]
    assert conductor.not_closed(1, 1, None) == []
    assert conductor.closed(1, 2) == [Free(1, 2, condemn=True)]


def test_an_owner_lost_after_the_fence() -> None:
    conductor = published({0: 1, 1: 2}, writers=(1, 2))
    assert conductor.lost(1) == [Free(1, 2, condemn=False), Recompute("a")]


def test_a_writer_lost_after_the_fence_is_no_loss() -> None:
    conductor = published({0: 1}, writers=(1, 2))
    assert conductor.lost(2) == []
    assert conductor.runs["a"].state is State.PUBLISHED


def test_lost_while_ending() -> None:
    conductor = opened({0: 1, 1: 2}, writers=(2, 3))
    assert conductor.gone("a") == [Close(1, 2), Close(1, 3)]
    assert conductor.lost(3) == [Prove(1, 3, (1, 2))]
    assert conductor.lost(2) == [Prove(1, 2, (1,))]
    assert conductor.closed(1, 3) == []
    assert conductor.not_closed(1, 2, None) == [Free(1, 1, condemn=True)]


def test_the_last_holder_lost_while_ending_leaves_nothing_to_free() -> None:
    conductor = opened({0: 1}, writers=(1,))
    conductor.gone("a")
    assert conductor.lost(1) == [Prove(1, 1, ())]
    assert conductor.closed(1, 1) == []
    assert not conductor.by_number


def test_a_loss_concerns_every_run_of_the_seat() -> None:
    conductor = published({0: 1})
    conductor.create("b", {0: 1, 1: 2})
    assert conductor.lost(1) == [Recompute("a"), Recompute("b")]
    assert list(conductor.by_number) == [2]  # waits for seat 2 to allocate


# ------------------------------------------------------------------------------------- the end
def test_gone_while_allocating() -> None:
    conductor = Conductor()
    conductor.create("a", {0: 1})
    conductor.join("a", 1, "join")
    assert conductor.gone("a") == [Answer("join", AGAIN)]
    assert conductor.gone("a") == []
    assert not conductor.by_number[1].joins
    assert conductor.allocated(1, 1, {0: 0}) == [Free(1, 1, condemn=False)]


def test_gone_while_closing_answers_the_fence_and_frees_after_the_last_writer() -> None:
    conductor = opened({0: 1}, writers=(1, 2))
    conductor.fence("a", {1}, "fence")
    assert conductor.gone("a") == [Answer("fence", AGAIN)]
    assert conductor.closed(1, 2) == []
    assert conductor.closed(1, 1) == [Free(1, 1, condemn=False)]


def test_a_new_run_is_made_while_the_old_one_ends() -> None:
    conductor = opened({0: 1}, writers=(2,))
    conductor.gone("a")
    conductor.create("a", {0: 1})
    assert list(conductor.by_number) == [1, 2]
    assert conductor.closed(1, 2) == [Free(1, 1, condemn=False)]
    assert conductor.runs["a"].number == 2


def test_a_close_that_nobody_asked_for_changes_nothing() -> None:
    conductor = opened({0: 1}, writers=(2,))
    assert conductor.closed(1, 2) == []
    assert conductor.not_closed(1, 2, None) == []
    assert conductor.fence("a", {1}, "fence") == [Close(1, 2)]


def test_answers_to_runs_that_are_over_change_nothing() -> None:
    conductor = published({0: 1}, writers=(2,))
    conductor.gone("a")
    assert conductor.closed(1, 2) == []
    assert conductor.not_closed(1, 2, None) == []
    assert conductor.not_closed(1, 2, LATE) == []
    assert conductor.allocated(1, 1, {0: 0}) == []
    assert conductor.not_allocated(1, 1, LATE) == []
    assert not conductor.by_number


# ------------------------------------------------------------------------------------- the takes
def test_many_takes_that_miss_make_the_run_again_once() -> None:
    conductor = published({0: 1, 1: 1})
    assert conductor.missing("a", 1) == [Free(1, 1, condemn=False), Recompute("a")]
    assert conductor.missing("a", 1) == []
    conductor.create("a", {0: 1, 1: 1})
    assert conductor.missing("a", 1) == []
    assert conductor.runs["a"].number == 2


def test_a_take_whose_run_was_let_go_makes_it_again() -> None:
    conductor = published({0: 1})
    conductor.gone("a")
    assert conductor.missing("a", 1) == [Recompute("a")]


def test_a_late_take_does_not_end_a_newer_run() -> None:
    conductor = published({0: 1})
    conductor.gone("a")
    conductor.create("a", {0: 1})
    assert conductor.missing("a", 1) == []
    assert conductor.runs["a"].number == 2
