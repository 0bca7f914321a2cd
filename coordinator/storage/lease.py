"""The lease: which of several coordinators over one PostgreSQL is the active one.

The table `lease` has one row: the fence (a number that grows with each holder), the holder, its address, and when the
lease ends by the database's own clock. The active coordinator renews it every `RENEW_SECONDS`; a standby takes it once
it has ended or was released, with the next fence.

Guarantees:

- Of all transactions that `Database` commits under a fence, each commits before the next holder takes the lease, or
  not at all. A writing transaction locks the row by its fence (FOR KEY SHARE) until its commit. Taking the lease
  changes the fence, which is the row's key, and so waits for such transactions and refuses later ones. Renewing changes
  no key and waits for nobody.
- No clock of a coordinator's machine decides who holds the lease. The holder's own clock only makes it stop earlier: it
  counts from before it asked, and `MARGIN_SECONDS` less.
- A coordinator that stops in the middle of a transaction keeps its locks for `database.IDLE_SECONDS` at most, or
  `MAX_IDLE_SECONDS` if it renewed or took the lease: the database ends such a connection
  (idle_in_transaction_session_timeout). Both times are shorter than the lease lasts.

The holder renews from a thread of its own, so a busy event loop delays nothing. A second thread only reads the clock,
because a connection to a database that has vanished may block the first one for longer than the lease lasts.
"""

import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass

import structlog
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from coordinator.storage import mark
from coordinator.storage.database import Fence, engine_of, shown, try_no_offline_work, words_of
from coordinator.storage.errors import DatabaseUnusable
from coordinator.storage.journal import Value, lock_appends, note

__all__ = [
    "LEASE_SECONDS",
    "MAX_IDLE_SECONDS",
    "Candidate",
    "Held",
    "Lease",
    "Term",
    "how_taken",
    "monotonic",
    "take",
]

log = structlog.get_logger("coordinator.lease")

# The lease lasts this long after each renewal.
LEASE_SECONDS = 5.0
RENEW_SECONDS = 1.5
# The holder stops this much earlier than the lease ends.
MARGIN_SECONDS = 0.5
# Pause after a renewal that failed, and between two readings of the clock.
_RETRY_SECONDS, _WATCH_SECONDS = 0.5, 0.1
# Taking the lease waits for no lock for longer.
MAX_LOCK_MS = 2000
# They keep their locks for so long when their process stops in a transaction. A renewal begins RENEW_SECONDS after the
# one before, so its lock is gone before the lease ends.
MAX_IDLE_SECONDS = 2
_CONNECT = {
    "connect_timeout": "2",
    "tcp_user_timeout": "3000",
    "keepalives_idle": "2",
    "keepalives_interval": "1",
    "keepalives_count": "2",
    "application_name": "tacit coordinator (lease)",
}
_NOW = "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)"


@dataclass(frozen=True, slots=True)
class Lease:
    """The row. Times are milliseconds since 1970 by the database's clock."""

    fence: int
    # Empty once released.
    holder: str
    # host:port at which members reach the holder.
    address: str
    since_ms: int
    expires_ms: int


def how_taken(lease: Lease, now_ms: int) -> str | None:
    """Returns how somebody else may take the lease now: `first`, `released` or `expired`. None: not now.

    Args:
        lease: The row.
        now_ms: The database's time.
    """
    if lease.fence == 0:
        return "first"
    if not lease.holder:
        return "released"
    return "expired" if lease.expires_ms <= now_ms else None


def monotonic() -> float:
    """Returns seconds that also pass while this machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Term:
    """Until when the holder may believe that it holds the lease, by its own clock. May be used from any thread."""

    def __init__(self, asked: float, *, lasts: float = LEASE_SECONDS, margin: float = MARGIN_SECONDS) -> None:
        """Begins with a lease that was asked for at `asked` (seconds, see `monotonic`)."""
        self._lasts = lasts - margin
        self._until = asked + self._lasts

    def renewed(self, asked: float) -> None:
        """Notes a renewal that was asked for at `asked`. The lease ends no earlier than that plus its length."""
        self._until = max(self._until, asked + self._lasts)

    def runs(self, now: float) -> bool:
        """Whether the lease is certainly held at `now`."""
        return now < self._until


class Held:
    """A lease that this process holds, renewed until `release`. Made by `Candidate.take`."""

    def __init__(
        self,
        engine: Engine,
        lease: Lease,
        asked: float,
        lost: Callable[[str], None],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Starts to renew.

        Args:
            engine: The lease's own connections.
            lease: The row as taken.
            asked: When it was asked for, by `clock`.
            lost: Told why, at most once, when the lease is lost. It must end this process's work at once.
            clock: See `monotonic`.
        """
        self.lease = lease
        self._engine = engine
        self._term = Term(asked)
        self._clock = clock
        self._tell = lost
        self._told = threading.Lock()
        self._ended = threading.Event()
        self.fence = Fence(lease.fence, lease.holder, self._lost)
        self._threads = [
            threading.Thread(target=work, name=f"lease-{name}", daemon=True)
            for name, work in (("renewal", self._renew), ("watch", self._watch))
        ]
        for thread in self._threads:
            thread.start()

    def runs(self) -> bool:
        """Whether the lease is certainly held now. Costs one reading of the clock."""
        return not self._ended.is_set() and self._term.runs(self._clock())

    def release(self) -> None:
        """Lets another coordinator take the lease at once. Call it after the last transaction."""
        self._ended.set()
        for thread in self._threads:
            thread.join(LEASE_SECONDS)
        # If the database does not answer, the lease ends by itself.
        with contextlib.suppress(DBAPIError, DatabaseUnusable), self._engine.begin() as connection:
            connection.execute(
                text("UPDATE lease SET holder = '', expires_ms = 0 WHERE fence = :fence AND holder = :holder"),
                {"fence": self.lease.fence, "holder": self.lease.holder},
            )
        self._engine.dispose()

    def _renew(self) -> None:
        wait, failing = RENEW_SECONDS, False
        while not self._ended.wait(wait):
            asked = self._clock()
            try:
                with self._engine.begin() as connection:
                    renewed = connection.execute(
                        text(
                            f"UPDATE lease SET expires_ms = {_NOW} + :lasts "  # noqa: S608  constants
                            "WHERE fence = :fence AND holder = :holder"
                        ),
                        {
                            "lasts": int(LEASE_SECONDS * 1000),
                            "fence": self.lease.fence,
                            "holder": self.lease.holder,
                        },
                    ).rowcount
            except (DBAPIError, DatabaseUnusable) as error:
                if not failing:
                    detail = words_of(error) if isinstance(error, DBAPIError) else str(error)
                    log.warning("lease_not_renewed", fence=self.lease.fence, error=detail)
                wait, failing = _RETRY_SECONDS, True
                continue
            if not renewed:
                self._lost(f"another coordinator has taken the lease {self.lease.fence}")
                return
            self._term.renewed(asked)
            wait, failing = RENEW_SECONDS, False

    def _watch(self) -> None:
        while not self._ended.wait(_WATCH_SECONDS):
            if not self._term.runs(self._clock()):
                self._lost(
                    f"the lease {self.lease.fence} could not be renewed for {LEASE_SECONDS - MARGIN_SECONDS:.1f} "
                    "seconds, so another coordinator may have taken it"
                )
                return

    def _lost(self, why: str) -> None:
        if self._told.acquire(blocking=False):
            self._ended.set()
            self._tell(why)


