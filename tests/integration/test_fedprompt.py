"""FedPrompt with real processes: examples/fedprompt.toml, with a small random BERT in place of a trained one.

Mutual TLS, secure aggregation in three groups, policies that share nothing but prompts and take no backbone from the
hub, a ledger for each of nine members, and dp-sgd. North has the backbone on its disk; the others fetch it once from
the coordinator. What north and east send is recorded.
"""

import asyncio
import hashlib
import json
import re
import shutil
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise

import grpc
import numpy as np
import pytest

from coordinator.cli.common import operator_stub
from coordinator.config import CoordinatorFolder
from coordinator.services.credentials import federation_credentials
from edge_client.identity.enrolment import enrol
from edge_client.identity.home import MemberIdentity
from export.bundle import read_job_bundle
from export.predictor import Predictor
from learning.text.data import read_examples
from secure_agg import packed_size
from tacit.blobs import fetch_blob
from tacit.job import JobSpec
from tacit.v1 import operator_pb2 as pb
from tacit.vector import layout_of
from tests.support.processes import EXAMPLES, ROOT, Federation, behind, command, succeed, within_patience  # type: ignore[attr-defined]
from tests.support.recorder import Relay
from toolkit.console import ExitCode

# The first test sets up everything, with ten processes.
pytestmark = pytest.mark.timeout(600)

NINE = ("north", "east", "south", "west", "aster", "birch", "cedar", "dill", "elder")
EXAMPLE = ROOT / "examples" / "fedprompt.toml"
JOB, AGAIN, ROWS = "fedprompt", "again", 60
POLICY = """schema = 1
shared_parameters = ["prompt.*"]
backbones = ["disk", "coordinator"]
base_models = [%s]
"""
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def made_backbone(folder, spec):
    """Writes a random BERT with a masked-word head, and a vocabulary made from the example's texts."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import BertConfig, BertForMaskedLM

    words = {word for each in read_examples(EXAMPLES / "train.jsonl") for word in each.text.lower().split()}
    words = {word for word in words if word.isalpha()} | {"it", "is", "about"}
    words |= {word for each in spec.model.task.verbaliser.values() for word in each}
    entries = [*SPECIAL, *".,?!", *sorted(words)]
    made = Tokenizer(models.WordPiece({entry: at for at, entry in enumerate(entries)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(SPECIAL)
    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(entries), max_position_embeddings=128, initializer_range=0.2, **sizes)
    BertForMaskedLM(config).save_pretrained(folder)
    made.save(str(folder / "tokenizer.json"))


class Town:
    """The federation with its nine members, two of them behind a relay."""

    def __init__(self, folder, stack):
        self.folder = folder
        self.running = {}
        # The job file expects the backbone beside it.
        self.spec = shutil.copy(EXAMPLE, folder)
        made_backbone(folder / "backbone", JobSpec.from_toml(EXAMPLE))
        self.federation = Federation(folder)
        stack.callback(self.federation.close)
        succeed("coordinator", "job", "bundle", self.spec, "--out", folder / f"bundle-{JOB}")
        self.bundle = read_job_bundle(folder / f"bundle-{JOB}")
        asyncio.run(self._enrol())
        lines = (EXAMPLES / "train.jsonl").read_text().splitlines(keepends=True)
        self.relays = {}
        for number, name in enumerate(NINE):
            self.federation.data(name).write_text("".join(lines[ROWS * number : ROWS * (number + 1)]))
        for name in NINE[:2]:
            identity = MemberIdentity.load(self.federation.home(name))
            towards = grpc.ssl_channel_credentials(identity.root_pem, identity.key_pem, identity.certificate_pem)
            credentials = federation_credentials(CoordinatorFolder(self.federation.dir))
            self.relays[name] = Relay(credentials, f"localhost:{self.federation.port}", towards)
            stack.callback(self.relays[name].close)
            behind(self.relays[name], self.federation.home(name))

    async def _enrol(self):
        document = self.bundle.document
        policy = POLICY % ", ".join(f'"{digest.hex()}"' for digest in (document.weights, document.model.backbone))
        async with operator_stub(self.federation.dir / "operator") as stub:
            for name in NINE:
                asked = pb.InviteMemberRequest(name=name, valid_seconds=3600)
                await enrol(self.federation.home(name), (await stub.InviteMember(asked)).token)
                (self.federation.home(name) / "policy.toml").write_text(policy)

    @property
    def backbone(self):
        """The backbone's digest."""
        return self.bundle.document.model.backbone

    def asked_for(self, sent):
        """The number of requests for the backbone, and for any blob."""
        digests = [each.digest for each in sent.parsed("FederationService/FetchBlob")]
        return digests.count(self.backbone), len(digests)

    def version(self, digest):
        async def fetch():
            data = bytearray()
            async with operator_stub(self.federation.dir / "operator") as stub:
                await fetch_blob(stub.FetchBlob, digest, data)
            return bytes(data)

        return self.bundle.manifest.decode(asyncio.run(fetch()))


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    with ExitStack() as stack:
        yield Town(tmp_path_factory.mktemp("fedprompt"), stack)


