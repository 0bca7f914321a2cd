"""What leaves a member's machine, recorded from real processes and searched by allow-list and for planted canaries.

North's calls go through a relay that records every byte it sends (`tests.support.recorder`): enrolment, three jobs
(without noise, dp-sgd, distributed-gaussian), two declined jobs, `doctor` and `--dry-run`. The two searches are
independent, and a member that leaks on purpose shows that each can fail. Then the same jobs run again with other data:
an observer of message sizes sees no difference.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import math
import random
import re
import shutil
import sqlite3
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from google.protobuf import descriptor_pb2, text_format

from coordinator.cli.common import operator_stub
from coordinator.config import CoordinatorFolder, load_config
from coordinator.services.credentials import enrolment_credentials, federation_credentials
from edge_client.identity.home import MemberIdentity
from edge_client.ledger.overlap import digest_of_marks, marks_of
from edge_client.roster.book import RosterBook, book_path
from edge_client.session.agent import CHUNK
from export.bundle import make_job_bundle
from learning.accounting.events import DiscreteGaussianSum, SampledGaussian
from learning.accounting.filter import Limit
from learning.accounting.gate import epsilon_counted
from learning.text.data import data_digest, read_examples
from learning.text.encoder import TextEncoder
from learning.text.examples import label_ids
from secure_agg import pack_in_place, packed_size, unpack_into
from secure_agg.session import KEYS_BYTES, LOCKED_BYTES, NONCE_BYTES, SEALED_BYTES
from secure_agg.shamir import SHARE_BYTES
from tacit import __version__
from tacit.blobs import put_blob
from tacit.job import JobDocument, JobSpec
from tacit.protocol import PROTOCOL_VERSION
from tacit.reason import Reason
from tacit.roster import HeadInvalid
from tacit.roster_wire import cosignature_from_pb
from tacit.token import JoinToken
from tacit.v1 import federation_pb2 as pb
from tacit.v1 import operator_pb2
from tacit.vector import grid_of, layout_of
from tests.support.processes import EXAMPLES, Federation, Process, behind, command, succeed
from tests.support.recorder import Call, Canaries, Recorded, Relay, Sent, leaves, not_allowed, pieces

# The first test sets up everything, with a dozen processes.
pytestmark = pytest.mark.timeout(600)

MEMBER, OTHERS = "north", ("east", "south")
ROUNDS, ROWS, DELTA = 2, 48, 1e-6
LABELS = ("quorvexal", "mibblethorn", "ostrenny")
KINDS = {
    "none": 'mechanism = "none"\n',
    "dpsg": '[mechanism]\nname = "dp-sgd"\nnoise_multiplier = 4.0\nlot = 16\nsteps = 3\n',
    "ring": '[mechanism]\nname = "distributed-gaussian"\nnoise_multiplier = 32.0\nhonest = 2\n',
}
# Jobs declined for reasons that only the member knows, with the exact sentence that it sends.
DECLINED = {
    "odds": (
        'mechanism = "none"\n',
        Reason.REASON_DATA_UNSUITABLE,
        "the labels of the member's data are not the job's; the member's own log says which",
    ),
    "dear": (
        '[mechanism]\nname = "dp-sgd"\nnoise_multiplier = 0.01\nlot = 16\n',
        Reason.REASON_BUDGET_SPENT,
        "the next release would pass this member's limit for its data",
    ),
}
# Numbers and words that occur nowhere else.
EPSILON, EPSILON_A_JOB = 873.2517, 612.5039
REMARK = "wexcombly furtanning"
POLICY = f"""# {REMARK}
schema = 1
mechanisms = ["none", "dp-sgd", "gaussian-update", "laplace-update", "distributed-gaussian"]
epsilon = {EPSILON}
"""

# ---- data that nothing else contains --------------------------------------------------------------------------------


def synthetic_words(seed, count):
    """Words of twelve letters or more that no word list contains."""
    source = random.Random(seed)
    syllables = [a + b + c for a in "bdfgklmprtvz" for b in "aeiou" for c in ("lq", "rv", "nx", "mb", "zt", "sk")]
    words = set()
    while len(words) < count:
        words.add("".join(source.choice(syllables) for _ in range(source.choice((3, 3, 4)))))
    return sorted(words)


@dataclass(frozen=True)
class Plan:
    """One data set. Some of its words are in the vocabulary, and its texts and labels follow from its seed."""

    seed: int

    @property
    def known(self):
        """Words in the vocabulary of the jobs."""
        return synthetic_words(self.seed, 60)

    @property
    def unknown(self):
        """Words that are not in the vocabulary."""
        return synthetic_words(self.seed + 1, 40)

    def rows(self):
        """(text, label) of every row. The lengths of the texts differ too."""
        source = random.Random(self.seed)
        for number in range(ROWS):
            words = source.choices(self.known, k=source.randint(6, 14)) + source.choices(self.unknown, k=2)
            source.shuffle(words)
            extra = ("", f" {source.randrange(10**9, 10**10)}", " Fjørhölt-Nagyű", " 漢字試験文書例")[number % 4]
            yield " ".join(words) + extra, source.choice(LABELS[: 2 + self.seed % 2])


PLANS = {"a": Plan(101), "b": Plan(202)}
LEAKY = Plan(303)
FILES = {"a": "umbrafell-book", "b": "crastlewing-list", "leak": "yarveldine-set"}
# The member's own names for its data sets. Each has its own ledger.
DATA_NAMES = {"a": "plumquarry-one", "b": "plumquarry-two", "leak": "plumquarry-six"}


def write_data(path, plan):
    path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in plan.rows()))
    return path


# ---- a federation that records what north sends ---------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What is public about a job that north was asked to join."""

    document: JobDocument
    versions: frozenset[bytes]
    # (round, attempt)
    attempts: frozenset[tuple[int, int]]

    @property
    def layout(self):
        return layout_of(self.document, 1 + len(OTHERS))

    @property
    def vector_bytes(self):
        return packed_size(self.layout.values, self.layout.bits)

    def epsilon(self, rounds):
        """The epsilon that a member with ROWS examples has spent after these rounds, from public numbers; None without
        noise.
        """
        mechanism = self.document.mechanism
        if mechanism.name == "none":
            return None
        if mechanism.name == "dp-sgd":
            rate = mechanism.lot / ROWS
            event = SampledGaussian(multiplier=mechanism.noise_multiplier, rate=rate, steps=mechanism.steps * rounds)
        else:
            grid = grid_of(self.document)
            event = DiscreteGaussianSum(  # type: ignore[assignment]
                honest=1,
                std=grid.std,
                distance=grid.distance(replaced=True),
                values=self.document.values,
                steps=rounds,
            )
        return epsilon_counted([event], Limit(EPSILON, DELTA))


