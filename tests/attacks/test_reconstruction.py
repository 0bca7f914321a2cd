"""Reconstruction of a batch's words from one gradient: where it works, and what stops it.

Both directions: the attacks succeed on what FedAvg shares, and on FedVocab's gradient with the right table, so that
their failure elsewhere means something. The attacker with the public table is FedVocab's honest test, and the method
does not pass it.
"""

import numpy as np
import pytest
import torch

from benchmarks.reconstruction.attack import (
    Batch,
    Matching,
    Observed,
    Table,
    nearest_words,
    noised,
    shared_gradient,
    shared_words,
    summed,
    tally,
    tokens_by_positions,
    tokens_by_rows,
    tokens_by_span,
    tokens_by_states,
    vectors_by_matching,
)
from benchmarks.reconstruction.tokens import average_shared
from edge_client.private_store import PrivateStore
from edge_client.session.keeping import Keeper
from learning.methods import Setting, phases_of
from learning.models import build, division_of
from learning.text.corpus import encoder_of
from learning.text.examples import Example
from learning.training.local import train
from learning.training.start import first_private
from tacit.job import JobDocument, Training
from tacit.method import FedAvg, FedRecon, FedVocab
from tacit.model import BiLSTMModel, TransformerModel

torch.set_num_threads(1)

TEXTS = [
    "bed 14 moved to ward 3b before 0830 because the lift stood still",
    "please ring 5550 142 after 1900 about the lost key of flat 27",
    "invoice 88 for 1200 screws came back with 36 of them bent",
    "on 4 may the tram 21 left 9 minutes late and nobody complained",
    "her locker 403 opens with 7716 if you turn it twice past 50",
    "we counted 61 swans 17 geese and 1 heron along the north shore",
    "shelf 12 holds 340 jars while shelf 13 is empty since friday",
    "room 208 needs 2 lamps and 6 chairs until monday at noon",
]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
WORDS = (
    *SPECIAL,
    *sorted({word for text in TEXTS for word in text.split()}),
    *(f"{one}{other}" for one in SYLLABLES[:40] for other in SYLLABLES[:40]),
    *(f"{number}x" for number in range(100)),
)
PLACE = {word: place for place, word in enumerate(WORDS)}
WIDTH, LABELS = 48, 4
RECIPE = Training(epochs=1, batch=4, optimiser="adam", learning_rate=0.005)


def batch_of(*texts: str, frame=False) -> Batch:
    rows = [[PLACE[word] for word in text.split()] for text in texts]
    rows = [[PLACE["[CLS]"], *row, PLACE["[SEP]"]] if frame else row for row in rows]
    ids = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for line, row in zip(ids, rows, strict=True):
        line[: len(row)] = row
    return Batch(ids, np.arange(len(rows)) % LABELS, WORDS, 0)


def lstm(seed=1, **changes):
    return build(BiLSTMModel(embedding=WIDTH, hidden=64, **changes), len(WORDS), LABELS, 0, seed=seed)


def bert(seed=1):
    config = {
        "model_type": "bert",
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "max_position_embeddings": 32,
    }
    return build(TransformerModel(config=config, max_tokens=32), len(WORDS), LABELS, 0, seed=seed)


def table_of(module) -> Table:
    return Table(WORDS, module.embedding.weight.detach().numpy().copy())


def among_many(words, rows) -> Table:
    """A table with some 1,600 more words, among which a guess is seldom right."""
    more = tuple(word for word in WORDS if word not in words)
    drawn = np.random.default_rng(3).standard_normal((len(more), rows.shape[1]), dtype=np.float32)
    return Table((*words, *more), np.concatenate([rows, drawn * rows.std()]))


def state_of(module):
    return {name: value.detach() for name, value in module.named_parameters()}


def gradient_of(module, batch):
    return shared_gradient(module, batch, division_of(FedVocab(), module))


def after_rounds(module, method, rounds, texts=TEXTS):
    """The member's model at the step whose gradient is seen, after its own training on its own texts."""
    own = batch_of(*texts)
    names = frozenset(name for name, _ in module.named_parameters())
    setting = Setting(names, division_of(method, module, WORDS), len(own.ids), 1, len(WORDS), True, 0)
    phases = phases_of(method, setting)
    for round_ in range(rounds):
        train(module, own.ids, own.labels, RECIPE, seed=round_, phases=phases)
    if phases[:-1]:
        train(module, own.ids, own.labels, RECIPE, seed=rounds, phases=phases[:-1])
    return module


def own_vocabulary_job():
    model = BiLSTMModel(embedding=WIDTH, hidden=64, max_tokens=32)
    said = {
        "schema": 1,
        "name": "desk",
        "labels": ["a", "b"],
        "method": "fedvocab",
        "model": model.model_dump(),
        "vocabulary": {"kind": "words", "size": 500},
        "manifest": "00" * 32,
        "weights": "11" * 32,
        "values": 1_000,
    }
    return JobDocument.model_validate(said)


