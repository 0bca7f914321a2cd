"""`edge_client export` writes a version of a job's model, with this member's private parameters, as an ONNX bundle.

It first checks the place and the tools, since the rest takes long. Then it loads the member's identity and data,
fetches what the coordinator serves, adapts the private parameters, and writes the bundle.

It takes part in nothing, and reveals to nobody more than which blobs it fetches. The member's private state stays as it
is: the adapted parameters go only into the bundle.
"""

import asyncio
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio

from edge_client.agent.runner import Member, RunOptions, load_member
from edge_client.downloads.backbones import BackboneMissing, Backbones, Wanted, named_folders
from edge_client.downloads.cache import BlobCache
from edge_client.identity.connection import exit_code_of, explain, open_channel
from edge_client.identity.home import MemberIdentity
from edge_client.private_store import PrivateState, PrivateStore, store_key
from edge_client.private_store.errors import StateForeign
from edge_client.session.keeping import Keeper
from learning.artifacts import fetch_job, fetch_manifest, fetch_private_start, fetch_tokenizer, fetch_version
from learning.backbones.layout import BackboneInvalid
from learning.text.corpus import EncodedExamples
from learning.text.data import DataInvalid, label_places, text_rows
from learning.text.encoder import TokenizerInvalid
from tacit.blobs import BlobDamaged, BlobNotThere, fetch_blob
from tacit.bundle import INDEX, BundleInvalid, read_bundle
from tacit.documents import DocumentInvalid
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.method import keeps_anything, keeps_state
from tacit.model import PromptedModel, RvaeModel
from tacit.prompt import reads_pairs
from tacit.v1 import federation_pb2 as pb
from tacit.v1 import federation_pb2_grpc
from toolkit.console import CommandFailed, ExitCode, fail
from toolkit.install import install_with

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from export.onnx import ExportReport
    from learning.backbones.stored import StoredBackbone

__all__ = ["Exported", "Watch", "export_own"]

# Packages that making and comparing an ONNX file needs beyond those of training.
_TOOLS = ("onnx", "onnxscript", "onnxruntime")
_INSTALL = install_with("edge", "export")
# How many texts the ONNX file is compared on with the model it came from.
_SAMPLES = 64


@dataclass(frozen=True)
class Exported:
    """What was exported: the version's number and digest, and how many values of the bundle are private."""

    job: str
    version: int
    digest: bytes
    private: int
    report: "ExportReport"


@dataclass(frozen=True)
class Watch:
    """Callbacks for progress: `say` gets a sentence at each stage, `step` gets (step, steps, loss) while adapting."""

    say: Callable[[str], None] = lambda _: None
    step: Callable[[int, int, float], None] = lambda step, steps, loss: None


@dataclass(frozen=True)
class _Fetched:
    job: JobDocument
    manifest: Manifest
    version: bytes
    number: int
    digest: bytes
    tokenizer: bytes | None
    # What private parameters start from, if the method keeps no state of them.
    start: tuple[Manifest, bytes] | None
    # Only for a prompted job.
    backbone: "StoredBackbone | None"


def export_own(
    name: str, options: RunOptions, out: Path, *, epochs: int | None = None, split: bool = False, watch: Watch = Watch()
) -> Exported:
    """Writes the bundle `out`.

    Args:
        name: The job's name.
        options: Whose data and machine it is, as for `edge_client run`.
        out: The folder to write.
        epochs: How long private parameters are adapted to the version; 0: not at all; None: as the job's method has it
            (`training.personal`).
        split: Writes the prompt of a prompted job alone, beside its backbone.
        watch: Callbacks for progress.

    Raises:
        CommandFailed: The input cannot be used, the coordinator cannot be reached, there is nothing to export, or the
            model cannot be exported.
        StoreError: The member's private state cannot be opened.
    """
    _check_place(out)
    _check_tools()
    member = load_member(options)
    if member.skipped:
        watch.say(member.skipped.sentence(len(member.examples)))
    key = store_key(options.private_key_file)
    with PrivateStore(member.home, member.identity.federation, options.data_name, key) as store:
        found = _fetched(name, member, named_folders(options.backbones))
        kept = _kept(found, Keeper(store, member.examples))
    tokenizer = found.tokenizer if kept is None or kept.tokenizer is None else kept.tokenizer
    if tokenizer is None:
        fail(f"job {name} has no tokenizer, and this member has none of its own; tell the operator", ExitCode.FAILED)
    return _written(found, member, tokenizer, {} if kept is None else kept.arrays, out, epochs, split, watch)


