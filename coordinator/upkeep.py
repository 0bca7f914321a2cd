"""Periodic checks of a serving coordinator: revoked operators, changes that it missed, its authorities and certificate,
figures.

Commands on the machine work on the folder and the database beside the server, and their changes take effect here a few
seconds later. So does what the database committed although its answer was lost (`Runtime.catch_up`). When the
authorities change, the coordinator first tells members, and only then lets the next authority issue. So connected
members know that authority before they meet its first certificate.

A check that fails is logged and repeated, and keeps no other one from running. Nor does one that hangs, as one that
asks a store may: the others wait for it a moment, once, and it is not begun again before it has ended.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from typing import Any

import structlog

from coordinator.authority import Anchors, load_authorities, written
from coordinator.config import CoordinatorConfig, CoordinatorFolder
from coordinator.metrics import Metrics
from coordinator.pki import AuthorityUnusable, LifetimeOutOfRange
from coordinator.runtime import Runtime
from coordinator.services.credentials import certificate_end, refresh_server_certificate
from coordinator.services.operators import end_over
from coordinator.storage import mark, records
from coordinator.storage.chain import JournalEntry
from coordinator.storage.journal import newest_of
from tacit.messages import AuthoritiesChanged

__all__ = ["Upkeep"]

log = structlog.get_logger("coordinator")

# Seconds between two checks of the folder and of the list of operators.
_LOOK = 2.0
# Checks between two reads of all members (fewer if a member changed), and between two checks of the certificate.
_FIGURES_EVERY, _CERTIFICATE_EVERY = 30, 1800
# Seconds for which the others wait for a check, and after which the log has one that has not ended.
_PATIENCE, _HANGS = 5.0, 60.0


class Upkeep:
    """Runs the periodic checks. Started once, in the coordinator's event loop."""

    def __init__(
        self,
        folder: CoordinatorFolder,
        config: CoordinatorConfig,
        anchors: Anchors,
        runtime: Runtime,
        metrics: Metrics,
        passphrase: bytes | None = None,
        *,
        seen: tuple[int, int],
    ) -> None:
        """Creates it. `seen` is what `written` returned before the authorities in `anchors` were read."""
        self._folder = folder
        self._config = config
        self._anchors = anchors
        self._runtime = runtime
        self._metrics = metrics
        self._passphrase = passphrase
        self._seen = seen
        self._certificate_due = self._members_changed = self._store_due = True
        # The newest journal entry that was read, and the one in the folder's mark.
        self._entry: int | None = None
        self._marked: int | None = None
        # In this order: who must not go on, then who joined, then what reads and writes the folder.
        self._checks: Mapping[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "operators": self._operators,
            "missed": self._missed,
            "roster": self._roster,
            "authorities": self._authorities,
            "certificate": self._certificate,
            "figures": self._figures,
            "journal": self._journal,
            "store": self._store,
        }
        # By check: one that has begun and not ended, and since when.
        self._under_way: dict[str, tuple[asyncio.Task[None], float]] = {}
        # By check: what was said of its failure, which repeats every few seconds.
        self._said: dict[str, str] = {}

    def members_changed(self, _: object = None) -> None:
        """Lets the next check read all members again, as a certificate was issued or withdrawn."""
        self._members_changed = True

    async def first_look(self) -> None:
        """Runs every check once, to its end.

        Raises:
            Exception: what the first one that failed raised.
        """
        for failure in await self._look(None):
            raise failure

    async def run(self) -> None:
        """Runs every check every two seconds, some of them less often, until it is cancelled."""
        looks = 0
        try:
            while True:
                self._certificate_due |= looks % _CERTIFICATE_EVERY == 0
                if looks % _FIGURES_EVERY == 0:
                    self._members_changed = self._store_due = True
                await self._look(_PATIENCE)
                looks += 1
                await asyncio.sleep(_LOOK)
        finally:
            for task, _ in self._under_way.values():
                task.cancel()

    async def _look(self, patience: float | None) -> list[BaseException]:
        """Runs every check that is not under way, and returns what failed, in order. The log has a failure once.

        Args:
            patience: How many seconds to wait for a check. None: until it ends.
        """
        failures: list[BaseException] = []
        for name, check in self._checks.items():
            begins = name not in self._under_way
            if begins:
                self._under_way[name] = asyncio.create_task(check(), name=f"upkeep {name}"), time.monotonic()
            task, since = self._under_way[name]
            await asyncio.wait({task}, timeout=patience if begins else 0)
            if task.done():
                del self._under_way[name]
                # Whatever it is, the other checks go on.
                failure = task.exception()
            elif time.monotonic() - since < _HANGS:
                continue
            else:
                failure = TimeoutError(f"it has not ended for {_HANGS:g} seconds; the disk or the store may hang")
            if failure is None:
                self._said.pop(name, None)
                continue
            failures.append(failure)
            if self._said.get(name) != str(failure):
                log.error("upkeep_failed", check=name, error=str(failure))
            self._said[name] = str(failure)
        return failures

    async def _operators(self) -> None:
        await end_over(self._runtime.database, datetime.now(UTC))

    async def _missed(self) -> None:
        await self._runtime.catch_up()

    async def _roster(self) -> None:
        if self._runtime.roster is not None:
            # Commands beside the server revoke members and import certificates.
            await self._runtime.roster.refresh()

    async def _authorities(self) -> None:
        if (now := written(self._folder)) != self._seen or self._anchors.book.is_outlived(datetime.now(UTC)):
            await self._change()
            self._seen = now
            self._certificate_due = True

    async def _change(self) -> None:
        present = datetime.now(UTC)
        elsewhere = self._config.authority_elsewhere
        book = await asyncio.to_thread(
            load_authorities, self._folder, now=present, passphrase=self._passphrase, elsewhere=elsewhere
        )
        # Do this first: a member that learns of a retired authority must not meet a server that it certified. A member
        # that does not know the next authority yet asks for the list, and the previous list already has it.
        await asyncio.to_thread(refresh_server_certificate, self._folder, self._config, book.serving, present)
        # There is no await between these lines: each session is either open now and told, or opens later and gets the
        # new list.
        self._runtime.trust(book.trust)
        self._runtime.sessions.tell(AuthoritiesChanged(book.document))
        self._anchors.book = book
        log.info(
            "authorities_changed",
            newest=book.issuing.fingerprint.hex()[:16],
            trusted=len(book.trust.roots),
            number=book.authorities.number,
        )

    async def _certificate(self) -> None:
        if not self._certificate_due:
            return
        book = self._anchors.book
        try:
            made = await asyncio.to_thread(
                refresh_server_certificate, self._folder, self._config, book.serving, datetime.now(UTC)
            )
        except (OSError, AuthorityUnusable, LifetimeOutOfRange) as error:
            log.error("server_certificate_not_renewed", error=str(error))
        else:
            if made:
                log.info("server_certificate_renewed")
        self._metrics.certificate_expires("server", certificate_end(self._folder.server_certificate))
        self._metrics.certificate_expires("authority", book.serving.certificate.not_valid_after_utc.timestamp())
        if book.issuing != book.serving:
            end = book.issuing.certificate.not_valid_after_utc.timestamp()
            self._metrics.certificate_expires("next_authority", end)
        else:
            self._metrics.certificate_gone("next_authority")
        self._certificate_due = False

    async def _journal(self) -> None:
        """Logs what commands beside the server wrote to the journal, and updates the folder's mark."""
        before, database = self._entry, self._runtime.database

        def read(s: records.Session) -> tuple[records.Head, bool, JournalEntry | None, JournalEntry | None]:
            newest, here = records.head(s), database.written_here()
            beside = before is None or any(number not in here for number in range(before + 1, newest.id + 1))
            # A backup does not contain the entries that it is complete and whole. A database that was restored from
            # it tells so: a restore reads the whole backup first.
            made, verified = (
                newest_of(s, kind, "restored", after=before or 0) for kind in ("backup_made", "backup_verified")
            )
            return newest, beside, made, verified

        newest, beside, made, verified = await database.run(read)
        if made is not None:
            self._metrics.backup_made(_number(made, "made_ms") / 1000)
        if verified is not None:
            self._metrics.backups_verified(_number(verified, "made_ms") / 1000, _number(verified, "damaged"))
        if newest.id != before and beside:
            log.info("journal_head", entry=newest.id, head=newest.hash.hex())
        self._entry = newest.id
        if newest.id != self._marked:
            await asyncio.to_thread(mark.keep, self._folder.database_mark, self._config.database_url, newest)
            self._marked = newest.id

    async def _figures(self) -> None:
        if not self._members_changed:
            return
        self._members_changed = False

        def read(s: records.Session) -> tuple[dict[str, int], list[float]]:
            counts = Counter({status.value: 0 for status in records.MemberStatus})
            counts.update(member.status.value for member in records.members(s))
            return dict(counts), [expires / 1000 for _, expires in records.member_certificates(s).values()]

        try:
            counts, expires = await self._runtime.database.run(read)
        except Exception:
            self._members_changed = True
            raise
        self._metrics.members(counts)
        self._metrics.member_certificates(expires)

    async def _store(self) -> None:
        if not self._store_due:
            return
        if (stored := await self._runtime.store.apart.run(self._runtime.store.measure)) is not None:
            self._metrics.store_holds(*stored)
        self._store_due = False


def _number(entry: JournalEntry, name: str) -> int:
    """Returns a number of an entry; 0 if it has none of this name."""
    return int(str(entry.fields.get(name, 0)))
