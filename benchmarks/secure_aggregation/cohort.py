"""Plays one attempt with all members and the server in one process, and times each of them.

It runs the product: the states of `secure_agg`, and the product's certificates, signatures and packing. A member
encodes its vector, masks and packs it. The server checks, hashes and adds what arrives, and ends with the decoded mean.
The lost members deal their shares and then stop answering, so the server must remove their masks with rebuilt keys.

Wall and processor time are measured:

- server: everything from the opening of the attempt to the decoded mean, in memory, without network or disk.
- member: its five answers. Making the vector does not count; encoding it does. In a large cohort only some of the
  survivors are timed. The others do the same work, but share the verification of signatures: each is verified once for
  all of them.

Certificates are verified before, as each party does once and remembers (`certificate_seconds`). Neither side pays for
garbage collection of the other parties' objects.

Guarantees: the sum is right, or `CohortFailed` is raised. Each signature that the protocol asks a party to make or
check was made or checked in its phase, each separately, or `ChecksMissing` is raised. `crowd` says how many are due.
"""

import gc
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import secure_agg
from benchmarks.library.parties import mean_of, vector_of
from benchmarks.library.stopwatch import Stopwatch
from benchmarks.secure_aggregation.crowd import Crowd, due_of_member, due_of_server
from coordinator.rounds.masked_sum import Party
from secure_agg import Dropped, KeyOf, Layout, Phase, RoundContext, VerifyIdentity
from secure_agg.session import entries_root, ring_of

__all__ = [
    "ChecksMissing",
    "CohortFailed",
    "Desk",
    "Known",
    "Outcome",
    "Server",
    "play",
]

_DECODED_AT_ONCE = 64 * 1024


class ChecksMissing(RuntimeError):
    """A party made or checked other signatures than the protocol asks for, so its time is not that of the protocol."""


class CohortFailed(RuntimeError):
    """The attempt did not open the sum of the survivors."""


class _Checks:
    """A `verify` that keeps the signatures it accepted, to count them while no clock runs."""

    def __init__(self, verify: VerifyIdentity) -> None:
        self._verify = verify
        self._accepted: list[tuple[bytes, bytes]] = []

    def __call__(self, certificate: bytes, message: bytes, signature: bytes) -> str:
        name = self._verify(certificate, message, signature)
        self._accepted.append((message, signature))
        return name

    def settle(self, who: str, phase: Phase, due: int) -> None:
        """Compare the count with what was due, and reset it. Raises: ChecksMissing."""
        checked, distinct = len(self._accepted), len(set(self._accepted))
        self._accepted.clear()
        if not checked == distinct == due:
            raise ChecksMissing(
                f"{who} checked {checked} signatures, {distinct} of them distinct, in phase {phase}; "
                f"{due} were due, so its time cannot be compared"
            )


class Known:
    """A `verify` that verifies each signature once for all callers."""

    def __init__(self, verify: VerifyIdentity) -> None:
        self._verify = verify
        self._names: dict[tuple[bytes, bytes, bytes], str] = {}

    def __call__(self, certificate: bytes, message: bytes, signature: bytes) -> str:
        seen = (certificate, message, signature)
        if seen not in self._names:
            self._names[seen] = self._verify(certificate, message, signature)
        return self._names[seen]


class _Signer:
    """A member's identity that counts its signatures."""

    def __init__(self, party: Party) -> None:
        self._party = party
        self.member, self.certificate = party.member, party.certificate
        self.signed = 0

    def sign(self, message: bytes) -> bytes:
        """Sign and count."""
        self.signed += 1
        return self._party.sign(message)


class Desk(Protocol):
    """A server, in this process or another."""

    def take(self, member: str, message: Any) -> None:
        """Take an answer in any phase except masking."""

    def take_vector(self, member: str, message: secure_agg.MaskedInput, packed: memoryview) -> None:
        """Take an answer in the masking phase, with the packed vector."""

    def close(self) -> Mapping[str, Any]:
        """End the phase, and return the messages to the members."""

    def open(self) -> NDArray[np.float64]:
        """Return the mean of the survivors."""


