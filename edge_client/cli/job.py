"""`edge_client job ...`: a steward reads what a member asks about a job, and approves, declines or withdraws.

It works offline. A running `edge_client run` sees a decision within seconds; otherwise the next start does.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_client.cli.options import Home, Json
from toolkit.console import ExitCode, fail, json_requested, print_json, printable

if TYPE_CHECKING:
    from edge_client.approval.folder import ApprovalRequest
    from edge_client.approval.rules import Standing
    from edge_client.approval.statement import Choice, SignedStatement
    from tacit.question import Question

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True, help='Read what a job would do here, then approve or decline it (jobs = "ask").'
)

Job = Annotated[str | None, typer.Argument(help="The job's name. Leave it out with --request.", show_default=False)]
DataName = Annotated[str, typer.Option(help="The member's name for the data, as for `edge_client run`.")]
Request = Annotated[
    Path | None,
    typer.Option(
        help="A request that `job show --out` wrote, on a machine that is not the member's.", show_default=False
    ),
]
Key = Annotated[Path, typer.Option(help="Your key, as `edge_client steward key` made it.", show_default=False)]
Out = Annotated[
    Path | None,
    typer.Option(
        help="With --request: the file to write, for `edge_client job import` on the member's machine.",
        show_default=False,
    ),
]
Digest = Annotated[
    str | None,
    typer.Option(help="The job's digest, or its first 16 digits, as `job show` printed it.", show_default=False),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation. Needs --digest.")]

_SHORTEST_DIGEST = 16


@app.command("list")
def list_(home: Home = None, as_json: Json = False) -> None:
    """List the jobs that this member has asked its stewards about, and what they said."""
    from edge_client.approval.folder import folders
    from edge_client.identity.home import home_path

    folder, shown = home_path(home), 0
    for each in folders(folder):
        request = each.request()
        if request is None:
            continue
        shown += 1
        standing = _standing(folder, request)
        if as_json or json_requested():
            print_json(_summary(request, standing))
        else:
            typer.echo(printable(f"{each.job} (data {each.data}): {_words(standing)}"))
    if not shown and not (as_json or json_requested()):
        typer.echo(f'{folder} has asked about no job; with jobs = "ask" in the policy, `edge_client run` asks.')


@app.command()
def show(
    job: Job = None,
    data_name: DataName = "data",
    request: Request = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the request to a file, to be read and signed elsewhere.", show_default=False),
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Print what a job would train on, what it costs, and what would leave; and its digest."""
    asked = _request(job, data_name, request, home)
    standing = None if request is not None else _standing(_home(home), asked)
    if out is not None:
        _write(out, asked.canonical())
    if as_json or json_requested():
        print_json({**_summary(asked, standing), "plan": asked.dry_run(), "lines": list(asked.lines)})
        return
    _print(asked, standing, request)
    if out is not None:
        typer.echo(f"Wrote {out}: it holds the job, the policy, and what this machine says of the job.")


@app.command()
def approve(
    key: Key,
    job: Job = None,
    days: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="How long it is valid. Default: 30, or what the policy allows.", show_default=False
        ),
    ] = None,
    digest: Digest = None,
    yes: Yes = False,
    data_name: DataName = "data",
    request: Request = None,
    out: Out = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Approve a job: the member takes part, until the approval expires or you withdraw it.

    Without --digest, what would be approved is printed once more.
    """
    asked = _request(job, data_name, request, home)
    _decide(asked, "approve", key, home, request, out, as_json, digest=digest, yes=yes, days=days)


@app.command()
def decline(
    key: Key,
    job: Job = None,
    reason: Annotated[str, typer.Option(help="Why, in a sentence. The coordinator's operator reads it.")] = "",
    digest: Digest = None,
    yes: Yes = False,
    data_name: DataName = "data",
    request: Request = None,
    out: Out = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Decline a job. While that stands, the member takes no part in it, whoever else approves."""
    asked = _request(job, data_name, request, home)
    _decide(asked, "decline", key, home, request, out, as_json, digest=digest, yes=yes, reason=reason)


