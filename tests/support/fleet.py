"""A federation in one thread: the coordinator's and the members' state machines under a simulated clock.

Nothing here decides anything. Both sides use the real transitions and the real aggregation protocol. The fleet delivers
messages with a delay, keeps timers, and replaces training by a random vector and disks by lists. `Fleet(5).run()`
continues until nothing is left to happen.
"""

import hashlib
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import secure_agg
from coordinator.domain.explosion import WINDOW
from coordinator.domain.jobs import JobStatus
from coordinator.rounds import effects as fx
from coordinator.rounds import events as ev
from coordinator.rounds.machine import transition
from coordinator.rounds.optimiser import StateVectors
from coordinator.rounds.publish import GroupSum, ResultInvalid, next_version, next_version_of_groups, norms_of
from coordinator.rounds.state import Aggregating, JobState, Parameters
from coordinator.rounds.timers import PhaseDeadline, Timer
from coordinator.rounds.transitions import Phase, is_allowed
from edge_client.policy.policy import Policy
from edge_client.session import states
from edge_client.session.journal import Memory
from edge_client.session.machine import transition as member_transition
from learning.mechanisms.contribution import Update, update_digest
from learning.mechanisms.protection import protection_of
from secure_agg.server import Seated
from tacit.attempt import AttemptId
from tacit.job import Aggregation, Deadlines, JobDocument, Rounds
from tacit.mechanism import NoMechanism
from tacit.messages import Assignment, AttemptEnded, AttemptMessage, AttemptOpened, Decline, Ready
from tacit.reason import Reason
from tests.support.sum_fleet import FEDERATION, SeededRandom, TestIdentity, key_of, verify

VALUES = 6
DELAY_MS = 5
TRAINING_MS = 1000


def job_document(aggregation: Aggregation = Aggregation(), **rounds: Any) -> JobDocument:  # noqa: B008
    """A job small enough to aggregate in microseconds."""
    numbers: dict[str, Any] = {"count": 3, "min_members": 3, "deadlines": Deadlines(training=60, reconnect=2)}
    return JobDocument(
        name="questions",
        labels=("a", "b"),
        rounds=Rounds(**{**numbers, **rounds}),
        aggregation=aggregation,
        manifest=bytes(32),
        tokenizer=bytes(32),
        weights=hashlib.sha256(np.zeros(VALUES, "<f4").tobytes()).digest(),
        values=VALUES,
    )


@dataclass
class Member:
    """One member's process, and the state that outlives it."""

    name: str
    environment: states.Environment
    state: states.MemberState
    process: bytes
    alive: bool = True
    connected: bool = False
    update: Update | None = None
    fetched: list[states.FetchCertificates] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)
    joined: list[AttemptId] = field(default_factory=list)
    opened: list[AttemptId] = field(default_factory=list)
    signed: list[AttemptId] = field(default_factory=list)
    ended: list[tuple[AttemptId, Any]] = field(default_factory=list)
    over: list[Reason] = field(default_factory=list)
    said: list[Any] = field(default_factory=list)


