"""Every document is bounded in each of its parts, and refusing one is cheap, whatever it holds.

The test walks documents by reflection, so a new field without a bound fails here, and so does a new document without an
example.
"""

import importlib
import json
import pkgutil
import re
import time
import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import annotated_types
import pytest
from pydantic import BaseModel, StringConstraints, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

import coordinator
import edge_client
import export
import learning
import tacit
from coordinator.certificate_batches import CertificateBatch, RequestBatch
from coordinator.config import CoordinatorConfig, OperatorConfig
from coordinator.storage.backup import BackupManifest
from coordinator.storage.mark import Mark
from edge_client.approval.folder import ApprovalRequest
from edge_client.approval.statement import SignedStatement
from edge_client.approval.steward import StewardKeyFile
from edge_client.canaries import CanaryRecord
from edge_client.corpus_release.folder import CorpusState, Decision
from edge_client.corpus_release.models import NoisedHistogram
from edge_client.identity.home import IdentityDocument
from edge_client.ledger.noise import NoiseHeader
from edge_client.ledger.pin import Pin
from edge_client.ledger.receipts import CorpusReceipt, Receipt
from edge_client.policy.document import PolicyDocument
from edge_client.policy.policy import Policy
from edge_client.private_store.backup import BackupHeader
from edge_client.private_store.container import StateHeader
from edge_client.private_store.features import FeatureHeader
from edge_client.session.answers import HeldAnswer
from edge_client.withdrawal.folder import MAX_ANSWERS, KeptWithdrawal
from export.finetune.run import Provenance
from learning.backbones.collection import BackboneRecord
from tacit.audit import AuditStatement, SignedAudit
from tacit.authorities import Authorities
from tacit.bundle import GENERATOR_FILES, BundleIndex, Labels
from tacit.corpus import CorpusStatement
from tacit.documents import MAX_MISTAKES, AtMost, Document, DocumentInvalid
from tacit.job import JobBody, JobDocument, JobSpec  # type: ignore[attr-defined]
from tacit.limits import MAX_AVERAGED
from tacit.manifest import Manifest
from tacit.measurement_file import MeasurementSpec
from tacit.passport import (
    MAX_SECTIONS,
    AuditFacts,
    ExportFacts,
    JobFacts,
    MeasurementFacts,
    Passport,
    RecordFacts,
    Seal,
    SuccessorFacts,
    VersionFacts,
    WithdrawalFacts,
)
from tacit.reading import MAX_DEPTH, toml_values
from tacit.survey_file import SurveySpec
from tacit.token import JoinToken
from tacit.withdrawal import WithdrawalRequest, WithdrawalTaken
from tests.property.decoders.test_documents import GOOD, HEX, STATEMENT
from tests.property.decoders.test_wire_decoders import peak

# ---- every field has a bound ----------------------------------------------------------------------------------------


def _models() -> list[type[BaseModel]]:
    for package in (tacit, coordinator, edge_client, export, learning):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if ".migrations" not in module.name and not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    ours = ("tacit.", "coordinator.", "edge_client.", "export.", "learning.")
    found, left = [], [BaseModel]
    while left:
        below = left.pop().__subclasses__()
        left += below
        found += [each for each in below if each.__module__.startswith(ours)]
    return sorted(set(found), key=lambda each: (each.__module__, each.__name__))


def _longest(pattern: str) -> int | None:
    """Length of the longest text that matches; None if it is unbounded."""
    if not (pattern.startswith("^") and pattern.endswith("$")):
        return None
    longest = re._parser.parse(pattern).getwidth()[1]  # type: ignore[attr-defined]
    return longest if longest < 10_000 else None


def _bound(metadata: tuple[Any, ...]) -> int | None:
    found = []
    flat = [inner for each in metadata for inner in (each.metadata if isinstance(each, FieldInfo) else [each])]
    for each in flat:
        if isinstance(each, AtMost):
            found.append(each.most)
        for constraint in each if isinstance(each, annotated_types.GroupedMetadata) else [each]:
            if isinstance(constraint, annotated_types.MaxLen):
                found.append(constraint.max_length)
        if (pattern := getattr(each, "pattern", None)) and (longest := _longest(pattern)):
            found.append(longest)
        if isinstance(each, StringConstraints) and each.max_length:
            found.append(each.max_length)
    return min(found, default=None)


def _unbounded(kind: Any, metadata: tuple[Any, ...], at: str) -> Iterator[str]:
    """The parts of a field's type that have no bound."""
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *more = get_args(kind)
        yield from _unbounded(inner, (*metadata, *more), at)
    elif origin in (Union, types.UnionType):
        for each in get_args(kind):
            yield from _unbounded(each, metadata, at)
    elif kind in (str, bytes):
        if _bound(metadata) is None:
            yield at
    elif origin in (tuple, list, dict, set, frozenset):
        inner = get_args(kind)
        if origin is not tuple or inner[-1] is Ellipsis:
            if not any(isinstance(each, AtMost) for each in metadata):
                yield at
            if origin is tuple:
                inner = inner[:1]
        for each in inner:
            yield from _unbounded(each, (), f"{at}[]")
    elif kind in (tuple, list, dict, set, frozenset, object):
        yield at


def test_every_field_of_every_table_has_a_bound():
    models = _models()
    assert len(models) > 70
    found = [
        where
        for model in models
        for name, field in model.model_fields.items()
        for where in _unbounded(field.annotation, tuple(field.metadata), f"{model.__name__}.{name}")
    ]
    assert found == []


def test_the_walk_finds_fields_without_a_bound():
    class Loose(BaseModel):
        text: str
        open_ended: Annotated[str, StringConstraints(pattern=r"^a+$")]
        several: tuple[Annotated[str, StringConstraints(max_length=3)], ...]
        inner: Annotated[tuple[str, ...], AtMost(2)]
        named: dict[str, int]

    found = [
        where
        for name, field in Loose.model_fields.items()
        for where in _unbounded(field.annotation, tuple(field.metadata), name)
    ]
    assert found == ["text", "open_ended", "several", "inner[]", "named", "named[]"]


# ---- at every limit, and one past it --------------------------------------------------------------------------------