@app.command()
def withdraw(
    key: Key,
    job: Job = None,
    digest: Digest = None,
    yes: Yes = False,
    data_name: DataName = "data",
    request: Request = None,
    out: Out = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Take back what you said about a job. Before its next vector leaves, the member counts anew."""
    asked = _request(job, data_name, request, home)
    _decide(asked, "withdraw", key, home, request, out, as_json, digest=digest, yes=yes)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A decision that was signed on another machine.")],
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Take a steward's signed decision into this member's folder. It is checked first."""
    from edge_client.approval.deciding import DecisionRefused, put
    from edge_client.approval.statement import SignedStatement
    from edge_client.ledger.store import LedgerError
    from tacit.documents import DocumentInvalid

    folder = _home(home)
    try:
        signed = SignedStatement.from_file(file)
        path = put(folder, signed)
    except DecisionRefused as error:
        fail(str(error), ExitCode.REFUSED)
    except FileNotFoundError:
        fail(f"{file} does not exist; check its path", ExitCode.NOT_FOUND)
    except DocumentInvalid as error:
        fail(f"{error}; name a file that `edge_client job approve --out` wrote", ExitCode.USAGE)
    except LedgerError as error:
        fail(str(error), ExitCode.FAILED)
    except OSError as error:
        fail(f"{error.filename} cannot be used: {error.strerror}; check its path and permissions", ExitCode.USAGE)
    _told(signed, path, as_json, folder)


# ---- inside -------------------------------------------------------------------------------------------


def _home(option: Path | None) -> Path:
    from edge_client.identity.home import home_path

    return home_path(option)


def _request(job: str | None, data: str, file: Path | None, home: Path | None) -> "ApprovalRequest":
    from edge_client.approval.folder import ApprovalFolder, ApprovalRequest
    from tacit.documents import DocumentInvalid
    from tacit.identity import name_is_valid

    if (job is None) == (file is None):
        fail("name the job, or a file with --request", ExitCode.USAGE)
    if file is not None:
        try:
            return ApprovalRequest.from_file(file)
        except FileNotFoundError:
            fail(f"{file} does not exist; check its path", ExitCode.NOT_FOUND)
        except OSError as error:
            fail(f"{file} cannot be read: {error.strerror}; check its path and permissions", ExitCode.USAGE)
        except DocumentInvalid as error:
            fail(f"{error}; name a file that `edge_client job show --out` wrote", ExitCode.USAGE)
    assert job is not None  # noqa: S101  for the type checker
    folder = _home(home)
    # The names become folders', so invalid ones are never looked up.
    valid = name_is_valid(job) and name_is_valid(data)
    found = ApprovalFolder(folder, data, job).request() if valid else None
    if found is None:
        fail(
            f"{folder} has asked nobody about job {job}; `edge_client run` asks when the coordinator offers it, if the "
            'policy has jobs = "ask". `edge_client job list` shows what there is',
            ExitCode.NOT_FOUND,
        )
    return found


def _standing(home: Path, request: "ApprovalRequest") -> "Standing":
    from edge_client.approval.deciding import standing_at
    from edge_client.ledger.store import LedgerError

    try:
        return standing_at(home, request)
    except LedgerError as error:
        fail(str(error), ExitCode.FAILED)


def _decide(
    asked: "ApprovalRequest",
    choice: "Choice",
    key: Path,
    home: Path | None,
    request: Path | None,
    out: Path | None,
    as_json: bool,
    *,
    digest: str | None,
    yes: bool,
    days: float | None = None,
    reason: str = "",
) -> None:
    from edge_client.approval.deciding import DecisionRefused, days_of, decide, heard_at, put, steward_named
    from edge_client.approval.steward import KeyMissing, StewardKeyUnusable, open_key, public_key
    from edge_client.cli.steward import passphrase
    from edge_client.ledger.store import LedgerError

    if (request is None) != (out is None):
        fail("give --request and --out together, or neither of them on the member's machine", ExitCode.USAGE)
    try:
        name = steward_named(asked, public_key(key))
        lasts = f", for {days_of(asked, days):g} days" if choice == "approve" else ""
        _confirm(asked, f"{choice.capitalize()} {asked.document.name} as {name}{lasts}?", digest, yes, as_json, request)
        known = [] if request is not None else [each.signed for each in heard_at(_home(home), asked)[0]]
        signed = decide(asked, choice, open_key(key, passphrase()), days=days, reason=reason, known=known)
        if out is not None:
            path = out
            _write(out, signed.canonical())
        else:
            path = put(_home(home), signed)
    except DecisionRefused as error:
        fail(str(error), ExitCode.REFUSED)
    except KeyMissing as error:
        fail(str(error), ExitCode.NOT_FOUND)
    except StewardKeyUnusable as error:
        fail(str(error), ExitCode.USAGE)
    except LedgerError as error:
        fail(str(error), ExitCode.FAILED)
    except OSError as error:
        fail(f"nothing was decided: {error.filename} cannot be written ({error.strerror})", ExitCode.USAGE)
    _told(signed, path, as_json, None if out is not None else _home(home))


def _confirm(
    asked: "ApprovalRequest", question: str, digest: str | None, yes: bool, as_json: bool, request: Path | None
) -> None:
    """Makes sure that what is signed is what was read. Raises CommandFailed."""
    found = asked.question.document.hex()
    if digest is not None:
        if len(digest) < _SHORTEST_DIGEST or not found.startswith(digest.lower()):
            fail(
                f"the job's digest is {found}, and not {digest}: the job was changed since you read it, or the digest "
                f"has fewer than {_SHORTEST_DIGEST} digits; read it again with `edge_client job show`",
                ExitCode.REFUSED,
            )
    elif yes:
        fail("--yes needs --digest, as `edge_client job show` prints it: nobody reads what is signed", ExitCode.USAGE)
    elif as_json or json_requested():
        fail("--json needs --digest, as `edge_client job show` prints it: nobody reads what is signed", ExitCode.USAGE)
    else:
        _print(asked, None, request)
    if yes:
        return
    if not sys.stdin.isatty():
        fail("there is no terminal to confirm on; give --yes and --digest", ExitCode.USAGE)
    if not typer.confirm(question, err=True):
        fail("nothing was decided", ExitCode.REFUSED)


def _write(path: Path, content: bytes) -> None:
    try:
        with path.open("xb") as file:
            file.write(content)
    except FileExistsError:
        fail(f"{path} exists; choose another file", ExitCode.USAGE)
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}; choose another file", ExitCode.USAGE)