@pytest.mark.parametrize("size", [1, 8])
def test_fedavg_shows_exactly_which_words_a_batch_has(size):
    module, batch = lstm(), batch_of(*TEXTS[:size])
    division = division_of(FedAvg(), module)
    said = tokens_by_rows(shared_gradient(module, batch, division), shared_words(division, WORDS))
    assert sorted(said) == sorted(set(batch.tokens()))
    assert tally(batch.tokens(), said).f1 > (0.9 if size == 1 else 0.8)


def test_fedvocab_shows_every_word_to_an_attacker_with_the_table():
    module, batch = lstm(), batch_of(TEXTS[0])
    found = tally(batch.tokens(), tokens_by_span(gradient_of(module, batch), table_of(module), batch.lengths))
    assert found.f1 > 0.9
    assert found.digit_leakage == 1


def test_the_states_show_whole_texts_if_their_words_fill_the_span():
    module, batch = lstm(), batch_of(*TEXTS[:4])
    assert len(set(batch.tokens())) >= WIDTH - 1 > len(batch.tokens()) / 2
    gradient, table = gradient_of(module, batch), table_of(module)
    assert tally(batch.tokens(), tokens_by_span(gradient, table, batch.lengths)).f1 < 0.9
    said = tokens_by_states(gradient, state_of(module), table, batch.lengths)
    assert sorted(said) == sorted(batch.tokens())


def test_attention_shows_every_word_and_its_place():
    module, batch = bert(), batch_of(*TEXTS[:2], frame=True)
    found = tally(
        batch.tokens(), tokens_by_positions(module, gradient_of(module, batch), table_of(module), batch.lengths)
    )
    assert found.f1 > 0.9
    # At one of its places, a word that occurs at two places of two texts can be taken for another.
    assert found.digit_leakage > 0.8


@pytest.mark.parametrize(
    ("make", "text", "how"),
    [
        (lstm, "shelf 12 holds 340 jars while shelf 13 is empty", Matching(200, 0.05, 0.1)),
        (bert, "ring 5550 142 after 1900", Matching(300, 0.004, 0.02, whitening=3e-4)),
    ],
    ids=["lstm", "bert"],
)
def test_matching_finds_a_text_only_with_the_right_table(make, text, how):
    module, batch = make(seed=2), batch_of(text, frame=make is bert)
    observed = Observed(gradient_of(module, batch), batch.labels, batch.seen)
    (vectors,) = vectors_by_matching(module, [observed], how)
    table = table_of(module)
    found = tally(batch.tokens(), nearest_words(vectors, batch.seen, table))
    assert found.f1 > 0.7
    assert found.digit_leakage > 0.6
    assert tally(batch.tokens(), nearest_words(vectors, batch.seen, table.unrelated(5))).f1 < 0.1


@pytest.mark.parametrize("seed", [5, 6])
def test_an_unrelated_table_shows_nothing(seed):
    module, batch = lstm(), batch_of(*TEXTS[:2])
    gradient, table = gradient_of(module, batch), table_of(module).unrelated(seed)
    assert tally(batch.tokens(), tokens_by_span(gradient, table, batch.lengths)).f1 < 0.1
    assert tally(batch.tokens(), tokens_by_states(gradient, state_of(module), table, batch.lengths)).f1 < 0.1
    module, batch = bert(), batch_of(*TEXTS[:2], frame=True)
    said = tokens_by_positions(module, gradient_of(module, batch), table_of(module).unrelated(seed), batch.lengths)
    assert tally(batch.tokens(), said).f1 < 0.1


@pytest.mark.parametrize("rounds", [0, 3])
def test_the_public_starting_table_still_shows_a_members_words(rounds):
    """The method's limit: local epochs move a vector too little to leave the span."""
    module, batch = lstm(), batch_of(*TEXTS[:2])
    public = table_of(module)
    after_rounds(module, FedVocab(), rounds)
    used = np.unique(batch.ids)
    assert (np.abs(table_of(module).rows - public.rows)[used].max(axis=1) > 0.003).all()
    found = tally(batch.tokens(), tokens_by_span(gradient_of(module, batch), public, batch.lengths))
    assert found.f1 > 0.8
    assert found.digit_leakage > 0.8


