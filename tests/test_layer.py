"""The graph of one redistribution: its keys, its size, its culling, its tasks. No cluster.

Run by Dask's own schedulers, the same graph works in process.
"""

import pickle
from itertools import product
from math import prod
from typing import Any

import dask.array as da
import dask.base
import numpy as np
import pytest
from cluster import ar, same
from dask.highlevelgraph import HighLevelGraph
from dask.local import get_sync
from hypothesis import given, settings
from hypothesis import strategies as st

import dask_redist as dr
from dask_redist.boxes import Chunks
from dask_redist.layer import RedistributeLayer
from dask_redist.placement import balanced
from dask_redist.tasks import FenceTask, take


def lazy(x: da.Array, chunks: Chunks, ranks: int = 3, layout: Any = None) -> da.Array:
    """``redistribute`` without a client."""
    held = layout.owners(x.shape, ranks) if layout else balanced(chunks, ranks)
    layer = RedistributeLayer(x.name, x.chunks, chunks, x.dtype, held, layout, ranks)
    graph = HighLevelGraph.from_collections(layer.name, layer, dependencies=[x])  # type: ignore[list-item]
    return da.Array(graph, layer.name, chunks, meta=x._meta)


def layer_of(y: da.Array) -> RedistributeLayer:
    layer = y.dask.layers[y.name]
    assert isinstance(layer, RedistributeLayer)
    return layer


