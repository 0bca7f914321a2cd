"""How large a cohort may be, and what its messages may weigh: one set of bounds for both sides.

What a gRPC port or channel takes follows from the largest cohort, so that every job that is accepted can be run; and it
is no more than that, since it is also what one message of the other side may cost in memory. Everything larger
(versions, masked vectors) travels in chunks.
"""

__all__ = [
    "CERTIFICATES_AT_ONCE",
    "CERTIFICATES_IN_A_PART",
    "DIGEST_ROSTER_ABOVE",
    "MAX_CERTIFICATE_BYTES",
    "MAX_FROM_COORDINATOR",
    "MAX_FROM_MEMBER",
    "MAX_LABELS",
    "MAX_MEMBERS",
    "MAX_NAME",
    "MAX_NEIGHBOURS",
    "MAX_PATH",
    "MAX_TENSORS",
    "MAX_TOKENS",
]

# Members of a cohort. What a round costs the coordinator's line grows with the square: everybody is sent the roster.
MAX_MEMBERS = 10_000

# What a job document and its manifest may list. Labels: data sets of texts with one label each have hundreds at most.
# Tensors: RoBERTa-large has about 400. Tokens: those whose rows `fedrecon` makes anew.
MAX_LABELS = 10_000
MAX_TENSORS = 10_000
MAX_TOKENS = 10_000

# A roster of more members than this names certificates by digest: members fetch once what they do not know yet.
DIGEST_ROSTER_ABOVE = 200

# A member's certificate is about 1.1 KB (RSA-3072, one URI), one with the longest key that is certified 2.4 KB.
MAX_CERTIFICATE_BYTES = 4096
# Digests of one request, and certificates of one part of its answer: no more than a chunk of a blob.
CERTIFICATES_AT_ONCE = 512
CERTIFICATES_IN_A_PART = 64

# Bytes of the parts, as protobuf writes them: tag and length before each field, an entry's own before it.
_ENTRY = 4
MAX_NAME = 63
_NAME = MAX_NAME + 2
_DIGEST = _KEY = _NONCE = 32 + 2
_SEALED = 82 + 2
_SHARE = 33 + 2
# The longest key that is certified has 8192 bits. Of the keys that members make (3072) a signature has 384 bytes.
_SIGNATURE = 1024 + 3
# secure_agg.parameters.MAX_NEIGHBOURS: at the defaults 156 of 10,000. Their tree is so many digests high.
MAX_NEIGHBOURS, MAX_PATH = 4096, 12
_MEBIBYTE = 1024 * 1024


def _room(largest: int) -> int:
    """Whole mebibytes, with one more for what stands around the entries."""
    return (largest // _MEBIBYTE + 2) * _MEBIBYTE


# A roster by digest of 10,000 (12 MB; 6 MB with the usual keys), their confirmations, and what 4096 neighbours dealt to
# one member.
MAX_FROM_COORDINATOR = _room(
    max(
        MAX_MEMBERS * (_ENTRY + _NAME + _DIGEST + 2 * _KEY + _NONCE + _SIGNATURE),
        MAX_MEMBERS * (_ENTRY + _NAME + _SIGNATURE),
        MAX_NEIGHBOURS * (_ENTRY + _NAME + _SEALED + 3 * _DIGEST + MAX_PATH * _DIGEST + _SIGNATURE),
    )
)

# A dealing to 4096 neighbours, and two shares of each of them revealed; chunks of vectors have 384 KiB or less.
MAX_FROM_MEMBER = _room(
    max(
        MAX_NEIGHBOURS * (_ENTRY + _NAME + _SEALED + 2 * _DIGEST),
        MAX_NEIGHBOURS * 2 * (_ENTRY + _NAME + _SHARE),
    )
)
