"""Makes the bundle that a job starts from, out of the operator's specification; and reads such a bundle.

Guarantees: the same specification and files give the same bytes, weights included, with the same versions of the
libraries; every digest in job.json is that of the file beside it; nothing is written unless everything can be. A
prompted job's backbone is never in memory as a whole.

Order: tokenizer from the vocabulary, seeded weights (the embedding from a table, if the job names one), manifest,
document, files. For a prompted job, `export.prompted_bundle` first prepares the base.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from export.adapters import adapters_for
from export.continuing import Earlier, check_continues
from export.device_backbone import device_backbone
from export.heads import start_head
from export.prompted_bundle import mapped, prompted_parts
from export.writer_bundle import writer_parts
from learning.backbones.checkpoint import CheckpointInvalid
from learning.backbones.collection import Collection, find_base
from learning.plugins.installed import PluginUnusable
from learning.plugins.loading import admit
from learning.text.cloze import ClozeEncoder
from learning.text.corpus import encoder_of
from learning.text.encoder import PAD, read_vocabulary, word_tokenizer, wordpiece_tokenizer
from learning.text.tables import TableInvalid, entries_of, fill_from_table
from learning.training.outcome import PerExampleGradientsUnavailable
from tacit.bundle import (
    BACKBONE_FILE,
    LARGE_FILES,
    ONNX_FILE,
    PIECES_FILE,
    Bundle,
    BundleInvalid,
    read_bundle,
    scratch_beside,
    write_bundle,
)
from tacit.documents import DocumentInvalid, sentence_of
from tacit.generation import Generate
from tacit.job import BundledWeights, JobDocument, JobSpec, PublicStart, VocabularyFile
from tacit.manifest import Manifest
from tacit.mechanism import DpSgd
from tacit.method import OwnVocabulary, trains_private
from tacit.model import Model, PluginModel, PromptedModel, TransformerModel
from tacit.prompt import LoRA, OnnxBackbone

if TYPE_CHECKING:
    from learning.causal.model import CausalModel
    from learning.models import TextClassifier
    from learning.models.classifier import TextModel
    from learning.prompts.model import PromptedModel as PromptedModule

__all__ = ["JobBundle", "StartingModel", "TableInvalid", "make_job_bundle", "read_job_bundle", "starting_model"]


@dataclass(frozen=True, slots=True)
class JobBundle:
    """A job bundle as read: its document, and the files that the document names by digest."""

    document: JobDocument
    manifest: Manifest
    weights: bytes
    # None: members build their own.
    tokenizer: bytes | None
    # The start of private parameters, if members keep any that start from public numbers.
    private: tuple[Manifest, bytes] | None = None
    # The canonical backbone file of a prompted job.
    backbone: Path | None = None
    # What the job freezes, by name.
    frozen: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    # The base model's word pieces, if members' own rows start from the base's, which are in `private`.
    base_tokenizer: bytes | None = None

    @property
    def public_tokenizer(self) -> bytes:
        """The tokenizer that all members share.

        Raises:
            BundleInvalid: members build their own.
        """
        if self.tokenizer is None:
            raise BundleInvalid(f"job {self.document.name} has no tokenizer: its members build their own")
        return self.tokenizer

    def parameters(self, values: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """A version's parameters, (d,), and the frozen ones beside them, by name."""
        return {**self.manifest.unflatten(values), **self.frozen}


# Keys of the specification that have another form in the document, or are not needed once there are weights.
_OPERATORS_OWN = ("vocabulary", "model", "start")


