"""Attacks each mechanism and proves a lower bound on epsilon.

The claim has to stay above the bound, or one of the two is wrong. To show that the audit would notice, it is repeated
with the noise silently turned off and with clipping silently broken: then the bound must rise above the claim.

**What the adversary has.** Everything but the coins: it chose the architecture, the starting weights, the recipe and
all data, knows every example but one, and sees the change that leaves the member, before it is rounded into the ring
(of `distributed-gaussian`, the member's own vector without its masks, so that the claim is the one for h = 1). It does
not see the steps between. This is more than any coordinator sees, and as much as differential privacy is a promise
about: a weak adversary would prove nothing. What runs is the member's own code (`learning.mechanisms.protection`), with
its real sampling, clipping, noise and accounting; only the model is the audit's: one weight for each word and a fixed
head, so that an example's gradient is one coordinate (a Dirac canary; Nasr et al. 2023, "Tight auditing of
differentially private machine learning").

**Audit `canary`.** Many trainings with the canary and as many with an empty text in its place, whose gradient is zero.
The statistic is the change of the canary's coordinate, the test a threshold fixed by trainings of their own. From the
two error rates (Clopper and Pearson 1934, jointly at 95 %) follow two bounds:

- `rates`: epsilon >= ln((true positive rate - delta) / false positive rate), or the same with the roles changed; it
  assumes nothing, and cannot pass ln(runs), nor come near a Gaussian's epsilon, which lies in tails nobody samples;
- `gaussian`: the mechanism is not mu-Gaussian-DP for any mu below Phi^-1(1 - FPR) - Phi^-1(FNR) (Dong, Roth, Su 2022).
  The claims of Gaussian mechanisms on all of the data are such mu in other words, so this refutes them directly; its
  epsilon is that of this mu at the same delta. (Of `distributed-gaussian` the claim is a Renyi bound and slightly more
  than a Gaussian's.)

`epsilon_lower_bound` is the second where the claim is a Gaussian's, else the first; both stand beside it.

**Audit `one-run`.** Thousands of canaries, each there or not by a fair coin, in a single training with Poisson draws of
half of the data; the adversary guesses for those it is surest of (Steinke, Nasr, Jagielski 2023, Theorem 5.2: right for
any (epsilon, delta)-DP mechanism, at 95 %; how many it guesses was fixed by another training).

**What is broken.** noise: every sampler adds nothing. clipping: for dp-sgd, the batch is clipped as if it were one
example, as happens where a parameter is broadcast over it (and the check that refuses such a module is taken out, or it
would refuse); for the others, the change is not clipped at all. unclipped, for dp-sgd: no gradient is clipped, as
happens where a parameter is forgotten; that one is seen without assuming anything. The ring refuses a vector longer
than the clip, so that `distributed-gaussian` cannot be broken in that way without a word.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from benchmarks.library.record import Figure, open_results, parser

__all__ = [
    "epsilon_of_gaussian",
    "gaussian_bound",
    "one_run_bound",
    "rates_bound",
    "upper_rate",
]

BENCH = "privacy_audit"

DELTA = 1e-5
CONFIDENCE = 0.95
RUNS, PILOT_RUNS = 2_000, 300
# With many more, 2 m delta would be all of the confidence that there is.
CANARIES = 10_000
SEED = 0

PAD, WORD = 0, 1
# The fixed head: any example that is not yet perfectly sure has a gradient far longer than the clip.
GAIN = 100.0
# Where the others of the data set are nearly sure of their label (probability 0.95), and the canary is wrong.
SURE = -math.log(19) / GAIN

Broken = Literal["none", "noise", "clipping", "unclipped"]
Values = NDArray[np.float64]


# ---- statistics --------------------------------------------------------------------------------------------


def upper_rate(count: int, of: int, confidence: float) -> float:
    """The largest probability that `count` events in `of` trials do not refute; one-sided (Clopper, Pearson 1934)."""
    from scipy import stats

    return 1.0 if count >= of else float(stats.beta.ppf(confidence, count + 1, of - count))


def _rates(false_positives: int, false_negatives: int, runs: int, confidence: float) -> tuple[float, float]:
    """Upper bounds of both rates, together at `confidence`."""
    each = 1 - (1 - confidence) / 2
    return upper_rate(false_positives, runs, each), upper_rate(false_negatives, runs, each)


def rates_bound(false_positives: int, false_negatives: int, runs: int, delta: float, confidence: float) -> float:
    """A lower bound on epsilon of any (epsilon, delta)-DP mechanism from a test's errors, `runs` trials a side."""
    fpr, fnr = _rates(false_positives, false_negatives, runs, confidence)
    found = [math.log((1 - delta - b) / a) for a, b in ((fpr, fnr), (fnr, fpr)) if b < 1 - delta]
    return max(0.0, *found) if found else 0.0


