"""Error classes and exit codes, shared by every command, component and pod (docs/troubleshooting.md).

=====================  ====  ===================================================================
class                  exit  raised when
=====================  ====  ===================================================================
``FedloomError``             never: it is the base class
``ExperimentError``    2     an experiment file, argument or combination cannot run
``DataError``          3     data are missing, corrupt or contradict their manifest
``RefusedError``       4     one side refused the other: protocol, version, authentication
``QuorumError``        5     a round failed in all its attempts
``StorageError``       6     artifacts cannot be written or read
``WorkerLostError``    7     a process was lost more often than restarts allow; resumable
``AbandonedError``     8     the peer is lost
``InterruptedRun``     130   the user or the system asked the run to stop; resumable
=====================  ====  ===================================================================

Any other exception is a bug: it keeps its traceback, and the process exits with 1.

Each front end phrases errors in its own terms: the command line speaks of options, Python of arguments, an experiment
file of keys. A message therefore never spells an option; ``argument("out")`` stands for its name. Errors travel between
processes as JSON (:meth:`FedloomError.as_json`).
"""

import copy
import errno
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

OPTIONS: Mapping[str, str] = {
    "no_report": "--no-report",
    "packed": "--data",
    "set": "--set ",
    **{name: f"--set {name}" for name in ("class_counts", "clip", "delta", "predictor", "timeout_s")},
    **{name: f"--set {name}" for name in ("test_fraction", "validation_fraction")},
}
"""Arguments whose option has a different name, or that are keys of ``--set``; others are ``--name-with-dashes``."""

IN_PYTHON: Mapping[str, str] = {"no_report": "report=False", "resume": "resume=True", "set": ""}
"""Arguments that Python users write differently: with a value, or as keys of the experiment (``set``)."""

_as_options = False

USER_INFORMATION = re.compile(r"""(?<=://)([^\s"'<>/?#]*|[^\s"'<>/?#@:\[]*:(?!\d*[/?#])[^\s"'<>]*)@""")
"""User information of a URL; the second form is a password with a character that should have been percent-encoded."""


def without_secrets(text: str) -> str:
    """Return a text whose URLs have no user information, such as ``user:password@``.

    Text that others wrote, such as the message of a library's exception, goes through it before it is shown, logged or
    published.
    """
    return USER_INFORMATION.sub("", text)


class ExitCode(IntEnum):
    """Exit code of a FedLoom process. Kubernetes never retries 2, 3, 4 and 8."""

    OK = 0
    EXPERIMENT = 2
    DATA = 3
    REFUSED = 4
    QUORUM = 5
    STORAGE = 6
    WORKER_LOST = 7
    ABANDONED = 8
    INTERRUPTED = 130


class FedloomError(Exception):
    """Base of all FedLoom errors; each subclass has its own exit code.

    Subclasses fix ``exit_code``; a bare ``FedloomError`` is never raised.

    Parameters
    ----------
    message
        A sentence that says what is wrong. It names arguments through :func:`argument`. User information in URLs is
        removed (:func:`without_secrets`), here and in ``hint`` and ``found``.
    hint
        The command or change that fixes the error.
    key
        The argument (``out``) or dotted experiment key (``federation.rounds``) that the error is about.
    found, allowed
        The value found and the allowed values, for programs: numbers, texts, or lists of them.
    """

    exit_code: ExitCode

    def __init_subclass__(cls, exit_code: ExitCode | None = None) -> None:
        cls.exit_code = exit_code or cls.exit_code

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        key: str | None = None,
        found: Any = None,
        allowed: Sequence[Any] | None = None,
    ) -> None:
        super().__init__(without_secrets(message))
        self._hint = None if hint is None else without_secrets(hint)
        self.key = key
        self.found = without_secrets(found) if isinstance(found, str) else found
        self.allowed = allowed
        self._as_options = _as_options  # spelled for the front end whose call raised it

    def __str__(self) -> str:
        """Return the message, with the hint on its own line, as the front end spells them."""
        return self.message if self.hint is None else f"{self.message}\n  {self.hint}"

    @property
    def hint(self) -> str | None:
        """The command or change that fixes the error, as the front end spells it."""
        return None if self._hint is None else _spelled(self._hint, as_options=self._as_options)

    @property
    def message(self) -> str:
        """The message without the hint, as the front end spells it."""
        return _spelled(super().__str__(), as_options=self._as_options)

    def within(self, place: str) -> Self:
        """Return a copy whose message begins with the process or task that it comes from."""
        found = copy.copy(self)
        found.args = (f"{place}: {self.args[0]}",)
        return found

    def with_hint(self, hint: str | None) -> Self:
        """Return a copy with this hint, unless the error already has one."""
        found = copy.copy(self)
        found._hint = self._hint or hint
        return found

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object for :func:`from_json` in another process; values JSON cannot hold become text."""
        return {
            "class": FAILURES[self.exit_code].__name__,  # the public class; the other process may not know a subclass
            "message": super().__str__(),
            "hint": self._hint,
            "key": self.key,
            "found": _plain(self.found),
            "allowed": None if self.allowed is None else [_plain(value) for value in self.allowed],
        }

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows: the message and the user's line that led to it. Called by IPython.

        ``traceback.print_exception(sys.last_value)`` prints the full traceback.
        """
        package = f"{Path(__file__).parent}/"
        frames = traceback.extract_tb(self.__traceback__)
        outside = list(takewhile(lambda frame: not frame.filename.startswith(package), frames))[-1:]
        led = [f"line {frame.lineno} in {frame.name}: {frame.line}" for frame in outside if frame.line]
        return [*led, f"{type(self).__name__}: {self}"]


