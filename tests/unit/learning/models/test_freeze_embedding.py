"""A frozen embedding is fetched once and never sent: it is in no update, no sum and no version."""

import asyncio
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import learning.models.assembly
import secure_agg
from benchmarks.library.simulation import Member, federate
from coordinator.services.job_check import check_job
from coordinator.services.live import OperatorRefused
from coordinator.storage.blobs import open_blobs
from export.bundle import JobBundle, make_job_bundle, read_job_bundle
from learning.artifacts import fetch_frozen, fetch_job
from learning.mechanisms.contribution import Update
from learning.mechanisms.protection import protection_of
from learning.models import EVERYTHING_SHARED, ParametersDiffer, build, shared_parameters, values_of
from learning.models.assembly import assembled
from learning.models.division import EMBEDDING
from learning.text.corpus import EncodedExamples
from learning.text.examples import Example
from learning.training.update import train_update
from tacit.documents import DocumentInvalid
from tacit.job import JobDocument, JobSpec
from tacit.manifest import Manifest
from tacit.model import TextCNNModel
from tacit.vector import layout_of
from tests.support.places import ROOT
from tests.support.sum_fleet import SeededRandom

torch.set_num_threads(1)
WORDS = ["what", "who", "where", "is", "the", "city", "man", "river", "name", "unused"]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
EXAMPLES = [
    Example(text, label)
    for text, label in (("what is the city", "a"), ("who is the man", "b"), ("where is the river", "a"))
] * 8
TEXTCNN: dict[str, Any] = {"embedding": 5, "widths": [1, 2], "maps": 4, "max_tokens": 8}
RVAE: dict[str, Any] = {"architecture": "rvae", "embedding": 5, "hidden": 4, "latent": 2, "max_tokens": 8}
MODELS: dict[str, dict[str, Any]] = {
    "textcnn": TEXTCNN,
    "bilstm": {"architecture": "bilstm", "embedding": 5, "hidden": 3, "max_tokens": 8},
    "transformer": {"architecture": "transformer", "base": "bert", "max_tokens": 8},
    "rvae": RVAE,
    "rvae, tied": {**RVAE, "tied": True},
    "rvae, published": {**RVAE, "variant": "published"},
}
DP_SGD = {"name": "dp-sgd", "noise_multiplier": 1.5, "clip": 0.5, "lot": 12, "steps": 3}
MECHANISMS: dict[str, Any] = {
    "none": "none",
    "dp-sgd": DP_SGD,
    "gaussian-update": {"name": "gaussian-update", "noise_multiplier": 0.01, "clip": 0.125, "lot": 12},
    "laplace-update": {"name": "laplace-update", "epsilon": 2.0},
    "distributed-gaussian": {"name": "distributed-gaussian", "noise_multiplier": 1.0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that jobs name: word lists, and a small random BERT as transformers saves it."""
    from transformers import AutoModel, BertConfig

    made = tmp_path_factory.mktemp("jobs")
    for name, entries in (("words.txt", WORDS), ("pieces.txt", PIECES)):
        (made / name).write_text("\n".join(entries) + "\n")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    torch.manual_seed(1)
    config = BertConfig(vocab_size=len(PIECES), max_position_embeddings=16, **sizes)
    AutoModel.from_config(config).save_pretrained(made / "bert")
    (made / "bert" / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    return made


def bundle_of(
    folder: Path, out: Path, model: dict[str, Any] = TEXTCNN, *, frozen: bool = True, **changes: Any
) -> JobBundle:
    """The bundle of a job of three members, whose embedding is frozen."""
    pieces = model.get("architecture") == "transformer"
    spec = JobSpec.model_validate(
        {
            "schema": 1,
            "name": "questions",
            "labels": ["a", "b"],
            "model": {**model, "freeze_embedding": frozen},
            "training": {"learning_rate": 0.05, "batch": 8},
            "vocabulary": {"kind": "wordpiece", "file": "pieces.txt"}
            if pieces
            else {"kind": "words", "file": "words.txt"},
            "aggregation": {"max_weight": 100},
            **changes,
        }
    )
    make_job_bundle(spec, folder, out)
    return read_job_bundle(out)


def trained(bundle: JobBundle, base: bytes, number: int = 0) -> Update:
    """One member's update from a version."""
    return train_update(
        job=bundle.document,
        manifest=bundle.manifest,
        corpus=EncodedExamples(EXAMPLES, bundle.document, bundle.public_tokenizer),
        base=base,
        protection=protection_of(bundle.document, len(EXAMPLES)),
        frozen=bundle.frozen,
        random=SeededRandom(f"member {number}"),
        seed=number,
        device="cpu",
        progress=lambda *_: None,
        cancelled=lambda: False,
    )


def summed(bundle: JobBundle, updates: list[Update]) -> np.ndarray:
    """The decoded sum of members' vectors, (d,)."""
    job, layout = bundle.document, layout_of(bundle.document, len(updates))
    total = np.zeros(layout.values, np.uint32)
    for number, update in enumerate(updates):
        protection = protection_of(job, len(EXAMPLES))
        total += protection.encode(job, update, len(updates), SeededRandom(f"rounding {number}"))
    return layout.decode(total)["update"]


# ---- what is shared -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_updates_and_versions_hold_only_what_is_trained(folder, tmp_path, model):
    bundle = bundle_of(folder, tmp_path / "bundle", MODELS[model])
    job = bundle.document
    assert bundle.frozen.keys() == {EMBEDDING}
    assert EMBEDDING not in {tensor.name for tensor in bundle.manifest.tensors}
    rows = len(bundle.frozen[EMBEDDING])
    entries = len(PIECES) if model == "transformer" else len(WORDS) + 2
    assert rows >= entries
    assert job.frozen.values == bundle.frozen[EMBEDDING].size
    assert job.values + job.frozen.values == values_of(job.model, entries, 2)
    assert len(bundle.weights) == 4 * job.values
    # Mechanism none also sends a weight and three metrics.
    assert layout_of(job, 3).values == job.values + 4
    assert trained(bundle, bundle.weights).change.shape == (job.values,)
    # The job file with a trained embedding starts from the same numbers, and is another job.
    if model != "rvae, tied":
        whole = bundle_of(folder, tmp_path / "whole", MODELS[model], frozen=False)
        assert whole.document.frozen is None
        start = whole.manifest.unflatten(whole.manifest.decode(whole.weights))
        mine = bundle.parameters(bundle.manifest.decode(bundle.weights))
        assert start.keys() == mine.keys()
        assert all(np.array_equal(start[name], mine[name]) for name in start)
        assert whole.document.digest() != job.digest()


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        *((model, {}) for model in MODELS),
        *(("textcnn", {"mechanism": each}) for each in MECHANISMS.values() if each != "none"),
        ("rvae", {"mechanism": DP_SGD}),
        pytest.param("transformer", {"mechanism": DP_SGD}, marks=pytest.mark.long),
        ("bilstm", {"method": "fedprox"}),
        ("textcnn", {"server": "fedadam"}),
        ("textcnn", {"server": "fedyogi", "mechanism": DP_SGD}),
        *(
            pytest.param(
                "textcnn",
                {
                    "mechanism": DP_SGD,
                    "aggregation": {"groups": 3, "assumed_corrupt": 1, "combine": combine},
                    "rounds": {"min_members": 9, "target_members": 9},
                },
                marks=marks,
            )
            for combine, marks in (("median", ()), ("reject-outliers", pytest.mark.long))
        ),
    ],
    ids=str,
)
def test_frozen_values_are_the_same_to_the_bit_in_every_version(folder, tmp_path, model, changes):
    bundle = bundle_of(folder, tmp_path / "bundle", MODELS[model], **changes)
    job = bundle.document
    members = [Member(EXAMPLES)] * max(3, job.rounds.min_members)
    corpus = EncodedExamples(EXAMPLES, job, bundle.public_tokenizer)
    before = {name: array.tobytes() for name, array in bundle.frozen.items()}
    start = bundle.manifest.unflatten(bundle.manifest.decode(bundle.weights))
    for done in federate(bundle, members, 2, SeededRandom("rounds")):
        assert done.values.shape == (job.values,)
        module, _ = assembled(job, corpus, bundle.manifest, done.values, {}, frozen=bundle.frozen)
        assert {EMBEDDING: shared_parameters(module)[EMBEDDING].tobytes()} == before
        # Everything else is trained.
        moved = bundle.manifest.unflatten(done.values)
        still = {name for name in start if np.array_equal(start[name], moved[name])}
        assert still <= {"encoder.embeddings.token_type_embeddings.weight", "label_bias.weight"}, still
    assert done.number == 2


