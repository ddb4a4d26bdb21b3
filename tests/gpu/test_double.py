"""The double is strict: it refuses what the real library answers with a hang, an exit or less."""

import pytest
from pes import Crew, crew


@pytest.fixture
def pes() -> Crew:
    return crew()


def test_misuse_is_refused(pes: Crew) -> None:
    for said in pes.play("double_scenes:misuses", 2):
        assert len(said) == 13


@pytest.mark.parametrize(
    ("scene", "words"),
    [
        ("double_scenes:unequal", "PEs allocate different sizes"),
        ("double_scenes:different_ids", "the PEs have different unique ids"),
        ("double_scenes:two_threads", "two threads of PE 0 are in the library"),
    ],
)
def test_what_several_pes_do_wrong_fails_loudly(pes: Crew, scene: str, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        pes.play(scene, 2, options={"patience": 1.0})


def test_a_wait_that_nothing_ends_says_where_the_streams_stand(pes: Crew) -> None:
    with pytest.raises(AssertionError, match=r"PE 0 waits for a stream; .* \['a wait for 1'\]"):
        pes.play("double_scenes:endless", 1, options={"patience": 0.5})


def test_a_put_without_waiting_lands_at_a_quiet_of_its_stream_or_a_barrier(pes: Crew) -> None:
    _, seen = pes.play("double_scenes:landing", 2)
    # put, quiet elsewhere, source changed, quiet, put again, barrier
    assert seen == ["0", "0", "0", "9", "9", "5"]


def test_streams_go_in_an_order_that_the_seed_decides(pes: Crew) -> None:
    orders = {pes.play("double_scenes:interleaving", 1, seed=seed)[0] for seed in range(12)}
    assert all(sorted(order) == list("aaabbb") for order in orders)
    assert len(orders) > 3


def test_a_view_of_the_own_memory_would_never_be_freed(pes: Crew) -> None:
    pes.play("double_scenes:self_view", 1)


def test_a_failed_scene_leaves_nothing_for_the_next(pes: Crew) -> None:
    with pytest.raises(AssertionError):
        pes.play("double_scenes:unequal", 3)
    pes.play("arena_scenes:pe_itself", 2)


def test_a_pe_refuses_what_the_library_would_not_survive(pes: Crew) -> None:
    pes.play("arena_scenes:pe_itself", 2)


@pytest.mark.parametrize("status", [1, 32767])
def test_a_pe_whose_library_did_not_start_says_so(pes: Crew, status: int) -> None:
    pes.play("double_scenes:no_start", 2, options={"status": status})


def test_an_arena_of_a_gpu(pes: Crew) -> None:
    pes.play("arena_scenes:arena", 1)