class Server:
    """The coordinator's part as its driver does it, but in memory."""

    def __init__(
        self,
        context: RoundContext,
        layout: Layout,
        members: Collection[str],
        verify: VerifyIdentity,
        key_of: KeyOf,
        due: Mapping[Phase, int],
        *,
        threads: int | None = None,
    ) -> None:
        self.watch = Stopwatch()
        self._layout, self._due, self._threads = layout, due, threads
        self._checks = _Checks(verify)
        with self.watch.running():
            self._state: Any = secure_agg.open_attempt(context, members, self._checks, key_of=key_of)
            self._total = self._empty(context, members)

    def take(self, member: str, message: Any) -> None:
        """Check an answer. Raises: CohortFailed."""
        with self.watch.running():
            self._keep(self._state.receive(member, message))

    def take_vector(self, member: str, message: secure_agg.MaskedInput, packed: memoryview) -> None:
        """Hash a vector, check its signed digest, and add it to the sum. Raises: CohortFailed."""
        with self.watch.running():
            self._keep(self._state.receive(member, message, hashlib.sha256(packed).digest()))
            secure_agg.add_packed(self._total, packed, 0, self._layout.bits)

    def close(self) -> Mapping[str, Any]:
        """End the phase. Raises: CohortFailed, ChecksMissing."""
        phase = self._state.phase
        with self.watch.running():
            closed = self._state.close()
        self._checks.settle("the server", phase, self._due[phase])
        if isinstance(closed, secure_agg.Abandoned):
            raise CohortFailed(f"the attempt was abandoned: {closed.reason} {closed.detail}")
        self._state, inbox, _ = closed
        found: Mapping[str, Any] = inbox
        return found

    def open(self) -> NDArray[np.float64]:
        """Remove the masks and decode the mean."""
        with self.watch.running():
            return np.concatenate(list(self._opened()))

    def _empty(self, context: RoundContext, members: Collection[str]) -> NDArray[np.uint32]:
        return np.zeros(context.values, dtype=secure_agg.RING_DTYPE)

    def _opened(self) -> Iterator[NDArray[np.float64]]:
        """Yield the mean block by block, without a second vector, as the coordinator decodes a sum."""
        self._state.unmask(self._total, threads=self._threads)
        (segment,), bits = self._layout.segments, self._layout.bits
        for start in range(0, segment.length, _DECODED_AT_ONCE):
            here = self._total[start : start + _DECODED_AT_ONCE]
            block = Layout((replace(segment, length=here.size),), bits).decode(here)[segment.name]
            block /= len(self._state.survivors)
            yield block

    def _keep(self, answer: Any) -> None:
        if isinstance(answer, Dropped):
            raise CohortFailed(f"the server dropped {answer.member}: {answer.reason} {answer.detail}")
        self._state = answer


def _forget() -> None:
    """A member of its own has nothing from other members of this process."""
    entries_root.cache_clear()
    ring_of.cache_clear()


class _Member:
    """One member's part as its agent does it."""

    def __init__(
        self,
        context: RoundContext,
        layout: Layout,
        party: Party,
        verify: VerifyIdentity,
        key_of: KeyOf,
        due: Mapping[Phase, int],
        threads: int | None,
    ) -> None:
        self.watch = Stopwatch()
        self._context, self._layout, self._threads = context, layout, threads
        self._checks, self._signer = _Checks(verify), _Signer(party)
        self._key_of, self._due = key_of, due
        self._random = secure_agg.SystemRandom()
        self._state: Any = None

    def answer(self, phase: Phase, message: Any) -> Any:
        """Return its message in any phase except masking. Raises: Refusal, ChecksMissing."""
        _forget()
        with self.watch.running():
            match phase:
                case Phase.ADVERTISE:
                    self._state, sent = secure_agg.advertise(
                        self._context, self._signer, self._checks, self._random, key_of=self._key_of
                    )
                case Phase.SHARE:
                    self._state, sent = self._state.on_roster(message)
                case Phase.CONFIRM:
                    self._state, sent = self._state.on_survivors(message)
                case _:
                    self._state, sent = self._state.on_confirmations(message)
        self._settle(phase)
        return sent

    def mask(self, message: Any, vector: NDArray[np.float64]) -> tuple[secure_agg.MaskedInput, memoryview]:
        """Return its masked, packed vector, in its own memory. Raises: Refusal, ChecksMissing."""
        (segment,) = self._layout.segments
        _forget()
        with self.watch.running():
            ready = self._state.on_dealings(message)
            ring = self._layout.encode({segment.name: vector}, self._random)
            self._state, sent = ready.mask(ring, threads=self._threads)
            packed = secure_agg.pack_in_place(ring, self._layout.bits)
        self._settle(Phase.MASK)
        return sent, packed

    def _settle(self, phase: Phase) -> None:
        self._checks.settle(self._signer.member, phase, self._due[phase])
        # Every answer except the last has one signature.
        signed, due = self._signer.signed, 0 if phase is Phase.UNMASK else 1
        self._signer.signed = 0
        if signed != due:
            raise ChecksMissing(f"{self._signer.member} made {signed} signatures in phase {phase}; {due} were due")


