"""Trains a linear head on features that were computed before, in numpy: rounds of seconds, whatever the backbone costs.

A member with torch and one without run the same code here. `train_head` runs the plain steps that `learning.training.
local` runs for a whole module. `train_private_head` is DP-SGD (`learning.training.private` has the claim, its
assumptions and what rounding costs) in closed form. With features x, probabilities p and the label's indicator y, an
example's gradient is outer(p - y, x) in the matrix and p - y in the bias. So

    |gradient|^2 = |p - y|^2 (|x|^2 + 1)        exactly, without a backward pass; |p - y|^2 |x|^2 if no bias is trained
    clipped sum  = W^T X, with rows w_b (p_b - y_b) of W and w_b = min(1, clip / |gradient_b|)

Guarantees: an example moves the sum by at most `clip` (L2, matrix and bias together). Sums are float64, and what their
rounding may add is taken from the clip beforehand (`counted_clip`): 2e-9 of it for a thousand examples, 3e-6 for a
hundred thousand. An example whose features or gradient are not finite adds nothing. No example sees another: every row
of the formulas has one example. So there is no module to check on probe texts. Dropout has no part.

Assumption: a row's scores x W^T do not depend on the rows beside it. BLAS computes rows in tiles, and those of a tile
that is not full in another order, which matters where a version's numbers cancel. So no tile is left open (`_scores`);
with several threads, BLAS may cut elsewhere.

If persons are drawn, all this holds for a person in place of an example: its gradient G is the weighted sum of those of
its rows in float64, and G times min(1, clip / |G|) is what it adds, where rounding never lowers |G|. If the noise is
correlated, the draw is from the step's class and the noise is a row of C^-1 z (`learning.mechanisms.correlated`).
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from learning.mechanisms.correlated import CorrelatedSteps, check_correlated, drawing
from learning.mechanisms.noise import noised_on_lattice
from learning.training.outcome import (
    DIVERGED_BEYOND,
    Progress,
    TrainingCancelled,
    TrainingDiverged,
    TrainingResult,
    rates_of,
)
from learning.training.persons import DrawnPersons, Persons
from secure_agg import RandomSource
from tacit.job import Training
from tacit.mechanism import DpSgd

__all__ = [
    "HeadTraining",
    "LinearHead",
    "RowProducts",
    "clipped_sums",
    "clipped_sums_of_persons",
    "make_head_optimiser",
    "train_head",
    "train_private_head",
]

Ids = NDArray[np.int64]
Features = NDArray[np.float32]
Floats = NDArray[np.float64]
T = TypeVar("T", np.float32, np.float64)

# Rows that are held in float64 at a time, and added up by one product.
_BLOCK = 2048
# BLAS computes 2 to 32 rows at a time; the number of rows in a product is a multiple of this.
_TILE = 64
# The part of sum_s |x_s| |g_s| over a person's rows that counts in its norm, squared.
_CANCELLATION = 2.0**-20
# Values of persons' gradients that are held in float64 at a time.
_PERSONS_HELD = 1 << 22
# Products of two rows of a person that are held.
_PAIRS_HELD = 1 << 22
# Bytes of features of which a copy in float64 is held for all steps.
_HELD = 1 << 27


@dataclass(frozen=True, eq=False)
class LinearHead:
    """A head, which training changes in place.

    Attributes:
        weight: (L, width) float32.
        bias: (L,) float32.
        trains_bias: Whether the bias is trained.
    """

    weight: Features
    bias: Features
    trains_bias: bool = True

    def logits(self, features: Features) -> Features:
        """Logits (B, L) of features (B, width), in float32."""
        found: Features = features @ self.weight.T + self.bias
        return found

    @property
    def trained(self) -> tuple[Features, ...]:
        """The arrays that are trained: the matrix, and the bias if it is."""
        return (self.weight, self.bias) if self.trains_bias else (self.weight,)


# ---- optimisers ------------------------------------------------------------------------------------------------


class HeadOptimiser(Protocol):
    """An optimiser over the arrays of a head."""

    def step(self, gradients: Sequence[Features]) -> None:
        """Moves the arrays by a gradient each."""


class _Sgd:
    def __init__(self, arrays: Sequence[Features], recipe: Training) -> None:
        self._arrays, self._rate = arrays, np.float32(recipe.learning_rate)

    def step(self, gradients: Sequence[Features]) -> None:
        for array, gradient in zip(self._arrays, gradients, strict=True):
            np.subtract(array, self._rate * gradient, out=array)


class _Adam:
    """Kingma and Ba 2015, algorithm 1, with the paper's defaults."""

    def __init__(self, arrays: Sequence[Features], recipe: Training) -> None:
        self._arrays, self._rate, self._steps = arrays, recipe.learning_rate, 0
        self._means = [np.zeros_like(each) for each in arrays]
        self._squares = [np.zeros_like(each) for each in arrays]

    def step(self, gradients: Sequence[Features]) -> None:
        self._steps += 1
        first, second = 1 - 0.9**self._steps, 1 - 0.999**self._steps
        for array, gradient, mean, square in zip(self._arrays, gradients, self._means, self._squares, strict=True):
            np.add(mean, np.float32(0.1) * (gradient - mean), out=mean)
            np.add(square, np.float32(0.001) * (gradient * gradient - square), out=square)
            width = np.sqrt(square) / np.float32(math.sqrt(second)) + np.float32(1e-8)
            np.subtract(array, np.float32(self._rate / first) * (mean / width), out=array)


