"""The contract: reasons, documents, manifests, messages on the wire."""

import dataclasses
import json
import math
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import secure_agg
from tacit import limits, messages, wire
from tacit.attempt import AttemptId
from tacit.bundle import Labels
from tacit.context import application_digest, context_of, promise_of, thresholds_of
from tacit.corpus import LabelCount
from tacit.documents import DocumentInvalid, Part
from tacit.job import Aggregation, JobDocument, JobSpec
from tacit.manifest import Manifest
from tacit.messages import AttemptMessage
from tacit.protocol import PROTOCOL_VERSION, disagreement
from tacit.reason import Reason, from_word, of_protocol, sentence, word
from tacit.v1 import federation_pb2 as pb
from tacit.vector import layout_of
from tacit.verification import verifiers
from tests.support.fleet import job_document
from tests.support.party import authority
from tests.support.sparse_fleet import sparse_context
from tests.support.sum_fleet import make_context

ATTEMPT = AttemptId("questions", 3, 4)
SPARSE = sparse_context(250, sigma=80, absent=12)


def test_every_reason_has_a_word_and_a_sentence():
    for number in Reason.values():
        assert from_word(word(number)) == number
        assert sentence(number).endswith(".")
    for reason in secure_agg.Reason:
        assert word(of_protocol(reason)) == reason.value
    assert from_word("from_the_future") == Reason.REASON_UNSPECIFIED


def advertisement(member):
    return secure_agg.Advertisement(member, b"certificate", b"keys", bytes(32), b"signature")


def dealt(receiver):
    texts = (b"sealed key", b"locked", b"of key", b"of root", b"of seed", b"sealed seed", b"of pair")
    return secure_agg.DealtShare(receiver, *texts)


COMPLAINT = secure_agg.Complaint("a", "b", secure_agg.Part.SHARES, bytes(32), b"signature")
OF_SEED = secure_agg.Complaint("a", "c", secure_agg.Part.PAIR_SEED, bytes(32), b"signature")
OPENING = secure_agg.Opening("a", "b", secure_agg.Part.SHARES, bytes(32), b"k" * 32, b"signature")
MEMBER_SAYS = [
    messages.Hello(1, "0.1.0", bytes(16), ("quest*",)),
    messages.Decline("questions", 3, Reason.REASON_POLICY_COHORT, "why"),
    messages.Hello(1, "0.1.0", bytes(16), ledger=messages.LedgerCounter(bytes(range(16)), 2**63 - 1)),
    messages.Ready("questions", 3, bytes(32)),
    messages.Ready("questions", 3, bytes(32), messages.PrivacyReport(2.5, 1e-6), messages.LedgerCounter(bytes(16), 7)),
    AttemptMessage(ATTEMPT, advertisement("a")),
    AttemptMessage(
        ATTEMPT,
        secure_agg.Dealing("a", bytes(32), (dealt("b"),), b"signed"),
    ),
    AttemptMessage(ATTEMPT, secure_agg.Complaints((COMPLAINT, OF_SEED))),
    AttemptMessage(ATTEMPT, OPENING),
    AttemptMessage(ATTEMPT, secure_agg.Confirmation("a", b"signature")),
    AttemptMessage(
        ATTEMPT,
        secure_agg.Unmasking(
            "a", (secure_agg.RevealedShare("b", bytes(33)),), (secure_agg.RevealedShare("c", bytes(33)),)
        ),
    ),
    AttemptMessage(ATTEMPT, messages.AttemptRefusal(Reason.REASON_CONTEXT_UNEXPECTED, "why")),
    AttemptMessage(ATTEMPT, messages.AttemptRefusal(Reason.REASON_DEALINGS_SIGNATURE_INVALID, "why", "b")),
]
COORDINATOR_SAYS = [
    AttemptMessage(ATTEMPT, COMPLAINT),
    AttemptMessage(ATTEMPT, secure_agg.Openings((OPENING,))),
    messages.Welcome(1, "0.1.0", "ab" * 32, 1234),
    messages.Welcome(1, "0.1.0", "ab" * 32, 1234, ledger_sequence=9),
    messages.Goodbye(Reason.REASON_SESSION_REPLACED, "why"),
    messages.Standby("nothing"),
    messages.AuthoritiesChanged(b'{"kind":"tacit-authorities"}'),
    messages.Assignment("questions", 3, bytes(32), bytes(32), 2, 1000),
    messages.JobEnded("questions", Reason.REASON_JOB_FINISHED, bytes(32)),
    messages.JobsEnded(
        (
            messages.JobEnded("questions", Reason.REASON_JOB_FINISHED, bytes(32)),
            messages.JobEnded("triage", Reason.REASON_MEMBER_WITHDREW),
        )
    ),
    AttemptMessage(AttemptId("triage", 7, 1), messages.AttemptOpened(make_context(5))),
    AttemptMessage(AttemptId("triage", 7, 1), messages.AttemptOpened(make_context(3, threshold=2, corrupt=0))),
    AttemptMessage(AttemptId("triage", 7, 1), messages.AttemptOpened(SPARSE)),
    AttemptMessage(ATTEMPT, secure_agg.Roster((advertisement("a"), advertisement("b")))),
    AttemptMessage(ATTEMPT, secure_agg.roster_by_digest(secure_agg.Roster((advertisement("a"), advertisement("b"))))),
    AttemptMessage(
        ATTEMPT, secure_agg.GroupRoster(("a", "b"), (secure_agg.by_digest(advertisement("a")),), ((bytes(32),) * 2,))
    ),
    AttemptMessage(
        ATTEMPT,
        secure_agg.ReceivedDealings(
            (secure_agg.ReceivedDealing("a", dealt("b"), bytes(32), (bytes(32), bytes(32)), b"signed"),)
        ),
    ),
    AttemptMessage(ATTEMPT, secure_agg.Survivors(("a", "b"))),
    AttemptMessage(ATTEMPT, secure_agg.Confirmations((secure_agg.Confirmation("a", b"signature"),))),
    AttemptMessage(ATTEMPT, messages.AttemptEnded(True, Reason.REASON_UNSPECIFIED, "", bytes(32), bytes(32))),
]


