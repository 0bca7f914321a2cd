"""What a model that writes reads and writes: dialogue templates as data, and the task `generate`.

A template says what stands around each turn of a dialogue. It is text, in which `{TOKEN}` names a special token of the
base's tokenizer: `{<|im_start|>}user`. Only a template can name one. There is no other syntax, so a template is no
program (published chat templates are Jinja, which is one).
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from tacit.documents import Part
from tacit.reading import shown

__all__ = [
    "CAUSAL_FAMILIES",
    "ROLES",
    "TEMPLATES",
    "AroundTurn",
    "BuiltIn",
    "DialogueTemplate",
    "Generate",
    "Role",
    "TemplatePiece",
    "parse_around",
]

# Model types of transformers whose base a job may adapt to write.
CAUSAL_FAMILIES = frozenset({"gpt2", "llama", "mistral", "qwen2", "qwen3"})

# Whose turn it is in a dialogue.
Role = Literal["system", "user", "assistant"]
ROLES: tuple[Role, ...] = get_args(Role)

_TOKEN = re.compile(r"\{([^{}]*)\}")
_MAX_TOKEN = 100


@dataclass(frozen=True, slots=True)
class TemplatePiece:
    """A part of what stands around a turn: plain text, or one special token."""

    text: str
    special: bool


def parse_around(text: str) -> tuple[TemplatePiece, ...]:
    """Splits what stands around a turn into text and special tokens.

    Raises:
        ValueError: a brace is open, or names no token.
    """
    pieces: list[TemplatePiece] = []
    end = 0
    for found in [*_TOKEN.finditer(text), None]:
        literal = text[end : found.start() if found else len(text)]
        if "{" in literal or "}" in literal:
            raise ValueError(
                "a brace is open; {TOKEN} names a special token, and a template has no other braces: close or remove it"
            )
        if literal:
            pieces.append(TemplatePiece(literal, special=False))
        if found is None:
            break
        if not 1 <= len(found[1]) <= _MAX_TOKEN:
            raise ValueError(
                f"{shown(found[0])} names no special token; write the token between the braces, as in {{</s>}}"
            )
        pieces.append(TemplatePiece(found[1], special=True))
        end = found.end()
    return tuple(pieces)


def _around(text: str) -> str:
    parse_around(text)
    return text


Around = Annotated[str, StringConstraints(max_length=2000), AfterValidator(_around)]
# A special token as the tokenizer writes it, without braces.
Special = Annotated[str, StringConstraints(min_length=1, max_length=_MAX_TOKEN)]


class AroundTurn(Part):
    """What stands before and after the text of a turn."""

    before: Around = ""
    after: Around = ""


class DialogueTemplate(Part):
    """What stands around the turns of each role. Text and special tokens, and nothing that computes."""

    # What comes before the first turn.
    first: Around = ""
    # None: dialogues have no turn of this role.
    system: AroundTurn | None = None
    user: AroundTurn = AroundTurn()
    # `after` follows `end`, and is only read if another turn follows.
    assistant: AroundTurn = AroundTurn()
    # The special token that ends a response, which the model learns to write. None: the tokenizer's own, which
    # `coordinator job bundle` writes here.
    end: Special | None = None

    def around(self, role: Role) -> AroundTurn | None:
        """What stands around a turn of this role; None if dialogues have none."""
        return {"system": self.system, "user": self.user, "assistant": self.assistant}[role]

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles whose turns a dialogue may have."""
        return tuple(role for role in ROLES if self.around(role) is not None)

    @property
    def specials(self) -> tuple[str, ...]:
        """Every special token that the template names, each once."""
        texts = [self.first]
        for each in (self.system, self.user, self.assistant):
            texts += [] if each is None else [each.before, each.after]
        named = [piece.text for text in texts for piece in parse_around(text) if piece.special]
        return tuple(dict.fromkeys([*named, *([] if self.end is None else [self.end])]))


BuiltIn = Literal["chatml", "llama3", "mistral", "plain"]


def _chatml(role: Role) -> AroundTurn:
    # The end of a response is `end`.
    return AroundTurn(before=f"{{<|im_start|>}}{role}\n", after="\n" if role == "assistant" else "{<|im_end|>}\n")


def _llama3(role: Role) -> AroundTurn:
    return AroundTurn(
        before=f"{{<|start_header_id|>}}{role}{{<|end_header_id|>}}\n\n",
        after="" if role == "assistant" else "{<|eot_id|>}",
    )


TEMPLATES: dict[BuiltIn, DialogueTemplate] = {
    # SmolLM2, Qwen2, Qwen3.
    "chatml": DialogueTemplate(
        system=_chatml("system"), user=_chatml("user"), assistant=_chatml("assistant"), end="<|im_end|>"
    ),
    "llama3": DialogueTemplate(
        first="{<|begin_of_text|>}",
        system=_llama3("system"),
        user=_llama3("user"),
        assistant=_llama3("assistant"),
        end="<|eot_id|>",
    ),
    # From version 0.3, whose tokenizer has these tokens.
    "mistral": DialogueTemplate(
        first="{<s>}",
        user=AroundTurn(before="{[INST]} ", after="{[/INST]}"),
        assistant=AroundTurn(before=" "),
        end="</s>",
    ),
    # For bases that know no turns.
    "plain": DialogueTemplate(system=AroundTurn(after="\n"), user=AroundTurn(after="\n"), assistant=AroundTurn()),
}


def _template_of(value: object) -> object:
    """Reads a word as a built-in template."""
    if isinstance(value, str):
        if value not in TEMPLATES:
            raise ValueError(f"{shown(value)} is not one of {', '.join(TEMPLATES)}; name one, or write a table")
        return TEMPLATES[value]
    return value


class Generate(Part):
    """The model writes a response to a prompt. The loss is on the tokens of responses alone."""

    name: Literal["generate"] = "generate"
    # A built-in's name or a table. The document always has the table.
    template: Annotated[DialogueTemplate, BeforeValidator(_template_of)]
    # The most tokens of a response when the exported model writes.
    max_new_tokens: int = Field(default=64, ge=1, le=4096)

    @model_validator(mode="before")
    @classmethod
    def _named(cls, table: Any) -> Any:
        if isinstance(table, dict) and "template" not in table:
            raise ValueError(
                f"template: missing; name one that the base was trained with ({', '.join(TEMPLATES)}), or write a table"
            )
        return table

    @property
    def template_name(self) -> str:
        """The name of the built-in template, whichever token ends its responses, or "own"."""
        for name, each in TEMPLATES.items():
            if self.template in (each, each.model_copy(update={"end": self.template.end})) and (
                each.end is None or each.end == self.template.end
            ):
                return name
        return "own"

    def ended(self, end: str) -> Self:
        """The same task, with the end token of responses named."""
        return self.model_copy(update={"template": self.template.model_copy(update={"end": end})})
