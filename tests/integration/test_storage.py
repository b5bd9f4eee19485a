"""Stores: a folder and a real S3 server behave alike, and failures give one message."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from facts import refusing, tells
from s3_support import BreakingProxy, S3Server, documented

from fedloom.core.files import storing
from fedloom.core.urls import is_url
from fedloom.errors import ExitCode, ExperimentError, FedloomError, RefusedError, StorageError
from fedloom.storage import Absent, Store, StoredObject, Taken, location_of, open_store, s3
from fedloom.storage.locations import S3Location, claims_of

MIB = 2**20


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[BreakingProxy]:
    proxy = BreakingProxy(s3_server.endpoint)
    yield proxy
    proxy.close()


@pytest.fixture
def through(s3_server: S3Server, proxy: BreakingProxy, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Store]:
    """Open stores behind the proxy, each time with new connections; broken requests are retried at once."""
    monkeypatch.setattr(s3, "FIRST_PAUSE_S", 0.01)
    url = f"s3://{s3_server.new_bucket()}/p"
    return lambda: open_store(url, {**s3_server.environment, "FEDLOOM_S3_ENDPOINT": proxy.endpoint})


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the smallest parts that S3 allows."""
    monkeypatch.setattr(s3, "PART", 5 * MIB)


# --- common behaviour -------------------------------------------------------------------------------------------------


def test_contents_are_read_as_written_and_replaced(store: Store) -> None:
    store.check()
    assert list(store.entries()) == []  # the check has left no object
    store.write("a/b.bin", b"\x00one")
    store.write("a/b.bin", b"two", durably=False)
    store.write("empty", b"")
    assert (store.read("a/b.bin"), store.read("empty")) == (b"two", b"")


def test_missing_objects_are_named(store: Store, tmp_path: Path) -> None:
    store.write("there", b"")
    for absent in (lambda: store.read("no/such"), lambda: store.download("no/such", tmp_path / "x" / "y")):
        with pytest.raises(Absent, match="no/such"):
            absent()
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(("y", ".partial"))]
    store.remove(["no/such", "nor/this"])


def test_create_fails_if_the_object_exists(store: Store) -> None:
    store.create("x/round-1", b"first")
    with pytest.raises(Taken, match="x/round-1"):
        store.create("x/round-1", b"second")
    with pytest.raises(Taken):
        store.create("x/round-1", b"first")  # equal content is no exception: another writer may have written it
    assert store.read("x/round-1") == b"first"
    store.remove(["x/round-1"])
    store.create("x/round-1", b"third")


def test_one_of_many_concurrent_creates_succeeds(store: Store) -> None:
    def create(number: int) -> bool:
        try:
            store.create("only", str(number).encode())
        except Taken:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        created = list(pool.map(create, range(16)))
    assert created.count(True) == 1
    assert store.read("only") == str(created.index(True)).encode()
    assert [entry.name for entry in store.entries()] == ["only"]


def test_entries_by_prefix_in_order_with_sizes(store: Store) -> None:
    names = ["b", "a/2", "a/10", "a", "a.b/c", "ab/c", "a/ü x", "A"]
    names.remove("a")  # a folder cannot also be a file
    for i, name in enumerate(names):
        store.write(name, b"x" * i)
    size = {name: i for i, name in enumerate(names)}
    in_order = sorted(names, key=str.encode)
    assert list(store.entries()) == [StoredObject(name, size[name]) for name in in_order]
    assert [entry.name for entry in store.entries("a/")] == ["a/10", "a/2", "a/ü x"]
    assert [entry.name for entry in store.entries("a/1")] == ["a/10"]
    assert [entry.name for entry in store.entries("a")] == [name for name in in_order if name.startswith("a")]
    assert list(store.entries("none/")) == []


@pytest.mark.slow
def test_listing_more_entries_than_one_page(store: Store) -> None:
    names = [f"shards/{i:04d}" for i in range(1001)]  # S3 lists, and removes, a thousand at a time
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.write(name, b"1", durably=False), names))
    assert [entry.name for entry in store.entries("shards/")] == names
    store.remove(names)
    assert list(store.entries()) == []


