"""Every size and offset has 64 bits: in messages, in the database, in files. A long test moves more than 4 GiB for real
(`tests/integration/test_huge_backbone.py`).
"""

import re
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from sqlalchemy import BigInteger, Integer

from coordinator.storage import open_blobs
from coordinator.storage.models import Base
from learning.backbones.layout import checked_config, layout_of
from tacit.pieces import PIECE, check_list, list_bytes
from tacit.prompt import MAX_BACKBONE_BYTES
from tacit.v1 import enrolment_pb2, federation_pb2, operator_pb2

WIDE = (FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_INT64)
NUMBERS = (*WIDE, FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_SINT32)
# Names of what counts bytes, values, positions or milliseconds. They grow with a file, a log or time.
GROWS = re.compile(r"(^|_)(size|offset|total|length|received|start|values|bytes|examples|rows|ms|known|sequence)$")
FAR = 2**32 + 5
CONFIG = checked_config(
    {
        "model_type": "bert",
        "hidden_size": 1152,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 960_000,
        "masked_lm": False,
    }
)


def messages(file):
    """All messages of a file, also those inside others."""
    waiting = list(file.DESCRIPTOR.message_types_by_name.values())
    for each in waiting:
        waiting.extend(each.nested_types)
    return waiting


def test_every_message_states_sizes_and_offsets_in_64_bits():
    fields = [
        (field.full_name, field.type)
        for file in (enrolment_pb2, federation_pb2, operator_pb2)
        for message in messages(file)
        for field in message.fields
        if field.type in NUMBERS and GROWS.search(field.name)
    ]
    assert {"tacit.v1.BlobChunk.offset", "tacit.v1.FetchBlobRequest.length", "tacit.v1.PutBlobHeader.total"} <= {
        name for name, _ in fields
    }
    assert [name for name, kind in fields if kind not in WIDE] == []


@pytest.mark.parametrize("number", [2**31, 2**32 + 5, MAX_BACKBONE_BYTES])
def test_a_chunk_far_into_a_file_says_where_it_is(number):
    chunk = federation_pb2.BlobChunk(offset=number - 1, total=number, data=b"x")
    read = federation_pb2.BlobChunk.FromString(chunk.SerializeToString())
    assert (read.offset, read.total) == (number - 1, number)
    asked = federation_pb2.FetchBlobRequest(offset=number, length=number)
    assert federation_pb2.FetchBlobRequest.FromString(asked.SerializeToString()) == asked
    header = operator_pb2.PutBlobHeader(total=number, offset=number)
    assert operator_pb2.PutBlobHeader.FromString(header.SerializeToString()) == header


def test_every_column_of_a_size_has_64_bits():
    """SQLite's integers always have. PostgreSQL's INTEGER has 32, which is enough for a job's number of rounds."""
    columns = [column for table in Base.metadata.tables.values() for column in table.columns]
    numbers = [each for each in columns if isinstance(each.type, Integer) and each.name != "rounds_total"]
    sizes = [each for each in numbers if GROWS.search(each.name)]
    assert {"size", "examples"} <= {each.name for each in sizes}
    assert [str(each) for each in sizes if not isinstance(each.type, BigInteger)] == []


def test_a_list_of_pieces_goes_up_to_the_largest_backbone():
    assert list_bytes(MAX_BACKBONE_BYTES) == 32 * (MAX_BACKBONE_BYTES // PIECE)
    for size in (2**31, 2**32, FAR, MAX_BACKBONE_BYTES):
        check_list(bytes(32 * -(-size // PIECE)), size)


def test_the_store_reads_beyond_four_gibibytes(tmp_path: Path):
    """The file is sparse: it has no bytes but the last."""
    digest = bytes(range(32))
    store = open_blobs((tmp_path / "store").as_uri())
    path = tmp_path / "store" / "blobs" / digest.hex()[:2] / digest.hex()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.seek(FAR)
        file.write(b"the end")
    assert path.stat().st_blocks * 512 < 2**20
    assert store.size(digest) == FAR + 7
    assert store.read(digest, FAR, 100) == b"the end"
    assert store.read(digest, 2**31, 3) == bytes(3)


def test_a_backbone_above_four_gibibytes_is_laid_out_without_a_gap():
    layout = layout_of(CONFIG)
    assert layout.size > 2**32
    at = len(layout.header)
    for name, shape in layout.shapes.items():
        assert layout.places[name] == at
        at += 4 * int(np.prod(shape, dtype=np.int64))
    assert at == layout.size
    assert max(layout.places.values()) > 2**32
