"""Fetches blobs and other members' certificates beside the session, by digest, over as many connections as it takes."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

import grpc.aio
import structlog

from edge_client.downloads.cache import CertificateCache
from edge_client.identity.connection import CALL_BROKEN, NOT_SERVED, explain, raise_if_told_to_stop
from edge_client.session.link import Link
from edge_client.session.preparation import PreparationRefused
from tacit.attempt import AttemptId
from tacit.blobs import STALL_SECONDS, BlobDamaged, BlobNotThere, FetchMethod, fetch_blob, has_stalled
from tacit.limits import CERTIFICATES_AT_ONCE, MAX_CERTIFICATE_BYTES
from tacit.pieces import downloading
from tacit.reason import Reason
from tacit.v1 import federation_pb2 as pb

__all__ = ["Fetcher"]

log = structlog.get_logger("edge_client")


class Fetcher:
    """Fetches for one member. It accepts nothing whose digest differs from the requested one."""

    def __init__(self, link: Link, certificates: CertificateCache | None) -> None:
        """`certificates` holds those that passed every check before; None fetches all of them each time."""
        self._link = link
        self._certificates = certificates
        # One lock per digest, forgotten when nobody waits for it any more.
        self._fetching: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def blob(self, digest: bytes, into: Path, limit: int, pieces: bytes = b"") -> None:
        """Fetches a blob into a file, in pieces if there is a list of them (`tacit.pieces`).

        Args:
            digest: SHA-256 of the blob.
            into: The file, which may already hold part of the blob.
            limit: The most bytes to take. With a list of pieces, the size.
            pieces: The list.

        Raises:
            PreparationRefused: The coordinator does not have the blob, or sends another one.
        """
        # Two jobs may share a blob. The second job then finds it in the cache.
        lock = self._fetching.setdefault(digest, asyncio.Lock())
        async with lock:
            try:
                if not pieces:
                    await self._repeat(digest, partial(_whole, digest, into, limit))
                    return
                # One download over all connections: what has arrived is looked at once.
                async with downloading(digest, pieces, limit, into, damaged=partial(_warn, digest)) as download:
                    await self._repeat(digest, partial(download.fetch, patience=0))
            except (BlobNotThere, BlobDamaged) as error:
                raise PreparationRefused(Reason.REASON_BUNDLE_UNSUITABLE, str(error)) from error

    async def _repeat(self, digest: bytes, fetch: Callable[[FetchMethod], Awaitable[None]]) -> None:
        """Fetches over one connection after another, until it is done."""
        while True:
            stub = await self._link.stub()
            try:
                await fetch(self._link.down.fetching(stub.FetchBlob))
            except CALL_BROKEN as error:
                raise_if_told_to_stop(error)
                self._link.down.broke()
                if has_stalled(error):
                    log.warning("download_stalled", blob=digest.hex(), seconds=STALL_SECONDS)
                    # The coordinator answers pings and sends nothing. Another one may.
                    self._link.hang_up()
                await self._link.pause_after_failure(stub)
            else:
                return

    async def certificates(self, attempt: AttemptId, digests: Sequence[bytes]) -> tuple[bytes, ...]:
        """Returns certificates and keys with these SHA-256s, from this machine's cache or else from the coordinator.

        Those that the coordinator does not have are missing. The protocol bounds their number: at most as many as a
        roster of the cohort names. `attempt` is for the log.
        """
        found: dict[bytes, bytes] = {}
        if self._certificates is not None:
            found = await asyncio.to_thread(self._certificates.read, digests)
        lacking = [digest for digest in digests if digest not in found]
        for at in range(0, len(lacking), CERTIFICATES_AT_ONCE):
            asked = lacking[at : at + CERTIFICATES_AT_ONCE]
            got = await self._ask_for_certificates(asked)
            found |= got
            if len(got) < len(asked):
                # A missing certificate ends the attempt here, so nothing more is fetched for it.
                break
        log.info(
            "certificates_fetched",
            attempt=str(attempt),
            cached=len(digests) - len(lacking),
            fetched=len(found) - len(digests) + len(lacking),
            missing=len(digests) - len(found),
        )
        return tuple(found.values())

    async def _ask_for_certificates(self, digests: Sequence[bytes]) -> dict[bytes, bytes]:
        """Returns those that the coordinator has, by digest.

        A certificate too many, or one with another digest, ends the call. So the member never takes more than one
        certificate for each digest.
        """
        found: dict[bytes, bytes] = {}
        while True:
            stub = await self._link.stub()
            # Certificates that came over an earlier connection are not requested again.
            asked = [digest for digest in digests if digest not in found]
            try:
                call = stub.FetchCertificates(pb.FetchCertificatesRequest(digests=asked))
                at = 0
                async for part in call:
                    for certificate in part.certificates:
                        right = at < len(asked) and len(certificate) <= MAX_CERTIFICATE_BYTES
                        if certificate and (not right or hashlib.sha256(certificate).digest() != asked[at]):
                            call.cancel()
                            detail = (
                                f"the coordinator sent a certificate that was not requested, or one of more than "
                                f"{MAX_CERTIFICATE_BYTES} bytes; the rest of its answer was ignored"
                            )
                            log.warning("certificates_wrong", detail=detail)
                            return found
                        if certificate:
                            found[asked[at]] = certificate
                        at += 1
                    if not part.certificates or at > len(asked):
                        call.cancel()
                        return found
                return found
            except CALL_BROKEN as error:
                raise_if_told_to_stop(error)
                if isinstance(error, grpc.aio.AioRpcError) and error.code() in NOT_SERVED:
                    log.warning("certificates_not_served", detail=explain(error, self._link.identity))
                    return found
                await self._link.pause_after_failure(stub)

    def keep(self, certificates: Sequence[bytes]) -> None:
        """Stores certificates that passed every check. Runs in a thread. If the disk fails, they are fetched again."""
        if self._certificates is None:
            return
        try:
            self._certificates.keep(certificates)
        except OSError as error:
            log.warning("certificates_not_kept", error=str(error))


async def _whole(digest: bytes, into: Path, limit: int, method: FetchMethod) -> None:
    await fetch_blob(method, digest, into, limit=limit, patience=0)


def _warn(digest: bytes, number: int, count: int) -> None:
    log.warning("piece_damaged", blob=digest.hex(), piece=number, pieces=count)
