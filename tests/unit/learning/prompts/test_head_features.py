"""Features of a head over chosen layers: the library's numbers, one row at a time, computed once and no more."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from pydantic import ValidationError

import secure_agg
from benchmarks.library.simulation import Member, corpora_of, federate
from export.bundle import make_job_bundle, read_job_bundle
from export.onnx import export_model
from export.predictor import Predictor
from learning.backbones.stored import read_backbone
from learning.mechanisms.protection import protection_of
from learning.models.assembly import whole_model
from learning.prompts.features import FeatureStore, features_of, kind_of
from learning.prompts.model import PromptedModel
from learning.text.corpus import EncodedExamples
from learning.text.examples import Example
from learning.training.kept import Kept
from learning.training.outcome import TrainingCancelled
from learning.training.update import train_update
from simulation.scoring import answers_of
from tacit.documents import sentence_of
from tacit.job import JobSpec
from tests.support.tiny_models import saved

torch.set_num_threads(1)

LABELS = ["good", "bad"]
DP = {"name": "dp-sgd", "noise_multiplier": 0.4, "lot": 20, "steps": 8, "clip": 1.0}
SGD = {"optimiser": "sgd", "learning_rate": 8.0}


def spec_of(task=None, **changes):
    model = {"architecture": "prompted", "base": "base", "max_tokens": 24, "injection": "none"}
    model |= {"task": {"name": "head"} if task is None else task} | changes.pop("model", {})
    whole = {"schema": 1, "name": "heads", "labels": LABELS, "model": model, "aggregation": {"coordinate_bound": 64}}
    return JobSpec.model_validate(whole | changes)


def bundled(folder, kind="bert", name="bundle", **changes):
    if not (folder / "base").exists():
        saved(folder / "base", kind)
    make_job_bundle(spec_of(**changes), folder, folder / name)
    return read_job_bundle(folder / name)


def whole(job):
    backbone = read_backbone(job.backbone, job.document.model.config)
    module, encoder = whole_model(
        job.document, job.manifest, job.weights, job.tokenizer, backbone=backbone, frozen=job.frozen
    )
    assert isinstance(module, PromptedModel)
    return module, encoder, backbone


def examples(rows=40):
    good = ["a great film", "it was good", "great and good movie", "yes it was great"]
    bad = ["a terrible film", "it was bad", "terrible and bad movie", "no it was terrible"]
    return [
        Example(f"{(good if place % 2 == 0 else bad)[place % 4]} {'word ' * (place % 5)}", LABELS[place % 2])
        for place in range(rows)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="module")
def job(folder):
    return bundled(folder)


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "electra"])
def test_features_are_the_librarys_means_centred_and_of_unit_length(tmp_path, kind):
    from transformers import AutoModel

    job = bundled(tmp_path, kind, task={"name": "head", "layers": [0, 1, 2]})
    module, encoder, _ = whole(job)
    ids = torch.from_numpy(encoder.encode(["a great film", "bad", "it was good and terrible " * 3]))
    seen = ids != encoder.pad_id
    library = AutoModel.from_pretrained(tmp_path / "base").eval()
    with torch.no_grad():
        states = library(input_ids=ids, attention_mask=seen.long(), output_hidden_states=True).hidden_states
        means = [(each * seen[:, :, None]).sum(dim=1) / seen.sum(dim=1, keepdim=True) for each in states]
        expected = torch.cat(means, dim=1) - torch.from_numpy(job.frozen["centre"])
        found = module.features(ids, None)
    assert torch.allclose(found, expected / expected.norm(dim=1, keepdim=True), atol=1e-5)
    assert torch.allclose(found.norm(dim=1), torch.ones(3), atol=1e-5)


def test_the_centre_is_the_mean_over_the_public_text_that_the_document_names(tmp_path):
    (tmp_path / "public.txt").write_text("a great film\n\nit was bad and terrible\n")
    job = bundled(tmp_path, task={"name": "head", "layers": [1], "centre": {"file": "public.txt"}})
    module, encoder, _ = whole(job)
    with torch.no_grad():
        means = [
            module.uncentred(torch.from_numpy(encoder.encode([text])))
            for text in ("a great film", "it was bad and terrible")
        ]
    assert np.allclose(job.frozen["centre"], torch.cat(means).mean(dim=0), atol=1e-6)
    centre = job.document.model.task.centre
    assert (centre.name, centre.texts, centre.file) == ("public.txt", 2, None)
    (tmp_path / "public.txt").write_text("a great film\nit was bad and terrible.\n")
    other = bundled(tmp_path, name="other", task={"name": "head", "layers": [1], "centre": {"file": "public.txt"}})
    assert other.document.model.task.centre.digest != centre.digest
    assert kind_of(other.document) != kind_of(job.document)


def test_a_head_alone_reads_layers_at_each_third_and_trains_nothing_else(job):
    assert job.document.model.task.layers == (1, 2)
    assert [tensor.name for tensor in job.manifest.tensors] == ["output.weight"]
    assert set(job.frozen) == {"centre", "output.bias"}
    assert not job.frozen["output.bias"].any()
    assert job.document.values == 2 * 2 * 16


def test_a_rows_features_do_not_depend_on_other_rows(job):
    module, encoder, _ = whole(job)
    texts = ["a great film", "it was bad " * 4, "good", "", "the movie is terrible and bad and no"]
    kind = kind_of(job.document)
    together = features_of(module, encoder.encode(texts), kind, FeatureStore())
    for place, text in enumerate(texts):
        for partners in ([], ["word " * 20], texts[::-1]):
            alone = features_of(module, encoder.encode([text, *partners]), kind, FeatureStore())[0]
            assert np.abs(alone - together[place]).max() <= 1e-6


def test_only_new_rows_are_computed(job):
    module, encoder, _ = whole(job)
    store, kind = FeatureStore(), kind_of(job.document)
    computed = []
    inner = module.features

    def counted(ids, prompt):
        computed.append(int((ids != encoder.pad_id).any(dim=1).sum()))
        return inner(ids, prompt)

    module.features = counted
    texts = ["a great film", "it was bad", "a great film", "good"]
    first = features_of(module, encoder.encode(texts), kind, store)
    # Equal rows are one.
    assert sum(computed) == 3
    again = features_of(module, encoder.encode(texts), kind, store)
    assert sum(computed) == 3
    assert (first == again).all()
    # An edited row alone; with a longer one beside it, the others are padded further and are still the same rows.
    edited = features_of(module, encoder.encode(["a great film", "it was terrible " * 3, "good"]), kind, store)
    assert sum(computed) == 4
    assert (edited[[0, 2]] == first[[0, 3]]).all()
    # Another kind shares nothing.
    features_of(module, encoder.encode(texts[:1]), b"\1" * 32, store)
    assert sum(computed) == 5


def test_reading_that_is_cancelled_goes_on_where_it_was_and_changes_no_bit(job):
    module, encoder, _ = whole(job)
    words = ["a", "great", "film", "it", "was", "good", "bad", "terrible", "movie", "and", "yes", "no"]
    draws = np.random.default_rng(0)
    texts = [" ".join(draws.choice(words, 2 + place % 15)) for place in range(200)]
    ids, kind, told = encoder.encode(texts), kind_of(job.document), []
    at_once = features_of(module, ids, kind, FeatureStore(), reading=lambda done, rows: told.append((done, rows)))
    rows = told[-1][1]
    assert len(told) > 3
    store, seen = FeatureStore(), []
    with pytest.raises(TrainingCancelled):
        features_of(
            module,
            ids,
            kind,
            store,
            cancelled=lambda: len(seen) == 2,
            reading=lambda done, rows: seen.append((done, rows)),
        )
    assert seen == told[:2]
    rest = []
    found = features_of(module, ids, kind, store, reading=lambda done, rows: rest.append((done, rows)))
    assert rest == [(done - seen[-1][0], rows - seen[-1][0]) for done, _ in told[2:]]
    assert found.tobytes() == at_once.tobytes()


def test_reading_is_cancelled_within_a_pass(job):
    """A pass of a large backbone takes minutes."""
    module, encoder, _ = whole(job)
    looks = []

    def cancelled():
        looks.append(None)
        return len(looks) > 4

    with pytest.raises(TrainingCancelled):
        features_of(module, encoder.encode(["good"]), kind_of(job.document), FeatureStore(), cancelled=cancelled)
    assert len(looks) == 5
    # Nothing of it is left in the module.
    assert features_of(module, encoder.encode(["good"]), kind_of(job.document), FeatureStore()).shape == (1, 32)
    assert len(looks) == 5


def test_scoring_a_version_ends_with_its_time(job):
    values = job.manifest.decode(job.weights)
    with pytest.raises(TrainingCancelled):
        answers_of(job, values, examples(), FeatureStore(), lambda: True)
    assert len(answers_of(job, values, examples(), FeatureStore())[0]) == 40


def test_a_store_is_bounded(job):
    module, encoder, _ = whole(job)
    store, kind = FeatureStore(max_bytes=2 * 4 * 32), kind_of(job.document)
    ids = encoder.encode(["a great film", "it was bad", "good", "no"])
    found = features_of(module, ids, kind, store)
    assert len(store._rows) == 2
    assert np.allclose(found, features_of(module, ids, kind, store), atol=1e-6)


def test_the_key_covers_everything_that_features_depend_on(job):
    kind, document = kind_of(job.document), job.document
    model = document.model
    others = [
        model.model_copy(update={"backbone": b"\7" * 32}),
        model.model_copy(update={"task": model.task.model_copy(update={"layers": (1,)})}),
        model.model_copy(update={"task": model.task.model_copy(update={"pairs": True})}),
    ]
    changed = [document.model_copy(update={"model": other}) for other in others]
    changed += [document.model_copy(update={"tokenizer": b"\7" * 32})]
    changed += [document.model_copy(update={"frozen": document.frozen.model_copy(update={"weights": b"\7" * 32})})]
    assert len({kind, *map(kind_of, changed)}) == 6
    with pytest.raises(ValueError, match="change while it trains"):
        kind_of(document.model_copy(update={"model": model.model_copy(update={"injection": PROMPT.injection})}))


PROMPT = spec_of(model={"injection": "prompt-tuning"}).model


def test_a_private_federation_learns_on_features_computed_once(folder, monkeypatch):
    job = bundled(folder, name="private", mechanism=DP, training=SGD)
    members = [Member(examples()) for _ in range(3)]
    calls = []
    inner = PromptedModel.features

    def counted(self, ids, prompt):
        calls.append(len(ids))
        return inner(self, ids, prompt)

    with monkeypatch.context() as patched:
        patched.setattr(PromptedModel, "features", counted)
        rounds = federate(job, members, 3)
        next(rounds)
        after_one = len(calls)
        *_, last = rounds
    # Later rounds only look whether the version has diverged.
    assert len(calls) - after_one == 2 * 3
    module, encoder, backbone = whole(dataclasses.replace(job, weights=job.manifest.encode(last.values)))
    rows = examples()
    with torch.no_grad():
        found = module(torch.from_numpy(encoder.encode([row.text for row in rows]))).argmax(dim=1)
    right = [LABELS[int(place)] == row.label for place, row in zip(found, rows, strict=True)]
    assert np.mean(right) > 0.9
    out = folder / "exported"
    weights = job.manifest.encode(last.values)
    texts = [row.text for row in rows[:10]]
    report = export_model(
        job.document, job.manifest, weights, job.tokenizer, out, texts, backbone=backbone, frozen=job.frozen
    )
    assert report.max_difference < 1e-5
    told = Predictor.load(out).predict(texts)
    assert [each.label for each in told] == [LABELS[int(place)] for place in found[:10]]


@pytest.mark.parametrize("mechanism", ["none", "gaussian-update", "distributed-gaussian"])
def test_every_mechanism_trains_on_features(folder, mechanism):
    table = {"name": mechanism} if mechanism == "none" else {"name": mechanism, "noise_multiplier": 1e-3}
    table |= {"lot": 40} if mechanism == "gaussian-update" else {}
    job = bundled(folder, name=mechanism, mechanism=table, training={"epochs": 10, "batch": 40, "learning_rate": 0.05})
    corpus = EncodedExamples(examples(), job.document, job.tokenizer)
    _, _, backbone = whole(job)
    update = train_update(
        job=job.document,
        manifest=job.manifest,
        corpus=corpus,
        base=job.weights,
        protection=protection_of(job.document, 40),
        frozen=job.frozen,
        backbone=backbone,
        random=secure_agg.SystemRandom(),
        seed=1,
        device="cpu",
        progress=lambda *_: None,
        cancelled=lambda: False,
    )
    assert update.change.shape == (64,)
    assert np.abs(update.change).max() > 0.01
    assert (update.correct > 30) == (mechanism == "none")
    assert len(corpora_of(job, [Member(examples())])) == 1


def test_a_start_at_the_labels_answers_before_any_training(folder):
    task = {"name": "head", "start": "labels", "descriptions": {"good": "a great film", "bad": "it was terrible"}}
    job = bundled(folder, name="labels", task=task)
    module, encoder, _ = whole(job)
    with torch.no_grad():
        found = module(torch.from_numpy(encoder.encode(["a great film", "it was terrible"]))).argmax(dim=1)
    assert found.tolist() == [0, 1]
    again = bundled(folder, name="labels-again", task=task)
    assert again.weights == job.weights


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"task": {"name": "head", "layers": [2, 1]}}, "model.task: layers: name each layer once"),
        ({"task": {"name": "head", "layers": []}}, "model.task.layers: must have 1 entries or more"),
        ({"task": {"name": "head", "centre": "wiki"}}, 'model.task.centre: must be "common"'),
        ({"task": {"name": "head", "centre": {"name": "x"}}}, "model.task.centre: name, digest and texts"),
        ({"task": {"name": "head", "descriptions": {"good": "x"}}}, "model.task: descriptions: only a start"),
        ({"task": {"name": "head", "start": "labels", "pairs": True}}, "model.task: start: a label is one text"),
        ({"model": {"dropout": 0.1}}, 'model: dropout: with injection = "none"'),
        (
            {"task": {"name": "cloze", "verbaliser": {"good": "a", "bad": "b"}}},
            'model: injection: "none" trains a head alone',
        ),
    ],
)
def test_a_head_that_cannot_be_gets_a_sentence(changes, says):
    with pytest.raises(ValidationError) as refused:
        spec_of(**changes)
    assert sentence_of(refused.value).startswith(says)


def test_what_a_bundle_cannot_make_gets_a_sentence(folder):
    for task, says in (
        ({"name": "head", "layers": [3]}, "names layer 3, and the backbone has 2"),
        ({"name": "head", "layers": [1], "centre": {"file": "none.txt"}}, "cannot be read as lines"),
        ({"name": "head", "start": "labels", "descriptions": {"so": "x"}}, "'so' is not a label of this job"),
    ):
        with pytest.raises(ValueError, match=says):
            bundled(folder, name="never", task=task)
    assert json.loads(spec_of().model_dump_json())["model"]["dropout"] == 0.0


def test_a_row_that_failed_once_is_computed_again():
    """Features that are no numbers are never kept, in memory or by the keeper."""

    class Kept:
        def __init__(self):
            self.saved = []

        def load(self, kind):
            return {}

        def add(self, kind, rows):
            raise AssertionError("these rows take no time")

        def save(self, kind, rows):
            self.saved.append(sorted(rows))

    keeper, asked = Kept(), []
    store = FeatureStore(keeper=keeper)
    values = np.array([[1.0, 2.0], [np.nan, np.nan], [3.0, 4.0]], np.float32)

    def compute(places):
        asked.append(places)
        yield places, values[places]

    keys = [b"first", b"second", b"third"]
    assert np.isnan(store.read(b"kind", keys, compute)[1]).all()
    store.read(b"kind", keys, compute)
    values[1] = [5.0, 6.0]
    assert store.read(b"kind", keys, compute).tolist() == [[1, 2], [5, 6], [3, 4]]
    store.read(b"kind", keys, compute)
    assert asked == [[0, 1, 2], [1], [1]]
    assert keeper.saved == [[b"first", b"third"], sorted(keys)]


@pytest.mark.parametrize("makes", [lambda: None, Kept], ids=["a member", "a kept head"])
def test_a_training_reads_no_features_of_another_precision(folder, makes):
    recipe = {"epochs": 5, "batch": 10, "learning_rate": 0.05}
    jobs = [bundled(folder, name=each, training=recipe | {"precision": each}) for each in ("float32", "bfloat16")]
    assert jobs[0].weights == jobs[1].weights

    def change(job, store):
        update = train_update(
            job=job.document,
            manifest=job.manifest,
            corpus=EncodedExamples(examples(), job.document, job.tokenizer, store),
            base=job.weights,
            protection=protection_of(job.document, 40),
            frozen=job.frozen,
            backbone=whole(job)[2],
            random=secure_agg.SystemRandom(),
            seed=1,
            device="cpu",
            progress=lambda *_: None,
            cancelled=lambda: False,
            kept=makes(),
        )
        return update.change.tobytes()

    alone = [change(job, FeatureStore()) for job in jobs]
    assert alone[0] != alone[1]
    for order in ((0, 1), (1, 0)):
        store = FeatureStore()
        assert [change(jobs[place], store) for place in order] == [alone[place] for place in order]


def test_a_version_is_scored_on_features_in_float32_whatever_it_was_trained_on(folder):
    """What is exported and answers later computes in float32."""
    jobs = [bundled(folder, name=each, training={"precision": each}) for each in ("float32", "bfloat16")]
    kinds = [kind_of(each.document, precision=each.document.training.precision) for each in jobs]
    assert kinds[0] == kind_of(jobs[0].document) == kind_of(jobs[1].document) != kinds[1]
    values = jobs[0].manifest.decode(jobs[0].weights)
    logits = [answers_of(job, values, examples(), store)[0] for store in [FeatureStore()] for job in jobs]
    assert np.array_equal(*logits)
