"""What each text field of tacit.v1 may hold, and the checks that enforce it.

Free text (details, software versions) is cleaned. Identifiers (names, token ids, federations) are never altered: if one
does not match its pattern, the whole message is refused.

The checks walk a message by its descriptor, so a text field missing from `FIELDS` is cleaned like a detail.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from tacit.limits import MAX_NAME
from toolkit.text import MAX_DETAIL, clean

__all__ = ["DETAIL", "FIELDS", "TextInvalid", "TextKind", "admit", "neutralise"]


class TextInvalid(ValueError):
    """A message holds a malformed identifier or a list that is too long. The text is clean and bounded in length."""


@dataclass(frozen=True, slots=True)
class TextKind:
    """What a text field may hold: an identifier, or free text if there is no pattern.

    Args:
        most: maximum length in characters.
        pattern: what the whole identifier must match.
        what: the rule in words, which completes an error message.
    """

    most: int
    pattern: re.Pattern[str] | None = None
    what: str = ""

    def allows(self, text: str) -> bool:
        """Whether a text may stay unchanged. An empty one may: the reader decides what a missing value means."""
        if not text:
            return True
        if self.pattern is None:
            return clean(text, self.most) == text
        return len(text) <= self.most and self.pattern.fullmatch(text) is not None


def _identifier(most: int, pattern: str, what: str) -> TextKind:
    return TextKind(most, re.compile(pattern), what)


DETAIL = TextKind(MAX_DETAIL)
_SOFTWARE = TextKind(64)
_NAME = _identifier(
    MAX_NAME,
    r"[a-z0-9][a-z0-9._-]{0,62}",
    "a name is 1 to 63 of a-z, 0-9, dot, dash and underscore, with a letter or digit first",
)
_ADMITS = _identifier(
    MAX_NAME, r"[a-z0-9._*?-]+", "a pattern of job names is 1 to 63 of a-z, 0-9, dot, dash, underscore, * and ?"
)
_TOKEN_ID = _identifier(24, r"[0-9a-f]{24}", "a token's id is 24 hexadecimal digits")
_FEDERATION = _identifier(64, r"[0-9a-f]{64}", "a federation is named by 64 hexadecimal digits")
_ADDRESS = _identifier(300, r"[!-~]+", "an address is host:port in ASCII, at most 300 characters")
_TOKEN = _identifier(4096, r"[!-~]+", "a join token is plain ASCII, at most 4096 characters")
_WORD = _identifier(64, r"[a-z0-9_.-]+", "it is one word of a-z, 0-9, dash, dot and underscore")
# The name of a member, a job, an operator or an authority.
_SUBJECT = _identifier(300, r"[!-~]+", "a subject is a name in ASCII, at most 300 characters")
# Canonical JSON of the journal is ASCII. One entry may name a cohort of 10,000.
_JSON = _identifier(4 * 1024 * 1024, r"[ -~]+", "it is canonical JSON in ASCII, at most 4 MiB")

_NO_BREAKS = dict.fromkeys(map(ord, "\t\n\v\f\r"), "\N{REPLACEMENT CHARACTER}")

# An operator's name, or `machine:` and whatever the system calls its user.
_ACTOR = TextKind(MAX_NAME + len("machine:"))
_ACT = _identifier(32, r"[a-z][a-z_]{0,31}", "an act is one word")

FIELDS: dict[str, TextKind] = {
    # enrolment.proto
    "EnrolRequest.token_id": _TOKEN_ID,
    "EnrolRequest.software_version": _SOFTWARE,
    "EnrolResponse.member": _NAME,
    "EnrolResponse.federation_address": _ADDRESS,
    "EnrolResponse.other_addresses": _ADDRESS,
    # federation.proto
    "RenewRequest.software_version": _SOFTWARE,
    "Hello.software_version": _SOFTWARE,
    "Hello.admits": _ADMITS,
    "Welcome.software_version": _SOFTWARE,
    "Welcome.federation": _FEDERATION,
    "Goodbye.detail": DETAIL,
    "Standby.detail": DETAIL,
    "Assignment.job": _NAME,
    "Decline.job": _NAME,
    "Decline.detail": DETAIL,
    "Ready.job": _NAME,
    "JobEnded.job": _NAME,
    "OpenJob.name": _NAME,
    "OpenJob.status": _WORD,
    "AttemptRef.job": _NAME,
    "LogEntry.name": _NAME,
    "LogEntry.role": _WORD,
    "LogEntry.kind": _WORD,
    "Advertisement.member": _NAME,
    "DigestAdvertisement.member": _NAME,
    "GroupRoster.names": _NAME,
    "Dealing.dealer": _NAME,
    "DealtShare.receiver": _NAME,
    "ReceivedDealing.dealer": _NAME,
    "Complaint.complainant": _NAME,
    "Complaint.dealer": _NAME,
    "Opening.complainant": _NAME,
    "Opening.dealer": _NAME,
    "MaskedInput.member": _NAME,
    "MaskedUploadReceipt.detail": DETAIL,
    "CorpusRef.job": _NAME,
    "CorpusReceipt.detail": DETAIL,
    "Survivors.members": _NAME,
    "Confirmation.member": _NAME,
    "Unmasking.member": _NAME,
    "RevealedShare.dealer": _NAME,
    "AttemptRefusal.detail": DETAIL,
    "AttemptRefusal.member": _NAME,
    "AttemptEnded.detail": DETAIL,
    "HeldContributions.job": _NAME,
    # operator.proto
    "StatusResponse.federation": _FEDERATION,
    "StatusResponse.software_version": _SOFTWARE,
    "Lease.address": _ADDRESS,
    "Job.name": _NAME,
    "Job.phase": _WORD,
    "Job.waiting": DETAIL,
    "Job.warning": DETAIL,
    "Approvals.awaited_members": _NAME,
    "Round.outcome": _WORD,
    "Attempt.outcome": _WORD,
    "Attempt.detail": DETAIL,
    "Attempt.cohort": _NAME,
    "Attempt.survivors": _NAME,
    "Dropout.member": _NAME,
    "Dropout.phase": _WORD,
    "Dropout.detail": DETAIL,
    "Member.name": _NAME,
    "Member.status": _WORD,
    "Act.by": _ACTOR,
    "Act.act": _ACT,
    "Member.software_version": _SOFTWARE,
    "Member.DeclinedEntry.key": _NAME,
    "Member.DeclinedEntry.value": DETAIL,
    "Member.AwaitingEntry.key": _NAME,
    "Member.AwaitingEntry.value": DETAIL,
    "InviteMemberRequest.name": _NAME,
    "InviteMemberResponse.token": _TOKEN,
    "RevokeMemberRequest.name": _NAME,
    "WithdrawMemberRequest.name": _NAME,
    "WithdrawMemberRequest.job": _NAME,
    "Successor.job": _NAME,
    "GetJobRequest.name": _NAME,
    "ChangeJobRequest.name": _NAME,
    "RecordEvaluationRequest.job": _NAME,
    "ReadJournalRequest.subject": _SUBJECT,
    "JournalEntry.kind": _WORD,
    "JournalEntry.subject": _SUBJECT,
    "JournalEntry.fields": _JSON,
    "ListCorporaRequest.job": _NAME,
    "MemberCorpus.member": _NAME,
}


def admit(message: Message, *, max_items: int | None = None) -> None:
    """Cleans a message's free text in place, and refuses the message if an identifier in it is malformed.

    Args:
        message: a message of tacit.v1. In any other message all text counts as free text.
        max_items: maximum number of entries in any list, checked before any entry is read.

    Raises:
        TextInvalid: an identifier is malformed or a list is too long; the text names the field.
    """
    _walk(message, max_items, strict=True)


def neutralise(message: Message) -> None:
    """Cleans all text of a message in place, including identifiers; cleaning never makes a malformed one valid.

    For readers that check identifiers themselves and first need text that is safe to show. U+FFFD and the ellipsis
    match no pattern, so an identifier that was changed is still refused.
    """
    _walk(message, None, strict=False)


@dataclass(frozen=True, slots=True)
class _Step:
    """A field that is text or contains some. `kind` is that of a text field; `entry` is a map's key and value."""

    name: str
    full_name: str
    repeated: bool
    kind: TextKind | None
    entry: "tuple[_Step, _Step] | None"


