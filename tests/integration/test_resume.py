"""Runs that --resume continues and rejects; missing and damaged data; a full disk."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from facts import tells
from ports import free_port
from run_processes import experiment, fedloom, final, scores

from fedloom.cli.run import run_command as command
from fedloom.core import digests
from fedloom.engine.observer import RunObserver
from fedloom.engine.options import RunOptions, ServingOptions
from fedloom.engine.run_experiment import run_experiment
from fedloom.errors import DataError, ExitCode, ExperimentError, FedloomError
from fedloom.experiment import load_experiment
from fedloom.runs.checkpoint import Checkpoints
from fedloom.runs.folder import RunFolder

pytestmark = [pytest.mark.data, pytest.mark.timeout(600), pytest.mark.group("runs")]


@pytest.fixture
def copy(small_run: tuple[Path, Path], tmp_path: Path) -> Path:
    """Return a copy of the finished small run, to damage."""
    return Path(shutil.copytree(small_run[1], tmp_path / "copy"))


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return the modification time and content of every file of a folder."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def refused(kind: type[FedloomError], code: ExitCode, *arguments: Any, **options: Any) -> str:
    """Return the error message of a run that cannot start. The command runs in this process."""
    with pytest.raises(kind) as failure:
        command(*arguments, **options)
    assert failure.value.exit_code is code
    return str(failure.value)


def back_to(copy: Path, round: int) -> None:
    """Remove everything after a checkpoint, as if the run had been killed then."""
    for path in (copy / "checkpoints").iterdir():
        if int(path.stem.removeprefix("round-")) > round:
            path.unlink()
    (copy / "summary.json").unlink()


# --- what is there already --------------------------------------------------------------------------------------------


def test_an_existing_run_is_kept_without_resume(small_run: tuple[Path, Path], copy: Path) -> None:
    before = files(copy)
    output = refused(ExperimentError, ExitCode.EXPERIMENT, small_run[0], out=copy)
    assert "resume=True" in output
    assert files(copy) == before


def test_a_folder_that_is_not_a_run_is_kept(small_run: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    for resume in (False, True):
        output = refused(ExperimentError, ExitCode.EXPERIMENT, small_run[0], out=tmp_path / "mine", resume=resume)
        assert "neither empty nor a run" in output
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_changed_settings_are_named_and_rejected(small_run: tuple[Path, Path], copy: Path) -> None:
    before = files(copy)
    overrides = ["seed=6", "algorithm.local={epochs: 3, batch_size: 16, lr: 0.02}", "federation.min_replies=2"]
    output = refused(ExperimentError, ExitCode.EXPERIMENT, small_run[0], set_=overrides, out=copy, resume=True)
    assert tells(output, "seed", 6, 5)
    assert tells(output, "algorithm.local.epochs", 3, 2)
    assert tells(output, "federation.min_replies", 2, 1)
    assert files(copy) == before


def test_another_partition_is_rejected(small_run: tuple[Path, Path], copy: Path) -> None:
    document = json.loads((copy / "partition.json").read_text())
    document["clients"][0]["sha256"] = "0" * 64
    del document["digest"]
    RunFolder(copy).write("partition.json", digests.with_compact_digest(json.dumps(document)))
    output = refused(DataError, ExitCode.DATA, small_run[0], out=copy, resume=True)
    assert "started with partition" in output


def test_only_one_process_works_on_a_run(small_run: tuple[Path, Path], copy: Path) -> None:
    before = files(copy)
    with RunFolder(copy).held():
        output = refused(ExperimentError, ExitCode.EXPERIMENT, small_run[0], out=copy, resume=True)
    assert str(copy) in output
    assert files(copy) == before


# --- journals to replay -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "rounds", "output"),
    [
        (lambda line: line, 9, "no round 9 (it ends with round 4)"),
        (lambda line: {**line, "conversations": 3}, 4, "not a journal of this version"),
        (lambda line: {**line, "surprise": 1}, 4, "not a journal of this version"),
    ],
)
def test_journals_that_cannot_be_replayed_are_rejected_at_once(
    small_run: tuple[Path, Path],
    copy: Path,
    tmp_path: Path,
    spoil: Callable[[dict[str, Any]], dict[str, Any]],
    rounds: int,
    output: str,
) -> None:
    folder = RunFolder(copy)
    folder.rewrite("journal.jsonl", [spoil(line) for line in folder.lines("journal.jsonl")])
    out = tmp_path / "again"
    overrides = [f"federation.rounds={rounds}"]
    assert output in refused(DataError, ExitCode.DATA, small_run[0], set_=overrides, replay=copy, out=out)
    assert not out.exists()


# --- crashes ----------------------------------------------------------------------------------------------------------


def test_partially_written_lines_and_files_of_a_crash(small_run: tuple[Path, Path], copy: Path) -> None:
    back_to(copy, 3)
    RunFolder(copy).reopen_lines()
    for name in ("journal.jsonl", "metrics.jsonl"):
        whole = (copy / name).read_bytes()
        (copy / name).write_bytes(whole[: len(whole) - 40])
    partial = copy / "checkpoints" / ".round-000004.safetensors.77.partial"
    partial.write_bytes(b"half")
    fedloom("run", small_run[0], "--out", copy, "--resume")
    assert final(copy) == final(small_run[1])
    assert scores(copy) == scores(small_run[1])
    assert [line["round"] for line in RunFolder(copy).lines("metrics.jsonl")] == [0, 2, 4]
    assert [line["round"] for line in RunFolder(copy).lines("journal.jsonl")] == [1, 2, 3, 4]
    assert not partial.exists()


def test_a_damaged_checkpoint(small_run: tuple[Path, Path], copy: Path) -> None:
    last = copy / "checkpoints" / "round-000004.safetensors"
    whole = last.read_bytes()
    for damaged in (b"", b"\xff" * 64 + whole[64:], whole[: len(whole) // 2]):
        last.write_bytes(damaged)
        with pytest.raises(DataError, match="not a checkpoint"):
            Checkpoints(copy / "checkpoints").load("last")
    output = fedloom("run", small_run[0], "--out", copy, "--resume", code=3)
    assert tells(output, last, "not a checkpoint", "--checkpoint", 3, "--resume")
    last.unlink()
    fedloom("run", small_run[0], "--out", copy, "--resume")
    assert final(copy) == final(small_run[1])
    assert scores(copy) == scores(small_run[1])


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written(small_run: tuple[Path, Path], copy: Path) -> None:
    """A limit on the size of files fails a write in the middle, like a full disk."""
    back_to(copy, 3)
    durable = final(copy)
    blocks = len(durable) // 1024 // 2
    output = fedloom("run", small_run[0], "--out", copy, "--resume", code=6, before=f"ulimit -f {blocks}")
    assert tells(output, "round-000004.safetensors", "file too large", "--resume")
    assert sorted(path.name for path in (copy / "checkpoints").iterdir())[-1] == "round-000003.safetensors"
    assert final(copy) == durable
    fedloom("run", small_run[0], "--out", copy, "--resume")
    assert final(copy) == final(small_run[1])
    assert scores(copy) == scores(small_run[1])


# --- data -------------------------------------------------------------------------------------------------------------


def test_a_missing_data_set(tmp_path: Path) -> None:
    path = experiment(tmp_path, tmp_path / "nowhere")
    output = refused(DataError, ExitCode.DATA, path, out=tmp_path / "run")
    assert "fedloom data fetch fashion-mnist" in output
    assert not (tmp_path / "run").exists()


def test_a_damaged_shard(fresh_root: Path, tmp_path: Path) -> None:
    from fedloom.cli.data import partition_command as partition
    from fedloom.engine.run_data import make_partition

    path = experiment(tmp_path, fresh_root, data={"validation_fraction": 0.2})
    dataset = make_partition(load_experiment(path))
    shard = dataset.folder / "shards" / "client-0003.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for _ in range(2):  # damage is reported every time, and fixed by the suggested command
        output = refused(DataError, ExitCode.DATA, path, out=tmp_path / "run")
        assert str(shard) in output
        assert "fedloom partition EXPERIMENT" in output
        assert not (tmp_path / "run").exists()
    partition(path)
    assert shard.read_bytes() == whole
    make_partition(load_experiment(path))


def test_restarting_a_finished_run_reports_its_durable_round(copy: Path) -> None:
    """Otherwise the alert for pods that serve models would never fire: docs/chart.md."""
    port = free_port()
    reported = []

    class Asks(RunObserver):
        def notice(self, message: str) -> None:
            if tells(message, "finished", "round", e.federation.rounds):
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
                    reported.append(answer.read().decode())

    e = load_experiment(copy / "experiment.yaml")
    at = ServingOptions(listen="127.0.0.1:0", metrics=f"127.0.0.1:{port}")
    run_experiment(e, RunOptions(copy, resume=True, report=False, serving=at), Asks())
    assert f"fedloom_durable_round {e.federation.rounds}.0" in reported[0]
    assert f"fedloom_measured_round {e.federation.rounds}.0" in reported[0]
