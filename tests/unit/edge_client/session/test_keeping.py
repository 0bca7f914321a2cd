"""Tests of a member's private state: made once, staged with an update, and counting once U3 is signed."""

import asyncio
import hashlib
import json
import threading
from dataclasses import replace

import numpy as np
import pytest
import structlog

import secure_agg
from edge_client.agent.runner import RunOptions, Table, load_member
from edge_client.downloads.cache import BlobCache
from edge_client.ledger.opening import open_budget
from edge_client.policy.policy import Policy
from edge_client.private_store import PrivateStore
from edge_client.private_store.errors import StateForeign, StoreUnwritable
from edge_client.private_store.files import state_file
from edge_client.private_store.sealing import StoreKey
from edge_client.session.journal import Memory, Sent
from edge_client.session.keeping import Keeper
from edge_client.session.preparation import PreparationRefused, Preparer
from learning.models import build
from learning.text.encoder import VocabularyInvalid, word_tokenizer
from learning.text.examples import Example
from learning.text.tables import TableInvalid
from tacit.attempt import AttemptId
from tacit.documents import DocumentInvalid
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.mechanism import GaussianUpdate
from tacit.messages import Assignment
from tacit.model import BiLSTMModel, TransformerModel
from tacit.reason import Reason
from tests.support import party
from toolkit.console import CommandFailed

FEDERATION = bytes(range(32))
MODEL = BiLSTMModel(embedding=3, hidden=2, max_tokens=8)
ENCODER = TransformerModel(
    config={
        "model_type": "bert",
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 6,
        "max_position_embeddings": 16,
    },
    max_tokens=8,
)
EMBEDDING = "embedding.weight"
EXAMPLES = [Example("where is the brown heron", "a"), Example("the heron stands there", "b")] * 3
WORDS = {"[PAD]", "[UNK]", "where", "is", "the", "brown", "heron", "stands", "there"}
PUBLIC = word_tokenizer(["where", "is", "the", "7", "door"])


def document(method="fedvocab", *, own=True, **more):
    said = {
        "schema": 1,
        "name": "desk",
        "labels": ["a", "b"],
        "method": method,
        "model": MODEL.model_dump(),
        "manifest": "00" * 32,
        "weights": "11" * 32,
        # The number of MODEL's shared values.
        "values": 106,
    }
    if own:
        said["vocabulary"] = {"kind": "words", "size": 50}
    else:
        said["tokenizer"] = hashlib.sha256(PUBLIC).hexdigest()
        private = {"manifest": "22" * 32, "weights": "33" * 32, "values": 21}
        said["private"] = private
    return JobDocument.model_validate({**said, **more})


@pytest.fixture
def home(tmp_path):
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def store(home):
    with PrivateStore(home, FEDERATION, "data") as opened:
        yield opened


@pytest.fixture
def keeper(store):
    return Keeper(store, EXAMPLES)


def assignment(round_=1, version=b"v" * 32):
    return Assignment("desk", round_, document().digest(), version, round_ - 1, 1000)


def moved(state, by=1.0):
    return {name: array + np.float32(by) for name, array in state.arrays.items()}


def sent(token, survivors):
    return Sent(AttemptId("desk", 4, 4), b"v" * 32, bytes(32), survivors=survivors, staged=token)


# ---- made once ------------------------------------------------------------------------------------------------------


