"""End of standard input, by which a child process detects the end of its parent."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


def at_eof(act: Callable[[], None]) -> None:
    """Call a function, in a thread of its own, once standard input ends.

    It reads the file descriptor and not ``sys.stdin``: if the process ended while a thread held that object's lock, it
    would abort and lose its exit code.
    """

    def look() -> None:
        while os.read(0, 4096):
            continue
        act()

    threading.Thread(target=look, name="until-eof", daemon=True).start()
