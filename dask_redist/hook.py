"""Unmodified Dask code on collectives: the hook in Dask's rechunk.

``x.rechunk`` and all that is built on it (reshape, median, unify, stack, map_overlap, xarray's
``chunk`` ...) end in one function of Dask. It asks the configuration ``array.rechunk.method`` how
to go about it, and for "p2p" looks ``distributed.shuffle.rechunk_p2p`` up each time. The hook puts
a function of ours there, and a method that reads "p2p" where the hook is enabled and what the user
had configured everywhere else. Both are put in once, however often the hook is enabled, and taken
out with the last one.

Where a collective cannot be, or is not worth its while, Dask's own choice is asked as if we were
not there.
"""

from __future__ import annotations

import inspect
import logging
import threading
from contextvars import ContextVar
from importlib.metadata import version
from types import TracebackType
from typing import Any, NamedTuple
from weakref import WeakSet

import dask
import dask.array as da
import distributed.shuffle
from dask.array.rechunk import rechunk as dask_rechunk
from distributed import Client

from dask_redist import config
from dask_redist.boxes import Chunks
from dask_redist.connect import Ranks, find_client, is_connected, ranks_there
from dask_redist.errors import RedistError
from dask_redist.placement import balanced
from dask_redist.reducehook import ReduceHook
from dask_redist.relayout import Target, lay, source_of, why_not
from dask_redist.worth import few_tasks, is_worth

logger = logging.getLogger(__name__)

METHOD = "array.rechunk.method"
CHOICES = {
    "policy": ("auto", "always"),
    "fallback": ("dask", "error"),
    "deterministic": (False, True),
}
#: seconds that workers have for their answer when a rechunk connects the cluster
PATIENCE = 10.0


class Settings(NamedTuple):
    """How the hook decides."""

    policy: str
    fallback: str
    deterministic: bool


class enable:
    """Run the changes of layout and the reductions in unmodified Dask code as collectives.

    Parameters
    ----------
    policy : {"auto", "always"}, optional
        "auto": parts that merge a few neighbouring chunks or split one chunk into a few (up to 16)
        stay plain tasks, and arrays of which one part is larger than half of all ranks' memory are
        left to Dask, which can use its disk. Arrays of up to 8 MiB become Dask's tasks where those
        are at most three quarters of ours (a chunk before or after is one task of ours, a part ten
        more). "always": every change is a collective. Default: ``redist.policy``.
    fallback : {"dask", "error"}, optional
        What to do where there can be no collective (no cluster; for changes of layout also elements
        that are no plain bytes, and unknown chunk sizes): Dask's own rechunk or reduction, or
        :class:`RedistError`. Default: ``redist.fallback``.
    deterministic : bool, optional
        Whether reductions give the same bits on any number of ranks, whatever arrives first. Ranks
        then combine no partials ahead, so more bytes move. Default: ``redist.deterministic``.

    Notes
    -----
    It acts when an array is built, not when it is computed. As a call it holds for the whole
    process until ``disable()``; as a context manager for the code inside the block, in this thread
    (or task of an event loop) only. ``method="tasks"``, and an ``array.rechunk.method`` that is
    configured while the hook is enabled, are the user's word and stay. The cluster of the default
    client is connected if nobody did. With Dask's query planning for arrays, nothing is changed.

    Raises
    ------
    ValueError
        A policy or fallback that there is not.
    RedistError
        A version of Dask whose rechunk or reductions work otherwise.

    Examples
    --------
    >>> import dask.array as da, dask_redist as dr
    >>> from distributed import Client
    >>> with Client(n_workers=2, threads_per_worker=1, processes=False,
    ...             dashboard_address=":0") as client:
    ...     with dr.enable(policy="always"):
    ...         y = da.ones((40, 60), chunks=(20, 60)).rechunk((40, 30))
    ...     float(y.sum().compute()), len(dr.runs())
    (2400.0, 1)
    """

    def __init__(
        self,
        policy: str | None = None,
        fallback: str | None = None,
        deterministic: bool | None = None,
    ) -> None:
        asked = {"policy": policy, "fallback": fallback, "deterministic": deterministic}
        given: dict[str, Any] = {}
        for name, value in asked.items():
            given[name] = config.get(name) if value is None else value
            if given[name] not in CHOICES[name]:
                one, other = (f'"{c}"' if isinstance(c, str) else c for c in CHOICES[name])
                raise ValueError(f"{name} is {given[name]!r}; it must be {one} or {other}")
        self.settings = Settings(**given)
        self._entries: list[_Entry] = []
        _install()
        _everywhere.append(self)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings._asdict().items())
        return f"<dask_redist enabled: {settings}>"

    def disable(self) -> None:
        """Undo the call; nothing happens where that has been done."""
        if self in _everywhere:
            _everywhere.remove(self)
            _uninstall()

    def __enter__(self) -> enable:
        if self in _everywhere:
            _everywhere.remove(self)
        else:  # the same one again
            _install()
        entry = _Entry(self.settings)
        self._entries.append(entry)
        _in_context.set((*_open_here(), entry))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Contexts can end in any order, and in another thread than the one that they were for.
        ours = [entry for entry in _open_here() if entry in self._entries]
        entry = (ours or self._entries)[-1]
        self._entries.remove(entry)
        entry.open = False
        _in_context.set(_open_here())
        _uninstall()