@dataclass(frozen=True)
class Run:
    """One run of north's process: what it sent, and what it kept."""

    name: str
    sent: Sent
    jobs: dict[str, Job]
    data: Path
    records: Path
    folder: Path

    @property
    def ledger(self):
        """Line and digest of every ledger record, in order."""
        path = self.folder / "ledgers" / f"{DATA_NAMES[self.name]}.db"
        with closing(sqlite3.connect(path)) as connection:
            return connection.execute("SELECT line, digest FROM records ORDER BY sequence").fetchall()

    def encoded(self):
        """The vectors before masking, by (job, round, attempt)."""
        vectors = {}
        for path in sorted(self.records.glob("*.npy")):
            job, of_round, attempt, _ = path.name.split(".")
            vectors[job, int(of_round), int(attempt)] = np.load(path)
        return vectors

    def uploads(self):
        """Header and masked vector as sent, by (job, round, attempt)."""
        found = {}
        for call in self.sent.calls:
            if call.method == "FederationService/UploadMasked":
                of_call = Sent(messages=tuple(each for each in self.sent.messages if each.call == call.number))
                header, *data = of_call.parsed(call.method)
                ref = header.header.ref
                found[ref.job, ref.round, ref.attempt] = header.header, b"".join(part.data for part in data)
        return found


class Listening:
    """The federation, the relays, and north's runs."""

    def __init__(self, folder, stack):
        self.folder = folder
        self.federation = Federation(folder)
        stack.callback(self.federation.close)
        self.home = self.federation.home(MEMBER)
        self.enrolment = self._enrol()
        self.federation.enrol(*OTHERS, policy=POLICY.replace(REMARK, "").replace(str(EPSILON), "1000.0"))
        (self.home / "policy.toml").write_text(POLICY + f"epsilon_a_job = {EPSILON_A_JOB}\n")
        identity = MemberIdentity.load(self.home)
        towards = grpc.ssl_channel_credentials(identity.root_pem, identity.key_pem, identity.certificate_pem)
        credentials = federation_credentials(CoordinatorFolder(self.federation.dir))
        self.relay = Relay(credentials, f"localhost:{self.federation.port}", towards)
        stack.callback(self.relay.close)
        behind(self.relay, self.home)
        # The public vocabulary holds words of all plans, so it does not show whose data uses which.
        words = [word for plan in (*PLANS.values(), LEAKY) for word in plan.known]
        (folder / "words.txt").write_text((EXAMPLES / "words.txt").read_text() + "\n".join(words) + "\n")
        for number, name in enumerate(OTHERS):
            write_data(folder / f"{name}.jsonl", Plan(900 + number))
            self.federation.start(name)

    def _enrol(self):
        """Enrols north through a relay of its own, because a new member without a certificate calls another port."""
        token = JoinToken.parse(self.federation.token(MEMBER))
        towards = grpc.ssl_channel_credentials((self.federation.dir / "authority" / "root.pem").read_bytes())
        where = f"localhost:{load_config(self.federation.dir).enrolment_port}"
        relay = Relay(enrolment_credentials(CoordinatorFolder(self.federation.dir)), where, towards)
        try:
            self.token = token.model_copy(update={"address": f"localhost:{relay.port}"})
            succeed("edge_client", "enrol", self.token.format(), "--home", self.home)
            return relay.take()
        finally:
            relay.close()

    def create(self, name, mechanism, labels=LABELS, rounds=ROUNDS):
        """Creates a small job: two chunks to send, a moment to train."""
        spec = self.folder / f"{name}.toml"
        start = f'schema = 1\nname = "{name}"\nlabels = {json.dumps(labels)}\n'
        plain = mechanism.startswith("mechanism")
        spec.write_text(
            start
            + (mechanism if plain else "")
            + '[vocabulary]\nkind = "words"\nfile = "words.txt"\n'
            + "[model]\nembedding = 32\nwidths = [1, 2]\nmaps = 8\n"
            + f"[rounds]\ncount = {rounds}\nmin_members = 3\ntarget_members = 3\n"
            + "max_attempts = 1\nmax_failed_rounds = 1\n"
            # Long deadlines, so that no member is dropped on a busy machine.
            + "[rounds.deadlines]\ntraining = 300\nreconnect = 60\n"
            + ("" if plain else mechanism)
        )
        bundle = self.folder / f"bundle-{name}"
        document = make_job_bundle(JobSpec.from_toml(spec), self.folder, bundle)

        async def work():
            async with operator_stub(self.federation.dir / "operator") as stub:
                for part in ("manifest.json", "weights.bin", "tokenizer.json"):
                    await put_blob(stub, bundle / part)
                digest = await put_blob(stub, document.canonical())
                await stub.CreateJob(operator_pb2.CreateJobRequest(document=digest))

        asyncio.run(work())
        return document

    def job(self, name, document):
        """The job as the operator's service shows it now."""
        detail = self.federation.show(name)
        return Job(
            document,
            frozenset(version.digest for version in detail.versions),
            frozenset((each.number, attempt.number) for each in detail.rounds for attempt in each.attempts),
        )

    def start(self, name, plan, *how):
        """Starts north's process with an empty cache."""
        shutil.rmtree(self.home / "cache", ignore_errors=True)
        data = write_data(self.folder / f"{FILES[name]}.jsonl", plan)
        records = self.folder / f"records-{name}"
        records.mkdir()
        words = [sys.executable, "-m", "tests.support.watched_member", str(records), *how, "--", "run"]
        words += ["--data", str(data), "--data-name", DATA_NAMES[name], "--home", str(self.home)]
        words += ["--job", f"*-{name}", "--log-format", "json"]
        member = Process(MEMBER, words, self.folder / f"{MEMBER}-{name}.log")
        self.federation.processes.append(member)
        member.wait_for("connected")
        return member, data, records

    def run(self, name):
        """One run of north, from start to end, over every kind of job in turn."""
        member, data, records = self.start(name, PLANS[name])
        jobs = {}
        for kind, mechanism in KINDS.items():
            job = f"{kind}-{name}"
            document = self.create(job, mechanism)
            self.federation.finished(job)
            member.wait_for("job_over", job=job)
            jobs[job] = self.job(job, document)
        for kind, (mechanism, _, _) in DECLINED.items():
            job = f"{kind}-{name}"
            document = self.create(job, mechanism, ("one", "two") if kind == "odds" else LABELS)
            member.wait_for("declined", job=job)
            self.federation.operator("job", "abort", job, "--yes")
            jobs[job] = self.job(job, document)
        assert member.stop() == 0
        return Run(name, self.relay.take(), jobs, data, records, self.home)

    def leak(self):
        """One run of a member that leaks on purpose."""
        name = "leak"
        member, data, records = self.start(name, LEAKY, "--leak")
        jobs = {}
        for kind, labels in (("odds", ("one", "two")), ("none", LABELS)):
            job = f"{kind}-{name}"
            document = self.create(job, KINDS["none"], labels)
            if kind == "odds":
                member.wait_for("declined", job=job)
                self.federation.operator("job", "abort", job, "--yes")
            else:
                # The vector's digest is not the signed one, so the round fails and the job pauses.
                self.federation.wait_for(job, lambda detail: detail.job.status == operator_pb2.JOB_STATUS_PAUSED)
            jobs[job] = self.job(job, document)
        member.end()
        return Run(name, self.relay.take(), jobs, data, records, self.home)

    def ask(self):
        """What `doctor` and `run --dry-run` send."""
        self.create("look-a", KINDS["none"])
        data = self.folder / f"{FILES['a']}.jsonl"
        command("edge_client", "doctor", "--home", self.home)
        succeed("edge_client", "run", "--dry-run", "--data", data, "--home", self.home)
        self.federation.operator("job", "abort", "look-a", "--yes")
        return self.relay.take()


