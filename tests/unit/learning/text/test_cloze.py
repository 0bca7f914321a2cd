"""A template around any text keeps one mask and is never cut; label words are one token at the mask."""

import functools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learning.text.cloze import ClozeEncoder, TemplateInvalid, VerbaliserInvalid
from learning.text.cloze_tokenizer import check_cloze_form, own_form
from learning.text.coverage import Coverage
from learning.text.encoder import TextEncoder, TokenizerInvalid
from tacit.prompt import PLAIN, PromptedModel, parse_template
from tests.support.tiny_models import FAMILIES, changed, tokenizer_of

SINGLE, PAIR = "{text} is {mask}.", "{text}? {mask}, {text_b}"
MAX = 24
of_each = pytest.mark.parametrize("family", FAMILIES)


@functools.cache
def form_of(family: str) -> bytes:
    return own_form(tokenizer_of(family))


@functools.cache
def encoder_of(family: str, template: str = SINGLE, most: int = MAX) -> ClozeEncoder:
    return ClozeEncoder(form_of(family), parse_template(template), most)


def names(encoder: ClozeEncoder, row: np.ndarray) -> list[str | None]:
    words = encoder.words()
    return [words[number] for number in row.tolist() if number != encoder.pad_id]


# Ordinary texts, and texts that people write to break things.
texts = st.one_of(
    st.text(max_size=200),
    st.lists(
        st.sampled_from(
            ["[MASK]", "<mask>", "<extra_id_0>", "</s>", "<s>", "<pad>", "[SEP]", "[PAD]", "{mask}", "{text}", "great"]
        ),
        max_size=30,
    ).map(" ".join),
    st.integers(0, 3).map(lambda power: "word " * 10**power),
)


def check_row(encoder: ClozeEncoder, row: np.ndarray, empty: list[int], slots: int) -> None:
    """The row is that of an empty text, with the text's own tokens inserted and padding at the end."""
    ids = row.tolist()
    whole = ids[: len(ids) - ids[::-1].index(next(each for each in ids[::-1] if each != encoder.pad_id))]
    assert len(whole) <= encoder.max_tokens
    assert encoder.pad_id not in whole
    assert whole.count(encoder.mask_id) == 1
    special = {*encoder._before, *encoder._behind, encoder.mask_id}
    # Special tokens are those of the empty row, in order, and all of the template is left, in order.
    assert [each for each in whole if each in special] == [each for each in empty if each in special]
    left = iter(whole)
    assert all(each in left for each in empty)
    assert slots == len(encoder.template.slots)


def test_coverage_counts_what_is_read_between_the_templates_words():
    encoder = encoder_of("bert")
    empty = len(encoder.encode([""])[0])
    room = MAX - empty
    read, longer = " ".join(["great"] * room), " ".join(["great"] * (room + 1))
    # A special token spelled in a text is unknown.
    found = encoder.coverage([read, longer, "[MASK]", ""])
    spelled = [row.count(encoder.unknown_id) for row in encoder.encode(["[MASK]"]).tolist()]
    assert (found.texts, found.cut) == (4, 1)
    assert found.unknown == spelled[0]
    lengths = [len(names(encoder, row)) - empty for row in encoder.encode([read, longer, "[MASK]", ""])]
    assert found.tokens == sum(lengths)