@st.composite
def chunkings(draw: st.DrawFn) -> tuple[tuple[int, ...], Chunks, Chunks]:
    """A shape and two chunkings of it; axes and chunks may be empty."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))

    def chunks(length: int) -> tuple[int, ...]:
        cuts = sorted(draw(st.lists(st.integers(0, length), max_size=4)))
        return tuple(b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True))

    return shape, tuple(map(chunks, shape)), tuple(map(chunks, shape))


def test_layouts_that_read_alike_have_names_of_their_own() -> None:
    """A long layout is shown in short, and the first rank is the one that owns the chunk."""
    x = da.ones((4, 6), chunks=2)
    some, others = ([*range(7), more, 9] for more in (7, 8))
    names = {lazy(x, ((4,), (6,)), 10, dr.Replicated(ranks)).name for ranks in (some, others)}
    assert len(names) == 2
    assert repr(dr.Replicated(some)) == repr(dr.Replicated(others))
    again = lazy(x, ((4,), (6,)), 10, dr.Replicated(tuple(some))).name
    assert again in names


@settings(max_examples=60, deadline=None)
@given(chunkings(), st.integers(1, 7))
def test_in_process_it_equals_numpy(case: Any, ranks: int) -> None:
    shape, chunks_in, chunks_out = case
    a = ar(*shape, dtype="i4", start=7)
    y = lazy(da.from_array(a, chunks=chunks_in), chunks_out, ranks)
    same(y.compute(scheduler="sync"), a)
    for index in product(*map(range, y.numblocks)):
        block = y.blocks[index] if index else y
        assert block.compute(scheduler="sync").shape == tuple(
            sizes[i] for sizes, i in zip(y.chunks, index, strict=True)
        )


@settings(max_examples=60, deadline=None)
@given(chunkings())
def test_n_in_and_n_parts_and_n_out_keys(case: Any) -> None:
    shape, chunks_in, chunks_out = case
    layer = layer_of(lazy(da.from_array(ar(*shape), chunks=chunks_in), chunks_out))
    n_in, n_out = prod(map(len, chunks_in)), prod(map(len, chunks_out))
    assert len(layer) == n_in + len(layer.overlap.parts) + n_out
    tasks = dict(layer)
    assert sum(isinstance(t, FenceTask) for t in tasks.values()) == len(layer.overlap.parts)
    takes = {key for key, t in tasks.items() if getattr(t, "func", None) is take}
    assert takes == layer.get_output_keys()
    for key, task in tasks.items():
        assert task.key == key
        assert all(d in tasks or d[0] == layer.name_input for d in task.dependencies)


@settings(max_examples=60, deadline=None)
@given(chunkings(), st.data())
def test_culled_it_needs_what_its_outputs_need(case: Any, data: st.DataObject) -> None:
    shape, chunks_in, chunks_out = case
    a = ar(*shape)
    x = da.from_array(a, chunks=chunks_in)
    layer = layer_of(lazy(x, chunks_out))
    outputs = sorted(layer.get_output_keys())
    wanted = set(data.draw(st.lists(st.sampled_from(outputs), min_size=1, unique=True)))
    culled, needs = layer.cull(wanted, outputs)
    assert culled.get_output_keys() == wanted == set(needs)
    tasks = dict(culled)
    named = {d for task in tasks.values() for d in task.dependencies} - set(tasks)
    assert named == set().union(*needs.values())
    # Takes keep their keys, whatever else is wanted: who asks for more gets the same ones.
    assert {key for key, t in tasks.items() if getattr(t, "func", None) is take} == wanted
    found = get_sync({**dict(x.dask), **tasks}, sorted(wanted))
    ends = [np.cumsum([0, *sizes]) for sizes in chunks_out]
    for key, block in zip(sorted(wanted), found, strict=True):
        same(block, a[tuple(slice(e[i], e[i + 1]) for e, i in zip(ends, key[1:], strict=True))])


def test_keys_say_what_happens_and_are_the_same_each_time() -> None:
    x = da.from_array(ar(6, 6), chunks=(2, 6), name="src")
    y, again = (lazy(x, ((6,), (3, 3))) for _ in range(2))
    assert set(layer_of(y)) == set(layer_of(again))
    prefixes = {key[0].rpartition("-")[0] for key in layer_of(y)}
    assert prefixes == {"redistribute-contribute", "redistribute-fence", "redistribute"}


def test_keys_differ_with_input_chunks_and_layout() -> None:
    x, other = (da.from_array(ar(6, 6), chunks=(2, 6), name=name) for name in ("a", "b"))
    slab, block = dr.Slab.Y, dr.Block((1, 3))
    chunks = slab.chunks(x.shape, 3)
    names = [
        lazy(x, chunks).name,
        lazy(other, chunks).name,
        lazy(x, ((6,), (3, 3))).name,
        lazy(x, chunks, layout=slab).name,
        lazy(x, chunks, layout=block).name,
        lazy(x, chunks, ranks=2).name,
    ]
    assert len(set(names)) == len(names)


def test_what_is_wanted_is_in_the_keys_of_contributions_and_fences_only() -> None:
    layer = layer_of(lazy(da.from_array(ar(6, 6), chunks=(2, 6)), ((6,), (3, 3))))
    one = (layer.name, 0, 1)
    culled, _ = layer.cull({one}, layer.get_output_keys())
    assert set(culled) & set(layer) == {one}
    whole, _ = layer.cull(layer.get_output_keys(), layer.get_output_keys())
    assert set(whole) == set(layer)


def test_no_task_is_fused_or_renamed() -> None:
    x = da.from_array(ar(6, 6), chunks=(2, 6)) + 1
    y = lazy(x, ((6,), (3, 3)))
    (optimized,) = dask.base.optimize(y * 2)
    graph = dict(optimized.dask)
    for key, task in layer_of(y).items():
        assert type(graph[key]) is type(task)
        assert graph[key].func is task.func


def test_one_part_a_connected_piece() -> None:
    x = da.from_array(ar(8, 6), chunks=(2, 3))
    layer = layer_of(lazy(x, ((4, 4), (3, 3))))
    assert len(layer.overlap.parts) == 4
    for key, task in layer.items():
        if isinstance(task, FenceTask):
            assert len(task.dependencies) == 2, key
            assert task.spec.n_out == 1


def test_specs_of_parts_name_the_owners_of_the_layout() -> None:
    x = da.from_array(ar(9, 8), chunks=(9, 2))
    layout = dr.Pencil(1, (3,))
    layer = layer_of(lazy(x, layout.chunks(x.shape, 3), 3, layout))
    (fence,) = (task for task in layer.values() if isinstance(task, FenceTask))
    assert fence.spec.owners.tolist() == [0, 1, 2]
    assert (fence.spec.n_out, fence.spec.ranks) == (3, 3)
    assert fence.spec.layout == layout


def test_the_graph_is_pickled_whole() -> None:
    a = ar(9, 8)
    y = lazy(da.from_array(a, chunks=(4, 3)), ((9,), (2, 6)))
    copy = pickle.loads(pickle.dumps(y))
    assert set(copy.dask) == set(y.dask)
    same(copy.compute(scheduler="sync"), a)


def test_making_the_layer_makes_no_task() -> None:
    layer = layer_of(lazy(da.zeros((1000, 1000), chunks=(1, 1000)), ((1000,), (500, 500))))
    assert not layer.is_materialized()
    assert "redistribute-" in repr(layer)
    assert not layer.is_materialized()


@pytest.mark.parametrize("scheduler", ["sync", "threads"])
def test_a_wrong_chunk_is_named_in_process_too(scheduler: str) -> None:
    x = da.map_blocks(lambda b: b[:2], da.from_array(ar(6), chunks=3), dtype="f8")
    with pytest.raises(dr.ChunkMismatchError, match=r"chunk \(0,\).*shape \(2,\)"):
        lazy(x, ((6,),)).compute(scheduler=scheduler)
