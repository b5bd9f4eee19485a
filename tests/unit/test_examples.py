"""Test examples with predictions, written by a run for its report."""

from __future__ import annotations

from pathlib import Path

import torch
from vowel_runs import on_vowels

from fedloom.data.federated import FederatedDataset
from fedloom.data.spec import Targets
from fedloom.reporting.examples import MOST, SIDE, _numbers, _picture, predicted, write_examples
from fedloom.runs.folder import RunFolder
from fedloom.serving.client_models import client_models


def test_predictions_equal_those_of_the_clients_models(tmp_path: Path) -> None:
    loop = on_vowels(tmp_path, {"name": "ditto"}, rounds=1)
    loop.run()
    folder = RunFolder(tmp_path / "run")
    ids = [entry.id for entry in loop.manifest.clients][:3]
    found = predicted(folder, ids)
    assert list(found) == ids
    models = client_models(folder.path, ids)
    data = FederatedDataset.open(next((tmp_path / "data" / "partitions").glob("vowel-*")))
    for client, (x, y, predictions) in found.items():
        test = data.client(client).test
        assert len(y) == len(x) == min(MOST, len(test))
        assert torch.equal(y, test.y[:MOST])
        model = models[client]
        raw = x * model.std + model.mean
        torch.testing.assert_close(predictions.exp(), model(raw), rtol=1e-4, atol=1e-5)
    write_examples(folder, "classification", Targets("classification", (), 11))
    assert not folder.has("examples.json")


def test_numbers_are_in_original_units() -> None:
    targets = Targets("regression", (2,), 2, (), (10.0, -1.0), (2.0, 0.5))
    y, predictions = torch.tensor([[0.0, 2.0]]), torch.tensor([[1.0, -2.0]])
    assert _numbers(torch.zeros(1, 3), y, predictions, targets) == {"true": [[10.0, 0.0]], "predicted": [[12.0, -2.0]]}


def test_the_picture_has_the_most_wrong_labelled_pixels() -> None:
    y = torch.zeros(3, 4, 4, dtype=torch.int64)
    logits = torch.zeros(3, 2, 4, 4)
    logits[:, 0] = 1.0
    logits[1, 1, 0] = 2.0  # four wrong pixels
    logits[2, 1] = 2.0  # wrong everywhere, but without a class
    y[2] = 255
    x = torch.arange(48.0).reshape(3, 1, 4, 4)
    found = _picture(x, y, logits, Targets("segmentation", (4, 4), 2))
    assert found["predicted"] == [[1] * 4] + [[0] * 4] * 3
    assert found["true"] == [[0] * 4] * 4
    assert found["image"] == (255 * torch.arange(16) / 15).round().to(torch.int64).reshape(4, 4).tolist()
    named = _picture(
        {"image": torch.rand(3, 3, 4, 4), "row": torch.rand(3, 5)}, y, logits, Targets("segmentation", (4, 4), 2)
    )
    assert torch.tensor(named["image"]).shape == (4, 4, 3)
    assert "image" not in _picture(torch.rand(3, 5), y, logits, Targets("segmentation", (4, 4), 2))


def test_large_images_are_downsampled() -> None:
    side = 2 * SIDE + 1
    y = torch.zeros(1, side, side, dtype=torch.int64)
    found = _picture(
        torch.rand(1, 1, side, side), y, torch.rand(1, 2, side, side), Targets("segmentation", (side, side), 2)
    )
    assert all(len(found[key]) <= SIDE for key in ("image", "true", "predicted"))
