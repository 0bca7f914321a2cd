"""What the five collecting states have in common: who may answer, who has answered, who is lost.

Guarantees: an accepted answer is never replaced. The first reason for dropping a member remains. Records are copied,
never changed. With groups, each group is judged alone: at the end of a phase, a group below its threshold is lost with
all its members, and the others continue if there are enough of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, Self, TypeVar

from secure_agg.context import RoundContext
from secure_agg.identity import IdentityInvalid, MemberId, VerifyIdentity
from secure_agg.messages import Complaints, Opening
from secure_agg.reasons import Abandoned, Dropped, Phase, Reason
from secure_agg.session import Session

__all__ = ["Collecting", "Seated", "signed_by", "starved"]

Message = TypeVar("Message")


@dataclass(frozen=True)
class Collecting(Generic[Message]):
    """One phase that is being collected.

    Args:
        context: the attempt.
        verify: checks a certificate and a signature.
        expected: who may answer.
        answers: accepted answers, by member.
        lost: dropped members, in order of loss.
        earlier: answers of earlier phases, so that a late repeat of one is recognised and ignored.
    """

    context: RoundContext
    verify: VerifyIdentity
    expected: frozenset[MemberId]
    answers: Mapping[MemberId, Message]
    lost: Mapping[MemberId, Dropped]
    earlier: tuple[Mapping[MemberId, object], ...]

    phase: ClassVar[Phase]
    withdraws_on_drop: ClassVar[bool]

    @property
    def least(self) -> int:
        """How many answers this phase needs."""
        return self.context.threshold

    @property
    def waiting(self) -> frozenset[MemberId]:
        """Who has neither answered nor been dropped."""
        return self.expected - self.answers.keys() - self.lost.keys()

    @property
    def dropped(self) -> tuple[Dropped, ...]:
        """All members dropped in this attempt so far, in order."""
        return tuple(self.lost.values())

    @property
    def hopeless(self) -> bool:
        """Whether `close` can only abandon: answers and members still awaited are too few, altogether or among the
        neighbours of a member whose secret the sum needs.
        """
        return len(self.answers) + len(self.waiting) < self.least or bool(self._starved(self.lost))

    def drop(self, member: MemberId, reason: Reason, detail: str = "") -> Self:
        """Drops a member. Strangers and members dropped before change nothing."""
        if member in self.lost or member not in self.expected:
            return self
        lost = {**self.lost, member: Dropped(member, reason, detail)}
        answers = self.answers
        if self.withdraws_on_drop:
            answers = {name: answer for name, answer in answers.items() if name != member}
        return replace(self, lost=lost, answers=answers)

    def _screen(self, member: MemberId, message: object, kind: type[Message]) -> Self | Dropped | Message:
        """Returns the message itself if it is new and of this phase; otherwise the result common to all phases."""
        if member in self.lost:
            return self.lost[member]
        if member not in self.expected:
            return Dropped(member, Reason.SENDER_NOT_EXPECTED)
        if any(member in past and past[member] == message for past in (self.answers, *self.earlier)):
            return self
        if isinstance(message, Complaints | Opening) and self.phase in (Phase.CONFIRM, Phase.UNMASK):
            return self  # Too late, which is nobody's fault.
        if not isinstance(message, kind):
            return Dropped(member, Reason.MESSAGE_NOT_EXPECTED, type(message).__name__)
        if member in self.answers:
            return Dropped(member, Reason.MESSAGE_CONFLICTING)
        return message

    def _accept(self, member: MemberId, message: Message) -> Self:
        return replace(self, answers={**self.answers, member: message})

    def _late(self) -> tuple[Dropped, ...]:
        return tuple(Dropped(member, Reason.PHASE_DEADLINE) for member in sorted(self.waiting))

    def _lost_with(self, late: Iterable[Dropped]) -> dict[MemberId, Dropped]:
        return {**self.lost, **{entry.member: entry for entry in late}}

    def _abandoned(self, late: tuple[Dropped, ...]) -> Abandoned | None:
        """Abandoned if the answers of this phase are too few, altogether or around one member."""
        if len(self.answers) < self.least:
            wanted = "the threshold is" if self.context.sparse is None else "the minimum is"
            detail = f"{len(self.answers)} of {len(self.expected)} answered, {wanted} {self.least}"
        elif around := self._starved(self._lost_with(late)):
            detail = (
                f"the sum needs secrets of {len(around)} members that have fewer than {self.context.threshold} "
                f"neighbours left, e.g. of {min(around)}"
            )
        else:
            return None
        return Abandoned(self.phase, Reason.THRESHOLD_LOST, detail, (*self.dropped, *late))

    def _starved(self, lost: Mapping[MemberId, Dropped]) -> frozenset[MemberId]:
        """The members whose secret the sum needs but of whose neighbours fewer than t can still answer, given those who
        are `lost`. Nobody on the complete graph.
        """
        return frozenset()


@dataclass(frozen=True)
class Seated(Collecting[Message]):
    """A phase after the roster: every member has a place and, with groups, a group."""

    session: Session

    @property
    def hopeless(self) -> bool:
        """See `Collecting`. With groups: whether fewer than `least` groups can still give enough answers."""
        grouped = self.context.grouped
        if grouped is None:
            return super().hopeless
        return len(self._groups_with(self.answers.keys() | self.waiting)) < self.session.least_groups

    @property
    def lost_groups(self) -> int:
        """Number of groups that were lost before this phase: none of their members is expected."""
        return len(self.session.groups) - len({self.session.group_of(member) for member in self.expected})

    def _groups_with(self, answered: Collection[MemberId]) -> frozenset[int]:
        """The groups with enough members among `answered`."""
        counts = Counter(self.session.group_of(member) for member in answered)
        return frozenset(group for group, count in counts.items() if count >= self.least)

    def _kept(self) -> Mapping[MemberId, Message]:
        """The answers that count: those of groups with enough answers, or all of them without groups."""
        if self.context.grouped is None:
            return self.answers
        whole = self._groups_with(self.answers)
        return {name: answer for name, answer in self.answers.items() if self.session.group_of(name) in whole}

    def _beside(self, member: MemberId, members: Collection[MemberId]) -> tuple[MemberId, ...]:
        """The ones among `members` that are summed with this one, sorted."""
        if self.context.grouped is None:
            return tuple(sorted(members))
        return tuple(other for other in self.session.receivers(member) if other in members)

    def _late(self) -> tuple[Dropped, ...]:
        late = super()._late()
        if self.context.grouped is None:
            return late
        whole = self._groups_with(self.answers)
        named = self.lost.keys() | {entry.member for entry in late}
        return (
            *late,
            *(
                Dropped(member, Reason.GROUP_TOO_SMALL, f"its group needs {self.least} in the {self.phase} phase")
                for member in sorted(self.expected - named)
                if self.session.group_of(member) not in whole
            ),
        )

    def _abandoned(self, late: tuple[Dropped, ...]) -> Abandoned | None:
        grouped = self.context.grouped
        if grouped is None:
            return super()._abandoned(late)
        whole = len(self._groups_with(self.answers))
        if whole >= self.session.least_groups:
            return None
        detail = (
            f"{whole} of {grouped.groups} groups gave the {self.least} answers that each needs, but at least "
            f"{self.session.least_groups} groups must"
        )
        return Abandoned(self.phase, Reason.THRESHOLD_LOST, detail, (*self.dropped, *late))


def signed_by(verify: VerifyIdentity, session: Session, member: MemberId, statement: bytes, signature: bytes) -> bool:
    """Whether `member` of the roster signed `statement`."""
    try:
        return verify(session.certificates[member], statement, signature) == member
    except IdentityInvalid:
        return False


def starved(
    session: Session, gone: Collection[MemberId], dealt: Collection[MemberId], masked: Collection[MemberId]
) -> frozenset[MemberId]:
    """The members that dealt (U2), whose secret is needed, and of whose neighbours fewer than t are left without those
    in `gone`. The sum needs the seed of every member that has masked, and the root of every member with a
    neighbour that has.
    """
    short = session.graph.short(gone, session.context.threshold)
    return frozenset(
        member
        for member in short
        if member in dealt and (member in masked or any(other in masked for other in session.neighbours(member)))
    )
