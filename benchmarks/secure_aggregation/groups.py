"""Plays one attempt of a large cohort in groups, with a worker for each group at a time, and measures both sides.

It runs the product: `secure_agg` on both sides, certificates, RSA-3072 signatures, packing, and the messages' encoding.
One process is the coordinator until the roster is made and the groups are drawn. Then workers of an engine of
`simulation.engines` (processes, or Ray's actors) serve the groups, each with the members of its group. A member that
advertised in one worker goes on in another: its secrets follow from a seed.

Some members are timed. They check every signature themselves. The others of a group share the checks. The lost members
deal and then vanish, so that survivors and server remove their masks.

Guarantees: every group's sum is exactly that of its survivors' encoded vectors, and the mean over the groups, weighted
by their survivors, is the survivors' mean, or `GroupsFailed` is raised.
"""

import hashlib
import resource
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import serialization

import secure_agg
from benchmarks.library.parties import mean_of, vector_of
from benchmarks.library.record import Figure
from benchmarks.library.stopwatch import Stopwatch
from benchmarks.secure_aggregation.cohort import Known
from benchmarks.secure_aggregation.crowd import Crowd, context_with, layout_for
from coordinator.rounds.masked_sum import Party
from secure_agg import Layout, Phase, RoundContext, VerifyIdentity
from secure_agg.groups import drawn, find_groups, largest_group
from secure_agg.server import serve_group
from secure_agg.session import grouped_root
from simulation.engines import Engine, local_engine
from tacit import wire
from tacit.attempt import AttemptId
from tacit.messages import AttemptMessage, MemberPayload
from tacit.verification import verifiers

__all__ = ["GroupsFailed", "Split", "Told", "Worker", "cost", "measured", "split_of"]

# What `split_of` asks for: shares of the cohort that are corrupt and lost, and honest members of every group.
CORRUPT_PERCENT, LOST_PERCENT, HONEST = 2, 2, 8
# Members of one call that only advertises, and about how many groups have a timed member.
_AT_ONCE, _TIMED = 500, 5
_AT = AttemptId("benchmark", 1, 1)


class GroupsFailed(RuntimeError):
    """The attempt did not open the sums of the survivors."""


@dataclass(frozen=True)
class Split:
    """The numbers of a cohort in groups: its context, and how vectors are laid out."""

    context: RoundContext
    layout: Layout


def split_of(members: int, values: int) -> Split:
    """Return the split that the parameter finder chooses."""
    corrupt, lost = members * CORRUPT_PERCENT // 100, members * LOST_PERCENT // 100
    graph, threshold = find_groups(members, corrupt, lost, HONEST)
    layout = layout_for(largest_group(members, graph.groups), values)
    return Split(context_with(members, layout, threshold, corrupt, graph), layout)


class _Seeded:
    """A member's source of randomness, which is the same in every process. For benchmarks only."""

    def __init__(self, seed: bytes) -> None:
        self._seed, self._drawn = seed, 0

    def bytes(self, n: int, /) -> bytes:
        """Return the next n bytes."""
        self._drawn += 1
        return hashlib.shake_256(self._seed + self._drawn.to_bytes(8, "big")).digest(n)


class _Signer:
    """A member's identity that signs nothing while its state is made again."""

    def __init__(self, party: Party, signs: bool) -> None:
        self._party, self.signs = party, signs
        self.member, self.certificate = party.member, party.certificate

    def sign(self, message: bytes) -> bytes:
        return self._party.sign(message) if self.signs else b""


@dataclass(frozen=True)
class Told:
    """What a worker knows: the attempt, the authority's certificate (DER), and the seed of the members' secrets."""

    split: Split
    root: bytes
    seed: bytes


