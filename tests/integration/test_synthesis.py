"""Private synthetic text with real processes: examples/synthesis.toml, from the job to a classifier that predicts.

Mutual TLS, secure aggregation, a ledger for each of four members, dp-sgd, a start from public text and FedAdam. Aster
reads its corpus and approves it, birch's policy approves without asking, cedar vetoes, and dill spends its budget in
the middle of the job. What aster sends is recorded.
"""

import base64
import hashlib
import json
import re
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from coordinator.config import CoordinatorFolder
from coordinator.services.credentials import federation_credentials
from edge_client.identity.home import MemberIdentity
from tacit.corpus import CorpusStatement
from tacit.job import JobSpec
from tacit.v1 import operator_pb2 as pb
from tacit.v1.federation_pb2 import CorpusRef
from tests.support.processes import EXAMPLES, ROOT, Federation, Process, behind, command, succeed  # type: ignore[attr-defined]
from tests.support.recorder import Canaries, Recorded, Relay, Sent, not_allowed
from toolkit.console import ExitCode

# The first test sets up everything, with five processes.
pytestmark = pytest.mark.timeout(600)

EXAMPLE = ROOT / "examples" / "synthesis.toml"
JOB, TEXTS, ROWS, ROUNDS = "synthesis", 120, 270, 4
POLICY = "schema = 1\nepsilon = {epsilon}\ndelta = 1e-5\ncorpora = {corpora}\n"
# With 270 messages, the gate counts epsilon 2.43 for two rounds of the example and 2.95 for three (delta 1e-5). A count
# of labels is another kind of event: after two rounds it needs 3.32.
MEMBERS = {"aster": (8.0, "ask"), "birch": (8.0, "always"), "cedar": (8.0, "ask"), "dill": (2.7, "always")}


@dataclass(frozen=True)
class Story:
    """What happened during the job.

    Args:
        waiting: aster's corpus before aster decided, and the operator's list at that moment.
        sent: what aster sent.
        listed: the operator's list at the end.
        given: the folder of the downloaded corpora.
        classifier: the folder of the classifier's bundle.
    """

    federation: Federation
    running: dict[str, Process]
    detail: pb.JobDetail
    waiting: dict
    sent: object
    listed: dict
    given: Path
    provenance: dict
    classifier: Path


def corpus(federation, member, *words):
    return json.loads(succeed("edge_client", "corpus", *words, "--home", federation.home(member), "--json"))


def corpora(federation, *more):
    return json.loads(federation.operator("job", "corpora", JOB, "--json", *more))


def finetuned(federation, folder, name, *more):
    words = [
        "--test",
        str(EXAMPLES / "test.jsonl"),
        "--out",
        str(folder / name),
        "--epochs",
        "8",
        "--hidden",
        "32",
        *more,
    ]
    return json.loads(federation.operator("finetune", JOB, "--json", *words))


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synthesis")
    with ExitStack() as stack:
        federation = Federation(folder)
        stack.callback(federation.close)
        lines = (EXAMPLES / "train.jsonl").read_text().splitlines(keepends=True)
        for number, (name, (epsilon, consent)) in enumerate(MEMBERS.items()):
            federation.enrol(name, policy=POLICY.format(epsilon=epsilon, corpora=json.dumps(consent)))
            federation.data(name).write_text("".join(lines[ROWS * number : ROWS * (number + 1)]))
        home = MemberIdentity.load(federation.home("aster"))
        towards = grpc.ssl_channel_credentials(home.root_pem, home.key_pem, home.certificate_pem)
        relay = Relay(
            federation_credentials(CoordinatorFolder(federation.dir)), f"localhost:{federation.port}", towards
        )
        stack.callback(relay.close)
        behind(relay, federation.home("aster"))
        running = {name: federation.start(name) for name in MEMBERS}
        for name in MEMBERS:
            running[name].wait_for("connected")
        # All four are connected, so the first round waits for all of them.
        federation.create(EXAMPLE)
        detail = federation.finished(JOB)
        for name in MEMBERS:
            running[name].wait_for("corpus_made")
        # Aster and cedar must decide. Birch and dill send their corpora without asking.
        running["aster"].wait_for("corpus_waits")
        running["cedar"].wait_for("corpus_waits")
        for name in ("birch", "dill"):
            running[name].wait_for("corpus_sent")
        waiting = {**corpus(federation, "aster", "show", JOB, "--rows", "200"), "listed": corpora(federation)}
        corpus(federation, "aster", "approve", JOB)
        corpus(federation, "cedar", "veto", JOB)
        running["aster"].wait_for("corpus_sent")
        running["cedar"].wait_for("corpus_declined")
        sent = relay.take()
        given = folder / "given"
        listed = corpora(federation, "--out", str(given))
        provenance = finetuned(federation, folder, "classifier")
        yield Story(federation, running, detail, waiting, sent, listed, given, provenance, folder / "classifier")


