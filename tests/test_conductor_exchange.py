"""The conductor's rules for seats that hold pieces back: votes, tickets and the exchange."""

import pytest
from test_conductor import LATE, opened, published

from dask_redist.actions import AGAIN, Answer, Close, Free, Recompute, Ticket, Vote
from dask_redist.conductor import Conductor
from dask_redist.life import State


def voting(
    owners: dict[int, int], rest: tuple[int, ...], others: tuple[int, ...] = ()
) -> Conductor:
    """Run 1 of "a", closed: the seats ``rest`` hold pieces back, ``others`` wrote too."""
    conductor = opened(owners, (*rest, *others))
    actions = conductor.fence("a", {1}, "fence")
    for seat in others:
        actions = conductor.closed(1, seat)
    for seat in rest:
        actions = conductor.closed(1, seat, rest=True)
    assert actions == [Vote(1, seat) for seat in sorted(rest)]
    assert conductor.runs["a"].state is State.EXCHANGING
    return conductor


def going(owners: dict[int, int], rest: tuple[int, ...]) -> Conductor:
    """Run 1 of "a", whose ticket was told: the seats ``rest`` are exchanging."""
    conductor = voting(owners, rest)
    for seat in rest:
        actions = conductor.voted(1, seat, True)
    assert actions == [Ticket(1, 1)]
    return conductor


def test_the_life_of_an_exchange() -> None:
    conductor = opened({0: 1}, writers=(1, 2, 3))
    assert conductor.fence("a", {1}, "fence") == [Close(1, 1), Close(1, 2), Close(1, 3)]
    assert conductor.closed(1, 3, rest=True) == []
    assert conductor.closed(1, 1, rest=False) == []
    assert conductor.closed(1, 2, rest=True) == [Vote(1, 2), Vote(1, 3)]
    assert conductor.voted(1, 3, True) == []
    assert conductor.ticket == 0
    assert conductor.voted(1, 2, True) == [Ticket(1, 1)]
    assert conductor.ticket == 1
    assert conductor.exchanged(1, 2) == []
    assert conductor.exchanged(1, 3) == [Answer("fence", 1)]
    assert conductor.runs["a"].state is State.PUBLISHED
    # Nothing is held back any more: only the owner has something to free.
    assert conductor.gone("a") == [Free(1, 1, condemn=False)]


def test_without_a_rest_there_is_no_ticket() -> None:
    assert published({0: 1}, writers=(1, 2)).ticket == 0


def test_tickets_are_dense_and_given_when_the_votes_are_in() -> None:
    """Whoever votes late holds no other run up; a run that ends before leaves no gap."""
    conductor = Conductor()
    for number, id in enumerate("abc", 1):
        conductor.create(id, {0: 1})
        conductor.allocated(number, 1, {0: 0})
        conductor.join(id, 2, id)
    for number in (2, 3, 1):  # the order of the fences, not of the creation
        conductor.fence("abc"[number - 1], {number}, number)
        assert conductor.closed(number, 2, rest=True) == [Vote(number, 2)]
    assert conductor.voted(1, 2, True) == [Ticket(1, 1)]
    assert conductor.voted(3, 2, False)[0] == Answer(3, AGAIN)
    assert conductor.voted(2, 2, True) == [Ticket(2, 2)]
    assert conductor.ticket == 2


def test_a_vote_against_makes_the_run_again_without_a_ticket() -> None:
    conductor = voting({0: 1}, rest=(2, 3))
    assert conductor.voted(1, 2, False) == [
        Answer("fence", AGAIN),
        Free(1, 1, condemn=False),
        Free(1, 2, condemn=False),
        Free(1, 3, condemn=False),
        Recompute("a"),
    ]
    assert conductor.voted(1, 3, True) == []
    assert conductor.voted(1, 3, False) == []
    assert conductor.ticket == 0


def test_a_vote_that_nobody_asked_for_changes_nothing() -> None:
    conductor = voting({0: 1}, rest=(2, 3), others=(1,))
    assert conductor.voted(1, 1, False) == []
    assert conductor.voted(1, 2, True) == []
    assert conductor.voted(1, 2, False) == []
    assert conductor.exchanged(1, 2) == []
    assert conductor.not_exchanged(1, 2, LATE) == []
    assert conductor.voted(1, 3, True) == [Ticket(1, 1)]
    assert conductor.voted(1, 3, False) == []


