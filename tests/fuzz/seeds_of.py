"""Where the seeds come from: the examples and golden messages that other tests hold."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from tokenizers import pre_tokenizers

import secure_agg
from coordinator.storage.chain import GENESIS, entry_hash
from coordinator.workers.frames import Kind, header
from edge_client.ledger.chain import ZERO, Recovered, record_after
from edge_client.ledger.receipts import Receipt
from edge_client.private_store.backup import BackupHeader
from edge_client.private_store.container import PrivateState, encode
from export.prompted import PromptFile
from learning.text.encoder import word_tokenizer, wordpiece_tokenizer
from secure_agg.packing import pack_in_place
from secure_agg.sealing import PublicKey, SecretKey, lock
from tacit.authorities import Authorities
from tacit.identity import Role
from tacit.v1 import federation_pb2 as pb
from tacit.wire import evidence_to_bytes
from tests.property.decoders.test_documents import GOOD, token_of
from tests.support.keys import key
from tests.support.party import authority, present
from tests.unit.tacit.test_contract import OPENING, dealt
from tests.unit.tacit.test_document_limits import EXAMPLES, MORE
from tests.unit.tacit.test_vectors_encoding import encoded

__all__ = ["seeds_of"]


def seeds_of(target: str) -> Iterator[bytes]:
    """Inputs that the target takes, or nearly: at least one, none of them long."""
    found = {data for data in _seeds(target) if len(data) < 20_000}
    yield from sorted(found or {b""})


def _seeds(target: str) -> Iterator[bytes]:
    kind, _, name = target.partition("_")
    if kind == "json":
        for model, example in [*EXAMPLES.items(), *MORE]:
            if model.__name__ == name:
                yield json.dumps(example).encode()
    elif kind == "toml":
        yield b"schema = 1\n"
        for model, example in [*EXAMPLES.items(), *MORE]:
            if model.__name__ == name:
                yield _toml(example).encode()
    elif target in ("member_message", "coordinator_message", "any_message"):
        messages = encoded()
        for group in ("from members", "from the coordinator"):
            for text in messages[group].values():
                yield b"\0" * (target == "any_message") + bytes.fromhex(text)
    elif kind == "columns":
        yield from _columns(name)
    elif target == "certificate":
        yield from _certificates()
    elif target == "certificate_request":
        yield _request()
    elif target == "ledger_export":
        yield _ledger()
    else:
        yield from _OTHERS.get(target, [b""])


def _toml(table: dict[str, object], head: str = "") -> str:
    plain = "".join(
        f"{key} = {json.dumps(value)}\n" for key, value in table.items() if not isinstance(value, dict | None)
    )
    nested = "".join(
        f"[{head}{key}]\n{_toml(value, f'{head}{key}.')}" for key, value in table.items() if isinstance(value, dict)
    )
    return plain + nested


def _packed() -> bytes:
    return bytes([5]) + bytes(pack_in_place(np.arange(16, dtype=np.uint32), 13))


def _state() -> bytes:
    arrays = {"embedding.weight": np.zeros((2, 3), np.float32)}
    state = PrivateState(document=bytes(32), round=1, version=bytes(32), arrays=arrays)
    whole = encode("desk", state, federation=bytes(32), data="default", counter=1, token="00" * 16, key=None)
    return b"".join(whole)[:-32]


def _upload() -> bytes:
    message = pb.MaskedInput(member="m0", digest=bytes(32), length=16, signature=bytes(384))
    return pb.MaskedUpload(header=pb.MaskedUploadHeader(input=message)).SerializeToString()


def _sealed() -> bytes:
    public = PublicKey(SecretKey(bytes(range(96))).public)
    return public.seal(b"info", bytes(32)) + lock(bytes(32), b"header", bytes(66))


def _columns(name: str) -> Iterator[bytes]:
    texts = pa.array(["good morning", "good night", None])
    for text, label in ((texts, pa.array([1, 2, 3])), (texts.dictionary_encode(), pa.array(["a", "b", "a"]))):
        table = pa.table({"text": text, "label": label, "more": pa.array([[1], [], None])})
        sink = io.BytesIO()
        if name == "parquet":
            pq.write_table(table, sink, compression="zstd" if text is texts else "none")
            yield sink.getvalue()
            continue
        with pa.ipc.new_file(sink, table.schema) as file:
            file.write_table(table)
        yield sink.getvalue()
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        yield sink.getvalue()


def _log_answer() -> bytes:
    entry = pb.LogEntry(certificate=bytes(32), key=bytes(32), name="north", role="member", kind="issued", at_ms=1)
    head = pb.LogHead(size=1, root=bytes(32), at_ms=1, signature=b"s", certificate=b"c")
    cosignature = pb.HeadCosignature(signer=bytes(32), size=1, root=bytes(32), at_ms=1, signature=b"s")
    answer = pb.FetchLogResponse(entries=[entry], head=head, cosignatures=[cosignature])
    return answer.SerializeToString()


def _certificates() -> Iterator[bytes]:
    made = authority()
    yield made.certificate.public_bytes(Encoding.DER)
    for role, hosts in ((Role.MEMBER, ()), (Role.SERVER, ("localhost", "127.0.0.1"))):
        yield made.issue(key(1).public_key(), role, "north", host_names=hosts, now=present()).public_bytes(Encoding.DER)


def _request() -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "north")])
    made = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key(1), hashes.SHA256())
    return made.public_bytes(Encoding.DER)


def _gguf() -> bytes:
    """A head with a text, an array of numbers, one of texts, and a tensor."""

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    values = text(b"a") + struct.pack("<I", 8) + text(b"llama")
    values += text(b"b") + struct.pack("<IIQ", 9, 4, 2) + bytes(8)
    values += text(b"c") + struct.pack("<IIQ", 9, 8, 1) + text(b"x")
    tensor = text(b"t") + struct.pack("<IQQIQ", 2, 2, 3, 0, 0)
    return b"GGUF" + struct.pack("<IQQ", 3, 1, 3) + values + tensor + bytes(24)


def _graph() -> bytes:
    """A graph with a weight, a size and the attribute of an operator."""
    helper = onnx.helper
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"], axis=0),
        helper.make_node("Shape", ["rows"], ["size"]),
        helper.make_node("Reshape", ["rows", "size"], ["means"]),
    ]
    table = onnx.numpy_helper.from_array(np.zeros((2, 4), np.float32), "table")
    inputs = [helper.make_tensor_value_info("input_ids", onnx.TensorProto.INT64, [1, None])]
    outputs = [helper.make_tensor_value_info("means", onnx.TensorProto.FLOAT, [1, None, 4])]
    return bytes(helper.make_model(helper.make_graph(nodes, "it", inputs, outputs, [table])).SerializeToString())


def _prompt_file() -> bytes:
    rows = np.zeros((2, 3), np.float32)
    return PromptFile(np.zeros((1, 3), np.float32), rows, np.zeros(2, np.float32), (1, 1), "00" * 32).to_bytes()


def _journal() -> bytes:
    """Two entries whose chain is whole, and one that has what only a loss may have."""
    previous, lines = GENESIS, []
    for number, fields in enumerate(({"round": 1, "members": ["north"]}, {"loss": 0.5}), start=1):
        previous = entry_hash(previous, number, 5, "published", "desk", fields)
        lines.append([number, 5, "published", "desk", fields, previous.hex()])
    lines.append([{"float": "inf"}, 5, "published", "desk", None, None])
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def _ledger() -> bytes:
    """An export's lines: a record, a receipt, a certificate and a list of authorities."""
    record = record_after(ZERO, 1, 1_700_000_000_000, Recovered(released=(1,), unknown=((2, 3),))).line
    root = authority().certificate
    listed, pem = Authorities.first(root), root.public_bytes(Encoding.PEM).decode()
    beside = [
        {"receipt": json.dumps(EXAMPLES[Receipt]), "signature": "c2lnbmF0dXJl"},
        {"certificate": listed.federation.hex(), "pem": pem},
        {"authorities": listed.canonical().decode(), "federation": listed.federation.hex()},
    ]
    return b"\n".join([record, *(json.dumps(line).encode() for line in beside)])


