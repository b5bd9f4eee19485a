"""Artifact storage: a folder, or a bucket of any S3-compatible service (docs/storage.md)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from fedloom.core.home import expanded
from fedloom.errors import ExperimentError
from fedloom.storage.base import Absent, Store, StoredObject, Taken, has_plain_parts
from fedloom.storage.folder import ClaimStore, FolderStore, claim_place

__all__ = ["Absent", "Store", "StoredObject", "Taken", "check_place", "is_url", "open_store", "s3_place"]


def is_url(text: str | Path) -> bool:
    """Return True for a URL (``s3://...``, ``pvc://...``, or an unsupported one), False for a folder."""
    return "://" in str(text)


def open_store(
    url: str | Path, environment: Mapping[str, str] | None = None, *, endpoint_from: str | None = None
) -> Store:
    """Open a store without contacting it, reading or writing; see :meth:`Store.check`.

    Raise ExperimentError if the URL or the address of the service is malformed, or the extra ``s3`` is not installed;
    RefusedError if there are no credentials; StorageError if a claim is not mounted.

    Parameters
    ----------
    url
        A folder, which need not exist, ``s3://bucket/prefix`` or ``pvc://claim/path``.
    environment
        Variables with the service's address and the credentials (docs/storage.md); default: this process's environment.
    endpoint_from
        Name, in errors, of the setting that the endpoint comes from, if that is not the variable.
    """
    if (mounted := claim_place(url)) is not None:
        return ClaimStore(mounted)
    place = s3_place(url)
    if place is None:
        return FolderStore(expanded(url))
    try:
        from fedloom.storage.s3 import connect
    except ModuleNotFoundError as error:
        if error.name not in ("certifi", "minio", "urllib3"):
            raise
        raise ExperimentError(
            f"{url} needs the package minio, which is not installed.", hint="pip install 'fedloom[s3]'"
        ) from error
    variables = os.environ if environment is None else environment
    return connect(*place, variables, endpoint_from=endpoint_from)


def check_place(url: str | Path) -> None:
    """Raise ExperimentError if a location of a store is malformed or unsupported."""
    if claim_place(url) is None:
        s3_place(url)


def s3_place(url: str | Path) -> tuple[str, str] | None:
    """Return the bucket of a URL, and a prefix in it without slashes at its ends, possibly empty; None for a folder.

    Raise ExperimentError if the URL is malformed or unsupported.
    """
    scheme, separator, rest = str(url).partition("://")
    if not separator and not scheme.startswith("s3:"):  # s3:/x, from Path or a typo, is not a folder
        return None
    bucket, _, prefix = rest.partition("/")
    prefix, why = prefix.rstrip("/"), None
    if scheme != "s3":
        why = "give a local folder, s3://BUCKET/PREFIX or pvc://CLAIM/PATH"
    elif not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", bucket):
        why = "the bucket in s3://BUCKET/PREFIX must be 3 to 63 lower-case letters, digits, '.' and '-'"
    elif prefix and not has_plain_parts(prefix):
        why = "the prefix in s3://BUCKET/PREFIX must have no empty parts, '.' and '..'"
    if why is not None:
        raise ExperimentError(f"{url} is not a valid storage location: {why}.", found=str(url))
    return bucket, prefix
