"""Results of the checks of ``fedloom doctor``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fedloom.errors import FedloomError


@dataclass(frozen=True)
class CheckResult:
    """Outcome of one check.

    Attributes
    ----------
    subject
        Thing that was checked, such as ``torch`` or ``certificate``.
    state
        ``ok``, ``warning`` (works, but not well), or ``error``.
    detail
        State in words.
    remedy
        What to do; empty if nothing is to be done.
    code
        Exit code of a command that needs it.
    """

    subject: str
    state: Literal["ok", "warning", "error"]
    detail: str
    remedy: str = ""
    code: int = 0


def checked(subject: str, check: Callable[[], CheckResult | str]) -> CheckResult:
    """Return the result of a check: its own, its words if all is well, or the error that it raises.

    An exception that is no FedloomError, such as that of a broken plugin, is an error with code 1.
    """
    try:
        found = check()
    except FedloomError as error:
        return CheckResult(subject, "error", error.message, error.hint or "", int(error.exit_code))
    except Exception as error:
        return CheckResult(subject, "error", f"{type(error).__name__}: {error}", code=1)
    return CheckResult(subject, "ok", found) if isinstance(found, str) else found
