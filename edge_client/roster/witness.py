"""A witness of a federation's roster log: it signs each head that continues the one before, and no other.

It runs on a machine of its own and is no member. It sees heads and proofs, which name nobody. Its folder holds:

    key.pem       0600, Ed25519, made here; members pin its public half in `witnesses`
    log.jsonl     what it has seen (`tacit.roster_copy`): the newest head, and heads that contradict it

A head is on the disk before the witness signs it. So it never signs two logs, also after a crash.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import grpc
import grpc.aio
import structlog
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from edge_client.identity.connection import channel_options, explain
from edge_client.identity.handshake import HandshakeFailed, find_root, shake_hands
from edge_client.identity.renewal import asked_authorities
from secure_agg.transparency import is_consistent
from tacit.authorities import Authorities, AuthoritiesInvalid
from tacit.guard import guarded
from tacit.roster import Cosignature, HeadInvalid, SignedHead
from tacit.roster_copy import Copy, CopyInvalid, read_copy, write_copy
from tacit.roster_wire import cosignature_to_pb, head_from_pb, proof_from_pb
from tacit.v1 import enrolment_pb2, enrolment_pb2_grpc
from tacit.v1 import federation_pb2 as pb
from toolkit.durable import durable_file
from toolkit.private_files import NotPrivate, check_secret

__all__ = ["NobodyAnswers", "ServerUnknown", "Witness", "WitnessRefuses", "WitnessUnusable"]

log = structlog.get_logger("edge_client")

_SECONDS = 20.0


class WitnessUnusable(Exception):
    """The witness's folder cannot be used. The sentence says what to do."""


class WitnessRefuses(Exception):
    """The coordinator's log does not continue what this witness has seen. The sentence says why."""


class ServerUnknown(Exception):
    """A server does not prove that it belongs to the federation. The sentence says why.

    Anybody can bring this about without any key of the federation, so it says nothing about the log.
    """


class NobodyAnswers(Exception):
    """No coordinator serves at any of the addresses. The sentence says why, for each."""


