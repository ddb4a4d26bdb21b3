"""The layer that makes an array of partials, taken apart: its step by another function.

Dask makes partials by a Blockwise layer, which fuses with what makes the chunks, or by plain tasks
(arg-reductions). Either way the function is replaced in the layer, not put on top of it, so that
there is no task more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dask.array as da
from dask._task_spec import Task, TaskRef
from dask.blockwise import BlockIndex, Blockwise, blockwise
from dask.highlevelgraph import Layer, MaterializedLayer

from dask_redist.spec import Index


def function_of(x: da.Array) -> Callable[..., Any] | None:
    """The function that makes the partials ``x``, where their layer does nothing else."""
    layer = x.dask.layers[x.name]
    if isinstance(layer, Blockwise):
        return layer.task.func if type(layer.task) is Task else None
    first: Sequence[Any] = next(iter(layer.values()), ())
    if type(first) is tuple and len(first) == 4 and callable(first[0]):  # an arg-reduction
        return first[0]  # type: ignore[no-any-return]
    return None


def by_step(
    x: da.Array, name: str, step: Callable[..., Any], indexed: bool = False
) -> tuple[dict[str, Layer], dict[str, set[str]]]:
    """The graph of the partials ``x`` with ``step`` in the place of what makes them.

    Where that is no function of its own (see :func:`function_of`) the step gets the partials.

    Parameters
    ----------
    x
        The partials.
    name
        Of the layer that the step makes.
    step
        A function of the same arguments.
    indexed
        Whether it gets the index of its chunk as a last argument.
    """
    layers, needs = dict(x.dask.layers), dict(x.dask.dependencies)
    blocks = x.numblocks if indexed else None
    if function_of(x) is None:
        axes = "".join(chr(ord("a") + a) for a in range(x.ndim))
        layer = blockwise(_given, name, axes, x.name, axes, numblocks={x.name: x.numblocks})
        layers[name] = like(layer, name, step, blocks=blocks)
        return layers, needs | {name: {x.name}}
    layer = layers.pop(x.name)
    if isinstance(layer, Blockwise):
        layers[name] = like(layer, name, step, blocks=blocks)
    else:
        tasks: dict[Any, Task] = {}
        for (_, *index), (_, *arguments) in layer.items():
            source, axis, offset = arguments
            key: Any = (name, *index)
            last = (tuple(index),) if indexed else ()
            tasks[key] = Task(key, step, TaskRef(source), axis, offset, *last)
        layers[name] = MaterializedLayer(tasks)
    needs[name] = needs.pop(x.name)
    return layers, needs


def _given(partial: Any) -> Any:
    return partial


def like(
    layer: Blockwise,
    name: str,
    function: Callable[..., Any],
    indices: Any = None,
    blocks: Index | None = None,
) -> Blockwise:
    """The same step by another function, under another name.

    ``indices``: of other inputs; ``blocks``: how many, each of which gets its index as a last
    argument.
    """
    inputs, args = list(indices or layer.indices), list(layer.task.args)
    if blocks is not None:
        args.append(TaskRef(f"__dask_blockwise__{len(inputs)}"))
        inputs.append((BlockIndex(blocks), layer.output_indices))
    return Blockwise(
        name,
        layer.output_indices,
        Task(name, function, *args, **layer.task.kwargs),
        inputs,
        numblocks=layer.numblocks,
        concatenate=layer.concatenate,
        new_axes=layer.new_axes,
        annotations=layer.annotations,
        io_deps=layer.io_deps,
    )