def kind(message):
    return type(getattr(message, "payload", message)).__name__


@pytest.mark.parametrize("message", MEMBER_SAYS, ids=kind)
def test_a_members_message_round_trips(message):
    encoded = wire.to_coordinator(message).SerializeToString()
    assert wire.from_member(pb.MemberMessage.FromString(encoded)) == message


@pytest.mark.parametrize("message", COORDINATOR_SAYS, ids=kind)
def test_a_coordinators_message_round_trips(message):
    encoded = wire.to_member(message).SerializeToString()
    assert wire.from_coordinator(pb.CoordinatorMessage.FromString(encoded)) == message


def test_every_kind_of_message_is_tested_here():
    said = {type(getattr(each, "payload", each)) for each in MEMBER_SAYS}
    assert len(said) == len(pb.MemberMessage.DESCRIPTOR.oneofs[0].fields)
    said = {type(getattr(each, "payload", each)) for each in COORDINATOR_SAYS}
    assert len(said) == len(pb.CoordinatorMessage.DESCRIPTOR.oneofs[0].fields)


@pytest.mark.parametrize(
    "message", [pb.MemberMessage(), pb.MemberMessage(confirmation=pb.Confirmation()), pb.MemberMessage(dealing={})]
)
def test_a_malformed_message_is_refused(message):
    with pytest.raises(wire.WireInvalid):
        wire.from_member(message)


def opened(context):
    """Encodes a context as the coordinator sends it."""
    return wire.to_member(AttemptMessage(AttemptId("triage", 7, 1), messages.AttemptOpened(context)))


def heard(message):
    """Decodes it as a member does."""
    read = wire.from_coordinator(pb.CoordinatorMessage.FromString(message.SerializeToString()))
    assert isinstance(read, AttemptMessage)
    assert isinstance(read.payload, messages.AttemptOpened)
    return read.payload


def test_a_contradictory_context_is_an_attempt_that_a_member_refuses():
    message = opened(make_context(5))
    message.attempt_opened.threshold = 2
    with pytest.raises(secure_agg.ContextInvalid, match="threshold 2 is too low"):
        _ = heard(message).context
    message = opened(SPARSE)
    message.attempt_opened.sparse_graph.degree = 20
    with pytest.raises(secure_agg.ContextInvalid, match="20 neighbours do not do"):
        _ = heard(message).context


@pytest.mark.parametrize("context", [make_context(3, threshold=2, corrupt=0), SPARSE], ids=["complete", "sparse"])
def test_a_missing_number_is_named_and_never_read_as_zero(context):
    """n_C = 0 is a number like any other: if stated, it is present; otherwise it is missing."""
    assert heard(opened(context)).context == context
    for name in ("cohort", "threshold", "assumed_corrupt", "values", "bits"):
        message = opened(context)
        message.attempt_opened.ClearField(name)
        with pytest.raises(secure_agg.ContextInvalid, match=f"leaves out {name};"):
            _ = heard(message).context
    for field in pb.SparseGraph.DESCRIPTOR.fields if context is SPARSE else ():
        message = opened(context)
        message.attempt_opened.sparse_graph.ClearField(field.name)
        with pytest.raises(secure_agg.ContextInvalid, match=f"its sparse graph leaves out {field.name};"):
            _ = heard(message).context


