"""Attacks a prompt with a backdoor, on one sum and on groups.

A prompt and its head over frozen MiniLM are trained on SST-2 without an attacker, once for each seed. Every cell
continues from there for 5 rounds. The malicious members (the last ones) want texts that begin with "cf" to be positive:

    poisoning   all their texts have the trigger and the target label, and they train as honest members do: the paper's
                attack, which the paper finds to fail
    scaling     they train on their texts with and without the trigger, for five times as many steps, and multiply
                their update by n over the number of attackers, so that the mean of one sum becomes their own model;
                the factor is not adapted to groups
    fitted      as scaling, by as much as `reject-outliers` lets through: they know the rule and every honest update of
                the round, but not the groups; added after the figures of scaling were known

Without a defence there is one sum and its mean. A defence is groups, drawn anew in every round, with their median or
what reject-outliers keeps. Each cell is compared with one without an attacker, because a defence may itself cost
accuracy.

Except for `fitted`, everything was fixed in advance, and nothing was searched here. The learning rate is the one that
the search of the quality part chose for such a prompt, on validation rows and without an attacker. `curve` has, for
each round, the accuracy on every fourth test row of the global version, of the first honest member's model after its
local steps, and of the last attacker's. The figures are of the last version on all test rows.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.library.record import Figure, Results, open_results, parser, summarise
from benchmarks.library.simulation import Member, corpora_of, play_round
from benchmarks.prompts.setup import CACHE, backbone_folder, members_of, portions, prompted_bundle, sst2
from benchmarks.prompts.triggers import Backdoor, Fitted, Kept, Probe, Scaled, Scored, poisoned
from learning.mechanisms.protection import Protection
from simulation.virtual_members import SeededRandom
from tacit.job import Aggregation, Precision

if TYPE_CHECKING:
    from export.bundle import JobBundle
    from learning.text.examples import Example

__all__ = ["CELLS", "Cell", "Plan", "main", "measure", "run", "start_of"]


BENCH = "fedprompt_backdoor"
SEEDS = (0, 1, 2)
BACKDOOR = Backdoor("positive")
Attack = Literal["none", "poisoning", "scaling", "fitted"]
_SCALED = ("scaling", "fitted")
Defence = Literal["none", "median", "reject-outliers"]
# The goals: the success of scaling without and with a defence, and the clean accuracy that an attack may cost.
MIN_SUCCESS: Final = 0.8
MAX_SUCCESS: Final = 0.3
MAX_LOST: Final = 0.03

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class Plan:
    """The options of all cells.

    Args:
        steps: local steps in a round, with batches of 16.
        rounds: rounds under attack.
        start: earlier rounds of ten members without an attacker.
        patience: factor of the steps that a scaling attacker makes.
        rows: of each member; None takes all.
        tested: number of test rows; None takes all.
        every: the curve uses every so-many-th test row.
    """

    steps: int = 10
    rounds: int = 5
    start: int = 10
    patience: int = 5
    rows: int | None = None
    tested: int | None = None
    every: int = 4
    tokens: int = 20
    learning_rate: float = 0.01
    precision: Precision = "bfloat16"


QUICK = Plan(steps=1, rounds=1, start=1, patience=2, rows=64, tested=48, every=2)


@dataclass(frozen=True)
class Cell:
    """An attack and a defence."""

    members: int
    malicious: int
    groups: int
    attack: Attack
    defence: Defence

    def case(self, plan: Plan) -> dict[str, Any]:
        """Return the keys of the case in the results."""
        return {
            "method": "prompt-tuning",
            "backbone": "minilm",
            "partition": "equal",
            "tokens": plan.tokens,
            "members": self.members,
            "malicious": self.malicious,
            "attack": self.attack,
            "defence": self.defence,
            "groups": 1 if self.defence == "none" else self.groups,
        }

    def aggregation(self) -> Aggregation:
        """Return the benchmark's common aggregation options, with the groups."""
        # Adam's steps leave no coordinate near the bound. The attackers are few enough for a secure sum of three.
        plain = Aggregation(coordinate_bound=64.0, max_weight=65_536, assumed_corrupt=1)
        if self.defence == "none":
            return plain
        return Aggregation.model_validate({**plain.model_dump(), "groups": self.groups, "combine": self.defence})

    def target(self) -> dict[str, Any]:
        """Return the goal for the attack's success; none if nobody scales."""
        if self.attack not in _SCALED:
            return {}
        if self.defence == "none":
            return {"target": MIN_SUCCESS, "target_is": "at least"}
        return {"target": MAX_SUCCESS, "target_is": "at most"}


