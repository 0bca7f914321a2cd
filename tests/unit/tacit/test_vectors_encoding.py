"""Every message as it travels and every document as it is hashed, pinned to the byte; also malformed bytes.

A change of `tests/vectors/wire/messages.json` is a change of the wire format and needs a decision record.
`python -m tests.unit.tacit.test_vectors_encoding` rewrites it. `bad_messages.json` is written by hand: what a side must
refuse, and with which sentence.
"""

from __future__ import annotations

import hashlib
import json
import re
from datetime import UTC, datetime
from typing import Any

import pytest
from google.protobuf.message import DecodeError

import secure_agg
from tacit import messages, wire
from tacit.attempt import AttemptId
from tacit.context import application_digest
from tacit.manifest import Manifest, Tensor
from tacit.mechanism import DistributedGaussian, DpSgd, GaussianUpdate, LaplaceUpdate, NoMechanism
from tacit.messages import AttemptMessage
from tacit.reason import Reason
from tacit.roster import Head, SignedHead
from tacit.token import JoinToken
from tacit.v1 import federation_pb2 as pb
from tacit.validation import NoisedMetrics
from tacit.vector import layout_of
from tests.support import places
from tests.support.fleet import job_document
from tests.support.group_fleet import grouped_context
from tests.support.sparse_fleet import sparse_context
from tests.support.sum_fleet import make_context

VECTORS = places.VECTORS / "wire"
AT = AttemptId("questions", 300, 70000)


def some(what: str, length: int = 32) -> bytes:
    """Bytes that occur nowhere else."""
    return hashlib.sha512(what.encode()).digest()[:length] if length <= 64 else some(what, 64) + some(what + "+", 20)


def entry(member: str) -> secure_agg.Advertisement:
    return secure_agg.Advertisement(
        member, *(some(f"{member} {part}") for part in ("certificate", "keys", "nonce", "signature"))
    )


def made_for(receiver: str, by: str, *, chosen: bool) -> secure_agg.DealtShare:
    own = receiver == by
    of_key = b"" if own else some(f"{by} key")
    of_shares = (some(f"{by} root share"), some(f"{by} seed share"))
    pair = (some(f"{by} sealed seed", 84), some(f"{by} pair")) if chosen else (b"", b"")
    sealed = (b"", b"") if own else (some(f"{by} sealed key", 84), some(f"{by} locked", 82))
    return secure_agg.DealtShare(receiver, *sealed, of_key, *of_shares, *pair)


def dealt(dealer: str) -> secure_agg.ReceivedDealing:
    path = (some(f"{dealer} left"), some(f"{dealer} right"))
    share = made_for("m0", dealer, chosen=True)
    return secure_agg.ReceivedDealing(dealer, share, some(f"{dealer} seed"), path, some(f"{dealer} signed"))


def share(dealer: str) -> secure_agg.RevealedShare:
    return secure_agg.RevealedShare(dealer, some(f"share of {dealer}", 33))


def about(part: str) -> secure_agg.Complaint:
    return secure_agg.Complaint("m0", "m1", secure_agg.Part(part), some("leaf"), some("signed"))


def opening_of(part: str) -> secure_agg.Opening:
    return secure_agg.Opening("m0", "m1", secure_agg.Part(part), some("leaf"), some("opened"), some("signed"))


