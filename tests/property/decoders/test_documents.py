"""Every text read from outside gives its content, or the one error that its reader is documented to raise.

Job documents, manifests and receipts (`DocumentInvalid`), join tokens (`TokenInvalid`), the ledger's records
(`RecordInvalid`), and decoded sums (`EncodingInvalid`). Accepted content reads the same after it is written again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_client.ledger.chain import BODIES, ZERO, RecordInvalid, record_after, record_from
from edge_client.ledger.receipts import Receipt
from secure_agg import EncodingInvalid, Layout, LayoutInvalid, Segment
from tacit.documents import Document, DocumentInvalid
from tacit.job import JobDocument
from tacit.manifest import Manifest, Tensor
from tacit.token import JoinToken, TokenInvalid
from tacit.vector import layout_of
from tests.property.decoders.test_wire_decoders import peak
from tests.support.fleet import job_document
from tests.support.made_inputs import odd, written
from tests.unit.tacit.test_vectors_encoding import JOBS

SOON = timedelta(seconds=10)
quick = settings(max_examples=150, deadline=SOON, suppress_health_check=list(HealthCheck))
long = settings(max_examples=8000, deadline=SOON, suppress_health_check=list(HealthCheck))
seeds = st.tuples(st.integers(0, 2**32), st.integers(1, 3))

HEX = "00" * 32
# A valid table of each kind.
GOOD: dict[str, list[dict[str, Any]]] = {
    "job": [
        json.loads(job_document().model_copy(update={"mechanism": mechanism}).canonical())
        for mechanism in JOBS.values()
    ],
    "manifest": [
        json.loads(Manifest(tensors=(Tensor(name="a", shape=(3, 2)), Tensor(name="b", shape=(4,)))).canonical())
    ],
    "receipt": [
        {
            "schema": 1,
            "kind": "tacit-receipt",
            "at_ms": 1,
            "federation": HEX,
            "member": "north",
            "job": "questions",
            "round": 1,
            "attempt": 2,
            "job_document": HEX,
            "version": HEX,
            "mechanism": mechanism.model_dump(mode="json"),
            "event": event,
            "reservation": 1 if event else None,
            "vector": HEX,
            "vector_bytes": 40,
            "bits": 32,
            "segments": [{"name": "update", "values": 10}],
            "cohort": [{"member": "north", "certificate": HEX}, {"member": "east", "certificate": HEX}],
            "cohort_size": 3,
            "assumed_corrupt": 1,
            "threshold": 3,
            "honest": 2,
            "sparse_graph": graph,
            "survivors": survivors,
            "outcome": "published",
            "result": HEX,
            "ledger": "00" * 16,
            "previous": HEX,
        }
        for mechanism, event, survivors, graph in (
            (JOBS["none"], None, ["north", "east"], None),
            (
                JOBS["dp-sgd"],
                {"kind": "sampled-gaussian", "multiplier": 1.5, "rate": 0.1, "steps": 10},
                None,
                {"degree": 54, "corrupt_millionths": 1, "lost_millionths": 1, "sigma": 80, "absent": 0},
            ),
        )
    ],
    "token": [
        {
            "schema": 1,
            "address": "localhost:7440",
            "federation": HEX,
            "id": "0" * 24,
            "secret": base64.urlsafe_b64encode(bytes(32)).decode().rstrip("="),
            "member": "north",
            "expires": "2030-01-02T03:04:05Z",
        }
    ],
}
READERS: dict[str, tuple[type[Document], type[Exception]]] = {
    "job": (JobDocument, DocumentInvalid),
    "manifest": (Manifest, DocumentInvalid),
    "receipt": (Receipt, DocumentInvalid),
}


def token_of(data: bytes) -> str:
    """The text of a token with any body and correct check digits."""
    body = base64.urlsafe_b64encode(data).rstrip(b"=").decode()
    check = hashlib.sha256(b"tacit/join-token/check/1\x00" + body.encode()).hexdigest()[:8]
    return f"tacit1.{body}.{check}"


def bent(kind: str, seed: int, times: int) -> dict[str, Any]:
    document: dict[str, Any] = random.Random(seed).choice(GOOD[kind])
    for turn in range(times):
        document = odd(document, seed + turn)
    return document


def _sentence(error: Exception, begins: tuple[str, ...] = ("",)) -> None:
    """Checks what a person is told: a sentence that is not empty, begins as expected and is not too long."""
    assert str(error).startswith(begins)
    assert 0 < len(str(error)) < 20_000


def document_is_read(kind: str, seed: int, times: int) -> None:
    reader, invalid = READERS[kind]
    data = written(bent(kind, seed, times), seed)
    try:
        document = reader.from_json(data, what="it")
    except invalid as error:
        _sentence(error, begins=("it ", "it:"))
        return
    again = reader.from_json(document.canonical())
    assert again == document
    assert again.digest() == document.digest()
    if isinstance(document, JobDocument):
        try:
            layout = layout_of(document, document.rounds.min_members)
        except LayoutInvalid:
            return
        assert layout.values >= document.values


@pytest.mark.parametrize("kind", READERS)
def test_the_unchanged_documents_are_valid(kind: str) -> None:
    reader, _ = READERS[kind]
    for document in GOOD[kind]:
        assert reader.from_json(json.dumps(document).encode()).digest()
    assert JoinToken.parse(token_of(json.dumps(GOOD["token"][0]).encode())).member == "north"


@quick
@given(seeds)
@pytest.mark.parametrize("kind", READERS)
def test_any_document(kind: str, how: tuple[int, int]) -> None:
    document_is_read(kind, *how)


@quick
@given(st.binary(max_size=60) | st.text(st.characters(codec="utf-8"), max_size=40).map(str.encode))
@pytest.mark.parametrize("kind", READERS)
def test_any_bytes_as_a_document(kind: str, data: bytes) -> None:
    reader, invalid = READERS[kind]
    with pytest.raises(invalid):
        reader.from_json(data)


# ---- join tokens ----------------------------------------------------------------------------------------------------


def token_is_read(seed: int, times: int) -> None:
    chance = random.Random(seed)
    text = token_of(written(bent("token", seed, times), seed))
    if chance.random() < 0.3:
        at = chance.randrange(len(text))
        text = text[:at] + chance.choice(["", ".", "=", " ", "\n", "é", "\0", "tacit2."]) + text[at + 1 :]
    try:
        token = JoinToken.parse(text)
    except TokenInvalid as error:
        _sentence(error)
        return
    assert JoinToken.parse(token.format()) == token


@quick
@given(seeds)
def test_any_join_token(how: tuple[int, int]) -> None:
    token_is_read(*how)


@quick
@given(st.text(st.characters(codec="utf-8"), max_size=60), st.sampled_from(["", "tacit1.", "tacit1.e30.", "'tacit1.."]))
def test_any_text_as_a_join_token(text: str, before: str) -> None:
    with pytest.raises(TokenInvalid):
        JoinToken.parse(before + text)


# ---- the ledger's records -------------------------------------------------------------------------------------------

_EVENT = {"kind": "sampled-gaussian", "multiplier": 1.5, "rate": 0.1, "steps": 10}
_LIMIT = {"epsilon": 8.0, "delta": 1e-6, "adjacency": "add-remove", "unit": "example"}
_PURPOSE = {
    "federation": HEX,
    "job": "questions",
    "round": 1,
    "version": HEX,
    "document": HEX,
    "mechanism": "dp-sgd",
    "data": HEX,
}
# A steward's statement about a job.
STATEMENT = {
    "federation": HEX,
    "member": "north",
    "data": "mine",
    "job": "questions",
    "document": HEX,
    "files": {"weights.bin": HEX},
    "policy": HEX,
    "decision": "approve",
    "issued_ms": 1,
    "expires_ms": 2,
    "reason": "",
    "steward": HEX,
}
BODY: dict[str, dict[str, Any]] = {
    "opened": {"ledger": "00" * 16, "name": "mine", "limit": _LIMIT, "monthly": None, "orders": HEX},
    "reserved": {"event": _EVENT, "purpose": _PURPOSE},
    "charged": {"reservation": 1, "attempt": 2},
    "stepped": {"reservation": 1, "band": 2, "through": 10},
    "released": {"reservation": 1, "why": "not sent"},
    "settled": {"reservation": 1, "attempt": 2, "outcome": "published", "result": HEX},
    "receipt": {
        "reservation": None,
        "job": "questions",
        "round": 1,
        "attempt": 2,
        "receipt": HEX,
        "signature": HEX,
    },
    "limit_lowered": {"epsilon": 4.0, "delta": 1e-6, "monthly": 1.0},
    "persons_named": {"column": "patient", "rows": 50},
    "data_seen": {"examples": 5, "texts": 5, "new": 5, "marks": 5, "digest": HEX, "key": "00" * 8, "persons": 3},
    "recovered": {"released": [1, 2], "unknown": [[3, 4]]},
    "approval": {"statement": STATEMENT, "signature": "00" * 64},
    "approval_lapsed": {"approval": HEX},
}


def line_of(kind: str) -> bytes:
    return record_after(ZERO, 1, 0, BODIES[kind].model_validate(BODY[kind])).line


def record_is_read(seed: int, times: int) -> None:
    chance = random.Random(seed)
    line = line_of(chance.choice(list(BODIES)))
    frame = json.loads(line)
    for turn in range(times):
        frame = odd(frame, seed + turn)
    data = (
        written(frame, seed)
        if chance.random() < 0.3
        else json.dumps(frame, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(
            "utf-8", "surrogatepass"
        )
    )
    try:
        record = record_from(data)
    except RecordInvalid as error:
        _sentence(error)
        return
    # The same content always gives the same line.
    assert record.line == data
    assert record_after(record.previous, record.sequence, record.at_ms, record.body) == record


@pytest.mark.parametrize("kind", BODIES)
def test_a_valid_record_is_read(kind: str) -> None:
    assert set(BODY) == set(BODIES)
    assert record_from(line_of(kind)).kind == kind


@quick
@given(seeds)
def test_any_record(how: tuple[int, int]) -> None:
    record_is_read(*how)


@quick
@given(st.sampled_from(list(BODIES)), st.integers(0, 10**6), st.integers(0, 7))
def test_a_record_with_a_flipped_bit_is_refused_or_another_one(kind: str, place: int, bit: int) -> None:
    line = bytearray(line_of(kind))
    line[place % len(line)] ^= 1 << bit
    try:
        record = record_from(bytes(line))
    except RecordInvalid:
        return
    assert record.digest != record_from(line_of(kind)).digest


# ---- decoded sums ---------------------------------------------------------------------------------------------------

layouts = st.tuples(
    st.sampled_from([4, 8, 20, 31, 32]),
    st.lists(st.tuples(st.integers(1, 5), st.floats(1e-3, 2.0), st.floats(1e-3, 2.0)), min_size=1, max_size=3),
)


@quick
@given(layouts, st.integers(0, 2**32), st.sampled_from(["<u4", ">u4", "<i4", "<u8", "<f4", "u1"]), st.integers(-2, 3))
def test_any_vector_as_a_sum(layout: tuple[int, Any], seed: int, dtype: str, more: int) -> None:
    bits, parts = layout
    made = Layout(tuple(Segment(f"s{i}", *part) for i, part in enumerate(parts)), bits)
    chance = np.random.default_rng(seed)
    length = max(0, made.values + more)
    vector = np.frombuffer(chance.bytes(8 * length), dtype=dtype)[:length]
    for total in (vector, vector.reshape(-1, 1), vector[::-1]):
        if total.dtype != np.dtype("<u4") or total.shape != (made.values,):
            with pytest.raises(EncodingInvalid):
                made.decode(total)
            continue
        decoded = made.decode(total)
        assert list(decoded) == [segment.name for segment in made.segments]
        for segment in made.segments:
            sums = decoded[segment.name]
            assert sums.shape == (segment.length,)
            assert np.all(np.abs(sums) <= 2 ** (bits - 1) / segment.scale)


# ---- size and depth -------------------------------------------------------------------------------------------------

NESTED = [b"[" * 100_000, b'{"a":' * 100_000, b'{"schema":1,"x":' + b"[" * 900 + b"]" * 900 + b"}"]
NUMBERS = [b'{"schema":' + b"9" * 5000 + b"}", b'{"schema":1,"x":1e999999}', b'{"schema":1,"x":' + b"9" * 4000 + b"}"]
READ: dict[str, tuple[Callable[[bytes], Any], type[Exception]]] = {
    **{kind: (reader.from_json, invalid) for kind, (reader, invalid) in READERS.items()},
    "token": (lambda data: JoinToken.parse(token_of(data)), TokenInvalid),
    "record": (record_from, RecordInvalid),
}


@pytest.mark.parametrize("number", range(len(NUMBERS)))
@pytest.mark.parametrize("kind", READ)
def test_endless_numbers_are_refused(kind: str, number: int) -> None:
    read, invalid = READ[kind]
    with pytest.raises(invalid):
        read(NUMBERS[number])


@pytest.mark.parametrize("nested", range(len(NESTED)))
@pytest.mark.parametrize("kind", READ)
def test_endless_nesting_is_refused(kind: str, nested: int) -> None:
    read, invalid = READ[kind]
    with pytest.raises(invalid):
        read(NESTED[nested])


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("job", "token") else pytest.mark.long) for kind in READ]
)
def test_large_texts_are_refused_in_little_memory_and_time(kind: str) -> None:
    read, invalid = READ[kind]
    many = json.dumps({"schema": 1, "tensors": [{"name": "a", "shape": [1]}] * 10_000, "x": ["y"] * 50_000}).encode()
    for data in (many, b'{"schema":1,"x":"' + b"y" * 1_000_000 + b'"}', b" " * 1_000_000, b'"' + b"\\u0041" * 200_000):

        def refuse(data: bytes = data) -> None:
            with pytest.raises(invalid):
                read(data)

        started = time.process_time()
        used = peak(refuse)
        # Python's values of small JSON take tens of bytes each; refused content is not kept twice.
        assert used < 60 * len(data) + 500_000, (used, len(data))
        assert time.process_time() - started < 10


@pytest.mark.parametrize("expires", ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59"])
def test_a_token_that_expires_outside_the_calendar(expires: str) -> None:
    body = {**GOOD["token"][0], "expires": expires}
    with pytest.raises(TokenInvalid):
        JoinToken.parse(token_of(json.dumps(body).encode()))


def test_a_token_that_is_not_text() -> None:
    with pytest.raises(TokenInvalid):
        JoinToken.parse("tacit1.\udcff.12345678")


@pytest.mark.parametrize("shape", [[2] * 20_000, [10**4000] * 20], ids=["many dimensions", "long dimensions"])
def test_a_manifest_bounds_each_shape_before_it_multiplies(shape: list[int]) -> None:
    """The product grows with every factor, so refusing it only at the end would take time quadratic in its length, and
    a coordinator may serve 16 MiB. Therefore each shape is refused where it is.
    """
    data = json.dumps({"schema": 1, "tensors": [{"name": "a", "shape": shape}]}).encode()
    with pytest.raises(DocumentInvalid, match=r"tensors\.0\.shape"):
        Manifest.from_json(data)


def test_a_job_whose_noise_no_ring_could_hold_is_refused() -> None:
    document = {**GOOD["job"][0], "mechanism": {"name": "laplace-update", "epsilon": 1e-320}}
    with pytest.raises(DocumentInvalid, match="epsilon"):
        JobDocument.from_json(json.dumps(document).encode())


def test_a_receipt_with_half_a_character_is_refused() -> None:
    with pytest.raises(DocumentInvalid):
        Receipt.from_json(json.dumps({**GOOD["receipt"][0], "member": "\ud800"}).encode())


def test_a_job_document_is_json_that_others_can_read() -> None:
    document = {**GOOD["job"][0], "aggregation": {"clip": float("inf")}}
    with pytest.raises(DocumentInvalid):
        JobDocument.from_json(json.dumps(document).encode())


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_any_text_at_length() -> None:
    @long
    @given(seeds)
    def all_of_them(how: tuple[int, int]) -> None:
        for kind in READERS:
            document_is_read(kind, *how)
        token_is_read(*how)
        record_is_read(*how)

    all_of_them()


def test_the_calendar_of_these_tests_is_real() -> None:
    """The token at the top is still valid by its own date."""
    assert JoinToken.parse(token_of(json.dumps(GOOD["token"][0]).encode())).expires == datetime(
        2030, 1, 2, 3, 4, 5, tzinfo=UTC
    )
