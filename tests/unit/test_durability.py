"""State of the disk after a power cut or a kill, and how --resume continues from it."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from facts import tells
from federations import Federation, clients, federation, setup
from safetensors.torch import save_file

from fedloom.algorithms.fedavg import FEDAVG, FedAvgSettings
from fedloom.algorithms.scaffold import SCAFFOLD
from fedloom.errors import DataError
from fedloom.runs.checkpoint import VERSION, Checkpoint, Checkpoints
from fedloom.runs.folder import RunFolder

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
def test_a_journal_without_the_rounds_before_the_checkpoint_is_rejected(
    tmp_path: Path, missing: list[int], first: int
) -> None:
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


def test_a_known_best_round_is_not_reevaluated(tmp_path: Path) -> None:
    f = made(tmp_path, rounds=1)
    f.run()
    assert f.loop.best is not None
    again = made(tmp_path, rounds=1)
    again.loop.resume()
    assert 1 in [line["round"] for line in again.loop.folder.lines("metrics.jsonl")]
    again.loop.checkpoints.close()


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


@pytest.mark.parametrize("name", ["journal.jsonl", "metrics.jsonl"])
def test_a_binary_file_is_named(tmp_path: Path, name: str) -> None:
    made(tmp_path).run()
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-2] + b"\xff}\n")
    with pytest.raises(DataError, match=rf"{name}, line \d is damaged"):
        made(tmp_path).loop.resume()


def test_a_foreign_line_is_rejected(tmp_path: Path) -> None:
    made(tmp_path).run()
    before = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(before + '"x"\n3\n')
    with pytest.raises(DataError, match=rf"metrics\.jsonl, line {before.count(chr(10)) + 1} is damaged"):
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
    assert last is not None
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
def test_a_long_history_is_read_only_as_far_as_a_curve_shows(
    tmp_path: Path, every: int, evaluations: int, read: int
) -> None:
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
def test_a_checkpoint_of_another_format_names_the_version_that_wrote_it(
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
    with pytest.raises(DataError) as refused:
        Checkpoints(tmp_path).load("last")
    assert tells(str(refused.value), "round-000002", f"format {other}", f"format {VERSION}")
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
