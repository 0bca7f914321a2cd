"""How the members of a job train together: which parts of the model they share, and what they do in a round.

A model has three parts: `embedding`, `encoder` and `head`. A method says which of them stay private, on the member's
machine for good. What a member does with that is `learning.methods`, a file for each.
"""

import reprlib
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
)

from tacit.documents import AtMost, Part
from tacit.limits import MAX_TOKENS
from tacit.mechanism import DpSgd, GaussianUpdate, Mechanism, NoMechanism

__all__ = [
    "SPECIAL_ENTRIES",
    "FedAvg",
    "FedProx",
    "FedRecon",
    "FedVocab",
    "LgFedAvg",
    "Local",
    "Method",
    "ModelPart",
    "OwnVocabulary",
    "Protected",
    "keeps_anything",
    "keeps_state",
    "private_parts",
    "protected_by",
    "trains_private",
]

ModelPart = Literal["embedding", "encoder", "head"]

_LONGEST_TOKEN = 200

# What every vocabulary of a kind holds beside entries of its own: padding, unknown, and the frame of word pieces.
SPECIAL_ENTRIES = {"words": ("[PAD]", "[UNK]"), "wordpiece": ("[PAD]", "[UNK]", "[CLS]", "[SEP]")}


class Local(Part):
    """Every member for itself: nothing is shared. The baseline of simulations; a federation has nothing to do."""

    name: Literal["local"] = "local"


class FedAvg(Part):
    """Everything is shared and averaged (McMahan et al. 2017)."""

    name: Literal["fedavg"] = "fedavg"


class FedProx(Part):
    """FedAvg with mu/2 |w - w0|^2 added to the local loss, which holds a member near the version it started from (Li et
    al. 2020).
    """

    name: Literal["fedprox"] = "fedprox"
    mu: float = Field(default=0.01, gt=0, le=1000)


def _parts_below(value: object) -> object:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError('must be a list of parts that stay with the member: ["embedding"], ["encoder"], or both')
    for number, part in enumerate(value):
        if part not in ("embedding", "encoder"):
            raise ValueError(
                f"{reprlib.repr(part)} cannot be private here: embedding, encoder or both can, and the head is what "
                "is shared"
            )
        if part in value[:number]:
            raise ValueError(f"{part} stands twice; name each part once")
    return tuple(value)


class LgFedAvg(Part):
    """Local representations below, a shared top (Liang et al. 2020)."""

    name: Literal["lg-fedavg"] = "lg-fedavg"
    private: Annotated[tuple[Literal["embedding", "encoder"], ...], AtMost(2), BeforeValidator(_parts_below)] = (
        "embedding",
        "encoder",
    )


def _tokens(value: object) -> object:
    # Here and not by types: of two that both do not fit, a reader would get two lines for one mistake.
    if value == "digits":
        return value
    if (
        isinstance(value, list | tuple)
        and 1 <= len(value) <= MAX_TOKENS
        and all(isinstance(token, str) and 1 <= len(token) <= _LONGEST_TOKEN for token in value)
    ):
        return tuple(value)
    raise ValueError(
        f'must be "digits", or a list of 1 to {MAX_TOKENS} entries of the vocabulary (of 1 to {_LONGEST_TOKEN} '
        "characters)"
    )


class FedRecon(Part):
    """The embedding's rows of some tokens are private and made anew each round on a part of the data, the support; the
    rest of the model is shared and trained on the other part, the query (Singhal et al. 2021).
    """

    name: Literal["fedrecon"] = "fedrecon"
    # "digits": every token that holds a digit, as in the FedVocab paper's comparison.
    tokens: Annotated[
        Literal["digits"]
        | Annotated[tuple[Annotated[str, StringConstraints(max_length=_LONGEST_TOKEN)], ...], AtMost(MAX_TOKENS)],
        BeforeValidator(_tokens),
    ] = "digits"
    # Of a member's examples, those that private rows are reconstructed on.
    support: float = Field(default=0.5, ge=0.1, le=0.9)
    # Epochs of the reconstruction.
    epochs: int = Field(default=1, ge=1, le=1000)


class FedVocab(Part):
    """The vocabulary and its embedding stay private; encoder and head are shared."""

    name: Literal["fedvocab"] = "fedvocab"
    # One epoch on the embedding alone whenever new shared parameters have come (adaptive updating, section 3.3).
    adaptive: bool = True
    # Whether the embedding is trained while federating; not given: it is, but under dp-sgd, where it stays as it is.
    embedding: Literal["trained", "frozen"] | None = None


Method = Annotated[Local | FedAvg | FedProx | LgFedAvg | FedRecon | FedVocab, Field(discriminator="name")]


