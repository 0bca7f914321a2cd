"""A member's own model of a job: the newest version, its private parameters adapted to it, its tokenizer.

`edge_client export` writes this model, and `edge_client evaluate` measures it in memory. Making it takes part in
nothing, and reveals to nobody more than which blobs the member fetched. No ledger is opened. The member's private state
stays as it is: the adapted parameters exist only in what is returned. Downloads stay in the cache, as in a round.
"""

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from edge_client.agent.runner import Member, RunOptions
from edge_client.downloads.backbones import BackboneMissing, Backbones, Wanted, named_folders
from edge_client.downloads.cache import BlobCache
from edge_client.identity.reaching import CallFailed, call_any
from edge_client.policy.plugins import allow_plugin
from edge_client.policy.policy import Policy
from edge_client.private_store import PrivateState, PrivateStore, store_key
from edge_client.private_store.errors import StateForeign
from edge_client.session.keeping import Keeper
from learning.artifacts import (
    fetch_frozen,
    fetch_job,
    fetch_manifest,
    fetch_private_start,
    fetch_tokenizer,
    fetch_version,
)
from learning.backbones.layout import BackboneInvalid
from learning.plugins.installed import PluginUnusable
from learning.text.corpus import EncodedExamples
from learning.text.encoder import TokenizerInvalid
from learning.text.examples import label_places
from tacit.blobs import BlobDamaged, BlobNotThere, fetch_blob
from tacit.documents import DocumentInvalid
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.method import keeps_anything, keeps_state
from tacit.model import PromptedModel, RvaeModel
from tacit.pieces import fetch_pieces
from tacit.v1 import federation_pb2 as pb
from tacit.v1 import federation_pb2_grpc
from toolkit.console import CommandFailed, ExitCode, fail

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from learning.backbones.stored import StoredBackbone

__all__ = ["UNWATCHED", "Fetched", "OwnModel", "Watch", "fetch_own", "fetch_start", "own_model"]


@dataclass(frozen=True)
class Watch:
    """Callbacks for progress: `say` gets a sentence at each stage, `step` gets (step, steps, loss) while adapting."""

    say: Callable[[str], None] = lambda _: None
    step: Callable[[int, int, float], None] = lambda step, steps, loss: None


UNWATCHED = Watch()


@dataclass(frozen=True)
class Fetched:
    """What the coordinator serves of a job, and what this member keeps of it, before anything is adapted.

    Attributes:
        job: The job.
        manifest: The names and shapes of the shared parameters.
        version: The newest version's bytes.
        number: Its number.
        digest: Its 32 bytes.
        tokenizer: The member's own tokenizer.json, or the job's.
        kept: The member's private parameters by name, before they are adapted; empty if it keeps none.
        frozen: The parameters that the job freezes, by name; empty if it freezes none.
        backbone: Only for a prompted job.
    """

    job: JobDocument
    manifest: Manifest
    version: bytes
    number: int
    digest: bytes
    tokenizer: bytes
    kept: "Mapping[str, NDArray[np.float32]]" = field(repr=False)
    frozen: "Mapping[str, NDArray[np.float32]]" = field(repr=False)
    backbone: "StoredBackbone | None"


@dataclass(frozen=True)
class OwnModel:
    """A member's own model, in parts.

    Attributes:
        private: The adapted private parameters, by name.
        mixture: (L,) Logarithms of the shares of this member's labels, only under logit adjustment.
    """

    fetched: Fetched
    private: "Mapping[str, NDArray[np.float32]]" = field(repr=False)
    mixture: "NDArray[np.float32] | None" = field(repr=False)

    @property
    def private_values(self) -> int:
        """How many values of the model are private to the member."""
        own = sum(each.size for each in self.private.values())
        return own + (0 if self.mixture is None else self.mixture.size)


@dataclass(frozen=True)
class _Served:
    job: JobDocument
    manifest: Manifest
    version: bytes
    number: int
    digest: bytes
    tokenizer: bytes | None
    # What private parameters start from, if the method keeps no state of them.
    start: tuple[Manifest, bytes] | None
    frozen: "Mapping[str, NDArray[np.float32]]"
    backbone: "StoredBackbone | None"


def fetch_own(
    name: str,
    member: Member,
    options: RunOptions,
    *,
    generators: bool = False,
    check: Callable[[JobDocument], None] = lambda _: None,
) -> Fetched:
    """Fetches the job's newest version, and opens what the member keeps of it.

    Args:
        name: The job's name.
        member: The member.
        options: What the member was made from.
        generators: Whether a generator of synthetic text will do, which is no classifier.
        check: Called with the job before anything large is fetched; raises CommandFailed to refuse it.

    Raises:
        CommandFailed: The coordinator cannot be reached, there is no such job, or the member has no private
            state of it.
        StoreError: The member's private state cannot be opened.
    """
    key = store_key(options.private_key_file)
    with PrivateStore(member.home, member.identity.federation, options.data_name, key) as store:
        found = _served(name, member, named_folders(options.backbones), generators, check)
        kept = _kept(found, Keeper(store, member.examples))
    tokenizer = found.tokenizer if kept is None or kept.tokenizer is None else kept.tokenizer
    if tokenizer is None:
        fail(f"job {name} has no tokenizer, and this member has none of its own; tell the operator", ExitCode.FAILED)
    return Fetched(
        found.job,
        found.manifest,
        found.version,
        found.number,
        found.digest,
        tokenizer,
        {} if kept is None else kept.arrays,
        found.frozen,
        found.backbone,
    )


