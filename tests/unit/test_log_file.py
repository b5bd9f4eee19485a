"""The log of a process as a file of JSON lines."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from fedloom.engine.log_file import log_kept
from fedloom.errors import StorageError

log = logging.getLogger("fedloom.transport")


def test_messages_before_the_file_is_known_are_written_to_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "aggregator.jsonl"
    logger = logging.getLogger("fedloom")
    handlers = [*logger.handlers]
    with caplog.at_level(logging.INFO, "fedloom"):
        with log_kept(alone=True) as keep:
            log.info("worker %s joined", "early", extra={"worker": "early"})
            log.error("something was wrong")
            keep(file)
            log.info("worker late joined")
            lines = [json.loads(line) for line in file.read_text().splitlines()]
        log.info("after it")
    assert [line["message"] for line in lines] == ["worker early joined", "something was wrong", "worker late joined"]
    assert lines[0]["worker"] == "early"
    assert len(file.read_text().splitlines()) == 3
    assert caplog.messages == ["worker early joined", "something was wrong", "after it"]  # each once
    assert (logger.handlers, logger.propagate) == (handlers, True)


def test_an_unwritable_log_file(tmp_path: Path) -> None:
    with log_kept() as keep, pytest.raises(StorageError):
        keep(tmp_path)
