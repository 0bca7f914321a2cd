"""Methods in a job: what stays private, which combinations with noise are sound, and which jobs are refused."""

import pytest
from pydantic import TypeAdapter, ValidationError

from tacit.documents import DocumentInvalid
from tacit.job import JobDocument, JobSpec
from tacit.mechanism import Mechanism
from tacit.method import (
    Method,
    OwnVocabulary,
    keeps_anything,
    keeps_state,
    private_parts,
    protected_by,
    trains_private,
)

METHODS = {
    "local": {"name": "local"},
    "fedavg": {"name": "fedavg"},
    "fedprox": {"name": "fedprox"},
    "lg-fedavg": {"name": "lg-fedavg"},
    "fedrecon": {"name": "fedrecon"},
    "fedvocab": {"name": "fedvocab"},
    "trained": {"name": "fedvocab", "embedding": "trained"},
    "frozen": {"name": "fedvocab", "embedding": "frozen"},
    "plain": {"name": "fedvocab", "adaptive": False},
}
MECHANISMS = {
    "none": {"name": "none"},
    "dp-sgd": {"name": "dp-sgd", "noise_multiplier": 2.0, "lot": 16},
    "gaussian": {"name": "gaussian-update", "noise_multiplier": 2.0, "lot": 1000},
    "laplace": {"name": "laplace-update", "epsilon": 2.0},
    "ring": {"name": "distributed-gaussian", "noise_multiplier": 2.0, "honest": 2},
}
STEPS = "takes steps for which there is no accounting"
FOLLOWS = "trains private parameters on raw text, and later updates depend on them"
OWN = "a member's own vocabulary depends on all its texts"
NO_ACCOUNT = "there is no accounting for"

# (method, mechanism): the outcome with a public vocabulary and with members' own. One of three words: sound, in that
# way. None: no noise, or nothing private. Any other text is part of the refusal.
SOUND = {
    ("local", "dp-sgd"): (STEPS, STEPS),
    ("fedavg", "dp-sgd"): (None, None),
    ("fedprox", "dp-sgd"): (STEPS, STEPS),
    ("lg-fedavg", "dp-sgd"): (STEPS, STEPS),
    ("fedrecon", "dp-sgd"): (STEPS, STEPS),
    # By default, dp-sgd leaves the embedding unchanged.
    ("fedvocab", "dp-sgd"): ("frozen", OWN),
    ("plain", "dp-sgd"): ("frozen", OWN),
    ("frozen", "dp-sgd"): ("frozen", OWN),
    ("trained", "dp-sgd"): ("joint", OWN),
    ("local", "gaussian"): (FOLLOWS, FOLLOWS),
    ("fedavg", "gaussian"): (None, None),
    ("fedprox", "gaussian"): (None, None),
    ("lg-fedavg", "gaussian"): (FOLLOWS, FOLLOWS),
    ("fedrecon", "gaussian"): (FOLLOWS, FOLLOWS),
    ("fedvocab", "gaussian"): ("output", "output"),
    ("plain", "gaussian"): ("output", "output"),
    ("trained", "gaussian"): ("output", "output"),
    ("frozen", "gaussian"): ("frozen", OWN),
    **{
        (method, mechanism): answers
        for mechanism in ("laplace", "ring")
        for method, answers in {
            "local": (FOLLOWS, FOLLOWS),
            "fedavg": (None, None),
            "fedprox": (None, None),
            "lg-fedavg": (FOLLOWS, FOLLOWS),
            "fedrecon": (FOLLOWS, FOLLOWS),
            "fedvocab": (NO_ACCOUNT, NO_ACCOUNT),
            "plain": (NO_ACCOUNT, NO_ACCOUNT),
            "trained": (NO_ACCOUNT, NO_ACCOUNT),
            "frozen": ("frozen", OWN),
        }.items()
    },
    **{(method, "none"): (None, None) for method in METHODS},
}


def method(name):
    return TypeAdapter(Method).validate_python(METHODS[name])


def mechanism(name):
    return TypeAdapter(Mechanism).validate_python(MECHANISMS[name])


def test_every_combination_is_in_the_table():
    assert SOUND.keys() == {(one, other) for one in METHODS for other in MECHANISMS}


@pytest.mark.parametrize("own", [False, True], ids=["public", "own"])
@pytest.mark.parametrize(("name", "noise"), SOUND)
def test_three_combinations_are_sound_and_others_refused(name, noise, own):
    expected = SOUND[name, noise][own]
    if expected in (None, "frozen", "joint", "output"):
        assert protected_by(method(name), mechanism(noise), own_vocabulary=own) == expected
        return
    with pytest.raises(ValueError, match=r"^(method|vocabulary): ") as refused:
        protected_by(method(name), mechanism(noise), own_vocabulary=own)
    assert expected in str(refused.value)
    # The error says what to do instead.
    assert "use " in str(refused.value)