def make_job_bundle(
    spec: JobSpec,
    folder: Path,
    out: Path,
    *,
    report: Callable[[str], None] = lambda _: None,
    collection: Collection | None = None,
    earlier: Earlier | None = None,
) -> JobDocument:
    """Makes the bundle `out` and returns its job document.

    Args:
        spec: the operator's specification.
        folder: base of relative paths in the specification (the folder of job.toml).
        out: the bundle's folder.
        report: called with sentences about what was found on the way.
        collection: the operator's backbones, which `model.base` may name.
        earlier: the version that `start` names.

    Raises:
        VocabularyInvalid, TableInvalid: a file cannot be used.
        DocumentInvalid: the specification does not fit its files or the earlier version, or
            the ring has no room for the sum of the values.
        BundleInvalid: a folder is in the way.
    """
    if isinstance(spec.start, str) and earlier is None:
        raise DocumentInvalid(
            f"start: {spec.start} is at the coordinator, and nobody fetched it; name the operator's folder"
        )
    if isinstance(spec.model, PluginModel):
        return _with_plugin(spec, spec.model, folder, out, report, earlier)
    if not isinstance(spec.model, PromptedModel):
        start = starting_model(spec, folder, report, collection)
        return _make(spec, start.module, start.model, start.tokenizer, {}, out, report, earlier, start.pieces)
    # Written beside the bundle, because it is large and the folder of temporary files may be small.
    with scratch_beside(out) as scratch:
        written = scratch / BACKBONE_FILE
        module: TextModel
        more: dict[str, bytes] = {}
        if isinstance(spec.model.task, Generate):
            module, model, tokenizer, pieces = _starting_writer(
                spec, spec.model, spec.model.task, folder, written, report, collection
            )
        else:
            prompted, model, tokenizer, pieces = _starting_prompt(spec, spec.model, folder, written, report, collection)
            module = prompted
            if spec.model.onnx is not None:
                model, more[ONNX_FILE] = _with_onnx(prompted, model, spec.model.onnx.precision, tokenizer, report)
        if pieces is not None:
            more[PIECES_FILE] = pieces
        with mapped(written) as backbone:
            return _make(spec, module, model, tokenizer, {BACKBONE_FILE: backbone, **more}, out, report, earlier)


def _with_plugin(
    spec: JobSpec,
    model: PluginModel,
    folder: Path,
    out: Path,
    report: Callable[[str], None],
    earlier: Earlier | None,
) -> JobDocument:
    """Makes the bundle of a job whose model is a plugin's. Finds here what would make members refuse it."""
    import secrets

    from learning.plugins.examination import examine
    from learning.training.clipping import check_examples_apart

    # The operator's own job file names it.
    admit(model)
    try:
        examine(model, len(spec.labels), secrets.randbits(56))
        start = starting_model(spec, folder, report)
        if isinstance(spec.mechanism, DpSgd):
            with start.module.training_only([name for name, _ in start.module.named_parameters()]):
                check_examples_apart(start.module.train(), secrets.randbits(56))
            start.module.eval()
    except PluginUnusable as error:
        said = f"; {error.private}" if error.private else ""
        raise DocumentInvalid(f"model: {error}{said}") from error
    except PerExampleGradientsUnavailable as error:
        raise DocumentInvalid(f"model: dp-sgd cannot clip what plugin {model.distribution} trains: {error}") from error
    report(f"plugin: {model.distribution} {model.version}, {model.files.hex()}, {model.name}")
    return _make(spec, start.module, start.model, start.tokenizer, {}, out, report, earlier)