def old(bundle: JobBundle) -> JobBundle:
    """The same job as bundles were made before: the embedding is frozen, and in every version and vector."""
    start = bundle.parameters(bundle.manifest.decode(bundle.weights))
    names = [EMBEDDING, *(tensor.name for tensor in bundle.manifest.tensors)]
    manifest = Manifest.of({name: start[name] for name in names})
    weights = manifest.encode(manifest.flatten(start))
    job = bundle.document.model_copy(
        update={
            "frozen": None,
            "values": manifest.values,
            "manifest": manifest.digest(),
            "weights": hashlib.sha256(weights).digest(),
        }
    )
    return replace(bundle, document=job, manifest=manifest, weights=weights, frozen={})


@pytest.mark.parametrize("mechanism", ["none", "dp-sgd"])
def test_the_sum_is_the_old_one_on_what_is_trained(folder, tmp_path, monkeypatch, mechanism):
    bundle = bundle_of(folder, tmp_path / "bundle", mechanism=MECHANISMS[mechanism])
    updates = [trained(bundle, bundle.weights, number) for number in range(3)]
    found = summed(bundle, updates)
    before = old(bundle)
    monkeypatch.setattr(learning.models.assembly, "division_of", lambda *_: EVERYTHING_SHARED)
    expected = [trained(before, before.weights, number) for number in range(3)]
    size = bundle.document.frozen.values
    for mine, theirs in zip(updates, expected, strict=True):
        assert not theirs.change[:size].any()
        assert np.array_equal(mine.change, theirs.change[size:])
        assert mine.change.any()
    # Rounding is random, by a step of the grid for each member at most.
    step = 3 / layout_of(bundle.document, 3).segments[0].scale
    assert np.abs(found - summed(before, expected)[size:]).max() <= step
    assert np.abs(found).max() > 100 * step


