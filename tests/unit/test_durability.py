"""State of the disk after a power cut or a kill, how --resume continues from it, and the index of the journal."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from facts import telling
from federations import Federation, clients, federation, setup
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings
from fedloom.algorithms.scaffold import SCAFFOLD
from fedloom.errors import DataError
from fedloom.runs.checkpoint import VERSION, Checkpoint, Checkpoints
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import DONE, EVALUATED, Attempt, ConversationRecord, Journal, Loss, Replay, Version

SETTINGS = FedAvgSettings.model_validate({"local": {"steps": 2, "batch_size": 3, "lr": 0.05}})


def made(folder: Path, rounds: int = 3, checkpoint_every_s: float = 0.0) -> Federation:
    return federation(
        folder, FEDAVG, SETTINGS, setup(), clients((4, 9, 6)), rounds=rounds, checkpoint_every_s=checkpoint_every_s
    )


def test_the_journal_is_durable_before_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per checkpoint, not per round."""
    f = made(tmp_path, rounds=5, checkpoint_every_s=1e9)
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    f.run()  # checkpoints of round 0, and of round 5, which is both the best and the last
    ours = [name for name in synced if name.endswith(".jsonl") or "round-" in name]
    checkpoint = [i for i, name in enumerate(ours) if "round-" in name]
    assert len(checkpoint) == 2
    assert ours[checkpoint[0] + 1 : checkpoint[1]] == ["journal.jsonl", "metrics.jsonl"]
    assert ours.count("journal.jsonl") <= len(checkpoint)  # at round 0 there may be none yet


@pytest.mark.parametrize(("missing", "first"), [([3], 3), ([2], 2), ([1, 2, 3], 1)])
def test_a_journal_without_rounds_before_the_checkpoint_fails(tmp_path: Path, missing: list[int], first: int) -> None:
    whole = made(tmp_path / "whole")
    whole.run()
    made(tmp_path / "cut").run()
    folder = made(tmp_path / "cut").loop.folder
    folder.rewrite("journal.jsonl", [line for line in folder.lines("journal.jsonl") if line["round"] not in missing])
    before = (tmp_path / "cut" / "journal.jsonl").read_bytes()
    with pytest.raises(DataError, match=f"round {first}\\b.*round 3") as raised:
        made(tmp_path / "cut").loop.resume()
    assert f"round {first - 1}" in str(raised.value.hint)
    assert (tmp_path / "cut" / "journal.jsonl").read_bytes() == before
    # Following the hint gives the same bits.
    for path in folder.checkpoints.iterdir():
        if int(path.stem.removeprefix("round-")) >= first:
            path.unlink()
    again = made(tmp_path / "cut")
    again.loop.resume()
    again.run()
    last = "checkpoints/round-000003.safetensors"
    assert (tmp_path / "cut" / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()


def test_the_best_round_survives_a_checkpoint_written_before_its_evaluation(tmp_path: Path) -> None:
    """Stop during the evaluation of the round, resume, and kill once the line of its evaluation is written."""
    f = made(tmp_path, rounds=1)
    f.loop._train_round()
    f.loop._checkpoint()
    f.loop._evaluate_and_note()
    f.loop.checkpoints.close()
    assert f.loop.checkpoints.load().best is None
    lines = (tmp_path / "metrics.jsonl").read_bytes()
    again = made(tmp_path, rounds=1)
    again.loop.resume()
    again.run()
    assert again.loop.best == f.loop.best is not None
    assert again.loop.checkpoints.load().best == f.loop.best
    assert (tmp_path / "metrics.jsonl").read_bytes() == lines


def test_a_finished_run_without_checkpoints_is_not_restarted(tmp_path: Path) -> None:
    f = made(tmp_path)
    f.run()
    folder = f.loop.folder
    folder.write("summary.json", "{}")  # as `fedloom run` ends
    before = [(tmp_path / name).read_bytes() for name in ("journal.jsonl", "metrics.jsonl")]
    for path in folder.checkpoints.iterdir():
        path.unlink()
    with pytest.raises(DataError, match="checkpoints"):
        made(tmp_path).loop.resume()
    assert [(tmp_path / name).read_bytes() for name in ("journal.jsonl", "metrics.jsonl")] == before


@pytest.mark.parametrize(
    ("name", "spoil", "after"),
    [
        ("journal.jsonl", lambda content: content[:-2] + b"\xff}\n", 0),
        ("metrics.jsonl", lambda content: content[:-2] + b"\xff}\n", 0),
        ("metrics.jsonl", lambda content: content + b'"x"\n3\n', 1),
    ],
)
def test_lines_without_objects_are_named(
    tmp_path: Path, name: str, spoil: Callable[[bytes], bytes], after: int
) -> None:
    made(tmp_path).run()
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(spoil(content))
    line = content.count(b"\n") + after
    with pytest.raises(DataError, match=rf"{name}, line {line} is damaged"):
        made(tmp_path).loop.resume()


@pytest.mark.parametrize("about", ["{}", "[]", '{"version": 1, "algorithm": "fedavg"}'])
def test_a_checkpoint_without_metadata_is_rejected(tmp_path: Path, about: str) -> None:
    f = made(tmp_path)
    f.run()
    last = sorted(f.loop.folder.checkpoints.iterdir())[-1]
    save_file({"theta": torch.zeros(1)}, last, metadata={"fedloom": about})
    with pytest.raises(DataError, match="not a checkpoint"):
        made(tmp_path).loop.resume()


@pytest.mark.parametrize("end", ["", " ", '{"round": 7'])
def test_lines_are_read_from_the_end(tmp_path: Path, end: str) -> None:
    made(tmp_path).run()
    folder = RunFolder(tmp_path)
    lines = list(folder.metrics())
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(end)
    placed = list(folder.placed("metrics.jsonl"))
    assert list(folder.line_file("metrics.jsonl").backwards()) == placed[::-1]
    assert list(folder.line_file("metrics.jsonl").backwards('{"round": 3,')) == [
        p for p in placed if p.object == lines[1]
    ]
    last = folder.last_evaluation()
    assert (last[0], folder.last_evaluation(-1)) == (lines[-1], None)
    assert folder.last_evaluation(2) == (lines[0], placed[0].end)
    assert [folder.evaluation_of(line["round"]) for line in lines] == lines
    assert folder.evaluation_of(77) is None


def test_history_is_unchanged_when_a_run_continues(tmp_path: Path) -> None:
    f = made(tmp_path, rounds=2)
    f.run()
    path = tmp_path / "metrics.jsonl"
    before = path.read_bytes()
    f.loop.folder.append("metrics.jsonl", {**f.loop.folder.metrics()[-1], "round": 3})
    assert path.read_bytes() != before
    made(tmp_path, rounds=2).loop.resume()
    assert path.read_bytes() == before


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("every", "evaluations", "read"), [(1, 2000, 2000), (1, 2001, 1001), (7, 5000, 1251)])
def test_a_long_history_is_thinned_as_for_a_curve(tmp_path: Path, every: int, evaluations: int, read: int) -> None:
    made(tmp_path).run()
    folder = RunFolder(tmp_path)
    line = folder.metrics()[0]
    folder.rewrite("metrics.jsonl", ({**line, "round": every * i} for i in range(evaluations)))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 5')
    found = folder.metrics()
    rounds = [each["round"] for each in found]
    assert (len(rounds), rounds[0], rounds[-1]) == (read, 0, every * (evaluations - 1))
    assert len({b - a for a, b in itertools.pairwise(rounds[:-1])}) == 1


