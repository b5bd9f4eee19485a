"""A published run: another aggregator continues it to the same bits, and only one of two continues."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from facts import telling, tells
from forked import Popen
from hypothesis import given
from hypothesis import strategies as st
from published_runs import aggregator, run_folder
from s3_support import S3Server
from test_states import made as federation_that_remembers

from fedloom.core.files import copy_atomically
from fedloom.engine.options import RunOptions
from fedloom.engine.publication import Publication
from fedloom.errors import DataError, ExitCode, ExperimentError, QuorumError, StorageError
from fedloom.experiment import parse_experiment
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import Replay
from fedloom.runs.published import SEGMENTS, PublishedRun, Publisher, segments
from fedloom.serving.serve import waiting
from fedloom.storage import Absent, Store, open_store
from fedloom.storage.folder import FolderStore

SMALL = """
name: small
data: {dataset: fashion-mnist, partition: {scheme: classes, clients: 10, classes_per_client: 2}}
model: {name: logistic}
algorithm: {name: fedavg, local: {epochs: 1, batch_size: 8, lr: 0.05}}
federation: {rounds: 9, clients_per_round: 4}
"""


def contents(path: Path) -> dict[str, str]:
    return {file.relative_to(path).as_posix(): file.read_text() for file in path.rglob("*") if file.is_file()}


def records(store: Store) -> list[dict[str, Any]]:
    return [json.loads(store.read(entry.name)) for entry in store.entries("published/")]


def test_a_published_run_is_resumed_on_another_machine(store: Store, tmp_path: Path) -> None:
    assert not aggregator(tmp_path / "b", store, "b").restore()
    assert not (tmp_path / "b").exists()
    a = aggregator(tmp_path / "a", store, "a")
    for round in (3, 4, 5):
        run_folder(tmp_path / "a", round)
        a.publish(round)
    assert aggregator(tmp_path / "b", store, "b").restore()
    assert contents(tmp_path / "b") == contents(tmp_path / "a")
    assert [(r["number"], r["round"], r["incarnation"]) for r in records(store)] == [(n, n + 2, "a") for n in (1, 2, 3)]
    # Files of older records are removed, and none is copied twice.
    blobs = [entry.name.removeprefix("blobs/") for entry in store.entries("blobs/")]
    last = records(store)[-1]
    assert sorted(blob for (blob,) in last["files"].values()) == blobs
    assert last["files"]["partition.json"][0].startswith("00000001-")  # from its first publication
    assert last["files"]["checkpoints/round-000004.safetensors"][0].startswith("00000002-")
    assert last["files"]["checkpoints/round-000005.safetensors"][0].startswith("00000003-")


def test_a_model_server_waits_for_the_runs_first_publication(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{s3_server.new_bucket()}/runs/late"
    run_folder(tmp_path / "a", 1)
    asked: list[float] = []

    def wait(seconds: float) -> bool:
        asked.append(seconds)
        if len(asked) == 2:
            aggregator(tmp_path / "a", open_store(url), "a").publish(1)
        return True

    copy = RunFolder.open(url, wait=wait)
    assert contents(copy.path) == contents(tmp_path / "a")
    assert len(asked) == 2
    run_folder(tmp_path / "a", 3)
    again = aggregator(tmp_path / "a", open_store(url), "b")
    again.restore()
    run_folder(tmp_path / "a", 3)
    again.publish(3)
    copy.refresh()
    assert contents(copy.path) == contents(tmp_path / "a")
    place = copy.path
    del copy
    assert not place.exists()
    output: list[str] = []
    stop = threading.Event()
    patient, at_once = waiting(url, 600.0, stop, output.append), waiting(url, 0.0, stop, output.append)
    assert patient(0.0)
    assert patient(0.0)
    assert not at_once(600.0)
    stop.set()
    assert not patient(600.0)
    assert len(output) == 1
    with pytest.raises(DataError, match="no published run"):
        RunFolder.open(f"{url}-other")


@given(st.integers(0, 1 << 27), st.integers(0, 1 << 20))
def test_segments_cover_a_file_and_stay_as_it_grows(size: int, more: int) -> None:
    ends = [begin + length for begin, length in segments(size)]
    assert [begin for begin, _ in segments(size)] == [0, *ends[:-1]]
    assert ends[-1] == size
    assert len(ends) <= size // SEGMENTS[0] + 15
    assert len({cut for cut in segments(size + more) if cut[1] == SEGMENTS[0]}) >= size // SEGMENTS[0]
    whole = [cut for cut in segments(size) if cut[1] == SEGMENTS[0]]
    assert segments(size + more)[: len(whole)] == whole


@pytest.mark.slow
def test_publishing_copies_only_new_lines(tmp_path: Path) -> None:
    copied: list[int] = []

    class Counting(FolderStore):
        def write(self, name: str, content: bytes, *, durably: bool = True) -> None:
            copied.append(len(content))
            super().write(name, content, durably=durably)

    folder = run_folder(tmp_path / "a", 1)
    a = aggregator(tmp_path / "a", Counting(tmp_path / "store"), "a")
    line = {"text": "x" * 10_000}
    per_publication = []
    for round in range(1, 200):
        for number in range(10):
            folder.append("journal.jsonl", {"round": round, "number": number, **line})
        before = sum(copied)
        a.publish(round)
        per_publication.append(sum(copied) - before)
    size = (tmp_path / "a" / "journal.jsonl").stat().st_size
    assert size > SEGMENTS[0]
    assert sum(per_publication) < 200 * SEGMENTS[-1] + 4 * size
    assert sorted(per_publication)[100] <= SEGMENTS[-1] + 200_000  # half of them publish only the end
    assert len(records(open_store(tmp_path / "store"))[-1]["files"]["journal.jsonl"]) < 20
    b = aggregator(tmp_path / "b", open_store(tmp_path / "store"), "b")
    assert b.restore()
    assert contents(tmp_path / "b") == contents(tmp_path / "a")
    # A replaced file is published completely, though its beginning was known.
    whole = (tmp_path / "b" / "journal.jsonl").read_text()
    for text in (whole[: SEGMENTS[0] + 5], "y" * len(whole), whole + "more\n"):
        (tmp_path / "b" / "journal.jsonl").write_text(text)
        b.publish(200)
        assert aggregator(tmp_path / "c", open_store(tmp_path / "store"), "c").restore()
        assert (tmp_path / "c" / "journal.jsonl").read_text() == text


def test_a_copy_is_updated_incrementally(tmp_path: Path) -> None:
    copied: list[str] = []

    class Counting(FolderStore):
        def download(self, name: str, path: Path) -> None:
            copied.append(name)
            super().download(name, path)

    folder = run_folder(tmp_path / "a", 1)
    a = aggregator(tmp_path / "a", FolderStore(tmp_path / "store"), "a")
    copy = PublishedRun(Counting(tmp_path / "store"), tmp_path / "copy")
    for round in range(1, 50):
        for number in range(10):
            folder.append("journal.jsonl", {"round": round, "number": number, "text": "x" * 10_000})
        a.publish(round)
        copied.clear()
        assert copy.restore()
        assert contents(tmp_path / "copy") == contents(tmp_path / "a")
        assert round == 1 or len(copied) <= len(SEGMENTS)  # only the end of the journal
    lines = list(folder.placed("journal.jsonl"))
    folder.line_file("journal.jsonl").cut(lines[200].end)  # as if the run were resumed from an earlier round
    folder.append("journal.jsonl", {"round": 50})
    (tmp_path / "a" / "checkpoints" / "round-000000.safetensors").unlink()
    a.publish(50)
    assert copy.restore()
    assert contents(tmp_path / "copy") == contents(tmp_path / "a")
    copied.clear()
    assert copy.restore()
    assert copied == []


def test_restoring_replaces_the_folders_content_unless_the_run_is_rejected(store: Store, tmp_path: Path) -> None:
    run_folder(tmp_path / "a", 4)
    aggregator(tmp_path / "a", store, "a").publish(4)
    run_folder(tmp_path / "b", 7)  # rounds that were trained and never published
    (tmp_path / "b" / "notes.txt").write_text("mine")
    before = contents(tmp_path / "b")
    found = {}

    def refuse(folder: Path) -> None:
        found.update(contents(folder))
        raise ExperimentError("another experiment")

    with pytest.raises(ExperimentError, match="another experiment"):
        aggregator(tmp_path / "b", store, "b").restore(refuse)
    assert contents(tmp_path / "b") == before
    assert found == contents(tmp_path / "a")
    assert aggregator(tmp_path / "b", store, "b").restore()
    assert contents(tmp_path / "b") == {**contents(tmp_path / "a"), "notes.txt": "mine"}


def test_an_interrupted_restore_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after any number of files, the folder is a valid run with the location of its rounds' states."""
    store = open_store(tmp_path / "store")
    run_folder(tmp_path / "a", 4).write_json("published.json", {"url": store.url})
    aggregator(tmp_path / "a", store, "a").publish(4)
    files = len(contents(tmp_path / "a"))
    for done in range(1, files):
        left = done

        def copy(source: Path, path: Path) -> None:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            copy_atomically(source, path)

        folder = tmp_path / f"b{done}"
        monkeypatch.setattr("fedloom.runs.published.copy_atomically", copy)
        with pytest.raises(KeyboardInterrupt):
            aggregator(folder, store, "b").restore()
        assert len(contents(folder)) == done
        assert "experiment.yaml" in contents(folder)
        assert "published.json" in contents(folder) or "journal.jsonl" not in contents(folder)
        monkeypatch.undo()
        assert aggregator(folder, store, "b").restore()
        assert contents(folder) == contents(tmp_path / "a")