@pytest.fixture(scope="module")
def listening(tmp_path_factory):
    with ExitStack() as stack:
        yield Listening(tmp_path_factory.mktemp("what-leaves"), stack)


@pytest.fixture(scope="module")
def first(listening):
    return listening.run("a")


@pytest.fixture(scope="module")
def other(listening):
    return listening.run("b")


@pytest.fixture(scope="module")
def asked(listening):
    return listening.ask()


@pytest.fixture(scope="module")
def leaky(listening):
    return listening.leak()


# ---- the allow-list -------------------------------------------------------------------------------------------------

METADATA = {
    "user-agent": re.compile(rb"grpc-python(-asyncio)?/[0-9.]+ grpc-c/[0-9.]+ \([a-z0-9]+; [a-z0-9_]+\)").fullmatch
}

# Keys, nonces, digests, signatures and sealed shares must look random, so most of them can be checked only by size.
# Every other field is checked by its value.
SIZES = {
    "Session.hello.process": 16,
    "Session.advertisement.keys": KEYS_BYTES,
    "Session.advertisement.nonce": NONCE_BYTES,
    "Session.advertisement.signature": 384,
    "Session.dealing.seed_commitment": 32,
    "Session.dealing.shares.sealed_key": SEALED_BYTES,
    "Session.dealing.shares.locked_shares": LOCKED_BYTES,
    "Session.dealing.shares.key_commitment": 32,
    "Session.dealing.shares.root_commitment": 32,
    "Session.dealing.shares.sealed_pair_seed": SEALED_BYTES,
    "Session.dealing.shares.pair_seed_commitment": 32,
    "Session.dealing.shares.seed_commitment": 32,
    "Session.dealing.signature": 384,
    "Session.confirmation.signature": 384,
    "Session.unmasking.seed_shares.share": SHARE_BYTES,
    "UploadMasked.header.input.digest": 32,
    "UploadMasked.header.input.signature": 384,
}
LOG = "FederationService/FetchLog"
RANDOM = {*SIZES, "UploadMasked.data", "Session.hello.ledger.id", "Session.ready.ledger.id", "Session.ready.version"}


