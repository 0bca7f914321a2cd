"""An operator's transfers, whole, broken and damaged."""

import hashlib
import os
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from tacit.blobs import BlobNotThere, fetch_blob, put_blob
from tacit.reason import Reason
from tacit.v1 import federation_pb2, operator_pb2
from tests.support.operator_house import House, fragile, make_job, refused


def test_a_blob_is_fetched_as_it_was_uploaded(house):
    async def scenario(house: House) -> None:
        stub = house.stub()
        for size in (0, 1, 256 * 1024, 1_000_000):
            data = os.urandom(size)
            digest = await put_blob(stub, data)
            assert house.store.get(digest) == data
            back = bytearray()
            await fetch_blob(stub.FetchBlob, digest, back)
            assert back == data
        path = house.tmp / "fetched.bin"
        await fetch_blob(stub.FetchBlob, digest, path)
        assert path.read_bytes() == data
        assert house.metrics.value("bytes_total", direction="in", channel="blob") == 1_000_000 + 256 * 1024 + 1
        assert house.metrics.value("bytes_total", direction="out", channel="blob") > 2_000_000
        with pytest.raises(BlobNotThere, match="there is no blob"):
            await fetch_blob(stub.FetchBlob, b"x" * 32, bytearray())

    house(scenario)


def test_transfers_resume_after_broken_connections(house):
    async def scenario(house: House) -> None:
        data = os.urandom(3_000_000)
        fetched = [0]

        def taken() -> tuple[int, int]:
            return house.store.received(hashlib.sha256(data).digest()), fetched[-1]

        async with fragile(house.port, 1_200_000, taken) as (port, connections):
            stub = house.stub(port=port)
            digest = await put_blob(stub, data, patience=30)
            assert house.store.get(digest) == data
            assert len(connections) >= 3
            path = house.tmp / "fetched.bin"
            await fetch_blob(
                stub.FetchBlob, digest, path, patience=30, progress=lambda arrived, _: fetched.append(arrived)
            )
            assert path.read_bytes() == data
            assert len(connections) >= 5

    house(scenario)


def test_a_malformed_upload_is_refused(house):
    async def scenario(house: House) -> None:
        stub = house.stub()

        async def put(*parts: operator_pb2.PutBlobRequest) -> Any:
            async def stream() -> AsyncIterator[operator_pb2.PutBlobRequest]:
                for part in parts:
                    yield part

            return await refused(stub.PutBlob(stream()))

        def header(digest: bytes = b"x" * 32, **fields: int) -> operator_pb2.PutBlobRequest:
            return operator_pb2.PutBlobRequest(header=operator_pb2.PutBlobHeader(digest=digest, **fields))

        data = operator_pb2.PutBlobRequest(data=b"data")
        for parts, words in (
            ([], "must begin with its header"),
            ([data], "must begin with its header"),
            ([header(total=9), data, header(total=9)], "has a second header"),
            ([header(b"short", total=9)], "a digest has 32 bytes"),
            ([header(total=2**60)], "over the limit"),
            ([header(b"y" * 32, total=9, offset=3), data], "do not follow"),
            ([header(b"y" * 32, total=2), data], "announced with"),
            ([header(b"z" * 32, total=4), data], "they were discarded"),
        ):
            code, _, sentence = await put(*parts)
            assert code is grpc.StatusCode.INVALID_ARGUMENT, words
            assert words in sentence
        code, _, _ = await refused(stub.FetchBlob(federation_pb2.FetchBlobRequest(digest=b"x" * 32)).read())
        assert code is grpc.StatusCode.NOT_FOUND
        code, _, _ = await refused(stub.StatBlob(operator_pb2.StatBlobRequest(digest=b"")))
        assert code is grpc.StatusCode.INVALID_ARGUMENT

    house(scenario)


def test_a_job_with_a_damaged_blob_is_refused(house):
    async def scenario(house: House) -> None:
        job = make_job()
        digest = job.store_in(house.store)
        name = job.document.weights.hex()
        path = house.tmp / "store" / "blobs" / name[:2] / name
        path.write_bytes(bytes(len(job.blobs["weights.bin"])))
        code, reason, sentence = await refused(house.stub().CreateJob(operator_pb2.CreateJobRequest(document=digest)))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, Reason.REASON_BUNDLE_UNSUITABLE)
        assert str(path) in sentence

    house(scenario)
