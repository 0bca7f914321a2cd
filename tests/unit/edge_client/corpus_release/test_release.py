"""A corpus from the last charge to the coordinator's receipt: paid for, made once, approved, sent or deleted."""

import hashlib
import json
import shutil
import stat
from collections import Counter

import pytest
import torch
from structlog.testing import capture_logs
from typer.testing import CliRunner

from edge_client.cli import app
from edge_client.corpus_release.folder import CorpusUnusable
from edge_client.corpus_release.releaser import Releaser
from edge_client.corpus_release.sending import CORPUS_CHUNK
from edge_client.ledger.ledger import ledger_path
from edge_client.ledger.points import CORPUS_POINTS
from edge_client.ledger.receipt_book import ReceiptBook
from edge_client.ledger.receipts import CorpusReceipt, receipt_from
from edge_client.ledger.verification import export_lines, verify, verify_export
from edge_client.policy.policy import Policy
from learning.synthesis import ordered, sampling
from learning.synthesis.setting import NO_GUARANTEE
from tacit.reason import Reason
from tacit.v1 import federation_pb2 as pb
from tests.support import party
from tests.support.release_place import Killed, Place
from tests.support.toy_jobs import DP_SGD
from tests.support.toy_texts import LABELS, Seeded
from toolkit.console import CommandFailed
from toolkit.durable import FILE_STEPS

torch.set_num_threads(1)

ORDERED = {"mechanism": DP_SGD | {"noise_multiplier": 3.0}, "corpus": {"texts": 40, "histogram_std": 6.0}}


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return party.member(tmp_path_factory.mktemp("north") / "home", "localhost:7441")


@pytest.fixture
def place(tmp_path, identity):
    def make(**changes):
        return Place(tmp_path, identity, **(changes or ORDERED))

    return make


def command(place, *arguments):
    return CliRunner().invoke(app, ["corpus", *arguments, "--home", str(place.home)])


def code(done):
    """The exit code that the process would have."""
    return int(done.exception.code) if isinstance(done.exception, CommandFailed) else done.exit_code


def receipts(place):
    """The receipts of corpora, oldest first."""
    found = [receipt_from(path.read_bytes()) for path in ReceiptBook(place.home / "receipts").files()]
    # If two have the same millisecond, sending comes before the outcome.
    return sorted(
        (each for each in found if isinstance(each, CorpusReceipt)),
        key=lambda each: (each.at_ms, each.outcome != "sending"),
    )


# ---- one corpus from start to end --------------------------------------------------------------------------------


def test_a_corpus_waits_for_its_owner_and_is_released_as_read(place):
    here = place()
    with capture_logs() as logs:
        here.life(rounds=2)
    (waits,) = [line for line in logs if line["event"] == "corpus_waits"]
    assert "edge_client corpus approve stories" in waits["do"]
    assert here.desk.file is None
    assert here.desk.asked == ["wanted"]
    read = here.folder.file.read_bytes()
    assert stat.S_IMODE(here.folder.file.stat().st_mode) == 0o600
    rows = [json.loads(line) for line in read.splitlines()]
    assert rows
    assert {row["label"] for row in rows} <= set(LABELS)

    here.decide("approve")
    here.life()
    assert here.desk.file == read
    assert here.folder.state().stage == "received"
    # The model is deleted.
    assert not (here.home / "synthesis" / "stories").exists()
    here.life()
    assert here.desk.asked == ["wanted", "file"]


def test_the_statement_says_what_protects_the_texts(place):
    here = place()
    here.life(rounds=2)
    statement = here.folder.statement(here.folder.state())
    assert statement.round == 2
    assert statement.version == here.bundle.document.weights
    assert (statement.mechanism, statement.promise, statement.histogram) == (
        "dp-sgd",
        "differentially-private",
        "noised",
    )
    assert sum(each.rows for each in statement.labels) == statement.rows
    assert statement.corpus == hashlib.sha256(here.folder.file.read_bytes()).digest()