@pytest.mark.parametrize(
    ("name", "parts", "anything", "state"),
    [
        ("local", {"embedding", "encoder", "head"}, True, True),
        ("fedavg", set(), False, False),
        ("fedprox", set(), False, False),
        ("lg-fedavg", {"embedding", "encoder"}, True, True),
        ("fedrecon", set(), True, False),
        ("fedvocab", {"embedding"}, True, True),
        ("frozen", {"embedding"}, True, True),
    ],
)
def test_each_methods_private_parts_are_known(name, parts, anything, state):
    assert private_parts(method(name)) == parts
    assert keeps_anything(method(name)) == anything
    assert keeps_state(method(name)) == state


@pytest.mark.parametrize(
    ("name", "noise", "moves"),
    [
        ("fedvocab", "none", True),
        ("fedvocab", "gaussian", True),
        ("fedvocab", "dp-sgd", False),
        ("trained", "dp-sgd", True),
        ("frozen", "none", False),
        ("lg-fedavg", "none", True),
        ("fedrecon", "none", True),
        ("fedavg", "none", False),
        ("fedprox", "none", False),
    ],
)
def test_when_private_parameters_move(name, noise, moves):
    assert trains_private(method(name), mechanism(noise)) == moves


# ---- in a job -------------------------------------------------------------------------------------------------------

PUBLIC_WORDS = {"kind": "words", "file": "words.txt"}
OWN_WORDS = {"kind": "words", "size": 100}


def spec(**more):
    return JobSpec.model_validate(
        {"schema": 1, "name": "desk", "labels": ["a", "b"], "vocabulary": PUBLIC_WORDS, **more}
    )


def document(**more):
    base = {"schema": 1, "name": "desk", "labels": ["a", "b"], "values": 10}
    return JobDocument.model_validate({**base, "manifest": "00" * 32, "weights": "11" * 32, **more})


START = {"manifest": "22" * 32, "weights": "33" * 32, "values": 40}
TOKENIZER = "44" * 32


def test_a_jobs_method_is_a_word_a_table_or_the_default():
    assert spec().method.name == "fedavg"
    assert spec(method="fedvocab").method == method("fedvocab")
    assert spec(method={"name": "fedprox", "mu": 0.5}).method.mu == 0.5
    assert spec(vocabulary=OWN_WORDS, method="fedvocab").vocabulary == OwnVocabulary(kind="words", size=100)
    assert spec(vocabulary=OWN_WORDS, method="fedvocab").own_vocabulary
    assert not spec(method="fedvocab").own_vocabulary


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        ({"method": "local"}, "there is nothing to federate"),
        ({"method": "fedmagic"}, "method"),
        ({"method": {"name": "fedprox", "mu": 0.0}}, "mu"),
        ({"method": {"name": "lg-fedavg", "private": []}}, "private"),
        ({"method": {"name": "lg-fedavg", "private": ["head"]}}, "private"),
        ({"method": {"name": "fedrecon", "tokens": []}}, "tokens"),
        ({"method": {"name": "fedrecon", "support": 1.0}}, "support"),
        ({"method": "fedvocab", "model": {"freeze_embedding": True}}, 'set method.embedding = "frozen"'),
        ({"method": "fedavg", "vocabulary": OWN_WORDS}, "fedavg shares the embedding"),
        ({"method": "fedprox", "vocabulary": OWN_WORDS}, "fedprox shares the embedding"),
        ({"method": "fedrecon", "vocabulary": OWN_WORDS}, "fedrecon shares the embedding"),
        ({"method": {"name": "lg-fedavg", "private": ["encoder"]}, "vocabulary": OWN_WORDS}, "shares the embedding"),
        ({"method": "fedvocab", "vocabulary": {"kind": "words", "size": 2}}, "size"),
        ({"method": "fedvocab", "vocabulary": OWN_WORDS, "mechanism": MECHANISMS["dp-sgd"]}, OWN),
        ({"method": "fedrecon", "mechanism": MECHANISMS["gaussian"]}, FOLLOWS),
        ({"method": "fedvocab", "mechanism": MECHANISMS["laplace"]}, NO_ACCOUNT),
    ],
    ids=str,
)
def test_a_job_that_cannot_run_is_refused_with_the_reason(says, sentence):
    with pytest.raises(ValidationError) as refused:
        spec(**says)
    assert sentence in str(refused.value)