class ExperimentError(FedloomError, exit_code=ExitCode.EXPERIMENT):
    """An experiment file, option or combination that cannot run."""


class DataError(FedloomError, exit_code=ExitCode.DATA):
    """Data that are missing, corrupt or contradict their manifest."""


class RefusedError(FedloomError, exit_code=ExitCode.REFUSED):
    """Refusal between two sides: protocol, version, authentication."""


class QuorumError(FedloomError, exit_code=ExitCode.QUORUM):
    """Round that failed in all its attempts: too few replies, or an update that is not finite."""


class StorageError(FedloomError, exit_code=ExitCode.STORAGE):
    """Failure to write or read artifacts."""


class WorkerLostError(FedloomError, exit_code=ExitCode.WORKER_LOST):
    """Worker lost more often than restarts allow; the run can be resumed."""


class AbandonedError(FedloomError, exit_code=ExitCode.ABANDONED):
    """Loss of the peer: a worker has lost its aggregator, or an aggregator has no watchers."""


class InterruptedRun(FedloomError, exit_code=ExitCode.INTERRUPTED):
    """Request of the user or the system to stop the run, which can be resumed."""


FAILURES: Mapping[int, type[FedloomError]] = {int(kind.exit_code): kind for kind in FedloomError.__subclasses__()}
"""Exit code -> error class."""


def from_json(value: Mapping[str, Any]) -> FedloomError:
    """Return the error that another process encoded with :meth:`FedloomError.as_json`.

    Raise KeyError or TypeError if it is not such a description.
    """
    if not (isinstance(value["message"], str) and isinstance(value["hint"], str | None)):
        raise TypeError("message and hint must be text")
    kinds = {kind.__name__: kind for kind in FAILURES.values()}
    fields = {name: value[name] for name in ("hint", "key", "found", "allowed")}
    return kinds[value["class"]](value["message"], **fields)


def argument(name: str) -> str:
    """Return the placeholder for an argument's name in an error message.

    Each front end spells it in its own way: ``own_name`` in Python, ``--own-name`` on the command line.

    Parameters
    ----------
    name
        The argument's name in Python.
    """
    return f"\x02{name}\x03"


NEW_RUN = f"start a new run in another folder ({argument('out')})"
"""Advice for a run that cannot continue."""

GO_ON = f"fix the cause and continue with {argument('resume')}; with other settings, {NEW_RUN}"
"""Advice for a run that stopped for a cause that can be fixed."""


@contextmanager
def arguments_as_options() -> Iterator[None]:
    """Spell arguments as command-line options in errors raised within the block."""
    global _as_options
    before, _as_options = _as_options, True
    try:
        yield
    finally:
        _as_options = before


def spelled(text: str) -> str:
    """Return a text other than an error, such as a log line, with arguments as this front end spells them."""
    return _spelled(text, as_options=_as_options)


def _spelled(text: str, *, as_options: bool) -> str:
    def spell(place: re.Match[str]) -> str:
        name = place[1]
        if as_options:
            return OPTIONS.get(name, f"--{name.replace('_', '-')}")
        return IN_PYTHON.get(name, name)

    return re.sub("\x02(\\w+)\x03", spell, text)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float) else without_secrets(str(value))


STORAGE_FAILURES = {
    errno.EACCES, errno.EDQUOT, errno.EEXIST, errno.EFBIG, errno.EIO, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG,
    errno.ENOENT, errno.ENOSPC, errno.ENOTDIR, errno.ENOTEMPTY, errno.ENXIO, errno.EPERM, errno.EROFS, errno.ESTALE,
}  # fmt: skip
"""Error numbers of files that cannot be written or read; any other OSError is a bug and keeps its traceback."""


def as_storage_error(error: OSError) -> StorageError:
    """Return a storage error that names the file and the system's reason, and keeps the cause."""
    where = f"{error.filename}: " if error.filename else ""
    failure = StorageError(f"{where}{(error.strerror or str(error)).lower()}")
    failure.__cause__ = error
    return failure


LIBRARIES = {*sys.stdlib_module_names, "numpy", "pydantic", "scipy", "torch"}
"""Packages whose frames are skipped when looking for the line to blame."""


def raised_at(error: BaseException) -> traceback.FrameSummary | None:
    """Return the line to blame for a bug: the innermost in the user's own code, else the innermost in FedLoom's.

    Libraries raise far below the line that called them wrongly.
    """
    frames = [
        (frame.f_globals.get("__name__", "").partition(".")[0], traceback.FrameSummary(
            frame.f_code.co_filename, line, frame.f_code.co_name
        ))
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]  # fmt: skip
    outside = [summary for package, summary in frames if package not in LIBRARIES | {"fedloom"}]
    inside = [summary for package, summary in frames if package == "fedloom"]
    found = outside or inside
    return found[-1] if found else None