def _make(
    spec: JobSpec,
    module: "TextModel",
    model: Model,
    tokenizer: bytes | None,
    files: dict[str, bytes],
    out: Path,
    report: Callable[[str], None],
    earlier: Earlier | None,
    pieces: bytes | None = None,
) -> JobDocument:
    """Writes manifest, document and files of a starting module. files: other files of the bundle; gets the rest.

    `pieces` is the tokenizer of the module's own rows, if members' own vocabularies start from them.
    """
    from learning.models import division_of

    # Nothing of a prompted model is private, so no method needs the entries.
    encoder = None if tokenizer is None or isinstance(model, PromptedModel) else encoder_of(spec, tokenizer)
    try:
        division = division_of(spec.method, module, () if encoder is None else encoder.words())
    except ValueError as error:
        raise DocumentInvalid(f"job {spec.name}: {error}") from error
    tensors = division.shared(module)
    manifest = Manifest.of(tensors)
    weights = manifest.encode(manifest.flatten(tensors))
    named = None if tokenizer is None else hashlib.sha256(tokenizer).digest()
    if earlier is not None:
        check_continues(spec.labels, model, named, manifest, earlier)
        weights = earlier.weights
        report(
            f"start: version {earlier.number} of {earlier.document.name}, {hashlib.sha256(weights).hexdigest()[:16]}; "
            "what members spent on that job stays spent"
        )
    private = frozen = None
    vocabulary = spec.vocabulary if isinstance(spec.vocabulary, OwnVocabulary) else None
    if pieces is not None and vocabulary is not None:
        files["base_tokenizer.json"] = pieces
        vocabulary = vocabulary.model_copy(update={"start": "base"})
    if tokenizer is not None:
        files["tokenizer.json"] = tokenizer
    if (tokenizer is not None or pieces is not None) and (kept := division.private(module)):
        private = _bundled("private", kept, files)
        report(f"private: {private.values:,} values in {len(kept)} tensors start from the bundle and stay with members")
    if fixed := division.frozen_values(module):
        frozen = _bundled("frozen", fixed, files)
        if earlier is not None and earlier.frozen is not None and earlier.document.frozen is not None:
            if earlier.document.frozen.manifest != frozen.manifest:
                raise DocumentInvalid(f"start: {earlier.document.name} freezes other tensors; use the same model")
            # The shared values were trained on top of these.
            files["frozen.bin"], frozen = earlier.frozen, earlier.document.frozen
        names = list(fixed)
        listed = ", ".join(names if len(names) <= 3 else [names[0], f"and {len(names) - 1} more"])
        report(f"frozen: {frozen.values:,} values ({listed}) are fetched once and never sent")
    try:
        document = JobDocument(
            **{name: getattr(spec, name) for name in type(spec).model_fields if name not in _OPERATORS_OWN},
            model=model,
            vocabulary=vocabulary,
            base_tokenizer=None if pieces is None else hashlib.sha256(pieces).digest(),
            manifest=manifest.digest(),
            tokenizer=named,
            weights=hashlib.sha256(weights).digest(),
            values=manifest.values,
            private=private,
            frozen=frozen,
            earlier=None if earlier is None else earlier.origin,
        )
    except ValidationError as error:
        # The grid of the noise in the ring depends on the number of values, which the specification did not know.
        raise DocumentInvalid(f"job {spec.name}: {sentence_of(error)}") from error
    files |= {"job.json": document.canonical(), "manifest.json": manifest.canonical(), "weights.bin": weights}
    write_bundle(out, "job", files)
    report(f"model: {manifest.values:,} values in {len(tensors)} tensors, {manifest.bytes / 1e6:,.2f} MB")
    return document


def _bundled(name: str, tensors: Mapping[str, NDArray[np.float32]], files: dict[str, bytes]) -> BundledWeights:
    """Adds parameters that are not shared to the bundle's files, as NAME.json and NAME.bin, and names them."""
    manifest = Manifest.of(tensors)
    data = manifest.encode(manifest.flatten(tensors))
    files |= {f"{name}.json": manifest.canonical(), f"{name}.bin": data}
    return BundledWeights(manifest=manifest.digest(), weights=hashlib.sha256(data).digest(), values=manifest.values)


def read_job_bundle(folder: Path) -> JobBundle:
    """Reads a job bundle and checks its document against the files beside it.

    The process may then load the plugin that the document names: somebody gave this folder to a command.

    Raises:
        BundleInvalid: the bundle is damaged or of another kind, or its document names other files.
    """
    bundle = read_bundle(folder, "job", unread=LARGE_FILES)
    try:
        document = JobDocument.from_json(bundle.files["job.json"], what=str(folder / "job.json"))
        manifest = Manifest.from_json(bundle.files["manifest.json"], what=str(folder / "manifest.json"))
        manifest.decode(bundle.files["weights.bin"])
    except DocumentInvalid as error:
        raise BundleInvalid(f"{error}; make the bundle again") from error
    _check_names(bundle, document, manifest)
    admit(document.model)
    files = bundle.files
    tokenizer = None if document.tokenizer is None else files["tokenizer.json"]
    backbone = folder / BACKBONE_FILE if BACKBONE_FILE in document.files else None
    private, frozen = (
        _read_bundled(bundle, document.private, "private"),
        _read_bundled(bundle, document.frozen, "frozen"),
    )
    fixed = {} if frozen is None else frozen[0].unflatten(frozen[0].decode(frozen[1]))
    pieces = files.get("base_tokenizer.json") if document.base_tokenizer is not None else None
    return JobBundle(document, manifest, files["weights.bin"], tokenizer, private, backbone, fixed, pieces)


