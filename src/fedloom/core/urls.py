"""URLs of services that FedLoom calls."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from fedloom.errors import ExperimentError, without_secrets


def service_url(text: str, name: str, form: str, *, key: str, path: bool) -> str:
    """Return the URL of a service, without a slash at its end.

    User information is refused, because it would be sent to the service or ignored, depending on the library.

    Raise ExperimentError if it is not an HTTP URL, or has user information, a query or a fragment.

    Parameters
    ----------
    name, form, key
        Name of the setting and form of the URL in messages, and the error's key.
    path
        Whether the URL may have a path.
    """
    if without_secrets(text) != text:
        raise ExperimentError(f"{name} must be {form}, without a user name and password.", key=key)
    refusal = ExperimentError(f"{name} must be {form} (got {text}).", key=key, found=text)
    try:
        split = urlsplit(text)
        split.port  # noqa: B018 - raises if it is no number
    except ValueError:
        raise refusal from None
    if split.scheme not in ("http", "https") or not split.hostname or split.query or split.fragment:
        raise refusal
    if split.path.strip("/") and not path:
        raise refusal
    return text.rstrip("/")


def is_url(text: str | Path) -> bool:
    """Return True for a URL (``s3://...``, ``pvc://...``, or an unsupported one), False for a folder."""
    return "://" in str(text)
