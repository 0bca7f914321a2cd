"""`edge_client policy ...` writes the policy, shows it, and checks a job against it. It works offline."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from edge_client.cli.options import Home, Json, PersonCount
from edge_client.cli.privacy import counted_units
from tacit.rounding import rounded_up
from toolkit.console import ExitCode, fail, json_requested, print_json, printable

if TYPE_CHECKING:
    from edge_client.identity.home import MemberIdentity
    from edge_client.ledger.outlook import Outlook
    from edge_client.policy.conditions import Conditions
    from edge_client.policy.policy import Policy
    from edge_client.policy.verdicts import Verdict
    from tacit.documents import Document
    from tacit.job import JobDocument, JobSpec
    from tacit.manifest import Manifest
    from tacit.question import Question

__all__ = ["app", "default_file"]

_Kind = TypeVar("_Kind", bound="Document")

app = typer.Typer(help="Write your policy, show it, and check a job against it.", no_args_is_help=True)

PolicyFile = Annotated[
    Path | None,
    typer.Option("--policy", help="The policy. Default: policy.toml in the member's folder.", show_default=False),
]


# ---- check ----------------------------------------------------------------------------------------


@app.command()
def check(
    job: Annotated[Path, typer.Argument(help="A job file (.toml), a job document (job.json), or a job's bundle.")],
    policy: PolicyFile = None,
    examples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many examples you have: prints what the job costs, and in how many of its rounds the budget lets "
            "you take part.",
            show_default=False,
        ),
    ] = None,
    persons: PersonCount = None,
    data_name: Annotated[
        str, typer.Option(help="Your name for the data: what its ledger has charged counts against the budget.")
    ] = "data",
    now: Annotated[bool, typer.Option("--now", help="Also check this machine: hours, memory, power.")] = False,
    device: Annotated[
        str | None, typer.Option(help="With --now: the device that trains. Default: the fastest.", show_default=False)
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Also print rules that are met by default or require nothing.")
    ] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Check a job against the policy: print the rules that refuse it, those still open, and those that you set.

    --all and --json print every rule.

    The exit code is 0 if this member would take part in the next round, as far as can be told here, and 4 if a rule or
    the budget refuses it.
    """
    from edge_client.identity.home import home_path
    from edge_client.policy.verdicts import Outcome
    from learning.text.persons import unit_of_job

    folder = home_path(home)
    rules, source = _policy(folder, policy)
    offered, manifest = _read_job(job)
    identity = _identity(folder)
    verdicts = rules.explain(
        offered,
        federation=identity.federation if identity else None,
        manifest=manifest,
        conditions=_conditions(rules, device) if now else None,
    )
    cost = None
    if examples is not None or persons is not None:
        count = counted_units(unit_of_job(offered), examples, persons)
        cost = _cost(rules, offered, count, folder, data_name, identity.federation if identity else None)
    reach = cost.outlook if cost else None
    refused = [verdict.rule for verdict in verdicts if verdict.outcome is Outcome.REFUSED]
    if reach is not None and reach.refused_by is not None:
        refused.append(reach.refused_by)
    takes_part = not refused
    if as_json or json_requested():
        print_json(
            {
                "job": offered.name,
                "policy": source,
                "takes_part": takes_part,
                "verdicts": [_as_json(verdict) for verdict in verdicts],
                "cost": cost.as_json() if cost else None,
                "outlook": reach.as_json() if reach else None,
            }
        )
    else:
        typer.echo(f"{offered.name} against {source}:")
        shown = [verdict for verdict in verdicts if every or _matters(rules, verdict)]
        for verdict in shown:
            _print_verdict(verdict)
        if hidden := len(verdicts) - len(shown):
            typer.echo(f"{hidden} more {'rule refuses' if hidden == 1 else 'rules refuse'} nothing; --all shows them.")
        if cost:
            typer.echo(printable(f"cost     {cost.sentence}"))
        elif not refused and offered.mechanism.name != "none":
            wanted = "--persons" if unit_of_job(offered) == "person" else "--examples"
            typer.echo(f"cost     unknown: give {wanted} N, and this says how many rounds the budget allows")
        if reach:
            typer.echo(f"budget   {reach.sentence}")
        if refused:
            typer.echo(f"This member would not take part: {', '.join(refused)}.")
        else:
            partly = f" in {reach.possible} of {reach.rounds} rounds" if reach and reach.spent_by else ""
            once = ", once its stewards have approved it" if rules.asks else ""
            typer.echo(f"This member would take part{partly}{once}, as far as can be told here.")
    raise typer.Exit(int(ExitCode.OK if takes_part else ExitCode.REFUSED))


