"""A member without torch sends what a member with torch sends, from the same rows, coins and noise."""

import hashlib
import json
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from edge_client.policy.policy import Policy
from edge_client.session.kept_back import KeptBack
from edge_client.session.measuring import Measurer, Parts
from export import device_backbone
from export.bundle import make_job_bundle, read_job_bundle
from learning.backbones import onnx_features
from learning.backbones.layout import BackboneInvalid
from learning.backbones.onnx_features import INPUT, OUTPUT, OnnxBackbone
from learning.backbones.stored import read_backbone
from learning.mechanisms.banded import best_coefficients
from learning.mechanisms.correlated import CorrelatedSteps
from learning.mechanisms.protection import protection_of
from learning.prompts.features import FeatureStore, kind_of
from learning.text.corpus import EncodedExamples
from learning.text.examples import Example
from learning.text.persons import population_of, unit_of_job
from learning.training import head_update
from learning.training.head_update import train_head_update
from learning.training.outcome import VersionDiverged
from learning.training.update import train_update
from learning.validation.measuring import ValidationData
from tacit.documents import DocumentInvalid
from tacit.job import JobSpec
from tacit.mechanism import DpSgd
from tacit.validation import HALF
from tests.support.measurements import measuring
from tests.support.places import ROOT
from tests.support.random_sources import Seeded
from tests.support.tiny_models import saved

torch.set_num_threads(1)

LABELS = ["good", "bad"]
DP = {"name": "dp-sgd", "noise_multiplier": 0.4, "lot": 20, "steps": 8, "clip": 1.0}
SGD = {"optimiser": "sgd", "learning_rate": 8.0}
# The largest difference of a change's values, relative to the largest value. It is the features' last digits.
TOLERANCE = 1e-4
KINDS = ["bert", "roberta", *(pytest.param(each, marks=pytest.mark.long) for each in ("distilbert", "electra"))]


def bundled(folder, kind="bert", name="bundle", onnx="float32", **changes):
    if not (folder / "base").exists():
        saved(folder / "base", kind)
    model = {"architecture": "prompted", "base": "base", "max_tokens": 24, "injection": "none", "task": "head"}
    model |= {"onnx": onnx, "task": {"name": "head"}} | changes.pop("model", {})
    whole = {"schema": 1, "name": "heads", "labels": LABELS, "model": model, "aggregation": {"coordinate_bound": 64}}
    make_job_bundle(JobSpec.model_validate(whole | changes), folder, folder / name)
    return read_job_bundle(folder / name)


def examples(rows=40, pairs=False):
    good, bad = ["a great film", "it was good"], ["a terrible film", "it was bad"]
    return [
        Example(
            f"{(good if place % 2 == 0 else bad)[place // 2 % 2]} {'word ' * (place % 5)}",
            LABELS[place % 2],
            "the movie" if pairs else None,
        )
        for place in range(rows)
    ]


def updates(folder, job, *, rows=None, seed=3, validation=None, progress=lambda *_: None, name="bundle"):
    """The updates of a member with torch and of one without, from the same coins."""
    data = examples() if rows is None else rows
    told = {
        "job": job.document,
        "manifest": job.manifest,
        "base": job.weights,
        "frozen": job.frozen,
        "seed": 7,
        "device": "cpu",
        "progress": progress,
        "cancelled": lambda: False,
    }
    made = []
    for train, backbone in (
        (train_update, read_backbone(job.backbone, job.document.model.config)),
        (train_head_update, onnx_of(folder, job, name)),
    ):
        kept_back = None if validation is None else validation.measured
        corpus = EncodedExamples(data, job.document, job.tokenizer, FeatureStore(), kept_back)
        mechanism, correlated = job.document.mechanism, None
        if isinstance(mechanism, DpSgd) and mechanism.band > 1:
            # The ledger's rate and multiplier, and not the job's.
            correlated = CorrelatedSteps.begun(mechanism.coefficients, 0.3, 0.7, bytes(32), job.document.values)
        protection = protection_of(job.document, population_of(data, unit_of_job(job.document)))
        made.append(
            train(
                corpus=corpus,
                protection=protection,
                random=Seeded(seed),
                backbone=backbone,
                correlated=correlated,
                validation=validation,
                **told,
            )
        )
        if correlated is not None:
            assert correlated.step == mechanism.steps
    return made


def onnx_of(folder, job, name="bundle"):
    return OnnxBackbone(folder / name / "backbone.onnx", bytes(job.document.model.onnx.digest))


