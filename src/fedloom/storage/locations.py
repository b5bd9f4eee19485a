"""Locations of stores, parsed from URLs without contacting a service or reading a folder.

A kind of store is a subclass of :class:`Location`, registered as an entry point ``fedloom.stores`` by the scheme of its
URLs.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from fedloom.core.plugins import entries, load_plugin
from fedloom.errors import ExperimentError
from fedloom.storage.base import CREDENTIALS, ENDPOINT, REGION, Store, has_plain_parts
from fedloom.storage.folder import ClaimStore

MOUNTS = "/mnt/claims"
"""Folder in which pods mount each claim under its name."""


class Location(ABC):
    """Location of a store, and what pods need to reach it."""

    credentials: ClassVar[tuple[str, ...]] = ()
    """Environment variables that pods need from a Secret."""

    @property
    def claim(self) -> str | None:
        """PersistentVolumeClaim that pods must mount."""
        return None

    @classmethod
    @abstractmethod
    def parse(cls, rest: str) -> Self:
        """Return the location of a URL, given the part after ``://``; raise ValueError if it is malformed."""

    @abstractmethod
    def open(self, environment: Mapping[str, str], endpoint_from: str | None) -> Store:
        """Open the store; the arguments and errors are those of :func:`fedloom.storage.open_store`."""

    def pod_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that pods get in plain text, from the launcher's environment."""
        return {}


@dataclass(frozen=True)
class S3Location(Location):
    """Bucket, and a prefix in it without slashes at its ends, possibly empty."""

    bucket: str
    prefix: str
    credentials: ClassVar[tuple[str, ...]] = CREDENTIALS

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Return the location of ``BUCKET/PREFIX``."""
        bucket, _, prefix = rest.partition("/")
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", bucket):
            raise ValueError("the bucket in s3://BUCKET/PREFIX must be 3 to 63 lower-case letters, digits, '.' and '-'")
        return cls(bucket, _plain_path(prefix, "the prefix in s3://BUCKET/PREFIX"))

    def open(self, environment: Mapping[str, str], endpoint_from: str | None) -> Store:
        """Open the bucket."""
        try:
            from fedloom.storage.s3 import connect
        except ModuleNotFoundError as error:
            if error.name not in ("certifi", "minio", "urllib3"):
                raise
            raise ExperimentError(
                f"s3://{self.bucket} needs the package minio, which is not installed.", hint="pip install 'fedloom[s3]'"
            ) from error
        return connect(self.bucket, self.prefix, environment, endpoint_from=endpoint_from)

    def pod_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the service's address and region."""
        return {name: environment[name] for name in (ENDPOINT, REGION) if environment.get(name)}


@dataclass(frozen=True)
class ClaimLocation(Location):
    """Claim in the pods' namespace, and a path in its volume without slashes at its ends, possibly empty."""

    name: str
    path: str

    @property
    def claim(self) -> str:
        """Name of the claim."""
        return self.name

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Return the location of ``CLAIM/PATH``."""
        claim, _, path = rest.partition("/")
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", claim):
            raise ValueError("the claim in pvc://CLAIM/PATH must be at most 63 lower-case letters, digits and '-'")
        return cls(claim, _plain_path(path, "the path in pvc://CLAIM/PATH"))

    def open(self, environment: Mapping[str, str], endpoint_from: str | None) -> Store:
        """Open the folder at which the claim is mounted."""
        return ClaimStore(self.name, self.path, MOUNTS)


def _plain_path(path: str, name: str) -> str:
    path = path.rstrip("/")
    if path and not has_plain_parts(path):
        raise ValueError(f"{name} must have no empty parts, '.' and '..'")
    return path


def location_of(url: str | Path) -> Location | None:
    """Return the location of a URL; None for a folder. Raise ExperimentError if it is malformed or unsupported."""
    scheme, separator, rest = str(url).partition("://")
    if not separator and not scheme.startswith("s3:"):  # s3:/x, from Path or a typo, is not a folder
        return None
    try:
        for point in entries("fedloom.stores"):
            if point.name == scheme:
                kind: type[Location] = load_plugin(point, type)
                return kind.parse(rest)
        raise ValueError("give a local folder, s3://BUCKET/PREFIX or pvc://CLAIM/PATH")
    except ValueError as error:
        raise ExperimentError(f"{url} is not a valid storage location: {error}.", found=str(url)) from None


def pod_environment(url: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which pods reach a location; credentials come from a Secret."""
    location = location_of(url)
    return {} if location is None else location.pod_environment(environment)


def claims_of(urls: Iterable[str | None]) -> dict[str, str]:
    """Return the claims that pods must mount to reach these locations, sorted by name, and the path of each mount."""
    locations = (location_of(url) for url in urls if url)
    claims = {place.claim for place in locations if place is not None and place.claim is not None}
    return {claim: f"{MOUNTS}/{claim}" for claim in sorted(claims)}