def _matters(policy: "Policy", verdict: "Verdict") -> bool:
    """Whether a verdict is worth showing: a refusal, an open question, or a rule that the member set."""
    from edge_client.policy.verdicts import Outcome, free_verdict

    if verdict.outcome is not Outcome.OK:
        return True
    asks_nothing = verdict == free_verdict(verdict.rule, verdict.when, verdict.reason)
    return verdict.rule in policy.model_fields_set and not asks_nothing


def _as_json(verdict: "Verdict") -> dict[str, str]:
    from tacit.reason import word

    return {
        "rule": verdict.rule,
        "outcome": str(verdict.outcome),
        "job": verdict.job,
        "policy": verdict.policy,
        "when": str(verdict.when),
        "reason": word(verdict.reason),
        "sentence": verdict.sentence,
    }


def _print_verdict(verdict: "Verdict") -> None:
    from edge_client.policy.verdicts import Outcome

    colours = {
        Outcome.OK: typer.colors.GREEN,
        Outcome.REFUSED: typer.colors.RED,
        Outcome.OPEN: typer.colors.BRIGHT_BLACK,
    }
    typer.echo(f"{typer.style(f'{verdict.outcome:<7}', fg=colours[verdict.outcome])}  {printable(verdict.sentence)}")


def _policy(home: Path, option: Path | None) -> "tuple[Policy, str]":
    from edge_client.policy.policy import Policy
    from tacit.documents import DocumentInvalid

    try:
        policy, path = Policy.load(home, option)
    except DocumentInvalid as error:
        fail(str(error), ExitCode.USAGE)
    return policy, str(path) if path else "the defaults"


def _identity(home: Path) -> "MemberIdentity | None":
    from edge_client.identity.home import HomeUnusable, MemberIdentity

    try:
        return MemberIdentity.load(home)
    except HomeUnusable:
        # One may write a policy before enrolling. `edge_client doctor` says what is wrong with an identity.
        return None


def _read_job(path: Path) -> "tuple[JobDocument | JobSpec, Manifest | None]":
    from tacit.documents import DocumentInvalid
    from tacit.job import JobDocument, JobSpec
    from tacit.manifest import Manifest

    file = path / "job.json" if path.is_dir() else path
    try:
        if file.suffix.lower() != ".json":
            return JobSpec.from_toml(file), None
        document = _document(JobDocument, file)
        beside = file.with_name("manifest.json")
        if not beside.exists():
            return document, None
        manifest = _document(Manifest, beside)
        if manifest.digest() != document.manifest:
            raise DocumentInvalid(f"{beside} is not the manifest that {file} names; make the bundle again")
        return document, manifest
    except DocumentInvalid as error:
        fail(str(error), ExitCode.USAGE)


def _document(kind: "type[_Kind]", path: Path) -> "_Kind":
    try:
        return kind.from_file(path)
    except OSError as error:
        fail(f"{path} cannot be read: {error.strerror}; check its path and permissions", ExitCode.USAGE)


def _conditions(policy: "Policy", device: str | None) -> "Conditions":
    from edge_client.policy.conditions import read_conditions

    every = type(policy).model_fields["devices"].default
    if device is None and set(policy.devices) != set(every):
        # Only such a policy is worth the seconds that torch takes to find the devices.
        from learning.training.device import DeviceUnavailable, pick_device

        try:
            device = pick_device()
        except ImportError:
            device = None
        except DeviceUnavailable as error:
            fail(str(error), ExitCode.USAGE)
    return read_conditions(device)


