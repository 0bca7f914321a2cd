"""How a job whose model writes would read a member's dialogues: shares of cut rows, the template, and one row as text.

Guarantees: the row is only printed on this machine. It is no part of what stewards see, and of no JSON.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from learning.text.corpus import dialogue_encoder_of
from learning.text.dialogue import Dialogue, DialogueCoverage, kept_of_a_prompt
from learning.text.examples import Example, dialogue_of
from tacit.generation import Generate
from tacit.job import JobDocument
from tacit.model import PromptedModel
from toolkit.text import clean

__all__ = ["DialogueReading"]

# Characters of a row that are shown, from each of its stretches.
_SHOWN = 400


@dataclass(frozen=True)
class DialogueReading:
    """How much of the member's dialogues a job's model would read.

    Attributes:
        coverage: The counts; None if they cannot be computed.
        template: The name of the job's template.
        example: The first usable row in stretches without and with loss.
        problem: Why nothing can be said; None if something can.
    """

    coverage: DialogueCoverage | None = None
    template: str = "own"
    example: tuple[tuple[str, bool], ...] = ()
    problem: str | None = None

    @classmethod
    def of(cls, job: JobDocument, tokenizer: bytes | None, examples: Sequence[Example]) -> "DialogueReading":
        """Encodes the member's dialogues with the job's tokenizer and template."""
        model = job.model
        if not isinstance(model, PromptedModel) or not isinstance(model.task, Generate):
            raise TypeError("only a job whose model writes reads dialogues")
        if tokenizer is None:
            return cls(problem="the job has no tokenizer; tell the operator")
        try:
            encoder = dialogue_encoder_of(job, tokenizer)
        except ValueError as error:
            return cls(problem=str(error))
        found = encoder.coverage(Dialogue(()) if each.dialogue is None else each.dialogue for each in examples)
        rows = (dialogue_of(each, model.task.template.roles) for each in examples)
        shown = next((made for row in rows if row is not None and (made := encoder.segments(row))), None)
        return cls(found, model.task.template_name, tuple(shown or ()))

    def sentence(self, job: JobDocument) -> str:
        """Says the shares of cut rows and responses and how a row is cut, or why they are not known."""
        if (found := self.coverage) is None:
            return f"how much of your dialogues it would read is not known: {self.problem}"
        read, most = found.rows - found.unusable, job.model.max_tokens
        return (
            f"{read:,} of {found.rows:,} rows are dialogues with a response; with template {self.template}, "
            f"{_share(found.cut, read)} of them are cut and {_share(found.responses_cut, read)} lose a part of the "
            f"response, because the model reads at most {most} tokens: a longer row loses its oldest exchanges first, "
            f"then the beginning of the prompt, down to {kept_of_a_prompt(most)} tokens, and then the end of the "
            "response"
        )

    def show_example(self, say: Callable[[str], None]) -> None:
        """Prints the example: each stretch says whether the model learns to write it."""
        if not self.example:
            return
        say("  your first dialogue, which stays on this machine (> is what the model learns to write):")
        for text, learnt in self.example:
            short = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
            for line in short.strip("\n").split("\n"):
                say(f"    {'>' if learnt else '|'} {clean(line, _SHOWN + 4)}")

    def as_json(self, job: JobDocument) -> dict[str, Any]:
        """Returns what `--json` prints."""
        if (found := self.coverage) is None:
            return {"problem": self.problem}
        return {
            "template": self.template,
            "rows": found.rows,
            "unusable_rows": found.unusable,
            "cut_rows": found.cut,
            "cut_responses": found.responses_cut,
            "tokens": found.tokens,
            "learnt_tokens": found.targets,
            "max_tokens": job.model.max_tokens,
        }


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole if whole else 0.0:.1f} %"
