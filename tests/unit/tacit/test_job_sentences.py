"""Errors in job files: the key as the file has it, what is wrong, what to do."""

from math import inf

import pytest
from pydantic import TypeAdapter, ValidationError

from learning.text.encoder import VocabularyInvalid
from learning.text.vocabulary import own_tokenizer
from tacit.documents import DocumentInvalid, sentence_of
from tacit.job import JobDocument, JobSpec
from tacit.mechanism import Mechanism
from tacit.method import SPECIAL_ENTRIES, LgFedAvg, OwnVocabulary
from tacit.model import BiLSTMModel, TextCNNModel
from tests.support.fleet import job_document

BASE = {"name": "desk", "labels": ["a", "b"], "vocabulary": {"kind": "words", "file": "words.txt"}}
METHODS = "fedavg, fedprox, lg-fedavg, fedrecon, fedvocab"
TOKENS = 'must be "digits", or a list of 1 to 10000 vocabulary entries of 1 to 200 characters'
NO_TABLE = "must be a table of keys: [vocabulary] with kind and file, or without file if every member builds its own"
PARTS = 'must be a list of private parts: ["embedding"], ["encoder"], or both'
HEAD = "'head' cannot be private here; name embedding, encoder or both (the head is always shared)"


def said(**changes):
    with pytest.raises(ValidationError) as refused:
        JobSpec.model_validate({"schema": 1, **BASE, **changes})
    return sentence_of(refused.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        # Keys read as in the file, without a table's kind.
        (
            {"model": {"architecture": "bilstm", "hiden": 3}},
            'model.hiden: bilstm has no such key; check its spelling, or architecture = "bilstm"',
        ),
        (
            {"model": {"hidden": 3}},
            "model.hidden: textcnn has no such key (bilstm, rvae have); check its spelling, or "
            'architecture = "textcnn"',
        ),
        (
            {"model": {"config": {}, "base": "x"}},
            "; ".join(
                f"model.{key}: textcnn has no such key (transformer, prompted have); check its spelling, or "
                'architecture = "textcnn"'
                for key in ("config", "base")
            ),
        ),
        (
            {"method": {"name": "fedvocab", "adaptiv": True}},
            'method.adaptiv: fedvocab has no such key; check its spelling, or name = "fedvocab"',
        ),
        (
            {"mechanism": {"name": "dp-sgd", "noise_multiplier": 1, "epsilon": 3}},
            'mechanism.epsilon: dp-sgd has no such key (laplace-update has); check its spelling, or name = "dp-sgd"',
        ),
        ({"mechanism": "dp-sgd"}, "mechanism.noise_multiplier: missing; it has no default"),
        (
            {"model": {"architecture": "bilstm", "hidden": 0}},
            "model.hidden: must be 1 or more",
        ),
        ({"model": {"widths": [65]}}, "model: every width must lie between 1 and max_tokens"),
        # Numbers and texts.
        ({"seed": -1}, "seed: must be 0 or more"),
        ({"training": {"batch": 0}}, "training.batch: must be 1 or more"),
        ({"training": {"batch": 1.5}}, "training.batch: must be a whole number, not a fraction"),
        ({"training": {"batch": "many"}}, "training.batch: must be a whole number, not text"),
        ({"training": {"learning_rate": "high"}}, "training.learning_rate: must be a number, not text"),
        ({"training": {"learning_rate": inf}}, "training.learning_rate: must be a finite number"),
        ({"training": {"checkpointing": "never"}}, "training.checkpointing: must be true or false, not text"),
        # true would otherwise be 1.
        ({"training": {"batch": True}}, "training.batch: must be a number, not true or false"),
        ({"aggregation": {"clip": True}}, "aggregation.clip: must be a number, not true or false"),
        ({"rounds": {"count": 10**7}}, "rounds.count: must be at most 1,000,000"),
        ({"name": 3}, "name: must be text, not a number"),
        # Never the names of the alternatives that the software has.
        ({"start": 3}, 'start: must be "job:version", such as "desk:8", or a table of keys'),
        (
            {"name": "Desk"},
            "name: must be 1 to 63 of a-z, 0-9, dot, dash and underscore, with a letter or digit first",
        ),
        ({"surprise": 1}, "surprise: unknown key; check its spelling"),
        ({"rounds": {"deadlines": {"trainin": 1}}}, "rounds.deadlines.trainin: unknown key; check its spelling"),
        # Kinds that are unknown or missing, and values that are not tables.
        ({"method": {"name": "fedvocap"}}, f"method.name: 'fedvocap' is not one of {METHODS}"),
        ({"method": "fedvocap"}, f"method: 'fedvocap' is not one of {METHODS}"),
        ({"method": {"name": ["fedvocab"]}}, f"method.name: ['fedvocab'] is not one of {METHODS}"),
        ({"method": "{sentence}"}, f"method: '{{sentence}}' is not one of {METHODS}"),
        ({"method": {"adaptive": True}}, f"method.name: missing; write one of {METHODS}"),
        ({"method": 3}, f"method: must be a table of keys, not a number; write a table with name = one of {METHODS}"),
        (
            {"model": {"architecture": "cnn"}},
            "model.architecture: 'cnn' is not one of textcnn, bilstm, transformer, prompted, rvae, plugin",
        ),
        ({"model": "bilstm"}, 'model: must be a table of keys, not text; write a table with architecture = "bilstm"'),
        ({"rounds": [1]}, "rounds: must be a table of keys, not a list"),
        ({"training": True}, "training: must be a table of keys, not true or false"),
        # Lists.
        ({"method": {"name": "lg-fedavg", "private": ["head"]}}, f"method.private: {HEAD}"),
        ({"method": {"name": "lg-fedavg", "private": ["embedding", "encoder", "head"]}}, f"method.private: {HEAD}"),
        ({"method": {"name": "lg-fedavg", "private": []}}, f"method.private: {PARTS}"),
        ({"method": {"name": "lg-fedavg", "private": "encoder"}}, f"method.private: {PARTS}"),
        (
            {"method": {"name": "lg-fedavg", "private": ["encoder", "encoder"]}},
            "method.private: encoder is listed twice; name each part once",
        ),
        *(
            ({"method": {"name": "fedrecon", "tokens": tokens}}, f"method.tokens: {TOKENS}")
            for tokens in ("digit", [], [""], ["a", 3], ["a" * 201], 3)
        ),
        ({"labels": ["a"]}, "labels: must have 2 entries or more, has 1"),
        ({"labels": ["a", ""]}, "labels.1: must not be empty"),
        ({"labels": "ab"}, "labels: must be a list, not text"),
        # A vocabulary's kind has no name: the key `file` decides.
        ({"vocabulary": "own"}, f"vocabulary: {NO_TABLE}"),
        ({"vocabulary": None}, f"vocabulary: {NO_TABLE}"),
        (
            {"vocabulary": {"kind": "words", "fil": "words.txt"}},
            "vocabulary.fil: without `file`, each member builds its own vocabulary, which has no such key; check its "
            "spelling, or name the file",
        ),
        (
            {"vocabulary": {"kind": "words", "pretrained": "t.txt"}},
            "vocabulary.pretrained: only a vocabulary from a file has this key; without `file`, each member builds its "
            "own; name the file, or leave this key out",
        ),
        (
            {"vocabulary": {"kind": "words", "file": "words.txt", "size": 3}},
            "vocabulary.size: only members' own vocabularies have this key, and they have no `file`; leave out one of "
            "the two",
        ),
        (
            {"vocabulary": {"kind": "words", "file": "words.txt", "sort": 3}},
            "vocabulary.sort: a vocabulary from a file has no such key; check its spelling",
        ),
        ({"vocabulary": {"file": "words.txt"}}, "vocabulary.kind: missing; it has no default"),
        # A mistake in the job as a whole names its keys itself.
        *(
            (
                {
                    "method": method,
                    "model": {"architecture": "transformer", "base": "bert"},
                    "vocabulary": {"kind": "wordpiece", "start": "random"},
                },
                "model.base: its weights would reach nobody: lg-fedavg keeps the encoder private, and with "
                'vocabulary.start = "random" all private parameters start at random; set start = "base", share the '
                'encoder (method fedvocab, or lg-fedavg with private = ["embedding"]), or name the base\'s vocab.txt '
                "as vocabulary.file",
            )
            for method in ("lg-fedavg", {"name": "lg-fedavg", "private": ["encoder", "embedding"]})
        ),
        (
            {"method": "fedvocab", "vocabulary": {"kind": "words", "start": "base"}},
            "vocabulary.start: only a transformer has a base model whose rows members could start from; leave this key "
            "out",
        ),
        ({"labels": ["a", "a"]}, "labels: a label is listed twice; name each label once"),
        (
            {"method": {"name": "lg-fedavg", "private": ["encoder"]}, "model": {"freeze_embedding": True}},
            "model.freeze_embedding: lg-fedavg trains the whole model; leave this key out, or use fedavg or fedprox",
        ),
        (
            {"method": "fedrecon", "model": {"freeze_embedding": True}},
            "model.freeze_embedding: fedrecon reconstructs rows of the embedding in each round; leave this key out",
        ),
        (
            {"method": "fedvocab", "model": {"freeze_embedding": True}},
            "model.freeze_embedding: fedvocab has a key of its own for that; leave this one out and set "
            'method.embedding = "frozen"',
        ),
        (
            {"training": {"embedding_learning_rate": 0.1}, "model": {"freeze_embedding": True}},
            "training.embedding_learning_rate: model.freeze_embedding keeps the embedding as it is; leave this key out",
        ),
        (
            {"training": {"embedding_learning_rate": 0.1}, "method": {"name": "fedvocab", "embedding": "frozen"}},
            'training.embedding_learning_rate: method.embedding = "frozen" keeps the embedding as it is; leave this '
            "key out",
        ),
        (
            {
                "training": {"embedding_learning_rate": 0.1},
                "method": "fedvocab",
                "mechanism": {"name": "dp-sgd", "noise_multiplier": 1.0, "lot": 8, "steps": 2},
            },
            "training.embedding_learning_rate: under dp-sgd fedvocab keeps the embedding as it is; leave this key out",
        ),
        (
            {
                "training": {"embedding_learning_rate": 0.1},
                "model": {"architecture": "prompted", "base": "x", "task": {"name": "head"}},
                "vocabulary": None,
            },
            "training.embedding_learning_rate: a prompted model's base has its embedding frozen; leave this key out",
        ),
        (
            {
                "training": {"embedding_learning_rate": 0.1},
                "model": {"architecture": "rvae", "variant": "published"},
            },
            "training.embedding_learning_rate: model.variant = published uses one rate, like the paper; leave this key "
            "out",
        ),
        (
            {"training": {"optimiser": "adamw", "learning_rate": 50.0, "weight_decay": 0.1}},
            "training.weight_decay: each step would multiply trained values by -4 (1 - learning_rate * weight_decay), "
            "and so flip their signs; lower weight_decay or learning_rate until their product is at most 1",
        ),
        (
            {"training": {"optimiser": "adamw", "embedding_learning_rate": 4.0, "weight_decay": 0.5}},
            "training.weight_decay: each step would multiply trained values by -1 (1 - embedding_learning_rate * "
            "weight_decay), and so flip their signs; lower weight_decay or embedding_learning_rate until their product "
            "is at most 1",
        ),
        (
            {"training": {"precision": "bfloat16"}},
            "training.precision: bfloat16 is only for the frozen network of a prompted model, and this model is "
            "trained; leave this key out",
        ),
        (
            {
                "training": {"precision": "bfloat16"},
                "model": {"architecture": "prompted", "base": "x", "task": {"name": "head"}},
                "vocabulary": None,
                "mechanism": {"name": "dp-sgd", "noise_multiplier": 1.0, "lot": 8, "steps": 2},
            },
            "training.precision: dp-sgd computes in float32, and only a model that writes can keep its matrices in "
            "less; leave this key out",
        ),
        *(
            (
                {"training": {"logit_adjustment": True}, **changes},
                "training.logit_adjustment: only the heads of textcnn, bilstm and transformer can add the label prior; "
                "leave this key out",
            )
            for changes in (
                {"model": {"architecture": "prompted", "base": "x", "task": {"name": "head"}}, "vocabulary": None},
                {"model": {"architecture": "rvae"}},
            )
        ),
        (
            {
                "training": {"logit_adjustment": True},
                "mechanism": {"name": "dp-sgd", "noise_multiplier": 1.0, "lot": 8, "steps": 2},
            },
            "training.logit_adjustment: dp-sgd clips each example's part of a step, but the label prior depends on "
            "all examples; leave this key out",
        ),
        # Keys that accept one of a few words, reported like kinds.
        ({"training": {"precision": "float16"}}, "training.precision: 'float16' is not one of float32, bfloat16"),
        ({"training": {"optimiser": "lion"}}, "training.optimiser: 'lion' is not one of adam, adamw, sgd, adafactor"),
        (
            {"training": {"optimiser": ["adam"]}},
            "training.optimiser: must be one of adam, adamw, sgd, adafactor, not a list",
        ),
        (
            {"aggregation": {"groups": 3, "combine": "mode"}},
            "aggregation.combine: 'mode' is not one of mean, median, trimmed-mean, reject-outliers",
        ),
        (
            {"mechanism": {"name": "gaussian-update", "noise_multiplier": 1, "sampling": "shuffled"}},
            "mechanism.sampling: 'shuffled' is not one of poisson, fixed",
        ),
        (
            {"mechanism": {"name": "distributed-gaussian", "noise_multiplier": 1, "unit": "device"}},
            "mechanism.unit: 'device' is not one of example, member",
        ),
        (
            {"mechanism": {"name": "dp-sgd", "noise_multiplier": 1, "unit": "member"}},
            "mechanism.unit: 'member' is not one of example, person",
        ),
        (
            {"mechanism": {"name": "dp-sgd", "noise_multiplier": 1, "unit": 1}},
            "mechanism.unit: must be one of example, person, not a number",
        ),
        *(
            (
                {"mechanism": {**numbers, "unit": "person"}},
                "mechanism.unit: only dp-sgd draws and clips persons, at each local step; use dp-sgd, or another unit",
            )
            for numbers in (
                {"name": "gaussian-update", "noise_multiplier": 1},
                {"name": "laplace-update", "epsilon": 1},
                {"name": "distributed-gaussian", "noise_multiplier": 1},
            )
        ),
        (
            {"mechanism": {"name": "dp-sgd", "noise_multiplier": 1, "unit": "person"}},
            "mechanism: person.max_examples: missing; say how many rows of a person a draw uses at most",
        ),
        (
            {"mechanism": {"name": "dp-sgd", "noise_multiplier": 1, "person": {"max_examples": 8}}},
            'mechanism: person: has no effect on single examples; leave it out, or set unit = "person"',
        ),
        (
            {"mechanism": {"name": "dp-sgd", "noise_multiplier": 1, "unit": "person", "person": {"max_examples": 8}}},
            "mechanism.unit: a person's rows have one gradient, which is known for heads, prompts and adapters on a "
            'frozen model; set model.architecture = "prompted", or unit = "example"',
        ),
        (
            {"method": {"name": "fedvocab", "embedding": "thawed"}},
            "method.embedding: 'thawed' is not one of trained, frozen",
        ),
        (
            {"vocabulary": {"kind": "letters", "file": "words.txt"}},
            "vocabulary.kind: 'letters' is not one of wordpiece, words",
        ),
        ({"model": {"architecture": "bilstm", "pooling": "min"}}, "model.pooling: 'min' is not one of max, mean, last"),
        (
            {"model": {"architecture": "rvae", "variant": "loud"}},
            "model.variant: 'loud' is not one of sound, published",
        ),
        (
            {
                "model": {
                    "architecture": "prompted",
                    "base": "x",
                    "task": {"name": "head"},
                    "injection": {"name": "p-tuning", "encoder": "gru"},
                },
                "vocabulary": None,
            },
            "model.injection.encoder: 'gru' is not one of mlp, lstm",
        ),
        (
            {"training": {"embedding_learning_rate": 0}},
            "training.embedding_learning_rate: must be above 0",
        ),
    ],
    ids=lambda each: str(each)[:60],
)
def test_a_mistake_is_one_sentence_under_the_files_own_key(changes, sentence):
    assert said(**changes) == sentence