class Candidate:
    """A coordinator that wants the lease. Its methods block; call them from one thread at a time."""

    def __init__(self, url: str, address: str, holder: str | None = None) -> None:
        """Prepares to ask.

        Args:
            url: The database, a PostgreSQL one with the present schema.
            address: host:port at which members would reach this coordinator.
            holder: A name that no other process has; a random one by default.
        """
        self._engine = engine_of(url, connect=_CONNECT, idle_seconds=MAX_IDLE_SECONDS)
        self._holder = holder or uuid.uuid4().hex
        self._address = address

    def take(self, lost: Callable[[str], None], clock: Callable[[], float] = monotonic) -> Held | Lease:
        """Takes the lease if it may, and starts to renew it. Otherwise returns the row: who holds it.

        Args:
            lost: See `Held`.
            clock: See `monotonic`.

        Raises:
            DatabaseUnusable: the database does not answer, or is not ours.
        """
        asked = clock()
        try:
            with Session(self._engine) as session:
                # Reading locks nothing, so any number of standbys may ask often.
                present, now_ms = _read(session)
                if how_taken(present, now_ms) is None:
                    return present
                session.rollback()
                taken, held = take(session, self._holder, self._address)
                session.commit()
        except DBAPIError as error:
            where = shown(self._engine.url)
            raise DatabaseUnusable(
                f"the lease in the database {where} cannot be read or taken: {words_of(error)}; check that it answers"
            ) from error
        return Held(self._engine, taken, asked, lost, clock) if held else taken

    def close(self) -> None:
        """Ends the connections of a candidate that takes no lease any more. A `Held` one goes on."""
        self._engine.dispose()


def take(session: Session, holder: str, address: str) -> tuple[Lease, bool]:
    """Takes the lease, if it may be taken, in the session's transaction. The caller commits.

    It waits for transactions that have locked the lease, at most `MAX_LOCK_MS`; then the session raises DBAPIError.

    Returns:
        The row, and whether it is now the caller's.
    """
    session.execute(text(f"SET LOCAL lock_timeout = {MAX_LOCK_MS}"))
    if not try_no_offline_work(session):
        present, _now_ms = _read(session)
        return present, False
    # The journal's lock first: a transaction of the present holder takes it before it locks the lease.
    lock_appends(session)
    session.execute(
        text(
            "INSERT INTO lease (one, fence, holder, address, since_ms, expires_ms) VALUES (1, 0, '', '', 0, 0) "
            "ON CONFLICT (one) DO NOTHING"
        )
    )
    before, now_ms = _read(session, " FOR UPDATE")
    how = how_taken(before, now_ms)
    if how is None:
        return before, False
    taken = Lease(before.fence + 1, holder, address, now_ms, now_ms + int(LEASE_SECONDS * 1000))
    session.execute(
        text(
            "UPDATE lease SET fence = :fence, holder = :holder, address = :address, since_ms = :since_ms, "
            "expires_ms = :expires_ms"
        ),
        asdict(taken),
    )
    mark.begin(session, now_ms)
    fields: dict[str, Value] = {"fence": taken.fence, "address": address, "how": how, "before": before.address}
    note(session, "lease_taken", "coordinator", now_ms, **fields)
    return taken, True


def _read(session: Session, lock: str = "") -> tuple[Lease, int]:
    query = f"SELECT fence, holder, address, since_ms, expires_ms, {_NOW} FROM lease{lock}"  # noqa: S608  constants
    row = session.execute(text(query)).one_or_none()
    if row is None:
        return Lease(0, "", "", 0, 0), 0
    fence, holder, address, since_ms, expires_ms, now_ms = row
    return Lease(int(fence), str(holder), str(address), int(since_ms), int(expires_ms)), int(now_ms)
