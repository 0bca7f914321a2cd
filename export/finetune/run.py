"""Trains a classifier in the data center on members' synthetic corpora, and writes one bundle for `predict`.

Guarantees: the test file is used only for the figures (words, stopping and settings do not depend on it); the figures
are those of the ONNX file that is written, run by onnxruntime; provenance.json in the bundle says whose texts it was
trained on, under which promise, and how; nothing is written unless everything can be.

Order: labels, words, a seeded model, training with a validation split of the synthetic texts, ONNX, figures, the
bundle.

The classifier is a function of the corpora and of public numbers. So it promises what they promise and no more: it is
differentially private only if every corpus is (`export.finetune.corpora.promise_of`).
"""

import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

import numpy as np
from pydantic import Field, ValidationError

from export.bundle import starting_model
from export.finetune.corpora import (
    MemberCorpus,
    all_examples,
    federation_of_corpora,
    labels_of,
    promise_of,
    same_texts,
)
from export.finetune.scores import TestScores, scores_of
from export.finetune.words import base_pieces, words_of_corpora
from export.onnx import export_module
from export.predictor import Predictor
from learning.text.corpus import encoder_of
from learning.text.data import data_digest, read_examples
from learning.text.encoder import TextEncoder
from learning.text.examples import DataInvalid, Example, check_labels, label_places
from learning.training.device import pick_device
from tacit.bundle import check_place, read_bundle, write_bundle
from tacit.corpus import Promise
from tacit.documents import AtMost, Digest, Document, DocumentInvalid, Location, Part, Short, sentence_of
from tacit.job import JobSpec, Training, VocabularyFile
from tacit.limits import MAX_LABELS, MAX_MEMBERS
from tacit.manifest import Manifest
from tacit.model import BiLSTMModel, TransformerModel

if TYPE_CHECKING:
    from export.finetune.training import Epoch, Fitted
    from learning.models import TextClassifier

__all__ = [
    "LEARNING_RATES",
    "PROVENANCE",
    "CorpusUsed",
    "Given",
    "Provenance",
    "Settings",
    "TestFile",
    "TrainingRun",
    "finetune",
    "promise_in_words",
]

PROVENANCE: Final = "provenance.json"
# Defaults.
LEARNING_RATES: Final = {"bilstm": 0.002, "transformer": 5e-5}
_SAMPLES = 32


class Settings(Part):
    """How a classifier is trained; stored with it.

    Args:
        model: a BiLSTM over words, or a pretrained encoder under two linear layers with tanh between.
        base: the encoder's folder, or its name on the hub.
        table: word vectors in GloVe's text format that the BiLSTM starts from.
        embedding: width of the BiLSTM's embedding.
        hidden: width of the BiLSTM's state.
        max_tokens: longer texts are cut.
        epochs: maximum number of epochs.
        patience: training stops after this many epochs in a row without a lower validation loss.
        batch: texts per step.
        learning_rate: Adam's. None: that of `LEARNING_RATES`.
        seed: of weights, split and order.
    """

    model: Literal["bilstm", "transformer"] = "bilstm"
    base: Location | None = Field(default=None, min_length=1)
    table: Location | None = Field(default=None, min_length=1)
    embedding: int = Field(default=100, ge=1, le=4096)
    hidden: int = Field(default=128, ge=1, le=4096)
    max_tokens: int = Field(default=64, ge=3, le=4096)
    epochs: int = Field(default=20, ge=1, le=1000)
    patience: int = Field(default=3, ge=1, le=1000)
    batch: int = Field(default=32, ge=1, le=65536)
    learning_rate: float | None = Field(default=None, gt=0, le=10)
    seed: int = Field(default=0, ge=0, lt=2**63)

    @property
    def rate(self) -> float:
        """The learning rate in force."""
        return LEARNING_RATES[self.model] if self.learning_rate is None else self.learning_rate


class CorpusUsed(Part):
    """One member's corpus among those trained on.

    Args:
        member: the member's name.
        corpus: SHA-256 of its file.
        rows: number of rows.
        promise: the promise of its texts.
        statement: digest of the member's statement. None: there is none.
        mechanism: the mechanism that the statement names.
        round: the round that the statement names.
    """

    member: Short
    corpus: Digest
    rows: int = Field(ge=1)
    promise: Promise
    statement: Digest | None = None
    mechanism: Short | None = None
    round: int | None = None