def trained(job, backbone):
    """The update of a member without torch."""
    return train_head_update(
        job=job.document,
        manifest=job.manifest,
        corpus=EncodedExamples(examples(), job.document, job.tokenizer),
        base=job.weights,
        protection=protection_of(job.document, 40),
        frozen=job.frozen,
        backbone=backbone,
        random=Seeded(1),
        seed=7,
        progress=lambda *_: None,
        cancelled=lambda: False,
    )


def alike(first, second, tolerance=TOLERANCE):
    assert np.abs(first.change).max() > 1e-3
    assert np.abs(first.change - second.change).max() <= tolerance * np.abs(first.change).max()


@pytest.mark.parametrize("kind", KINDS)
def test_under_dp_sgd_both_send_the_same(tmp_path, kind):
    job = bundled(tmp_path, kind, mechanism=DP, training=SGD)
    first, second = updates(tmp_path, job)
    alike(first, second)
    assert (first.examples, first.loss_sum, first.count) == (second.examples, second.loss_sum, second.count)
    other = updates(tmp_path, job, seed=4)[1]
    assert not np.allclose(second.change, other.change, rtol=0, atol=1e-3)


@pytest.mark.parametrize("mechanism", [DP, {"name": "gaussian-update", "noise_multiplier": 1e-3, "lot": 20}])
def test_adamw_trains_a_head_under_mechanisms(tmp_path, mechanism):
    """A job's other optimisers have no decay to pull a head back to zero."""
    recipe = {"learning_rate": 0.05, "batch": 4, "optimiser": "adamw"}
    moved = {}
    for decay in (0.0, 1.0):
        training = recipe | {"weight_decay": decay}
        job = bundled(tmp_path, name=f"bundle-{decay:g}", mechanism=mechanism, training=training)
        # Far from zero, where decay is most of what moves.
        job = replace(job, weights=job.manifest.encode(np.full(job.document.values, 5.0, dtype=np.float32)))
        first, second = updates(tmp_path, job, name=f"bundle-{decay:g}")
        alike(first, second)
        moved[decay] = float(first.change.mean())
    # An update of one clip, all of it decay, moves each of the 64 values by an eighth.
    assert moved[1.0] < moved[0.0] - 0.1


@pytest.mark.parametrize("combine", ["mean", "sum"])
def test_by_person_both_send_the_same(tmp_path, combine):
    by_person = {**DP, "lot": 5, "unit": "person", "person": {"max_examples": 3, "combine": combine}}
    job = bundled(tmp_path, mechanism=by_person, training=SGD)
    rows = [replace(row, person=f"p{place // 4}") for place, row in enumerate(examples())]
    # One person has no row with a label of the job, and counts among the N.
    rows = [replace(row, label="other") if row.person == "p3" else row for row in rows]
    alike(*updates(tmp_path, job, rows=rows))
    # Whose a row is decides the draw and the clip.
    alone = [replace(row, person=f"p{place}") for place, row in enumerate(rows)]
    assert not np.allclose(
        updates(tmp_path, job, rows=rows)[1].change, updates(tmp_path, job, rows=alone)[1].change, rtol=0, atol=1e-3
    )


def test_with_correlated_noise_both_send_the_same(tmp_path):
    correlated = {**DP, "coefficients": best_coefficients(3, 24)}
    alike(*updates(tmp_path, bundled(tmp_path, mechanism=correlated, training=SGD, rounds={"count": 3})))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"training": {"epochs": 3, "batch": 16, "learning_rate": 0.05}},
        {"method": {"name": "fedprox", "mu": 0.3}, "training": {"learning_rate": 0.05, "batch": 8}},
        {"mechanism": {"name": "gaussian-update", "noise_multiplier": 1.0, "clip": 0.5, "lot": 20}},
    ],
)
def test_other_trainings_of_a_head_are_the_same_too(tmp_path, changes):
    job = bundled(tmp_path, **changes)
    first, second = updates(tmp_path, job)
    alike(first, second, 2e-3)
    assert second.loss_sum == pytest.approx(first.loss_sum, rel=1e-3)
    assert (first.correct, first.count) == (second.correct, second.count)


