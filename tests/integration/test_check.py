"""``fedloom check``: the errors of a run, before it, and facts that agree with what the run reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from conformance_kit import TINY
from facts import mentions
from vowel_data import vowel_experiment

from fedloom.algorithms.base import find_algorithm
from fedloom.algorithms.requirements import Need
from fedloom.cli.check import NEEDS
from fedloom.errors import ExitCode

Fedloom = Callable[..., tuple[int, str, str]]

FEDAVG = {"name": "fedavg", "weighting": "uniform", "local": {"steps": 2, "batch_size": 8, "lr": 0.1}}
ROUNDS = {"rounds": 5, "clients_per_round": 3}
FAILING = """\
from torch import nn


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(9, 11)

    def forward(self, x):
        return self.a(x).tolist()
"""
NORMED = """\
from torch import nn


def net():
    return nn.Sequential(nn.Linear(9, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 11))
"""


def written(folder: Path, **sections: Any) -> Path:
    """Write an experiment on the vowel fixture's 15 speakers, and return its file."""
    tree = vowel_experiment(folder, algorithm=FEDAVG, federation=ROUNDS, evaluation={"every": 2})
    file = folder / "vowels.yaml"
    file.write_text(yaml.safe_dump(tree | sections))
    return file


def facts_of(fedloom: Fedloom, file: Path, *options: str) -> dict[str, Any]:
    code, out, err = fedloom("check", file, "--json", *options)
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def summary_of(fedloom: Fedloom, file: Path, *options: str) -> dict[str, Any]:
    code, _, err = fedloom("run", file, "--out", "run", "--no-report", *options)
    assert code == 0, err
    found: dict[str, Any] = json.loads(Path("run/summary.json").read_text())
    return found


DOCUMENTED = {
    "valid", "name", "folder", "data", "model", "method", "disclosure", "rounds", "clients_per_round", "evaluations",
    "communication", "privacy", "estimate", "failure",
}  # fmt: skip
PRIVACY = "federation.privacy={clip: 1.0, delta: 1e-3, "
BAD: dict[str, tuple[list[str], int, list[str]]] = {
    "unknown key": (["federation.speed=3"], ExitCode.EXPERIMENT, ["federation.speed"]),
    "wrong value": (["federation.rounds=many"], ExitCode.EXPERIMENT, ["federation.rounds", "many"]),
    "missing data set": (["data.root=elsewhere"], ExitCode.DATA, ["fedloom data fetch vowel"]),
    "module that fails": (
        ["model={name: module, factory: 'failing_nets:Failing'}"],
        ExitCode.EXPERIMENT,
        ["Failing", "list"],
    ),
    "method that cannot use the model": (
        ["algorithm={name: fedrod, local: {steps: 2, lr: 0.1}}", "model={name: logistic}"],
        ExitCode.EXPERIMENT,
        ["fedrod"],
    ),
    "impossible privacy": (
        [PRIVACY + "noise_multiplier: 0.5, epsilon: 0.1}"],
        ExitCode.EXPERIMENT,
        ["federation.privacy.noise_multiplier", "0.5", "0.1"],
    ),
    "too many clients per round": (
        ["federation.clients_per_round=13"],
        ExitCode.EXPERIMENT,
        ["federation.clients_per_round", "13", "12"],
    ),
    "missing tracker": (["tracking=[nowhere]"], ExitCode.EXPERIMENT, ["tracking", "nowhere"]),
    "folder in use": ([], ExitCode.EXPERIMENT, ["taken", "--out"]),
}


