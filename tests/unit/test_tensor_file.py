"""Files of tensors: any flipped bit is detected, and equal contents give equal bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedloom.errors import DataError
from fedloom.federation.states import States
from fedloom.runs.checkpoint import Best, Checkpoint, Checkpoints, decode_tensors, encode_tensors
from fedloom.runs.journal import Version
from fedloom.storage.folder import FolderStore

TENSORS = {"theta": torch.arange(12.0).reshape(3, 4), "n": torch.tensor(True), "none": torch.zeros(0, 2)}


def flipped(content: bytes, bit: int) -> bytes:
    """Return the content with one bit changed."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_written_tensors_are_read() -> None:
    tensors, about = decode_tensors(encode_tensors(TENSORS, {"b": [1, None], "a": "é\n\"'"}))
    assert about == {"b": [1, None], "a": "é\n\"'"}
    assert {name: (t.dtype, t.tolist()) for name, t in tensors.items()} == {
        name: (t.dtype, t.tolist()) for name, t in TENSORS.items()
    }
    assert decode_tensors(encode_tensors({}, {}))[0] == {}


def test_equal_contents_give_equal_bytes() -> None:
    assert encode_tensors(TENSORS, {"a": 1, "b": 2}) == encode_tensors(
        dict(reversed(TENSORS.items())), {"b": 2, "a": 1}
    )
    assert encode_tensors(TENSORS, {"a": 1}) != encode_tensors(TENSORS, {"a": 2})


def test_any_flipped_bit_is_detected() -> None:
    """Flip each bit of values, names, shapes, metadata and the digest itself."""
    content = encode_tensors(TENSORS, {"round": 7})
    for bit in range(8 * len(content)):
        with pytest.raises(ValueError, match=r"digest|damaged"):
            decode_tensors(flipped(content, bit))


@pytest.mark.parametrize("kept", [0, 1, 8, 40, 100, 200, -8, -1])
def test_a_truncated_file_is_rejected(kept: int) -> None:
    with pytest.raises(ValueError, match=r"digest|damaged"):
        decode_tensors(encode_tensors(TENSORS, {})[:kept])


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
    second.unlink()
    third.unlink()
    with pytest.raises(DataError, match=r"only one"):
        checkpoints.load()


def test_a_checkpoint_under_another_name_is_rejected(tmp_path: Path) -> None:
    checkpoints = made(tmp_path / "checkpoints")
    first, _, last = sorted((tmp_path / "checkpoints").iterdir())
    last.write_bytes(first.read_bytes())
    with pytest.raises(DataError, match=r"round-000005\.safetensors .*round 3"):
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
