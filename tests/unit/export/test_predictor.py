"""Prediction and evaluation with an exported bundle, without the training stack."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from export.bundle import JobBundle
from export.evaluate import evaluate_bundle
from export.onnx import ExportReport
from export.predictor import Predictor
from learning.models import build, load_shared
from learning.text.encoder import TextEncoder
from learning.text.examples import DataInvalid, Example, label_ids
from learning.training.local import evaluate
from tacit.bundle import BundleInvalid, read_bundle

Exported = tuple[Path, ExportReport]


def test_predictions_are_probabilities_in_the_order_of_the_texts(exported: Exported, examples: list[Example]) -> None:
    predictor = Predictor.load(exported[0], threads=1)
    assert predictor.facts.job == "questions"
    texts = [example.text for example in examples]
    predictions = predictor.predict(texts)
    assert len(predictions) == len(texts)
    for text, prediction in zip(texts, predictions, strict=True):
        assert list(prediction.probabilities) == ["HUM", "LOC", "NUM"]
        assert sum(prediction.probabilities.values()) == pytest.approx(1)
        assert prediction.probability == max(prediction.probabilities.values())
        assert prediction.probability == prediction.probabilities[prediction.label]
        # A text gets the same prediction alone as in a batch.
        alone = predictor.predict([text])[0]
        assert alone.label == prediction.label
        assert alone.probability == pytest.approx(prediction.probability, abs=1e-6)
    assert [item.label for item in predictor.predict(texts, batch=2)] == [item.label for item in predictions]
    assert predictor.predict([]) == []


def test_evaluation_agrees_with_the_training_stack(exported: Exported, job: JobBundle, examples: list[Example]) -> None:
    evaluation = evaluate_bundle(exported[0], examples)
    encoder = TextEncoder(job.tokenizer, 12, 4)
    module = build(job.document.model, encoder.vocabulary_size, 3, encoder.pad_id)
    load_shared(module, job.manifest.unflatten(job.manifest.decode(job.weights)))
    scores = evaluate(
        module, encoder.encode([example.text for example in examples]), label_ids(examples, job.document.labels)
    )
    assert (evaluation.accuracy, evaluation.examples) == (scores.accuracy, 5)
    assert evaluation.loss == pytest.approx(scores.loss, abs=1e-6)


def test_logits_that_are_not_numbers_are_no_answer(exported: Exported, damaged: Callable[..., Path]) -> None:
    """A model whose values are too large may overflow on some texts only, on none of those of its export."""
    model = onnx.load_from_string(read_bundle(exported[0]).files["model.onnx"])
    bias = next(each for each in model.graph.initializer if list(each.dims) == [3])
    bias.CopyFrom(onnx.numpy_helper.from_array(np.array([np.inf, 0, 0], np.float32), bias.name))
    folder = damaged("model.onnx", model.SerializeToString(), signed=True)
    with pytest.raises(BundleInvalid, match="logits are not numbers on one of these texts; export another version"):
        Predictor.load(folder).predict(["where"])
    with pytest.raises(BundleInvalid, match="logits are not numbers"):
        evaluate_bundle(folder, [Example("where", "LOC")])


def test_evaluation_needs_labels_that_the_model_knows(exported: Exported) -> None:
    with pytest.raises(DataInvalid, match="'ABBR'"):
        evaluate_bundle(exported[0], [Example("x", "ABBR")])
    with pytest.raises(DataInvalid, match="no examples"):
        evaluate_bundle(exported[0], [])


@pytest.mark.parametrize("name", ["model.onnx", "tokenizer.json", "labels.json"])
def test_a_damaged_bundle_is_not_loaded(damaged: Callable[..., Path], name: str) -> None:
    with pytest.raises(BundleInvalid, match=f"{name} differs"):
        Predictor.load(damaged(name, b"{}", signed=False))


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("model.onnx", b"not a model", r"this onnxruntime cannot run .*model\.onnx"),
        ("tokenizer.json", b"{}", r"not a tokenizer\.json"),
        ("labels.json", b'{"schema":1,"labels":["A","B"]}', "2 labels for 3 outputs"),
        ("labels.json", b'{"labels":["A","B","C"]}', "has no schema"),
    ],
)
def test_files_that_do_not_fit_together_are_refused(
    damaged: Callable[..., Path], name: str, data: bytes, says: str
) -> None:
    with pytest.raises(BundleInvalid, match=says):
        Predictor.load(damaged(name, data, signed=True))


def test_the_training_stack_is_never_imported(exported: Exported, examples_file: Path) -> None:
    program = """
import json, sys
from pathlib import Path
from learning.text.data import read_examples
from export.evaluate import evaluate_bundle
from export.predictor import Predictor
evaluation = evaluate_bundle(Path(sys.argv[1]), read_examples(Path(sys.argv[2])))
heavy = {"torch", "transformers", "opacus", "onnx", "onnxscript", "sqlalchemy", "grpc"} & sys.modules.keys()
print(json.dumps([evaluation.examples, sorted(heavy)]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, exported[0], examples_file],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert json.loads(done.stdout) == [5, []]