def test_a_store_below_the_folder_of_another(store: Store) -> None:
    below = store.under("runs").under("r1")
    assert below.url == f"{store.url}/runs/r1"
    below.write("x", b"1")
    assert store.read("runs/r1/x") == b"1"
    assert list(below.entries()) == [StoredObject("x", 1)]
    assert list(store.under("runs/r").entries()) == []  # a folder, not the prefix of a name


@pytest.mark.usefixtures("small_parts")
def test_large_files_are_transferred_in_parts(store: Store, tmp_path: Path) -> None:
    content = os.urandom(MIB) * 11
    (tmp_path / "large").write_bytes(content)
    store.upload("checkpoints/large", tmp_path / "large")
    assert list(store.entries()) == [StoredObject("checkpoints/large", 11 * MIB)]
    store.download("checkpoints/large", tmp_path / "new" / "back")
    assert (tmp_path / "new" / "back").read_bytes() == content
    store.write("again", content)
    assert store.read("again") == content
    with pytest.raises(StorageError, match="nothing-here"):
        store.upload("x", tmp_path / "nothing-here")


@pytest.mark.parametrize("name", ["", "/a", "a//b", "a/", "../a", "a/../b", ".", "a\0"])
def test_names_that_could_escape_the_store_are_rejected(store: Store, name: str) -> None:
    for attempt in (
        lambda: store.read(name),
        lambda: store.write(name, b""),
        lambda: store.create(name, b""),
        lambda: store.remove([name]),
        lambda: store.under(name),
    ):
        with pytest.raises(ValueError, match="relative path"):
            attempt()


# --- a folder ---------------------------------------------------------------------------------------------------------


def test_a_folder_lists_no_partially_written_file(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.write("x", b"1")
    (tmp_path / ".y.1-2.partial").write_bytes(b"half")
    assert [entry.name for entry in store.entries()] == ["x"]


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "space"), (errno.EDQUOT, "space"), (errno.ENOENT, "path"), (errno.EACCES, "permissions")],
)
def test_only_a_full_disk_advises_to_free_space(tmp_path: Path, number: int, advice: str) -> None:
    with pytest.raises(StorageError) as raised, storing(tmp_path / "a"):
        raise OSError(number, os.strerror(number))
    assert tells(str(raised.value), tmp_path / "a", os.strerror(number).lower(), advice)
    assert ("resume" in str(raised.value)) is (advice == "space")


def test_a_folder_without_write_permission(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = open_store(tmp_path / "file")
    for attempt in (store.check, lambda: store.write("x", b""), lambda: store.create("x", b"")):
        with pytest.raises(StorageError, match="cannot be written: not a directory"):
            attempt()
    with pytest.raises(Absent, match="none"):
        open_store(tmp_path / "none").check(writing=False)


# --- URLs and environment ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("runs", None),
        ("/a/b", None),
        ("s3x", None),
        ("s3://bucket", ("bucket", "")),
        ("s3://bucket/", ("bucket", "")),
        ("s3://b.u-1/a/b c/", ("b.u-1", "a/b c")),
    ],
)
def test_parsing_of_store_urls(text: str, place: tuple[str, str] | None) -> None:
    assert location_of(text) == (place and S3Location(*place))
    assert is_url(text) == (place is not None)


@pytest.mark.parametrize(
    "url",
    [
        "gs://bucket/x", "http://host/x", "s3://", "s3:///x", "s3://UPPER/x", "s3://ab", "s3://b//c",
        "s3://bucket/../x", "pvc://", "pvc:///x", "pvc://UPPER/x", "pvc://a.b/x", "pvc://a//c", "pvc://a/../x",
    ],
)  # fmt: skip
def test_malformed_urls(url: str) -> None:
    with pytest.raises(ExperimentError) as raised:
        open_store(url, {})
    assert raised.value.found == url
    assert tells(str(raised.value), url, "pvc://CLAIM/PATH" if url.startswith("pvc") else "s3://BUCKET/PREFIX")


def test_an_unmounted_claim_is_reported_and_nothing_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_CLAIMS", str(tmp_path / "claims"))
    with refusing(StorageError, "pvc://shared/runs", tmp_path / "claims" / "shared"):
        open_store("pvc://shared/runs")
    assert list(tmp_path.iterdir()) == []


