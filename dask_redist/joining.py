"""Arrays of ranks, side by side: what fits, and which Dask array or which whole they are.

A rank without elements has an array of size zero. A Dask array made of the ranks' arrays leaves it
out, as all layouts do; where nobody has an element, rank 0 keeps the one chunk.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dask_redist.boxes import Chunks, IntArray
from dask_redist.errors import LayoutError
from dask_redist.grids import Layout
from dask_redist.irregular import BlockCyclic, Boxes, Replicated, Uneven

__all__ = ["Joined", "NoAxis", "Piece", "by_value", "join_along", "join_on_grid", "whole_shape"]


class NoAxis(LayoutError):
    """The axis along which arrays are to be joined is none of theirs."""


class Piece(NamedTuple):
    """What one rank has: the shape and dtype of its array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Joined(NamedTuple):
    """A Dask array of the ranks' arrays.

    Attributes
    ----------
    chunks : tuple of tuple of int
        Its chunks.
    dtype : numpy.dtype
        Its dtype.
    ranks : numpy.ndarray of int64
        The rank of each chunk, shaped like the chunk grid.
    """

    chunks: Chunks
    dtype: np.dtype[Any]
    ranks: IntArray


def by_value(values: Sequence[Hashable | None]) -> str:
    """Say which ranks have which value; those with None are left out.

    Examples
    --------
    >>> by_value(["float64", "int32", "float64"])
    'float64 on ranks 0, 2; int32 on rank 1'
    """
    ranks: dict[Hashable, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            ranks.setdefault(value, []).append(rank)
    return "; ".join(
        f"{value} on rank{'s'[: len(on) - 1]} {', '.join(map(str, on))}"
        for value, on in ranks.items()
    )


def _alike(pieces: Sequence[Piece | str]) -> list[Piece]:
    """The ranks' arrays, of one dtype and one number of axes.

    Raises
    ------
    LayoutError
        They are not; says who has what.
    """
    kinds = ["an array" if isinstance(piece, Piece) else piece for piece in pieces]
    if set(kinds) != {"an array"}:
        raise LayoutError(f"the ranks must all have arrays, but there is {by_value(kinds)}")
    arrays = [piece for piece in pieces if isinstance(piece, Piece)]
    dtypes = [piece.dtype for piece in arrays]
    if len(set(dtypes)) > 1:
        raise LayoutError(f"the ranks' arrays must have one dtype, but there is {by_value(dtypes)}")
    ndims = [len(piece.shape) for piece in arrays]
    if len(set(ndims)) > 1:
        shapes = by_value([piece.shape for piece in arrays])
        raise LayoutError(f"the ranks' arrays must have as many axes, but there is {shapes}")
    return arrays


def join_along(pieces: Sequence[Piece | str], axis: int) -> Joined:
    """The ranks' arrays one after the other along an axis.

    Parameters
    ----------
    pieces : sequence of Piece or str
        What each rank has; what is no array, in words.
    axis : int
        The axis; negative ones count from the end.

    Raises
    ------
    LayoutError
        They do not fit; says who has what.

    Examples
    --------
    >>> f8 = np.dtype("f8")
    >>> joined = join_along([Piece((3, 4), f8), Piece((0, 4), f8), Piece((1, 4), f8)], 0)
    >>> joined.chunks, joined.ranks.ravel()
    (((3, 1), (4,)), array([0, 2]))
    """
    arrays = _alike(pieces)
    shapes = [piece.shape for piece in arrays]
    ndim = len(shapes[0])
    if not -ndim <= axis < ndim:
        raise NoAxis(f"axis is {axis}, but the ranks' arrays have {ndim} axes")
    axis %= ndim
    others = [(*shape[:axis], *shape[axis + 1 :]) for shape in shapes]
    if len(set(others)) > 1:
        raise LayoutError(
            f"the ranks' arrays may differ along axis {axis} only, but there is {by_value(shapes)}"
        )
    holders = [rank for rank, shape in enumerate(shapes) if shape[axis]] or [0]
    chunks = tuple(
        tuple(shapes[rank][axis] for rank in holders) if a == axis else (shapes[0][a],)
        for a in range(ndim)
    )
    grid = [len(sizes) for sizes in chunks]
    return Joined(chunks, arrays[0].dtype, np.array(holders, np.int64).reshape(grid))


def join_on_grid(pieces: Sequence[Piece | str], ranks: IntArray) -> Joined:
    """The ranks' arrays as the chunks of a grid.

    Parameters
    ----------
    pieces : sequence of Piece or str
        What each rank has. A rank that is not in the grid must have no element.
    ranks : numpy.ndarray of int64
        The rank of each chunk.

    Raises
    ------
    LayoutError
        They do not fit; says who has what.
    """
    arrays = _alike(pieces)
    shapes = [piece.shape for piece in arrays]
    chunks = tuple(
        tuple(shapes[rank][axis] for rank in np.moveaxis(ranks, axis, 0).reshape(length, -1)[:, 0])
        if len(shapes[0]) == ranks.ndim
        else ()
        for axis, length in enumerate(ranks.shape)
    )
    fits = [
        shapes[rank] == tuple(sizes[i] for sizes, i in zip(chunks, index, strict=True))
        for index, rank in np.ndenumerate(ranks)
        if () not in chunks
    ]
    inside = set(ranks.ravel().tolist())
    beside = [r for r, shape in enumerate(shapes) if r not in inside and 0 not in shape]
    if not fits or not all(fits) or beside or any(0 in sizes for sizes in chunks):
        raise LayoutError(
            f"the ranks' arrays do not fit on a grid of {' x '.join(map(str, ranks.shape))}: "
            f"there is {by_value(shapes)}"
        )
    return Joined(chunks, arrays[0].dtype, ranks)


def whole_shape(layout: Layout, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of the array whose boxes, by a layout, have these shapes.

    Parameters
    ----------
    layout : Layout
        One that gives a box to each rank.
    shapes : sequence of tuple of int
        The local shape of each rank.

    Raises
    ------
    LayoutError
        There is no such array; names the rank whose shape is wrong.

    Examples
    --------
    >>> from dask_redist.grids import Slab
    >>> whole_shape(Slab.Y, [(4, 3), (4, 2)])
    (4, 5)
    >>> whole_shape(Slab.Y, [(4, 2), (4, 3)])
    Traceback (most recent call last):
    dask_redist.errors.LayoutError: Slab.Y of an array of shape (4, 5) gives rank 0 (4, 3), but ...
    """
    if isinstance(layout, BlockCyclic):
        raise LayoutError(f"{layout!r} gives a rank several boxes; use Block, Slab or Pencil")
    ranks, ndims = len(shapes), [len(shape) for shape in shapes]
    if len(set(ndims)) > 1:
        raise LayoutError(f"{layout!r}: local arrays have {by_value(ndims)} axes")
    shape = _whole(layout, np.array(shapes, np.int64).reshape(ranks, ndims[0]))
    for rank, (want, got) in enumerate(
        zip(layout.lshape_map(shape, ranks).tolist(), shapes, strict=True)
    ):
        if tuple(want) != got:
            raise LayoutError(
                f"{layout!r} of an array of shape {shape} gives rank {rank} {tuple(want)}, "
                f"but its array is {got}; local shapes are {by_value(list(shapes))}"
            )
    return shape


def _whole(layout: Layout, shapes: IntArray) -> tuple[int, ...]:
    """What the whole would be if the shapes were right."""
    ranks, ndim = shapes.shape
    if isinstance(layout, Replicated):
        layout.check((0,) * ndim, ranks)
        return tuple(shapes[int(layout.held_by(ranks)[0])].tolist())
    if isinstance(layout, Boxes):
        corners = np.array([box.upper for box in layout.boxes], np.int64).reshape(-1, ndim)
        return tuple(corners.max(axis=0, initial=0).tolist())
    if isinstance(layout, Uneven):
        axis = layout.axis if -ndim <= layout.axis < ndim else 0
        whole = shapes[0].copy()
        whole[axis] = sum(layout.sizes)
        return tuple(whole.tolist())
    # So many ranks hold the first element of an axis: as many have each other part of it.
    alike = layout.lshape_map((1,) * ndim, ranks).sum(axis=0)
    return tuple((shapes.sum(axis=0) // np.maximum(alike, 1)).tolist())