def test_a_member_begins_with_its_own_vocabulary_and_secret_vectors(keeper, home):
    job = document(seed=6)
    assert keeper.load(job) is None
    made = keeper.make(job, None, None)
    assert set(json.loads(made.tokenizer)["model"]["vocab"]) == WORDS
    assert made.arrays.keys() == {EMBEDDING}
    assert made.arrays[EMBEDDING].shape == (len(WORDS), 3)
    assert not made.arrays[EMBEDDING][0].any()
    # Entries are ordered by frequency, so vectors from the job's seed would reveal them by position.
    public = build(MODEL, len(WORDS), 2, 0, seed=6).embedding.weight.detach().numpy()
    assert not np.isin(made.arrays[EMBEDDING][2:], public).any()
    again = keeper.make(document(name="again", seed=6), None, None)
    assert again.tokenizer == made.tokenizer
    assert not np.isin(again.arrays[EMBEDDING][2:], made.arrays[EMBEDDING]).any()
    assert np.abs(made.arrays[EMBEDDING][2:]).min() > 0
    assert (made.round, made.version, made.document) == (0, job.weights, job.digest())
    # The state counts before any round, because a vocabulary is not built the same twice.
    kept = keeper.load(job)
    assert kept.tokenizer == made.tokenizer
    assert np.array_equal(kept.arrays[EMBEDDING], made.arrays[EMBEDDING])
    assert not list(home.glob("private/desk/staged-*"))


def test_with_a_public_vocabulary_a_member_starts_where_the_job_says(keeper):
    table = np.arange(21, dtype=np.float32).reshape(7, 3)
    manifest = Manifest.of({EMBEDDING: table})
    made = keeper.make(document(own=False), PUBLIC, (manifest, manifest.encode(manifest.flatten({EMBEDDING: table}))))
    assert made.tokenizer is None
    assert np.array_equal(made.arrays[EMBEDDING], table)


def test_a_start_of_another_model_is_refused(keeper):
    table = np.zeros((6, 3), dtype=np.float32)
    manifest = Manifest.of({EMBEDDING: table})
    with pytest.raises(DocumentInvalid, match="has 127 values with 7 entries, and its weights have 124"):
        keeper.make(document(own=False), PUBLIC, (manifest, manifest.encode(manifest.flatten({EMBEDDING: table}))))
    assert keeper.load(document(own=False)) is None


def test_a_table_fills_the_rows_of_its_words_and_adds_further_words(store, tmp_path):
    table = tmp_path / "vectors.txt"
    table.write_text("heron 1 2 3\nowl 4 5 6\nthe 7 8 9\n")
    made = Keeper(store, EXAMPLES, table).make(document(), None, None)
    ids = json.loads(made.tokenizer)["model"]["vocab"]
    assert ids.keys() == WORDS | {"owl"}
    assert made.arrays[EMBEDDING][ids["heron"]].tolist() == [1, 2, 3]
    assert made.arrays[EMBEDDING][ids["the"]].tolist() == [7, 8, 9]
    assert made.arrays[EMBEDDING][ids["owl"]].tolist() == [4, 5, 6]
    others = [at for word, at in ids.items() if word not in ("heron", "owl", "the", "[PAD]", "[UNK]")]
    assert not np.isin(made.arrays[EMBEDDING][others], np.arange(10)).any()
    alone = document(name="alone", vocabulary={"kind": "words", "size": 50, "table_words": False})
    made = Keeper(store, EXAMPLES, table).make(alone, None, None)
    ids = json.loads(made.tokenizer)["model"]["vocab"]
    assert ids.keys() == WORDS
    assert made.arrays[EMBEDDING][ids["heron"]].tolist() == [1, 2, 3]


def test_under_noise_texts_without_words_still_get_the_tables_words(store, tmp_path):
    """Nobody may hear whether the texts have words, and it is no reason to ignore the table."""
    table = tmp_path / "vectors.txt"
    table.write_text("heron 1 2 3\nowl 4 5 6\n")
    noise = {"name": "gaussian-update", "noise_multiplier": 1.0, "lot": 6}
    made = Keeper(store, [Example(" ", "a")], table).make(document(mechanism=noise), None, None)
    ids = json.loads(made.tokenizer)["model"]["vocab"]
    assert {"heron", "owl"} < ids.keys()
    assert made.arrays[EMBEDDING][ids["owl"]].tolist() == [4, 5, 6]