def test_a_context_without_its_sparse_graph_has_another_digest():
    message = opened(SPARSE)
    message.attempt_opened.ClearField("sparse_graph")
    with pytest.raises(secure_agg.ContextInvalid):
        _ = heard(message).context
    # With a threshold that is valid on the complete graph it is a context, but no member that was shown the other one
    # signs under it.
    message.attempt_opened.threshold = 200
    assert heard(message).context.digest() != SPARSE.digest()


def test_the_largest_cohorts_messages_fit_the_grpc_limits():
    names = [f"{number:05}".ljust(63, "x") for number in range(limits.MAX_MEMBERS)]
    longest = bytes(1024)
    entry = secure_agg.DigestAdvertisement(names[0], bytes(32), bytes(32), bytes(32), longest)
    roster = secure_agg.DigestRoster(tuple(entry for _ in names))
    of_group = secure_agg.GroupRoster(
        tuple(names), (entry,) * limits.MAX_GROUP, ((bytes(32),) * limits.MAX_ROSTER_PATH,) * limits.MAX_GROUP
    )
    confirmations = secure_agg.Confirmations(tuple(secure_agg.Confirmation(name, longest) for name in names))
    share = secure_agg.DealtShare(names[0], bytes(1168), bytes(82), *(bytes(32),) * 3, bytes(1168), bytes(32))
    one = secure_agg.ReceivedDealing(names[0], share, bytes(32), (bytes(32),) * limits.MAX_PATH, longest)
    dealings = secure_agg.ReceivedDealings((one,) * limits.MAX_NEIGHBOURS)
    full = secure_agg.Advertisement(names[0], bytes(limits.MAX_CERTIFICATE_BYTES), bytes(2 * 1216), bytes(32), longest)
    small = secure_agg.Roster((full,) * limits.DIGEST_ROSTER_ABOVE)
    for payload in (roster, of_group, small, confirmations, dealings, secure_agg.Survivors(tuple(names))):
        size = wire.to_member(AttemptMessage(ATTEMPT, payload)).ByteSize()
        assert size <= limits.MAX_FROM_COORDINATOR, type(payload).__name__
    part = pb.CertificatesPart(certificates=[bytes(limits.MAX_CERTIFICATE_BYTES)] * limits.CERTIFICATES_IN_A_PART)
    assert part.ByteSize() <= limits.MAX_FROM_COORDINATOR
    dealing = secure_agg.Dealing(names[0], bytes(32), (share,) * limits.MAX_NEIGHBOURS, longest)
    revealed = (secure_agg.RevealedShare(names[0], bytes(33)),) * limits.MAX_NEIGHBOURS
    for payload in (dealing, secure_agg.Unmasking(names[0], revealed, revealed)):  # type: ignore[assignment]
        size = wire.to_coordinator(AttemptMessage(ATTEMPT, payload)).ByteSize()
        assert size <= limits.MAX_FROM_MEMBER, type(payload).__name__
    # Little more than that, because the limit is also what one message of the other side can cost.
    assert limits.MAX_FROM_COORDINATOR <= 13 * 2**20
    assert limits.MAX_FROM_MEMBER <= 4 * 2**20


def test_a_manifest_flattens_and_unflattens():
    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones(4, np.float32)}
    manifest = Manifest.of(tensors)
    flat = manifest.flatten(tensors)
    assert manifest.values == 10
    back = manifest.unflatten(manifest.decode(manifest.encode(flat)))
    assert list(back) == ["b", "a"]
    assert all(np.array_equal(back[name], tensors[name]) for name in tensors)
    assert Manifest.from_json(manifest.canonical()) == manifest


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({"b": np.zeros((2, 3), np.float32)}, "missing"),
        ({"b": np.zeros((3, 2), np.float32), "a": np.zeros(4, np.float32)}, "float32"),
        ({"b": np.zeros((2, 3)), "a": np.zeros(4, np.float32)}, "float64"),
        (
            {"b": np.zeros((2, 3), np.float32), "a": np.zeros(4, np.float32), "c": np.zeros(1, np.float32)},
            "unknown",
        ),
    ],
)
def test_parameters_that_differ_from_the_manifest_are_refused(tensors, complaint):
    manifest = Manifest.of({"b": np.zeros((2, 3), np.float32), "a": np.zeros(4, np.float32)})
    with pytest.raises(DocumentInvalid, match=complaint):
        manifest.flatten(tensors)


