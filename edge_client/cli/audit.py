"""`edge_client audit` attacks this member's own updates and the published version, on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from edge_client.cli.options import (
    DataFile,
    DataName,
    Device,
    Home,
    Json,
    KeyFile,
    OwnBackbones,
    SecondText,
    SkipInvalid,
)
from edge_client.cli.watching import watching
from toolkit.console import ExitCode, json_requested, print_json, printable

__all__ = ["audit"]


def audit(
    job: Annotated[str, typer.Argument(help="The job's name.", show_default=False)],
    data: DataFile,
    held_out: Annotated[
        Path | None,
        typer.Option(
            help="Labelled texts like your data that you did not train on: .jsonl, .csv, .tsv or .parquet. With "
            "them the published version is attacked, too.",
            show_default=False,
        ),
    ] = None,
    release: Annotated[
        Path | None,
        typer.Option(
            help="Also write the file that may leave this machine: the verdict, and the result of the canaries planted "
            "in your data, signed with your key. Needs such canaries.",
            show_default=False,
        ),
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0.0, max=1440.0, help="Roughly how long to train rehearsals; at least two are made.")
    ] = 5.0,
    text: Annotated[str, typer.Option(help="The column of both files that holds the text.")] = "text",
    label: Annotated[str, typer.Option(help="The column of both files that holds the label.")] = "label",
    text_b: SecondText = None,
    skip_invalid: SkipInvalid = False,
    data_name: DataName = "data",
    device: Device = "auto",
    home: Home = None,
    backbone: OwnBackbones = None,
    private_key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Attack your own updates and the job's newest version, and compare with the epsilon that the job claims.

    It trains rounds again in memory, with random texts (canaries) and your own texts in by coins,
    and guesses from what would leave which were in. Enough right guesses prove a lower bound on epsilon.
    It sends nothing, and no ledger is charged. Keep the result to yourself: it depends on your data.

    The exit code is 6 if a lower bound is above the claim.
    """
    from toolkit.tls import tls_13_only

    tls_13_only()

    from edge_client.agent import auditing
    from edge_client.agent.runner import RunOptions
    from edge_client.cli.private import sentences

    quiet = as_json or json_requested()
    options: RunOptions = RunOptions(
        data=data,
        text=text,
        label=label,
        text_b=text_b,
        skip_invalid=skip_invalid,
        device=device,
        home=home,
        data_name=data_name,
        private_key_file=private_key_file,
        backbones=tuple(backbone or ()),
    )
    with sentences(), watching(quiet) as watch:
        done, signed = auditing.audit_own(job, options, auditing.AuditOptions(minutes, held_out, release), watch=watch)
    if quiet:
        print_json(done.as_json())
    else:
        for line in done.sentences():
            typer.echo(printable(line))
    if release is not None and signed is not None:
        auditing.release(release, signed)
        if not quiet:
            typer.echo(f"Wrote {release}: what may leave this machine.")
    raise typer.Exit(int(ExitCode.ABOVE_CLAIM if done.verdict == "above-claim" else ExitCode.OK))