@pytest.mark.parametrize("more", [{}, {"layers": (1, 2)}])
def test_a_measurement_is_answered_alike(tmp_path, more):
    """By label, on rows of which some have no label of the version."""
    job = bundled(tmp_path, model={"task": {"name": "head", **more}})
    draw = np.random.default_rng(2)
    version = draw.normal(0, 3, job.document.values).astype("<f4").tobytes()
    asked, _ = measuring(job.document, hashlib.sha256(version).digest(), rows="all", by="label")
    assert job.document.model.onnx.digest in asked.blobs
    rows = [*examples(), Example("a great film", "other")]
    kept = KeptBack.of(tmp_path / "home", Policy(metrics_epsilon=1.0), rows)
    parts = Parts(job.manifest, version, job.tokenizer, job.frozen)
    found = []
    for backbone in (read_backbone(job.backbone, job.document.model.config), onnx_of(tmp_path, job)):
        measurer = Measurer.of(asked, asked.question, asked.mechanism, parts, backbone, rows, kept, "cpu")
        found.append(measurer(Seeded("coins"), threading.Event()).reshape(2, 3))
    assert np.array_equal(found[0][:, 1:], found[1][:, 1:])
    # A loss is rounded to steps by coins.
    assert np.abs(found[0] - found[1]).max() <= 2
    # Twenty rows of each label, two of each text, which count once.
    assert (found[0][:, 2] == 10 * 32).all()
    assert len(set(found[0][:, 0].tolist())) == 2
    # Parameters of another head.
    with pytest.raises(DocumentInvalid):
        Measurer.of(
            asked,
            asked.question,
            asked.mechanism,
            replace(parts, frozen={"x": np.zeros(1, np.float32)}),
            *(backbone, [], kept, "cpu"),
        )


def test_noised_metrics_are_the_same(tmp_path):
    job = bundled(tmp_path, mechanism=DP, training=SGD, metrics={"noise_multiplier": 2.0})
    measured = np.arange(40) % 3 == 0
    first, second = updates(tmp_path, job, validation=ValidationData(measured, range(40)))
    assert np.abs(first.measured - second.measured).max() <= 2
    other = updates(tmp_path, job, validation=ValidationData(~measured, range(40)))[1]
    assert np.abs(first.measured - other.measured).max() > 2


def test_pairs_are_read_alike(tmp_path):
    job = bundled(tmp_path, mechanism=DP, training=SGD, model={"task": {"name": "head", "pairs": True}})
    alike(*updates(tmp_path, job, rows=examples(pairs=True)))


def test_both_send_the_same_metrics_of_rows_that_are_kept_back(tmp_path):
    """The same coins round and noise them, and the losses differ in their last digits."""
    silent = {"noise_multiplier": 0.0025, "max_units": 200}
    job = bundled(tmp_path, mechanism=DP, training=SGD, metrics=silent)
    signs = np.random.default_rng(2).normal(size=job.document.values).astype(np.float32)
    job = replace(job, weights=job.manifest.encode(signs))
    rows = examples()
    kept = ValidationData(np.arange(len(rows)) % 4 == 0, list(range(len(rows))))
    first, second = updates(tmp_path, job, rows=rows, validation=kept)
    alike(first, second)
    # Ten units, and a loss and a share of right answers that are none of the extremes.
    assert first.measured[2] == pytest.approx(10 * HALF, abs=6)
    assert np.abs(first.measured[:2]).min() > 0
    assert np.abs(first.measured - second.measured).max() <= 1
    bare = updates(tmp_path, job, rows=rows)
    assert np.abs([each.measured for each in bare]).max() <= 6


def test_short_texts_are_read_at_the_shortest_length_that_the_file_was_made_for(tmp_path):
    job = bundled(tmp_path, mechanism=DP, training=SGD)
    rows = [Example(text, LABELS[place % 2]) for place, text in enumerate(["", "a", "film", "", "bad film"] * 8)]
    alike(*updates(tmp_path, job, rows=rows))
    encoder = EncodedExamples(rows, job.document, job.tokenizer).encoder
    seen = []

    class Backbone:
        width = onnx_of(tmp_path, job).width

        def means(self, ids):
            seen.extend(len(row) for row in ids)
            return np.ones((len(ids), self.width), np.float32)

    shared = job.manifest.unflatten(job.manifest.decode(job.weights))
    head_update.HeadModel(job.document, encoder, Backbone(), shared, job.frozen).features(encoder.encode(["", "a"]))
    # Without words a text is two special tokens.
    assert encoder.min_tokens == 3
    assert seen == [3, 3]


def test_a_file_that_fails_on_the_probe_texts_is_to_blame_and_not_the_version(tmp_path):
    job = bundled(tmp_path, mechanism=DP, training=SGD)
    backbone = onnx_of(tmp_path, job)
    backbone.means = lambda rows: np.full((len(rows), backbone.width), np.nan, np.float32)
    with pytest.raises(BackboneInvalid, match="cannot compute the probe texts"):
        trained(job, backbone)


