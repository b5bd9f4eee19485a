"""Failure classes and exit codes: the one table that every command, component and pod shares (docs/exit-codes.md).

=====================  ====  ===================================================================
class                  exit  raised when
=====================  ====  ===================================================================
``FedloomError``             the base class, which is never raised itself
``ExperimentError``    2     an experiment file, argument or combination cannot run
``DataError``          3     data are missing, corrupt, or not what their manifest says
``RefusedError``       4     one side refused the other: protocol, version, authentication
``QuorumError``        5     a round failed in all its attempts
``StorageError``       6     artifacts cannot be written or read
``WorkerLostError``    7     a process was lost more often than it is restarted; resumable
``AbandonedError``     8     the other side is gone
``InterruptedRun``     130   the user or the system asked the run to stop; resumable
=====================  ====  ===================================================================

Any other exception is a bug: it keeps its traceback, and the process ends with 1.

An error is data, which each front end puts into its own words: the command line speaks of options, Python of
arguments, an experiment file of keys. A message therefore never spells an option; ``argument("out")`` stands for its
name. Between processes an error travels as JSON (:meth:`FedloomError.as_json`).
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
    "from_": "--from",
    "no_report": "--no-report",
    "packed": "--data",
    "set": "--set ",
    "timeout_s": "--timeout",
}
"""Arguments whose option has another name; others are ``--name-with-dashes``."""

IN_PYTHON: Mapping[str, str] = {"no_report": "report=False", "resume": "resume=True", "set": ""}
"""Arguments that Python users write in another way: with a value, or as keys of the experiment (``set``)."""

_as_options = False


class ExitCode(IntEnum):
    """What a FedLoom process exits with. On Kubernetes 2, 3, 4 and 8 are never retried."""

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
    """A failure with a class of its own.

    Subclasses fix ``exit_code``; a bare ``FedloomError`` is never raised.

    Parameters
    ----------
    message
        A sentence that says what is wrong. Names of arguments in it are those of :func:`argument`.
    hint
        The command or change that fixes it.
    key
        The argument (``out``), or the dotted key of the experiment (``federation.rounds``), that the error is about.
    found, allowed
        The value that was found, and those that are allowed, for programs: numbers, texts, or lists of them.
    """

    exit_code: ExitCode

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        key: str | None = None,
        found: Any = None,
        allowed: Sequence[Any] | None = None,
    ) -> None:
        super().__init__(message)
        self._hint = hint
        self.key = key
        self.found = found
        self.allowed = allowed
        self._as_options = _as_options  # it is told by the front end in whose call it was raised

    def __str__(self) -> str:
        """Return the message, and the hint on a line of its own, in the words of the front end."""
        return self.message if self.hint is None else f"{self.message}\n  {self.hint}"

    @property
    def hint(self) -> str | None:
        """The command or change that fixes it, in the words of the front end."""
        return None if self._hint is None else _spelled(self._hint, as_options=self._as_options)

    @property
    def message(self) -> str:
        """The message without the hint, in the words of the front end."""
        return _spelled(super().__str__(), as_options=self._as_options)

    def within(self, place: str) -> Self:
        """Return the same error, of a process or task that is named first."""
        found = copy.copy(self)
        found.args = (f"{place}: {self.args[0]}",)
        return found

    def with_hint(self, hint: str | None) -> Self:
        """Return the same error with a hint, unless it has one."""
        found = copy.copy(self)
        found._hint = self._hint or hint
        return found

    def as_json(self) -> dict[str, Any]:
        """Return what :func:`from_json` makes an equal error of, in another process; values are as text if need be."""
        return {
            "class": type(self).__name__,
            "message": super().__str__(),
            "hint": self._hint,
            "key": self.key,
            "found": _plain(self.found),
            "allowed": None if self.allowed is None else [_plain(value) for value in self.allowed],
        }

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows (IPython asks for it): the sentence, and the line outside FedLoom that led to it.

        ``traceback.print_exception(sys.last_value)`` has the rest.
        """
        package = f"{Path(__file__).parent}/"
        frames = traceback.extract_tb(self.__traceback__)
        outside = list(takewhile(lambda frame: not frame.filename.startswith(package), frames))[-1:]
        led = [f"line {frame.lineno} in {frame.name}: {frame.line}" for frame in outside if frame.line]
        return [*led, f"{type(self).__name__}: {self}"]


