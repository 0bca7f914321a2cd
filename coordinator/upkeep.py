"""Periodic checks of a serving coordinator: its certificate, its authorities, revoked operators, certificate metrics.

`coordinator authority` and `coordinator operator` work on the folder and the database beside the server, and their
changes take effect here a few seconds later. When the authorities change, the coordinator first tells members, and only
then lets the next authority issue. So connected members know that authority before they meet its first certificate.
"""

import asyncio
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import structlog

from coordinator.authority import Anchors, load_authorities, written
from coordinator.config import CoordinatorConfig, CoordinatorFolder
from coordinator.metrics import Metrics
from coordinator.pki import AuthorityUnusable, LifetimeOutOfRange
from coordinator.runtime import Runtime
from coordinator.services.credentials import refresh_server_certificate
from coordinator.services.operators import end_over
from coordinator.storage import mark, records
from coordinator.storage.errors import StorageError
from coordinator.storage.journal import newest_of
from tacit.certificates import certificate_from_pem
from tacit.messages import AuthoritiesChanged

__all__ = ["Upkeep"]

log = structlog.get_logger("coordinator")

# Seconds between two checks of the folder and of the list of operators.
_LOOK = 2.0
# Checks between two reads of all members (fewer if a member changed), and between two checks of the certificate.
_FIGURES_EVERY, _CERTIFICATE_EVERY = 30, 1800


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
    ) -> None:
        self._folder = folder
        self._config = config
        self._anchors = anchors
        self._runtime = runtime
        self._metrics = metrics
        self._passphrase = passphrase
        self._seen = written(folder)
        self._members_changed = True
        # The newest journal entry that was read.
        self._entry: int | None = None

    def members_changed(self, _: object = None) -> None:
        """Lets the next check read all members again, as a certificate was issued or withdrawn."""
        self._members_changed = True

    async def run(self) -> None:
        """Runs until cancelled. A failing check is logged and repeated."""
        looks, said = 0, ""
        while True:
            try:
                await self.look(certificate=looks % _CERTIFICATE_EVERY == 0, figures=looks % _FIGURES_EVERY == 0)
                said = ""
            except (OSError, AuthorityUnusable, LifetimeOutOfRange, StorageError) as error:
                # Log a failure once, although it repeats every few seconds.
                if str(error) != said:
                    log.error("upkeep_failed", error=str(error))
                said = str(error)
            looks += 1
            await asyncio.sleep(_LOOK)

    async def look(self, *, certificate: bool = True, figures: bool = True) -> None:
        """Runs one check.

        Args:
            certificate: Whether to check the server's certificate.
            figures: Whether to read all members.

        Raises:
            OSError, AuthorityUnusable, LifetimeOutOfRange, StorageError: a check failed.
        """
        if (now := written(self._folder)) != self._seen or self._anchors.book.is_outlived(datetime.now(UTC)):
            await self._change()
            self._seen = now
            certificate = True
        await end_over(self._runtime.database, datetime.now(UTC))
        if self._runtime.roster is not None:
            # Commands beside the server revoke members and import certificates.
            await self._runtime.roster.refresh()
        if certificate:
            await self._certificate()
        if figures or self._members_changed:
            self._members_changed = False
            await self._figures()
        # Do this last, so that a folder that cannot be written prevents no other check.
        await self._journal()

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
        book = self._anchors.book
        try:
            made = await asyncio.to_thread(
                refresh_server_certificate, self._folder, self._config, book.serving, datetime.now(UTC)
            )
        except (OSError, LifetimeOutOfRange) as error:
            log.error("server_certificate_not_renewed", error=str(error))
        else:
            if made:
                log.info("server_certificate_renewed")
        self._metrics.certificate_expires("server", _end(self._folder.server_certificate))
        self._metrics.certificate_expires("authority", book.serving.certificate.not_valid_after_utc.timestamp())
        if book.issuing != book.serving:
            end = book.issuing.certificate.not_valid_after_utc.timestamp()
            self._metrics.certificate_expires("next_authority", end)
        else:
            self._metrics.certificate_gone("next_authority")

    async def _journal(self) -> None:
        """Logs what commands beside the server wrote to the journal, and updates the folder's mark."""
        before, database = self._entry, self._runtime.database

        def read(s: records.Session) -> tuple[records.Head, int | None, bool]:
            newest, here = records.head(s), database.written_here()
            # A backup does not contain the entry that it is complete. A database that was restored from it tells so.
            since = newest_of(s, "backup_made", "restored", after=before or 0)
            beside = before is None or any(number not in here for number in range(before + 1, newest.id + 1))
            return newest, None if since is None else int(str(since.fields["made_ms"])), beside

        newest, backup_ms, beside = await database.run(read)
        if newest.id == before:
            return
        if backup_ms is not None:
            self._metrics.backup_made(backup_ms / 1000)
        if beside:
            log.info("journal_head", entry=newest.id, head=newest.hash.hex())
        self._entry = newest.id
        await asyncio.to_thread(mark.keep, self._folder.database_mark, self._config.database_url, newest)

    async def _figures(self) -> None:
        def read(s: records.Session) -> tuple[dict[str, int], list[float]]:
            counts = Counter({status.value: 0 for status in records.MemberStatus})
            counts.update(member.status.value for member in records.members(s))
            return dict(counts), [expires / 1000 for _, expires in records.member_certificates(s).values()]

        counts, expires = await self._runtime.database.run(read)
        self._metrics.members(counts)
        self._metrics.member_certificates(expires)
        if (stored := await self._runtime.store.apart.run(self._runtime.store.measure)) is not None:
            self._metrics.store_holds(*stored)


def _end(path: Path) -> float:
    """Returns when the first certificate in a file ends, in seconds since 1970."""
    return certificate_from_pem(path.read_bytes()).not_valid_after_utc.timestamp()
