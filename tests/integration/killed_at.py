"""Run a command of ``fedloom`` and kill it right before its K-th change below a folder: ``killed_at.py K FOLDER ...``.

With K = 0 it runs to its end and prints the number of changes. Changes are Python's audit events for opening a file
for writing, creating, renaming, linking and removing. Reports are disabled: they would be most of the changes.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

CHANGES = {"os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "os.truncate"}
sys.modules["matplotlib"] = None  # type: ignore[assignment]
kill_at, below = int(sys.argv[1]), sys.argv[2]
count = 0


def changes(event: str, arguments: tuple[Any, ...]) -> bool:
    """Return True if an event changes a file, or opens one for writing."""
    if event == "open":
        path, _, flags = arguments
        return isinstance(path, str) and path.startswith(below) and bool(flags & (os.O_WRONLY | os.O_RDWR))
    return event in CHANGES and str(arguments[0]).startswith(below)


def look(event: str, arguments: tuple[Any, ...]) -> None:
    """Count changes, and kill the process at the K-th."""
    global count
    if changes(event, arguments):
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


sys.argv = ["fedloom", *sys.argv[3:]]
sys.addaudithook(look)
try:
    from fedloom.cli.main import main

    main()
finally:
    print(f"changes: {count}")
