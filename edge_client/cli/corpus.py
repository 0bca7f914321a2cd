"""`edge_client corpus ...` shows the synthetic text that this member made for a job, and decides on its release.

It works offline. A running `edge_client run` sees a decision within seconds; otherwise the next start carries it out.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_client.cli.options import Home, Json
from toolkit.console import ExitCode, fail, json_requested, print_json, printable
from toolkit.text import MAX_SHOWN, clean

if TYPE_CHECKING:
    from edge_client.corpus_release.folder import Choice, CorpusFolder, CorpusState
    from tacit.corpus import CorpusStatement

__all__ = ["app"]

app = typer.Typer(
    help="Read the synthetic text made for a job, then approve or veto its release.", no_args_is_help=True
)

Job = Annotated[str, typer.Argument(help="The job's name.")]

# How each stage reads to the owner.
_STAGES = {
    "made": "waits for your decision",
    "approved": "approved; `{run}` sends it when it next runs",
    "sending": "being sent",
    "received": "released; the coordinator has it",
    "refused": "refused by the coordinator",
    "vetoed": "vetoed; its texts are deleted",
    "withheld": "withheld; there are no texts",
}


@app.command("list")
def list_(home: Home = None, as_json: Json = False) -> None:
    """List the jobs that a corpus was made for, and the state of each corpus."""
    from edge_client.corpus_release.folder import corpora
    from edge_client.identity.home import home_path

    folder = home_path(home)
    found = [(each, state) for each in corpora(folder) if (state := each.state()) is not None]
    for each, state in found:
        if as_json or json_requested():
            print_json(_summary(each, state))
            continue
        size = "" if state.made is None else f", {state.made.rows} texts, {state.made.bytes:,} bytes"
        typer.echo(
            printable(
                f"{each.job}: {_said(each, state)}{size}, from the data set {state.data}"
                f"{f' ({state.detail})' if state.detail else ''}"
            )
        )
    if not found and not (as_json or json_requested()):
        typer.echo(f"{folder} holds no corpus: no job that orders synthetic text is finished.")


@app.command()
def show(
    job: Job,
    rows: Annotated[int, typer.Option(min=0, help="How many rows to print.")] = 10,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Print where the file is, what it promises, the model behind it, its labels, and some of its rows."""
    from edge_client.corpus_release.folder import CorpusUnusable

    folder, state = _found(home, job)
    summary = _summary(folder, state)
    statement: CorpusStatement | None = None
    texts: list[dict[str, Any]] = []
    if _stage(folder, state) not in ("vetoed", "withheld"):
        try:
            statement = folder.statement(state)
            texts = [json.loads(line) for line in folder.texts(state).splitlines()[:rows]]
        except CorpusUnusable as error:
            fail(str(error), ExitCode.FAILED)
        summary["statement"] = statement.model_dump(mode="json", by_alias=True)
        summary["promise"] = _promise(statement)
    if as_json or json_requested():
        print_json({**summary, "texts": texts})
        return
    typer.echo(printable(f"{job}: {_said(folder, state)}{f' ({state.detail})' if state.detail else ''}"))
    if statement is None:
        return
    typer.echo(f"  file     {folder.file}")
    typer.echo(f"           {statement.rows} texts, {statement.bytes:,} bytes, SHA-256 {statement.corpus.hex()}")
    typer.echo(printable(f"  made of  data set {state.data}, and sent by `{_run_of(state)}`"))
    typer.echo(f"  promise  {_promise(statement)}")
    typer.echo(f"  model    as this member trained it in round {statement.round}, under {statement.mechanism}")
    labels = ", ".join(f"{each.label} {each.rows}" for each in statement.labels)
    by = "as in your data, with noise, and charged" if statement.histogram == "noised" else "in equal parts"
    typer.echo(f"  labels   {printable(labels)} ({by})")
    for each in texts:
        # A generated text may hold control characters, which the terminal must not see.
        typer.echo(f"    {printable(each['label'])}: {clean(str(each['text']), MAX_SHOWN)}")
    if _stage(folder, state) == "sending":
        typer.echo(f"`edge_client corpus veto {job}` still recalls it: the coordinator is told, and deletes it.")
    if state.stage == "made":
        typer.echo(
            f"Read the whole file. Then `edge_client corpus approve {job}` releases it, whole and unchanged: an "
            f"edited file no longer matches its statement and is refused. `edge_client corpus veto {job}` deletes it."
        )


