"""Child processes of FedLoom: their command line, and the JSON that they report to their parent.

A child appends JSON lines to a file that its parent names in an environment variable: notices for the user, and the
error with which the child ends. The exit code alone does not give the cause: Python itself exits with 2 when it cannot
start, and user code may call ``sys.exit(4)``.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedloom.errors import FedloomError, from_json, without_secrets

TELL_PARENT = "FEDLOOM_TELL_PARENT"
"""Environment variable of a child: the file for its reports to the parent."""

END_WITH_PARENT = "FEDLOOM_END_WITH_PARENT"
"""Environment variable of a child that ends when its standard input, which its parent holds, is closed."""

termination_requested = threading.Event()
"""Set by SIGTERM before a command handles it; code that swallows the exception of that handler cannot hide it."""

_reports: Path | None = None
_ends_with_parent = False


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Return vendor and model of the processor, by which numeric libraries choose their kernels."""
    try:
        facts = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE))
    except OSError:  # not on Linux
        return platform.processor()
    keys = ("vendor_id", "cpu family", "model", "stepping", "CPU implementer", "CPU part", "CPU variant")
    return " ".join(facts[key] for key in keys if key in facts)


def python(*words: str) -> list[str]:
    """Return a command of this interpreter that does not import from the current folder (``PYTHONPATH`` counts)."""
    return [sys.executable, "-P", *words]


def command(*words: str) -> list[str]:
    """Return the command line that runs ``fedloom`` in its own process."""
    return python("-m", "fedloom", *words)


def folder_of_factory(name: str) -> str | None:
    """Return the folder from which this process imports a factory or metric, if its children would not search it.

    This is the folder of the user's script or notebook, which Python adds to ``sys.path`` of this process only.
    """
    module = sys.modules.get(name.partition(":")[0].partition(".")[0])
    file = getattr(module, "__file__", None)
    if file is None or not sys.path:
        return None
    folder = Path(file).resolve().parent
    if Path(file).name == "__init__.py":
        folder = folder.parent
    return str(folder) if Path(sys.path[0] or ".").resolve() == folder else None


def environment(
    base: Mapping[str, str], reports: Path, code: Sequence[str] = (), *, ends_with_parent: bool = False
) -> dict[str, str]:
    """Return the environment of a child.

    Parameters
    ----------
    base
        Its other variables.
    reports
        New file for its reports.
    code
        Factory of the clients' model, and metrics. The child can import them even if their modules lie beside the
        user's script.
    ends_with_parent
        The child ends when its standard input is closed, by its parent or by the parent's death.
    """
    variables = {**base, TELL_PARENT: str(reports), **({END_WITH_PARENT: "1"} if ends_with_parent else {})}
    folders = dict.fromkeys(folder for name in code if (folder := folder_of_factory(name)) is not None)
    if folders:
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [variables.get("PYTHONPATH"), *folders]))
    return variables


class ChildReport:
    """Reports of a child, read after it has ended.

    Parameters
    ----------
    source
        The file, or its text (the termination message of a pod). Lines that are not JSON are skipped.

    Attributes
    ----------
    failure
        Error with which it ended, the first if several processes report one; None if there was none.
    bug
        Traceback of an exception other than :class:`FedloomError`; None if there was none.
    notices
        Lines to show the user.
    """

    def __init__(self, source: Path | str) -> None:
        self.failure: FedloomError | None = None
        self.bug: str | None = None
        self.notices: list[str] = []
        for line in _lines(source):
            match line:
                case {"notice": str(text)}:
                    self.notices.append(text)
                case {"failure": dict(error)}:
                    self.failure = self.failure or from_json(error)
                case {"bug": str(text)}:
                    self.bug = text

    def ended(self, code: int, output: str = "") -> str:
        """Describe how a child that reported no failure ended, with the last line of its standard error."""
        if self.bug is not None:
            return f"failed because of a bug:\n{self.bug.rstrip()}"
        if code == -signal.SIGKILL:
            return f"was killed by signal {-code}, probably because the machine or the pod ran out of memory"
        if code < 0:
            return f"was killed by signal {-code}"
        last = next((line for line in reversed(output.splitlines()) if line.strip()), "it left no message")
        return f"ended with code {code}: {last}"


def listen_to_parent() -> None:
    """Read the settings from the parent, and remove them from the environment that child processes inherit."""
    global _reports, _ends_with_parent
    _ends_with_parent = os.environ.pop(END_WITH_PARENT, None) is not None
    name = os.environ.pop(TELL_PARENT, None)
    _reports = None if name is None else Path(name)


def ends_with_parent() -> bool:
    """Return whether this process must end when its standard input is closed."""
    return _ends_with_parent


def tell_notice(text: str) -> None:
    """Report a line for the user to the parent, if it collects reports."""
    _report({"notice": without_secrets(text)})


def tell_failure(error: BaseException) -> None:
    """Report to the parent, if it collects reports, why this process is about to end."""
    if isinstance(error, FedloomError):
        _report({"failure": error.as_json()})
    else:
        _report({"bug": _traceback(error)})


def show_traceback(error: BaseException) -> None:
    """Print an exception with its traceback to standard error, without user information in URLs."""
    sys.stderr.write(_traceback(error))


def _traceback(error: BaseException) -> str:
    return without_secrets("".join(traceback.format_exception(error)))


def _report(line: Mapping[str, Any]) -> None:
    if _reports is not None:
        with _reports.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _lines(source: Path | str) -> Iterator[Any]:
    if isinstance(source, Path):
        source = source.read_text(encoding="utf-8") if source.exists() else ""
    for line in source.splitlines():
        with suppress(ValueError):  # a killed process may leave a partial line
            yield json.loads(line)
