"""FEMNIST and Shakespeare in LEAF's JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import leaf_folders
import numpy as np
import pytest

from fedloom.data import datasets
from fedloom.data.datasets import leaf
from fedloom.errors import DataError, ExitCode

FEMNIST = datasets.find_dataset("femnist")
SHAKESPEARE = datasets.find_dataset("shakespeare")
TRAIN_0 = "train/all_data_0_niid_0_keep_0_train_9.json"
TEST_0 = "test/all_data_0_niid_0_keep_0_test_9.json"

Change = Callable[[dict[str, Any]], None]


def changed(name: str, change: Change) -> dict[str, bytes]:
    """Return a small FEMNIST with one file changed."""
    files = leaf_folders.femnist()
    document = json.loads(files[name])
    change(document)
    return files | {name: json.dumps(document).encode()}


def test_images_labels_and_writers_are_read_exactly() -> None:
    official = FEMNIST.read(leaf_folders.femnist())
    assert official.owners == datasets.Owners(("f0000_00", "f0001_01", "f0002_02", "f0003_03"), divided=True)
    assert (len(official.train), len(official.test)) == (36, 4)
    assert official.train.inputs.shape == (36, 1, 28, 28)
    assert official.train.inputs.dtype == np.uint8
    for owner in range(4):
        assert official.train.owners is not None
        pixels = np.random.default_rng(owner).integers(0, 256, (9, 784))
        mine = official.train.owners == owner
        assert np.array_equal(official.train.inputs[mine].reshape(9, 784), pixels)
        assert official.train.labels[mine].tolist() == list(range(owner, owner + 9))


def test_all_data_is_not_split() -> None:
    users = [{"a": leaf_folders.images(3, 0)}, {"b": leaf_folders.images(2, 1)}]
    official = FEMNIST.read(leaf_folders.files(all_data=users))
    assert official.owners == datasets.Owners(("a", "b"), divided=False)
    assert (len(official.train), len(official.test)) == (5, 0)
    assert official.test.inputs.shape == (0, 1, 28, 28)


def test_classes_are_digits_then_capitals_then_small_letters() -> None:
    assert FEMNIST.spec.classes == 62
    assert [FEMNIST.spec.class_names[i] for i in (0, 9, 10, 35, 36, 61)] == ["0", "9", "A", "Z", "a", "z"]


def drop(key: str) -> Change:
    return lambda document: document.pop(key)


def of_first(change: Callable[[dict[str, Any]], None]) -> Change:
    return lambda document: change(document["user_data"][document["users"][0]])


def emptied(document: dict[str, Any]) -> None:
    document["user_data"]["f0000_00"] = {"x": [], "y": []}
    document["num_samples"][0] = 0


def renamed(document: dict[str, Any]) -> None:
    document["users"][0] = "stranger"
    document["user_data"]["stranger"] = document["user_data"].pop("f0000_00")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (TRAIN_0, emptied, ["user 'f0000_00'", "0 x and 0 y", "at least 1"]),
        (TRAIN_0, lambda d: d["num_samples"].__setitem__(1, 8), ["user 'f0001_01'", "9 x and 9 y", "8"]),
        (TRAIN_0, of_first(lambda u: u["x"].pop()), ["user 'f0000_00'", "8 x and 9 y"]),
        (TRAIN_0, of_first(lambda u: u["x"][4].pop()), ["f0000_00", "image 4", "783", "28 x 28"]),
        (TRAIN_0, of_first(lambda u: u["x"].__setitem__(2, 0.5)), ["image 2", "not a list"]),
        (TRAIN_0, of_first(lambda u: u["x"][1].__setitem__(7, 0.5)), ["image 1 has the value 0.5 at 7", "k/255"]),
        (TRAIN_0, of_first(lambda u: u["x"][1].__setitem__(7, 256 / 255)), ["image 1 has the value 1.00392", "at 7"]),
        (TRAIN_0, of_first(lambda u: u["x"][1].__setitem__(7, float("nan"))), ["image 1 has the value nan at 7"]),
        (TRAIN_0, of_first(lambda u: u["x"][1].__setitem__(7, "dark")), ["not a number", "dark"]),
        (TRAIN_0, of_first(lambda u: u["y"].__setitem__(3, 62)), ["label 3 is 62", "61"]),
        (TRAIN_0, of_first(lambda u: u["y"].__setitem__(3, True)), ["label 3 is True"]),
        (TRAIN_0, of_first(lambda u: u.pop("y")), ["user_data.f0000_00.y", "required"]),
        (TRAIN_0, drop("user_data"), ["LEAF's format", "user_data"]),
        (TRAIN_0, drop("num_samples"), ["LEAF's format", "num_samples"]),
        (TRAIN_0, lambda d: d["users"].append("f0009_09"), ["contradicts itself: 3 users, 2 num_samples"]),
        (TRAIN_0, lambda d: d["users"].__setitem__(1, "f0000_00"), ["contradicts itself"]),
        (TEST_0, renamed, ["user 'stranger'", "in test, but not in train", "-t sample"]),
        (TEST_0, lambda d: [d[k].clear() for k in d], []),
    ],
)
def test_errors_are_named_with_file_and_user(name: str, change: Change, words: list[str]) -> None:
    contents = changed(name, change)
    if not words:  # a file without users is valid if another of its part has some
        assert len(FEMNIST.read(contents).test) == 2
        return
    with pytest.raises(DataError) as error:
        FEMNIST.read(contents)
    assert error.value.exit_code == ExitCode.DATA
    for word in (name, *words):
        assert word in str(error.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[1, 2]", b"null", leaf_folders.femnist()[TRAIN_0][:-10]],
    ids=["empty", "cut", "bytes", "list", "null", "truncated"],
)
def test_files_that_are_not_leaf_json(content: bytes) -> None:
    with pytest.raises(DataError, match=rf"{TRAIN_0}.*(JSON|LEAF)"):
        FEMNIST.read(leaf_folders.femnist() | {TRAIN_0: content})


def test_a_user_in_two_files() -> None:
    files = leaf_folders.femnist()
    again = TRAIN_0.replace("data_0", "data_2")
    with pytest.raises(DataError, match=rf"{again}, user 'f0000_00': .*{TRAIN_0}"):
        FEMNIST.read(files | {again: files[TRAIN_0]})


def test_a_part_without_users() -> None:
    nobody: list[leaf_folders.Users] = [{}]
    with pytest.raises(DataError, match=r"test/.*users"):
        FEMNIST.read(leaf_folders.files(train=[{"a": leaf_folders.images(2, 0)}], test=nobody))


def test_the_files_of_a_folder(tmp_path: Path) -> None:
    assert leaf.leaf_files(tmp_path) == ()
    assert leaf.leaf_files(tmp_path / "nowhere") == ()
    leaf_folders.write(tmp_path, {"all_data/b.json": b"", "all_data/a.json": b"", "all_data/._a.json": b""})
    assert leaf.leaf_files(tmp_path) == ("all_data/a.json", "all_data/b.json")
    leaf_folders.write(tmp_path, {"train/x.json": b"", "train/notes.txt": b""})
    with pytest.raises(DataError, match=r"test.*\.json"):
        leaf.leaf_files(tmp_path)
    leaf_folders.write(tmp_path, {"test/y.json": b""})
    assert leaf.leaf_files(tmp_path) == ("train/x.json", "test/y.json")


TEXT = "Now is the winter of our discontent made glorious summer by this sun of York; and all the clouds"


def windows(text: str) -> tuple[list[Any], list[Any]]:
    starts = range(len(text) - 80)
    return [text[i : i + 80] for i in starts], [text[i + 80] for i in starts]


def test_windows_of_leafs_shakespeare() -> None:
    files = leaf_folders.files(train=[{"RICHARD": windows(TEXT)}], test=[{"RICHARD": windows(TEXT[:83])}])
    official = SHAKESPEARE.read(files)
    assert official.owners == datasets.Owners(("RICHARD",), divided=True, overlap=80)
    assert official.train.inputs.shape == (len(TEXT) - 80, 80)
    spoken = ["".join(SHAKESPEARE.spec.class_names[c] for c in window) for window in official.train.inputs]
    assert spoken == windows(TEXT)[0]
    assert [SHAKESPEARE.spec.class_names[c] for c in official.test.labels] == list(TEXT[80:83])


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        ("a" * 79, "b", "x 0 is 79 .*80"),
        ("a" * 80, "bc", "y 0 is 2 .*1"),
        (7, "b", "x 0 is 7; .*80"),
        ("a" * 79 + "é", "b", "'é' .*84"),
        ("a" * 80, "\U0001f5e1", "'\U0001f5e1'"),
        ("a" * 79 + "\ud800", "b", "not JSON"),
    ],
)
def test_examples_that_are_not_windows(x: object, y: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        SHAKESPEARE.read(leaf_folders.files(train=[{"A": ([x], [y])}], test=[{"A": windows("a" * 81)}]))