class ExperimentError(FedloomError):
    """An experiment file, option or combination that cannot run."""

    exit_code = ExitCode.EXPERIMENT


class DataError(FedloomError):
    """Data that is missing, corrupt or not what its manifest says."""

    exit_code = ExitCode.DATA


class RefusedError(FedloomError):
    """One side refused the other: protocol, version, authentication."""

    exit_code = ExitCode.REFUSED


class QuorumError(FedloomError):
    """A round failed in all its attempts: too few replies, or an update that is not finite."""

    exit_code = ExitCode.QUORUM


class StorageError(FedloomError):
    """Something could not be written or read where artifacts live."""

    exit_code = ExitCode.STORAGE


class WorkerLostError(FedloomError):
    """A worker was lost more often than it is restarted; the run can be resumed."""

    exit_code = ExitCode.WORKER_LOST


class AbandonedError(FedloomError):
    """A worker gave up because its aggregator is gone, or an aggregator because nobody watches it."""

    exit_code = ExitCode.ABANDONED


class InterruptedRun(FedloomError):
    """The user or the system asked the run to stop; it can be resumed."""

    exit_code = ExitCode.INTERRUPTED


FAILURES: Mapping[int, type[FedloomError]] = {int(kind.exit_code): kind for kind in FedloomError.__subclasses__()}
"""Exit code -> the class that a process ends with it for."""


def from_json(value: Mapping[str, Any]) -> FedloomError:
    """Return the error that another process described with :meth:`FedloomError.as_json`.

    Raises
    ------
    KeyError, TypeError
        If it is not such a description.
    """
    if not (isinstance(value["message"], str) and isinstance(value["hint"], str | None)):
        raise TypeError("message and hint must be text")
    kinds = {kind.__name__: kind for kind in FAILURES.values()}
    fields = {name: value[name] for name in ("hint", "key", "found", "allowed")}
    return kinds[value["class"]](value["message"], **fields)


def argument(name: str) -> str:
    """Return what stands for the name of an argument in the message of an error.

    Each front end spells it in its own way: ``tls_ca`` in Python, ``--tls-ca`` on the command line.

    Parameters
    ----------
    name
        As Python has it.
    """
    return f"\x02{name}\x03"


@contextmanager
def arguments_as_options() -> Iterator[None]:
    """Let errors that are raised in the block spell arguments as options: the front end is a command line."""
    global _as_options
    before, _as_options = _as_options, True
    try:
        yield
    finally:
        _as_options = before


def spelled(text: str) -> str:
    """Return a text that is no error, such as a line of the log, with its arguments as this front end spells them."""
    return _spelled(text, as_options=_as_options)


def _spelled(text: str, *, as_options: bool) -> str:
    def spell(place: re.Match[str]) -> str:
        name = place[1]
        if as_options:
            return OPTIONS.get(name, f"--{name.replace('_', '-')}")
        return IN_PYTHON.get(name, name)

    return re.sub("\x02(\\w+)\x03", spell, text)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


STORAGE_FAILURES = {
    errno.EACCES, errno.EDQUOT, errno.EEXIST, errno.EFBIG, errno.EIO, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG,
    errno.ENOENT, errno.ENOSPC, errno.ENOTDIR, errno.ENOTEMPTY, errno.ENXIO, errno.EPERM, errno.EROFS, errno.ESTALE,
}  # fmt: skip
"""What the operating system says when a file cannot be written or read; other errors are bugs and keep their trace."""


def as_storage_error(error: OSError) -> StorageError:
    """Name the file and what the operating system said of it; the cause is kept."""
    where = f"{error.filename}: " if error.filename else ""
    failure = StorageError(f"{where}{(error.strerror or str(error)).lower()}")
    failure.__cause__ = error
    return failure


LIBRARIES = {*sys.stdlib_module_names, "numpy", "pydantic", "scipy", "torch"}
"""Packages in whose code no user looks for a bug of theirs."""


def raised_at(error: BaseException) -> traceback.FrameSummary | None:
    """Return the line where a bug is looked for: the innermost of the user's own code, else that of FedLoom's.

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