@dataclass(frozen=True)
class Witness:
    """A witness's folder."""

    folder: Path

    @property
    def log(self) -> Path:
        """What the witness has seen."""
        return self.folder / "log.jsonl"

    def key(self) -> Ed25519PrivateKey:
        """Returns the key. The first call makes it.

        Raises:
            WitnessUnusable: it cannot be read or written, or others may read it.
        """
        path = self.folder / "key.pem"
        try:
            if not path.exists():
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                made = Ed25519PrivateKey.generate()
                encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
                durable_file(path, made.private_bytes(encoding, form, serialization.NoEncryption()))
            check_secret(path)
            found = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except NotPrivate as error:
            raise WitnessUnusable(str(error)) from error
        except OSError as error:
            raise WitnessUnusable(
                f"{path} cannot be used: {error.strerror}; check --folder, its permissions and free space"
            ) from error
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise WitnessUnusable(f"{path} holds no key; restore it from a copy, or use another --folder") from error
        if not isinstance(found, Ed25519PrivateKey):
            raise WitnessUnusable(f"{path} is not an Ed25519 key; use another --folder")
        return found

    async def look_at_any(self, addresses: Sequence[str], federation: bytes) -> tuple[SignedHead, str]:
        """Looks at the first address where a coordinator serves. Standbys refuse; one that is down is passed over.

        So is a server that cannot prove that it belongs to the federation, which is logged as an error: otherwise
        whoever answers at one address could stop the witness.

        Args:
            addresses: host:port of each coordinator's enrolment port, in the order in which to try them.
            federation: the federation's name, 32 bytes.

        Returns:
            The head that was signed, and the address that showed it.

        Raises:
            NobodyAnswers: every address failed.
            WitnessRefuses, WitnessUnusable: as `look`. No other address is tried then: a log that does not hold is not
                outweighed by another one.
        """
        failed = []
        for address in addresses:
            try:
                return await self.look(address, federation), address
            except HandshakeFailed as error:
                failed.append(error.sentence)
            except ServerUnknown as error:
                log.error("server_unknown", address=address, detail=str(error))
                failed.append(str(error))
            except grpc.aio.AioRpcError as error:
                failed.append(explain(error, address=address))
        raise NobodyAnswers("; ".join(failed))

    async def look(self, address: str, federation: bytes) -> SignedHead:
        """Fetches the newest head, checks that it continues the one before, stores it and signs it.

        Args:
            address: host:port of the coordinator's enrolment port.
            federation: the federation's name, 32 bytes.

        Returns:
            The head that was signed.

        Raises:
            WitnessRefuses: the head does not hold, or does not continue the one before; or the authorities are signed,
                and contradict the ones that this witness knows.
            WitnessUnusable: the folder cannot be used.
            ServerUnknown: the server shows no authorities that the federation's first root vouches for.
            HandshakeFailed, grpc.aio.AioRpcError: the coordinator cannot be reached.
        """
        key, known = self.key(), self._known(federation)
        try:
            authorities = await _authorities(address, federation)
        except ValueError as error:
            raise ServerUnknown(f"the server at {address} cannot be trusted: {error}") from error
        if known is not None:
            try:
                if authorities.follows(known.authorities):
                    known = replace(known, authorities=authorities)
            except AuthoritiesInvalid as error:
                # Only an authority's key can sign such a list.
                raise WitnessRefuses(f"the server at {address} cannot be trusted: {error}") from error
            authorities = known.authorities
        copy = known or Copy("the witness's copy", authorities)
        credentials = grpc.ssl_channel_credentials(root_certificates=authorities.trust.pem)
        async with guarded(grpc.aio.secure_channel(address, credentials, options=channel_options())) as channel:
            stub = enrolment_pb2_grpc.EnrolmentServiceStub(channel)
            request = enrolment_pb2.FetchHeadRequest(known=copy.size)
            answer = await stub.FetchHead(request, timeout=_SECONDS)
            try:
                signed = head_from_pb(answer.head, federation)
                signed.check(authorities.history)
                signed.check_time(datetime.now(UTC))
                proof = proof_from_pb(answer)
            except HeadInvalid as error:
                raise WitnessRefuses(f"the head of the roster log does not hold: {error}") from error
            copy = self._continued(copy, signed, proof)
            made = Cosignature.by_witness(signed.head, key, time.time_ns() // 1_000_000)
            self._write(replace(copy, cosignatures=(made,)))
            await stub.Witness(pb.CosignRequest(cosignature=cosignature_to_pb(made)), timeout=_SECONDS)
        return signed

    def _continued(self, copy: Copy, signed: SignedHead, proof: tuple[bytes, ...]) -> Copy:
        if not copy.heads:
            return replace(copy, heads=(signed,))
        last, head = copy.heads[-1].head, signed.head
        if head.size >= last.size and is_consistent(last.size, last.root, head.size, head.root, proof):
            return replace(copy, heads=(signed,))
        if signed.head.root not in {each.head.root for each in copy.contradictions}:
            # The two signatures are the proof, so both heads stay.
            self._write(replace(copy, contradictions=(*copy.contradictions, signed)))
        what = "is shorter than" if head.size < last.size else "does not continue"
        raise WitnessRefuses(
            f"SPLIT VIEW OR ROLLBACK: the roster log of {head.size} entries that the coordinator shows {what} the one "
            f"of {last.size} that this witness has seen. It signs nothing. {self.log} holds both signed heads; send it "
            "to the members, who compare it with `edge_client members --verify FILE`"
        )

    def _known(self, federation: bytes) -> Copy | None:
        if not self.log.exists():
            return None
        try:
            return replace(read_copy(self.log, federation), what="the witness's copy")
        except CopyInvalid as error:
            raise WitnessUnusable(
                f"{error}; a witness that forgets what it has seen is none: restore {self.log} from a copy"
            ) from error

    def _write(self, copy: Copy) -> None:
        try:
            write_copy(self.log, copy)
        except OSError as error:
            raise WitnessUnusable(
                f"{self.log} cannot be written: {error.strerror}; the witness signs nothing before it is"
            ) from error


async def _authorities(address: str, federation: bytes) -> Authorities:
    """The federation's authorities: the root in the chain that the server shows, or the list, which proves itself."""
    shown = await asyncio.to_thread(shake_hands, address, timeout=_SECONDS)
    try:
        return Authorities.read(await asked_authorities(address, client=None, limit=_SECONDS), federation=federation)
    except ValueError:
        # There has been only one authority.
        if (root := find_root(shown.chain, federation)) is None:
            raise
        return Authorities.first(root)