def test_words_are_drawn_as_the_job_orders(place, monkeypatch):
    here = place(corpus={"texts": 8, "temperature": 0.5, "top_k": 9, "guidance": 2.5})
    drawn, sample = [], sampling.sample

    def watched(*arguments):
        drawn.append(arguments[5])
        return sample(*arguments)

    monkeypatch.setattr(ordered, "sample", watched)
    with capture_logs() as logs:
        here.life(rounds=1)
    # Progress comes before every word, but is logged once, since 8 texts are generated at a time.
    assert [(line["made"], line["of"]) for line in logs if line["event"] == "corpus_texts"] == [(8, 8)]
    assert drawn == [sampling.Sampling(temperature=0.5, top_k=9, guidance=2.5, max_tokens=10)]


@pytest.mark.parametrize("variant", ["sound", "published"])
def test_without_noise_the_statement_and_the_screen_promise_nothing(place, variant):
    here = place(model={"variant": variant}, training={"learning_rate": 0.05, "epochs": 3, "batch": 16})
    here.life(rounds=1)
    statement = here.folder.statement(here.folder.state())
    assert (statement.promise, statement.histogram, statement.variant) == ("none", "even", variant)
    shown = command(here, "show", "stories")
    assert NO_GUARANTEE in shown.output
    here.decide("approve")
    here.life()
    assert here.desk.file is not None


def test_always_releases_unasked_and_never_tells_the_coordinator_so(place):
    here = place()
    here.policy = Policy(corpora="always")
    here.life(rounds=1)
    assert here.desk.file is not None

    other = Place(here.home / "other", here.identity, **ORDERED)
    other.life(rounds=1)
    # The owner read the texts and changed the policy.
    other.policy = Policy(corpora="never")
    other.life()
    assert other.desk.file is None
    assert other.desk.declined == 1
    assert other.folder.state().stage == "vetoed"
    assert not other.folder.file.exists()


def test_a_policy_tightened_after_the_training_withholds_the_corpus(place):
    here = place()
    with here.process() as (budget, releaser):
        here.round(budget, releaser)
    here.policy = Policy(max_corpus_texts=39)
    here.life()
    state = here.folder.state()
    assert (state.stage, state.told, state.made) == ("withheld", True, None)
    assert "max_corpus_texts" in state.detail
    assert here.desk.declined == 1
    assert here.histograms() == 0


def test_a_veto_deletes_the_texts_and_is_told_once(place):
    here = place()
    here.life(rounds=1)
    words = here.folder.file.read_bytes().split(b"\n")[0]
    here.decide("veto")
    assert not here.folder.file.exists()
    here.life()
    here.life()
    assert here.desk.declined == 1
    assert here.desk.file is None
    assert here.folder.state().stage == "vetoed"
    left = [path.read_bytes() for path in here.home.rglob("*") if path.is_file()]
    assert not any(words in content for content in left)
    assert not (here.home / "synthesis" / "stories").exists()


def test_a_running_client_sees_a_decision_while_it_waits(place):
    here = place()
    decided = []

    def given():
        if here.folder.state() and not decided:
            here.decide("approve")
            decided.append(True)
        return here.desk.file is not None

    here.life(rounds=1, until=given)
    assert decided == [True]


def test_nothing_is_made_before_the_coordinator_wants_it(place):
    here = place()
    here.desk.finished = False
    here.life(rounds=1)
    assert here.folder.state() is None
    assert here.histograms() == 0
    here.desk.finished = True
    here.life()
    assert here.folder.state().stage == "made"


def test_a_coordinator_that_serves_no_corpora_is_left_alone(place):
    here = place()

    async def unknown(request, context):
        import grpc

        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

    here.desk.CorpusStatus = unknown
    with capture_logs() as logs:
        here.life(rounds=1)
    assert [line["event"] for line in logs if line["log_level"] != "info"] == ["corpus_not_served"]
    assert here.folder.state() is None
    assert (here.home / "synthesis" / "stories" / "model.safetensors").exists()


# ---- what is paid for --------------------------------------------------------------------------------------------


def test_a_model_that_was_not_charged_is_never_sampled(place):
    here = place()
    with here.process() as (budget, releaser):
        here.round(budget, releaser, charge=False)
    with capture_logs() as logs:
        here.life()
    assert here.folder.state() is None
    assert here.desk.asked == []
    assert [line["event"] for line in logs if line["log_level"] == "error"] == ["model_not_paid"]
    # The next round is paid for, and replaces it.
    here.life(rounds=1)
    assert here.folder.statement(here.folder.state()).round == 2


