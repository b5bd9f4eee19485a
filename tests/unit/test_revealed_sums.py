"""Refusals of a member when a round is repeated."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from facts import mentions, refusing

from fedloom.errors import DataError, RefusedError, StorageError
from fedloom.federation.revealed_sums import RECORD, RevealedSums, Subject

SUBJECT = Subject(4, "train", "Update")


def test_an_equal_sum_may_be_revealed_again() -> None:
    sums = RevealedSums()
    for _ in range(3):
        sums.check("a", SUBJECT, ["a", "b", "c", "d"])


@pytest.mark.parametrize("others", [["a", "b", "c"], ["a", "b", "c", "e"], ["a", "b", "c", "d", "e", "f"]])
def test_a_sum_that_differs_by_fewer_than_three_clients_is_refused(others: list[str]) -> None:
    sums = RevealedSums()
    sums.check("a", SUBJECT, ["a", "b", "c", "d"])
    with refusing(RefusedError, "a", 4):
        sums.check("a", SUBJECT, others)
    sums.check("a", Subject(5, "train", "Update"), others)  # another round
    sums.check("b", SUBJECT, others)  # another client, which has revealed nothing


def test_at_most_two_sets_are_allowed() -> None:
    sums = RevealedSums()
    sums.check("a", SUBJECT, ["a", "b", "c", "d"])
    sums.check("a", SUBJECT, ["a", "e", "f", "g"])
    with refusing(RefusedError, "a"):
        sums.check("a", SUBJECT, ["a", "h", "i", "j"])


def test_the_oldest_rounds_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.federation.revealed_sums.MOST_IDS", 9)
    sums = RevealedSums()
    for round in (1, 2, 3):
        for client in ("a", "b"):  # of one sum, which is recorded once
            sums.check(client, Subject(round, "train", "Update"), ["a", "b", "c", "d"])
    sums.check("a", Subject(1, "train", "Update"), ["a", "b", "c"])
    with refusing(RefusedError, "a", 3):
        sums.check("a", Subject(3, "train", "Update"), ["a", "b", "c"])


# --- the record on disk -----------------------------------------------------------------------------------------------

LASTING = Subject(0, "", "Moments")
SETS = (["a", "b", "c", "d"], ["a", "e", "f", "g"])


def checked(folder: Path) -> RevealedSums:
    """Reveal two sums of a round and one of lasting answers, the first for two clients."""
    sums = RevealedSums(folder)
    for client in ("a", "b"):
        sums.check(client, SUBJECT, SETS[0])
    sums.check("a", SUBJECT, SETS[1])
    sums.check("a", LASTING, SETS[0])
    return sums


def remembers(sums: RevealedSums) -> bool:
    """Return True if exactly these sums are recorded."""
    for client, subject, survivors in (
        ("a", SUBJECT, ["a", "h", "i", "j"]),
        ("b", SUBJECT, ["b", "c", "d"]),
        ("a", LASTING, ["a", "b", "c"]),
    ):
        with refusing(RefusedError, client):
            sums.check(client, subject, survivors)
    sums.check("b", SUBJECT, SETS[0])
    sums.check("a", SUBJECT, SETS[1])
    return True


def test_another_process_reads_the_record(tmp_path: Path) -> None:
    checked(tmp_path)
    assert remembers(RevealedSums(tmp_path))
    assert (tmp_path / RECORD).stat().st_mode & 0o777 == 0o600


def test_concurrent_processes_share_the_record(tmp_path: Path) -> None:
    first, second = RevealedSums(tmp_path), RevealedSums(tmp_path)
    first.check("a", SUBJECT, SETS[0])
    with refusing(RefusedError, "a"):
        second.check("a", SUBJECT, SETS[0][:3])
    second.check("a", SUBJECT, SETS[1])
    with refusing(RefusedError, "a"):
        first.check("a", SUBJECT, ["a", "h", "i", "j"])


def test_sums_of_different_runs_are_not_compared(tmp_path: Path) -> None:
    sums = checked(tmp_path)
    sums.check("a", SUBJECT._replace(run="other"), SETS[0][:3])
    assert remembers(RevealedSums(tmp_path))


@pytest.mark.slow
def test_a_killed_process_has_recorded_all_that_it_allowed(tmp_path: Path) -> None:
    code = f"""
import os, signal, pathlib
from fedloom.federation.revealed_sums import RevealedSums, Subject
sums = RevealedSums(pathlib.Path({str(tmp_path)!r}))
for round in range(1, 9):
    sums.check("a", Subject(round, "train", "Update"), ["a", "b", "c", "d"])
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    sums = RevealedSums(tmp_path)
    for round in range(1, 9):
        with refusing(RefusedError, "a", round):
            sums.check("a", Subject(round, "train", "Update"), ["a", "b", "c"])


@pytest.mark.parametrize("kept", range(0, 60, 7))
def test_a_truncated_last_line_is_ignored(tmp_path: Path, kept: int) -> None:
    checked(tmp_path)
    whole = (tmp_path / RECORD).read_bytes()
    RevealedSums(tmp_path).check("c", SUBJECT, SETS[0])
    line = (tmp_path / RECORD).read_bytes()[len(whole) :]
    (tmp_path / RECORD).write_bytes(whole + line[:kept])
    sums = RevealedSums(tmp_path)
    assert (tmp_path / RECORD).read_bytes() == whole
    sums.check("c", SUBJECT, [*SETS[0][1:], "x"])
    assert remembers(RevealedSums(tmp_path))


def test_a_line_truncated_by_another_process_is_removed(tmp_path: Path) -> None:
    """A full disk has truncated a line of another process."""
    sums = checked(tmp_path)
    with (tmp_path / RECORD).open("ab") as file:
        file.write(b'{"version": 1, "rou')
    sums.check("c", SUBJECT, SETS[0])
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
        sums.check("a", SUBJECT, SETS[0])  # sums read earlier are kept


def test_removed_lines_are_detected(tmp_path: Path) -> None:
    sums = checked(tmp_path)
    lines = (tmp_path / RECORD).read_bytes().splitlines(keepends=True)
    (tmp_path / RECORD).write_bytes(b"".join(lines[1:]))
    with refusing(DataError, RECORD):
        RevealedSums(tmp_path)
    with refusing(RefusedError, "a") as error:  # reveals nothing of this machine to the aggregator
        sums.check("a", SUBJECT, SETS[0])
    assert str(tmp_path) not in str(error.value)


def test_a_record_of_another_version_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr("fedloom.federation.revealed_sums.VERSION", 2)
        checked(tmp_path)
    with refusing(DataError, RECORD, 1, 2):
        RevealedSums(tmp_path)


def test_an_unwritable_folder_is_rejected(tmp_path: Path) -> None:
    with refusing(StorageError, tmp_path):
        RevealedSums(tmp_path / "missing")


def test_the_record_is_bounded_and_keeps_lasting_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.federation.revealed_sums.MOST_IDS", 40)
    sums = checked(tmp_path)
    sizes = []
    for round in range(5, 200):
        for client in ("a", "b"):
            sums.check(client, Subject(round, "train", "Update"), SETS[0])
        sizes.append((tmp_path / RECORD).stat().st_size)
    assert max(sizes) < 30_000
    assert max(sizes[100:]) <= max(sizes[:100])
    for known in (sums, RevealedSums(tmp_path)):
        for client, subject in (("a", LASTING), ("a", Subject(199, "train", "Update"))):
            with refusing(RefusedError, client):
                known.check(client, subject, SETS[0][:3])
        with refusing(RefusedError, "b", 198):
            known.check("b", Subject(198, "train", "Update"), SETS[0][1:])