def test_dill_stops_at_its_budget_and_the_others_train_to_the_end(story):
    survivors = [sorted(each.survivors) for round_ in story.detail.rounds for each in round_.attempts if each.survivors]
    assert len(survivors) == ROUNDS
    # Its budget allows two rounds and no more, and no count of its labels.
    assert sum("dill" in each for each in survivors) == 2
    assert "dill" not in survivors[-1]
    assert all({"aster", "birch", "cedar"} <= set(each) for each in survivors)


def test_a_corpus_leaves_only_with_the_members_consent(story):
    texts = story.waiting["texts"]
    assert 60 < len(texts) <= TEXTS
    assert "differentially private" in story.waiting["promise"]
    # While aster read, the operator already had the corpora of the two members whose policies say always.
    answers = {each["member"]: each["answer"] for each in story.waiting["listed"]["members"]}
    assert answers == {"aster": "awaited", "birch": "given", "cedar": "awaited", "dill": "given"}


def test_the_operator_gets_three_corpora_and_cedars_veto(story):
    answers = {each["member"]: each["answer"] for each in story.listed["members"]}
    assert answers == {"aster": "given", "birch": "given", "cedar": "declined", "dill": "given"}
    assert not (story.given / "cedar.jsonl").exists()
    assert not list((story.federation.home("cedar") / "corpora" / JOB).glob("*.jsonl"))
    for name in ("aster", "birch", "dill"):
        rows = [json.loads(line) for line in (story.given / f"{name}.jsonl").read_text().splitlines()]
        said = CorpusStatement.from_json((story.given / f"{name}.statement.json").read_bytes(), what=name)
        assert said.rows == len(rows) > 60
        labels = "even" if name == "dill" else "noised"
        assert (said.member, said.promise, said.histogram) == (name, "differentially-private", labels)
        # Dill's corpus comes from the model of its own last round, before the job's last.
        assert (said.round < ROUNDS) if name == "dill" else (said.round == ROUNDS)
    assert [json.loads(line) for line in (story.given / "aster.jsonl").read_text().splitlines()] == story.waiting[
        "texts"
    ]


def test_synthetic_texts_use_public_words_and_repeat_no_message(story):
    known = set((EXAMPLES / "words.txt").read_text().split())
    private = {json.loads(line)["text"].lower() for line in (EXAMPLES / "train.jsonl").open()}
    for path in story.given.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            text = json.loads(line)["text"]
            assert text.lower() not in private
            words = re.findall("[a-z0-9]+", text)
            assert all(word in known or word in ("s", "t", "re", "ve", "ll", "d", "m") for word in words), text


def test_aster_sends_its_corpus_exactly_once(story):
    parts = story.sent.parsed("FederationService/UploadCorpus")
    sent = b"".join(part.data for part in parts if part.WhichOneof("part") == "data")
    assert sent == (story.given / "aster.jsonl").read_bytes()