_STATE = {"sha256": HEX, "size": 1}
_WAITING = {"member": "north", "kind": "enrol", "request": "00", "asked_ms": 0}
_SCORES = {
    "rows": 1,
    "accuracy": 1.0,
    "standard_error": 0.0,
    "macro_f1": 1.0,
    "majority": 1.0,
    "majority_label": "a",
    "labels": [{"label": "a", "rows": 1, "precision": 1.0, "recall": 1.0, "f1": 1.0}],
}
_NETWORK = {"architecture": "bilstm"}
_SPEC = {
    "schema": 1,
    "name": "desk",
    "labels": ["a", "b"],
    "vocabulary": {"kind": "words", "file": "words.txt"},
}
_PROMPTED = {
    "architecture": "prompted",
    "base": "owner/name",
    "task": {"name": "cloze", "verbaliser": {"a": ["x"], "b": ["y"]}},
}
_WITHDRAWAL = {"schema": 1, "federation": HEX, "member": "north", "job": None, "asked_ms": 1}
_STATEMENT = {
    "schema": 1,
    "federation": HEX,
    "job": "desk",
    "job_document": HEX,
    "member": "north",
    "corpus": HEX,
    "bytes": 1,
    "rows": 1,
    "labels": [{"label": "a", "rows": 1}],
    "round": 1,
    "version": HEX,
    "mechanism": "dp-sgd",
    "variant": "sound",
    "promise": "none",
    "histogram": "even",
    "made_ms": 0,
}
_CORPUS_RECEIPT = {
    "schema": 1,
    "kind": "tacit-corpus-receipt",
    "at_ms": 1,
    "federation": HEX,
    "member": "north",
    "certificate": HEX,
    "job": "desk",
    "round": 1,
    "attempt": 0,
    "job_document": HEX,
    "version": HEX,
    "mechanism": "none",
    "trained": None,
    "event": None,
    "reservation": None,
    "corpus": HEX,
    "bytes": 1,
    "rows": 1,
    "statement": HEX,
    "outcome": "received",
    "ledger": "00" * 16,
    "previous": HEX,
}
_ROOT = "AAAA"
_VERSION = {
    "schema": 1,
    "number": 1,
    "version": HEX,
    "at_ms": 1,
    "entry": 1,
    "entry_hash": HEX,
    "mechanism": "dp-sgd",
    "round": 1,
    "evaluations": [{"accuracy": 1.0, "loss": None, "examples": 1, "data": HEX, "at_ms": 1}],
}

