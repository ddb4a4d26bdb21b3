"""Connecting to a cluster: put a rank on every worker and the conductor on the scheduler."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from typing import Any
from weakref import WeakKeyDictionary

from dask.utils import parse_timedelta
from distributed import Client, default_client

from dask_redist import config
from dask_redist.errors import RedistError
from dask_redist.rank import Rank
from dask_redist.ranks import Seat
from dask_redist.scheduler import SchedulerShell

_connected: WeakKeyDictionary[Client, Ranks] = WeakKeyDictionary()


@dataclass(frozen=True)
class Ranks:
    """The ranks of a cluster, in rank order.

    Attributes
    ----------
    seats
        One entry a rank: worker name, host, address, memory limit.
    wires
        ``{(from, to): wire}`` for each pair of ranks.
    """

    seats: tuple[Seat, ...]
    wires: dict[tuple[int, int], str]

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.seats)

    def __len__(self) -> int:
        return len(self.seats)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank."""
        return tuple(seat.host for seat in self.seats)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The worker address of each rank."""
        return tuple(seat.address for seat in self.seats)

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each rank; without GPUs all are ``"cpu"``."""
        return ("cpu",) * self.size

    def _wire_words(self) -> str:
        counts = Counter(w for (a, b), w in self.wires.items() if a != b)
        return ", ".join(f"{wire} ({n} pairs)" for wire, n in counts.items()) or "none needed"

    def __repr__(self) -> str:
        hosts = len(set(self.hosts))
        return (
            f"<Ranks: {self.size} on {hosts} host{'s' if hosts != 1 else ''}, "
            f"wires: {self._wire_words()}>"
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{rank}</td><td>{escape(s.name)}</td><td>{escape(s.address)}</td>"
            f"<td>{self.devices[rank]}</td><td>{s.memory_limit / 2**30:.1f} GiB</td></tr>"
            for rank, s in enumerate(self.seats)
        )
        return (
            f"<b>{self.size} ranks</b>, wires: {escape(self._wire_words())}"
            "<table><tr><th>rank</th><th>worker</th><th>address</th><th>device</th>"
            f"<th>memory limit</th></tr>{rows}</table>"
        )


def find_client(client: Client | None = None) -> Client:
    """The given client, or the default one.

    Raises
    ------
    RedistError
        There is none; says how to make one.
    """
    if client is not None:
        if not isinstance(client, Client):
            raise RedistError(f"{client!r} is no client: use distributed.Client(...)")
        if client.status == "closed":
            raise RedistError("the client is closed: make another one with distributed.Client(...)")
        return client
    try:
        current: Client = default_client()
    except ValueError:
        raise RedistError(
            "no Dask client: make one with client = distributed.Client(n_workers=4), "
            "then dask_redist.connect(client)"
        ) from None
    return current


def ask_now(client: Client, op: str, **arguments: Any) -> Any:
    """Call a handler of the conductor, and wait for the answer.

    Raises
    ------
    RedistError
        An asynchronous client, which cannot be waited for.
    """
    if client.asynchronous:
        raise RedistError(
            "this client is asynchronous and cannot be asked from here; use a client that is not, "
            f"or await client.scheduler.{op}(...)"
        )
    return client.sync(ask, client, op, **arguments)


async def ask(client: Client, op: str, **arguments: Any) -> Any:
    """Call a handler of the conductor on the client's scheduler."""
    return await getattr(client.scheduler, op)(**arguments)


def connect(
    client: Client | None = None, n_ranks: int | None = None, timeout: float | str | None = None
) -> Any:
    """Put a rank on each worker of a cluster; workers that come later join by themselves.

    Parameters
    ----------
    client : distributed.Client, optional
        The cluster's client; default: the current one.
    n_ranks : int, optional
        Wait until there are so many ranks; default: as many as there are workers.
    timeout : float or str, optional
        Seconds to wait, or a text such as "5s"; default: ``redist.timeout``.

    Returns
    -------
    Ranks
        Or, with an asynchronous client, an awaitable of it. Calling again is cheap and returns
        the ranks as they are then.

    Raises
    ------
    RedistError
        No client.
    RunTimeoutError
        The ranks did not come in time; names who is missing.

    Examples
    --------
    >>> from distributed import Client
    >>> with Client(n_workers=2, threads_per_worker=1, processes=False,
    ...             dashboard_address=":0") as client:
    ...     connect(client)
    <Ranks: 2 on 1 host, wires: direct (2 pairs)>
    """
    client = find_client(client)
    if n_ranks is not None and (not isinstance(n_ranks, int) or n_ranks < 1):
        raise ValueError(f"n_ranks is {n_ranks!r}; it must be a whole number from 1")
    seconds = config.seconds("timeout") if timeout is None else parse_timedelta(timeout, "s")
    return client.sync(_connect, client, n_ranks, seconds)


async def _connect(client: Client, n_ranks: int | None, timeout: float) -> Ranks:
    before = _connected.get(client)
    if before is None:
        await _put(client, SchedulerShell(), "the scheduler")
        await _put(client, Rank(), "a worker")
    known = [seat.seat for seat in before.seats] if before else []
    reply = await ask(client, "redist_connect", n_ranks=n_ranks, timeout=timeout, known=known)
    if before is not None and "same" in reply:
        return before
    seats = tuple(Seat.of(row) for row in reply["ranks"])
    rank = {seat.seat: r for r, seat in enumerate(seats)}
    wires = {
        (rank[a], rank[b]): wire
        for a, row in reply["wires"].items()
        for b, wire in row.items()
        if a in rank and b in rank
    }
    _connected[client] = ranks = Ranks(seats, wires)
    return ranks


async def _put(client: Client, plugin: SchedulerShell | Rank, where: str) -> None:
    """Register a plugin.

    Raises
    ------
    RedistError
        The package is not there.
    """
    try:
        await client.register_plugin(plugin)
    except Exception as error:  # Dask passes some of its texts on only
        if "No module named 'dask_redist'" in str(error):
            if isinstance(plugin, Rank):  # it would keep workers that lack it from joining later
                with suppress(Exception):
                    await client.scheduler.unregister_worker_plugin(name=plugin.name)  # type: ignore[union-attr]
            raise RedistError(
                f"{where} of {client!r} cannot import dask_redist: install it where the scheduler "
                "and the workers run (pip install dask-redist), and start them again"
            ) from error
        raise


def is_connected(client: Client) -> bool:
    """Whether :func:`connect` has ever succeeded with this client."""
    return client in _connected


def ranks_there(client: Client, patience: float) -> Ranks:
    """The ranks that there are at once, possibly none; connects if nobody has.

    Raises
    ------
    RedistError
        As :func:`ranks_of`.
    RunTimeoutError
        Workers that are there did not answer within ``patience`` seconds.
    TimeoutError
        The scheduler did not answer.
    """
    if client.asynchronous:
        return ranks_of(client)
    patience = min(patience, config.seconds("timeout"))
    # The scheduler is the one who names workers that are late: it gets a little longer.
    ranks: Ranks = client.sync(_connect, client, 0, patience, callback_timeout=patience + 2)
    return ranks


def ranks_of(client: Client) -> Ranks:
    """The ranks of a client's cluster now; connects if nobody has.

    Raises
    ------
    RedistError
        An asynchronous client that is not connected yet (nothing can be awaited here).
    """
    if client.asynchronous:
        try:
            return _connected[client]
        except KeyError:
            raise RedistError(
                "this client is asynchronous: await dask_redist.connect(client) first"
            ) from None
    ranks: Ranks = connect(client)
    return ranks