def _told(signed: "SignedStatement", path: Path, as_json: bool, home: Path | None) -> None:
    """Says what was decided, and what happens next."""
    said = signed.statement
    if as_json or json_requested():
        print_json(
            {
                "job": said.job,
                "decision": said.decision,
                "document": said.document.hex(),
                "steward": said.steward.hex(),
                "issued_ms": said.issued_ms,
                "expires_ms": said.expires_ms,
                "file": str(path),
            }
        )
        return
    until = "" if said.expires_ms is None else f" until {_moment(said.expires_ms)} UTC"
    done = {"approve": "Approved", "decline": "Declined", "withdraw": "Withdrawn"}[said.decision]
    typer.echo(f"{done}: job {said.job}, digest {said.document.hex()[:16]}{until}.")
    if home is None:
        typer.echo(f"Next, on the member's machine: `edge_client job import {path}`.")
    else:
        typer.echo("`edge_client run` acts on it within seconds if it is running, or at its next start.")


def _print(asked: "ApprovalRequest", standing: "Standing | None", request: Path | None) -> None:
    """Prints what is asked. `request`: the file that it was read from, on a machine that is not the member's."""
    from tacit.model import described
    from tacit.prompt import writes

    job, question = asked.document, asked.question
    lines = [
        f"{job.name}, for member {asked.member} with the data {asked.data}",
        f"  digest      {question.document.hex()}",
        f"  federation  {asked.federation.hex()}",
        f"  policy      {question.policy.hex()}",
    ]
    if job.tags:
        lines.append(f"  tags        {', '.join(job.tags)}")
    at_most = job.rounds.count * job.rounds.max_attempts
    learns = "to write" if writes(job.model) else f"for the labels {', '.join(job.labels[:20])}"
    does = f"  trains      a {described(job.model)} by {job.method.name}, {learns}"
    if job.question is not None:
        does = f"  asks        {_asks(job.question)}"
    lines += [
        does,
        f"  rounds      {job.rounds.count}, each of up to {job.rounds.max_attempts} attempts: up to {at_most} vectors",
        f"  cohorts     of {_cohorts(job.rounds.min_members, job.rounds.target_members)} members",
        f"  noise       {job.mechanism.name}",
        "  files       " + ", ".join(f"{name} {digest.hex()[:16]}" for name, digest in sorted(question.files.items())),
        "On the member's machine:",
        *(f"  {line}" for line in asked.lines),
    ]
    if standing is not None:
        lines.append(f"So far: {_words(standing)}.")
    which = job.name if request is None else f"--request {request} --out SIGNED"
    lines.append(
        f"To approve it: `edge_client job approve {which} --digest {question.document.hex()[:16]} --key FILE`."
    )
    # Each by itself: a dry run of many parameters is longer than what is shown of one text.
    for line in lines:
        typer.echo(printable(line))


