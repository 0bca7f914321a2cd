"""What is fuzzed: a reader takes bytes, and either returns or raises the error that it documents.

A target returns for every input. Any other exception, a hang or a blow-up of memory is a finding. Where a reader has a
writer, a target also checks that what was read is written and read again as the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import resource
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
from cryptography import x509
from google.protobuf.message import DecodeError, Message
from tokenizers import Tokenizer

from coordinator.corpus_rules import CorpusInvalid, RowsCheck
from coordinator.pki import RequestUnsuitable, certify_request
from coordinator.storage.backup import BackupManifest, Snapshot
from coordinator.storage.errors import BackupDamaged
from coordinator.workers.frames import FROM_WORKER, ChannelBroken, Frame, Kind, Parser, decoded
from edge_client.identity import proxy
from edge_client.ledger.chain import RecordInvalid, record_from
from edge_client.ledger.verification import verify_export
from edge_client.policy.conditions import Window
from edge_client.private_store import backup as states
from edge_client.private_store.container import StateDamaged, StateNewer, StateSealed, decode  # type: ignore[attr-defined]
from export import generating
from export.finetune.words import read_words
from export.prompted import PromptFile, PromptInvalid
from learning.backbones.checkpoint import CheckpointInvalid, read_entries, read_shapes, read_tensors
from learning.backbones.gguf_header import check_header
from learning.backbones.layout import BackboneInvalid
from learning.backbones.onnx_features import check_graph
from learning.text.cloze_tokenizer import check_cloze_form, own_form
from learning.text.columnar import ColumnsInvalid, columnar_files
from learning.text.columnar_reader import FileInvalid, write_rows
from learning.text.data import read_examples
from learning.text.dialogue_tokenizer import check_dialogue_form, own_dialogue_form, parts_of, text_tokenizer
from learning.text.encoder import (
    TextEncoder,
    TokenizerInvalid,
    VocabularyInvalid,
    check_own_form,
    read_vocabulary,
    wordpiece_tokenizer,
)
from learning.text.examples import DataInvalid
from secure_agg import Layout, Segment
from secure_agg.merkle import root_from_path
from secure_agg.packing import packed_size, unpack_into
from secure_agg.sealing import SEAL_OVERHEAD, KeyInvalid, PublicKey, SealBroken, SecretKey, unlock
from secure_agg.shamir import ShareInvalid, combine_secret, read_share
from secure_agg.transparency import is_consistent, root_of_inclusion
from tacit import roster_wire, wire
from tacit.certificates import certificate_from_der, extension_of
from tacit.documents import Document, DocumentInvalid
from tacit.fields import TextInvalid, admit, neutralise
from tacit.generation import parse_around
from tacit.heads import KeptHead
from tacit.identity import CertificateInvalid, Identity, KeyUnfit, Role, federation_of, key_in, verify_certificate
from tacit.prompt import parse_template
from tacit.roster import HeadInvalid
from tacit.roster_copy import CopyInvalid, read_copy
from tacit.token import JoinToken, TokenInvalid
from tacit.v1 import enrolment_pb2, federation_pb2, operator_pb2
from tests.property.decoders.test_wire_decoders import coordinator_reads, member_reads
from tests.support.party import authority, present
from tests.unit.tacit.test_document_limits import EXAMPLES

__all__ = ["TARGETS", "Target"]

Target = Callable[[bytes], None]


def _message(kind: type[Message], reads: Callable[[Any], None], data: bytes) -> None:
    with contextlib.suppress(DecodeError):
        reads(kind.FromString(data))


def _upload(message: federation_pb2.MaskedUpload) -> None:
    with contextlib.suppress(wire.WireInvalid):
        read = wire.masked_input_from_pb(message.header.input)
        assert wire.masked_input_from_pb(wire.masked_input_to_pb(read)) == read


# Every message of the contract.
_KINDS = [
    kind
    for module in (enrolment_pb2, federation_pb2, operator_pb2)
    for _, kind in sorted(vars(module).items())
    if isinstance(kind, type) and issubclass(kind, Message)
]


def _any_message(data: bytes) -> None:
    """The text of any message of the contract, as a server admits it and as a client cleans it. First byte: which."""
    if not data:
        return
    kind = _KINDS[data[0] % len(_KINDS)]
    with contextlib.suppress(DecodeError, TextInvalid):
        admit(kind.FromString(data[1:]))
    with contextlib.suppress(DecodeError):
        message = kind.FromString(data[1:])
        neutralise(message)
        with contextlib.suppress(TextInvalid):
            admit(message)


def _document(kind: type[Document], data: bytes) -> None:
    try:
        document = kind.from_json(data, what="it")
    except DocumentInvalid as error:
        _sentence(str(error))
        return
    assert kind.from_json(document.canonical()) == document


def _sentence(text: str) -> None:
    """What a person is told: something, and no book."""
    assert 0 < len(text) < 20_000


def _toml(kind: type[Document], data: bytes) -> None:
    with _file("it.toml", data) as path, contextlib.suppress(DocumentInvalid):
        kind.from_toml(path)


@contextlib.contextmanager
def _file(name: str, data: bytes) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        yield path


def _text(reads: Callable[[str], Any], errors: tuple[type[Exception], ...], data: bytes) -> None:
    with contextlib.suppress(*errors):
        reads(data.decode("utf-8", "replace"))


def _ledger_record(data: bytes) -> None:
    with contextlib.suppress(RecordInvalid):
        record_from(data)


def _private_state(data: bytes) -> None:
    # A file ends with the SHA-256 of what is before it, which no fuzzer guesses.
    with contextlib.suppress(StateDamaged, StateNewer, StateSealed):
        decode(data + hashlib.sha256(data).digest(), "it", None)


def _packed_vector(data: bytes) -> None:
    """First byte: the ring's width."""
    if not data:
        return
    bits, body = 8 + data[0] % 25, data[1:]
    values = len(body) * 8 // bits
    out = np.empty(values, np.uint32)
    try:
        unpack_into(out, body, bits)
    except ValueError:
        assert len(body) != packed_size(values, bits) or body[-1]
        return
    assert out.size == 0 or int(out.max()) < 2**bits