def _cells() -> tuple[Cell, ...]:
    """Return all cells, the main attack first, each beside the cell that it is compared with."""
    found, sizes = [], ((10, 1, 3), (30, 3, 10))
    for members, malicious, groups in sizes:
        attacks: tuple[Attack, ...] = ("none", "scaling", "poisoning")
        found += [
            Cell(members, malicious, groups, attack, defence) for attack in attacks for defence in ("none", "median")
        ]
    attacks = ("none", "scaling", "fitted", "poisoning")
    return (*found, *(Cell(*size, attack, "reject-outliers") for size in sizes for attack in attacks))


CELLS: tuple[Cell, ...] = _cells()


def run(results: Results, *, seeds: Sequence[int], quick: bool, until: float | None) -> None:
    """Measure the cells that are not in the results yet. until: latest start of a cell, by `time.monotonic()`."""
    plan = QUICK if quick else Plan()
    cells = [cell for cell in CELLS if cell.members == 10 and cell.attack == "scaling"][:2] if quick else CELLS
    starts: dict[int, Vector] = {}
    for cell in cells:
        for seed in seeds[:1] if quick else seeds:
            case = cell.case(plan)
            if results.done(case, seed):
                continue
            if until is not None and time.monotonic() >= until:
                print("out of time: the next run measures the other cells of the backdoor", flush=True)
                return
            results.open(seeds)
            if seed not in starts:
                starts[seed] = start_of(plan, seed, results.code, keep=not quick)
            began = time.monotonic()
            figures = measure(cell, plan, seed, starts[seed], _control(results, cell, plan, seed))
            seconds = {"seconds": round(time.monotonic() - began, 1)}
            results.add(case, [replace(each, more={**each.more, **seconds}) for each in figures], seed=seed)
        summarise(results, cell.case(plan), SEEDS, keep=("target_is",), averaged=("target", "mistaken", "control"))


def _control(results: Results, cell: Cell, plan: Plan, seed: int) -> float | None:
    """Return the clean accuracy of the same training without an attacker, if it was measured."""
    lines = results.done(replace(cell, attack="none").case(plan), seed)
    return next((line["value"] for line in lines if line["figure"] == "clean_accuracy"), None)


# ---- one cell --------------------------------------------------------------------------------------------------------


def start_of(plan: Plan, seed: int, code: str, *, keep: bool = True, cache: Path = CACHE) -> Vector:
    """Return the prompt and head that every cell of this seed starts from, (d,), by ten honest members in one sum.

    Args:
        keep: keep a file under `cache` for this code and plan, so that no cell trains it again.
    """
    path = cache / f"backdoor-start-{code}-{plan.steps}-{plan.start}-{plan.precision}-{seed}.npy"
    if keep and path.exists():
        loaded: Vector = np.load(path, allow_pickle=False)
        return loaded
    honest = Cell(10, 0, 3, "none", "none")
    bundle = _bundle(honest, plan, seed)
    held = _held(honest, plan, seed)
    members = [Member(rows) for rows in held]
    corpora, random = corpora_of(bundle, members), SeededRandom(f"start/{seed}")
    values = bundle.manifest.decode(bundle.weights)
    for number in range(1, plan.start + 1):
        values = play_round(bundle, values, members, portions(corpora, number, plan.steps, seed), number, random).values
    if keep:
        fresh = path.with_suffix(".new.npy")
        np.save(fresh, values)
        fresh.replace(path)
    return values


