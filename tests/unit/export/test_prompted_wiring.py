"""A prompted job from its file to a prediction: what each step accepts, and what it refuses before data is read."""

import asyncio
import dataclasses
import gc
import hashlib
import json
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

import secure_agg
from coordinator.cli.job import read_bundle_parts
from coordinator.services.job_check import check_job
from coordinator.services.live import OperatorRefused
from coordinator.storage.blobs import BlobStore, open_blobs
from edge_client.agent.dry_run import _show, plan_of
from edge_client.agent.runner import Member, RunOptions, load_member
from edge_client.downloads.backbones import Backbones
from edge_client.downloads.cache import BlobCache
from edge_client.ledger.opening import open_budget
from edge_client.policy.policy import Policy
from edge_client.private_store import PrivateStore
from edge_client.session.keeping import Keeper
from edge_client.session.preparation import PreparationRefused, Preparer
from export.bundle import make_job_bundle, read_job_bundle
from export.onnx import export_model
from export.predictor import Predictor
from learning.backbones.stored import read_backbone
from learning.models import values_of
from learning.models.assembly import assembled
from learning.prompts.assembly import build_prompted, shared_backbone
from learning.text.corpus import EncodedExamples, encoder_of
from learning.text.examples import Example
from tacit.blobs import BlobNotThere
from tacit.bundle import BACKBONE_FILE, BundleInvalid, ModelFacts
from tacit.documents import DocumentInvalid, sentence_of
from tacit.job import JobDocument, JobSpec
from tacit.messages import Assignment
from tacit.pieces import PIECE
from tacit.prompt import MAX_BACKBONE_BYTES
from tacit.reason import Reason
from tests.support import party
from tests.support.tiny_models import saved
from toolkit.console import CommandFailed

torch.set_num_threads(1)

TEXTS = ["a great film", "the movie is bad", "", "it was good and terrible " * 30, "[MASK] {mask} ?"]
EXAMPLES = [Example("a great film it was", "positive"), Example("the movie is bad", "negative")] * 3
CLOZE = {
    "name": "cloze",
    "template": "{text} It was {mask}.",
    "verbaliser": {"positive": ["great", "good"], "negative": "bad"},
}
DP = {"name": "dp-sgd", "noise_multiplier": 4.0, "lot": 4, "steps": 2}


def spec_of(**changes) -> JobSpec:
    model = {"architecture": "prompted", "base": "model", "max_tokens": 24, "injection": {"name": "prompt-tuning"}}
    model |= {"task": CLOZE, **changes.pop("model", {})}
    whole = {"schema": 1, "name": "reviews", "labels": ["positive", "negative"], "mechanism": DP, "model": model}
    return JobSpec.model_validate(whole | changes)


def bundled(folder, kind="bert", name="bundle", **changes):
    if not (folder / "model").exists():
        saved(folder / "model", kind)
    make_job_bundle(spec_of(**changes), folder, folder / name)
    return read_job_bundle(folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("job")


@pytest.fixture(scope="module")
def job(folder):
    return bundled(folder)


def stored(job):
    return read_backbone(job.backbone, job.document.model.config)


# ---- documents and bundles -------------------------------------------------------------------------------------


def test_under_noise_labels_are_learnt_with_both_of_loras_matrices(folder):
    """As every figure of benchmarks/results/frontier.jsonl was measured; "up" is refused, not ignored."""
    made = bundled(folder, name="lora", model={"injection": {"name": "lora", "rank": 2}})
    assert made.document.model.injection.train is None
    assert made.document.frozen is None
    assert {each.name.rsplit(".", 2)[1] for each in made.manifest.tensors} == {"down", "up"}
    both = {"injection": {"name": "lora", "rank": 2, "train": "both"}}
    assert bundled(folder, name="both", model=both).document.values == made.document.values
    with pytest.raises(DocumentInvalid, match=r"model\.injection\.train: a prompted model that labels texts trains"):
        bundled(folder, name="up", model={"injection": {"name": "lora", "train": "up"}})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"vocabulary": {"kind": "words", "file": "w.txt"}},
            "vocabulary: a prompted model uses its base's tokenizer",
        ),
        ({"method": "fedvocab"}, "method: fedvocab keeps parts of the model private"),
        ({"method": {"name": "lg-fedavg"}}, "method: lg-fedavg keeps parts of the model private"),
        ({"labels": ["positive", "other"]}, "model.task.verbaliser: no words for the label 'other'"),
        ({"model": {"base": None, "config": {}, "backbone": "00" * 32}}, "model.base: missing; name a folder"),
        ({"model": {"base": None}}, "model: a prompted model needs a base"),
    ],
    ids=["vocabulary", "fedvocab", "lg-fedavg", "labels", "config", "nothing"],
)
def test_an_invalid_job_file_gives_a_sentence(changes, says):
    with pytest.raises(ValidationError) as refused:
        spec_of(**changes)
    assert sentence_of(refused.value).startswith(says)


