"""``fedloom`` as run by trials: with resource limits, and killed at a chosen operation.

``FAULTS_UNDER``
    Operations on files below this folder, or on a store, are counted.
``FAULTS_DIE_AT``
    SIGKILL before the n-th of these, so that a trial can be repeated.
``FAULTS_COUNT``
    File that the count is written to at the end.
``FAULTS_FILES``, ``FAULTS_FILE_BYTES``
    Maximum number of open files, and maximum file size.
"""

from __future__ import annotations

import atexit
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

OF_FILES = {"open", "os.rename", "os.remove", "os.mkdir", "os.truncate"}
OF_STORES = {"http.client.connect", "http.client.send"}


def count_operations(under: str, die_at: int) -> None:
    """Count operations from now on, in every thread, and die at one of them."""
    counted = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal counted
        if event in OF_STORES or (event in OF_FILES and str(arguments[0]).startswith(under)):
            counted += 1
            if counted == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    if "FAULTS_COUNT" in os.environ:
        where = Path(os.environ["FAULTS_COUNT"])
        atexit.register(lambda: where.write_text(str(counted)))


def main() -> None:
    """Run the command."""
    if under := os.environ.get("FAULTS_UNDER"):
        count_operations(under, int(os.environ.get("FAULTS_DIE_AT", "0")))
    for limit, name in ((resource.RLIMIT_NOFILE, "FAULTS_FILES"), (resource.RLIMIT_FSIZE, "FAULTS_FILE_BYTES")):
        if name in os.environ:
            resource.setrlimit(limit, (int(os.environ[name]), int(os.environ[name])))
    from fedloom.cli.main import program as command

    command()


if __name__ == "__main__":
    main()
