"""An S3 store over HTTP: retries, parts, bytes that changed, a bounded cache, and sentences for every wrong setting."""

import hashlib
import os
import resource
import shutil
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coordinator.config import CoordinatorConfig, CoordinatorFolder
from coordinator.storage import bucket as bucket_module
from coordinator.storage.blobs import open_blobs
from coordinator.storage.bucket import Bucket, place_of
from coordinator.storage.errors import BlobCorrupt, BlobMissing, StoreUnusable
from coordinator.storage.object_store import ObjectStore, open_store
from tests.support.places import ROOT
from tests.support.s3_server import BUCKET, BadStore, credentials, object_store, served, utc

MIB = 1024 * 1024
SMALL = b"small blob " * 100


@pytest.fixture(scope="module")
def service():
    with served() as both:
        yield both


@pytest.fixture
def server(service):
    return service[0]


@pytest.fixture
def bad(service):
    yield service[1]
    service[1].heal()


@pytest.fixture
def store(bad, tmp_path, request):
    bad.asked.clear()
    return object_store(bad.url, tmp_path, hashlib.sha256(request.node.name.encode()).hexdigest()[:20])


@pytest.fixture
def large(monkeypatch):
    """A blob of several parts of S3's smallest size."""
    for module in ("bucket", "object_store"):
        monkeypatch.setattr(f"coordinator.storage.{module}.PART_BYTES", 5 * MIB)
    return os.urandom(64) * (11 * MIB // 64)


def elsewhere(store, tmp_path):
    """The same store with an empty cache."""
    return ObjectStore(store._bucket, tmp_path / "elsewhere", 10**9)


# ---- the store fails for a moment ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "PUT"])
@pytest.mark.parametrize("fault", ["cut", "500", "503"])
def test_a_request_that_fails_for_a_moment_is_repeated(store, bad, tmp_path, method, fault):
    if fault == "cut":
        bad.rule(method, "cut", times=2)
    else:
        bad.refuse(method, int(fault), "InternalError" if fault == "500" else "SlowDown", times=2)
    digest = store.put(SMALL)
    assert elsewhere(store, tmp_path).get(digest) == SMALL
    assert bad.count(method) >= 3


def test_an_answer_that_was_lost_leaves_one_blob_that_is_whole(store, bad, server, tmp_path):
    bad.rule("PUT", "cut after", times=1)
    bad.rule("GET", "truncate", pattern="blobs/../[0-9a-f]{64}/", times=2)
    digest = store.put(SMALL)
    assert elsewhere(store, tmp_path).get(digest) == SMALL
    # A repeated request has the same key.
    assert len(server.keys(store._bucket.place.prefix)) == 1


def test_a_store_that_stays_down_is_a_sentence(bad, tmp_path):
    store = object_store(bad.url, tmp_path, "down", attempts=2)
    bad.refuse("PUT", 503, "SlowDown")
    with pytest.raises(StoreUnusable, match=r"cannot be written: the store answers SlowDown; see its log"):
        store.put(SMALL)
    bad.heal()
    assert store.get(store.put(SMALL)) == SMALL


# ---- parts ------------------------------------------------------------------------------------------------------


def test_a_large_blob_travels_in_parts_that_are_repeated(store, bad, server, tmp_path, large):
    bad.refuse("PUT", 500, "InternalError", pattern="partNumber=2", times=2)
    bad.rule("PUT", "cut", pattern="partNumber=3", times=1)
    digest = store.put(large)
    assert {f"partNumber={n}" for n in (1, 2, 3)} <= {
        each.path.rpartition("&")[2] for each in bad.asked if each.method == "PUT"
    }
    assert elsewhere(store, tmp_path).get(digest) == large
    assert server.uploads(store._bucket.place.prefix) == 0


def test_an_upload_that_fails_is_given_up_and_shows_nothing(store, bad, server, large):
    bad.refuse("PUT", 403, "AccessDenied", pattern="partNumber=2")
    with pytest.raises(StoreUnusable, match="s3:PutObject"):
        store.put(large)
    assert (server.uploads(store._bucket.place.prefix), server.keys(store._bucket.place.prefix)) == (0, [])


def test_a_completion_whose_answer_was_lost_counts(store, bad, server, tmp_path, large):
    bad.rule("POST", "cut after", pattern=r"uploadId=", times=1)
    # moto completes an upload twice; others know it no more.
    bad.refuse("POST", 404, "NoSuchUpload", pattern=r"uploadId=")
    digest = store.put(large)
    assert elsewhere(store, tmp_path).get(digest) == large
    assert len(server.keys(store._bucket.place.prefix)) == 1


UPLOAD = """
import hashlib, sys
from pathlib import Path
from tests.support.s3_server import object_store

url, folder, prefix, file = sys.argv[1:]
data = Path(file).read_bytes()
incoming = object_store(url, Path(folder), prefix).incoming(hashlib.sha256(data).digest(), len(data))
incoming.append(incoming.received, data[incoming.received :])
incoming.finish()
"""


def test_a_process_killed_in_the_middle_of_its_parts_shows_nothing_and_goes_on(store, bad, server, tmp_path):
    data = os.urandom(64) * (40 * MIB // 64)
    (tmp_path / "blob").write_bytes(data)
    digest, caught = hashlib.sha256(data).digest(), threading.Event()

    def hang(handler, asked):
        caught.set()
        handler.rfile.read(1)  # Until the process is gone.
        handler.close_connection = True

    bad.rule("PUT", hang, pattern="partNumber=2")
    words = [sys.executable, "-c", UPLOAD, bad.url, tmp_path, store._bucket.place.prefix[:-1], tmp_path / "blob"]
    process = subprocess.Popen(list(map(str, words)), env={**os.environ, "PYTHONPATH": "proto:."}, cwd=ROOT)
    assert caught.wait(60)
    process.kill()
    process.wait(60)
    bad.heal()
    assert (store.has(digest), server.uploads(store._bucket.place.prefix)) == (False, 1)
    # All bytes had arrived here, so that nobody sends them again.
    again = ObjectStore(store._bucket, tmp_path, 10**9)
    assert again.received(digest) == len(data)
    again.incoming(digest, len(data)).finish()
    assert elsewhere(store, tmp_path).get(digest) == data
    assert store._bucket.abort_uploads(time.time()) == 1
    assert server.uploads(store._bucket.place.prefix) == 0


def test_a_large_copy_is_made_in_parts(store, server, tmp_path, large, monkeypatch):
    digest = store.put(large)
    server.age(4000, store._bucket.place.prefix)
    monkeypatch.setattr(bucket_module, "_COPY_BYTES", 5 * MIB)
    store.hold(digest)
    old, new = store._copies(digest)
    assert (old.size, new.size, new.modified - old.modified > 3000) == (len(large), len(large), True)
    store._bucket.delete(old.key)
    assert elsewhere(store, tmp_path).get(digest) == large


# ---- other bytes ------------------------------------------------------------------------------------------------


def test_a_store_that_returns_other_bytes_is_found_and_named(store, bad, tmp_path):
    digest = store.put(SMALL)
    bad.rule("GET", "other bytes", pattern="blobs/../[0-9a-f]{64}/")
    other = elsewhere(store, tmp_path)
    for read in (other.get, lambda d: other.read(d, 0, 5), other.ranges):
        with pytest.raises(BlobCorrupt, match=f"{digest.hex()}.*is damaged: the store returns bytes"):
            read(digest)
    with other.reading(digest) as reader:
        while reader.read(1000):
            pass
        with pytest.raises(BlobCorrupt):
            reader.finish()
    bad.heal()
    assert other.get(digest) == SMALL


def test_a_damaged_copy_is_passed_over_for_another(store, server, tmp_path):
    digest = store.put(SMALL)
    server.age(4000, store._bucket.place.prefix)
    store.hold(digest)
    newest = store._bucket.place.prefix + store._copies(digest)[-1].key
    server.damage(newest)
    # The store tells ages in whole seconds.
    server.age(10, store._bucket.place.prefix)
    assert elsewhere(store, tmp_path).get(digest) == SMALL
    # A pruning keeps the newest copy alone, which is a good one again.
    server.age(4000, store._bucket.place.prefix)
    store.tidy(time.time() - 3600)
    (only,) = server.keys(store._bucket.place.prefix)
    assert only != newest
    assert ObjectStore(store._bucket, tmp_path / "second", 10**9).get(digest) == SMALL
    server.damage(only)
    with pytest.raises(BlobCorrupt):
        ObjectStore(store._bucket, tmp_path / "third", 10**9).get(digest)


def test_a_copy_that_rotted_on_this_machine_is_fetched_again(store, bad, tmp_path):
    digest = store.put(SMALL)
    path = tmp_path / "cache" / digest.hex()
    path.write_bytes(b"rot" + SMALL[3:])
    again = ObjectStore(store._bucket, tmp_path, 10**9)
    assert again.get(digest) == SMALL
    assert path.read_bytes() == SMALL


# ---- the cache --------------------------------------------------------------------------------------------------


def test_what_is_asked_for_often_is_fetched_once(store, bad, tmp_path):
    digest = store.put(SMALL)
    other = elsewhere(store, tmp_path)
    for _ in range(5):
        with other.ranges(digest) as blob:
            assert blob.read(6, 4) == SMALL[6:10]
    assert bad.count("GET", digest.hex() + "/[0-9a-f]{32}") == 1


def test_the_cache_stays_below_its_bound_and_keeps_what_was_used_last(bad, tmp_path):
    store = object_store(bad.url, tmp_path, "bounded", cache_bytes=3000)
    blobs = [bytes([number]) * 1000 for number in range(6)]
    digests = [store.put(blob) for blob in blobs]
    folder = tmp_path / "cache"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 3000
    assert [store.get(digest) for digest in digests] == blobs
    os.utime(folder / digests[5].hex(), (1, 1))
    store.get(digests[0])
    assert {path.name for path in folder.iterdir()} == {digests[n].hex() for n in (3, 4, 0)}
    # Larger than the bound: read from the store, and never kept.
    large = store.put(bytes(5000))
    with store.ranges(large) as blob:
        assert (blob.total, blob.read(4990, 100), blob.read_cached(0, 10)) == (5000, bytes(10), None)
    assert store.get(large) == bytes(5000)
    assert not (folder / large.hex()).exists()


@pytest.mark.parametrize("keep_open", [True, False])
def test_a_blob_without_room_in_the_cache_takes_one_request_for_each_piece(bad, server, tmp_path, keep_open):
    store = object_store(bad.url, tmp_path, f"remote-{keep_open}", cache_bytes=3000)
    digest = store.put(SMALL * 5)
    with store.ranges(digest, keep_open=keep_open) as blob:
        bad.asked.clear()
        assert b"".join(blob.read(at, 500) for at in range(0, len(SMALL) * 5, 500)) == SMALL * 5
        assert (blob.read(len(SMALL) * 5, 500), len(bad.asked)) == (b"", 11)
        # A pruning leaves only the newer copy.
        server.age(4000, store._bucket.place.prefix)
        store.hold(digest)
        store.tidy(time.time() - 3600)
        assert blob.read(5, 10) == SMALL[5:15]
        server.age(4000, store._bucket.place.prefix)
        store.remove(digest)
        with pytest.raises(BlobMissing):
            blob.read(5, 10)


def test_the_cache_may_be_deleted_while_the_store_is_in_use(store, tmp_path):
    def deleted() -> None:
        shutil.rmtree(tmp_path / "cache")

    digest = store.put(SMALL)
    deleted()
    assert store.get(digest) == SMALL
    deleted()
    assert store.get(store.put(b"another")) == b"another"
    deleted()
    incoming = store.incoming(hashlib.sha256(b"sent").digest(), 4)
    incoming.append(0, b"sent")
    incoming.finish()
    assert list((tmp_path / "incoming").iterdir()) == []
    assert store.get(incoming.digest) == b"sent"


def test_a_disk_without_room_for_a_copy_costs_no_reader_its_blob(store, tmp_path):
    digest = store.put(SMALL)
    other = elsewhere(store, tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Every write beyond fails, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        assert other.get(digest) == SMALL
        with other.ranges(digest) as blob:
            assert blob.read(6, 4) == SMALL[6:10]
        assert other.read(digest, 6, 4) == SMALL[6:10]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(other._cache.folder.iterdir()) == []


def test_a_cache_on_another_disk_fails_no_upload(store, tmp_path):
    if os.stat("/dev/shm").st_dev == tmp_path.stat().st_dev:  # noqa: S108
        pytest.skip("there is only one disk")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        (tmp_path / "cache").rmdir()
        (tmp_path / "cache").symlink_to(scratch)
        incoming = store.incoming(hashlib.sha256(SMALL).digest(), len(SMALL))
        incoming.append(0, SMALL)
        incoming.finish()
        assert store.get(incoming.digest) == SMALL


def test_a_cache_whose_disk_fails_costs_no_blob(store, tmp_path):
    kept = store.put(SMALL)
    shutil.rmtree(tmp_path / "cache")
    # Every call on a path inside fails, as on a broken disk.
    (tmp_path / "cache").write_text("")
    assert store.get(kept) == SMALL
    assert store.read(kept, 6, 4) == SMALL[6:10]
    with store.ranges(kept) as blob:
        assert blob.read(6, 4) == SMALL[6:10]
    with store.reading(kept) as blob:
        assert blob.read(len(SMALL)) == SMALL
        blob.finish()
    assert store.get(store.put(b"another")) == b"another"
    with pytest.raises(StoreUnusable, match="cannot be deleted"):
        store.remove(kept)


def test_a_removed_blob_is_gone_from_this_machine_too(store, server, tmp_path):
    digest = store.put(SMALL)
    server.age(4000, store._bucket.place.prefix)
    store.hold(digest)
    assert store.remove(digest)
    assert server.keys(store._bucket.place.prefix) == []
    assert list((tmp_path / "cache").iterdir()) == []
    with pytest.raises(BlobMissing):
        store.get(digest)


# ---- settings ---------------------------------------------------------------------------------------------------


def test_a_good_store_is_checked_and_left_as_it_was(store, server):
    assert store.check() == []
    assert (server.keys(store._bucket.place.prefix), server.uploads(store._bucket.place.prefix)) == ([], 0)


def test_a_store_that_answers_with_the_whole_object_is_no_damaged_object(store, bad, tmp_path, large):
    def whole(handler, asked):
        del handler.headers["Range"]
        _, headers, data = handler.passed_on(handler.body)
        handler.answer(200, {name: each for name, each in headers.items() if name != "Content-Range"}, data)

    digest = store.put(large)
    bad.rule("GET", whole)
    for wrong in (store.check, lambda: elsewhere(store, tmp_path).get(digest)):
        with pytest.raises(StoreUnusable, match=r"more bytes than were asked for; .* honours ranges"):
            wrong()


def test_a_missing_bucket_is_a_sentence(bad, tmp_path):
    place = place_of("s3://no-such-bucket/x", endpoint=bad.url, region="us-east-1", path_style=True)
    with pytest.raises(StoreUnusable, match="there is no such bucket; create it, or correct store_url"):
        ObjectStore(Bucket(place), tmp_path, 1).check()


@pytest.mark.parametrize(
    ("method", "pattern", "right"),
    [
        ("GET", "list-type", "s3:ListBucket"),
        ("PUT", "checks", "s3:PutObject"),
        ("GET", "checks/", "s3:GetObject"),
        ("POST", "uploads", "s3:PutObject"),
        ("DELETE", "uploadId", "s3:AbortMultipartUpload"),
        ("GET", r"\?uploads", "s3:ListBucketMultipartUploads"),
        ("DELETE", r"checks/[0-9a-f]+$", "s3:DeleteObject"),
    ],
)
def test_a_missing_right_is_named(store, bad, method, pattern, right):
    bad.refuse(method, 403, "AccessDenied", pattern=pattern)
    with pytest.raises(StoreUnusable, match=f"the store denies it; .* {right} "):
        store.check()


@pytest.mark.parametrize(
    ("status", "code", "more", "sentence"),
    [
        (
            400,
            "AuthorizationHeaderMalformed",
            "<Region>eu-west-3</Region>",
            'another region; set s3_region = "eu-west-3"',
        ),
        (301, "PermanentRedirect", "", "another region; set s3_region"),
        (403, "RequestTimeTooSkewed", "", "clock is wrong by more than the store accepts"),
        (403, "InvalidAccessKeyId", "", "does not know the access key"),
        (403, "SignatureDoesNotMatch", "", "check AWS_SECRET_ACCESS_KEY"),
        (400, "ExpiredToken", "", "session token has expired"),
    ],
)
def test_a_wrong_setting_is_a_sentence(store, bad, status, code, more, sentence):
    bad.refuse("GET", status, code, more=more)
    with pytest.raises(StoreUnusable, match=sentence):
        store.check()


def test_missing_credentials_are_a_sentence(bad, tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(StoreUnusable, match="there are no credentials; set AWS_ACCESS_KEY_ID"):
        object_store(bad.url, tmp_path).check()


def test_credentials_of_the_environment_sign_every_request(store, bad):
    with credentials(AWS_ACCESS_KEY_ID="another-key"):
        place = store._bucket.place
        ObjectStore(Bucket(place), store._locks, 1).check()
    for asked in bad.asked:
        assert "Credential=another-key/" in asked.headers["authorization"]
        assert len(asked.headers["x-amz-content-sha256"]) == 64, asked


def test_nobody_listens_is_a_sentence(tmp_path):
    place = place_of(f"s3://{BUCKET}", endpoint="http://127.0.0.1:9", region="us-east-1")
    store = ObjectStore(Bucket(place, attempts=2), tmp_path, 1)
    with credentials(), pytest.raises(StoreUnusable, match="check s3_endpoint and the network"):
        store.check()


@pytest.mark.parametrize(("seconds", "which"), [(-120, "ahead of"), (120, "behind")])
def test_a_clock_that_is_wrong_is_said(store, bad, seconds, which):
    def tell(handler, asked):
        status, headers, data = handler.passed_on(b"")
        handler.answer(status, {**headers, "Date": utc(time.time() + seconds)}, data)

    bad.rule("GET", tell, pattern="list-type")
    (said,) = store.check()
    assert f"s {which} the store's; set it (NTP)" in said


def test_a_store_without_a_clock_is_a_sentence(store, bad):
    def tell(handler, asked):
        status, headers, data = handler.passed_on(b"")
        handler.answer(status, {**headers, "Date": "soon"}, data)

    bad.rule("GET", tell, pattern="list-type")
    with pytest.raises(StoreUnusable, match="does not tell its time"):
        store.check()


def test_a_bucket_that_keeps_what_is_deleted_is_said(store, bad):
    def tell(handler, asked):
        handler.answer(200, {}, b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>")

    bad.rule("GET", tell, pattern="versioning")
    (said,) = store.check()
    assert "let a lifecycle rule expire noncurrent versions" in said


def test_a_store_that_forgets_is_refused(store, bad):
    bad.rule("PUT", lambda handler, asked: handler.answer(200, {"ETag": '"x"'}, b""))
    with pytest.raises(StoreUnusable, match="read-after-write"):
        store.check()


def authority(folder):
    """A certificate for 127.0.0.1 that signs itself."""
    import ipaddress

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a private store")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert, secret = folder / "ca.pem", folder / "ca.key"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return cert, secret


def test_a_private_endpoint_is_trusted_by_its_own_authority_alone(server, tmp_path):
    cert, secret = authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, secret)
    private = BadStore(server.port, tls=context)
    given = {"advertise": ["localhost"], "store_url": f"s3://{BUCKET}/tls", "s3_endpoint": private.url}
    given |= {"s3_region": "us-east-1", "s3_path_style": True}
    try:
        config = CoordinatorConfig.model_validate({"schema": 1, **given, "s3_ca_file": "ca.pem"})
        store = open_store(config, CoordinatorFolder(tmp_path))
        assert store.check() == []
        assert private.count("PUT", f"^/{BUCKET}/tls/checks/") == 1
        place = replace(place_of(config.store_url, endpoint=private.url, region="us-east-1"), path_style=True)
        store = ObjectStore(Bucket(place, attempts=2), tmp_path, 1)
        with pytest.raises(StoreUnusable, match="certificate is not trusted; set s3_ca_file"):
            store.check()
        with pytest.raises(StoreUnusable, match=r"s3_ca_file names .*none\.pem, which is not a file"):
            open_store(config.model_copy(update={"s3_ca_file": "none.pem"}), CoordinatorFolder(tmp_path))
    finally:
        private.close()


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3://UPPER/x",
        "s3://key:secret@bucket/x",
        "s3://bucket/../x",
        "s3://bucket/x?y=z",
        "s3://b/x",
        "s3:bucket",
    ],
)
def test_a_url_that_names_no_bucket_is_refused_without_showing_it(url):
    with pytest.raises(StoreUnusable, match="store_url is not s3://BUCKET") as caught:
        place_of(url)
    assert "secret" not in str(caught.value)


def test_a_url_names_bucket_and_prefix():
    assert [place_of(url).prefix for url in ("s3://blobs", "s3://blobs/", "s3://blobs/a/b", "s3://blobs/a/")] == [
        "",
        "",
        "a/b/",
        "a/",
    ]
    with pytest.raises(StoreUnusable, match="open_store"):
        open_blobs("s3://blobs/a")


HEAVY = """
import sys
sys.modules["s3fs"] = None
from coordinator import server
from coordinator.cli import store
from coordinator.config import CoordinatorConfig, CoordinatorFolder
from coordinator.storage.errors import StoreUnusable
from coordinator.storage.object_store import open_store
from pathlib import Path

folder = CoordinatorFolder(Path(sys.argv[1]))
open_store(CoordinatorConfig(advertise=("localhost",), store_url=sys.argv[1]), folder)
print(sorted({"boto3", "botocore", "aiobotocore", "aiohttp"} & set(sys.modules)))
try:
    open_store(CoordinatorConfig(advertise=("localhost",), store_url="s3://bucket"), folder)
except StoreUnusable as error:
    print(error)
"""


def test_without_s3_nothing_heavy_is_imported_and_a_missing_driver_is_a_sentence(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", HEAVY, str(tmp_path)], capture_output=True, text=True, timeout=100, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "[]"
    assert "pip install '.[s3]'` in Tacit's source folder" in lines[1]
