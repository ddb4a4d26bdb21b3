"""The conductor's rules for restarts: what is counted, what takes it back, and the end."""

import pickle

import pytest
from test_conductor import published

from dask_redist.actions import AGAIN, Answer, Free, Recompute
from dask_redist.conductor import MAX_RESTARTS, Conductor
from dask_redist.errors import RankLostError
from dask_redist.life import Restarts


def test_restarts_end_with_an_error_that_reaches_the_fence() -> None:
    """The error comes without a Recompute, which would release the fence that is to have it."""
    conductor = Conductor()
    for n in range(MAX_RESTARTS + 1):
        assert conductor.fence("a", {n}, n) == [Recompute("a"), Answer(n, AGAIN)]
    conductor.create("a", {0: 1})
    conductor.allocated(1, 1, {0: 0})
    answer, free = sorted(conductor.fence("a", {1}, "last"), key=str)
    assert isinstance(answer, Answer)
    assert isinstance(answer.value, RankLostError)
    assert "'a' was restarted more than 10 times" in str(pickle.loads(pickle.dumps(answer.value)))
    assert free == Free(1, 1, condemn=False)
    # Who tries again begins anew.
    assert conductor.fence("a", {1}, "retry") == [Recompute("a"), Answer("retry", AGAIN)]
    conductor.forget("a")
    assert not conductor.restarts


def test_takes_that_miss_in_each_new_run_give_up_in_the_end() -> None:
    conductor = Conductor()
    for number in range(1, MAX_RESTARTS + 2):
        conductor.create("a", {0: 1})
        conductor.allocated(number, 1, {0: 0})
        assert conductor.fence("a", {number}, number) == [Answer(number, number)]
        assert Recompute("a") in conductor.missing("a", number)
    (answer,) = conductor.fence("a", {number}, "last")
    assert isinstance(answer, Answer)
    assert isinstance(answer.value, RankLostError)


def publish(conductor: Conductor) -> int:
    """One more run of "a", to its publication; or the error of its fence is raised."""
    conductor.create("a", {0: 1})
    number = conductor.runs["a"].number
    conductor.allocated(number, 1, {0: 0})
    actions = conductor.fence("a", {number}, number)
    (answer,) = (action for action in actions if isinstance(action, Answer))
    if isinstance(answer.value, Exception):
        raise answer.value
    return number


def test_losses_after_a_publication_never_add_up() -> None:
    """A result that lives for days outlives more workers than one run may lose."""
    conductor = Conductor()
    for number in range(1, 3 * MAX_RESTARTS):
        assert publish(conductor) == number
        assert conductor.lost(1) == [Recompute("a")]
        assert conductor.restarts["a"] == Restarts(losses=1, misses=0, last=number)


def test_misses_add_up_whatever_comes_between_them() -> None:
    conductor = Conductor()
    for _ in range(MAX_RESTARTS):
        conductor.missing("a", publish(conductor))
        publish(conductor)
        conductor.lost(1)
    with pytest.raises(RankLostError, match="restarted more than 10 times"):
        publish(conductor)


def test_misses_end_with_the_takes_of_a_published_run() -> None:
    conductor = Conductor()
    for _ in range(3 * MAX_RESTARTS):
        conductor.missing("a", publish(conductor))
        conductor.gone("a")  # Dask releases the fence: it is being made again
        assert conductor.restarts["a"].misses == 1
        publish(conductor)
        conductor.gone("a")
        assert conductor.restarts["a"].misses == 0


def test_a_run_that_ends_before_its_publication_takes_nothing_back() -> None:
    conductor = Conductor()
    conductor.missing("a", publish(conductor))
    conductor.create("a", {0: 1})
    conductor.lost(1)
    conductor.create("a", {0: 1})
    conductor.gone("a")
    assert conductor.restarts["a"] == Restarts(losses=1, misses=1, last=2)


def test_a_publication_does_not_make_a_late_take_count() -> None:
    conductor = published({0: 1})
    conductor.lost(1)
    assert publish(conductor) == 2
    assert conductor.restarts["a"] == Restarts(losses=0, misses=0, last=1)
    conductor.gone("a")
    assert conductor.missing("a", 1) == []