def test_a_model_of_another_ledger_is_never_sampled(place):
    here = place()
    with here.process() as (budget, releaser):
        here.round(budget, releaser)
    shutil.rmtree(here.home / "ledgers")
    shutil.rmtree(here.home / "pins")
    here.life()
    assert here.folder.state() is None


def test_an_earlier_rounds_model_never_replaces_a_later_one(place):
    here = place()
    with here.process() as (budget, releaser):
        here.round(budget, releaser)
        here.round(budget, releaser)
        here.rounds = 0
        here.round(budget, releaser)
        here.give(releaser)
    assert here.folder.statement(here.folder.state()).round == 2


def test_the_histogram_is_charged_once_and_noised(place):
    here = place()
    here.life(rounds=1)
    assert here.histograms() == 1
    kept = json.loads((here.home / "synthesis" / "stories" / "histogram.json").read_text())
    true = [sum(each.label == label for each in here.examples) for label in LABELS]
    assert kept["counts"] != true
    assert all(abs(noised - count) < 60 for noised, count in zip(kept["counts"], true, strict=True))
    # The file is lost and made again from the same histogram.
    shutil.rmtree(here.folder.path)
    here.life()
    assert here.histograms() == 1
    assert here.folder.statement(here.folder.state()).histogram == "noised"


def test_a_histogram_that_was_not_charged_is_drawn_anew(place):
    here = place()
    here.life(rounds=1)
    shutil.rmtree(here.folder.path)
    path = here.home / "synthesis" / "stories" / "histogram.json"
    forged = json.loads(path.read_text()) | {"counts": [1000, 0], "reservation": 1}
    path.write_text(json.dumps(forged))
    here.life()
    assert here.histograms() == 2
    assert json.loads(path.read_text())["counts"] != [1000, 0]


def test_a_models_charge_does_not_pay_for_a_histogram(place):
    here = place()
    here.life(rounds=1)
    trained = here.folder.state().made.trained
    shutil.rmtree(here.folder.path)
    path = here.home / "synthesis" / "stories" / "histogram.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"counts": [1000, 0], "reservation": trained}))
    here.life()
    assert here.histograms() == 2
    assert json.loads(path.read_text())["counts"] != [1000, 0]


def test_a_histogram_that_the_disk_does_not_take_is_charged_once(place):
    here = place()
    full = []

    def no_space(at):
        if at == "histogram.opening" and len(full) < 3:
            full.append(at)
            raise OSError(28, "No space left on device")

    with here.process(no_space) as (budget, releaser):
        here.round(budget, releaser)

        def session():
            if here.folder.state() is None:
                releaser.connected()
            return here.folder.state() is not None

        with capture_logs() as logs:
            here.give(releaser, until=session)
    assert len([line for line in logs if line["event"] == "corpus_failing"]) == len(full) == 3
    assert here.histograms() == 1
    assert here.folder.statement(here.folder.state()).histogram == "noised"


# ---- models that nobody waits for --------------------------------------------------------------------------------


def model_is_there(here):
    return (here.home / "synthesis" / "stories" / "model.safetensors").exists()


def test_the_model_of_an_aborted_job_is_deleted(place):
    here = place()
    here.desk.finished = False
    with here.process() as (budget, releaser):
        here.round(budget, releaser)
        releaser.aborted("stories")
        assert releaser.busy
        here.give(releaser)
    assert not model_is_there(here)


def test_a_model_that_comes_after_the_abort_is_deleted(place):
    """A round may still be charging when its job is aborted."""
    here = place()
    here.desk.finished = False
    with here.process() as (budget, releaser):
        releaser.aborted("another")
        releaser.aborted("stories")
        assert not releaser.busy
        here.round(budget, releaser)
        assert not (here.home / "synthesis" / "stories").exists()
        # A restored coordinator may continue the job, so each session tells anew which jobs were aborted.
        releaser.connected()
        here.round(budget, releaser)
        assert model_is_there(here)


@pytest.mark.parametrize("name", ["", ".", "..", "../synthesis/stories", "/"])
def test_a_name_that_no_job_can_have_touches_no_folder(place, name):
    here = place()
    with here.process() as (budget, releaser):
        here.round(budget, releaser)
        releaser.aborted(name)
        releaser.finished(name)
        assert not releaser.busy
    assert model_is_there(here)


