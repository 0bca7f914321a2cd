"""The parts of a cohort: members with certificates, a layout, a context, and the checks due in an attempt."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cryptography import x509

import secure_agg
from benchmarks.library.parties import BOUND
from benchmarks.library.stopwatch import Stopwatch
from coordinator.rounds.masked_sum import Party, make_parties
from secure_agg import GroupedGraph, KeyOf, Layout, Phase, RoundContext, Segment, SparseGraph, VerifyIdentity
from tacit.verification import verifiers

__all__ = [
    "Crowd",
    "complete_context",
    "context_with",
    "due_of_member",
    "due_of_server",
    "layout_for",
    "sparse_context",
]

# Flower's default grid, 2^22 steps over [-8, 8], has 2^18 steps a unit. Ours is twice as fine if 32 bits allow it.
_FLOWERS_SCALE = 2.0**18


@dataclass(frozen=True)
class Crowd:
    """Members with certificates, the authority's certificate, and the two functions that check them.

    Args:
        certificate_seconds: processor time to verify one member's certificate for the first time; it is charged to no
            party.
    """

    root: x509.Certificate
    parties: Sequence[Party]
    verify: VerifyIdentity
    key_of: KeyOf
    certificate_seconds: float

    @classmethod
    def make(cls, members: int) -> "Crowd":
        """Make this many members, and verify every certificate once."""
        root, parties = make_parties(members)
        verify, key_of = verifiers(root)
        watch = Stopwatch()
        for party in parties:
            with watch.running():
                key_of(party.certificate)
        return cls(root, parties, verify, key_of, watch.cpu / members)

    def first(self, members: int) -> "Crowd":
        """Return a crowd of the first `members`."""
        return replace(self, parties=self.parties[:members])


def layout_for(members: int, values: int, *, bits: int | None = None) -> Layout:
    """Return a layout of one segment, on a grid twice as fine as Flower's, or equally fine if 32 bits hold no more.

    Args:
        bits: of the ring; None takes the narrowest that holds the sum.

    Raises:
        ValueError: 32 bits do not hold the sum on Flower's grid.
    """
    for scale in (2 * _FLOWERS_SCALE, _FLOWERS_SCALE):
        segment = Segment("update", values, scale, BOUND)
        needed = int(members * segment.largest).bit_length() + 1
        if needed <= 32:
            layout = Layout((segment,), bits or needed)
            layout.check_no_wrap(members)
            return layout
    raise ValueError(f"32 bits do not hold the sum of {members} members on Flower's grid")


def complete_context(members: int, layout: Layout, threshold: int | None = None) -> RoundContext:
    """Return a context on the complete graph.

    With a `threshold` t, the number of assumed corrupt members n_C is the largest that 2t > n + n_C and h >= 2 allow.
    """
    if threshold is None:
        threshold, corrupt = secure_agg.default_thresholds(members)
    else:
        corrupt = min(2 * threshold - members - 1, threshold - 2)
    return context_with(members, layout, threshold, corrupt, secure_agg.Graph.COMPLETE)


def sparse_context(members: int, layout: Layout) -> RoundContext:
    """Return a context on the smallest sparse graph for a tenth corrupt, a tenth lost and 80 bits."""
    graph, threshold, corrupt = secure_agg.sparse_thresholds(members, 0.1, 0.1)
    return context_with(members, layout, threshold, corrupt, graph)


def context_with(
    members: int, layout: Layout, threshold: int, corrupt: int, graph: secure_agg.Graph | SparseGraph | GroupedGraph
) -> RoundContext:
    """Return a context with these numbers."""
    return RoundContext(
        federation=hashlib.sha256(b"federation").digest(),
        job="benchmark",
        round=1,
        attempt=1,
        application=layout.digest(),
        model=hashlib.sha256(b"model").digest(),
        cohort=members,
        threshold=threshold,
        assumed_corrupt=corrupt,
        values=layout.values,
        bits=layout.bits,
        graph=graph,
    )


def due_of_member(context: RoundContext, lost: int) -> dict[Phase, int]:
    """Return how many signatures a member checks for each phase if all advertise and deal and then `lost` vanish.

    It checks the whole roster, every dealing it receives, and the survivors' confirmations (on a sparse graph, as many
    as are needed).
    """
    n, sparse = context.cohort, context.sparse
    return {
        Phase.ADVERTISE: 0,
        Phase.SHARE: n,
        Phase.MASK: n - 1 if sparse is None else sparse.degree,
        Phase.CONFIRM: 0,
        Phase.UNMASK: n - lost if sparse is None else context.min_confirmations,
    }


def due_of_server(context: RoundContext, lost: int) -> dict[Phase, int]:
    """Return how many signatures the server checks in each phase.

    It checks one of each member that answers, except in the last phase, where it checks commitments instead.
    """
    n = context.cohort
    return {
        Phase.ADVERTISE: n,
        Phase.SHARE: n,
        Phase.MASK: n - lost,
        Phase.CONFIRM: n - lost,
        Phase.UNMASK: 0,
    }
