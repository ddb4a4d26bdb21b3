"""``enable`` itself: what it puts into Dask, for whom, and that all of it is taken out again.

No cluster is needed: with ``fallback="error"`` the hook speaks up at an array of Python objects,
which can never be redistributed.
"""

import asyncio
import copy
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import permutations
from pathlib import Path
from typing import Any

import dask
import distributed.shuffle
import numpy as np
import pytest
from cluster import fa

import dask_redist as dr
from dask_redist import hook

METHOD = "array.rechunk.method"
OBJECTS = fa(np.array([1, 2, 3, 4], dtype=object), 2)
DASKS_OWN = distributed.shuffle.rechunk_p2p


def on() -> bool:
    """Whether the hook acts here, with ``fallback="error"``."""
    try:
        OBJECTS.rechunk(4)
    except dr.RedistError as error:
        return "dtype object" in str(error)  # it names what is in the way
    return False


def strict() -> dr.enable:
    return dr.enable(fallback="error")


@pytest.fixture(autouse=True)
def all_put_back() -> Iterator[None]:
    """After each test Dask is as it was; if not, the next test starts clean all the same."""
    yield
    try:
        assert distributed.shuffle.rechunk_p2p is DASKS_OWN
        assert dask.config.get(METHOD) is None
        assert not on()
        held = dr.enable(fallback="dask")
        assert not on()  # nothing that was left is stronger
        held.disable()
    finally:
        distributed.shuffle.rechunk_p2p = DASKS_OWN
        dask.config.set({METHOD: None})
        hook._count = 0
        hook._everywhere.clear()
        hook._in_context.set(())


# ------------------------------------------------------------------------- put in, taken out
def test_importing_the_package_enables_nothing() -> None:
    assert DASKS_OWN.__module__.startswith("distributed.")
    assert not on()


def test_as_a_context() -> None:
    assert not on()
    with strict() as held:
        assert on()
        assert "fallback='error'" in repr(held)
    assert not on()


def test_as_a_call() -> None:
    held = strict()
    assert on()
    held.disable()
    assert not on()
    held.disable()  # once more does nothing


def test_the_innermost_holds() -> None:
    with strict():
        with dr.enable(fallback="dask"):
            assert not on()
            with strict():
                assert on()
            assert not on()
        assert on()


def test_a_context_is_stronger_than_a_call() -> None:
    held = dr.enable(fallback="dask")
    with strict():
        assert on()
    assert not on()
    held.disable()


def test_a_call_inside_a_context_outlives_it() -> None:
    with dr.enable(fallback="dask"):
        held = strict()
        assert not on()  # the context is
    assert on()
    held.disable()


@pytest.mark.parametrize("order", [*permutations(range(3))], ids=str)
def test_calls_end_in_any_order(order: tuple[int, ...]) -> None:
    calls = [strict() for _ in range(3)]
    for number in order:
        assert on()
        calls[number].disable()
    assert not on()


def test_the_newest_call_that_is_left_holds() -> None:
    first, second = strict(), dr.enable(fallback="dask")
    assert not on()
    second.disable()
    assert on()
    first.disable()


def test_an_exception_ends_a_context() -> None:
    with pytest.raises(KeyError), strict(), dr.enable(fallback="dask"):
        raise KeyError
    with pytest.raises(dr.RedistError), strict():
        OBJECTS.rechunk(4)


def test_the_same_one_twice() -> None:
    held = strict()
    with held:
        with held:
            assert on()
        assert on()
    assert not on()  # entered: it was no call any more
    with held:
        assert on()


@pytest.mark.parametrize("first", [0, 1])
def test_contexts_left_in_any_order(first: int) -> None:
    contexts = [dr.enable(fallback="dask"), strict()]
    for context in contexts:
        context.__enter__()
    contexts[first].__exit__(None, None, None)
    assert on() is (first == 0)  # the one that has not been left
    contexts[1 - first].__exit__(None, None, None)


def test_generators_that_take_turns() -> None:
    def steps() -> Generator[None]:
        with strict():
            yield

    one, other = steps(), steps()
    next(one)
    next(other)
    one.close()
    other.close()
    assert not on()


def test_a_context_that_another_thread_leaves() -> None:
    held = ExitStack()
    held.enter_context(strict())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(held.close).result()
    assert not on()


def test_the_same_one_in_two_threads() -> None:
    held = strict()
    inside, leave = threading.Event(), threading.Event()

    def stay() -> bool:
        with held:
            inside.set()
            leave.wait(3)
            return on()

    with ThreadPoolExecutor(1) as pool:
        with held:
            staying = pool.submit(stay)
            inside.wait(3)
        assert not on()
        leave.set()
        assert staying.result()