def test_the_model_is_deleted_if_the_coordinator_has_a_file(place):
    here = place()
    here.desk.file = b"of another start"
    here.life(rounds=1)
    assert not model_is_there(here)
    assert here.folder.state() is None


@pytest.mark.parametrize("finished", [True, False])
def test_the_model_of_a_job_that_wants_none_stays_until_it_ends(place, finished):
    here = place()
    here.desk.finished = False
    with here.process() as (budget, releaser):
        here.round(budget, releaser)
        if finished:
            releaser.finished("stories")
        here.give(releaser)
        assert releaser.handled == finished
    assert model_is_there(here) != finished


def test_a_later_job_of_the_same_name_keeps_its_model(place):
    here = place()
    here.life(rounds=1)
    here.decide("veto")
    before = here.folder.state()
    here.folder.write_state(before.model_copy(update={"job_document": bytes(32)}))
    with here.process() as (_, releaser):
        releaser._waiting["stories"] = "owner"
        releaser.connected = releaser._woken.set
        here.give(releaser)
    assert here.folder.state().told
    assert model_is_there(here)


def test_a_spent_budget_still_makes_a_corpus_with_even_labels(place):
    here = place()
    with here.process() as (budget, releaser):
        here.round(budget, releaser)
        spent = budget.statement("stories").figures().epsilon
    here.policy = Policy(epsilon=spent)
    with capture_logs() as logs:
        here.life()
    assert [line["labels"] for line in logs if line["event"] == "histogram_not_paid"] == ["in equal parts"]
    assert here.histograms() == 0
    statement = here.folder.statement(here.folder.state())
    assert statement.histogram == "even"
    assert statement.promise == "differentially-private"


@pytest.mark.parametrize("noised", [True, False])
def test_texts_are_made_without_reading_the_data(tmp_path, identity, noised):
    order = {"texts": 40} | ({"histogram_std": 6.0} if noised else {})
    made = []
    for other in (False, True):
        here = Place(tmp_path / str(other), identity, mechanism=ORDERED["mechanism"], corpus=order)
        here.desk.finished = False
        here.life(rounds=1)
        here.desk.finished = True
        if noised:
            # Both places have the same charge; the second one gets the first one's histogram, so labels are equal.
            here.life()
            shutil.rmtree(here.folder.path)
        if other:
            here.other_data()
            if noised:
                path = here.home / "synthesis" / "stories" / "histogram.json"
                first = tmp_path / "False" / "synthesis" / "stories" / "histogram.json"
                counts = json.loads(first.read_text())["counts"]
                path.write_text(json.dumps(json.loads(path.read_text()) | {"counts": counts}))
        here.random = Seeded("the same")
        here.life()
        made.append(here.folder.file.read_bytes())
    assert made[0] == made[1]
    assert b"nobody" not in made[0]


# ---- killed ------------------------------------------------------------------------------------------------------


# One function writes all files, so every run tests every step of one of them, and two of the others.
KILLS = [
    point
    if point.startswith("histogram.") or point.endswith((".charged", ".synced", f".{FILE_STEPS[-1]}"))
    else pytest.param(point, marks=pytest.mark.long)
    for point in CORPUS_POINTS
]


@pytest.mark.parametrize("point", KILLS)
def test_a_corpus_survives_a_kill_at_any_point(place, point):
    here = place()
    here.policy = Policy(corpora="always")
    came = []

    def kill(at):
        if at == point and not came:
            came.append(at)
            raise Killed

    def first_life():
        with here.process(kill) as (budget, releaser):
            here.round(budget, releaser)
            here.give(releaser)

    with pytest.raises(Killed):
        first_life()
    with here.process() as (budget, releaser):
        if not (here.home / "synthesis" / "stories" / "model.safetensors").exists() and here.folder.state() is None:
            # That round's model is lost, and the job continues.
            assert point.startswith("model.")
            here.round(budget, releaser)
        here.give(releaser)
    assert here.folder.state().stage == "received"
    assert here.desk.file == here.folder.file.read_bytes()
    # Only a kill between the charge and its file loses the noise, which is then paid for again.
    between = point == "histogram.charged" or point in [
        f"histogram.{step}" for step in ("opening", "opened", "written", "synced")
    ]
    assert here.histograms() == (2 if between else 1)
    outcomes = [each.outcome for each in receipts(here)]
    assert outcomes[-1] == "received"
    assert set(outcomes) == {"sending", "received"}