def gaussian_bound(false_positives: int, false_negatives: int, runs: int, delta: float, confidence: float) -> float:
    """A lower bound on the epsilon of a mechanism that claims to be Gaussian, from a test's errors, as above."""
    from scipy import stats

    fpr, fnr = _rates(false_positives, false_negatives, runs, confidence)
    return epsilon_of_gaussian(max(0.0, float(stats.norm.isf(fpr) - stats.norm.ppf(fnr))), delta)


def epsilon_of_gaussian(mu: float, delta: float) -> float:
    """The smallest epsilon of a mu-Gaussian-DP mechanism at delta (Dong, Roth, Su 2022, Corollary 2.13)."""
    from scipy import optimize, stats

    def excess(epsilon: float) -> float:
        # The second term in logarithms: e^epsilon alone overflows.
        rest = math.exp(epsilon + float(stats.norm.logcdf(-epsilon / mu - mu / 2)))
        return float(stats.norm.cdf(-epsilon / mu + mu / 2)) - rest - delta

    if mu <= 0 or excess(0.0) <= 0:
        return 0.0
    return float(optimize.brentq(excess, 0.0, mu * mu / 2 + 10 * mu + 10))


def one_run_bound(examples: int, guesses: int, correct: int, delta: float, confidence: float) -> float:
    """A lower bound on epsilon from one training (Steinke, Nasr, Jagielski 2023, Theorem 5.2).

    examples: m canaries, each there with probability 1/2; guesses: r of them guessed at; correct: v of these rightly.
    """
    from scipy import optimize, stats

    def excess(epsilon: float) -> float:
        """The probability that an (epsilon, delta)-DP mechanism lets so many be right, at most, above what is left."""
        right = 1 / (1 + math.exp(-epsilon))
        base = float(stats.binom.sf(correct - 1, guesses, right))
        # P[v > Binomial >= v - i] for i = 1 ... v.
        near = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, right))
        slope = float((near / np.arange(1, correct + 1)).max()) if correct else 0.0
        return base + 2 * examples * delta * slope - (1 - confidence)

    if excess(0.0) >= 0:
        return 0.0
    most = 60.0
    return most if excess(most) < 0 else float(optimize.brentq(excess, 0.0, most))


# ---- the mechanisms ----------------------------------------------------------------------------------------


class Repeatable:
    """A random source that gives the same figures again: SHAKE-256 of a seed and a counter."""

    def __init__(self, seed: str) -> None:
        self._seed, self._calls = seed, 0

    def bytes(self, n: int, /) -> bytes:
        """As `secure_agg.RandomSource`."""
        self._calls += 1
        return hashlib.shake_256(f"{self._seed}/{self._calls}".encode()).digest(n)


def words_model(words: int, start: float) -> Any:
    """A classifier of two labels with one trained weight for each word: logits (0, GAIN * sum of a text's weights)."""
    import torch

    from learning.models.classifier import Dropout, TextClassifier

    class Words(TextClassifier):
        def __init__(self) -> None:
            super().__init__()
            self.pad_id, self.min_tokens, self.dropout = PAD, 1, Dropout(0.0)
            table = torch.full((words + 1, 1), start)
            table[PAD] = 0
            self.embedding = torch.nn.Embedding(words + 1, 1, padding_idx=PAD, _weight=table)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            score = GAIN * self.embedding(ids).sum(dim=1)
            return torch.cat([torch.zeros_like(score), score], dim=1)

    return Words()


