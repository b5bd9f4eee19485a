"""Artifact storage: a folder, or a bucket of any S3-compatible service (docs/storage.md)."""

from fedloom.storage.base import Absent, Store, StoredObject, Taken
from fedloom.storage.open import is_url, open_store

__all__ = ["Absent", "Store", "StoredObject", "Taken", "is_url", "open_store"]
