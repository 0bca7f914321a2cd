"""Vocabularies of members' own over one small pretrained encoder, with real processes: LoRA is shared, a member is
killed twice and resumes, exports its model and measures it.

The encoder is a random BERT that the test makes, with few whole words, so most of a member's pieces are means of
several of its rows. A member's texts begin with a word in Greek letters that neither the base nor another member has.
"""

import json
import re
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest
from tokenizers import Tokenizer

from edge_client.private_store.upkeep import held, look
from export.bundle import read_job_bundle
from export.figures import figures_of
from export.figures_report import figures_json
from export.predictor import Predictor
from learning.models.assembly import whole_model
from learning.text.composed import pieces_of
from learning.text.data import read_examples
from learning.text.examples import label_ids
from learning.text.tables import entries_of
from learning.training.local import logits_of
from secure_agg import packed_size
from tacit.v1 import operator_pb2 as pb
from tacit.vector import layout_of
from tests.support.processes import BIN, EXAMPLES, PATIENCE, Federation, Process, command, succeed
from toolkit.console import ExitCode

pytestmark = pytest.mark.timeout(600)

LOCAL = {"north": "αβ", "east": "γδ", "south": "εζ", "west": "ηθ"}
FOUR = tuple(LOCAL)
JOB, ROWS, ROUNDS, EMBEDDING = "based", 60, 6, "embedding.weight"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
POLICY = """schema = 1
mechanisms = ["none"]
vocabularies = ["own-from-base"]
shared_parameters = ["lora.*", "output.*"]
"""
SPEC = """schema = 1
name = "{name}"
labels = {labels}
method = "fedvocab"
[vocabulary]
kind = "wordpiece"
size = 400
[model]
architecture = "transformer"
base = "encoder"
max_tokens = 48
dropout = 0.0
injection = {{ name = "lora", rank = 4 }}
[training]
optimiser = "adam"
learning_rate = 0.01
embedding_learning_rate = 0.002
batch = 8
[rounds]
count = {count}
min_members = 3
[rounds.deadlines]
training = 300
reconnect = 5
"""


def made_encoder(folder):
    """Writes a random BERT whose pieces are letters, punctuation and the twenty most frequent words."""
    import torch
    from transformers import BertConfig, BertModel

    counts = {}
    for each in read_examples(EXAMPLES / "train.jsonl"):
        for word in re.findall("[a-z]+", each.text.lower()):
            counts[word] = counts.get(word, 0) + 1
    words = sorted((word for word in counts if len(word) > 1), key=lambda word: (-counts[word], word))[:20]
    pieces = [*SPECIAL, *".,?!'-:;", *LETTERS, *(f"##{letter}" for letter in LETTERS), *words]
    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(pieces), max_position_embeddings=64, initializer_range=0.1, **sizes)
    BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")


@dataclass(frozen=True)
class Seen:
    """The private state on a member's disk at one moment."""

    round: int
    staged: int

    @classmethod
    def at(cls, home):
        found = held(home, JOB)
        assert found.header is not None
        return cls(found.header.round, found.staged)


