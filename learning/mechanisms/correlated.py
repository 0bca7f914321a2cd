"""The steps of a dp-sgd job whose noise is correlated: which examples a step may draw, and which noise it adds.

`learning.mechanisms.banded` has the matrix C. What holds here, for the job as a whole:

- **Separation.** An example belongs to one of b classes for the whole job, by a keyed digest of itself alone. Step t
  draws from class t mod b only, each example with the job's rate. So two draws of an example are at least b steps
  apart, whatever happens to the data between them.
- **Fresh noise.** z_t comes from the system's source when step t is taken. Nothing on the disk determines it, so no
  copy of a home can add it again.
- **A short memory.** Only the last b - 1 rows of noise are held, since nothing older is needed.

Claim. Let the job take the steps 0 to T - 1, each at most once, with clipped gradients of norm at most 1 (in units of
the clip) and z of standard deviation sigma. Then all noisy steps together, and so everything that is computed from
them, have at most the privacy loss of K = ceil(T / b) Poisson-sampled Gaussians of this rate and multiplier sigma. This
holds if each step's weights are chosen by what was released before, and if other releases from the same data come in
between. At rate 1 it is one Gaussian at sensitivity sqrt(K).

Proof. Fix everything about the other examples, with their coins, and let x be the example that one data set lacks. It
can be drawn only in the steps p of its class. Multiplying the released rows by C (known, lower triangular, invertible)
gives rows C g + z, where a draw of x in step p adds c_(s - p) g_p(x) to the rows s = p to p + b - 1 and to no other.
The rows of two such steps do not meet. So let a stronger mechanism release, when step p begins, the whole block B_p
(c_0, ..., c_(b-1)) g_p(x) + (z_p, ..., z_(p+b-1)), with B_p the coin. g_p(x) depends on earlier releases alone, and the
block is a Poisson-sampled Gaussian of sensitivity |c| |g_p(x)| <= 1: an ordinary release, at one moment. Each later row
is computed from the block, from what was released, and from what is fixed: post-processing. There are at most K such p,
and they are chosen as the steps come, like the equal steps of `learning.accounting.gate`. So its theorem covers them,
interleaved with other releases or not. A step that is skipped draws nothing and releases nothing: its row is dropped,
which is post-processing too. (Denisov et al. 2022, Theorem 2.1, for adaptivity; Choquette-Choo et al. 2023, Theorem 4,
for sampling.) QED.

What the claim needs besides the assumptions of dp-sgd: no step is taken twice with the same rows before it
(`edge_client.ledger.noise` sees to that), and the rows on the disk stay on the machine: who reads them can take the
last b - 1 noises off.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learning.mechanisms.noise import add_gaussian, draw_poisson
from secure_agg import RandomSource
from tacit.mechanism import DpSgd

__all__ = ["CorrelatedSteps", "check_correlated", "classes_of", "drawing"]

_BLOCK = 1 << 15


@dataclass
class CorrelatedSteps:
    """A job's steps on one member's machine. Taking a step changes the object; `copy` before, to take it back.

    Args:
        coefficients: (b,) the matrix's first column, as the job states it. b is at least 2.
        multiplier: sigma, as the ledger was charged.
        rate: The probability with which an example of a step's class is drawn, as the ledger was charged.
        key: Decides the classes: secret, one for each job and data set.
        step: The number of the next step, from 0.
        rows: (b - 1, d) float64, the last rows of noise, in units of its standard deviation: that of step s is row s
            mod (b - 1). Zeros before the first step.
    """

    coefficients: tuple[float, ...]
    multiplier: float
    rate: float
    key: bytes
    step: int
    rows: NDArray[np.float64]

    @classmethod
    def begun(
        cls, coefficients: tuple[float, ...], multiplier: float, rate: float, key: bytes, values: int
    ) -> "CorrelatedSteps":
        """The steps of a job that has taken none.

        Args:
            coefficients, multiplier, rate, key: As above.
            values: d, the values that are trained.
        """
        return cls(coefficients, multiplier, rate, key, 0, np.zeros((len(coefficients) - 1, values)))

    def copy(self) -> "CorrelatedSteps":
        """The same steps, which this object's future leaves as they are."""
        return CorrelatedSteps(
            self.coefficients, self.multiplier, self.rate, self.key, self.step, np.array(self.rows, copy=True)
        )

    @property
    def band(self) -> int:
        """b."""
        return len(self.coefficients)

    def draw(self, classes: NDArray[np.int64], random: RandomSource) -> NDArray[np.int64]:
        """The examples of this step: of its class, each with the rate. Ascending.

        Args:
            classes: (N,) the class of each example (`classes_of`).
            random: The source of the coins.
        """
        eligible = np.flatnonzero(classes == self.step % self.band)
        return eligible[draw_poisson(len(eligible), self.rate, random)]

    def correlate(self, values: NDArray[np.float64], first: int, offset: int = 0) -> None:
        """Turns independent noise into this step's row, in place, and remembers it.

        Args:
            values: Independent noise of standard deviation 1, for some of the row's values.
            first: Place of the first of them, counted from `offset`.
            offset: A place in the row.
        """
        held, here = self.band - 1, slice(offset + first, offset + first + len(values))
        for back in range(1, self.band):
            values -= self.coefficients[back] * self.rows[(self.step - back) % held, here]
        values /= self.coefficients[0]
        self.rows[self.step % held, here] = values

    def taken(self) -> None:
        """Goes on to the next step, once every value of this step's row was made."""
        self.step += 1

    def skip(self, count: int, random: RandomSource) -> None:
        """Goes on by so many steps that draw nothing and release nothing. Their rows are made and remembered."""
        values = self.rows.shape[1]
        for _ in range(count):
            for first in range(0, values, _BLOCK):
                block = np.zeros(min(_BLOCK, values - first))
                add_gaussian(block, 1.0, random)
                self.correlate(block, first)
            self.taken()