# A valid document of each kind.
_AUDIT = {
    "schema": 1,
    "federation": HEX,
    "member": "north",
    "job": "desk",
    "document": HEX,
    "number": 1,
    "version": HEX,
    "verdict": "sound",
    "claim": 2.0,
    "lower_bound": 0.5,
    "possible": 2.1,
    "delta": 1e-6,
    "confidence": 0.95,
    "tests": 4,
    "canaries": 100,
    "guesses": 40,
    "correct": 22,
    "made_ms": 1,
}
EXAMPLES: dict[type[Document], dict[str, Any]] = {
    JobDocument: GOOD["job"][0],
    JobSpec: _SPEC,
    Manifest: GOOD["manifest"][0],
    Receipt: GOOD["receipt"][0],
    CorpusReceipt: _CORPUS_RECEIPT,
    JoinToken: GOOD["token"][0],
    Labels: {"schema": 1, "labels": ["a", "b"]},
    BundleIndex: {
        "schema": 1,
        "kind": "model",
        "files": dict.fromkeys(("model.onnx", "tokenizer.json", "labels.json"), _STATE),
        "model": {
            "job": "desk",
            "version": HEX,
            "max_tokens": 8,
            "min_tokens": 1,
            "template": "{text} is {mask}.",
            "parity": 0.0,
            "texts": 1,
        },
    },
    CorpusStatement: _STATEMENT,
    Authorities: {"schema": 1, "federation": HEX, "roots": [_ROOT], "successions": [], "signature": _ROOT},
    Passport: {
        "schema": 1,
        "kind": "tacit-passport",
        "seal": "",
        "signature": _ROOT,
        "certificate": "",
        "sections": {"job": ""},
    },
    Seal: {
        "schema": 1,
        "federation": HEX,
        "job": "desk",
        "operator": "op",
        "certificate": HEX,
        "made_ms": 1,
        "sections": {"job": HEX},
    },
    JobFacts: {
        "schema": 1,
        "name": "desk",
        "document": HEX,
        "status": "running",
        "created_ms": 1,
        "mechanism": "none",
    },
    VersionFacts: _VERSION,
    ExportFacts: {
        "schema": 1,
        "number": 1,
        "version": HEX,
        "format": "model",
        "index": HEX,
        "files": {"model.onnx": _STATE},
    },
    SuccessorFacts: {"schema": 1, "at_ms": 1, "entry": 1, "job": "a", "version": 1, "withdrawn": 1},
    WithdrawalRequest: _WITHDRAWAL,
    WithdrawalTaken: {
        "schema": 1,
        "federation": HEX,
        "request": HEX,
        "taken_ms": 1,
        "entry": 1,
        "entry_hash": HEX,
    },
    KeptWithdrawal: {"schema": 1, "request": _WITHDRAWAL, "signature": "00", "certificate": "00"},
    WithdrawalFacts: {"schema": 1, "at_ms": 1, "entry": 1, "first": 1, "sums": 1, "members": 1},
    RecordFacts: {
        "schema": 1,
        "made_ms": 1,
        "software": "1",
        "journal_entry": 1,
        "journal_head": HEX,
        "roster_entries": 1,
        "roster_root": HEX,
    },
    Policy: {"schema": 1},
    PolicyDocument: {"schema": 1},
    CanaryRecord: {
        "schema": 1,
        "document": HEX,
        "rows": [{"text": "x", "text_b": "y", "label": "a", "present": True}],
    },
    AuditStatement: _AUDIT,
    SignedAudit: {"schema": 1, "statement": "{}", "signature": "AA==", "certificate": "x"},
    AuditFacts: {
        "schema": 1,
        "audit": HEX,
        "number": 1,
        "version": HEX,
        "verdict": "sound",
        "lower_bound": 0.5,
        "possible": 2.1,
        "claim": 2.0,
        "delta": 1e-6,
        "confidence": 0.95,
        "canaries": 100,
    },
    MeasurementFacts: {
        "schema": 1,
        "name": "how-well",
        "document": HEX,
        "answer": HEX,
        "number": 1,
        "version": HEX,
        "rows": "all",
        "trained": 2,
        "whole": {"members": 3},
        "by_label": [{"label": "a", "estimate": {"members": 3}}],
    },
    SignedStatement: {"schema": 1, "statement": STATEMENT, "signature": "00" * 64},
    ApprovalRequest: {
        "schema": 1,
        "federation": HEX,
        "member": "north",
        "data": "mine",
        "document": GOOD["job"][0],
        "policy": {"schema": 1},
        "lines": ["reads notes.csv"],
        "plan": "{}",
        "asked_ms": 1,
    },
    StewardKeyFile: {
        "schema": 1,
        "public": HEX,
        "sealing": {"kind": "passphrase", "salt": HEX, "scrypt": {"salt": HEX}},
        "sealed": "00" * 48,
    },
    CoordinatorConfig: {"schema": 1, "advertise": ["localhost"]},
    RequestBatch: {
        "schema": 1,
        "kind": "tacit-certificate-requests",
        "federation": HEX,
        "authority": HEX,
        "requests": [_WAITING],
    },
    CertificateBatch: {"schema": 1, "kind": "tacit-certificates", "federation": HEX, "certificates": ["00"]},
    OperatorConfig: {"schema": 1, "address": "localhost:7441", "federation": HEX},
    Mark: {"schema": 1, "place": "sqlite:///x", "entry": 1, "head": HEX},
    BackupManifest: {
        "schema": 1,
        "made_ms": 0,
        "software": "1",
        "federation": HEX,
        "revision": "0001",
        "head_entry": 0,
        "head": HEX,
        "tables": [
            {"name": "a", "columns": [{"name": "a", "form": "plain"}], "rows": 0, "sha256": HEX, "size": 0},
        ],
        "blobs": [_STATE],
        "missing": [HEX],
        "keys": [{"path": "coordinator.toml", "sha256": HEX, "size": 1}],
    },
    CorpusState: {
        "schema": 1,
        "federation": HEX,
        "job": "desk",
        "job_document": HEX,
        "stage": "withheld",
        "made": None,
        "ledger": "00",
        "data": "mine",
        "detail": "",
    },
    Decision: {"schema": 1, "corpus": HEX, "choice": "approve", "at_ms": 0},
    NoiseHeader: {
        "schema": 1,
        "ledger": "00",
        "reservation": 1,
        "job_document": HEX,
        "step": 2,
        "key": HEX,
        "rows": 1,
        "values": 7,
        "rows_digest": HEX,
    },
    HeldAnswer: {"schema": 1, "job_document": HEX, "ledger": "00", "reservation": 1, "values": [-1]},
    SurveySpec: {
        "schema": 1,
        "name": "before-desk",
        "noise": {"std": 10.0},
        "histograms": [{"kind": "labels", "labels": ["a"]}],
    },
    MeasurementSpec: {"schema": 1, "name": "how-well", "version": "desk:best", "noise": {"std": 10.0}},
    NoisedHistogram: {"schema": 1, "job_document": HEX, "ledger": "00", "reservation": 1, "counts": [1]},
    IdentityDocument: {"schema": 1, "federation": HEX, "member": "north", "address": "localhost:7441"},
    Pin: {"schema": 1, "ledger": "00", "sequence": 1, "head": HEX},
    BackboneRecord: {
        "schema": 1,
        "name": "minilm",
        "source": "a wheel",
        "hub": "people/bert",
        "licence": "MIT",
        "backbone": HEX,
        "size": 1,
        "files": {"config.json": HEX},
    },
    BackupHeader: {
        "schema": 1,
        "federation": HEX,
        "member": "north",
        "made_ms": 0,
        "states": [{"job": "desk", "length": 1, "sealed": False}],
    },
    FeatureHeader: {"schema": 1, "kind": HEX, "rows": 1, "width": 1, "content": HEX},
    StateHeader: {
        "schema": 1,
        "job": "desk",
        "document": HEX,
        "federation": HEX,
        "data": "mine",
        "round": 1,
        "version": HEX,
        "counter": 1,
        "token": "1-aa",
        "flags": ["personalised"],
        "length": 0,
    },
    Provenance: {
        "schema": 1,
        "federation": HEX,
        "job": "desk",
        "job_document": HEX,
        "version": HEX,
        "promise": "none",
        "corpora": [{"member": "north", "corpus": HEX, "rows": 1, "promise": "none", "mechanism": "none"}],
        "labels": ["a", "b"],
        "without_text": ["a"],
        "settings": {"base": "x", "table": "x"},
        "training": {
            "rows": 1,
            "validation_rows": 0,
            "epochs": 1,
            "kept": 1,
            "validation_loss": None,
            "validation_accuracy": None,
        },
        "test": {"digest": HEX, "also_synthetic": 0, "scores": _SCORES},
    },
}

# Variants of the same documents, for fields that the first cannot hold.
MORE: list[tuple[type[Document], dict[str, Any]]] = [
    (JobSpec, {**_SPEC, "model": _PROMPTED, "vocabulary": None}),
    (JobSpec, {**_SPEC, "method": {"name": "fedrecon", "tokens": ["x"]}, "model": _NETWORK}),
    (JobSpec, {**_SPEC, "model": {"architecture": "textcnn", "widths": [2]}}),
    (JobSpec, {**_SPEC, "vocabulary": {"kind": "words", "file": "x", "pretrained": "y"}}),
    (
        JobSpec,
        {
            **_SPEC,
            "model": {"architecture": "transformer", "base": "x"},
            "vocabulary": {"kind": "wordpiece", "file": "x"},
        },
    ),
    (
        Policy,
        {
            "schema": 1,
            "jobs": ["x"],
            "architectures": ["x"],
            "tasks": ["x"],
            "base_models": [HEX],
            "backbones": ["disk"],
            "shared_parameters": ["x"],
            "vocabularies": ["own"],
            "authorities": [HEX],
            "mechanisms": ["none"],
            "plugins": {"own": HEX},
            "peers": {"north": HEX},
            "hours": ["00:00-24:00"],
            "devices": ["cpu"],
            "interfaces": ["x"],
        },
    ),
    (
        CoordinatorConfig,
        {
            "schema": 1,
            "advertise": ["localhost"],
            "listen_host": "x",
            "metrics_host": "x",
            "database_url": "x",
            "store_url": "x",
            "s3_region": "x",
            "s3_ca_file": "x",
        },
    ),
    (JobSpec, {**_SPEC, "mechanism": {"name": "laplace-update", "epsilon": 1.0}, "metrics": {"noise_multiplier": 30}}),
]


