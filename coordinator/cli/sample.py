"""`coordinator sample`: samples synthetic text from a published version, for jobs whose corpus the operator makes."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.common import Dir, Json, Operator, fetch_authorities, operator_channel, operator_folder, run
from coordinator.cli.model import Material, Version, fetch_material
from toolkit.console import ExitCode, fail, print_json
from toolkit.install import install_with

if TYPE_CHECKING:
    from tacit.authorities import Authorities
    from tacit.corpus import CorpusStatement

__all__ = ["sample"]


def sample(
    job: Annotated[str, typer.Argument(help="The job's name.")],
    out: Annotated[Path, typer.Option(help="The folder for operator.jsonl and its statement.")],
    texts: Annotated[
        int | None,
        typer.Option(
            min=1, max=100_000, help="How many texts to sample. Default: the job's `corpus.texts`.", show_default=False
        ),
    ] = None,
    version: Version = None,
    operator: Operator = None,
    folder: Dir = None,
    as_json: Json = False,
) -> None:
    """Sample synthetic texts from a version of an rvae job. Next: `coordinator finetune JOB --corpora OUT`.

    If the job has a privacy mechanism, any number of texts costs the members nothing more. The operator's key signs the
    statement about them.
    """
    try:
        from export.synthetic import synthesise
    except ImportError as error:
        fail(
            f"sampling texts runs the model and needs its libraries ({error.name or error} is missing); "
            f"{install_with('coordinator', 'export')}, here or on another machine with the operator's folder",
            ExitCode.USAGE,
        )
    from tacit.corpus import MAX_GUIDED_LABELS, CorpusOrder

    where = operator_folder(operator, folder)
    with tempfile.TemporaryDirectory(prefix="tacit-sample-") as scratch:

        async def work() -> "tuple[Material, Authorities]":
            async with operator_channel(where) as channel:
                from tacit.v1.operator_pb2_grpc import OperatorServiceStub

                stub = OperatorServiceStub(channel)
                material = await fetch_material(stub, job, version, Path(scratch), quiet=as_json)
                return material, await fetch_authorities(channel, where)

        material, authorities = run(work())
    if material.number < 1:
        fail(
            f"job {job} has no finished round, and its version 0 knows only public text; wait for a round",
            ExitCode.REFUSED,
        )
    order = material.document.corpus or CorpusOrder(
        source="operator", guidance=1 if len(material.document.labels) <= MAX_GUIDED_LABELS else 0
    )
    if texts is not None:
        order = order.model_copy(update={"texts": texts})
    try:
        made = synthesise(
            material.document,
            material.manifest,
            material.weights,
            material.tokenizer,
            out,
            order=order,
            federation=authorities.federation,
            round=material.number,
            frozen=material.frozen,
        )
    except (ValueError, OSError) as error:
        fail(f"version {material.number} of job {job} cannot be sampled: {error}", ExitCode.FAILED)
    try:
        _sign(made.statement, out, where, authorities)
    except (ValueError, OSError) as error:
        fail(f"the statement about {made.path} cannot be signed with the key in {where}: {error}", ExitCode.FAILED)
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
        "differentially private, by the members' ledgers"
        if said.promise == "differentially-private"
        else "no differential privacy guarantee"
    )
    typer.echo(f"Wrote {said.rows} texts from version {material.number} to {made.path}: {promise}.")
    typer.echo(f"Next: coordinator finetune {job} --corpora {out} --test FILE --out FOLDER")


def _sign(statement: "CorpusStatement", out: Path, where: Path, authorities: "Authorities") -> None:
    """Signs the statement, and writes statement, signature and proof beside the file as for a member's corpus.

    Args:
        statement: The statement about the file.
        out: The folder of the file.
        where: The operator's folder, whose key signs.
        authorities: The federation's authorities.

    Raises:
        ValueError: the key is not an operator's.
        OSError: the folder cannot be written.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    from coordinator.config import load_operator
    from tacit.certificates import certificate_from_pem
    from tacit.corpus import signed_bytes
    from tacit.corpus_proof import AUTHORITIES, files_beside, verify_statement
    from tacit.identity import own_key, sign

    identity = load_operator(where)
    key = own_key(identity.key_pem)
    if not isinstance(key, rsa.RSAPrivateKey):
        raise ValueError(f"{where / 'key.pem'} is not an RSA key; the coordinator issues only RSA keys")
    certificate = certificate_from_pem(identity.certificate_pem).public_bytes(serialization.Encoding.DER)
    signature = sign(key, signed_bytes(statement))
    verify_statement(statement, signature, certificate, authorities)
    for name, content in {
        **files_beside(statement, signature, certificate),
        AUTHORITIES: authorities.canonical(),
    }.items():
        (out / name).write_bytes(content)
