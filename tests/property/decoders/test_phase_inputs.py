"""Any message of the right type leads a phase to a new state, a refusal or a drop, whatever it contains. It never leads
to another exception, a hang or disproportionate memory, and a refusal changes nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import secure_agg
from secure_agg import Abandoned, Dropped, Phase, Reason, Refusal, merkle, vector_digest
from secure_agg import server as server_side
from secure_agg.certificates import by_digest
from secure_agg.session import advertisement_statement
from tests.property.decoders.test_wire_decoders import peak
from tests.support.made_inputs import changed, leaves_of
from tests.support.sparse_fleet import SparseFleet
from tests.support.sum_fleet import Fleet

SOON = timedelta(seconds=10)
quick = settings(max_examples=60, deadline=SOON, suppress_health_check=list(HealthCheck))
long = settings(max_examples=1500, deadline=SOON, suppress_health_check=list(HealthCheck))
seeds = st.tuples(st.integers(0, 2**32), st.integers(1, 3))

ME = "m1"
# What a member receives at the start of each phase but the first, and what the server receives in each.
HEARD = (Phase.SHARE, Phase.MASK, Phase.CONFIRM, Phase.UNMASK)
GRAPHS: dict[str, Callable[[], Fleet]] = {"complete": lambda: Fleet(5), "sparse": lambda: SparseFleet(24)}
# Losses, so that the server needs the keys of dropouts.
LOST = {Phase.MASK: {"m4"}}


@dataclasses.dataclass
class Table:
    """Fleets at the start of a phase, made on demand. A fleet whose state was used is made again."""

    made: dict[tuple[str, Phase], Fleet] = dataclasses.field(default_factory=dict)

    def at(self, graph: str, phase: Phase) -> Fleet:
        if (graph, phase) not in self.made:
            self.made[graph, phase] = GRAPHS[graph]().until(phase, LOST)
        return self.made[graph, phase]

    def used(self, graph: str, phase: Phase) -> None:
        del self.made[graph, phase]


TABLE = Table()


@functools.cache
def everything(graph: str) -> tuple[Any, ...]:
    """Names, keys, shares and signatures of another attempt, to replace this one's."""
    fleet = GRAPHS[graph]()
    leaves = []
    for _ in Phase:
        assert fleet.play() is None
        some = list(fleet.sent.values())
        leaves += [leaf for sent in some for message in list(sent.values())[:2] for leaf in leaves_of(message)]
        leaves += [leaf for message in list(fleet.inbox.values())[:2] for leaf in leaves_of(message)]
    chance = random.Random(0)
    chance.shuffle(leaves)
    return tuple(leaves[:200])


def bent(message: Any, seed: int, times: int, others: tuple[Any, ...]) -> Any:
    chance = random.Random(seed)
    pool = [*leaves_of(message)[:100], *others]
    for _ in range(times):
        chance.shuffle(pool)
        message = changed(message, chance.getrandbits(32), pool)
    return message


def signed_again(fleet: Fleet, message: Any) -> Any:
    """The message, signed again by the members that it names. Otherwise every change would already fail at the
    signature.
    """

    def sign(member: str, statement: bytes) -> bytes:
        identity = fleet.identities.get(member)
        return identity.sign(statement) if identity is not None else b""

    def entry(each: secure_agg.Advertisement) -> secure_agg.Advertisement:
        return dataclasses.replace(each, signature=sign(each.member, advertisement_statement(fleet.context, each)))

    def dealt(each: secure_agg.ReceivedDealing) -> secure_agg.ReceivedDealing:
        if each.dealer not in session.entries or ME not in session.receivers(each.dealer):
            return each
        root = session.received_root(ME, each)
        if root is None:
            return each
        statement = session.dealing_statement(each.dealer, each.seed_commitment, root)
        return dataclasses.replace(each, signature=sign(each.dealer, statement))

    session = getattr(fleet.server, "session", None)
    match message:
        case secure_agg.Advertisement():
            return entry(message)
        case secure_agg.Roster(entries):
            return secure_agg.Roster(tuple(map(entry, entries[:50])))
        case secure_agg.ReceivedDealings(dealings) if session is not None:
            return secure_agg.ReceivedDealings(tuple(map(dealt, dealings[:50])))
        case secure_agg.Dealing(dealer=dealer, shares=shares) if session is not None and shares:
            root = merkle.root_of(session.dealing_leaves(dealer, shares))
            statement = session.dealing_statement(dealer, message.seed_commitment, root)
            return dataclasses.replace(message, signature=sign(dealer, statement))
        case secure_agg.MaskedInput(member, digest, length) if session is not None:
            return dataclasses.replace(
                message, signature=sign(member, session.masked_input_statement(member, digest, length))
            )
    return message