def test_only_one_of_two_aggregators_continues(store: Store, tmp_path: Path) -> None:
    run_folder(tmp_path / "a", 4)
    first = aggregator(tmp_path / "a", store, "first")
    first.publish(4)
    second = aggregator(tmp_path / "b", store, "second")
    second.restore()
    run_folder(tmp_path / "b", 6)
    second.publish(6)
    run_folder(tmp_path / "a", 7)  # a later round, but not a continuation of the last record it knows
    for act in (lambda: first.publish(7), first.finish):
        with pytest.raises(StorageError) as raised:
            act()
        assert raised.value.exit_code == ExitCode.STORAGE
        assert tells(str(raised.value), "second", "round 6", "first")
    assert aggregator(tmp_path / "c", store, "third").restore()
    assert contents(tmp_path / "c") == contents(tmp_path / "b")
    run_folder(tmp_path / "b", 8)
    second.publish(8)
    # Files that the first copied before it was stopped are removed, too.
    assert {entry.name.removeprefix("blobs/") for entry in store.entries("blobs/")} == {
        blob for blobs in records(store)[-1]["files"].values() for blob in blobs
    }


class HeldUp(FolderStore):
    """A store that blocks at one moment until another event has happened."""

    def __init__(self, folder: Path, method: str, meanwhile: Any) -> None:
        super().__init__(folder)
        self.method, self.meanwhile = method, meanwhile

    def _wait(self, method: str) -> None:
        if method == self.method:
            self.method = ""
            self.meanwhile()

    def entries(self, prefix: str = "") -> Any:
        self._wait(f"entries of {prefix}")
        return super().entries(prefix)

    def download(self, name: str, path: Path) -> None:
        self._wait("download")
        super().download(name, path)