class Town:
    """The federation with its four members, and what happened to west."""

    def __init__(self, folder, stack):
        self.folder, self.federation = folder, Federation(folder)
        stack.callback(self.federation.close)
        self.federation.enrol(*FOUR, policy=POLICY)
        rows = [json.loads(line) for line in (EXAMPLES / "train.jsonl").read_text().splitlines()]
        for number, name in enumerate(FOUR):
            for path, at in ((self.data(name), number), (self.held_out(name), number + len(FOUR))):
                some = [each | {"text": f"{LOCAL[name]} {each['text']}"} for each in rows[ROWS * at : ROWS * (at + 1)]]
                path.write_text("".join(json.dumps(each) + "\n" for each in some))
        made_encoder(folder / "encoder")
        spec = folder / f"{JOB}.toml"
        labels = json.dumps(sorted({each["label"] for each in rows}))
        spec.write_text(SPEC.format(name=JOB, labels=labels, count=ROUNDS))
        halt = folder / "halt"
        for name in FOUR[:3]:
            self.start(name)
        west = self.start("west", "halting_member", "share", str(halt))
        self.federation.create(spec)
        self.federation.wait_for(JOB, lambda detail: detail.job.version_number >= 1)
        # First kill: west has trained and sent nothing more, so no sum holds its update.
        halt.touch()
        west.wait_for("halted", phase="share")
        self.at_first = Seen.at(self.home("west"))
        west.kill()
        halt.unlink()
        self.made_at_first = self.state("west").tokenizer
        # Second kill: west has signed the survivors and not yet renamed its state.
        west = self.start("west", "killed_keeping", "commit.renaming", "1")
        self.discarded = west.wait_for("private_state_recovered", job=JOB)
        self.status = west.process.wait(timeout=PATIENCE)
        self.before_second = Seen.at(self.home("west"))
        west = self.start("west")
        self.recovered = west.wait_for("private_state_recovered", job=JOB)
        self.detail = self.federation.finished(JOB)
        for member in self.running.values():
            member.wait_for("job_over", job=JOB)
        self.bundle = read_job_bundle(folder / f"bundle-{JOB}")

    @property
    def running(self):
        return {each.name: each for each in self.federation.processes if each.name in FOUR}

    def home(self, name):
        return self.federation.home(name)

    def data(self, name):
        return self.folder / f"{name}.jsonl"

    def held_out(self, name):
        return self.folder / f"{name}-held-out.jsonl"

    def state(self, name):
        return look(self.home(name), JOB, None)[1]

    def start(self, name, *support):
        words = [sys.executable, "-m", f"tests.support.{support[0]}", *support[1:], "--"] if support else []
        words = words or [str(BIN / "edge_client")]
        words += ["run", "--data", str(self.data(name)), "--home", str(self.home(name)), "--log-format", "json"]
        member = Process(name, words, self.folder / f"{name}.log")
        self.federation.processes.append(member)
        return member


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    with ExitStack() as stack:
        yield Town(tmp_path_factory.mktemp("based"), stack)


def published(detail):
    return [attempt for each in detail.rounds for attempt in each.attempts if attempt.outcome == "published"]


def test_a_killed_member_resumes_from_its_last_counted_update(town):
    assert (town.detail.job.version_number, town.detail.job.status) == (ROUNDS, pb.JOB_STATUS_FINISHED)
    without = [number for number, each in enumerate(published(town.detail), 1) if "west" not in each.survivors]
    lost = without[0]
    # What west trained in the lost round was staged beside the state of the round before, and was discarded.
    assert town.at_first == Seen(round=lost - 1, staged=1)
    assert (town.discarded["committed"], town.discarded["token"].partition("-")[0]) == (False, str(lost))
    # The next update was in a sum whose survivors west had signed. It counts, although the process was killed.
    assert town.status == -9
    assert town.before_second == Seen(round=lost - 1, staged=1)
    assert town.recovered["committed"]
    assert Seen.at(town.home("west")).round > lost
    for name in FOUR[:3]:
        assert Seen.at(town.home(name)) == Seen(round=ROUNDS, staged=0)
    # Pieces built again would differ, and so would their rows.
    assert town.state("west").tokenizer == town.made_at_first


def test_each_member_has_pieces_of_its_own_whose_rows_started_from_the_bases(town):
    states = {name: town.state(name) for name in FOUR}
    own = {name: entries_of(state.tokenizer) for name, state in states.items()}
    for one, other in combinations(FOUR, 2):
        assert len(own[one].keys() ^ own[other].keys()) > 20
    manifest, data = town.bundle.private
    table, base = manifest.unflatten(manifest.decode(data))[EMBEDDING], entries_of(town.bundle.base_tokenizer)
    for name, state in states.items():
        assert state.arrays.keys() == {EMBEDDING}
        rows = state.arrays[EMBEDDING]
        assert rows.shape == (len(own[name]) + 1, 32)
        made = [(at, pieces_of(entry, base) or [base["[UNK]"]]) for entry, at in own[name].items()]
        means = np.stack([table[found].mean(axis=0) for _, found in made])
        moved = np.linalg.norm(rows[[at for at, _ in made]] - means, axis=1)
        # Six rounds moved them, and they are still near their own start and far from another row's.
        apart = np.linalg.norm(rows[[at for at, _ in made]] - np.roll(means, 1, axis=0), axis=1)
        assert np.median(moved) > 0
        assert np.median(moved) < 0.7 * np.median(apart), name
        assert sum(len(found) > 1 for _, found in made) > 50


