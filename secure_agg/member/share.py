"""Phase 1, share: send shares of the root and of the self-mask seed and the seeds of pairs, receive the neighbours'.

Guarantees: each pair of shares is encrypted under a fresh key, which is sealed to its receiver. The dealer's signature
covers every ciphertext and a commitment to every share, key and pair's seed. Accepted shares and seeds were dealt for
this session by neighbours of this member, and each matches its commitment. There are at least t dealers (on the
complete graph this member's own dealing counts). The root is erased once its shares and seeds are dealt, the secret
keys once the neighbours' dealings are open.

A dealing that its dealer did not sign is the coordinator's fault, and this member refuses. A share or seed that its
dealer did sign, and that is bad, makes it complain before it masks (`Complaining`). It does not just exclude the
dealer. The dealer masks its vector with this member, so continuing without it would leave a mask in the sum that nobody
here can remove.

Until it signs U3, a member keeps the keys and seeds that it dealt, to open them for receivers that complain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from secure_agg import merkle
from secure_agg.blame import BadlyDealt, seed_dealt, shares_dealt
from secure_agg.identity import MemberId
from secure_agg.member.complain import Complaining, complain
from secure_agg.member.mask import ReadyToMask
from secure_agg.member.openable import Openable
from secure_agg.member.seat import HeldShares, Seat
from secure_agg.messages import Complaint, Dealing, DealtShare, Opening, Part, ReceivedDealing, ReceivedDealings
from secure_agg.randomness import RandomSource
from secure_agg.reasons import Reason, Refusal
from secure_agg.sealing import SYMMETRIC_KEY_BYTES, PublicKey, SealBroken, SecretKey, lock
from secure_agg.secret import Once, Secret
from secure_agg.shamir import SECRET_BYTES, deal_secret

__all__ = ["AwaitingDealings", "PeerKeys", "deal_shares"]

_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class PeerKeys:
    """The keys of one neighbour to which this member seals: `seeds` only if this member chooses the pair's seed."""

    sealing: PublicKey
    seeds: PublicKey | None


def deal_shares(
    seat: Seat,
    root: Secret,
    seeds: SecretKey,
    sealing: SecretKey,
    peers: Mapping[MemberId, PeerKeys],
    random: RandomSource,
) -> tuple[AwaitingDealings, Dealing]:
    """Bonawitz, round 1: draws the seed b_u, shares it and the root, and seals two shares for each receiver. In place
    of an agreement, it also derives the seeds of the pairs that it chooses for, and seals each to the other end.
    """
    session, me = seat.session, seat.member
    seed = Secret(random.bytes(SECRET_BYTES))
    order = session.receivers(me)
    points = [session.point(receiver) for receiver in order]
    threshold = seat.context.threshold
    root_shares = deal_secret(root.reveal(), threshold, points, random)
    seed_shares = deal_secret(seed.reveal(), threshold, points, random)
    chosen = {other: Secret(session.pair_seed(me, other, root.reveal())) for other in session.chosen_by(me)}
    root.erase()
    keys = {receiver: Secret(random.bytes(SYMMETRIC_KEY_BYTES)) for receiver in order if receiver in peers}
    shares = tuple(
        _dealt(seat, receiver, peers.get(receiver), keys.get(receiver), of_root, of_seed, chosen.get(receiver))
        for receiver, of_root, of_seed in zip(order, root_shares, seed_shares, strict=True)
    )
    seed_commitment = session.seed_commitment(me, seed.reveal())
    leaves = session.dealing_leaves(me, shares)
    tree_root = merkle.root_of(leaves)
    signature = seat.identity.sign(session.dealing_statement(me, seed_commitment, tree_root))
    held = {}
    if me in order:
        own = order.index(me)
        held[me] = HeldShares(Secret(root_shares[own]), Secret(seed_shares[own]))
    secrets = {
        **{(receiver, Part.SHARES): key for receiver, key in keys.items()},
        # A copy: masking erases the seeds that it uses.
        **{(other, Part.PAIR_SEED): Secret(pair_seed.reveal()) for other, pair_seed in chosen.items()},
    }
    openable = Openable(dict(zip(order, leaves, strict=True)), secrets)
    return (
        AwaitingDealings(seat, seeds, sealing, seed, chosen, held, openable),
        Dealing(me, seed_commitment, shares, signature),
    )


def _dealt(
    seat: Seat,
    receiver: MemberId,
    keys: PeerKeys | None,
    share_key: Secret | None,
    of_root: bytes,
    of_seed: bytes,
    pair_seed: Secret | None,
) -> DealtShare:
    session, me = seat.session, seat.member
    sealed_key = locked_shares = key_commitment = sealed_pair_seed = pair_seed_commitment = b""
    # The member's own pair of shares never leaves it.
    if keys is not None and share_key is not None:
        key = share_key.reveal()
        sealed_key = keys.sealing.seal(session.share_key_info(me, receiver), key)
        locked_shares = lock(key, session.shares_header(me, receiver), of_root + of_seed)
        key_commitment = session.share_key_commitment(me, receiver, key)
    if keys is not None and keys.seeds is not None and pair_seed is not None:
        sealed_pair_seed = keys.seeds.seal(session.pair_seed_info(me, receiver), pair_seed.reveal())
        pair_seed_commitment = session.pair_seed_commitment(me, receiver, pair_seed.reveal())
    return DealtShare(
        receiver=receiver,
        sealed_key=sealed_key,
        locked_shares=locked_shares,
        key_commitment=key_commitment,
        root_commitment=session.root_share_commitment(me, receiver, of_root),
        seed_commitment=session.seed_share_commitment(me, receiver, of_seed),
        sealed_pair_seed=sealed_pair_seed,
        pair_seed_commitment=pair_seed_commitment,
    )


