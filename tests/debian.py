"""Programs of Debian's packages for the tests: from the path, or downloaded once into a cache, without installing."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest


@functools.cache
def program(name: str, package: str) -> Path:
    """Return a program of a package: that of the path, or of a cache into which apt downloads it; else skip."""
    if installed := shutil.which(name):
        return Path(installed)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fedloom" / "tools" / package
    binary = cache / "usr" / "bin" / name
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with cache.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes request it at once
            if not binary.exists():
                _unpack(package, cache)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"{name} is missing, and apt cannot download the package {package} here: {error}")
    return binary


def _unpack(package: str, folder: Path) -> None:
    staging = folder.with_suffix(".new")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    subprocess.run(["apt-get", "-q", "download", package], cwd=staging, check=True, capture_output=True, timeout=120)
    (archive,) = staging.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", archive, staging], check=True, capture_output=True, timeout=120)
    archive.unlink()
    staging.rename(folder)