@dataclass(frozen=True)
class Story:
    """What happened while the two jobs ran.

    `first` and `second` hold what north and east sent in each job; `kept` is the answer to the removal of the backbone
    while the first job was open.
    """

    kept: subprocess.CompletedProcess[str]
    detail: pb.JobDetail
    again: pb.JobDetail
    plan: dict
    found: dict
    first: dict
    second: dict


@pytest.fixture(scope="module")
def story(town):
    federation = town.federation
    federation.operator("job", "create", "--bundle", town.folder / f"bundle-{JOB}")
    federation.operator("backbone", "add", town.folder / "backbone", "--name", "words")
    kept = command("coordinator", "backbone", "remove", "words", "--dir", federation.dir)
    home, data = federation.home("elder"), federation.data("elder")
    plan = json.loads(succeed("edge_client", "run", "--dry-run", "--data", data, "--home", home, "--json"))
    for name in NINE:
        more = ["--backbone", str(town.folder / "backbone")] if name == "north" else []
        town.running[name] = federation.start(name, *more)
    found = {name: town.running[name].wait_for("backbone_found") for name in NINE}
    detail = federation.finished(JOB)
    for name in NINE:
        town.running[name].wait_for("job_over", job=JOB)
    first = {name: relay.take() for name, relay in town.relays.items()}
    # Another job with the same backbone.
    other = town.folder / f"{AGAIN}.toml"
    other.write_text(
        EXAMPLE.read_text().replace(f'name = "{JOB}"', f'name = "{AGAIN}"').replace("count = 3", "count = 1")
    )
    federation.create(other)
    again = federation.finished(AGAIN)
    for name in NINE:
        town.running[name].wait_for("job_over", job=AGAIN)
    second = {name: relay.take() for name, relay in town.relays.items()}
    return Story(kept, detail, again, plan, found, first, second)


def test_the_example_runs_to_its_end_in_three_groups(town, story):
    assert (story.detail.job.version_number, story.again.job.version_number) == (3, 1)
    attempts = [each for round_ in story.detail.rounds for each in round_.attempts if each.outcome == "published"]
    assert len(attempts) == 3
    # Every upload holds a prompt's values and nothing else: no metrics, no backbone.
    document = town.bundle.document
    assert document.aggregation.groups == 3
    assert document.values == 20 * 32
    layout = layout_of(document, len(NINE))
    for sent in story.first.values():
        uploads = [each for each in sent.parsed("FederationService/UploadMasked") if each.WhichOneof("part") == "data"]
        # One upload in each attempt, including an abandoned one.
        size, total = packed_size(layout.values, layout.bits), sum(len(each.data) for each in uploads)
        assert total >= 3 * size
        assert total % size == 0
    versions = [town.version(each.digest) for each in story.detail.versions]
    assert all(np.abs(after - before).max() > 0 for before, after in pairwise(versions))


def test_a_backbone_is_fetched_at_most_once(town, story):
    assert story.found.pop("north")["source"] == "disk"
    assert {each["source"] for each in story.found.values()} == {"coordinator"}
    # North had the backbone and east fetched it once. Neither fetched it for the second job, but both fetched other
    # blobs.
    assert town.asked_for(story.first["north"])[0] == 0
    assert town.asked_for(story.first["east"])[0] == 1
    for sent in story.second.values():
        backbone, anything = town.asked_for(sent)
        assert backbone == 0
        assert anything > 0
    # The cached file is the same on every member, whatever files the backbone came from.
    digest = town.backbone
    for name in ("north", "east"):
        cached = (town.federation.home(name) / "cache" / digest.hex()).read_bytes()
        assert hashlib.sha256(cached).digest() == digest
    # Both jobs are over, so the cache may delete the file when it needs room.
    within_patience(lambda: not list(town.folder.glob("home-*/cache/*.pin")))