@dataclass(frozen=True)
class Subject:
    """A mechanism to audit, with numbers of its own."""

    name: str
    mechanism: Any
    recipe: Any
    # Whether what is claimed is a Gaussian mechanism's epsilon.
    gaussian: bool = True

    def job(self, words: int) -> Any:
        """A job with this mechanism; what its digests name is never fetched."""
        from tacit.job import JobDocument

        digest = "00" * 32
        return JobDocument.model_validate(
            {
                "schema": 1,
                "name": "audit",
                "labels": ("no", "yes"),
                "training": self.recipe,
                "mechanism": self.mechanism,
                "rounds": {"target_members": 3},
                "manifest": digest,
                "tokenizer": digest,
                "weights": digest,
                "values": words + 1,
            }
        )


def subjects() -> tuple[Subject, ...]:
    """Every mechanism, with epsilon some 2 to 4.5 a round."""
    from tacit.job import Training
    from tacit.mechanism import DistributedGaussian, DpSgd, GaussianUpdate, LaplaceUpdate

    # So slow that the gradients stay as they were, and the steps' sums add up.
    slow = Training(optimiser="sgd", learning_rate=1e-4, batch=64)
    # One step that goes beyond any clip, in either direction.
    fast = Training(optimiser="sgd", learning_rate=1.0, batch=64)
    return (
        # Lots beyond the data: everything is drawn, at each of four steps. mu = sqrt(4) / 2.
        Subject("dp-sgd", DpSgd(noise_multiplier=2.0, lot=10, steps=4), slow),
        Subject("gaussian-update", GaussianUpdate(noise_multiplier=2.0, lot=10), fast),
        Subject("laplace-update", LaplaceUpdate(epsilon=2.0), fast, gaussian=False),
        Subject("distributed-gaussian", DistributedGaussian(noise_multiplier=2.0), fast),
    )


def release(
    subject: Subject, job: Any, module: Any, ids: NDArray[np.int64], labels: NDArray[np.int64], seed: str
) -> Values:
    """What leaves a member with these examples, (words + 1,): trained, protected, encoded where noise is the ring's."""
    import secure_agg
    from learning.mechanisms.contribution import Update
    from learning.mechanisms.protection import protection_of
    from learning.models import shared_parameters
    from learning.training.task import LocalTraining
    from tacit.mechanism import DistributedGaussian
    from tacit.vector import grid_of, layout_of

    random = Repeatable(seed)
    before = shared_parameters(module)["embedding.weight"].ravel()
    protection = protection_of(job, len(ids))
    task = LocalTraining.of_all(module, ids, labels, subject.recipe, 0, "cpu", lambda _: None, lambda: False)
    protection.train(task, random)
    change = shared_parameters(module)["embedding.weight"].ravel() - before
    protected = protection.protect(change, random)
    if not isinstance(job.mechanism, DistributedGaussian):
        return protected.astype(np.float64)
    update = Update(protected, len(ids), 0.0, 0, 0)
    encoded = protection.encode(job, update, 3, random)
    return secure_agg.decode_distributed(encoded, grid_of(job), layout_of(job, 3).bits)


def claimed(job: Any, examples: int, **changes: Any) -> float:
    """The epsilon of one release, as the member would account for it."""
    from learning.accounting.spend import Limit, spend
    from learning.mechanisms.protection import protection_of

    event = protection_of(job, examples).event
    if event is None:
        raise ValueError(f"{job.mechanism.name} claims nothing")
    return spend([event.model_copy(update=changes)], Limit(1.0, DELTA)).epsilon


@contextmanager
def defect(subject: Subject, broken: Broken) -> Iterator[None]:
    """The member's code with one part silently taken out."""

    import secure_agg
    from learning.mechanisms import noise
    from learning.mechanisms import protection as mechanisms
    from learning.training import private
    from learning.training.clipping import ClippedGradients
    from secure_agg.discrete_gaussian import DiscreteGaussian

    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    patches: dict[tuple[Broken, str], list[tuple[Any, str, Any]]] = {
        ("noise", "dp-sgd"): [
            (private, "fill_gaussian", lambda tensor, *_: tensor.zero_()),
        ],
        ("noise", "gaussian-update"): [(noise, "add_gaussian", nothing)],
        ("noise", "laplace-update"): [(noise, "add_laplace", nothing)],
        ("noise", "distributed-gaussian"): [(DiscreteGaussian, "add_into", nothing)],
        ("clipping", "dp-sgd"): [
            (ClippedGradients, "add", _clipped_as_one),
            (private, "PIECES", 1),
            (private, "check_examples_apart", nothing),
        ],
        ("unclipped", "dp-sgd"): [
            (ClippedGradients, "add", _not_clipped),
            (private, "check_examples_apart", nothing),
        ],
        ("clipping", "gaussian-update"): [(secure_agg, "clip_l2", lambda change, _: change.astype(np.float64))],
        ("clipping", "laplace-update"): [(mechanisms, "_clip_l1", lambda change, _: change.astype(np.float64))],
    }
    with ExitStack() as stack:
        for target, name, instead in patches[broken, subject.name] if broken != "none" else []:
            stack.enter_context(mock.patch.object(target, name, instead))
        yield