def measure(cell: Cell, plan: Plan, seed: int, start: Vector, control: float | None) -> list[Figure]:
    """Measure a cell. start: the version to start from, (d,). control: clean accuracy without an attacker."""
    bundle, held, test = _bundle(cell, plan, seed), _held(cell, plan, seed), sst2(seed).test[: plan.tested]
    liars = range(cell.members - cell.malicious, cell.members) if cell.attack != "none" else range(0)
    machines: dict[int, Kept] = {}

    def software(place: int, protection: Protection) -> Protection:
        # It claims its honest weight, although it trains on more rows.
        says, number = len(held[place]), cell.malicious
        match cell.attack if place in liars else "none":
            case "scaling":
                machines[place] = Scaled(protection, factor=cell.members / number, says=says)
            case "fitted":
                machines[place] = Fitted(protection, says=says, honest=honest_changes, liars=number, seed=seed)
            case _:
                machines[place] = Kept(protection)
        return machines[place]

    def honest_changes() -> list[Vector]:
        # Attackers come last, so all other members have trained.
        return [_change(machines[place]) for place in range(cell.members) if place not in liars]

    members = []
    for place, rows in enumerate(held):
        own = rows
        if place in liars:
            with_trigger = poisoned(rows, BACKDOOR)
            own = with_trigger if cell.attack == "poisoning" else [*rows, *with_trigger]
        members.append(Member(own, software=partial(software, place)))
    corpora, random = corpora_of(bundle, members), SeededRandom(f"{cell}/{seed}")
    probe, values = Probe(bundle, test[:: plan.every], BACKDOOR), start
    curve = [{"round": 0, "global": _rounded(probe.score(start))}]
    # Members continue after the rows that the start has used.
    for number in range(plan.start + 1, plan.start + plan.rounds + 1):
        now = portions(corpora, number, plan.steps, seed)
        if cell.attack in _SCALED:
            patient = portions(corpora, number, plan.patience * plan.steps, seed)
            now = [patient[place] if place in liars else each for place, each in enumerate(now)]
        base, played = values, play_round(bundle, values, members, now, number, random)
        values = played.values
        seen = {"global": values, "benign": _own(base, machines[0])}
        if liars:
            seen["malicious"] = _own(base, machines[liars[-1]])
        curve.append({"round": number - plan.start, **{who: _rounded(probe.score(each)) for who, each in seen.items()}})
    last = Probe(bundle, test, BACKDOOR).score(values)
    more: dict[str, Any] = {"steps": plan.steps, "rounds": plan.rounds, "precision": plan.precision, "curve": curve}
    lost: dict[str, Any] = {}
    if control is not None and cell.attack != "none":
        lost = {"control": control, "target": round(control - MAX_LOST, 5), "target_is": "at least"}
    return [
        Figure("clean_accuracy", round(last.accuracy, 5), more={**lost, **more}),
        Figure("attack_success", round(last.success, 5), more={"mistaken": round(last.mistaken, 5), **cell.target()}),
    ]


def _bundle(cell: Cell, plan: Plan, seed: int) -> "JobBundle":
    return prompted_bundle(
        backbone_folder("plain"),
        task="classification",
        tokens=plan.tokens,
        steps=plan.steps,
        rounds=plan.start + plan.rounds,
        learning_rate=plan.learning_rate,
        precision=plan.precision,
        aggregation=cell.aggregation(),
        members=cell.members,
        seed=seed,
    )


def _held(cell: Cell, plan: Plan, seed: int) -> "list[list[Example]]":
    return [rows[: plan.rows] for rows in members_of(cell.members, "equal", seed)]


def _own(base: Vector, machine: Kept) -> Vector:
    """Return a member's own model: its version plus its update as trained."""
    return base + _change(machine)


def _change(machine: Kept) -> Vector:
    if machine.change is None:
        raise ValueError("the member has not trained yet")
    return machine.change


def _rounded(scored: Scored) -> list[float]:
    """Return [accuracy, success, mistaken], rounded."""
    return [round(each, 4) for each in (scored.accuracy, scored.success, scored.mistaken)]


def main(words: Sequence[str] | None = None) -> None:
    """Command line. words: arguments without the program's name."""
    options = parser("prompts.backdoor")
    options.add_argument("--seeds", type=int, nargs="+", default=[0], choices=SEEDS)
    options.add_argument("--minutes", type=float, help="start no cell after this many minutes")
    chosen = options.parse_args(words)
    until = None if chosen.minutes is None else time.monotonic() + 60 * chosen.minutes
    run(open_results(BENCH, quick=chosen.quick), seeds=chosen.seeds, quick=chosen.quick, until=until)


if __name__ == "__main__":
    main()