def test_an_exchange_that_fails_is_the_error_of_the_fence() -> None:
    conductor = going({0: 1}, rest=(2, 3))
    assert conductor.not_exchanged(1, 2, LATE) == [Answer("fence", LATE)]
    # Nothing is freed while the other one is exchanging.
    assert conductor.exchanged(1, 3) == [Free(1, 1, condemn=False), Free(1, 2, condemn=False)]
    assert not conductor.by_number


def test_an_exchange_that_lacks_its_other_side_makes_the_run_again() -> None:
    conductor = going({0: 1}, rest=(2, 3))
    assert conductor.not_exchanged(1, 3, None) == [Answer("fence", AGAIN), Recompute("a")]
    assert conductor.not_exchanged(1, 2, None) == [
        Free(1, 1, condemn=False),
        Free(1, 2, condemn=False),
        Free(1, 3, condemn=False),
    ]


def test_two_failures_are_one_error() -> None:
    conductor = going({0: 1}, rest=(2, 3))
    assert conductor.not_exchanged(1, 2, LATE) == [Answer("fence", LATE)]
    assert conductor.not_exchanged(1, 2, LATE) == []
    assert conductor.exchanged(1, 2) == []  # it was late only
    assert [type(action) for action in conductor.not_exchanged(1, 3, LATE)] == [Free] * 3
    assert conductor.exchanged(1, 3) == []


def test_a_voter_is_lost() -> None:
    conductor = voting({0: 1}, rest=(2, 3))
    conductor.voted(1, 3, True)
    assert conductor.lost(2) == [
        Answer("fence", AGAIN),
        Free(1, 1, condemn=False),
        Free(1, 3, condemn=False),
        Recompute("a"),
    ]
    assert conductor.voted(1, 2, True) == []
    assert conductor.ticket == 0


def test_an_exchanger_is_lost() -> None:
    conductor = going({0: 1}, rest=(2, 3))
    assert conductor.lost(2) == [Answer("fence", AGAIN), Recompute("a")]
    assert conductor.exchanged(1, 2) == []
    assert conductor.exchanged(1, 3) == [Free(1, 1, condemn=False)]


def test_the_last_exchanger_is_lost_when_the_run_has_ended() -> None:
    conductor = going({0: 1}, rest=(2,))
    assert conductor.gone("a") == [Answer("fence", AGAIN)]
    assert conductor.lost(2) == [Free(1, 1, condemn=False)]


@pytest.mark.parametrize("told", [False, True])
def test_an_owner_is_lost_in_the_exchange(told: bool) -> None:
    conductor = (going if told else voting)({0: 1, 1: 2}, rest=(3,))
    actions = conductor.lost(1)
    assert actions[0] == Answer("fence", AGAIN)
    assert conductor.ticket == told
    assert Recompute("a") in actions
    frees = [Free(1, 2, condemn=False), Free(1, 3, condemn=False)]
    if told:
        assert conductor.not_exchanged(1, 3, None) == frees
    else:
        assert [action for action in actions if isinstance(action, Free)] == frees


def test_a_seat_that_holds_nothing_back_is_lost_in_the_exchange() -> None:
    conductor = voting({0: 1}, rest=(3,), others=(2,))
    assert conductor.lost(2) == []
    assert conductor.voted(1, 3, True) == [Ticket(1, 1)]


def test_a_seat_that_holds_pieces_back_is_lost_before_all_have_closed() -> None:
    conductor = opened({0: 1}, writers=(1, 2))
    conductor.fence("a", {1}, "fence")
    assert conductor.closed(1, 2, rest=True) == []
    assert conductor.lost(2) == [Answer("fence", AGAIN), Recompute("a")]
    assert conductor.closed(1, 1, rest=True) == [Free(1, 1, condemn=False)]
    assert conductor.ticket == 0


def test_gone_before_the_ticket_was_told() -> None:
    conductor = voting({0: 1}, rest=(2,))
    assert conductor.gone("a") == [
        Answer("fence", AGAIN),
        Free(1, 1, condemn=False),
        Free(1, 2, condemn=False),
    ]
    assert conductor.voted(1, 2, True) == []
    assert conductor.ticket == 0


