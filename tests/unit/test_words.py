"""Untrusted text is printed without control characters and line ends, and logs are lines of JSON."""

from __future__ import annotations

import io
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core.logs import JsonLines, lines_about
from fedloom.core.words import printable, rounded_up
from fedloom.engine.log_file import log_kept
from fedloom.errors import StorageError
from fedloom.runs.folder import RunFolder

NASTY = "a\u2028b\u2029c\x85d\x1b[2Je\u202ef\x9bg\x00h\ri\nj\x0bk\ud800"


@given(st.text(), st.integers(0, 20))
def test_printable_text_is_short_and_printable(text: str, limit: int) -> None:
    assert printable(text, limit).isprintable()
    assert len(printable(text, limit)) <= limit
    assert len(printable(text).splitlines()) <= 1


@given(st.text().filter(str.isprintable))
def test_printable_characters_are_kept(text: str) -> None:
    assert printable(text) == text


def test_selected_characters_may_be_kept() -> None:
    assert printable("two\nlines\x1b[0m", keep="\n") == "two\nlines\\x1b[0m"


@given(st.dictionaries(st.text(), st.text() | st.just(NASTY), max_size=3))
def test_files_of_lines_have_one_line_per_object_for_any_splitter(
    tmp_path_factory: pytest.TempPathFactory, value: dict[str, Any]
) -> None:
    folder = RunFolder(tmp_path_factory.mktemp("lines"))
    for name in ("journal.jsonl", "metrics.jsonl"):
        folder.append(name, value)
        folder.append(name, {"next": NASTY})
        assert folder.lines(name) == [value, {"next": NASTY}]
        text = (folder.path / name).read_text()
        found = [json.loads(line) for line in text.splitlines()]
        assert [list(line)[-1] for line in found] == ["digest", "digest"]
        assert [{**line, "digest": ""} for line in found] == [
            {**each, "digest": ""} for each in (value, {"next": NASTY})
        ]
        folder.rewrite(name, [value, value])
        assert len((folder.path / name).read_text().splitlines()) == 2


def test_logs_have_one_line_per_record() -> None:
    record = logging.LogRecord("fedloom", logging.WARNING, "", 0, "%s", (NASTY,), None)
    (line,) = JsonLines().format(record).splitlines()
    assert json.loads(line)["message"] == NASTY
    assert line.isascii()


def test_log_lines_name_their_subject() -> None:
    def line(**about: Any) -> dict[str, Any]:
        record = logging.makeLogRecord({"name": "fedloom", "levelname": "INFO", "msg": "lost", **about})
        return dict(json.loads(JsonLines().format(record)))

    assert "round" not in line()
    with lines_about(lambda: {"phase": "training", "round": 7, "attempt": None, "other": 1}):
        found = line(round=6, client=NASTY, worker="w", data={"exit_code": 5})
        assert (found["phase"], found["round"], found["client"], found["worker"]) == ("training", 6, NASTY, "w")
        assert found["data"] == {"exit_code": 5}
        assert not {"attempt", "other"} & set(found)
        assert line()["round"] == 7
    assert "phase" not in line()


@pytest.mark.slow
def test_standard_error_shows_no_control_characters() -> None:
    from fedloom.cli.main import _Printable

    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Printable("%(message)s"))
    handler.handle(logging.LogRecord("fedloom", logging.WARNING, "", 0, "%s", (NASTY,), None))
    assert all(c.isprintable() or c == "\n" for c in stream.getvalue())


def test_owners_of_clients_may_have_any_name(tmp_path: Path) -> None:
    RunFolder(tmp_path).write("clients.csv", "id,seen,owner\nc0,true,a\u2028b\nc1,false,d\x85e\n")
    assert [row["id"] for row in RunFolder(tmp_path).clients()] == ["c0", "c1"]


@given(st.floats(1e-9, 1e9), st.integers(2, 5))
def test_a_bound_as_text_remains_a_bound(bound: float, digits: int) -> None:
    shown = float(rounded_up(bound, digits))
    assert bound * (1 - 1e-6) <= shown <= bound * (1 + 10.0 ** (1 - digits)) * (1 + 1e-9)
    assert float(rounded_up(shown, digits)) == shown


@pytest.mark.parametrize(
    ("bound", "text"),
    [
        (1.234, "1.24"),
        (1.23, "1.23"),
        (8.000000003, "8"),
        (9.991, "10"),
        (0.1 + 0.2, "0.3"),
        (0.0, "0"),
        (math.inf, "inf"),
    ],
)
def test_bounds_as_text(bound: float, text: str) -> None:
    assert rounded_up(bound) == text


log = logging.getLogger("fedloom.transport")


@pytest.mark.slow
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