def test_the_row_of_unknown_words_starts_at_zero_or_from_the_table(store, keeper, tmp_path):
    """None of the member's texts trains that row, so random numbers there would stay noise for good."""
    made = keeper.make(document(), None, None)
    assert not made.arrays[EMBEDDING][json.loads(made.tokenizer)["model"]["vocab"]["[UNK]"]].any()
    table = tmp_path / "vectors.txt"
    table.write_text("heron 1 2 3\n[UNK] 4 5 6\n")
    made = Keeper(store, EXAMPLES, table).make(document(name="other"), None, None)
    assert made.arrays[EMBEDDING][1].tolist() == [4, 5, 6]


def test_a_table_that_does_not_fit_is_refused_and_stores_nothing(store, tmp_path):
    table = tmp_path / "vectors.txt"
    table.write_text("heron 1 2\n")
    keeper = Keeper(store, EXAMPLES, table)
    with pytest.raises(TableInvalid):
        keeper.make(document(), None, None)
    assert keeper.load(document()) is None


def test_a_table_is_ignored_unless_a_whole_embedding_is_private(store, tmp_path):
    keeper = Keeper(store, EXAMPLES, tmp_path / "no table at all")
    rows = keeper.make(document({"name": "fedrecon"}, own=False), PUBLIC, None)
    assert 0 < len(rows.arrays[EMBEDDING]) < 7
    above = keeper.make(document({"name": "lg-fedavg", "private": ["encoder"]}, own=False), PUBLIC, None)
    assert EMBEDDING not in above.arrays


def test_texts_without_a_word_make_no_vocabulary(store):
    with pytest.raises(VocabularyInvalid, match="the texts have no words"):
        Keeper(store, [Example("  ", "a")]).make(document(), None, None)
    # Under noise nobody may hear of it, so the member takes part with a vocabulary that reveals nothing.
    noise = GaussianUpdate(noise_multiplier=8.0, lot=1000)
    hidden = Keeper(store, [Example("  ", "a")]).make(document(name="noised", mechanism=noise), None, None)
    assert set(json.loads(hidden.tokenizer)["model"]["vocab"]) == {"[PAD]", "[UNK]", "-"}


def test_a_missing_or_invalid_table_is_an_error_before_anything_runs(home, tmp_path):
    party.member_home(home, "localhost:7441")
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "a text", "label": "a"}\n')
    table = tmp_path / "vectors.txt"
    options = RunOptions(data=data, home=home, device="cpu", embedding=table)
    with pytest.raises(CommandFailed, match=r"vectors\.txt does not exist; check --embedding, a GloVe file or"):
        load_member(options)
    table.write_text("400000 3\nword 1 2 3\n")
    with pytest.raises(CommandFailed, match=r"vectors\.txt, line 1: 1 numbers, .* remove the header line"):
        load_member(options)
    table.write_text("word 1 2 3\n")
    member = load_member(options)
    assert member.examples == [Example("a text", "a")]
    assert (member.table, member.data_name) == (Table(table, 3), "data")
    # A folder with only a tokenizer is no table either.
    folder = tmp_path / "bert"
    folder.mkdir()
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n")
    with pytest.raises(CommandFailed, match=r"bert has no model\.safetensors; .*; check --embedding"):
        load_member(replace(options, embedding=folder))


def test_a_method_without_a_state_stores_nothing(keeper, home):
    job = document({"name": "fedrecon"}, own=False)
    made = keeper.make(job, PUBLIC, None)
    # Only the row of the digit is private.
    assert made.arrays[EMBEDDING].shape == (1, 3)
    assert not (home / "private").exists()
    assert keeper.load(job) is None


# ---- staged, and settled --------------------------------------------------------------------------------------------


@pytest.fixture
def staged(keeper):
    """Returns the state that counts, the arrays trained for round 4, and the token that they are staged under."""
    job = document()
    before = keeper.make(job, None, None)
    return before, moved(before), keeper.stage(job, assignment(4), moved(before), before)


