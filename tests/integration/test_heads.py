"""A head on a frozen encoder with real processes: three members, dp-sgd, two rounds, features kept on a disk.

The encoder is a small random BERT that the test makes. A head over its features, even without noise, has about 40 per
cent of the example's six labels right, and a constant answer a sixth.
"""

import hashlib
import json
import re
from contextlib import ExitStack

import pytest

from export.bundle import read_job_bundle
from export.predictor import Predictor
from learning.text.data import read_examples
from tacit.v1 import operator_pb2 as pb
from tests.integration.test_fedprompt import SPECIAL
from tests.support.processes import EXAMPLES, Federation, succeed, within_patience

pytestmark = pytest.mark.timeout(600)

MEMBERS = ("north", "east", "south")
JOB = "heads"
POLICY = """schema = 1
shared_parameters = ["output.weight"]
backbones = ["disk", "coordinator"]
epsilon = 100.0
"""
SPEC = """schema = 1
name = "{name}"
labels = {labels}
[model]
architecture = "prompted"
base = "encoder"
max_tokens = 48
injection = "none"
[model.task]
name = "head"
layers = [0, 1, 2]
[mechanism]
name = "dp-sgd"
noise_multiplier = 2.0
clip = 1.0
lot = 120
steps = 20
[training]
optimiser = "sgd"
learning_rate = 30.0
[rounds]
count = 2
min_members = 3
[rounds.deadlines]
training = 300
[aggregation]
coordinate_bound = 64.0
"""


def made_encoder(folder):
    """Writes a random BERT without any head, whose words are those of the example's texts."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import BertConfig, BertModel

    words = {
        word for each in read_examples(EXAMPLES / "train.jsonl") for word in re.findall("[a-z]+", each.text.lower())
    }
    entries = [*SPECIAL, *".,?!", *sorted(words)]
    made = Tokenizer(models.WordPiece({entry: at for at, entry in enumerate(entries)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(SPECIAL)
    torch.manual_seed(5)
    sizes = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    config = BertConfig(vocab_size=len(entries), max_position_embeddings=64, initializer_range=0.1, **sizes)
    BertModel(config).save_pretrained(folder)
    made.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    with ExitStack() as stack:
        federation = Federation(folder)
        stack.callback(federation.close)
        federation.enrol(*MEMBERS, policy=POLICY)
        lines = (EXAMPLES / "train.jsonl").read_text().splitlines(keepends=True)
        for number, name in enumerate(MEMBERS):
            (folder / f"{name}.jsonl").write_text("".join(lines[120 * number : 120 * (number + 1)]))
        made_encoder(folder / "encoder")
        labels = json.dumps(sorted({json.loads(line)["label"] for line in lines}))
        spec = folder / f"{JOB}.toml"
        spec.write_text(SPEC.format(name=JOB, labels=labels))
        (folder / "key").write_bytes(b"k" * 32)
        (folder / "key").chmod(0o600)
        federation.create(spec)
        for name in MEMBERS:
            more = ["--keep-features", "--private-key-file", str(folder / "key")] if name == "north" else []
            federation.start(name, "--until-finished", *more)
        detail = federation.finished(JOB)
        yield federation, read_job_bundle(folder / f"bundle-{JOB}"), detail, lines


def test_both_rounds_are_published_and_only_the_head_travels(town):
    _, bundle, detail, _ = town
    assert (detail.job.version_number, detail.job.status) == (2, pb.JOB_STATUS_FINISHED)
    assert [tensor.name for tensor in bundle.manifest.tensors] == ["output.weight"]
    assert bundle.document.values == 6 * 3 * 96
    assert bundle.document.model.task.centre.texts == 180


def test_the_exported_model_has_learnt_and_answers_without_torch(town, tmp_path):
    federation, bundle, _, lines = town
    federation.operator("export", JOB, "--out", tmp_path / "out")
    federation.operator("export", JOB, "--out", tmp_path / "hf", "--format", "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["head_layers"] == [0, 1, 2]
    rest = tmp_path / "rest.jsonl"
    rest.write_text("".join(lines[360:480]))
    examples = read_examples(rest)
    told = Predictor.load(tmp_path / "out").predict([each.text for each in examples])
    right = sum(each.label == example.label for each, example in zip(told, examples, strict=True))
    # A constant answer has about a sixth.
    assert right > 0.25 * len(examples)
    said = json.loads(federation.operator("evaluate", JOB, "--data", rest, "--json"))
    assert said["accuracy"] == pytest.approx(right / len(examples))
    assert "centre" in bundle.frozen


def test_features_stay_on_the_members_disk_sealed_and_go_when_they_are_no_longer_kept(town):
    federation, _, _, _ = town
    home = federation.home("north")
    (kept,) = (home / "features").iterdir()
    assert kept.name == hashlib.sha256(b"data").hexdigest()[:32]
    # 120 rows of three layers, sealed.
    assert kept.stat().st_size > 100 * 100 * 4
    assert b'"sealing":{' in kept.read_bytes()[:2000]
    assert not (federation.home("east") / "features").exists()
    # North's process still runs or has ended; another one takes its place.
    federation.processes[-3].stop()
    federation.start("north")
    within_patience(lambda: not kept.exists())


def test_the_ledger_charges_every_step(town):
    federation, _, _, _ = town
    home = federation.home("south")
    receipts = [json.loads(path.read_bytes()) for path in (home / "receipts" / JOB).glob("*.json")]
    published = [each for each in receipts if each["outcome"] == "published"]
    assert [(each["event"]["multiplier"], each["event"]["steps"], each["event"]["rate"]) for each in published] == [
        (2.0, 20, 1.0)
    ] * 2
    succeed("edge_client", "ledger", "verify", "--home", home)