def _private_backup() -> bytes:
    header = BackupHeader.model_validate(EXAMPLES[BackupHeader]).canonical()
    return b"TACITPB1" + len(header).to_bytes(4, "big") + header + b"s"


def _proof() -> bytes:
    dealing = secure_agg.ReceivedDealing("b", dealt("a"), bytes(32), (bytes(32),), b"signature")
    return evidence_to_bytes(secure_agg.Evidence(bytes(32), dealing, 0, 2, OPENING))


def _answer_cache() -> bytes:
    made = io.BytesIO()
    np.savez(made, keys_0=np.zeros((1, 2, 3, 4), np.float32))
    return made.getvalue()


def _tensors(kind: str, size: int) -> bytes:
    head = json.dumps({"a": {"dtype": kind, "shape": [2], "data_offsets": [0, size]}}).encode()
    return len(head).to_bytes(8, "little") + head + bytes(size)


def _tokenizer(cut: dict[str, object] | None, *, pieces: bool) -> bytes:
    """A tokenizer.json of few entries: of bytes, or of sentencepiece's pieces with all bytes."""
    entries = [f"<0x{number:02X}>" for number in range(256)] if pieces else []
    vocabulary = {entry: at for at, entry in enumerate(["<s>", "</s>", *entries, "a", "b", "ab", "x"])}
    normaliser = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"} if pieces else None
    model = {"type": "BPE", "byte_fallback": pieces, "vocab": vocabulary, "merges": [["a", "b"]]}
    added = [{"id": at, "content": token, "special": True} for at, token in enumerate(("<s>", "</s>"))]
    whole = {"added_tokens": added, "normalizer": normaliser, "pre_tokenizer": cut, "model": model}
    return json.dumps(whole).encode()