@dataclass(frozen=True)
class Outcome:
    """The cost of an attempt.

    Args:
        member_wall, member_cpu: means over the timed members, in seconds.
        timed: number of timed members.
        upload_bytes_per_value: of the packed vector and its signed digest.
        max_abs_error: of the mean, against float64.
        checked: signatures that a member and the server checked, in total.
    """

    member_wall: float
    member_cpu: float
    timed: int
    upload_bytes_per_value: float
    max_abs_error: float
    checked: Mapping[str, int]


def play(
    crowd: Crowd,
    context: RoundContext,
    layout: Layout,
    lost: Collection[int],
    server: Desk,
    *,
    timed: int | None = None,
    threads: int | None = None,
) -> Outcome:
    """Play one attempt with the whole crowd.

    Args:
        lost: numbers of the members that vanish before they mask.
        timed: number of survivors that are timed; None times all.
        threads: of each member, for its masks.

    Raises:
        CohortFailed: a message was not accepted, or the mean is not that of the survivors.
        ChecksMissing: a party made or checked fewer or more signatures than the protocol asks for.
    """
    stayed = [number for number in range(context.cohort) if number not in lost]
    clocked = _spread_over(stayed, len(stayed) if timed is None else timed)
    due, known = due_of_member(context, len(lost)), Known(crowd.verify)
    members = [
        _Member(context, layout, party, crowd.verify if number in clocked else known, crowd.key_of, due, threads)
        for number, party in enumerate(crowd.parties)
    ]
    inbox: Mapping[str, Any] = {}
    uploaded = 0
    frozen_before = gc.get_freeze_count()
    try:
        for phase in Phase:
            # What one party holds must not cost another a collection.
            gc.collect()
            gc.freeze()
            here = list(range(context.cohort)) if phase in (Phase.ADVERTISE, Phase.SHARE) else stayed
            for number in here:
                name, member = crowd.parties[number].member, members[number]
                if phase is Phase.MASK:
                    sent, packed = member.mask(inbox[name], vector_of(number, layout.values))
                    uploaded = len(packed) + len(sent.digest) + len(sent.signature)
                    server.take_vector(name, sent, packed)
                else:
                    server.take(name, member.answer(phase, inbox.get(name)))
            inbox = server.close()
        error = _error(server.open(), mean_of(stayed, layout.values), layout)
    finally:
        # What the caller has frozen cannot be told from what the phases froze, and stays frozen.
        if not frozen_before:
            gc.unfreeze()
    watches = [members[number].watch for number in clocked]
    return Outcome(
        member_wall=sum(watch.wall for watch in watches) / len(watches),
        member_cpu=sum(watch.cpu for watch in watches) / len(watches),
        timed=len(watches),
        upload_bytes_per_value=uploaded / layout.values,
        max_abs_error=error,
        checked={"member": sum(due.values()), "server": sum(due_of_server(context, len(lost)).values())},
    )


def _spread_over(stayed: Sequence[int], timed: int) -> list[int]:
    """Return `timed` of them at equal distances, beginning with the first."""
    return [stayed[index * len(stayed) // timed] for index in range(timed)]


def _error(mean: NDArray[np.float64], plain: NDArray[np.float64], layout: Layout) -> float:
    error = float(np.abs(mean - plain).max())
    # Quantisation moves each input by less than one step, and so the mean.
    step = 1 / layout.segments[0].scale
    if mean.shape != plain.shape or not error <= step:
        raise CohortFailed(f"the mean is off by {error:g}, more than quantisation steps of {step:g} explain")
    return error