@pytest.mark.parametrize(("precision", "most"), [("float32", 1e-4), ("int8", 0.2)])
def test_a_file_that_is_not_the_encoder_is_never_written(tmp_path, monkeypatch, precision, most):
    for found in (most * 1.01, float("nan")):
        monkeypatch.setattr(device_backbone, "_difference", lambda *_, found=found: found)
        with pytest.raises(DocumentInvalid, match=r"model\.onnx: the file's means differ from torch's by"):
            bundled(tmp_path, onnx=precision)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_for_weights_never_saturate(tmp_path, kind):
    """Without VNNI, onnxruntime adds the products of two bytes and their weights in 16 bits."""
    bundled(tmp_path, kind, onnx="int8")
    graph = onnx.load(tmp_path / "bundle" / "backbone.onnx").graph
    weights = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    used = [weights[node.input[1]] for node in graph.node if node.op_type == "MatMulInteger"]
    assert len(used) >= 6
    for each in used:
        assert each.dtype == np.int8
        assert 2 * 255 * np.abs(each.astype(int)).max() < 2**15


def test_bytes_for_weights_move_the_features_a_little(tmp_path):
    job = bundled(tmp_path, onnx="int8", mechanism=DP, training=SGD)
    first, second = updates(tmp_path, job)
    difference = np.abs(first.change - second.change).max() / np.abs(first.change).max()
    assert TOLERANCE < difference < 0.3
    whole = bundled(tmp_path, name="whole")
    assert job.document.model.onnx.size < whole.document.model.onnx.size
    # Features that int8 computed are never read as float32's.
    kinds = {kind_of(each.document, onnx=each.document.model.onnx.digest) for each in (job, whole)}
    assert len(kinds | {kind_of(whole.document)}) == 3


