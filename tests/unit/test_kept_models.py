"""A worker's own models: which rounds are kept, over restarts, lost evaluations and full disks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from facts import mentions, tells
from safetensors.torch import load_file
from test_full_disk import disk_of

from fedloom.data.spec import Normalization
from fedloom.engine import assemble
from fedloom.engine.run_data import open_manifest
from fedloom.errors import ExperimentError, StorageError
from fedloom.experiment import load_experiment
from fedloom.federation.standing import LONGEST, Standing
from fedloom.models.predictors import ModelPredictor
from fedloom.serving.kept_models import KeptModels

EXPERIMENT = """\
name: kept
data: {own: {kind: features, input_shape: [3], classes: [a, b]}}
model: {name: mlp, hidden: [4]}
algorithm: {name: fedavg, local: {steps: 1, lr: 0.1}}
federation: {rounds: 1, clients_per_round: 2}
"""


def parts_of(folder: Path, text: str = EXPERIMENT) -> Any:
    (folder / "kept.yaml").write_text(text)
    e = load_experiment(folder / "kept.yaml")
    return assemble.make_parts(e, open_manifest(e, e.data.own, Normalization((0.0,) * 3, (1.0,) * 3)))  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return parts_of(tmp_path_factory.mktemp("experiment"))


def keep(kept: KeptModels, parts: Any, round: int, client: str = "north") -> None:
    """Keep a model whose values are the number of its round."""
    model = parts.setup.model
    theta = torch.full((model.layout.size,), float(round))
    kept.keep(round, [SimpleNamespace(id=client)], [{"personal": ModelPredictor(model, theta)}])  # type: ignore[list-item]


def rounds(folder: Path, client: str = "north") -> dict[str, int]:
    """Return the rounds of a client's models, by their values; the record must agree."""
    found = {
        which: int(next(iter(load_file(folder / client / f"{which}.safetensors").values())).flatten()[0])
        for which in ("last", "best")
    }
    assert json.loads((folder / client / "rounds.json").read_text()) == found
    return found


def kept_in(folder: Path, parts: Any) -> KeptModels:
    kept = KeptModels(folder, ".safetensors")
    kept.begin(parts)
    return kept


def best(round: int | None) -> Standing:
    return Standing("training", best_round=round)


def test_the_best_round_is_the_one_that_members_are_told(tmp_path: Path, parts: Any) -> None:
    kept = kept_in(tmp_path / "models", parts)
    told = {0: 0, 10: 10, 20: 10, 30: 30, 40: 30}
    seen = {}
    for round, best_round in told.items():
        keep(kept, parts, round)
        kept.told(best(best_round))
        seen[round] = rounds(tmp_path / "models")
    assert seen == {round: {"last": round, "best": best_round} for round, best_round in told.items()}
    kept.end()


def test_a_standing_that_is_repeated_writes_nothing(tmp_path: Path, parts: Any) -> None:
    kept = kept_in(tmp_path / "models", parts)
    keep(kept, parts, 10)
    files = sorted(path for path in (tmp_path / "models").rglob("*") if path.is_file())
    before = [path.stat().st_mtime_ns for path in files]
    for told in (10, None, 10, 7, 10):
        kept.told(best(told))
    assert [path.stat().st_mtime_ns for path in files] == before
    assert rounds(tmp_path / "models") == {"last": 10, "best": 10}


@pytest.mark.parametrize("told", [None, 5, 20])
def test_a_worker_that_missed_the_best_round_keeps_what_it_has(tmp_path: Path, parts: Any, told: int | None) -> None:
    kept = kept_in(tmp_path / "models", parts)
    kept.told(best(told))
    keep(kept, parts, 10)
    keep(kept, parts, 30)
    kept.told(best(told))
    assert rounds(tmp_path / "models") == {"last": 30, "best": 10}


def test_a_worker_that_starts_again_continues(tmp_path: Path, parts: Any) -> None:
    first = kept_in(tmp_path / "models", parts)
    keep(first, parts, 10)
    first.told(best(10))
    second = kept_in(tmp_path / "models", parts)
    second.told(best(10))
    keep(second, parts, 20)
    assert rounds(tmp_path / "models") == {"last": 20, "best": 10}
    second.told(best(20))
    assert rounds(tmp_path / "models") == {"last": 20, "best": 20}


def test_each_client_has_a_folder_and_instructions(tmp_path: Path, parts: Any) -> None:
    kept = kept_in(tmp_path / "models", parts)
    keep(kept, parts, 10, "north")
    keep(kept, parts, 10, "south")
    for client in ("north", "south"):
        for which in ("last", "best"):
            text = (tmp_path / "models" / client / f"{which}.md").read_text()
            assert mentions(text, f'"{which}.safetensors"', f"client {client}", "round 10", "kept", "fedavg", "softmax")
            assert "()" not in text  # there is no digest of a checkpoint


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", [".pt2", ".onnx"])
def test_other_formats(tmp_path: Path, parts: Any, form: str) -> None:
    kept = KeptModels(tmp_path / "models", form)
    kept.begin(parts)
    keep(kept, parts, 10)
    names = {path.name for path in (tmp_path / "models" / "north").iterdir()}
    assert names == {f"last{form}", f"best{form}", "rounds.json"}


def test_refusals(tmp_path: Path, parts: Any) -> None:
    with pytest.raises(ExperimentError) as unknown:
        KeptModels(tmp_path / "models", ".bin")
    assert (unknown.value.key, mentions(str(unknown.value), "'.bin'", ".safetensors")) == ("model_format", True)
    kept_in(tmp_path / "models", parts)
    other = parts_of(tmp_path, EXPERIMENT.replace("name: kept", "name: other"))
    with pytest.raises(ExperimentError) as foreign:
        kept_in(tmp_path / "models", other)
    assert (foreign.value.key, mentions(str(foreign.value), "other", "kept", tmp_path / "models")) == ("out", True)
    (tmp_path / "models" / "run.json").write_text("{")
    with pytest.raises(ExperimentError) as damaged:
        kept_in(tmp_path / "models", parts)
    assert tells(str(damaged.value), "run.json", "damaged")


def test_a_model_that_cannot_be_written_does_not_end_the_training(tmp_path: Path, parts: Any) -> None:
    """The models of the evaluation before the disk was full stay, and the worker's end says what is missing."""
    kept = kept_in(tmp_path / "models", parts)
    keep(kept, parts, 10)
    with disk_of(100):
        keep(kept, parts, 20)
        kept.told(best(20))
    assert int(next(iter(load_file(tmp_path / "models" / "north" / "best.safetensors").values())).flatten()[0]) == 10
    with pytest.raises(StorageError) as failed:
        kept.end()
    assert tells(str(failed.value), "north", "too large")
    keep(kept, parts, 30)
    assert rounds(tmp_path / "models") == {"last": 30, "best": 10}


def test_a_standing_survives_the_wire_and_nothing_else_does() -> None:
    standing = Standing("evaluating", 3, None, 4, 2, 5, 4, 1, 12.5)
    parsed = Standing.parse(standing.to_json())
    assert (parsed, parsed.remaining_s) == (standing, 12.5)
    for text in ("", "{}", "[]", '{"phase": "asleep"}', '{"phase": "training", "round": "x"}', " " * (LONGEST + 1)):
        with pytest.raises(ValueError, match=r"."):
            Standing.parse(text)