def _shares(data: bytes) -> None:
    shares = [data[at : at + 33] for at in range(0, min(len(data), 330), 33)]
    with contextlib.suppress(ShareInvalid):
        for share in shares:
            read_share(share)
        combine_secret(list(enumerate(shares, start=1)), max(1, len(shares)))


def _inclusion_proof(data: bytes) -> None:
    """Two bytes of index and size, then siblings. Nothing leads to a root that the fuzzer does not know."""
    if len(data) >= 2:
        siblings = [data[at : at + 32] for at in range(2, len(data), 32)]
        root = root_of_inclusion(bytes(32), data[0], data[1], siblings)
        assert root is None or len(root) == 32
        assert root != bytes(32) or not siblings


def _consistency_proof(data: bytes) -> None:
    if len(data) >= 2:
        siblings = [data[at : at + 32] for at in range(2, len(data), 32)]
        if is_consistent(data[0], bytes(32), data[1], bytes([1]) * 32, siblings):
            raise AssertionError("a proof between two roots of no tree")


def _roster_log(data: bytes) -> None:
    """An answer of the coordinator about its log."""
    with contextlib.suppress(DecodeError):
        answer = federation_pb2.FetchLogResponse.FromString(data)
        with contextlib.suppress(HeadInvalid):
            # Not compared as messages: what was read has no unknown fields.
            head = roster_wire.head_from_pb(answer.head, bytes(32))
            assert roster_wire.head_from_pb(roster_wire.head_to_pb(head), bytes(32)) == head
        for entry in answer.entries[:100]:
            with contextlib.suppress(HeadInvalid):
                assert len(roster_wire.entry_from_pb(entry).leaf) == 32
        for each in answer.cosignatures[:100]:
            with contextlib.suppress(HeadInvalid):
                roster_wire.cosignature_from_pb(each)


def _roster_copy(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "it.jsonl")
        path.write_bytes(data)
        with contextlib.suppress(CopyInvalid):
            read_copy(path)


def _merkle_path(data: bytes) -> None:
    path = tuple(data[at : at + 32] for at in range(2, len(data), 32))
    if len(data) >= 2:
        root_from_path(bytes(32), data[0], data[1], path)


def _worker_frames(data: bytes) -> None:
    def deliver(frame: Frame) -> None:
        if frame.kind in (Kind.OPEN, Kind.FIGURES, Kind.LISTENING):
            decoded(frame.payload)

    parser = Parser(FROM_WORKER)
    with contextlib.suppress(ChannelBroken):
        for at in range(0, len(data), 17):
            parser.feed(data[at : at + 17], deliver)


