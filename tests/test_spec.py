"""Parts: numbers, indices and shapes against NumPy's own."""

import math
import pickle
from typing import Any

import numpy as np
import pytest
from dask.base import tokenize
from hypothesis import given
from hypothesis import strategies as st
from test_overlap import overlaps

from dask_redist.layouts import Slab
from dask_redist.overlap import Overlap
from dask_redist.spec import PartSpec


def part_of(
    overlap: Overlap,
    first_in: tuple[int, ...] | None = None,
    first_out: tuple[int, ...] | None = None,
    **facts: Any,
) -> PartSpec:
    ndim = len(overlap.shape)
    return PartSpec(
        **{
            "name": "redistribute-out",
            "name_input": "in",
            "chunks_in": overlap.chunks_in,
            "chunks_out": overlap.chunks_out,
            "first_in": first_in if first_in is not None else (0,) * ndim,
            "first_out": first_out if first_out is not None else (0,) * ndim,
            "dtype": np.dtype("i8"),
            "owners": np.zeros(math.prod(overlap.numblocks_out), np.int64),
            "ranks": 1,
            "layout": Slab.X,
            **facts,
        }
    )


@st.composite
def parts(draw: st.DrawFn) -> PartSpec:
    """Any overlap of two chunkings, somewhere in a larger array."""
    overlap = draw(overlaps())
    ndim = len(overlap.shape)
    corner = st.tuples(*[st.integers(0, 5)] * ndim)
    return part_of(overlap, draw(corner), draw(corner))


@given(parts())
def test_output_chunks_are_numbered_in_c_order(spec: PartSpec) -> None:
    assert spec.grid_out == tuple(map(len, spec.chunks_out))
    assert spec.n_out == math.prod(spec.grid_out)
    for number, local in enumerate(np.ndindex(*spec.grid_out)):
        index = tuple(i + f for i, f in zip(local, spec.first_out, strict=True))
        assert spec.flat_out(local) == number
        assert spec.local_out(number) == local
        assert spec.out_number(index) == number
        assert all(type(i) is int for i in spec.local_out(number))
        assert spec.out_shape(local) == tuple(
            sizes[i] for sizes, i in zip(spec.chunks_out, local, strict=True)
        )


@given(parts())
def test_input_chunks_have_a_place_in_the_part(spec: PartSpec) -> None:
    for local in np.ndindex(*spec.grid_in):
        index = tuple(i + f for i, f in zip(local, spec.first_in, strict=True))
        assert spec.local_in(index) == local
        assert spec.in_shape(local) == tuple(
            sizes[i] for sizes, i in zip(spec.chunks_in, local, strict=True)
        )


def test_a_part_of_no_axes_has_one_chunk() -> None:
    spec = part_of(Overlap((), ()))
    assert spec.n_out == 1
    assert spec.out_number(()) == 0
    assert spec.local_out(0) == spec.out_shape(()) == ()


@pytest.mark.parametrize("index", [(0,), (0, 0, 0)])
def test_an_index_of_another_ndim_is_refused(index: tuple[int, ...]) -> None:
    spec = part_of(Overlap(((2,), (3,)), ((2,), (3,))))
    for call in (spec.out_number, spec.local_in, spec.flat_out, spec.in_shape):
        with pytest.raises(ValueError, match="zip"):
            call(index)


@given(parts())
def test_parts_survive_pickling_with_and_without_their_overlap(spec: PartSpec) -> None:
    fresh = pickle.dumps(spec)
    assert spec.overlap.shape == tuple(map(sum, spec.chunks_in))
    for copy in map(pickle.loads, (fresh, pickle.dumps(spec))):
        assert copy.chunks_in == spec.chunks_in
        assert copy.first_out == spec.first_out
        assert copy.dtype == spec.dtype
        assert np.array_equal(copy.owners, spec.owners)
        assert copy.overlap.shape == spec.overlap.shape
        assert tokenize(copy) == tokenize(spec)


def test_tokens_tell_parts_and_arrays_apart() -> None:
    overlap = Overlap(((2, 2),), ((4,),))
    different = [
        part_of(overlap),
        part_of(overlap, name="redistribute-other"),
        part_of(overlap, name_input="other"),
        part_of(overlap, first_in=(2,)),
        part_of(overlap, first_out=(1,)),
    ]
    assert len({tokenize(spec) for spec in different}) == len(different)
    assert tokenize(part_of(overlap)) == tokenize(part_of(overlap))