def test_only_a_prompted_job_needs_no_vocabulary():
    with pytest.raises(ValidationError) as refused:
        JobSpec.model_validate({"schema": 1, "name": "desk", "labels": ["a", "b"]})
    assert sentence_of(refused.value) == "vocabulary: missing; it has no default"
    assert spec_of().vocabulary is None


def test_a_document_needs_its_backbone(job):
    raw = json.loads(job.document.canonical())
    raw["model"] |= {"base": "somewhere", "config": None, "backbone": None}
    with pytest.raises(DocumentInvalid, match=r"model\.backbone: missing"):
        JobDocument.from_json(json.dumps(raw).encode())


def test_a_bundle_never_reads_the_backbone_into_memory(folder, job):
    document = job.document
    assert document.files[BACKBONE_FILE] == document.model.backbone
    assert document.blobs == tuple(document.files.values())
    assert job.backbone == folder / "bundle" / BACKBONE_FILE
    assert hashlib.sha256(job.backbone.read_bytes()).digest() == document.model.backbone
    read, parts = read_bundle_parts(folder / "bundle")
    assert read == document
    assert {name: type(source) for name, source in parts if isinstance(source, Path)} == {
        BACKBONE_FILE: type(job.backbone)
    }
    assert not list(folder.glob(".backbone-*"))


def test_a_changed_backbone_is_found_before_the_upload(folder, tmp_path):
    job = bundled(folder, name="damaged")
    data = bytearray(job.backbone.read_bytes())
    data[-1] ^= 1
    job.backbone.write_bytes(data)
    with pytest.raises(BundleInvalid, match=r"backbone\.safetensors differs from what bundle\.json lists"):
        read_job_bundle(folder / "damaged")
    with pytest.raises(CommandFailed, match=r"backbone\.safetensors differs"):
        read_bundle_parts(folder / "damaged")


def test_max_tokens_beyond_the_backbones_positions_is_refused(folder):
    with pytest.raises(DocumentInvalid, match=r"model\.max_tokens: the backbone has 64 positions"):
        bundled(folder, name="long", model={"max_tokens": 45})
    bundled(folder, name="fits", model={"max_tokens": 44})


# ---- at the coordinator ----------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path) -> BlobStore:
    return open_blobs(f"file://{tmp_path / 'blobs'}")


def put(store, job, folder, *, but=()):
    for name in job.document.files:
        if name not in but:
            store.put((folder / "bundle" / name).read_bytes())
    return store.put(job.document.canonical())


def test_a_coordinator_accepts_a_job_whose_backbone_it_has(store, folder, job):
    digest = put(store, job, folder, but=(BACKBONE_FILE,))
    with pytest.raises(OperatorRefused, match=r"the backbone \(.*\) was not uploaded"):
        check_job(store, digest)
    store.put(job.backbone.read_bytes())
    assert check_job(store, digest) == job.document


def test_a_backbone_too_large_for_members_is_refused_unread(store, folder, job, monkeypatch):
    digest, size, get = put(store, job, folder), store.size, store.get
    backbone = job.document.model.backbone

    def sized(each):
        return MAX_BACKBONE_BYTES + 1 if each == backbone else size(each)

    def read(each):
        assert each != backbone
        return get(each)

    monkeypatch.setattr(store, "get", read)
    check_job(store, digest)
    monkeypatch.setattr(store, "size", sized)
    with pytest.raises(OperatorRefused, match="members accept 1 to 68719476736"):
        check_job(store, digest)


