"""A corpus looks at the data only when told to, once, and gives the ids and labels of the usable examples."""

import numpy as np
import pytest

from learning.text.corpus import EncodedExamples
from learning.text.encoder import TextEncoder, TokenizerInvalid, word_tokenizer
from learning.text.examples import Example
from tests.unit.learning.mechanisms.test_mechanisms import GAUSSIAN, job

TOKENIZER = word_tokenizer(["what", "is", "the", "city"])
EXAMPLES = [Example("what is", "b"), Example("the city", "nobody's"), Example("city the what", "a")]


def test_ids_and_labels_are_those_of_the_usable_examples() -> None:
    document = job(GAUSSIAN)
    corpus = EncodedExamples(EXAMPLES, document, TOKENIZER)
    read = corpus.read()
    encoder = TextEncoder(TOKENIZER, document.model.max_tokens, max(document.model.widths))
    assert np.array_equal(read.ids, encoder.encode(["what is", "city the what"]))
    assert read.usable.tolist() == [0, 2]
    assert [document.labels[place] for place in read.labels] == ["b", "a"]
    assert (corpus.population, corpus.vocabulary_size, corpus.pad_id) == (3, 6, 0)


def test_the_data_is_looked_at_once_and_not_before_it_is_read() -> None:
    looks = []

    class Watched(list[Example]):
        def __iter__(self):
            looks.append(1)
            return super().__iter__()

    corpus = EncodedExamples(Watched(EXAMPLES), job(GAUSSIAN), TOKENIZER)
    assert not looks
    first = corpus.read()
    assert looks == [1]
    assert corpus.read() is first
    assert looks == [1]
    with pytest.raises(ValueError, match="read-only"):
        first.ids[0] = 0


def test_a_corpus_serves_jobs_that_read_the_examples_alike() -> None:
    document = job(GAUSSIAN)
    corpus = EncodedExamples(EXAMPLES, document, TOKENIZER)
    assert corpus.serves(document.model_copy(update={"seed": 5}), TOKENIZER)
    longer = document.model.model_copy(update={"max_tokens": document.model.max_tokens + 1})
    for changed in ({"labels": ("b", "a")}, {"model": longer}):
        assert not corpus.serves(document.model_copy(update=changed), TOKENIZER)
    assert not corpus.serves(document, word_tokenizer(["other", "words"]))


def test_bytes_that_are_no_tokenizer_are_refused_at_once() -> None:
    with pytest.raises(TokenizerInvalid):
        EncodedExamples(EXAMPLES, job(GAUSSIAN), b"{}")