def test_two_mistakes_in_one_table_are_both_reported():
    assert said(model={"architecture": "bilstm", "hiden": 3, "dropout": 1}) == (
        "model.dropout: must be below 1; "
        'model.hiden: bilstm has no such key; check its spelling, or architecture = "bilstm"'
    )


def test_mistakes_in_documents_and_files_read_the_same():
    text = job_document().canonical().replace(b'"architecture":"textcnn"', b'"architecture":"textcnn","hiden":1')
    with pytest.raises(DocumentInvalid, match=r"^job\.json: model\.hiden: textcnn has no such key"):
        JobDocument.from_json(text, what="job.json")


def test_a_value_of_the_wrong_type_is_not_shown():
    assert "secret" not in said(rounds="secret")


@pytest.mark.parametrize("size", [10**400, "9" * 5000])
def test_a_long_unknown_kind_makes_a_short_sentence(size):
    assert len(said(method={"name": size})) < 200
    assert len(said(training={"optimiser": size})) < 200


def test_a_word_stands_for_a_mechanism_or_method_table():
    assert (
        JobSpec.model_validate({"schema": 1, **BASE, "mechanism": "none", "method": "lg-fedavg"}).method == LgFedAvg()
    )
    model = BiLSTMModel(hidden=7)
    made = JobSpec(name="desk", labels=("a", "b"), vocabulary=OwnVocabulary(), method="fedvocab", model=model)
    assert made.model is model
    assert JobSpec.model_validate_json(made.model_dump_json(by_alias=True)) == made
    with pytest.raises(ValidationError):
        JobSpec.model_validate({"schema": 1, **BASE, "method": TextCNNModel()})
    assert TypeAdapter(Mechanism).validate_python({"name": "none"}).name == "none"