@pytest.mark.parametrize("name", BAD)
def test_check_refuses_what_a_run_refuses(
    fedloom: Fedloom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    overrides, code, facts = BAD[name]
    file = written(tmp_path)
    (tmp_path / "failing_nets.py").write_text(FAILING)
    monkeypatch.syspath_prepend(tmp_path)
    options = [word for override in overrides for word in ("--set", override)]
    if name == "folder in use":
        (tmp_path / "taken").mkdir()
        (tmp_path / "taken" / "notes.txt").write_text("mine")
        options += ["--out", "taken"]
    checked = fedloom("check", file, *options)
    ran = fedloom("run", file, "--no-report", *options)
    assert (checked[0], ran[0]) == (code, code)
    assert checked[1:] == ("", ran[2])
    assert mentions(checked[2], *facts), checked[2]
    as_json = json.loads(fedloom("check", file, "--json", *options)[1])
    assert (as_json["valid"], as_json["exit_code"]) == (False, code)
    assert as_json["errors"][0]["message"] in ran[2]
    assert not (tmp_path / "runs").exists()
    assert [path.name for path in tmp_path.glob("taken/*")] in ([], ["notes.txt"])


def test_independent_errors_are_shown_together(fedloom: Fedloom, tmp_path: Path) -> None:
    file = written(tmp_path, tracking=["nowhere"], model={"name": "lenet"})
    options = ["--set", f"data.root={tmp_path / 'empty'}"]
    code, _, err = fedloom("check", file, *options)
    ran = fedloom("run", file, *options)
    assert code == ran[0]
    assert err.endswith(ran[2])  # the run's error is the last one that a user reads
    first = fedloom("check", file, "--set", "model={name: mlp}", *options)
    assert mentions(first[2], "tracking", "fedloom data fetch vowel")
    errors = json.loads(fedloom("check", file, "--json", "--set", "model={name: mlp}", *options)[1])["errors"]
    assert [error["exit_code"] for error in errors] == [ExitCode.EXPERIMENT, ExitCode.DATA]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("method", sorted(TINY))
def test_bytes_parameters_and_evaluations_are_those_of_the_run(
    fedloom: Fedloom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    name = method.partition(":")[0]
    rounds = 3 if find_algorithm(name).trains else 0
    model: dict[str, Any] = {"name": "mlp", "hidden": [4]}
    if "normalization" in find_algorithm(name).needs:
        (tmp_path / "normed_nets.py").write_text(NORMED)
        monkeypatch.syspath_prepend(tmp_path)
        model = {"name": "module", "factory": "normed_nets:net"}
    file = written(
        tmp_path,
        algorithm={"name": name, **TINY[method]},
        federation={**ROUNDS, "rounds": rounds},
        model=model,
    )
    facts, summary = facts_of(fedloom, file), summary_of(fedloom, file)
    spent = summary["communication"]
    if rounds:
        assert {way: facts["communication"][way]["total"] for way in ("payload_up", "payload_down")} == {
            way: spent[way] for way in ("payload_up", "payload_down")
        }
    else:
        assert facts["communication"] is None
    lines = Path("run/metrics.jsonl").read_text().splitlines()
    assert facts["evaluations"] == len(lines)
    assert facts["estimate"]["seconds"][0] <= facts["estimate"]["seconds"][1]


@pytest.mark.slow
def test_privacy_and_sums_agree_with_the_run(fedloom: Fedloom, tmp_path: Path) -> None:
    privacy = {"clip": 1.0, "epsilon": 8.0, "delta": 1e-3, "sampling": "fixed"}
    federation = {"rounds": 3, "clients_per_round": 4, "min_replies": 3, "secure_aggregation": {}, "privacy": privacy}
    file = written(tmp_path, federation=federation)
    facts, summary = facts_of(fedloom, file), summary_of(fedloom, file)
    claim = summary["training_privacy"]
    assert facts["privacy"]["epsilon"] == pytest.approx(claim["epsilon"], rel=1e-6)
    assert facts["privacy"]["noise_multiplier"] == pytest.approx(claim["noise_multiplier"], rel=1e-12)
    assert facts["disclosure"]["only_sums"]
    for way in ("payload_up", "payload_down"):
        assert facts["communication"][way]["total"] == summary["communication"][way]


def test_facts_and_sentences(fedloom: Fedloom, tmp_path: Path) -> None:
    file = written(tmp_path)
    first = facts_of(fedloom, file)
    assert first["data"]["partition"] == "created"
    facts = facts_of(fedloom, file)
    assert Path(facts["data"]["partition"]).is_dir()
    assert [facts["data"][key] for key in ("seen", "unseen", "classes")] == [12, 3, 11]
    parameters = (9 * 4 + 4) + (4 * 11 + 11)
    assert (facts["model"]["parameters"], facts["model"]["bytes"]) == (parameters, 4 * parameters)
    assert facts["disclosure"]["training"]["model update"] == parameters
    assert facts["communication"]["payload_down"]["client_round"] == 4 * parameters
    assert facts["evaluations"] == 4  # after rounds 0, 2, 4 and 5
    assert set(facts) == DOCUMENTED
    code, out, err = fedloom("check", file)
    assert (code, err) == (0, "")
    assert mentions(out, "12 clients", "vowel", f"{parameters} parameters", "5 rounds", "4 evaluations", "About")
    assert len(out.splitlines()) <= 24
    assert all(len(line) <= 100 for line in out.splitlines() if str(tmp_path) not in line)
    assert not (tmp_path / "runs").exists()


def test_a_first_round_that_fails_is_told(fedloom: Fedloom, tmp_path: Path) -> None:
    diverging = {**FEDAVG, "local": {"steps": 50, "batch_size": 8, "lr": 1e30}}
    facts = facts_of(fedloom, written(tmp_path, algorithm=diverging))
    assert mentions(facts["failure"], "diverged", "algorithm.local.lr")
    assert (facts["valid"], facts["estimate"]) == (True, None)


def test_long_training_is_cut_short_and_counted(fedloom: Fedloom, tmp_path: Path) -> None:
    long = {**FEDAVG, "local": {"steps": 10_000_000, "batch_size": 8, "lr": 0.01}}
    facts = facts_of(fedloom, written(tmp_path, algorithm=long))
    steps = 3 * 10_000_000  # of a round, which are not drawn; a step takes far more than 10 microseconds
    assert facts["estimate"]["round_seconds"] > steps * 1e-5
    assert facts["communication"]["payload_up"]["total"] > 0


def test_own_data_without_folders_are_checked_as_far_as_possible(fedloom: Fedloom, tmp_path: Path) -> None:
    own = {"own": {"kind": "features", "input_shape": [2], "classes": ["a", "b"]}}
    privacy = {"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-3}
    file = written(tmp_path, data=own, federation={**ROUNDS, "min_clients": 4, "privacy": privacy})
    facts = facts_of(fedloom, file)
    assert [facts["data"][key] for key in ("partition", "seen", "unseen", "classes")] == ["not given", None, None, 2]
    assert (facts["model"]["parameters"], facts["estimate"]) == ((2 * 4 + 4) + (4 * 2 + 2), None)
    assert facts["privacy"]["epsilon"] > 0
    code, out, _ = fedloom("check", file)
    assert (code, mentions(out, "--data DIR", "fedloom aggregator", "2 classes")) == (0, True)
    for bad, named in (("model={name: lenet}", "lenet"), ("tracking=[nowhere]", "nowhere")):
        code, _, err = fedloom("check", file, "--set", bad)
        assert (code, mentions(err, named)) == (ExitCode.EXPERIMENT, True)


def test_requirements_of_methods_are_sentences() -> None:
    assert {*NEEDS, "labels"} == set(get_args(Need))


def test_own_data_by_their_folders(fedloom: Fedloom, tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"c{number}").mkdir()
        rows = "".join(f"{i},{i % 5},{'ab'[i % 2]}\n" for i in range(12 + 4 * number))
        (tmp_path / f"c{number}" / "rows.csv").write_text("u,v,label\n" + rows)
    own = {"own": {"kind": "features", "input_shape": [2], "classes": ["a", "b"]}}
    file = written(tmp_path, data=own)
    folders: list[str] = []
    for number in range(3):
        source = tmp_path / f"c{number}" / "rows.csv"
        words = ["--out", f"packed{number}", "--experiment", file, "--set", "label=label", "--id", f"c{number}"]
        code, _, err = fedloom("data", "pack", source, *words)
        assert code == 0, err
        folders += ["--data", f"packed{number}"]
    facts = facts_of(fedloom, file, *folders)
    assert (facts["data"]["seen"], facts["data"]["partition"]) == (3, "own")
    assert (
        facts["communication"]["payload_up"]["total"]
        == summary_of(fedloom, file, *folders)["communication"]["payload_up"]
    )
