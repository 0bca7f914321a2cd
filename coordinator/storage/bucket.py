"""One bucket of an S3 store, through s3fs: requests with retries, uploads in parts, and errors as sentences.

Guarantees:

- A request that the store refuses for a moment (500, 503, a cut connection, a cut answer, no answer) is repeated, here
  and by nobody else: the libraries below try once. What fails for good is `StoreUnusable`, with what to do about it. A
  store that does not answer costs a call at most `_PATIENCE` and one read timeout.
- An object is seen whole or not at all, and every key is written once: `coordinator.storage.object_store` gives each
  object a key of its own. So no request, however late it arrives, changes an object that another one wrote.
- The body of every request is signed, so that the store refuses bytes that changed on the way.
- Credentials come from where AWS's libraries look for them (environment, profile, container, instance), and are never
  in our files.

Times are the store's, in seconds since 1970: `Object.modified` and the `Date` of its answers.
"""

import contextlib
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

from coordinator.storage.errors import StoreUnusable
from toolkit.install import install_with

__all__ = ["FOLDERS", "PART_BYTES", "Bucket", "Object", "Place", "place_of"]

_T = TypeVar("_T")

# What `coordinator.storage.object_store` writes below the prefix.
FOLDERS = ("blobs/", "checks/", "owners/")
# A file above this size travels in parts of it. S3 takes 10,000 parts of 5 MiB at least.
PART_BYTES = 16 * 1024 * 1024
_MAX_PARTS = 9_000
# What one copy on the store's side may copy at once is 5 GiB.
# Much less, so that the store answers within the read timeout.
_COPY_BYTES = 512 * 1024 * 1024
_CONNECT_SECONDS, _READ_SECONDS = 3, 30
# Seconds after which a request is made no more, and between the first two tries. Each further wait is twice as long.
_PATIENCE, _FIRST_WAIT = 60.0, 0.2
_PARTS_AT_ONCE = 4
_URL = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])((?:/[A-Za-z0-9._-]{1,200})*)/?")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a bucket is. `endpoint`, `region` and `ca_file` may be empty: AWS's own, and the system's authorities."""

    bucket: str
    prefix: str
    endpoint: str = ""
    region: str = ""
    ca_file: str = ""
    path_style: bool = False


@dataclass(frozen=True, slots=True)
class Object:
    """A stored object: its key, its size in bytes, and when the store received it, in seconds."""

    key: str
    size: int
    modified: float


def place_of(url: str, *, endpoint: str = "", region: str = "", ca_file: str = "", path_style: bool = False) -> Place:
    """Returns the place that s3://BUCKET/PREFIX names.

    Raises:
        StoreUnusable: it names none.
    """
    found = _URL.fullmatch(url)
    if found is None or ".." in url:
        # Not shown: somebody may have written a password into it.
        raise StoreUnusable("store_url is not s3://BUCKET or s3://BUCKET/PREFIX; credentials belong in the environment")
    prefix = found[2].strip("/")
    return Place(found[1], f"{prefix}/" if prefix else "", endpoint, region, ca_file, path_style)


