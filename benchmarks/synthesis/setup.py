"""The common set-up of the cells of `quality`: data, public words and start, members, corpora.

Guarantees: members' texts come only from a data set's training part, choices from its validation part, and figures from
its test. The job's words and starting weights come from WikiText and GloVe, and from none of these. In a training with
noise, a member's empty ledger admits all steps and the histogram together.

A training is rounds of `library.simulation`: the product's bundle, local steps, mechanism, ring and server optimiser. A
member generates texts from the model that it sent last, including its noise, recorded where the product passes it on.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.library.record import ROOT, SHARED, NoData
from benchmarks.library.simulation import Member, federate
from learning.accounting.calibration import calibrate
from learning.accounting.events import PrivacyEvent, SampledGaussian
from learning.accounting.filter import Limit
from learning.accounting.gate import PrivacyFilter
from learning.accounting.spend import spend
from learning.mechanisms.contribution import Update
from learning.mechanisms.protection import Protection
from learning.synthesis.labels import histogram_event, noised_histogram
from learning.synthesis.quality import words_of as cut
from learning.synthesis.setting import PublishedSetting
from learning.text.corpus import words_of
from learning.text.data import read_examples
from learning.text.examples import Example, label_ids
from learning.text.textual import read_text
from learning.training.task import Task as LocalTask
from secure_agg import RandomSource, SystemRandom
from simulation.partitions import by_ratios
from tacit.corpus import CorpusOrder
from tacit.job import Aggregation, JobDocument, JobSpec, PublicStart, Rounds, Training, VocabularyFile
from tacit.mechanism import DpSgd, NoMechanism
from tacit.model import RvaeModel
from tacit.server_optimiser import FedAvgServer, ServerOptimiser

if TYPE_CHECKING:
    from export.bundle import JobBundle
    from learning.synthesis.model import Rvae
    from learning.synthesis.words import PublicWords
    from learning.training.outcome import TrainingResult

__all__ = [
    "CACHE",
    "CANDIDATES",
    "DELTA",
    "GLOVE",
    "MEMBERS",
    "Kept",
    "RvaeRecipe",
    "Task",
    "Trained",
    "canaries",
    "check_data",
    "corpora_of_members",
    "corpus_of_operator",
    "dealt",
    "exposures",
    "multiplier_for",
    "perplexity",
    "public_text",
    "public_words_file",
    "read_task",
    "rewritten",
    "rvae_bundle",
    "spent_of",
    "train_rvae",
]

Vector = NDArray[np.float32]
Counts = NDArray[np.int64]

CACHE = ROOT / "benchmarks" / ".cache"
GLOVE = SHARED / "glove" / "glove.6B.50d.subset.txt.gz"
WIKITEXT = SHARED / "wikitext103_small" / "train.txt.gz"
# The table's words up to here are the most frequent ones of its source. The later ones are rarer.
_COMMON_WORDS = 2445
_SENTENCES = 12_000

MEMBERS = 10
DELTA = 1e-5
VALIDATION = 500
_SPLIT_SEED = 20260
# Number of texts that a planted text is ranked among, without itself.
CANDIDATES = 200
_CANARY_WORDS = 6


# ---- data -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A data set: training rows for members, validation rows for choices, and test rows for figures."""

    name: str
    labels: tuple[str, ...]
    train: Sequence[Example]
    validation: Sequence[Example]
    test: Sequence[Example]

    def counts(self, examples: Sequence[Example]) -> Counts:
        """Count the examples of each label, (L,)."""
        return np.bincount(label_ids(examples, self.labels), minlength=len(self.labels)).astype(np.int64)


def check_data(name: str) -> None:
    """Raise NoData if a file is missing."""
    files = ["train_sentences", "dev", "test"] if name == "sst2" else ["train", "test"]
    for path in (*(SHARED / name / f"{each}.jsonl.gz" for each in files), GLOVE, WIKITEXT):
        if not path.exists():
            raise NoData(
                f"{path} is missing: this benchmark needs SST-2, TREC, WikiText and GloVe under {SHARED} "
                "; put them there and run it again"
            )


def read_task(name: str) -> Task:
    """Read a data set.

    `sst2` has 6,920 training sentences, and its dev set is for validation. In `trec`, 500 training questions are for
    validation.

    Raises:
        NoData: a file is missing.
    """
    check_data(name)
    if name == "sst2":
        train, validation, test = (_sst2(part) for part in ("train_sentences", "dev", "test"))
        return Task(name, ("negative", "positive"), train, validation, test)
    rows = list(read_examples(SHARED / "trec" / "train.jsonl.gz"))
    order = np.random.Generator(np.random.Philox(_SPLIT_SEED)).permutation(len(rows)).tolist()
    labels = tuple(sorted({str(each.label) for each in rows}))
    held, rest = ([rows[at] for at in part] for part in (order[:VALIDATION], order[VALIDATION:]))
    return Task(name, labels, rest, held, list(read_examples(SHARED / "trec" / "test.jsonl.gz")))