class _AdamW(_Adam):
    """Loshchilov and Hutter 2019, algorithm 2: Adam, whose values each step first multiplies by 1 - rate * decay."""

    def __init__(self, arrays: Sequence[Features], recipe: Training) -> None:
        super().__init__(arrays, recipe)
        self._stays = np.float32(1 - recipe.learning_rate * (recipe.weight_decay or 0.0))

    def step(self, gradients: Sequence[Features]) -> None:
        for array in self._arrays:
            np.multiply(array, self._stays, out=array)
        super().step(gradients)


class _Adafactor:
    """Shazeer and Stern 2018, algorithms 4 and 5, with the job's own rate: no relative step, no scale, no momentum."""

    def __init__(self, arrays: Sequence[Features], recipe: Training) -> None:
        self._arrays, self._rate, self._steps = arrays, recipe.learning_rate, 0
        # Means of the squares over each row and column of a matrix; over nothing for a vector.
        self._rows = [np.zeros(each.shape[:-1] or each.shape, dtype=np.float32) for each in arrays]
        self._columns = [np.zeros(each.shape[1:], dtype=np.float32) for each in arrays]

    def step(self, gradients: Sequence[Features]) -> None:
        self._steps += 1
        decay = np.float32(1.0 - self._steps**-0.8)
        for array, gradient, row, column in zip(self._arrays, gradients, self._rows, self._columns, strict=True):
            squares = gradient * gradient + np.float32(1e-30)
            if array.ndim == 2:
                row[:] = decay * row + (1 - decay) * squares.mean(axis=1)
                column[:] = decay * column + (1 - decay) * squares.mean(axis=0)
                moved = gradient / np.sqrt(row / row.mean())[:, None] / np.sqrt(column)
            else:
                row[:] = decay * row + (1 - decay) * squares
                moved = gradient / np.sqrt(row)
            moved = moved / max(1.0, float(np.sqrt(np.square(moved).mean())))
            np.subtract(array, np.float32(self._rate) * moved, out=array)


_OPTIMISERS: Mapping[str, Callable[[Sequence[Features], Training], HeadOptimiser]] = {
    "sgd": _Sgd,
    "adam": _Adam,
    "adamw": _AdamW,
    "adafactor": _Adafactor,
}


