"""A data root shared by two users: the second one can read it, or gets an error with the remedy."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from facts import tells

from fedloom.data.folders import locked, published
from fedloom.data.manifest import read_manifest
from fedloom.errors import ExitCode, StorageError


@pytest.fixture
def root() -> Iterator[Path]:
    """Return a data root of the first user, readable by others."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user takes root")
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        (Path(made) / "datasets").mkdir(0o755)
        yield Path(made) / "datasets"


@contextmanager
def second_user() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_the_second_user_waits_for_the_same_lock(root: Path) -> None:
    with locked(root / "mnist"):
        pass
    with second_user(), locked(root / "mnist"):
        pass


def test_the_second_user_learns_the_owner_and_the_remedy(root: Path) -> None:
    with second_user(), pytest.raises(StorageError) as caught, locked(root / "mnist"):
        pass
    assert caught.value.exit_code is ExitCode.STORAGE
    assert tells(str(caught.value), root / ".mnist.lock", root, "root", "FEDLOOM_DATA", "chmod")


def test_the_second_user_cannot_replace_files_and_gets_an_error(root: Path) -> None:
    with locked(root / "mnist"), published(root / "mnist") as staging:
        (staging / "a").write_text("first")
    with second_user(), pytest.raises(StorageError) as caught, published(root / "mnist"):
        pass
    assert tells(str(caught.value), root / "mnist", "root", "FEDLOOM_DATA")
    assert (root / "mnist" / "a").read_text() == "first"


def test_an_inaccessible_root_is_named(root: Path) -> None:
    root.chmod(0o700)
    with second_user(), pytest.raises(StorageError) as caught, locked(root / "mnist"):
        pass
    assert tells(str(caught.value), "root", "FEDLOOM_DATA")


def test_an_error_in_the_block_is_raised_unchanged(root: Path) -> None:
    with pytest.raises(PermissionError, match="mine"), locked(root / "mnist"):
        raise PermissionError("mine")


def test_a_private_partition_of_the_first_user_is_named(root: Path) -> None:
    (root / "p").mkdir()
    (root / "p" / "partition.json").write_text("{}")
    (root / "p" / "partition.json").chmod(0o600)
    with second_user(), pytest.raises(StorageError) as caught:
        read_manifest(root / "p")
    assert tells(str(caught.value), root / "p" / "partition.json", "root", "FEDLOOM_DATA")