def _check_place(out: Path) -> None:
    """Refuses what the bundle could not replace. Writing checks again."""
    try:
        if not out.exists() and not out.is_symlink():
            return
        if out.is_symlink() or not out.is_dir():
            fail(f"{out} is not a folder; name a new one with --out", ExitCode.USAGE)
        present = {entry.name for entry in out.iterdir()}
        foreign = sorted(present - {INDEX, *read_bundle(out, "model", "prompt").files}) if present else []
    except OSError as error:
        fail(f"{out} cannot be read ({error.strerror}); name another folder with --out", ExitCode.USAGE)
    except BundleInvalid:
        fail(f"{out} is neither empty nor a complete earlier export; name a new folder with --out", ExitCode.USAGE)
    if foreign:
        fail(
            f"{out} would be replaced and holds other files ({', '.join(foreign[:3])}); name a new folder with --out",
            ExitCode.USAGE,
        )


def _check_tools() -> None:
    missing = [name for name in _TOOLS if importlib.util.find_spec(name) is None]
    if missing:
        fail(f"making an ONNX file needs {', '.join(missing)}; {_INSTALL}", ExitCode.USAGE)


def _fetched(name: str, member: Member, folders: Sequence[Path]) -> _Fetched:
    cache = BlobCache(member.home / "cache")
    backbones = Backbones(cache, folders=folders, allowed=member.policy.backbones)
    try:
        return asyncio.run(_fetch(name, member.identity, cache, backbones))
    except grpc.aio.AioRpcError as error:
        raise CommandFailed(explain(error, member.identity), exit_code_of(error)) from error
    except BackboneMissing as error:
        fail(str(error), ExitCode.NOT_FOUND)
    except (DocumentInvalid, TokenizerInvalid, BackboneInvalid) as error:
        fail(f"{error}; the coordinator may be newer than this software; upgrade it", ExitCode.FAILED)
    except (BlobDamaged, BlobNotThere) as error:
        fail(
            f"the coordinator does not serve the files of job {name} ({error}); try again, and tell the operator if "
            "that does not help",
            ExitCode.FAILED,
        )
    except OSError as error:
        fail(f"the files of the job cannot be stored in {member.home / 'cache'}: {error}", ExitCode.FAILED)


async def _fetch(name: str, identity: MemberIdentity, cache: BlobCache, backbones: Backbones) -> _Fetched:
    async with open_channel(identity) as channel:
        stub = federation_pb2_grpc.FederationServiceStub(channel)

        async def blob(digest: bytes, limit: int) -> bytes:
            path = cache.path(digest)
            await fetch_blob(stub.FetchBlob, digest, path, limit=limit)
            return await asyncio.to_thread(path.read_bytes)

        response: pb.OpenJobsResponse = await stub.OpenJobs(pb.OpenJobsRequest(all=True), timeout=30)
        found = next((each for each in response.jobs if each.name == name), None)
        if found is None:
            there = ", ".join(sorted(each.name for each in response.jobs)) or "none"
            fail(f"there is no job {name}; this federation has: {there}", ExitCode.NOT_FOUND)
        job = await fetch_job(blob, name, found.job_document)
        if isinstance(job.model, RvaeModel):
            fail(
                f"job {name} trains a generator of synthetic text, so there is no classifier to export; see its texts "
                f"with `edge_client corpus show {name}`, and train a classifier from the corpora",
                ExitCode.USAGE,
            )
        manifest = await fetch_manifest(blob, job)
        version = await fetch_version(blob, job, manifest, found.version_number, found.version)
        tokenizer = await fetch_tokenizer(blob, job)
        start = None if keeps_state(job.method) else await fetch_private_start(blob, job)
        backbone = None
        if isinstance(job.model, PromptedModel):

            async def fetch(digest: bytes, into: Path, limit: int) -> None:
                await fetch_blob(stub.FetchBlob, digest, into, limit=limit)

            backbone = await backbones.open(Wanted.of(job.model), fetch)
        return _Fetched(job, manifest, version, found.version_number, found.version, tokenizer, start, backbone)


