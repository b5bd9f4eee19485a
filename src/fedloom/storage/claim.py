"""Storage on a PersistentVolumeClaim, ``pvc://CLAIM/PATH``: a folder of a volume that pods mount.

KServe writes the location of a model on a claim in the same form.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from fedloom.errors import ExperimentError, StorageError
from fedloom.storage.base import has_plain_parts, parts_of
from fedloom.storage.folder import FolderStore

SCHEME = "pvc://"
MOUNTS = "/mnt/claims"
"""Folder in which pods mount each claim under its name."""
VARIABLE = "FEDLOOM_CLAIMS"
"""Environment variable that names another folder of claims."""


class ClaimPlace(NamedTuple):
    """Name of a claim in the pods' namespace, and a path in its volume without slashes at its ends, possibly empty."""

    claim: str
    path: str

    @property
    def mount(self) -> str:
        """Path at which pods mount the claim."""
        return f"{MOUNTS}/{self.claim}"


def claim_place(url: str | Path) -> ClaimPlace | None:
    """Return the claim and path of a URL; None for a folder or another URL.

    Raise ExperimentError if the URL is malformed.
    """
    text = str(url)
    if not text.startswith(SCHEME):
        return None
    claim, _, path = text.removeprefix(SCHEME).partition("/")
    path, why = path.rstrip("/"), None
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", claim):
        why = "the claim in pvc://CLAIM/PATH must be at most 63 lower-case letters, digits and '-'"
    elif path and not has_plain_parts(path):
        why = "the path in pvc://CLAIM/PATH must have no empty parts, '.' and '..'"
    if why is not None:
        raise ExperimentError(f"{text} is not a valid storage location: {why}.", found=text)
    return ClaimPlace(claim, path)


def claims_of(urls: Iterable[str | None]) -> list[ClaimPlace]:
    """Return the different claims that pods must mount to reach these locations, sorted by name."""
    found = (claim_place(url) for url in urls if url)
    return [ClaimPlace(claim, "") for claim in sorted({place.claim for place in found if place is not None})]


class ClaimStore(FolderStore):
    """Store in a folder of a mounted claim.

    Raise StorageError if the claim is not mounted in this pod or on this machine.
    """

    def __init__(self, place: ClaimPlace) -> None:
        self._place = place
        mount = Path(os.environ.get(VARIABLE) or MOUNTS, place.claim)
        if not mount.is_dir():
            raise StorageError(
                f"{self.url}: the claim {place.claim} is not mounted here, at {mount}",
                hint="only pods that mount the claim have access to it (docs/storage.md)",
            )
        super().__init__(mount / place.path)

    @property
    def url(self) -> str:
        """URL of the folder, the same in every pod."""
        return f"{SCHEME}{self._place.claim}/{self._place.path}".rstrip("/")

    def under(self, prefix: str) -> ClaimStore:
        """Return the part of this store below a folder."""
        path = PurePosixPath(self._place.path, *parts_of(prefix))
        return ClaimStore(self._place._replace(path=str(path)))
