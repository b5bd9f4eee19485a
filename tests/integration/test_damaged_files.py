"""Damaged and invalid files: commands exit with 2, 3 or 6, or do without the file; none hangs or crashes."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import random
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_data
import yaml

from fedloom.cli.main import main
from fedloom.data import datasets

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.group("damaged")]

PATIENCE_S = 60
"""After which a command counts as hanging; the slowest takes a second."""

FILES = (
    "experiment.yaml", "partition.json", "environment.json", "metrics.jsonl", "journal.jsonl", "summary.json",
    "clients.csv", "confusion.json", "confusion.csv", "calibration.json", "descriptors.json",
    "checkpoints/round-000002.safetensors",
)  # fmt: skip

FIRST = ("experiment.yaml", "journal.jsonl", "checkpoints/round-000002.safetensors")
"""Files that `make test` damages, one of each kind; `make test-all` damages all."""


def files(end: str = "") -> list[Any]:
    """Return ``FILES`` with this property; those not in ``FIRST`` belong to the second tier."""
    chosen = [file for file in FILES if not end or not file.endswith(end)]
    return [pytest.param(file, marks=() if file in FIRST else pytest.mark.exhaustive) for file in chosen]


# --- damages ----------------------------------------------------------------------------------------------------------


def _special(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):  # the path of a socket must be short
        made.bind(path.name)


def _content(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return damage


SPECIAL: dict[str, Callable[[Path], None]] = {
    "pipe": _special(os.mkfifo),
    "folder": _special(Path.mkdir),
    "socket": _special(_socket),
    "device": _special(lambda path: path.symlink_to("/dev/zero")),
    "loop": _special(lambda path: path.symlink_to(path.name)),
}
CONTENT: dict[str, Callable[[Path], None]] = {
    "empty": _content(lambda content: b""),
    "cut": _content(lambda content: content[: len(content) // 2]),
    "NUL": _content(lambda content: b"\0" * len(content)),
    "no text": _content(lambda content: b"\xff\xfe" + content),
    "list": _content(lambda content: b"[]"),
    "object": _content(lambda content: b"{}"),
    "number": _content(lambda content: b"7"),
    "null": _content(lambda content: b"null"),
    "an object more": _content(lambda content: content + b"{}\n"),
    "deep": _content(lambda content: b"[" * 100_000),
    "deep object": _content(lambda content: b'{"round":' * 100_000),
    "bomb": _content(lambda content: _bomb()),
}


def _bomb() -> bytes:
    """Return a few lines of YAML that expand to 10^10 values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    return "\n".join(lines).encode()


def scrambled(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with one value replaced by one of another type, or a key removed."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(sorted(value))
        if rng.random() < 0.2:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: scrambled(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], scrambled(value[at], rng), *value[at + 1 :]]
    return rng.choice([None, True, -1, 1e308, float("nan"), "x", "\0", [], {}, [[]], {"": None}, 2**70])


def scramble(path: Path, seed: int) -> None:
    """Change one value of a file of JSON, JSON lines or YAML, or of a table; seeded."""
    rng = random.Random(seed)
    text = path.read_text()
    if path.suffix == ".jsonl":
        lines = text.splitlines()
        at = rng.randrange(len(lines))
        lines[at] = json.dumps(scrambled(json.loads(lines[at]), rng))
        path.write_text("\n".join(lines) + "\n")
    elif path.suffix == ".csv":
        cells = text.split(",")
        cells[rng.randrange(len(cells))] = rng.choice(["", "x", "-1", "1e400", "\n", '"'])
        path.write_text(",".join(cells))
    elif path.suffix == ".json":
        path.write_text(json.dumps(scrambled(json.loads(text), rng)))
    else:
        path.write_text(yaml.safe_dump(scrambled(yaml.safe_load(text), rng)))


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with an experiment and its finished run, on a dataset registered only in this process."""
    folder = tmp_path_factory.mktemp("damaged")
    files = tiny_data.files()
    source = tiny_data.source(files)
    (folder / "given").mkdir()
    for name, content in files.items():
        (folder / "given" / f"{name}.gz").write_bytes(gzip.compress(content))
    with pytest.MonkeyPatch.context() as known:
        known.setitem(datasets.DATASETS, "tiny", source)
        known.setenv("FEDLOOM_DATA", str(folder / "root"))
        datasets.fetch_dataset(source, folder / "root", copy_from=folder / "given")
        tree = {
            "name": "tiny",
            "seed": 1,
            "data": {"dataset": "tiny", "root": str(folder / "root"), "partition": {"scheme": "iid", "clients": 4}},
            "model": {"name": "mlp", "hidden": [3]},
            "algorithm": {
                "name": "pefll",
                "local": {"epochs": 1, "batch_size": 16, "lr": 0.05},
                "embedding": {"network": "linear"},
            },
            "federation": {"rounds": 2, "clients_per_round": 2, "checkpoint_every_s": 0},
            "evaluation": {"every": 1, "cohort": 4},
            "runtime": {"workers": 0},
        }
        (folder / "e.yaml").write_text(yaml.safe_dump(tree))
        assert outcome("run", folder / "e.yaml", "--out", folder / "run") == 0
        yield folder


def outcome(*arguments: object) -> int:
    """Return the exit code of a command in this process; any other exception is a bug and is raised."""

    def late(number: int, frame: object) -> None:
        raise AssertionError(f"hangs: {arguments}")

    handlers = {number: signal.signal(number, late) for number in (signal.SIGALRM,)}
    terminated = signal.getsignal(signal.SIGTERM)
    signal.alarm(PATIENCE_S)
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "argv", ["fedloom", *map(str, arguments)])
            with pytest.raises(SystemExit) as exited:
                main()
        return int(exited.value.code or 0)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGTERM, terminated)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def commands(folder: Path, run: Path) -> dict[str, tuple[object, ...]]:
    """Return every command that reads a run's folder."""
    return {
        "resume": ("run", folder / "e.yaml", "--out", run, "--resume", "--no-report"),
        "more": ("run", folder / "e.yaml", "--out", run, "--resume", "--set", "federation.rounds=3", "--no-report"),
        "replay": ("run", folder / "e.yaml", "--out", run.parent / "again", "--replay", run, "--no-report"),
        "evaluate": ("evaluate", run),
        "report": ("report", run),
        "compare": ("compare", run),
        "runs": ("runs", run.parent),
        "partition": ("run", folder / "e.yaml", "--out", run.parent / "again", "--partition", run, "--no-report"),
    }


