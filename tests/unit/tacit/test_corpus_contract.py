"""Orders of synthetic text in jobs, and members' statements about their files: refusals, and pinned bytes."""

import pytest
from pydantic import ValidationError

from tacit.corpus import MAX_CORPUS_BYTES, CorpusOrder, CorpusStatement, signed_bytes
from tacit.documents import DocumentInvalid, sentence_of
from tacit.job import JobDocument, JobSpec
from tacit.model import RvaeModel
from tests.support.ordered_corpora import corpus_file, ordering_job, statement_of

WORDS = {"kind": "words", "file": "words.txt"}
JOB = {"schema": 1, "name": "desk", "labels": ["a", "b"], "vocabulary": WORDS, "model": {"architecture": "rvae"}}
FILE = corpus_file([("good", "a"), ("bad", "b"), ("worse", "b")])
FEDERATION = bytes([9]) * 32


def said(**changes):
    with pytest.raises(ValidationError) as refused:
        JobSpec.model_validate(JOB | changes)
    return sentence_of(refused.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"model": {"architecture": "textcnn"}, "corpus": {}},
            "corpus: only an rvae generates text; leave this table out",
        ),
        (
            {"vocabulary": {"kind": "wordpiece", "file": "vocab.txt"}},
            'vocabulary: an rvae writes words of a public list; name its file, with kind = "words" (a member\'s own '
            "words would appear in the text that it releases)",
        ),
        ({"method": "fedvocab", "vocabulary": {}}, "vocabulary: an rvae writes words of a public list"),
        ({"method": "fedvocab"}, "method: fedvocab is for classifiers; an rvae needs fedavg or fedprox"),
        ({"method": "lg-fedavg"}, "method: lg-fedavg is for classifiers; an rvae needs fedavg or fedprox"),
        (
            {
                "model": {"architecture": "rvae", "variant": "published"},
                "mechanism": {"name": "dp-sgd", "noise_multiplier": 1},
            },
            "model.variant: published has its own noise and no guarantee, and dp-sgd beside it would suggest one; use "
            "sound, or mechanism none",
        ),
        (
            {"mechanism": {"name": "distributed-gaussian", "noise_multiplier": 1}, "corpus": {"source": "members"}},
            "corpus.source: under distributed-gaussian a member's own model has only a share of the noise, which "
            'protects nothing by itself; set source = "operator", or use dp-sgd',
        ),
        ({"corpus": {"texts": 0}}, "corpus.texts: must be 1 or more"),
        ({"corpus": {"max_bytes": MAX_CORPUS_BYTES + 1}}, "corpus.max_bytes: must be at most 67,108,864"),
        ({"corpus": {"source": "anybody"}}, "corpus.source: 'anybody' is not one of members, operator"),
        ({"corpus": {"text": 3}}, "corpus.text: unknown key; check its spelling"),
        ({"model": {"architecture": "rvae", "tied": True}}, "model: tied needs freeze_embedding"),
        (
            {"model": {"architecture": "rvae", "variant": "published", "label_weight": 4}},
            "model: label_weight: the published variant has no vectors of labels; leave it out",
        ),
        (
            {"labels": [f"label {each}" for each in range(257)], "corpus": {"source": "operator"}},
            "corpus.guidance: needs a decoder for each label, and 257 labels are more than 256; set guidance = 0",
        ),
        ({"corpus": {"guidance": 21}}, "corpus.guidance: must be at most 20"),
    ],
    ids=lambda each: str(each)[:60],
)
def test_an_invalid_order_is_refused_with_the_reason(changes, sentence):
    assert said(**changes).startswith(sentence)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"corpus": {}},
        {"corpus": {"source": "operator"}, "mechanism": {"name": "distributed-gaussian", "noise_multiplier": 1}},
        {"mechanism": {"name": "distributed-gaussian", "noise_multiplier": 1}},
        {"model": {"architecture": "rvae", "variant": "published"}, "corpus": {}},
        {"method": "fedprox", "corpus": {"top_k": 5}},
        {"labels": [f"label {each}" for each in range(257)], "corpus": {"guidance": 0}},
        {"mechanism": {"name": "dp-sgd", "noise_multiplier": 1}, "corpus": {"histogram_std": 8}},
    ],
    ids=str,
)
def test_valid_orders_are_accepted(changes):
    spec = JobSpec.model_validate(JOB | changes)
    assert JobSpec.model_validate_json(spec.model_dump_json(by_alias=True)) == spec
    assert (spec.corpus is None) == ("corpus" not in changes)


def test_a_document_states_the_synthetic_text_it_orders():
    bare, ordering = ordering_job(order=None), ordering_job()
    assert b'"corpus":null' in bare.canonical()
    assert (
        b'"corpus":{"guidance":1.0,"histogram_std":null,"max_bytes":4194304,"source":"members"' in ordering.canonical()
    )
    for job in (bare, ordering):
        assert JobDocument.from_json(job.canonical()) == job
    assert bare.digest() != ordering.digest() != ordering_job(order=CorpusOrder(texts=7)).digest()


def test_the_published_variant_has_no_label_bias():
    assert RvaeModel().label_weight == 4
    published = RvaeModel(variant="published")
    assert published.label_weight == 0
    assert RvaeModel.model_validate(published.model_dump()) == published


def test_the_values_of_an_rvae_follow_from_its_sizes():
    """Counted by hand: 5 + 1 + 2 rows of 2; two LSTMs with four gates of 3; mean and standard deviation; z and label to
    the writing LSTM; labels.
    """
    model = RvaeModel(embedding=2, hidden=3, latent=4, words=5)
    lstms = 2 * 4 * 3 * (2 + 3 + 1) + 4 * 3 * 2
    assert model.values(100, 2) == 8 * 2 + lstms + 2 * 4 * 4 + (4 + 2 + 1) * 2 + 4 * 8 + 2 * 3
    assert model.values(3, 2) < model.values(5, 2) == model.values(6, 2)


def test_a_statement_round_trips_and_is_all_that_is_signed():
    statement = statement_of(FILE, ordering_job(), federation=FEDERATION, member="north")
    assert CorpusStatement.from_json(statement.canonical()) == statement
    assert signed_bytes(statement) == b"tacit/corpus/v1\n" + statement.canonical()
    assert (statement.rows, [each.rows for each in statement.labels]) == (3, [1, 2])
    other = statement.model_copy(update={"rows": 2})
    assert signed_bytes(other) != signed_bytes(statement)


@pytest.mark.parametrize(
    ("key", "value"),
    [("bytes", 0), ("rows", 0), ("round", 0), ("promise", "perhaps"), ("variant", "loud"), ("corpus", b"short")],
)
def test_an_invalid_statement_is_refused(key, value):
    with pytest.raises(ValidationError, match=key):
        statement_of(FILE, ordering_job(), federation=FEDERATION, member="north", **{key: value})


def test_a_statement_has_no_other_keys():
    text = statement_of(FILE, ordering_job(), federation=FEDERATION, member="north").canonical()
    with pytest.raises(DocumentInvalid, match="surprise"):
        CorpusStatement.from_json(text.replace(b"{", b'{"surprise":1,', 1))