def test_there_is_an_example_of_every_document():
    documents = {each for each in _models() if issubclass(each, Document)}
    assert {each.__name__ for each in documents - {Document, JobBody}} == {each.__name__ for each in EXAMPLES}
    for kind, example in [*EXAMPLES.items(), *MORE]:
        assert kind.from_json(json.dumps(example).encode())


def _word(number: int) -> str:
    """A short word, a different one for each number."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    word = letters[number % 26]
    while number := number // 26:
        word = letters[number % 26] + word
    return word


def _hex(number: int) -> str:
    return f"{number:064x}"


def _row(**other: Any) -> Any:
    return lambda number: {"name": _word(number), **other}


def _same(value: Any) -> Any:
    return lambda _: value


_COLUMN = {"name": "a", "form": "plain"}
_JOB = GOOD["job"][0]
_TRANSFORMER = {"architecture": "transformer", "config": {}}
_PLUGIN = {"architecture": "plugin", "distribution": "own", "version": "1.0", "files": HEX, "name": "own"}
_FROZEN = {**_PROMPTED, "base": None, "config": {}, "backbone": HEX, "task": {"name": "head"}}
_HEADED = {
    **_SPEC,
    "vocabulary": None,
    "model": {
        "architecture": "prompted",
        "base": "owner/name",
        "injection": "none",
        "task": {"name": "head", "layers": [1], "start": "labels", "descriptions": {"a": "x"}},
    },
}
_ADAPTED = {
    **_HEADED,
    "model": {**_HEADED["model"], "injection": {"name": "lora", "matrices": ["query"]}},
}
_POLICY = {"schema": 1}
_SURVEY = EXAMPLES[SurveySpec]
_WORDS = {"vocabulary": {"kind": "words", "file": "words.txt"}}
_HISTOGRAMS: list[dict[str, Any]] = [
    {"kind": "labels", "labels": ["a"]},
    {"kind": "lengths", "at_most": [8]},
    {"kind": "unknown", "at_most": [8]},
    {"kind": "rows", "at_most": [8]},
]
_ASKS = {
    **{key: value for key, value in _JOB.items() if key not in ("labels", "mechanism", "method", "model", "rounds")},
    "model": {"architecture": "none"},
    "mechanism": {"name": "discrete-gaussian", "std": 10.0},
    "rounds": {"count": 1},
    "question": {"kind": "survey", "histograms": _HISTOGRAMS},
    "values": 8,
}
_MEASURES = {
    **{key: value for key, value in _ASKS.items() if key not in ("model", "question")},
    "mechanism": {"name": "discrete-gaussian", "std": 10.0, "bound": 3200},
    "labels": [_word(number) for number in range(1000)],
    "tokenizer": HEX,
    "question": {"kind": "measure", "job": "desk", "document": HEX, "weights": HEX, "manifest": HEX, "values": 1},
    "values": 3000,
}
_DIALOGUES = {
    "first": "{<s>}",
    "system": {"before": "a", "after": "b"},
    "user": {"before": "a", "after": "b"},
    "assistant": {"before": "a", "after": "b"},
    "end": "</s>",
}
_WRITES = {
    "schema": 1,
    "name": "desk",
    "model": {
        "architecture": "prompted",
        "base": "owner/name",
        "injection": {"name": "lora"},
        "task": {"name": "generate", "template": _DIALOGUES},
    },
}
MORE.append((JobSpec, _WRITES))
_GENERATOR = {
    "schema": 1,
    "kind": "generator",
    "files": dict.fromkeys(GENERATOR_FILES, _STATE),
    "generator": {
        "job": "desk",
        "version": HEX,
        "template": _DIALOGUES,
        "end_ids": [0],
        "max_tokens": 8,
        "room": 8,
        "max_new_tokens": 1,
        "parity": 0.0,
        "texts": 1,
    },
}
MORE.append((BundleIndex, _GENERATOR))
MORE.append((JobDocument, {**_JOB, "model": {**_PLUGIN, "settings": {"a": 1, "b": "x", "c": 0.5, "d": True}}}))
MORE.append((JobSpec, {**_SPEC, "model": _PLUGIN}))
MORE.append((JobDocument, _ASKS))
MORE.append((JobDocument, {**_MEASURES, "labels": ["a", "b"], "values": 3}))
_BACKUP = EXAMPLES[BackupManifest]
_MADE = EXAMPLES[Provenance]

# Every list and table of every document: where it is, its limit, and its entries.
LISTS: dict[str, tuple[type[Document], dict[str, Any], str, int, Any]] = {
    "KeptWithdrawal.answers": (
        KeptWithdrawal,
        EXAMPLES[KeptWithdrawal],
        "answers",
        MAX_ANSWERS,
        lambda number: {
            "request": _WITHDRAWAL,
            "request_signature": "00",
            "request_certificate": "00",
            "taken": EXAMPLES[WithdrawalTaken] | {"entry": number + 1},
            "signature": "00",
            "certificate": "00",
        },
    ),
    "ExportFacts.averaged": (ExportFacts, EXAMPLES[ExportFacts], "averaged", MAX_AVERAGED, lambda number: number + 1),
    "ModelFacts.averaged": (
        BundleIndex,
        EXAMPLES[BundleIndex],
        "model.averaged",
        MAX_AVERAGED,
        lambda number: number + 1,
    ),
    "GeneratorFacts.averaged": (
        BundleIndex,
        _GENERATOR,
        "generator.averaged",
        MAX_AVERAGED,
        lambda number: number + 1,
    ),
    "GeneratorFacts.end_ids": (BundleIndex, _GENERATOR, "generator.end_ids", 64, lambda number: number),
    "ExportFacts.files": (ExportFacts, EXAMPLES[ExportFacts], "files", 64, {_word: _STATE}),
    "CoordinatorConfig.keep_named": (
        CoordinatorConfig,
        EXAMPLES[CoordinatorConfig],
        "keep_named",
        1000,
        lambda number: f"desk/{number}",
    ),
    "VersionFacts.evaluations": (
        VersionFacts,
        _VERSION,
        "evaluations",
        16,
        lambda number: {"accuracy": 1.0, "loss": None, "examples": 1, "data": HEX, "at_ms": number},
    ),
    "JobBody.labels": (JobSpec, _SPEC, "labels", 10_000, _word),
    "JobBody.tags": (JobSpec, _SPEC, "tags", 16, _word),
    "DpSgd.coefficients": (
        JobSpec,
        {
            **{key: value for key, value in _SPEC.items() if key not in ("audit", "metrics")},
            "method": {"name": "fedavg"},
            "mechanism": {"name": "dp-sgd", "noise_multiplier": 1.0, "steps": 100},
        },
        "mechanism.coefficients",
        64,
        lambda number: 0.5 if number == 0 else 0.01,
    ),
    "FedRecon.tokens": (*MORE[1], "method.tokens", 10_000, _word),
    "TextCNNModel.widths": (*MORE[2], "model.widths", 16, lambda number: number + 1),
    "PluginModel.settings": (JobDocument, {**_JOB, "model": _PLUGIN}, "model.settings", 64, {_word: 1}),
    "TransformerModel.config": (JobDocument, {**_JOB, "model": _TRANSFORMER}, "model.config", 64, {_word: 1}),
    "PromptedModel.config": (
        JobDocument,
        {**_JOB, "method": {"name": "fedavg"}, "model": _FROZEN},
        "model.config",
        64,
        {_word: 1},
    ),
    "Cloze.verbaliser": (*MORE[0], "model.task.verbaliser", 1000, {_word: lambda number: ["w" + _word(number)]}),
    "Cloze.verbaliser[]": (*MORE[0], "model.task.verbaliser.a", 100, lambda number: "w" + _word(number)),
    "LoRA.matrices": (
        JobSpec,
        _ADAPTED,
        "model.injection.matrices",
        7,
        lambda number: ("query", "key", "value", "output", "up", "down", "gate")[number % 7],
    ),
    "Head.layers": (JobSpec, _HEADED, "model.task.layers", 16, lambda number: number),
    "Head.descriptions": (JobSpec, _HEADED, "model.task.descriptions", 10_000, {_word: _word}),
    "Tensor.shape": (Manifest, GOOD["manifest"][0], "tensors.0.shape", 16, _same(1)),
    "Manifest.tensors": (Manifest, GOOD["manifest"][0], "tensors", 10_000, _row(shape=[1])),
    "Labels.labels": (Labels, EXAMPLES[Labels], "labels", 10_000, _word),
    "BackboneRecord.files": (BackboneRecord, EXAMPLES[BackboneRecord], "files", 500, {_word: HEX}),
    "BundleIndex.files": (BundleIndex, EXAMPLES[BundleIndex], "files", 64, {_word: _STATE}),
    "Receipt.segments": (Receipt, GOOD["receipt"][0], "segments", 64, _row(values=1)),
    "Receipt.cohort": (
        Receipt,
        GOOD["receipt"][0],
        "cohort",
        10_000,
        lambda number: {"member": _word(number), "certificate": HEX},
    ),
    "Receipt.survivors": (Receipt, GOOD["receipt"][0], "survivors", 10_000, _word),
    "CorpusStatement.labels": (
        CorpusStatement,
        _STATEMENT,
        "labels",
        10_000,
        lambda number: {"label": _word(number), "rows": 1},
    ),
    "CanaryRecord.rows": (
        CanaryRecord,
        EXAMPLES[CanaryRecord],
        "rows",
        10_000,
        lambda number: {"text": _word(number), "label": "a", "present": True},
    ),
    "PolicyDocument.jobs": (Policy, _POLICY, "jobs", 1000, _word),
    "PolicyDocument.tasks": (Policy, _POLICY, "tasks", 1000, _word),
    "PolicyDocument.architectures": (Policy, _POLICY, "architectures", 1000, _word),
    "PolicyDocument.plugins": (Policy, _POLICY, "plugins", 16, {_word: _hex}),
    "PolicyDocument.base_models": (Policy, _POLICY, "base_models", 1000, _hex),
    "PolicyDocument.backbones": (Policy, _POLICY, "backbones", 16, _same("disk")),
    "PolicyDocument.shared_parameters": (Policy, _POLICY, "shared_parameters", 1000, _word),
    "PolicyDocument.vocabularies": (Policy, _POLICY, "vocabularies", 16, _same("own")),
    "PolicyDocument.authorities": (Policy, _POLICY, "authorities", 1000, _hex),
    "PolicyDocument.mechanisms": (Policy, _POLICY, "mechanisms", 16, _same("none")),
    "PolicyDocument.peers": (Policy, _POLICY, "peers", 10_000, {_word: _hex}),
    "PolicyDocument.hours": (Policy, _POLICY, "hours", 1000, _same("00:00-24:00")),
    "PolicyDocument.devices": (Policy, _POLICY, "devices", 16, _same("cpu")),
    "PolicyDocument.interfaces": (Policy, _POLICY, "interfaces", 1000, _word),
    "PolicyDocument.tags": (Policy, _POLICY, "tags", 1000, _word),
    "PolicyDocument.stewards": (Policy, _POLICY, "stewards", 16, {_word: _hex}),
    "ApprovalStatement.files": (SignedStatement, EXAMPLES[SignedStatement], "statement.files", 16, {_word: _hex}),
    "ApprovalRequest.lines": (ApprovalRequest, EXAMPLES[ApprovalRequest], "lines", 20_000, _word),
    "PolicyDocument.witnesses": (Policy, _POLICY, "witnesses", 16, {_word: _hex}),
    "CoordinatorConfig.witnesses": (CoordinatorConfig, {**_POLICY, "advertise": ["a"]}, "witnesses", 64, _hex),
    "RequestBatch.requests": (RequestBatch, EXAMPLES[RequestBatch], "requests", 10_000, _same(_WAITING)),
    "CertificateBatch.certificates": (
        CertificateBatch,
        EXAMPLES[CertificateBatch],
        "certificates",
        10_000,
        _same("00"),
    ),
    "CoordinatorConfig.replicas": (
        CoordinatorConfig,
        {**_POLICY, "advertise": ["a"]},
        "replicas",
        16,
        lambda number: f"a:{7000 + number}",
    ),
    "OperatorConfig.other_addresses": (
        OperatorConfig,
        {"schema": 1, "address": "localhost:7441", "federation": HEX},
        "other_addresses",
        16,
        lambda number: f"host-{number}:7441",
    ),
    "JoinToken.others": (
        JoinToken,
        EXAMPLES[JoinToken],
        "others",
        7,
        lambda number: f"host-{number}:7440",
    ),
    "IdentityDocument.other_addresses": (
        IdentityDocument,
        {"schema": 1, "federation": HEX, "member": "north", "address": "localhost:7441"},
        "other_addresses",
        16,
        lambda number: f"host-{number}:7441",
    ),
    "CoordinatorConfig.advertise": (CoordinatorConfig, _POLICY, "advertise", 64, _word),
    "BackupManifest.tables": (BackupManifest, _BACKUP, "tables", 100, _row(columns=[_COLUMN], rows=0, **_STATE)),
    "TablePart.columns": (BackupManifest, _BACKUP, "tables.0.columns", 100, _same(_COLUMN)),
    "BackupManifest.blobs": (BackupManifest, _BACKUP, "blobs", 500_000, _same(_STATE)),
    "BackupManifest.missing": (BackupManifest, _BACKUP, "missing", 500_000, _same(HEX)),
    "BackupManifest.keys": (
        BackupManifest,
        _BACKUP,
        "keys",
        1000,
        lambda number: {"path": f"server/{_word(number)}", **_STATE},
    ),
    "HeldAnswer.values": (HeldAnswer, EXAMPLES[HeldAnswer], "values", 10_304, _same(1)),
    "SurveySpec.histograms": (
        SurveySpec,
        {**_SURVEY, "vocabulary": {"kind": "words", "file": "words.txt"}},
        "histograms",
        4,
        lambda number: _HISTOGRAMS[number % 4],
    ),
    "SurveySpec.tags": (SurveySpec, _SURVEY, "tags", 16, _word),
    "MeasurementFacts.by_label": (
        MeasurementFacts,
        EXAMPLES[MeasurementFacts],
        "by_label",
        1000,
        lambda number: {"label": _word(number), "estimate": {"members": 3}},
    ),
    "MeasurementSpec.tags": (MeasurementSpec, EXAMPLES[MeasurementSpec], "tags", 16, _word),
    "Measurement.breakdown": (JobDocument, _MEASURES, "question.breakdown", 1000, _word),
    "LabelHistogram.labels": (SurveySpec, _SURVEY, "histograms.0.labels", 10_000, _word),
    "Survey.histograms": (JobDocument, _ASKS, "question.histograms", 4, lambda number: _HISTOGRAMS[number % 4]),
    **{
        f"{kind}.at_most": (
            SurveySpec,
            {**_SURVEY, **words, "histograms": [histogram]},
            "histograms.0.at_most",
            100,
            bound,
        )
        for kind, histogram, words, bound in (
            ("LengthHistogram", _HISTOGRAMS[1], _WORDS, lambda number: number + 1),
            ("UnknownHistogram", _HISTOGRAMS[2], _WORDS, lambda number: number),
            ("RowHistogram", _HISTOGRAMS[3], {}, lambda number: number),
        )
    },
    "NoisedHistogram.counts": (NoisedHistogram, EXAMPLES[NoisedHistogram], "counts", 10_000, _same(1)),
    "BackupHeader.states": (
        BackupHeader,
        EXAMPLES[BackupHeader],
        "states",
        10_000,
        lambda number: {"job": _word(number), "length": 1, "sealed": False},
    ),
    "StateHeader.flags": (StateHeader, EXAMPLES[StateHeader], "flags", 16, _word),
    "Provenance.corpora": (Provenance, _MADE, "corpora", 10_000, _same(_MADE["corpora"][0])),
    "Provenance.labels": (Provenance, _MADE, "labels", 10_000, _word),
    "Provenance.without_text": (Provenance, _MADE, "without_text", 10_000, _word),
    "TestScores.labels": (Provenance, _MADE, "test.scores.labels", 10_000, _same(_SCORES["labels"][0])),
}
# Tested elsewhere: authorities have one signature fewer than roots; there are two private parts, each named once;
# `record_from` reads a ledger's lines.
ELSEWHERE = {
    "Authorities.roots",
    # Section names have numbers: `test_a_passport_is_read_at_its_limit`.
    "Passport.sections",
    "Seal.sections",
    "LgFedAvg.private",
    "Authorities.successions",
    "Recovered.released",
    "Recovered.unknown",
    "_Line.body",
}


def _lists(kind: Any, metadata: tuple[Any, ...], at: str) -> Iterator[str]:
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *more = get_args(kind)
        yield from _lists(inner, (*metadata, *more), at)
    elif origin in (Union, types.UnionType):
        for each in get_args(kind):
            yield from _lists(each, metadata, at)
    elif origin in (tuple, dict):
        if any(isinstance(each, AtMost) for each in metadata):
            yield at
        for each in get_args(kind):
            yield from _lists(each, (), f"{at}[]")


def test_every_list_and_table_is_in_the_list_of_limits():
    found = {
        where
        for model in _models()
        for name, field in model.model_fields.items()
        if name in model.__annotations__
        for where in _lists(field.annotation, tuple(field.metadata), f"{model.__name__}.{name}")
    }
    assert found - ELSEWHERE == set(LISTS)


def _put(document: Any, path: tuple[str, ...], value: Any) -> Any:
    if not path:
        return value
    step: Any = int(path[0]) if isinstance(document, list) else path[0]
    changed = dict(document) if isinstance(document, dict) else list(document)
    old = changed.get(step) if isinstance(changed, dict) else changed[step]
    changed[step] = _put(old, path[1:], value)
    return changed


def _at(document: Any, path: tuple[str, ...]) -> Any:
    for step in path:
        document = document[int(step)] if isinstance(document, list) else document.get(step, {})
    return document


def _sized(entry: Any, size: int, old: Any) -> Any:
    if not isinstance(entry, dict):
        return [entry(number) for number in range(size)]
    ((key, value),) = entry.items()
    made = dict(old or {})
    # Words of four letters, which differ from the old ones.
    for number in range(26**3, 26**3 + size - len(made)):
        made[key(number)] = value(number) if callable(value) else value
    return made


def _refusal(kind: type[Document], document: dict[str, Any]) -> str | None:
    """Why the document is refused; None if it is accepted."""
    try:
        kind.from_json(json.dumps(document, separators=(",", ":")).encode(), what="it")
    except DocumentInvalid as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "where", [pytest.param(each, marks=pytest.mark.long if LISTS[each][3] > 100_000 else ()) for each in LISTS]
)
def test_a_list_is_accepted_at_its_limit_and_refused_one_above(where):
    kind, document, dotted, most, entry = LISTS[where]
    path = tuple(dotted.split("."))
    old = _at(document, path)
    good = _put(document, path, _sized(entry, most, old))
    if where == "Cloze.verbaliser":
        good["labels"] = list(good["model"]["task"]["verbaliser"])
    assert _refusal(kind, good) is None
    said = _refusal(kind, _put(document, path, _sized(entry, most + 1, old)))
    assert said is not None
    assert str(most) in said
    assert len(said) < 300


def test_authorities_are_read_at_their_limit():
    document = {**EXAMPLES[Authorities], "roots": ["AAAA"] * 16, "successions": ["AAAA"] * 15}
    assert _refusal(Authorities, document) is None
    for key in ("roots", "successions"):
        assert "at most" in str(_refusal(Authorities, {**document, key: [*document[key], "AAAA"]}))


def test_a_passport_is_read_at_its_limit():
    most = MAX_SECTIONS
    for kind, value in ((Passport, ""), (Seal, HEX)):
        full = {f"version-{number}": value for number in range(most)}
        assert _refusal(kind, {**EXAMPLES[kind], "sections": full}) is None
        assert f"at most {most}" in str(_refusal(kind, {**EXAMPLES[kind], "sections": {**full, "job": value}}))


# Texts that are documents, and bounded by these.
DOCUMENTS = {
    (Passport, ("seal",)),
    (Passport, ("certificate",)),
    (Passport, ("sections", "job")),
    (SignedAudit, ("certificate",)),
    (KeptWithdrawal, ("certificate",)),
}


def _texts(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, str):
        yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for name, each in inside:
        yield from _texts(each, (*path, str(name)))


def test_an_overlong_text_is_refused_with_a_short_sentence():
    for kind, document in [*EXAMPLES.items(), *MORE]:
        for path in _texts(document):
            if (kind, path) in DOCUMENTS:
                continue
            said = _refusal(kind, _put(document, path, "a" * 6000))
            assert said is not None, (kind, path)
            assert len(said) < 700, (kind, path, said)


@pytest.mark.parametrize(
    ("kind", "document", "path", "most"),
    [
        (JobSpec, _SPEC, "labels.0", 200),
        (JobSpec, _SPEC, "vocabulary.file", 4096),
        (Manifest, GOOD["manifest"][0], "tensors.0.name", 512),
        (Receipt, GOOD["receipt"][0], "outcome", 200),
        (CorpusStatement, _STATEMENT, "mechanism", 200),
        (Policy, MORE[5][1], "shared_parameters.0", 512),
        (CoordinatorConfig, MORE[6][1], "listen_host", 253),
        (CoordinatorConfig, MORE[6][1], "store_url", 4096),
        (CoordinatorConfig, MORE[6][1], "s3_region", 64),
        (CoordinatorConfig, MORE[6][1], "s3_ca_file", 4096),
        (Mark, EXAMPLES[Mark], "place", 4096),
        (BackupManifest, _BACKUP, "software", 200),
        (Passport, EXAMPLES[Passport], "certificate", 8192),
        (KeptWithdrawal, EXAMPLES[KeptWithdrawal], "certificate", 8192),
        (KeptWithdrawal, EXAMPLES[KeptWithdrawal], "signature", 2048),
    ],
)
def test_a_text_is_accepted_at_its_limit_and_refused_one_above(kind, document, path, most):
    steps = tuple(path.split("."))
    assert _refusal(kind, _put(document, steps, "a" * most)) is None
    said = str(_refusal(kind, _put(document, steps, "a" * (most + 1))))
    assert f"{most} characters" in said
    assert len(said) < 300


def _bounds(kind: Any, metadata: tuple[Any, ...], at: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The texts of a field's type, and what bounds each."""
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *more = get_args(kind)
        yield from _bounds(inner, (*metadata, *more), at)
    elif origin in (Union, types.UnionType):
        for each in get_args(kind):
            yield from _bounds(each, metadata, at)
    elif kind is str:
        yield at, metadata
    elif origin in (tuple, list, dict, set, frozenset):
        for each in get_args(kind):
            if each is not Ellipsis:
                yield from _bounds(each, (), f"{at}[]")


