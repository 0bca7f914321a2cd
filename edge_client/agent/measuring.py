"""`edge_client evaluate` measures this member's own model on a file of the member's own.

It measures the model that `edge_client export` would write with the same options, in memory: no private parameter and
no text reaches the disk, so a sealed state stays sealed. Nothing is sent, and no ledger is opened: a member may look at
its own data as often as it likes, as long as nothing that it learns this way leaves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edge_client.agent.own_model import UNWATCHED, OwnModel, Watch, fetch_own, own_model
from edge_client.agent.runner import RunOptions, load_member
from learning.text.corpus import coverage_of
from learning.text.coverage import Coverage
from learning.text.data import DataInvalid, Example, RowInvalid, Skipped, TextRow, label_ids, read_data, text_rows
from tacit.prompt import reads_pairs, writes
from toolkit.console import ExitCode, fail

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from export.figures import Figures

__all__ = ["Measured", "measure_own"]

# Texts that are encoded at once, to bound memory.
_BATCH = 1024


@dataclass(frozen=True)
class Measured:
    """The figures of a member's own model.

    Attributes:
        job: The job's name.
        version: The version's number.
        digest: The version's 32 bytes.
        private: How many values of the model are private to the member.
        figures: The figures on the test file.
        coverage: How much of the test file the model reads.
        max_tokens: The most tokens that it reads of a text.
        known: How many texts of the test file are also in the member's examples.
        skipped: The rows of the test file that were skipped.
    """

    job: str
    version: int
    digest: bytes
    private: int
    figures: "Figures"
    coverage: Coverage
    max_tokens: int
    known: int
    skipped: Skipped


def measure_own(
    name: str, options: RunOptions, test: Path, *, epochs: int | None = None, watch: Watch = UNWATCHED
) -> Measured:
    """Measures the member's own model.

    Args:
        name: The job's name.
        options: Whose data and machine it is, as for `edge_client run`. Its columns are also those of `test`.
        test: The labelled texts to measure on.
        epochs: How long private parameters are adapted on the member's data, as for `export_own`.
        watch: Callbacks for progress.

    Raises:
        CommandFailed: The input cannot be used, the coordinator cannot be reached, or there is nothing to measure.
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
    found = fetch_own(name, member, options)
    if writes(found.job.model):
        fail(
            f"the model of {name} writes, and this command counts right labels; the operator measures it with "
            f"`coordinator evaluate {name}`",
            ExitCode.USAGE,
        )
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
        coverage=coverage,
        max_tokens=found.job.model.max_tokens,
        known=sum(each.texts in trained for each in examples),
        skipped=skipped,
    )


def _read(test: Path, options: RunOptions) -> tuple[list[Example], Skipped]:
    try:
        rows = read_data(
            test,
            text=options.text,
            label=options.label,
            text_b=options.text_b,
            skip_invalid=options.skip_invalid,
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