def allowed(run):
    """A predicate for each field's path, made from public facts, the ledger and the identity folder."""
    identity = MemberIdentity.load(run.folder)
    lines = [json.loads(line) for line, _ in run.ledger]
    ledger, sequence = bytes.fromhex(lines[0]["body"]["ledger"]), len(lines)
    trained = {name: job for name, job in run.jobs.items() if job.attempts}
    declined = {f"{kind}-{run.name}": how for kind, how in DECLINED.items()}
    blobs = {
        digest
        for job in run.jobs.values()
        for digest in (job.document.digest(), job.document.manifest, job.document.tokenizer, *job.versions)
    }
    everybody, nothing = {MEMBER, *OTHERS}, (None, None, None)

    def versions(job):
        return trained[job].versions if job in trained else ()

    def lengths(job):
        return [trained[job].layout.values] if job in trained else ()

    def sized(length):
        return lambda value, _: isinstance(value, bytes) and len(value) == length

    def equal(wanted):
        return lambda value, _: value == wanted

    def within(names):
        return lambda value, _: value in names

    def ref(of):
        """A predicate: the attempt that a message names took place."""

        def known(_, message):
            at = of(message)
            return at.job in trained and (at.round, at.attempt) in trained[at.job].attempts

        return known

    def reported(value, message):
        job = trained.get(message.ready.job)
        wanted = None if job is None else job.epsilon(message.ready.round)
        return wanted is not None and math.isclose(value, wanted, rel_tol=1e-9)

    fields = {path: sized(length) for path, length in SIZES.items()}
    fields |= {
        "Session.hello.protocol_version": equal(PROTOCOL_VERSION),
        "Session.hello.software_version": equal(__version__),
        "Session.hello.admits": equal(f"*-{run.name}"),
        "Session.hello.ledger.id": equal(ledger),
        "Session.hello.ledger.sequence": lambda value, _: 1 <= value <= sequence,
        "Session.decline.job": within(declined),
        "Session.decline.round": equal(1),
        "Session.decline.reason": lambda value, message: value == declined.get(message.decline.job, nothing)[1],
        "Session.decline.detail": lambda value, message: value == declined.get(message.decline.job, nothing)[2],
        "Session.ready.job": within(trained),
        "Session.ready.round": lambda value, _: 1 <= value <= ROUNDS,
        "Session.ready.version": lambda value, message: value in versions(message.ready.job),
        "Session.ready.privacy.epsilon": reported,
        "Session.ready.privacy.delta": equal(DELTA),
        "Session.ready.ledger.id": equal(ledger),
        "Session.ready.ledger.sequence": lambda value, _: 1 <= value <= sequence,
        "Session.advertisement.member": equal(MEMBER),
        "Session.advertisement.certificate": equal(identity.certificate),
        "Session.dealing.dealer": equal(MEMBER),
        "Session.dealing.shares.receiver": within(everybody),
        "Session.confirmation.member": equal(MEMBER),
        "Session.unmasking.member": equal(MEMBER),
        # No shares of masking keys are sent, because nobody dropped out.
        "Session.unmasking.seed_shares.dealer": within(everybody),
        "FetchBlob.digest": within(blobs),
        "UploadMasked.header.input.member": equal(MEMBER),
        "UploadMasked.header.input.length": lambda value, message: value in lengths(message.header.ref.job),
        "UploadMasked.data": lambda value, _: 1 <= len(value) <= CHUNK,
    }
    fields |= of_the_log(run, identity)
    for kind in ("advertisement", "dealing", "confirmation", "unmasking"):
        for part in ("job", "round", "attempt"):
            fields[f"Session.{kind}.ref.{part}"] = ref(lambda message, kind=kind: getattr(message, kind).ref)
    for part in ("job", "round", "attempt"):
        fields[f"UploadMasked.header.ref.{part}"] = ref(lambda message: message.header.ref)
    return fields


def of_the_log(run, identity):
    """The predicates of what a member says about the roster log. None of it depends on data."""
    with closing(RosterBook(book_path(run.folder, identity.federation), identity.authorities.history)) as book:
        size = book.size

    def signed(_, message):
        """Whether this member signed a head of its log lately."""
        try:
            cosignature = cosignature_from_pb(message.cosignature)
            whose = cosignature.check(identity.trust)
        except HeadInvalid:
            return False
        recent = abs(time.time() * 1000 - cosignature.at_ms) < 3_600_000
        return whose == MEMBER and cosignature.signer == identity.certificate and cosignature.size <= size and recent

    fields: dict[str, Any] = {
        f"Cosign.cosignature.{part}": signed for part in ("signer", "size", "root", "at_ms", "signature")
    }
    if LOG in run.sent.methods:
        # How far the log has come that it is shown. It asks only for entries that it lacks.
        fields["FetchLog.size"] = lambda value, _: 1 <= value <= size
    return fields


def faults(run):
    """Everything in a run that the lists do not allow."""
    found = not_allowed(run.sent, allowed(run), METADATA)
    for at, (header, data) in run.uploads().items():
        if len(data) != run.jobs[at[0]].vector_bytes:
            found.append(f"UploadMasked.data: {len(data)} bytes in all")
        if hashlib.sha256(data).digest() != header.input.digest:
            found.append("UploadMasked.data: not of the signed digest")
    return found


RUNS = ("first", "other")


@pytest.fixture(params=RUNS)
def run(request):
    return request.getfixturevalue(request.param)


def test_every_field_sent_is_on_the_allow_list(run):
    assert faults(run) == []
    expected = ("Session", "FetchBlob", "UploadMasked", "Cosign")
    assert run.sent.methods - {LOG} == {f"FederationService/{method}" for method in expected}
    # Every entry of the list is needed.
    seen = {path for each in run.sent.messages for path, _ in leaves_of(each)}
    assert seen == set(allowed(run))


def leaves_of(recorded):
    (message,) = Sent(messages=(recorded,)).parsed(recorded.method)
    return leaves(message, recorded.method)