def _clipped_as_one(self: Any, losses: Any, clip: float, scale: float = 1.0) -> None:
    """In place of `ClippedGradients.add`: one gradient for the whole batch, clipped to what one example may add."""
    trained, found = _gradient_of_all(self, losses)
    norm = math.sqrt(sum(float(g.square().sum()) for g in found))
    for parameter, g in zip(trained, found, strict=True):
        parameter.grad.add_(g, alpha=scale * min(1.0, clip / norm))


def _not_clipped(self: Any, losses: Any, clip: float, scale: float = 1.0) -> None:
    """In place of `ClippedGradients.add`: each gradient as long as it is."""
    for parameter, g in zip(*_gradient_of_all(self, losses), strict=True):
        parameter.grad.add_(g, alpha=scale)


def _gradient_of_all(clipped: Any, losses: Any) -> tuple[list[Any], Sequence[Any]]:
    """The trained parameters, and the gradient of the batch's summed loss for each."""
    import torch

    clipped._calls.clear()
    trained = [parameter for layer in clipped._layers.values() for parameter in layer.parameters(recurse=False)]
    return trained, torch.autograd.grad(losses.sum(), trained)


# ---- the audits --------------------------------------------------------------------------------------------


def statistics_of(subject: Subject, runs: int, *, there: bool, label: str) -> Values:
    """The canary's coordinate in so many releases, (runs,).

    The data: one text of which the model is nearly sure, and its gradient is beyond the clip all the same. The canary
    has the other label for the same word, and outweighs it by far: it turns the sum of the two around.
    """
    texts = np.array([[WORD], [WORD if there else PAD]])
    job = subject.job(3)
    module = words_model(3, SURE)
    start = {name: value.clone() for name, value in module.state_dict().items()}
    found = []
    for run in range(runs):
        module.load_state_dict(start)
        found.append(release(subject, job, module, texts, np.array([0, 1]), f"{SEED}/{label}/{there}/{run}")[WORD])
    return np.array(found)


def canary_audit(subject: Subject, broken: Broken, runs: int, pilot: int) -> list[Figure]:
    """Many trainings with and without one example."""
    job = subject.job(3)
    with defect(subject, broken):
        label = f"{subject.name}/{broken}"
        guides = [statistics_of(subject, pilot, there=there, label=f"{label}/pilot") for there in (False, True)]
        without, found = (statistics_of(subject, runs, there=there, label=label) for there in (False, True))
    direction = 1.0 if guides[1].mean() >= guides[0].mean() else -1.0
    # Halfway for Gaussians; where the side with the canary is centred for Laplace, whose ratio is flat beyond it.
    place = 0.5 if subject.gaussian else 1.0
    threshold = direction * ((1 - place) * guides[0].mean() + place * guides[1].mean())
    # Where noise is off, all values of a side are equal: a hair of room on the canary's side.
    threshold -= 1e-9 * abs(guides[1].mean() - guides[0].mean())
    errors = (int((direction * without > threshold).sum()), int((direction * found <= threshold).sum()))
    bounds = {
        "rates": rates_bound(*errors, runs, DELTA, CONFIDENCE),
        "gaussian": gaussian_bound(*errors, runs, DELTA, CONFIDENCE),
    }
    more = {
        "method": "gaussian" if subject.gaussian else "rates",
        **({name: round(bound, 3) for name, bound in bounds.items()} if subject.gaussian else {}),
        "false_positive_rate": errors[0] / runs,
        "false_negative_rate": errors[1] / runs,
        "runs": runs,
        "confidence": CONFIDENCE,
    }
    about = {"delta": DELTA}
    if subject.name == "gaussian-update":
        # Zhu et al. 2020 account for sigma; the change of a neighbour can be two clips away.
        about |= {"paper": round(claimed(job, 2, multiplier=subject.mechanism.noise_multiplier), 3)}
    return [
        Figure("epsilon_lower_bound", round(bounds[str(more["method"])], 3), more=more),
        Figure("epsilon_claimed", round(claimed(job, 2), 3), more=about),
    ]