def test_it_runs_where_no_torch_scipy_or_hub_can_be_imported(tmp_path):
    """In a process in which importing any of them fails: by example, by person, and with correlated noise."""
    of_each = {"examples": {}, "persons": {"unit": "person", "person": {"max_examples": 2}}}
    of_each["correlated"] = {"coefficients": best_coefficients(3, 8)}
    for name, more in of_each.items():
        bundled(tmp_path, name=name, mechanism=DP | more, training=SGD, rounds={"count": 1})
    code = """
import sys
for name in ("torch", "transformers", "opacus", "scipy", "safetensors", "dp_accounting", "huggingface_hub", "onnx"):
    sys.modules[name] = None
import json
from pathlib import Path
from learning.artifacts import checked_manifest
from learning.backbones.onnx_features import OnnxBackbone
from learning.mechanisms.correlated import CorrelatedSteps
from learning.mechanisms.protection import protection_of
from learning.text.corpus import EncodedExamples
from learning.text.examples import Example
from learning.text.persons import population_of, unit_of_job
from learning.training.head_update import train_head_update
from learning.accounting.gate import PrivacyFilter
from learning.accounting.filter import Limit
from secure_agg.randomness import SystemRandom
from tacit.job import JobDocument
from tacit.manifest import Manifest
rows = [Example("a great film", "good", person=str(at)) for at in range(20)]
rows += [Example("it was bad", "bad", person=str(at)) for at in range(20)]
for name in sys.argv[2:]:
    folder = Path(sys.argv[1]) / name
    job = JobDocument.from_json((folder / "job.json").read_bytes(), what="job")
    manifest = Manifest.from_json((folder / "manifest.json").read_bytes(), what="manifest")
    frozen = Manifest.from_json((folder / "frozen.json").read_bytes(), what="frozen")
    steps = None
    if job.mechanism.band > 1:
        steps = CorrelatedSteps.begun(job.mechanism.coefficients, 0.4, 0.5, bytes(32), job.values)
    protection = protection_of(job, population_of(rows, unit_of_job(job)))
    gate = PrivacyFilter(Limit(1000.0, 1e-5, unit=job.mechanism.unit))
    made = train_head_update(
        job=job, manifest=manifest, corpus=EncodedExamples(rows, job, (folder / "tokenizer.json").read_bytes()),
        base=(folder / "weights.bin").read_bytes(), protection=protection,
        frozen=frozen.unflatten(frozen.decode((folder / "frozen.bin").read_bytes())),
        backbone=OnnxBackbone(folder / "backbone.onnx", bytes(job.model.onnx.digest)), random=SystemRandom(), seed=1,
        correlated=steps, progress=lambda *_: None, cancelled=lambda: False)
    moved = bool(abs(made.change).max() > 0)
    print(json.dumps([name, job.mechanism.unit, steps is None, gate.remaining([protection.event]) > 0, moved,
                      len(made.change)]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path, *of_each], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        ["examples", "example", True, True, True, 2 * 2 * 16],
        ["persons", "person", True, True, True, 2 * 2 * 16],
        ["correlated", "example", False, True, True, 2 * 2 * 16],
    ]


def test_a_diverged_version_is_refused_by_both_before_the_data_is_read(tmp_path):
    job = bundled(tmp_path, mechanism=DP, training=SGD)
    signs = np.random.default_rng(0).choice(np.array([9000, -9000], np.float32), job.document.values)
    far = job.manifest.encode(signs)
    broken = replace(job, weights=far)
    for train, backbone in (
        (train_update, read_backbone(job.backbone, job.document.model.config)),
        (train_head_update, onnx_of(tmp_path, job)),
    ):
        with pytest.raises(VersionDiverged, match="the version has diverged"):
            train(
                job=broken.document,
                manifest=broken.manifest,
                corpus=EncodedExamples(examples(), job.document, job.tokenizer),
                base=broken.weights,
                protection=protection_of(job.document, 40),
                frozen=broken.frozen,
                backbone=backbone,
                random=Seeded(1),
                seed=7,
                device="cpu",
                progress=lambda *_: None,
                cancelled=lambda: False,
            )


def test_parameters_of_another_model_are_refused(tmp_path):
    job = bundled(tmp_path, mechanism=DP, training=SGD)
    with pytest.raises(DocumentInvalid, match=r"frozen parameters of job heads are not those of its head"):
        train_head_update(
            job=job.document,
            manifest=job.manifest,
            corpus=EncodedExamples(examples(), job.document, job.tokenizer),
            base=job.weights,
            protection=protection_of(job.document, 40),
            frozen={},
            backbone=onnx_of(tmp_path, job),
            random=Seeded(1),
            seed=7,
            progress=lambda *_: None,
            cancelled=lambda: False,
        )


def graph(folder, nodes, *, outputs=None, initializers=()):
    """An ONNX file of a hand-made graph over ids (1, S), with its OnnxBackbone."""
    made = onnx.helper.make_model(
        onnx.helper.make_graph(
            nodes,
            "made",
            [onnx.helper.make_tensor_value_info(INPUT, onnx.TensorProto.INT64, [None, None])],
            outputs or [onnx.helper.make_tensor_value_info(OUTPUT, onnx.TensorProto.FLOAT, [None, 4])],
            initializer=list(initializers),
        ),
        opset_imports=[onnx.helper.make_opsetid("", 18)],
        ir_version=9,
    )
    data = made.SerializeToString()
    (folder / "made.onnx").write_bytes(data)
    return folder / "made.onnx", hashlib.sha256(data).digest()


def inner(tensor):
    """A node whose branch holds the tensor."""
    branch = onnx.helper.make_graph(
        [onnx.helper.make_node("Constant", [], ["inside"], value=tensor)],
        "branch",
        [],
        [onnx.helper.make_tensor_value_info("inside", onnx.TensorProto.FLOAT, [1, 4])],
    )
    return onnx.helper.make_node("If", ["yes"], [OUTPUT], then_branch=branch, else_branch=branch)


def test_no_graph_can_let_one_row_see_another(tmp_path):
    """A graph made to mix its batch: it gives every row the sum over all rows. Alone, a row sees only itself."""
    four = onnx.numpy_helper.from_array(np.array([1, 4], np.int64), "four")
    nodes = [
        onnx.helper.make_node("Cast", [INPUT], ["floats"], to=onnx.TensorProto.FLOAT),
        onnx.helper.make_node("ReduceSum", ["floats"], ["all"], keepdims=0),
        onnx.helper.make_node("Expand", ["all", "four"], [OUTPUT]),
    ]
    path, digest = graph(tmp_path, nodes, initializers=[four])
    rows = np.array([[1, 2, 3], [100, 200, 300]])
    mixed = onnxruntime.InferenceSession(path).run(None, {INPUT: rows})[0]
    assert mixed[0, 0] == 606
    assert OnnxBackbone(path, digest).means(list(rows))[:, 0].tolist() == [6, 600]


def test_no_graph_can_take_longer_for_a_chosen_word(tmp_path):
    """A shape that follows from a token: as many numbers as its table says. Its length may be one."""
    table = onnx.numpy_helper.from_array(np.array([1, 1, 10**9], np.int64), "table")
    none, one = (onnx.numpy_helper.from_array(np.array(each, np.int64), name) for each, name in ((0, "no"), (1, "one")))
    axis = onnx.numpy_helper.from_array(np.array([1], np.int64), "axis")
    sizes = [
        onnx.helper.make_node("Gather", ["table", INPUT], ["each"]),
        onnx.helper.make_node("ReduceMax", ["each"], ["many"], keepdims=0),
    ]
    ends = [
        onnx.helper.make_node("ReduceSum", ["made"], ["all"], keepdims=0),
        onnx.helper.make_node("Cast", ["all"], [OUTPUT], to=onnx.TensorProto.FLOAT),
    ]
    more = onnx.helper.make_node("Range", ["no", "many", "one"], ["made"])
    with pytest.raises(BackboneInvalid, match="size that depends"):
        OnnxBackbone(*graph(tmp_path, [*sizes, more, *ends], initializers=[table, none, one]))
    # Through a name that stands for a weight, too.
    shadow = onnx.helper.make_node("ReduceMax", ["each"], ["no"], keepdims=0)
    wide = onnx.helper.make_node("Range", ["one", "no", "one"], ["made"])
    with pytest.raises(BackboneInvalid, match="size that depends"):
        OnnxBackbone(*graph(tmp_path, [sizes[0], shadow, wide, *ends], initializers=[table, none, one]))
    # The length of a text may decide.
    long = [
        onnx.helper.make_node("Shape", [INPUT], ["shape"]),
        onnx.helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        onnx.helper.make_node("ReduceSum", ["zeros", "axis"], ["sum"], keepdims=1),
        onnx.helper.make_node("Concat", ["sum"] * 4, [OUTPUT], axis=1),
    ]
    assert OnnxBackbone(*graph(tmp_path, long, initializers=[axis])).means([np.array([1, 2])]).tolist() == [[0] * 4]


def test_numbers_too_small_for_a_whole_float_are_zero_while_a_member_trains(tmp_path):
    seen = []
    job = bundled(tmp_path, mechanism=DP, training=SGD)
    updates(tmp_path, job, progress=lambda *_: seen.append(float(np.float32(1e-30) * np.float32(1e-10))))
    # Eight steps in each runtime.
    assert seen == [0.0] * 16
    assert np.float32(1e-30) * np.float32(1e-10) > 0


def test_numbers_too_small_for_a_whole_float_are_zero_where_a_row_is_computed(tmp_path):
    """Their products would take so much longer that a word could be told by the time of its row."""
    table = onnx.numpy_helper.from_array(np.array([[1e-30] * 4, [1.0] * 4], np.float32), "table")
    small = onnx.numpy_helper.from_array(np.float32(1e-10), "small")
    axis = onnx.numpy_helper.from_array(np.array([1], np.int64), "axis")
    nodes = [
        onnx.helper.make_node("Gather", ["table", INPUT], ["found"]),
        onnx.helper.make_node("Mul", ["found", "small"], ["less"]),
        onnx.helper.make_node("ReduceSum", ["less", "axis"], [OUTPUT], keepdims=0),
    ]
    path, digest = graph(tmp_path, nodes, initializers=[table, small, axis])
    row = np.array([[0]])
    assert 0 < onnxruntime.InferenceSession(path).run(None, {INPUT: row})[0][0, 0] < 1.2e-38
    assert OnnxBackbone(path, digest).means([row[0], np.array([1])])[:, 0].tolist() == [0, np.float32(1e-10)]
    # The thread goes on as before.
    assert np.float32(1e-30) * np.float32(1e-10) > 0


def test_a_row_that_fails_counts_for_nothing_and_stops_no_other(tmp_path):
    """A table of five rows, and a text with a token beyond it."""
    table = onnx.numpy_helper.from_array(np.ones((5, 4), np.float32), "table")
    nodes = [
        onnx.helper.make_node("Gather", ["table", INPUT], ["found"]),
        onnx.helper.make_node("ReduceSum", ["found", "axis"], [OUTPUT], keepdims=0),
    ]
    axis = onnx.numpy_helper.from_array(np.array([1], np.int64), "axis")
    found = OnnxBackbone(*graph(tmp_path, nodes, initializers=[table, axis])).means(
        [np.array([1, 2]), np.array([1, 77]), np.array([3])]
    )
    assert found[:, 0].tolist()[::2] == [2.0, 1.0]
    assert np.isnan(found[1]).all()


def test_a_file_that_is_not_the_jobs_or_names_other_files_is_refused(tmp_path):
    job = bundled(tmp_path)
    path = tmp_path / "bundle" / "backbone.onnx"
    with pytest.raises(BackboneInvalid, match="not the file that the job names"):
        OnnxBackbone(path, b"\0" * 32)
    # Weights that lie in a file beside it.
    (tmp_path / "secret").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    outside = onnx.TensorProto(name="outside", data_type=onnx.TensorProto.FLOAT, dims=[1, 4])
    outside.data_location = onnx.TensorProto.EXTERNAL
    outside.external_data.add(key="location", value="secret")
    nodes = [onnx.helper.make_node("Identity", ["outside"], [OUTPUT])]
    drawn = onnx.helper.make_node("RandomNormal", [], [OUTPUT], shape=[1, 4], seed=1.0)
    constant = onnx.helper.make_node("Constant", [], [OUTPUT], value=outside)
    for initializers, made, why in (
        ([outside], nodes, "keeps weights in other files"),
        ((), [constant], "keeps weights in other files"),
        ((), [inner(outside)], "has branches or loops"),
        # It keeps its generator from row to row: a state.
        ((), [drawn], "the operator 'RandomNormal'"),
    ):
        with pytest.raises(BackboneInvalid, match=why):
            OnnxBackbone(*graph(tmp_path, made, initializers=initializers))
    two = [onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.INT64, [None, None])]
    other = graph(tmp_path, [onnx.helper.make_node("Identity", [INPUT], ["logits"])], outputs=two)
    with pytest.raises(BackboneInvalid, match="does not map input_ids to means"):
        OnnxBackbone(*other)
    (tmp_path / "made.onnx").write_bytes(b"\x3a\xff\xff\xff\xff\x0f no model")
    with pytest.raises(BackboneInvalid, match="is no ONNX file"):
        OnnxBackbone(tmp_path / "made.onnx", hashlib.sha256((tmp_path / "made.onnx").read_bytes()).digest())
    assert job.document.files["backbone.onnx"] == job.document.model.onnx.digest


def bomb(size):
    """Nodes whose tensor has `many` values if the row has token 77, and else one. `size` makes it of a length."""
    node, int64 = onnx.helper.make_node, onnx.TensorProto.INT64
    return [
        node("Equal", [INPUT, "token"], ["equal"]),
        node("Cast", ["equal"], ["ones"], to=int64),
        node("ReduceMax", ["ones"], ["has"], keepdims=0),
        node("Mul", ["has", "many"], ["more"]),
        node("Add", ["more", "one"], ["length"]),
        *size,
        node("ReduceMean", ["big"], ["mean"], keepdims=1),
        node("Reshape", ["mean", "one_one"], ["small"]),
        node("Expand", ["small", "one_four"], [OUTPUT]),
    ]


def constants(many=200_000):
    values = {
        "token": np.int64(77),
        "many": np.array([many]),
        "one": np.array([1]),
        "zero": np.array([0]),
        "minus": np.array([-1]),
        "first": np.array([0.0], np.float32),
        "one_one": np.array([1, 1]),
        "one_four": np.array([1, 4]),
        "wide": np.zeros(1000, np.float32),
    }
    return [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()]


def sized(operator):
    """Nodes that make `big` of the length with this operator."""
    node = onnx.helper.make_node
    if operator == "Range":
        scalars = [node("Squeeze", [wide], [narrow]) for wide, narrow in (("zero", "a"), ("length", "b"), ("one", "c"))]
        return [*scalars, node("Range", ["a", "b", "c"], ["numbers"]), node("Cast", ["numbers"], ["big"], to=1)]
    if operator == "Reshape":
        whole = node("Concat", ["minus", "length"], ["shape"], axis=0)
        return [whole, node("Reshape", ["wide", "shape"], ["big"])]
    inputs = {"ConstantOfShape": ["length"], "Slice": ["wide", "zero", "length"]}
    return [node(operator, inputs.get(operator, ["first", "length"]), ["big"])]


@pytest.mark.parametrize("operator", ["ConstantOfShape", "Expand", "Tile", "Slice", "Reshape", "Range", "out of order"])
def test_no_graph_whose_sizes_depend_on_a_word_is_admitted(tmp_path, operator):
    """A file whose rows take time and memory by whether they have one token, which a member's silence would tell."""
    size = sized("Tile" if operator == "out of order" else operator)
    nodes = bomb(size)
    # The runtime sorts nodes by itself, so a file may name them in any order.
    path, digest = graph(tmp_path, nodes[::-1] if operator == "out of order" else nodes, initializers=constants())
    session = onnxruntime.InferenceSession(path)
    assert session.run(None, {INPUT: np.array([[1, 2]])})[0].shape == (1, 4)
    with pytest.raises(BackboneInvalid, match="size that depends on a text's words"):
        OnnxBackbone(path, digest)


