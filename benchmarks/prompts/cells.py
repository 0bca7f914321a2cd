"""The cells of FedPrompt's trained quality, their common recipe, and the choice of their rates.

A rate is chosen among those that `--search` tried, only by validation rows, and stays chosen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from benchmarks.prompts.setup import CACHE, HeadRecipe, Partitioned
from tacit.job import Precision

__all__ = [
    "BOUNDS",
    "EPSILONS",
    "MOMENTA",
    "PARTS",
    "RATES",
    "SEEDS",
    "SERVER_RATE",
    "Cell",
    "Injected",
    "Rate",
    "Recipe",
    "SearchUnfinished",
    "cells_of",
    "choices_of",
    "rate_of",
    "rate_with",
    "searched_as",
]

PARTS = ("head", "quality", "tokens", "steps", "laplace", "methods", "momentum")
SEEDS = (0, 1, 2)

Task = Literal["classification", "cloze"]
Injected = Literal["prompt-tuning", "p-tuning", "prefix-tuning", "lora"]
Method = Injected | Literal["fine-tuning", "frozen", "centralised"]

# The paper's SST-2 with BERT-base, per cent: tables I, II, IV, V and VI. Its figure 6 (local steps) has no numbers.
_EQUAL, _DIRICHLET = 90.16, 89.45
_TOKENS = {1: 87.11, 5: 89.28, 10: 89.62, 20: _EQUAL}
_FINE_TUNING, _LAPLACE, _P_TUNING = 91.02, 85.73, 90.99

# The rates that `--search` tries, all with Adam. The first is used without a search. The paper's for prompts is 0.3.
RATES: Mapping[Method, tuple[float, ...]] = {
    "prompt-tuning": (0.3, 0.1, 0.03, 0.01, 0.003),
    "centralised": (0.3, 0.1, 0.03, 0.01, 0.003),
    "p-tuning": (0.001, 0.01, 0.0001),
    "prefix-tuning": (0.03, 0.1, 0.01),
    "lora": (0.001, 0.003, 0.0003),
    "fine-tuning": (5e-5, 1e-4, 2e-5, 3e-4),
    "frozen": (0.01, 0.1, 0.001),
}
_MIN_OF_CLOZE = 0.03
# L1 bounds of an update under `laplace-update`, which are searched instead of the rate, and epsilons of one round.
BOUNDS = (100.0, 10.0, 1000.0)
EPSILONS = (1000.0, 100.0, 10.0)
# Shares of the last step that `fedavgm` keeps, which are searched instead of the rate.
MOMENTA = (0.9, 0.7, 0.5)
# Server learning rate of `fedavgm`; not searched.
SERVER_RATE = 1.0


@dataclass(frozen=True)
class Recipe:
    """The options that all cells share.

    Args:
        precision: of frozen networks while prompts are trained. With AMX, a bfloat16 step takes half as long.
        rows, scored: largest number of training rows, and of rows in each scored part.
    """

    members: int = 10
    rounds: int = 15
    precision: Precision = "bfloat16"
    rows: int | None = None
    scored: int | None = None
    head: HeadRecipe = field(default_factory=HeadRecipe)
    cache: Path = CACHE


@dataclass(frozen=True)
class Cell:
    """One training.

    Args:
        steps: of each member in each round.
        epsilon: of one round under `laplace-update`; None adds no noise.
        server: the coordinator's optimiser.
    """

    method: Method
    task: Task = "classification"
    partition: Partitioned | Literal["pooled"] = "equal"
    tokens: int | None = 20
    steps: int = 40
    epsilon: float | None = None
    server: Literal["fedavg", "fedavgm"] = "fedavg"

    @property
    def case(self) -> dict[str, Any]:
        """The keys of the case in the results."""
        found: dict[str, Any] = {"method": self.method, "backbone": "minilm", "task": self.task}
        found |= {"partition": self.partition, "tokens": self.tokens, "steps": self.steps}
        if self.server != "fedavg":
            found["server"] = self.server
        return found if self.epsilon is None else found | {"mechanism": "laplace-update", "epsilon": self.epsilon}

    @property
    def paper(self) -> float | None:
        """The paper's accuracy on SST-2 with BERT-base, in per cent, if it has one."""
        if (self.task != "cloze" and self.method != "fine-tuning") or self.server != "fedavg":
            return None
        match self:
            case Cell(method="prompt-tuning", epsilon=float()):
                return _LAPLACE if self.partition == "equal" else None
            case Cell(method="prompt-tuning", partition="equal", steps=40):
                return _TOKENS.get(self.tokens or 0)
            case Cell(method="prompt-tuning", partition="dirichlet", steps=40, tokens=20):
                return _DIRICHLET
            case Cell(method="fine-tuning", partition="equal"):
                return _FINE_TUNING
            case Cell(method="p-tuning", partition="equal"):
                return _P_TUNING
            case _:
                return None

    @property
    def prompted(self) -> bool:
        """Whether gradients pass through a frozen network."""
        return self.method not in ("fine-tuning", "frozen")

    @property
    def beside(self) -> "Cell":
        """The centralised training that a federated prompt is compared with."""
        return Cell("centralised", self.task, "pooled", self.tokens, self.steps)