def test_a_backbone_of_several_pieces_needs_their_list(store, folder, job, monkeypatch):
    digest, size, backbone = put(store, job, folder), store.size, job.document.model.backbone
    monkeypatch.setattr(store, "size", lambda each: PIECE + 1 if each == backbone else size(each))
    with pytest.raises(OperatorRefused, match="no list of its pieces, so members refuse it"):
        check_job(store, digest)


# ---- the module ------------------------------------------------------------------------------------------------


def test_modules_on_one_stored_backbone_share_its_memory(job):
    one = stored(job)
    encoder = encoder_of(job.document, job.tokenizer)
    modules = [build_prompted(job.document.model, job.document.labels, encoder, one) for _ in range(2)]
    assert modules[0].backbone is modules[1].backbone is shared_backbone(one)
    assert shared_backbone(stored(job)) is not modules[0].backbone
    seen = weakref.ref(modules[0].backbone)
    del one, modules
    gc.collect()
    assert seen() is None


def test_a_members_module_is_checked_before_there_is_data(job):
    document, encoder, backbone = job.document, encoder_of(job.document, job.tokenizer), stored(job)
    start = job.manifest.decode(job.weights)
    module, _ = assembled(document, encoder, job.manifest, start, {}, backbone)
    found = assembled(document, EncodedExamples(EXAMPLES, document, job.tokenizer), job.manifest, start, {}, backbone)[
        0
    ]
    ids = torch.from_numpy(encoder.encode(TEXTS))
    assert torch.equal(module(ids), found(ids))
    with pytest.raises(DocumentInvalid, match="its backbone is missing"):
        assembled(document, encoder, job.manifest, start, {})
    longer = document.model_copy(update={"model": document.model.model_copy(update={"max_tokens": 45})})
    with pytest.raises(
        ValueError, match=r"room for 44 tokens of a text next to the prompt, fewer than max_tokens = 45"
    ):
        assembled(longer, encoder, job.manifest, start, {}, backbone)
    wider = document.model.model_copy(update={"injection": spec_of(model={"injection": "lora"}).model.injection})
    with pytest.raises(DocumentInvalid, match=r"has 1024 values, and its weights have 320"):
        assembled(document.model_copy(update={"model": wider}), encoder, job.manifest, start, {}, backbone)
    with pytest.raises(ValueError, match="whatever its vocabulary"):
        values_of(document.model, 100, 2)
    # The tokenizer has more entries than the table of words has rows.
    tables = {name: each[:60] if len(each) == 420 else each for name, each in backbone.tensors.items()}
    with pytest.raises(ValueError, match="word embedding has 60 rows"):
        assembled(document, encoder, job.manifest, start, {}, dataclasses.replace(backbone, tensors=tables))


# ---- preparation -----------------------------------------------------------------------------------------------


class Watcher:
    def training(self, *_):
        """Nobody looks."""

    def reading(self, *_):
        pass

    training_failing = training


class Machine:
    """A member's machine, and a coordinator that serves blobs by digest."""

    def __init__(self, home, identity, budget, policy, folders):
        self.home, self.served, self.asked = home, {}, []
        self.budget, self.cache = budget, BlobCache(home / "cache")
        self.backbones = Backbones(self.cache, folders=folders, allowed=policy.backbones)
        self.preparer = Preparer(
            EXAMPLES,
            identity.federation,
            identity.member,
            policy,
            budget,
            secure_agg.SystemRandom(),
            self.cache,
            "cpu",
            Watcher(),
            Keeper(PrivateStore(home, identity.federation, "data"), EXAMPLES),
            self.backbones,
        )

    def offer(self, job, *, but=()):
        for name in job.document.files:
            if name not in but:
                data = (job.backbone.parent / name).read_bytes()
                self.served[hashlib.sha256(data).digest()] = data
        self.served[job.document.digest()] = job.document.canonical()

    async def fetch(self, digest, into, limit):
        self.asked.append(digest)
        if (data := self.served.get(digest)) is None:
            raise BlobNotThere("not here")
        assert len(data) <= limit
        into.write_bytes(data)

    def prepare(self, document, round_=1):
        assignment = Assignment(document.name, round_, document.digest(), document.weights, 0, 1000)
        return asyncio.run(self.preparer.prepare(assignment, self.fetch))

    def refused(self, document):
        with pytest.raises(PreparationRefused) as refused:
            self.prepare(document)
        assert not self.budget.statement(document.name).of_job
        return refused.value

    def pinned(self):
        return {path.name.removesuffix(".pin") for path in (self.home / "cache").glob("*.pin")}


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return party.member(tmp_path_factory.mktemp("north") / "home", "localhost:7441")