def test_a_backbone_of_an_open_job_is_not_removed(town, story):
    assert story.kept.returncode == ExitCode.REFUSED
    assert f"the open job {JOB} uses words; wait until it is finished" in story.kept.stderr
    # Both jobs are finished now. The coordinator keeps its own copy.
    assert "Removed words" in town.federation.operator("backbone", "remove", "words")
    assert not (town.federation.dir / "operator" / "backbones" / "words").exists()


def test_a_further_job_starts_from_a_version(town, story):
    file, bundle = town.folder / "further.toml", town.folder / "bundle-further"
    named = f'name = "further"\nstart = "{JOB}:2"'
    file.write_text(EXAMPLE.read_text().replace(f'name = "{JOB}"', named))
    town.federation.operator("job", "bundle", file, "--out", bundle)
    digest = next(each.digest for each in story.detail.versions if each.number == 2)
    assert read_job_bundle(bundle).document.weights == digest
    town.federation.operator("job", "create", "--bundle", bundle)
    assert f"Started from version 2 of {JOB}" in town.federation.operator("job", "show", "further")
    shown = json.loads(town.federation.operator("job", "show", "further", "--json"))
    assert shown["earlier"]["document"] == town.bundle.document.digest().hex()
    town.federation.operator("job", "abort", "further", "--yes")
    file.write_text(file.read_text().replace(f"{JOB}:2", f"{JOB}:9"))
    refused = command("coordinator", "job", "bundle", file, "--out", bundle, "--dir", town.federation.dir)
    assert (refused.returncode, f"job {JOB} has no version 9; the newest is 3" in refused.stderr) == (5, True)


def test_the_plan_names_the_backbone_before_it_is_fetched(town, story):
    assert story.plan["takes_part"]
    assert story.plan["backbone"] == {
        "digest": town.backbone.hex(),
        "bytes": town.bundle.backbone.stat().st_size,
        "here": False,
        "sources": ["disk", "coordinator"],
    }
    assert story.plan["parameters"].keys() == {"prompt.vectors.weight"}
    assert story.plan["epsilon_of_all_rounds"] > 0


def test_the_ledger_has_every_round(town, story):
    home = town.federation.home("south")
    ledger = json.loads(succeed("edge_client", "ledger", "show", "--home", home, "--json").splitlines()[0])
    assert 0 < ledger["spent"]["epsilon"] < 8
    receipts = [json.loads(path.read_bytes()) for path in (home / "receipts" / JOB).glob("*.json")]
    published = [each for each in receipts if each["outcome"] == "published"]
    assert len(published) == 3
    for each in published:
        assert (each["event"]["multiplier"], each["event"]["steps"]) == (2.0, 10)
    succeed("edge_client", "ledger", "verify", "--home", home)


def test_both_sides_export_the_same_model_and_it_predicts(town, story, tmp_path):
    theirs, own = tmp_path / "theirs", tmp_path / "own"
    home, data = town.federation.home("west"), town.federation.data("west")
    town.federation.operator("export", JOB, "--out", theirs)
    done = json.loads(
        succeed("edge_client", "export", JOB, "--home", home, "--data", data, "--out", own, "--epochs", "0", "--json")
    )
    assert (done["version"], done["private_values"]) == (3, 0)
    assert done["max_difference"] <= 1e-4
    assert (own / "model.onnx").read_bytes() == (theirs / "model.onnx").read_bytes()
    cards = [(folder / "README.md").read_text() for folder in (theirs, own)]
    assert all("| version | 3, `" in card for card in cards)
    # Only the coordinator knows when the version was made, and of how many members' updates.
    assert ["date of the version" in card for card in cards] == [True, False]
    assert re.search(r"[0-9]+ in the last \|", cards[0])
    refused = command(
        "coordinator", "export", JOB, "--out", tmp_path / "hf", "--format", "hf", "--dir", town.federation.dir
    )
    assert (refused.returncode, (tmp_path / "hf").exists()) == (ExitCode.USAGE, False)
    assert "export it with --format onnx" in refused.stderr
    predicted = succeed("edge_client", "predict", "--bundle", own, "--file", data, "--json").splitlines()
    labels = [json.loads(line)["label"] for line in predicted]
    examples = read_examples(data)
    assert labels == [each.label for each in Predictor.load(theirs).predict([each.text for each in examples])]