def _cloze() -> Iterator[dict[str, object]]:
    """A tokenizer of each family, with few entries."""
    pieces = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "##s")
    normaliser = {"type": "BertNormalizer", "lowercase": True, "strip_accents": None}
    words = {"type": "WordPiece", "vocab": {piece: at for at, piece in enumerate(pieces)}}
    yield {"normalizer": normaliser, "model": words}
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_pairs = {piece: at for at, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>", *letters, "ab"])}
    yield {"model": {"type": "BPE", "vocab": byte_pairs, "merges": ["a b"]}}
    scored = [[piece, -1.0] for piece in ("<pad>", "</s>", "<unk>", "\u2581good", "s", "<extra_id_0>")]
    yield {"model": {"type": "Unigram", "vocab": scored, "unk_id": 2}}


_LEVEL: dict[str, object] = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_OTHERS: dict[str, list[bytes]] = {
    "join_token": [token_of(json.dumps(GOOD["token"][0]).encode()).encode()],
    "kept_head": [b"00" * 32, b"ab" * 32 + b":7"],
    "identity": [b"tacit://" + b"00" * 32 + b"/member/north"],
    "template": [b"{text} It was {mask}.", b"{text_a} {sep} {text_b} {mask}"],
    "hours": [b"22:00-06:00", b"mon-fri 18:00-24:00"],
    "ledger_record": [record_after(ZERO, 1, 1_700_000_000_000, Recovered(released=(1,), unknown=((2, 3),))).line],
    "private_state": [_state()],
    "upload_header": [_upload()],
    "packed_vector": [_packed()],
    "shares": [bytes(33) * 3, bytes([1]) + bytes(32)],
    "public_key": [SecretKey(bytes(range(96))).public],
    "sealed": [_sealed()],
    "worker_frames": [
        header(Kind.OPEN, 1, 2) + b"{}" + header(Kind.SAID, 1, 3) + b"abc" + header(Kind.GONE, 1, 0),
        header(Kind.FIGURES, 0, 9) + b'{"cpu":1}' + header(Kind.ALL_SAID, 7, 0),
    ],
    "merkle_path": [bytes([1, 4]) + bytes(64)],
    "inclusion_proof": [bytes([1, 4]) + bytes(64), bytes([0, 1])],
    "consistency_proof": [bytes([3, 7]) + bytes(128), bytes([4, 4])],
    "roster_log": [_log_answer()],
    "roster_copy": [b'{"schema":1,"kind":"tacit-roster-log","authorities":"7b7d"}\n{"entry":[]}\n'],
    "sum": [bytes(64)],
    "corpus_rows": [b'{"text": "good morning", "label": "a"}\n{"text": "x", "label": "b"}\n'],
    "examples_jsonl": [
        b'{"text": "good morning", "label": "a"}\n',
        b'{"prompt": "who?", "response": "she"}\n{"messages": [{"role": "user", "content": "who?"}]}\n',
    ],
    "examples_csv": [
        b"text,label\ngood morning,a\n",
        b'messages,x\n"[{""role"": ""assistant"", ""content"": ""she""}]",1\n',
    ],
    "datasets_state": [b'{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}'],
    "dialogue_template": [b"{<s>}[INST] ", b"{<|im_start|>}user\n"],
    "dialogue_tokenizer": [_tokenizer(_LEVEL, pieces=False), _tokenizer(None, pieces=True)],
    "examples_tsv": [b"text\tlabel\ngood morning\ta\n"],
    "checkpoint_vocabulary": [b"[PAD]\n[UNK]\ngood\n##s\n"],
    "checkpoint_tokenizer": [b'{"model":{"type":"WordPiece","vocab":{"[PAD]":0,"good":1}}}'],
    "checkpoint_tensors": [_tensors("F32", 8), _tensors("BF16", 4)],
    "journal": [_journal()],
    "private_backup": [_private_backup()],
    "evidence": [_proof()],
    "answer_cache": [_answer_cache()],
    "proxy_answer": [b"HTTP/1.1 200 OK\r\n\r\n"],
    "own_tokenizer": [wordpiece_tokenizer(("[PAD]", "[UNK]", "good", "##s")), word_tokenizer(("good", "morning"))],
    "cloze_tokenizer": [json.dumps(each).encode() for each in _cloze()],
    "words": [b"[PAD]\n[UNK]\ngood\n##s\n"],
    "gguf_header": [_gguf()],
    "onnx_graph": [_graph()],
    "prompt_file": [_prompt_file()],
}