def test_a_claim_has_the_same_path_in_every_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "claims" / "shared").mkdir(parents=True)
    monkeypatch.setenv("FEDLOOM_CLAIMS", str(tmp_path / "claims"))
    run = open_store("pvc://shared/fed/").under("runs/one")
    assert run.url == "pvc://shared/fed/runs/one"
    run.write("a", b"1")
    (tmp_path / "claims").rename(tmp_path / "elsewhere")
    monkeypatch.setenv("FEDLOOM_CLAIMS", str(tmp_path / "elsewhere"))
    assert open_store(run.url).read("a") == b"1"
    assert (tmp_path / "elsewhere" / "shared" / "fed" / "runs" / "one" / "a").read_bytes() == b"1"
    assert claims_of(["pvc://b/x", None, "s3://bucket/x", "pvc://a", "pvc://b/y", "runs"]) == {
        "a": "/mnt/claims/a",
        "b": "/mnt/claims/b",
    }


def test_a_url_passed_as_a_path_is_rejected() -> None:
    with pytest.raises(ExperimentError, match="s3:/bucket/x"):
        open_store(Path("s3://bucket/x"))


COMPLETE = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "very-secret"}


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"AWS_ACCESS_KEY_ID": ""}, RefusedError, "AWS_ACCESS_KEY_ID"),
        ({"AWS_SECRET_ACCESS_KEY": ""}, RefusedError, "AWS_SECRET_ACCESS_KEY"),
        ({"FEDLOOM_S3_ENDPOINT": "localhost:9000"}, ExperimentError, "localhost:9000"),
        ({"FEDLOOM_S3_ENDPOINT": "http://h:9000/path"}, ExperimentError, "http(s)://HOST:PORT"),
        ({"FEDLOOM_S3_ENDPOINT": "http://h:x"}, ExperimentError, "http(s)://HOST:PORT"),
        ({"FEDLOOM_S3_ENDPOINT": "http://me:very-secret@h"}, ExperimentError, "user name"),
        ({"SSL_CERT_FILE": "/no/such.pem"}, ExperimentError, "/no/such.pem"),
        ({"AWS_REGION": "not a region"}, ExperimentError, "AWS_REGION"),
    ],
)
def test_an_invalid_environment_is_rejected(change: dict[str, str], error: type[FedloomError], says: str) -> None:
    with pytest.raises(error) as raised:
        open_store("s3://bucket/x", {**COMPLETE, **change})
    assert says in str(raised.value)
    assert "very-secret" not in str(raised.value)


