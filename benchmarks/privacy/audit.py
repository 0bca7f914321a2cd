"""Attacks each mechanism and proves a lower bound on epsilon.

The claim must stay above the bound, or one of the two is wrong. To show that the audit would notice a defect, it is
repeated with noise silently turned off and with clipping silently broken. Then the bound must exceed the claim.

**The adversary.** It has everything except the coins. It chose the architecture, the starting weights, the recipe and
all data. It knows every example but one, and sees the update that leaves the member, before it is rounded into the ring
(for `distributed-gaussian`, the member's own vector without its masks, so the claim is the one for h = 1). It does not
see the steps in between. This is more than any coordinator sees, and exactly what differential privacy promises about:
a weaker adversary would prove nothing. The code is the member's own (`learning.mechanisms.protection`), with its real
sampling, clipping, noise and accounting. Only the model is the audit's: one weight for each word and a fixed head, so
that an example's gradient is one coordinate (a Dirac canary; Nasr et al. 2023, "Tight auditing of differentially
private machine learning").

**Audit `canary`.** It runs many trainings with the canary, and as many with an empty text in its place, whose gradient
is zero. The statistic is the change of the canary's coordinate. The test is a threshold that was fixed by separate
trainings. Two bounds follow from the two error rates (Clopper and Pearson 1934, jointly at 95 %):

- `rates`: epsilon >= ln((true positive rate - delta) / false positive rate), or the same with the roles exchanged. It
  assumes nothing. It cannot exceed ln(runs), nor come near a Gaussian's epsilon, which lies in tails that no audit
  samples.
- `gaussian`: the mechanism is not mu-Gaussian-DP for any mu below Phi^-1(1 - FPR) - Phi^-1(FNR) (Dong, Roth, Su 2022).
  The claim of a Gaussian mechanism on all of the data is equivalent to such a mu, so this refutes the claim directly.
  Its epsilon is that of this mu at the same delta. (The claim of `distributed-gaussian` is a Renyi bound, slightly
  larger than a Gaussian's.)

`epsilon_lower_bound` is `gaussian` if the claim is a Gaussian's, and `rates` otherwise. Both are given beside it.

**Audit `one-run`.** A single training with Poisson draws of half of the data has thousands of canaries, each present or
absent by a fair coin. The adversary guesses for those that it is surest of (Steinke, Nasr, Jagielski 2023, Theorem 5.2:
valid for any (epsilon, delta)-DP mechanism, at 95 %). Another training fixed the number of guesses.

**Correlated noise.** The adversary sees every step and not their sum alone, since the noise of one step says what the
next ones take back. It multiplies the steps by the matrix, which makes the noise independent again, and adds them up as
the canary's class moves them.

**Defects.** separation, for correlated noise: each step draws from all examples, so that the canary is in steps whose
rows meet. noise: every sampler adds nothing. clipping, for dp-sgd: the batch is clipped as if it were one example, as
happens if a parameter is broadcast over it (the check that refuses such a module is removed too). clipping, for the
others: the update is not clipped at all. unclipped, for dp-sgd: no gradient is clipped, as happens if a parameter is
forgotten; the audit detects this defect without any assumption. The ring refuses a vector longer than the clip, so
`distributed-gaussian` cannot be silently broken in that way.
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
    "CORRELATED",
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
# With many more, the term 2 m delta would use up the confidence.
CANARIES = 10_000
SEED = 0

PAD, WORD = 0, 1
# Factor of the fixed head. Unless the model is perfectly sure of an example, its gradient is far longer than the clip.
GAIN = 100.0
# Start at which the model is nearly sure of the other examples' label (probability 0.95), and the canary's is wrong.
SURE = -math.log(19) / GAIN

Broken = Literal["none", "noise", "clipping", "unclipped", "separation"]
CORRELATED = "dp-sgd, correlated"
Values = NDArray[np.float64]


# ---- statistics --------------------------------------------------------------------------------------------


def upper_rate(count: int, of: int, confidence: float) -> float:
    """Return the largest probability that `count` events in `of` trials do not refute.

    Source: the one-sided interval of Clopper and Pearson 1934.
    """
    from scipy import stats

    return 1.0 if count >= of else float(stats.beta.ppf(confidence, count + 1, of - count))


def _rates(false_positives: int, false_negatives: int, runs: int, confidence: float) -> tuple[float, float]:
    """Return upper bounds of both rates, jointly at `confidence`."""
    each = 1 - (1 - confidence) / 2
    return upper_rate(false_positives, runs, each), upper_rate(false_negatives, runs, each)


def rates_bound(false_positives: int, false_negatives: int, runs: int, delta: float, confidence: float) -> float:
    """Return a lower bound on epsilon of any (epsilon, delta)-DP mechanism, from a test's errors.

    Args:
        runs: number of trials on each side.
    """
    fpr, fnr = _rates(false_positives, false_negatives, runs, confidence)
    found = [math.log((1 - delta - b) / a) for a, b in ((fpr, fnr), (fnr, fpr)) if b < 1 - delta]
    return max(0.0, *found) if found else 0.0


def gaussian_bound(false_positives: int, false_negatives: int, runs: int, delta: float, confidence: float) -> float:
    """Return a lower bound on epsilon of a mechanism that claims to be Gaussian; arguments as of `rates_bound`."""
    from scipy import special

    fpr, fnr = _rates(false_positives, false_negatives, runs, confidence)
    return epsilon_of_gaussian(max(0.0, float(-special.ndtri(fpr) - special.ndtri(fnr))), delta)


def epsilon_of_gaussian(mu: float, delta: float) -> float:
    """Return the smallest epsilon of a mu-Gaussian-DP mechanism at delta.

    Source: Dong, Roth, Su 2022, Corollary 2.13.
    """
    from scipy import optimize, special

    def excess(epsilon: float) -> float:
        # The second term is computed from logarithms, because e^epsilon alone overflows.
        rest = math.exp(epsilon + float(special.log_ndtr(-epsilon / mu - mu / 2)))
        return float(special.ndtr(-epsilon / mu + mu / 2)) - rest - delta

    if mu <= 0 or excess(0.0) <= 0:
        return 0.0
    return float(optimize.brentq(excess, 0.0, mu * mu / 2 + 10 * mu + 10))


def one_run_bound(examples: int, guesses: int, correct: int, delta: float, confidence: float) -> float:
    """Return a lower bound on epsilon from one training.

    Args:
        examples: m, the number of canaries, each present with probability 1/2.
        guesses: r, the number of canaries guessed at.
        correct: v, the number of correct guesses.

    Source: Steinke, Nasr, Jagielski 2023, Theorem 5.2.
    """
    from scipy import optimize, stats

    def excess(epsilon: float) -> float:
        """Bound the probability of `correct` right guesses under (epsilon, delta)-DP, minus (1 - confidence)."""
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
    """A reproducible random source: SHAKE-256 of a seed and a counter."""

    def __init__(self, seed: str) -> None:
        self._seed, self._calls = seed, 0

    def bytes(self, n: int, /) -> bytes:
        """Return `n` bytes, as `secure_agg.RandomSource` does."""
        self._calls += 1
        return hashlib.shake_256(f"{self._seed}/{self._calls}".encode()).digest(n)


def words_model(words: int, start: float) -> Any:
    """Return a classifier of two labels with one trained weight for each word.

    Its logits are (0, GAIN * sum of the text's weights).
    """
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
    """A mechanism to audit, and its parameters."""

    name: str
    mechanism: Any
    recipe: Any
    # Whether the claim is a Gaussian mechanism's epsilon.
    gaussian: bool = True
    # Rounds of the job; None: the default.
    rounds: int | None = None

    def job(self, words: int) -> Any:
        """Return a job with this mechanism. Its digests are never fetched."""
        from tacit.job import JobDocument

        digest = "00" * 32
        return JobDocument.model_validate(
            {
                "schema": 1,
                "name": "audit",
                "labels": ("no", "yes"),
                "training": self.recipe,
                "mechanism": self.mechanism,
                "rounds": {"target_members": 3} | ({} if self.rounds is None else {"count": self.rounds}),
                "manifest": digest,
                "tokenizer": digest,
                "weights": digest,
                "values": words + 1,
            }
        )


def subjects() -> tuple[Subject, ...]:
    """Return every mechanism, with an epsilon of about 2 to 4.5 a round."""
    from learning.mechanisms.banded import best_coefficients
    from tacit.job import Training
    from tacit.mechanism import DistributedGaussian, DpSgd, GaussianUpdate, LaplaceUpdate

    # So slow that gradients do not change, and the sums of the steps add up.
    slow = Training(optimiser="sgd", learning_rate=1e-4, batch=64)
    # One step moves beyond any clip, in either direction.
    fast = Training(optimiser="sgd", learning_rate=1.0, batch=64)
    return (
        # The lot exceeds the data, so each of four steps draws everything. mu = sqrt(4) / 2.
        Subject("dp-sgd", DpSgd(noise_multiplier=2.0, lot=10, steps=4), slow),
        # Six steps in three classes, so the canary is in two of them. mu = sqrt(2) / 1.2.
        Subject(
            CORRELATED,
            DpSgd(noise_multiplier=1.2, lot=10, steps=1, coefficients=best_coefficients(3, 6)),
            slow,
            rounds=6,
        ),
        Subject("gaussian-update", GaussianUpdate(noise_multiplier=2.0, lot=10), fast),
        Subject("laplace-update", LaplaceUpdate(epsilon=2.0), fast, gaussian=False),
        Subject("distributed-gaussian", DistributedGaussian(noise_multiplier=2.0), fast),
    )


def release(
    subject: Subject, job: Any, module: Any, ids: NDArray[np.int64], labels: NDArray[np.int64], seed: str
) -> Values:
    """Return a member's release, (words + 1,): trained, protected, and encoded if the noise is added in the ring."""
    import secure_agg
    from learning.mechanisms.contribution import Update
    from learning.mechanisms.protection import protection_of
    from learning.models import shared_parameters
    from learning.training.task import LocalTraining
    from tacit.mechanism import DistributedGaussian
    from tacit.vector import grid_of, layout_of

    if subject.name == CORRELATED:
        return release_of_steps(subject, job, module, ids, labels, seed)
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


def release_of_steps(
    subject: Subject, job: Any, module: Any, ids: NDArray[np.int64], labels: NDArray[np.int64], seed: str
) -> Values:
    """Return the steps of a job with correlated noise, weighed as an example of label 1 moves them, (words + 1,)."""
    from dataclasses import replace

    from learning.mechanisms.correlated import CorrelatedSteps, classes_of
    from learning.mechanisms.protection import protection_of
    from learning.models import shared_parameters
    from learning.training.task import LocalTraining

    def classes(key: bytes) -> NDArray[np.int64]:
        both = np.full((2, 1), WORD)
        return classes_of(key, job.mechanism.band, both, np.ones(2, dtype=np.int64), np.array([0, 1]))

    # The text that is always there and the canary share a class, so that they meet in a batch.
    key = next(each for n in range(1000) if len(set(classes(each := n.to_bytes(32, "little")))) == 1)
    band, count, random = job.mechanism.band, job.rounds.count, Repeatable(seed)
    protection = protection_of(job, len(ids))
    steps = CorrelatedSteps.begun(
        job.mechanism.coefficients, job.mechanism.noise_multiplier, min(1.0, band * 10 / len(ids)), key, job.values
    )
    task = LocalTraining.of_all(module, ids, labels, subject.recipe, 0, "cpu", lambda _: None, lambda: False)
    changes = []
    for _ in range(count):
        before = shared_parameters(module)["embedding.weight"].ravel().copy()
        protection.train(replace(task, correlated=steps), random)
        changes.append(shared_parameters(module)["embedding.weight"].ravel() - before)
    matrix = sum(each * np.eye(count, k=-j) for j, each in enumerate(job.mechanism.coefficients))
    moved = matrix @ (np.arange(count) % band == classes(key)[1])
    found: Values = moved @ (matrix @ np.array(changes, dtype=np.float64)) / np.linalg.norm(moved)
    return found


def claimed(job: Any, examples: int, **changes: Any) -> float:
    """Return the epsilon of one release, as the member accounts for it."""
    from learning.accounting.spend import Limit, spend
    from learning.mechanisms.protection import protection_of

    event = protection_of(job, examples).event
    if event is None:
        raise ValueError(f"{job.mechanism.name} claims nothing")
    return spend([event.model_copy(update=changes)], Limit(1.0, DELTA)).epsilon


@contextmanager
def defect(subject: Subject, broken: Broken) -> Iterator[None]:
    """Run the member's code with one part silently removed."""

    import secure_agg
    from learning.mechanisms import noise
    from learning.mechanisms import protection as mechanisms
    from learning.mechanisms.correlated import CorrelatedSteps
    from learning.training import local, private
    from learning.training.clipping import ClippedGradients
    from secure_agg.discrete_gaussian import DiscreteGaussian

    def of_all(self: Any, classes: Values, random: Any) -> NDArray[np.int64]:
        return noise.draw_poisson(len(classes), self.rate, random)

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
            (local, "PIECES", 1),
            (private, "check_examples_apart", nothing),
        ],
        ("unclipped", "dp-sgd"): [
            (ClippedGradients, "add", _not_clipped),
            (private, "check_examples_apart", nothing),
        ],
        ("separation", CORRELATED): [(CorrelatedSteps, "draw", of_all)],
        ("clipping", "gaussian-update"): [(secure_agg, "clip_l2", lambda change, _: change.astype(np.float64))],
        ("clipping", "laplace-update"): [(mechanisms, "_clip_l1", lambda change, _: change.astype(np.float64))],
    }
    for broken_too in ("noise", "clipping", "unclipped"):
        patches[broken_too, CORRELATED] = patches[broken_too, "dp-sgd"]
    with ExitStack() as stack:
        for target, name, instead in patches[broken, subject.name] if broken != "none" else []:
            stack.enter_context(mock.patch.object(target, name, instead))
        yield


