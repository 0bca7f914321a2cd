"""One cohort of the prototype, honest or lying: the cases that the measurement and the tests share."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.library.stopwatch import Stopwatch
from benchmarks.secure_aggregation.bounds.numbers import with_noise
from benchmarks.secure_aggregation.bounds.projection import combine
from benchmarks.secure_aggregation.bounds.protocol import (
    Answer,
    Challenge,
    Member,
    Verdict,
    Verifier,
    coins_of,
    weights_of,
)
from benchmarks.secure_aggregation.bounds.statement import Statement
from secure_agg.distributed import Grid, encode_distributed
from secure_agg.randomness import RandomSource

__all__ = ["Cohort", "aim_together", "honest_vector", "statement_of"]

Ring = NDArray[np.uint32]

SESSION = b"prototype"

# Changes the answers before the coordinator sees them.
Lie = Callable[["Cohort", Challenge, dict[int, Answer]], None]


def statement_of(grid: Grid, together: int) -> Statement:
    """Returns what the members of a job with this grid prove, in the narrowest ring that holds sums and the test."""
    numbers = with_noise(grid, together)
    return Statement(numbers, max(numbers.bits, grid.bits_needed(grid.members)))


def honest_vector(grid: Grid, bits: int, random: RandomSource) -> Ring:
    """Returns a random vector at the clip, encoded with its share of the noise."""
    words = np.frombuffer(random.bytes(4 * grid.values), dtype="<i4").astype(np.float64)
    return encode_distributed(words * (grid.clip * 0.999999 / np.linalg.norm(words)), grid, bits, random)


@dataclass
class Cohort:
    """A cohort from masks to verdict.

    Args:
        statement: what everybody proves.
        members: in the order of their ranks.
        prover, verifier: processor time of all members, and of the coordinator.
        masked, answers: what the coordinator received.
        checking: the coordinator, once it has answers.
    """

    statement: Statement
    members: Sequence[Member]
    prover: Stopwatch = field(default_factory=Stopwatch)
    verifier: Stopwatch = field(default_factory=Stopwatch)
    masked: Mapping[int, Ring] = field(default_factory=dict)
    answers: Mapping[int, Answer] = field(default_factory=dict)
    checking: Verifier = field(init=False)

    @classmethod
    def of(cls, statement: Statement, vectors: Sequence[Ring], random: RandomSource) -> "Cohort":
        """Returns a cohort with one member for each vector."""
        ranks = range(len(vectors))
        keys = {pair: random.bytes(32) for pair in itertools.combinations(ranks, 2)}
        members = [
            Member(
                rank,
                statement,
                vectors[rank],
                {other: keys[min(rank, other), max(rank, other)] for other in ranks if other != rank},
                random.bytes(32),
                random,
            )
            for rank in ranks
        ]
        return cls(statement, members)

    def run(
        self,
        proved: Mapping[int, Ring] | None = None,
        lie: "Lie | None" = None,
    ) -> Verdict:
        """Runs all phases.

        Args:
            proved: for members that lie, the vector that they prove after they masked their own.
            lie: changes the answers before the coordinator sees them.
        """
        self.masked = {member.rank: member.mask() for member in self.members}
        for rank, vector in (proved or {}).items():
            self.members[rank].vector = vector
        coins = coins_of(SESSION, self.masked)
        with self.prover.running():
            roots = {member.rank: member.commit(coins) for member in self.members}
        seeds = {member.rank: member.seed for member in self.members}
        challenge = Challenge(coins, weights_of(SESSION, seeds, self.statement))
        with self.prover.running():
            answers = {member.rank: member.prove(challenge) for member in self.members}
        if lie is not None:
            lie(self, challenge, answers)
        self.answers = answers
        self.checking = Verifier(self.statement, challenge, self.masked, seeds, roots)
        with self.verifier.running():
            return self.checking.verify(answers)


def aim_together(liar: int, helper: int, sent: Ring, proved: Ring) -> Lie:
    """Returns the lie of two members about the mask between them that lets the first one pass.

    Args:
        liar: masked `sent` and proves `proved`.
        helper: says what the liar needs.
        sent, proved: the vectors.
    """

    def lie(cohort: Cohort, challenge: Challenge, answers: dict[int, Answer]) -> None:
        bits = cohort.statement.bits
        both = combine(challenge.coins, challenge.weights, np.stack([sent, proved]), bits)
        # The coordinator subtracts what the pair says from the lower rank, and adds it to the higher one.
        error = (both[0] - both[1]) * (1 if liar < helper else -1)
        said = (answers[liar].pairs[helper] + error) % (1 << bits)
        for one, other in ((liar, helper), (helper, liar)):
            answers[one] = replace(answers[one], pairs={**answers[one].pairs, other: said})

    return lie
