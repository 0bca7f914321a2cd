"""`edge_client export` writes this member's own model, for `edge_client predict` or `generate`.

    edge_client export desk --data rows.jsonl --out model

This module reads the options and prints the result. `edge_client.agent.exporting` does the work.
"""

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
    MessagesColumn,
    OwnBackbones,
    PromptColumn,
    ResponseColumn,
    SecondText,
    SkipInvalid,
)
from edge_client.cli.watching import watching
from export.onnx_form import GraphPrecisionOption
from toolkit.console import json_requested, print_json
from toolkit.interruption import Interruption

__all__ = ["export"]


def export(
    job: Annotated[str, typer.Argument(help="The job's name.", show_default=False)],
    data: DataFile,
    out: Annotated[
        Path,
        typer.Option(
            help="The folder to write: new, empty, or an earlier export, which is replaced.",
            show_default=False,
        ),
    ],
    text: Annotated[str, typer.Option(help="The column that holds the text.")] = "text",
    label: Annotated[str, typer.Option(help="The column that holds the label.")] = "label",
    text_b: SecondText = None,
    prompt: PromptColumn = None,
    response: ResponseColumn = None,
    messages: MessagesColumn = None,
    skip_invalid: SkipInvalid = False,
    data_name: DataName = "data",
    epochs: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=1000,
            help="Epochs on your data that adapt your private parameters to the version. Default: 1. For a fedrecon "
            "job, which makes its private rows anew: the job's method.epochs.",
            show_default=False,
        ),
    ] = None,
    split: Annotated[
        bool,
        typer.Option(
            "--split",
            help="For a prompted job: write the prompt alone. Its backbone, which all prompts on it share, is "
            "written beside --out unless it is there.",
        ),
    ] = False,
    precision: GraphPrecisionOption = "float32",
    device: Device = "auto",
    home: Home = None,
    backbone: OwnBackbones = None,
    private_key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Write the job's newest model as ONNX, with your own vocabulary and embedding in it.

    If the job leaves a part of the model or label frequencies to its members, the folder holds yours. Then keep it on
    this machine.
    """
    from toolkit.tls import tls_13_only

    # Before the next imports: they import gRPC, which reads the setting once.
    tls_13_only()

    from edge_client.agent.exporting import export_own
    from edge_client.agent.runner import RunOptions
    from edge_client.cli.private import sentences

    quiet = as_json or json_requested()
    options: RunOptions = RunOptions(
        data=data,
        text=text,
        label=label,
        text_b=text_b,
        prompt=prompt,
        response=response,
        messages=messages,
        skip_invalid=skip_invalid,
        device=device,
        home=home,
        data_name=data_name,
        private_key_file=private_key_file,
        backbones=tuple(backbone or ()),
    )
    # What is made beside `out` holds a whole model, so SIGTERM removes it, as Ctrl-C does.
    with sentences(), watching(quiet) as watch, Interruption():
        exported = export_own(job, options, out, epochs=epochs, split=split, precision=precision, watch=watch)
    # With --split, the backbone that lies beside the prompt.
    shared = exported.report.shared
    if quiet:
        about_backbone = {} if shared is None else {"backbone": str(shared.folder), "backbone_written": shared.written}
        print_json(
            {
                "job": exported.job,
                "version": exported.version,
                "digest": exported.digest.hex(),
                "private_values": exported.private,
                "max_difference": exported.report.max_difference,
                "files": exported.report.files,
                **about_backbone,
            }
        )
        return
    command = "generate" if exported.writes else "predict"
    typer.echo(
        f"Wrote {out}: version {exported.version} of {exported.job}; largest difference from the trained model "
        f"{exported.report.max_difference:.2g}. Try `edge_client {command} --bundle {out} TEXT`; "
        "its README.md says how to run it without this software."
    )
    if shared is not None:
        typer.echo(
            f"It needs its backbone {shared.folder}, {sum(shared.files.values()) / 1e6:,.1f} MB, "
            f"{'written just now' if shared.written else 'which was there already'}: keep both in the same folder."
        )
    if exported.private:
        typer.echo(f"{exported.private:,} of its values are private to you: keep the folder on this machine.")
