"""Writing with an exported model: certain text, sampling, and responses beside transformers' own."""

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from export.generating import Generator, ModelFailed, PromptTooLong, Sampling, TextStream, Writing, _Row
from learning.text.dialogue import DialogueEncoder
from learning.text.dialogue_tokenizer import own_dialogue_form, parts_of, text_tokenizer
from learning.text.turns import Dialogue
from tacit.bundle import WEIGHTS_FILE, BundleInvalid
from tacit.generation import TEMPLATES
from tests.support.tiny_generators import causal_library_model, write_generator_of
from tests.support.tiny_writers import FORMS, TEMPLATE_OF, writer_tokenizer

torch.set_num_threads(1)

QUESTIONS = ["What is the capital of France?", "the restaurant", "12 people came at 1,234 o'clock; who?"]


# ---- text as it becomes certain --------------------------------------------------------------------------------


def encoder_of(form: str) -> DialogueEncoder:
    return DialogueEncoder(own_dialogue_form(writer_tokenizer(form)), TEMPLATES[TEMPLATE_OF[form]], 1 << 20)


def tokens_of(form: str, text: str) -> list[int]:
    tokenizer = text_tokenizer(parts_of(own_dialogue_form(writer_tokenizer(form))))
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def pieces_of(stream: TextStream, tokens: list[int]) -> list[str]:
    found = []
    for token in tokens:
        found.append(stream.push(token))
        if stream.stopped:
            return found
    return [*found, stream.finish()]


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=40, deadline=None)
@given(text=st.text(st.characters(blacklist_categories=("Cs",)), max_size=20))
def test_pieces_join_to_the_decoded_text(form: str, text: str) -> None:
    encoder, tokens = encoder_of(form), tokens_of(form, text)
    assert "".join(pieces_of(TextStream(encoder.decode), tokens)) == encoder.decode(tokens)


@pytest.mark.parametrize("form", FORMS)
def test_half_a_character_is_never_shown(form: str) -> None:
    encoder, text = encoder_of(form), "the \U0001f30a and 北京"
    tokens = tokens_of(form, text)
    # Its characters take several tokens each.
    assert len(tokens) > len(text)
    pieces = pieces_of(TextStream(encoder.decode), tokens)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces).strip() == text
    # Only when nothing follows is half a character shown as what it is.
    cut = pieces_of(TextStream(encoder.decode), tokens[:-1])
    assert cut[-1].endswith("\ufffd")
    assert not any("\ufffd" in piece for piece in cut[:-1])


def letters(ids: list[int]) -> str:
    return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one\n\ntwo", ["\n\n"], "one"),
        ("aaab", ["aab"], "a"),
        ("a stop here", ["stop", "a s"], ""),
        ("no end to it", ["\n", "END"], "no end to it"),
        ("almost EN", ["END"], "almost EN"),
        ("x ENEND y", ["END"], "x EN"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_stop_string_ends_the_text_wherever_tokens_begin(
    text: str, stop: list[str], expected: str, size: int
) -> None:
    # Each token is some characters of the text.
    tokens = [text[first : first + size] for first in range(0, len(text), size)]
    stream = TextStream(lambda ids: "".join(tokens[each] for each in ids), stop)
    pieces = pieces_of(stream, list(range(len(tokens))))
    assert "".join(pieces) == expected
    assert stream.stopped == (expected != text)
    for stopped in stop:
        assert not any(stopped in piece for piece in pieces)


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    stream = TextStream(letters, ["END"])
    assert [stream.push(ord(each)) for each in "xENxEND"] == ["x", "", "", "ENx", "", "", ""]
    assert stream.stopped


def test_a_stop_string_across_half_characters_is_found() -> None:
    encoder = encoder_of("smollm2")
    stream = TextStream(encoder.decode, ["北京"])
    assert "".join(pieces_of(stream, tokens_of("smollm2", "the 北京 x"))) == "the "
    assert stream.stopped


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="a stop string is empty"):
        TextStream(letters, ["x", ""])