def test_a_truncated_or_non_finite_version_is_refused():
    manifest = Manifest.of({"a": np.zeros(4, np.float32)})
    with pytest.raises(DocumentInvalid, match="bytes"):
        manifest.decode(bytes(15))
    with pytest.raises(DocumentInvalid, match="finite"):
        manifest.decode(np.array([1, np.inf, 0, 0], "<f4").tobytes())


def test_a_job_document_round_trips_in_canonical_form():
    job = job_document()
    assert JobDocument.from_json(job.canonical()) == job
    assert JobDocument.from_json(job.canonical()).digest() == job.digest()
    loose = json.dumps(json.loads(job.canonical()), indent=2).encode()
    assert JobDocument.from_json(loose).digest() == job.digest()
    content = json.loads(job.canonical())
    content["surprise"] = 1
    with pytest.raises(DocumentInvalid, match="surprise: unknown key"):
        JobDocument.from_json(json.dumps(content).encode())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"labels": ("a", "a")}, "twice"),
        ({"labels": ("a",)}, "labels"),
        ({"name": "No Name"}, "name"),
        ({"rounds": {"min_members": 2}}, "corrupt"),
        ({"rounds": {"min_members": 5, "target_members": 4}}, "target_members"),
        ({"model": {"widths": [2, 2]}}, "twice"),
        ({"model": {"widths": [9], "max_tokens": 8}}, "width"),
        ({"mechanism": "dp-sgd"}, "mechanism"),
        ({"training": {"learning_rate": 0}}, "learning_rate"),
        ({"rounds": {"target_members": 10_001}}, "target_members"),
        ({"aggregation": {"max_lost_share": 0.1234567}}, "max_lost_share has at most six decimals, got 0.1234567"),
        ({"aggregation": {"max_corrupt_share": 1}}, "max_corrupt_share"),
        ({"aggregation": {"max_corrupt_share": 0.2, "max_lost_share": 0.4}}, "must be below 1"),
        (
            {"rounds": {"target_members": 300}, "aggregation": {"max_corrupt_share": 0.33, "max_lost_share": 0.33}},
            "aggregation.max_corrupt_share, aggregation.max_lost_share or rounds.target_members: no sparse graph of 201",  # noqa: E501
        ),
        (
            {"rounds": {"min_members": 250, "target_members": 300}, "aggregation": {"assumed_corrupt": 250}},
            r"aggregation.assumed_corrupt, aggregation.max_lost_share or rounds.min_members: assumed_corrupt counts",
        ),
        ({"rounds": {"min_members": 2}}, "aggregation.assumed_corrupt or rounds.min_members: a cohort of 2"),
        (
            {
                "rounds": {"min_members": 100, "target_members": 1000},
                "mechanism": {"name": "distributed-gaussian", "noise_multiplier": 9.0, "honest": 25},
            },
            "a cohort of 201 guarantees 1.*raise aggregation.max_lost_share, or lower rounds.target_members to 200",
        ),
        (
            {
                "rounds": {"min_members": 300, "target_members": 1000},
                "mechanism": {"name": "distributed-gaussian", "noise_multiplier": 9.0, "honest": 50},
            },
            "a cohort of 300 guarantees 24.*lower it, or raise aggregation.max_lost_share$",
        ),
        (
            {"mechanism": {"name": "distributed-gaussian", "noise_multiplier": 9.0, "honest": 3}},
            "a cohort of 3 guarantees 2.*lower it, or raise rounds.min_members$",
        ),
        (
            {"aggregation": {"bits": 8}},
            r"aggregation.bits: the sum of 200 members \(rounds.target_members\) with weights up to 100000 "
            r"\(aggregation.max_weight\) needs 26 bits and has 8; raise it to 26, or lower aggregation.max_weight or "
            "rounds.target_members$",
        ),
        (
            {"aggregation": {"bits": 8, "max_weight": 4_000_000}, "rounds": {"target_members": 1000}},
            "needs 33 bits and has 8; leave bits out, or lower aggregation.max_weight or rounds.target_members",
        ),
        (
            {"aggregation": {"max_weight": 4_000_000}, "rounds": {"target_members": 1000}},
            "aggregation.max_weight: the sum of 1000 .* needs 33 bits and has 32; lower aggregation.max_weight or",
        ),
        (
            {"aggregation": {"bits": 8}, "mechanism": {"name": "dp-sgd", "noise_multiplier": 1.0}},
            r"aggregation.bits: the sum of 200 members \(rounds.target_members\) needs 9 bits and has 8; "
            "raise it to 9, or lower rounds.target_members$",
        ),
    ],
)
def test_an_invalid_job_names_the_key(tmp_path, change, complaint):
    base = {
        "schema": 1,
        "name": "questions",
        "labels": ["a", "b"],
        "vocabulary": {"kind": "words", "file": "words.txt"},
    }
    with pytest.raises(DocumentInvalid, match=complaint):
        JobSpec._from_content({**base, **change}, "job.toml")
    JobSpec._from_content(base, "job.toml")