def test_many_threads_at_once() -> None:
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        for _ in range(30):
            if number % 2:
                with strict():
                    assert on()
            else:
                dr.enable(fallback="dask").disable()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


# --------------------------------------------------------------------------------- for whom
def in_a_thread(function: Callable[[], bool]) -> bool:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_a_context_is_this_threads_alone() -> None:
    with strict():
        assert not in_a_thread(on)

    def inside() -> bool:
        with strict():
            return on() and not in_a_thread(on)

    assert in_a_thread(inside)


def test_a_call_is_for_all_threads() -> None:
    held = strict()
    assert in_a_thread(on)
    held.disable()
    assert not in_a_thread(on)


def test_a_context_is_this_tasks_alone() -> None:
    async def with_it(inside: asyncio.Event, done: asyncio.Event) -> bool:
        with strict():
            inside.set()
            await done.wait()
            return on()

    async def without_it(inside: asyncio.Event, done: asyncio.Event) -> bool:
        await inside.wait()
        found = on()
        done.set()
        return found

    async def both() -> tuple[bool, bool]:
        events = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(with_it(*events), without_it(*events))

    assert tuple(asyncio.run(both())) == (True, False)


def test_a_call_is_for_all_tasks() -> None:
    async def ask() -> bool:
        return on()

    held = strict()
    assert asyncio.run(ask())
    held.disable()


def test_arrays_keep_what_they_were_built_with() -> None:
    numbers = fa(np.arange(4), 2)
    before = numbers.rechunk(4).name
    with dr.enable(policy="always"):
        assert numbers.rechunk(4).name == before  # no cluster: Dask's own
    assert numbers.rechunk(4).name == before


# ------------------------------------------------------------------------ the user's settings
@pytest.mark.parametrize("method", ["tasks", "p2p", None])
def test_a_method_from_before_is_there_again_after(method: str | None) -> None:
    with dask.config.set({METHOD: method}):
        with strict():
            assert on()
        assert dask.config.get(METHOD) == method
        assert type(dask.config.get(METHOD)) is type(method)
        held = strict()
        assert on()
        held.disable()
        assert dask.config.get(METHOD) == method


@pytest.mark.parametrize("method", ["tasks", "p2p", None])
def test_a_method_from_before_holds_for_what_stays_with_dask(method: str | None) -> None:
    with dask.config.set({METHOD: method}):
        wanted = OBJECTS.rechunk(4).name
        with dr.enable():
            assert OBJECTS.rechunk(4).name == wanted
        other: list[str] = []
        with strict():  # in another thread the hook is not enabled
            thread = threading.Thread(target=lambda: other.append(OBJECTS.rechunk(4).name))
            thread.start()
            thread.join()
        assert other == [wanted]


def test_a_method_given_inside_holds_as_long_as_it_is_set() -> None:
    with strict():
        with dask.config.set({METHOD: "tasks"}):
            assert not on()
            assert OBJECTS.rechunk(4).name.startswith("rechunk-merge")
        assert on()


def test_a_method_given_inside_for_good_stays() -> None:
    with strict():
        dask.config.set({METHOD: "tasks"})
        assert not on()
    assert dask.config.get(METHOD) == "tasks"
    dask.config.set({METHOD: None})


def test_an_unknown_method_is_still_an_error() -> None:
    with dask.config.set({METHOD: "sometimes"}):
        with dr.enable():
            OBJECTS.rechunk(2)  # no change: nobody is asked
            with pytest.raises(NotImplementedError, match="sometimes"):
                OBJECTS.rechunk(4)
        with pytest.raises(NotImplementedError, match="sometimes"):
            OBJECTS.rechunk(4)


@pytest.mark.parametrize("method", ["tasks", "p2p"])
def test_settings_from_before_that_end_inside(method: str) -> None:
    users = ExitStack()
    users.enter_context(dask.config.set({METHOD: method}))
    with strict():
        assert on()
        users.close()  # what was configured before, nothing, is back
        assert dask.config.get(METHOD) is None


