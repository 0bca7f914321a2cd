"""Our form of T5's tokenizer against transformers' own, over a unigram model trained here.

Real texts and hard ones get the same ids, including the end of each row. They must differ where a text spells a special
token: transformers takes it for the token, and sentencepiece and we take it for characters.
"""

import gzip
import json
import random
import unicodedata

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import T5TokenizerFast

from benchmarks.library.record import SHARED
from learning.text.cloze import ClozeEncoder
from learning.text.cloze_tokenizer import check_cloze_form, own_form
from tacit.prompt import PLAIN, parse_template
from tests.support.processes import EXAMPLES

SENTINELS = 100
FIRST = ["<pad>", "</s>", "<unk>"]
ROWS = 40
DATASETS = ("ag_news", "sst2", "trec", "20newsgroups")

# Texts with everything on which two tokenizers differ.
HARD = [
    "",
    " ",
    "a",
    "two  spaces and   three",
    " before and behind  ",
    "tab\tline\nboth\r\nend",
    "no\u00a0break, em\u2003space, ideographic\u3000space",
    "zero\u200bwidth",
    "\u200b",
    "behind\u200b",
    "mark\u200e",
    "\ufeffbom",
    "line\u2028separator",
    "ﬁne ﬂow Ⅷ ²³ ½ ﷺ",
    "\uff26\uff35\uff2c\uff2c\u3000\uff57\uff49\uff44\uff54\uff48 ﾊﾞ",
    "é e\u0301 ß \u017f \u1e9b\u0323",
    "한국어 日本語 ไทย العربية",
    "emoji 😀 and two 😀😀",
    "nul\x00 bell\x07 del\x7f",
    "▁",
    "a▁b ▁ c",
    "..., \"quoted\" it's don't (x) [y] {z} <b> </b> a<b",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "extra_id_0 <extra_id_> <extra_id_x> <extra id 0> pad> </ s> <PAD>",
]
SPELLED = [
    "<extra_id_0>",
    "x <extra_id_0> y",
    "x<extra_id_7>y",
    "<extra_id_99>",
    "a</s>b",
    "</s> x",
    "<pad> a",
    "<unk>",
    "\uff1cextra_id_0\uff1e",
]


def made(texts, size):
    """transformers' T5 tokenizer, over pieces of these texts and T5's special tokens.

    A published one has sentencepiece's compiled table of characters, which is made from the library's nmt and NFKC.
    """
    rules = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    trained = Tokenizer(models.Unigram())
    trained.normalizer = rules
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    trainer = trainers.UnigramTrainer(vocab_size=size, special_tokens=FIRST, unk_token="<unk>", show_progress=False)
    trained.train_from_iterator(texts, trainer)
    # Short scores, since the library's reader of a tokenizer.json loses the last bit of longer ones. That bit decides
    # between equally good splits (`~~` `~` and `~` `~~`).
    pieces = [(piece, round(score, 4)) for piece, score in json.loads(trained.to_str())["model"]["vocab"]]
    pieces += [(f"<extra_id_{number}>", 0.0) for number in reversed(range(SENTINELS))]
    theirs = T5TokenizerFast(vocab=pieces, extra_ids=SENTINELS)
    theirs.backend_tokenizer.normalizer = rules
    return theirs


class Both:
    """The two tokenizers of one vocabulary."""

    def __init__(self, theirs):
        self.theirs = theirs
        self.form = own_form(theirs.backend_tokenizer.to_str().encode())
        self.encoder = ClozeEncoder(self.form, PLAIN, 100_000)

    def ours(self, text):
        (row,) = self.encoder.encode([text]).tolist()
        return [number for number in row if number != self.encoder.pad_id]

    def differing(self, texts):
        """[(text, their tokens, our tokens)] for texts on which they differ."""
        names = self.theirs.convert_ids_to_tokens
        found = [(text, self.theirs(text)["input_ids"], self.ours(text)) for text in texts]
        return [(text, names(theirs), names(ours)) for text, theirs, ours in found if theirs != ours]