# A table has two: its keys and its values.
TEXTS = [
    (at, metadata)
    for model in _models()
    for name, field in model.model_fields.items()
    for at, metadata in _bounds(field.annotation, tuple(field.metadata), f"{model.__name__}.{name}")
]
# Their form is one that a letter repeated does not have.
FORMED = {
    "ApprovalRequest.plan",
    "CoordinatorConfig.keep_named[]",
    "CoordinatorConfig.replicas[]",
    "CoordinatorConfig.s3_endpoint",
    "IdentityDocument.address",
    "IdentityDocument.other_addresses[]",
    "JobSpec.start",
    "JoinToken.others[]",
    "KeyPart.path",
    "OperatorConfig.address",
    "OperatorConfig.other_addresses[]",
    "Passport.sections[]",
    "Policy.hours[]",
    "PolicyDocument.hours[]",
    "Seal.sections[]",
}


def _accepts(metadata: tuple[Any, ...], text: str) -> bool:
    try:
        TypeAdapter(Annotated[str, *metadata]).validate_python(text)
    except ValidationError:
        return False
    return True


def test_every_text_is_accepted_at_its_limit_and_refused_one_above():
    assert len(TEXTS) > 150
    formed = set()
    for at, metadata in TEXTS:
        most = _bound(metadata)
        assert most is not None, at
        letters = [letter for letter in "x0/" if _accepts(metadata, letter * most)]
        if not letters:
            formed.add(at)
        for letter in letters or "x":
            assert not _accepts(metadata, letter * (most + 1)), at
    assert formed == FORMED