# ---- what a job costs -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cost:
    """What a job's rounds cost an untouched ledger. Numbers are None if unknown, or if the job promises nothing.

    `epsilon` is the least limit whose gate lets all rounds pass, at `delta`. `outlook` is how far the policy's limits
    reach, after what the ledger holds.
    """

    sentence: str
    epsilon: float | None = None
    delta: float | None = None
    outlook: "Outlook | None" = None

    def as_json(self) -> dict[str, Any]:
        """Returns what `--json` prints. The outlook has a place of its own."""
        return {"sentence": self.sentence, "epsilon": self.epsilon, "delta": self.delta}


def _cost(
    policy: "Policy",
    job: "JobDocument | JobSpec",
    examples: int,
    home: Path,
    data_name: str,
    federation: bytes | None,
) -> _Cost:
    from edge_client.ledger.outlook import check_unit, may_measure, outlook, stored_state
    from edge_client.ledger.store import LedgerError
    from learning.accounting.calibration import repeated
    from learning.accounting.costs import releases_of
    from learning.accounting.gate import epsilon_counted
    from learning.accounting.planning import cost_of_metrics, nothing_measured
    from learning.accounting.renyi import EventUnaccountable
    from learning.mechanisms.protection import Protection, protection_of
    from learning.survey.answer import Answering, event_of_answer
    from learning.text.persons import unit_of_job
    from tacit.job import JobSpec
    from tacit.mechanism import OwnDiscreteGaussian

    if isinstance(job, JobSpec) and job.mechanism.name == "distributed-gaussian":
        return _Cost("depends on the number of values; make the bundle, and check its job.json")
    try:
        state = stored_state(home, data_name)
        check_unit(policy, state)
        held = () if state is None else state.reservations.values()
        limit = policy.limit()
        if job.question is not None and isinstance(job.mechanism, OwnDiscreteGaussian):
            protection: Protection = Answering(event_of_answer(job.question, job.mechanism, limit.adjacency))
        else:
            protection = protection_of(
                job,
                examples,
                own=policy.own(),
                trust_central_noise=policy.trust_central_noise,
                metrics=policy.adjacency if may_measure(policy, job, held, federation) else None,
            )
        if protection.event is None:
            return _Cost("no epsilon: the job adds no noise and promises no differential privacy")
        least = epsilon_counted([repeated(protection.event, releases_of(job.mechanism, job.rounds.count))], limit)
        metrics = None
        if policy.measures:
            metrics = cost_of_metrics(protection.event, job.rounds.count, limit, policy.metrics_epsilon)
        reach = outlook(policy, job, protection.event, state, federation=federation)
    except LedgerError as error:
        fail(str(error), ExitCode.FAILED)
    except (EventUnaccountable, ValueError) as error:
        return _Cost(f"unknown: {error}")
    units = "persons" if unit_of_job(job) == "person" else "examples"
    again = "; every further attempt of a round counts as another round" if protection.each_attempt else ""
    sentence = (
        f"{job.rounds.count} rounds with {examples} {units} cost an untouched ledger epsilon {rounded_up(least):g} at "
        f"delta {limit.delta:g}, as its gate counts; the policy allows {_limits(policy)}"
        f"{'' if job.question is None else _of_question(policy, job.question)}{again}"
    )
    if job.metrics is not None:
        sentence += f"; {nothing_measured(policy.metrics_epsilon) if metrics is None else metrics.sentence}"
    return _Cost(sentence, least, limit.delta, reach)


def _of_question(policy: "Policy", question: "Question") -> str:
    from edge_client.ledger.questions import allowance_for

    most = allowance_for(policy, question)
    return f", {most.epsilon:g} for {most.spenders}"