@pytest.fixture
def machine(tmp_path, identity):
    opened = []

    def make(folders=(), **rules):
        policy = Policy(**rules)
        manager = open_budget(tmp_path, identity, policy, ["a text"])
        opened.append(manager)
        return Machine(tmp_path, identity, manager.__enter__(), policy, folders)

    yield make
    for manager in opened:
        manager.__exit__(None, None, None)


def test_jobs_on_one_backbone_fetch_it_once_and_the_last_frees_it(folder, job, machine):
    here, other = machine(), bundled(folder, name="other", **{"seed": 3})
    other = dataclasses.replace(other, document=other.document.model_copy(update={"name": "other"}))
    digest = job.document.model.backbone
    here.offer(job)
    here.offer(other)
    prepared = [here.prepare(job.document), here.prepare(job.document, 2), here.prepare(other.document)]
    assert all(np.abs(each.update.change).max() > 0 for each in prepared)
    assert all(len(each.update.change) == 320 for each in prepared)
    assert here.asked.count(digest) == 1
    assert here.pinned() == {digest.hex()}
    asyncio.run(here.preparer.job_over(job.document.name))
    assert here.pinned() == {digest.hex()}
    asyncio.run(here.preparer.job_over(other.document.name))
    asyncio.run(here.preparer.job_over("none of ours"))
    assert here.pinned() == set()
    # It is still in the cache, for the next job.
    here.prepare(other.document, 2)
    assert here.asked.count(digest) == 1


def test_a_backbone_on_the_members_disk_is_not_fetched(folder, job, machine):
    here = machine((folder / "nothing", folder / "model"), backbones=("disk",))
    here.offer(job, but=(BACKBONE_FILE,))
    here.prepare(job.document)
    assert job.document.model.backbone not in here.asked


def test_details_of_a_missing_backbone_stay_on_the_member(folder, job, machine):
    here = machine((folder / "secret-name",), backbones=("disk", "coordinator"))
    here.offer(job, but=(BACKBONE_FILE,))
    refused = here.refused(job.document)
    assert refused.reason == Reason.REASON_BUNDLE_UNSUITABLE
    assert refused.detail == "this member cannot get the job's backbone; its own log says why"
    for said in ("secret-name", "not here", "hub: this member's policy does not name it"):
        assert said in refused.private
    assert here.pinned() == set()


def test_a_backbone_that_does_not_fit_its_config_is_the_jobs_fault(job, machine):
    """The digest is right, so it is the operator's doing. The coordinator is told what is wrong, but no path."""
    here = machine()
    config = {**job.document.model.config, "vocab_size": 421}
    wrong = job.document.model_copy(update={"model": job.document.model.model_copy(update={"config": config})})
    here.offer(dataclasses.replace(job, document=wrong))
    refused = here.refused(wrong)
    assert refused.reason == Reason.REASON_BUNDLE_UNSUITABLE
    assert "the backbone's file has" in refused.detail
    assert str(here.home) not in refused.detail


def test_a_template_without_room_costs_no_budget(job, machine):
    here = machine()
    task = job.document.model.task.model_copy(update={"template": "word " * 30 + "{text} {mask}"})
    wrong = job.document.model_copy(update={"model": job.document.model.model_copy(update={"task": task})})
    here.offer(dataclasses.replace(job, document=wrong))
    refused = here.refused(wrong)
    assert refused.reason == Reason.REASON_BUNDLE_UNSUITABLE
    assert refused.detail.startswith("model.max_tokens: template and special tokens are")


def test_a_full_disk_is_told_only_to_the_member(job, machine, monkeypatch):
    here = machine()
    here.offer(job)

    async def full(wanted, fetch):
        raise OSError(5, "Input/output error", str(here.home / "cache"))

    monkeypatch.setattr(here.backbones, "open", full)
    refused = here.refused(job.document)
    assert refused.reason == Reason.REASON_TRAINING_FAILED
    assert str(here.home) in refused.private
    assert str(here.home) not in refused.detail


