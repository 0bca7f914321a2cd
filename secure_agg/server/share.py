"""Phase 1, share: collect dealings from U1; the members whose dealings arrive form U2.

Guarantees: an accepted dealing holds sealed messages of the right length for every receiver, a seed of each pair that
its dealer chooses for, and a signature over all of it. Only the receivers can check what is sealed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from secure_agg import merkle
from secure_agg.certificates import by_digest
from secure_agg.context import RoundContext
from secure_agg.identity import MemberId, VerifyIdentity
from secure_agg.messages import Advertisement, Dealing, ReceivedDealing, ReceivedDealings
from secure_agg.reasons import Abandoned, Dropped, Phase, Reason
from secure_agg.server.collecting import Seated, signed_by, starved
from secure_agg.server.mask import CollectingMasked
from secure_agg.session import Session

__all__ = ["CollectingDealings", "serve_group"]

_DIGEST_BYTES = 32


def serve_group(
    context: RoundContext,
    names: tuple[MemberId, ...],
    root: bytes,
    advertisements: Collection[Advertisement],
    verify: VerifyIdentity,
) -> CollectingDealings:
    """Starts to serve one group of a roster apart from the others, for example in another process.

    Its attempt is over once this group is lost. Whether enough groups were opened is for the caller to count.

    Args:
        context: the attempt.
        names: all of U1, sorted.
        root: the roster root.
        advertisements: those of the group's members, as `open_attempt`'s state accepted them.
        verify: checks a certificate and a signature.
    """
    shown = {each.member: each for each in advertisements}
    session = Session.by_digest(
        context,
        map(by_digest, advertisements),
        {name: each.certificate for name, each in shown.items()},
        {name: each.keys for name, each in shown.items()},
        (names, root),
    )
    return CollectingDealings(context, verify, frozenset(shown), {}, {}, (shown,), session)


@dataclass(frozen=True)
class CollectingDealings(Seated[Dealing]):
    """The roster is sent; waiting for shares. `trees` has the hash tree of each accepted dealing."""

    trees: Mapping[MemberId, merkle.Tree] = field(default_factory=dict, repr=False)

    phase = Phase.SHARE
    withdraws_on_drop = True

    @property
    def least(self) -> int:
        return self.context.min_survivors

    def _starved(self, lost: Mapping[MemberId, Dropped]) -> frozenset[MemberId]:
        # Others mask with every member that deals now. A member that is dealt too few shares refuses, and then its root
        # is needed.
        return starved(self.session, lost.keys(), self.answers, self.answers)

    def receive(self, member: MemberId, message: object) -> CollectingDealings | Dropped:
        """Checks a dealing and adds it, or says why not."""
        fresh = self._screen(member, message, Dealing)
        if not isinstance(fresh, Dealing):
            return fresh
        fault = self._fault(member, fresh)
        if fault is not None:
            return fault
        tree = merkle.Tree(self.session.dealing_leaves(member, fresh.shares))
        statement = self.session.dealing_statement(member, fresh.seed_commitment, tree.root)
        if not signed_by(self.verify, self.session, member, statement, fresh.signature):
            return Dropped(member, Reason.DEALING_SIGNATURE_INVALID)
        return replace(self._accept(member, fresh), trees={**self.trees, member: tree})

    def close(
        self,
    ) -> tuple[CollectingMasked, dict[MemberId, ReceivedDealings], tuple[Dropped, ...]] | Abandoned:
        """Fixes U2 and returns, for each of its members, what the others dealt to it."""
        late = self._late()
        abandoned = self._abandoned(late)
        if abandoned is not None:
            return abandoned
        kept = self._kept()
        state = CollectingMasked(
            self.context,
            self.verify,
            frozenset(kept),
            {},
            self._lost_with(late),
            (*self.earlier, self.answers),
            self.session,
            kept,
        )
        return state, self._sorted_by_receiver(kept), late

    def _fault(self, member: MemberId, message: Dealing) -> Dropped | None:
        if message.dealer != member:
            return Dropped(member, Reason.MESSAGE_MALFORMED, "it names another member")
        if tuple(share.receiver for share in message.shares) != self.session.receivers(member):
            return Dropped(member, Reason.DEALING_RECEIVERS_WRONG)
        for share in message.shares:
            if not self.session.well_formed(member, share):
                return Dropped(member, Reason.MESSAGE_MALFORMED, f"the entry for {share.receiver}")
        if len(message.seed_commitment) != _DIGEST_BYTES:
            return Dropped(member, Reason.MESSAGE_MALFORMED, "the seed commitment has 32 bytes")
        return None

    def _sorted_by_receiver(self, kept: Mapping[MemberId, Dealing]) -> dict[MemberId, ReceivedDealings]:
        received: dict[MemberId, list[ReceivedDealing]] = {member: [] for member in sorted(kept)}
        for dealer in sorted(kept):
            dealing = kept[dealer]
            for share, path in zip(dealing.shares, self.trees[dealer].paths, strict=True):
                if share.receiver != dealer and share.receiver in received:
                    received[share.receiver].append(
                        ReceivedDealing(
                            dealer=dealer,
                            share=share,
                            seed_commitment=dealing.seed_commitment,
                            path=path,
                            signature=dealing.signature,
                        )
                    )
        return {member: ReceivedDealings(tuple(dealings)) for member, dealings in received.items()}