def test_no_message_is_sent_more_often_than_its_round_needs(run):
    said = [message.WhichOneof("message") for message in run.sent.parsed("FederationService/Session")]
    trained = {name: job for name, job in run.jobs.items() if job.attempts}
    assert set(trained) == {f"{kind}-{run.name}" for kind in KINDS}
    attempts = sum(len(job.attempts) for job in trained.values())
    assert attempts == ROUNDS * len(KINDS)
    counts = {kind: said.count(kind) for kind in set(said)}
    phases = dict.fromkeys(("ready", "advertisement", "dealing", "confirmation", "unmasking"), attempts)
    assert counts == {"hello": 1, "decline": len(DECLINED), **phases}
    # An upload that does not break asks nothing about itself.
    assert len(run.uploads()) == attempts
    assert run.sent.parsed("FederationService/MaskedUploadStatus") == []
    for dealing in (message.dealing for message in run.sent.parsed("FederationService/Session")):
        # The dealer's own pair of shares does not leave its machine.
        assert [share.receiver for share in dealing.shares if not share.sealed_key] == [MEMBER] * bool(dealing.shares)
    # Each upload call holds a header, then the data.
    parts = [part.WhichOneof("part") for part in run.sent.parsed("FederationService/UploadMasked")]
    sizes = [run.jobs[name].vector_bytes for name, _, _ in run.uploads()]
    assert parts == [part for size in sizes for part in ("header", *["data"] * math.ceil(size / CHUNK))]
    assert len(sizes) == attempts
    assert max(sizes) > CHUNK > min(sizes)


def test_receipts_say_what_was_sent(run):
    for (name, of_round, attempt), (header, data) in run.uploads().items():
        for kind in (".sent.json", ".json"):
            path = run.folder / "receipts" / name / f"{of_round}.{attempt}{kind}"
            receipt = json.loads(path.read_bytes())
            assert bytes.fromhex(receipt["vector"]) == header.input.digest == hashlib.sha256(data).digest()
            assert (receipt["vector_bytes"], receipt["bits"]) == (len(data), run.jobs[name].layout.bits)
            assert (receipt["cohort_size"], receipt["sparse_graph"]) == (1 + len(OTHERS), None)


def test_masked_and_plain_vectors_agree_only_by_chance(run):
    encoded, uploads = run.encoded(), run.uploads()
    assert set(encoded) == set(uploads)
    masked = {at: unpacked(data, run.jobs[at[0]].layout) for at, (_, data) in uploads.items()}
    for at, vector in encoded.items():
        layout = run.jobs[at[0]].layout
        assert len(masked[at]) == len(vector)
        # Masked values equal the plain values at the same place no more often than by chance.
        assert np.count_nonzero(masked[at] == vector) <= by_chance(layout)
    for one, another in zip(list(encoded)[::2], list(encoded)[1::2], strict=True):
        assert one[0] == another[0]
        # A mask used for two vectors would cancel in their difference.
        layout = run.jobs[one[0]].layout
        ring = np.uint32(2**layout.bits - 1)
        apart = (masked[one] - masked[another]) & ring
        assert np.count_nonzero(apart == (encoded[one] - encoded[another]) & ring) <= by_chance(layout)


def unpacked(data, layout):
    vector = np.empty(layout.values, dtype="<u4")
    unpack_into(vector, data, layout.bits)
    return vector


def by_chance(layout):
    """A bound on equal values: by chance, more agree with a probability below 1e-9. Without a mask, all agree."""
    mean = layout.values / 2**layout.bits
    return mean + 8 * math.sqrt(mean) + 4


def test_message_sizes_do_not_depend_on_the_data(first, other):
    """The runs must hold no reconnection and no resumed upload, which repeat messages and depend on the network."""
    assert {tuple(text for text, _ in plan.rows()) for plan in PLANS.values()} == {
        tuple(example.text for example in read_examples(run.data)) for run in (first, other)
    }
    assert first.data.stat().st_size != other.data.stat().st_size
    # The first process of the two fetches the roster log, and signs its head. The member's home keeps the log.
    assert [LOG in each.sent.methods for each in (first, other)].count(True) == 1
    of_log = {LOG, LOG.replace("FetchLog", "Cosign")}
    shapes = [[each for each in run.sent.shape() if each[0] not in of_log] for run in (first, other)]
    assert shapes[0] == shapes[1]
    methods = [[call.method for call in run.sent.calls if call.method not in of_log] for run in (first, other)]
    assert methods[0] == methods[1]
    # Only the sizes are equal. The contents differ.
    assert not {each.data for each in first.sent.messages if len(each.data) > 1000} & {
        each.data for each in other.sent.messages if len(each.data) > 1000
    }


def test_enrolment_sends_the_token_and_a_public_key(listening):
    sent, token = listening.enrolment, listening.token
    identity = MemberIdentity.load(listening.home)

    def request(value, _):
        asked = x509.load_der_x509_csr(value)
        public = identity.key.public_key()
        return (
            asked.public_key() == public
            and asked.is_signature_valid
            and asked.subject.rfc4514_string() == f"CN={MEMBER}"
            and not list(asked.extensions)
            and not list(asked.attributes)
        )

    fields = {
        "Enrol.token_id": lambda value, _: value == token.id,
        "Enrol.secret": lambda value, _: value == token.secret,
        "Enrol.certificate_request": request,
        "Enrol.software_version": lambda value, _: value == __version__,
    }
    assert not_allowed(sent, fields, METADATA) == []
    assert [each.method for each in sent.messages] == ["EnrolmentService/Enrol"]
    canaries = Canaries()
    plant_key(canaries, listening.home)
    assert canaries.found(sent, ()) == []


