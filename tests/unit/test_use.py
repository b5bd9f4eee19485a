"""``fedloom evaluate`` and ``personalize``: missing or damaged files are never skipped silently."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vowel_runs import loop, on_vowels

from fedloom import load
from fedloom.cli.runs import evaluate_command as evaluate
from fedloom.data.assignment import PartitionSettings
from fedloom.data.partition import partition_dataset
from fedloom.data.schemes import MeansScheme
from fedloom.engine.trained import evaluate as measured
from fedloom.errors import DataError, ExperimentError, QuorumError, StorageError
from fedloom.serving.commands import personalize_command as personalize

MEANS = {"scheme": "means", "clients": 4, "dimension": 2, "train_per_client": 20, "test_per_client": 10}
WGA = {"name": "wga", "batch_size": 4, "steps_per_round": 2}
PEFLL = {"name": "pefll", "local": {"steps": 1}, "embedding": {"network": "mlp"}}
PFEDBAYES = {"name": "pfedbayes", "steps": 1, "samples": 1, "draws": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    loop(folder, {"dataset": "gaussian", "partition": MEANS}, {"name": "quadratic"}, WGA).run()
    return folder / "run"


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """Return clients that the run has never seen."""
    scheme = MeansScheme.model_validate(MEANS)
    return partition_dataset("gaussian", PartitionSettings(scheme, 9, 0.0, 0.2), root=tmp_path / "data")


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_partition_is_rejected_before_writing(run: Path, others: Path, tmp_path: Path, damage: str) -> None:
    evaluate(run, partition=str(others), out=tmp_path / "whole.json")
    assert json.loads((tmp_path / "whole.json").read_text())["unseen"]["clients"] == 4
    shard = sorted((others / "shards").iterdir())[2]
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(DataError, match=shard.name):
        evaluate(run, partition=str(others), out=tmp_path / "ev.json")
    with pytest.raises(DataError, match=shard.name):
        personalize(str(run), tmp_path / "models", partition=str(others))
    assert not (tmp_path / "ev.json").exists()
    assert not (tmp_path / "models").exists()


def test_clients_that_cannot_be_measured_are_reported(tmp_path: Path) -> None:
    trained = on_vowels(tmp_path, PFEDBAYES)
    trained.run()
    run = trained.folder.path
    assert measured(run).statistics["seen"]["clients"] == 12
    shutil.rmtree(run / "states")
    with pytest.raises(QuorumError, match=r"^3 of 15 clients could not be measured: [^,]+, [^,]+, [^,]+$"):
        evaluate(run, out=tmp_path / "ev.json")
    assert not (tmp_path / "ev.json").exists()
    shutil.rmtree(run / "states", ignore_errors=True)
    (run / "published.json").write_text("{")
    with pytest.raises(DataError, match=r"published\.json is damaged"):
        evaluate(run)
    trained.folder.write_json("published.json", {})
    with pytest.raises(DataError, match=r"published\.json: has no key 'url'"):
        evaluate(run)


def test_results_are_shown_without_a_writable_file(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StorageError, match="nope") as caught:
        evaluate(run, out=tmp_path / "nope" / "x.json").print(as_json=False)
    assert caught.value.hint == "choose another file with --out"
    assert "seen" in capsys.readouterr().out


@pytest.mark.parametrize(("file", "algorithm"), [("descriptors.json", PEFLL), ("uncertainty.json", PFEDBAYES)])
def test_a_damaged_file_of_a_resumed_run_is_named(tmp_path: Path, file: str, algorithm: dict[str, Any]) -> None:
    on_vowels(tmp_path, algorithm).run()
    (tmp_path / "run" / file).write_text('{"round": [')
    resumed = on_vowels(tmp_path, algorithm, rounds=2)
    resumed.resume()
    with pytest.raises(DataError, match=rf"{file} is damaged"):
        resumed.run()


def test_saved_client_models_need_no_fedloom(tmp_path: Path) -> None:
    on_vowels(tmp_path, PEFLL).run()
    run = tmp_path / "run"
    personalize(str(run), tmp_path / "models")
    expected = load(run).models()
    assert {path.name for path in (tmp_path / "models").iterdir()} == {
        f"{client}.{end}" for client in expected for end in ("safetensors", "md")
    }
    for client, model in expected.items():
        weights = load_file(tmp_path / "models" / f"{client}.safetensors")
        assert weights.keys() == model.state_dict().keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
        network = torch.nn.Sequential()
        network.fc1, network.fc2 = torch.nn.Linear(9, 4), torch.nn.Linear(4, 11)
        network.load_state_dict(weights)
    with pytest.raises(ExperimentError, match=r"predictor must be one of personal .*'global'"):
        personalize(str(run), tmp_path / "others", set_=["predictor=global"])
    assert not (tmp_path / "others").exists()


def test_models_of_data_without_classes_are_saved_too(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"clients must be .*4 clients.*"):
        personalize(str(run), tmp_path / "models", clients=" , ")
    assert not (tmp_path / "models").exists()
    personalize(str(run), tmp_path / "models", clients="client-0001")
    assert {path.name for path in (tmp_path / "models").iterdir()} == {"client-0001.safetensors", "client-0001.md"}
    assert [tuple(t.shape) for t in load_file(tmp_path / "models" / "client-0001.safetensors").values()] == [(2,)]
    assert "no classes" in (tmp_path / "models" / "client-0001.md").read_text()