def test_a_trained_state_counts_once_the_signed_u3_names_the_member(keeper, staged, home):
    job, (before, after, token) = document(), staged
    assert np.array_equal(keeper.load(job).arrays[EMBEDDING], before.arrays[EMBEDDING])
    keeper.confirmed("desk", token, {"north", "east"}, "north")
    kept = keeper.load(job)
    assert np.array_equal(kept.arrays[EMBEDDING], after[EMBEDDING])
    assert (kept.round, kept.version, kept.tokenizer) == (4, b"v" * 32, before.tokenizer)
    assert not list(home.glob("private/desk/staged-*"))
    # A second attempt of the round signs again, and discards when it is over. Neither undoes the commit.
    keeper.confirmed("desk", token, {"north", "east"}, "north")
    keeper.discard("desk", token)
    assert keeper.load(job).round == 4


def test_a_state_whose_vector_is_not_in_the_sum_does_not_count(keeper, staged):
    keeper.confirmed("desk", staged[2], {"east", "south"}, "north")
    keeper.confirmed("desk", "4-0123456789abcdef", {"north"}, "north")
    assert keeper.load(document()).round == 0


def test_a_confirmed_training_does_not_confirm_a_second_one(keeper, staged):
    """The member signs U3 of one attempt, trains the round again, and dies before U3 of the next attempt."""
    job, (before, after, first) = document(), staged
    keeper.confirmed("desk", first, {"north"}, "north")
    second = keeper.stage(job, assignment(4), moved(before, 7.0), before)
    assert second != first
    keeper.recover(Memory({}, (sent(first, frozenset({"north"})),)), "north")
    assert np.array_equal(keeper.load(job).arrays[EMBEDDING], after[EMBEDDING])


def test_an_unconfirmed_state_never_counts_after_a_restart(keeper, staged):
    """A start releases its charge, so if the state counted, a restart would give training for free."""
    job, (before, after, first) = document(), staged
    keeper.confirmed("desk", first, {"north"}, "north")
    confirmed = Memory({}, (sent(first, frozenset({"north"})),))
    for by in (3.0, 5.0):
        keeper.stage(job, assignment(4), moved(before, by), before)
        keeper.recover(confirmed, "north")
        assert np.array_equal(keeper.load(job).arrays[EMBEDDING], after[EMBEDDING])


def test_discarding_an_update_discards_its_state(keeper, staged, store):
    token = staged[2]
    keeper.discard("desk", "4-0123456789abcdef")
    assert store.staged("desk") == [token]
    keeper.discard("desk", token)
    assert store.staged("desk") == []
    keeper.confirmed("desk", token, {"north"}, "north")
    assert keeper.load(document()).round == 0
    # A job without a private state is no error.
    keeper.discard("other", token)


@pytest.mark.parametrize(
    ("confirmations", "round_"),
    [
        ((), 0),
        # The vector may be in a sum, but the member never learned in which.
        (((True, None),), 0),
        (((True, {"east", "south"}),), 0),
        # The confirmation is of another training.
        (((False, {"north"}),), 0),
        (((True, {"north", "east"}),), 4),
        (((False, None), (True, {"north", "east"})), 4),
    ],
)
def test_after_a_crash_the_journal_decides(keeper, staged, store, confirmations, round_):
    token = staged[2]
    memory = tuple(sent(token if its else "4-0123456789abcdef", who) for its, who in confirmations)
    with structlog.testing.capture_logs() as logs:
        keeper.recover(Memory({}, memory), "north")
    assert keeper.load(document()).round == round_
    assert store.staged("desk") == []
    assert [(line["event"], line["job"], line["token"], line["committed"]) for line in logs] == [
        ("private_state_recovered", "desk", token, bool(round_))
    ]


def test_the_log_holds_no_word_of_the_private_state(keeper, staged):
    with structlog.testing.capture_logs() as logs:
        keeper.recover(Memory({}, ()), "north")
    assert not [word for word in WORDS if len(word) > 4 and word in repr(logs)]


def test_a_state_of_another_job_document_is_refused(keeper, staged):
    other = document(seed=5)
    with pytest.raises(StateForeign, match="another document of this job"):
        keeper.load(other)
    with pytest.raises(StateForeign):
        keeper.stage(other, assignment(4), staged[1], staged[0].__class__(other.digest(), 0, bytes(32), {}, None))
    assert keeper.load(document()).round == 0


