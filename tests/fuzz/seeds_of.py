"""Where the seeds come from: the examples and golden messages that other tests hold."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from coordinator.workers.frames import Kind, header
from edge_client.ledger.chain import ZERO, Recovered, record_after
from edge_client.private_store.container import PrivateState, encode
from secure_agg.packing import pack_in_place
from secure_agg.sealing import PublicKey, SecretKey, lock
from tacit.v1 import federation_pb2 as pb
from tests.property.decoders.test_documents import GOOD, token_of
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


def _tokenizer(cut: dict[str, object] | None, *, pieces: bool) -> bytes:
    """A tokenizer.json of few entries: of bytes, or of sentencepiece's pieces with all bytes."""
    entries = [f"<0x{number:02X}>" for number in range(256)] if pieces else []
    vocabulary = {entry: at for at, entry in enumerate(["<s>", "</s>", *entries, "a", "b", "ab", "x"])}
    normaliser = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"} if pieces else None
    model = {"type": "BPE", "byte_fallback": pieces, "vocab": vocabulary, "merges": [["a", "b"]]}
    added = [{"id": at, "content": token, "special": True} for at, token in enumerate(("<s>", "</s>"))]
    whole = {"added_tokens": added, "normalizer": normaliser, "pre_tokenizer": cut, "model": model}
    return json.dumps(whole).encode()


_LEVEL: dict[str, object] = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_SAFETENSORS = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
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
    "checkpoint_tensors": [len(_SAFETENSORS).to_bytes(8, "little") + _SAFETENSORS + bytes(8)],
}