def _asks(question: "Question") -> str:
    from tacit.measurement import Measurement

    if isinstance(question, Measurement):
        version = "a version" if question.number is None else f"version {question.number}"
        by = ", by label" if question.breakdown else ""
        return f"how well {version} of {question.job} does, on {question.rows} rows{by}"
    return f"for histograms of {', '.join(each.kind for each in question.histograms)}"


def _cohorts(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"


def _words(standing: "Standing") -> str:
    parts = []
    if standing.declined:
        parts.append("declined by " + ", ".join(f"{name} ({why or 'no reason'})" for name, why in standing.declined))
    given = f"{len(standing.approved)} of {standing.needed} approvals"
    parts.append(f"{given} ({', '.join(standing.approved)})" if standing.approved else given)
    if standing.until_ms is not None:
        parts.append(f"valid until {_moment(standing.until_ms)} UTC")
    parts += [f"that of {name} does not count: {why}" for name, why in standing.unread]
    return "; ".join(parts)


def _summary(asked: "ApprovalRequest", standing: "Standing | None") -> dict[str, Any]:

    job, question = asked.document, asked.question
    summary: dict[str, Any] = {
        "job": job.name,
        "data": asked.data,
        "member": asked.member,
        "federation": asked.federation.hex(),
        "digest": question.document.hex(),
        "policy": question.policy.hex(),
        "files": {name: digest.hex() for name, digest in question.files.items()},
        "tags": list(job.tags),
        "rounds": job.rounds.count,
        "max_attempts": job.rounds.max_attempts,
        "asked_ms": asked.asked_ms,
    }
    if standing is not None:
        summary |= {
            "stage": standing.stage,
            "needed": standing.needed,
            "approved": list(standing.approved),
            "declined": [{"steward": name, "reason": why or None} for name, why in standing.declined],
            "until_ms": standing.until_ms,
            "not_counted": [{"steward": name, "why": why} for name, why in standing.unread],
        }
    return summary


def _moment(at_ms: int) -> str:
    from datetime import UTC, datetime

    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M}"