def test_a_job_knows_how_it_is_protected():
    assert spec(method="fedvocab", mechanism=MECHANISMS["dp-sgd"]).protected == "frozen"
    assert spec(method=METHODS["trained"], mechanism=MECHANISMS["dp-sgd"]).protected == "joint"
    output = spec(method="fedvocab", vocabulary=OWN_WORDS, mechanism=MECHANISMS["gaussian"])
    assert output.protected == "output"
    assert spec(method="fedvocab").protected is None
    assert spec(mechanism=MECHANISMS["dp-sgd"]).protected is None


def test_a_document_has_a_tokenizer_or_own_vocabularies():
    both = {"vocabulary": OWN_WORDS, "tokenizer": TOKENIZER}
    for wrong in ({}, both):
        with pytest.raises(ValidationError, match="either a tokenizer or a vocabulary that its members build"):
            document(method="fedvocab", **wrong)
    own = document(method="fedvocab", vocabulary=OWN_WORDS)
    assert own.own_vocabulary
    assert own.files.keys() == {"manifest.json", "weights.bin"}


def test_a_document_names_the_private_start_iff_the_vocabulary_is_public():
    public = document(method="fedvocab", tokenizer=TOKENIZER, private=START)
    assert public.files == {
        "manifest.json": bytes(32),
        "weights.bin": bytes([0x11]) * 32,
        "tokenizer.json": bytes([0x44]) * 32,
        "private.json": bytes([0x22]) * 32,
        "private.bin": bytes([0x33]) * 32,
    }
    assert public.blobs == tuple(public.files.values())
    for wrong in (
        {"method": "fedvocab", "tokenizer": TOKENIZER},
        {"method": "fedvocab", "vocabulary": OWN_WORDS, "private": START},
        {"method": "fedavg", "tokenizer": TOKENIZER, "private": START},
        {"method": "fedrecon", "tokenizer": TOKENIZER},
    ):
        with pytest.raises(ValidationError, match=r"private: a job has it exactly if"):
            document(**wrong)


def test_only_a_model_that_is_shared_whole_is_complete():
    assert document(tokenizer=TOKENIZER).complete
    assert document(method="fedprox", tokenizer=TOKENIZER).complete
    assert not document(method="fedvocab", vocabulary=OWN_WORDS).complete
    assert not document(method="fedrecon", tokenizer=TOKENIZER, private=START).complete


def test_every_number_of_a_method_is_part_of_the_document():
    """Members that train differently are in different jobs, because every context holds the document's digest."""
    said = [
        {"method": "fedvocab"},
        {"method": {"name": "fedvocab", "adaptive": False}},
        {"method": {"name": "fedvocab", "embedding": "frozen"}},
        {"method": {"name": "lg-fedavg"}},
    ]
    digests = {document(tokenizer=TOKENIZER, private=START, **each).digest() for each in said}
    assert len(digests) == len(said)
    again = document(tokenizer=TOKENIZER, private=START, **said[1])
    assert JobDocument.from_json(again.canonical(), what="it") == again


FILE = 'schema = 1\nname = "desk"\nlabels = ["a", "b"]\n[vocabulary]\n[method]\nname = "fedvocab"\n'


def test_adaptive_beside_a_frozen_embedding_is_refused_in_a_file(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(FILE + 'adaptive = true\nembedding = "frozen"\n')
    with pytest.raises(DocumentInvalid) as refused:
        JobSpec.from_toml(path)
    assert str(refused.value) == (
        f'{path}: method.adaptive: has no effect, because embedding = "frozen" keeps the embedding as it is; leave '
        'this key out, or set embedding = "trained"'
    )
    for rest, adaptive, embedding in (
        ('embedding = "frozen"\n', True, "frozen"),
        ('adaptive = false\nembedding = "frozen"\n', False, "frozen"),
        ('adaptive = true\nembedding = "trained"\n', True, "trained"),
        ("adaptive = true\n", True, None),
    ):
        path.write_text(FILE + rest)
        method = JobSpec.from_toml(path).method
        assert (method.adaptive, method.embedding) == (adaptive, embedding)


def test_a_document_may_state_adaptive_beside_a_frozen_embedding():
    """Only the operator's file must not state `adaptive` beside a frozen embedding."""
    frozen = document(method={"name": "fedvocab", "embedding": "frozen"}, vocabulary=OWN_WORDS)
    assert b'"method":{"adaptive":true,"embedding":"frozen","name":"fedvocab"}' in frozen.canonical()
    again = JobDocument.from_json(frozen.canonical())
    assert again == frozen
    assert again.canonical() == frozen.canonical()