def test_an_aggregator_delayed_after_its_record_removes_nothing_of_its_successor(tmp_path: Path) -> None:
    plain = FolderStore(tmp_path / "store")

    def successor() -> None:
        c = aggregator(tmp_path / "c", plain, "c")
        assert c.restore()
        run_folder(tmp_path / "c", 6)
        c.publish(6)

    run_folder(tmp_path / "a", 3)
    aggregator(tmp_path / "a", plain, "a").publish(3)
    held_up = aggregator(tmp_path / "b", HeldUp(tmp_path / "store", "entries of blobs/", successor), "b")
    held_up.restore()
    run_folder(tmp_path / "b", 4)
    held_up.publish(4)
    assert [record["round"] for record in records(plain)] == [3, 4, 6]
    assert aggregator(tmp_path / "d", plain, "d").restore()
    assert contents(tmp_path / "d") == contents(tmp_path / "c")


def test_restoring_during_a_replacement_takes_the_newer_publication(tmp_path: Path) -> None:
    plain = FolderStore(tmp_path / "store")
    run_folder(tmp_path / "a", 3)
    a = aggregator(tmp_path / "a", plain, "a")
    a.publish(3)

    def publish_again() -> None:
        run_folder(tmp_path / "a", 9)
        a.publish(9)

    b = aggregator(tmp_path / "b", HeldUp(tmp_path / "store", "download", publish_again), "b")
    assert b.restore()
    assert contents(tmp_path / "b") == contents(tmp_path / "a")
    run_folder(tmp_path / "b", 10)
    b.publish(10)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda store: store.remove([store_blob(store)]), "the published run is incomplete"),
        (lambda store: store.write(store_blob(store), b"other"), "is damaged"),
        (lambda store: store.write("published/00000001.json", b"{"), "not a record of a published run"),
        (lambda store: store.write("published/00000001.json", b"[]"), "not a record of a published run"),
        (lambda store: rewrite(store, version=99), "published by another version of FedLoom"),
        (lambda store: rewrite(store, files={"../escape": [store_blob(store)[6:]]}), "not a record of a published run"),
        (lambda store: rewrite(store, files={"/etc/x": [store_blob(store)[6:]]}), "not a record of a published run"),
    ],
)
def test_damaged_publications_are_not_resumed(tmp_path: Path, damage: Any, says: str) -> None:
    store = open_store(tmp_path / "store")
    run_folder(tmp_path / "a", 4)
    aggregator(tmp_path / "a", store, "a").publish(4)
    damage(store)
    run_folder(tmp_path / "b", 2)
    before = contents(tmp_path / "b")
    with pytest.raises(DataError, match=says):
        aggregator(tmp_path / "b", store, "b").restore()
    assert contents(tmp_path / "b") == before
    assert not (tmp_path / "escape").exists()