class Bucket:
    """A bucket. Its methods are synchronous and safe to call from several threads."""

    def __init__(self, place: Place, *, attempts: int = 6) -> None:
        """Connects on the first request.

        Args:
            place: where it is.
            attempts: how often a request is made that the store refuses for a moment.

        Raises:
            StoreUnusable: the driver is missing.
        """
        try:
            from s3fs import S3FileSystem
        except ImportError as error:
            raise StoreUnusable(
                f"{self._named(place)} needs a driver that is not installed ({error.name}); {install_with('s3')}"
            ) from error
        self.place = place
        self._below = tuple(place.prefix + folder for folder in FOLDERS)
        options: dict[str, Any] = {
            "s3": {"addressing_style": "path" if place.path_style else "auto", "payload_signing_enabled": True},
            # Each part's digest is signed. Stores other than AWS refuse the checksums that newer libraries add.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "retries": {"mode": "standard", "total_max_attempts": 1},
            "connect_timeout": _CONNECT_SECONDS,
            "read_timeout": _READ_SECONDS,
            "max_pool_connections": 16,
        }
        client: dict[str, Any] = {}
        if place.region:
            client["region_name"] = place.region
        if place.ca_file:
            client["verify"] = place.ca_file
        self._fs: Any = S3FileSystem(
            endpoint_url=place.endpoint or None,
            client_kwargs=client,
            config_kwargs=options,
            skip_instance_cache=True,
            use_listings_cache=False,
        )
        self._fs.retries = 1
        self._attempts = attempts

    def url(self, key: str = "") -> str:
        """Returns how an object is named in sentences."""
        return f"s3://{self.place.bucket}/{self.place.prefix}{key}"

    @staticmethod
    def _named(place: Place) -> str:
        return f"s3://{place.bucket}/{place.prefix}"

    # ---- writing ---------------------------------------------------------------------------------------------------

    def put(self, key: str, data: bytes) -> None:
        """Stores a small object in one request.

        Raises:
            StoreUnusable: it cannot be stored.
        """
        self._call("put_object", "written", Key=self._key(key), Body=data)

    def put_file(self, key: str, path: Path) -> None:
        """Stores a file, in parts if it is large. A kill leaves parts that nobody sees, for `abort_uploads`.

        Raises:
            StoreUnusable: it cannot be read or stored.
        """
        size = path.stat().st_size
        if size <= PART_BYTES:
            self.put(key, path.read_bytes())
            return
        step = max(PART_BYTES, -(-size // _MAX_PARTS))
        with path.open("rb") as file:
            descriptor = file.fileno()

            def send(upload: str, number: int, offset: int) -> str:
                body = os.pread(descriptor, step, offset)
                sent = self._call(
                    "upload_part", "written", Key=self._key(key), UploadId=upload, PartNumber=number, Body=body
                )
                return str(sent["ETag"])

            self._in_parts(key, size, step, send)

    def copy(self, source: Object, key: str) -> bool:
        """Copies an object to another key within the store. Returns whether the source was still there.

        Raises:
            StoreUnusable: it cannot be copied.
        """
        origin = {"Bucket": self.place.bucket, "Key": self._key(source.key)}

        def send(upload: str, number: int, offset: int) -> str:
            end = min(offset + _COPY_BYTES, source.size) - 1
            sent = self._call(
                "upload_part_copy",
                "written",
                Key=self._key(key),
                UploadId=upload,
                PartNumber=number,
                CopySource=origin,
                CopySourceRange=f"bytes={offset}-{end}",
            )
            return str(sent["CopyPartResult"]["ETag"])

        try:
            if source.size > _COPY_BYTES:
                self._in_parts(key, source.size, _COPY_BYTES, send)
            else:
                self._call("copy_object", "written", Key=self._key(key), CopySource=origin)
        except FileNotFoundError:
            return False
        return True

    def _in_parts(self, key: str, size: int, step: int, send: Callable[[str, int, int], str]) -> None:
        name = self._key(key)
        upload = str(self._call("create_multipart_upload", "written", Key=name)["UploadId"])
        try:
            offsets = range(0, size, step)
            with ThreadPoolExecutor(_PARTS_AT_ONCE, "s3-part") as pool:
                tags = pool.map(send, [upload] * len(offsets), range(1, len(offsets) + 1), offsets)
                parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, start=1)]
            given = {"Key": name, "UploadId": upload, "MultipartUpload": {"Parts": parts}}
            try:
                self._call("complete_multipart_upload", "written", **given)
            except (StoreUnusable, FileNotFoundError):
                # The store may have made the object, and its answer was lost: a repetition finds no upload any more.
                if not any(each.key == key and each.size == size for each in self.objects(key)):
                    raise
        except BaseException:
            with contextlib.suppress(StoreUnusable, FileNotFoundError):
                self._call("abort_multipart_upload", "given up", Key=name, UploadId=upload)
            raise

    def delete(self, key: str) -> None:
        """Deletes an object, if it is there.

        Raises:
            StoreUnusable: no permission, no connection.
        """
        with contextlib.suppress(FileNotFoundError):
            self._call("delete_object", "deleted", Key=self._key(key))

    def abort_uploads(self, before: float) -> int:
        """Gives up uploads in parts that began before a moment of the store's clock. Returns how many.

        Raises:
            StoreUnusable: no permission, no connection.
        """
        old, more = list[dict[str, Any]](), dict[str, Any]()
        while True:
            found = self._call("list_multipart_uploads", "looked through", Prefix=self.place.prefix, **more)
            # Without a prefix, the bucket's other programs are listed, too.
            ours = [each for each in found.get("Uploads", ()) if each["Key"].startswith(self._below)]
            old += [each for each in ours if each["Initiated"].timestamp() < before]
            if not found.get("IsTruncated"):
                break
            more = {"KeyMarker": found["NextKeyMarker"], "UploadIdMarker": found["NextUploadIdMarker"]}
        for each in old:
            with contextlib.suppress(FileNotFoundError):
                self._call("abort_multipart_upload", "given up", Key=each["Key"], UploadId=each["UploadId"])
        return len(old)

    # ---- reading ---------------------------------------------------------------------------------------------------

    def read(self, key: str, offset: int, size: int) -> bytes:
        """Returns `size` bytes of an object from `offset` on, fewer at the end. `size` is 1 at least.

        Raises:
            FileNotFoundError: there is no such object.
            StoreUnusable: it cannot be read.
        """
        name = f"{self.place.bucket}/{self._key(key)}"
        with _sentences(self.url(key), "read"):
            data = bytes(self._repeated(lambda: self._fs.cat_file(name, start=offset, end=offset + size)))
        if len(data) > size:
            # Otherwise the object would look damaged, and its owner would be told to delete it.
            raise StoreUnusable(
                f"{self.url(key)} cannot be read: the store answers with more bytes than were asked for; use a store "
                "that honours ranges, and no gateway before it that does not"
            )
        return data

    def objects(self, prefix: str) -> list[Object]:
        """Returns the objects whose keys begin with `prefix`, in order of their keys: all that were stored before.

        Raises:
            StoreUnusable: no permission, no connection, no such bucket.
        """
        return list(self.each(prefix))

    def each(self, prefix: str) -> Iterator[Object]:
        """Yields what `objects` returns, a thousand for each request."""
        more: dict[str, Any] = {}
        while True:
            found = self._list(prefix, **more)
            for each in found.get("Contents", ()):
                modified: datetime = each["LastModified"]
                yield Object(each["Key"][len(self.place.prefix) :], int(each["Size"]), modified.timestamp())
            if not found.get("IsTruncated"):
                return
            more = {"ContinuationToken": found["NextContinuationToken"]}

    def now(self) -> float:
        """Returns the store's time.

        Raises:
            StoreUnusable: it does not tell.
        """
        told = self._list("", MaxKeys=1)["ResponseMetadata"]["HTTPHeaders"].get("date")
        try:
            return parsedate_to_datetime(told).timestamp()
        except (TypeError, ValueError) as error:
            raise StoreUnusable(
                f"{self.url()} does not tell its time (no Date in its answer), and ages are told by its clock; let the "
                "proxy before it pass the header on"
            ) from error

    def versioned(self) -> bool:
        """Whether the bucket keeps what is deleted. False if nobody may ask."""
        try:
            return str(self._call("get_bucket_versioning", "read").get("Status", "")) == "Enabled"
        except (StoreUnusable, FileNotFoundError):
            return False

    def try_parts(self, key: str) -> None:
        """Begins an upload in parts, lists such uploads and gives it up, which needs rights of their own.

        Raises:
            StoreUnusable: it may not.
        """
        begun = self._call("create_multipart_upload", "written", Key=self._key(key))
        self.abort_uploads(0.0)
        self._call("abort_multipart_upload", "given up", Key=self._key(key), UploadId=begun["UploadId"])

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _key(self, key: str) -> str:
        return self.place.prefix + key

    def _list(self, prefix: str, **more: Any) -> dict[str, Any]:
        return self._call("list_objects_v2", "listed", Prefix=self._key(prefix), **more)

    def _call(self, method: str, verb: str, **given: Any) -> dict[str, Any]:
        key = str(given.get("Key", ""))[len(self.place.prefix) :]
        with _sentences(self.url(key), verb):
            answer: dict[str, Any] = self._repeated(lambda: self._fs.call_s3(method, Bucket=self.place.bucket, **given))
            return answer

    def _repeated(self, ask: Callable[[], _T]) -> _T:
        began, wait = time.monotonic(), _FIRST_WAIT
        for left in reversed(range(self._attempts)):
            try:
                return ask()
            except Exception as error:
                if not left or not _passes(error) or time.monotonic() - began > _PATIENCE:
                    raise
            # Not all callers at the same moment.
            time.sleep(wait * random.uniform(0.5, 1))
            wait *= 2
        raise AssertionError("a request is made at least once")


