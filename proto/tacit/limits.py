"""Bounds on cohorts and on the size of their messages, the same for both sides.

The message limits of gRPC ports and channels follow from the largest cohort: large enough to run every job that is
accepted, and no larger, because the limit is also what one message can cost the receiver in memory. Larger things
(versions, masked vectors) travel in chunks.
"""

__all__ = [
    "CERTIFICATES_AT_ONCE",
    "CERTIFICATES_IN_A_PART",
    "DIGEST_ROSTER_ABOVE",
    "ENDED_AT_ONCE",
    "LAST_MS",
    "MAX_AVERAGED",
    "MAX_CERTIFICATE_BYTES",
    "MAX_FROM_COORDINATOR",
    "MAX_FROM_MEMBER",
    "MAX_GROUP",
    "MAX_LABELS",
    "MAX_MEMBERS",
    "MAX_NAME",
    "MAX_NEIGHBOURS",
    "MAX_PATH",
    "MAX_ROSTER_PATH",
    "MAX_TENSORS",
    "MAX_TOKENS",
    "UPLOAD_MESSAGE",
]

# Members in a cohort. The coordinator's traffic grows with the square of it: every member gets the roster, or
# all names if the cohort is in groups.
MAX_MEMBERS = 10_000
# Members of a group, which is a complete graph (secure_agg.parameters.MAX_COMPLETE_GRAPH), and the height of the hash
# tree over a roster.
MAX_GROUP, MAX_ROSTER_PATH = 1000, (MAX_MEMBERS - 1).bit_length()

# The last millisecond of the year 9999, counted from 1970: later times are no date.
LAST_MS = 253_402_300_799_999

# Entries in the lists of a job document and its manifest. Labels: single-label text data sets have hundreds at most.
# Tensors: RoBERTa-large has about 400. Tokens: those whose embedding rows `fedrecon` reconstructs.
MAX_LABELS = 10_000
MAX_TENSORS = 10_000
MAX_TOKENS = 10_000

# Bytes of a masked vector in one message. The coordinator's window opens for one of these at a time, and what has
# arrived is counted in them.
UPLOAD_MESSAGE = 384 * 1024

# Jobs that are over in one message: some 100 kB.
ENDED_AT_ONCE = 1000

# Versions in an average: a command holds one of them at a time, and the coordinator keeps them all.
MAX_AVERAGED = 100

# A roster of more members than this names certificates by digest; members fetch those they do not have yet, once. In
# groups of any size, each member gets the entries of its own group, by digest.
DIGEST_ROSTER_ABOVE = 200

# A member's certificate has about 1.1 KB (RSA-3072, one URI), or 2.4 KB with the longest key that is certified.
MAX_CERTIFICATE_BYTES = 4096
# Digests in one request, and certificates in one part of its answer: no more bytes than a chunk of a blob.
CERTIFICATES_AT_ONCE = 512
CERTIFICATES_IN_A_PART = 64

# Sizes in bytes as protobuf encodes them: a tag and a length before each field, and before each entry.
_ENTRY = 4
MAX_NAME = 63
_NAME = MAX_NAME + 2
_DIGEST = _NONCE = 32 + 2
_KEYS = 2432 + 3
# What one dealer makes for one receiver: a sealed key and seed, two encrypted shares and four commitments.
_DEALT = _NAME + 2 * (1168 + 3) + (82 + 2) + 4 * _DIGEST
_SHARE = 33 + 2
# The longest key that is certified has 8192 bits. Members generate keys of 3072 bits, whose signatures have 384 bytes.
_SIGNATURE = 1024 + 3
# Neighbours: secure_agg.parameters.MAX_NEIGHBOURS; by default a member has 156 in a cohort of 10,000. Path: the height
# of the Merkle tree over that many leaves, in digests.
MAX_NEIGHBOURS, MAX_PATH = 1024, 10
_MEBIBYTE = 1024 * 1024


def _room(largest: int) -> int:
    """Rounds up to whole mebibytes and adds one for the fields around the entries."""
    return (largest // _MEBIBYTE + 2) * _MEBIBYTE


# The largest of: a roster by digest of 10,000 members (12 MB; 6 MB with the usual keys), a roster of 200 with their
# certificates and keys, confirmations of 10,000, and what 1024 neighbours dealt to one member.
MAX_FROM_COORDINATOR = _room(
    max(
        MAX_MEMBERS * (_ENTRY + _NAME + 2 * _DIGEST + _NONCE + _SIGNATURE),
        DIGEST_ROSTER_ABOVE * (_ENTRY + _NAME + MAX_CERTIFICATE_BYTES + _ENTRY + _KEYS + _NONCE + _SIGNATURE),
        MAX_MEMBERS * (_ENTRY + _NAME + _SIGNATURE),
        MAX_NEIGHBOURS * (_ENTRY + _NAME + _ENTRY + _DEALT + (1 + MAX_PATH) * _DIGEST + _SIGNATURE),
    )
)

# The larger of: a dealing to 1024 neighbours, and two revealed shares for each. Chunks of vectors have at most 384 KiB.
MAX_FROM_MEMBER = _room(
    max(
        MAX_NEIGHBOURS * (_ENTRY + _DEALT),
        MAX_NEIGHBOURS * 2 * (_ENTRY + _NAME + _SHARE),
    )
)
