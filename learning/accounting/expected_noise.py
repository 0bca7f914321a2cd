"""The ratio of noise to signal that a job is to expect, from the job alone, and what would lower it.

Everything here needs neither data nor torch. `values_of_file` counts what a job file shares before its bundle exists;
a job's document states it.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from learning.accounting.costs import Noised
from learning.accounting.planning import noise_to_signal
from learning.text.encoder import read_vocabulary
from tacit.job import JobDocument, JobSpec, VocabularyFile
from tacit.manifest import Manifest
from tacit.mechanism import DistributedGaussian, DpSgd, GaussianUpdate
from tacit.method import keeps_anything
from tacit.model import BiLSTMModel, PromptedModel, TextCNNModel

__all__ = ["DROWNED", "ExpectedNoise", "Values", "expected_noise", "values_of_file"]

# The embedding's name in a manifest, as in `learning.models.division`, which needs torch.
EMBEDDING = "embedding.weight"
# From this ratio on, the noise drowns the longest update that clipping leaves.
DROWNED = 10.0


@dataclass(frozen=True)
class Values:
    """The values that a job shares.

    Attributes:
        shared: d, the values in an update.
        embedding: those of them that `freeze_embedding` would take out; 0 if it would take none.
    """

    shared: int
    embedding: int = 0

    @classmethod
    def of(cls, job: JobDocument, manifest: Manifest) -> "Values":
        """Counts what a job's document and manifest share."""
        embedding = sum(tensor.size for tensor in manifest.tensors if tensor.name == EMBEDDING)
        return cls(job.values, embedding if job.method.name in ("fedavg", "fedprox") else 0)


@dataclass(frozen=True)
class ExpectedNoise:
    """What the noise does to one round's mean update.

    Attributes:
        ratio: `noise_to_signal`: the length of the noise over that of the longest update that clipping leaves.
        values: d.
        members: n, members whose updates are averaged.
        lot: examples of a draw, on average; None if the mechanism draws none.
        lower: what would lower the ratio, a sentence each, without its full stop.
    """

    ratio: float
    values: Values
    members: int
    lot: int | None
    lower: tuple[str, ...]

    @property
    def sentences(self) -> tuple[str, ...]:
        """The ratio with what it follows from, and what would lower it."""
        drawn = "" if self.lot is None else f", lots of {self.lot}"
        said = (
            f"Expected noise to signal: {_short(self.ratio)} in a round ({self.values.shared:,} values, "
            f"{self.members} members{drawn})."
        )
        if self.ratio >= DROWNED:
            said += " The noise drowns the update, so the model will not learn."
        return said, f"{'. '.join(self.lower)}."

    def as_json(self) -> dict[str, object]:
        """What `--json` prints."""
        return {
            "noise_to_signal": self.ratio,
            "values": self.values.shared,
            "members": self.members,
            "lot": self.lot,
            "lower": list(self.lower),
        }


def expected_noise(
    job: JobDocument | JobSpec, values: Values, *, examples: int | None = None, members: int | None = None
) -> ExpectedNoise | None:
    """Returns what a job's noise does to the mean update of a round; None if the job adds no noise, or asks.

    Args:
        job: the job.
        values: what it shares.
        examples: N, a member's examples; None: enough for full lots, which is b lots under correlated noise of b bands.
        members: n, members whose updates are averaged; None: the smallest cohort that the job allows.
    """
    mechanism = job.mechanism
    if not isinstance(mechanism, Noised):
        return None
    lot = mechanism.lot if isinstance(mechanism, DpSgd | GaussianUpdate) else None
    # A step draws from one of so many classes.
    band = mechanism.band if isinstance(mechanism, DpSgd) else 1
    counted = job.rounds.min_members if members is None else members
    rows = examples or (lot or 1) * band
    ratio = noise_to_signal(mechanism, values.shared, rows, counted)
    lower: list[str] = []
    halving: list[str] = []
    left = values.shared - values.embedding
    if values.embedding and left:
        smaller = noise_to_signal(mechanism, left, rows, counted)
        lower.append(f"freeze_embedding = true leaves {left:,} values and a ratio of {_short(smaller)}")
    else:
        halving.append("train a quarter of the values")
    halving.append(f"have {4 * counted} members")
    # A lot that holds all rows of its class cannot grow.
    grows = isinstance(mechanism, DpSgd) and (examples is None or 2 * mechanism.lot * band <= examples)
    if grows:
        halving.append("double the lot")
    lower.append(f"To halve it: {', or '.join(halving)}")
    if grows:
        lower.append("A doubled lot costs the same epsilon only if members have twice the rows")
    if isinstance(mechanism, DistributedGaussian):
        lower.append("A larger honest spreads the noise over more shares")
    lower.append("A greater epsilon lowers it in about the same proportion")
    return ExpectedNoise(ratio, values, counted, None if lot is None else min(lot, max(1, rows // band)), tuple(lower))


def values_of_file(spec: JobSpec, folder: Path) -> Values | None:
    """Counts the values that a job file shares, without making its bundle.

    Args:
        spec: the job.
        folder: base of its relative paths.

    Returns:
        None where only the bundle knows: private parameters, a transformer's base, a base on the hub, members' own
        vocabularies, or a prompted model without torch.

    Raises:
        VocabularyInvalid: the vocabulary cannot be read.
    """
    if keeps_anything(spec.method):
        return None
    match spec.model, spec.vocabulary:
        case TextCNNModel() | BiLSTMModel() as model, VocabularyFile() as vocabulary:
            lines = read_vocabulary(folder / vocabulary.file)
            words = {line.split(" ", 1)[0].strip().lower() for line in lines} - {""}
            entries = len(lines) if vocabulary.kind == "wordpiece" else len(words) + 2
            whole, embedding = model.values(entries, len(spec.labels)), entries * model.embedding
            return Values(whole - embedding) if model.freeze_embedding else Values(whole, embedding)
        case PromptedModel(base=str() as base) as model, None:
            return _prompted(model, folder / base / "config.json", len(spec.labels))
    return None


def _prompted(model: PromptedModel, config: Path, labels: int) -> Values | None:
    try:
        from learning.prompts.assembly import prompted_values

        read = json.loads(config.read_text(encoding="utf-8"))
        return Values(prompted_values(model.model_copy(update={"base": None, "config": read}), labels))
    except (ImportError, OSError, ValueError):
        return None


def _short(ratio: float) -> str:
    return f"{ratio:.2g}" if ratio < 100 else f"{ratio:,.0f}"