class Fleet:
    """The coordinator, its members, and the simulated time."""

    def __init__(
        self,
        members: int,
        *,
        seed: int = 0,
        policy: Policy | None = None,
        job: JobDocument | None = None,
        verify: secure_agg.VerifyIdentity = verify,
    ) -> None:
        self.now_ms = 0
        self.seed = seed
        self.random = np.random.default_rng(seed)
        self.job = job or job_document()
        self.versions = {self.job.weights: np.zeros(VALUES, np.float32)}
        # The server optimiser's state vectors, by digest.
        self.server_states: dict[bytes, np.ndarray] = {}
        self.records: list[fx.Record] = []
        self.counts: list[fx.Count] = []
        self.inputs: dict[tuple[AttemptId, str], np.ndarray] = {}
        self.results: dict[AttemptId, tuple[tuple[str, ...], np.ndarray]] = {}
        # The same for each group, by its number. Without groups, the one sum is group 0.
        self.group_results: dict[AttemptId, dict[int, tuple[tuple[str, ...], np.ndarray]]] = {}
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        # The types of (state, event, next state) of every transition so far.
        self.transitions: set[tuple[type, type, type]] = set()
        self._timers: dict[Timer, int] = {}
        self._totals: dict[AttemptId, dict[int, np.ndarray]] = {}
        self._groups: dict[AttemptId, Any] = {}
        self._bits: dict[AttemptId, int] = {}
        self._spooled: dict[tuple[AttemptId, str], bytes] = {}
        # Whether this message to or from this member is lost. Tests replace it.
        self.lose: Callable[[str, Any], bool] = lambda member, message: False
        # A message's delays: none loses it, several repeat it, and unequal delays let messages overtake each other.
        self.delays: Callable[[str, Any], tuple[int, ...]] = lambda member, message: (DELAY_MS,)
        # The message that a lying coordinator sends in place of this one.
        self.bend: Callable[[str, Any], Any] = lambda member, message: message
        # The number of the roster log's entry for the certificate of an advertisement; 0: there is no log.
        self.entry_of: Callable[[str, secure_agg.Advertisement], int | None] = lambda member, advertisement: 0
        # Called before a message reaches a member. Tests kill members here.
        self.before: Callable[[str, Any], None] = lambda member, message: None
        self.parameters = Parameters(self.job, self.job.digest(), FEDERATION, verify, key_of)
        self.state = JobState(
            self.parameters, JobStatus.RUNNING, Reason.REASON_UNSPECIFIED, 0, False, 0, 0, 0, 0, self.job.weights
        )
        self.members: dict[str, Member] = {}
        # What the coordinator serves for a digest in a roster. Tests replace it.
        self.serves: Callable[[str, bytes], bytes | None] = lambda member, digest: self._served(digest)
        self._certificates: dict[bytes, bytes] = {}
        for number in range(members):
            name = f"m{number}"
            identity = TestIdentity(name)
            self._certificates[secure_agg.certificate_digest(identity.certificate)] = identity.certificate
            environment = states.Environment(
                identity,
                FEDERATION,
                verify,
                key_of,
                SeededRandom(f"{seed}/{name}"),
                policy or Policy(mechanisms=("none",)),
            )
            self.members[name] = Member(name, environment, states.MemberState(Memory({})), name.encode() * 4)
        self.post(ev.Started())

    # ---- time -----------------------------------------------------------------------------------------------------

    def at(self, delay_ms: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_ms + int(delay_ms), next(self._order), action))

    def run(self, until: Callable[[], bool] = lambda: False, *, hours: float = 48) -> "Fleet":
        """Runs until nothing is left to happen, `until` holds, or `hours` of simulated time have passed."""
        end = self.now_ms + int(hours * 3_600_000)
        while self._queue and self._queue[0][0] <= end and not until():
            self.now_ms, _, action = heapq.heappop(self._queue)
            action()
        return self

    # ---- acts -----------------------------------------------------------------------------------------------------

    def connect(self, *names: str) -> "Fleet":
        for name in names or tuple(self.members):
            member = self.members[name]
            member.connected = True
            self.post(ev.Connected(name, member.process))
        return self

    def cut(self, name: str) -> None:
        """Breaks the connection. The process keeps running."""
        member = self.members[name]
        if member.connected:
            member.connected = False
            self.post(ev.Disconnected(name))

    def kill(self, name: str) -> None:
        """The process ends and loses its memory."""
        self.members[name].alive = False
        self.cut(name)

    def restart(self, name: str) -> None:
        """Starts a new process with the old one's journal."""
        member = self.members[name]
        member.alive, member.update = True, None
        member.process = hashlib.sha256(member.process).digest()
        member.state = states.MemberState(member.state.memory)
        self.connect(name)

    def crash_coordinator(self) -> None:
        """Kills and restarts the coordinator. It loses its memory and keeps what it persisted; members reconnect."""
        self._timers.clear()
        self._totals.clear()
        self._spooled.clear()
        self._queue = [entry for entry in self._queue if getattr(entry[2], "of_member", False)]
        heapq.heapify(self._queue)
        self.state = self._stored()
        self.post(ev.Started())
        for name, member in self.members.items():
            if member.alive:
                self.connect(name)

    def _stored(self) -> JobState:
        """The job's state, restored from its records."""
        state = replace(self.state, members={}, status=JobStatus.RUNNING)
        values: dict[str, Any] = {
            "round": 0,
            "round_open": False,
            "attempt": 0,
            "attempts_in_round": 0,
            "failed_rounds": 0,
            "version_number": 0,
            "version": self.job.weights,
            "confirmed_sums": (),
            "norms": (),
            "exploded": None,
            "reason": Reason.REASON_UNSPECIFIED,
            "status": JobStatus.RUNNING,
        }
        for record in self.records:
            match record:
                case fx.OpenRound():
                    values |= {"round": record.round, "round_open": True, "attempts_in_round": 0}
                case fx.OpenAttempt():
                    values |= {"attempt": record.attempt.attempt, "awaited": frozenset(record.cohort)}
                    values["attempts_in_round"] += 1
                case fx.FixSurvivors():
                    values["confirmed_sums"] = (*values["confirmed_sums"], frozenset(record.survivors))
                case fx.EndRound():
                    values |= {"round_open": False}
                    values["failed_rounds"] = 0 if record.published else values["failed_rounds"] + 1
                case fx.PublishVersion():
                    values |= {"version_number": record.number, "version": record.digest}
                    values |= {"server_state": record.server_state, "confirmed_sums": ()}
                    values["norms"] = (*values["norms"], record.norms)[-WINDOW:]
                    values["exploded"] = values["exploded"] or record.exploded
                case fx.SetStatus():
                    values |= {"status": record.status, "reason": record.reason}
        return JobState(state.parameters, **values)

    # ---- the coordinator ------------------------------------------------------------------------------------------

    def post(self, event: ev.Event, delay_ms: float = 0) -> None:
        self.at(delay_ms, lambda: self._coordinator(event))

    def _coordinator(self, event: ev.Event) -> None:
        before = self.state.phase
        self.state, effects = transition(self.state, event, self.now_ms)
        self._check_transition(before, event)
        for effect in effects:
            self._effect(effect)

    def _check_transition(self, before: Phase, event: ev.Event) -> None:
        after = self.state.phase
        assert is_allowed(before, event, after), f"the table has no {event} from {before} to {after}"
        self.transitions.add((type(before), type(event), type(after)))

    def _effect(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Persist():
                self.records.extend(effect.records)
            case fx.Send():
                self._send(effect.member, effect.message)
            case fx.SetTimer():
                number = next(self._order)
                self._timers[effect.timer] = number
                self.at(1000 * effect.seconds, lambda: self._fire(effect.timer, number))
            case fx.CancelTimer():
                self._timers.pop(effect.timer, None)
            case fx.OpenUploads():
                numbers = {effect.groups.get(member, 0) for member in effect.members}
                self._totals[effect.attempt] = {number: np.zeros(effect.values, "<u4") for number in numbers}
                self._groups[effect.attempt] = effect.groups
                self._bits[effect.attempt] = effect.bits
            case fx.AddVector():
                packed = self._spooled.pop((effect.attempt, effect.member))
                number = self._groups[effect.attempt].get(effect.member, 0)
                secure_agg.add_packed(self._totals[effect.attempt][number], packed, 0, self._bits[effect.attempt])
            case fx.RejectVector():
                self._spooled.pop((effect.attempt, effect.member), None)
            case fx.CloseUploads():
                if not effect.keep_sum:
                    self._totals.pop(effect.attempt, None)
            case fx.Compute():
                self._compute(effect)
            case fx.Count():
                self.counts.append(effect)

    def _fire(self, timer: Timer, number: int) -> None:
        if self._timers.get(timer) == number:
            del self._timers[timer]
            self._coordinator(self.fired(timer))

    def fired(self, timer: Timer) -> ev.TimerFired:
        """A timer's event, as the driver makes it."""
        return ev.TimerFired(timer, self.arrived() if isinstance(timer, PhaseDeadline) else {})

    def arrived(self) -> dict[str, int]:
        """Bytes of each vector that have arrived at a deadline. Here a vector arrives whole."""
        return {}

    def _compute(self, effect: fx.Compute) -> None:
        sums, results = [], []
        for number, opened in effect.opened.by_group():
            total = self._totals[effect.attempt][number].copy()
            opened.unmask(total)
            self.group_results.setdefault(effect.attempt, {})[number] = (opened.survivors, total.copy())
            results.append(opened.result_digest(total))
            sums.append(GroupSum(len(opened.survivors), total))
        session = effect.opened.session
        cohort, base = session.context.cohort, self.versions[self.state.version]
        before = {name: self.server_states[vector] for name, vector in self.state.server_state.items()}
        carried = StateVectors(self.job.server, VALUES, before if self.state.version_number else None)
        try:
            if session.context.grouped is None:
                self.results[effect.attempt] = (effect.survivors, total.copy())
                result = results[0]
                step = next_version(self.job, cohort, len(effect.survivors), total, base, state=carried)
            else:
                result = session.results_digest(results)
                step = next_version_of_groups(self.job, cohort, sums, base, state=carried)
        except ResultInvalid as error:
            self.post(ev.ComputeFailed(effect.attempt, Reason.REASON_RESULT_INVALID, str(error)))
            return
        digest = hashlib.sha256(step.values.tobytes()).digest()
        self.versions[digest] = step.values
        kept = {name: hashlib.sha256(vector.tobytes()).digest() for name, vector in carried.after.items()}
        self.server_states |= {kept[name]: vector for name, vector in carried.after.items()}
        found = (step.training, step.groups, kept, step.metrics_invalid)
        self.post(ev.Computed(effect.attempt, result, digest, norms_of(base, step.values), *found), DELAY_MS)

    def _send(self, name: str, message: Any) -> None:
        self._check_persisted(message)
        message = self.bend(name, message)
        member = self.members[name]
        if member.connected and not self.lose(name, message):
            process = member.process
            for delay in self.delays(name, message):
                self.at(delay, lambda: self._arrives(name, process, message))

    def _check_persisted(self, message: Any) -> None:
        """Checks that the coordinator announces nothing that a crash could still undo."""
        payload = getattr(message, "payload", None)
        if isinstance(payload, AttemptOpened):
            assert any(
                isinstance(record, fx.OpenAttempt) and record.attempt == message.attempt for record in self.records
            )
        if isinstance(payload, AttemptEnded) and payload.published:
            assert any(
                isinstance(record, fx.PublishVersion) and record.digest == payload.new_version
                for record in self.records
            )
        if isinstance(message, Assignment):
            assert any(isinstance(record, fx.OpenRound) and record.round == message.round for record in self.records)

    # ---- the members ----------------------------------------------------------------------------------------------

    def _arrives(self, name: str, process: bytes, message: Any) -> None:
        member = self.members[name]
        if member.alive and member.process == process:
            self.before(name, message)
        if member.alive and member.connected and member.process == process:
            self.tell(name, states.Received(message))

    def tell(self, name: str, event: states.Event) -> None:
        """Gives one member an event now."""
        member = self.members[name]
        member.state, effects = member_transition(member.environment, member.state, event)
        for effect in effects:
            self._member_effect(member, effect)

    def _later(self, member: Member, delay_ms: float, action: Callable[[], None]) -> None:
        process = member.process

        def guarded() -> None:
            if member.alive and member.process == process:
                action()

        guarded.of_member = True  # type: ignore[attr-defined]
        self.at(delay_ms, guarded)

    def _served(self, digest: bytes) -> bytes | None:
        found = self._certificates.get(digest)
        phase = self.state.phase
        if found is None and isinstance(phase, Aggregating) and isinstance(phase.protocol, Seated):
            found = phase.protocol.session.keys_by_digest.get(digest)
        return found

    def _member_effect(self, member: Member, effect: states.Effect) -> None:
        match effect:
            case states.Say():
                if isinstance(getattr(effect.message, "payload", None), secure_agg.Advertisement):
                    assert effect.message.attempt in member.joined
                if isinstance(getattr(effect.message, "payload", None), secure_agg.Confirmation):
                    assert effect.message.attempt in member.signed
                member.said.append(effect.message)
                if member.connected and not self.lose(member.name, effect.message):
                    for delay in self.delays(member.name, effect.message):
                        self.post(self._heard(member.name, effect.message), delay)
            case states.Prepare():
                self._later(member, TRAINING_MS, lambda: self._trained(member, effect.assignment))
            case states.FetchCertificates():
                member.fetched.append(effect)
                served = (self.serves(member.name, digest) for digest in effect.digests)
                event = states.CertificatesFetched(effect.attempt, tuple(each for each in served if each is not None))
                self._later(member, DELAY_MS, lambda: self.tell(member.name, event))
            case states.KeepCertificates():
                member.kept.extend(effect.certificates)
            case states.Joined():
                member.joined.append(effect.attempt)
            case states.VectorLeaving():
                member.opened.append(effect.attempt)
            case states.Signed():
                member.signed.append(effect.attempt)
            case states.MaskAndUpload():
                self._mask(member, effect)
            case states.EndedAttempt():
                member.ended.append((effect.attempt, effect.ended))
            case states.Discard():
                member.update = None
            case states.JobOver():
                member.over.append(effect.ended.reason)

    def _heard(self, name: str, message: Any) -> ev.Event:
        match message:
            case Ready():
                return ev.SaidReady(name, message.round, message.version)
            case Decline():
                return ev.Declined(name, message.round, message.reason, message.detail)
            case AttemptMessage(payload=secure_agg.Advertisement()):
                return ev.Answered(name, message, self.entry_of(name, message.payload))
            case AttemptMessage():
                return ev.Answered(name, message)
        raise AssertionError(message)

    def _trained(self, member: Member, assignment: Any) -> None:
        # As in real training, the same version gives a member the same update again.
        random = np.random.default_rng([self.seed, int(member.name[1:]), *assignment.version[:8]])
        change = random.uniform(-0.5, 0.5, VALUES).astype(np.float32)
        examples = int(random.integers(1, 100))
        self.hand_over(member, assignment, Update(change, examples, 1.5 * examples, examples // 2, examples))

    def hand_over(self, member: Member, assignment: Assignment, update: Update) -> None:
        """Gives the member this update as its training result for the assignment."""
        member.update = update
        plain = isinstance(self.job.mechanism, NoMechanism)
        digest = update_digest(self.job, update) if plain else None
        self.tell(member.name, states.Prepared(assignment, self.job, update=digest))

    def _mask(self, member: Member, effect: states.MaskAndUpload) -> None:
        assert member.update is not None
        assert effect.attempt in member.opened
        protection = protection_of(effect.job, member.update.examples)
        vector = protection.encode(effect.job, member.update, effect.cohort, member.environment.random)
        self.inputs[effect.attempt, member.name] = vector.copy()
        stage, message = effect.stage.mask(vector)
        packed = bytes(secure_agg.pack_in_place(vector, effect.stage.seat.context.bits))
        self._later(member, DELAY_MS, lambda: self.tell(member.name, states.Masked(effect.attempt, stage)))
        self._later(member, 2 * DELAY_MS, lambda: self._upload(member, effect.attempt, packed, message))

    def _upload(self, member: Member, attempt: AttemptId, packed: bytes, message: secure_agg.MaskedInput) -> None:
        if not member.connected:
            self._later(member, 500, lambda: self._upload(member, attempt, packed, message))
        elif attempt in self._totals and not self.lose(member.name, message):
            self._spooled[attempt, member.name] = packed
            digest = hashlib.sha256(packed).digest()
            self.post(ev.Uploaded(member.name, attempt, message, digest))

    # ---- what must hold -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Checks that every opened sum is the sum of U3's inputs, and that the records are in order.

        Attempts open once, with rising numbers, and end at most once. Versions are numbered without a gap.
        """
        every = [
            (attempt, survivors, total)
            for attempt, groups in self.group_results.items()
            for survivors, total in groups.values()
        ]
        for attempt, survivors, total in every:
            expected = np.zeros_like(total)
            for name in survivors:
                expected += self.inputs[attempt, name]
            expected &= np.uint32(2 ** self._bits[attempt] - 1)
            assert np.array_equal(total, expected), f"{attempt}: not the sum of {survivors}"
        opened = [record.attempt for record in self.records if isinstance(record, fx.OpenAttempt)]
        assert opened == sorted(set(opened))
        numbers = [record.number for record in self.records if isinstance(record, fx.PublishVersion)]
        assert numbers == list(range(1, len(numbers) + 1))
        ended = [record.attempt for record in self.records if isinstance(record, fx.EndAttempt)]
        assert len(ended) == len(set(ended))
        assert set(ended) <= set(opened)

    def ends(self) -> list[fx.EndAttempt]:
        """The end of each attempt, in order."""
        return [record for record in self.records if isinstance(record, fx.EndAttempt)]
