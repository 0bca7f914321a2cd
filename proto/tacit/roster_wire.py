"""Converts the roster log's entries, heads and cosignatures to protobuf and back.

Like `tacit.wire`, it checks only the form. What cannot be read raises `HeadInvalid`.
"""

from tacit.fields import TextInvalid, admit
from tacit.identity import Role
from tacit.limits import MAX_CERTIFICATE_BYTES
from tacit.roster import Cosignature, Entry, Head, HeadInvalid, Kind, SignedHead
from tacit.v1 import enrolment_pb2
from tacit.v1 import federation_pb2 as pb

__all__ = [
    "ENTRIES_AT_ONCE",
    "MAX_PROOF",
    "MEMBERS_COSIGNING",
    "cosignature_from_pb",
    "cosignature_to_pb",
    "entry_from_pb",
    "entry_to_pb",
    "head_from_pb",
    "head_to_pb",
    "proof_from_pb",
]

# Entries in one answer, about 150 bytes each, and cosignatures of members in it.
ENTRIES_AT_ONCE = 1000
MEMBERS_COSIGNING = 64
# Digests in a consistency proof: two for each level of the tree.
MAX_PROOF = 128
_MAX_SIGNATURE = 1024


def entry_to_pb(entry: Entry) -> pb.LogEntry:
    """Encodes an entry."""
    return pb.LogEntry(
        certificate=entry.certificate,
        key=entry.key,
        name=entry.name,
        role=entry.role.value,
        kind=entry.kind.value,
        at_ms=entry.at_ms,
    )


def entry_from_pb(message: pb.LogEntry) -> Entry:
    """Decodes an entry.

    Raises:
        HeadInvalid: it is malformed.
    """
    try:
        admit(message)
        role, kind = Role(message.role), Kind(message.kind)
        return Entry(message.certificate, message.key, message.name, role, kind, message.at_ms)
    except (ValueError, TextInvalid) as error:
        raise HeadInvalid(f"an entry of the log cannot be read: {error}") from error


def head_to_pb(signed: SignedHead) -> pb.LogHead:
    """Encodes a head."""
    head = signed.head
    return pb.LogHead(
        size=head.size, root=head.root, at_ms=head.at_ms, signature=signed.signature, certificate=signed.certificate
    )


def head_from_pb(message: pb.LogHead, federation: bytes) -> SignedHead:
    """Decodes a head of the federation's log.

    Raises:
        HeadInvalid: it is malformed.
    """
    if len(message.certificate) > MAX_CERTIFICATE_BYTES or len(message.signature) > _MAX_SIGNATURE:
        raise HeadInvalid("the certificate or the signature of the head is too long")
    head = Head(federation, message.size, message.root, message.at_ms)
    return SignedHead(head, message.signature, message.certificate)


def cosignature_to_pb(cosignature: Cosignature) -> pb.HeadCosignature:
    """Encodes a cosignature."""
    return pb.HeadCosignature(
        signer=cosignature.signer,
        size=cosignature.size,
        root=cosignature.root,
        at_ms=cosignature.at_ms,
        signature=cosignature.signature,
    )


def cosignature_from_pb(message: pb.HeadCosignature) -> Cosignature:
    """Decodes a cosignature.

    Raises:
        HeadInvalid: it is malformed.
    """
    if len(message.signer) > MAX_CERTIFICATE_BYTES or len(message.signature) > _MAX_SIGNATURE:
        raise HeadInvalid("the signer or the signature of a cosignature is too long")
    if len(message.signer) < 32 or len(message.root) != 32 or not 0 <= message.at_ms < 2**62 or message.size >= 2**62:
        raise HeadInvalid("a cosignature is malformed")
    return Cosignature(message.signer, message.size, message.root, message.at_ms, message.signature)


def proof_from_pb(message: enrolment_pb2.FetchHeadResponse) -> tuple[bytes, ...]:
    """The consistency proof of an answer.

    Raises:
        HeadInvalid: it has more digests than any tree.
    """
    if len(message.proof) > MAX_PROOF:
        raise HeadInvalid(f"a consistency proof has {len(message.proof)} digests; no tree needs more than {MAX_PROOF}")
    return tuple(message.proof)