def test_a_state_can_be_read_while_another_process_uses_it(keeper, staged, home):
    with PrivateStore(home, FEDERATION, "data") as other:
        looking = Keeper(other, EXAMPLES)
        assert looking.look(document()).round == 0
        assert looking.look(document(name="other")) is None


def test_a_disk_failure_is_logged_and_the_round_continues(keeper, staged, store, monkeypatch):
    def failing(*_):
        raise StoreUnwritable("no space is left")

    monkeypatch.setattr(store, "commit", failing)
    monkeypatch.setattr(store, "discard", failing)
    with structlog.testing.capture_logs() as logs:
        keeper.confirmed("desk", staged[2], {"north"}, "north")
        keeper.discard("desk", staged[2])
    assert [(line["event"], line["why"]) for line in logs] == [("private_state_failing", "no space is left")] * 2


def test_calls_from_two_threads_take_turns(keeper, staged, store, monkeypatch):
    """A training ends in its own thread while the loop signs for another job."""
    before, _, token = staged
    stage = store.stage
    waiting = threading.Thread(target=keeper.discard, args=("desk", token))

    def slow(*of):
        waiting.start()
        waiting.join(timeout=0.2)
        assert waiting.is_alive()
        stage(*of)

    monkeypatch.setattr(store, "stage", slow)
    later = keeper.stage(document(), assignment(5), moved(before), before)
    waiting.join(timeout=30)
    assert store.staged("desk") == [later]


# ---- what the coordinator hears -------------------------------------------------------------------------------------


class Watcher:
    def training(self, *_):
        """Ignores training steps."""

    def reading(self, *_):
        pass

    training_failing = training


class Machine:
    """A member that prepares updates, and a coordinator that serves the job's files."""

    def __init__(
        self, home, identity, budget, examples=EXAMPLES, table=None, model=MODEL, kind="words", mechanism="none"
    ):
        module = build(model, 2, 2, 0, seed=1)
        tensors = {name: each.detach().numpy() for name, each in module.named_parameters() if name != EMBEDDING}
        manifest = Manifest.of(tensors)
        self.base = manifest.encode(manifest.flatten(tensors))
        self.document = document(
            values=manifest.values,
            manifest=manifest.digest().hex(),
            weights=hashlib.sha256(self.base).hexdigest(),
            training={"epochs": 1, "batch": 4},
            model=model.model_dump(),
            vocabulary={"kind": kind, "size": 50},
            mechanism=mechanism,
        )
        self.budget = budget
        served = (self.document.canonical(), manifest.canonical(), self.base)
        self.served = {hashlib.sha256(data).digest(): data for data in served}
        self.store = PrivateStore(home, identity.federation, "data")
        self.keeper = Keeper(self.store, examples, table)
        self.preparer = Preparer(
            examples,
            identity.federation,
            identity.member,
            Policy(mechanisms=("none", "gaussian-update")),
            budget,
            secure_agg.SystemRandom(),
            BlobCache(home / "cache"),
            "cpu",
            Watcher(),
            self.keeper,
        )

    async def fetch(self, digest, into, limit):
        into.parent.mkdir(exist_ok=True, parents=True)
        into.write_bytes(self.served[digest])

    def prepare(self, round_=1):
        version = hashlib.sha256(self.base).digest()
        asked = Assignment("desk", round_, self.document.digest(), version, 0, 1000)
        return asyncio.run(self.preparer.prepare(asked, self.fetch))

    def refused(self):
        with pytest.raises(PreparationRefused) as refused:
            self.prepare()
        return refused.value


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return party.member(tmp_path_factory.mktemp("north") / "home", "localhost:7441")


@pytest.fixture
def machine(home, identity):
    with open_budget(home, identity, Policy(mechanisms=("none",)), ["a text"]) as budget:
        made = []

        def make(**how):
            made.append(Machine(home, identity, budget, **how))
            return made[-1]

        yield make
        for each in made:
            each.store.close()


