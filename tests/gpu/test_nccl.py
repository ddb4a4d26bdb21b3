"""Reductions between GPUs over the double of NCCL: bit for bit what NumPy has."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pes import Crew, Mutation, crew

from dask_redist.nccl import form_of

OPS = ["sum", "product", "min", "max"]


@pytest.fixture
def pes() -> Crew:
    return crew()


@pytest.mark.parametrize(
    ("n_pes", "dtype", "op", "order"),
    [
        (1, "f8", "sum", "C"),
        (2, "f4", "product", "F"),
        (2, "c16", "sum", "strided"),
        (3, "c8", "sum", "C"),
        (3, "i2", "max", "C"),
        (4, "u2", "sum", "F"),
        (5, "i2", "product", "strided"),
        (3, "?", "sum", "C"),
        (2, "?", "product", "strided"),
        (2, "i1", "sum", "C"),
        (4, "u8", "min", "F"),
        (3, "f2", "sum", "C"),
    ],
)
def test_all_three_agree_with_numpy(pes: Crew, n_pes: int, dtype: str, op: str, order: str) -> None:
    shapes = [(n_pes, 7), (n_pes * 2, 3, 2), (7,)]
    for seed, shape in enumerate(shapes):
        pes.play(
            "reduce_scenes:reductions",
            n_pes,
            seed=seed,
            shape=shape,
            dtype=dtype,
            op=op,
            order=order,
            root=n_pes - 1,
        )


@pytest.mark.parametrize("dtype", ["f8", "i2", "c16", "?"])
def test_without_nccl4py_cupy_does_it(pes: Crew, dtype: str) -> None:
    for order in ("C", "strided"):
        pes.play(
            "reduce_scenes:reductions",
            3,
            shape=(6, 5),
            dtype=dtype,
            op="sum",
            order=order,
            root=1,
            by="cupy",
        )


@pytest.mark.parametrize("by", ["nccl4py", "cupy"])
def test_groups_have_their_ranks_only(pes: Crew, by: str) -> None:
    pes.play("reduce_scenes:groups", 4, by=by)


def test_what_nccl_has_not_is_refused(pes: Crew) -> None:
    pes.play("reduce_scenes:refusals", 2)


@pytest.mark.parametrize("by", ["nccl4py", "cupy"])
def test_an_error_or_a_rank_that_does_not_come_ends_the_communicator(pes: Crew, by: str) -> None:
    pes.play("reduce_scenes:failing", 2, by=by)


@pytest.mark.parametrize("what", ["count", "op", "root", "dtype", "order"])
def test_different_calls_are_seen(pes: Crew, what: str) -> None:
    with pytest.raises(AssertionError, match="the ranks are in different collectives"):
        pes.play("reduce_scenes:different", 2, what=what)


def test_different_ids_are_seen(pes: Crew) -> None:
    with pytest.raises(AssertionError, match="the ranks have different unique ids"):
        pes.play("reduce_scenes:different", 2, what="id")


MUTATIONS: dict[str, tuple[str, str, Mutation]] = {
    "take it for contiguous": (
        "f8",
        "sum",
        ("nccl", " or not array.flags.c_contiguous:", " or False:"),
    ),
    "skip the event of what is computed": (
        "i8",
        "sum",
        ("nccl", "self._stream.wait_event(here.record())", "pass"),
    ),
    "skip the event of what is reduced": ("i8", "sum", ("nccl", "here.wait_event(done)", "pass")),
    "forget to convert back": (
        "i2",
        "sum",
        ("nccl", "self._gpu.copy(result, target, here)", "pass"),
    ),
    "call another operation": ("i8", "sum", ("ncclcalls", '"sum": "SUM"', '"sum": "MAX"')),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_caught(pes: Crew, name: str) -> None:
    dtype, op, mutation = MUTATIONS[name]
    for seed in range(12):
        try:
            pes.play(
                "reduce_scenes:reductions",
                2,
                seed=seed,
                mutation=mutation,
                options={"patience": 2.0},
                shape=(4, 3),
                dtype=dtype,
                op=op,
                order="strided",
                root=1,
            )
        except AssertionError:
            return
    pytest.fail(f"nothing sees it if one should {name}")


@given(
    st.sampled_from(
        [
            "?",
            "i1",
            "u2",
            "i2",
            "u4",
            "i8",
            "f2",
            "f4",
            "f8",
            "c8",
            "c16",
            ">i4",
            "g",
            "G",
            "M8[s]",
            "m8[s]",
            "S3",
            "V5",
            "O",
        ]
    ),
    st.sampled_from([*OPS, "avg"]),
)
def test_every_form_is_one_that_nccl_has(dtype: str, op: str) -> None:
    found = form_of(np.dtype(dtype), op)
    if found is None:
        return
    counted = found.wide or found.view
    assert counted.kind in "iuf"
    assert counted.itemsize in ((2, 4, 8) if counted.kind == "f" else (1, 4, 8))
    assert found.op in OPS
    assert not (counted.kind == "f" and found.op in ("min", "max"))
    assert np.dtype(dtype).itemsize % found.view.itemsize == 0
