"""The conductor in a world where anything may happen, in any order; and what that world sees."""

from typing import Any

import pytest
from conductor_checks import World
from conductor_messages import (
    Allocated,
    Closed,
    Exchange,
    Exchanged,
    Late,
    Quiet,
    Table,
    Told,
    Voted,
    Watch,
)
from conductor_world import CONDEMNED, USER
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dask_redist.actions import Action, Allocate, Close, Free, Prove, Ticket, Vote
from dask_redist.life import State

IDS = ("a", "b", "reduction")
EXCHANGE = (Vote, Voted, Told, Exchange, Exchanged, Watch)
KINDS = (Allocate, Late, Allocated, Table, Close, Quiet, Closed, Prove, Free, *EXCHANGE)
Choice = tuple[type, int, int]
CHOICE = st.tuples(
    st.sampled_from([*KINDS, *EXCHANGE]), st.integers(0, 5), st.sampled_from([0, 0, 1, 2, 3])
)


def waited_for(machine: Any) -> list[int]:
    """Seats that are there, and whose answer to a Close or in an exchange is awaited."""
    world, seats = machine.world, set[int]()
    for run in world.conductor.by_number.values():
        seats |= run.closing | run.rest
        if run.state is State.EXCHANGING:
            seats |= run.holders
    return sorted(world.present & seats)


def exchanging(machine: Any) -> list[str]:
    runs = machine.world.conductor.runs.values()
    return sorted(str(run.id) for run in runs if run.state is State.EXCHANGING)


def is_open(machine: Any) -> bool:
    return any(run.state is State.OPEN for run in machine.world.conductor.runs.values())


def is_published(machine: Any) -> bool:
    return bool(machine.world.published)


