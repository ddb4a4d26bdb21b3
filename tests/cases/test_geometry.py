"""Chunk shapes that broke somebody's rechunk: empties, primes, uneven ends, one owner.

Each test points at the public report whose symptom it holds; the code is our own.
"""

import dask.array as da
import numpy as np
import pytest
from cluster import Relayout, ar, check, fa


@pytest.mark.sample
def test_rg01_empty_input_chunks_do_not_shift_the_later_ones(relayout: Relayout) -> None:
    # https://github.com/dask/dask/pull/5256
    x = fa(ar(5, 17), ((5,), (7, 0, 0, 6, 0, 4)))
    check(relayout(x, ((5,), (17,))), ar(5, 17), ((5,), (17,)))


def test_rg02_trailing_empty_chunk_on_both_sides(relayout: Relayout) -> None:
    # https://github.com/dask/dask/issues/3501
    x = fa(ar(9, 10), ((4, 5), (10, 0)))
    check(relayout(x, ((3, 6), (10, 0))), ar(9, 10), ((3, 6), (10, 0)))


def test_rg04_empty_output_blocks_are_arrays(relayout: Relayout) -> None:
    # https://github.com/dask/dask/issues/6649
    y = da.map_blocks(lambda b: b * 2 + b.size, relayout(fa(ar(7), 7), ((0, 7, 0),)), dtype="f8")
    check(y, ar(7) * 2 + 7, ((0, 7, 0),))


def test_rg05_wholly_empty_array(relayout: Relayout) -> None:
    # https://github.com/dask/dask/pull/6233
    check(relayout(fa(np.zeros(0, "i4"), 0)), np.zeros(0, "i4"))


@pytest.mark.sample
def test_rg07_columns_to_rows(relayout: Relayout) -> None:
    # https://github.com/helmholtz-analytics/heat/issues/425
    check(relayout(fa(ar(10, 6), (10, 2)), ((4, 3, 3), (6,))), ar(10, 6), ((4, 3, 3), (6,)))


@pytest.mark.sample
def test_rg08_more_ranks_than_chunks(relayout: Relayout) -> None:
    # https://github.com/helmholtz-analytics/heat/issues/369
    check(relayout(fa(ar(2, 3), (2, 1)), ((1, 1), (3,))), ar(2, 3), ((1, 1), (3,)))


def test_rg10_uneven_split_then_gather(relayout: Relayout) -> None:
    # https://github.com/pytorch/pytorch/issues/103306
    y = relayout(relayout(fa(ar(7, 6), (2, 6)), (7, 4)), (7, 6))
    check(y, ar(7, 6), ((7,), (6,)))


@pytest.mark.sample
def test_rg11_uneven_to_uneven_on_three_axes(relayout: Relayout) -> None:
    # https://github.com/pytorch/pytorch/pull/115525
    x = fa(ar(11, 13, 7), ((1, 2, 8), (5, 8), (7,)))
    chunks = ((10, 1), (1, 12), (2, 3, 2))
    check(relayout(x, chunks), ar(11, 13, 7), chunks)


def test_rg13_thin_slices_to_pencils(relayout: Relayout) -> None:
    # https://github.com/dask/dask/issues/11162
    x = fa(ar(64, 9, 10, dtype="f4"), (1, 9, 10))
    check(relayout(x, (16, 3, 5)), ar(64, 9, 10, dtype="f4"))


def test_rg14_innermost_edge_pieces(relayout: Relayout) -> None:
    # https://github.com/cubed-dev/cubed/issues/859
    x = fa(ar(48, 15, 14, dtype="f4"), (3, 15, 14))
    chunks = ((48,), (5, 5, 5), (5, 5, 4))
    check(relayout(x, (48, 5, 5)), ar(48, 15, 14, dtype="f4"), chunks)


def test_rg16_there_and_back_with_nothing_in_between(relayout: Relayout) -> None:
    # https://github.com/coiled/benchmarks/issues/789
    y = fa(ar(30, 6), (1, 6))
    for chunks in ((30, 1), (7, 6), (1, 6)):
        y = relayout(y, chunks)
    check(y, ar(30, 6), ((1,) * 30, (6,)))


def test_rg17_no_axes(relayout: Relayout) -> None:
    # https://github.com/dask/dask/issues/494
    x = fa(np.array(3.5), ())
    check(relayout(x, ()) + x, np.array(7.0))


@pytest.mark.sample
def test_rg19_uneven_and_empty_owners_to_even_ones(relayout: Relayout) -> None:
    # https://github.com/helmholtz-analytics/heat/issues/413
    x = fa(ar(10), ((2, 4, 4, 0, 0),))
    check(relayout(x, ((2,) * 5,)), ar(10), ((2,) * 5,))


@pytest.mark.sample
def test_rg20_first_owners_empty(relayout: Relayout) -> None:
    # https://github.com/helmholtz-analytics/heat/issues/417
    x = fa(ar(21), ((0, 0, 3, 5, 4, 5, 4),))
    check(relayout(x, ((3,) * 7,)), ar(21), ((3,) * 7,))


def test_rg22_reshape_after_a_redistribution(relayout: Relayout) -> None:
    # https://github.com/pytorch/pytorch/issues/179502
    y = relayout(fa(ar(10, 6), (10, 2)), (3, 6)).reshape(-1).reshape(15, 4)
    check(y, ar(10, 6).reshape(15, 4))


def test_rg23_axis_of_length_one_in_the_middle(relayout: Relayout) -> None:
    # https://github.com/jipolanco/PencilFFTs.jl/issues/43
    check(relayout(fa(ar(8, 1, 7), ((3, 5), (1,), (7,))), (2, 1, 3)), ar(8, 1, 7))


def test_rg25_counts_beyond_32_bits_of_which_ten_elements_are_wanted(relayout: Relayout) -> None:
    # https://github.com/p-costa/SNaC/issues/28
    half = 2**15
    row = fa(ar(1, 1, 3), 3)
    x = da.broadcast_to(row, (2 * half, 2 * half, 3), chunks=((half,) * 2, (half,) * 2, (3,)))
    y = relayout(x, ((2 * half - 5, 5), (2 * half - 2, 2), (1, 2)))[-5:, -2:, 1:]
    check(y, np.broadcast_to(ar(1, 1, 3), (5, 2, 3))[:, :, 1:].copy())


@pytest.mark.sample
def test_rg26_all_to_one_owner_and_out_again(relayout: Relayout) -> None:
    # https://github.com/pytorch/pytorch/issues/146468
    y = relayout(relayout(fa(ar(23, 29), (5, 6)), ((23,), (29,))), ((1, 22), (28, 1)))
    check(y, ar(23, 29), ((1, 22), (28, 1)))
