"""Digests of a run's files and of files of tensors detect any change since they were written."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core import digests
from fedloom.errors import DataError
from fedloom.federation.states import States
from fedloom.runs.checkpoint import Best, Checkpoint, Checkpoints, decode_tensors, tensor_parts
from fedloom.runs.files import DIGESTS
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import Version
from fedloom.storage.folder import FolderStore

LINES = [{"round": t, "text": "é\n"} for t in range(4)]
WHOLE = {
    "summary.json": '{\n  "seen": {"clients": 3},\n  "name": "é"\n}\n',
    "experiment.yaml": "name: x\nseed: 1\n",
    "partition.json": '{"clients":[]}',
    "clients.csv": "id,seen\nc0,true\n",
    "confusion.csv": "id,class,predicted,examples\nc0,0,1,3\n",
}


def flipped(content: bytes, bit: int) -> bytes:
    """Return the content with one bit changed."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def flips(content: bytes) -> list[bytes]:
    """Return the content with one bit changed, for every bit."""
    return [flipped(content, bit) for bit in range(8 * len(content))]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path)
    for line in LINES:
        made.append("metrics.jsonl", line)
    for name, text in WHOLE.items():
        made.write(name, text)
    return made


def test_content_is_returned_without_its_digest(folder: RunFolder) -> None:
    assert list(folder.lines("metrics.jsonl")) == LINES
    assert [line.object for line in folder.line_file("metrics.jsonl").backwards()] == LINES[::-1]
    for name, text in WHOLE.items():
        if name.endswith(".json"):
            assert folder.json(name) == json.loads(text)
        else:
            assert folder.text(name) == text


def test_other_programs_can_read_the_files(folder: RunFolder) -> None:
    text = (folder.path / "metrics.jsonl").read_text()
    assert [list(json.loads(line))[-1] for line in text.splitlines()] == ["digest"] * len(LINES)
    assert list(json.loads((folder.path / "summary.json").read_text())) == ["seen", "name", "digest"]
    assert (folder.path / "partition.json").read_text() == WHOLE["partition.json"]
    assert (folder.path / "clients.csv").read_text() == WHOLE["clients.csv"]


@pytest.mark.slow
def test_any_flipped_bit_in_a_file_of_lines_is_detected(folder: RunFolder) -> None:
    """Except a cut of the end of the last line, which may never have been written."""
    path = folder.path / "metrics.jsonl"
    whole = path.read_bytes()
    for changed in flips(whole):
        path.write_bytes(changed)
        if changed.endswith(b"\n"):
            with pytest.raises(DataError, match=r"metrics\.jsonl, line \d+ is damaged"):
                folder.lines("metrics.jsonl")
        else:
            found = folder.lines("metrics.jsonl")
            assert (list(found), found.unreadable) == (LINES[:-1], 1)


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines[1:],
        lambda lines: [lines[0], *lines[2:]],
        lambda lines: [lines[1], lines[0], *lines[2:]],
        lambda lines: [*lines[:2], lines[1], *lines[2:]],
        lambda lines: [*lines[:2], b"\n", *lines[2:]],
    ],
)
def test_missing_moved_or_repeated_lines_are_detected(
    folder: RunFolder, change: Callable[[list[bytes]], list[bytes]], finished: bool
) -> None:
    if finished:
        folder.close_lines()
    path = folder.path / "metrics.jsonl"
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(DataError, match=r"metrics\.jsonl.*damaged"):
        folder.lines("metrics.jsonl")


@pytest.mark.parametrize("gone", [1, 2, 4])
def test_missing_last_lines_of_a_finished_run_are_detected(folder: RunFolder, gone: int) -> None:
    folder.close_lines()
    path = folder.path / "metrics.jsonl"
    whole = path.read_bytes().splitlines(keepends=True)
    for kept in (b"".join(whole[:-gone]), b"".join(whole)[:-1], None):
        path.unlink() if kept is None else path.write_bytes(kept)
        for read in (folder.lines, lambda name: list(folder.line_file(name).backwards())):
            with pytest.raises(DataError, match="damaged"):
                read("metrics.jsonl")
    folder.reopen_lines()
    assert list(folder.lines("metrics.jsonl")) == []


