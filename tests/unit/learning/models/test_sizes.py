"""The size of a model is known before any of it is allocated."""

from contextlib import nullcontext

import numpy as np
import pytest

from learning.models import build, values_of
from learning.models.assembly import assembled, check_size
from learning.text.encoder import wordpiece_tokenizer
from learning.text.vocabulary import own_tokenizer
from learning.training import start
from learning.training.start import first_private
from tacit.documents import DocumentInvalid
from tacit.manifest import Manifest
from tacit.model import BiLSTMModel, RvaeModel, TextCNNModel, TransformerModel
from tests.unit.edge_client.session.test_keeping import PUBLIC, document

BERT = {
    "model_type": "bert",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 20,
}
MODELS = [
    TextCNNModel(embedding=5, widths=(1, 3), maps=4, max_tokens=8),
    BiLSTMModel(embedding=5, hidden=3),
    TransformerModel(config=BERT, max_tokens=16),
    TransformerModel(config={"model_type": "distilbert", "dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 12}),
    RvaeModel(embedding=5, hidden=3, latent=2, words=20),
    RvaeModel(embedding=5, hidden=3, latent=2, words=20, tied=True, freeze_embedding=True),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.architecture)
def test_values_of_is_the_modules_number_of_values(model):
    for vocabulary, labels in ((7, 2), (30, 5)):
        module = build(model, vocabulary, labels, 0)
        assert values_of(model, vocabulary, labels) == sum(each.numel() for each in module.parameters())


class Entries:
    vocabulary_size, pad_id = 7, 0

    def words(self):
        raise AssertionError("nothing is built for a model of another size")


def test_a_model_larger_than_its_manifest_is_not_built():
    """A kilobyte of document could ask for half a terabyte, while its manifest lists one value."""
    job = document(
        own=False,
        model={"architecture": "textcnn", "embedding": 4096, "maps": 8192, "widths": [4096], "max_tokens": 4096},
    )
    shared = {"output.bias": np.zeros(1, np.float32)}
    with pytest.raises(DocumentInvalid, match=r"has 1374\d+ values with 7 entries, and its weights have 1$"):
        assembled(job, Entries(), Manifest.of(shared), np.zeros(1, np.float32), {})
    begun = Manifest.of({"embedding.weight": np.zeros((7, 3), np.float32)})
    with pytest.raises(DocumentInvalid, match="and its weights have 127"):
        first_private(job, PUBLIC, (begun, begun.encode(np.zeros(21, np.float32))), None)
    own = document(model=job.model.model_dump())
    with pytest.raises(DocumentInvalid, match="more than 1073741824 values"):
        first_private(own, PUBLIC, None, None)


def test_no_refusal_reveals_the_size_of_an_own_vocabulary(monkeypatch):
    """The limit is on what the job asks for. With the member's own number, a refusal would reveal its word count."""
    asked = document(vocabulary={"kind": "words", "size": 9})
    limit = values_of(asked.model, 9, 2)
    for most, refuses in ((limit, False), (limit - 1, True)):
        monkeypatch.setattr(start, "_MAX_VALUES", most)
        for texts in (["a"], ["a b c d e f g"]):
            tokenizer = own_tokenizer(texts, "words", 9)
            with pytest.raises(DocumentInvalid, match="has more than") if refuses else nullcontext():
                first_private(asked, tokenizer, None, None)


@pytest.mark.parametrize("shape", [(7, 3), (7,), (6, 8), (7, 8, 1)])
def test_rows_of_a_base_that_do_not_fit_reveal_no_size_either(shape):
    """The coordinator makes the rows and hears the refusal, so one of another width would ask for the number."""
    model = {"architecture": "transformer", "config": BERT, "max_tokens": 16}
    began = {"manifest": b"\1" * 32, "weights": b"\2" * 32, "values": 56}
    job = document(
        model=model,
        vocabulary={"kind": "wordpiece", "size": 60, "start": "base"},
        base_tokenizer=b"\3" * 32,
        private=began,
    )
    base = wordpiece_tokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "##a", "b"])
    begun = Manifest.of({"embedding.weight": np.zeros(shape, np.float32)})
    start = begun, begun.encode(np.zeros(begun.values, np.float32))
    said = set()
    for texts in (["a"], ["heron reeds bill euro " * 9]):
        with pytest.raises(DocumentInvalid) as refused:
            first_private(job, own_tokenizer(texts, "wordpiece", 60), start, None, base_tokenizer=base)
        said.add(str(refused.value))
    assert len(said) == 1


def test_a_model_of_the_right_size_passes():
    job = document(own=False)
    check_size(job, 7, values_of(job.model, 7, 2))
