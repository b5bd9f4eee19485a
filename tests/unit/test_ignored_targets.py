"""Pixels without a class and positions without a token: from arrays and folders to losses and new clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from facts import mentions, refusing
from numpy.typing import NDArray
from PIL import Image

import fedloom
from fedloom.data.federated import FederatedDataset
from fedloom.data.manifest import Manifest
from fedloom.data.newcomer import Newcomer
from fedloom.data.own import Own
from fedloom.data.pack import PackSettings, pack
from fedloom.data.pack.examples import Request
from fedloom.data.problem import Problem
from fedloom.data.spec import Targets
from fedloom.errors import DataError, ExperimentError
from fedloom.experiment import parse_experiment
from fedloom.tasks.base import MetricSums
from fedloom.tasks.next_token import NextToken
from fedloom.tasks.segmentation import Segmentation

N = 30
RNG = np.random.default_rng(3)
IMAGES = RNG.integers(0, 256, (2 * N, 3, 6, 6), dtype=np.uint8)
MASKS = (IMAGES[:, 0] // 100).astype(np.uint8)  # classes 0, 1, 2
BORDERED = np.where(RNG.random(MASKS.shape) < 0.2, 255, MASKS).astype(np.uint8)
TOKENS = RNG.integers(0, 50, (2 * N, 5))


def opened(x: Any, y: NDArray[Any], root: Path, **settings: Any) -> FederatedDataset:
    """Return the partition of two owners' arrays."""
    clients = {name: (x[rows], y[rows]) for name, rows in (("a", slice(0, N)), ("b", slice(N, None)))}
    return fedloom.Federated.from_arrays(clients, root=root, held_out_fraction=0.0, **settings).open()


def all_targets(dataset: FederatedDataset) -> torch.Tensor:
    """Return the targets of all clients and splits."""
    clients = [dataset.client(name) for name in dataset.manifest.roster]
    return torch.cat([getattr(client, split).y for client in clients for split in ("train", "validation", "test")])


def targets_of(newcomer: Newcomer) -> torch.Tensor:
    """Return a new client's targets."""
    found = newcomer.client(newcomer.client_id).train.y
    assert found is not None
    return found


def wanted_of(manifest: Manifest) -> Problem:
    """Return the requirements of a run on a partition for a new client's data."""
    return Problem(manifest.dataset, manifest.spec, 1)


@pytest.mark.parametrize("given", [{}, {"outputs": 3}, {"classes": ["road", "car", "sky"]}, {"outputs": 20}])
def test_pixels_of_255_have_no_class(given: dict[str, Any], tmp_path: Path) -> None:
    dataset = opened(IMAGES, BORDERED, tmp_path, **given)
    assert dataset.manifest.spec.outputs == given.get("outputs", 3)
    found = all_targets(dataset)
    assert found.dtype == torch.int64
    assert torch.equal(torch.bincount(found.flatten()), torch.bincount(torch.from_numpy(BORDERED).long().flatten()))


def test_black_and_white_masks_have_two_classes(tmp_path: Path) -> None:
    white = np.where(MASKS > 0, 255, 0).astype(np.uint8)
    kinds: tuple[dict[str, Any], ...] = ({}, {"outputs": 2}, {"classes": ["no", "yes"]})
    for i, given in enumerate(kinds):
        dataset = opened(IMAGES, white, tmp_path / str(i), **given)
        assert dataset.manifest.spec.outputs == 2
        assert sorted(set(all_targets(dataset).flatten().tolist())) == [0, 1]
    many = opened(IMAGES, white, tmp_path / "many", outputs=5)  # then pixels of the other classes may be absent
    assert sorted(set(all_targets(many).flatten().tolist())) == [0, 255]


def test_255_is_a_class_with_256_classes_or_more(tmp_path: Path) -> None:
    dataset = opened(IMAGES, BORDERED, tmp_path / "a", outputs=256)
    assert dataset.manifest.spec.targets.ignored is None
    wide = BORDERED.astype(np.int64)
    wide[0, 0, 0] = 299
    assert opened(IMAGES, wide, tmp_path / "b", outputs=300).manifest.spec.outputs == 300
    assert mentions(Segmentation().setting_fault(300) or "", "task.ignore_index", "300")


@pytest.mark.parametrize(("value", "dtype"), [(7, np.int64), (-1, np.int64), (254, np.uint8), (np.nan, np.float64)])
def test_other_pixel_values_are_rejected(value: float, dtype: Any, tmp_path: Path) -> None:
    wrong = BORDERED.astype(dtype)
    wrong[4, 2, 1] = value
    with refusing(DataError, "0 to 2", "255", f"{value:g}"):
        opened(IMAGES, wrong, tmp_path, classes=["road", "car", "sky"], task="segmentation")


def test_masks_without_any_class_are_rejected(tmp_path: Path) -> None:
    with refusing(DataError, "255", "every pixel"):
        opened(IMAGES, np.full_like(MASKS, 255), tmp_path, task="segmentation")