@pytest.mark.parametrize("mechanism", ["gaussian-update", "laplace-update", "distributed-gaussian"])
def test_noise_and_clipping_are_over_what_is_shared(folder, tmp_path, mechanism):
    """Until now these mechanisms refused a frozen embedding, because they noise every coordinate that is sent."""
    bundle = bundle_of(folder, tmp_path / "bundle", mechanism=MECHANISMS[mechanism])
    job = bundle.document
    assert layout_of(job, 3).values == job.values < job.frozen.values + job.values
    change = trained(bundle, bundle.weights).change
    assert change.shape == (job.values,)
    if mechanism == "gaussian-update":
        # One clip, and noise of a hundredth of it on each coordinate.
        assert np.linalg.norm(change) == pytest.approx(0.125, rel=0.1)


def test_the_first_hours_upload_is_a_hundredth_of_its_model(tmp_path):
    """The changelog gives these numbers."""
    place = ROOT / "examples" / "first-hour"
    make_job_bundle(JobSpec.from_toml(place / "small.toml"), place, tmp_path / "bundle")
    bundle = read_job_bundle(tmp_path / "bundle")
    layout = layout_of(bundle.document, 3)
    assert (bundle.document.values, bundle.document.frozen.values) == (8_422, 1_002_496)
    assert secure_agg.packed_size(layout.values, layout.bits) == 28_425
    whole = layout_of(old(bundle).document, 3)
    assert secure_agg.packed_size(whole.values, whole.bits) == 3_411_849
    assert len(bundle.weights) == 33_688


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
@pytest.mark.parametrize("mechanism", ["none", "dp-sgd"])
def test_an_embedding_that_is_not_frozen_is_trained_and_sent(folder, tmp_path, mechanism, optimiser):
    training = {"optimiser": optimiser, "learning_rate": 0.05, "batch": 8}
    bundle = bundle_of(folder, tmp_path / "bundle", frozen=False, mechanism=MECHANISMS[mechanism], training=training)
    updates = [trained(bundle, bundle.weights, number) for number in range(3)]
    for change in (updates[0].change, summed(bundle, updates)):
        moved = bundle.manifest.unflatten(change.astype(np.float32))[EMBEDDING].any(axis=1)
        assert not moved[0], "the padding"
        # Without noise only rows of used words move; under dp-sgd every row does.
        assert moved[-1] == (mechanism == "dp-sgd")
        assert moved[2]


@pytest.mark.parametrize("frozen", [True, False])
def test_narrowing_keeps_which_parameters_are_trained(frozen):
    model = TextCNNModel.model_validate({**TEXTCNN, "freeze_embedding": frozen})
    module = build(model, len(WORDS), 2, 0, seed=1)
    before = shared_parameters(module)
    with module.narrowed(np.array([[1, 2, 3]])):
        assert module.embedding.weight.requires_grad is not frozen
        assert all(parameter.requires_grad for parameter in module.filters.parameters())
    assert module.embedding.weight.requires_grad is not frozen
    after = shared_parameters(module)
    assert all(np.array_equal(before[name], after[name]) for name in before)


# ---- what is refused ------------------------------------------------------------------------------------------------


def served(bundle: JobBundle, folder: Path) -> dict[bytes, bytes]:
    """The bundle's files, and its document, by digest."""
    files = [path.read_bytes() for path in folder.iterdir()]
    return {hashlib.sha256(data).digest(): data for data in (*files, bundle.document.canonical())}


def fetched(blobs: dict[bytes, bytes], job: JobDocument, manifest: Manifest) -> dict[str, np.ndarray]:
    """What a member fetches of it: document first, then the frozen values."""

    async def blob(digest: bytes, limit: int) -> bytes:
        assert len(blobs[digest]) <= limit
        return blobs[digest]

    async def work() -> dict[str, np.ndarray]:
        return await fetch_frozen(blob, await fetch_job(blob, job.name, job.digest()), manifest)

    return asyncio.run(work())


