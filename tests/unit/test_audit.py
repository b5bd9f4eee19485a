"""``fedloom audit``: a tiny run and a tiny experiment, from the command line, in Python, and on the report."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from facts import mentions, refusing
from vowel_data import vowel_experiment
from vowel_runs import on_vowels

import fedloom
from fedloom.audits.run_audit import audit_run, claim_of
from fedloom.errors import DataError, ExperimentError
from fedloom.reporting.report import write_report
from fedloom.reporting.words import audit_verdict
from fedloom.runs.folder import RunFolder

FEDAVG = {"name": "fedavg", "local": {"steps": 5, "lr": 0.05}, "personalize_steps": 20}
Command = Callable[..., tuple[int, str, str]]


def experiment(root: Path, **changed: Any) -> dict[str, Any]:
    """Return an experiment on the vowel fixture below a folder."""
    sections = {
        "model": {"name": "mlp", "hidden": [16]},
        "algorithm": FEDAVG,
        "federation": {"rounds": 3, "clients_per_round": 12},
        "evaluation": {"every": 3},
        "storage": str(root / "runs"),
    }
    return vowel_experiment(root, **(sections | changed))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fedloom.Run:
    root = tmp_path_factory.mktemp("audited")
    made = fedloom.run(experiment(root), report=False, progress=False)
    return fedloom.audit(made)


def test_an_audit_covers_every_predictor_of_seen_and_unseen_clients(run: fedloom.Run) -> None:
    found = run.audit["membership"]
    assert found["round"] == 3
    assert found["predictors"].keys() == {"personal", "global"}
    for groups in found["predictors"].values():
        assert groups["seen"]["clients"] == 12
        assert groups["unseen"]["clients"] == 3
        assert groups["seen"]["members"] == 12 * 27
        assert groups["seen"]["curve"][-1] == [1, 1]
    personal = found["predictors"]["personal"]
    assert personal["seen"]["auc"] > found["predictors"]["global"]["unseen"]["auc"]
    assert run.audit["claim"] is None


def test_a_second_audit_keeps_the_results_of_other_attacks(run: fedloom.Run, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "copy")
    shutil.copytree(run.folder, folder.path)
    folder.write_json("audit.json", {**run.audit, "canaries": {"of": "clients"}})
    threads = torch.get_num_threads()
    found = audit_run(folder.path)
    assert torch.get_num_threads() == threads
    assert found["canaries"] == {"of": "clients"}
    assert found["membership"] == run.audit["membership"]


@pytest.mark.slow
def test_the_report_shows_the_audit(run: fedloom.Run) -> None:
    page = write_report(run.folder).read_text()
    assert mentions(page, "Privacy audit", "Membership inference")
    assert "membership" in run.figures


@pytest.mark.slow
@pytest.mark.usefixtures("unrendered")
def test_the_report_marks_a_damaged_audit(run: fedloom.Run, tmp_path: Path) -> None:
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(run.folder, copy.path)
    document = copy.json("audit.json")
    (copy.path / "report.html").unlink(missing_ok=True)
    document["membership"]["predictors"]["personal"]["seen"].pop("curve")
    copy.write_json("audit.json", document)
    page = write_report(copy.path).read_text()
    assert mentions(page, "audit.json", "edited", "curve")


def test_the_command_prints_one_screen(run: fedloom.Run, fedloom: Command) -> None:
    code, out, _ = fedloom("audit", run.folder)
    assert code == 0
    assert len(out.splitlines()) < 45
    assert max(map(len, out.splitlines())) <= 100
    assert mentions(out, "AUC", "personal, seen clients", "audit.json")


@pytest.mark.slow
@pytest.mark.parametrize(("of", "steps", "least"), [("clients", 5, 0.5), ("examples", 30, 0.1)])
def test_canaries_of_a_run_without_noise_are_detected(tmp_path: Path, of: str, steps: int, least: float) -> None:
    found = fedloom.audit(
        experiment(tmp_path), canaries=60, of=of, seed=4, out=tmp_path / "audit", report=False, progress=False,
        federation__rounds=10, model__hidden=[64], algorithm__local={"steps": steps, "lr": 0.05, "batch_size": 8},
    )  # fmt: skip
    document = found.audit["canaries"]
    assert document["canaries"] == 60
    assert document["right"] > 0.8 * (document["guesses_in"] + document["guesses_out"])
    assert least < document["epsilon"] <= document["largest_bound"]
    coins = json.loads((tmp_path / "audit" / "canaries.json").read_text())
    assert sum(row["in"] for row in coins["canaries"]) == document["in"]
    assert (tmp_path / "audit" / "canaries.json").stat().st_mode & 0o077 == 0
    if of == "clients":
        assert document["clients_per_round"] == 72  # 12 of 12 clients, plus 60 canaries
        assert found.summary["seen"]["clients"] == 12
        again = fedloom.audit(found).audit  # from the partition beside the run
        assert again["canaries"] == document
        assert again["membership"]["predictors"]["global"]["seen"]["clients"] == 12
    else:
        assert document["predictor"] == "global"


def test_canaries_of_a_method_with_state(tmp_path: Path) -> None:
    method = {"name": "scaffold", "local": {"steps": 3, "lr": 0.05}}
    found = fedloom.audit(
        experiment(tmp_path, algorithm=method), canaries=20, seed=4, norm=0.5, out=tmp_path / "audit",
        report=False, progress=False,
    )  # fmt: skip
    assert found.audit["canaries"]["norm"] == 0.5


@pytest.mark.slow
@pytest.mark.usefixtures("unrendered")
def test_the_canary_command_explains_the_bound(tmp_path: Path, fedloom: Command) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(experiment(tmp_path)))
    code, out, _ = fedloom("audit", path, "--canaries", 16, "--out", tmp_path / "audit", "--set", "federation.rounds=1")
    assert code == 0
    assert mentions(out, "16 clients", "ε at least", "claims no ε", tmp_path / "audit" / "run" / "audit.json")
    assert mentions((tmp_path / "audit" / "run" / "report.html").read_text(), "Canaries", "16 clients")
    code, _, err = fedloom("audit", path, "--canaries", 16, "--out", tmp_path / "audit")
    assert code == 2
    assert mentions(err, "--out", tmp_path / "audit")
    code, _, err = fedloom("audit", path)
    assert code == 2
    assert mentions(err, path, "--canaries")


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (["--out", "x"], ["--out", "--canaries"]),
        (["--norm", "2"], ["--norm", "--canaries"]),
        (["--canaries", "20", "--checkpoint", "best"], ["--checkpoint", "--canaries"]),
        (["--canaries", "3"], ["--canaries", "3"]),
    ],
)
def test_invalid_options_are_rejected(run: fedloom.Run, fedloom: Command, options: list[str], facts: list[str]) -> None:
    where = run.folder / "experiment.yaml" if "--canaries" in options else run.folder
    code, _, err = fedloom("audit", where, *options)
    assert code == 2
    assert mentions(err, *facts)


def test_a_run_that_cannot_be_audited_is_rejected(tmp_path: Path, run: fedloom.Run) -> None:
    unfinished = on_vowels(tmp_path, FEDAVG)
    with refusing(DataError, "not finished"):
        audit_run(unfinished.folder.path)
    with refusing(DataError, "audited"):
        _ = fedloom.load(unfinished.folder.path).audit
    with refusing(ExperimentError, "canaries"):
        fedloom.audit(run, norm=1.0)
    with refusing(ExperimentError, "canaries"):
        fedloom.audit(experiment(tmp_path))


def test_the_claim_is_that_of_the_summary(run: fedloom.Run, tmp_path: Path) -> None:
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(run.folder, copy.path)
    assert claim_of(copy) is None
    summary = copy.json("summary.json")
    summary["training_privacy"] = {"unit": "clients", "epsilon": 2.5, "delta": 1e-6}
    copy.write_json("summary.json", summary)
    assert claim_of(copy) == {"of": "clients", "epsilon": 2.5, "delta": 1e-6}


def test_a_claim_about_others_is_not_refuted() -> None:
    claim = {"of": "clients", "epsilon": 2.0, "delta": 1e-5}
    assert mentions(audit_verdict({"of": "examples", "epsilon": 3.0}, claim), "ε = 2", "clients", "examples")
