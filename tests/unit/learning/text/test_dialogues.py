"""Dialogues become rows whose special tokens come from the template alone, and whose losses are on responses."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from learning.text.cloze import TemplateInvalid
from learning.text.dialogue import IGNORED, Dialogue, DialogueEncoder, Turn
from learning.text.dialogue_tokenizer import check_dialogue_form, own_dialogue_form, parts_of
from learning.text.encoder import TokenizerInvalid
from tacit.generation import TEMPLATES, AroundTurn, DialogueTemplate
from tests.support.tiny_writers import FORMS, SPECIALS, TEMPLATE_OF, writer_tokenizer

SPELLED = sorted(
    {token for tokens in SPECIALS.values() for token in tokens} | {"<0x0A>", "{</s>}", "{<|im_end|>}", "▁"}
)
FIRST_MERGE = json.loads(writer_tokenizer("gpt2"))["model"]["merges"][0]
# Arbitrary Unicode, with half surrogates, between special tokens that it spells.
texts = st.lists(st.one_of(st.text(max_size=12), st.characters(), st.sampled_from(SPELLED)), max_size=8).map("".join)


def encoder(form: str, max_tokens: int = 96) -> DialogueEncoder:
    return DialogueEncoder(own_dialogue_form(writer_tokenizer(form)), TEMPLATES[TEMPLATE_OF[form]], max_tokens)


def special_ids(form: str) -> set[int]:
    return set(parts_of(writer_tokenizer(form)).specials.values())


def row(made: DialogueEncoder, dialogue: Dialogue) -> tuple[list[int], list[int]]:
    ids, targets = made.encode([dialogue])
    return ids[0].tolist(), targets[0].tolist()


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60, deadline=None)
@given(prompt=texts, response=texts)
def test_no_text_becomes_a_special_token(form, prompt, response):
    made = encoder(form)
    special = special_ids(form)
    plain, _ = row(made, Dialogue.of("x", "y"))
    _, _, usable = made.encode_usable([Dialogue.of(prompt, response)])
    if not len(usable):
        assert not response.encode(errors="replace").decode().strip()
        return
    ids, targets = row(made, Dialogue.of(prompt, response))
    assert len(ids) <= made.max_tokens
    ended = made.end_id in targets
    expected = [each for each in plain if each in special]
    # Only a response that was cut has no end.
    assert [each for each in ids if each in special] == (expected if ended else expected[:-1])
    assert ended or len(ids) == made.max_tokens
    # Exactly the response and its end have a loss.
    learnt = [each for each in targets if each != IGNORED]
    assert learnt == ids[len(ids) - len(learnt) :]
    assert made.end_id not in learnt[:-1]


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=40, deadline=None)
@given(prompt=texts)
def test_a_prompt_to_complete_is_the_beginning_of_its_row(form, prompt):
    made = encoder(form, 400)
    begun = made.prompt_ids(Dialogue.of(prompt))
    ids, _ = row(made, Dialogue.of(prompt, "the food"))
    assert ids[: len(begun)] == begun
    assert made.prompt_ids(Dialogue.of(prompt, "the food")) == begun
    assert made.decode(ids[len(begun) :]).strip() == "the food"


@pytest.mark.parametrize("form", ["smollm2", "llama3", "qwen", "gpt2", "mistral"])
def test_a_row_is_what_a_tokenizer_of_the_published_form_makes_of_the_published_template(form):
    published = {
        "smollm2": "<|im_start|>user\nIs it 12?<|im_end|>\n<|im_start|>assistant\nThey're late.<|im_end|>",
        "qwen": "<|im_start|>user\nIs it 12?<|im_end|>\n<|im_start|>assistant\nThey're late.<|im_end|>",
        "llama3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nIs it 12?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nThey're late.<|eot_id|>",
        "gpt2": "Is it 12?\nThey're late.<|endoftext|>",
        "mistral": "<s>[INST] Is it 12?[/INST] They're late.</s>",
    }[form]
    theirs = Tokenizer.from_str(writer_tokenizer(form).decode()).encode(published, add_special_tokens=False).ids
    assert row(encoder(form), Dialogue.of("Is it 12?", "They're late."))[0] == theirs


@pytest.mark.parametrize("form", FORMS)
def test_own_forms_are_their_own_and_cut_and_write_text_as_the_published_ones_do(form):
    own = own_dialogue_form(writer_tokenizer(form))
    assert own_dialogue_form(own) == own
    check_dialogue_form(own)
    with pytest.raises(TokenizerInvalid, match="job bundle"):
        check_dialogue_form(writer_tokenizer(form))
    theirs, ours = Tokenizer.from_str(writer_tokenizer(form).decode()), Tokenizer.from_buffer(own)
    for text in ("the food is good, 12 people", "Café 你好\n\n  tabs\tand  spaces", "it's 1,234"):
        first = " " if form in ("llama2", "mistral") else ""
        ids = ours.encode(first + text, add_special_tokens=False).ids
        assert ids == theirs.encode(text, add_special_tokens=False).ids
        assert encoder(form).decode(ids) == first + text


def changed(form: str, **keys: object) -> bytes:
    whole = json.loads(writer_tokenizer(form))
    model = {key: value for key, value in keys.items() if key in whole["model"]}
    return json.dumps(
        {**whole, **{k: v for k, v in keys.items() if k not in model}, "model": {**whole["model"], **model}}
    ).encode()


@pytest.mark.parametrize(
    ("form", "keys", "said"),
    [
        ("gpt2", {"type": "WordPiece"}, "type BPE"),
        ("gpt2", {"dropout": 0.1}, "without dropout"),
        ("gpt2", {"byte_fallback": True}, "byte fallback"),
        ("gpt2", {"pre_tokenizer": {"type": "Whitespace"}}, "pattern for words"),
        ("gpt2", {"normalizer": {"type": "Lowercase"}}, "pattern for words"),
        ("gpt2", {"merges": [["Ġ", "zzz"]]}, "merge has parts"),
        ("gpt2", {"merges": [FIRST_MERGE] * 2}, "occurs twice"),
        ("gpt2", {"merges": ["a b c"]}, "two entries"),
        ("gpt2", {"vocab": {"a": 0, "b": 0}}, "one id"),
        ("gpt2", {"vocab": {"a": -1}}, "an id must be"),
        ("gpt2", {"vocab": []}, "not a supported"),
        ("gpt2", {"added_tokens": [{"content": "<|endoftext|>", "id": 7}]}, "one id|two ids"),
        ("llama3", {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}}}, "pattern for words"),
        ("llama2", {"ignore_merges": True}, "whole words"),
        ("llama2", {"byte_fallback": False}, "byte fallback"),
        ("llama2", {"merges": [["<", "/s>"]]}, "merge has parts"),
        ("llama2", {"merges": [["<0x41>", "<0x42>"]]}, "merge has parts"),
    ],
)
def test_other_tokenizers_are_refused(form, keys, said):
    with pytest.raises(TokenizerInvalid, match=said):
        own_dialogue_form(changed(form, **keys))


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"model": 3}', b"\xff", b"[" * 100_000])
def test_what_is_no_tokenizer_is_refused(data):
    with pytest.raises(TokenizerInvalid):
        parts_of(data)


def test_merges_that_end_in_a_special_token_are_refused():
    """With these, the letters of "<s>" would become the token that begins a text."""
    whole = json.loads(writer_tokenizer("llama2"))
    whole["model"]["vocab"] |= {"<": 900, "s>": 901, ">": 902}
    whole["model"]["merges"] += [["s", ">"], ["<", "s>"]]
    with pytest.raises(TokenizerInvalid, match="merge"):
        own_dialogue_form(json.dumps(whole).encode())


def test_a_prompt_is_cut_from_its_beginning_down_to_a_quarter_and_then_the_response_at_its_end():
    made = encoder("smollm2", 64)
    words = [f"{letter}x" for letter in "abcdefghijklmnopqrstuvwxyz"] * 8
    text = " ".join(words)
    # A short response: the newest words of the prompt stay.
    (ids, _), (short, _) = row(made, Dialogue.of(text, "good")), row(made, Dialogue.of("", "good"))
    assert len(ids) == 64
    begun = made.decode(ids).removeprefix("user\n").split("\n")[0]
    assert text.endswith(begun)
    assert len(begun) > 20
    # A long one: a quarter of the tokens is of the prompt, and the response is cut with its end.
    ids, targets = row(made, Dialogue.of(text, text))
    learnt = [each for each in targets if each != IGNORED]
    assert len(ids) == 64
    assert made.end_id not in learnt
    assert len(learnt) == 64 - 16 - (len(short) - 2)
    assert text.startswith(made.decode(learnt))
    # A short prompt leaves its room to the response.
    _, targets = row(made, Dialogue.of("a", text))
    assert sum(each != IGNORED for each in targets) > len(learnt)


def test_a_dialogue_has_a_loss_on_every_response_and_loses_its_oldest_exchanges_first():
    made = encoder("smollm2", 200)
    turns = [Turn("system", "Be good.")]
    for number in range(3):
        turns += [Turn("user", f"Question {number}"), Turn("assistant", f"Answer {number}")]
    turns += [Turn("user", "left out")]
    assert made.segments(Dialogue(tuple(turns))) == [
        (
            "<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user\nQuestion 0<|im_end|>\n<|im_start|>assistant\n",
            False,
        ),
        ("Answer 0<|im_end|>", True),
        ("\n<|im_start|>user\nQuestion 1<|im_end|>\n<|im_start|>assistant\n", False),
        ("Answer 1<|im_end|>", True),
        ("\n<|im_start|>user\nQuestion 2<|im_end|>\n<|im_start|>assistant\n", False),
        ("Answer 2<|im_end|>", True),
    ]
    whole = row(made, Dialogue(tuple(turns)))[0]
    shorter = encoder("smollm2", len(whole) - 1)
    kept = made.segments(Dialogue((turns[0], *turns[3:])))
    assert shorter.segments(Dialogue(tuple(turns))) == kept
    assert shorter.coverage([Dialogue(tuple(turns)), Dialogue.of("a", "b")]).cut == 1
    # For generation, all turns stand before the assistant's.
    begun = made.decode(made.prompt_ids(Dialogue(tuple(turns))))
    assert begun.endswith("left out\nassistant\n")
    assert "Question 0" in begun
    assert len(shorter.prompt_ids(Dialogue(tuple(turns)))) <= shorter.max_tokens * 3 // 4 + 1


@pytest.mark.parametrize(
    "dialogue",
    [
        Dialogue(()),
        Dialogue.of("a question"),
        Dialogue.of("a question", ""),
        Dialogue.of("a question", " \n "),
        Dialogue(tuple([Turn("user", "")] * 200 + [Turn("assistant", "y")])),
    ],
)
def test_a_dialogue_without_a_response_makes_no_row(dialogue):
    made = encoder("smollm2")
    good = Dialogue.of("a", "b")
    ids, targets, usable = made.encode_usable([dialogue, good])
    assert usable.tolist() == [1]
    assert (ids.shape, targets.shape) == ((1, ids.shape[1]), ids.shape)
    assert made.coverage([dialogue, good]).unusable == 1
    with pytest.raises(ValueError, match="1 of 2 dialogues"):
        made.encode([dialogue, good])


def test_a_role_that_the_template_lacks_makes_no_row():
    made = encoder("mistral")
    assert made.encode_usable([Dialogue.of("a", "b", system="c")])[2].tolist() == []
    with pytest.raises(ValueError, match="no turns of the system"):
        made.prompt_ids(Dialogue.of("a", system="c"))


def test_padding_is_at_the_end_and_no_target():
    made = encoder("smollm2")
    ids, targets = made.encode([Dialogue.of("a", "b"), Dialogue.of("the food is good " * 3, "yes")])
    alone = row(made, Dialogue.of("a", "b"))[0]
    assert ids[0, : len(alone)].tolist() == alone
    assert (ids[0, len(alone) :] == made.pad_id).all()
    assert (targets[0, len(alone) - 1 :] == IGNORED).all()
    assert made.pad_id not in made.end_ids - {made.pad_id} or made.pad_id == made.end_id
    np.testing.assert_array_equal(targets[:, :-1][targets[:, :-1] != IGNORED], ids[:, 1:][targets[:, :-1] != IGNORED])


def test_a_template_must_fit_the_tokenizer_and_leave_room():
    own = own_dialogue_form(writer_tokenizer("gpt2"))
    with pytest.raises(TemplateInvalid, match=r"no special token '<.im_end.>'"):
        DialogueEncoder(own, TEMPLATES["chatml"], 64)
    with pytest.raises(TemplateInvalid, match="too few for a response"):
        DialogueEncoder(own, DialogueTemplate(user=AroundTurn(before="word " * 40)), 64)
    nameless = json.loads(own)
    nameless["added_tokens"] = []
    del nameless["model"]["vocab"]["<|endoftext|>"]
    with pytest.raises(TemplateInvalid, match="name the token that ends"):
        DialogueEncoder(json.dumps(nameless).encode(), TEMPLATES["plain"], 64)


def test_dialogues_print_no_text():
    assert "secret" not in repr(Dialogue.of("secret", "secret", system="secret"))
