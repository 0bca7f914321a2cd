"""Secure aggregation: the sum of many vectors opens, and no single one does.

Pairwise masking after Bonawitz et al. 2017 (the variant against a malicious server), as pure state machines:
no network, no clock, no global randomness, no logging. docs/secure-aggregation.md explains the protocol and
what it promises.

    member: advertise() -> AwaitingRoster -> AwaitingDealings -> ReadyToMask -> AwaitingSurvivors
            -> AwaitingConfirmations -> Answered
    server: open_attempt() -> CollectingAdvertisements -> CollectingDealings -> CollectingMasked
            -> CollectingConfirmations -> CollectingUnmaskings -> Opened
"""

from secure_agg.context import COMPLETE_GRAPH_LIMIT, ContextInvalid, Graph, RoundContext, default_thresholds
from secure_agg.identity import Identity, IdentityInvalid, KeyOf, MemberId, VerifyIdentity
from secure_agg.masking import RING_DTYPE, Accumulator, add_into
from secure_agg.member import (
    Answered,
    AwaitingConfirmations,
    AwaitingDealings,
    AwaitingRoster,
    AwaitingSurvivors,
    ReadyToMask,
    advertise,
)
from secure_agg.messages import (
    Advertisement,
    Confirmation,
    Confirmations,
    Dealing,
    DealtShare,
    MaskedInput,
    ReceivedDealing,
    ReceivedDealings,
    RevealedShare,
    Roster,
    Survivors,
    Unmasking,
)
from secure_agg.randomness import RandomSource, SystemRandom
from secure_agg.reasons import Abandoned, Dropped, Phase, Reason, Refusal
from secure_agg.ring import EncodingInvalid, Layout, LayoutInvalid, Segment, clip_coordinates, clip_l2
from secure_agg.server import (
    CollectingAdvertisements,
    CollectingConfirmations,
    CollectingDealings,
    CollectingMasked,
    CollectingUnmaskings,
    Opened,
    open_attempt,
)
from secure_agg.session import Session, vector_digest

__all__ = [
    "COMPLETE_GRAPH_LIMIT",
    "RING_DTYPE",
    "Abandoned",
    "Accumulator",
    "Advertisement",
    "Answered",
    "AwaitingConfirmations",
    "AwaitingDealings",
    "AwaitingRoster",
    "AwaitingSurvivors",
    "CollectingAdvertisements",
    "CollectingConfirmations",
    "CollectingDealings",
    "CollectingMasked",
    "CollectingUnmaskings",
    "Confirmation",
    "Confirmations",
    "ContextInvalid",
    "Dealing",
    "DealtShare",
    "Dropped",
    "EncodingInvalid",
    "Graph",
    "Identity",
    "IdentityInvalid",
    "KeyOf",
    "Layout",
    "LayoutInvalid",
    "MaskedInput",
    "MemberId",
    "Opened",
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
    "Segment",
    "Session",
    "Survivors",
    "SystemRandom",
    "Unmasking",
    "VerifyIdentity",
    "add_into",
    "advertise",
    "clip_coordinates",
    "clip_l2",
    "default_thresholds",
    "open_attempt",
    "vector_digest",
]