def test_both_sides_measure_the_same_figures_and_the_best_version_is_marked(town, story, tmp_path):
    """The operator measures every version with ONNX, a member the newest with torch."""
    home, data = town.federation.home("west"), town.federation.data("west")
    said = town.federation.operator("evaluate", JOB, "--data", data, "--versions", "all", "--json")
    rows = [json.loads(line) for line in said.splitlines()]
    assert [row["version_number"] for row in rows] == [0, 1, 2, 3]
    (best,) = [row for row in rows if row["best"]]
    assert best["accuracy"] == max(row["accuracy"] for row in rows)
    before = {path for path in home.rglob("*") if path.is_file()}
    words = ("--home", home, "--data", town.federation.data("east"), "--test", data)
    own = json.loads(succeed("edge_client", "evaluate", JOB, *words, "--json"))
    assert {path for path in home.rglob("*") if path.is_file()} == before
    assert (own["version"], own["private_values"], own["also_in_data"]) == (3, 0, 0)
    for key in ("accuracy", "accuracy_interval", "confusion", "labels", "majority_label", "macro_f1"):
        assert own[key] == rows[-1][key], key
    assert own["loss"] == pytest.approx(rows[-1]["loss"], abs=1e-4)
    examples = read_examples(data)
    assert sum(map(sum, own["confusion"])) == own["examples"] == len(examples)
    truth = [each.label for each in examples]
    assert [sum(row) for row in own["confusion"]] == [truth.count(label) for label in own["labels"]]
    shown = town.federation.operator("evaluate", JOB, "--data", data)
    assert f"always answering {own['majority_label']}" in shown
    stored = json.loads(town.federation.operator("job", "show", JOB, "--json"))
    assert stored["evaluation"]["accuracy"] == own["accuracy"]
    refused = command("edge_client", "evaluate", "desk", *words)
    assert (refused.returncode, "there is no job desk" in refused.stderr) == (ExitCode.NOT_FOUND, True)


def test_two_exported_models_share_one_backbone_file(town, story, tmp_path):
    """The operator exports one model and a member the other. The second adds kilobytes."""
    home, data = town.federation.home("west"), town.federation.data("west")
    operators = json.loads(town.federation.operator("export", JOB, "--out", tmp_path / JOB, "--split", "--json"))
    words = ("--home", home, "--data", data, "--out", tmp_path / AGAIN, "--epochs", "0", "--split", "--json")
    members = json.loads(succeed("edge_client", "export", AGAIN, *words))
    assert operators["backbone"] == members["backbone"]
    assert (operators["backbone_written"], members["backbone_written"]) == (True, False)
    assert len(list(tmp_path.iterdir())) == 3
    assert sum(path.stat().st_size for path in (tmp_path / AGAIN).iterdir() if path.name != "README.md") < 8000
    # The whole export predicts the same labels.
    town.federation.operator("export", JOB, "--out", tmp_path / "whole")
    said = [
        [
            json.loads(line)["label"]
            for line in succeed("edge_client", "predict", *of, "--file", data, "--json").split("\n")
            if line
        ]
        for of in (("--bundle", tmp_path / JOB), ("--bundle", tmp_path / "whole"))
    ]
    assert said[0] == said[1]
    assert len(said[0]) == ROWS


def test_a_disk_only_policy_does_not_fetch_a_backbone(town, story, tmp_path):
    """The member takes backbones from its own disk only. The error says why nothing is fetched, and what to do."""
    policy = tmp_path / "policy.toml"
    policy.write_text('schema = 1\nbackbones = ["disk"]\n')
    home = town.federation.home("dill")
    shutil.rmtree(home / "cache")
    words = ("--home", home, "--data", town.federation.data("dill"), "--out", tmp_path / "own")
    (home / "policy.toml").write_text(policy.read_text())
    done = command("edge_client", "export", JOB, *words)
    assert done.returncode == ExitCode.NOT_FOUND
    assert "coordinator: this member's policy does not name it in `backbones`" in done.stderr
    assert "name it with --backbone" in done.stderr
