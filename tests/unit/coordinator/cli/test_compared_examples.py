"""The examples on which `coordinator evaluate` compares an export with the trained model."""

import sys

import pytest

import coordinator.cli  # noqa: F401  so that the module of the command is imported
from learning.text.examples import Example
from learning.text.turns import Dialogue
from tacit.prompt import Generate, Head, LoRA, PromptedModel

PARITY_SAMPLES = 16


class Document:
    """The part of a job document that is asked for."""

    def __init__(self, task: Generate | Head) -> None:
        self.model = PromptedModel(base="base", injection=LoRA(), task=task)


@pytest.mark.parametrize(("task", "first"), [(Generate(template="chatml"), 20), (Head(), 0)], ids=["writes", "labels"])
def test_a_model_that_writes_is_compared_on_the_first_rows_that_are_dialogues(
    task: Generate | Head, first: int
) -> None:
    # `coordinator.cli.evaluate` is the command, by its module's name.
    compared_examples = sys.modules["coordinator.cli.evaluate"].compared_examples
    texts = [Example(f"text {number}", "A") for number in range(20)]
    dialogues = [Example(f"ask {number}", None, dialogue=Dialogue.of("ask", "so")) for number in range(20)]
    rows = [*texts, *dialogues]
    assert compared_examples(Document(task), rows) == rows[first : first + PARITY_SAMPLES]
    # Nor is a row that the model cannot read.
    if isinstance(task, Generate):
        asked = [*dialogues[:2], Example("ask", None, dialogue=Dialogue.of("ask", None)), *dialogues[2:]]
        assert compared_examples(Document(task), asked) == dialogues[:PARITY_SAMPLES]
        strict = Generate(template="mistral")
        system = Example("be brief\nask", None, dialogue=Dialogue.of("ask", "so", system="be brief"))
        assert compared_examples(Document(task), [system, *dialogues])[0] == system
        assert compared_examples(Document(strict), [system, *dialogues]) == dialogues[:PARITY_SAMPLES]
    # Without any dialogue, the export says what is lacking.
    assert compared_examples(Document(task), texts) == texts[:PARITY_SAMPLES]
