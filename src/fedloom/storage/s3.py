"""Store in a bucket, or part of one, of an S3-compatible service (AWS, SeaweedFS, MinIO, ...)."""

from __future__ import annotations

import io
import logging
import os
import time
import uuid
from base64 import b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import md5
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit
from xml.etree.ElementTree import ParseError

import certifi
import urllib3
from minio import Minio
from minio.deleteobjects import DeleteObject
from minio.error import InvalidResponseError, MinioException, S3Error, ServerError
from urllib3.exceptions import HTTPError, LocationValueError, MaxRetryError, SSLError

from fedloom.core.files import opened, staged, storing
from fedloom.core.urls import service_url
from fedloom.errors import ExperimentError, FedloomError, RefusedError, StorageError
from fedloom.storage.base import CREDENTIALS, ENDPOINT, REGION, Absent, Store, StoredObject, Taken, parts_of

log = logging.getLogger("fedloom.storage")

T = TypeVar("T")

PART = 16 * 2**20
"""Size in bytes of the parts of an upload; larger contents are sent in parts, three at a time."""

FIRST_PAUSE_S = 0.5
"""Pause between the first and the second attempt of a request; each further pause is twice as long."""

CHECK_S = 8.0
"""Timeout for a response while a store is checked; there are two attempts."""

_MEANINGS: Sequence[tuple[Collection[str], type[FedloomError], str, str | None]] = (
    (("NoSuchKey", "NoSuchObject"), Absent, "{place} does not exist", None),
    (("PreconditionFailed",), Taken, "{place} already exists", None),
    (
        ("NoSuchBucket",),
        StorageError,
        "{endpoint} has no bucket {bucket}",
        "create the bucket, or change storage",
    ),
    (
        ("AuthFailure", "ExpiredToken", "InvalidAccessKeyId", "InvalidClientTokenId", "InvalidToken",
         "SignatureDoesNotMatch", "TokenRefreshRequired", "UnrecognizedClientException"),
        RefusedError,
        "{bucket}: {endpoint} does not accept the credentials ({code})",
        f"set {' and '.join(CREDENTIALS)} (and AWS_SESSION_TOKEN, for temporary ones) to valid credentials",
    ),
    (
        ("AccessDenied", "AllAccessDisabled", "AccountProblem"),
        RefusedError,
        "{place} may not be {doing} with these credentials ({code})",
        f"allow it in the policy of {CREDENTIALS[0]}, or use other credentials",
    ),
    (("RequestTimeTooSkewed",), RefusedError, "{endpoint} rejects this machine's clock ({code})", "correct the clock"),
    (
        ("AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect", "Redirect"),
        RefusedError,
        "{bucket} is not in the region {region} ({code})",
        "set AWS_REGION to the bucket's region",
    ),
    (
        ("NotImplemented", "MethodNotAllowed"),
        RefusedError,
        "{place} cannot be {doing}: {endpoint} does not support the operation ({code})",
        None,
    ),
)  # fmt: skip
"""Errors of the service: codes, class, message and remedy."""

_TRANSIENT = {
    "BadDigest", "ConditionalRequestConflict", "IncompleteBody", "InternalError", "NoSuchUpload", "OperationAborted",
    "RequestTimeout", "ServiceUnavailable", "SlowDown", "SlowDownRead", "SlowDownWrite", "Throttling",
}  # fmt: skip
"""Transient errors.

``NoSuchUpload``: a multipart upload was completed, its response lost, and the request repeated.
"""