def _sum(data: bytes) -> None:
    words = np.frombuffer(data[: len(data) // 8 * 8], "<u8")
    layout = Layout((Segment("update", max(1, words.size), scale=1000.0, bound=1.0),), bits=24)
    with contextlib.suppress(ValueError):
        layout.decode((words if words.size else np.zeros(1, "<u8")).astype(np.uint32))


def _corpus_rows(data: bytes) -> None:
    rows = RowsCheck(("a", "b"), 100)
    with contextlib.suppress(CorpusInvalid):
        for at in range(0, len(data), 17):
            rows.take(data[at : at + 17])


def _examples(name: str, data: bytes) -> None:
    with _file(name, data) as path, contextlib.suppress(DataInvalid):
        read_examples(path)


def _columns(name: str, data: bytes) -> None:
    """What the process that reads Parquet and Arrow files does, in this one, under such a limit of memory.

    A file of a kilobyte may announce a page of any size.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    with _file(name, data) as path, _limited_memory(), contextlib.suppress(FileInvalid, MemoryError):
        write_rows([path], ["text", "label", "text_b"], json.dumps)


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (psutil.Process().memory_info().data + _COLUMNS_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


# What the readers of columns may take beside what this process has.
_COLUMNS_BYTES = 512 << 20


def _datasets_state(data: bytes) -> None:
    with _file("state.json", data) as path, contextlib.suppress(ColumnsInvalid):
        for file in columnar_files(path.parent) or []:
            assert file.parent == path.parent


def _certificate(data: bytes) -> None:
    """A certificate that anybody sends, and what is read of one that an authority has signed."""
    with contextlib.suppress(CertificateInvalid):
        root = authority().certificate
        verify_certificate(data, root, federation=federation_of(root), role=Role.MEMBER, now=present())
    with contextlib.suppress(ValueError):
        whole = certificate_from_der(data)
        with contextlib.suppress(CertificateInvalid):
            Identity.of(whole)
        for kind in (x509.BasicConstraints, x509.KeyUsage):
            with contextlib.suppress(ValueError):
                extension_of(whole, kind)
        with contextlib.suppress(KeyUnfit):
            key_in(whole)


def _certificate_request(data: bytes) -> None:
    with contextlib.suppress(RequestUnsuitable):
        certify_request(data)


def _journal(data: bytes) -> None:
    """The journal's rows in a backup, once their digest is right."""
    with tempfile.TemporaryDirectory() as folder:
        forms = {
            "id": "plain",
            "at_ms": "plain",
            "kind": "plain",
            "subject": "plain",
            "fields": "json",
            "hash": "bytes",
        }
        columns = [{"name": name, "form": form} for name, form in forms.items()]
        digest = hashlib.sha256(data).hexdigest()
        table = {"name": "journal", "columns": columns, "rows": 1, "sha256": digest, "size": len(data)}
        whole = {**EXAMPLES[BackupManifest], "tables": [table], "blobs": [], "keys": []}
        manifest = BackupManifest.from_json(json.dumps(whole).encode(), what="it")
        snapshot = Snapshot(Path(folder), Path(folder, "it.json"), manifest)
        snapshot.table(manifest.tables[0]).parent.mkdir()
        snapshot.table(manifest.tables[0]).write_bytes(data)
        with contextlib.suppress(BackupDamaged):
            snapshot.check()


def _ledger_export(data: bytes) -> None:
    """Whatever an export holds, the verdict is sentences."""
    for problem in verify_export(data.split(b"\n")).problems:
        _sentence(str(problem))


def _private_backup(data: bytes) -> None:
    with contextlib.suppress(StateDamaged, StateNewer):
        states._verified(io.BytesIO(data + hashlib.sha256(data).digest()), Path("it"))


def _evidence(data: bytes) -> None:
    with contextlib.suppress(wire.WireInvalid):
        read = wire.evidence_from_bytes(data)
        assert wire.evidence_from_bytes(wire.evidence_to_bytes(read)) == read


def _answer_cache(data: bytes) -> None:
    """The file of an export that a writing model starts from."""
    with contextlib.suppress(OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile):
        generating._arrays_of(data, {"keys_0": (1, 2, 3, 4)})


def _proxy_answer(data: bytes) -> None:
    proxy._status(data)


def _own_tokenizer(data: bytes) -> None:
    """A tokenizer that passes encodes any text."""
    with contextlib.suppress(TokenizerInvalid):
        check_own_form(data)
        assert TextEncoder(data, 8, 1).encode(["good morning"]).shape[0] == 1


def _cloze_tokenizer(data: bytes) -> None:
    """Our form of a tokenizer is its own, and encodes any text."""
    with contextlib.suppress(TokenizerInvalid):
        form = own_form(data)
        check_cloze_form(form)
        Tokenizer.from_buffer(form).encode("A good morning, <s> [MASK] \u3000")


def _words(data: bytes) -> None:
    with _file("it.txt", data) as path, contextlib.suppress(VocabularyInvalid):
        wordpiece_tokenizer(read_vocabulary(path))
        read_words(path)


def _gguf_header(data: bytes) -> None:
    with _file("it.gguf", data) as path, contextlib.suppress(BackboneInvalid):
        check_header(path)


def _onnx_graph(data: bytes) -> None:
    with contextlib.suppress(BackboneInvalid):
        check_graph(memoryview(data))


def _prompt_file(data: bytes) -> None:
    with contextlib.suppress(PromptInvalid):
        found = PromptFile.from_bytes(data)
        assert PromptFile.from_bytes(found.to_bytes()).words == found.words


def _checkpoint(name: str, data: bytes) -> None:
    with _file(name, data) as path, contextlib.suppress(CheckpointInvalid):
        folder = path.parent
        if name != "model.safetensors":
            read_entries(folder)
            return
        list(read_shapes(folder, lambda tensor: tensor))
        list(read_tensors(folder, lambda tensor: tensor))


def _dialogue_template(text: str) -> None:
    """What stands around a turn is read into parts that give the same text again."""
    pieces = parse_around(text)
    assert "".join(f"{{{each.text}}}" if each.special else each.text for each in pieces) == text


def _dialogue_tokenizer(data: bytes) -> None:
    """An own form is its own, and makes no special token of text."""
    with contextlib.suppress(TokenizerInvalid):
        own = own_dialogue_form(data)
        check_dialogue_form(own)
        parts = parts_of(own)
        text = "".join(parts.specials) + " x\n12"
        found = text_tokenizer(parts).encode(text, add_special_tokens=False).ids
        assert not set(found) & set(parts.specials.values())


_OPENER = SecretKey(bytes(range(96)))


def _public_key(data: bytes) -> None:
    with contextlib.suppress(KeyInvalid):
        assert len(PublicKey(data).seal(b"info", b"message")) == 7 + SEAL_OVERHEAD


def _sealed(data: bytes) -> None:
    """What a dealer seals: a key or a seed, then locked shares."""
    with contextlib.suppress(SealBroken):
        unlock(_OPENER.open(b"info", data[:1168])[:32].ljust(32, b"\0"), b"header", data[1168:])


# Documents that a person writes.
_WRITTEN = ("JobSpec", "Policy", "CoordinatorConfig", "OperatorConfig", "SurveySpec", "MeasurementSpec")

TARGETS: Mapping[str, Target] = {
    "member_message": partial(_message, federation_pb2.MemberMessage, coordinator_reads),
    "coordinator_message": partial(_message, federation_pb2.CoordinatorMessage, member_reads),
    "upload_header": partial(_message, federation_pb2.MaskedUpload, _upload),
    "any_message": _any_message,
    **{f"json_{kind.__name__}": partial(_document, kind) for kind in EXAMPLES},
    **{f"toml_{kind.__name__}": partial(_toml, kind) for kind in EXAMPLES if kind.__name__ in _WRITTEN},
    "join_token": partial(_text, JoinToken.parse, (TokenInvalid,)),
    "kept_head": partial(_text, KeptHead.read, (ValueError,)),
    "identity": partial(_text, Identity.parse, (CertificateInvalid,)),
    "template": partial(_text, parse_template, (ValueError,)),
    "hours": partial(_text, Window.parse, (ValueError,)),
    "ledger_record": _ledger_record,
    "private_state": _private_state,
    "packed_vector": _packed_vector,
    "shares": _shares,
    "public_key": _public_key,
    "sealed": _sealed,
    "merkle_path": _merkle_path,
    "inclusion_proof": _inclusion_proof,
    "consistency_proof": _consistency_proof,
    "roster_log": _roster_log,
    "roster_copy": _roster_copy,
    "worker_frames": _worker_frames,
    "sum": _sum,
    "corpus_rows": _corpus_rows,
    "examples_jsonl": partial(_examples, "it.jsonl"),
    "examples_csv": partial(_examples, "it.csv"),
    "examples_tsv": partial(_examples, "it.tsv"),
    "columns_parquet": partial(_columns, "it.parquet"),
    "columns_arrow": partial(_columns, "it.arrow"),
    "datasets_state": _datasets_state,
    "certificate": _certificate,
    "certificate_request": _certificate_request,
    "journal": _journal,
    "ledger_export": _ledger_export,
    "private_backup": _private_backup,
    "evidence": _evidence,
    "answer_cache": _answer_cache,
    "proxy_answer": _proxy_answer,
    "own_tokenizer": _own_tokenizer,
    "cloze_tokenizer": _cloze_tokenizer,
    "words": _words,
    "gguf_header": _gguf_header,
    "onnx_graph": _onnx_graph,
    "prompt_file": _prompt_file,
    "dialogue_template": partial(_text, _dialogue_template, (ValueError,)),
    "dialogue_tokenizer": _dialogue_tokenizer,
    "checkpoint_vocabulary": partial(_checkpoint, "vocab.txt"),
    "checkpoint_tokenizer": partial(_checkpoint, "tokenizer.json"),
    "checkpoint_tensors": partial(_checkpoint, "model.safetensors"),
}