COMMANDS = tuple(commands(Path(), Path()))


def answer(finished: Path, tmp_path: Path, command: str, file: str, damage: Callable[[Path], None]) -> int:
    """Return the exit code of a command with a damaged file of a run."""
    shutil.rmtree(tmp_path / "there", ignore_errors=True)
    run = tmp_path / "there" / "run"
    shutil.copytree(finished / "run", run)
    damage(run / file)
    return outcome(*commands(finished, run)[command])


# --- the table --------------------------------------------------------------------------------------------------------

ANSWERS = (0, 2, 3, 6)
"""0: the command does without the file."""

PINNED = [
    *(("evaluate", "experiment.yaml", damage, 2) for damage in ("bomb", "NUL")),
    *(("compare", "experiment.yaml", damage, 3) for damage in ("bomb", "NUL")),
    ("resume", "experiment.yaml", "pipe", 3),
    ("resume", "experiment.yaml", "deep", 2),
    ("resume", "partition.json", "pipe", 3),
    ("evaluate", "partition.json", "object", 3),
    ("partition", "partition.json", "pipe", 6),
    ("partition", "partition.json", "deep", 3),
    ("more", "metrics.jsonl", "an object more", 3),
    ("more", "metrics.jsonl", "pipe", 3),
    ("more", "journal.jsonl", "an object more", 3),
    ("more", "journal.jsonl", "no text", 3),
    ("replay", "journal.jsonl", "device", 3),
    ("compare", "summary.json", "list", 3),
    ("compare", "clients.csv", "deep object", 3),
    ("more", "checkpoints/round-000002.safetensors", "cut", 3),
    ("evaluate", "checkpoints/round-000002.safetensors", "pipe", 6),
    ("resume", "checkpoints/round-000002.safetensors", "folder", 6),
    *(("more", "logs/aggregator.jsonl", damage, 6) for damage in ("pipe", "folder", "socket", "loop")),
]


@pytest.mark.parametrize(("command", "file", "damage", "code"), PINNED)
def test_commands_on_damaged_files(
    finished: Path, tmp_path: Path, command: str, file: str, damage: str, code: int
) -> None:
    assert answer(finished, tmp_path, command, file, {**SPECIAL, **CONTENT}[damage]) == code


@pytest.mark.parametrize("file", files())
def test_damaged_files_never_crash_a_command(finished: Path, tmp_path: Path, file: str) -> None:
    """Each kind of damage with one command; commands take turns."""
    order = itertools.cycle(random.Random(file).sample(COMMANDS, len(COMMANDS)))
    for name, damage in {**SPECIAL, **CONTENT}.items():
        command = next(order)
        assert answer(finished, tmp_path, command, file, damage) in ANSWERS, (command, name)


@pytest.mark.parametrize(
    ("command", "file", "wrong", "code"),
    [
        ("evaluate", "partition.json", {"scheme": {"scheme": "iid", "clients": float("nan")}}, 3),
        ("more", "metrics.jsonl", {"client_steps": float("inf")}, 3),
        ("resume", "summary.json", {"seed": None}, 0),
        ("more", "descriptors.json", {"maps": [{}]}, 3),
        ("more", "descriptors.json", {"excluded": []}, 3),
    ],
)
def test_random_damage_is_reported(
    finished: Path, tmp_path: Path, command: str, file: str, wrong: dict[str, Any], code: int
) -> None:
    def damage(path: Path) -> None:
        first, *rest = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        path.write_text("\n".join([json.dumps({**json.loads(first), **wrong}), *rest]) + "\n")

    assert answer(finished, tmp_path, command, file, damage) == code


@pytest.mark.parametrize("file", files(".safetensors"))
def test_wrong_values_never_crash_a_command(finished: Path, tmp_path: Path, file: str) -> None:
    for seed in range(8):
        command = COMMANDS[seed]
        assert answer(finished, tmp_path, command, file, lambda path, s=seed: scramble(path, s)) in ANSWERS, command