@pytest.mark.parametrize(
    ("advice", "change"),
    [
        ("raise it to 26", {"aggregation": {"bits": 26}}),
        (
            "or lower aggregation.max_weight",
            {"aggregation": {"bits": 8, "max_weight": 11}, "rounds": {"target_members": 10}},
        ),
        ("leave bits out", {"aggregation": {}}),
    ],
)
def test_the_advice_for_a_job_without_room_works(advice, change):
    base = json.loads(job_document().canonical())
    document = JobDocument._from_content({**base, **change}, "job.json")
    layout_of(document, document.rounds.target_members)


def test_noise_in_the_ring_has_room_for_the_values_of_the_model():
    noise = {"name": "distributed-gaussian", "noise_multiplier": 1.0}
    narrow = {"mechanism": noise, "aggregation": {"bits": 19}, "rounds": {"target_members": 5}}
    base = json.loads(job_document().canonical())
    JobDocument._from_content({**base, **narrow, "values": 100}, "job.json")
    complaint = r"aggregation.bits: the sum of 5 members \(rounds.target_members\) with this noise needs 21 bits"
    with pytest.raises(DocumentInvalid, match=complaint):
        JobDocument._from_content({**base, **narrow, "values": 20_000_000}, "job.json")
    with pytest.raises(DocumentInvalid, match=r"mechanism, rounds.target_members: "):
        JobDocument._from_content({**base, **narrow, "values": 10**400}, "job.json")


def large(**numbers):
    rounds = {key: numbers.pop(key) for key in ("min_members", "target_members") if key in numbers}
    return job_document(Aggregation(**numbers), **rounds)


@pytest.mark.parametrize("members", [3, 200, 201, 1000, 10_000])
def test_an_attempt_of_any_size_has_the_numbers_of_its_job(members):
    job = large(target_members=10_000, max_corrupt_share=0.05)
    context = context_of(job, federation=bytes(32), round=1, attempt=2, model=bytes(32), members=members)
    promise = promise_of(job, members)
    assert (context.graph, context.threshold, context.assumed_corrupt) == thresholds_of(job, members)
    assert (promise.honest, promise.min_roster) == (context.honest, context.min_roster)
    assert context.application == application_digest(job, layout_of(job, members))
    assert context.values == layout_of(job, members).values
    if members <= 200:
        assert context.sparse is None
        assert (context.threshold, context.assumed_corrupt) == secure_agg.default_thresholds(members)
    else:
        assert context.sparse is not None
        assert context.assumed_corrupt == members // 20
        assert (context.sparse.sigma, context.sparse.corrupt_millionths) == (80, 50_000)
        # This many may be missing from the roster, and as many again may drop out after it.
        assert members - context.min_survivors == members // 10
        assert members - context.min_roster >= members // 20


def keys_left_out(part, written):
    """Fields of a document, and of the tables in it, that its canonical form leaves out."""
    found = {f"{type(part).__name__}.{key}" for key in type(part).model_fields} - {
        f"{type(part).__name__}.{'schema_version' if key == 'schema' else key}" for key in written
    }
    for key in type(part).model_fields:
        value = getattr(part, key)
        if isinstance(value, Part):
            found |= keys_left_out(value, written[key])
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "model": {
                "architecture": "prompted",
                "config": {"model_type": "bert"},
                "backbone": "ab" * 32,
                "task": "head",
            }
        },
        {"method": "fedvocab", "vocabulary": {"kind": "words"}, "tokenizer": None},
    ],
    ids=["plain", "prompted", "own vocabulary"],
)
def test_a_document_states_every_key_even_with_its_default(changes):
    """Otherwise a member with other defaults would train another job under the same digest."""
    job = JobDocument.model_validate(job_document().model_dump() | changes)
    assert keys_left_out(job, json.loads(job.canonical())) == set()


