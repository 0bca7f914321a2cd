"""What an audit found: every test beside its claim, in words and as JSON, and the verdict.

The verdict follows from tests that decide: those whose coins were tossed by this software. It is

- `above-claim` if a lower bound that decides is above its claim;
- `no-claim` if the job has no mechanism, so that there is nothing to be above of;
- `cannot-tell` if no test that decides could have shown a bound above its claim, had all guesses been right;
- `sound` otherwise. A sound audit refutes nothing and proves no privacy: each test says how much it could have found.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from learning.auditing.statistics import Guesses, area_under_curve, one_run_bound, paired_bound, true_positive_rate
from tacit.rounding import apart, rounded_down, rounded_up

__all__ = ["Outcome", "Report", "Verdict", "outcome"]

Verdict = Literal["sound", "above-claim", "cannot-tell", "no-claim"]
_WORDS = {
    "canaries": "canaries",
    "loss": "membership by the loss",
    "rmia": "membership by RMIA",
}


@dataclass(frozen=True)
class Outcome:
    """One test.

    Attributes:
        attack: canaries, loss or rmia.
        on: What the attacker saw: `update` (a rehearsal of this member's own), or `version-N`.
        claim: The epsilon claimed for it; None without a mechanism.
        lower_bound: Epsilon is at least this, at `confidence`.
        possible: The bound if all guesses had been right.
        guesses: What was guessed.
        confidence: Of this test, corrected for all tests.
        auc: The probability that a row that is in scores higher than one that is out.
        found: The share of rows found at a false positive rate of 1 %.
        decides: Whether it counts for the verdict.
        assumes: What its bound assumes besides fair coins; empty if nothing.
    """

    attack: str
    on: str
    claim: float | None
    lower_bound: float
    possible: float
    guesses: Guesses
    confidence: float
    auc: float
    found: float
    decides: bool = True
    assumes: str = ""

    @property
    def above(self) -> bool:
        """Whether the bound refutes the claim."""
        return self.claim is not None and self.lower_bound > self.claim

    @property
    def tells(self) -> bool:
        """Whether this test could have refuted its claim."""
        return self.claim is not None and self.possible > self.claim

    def as_json(self) -> dict[str, Any]:
        """For a machine."""
        return {
            "attack": self.attack,
            "on": self.on,
            "claim": self.claim,
            "lower_bound": rounded_down(self.lower_bound, 5),
            "possible": rounded_down(self.possible, 5),
            "rows": self.guesses.rows,
            "guesses": self.guesses.made,
            "correct": self.guesses.correct,
            "confidence": round(self.confidence, 6),
            "auc": round(self.auc, 4),
            "found_at_1_percent": round(self.found, 4),
            "decides": self.decides,
            "assumes": self.assumes,
        }

    @property
    def sentence(self) -> str:
        """For a person."""
        seen = "this member's update" if self.on == "update" else self.on.replace("-", " ")
        bound, claim = f"{rounded_down(self.lower_bound):g}", "no epsilon is claimed"
        if self.claim is not None:
            bound, claimed = apart(self.lower_bound, self.claim)
            claim = f"claimed {claimed}"
        said = (
            f"{_WORDS[self.attack]}, {seen}: epsilon is at least {bound}, {claim} "
            f"({self.guesses.correct} of {self.guesses.made} guesses right)"
        )
        if self.above:
            return f"{said}: ABOVE THE CLAIM" + ("" if self.decides else f", if {self.assumes}")
        if self.claim is not None and not self.tells:
            said += f"; this test cannot show more than {rounded_up(self.possible):g}"
        return said


def outcome(
    attack: str,
    on: str,
    claim: float | None,
    guesses: Guesses,
    *,
    delta: float,
    confidence: float,
    inside: NDArray[np.float64],
    outside: NDArray[np.float64],
    in_pairs: bool = False,
) -> Outcome:
    """A test, with its bound.

    Args:
        attack, on, claim, guesses, confidence: As in `Outcome`.
        delta: Of the claim.
        inside, outside: The scores of the rows that were in, and of those that were out. They describe the attack,
            whatever it proves.
        in_pairs: Rows of two files were guessed in pairs. Nobody tossed their coins, so the test decides nothing.
            Otherwise rows were in by fair coins.
    """
    bound = paired_bound if in_pairs else one_run_bound
    known = bool(inside.size and outside.size)
    return Outcome(
        attack,
        on,
        claim,
        bound(guesses, delta, confidence),
        bound(Guesses(guesses.rows, guesses.made, guesses.made), delta, confidence),
        guesses,
        confidence,
        area_under_curve(inside, outside) if known else 0.5,
        true_positive_rate(inside, outside, 0.01) if known else 0.0,
        decides=not in_pairs,
        assumes="the rows of both files are random draws from one source" if in_pairs else "",
    )


@dataclass(frozen=True)
class Report:
    """An audit.

    Attributes:
        job: Its name.
        document: SHA-256 of the job document.
        versions: SHA-256 of each version tested, by number.
        delta: Of all claims and bounds.
        confidence: With which all bounds hold together.
        outcomes: The tests.
        missing: Attacks that do not apply, and why.
        reconstruction: What the words of an update reveal; empty if the attack does not apply.
        seconds, memory_mib: What the audit took.
    """

    job: str
    document: bytes
    versions: Mapping[int, bytes]
    delta: float
    confidence: float
    outcomes: Sequence[Outcome]
    missing: Mapping[str, str] = field(default_factory=dict)
    reconstruction: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    memory_mib: int = 0

    @property
    def verdict(self) -> Verdict:
        """What follows."""
        if all(each.claim is None for each in self.outcomes):
            return "no-claim"
        deciding = [each for each in self.outcomes if each.decides]
        if any(each.above for each in deciding):
            return "above-claim"
        return "sound" if any(each.tells for each in deciding) else "cannot-tell"

    @property
    def lower_bound(self) -> float:
        """The largest bound that decides."""
        return max((each.lower_bound for each in self.outcomes if each.decides), default=0.0)

    def as_json(self) -> dict[str, Any]:
        """For a machine."""
        return {
            "schema": 1,
            "job": self.job,
            "document": self.document.hex(),
            "versions": {str(number): digest.hex() for number, digest in self.versions.items()},
            "delta": self.delta,
            "confidence": self.confidence,
            "verdict": self.verdict,
            "lower_bound": rounded_down(self.lower_bound, 5),
            "tests": [each.as_json() for each in self.outcomes],
            "not_applicable": dict(self.missing),
            "reconstruction": dict(self.reconstruction),
            "seconds": round(self.seconds, 1),
            "memory_mib": self.memory_mib,
        }

    def sentences(self) -> list[str]:
        """For a person: each test, what does not apply, and the verdict last."""
        said = [each.sentence for each in self.outcomes]
        if self.reconstruction:
            said.append(str(self.reconstruction["sentence"]))
        said += [
            f"{_WORDS.get(attack, attack)}: does not apply, because it {why}" for attack, why in self.missing.items()
        ]
        said.append(f"{self.seconds:.0f} seconds, {self.memory_mib} MiB of memory")
        last = {
            "sound": self._sound,
            "cannot-tell": self._cannot_tell,
            "no-claim": self._no_claim,
            "above-claim": self._above,
        }
        return [*said, last[self.verdict]()]

    def _sound(self) -> str:
        return (
            f"sound: no lower bound is above its claim, at {self.confidence:.0%} confidence for "
            f"{sum(each.decides for each in self.outcomes)} tests together, delta {self.delta:g}. "
            "This refutes nothing; it proves no privacy."
        )

    def _cannot_tell(self) -> str:
        return (
            "cannot tell: no test could have shown an epsilon above its claim, even with all guesses right. Audit with "
            "more --minutes; a version needs more planted canaries"
        )

    def _no_claim(self) -> str:
        return "no claim: the job adds no noise and promises no differential privacy; the bounds say what leaks"

    def _above(self) -> str:
        return (
            "ABOVE THE CLAIM: a lower bound is above what the job claims. One audit of a sound job says so with a "
            f"probability of at most {1 - self.confidence:.0%}. Stop taking part, audit once more, and tell the "
            "operator."
        )
