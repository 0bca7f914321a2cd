"""`coordinator finetune`: trains a classifier on the synthetic texts that members released.

The server takes no part: this command reads the corpora, trains on this machine with the code of `export`, and measures
the model that it wrote. It needs the export extra.
"""

import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from coordinator.cli.common import (
    Dir,
    Json,
    Operator,
    operator_at_hand,
    operator_folder,
    operator_stub,
    run,
    table,
)
from toolkit.console import ExitCode, fail, print_json
from toolkit.install import install_with

__all__ = ["finetune"]


def finetune(
    job: Annotated[str, typer.Argument(help="The job whose members released synthetic texts.")],
    test: Annotated[
        Path, typer.Option(help="Labelled examples to measure on: .jsonl, .csv or .tsv (also .gz), .parquet, .arrow.")
    ],
    out: Annotated[Path, typer.Option(help="The folder to create.")],
    corpora: Annotated[
        Path | None,
        typer.Option(
            help="The folder that `coordinator job corpora` wrote. Default: fetch from the coordinator.",
            show_default=False,
        ),
    ] = None,
    unverified: Annotated[
        bool,
        typer.Option(
            "--unverified",
            help="Also accept files in --corpora that lack a member's statement, or part of its proof.",
        ),
    ] = False,
    model: Annotated[
        Literal["bilstm", "transformer"],
        typer.Option(help="A BiLSTM over words, or a pretrained encoder with two linear layers on top."),
    ] = "bilstm",
    base: Annotated[
        str | None,
        typer.Option(help="The transformer's encoder: a folder, or OWNER/NAME on the hub.", show_default=False),
    ] = None,
    vectors: Annotated[
        Path | None,
        typer.Option(help="Word vectors that the BiLSTM starts from, in GloVe's text format.", show_default=False),
    ] = None,
    words: Annotated[
        Path | None,
        typer.Option(
            help="A public word list. Its words that --vectors covers join the words of the corpora. Default: the "
            "job's words, unless --corpora is given.",
            show_default=False,
        ),
    ] = None,
    embedding: Annotated[int, typer.Option(min=1, max=4096, help="Width of the BiLSTM's word vectors.")] = 100,
    hidden: Annotated[int, typer.Option(min=1, max=4096, help="Width of each direction of the BiLSTM.")] = 128,
    max_tokens: Annotated[
        int, typer.Option(min=3, max=4096, help="Longest text, in tokens; longer ones are cut.")
    ] = 64,
    epochs: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of epochs.")] = 20,
    patience: Annotated[
        int, typer.Option(min=1, max=1000, help="Stop after this many epochs without a lower validation loss.")
    ] = 3,
    batch: Annotated[int, typer.Option(min=1, max=65536, help="Texts per step.")] = 32,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="Adam's learning rate. Default: 0.002 for bilstm, 0.00005 for transformer.", show_default=False
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, order and validation split.")] = 0,
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"], typer.Option(help="Where to train.")] = "auto",
    text: Annotated[str, typer.Option(help="The column of --test that holds the text.")] = "text",
    label: Annotated[str, typer.Option(help="The column of --test that holds the label.")] = "label",
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Train a classifier on the corpora that members released for a job, measure it, and write it as ONNX."""
    tools = _tools()
    known = None
    if corpora is not None:
        known = _known_federation(operator_at_hand(operator, folder))
        given = _from_folder(tools, job, corpora, words, unverified, known)
    elif unverified:
        fail("--unverified applies to files in a folder; name the folder with --corpora", ExitCode.USAGE)
    else:
        where = operator_folder(operator, folder)
        given = _from_coordinator(tools, job, where, words, spoken=vectors is not None, quiet=as_json)
    settings = _settings(
        tools,
        model=model,
        base=base,
        table=None if vectors is None else str(vectors),
        embedding=embedding,
        hidden=hidden,
        max_tokens=max_tokens,
        epochs=epochs,
        patience=patience,
        batch=batch,
        learning_rate=learning_rate,
        seed=seed,
    )
    if not as_json:
        typer.echo(_opening(tools, given))
    if corpora is not None and known is None:
        _say_federation(tools.federation_of_corpora(given.corpora), err=as_json)
    try:
        provenance = tools.finetune(
            given,
            test,
            out,
            settings,
            text=text,
            label=label,
            device=device,
            report=lambda sentence: typer.echo(f"  {sentence}", err=True),
            epoch=lambda found: typer.echo(f"  {_epoch_line(found)}", err=True),
        )
    except ImportError as error:
        fail(
            f"writing an ONNX file needs {error.name or error}; {install_with('coordinator', 'export')}",
            ExitCode.USAGE,
        )
    except (ValueError, OSError) as error:
        fail(str(error), ExitCode.NOT_FOUND if not test.exists() else ExitCode.USAGE)
    except (RuntimeError, tools.diverged) as error:
        fail(str(error), ExitCode.FAILED)
    if as_json:
        print_json({"out": str(out), **provenance.model_dump(mode="json", by_alias=True)})
        return
    _show(tools, provenance, out)


@dataclass(frozen=True)
class _Tools:
    """The functions of `export`, imported once they are needed."""

    finetune: Any
    settings: Any
    given: Any
    read_corpora: Any
    federation_of_corpora: Any
    read_words: Any
    words_of_tokenizer: Any
    promise_of: Any
    promise_in_words: Any
    diverged: Any


def _tools() -> _Tools:
    try:
        # This imports torch, which everything below needs.
        import export.finetune.training  # noqa: F401
        from export.finetune.corpora import federation_of_corpora, promise_of, read_corpora
        from export.finetune.run import Given, Settings, promise_in_words
        from export.finetune.run import finetune as train
        from export.finetune.words import read_words, words_of_tokenizer
        from learning.training.outcome import TrainingDiverged
    except ImportError as error:
        fail(
            f"training a classifier needs the model libraries ({error.name or error} is missing); "
            f"{install_with('coordinator', 'export')}, here or on another machine with the operator's folder",
            ExitCode.USAGE,
        )
    return _Tools(
        train,
        Settings,
        Given,
        read_corpora,
        federation_of_corpora,
        read_words,
        words_of_tokenizer,
        promise_of,
        promise_in_words,
        TrainingDiverged,
    )


def _settings(tools: _Tools, **values: object) -> Any:
    from pydantic import ValidationError

    from tacit.documents import sentence_of

    try:
        return tools.settings(**values)
    except ValidationError as error:
        fail(sentence_of(error), ExitCode.USAGE)


def _known_federation(where: Path | None) -> bytes | None:
    """Returns the operator's own federation, or None without an operator's folder.

    Raises:
        CommandFailed: the folder cannot be read.
    """
    from coordinator.config import load_operator
    from tacit.documents import DocumentInvalid

    try:
        return None if where is None else load_operator(where).config.federation
    except DocumentInvalid as error:
        fail(str(error), ExitCode.USAGE)


def _say_federation(found: bytes | None, *, err: bool) -> None:
    """Prints which federation the corpora in a folder prove themselves for, for the user to compare."""
    if found is not None:
        typer.echo(
            f"The folder proves whose these texts are only for federation {found.hex()}, which the folder's author may "
            "have invented. Compare it with what `coordinator authority status` prints, or name your operator's folder "
            "with --operator.",
            err=err,
        )


def _from_folder(
    tools: _Tools, job: str, corpora: Path, words: Path | None, unverified: bool, federation: bytes | None
) -> Any:
    """Reads the training texts from a folder that `coordinator job corpora` or `coordinator sample` wrote.

    The corpora must belong to `federation`, if that is known.
    """
    try:
        found = tools.read_corpora(corpora, job, unverified=unverified, federation=federation)
        return tools.given(job=job, corpora=found, words=() if words is None else tools.read_words(words))
    except (ValueError, OSError) as error:
        fail(str(error), ExitCode.NOT_FOUND if not corpora.is_dir() else ExitCode.USAGE)


def _from_coordinator(tools: _Tools, job: str, where: Path, words: Path | None, *, spoken: bool, quiet: bool) -> Any:
    """Fetches the training texts from the coordinator: the corpora, and the job's labels.

    With `spoken` it also fetches the job's words, unless the operator brings a list.
    """
    from coordinator.cli.corpora import download_corpora

    with tempfile.TemporaryDirectory(prefix="tacit-corpora-") as scratch:
        folder = Path(scratch) / "corpora"

        async def work() -> "tuple[Any, bytes | None]":
            from tacit.blobs import fetch_blob

            listed = await download_corpora(where, job, folder, quiet=quiet)
            _check_given(job, listed)
            if not spoken or words is not None or listed.job.tokenizer is None:
                return listed, None
            tokenizer = bytearray()
            async with operator_stub(where) as stub:
                await fetch_blob(stub.FetchBlob, listed.job.tokenizer, tokenizer)
            return listed, bytes(tokenizer)

        listed, tokenizer = run(work())
        found = _from_folder(tools, job, folder, words, False, _known_federation(where))
    public = found.words if tokenizer is None else tools.words_of_tokenizer(tokenizer)
    return replace(found, labels=listed.job.labels, job_document=listed.document, words=public)


def _check_given(job: str, listed: Any) -> None:
    """Checks that at least one member released a corpus.

    Raises:
        CommandFailed: none did; the sentence says why.
    """
    answers = Counter(each.answer for each in listed.members)
    if answers["given"]:
        return
    if listed.status != "finished":
        fail(f"job {job} is {listed.status}; members release texts only once it is finished", ExitCode.REFUSED)
    fail(
        f"no member has released a corpus for job {job}, so there is nothing to train on: "
        f"{answers['declined']} of its members declined, and {answers['awaited']} have yet to answer",
        ExitCode.REFUSED,
    )


def _opening(tools: _Tools, given: Any) -> str:
    rows = sum(len(each.examples) for each in given.corpora)
    without = [each.member for each in given.corpora if each.promise == "none"]
    said = tools.promise_in_words(tools.promise_of(given.corpora))
    whose = f" ({', '.join(without)})" if without and len(without) < len(given.corpora) else ""
    found = len(given.corpora)
    return f"{rows:,} synthetic texts in {found} {'corpus' if found == 1 else 'corpora'}: {said}{whose}."


def _epoch_line(found: Any) -> str:
    line = f"epoch {found.number}: loss {found.loss:.4f}"
    if found.validation_loss is None:
        return line
    return f"{line}, validation loss {found.validation_loss:.4f}, accuracy {100 * found.validation_accuracy:.1f} %"


def _show(tools: _Tools, provenance: Any, out: Path) -> None:
    scores, run = provenance.test.scores, provenance.training
    rows = [
        [
            each.label,
            f"{each.rows:,}",
            *(f"{100 * value:.1f} %" for value in (each.precision, each.recall)),
            f"{each.f1:.3f}",
        ]
        for each in scores.labels
    ]
    typer.echo(
        f"Trained {run.epochs} epochs on {run.rows:,} texts and kept epoch {run.kept}.\n"
        f"Test, {scores.rows:,} rows: accuracy {100 * scores.accuracy:.2f} % (standard error "
        f"{100 * scores.standard_error:.2f}), macro F1 {scores.macro_f1:.3f}; always answering "
        f"{scores.majority_label!r}: {100 * scores.majority:.2f} %.\n\n"
        + table(["LABEL", "ROWS", "PRECISION", "RECALL", "F1"], rows)
    )
    typer.echo(
        f"\nWrote {out} ({provenance.version.hex()[:16]}): {tools.promise_in_words(provenance.promise)}. "
        f"{out / 'provenance.json'} lists whose texts are in it."
    )