def test_the_shares_of_a_job_are_in_its_digest():
    jobs = (large(), large(max_corrupt_share=0.11), large(max_lost_share=0.11))
    assert len({job.digest() for job in jobs}) == 3


def test_every_number_of_a_job_is_in_the_application_digest():
    job = job_document()
    digests = {application_digest(job, layout_of(job, members)) for members in (3, 4, 9)}
    digests.add(application_digest(job.model_copy(update={"seed": 1}), layout_of(job, 3)))
    digests.add(application_digest(job.model_copy(update={"tokenizer": bytes([9]) * 32}), layout_of(job, 3)))
    # Cohorts of 3 and 4 have the same scales, and so the same layout.
    assert len(digests) >= 4


@pytest.mark.parametrize("program", ["coordinator", "edge_client"])
def test_help_imports_nothing_that_costs_seconds(program):
    code = (
        f"import sys; sys.argv = ['{program}', '--help']\n"
        f"from {program}.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'grpc', 'sqlalchemy', 'numpy', 'transformers', 'onnxruntime', 'cryptography', 'pydantic'}\n"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_an_unissued_certificate_is_not_parsed_further():
    """A duplicate extension: a parser that reads extensions first raises an unexpected error."""
    now = datetime.now(UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "anyone")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + timedelta(days=1))
    for last in (4, 5):
        oid = x509.ObjectIdentifier(f"1.2.3.{last}")
        builder = builder.add_extension(x509.UnrecognizedExtension(oid, b"\x05\x00"), critical=False)
    der = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)
    twice = der.replace(bytes([6, 3, 0x2A, 3, 5]), bytes([6, 3, 0x2A, 3, 4]))
    verify, _ = verifiers(authority().certificate)
    with pytest.raises(secure_agg.IdentityInvalid):
        verify(twice, b"message", b"signature")


@pytest.mark.parametrize("admits", [("a" * 64,), ("*",) * 65, ("Job",), ("a\n",), ("",)])
def test_a_hello_with_costly_patterns_is_refused(admits):
    message = wire.to_coordinator(messages.Hello(1, "1", bytes(16), admits))
    with pytest.raises(wire.WireInvalid):
        wire.from_member(message)


REF = pb.AttemptRef(job="questions", round=3, attempt=4)


def from_a_member(message):
    return wire.from_member(pb.MemberMessage.FromString(message.SerializeToString()))


def from_the_coordinator(message):
    return wire.from_coordinator(pb.CoordinatorMessage.FromString(message.SerializeToString()))


# Lists in messages: the limit, a message with that many empty entries, and what an entry decodes to.
MANY = {
    "shares dealt": (
        limits.MAX_NEIGHBOURS,
        lambda n: pb.MemberMessage(dealing=pb.Dealing(ref=REF, shares=[pb.DealtShare()] * n)),
        "DealtShare",
    ),
    "seed shares": (
        limits.MAX_NEIGHBOURS,
        lambda n: pb.MemberMessage(unmasking=pb.Unmasking(ref=REF, seed_shares=[pb.RevealedShare()] * n)),
        "RevealedShare",
    ),
    "root shares": (
        limits.MAX_NEIGHBOURS,
        lambda n: pb.MemberMessage(unmasking=pb.Unmasking(ref=REF, root_shares=[pb.RevealedShare()] * n)),
        "RevealedShare",
    ),
    "roster": (
        limits.MAX_MEMBERS,
        lambda n: pb.CoordinatorMessage(roster=pb.Roster(ref=REF, advertisements=[pb.Advertisement()] * n)),
        "Advertisement",
    ),
    "roster by digest": (
        limits.MAX_MEMBERS,
        lambda n: pb.CoordinatorMessage(
            digest_roster=pb.DigestRoster(ref=REF, advertisements=[pb.DigestAdvertisement()] * n)
        ),
        "DigestAdvertisement",
    ),
    "names of the roster of a group": (
        limits.MAX_MEMBERS,
        lambda n: pb.CoordinatorMessage(group_roster=pb.GroupRoster(ref=REF, names=[""] * n)),
        "GroupRoster",
    ),
    "roster of a group": (
        limits.MAX_GROUP,
        lambda n: pb.CoordinatorMessage(
            group_roster=pb.GroupRoster(ref=REF, advertisements=[pb.DigestAdvertisement()] * n)
        ),
        "DigestAdvertisement",
    ),
    "paths of the roster of a group": (
        limits.MAX_GROUP,
        lambda n: pb.CoordinatorMessage(group_roster=pb.GroupRoster(ref=REF, paths=[b""] * n)),
        "GroupRoster",
    ),
    "dealings": (
        limits.MAX_NEIGHBOURS,
        lambda n: pb.CoordinatorMessage(
            received_dealings=pb.ReceivedDealings(ref=REF, dealings=[pb.ReceivedDealing()] * n)
        ),
        "ReceivedDealing",
    ),
    "path": (
        limits.MAX_PATH,
        lambda n: pb.CoordinatorMessage(
            received_dealings=pb.ReceivedDealings(ref=REF, dealings=[pb.ReceivedDealing(path=[b""] * n)])
        ),
        "ReceivedDealing",
    ),
    "survivors": (
        limits.MAX_MEMBERS,
        lambda n: pb.CoordinatorMessage(survivors=pb.Survivors(ref=REF, members=[""] * n)),
        "Survivors",
    ),
    "confirmations": (
        limits.MAX_MEMBERS,
        lambda n: pb.CoordinatorMessage(confirmations=pb.Confirmations(ref=REF, confirmations=[pb.Confirmation()] * n)),
        "Confirmation",
    ),
}