# ---- the upload --------------------------------------------------------------------------------------------------


def test_a_broken_upload_resumes_where_it_stopped(place, monkeypatch):
    monkeypatch.setattr("edge_client.corpus_release.sending.CORPUS_CHUNK", 64)
    here = place()
    here.life(rounds=1)
    here.decide("approve")
    here.desk.breaks = [1, 3, 2]
    assert here.life() == 3
    assert here.desk.file == here.folder.file.read_bytes()
    assert len(here.desk.statements) == 4
    # One statement and one signature, however often the upload was started.
    assert len(set(here.desk.statements)) == len(set(here.desk.signatures)) == 1


def test_a_chunk_is_as_large_as_the_coordinator_takes():
    assert CORPUS_CHUNK == 384 * 1024


def test_a_refusal_is_final_and_in_the_ledger(place):
    here = place()
    here.life(rounds=1)
    here.decide("approve")
    here.desk.refuses = Reason.REASON_CORPUS_INVALID
    here.life()
    state = here.folder.state()
    assert (state.stage, state.detail) == ("refused", "corpus_invalid: why")
    assert [each.outcome for each in receipts(here)] == ["sending", "corpus_invalid"]
    here.desk.refuses = None
    here.life()
    assert here.desk.file is None


def test_a_changed_file_is_not_released(place):
    here = place()
    here.life(rounds=1)
    here.decide("approve")
    here.folder.file.write_bytes(here.folder.file.read_bytes().replace(b"the", b"one"))
    with capture_logs() as logs:
        here.life()
    assert here.desk.file is None
    assert receipts(here) == []
    (failing,) = [line for line in logs if line["event"] == "corpus_failing"]
    assert "was changed since it was made" in failing["error"]


def test_only_the_file_its_statement_and_its_name_leave(place):
    """Field by field: nothing about the data, the noised histogram, or the charges."""
    here = given(place)
    data, made = here.desk.file, here.folder.state().made
    named = {"job": "stories", "digest": made.corpus, "size": len(data)}
    headers, chunks = [], []
    for message in here.desk.heard:
        if isinstance(message, pb.CorpusRef):
            said = {each.name: value for each, value in message.ListFields()}
            assert said in ({"job": "stories"}, named)
        elif message.WhichOneof("part") == "header":
            headers.append(message.header)
        else:
            chunks.append(message.data)
    assert b"".join(chunks) == data
    (header,) = headers
    assert {each.name for each, _ in header.ListFields()} == {"ref", "statement", "signature"}
    assert {each.name: value for each, value in header.ref.ListFields()} == named
    assert len(header.signature) == 384
    statement = json.loads(header.statement)
    counted = Counter(json.loads(line)["label"] for line in data.splitlines())
    assert abs(statement.pop("made_ms") - receipts(here)[0].at_ms) < 60_000
    assert statement == {
        "schema": 1,
        "federation": here.identity.federation.hex(),
        "job": "stories",
        "job_document": here.bundle.document.digest().hex(),
        "member": "north",
        "corpus": made.corpus.hex(),
        "bytes": len(data),
        "rows": made.rows,
        "labels": [{"label": label, "rows": counted[label]} for label in LABELS],
        "round": 1,
        "version": here.bundle.document.weights.hex(),
        "mechanism": "dp-sgd",
        "variant": "sound",
        "promise": "differentially-private",
        "histogram": "noised",
    }


# ---- receipts ----------------------------------------------------------------------------------------------------


def given(place):
    here = place()
    here.life(rounds=1)
    here.decide("approve")
    here.life()
    return here


def test_receipts_say_what_left_and_verify(place):
    here = given(place)
    sending, received = receipts(here)
    state = here.folder.state()
    assert (sending.outcome, received.outcome) == ("sending", "received")
    assert sending.corpus == state.made.corpus == hashlib.sha256(here.desk.file).digest()
    assert sending.statement == hashlib.sha256(here.desk.statements[0]).digest()
    assert (sending.bytes, sending.reservation, sending.trained) == (
        len(here.desk.file),
        state.made.histogram,
        state.made.trained,
    )
    path = ledger_path(here.home, "data")
    found = verify(path, here.home / "receipts")
    assert found.sound
    # The round's own vector has no receipt here, but the histogram and the model are covered.
    assert not any("histogram" in note for note in found.notes)
    exported = verify_export(export_lines(path, here.home / "receipts"))
    assert exported.sound, exported.problems