def _limits(policy: "Policy") -> str:
    said = f"{policy.epsilon:g}"
    if policy.epsilon_a_job is not None:
        said += f", {policy.epsilon_a_job:g} for a job"
    if policy.epsilon_a_month is not None:
        said += f", {policy.epsilon_a_month:g} a month"
    return said


# ---- show and init --------------------------------------------------------------------------------


@app.command()
def show(policy: PolicyFile = None, home: Home = None, as_json: Json = False) -> None:
    """Print the policy in force with every key, and the fingerprints that other members may pin."""
    from edge_client.identity.home import home_path

    folder = home_path(home)
    rules, source = _policy(folder, policy)
    values = rules.model_dump(mode="json", by_alias=True)
    federation, key = _fingerprints(folder)
    if as_json or json_requested():
        print_json({"policy": values, "source": source, "federation": federation, "fingerprint": key})
        return
    typer.echo(f"# In force: {source}.")
    for name, value in values.items():
        typer.echo(f"# {name} is not set." if value is None else f"{name} = {_toml(value)}")
    if federation:
        typer.echo(f"# This federation, for `authorities`: {federation}")
        typer.echo(f"# This member's key, for the others' `peers`: {key}")
    else:
        typer.echo("# Not enrolled yet: there is no key that others could pin.")


def _fingerprints(home: Path) -> tuple[str | None, str | None]:
    """Returns the fingerprints of the federation and of this member's public key, in hexadecimal."""
    identity = _identity(home)
    if identity is None:
        return None, None
    from edge_client.policy.rules import fingerprint
    from tacit.verification import verifiers

    _, key_of = verifiers(identity.authorities.history)
    return identity.federation.hex(), fingerprint(key_of(identity.certificate)).hex()


@app.command()
def init(
    policy: PolicyFile = None,
    home: Home = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if there is one.")] = False,
    as_json: Json = False,
) -> None:
    """Write a policy file with every key, its meaning and its default, all commented out."""
    from edge_client.identity.home import Home as Folder
    from edge_client.identity.home import HomeUnusable, home_path

    folder = home_path(home)
    path = policy or folder / "policy.toml"
    try:
        if policy is None:
            Folder(folder).prepare()
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(default_file())
    except HomeUnusable as error:
        fail(str(error), ExitCode.USAGE)
    except FileExistsError:
        fail(f"{path} exists; edit it, or replace it with --force", ExitCode.USAGE)
    except OSError as error:
        fail(
            f"{path} cannot be written: {error.strerror}; choose another place with --policy or --home", ExitCode.USAGE
        )
    if as_json or json_requested():
        print_json({"policy": str(path)})
        return
    typer.echo(f"Wrote {path}: it changes nothing until you remove the # from a line.")
    typer.echo("Next: `edge_client policy check job.toml` checks a job against it.")


def default_file() -> str:
    """Returns a policy.toml of the defaults. It is valid as it is, and with any of its keys uncommented."""
    import textwrap

    from edge_client.policy.policy import Policy

    defaults = Policy().model_dump(mode="json")
    lines = [
        "# What this member agrees to. No job can exceed these limits. Each key has its default here: remove the #",
        "# to change it. `edge_client policy check JOB` checks a job against the policy.",
        "schema = 1",
    ]
    for name, field in Policy.model_fields.items():
        if name == "schema_version":
            continue
        lines += ["", *textwrap.wrap(field.description or "", 112, initial_indent="# ", subsequent_indent="# ")]
        value = defaults[name]
        if value is None or value in ([], {}):
            examples: list[Any] = field.examples or []
            # The examples of a list are its items.
            value = examples if isinstance(value, list) else examples[0]
            lines.append("# Not set. For example:")
        lines.append(f"# {name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    """Returns a value as TOML, on one line. A JSON string is a TOML string, too."""
    import json

    match value:
        case bool():
            return str(value).lower()
        case list():
            return f"[{', '.join(map(_toml, value))}]"
        case dict():
            inner = ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items())
            return f"{{ {inner} }}" if inner else "{}"
        case str():
            return json.dumps(value, ensure_ascii=False)
        case _:
            return repr(value)