@pytest.mark.parametrize("kind", SPECIAL_ENTRIES)
def test_an_own_vocabulary_has_room_beside_its_special_entries(kind):
    """The smallest size that a job may state is the smallest that a member can build."""
    least = len(SPECIAL_ENTRIES[kind]) + 1
    wrong = said(method="fedvocab", vocabulary={"kind": kind, "size": least - 1})
    assert wrong.startswith(f"vocabulary.size: must be at least {least}, is {least - 1}: [PAD], [UNK]")
    assert OwnVocabulary(kind=kind, size=least).size == least
    assert own_tokenizer(["a b a"], kind, least)
    with pytest.raises(VocabularyInvalid, match="no room after"):
        own_tokenizer(["a b a"], kind, least - 1)
    said_twice = said(method="fedvocab", vocabulary={"kind": "letters", "size": 0})
    assert said_twice == "vocabulary.kind: 'letters' is not one of words, wordpiece"


def test_the_precision_is_float32_by_default():
    prompted = {"model": {"architecture": "prompted", "base": "x", "task": {"name": "head"}}, "vocabulary": None}
    less = JobSpec.model_validate({"schema": 1, **BASE, **prompted, "training": {"precision": "bfloat16"}})
    assert less.training.model_dump()["precision"] == "bfloat16"
    plain = JobSpec.model_validate({"schema": 1, **BASE, **prompted})
    assert plain.training.precision == "float32"


