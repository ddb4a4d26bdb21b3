"""A rank's side of one run: who may write, where the pieces go, and what waits to be taken.

A run is *open* or *closed* on each rank. A writer registers before its first byte; closing
refuses new writers, and the run is quiet when the running ones are done, because Dask never stops
a running task thread and users mutate results.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dask_redist.arena import Block
from dask_redist.errors import ChunkMismatchError
from dask_redist.packing import in_place, unpack
from dask_redist.pages import Store, store
from dask_redist.ranks import Seat
from dask_redist.segment import Bytes
from dask_redist.spec import Index, PartSpec
from dask_redist.wires import MemoryWire, Place, Wire, flush_all


class RunTable(NamedTuple):
    """What a rank is told when it joins a run: which output lives where."""

    id: Any
    number: int
    spec: Any  # PartSpec; of a reduction its Reduction
    #: seat of each output chunk, -1 where nobody wants it; of a replicated one, of each copy
    seats: NDArray[np.int64]
    #: its offset in the owner's arena
    offsets: NDArray[np.int64]
    #: the owners
    owners: dict[int, Seat]


class RunClosed(Exception):
    """A writer came too late; the contribution has to be computed again."""


@dataclass
class Tally:
    """What one rank did in one run."""

    #: bytes written to each seat, the rank's own included
    sent: Counter[int] = field(default_factory=Counter)
    #: bytes over each wire
    wires: Counter[str] = field(default_factory=Counter)
    pieces: int = 0
    #: seconds in which task threads were writing, summed over threads
    writing: float = 0.0

    def add(self, other: Tally) -> None:
        """Count what another contribution did."""
        self.sent.update(other.sent)
        self.wires.update(other.wires)
        self.pieces += other.pieces
        self.writing += other.writing


class Gate:
    """Lets writers in until it is closed; quiet when it is closed and all are out."""

    def __init__(self) -> None:
        self.closed = False
        self._inside = 0
        self._lock = threading.Lock()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Be inside.

        Raises
        ------
        RunClosed
            The gate was closed before.
        """
        with self._lock:
            if self.closed:
                raise RunClosed("the run is closed on this rank")
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1

    def close(self) -> None:
        """Let nobody in any more."""
        with self._lock:
            self.closed = True

    @property
    def empty(self) -> bool:
        """Whether nobody writes just now."""
        with self._lock:
            return self._inside == 0

    @property
    def quiet(self) -> bool:
        """Whether nobody writes and nobody ever will."""
        with self._lock:
            return self.closed and self._inside == 0


class RankRun:
    """One run on one rank, for its writers.

    Parameters
    ----------
    table
        Where the outputs live.
    wire_to
        A new wire to a seat; the run uses it until its end.
    """

    def __init__(self, table: RunTable, wire_to: Callable[[RunTable, int], Wire]) -> None:
        self.table = table
        self.gate = Gate()
        self.tally = Tally()
        #: the conductor has ended the run; what is held back goes nowhere
        self.over = False
        self._seats: list[int] = table.seats.tolist()
        self._offsets: list[int] = table.offsets.tolist()
        self._wire_to = wire_to
        self._wires: dict[int, Wire] = {}
        self._known: dict[Index, list[tuple[int, Wire, Place]]] = {}
        self._lock = threading.Lock()

    def contribute(self, index: Index, chunk: Any) -> None:
        """Write each piece of the input chunk ``index`` to its place in its owner's output."""
        spec: PartSpec = self.table.spec
        array = checked(chunk, spec, index)
        with self.gate.enter():
            start = time.perf_counter()
            tally = Tally()
            itemsize = spec.dtype.itemsize
            for row in spec.overlap.pieces_of_input(spec.local_in(index)).rows():
                stores: list[Store] = []
                for chunk_out, source, target, size in row:
                    for seat, wire, place in self._places(chunk_out):
                        if isinstance(wire, MemoryWire):
                            stores.append(wire.store(place, target, array[source]))
                        else:
                            wire.write(place, target, array[source])
                        tally.sent[seat] += size * itemsize
                        tally.wires[wire.name] += size * itemsize
                        tally.pieces += 1
                store(stores)
            tally.writing = time.perf_counter() - start
            with self._lock:
                self.tally.add(tally)

    @property
    def rest(self) -> bool:
        """Whether pieces are held back for the exchange."""
        return any(wire.held for wire in self._wires.values())

    def exchange(self) -> None:
        """Send what is held back."""
        flush_all(self._wires.values())

    def _places(self, chunk: Index) -> list[tuple[int, Wire, Place]]:
        """Where the copies of an output chunk are that somebody wants: seat, wire, place."""
        places = self._known.get(chunk)
        if places is None:
            spec = self.table.spec
            out, shape = spec.flat_out(chunk), spec.out_shape(chunk)
            places = [
                (seat, self._wire(seat), Place(out, self._offsets[copy], shape, spec.dtype))
                for copy in range(out, len(self._seats), spec.n_out)
                if (seat := self._seats[copy]) >= 0
            ]
            self._known[chunk] = places
        return places

    def _wire(self, seat: int) -> Wire:
        wire = self._wires.get(seat)
        if wire is None:
            with self._lock:
                wire = self._wires.get(seat) or self._wire_to(self.table, seat)
                self._wires[seat] = wire
        return wire


