"""Ranks: an order that lasts while workers come, go, and come back."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_redist.arena import ArenaCard
from dask_redist.process import Process
from dask_redist.ranks import RankSet, Seat, natural

CARD = ArenaCard(1, "/nowhere", "00", 4096)
_ports = itertools.count(1)


def facts(name: str, host: str = "tcp://h", mpi_rank: int | None = None) -> dict[str, Any]:
    return {
        "name": name,
        "host": host,
        "address": f"{host}:{next(_ports)}",
        "process": Process(1, 2, "pid"),
        "card": CARD,
        "memory_limit": 3,
        "nthreads": 4,
        "mpi_rank": mpi_rank,
    }


def names(ranks: RankSet) -> list[str]:
    return [seat.name for seat in ranks.table()]


@pytest.mark.parametrize(
    ("before", "after"),
    [("w9", "w10"), ("9", "10"), ("2", "a"), ("a", "a1"), ("a1b2", "a1b10"), ("", "0"), ("7", "²")],
)
def test_natural_order(before: str, after: str) -> None:
    assert natural(before) < natural(after)


@given(st.text(), st.text())
def test_any_two_names_have_an_order(one: str, two: str) -> None:
    assert (natural(one) < natural(two)) + (natural(two) < natural(one)) <= 1


@given(st.lists(st.integers(0, 10**30), min_size=2, max_size=7))
def test_numbered_names_are_ordered_by_number(numbers: list[int]) -> None:
    ordered = sorted((f"worker-{n}" for n in numbers), key=natural)
    assert ordered == [f"worker-{n}" for n in sorted(numbers)]


def test_ranks_are_ordered_by_host_and_name_in_natural_order() -> None:
    ranks = RankSet()
    for host, name in [(".10", "w2"), (".9", "w10"), (".10", "w1"), (".9", "w9")]:
        ranks.arrive(**facts(name, host=f"tcp://10.0.0{host}"))
    assert ranks.table() == []  # nobody connected yet
    ranks.seal()
    assert names(ranks) == ["w9", "w10", "w1", "w2"]


def test_an_mpi_world_numbers_its_ranks_itself() -> None:
    ranks = RankSet()
    for name, mpi_rank in [("a", 2), ("b", None), ("c", 0), ("d", 1)]:
        ranks.arrive(**facts(name, mpi_rank=mpi_rank))
    ranks.seal()
    assert names(ranks) == ["c", "d", "a", "b"]


def test_who_comes_later_gets_the_next_number() -> None:
    ranks = RankSet()
    ranks.arrive(**facts("w5"))
    ranks.seal()
    ranks.arrive(**facts("w1"))
    ranks.arrive(**facts("w0"))
    assert names(ranks) == ["w5", "w1", "w0"]
    ranks.seal()  # a second client connects
    assert names(ranks) == ["w5", "w1", "w0"]


def test_a_restarted_worker_gets_its_number_back_and_a_new_seat() -> None:
    ranks = RankSet()
    old, *_ = [ranks.arrive(**facts(name)) for name in ("w0", "w1", "w2")]
    ranks.seal()
    assert ranks.leave(old.address) == old
    assert names(ranks) == ["w1", "w2"]
    assert old.seat not in ranks.by_number
    new = ranks.arrive(**facts("w0"))
    assert names(ranks) == ["w0", "w1", "w2"]
    assert new.seat > max(seat.seat for seat in ranks.table()[1:])
    assert ranks.by_number[new.seat] == new


def test_who_left_before_anybody_connected_was_never_a_rank() -> None:
    ranks = RankSet()
    seat = ranks.arrive(**facts("w0"))
    assert ranks.leave(seat.address) is None
    assert ranks.leave("tcp://unknown:1") is None
    ranks.seal()
    assert ranks.table() == []


def test_the_old_seat_of_a_name_leaves_after_the_new_one_came() -> None:
    """The loss has to be told, or runs would wait for the old seat."""
    ranks = RankSet()
    old = ranks.arrive(**facts("w0"))
    ranks.seal()
    new = ranks.arrive(**facts("w0"))
    assert ranks.leave(old.address) == old
    assert ranks.table() == [new]
    assert ranks.by_number == {new.seat: new}
    assert ranks.leave(new.address) == new
    assert ranks.table() == []


def test_both_seats_of_a_name_leave_newest_first() -> None:
    ranks = RankSet()
    ranks.seal()
    old, new = ranks.arrive(**facts("w0")), ranks.arrive(**facts("w0"))
    assert ranks.leave(new.address) == new
    assert ranks.leave(old.address) == old
    assert not ranks.by_number


def test_a_seat_travels_as_a_plain_tuple() -> None:
    seat = RankSet().arrive(**facts("w0"))
    row: tuple[Any, ...] = tuple(seat)
    assert Seat(*row) == seat


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=20))
def test_seats_are_never_given_again_and_ranks_keep_their_order(
    events: list[tuple[str, bool]],
) -> None:
    """As Dask has it: one worker of a name at a time."""
    ranks, here, ever, order = RankSet(), dict[str, Seat](), list[int](), list[str]()
    ranks.seal()
    for name, comes in events:
        if comes and name not in here:
            here[name] = ranks.arrive(**facts(name))
            ever.append(here[name].seat)
            if name not in order:
                order.append(name)
        elif not comes and name in here:
            seat = here.pop(name)
            assert ranks.leave(seat.address) == seat
        assert ranks.table() == [here[n] for n in order if n in here]
        assert ranks.by_number == {seat.seat: seat for seat in here.values()}
    assert ever == sorted(set(ever))