def test_doctor_and_dry_run_send_only_digests(first, asked, listening):
    # OpenJobs also asks for closed jobs, which is the same for every member.
    fields = {"FetchBlob.digest": lambda value, _: len(value) == 32, "OpenJobs.all": lambda value, _: value is True}
    assert not_allowed(asked, fields, METADATA) == []
    assert asked.methods == {
        f"FederationService/{method}" for method in ("MaskedUploadStatus", "OpenJobs", "FetchBlob")
    }
    assert planted(first).found(asked, RANDOM) == []


# ---- the canaries ---------------------------------------------------------------------------------------------------


def planted(run):
    """Everything that must not be found, in every form that the code or an honest mistake could give it."""
    canaries, source = Canaries(), random.Random(7)
    examples = read_examples(run.data)
    plant_texts(canaries, run, examples)
    plant_labels(canaries, examples)
    plant_training(canaries, run, source)
    plant_ledger(canaries, run, examples, source)
    plant_key(canaries, run.folder)
    policy = (run.folder / "policy.toml").read_text()
    for line in policy.splitlines():
        # A reason may contain a mechanism's name, so skip short lines.
        if len(line) >= 12:
            canaries.text("policy", line)
    for word in REMARK.split():
        canaries.text("policy", word)
    canaries.number("policy, epsilon", EPSILON)
    canaries.number("policy, epsilon_a_job", EPSILON_A_JOB)
    for path in (run.data, run.data.parent, run.folder):
        canaries.text("path", str(path))
    canaries.text("path", run.data.name)
    canaries.text("path", run.data.stem)
    canaries.text("name of the data", DATA_NAMES[run.name])
    return canaries


def plant_texts(canaries, run, examples):
    text = [example.text for example in examples]
    for number, each in enumerate(text):
        canaries.text(f"text {number}", each)
        # A model or a log might truncate a text.
        canaries.text(f"text {number}, its start", each[:16])
    for word in sorted({word for each in text for word in each.split() if len(word) >= 6}):
        canaries.text(f"word {word}", word)
    tokenizer = (run.data.parent / f"bundle-none-{run.name}" / "tokenizer.json").read_bytes()
    encoder = TextEncoder(tokenizer, 64, 2)
    for number, row in enumerate(encoder.encode(text)):
        ids = [int(each) for each in row if each != encoder.pad_id]
        for piece in (ids, *pieces(ids, 6)):
            if len(set(piece)) >= 3:
                canaries.integers(f"tokens of text {number}", piece)
    counts = np.bincount(np.concatenate([encoder.encode([each])[0] for each in text]))
    canaries.integers("counts of words", [int(each) for each in counts if each])


def plant_labels(canaries, examples):
    for label in LABELS:
        canaries.text(f"label {label}", label)
    ids = [int(each) for each in label_ids(examples, LABELS)]
    for piece in (ids, *pieces(ids, 16)):
        if len(set(piece)) >= 2:
            canaries.integers("labels", piece)
    names = [example.label for example in examples]
    for separator in (",", " ", "\n"):
        canaries.blob("labels, names", separator.join(names).encode())
    # The label distribution is three small numbers. No search can find those, and the allow-list has no field for them.


def plant_training(canaries, run, source):
    for path in sorted(run.records.glob("*.npy")):
        vector, layout = np.load(path), run.jobs[path.name.split(".")[0]].layout
        packed = bytes(pack_in_place(vector.copy(), layout.bits))
        canaries.windows(f"vector {path.stem}, packed", packed, source)
        for order in "<>":
            canaries.windows(f"vector {path.stem}", vector.astype(f"{order}u4").tobytes(), source, align=4)
        canaries.windows(f"vector {path.stem}, wide", vector.astype("<i8").tobytes(), source, length=24, align=8)
        signed = (vector << np.uint32(32 - layout.bits)).view("<i4") >> np.int32(32 - layout.bits)
        canaries.windows(f"vector {path.stem}, real", signed.astype("<f4").tobytes(), source, align=4)
    for path in sorted(run.records.glob("*.npz")):
        with np.load(path) as arrays:
            for name, array in arrays.items():
                if name in ("losses", "metrics"):
                    continue
                for kind, size in (("<f4", 4), (">f4", 4), ("<f8", 8), (">f8", 8)):
                    data = array.astype(kind).tobytes()
                    what = f"{path.stem}, {name}, {kind}"
                    canaries.windows(what, data, source, count=30, length=max(16, 2 * size), align=size)
            losses, metrics = arrays["losses"], arrays["metrics"]
        numbers = {"loss of a step": [float(each) for each in losses if np.isfinite(each)]}
        if len(metrics):
            loss_sum, correct, count = map(float, metrics)
            numbers |= {"loss sum": [loss_sum], "mean loss": [loss_sum / count], "accuracy": [correct / count]}
            # All metrics together, as they are encoded.
            for kind in ("<f4", "<f8", ">f4", ">f8"):
                canaries.blob(f"{path.stem}, metrics", metrics.astype(kind).tobytes())
        for what, values in numbers.items():
            for value in values:
                canaries.number(f"{path.stem}, {what}", value)