# ---- members --------------------------------------------------------------------------------------------------------


def hear(state: Any, message: Any, served: Iterable[bytes] = ()) -> Any:
    match message:
        case secure_agg.Roster() | secure_agg.DigestRoster():
            return state.on_roster(message, served)
        case secure_agg.ReceivedDealings():
            return state.on_dealings(message)
        case secure_agg.Survivors():
            return state.on_survivors(message)
        case _:
            return state.on_confirmations(message)


def _explained(refusal: Refusal) -> None:
    assert refusal.reason.sentence
    assert refusal.member is None or isinstance(refusal.member, str)
    assert len(str(refusal)) < 1000


def member_hears(graph: str, phase: Phase, seed: int, times: int) -> None:
    fleet = TABLE.at(graph, phase)
    honest, state = fleet.inbox[ME], fleet.states[ME]
    message, served = bent(honest, seed, times, everything(graph)), list[bytes]()
    if seed % 2:
        message = signed_again(fleet, message)
    if phase is Phase.SHARE and seed % 4 == 0:
        served = [item for entry in message.advertisements for item in (entry.certificate, entry.keys)]
        message = secure_agg.DigestRoster(tuple(by_digest(entry) for entry in message.advertisements))
        try:
            missing = state.missing(message)
            assert all(len(each) == 32 for each in missing)
        except Refusal as refusal:
            _explained(refusal)
    try:
        answer = hear(state, message, served)
    except Refusal as refusal:
        _explained(refusal)
        return
    # It was accepted: nothing relevant was changed, or what is left is still enough.
    TABLE.used(graph, phase)
    assert answer is not None
    if message != honest and phase is Phase.UNMASK:
        _, unmasking = answer
        assert {share.dealer for share in unmasking.seed_shares} <= set(state.survivors)
        assert not {share.dealer for share in unmasking.root_shares} & set(state.survivors)


@quick
@given(seeds)
@pytest.mark.parametrize("phase", HEARD)
def test_a_member_withstands_any_message(phase: Phase, how: tuple[int, int]) -> None:
    member_hears("complete", phase, *how)


@settings(quick, max_examples=30)
@given(seeds)
@pytest.mark.parametrize("phase", HEARD)
def test_a_member_on_a_sparse_graph_withstands_any_message(phase: Phase, how: tuple[int, int]) -> None:
    member_hears("sparse", phase, *how)


# ---- the server -----------------------------------------------------------------------------------------------------

SENDERS = ("m0", ME, "m4", "m9", "")
PASSED_ON = (
    server_side.CollectingAdvertisements,
    server_side.CollectingDealings,
    server_side.CollectingMasked,
    server_side.CollectingConfirmations,
    server_side.CollectingUnmaskings,
)


@functools.cache
def said(graph: str) -> dict[Phase, dict[str, Any]]:
    """What honest members send to the servers of `TABLE` in each phase. All fleets of a kind send the same."""
    fleet = GRAPHS[graph]()
    for phase in Phase:
        assert fleet.play(LOST.get(phase, ())) is None
    return fleet.sent


