"""Partials as bytes: what is taken out of them, what is left, and what can be cut."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from cluster import ar, same
from distributed.protocol import pickle as by_value
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from dask_redist.partials import Cut, Leaf, Packed, cut_lengths, pack, unpack
from dask_redist.reduction import Nothing


class Laid:
    """Where arrays are laid: kept as bytes, so that nothing but their elements comes back."""

    def __init__(self) -> None:
        self.bytes: list[bytes] = []

    def __call__(self, arrays: Sequence[NDArray[Any]]) -> list[int]:
        self.bytes += [array.tobytes() for array in arrays]
        return list(range(len(self.bytes) - len(arrays), len(self.bytes)))

    def arrays(self, packed: Packed, cut: Cut | None = None) -> list[NDArray[Any]]:
        found = [
            np.frombuffer(self.bytes[leaf.offset], leaf.dtype).reshape(leaf.shape)
            for leaf in packed.leaves
        ]
        return found if cut is None else [cut.of(array) for array in found]


def equal(got: Any, want: Any) -> None:
    """Fail unless two partials are of one make, with the same elements."""
    assert type(got) is type(want)
    if isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            equal(got[key], want[key])
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            equal(one, other)
    elif isinstance(want, np.ndarray):
        same(got, want)
    else:
        assert got == want


class Own(np.ndarray):
    """A subclass is somebody else's: it stays as it is."""


class Pair(NamedTuple):
    value: Any
    times: int


MASKED = np.ma.MaskedArray(ar(3, 4), ar(3, 4) % 3 == 0, fill_value=-7)
RECORDS = np.zeros((1, 3), [("vals", "f4"), ("arg", "i8")])
RECORDS["arg"] = [4, 5, 6]
PARTIALS: dict[str, tuple[Any, int]] = {
    "array": (ar(3, 4), 1),
    "0-d": (np.array(5.0), 1),
    "scalar": (np.float32(5), 0),
    "empty": (ar(0, 4), 1),
    "Fortran": (np.asfortranarray(ar(3, 4)), 1),
    "every other": (ar(6, 8)[::2, ::-2], 1),
    "big-endian": (ar(3, dtype=">i2"), 1),
    "times": (ar(3, dtype="M8[s]"), 1),
    "records": (RECORDS, 1),
    "text": (np.array(["ab", "c"]), 1),
    "objects": (np.array(["ab", 3], dtype=object), 0),
    "masked": (MASKED, 2),
    "masked without a mask": (np.ma.MaskedArray(ar(3)), 2),
    "dict": ({"n": ar(1, 4, dtype="i8"), "total": ar(1, 4)}, 2),
    "nested": ([(ar(2), "text"), {"a": [ar(3), None]}], 2),
    "subclass": (ar(2, 3).view(Own), 0),
    "named": (Pair(ar(2), 3), 0),
    "nothing": (Nothing(ar(0, 3)), 0),
    "a string": ("abc", 0),
}


@pytest.mark.parametrize(("partial", "leaves"), PARTIALS.values(), ids=PARTIALS)
def test_what_is_taken_out_comes_back(partial: Any, leaves: int) -> None:
    laid = Laid()
    packed = pickle.loads(pickle.dumps(pack(partial, laid)))
    assert len(packed.leaves) == leaves
    equal(unpack(packed, laid.arrays(packed)), partial)
    if isinstance(partial, np.ma.MaskedArray):
        assert unpack(packed, laid.arrays(packed)).fill_value == partial.fill_value


@pytest.mark.parametrize("name", sorted(PARTIALS.keys() - {"big-endian"}))
def test_small_partials_stay_whole(name: str) -> None:
    partial, _ = PARTIALS[name]  # NumPy's own pickles are in native byte order
    packed = pack(partial, lambda _: pytest.fail("something is laid"), 10_000)
    assert packed.leaves == ()
    equal(unpack(packed, []), partial)


@pytest.mark.parametrize("partial", [np.array(["a" * k for k in range(200)], object), "b" * 5000])
def test_long_pickles_are_laid_too(partial: Any) -> None:
    """What travels in messages stays short, whatever it is."""
    laid = Laid()
    packed = pack(partial, laid, 4096)
    assert packed.rest is None
    assert len(packed.leaves) == 1
    equal(unpack(packed, laid.arrays(packed)), partial)
    assert cut_lengths(packed) == ()


@pytest.mark.parametrize("plain", [True, False])
def test_objects_of_classes_that_no_module_has(plain: bool) -> None:
    """What a user's script defines is known to workers by value only."""

    class Sketch:
        def __init__(self, values: NDArray[Any]) -> None:
            self.values = values

    laid = Laid()
    packed = pack([Sketch(ar(3)), ar(4)], laid, 0 if plain else 10_000, by_value.dumps)
    assert len(packed.leaves) == plain
    sketch, array = unpack(packed, laid.arrays(packed))
    same(sketch.values, ar(3))
    same(array, ar(4))
    assert cut_lengths(packed) == ()


def test_the_partial_is_left_as_it_is() -> None:
    partial = {"n": ar(3), "more": [ar(2)]}
    pack(partial, Laid())
    equal(partial, {"n": ar(3), "more": [ar(2)]})


@pytest.mark.parametrize(
    ("partial", "lengths"),
    [
        (ar(1, 6, 2), (1, 6, 2)),
        ({"n": ar(1, 6), "M": ar(1, 6, 3)}, (1, 6)),
        ({"n": ar(1, 6), "M": ar(1, 5)}, (1, -1)),
        ({"n": ar(6), "M": ar()}, ()),
        (MASKED, (3, 4)),
        ([ar(2, 3), ("text", ar(2, 3))], ()),
        ({"n": 7, "M": ar(2, 3)}, ()),
        (np.array(["a", None], dtype=object), ()),
        ("abc", ()),
    ],
    ids=str,
)
def test_what_can_be_cut(partial: Any, lengths: tuple[int, ...]) -> None:
    assert cut_lengths(pack(partial, Laid())) == lengths


@given(
    shape=hnp.array_shapes(max_dims=3, max_side=6),
    masked=st.booleans(),
    extra=st.integers(0, 3),
    data=st.data(),
)
def test_a_cut_is_that_part_of_every_array(
    shape: tuple[int, ...], masked: bool, extra: int, data: st.DataObject
) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    start, stop = sorted(data.draw(st.tuples(*(st.integers(0, shape[axis]),) * 2)))
    cut = Cut(axis, start, stop)
    n, m = ar(*shape), ar(*shape, extra, start=1000)
    partial = {"n": np.ma.MaskedArray(n, n % 2 == 0) if masked else n, "M": m}
    laid = Laid()
    packed = pack(partial, laid)
    assert cut_lengths(packed)[axis] == shape[axis]
    box = (slice(None),) * axis + (slice(start, stop),)
    got = unpack(packed, laid.arrays(packed, cut))
    equal(got, {"n": partial["n"][box], "M": m[box]})


def test_leaves_say_where_and_what() -> None:
    laid = Laid()
    laid([ar(9)])
    assert pack([ar(2, 3, dtype="i2")], laid).leaves == (Leaf(1, (2, 3), np.dtype("i2")),)
