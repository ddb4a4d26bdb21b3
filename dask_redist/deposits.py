"""A rank's side of one run of a reduction: partials come in, are cut over the ranks, go out merged.

Task threads *deposit* partials. They stay Python objects, and neighbours are combined, so a rank
holds few of them. When the run is closed, the arrays in them are laid into the rank's
arena, and everybody is told where. In the lane each rank then reads its cut of all partials and
merges it: a reduce-scatter by reading, in which no rank gets more than its share of the partials.
Whoever takes the result reads the merged cuts from there.

Partials that are small or cannot be cut are merged whole, by the rank that holds most of them.
"""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np
from dask.array.dispatch import concatenate_lookup
from distributed.protocol import pickle as by_value
from numpy.typing import NDArray

from dask_redist.arena import Arena, Block
from dask_redist.errors import has_left
from dask_redist.partials import Cut, Leaf, Packed, cut_lengths, pack, unpack
from dask_redist.ranks import Seat
from dask_redist.reduction import Line, Nothing, Reduction
from dask_redist.run import Gate, RunClosed, RunTable, Tally
from dask_redist.spec import Index

#: partials that a rank holds before it combines them
BATCH = 16
#: bytes up to which a partial travels in messages
INLINE = 4096
#: bytes up to which partials are merged by one rank
WHOLE = 32 * 1024
#: bytes of a partial in a cut whose bounds must not depend on the number of ranks
GRAIN = 32 * 1024

#: reads arrays of a rank in a run, or a cut of each: views where that can be
Reader = Callable[[Seat, int, Sequence[Leaf], "Cut | None"], list[NDArray[Any]]]


class Entry(NamedTuple):
    """A stretch where it can be read."""

    places: Index
    packed: Packed
    nothing: bool


class Merged(NamedTuple):
    """A part of the result where it can be read; ``cut``: which, None: all of it."""

    cut: Cut | None
    packed: Packed


class ReduceRun:
    """One run of a reduction on one rank.

    Parameters
    ----------
    table
        The run; its outputs are nobody's.
    arena
        Where partials and merged cuts are laid.
    read
        Reads what other ranks have laid.
    """

    #: it has something for the exchange, whatever came in
    rest = True

    def __init__(self, table: RunTable, arena: Arena, read: Reader) -> None:
        self.table = table
        self.gate = Gate()
        self.tally = Tally()
        self.over = False
        self.spec: Reduction = table.spec
        self._arena = arena
        self._read = read
        self._line = Line()
        self._lock = threading.Lock()
        self._blocks: list[Block] = []
        self._error: Exception | None = None

    def contribute(self, index: Index, partial: Any) -> None:
        """Take a partial in, and combine what follows each other; called by task threads.

        Raises
        ------
        RunClosed
            It came too late.
        """
        with self.gate.enter():
            # In place as they come, or a few at once.
            least = 2 if self.spec.merge.is_paired([partial]) else BATCH
            with self._lock:
                self._line.put(self.spec.place(index), partial)
            while True:
                with self._lock:
                    batch = self._line.batch(self.spec.ahead, least)
                if not batch:
                    return
                partials = [stretch.partial for stretch in batch]
                own = len(batch[0].places) > 1
                try:
                    combined = self.spec.merge.combined(partials, own)
                except BaseException as error:
                    with self._lock:
                        self._line.put_back(batch)
                    if own and isinstance(error, Exception):
                        self._error = error  # the total may have some of it: the run is lost
                    raise
                with self._lock:
                    self._line.join(batch, combined)

    def lay_out(self) -> list[Entry] | None:
        """Put the partials where others can read them; the run is closed. None: that failed."""
        entries: list[Entry] = []
        try:
            while (stretch := self._line.pop()) is not None:
                places, partial = stretch
                entries.append(Entry(places, self._pack(partial), type(partial) is Nothing))
                del stretch, partial  # before the next one is laid
        except Exception as error:  # told in the exchange: every rank that joined takes part in it
            self._error = error
        finally:
            self._line = Line()
        return entries if self._error is None else None

    def exchange(self, table: Sequence[tuple[Seat, list[Entry] | None]], me: int) -> list[Merged]:
        """Read and merge the cuts that are this rank's; in the lane.

        Parameters
        ----------
        table
            What each rank that takes part has laid out.
        me
            This rank's seat.

        Raises
        ------
        Unread
            A rank has left.
        RunClosed
            A chunk has been contributed twice.
        """
        if self._error is not None:
            raise self._error
        laid = [(seat, entries) for seat, entries in table if entries is not None]
        if len(laid) < len(table):  # another rank tells why
            return []
        plan = Plan(self.spec, laid)
        return [Merged(cut, self._pack(self._merge(plan, cut))) for cut in plan.cuts_of(me)]

    def _merge(self, plan: Plan, cut: Cut | None) -> Any:
        partials = []
        for seat, entry in plan.line:
            whole = cut is None or entry.nothing
            leaves = entry.packed.leaves
            arrays = _fetch(self._read, seat, self.table.number, leaves, None if whole else cut)
            self.tally.sent[seat.seat] += sum(array.nbytes for array in arrays)
            partials.append(unpack(entry.packed, arrays))
        singles = all(len(entry.places) == 1 for _, entry in plan.line)
        return self.spec.merge.result(partials, self.spec.lengths if singles else None)

    def _pack(self, partial: Any) -> Packed:
        return pack(partial, self._lay, INLINE, by_value.dumps)

    def _lay(self, arrays: Sequence[NDArray[Any]]) -> list[int]:
        blocks = self._arena.allocate([array.nbytes for array in arrays])
        for block, array in zip(blocks, arrays, strict=True):
            np.copyto(block.array(array.shape, array.dtype), array)
        self._blocks += blocks
        return [block.offset for block in blocks]