@pytest.mark.parametrize("other", [VERSION + 1, VERSION - 1])
def test_a_checkpoint_of_another_format_is_rejected(
    other: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reject newer checkpoints, as after ``helm rollback``, which restores an older image but not older data."""
    writer = Checkpoints(tmp_path)
    with monkeypatch.context() as newer:
        newer.setattr("fedloom.runs.checkpoint.VERSION", other)
        for round in (1, 2):
            writer.save(Checkpoint("fedavg", 1, round, None, {"theta": torch.zeros(1)}))
        writer.close()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with telling(DataError, "round-000002", f"format {other}", f"format {VERSION}") as refused:
        Checkpoints(tmp_path).load("last")
    assert "remove" not in f"{refused.value}{refused.value.hint}"  # the previous round has that format, too
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def scaffold(folder: Path, rounds: int) -> Federation:
    """Run a method whose clients have states, which the journal names."""
    settings = SCAFFOLD.settings.model_validate({"local": {"steps": 2, "batch_size": 3, "lr": 0.05}})
    data = clients((4, 9, 6))
    problem = dataclasses.replace(setup(), roster=tuple(client.id for client in data))
    return federation(folder, SCAFFOLD, settings, problem, data, rounds=rounds, checkpoint_every_s=0.0)


def ends(folder: Path) -> tuple[bytes, list[object]]:
    """Return the last checkpoint of a run, and its evaluations."""
    return (folder / "checkpoints/round-000003.safetensors").read_bytes(), [
        {key: value for key, value in line.items() if key != "digest"}
        for line in RunFolder(folder).lines("metrics.jsonl")
    ]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["journal.jsonl", "metrics.jsonl"])
@pytest.mark.parametrize("seed", range(4))
def test_a_run_with_a_flipped_bit_is_rejected_or_ends_equally(tmp_path: Path, name: str, seed: int) -> None:
    scaffold(tmp_path / "whole", 3).run()
    scaffold(tmp_path / "half", 2).run()
    content = (tmp_path / "half" / name).read_bytes()
    rng = random.Random(seed)
    line_ends = [at for at, byte in enumerate(content) if byte == ord("\n")]
    for at in [*rng.sample(range(len(content)), 12), *line_ends]:
        flipped = bytearray(content)
        flipped[at] ^= 1 << rng.randrange(8)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(tmp_path / "half", tmp_path / "run")
        (tmp_path / "run" / name).write_bytes(flipped)
        again = scaffold(tmp_path / "run", 3)
        if name == "metrics.jsonl" and at == line_ends[-1]:  # as if a crash had cut the line short
            again.loop.resume()
            again.run()
            assert ends(tmp_path / "run") == ends(tmp_path / "whole")
        else:
            with pytest.raises(DataError, match=name) as raised:
                again.loop.resume()
            assert raised.value.hint
            assert (tmp_path / "run" / name).read_bytes() == flipped


@pytest.mark.parametrize("gone", [1, 2])
def test_missing_evaluations_are_repeated_or_reported(tmp_path: Path, gone: int) -> None:
    """The last one may be lost in a kill; the others existed when the journal was written."""
    scaffold(tmp_path / "whole", 3).run()
    scaffold(tmp_path / "run", 2).run()
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 2
    path.write_bytes(b"".join(lines[:-gone]))
    again = scaffold(tmp_path / "run", 3)
    if gone > 1:
        with pytest.raises(DataError, match=r"metrics\.jsonl is damaged"):
            again.loop.resume()
    else:
        again.loop.resume()
        again.run()
        assert ends(tmp_path / "run") == ends(tmp_path / "whole")


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
def test_the_index_fits(tmp_path_factory: pytest.TempPathFactory, lines: list[Attempt], data: st.DataObject) -> None:
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
def test_a_replay_keeps_its_snapshot_of_the_file(
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
