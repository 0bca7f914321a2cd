"""What a cohort is made of: members with certificates, a layout, a context, and the checks due in an attempt."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cryptography import x509

import secure_agg
from benchmarks.library.parties import BOUND, Party, make_parties
from benchmarks.library.stopwatch import Stopwatch
from secure_agg import KeyOf, Layout, Phase, RoundContext, Segment, SparseGraph, VerifyIdentity
from tacit.verification import verifiers

__all__ = [
    "Crowd",
    "complete_context",
    "due_of_member",
    "due_of_server",
    "layout_for",
    "sparse_context",
]

# Flower's default grid, 2^22 steps over [-8, 8], is 2^18 steps a unit. Ours is twice as fine where 32 bits allow it.
_FLOWERS_SCALE = 2.0**18


@dataclass(frozen=True)
class Crowd:
    """Members with certificates, the authority's certificate, and the two functions over them.

    certificate_seconds: processor time to verify one member's certificate the first time, which nobody is charged for.
    """

    root: x509.Certificate
    parties: Sequence[Party]
    verify: VerifyIdentity
    key_of: KeyOf
    certificate_seconds: float

    @classmethod
    def make(cls, members: int) -> "Crowd":
        """That many, with every certificate verified once."""
        root, parties = make_parties(members)
        verify, key_of = verifiers(root)
        watch = Stopwatch()
        for party in parties:
            with watch.running():
                key_of(party.certificate)
        return cls(root, parties, verify, key_of, watch.cpu / members)

    def first(self, members: int) -> "Crowd":
        """The first `members` of them."""
        return replace(self, parties=self.parties[:members])


def layout_for(members: int, values: int, *, bits: int | None = None) -> Layout:
    """One segment in the narrowest ring that holds the sum (or that of `bits`), twice as fine as Flower's grid, or just
    as fine where 32 bits hold no more.
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
    """On the complete graph. With a `threshold` t as many members count as corrupt as 2t > n + n_C and h >= 2 allow."""
    if threshold is None:
        threshold, corrupt = secure_agg.default_thresholds(members)
    else:
        corrupt = min(2 * threshold - members - 1, threshold - 2)
    return _context(members, layout, threshold, corrupt, secure_agg.Graph.COMPLETE)


def sparse_context(members: int, layout: Layout) -> RoundContext:
    """On the least sparse graph for a tenth corrupt, a tenth lost and 80 bits."""
    graph, threshold, corrupt = secure_agg.sparse_thresholds(members, 0.1, 0.1)
    return _context(members, layout, threshold, corrupt, graph)


def _context(
    members: int, layout: Layout, threshold: int, corrupt: int, graph: secure_agg.Graph | SparseGraph
) -> RoundContext:
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
    """How many signatures a member checks in answering each phase, when all advertise and deal and then `lost` vanish:
    the whole roster, every dealing it receives, the confirmations of those who stayed (sparse: as many as are needed).
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
    """How many signatures the server checks in each phase: one of everybody who answers, but for the last phase, where
    commitments are checked instead.
    """
    n = context.cohort
    return {
        Phase.ADVERTISE: n,
        Phase.SHARE: n,
        Phase.MASK: n - lost,
        Phase.CONFIRM: n - lost,
        Phase.UNMASK: 0,
    }