class TrainingRun(Part):
    """What the training did.

    Args:
        rows: synthetic rows trained on.
        validation_rows: synthetic rows validated on.
        epochs: epochs trained.
        kept: the epoch whose weights were kept.
        validation_loss: its loss on the validation rows. None: there are none.
        validation_accuracy: its accuracy on the validation rows. None: there are none.
    """

    rows: int = Field(ge=1)
    validation_rows: int = Field(ge=0)
    epochs: int = Field(ge=1)
    kept: int = Field(ge=1)
    validation_loss: float | None
    validation_accuracy: float | None


class TestFile(Part):
    """The operator's test file, by its SHA-256. also_synthetic: number of rows whose text is also a synthetic one."""

    digest: Digest
    also_synthetic: int = Field(ge=0)
    scores: TestScores


class Provenance(Document):
    """The content of provenance.json.

    Args:
        federation: whose authorities certify the corpora's statements. None: there are no statements.
        version: digest of the weights.
        without_text: labels for which no corpus has a row.
    """

    # Enough for a corpus from each of `MAX_MEMBERS` members, and figures for each of `MAX_LABELS` labels.
    max_bytes: ClassVar[int] = 8 * 1024 * 1024

    federation: Digest | None
    job: Short
    job_document: Digest | None
    version: Digest
    promise: Promise
    corpora: Annotated[tuple[CorpusUsed, ...], AtMost(MAX_MEMBERS)] = Field(min_length=1)
    labels: Annotated[tuple[Short, ...], AtMost(MAX_LABELS)]
    without_text: Annotated[tuple[Short, ...], AtMost(MAX_LABELS)]
    settings: Settings
    training: TrainingRun
    test: TestFile


@dataclass(frozen=True, slots=True)
class Given:
    """What to train on.

    Args:
        job: the job's name.
        corpora: the members' corpora.
        labels: the job's labels. None: the job is not at hand.
        job_document: digest of the job's document. None: the job is not at hand.
        words: the job's public list of words. Empty: the job is not at hand.
    """

    job: str
    corpora: Sequence[MemberCorpus]
    labels: tuple[str, ...] | None = None
    job_document: bytes | None = None
    words: Sequence[str] = ()


def promise_in_words(promise: Promise) -> str:
    """The promise in a few words, for every place that shows a classifier."""
    from learning.synthesis.setting import NO_GUARANTEE

    if promise == "none":
        return NO_GUARANTEE
    return "differentially private in each text of a member, as recorded in the members' ledgers"


def finetune(
    given: Given,
    test: Path,
    out: Path,
    settings: Settings,
    *,
    text: str = "text",
    label: str = "label",
    device: str = "auto",
    report: Callable[[str], None] = lambda _: None,
    epoch: "Callable[[Epoch], None]" = lambda _: None,
) -> Provenance:
    """Trains a classifier, writes the model bundle `out`, and returns its provenance.

    Args:
        given: what to train on.
        test: the test file.
        out: the bundle's folder.
        settings: how to train.
        text: the test file's column of texts.
        label: the test file's column of labels.
        device: as for `pick_device`.
        report: called with sentences that a reader of the figures should know.
        epoch: called after each epoch.

    Raises:
        DataInvalid: the test file or the corpora cannot be used.
        DocumentInvalid: the settings are not valid.
        VocabularyInvalid, TableInvalid, EncoderInvalid, CheckpointInvalid: a base or a table cannot be used.
        DeviceUnavailable, TrainingDiverged, BundleInvalid, ParityFailed: as their names say.
    """
    # Checked before the work, and again when writing.
    check_place(out, "model")
    device = pick_device(device)
    expected = read_examples(test, text=text, label=label)
    examples, labels = all_examples(given.corpora), labels_of(given.corpora, given.labels)
    test_labels = _test_labels(expected, labels, strict=given.labels is not None)
    absent = _without_text(examples, labels, test_labels, report)
    same = same_texts(examples, expected)
    if same:
        report(
            f"{same:,} of {len(expected):,} test rows have a text that is also a synthetic one; short ones can be by "
            "chance, but if the test file was ever a member's data, its figures are too good"
        )
    with tempfile.TemporaryDirectory(prefix="tacit-finetune-") as folder:
        scratch = Path(folder)
        module, encoder, tokenizer = _starting(given, examples, labels, settings, scratch, report)
        validated, fitted = _train(module, encoder, examples, labels, settings, device, epoch, report)
        version = _version(module)
        samples = _samples(examples)
        export_module(
            module, encoder, tokenizer, scratch / "model", samples, labels=labels, job=given.job, version=version
        )
        scores = _scores(Predictor.load(scratch / "model"), expected, test_labels)
        made = read_bundle(scratch / "model", "model")
        provenance = Provenance(
            federation=federation_of_corpora(given.corpora),
            job=given.job,
            job_document=given.job_document or _stated_job(given.corpora),
            version=version,
            promise=promise_of(given.corpora),
            corpora=tuple(map(_used, given.corpora)),
            labels=labels,
            without_text=absent,
            settings=_told(settings),
            training=_run(validated, len(examples), fitted),
            test=TestFile(digest=data_digest(test), also_synthetic=same, scores=scores),
        )
        write_bundle(out, "model", {**made.files, PROVENANCE: provenance.canonical()}, model=made.index.model)
    return provenance