def test_only_lora_and_the_head_travel(town):
    bundle = town.bundle
    assert {tensor.name.split(".")[0] for tensor in bundle.manifest.tensors} == {"lora", "output"}
    # Rank 4 of two matrices in two layers, and six labels.
    assert bundle.document.values == 2 * 2 * 4 * 64 + 6 * 33
    assert {name.split(".")[0] for name in bundle.frozen} == {"encoder"}
    layout = layout_of(bundle.document, 4)
    for name in FOUR:
        receipts = [json.loads(each.read_bytes()) for each in (town.home(name) / "receipts" / JOB).glob("*.json")]
        assert receipts
        for each in receipts:
            assert sum(segment["values"] for segment in each["segments"]) == layout.values
            assert packed_size(layout.values, layout.bits) < 10_000


def test_a_member_that_wants_its_rows_secret_refuses_such_a_job(town, tmp_path):
    policy = tmp_path / "policy.toml"
    policy.write_text('schema = 1\nmechanisms = ["none"]\nvocabularies = ["own"]\n')
    bundle = town.folder / f"bundle-{JOB}"
    done = command("edge_client", "policy", "check", bundle, "--policy", policy, "--home", town.home("north"))
    assert done.returncode == ExitCode.REFUSED, done.stderr
    assert "the job's vocabulary is own-from-base; the policy allows own" in done.stdout
    succeed("edge_client", "policy", "check", bundle, "--home", town.home("north"))


def exported(town, name, out):
    """What the export of a member's own model says; it answers most of the member's own rows."""
    words = ("--home", town.home(name), "--data", town.data(name), "--json")
    done = json.loads(succeed("edge_client", "export", JOB, *words, "--out", out))
    state = town.state(name)
    assert (done["version"], done["private_values"]) == (ROUNDS, state.arrays[EMBEDDING].size)
    assert done["max_difference"] <= 1e-4
    assert (out / "tokenizer.json").read_bytes() == state.tokenizer
    # Always the most frequent label would be right for a third.
    predicted = succeed("edge_client", "predict", "--bundle", out, "--file", town.data(name), "--json")
    labels = [json.loads(line)["label"] for line in predicted.splitlines()]
    right = sum(map(str.__eq__, labels, [each.label for each in read_examples(town.data(name))]))
    assert right >= 0.7 * ROWS


def measured(town, name, *words, test=None):
    """What a member prints of its own model, on its held-out rows if no other file is named."""
    files = ("--home", town.home(name), "--data", town.data(name), "--test", test or town.held_out(name))
    return succeed("edge_client", "evaluate", JOB, *files, *words)


def figures_on(town, name, logits):
    """The figures of these logits on the member's held-out rows."""
    labels = town.bundle.document.labels
    found = figures_of(np.asarray(logits), label_ids(read_examples(town.held_out(name)), labels), labels)
    return figures_json(found)


def with_table(town, name, tokenizer, table):
    """The figures of the newest version above a vocabulary and its table, which nothing of a member's made."""
    version = town.detail.job.version
    (blob,) = (town.federation.dir / "store").rglob(f"blobs/*/{version.hex()}")
    document, frozen = town.bundle.document, town.bundle.frozen
    parts = (town.bundle.manifest, blob.read_bytes(), tokenizer, {EMBEDDING: table})
    module, encoder = whole_model(document, *parts, frozen=frozen)
    texts = [each.text for each in read_examples(town.held_out(name))]
    return figures_on(town, name, logits_of(module, encoder.encode(texts)))