# ---- sampling --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, None, None), (0.7, 5, None), (1.3, None, 0.6), (0.9, 20, 0.9)]
)
def test_probabilities_are_those_of_transformers(temperature: float, top_k: int | None, top_p: float | None) -> None:
    logits = np.random.default_rng(0).standard_normal(50).astype(np.float32) * 3
    expected = torch.from_numpy(logits)[None]
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [] if top_k is None else [TopKLogitsWarper(top_k)]
    warpers += [] if top_p is None else [TopPLogitsWarper(top_p)]
    for warper in warpers:
        expected = warper(None, expected)
    found = Sampling(temperature, top_k, top_p).probabilities(logits)
    assert np.allclose(found, expected.softmax(dim=1)[0].numpy(), atol=1e-6)
    assert (found > 0).sum() == int((expected > -np.inf).sum())


def test_tokens_are_drawn_with_their_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    sampling = Sampling(1.0, seed=4)
    random = sampling.random()
    drawn = np.bincount([sampling.choose(logits, random) for _ in range(4000)], minlength=3) / 4000
    # Four standard deviations.
    assert np.abs(drawn - [0.5, 0.3, 0.2]).max() < 4 * (0.25 / 4000) ** 0.5


def test_temperature_zero_is_the_largest_logit() -> None:
    sampling = Sampling()
    assert sampling.choose(np.array([0.1, 2.0, 1.9], dtype=np.float32), sampling.random()) == 1


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_values_out_of_bounds_are_refused(wrong: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Sampling(**wrong)


# ---- responses -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("generator") / "bundle"
    write_generator_of(causal_library_model("llama"), made)
    return made


@pytest.fixture(scope="module")
def generator(folder: Path) -> Generator:
    return Generator.load(folder, threads=1)


def written(generator: Generator, question: str, **how: object) -> str:
    return "".join(generator.write(Dialogue.of(question), **how))


def test_greedy_responses_are_those_of_transformers(generator: Generator) -> None:
    model, encoder = causal_library_model("llama"), encoder_of("smollm2")
    for question in QUESTIONS:
        ids = torch.tensor([generator.prompt_ids(Dialogue.of(question))])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=sorted(encoder.end_ids),
            pad_token_id=encoder.pad_id,
        )[0, ids.shape[1] :]
        expected = [each for each in made.tolist() if each not in encoder.end_ids]
        writing = generator.write(Dialogue.of(question))
        assert "".join(writing) == encoder.decode(expected).lstrip(" ")
        response = writing.response
        assert (response.prompt_tokens, response.tokens) == (ids.shape[1], len(expected))
        assert response.ended == ("length" if len(expected) == 12 else "end")


def test_an_end_token_ends_the_response(tmp_path: Path) -> None:
    encoder = write_generator_of(causal_library_model("llama"), tmp_path / "one", max_new_tokens=3)
    first = Generator.load(tmp_path / "one", threads=1)
    logits = first.logits(first.prompt_ids(Dialogue.of(QUESTIONS[0])))[-1]
    del encoder
    # The same model, with the token that it writes first as an end.
    write_generator_of(causal_library_model("llama"), tmp_path / "other", max_new_tokens=3)
    other = Generator.load(tmp_path / "other", threads=1)
    other.facts = other.facts.model_copy(update={"end_ids": (int(logits.argmax()),)})
    writing = other.write(Dialogue.of(QUESTIONS[0]))
    assert list(writing) == []
    assert (writing.response.ended, writing.response.tokens) == ("end", 0)


def test_several_at_once_write_what_each_writes_alone(generator: Generator) -> None:
    dialogues = [Dialogue.of(question) for question in (*QUESTIONS, "x", "who is late! " * 5)]
    greedy = ["".join(generator.write(each, Sampling())) for each in dialogues]
    drawing = Sampling(0.9, 50, 0.95, seed=3)
    drawn = [each.text for each in generator.write_all(dialogues, drawing, batch=1)]
    assert drawn[0] == "".join(generator.write(dialogues[0], drawing))
    for sampling, alone in ((Sampling(), greedy), (drawing, drawn)):
        assert len(set(alone)) > 1
        for batch in (1, 2, 5):
            together = list(generator.write_all(dialogues, sampling, batch=batch))
            assert [each.text for each in together] == alone
            # What comes after a prompt changes nothing.
            assert list(generator.write_all(dialogues[:3], sampling, batch=batch)) == together[:3]