@dataclass(frozen=True)
class Service:
    """Address and credentials of the service, from the environment."""

    endpoint: str
    region: str
    access_key: str
    secret_key: str = field(repr=False)
    session_token: str | None = field(repr=False)
    certificates: str
    endpoint_from: str
    """Setting that the endpoint comes from, named in errors."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], endpoint_from: str = ENDPOINT) -> Service:
        """Read the settings from environment variables (docs/storage.md).

        Raise ExperimentError if the address is malformed, or the certificate file does not exist; RefusedError if there
        are no credentials.
        """
        missing = [name for name in CREDENTIALS if not environment.get(name)]
        if missing:
            raise RefusedError(
                f"Storage on S3 needs {' and '.join(missing)} in the environment.",
                hint=f"set {' and '.join(CREDENTIALS)}; in pods, use a Secret (docs/storage.md)",
            )
        certificates = environment.get("SSL_CERT_FILE") or certifi.where()
        if not Path(certificates).is_file():
            raise ExperimentError(f"SSL_CERT_FILE must be a file with certificates (got {certificates}).")
        return cls(
            endpoint=service_url(
                environment.get(ENDPOINT) or "https://s3.amazonaws.com",
                endpoint_from,
                "http(s)://HOST:PORT",
                key=endpoint_from,
                path=False,
            ),
            region=environment.get(REGION) or "us-east-1",
            access_key=environment[CREDENTIALS[0]],
            secret_key=environment[CREDENTIALS[1]],
            session_token=environment.get("AWS_SESSION_TOKEN") or None,
            certificates=certificates,
            endpoint_from=endpoint_from,
        )


class Connection:
    """Client of the service, with its retries and timeouts. Threads may share one.

    Parameters
    ----------
    attempts
        Maximum attempts of a request; the pauses between them double.
    connect_s, read_s
        Timeouts of one connection: to connect (or to send a block of data), and to receive a response.
    """

    def __init__(self, service: Service, *, attempts: int, connect_s: float, read_s: float) -> None:
        self.service = service
        self.attempts = attempts
        # Requests are retried here, not in urllib3: retrying a conditional write needs special care, a download can
        # fail after its headers, and urllib3 would print a warning for every retry.
        self.http = urllib3.PoolManager(
            timeout=urllib3.Timeout(connect=connect_s, read=read_s),
            maxsize=10,
            retries=urllib3.Retry(total=0, raise_on_status=False, raise_on_redirect=False),
            cert_reqs="CERT_REQUIRED",
            ca_certs=service.certificates,
        )
        try:
            self.client = Minio(
                urlsplit(service.endpoint).netloc,
                access_key=service.access_key,
                secret_key=service.secret_key,
                session_token=service.session_token,
                secure=service.endpoint.startswith("https://"),
                region=service.region,
                http_client=self.http,
            )
        except ValueError as error:
            raise ExperimentError(
                f"The endpoint {service.endpoint} with AWS_REGION {service.region} cannot be used: {error}",
                hint=f"change {service.endpoint_from} or AWS_REGION",
            ) from None

    def insist(self, action: str, place: str, request: Callable[[], T]) -> T:
        """Repeat a request until it succeeds; raise the error that explains a failure that retries cannot fix."""
        pause_s = FIRST_PAUSE_S
        for attempt in range(1, self.attempts + 1):
            try:
                return request()
            except (MinioException, HTTPError, ParseError) as error:
                if attempt == self.attempts or not _is_transient(error):
                    # Not "from error": urllib3's message may hold a signed URL.
                    raise self.explained(error, action, place) from None
                log.info("%s: cannot be %s (%s); retrying in %g s", place, action, type(error).__name__, pause_s)
            time.sleep(pause_s)
            pause_s *= 2
        raise AssertionError("at least one attempt")

    def explained(self, error: Exception, action: str, place: str) -> FedloomError:
        """Return the error for a failure, with its meaning and the remedy."""
        endpoint, change = self.service.endpoint, f"change {self.service.endpoint_from}"
        if isinstance(error, S3Error):
            return self._refusal(error, action, place)
        if isinstance(error, (InvalidResponseError, ParseError)):
            return StorageError(
                f"{place} cannot be {action}: the response of {endpoint} is not that of an S3 service", hint=change
            )
        if isinstance(error, ServerError):
            return StorageError(f"{place} cannot be {action}: {endpoint} fails with HTTP {error.status_code}")
        cause = (error.reason if isinstance(error, MaxRetryError) else None) or error
        if isinstance(cause, SSLError):
            return StorageError(
                f"{endpoint}: TLS failed: {cause}",
                hint="set SSL_CERT_FILE to the certificates to trust, or use http:// if the service has no TLS",
            )
        reason = str(cause.__cause__ or cause.__context__ or type(cause).__name__)
        return StorageError(
            f"{endpoint} cannot be reached ({reason})",
            hint=f"set {self.service.endpoint_from} to the service's address, or check whether it runs",
        )

    def _refusal(self, error: S3Error, action: str, place: str) -> FedloomError:
        code = error.code or ""
        default = ((), StorageError, "{place} cannot be {doing}: {endpoint} reports {code}: {reason}", None)
        _, kind, message, hint = next((meaning for meaning in _MEANINGS if code in meaning[0]), default)
        facts = {
            "code": code,
            "reason": error.message,
            "bucket": "/".join(place.split("/")[:3]),
            "place": place,
            "doing": action,
            "endpoint": self.service.endpoint,
            "region": self.service.region,
        }
        return kind(message.format_map(facts), hint=hint)


def _is_transient(error: Exception) -> bool:
    """Return True if repeating the request may succeed."""
    if isinstance(error, S3Error):
        return error.code in _TRANSIENT or (error.response.status >= 500 and error.response.status != 501)
    if isinstance(error, ServerError):
        return error.status_code >= 500
    if isinstance(error, MaxRetryError) and isinstance(error.reason, SSLError):
        return "certificate" not in str(error.reason).lower()
    return not isinstance(error, (SSLError, LocationValueError))


def connect(bucket: str, prefix: str, environment: Mapping[str, str], *, endpoint_from: str | None = None) -> S3Store:
    """Return the store at a prefix of a bucket, without contacting it."""
    service = Service.from_environment(environment, endpoint_from or ENDPOINT)
    # About half a minute of retries for an unavailable service: the duration of a restart.
    return S3Store(bucket, prefix, Connection(service, attempts=7, connect_s=10, read_s=60))


class S3Store(Store):
    """Bucket, or the part of one below a prefix."""

    def __init__(self, bucket: str, prefix: str, connection: Connection) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._connection = connection
        self._client = connection.client

    @property
    def url(self) -> str:
        """URL ``s3://bucket/prefix``."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def read(self, name: str) -> bytes:
        """Return the content of an object."""
        buffer = io.BytesIO()
        self._fetch(name, buffer)
        return buffer.getvalue()

    def write(self, name: str, content: bytes, *, durably: bool = True) -> None:
        """Write an object, replacing any existing one."""
        key = self._key(name)

        def put() -> None:
            self._client.put_object(self._bucket, key, io.BytesIO(content), len(content), part_size=PART)

        self._insist("written", name, put)

    def create(self, name: str, content: bytes) -> None:
        """Write an object that must not exist yet."""
        key = self._key(name)
        is_retry = False

        def put() -> None:
            nonlocal is_retry
            # minio has no conditional put; a PUT to a signed URL, with a header that need not be signed, is one.
            url = self._client.presigned_put_object(self._bucket, key, expires=timedelta(minutes=15))
            headers = {"If-None-Match": "*", "Content-MD5": b64encode(md5(content, usedforsecurity=False).digest())}
            had_failed, is_retry = is_retry, True
            response = self._connection.http.urlopen("PUT", url, body=content, headers=headers, retries=False)
            if response.status == 200:
                return
            failure = _failure(response)
            # Repeated because the response was lost: the existing content may be ours.
            if had_failed and failure.code == "PreconditionFailed" and self.read(name) == content:
                return
            raise failure

        self._insist("created", name, put)

    def upload(self, name: str, path: Path) -> None:
        """Write an object from a file, replacing any existing one."""
        key = self._key(name)

        def put() -> None:
            with opened(path) as file:
                self._client.put_object(self._bucket, key, file, os.fstat(file.fileno()).st_size, part_size=PART)

        self._insist("written", name, put)

    def download(self, name: str, path: Path) -> None:
        """Write an object to a file atomically."""
        with storing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with staged(path) as partial:
            with partial.open("wb") as file:
                self._fetch(name, file)
            partial.replace(path)

    def entries(self, prefix: str = "") -> Iterator[StoredObject]:
        """Yield all objects whose names start with a prefix, sorted by name."""
        above = f"{self._prefix}/" if self._prefix else ""

        def listed() -> list[StoredObject]:
            objects = self._client.list_objects(self._bucket, prefix=f"{above}{prefix}", recursive=True)
            return [
                StoredObject(
                    (item.object_name or "").removeprefix(above),
                    item.size or 0,
                    item.last_modified.timestamp() if item.last_modified else 0.0,
                )
                for item in objects
                if not item.is_dir
            ]

        # Not every service lists names in order: some traverse them as folders.
        yield from sorted(self._insist("listed", prefix, listed), key=lambda entry: entry.name.encode())

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects."""
        keys = [self._key(name) for name in names]

        def delete() -> None:
            for error in self._client.remove_objects(self._bucket, [DeleteObject(key) for key in keys]):
                if error.code not in ("NoSuchKey", "NoSuchObject"):
                    place = f"s3://{self._bucket}/{error.name}"
                    if error.code == "AccessDenied":
                        raise RefusedError(f"{place} may not be removed with these credentials ({error.code})")
                    raise StorageError(f"{place} cannot be removed: {error.code}: {error.message}")

        if keys:
            self._insist("removed", "", delete)

    def tidy(self, prefix: str) -> None:
        """Do nothing: an object is never partial."""

    def under(self, prefix: str) -> S3Store:
        """Return the part of this store below a folder."""
        return S3Store(self._bucket, self._key(prefix), self._connection)

    def check(self, *, writing: bool = True) -> None:
        """Check that the service and the bucket exist, and that the credentials suffice."""
        hurried = Connection(self._connection.service, attempts=2, connect_s=CHECK_S / 2, read_s=CHECK_S)
        store = S3Store(self._bucket, self._prefix, hurried)
        below = f"{self._prefix}/" if self._prefix else ""
        hurried.insist(
            "listed", self.url, lambda: any(hurried.client.list_objects(self._bucket, prefix=below, recursive=True))
        )
        if not writing:
            return
        probe = f".probe-{uuid.uuid4().hex}"
        store.create(probe, b"first")
        try:
            store.create(probe, b"second")
        except Taken:
            return
        finally:
            store.remove([probe])
        raise RefusedError(
            f"{self.url}: {self._connection.service.endpoint} ignores If-None-Match, so two aggregators could continue "
            "one run",
            hint="use a service with conditional writes: AWS S3, SeaweedFS, MinIO",
        )

    def _fetch(self, name: str, target: io.BufferedIOBase | io.BufferedWriter) -> None:
        key = self._key(name)

        def get() -> None:
            target.seek(0)
            target.truncate()
            response = self._client.get_object(self._bucket, key)
            try:
                # urllib3 compares the received length with the announced one, and raises if the connection broke.
                for block in response.stream(2**20):
                    target.write(block)
            finally:
                response.close()
                response.release_conn()

        self._insist("read", name, get)

    def _insist(self, action: str, name: str, request: Callable[[], T]) -> T:
        return self._connection.insist(action, f"{self.url}/{name}".rstrip("/"), request)

    def _key(self, name: str) -> str:
        parts_of(name)
        return f"{self._prefix}/{name}" if self._prefix else name


def _failure(response: urllib3.BaseHTTPResponse) -> S3Error:
    """Return the error in a response to a request that minio did not make."""
    try:
        return S3Error.fromxml(response)
    except (ParseError, UnicodeDecodeError):
        codes = {
            403: "AccessDenied",
            409: "ConditionalRequestConflict",
            412: "PreconditionFailed",
            501: "NotImplemented",
        }
        code = codes.get(response.status, f"HTTP {response.status}")
        return S3Error(response, code, "without a message", None, None, None)
