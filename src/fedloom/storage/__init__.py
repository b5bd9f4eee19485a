"""Artifact storage: a folder, or a bucket of any S3-compatible service (docs/storage.md)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from fedloom.core.home import expanded
from fedloom.core.urls import is_url
from fedloom.storage.base import Absent, Store, StoredObject, Taken
from fedloom.storage.folder import FolderStore
from fedloom.storage.locations import Location, location_of

__all__ = ["Absent", "Location", "Store", "StoredObject", "Taken", "is_url", "location_of", "open_store"]


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
    location = location_of(url)
    if location is None:
        return FolderStore(expanded(url))
    return location.open(os.environ if environment is None else environment, endpoint_from)