def test_a_size_may_follow_from_a_rows_length(tmp_path):
    node = onnx.helper.make_node
    nodes = [
        node("Shape", [INPUT], ["shape"]),
        node("ConstantOfShape", ["shape"], ["zeros"]),
        node("ReduceMean", ["zeros"], ["mean"], keepdims=1),
        node("Expand", ["mean", "one_four"], [OUTPUT]),
    ]
    found = OnnxBackbone(*graph(tmp_path, nodes, initializers=constants())).means([np.array([1, 2, 3])])
    assert found.tolist() == [[0, 0, 0, 0]]


# The first session of its process, for which a cold one is needed.
FIRST_SESSION = """
import sys
from pathlib import Path
from learning.backbones.onnx_features import OnnxBackbone
from learning.backbones.subnormals import flushed

def zero():
    return sys.float_info.min / 2 == 0.0

with flushed():
    before = zero()
    OnnxBackbone(Path(sys.argv[1]), bytes.fromhex(sys.argv[2]))
    print(before, zero())
print(zero())
"""


def test_opening_a_network_leaves_subnormal_numbers_zero_for_its_caller(tmp_path):
    nodes = [onnx.helper.make_node("Gather", ["table", INPUT], ["rows"])]
    nodes += [onnx.helper.make_node("ReduceMean", ["rows", "one"], [OUTPUT], keepdims=0)]
    table = onnx.numpy_helper.from_array(np.ones((9, 4), np.float32), "table")
    path, digest = graph(tmp_path, nodes, initializers=[table, *constants()])
    words = [sys.executable, "-c", FIRST_SESSION, str(path), digest.hex()]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    inside, after = done.stdout.splitlines()
    assert inside in ("True True", "False False")
    assert after == "False"