def _sst2(part: str) -> list[Example]:
    names = {"0": "negative", "1": "positive"}
    return [Example(row.text, names[str(row.label)]) for row in read_examples(SHARED / "sst2" / f"{part}.jsonl.gz")]


def dealt(task: Task, members: int, seed: int) -> list[list[Example]]:
    """Deal the training rows in equal parts, at random."""
    parts = by_ratios(len(task.train), [1.0] * members, seed).members
    return [[task.train[at] for at in rows] for rows in parts]


# ---- public text ----------------------------------------------------------------------------------------------------


def public_words_file(count: int, folder: Path = CACHE) -> Path:
    """Return a file of `count` words, one a line, made once in `folder`.

    The most common words of GloVe's table come first, then WikiText's by frequency.
    """
    path = folder / f"synthesis-words-{count}.txt"
    if not path.exists():
        lines = read_text(GLOVE).splitlines()[:_COMMON_WORDS]
        found = dict.fromkeys(word for line in lines if cut(word := line.split(" ", 1)[0]) == (word,))
        seen = Counter(word for sentence in _sentences() for word in cut(sentence))
        found |= dict.fromkeys(word for word, _ in seen.most_common())
        _write(path, list(found)[:count])
    return path


def public_text(folder: Path = CACHE) -> Path:
    """Return a file of WikiText's sentences, one a line, of 4 to 24 words without `<unk>`. Made once in `folder`."""
    path = folder / f"synthesis-sentences-{_SENTENCES}.txt"
    if not path.exists():
        found = [sentence for sentence in _sentences() if 4 <= len(cut(sentence)) <= 24]
        # Takes sentences from all articles, not only the first ones.
        stride = max(1, len(found) // _SENTENCES)
        _write(path, found[::stride][:_SENTENCES])
    return path


def _sentences() -> Iterator[str]:
    for line in read_text(WIKITEXT).splitlines():
        # Skips headings, and undoes WikiText's own joining signs.
        if line.strip() and not line.startswith(" ="):
            text = line.lower().replace(" @-@ ", "-").replace(" @,@ ", ",").replace(" @.@ ", ".").strip()
            yield from (f"{part} ." for part in text.removesuffix(" .").split(" . ") if part and "<unk>" not in part)


def _write(path: Path, lines: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text("\n".join(lines) + "\n", encoding="utf-8")
    fresh.replace(path)


# ---- jobs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RvaeRecipe:
    """One way to train the autoencoder. steps: of DP-SGD in a round. plain_epochs, plain_rate: for no noise."""

    model: RvaeModel = field(
        default_factory=lambda: RvaeModel(embedding=64, hidden=96, latent=16, words=3000, max_tokens=24)
    )
    members: int = MEMBERS
    rounds: int = 5
    steps: int = 4
    lot: int = 256
    clip: float = 0.1
    optimiser: Literal["adam", "sgd"] = "adam"
    learning_rate: float = 0.01
    server: ServerOptimiser = field(default_factory=FedAvgServer)
    plain_epochs: int = 2
    plain_rate: float = 0.002
    start_texts: int = _SENTENCES
    # For the published variant. Its rate, batch and epochs become the job's; its noise is the paper's.
    published: PublishedSetting = field(default_factory=PublishedSetting)
    # Number of texts of each member.
    texts: int = 1000
    # Standard deviation of the noise on each label's count.
    std: float = 24.0
    # Strength of the guidance towards a text's label, beyond the model itself.
    guidance: float = 1.0

    def as_json(self, *, noised: bool = True) -> dict[str, Any]:
        """Return the recipe as it is written in results."""
        found: dict[str, Any] = {"rounds": self.rounds, "server": self.server.optimiser}
        if self.server.learning_rate != 1:
            found["server_rate"] = self.server.learning_rate
        if self.model.variant == "published":
            return {**found, **asdict(self.published)}
        found |= {"label_weight": self.model.label_weight, "guidance": self.guidance}
        if not noised:
            return {**found, "epochs": self.plain_epochs, "optimiser": "adam", "learning_rate": self.plain_rate}
        found |= {"steps": self.steps, "lot": self.lot, "clip": self.clip}
        return {**found, "optimiser": self.optimiser, "learning_rate": self.learning_rate}


def multiplier_for(epsilon: float, lot: int, steps: int, examples: int, before: Sequence[PrivacyEvent] = ()) -> float:
    """Return the smallest noise multiplier with which a ledger of (epsilon, DELTA) admits `steps` after `before`.

    Raises:
        NotAffordable: there is none.
    """
    limit = Limit(epsilon, DELTA)
    rate = min(1.0, lot / examples)
    return calibrate(lambda multiplier: SampledGaussian(multiplier=multiplier, rate=rate), steps, limit, before)


def spent_of(events: Sequence[PrivacyEvent], epsilon: float) -> float:
    """Return the epsilon that a report gives for all these events together, at DELTA.

    Raises:
        ValueError: a ledger of `epsilon` does not admit them.
    """
    limit = Limit(epsilon, DELTA)
    if not PrivacyFilter(limit).admits(events):
        raise ValueError(f"a ledger of epsilon {epsilon:g} at delta {DELTA:g} does not admit these events")
    return spend(events, limit).epsilon


def _job(task: Task, recipe: RvaeRecipe, seed: int, cache: Path, **changed: Any) -> JobSpec:
    words = public_words_file(recipe.model.words - 2, cache)
    said: dict[str, Any] = {
        "name": f"{task.name}-rvae",
        "labels": task.labels,
        "model": recipe.model,
        "vocabulary": VocabularyFile(kind="words", file=str(words)),
        "rounds": Rounds(count=recipe.rounds, min_members=recipe.members, target_members=recipe.members),
        # Near the members' numbers of rows. Quantisation for weights up to 100,000 would be coarse for so few examples.
        "aggregation": Aggregation(max_weight=1000),
        "server": recipe.server,
        "corpus": CorpusOrder(texts=recipe.texts, histogram_std=recipe.std, guidance=recipe.guidance),
        "seed": seed,
    }
    return JobSpec(**{**said, **changed})


def rvae_bundle(
    task: Task, recipe: RvaeRecipe, epsilon: float | None, examples: int, seed: int, folder: Path, cache: Path = CACHE
) -> "JobBundle":
    """Make the job's bundle in `folder`. Its weights are trained on public text, once for each model, and cached.

    Args:
        epsilon: of each member, including the histogram; None adds no noise.
        examples: number of examples of the smallest member.
        cache: folder of the starting weights.
    """
    from export.bundle import make_job_bundle, read_job_bundle

    training = Training(epochs=recipe.plain_epochs, batch=32, learning_rate=recipe.plain_rate)
    if recipe.model.variant == "published":
        told = recipe.published
        training = Training(epochs=told.epochs, batch=told.batch, optimiser="sgd", learning_rate=told.learning_rate)
    mechanism: DpSgd | NoMechanism = NoMechanism()
    if epsilon is not None:
        paid = [histogram_event(recipe.std, len(task.labels), "add-remove")]
        lot = min(recipe.lot, examples)
        multiplier = multiplier_for(epsilon, lot, recipe.rounds * recipe.steps, examples, paid)
        mechanism = DpSgd(noise_multiplier=multiplier, clip=recipe.clip, lot=lot, steps=recipe.steps)
        training = Training(batch=256, optimiser=recipe.optimiser, learning_rate=recipe.learning_rate)
    spec = _job(task, recipe, seed, cache, training=training, mechanism=mechanism)
    make_job_bundle(spec, folder, folder / "bundle")
    bundle, start = read_job_bundle(folder / "bundle"), _start(task, recipe, folder, cache)
    weights = bundle.manifest.encode(
        bundle.manifest.flatten({tensor.name: start[tensor.name] for tensor in bundle.manifest.tensors})
    )
    digest, frozen = hashlib.sha256(weights).digest(), {name: start[name] for name in bundle.frozen}
    document = bundle.document.model_copy(update={"weights": digest})
    return replace(bundle, weights=weights, frozen=frozen, document=document)


def _start(task: Task, recipe: RvaeRecipe, folder: Path, cache: Path) -> dict[str, NDArray[np.float32]]:
    """Return all parameters of a bundle whose job names the public text. All seeds and epsilons share them."""
    from safetensors.numpy import load_file, save_file

    from export.bundle import make_job_bundle, read_job_bundle

    model = recipe.model.model_copy(update={"variant": "sound"})
    key = hashlib.sha256(f"{model.model_dump_json()}/{recipe.start_texts}/{len(task.labels)}".encode()).hexdigest()[:12]
    path = cache / f"synthesis-start-{key}.safetensors"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        start = PublicStart(file=str(public_text(cache)), texts=recipe.start_texts)
        spec = _job(task, replace(recipe, model=model), 0, cache, start=start)
        make_job_bundle(spec, folder, folder / "start")
        fresh = path.with_suffix(".new")
        made = read_job_bundle(folder / "start")
        save_file(made.parameters(made.manifest.decode(made.weights)), fresh)
        fresh.replace(path)
    return load_file(path)


# ---- members --------------------------------------------------------------------------------------------------------


@dataclass
class Kept:
    """A member's protection that records the last update it returned, with noise and before encoding."""

    inner: Protection
    into: "dict[int, Vector]"
    place: int

    @property
    def event(self) -> PrivacyEvent | None:
        """As the inner one's."""
        return self.inner.event

    @property
    def each_attempt(self) -> bool:
        """As the inner one's."""
        return self.inner.each_attempt

    def train(self, task: LocalTask, random: RandomSource) -> "TrainingResult | None":
        """As the inner one's."""
        return self.inner.train(task, random)

    def protect(self, change: Vector, random: RandomSource) -> Vector:
        """As the inner one's; the result is recorded."""
        self.into[self.place] = self.inner.protect(change, random)
        return self.into[self.place]

    def encode(self, job: JobDocument, update: Update, cohort: int, random: RandomSource) -> NDArray[np.uint32]:
        """As the inner one's."""
        return self.inner.encode(job, update, cohort, random)


@dataclass(frozen=True)
class Trained:
    """The result of a federation.

    Args:
        versions: global values after each round, (d,) each.
        own: each member's model as it sent it in the last round, (d,) each.
        events: charges of one member's ledger; empty without a guarantee.
        parts: the members' examples.
    """

    bundle: "JobBundle"
    versions: tuple[Vector, ...]
    own: tuple[Vector, ...]
    events: tuple[PrivacyEvent, ...]
    parts: tuple[Sequence[Example], ...]

    @property
    def words(self) -> "PublicWords":
        """The job's words."""
        return words_of(self.bundle.document, self.bundle.public_tokenizer)

    def module(self, values: Vector) -> "Rvae":
        """Return the autoencoder with these values, (d,)."""
        from learning.models import build_blank, load_shared
        from learning.synthesis.model import Rvae

        job, words = self.bundle.document, self.words
        module = build_blank(job.model, len(words.entries), len(job.labels), 0)
        load_shared(module, self.bundle.parameters(values))
        if not isinstance(module, Rvae):
            raise TypeError("the job's model is not an autoencoder")
        return module


def train_rvae(bundle: "JobBundle", parts: Sequence[Sequence[Example]], random: RandomSource | None = None) -> Trained:
    """Train all rounds of the job with members of these examples.

    Args:
        random: source of draws and noise; the operating system's if it is not given.
    """
    job = bundle.document
    changes: dict[int, Vector] = {}
    members = [Member(part, software=_software(changes, place)) for place, part in enumerate(parts)]
    base, versions = bundle.manifest.decode(bundle.weights), list[Vector]()
    for done in federate(bundle, members, job.rounds.count, random):
        versions.append(done.values)
    before = versions[-2] if len(versions) > 1 else base
    own = tuple(before + changes[place] for place in range(len(parts)))
    return Trained(bundle, tuple(versions), own, _events(job, parts), tuple(parts))


def _software(into: dict[int, Vector], place: int) -> Callable[[Protection], Protection]:
    return lambda inner: Kept(inner, into, place)


def _events(job: JobDocument, parts: Sequence[Sequence[Example]]) -> tuple[PrivacyEvent, ...]:
    """Return the charges of the member with the fewest examples, and so the highest rate: histogram, then steps."""
    from learning.mechanisms.protection import protection_of

    event = protection_of(job, min(map(len, parts))).event
    if event is None or job.corpus is None or job.corpus.histogram_std is None:
        return ()
    histogram = histogram_event(job.corpus.histogram_std, len(job.labels), "add-remove")
    return histogram, event.model_copy(update={"steps": event.steps * job.rounds.count})


# ---- corpora --------------------------------------------------------------------------------------------------------


def corpora_of_members(trained: Trained, folder: Path, random: RandomSource | None = None) -> list[Path]:
    """Generate a file for each member from its own last model.

    Labels follow its noisy histogram, or without a mechanism its true counts.
    """
    from learning.synthesis.sampling import sample

    source = SystemRandom() if random is None else random
    job, words = trained.bundle.document, trained.words
    order = job.corpus or CorpusOrder()
    found = []
    for place, (values, part) in enumerate(zip(trained.own, trained.parts, strict=True)):
        counts = np.bincount(label_ids(part, job.labels), minlength=len(job.labels)).astype(np.int64)
        if trained.events and order.histogram_std is not None:
            counts = noised_histogram(counts, order.histogram_std, source)
        texts = sample(trained.module(values), words, counts, order.texts, source, _sampling(job))
        found.append(_written(folder / f"{place}.jsonl", texts, job))
    return found


def corpus_of_operator(
    trained: Trained,
    values: Vector,
    folder: Path,
    count: int,
    random: RandomSource | None = None,
    guidance: float | None = None,
) -> Path:
    """Generate one file from a global model, (d,), with equally many texts for each label.

    Args:
        guidance: None takes the job's.
    """
    from learning.synthesis.sampling import sample

    source = SystemRandom() if random is None else random
    job = trained.bundle.document
    even = np.ones(len(job.labels), dtype=np.int64)
    sampling = _sampling(job)
    if guidance is not None:
        sampling = replace(sampling, guidance=guidance)
    texts = sample(trained.module(values), trained.words, even, count, source, sampling)
    return _written(folder / "operator.jsonl", texts, job)


def rewritten(
    trained: Trained, folder: Path, setting: PublishedSetting | None = None, random: RandomSource | None = None
) -> list[Path]:
    """Make the published variant's files: each member's texts, rewritten one by one.

    It gives no differential privacy guarantee.
    """
    from learning.synthesis.published import rewrite

    source = SystemRandom() if random is None else random
    job, words = trained.bundle.document, trained.words
    found = []
    for place, (values, part) in enumerate(zip(trained.own, trained.parts, strict=True)):
        ids = words.encode([each.text for each in part], label_ids(part, job.labels))
        texts = rewrite(trained.module(values), words, ids, setting or PublishedSetting(), source, _sampling(job))
        found.append(_written(folder / f"{place}.jsonl", texts, job))
    return found


def _sampling(job: JobDocument) -> Any:
    from learning.synthesis.sampling import Sampling

    order = job.corpus or CorpusOrder()
    return Sampling(order.temperature, order.top_k, order.guidance, job.model.max_tokens)


def _written(path: Path, texts: Sequence[Any], job: JobDocument) -> Path:
    from learning.synthesis.writing import write_corpus

    order = job.corpus or CorpusOrder()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_corpus(path, texts, job.labels, max_bytes=order.max_bytes)
    return path


# ---- planted texts --------------------------------------------------------------------------------------------------


def canaries(count: int, words: Sequence[str]) -> list[str]:
    """Return different texts of words drawn from this list, the same every time.

    The words of a text occur together elsewhere only by chance. The first texts are planted; the others are the
    candidates that they are ranked among.
    """
    random = np.random.Generator(np.random.Philox(_SPLIT_SEED))
    usable = [word for word in words if word.isalpha() and len(word) > 3]
    rows = [random.choice(len(usable), _CANARY_WORDS, replace=False) for _ in range(count)]
    return [" ".join(usable[at] for at in row) for row in rows]


def perplexity(trained: Trained, values: Vector, examples: Sequence[Example]) -> float:
    """Return the perplexity of real texts, with z from the prior as in sampling. Use rows that no member has."""
    from learning.synthesis.training import measure

    labels = trained.bundle.document.labels
    ids = trained.words.encode([each.text for each in examples], label_ids(examples, labels))
    return measure(trained.module(values), ids, seed=0).prior_perplexity


def exposures(trained: Trained, planted: Sequence[str], others: Sequence[str]) -> list[float]:
    """Return the exposure of each member's planted text in its own last model, in bits.

    It uses the loss with every word of the decoder's input replaced. The maximum is log2 of one more than the number of
    other texts; chance gives about 1.4.
    """
    import torch

    from learning.synthesis.model import Coins
    from learning.synthesis.quality import exposure

    words, found = trained.words, []
    label = len(trained.bundle.document.labels)
    for place, (canary, values) in enumerate(zip(planted, trained.own, strict=True)):
        module = trained.module(values)
        rows = [canary, *others]
        ids = torch.from_numpy(words.encode(rows, np.full(len(rows), place % label)))
        hidden = torch.zeros(len(ids), ids.shape[1] - 1, dtype=torch.bool)
        with torch.no_grad():
            coins = Coins(torch.zeros(len(ids), module.setting.latent), hidden)
            losses = module.losses(ids, coins).reconstruction.tolist()
        found.append(exposure(losses[0], losses[1:]))
    return found