FROM_MEMBERS: dict[str, Any] = {
    "hello": messages.Hello(
        1, "0.1.0", some("process", 16), ("quest*", "triage"), messages.LedgerCounter(bytes(16), 9)
    ),
    "hello without a ledger": messages.Hello(1, "0.1.0", some("process", 16)),
    "decline": messages.Decline("questions", 300, Reason.REASON_POLICY_COHORT, "too few"),
    "ready": messages.Ready(
        "questions",
        300,
        some("version"),
        messages.PrivacyReport(2.5, 1e-6),
        messages.LedgerCounter(some("l", 16), 300),
        approvals=2,
    ),
    "ready without a report": messages.Ready("questions", 300, some("version")),
    "advertisement": AttemptMessage(AT, entry("m0")),
    "dealing": AttemptMessage(
        AT,
        secure_agg.Dealing(
            "m0",
            some("seed"),
            (
                made_for("m0", "m0", chosen=False),
                made_for("m1", "m0", chosen=True),
                made_for("m2", "m0", chosen=False),
            ),
            some("signed"),
        ),
    ),
    "complaints": AttemptMessage(AT, secure_agg.Complaints((about("shares"), about("pair seed")))),
    "opening": AttemptMessage(AT, opening_of("pair seed")),
    "confirmation": AttemptMessage(AT, secure_agg.Confirmation("m0", some("signed"))),
    "unmasking": AttemptMessage(AT, secure_agg.Unmasking("m0", (share("m0"), share("m1")), (share("m2"),))),
    # No other member's message was at fault.
    "refusal": AttemptMessage(AT, messages.AttemptRefusal(Reason.REASON_ROSTER_SIGNATURE_INVALID, "m1: why")),
    "refusal that names a member": AttemptMessage(
        AT, messages.AttemptRefusal(Reason.REASON_DEALINGS_SIGNATURE_INVALID, "m1: why", "m1")
    ),
}
FROM_THE_COORDINATOR: dict[str, Any] = {
    "complaint": AttemptMessage(AT, about("shares")),
    "openings": AttemptMessage(AT, secure_agg.Openings((opening_of("shares"), opening_of("pair seed")))),
    "welcome": messages.Welcome(1, "0.1.0", some("federation").hex(), 1_700_000_000_000, 300),
    "goodbye": messages.Goodbye(Reason.REASON_SESSION_REPLACED, "why"),
    "standby": messages.Standby("nothing to do"),
    "authorities_changed": messages.AuthoritiesChanged(b'{"kind":"tacit-authorities"}'),
    "assignment": messages.Assignment("questions", 300, some("document"), some("version"), 299, 600_000),
    "job ended": messages.JobEnded("questions", Reason.REASON_JOB_FINISHED, some("version")),
    "jobs ended": messages.JobsEnded(
        (
            messages.JobEnded("questions", Reason.REASON_JOB_FINISHED, some("version")),
            messages.JobEnded("triage", Reason.REASON_JOB_ABORTED),
        )
    ),
    "attempt opened": AttemptMessage(AttemptId("triage", 7, 1), messages.AttemptOpened(make_context(9))),
    "attempt opened, nobody assumed corrupt": AttemptMessage(
        AttemptId("triage", 7, 1), messages.AttemptOpened(make_context(9, corrupt=0))
    ),
    "attempt opened, with a head": AttemptMessage(
        AttemptId("triage", 7, 1),
        messages.AttemptOpened(
            make_context(9),
            SignedHead(
                Head(make_context(9).federation, 300, some("root"), 1_700_000_000_000), some("signed"), some("der")
            ),
        ),
    ),
    "attempt opened, sparse": AttemptMessage(
        AttemptId("triage", 7, 1), messages.AttemptOpened(sparse_context(1000, sigma=80, absent=50))
    ),
    "attempt opened, in groups": AttemptMessage(
        AttemptId("triage", 7, 1), messages.AttemptOpened(grouped_context(12, 3, 1))
    ),
    "roster": AttemptMessage(AT, secure_agg.Roster((entry("m0"), entry("m1")))),
    "roster by digest": AttemptMessage(AT, secure_agg.roster_by_digest(secure_agg.Roster((entry("m0"), entry("m1"))))),
    "roster of a group": AttemptMessage(
        AT,
        secure_agg.GroupRoster(
            ("m0", "m1", "zurich"),
            (secure_agg.by_digest(entry("m0")), secure_agg.by_digest(entry("m1"))),
            ((b"\x01" * 32, b"\x02" * 32), (b"\x03" * 32, b"\x04" * 32)),
        ),
    ),
    "received dealings": AttemptMessage(AT, secure_agg.ReceivedDealings((dealt("m1"), dealt("m2")))),
    "survivors": AttemptMessage(AT, secure_agg.Survivors(("m0", "m1", "zurich"))),
    "confirmations": AttemptMessage(
        AT,
        secure_agg.Confirmations((secure_agg.Confirmation("m0", some("a")), secure_agg.Confirmation("m1", some("b")))),
    ),
    "attempt ended": AttemptMessage(
        AT, messages.AttemptEnded(True, Reason.REASON_UNSPECIFIED, "", some("result"), some("new version"))
    ),
    "attempt abandoned": AttemptMessage(AT, messages.AttemptEnded(False, Reason.REASON_THRESHOLD_LOST, "2 of 3")),
}
JOBS = {
    "none": NoMechanism(),
    "dp-sgd": DpSgd(noise_multiplier=1.5, lot=64),
    "gaussian-update": GaussianUpdate(noise_multiplier=2.0, clip=0.5),
    "laplace-update": LaplaceUpdate(bound=0.5, epsilon=0.25),
    "distributed-gaussian": DistributedGaussian(noise_multiplier=8.0, honest=2, clip=0.5),
}