@pytest.fixture(scope="module")
def small():
    """Over the example's texts and the hard ones, which have characters of their own."""
    texts = [json.loads(line)["text"] for line in (EXAMPLES / "train.jsonl").read_text().splitlines()]
    return Both(made([*texts, *HARD * 3], 800))


def test_the_vocabulary_is_t5s(small):
    encoder = small.encoder
    assert (encoder.pad_id, encoder.unknown_id, encoder.family.kind) == (0, 2, "Unigram")
    assert encoder.mask_id == encoder.vocabulary_size - 1
    assert small.theirs.convert_tokens_to_ids("<extra_id_0>") == encoder.mask_id
    check_cloze_form(small.form)


@pytest.mark.parametrize("at", range(len(HARD)))
def test_a_hard_text_gets_the_same_ids(small, at):
    assert not small.differing([HARD[at]])


def test_the_examples_texts_get_the_same_ids(small):
    texts = [json.loads(line)["text"] for line in (EXAMPLES / "train.jsonl").read_text().splitlines()]
    assert len(texts) > 300
    assert not small.differing(texts)


@pytest.mark.parametrize("at", range(len(SPELLED)))
def test_a_spelled_special_token_becomes_its_characters(small, at):
    text = SPELLED[at]
    ours = small.ours(text)
    special = {small.theirs.convert_tokens_to_ids(token) for token in small.theirs.all_special_tokens}
    # The only end token is the row's. Characters outside the vocabulary may be unknown, but not the whole text.
    assert ours[-1] == 1
    assert not set(ours[:-1]) & (special - {small.encoder.unknown_id})
    words = "".join(small.theirs.convert_ids_to_tokens(ours[:-1]))
    assert words.replace("▁", " ").strip() == unicodedata.normalize("NFKC", text)
    # The library would give the model a token that no text can mean.
    assert set(small.theirs(text)["input_ids"][:-1]) & special


def test_a_spelled_sentinel_is_text_even_without_a_bracket_entry():
    """T5's own vocabulary has neither `<` nor `{`."""
    texts = [json.loads(line)["text"] for line in (EXAMPLES / "train.jsonl").read_text().splitlines()]
    both = Both(made([text.replace("<", "") for text in texts], 600))
    assert "<" not in both.encoder.words()
    for text in ("<extra_id_7>", "x<extra_id_0> y", "</s>"):
        ours = both.ours(text)[:-1]
        names = both.theirs.convert_ids_to_tokens(ours)
        assert ours.count(both.encoder.unknown_id) >= 1
        assert not any(name.startswith("<extra_id_") or name == "</s>" for name in names)
        assert len(ours) > 2


def test_a_template_around_a_text_has_exactly_one_sentinel(small):
    encoder = ClozeEncoder(small.form, parse_template("{text} It is about {mask}."), 64)
    for text in (*HARD, *SPELLED):
        (row,) = encoder.encode([text]).tolist()
        names = [encoder.words()[number] for number in row if number != encoder.pad_id]
        assert [name for name in names if name.startswith("<extra_id_")] == ["<extra_id_0>"], text
        assert names.count("</s>") == 1
    # Except for white space at an end, the tokens are transformers' for the whole sentence.
    (row,) = encoder.encode(["My bill is wrong"]).tolist()
    whole = small.theirs("My bill is wrong It is about <extra_id_0>")["input_ids"]
    assert row[: len(whole) - 1] == whole[:-1]


def test_texts_of_public_data_get_the_same_ids():
    """A few hundred texts of four data sets, with a vocabulary made from them."""
    paths = [SHARED / name / "train.jsonl.gz" for name in DATASETS]
    if lacking := [path for path in paths if not path.exists()]:
        pytest.skip(f"{lacking[0]} is not here: this test needs public data under {SHARED} (docs/benchmarks.md)")
    chosen = []
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line)["text"] for line in lines]
        chosen.append(random.Random(3).sample(rows, 2 * ROWS))
    both = Both(made([text for texts in chosen for text in texts[:ROWS]], 2_000))
    for texts in chosen:
        assert not both.differing(texts)
