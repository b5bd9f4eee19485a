"""Folders of runs to publish; without torch, so that a process with them starts fast."""

from __future__ import annotations

from pathlib import Path

from fedloom.runs.folder import RunFolder
from fedloom.runs.published import Publisher
from fedloom.storage import Store


def aggregator(folder: Path, store: Store, name: str) -> Publisher:
    return Publisher(RunFolder(folder), store, name)


def run_folder(path: Path, round: int, *, keep: int = 2) -> RunFolder:
    """Write a run's folder as it is after a round; every file contains the round."""
    folder = RunFolder(path)
    folder.make("name: x\n")
    folder.write("partition.json", "the same always")
    folder.rewrite("journal.jsonl", [{"round": t} for t in range(1, round + 1)])
    folder.rewrite("metrics.jsonl", [{"after": round}])
    for file in folder.checkpoints.iterdir():
        file.unlink()
    for t in range(max(0, round - keep + 1), round + 1):
        (folder.checkpoints / f"round-{t:06d}.safetensors").write_text(f"state of {t}")
    return folder
