"""`coordinator survey ...`: asks members about their data before a job, and shows what they answered."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.asking import DELTA, Answer, checked, fetch_answer, labels_of, new_file, std_of, write
from coordinator.cli.common import Dir, Json, Operator, operator_folder, operator_stub, run, table
from coordinator.cli.creating import create_job
from toolkit.console import ExitCode, fail, print_json, printable
from toolkit.install import install_with

if TYPE_CHECKING:
    from coordinator.domain.survey import Bin, Counted, Estimated, Suggestions

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The survey's name.")]

# The bins that `survey new` writes.
_LENGTHS = (8, 16, 32, 64, 128, 256, 512)
_UNKNOWN = (0, 2, 5, 10, 20, 50)
_ROWS = (100, 300, 1000, 3000, 10_000)


@app.command()
def new(
    name: Name,
    labels: Annotated[
        str | None, typer.Option(help="The labels to ask about, as one line of CSV.", show_default=False)
    ] = None,
    words: Annotated[
        Path | None,
        typer.Option(
            help="A public list, one word a line: asks for lengths in tokens and for the share of unknown words.",
            show_default=False,
        ),
    ] = None,
    kind: Annotated[str, typer.Option(help="The kind of --words: words or wordpiece.")] = "words",
    rows: Annotated[bool, typer.Option("--rows", help="Ask how many rows each member has, too.")] = False,
    members: Annotated[int, typer.Option(min=2, help="The least number of members that answer.")] = 3,
    epsilon: Annotated[float, typer.Option(help="What the whole answer may cost a member in privacy.")] = 0.5,
    unit: Annotated[str, typer.Option(help="What members' ledgers protect: example, person or member.")] = "example",
    out: Annotated[Path | None, typer.Option(help="The file to write. Default: NAME.toml.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Write a survey's file, with noise for the given epsilon. Works offline."""
    import json
    import math
    import os

    from tacit.survey import distance_of
    from tacit.survey_file import SurveySpec

    target = new_file(name, out)
    if unit not in _ABOUT:
        fail(f"--unit {unit} is not one of {', '.join(_ABOUT)}", ExitCode.USAGE)
    if kind not in ("words", "wordpiece"):
        fail(f"--kind: {kind!r} is not one of wordpiece, words", ExitCode.USAGE)
    tables: list[str] = []
    if labels is not None:
        try:
            listed = json.dumps([each for each in labels_of(labels) if each], ensure_ascii=False)
        except ValueError as error:
            fail(f"--labels {error}", ExitCode.USAGE)
        tables.append(f'[[histograms]]\nkind = "labels"\nlabels = {listed}\n')
    if words is not None:
        if not words.is_file():
            fail(f"{words} does not exist; name a public list of words, one a line, with --words", ExitCode.NOT_FOUND)
        file = json.dumps(os.path.relpath(words, target.parent))
        tables.insert(0, f'[vocabulary]\nkind = "{kind}"\nfile = {file}\n')
        tables.append(f'[[histograms]]\nkind = "lengths"\nat_most = {list(_LENGTHS)}\n')
        tables.append(f'[[histograms]]\nkind = "unknown"\nat_most = {list(_UNKNOWN)}\n')
    if rows:
        tables.append(f'[[histograms]]\nkind = "rows"\nat_most = {list(_ROWS)}\n')
    if not tables:
        fail("the survey asks nothing; give --labels, --words or --rows", ExitCode.USAGE)

    def text(std: float) -> str:
        head = (
            "# A survey: docs/surveys.md explains every key. `coordinator survey run` asks it.\n"
            f"schema = 1\nname = {json.dumps(name, ensure_ascii=False)}\n\n"
            f"# Each member adds noise of this standard deviation to each of its counts.\n[noise]\nstd = {std:g}\n"
            f'unit = "{unit}"\n\n[rounds]\nmin_members = {members}\ntarget_members = {max(members, 200)}\n'
        )
        return "\n".join((head, *tables))

    spec = checked(SurveySpec, text(1.0), target)
    distance = distance_of(spec.question, "add-remove", spec.noise.unit)
    std = std_of("histograms", distance, epsilon, spec.noise.unit)
    checked(SurveySpec, text(std), target)
    write(text(std), target)
    one = std * math.sqrt(members)
    if as_json:
        print_json({"survey": name, "file": str(target), "std": std, "epsilon": epsilon, "error": one})
        return
    typer.echo(
        f"Wrote {target}. An answer costs a member epsilon {epsilon:g} at delta {DELTA:g} (add-remove). With "
        f"{members} members, a count has a standard error of {one:.3g}."
    )
    typer.echo(f"Next: coordinator survey run {target}")