def test_only_a_url_needs_the_s3_client_and_its_absence_names_the_package_to_install() -> None:
    script = (
        "import sys; from fedloom.storage import open_store; from fedloom.errors import ExperimentError\n"
        "open_store('somewhere'); print('minio' in sys.modules); sys.modules['minio'] = None\n"
        "try: open_store('s3://bucket/x')\n"
        "except ExperimentError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert tells(done.stdout, "False", "pip install 'fedloom[s3]'")


# --- refusals of a service --------------------------------------------------------------------------------------------


def refusal(server: S3Server, url: str, act: Callable[[Store], object], **environment: str) -> FedloomError:
    """Return the error, which is quick and never contains a secret."""
    started = time.monotonic()
    with pytest.raises(FedloomError) as raised:
        act(open_store(url, {**server.environment, **environment}))
    assert time.monotonic() - started < 20
    shown = f"{raised.value}{raised.value.__cause__}"
    assert server.secret_key not in shown
    assert "Signature=" not in shown
    return raised.value


@pytest.mark.parametrize(
    ("bucket", "environment", "code", "facts"),
    [
        ("", {"AWS_SECRET_ACCESS_KEY": "another-one"}, 4, ("SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY")),
        ("", {"AWS_ACCESS_KEY_ID": "nobody"}, 4, ("InvalidAccessKeyId",)),
        ("not-there", {}, 6, ("s3://not-there", "has no bucket", "create the bucket")),
        ("bucket", {"FEDLOOM_S3_ENDPOINT": "http://CLOSED"}, 6, ("http://CLOSED", "refused", "FEDLOOM_S3_ENDPOINT")),
        ("bucket", {"FEDLOOM_S3_ENDPOINT": "https://OPEN"}, 6, ("TLS failed", "SSL_CERT_FILE")),
    ],
)
def test_a_service_that_cannot_be_used_is_reported(
    s3_server: S3Server, bucket: str, environment: dict[str, str], code: int, facts: tuple[str, ...]
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        hosts = {"CLOSED": f"127.0.0.1:{unused.getsockname()[1]}", "OPEN": s3_server.endpoint.partition("//")[2]}
        given = {}
        for key, value in environment.items():
            text = value.rpartition("/")[2]
            given[key] = value.replace(text, hosts.get(text, text))
        error = refusal(s3_server, f"s3://{bucket or s3_server.new_bucket()}/x", lambda s: s.check(), **given)
    assert error.exit_code == code
    assert all(fact.replace("CLOSED", hosts["CLOSED"]) in str(error) for fact in facts)
    assert "another-one" not in str(error)


@pytest.mark.usefixtures("small_parts")
def test_self_signed_certificates(s3_server: S3Server, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*make.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    proxy = BreakingProxy(s3_server.endpoint, context)
    url = f"s3://{s3_server.new_bucket()}/x"
    error = refusal(s3_server, url, lambda s: s.check(), FEDLOOM_S3_ENDPOINT=proxy.endpoint)
    assert f"{proxy.endpoint}: TLS failed" in str(error)
    assert "CERTIFICATE_VERIFY_FAILED" in str(error)
    trusting = {**s3_server.environment, "FEDLOOM_S3_ENDPOINT": proxy.endpoint, "SSL_CERT_FILE": str(certificate)}
    store = open_store(url, trusting)
    store.check()
    content = os.urandom(MIB) * 11  # in parts, which are signed differently over TLS
    store.write("large", content)
    assert store.read("large") == content
    store.remove(["large"])
    assert list(store.entries()) == []
    proxy.close()


def test_an_endpoint_that_never_responds(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2 * s3.CHECK_S + s3.FIRST_PAUSE_S < 20
    monkeypatch.setattr(s3, "CHECK_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are accepted, and never read
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        error = refusal(s3_server, "s3://bucket/x", lambda s: s.check(), FEDLOOM_S3_ENDPOINT=endpoint)
    assert "cannot be reached" in str(error)
    assert endpoint in str(error)


def test_a_read_only_identity(s3_server: S3Server, tmp_path: Path) -> None:
    url = f"s3://{s3_server.new_bucket()}/x"
    open_store(url, s3_server.environment).write("there", b"1")
    reader = open_store(url, s3_server.reader_environment)
    reader.check(writing=False)
    assert reader.read("there") == b"1"
    (tmp_path / "file").write_bytes(b"2")
    for doing, act in {
        "created": lambda: reader.check(),
        "written": lambda: reader.write("there", b"2"),
        "removed": lambda: reader.remove(["there"]),
    }.items():
        with pytest.raises(RefusedError, match=f"may not be {doing} with these credentials"):
            act()
    with pytest.raises(RefusedError, match="may not be written"):
        reader.upload("there", tmp_path / "file")
    assert reader.read("there") == b"1"


def test_a_store_may_be_a_whole_bucket(s3_server: S3Server) -> None:
    store = open_store(f"s3://{s3_server.new_bucket()}", s3_server.environment)
    assert store.url.count("/") == 2  # a whole bucket
    store.write("a/b", b"1")
    assert [entry.name for entry in store.entries()] == ["a/b"]
    store.check()


# --- connections that break -------------------------------------------------------------------------------------------


def test_broken_requests_are_retried(through: Callable[[], Store], proxy: BreakingProxy, tmp_path: Path) -> None:
    content = os.urandom(3 * MIB)
    proxy.faults = [("up", 100_000), ("down", 0)]
    through().write("x", content)
    proxy.faults = [("down", 100_000), ("down", 2 * MIB)]
    assert through().read("x") == content
    proxy.faults = [("down", 1 * MIB)]
    through().download("x", tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == content
    proxy.faults = [("down", 0)]
    assert list(through().entries()) == [StoredObject("x", 3 * MIB)]
    proxy.faults = [("down", 0)]
    through().remove(["x"])
    assert list(through().entries()) == []
    assert proxy.broken == 7
    assert not list(tmp_path.glob(".*"))


@pytest.mark.usefixtures("small_parts")
def test_an_upload_in_parts_survives_broken_connections(
    through: Callable[[], Store], proxy: BreakingProxy, tmp_path: Path
) -> None:
    content = os.urandom(MIB) * 11
    (tmp_path / "large").write_bytes(content)
    proxy.faults = [("up", 2 * MIB)] * 2  # the start of the upload succeeds, its first parts do not
    through().upload("large", tmp_path / "large")
    assert proxy.broken >= 1
    assert through().read("large") == content


def test_a_create_whose_response_was_lost_succeeds(through: Callable[[], Store], proxy: BreakingProxy) -> None:
    proxy.faults = [("down", 0)]  # done, but the response is lost
    through().create("round", b"ours")
    assert proxy.broken == 1
    assert through().read("round") == b"ours"


def test_a_retried_create_fails_if_another_writer_was_first(through: Callable[[], Store], proxy: BreakingProxy) -> None:
    through().write("round", b"theirs")
    proxy.faults = [("up", 10)]
    with pytest.raises(Taken):
        through().create("round", b"ours")
    assert proxy.broken == 1
    assert through().read("round") == b"theirs"


def test_requests_to_an_unavailable_service_time_out(
    through: Callable[[], Store], proxy: BreakingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.undo()  # restores the pauses, which are checked here
    monkeypatch.setattr(time, "sleep", waited.append)
    proxy.faults = [("up", 0)] * 7
    with pytest.raises(StorageError, match="cannot be reached") as raised:
        through().write("x", b"1")
    assert waited == [0.5, 1, 2, 4, 8, 16]  # the time that a restart of the service takes
    assert raised.value.exit_code == ExitCode.STORAGE
    through().write("x", b"1")


# --- unsuitable services ----------------------------------------------------------------------------------------------


class OtherService(BaseHTTPRequestHandler):
    """A minimal S3 service; ``conditional`` is its response to If-None-Match."""

    conditional = "ignored"
    contents: dict[str, bytes]
    statuses: list[int]
    seen: list[str]

    def do_GET(self) -> None:
        self.seen.append(f"GET {self.path}")
        if self.statuses:
            return self.answer(self.statuses.pop(0), error("SlowDown"))
        listing = (
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>bucket</Name></ListBucketResult>'
        )
        return self.answer(200, listing if "list-type=2" in self.path else "")

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.seen.append(f"PUT If-None-Match: {self.headers['If-None-Match']}")
        if self.headers["If-None-Match"] and self.conditional == "refused":
            return self.answer(501, error("NotImplemented"))
        if self.headers["If-None-Match"] and self.conditional == "conflict" and self.seen.count(self.seen[-1]) == 1:
            return self.answer(409, error("ConditionalRequestConflict"))
        return self.answer(200, "")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.seen.append("POST")
        self.answer(200, '<DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"></DeleteResult>')

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


def error(code: str) -> str:
    return f"<Error><Code>{code}</Code><Message>no</Message></Error>"


@pytest.fixture
def other_service() -> Iterator[tuple[type[OtherService], Store]]:
    handler = type("Handler", (OtherService,), {"statuses": [], "seen": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        yield handler, open_store("s3://bucket/x", {**COMPLETE, "FEDLOOM_S3_ENDPOINT": endpoint})
        server.shutdown()


def test_a_service_that_ignores_conditions_is_detected(other_service: tuple[type[OtherService], Store]) -> None:
    handler, store = other_service
    with pytest.raises(RefusedError, match="If-None-Match"):
        store.check()
    assert handler.seen[-1] == "POST"  # the probe object is removed
    store.check(writing=False)


def test_a_service_that_rejects_conditions_is_reported(other_service: tuple[type[OtherService], Store]) -> None:
    handler, store = other_service
    handler.conditional = "refused"
    with pytest.raises(RefusedError, match=r"does not support the operation \(NotImplemented\)"):
        store.check()


def test_a_conflict_of_conditional_writes_is_retried(other_service: tuple[type[OtherService], Store]) -> None:
    handler, store = other_service
    handler.conditional = "conflict"
    store.create("a", b"1")
    assert handler.seen == ["PUT If-None-Match: *"] * 2


def test_a_busy_service_is_retried(
    other_service: tuple[type[OtherService], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "FIRST_PAUSE_S", 0.01)
    handler, store = other_service
    handler.statuses = [503, 503]
    assert list(store.entries()) == []
    assert len(handler.seen) == 3


def test_a_web_server_is_not_an_s3_service(s3_server: S3Server) -> None:
    class Web(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>hello<br></html>")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Web) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        error = refusal(s3_server, "s3://bucket/x", lambda s: s.check(), FEDLOOM_S3_ENDPOINT=endpoint)
        server.shutdown()
    assert "S3 service" in str(error)


# --- permissions ------------------------------------------------------------------------------------------------------

STATE, OTHER = "runs/r/states/c0/1-1-0-0-7.safetensors", "runs/sweep/point/states/c0/1-1-0-0-7.safetensors"
OF_OTHERS = ("runs/r/published/00000001.json", "runs/r/experiment.yaml", "runs/r/blobs/00000001-ff", "secret")


def test_a_worker_has_only_the_permissions_it_needs(s3_server: S3Server) -> None:
    """Use the identity of docs/storage.md: it reads partitions, keeps states, and nothing else."""
    url = f"s3://{s3_server.new_bucket()}/team"
    everything, worker = open_store(url, s3_server.environment), open_store(url, s3_server.worker_environment)
    partition = ("partitions/ff/partition.json", "partitions/ff/shards/c0.safetensors")
    for name in (*partition, STATE, OTHER, *OF_OTHERS):
        everything.write(name, b"theirs")
    assert [worker.read(name) for name in (*partition, STATE, OTHER)] == [b"theirs"] * 4
    worker.write(STATE, b"its own")
    assert [entry.name for entry in worker.entries("runs/r/states/c0/")] == [STATE]
    worker.remove([STATE])
    refusals: list[Callable[[], object]] = [
        *(lambda name=name: worker.read(name) for name in OF_OTHERS),
        *(lambda name=name: worker.write(name, b"bad") for name in (*OF_OTHERS, *partition)),
        *(lambda name=name: worker.create(f"{name}.more", b"bad") for name in (*OF_OTHERS, *partition)),
        *(lambda name=name: worker.remove([name]) for name in (*OF_OTHERS, *partition)),
        lambda: list(worker.entries("runs/r/published/")),
    ]
    for refused in refusals:
        with pytest.raises(RefusedError):
            refused()
    assert {everything.read(name) for name in (*partition, OTHER, *OF_OTHERS)} == {b"theirs"}


@pytest.mark.parametrize(
    ("action", "name", "allowed"),
    [
        ("s3:GetObject", "team/partitions/ff/shards/c0.safetensors", True),
        ("s3:PutObject", "team/partitions/ff/shards/c0.safetensors", False),
        ("s3:DeleteObject", "team/partitions/ff/partition.json", False),
        *((action, f"team/{STATE}", True) for action in ("s3:GetObject", "s3:PutObject", "s3:DeleteObject")),
        *((action, f"team/{name}", False) for action in ("s3:GetObject", "s3:PutObject") for name in OF_OTHERS),
        ("s3:PutBucketPolicy", "team/partitions/ff", False),
    ],
)
def test_the_documented_worker_policy_is_the_tested_one(action: str, name: str, allowed: bool) -> None:
    """Read the policy as S3 does: one statement must allow the action, and stars match any text."""
    statements = documented("Statement", "bucket", "team")["Statement"]
    found = [
        statement
        for statement in statements
        if action in (statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]])
        and fnmatchcase(f"arn:aws:s3:::bucket/{name}", statement["Resource"])
    ]
    assert bool(found) is allowed


def test_a_store_folder_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    """Shards and client states are private under any umask."""
    before = os.umask(0)
    try:
        store = open_store(tmp_path / "store")
        store.write("c0/a", b"x", durably=False)
        store.create("c0/b", b"x")
        (tmp_path / "given").write_bytes(b"x")
        store.upload("c1/c", tmp_path / "given")
    finally:
        os.umask(before)
    modes = {path.relative_to(tmp_path).as_posix(): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {
        "given": 0o666, "store": 0o700, "store/c0": 0o700, "store/c1": 0o700,
        "store/c0/a": 0o600, "store/c0/b": 0o600, "store/c1/c": 0o600,
    }  # fmt: skip