def test_packed_masks_keep_pixels_without_a_class(tmp_path: Path) -> None:
    for i in range(20):
        for kind, values in (("images", IMAGES[i].transpose(1, 2, 0)), ("masks", BORDERED[i])):
            (tmp_path / "data" / kind).mkdir(parents=True, exist_ok=True)
            Image.fromarray(values).save(tmp_path / "data" / kind / f"{i}.png")
    targets = {"task": "segmentation", "shape": [6, 6], "outputs": 3}
    own = Own.model_validate({"kind": "pixels", "input_shape": [3, 6, 6], "targets": targets})
    packed = pack(tmp_path / "data", tmp_path / "out", PackSettings("ann", Request(own.spec)))
    assert any(mentions(note, "255") for note in packed.notes)
    assert packed.card.spec.targets == Targets("segmentation", (6, 6), 3)


def test_masks_of_new_clients_are_read_like_those_of_clients(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = opened(IMAGES, BORDERED, tmp_path / "a").manifest
    newcomer = Newcomer.from_arrays("new", IMAGES[:4], BORDERED[:4], wanted_of(manifest))
    assert torch.equal(targets_of(newcomer), torch.from_numpy(BORDERED[:4]).long())
    with pytest.raises(DataError):
        Newcomer.from_arrays("new", IMAGES[:4], BORDERED[:4] + 3, wanted_of(manifest))
    white = np.where(MASKS > 0, 255, 0).astype(np.uint8)
    wanted = wanted_of(opened(IMAGES, white, tmp_path / "b").manifest)
    with caplog.at_level("WARNING", "fedloom.data"):
        newcomer = Newcomer.from_arrays("new", IMAGES[:4], white[:4], wanted)
    assert mentions(caplog.text, "255", "class 1")
    assert torch.equal(targets_of(newcomer), torch.from_numpy(white[:4] // 255).long())
    with refusing(DataError, "255"):
        Newcomer.from_arrays("new", IMAGES[:4], np.full((4, 6, 6), 255), wanted)


def test_identical_input_tokens_become_the_next_ones(tmp_path: Path) -> None:
    moved = np.concatenate([TOKENS[:, 1:], np.full((2 * N, 1), -100)], 1)
    dataset = opened(TOKENS, TOKENS, tmp_path / "a")
    for name in dataset.manifest.roster:
        train = dataset.client(name).train
        assert isinstance(train.x, torch.Tensor)
        assert torch.equal(train.y[:, :-1], train.x[:, 1:])
        assert bool((train.y[:, -1] == -100).all())
    padded = np.where(RNG.random(TOKENS.shape) < 0.3, -100, TOKENS)
    assert int((all_targets(opened(TOKENS, padded, tmp_path / "b")) == -100).sum()) > 2 * N
    assert torch.equal(
        all_targets(opened(TOKENS, moved, tmp_path / "c")).sort(0).values, torch.from_numpy(moved).sort(0).values
    )
    wanted = wanted_of(dataset.manifest)
    newcomer = Newcomer.from_arrays("new", TOKENS[:4], TOKENS[:4], wanted)
    assert torch.equal(targets_of(newcomer), torch.from_numpy(moved[:4]))


def test_another_ignored_value_excludes_more_targets() -> None:
    outputs, y = torch.randn(4, 3, 2, 2), torch.tensor([[[0, 1], [2, 255]]] * 4)
    expected = F.cross_entropy(outputs, y.where(y != 0, 255), ignore_index=255, reduction="none").sum((1, 2)) / 2
    torch.testing.assert_close(Segmentation(ignore_index=0).loss(outputs, y), expected)
    (overlap,) = Segmentation(ignore_index=0).metric_sums(Targets("segmentation", (2, 2), 3))  # type: ignore[arg-type]
    assert isinstance(overlap, MetricSums)
    assert float(overlap.of(outputs.log_softmax(1), y).reshape(3, 3)[2].sum()) == 8
    logits, tokens = torch.randn(2, 3, 5), torch.tensor([[1, 0, -100], [0, 4, 2]])
    found = NextToken(ignore_index=0).loss(logits, tokens)
    for i, one in enumerate(found):
        wanted = F.cross_entropy(logits[i], tokens[i].where(tokens[i] != 0, -100))
        torch.testing.assert_close(one, wanted)


def test_a_task_that_contradicts_the_data_is_rejected_at_its_line() -> None:
    text = """\
name: t
data:
  own:
    kind: features
    input_shape: [4]
    targets: {task: regression}
task:
  name: multilabel
model: {name: mlp}
algorithm: {name: fedavg, local: {steps: 1}}
federation: {rounds: 1, clients_per_round: 1}
"""
    with refusing(ExperimentError, "8", "task.name", "multilabel", "regression"):
        parse_experiment(text)
    weights = text.replace("regression", "multilabel, shape: [3]").replace(
        "  name: multilabel", "  name: multilabel\n  pos_weight: [1, 2]"
    )
    with refusing(ExperimentError, "9", "task.pos_weight", "2", "3"):
        parse_experiment(weights)
