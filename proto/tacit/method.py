"""How the members of a job train together: which parts of the model they share, and what they do in a round.

A model has three parts: `embedding`, `encoder` and `head`. A method says which of them stay private, i.e. never leave
the member's machine. `learning.methods` implements the methods, one file each.
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

# Entries that every vocabulary of a kind has: padding, unknown, and the tokens around a text of word pieces.
SPECIAL_ENTRIES = {"words": ("[PAD]", "[UNK]"), "wordpiece": ("[PAD]", "[UNK]", "[CLS]", "[SEP]")}


class Local(Part):
    """Every member trains alone and shares nothing. The baseline of simulations; a federation does not accept it."""

    name: Literal["local"] = "local"


class FedAvg(Part):
    """Everything is shared and averaged (McMahan et al. 2017)."""

    name: Literal["fedavg"] = "fedavg"


class FedProx(Part):
    """FedAvg with mu/2 |w - w0|^2 added to the local loss, which keeps a member near the version w0 from which it
    started (Li et al. 2020).
    """

    name: Literal["fedprox"] = "fedprox"
    mu: float = Field(default=0.01, gt=0, le=1000)


def _parts_below(value: object) -> object:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError('must be a list of private parts: ["embedding"], ["encoder"], or both')
    for number, part in enumerate(value):
        if part not in ("embedding", "encoder"):
            raise ValueError(
                f"{reprlib.repr(part)} cannot be private here; name embedding, encoder or both (the head is always "
                "shared)"
            )
        if part in value[:number]:
            raise ValueError(f"{part} is listed twice; name each part once")
    return tuple(value)


class LgFedAvg(Part):
    """Members keep local representations and share the layers above them (Liang et al. 2020)."""

    name: Literal["lg-fedavg"] = "lg-fedavg"
    private: Annotated[tuple[Literal["embedding", "encoder"], ...], AtMost(2), BeforeValidator(_parts_below)] = (
        "embedding",
        "encoder",
    )


def _tokens(value: object) -> object:
    # Checked here and not by the union of types, which would report one mistake twice.
    if value == "digits":
        return value
    if (
        isinstance(value, list | tuple)
        and 1 <= len(value) <= MAX_TOKENS
        and all(isinstance(token, str) and 1 <= len(token) <= _LONGEST_TOKEN for token in value)
    ):
        return tuple(value)
    raise ValueError(
        f'must be "digits", or a list of 1 to {MAX_TOKENS} vocabulary entries of 1 to {_LONGEST_TOKEN} characters'
    )


class FedRecon(Part):
    """The embedding rows of some tokens are private and reconstructed each round on one part of the data, the support.
    The rest of the model is shared and trained on the other part, the query (Singhal et al. 2021).
    """

    name: Literal["fedrecon"] = "fedrecon"
    # "digits": every token that contains a digit, as in the FedVocab paper's comparison.
    tokens: Annotated[
        Literal["digits"]
        | Annotated[tuple[Annotated[str, StringConstraints(max_length=_LONGEST_TOKEN)], ...], AtMost(MAX_TOKENS)],
        BeforeValidator(_tokens),
    ] = "digits"
    # Share of a member's examples on which private rows are reconstructed.
    support: float = Field(default=0.5, ge=0.1, le=0.9)
    # Epochs of the reconstruction.
    epochs: int = Field(default=1, ge=1, le=1000)


class FedVocab(Part):
    """The vocabulary and its embedding stay private; encoder and head are shared."""

    name: Literal["fedvocab"] = "fedvocab"
    # One epoch on the embedding alone whenever new shared parameters have arrived (adaptive updating, section 3.3).
    adaptive: bool = True
    # Whether the embedding is trained while federating. None: trained, except under dp-sgd, which leaves it unchanged.
    embedding: Literal["trained", "frozen"] | None = None


Method = Annotated[Local | FedAvg | FedProx | LgFedAvg | FedRecon | FedVocab, Field(discriminator="name")]


class OwnVocabulary(Part):
    """Every member builds its own vocabulary from its own texts."""

    kind: Literal["words", "wordpiece"] = "words"
    # Maximum number of entries, including those that every vocabulary has.
    size: int = Field(default=30_000, le=1_000_000)
    # Minimum number of occurrences of an entry in the member's texts.
    min_count: int = Field(default=1, ge=1, le=1_000_000)
    # With kind "words": if a member starts its embedding from a table, whether the table's other words get entries too,
    # while there is room.
    table_words: bool = True
    # Where a piece's row starts. "base": at the mean of the rows of the base model's pieces that it consists of.
    # "random": at the member's own random values. None in a job file: "base" if the model has a base with word pieces.
    start: Literal["base", "random"] | None = None

    @field_validator("size")
    @classmethod
    def _has_room(cls, size: int, info: ValidationInfo) -> int:
        # An unknown kind is reported already.
        special = SPECIAL_ENTRIES.get(info.data.get("kind", ""), ())
        if special and size <= len(special):
            raise ValueError(
                f"must be at least {len(special) + 1}, is {size}: {', '.join(special)} are among the entries"
            )
        return size

    @field_validator("table_words")
    @classmethod
    def _of_words(cls, table_words: bool, info: ValidationInfo) -> bool:
        if not table_words and info.data.get("kind") == "wordpiece":
            raise ValueError('is only for kind = "words"; word pieces never use a table\'s words; leave this key out')
        return table_words


def private_parts(method: Method) -> frozenset[ModelPart]:
    """The parts that are private as a whole. There are none for `fedrecon`, which keeps only rows of one part."""
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
    """Whether a member keeps private parameters from round to round."""
    return isinstance(method, Local | LgFedAvg | FedVocab)


def keeps_anything(method: Method) -> bool:
    """Whether any value of the model is private, kept from round to round or not."""
    return bool(private_parts(method)) or isinstance(method, FedRecon)


def trains_private(method: Method, mechanism: Mechanism) -> bool:
    """Whether private parameters are trained while federating. If so, their next values depend on the raw data."""
    match method:
        case FedVocab(embedding=None):
            return not isinstance(mechanism, DpSgd)
        case FedVocab(embedding=embedding):
            return embedding == "trained"
        case FedAvg() | FedProx():
            return False
        case Local() | LgFedAvg() | FedRecon():
            return True


# Why noise on the shared parameters is a guarantee although private ones exist (docs/private-parameters.md).
Protected = Literal["frozen", "joint", "output"]


def protected_by(method: Method, mechanism: Mechanism, *, own_vocabulary: bool) -> Protected | None:
    """Which of the three sound combinations of private parameters and noise a job uses.

    - frozen: private parameters are public numbers and stay so; what is sent depends on the data only through noised
      steps.
    - joint: noised steps over shared and private parameters together, each of them accounted.
    - output: each round is one function of all the data, whatever private state it passes through; its output is
      clipped and noised. Sensitivity 2 clip, sampling rate 1.

    Args:
        method: the job's method.
        mechanism: the job's mechanism.
        own_vocabulary: whether members build their own vocabularies.

    Returns:
        The combination; None without noise or without private parameters.

    Raises:
        ValueError: the combination is none of the three; the text says why and what to change.
    """
    if isinstance(mechanism, NoMechanism):
        return None
    if isinstance(mechanism, DpSgd) and not isinstance(method, FedAvg | FedVocab):
        raise ValueError(
            f"method: dp-sgd works with fedavg and fedvocab only; {method.name} takes steps for which there is no "
            "accounting; use one of those two, or another mechanism"
        )
    if not keeps_anything(method):
        return None
    if not isinstance(method, FedVocab):
        raise ValueError(
            f"method: under {mechanism.name}, {method.name} trains private parameters on raw text, and later updates "
            "depend on them; use fedvocab, or mechanism none"
        )
    if not trains_private(method, mechanism):
        if own_vocabulary:
            raise ValueError(
                "vocabulary: a member's own vocabulary depends on all its texts, so one more text can tokenize all "
                f"others differently; under {mechanism.name} use a public vocabulary, or gaussian-update with a lot of "
                'all examples and method.embedding = "trained"'
            )
        return "frozen"
    match mechanism:
        case DpSgd():
            if own_vocabulary:
                raise ValueError(
                    "vocabulary: a member's own vocabulary depends on all its texts, which noised steps do not cover; "
                    "use a public vocabulary, or gaussian-update with a lot of all examples"
                )
            return "joint"
        case GaussianUpdate():
            return "output"
        case _:
            raise ValueError(
                f"method: there is no accounting for {mechanism.name} with a private embedding trained on raw text; "
                'use gaussian-update with a lot of all examples, dp-sgd, or method.embedding = "frozen"'
            )