def cells_of(part: str) -> list[Cell]:
    """Return the cells of a part, beginning with those that others are compared with."""
    tasks: tuple[Task, ...] = ("classification", "cloze")
    prompts = [Cell("prompt-tuning", task) for task in tasks]
    match part:
        case "quality":
            found = [
                each for prompt in prompts for each in (prompt.beside, prompt, replace(prompt, partition="dirichlet"))
            ]
            others = [Cell("frozen", tokens=None), Cell("fine-tuning", tokens=None)]
            return found + [each for other in others for each in (other, replace(other, partition="dirichlet"))]
        case "tokens":
            return [replace(prompt, tokens=tokens) for prompt in prompts for tokens in (1, 5, 10, 20)]
        case "steps":
            return [replace(prompt, steps=steps) for prompt in prompts for steps in (10, 40, 100)]
        case "laplace":
            return [replace(prompt, epsilon=epsilon) for prompt in prompts for epsilon in EPSILONS]
        case "methods":
            return [
                Cell("p-tuning"),
                Cell("prefix-tuning"),
                Cell("lora", tokens=None),
                Cell("p-tuning", "cloze"),
            ]
        case "momentum":
            return [replace(prompts[1], partition=partition, server="fedavgm") for partition in get_args(Partitioned)]
        case _:
            return []


# ---- rates ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rate:
    """The searched options.

    Args:
        adam: rate of each step. With a bound or a momentum, it is the best rate of the same training without either.
        bound: L1 bound of an update under `laplace-update`; None without.
        momentum: of `fedavgm`; None without.
        tried: number of values tried of the option that the cell searches itself.
        rates_tried: number of rates tried, if the cell searches another option.
    """

    adam: float
    bound: float | None = None
    momentum: float | None = None
    tried: int = 0
    rates_tried: int | None = None

    @property
    def stated(self) -> dict[str, float]:
        """The options as they are written in results."""
        found = {"learning_rate": self.adam, "bound": self.bound, "momentum": self.momentum}
        found |= {"server_rate": None if self.momentum is None else SERVER_RATE, "rates_tried": self.rates_tried}
        return {key: value for key, value in found.items() if value is not None}


def rate_of(cell: Cell, tried: Sequence[Mapping[str, Any]]) -> Rate:
    """Choose the rate of a cell: the one with the highest validation accuracy that `--search` found.

    The first of equal ones counts, or the first of `choices_of` if none was tried. With noise or momentum it chooses
    the bound or the momentum, at the rate chosen for the same training without either.

    Raises:
        SearchUnfinished: some values are not tried, or a bound or momentum was tried at an outdated rate.
    """
    wanted = searched_as(cell).case
    found = [line for line in tried if {**line["case"], "rate": None} == {**wanted, "rate": None}]
    choices = choices_of(cell)
    if found and {float(line["case"]["rate"]) for line in found} < set(choices):
        raise SearchUnfinished(f"{len(found)} of {len(choices)} rates are tried for {wanted}; finish --search")
    best = float(max(found, key=lambda line: float(line["value"]))["case"]["rate"]) if found else choices[0]
    rate = rate_with(cell, best, tried, len(found))
    if others := {line["learning_rate"] for line in found if "learning_rate" in line} - {rate.adam}:
        raise SearchUnfinished(f"{wanted} was tried at {others}, but its rate is {rate.adam} now; search it again")
    return rate


def rate_with(cell: Cell, chosen: float, tried: Sequence[Mapping[str, Any]], number: int = 0) -> Rate:
    """Return the rate of a cell for which `chosen`, one of `choices_of`, was chosen among `number` values."""
    if cell.epsilon is None and cell.server == "fedavg":
        return Rate(chosen, tried=number)
    plain = rate_of(replace(cell, epsilon=None, server="fedavg"), tried)
    searched = Rate(plain.adam, tried=number, rates_tried=plain.tried)
    return replace(searched, momentum=chosen) if cell.epsilon is None else replace(searched, bound=chosen)


class SearchUnfinished(Exception):
    """The search is incomplete. A choice now would be final, because measured cells are not measured again."""


def choices_of(cell: Cell) -> tuple[float, ...]:
    """Return the values that `--search` tries. A cloze starts on a plateau, which small rates do not leave."""
    if cell.epsilon is not None:
        return BOUNDS
    if cell.server != "fedavg":
        return MOMENTA
    rates = RATES[cell.method]
    return tuple(rate for rate in rates if rate >= _MIN_OF_CLOZE) if _is_plain_cloze(cell) else rates


def _is_plain_cloze(cell: Cell) -> bool:
    return cell.task == "cloze" and cell.method in ("prompt-tuning", "centralised")


def searched_as(cell: Cell) -> Cell:
    """Return the cell whose search decides: equal members, 40 steps, and 20 tokens or none.

    A bound is searched for each epsilon.
    """
    tokens = None if cell.tokens is None else 20
    return replace(cell, partition="pooled" if cell.partition == "pooled" else "equal", tokens=tokens, steps=40)
