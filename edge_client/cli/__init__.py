"""The command line of a member's machine. Commands import what they need only when they run: `--help` stays quick."""

from edge_client.cli.audit import audit
from edge_client.cli.corpus import app as corpus
from edge_client.cli.doctor import doctor
from edge_client.cli.enrol import enrol
from edge_client.cli.evaluate import evaluate
from edge_client.cli.export import export
from edge_client.cli.generate import generate
from edge_client.cli.job import app as job
from edge_client.cli.ledger import app as ledger
from edge_client.cli.members import members
from edge_client.cli.models import models
from edge_client.cli.policy import app as policy
from edge_client.cli.predict import predict
from edge_client.cli.privacy import app as privacy
from edge_client.cli.private import app as private
from edge_client.cli.renew import renew
from edge_client.cli.run import run
from edge_client.cli.steward import app as steward
from edge_client.cli.withdraw import withdraw
from edge_client.cli.witness import app as witness
from toolkit.console import program, run_app

__all__ = ["app", "main"]


def _version() -> str:
    from tacit import __version__

    return __version__


app = program(
    "edge_client",
    _version,
    help="Train a model together with others; no text ever leaves this machine.\n\n"
    "The first time: `edge_client enrol` (it asks for the token, or reads it from standard input), then "
    "`edge_client doctor`, then `edge_client run --data FILE`.",
    epilog="Exit codes: 0 done, 1 the work failed, 2 wrong input, 3 unreachable, 4 refused, 5 not found, "
    "6 above the claim. Every command takes --json; TACIT_HOME names the member's folder.",
)

app.command()(enrol)
app.command()(doctor)
app.command()(renew)
app.command()(run)
app.command(short_help="Show who has joined the federation, and what is new.")(members)
app.command(short_help="Show the plugins with models that are installed here.")(models)
app.command(short_help="Withdraw from a job, or from all for good.")(withdraw)
app.command()(export)
app.command(short_help="Measure your own model on your own texts.")(evaluate)
app.command(short_help="Attack your own updates and the published version.")(audit)
app.command()(predict)
app.command(short_help="Answer a question with an exported model that writes.")(generate)
app.add_typer(policy, name="policy")
app.add_typer(privacy, name="privacy", help="Plan what a job costs in privacy, before you join.")
app.add_typer(ledger, name="ledger", help="Show and verify the privacy that your data has spent.")
app.add_typer(private, name="private")
app.add_typer(corpus, name="corpus")
app.add_typer(job, name="job")
app.add_typer(steward, name="steward")
app.add_typer(witness, name="witness")


def main() -> None:
    """The console script."""
    run_app(app)
