"""Termination of a process with its parent, whose death closes the process's standard input."""

from __future__ import annotations

import os
import signal
import threading


def terminate_at_eof() -> None:
    """Send this process SIGTERM once its standard input ends.

    It reads the file descriptor and not ``sys.stdin``: if the process ended while a thread held that object's lock, it
    would abort and lose its exit code.
    """

    def look() -> None:
        while os.read(0, 4096):
            continue
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=look, name="until-eof", daemon=True).start()