def test_gone_after_the_ticket_was_told() -> None:
    conductor = going({0: 1}, rest=(2, 3))
    conductor.exchanged(1, 3)
    assert conductor.gone("a") == [Answer("fence", AGAIN)]
    assert conductor.exchanged(1, 2) == [Free(1, 1, condemn=False)]


def test_gone_while_closing_frees_what_is_held_back() -> None:
    conductor = opened({0: 1}, writers=(2, 3))
    conductor.fence("a", {1}, "fence")
    conductor.closed(1, 2, rest=True)
    assert conductor.gone("a") == [Answer("fence", AGAIN)]
    assert conductor.closed(1, 3, rest=True) == [
        Free(1, 1, condemn=False),
        Free(1, 2, condemn=False),
        Free(1, 3, condemn=False),
    ]
    assert conductor.ticket == 0


@pytest.mark.parametrize("told", [False, True])
def test_a_contribution_in_the_exchange_makes_the_run_again(told: bool) -> None:
    conductor = (going if told else voting)({0: 1}, rest=(2,))
    actions = conductor.join("a", 3, "late")
    assert {Answer("fence", AGAIN), Answer("late", AGAIN), Recompute("a")} <= set(actions)
    assert conductor.ticket == told


def test_answers_in_the_exchange_of_a_run_that_is_over_change_nothing() -> None:
    conductor = going({0: 1}, rest=(2,))
    conductor.exchanged(1, 2)
    conductor.gone("a")
    assert conductor.exchanged(1, 2) == []
    assert conductor.not_exchanged(1, 2, LATE) == []
    assert conductor.voted(1, 2, False) == []


# ------------------------------------------------------------------------------- reductions
def reducing(*seats: int) -> Conductor:
    """Run 1 of "a", a reduction whose partials are on these seats: all are exchanging."""
    conductor = Conductor()
    assert conductor.create("a", {}, votes=False) == []
    for seat in seats:
        assert conductor.join("a", seat, seat) == [Answer(seat, 1)]
    assert conductor.fence("a", {1}, "fence") == [Close(1, seat) for seat in seats]
    for seat in seats:
        actions = conductor.closed(1, seat, rest=True)
    assert actions == [Ticket(1, 1)]  # without a vote: nobody writes to anybody
    return conductor


def reduced(*seats: int) -> Conductor:
    conductor = reducing(*seats)
    for seat in seats:
        actions = conductor.exchanged(1, seat)
    assert actions == [Answer("fence", 1)]
    return conductor


def test_the_life_of_a_reduction() -> None:
    conductor = reduced(2, 3)
    # What was merged is read until the end: all have something to free.
    assert conductor.gone("a") == [Free(1, 2, condemn=False), Free(1, 3, condemn=False)]


def test_who_has_merged_is_lost_before_the_result_is_read() -> None:
    conductor = reduced(2, 3)
    assert conductor.lost(3) == [Free(1, 2, condemn=False), Recompute("a")]
    assert conductor.missing("a", 1) == []  # it is being made again
    assert conductor.lost(4) == []


def test_who_merges_is_lost() -> None:
    conductor = reducing(2, 3)
    conductor.exchanged(1, 3)
    assert conductor.lost(3) == [Answer("fence", AGAIN), Recompute("a")]
    assert conductor.not_exchanged(1, 2, None) == [Free(1, 2, condemn=False)]


def test_an_error_of_a_merge_is_the_fences() -> None:
    conductor = reducing(2, 3)
    error = KeyError("of a user")
    assert conductor.not_exchanged(1, 2, error) == [Answer("fence", error)]
    assert conductor.exchanged(1, 3) == [Free(1, 2, condemn=False), Free(1, 3, condemn=False)]
    assert conductor.by_number == {}


def test_whoever_has_merged_frees_it_though_the_run_has_ended() -> None:
    conductor = reducing(2, 3)
    conductor.exchanged(1, 2)
    assert conductor.gone("a") == [Answer("fence", AGAIN)]
    assert conductor.exchanged(1, 3) == [Free(1, 2, condemn=False), Free(1, 3, condemn=False)]