def test_every_input_that_onnx_calls_a_size_is_known_as_one():
    sizes = {"shape", "repeats", "starts", "ends", "axes", "steps", "split", "start", "limit", "delta", "axis", "k"}
    for operator in onnx_features._OPERATORS:
        names = [each.name for each in onnx.defs.get_schema(operator, 18 if operator != "Gelu" else 20).inputs]
        found = min((at for at, name in enumerate(names) if name in sizes), default=None)
        expected = 0 if operator == "ConstantOfShape" else found
        assert onnx_features._SIZES.get(operator) == expected, operator
    assert set(onnx_features._SIZES) <= onnx_features._OPERATORS


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_bundles_ship_is_admitted(tmp_path, kind, precision):
    job = bundled(tmp_path, kind, onnx=precision)
    model = onnx.load(tmp_path / "bundle" / "backbone.onnx")
    assert {node.op_type for node in model.graph.node} <= onnx_features._OPERATORS
    assert np.isfinite(onnx_of(tmp_path, job).means([np.arange(2, 9)])).all()


def varint(number):
    made = b""
    while number > 127:
        made, number = made + bytes([number & 127 | 128]), number >> 7
    return made + bytes([number])


def field(number, kind, payload, more=0):
    return varint((number << 3 | kind) + more) + (varint(len(payload)) if kind == 2 else b"") + payload