def _kept(found: _Fetched, keeper: Keeper) -> PrivateState | None:
    """Returns the member's private state of the job, or the one it would begin a round with; None if all is shared.

    Raises:
        CommandFailed: The job keeps a state, and there is none yet.
        StoreError: There is a state that cannot be opened.
    """
    job = found.job
    if not keeps_anything(job.method):
        return None
    if not keeps_state(job.method):
        try:
            return keeper.make(job, found.tokenizer, found.start)
        except (DocumentInvalid, TokenizerInvalid) as error:
            fail(f"the files of job {job.name} cannot be used: {error}; tell the operator", ExitCode.FAILED)
    try:
        kept = keeper.look(job)
    except StateForeign as error:
        # The error's other advice would cost a member that only forgot an option its whole private state.
        fail(f"{error}. If you mean that data, give its name with --data-name", ExitCode.USAGE)
    if kept is None:
        fail(
            f"this member has no private state of {job.name} yet, because it has taken part in no round; take part "
            "with `edge_client run`",
            ExitCode.NOT_FOUND,
        )
    return kept


def _written(
    found: _Fetched,
    member: Member,
    tokenizer: bytes,
    kept: "Mapping[str, NDArray[np.float32]]",
    out: Path,
    epochs: int | None,
    split: bool,
    watch: Watch,
) -> Exported:
    from learning.training.local import TrainingDiverged

    job, number = found.job, found.number
    pairs = reads_pairs(job.model)
    # Rows without a second text are skipped, as in training. If none is left, the error says what is missing.
    rows = [each for each in member.examples if each.text_b is not None or not pairs] or member.examples
    try:
        texts = text_rows(rows[:_SAMPLES], pairs=pairs)
    except DataInvalid as error:
        fail(str(error), ExitCode.USAGE)
    try:
        from export.card import Origin
        from export.onnx import export_model

        private = _adapted(found, member, tokenizer, kept, epochs, watch) if kept else {}
        mixture = _mixture(job, member) if job.training.logit_adjustment else None
        watch.say(f"making the ONNX file of version {number} and comparing it with the model on {len(texts)} texts")
        report = export_model(
            job,
            found.manifest,
            found.version,
            tokenizer,
            out,
            texts,
            private,
            mixture=mixture,
            backbone=found.backbone,
            split=split,
            origin=Origin(number),
        )
    except TrainingDiverged as error:
        fail(
            f"this member's private parameters of {job.name} cannot be adapted to version {number}: {error}; "
            "--epochs 0 exports them as they are",
            ExitCode.FAILED,
        )
    except ImportError as error:
        fail(f"making an ONNX file needs {error.name or error}; {_INSTALL}", ExitCode.USAGE)
    except (ValueError, RuntimeError, OSError) as error:
        fail(f"version {number} of {job.name} cannot be exported: {error}", ExitCode.FAILED)
    own = sum(each.size for each in private.values()) + (0 if mixture is None else mixture.size)
    return Exported(job.name, number, found.digest, own, report)


def _mixture(job: JobDocument, member: Member) -> "NDArray[np.float32]":
    """Returns the logarithms of the shares of this member's labels, (L,), which logit adjustment kept out of training.

    Raises:
        CommandFailed: No example has a label of the job.
    """
    from learning.training.mixture import log_mixture

    places = label_places(member.examples, job.labels)
    if not (places >= 0).any():
        fail(
            f"no example has a label of {job.name}, whose model takes the label frequencies from each member; give the "
            "data that you take part with",
            ExitCode.USAGE,
        )
    return log_mixture(places[places >= 0], len(job.labels))


def _adapted(
    found: _Fetched,
    member: Member,
    tokenizer: bytes,
    kept: "Mapping[str, NDArray[np.float32]]",
    epochs: int | None,
    watch: Watch,
) -> "Mapping[str, NDArray[np.float32]]":
    """Returns private parameters, trained for `epochs` beside the version's shared ones; None: the method's number.

    Raises:
        CommandFailed: There is no example to adapt on.
        TrainingDiverged: The training diverged.
        ValueError: The parts do not fit together.
    """
    from learning.models.assembly import assembled
    from learning.training.personal import adapted, usual_epochs

    job = found.job
    epochs = usual_epochs(job.method) if epochs is None else epochs
    corpus = EncodedExamples(member.examples, job, tokenizer)
    module, division = assembled(job, corpus, found.manifest, found.manifest.decode(found.version), kept)
    if epochs:
        if not len(corpus.read().usable):
            fail(
                f"no example has a label of {job.name}; give the data that you take part with, or --epochs 0",
                ExitCode.USAGE,
            )
        what = "an epoch" if epochs == 1 else f"{epochs} epochs"
        watch.say(f"adapting this member's private parameters of {job.name} to version {found.number}: {what}")
    return adapted(
        job,
        module,
        division,
        corpus,
        epochs=epochs,
        seed=job.seed,
        device=member.device,
        progress=lambda at: watch.step(at.step, at.steps, at.loss),
    )