def reading_of(tokenizer, rows):
    """How much of these texts a model with these pieces reads: 48 tokens of each, [CLS] and [SEP] among them."""
    pieces = Tokenizer.from_str(tokenizer.decode())
    whole = [pieces.encode(each.text, add_special_tokens=False).ids for each in rows]
    read = [each[:46] for each in whole]
    unknown = sum(each.count(pieces.token_to_id("[UNK]")) for each in read)
    tokens, cut = sum(map(len, read)), sum(len(each) > 46 for each in whole)
    return {"texts": len(rows), "cut_texts": cut, "tokens": tokens, "unknown_tokens": unknown}


def same(told, expected):
    for key, value in expected.items():
        assert told[key] == (pytest.approx(value, abs=1e-4) if isinstance(value, float) else value), key


@pytest.mark.parametrize("name", ["north", "west"])
def test_a_member_measures_its_own_table_on_its_own_rows(town, name):
    """West was killed twice. Its table is that of its last counted update."""
    state, rows = town.state(name), read_examples(town.held_out(name))
    told = json.loads(measured(town, name, "--epochs", "0", "--json"))
    assert (told["version"], told["digest"]) == (ROUNDS, town.detail.job.version.hex())
    assert (told["private_values"], told["also_in_data"]) == (state.arrays[EMBEDDING].size, 0)
    # The rows are the held-out ones, each once.
    counts = Counter(each.label for each in rows)
    assert dict(zip(told["labels"], map(sum, told["confusion"]), strict=True)) == counts
    assert (told["examples"], told["majority_accuracy"]) == (ROWS, max(counts.values()) / ROWS)
    # The vocabulary is the member's own: the base can spell the local word of no row.
    reading = reading_of(state.tokenizer, rows)
    assert reading["unknown_tokens"] < 10
    assert reading_of(town.bundle.base_tokenizer, rows)["unknown_tokens"] >= ROWS
    same(told["reading"], reading | {"unknown_share": reading["unknown_tokens"] / reading["tokens"]})
    # The table is the member's own, as training left it. Neither the base's rows for the same pieces nor the base's
    # pieces give these figures.
    same(told, with_table(town, name, state.tokenizer, state.arrays[EMBEDDING]))
    manifest, data = town.bundle.private
    public, base = manifest.unflatten(manifest.decode(data))[EMBEDDING], entries_of(town.bundle.base_tokenizer)
    started = np.zeros_like(state.arrays[EMBEDDING])
    for entry, at in entries_of(state.tokenizer).items():
        started[at] = public[pieces_of(entry, base) or [base["[UNK]"]]].mean(axis=0)
    for other in ((state.tokenizer, started), (town.bundle.base_tokenizer, public)):
        assert abs(with_table(town, name, *other)["loss"] - told["loss"]) > 0.002


def test_a_person_reads_the_same_figures(town):
    told = json.loads(measured(town, "north", "--epochs", "0", "--json"))
    lines = measured(town, "north", "--epochs", "0").splitlines()
    said = f"accuracy {100 * told['accuracy']:.2f} %, loss {told['loss']:.4f}, {ROWS} examples"
    assert lines[0] == f"version {ROUNDS} of {JOB}: {said}"
    majority = f"{100 * told['majority_accuracy']:.1f} %, always answering {told['majority_label']}"
    assert [each.split(maxsplit=2)[2] for each in lines if each.startswith("  majority class")] == [majority]
    assert lines[-1].startswith(f"{100 * told['reading']['unknown_share']:.1f} % of the tokens are unknown words")
    # Rows that a member trained on are no measure.
    lines = measured(town, "north", "--epochs", "0", test=town.data("north")).splitlines()
    assert lines[-1].startswith(f"{ROWS} of {ROWS} texts of {town.data('north')} are also in {town.data('north')}")


def test_a_member_exports_its_model_and_measures_it(town, tmp_path):
    """What `evaluate` measures is the model that `export` writes, adapted on the same rows."""
    out = tmp_path / "own"
    exported(town, "north", out)
    told = json.loads(measured(town, "north", "--json"))
    texts = [each.text for each in read_examples(town.held_out("north"))]
    same(told, figures_on(town, "north", Predictor.load(out).logits(texts)))


def test_a_member_that_was_killed_exports_its_model_too(town, tmp_path):
    exported(town, "west", tmp_path / "own")
    assert (tmp_path / "own" / "tokenizer.json").read_bytes() == town.made_at_first