def server_is_told(graph: str, phase: Phase, seed: int, times: int) -> None:
    fleet = TABLE.at(graph, phase)
    chance = random.Random(seed)
    # Usually a message of this phase, sometimes one of another.
    honest = said(graph)[chance.choice([phase] * 6 + list(Phase))]
    who = chance.choice([name for name in SENDERS if name in honest] or list(honest))
    message = bent(honest[who], seed, times, everything(graph))
    if seed % 2:
        message = signed_again(fleet, message)
    sender = chance.choice([who] * 4 + list(SENDERS))
    # A server is immutable, so every example starts with the same one.
    server = fleet.server
    if isinstance(server, server_side.CollectingMasked):
        digest = chance.choice([getattr(message, "digest", b""), bytes(32), b""])
        answer = server.receive(sender, message, digest)
    else:
        answer = server.receive(sender, message)
    if isinstance(answer, Dropped):
        assert answer.member == sender
        assert answer.reason.sentence
        assert len(answer.detail) < 1000
        after = server.drop(sender, answer.reason, answer.detail)
    else:
        assert isinstance(answer, PASSED_ON)
        after = answer
    # The other messages are honest and arrive, or do not; either way the phase can be closed.
    if chance.random() < 0.5 and phase is not Phase.MASK:
        for name, each in said(graph)[phase].items():
            if name in after.waiting:
                taken = after.receive(name, each)
                if isinstance(taken, Dropped):
                    # The later sender of a copied key is dropped, even if the copy came first. That is intended.
                    assert (phase, taken.reason) == (Phase.ADVERTISE, Reason.ADVERTISEMENT_KEY_DUPLICATE)
                    taken = after.drop(name, taken.reason)
                after = taken
    closed = after.close()
    if isinstance(closed, Abandoned):
        assert closed.reason.sentence
    else:
        following, outgoing, dropped = closed
        assert following is not None
        assert all(isinstance(each, Dropped) for each in dropped)
        assert set(outgoing) <= set(fleet.identities)


@quick
@given(seeds)
@pytest.mark.parametrize("phase", list(Phase))
def test_a_server_withstands_any_message(phase: Phase, how: tuple[int, int]) -> None:
    server_is_told("complete", phase, *how)


@settings(quick, max_examples=30)
@given(seeds)
@pytest.mark.parametrize("phase", list(Phase))
def test_a_server_on_a_sparse_graph_withstands_any_message(phase: Phase, how: tuple[int, int]) -> None:
    server_is_told("sparse", phase, *how)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("phase", list(Phase))
def test_anything_at_length(graph: str, phase: Phase) -> None:
    @long
    @given(seeds)
    def both(how: tuple[int, int]) -> None:
        server_is_told(graph, phase, *how)
        if phase in HEARD:
            member_hears(graph, phase, *how)

    both()


def test_the_generated_inputs_reach_every_check() -> None:
    """The generated changes reach many reasons in each phase and do not all fail at the first length check."""
    expected = {
        Phase.SHARE: 6,
        # The dealer's signature covers everything that it sealed, so what is changed afterwards rarely gets further.
        Phase.MASK: 5,
        Phase.CONFIRM: 3,
        Phase.UNMASK: 4,
    }
    for phase, least in expected.items():
        reasons = set()
        for seed in range(120):
            fleet = TABLE.at("complete", phase)
            message = bent(fleet.inbox[ME], seed, 1, everything("complete"))
            try:
                hear(fleet.states[ME], message)
            except Refusal as refusal:
                reasons.add(refusal.reason)
            else:
                TABLE.used("complete", phase)
        assert len(reasons) >= least, (phase, reasons)


# ---- memory ---------------------------------------------------------------------------------------------------------

MANY = 50_000
LONG = bytes(1_000_000)


def with_share(dealing: secure_agg.ReceivedDealing, **changes: bytes) -> secure_agg.ReceivedDealing:
    return dataclasses.replace(dealing, share=dataclasses.replace(dealing.share, **changes))


