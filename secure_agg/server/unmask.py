"""Phase 4, unmask: collect shares from U4 and rebuild the secrets of the masks that are still in the sum.

Guarantees: a revealed share counts only if its dealer committed to it, so a liar is named and the other shares remain
usable. A rebuilt secret is used only if its dealer committed to it (a seed) or advertised the key that follows from it
(a root). For a member of U3 only its seed is rebuilt, for any other member of U2 only its root. The seed of a pair is
used only if its chooser committed to it: one that a dropout chose is derived from its root, one that was chosen for it
is opened with the seed key that follows from its root. A chooser whose seed is another one is named, and the sum stays
closed.

A dealer may have committed to shares that are not on any polynomial of degree t - 1. It is named as soon as one set of
t shares fails, and the other runs of t adjacent answers are tried before the attempt is given up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Never

from secure_agg.identity import MemberId
from secure_agg.messages import Dealing, DealtShare, Unmasking
from secure_agg.reasons import Abandoned, Dropped, Phase, Reason
from secure_agg.sealing import SealBroken, SecretKey
from secure_agg.server.collecting import Seated, starved
from secure_agg.server.opened import OpenedSum
from secure_agg.session import seed_key, seed_key_of
from secure_agg.shamir import ShareInvalid, combine_secret

__all__ = ["CollectingUnmaskings"]


@dataclass(frozen=True)
class CollectingUnmaskings(Seated[Unmasking]):
    """Confirmations are sent; waiting for shares."""

    dealings: Mapping[MemberId, Dealing]
    survivors: tuple[MemberId, ...]
    # Seeds of pairs that their choosers opened after a complaint, by chooser and receiver.
    opened_seeds: Mapping[tuple[MemberId, MemberId], bytes] = field(default_factory=dict, repr=False)

    phase = Phase.UNMASK
    withdraws_on_drop = False

    @property
    def least(self) -> int:
        # On a sparse graph answers are counted around each dealer.
        return self.context.threshold

    def _starved(self, lost: Mapping[MemberId, Dropped]) -> frozenset[MemberId]:
        # Losing a member after its answer was accepted does no harm here.
        gone = lost.keys() - self.answers.keys()
        return starved(self.session, gone, self.dealings, self.survivors)

    @property
    def dropouts(self) -> tuple[MemberId, ...]:
        """U2 without U3, sorted: their pairwise masks are still in the sum."""
        return tuple(sorted(self.dealings.keys() - set(self.survivors)))

    @property
    def enough(self) -> bool:
        """Whether there are t answers (on a sparse graph, from every dealer's neighbours), so that closing now opens
        the sum. With groups, every group that can still get enough answers must have them.
        """
        grouped = self.context.grouped
        if grouped is not None:
            whole = self._groups_with(self.answers)
            return len(whole) >= self.session.least_groups and whole == self._groups_with(
                self.answers.keys() | self.waiting
            )
        return len(self.answers) >= self.least and not self._starved(self._lost_with(self._late()))

    def receive(self, member: MemberId, message: object) -> CollectingUnmaskings | Dropped:
        """Checks every revealed share against its commitment and adds the answer, or says why not."""
        fresh = self._screen(member, message, Unmasking)
        if not isinstance(fresh, Unmasking):
            return fresh
        return self._fault(member, fresh) or self._accept(member, fresh)

    def close(self) -> tuple[OpenedSum, dict[MemberId, Never], tuple[Dropped, ...]] | Abandoned:
        """Rebuilds the survivors' seeds, the dropouts' roots and the seeds of their pairs. No message follows.

        If a secret of a group cannot be rebuilt, only that group is lost; its members are dropped with
        RECONSTRUCTION_FAILED.
        """
        late = self._late()
        abandoned = self._abandoned(late)
        if abandoned is not None:
            return abandoned
        # Bonawitz, round 4: reconstruct b_u for u in U3 and, in place of s_u, r_u for u in U2 but not in U3.
        blamed: list[Dropped] = []
        seeds: dict[MemberId, bytes] = {}
        revealed = self._revealed()
        survivors, dropouts = self._to_open()
        for dealer in survivors:
            seed, sound = self._rebuild(revealed.get(dealer, []), self._is_seed_of(dealer))
            if seed is not None:
                seeds[dealer] = seed
            if not sound:
                blamed.append(Dropped(dealer, Reason.DEALER_SEED_INCONSISTENT))
        roots: dict[MemberId, bytes] = {}
        needed = self._masked_with()
        for dealer in needed:
            root, sound = self._rebuild(revealed.get(dealer, []), self._is_root_of(dealer))
            if root is not None:
                roots[dealer] = root
            if not sound:
                blamed.append(Dropped(dealer, Reason.DEALER_ROOT_INCONSISTENT))
        pair_seeds, wrong = self._pair_seeds(roots, frozenset(survivors))
        blamed += wrong
        missing = (set(survivors) - seeds.keys()) | (set(needed) - roots.keys()) | {lost.member for lost in wrong}
        if missing and not self._enough_without(missing, survivors):
            detail = f"secrets of {len(missing)} of {len(self.dealings)} dealers cannot be rebuilt"
            everyone = (*self.dropped, *late, *blamed)
            return Abandoned(self.phase, Reason.RECONSTRUCTION_FAILED, detail, everyone)
        sealed = {self.session.group_of(dealer) for dealer in missing}
        named = self.lost.keys() | {entry.member for entry in (*late, *blamed)}
        blamed += (
            Dropped(member, Reason.RECONSTRUCTION_FAILED, "a secret of its group cannot be rebuilt")
            for member in survivors
            if self.session.group_of(member) in sealed and member not in named
        )
        opened = tuple(member for member in survivors if self.session.group_of(member) not in sealed)
        lost = tuple(member for member in dropouts if self.session.group_of(member) not in sealed)
        return OpenedSum(self.session, opened, lost, seeds, pair_seeds), {}, (*late, *blamed)

    def _to_open(self) -> tuple[tuple[MemberId, ...], tuple[MemberId, ...]]:
        """Returns (survivors, dropouts) of what is opened: all or, with groups, those of the groups that answered."""
        if self.context.grouped is None:
            return self.survivors, self.dropouts
        whole = self._groups_with(self.answers)
        survivors, dropouts = (
            tuple(member for member in members if self.session.group_of(member) in whole)
            for members in (self.survivors, self.dropouts)
        )
        return survivors, dropouts

    def _enough_without(self, missing: Collection[MemberId], survivors: Collection[MemberId]) -> bool:
        """Whether enough groups are left without those of these dealers."""
        if self.context.grouped is None:
            return False
        sealed = {self.session.group_of(dealer) for dealer in missing}
        return len({self.session.group_of(member) for member in survivors} - sealed) >= self.session.least_groups

    def _fault(self, member: MemberId, message: Unmasking) -> Dropped | None:
        if message.member != member:
            return Dropped(member, Reason.MESSAGE_MALFORMED, "it names another member")
        of_seeds = tuple(share.dealer for share in message.seed_shares)
        of_roots = tuple(share.dealer for share in message.root_shares)
        both = sorted(set(of_seeds) & set(of_roots))
        if both:
            return Dropped(member, Reason.UNMASKING_BOTH_SHARES, f"of {both[0]}")
        alive = frozenset(self.survivors)
        dealers = [dealer for dealer in self.session.dealers_to(member) if dealer in self.dealings]
        if of_seeds != tuple(dealer for dealer in dealers if dealer in alive) or of_roots != tuple(
            dealer for dealer in dealers if dealer not in alive
        ):
            return Dropped(member, Reason.UNMASKING_DEALERS_WRONG)
        for revealed in message.seed_shares:
            committed = self._dealt(revealed.dealer, member).seed_commitment
            if self.session.seed_share_commitment(revealed.dealer, member, revealed.share) != committed:
                return Dropped(member, Reason.UNMASKING_SHARE_MISMATCH, f"seed share of {revealed.dealer}")
        for revealed in message.root_shares:
            committed = self._dealt(revealed.dealer, member).root_commitment
            if self.session.root_share_commitment(revealed.dealer, member, revealed.share) != committed:
                return Dropped(member, Reason.UNMASKING_SHARE_MISMATCH, f"root share of {revealed.dealer}")
        return None

    def _dealt(self, dealer: MemberId, receiver: MemberId) -> DealtShare:
        # A dealing lists its receivers in the session's order, which was checked when it was accepted.
        return self.dealings[dealer].shares[bisect_left(self.session.receivers(dealer), receiver)]

    def _revealed(self) -> dict[MemberId, list[tuple[int, bytes]]]:
        """The revealed (point, share) pairs by dealer, sorted by the member that answered: of a survivor's seed, or of
        another dealer's root.
        """
        shares: dict[MemberId, list[tuple[int, bytes]]] = {}
        for member in sorted(self.answers):
            answer, point = self.answers[member], self.session.point(member)
            for revealed in (*answer.seed_shares, *answer.root_shares):
                shares.setdefault(revealed.dealer, []).append((point, revealed.share))
        return shares

    def _masked_with(self) -> tuple[MemberId, ...]:
        """The dropouts with which somebody in U3 may share a mask: all of them, except if a ring fell apart."""
        survivors, dropouts = self._to_open()
        alive = frozenset(survivors)
        return tuple(dealer for dealer in dropouts if not alive.isdisjoint(self.session.neighbours(dealer)))

    def _is_seed_of(self, dealer: MemberId) -> Callable[[bytes], bool]:
        committed = self.dealings[dealer].seed_commitment
        return lambda secret: self.session.seed_commitment(dealer, secret) == committed

    def _is_root_of(self, dealer: MemberId) -> Callable[[bytes], bool]:
        advertised = seed_key_of(self.session.keys[dealer])
        return lambda secret: self._seed_key(dealer, secret).public == advertised

    def _seed_key(self, dealer: MemberId, root: bytes) -> SecretKey:
        return seed_key(self.context, dealer, root)

    def _pair_seeds(
        self, roots: Mapping[MemberId, bytes], alive: frozenset[MemberId]
    ) -> tuple[dict[tuple[MemberId, MemberId], bytes], tuple[Dropped, ...]]:
        """Returns the seed of each pair of a dropout and a survivor, and the choosers of those that are wrong."""
        found: dict[tuple[MemberId, MemberId], bytes] = {}
        wrong: dict[MemberId, Dropped] = {}
        for dropout, root in roots.items():
            opener = self._seed_key(dropout, root)
            for other in self.session.neighbours(dropout):
                if other not in alive:
                    continue
                ours = self.session.chooses(dropout, other)
                chooser, receiver = (dropout, other) if ours else (other, dropout)
                seed = (
                    self.session.pair_seed(dropout, other, root) if ours else self._sealed_seed(other, dropout, opener)
                )
                committed = self._dealt(chooser, receiver).pair_seed_commitment
                if seed is not None and self.session.pair_seed_commitment(chooser, receiver, seed) == committed:
                    found[dropout, other] = seed
                else:
                    detail = f"of its pair with {receiver}"
                    wrong.setdefault(chooser, Dropped(chooser, Reason.DEALER_PAIR_SEED_INCONSISTENT, detail))
            opener.erase()
        return found, tuple(wrong.values())

    def _sealed_seed(self, chooser: MemberId, dropout: MemberId, opener: SecretKey) -> bytes | None:
        opened = self.opened_seeds.get((chooser, dropout))
        if opened is not None:
            return opened
        try:
            return opener.open(
                self.session.pair_seed_info(chooser, dropout), self._dealt(chooser, dropout).sealed_pair_seed
            )
        except SealBroken:
            return None

    def _rebuild(self, shares: list[tuple[int, bytes]], is_right: Callable[[bytes], bool]) -> tuple[bytes | None, bool]:
        """Returns (the secret or None, whether the first t shares gave it)."""
        threshold = self.context.threshold
        # For an honest dealer the first t shares work, and they are the same points for every secret. The other runs of
        # t shares are worth interpolating only after a failure; if all shares are needed, there are none.
        runs = len(shares) if len(shares) > threshold else 1
        for start in range(runs):
            try:
                secret = combine_secret((shares + shares)[start : start + threshold], threshold)
            except ShareInvalid:
                continue
            if is_right(secret):
                return secret, start == 0
        return None, False