def test_under_dp_sgd_a_model_that_writes_may_keep_its_matrices_in_bfloat16():
    task = {"name": "generate", "template": "chatml"}
    body = {
        "schema": 1,
        "name": "desk",
        "model": {"architecture": "prompted", "base": "x", "task": task},
        "training": {"precision": "bfloat16"},
        "mechanism": {"name": "dp-sgd", "noise_multiplier": 1.0, "lot": 8, "steps": 2},
    }
    assert JobSpec.model_validate(body).training.precision == "bfloat16"


def test_table_words_are_only_for_an_own_vocabulary_of_words():
    alone = OwnVocabulary(table_words=False)
    assert OwnVocabulary.model_validate(alone.model_dump()) == alone
    assert OwnVocabulary(kind="wordpiece").table_words
    wrong = said(method="fedvocab", vocabulary={"kind": "wordpiece", "table_words": False})
    assert wrong.startswith(
        'vocabulary.table_words: is only for kind = "words"; word pieces never use a table\'s words'
    )
    assert said(method="fedvocab", vocabulary={"file": "words.txt", "kind": "words", "table_words": False}).startswith(
        "vocabulary.table_words: only members' own vocabularies have this key"
    )


def test_logits_are_adjusted_only_where_the_job_says_so():
    job = job_document()
    assert not job.training.logit_adjustment
    adjusted = job.model_copy(update={"training": job.training.model_copy(update={"logit_adjustment": True})})
    assert JobDocument.from_json(adjusted.canonical(), what="job.json").training.logit_adjustment
    # Noise over the whole update covers the label prior, too.
    noise = {"name": "gaussian-update", "noise_multiplier": 1.0, "lot": 8}
    spec = {"schema": 1, **BASE, "training": {"logit_adjustment": True}, "mechanism": noise}
    assert JobSpec.model_validate(spec).training.logit_adjustment


def test_the_embedding_has_its_own_rate_only_if_the_job_sets_one():
    job = job_document()
    assert job.training.embedding_learning_rate is None
    own = job.model_copy(update={"training": job.training.model_copy(update={"embedding_learning_rate": 0.5})})
    assert JobDocument.from_json(own.canonical(), what="job.json").training.embedding_learning_rate == 0.5
    assert own.digest() != job.digest()
    # The job trains the embedding under noise, so a rate for it has an effect.
    spec = {"method": {"name": "fedvocab", "embedding": "trained"}, "training": {"embedding_learning_rate": 0.1}}
    mechanism = {"name": "dp-sgd", "noise_multiplier": 1.0, "lot": 8, "steps": 2}
    assert JobSpec.model_validate({"schema": 1, **BASE, **spec, "mechanism": mechanism}).training.epochs == 1