# Codes of refusals that may pass, beside those of the server itself (500 and above).
_PASSING = frozenset(
    {"SlowDown", "RequestTimeout", "Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded"}
    # The body changed on the way.
    | {"XAmzContentSHA256Mismatch", "BadDigest"}
)


def _passes(error: Exception) -> bool:
    """Whether the same request may succeed in a moment."""
    from botocore.exceptions import ClientError, SSLError
    from s3fs.core import S3_RETRYABLE_ERRORS

    cause = error if isinstance(error, ClientError) else error.__cause__
    if isinstance(cause, ClientError):
        status = cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status >= 500 or status == 429 or cause.response.get("Error", {}).get("Code") in _PASSING
    return isinstance(error, (*S3_RETRYABLE_ERRORS, OSError)) and not isinstance(error, SSLError)


# What to do, by the store's code. Every code that a wrong setting causes.
_ADVICE = {
    "NoSuchBucket": "there is no such bucket; create it, or correct store_url",
    "AccessDenied": "the store denies it; give these credentials the right {right} on the bucket",
    "403": "the store denies it; give these credentials the right {right} on the bucket",
    "InvalidAccessKeyId": "the store does not know the access key; check AWS_ACCESS_KEY_ID, or the instance's role",
    "SignatureDoesNotMatch": "the store refuses the signature; check AWS_SECRET_ACCESS_KEY and s3_region",
    "ExpiredToken": "the session token has expired; let the environment bring a new one, or use an instance's role",
    "RequestTimeTooSkewed": "this machine's clock is wrong by more than the store accepts; set it (NTP)",
    "AuthorizationHeaderMalformed": "the bucket is in another region; set s3_region{region}",
    "PermanentRedirect": "the bucket is in another region; set s3_region{region}",
    "301": "the bucket is in another region; set s3_region{region}",
    "IllegalLocationConstraintException": "the bucket is in another region; set s3_region{region}",
}
_RIGHTS = {
    "written": "s3:PutObject",
    "deleted": "s3:DeleteObject",
    "read": "s3:GetObject",
    "listed": "s3:ListBucket",
    "given up": "s3:AbortMultipartUpload",
    "looked through": "s3:ListBucketMultipartUploads",
}