def classes_of(
    key: bytes, band: int, ids: NDArray[np.int64], lengths: NDArray[np.int64], labels: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The class of each example, 0 to b - 1, by a keyed digest of its tokens and its label.

    An example's class depends on nothing but itself and the key: on no other example, on no order and on no padding.

    Args:
        key: 32 bytes.
        band: b.
        ids: (N, S) tokens.
        lengths: (N,) tokens of each row that are no padding.
        labels: (N,), or (N, S) targets.

    Returns:
        (N,) int64.
    """
    found = np.empty(len(ids), dtype=np.int64)
    for place, (row, length, label) in enumerate(zip(ids, lengths, labels, strict=True)):
        # A model that writes has a target for each position, and padding has none.
        content = np.append(row[:length], label if label.ndim == 0 else label[:length]).astype("<i8").tobytes()
        digest = hashlib.blake2b(content, key=key, digest_size=8, person=b"tacit/classes/v1").digest()
        # The bias of the remainder is below 2^-57.
        found[place] = int.from_bytes(digest, "little") % band
    return found


def check_correlated(mechanism: DpSgd, correlated: CorrelatedSteps | None, values: int | None = None) -> None:
    """Raises ValueError unless correlated noise, and no other, has steps to go on from, for this very matrix.

    Args:
        mechanism: The job's mechanism.
        correlated: The steps to go on from.
        values: d, the values that are trained, where they are known already.
    """
    found = (1.0,) if correlated is None else correlated.coefficients
    if found != mechanism.coefficients:
        raise ValueError(
            f"the job's noise has {mechanism.band} bands, and the steps to go on from have {len(found)}; a member's "
            "budget makes them (`edge_client.ledger.noise`)"
        )
    if correlated is not None and values not in (None, correlated.rows.shape[1]):
        raise ValueError("the noise has another length than what is trained; the job's document states its values")


def drawing(
    ids: NDArray[np.int64],
    lengths: NDArray[np.int64],
    labels: NDArray[np.int64],
    rate: float,
    correlated: CorrelatedSteps | None,
    random: RandomSource,
) -> Callable[[], NDArray[np.int64]]:
    """A function that draws the examples of the next step: from all, or from the step's class."""
    if correlated is None:
        return lambda: draw_poisson(len(ids), rate, random)
    classes = classes_of(correlated.key, correlated.band, ids, lengths, labels)
    return lambda: correlated.draw(classes, random)