@dataclass(frozen=True, slots=True)
class AwaitingDealings:
    """Shares are dealt; waiting for those of others. `_chosen` has the seeds of the pairs that it chose for."""

    seat: Seat
    _seeds: SecretKey
    _sealing: SecretKey
    _seed: Secret
    _chosen: Mapping[MemberId, Secret] = field(repr=False)
    _own_shares: Mapping[MemberId, HeldShares] = field(repr=False)
    _openable: Openable = field(repr=False)
    _once: Once = field(default_factory=lambda: Once(Reason.SECOND_DEALINGS), repr=False)

    def on_dealings(self, dealings: ReceivedDealings) -> ReadyToMask | Complaining:
        """Opens and checks every share and seed dealt to this member, then erases both secret keys.

        Returns `Complaining` if a dealer signed something that does not open or does not match its commitment.

        Raises:
            Refusal: a dealing is not what its dealer signed, or there are too few dealers.
        """
        self._once.check()
        allowed = set(self.seat.session.neighbours(self.seat.member))
        # On the complete graph a member deals to itself, and that dealing counts. On the sparse one it does not.
        dealers = set(self._own_shares)
        for dealing in dealings.dealings:
            if dealing.dealer in dealers:
                raise Refusal(Reason.DEALINGS_DUPLICATE, dealing.dealer)
            if dealing.dealer not in allowed:
                raise Refusal(Reason.DEALINGS_FOREIGN_DEALER, dealing.dealer)
            self._check(dealing)
            dealers.add(dealing.dealer)
        if len(dealers) < self.seat.context.threshold:
            raise Refusal(
                Reason.DEALINGS_TOO_FEW,
                detail=f"{len(dealers)} members dealt, the threshold is {self.seat.context.threshold}",
            )
        self._once.spend()
        held = dict(self._own_shares)
        pair_seeds: dict[MemberId, Secret] = {}
        bad: dict[tuple[MemberId, Part], ReceivedDealing] = {}
        for dealing in dealings.dealings:
            dealer = dealing.dealer
            try:
                held[dealer] = self._open(dealing)
            except BadlyDealt:
                bad[dealer, Part.SHARES] = dealing
            if dealer in self._chosen:
                pair_seeds[dealer] = self._chosen[dealer]
                continue
            try:
                pair_seeds[dealer] = self._open_seed(dealing)
            except BadlyDealt:
                bad[dealer, Part.PAIR_SEED] = dealing
        self._seeds.erase()
        self._sealing.erase()
        # No mask is shared with a neighbour that did not deal.
        for other in self._chosen.keys() - dealers:
            self._chosen[other].erase()
        ready = ReadyToMask(self.seat, self._seed, pair_seeds, held, self._openable)
        return complain(ready, bad) if bad else ready

    def on_complaint(self, complaint: Complaint) -> Opening:
        """Opens what this member dealt to one receiver that complains.

        Raises:
            Refusal: the complaint fails a check; nothing is opened.
        """
        return self._openable.answer(self.seat, complaint)

    def forget(self) -> None:
        """Ends the attempt: keys, seeds and its own shares are overwritten, and nothing is answered from now on."""
        self._once.close()
        for secret in (self._seeds, self._sealing, self._seed, *self._chosen.values()):
            secret.erase()
        for shares in self._own_shares.values():
            shares.erase()
        self._openable.forget()

    def _check(self, dealing: ReceivedDealing) -> None:
        """Checks that the dealer signed exactly this for this member."""
        session, me, dealer = self.seat.session, self.seat.member, dealing.dealer
        if (
            dealing.share.receiver != me
            or not session.well_formed(dealer, dealing.share)
            or any(len(item) != _DIGEST_BYTES for item in (dealing.seed_commitment, *dealing.path))
        ):
            raise Refusal(Reason.DEALINGS_MALFORMED, dealer)
        root = session.received_root(me, dealing)
        if root is None:
            raise Refusal(Reason.DEALINGS_MALFORMED, dealer, "the path has the wrong length")
        statement = session.dealing_statement(dealer, dealing.seed_commitment, root)
        if not self.seat.signed_by(dealer, statement, dealing.signature):
            raise Refusal(Reason.DEALINGS_SIGNATURE_INVALID, dealer)

    def _open(self, dealing: ReceivedDealing) -> HeldShares:
        """Raises: BadlyDealt."""
        session, me, dealer, share = self.seat.session, self.seat.member, dealing.dealer, dealing.share
        # Bonawitz, round 2: decrypt, and check that the content is for this pair. HPKE's info and the header do the
        # latter.
        try:
            key = self._sealing.open(session.share_key_info(dealer, me), share.sealed_key)
        except SealBroken as error:
            raise BadlyDealt(str(error)) from None
        of_root, of_seed = shares_dealt(session, dealer, share, key)
        return HeldShares(Secret(of_root), Secret(of_seed))

    def _open_seed(self, dealing: ReceivedDealing) -> Secret:
        """Raises: BadlyDealt."""
        session, me, dealer, share = self.seat.session, self.seat.member, dealing.dealer, dealing.share
        try:
            pair_seed = self._seeds.open(session.pair_seed_info(dealer, me), share.sealed_pair_seed)
        except SealBroken as error:
            raise BadlyDealt(str(error)) from None
        return Secret(seed_dealt(session, dealer, share, pair_seed))