def test_a_frozen_table_is_the_public_one():
    module, batch = lstm(), batch_of(*TEXTS[:2])
    public, method = table_of(module), FedVocab(embedding="frozen")
    names = frozenset(name for name, _ in module.named_parameters())
    setting = Setting(names, division_of(method, module), len(batch.ids), 2, len(WORDS), False, 0)
    train(module, batch.ids, batch.labels, RECIPE, seed=0, phases=phases_of(method, setting))
    assert (table_of(module).rows == public.rows).all()
    said = tokens_by_states(gradient_of(module, batch), state_of(module), public, batch.lengths)
    assert sorted(said) == sorted(batch.tokens())


def test_the_jobs_seed_does_not_give_the_first_vectors_of_own_words(tmp_path):
    """The member's own code makes them. The attacker knows the member's words and their places, and has the job."""
    job = own_vocabulary_job()
    with PrivateStore(tmp_path, bytes(32), "data") as store:
        state = Keeper(store, [Example(text, job.labels[0]) for text in TEXTS]).make(job, None, None)
    cut = encoder_of(job, state.tokenizer)
    words = tuple(cut.words())
    module = build(job.model, cut.vocabulary_size, len(job.labels), cut.pad_id, seed=job.seed)
    division = division_of(job.method, module)
    division.load_private(module, state.arrays)
    batch = Batch(cut.encode(TEXTS[:2]), np.array([0, 1]), words, cut.pad_id)
    gradient = shared_gradient(module, batch, division)
    (public,) = first_private(job, state.tokenizer, None, None).values()
    known, unknown = (among_many(words, rows) for rows in (state.arrays["embedding.weight"], public))
    assert tally(batch.tokens(), tokens_by_span(gradient, known, batch.lengths)).f1 > 0.9
    # The seed differs in each run, so a few words may be guessed.
    assert tally(batch.tokens(), tokens_by_span(gradient, unknown, batch.lengths)).f1 < 0.3


def test_fedrecon_hides_its_words_from_the_rows_only():
    module, batch = lstm(), batch_of(*TEXTS[:2])
    public, method = table_of(module), FedRecon()
    after_rounds(module, method, 0)
    division = division_of(method, module, WORDS)
    gradient = shared_gradient(module, batch, division)
    by_rows = tally(batch.tokens(), tokens_by_rows(gradient, shared_words(division, WORDS)))
    assert (by_rows.precision, by_rows.digit_leakage) == (1, 0)
    assert by_rows.matched + by_rows.reference_digits >= 0.9 * by_rows.reference
    # The attacker has the public numbers that the private rows start from.
    digits = frozenset(word for word in WORDS if any(character.isdigit() for character in word))
    known = table_of(module).with_rows_of(public, digits)
    assert tally(batch.tokens(), tokens_by_span(gradient, known, batch.lengths)).digit_leakage > 0.8
    unknown = known.with_rows_of(known.unrelated(7), digits)
    assert tally(batch.tokens(), tokens_by_span(gradient, unknown, batch.lengths)).digit_leakage < 0.2


def test_noise_stops_every_table():
    module, batch = lstm(), batch_of(*TEXTS[:2])
    gradient, table = gradient_of(module, batch), table_of(module)
    clipped, noisy = (noised(gradient, 1.0, multiplier, seed=3) for multiplier in (0.0, 1.0))
    assert tally(batch.tokens(), tokens_by_span(clipped, table, batch.lengths)).f1 > 0.9
    assert tally(batch.tokens(), tokens_by_span(noisy, table, batch.lengths)).f1 < 0.1
    assert tally(batch.tokens(), tokens_by_states(noisy, state_of(module), table, batch.lengths)).f1 < 0.1


def members_after_rounds(texts):
    """Members with one text each after two rounds together, with a table each and their common encoder."""
    method, modules = FedVocab(), [lstm() for _ in texts]
    for _ in range(2):
        for module, text in zip(modules, texts, strict=True):
            after_rounds(module, method, 1, [text])
        average_shared(modules, division_of(method, modules[0]))
    return modules


@pytest.mark.parametrize("count", [3, 8])
def test_a_sum_hides_a_members_words_only_if_all_words_fill_the_span(count):
    """Each member has moved its table in its own way. The attacker has the one that all of them started from."""
    texts = TEXTS[:count]
    public, modules = table_of(lstm()), members_after_rounds(texts)
    tables = [table_of(module).rows for module in modules]
    assert all(np.abs(tables[0] - other).max() > 0.003 for other in tables[1:])
    batches = [batch_of(text) for text in texts]
    gradients = [gradient_of(module, batch) for module, batch in zip(modules, batches, strict=True)]
    lengths = [length for batch in batches for length in batch.lengths]
    words = batches[0].tokens()
    assert tally(words, tokens_by_span(gradients[0], public, batches[0].lengths)).f1 > 0.9
    found = tally(words, tokens_by_span(summed(gradients), public, lengths))
    if count == 3:
        assert sum(lengths) < WIDTH
        assert found.recall > 0.8
    else:
        assert found.f1 < 0.1
