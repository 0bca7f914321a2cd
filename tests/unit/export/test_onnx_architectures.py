"""Each architecture's file computes what the module does: alone and in batches, at every length and padding."""

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from export.onnx import _convert
from learning.models import TextClassifier, build
from learning.text.encoder import TextEncoder, wordpiece_tokenizer
from tacit.model import BiLSTMModel, Model, TextCNNModel, TransformerModel
from tests.support import conversions

torch.set_num_threads(1)
MAX = 24
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"word{number}" for number in range(40))]
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "initializer_range": 0.2,
}
DISTILBERT = {"dim": 16, "n_layers": 1, "n_heads": 4, "hidden_dim": 24, "max_position_embeddings": 40}
MODELS: dict[str, Model] = {
    "textcnn": TextCNNModel(embedding=8, widths=(2, 3), maps=5, max_tokens=MAX),
    "max": BiLSTMModel(embedding=8, hidden=7, pooling="max", max_tokens=MAX),
    "mean": BiLSTMModel(embedding=8, hidden=7, pooling="mean", max_tokens=MAX),
    "last": BiLSTMModel(embedding=8, hidden=7, pooling="last", max_tokens=MAX),
    "bert": TransformerModel(config={"model_type": "bert", **SIZES}, max_tokens=MAX),
    "roberta": TransformerModel(config={"model_type": "roberta", **SIZES}, max_tokens=MAX),
    "distilbert": TransformerModel(
        config={"model_type": "distilbert", "initializer_range": 0.2, **DISTILBERT}, max_tokens=MAX
    ),
}


Exported = tuple[Model, TextClassifier, onnx.ModelProto, Callable[[NDArray[np.int64]], NDArray[np.float32]]]


# Every run tests one of each kind; the others are the same with another pooling or another name for the same layers.
SWEEP = ("max", "mean", "roberta")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(model, id=name, marks=[pytest.mark.long] if name in SWEEP else [])
        for name, model in MODELS.items()
    ],
)
def exported(request: pytest.FixtureRequest) -> Exported:
    """The model, the module, the file's graph, and a session that runs the file."""
    model: Model = request.param
    encoder = TextEncoder(wordpiece_tokenizer(PIECES), model.max_tokens, model.min_tokens, frame=model.frame)
    module = build(model, encoder.vocabulary_size, 4, encoder.pad_id, seed=1)
    with torch.no_grad():
        # A value that would show if anything read the padding.
        module.embedding.weight[encoder.pad_id] = 2.0
    with conversions.light():
        data = _convert(module, encoder)
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return model, module, onnx.load_from_string(data), lambda ids: session.run(["logits"], {"input_ids": ids})[0]


def test_the_file_gives_the_modules_logits_at_every_shape(exported: Exported) -> None:
    model, module, graph, run = exported
    random = np.random.default_rng(2)
    largest, seen = 0.0, []
    for batch in (1, 2, 3, 8):
        for width in sorted({model.min_tokens, model.min_tokens + 1, 5, 6, 11, MAX}):
            ids = random.integers(2, len(PIECES), size=(batch, width))
            for row, length in enumerate(random.integers(0, width + 1, size=batch)):
                ids[row, length:] = module.pad_id
            with torch.no_grad():
                expected = module(torch.from_numpy(ids)).numpy()
            found = run(ids)
            assert found.shape == (batch, 4)
            largest = max(largest, float(np.abs(found - expected).max()))
            seen.append(expected)
    # If logits hardly differed between texts, they would agree whatever the graph does.
    assert np.concatenate(seen).std(axis=0).min() > 0.01
    assert largest < 1e-5
    assert len(graph.graph.initializer) > 0
    operators = [node.op_type for node in graph.graph.node]
    assert operators.count("LSTM") == (2 if isinstance(model, BiLSTMModel) else 0)
    assert not {"Loop", "Scan", "If"} & set(operators)


def test_padding_does_not_change_the_logits(exported: Exported) -> None:
    _, module, _, run = exported
    text = np.arange(2, 9, dtype=np.int64)[None]
    alone = run(text)
    for width in (8, 13, MAX):
        padded = np.full((2, width), module.pad_id, dtype=np.int64)
        padded[0, :7] = text
        np.testing.assert_allclose(run(padded)[:1], alone, rtol=0, atol=1e-5)