class Anything(RuleBasedStateMachine):
    """Seats, runs, losses and messages in any order; the world checks itself after each event."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.world.arrive()
        self.world.arrive(far=True)

    @precondition(lambda self: len(self.world.present) < 4)
    @rule(far=st.booleans())
    def arrive(self, far: bool) -> None:
        self.world.arrive(far=far)

    @rule(
        id=st.sampled_from(IDS),
        seat=st.integers(0, 3),
        owners=st.lists(st.integers(0, 3), max_size=3),
    )
    def join(self, id: str, seat: int, owners: list[int]) -> None:
        seats = sorted(self.world.present)
        at = {out: seats[o % len(seats)] for out, o in enumerate(owners)}
        self.world.join(id, seats[seat % len(seats)], at)

    @rule(id=st.sampled_from(IDS), owners=st.lists(st.integers(0, 3), max_size=3))
    def all_join(self, id: str, owners: list[int]) -> None:
        """As most runs begin: without this few would get as far as their fence."""
        for seat in range(len(self.world.present)):
            self.join(id, seat, owners)
        self.deliver_what_is_there()

    @precondition(is_open)
    @rule(index=st.integers(0, 1), until=st.sampled_from([Close, None, *EXCHANGE]))
    def right_fence(self, index: int, until: type | None) -> None:
        """All is well until the first message of this kind, or to the end."""
        runs = [r for r in self.world.conductor.runs.values() if r.state is State.OPEN]
        run = runs[index % len(runs)]
        self.world.fence(str(run.id), {run.number})
        while self.world.flying and not (
            until and any(isinstance(message, until) for message in self.world.flying)
        ):
            self.deliver_what_is_there()

    @rule(
        id=st.sampled_from(IDS),
        owners=st.lists(st.integers(0, 3), min_size=1, max_size=3),
        until=st.sampled_from(EXCHANGE),
        then=st.lists(CHOICE, max_size=4),
        event=st.sampled_from(["", "", "", "leave", "gone", "join"]),
        index=st.integers(0, 3),
        after=st.lists(CHOICE, max_size=4),
    )
    def run_and_exchange(
        self,
        id: str,
        owners: list[int],
        until: type,
        then: list[Choice],
        event: str,
        index: int,
        after: list[Choice],
    ) -> None:
        """A whole run up to its exchange; there these deliveries and perhaps an event."""
        self.all_join(id, owners)
        if is_open(self):
            self.right_fence(0, until)
        for choice in then:
            self.deliver(*choice)
        ids, seats = exchanging(self), waited_for(self)
        if event == "leave" and seats and len(self.world.present) > 1:
            self.world.leave(seats[index % len(seats)], dead=index < 2)
        elif event == "gone" and ids:
            self.world.gone(ids[index % len(ids)])
        elif event == "join" and ids:
            self.join(ids[index % len(ids)], index, [])
        for choice in after:
            self.deliver(*choice)

    @rule(id=st.sampled_from(IDS), stale=st.sampled_from([None, None, None, 0, 1, 2]))
    def fence(self, id: str, stale: int | None) -> None:
        """All contributions went to the present run, or some to an older one."""
        run = self.world.conductor.runs.get(id)
        numbers = {run.number} if run else set()
        if stale is not None or not numbers:
            numbers.add(max(1, max(self.world.ids, default=1) - (stale or 0)))
        self.world.fence(id, numbers)

    @precondition(lambda self: self.world.flying)
    @rule(choice=CHOICE)
    def deliver_one(self, choice: Choice) -> None:
        self.deliver(*choice)

    def deliver(self, kind: type, index: int, how: int) -> None:
        """One message, of this kind if there is one."""
        flying = self.world.flying
        if not flying:
            return
        chosen = [i for i, message in enumerate(flying) if isinstance(message, kind)]
        chosen = chosen or list(range(len(flying)))
        self.world.deliver(chosen[index % len(chosen)], how)
        self.world.check()

    @rule()
    def deliver_what_is_there(self) -> None:
        """As most messages do, in the order in which they were sent."""
        for _ in range(len(self.world.flying)):
            self.world.deliver(0)
            self.world.check()

    @precondition(lambda self: len(self.world.present) > 1)
    @rule(seat=st.integers(0, 3), dead=st.booleans())
    def leave(self, seat: int, dead: bool) -> None:
        seats = sorted(self.world.present)
        self.world.leave(seats[seat % len(seats)], dead=dead)

    @precondition(lambda self: bool(waited_for(self)))
    @rule(
        index=st.integers(0, 3),
        dead=st.booleans(),
        before=st.lists(CHOICE, max_size=3),
        after=st.lists(CHOICE, max_size=3),
    )
    def leave_while_waited_for(
        self, index: int, dead: bool, before: list[Choice], after: list[Choice]
    ) -> None:
        """Between these deliveries, a seat whose answer is awaited leaves."""
        for choice in before:
            self.deliver(*choice)
        seats = waited_for(self)
        if len(self.world.present) > 1 and seats:
            self.world.leave(seats[index % len(seats)], dead=dead)
        for choice in after:
            self.deliver(*choice)

    @precondition(is_published)
    @rule(back=st.integers(0, 2), out=st.integers(0, 2))
    def take(self, back: int, out: int) -> None:
        receipts = sorted(self.world.published)
        self.world.take(receipts[-1 - back % len(receipts)], out)

    @precondition(lambda self: USER in self.world.memory.values())
    @rule(index=st.integers(0, 5))
    def drop(self, index: int) -> None:
        held = sorted(b for b, has in self.world.memory.items() if has == USER)
        self.world.drop(held[index % len(held)])

    @rule(id=st.sampled_from(IDS), forget=st.booleans())
    def gone(self, id: str, forget: bool) -> None:
        self.world.forget(id) if forget else self.world.gone(id)

    @invariant()
    def safe_and_alive(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.finish()


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=400, stateful_step_count=30, deadline=None)


# ------------------------------------------------------------ the world can see what is wrong
def test_the_world_sees_a_run_to_its_end() -> None:
    world = World()
    one, two, three = (world.arrive() for _ in range(3))
    world.join("a", one, {0: one, 1: two})
    world.join("a", three, {})
    while world.flying:
        world.deliver(0)
    assert world.may_write == {(one, 1), (three, 1)}
    fence = world.fence("a", {1})
    while world.flying:
        world.deliver(0)
    assert world.answers[fence] == 1
    world.take(1, 0)
    assert world.memory == {(one, 0): USER, (two, 0): 1}
    world.finish()
    assert world.memory == {(one, 0): USER}


def far_run(world: World) -> tuple[int, int]:
    """Run 1 of "a" on two seats: the second writes to the first, and holds it back."""
    one, two = world.arrive(), world.arrive(far=True)
    world.join("a", two, {0: one})
    while world.flying:
        world.deliver(0)
    assert world.rests == {(two, 1)}
    return one, two


def test_the_world_sees_an_exchange_to_its_end() -> None:
    world = World()
    one, two = far_run(world)
    fence = world.fence("a", {1})
    while world.flying:
        world.deliver(0)
        world.check()
    assert world.answers[fence] == 1
    assert world.tickets == {1: 1}
    assert not world.rests
    assert {seat: lane.next for seat, lane in world.lanes.items()} == {one: 2, two: 2}
    world.finish()


def test_the_world_refuses_a_publication_of_pieces_that_are_held_back() -> None:
    world = World()
    far_run(world)
    world.fence("a", {1})
    run = world.conductor.runs["a"]
    run.writers.clear()
    world.may_write.clear()
    with pytest.raises(AssertionError, match=r"published without the pieces of \{2\}"):
        world.do(world.conductor._settle(run))


def test_the_world_refuses_memory_that_is_freed_during_the_exchange() -> None:
    world = World()
    far_run(world)
    world.fence("a", {1})
    while not any(isinstance(message, Exchange) for message in world.flying):
        world.deliver(0)
    world.conductor.runs["a"].exchanging.clear()  # as if the conductor did not wait
    world.gone("a")
    free = next(k for k, message in enumerate(world.flying) if isinstance(message, Free))
    with pytest.raises(AssertionError, match="run 1 is freed while it moves"):
        world.deliver(free)


def reducing(world: World) -> tuple[int, int, int]:
    """Run 1 of "r", a reduction: two of three seats have partials."""
    one, two, three = world.arrive(), world.arrive(far=True), world.arrive()
    for seat in (one, two):
        world.join("r", seat, {0: three})
    while world.flying:
        world.deliver(0)
    assert world.rests == {(one, 1), (two, 1)}
    return one, two, three


def test_the_world_sees_a_reduction_to_its_end() -> None:
    world = World()
    one, two, _ = reducing(world)
    fence = world.fence("r", {1})
    while world.flying:
        assert not any(isinstance(message, (Vote, Voted)) for message in world.flying)
        world.deliver(0)
        world.check()
    assert world.answers[fence] == 1
    assert world.tickets == {1: 1}
    assert world.laid == {(one, 1), (two, 1)}  # until the result is read
    world.take(1, 0)
    world.check()
    world.finish()
    assert world.laid == set()
    assert world.recomputed == []


def test_the_world_makes_a_result_again_whose_cuts_have_left() -> None:
    world = World()
    _, two, _ = reducing(world)
    world.fence("r", {1})
    while world.flying:
        world.deliver(0)
    world.leave(two, dead=True)
    world.check()
    assert world.recomputed == ["r"]
    world.take(1, 0)
    assert world.recomputed == ["r"]  # it is being made again already
    world.finish()


def test_the_world_misses_partials_that_are_not_let_go() -> None:
    world = World()
    one, _, _ = reducing(world)
    world.fence("r", {1})
    while world.flying:
        world.deliver(0)
    world.conductor.runs["r"].holders.discard(one)  # as if an exchange were the end of it
    world.gone("r")
    with pytest.raises(AssertionError, match=r"partials that nobody will let go: \{\(1, 1\)\}"):
        world.finish()


def exchanging_run(world: World, until: type) -> None:
    """Run 1 of "a" in its exchange, as far as the first message of this kind."""
    far_run(world)
    world.fence("a", {1})
    while not any(isinstance(message, until) for message in world.flying):
        world.deliver(0)
    world.check()


@pytest.mark.parametrize(("again", "why"), [(Ticket(1, 2), "comes after 1"), (Ticket(3, 2), "3")])
def test_the_world_refuses_a_ticket_twice_and_a_gap(again: Ticket, why: str) -> None:
    world = World()
    exchanging_run(world, Told)
    with pytest.raises(AssertionError, match=why):
        world.ticket(again)


def test_the_world_refuses_two_tickets_of_one_run() -> None:
    world = World()
    exchanging_run(world, Told)
    with pytest.raises(AssertionError, match="run 1 gets two tickets"):
        world.ticket(Ticket(2, 1))


def test_the_world_refuses_a_ticket_before_the_vote() -> None:
    world = World()
    exchanging_run(world, Voted)
    with pytest.raises(AssertionError, match=r"run 1 goes without the vote of \{\(2, 1\)\}"):
        world.ticket(Ticket(1, 1))


def test_the_world_misses_a_ticket_that_is_not_told() -> None:
    world = World()
    exchanging_run(world, Voted)
    world.conductor.ticket += 1
    with pytest.raises(AssertionError, match="a ticket was given and not told"):
        world.check()


def test_the_world_misses_a_ticket_at_a_lane() -> None:
    world = World()
    exchanging_run(world, Told)
    world.flying.remove(Told(1, 1, 1))
    with pytest.raises(AssertionError, match="a lane misses a ticket"):
        world.check()


def test_the_world_condemns_what_a_writer_may_still_write() -> None:
    world = World()
    one, two = world.arrive(), world.arrive()
    world.join("a", two, {0: one})
    while world.flying:
        world.deliver(0)
    world.leave(two, dead=False)
    world.gone("a")
    world.finish()
    assert world.memory == {(one, 0): CONDEMNED}
    world.check()


def test_the_world_refuses_a_publication_before_the_close() -> None:
    world = World()
    one = world.arrive()
    world.join("a", one, {0: one})
    while world.flying:
        world.deliver(0)
    world.conductor.runs["a"].writers.clear()  # as if the join had not been noted
    with pytest.raises(AssertionError, match="published while"):
        world.fence("a", {1})


def test_the_world_refuses_memory_that_is_freed_under_a_writer() -> None:
    world = World()
    one = world.arrive()
    world.join("a", one, {0: one})
    while world.flying:
        world.deliver(0)
    world.conductor.runs["a"].writers.clear()
    actions: list[Action] = world.conductor.gone("a")
    world.do(actions)
    world.deliver(0)
    with pytest.raises(AssertionError, match=r"can write \(1, 0\) of nobody"):
        world.check()
