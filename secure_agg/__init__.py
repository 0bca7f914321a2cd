"""Secure aggregation: it opens the sum of many vectors, and no single vector.

Pairwise masking after Bonawitz et al. 2017 (the variant against a malicious server), as pure state machines: no
network, no clock, no global randomness, no logging. docs/secure-aggregation.md explains the protocol and its
guarantees.

    member: advertise() -> AwaitingRoster -> AwaitingDealings [-> Complaining] -> ReadyToMask -> AwaitingSurvivors
            -> AwaitingConfirmations -> Answered
    server: open_attempt() -> CollectingAdvertisements -> CollectingDealings -> CollectingMasked
            -> CollectingConfirmations -> CollectingUnmaskings -> OpenedSum
"""

from secure_agg.blame import Evidence, convicts
from secure_agg.certificates import by_digest, certificate_digest, keys_digest, roster_by_digest
from secure_agg.context import (
    COMPLETE_GRAPH_LIMIT,
    MAX_COMPLETE_GRAPH,
    MIN_SIGMA,
    ContextInvalid,
    Graph,
    GroupedGraph,
    RoundContext,
    SparseGraph,
    default_thresholds,
    grouped_thresholds,
    sparse_thresholds,
    thresholds_for,
)
from secure_agg.discrete_gaussian import DiscreteGaussian
from secure_agg.distributed import (
    Grid,
    RoundingFailed,
    ddg_renyi,
    decode_distributed,
    encode_distributed,
    inflation,
    round_conditionally,
)
from secure_agg.groups import find_groups
from secure_agg.identity import CertificateOf, Identity, IdentityInvalid, KeyOf, MemberId, VerifyIdentity
from secure_agg.masking import RING_DTYPE, Accumulator
from secure_agg.member import (
    Answered,
    AwaitingConfirmations,
    AwaitingDealings,
    AwaitingRoster,
    AwaitingSurvivors,
    Complaining,
    ReadyToMask,
    advertise,
)
from secure_agg.messages import (
    Advertisement,
    Complaint,
    Complaints,
    Confirmation,
    Confirmations,
    Dealing,
    DealtShare,
    DigestAdvertisement,
    DigestRoster,
    GroupRoster,
    MaskedInput,
    Opening,
    Openings,
    Part,
    ReceivedDealing,
    ReceivedDealings,
    RevealedShare,
    Roster,
    Survivors,
    Unmasking,
)
from secure_agg.packing import add_packed, pack_in_place, packed_size, unpack_into
from secure_agg.randomness import RandomSource, SystemRandom
from secure_agg.reasons import Abandoned, Dropped, Phase, Reason, Refusal
from secure_agg.ring import EncodingInvalid, Layout, LayoutInvalid, Segment, clip_coordinates, clip_l2
from secure_agg.server import (
    CollectingAdvertisements,
    CollectingConfirmations,
    CollectingDealings,
    CollectingMasked,
    CollectingUnmaskings,
    OpenedSum,
    open_attempt,
)
from secure_agg.session import Session, vector_digest

__all__ = [
    "COMPLETE_GRAPH_LIMIT",
    "MAX_COMPLETE_GRAPH",
    "MIN_SIGMA",
    "RING_DTYPE",
    "Abandoned",
    "Accumulator",
    "Advertisement",
    "Answered",
    "AwaitingConfirmations",
    "AwaitingDealings",
    "AwaitingRoster",
    "AwaitingSurvivors",
    "CertificateOf",
    "CollectingAdvertisements",
    "CollectingConfirmations",
    "CollectingDealings",
    "CollectingMasked",
    "CollectingUnmaskings",
    "Complaining",
    "Complaint",
    "Complaints",
    "Confirmation",
    "Confirmations",
    "ContextInvalid",
    "Dealing",
    "DealtShare",
    "DigestAdvertisement",
    "DigestRoster",
    "DiscreteGaussian",
    "Dropped",
    "EncodingInvalid",
    "Evidence",
    "Graph",
    "Grid",
    "GroupRoster",
    "GroupedGraph",
    "Identity",
    "IdentityInvalid",
    "KeyOf",
    "Layout",
    "LayoutInvalid",
    "MaskedInput",
    "MemberId",
    "OpenedSum",
    "Opening",
    "Openings",
    "Part",
    "Phase",
    "RandomSource",
    "ReadyToMask",
    "Reason",
    "ReceivedDealing",
    "ReceivedDealings",
    "Refusal",
    "RevealedShare",
    "Roster",
    "RoundContext",
    "RoundingFailed",
    "Segment",
    "Session",
    "SparseGraph",
    "Survivors",
    "SystemRandom",
    "Unmasking",
    "VerifyIdentity",
    "add_packed",
    "advertise",
    "by_digest",
    "certificate_digest",
    "clip_coordinates",
    "clip_l2",
    "convicts",
    "ddg_renyi",
    "decode_distributed",
    "default_thresholds",
    "encode_distributed",
    "find_groups",
    "grouped_thresholds",
    "inflation",
    "keys_digest",
    "open_attempt",
    "pack_in_place",
    "packed_size",
    "roster_by_digest",
    "round_conditionally",
    "sparse_thresholds",
    "thresholds_for",
    "unpack_into",
    "vector_digest",
]