def own_model(found: Fetched, member: Member, *, epochs: int | None = None, watch: Watch = UNWATCHED) -> OwnModel:
    """Adapts the private parameters to the version, on the member's examples.

    Args:
        found: What was fetched.
        member: The member.
        epochs: How long private parameters are adapted; 0: not at all; None: as the job's method has it
            (`training.personal`).
        watch: Callbacks for progress.

    Raises:
        CommandFailed: There is nothing to adapt on, the training diverged, or the parts do not fit together.
    """
    from learning.training.local import TrainingDiverged

    job = found.job
    try:
        private = _adapted(found, member, epochs, watch) if found.kept else {}
        mixture = _mixture(job, member) if job.training.logit_adjustment else None
    except TrainingDiverged as error:
        fail(
            f"this member's private parameters of {job.name} cannot be adapted to version {found.number}: {error}; "
            "--epochs 0 takes them as they are",
            ExitCode.FAILED,
        )
    except (ValueError, RuntimeError) as error:
        fail(f"this member's model of {job.name}, version {found.number}, cannot be made: {error}", ExitCode.FAILED)
    return OwnModel(found, private, mixture)


def fetch_start(found: Fetched, member: Member) -> bytes | None:
    """Fetches version 0's bytes; None if the coordinator no longer serves them.

    Raises:
        CommandFailed: The coordinator cannot be reached.
    """
    if found.number == 0:
        return found.version
    path = BlobCache(member.home / "cache").path(found.job.weights)

    async def fetch(stub: federation_pb2_grpc.FederationServiceStub) -> bytes:
        await fetch_blob(stub.FetchBlob, found.job.weights, path, limit=len(found.version))
        return path.read_bytes()

    try:
        return asyncio.run(call_any(member.identity, fetch))
    except CallFailed as error:
        raise CommandFailed(error.sentence, error.code) from error
    except (BlobDamaged, BlobNotThere):
        return None


def _served(
    name: str, member: Member, folders: Sequence[Path], generators: bool, check: Callable[[JobDocument], None]
) -> _Served:
    cache = BlobCache(member.home / "cache")
    backbones = Backbones(cache, folders=folders, allowed=member.policy.backbones)
    try:
        fetch = functools.partial(_fetch, name, member.policy, cache, backbones, generators, check)
        return asyncio.run(call_any(member.identity, fetch))
    except CallFailed as error:
        raise CommandFailed(error.sentence, error.code) from error
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


async def _fetch(
    name: str,
    policy: Policy,
    cache: BlobCache,
    backbones: Backbones,
    generators: bool,
    check: Callable[[JobDocument], None],
    stub: federation_pb2_grpc.FederationServiceStub,
) -> _Served:
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
    if job.question is not None:
        fail(
            f"job {name} asks a question and trains nothing, so there is no model of it; `edge_client run "
            "--dry-run` shows the question",
            ExitCode.USAGE,
        )
    if isinstance(job.model, RvaeModel) and not generators:
        fail(
            f"job {name} trains a generator of synthetic text, so a member has no classifier of it; see its texts "
            f"with `edge_client corpus show {name}`, and train a classifier from the corpora",
            ExitCode.USAGE,
        )
    check(job)
    try:
        allow_plugin(policy, job)
    except PluginUnusable as error:
        fail(str(error), ExitCode.REFUSED)
    manifest = await fetch_manifest(blob, job)
    version = await fetch_version(blob, job, manifest, found.version_number, found.version)
    frozen = await fetch_frozen(blob, job, manifest)
    tokenizer = await fetch_tokenizer(blob, job)
    start = None if keeps_state(job.method) else await fetch_private_start(blob, job)
    backbone = None
    if isinstance(job.model, PromptedModel):

        async def fetch(digest: bytes, into: Path, limit: int, pieces: bytes = b"") -> None:
            if pieces:
                await fetch_pieces(stub.FetchBlob, digest, pieces, limit, into)
            else:
                await fetch_blob(stub.FetchBlob, digest, into, limit=limit)

        backbone = await backbones.open(Wanted.of(job.model), fetch)
    return _Served(job, manifest, version, found.version_number, found.version, tokenizer, start, frozen, backbone)


def _kept(found: _Served, keeper: Keeper) -> PrivateState | None:
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


def _adapted(found: Fetched, member: Member, epochs: int | None, watch: Watch) -> "Mapping[str, NDArray[np.float32]]":
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
    corpus = EncodedExamples(member.examples, job, found.tokenizer)
    version = found.manifest.decode(found.version)
    module, division = assembled(job, corpus, found.manifest, version, found.kept, frozen=found.frozen)
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