def test_a_batch_of_none_is_refused(generator: Generator) -> None:
    """One of -1 would write nothing for any prompt, and say nothing."""
    for batch in (0, -1):
        with pytest.raises(ValueError, match=f"batch={batch} is not possible; give a whole number, 1 or more"):
            list(generator.write_all([Dialogue.of(QUESTIONS[0])], batch=batch))


def test_each_place_draws_for_itself(generator: Generator) -> None:
    """With one row of random numbers for all prompts, figures over them were those of one draw."""
    sampling = Sampling(1.0, seed=3)
    same = [Dialogue.of(QUESTIONS[0])] * 6
    assert len({each.text for each in generator.write_all(same, sampling, batch=4)}) == 6
    # A token of probability 60 %, drawn first or third at each of 200 places: the share's standard deviation is 0.035.
    logits = np.log(np.array([0.6, 0.4], dtype=np.float32))
    for step in (0, 2):
        shares = []
        for seed in range(50):
            how = Sampling(1.0, seed=seed)
            draws = [[how.choose(logits, random) for _ in range(step + 1)] for random in map(how.random, range(200))]
            shares.append(np.mean([each[step] == 0 for each in draws]))
        assert 0.55 < np.mean(shares) < 0.65
        assert 0.02 < np.std(shares) < 0.05


def test_a_seed_gives_the_same_response_and_another_seed_another(generator: Generator) -> None:
    how = [Sampling(1.2, seed=seed) for seed in (1, 1, 2)]
    one, again, other = [written(generator, QUESTIONS[0], sampling=each) for each in how]
    assert one == again
    assert one != other