def problems(here):
    return [str(each) for each in verify(ledger_path(here.home, "data"), here.home / "receipts").problems]


def test_a_changed_receipt_of_a_corpus_is_named(place):
    here = given(place)
    (path,) = (here.home / "receipts" / "stories").glob("*.0.json")
    path.write_bytes(path.read_bytes().replace(b'"outcome":"received"', b'"outcome":"regained"'))
    (missing, *_) = problems(here)
    assert missing.startswith("receipt stories/1.0")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"trained": None}, "it names no charge"),
        ({"trained": 10_000}, "an older copy"),
        ({"trained": "histogram"}, "which was for another model"),
        ({"version": bytes(32)}, "which was for another model"),
    ],
)
def test_a_receipt_with_a_wrong_charge_for_its_model_is_found(place, wrong, says):
    """A client that lies to its own ledger: the receipt is signed and in the chain."""
    here = place()
    here.life(rounds=1)
    here.decide("approve")
    lied = Releaser._given

    def lying(self, folder, state):
        from dataclasses import replace

        given = lied(self, folder, state)
        return replace(
            given, **{key: given.histogram if value == "histogram" else value for key, value in wrong.items()}
        )

    Releaser._given = lying
    try:
        if says == "an older copy":
            says = "never charged"
        here.life()
    finally:
        Releaser._given = lied
    assert any(says in each for each in problems(here)), problems(here)


def test_a_receipt_with_a_wrong_charge_for_its_labels_is_found(place, monkeypatch):
    monkeypatch.setattr("edge_client.corpus_release.releaser.HISTOGRAM", "dp-sgd")
    here = given(place)
    assert len(receipts(here)) == 2
    assert any("was not for a histogram" in each for each in problems(here)), problems(here)


# ---- the command -------------------------------------------------------------------------------------------------


def test_the_owner_reads_and_decides_on_the_command_line(place):
    here = place()
    assert "holds no corpus" in command(here, "list").output
    assert code(command(here, "show", "stories")) == 5
    assert code(command(here, "show", "../stories")) == 5
    here.life(rounds=1)
    assert "stories: waits for you" in command(here, "list").output
    shown = command(here, "show", "stories", "--rows", "3").output
    assert str(here.folder.file) in shown
    assert "differentially private in each text" in shown
    assert "as in your data, with noise, and charged" in shown
    assert sum(line.startswith(("    good: ", "    bad: ")) for line in shown.splitlines()) == 3
    told = json.loads(command(here, "show", "stories", "--rows", "2", "--json").output)
    assert (told["stage"], len(told["texts"])) == ("made", 2)
    assert told["statement"]["corpus"] == told["digest"]
    assert code(command(here, "approve", "stories")) == 0
    assert "approved" in command(here, "list").output
    here.life()
    assert "released; the coordinator has it" in command(here, "list").output
    late = command(here, "veto", "stories")
    assert code(late) == 4


def test_a_veto_on_the_command_line_is_immediate_and_final(place):
    here = place()
    here.life(rounds=1)
    assert code(command(here, "approve", "stories")) == 0
    # Until the file is on its way, the owner may revoke the approval.
    assert code(command(here, "veto", "stories")) == 0
    assert not here.folder.file.exists()
    assert json.loads(command(here, "list", "--json").output)["stage"] == "vetoed"
    assert code(command(here, "veto", "stories")) == 0
    assert code(command(here, "approve", "stories")) == 4


def test_an_edited_file_is_neither_shown_nor_approved(place):
    here = place()
    here.life(rounds=1)
    with here.folder.file.open("ab") as file:
        file.write(b'{"text": "my own", "label": "good"}\n')
    assert code(command(here, "show", "stories")) == 1
    assert code(command(here, "approve", "stories")) == 4
    with pytest.raises(CorpusUnusable, match="whole or not at all"):
        here.decide("approve")
    assert code(command(here, "veto", "stories")) == 0