def large(fleet: Fleet, phase: Phase) -> list[Any]:
    """Messages to a member at the start of a phase, far larger than any honest one."""
    message = fleet.inbox[ME]
    match message:
        case secure_agg.Roster(entries):
            return [
                secure_agg.Roster(entries * (MANY // len(entries))),
                secure_agg.Roster((dataclasses.replace(entries[0], certificate=LONG), *entries[1:])),
                secure_agg.Roster((dataclasses.replace(entries[0], keys=LONG), *entries[1:])),
                secure_agg.Roster((dataclasses.replace(entries[0], member="m" * len(LONG)), *entries[1:])),
            ]
        case secure_agg.ReceivedDealings(dealings):
            first, *rest = dealings
            return [
                secure_agg.ReceivedDealings(dealings * (MANY // len(dealings))),
                *(
                    secure_agg.ReceivedDealings((with_share(first, **{field: LONG}), *rest))
                    for field in ("sealed_key", "locked_shares", "key_commitment", "sealed_pair_seed")
                ),
                secure_agg.ReceivedDealings((dataclasses.replace(first, path=(bytes(32),) * MANY), *rest)),
                secure_agg.ReceivedDealings((dataclasses.replace(first, signature=LONG), *rest)),
            ]
        case secure_agg.Survivors(members):
            return [
                secure_agg.Survivors(members * MANY),
                secure_agg.Survivors((*members, "m" * len(LONG))),
                secure_agg.Survivors((*members, *(f"x{number}" for number in range(MANY)))),
            ]
        case secure_agg.Confirmations(confirmations):
            return [
                secure_agg.Confirmations(confirmations * MANY),
                secure_agg.Confirmations((secure_agg.Confirmation("m0", LONG), *confirmations[1:])),
                secure_agg.Confirmations(tuple(secure_agg.Confirmation(f"x{number}", b"") for number in range(MANY))),
            ]
    raise AssertionError(message)


def size_of(message: Any) -> int:
    """Size of a message in bytes: its leaves, and a reference for each list entry."""
    leaves = leaves_of(message)
    return 8 * len(leaves) + sum(len(leaf) for leaf in leaves if isinstance(leaf, bytes | str))


@pytest.mark.parametrize("phase", HEARD)
def test_a_member_refuses_oversized_messages_in_little_memory(phase: Phase) -> None:
    fleet = TABLE.at("complete", phase)
    for message in large(fleet, phase):
        state = fleet.states[ME]
        refused = []

        def listen(state: Any = state, message: Any = message, refused: list[Any] = refused) -> None:
            try:
                hear(state, message)
            except Refusal as refusal:
                refused.append(refusal.reason)

        used = peak(listen)
        assert refused, type(message)
        # At most it needs a set of the names, and two framed copies of what is signed.
        assert used < 8 * size_of(message) + 200_000, (refused, used, size_of(message))


@pytest.mark.parametrize("phase", list(Phase))
def test_a_server_refuses_oversized_messages_in_little_memory(phase: Phase) -> None:
    fleet = TABLE.at("complete", phase)
    honest = said("complete")[phase][ME]
    tried = 0
    for field in dataclasses.fields(honest):
        value = getattr(honest, field.name)
        if isinstance(value, tuple) and value:
            wrong: Any = value * (MANY // len(value))
        elif isinstance(value, bytes):
            wrong = LONG
        else:
            continue
        message = dataclasses.replace(honest, **{field.name: wrong})
        verdicts: list[Any] = []

        def listen(message: Any = message, verdicts: list[Any] = verdicts) -> None:
            server = fleet.server
            if isinstance(server, server_side.CollectingMasked):
                verdicts.append(server.receive(ME, message, vector_digest(np.zeros(6, "<u4"), 32)))
            else:
                verdicts.append(server.receive(ME, message))

        used = peak(listen)
        assert isinstance(verdicts[0], Dropped), (field.name, verdicts)
        assert used < 8 * size_of(message) + 200_000, (field.name, used, size_of(message))
        tried += 1
    assert tried