def test_damaged_and_foreign_lines_are_detected_when_reading_backwards_and_appending(folder: RunFolder) -> None:
    path = folder.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"round": 2', b'"round": 3'))
    reader = folder.line_file("metrics.jsonl").backwards()
    assert next(reader).object == LINES[3]
    with pytest.raises(DataError, match="line 3 is damaged"):
        next(reader)
    shutil.copy(path, folder.path / "journal.jsonl")  # one file of lines is not accepted as another
    with pytest.raises(DataError, match=r"journal\.jsonl, line 1 is damaged"):
        folder.lines("journal.jsonl")
    path.write_bytes(path.read_bytes()[:-1])  # nothing is appended after a truncated line
    with pytest.raises(DataError, match="line 4 is damaged"):
        folder.append("metrics.jsonl", {"round": 4})


@pytest.mark.parametrize("name", WHOLE)
def test_any_flipped_bit_of_a_whole_file_is_detected(folder: RunFolder, name: str) -> None:
    """In YAML, a first line that is no longer a comment makes the file unreadable."""
    path = folder.path / name
    whole = path.read_bytes()
    for changed in flips(whole):
        path.write_bytes(changed)
        if name.endswith(".yaml") and changed[0] != whole[0]:
            with pytest.raises(DataError, match=name):
                folder.stored_experiment()
        else:
            with pytest.raises(DataError, match=rf"{name} is damaged"):
                folder.text(name)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("cut", [0, 1, 7])
def test_a_truncated_file_is_detected(folder: RunFolder, name: str, cut: int) -> None:
    if name == "experiment.yaml" and cut == 0:
        pytest.skip("an empty file is no experiment: its reader says so")
    path = folder.path / name
    path.write_bytes(path.read_bytes()[:-cut] if cut else b"")
    with pytest.raises(DataError, match=rf"{name} is damaged"):
        folder.text(name)


def test_an_edited_experiment_is_read_once_its_first_line_is_removed(folder: RunFolder) -> None:
    path = folder.path / "experiment.yaml"
    first, rest = path.read_text().split("\n", 1)
    path.write_text(f"{first}\n{rest.replace('1', '2')}")
    with pytest.raises(DataError, match="remove the first line"):
        folder.text("experiment.yaml")
    path.write_text(rest.replace("1", "2"))
    assert folder.text("experiment.yaml") == "name: x\nseed: 2\n"


@pytest.mark.parametrize("name", ["partition.json", "clients.csv", "confusion.csv"])
def test_missing_digests_are_detected(folder: RunFolder, name: str) -> None:
    (folder.path / DIGESTS).unlink()
    with pytest.raises(DataError, match=rf"{name} is damaged"):
        folder.text(name)


@pytest.mark.parametrize("name", ["partition.json", "clients.csv", "confusion.csv"])
def test_both_files_are_valid_after_a_kill_between_the_writes(folder: RunFolder, name: str) -> None:
    before = (folder.path / name).read_bytes()
    folder.write(name, "another")
    assert folder.text(name) == "another"
    (folder.path / name).write_bytes(before)
    assert folder.text(name) == WHOLE[name]


@pytest.mark.slow
@given(st.lists(st.dictionaries(st.text(), st.integers() | st.text()), max_size=4), st.randoms(use_true_random=False))
def test_a_digest_chain_of_any_objects(values: list[dict[str, Any]], rng: random.Random) -> None:
    before, lines = digests.beginning("x"), []
    for value in values:
        lines.append(digests.line_of(value, before))
        before = digests.check_line(lines[-1], before)
        assert {k: v for k, v in json.loads(lines[-1]).items() if k != "digest"} == {
            k: v for k, v in value.items() if k != "digest"
        }
    order = list(range(len(lines)))
    rng.shuffle(order)
    first = next((at for at, i in enumerate(order) if at != i), None)
    if first is not None:
        before = (digests.stated_digest(lines[first - 1]) or "") if first else digests.beginning("x")
        with pytest.raises(digests.Damaged):
            digests.check_line(lines[order[first]], before)


TENSORS = {"theta": torch.arange(12.0).reshape(3, 4), "n": torch.tensor(True), "none": torch.zeros(0, 2)}


