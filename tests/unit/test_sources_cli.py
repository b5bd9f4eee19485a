"""``fedloom data fetch`` and ``fedloom datasets``: output and errors."""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import leaf_folders
import pytest
from facts import tells

from fedloom.cli.main import main
from fedloom.data.datasets import DATASETS, load_dataset
from fedloom.errors import DataError

FIXTURES = Path(__file__).parents[1] / "fixtures"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Run]:
    """Run ``fedloom data`` or ``datasets`` on the data root ``tmp_path/root``; return exit code, output and errors."""
    logger = logging.getLogger("fedloom")
    level = logger.level
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "root"))

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        group = [] if arguments[0] == "datasets" else ["data"]
        monkeypatch.setattr(sys, "argv", ["fedloom", *group, *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            main()
        out, err = capsys.readouterr()
        return int(exited.value.code or 0), out, err

    yield run
    logger.setLevel(level)


@pytest.fixture
def fetch(data: Run) -> Run:
    """Run ``fedloom data fetch``."""
    return functools.partial(data, "fetch")


def test_fetched_data_sets_are_reported(fetch: Run, tmp_path: Path) -> None:
    code, out, _ = fetch("vowel", "--from", FIXTURES)
    assert code == 0
    where, what, licence = out.splitlines()
    assert str(tmp_path / "root" / "datasets" / "vowel") in where
    assert tells(what, "Vowel", 495, 495, "9 features", "11 classes", "15 owners", "speaker-0", "speaker-14")
    assert "CC BY 4.0" in licence


def test_leaf_files_of_the_user(fetch: Run, tmp_path: Path) -> None:
    given = leaf_folders.write(tmp_path / "leaf", leaf_folders.femnist())
    code, out, _ = fetch("femnist", "--from", given)
    assert code == 0
    assert tells(out, 36, 4, "1 x 28 x 28", "62 classes", "4 owners")
    assert fetch("femnist")[0] == 0  # existing files stay


def test_leaf_files_with_an_empty_user_leave_nothing(fetch: Run, tmp_path: Path) -> None:
    files = leaf_folders.femnist()
    name = min(files)
    document = json.loads(files[name])
    user = document["users"][1]
    document["user_data"][user] = {"x": [], "y": []}
    document["num_samples"][1] = 0
    given = leaf_folders.write(tmp_path / "leaf", files | {name: json.dumps(document).encode()})
    code, out, err = fetch("femnist", "--from", given)
    assert (code, out) == (3, "")
    assert f"{name}, user {user!r}: it has 0 x and 0 y" in err
    assert "Traceback" not in err
    assert [path.name for path in (tmp_path / "root" / "datasets").iterdir()] == [".femnist.lock"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["femnist"], "FEMNIST"),
        (["femnist", "--from", "."], "FEMNIST"),
        (["vowel", "--from", "."], "Vowel"),
        (["shakespeare", "--from", "."], "(or LEAF's train/*.json and test/*.json, or its all_data/*.json)"),
    ],
)
def test_an_unavailable_dataset_gives_advice(
    arguments: list[str], words: str, fetch: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    code, out, err = fetch(*arguments)
    assert (code, out) == (3, "")
    assert words in err
    assert f"fedloom data fetch {arguments[0]} --from DIR" in err
    assert len(err.splitlines()) < 12


@pytest.mark.parametrize(("name", "more"), [("vowel", ""), ("femnist", " --from DIR")])
def test_the_suggested_command_fetches_to_the_requested_root(
    name: str, more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default, other = tmp_path / "root", tmp_path / "its own"
    monkeypatch.setenv("FEDLOOM_DATA", str(default))
    for root, variable in ((default, ""), (other, f"FEDLOOM_DATA='{other}' ")):
        with pytest.raises(DataError) as missing:
            load_dataset(DATASETS[name], root)
        assert f"fetch it: {variable}fedloom data fetch {name}{more}" in str(missing.value)


def test_a_single_owner_is_named(fetch: Run, tmp_path: Path) -> None:
    files = leaf_folders.files(all_data=[{"alice": leaf_folders.images(3, 0)}])
    code, out, _ = fetch("femnist", "--from", leaf_folders.write(tmp_path / "leaf", files))
    assert code == 0
    assert "owner, alice" in out
    assert "owners" not in out


def test_the_list_shows_local_datasets(data: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def listed() -> dict[str, dict[str, Any]]:
        code, out, _ = data("datasets", "--json")
        assert code == 0
        return {about["name"]: about for about in json.loads(out)}

    assert list(listed()) == list(DATASETS)
    assert {about["bytes"] for about in listed().values()} == {None}
    data("fetch", "vowel", "--from", FIXTURES)
    files = leaf_folders.femnist()
    data("fetch", "femnist", "--from", leaf_folders.write(tmp_path / "leaf", files))
    found = listed()
    assert found["vowel"]["bytes"] == 17800
    assert found["vowel"]["folder"] == str(tmp_path / "root" / "datasets" / "vowel")
    assert found["femnist"]["bytes"] == sum(map(len, files.values()))
    assert found["mnist"]["folder"] is None
    (tmp_path / "root" / "datasets" / "vowel" / "Vowel.rda").write_bytes(b"short")
    (tmp_path / "root" / "datasets" / "femnist" / "SHA256SUMS").write_text("nonsense")
    assert {listed()[name]["bytes"] for name in ("vowel", "femnist")} == {None}

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "elsewhere"))
    code, out, _ = data("datasets")
    assert code == 0
    assert max(map(len, out.splitlines()[:-1])) <= 80
    for name, source in DATASETS.items():
        assert any(line.startswith(f"{name} ") and source.title in line for line in out.splitlines())
