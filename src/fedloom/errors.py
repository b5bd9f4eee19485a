"""Failure classes and exit codes: the one table that every command, component and pod shares (docs/exit-codes.md)."""

import errno
import sys
import traceback
from collections.abc import Mapping
from enum import IntEnum
from itertools import takewhile
from pathlib import Path


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

    The message says what was found and what is allowed; ``hint`` is the command or change that fixes it.
    Subclasses fix ``exit_code``; a bare ``FedloomError`` is never raised.
    """

    exit_code: ExitCode

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        """Return the message, and the hint on a line of its own."""
        message = super().__str__()
        return message if self.hint is None else f"{message}\n  {self.hint}"

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
