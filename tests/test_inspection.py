"""Where arrays are: lazy, persisted, after elementwise work, pickled, and those nobody laid out."""

from __future__ import annotations

import pickle
import time

import dask.array as da
import numpy as np
import pytest
from distributed import Client, wait

import dask_redist as dr

VALUES = np.arange(7 * 9 * 4).reshape(7, 9, 4)


def layouts(ranks: int) -> list[dr.Layout]:
    return [
        dr.Slab.X,
        dr.Slab.Y,
        dr.Pencil.Y,
        dr.Block((1, ranks, 1)),
        dr.BlockCyclic((ranks, 1, 1), (2, 9, 4)),
        dr.Uneven(1, (9 - (ranks - 1), *([1] * (ranks - 1)))),
    ]


@pytest.mark.ranks(2, 3)
def test_the_layout_of_an_array_whose_graph_is_on_its_way(client: Client) -> None:
    """What a client sends the scheduler is held back for a while after what it sent before."""
    stream = client.scheduler_comm
    assert stream
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "interval", 0.3)
        arrays = [da.from_array(VALUES + n, chunks=(3, 9, 2)) for n in range(3)]
        for lazy in arrays:
            assert dr.layout_of(dr.redistribute(lazy, dr.Slab.Y).persist()) == dr.Slab.Y


@pytest.mark.parametrize("number", range(6))
def test_the_layout_survives_persist_elementwise_work_and_pickle(
    client: Client, number: int
) -> None:
    ranks = dr.connect(client).size
    layout = layouts(ranks)[number]
    y = dr.redistribute(da.from_array(VALUES, chunks=(3, 9, 2)), layout)
    assert dr.layout_of(y) == layout
    assert dr.layout_of((y + 1) * 2.5) == layout
    expected = layout.lshape_map(VALUES.shape, ranks) if number != 4 else None
    if expected is not None:
        np.testing.assert_array_equal(dr.lshape_map(y), expected)
    assert dr.owners(y).tolist() == np.full(y.numblocks, -1).tolist()

    for lazy in (y, y + 1):
        z = lazy.persist()
        wait(z)
        np.testing.assert_array_equal(
            dr.owners(z), layout.owners(VALUES.shape, ranks), err_msg=str(layout)
        )
        for same in (z, pickle.loads(pickle.dumps(z)), z * 2):
            found = dr.layout_of(same)
            assert found is not None
            assert found.chunks(VALUES.shape, ranks) == y.chunks
            np.testing.assert_array_equal(
                found.owners(VALUES.shape, ranks), layout.owners(VALUES.shape, ranks)
            )
            if expected is not None:
                np.testing.assert_array_equal(dr.lshape_map(same), expected)
    assert np.array_equal(z.compute(), VALUES + 1)
    np.testing.assert_array_equal(dr.owners(z), layout.owners(VALUES.shape, ranks))


@pytest.mark.ranks(2, 3)
def test_arrays_nobody_laid_out(client: Client) -> None:
    x = da.from_array(VALUES, chunks=(2, 2, 2))
    assert dr.layout_of(x) is None
    with pytest.raises(dr.LayoutError, match=r"dask_redist\.owners"):
        dr.lshape_map(x)
    x = x.persist()
    wait(x)
    found = dr.owners(x)
    assert found.min() >= 0
    assert dr.layout_of(x) is None
    with pytest.raises(dr.LayoutError, match=r"dask_redist\.owners"):
        dr.lshape_map(x)
    assert np.array_equal(x.compute(), VALUES)
    assert dr.redistribute(x, dr.Slab.Y).compute().sum() == VALUES.sum()


@pytest.mark.ranks(2)
def test_work_that_moves_elements_has_no_layout(client: Client) -> None:
    y = dr.redistribute(da.from_array(VALUES, chunks=(3, 9, 2)), dr.Slab.Y)
    assert dr.layout_of(y.T) is None
    assert dr.layout_of(y[:3]) is None
    assert dr.layout_of(y.sum(axis=0)) is None


