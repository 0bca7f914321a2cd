"""Text from any field of any message of tacit.v1 is clean and bounded when a person sees it.

Each example goes all the way: from the wire through the real decoder into the real log, in both of its formats, and
into the operator's real lists.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.cli.job import _rounds_table
from coordinator.cli.member import members_table
from coordinator.cli.status import jobs_table, text_of
from tacit import wire
from tacit.fields import DETAIL, FIELDS, TextInvalid, admit, neutralise
from tacit.v1 import enrolment_pb2, federation_pb2, operator_pb2
from tests.support.made_inputs import leaves_of
from toolkit import logs
from toolkit.console import CommandFailed, printable
from toolkit.text import MAX_SHOWN, clean, is_clean

FILES = (enrolment_pb2, federation_pb2, operator_pb2)
# The longest sentence of a refusal: 40 characters of a value as `repr` writes them, the field, and the rule.
MAX_REFUSAL = 600
HOSTILE = (
    "\x1b[2J\x1b[31mred",
    "\x1b]0;title\x07",
    "\x9b31m",
    "a\rb",
    "line\nline",
    "\u202eevil\u2066\u2069",
    "\u200b\u2060\ufeff",
    "\u2028\u2029",
    "\x7f",
    "\U000e0041",
    "[red]markup[/red]",
    "x" * 5000,
    "\x1b[31m" * 2000,
)
texts = st.sampled_from(HOSTILE) | st.text(st.characters(codec="utf-8"), max_size=300)
quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))

# Characters that no log or list may hold: C0 except line feed and tab (which a JSON log escapes), DEL, C1, bidi,
# separators.
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f]")


def all_messages() -> Iterator[Descriptor]:
    def inside(described: Descriptor) -> Iterator[Descriptor]:
        yield described
        for nested in described.nested_types:
            yield from inside(nested)

    for file in FILES:
        for described in file.DESCRIPTOR.message_types_by_name.values():
            yield from inside(described)


def paths(described: Descriptor, above: tuple[str, ...] = ()) -> Iterator[tuple[FieldDescriptor, ...]]:
    """The paths from a message to each of its text fields."""
    for field in described.fields:
        if field.type == FieldDescriptor.TYPE_STRING:
            yield (field,)
        elif field.message_type is not None and field.message_type.full_name not in above:
            for rest in paths(field.message_type, (*above, described.full_name)):
                yield (field, *rest)


def planted(kind: type[Message], path: tuple[FieldDescriptor, ...], text: str) -> Message:
    """A message with a text at the end of a path, as it arrives from the wire."""
    message = kind()
    at: Any = message
    for field in path:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = getattr(at, field.name)
            entry.update({text: "why"} if path[-1].name == "key" else {"desk": text})
            break
        if field.message_type is not None:
            at = getattr(at, field.name).add() if field.is_repeated else getattr(at, field.name)
            # Present even if nothing else in it is set.
            at.SetInParent()
        elif field.is_repeated:
            getattr(at, field.name).append(text)
        else:
            setattr(at, field.name, text)
    if kind in (federation_pb2.MemberMessage, federation_pb2.CoordinatorMessage):
        _name_attempt(message)
    return kind.FromString(message.SerializeToString())


def _name_attempt(message: Any) -> None:
    """Names an attempt in messages that belong to one, so that their other fields are read at all."""
    for _, value in message.ListFields():
        if "ref" in value.DESCRIPTOR.fields_by_name:
            value.ref.MergeFrom(federation_pb2.AttemptRef(job=value.ref.job or "desk", round=1, attempt=1))


def every_text(message: Message) -> Iterator[tuple[FieldDescriptor, str]]:
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            of = field.message_type.fields_by_name
            for key, content in value.items():
                yield of["key"], key
                yield of["value"], content
            continue
        for each in value if field.is_repeated else (value,):
            if isinstance(each, Message):
                yield from every_text(each)
            elif isinstance(each, str):
                yield field, each


def bound(field: FieldDescriptor) -> int:
    return FIELDS.get(field.full_name.removeprefix("tacit.v1."), DETAIL).most


def assert_clean(text: str, most: int) -> None:
    assert len(text) <= most
    assert is_clean(text), text
    assert RAW.search(text) is None, text


@contextlib.contextmanager
def log_of(form: str) -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    out = io.StringIO()
    logs.configure(form, "debug", stream=out)
    try:
        yield out
    finally:
        structlog.reset_defaults()
        root.handlers[:], root.level = before


def assert_log_is_clean(*values: Any) -> None:
    """Logs a text with the real configuration: as a field, as the event, in a list, and in a traceback."""
    for form in ("console", "json"):
        with log_of(form) as out:
            for value in values:
                log = structlog.get_logger("test")
                log.info("heard", value=value, inside=[value, {"deeper": value}])
                log.info(str(value))
                log.error("failed", exc_info=ValueError(str(value)))
                logging.getLogger("a library").error("said %s", value)
        written = out.getvalue()
        assert RAW.search(written) is None, written
        assert len(written) < 12 * MAX_SHOWN * max(1, len(values))
        if form == "json":
            for line in written.splitlines():
                assert RAW.search(json.loads(line)["event"]) is None


def assert_refusal_is_clean(error: ValueError) -> None:
    assert_clean(str(error), MAX_REFUSAL)


# ---- nobody forgets a field -----------------------------------------------------------------------------------------


def test_every_text_field_says_what_it_holds():
    found = {
        field.full_name.removeprefix("tacit.v1.")
        for described in all_messages()
        for field in described.fields
        if field.type == FieldDescriptor.TYPE_STRING
    }
    assert found == set(FIELDS), "a text field was added or renamed: say in tacit.fields what it holds"


def test_no_map_holds_messages_with_text():
    for described in all_messages():
        if described.GetOptions().map_entry:
            assert described.fields_by_name["value"].message_type is None, "tacit.fields does not look inside"


# ---- every field of every message -----------------------------------------------------------------------------------

PLACES = [
    pytest.param(described, path, id=".".join([described.name, *(field.name for field in path)]))
    for described in all_messages()
    if not described.GetOptions().map_entry
    for path in paths(described)
]


def test_the_text_fields_of_all_messages_are_found():
    assert len(PLACES) > 100


# Every field gets every hostile text, and any text comes to some field. The sweep brings any text to every field.
each_place = pytest.mark.parametrize(("described", "path"), PLACES)
SESSION = {"MemberMessage": wire.from_member, "CoordinatorMessage": wire.from_coordinator}


@each_place
def test_a_server_gets_clean_text_or_refuses_the_message(described, path):
    for text in HOSTILE:
        a_server_gets_clean_text_or_refuses(described, path, text)


@each_place
def test_a_client_gets_clean_text_and_no_false_identifier(described, path):
    for text in HOSTILE:
        a_client_gets_clean_text(described, path, text)


@pytest.mark.parametrize(("described", "path"), [place for place in PLACES if place.values[0].name in SESSION])
def test_a_session_message_is_clean_or_never_reaches_the_machine(described, path):
    for text in HOSTILE:
        a_session_message_is_clean(described, path, text)


@settings(quick, max_examples=1000)
@given(st.sampled_from([place.values for place in PLACES]), texts)
def test_any_text_in_any_field_is_clean_or_refused(place, text: str) -> None:
    described, path = place
    is_clean_or_refused(described, path, text)


@pytest.mark.long
@each_place
def test_any_text_in_every_field_is_clean_or_refused(described, path):
    @quick
    @given(texts)
    def holds(text: str) -> None:
        is_clean_or_refused(described, path, text)

    holds()


def is_clean_or_refused(described: Descriptor, path: tuple[FieldDescriptor, ...], text: str) -> None:
    a_server_gets_clean_text_or_refuses(described, path, text)
    a_client_gets_clean_text(described, path, text)
    if described.name in SESSION:
        a_session_message_is_clean(described, path, text)


def a_server_gets_clean_text_or_refuses(described: Descriptor, path: tuple[FieldDescriptor, ...], text: str) -> None:
    message = planted(GetMessageClass(described), path, text)
    try:
        admit(message)
    except TextInvalid as error:
        assert_refusal_is_clean(error)
        return
    for field, found in every_text(message):
        assert_clean(found, bound(field))


def a_client_gets_clean_text(described: Descriptor, path: tuple[FieldDescriptor, ...], text: str) -> None:
    message = planted(GetMessageClass(described), path, text)
    before = dict.fromkeys((found for _, found in every_text(message)), True)
    neutralise(message)
    for field, found in every_text(message):
        assert_clean(found, bound(field))
        kind = FIELDS[field.full_name.removeprefix("tacit.v1.")]
        # An altered text does not pass as an identifier.
        assert kind.pattern is None or found in before or kind.pattern.fullmatch(found) is None


def a_session_message_is_clean(described: Descriptor, path: tuple[FieldDescriptor, ...], text: str) -> None:
    read: Any = SESSION[described.name]
    message = planted(GetMessageClass(described), path, text)
    try:
        decoded = read(message)
    except wire.WireInvalid as error:
        assert_refusal_is_clean(error)
        return
    for leaf in leaves_of(decoded):
        if isinstance(leaf, str):
            assert_clean(leaf, MAX_REFUSAL)


# ---- sinks, of whatever comes ---------------------------------------------------------------------------------------


@quick
@given(st.text(max_size=300) | st.sampled_from([*HOSTILE, "\ud800\udfff", "x" * 10**6]))
def test_the_log_and_the_console_clean_uncleaned_text(text: str) -> None:
    assert_log_is_clean(text)
    for shown in (printable(text), CommandFailed(text).sentence):
        assert len(shown) <= MAX_SHOWN
        assert RAW.search(shown) is None
    assert clean(clean(text, 40), 40) == clean(text, 40)


@quick
@given(texts)
def test_the_operators_lists_are_clean_even_with_raw_messages(text: str) -> None:
    member = operator_pb2.Member(name=text, status=text, software_version=text, declined={"desk": text, text: text})
    status = operator_pb2.StatusResponse(
        federation=text,
        software_version=text,
        members=[member],
        jobs=[operator_pb2.Job(name=text, phase=text)],
    )
    dropout = operator_pb2.Dropout(member=text, phase=text, detail=text)
    attempt = operator_pb2.Attempt(outcome=text, dropouts=[dropout])
    listed = [
        text_of(status),
        members_table([member]),
        jobs_table(list(status.jobs)),
        _rounds_table([operator_pb2.Round(number=1, outcome=text, attempts=[attempt])]),
    ]
    for shown in listed:
        assert RAW.search(shown) is None, shown
        assert len(shown) < 2_000_000
    # A line break in a cell would forge a row.
    assert len(listed[1].splitlines()) == 2