def test_a_corpus_travels_with_its_statement_and_nothing_else(story):
    """By allow-list, as in `test_what_leaves` for all other calls."""
    file = (story.given / "aster.jsonl").read_bytes()
    statement = (story.given / "aster.statement.json").read_bytes()
    rows = [json.loads(line) for line in file.splitlines()]
    # The statement's label counts describe the file, where anybody can count them, and not the data.
    said = CorpusStatement.from_json(statement, what="aster's statement")
    assert {each.label: each.rows for each in said.labels if each.rows} == Counter(row["label"] for row in rows)
    assert all(row.keys() == {"text", "label"} for row in rows)
    ref = {
        "job": lambda value, _: value == JOB,
        "digest": lambda value, _: value == hashlib.sha256(file).digest(),
        "size": lambda value, _: value == len(file),
    }
    # Aster declined nothing, so that field is not on the list.
    fields = {f"CorpusStatus.{name}": predicate for name, predicate in ref.items()}
    fields |= {f"UploadCorpus.header.ref.{name}": predicate for name, predicate in ref.items()}
    fields |= {
        "UploadCorpus.header.offset": lambda value, _: 0 < value < len(file),
        "UploadCorpus.header.statement": lambda value, _: value == statement,
        "UploadCorpus.header.signature": lambda value, _: len(value) == 384,
        "UploadCorpus.data": lambda value, _: value in file,
    }
    methods = {"FederationService/CorpusStatus", "FederationService/UploadCorpus"}
    messages = tuple(each for each in story.sent.messages if each.method in methods)
    assert {each.method for each in messages} == methods
    assert not_allowed(Sent(messages=messages), fields, {}) == []
    # The list does refuse: here, an additional field.
    more = first_question(messages)
    more.declined = True
    leak = Recorded(0, "FederationService/CorpusStatus", more.SerializeToString(deterministic=True))
    assert not_allowed(Sent(messages=(leak,)), fields, {}) == ["CorpusStatus.declined: not on the list: True"]


def first_question(messages):
    """The first CorpusStatus request, decoded."""
    first = next(each for each in messages if each.method == "FederationService/CorpusStatus")
    return CorpusRef.FromString(first.data)


def test_nothing_aster_sends_contains_one_of_its_messages(story):
    canaries = Canaries()
    for line in story.federation.data("aster").read_text().splitlines():
        canaries.text("a message of aster's", json.loads(line)["text"])
    assert len(canaries) > ROWS
    assert canaries.within(story.sent.everything()) == []
    text = json.loads(story.federation.data("aster").read_text().splitlines()[7])["text"]
    leak = base64.b64encode(text.encode())
    assert canaries.within(story.sent.everything() + leak) == ["a message of aster's, utf-8, base64 at 0"]


def test_each_ledger_charges_its_rounds_and_one_histogram(story):
    for name in MEMBERS:
        home = story.federation.home(name)
        verified = command("edge_client", "ledger", "verify", "--home", home, "--json")
        assert verified.returncode == 0, verified.stdout + verified.stderr
        assert json.loads(verified.stdout)["problems"] == []
        (shown,) = json.loads(succeed("edge_client", "ledger", "show", "--home", home, "--json"))["jobs"]
        # One release for each round that the member was in, and one for the noised count of its labels.
        assert shown["releases"] == (2 if name == "dill" else ROUNDS + 1)


def test_a_classifier_trained_on_the_corpora_predicts(story):
    said = story.provenance
    assert {each["member"] for each in said["corpora"]} == {"aster", "birch", "dill"}
    assert said["promise"] == "differentially-private"
    assert 0 < said["test"]["scores"]["accuracy"] <= 1
    # A member can run this bundle like any other.
    answer = succeed("edge_client", "predict", "--bundle", story.classifier, "where is my invoice", "--json")
    assert json.loads(answer.splitlines()[0])["label"] in JobSpec.from_toml(EXAMPLE).labels


def test_the_operator_samples_texts_from_the_published_model(story, tmp_path):
    made = json.loads(story.federation.operator("sample", JOB, "--out", tmp_path / "own", "--texts", "60", "--json"))
    assert made["promise"] == "differentially-private"
    assert 40 < made["rows"] <= 60
    said = finetuned(story.federation, tmp_path, "classifier", "--corpora", str(tmp_path / "own"))
    assert [each["member"] for each in said["corpora"]] == ["operator"]
    # The operator signed its statement, and finetune verified the signature.
    assert (said["promise"], len(said["federation"])) == ("differentially-private", 64)
    assert said["federation"] == story.provenance["federation"]
    assert (tmp_path / "own" / "operator.statement.sig").stat().st_size == 384


def test_listing_the_corpora_of_an_unknown_job_fails(story):
    done = command("coordinator", "job", "corpora", "nobody", "--dir", story.federation.dir)
    assert done.returncode == ExitCode.NOT_FOUND
    assert "nobody" in done.stderr
