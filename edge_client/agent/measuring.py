"""`edge_client evaluate` measures this member's own model on a file of the member's own.

It measures the model that `edge_client export` would write with the same options, in memory: no private parameter and
no text reaches the disk, so a sealed state stays sealed. A model that writes has no private parameters. Its export is
written into the member's cache, measured as the operator measures it (`export.evaluate_writing`), and deleted.

Nothing is sent, and no ledger is opened: a member may look at its own data as often as it likes, as long as nothing
that it learns this way leaves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_client.agent.dialogue_reading import DialogueReading
from edge_client.agent.exporting import check_form, check_tools, write_generator
from edge_client.agent.own_model import UNWATCHED, Fetched, OwnModel, Watch, fetch_own, own_model
from edge_client.agent.runner import Member, RunOptions, load_member
from edge_client.downloads.backbones import Wanted
from edge_client.downloads.cache import BlobCache
from learning.text.corpus import coverage_of, usable_dialogues
from learning.text.data import Skipped, read_data
from learning.text.examples import DataInvalid, Example, RowInvalid, TextRow, label_ids, text_rows
from tacit.job import JobDocument
from tacit.prompt import PromptedModel, reads_pairs, writes
from toolkit.console import ExitCode, fail
from toolkit.install import install_with
from toolkit.interruption import Interruption

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from export.evaluate_writing import Answering, WritingFigures
    from export.figures import Figures

__all__ = ["Measured", "answering_of", "measure_own"]

# Texts that are encoded at once, to bound memory.
_BATCH = 1024
# Rows on which the export of a model that writes is compared with the trained model.
_SAMPLES = 16
# Bytes of an export beside its weights.
_BESIDE = 64 * 2**20
_INSTALL = install_with("edge", "export")


@dataclass(frozen=True)
class Measured:
    """The figures of a member's own model.

    Attributes:
        job: The job's name.
        version: The version's number.
        digest: The version's 32 bytes.
        private: How many values of the model are private to the member.
        figures: The figures on the test file: of predicted labels, or of a model that writes.
        known: How many texts of the test file are also in the member's examples.
        rows: How many texts it has.
        what: What they are: texts or rows.
        skipped: The rows of the test file that were skipped.
        reading: How much of the test file the model reads, in a sentence.
        reading_json: The same for `--json`.
        cut: Whether the measurement was cut off, so that the figures are those of the first rows.
    """

    job: str
    version: int
    digest: bytes
    private: int
    figures: "Figures | WritingFigures"
    known: int
    rows: int
    what: str
    skipped: Skipped
    reading: str
    reading_json: Mapping[str, Any]
    cut: bool = False


def measure_own(
    name: str,
    options: RunOptions,
    test: Path,
    *,
    epochs: int | None = None,
    answering: "Answering | None" = None,
    interruption: Interruption | None = None,
    watch: Watch = UNWATCHED,
) -> Measured:
    """Measures the member's own model.

    Args:
        name: The job's name.
        options: Whose data and machine it is, as for `edge_client run`. Its columns are also those of `test`.
        test: The labelled texts to measure on; for a model that writes, prompts with responses.
        epochs: How long private parameters are adapted on the member's data, as for `export_own`.
        answering: How a model that writes answers the prompts; None: it does not.
        interruption: Cuts the measurement of a model that writes off; the figures are then those of its first rows.
        watch: Callbacks for progress.

    Raises:
        CommandFailed: The input cannot be used, the coordinator cannot be reached, there is nothing to measure, or the
            work was cut off before it had measured anything.
        StoreError: The member's private state cannot be opened.
    """
    for path in (test, options.data):
        if not path.exists():
            fail(f"{path} does not exist; check the path", ExitCode.NOT_FOUND)
    examples, skipped = _read(test, options)
    if skipped:
        watch.say(f"{test}: {skipped.sentence(len(examples))}")
    member = load_member(options)
    if member.skipped:
        watch.say(f"{options.data}: {member.skipped.sentence(len(member.examples))}")
    found = fetch_own(name, member, options, check=check_form)
    if writes(found.job.model):
        return _measured_writing(
            found, member, test, examples, skipped, answering, interruption or Interruption(), watch
        )
    if answering is not None:
        fail(f"job {name} labels texts and writes none; leave out --generate", ExitCode.USAGE)
    # Checked before anything is adapted, which takes long.
    try:
        expected = label_ids(examples, found.job.labels)
        rows = text_rows(examples, pairs=reads_pairs(found.job.model))
    except DataInvalid as error:
        fail(f"{test}: {error}", ExitCode.USAGE)
    own = own_model(found, member, epochs=epochs, watch=watch)
    watch.say(f"measuring version {found.number} of {name} on {len(rows)} texts")
    from export.figures import figures_of

    try:
        figures = figures_of(_logits(own, rows, member.device), expected, found.job.labels)
        coverage = coverage_of(found.job, found.tokenizer, examples)
    except (ValueError, RuntimeError) as error:
        fail(f"version {found.number} of {name} cannot be measured: {error}", ExitCode.FAILED)
    trained = {each.texts for each in member.examples}
    return Measured(
        job=name,
        version=found.number,
        digest=found.digest,
        private=own.private_values,
        figures=figures,
        known=sum(each.texts in trained for each in examples),
        rows=len(rows),
        what="texts",
        skipped=skipped,
        reading=coverage.sentence(found.job.model.max_tokens),
        reading_json=coverage.as_json(found.job.model.max_tokens),
    )


def answering_of(prompts: int | None, temperature: float, seed: int) -> "Answering":
    """How a model that writes is to answer: at most so many prompts, and sampled answers at a temperature with a seed.

    Raises:
        CommandFailed: A package is missing.
    """
    try:
        from export.evaluate_writing import Answering
    except ImportError as error:
        fail(f"measuring answers needs {error.name or error}; {_INSTALL}", ExitCode.USAGE)
    return Answering(prompts=prompts, temperature=temperature, seed=seed)


def _measured_writing(
    found: Fetched,
    member: Member,
    test: Path,
    examples: Sequence[Example],
    skipped: Skipped,
    answering: "Answering | None",
    interruption: Interruption,
    watch: Watch,
) -> Measured:
    job = found.job
    dialogues = [each.dialogue for each in examples if each.dialogue is not None]
    try:
        samples = usable_dialogues(job, examples)[:_SAMPLES]
    except DataInvalid as error:
        fail(f"{test}: {error}", ExitCode.USAGE)
    check_tools()
    try:
        from export.evaluate_writing import evaluate_generator
        from export.figures import EvaluationCut
    except ImportError as error:
        fail(f"measuring a model that writes needs {error.name or error}; {_INSTALL}", ExitCode.USAGE)
    cache = BlobCache(member.home / "cache")
    # About the size of the export. Pinned, so that no other process of this home takes it for a leftover.
    with cache.pin(found.digest), cache.room(found.digest, _size_of(job)) as folder:
        watch.say(f"making the ONNX file of version {found.number} of {job.name}")
        write_generator(found, folder / "model", samples)
        watch.say(f"measuring version {found.number} of {job.name} on {len(dialogues)} rows")
        try:
            with interruption.listening():
                figures = evaluate_generator(folder / "model", dialogues, answering, cancelled=interruption.asked)
        except EvaluationCut:
            fail("interrupted before a row was measured", ExitCode.INTERRUPTED)
        except DataInvalid as error:
            fail(f"{test}: {error}", ExitCode.USAGE)
        except (ValueError, RuntimeError) as error:
            fail(f"version {found.number} of {job.name} cannot be measured: {error}", ExitCode.FAILED)
    reading = DialogueReading.of(job, found.tokenizer, examples)
    trained = {each.dialogue for each in member.examples}
    return Measured(
        job=job.name,
        version=found.number,
        digest=found.digest,
        private=0,
        figures=figures,
        known=sum(each in trained for each in dialogues),
        rows=len(dialogues),
        what="rows",
        skipped=skipped,
        reading=reading.sentence(job),
        reading_json=reading.as_json(job),
        # A signal at the last row left nothing out.
        cut=figures.cut,
    )


def _size_of(job: JobDocument) -> int:
    """The bytes of a writer's export: its backbone's, and some for the graph and the tokenizer."""
    return (Wanted.of(job.model).size if isinstance(job.model, PromptedModel) else 0) + _BESIDE


def _read(test: Path, options: RunOptions) -> tuple[list[Example], Skipped]:
    try:
        rows = read_data(
            test,
            text=options.text,
            label=options.label,
            text_b=options.text_b,
            prompt=options.prompt,
            response=options.response,
            messages=options.messages,
            skip_invalid=options.skip_invalid,
            rows_for="texts or dialogues",
        )
    except RowInvalid as error:
        fail(f"{error}; or skip such rows with --skip-invalid", ExitCode.USAGE)
    except DataInvalid as error:
        fail(str(error), ExitCode.USAGE)
    return rows.examples, rows.skipped


def _logits(own: OwnModel, rows: Sequence[TextRow], device: str) -> "NDArray[np.float32]":
    """The logits of the member's own model, (N, L)."""
    import numpy as np

    from learning.models.assembly import whole_model
    from learning.training.local import logits_of

    found = own.fetched
    module, encoder = whole_model(
        found.job,
        found.manifest,
        found.version,
        found.tokenizer,
        own.private,
        mixture=own.mixture,
        backbone=found.backbone,
        frozen=found.frozen,
    )
    parts = [
        logits_of(module, encoder.encode(rows[first : first + _BATCH]), device=device)
        for first in range(0, len(rows), _BATCH)
    ]
    return np.concatenate(parts)