def plant_ledger(canaries, run, examples, source):
    key = (run.folder / "ledgers" / "marks.key").read_bytes()
    text = [example.text for example in examples]

    def digest(name, data):
        # Half of a digest would fit into a nonce, a quarter into a number.
        for length in (8, 16, len(data)):
            canaries.blob(name, data[:length])

    digest("key of the marks", key)
    for number, each in enumerate(text):
        mark = hmac.digest(key, each.encode(), "sha256")
        digest(f"text {number}, mark", mark)
        digest(f"text {number}, SHA-256", hashlib.sha256(each.encode()).digest())
        canaries.text(f"text {number}, mark", str(int.from_bytes(mark[:8], "big", signed=True)))
    marks = marks_of(key, text)
    digest("digest of the marks", digest_of_marks(marks.values))
    digest("digest of the file", data_digest(run.data))
    canaries.windows("the file", run.data.read_bytes(), source, count=200, length=12)
    federation = MemberIdentity.load(run.folder).federation.hex().encode()

    def kept(name, document):
        # Every certificate contains the federation's name.
        for part in document.split(federation):
            canaries.windows(name, part, source, count=20, length=24)

    for line, own in run.ledger:
        kept("ledger", line.encode())
        digest("ledger, digest of a record", own)
    for path in sorted((run.folder / "receipts").rglob("*.json")):
        kept("receipt", path.read_bytes())
        digest("receipt, digest", hashlib.sha256(path.read_bytes()).digest())
    for path in sorted((run.folder / "receipts").rglob("*.sig")):
        canaries.windows("receipt, signature", path.read_bytes(), source, count=10)


