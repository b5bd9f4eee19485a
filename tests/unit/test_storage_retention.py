"""Retention of runs in a store: the removed runs, and that no removed run looks complete."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedloom.cluster.commands import app, seconds
from fedloom.errors import ExperimentError
from fedloom.runs.listing import StoredFolder, expired, remove_folders, stored_partitions, stored_runs, unused
from fedloom.storage import Store, open_store

DAY = 86_400.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write runs of 1 to 4 days ago, the one of 2 days ago unfinished, and a partition."""
    store = open_store(tmp_path / "store")
    store.write("partitions/ff/partition.json", b"{}")
    for days in (1, 2, 3, 4):
        for file in ("experiment.yaml", "published/00000001.json", "blobs/1-ff", "checkpoints/last", "states/a/1"):
            store.write(f"runs/run-{days}/{file}", b"x" * 10)
        if days != 2:
            store.write(f"runs/run-{days}/summary.json", b"{}")
        for path in (tmp_path / "store" / "runs" / f"run-{days}").rglob("*"):
            when = time.time() - days * DAY
            os.utime(path, (when, when))
    return tmp_path / "store"


def left(folder: Path) -> list[str]:
    return [run.name for run in stored_runs(open_store(folder))]


def test_runs_as_stored(folder: Path) -> None:
    runs = stored_runs(open_store(folder))
    assert [run.name for run in runs] == ["run-1", "run-2", "run-3", "run-4"]
    assert [run.finished for run in runs] == [True, False, True, True]
    assert [run.size for run in runs] == [52, 50, 52, 52]


@pytest.mark.parametrize(
    ("keep", "older_than", "gone"),
    [
        (1, None, ["run-3", "run-4"]),  # an unfinished run may be running
        (0, None, ["run-1", "run-3", "run-4"]),
        (9, None, []),
        (None, 2.5, ["run-3", "run-4"]),
        (None, 1.5, ["run-2", "run-3", "run-4"]),
        (2, 1.5, ["run-2", "run-4"]),
        (0, 3.5, ["run-4"]),
    ],
)
def test_selecting_runs_to_remove(folder: Path, keep: int | None, older_than: float | None, gone: list[str]) -> None:
    runs = stored_runs(open_store(folder))
    older_than_s = None if older_than is None else older_than * DAY
    assert [run.name for run in expired(runs, time.time(), keep=keep, older_than_s=older_than_s)] == gone


def test_clean(folder: Path) -> None:
    clean = lambda *arguments: CliRunner().invoke(app, ["clean", str(folder), *arguments])  # noqa: E731
    assert isinstance(clean().exception, ExperimentError)
    assert isinstance(clean("--older-than", "soon").exception, ExperimentError)
    assert "run-4" in clean("--keep", "2", "--dry-run").output
    assert json.loads(clean("--keep", "2", "--dry-run", "--json").output)["runs"][0]["name"] == "run-4"
    assert left(folder) == ["run-1", "run-2", "run-3", "run-4"]
    cleaned = clean("--keep", "2")
    assert "run-4" in cleaned.stderr, "told as it goes, whatever fails later"
    assert "run-3" not in cleaned.output
    assert "1 of 4 runs" in cleaned.stdout
    assert left(folder) == ["run-1", "run-2", "run-3"]
    clean("--older-than", "36h")
    assert left(folder) == ["run-1"]
    assert (folder / "partitions/ff/partition.json").exists()  # young
    os.utime(folder / "partitions/ff/partition.json", (0, 0))
    clean("--keep", "9")
    assert "ff" in clean("--older-than", "36h", "--dry-run").output
    assert (folder / "partitions/ff/partition.json").exists()
    assert "ff" in clean("--older-than", "36h").output
    assert not (folder / "partitions/ff/partition.json").exists()
    assert left(folder) == ["run-1"]


def test_times() -> None:
    assert [seconds("30d"), seconds("12h"), seconds("1.5m"), seconds(None)] == [30 * DAY, 12 * 3600, 90, None]


def test_the_files_that_complete_a_run_are_removed_first(folder: Path) -> None:
    class Recording:
        def __init__(self) -> None:
            self.removed: list[list[str]] = []

        def remove(self, names: list[str]) -> None:
            self.removed.append(names)

    store = Recording()
    remove_folders(store, stored_runs(open_store(folder))[:1])  # type: ignore[arg-type]
    first, rest = store.removed
    assert first == ["runs/run-1/summary.json", "runs/run-1/published/00000001.json"]
    assert sorted(rest) == [
        f"runs/run-1/{n}" for n in ("blobs/1-ff", "checkpoints/last", "experiment.yaml", "states/a/1")
    ]


def test_every_store_returns_modification_times(store: Store) -> None:
    store.write("runs/a/summary.json", b"{}")
    (run,) = stored_runs(store)
    assert abs(run.modified - time.time()) < 60


def test_unreferenced_partitions_are_removed(store: Store) -> None:
    manifests = {name: name.encode() for name in ("ended", "going", "alone")}
    for name, manifest in manifests.items():
        store.write(f"partitions/{name}/shards/a", b"x" * 10)
        store.write(f"partitions/{name}/partition.json", manifest)
    store.write("partitions/half/shards/a", b"x")  # interrupted during publication
    store.write("runs/ended/summary.json", b"{}")
    store.write("runs/ended/partition.json", manifests["ended"])
    store.write(f"runs/going/blobs/00000001-{hashlib.sha256(manifests['going']).hexdigest()}", manifests["going"])
    runs, later = stored_runs(store), time.time() + 3 * DAY

    def of(kept: list[StoredFolder], now: float = later, older_than_s: float = 2 * DAY) -> tuple[list[str], list[str]]:
        gone, silent = unused(store, stored_partitions(store), kept, now, older_than_s=older_than_s)
        return [partition.name for partition in gone], [run.name for run in silent]

    assert of(runs) == (["alone", "half"], [])
    assert of([run for run in runs if run.finished]) == (["alone", "going", "half"], [])
    assert of([]) == (["alone", "ended", "going", "half"], [])
    assert of([], older_than_s=4 * DAY) == ([], [])
    remove_folders(store, unused(store, stored_partitions(store), runs, later, older_than_s=0)[0])
    assert [partition.name for partition in stored_partitions(store)] == ["ended", "going"]
    store.write("runs/begun/experiment.yaml", b"x")  # its record does not name its partition yet
    assert of(stored_runs(store)) == ([], ["begun"])