@pytest.mark.parametrize("what", MANY)
def test_too_many_entries_are_refused_before_they_are_decoded(monkeypatch, what):
    """Protobuf packs a million empty ones into two megabytes."""
    most, message, made_of_it = MANY[what]
    as_many = message(most)
    read = from_a_member if isinstance(as_many, pb.MemberMessage) else from_the_coordinator
    assert isinstance(read(as_many), AttemptMessage)
    made = []
    monkeypatch.setattr(secure_agg, made_of_it, lambda *fields, **named: made.append(made_of_it))
    with pytest.raises(wire.WireInvalid, match=f"^{most + 1} .* at most {most}$"):
        read(message(most + 1))
    assert made == []


def test_two_protocol_versions_that_differ_say_which_side_to_upgrade():
    assert disagreement(member=PROTOCOL_VERSION, coordinator=PROTOCOL_VERSION) is None
    assert disagreement(member=1, coordinator=2) == (
        "the member speaks protocol version 1, the coordinator version 2; upgrade the member's software"
    )
    assert disagreement(member=2, coordinator=1).endswith("upgrade the coordinator's software")


# Every field in which a message names a member.
NAMING = {
    "advertisement": lambda name: pb.MemberMessage(advertisement=pb.Advertisement(ref=REF, member=name)),
    "dealer": lambda name: pb.MemberMessage(dealing=pb.Dealing(ref=REF, dealer=name)),
    "receiver": lambda name: pb.MemberMessage(dealing=pb.Dealing(ref=REF, shares=[pb.DealtShare(receiver=name)])),
    "confirmation": lambda name: pb.MemberMessage(confirmation=pb.Confirmation(ref=REF, member=name)),
    "unmasking": lambda name: pb.MemberMessage(unmasking=pb.Unmasking(ref=REF, member=name)),
    "seed share": lambda name: pb.MemberMessage(
        unmasking=pb.Unmasking(ref=REF, seed_shares=[pb.RevealedShare(dealer=name)])
    ),
    "root share": lambda name: pb.MemberMessage(
        unmasking=pb.Unmasking(ref=REF, root_shares=[pb.RevealedShare(dealer=name)])
    ),
    "roster": lambda name: pb.CoordinatorMessage(
        roster=pb.Roster(ref=REF, advertisements=[pb.Advertisement(member=name)])
    ),
    "roster by digest": lambda name: pb.CoordinatorMessage(
        digest_roster=pb.DigestRoster(ref=REF, advertisements=[pb.DigestAdvertisement(member=name)])
    ),
    "roster of a group": lambda name: pb.CoordinatorMessage(
        group_roster=pb.GroupRoster(ref=REF, advertisements=[pb.DigestAdvertisement(member=name)])
    ),
    "names of the roster of a group": lambda name: pb.CoordinatorMessage(
        group_roster=pb.GroupRoster(ref=REF, names=[name])
    ),
    "received dealing": lambda name: pb.CoordinatorMessage(
        received_dealings=pb.ReceivedDealings(ref=REF, dealings=[pb.ReceivedDealing(dealer=name)])
    ),
    "survivors": lambda name: pb.CoordinatorMessage(survivors=pb.Survivors(ref=REF, members=[name])),
    "confirmations": lambda name: pb.CoordinatorMessage(
        confirmations=pb.Confirmations(ref=REF, confirmations=[pb.Confirmation(member=name)])
    ),
}


