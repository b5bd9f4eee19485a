"""Runs side by side."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from run_folders import write_run

from fedloom.errors import DataError, ExperimentError
from fedloom.evaluation.compare import HEADINGS, as_text, comparison_table


def experiment(algorithm: str, seed: int = 1, name: str = "two-class", **more: Any) -> str:
    rounds = 0 if algorithm == "local" else 2
    return json.dumps(  # JSON is YAML
        {
            "name": name,
            "seed": seed,
            "data": {
                "dataset": "fashion-mnist",
                "root": "/somewhere" if seed == 1 else None,
                "partition": {"scheme": "classes", "clients": 12, "classes_per_client": 2},
                "unseen_fraction": 0.25,
            },
            "model": {"name": "lenet"},
            "algorithm": {"name": algorithm, **more},
            "federation": {"rounds": rounds, "clients_per_round": 5},
            "runtime": {"workers": seed % 3},
        }
    )


def run(folder: Path, algorithm: str, *, seed: int = 1, settings: dict[str, Any] | None = None, **more: Any) -> Path:
    text = experiment(algorithm, seed, folder.name, **(settings or {}))
    return write_run(folder, algorithm=algorithm, seed=seed, n=12, unseen=3, rounds=(0, 2), experiment=text, **more)


COSTS = {"personal": {"client_steps": 50, "payload_down": 343_000, "payload_up": 0}, "global": {"client_steps": 0}}


def test_one_row_for_each_kind_of_model(tmp_path: Path) -> None:
    folders = [
        run(tmp_path / "a", "pefll"),
        run(tmp_path / "b", "fedavg", predictors=("personal", "global"), new_client=COSTS),
        run(tmp_path / "c", "local"),
    ]
    rows = comparison_table(folders)
    assert [row["method"] for row in rows] == ["PeFLL", "FedAvg", "FedAvg + fine-tuning", "Local"]
    summary = json.loads((folders[1] / "summary.json").read_text())
    assert rows[1]["unseen"]["accuracy_mean"] == summary["global"]["unseen"]["accuracy_mean"]
    assert rows[2]["unseen"]["accuracy_mean"] == summary["unseen"]["accuracy_mean"]
    assert rows[2]["unseen"]["accuracy_std"] == summary["unseen"]["accuracy_std"]
    assert rows[2]["unseen"]["accuracy_mean_std"] is None
    assert (rows[2]["client_steps"], rows[2]["payload_down"], rows[2]["payload_up"]) == (50, 343_000, 0)
    assert (rows[1]["client_steps"], rows[1]["payload_down"]) == (0, None)
    assert rows[0]["client_steps"] is None
    assert rows[0]["runs"] == ["a"]
    cells = as_text(rows)
    assert all(len(row) == len(HEADINGS) for row in cells)
    assert cells[2][-3:] == ("50", "343 kB", "0 B")
    assert cells[0][-3:] == ("–", "–", "–")
    mean, std = summary["seen"]["accuracy_mean"], summary["seen"]["accuracy_std"]
    assert cells[2][:2] == ("FedAvg + fine-tuning", f"{100 * mean:.1f} ± {100 * std:.1f}")


def test_seeds_are_merged(tmp_path: Path) -> None:
    folders = [run(tmp_path / f"seed-{seed}", "pefll", seed=seed) for seed in (1, 2, 3)]
    (row,) = comparison_table(folders)
    means = [json.loads((folder / "summary.json").read_text())["seen"]["accuracy_mean"] for folder in folders]
    assert row["seeds"] == [1, 2, 3]
    assert row["seen"]["accuracy_mean"] == pytest.approx(statistics.mean(means))
    assert row["seen"]["accuracy_mean_std"] == pytest.approx(statistics.stdev(means))
    assert f"± {100 * statistics.stdev(means):.1f}" in as_text([row])[0][1]


def test_other_settings_or_an_equal_seed_are_not_merged(tmp_path: Path) -> None:
    folders = [run(tmp_path / "a", "local"), run(tmp_path / "b", "local", seed=2, settings={"local": {"epochs": 7}})]
    assert [row["runs"] for row in comparison_table(folders)] == [["a"], ["b"]]
    twice = [run(tmp_path / "c", "pefll"), run(tmp_path / "d", "pefll")]
    assert [row["runs"] for row in comparison_table(twice)] == [["c"], ["d"]]
    assert [row[0] for row in as_text(comparison_table(twice))] == ["PeFLL (c)", "PeFLL (d)"]


def test_a_personal_model_that_is_the_global_one_has_no_row(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", "fedavg", predictors=("personal", "global"))
    summary = json.loads((folder / "summary.json").read_text())
    summary["seen"], summary["unseen"] = summary["global"]["seen"], summary["global"]["unseen"]
    (folder / "summary.json").write_text(json.dumps(summary))
    assert [row["method"] for row in comparison_table([folder])] == ["FedAvg"]


def test_a_method_without_an_answer_for_unseen_clients(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", "pefll")
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"unseen": None}))
    (row,) = comparison_table([folder])
    assert row["unseen"] is None
    assert as_text([row])[0][3:5] == ("–", "–")


def test_what_cannot_be_compared_is_named(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", "pefll")
    text = (folder / "summary.json").read_text()
    for content, message in (("{", "is not JSON"), ("{}", "has no key 'algorithm'")):
        (folder / "summary.json").write_text(content)
        with pytest.raises(DataError, match=message):
            comparison_table([folder])
    (folder / "summary.json").unlink()
    with pytest.raises(DataError, match=r"has no summary\.json, the run is not finished"):
        comparison_table([folder])
    (folder / "summary.json").write_text(text)
    (folder / "experiment.yaml").write_text("name: x\n")
    with pytest.raises(ExperimentError):
        comparison_table([folder])
    with pytest.raises(DataError, match="no such folder"):
        comparison_table([tmp_path / "nowhere"])