# ---- before anything is sent -----------------------------------------------------------------------------------


def test_a_dry_run_names_the_backbone(job, identity, tmp_path, capsys):
    def plan(document=job.document, **rules):
        found = plan_of(document, job.manifest, Member(tmp_path, identity, Policy(**rules), EXAMPLES, "cpu"))
        _show(found, Member(tmp_path, identity, Policy(), EXAMPLES, "cpu"))
        return found, capsys.readouterr().out

    digest, size = job.document.model.backbone, job.backbone.stat().st_size
    found, said = plan()
    assert found.as_json()["backbone"] == {
        "digest": digest.hex(),
        "bytes": size,
        "here": False,
        "sources": ["disk", "coordinator"],
    }
    assert f"stays frozen: a bert, {digest.hex()[:16]}, {size / 1e6:,.1f} MB, available from disk, then" in said
    assert not found.refusals
    there = job.document.model_copy(
        update={"model": job.document.model.model_copy(update={"hub": f"owner/name@{'a1' * 20}"})}
    )
    assert plan(there)[0].backbone.sources == ("disk", "coordinator")
    assert plan(there, backbones=("disk", "hub"))[0].backbone.sources == ("disk", "hub")
    assert plan(there, backbones=("hub",))[0].backbone.sources == ("hub",)
    assert any(each.startswith("backbones: ") for each in plan(backbones=("hub",))[0].refusals)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / digest.hex()).touch()
    assert "in this member's cache" in plan()[1]


def test_a_missing_backbone_folder_is_reported_at_once(identity, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "a great film", "label": "positive"}\n')
    options = RunOptions(data=data, home=identity.home, backbones=(tmp_path, tmp_path / "none"))
    with pytest.raises(CommandFailed, match=r"none does not exist; give --backbone a folder"):
        load_member(options)
    assert load_member(dataclasses.replace(options, backbones=(tmp_path,))).examples


# ---- what runs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", pytest.param("t5", marks=pytest.mark.long)])
def test_an_export_reads_texts_as_members_do(kind, folder, job, tmp_path):
    found = job if kind == "bert" else bundled(tmp_path, kind)
    report = export_model(
        found.document, found.manifest, found.weights, found.tokenizer, tmp_path / "out", TEXTS, backbone=stored(found)
    )
    assert report.max_difference <= 1e-4
    predictor = Predictor.load(tmp_path / "out")
    assert predictor.facts.template == "{text} It was {mask}."
    encoder = encoder_of(found.document, found.tokenizer)
    module, _ = assembled(
        found.document, encoder, found.manifest, found.manifest.decode(found.weights), {}, stored(found)
    )
    with torch.no_grad():
        expected = module(torch.from_numpy(encoder.encode(TEXTS))).numpy()
    assert np.abs(predictor.logits(TEXTS) - expected).max() <= 1e-4


def test_predicting_with_a_prompt_needs_no_training_stack(job, tmp_path):
    out = tmp_path / "out"
    export_model(job.document, job.manifest, job.weights, job.tokenizer, out, TEXTS, backbone=stored(job))
    code = (
        "import sys; from pathlib import Path; from export.predictor import Predictor;"
        "print(Predictor.load(Path(sys.argv[1])).predict(['a great film'])[0].label);"
        "assert not {'torch', 'transformers', 'grpc'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip() in ("positive", "negative")) == (0, True), done.stderr


@pytest.mark.parametrize(
    "template", ["{text} [MASK]", "no slot", "{text_b} {mask}", "{text} {mask} {mask}", "{sep} {text}"]
)
def test_a_template_of_a_bundle_is_one(template):
    facts = {"job": "a", "version": "00" * 32, "max_tokens": 9, "min_tokens": 3, "parity": 0, "texts": 1}
    assert ModelFacts.model_validate(facts).read_as is None
    assert ModelFacts.model_validate({**facts, "template": "{text}"}).read_as is not None
    with pytest.raises(ValidationError):
        ModelFacts.model_validate({**facts, "template": template})