def make_head_optimiser(head: LinearHead, recipe: Training) -> HeadOptimiser:
    """A new optimiser of the recipe over the head's trained arrays."""
    return _OPTIMISERS[recipe.optimiser](head.trained, recipe)


# ---- plain steps -----------------------------------------------------------------------------------------------


def train_head(
    head: LinearHead,
    features: Features,
    labels: Ids,
    recipe: Training,
    *,
    seed: int,
    mu: float = 0.0,
    progress: Callable[[Progress], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> TrainingResult:
    """Trains a head in place, as `learning.training.local.train` trains a whole module.

    Args:
        head: The head.
        features: (N, width).
        labels: (N,) indices into the job's labels.
        recipe: Epochs, batch, optimiser and learning rate. Every epoch goes over all examples once.
        seed: Orders the batches.
        mu: Weight of half the squared distance to where the training began (`fedprox`).
        progress: Called after each step.
        cancelled: Asked before each step.

    Returns:
        The result; its sums are those of the last epoch.

    Raises:
        TrainingCancelled: `cancelled` returned True.
        TrainingDiverged: A loss or weight is not finite, or the last epoch's mean loss exceeds `DIVERGED_BEYOND`.
        ValueError: There are no examples, or features and labels do not fit each other.
    """
    _check(features, labels)
    if not len(features):
        raise ValueError("there are no examples; a member needs at least one to take part")
    began = time.perf_counter()
    shuffle = np.random.Generator(np.random.Philox(seed))
    # The first draw of a seed is for a module's dropout, which a head on features does not have.
    shuffle.integers(2**63)
    anchors = [each.copy() for each in head.trained] if mu else []
    optimiser = make_head_optimiser(head, recipe)
    steps, step = recipe.epochs * math.ceil(len(features) / recipe.batch), 0
    loss_sum, correct = 0.0, 0

    def diverged(what: str) -> TrainingDiverged:
        return TrainingDiverged(
            f"training diverged: {what} at step {step} of {steps}; lower {rates_of(recipe)} in the job"
        )

    for epoch in range(1, recipe.epochs + 1):
        loss_sum, correct = 0.0, 0
        order = shuffle.permutation(len(features))
        for first in range(0, len(order), recipe.batch):
            if cancelled():
                raise TrainingCancelled(f"training was stopped after step {step} of {steps}")
            batch = order[first : first + recipe.batch]
            x, y = features[batch], labels[batch]
            logits = head.logits(x)
            losses, g = _losses(logits, y)
            loss = float(losses.sum())
            correct += int((logits.argmax(axis=1) == y).sum())
            step += 1
            # Checked before the step, which would spread it to the weights.
            if not math.isfinite(loss):
                raise diverged("the loss was not a finite number")
            g /= np.float32(len(batch))
            gradients = [g.T @ x, g.sum(axis=0)][: len(head.trained)]
            if mu:
                pairs = zip(gradients, head.trained, anchors, strict=True)
                gradients = [each + np.float32(mu) * (array - anchor) for each, array, anchor in pairs]
            optimiser.step(gradients)
            loss_sum += loss
            progress(Progress(step, steps, epoch, recipe.epochs, loss / len(batch)))
    if not _finite(head):
        raise diverged("a weight was not a finite number")
    if loss_sum / len(features) > DIVERGED_BEYOND:
        raise diverged(f"the mean loss was {loss_sum / len(features):.3g} nats")
    return TrainingResult(step, loss_sum, correct, len(features), time.perf_counter() - began)


# ---- private steps ---------------------------------------------------------------------------------------------


def train_private_head(
    head: LinearHead,
    features: Features,
    labels: Ids,
    recipe: Training,
    mechanism: DpSgd,
    *,
    random: RandomSource,
    rate: float,
    population: int | None = None,
    persons: Persons | None = None,
    ids: Ids | None = None,
    pad_id: int = 0,
    correlated: CorrelatedSteps | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> TrainingResult:
    """Trains a head in place for `mechanism.steps` steps, on the CPU.

    Args:
        head: The head.
        features: (N, width). Without examples, every step is noise alone.
        labels: (N,) indices into the job's labels.
        recipe: Optimiser and learning rate.
        mechanism: Noise multiplier, clip, lot and steps.
        random: The source of all draws and noise.
        rate: The probability of drawing each example or person, in (0, 1].
        population: N, if not all of the member's examples or persons are here; None: they are.
        persons: Whose rows these are, if persons are drawn and clipped; None: each row stands for itself.
        ids: (N, S) the tokens that the features were computed from, and `pad_id` their padding. They decide an
            example's class where the noise is correlated, and nothing else.
        correlated: As in `train_private`.
        progress: Called after each step, as in `train_private`.
        cancelled: Asked before each step.

    Returns:
        The result, with loss_sum, correct and count zero: metrics have no noise of their own.

    Raises:
        TrainingCancelled: `cancelled` returned True.
        TrainingDiverged: A weight is not finite.
        ValueError: features and labels do not fit each other, or as in `train_private`.
    """
    _check(features, labels)
    check_correlated(mechanism, correlated, sum(each.size for each in head.trained))
    if ids is None and correlated is not None:
        raise ValueError("correlated noise needs the tokens of each example, which decide its class")
    began = time.perf_counter()
    if population is None:
        population = len(features) if persons is None else persons.count
    most = None if mechanism.person is None else mechanism.person.max_examples
    clip = counted_clip(mechanism.clip, population, most)
    unit = clip / mechanism.lot
    std = mechanism.noise_multiplier * mechanism.clip / mechanism.lot
    optimiser = make_head_optimiser(head, recipe)
    # Widened once, if there is room, and not in every step.
    held = features.astype(np.float64) if features.nbytes <= _HELD else None
    table: NDArray[np.float32 | np.float64] = features if held is None else held
    lengths, products = None, None
    if held is not None and persons is None:
        lengths = np.einsum("bw,bw->b", held, held)
    elif persons is not None:
        products = RowProducts.of(table, persons, trains_bias=head.trains_bias)
    tokens = np.zeros((len(features), 0), dtype=np.int64) if ids is None else ids
    draw = drawing(tokens, (tokens != pad_id).sum(axis=1), labels, rate, correlated, random)
    for step in range(1, mechanism.steps + 1):
        if cancelled():
            raise TrainingCancelled(f"training was stopped after step {step - 1} of {mechanism.steps}")
        if persons is None:
            drawn = draw()
            *sums, loss_sum = clipped_sums(head, table, labels, drawn, clip, lengths)
        else:
            found = persons.draw(rate, random)
            drawn = found.rows
            *sums, loss_sum = clipped_sums_of_persons(head, table, labels, found, clip, products)
        # The sums are in units of `clip`.
        optimiser.step(_noised(sums[: len(head.trained)], unit, std, random, correlated))
        mean = loss_sum / len(drawn) if len(drawn) else math.nan
        if len(drawn) and not math.isfinite(mean):
            mean = math.inf
        progress(Progress(step, mechanism.steps, 1, 1, mean))
    if not _finite(head):
        raise TrainingDiverged(
            f"a weight was not a finite number after {mechanism.steps} steps; lower {rates_of(recipe)} or raise "
            f"the mechanism's lot ({mechanism.lot}) in the job"
        )
    return TrainingResult(mechanism.steps, 0.0, 0, 0, time.perf_counter() - began)


def counted_clip(clip: float, units: int, rows: int | None = None) -> float:
    """The clip for which the sensitivity of the sums, as float64 makes them, is at most `clip`.

    A sum of n terms in float64 is off by at most n 2^-53 times the sum of the terms' sizes, in any order (Higham 2002,
    section 3.1). A coordinate is added up in blocks of 2,048 rows, and then block by block. Each unit's terms have
    together at most one clip as their norm, or 2^10 where the rows of a person are added apart. So the sums of two
    neighbours are each within `units` clips times the longest chain times 2^-53 of what real numbers give, whatever
    the data are. 2^-30 is for the norm and the one product of each row.

    Args:
        clip: The mechanism's clip.
        units: N, the most examples or persons in a draw.
        rows: The most rows of a person in a draw; None: each row stands for itself.
    """
    apart, rows = (1.0, 1) if rows is None else (_CANCELLATION**-0.5, rows)
    chain = max(apart * (_BLOCK + units * rows / _BLOCK + 8), _BLOCK + units + 8)
    # Twice, for two neighbours; a tenth more for second-order terms.
    return clip / (1 + 2.0**-30 + 1.1 * 2.0**-52 * (units + 1) * chain)


def clipped_sums(
    head: LinearHead,
    features: NDArray[np.float32 | np.float64],
    labels: Ids,
    drawn: Ids,
    clip: float,
    lengths: Floats | None = None,
) -> tuple[Floats, Floats, float]:
    """The sums of the drawn examples' clipped gradients, in units of the clip.

    Args:
        head: The head.
        features: (N, width).
        labels: (N,) indices into the job's labels.
        drawn: Places of the drawn examples, ascending and each once.
        clip: The largest L2 norm of an example's gradient.
        lengths: (N,) The squared norms of the features, where they are kept; None: they are computed.

    Returns:
        The matrix's sum (labels, width) and the bias's (labels,), float64, and the sum of the losses. The bias's means
        nothing if it is not trained.
    """
    matrix, bias = head.weight.astype(np.float64), head.bias.astype(np.float64)
    weight_sum, bias_sum, loss_sum = np.zeros_like(matrix), np.zeros_like(bias), 0.0
    for first in range(0, len(drawn), _BLOCK):
        # A slice is no copy; full batches draw every row, in order.
        part = slice(first, first + _BLOCK)
        rows = part if len(drawn) == len(features) else drawn[part]
        x, y = features[rows].astype(np.float64, copy=False), labels[rows]
        # What is not finite is left out below, without a word on the way.
        with np.errstate(invalid="ignore", over="ignore"):
            losses, g = _losses(_scores(x, matrix, bias), y)
            lengths_of_x = np.einsum("bw,bw->b", x, x) if lengths is None else lengths[rows]
            squared = np.einsum("bl,bl->b", g, g) * (lengths_of_x + float(head.trains_bias))
        counts = np.isfinite(squared)
        if not counts.all():
            # Left out instead of multiplied by zero, which would not make them finite.
            g, x, squared = g[counts], x[counts], squared[counts]
        g *= (clip_factors(squared, clip) / clip)[:, None]
        weight_sum += g.T @ x
        bias_sum += g.sum(axis=0)
        loss_sum += float(losses.sum())
    return weight_sum, bias_sum, loss_sum


def clipped_sums_of_persons(
    head: LinearHead,
    features: NDArray[np.float32 | np.float64],
    labels: Ids,
    drawn: DrawnPersons,
    clip: float,
    products: "RowProducts | None" = None,
) -> tuple[Floats, Floats, float]:
    """The sums of the drawn persons' clipped gradients, in units of the clip: as `clipped_sums`, for persons.

    A person whose gradient is not finite adds nothing. How a person's is computed follows from its own rows and public
    numbers: two ways clip it to slightly different lengths, so others must not decide which.

    Args:
        head, features, labels, drawn, clip: As in `clipped_sums`.
        products: Of the features of some persons, where they are kept. Then no gradient of theirs is made.
    """
    if products is None:
        return _sums_by_gradients(head, features, labels, drawn, clip)
    kept = products.covered[drawn.rows]
    some, rest, other = _sums_by_products(head, features, labels, drawn.only(kept), clip, products)
    if kept.all():
        return some, rest, other
    weights, biases, losses = _sums_by_gradients(head, features, labels, drawn.only(~kept), clip)
    return some + weights, rest + biases, other + losses


def _sums_by_gradients(
    head: LinearHead, features: NDArray[np.float32 | np.float64], labels: Ids, drawn: DrawnPersons, clip: float
) -> tuple[Floats, Floats, float]:
    """`clipped_sums_of_persons` by the gradient of each person."""
    matrix, bias = head.weight.astype(np.float64), head.bias.astype(np.float64)
    weight_sum, bias_sum, loss_sum = np.zeros_like(matrix), np.zeros_like(bias), 0.0
    for part in drawn.pieces(max(1, min(_BLOCK, _PERSONS_HELD // matrix.size))):
        x, y = features[part.rows].astype(np.float64, copy=False), labels[part.rows]
        # What is not finite is left out below, without a word on the way.
        with np.errstate(invalid="ignore", over="ignore"):
            losses, g = _losses(_scores(x, matrix, bias), y)
            g *= part.weights[:, None]
            # Side by side, (P, m, ...), so that one call makes the gradients of all persons. All have m rows.
            counts = np.bincount(part.person)
            place = np.arange(len(y)) - (np.cumsum(counts) - counts)[part.person]
            sides = len(counts), int(counts.max())
            of_x, of_g = np.zeros((*sides, x.shape[1])), np.zeros((*sides, g.shape[1]))
            of_x[part.person, place], of_g[part.person, place] = x, g
            gradients, biases = of_g.transpose(0, 2, 1) @ of_x, of_g.sum(axis=1)
            squared = np.einsum("plw,plw->p", gradients, gradients)
            if head.trains_bias:
                squared += np.einsum("pl,pl->p", biases, biases)
        counted = np.isfinite(squared)
        if not counted.all():
            # Left out instead of multiplied by zero, as above.
            gradients, biases, squared = gradients[counted], biases[counted], squared[counted]
        factors = clip_factors(squared, clip) / clip
        weight_sum += np.tensordot(factors, gradients, axes=1)
        bias_sum += factors @ biases
        loss_sum += float(losses.sum())
    return weight_sum, bias_sum, loss_sum


@dataclass(frozen=True, eq=False)
class RowProducts:
    """The products x_s . x_t of the features of each two rows of a person, which no step changes.

    Attributes:
        first, second: (Q,) The rows s <= t.
        values: (Q,) x_s . x_t, and twice that for two different rows.
        covered: (N,) Whose rows have all their products here.
    """

    first: Ids
    second: Ids
    values: Floats
    covered: NDArray[np.bool_]

    @classmethod
    def of(
        cls, features: NDArray[np.float32 | np.float64], persons: Persons, *, trains_bias: bool
    ) -> "RowProducts | None":
        """The products of the rows of `Persons.all_rows`, or None if that has nobody. With a bias, each x has a further
        1.
        """
        pairs = [
            (own[at[0]], own[at[1]]) for own in persons.all_rows(_PAIRS_HELD) for at in (np.triu_indices(len(own)),)
        ]
        if not pairs:
            return None
        first, second = (np.concatenate(each) for each in zip(*pairs, strict=True))
        values = np.empty(len(first))
        for start in range(0, len(first), _BLOCK):
            part = slice(start, start + _BLOCK)
            with np.errstate(invalid="ignore", over="ignore"):
                one, other = (features[each[part]].astype(np.float64, copy=False) for each in (first, second))
                values[part] = np.einsum("qw,qw->q", one, other)
        values += float(trains_bias)
        covered = np.zeros(len(features), dtype=np.bool_)
        covered[first] = True
        return cls(first, second, np.where(first == second, 1.0, 2.0) * values, covered)


def _sums_by_products(
    head: LinearHead,
    features: NDArray[np.float32 | np.float64],
    labels: Ids,
    drawn: DrawnPersons,
    clip: float,
    products: RowProducts,
) -> tuple[Floats, Floats, float]:
    """`clipped_sums_of_persons` by |sum_s outer(g_s, x_s)|^2 = sum_st (g_s . g_t) (x_s . x_t) over a person's rows."""
    matrix, bias = head.weight.astype(np.float64), head.bias.astype(np.float64)
    rows, person, weights = drawn.rows, drawn.person, drawn.weights
    if len(rows) == len(features):
        # All rows in their order, which need no copy.
        order = np.argsort(rows)
        rows, person, weights = rows[order], person[order], weights[order]
    blocks = [slice(first, first + _BLOCK) for first in range(0, len(rows), _BLOCK)]

    def held(part: slice) -> Floats:
        return features[part if len(rows) == len(features) else rows[part]].astype(np.float64, copy=False)

    g, losses = np.zeros((len(rows), len(bias))), np.zeros(len(rows))
    with np.errstate(invalid="ignore", over="ignore"):
        for part in blocks:
            losses[part], g[part] = _losses(_scores(held(part), matrix, bias), labels[rows[part]])
        g *= weights[:, None]
        place = np.full(len(features), -1, dtype=np.int64)
        place[rows] = np.arange(len(rows))
        both = (place[products.first] >= 0) & (place[products.second] >= 0)
        s, t, values = place[products.first[both]], place[products.second[both]], products.values[both]
        terms = np.einsum("ql,ql->q", g[s], g[t]) * values
        # Of nobody's rows, numpy counts in whole numbers.
        squared = np.bincount(person[s], weights=terms, minlength=drawn.persons).astype(np.float64)
        # Rows may cancel, and rounding does not: it is below a unit for each sum and product of a term (Higham 2002,
        # section 3.1), whose parts are at most the product of two rows' norms. What may have cancelled is bounded too,
        # so that the rows that a person adds are never much longer than their sum (`counted_clip`).
        lengths = np.sqrt(np.maximum(terms[s == t], 0.0))
        apart = np.bincount(person[s[s == t]], weights=lengths, minlength=drawn.persons)
        # A person's own number of rows: nobody is clipped otherwise because of how many another has.
        own = np.bincount(person, minlength=drawn.persons).astype(np.float64)
        squared += (_CANCELLATION + 2.0**-52 * (features.shape[1] + len(bias) + own**2 + 8)) * apart**2
    finite = np.isfinite(squared)
    # Left out instead of multiplied by zero, as above.
    factors = np.where(finite, clip_factors(np.where(finite, squared, 0.0), clip) / clip, 0.0)[person]
    counted = finite[person]
    weight_sum, bias_sum = np.zeros_like(matrix), np.zeros_like(bias)
    for part in blocks:
        x, of_g, kept = held(part), g[part] * factors[part][:, None], counted[part]
        if not kept.all():
            x, of_g = x[kept], of_g[kept]
        weight_sum += of_g.T @ x
        bias_sum += of_g.sum(axis=0)
    return weight_sum, bias_sum, float(losses.sum())


def _noised(
    sums: Sequence[Floats], unit: float, std: float, random: RandomSource, correlated: CorrelatedSteps | None
) -> list[Features]:
    """The step's sums with their noise, which are one row of the job's noise if that is correlated."""
    if correlated is None:
        return [noised_on_lattice(each, unit, std, random) for each in sums]
    made, first = [], 0
    for each in sums:
        made.append(noised_on_lattice(each, unit, std, random, partial(correlated.correlate, offset=first)))
        first += each.size
    correlated.taken()
    return made


def _scores(x: Floats, matrix: Floats, bias: Floats) -> Floats:
    """x W^T + b (B, labels) of x (B, width), each row by the same kernel, however many there are."""
    beyond = -len(x) % _TILE
    filled = np.concatenate([x, np.zeros((beyond, x.shape[1]))]) if beyond else x
    scores: Floats = (filled @ matrix.T)[: len(x)] + bias
    return scores


def clip_factors(squared_norms: Floats, clip: float) -> Floats:
    """min(1, clip / norm) of each example, from squared norms (B,)."""
    factors: Floats = clip / np.maximum(np.sqrt(squared_norms), clip)
    return factors


# ---- what mechanisms run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadTraining:
    """The training of a head on a member's features, as data. Mechanisms run it, as they run a `LocalTraining`.

    Attributes:
        head: The head, which is trained in place.
        features: (U, width) of the usable examples.
        labels: (U,) indices into the job's labels.
        recipe: The job's recipe.
        seed: Orders the batches of plain steps.
        population: N, all of the member's examples. Draws are from all of them.
        usable: (U,) places of the usable examples among all.
        mu: As in `train_head`.
        ids, pad_id: (U, S) the tokens of the usable examples, and their padding, as in `train_private_head`.
        persons: (U,) the person of each, 0 to population - 1, if the mechanism's unit is a person. N counts persons
            then.
        correlated: The job's steps on this machine, if its noise is correlated.
        progress, cancelled: As in `train_head`.
        failed: Called with the error of a training whose update is sent nevertheless. It stays on this machine.
    """

    head: LinearHead
    features: Features
    labels: Ids
    recipe: Training
    seed: int
    population: int
    usable: Ids
    mu: float = 0.0
    ids: Ids | None = None
    pad_id: int = 0
    persons: Ids | None = None
    correlated: CorrelatedSteps | None = None
    progress: Callable[[Progress], None] = lambda _: None
    cancelled: Callable[[], bool] = lambda: False
    failed: Callable[[Exception], None] = lambda _: None

    def rows_of(self, drawn: Ids) -> Ids:
        """The rows of `features` for examples drawn from all N. Drawn examples that are not usable are left out."""
        place = np.full(self.population, -1, dtype=np.int64)
        place[self.usable] = np.arange(len(self.usable))
        rows: Ids = place[drawn]
        return rows[rows >= 0]

    def plain(self, rows: Ids | None = None) -> TrainingResult:
        """Runs plain local steps on these rows, by default on all."""
        here = slice(None) if rows is None else rows
        return train_head(
            self.head,
            self.features[here],
            self.labels[here],
            self.recipe,
            seed=self.seed,
            mu=self.mu,
            progress=self.progress,
            cancelled=self.cancelled,
        )

    def private(self, mechanism: DpSgd, rate: float, persons: Persons | None, random: RandomSource) -> TrainingResult:
        """Runs the steps of DP-SGD, each of which draws an example or person with probability `rate`."""
        return train_private_head(
            self.head,
            self.features,
            self.labels,
            self.recipe,
            mechanism,
            random=random,
            rate=rate,
            population=self.population,
            persons=persons,
            ids=self.ids,
            pad_id=self.pad_id,
            correlated=self.correlated,
            progress=self.progress,
            cancelled=self.cancelled,
        )


def _losses(logits: NDArray[T], labels: Ids) -> tuple[NDArray[T], NDArray[T]]:
    """Cross entropies (B,) and their gradients by the logits (B, L), in the logits' precision."""
    at = np.arange(len(labels))
    shifted = logits - logits.max(axis=1, keepdims=True)
    powers = np.exp(shifted)
    sums = powers.sum(axis=1, keepdims=True)
    losses = np.log(sums[:, 0]) - shifted[at, labels]
    powers /= sums
    powers[at, labels] -= 1
    return losses, powers


def _check(features: Features, labels: Ids) -> None:
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise ValueError(f"expected features (N, width) and labels (N,), got {features.shape} and {labels.shape}")


def _finite(head: LinearHead) -> bool:
    return all(bool(np.isfinite(each).all()) for each in head.trained)
