"""Changes that ``--resume`` accepts in a published run, and those it rejects before it changes a file."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from facts import tells
from s3_support import S3Server

from fedloom.cli.run import aggregator_command as aggregator
from fedloom.cli.run import run_command as run
from fedloom.core import digests
from fedloom.errors import DataError, ExperimentError, StorageError
from fedloom.experiment import load_experiment
from fedloom.runs.folder import RunFolder
from fedloom.runs.published import FOLDER, Publisher, Record
from fedloom.storage import open_store
from fedloom.tuning import sweep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("forks")]

command = partial(run, report=False)  # a report takes longer than these runs: the tests of reports write them


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a new bucket, for runs of this process."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3_server.new_bucket()}"


@pytest.fixture
def experiment(tiny_root: Path, tmp_path: Path) -> Any:
    """Write a small experiment."""

    def write(seed: int = 1) -> Path:
        tree = {
            "name": "tiny",
            "seed": seed,
            "data": {"dataset": "tiny", "root": str(tiny_root), "partition": {"scheme": "iid", "clients": 6}},
            "model": {"name": "mlp", "hidden": [4]},
            "algorithm": {"name": "fedavg", "local": {"epochs": 1, "batch_size": 16, "lr": 0.05}},
            "federation": {"rounds": 1, "clients_per_round": 3, "checkpoint_every_s": 0},
            "evaluation": {"every": 1, "cohort": 6},
            "runtime": {"workers": 0},
        }
        path = tmp_path / f"{seed}.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    return write


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_publishing_over_another_run_changes_nothing(bucket: str, experiment: Any, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    command(experiment(1), out=mine)
    command(experiment(2), out=tmp_path / "other", publish=f"{bucket}/other")
    before = files(mine)
    with pytest.raises(ExperimentError) as refused:
        command(experiment(1), out=mine, publish=f"{bucket}/other", resume=True)
    assert f"{bucket}/other holds another experiment" in str(refused.value)
    assert tells(str(refused.value), "seed", 1, 2)
    assert files(mine) == before


def test_publishing_over_another_partition_changes_nothing(bucket: str, experiment: Any, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    command(experiment(), out=mine, publish=f"{bucket}/other")
    document = json.loads((mine / "partition.json").read_text())
    document["clients"][0]["sha256"] = "0" * 64
    del document["digest"]
    RunFolder(mine).write("partition.json", digests.with_compact_digest(json.dumps(document)))
    before = files(mine)
    with pytest.raises(DataError, match="started with partition"):
        command(experiment(), out=mine, publish=f"{bucket}/other", resume=True)
    assert files(mine) == before


def test_a_run_without_client_states_may_be_published_elsewhere(bucket: str, experiment: Any, tmp_path: Path) -> None:
    path = experiment()
    command(path, out=tmp_path / "run", publish=f"{bucket}/one")
    command(path, set_=["federation.rounds=2"], out=tmp_path / "run", publish=f"{bucket}/two", resume=True)
    assert json.loads((tmp_path / "run" / "published.json").read_text())["url"] == f"{bucket}/two"
    command(path, set_=["federation.rounds=3"], out=tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / "published.json").exists()


def test_a_run_without_a_report_logs_nothing_about_it(
    experiment: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = experiment(), tmp_path / "run"
    with pytest.raises(typer.Exit):
        command(path, out=out).print(as_json=False)
    assert not (out / "report.html").exists()
    assert not (out / "figures").exists()
    assert "report:" not in capsys.readouterr().out
    command(path, out=out, resume=True)
    assert not (out / "report.html").exists()
    with pytest.raises(typer.Exit):
        run(path, out=out, resume=True).print(as_json=False)  # a finished run gets its missing files
    assert (out / "report.html").exists()
    assert f"report: {out}" in capsys.readouterr().out


# --- a run that is finished -------------------------------------------------------------------------------------------


def unmoved(folder: Path) -> dict[str, int]:
    """Return each file's time of modification, which changes if the file is written again."""
    return {name: (folder / name).stat().st_mtime_ns for name in files(folder)}


@pytest.mark.parametrize("by", ["run", pytest.param("aggregator", marks=pytest.mark.exhaustive)])
def test_a_finished_run_needs_no_worker(by: str, experiment: Any, tmp_path: Path) -> None:
    path, out = experiment(), tmp_path / "run"
    run(path, out=out)
    before = files(out), unmoved(out)
    if by == "run":
        command(path, out=out, resume=True, workers=2)
    else:
        aggregator(path, out=out, resume=True, listen="127.0.0.1:0", wait_s=1)
    assert (files(out), unmoved(out)) == before
    (out / "report.html").unlink()  # as if killed before it was written
    aggregator(path, out=out, resume=True, listen="127.0.0.1:0", wait_s=1)
    assert set(files(out)) == set(before[0])
    assert (out / "summary.json").read_bytes() == before[0]["summary.json"]
    command(path, out=out, resume=True, set_=["federation.rounds=2"])  # more rounds than it has
    assert json.loads((out / "summary.json").read_text())["rounds"] == 2


@pytest.mark.exhaustive  # a server lingers for twenty seconds
def test_a_finished_run_can_be_published_elsewhere(
    bucket: str, experiment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its last publication; no worker is left, and the folder is lost with its machine."""
    path, place = experiment(), f"{bucket}/one"
    record = Publisher._record

    def killed(self: Publisher, made: Record) -> None:
        if any(blobs[0].startswith(FOLDER) for blobs in made.files.values()):
            raise StorageError("killed")
        record(self, made)

    with monkeypatch.context() as faulty:
        faulty.setattr(Publisher, "_record", killed)
        with pytest.raises(StorageError, match="killed"):
            command(path, out=tmp_path / "a", publish=place)
    summary = (tmp_path / "a" / "summary.json").read_bytes()
    for there in ("b", "c"):  # the second finds nothing to do
        aggregator(path, out=tmp_path / there, publish=place, resume=True, listen="127.0.0.1:0", wait_s=1)
        store = open_store(place)
        assert store.read("summary.json") == summary
        assert store.read("report.html") == (tmp_path / there / "report.html").read_bytes()
        assert any(store.entries("figures/"))
        assert sweep.complete(RunFolder(tmp_path / there), load_experiment(path))
    assert len([*open_store(place).entries("published/")]) == len([*record_numbers(place)])


def record_numbers(place: str) -> list[str]:
    """Return the numbers of records up to the first that ends a run."""
    store, found = open_store(place), []
    for entry in store.entries("published/"):
        found.append(entry.name)
        if any(blobs[0].startswith(FOLDER) for blobs in json.loads(store.read(entry.name))["files"].values()):
            break
    return found
