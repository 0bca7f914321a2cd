"""Phase 1, share: send shares of the masking secret key and of the self-mask seed, receive the neighbours' shares.

Guarantees: each share is sealed for one receiver and committed to under the dealer's signature. Accepted shares were
dealt for this session by neighbours of this member, and each matches a commitment that its dealer signed. There are at
least t dealers (on the complete graph this member's own dealing counts).

One bad share makes this member refuse; it does not just exclude the dealer. The dealer masks its vector with this
member, so continuing without it would leave a mask in the sum that nobody here can remove. The refusal names the
dealer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from secure_agg import merkle
from secure_agg.agreement import KEY_BYTES, SealBroken, SecretKey, open_sealed, seal
from secure_agg.identity import MemberId
from secure_agg.member.mask import ReadyToMask
from secure_agg.member.seat import HeldShares, Seat
from secure_agg.messages import Dealing, DealtShare, ReceivedDealing, ReceivedDealings
from secure_agg.randomness import RandomSource
from secure_agg.reasons import Reason, Refusal
from secure_agg.secret import Once, Secret
from secure_agg.session import SEALED_BYTES
from secure_agg.shamir import SHARE_BYTES, ShareInvalid, deal_secret, read_share

__all__ = ["AwaitingDealings", "deal_shares"]

_DIGEST_BYTES = 32


def deal_shares(
    seat: Seat, masking: SecretKey, sealing: SecretKey, random: RandomSource
) -> tuple[AwaitingDealings, Dealing]:
    """Bonawitz, round 1: draws the seed b_u, shares it and the masking key, seals two shares for each receiver."""
    session, me = seat.session, seat.member
    seed = Secret(random.bytes(KEY_BYTES))
    order = session.receivers(me)
    points = [session.point(receiver) for receiver in order]
    threshold = seat.context.threshold
    masking_shares = deal_secret(masking.reveal(), threshold, points, random)
    seed_shares = deal_secret(seed.reveal(), threshold, points, random)
    shares = tuple(
        DealtShare(
            receiver=receiver,
            # The member's own pair never leaves it.
            sealed=b"" if receiver == me else _sealed_pair(seat, sealing, receiver, of_key + of_seed),
            masking_commitment=session.masking_share_commitment(me, receiver, of_key),
            seed_commitment=session.seed_share_commitment(me, receiver, of_seed),
        )
        for receiver, of_key, of_seed in zip(order, masking_shares, seed_shares, strict=True)
    )
    seed_commitment = session.seed_commitment(me, seed.reveal())
    root = merkle.root_of(session.dealing_leaves(me, shares))
    signature = seat.identity.sign(session.dealing_statement(me, seed_commitment, root))
    held = {}
    if me in order:
        own = order.index(me)
        held[me] = HeldShares(Secret(masking_shares[own]), Secret(seed_shares[own]))
    return (
        AwaitingDealings(seat, masking, sealing, seed, held),
        Dealing(me, seed_commitment, shares, signature),
    )


def _sealed_pair(seat: Seat, sealing: SecretKey, receiver: MemberId, pair: bytes) -> bytes:
    shared = sealing.agreed(seat.session.entries[receiver].sealing_key)
    return seal(shared, seat.session.id, seat.member, receiver, pair)


@dataclass(frozen=True, slots=True)
class AwaitingDealings:
    """Shares are dealt; waiting for those of others."""

    seat: Seat
    _masking: SecretKey
    _sealing: SecretKey
    _seed: Secret
    _own_shares: Mapping[MemberId, HeldShares] = field(repr=False)
    _once: Once = field(default_factory=lambda: Once(Reason.SECOND_DEALINGS), repr=False)

    def on_dealings(self, dealings: ReceivedDealings) -> ReadyToMask:
        """Opens and checks every share dealt to this member, then erases the sealing key.

        Raises:
            Refusal: a share fails a check, or there are too few.
        """
        self._once.check()
        allowed = set(self.seat.session.neighbours(self.seat.member))
        # On the complete graph a member deals to itself, and that dealing counts. On the sparse one it does not.
        held = dict(self._own_shares)
        try:
            for dealing in dealings.dealings:
                if dealing.dealer in held:
                    raise Refusal(Reason.DEALINGS_DUPLICATE, dealing.dealer)
                if dealing.dealer not in allowed:
                    raise Refusal(Reason.DEALINGS_FOREIGN_DEALER, dealing.dealer)
                held[dealing.dealer] = self._open(dealing)
            if len(held) < self.seat.context.threshold:
                raise Refusal(
                    Reason.DEALINGS_TOO_FEW,
                    detail=f"{len(held)} members dealt, the threshold is {self.seat.context.threshold}",
                )
        except Refusal:
            # Erase the opened shares of others, so that this state is as before.
            for dealer in held.keys() - self._own_shares.keys():
                held[dealer].erase()
            raise
        self._once.spend()
        self._sealing.erase()
        return ReadyToMask(self.seat, self._masking, self._seed, held)

    def forget(self) -> None:
        """Ends the attempt: keys, seed and its own shares are overwritten, and nothing is answered from now on."""
        self._once.close()
        for secret in (self._masking, self._sealing, self._seed):
            secret.erase()
        for shares in self._own_shares.values():
            shares.erase()

    def _open(self, dealing: ReceivedDealing) -> HeldShares:
        session, me, dealer = self.seat.session, self.seat.member, dealing.dealer
        commitments = (
            dealing.masking_share_commitment,
            dealing.seed_share_commitment,
            dealing.seed_commitment,
            *dealing.path,
        )
        if len(dealing.sealed) != SEALED_BYTES or any(len(item) != _DIGEST_BYTES for item in commitments):
            raise Refusal(Reason.DEALINGS_MALFORMED, dealer)
        root = session.received_root(me, dealing)
        if root is None:
            raise Refusal(Reason.DEALINGS_MALFORMED, dealer, "the path has the wrong length")
        statement = session.dealing_statement(dealer, dealing.seed_commitment, root)
        if not self.seat.signed_by(dealer, statement, dealing.signature):
            raise Refusal(Reason.DEALINGS_SIGNATURE_INVALID, dealer)
        # Bonawitz, round 2: decrypt, and check that the content is for this pair. The header and key do the latter.
        shared = self._sealing.agreed(session.entries[dealer].sealing_key)
        try:
            pair = open_sealed(shared, session.id, dealer, me, dealing.sealed)
        except SealBroken as error:
            raise Refusal(Reason.DEALINGS_CIPHERTEXT_INVALID, dealer, str(error)) from None
        of_key, of_seed = pair[:SHARE_BYTES], pair[SHARE_BYTES:]
        if (
            session.masking_share_commitment(dealer, me, of_key) != dealing.masking_share_commitment
            or session.seed_share_commitment(dealer, me, of_seed) != dealing.seed_share_commitment
        ):
            raise Refusal(Reason.DEALINGS_SHARE_MISMATCH, dealer)
        try:
            read_share(of_key)
            read_share(of_seed)
        except ShareInvalid as error:
            raise Refusal(Reason.DEALINGS_SHARE_MISMATCH, dealer, str(error)) from None
        return HeldShares(Secret(of_key), Secret(of_seed))
