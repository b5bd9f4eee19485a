"""The journal of a long run: its index in memory does not grow, and matches the file."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.errors import DataError
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import DONE, EVALUATED, Attempt, ConversationRecord, Journal, Loss, Replay, Version

CLIENTS = [f"c{i}" for i in range(4)]


@st.composite
def attempts(draw: st.DrawFn) -> list[Attempt]:
    """Write the attempts of a run, as it would."""
    found: list[Attempt] = []
    for t in range(1, draw(st.integers(1, 8)) + 1):
        failures = draw(st.integers(0, 2))
        for number in range(1, failures + 2):
            cohort = draw(st.lists(st.sampled_from(CLIENTS), min_size=1, max_size=5))
            rows = draw(st.sets(st.integers(0, len(cohort) - 1)))
            losses = [Loss(row, cohort[row], 0, "late") for row in sorted(rows)]
            done = number == failures + 1
            loss = {"loss": draw(st.floats(-10, 10))} if draw(st.booleans()) else {}
            found.append(
                Attempt(
                    t,
                    number,
                    DONE if done else "too few",
                    [ConversationRecord(cohort, losses)],
                    {"client_steps": float(draw(st.integers(0, 9))), **loss} if done else {},
                    seconds=draw(st.floats(0, 5)),
                    payload_up=draw(st.integers(0, 99)),
                    wire_up=draw(st.sampled_from([None, 3, 4])),
                )
            )
        if draw(st.booleans()):
            found.append(Attempt(t, 0, EVALUATED, [ConversationRecord(CLIENTS, [Loss(0, "c0", 0, "late")])]))
    return found


def written(folder: Path, lines: list[Attempt]) -> RunFolder:
    found = RunFolder(folder)
    found.make()
    found.rewrite("journal.jsonl", map(asdict, lines))
    return found


def latest(lines: list[Attempt], client: str, round: int) -> Version | None:
    """Return by definition the row of the last round up to this one that counted the client."""
    return max(
        (
            Version(a.round, a.attempt, n, row, a.life)
            for a in lines
            if a.outcome == DONE and a.round <= round
            for n, conversation in enumerate(a.conversations)
            for row, member in enumerate(conversation.clients)
            if member == client and row not in {loss.row for loss in conversation.lost}
        ),
        default=None,
    )


@given(attempts(), st.data())
def test_the_index_matches_the_file(
    tmp_path_factory: pytest.TempPathFactory, lines: list[Attempt], data: st.DataObject
) -> None:
    folder = written(tmp_path_factory.mktemp("run"), lines)
    last = data.draw(st.integers(0, lines[-1].round))
    needed = data.draw(st.sets(st.integers(0, last)))
    evaluated = data.draw(st.integers(-1, last))
    journal = Journal.read(folder, last, needed, evaluated)
    kept = [a for a in lines if a.round <= last]
    done = [a for a in kept if a.outcome == DONE]
    assert journal.whole == journal.counted_rounds == last
    costs = journal.costs
    assert costs.payload_up == sum(a.payload_up for a in done)
    wires = [a.wire_up for a in done]
    assert costs.wire_up == (None if None in wires else sum(wires))
    assert costs.client_steps == sum(a.statistics["client_steps"] for a in done)
    assert costs.seconds == pytest.approx(sum(a.seconds for a in kept))
    losses = [a.statistics["loss"] for a in done if a.round > evaluated and "loss" in a.statistics]
    assert journal.train_loss() == (sum(losses) / len(losses) if losses else None)
    assert journal.train_loss() is None
    for client in CLIENTS:
        for round in (*needed, last):
            assert journal.version(client, round) == latest(lines, client, round)
    journal.rewind()
    assert folder.lines("journal.jsonl") == [asdict(a) for a in kept]
    journal.append(Attempt(last + 1, 1, statistics={"client_steps": 1.0}))
    assert [a.round for a in journal.counted()] == list(range(1, last + 2))


@given(attempts())
def test_a_replay_finds_each_round_and_keeps_its_snapshot_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, lines: list[Attempt]
) -> None:
    folder = written(tmp_path_factory.mktemp("run"), lines)
    replay = Replay(folder)
    folder.rewrite("journal.jsonl", [])
    for attempt in lines:
        if attempt.outcome == DONE:
            assert replay.attempt(attempt.round) == attempt
        if attempt.outcome == EVALUATED:
            assert replay.evaluation(attempt.round) == attempt
    with pytest.raises(DataError, match=rf"round {lines[-1].round}\b"):
        replay.attempt(lines[-1].round + 1)


def test_memory_does_not_grow_with_rounds(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.make()
    journal = Journal(folder)
    sizes = []
    for t in range(1, 2001):
        conversation = ConversationRecord(CLIENTS, [Loss(t % 4, CLIENTS[t % 4], 0, "late")])
        journal.append(Attempt(t, 1, DONE, [conversation], {"client_steps": 5.0, "loss": 1.0}))
        journal.needed = {t - t % 10, 100}
        if t % 10 == 0:
            journal.train_loss()
        if t in (1000, 2000):
            sizes.append(_size(journal.__dict__))
    assert sizes[1] <= sizes[0] + 100
    assert sum(len(versions) for versions in journal._kept.values()) <= 4 * len(CLIENTS)


def _size(value: object) -> int:
    """Return the bytes of a value and of its content."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
    return sys.getsizeof(value) + sum(_size(part) for part in inner)


@pytest.mark.parametrize("end", ["", "\n", '\n{"round": 3, "att'])
def test_a_line_without_an_end_is_ignored(tmp_path: Path, end: str) -> None:
    lines = [Attempt(t, 1, statistics={"client_steps": 1.0}) for t in (1, 2)]
    folder = written(tmp_path, lines)
    path = tmp_path / "journal.jsonl"
    path.write_bytes(path.read_bytes().rstrip(b"\n") + end.encode())
    journal = Journal.read(folder)
    assert journal.whole == (1 if end == "" else 2)
    journal.rewind()
    journal.append(Attempt(journal.whole + 1, 1, statistics={"client_steps": 1.0}))
    assert [a.round for a in journal.counted()] == list(range(1, journal.whole + 1))