@pytest.mark.ranks(2, 3)
def test_plan_says_what_will_happen(client: Client) -> None:
    ranks = dr.connect(client).size
    x = da.from_array(VALUES, chunks=(3, 9, 4))
    plan = dr.plan(x, dr.Slab.Y)
    assert plan.assumed
    assert "not in memory yet" in plan.explain()
    assert f"Slab.Y (axis 1 split over {ranks})" in plan.explain()
    assert (
        plan.n_tasks
        == 3 + 1 + ranks
        == len(dr.redistribute(x, dr.Slab.Y).dask.layers[dr.redistribute(x, dr.Slab.Y).name])
    )
    x = x.persist()
    wait(x)
    plan = dr.plan(x, dr.Slab.Y)
    assert not plan.assumed
    assert plan.bytes_total == VALUES.nbytes
    assert sum(plan.peak_bytes(rank) for rank in range(ranks)) == 2 * VALUES.nbytes
    assert sum(plan.wires.values()) == VALUES.nbytes
    assert plan.messages <= ranks * (ranks - 1)
    assert plan.fallback is None
    assert "<table>" in plan._repr_html_()
    assert "Slab.Y" in repr(plan)


@pytest.mark.ranks(2)
def test_plan_and_error_of_elements_that_are_no_plain_bytes(client: Client) -> None:
    x = da.from_array(np.array([1, "a", None, 2.5], dtype=object), chunks=2)
    plan = dr.plan(x, dr.Slab.X)
    assert plan.fallback is not None
    assert "object" in plan.explain()
    with pytest.raises(dr.RedistError, match="dtype object are no plain bytes"):
        dr.redistribute(x, dr.Slab.X, fallback="error")
    with pytest.raises(ValueError, match="'copy'"):
        dr.redistribute(x, dr.Slab.X, fallback="copy")
    assert dr.redistribute(x, (4,)).compute().tolist() == [1, "a", None, 2.5]


@pytest.mark.ranks(2)
def test_a_persisted_array_is_waited_for(client: Client) -> None:
    def slow(chunk: np.ndarray) -> np.ndarray:
        time.sleep(0.3)
        return chunk

    x = da.from_array(VALUES, chunks=(3, 9, 4)).map_blocks(slow, dtype=VALUES.dtype)
    y = dr.redistribute(x, dr.Slab.Y).persist()
    assert dr.layout_of(y) == dr.Slab.Y
    assert dr.lshape_map(y).tolist() == [[7, 5, 4], [7, 4, 4]]


MISTAKES = [
    (dr.Slab, dr.LayoutError, r"Slab is a class of layouts: use one, such as Slab\.Y"),
    ("Slab.Y", dr.LayoutError, r"'Slab\.Y' is neither a layout \(such as dask_redist\.Slab\.Y\)"),
    ({"time": -1}, dr.LayoutError, r"axis 'time' is out of range .* use -3 to 2"),
    (0, dr.LayoutError, r"chunk size 0 along axis 0"),
    ([[7, 9, 2], [7, 9, 2]], dr.LayoutError, r"a target map is an integer array"),
    (None, None, ""),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("value", "error", "text"), MISTAKES, ids=[str(m[0]) for m in MISTAKES])
def test_mistakes_are_told_what_is_right(
    client: Client, value: object, error: type[Exception] | None, text: str
) -> None:
    x = da.from_array(VALUES, chunks=(3, 9, 2))
    if error is None:
        assert dr.redistribute(x, value).chunks == x.chunks
        return
    with pytest.raises(error, match=text):
        dr.redistribute(x, value)


@pytest.mark.ranks(2)
def test_what_is_no_dask_array_and_what_is_too_much(client: Client) -> None:
    with pytest.raises(TypeError, match=r"ndarray is not a dask array: use"):
        dr.redistribute(VALUES, dr.Slab.X)  # type: ignore[arg-type]
    with pytest.raises(dr.LayoutError, match=r"1000000000 chunks, more than redist\.max-chunks"):
        dr.redistribute(da.zeros((10**9,), chunks=10**8), 1)
    with pytest.raises(dr.LayoutError, match=r"rank 9: there are ranks 0 to 1"):
        dr.plan(da.zeros((10,), chunks=5), dr.Slab.X).peak_bytes(9)
    with pytest.raises(ValueError, match="n_ranks is 0"):
        dr.connect(client, n_ranks=0)