def _clipped_as_one(self: Any, losses: Any, clip: float, groups: Any = None) -> None:
    """Replaces `ClippedGradients.add`: adds one gradient of the whole batch, clipped as that of one example."""
    found = _gradient_of_all(self, losses)
    norm = math.sqrt(sum(float(g.square().sum()) for g in found))
    for total, g in zip(self.sums.values(), found, strict=True):
        total.add_(g, alpha=(min(1.0, clip / norm) if norm else 1.0) / clip)


def _not_clipped(self: Any, losses: Any, clip: float, groups: Any = None) -> None:
    """Replaces `ClippedGradients.add`: adds every gradient unclipped."""
    for total, g in zip(self.sums.values(), _gradient_of_all(self, losses), strict=True):
        total.add_(g, alpha=1 / clip)


def _gradient_of_all(clipped: Any, losses: Any) -> Sequence[Any]:
    """Return the gradient of the batch's summed loss by each trained parameter."""
    import torch

    clipped._calls.clear()
    trained = [parameter for layer in clipped._layers.values() for parameter in layer.parameters(recurse=False)]
    found: Sequence[Any] = torch.autograd.grad(losses.sum(), trained)
    return found


# ---- the audits --------------------------------------------------------------------------------------------


def statistics_of(subject: Subject, runs: int, *, there: bool, label: str) -> Values:
    """Return the canary's coordinate in each release, (runs,).

    The data has one text of which the model is nearly sure, though its gradient exceeds the clip. The canary has the
    same word with the other label, and outweighs that text by far: it reverses the sign of their sum.
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
    """Audit by many trainings with and without one example."""
    job = subject.job(3)
    with defect(subject, broken):
        label = f"{subject.name}/{broken}"
        guides = [statistics_of(subject, pilot, there=there, label=f"{label}/pilot") for there in (False, True)]
        without, found = (statistics_of(subject, runs, there=there, label=label) for there in (False, True))
    direction = 1.0 if guides[1].mean() >= guides[0].mean() else -1.0
    # Half-way for Gaussians. For Laplace, the centre of the side with the canary, beyond which the ratio is constant.
    place = 0.5 if subject.gaussian else 1.0
    threshold = direction * ((1 - place) * guides[0].mean() + place * guides[1].mean())
    # Without noise all values of a side are equal, so the threshold leaves a tiny margin on the canary's side.
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
        # Zhu et al. 2020 account for sigma, although the update of a neighbouring data set can be two clips away.
        about |= {"paper": round(claimed(job, 2, multiplier=subject.mechanism.noise_multiplier), 3)}
    return [
        Figure("epsilon_lower_bound", round(bounds[str(more["method"])], 3), more=more),
        Figure("epsilon_claimed", round(claimed(job, 2), 3), more=about),
    ]


def one_run_scores(subject: Subject, canaries: int, seed: str) -> tuple[Values, NDArray[np.bool_]]:
    """Train once, and return each canary's score and presence, both (canaries,)."""
    there = np.frombuffer(Repeatable(f"{seed}/coins").bytes(canaries), dtype=np.uint8) % 2 == 1
    texts = np.where(there, np.arange(1, canaries + 1), PAD)[:, None]
    labels = np.ones(canaries, dtype=np.int64)
    released = release(subject, subject.job(canaries), words_model(canaries, 0.0), texts, labels, seed)
    return released[1:], there


def guess(scores: Values, there: NDArray[np.bool_], high: int, low: int) -> int:
    """Count the correct guesses, if the `high` highest scores are guessed present and the `low` lowest absent."""
    order = np.argsort(scores, kind="stable")
    return int(there[order[len(order) - high :]].sum() + (~there[order[:low]]).sum())


def one_run_audit(broken: Broken, canaries: int) -> list[Figure]:
    """Audit DP-SGD on Poisson draws of half the data, with thousands of canaries at once."""
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
    """Return the cases in the order of measurement. A one-run audit has no subject."""
    found: list[tuple[dict[str, Any], Subject | None, Broken]] = []
    ways: Sequence[Broken] = ("none", "noise", "clipping")
    for subject in subjects():
        more: dict[str, Sequence[Broken]] = {
            "dp-sgd": (*ways, "unclipped"),
            CORRELATED: (*ways, "separation"),
            "distributed-gaussian": ways[:2],
        }
        of_it = more.get(subject.name, ways)
        found += [({"mechanism": subject.name, "broken": each, "audit": "canary"}, subject, each) for each in of_it]
    # A batch clipped as one example reveals less about each of thousands, so this audit could not detect that defect.
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
