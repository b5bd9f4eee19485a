"""Runs that are served in a thread of the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from run_processes import WAIT_S

from fedloom.serving.serve import serve_run


@contextmanager
def served(run: Path, listen: str = "127.0.0.1:0", **options: Any) -> Iterator[str]:
    """Serve a run in a thread; yields the address."""
    stop, ready, failed, at = threading.Event(), threading.Event(), [], []

    def work() -> None:
        try:
            serve_run(str(run), listen, stop=stop, started=lambda a: (at.append(a), ready.set()), **options)
        except Exception as error:
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert ready.wait(WAIT_S)
        if failed:
            raise failed[0]
        yield at[0]
    finally:
        stop.set()
        thread.join(WAIT_S)