def _starting_prompt(
    spec: JobSpec,
    model: PromptedModel,
    folder: Path,
    into: Path,
    report: Callable[[str], None],
    collection: Collection | None,
) -> "tuple[PromptedModule, PromptedModel, bytes, bytes | None]":
    """Makes the seeded module of a prompted job, and writes the backbone's canonical file to `into`.

    Returns:
        The module, the model as members build it, the tokenizer, and the list of the backbone's pieces if it has more
        than one.
    """
    from learning.backbones.stored import read_backbone
    from learning.prompts.assembly import build_prompted

    parts = prompted_parts(model, spec.labels, folder, into, report=report, collection=collection)
    encoder = ClozeEncoder.of(parts.model, parts.tokenizer)
    try:
        module = build_prompted(parts.model, spec.labels, encoder, read_backbone(into, parts.config), seed=spec.seed)
        start_head(module, parts.model, spec.labels, encoder, parts.centre, report)
    except DocumentInvalid:
        raise
    except ValueError as error:
        raise DocumentInvalid(f"job {spec.name}: {error}") from error
    return module, parts.model, parts.tokenizer, parts.pieces


def _starting_writer(
    spec: JobSpec,
    model: PromptedModel,
    task: Generate,
    folder: Path,
    into: Path,
    report: Callable[[str], None],
    collection: Collection | None,
) -> "tuple[CausalModel, PromptedModel, bytes, bytes | None]":
    """As `_starting_prompt`, for a job whose model writes."""
    from learning.backbones.stored import read_backbone
    from learning.causal.assembly import build_writer

    parts = writer_parts(model, task, folder, into, mechanism=spec.mechanism, report=report, collection=collection)
    try:
        module = build_writer(parts.model, parts.encoder, read_backbone(into, parts.config), seed=spec.seed)
    except ValueError as error:
        raise DocumentInvalid(f"job {spec.name}: {error}") from error
    return module, parts.model, parts.tokenizer, parts.pieces


def _with_onnx(
    module: "PromptedModule",
    model: PromptedModel,
    precision: Literal["float32", "int8"],
    tokenizer: bytes,
    report: Callable[[str], None],
) -> tuple[PromptedModel, bytes]:
    """The model with its ONNX backbone's digest, and that file's bytes."""
    made = device_backbone(module, ClozeEncoder.of(model, tokenizer), precision, report)
    named = OnnxBackbone(precision=precision, digest=hashlib.sha256(made).digest(), size=len(made))
    return model.model_copy(update={"onnx": named}), made


@dataclass(frozen=True)
class StartingModel:
    """The module that a job starts from.

    Attributes:
        module: seeded, with weights from a base model and an embedding from a table if the job names them.
        model: as members build it.
        tokenizer: the job's, if it has one for all members.
        pieces: the tokenizer of a base model's word pieces, if members' own vocabularies start from its rows.
    """

    module: "TextClassifier"
    model: Model
    tokenizer: bytes | None
    pieces: bytes | None = None


