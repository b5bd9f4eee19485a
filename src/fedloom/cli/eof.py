"""A process that leaves with whoever started it: its standard input ends when that one is gone, killed or not."""

from __future__ import annotations

import os
import signal
import threading


def terminate_at_eof() -> None:
    """Send this process SIGTERM once its standard input ends.

    Read without ``sys.stdin``: a process that ends while a thread waits with the lock of that aborts, and its exit code
    is lost.
    """

    def look() -> None:
        while os.read(0, 4096):
            continue
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=look, name="until-eof", daemon=True).start()
