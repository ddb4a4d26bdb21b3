"""Small inputs distilled from public bug reports, as data: shapes, arguments and memory layouts.

Each :class:`Report` is our own code and points at the report that inspired it; ``note`` says what
goes wrong where it is got wrong. The other two thirds are in ``reports_elements`` and
``reports_reductions``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import dask.array as da
import numpy as np
from cluster import ar, fa

GH = "https://github.com/"


@dataclass(frozen=True)
class Report:
    """One report: an input, what is done to it, and what must come out."""

    #: geometry, chunks-api, layout, dtype, masked, unknown, reuse, pipeline, or reduce...
    kind: str
    id: str
    note: str
    source: str
    #: the input: an array, or a tuple of arrays
    make: Callable[[], Any]
    #: what is done: gives an array, a value, or a tuple of these
    op: Callable[[Any], Any]
    #: the NumPy value that must come out
    want: Any = None
    #: or the errors of which one must be raised
    raises: tuple[type[Exception], ...] = ()
    #: chunks of the result
    chunks: Any = None
    #: whether any dtype will do
    any_dtype: bool = False
    #: relative and absolute tolerance; both None: bit for bit, reductions by their dtype
    rtol: float | None = None
    atol: float | None = None
    #: what Dask does where that is wrong
    stock: str = ""
    #: why that may stay although the hook is enabled
    theirs: str = ""
    #: why no collective runs even where every change of chunks is to be one
    no_run: str = ""
    #: the error with which a collective refuses what Dask takes on trust
    refused: type[Exception] | None = None
    #: why it is not computed on the cluster
    in_process: str = ""

    def __str__(self) -> str:
        return self.id


def to(*chunks: Any) -> Callable[[da.Array], da.Array]:
    """The change to these chunks."""
    return lambda x: x.rechunk(chunks)


geometry = partial(Report, "geometry")
GEOMETRY = [
    geometry(
        "RG01",
        "empty input chunks must not shift the later ones",
        GH + "dask/dask/pull/5256",
        lambda: fa(ar(5, 17), ((5,), (7, 0, 0, 6, 0, 4))),
        to((5,), (17,)),
        ar(5, 17),
        chunks=((5,), (17,)),
    ),
    geometry(
        "RG02",
        "trailing empty chunk on both sides; chunks must come out as asked",
        GH + "dask/dask/issues/3501",
        lambda: fa(ar(9, 10), ((4, 5), (10, 0))),
        to((3, 6), (10, 0)),
        ar(9, 10),
        chunks=((3, 6), (10, 0)),
    ),
    geometry(
        "RG04",
        "blocks around the data are empty; the next task must still get an ndarray for them",
        GH + "dask/dask/issues/6649",
        lambda: fa(ar(7), (7,)),
        lambda x: x.rechunk(((0, 7, 0),)).map_blocks(lambda b: b * 2 + b.size, dtype="f8"),
        ar(7) * 2 + 7,
        chunks=((0, 7, 0),),
    ),
    geometry(
        "RG05",
        "rechunk of a wholly empty array (used to loop for ever)",
        GH + "dask/dask/pull/6233",
        lambda: fa(np.zeros((0,), "i4"), (0,)),
        lambda x: x.rechunk(),
        np.zeros((0,), "i4"),
        no_run="no elements",
    ),
    geometry(
        "RG07",
        "column blocks to row blocks: values came out transposed inside each received block",
        GH + "helmholtz-analytics/heat/issues/425",
        lambda: fa(ar(10, 6), (10, 2)),
        to((4, 3, 3), (6,)),
        ar(10, 6),
    ),
    geometry(
        "RG08",
        "more ranks than chunks on every axis",
        GH + "helmholtz-analytics/heat/issues/369",
        lambda: fa(ar(2, 3), (2, 1)),
        to((1, 1), (3,)),
        ar(2, 3),
    ),
    geometry(
        "RG10",
        "uneven split then gather: padding rows leaked into the result (8 rows, not 7)",
        GH + "pytorch/pytorch/issues/103306",
        lambda: fa(ar(7, 6), (2, 6)),
        lambda x: x.rechunk((7, 4)).rechunk((7, 6)),
        ar(7, 6),
        chunks=((7,), (6,)),
    ),
    geometry(
        "RG11",
        "uneven to uneven on three axes at once",
        GH + "pytorch/pytorch/pull/115525",
        lambda: fa(ar(11, 13, 7), ((1, 2, 8), (5, 8), (7,))),
        to((10, 1), (1, 12), (2, 3, 2)),
        ar(11, 13, 7),
    ),
    geometry(
        "RG13",
        "many thin slices to pencils, the climate pattern in small",
        GH + "dask/dask/issues/11162",
        lambda: fa(ar(64, 9, 10, dtype="f4"), (1, 9, 10)),
        to(16, 3, 5),
        ar(64, 9, 10, dtype="f4"),
    ),
    geometry(
        "RG14",
        "inner-most edge pieces came out empty (last chunk is 4, not 5)",
        GH + "cubed-dev/cubed/issues/859",
        lambda: fa(ar(48, 15, 14, dtype="f4"), (3, 15, 14)),
        to(48, 5, 5),
        ar(48, 15, 14, dtype="f4"),
        chunks=((48,), (5, 5, 5), (5, 5, 4)),
    ),
    geometry(
        "RG16",
        "there and back again with nothing in between",
        GH + "coiled/benchmarks/issues/789",
        lambda: fa(ar(30, 6), (1, 6)),
        lambda x: x.rechunk((30, 1)).rechunk((7, 6)).rechunk((1, 6)),
        ar(30, 6),
        chunks=((1,) * 30, (6,)),
        no_run="the last change leads back to the array itself",
    ),
    geometry(
        "RG17",
        "0-d array: no axes to plan over",
        GH + "dask/dask/issues/494",
        lambda: fa(np.array(3.5), ()),
        lambda x: x.rechunk(()) + x,
        np.array(7.0),
        no_run="there are no other chunks for it",
    ),
    geometry(
        "RG19",
        "uneven and partly empty owners to an even layout: order of elements was lost",
        GH + "helmholtz-analytics/heat/issues/413",
        lambda: fa(ar(10), ((2, 4, 4, 0, 0),)),
        to((2,) * 5),
        ar(10),
    ),
    geometry(
        "RG20",
        "first owners empty; two neighbours swapped one element",
        GH + "helmholtz-analytics/heat/issues/417",
        lambda: fa(ar(21), ((0, 0, 3, 5, 4, 5, 4),)),
        to((3,) * 7),
        ar(21),
    ),
    geometry(
        "RG22",
        "a view/reshape that needs a redistribution first",
        GH + "pytorch/pytorch/issues/179502",
        lambda: fa(ar(10, 6), (10, 2)),
        lambda x: x.rechunk((3, 6)).reshape(-1).reshape(15, 4),
        ar(10, 6).reshape(15, 4),
    ),
    geometry(
        "RG23",
        "axis of length one in the middle",
        GH + "jipolanco/PencilFFTs.jl/issues/43",
        lambda: fa(ar(8, 1, 7), ((3, 5), (1,), (7,))),
        to(2, 1, 3),
        ar(8, 1, 7),
    ),
    geometry(
        "RG25",
        "element counts beyond 2**33 in the plan, 10 elements of data",
        GH + "p-costa/SNaC/issues/28",
        lambda: da.broadcast_to(
            fa(ar(1, 1, 3), 3),
            (2**16, 2**16, 3),
            chunks=((2**15,) * 2, (2**15,) * 2, (3,)),
        ),
        lambda x: x.rechunk(((2**16 - 5, 5), (2**16 - 2, 2), (1, 2)))[-5:, -2:, 1:],
        np.broadcast_to(ar(1, 1, 3), (5, 2, 3))[:, :, 1:].copy(),
    ),
    geometry(
        "RG26",
        "all to one owner and out again, prime extents (the others idle in the middle)",
        GH + "pytorch/pytorch/issues/146468",
        lambda: fa(ar(23, 29), (5, 6)),
        lambda x: x.rechunk(((23,), (29,))).rechunk(((1, 22), (28, 1))),
        ar(23, 29),
    ),
]

chunks_api = partial(Report, "chunks-api")
CHUNKS_API = [
    chunks_api(
        "CA01",
        "chunks='auto' must not invent chunks of size 0",
        GH + "dask/dask/issues/11618",
        lambda: da.zeros((60, 720, 1440), dtype="f4", chunks=((36, 24), (720,), (1440,))),
        lambda x: min(c for n in range(37, 61) for ax in x[:n].rechunk().chunks for c in ax) > 0,
        True,
        any_dtype=True,
        no_run="nothing is computed",
    ),
    chunks_api(
        "CA02",
        "auto on one axis while another has length 0: division by zero",
        GH + "dask/dask/issues/12537",
        lambda: fa(np.zeros((0, 4)), ((0,), (4,))),
        lambda x: x.rechunk({1: "auto"}),
        np.zeros((0, 4)),
        stock="fails: ZeroDivisionError",
        theirs="Dask's normalize_chunks fails before it asks anybody how to rechunk",
        no_run="no elements",
    ),
    chunks_api(
        "CA04",
        "negative axis keys and -1",
        GH + "dask/dask/pull/3820",
        lambda: fa(ar(6, 8), (4, 3)),
        lambda x: x.rechunk({-2: 5, -1: -1}),
        ar(6, 8),
        chunks=((5, 1), (8,)),
    ),
    chunks_api(
        "CA05",
        "axis out of range must raise before anything is sent",
        GH + "dask/dask/pull/3820",
        lambda: fa(ar(6, 8), (4, 3)),
        lambda x: x.rechunk({2: 3}),
        raises=(ValueError,),
        no_run="it raises",
    ),
    chunks_api(
        "CA07",
        "None keeps an axis as it is",
        GH + "dask/dask/issues/351",
        lambda: fa(ar(6, 8), ((4, 2), (3, 3, 2))),
        lambda x: x.rechunk((None, 4)),
        ar(6, 8),
        chunks=((4, 2), (4, 4)),
    ),
    chunks_api(
        "CA08",
        "same chunks but balance=True: must rebalance, not return early",
        GH + "dask/dask/pull/6735",
        lambda: fa(ar(10), ((6, 3, 1),)),
        lambda x: x.rechunk(((6, 3, 1),), balance=True),
        ar(10),
        no_run="Dask warns that it can balance these no further",
    ),
    chunks_api(
        "CA10",
        "auto chunks need an item size: object dtype must say so",
        GH + "pangeo-data/rechunker/issues/96",
        lambda: fa(np.array(["a", {}, 3.0, None], dtype=object), 2),
        lambda x: x.rechunk("auto"),
        raises=(NotImplementedError,),
        no_run="it raises",
    ),
    chunks_api(
        "CA11",
        "the same axis named twice (0 and -2): whichever wins, the data must survive",
        GH + "dask/dask/pull/3820",
        lambda: fa(np.zeros((3, 1)), (3, 1)),
        lambda x: x.rechunk({0: 1, -2: 3}),
        np.zeros((3, 1)),
        no_run="the later one wins, and changes nothing",
    ),
]


def _read_only() -> da.Array:
    a = np.frombuffer(ar(40, dtype="i4").tobytes(), "i4").reshape(8, 5)
    assert not a.flags.writeable
    return fa(a, (3, 5))


def _result_is_own(x: da.Array) -> da.Array:
    result = np.asarray(x.rechunk((4, 8)).compute())
    own = result if result.flags.writeable else result.copy()
    own[...] = -1
    again: da.Array = x.rechunk((8, 4))
    return again


layout = partial(Report, "layout")
LAYOUT = [
    layout(
        "LY01",
        "transposed (Fortran-ordered) blocks: raw-buffer sends scramble them",
        GH + "numba-mpi/numba-mpi/pull/31",
        lambda: fa(ar(9, 10), (4, 3)).T,
        to((5, 5), (2, 7)),
        ar(9, 10).T.copy(),
    ),
    layout(
        "LY02",
        "Fortran-ordered source",
        GH + "numba-mpi/numba-mpi/pull/31",
        lambda: fa(np.asfortranarray(ar(7, 6, 5)), (7, 2, 5)),
        to((3, 4), (6,), (1, 4)),
        ar(7, 6, 5),
    ),
    layout(
        "LY04",
        "stride-0 blocks (and read-only)",
        GH + "dask/dask/pull/2943",
        lambda: da.broadcast_to(fa(ar(1, 6), (1, 4)), (9, 6)),
        to((2, 7), (6,)),
        np.broadcast_to(ar(1, 6), (9, 6)).copy(),
    ),
    layout(
        "LY05",
        "da.full/ones/zeros blocks are stride-0 broadcasts of one element",
        GH + "dask/dask/issues/7208",
        lambda: da.full((9, 6), 7, dtype="i2", chunks=(4, 6)),
        to((9,), (1, 5)),
        np.full((9, 6), 7, "i2"),
    ),
    layout(
        "LY07",
        "read-only source buffer",
        GH + "dask/distributed/issues/1978",
        _read_only,
        to((8,), (2, 3)),
        ar(8, 5, dtype="i4"),
    ),
    layout(
        "LY08",
        "writing into a result must not alter the source held for later rechunks",
        GH + "dask/dask/issues/5942",
        lambda: fa(ar(8, 8), (4, 4)),
        _result_is_own,
        ar(8, 8),
    ),
    layout(
        "LY10",
        "field of a packed record: 12-byte stride, misaligned doubles",
        GH + "dask/dask/issues/1482",
        lambda: fa(
            np.array([(i, i * 0.5) for i in range(10)], dtype=[("a", "i4"), ("b", "f8")]), 3
        )["b"],
        to((4, 6)),
        np.arange(10) * 0.5,
    ),
]