def test_a_stop_string_ends_a_response(generator: Generator) -> None:
    whole = written(generator, QUESTIONS[0])
    stop = whole[len(whole) // 2 :][:3]
    writing = generator.write(Dialogue.of(QUESTIONS[0]), stop=[stop])
    assert "".join(writing) == whole[: whole.index(stop)]
    assert writing.response.ended == "stop"
    (together,) = generator.write_all([Dialogue.of(QUESTIONS[0])], stop=[stop])
    assert together == writing.response


def test_logits_of_all_positions_are_those_of_transformers(generator: Generator) -> None:
    ids = generator.prompt_ids(Dialogue.of(QUESTIONS[2]))
    with torch.no_grad():
        expected = causal_library_model("llama")(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(generator.logits(ids) - expected).max() < 1e-5 * np.abs(expected).max()


def test_a_prompt_that_leaves_no_room_is_refused(generator: Generator) -> None:
    with pytest.raises(PromptTooLong, match=r"the prompt has \d+ tokens, and this model has room for 127 and a"):
        generator.write(Dialogue.of("late " * 200))
    with pytest.raises(PromptTooLong, match="room for 128"):
        generator.logits([1] * 129)


def test_iterating_again_goes_on_where_it_stopped(generator: Generator) -> None:
    for how in ({}, {"max_new_tokens": 3}):
        whole = generator.write(Dialogue.of(QUESTIONS[0]), **how)
        expected = list(whole)
        assert len(expected) > 1
        parted = generator.write(Dialogue.of(QUESTIONS[0]), **how)
        first = []
        for piece in parted:
            first.append(piece)
            break
        assert parted.response.text == first[0]
        assert [*first, *parted] == expected
        # It is over.
        assert list(parted) == []
        assert parted.response == whole.response


def letters_row() -> _Row:
    """A response of ten tokens, each an x."""
    return _Row(lambda ids: "x" * len(ids), frozenset(), 3, 10, Sampling(), ())


def test_a_response_whose_model_failed_is_over() -> None:
    def fails(_: int) -> NDArray[np.float32]:
        raise ModelFailed("the model's logits are not numbers")

    writing = Writing(letters_row(), fails, np.zeros(5, np.float32))
    pieces = iter(writing)
    assert next(pieces) == "x"
    with pytest.raises(ModelFailed):
        next(pieces)
    assert list(writing) == []
    assert writing.response.text == "x"


def test_a_response_lets_go_of_its_memory_at_once() -> None:
    """Its step holds the cache, hundreds of MB for a long one, and garbage collection may come late."""

    def step(_: int) -> NDArray[np.float32]:
        return np.zeros(5, np.float32)

    writing, held = Writing(letters_row(), step, np.zeros(5, np.float32)), weakref.ref(step)
    next(iter(writing))
    gc.disable()
    try:
        del writing, step
        assert held() is None
    finally:
        gc.enable()


def test_a_response_ends_where_the_room_ends(tmp_path: Path) -> None:
    write_generator_of(causal_library_model("llama"), tmp_path / "bundle", room=30, max_new_tokens=500)
    generator = Generator.load(tmp_path / "bundle", threads=1)
    writing = generator.write(Dialogue.of("the"), Sampling(1.0))
    list(writing)
    assert writing.response.prompt_tokens + writing.response.tokens == 30
    assert writing.response.ended == "length"


def test_text_that_spells_special_tokens_ends_nothing(generator: Generator) -> None:
    plain, spelled = (generator.prompt_ids(Dialogue.of(text)) for text in ("x", "x<|im_end|>"))
    ends = [each for each in spelled if each in generator.facts.end_ids]
    assert len(ends) == len([each for each in plain if each in generator.facts.end_ids])


# ---- files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.onnx", WEIGHTS_FILE, "tokenizer.json"])
def test_a_damaged_bundle_is_not_loaded(name: str, tmp_path: Path) -> None:
    write_generator_of(causal_library_model("llama"), tmp_path / "bundle")
    path = tmp_path / "bundle" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(BundleInvalid, match=f"{name} differs"):
        Generator.load(tmp_path / "bundle", threads=1)
    path.unlink()
    with pytest.raises(BundleInvalid, match=f"{name} is missing"):
        Generator.load(tmp_path / "bundle", threads=1)


def test_the_training_stack_is_never_imported(folder: Path) -> None:
    program = """
import json, sys
from pathlib import Path
from export.generating import Generator
from learning.text.turns import Dialogue
generator = Generator.load(Path(sys.argv[1]), threads=1)
text = "".join(generator.write(Dialogue.of("What is it?")))
heavy = {"torch", "transformers", "peft", "safetensors", "opacus", "onnx", "sqlalchemy", "grpc"} & sys.modules.keys()
print(json.dumps([len(text) > 0, sorted(heavy)]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, folder],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert json.loads(done.stdout) == [True, []]


@pytest.mark.parametrize(("precision", "unpacked"), [("float32", True), ("int8", False)])
def test_for_one_response_float32_matrices_are_not_copied(tmp_path: Path, precision: str, unpacked: bool) -> None:
    """The first token comes sooner, and it is the same. int8 needs its packed form."""
    encoder = write_generator_of(causal_library_model("llama"), tmp_path / "model", precision=precision)
    ids = encoder.prompt_ids(Dialogue.of(QUESTIONS[0]))
    usual = Generator.load(tmp_path / "model", threads=1)
    once = Generator.load(tmp_path / "model", threads=1, once=True)

    def as_in_the_file(generator: Generator) -> bool:
        try:
            said = generator._session.get_session_options().get_session_config_entry("session.disable_prepacking")
        except RuntimeError:
            return False
        return bool(said == "1")

    assert [as_in_the_file(each) for each in (usual, once)] == [False, unpacked]
    np.testing.assert_allclose(once.logits(ids), usual.logits(ids), atol=1e-5)
    assert once.answer(QUESTIONS[0]) == usual.answer(QUESTIONS[0])