@pytest.mark.parametrize("where", NAMING)
def test_a_members_name_has_at_most_63_characters_everywhere(where):
    longest = NAMING[where]("e" * 63)
    read = from_a_member if isinstance(longest, pb.MemberMessage) else from_the_coordinator
    assert isinstance(read(longest), AttemptMessage)
    for name in ("e" * 64, "é", "\x1b[31mred", "m0\n", "M0"):
        with pytest.raises(wire.WireInvalid, match="a name is 1 to 63 of"):
            read(NAMING[where](name))


@pytest.mark.parametrize("path", [bytes(31), bytes(33), bytes(32 * (limits.MAX_ROSTER_PATH + 1))], ids=len)
def test_a_path_of_a_roster_is_whole_digests_and_no_longer_than_its_tree(path):
    most = bytes(32 * limits.MAX_ROSTER_PATH)
    for good in (b"", bytes(32), most):
        from_the_coordinator(pb.CoordinatorMessage(group_roster=pb.GroupRoster(ref=REF, paths=[good])))
    with pytest.raises(wire.WireInvalid, match="a path in a roster's tree"):
        from_the_coordinator(pb.CoordinatorMessage(group_roster=pb.GroupRoster(ref=REF, paths=[path])))


def test_text_from_the_other_side_is_one_short_printable_line():
    detail = "\x1b[2Jcleared\nand a second line" + "x" * 10_000
    message = wire.to_coordinator(messages.Decline("questions", 1, Reason.REASON_POLICY_COHORT, detail))
    arrived = wire.from_member(message)
    assert isinstance(arrived, messages.Decline)
    assert arrived.detail.isprintable()
    assert len(arrived.detail) == 500
    hello = wire.from_member(wire.to_coordinator(messages.Hello(1, "9" * 100_000, bytes(16))))
    assert isinstance(hello, messages.Hello)
    assert len(hello.software_version) == 64


@pytest.mark.parametrize(
    "ready",
    [
        pb.Ready(job="a", round=1, privacy=pb.PrivacyReport(epsilon=-1.0)),
        pb.Ready(job="a", round=1, privacy=pb.PrivacyReport(epsilon=math.nan)),
        pb.Ready(job="a", round=1, privacy=pb.PrivacyReport(epsilon=math.inf)),
        pb.Ready(job="a", round=1, privacy=pb.PrivacyReport(epsilon=1.0, delta=1.5)),
        pb.Ready(job="a", round=1, ledger=pb.LedgerCounter(id=bytes(15), sequence=1)),
        pb.Ready(job="a", round=1, ledger=pb.LedgerCounter(id=bytes(16), sequence=2**63)),
    ],
)
def test_an_impossible_report_or_counter_is_refused(ready):
    with pytest.raises(wire.WireInvalid):
        wire.from_member(pb.MemberMessage(ready=ready))


@pytest.mark.parametrize("label", ["\x1b[31mred", "two\nlines", "\u202eevil", "zero\u200bwidth", "\x9b1m"])
def test_a_label_on_which_a_terminal_would_act_is_refused(label):
    for read in (
        lambda name: Labels(labels=(name, "other")),
        lambda name: LabelCount(label=name, rows=1),
    ):
        assert read("\u0645\u06cc\u200c\u062e\u0648\u0627")
        with pytest.raises(ValueError, match="remove it"):
            read(label)


def test_evidence_round_trips_and_anything_else_is_refused():
    dealing = secure_agg.ReceivedDealing("b", dealt("a"), bytes(32), (bytes(32),), b"signature")
    evidence = secure_agg.Evidence(bytes(32), dealing, 0, 2, OPENING)
    data = wire.evidence_to_bytes(evidence)
    assert wire.evidence_from_bytes(data) == evidence
    for wrong in (b"", data[:-3], b"\xff" * 20, wire.evidence_to_bytes(dataclasses.replace(evidence, session=b""))):
        with pytest.raises(wire.WireInvalid):
            wire.evidence_from_bytes(wrong)


def test_a_complaint_about_no_known_secret_is_refused():
    ref = pb.AttemptRef(job="questions", round=1, attempt=1)
    with pytest.raises(wire.WireInvalid, match="the shares or the pair's seed"):
        wire.from_member(pb.MemberMessage(opening=pb.Opening(ref=ref, complainant="a", dealer="b")))
