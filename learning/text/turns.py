"""Dialogues as rows of data: turns of a system, a user and an assistant. A prompt and its response are two turns.

Guarantees: neither prints its text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tacit.generation import Role

__all__ = ["MAX_TURNS", "Dialogue", "Turn"]

# Turns of one dialogue.
MAX_TURNS = 1000


@dataclass(frozen=True, slots=True)
class Turn:
    """What one role says."""

    role: Role
    text: str

    def __repr__(self) -> str:
        return f"Turn({self.role!r}, <{len(self.text)} characters>)"


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Turns in their order."""

    turns: tuple[Turn, ...]

    @classmethod
    def of(cls, prompt: str, response: str | None = None, system: str | None = None) -> "Dialogue":
        """A prompt and, unless it is None, its response; before them what the system says, unless that is None."""
        said: list[tuple[Role, str | None]] = [("system", system), ("user", prompt), ("assistant", response)]
        return cls(tuple(Turn(role, text) for role, text in said if text is not None))

    @property
    def answered(self) -> "Dialogue":
        """The turns up to the last response, which are what a model learns from. Without a response there are none."""
        last = max((at for at, turn in enumerate(self.turns) if turn.role == "assistant"), default=-1)
        return Dialogue(self.turns[: last + 1])

    @property
    def responses(self) -> tuple[str, ...]:
        """The texts of the assistant's turns."""
        return self._said(("assistant",))

    @property
    def prompts(self) -> tuple[str, ...]:
        """The texts of all other turns."""
        return self._said(("system", "user"))

    def _said(self, roles: Sequence[Role]) -> tuple[str, ...]:
        return tuple(turn.text for turn in self.turns if turn.role in roles)