@pytest.mark.parametrize("method", ["tasks", "p2p"])
def test_settings_from_inside_that_end_after(method: str) -> None:
    held, users = strict(), ExitStack()
    users.enter_context(dask.config.set({METHOD: method}))
    held.disable()
    assert dask.config.get(METHOD) == method
    wanted = {"tasks": "rechunk-merge", "p2p": "rechunk-p2p"}[method]
    assert OBJECTS.rechunk(4).name.startswith(wanted)
    users.close()
    assert not dask.config.get(METHOD)  # not what the hook had put there
    assert OBJECTS.rechunk(4).name.startswith("rechunk-merge")
    dask.config.set({METHOD: None})


def test_a_method_argument_of_tasks_is_the_users_word() -> None:
    with strict():
        assert OBJECTS.rechunk(4, method="tasks").name.startswith("rechunk-merge")
        with pytest.raises(dr.RedistError):
            OBJECTS.rechunk(4, method="p2p")


def test_a_method_argument_of_p2p_becomes_dasks_choice_where_there_is_no_collective() -> None:
    # Dask's p2p fails without a cluster; its own choice does not.
    with dr.enable():
        assert OBJECTS.rechunk(4, method="p2p").name == OBJECTS.rechunk(4).name


def test_the_configuration_can_be_copied_and_sent_while_enabled() -> None:
    with dask.config.set({METHOD: "tasks"}), dr.enable():
        sent = dask.config.deserialize(dask.config.serialize(dask.config.config))
        assert sent["array"]["rechunk"]["method"] == "tasks"
        copied = copy.deepcopy(dask.config.config)
        assert str(copied["array"]["rechunk"]["method"]) == "tasks"


def test_other_settings_are_left_alone() -> None:
    before = copy.deepcopy(dask.config.config)
    with dr.enable(policy="always"):
        fa(np.arange(4), 2).rechunk(4)
    assert dask.config.config == before


# ------------------------------------------------------------------------------ what is refused
@pytest.mark.parametrize(
    "given", [{"policy": "never"}, {"fallback": "sometimes"}, {"policy": ""}], ids=str
)
def test_a_word_that_there_is_not(given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    words = rf"{name} is '{value}'; it must be \"\w+\" or \"\w+\""
    with pytest.raises(ValueError, match=words):
        dr.enable(**given)
    with dask.config.set({f"redist.{name}": value}), pytest.raises(ValueError, match=words):
        dr.enable()
    assert distributed.shuffle.rechunk_p2p is DASKS_OWN


def test_the_configuration_gives_the_words() -> None:
    with dask.config.set({"redist.fallback": "error"}), dr.enable():
        assert on()
    with dask.config.set({"redist.fallback": "error"}), dr.enable(fallback="dask"):
        assert not on()


def test_a_dask_that_rechunks_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(x: Any, chunks: Any, *, disk: bool = True) -> Any:
        raise AssertionError("called")

    with monkeypatch.context() as patch:
        patch.setattr(distributed.shuffle, "rechunk_p2p", other)
        for _ in range(2):
            with pytest.raises(dr.RedistError, match=r"rechunk_p2p\(x, chunks, disk\).*install"):
                dr.enable()
        assert distributed.shuffle.rechunk_p2p is other
        assert dask.config.get(METHOD) is None
    with strict():
        assert on()


def test_our_function_takes_what_dasks_takes() -> None:
    wanted, found = map(inspect.signature, (DASKS_OWN, hook.rechunk_p2p))
    assert list(wanted.parameters) == list(found.parameters)
    for name, parameter in wanted.parameters.items():
        assert parameter.kind == found.parameters[name].kind
        assert parameter.default == found.parameters[name].default


# ---------------------------------------------------------------------------- query planning
QUERY_PLANNING = """
import logging
logging.basicConfig(format="%(name)s: %(message)s")
import dask, dask.array as da, numpy as np, distributed.shuffle
theirs = distributed.shuffle.rechunk_p2p
import dask_redist as dr
a = np.arange(120.0).reshape(12, 10)
with dr.enable(policy="always", fallback="error"):
    x = da.from_array(a, chunks=(3, 10))
    y = x.rechunk((12, 2))
    assert y.chunks == ((12,), (2,) * 5)
    assert distributed.shuffle.rechunk_p2p is theirs
    assert (y.compute() == a).all()
    assert (x.rechunk(-1).sum(axis=0).compute() == a.sum(axis=0)).all()
assert (x.rechunk((5, 5)).compute() == a).all()
assert dask.config.get("array.rechunk.method") is None
"""


def test_query_planning_is_left_to_dask() -> None:
    done = subprocess.run(
        [sys.executable, "-c", QUERY_PLANNING],
        env={**os.environ, "DASK_ARRAY__QUERY_PLANNING": "True"},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("dask_redist"))
    assert "array.query-planning" in line