def encoded() -> dict[str, dict[str, str]]:
    """Everything that is pinned: bytes in hexadecimal, documents unchanged."""
    masked = secure_agg.MaskedInput("m0", some("digest"), 251_000, some("signature"))
    documents = {
        f"job, {name}": job_document().model_copy(update={"mechanism": mechanism}) for name, mechanism in JOBS.items()
    }
    documents["job, metrics"] = documents["job, dp-sgd"].model_copy(
        update={"metrics": NoisedMetrics(noise_multiplier=28.0, patience=3)}
    )
    token = JoinToken(
        address="localhost:7440",
        federation=some("federation"),
        id=some("id", 12).hex(),
        secret=some("secret"),
        member="north",
        expires=datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC),
    )
    manifest = Manifest(tensors=(Tensor(name="embedding.weight", shape=(3, 2)), Tensor(name="bias", shape=(4,))))
    return {
        "from members": {
            name: wire.to_coordinator(message).SerializeToString(deterministic=True).hex()
            for name, message in FROM_MEMBERS.items()
        },
        "from the coordinator": {
            name: wire.to_member(message).SerializeToString(deterministic=True).hex()
            for name, message in FROM_THE_COORDINATOR.items()
        },
        "parts": {
            "attempt": wire.attempt_to_pb(AT).SerializeToString(deterministic=True).hex(),
            "masked input": wire.masked_input_to_pb(masked).SerializeToString(deterministic=True).hex(),
        },
        "documents": {
            **{name: document.canonical().decode() for name, document in documents.items()},
            "manifest": manifest.canonical().decode(),
            "token": token.canonical().decode(),
        },
        "texts": {
            "token": token.format(),
            **{
                f"application of a {name} of 5": application_digest(document, layout_of(document, 5)).hex()
                for name, document in documents.items()
            },
        },
    }


@pytest.fixture(scope="module")
def pinned() -> Any:
    return json.loads((VECTORS / "messages.json").read_text())


@pytest.mark.parametrize("group", ["from members", "from the coordinator", "parts", "documents", "texts"])
def test_every_message_encodes_to_its_pinned_bytes(pinned: Any, group: str) -> None:
    assert encoded()[group] == pinned[group]


def test_pinned_bytes_decode_to_the_message(pinned: Any) -> None:
    for name, message in FROM_MEMBERS.items():
        assert wire.from_member(pb.MemberMessage.FromString(bytes.fromhex(pinned["from members"][name]))) == message
    for name, message in FROM_THE_COORDINATOR.items():
        data = bytes.fromhex(pinned["from the coordinator"][name])
        assert wire.from_coordinator(pb.CoordinatorMessage.FromString(data)) == message
    assert JoinToken.parse(pinned["texts"]["token"]).member == "north"


def test_every_kind_of_message_is_pinned(pinned: Any) -> None:
    for group, kind in (("from members", pb.MemberMessage), ("from the coordinator", pb.CoordinatorMessage)):
        kinds = {kind.FromString(bytes.fromhex(data)).WhichOneof("message") for data in pinned[group].values()}
        assert kinds == {field.name for field in kind.DESCRIPTOR.fields}


def test_every_field_of_every_message_is_pinned(pinned: Any) -> None:
    """A field without a value in any vector would not be pinned."""
    seen: dict[str, set[str]] = {}

    def look(message: Any) -> None:
        fields = seen.setdefault(message.DESCRIPTOR.name, set())
        for field, value in message.ListFields():
            fields.add(field.name)
            if field.message_type is not None:
                for each in value if field.is_repeated else (value,):
                    look(each)

    for group, kind in (("from members", pb.MemberMessage), ("from the coordinator", pb.CoordinatorMessage)):
        for data in pinned[group].values():
            look(kind.FromString(bytes.fromhex(data)))
    for name, fields in seen.items():
        every = {field.name for field in pb.DESCRIPTOR.message_types_by_name[name].fields}
        # An entry in a list leaves its own reference empty, because the list has it.
        assert fields == every, name


@pytest.mark.parametrize("case", json.loads((VECTORS / "bad_messages.json").read_text()), ids=lambda case: case["name"])
def test_malformed_bytes_are_refused(case: dict[str, str]) -> None:
    data = bytes.fromhex(case["data"])
    if case["from"] == "member":
        kind, read = pb.MemberMessage, wire.from_member
    else:
        kind, read = pb.CoordinatorMessage, wire.from_coordinator  # type: ignore[assignment]
    if not case["says"]:
        with pytest.raises(DecodeError):
            kind.FromString(data)
        return
    if "refuses" in case:
        # It names an attempt, which the member can refuse: the message is decoded, but its numbers form no context.
        assert case["refuses"] == secure_agg.Reason.CONTEXT_INVALID.value
        payload = wire.from_coordinator(kind.FromString(data)).payload
        with pytest.raises(secure_agg.ContextInvalid, match=re.escape(case["says"])):
            _ = payload.context
        return
    with pytest.raises(wire.WireInvalid, match=case["says"]):
        read(kind.FromString(data))


if __name__ == "__main__":
    VECTORS.mkdir(exist_ok=True)
    (VECTORS / "messages.json").write_text(json.dumps(encoded(), indent=2, ensure_ascii=False) + "\n")