def store_blob(store: Store) -> str:
    return next(iter(store.entries("blobs/"))).name


def rewrite(store: Store, **changes: Any) -> None:
    store.write("published/00000001.json", json.dumps({**records(store)[0], **changes}).encode())


def test_a_published_finished_run_equals_the_local_one(store: Store, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a", 4)
    a = aggregator(tmp_path / "a", store, "a")
    a.publish(4)
    assert "summary.json" not in {entry.name for entry in store.entries()}
    for name in ("summary.json", "report.html", "clients.csv", "logs/aggregator.jsonl", "figures/a.svg"):
        (tmp_path / "a" / name).parent.mkdir(exist_ok=True)
        folder.write(name, f"{name} of round 4")
    (tmp_path / "a" / "states" / "c0").mkdir(parents=True)
    (tmp_path / "a" / "states" / "c0" / "4-1-0-0.safetensors").write_text("private")
    (tmp_path / "a" / ".x.1-2.partial").write_text("half")
    a.finish()
    expected = {
        n: c for n, c in contents(tmp_path / "a").items() if not n.startswith("states/") and n != ".x.1-2.partial"
    }
    own = ("published/", "blobs/")
    there = {entry.name: store.read(entry.name).decode() for entry in store.entries() if not entry.name.startswith(own)}
    assert there == expected
    # A restarted aggregator then continues from the end, and publishes it again.
    b = aggregator(tmp_path / "b", store, "b")
    assert b.restore()
    RunFolder(tmp_path / "b").write("summary.json", "again")
    b.finish()
    assert store.read("summary.json") == (tmp_path / "b" / "summary.json").read_bytes()
    with pytest.raises(StorageError, match="another aggregator"):
        a.finish()


def test_a_round_that_fails_because_another_aggregator_is_ahead_ends_with_that_reason(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one's workers have removed the states of clients that only this one still needs."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{s3_server.new_bucket()}/runs/two"
    run_folder(tmp_path / "a", 3)
    first = aggregator(tmp_path / "a", open_store(url), "first")
    first.publish(3)
    small = parse_experiment(SMALL)
    second = Publication(RunFolder(tmp_path / "b"), small, RunOptions(publish=url, resume=True))
    second.connect()
    assert second.restore("second", lambda found, where: None)

    def fail() -> None:
        with second.logs_kept():
            raise QuorumError("no client has its state")

    with pytest.raises(QuorumError):  # nobody is ahead
        fail()
    for round in (4, 6):
        run_folder(tmp_path / "a", round)
        first.publish(round)
    with telling(StorageError, "another aggregator", "first", 6, "second"):
        fail()
    publish = second.publish
    assert publish is not None
    with telling(StorageError, "another aggregator", "first", 6, "second"):
        publish(4)


def test_checkpoints_of_a_finished_run_are_stored_once(store: Store, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a", 4)
    a = aggregator(tmp_path / "a", store, "a")
    a.publish(4)
    folder.write("summary.json", "of round 4")
    a.finish()
    checkpoints = [name for name in contents(tmp_path / "a") if name.startswith("checkpoints/")]
    for name in checkpoints:
        content = (tmp_path / "a" / name).read_bytes()
        assert [entry.name for entry in store.entries() if store.read(entry.name) == content] == [name]
    # It can be resumed on another machine, and its end is stored once, too.
    b = aggregator(tmp_path / "b", store, "b")
    assert b.restore()
    assert contents(tmp_path / "b") == contents(tmp_path / "a")
    run_folder(tmp_path / "b", 5)  # it keeps the checkpoint of round 4
    b.publish(5)
    store.remove(checkpoints)  # its records need no file that it will overwrite
    c = aggregator(tmp_path / "c", store, "c")
    assert c.restore()
    assert contents(tmp_path / "c") == contents(tmp_path / "b")
    c.finish()
    assert not any(
        "checkpoints/" in name and "folder" not in blob
        for name, blobs in records(store)[-1]["files"].items()
        for blob in blobs
    )
    d = aggregator(tmp_path / "d", store, "d")
    assert d.restore()
    assert contents(tmp_path / "d") == contents(tmp_path / "c")
    run_folder(tmp_path / "d", 7)
    d.finish()
    checkpoints = [name for name in contents(tmp_path / "d") if name.startswith("checkpoints/")]
    assert [entry.name for entry in store.entries("checkpoints/")] == sorted(checkpoints)
    store.write(next(n for n in contents(tmp_path / "d") if n.startswith("checkpoints/")), b"other")
    with pytest.raises(DataError, match="damaged"):
        aggregator(tmp_path / "e", store, "e").restore()


def test_an_aggregator_delayed_after_finishing_removes_nothing_of_its_successor(tmp_path: Path) -> None:
    plain = FolderStore(tmp_path / "store")

    def successor() -> None:
        b = aggregator(tmp_path / "b", plain, "b")
        assert b.restore()
        run_folder(tmp_path / "b", 6)
        b.publish(6)

    run_folder(tmp_path / "a", 4)
    held_up = HeldUp(tmp_path / "store", "", successor)
    a = aggregator(tmp_path / "a", held_up, "a")
    a.publish(4)
    RunFolder(tmp_path / "a").write("summary.json", "of round 4")

    def hold_the_last_sweep(name: str, content: bytes) -> None:
        FolderStore.create(held_up, name, content)
        if "folder-" in content.decode():
            held_up.method = "entries of blobs/"

    held_up.create = hold_the_last_sweep  # type: ignore[method-assign]
    a.finish()
    assert [record["round"] for record in records(plain)] == [4, 4, 4, 6]
    assert aggregator(tmp_path / "c", plain, "c").restore()
    assert contents(tmp_path / "c") == contents(tmp_path / "b")


def test_a_summary_never_appears_beside_files_of_another_time(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    folder = run_folder(tmp_path / "a", 4)
    a = aggregator(tmp_path / "a", store, "a")
    a.publish(4)
    folder.write("summary.json", "of round 4")
    a.finish()
    run_folder(tmp_path / "a", 8)
    folder.write("summary.json", "of round 8")

    class Full(FolderStore):
        def upload(self, name: str, path: Path) -> None:
            if name == "word-of-what-is-new.txt":
                raise StorageError("full")
            super().upload(name, path)

    full = aggregator(tmp_path / "b", Full(tmp_path / "store"), "b")
    full.restore()
    run_folder(tmp_path / "b", 8)
    for name in ("summary.json", "word-of-what-is-new.txt"):
        RunFolder(tmp_path / "b").write(name, "of round 8")
    with pytest.raises(StorageError, match="full"):
        full.finish()
    with pytest.raises(Absent):
        store.read("summary.json")


def test_logs_are_copied_for_any_outcome_of_the_run(store: Store, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a", 1)
    folder.append("logs/aggregator.jsonl", {"message": "it failed"})
    aggregator(tmp_path / "a", store, "a").log_files()
    assert [entry.name for entry in store.entries()] == ["logs/aggregator.jsonl"]


def test_a_killed_aggregators_log_goes_on_elsewhere_and_a_longer_one_is_kept(store: Store, tmp_path: Path) -> None:
    """Its machine may be gone with its folder; if it is not, its log has lines that were not yet published."""
    folder = run_folder(tmp_path / "a", 1)
    folder.append("logs/aggregator.jsonl", {"message": "first"})
    aggregator(tmp_path / "a", store, "a").publish(1)
    folder.append("logs/aggregator.jsonl", {"message": "killed"})
    for name, lines in (("b", ["first"]), ("a", ["first", "killed"])):
        assert aggregator(tmp_path / name, store, "b").restore()
        resumed = RunFolder(tmp_path / name)
        resumed.append("logs/aggregator.jsonl", {"message": "second"})
        assert [line["message"] for line in resumed.objects("logs/aggregator.jsonl")] == [*lines, "second"]


# --- with the round loop ----------------------------------------------------------------------------------------------


def remembering(folder: Path, store: Store, name: str, rounds: int) -> tuple[Any, Publisher]:
    """Return a federation whose clients keep states in the store, and that publishes each round."""
    published = aggregator(folder, store, name)
    f = federation_that_remembers(
        folder, rounds=rounds, checkpoint_every_s=0.0, states=store.under("states"), after=published.publish
    )
    return f, published


def test_another_machine_continues_to_the_same_result(store: Store, tmp_path: Path) -> None:
    """Folder and process are lost after round 3; checkpoints, journal and the clients' states are in the store."""
    f, _ = remembering(tmp_path / "whole", open_store(tmp_path / "other"), "x", rounds=6)
    f.run()
    f1, _ = remembering(tmp_path / "a", store, "a", rounds=3)
    f1.run()
    f2, published = remembering(tmp_path / "b", store, "b", rounds=6)
    assert published.restore()
    f2.loop.resume()
    assert f2.loop.round == 3
    f2.run()
    assert f2.loop.server.said == {t: output for t, output in f.loop.server.said.items() if t > 3}
    last = "checkpoints/round-000006.safetensors"
    assert (tmp_path / "b" / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()
    assert [record["round"] for record in records(store)] == [0, 1, 2, 3, 4, 5, 6]
    # Its successor has its whole journal, and can replay it.
    assert aggregator(tmp_path / "c", store, "c").restore()
    replay, attempts = Replay(RunFolder(tmp_path / "c")), f2.loop.journal.counted()
    assert [replay.attempt(t) for t in range(1, 7)] == attempts


def test_a_replaced_loop_stops(store: Store, tmp_path: Path) -> None:
    f1, _ = remembering(tmp_path / "a", store, "a", rounds=2)
    f1.run()
    f2, published = remembering(tmp_path / "b", store, "b", rounds=4)
    published.restore()
    f2.loop.resume()
    _, third = remembering(tmp_path / "c", store, "c", rounds=4)
    third.restore()
    run_folder(tmp_path / "c", 3)
    third.publish(3)
    with pytest.raises(StorageError, match=r"\(c\)"):
        f2.run()


PUBLISHER = """
import sys, itertools
from pathlib import Path
sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]).parent)]
from published_runs import aggregator, run_folder
from fedloom.storage import open_store
mine = aggregator(Path(sys.argv[2]), open_store(sys.argv[3]), sys.argv[4])
last = 0
if mine.restore():
    last = mine.record.round
print("ready", last, flush=True)
for round in itertools.count(last + 1):
    run_folder(Path(sys.argv[2]), round)
    mine.publish(round)
    print("published", round, flush=True)
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_complete_publication(s3_server: S3Server, tmp_path: Path) -> None:
    """The publisher is killed eight times; each successor continues from at least the last announced round."""
    url = f"s3://{s3_server.new_bucket()}/runs/r"
    store = open_store(url, s3_server.environment)
    dice, announced = random.Random(4), 0
    for life in range(8):
        folder = tmp_path / f"life-{life}"
        process = Popen(
            [sys.executable, "-c", PUBLISHER, str(Path(__file__).parent), str(folder), url, f"life-{life}"],
            env={**os.environ, **s3_server.environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(dice.randint(1, 4)):  # "ready", and rounds
            word, round = process.stdout.readline().split()
            assert word == "published" or int(round) >= announced
        time.sleep(dice.uniform(0, 0.06))
        process.send_signal(signal.SIGKILL)
        heard = [line.split() for line in process.communicate(timeout=60)[0].splitlines()]
        announced = max([int(round), announced, *(int(output[1]) for output in heard if len(output) == 2)])
        here = tmp_path / f"look-{life}"
        if aggregator(here, store, "look").restore():
            # The server may still execute the last request of a killed publisher: the requests received count.
            found = int(json.loads((here / "metrics.jsonl").read_text())["after"])
            assert announced <= found <= records(store)[-1]["round"]
            assert contents(here) == contents(run_folder(tmp_path / f"expected-{life}", found).path)
    rounds = [record["round"] for record in records(store)]
    assert rounds == list(range(1, len(rounds) + 1))
    assert announced >= 8