def refused(folder, data, why):
    (folder / "made.onnx").write_bytes(data)
    with pytest.raises(BackboneInvalid, match=why):
        OnnxBackbone(folder / "made.onnx", hashlib.sha256(data).digest())


def test_a_file_that_readers_would_read_differently_is_refused(tmp_path):
    """onnxruntime's reader keeps 32 bits of a tag, and skips a known field of another type on the wire."""
    outside = onnx.TensorProto(name="outside", data_type=onnx.TensorProto.FLOAT, dims=[1, 4]).SerializeToString()
    nodes = [onnx.helper.make_node("Identity", ["outside"], [OUTPUT])]
    path, _ = graph(tmp_path, nodes)
    whole = path.read_bytes()
    elsewhere = outside + field(14, 0, varint(1), more=2**32)
    refused(tmp_path, whole + field(7, 2, field(5, 2, elsewhere)), "is no ONNX file")
    # A second name for the operator, as eight bytes of a number.
    drawn = onnx.helper.make_node("RandomNormal", [], [OUTPUT], shape=[1, 4]).SerializeToString()
    disguised = drawn + field(4, 1, b"Identity")
    assert onnx.NodeProto.FromString(disguised).op_type == "RandomNormal"
    refused(tmp_path, onnx.ModelProto(ir_version=9).SerializeToString() + field(7, 2, field(1, 2, disguised)), "is no")


def test_a_file_with_functions_of_its_own_is_refused(tmp_path):
    path, _ = graph(tmp_path, [onnx.helper.make_node("Cast", [INPUT], [OUTPUT], to=1)])
    model = onnx.load(path)
    inside = [onnx.helper.make_node("RandomNormalLike", ["x"], ["y"])]
    opset = [onnx.helper.make_opsetid("", 18)]
    model.functions.append(onnx.helper.make_function("", "Cast", ["x"], ["y"], inside, opset))
    refused(tmp_path, model.SerializeToString(), "has functions of its own")


def test_features_that_are_no_numbers_add_nothing_and_tell_nothing(tmp_path):
    """A file that gives NaN for one word: those rows are left out of every sum, as under torch."""
    job = bundled(tmp_path, mechanism=DP, training=SGD)
    backbone = onnx_of(tmp_path, job)
    real = backbone.means

    def broken(rows):
        made = real(rows)
        # Not the probe texts, which are shorter.
        made[[len(row) > 7 for row in rows]] = np.nan
        return made

    backbone.means = broken
    update = trained(job, backbone)
    assert np.isfinite(update.change).all()
    assert update.change.any()