def encode_tensors(tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> bytes:
    """Return a file as bytes."""
    return b"".join(tensor_parts(tensors, about))


def test_written_tensors_are_read() -> None:
    tensors, about = decode_tensors(encode_tensors(TENSORS, {"b": [1, None], "a": "é\n\"'"}))
    assert about == {"b": [1, None], "a": "é\n\"'"}
    assert {name: (t.dtype, t.tolist()) for name, t in tensors.items()} == {
        name: (t.dtype, t.tolist()) for name, t in TENSORS.items()
    }
    assert decode_tensors(encode_tensors({}, {}))[0] == {}


def test_bytes_are_those_of_safetensors() -> None:
    kinds = (torch.int64, torch.float64, torch.float32, torch.int32, torch.bfloat16, torch.float16, torch.int16)
    tensors = {f"{name}{kind}": torch.arange(3).to(kind) for kind in (*kinds, torch.int8) for name in ('"é/', "b", "a")}
    content = encode_tensors({**tensors, **TENSORS}, {"a": "é"})
    text = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    assert content == safetensors.torch.save({**tensors, **TENSORS}, metadata=text)


def test_equal_contents_give_equal_bytes() -> None:
    assert encode_tensors(TENSORS, {"a": 1, "b": 2}) == encode_tensors(
        dict(reversed(TENSORS.items())), {"b": 2, "a": 1}
    )
    assert encode_tensors(TENSORS, {"a": 1}) != encode_tensors(TENSORS, {"a": 2})


def test_any_flipped_bit_or_truncation_of_tensors_is_detected() -> None:
    """Flip each bit of values, names, shapes, metadata and the digest itself."""
    content = encode_tensors(TENSORS, {"round": 7})
    for damaged in (*flips(content), *(content[:kept] for kept in (0, 1, 8, 40, 100, 200, -8, -1))):
        with pytest.raises(ValueError, match=r"digest|damaged"):
            decode_tensors(damaged)


def made(folder: Path) -> Checkpoints:
    """Write checkpoints of rounds 3, 4 and 5; the best is 3."""
    checkpoints = Checkpoints(folder)
    folder.mkdir()
    for round in (3, 4, 5):
        checkpoints.save(Checkpoint("fedavg", 1, round, Best(3, 0.5), {"theta": torch.full((64,), float(round))}))
    checkpoints.close()
    assert checkpoints.rounds() == [3, 4, 5]
    return checkpoints


def test_a_damaged_checkpoint_is_named_with_the_others(tmp_path: Path) -> None:
    """For any bit of it; no other file is used in its place."""
    checkpoints = made(tmp_path / "checkpoints")
    path = tmp_path / "checkpoints" / "round-000005.safetensors"
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 61):
        path.write_bytes(flipped(whole, bit))
        with pytest.raises(DataError, match=r"round-000005\.safetensors is not a ") as refused:
            checkpoints.load()
        assert "3, 4" in str(refused.value.hint)
        assert "round 4 with resume=True" in str(refused.value.hint)
    assert checkpoints.load(4).state["theta"][0] == 4
    path.unlink()
    assert checkpoints.load().round == 4


def test_the_hint_for_a_damaged_checkpoint_works(tmp_path: Path) -> None:
    """Resuming from an earlier round requires removing the file; the first and the only one have no earlier round."""
    checkpoints = made(tmp_path / "checkpoints")
    first, second, third = sorted((tmp_path / "checkpoints").iterdir())
    whole = first.read_bytes()
    first.write_bytes(flipped(whole, 999))
    with pytest.raises(DataError) as refused:
        checkpoints.load("best")
    assert "4, 5" in str(refused.value.hint)
    assert "resume" not in str(refused.value.hint)
    third.write_bytes(whole)  # under another name
    with pytest.raises(DataError, match=r"round-000005\.safetensors .*round 3"):
        checkpoints.load()
    second.unlink()
    third.unlink()
    with pytest.raises(DataError, match=r"only one"):
        checkpoints.load()


def test_a_damaged_state_is_rejected(tmp_path: Path) -> None:
    states, version = States(FolderStore(tmp_path)), Version(2, 1, 0, 3, 77)
    states.save("c0", version, {"q": torch.arange(40.0)})
    path = tmp_path / "c0" / f"{version}.safetensors"
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 61):
        path.write_bytes(flipped(whole, bit))
        with pytest.raises(DataError, match=rf"{version}\.safetensors is not a "):
            states.load("c0", version)
    path.write_bytes(whole)
    states.save("c1", version, {"q": torch.zeros(40)})
    assert states.load("c0", version) is not None
    path.write_bytes((tmp_path / "c1" / path.name).read_bytes())  # of another client
    with pytest.raises(DataError, match=r"\bc1\b"):
        states.load("c0", version)