@contextlib.contextmanager
def _sentences(what: str, verb: str) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError, SSLError
    from s3fs.core import S3_RETRYABLE_ERRORS

    try:
        yield
    except SSLError as error:
        raise StoreUnusable(
            f"{what} cannot be {verb}: the store's certificate is not trusted; set s3_ca_file to its authority (PEM)"
        ) from error
    except (OSError, ClientError) as error:
        cause = error if isinstance(error, ClientError) else error.__cause__
        response = cause.response if isinstance(cause, ClientError) else {}
        found = response.get("Error", {})
        code = str(found.get("Code", ""))
        if code in _ADVICE:
            region = found.get("Region") or response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get(
                "x-amz-bucket-region"
            )
            advice = _ADVICE[code].format(right=_RIGHTS[verb], region=f' = "{region}"' if region else "")
            raise StoreUnusable(f"{what} cannot be {verb}: {advice}") from error
        if isinstance(error, FileNotFoundError):
            raise  # The caller knows what it means.
        raise StoreUnusable(
            f"{what} cannot be {verb}: the store answers {code or error}; see its log, and try again"
        ) from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise StoreUnusable(
            f"{what} cannot be {verb}: there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
            "give the machine a role"
        ) from error
    except (BotoCoreError, *S3_RETRYABLE_ERRORS) as error:
        raise StoreUnusable(f"{what} cannot be {verb}: {error}; check s3_endpoint and the network") from error
