"""Which GPU a rank has."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_redist.errors import RedistError
from dask_redist.pinning import Pin, check_pins, device_index, is_rotated


@st.composite
def hosts(draw: st.DrawFn) -> list[tuple[int, int]]:
    """For each host how many GPUs and how many worker ranks it has."""
    gpus = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    return [(n, draw(st.integers(0, 2 * n))) for n in gpus]


@given(hosts(), st.booleans())
def test_every_gpu_gets_a_rank_before_any_gets_two(
    hosts: list[tuple[int, int]], dask_cuda: bool
) -> None:
    pins: list[Pin] = []
    crowded = False
    for host, (gpus, workers) in enumerate(hosts):
        # dask-cuda gives each worker all GPUs, its own one first.
        lists = [
            ",".join(str((k + worker) % gpus) for k in range(gpus)) if dask_cuda else None
            for worker in range(workers)
        ]
        rotated = is_rotated(lists)
        # One GPU, or one worker, is the same with and without a rotation.
        assert rotated == (dask_cuda and min(gpus, workers) > 1)
        real = []
        for position, given_list in enumerate(lists):
            index = device_index(position, gpus, rotated)
            assert not rotated or index == 0
            real.append(int(given_list.split(",")[index]) if given_list else index)
        pins += [Pin(len(pins) + k, f"host{host}", f"GPU-{uuid}") for k, uuid in enumerate(real)]
        counts = Counter(real)
        assert len(counts) == min(gpus, workers)
        assert not counts or max(counts.values()) - min(counts.values()) <= 1
        crowded |= workers > gpus
    if crowded:
        with pytest.raises(RedistError, match=r"have the GPU GPU-\d; start no more ranks"):
            check_pins(pins)
        warnings = check_pins([pin._replace(on_purpose=True) for pin in pins])
        assert len(warnings) == sum(
            n > 1 for n in Counter((pin.host, pin.uuid) for pin in pins).values()
        )
    else:
        assert check_pins(pins) == []


@given(st.permutations(range(5)), st.integers(0, 4), st.integers(0, 4))
def test_two_ranks_of_a_host_with_one_gpu_are_found_in_any_order(
    order: list[int], one: int, other: int
) -> None:
    uuid = {rank: f"GPU-{rank}" for rank in range(5)} | {other: f"GPU-{one}"}
    pins = [Pin(rank, "a", uuid[rank]) for rank in order]
    if one == other:
        assert check_pins(pins) == []
        return
    with pytest.raises(RedistError) as caught:
        check_pins(pins)
    assert {str(one), str(other)} <= set(str(caught.value).replace(",", "").split())
    assert check_pins([pin._replace(host=f"host{pin.rank}") for pin in pins]) == []


def test_a_purpose_that_only_one_of_them_has_is_an_error() -> None:
    with pytest.raises(RedistError, match="ranks 0, 1 and 2 on host a all have the GPU G"):
        check_pins([Pin(0, "a", "G", True), Pin(1, "a", "G"), Pin(2, "a", "G", True)])


def test_what_will_not_work_on_a_gpu_that_is_shared_is_said() -> None:
    (warning,) = check_pins([Pin(0, "a", "G", True), Pin(1, "a", "G", True)])
    assert "ranks 0 and 1 on host a share the GPU G" in warning
    assert "NCCL" in warning
    assert "signals" in warning


def test_no_gpu_is_an_error_that_names_the_variable() -> None:
    with pytest.raises(RedistError, match=r"position 3 .* CUDA_VISIBLE_DEVICES"):
        device_index(3, 0, rotated=False)


@pytest.mark.parametrize(
    ("lists", "rotated"),
    [
        ([], False),
        (["0,1", None], False),
        (["", "1"], False),
        (["GPU-a, GPU-b", "GPU-b,GPU-a"], True),
        (["0", "1"], True),
        (["0,1,2", "0,2,1"], False),
    ],
)
def test_rotation_is_by_the_first_gpu(lists: list[str | None], rotated: bool) -> None:
    assert is_rotated(lists) is rotated