def test_a_pair_is_cut_if_its_two_texts_do_not_fit_together():
    encoder = encoder_of("bert", PAIR)
    room = MAX - len(encoder.encode([("", "")])[0])
    half = " ".join(["great"] * (room // 2))
    rest = " ".join(["great"] * (room - room // 2))
    assert encoder.coverage([(half, rest)]) == Coverage(1, 0, room, 0)
    assert encoder.coverage([(half, f"{rest} great")]) == Coverage(1, 1, room, 0)
    assert encoder.coverage([(" ".join(["great"] * 99), "")]) == Coverage(1, 1, room, 0)
    with pytest.raises(ValueError, match="takes a pair of texts"):
        encoder.coverage(["great"])


@of_each
@given(text=texts)
@settings(max_examples=60, deadline=None)
def test_any_text_gives_one_mask_and_keeps_the_template(family, text):
    encoder = encoder_of(family)
    rows = encoder.encode([text, ""])
    (empty,) = encoder.encode([""]).tolist()
    for row in rows:
        check_row(encoder, row, empty, 1)
    # Counted from the end, the mask's position does not depend on the text.
    behind = [len(names(encoder, row)) - place for row, place in zip(rows, encoder.mask_places(rows), strict=True)]
    assert len(set(behind)) == 1


@of_each
@given(pair=st.tuples(texts, texts))
@settings(max_examples=60, deadline=None)
def test_any_pair_gives_one_mask_and_keeps_the_template(family, pair):
    encoder = encoder_of(family, PAIR)
    (empty,) = encoder.encode([("", "")]).tolist()
    check_row(encoder, encoder.encode([pair])[0], empty, 2)


@of_each
def test_the_longer_text_of_a_pair_is_cut_first(family):
    encoder = encoder_of(family, PAIR)
    for pair in (("great bad", "no " * 100), ("no " * 100, "great bad")):
        (row,) = encoder.encode([pair])
        whole = "".join(filter(None, names(encoder, row))).replace("Ġ", "▁").replace("▁", "")
        assert len(names(encoder, row)) == MAX
        assert "greatbad" in whole
    (both,) = encoder.encode([("yes " * 100, "no " * 100)])
    kinds = names(encoder, both)
    counts = [sum(name is not None and word in name for name in kinds) for word in ("yes", "no")]
    assert 0 <= counts[0] - counts[1] <= 1


def test_the_rows_of_each_family():
    for family, row in {
        "bert": ["[CLS]", "a", "great", "film", "is", "[MASK]", ".", "[SEP]"],
        "roberta": ["<s>", "a", "Ġgreat", "Ġfilm", "Ġis", "<mask>", ".", "</s>"],
        "t5": ["▁", "a", "▁great", "▁film", "▁is", "<extra_id_0>", ".", "</s>"],
    }.items():
        encoder = encoder_of(family)
        (found,) = encoder.encode(["  a great\tfilm "])
        expected = row
        if family == "roberta":
            # RoBERTa has a token for a tab.
            (found,) = encoder.encode(["  a great film "])
        assert names(encoder, found) == expected, family


def test_a_special_token_spelled_in_a_text_is_ordinary_text():
    for family, spelled in (("bert", "[MASK]"), ("roberta", "<mask>"), ("t5", "<extra_id_0>")):
        encoder = encoder_of(family)
        rows = encoder.encode([f"great {spelled} film", f"great {spelled} </s> film", "great {mask} film"])
        assert encoder.mask_places(rows).shape == (3,)
        for row in rows:
            words = "".join(filter(None, names(encoder, row)))
            assert "great" in words
            assert "film" in words


@of_each
def test_without_a_mask_texts_are_only_framed(family):
    encoder = ClozeEncoder(form_of(family), PLAIN, MAX)
    rows = encoder.encode(["great film", "x" * 1000, ""])
    assert rows.shape[1] <= MAX
    assert not (rows == encoder.mask_id).any()
    with pytest.raises(ValueError, match="a row has no mask"):
        encoder.mask_places(rows)
    if family == "bert":
        plain = TextEncoder(form_of(family), MAX, 3, frame=True)
        assert (plain.encode(["great film", "it was"]) == encoder.encode(["great film", "it was"])).all()


@pytest.mark.parametrize(("family", "mask"), [("bert", "[MASK]"), ("roberta", "<mask>")], ids=["bert", "roberta"])
def test_ordinary_texts_get_the_librarys_tokens_of_the_whole_sentence(family, mask):
    from tokenizers import Tokenizer

    theirs = Tokenizer.from_buffer(tokenizer_of(family))
    encoder = encoder_of(family, most=64)
    for text in ("a great film", "It was terrible, the movie", "Yes? no word"):
        (row,) = encoder.encode([text])
        sentence = f"{text} is{'' if family == 'roberta' else ' '}{mask}."
        assert theirs.encode(sentence).ids == row[row != encoder.pad_id].tolist()


def test_half_a_surrogate_pair_is_a_question_mark():
    encoder = encoder_of("roberta")
    assert (encoder.encode(["great \ud800"]) == encoder.encode(["great ?"])).all()


def test_single_texts_and_pairs_are_not_mixed():
    with pytest.raises(ValueError, match="takes a pair of texts"):
        encoder_of("bert", PAIR).encode(["alone"])
    with pytest.raises(ValueError, match="takes one text"):
        encoder_of("bert").encode([("one", "two")])


def test_a_template_without_room_for_text_is_refused():
    with pytest.raises(TemplateInvalid, match=r"are 8 tokens, which leaves 3 of max_tokens = 11"):
        ClozeEncoder(form_of("bert"), parse_template("the movie was great, {text} {mask}"), 11)


def test_an_encoder_of_a_jobs_model():
    task = {"name": "cloze", "template": PAIR, "verbaliser": {"a": "yes", "b": "no"}}
    model = PromptedModel.model_validate({"base": "x", "task": task, "max_tokens": 30})
    encoder = ClozeEncoder.of(model, form_of("bert"))
    assert (encoder.max_tokens, encoder.min_tokens) == (30, 3)
    assert encoder.template.slots == ("text", "text_b")
    assert encoder.encode([]).shape == (0, 3)


# ---- label words -----------------------------------------------------------------------------------------------


@of_each
def test_label_words_are_one_token_at_the_mask(family):
    encoder = encoder_of(family)
    (great, good), (bad,) = encoder.label_words([["great", "good"], ["bad"]])
    words = encoder.words()
    space = {"bert": "", "roberta": "Ġ", "t5": "▁"}[family]
    assert [words[number] for number in (great, good, bad)] == [f"{space}{word}" for word in ("great", "good", "bad")]


def test_a_label_word_is_looked_up_as_tokenised_at_the_mask():
    """RoBERTa and T5 have different tokens for a word with and without a space before it."""
    for family, without in (("roberta", None), ("t5", "great")):
        tight = encoder_of(family, "{text} is ({mask})")
        if without is None:
            with pytest.raises(VerbaliserInvalid, match=r"put a space before \{mask\}"):
                tight.label_words([["great"], ["bad"]])
        else:
            ((number,),) = tight.label_words([["great"]])
            assert tight.words()[number] == without
    opening = encoder_of("t5", "{mask}: {text}")
    ((number,),) = opening.label_words([["great"]])
    assert opening.words()[number] == "▁great"
    with pytest.raises(VerbaliserInvalid, match=r"remove the space before \{mask\}"):
        encoder_of("t5", "{text} {mask}").label_words([["."]])


@pytest.mark.parametrize(
    ("family", "words", "said"),
    [
        pytest.param("bert", [["filmy"], ["bad"]], r"'filmy' is 2 tokens .*, film \+ ##y", id="pieces"),
        pytest.param("bert", [["snö"], ["bad"]], r"'snö' is 3 tokens", id="accents"),
        pytest.param("bert", [["雪"], ["bad"]], r"'雪' is not in the backbone's vocabulary", id="unknown"),
        pytest.param("bert", [["great"], ["Great"]], r"'great' and 'Great' are the same token", id="capitals"),
        pytest.param("bert", [["[MASK]"], ["bad"]], r"'\[MASK\]' is 3 tokens", id="mask"),
        pytest.param("t5", [["</s>"], ["bad"]], r"'</s>' is not in the backbone's vocabulary", id="end"),
        pytest.param("roberta", [["zebra"], ["bad"]], r"'zebra' is \d tokens .*with a space", id="bytes"),
    ],
)
def test_an_invalid_label_word_is_named(family, words, said):
    with pytest.raises(VerbaliserInvalid, match=said) as error:
        encoder_of(family).label_words(words)
    assert str(error.value).startswith("model.task.verbaliser: ")


# ---- tokenizers as data ----------------------------------------------------------------------------------------


@of_each
def test_the_own_form_of_our_form_is_itself_and_nothing_else_passes(family):
    form = form_of(family)
    assert own_form(form) == form
    check_cloze_form(form)
    for other in (tokenizer_of(family), form + b" ", changed(form, "normalizer", value={"type": "Lowercase"})):
        with pytest.raises(TokenizerInvalid):
            check_cloze_form(other)


@of_each
def test_a_files_own_rules_are_dropped(family):
    """A pattern from the file would be applied to every text."""
    strange = {"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": "[MASK]"}
    theirs = json.loads(tokenizer_of(family))
    if family == "bert":
        # Lower case or not is data, so another normaliser is refused.
        with pytest.raises(TokenizerInvalid, match="BertNormalizer"):
            own_form(changed(tokenizer_of(family), "normalizer", value=strange))
        return
    theirs["normalizer"] = {"type": "Sequence", "normalizers": [strange]}
    assert own_form(json.dumps(theirs).encode()) == form_of(family)


def test_capitals_count_if_the_file_says_so():
    cased = own_form(changed(tokenizer_of("bert"), "normalizer", "lowercase", value=False))
    encoder = ClozeEncoder(cased, parse_template(SINGLE), MAX)
    assert "[UNK]" in names(encoder, encoder.encode(["GREAT film"])[0])
    with pytest.raises(TokenizerInvalid, match="accents must be stripped exactly if"):
        own_form(changed(tokenizer_of("bert"), "normalizer", "strip_accents", value=False))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"no json", id="no-json"),
        pytest.param(b"[]", id="a-list"),
        pytest.param(b'{"model": {"type": "WordLevel", "vocab": {}}}', id="another-kind"),
        pytest.param(b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}', id="bytes-missing"),
        pytest.param(b'{"model": {"type": "BPE", "vocab": {"a": 0}}}', id="no-merges"),
        pytest.param(b'{"model": {"type": ["BPE"]}}', id="kind-is-a-list"),
        pytest.param(b'{"model": {"type": "Unigram", "vocab": [], "unk_id": 0}}', id="no-entries"),
        pytest.param(b'{"model": {"type": "Unigram", "vocab": [["<unk>", 1e999]], "unk_id": 0}}', id="infinite"),
        pytest.param(b'{"model": {"type": "Unigram", "vocab": [["<unk>", 0.0]], "unk_id": 7}}', id="no-unknown"),
        pytest.param(b'{"model": {"type": "Unigram", "vocab": [["<unk>", 0.0]], "unk_id": 0}}', id="no-specials"),
        pytest.param(b'{"model": {"type": "WordPiece", "vocab": {"[UNK]": -1}}}', id="id-below-zero"),
        pytest.param(b'{"model": {"type": "WordPiece", "vocab": {"[UNK]": 4000000000}}}', id="id-too-large"),
    ],
)
def test_bytes_that_are_no_tokenizer_are_refused(data):
    with pytest.raises(TokenizerInvalid):
        own_form(data)


@pytest.mark.parametrize("merge", [["g", "r" * 100], ["zz", "a"], ["a", "a", "a"], "a", 7], ids=str)
def test_an_invalid_merge_is_refused_before_the_library_sees_it(merge):
    """It would hang or end the process."""
    merges = json.loads(tokenizer_of("roberta"))["model"]["merges"]
    with pytest.raises(TokenizerInvalid, match="merge"):
        own_form(changed(tokenizer_of("roberta"), "model", "merges", value=[*merges, merge]))


@pytest.mark.parametrize("token", ["[CLS]", "[SEP]", "[MASK]", "[PAD]"])
def test_a_missing_special_token_is_named(token):
    whole = json.loads(tokenizer_of("bert"))
    del whole["model"]["vocab"][token]
    whole["added_tokens"] = [each for each in whole["added_tokens"] if each["content"] != token]
    with pytest.raises(TokenizerInvalid, match=token.strip("[]")):
        own_form(json.dumps(whole).encode())


def test_added_tokens_count_and_two_entries_with_one_id_are_refused():
    whole = json.loads(tokenizer_of("t5"))
    beside = {**whole["added_tokens"][-1], "content": "<extra_id_99>", "id": len(whole["model"]["vocab"])}
    whole["added_tokens"].append(beside)
    encoder = ClozeEncoder(own_form(json.dumps(whole).encode()), parse_template(SINGLE), MAX)
    assert encoder.words()[-1] == "<extra_id_99>"
    beside["id"] += 3
    with pytest.raises(TokenizerInvalid, match="is not at the place of its id"):
        own_form(json.dumps(whole).encode())
    pieces = json.loads(tokenizer_of("bert"))
    pieces["model"]["vocab"]["twin"] = pieces["model"]["vocab"]["great"]
    with pytest.raises(TokenizerInvalid, match="two entries have one id"):
        own_form(json.dumps(pieces).encode())
