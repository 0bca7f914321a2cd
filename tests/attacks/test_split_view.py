"""A coordinator shows members different lists of survivors, and a third of the members are on its side.

There are a hundred members, 33 of them corrupt, and t = 67, the least that 2t > n + n_C allows. The coordinator picks
two honest members and makes the others reveal everything that hides the sum of those two: shares of both their seeds,
and shares of everybody else's masking keys. One list of survivors can never do that, but 65 different ones can: each
member reveals a masking key share of every member that its own list leaves out.

Without the check of the confirmations (the variant of Bonawitz et al. 2017 against an honest but curious server) the
attack succeeds. With it every member refuses and says why: its list does not have 67 signatures, because each honest
member ever signs one list, and 33 corrupt ones can only add 33.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

from secure_agg import Confirmation, Confirmations, Dealing, Phase, Reason, Refusal, Survivors, Unmasking
from secure_agg.masking import MaskStream, apply_streams
from secure_agg.member.unmask import AwaitingConfirmations
from secure_agg.sealing import derive
from secure_agg.session import Session
from secure_agg.shamir import combine_secret
from tests.support.crooked import seed_of_pair
from tests.support.sparse_fleet import SparseFleet
from tests.support.sum_fleet import Fleet


@dataclass
class Coordinator:
    """What the coordinator holds: the session, its own members' secrets, and every share it was given."""

    session: Session
    corrupt: tuple[str, ...]
    roots: Mapping[str, bytes]
    dealings: Mapping[str, Dealing]
    seeds: dict[str, dict[int, bytes]] = field(default_factory=dict)
    root_shares: dict[str, dict[int, bytes]] = field(default_factory=dict)

    def take(self, answer: Unmasking) -> None:
        point = self.session.point(answer.member)
        for kind, shares in ((self.seeds, answer.seed_shares), (self.root_shares, answer.root_shares)):
            for revealed in shares:
                kind.setdefault(revealed.dealer, {})[point] = revealed.share

    def rebuilt(self, shares: Mapping[int, bytes]) -> bytes | None:
        """Rebuilds a dealer's secret if t of its shares are known."""
        t = self.session.context.threshold
        return combine_secret(sorted(shares.items())[:t], t) if len(shares) >= t else None

    def open(self, victims: tuple[str, ...], masked: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """Computes the sum of the victims' inputs alone if every mask around them can be removed."""
        session, total = self.session, np.zeros(self.session.context.values, dtype="<u4")
        streams = []
        for victim in victims:
            total += masked[victim]
            seed = self.rebuilt(self.seeds.get(victim, {}))
            if seed is None:
                return None
            streams.append(MaskStream(derive(seed, session.id, session.self_mask_info(victim)), add=False))
            # The masks between two victims cancel.
            for other in set(session.neighbours(victim)) - set(victims):
                key = self.roots.get(other) or self.rebuilt(self.root_shares.get(other, {}))
                if key is None:
                    return None
                pair_seed = seed_of_pair(session, key, other, victim, self.dealings)
                stream = derive(pair_seed, session.id, session.pair_mask_info(victim, other))
                streams.append(MaskStream(stream, add=session.rank(victim) > session.rank(other)))
        apply_streams(total, streams, 32)
        return total


def until_survivors(fleet: Fleet, corrupt: tuple[str, ...]) -> Coordinator:
    """Runs until all masked vectors are in. Corrupt members hand over their roots and every share they hold."""
    fleet.until(Phase.SHARE)
    roots = {member: fleet.states[member]._root.reveal() for member in corrupt}
    for _ in (Phase.SHARE, Phase.MASK):
        assert fleet.play() is None
    coordinator = Coordinator(fleet.server.session, corrupt, roots, fleet.sent[Phase.SHARE])
    for member in corrupt:
        point = coordinator.session.point(member)
        for dealer, shares in fleet.states[member]._held.items():
            coordinator.root_shares.setdefault(dealer, {})[point] = shares.root.reveal()
            coordinator.seeds.setdefault(dealer, {})[point] = shares.seed.reveal()
    return coordinator


def attack(
    monkeypatch: pytest.MonkeyPatch, fleet: Fleet, coordinator: Coordinator, victims: tuple[str, ...], views: Mapping
) -> np.ndarray | None:
    """Shows every honest member its own list, and returns what the coordinator can open afterwards.

    First against our members, and then, from the very same states, against members that do not check the confirmations.
    """
    session, least = coordinator.session, fleet.context.min_confirmations
    signed = {}
    for member, view in views.items():
        fleet.inbox[member] = Survivors(tuple(sorted(view)))
        signed[member] = fleet.act(member, Phase.CONFIRM)

    for member, view in views.items():
        agreed = session.survivors_digest(view)
        bought = [
            Confirmation(name, fleet.identities[name].sign(session.confirmation_statement(name, agreed)))
            for name in coordinator.corrupt
            if name in view
        ]
        alike = [signed[other] for other in views if views[other] == view]
        refusals = []
        for confirmations in ([*bought, *alike], [*bought, *(signed[other] for other in views if other in view)]):
            fleet.inbox[member] = Confirmations(tuple(confirmations))
            with pytest.raises(Refusal) as caught:
                fleet.act(member, Phase.UNMASK)
            refusals.append(caught.value.reason)
        assert len(bought) + len(alike) < least
        assert refusals == [Reason.CONFIRMATIONS_TOO_FEW, Reason.CONFIRMATIONS_SIGNATURE_INVALID]
    assert coordinator.open(victims, fleet.masked) is None

    monkeypatch.setattr(AwaitingConfirmations, "_check_confirmations", lambda self, confirmations: None)
    for member in views:
        fleet.inbox[member] = Confirmations(())
        coordinator.take(fleet.act(member, Phase.UNMASK))
    return coordinator.open(victims, fleet.masked)


@pytest.mark.long
def test_unchecked_confirmations_let_a_split_view_isolate_two_of_100(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(100, corrupt=33, values=12)
    assert fleet.context.threshold == 67
    corrupt, honest = tuple(f"m{i}" for i in range(33)), [f"m{i}" for i in range(33, 100)]
    coordinator = until_survivors(fleet, corrupt)
    one, two, *others = honest
    size = 67 - len(corrupt) - 2
    # Blocks of 32 of the 65 others. Any one of them is left out by 33 lists and given up by the 33 corrupt members. The
    # last share comes from a victim's own list: the two victims' lists share none of the others, so one leaves it out.
    views = {
        member: {*corrupt, one, two, *((others + others)[place : place + size])} for place, member in enumerate(others)
    }
    views[one] = {*corrupt, one, two, *others[:size]}
    views[two] = {*corrupt, one, two, *others[size : 2 * size]}
    assert all(len(view) == 67 and member in view for member, view in views.items())
    opened = attack(monkeypatch, fleet, coordinator, (one, two), views)
    assert opened is not None
    np.testing.assert_array_equal(opened, fleet.plain_sum((one, two)))


def leave_out(session: Session, victims: tuple[str, ...], corrupt: tuple[str, ...], most: int) -> dict[str, set[str]]:
    """Returns which of the victims' neighbours each honest member's list leaves out.

    With the corrupt members' shares, t neighbours of each one left out then give a share of its masking key.
    """
    t = session.context.threshold
    around = {other for victim in victims for other in session.neighbours(victim)} - {*victims, *corrupt}
    honest = set(session.members) - set(corrupt)
    left: dict[str, set[str]] = {member: set() for member in honest}
    wanted = {w: t - len(set(session.neighbours(w)) & set(corrupt)) for w in around}
    # Neighbours that the fewest members could leave out come first, assigned to the members with the most room.
    for w in sorted(around, key=lambda w: (sum(len(left[m]) < most for m in set(session.neighbours(w)) & honest), w)):
        able = sorted((m for m in session.neighbours(w) if m in honest), key=lambda m: (len(left[m]), m))
        for member in able[: wanted[w]]:
            left[member].add(w)
    return left


def test_unchecked_confirmations_let_a_split_view_isolate_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the sparse graph a member's list only has to leave out some neighbours, and may leave out floor(delta n)."""
    fleet = SparseFleet(100, lost=0.2, values=12)
    assert (fleet.context.sparse.degree, fleet.context.threshold, fleet.context.min_survivors) == (52, 32, 80)
    corrupt = tuple(f"m{i}" for i in range(10))
    coordinator = until_survivors(fleet, corrupt)
    session = coordinator.session
    one = next(member for member in session.members if member not in corrupt)
    # The neighbour with which it shares the most neighbours.
    two = max(
        (other for other in session.neighbours(one) if other not in corrupt),
        key=lambda other: len(set(session.neighbours(one)) & set(session.neighbours(other))),
    )
    left = leave_out(session, (one, two), corrupt, 20)
    assert max(map(len, left.values())) <= 20
    views = {member: set(session.members) - gone for member, gone in left.items()}
    opened = attack(monkeypatch, fleet, coordinator, (one, two), views)
    assert opened is not None
    np.testing.assert_array_equal(opened, fleet.plain_sum((one, two)))