@app.command()
def approve(job: Job, home: Home = None, as_json: Json = False) -> None:
    """Release the corpus: `edge_client run` sends it to the coordinator."""
    _decide(home, job, "approve", as_json)


@app.command()
def veto(job: Job, home: Home = None, as_json: Json = False) -> None:
    """Withhold the corpus: its texts are deleted at once, and the coordinator is told that there are none."""
    _decide(home, job, "veto", as_json)


def _decide(home: Path | None, job: str, choice: "Choice", as_json: bool) -> None:
    from edge_client.corpus_release.folder import CorpusUnusable

    folder, state = _found(home, job)
    try:
        folder.decide(state, choice)
    except CorpusUnusable as error:
        fail(str(error), ExitCode.REFUSED)
    except OSError as error:
        fail(
            f"nothing was decided: {folder.path} cannot be written ({error.strerror}); free it and try again",
            ExitCode.USAGE,
        )
    if as_json or json_requested():
        print_json(_summary(folder, state))
    elif choice == "approve":
        typer.echo(f"Approved: `{_run_of(state)}` sends the corpus of {job}, at once if it is running.")
    else:
        typer.echo(f"Vetoed: the texts are deleted; `{_run_of(state)}` tells the coordinator that {job} gets none.")


def _found(home: Path | None, job: str) -> "tuple[CorpusFolder, CorpusState]":
    from edge_client.corpus_release.folder import CorpusFolder
    from edge_client.identity.home import home_path
    from tacit.identity import name_is_valid

    folder = home_path(home)
    # The name becomes a folder's, so an invalid one is never looked up.
    corpus = CorpusFolder(folder, job) if name_is_valid(job) else None
    state = None if corpus is None else corpus.state()
    if corpus is None or state is None:
        fail(
            f"{folder} holds no corpus of job {job}; `edge_client run` makes one once the job is finished. "
            "`edge_client corpus list` shows what there is",
            ExitCode.NOT_FOUND,
        )
    return corpus, state


def _run_of(state: "CorpusState") -> str:
    """The command that goes on with a corpus: only a run of the data set that it was made from does."""
    return "edge_client run" if state.data == "data" else f"edge_client run --data-name {state.data}"


def _said(folder: "CorpusFolder", state: "CorpusState") -> str:
    return _STAGES[_stage(folder, state)].format(run=_run_of(state))


def _stage(folder: "CorpusFolder", state: "CorpusState") -> str:
    stage = folder.stage(state)
    return "approved" if stage == "made" and folder.decision(state) == "approve" else stage


def _summary(folder: "CorpusFolder", state: "CorpusState") -> dict[str, Any]:
    made = state.made
    return {
        "job": state.job,
        "data": state.data,
        "stage": _stage(folder, state),
        "told": state.told,
        "detail": state.detail,
        "file": str(folder.file) if folder.file.exists() else None,
        "rows": None if made is None else made.rows,
        "bytes": None if made is None else made.bytes,
        "digest": None if made is None else made.corpus.hex(),
    }


def _promise(statement: "CorpusStatement") -> str:
    from learning.synthesis.setting import NO_GUARANTEE, promise_of

    if statement.variant == "published":
        return promise_of("published")
    if statement.promise == "none":
        return f"{NO_GUARANTEE}: the model was trained without noise"
    return promise_of("sound")