def one_run_scores(subject: Subject, canaries: int, seed: str) -> tuple[Values, NDArray[np.bool_]]:
    """One training: a score for each canary, and whether it was there. Both (canaries,)."""
    there = np.frombuffer(Repeatable(f"{seed}/coins").bytes(canaries), dtype=np.uint8) % 2 == 1
    texts = np.where(there, np.arange(1, canaries + 1), PAD)[:, None]
    labels = np.ones(canaries, dtype=np.int64)
    released = release(subject, subject.job(canaries), words_model(canaries, 0.0), texts, labels, seed)
    return released[1:], there


def guess(scores: Values, there: NDArray[np.bool_], high: int, low: int) -> int:
    """How many are right, if the `high` highest scores are said to be there and the `low` lowest not to be."""
    order = np.argsort(scores, kind="stable")
    return int(there[order[len(order) - high :]].sum() + (~there[order[:low]]).sum())


def one_run_audit(broken: Broken, canaries: int) -> list[Figure]:
    """DP-SGD on Poisson draws of half the data, with thousands of canaries at a time."""
    from tacit.mechanism import DpSgd

    (base,) = [subject for subject in subjects() if subject.name == "dp-sgd"]
    subject = Subject("dp-sgd", DpSgd(noise_multiplier=1.2, lot=canaries // 2, steps=2), base.recipe)

    def bound(scores: Values, there: NDArray[np.bool_], high: int, low: int) -> float:
        return one_run_bound(canaries, high + low, guess(scores, there, high, low), DELTA, CONFIDENCE)

    with defect(subject, broken):
        pilot = one_run_scores(subject, canaries, f"{SEED}/{broken}/one-run/pilot")
        scores, there = one_run_scores(subject, canaries, f"{SEED}/{broken}/one-run")
    sizes = [int(canaries * share) for share in (0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)]
    _, high, low = max((bound(*pilot, high, low), high, low) for high in sizes for low in sizes if high + low)
    more = {
        "canaries": canaries,
        "guesses": high + low,
        "correct": guess(scores, there, high, low),
        "confidence": CONFIDENCE,
    }
    return [
        Figure("epsilon_lower_bound", round(bound(scores, there, high, low), 3), more=more),
        Figure("epsilon_claimed", round(claimed(subject.job(canaries), canaries), 3), more={"delta": DELTA}),
    ]


def cells() -> list[tuple[dict[str, Any], Subject | None, Broken]]:
    """Cases in the order in which they are measured; a one-run audit has no subject."""
    found: list[tuple[dict[str, Any], Subject | None, Broken]] = []
    ways: Sequence[Broken] = ("none", "noise", "clipping")
    for subject in subjects():
        of_it = {"dp-sgd": (*ways, "unclipped"), "distributed-gaussian": ways[:2]}.get(subject.name, ways)
        found += [({"mechanism": subject.name, "broken": each, "audit": "canary"}, subject, each) for each in of_it]
    # A batch clipped as one example says less about each of thousands: this audit could not see that.
    of_many: Sequence[Broken] = ("none", "noise", "unclipped")
    found += [({"mechanism": "dp-sgd", "broken": each, "audit": "one-run"}, None, each) for each in of_many]
    return found


def main() -> None:
    """Command line."""
    import torch

    chosen = parser("privacy.audit").parse_args()
    torch.set_num_threads(1)
    results = open_results(BENCH, quick=chosen.quick)
    runs, pilot, canaries = (200, 40, 1_000) if chosen.quick else (RUNS, PILOT_RUNS, CANARIES)
    for case, subject, broken in cells():
        if results.done(case):
            continue
        results.open([SEED])
        if subject is not None:
            results.add(case, canary_audit(subject, broken, runs, pilot))
        else:
            results.add(case, one_run_audit(broken, canaries))


if __name__ == "__main__":
    main()