class Plan:
    """Who merges what: the same on every rank, since all know the same table."""

    def __init__(self, spec: Reduction, table: Sequence[tuple[Seat, list[Entry]]]) -> None:
        self.line = sorted(
            ((seat, entry) for seat, entries in table for entry in entries),
            key=lambda item: item[1].places[0],
        )
        places = Counter(place for _, entry in self.line for place in entry.places)
        if places != Counter(range(prod(spec.lengths))):
            # A task that Dask had given up contributed here, and where it was run again.
            raise RunClosed(f"not all chunks of {spec.name!r} were contributed once")
        self._spec = spec
        self._seats = sorted(seat.seat for seat, _ in table)
        self._axis, self._length, self._nbytes = self._longest()

    def _longest(self) -> tuple[int, int, int]:
        """The axis to cut, its length, and the bytes of a partial; -1: there is none."""
        there = [entry.packed for _, entry in self.line if not entry.nothing]
        found = {cut_lengths(packed) for packed in there} if self._spec.cuttable else set()
        nbytes = max((_nbytes(packed) for packed in there), default=0)
        if len(found) != 1 or nbytes * len(there) <= WHOLE:
            return -1, 0, nbytes
        kept = [(n, -a) for a, n in enumerate(found.pop()) if a not in self._spec.merge.axis]
        length, axis = max(kept, default=(0, 1))
        return (-axis, length, nbytes) if length > 1 else (-1, 0, nbytes)

    def cuts_of(self, seat: int) -> Iterator[Cut | None]:
        """The cuts that a rank merges; None is the whole."""
        if self._axis < 0:
            if seat == self._fullest():
                yield None
            return
        ranks, rank = len(self._seats), self._seats.index(seat)
        step = ceil(self._length / ranks)
        if self._spec.deterministic:
            step = max(1, self._length * GRAIN // self._nbytes)
        pieces = ceil(self._length / step)
        for k in range(pieces * rank // ranks, pieces * (rank + 1) // ranks):
            yield Cut(self._axis, k * step, min((k + 1) * step, self._length))

    def _fullest(self) -> int:
        """The rank that holds the most bytes; of several, the one that holds the first partial."""
        held: dict[int, int] = {}
        for seat, entry in self.line:
            held[seat.seat] = held.get(seat.seat, 0) + _nbytes(entry.packed)
        return max(held, key=lambda seat: held[seat], default=self._seats[0])


def _nbytes(packed: Packed) -> int:
    return len(packed.rest or b"") + sum(
        int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in packed.leaves
    )


class Unread(Exception):
    """A rank that laid something out has left: the run has to be made again."""


def _fetch(
    read: Reader, seat: Seat, number: int, leaves: Sequence[Leaf], cut: Cut | None
) -> list[NDArray[Any]]:
    try:
        return read(seat, number, leaves, cut)
    except OSError as error:
        if has_left(error):
            raise Unread(str(error)) from error
        raise


def assemble_result(
    spec: Reduction, table: Sequence[tuple[Seat, list[Merged]]], number: int, read: Reader
) -> Any:
    """The chunk of a result, read from the ranks that merged it; it shares memory with nothing.

    Raises
    ------
    Unread
        One of them has left.
    """
    parts = sorted(
        ((seat, merged) for seat, several in table for merged in several),
        key=lambda part: part[1].cut.start if part[1].cut else 0,
    )
    found = []
    for seat, merged in parts:
        arrays = _fetch(read, seat, number, merged.packed.leaves, None)
        if len(parts) == 1:
            arrays = [array.copy() for array in arrays]
        found.append(unpack(merged.packed, arrays))
    if len(found) == 1:
        return found[0]
    (axis,) = {merged.cut.axis for _, merged in parts if merged.cut}
    if not spec.merge.keepdims:
        axis -= sum(a < axis for a in spec.merge.axis)
    concatenate = concatenate_lookup.dispatch(type(found[0]))
    return concatenate(found, axis=axis)


def dumped(row: list[Entry] | list[Merged] | None) -> bytes:
    """What one rank has, for messages."""
    return pickle.dumps(row)


def loaded(table: bytes) -> list[tuple[Seat, Any]]:
    """What all ranks have: the rows of several, as `dumped` makes them."""
    return [(seat, pickle.loads(row)) for seat, row in pickle.loads(table)]