def test_an_update_is_prepared_with_its_state_staged(machine, home):
    place = machine()
    first = place.prepare()
    # The private arrays are on the disk, not in the update.
    assert first.update.private is None
    assert place.store.staged("desk") == [first.staged]
    assert first.staged.startswith("1-")
    assert place.keeper.load(place.document).round == 0
    start = place.keeper.load(place.document).arrays[EMBEDDING]
    place.keeper.confirmed("desk", first.staged, {"north"}, "north")
    after = place.keeper.load(place.document)
    assert after.round == 1
    assert not np.array_equal(after.arrays[EMBEDDING], start)
    # The next round starts from this state, with the same vocabulary.
    second = place.prepare(2)
    place.keeper.confirmed("desk", second.staged, {"north"}, "north")
    last = place.keeper.load(place.document)
    assert (last.round, last.tokenizer) == (2, after.tokenizer)


@pytest.mark.parametrize(
    ("model", "width", "framed"), [(MODEL, 3, False), (ENCODER, 4, True)], ids=["bilstm", "transformer"]
)
def test_a_member_keeps_its_own_word_pieces_for_good(machine, model, width, framed):
    """Training them again gives different ones, so each round and each start must use the first ones."""
    place = machine(model=model, kind="wordpiece")
    first = place.prepare()
    made = place.keeper.load(place.document)
    said = json.loads(made.tokenizer)["model"]
    pieces = sorted(said["vocab"], key=said["vocab"].__getitem__)
    assert said["type"] == "WordPiece"
    assert pieces[:4] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    assert any(piece.startswith("##") for piece in pieces)
    assert "heron" in pieces
    assert len(pieces) <= 50
    assert made.arrays[EMBEDDING].shape == (len(pieces), width)
    # The update has the job's number of values, whatever the vocabulary's size.
    assert first.update.change.shape == (place.document.values,)
    place.keeper.confirmed("desk", first.staged, {"north"}, "north")
    after = place.keeper.load(place.document)
    assert (after.round, after.tokenizer) == (1, made.tokenizer)
    rows = (after.arrays[EMBEDDING] != made.arrays[EMBEDDING]).any(axis=1)
    assert rows[said["vocab"]["heron"]]
    assert not rows[said["vocab"]["[PAD]"]]
    # The entries that frame a text are trained if the model's texts have them.
    assert rows[said["vocab"]["[CLS]"]] == rows[said["vocab"]["[SEP]"]] == framed
    place.store.close()
    # The member starts again, with texts that would give another vocabulary.
    grown = [*EXAMPLES, Example("an owl calls at dusk", "b")]
    again = machine(examples=grown, model=model, kind="wordpiece")
    second = again.prepare(2)
    again.keeper.confirmed("desk", second.staged, {"north"}, "north")
    last = again.keeper.load(again.document)
    assert (last.round, last.tokenizer) == (2, made.tokenizer)
    # The round starts from the state and not from new vectors: it takes four steps of Adam, of about 0.001 each.
    moved = np.abs(last.arrays[EMBEDDING] - after.arrays[EMBEDDING])
    assert 0 < moved.max() < 0.01


def test_a_damaged_state_is_refused_without_details(machine, home):
    place = machine()
    place.keeper.make(place.document, None, None)
    path = state_file(home, "desk")
    data = bytearray(path.read_bytes())
    data[-50] ^= 1
    path.write_bytes(data)
    refused = place.refused()
    assert refused.reason == Reason.REASON_PRIVATE_STATE_UNUSABLE
    assert refused.detail == "this member's private state of the job cannot be used; its own log says why"
    assert str(path) in refused.private