def _test_labels(expected: Sequence[Example], labels: Sequence[str], *, strict: bool) -> tuple[str, ...]:
    """The labels to score with.

    strict: whether a test row with a label that the model does not have is an error. Otherwise such labels come after
    the others, and each of their rows counts as wrong.

    Raises:
        DataInvalid: there is such a row and `strict`, or no test row has a known label.
    """
    known = set(labels)
    if strict or not any(each.label in known for each in expected):
        check_labels(expected, labels)
    return (*labels, *sorted({each.label for each in expected if each.label is not None} - known))


def _without_text(
    examples: Sequence[Example], labels: Sequence[str], test_labels: Sequence[str], report: Callable[[str], None]
) -> tuple[str, ...]:
    counted = Counter(each.label for each in examples)
    absent = tuple(label for label in test_labels if not counted[label])
    if absent:
        report(
            f"no corpus has a text of {', '.join(map(repr, absent))}: the classifier never learns "
            f"{'this label' if len(absent) == 1 else 'these labels'}, and test rows of "
            f"{'it' if len(absent) == 1 else 'them'} count as wrong"
        )
    if len(labels) - sum(label in labels for label in absent) < 2:
        raise DataInvalid(
            "all rows of the corpora have one label, but a classifier needs two; wait for other members' corpora"
        )
    return absent


def _starting(
    given: Given,
    examples: Sequence[Example],
    labels: tuple[str, ...],
    settings: Settings,
    scratch: Path,
    report: Callable[[str], None],
) -> "tuple[TextClassifier, TextEncoder, bytes]":
    """Makes the seeded module with its head, its encoder and its tokenizer, as for a job."""
    model: BiLSTMModel | TransformerModel
    if settings.model == "bilstm":
        if settings.base is not None:
            raise DocumentInvalid("base: a BiLSTM has none; leave it out, or write model = transformer")
        # Words that no corpus has are useful only with vectors from a table.
        public = given.words if settings.table is not None else ()
        entries = words_of_corpora((each.text for each in examples), public)
        model = BiLSTMModel(
            embedding=settings.embedding, hidden=settings.hidden, pooling="max", max_tokens=settings.max_tokens
        )
    else:
        if settings.base is None:
            raise DocumentInvalid("base: a transformer needs one; name a folder, or owner/name on the hub")
        if settings.table is not None:
            raise DocumentInvalid("table: a transformer has its base's vectors; leave it out")
        entries = base_pieces(settings.base)
        model = TransformerModel(base=settings.base, max_tokens=settings.max_tokens)
    (scratch / "words.txt").write_text("\n".join(entries) + "\n", encoding="utf-8", newline="\n")
    vocabulary = VocabularyFile(
        kind="words" if settings.model == "bilstm" else "wordpiece",
        file="words.txt",
        pretrained=None if settings.table is None else str(Path(settings.table).absolute()),
    )
    try:
        spec = JobSpec(name=given.job, labels=labels, model=model, vocabulary=vocabulary, seed=settings.seed)
    except ValidationError as error:
        raise DocumentInvalid(f"job {given.job}: {sentence_of(error)}") from error
    start = starting_model(spec, scratch, report)
    module, tokenizer = start.module, start.tokenizer
    if tokenizer is None:  # The vocabulary is a file, so there is one; for the type checker.
        raise DocumentInvalid("a classifier has one vocabulary")
    if settings.model == "transformer":
        from export.finetune.training import with_two_layers

        with_two_layers(module, settings.seed)
    encoder = encoder_of(spec, tokenizer)
    if not isinstance(encoder, TextEncoder):
        raise DocumentInvalid("a classifier of synthetic texts reads one text at a time")
    return module, encoder, tokenizer