def plant_key(canaries, home):
    """Plants the parts of the private key that the public key does not contain."""
    pem = (home / "identity" / "key.pem").read_bytes()
    for line in pem.splitlines():
        if not line.startswith(b"-----"):
            canaries.blob("private key, PEM", line)
    key = serialization.load_pem_private_key(pem, password=None).private_numbers()
    for name in ("p", "q", "d", "dmp1", "dmq1", "iqmp"):
        value = getattr(key, name)
        data = value.to_bytes((value.bit_length() + 7) // 8, "big")
        canaries.blob(f"private key, {name}", data)
        canaries.windows(f"private key, {name}", data, random.Random(1), count=40)
        canaries.windows(f"private key, {name}, little-endian", data[::-1], random.Random(1), count=40)
        canaries.text(f"private key, {name}", str(value)[:40])


def test_nothing_sent_contains_a_canary(run):
    canaries = planted(run)
    assert len(canaries) > 20_000
    searched = sum(len(each.data) for each in run.sent.messages)
    assert searched > 1_500_000
    # Masked vectors, keys and signatures are random bytes. The chance that they contain a canary is about 1e-7.
    assert canaries.chance(searched) < 1e-6
    assert canaries.found(run.sent, RANDOM) == []


# ---- both searches can fail -----------------------------------------------------------------------------------------


def test_both_searches_find_a_member_that_leaks(first, leaky):
    by_list, canaries = faults(leaky), planted(leaky).found(leaky.sent, RANDOM)
    listed = {fault.partition(":")[0] for fault in by_list}

    def found(*starts):
        return all(any(name.startswith(start) for name in canaries) for start in starts)

    # A text in the detail of Decline.
    assert "Session.decline.detail" in listed
    assert found("text 0, utf-8")
    # One in hexadecimal in a metadata key.
    assert "metadata note" in listed
    assert found("text 1, utf-8, hex")
    # One enciphered in an unknown field: only the list finds it.
    assert "Session.ready" in listed
    assert not any(name.startswith("text 2,") for name in canaries)
    # The loss in a field that is allowed in other jobs, but not in this one.
    assert "Session.ready.privacy.epsilon" in listed
    assert found("none-leak.1, loss of a step")
    # Sixteen bytes of a text in a field of sixteen random bytes: only the canaries find it.
    assert "Session.hello.process" not in listed
    assert found("text 3, its start, utf-8")
    # The vector without its mask.
    assert "UploadMasked.data: not of the signed digest" in by_list
    assert found("vector none-leak.1.1")
    # An observer of message sizes sees the unknown field too.
    ready = [{size for _, kind, size in run.sent.shape() if kind == "ready"} for run in (first, leaky)]
    assert min(ready[1]) > max(ready[0])
    assert set(leaky.encoded()) == set(leaky.uploads())
    for at, vector in leaky.encoded().items():
        assert np.array_equal(unpacked(leaky.uploads()[at][1], leaky.jobs[at[0]].layout), vector)


def changed(message, path):
    """The message with another value of the same type in the field at `path`, which begins with the method."""
    names = path.split(".")[1:]
    at = message
    for name in names[:-1]:
        at = getattr(at, name)
        at = at[0] if hasattr(at, "add") else at
    value = getattr(at, names[-1])
    if isinstance(value, bytes | str):
        setattr(at, names[-1], value + (b"x" if isinstance(value, bytes) else "x"))
    elif isinstance(value, int | float):
        setattr(at, names[-1], value * 1.01 if isinstance(value, float) else value + 1000)
    else:
        value[0] = value[0] + ("x" if isinstance(value[0], str) else 1000)
    return message


def test_the_allow_list_refuses_a_changed_value_in_any_field(first):
    """Changes each field of each kind of message on its own."""
    fields, tried = allowed(first), set()
    for each in first.sent.messages:
        for path, _ in leaves_of(each):
            # A vector's chunks may have any size; `faults` checks their sum.
            if path in tried or path == "UploadMasked.data":
                continue
            tried.add(path)
            (message,) = Sent(messages=(each,)).parsed(each.method)
            altered = Recorded(each.call, each.method, changed(message, path).SerializeToString())
            found = not_allowed(Sent(messages=(altered,)), fields, METADATA)
            assert any(fault.startswith(f"{path}: not what it may be") for fault in found), path
    assert tried == set(fields) - {"UploadMasked.data"}


def test_the_allow_list_refuses_unknown_and_repeated_fields(first):
    fields = allowed(first)

    def refused(*messages, calls=()):
        return not_allowed(Sent(tuple(calls), messages), fields, METADATA)

    unknown, kinds = b"\x9a\x06\x03abc", set()
    for each in first.sent.messages:
        (message,) = Sent(messages=(each,)).parsed(each.method)
        kind = message.ListFields()[0][0].name
        if (each.method, kind) in kinds:
            continue
        kinds.add((each.method, kind))
        assert refused(each) == []
        # An unknown field, at the top and inside.
        assert refused(Recorded(each.call, each.method, each.data + unknown))
        inside = getattr(message, kind)
        if hasattr(inside, "MergeFromString"):
            inside.MergeFromString(unknown)
            assert refused(Recorded(each.call, each.method, message.SerializeToString()))
        # The same message twice, which a parser would merge without notice.
        assert refused(Recorded(each.call, each.method, each.data + each.data))
        # Sent as a request of another method.
        assert refused(Recorded(each.call, "EnrolmentService/Enrol", each.data))
    # A member asks how much of its vector has arrived only after a break.
    assert len(kinds) == 12
    (agent,) = {call.metadata for call in first.sent.calls}
    assert refused(calls=[Call(0, "FederationService/Session", agent)]) == []
    for key, value in ((b"user-agent", b"the first text"), (b"tacit-note", b"x")):
        assert refused(calls=[Call(0, "FederationService/Session", ((key.decode(), value),))])
    assert refused(calls=[Call(0, "OtherService/Report", ())])
    assert refused(Recorded(0, "FederationService/Session", b"\xff\xff\xff"))
    # Fields that the contract has and that these runs do not use.
    for left_out in (
        "refusal { detail: 'x' }",
        "unmasking { root_shares { share: 'x' } }",
    ):
        message = text_format.Parse(left_out, pb.MemberMessage())
        assert refused(Recorded(0, "FederationService/Session", message.SerializeToString()))


@pytest.mark.parametrize(
    "written",
    [
        lambda text: text.encode(),
        lambda text: text.encode("utf-16"),
        lambda text: text.encode("utf-16-be"),
        lambda text: text.encode("utf-32"),
        lambda text: text.upper().encode(),
        lambda text: text[::-1].encode(),
        lambda text: json.dumps(f"é{text}").encode(),
        lambda text: repr(text).encode("utf-16-le"),
        lambda text: text.encode().hex().encode(),
        lambda text: text.encode().hex().upper().encode(),
        lambda text: "".join(f"%{byte:02X}" for byte in text.encode()).encode(),
        lambda text: "".join(f"\\u{ord(letter):04x}" for letter in text).encode(),
        *(
            lambda text, more=more, how=how: getattr(base64, how)(b"z" * more + text.encode() + b"zz")
            for more in range(3)
            for how in ("b64encode", "urlsafe_b64encode")
        ),
        lambda text: base64.b32encode(b"zzzzz" + text.encode()),
    ],
)
@pytest.mark.parametrize("text", ["grelqu", "brenxovamb ztalqi?>", "Fjørhölt漢字試験"])
def test_the_search_finds_a_text_in_every_encoding(written, text):
    canaries = Canaries()
    canaries.text("it", text)
    noise = random.Random(3).randbytes(100_000)
    assert canaries.within(noise) == []
    assert canaries.within(noise[:70_001] + written(text) + noise[70_001:])


def test_the_search_finds_numbers_in_every_encoding():
    canaries, ids = Canaries(), [3, 1, 3977, 12, 300, 70]
    canaries.integers("ids", ids)
    canaries.number("loss", 1.0986122886681098)
    noise = random.Random(4).randbytes(100_000)
    assert canaries.within(noise) == []
    written = [
        *(np.array(ids, dtype=kind).tobytes() for kind in ("<i8", ">i8", "<i4", ">i4", "<i2", ">i2")),
        descriptor_pb2.SourceCodeInfo.Location(path=ids).SerializeToString(),
        json.dumps(ids).encode(),
        str(np.array(ids).tolist()).encode(),
        b"%f" % 1.0986122886681098,
        b"%.8g" % 1.0986122886681098,
        np.float64(1.0986122886681098).tobytes(),
        pb.PrivacyReport(epsilon=1.0986122886681098).SerializeToString(),
        pb.PrivacyReport(epsilon=1.0986).SerializeToString(),
    ]
    for each in written:
        assert canaries.within(noise[:51] + each + noise[51:]), each


def test_the_search_finds_split_and_short_values():
    text = "brenxovamb ztalqi"
    canaries = Canaries()
    canaries.text("it", text)
    canaries.number("loss", 1.0986122886681098)
    method = "FederationService/UploadMasked"
    halves = [pb.MaskedUpload(data=part).SerializeToString() for part in (text[:5].encode(), text[5:].encode())]
    between = Recorded(1, "FederationService/FetchBlob", b"")
    sent = Sent(messages=(Recorded(0, method, halves[0]), between, Recorded(0, method, halves[1])))
    assert "it, utf-8" in canaries.found(sent, RANDOM)
    four = np.float32(1.0986122886681098).tobytes()
    header = pb.MaskedUploadHeader(input=pb.MaskedInput(digest=four))
    hidden = Recorded(0, method, pb.MaskedUpload(header=header).SerializeToString())
    assert canaries.found(Sent(messages=(hidden,)), ()) == ["loss, <f4"]
    assert canaries.found(Sent(messages=(hidden,)), RANDOM) == []
    told = Sent((Call(0, method, (("note", four),)),), ())
    assert canaries.found(told, RANDOM) == ["loss, <f4"]


def test_a_public_fraction_may_contain_the_digits_of_a_rounded_number():
    canaries = Canaries()
    canaries.number("loss", 1.00962)

    def found(epsilon):
        ready = pb.Ready(privacy=pb.PrivacyReport(epsilon=epsilon))
        data = pb.MemberMessage(ready=ready).SerializeToString()
        return canaries.found(Sent(messages=(Recorded(0, "FederationService/Session", data),)), RANDOM)

    assert found(1.0096937364328469) == []
    assert found(1.0096) == ["loss, rounded, <f8"]