@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
def test_a_document_one_byte_above_its_limit_is_not_parsed(kind, tmp_path):
    data = json.dumps(EXAMPLES[kind]).encode()
    full = data + b" " * (kind.max_bytes - len(data))
    path = tmp_path / "document.json"
    path.write_bytes(full)
    assert kind.from_file(path) == kind.from_json(data)
    path.write_bytes(full + b" ")
    for read in (lambda: kind.from_json(full + b" ", what="it"), lambda: kind.from_file(path, what="it")):
        with pytest.raises(DocumentInvalid, match=f"it has more than {kind.max_bytes} bytes"):
            read()


# ---- what the worst costs -------------------------------------------------------------------------------------------


def _keys(before: bytes, most: int, after: bytes) -> bytes:
    return before + b"".join(b',"%d":0' % at for at in range((most - 200) // 12)) + after


_VERBALISER = b'{"schema":1,"model":{"architecture":"prompted","task":{"name":"cloze","verbaliser":{"a":0'
WORST = {
    "labels": lambda most: b'{"schema":1,"labels":[' + b"{}," * (most // 3 - 40) + b"1]}",
    "tensors": lambda most: b'{"schema":1,"tensors":[' + b"{}," * (most // 3 - 40) + b"1]}",
    "numbers": lambda most: b'{"schema":1,"jobs":[' + b"1.5," * (most // 4 - 40) + b"1]}",
    "keys": lambda most: _keys(b'{"schema":1', most, b"}"),
    "keys of a table": lambda most: _keys(b'{"schema":1,"rounds":{"a":0', most, b"}}"),
    "words": lambda most: _keys(_VERBALISER, most, b"}}}}"),
    "peers": lambda most: _keys(b'{"schema":1,"peers":{"a":0', most, b"}}"),
    "a long key": lambda most: b'{"schema":1,"' + b"k" * (most - 40) + b'":1}',
    "depth": lambda most: b"[" * most,
}


# For the document that a coordinator sends, one of each form, and for the others what any reader of JSON meets. A job
# document knows neither `tensors` nor `peers`: `jobs` is such a list, and the tables are like others.
WORST_OF = [
    pytest.param(
        kind,
        what,
        id=f"{kind.__name__}-{what}",
        marks=()
        if (kind is JobDocument and what not in ("tensors", "peers")) or what in ("keys", "a long key", "depth")
        else pytest.mark.long,
    )
    for kind in (JobDocument, Manifest, Policy, CoordinatorConfig)
    for what in WORST
]


@pytest.mark.parametrize(("kind", "what"), WORST_OF)
def test_the_worst_document_of_its_length_is_refused_cheaply(kind, what):
    """The remaining cost is Python's own values of the JSON, tens of bytes for each byte."""
    data = WORST[what](kind.max_bytes)
    assert len(data) <= kind.max_bytes

    def refuse() -> None:
        with pytest.raises(DocumentInvalid) as refused:
            kind.from_json(data, what="it")
        assert len(str(refused.value)) < 1500

    started = time.process_time()
    refuse()
    assert time.process_time() - started < 3
    if kind is JobDocument:
        assert peak(refuse) < 60 * kind.max_bytes


def test_sixteen_megabytes_of_labels_are_not_parsed():
    """The attack: 5.5 million labels, each a separate mistake, took 47 s and 6.2 GiB before a policy was asked."""
    data = b'{"schema":1,"labels":[' + b"{}," * 5_500_000 + b"1]}"

    def refuse() -> None:
        with pytest.raises(DocumentInvalid, match="has more than 1048576 bytes"):
            JobDocument.from_json(data, what="the job document")

    assert peak(refuse) < 100_000


def test_an_error_names_the_first_mistakes_and_counts_the_rest():
    said = str(_refusal(JobDocument, {"schema": 1, **{f"key-{number}": 0 for number in range(20)}}))
    assert said.count(";") == 2 * MAX_MISTAKES or said.count("missing") + said.count("unknown key") == MAX_MISTAKES
    assert said.endswith(" more")
    # Only the first mistake of a list.
    said = str(_refusal(JobSpec, {**_SPEC, "labels": [""] * 10_000}))
    assert said.count("labels") == 1


# ---- TOML -----------------------------------------------------------------------------------------------------------

DEEP = {
    "lists": "x = " + "[" * 5000 + "]" * 5000,
    "tables": "x = " + "{a=" * 5000 + "1" + "}" * 5000,
    "a dotted key": "a." * 30_000 + "b = 1",
    "a dotted header": "[" + "a." * 30_000 + "b]",
    "a quoted key": "'é'.\"a b\" . " * 2000 + "b = 1",
    "behind a text": 'x = {a = """q"""", ' + "b." * 30_000 + "c = 1}",
    "an open text": '"""' + '\\"""' * 15_000,
    "quotes": '"\\' * 30_000,
    "a number": "x = " + "9" * 5000,
    "a large schema": "schema = 0x1" + "f" * 6000,
    "a large text": "x = '" + "a" * 3_000_000 + "'",
    "bytes": "x = '\udcff'",
}


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("kind", [JobSpec, OperatorConfig], ids=lambda kind: kind.__name__)
def test_toml_that_breaks_parsers_is_refused_with_a_sentence(kind, name, tmp_path):
    path = tmp_path / "it.toml"
    path.write_bytes(DEEP[name].encode("utf-8", "surrogateescape"))
    started = time.process_time()
    with pytest.raises(DocumentInvalid) as refused:
        kind.from_toml(path)
    assert time.process_time() - started < 3
    assert len(str(refused.value)) < 500 + len(str(path))


def test_dots_and_brackets_in_texts_do_not_count_as_nesting(tmp_path):
    path = tmp_path / "policy.toml"
    many = "[{" * MAX_DEPTH + "a." * 40
    path.write_text(f"schema = 1  # {many}\njobs = [\"{many}\", '{many}', \"\"\"{many}\"\"\", '''{many}''']\n")
    assert Policy.from_toml(path).jobs == (many,) * 4


# Notepad and others begin a file with it.
MARK = b"\xef\xbb\xbf"


def test_a_byte_order_mark_before_toml_is_no_part_of_it(tmp_path):
    policy, config = tmp_path / "policy.toml", tmp_path / "coordinator.toml"
    policy.write_bytes(MARK + b'schema = 1\r\njobs = ["ward"]\r\n')
    config.write_bytes(MARK + b'schema = 1\nadvertise = ["localhost"]\n')
    assert Policy.from_toml(policy).jobs == ("ward",)
    assert CoordinatorConfig.from_toml(config).advertise == ("localhost",)


def test_a_byte_order_mark_changes_no_bound_and_no_place_of_an_error():
    text = b"x = 1\n"
    assert toml_values(MARK + text, len(MARK + text), "it") == {"x": 1}
    with pytest.raises(DocumentInvalid, match="more than 8 bytes"):
        toml_values(MARK + text, 8, "it")
    with pytest.raises(DocumentInvalid, match="at byte 9; save it as UTF-8"):
        toml_values(MARK + text + b"\xff", 100, "it")
    # One is a mark. A second is text, which TOML does not allow there.
    with pytest.raises(DocumentInvalid, match="is not TOML"):
        toml_values(MARK + MARK + text, 100, "it")
    with pytest.raises(DocumentInvalid, match=f"more than {MAX_DEPTH} deep"):
        toml_values(MARK + b"x = " + b"[" * 100, 200, "it")