class OwnVocabulary(Part):
    """Every member builds its own vocabulary from its own texts."""

    kind: Literal["words", "wordpiece"] = "words"
    # Entries at most, those that every vocabulary has among them.
    size: int = Field(default=30_000, le=1_000_000)
    # How often an entry that comes of the member's texts stands in them, at least.
    min_count: int = Field(default=1, ge=1, le=1_000_000)
    # Of kind "words": whether the other words of the table that a member starts its embedding from get entries too,
    # while there is room.
    table_words: bool = True

    @field_validator("size")
    @classmethod
    def _has_room(cls, size: int, info: ValidationInfo) -> int:
        # Of a kind that is none there is a line already.
        special = SPECIAL_ENTRIES.get(info.data.get("kind", ""), ())
        if special and size <= len(special):
            raise ValueError(
                f"must be {len(special) + 1} or more, is {size}: {', '.join(special)} are among the entries"
            )
        return size

    @field_validator("table_words")
    @classmethod
    def _of_words(cls, table_words: bool, info: ValidationInfo) -> bool:
        if not table_words and info.data.get("kind") == "wordpiece":
            raise ValueError('is for kind = "words"; word pieces take no words of a table anyway: leave this key out')
        return table_words


def private_parts(method: Method) -> frozenset[ModelPart]:
    """The parts that stay with the member as a whole. `fedrecon` keeps rows of one part, so none as a whole."""
    match method:
        case Local():
            return frozenset({"embedding", "encoder", "head"})
        case LgFedAvg(private=parts):
            return frozenset(parts)
        case FedVocab():
            return frozenset({"embedding"})
        case FedAvg() | FedProx() | FedRecon():
            return frozenset()


def keeps_state(method: Method) -> bool:
    """Whether a member remembers private parameters from round to round."""
    return isinstance(method, Local | LgFedAvg | FedVocab)


def keeps_anything(method: Method) -> bool:
    """Whether any value of the model stays with the member, remembered or not."""
    return bool(private_parts(method)) or isinstance(method, FedRecon)


def trains_private(method: Method, mechanism: Mechanism) -> bool:
    """Whether private parameters move while federating; what they are next round then depends on the raw data."""
    match method:
        case FedVocab(embedding=None):
            return not isinstance(mechanism, DpSgd)
        case FedVocab(embedding=embedding):
            return embedding == "trained"
        case FedAvg() | FedProx():
            return False
        case Local() | LgFedAvg() | FedRecon():
            return True


# What makes noise on the shared parameters a guarantee although private ones exist (docs/private-parameters.md).
Protected = Literal["frozen", "joint", "output"]


def protected_by(method: Method, mechanism: Mechanism, *, own_vocabulary: bool) -> Protected | None:
    """Which of the three sound combinations of private parameters and noise this is; None where there is no noise, or
    nothing private.

    frozen: private parameters are public numbers and stay so, so that what is sent depends on the data through noised
    steps alone. joint: noised steps over shared and private parameters together, each of them accounted. output: every
    round is one function of all the data, whatever private state it went through, whose output is clipped and noised;
    sensitivity 2 clip, rate 1.

    Raises:
        ValueError: it is none of them; why, and what to change.
    """
    if isinstance(mechanism, NoMechanism):
        return None
    if isinstance(mechanism, DpSgd) and not isinstance(method, FedAvg | FedVocab):
        raise ValueError(
            f"method: dp-sgd takes noised steps of fedavg or fedvocab; {method.name} has steps of its own that nothing "
            "accounts for; take one of those two, or another mechanism"
        )
    if not keeps_anything(method):
        return None
    if not isinstance(method, FedVocab):
        raise ValueError(
            f"method: under {mechanism.name} the private parameters of {method.name} are trained on raw text, and what "
            "is sent in later rounds follows from them; take fedvocab, or mechanism none"
        )
    if not trains_private(method, mechanism):
        if own_vocabulary:
            raise ValueError(
                "vocabulary: an own vocabulary depends on every text of a member, and one text more or less cuts all "
                f"others into other tokens; under {mechanism.name} take a public vocabulary, or gaussian-update with a "
                'lot of all examples and method.embedding = "trained"'
            )
        return "frozen"
    match mechanism:
        case DpSgd():
            if own_vocabulary:
                raise ValueError(
                    "vocabulary: an own vocabulary depends on every text of a member, which noised steps do not cover; "
                    "take a public vocabulary, or gaussian-update with a lot of all examples"
                )
            return "joint"
        case GaussianUpdate():
            return "output"
        case _:
            raise ValueError(
                f"method: {mechanism.name} with a private embedding that is trained on raw text has no account here; "
                'take gaussian-update with a lot of all examples, dp-sgd, or method.embedding = "frozen"'
            )