def _train(
    module: "TextClassifier",
    encoder: TextEncoder,
    examples: Sequence[Example],
    labels: Sequence[str],
    settings: Settings,
    device: str,
    epoch: "Callable[[Epoch], None]",
    report: Callable[[str], None],
) -> "tuple[int, Fitted]":
    """Trains the module. Returns the number of validation rows, and what the training did."""
    from export.finetune.training import fit, validation_rows

    places, texts = label_places(examples, labels), [each.text for each in examples]
    validation = validation_rows(texts, places, settings.seed)
    if not validation.any():
        report(
            f"{len(examples):,} rows are too few to validate on a tenth of each label's; all {settings.epochs} epochs "
            "are trained, and the last one is kept"
        )
    recipe = Training(epochs=settings.epochs, batch=settings.batch, optimiser="adam", learning_rate=settings.rate)
    fitted = fit(
        module,
        encoder.encode(texts),
        places,
        validation,
        recipe,
        patience=settings.patience,
        seed=settings.seed,
        device=device,
        report=epoch,
    )
    return int(validation.sum()), fitted


def _version(module: "TextClassifier") -> bytes:
    """SHA-256 of all weights, computed as for a job's version."""
    tensors = {name: each.detach().numpy() for name, each in module.named_parameters()}
    manifest = Manifest.of(tensors)
    return hashlib.sha256(manifest.encode(manifest.flatten(tensors))).digest()


def _samples(examples: Sequence[Example]) -> list[str]:
    """Picks texts of all lengths, from the shortest to the longest."""
    by_length = sorted({each.text for each in examples}, key=lambda each: (len(each), each))
    return [by_length[at] for at in sorted(set(np.linspace(0, len(by_length) - 1, _SAMPLES).astype(int).tolist()))]


def _scores(predictor: Predictor, expected: Sequence[Example], labels: Sequence[str]) -> TestScores:
    predicted = predictor.logits([each.text for each in expected]).argmax(axis=1).astype(np.int64)
    return scores_of(label_places(expected, labels), predicted, labels)


def _stated_job(corpora: Sequence[MemberCorpus]) -> bytes | None:
    return next((each.statement.job_document for each in corpora if each.statement is not None), None)


def _used(corpus: MemberCorpus) -> CorpusUsed:
    statement = corpus.statement
    return CorpusUsed(
        member=corpus.member,
        corpus=corpus.digest,
        rows=len(corpus.examples),
        promise=corpus.promise,
        statement=None if statement is None else statement.digest(),
        mechanism=None if statement is None else statement.mechanism,
        round=None if statement is None else statement.round,
    )


def _told(settings: Settings) -> Settings:
    """The settings with the learning rate in force, and without folder names of this machine."""
    names = {key: Path(value).name for key, value in (("table", settings.table), ("base", settings.base)) if value}
    if settings.base is not None and not Path(settings.base).expanduser().is_dir():
        names["base"] = settings.base
    return settings.model_copy(update={**names, "learning_rate": settings.rate})


def _run(validated: int, rows: int, fitted: "Fitted") -> TrainingRun:
    return TrainingRun(
        rows=rows - validated,
        validation_rows=validated,
        epochs=len(fitted.epochs),
        kept=fitted.best.number,
        validation_loss=fitted.best.validation_loss,
        validation_accuracy=fitted.best.validation_accuracy,
    )
