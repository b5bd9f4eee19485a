"""A disk that is full ends every call with an error that names the file, and never with a bare OSError."""

from __future__ import annotations

import logging
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from facts import mentions
from test_local_data import TASK, people

import fedloom
from fedloom.core.files import copy_folder
from fedloom.engine.log_file import logged_to
from fedloom.errors import StorageError

ROUNDS = {"rounds": 3, "clients_per_round": 2, "checkpoint_every_s": 0}


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """Let no file grow beyond this size; the system then refuses to write, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Expect an error that names a path in a folder, and the reason."""
    with pytest.raises(StorageError) as raised:
        yield
    assert mentions(str(raised.value), folder, "file too large"), raised.value


def test_data_in_memory_that_cannot_be_stored(tmp_path: Path) -> None:
    with disk_of(100), naming(tmp_path / "data" / "datasets"):
        fedloom.Federated.from_arrays(people(), root=tmp_path / "data")
    assert not [path for path in (tmp_path / "data" / "datasets").iterdir() if not path.name.endswith(".lock")]
    fedloom.Federated.from_arrays(people(), root=tmp_path / "data")


@pytest.mark.slow
def test_a_run_that_cannot_be_written(tmp_path: Path) -> None:
    data = fedloom.Federated.from_arrays(people(), root=tmp_path / "data", held_out_fraction=0.25)
    task: dict[str, Any] = {**TASK, "data": data, "federation": ROUNDS}
    with disk_of(100), naming(tmp_path / "data" / "partitions"):
        fedloom.run(task, out=tmp_path / "run", report=False, progress=False)
    fedloom.run(task, out=tmp_path / "first", report=False, progress=False)  # stores the partition
    for size in (64, 900, 2500):
        out = tmp_path / f"run-{size}"
        with disk_of(size), naming(out):
            fedloom.run(task, out=out, report=False, progress=False)
        assert fedloom.run(task, out=out, report=False, progress=False, resume=True).finished


def test_a_folder_that_cannot_be_copied(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    for name in "ab":
        (tmp_path / "from" / name).write_bytes(bytes(500))
    with disk_of(100), naming(tmp_path / "to"):
        copy_folder(tmp_path / "from", tmp_path / "to")
    copy_folder(tmp_path / "from", tmp_path / "to", ignore=shutil.ignore_patterns("b"))
    assert (tmp_path / "to" / "a").stat().st_size == 500


def test_a_log_without_its_file_goes_on_where_it_is_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("fedloom.run")
    with logged_to(tmp_path / "log.jsonl"):
        log.warning("before")
        with disk_of(150):
            log.warning("x" * 200)
        log.warning("after")
    first, *_ = (tmp_path / "log.jsonl").read_text().splitlines()
    assert '"message": "before"' in first
    assert "after" not in (tmp_path / "log.jsonl").read_text()
    failures = [text for text in caplog.messages if "log.jsonl" in text]
    assert len(failures) == 1
    assert mentions(failures[0], tmp_path, "File too large")
    assert caplog.messages[-1] == "after"