def _walk(message: Message, max_items: int | None, *, strict: bool) -> None:
    for step in _plan(message.DESCRIPTOR):
        if step.entry is not None:
            _walk_map(getattr(message, step.name), *step.entry, strict)
        elif step.repeated:
            items = getattr(message, step.name)
            if max_items is not None and len(items) > max_items:
                raise TextInvalid(f"{len(items)} {step.name} in one message; there are at most {max_items}")
            _walk_list(items, step, max_items, strict)
        elif step.kind is None:
            if message.HasField(step.name):
                _walk(getattr(message, step.name), max_items, strict=strict)
        else:
            text = getattr(message, step.name)
            # Assigning a field of a oneof selects it, so a text is assigned only if it changed.
            if (made := _admitted(text, step.kind, step, strict)) != text:
                setattr(message, step.name, made)


def _walk_list(items: Any, step: _Step, max_items: int | None, strict: bool) -> None:
    if step.kind is None:
        for item in items:
            _walk(item, max_items, strict=strict)
        return
    for at, text in enumerate(items):
        if (made := _admitted(text, step.kind, step, strict)) != text:
            items[at] = made


def _walk_map(items: Any, key: _Step, value: _Step, strict: bool) -> None:
    def made(text: Any, step: _Step) -> Any:
        return text if step.kind is None else _admitted(text, step.kind, step, strict)

    cleaned = {made(name, key): made(content, value) for name, content in items.items()}
    if cleaned != dict(items):
        items.clear()
        items.update(cleaned)


def _admitted(text: str, kind: TextKind, step: _Step, strict: bool) -> str:
    if kind.allows(text):
        return text
    if strict and kind.pattern is not None:
        raise TextInvalid(f"{clean(text, 40)!r} cannot stand in {step.full_name}: {kind.what}")
    if kind.pattern is not None:
        # `clean` turns line breaks into spaces, which some identifiers may contain.
        text = text.translate(_NO_BREAKS)
    return clean(text, kind.most)


@cache
def _plan(described: Descriptor) -> tuple[_Step, ...]:
    return tuple(_step(field) for field in described.fields if _holds_text(field, frozenset()))


def _step(field: FieldDescriptor) -> _Step:
    full_name = field.full_name.removeprefix("tacit.v1.")
    kind, entry = None, None
    if (inner := field.message_type) is None:
        kind = FIELDS.get(full_name, DETAIL) if field.type == FieldDescriptor.TYPE_STRING else None
    elif inner.GetOptions().map_entry:
        entry = (_step(inner.fields_by_name["key"]), _step(inner.fields_by_name["value"]))
    return _Step(field.name, full_name, field.is_repeated, kind, entry)


def _holds_text(field: FieldDescriptor, above: frozenset[str]) -> bool:
    if field.type == FieldDescriptor.TYPE_STRING:
        return True
    inner = field.message_type
    if inner is None or inner.full_name in above:
        return False
    return any(_holds_text(each, above | {inner.full_name}) for each in inner.fields)