class Outputs:
    """The output blocks of one run that a rank owns, until each is taken.

    Parameters
    ----------
    spec
        The part.
    blocks
        Output chunk to block.
    takers
        How many takes each output has, where they are several (a graph and its clone).
    """

    def __init__(
        self, spec: PartSpec, blocks: dict[int, Block], takers: dict[int, int] | None = None
    ) -> None:
        self.spec = spec
        self.gate = Gate()
        self._blocks = blocks
        self._takers = takers or {}
        self._lock = threading.Lock()

    def take(self, out: int) -> NDArray[Any] | None:
        """The array over block ``out``, for the last of its takes, copies for those before.

        None when it is not here (any more): the same memory is never returned twice.
        """
        with self._lock:
            last = self._takers.get(out, 1) <= 1
            self._takers[out] = self._takers.get(out, 1) - 1
            block = self._blocks.pop(out, None) if last else self._blocks.get(out)
        if block is None:
            return None
        array = block.array(self._shape(out), self.spec.dtype)
        return array if last else array.copy()

    def receive(self, headers: Any, buffer: Any) -> None:
        """Write pieces that came as a message."""
        with self.gate.enter():
            unpack(headers, buffer, self._view)

    def in_place(self, headers: Any) -> Bytes | None:
        """The bytes that a message's pieces are, see :func:`packing.in_place`; from inside."""
        return in_place(headers, self._view)

    def _view(self, out: int) -> NDArray[Any]:
        return self._blocks[out].array(self._shape(out), self.spec.dtype)

    def _shape(self, out: int) -> Index:
        return self.spec.out_shape(self.spec.local_out(out))

    def drop(self, condemn: bool) -> None:
        """Give back what was not taken; ``condemn``: to nobody."""
        while self._blocks:
            _, block = self._blocks.popitem()
            if condemn:
                block.condemn()


def checked(chunk: Any, spec: PartSpec, index: Index) -> NDArray[Any]:
    """The input chunk ``index`` of a part; see :func:`as_declared`."""
    return as_declared(
        chunk, spec.in_shape(spec.local_in(index)), spec.dtype, spec.name_input, index
    )


def as_declared(
    chunk: Any, shape: Index, dtype: np.dtype[Any], name: str, index: Index
) -> NDArray[Any]:
    """The chunk ``index`` of the array ``name`` as a plain array of the declared shape and type.

    Raises
    ------
    ChunkMismatchError
        The chunk is not what the Dask array declares; names the chunk, both types and shapes.
    """
    plain = isinstance(chunk, (np.ndarray, np.generic)) and not isinstance(chunk, np.ma.MaskedArray)
    # NumPy pickles a block that is no contiguous whole without its byte order.
    if plain and chunk.shape == shape and _native(chunk.dtype) == _native(dtype):
        return np.asarray(chunk, dtype=dtype)
    real = (
        f"{type(chunk).__name__} of shape {getattr(chunk, 'shape', '?')} "
        f"and dtype {getattr(chunk, 'dtype', '?')}"
    )
    raise ChunkMismatchError(
        f"chunk {index} of {name!r} is a {real}, but the array declares an ndarray of "
        f"shape {shape} and dtype {dtype}; give map_blocks the right meta= and chunks=, "
        "or convert the chunks with astype"
    )


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("=")