@pytest.mark.parametrize("begun", [False, True], ids=["before its first round", "later"])
@pytest.mark.parametrize("why", ["sealed", "in use"])
def test_a_store_that_takes_no_state_is_found_before_a_round_is_paid_for(machine, home, identity, why, begun):
    """It depends on no data. A member that forgot its key would lose its budget, round after round."""
    place = machine(mechanism={"name": "gaussian-update", "noise_multiplier": 20.0, "clip": 1.0, "lot": 6})
    if begun:
        place.keeper.make(place.document, None, None)
        place.store.close()
    key = StoreKey("key-file", b"k" * 32) if why == "sealed" else None
    other = PrivateStore(home, identity.federation, "other", key)
    Keeper(other, EXAMPLES).make(document().model_copy(update={"name": "earlier"}), None, None)
    if why == "sealed":
        other.close()
    for _ in range(2):
        refused = place.refused()
        assert refused.reason == Reason.REASON_PRIVATE_STATE_UNUSABLE
        assert why in refused.private
    assert place.budget.statement("desk").of_job == ()
    other.close()


def test_wordless_data_and_an_unfit_table_are_refused_without_details(machine, tmp_path):
    table = tmp_path / "vectors.txt"
    table.write_text("heron 1 2\n")
    for how in ({"examples": [Example(" ", "a")]}, {"table": table}):
        refused = machine(**how).refused()
        assert refused.reason == Reason.REASON_PRIVATE_STATE_UNUSABLE
        assert refused.detail == "this member's private state of the job cannot be used; its own log says why"
        assert "heron" not in refused.detail
        assert len(refused.private) > 20


def unused(place, round_=1):
    """Prepares and confirms an update, and returns what the log says about the table."""
    with structlog.testing.capture_logs() as logs:
        made = place.prepare(round_)
    if made.staged is not None:
        place.keeper.confirmed("desk", made.staged, {"north"}, "north")
    return [(line["job"], line["reason"]) for line in logs if line["event"] == "embedding_table_unused"]


def test_an_unused_table_is_logged_once_a_job(machine, tmp_path):
    table = tmp_path / "vectors.txt"
    table.write_text("heron 1 2 3\n")
    place = machine(table=table)
    # Rounds that continue from a state made from the table log nothing.
    assert unused(place) == unused(place, 2) == []
    place.store.close()
    again = machine(table=table)
    assert unused(again, 3) == [("desk", "private_state_exists")]
    assert unused(again, 4) == []
    again.store.close()
    assert unused(machine(), 5) == []


def test_a_table_without_any_of_the_members_words_is_logged(machine, tmp_path):
    table = tmp_path / "vectors.txt"
    table.write_text("owl 1 2 3\n")
    assert unused(machine(table=table, kind="wordpiece")) == [("desk", "no_word_known")]


def test_a_table_is_unused_without_a_private_embedding(keeper, store, tmp_path):
    table = tmp_path / "vectors.txt"
    table.write_text("heron 1 2 3\n")
    shared = document("fedavg", own=False, private=None)
    rows, above = ({"name": "fedrecon"}, {"name": "lg-fedavg", "private": ["encoder"]})
    jobs = [shared, *(document(method, own=False) for method in (rows, above, "fedvocab", "lg-fedavg"))]
    jobs = [job.model_copy(update={"name": f"job{number}"}) for number, job in enumerate(jobs)]
    with structlog.testing.capture_logs() as logs:
        for named in (Keeper(store, EXAMPLES, table), keeper):
            for job in jobs:
                named.tell_of_table(job, None)
    assert [(line["event"], line["job"], line["reason"], line["log_level"]) for line in logs] == [
        ("embedding_table_unused", f"job{number}", "embedding_not_private", "warning") for number in range(3)
    ]


def test_an_update_that_cannot_be_staged_is_refused(machine, monkeypatch):
    place = machine()
    stage = PrivateStore.stage

    def full(self, job, token, state):
        if state.round:
            raise StoreUnwritable("no space is left")
        stage(self, job, token, state)

    monkeypatch.setattr(PrivateStore, "stage", full)
    refused = place.refused()
    assert (refused.reason, refused.private) == (Reason.REASON_PRIVATE_STATE_UNUSABLE, "no space is left")
    assert place.keeper.load(place.document).round == 0
