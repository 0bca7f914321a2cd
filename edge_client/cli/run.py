"""`edge_client run` takes part in the federation's jobs with one file of data."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from edge_client.cli.options import (
    Device,
    Home,
    MessagesColumn,
    PersonColumn,
    PromptColumn,
    ResponseColumn,
    Runtime,
    SecondText,
    SkipInvalid,
)

__all__ = ["run"]


def run(
    data: Annotated[
        Path,
        typer.Option(
            help="Your examples: .jsonl, .csv or .tsv (also .gz), .parquet, .arrow, or a datasets folder.",
            show_default=False,
        ),
    ],
    text: Annotated[str, typer.Option(help="The column that holds the text.")] = "text",
    label: Annotated[str, typer.Option(help="The column that holds the label.")] = "label",
    text_b: SecondText = None,
    prompt: PromptColumn = None,
    response: ResponseColumn = None,
    messages: MessagesColumn = None,
    person: PersonColumn = None,
    job: Annotated[
        list[str] | None,
        typer.Option(help="Take part only in jobs of this name; * and ? are wildcards; may be given more than once."),
    ] = None,
    coordinator: Annotated[
        list[str] | None,
        typer.Option(
            help="host:port of a coordinator, in place of those of the enrolment; may be given more than once. The "
            "member dials them in this order until one serves.",
            show_default=False,
        ),
    ] = None,
    device: Device = "auto",
    runtime: Runtime = "auto",
    policy: Annotated[
        Path | None, typer.Option(help="Your policy. Default: policy.toml in the member's folder.")
    ] = None,
    home: Home = None,
    skip_invalid: SkipInvalid = False,
    data_name: Annotated[
        str,
        typer.Option(
            help="Your name for this data. Each name has its own privacy ledger, whatever file the data comes from, "
            "and its own private parameters of each job."
        ),
    ] = "data",
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve this member's metrics on 127.0.0.1 (0: any free port).", min=0, max=65535)
    ] = None,
    metrics_file: Annotated[
        Path | None,
        typer.Option(
            help="Write this member's metrics to a .prom file, for the node exporter's textfile collector. The file "
            "is removed at the end.",
            show_default=False,
        ),
    ] = None,
    traces_to: Annotated[
        str | None,
        typer.Option(
            help="Send spans of this member's rounds to the OpenTelemetry collector at http://HOST:4317. They have no "
            "figure of your rows, but how long training takes tells about how many there are.",
            show_default=False,
        ),
    ] = None,
    embedding: Annotated[
        Path | None,
        typer.Option(
            help="Word vectors that private embeddings start from: a GloVe text file or a checkpoint's folder. If you "
            "build your own vocabulary, it also takes in their words. Default: what the job says, or random."
        ),
    ] = None,
    backbone: Annotated[
        list[Path] | None,
        typer.Option(
            help="A folder with a frozen language model for prompted jobs, as save_pretrained writes it; may be given "
            "more than once. TACIT_BACKBONES may name further folders.",
            show_default=False,
        ),
    ] = None,
    private_key_file: Annotated[
        Path | None,
        typer.Option(
            help="Seal private vocabularies and embeddings on disk with the key in this file. To use a passphrase "
            "instead, set TACIT_PASSPHRASE."
        ),
    ] = None,
    keep_features: Annotated[
        bool,
        typer.Option(
            "--keep-features",
            help="Keep on disk what a frozen model computes of your texts for jobs that train a head alone, sealed "
            "like private vocabularies. Without it, nothing is kept, and what was kept before is removed.",
        ),
    ] = False,
    idle: Annotated[
        str | None,
        typer.Option(
            help="A command that says when to be connected: exit code 0 means now. It runs before each session and "
            "every minute between rounds; no round is interrupted.",
            show_default=False,
        ),
    ] = None,
    until_finished: Annotated[
        bool, typer.Option("--until-finished", help="End once every job that this member took part in is over.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Send nothing. Print what each open job would send, what the policy says to it, and how much of your "
            "texts its model would read (unknown words, texts that are cut).",
        ),
    ] = False,
    log_format: Annotated[
        Literal["console", "json"] | None,
        typer.Option(help="console or json. Default: console, with progress bars on a terminal."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", envvar="TACIT_JSON", show_envvar=False, help="Print results as JSON objects.")
    ] = False,
) -> None:
    """Train with others on your own data, until interrupted.

    The text stays here. What leaves is a masked vector; the coordinator can read only the sum over the cohort.
    The command reconnects when the connection breaks.
    """
    from toolkit.tls import tls_13_only

    tls_13_only()
    # Read when numpy is loaded. Subnormal numbers are zero in the thread that trains (`learning.backbones.subnormals`),
    # and not in others that numpy would multiply in. On a busy machine those take many times longer, too.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"

    from edge_client.agent.runner import RunOptions, run_member

    options: RunOptions = RunOptions(
        data=data,
        text=text,
        label=label,
        text_b=text_b,
        prompt=prompt,
        response=response,
        messages=messages,
        person=person,
        skip_invalid=skip_invalid,
        jobs=tuple(job or ()),
        coordinators=tuple(coordinator or ()),
        device=device,
        runtime=runtime,
        policy=policy,
        home=home,
        until_finished=until_finished,
        log_format=log_format,
        as_json=as_json,
        data_name=data_name,
        metrics_port=metrics_port,
        metrics_file=metrics_file,
        traces_to=traces_to,
        embedding=embedding,
        private_key_file=private_key_file,
        backbones=tuple(backbone or ()),
        keep_features=keep_features,
        idle=idle,
    )
    if dry_run:
        from edge_client.agent.dry_run import dry_run as show

        show(options)
    else:
        from edge_client.agent.dry_run import describing

        run_member(options, describe=describing(options))
