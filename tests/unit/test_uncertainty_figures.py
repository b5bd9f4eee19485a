"""Reliability diagrams, figures of clients whose models are distributions, and examples with predictions."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import yaml
from run_folders import ensembles
from scipy import stats
from typer.testing import CliRunner
from vowel_runs import on_vowels

from fedloom.cli.main import app
from fedloom.data.federated import FederatedDataset
from fedloom.data.spec import Targets
from fedloom.evaluation.uncertainty import BINS, EDGES, EXAMPLES, INFORMATION, RIGHT, client_document
from fedloom.reporting.examples import MOST, SIDE, _numbers, _picture, predicted, write_examples
from fedloom.reporting.report_classes import (
    _groups,
    draw_accuracy_by_uncertainty,
    draw_confidence_over_training,
    draw_reliability,
)
from fedloom.runs.folder import RunFolder
from fedloom.serving.client_models import client_models


def rows(examples: int, accuracy: float) -> list[list[float]]:
    return [[0, 0.0, 0.0]] * (BINS - 1) + [[examples, 0.97, accuracy]]


def document(**groups: Any) -> dict[str, Any]:
    return {"round": 3, "edges": EDGES, "personal": {"seen": None, "unseen": None}, "global": None} | groups


def test_the_global_curve_covers_the_examples_of_both_groups() -> None:
    shared = {"seen": rows(30, 1.0), "unseen": rows(10, 0.6)}
    found = _groups(document(**{"global": shared}))
    assert list(found) == ["global"]
    assert found["global"][-1] == pytest.approx([40, 0.97, 0.9])
    assert found["global"][0] == [0, 0, 0]


def test_only_available_figures_are_drawn_with_equal_bytes() -> None:
    whole = document(personal={"seen": rows(5, 1.0), "unseen": rows(5, 0.5)}, **{"global": {"seen": rows(5, 0.1)}})
    picture = draw_reliability(whole)
    assert picture == draw_reliability(whole)
    ElementTree.fromstring(picture)
    for label in ("seen clients", "unseen clients", "global model"):
        assert label in picture
    alone = draw_reliability(document(personal={"seen": rows(5, 1.0), "unseen": None}))
    assert "unseen clients" not in alone
    assert "global model" not in alone
    ElementTree.fromstring(draw_reliability(document()))


# Clients


def told(before: dict[str, Any] | None, number: int, n: int = 8) -> dict[str, Any]:
    """Return the document of made-up clients after a round; client 2 never answers, and the last two are unseen."""
    calibration, uncertainty = ensembles(n, 4, number / 10, torch.Generator().manual_seed(number))
    calibration[2], uncertainty[2] = 0, 0
    return client_document(
        before,
        number,
        clients=[f"c{i}" for i in range(n)],
        seen=torch.arange(n) < n - 2,
        calibration=calibration,
        uncertainty=uncertainty,
    )


def after(*rounds: int) -> dict[str, Any]:
    found: dict[str, Any] | None = None
    for number in rounds:
        found = json.loads(json.dumps(told(found, number), allow_nan=False))
    assert found is not None
    return found


def test_clients_have_their_own_numbers() -> None:
    calibration, uncertainty = ensembles(8, 4, 0.7, torch.Generator().manual_seed(7))
    (one,) = after(7)["rounds"]
    assert one["examples"][2] is one["right"][2] is one["entropy"][2] is one["mutual_information"][2] is None
    for i in (0, 1, 3, 7):
        assert one["examples"][i] == calibration[i, :, EXAMPLES].tolist()
        assert one["right"][i] == calibration[i, :, RIGHT].tolist()
        assert sum(one["examples"][i]) == 40
        assert one["entropy"][i] == pytest.approx(float(uncertainty[i, 1]) / 40, rel=1e-5)
        assert one["mutual_information"][i] == pytest.approx(float(uncertainty[i, INFORMATION]) / 40, rel=1e-5)
        assert 0 < one["mutual_information"][i] < one["entropy"][i]


def test_the_first_two_rounds_and_the_last_are_kept() -> None:
    assert [one["round"] for one in after(0)["rounds"]] == [0]
    assert [one["round"] for one in after(0, 1, 2, 5, 10)["rounds"]] == [0, 1, 10]
    stopped = after(0, 1, 2, 5, 10)
    resumed = told(told(stopped, 5), 10)  # from a checkpoint of round 2 to 4
    assert resumed == stopped
    assert [one["round"] for one in told(stopped, 1)["rounds"]] == [0, 1]


@pytest.mark.slow
def test_five_drawn_networks_over_training() -> None:
    document = after(0, 1, 10)
    picture = draw_confidence_over_training(document)
    assert picture == draw_confidence_over_training(document)
    ElementTree.fromstring(picture)
    texts = ["".join(node.itertext()) for node in ElementTree.fromstring(picture).iter() if node.tag.endswith("text")]
    last = document["rounds"][-1]
    known = sorted((entropy, i) for i, entropy in enumerate(last["entropy"]) if entropy is not None)
    wanted = [known[place][1] for place in (0, 2, 3, 4, 6)]  # of seven: quartiles are rounded to even
    assert [text.strip() for text in texts if re.fullmatch(r"\s*c\d\s*", text)] == [f"c{i}" for i in wanted]
    output = " ".join(texts)
    for one in document["rounds"]:
        assert f"round {one['round']}" in output
        for i in wanted:
            right = sum(one["right"][i]) / sum(one["examples"][i])
            numbers = f"H {one['entropy'][i]:.2f}, I {one['mutual_information'][i]:.3f}"
            assert f"accuracy {right:.0%}" in output
            assert numbers in output
    few = told(None, 3, n=3)
    assert {f"c{i}" for i in (0, 1)} <= set(re.findall(r"c\d", draw_confidence_over_training(few)))
    missed = json.loads(json.dumps(document))
    missed["rounds"][1]["examples"][wanted[0]] = None
    assert "no answer" in draw_confidence_over_training(missed)


def test_clients_are_drawn_by_their_uncertainty() -> None:
    document = after(0, 10)
    picture = draw_accuracy_by_uncertainty(document)
    assert picture == draw_accuracy_by_uncertainty(document)
    ElementTree.fromstring(picture)
    assert "seen clients" in picture
    assert "unseen clients" in picture
    last = document["rounds"][-1]
    here = [i for i, counts in enumerate(last["examples"]) if counts is not None]
    right = [sum(last["right"][i]) / 40 for i in here]
    for key in ("entropy", "mutual_information"):
        r = stats.spearmanr([last[key][i] for i in here], right).statistic
        assert f"ρ {r:.2f}" in picture


@pytest.mark.slow
def test_a_resumed_run_keeps_the_same_figures(tiny_root: Path, tmp_path: Path) -> None:
    tree = {
        "name": "tiny",
        "data": {"dataset": "tiny", "root": str(tiny_root), "partition": {"scheme": "iid", "clients": 5},
                 "held_out_fraction": 0.2},
        "model": {"name": "mlp", "hidden": [8]},
        "algorithm": {"name": "pfedbayes", "steps": 2, "batch_size": 8, "draws": 3},
        "federation": {"rounds": 4, "clients_per_round": 4, "checkpoint_every_s": 0},
        "evaluation": {"every": 1},
        "runtime": {"workers": 0},
    }  # fmt: skip
    file, whole, copy = tmp_path / "tiny.yaml", tmp_path / "whole", tmp_path / "copy"
    file.write_text(yaml.safe_dump(tree))
    done = CliRunner().invoke(app, ["run", str(file), "--out", str(whole), "--report"])
    assert done.exit_code == 0, (done.output, done.exception)
    document = json.loads((whole / "uncertainty.json").read_text())
    assert [one["round"] for one in document["rounds"]] == [0, 1, 4]
    assert document["clients"]["seen"].count(False) == 1
    line = json.loads((whole / "metrics.jsonl").read_text().splitlines()[-1])
    last = document["rounds"][-1]
    seen = [i for i, seen in enumerate(document["clients"]["seen"]) if seen]
    n = [sum(last["examples"][i]) for i in seen]
    pooled = sum(k * last["mutual_information"][i] for k, i in zip(n, seen, strict=True)) / sum(n)
    assert line["uncertainty"]["seen"]["mutual_information"] == pytest.approx(pooled, rel=1e-4)
    assert "<h2>Uncertainty</h2>" in (whole / "report.html").read_text()

    shutil.copytree(whole, copy)
    (copy / "checkpoints" / "round-000004.safetensors").unlink()
    (copy / "summary.json").unlink()
    done = CliRunner().invoke(app, ["run", str(file), "--out", str(copy), "--resume"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert (copy / "uncertainty.json").read_bytes() == (whole / "uncertainty.json").read_bytes()

    tree["algorithm"] = {"name": "fedavg", "local": {"steps": 2, "lr": 0.1}}  # a single network has no disagreement
    file.write_text(yaml.safe_dump(tree))
    done = CliRunner().invoke(app, ["run", str(file), "--out", str(tmp_path / "plain")])
    assert done.exit_code == 0, (done.output, done.exception)
    assert not (tmp_path / "plain" / "uncertainty.json").exists()


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