@dataclass(frozen=True)
class Seat:
    """One member of a group: its number, name, certificate and key (DER each)."""

    number: int
    member: str
    certificate: bytes
    key: bytes

    @classmethod
    def of(cls, number: int, party: Party) -> "Seat":
        """Return what another process needs of a party."""
        key = party.key.private_bytes(
            serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return cls(number, party.member, party.certificate, key)

    @property
    def party(self) -> Party:
        """The party."""
        key: Any = serialization.load_der_private_key(self.key, None, unsafe_skip_rsa_key_validation=True)
        return Party(self.member, self.certificate, key)


@dataclass(frozen=True)
class GroupPlayed:
    """What one group cost.

    Args:
        total: the opened sum, packed.
        survivors: numbers of the members in it.
        server_cpu: processor seconds of the server for this group.
        dealt_bytes: what the server holds of the group between dealings and unmasking, as encoded.
        members: (processor seconds, bytes sent, bytes received) of each timed member.
        peak_bytes: highest resident size of the worker so far, with the group's members in it.
    """

    total: bytes
    survivors: tuple[int, ...]
    server_cpu: float
    dealt_bytes: int
    members: tuple[tuple[float, int, int], ...]
    peak_bytes: int


class Worker:
    """Advertises for members, and plays whole groups."""

    def __init__(self, told: Told) -> None:
        self._told = told
        self._verify, self._key_of = verifiers(x509.load_der_x509_certificate(told.root))

    def advertise(self, seats: Sequence[Seat]) -> tuple[list[secure_agg.Advertisement], float]:
        """Return the members' advertisements, and the processor seconds of one."""
        watch, made = Stopwatch(), []
        parties = [seat.party for seat in seats]
        for seat, party in zip(seats, parties, strict=True):
            with watch.running():
                made.append(self._opened(seat, party)[1])
        return made, watch.cpu / len(seats)

    def play(
        self,
        names: tuple[str, ...],
        roster: secure_agg.GroupRoster,
        root: bytes,
        shown: Sequence[secure_agg.Advertisement],
        seats: Sequence[Seat],
        lost: Collection[int],
        timed: bool,
    ) -> GroupPlayed:
        """Play one group to its opened sum.

        Args:
            names: of the whole roster.
            roster: what the group's members are sent.
            root: of the roster.
            shown: the members' advertisements, in the order of `seats`.
            lost: numbers of the members that vanish before they mask.
            timed: whether the first member that stays is timed.

        Raises:
            GroupsFailed: a message was not accepted, or the sum is not that of the survivors.
        """
        split, server = self._told.split, Stopwatch()
        known = Known(self._verify)
        # A certificate is verified once in a member's life, and not by the clock.
        for each in shown:
            self._key_of(each.certificate)
        with server.running():
            state: Any = serve_group(split.context, names, root, shown, known)
            total = np.zeros(split.context.values, dtype=secure_agg.RING_DTYPE)
        stay = [seat for seat in seats if seat.number not in lost]
        roster = replace(roster, names=names)
        parts = [part for each in shown for part in (each.certificate, each.keys)]
        clocked = stay[0].number if timed else -1
        members = {}
        for seat, own in zip(seats, shown, strict=True):
            verify = self._verify if seat.number == clocked else known
            members[seat.member] = _Member(
                self._opened(seat, seat.party, verify, own), split, own, parts, seat.number == clocked
            )
        plain, inbox, dealt = total.copy(), dict.fromkeys(members, roster), 0
        for phase in list(Phase)[1:]:
            for seat in seats if phase is Phase.SHARE else stay:
                member = members[seat.member]
                sent, packed = member.answer(phase, inbox[seat.member], seat.number)
                with server.running():
                    if packed is None:
                        answer = state.receive(seat.member, sent)
                    else:
                        answer = state.receive(seat.member, sent, hashlib.sha256(packed).digest())
                        secure_agg.add_packed(total, packed, 0, split.context.bits)
                if isinstance(answer, secure_agg.Dropped):
                    raise GroupsFailed(f"the server dropped {answer.member}: {answer.reason} {answer.detail}")
                state = answer
                if isinstance(sent, secure_agg.Dealing):
                    dealt += wire.to_coordinator(AttemptMessage(_AT, sent)).ByteSize()
            with server.running():
                closed = state.close()
            if isinstance(closed, secure_agg.Abandoned):
                raise GroupsFailed(f"the attempt was abandoned: {closed.reason} {closed.detail}")
            state, inbox, _ = closed
        with server.running():
            state.unmask(total, threads=1)
        for seat in stay:
            plain += members[seat.member].plain
        plain &= np.uint32((1 << split.context.bits) - 1)
        if not np.array_equal(plain, total):
            raise GroupsFailed("the opened sum is not that of the survivors")
        of_timed = tuple(members[seat.member].cost for seat in stay if seat.number == clocked)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        packed_total = bytes(secure_agg.pack_in_place(total, split.context.bits))
        numbers = tuple(seat.number for seat in stay)
        return GroupPlayed(packed_total, numbers, server.cpu, dealt, of_timed, peak)

    def _opened(
        self,
        seat: Seat,
        party: Party,
        verify: VerifyIdentity | None = None,
        own: secure_agg.Advertisement | None = None,
    ) -> tuple[Any, secure_agg.Advertisement]:
        """Return the member's state and advertisement. With `own`, the state that made it, made again."""
        random = _Seeded(self._told.seed + seat.number.to_bytes(8, "big"))
        signer = _Signer(party, signs=own is None)
        state, made = secure_agg.advertise(
            self._told.split.context, signer, verify or self._verify, random, key_of=self._key_of
        )
        if own is None:
            return state, made
        signer.signs = True
        if replace(made, signature=own.signature) != own:
            raise GroupsFailed(f"{seat.member} is not the one that advertised")
        # A signature is salted, so it is the one thing that the seed does not make again.
        return replace(state, advertisement=own), own


class _Member:
    """One member's part as its agent does it, with what it costs and what it sends."""

    def __init__(
        self,
        opened: tuple[Any, secure_agg.Advertisement],
        split: Split,
        own: secure_agg.Advertisement,
        parts: Sequence[bytes],
        clocked: bool,
    ) -> None:
        self._state, _ = opened
        self._split, self._parts, self.clocked = split, parts, clocked
        self._watch, self._received = Stopwatch(), 0
        self._sent = _weight(own)
        self.plain = np.zeros(0, dtype=secure_agg.RING_DTYPE)

    @property
    def cost(self) -> tuple[float, int, int]:
        """Processor seconds, bytes sent, bytes received."""
        return self._watch.cpu, self._sent, self._received

    def answer(self, phase: Phase, message: Any, number: int) -> tuple[Any, memoryview | None]:
        """Return its message and, in the masking phase, its packed vector."""
        vector = vector_of(number, self._split.layout.values) if phase is Phase.MASK else np.zeros(0)
        packed = None
        # A member of its own has drawn nothing before.
        if self.clocked:
            grouped_root.cache_clear()
            drawn.cache_clear()
        with self._watch.running():
            match phase:
                case Phase.SHARE:
                    missing = self._state.missing(message)
                    self._state, sent = self._state.on_roster(message, self._parts)
                case Phase.MASK:
                    ready = self._state.on_dealings(message)
                    ring = self._split.layout.encode({"update": vector}, secure_agg.SystemRandom())
                    with self._watch.paused():
                        self.plain = ring.copy()
                    self._state, sent = ready.mask(ring, threads=1)
                    packed = secure_agg.pack_in_place(ring, self._split.layout.bits)
                case Phase.CONFIRM:
                    self._state, sent = self._state.on_survivors(message)
                case _:
                    self._state, sent = self._state.on_confirmations(message)
        self._received += wire.to_member(AttemptMessage(_AT, message)).ByteSize()
        if phase is Phase.SHARE:
            wanted = frozenset(missing)
            self._received += sum(len(part) for part in self._parts if hashlib.sha256(part).digest() in wanted)
        self._sent += _weight(sent) if packed is None else len(packed) + len(sent.digest) + len(sent.signature)
        return sent, packed


def _weight(message: MemberPayload) -> int:
    return wire.to_coordinator(AttemptMessage(_AT, message)).ByteSize()


# Starts an engine: make, told, workers.
StartEngine = Callable[[Callable[[Any], Any], Any, int], AbstractContextManager[Engine]]


def cost(crowd: Crowd, values: int, dropped: int, workers: int, start: StartEngine = local_engine) -> list[Figure]:
    """Measure an attempt over the whole crowd in groups, on the workers of an engine."""
    members = len(crowd.parties)
    split = split_of(members, values)
    root = crowd.root.public_bytes(serialization.Encoding.DER)
    told = Told(split, root, secure_agg.SystemRandom().bytes(32))
    with start(Worker, told, workers) as engine:
        return measured(engine, crowd, split, dropped)


def measured(engine: Engine, crowd: Crowd, split: Split, dropped: int) -> list[Figure]:
    """Play an attempt on an engine whose workers are `Worker`s, and return its figures. Raises: GroupsFailed."""
    context, members = split.context, len(crowd.parties)
    lost = frozenset(index * members // dropped for index in range(dropped))
    seats = [Seat.of(number, party) for number, party in enumerate(crowd.parties)]
    calls = [(seats[start : start + _AT_ONCE],) for start in range(0, members, _AT_ONCE)]
    made = list(engine.each("advertise", calls))
    shown = {each.member: each for part, _ in made for each in part}
    front, before = Stopwatch(), _resident()
    with front.running():
        state: Any = secure_agg.open_attempt(
            context, [seat.member for seat in seats], crowd.verify, key_of=crowd.key_of
        )
        for name, advertisement in shown.items():
            state = state.receive(name, advertisement)
        state, _, _ = state.close()
        session = state.session
        rosters = [session.roster_of(number) for number in range(len(session.groups))]
    grown = _resident() - before
    by_name = {seat.member: seat for seat in seats}
    step = max(1, len(rosters) // _TIMED)
    plays = [
        (
            session.members,
            # All names travel once for a group, in the first argument.
            replace(roster, names=()),
            session.root,
            [shown[entry.member] for entry in roster.advertisements],
            [by_name[entry.member] for entry in roster.advertisements],
            lost,
            number % step == 0,
        )
        for number, roster in enumerate(rosters)
    ]
    total, survivors, played = np.zeros(context.values), [], []
    for group in engine.each("play", plays):
        out = np.zeros(context.values, dtype=secure_agg.RING_DTYPE)
        secure_agg.unpack_into(out, group.total, context.bits)
        # A group's mean, weighted by its survivors, is its sum.
        total += split.layout.decode(out)["update"]
        survivors += group.survivors
        played.append(replace(group, total=b""))
    error = float(np.abs(total / len(survivors) - mean_of(survivors, context.values)).max())
    if len(survivors) != members - dropped or not error <= 1 / split.layout.segments[0].scale:
        raise GroupsFailed(f"{len(survivors)} survivors, and their mean is off by {error:g}")
    return _figures(split, played, front.cpu, grown, sum(seconds for _, seconds in made) / len(made))


def _figures(split: Split, played: Sequence[GroupPlayed], front: float, grown: int, advertise: float) -> list[Figure]:
    context, timed = split.context, [each for group in played for each in group.members]
    cpu, sent, received = (sum(each) / len(timed) for each in zip(*timed, strict=True))
    of_groups = sum(group.server_cpu for group in played)
    return [
        Figure(
            "client_cpu_seconds",
            round(cpu + advertise, 5),
            "s",
            {"timed": len(timed), "honest": context.honest, "threshold": context.threshold},
        ),
        Figure(
            "server_cpu_seconds",
            round(front + of_groups, 3),
            "s",
            {"roster_seconds": round(front, 3), "group_seconds": round(of_groups / len(played), 4)},
        ),
        Figure("client_bytes", round(sent + received), "B", {"sent": round(sent), "received": round(received)}),
        Figure("server_bytes", round((sent + received) * context.cohort), "B"),
        Figure(
            "server_held_bytes",
            grown + sum(group.dealt_bytes for group in played),
            "B",
            {
                "roster_bytes": grown,
                "group_bytes": max(group.dealt_bytes for group in played),
                "worker_peak_bytes": max(group.peak_bytes for group in played),
            },
        ),
    ]


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
