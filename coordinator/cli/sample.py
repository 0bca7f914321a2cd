"""`coordinator sample`: made-up text from a published version, for jobs whose corpus is the operator's to make."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.common import CALL_SECONDS, Dir, Json, Operator, operator_folder, operator_stub, run
from coordinator.cli.model import Material, Version, fetch_material
from tacit.console import ExitCode, fail, print_json

__all__ = ["sample"]


def sample(
    job: Annotated[str, typer.Argument(help="The job's name.")],
    out: Annotated[Path, typer.Option(help="The folder for operator.jsonl and its statement.")],
    texts: Annotated[
        int | None,
        typer.Option(min=1, max=100_000, help="How many. Default: as the job's [corpus] says.", show_default=False),
    ] = None,
    version: Version = None,
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Make texts up from a version of an rvae job. Next: `coordinator finetune JOB --corpora OUT`.

    Under a privacy mechanism any number of texts costs the members nothing more.
    """
    try:
        from export.made_up import make_up
    except ImportError as error:
        fail(
            f"making texts up runs the model and needs the libraries for that ({error.name or error} is missing); "
            "install them with `pip install 'tacit[coordinator,export]'`, here or on another machine with the "
            "operator's folder",
            ExitCode.USAGE,
        )
    from tacit.corpus import MOST_GUIDED_LABELS, CorpusOrder
    from tacit.v1 import operator_pb2

    where = operator_folder(operator, folder)
    with tempfile.TemporaryDirectory(prefix="tacit-sample-") as scratch:

        async def work() -> tuple[Material, bytes]:
            async with operator_stub(where) as stub:
                status: operator_pb2.StatusResponse = await stub.Status(
                    operator_pb2.StatusRequest(), timeout=CALL_SECONDS
                )
                material = await fetch_material(stub, job, version, Path(scratch), quiet=as_json)
                return material, bytes.fromhex(status.federation)

        material, federation = run(work())
    if material.number < 1:
        fail(f"job {job} has no round behind it: its version 0 knows public text only; wait for one", ExitCode.REFUSED)
    order = material.document.corpus or CorpusOrder(
        source="operator", guidance=1 if len(material.document.labels) <= MOST_GUIDED_LABELS else 0
    )
    if texts is not None:
        order = order.model_copy(update={"texts": texts})
    try:
        made = make_up(
            material.document,
            material.manifest,
            material.weights,
            material.tokenizer,
            out,
            order=order,
            federation=federation,
            round=material.number,
        )
    except (ValueError, OSError) as error:
        fail(f"version {material.number} of job {job} gives no text: {error}", ExitCode.FAILED)
    said = made.statement
    if as_json:
        print_json(
            {
                "job": job,
                "version_number": material.number,
                "file": str(made.path),
                "rows": said.rows,
                "promise": said.promise,
            }
        )
        return
    promise = (
        "differentially private as the members' ledgers have it"
        if said.promise == "differentially-private"
        else "no differential privacy guarantee"
    )
    typer.echo(f"Wrote {said.rows} texts of version {material.number} to {made.path}: {promise}.")
    typer.echo(f"Next: coordinator finetune {job} --corpora {out} --test FILE --out FOLDER")
