"""The operator's command line: `coordinator ...`.

Commands are thin and import what they need when they run, so that help and completion answer at once. Most of them
speak to a running coordinator over mutual TLS and work from any machine that has the operator's folder. `init`,
`serve`, `health`, `backup`, `restore`, `operator` and `authority` work on the coordinator's own machine. Every command
takes `--json`; `toolkit.console.ExitCode` lists the exit codes.
"""

from coordinator.cli import audit, authority, backbone, job, measure, member, operator, passport, store, survey
from coordinator.cli.backup import backup, restore
from coordinator.cli.evaluate import evaluate
from coordinator.cli.finetune import finetune
from coordinator.cli.health import health
from coordinator.cli.init import init
from coordinator.cli.migrate import migrate
from coordinator.cli.model import export
from coordinator.cli.redteam import redteam
from coordinator.cli.sample import sample
from coordinator.cli.serve import serve
from coordinator.cli.simulate import simulate
from coordinator.cli.status import status
from coordinator.cli.track import track
from toolkit.console import program, run_app

__all__ = ["app", "main"]


def _version() -> str:
    from tacit import __version__

    return __version__


app = program(
    "coordinator",
    _version,
    help="Run a federation: create it, serve it, invite members, train models with them.\n\n"
    "First time: `coordinator init`, then `coordinator serve`.",
    epilog="Exit codes: 0 done, 1 the work failed, 2 wrong input, 3 unreachable, 4 refused, 5 not found, "
    "6 above the claim. "
    "Every command except serve takes --json; TACIT_OPERATOR names the operator's folder.",
)

# The command list truncates long first sentences, so commands that have one get a shorter sentence here.
app.command(short_help="Create a federation: keys, configuration, database.")(init)
app.command()(serve)
app.command(short_help="Show jobs and members, once or with --watch.")(status)
app.command(short_help="Check that the coordinator on this machine serves.")(health)
app.add_typer(member.app, name="member", help="Invite, list and revoke members.")
app.add_typer(operator.app, name="operator", help="Issue, list and revoke operators' certificates.")
app.add_typer(authority.app, name="authority", help="Show, replace and retire the federation's authority.")
app.add_typer(job.app, name="job", help="Create, start, inspect and steer training jobs.")
app.add_typer(survey.app, name="survey", help="Ask members about their data before a job.")
app.add_typer(measure.app, name="measure", help="Measure a version on members' rows, under noise.")
app.add_typer(backbone.app, name="backbone", help="Add, list and remove frozen language models.")
app.command(short_help="Measure versions on your own data.")(evaluate)
app.command(short_help="Copy a job's figures into MLflow or TensorBoard.")(track)
app.command(short_help="Write a version as ONNX with its tokenizer.")(export)
app.command(short_help="Attack a job's updates with public or made texts.")(redteam)
app.command(short_help="Play a whole job offline over virtual members.")(simulate)
app.add_typer(passport.app, name="passport", help="Make, verify and show a job's passport.")
app.command(short_help="Sample synthetic texts from a version of an rvae job.")(sample)
app.command(short_help="Train a classifier on members' synthetic texts.")(finetune)
app.add_typer(audit.app, name="audit", help="Show the journal, and verify that nothing in it was changed.")
app.add_typer(store.app, name="store", help="Check the store, and remove from it what nothing needs.")
app.command(short_help="Bring the database to this version's schema.")(migrate)
app.command(short_help="Back up database and blobs, even while serving.")(backup)
app.command(short_help="Restore a backup into an empty database.")(restore)


def main() -> None:
    """The entry point of the `coordinator` command."""
    run_app(app)