class _Entry:
    """One block in which a hook is enabled, until it ends."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.open = True


#: the blocks around this place, the innermost last
_in_context: ContextVar[tuple[_Entry, ...]] = ContextVar("dask_redist.hook", default=())
#: hooks that were enabled by a call
_everywhere: list[enable] = []
#: Dask's own choice is being asked
_asking: ContextVar[bool] = ContextVar("dask_redist.asking", default=False)
#: clients whose cluster could not be connected
_refused: WeakSet[Client] = WeakSet()


def _open_here() -> tuple[_Entry, ...]:
    return tuple(entry for entry in _in_context.get() if entry.open)


def _settings() -> Settings | None:
    """The settings that hold here, if any do."""
    if _asking.get():
        return None
    enabled = _open_here() or _everywhere
    return enabled[-1].settings if enabled else None


# ------------------------------------------------------------------- what is put into Dask
class _Method(str):
    """A rechunk method: "p2p" where the hook is enabled, the user's own elsewhere."""

    __slots__ = ()
    __hash__ = str.__hash__

    @property
    def users(self) -> str:
        """What the user had configured; empty for nothing."""
        return str.__str__(self)

    def __bool__(self) -> bool:
        return _settings() is not None or bool(self.users)

    def __eq__(self, other: object) -> bool:
        return other == (self.users if _settings() is None else "p2p")

    def __ne__(self, other: object) -> bool:
        return not self == other


_lock = threading.Lock()
_count = 0
_original: Any = None


def _install() -> None:
    """Put the hook in, unless it is.

    Raises
    ------
    RedistError
        Dask's function takes other arguments than ours.
    """
    global _count, _original
    with _lock:
        _count += 1
        if _count > 1:
            return
        theirs = distributed.shuffle.rechunk_p2p
        wanted, found = (list(inspect.signature(f).parameters) for f in (rechunk_p2p, theirs))
        if found != wanted:
            _count = 0
            raise RedistError(
                f"distributed {version('distributed')} has rechunk_p2p({', '.join(found)}), this "
                f"dask_redist knows rechunk_p2p({', '.join(wanted)}): install another version of "
                "one of them; dask_redist.redistribute works without enable()"
            )
        if da.array_expr_enabled():
            logger.warning("array.query-planning is on: rechunks are planned and run by Dask")
            return
        try:
            _reductions.check()
        except RedistError:
            _count = 0
            raise
        _reductions.put_in()
        _original = theirs
        distributed.shuffle.rechunk_p2p = rechunk_p2p  # type: ignore[assignment]
        dask.config.set({METHOD: _Method(_users_method() or "")})


def _uninstall() -> None:
    """Take the hook out, if nobody else has it enabled."""
    global _count
    with _lock:
        _count -= 1
        if _count == 0:
            _reductions.take_out()
        if _count == 0 and distributed.shuffle.rechunk_p2p is rechunk_p2p:
            distributed.shuffle.rechunk_p2p = _original
            dask.config.set({METHOD: _users_method()})


def _users_method() -> str | None:
    """The rechunk method that the user has configured."""
    method = dask.config.get(METHOD, None)
    return method.users or None if type(method) is _Method else method


def rechunk_p2p(
    x: da.Array,
    chunks: Chunks,
    *,
    threshold: int | None = None,
    block_size_limit: int | None = None,
    balance: bool = False,
) -> da.Array:
    """Stands where Dask looks for its own; ``chunks`` are normalised, and balanced if they were to.

    Raises
    ------
    RedistError
        There can be no collective, and ``fallback="error"``.
    """
    settings = _settings()
    if settings is None:
        own: da.Array = _original(
            x, chunks, threshold=threshold, block_size_limit=block_size_limit, balance=balance
        )
        return own
    found = _ranks_for(x)
    if isinstance(found, Ranks):
        x = source_of(x)
        if x.chunks == chunks:  # there and back again
            return x
        if is_worth(x, chunks, found, settings.policy):
            if settings.policy == "auto":
                few = few_tasks(x, chunks, threshold, block_size_limit)
                if few is not None:
                    return few
            target = Target(chunks, balanced(chunks, found.size), None)
            return lay(x, target, found, simple=settings.policy == "auto")
    elif settings.fallback == "error":
        raise RedistError(f'{found}; fallback="dask" takes Dask\'s own rechunk')
    token = _asking.set(True)
    try:
        plain: da.Array = dask_rechunk(x, chunks, threshold, block_size_limit)
        return plain
    finally:
        _asking.reset(token)


def _ranks_for(x: da.Array) -> Ranks | str:
    """The ranks of the default client's cluster, or why ``x`` cannot be redistributed there."""
    if any(size != size for sizes in x.chunks for size in sizes):  # nan
        return f"chunk sizes of {x.name!r} are unknown"
    if reason := why_not(x):
        return reason
    return _cluster()


def _cluster() -> Ranks | str:
    """The ranks of the default client's cluster, or why there are none."""
    try:
        client = find_client()
    except RedistError as error:
        return str(error)
    if client in _refused and not is_connected(client):
        return "this client's cluster could not be connected"
    try:
        ranks = ranks_there(client, PATIENCE)
    except Exception as error:
        _refused.add(client)
        logger.warning("Dask's own way is taken on this client's cluster: %s", error)
        return str(error)
    return ranks if ranks.size else "the cluster has no workers yet"


def _reduce_settings() -> tuple[str, bool] | None:
    settings = _settings()
    return None if settings is None else (settings.fallback, settings.deterministic)


_reductions = ReduceHook(_reduce_settings, _cluster)
