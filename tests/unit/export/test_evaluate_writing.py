"""`evaluate_generator` beside transformers' own model on the same values, and how its figures are shown."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export import answer_report
from export.answer_figures import answer_figures, token_figures
from export.evaluate_writing import Answering, WritingFigures, evaluate_generator, references_of
from export.figures import EvaluationCut
from export.generating import Generator, Sampling
from learning.text.dialogue import DialogueEncoder
from learning.text.examples import DataInvalid
from learning.text.turns import Dialogue, Turn
from tests.support.tiny_generators import causal_library_model, write_generator_of

ROWS = [
    Dialogue.of("What is the capital of France?", "The capital is Paris."),
    Dialogue.of("What is the capital of France?", "Paris"),
    Dialogue.of("Is the food good?", "The food is good, and the restaurant is near the river."),
    Dialogue.of("Who came?", "12 people came late."),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DialogueEncoder, Any]:
    folder = tmp_path_factory.mktemp("writer") / "bundle"
    model = causal_library_model("llama")
    return folder, write_generator_of(model, folder), model


def test_losses_are_those_of_the_library(made: tuple[Path, DialogueEncoder, Any]) -> None:
    folder, encoder, model = made
    ids, targets = encoder.encode(ROWS)
    chosen = torch.from_numpy(targets >= 0)
    with torch.no_grad():
        logs = model(torch.from_numpy(ids)).logits.log_softmax(dim=-1)
    right = torch.from_numpy(np.maximum(targets, 0))
    loss = -logs.gather(2, right[..., None])[..., 0][chosen].mean()
    correct = (logs.argmax(dim=2) == right)[chosen].double().mean()
    found = evaluate_generator(folder, ROWS, threads=1)
    assert found.tokens.loss.value == pytest.approx(float(loss), abs=1e-4)
    assert found.tokens.perplexity.value == pytest.approx(math.exp(float(loss)), rel=1e-4)
    assert found.tokens.accuracy.value == pytest.approx(float(correct))
    assert (found.tokens.rows, found.tokens.tokens) == (4, int(chosen.sum()))
    assert found.greedy is None
    assert found.unusable == 0


def test_answers_are_those_that_the_model_writes(made: tuple[Path, DialogueEncoder, Any]) -> None:
    folder, _, _ = made
    generator = Generator.load(folder, threads=1)
    asked = references_of(ROWS)
    for sampling, name in ((Sampling(), "greedy"), (Sampling(temperature=0.5, seed=3), "sampled")):
        expected = [each.text.strip() for each in generator.write_all(list(asked), sampling, batch=1)]
        found = evaluate_generator(folder, ROWS, Answering(temperature=0.5, seed=3), threads=1)
        assert getattr(found, name) == answer_figures(expected, list(asked.values()))
    assert found.greedy is not None
    assert (found.greedy.answers, found.greedy.references) == (3, 4)
    few = evaluate_generator(folder, ROWS, Answering(prompts=1), threads=1)
    assert few.greedy is not None
    assert (few.greedy.answers, few.greedy.references, few.tokens.rows) == (1, 2, 4)


def test_rows_of_one_prompt_are_its_references() -> None:
    asked = references_of([ROWS[0], ROWS[2], ROWS[1]])
    assert list(asked.values()) == [["The capital is Paris.", "Paris"], [ROWS[2].turns[-1].text]]
    assert next(iter(asked)) == Dialogue((Turn("user", "What is the capital of France?"),))


def test_rows_without_a_response_count_nowhere(made: tuple[Path, DialogueEncoder, Any]) -> None:
    folder, _, _ = made
    found = evaluate_generator(folder, [*ROWS, Dialogue.of("Nothing?"), Dialogue(())], threads=1)
    assert found.unusable == 2
    assert found.tokens == evaluate_generator(folder, ROWS, threads=1).tokens
    with pytest.raises(DataInvalid, match="no row has a prompt and a response"):
        evaluate_generator(folder, [Dialogue.of("Nothing?")], threads=1)


def test_what_a_user_says_after_the_last_response_is_left_out(made: tuple[Path, DialogueEncoder, Any]) -> None:
    """Training reads such a row up to its last response."""
    folder, _, _ = made
    asked = [Dialogue((*each.turns, Turn("user", "Thank you."), Turn("user", "Bye."))) for each in ROWS]
    found = evaluate_generator(folder, asked, Answering(), threads=1)
    assert found == evaluate_generator(folder, ROWS, Answering(), threads=1)
    assert found.unusable == 0


def test_a_prompt_without_room_is_refused(tmp_path: Path) -> None:
    write_generator_of(causal_library_model("llama"), tmp_path / "bundle")
    long = Dialogue.of("What is the capital of France? " * 60, "Paris")
    assert evaluate_generator(tmp_path / "bundle", [long], threads=1).tokens.rows == 1
    with pytest.raises(DataInvalid, match="shorten the prompt"):
        evaluate_generator(tmp_path / "bundle", [long], Answering(), threads=1)


def test_an_evaluation_that_is_cut_off_has_the_figures_of_the_rows_before(
    made: tuple[Path, DialogueEncoder, Any],
) -> None:
    found = evaluate_generator(made[0], ROWS, Answering(), threads=1, cancelled=_after(3))
    assert found.tokens == evaluate_generator(made[0], ROWS[:3], threads=1).tokens
    assert (found.rows_left, found.answers_left, found.greedy, found.sampled, found.cut) == (1, 6, None, None, True)
    shown = answer_report.figures_json(found)
    assert (shown["examples"], shown["rows_left"], shown["answers_left"]) == (3, 1, 6)
    assert "1 responses were not reached" in "\n".join(answer_report.all_lines(found, 80))
    with pytest.raises(EvaluationCut):
        evaluate_generator(made[0], ROWS, threads=1, cancelled=_after(0))


def test_answers_written_before_an_evaluation_is_cut_off_are_compared(
    made: tuple[Path, DialogueEncoder, Any], measured: WritingFigures
) -> None:
    asked = references_of(ROWS)
    generator = Generator.load(made[0], threads=1)
    first = generator.write_all(list(asked)[:1], Sampling(), batch=1)
    expected = answer_figures([each.text.strip() for each in first], list(asked.values())[:1])
    # Cut within the second answer: at its second token.
    looks = len(ROWS) + _looks_of(generator, next(iter(asked))) + 3
    found = evaluate_generator(made[0], ROWS, Answering(batch=1), threads=1, cancelled=_after(looks))
    assert found.tokens == measured.tokens
    assert (found.greedy, found.sampled, found.rows_left, found.answers_left) == (expected, None, 0, 5)
    assert not measured.cut
    assert "answers_left" not in answer_report.figures_json(measured)


def _after(looks: int) -> Callable[[], bool]:
    """False for so many looks, and then True."""
    count = itertools.count()
    return lambda: next(count) >= looks


def _looks_of(generator: Generator, prompt: Dialogue) -> int:
    """How often writing one answer, and the look after it, asks whether it is cancelled."""
    looks = itertools.count()
    list(generator.write_all([prompt], Sampling(), batch=1, cancelled=lambda: next(looks) < 0))
    return next(looks)


@pytest.fixture(scope="module")
def measured(made: tuple[Path, DialogueEncoder, Any]) -> WritingFigures:
    return evaluate_generator(made[0], ROWS, Answering(), threads=1)


def test_the_figures_are_json(measured: WritingFigures) -> None:
    shown = json.loads(json.dumps(answer_report.figures_json(measured), allow_nan=False))
    assert shown["loss"] == measured.tokens.loss.value
    assert shown["loss_interval"][0] <= shown["loss"] <= shown["loss_interval"][1]
    assert shown["greedy"]["bleu"] == measured.greedy.bleu.value
    assert shown["sampled"]["temperature"] == 1.0
    assert (shown["examples"], shown["unusable_rows"]) == (4, 0)


def test_the_lines_say_every_figure(measured: WritingFigures) -> None:
    text = "\n".join([answer_report.headline(measured), *answer_report.all_lines(measured, 80)])
    for word in ("perplexity", "token accuracy", "95 % interval", "BLEU", "ROUGE-L", "exact match", "temperature 1"):
        assert word in text
    assert answer_report.warning(measured) == ""
    assert answer_report.stored(measured) == (measured.tokens.accuracy.value, measured.tokens.loss.value, 4)


def test_the_version_of_least_loss_is_the_best(measured: WritingFigures) -> None:
    from dataclasses import replace

    from export.answer_figures import Estimate

    def of(loss: float) -> WritingFigures:
        return replace(measured, tokens=replace(measured.tokens, loss=Estimate(loss, loss - 0.1, loss + 0.1)))

    found = [of(3.0), of(2.0), of(2.05)]
    assert answer_report.best_of(found) == 1
    lines = answer_report.versions_lines([4, 5, 6], found)
    (marked,) = [line for line in lines if line.endswith("best")]
    assert marked.split()[0] == "5"
    assert any("1 other version has a loss" in line for line in lines)


def test_a_version_that_diverged_is_said_to_and_is_not_the_best(measured: WritingFigures) -> None:
    from dataclasses import replace

    tokens = token_figures(np.array([math.nan, 1.0]), np.array([0, 1]), np.array([3, 4]))
    diverged = replace(measured, tokens=tokens)
    assert answer_report.warning(diverged) == "the loss is no number: this version's training diverged"
    shown = json.loads(json.dumps(answer_report.figures_json(diverged), allow_nan=False))
    assert (shown["loss"], shown["loss_interval"], shown["perplexity_interval"]) == (None, [None, None], [None, None])
    text = "\n".join([answer_report.headline(diverged), *answer_report.all_lines(diverged, 80)])
    assert "loss no interval, token accuracy " in text
    for found in ([diverged, measured], [measured, diverged]):
        assert found[answer_report.best_of(found)] is measured
        lines = answer_report.versions_lines([1, 2], found)
        assert sum(line.endswith("best") for line in lines) == 1
        assert "no interval" in "\n".join(lines)


def test_one_prompt_ranks_no_versions(measured: WritingFigures) -> None:
    from dataclasses import replace

    one = replace(measured, tokens=token_figures(np.array([2.0]), np.array([1]), np.array([4])))
    lines = answer_report.versions_lines([1, 2], [one, one])
    assert "best: version 1, loss 0.5000 a token" in "\n".join(lines)
    assert "no version has an interval, so this file may not rank them" in lines
    assert not any("other version" in line for line in lines)