def starting_model(
    spec: JobSpec, folder: Path, report: Callable[[str], None], collection: Collection | None = None
) -> StartingModel:
    """Makes the module that a job starts from.

    Args:
        spec: the operator's specification.
        folder: base of relative paths in the specification.
        report: called with sentences about what was found on the way.
        collection: the operator's backbones, which `model.base` may name.

    Raises:
        VocabularyInvalid, TableInvalid, DocumentInvalid, EncoderInvalid: a file cannot be used.
    """
    from learning.models import build
    from learning.models.division import EMBEDDING

    labels, vocabulary = len(spec.labels), spec.vocabulary
    model: Model = spec.model
    base: Mapping[str, NDArray[np.float32]] = {}
    pieces: Sequence[str] | None = None
    if isinstance(model, TransformerModel) and model.base is not None:
        from learning.models.base import read_base

        try:
            checkpoint = find_base(model.base, folder, collection).folder
        except CheckpointInvalid as error:
            raise DocumentInvalid(f"model.base: {error}") from error
        read = read_base(str(checkpoint), model.max_tokens)
        base, pieces = read.parameters, read.vocabulary
        if read.lower_case is False:
            raise DocumentInvalid(
                f"model.base: {model.base} distinguishes capitals, but word pieces here are in lower case; use an "
                "uncased base"
            )
        report(f"base: {model.base}, an encoder of {sum(each.size for each in base.values()):,} values")
        # Members need the config to build the model, not the place where the operator found it.
        model = model.model_copy(update={"base": None, "config": read.config})
    if isinstance(model, TransformerModel) and isinstance(model.injection, LoRA):
        model = model.model_copy(update={"injection": adapters_for(model.injection, spec.mechanism, report)})
    if isinstance(vocabulary, OwnVocabulary):
        return _own_start(spec, vocabulary, model, base, pieces, report)
    if vocabulary is None:
        if pieces is None:
            raise DocumentInvalid(_WITHOUT_PIECES)
        named, tokenizer = "model.base", wordpiece_tokenizer(pieces)
    else:
        named, tokenizer = vocabulary.file, _tokenizer(vocabulary, folder)
    encoder = encoder_of(spec, tokenizer)
    if base:
        _check_pieces(named, encoder.words(), pieces, len(base[EMBEDDING]))
    module = build(model, encoder.vocabulary_size, labels, encoder.pad_id, seed=spec.seed)
    report(f"vocabulary: {encoder.vocabulary_size:,} entries from {named}")
    _fill(module, base)
    if isinstance(spec.start, PublicStart):
        from export.starting import train_start

        train_start(module, spec, tokenizer, folder / spec.start.file, report)
    if vocabulary is not None and vocabulary.pretrained is not None:
        embedding = module.embedding.weight.detach().numpy()
        table = folder / vocabulary.pretrained
        found = fill_from_table(embedding, table, entries_of(tokenizer), named="vocabulary.pretrained in the job")
        report(
            f"pretrained: {found:,} of {encoder.vocabulary_size:,} entries found in {vocabulary.pretrained}; "
            "the others start at random"
        )
    return StartingModel(module, model, tokenizer)


def _own_start(
    spec: JobSpec,
    vocabulary: OwnVocabulary,
    model: Model,
    base: Mapping[str, NDArray[np.float32]],
    pieces: Sequence[str] | None,
    report: Callable[[str], None],
) -> StartingModel:
    """The start of a job whose members build their vocabularies. base, pieces: of the base model, if it has one."""
    from learning.models import build
    from learning.models.division import EMBEDDING

    unit = "words" if vocabulary.kind == "words" else "word pieces"
    report(f"vocabulary: each member builds its own, of at most {vocabulary.size:,} {unit}")
    if vocabulary.start == "base" and pieces is None:
        raise DocumentInvalid(
            "vocabulary.start: the base model has no word pieces whose rows members could start from; use an uncased "
            'base with a vocab.txt, or start = "random"'
        )
    if pieces is not None and vocabulary.start != "random":
        tokenizer = wordpiece_tokenizer(pieces)
        rows = len(base[EMBEDDING])
        if rows != len(pieces):
            raise DocumentInvalid(_other_rows(rows, len(pieces)))
        module = build(model, rows, len(spec.labels), pieces.index(PAD), seed=spec.seed)
        _fill(module, base)
        report(
            f"vocabulary: members' rows start from those of the base's {rows:,} word pieces, which everybody can know"
        )
        return StartingModel(module, model, None, tokenizer)
    # Nothing of the embedding is shared, so two rows are enough.
    module = build(model, 2, len(spec.labels), 0, seed=spec.seed)
    _fill(module, {name: each for name, each in base.items() if name != EMBEDDING})
    if not trains_private(spec.method, spec.mechanism):
        report(
            "note: members' word vectors start at random and stay there, since the embedding is frozen; a member "
            "can bring its own table (`edge_client run --embedding`)"
        )
    return StartingModel(module, model, None)


