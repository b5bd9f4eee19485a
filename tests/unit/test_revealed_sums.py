"""Refusals of a member when a question is asked over another set of clients."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from facts import mentions, refusing

from fedloom.errors import DataError, RefusedError, StorageError
from fedloom.sums.messages import combined_digest
from fedloom.sums.revealed_sums import RECORD, RevealedSums, Subject


def subject(round: int) -> Subject:
    """Return the subject of a round."""
    return Subject(round, combined_digest(round))


SUBJECT, LASTING = subject(4), Subject(None, combined_digest("Moments"))
SUM, OTHER = combined_digest("a", "b", "c", "d"), combined_digest("a", "e", "f", "g")


def test_an_equal_sum_may_be_revealed_again_and_no_other() -> None:
    sums = RevealedSums()
    for _ in range(3):
        sums.check("a", SUBJECT, SUM)
        with refusing(RefusedError, "a", 4):
            sums.check("a", SUBJECT, OTHER)
    sums.check("a", subject(5), OTHER)  # another question
    sums.check("b", SUBJECT, OTHER)  # another client, which has revealed nothing


def test_nothing_is_forgotten() -> None:
    sums = RevealedSums()
    for round in range(100_000):
        sums.check("a", subject(round), SUM)
    for round in (0, 50_000, 99_999):
        with refusing(RefusedError, "a", round):
            sums.check("a", subject(round), OTHER)


# --- the record on disk -----------------------------------------------------------------------------------------------


def checked(folder: Path) -> RevealedSums:
    """Reveal sums of a round for two clients, and one of lasting answers."""
    sums = RevealedSums(folder)
    for client in ("a", "b"):
        sums.check(client, SUBJECT, SUM)
    sums.check("a", LASTING, SUM)
    return sums


def remembers(sums: RevealedSums) -> bool:
    """Return True if exactly these sums are recorded."""
    for client, asked in (("a", SUBJECT), ("b", SUBJECT), ("a", LASTING)):
        with refusing(RefusedError, client):
            sums.check(client, asked, OTHER)
        sums.check(client, asked, SUM)
    return True


def test_another_process_reads_the_record(tmp_path: Path) -> None:
    checked(tmp_path)
    assert remembers(RevealedSums(tmp_path))
    assert (tmp_path / RECORD).stat().st_mode & 0o777 == 0o600


def test_concurrent_processes_share_the_record(tmp_path: Path) -> None:
    first, second = RevealedSums(tmp_path), RevealedSums(tmp_path)
    first.check("a", SUBJECT, SUM)
    with refusing(RefusedError, "a"):
        second.check("a", SUBJECT, OTHER)
    second.check("a", subject(5), OTHER)
    with refusing(RefusedError, "a"):
        first.check("a", subject(5), SUM)


@pytest.mark.slow
def test_a_killed_process_has_recorded_all_that_it_allowed(tmp_path: Path) -> None:
    code = f"""
import os, signal, pathlib
from fedloom.sums.messages import combined_digest
from fedloom.sums.revealed_sums import RevealedSums, Subject
sums = RevealedSums(pathlib.Path({str(tmp_path)!r}))
for round in range(1, 9):
    sums.check("a", Subject(round, combined_digest(round)), combined_digest("sum"))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    sums = RevealedSums(tmp_path)
    for round in range(1, 9):
        with refusing(RefusedError, "a", round):
            sums.check("a", subject(round), OTHER)


@pytest.mark.parametrize("kept", range(0, 60, 7))
def test_a_truncated_last_line_is_ignored(tmp_path: Path, kept: int) -> None:
    checked(tmp_path)
    whole = (tmp_path / RECORD).read_bytes()
    RevealedSums(tmp_path).check("c", SUBJECT, SUM)
    line = (tmp_path / RECORD).read_bytes()[len(whole) :]
    (tmp_path / RECORD).write_bytes(whole + line[:kept])
    sums = RevealedSums(tmp_path)
    assert (tmp_path / RECORD).read_bytes() == whole
    sums.check("c", SUBJECT, OTHER)
    assert remembers(RevealedSums(tmp_path))


def test_a_line_truncated_by_another_process_is_removed(tmp_path: Path) -> None:
    """A full disk has truncated a line of another process."""
    sums = checked(tmp_path)
    with (tmp_path / RECORD).open("ab") as file:
        file.write(b'{"version": 2, "rou')
    sums.check("c", SUBJECT, SUM)
    assert remembers(RevealedSums(tmp_path))


@pytest.mark.parametrize("at", range(5, 700, 50))
def test_a_damaged_record_is_rejected(tmp_path: Path, at: int) -> None:
    sums = checked(tmp_path)
    record = tmp_path / RECORD
    content = bytearray(record.read_bytes())
    content[at % len(content)] ^= 1
    record.write_bytes(content)
    with refusing(DataError, RECORD) as error:
        RevealedSums(tmp_path)
    assert mentions(str(error.value.hint), "copy", "remove")
    if at % len(content) < len(content) - 60:
        sums.check("a", SUBJECT, SUM)  # sums read earlier are kept


def test_removed_lines_are_detected(tmp_path: Path) -> None:
    sums = checked(tmp_path)
    lines = (tmp_path / RECORD).read_bytes().splitlines(keepends=True)
    (tmp_path / RECORD).write_bytes(b"".join(lines[1:]))
    with refusing(DataError, RECORD):
        RevealedSums(tmp_path)
    with refusing(RefusedError, "a") as error:  # reveals nothing of this machine to the aggregator
        sums.check("a", SUBJECT, SUM)
    assert str(tmp_path) not in str(error.value)


def test_a_record_of_another_version_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr("fedloom.sums.revealed_sums.VERSION", 3)
        checked(tmp_path)
    with refusing(DataError, RECORD, 2, 3):
        RevealedSums(tmp_path)


def test_an_unwritable_folder_is_rejected(tmp_path: Path) -> None:
    with refusing(StorageError, tmp_path):
        RevealedSums(tmp_path / "missing")