def test_a_member_fetches_frozen_values_by_digest(folder, tmp_path):
    bundle = bundle_of(folder, tmp_path / "bundle")
    blobs = served(bundle, tmp_path / "bundle")
    assert set(bundle.document.blobs) <= blobs.keys()
    found = fetched(blobs, bundle.document, bundle.manifest)
    assert {name: array.tobytes() for name, array in found.items()} == {EMBEDDING: bundle.frozen[EMBEDDING].tobytes()}
    whole = bundle_of(folder, tmp_path / "whole", frozen=False)
    assert fetched(served(whole, tmp_path / "whole"), whole.document, whole.manifest) == {}
    blobs[bundle.document.frozen.weights] = np.full(bundle.document.frozen.values, 1e5, "<f4").tobytes()
    with pytest.raises(DocumentInvalid, match="the start of frozen parameters has a weight beyond 10000"):
        fetched(blobs, bundle.document, bundle.manifest)


def test_a_document_that_shares_what_it_freezes_is_refused(folder, tmp_path):
    """Documents made before name no frozen values; a later one could name them and share them too."""
    bundle = bundle_of(folder, tmp_path / "bundle")
    before = old(bundle).document.canonical()
    with pytest.raises(DocumentInvalid, match=r"frozen: missing; .* `coordinator job bundle`"):
        JobDocument.from_json(before)
    without = {key: value for key, value in json.loads(before).items() if key != "frozen"}
    with pytest.raises(DocumentInvalid, match="frozen: missing"):
        JobDocument.from_json(json.dumps(without).encode())
    said = json.loads(bundle.document.canonical())
    said["model"]["freeze_embedding"] = False
    with pytest.raises(DocumentInvalid, match=r"frozen: this job freezes nothing .* `coordinator job bundle`"):
        JobDocument.from_json(json.dumps(said).encode())


def test_a_manifest_that_shares_what_the_job_freezes_is_refused(folder, tmp_path):
    """By the member, and by the coordinator when the job is created."""
    bundle = bundle_of(folder, tmp_path / "bundle")
    whole = old(bundle)
    job = whole.document.model_copy(update={"frozen": bundle.document.frozen})
    both = replace(whole, document=job)
    blobs = served(both, tmp_path / "bundle")
    says = "the manifest shares embedding.weight, which the job freezes; make the bundle again"
    with pytest.raises(DocumentInvalid, match=says):
        fetched(blobs, job, whole.manifest)
    store = open_blobs(f"file://{tmp_path / 'store'}")
    for data in (*blobs.values(), whole.manifest.canonical(), whole.weights):
        store.put(data)
    assert check_job(store, bundle.document.digest()) == bundle.document
    with pytest.raises(OperatorRefused, match=says):
        check_job(store, job.digest())
    # And if neither had looked: such a version does not load.
    corpus = EncodedExamples(EXAMPLES, job, bundle.public_tokenizer)
    version = whole.manifest.decode(whole.weights)
    with pytest.raises(DocumentInvalid, match=r"has 146 values with 12 entries, and its weights have 206"):
        assembled(job, corpus, whole.manifest, version, {}, frozen=bundle.frozen)
    with pytest.raises(ParametersDiffer, match=r"surplus \['embedding.weight'\]"):
        assembled(job, corpus, whole.manifest, version, {})
    with pytest.raises(DocumentInvalid, match="and its weights have 86"):
        assembled(job, corpus, bundle.manifest, version[60:], {})


def test_frozen_values_that_do_not_fit_are_refused_when_the_job_is_created(folder, tmp_path):
    bundle = bundle_of(folder, tmp_path / "bundle")
    store = open_blobs(f"file://{tmp_path / 'store'}")
    blobs = served(bundle, tmp_path / "bundle")
    for digest, data in blobs.items():
        if digest != bundle.document.frozen.weights:
            store.put(data)
    with pytest.raises(OperatorRefused, match=r"the frozen parameters' start \(.*\) was not uploaded"):
        check_job(store, bundle.document.digest())
    short = bundle.document.frozen.model_copy(update={"weights": store.put(b"\0" * 8)})
    wrong = bundle.document.model_copy(update={"frozen": short})
    with pytest.raises(OperatorRefused, match="the frozen parameters' start have 8 bytes, but the manifest needs 240"):
        check_job(store, store.put(wrong.canonical()))
    other = bundle.document.frozen.model_copy(update={"values": 59})
    wrong = bundle.document.model_copy(update={"frozen": other})
    with pytest.raises(OperatorRefused, match="the frozen parameters' manifest has 60 values, not 59"):
        check_job(store, store.put(wrong.canonical()))