_WITHOUT_PIECES = (
    "model.base: it has no word pieces (no vocab.txt, and no tokenizer.json with some), so nothing says which word "
    "each row of its embedding is for; put its vocab.txt into its folder, or write [vocabulary] without file so that "
    "every member builds its own (method fedvocab)"
)


def _check_pieces(file: str, entries: Sequence[str | None], pieces: Sequence[str] | None, rows: int) -> None:
    """Checks that each row of the base model's embedding belongs to the job's entry with that id.

    Args:
        file: name of the job's vocabulary, for the sentences.
        entries: the job's vocabulary, by id (the line's number).
        pieces: the base model's vocabulary, by row.
        rows: number of rows of the base model's embedding.

    Raises:
        DocumentInvalid: they differ; the sentence names the first line that does.
    """
    if pieces is None:
        raise DocumentInvalid(_WITHOUT_PIECES)
    for line, (entry, piece) in enumerate(zip(entries, pieces, strict=False), start=1):
        if entry != piece:
            raise DocumentInvalid(
                f"vocabulary.file: line {line} of {file} is {entry!r}, but the base model has {piece!r}; the "
                "vocabulary must be the base model's own, line for line: use its vocab.txt"
            )
    if len(entries) != len(pieces):
        raise DocumentInvalid(
            f"vocabulary.file: {file} has {len(entries):,} lines, but the base model has {len(pieces):,} word pieces; "
            "the vocabulary must be the base model's own, line for line: use its vocab.txt"
        )
    if rows != len(pieces):
        raise DocumentInvalid(_other_rows(rows, len(pieces)))


def _other_rows(rows: int, pieces: int) -> str:
    return (
        f"model.base: its embedding has {rows:,} rows, but its vocabulary {pieces:,} word pieces; resize it with "
        "resize_token_embeddings and save it again, or use another base"
    )


def _fill(module: "TextClassifier", base: Mapping[str, NDArray[np.float32]]) -> None:
    """Copies the base model's weights into the module.

    Raises:
        DocumentInvalid: the module has no place for a weight.
    """
    import torch

    parameters = dict(module.named_parameters())
    for name, array in base.items():
        if name not in parameters or tuple(parameters[name].shape) != array.shape:
            raise DocumentInvalid(
                f"model.base: its {name} {list(array.shape)} has no place in this job's model; use another base"
            )
        with torch.no_grad():
            parameters[name].copy_(torch.from_numpy(np.array(array, dtype=np.float32)))
    if base:
        with torch.no_grad():
            module.embedding.weight[module.pad_id] = 0


def _check_names(bundle: Bundle, document: JobDocument, manifest: Manifest) -> None:
    for name, digest in document.files.items():
        if name not in bundle.index.files or bundle.index.files[name].sha256 != digest:
            raise BundleInvalid(f"{bundle.folder / 'job.json'} names another {name}; make the bundle again")
    if document.values != manifest.values:
        raise BundleInvalid(
            f"{bundle.folder / 'job.json'} and its manifest count different values; make the bundle again"
        )


def _read_bundled(bundle: Bundle, part: BundledWeights | None, name: str) -> tuple[Manifest, bytes] | None:
    if part is None:
        return None
    file, data = f"{name}.json", bundle.files[f"{name}.bin"]
    try:
        manifest = Manifest.from_json(bundle.files[file], what=str(bundle.folder / file))
        manifest.decode(data)
    except DocumentInvalid as error:
        raise BundleInvalid(f"{error}; make the bundle again") from error
    return manifest, data


def _tokenizer(vocabulary: VocabularyFile, folder: Path) -> bytes:
    lines = read_vocabulary(folder / vocabulary.file)
    return wordpiece_tokenizer(lines) if vocabulary.kind == "wordpiece" else word_tokenizer(lines)