@app.command("run")
def run_survey(
    file: Annotated[Path, typer.Argument(help="The survey's file (TOML).")],
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Ask a survey: upload it and start its one round. Members whose policy admits it answer."""
    from tacit.documents import DocumentInvalid
    from tacit.survey_file import SurveySpec

    if not file.exists():
        fail(f"{file} does not exist; write one with `coordinator survey new`", ExitCode.NOT_FOUND)
    try:
        spec = SurveySpec.from_toml(file)
    except DocumentInvalid as error:
        fail(str(error), ExitCode.USAGE)
    where = operator_folder(operator, folder)
    try:
        from export.survey import make_survey

        made = make_survey(spec, file.parent)
    except ImportError as error:
        fail(
            f"making a survey needs the tokenizers library ({error.name or error} is missing); "
            f"{install_with('coordinator', 'export')}",
            ExitCode.USAGE,
        )
    except (ValueError, OSError) as error:
        fail(f"no survey was made from {file}: {error}", ExitCode.USAGE)

    job = create_job(where, made.document, list(made.files.items()), quiet=as_json)
    from coordinator.cli.shown import job_status

    if as_json:
        print_json({"survey": job.name, "document": made.document.digest().hex(), "status": job_status(job)})
        return
    typer.echo(f"Survey {spec.name} is asked; see the answer with `coordinator survey show {spec.name}`.")


@app.command()
def show(name: Name, operator: Operator = None, folder: Dir = None, as_json: Json = False) -> None:
    """Show a survey's answer with its errors, and what it suggests for a job."""
    where = operator_folder(operator, folder)

    async def work() -> Answer:
        async with operator_stub(where) as stub:
            return await fetch_answer(stub, name)

    fetched = run(work())
    from coordinator.cli.shown import job_status
    from coordinator.domain.survey import answered, suggestions
    from tacit.mechanism import OwnDiscreteGaussian
    from tacit.reason import sentence
    from tacit.survey import Survey

    detail, document = fetched.detail, fetched.document
    question, mechanism = document.question, document.mechanism
    if not isinstance(question, Survey) or not isinstance(mechanism, OwnDiscreteGaussian):
        if question is not None:
            fail(f"{name} is a measurement; see it with `coordinator measure show {name}`", ExitCode.USAGE)
        fail(f"{name} is a job and no survey; see it with `coordinator job show {name}`", ExitCode.USAGE)
    found = said = None
    if fetched.total is not None:
        try:
            found = answered(question, mechanism, fetched.total, fetched.members)
        except ValueError as error:
            fail(f"the answer to {name} cannot be read: {error}", ExitCode.FAILED)
        said = suggestions(question, mechanism, fetched.total, fetched.members)
    if as_json:
        print_json(
            {
                "survey": name,
                "status": job_status(detail.job),
                "document": detail.job.document.hex(),
                "question": question.model_dump(mode="json"),
                "noise": mechanism.model_dump(mode="json"),
                "answer": None if found is None else asdict(found),
                "suggestions": None if said is None else asdict(said),
            }
        )
        return
    if found is None or said is None:
        why = f": {sentence(detail.job.reason)}" if detail.job.reason else ""
        typer.echo(f"Survey {name} is {job_status(detail.job)}{why}. There is no answer yet.")
        typer.echo(f"`coordinator job show {name}` shows its round and the members that decline it.")
        return
    typer.echo(printable(_text(name, found, said, mechanism.unit)))


def _text(name: str, found: "Counted", said: "Suggestions", unit: str) -> str:
    lines = [f"Survey {name}: {found.members} members answered. A count has a standard error of {found.error:.3g}."]
    for histogram in found.histograms:
        about = f"{_ABOUT[unit][histogram.kind]}: about {histogram.total:,.0f} in all (+- {histogram.total_error:.2g})"
        lines += ["", about, table(["BIN", "COUNT", "SHARE"], [_row(each) for each in histogram.bins])]
        if not histogram.shows_shares:
            lines.append("The total is too small beside its noise, so there are no shares.")
    suggested = _suggested(said, {"example": "rows", "person": "persons", "member": "members"}[unit])
    if suggested:
        lines += ["", "For a job:", *(f"  {each}" for each in suggested)]
    return "\n".join(lines)


# What each kind counts, by unit.
_ABOUT = {
    "example": {
        "labels": "Rows by label",
        "lengths": "Rows by length in tokens",
        "unknown": "Rows by share of unknown words",
        "rows": "Members by number of rows",
    },
    "person": {
        "labels": "Persons by the label of most of their rows",
        "lengths": "Persons by the length of most of their rows, in tokens",
        "unknown": "Persons by the share of unknown words in most of their rows",
        "rows": "Members by number of rows",
    },
    "member": {
        "labels": "Members by the label of most of their rows",
        "lengths": "Members by the length of most of their rows, in tokens",
        "unknown": "Members by the share of unknown words in most of their rows",
        "rows": "Members by number of rows",
    },
}


def _row(each: "Bin") -> list[str]:
    count = f"not shown (under {each.below:,.0f})" if each.count is None else f"{each.count:,.0f}"
    if each.share is None or each.share_error is None:
        return [each.name, count, "-"]
    return [each.name, count, f"{100 * each.share:.1f} % +- {100 * each.share_error:.1f}"]


def _suggested(said: "Suggestions", units: str) -> list[str]:
    from json import dumps

    lines: list[str] = []
    if said.labels is not None:
        lines.append(f"labels = {dumps(list(said.labels), ensure_ascii=False)}" if said.labels else "no label shows")
    if said.rare:
        lines.append(f"too few {units} to tell: {', '.join(said.rare)}")
    if said.other is not None:
        lines.append(f"{_percent(said.other)} of the {units} have another label")
    if said.whole is not None and said.max_tokens is not None:
        lines.append(f"max_tokens = {said.max_tokens} leaves {_percent(said.whole)} of the rows whole")
    elif said.whole is not None:
        lines.append(
            f"max_tokens cannot be told: the largest bound leaves {_percent(said.whole)} of the rows whole, "
            "which is not surely 95 %"
        )
    if said.unknown is not None:
        low, high = said.unknown
        lines.append(f"the vocabulary lacks {_percent(low)} to {_percent(high)} of a row's words, on average")
    return lines


def _percent(share: "Estimated") -> str:
    return f"{100 * share.value:.1f} % (+- {100 * share.error:.1f})"
