"""Runs with private training: the ε that they claim, their end by a budget, and the places that show the claim."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors
from facts import mentions
from typer.testing import CliRunner
from vowel_data import vowel_experiment

import fedloom
from fedloom.cli.main import app
from fedloom.core.words import rounded_up
from fedloom.data.problem import TrainedPrivately
from fedloom.errors import ExperimentError
from fedloom.federation.status_text import _privacy
from fedloom.privacy.accounting import Release, epsilon_of, rounds_within, sampled
from fedloom.privacy.gaussian_mechanism import gaussian_epsilon
from fedloom.reporting.report import write_report
from fedloom.reporting.status import RunStatus
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import Journal
from fedloom.serving.client_models import save_models

pytestmark = pytest.mark.usefixtures("forks")

PRIVACY: dict[str, Any] = {"clip": 1.0, "noise_multiplier": 3.0, "delta": 1e-3}
DRAWN = sampled("poisson", 12, 3, 3.0)  # 12 of 15 speakers train, 3 a round


def experiment(folder: Path, **federation: Any) -> dict[str, Any]:
    """Return an experiment on the clients of the vowel fixture; ``federation`` replaces keys of the section."""
    return vowel_experiment(
        folder,
        algorithm={"name": "fedavg", "weighting": "uniform", "local": {"steps": 2, "batch_size": 8, "lr": 0.1}},
        federation={"rounds": 6, "clients_per_round": 3, "privacy": PRIVACY, **federation},
        evaluation={"every": 4},
    )


def trained(folder: Path, out: str = "run", *, resume: bool = False, replay: Path | None = None, **keys: Any) -> Path:
    options = {"report": False, "progress": False, "resume": resume, "replay": replay}
    return Path(fedloom.run(experiment(folder, **keys), out=folder / out, **options).folder)


def summary_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def metrics_of(run: Path) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run without a budget."""
    return trained(tmp_path_factory.mktemp("private"))


def test_no_folder_is_created_if_the_accountant_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse to account for privacy in an image without the extra."""
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ExperimentError) as refused:
        trained(tmp_path)
    assert (refused.value.key, mentions(str(refused.value), "fedloom[privacy]")) == ("federation.privacy", True)
    assert not (tmp_path / "run").exists()


def test_cohorts_too_small_for_secure_sums_are_refused_before_a_folder_is_created(tmp_path: Path) -> None:
    """Know the clients from the partition: the experiment does not say how many take part."""
    with pytest.raises(ExperimentError) as refused:
        trained(tmp_path, secure_aggregation={})
    assert (refused.value.key, refused.value.found) == ("federation.clients_per_round", 3)
    assert not (tmp_path / "run").exists()


def test_the_claim_covers_the_released_sums(whole: Path) -> None:
    summary = summary_of(whole)
    reported = summary["training_privacy"]
    assert reported["epsilon"] == pytest.approx(epsilon_of({DRAWN: 6}, 1e-3))
    assert (reported["sums"], reported["sampling"], reported["noise"], reported["unit"]) == (
        6,
        ["poisson"],
        "seed",
        "clients",
    )
    assert reported["to_aggregator"]["epsilon"] is None
    assert reported["covers"] == ["Update.delta_theta"]
    assert {"Update.steps", "Update.loss"} <= set(reported["does_not_cover"])
    assert summary["ended_by"] == "rounds"
    spent = [(line["round"], line["privacy"]["sums"]) for line in metrics_of(whole)]
    assert spent == [(0, 0), (4, 4), (6, 6)]
    assert metrics_of(whole)[-1]["privacy"]["epsilon"] == reported["epsilon"]
    assert RunStatus(RunFolder(whole)).activity().privacy is not None


@pytest.mark.slow
@pytest.mark.parametrize("noise", [pytest.param("central", marks=pytest.mark.slow), "distributed"])
def test_three_readers_have_three_figures(tmp_path: Path, noise: str) -> None:
    """Compute the ε toward a member from the journal, and find it wherever the claim is shown."""
    keys = {
        "clients_per_round": 4,
        "checkpoint_every_s": 0,
        "secure_aggregation": {"bits": 64},
        "privacy": {"clip": 1.0, "noise_multiplier": 6.0, "delta": 1e-3, "sampling": "fixed", "noise": noise},
    }
    trained(tmp_path, rounds=4, **keys)
    run = trained(tmp_path, resume=True, rounds=8, **keys)  # another process has recorded the first cohorts
    journal = [attempt for attempt in Journal(RunFolder(run)).attempts if attempt.round and attempt.attempt]
    times = Counter(client for attempt in journal for client in attempt.conversations[0].clients)
    most = max(times.values())
    assert 1 < most < 8
    assert {len(attempt.conversations[0].clients) for attempt in journal} == {4}
    share = math.sqrt(2 / 3) if noise == "distributed" else 1.0  # 3 of 4 clients survive at least
    known = Release(1.0, 6.0 * share, 12, 12, "fixed")
    claimed = summary_of(run)["training_privacy"]
    members = epsilon_of({known: most, sampled("fixed", 11, 4, 6.0): 8 - most}, 1e-3)
    assert claimed["to_members"]["epsilon"] == pytest.approx(members)
    assert claimed["member_cohorts"] == most
    assert claimed["to_readers"]["epsilon"] == epsilon_of({sampled("fixed", 12, 4, 6.0): 8}, 1e-3) < members
    whole = epsilon_of({Release(1.0, 6.0, 12, 12, "fixed"): 8}, 1e-3)
    assert claimed["to_aggregator"]["epsilon"] == (whole if noise == "distributed" else None)
    spent = metrics_of(run)[-1]["privacy"]
    assert (spent["epsilon"], spent["epsilon_members"], spent["epsilon_aggregator"]) == tuple(
        claimed[who]["epsilon"] for who in ("to_readers", "to_members", "to_aggregator")
    )
    shown = [rounded_up(claimed["epsilon"]), rounded_up(members)]
    aggregator = rounded_up(whole) if noise == "distributed" else "no guarantee"
    text = dict(_privacy(RunStatus(RunFolder(run)).activity()))["privacy"]
    assert mentions(text, *(f"{each} toward" for each in (shown[1], aggregator)), shown[0])
    report = write_report(run).read_text()
    assert mentions(report, "ε toward members", *shown)
    private = TrainedPrivately.from_summary(claimed)
    assert mentions(str(private), shown[0], f"{shown[1]} toward members", f"{aggregator} toward the aggregator")


def test_a_run_without_privacy_reports_no_privacy(tmp_path: Path) -> None:
    run = trained(tmp_path, privacy=None)
    assert not {"training_privacy", "ended_by"} & summary_of(run).keys()
    assert all("privacy" not in line for line in metrics_of(run))
    assert not (run / "releases.jsonl").exists()


def test_full_participation_is_not_amplified(tmp_path: Path) -> None:
    reported = summary_of(trained(tmp_path, clients_per_round=12))["training_privacy"]
    assert reported["sampling"] == ["all"]
    assert reported["epsilon"] == pytest.approx(gaussian_epsilon(3.0, 1e-3, 6), rel=1e-6)


def test_the_budget_ends_a_run_and_a_larger_one_resumes_it(tmp_path: Path) -> None:
    limit = epsilon_of({DRAWN: 3}, 1e-3)
    run = trained(tmp_path, privacy={**PRIVACY, "budget": limit})
    summary = summary_of(run)
    assert rounds_within(limit, 1e-3, DRAWN) == 3
    assert (summary["ended_by"], summary["rounds"]) == ("budget", 3)
    assert summary["training_privacy"]["epsilon"] <= limit
    assert [line["round"] for line in metrics_of(run)] == [0, 3]
    activity = RunStatus(RunFolder(run)).activity()
    assert (activity.phase, activity.round, activity.totals.failed_attempts) == ("finished", 3, 0)
    assert "budget" in activity.message
    before = (run / "releases.jsonl").read_bytes()
    trained(tmp_path, resume=True, privacy={**PRIVACY, "budget": limit})  # no client is asked again
    assert (run / "releases.jsonl").read_bytes() == before
    assert summary_of(run) == summary
    trained(tmp_path, resume=True, privacy={**PRIVACY, "budget": 100.0})
    assert (summary_of(run)["ended_by"], summary_of(run)["rounds"]) == ("rounds", 6)
    assert summary_of(run)["training_privacy"]["sums"] == 6


def test_a_replay_ends_where_the_budget_ended_the_run(tmp_path: Path) -> None:
    settings = {**PRIVACY, "budget": epsilon_of({DRAWN: 3}, 1e-3)}
    run = trained(tmp_path, privacy=settings)
    again = trained(tmp_path, "again", replay=run, privacy=settings)
    assert summary_of(again)["rounds"] == 3
    last = "checkpoints/round-000003.safetensors"
    assert (run / last).read_bytes() == (again / last).read_bytes()


def test_noise_is_calibrated_to_an_epsilon_and_kept_on_resume(tmp_path: Path) -> None:
    asked = {"clip": 1.0, "epsilon": 2.0, "delta": 1e-3}
    run = trained(tmp_path, privacy=asked)
    found = RunFolder(run).experiment().federation.privacy
    assert found is not None
    assert found.epsilon == 2.0
    assert 1.9 < summary_of(run)["training_privacy"]["epsilon"] <= 2.0
    assert summary_of(run)["training_privacy"]["noise_multiplier"] == found.noise_multiplier
    trained(tmp_path, resume=True, privacy=asked)
    with pytest.raises(ExperimentError) as refused:  # the noise stays, and is too small for more rounds
        trained(tmp_path, resume=True, privacy=asked, rounds=60)
    assert refused.value.key == "federation.privacy.noise_multiplier"


def test_models_and_pages_show_the_claim(whole: Path, tmp_path: Path) -> None:
    reported = summary_of(whole)["training_privacy"]
    save_models(whole, tmp_path / "models", clients="client-0000")
    (model,) = (tmp_path / "models").glob("*.safetensors")
    with safetensors.safe_open(model, "pt") as file:
        card = json.loads(file.metadata()["fedloom"])
    others = {f"epsilon_{who}": reported[f"to_{who}"]["epsilon"] for who in ("members", "aggregator")}
    names = ("unit", "neighbouring", "epsilon", "delta", "noise")
    assert card["training_privacy"] == {**{name: reported[name] for name in names}, **others}
    assert mentions(model.with_suffix(".md").read_text(), rounded_up(reported["epsilon"]), "0.001")
    assert mentions(CliRunner().invoke(app, ["status", str(whole)]).output, "privacy", rounded_up(reported["epsilon"]))


def test_the_planned_privacy_loss_equals_the_runs(whole: Path, tmp_path: Path) -> None:
    """Clients of the dataset are counted in its partition, which this machine has."""
    planned = fedloom.privacy_cost({**experiment(whole.parent), "runtime": {"workers": 0}})
    assert (planned.clients, planned.cohort) == (12, 3)
    assert planned.by_rounds[-1].to_readers == summary_of(whole)["training_privacy"]["epsilon"]
    with pytest.raises(ExperimentError) as refused:
        fedloom.privacy_cost(experiment(tmp_path))
    assert refused.value.key == "clients"


# --- privacy of examples ----------------------------------------------------------------------------------------------

OF_EXAMPLES: dict[str, Any] = {"of": "examples", "clip": 1.0, "noise_multiplier": 2.0, "delta": 1e-3}
STEP = sampled("poisson", 27, 8, 2.0)  # each client has 27 examples


def visits(run: Path) -> Counter[str]:
    """Return the number of rounds in which each client trained, from the journal."""
    held = [held.clients for attempt in Journal.read(RunFolder(run)).attempts for held in attempt.conversations]
    return Counter(client for clients in held for client in clients)


def test_the_claim_covers_the_client_with_most_steps(tmp_path: Path) -> None:
    run = trained(tmp_path, privacy=OF_EXAMPLES, rounds=12)
    reported = summary_of(run)["training_privacy"]
    most = max(visits(run).values())
    assert (reported["unit"], reported["sums"], reported["sampling"]) == ("examples", 2 * most, ["poisson"])
    assert reported["epsilon"] == pytest.approx(epsilon_of({STEP: 2 * most}, 1e-3))
    assert reported["to_aggregator"] == reported["to_readers"]
    assert "Update.loss" not in reported["does_not_cover"]  # it is not sent


@pytest.mark.slow
def test_noise_for_example_privacy_is_calibrated_to_an_epsilon(tmp_path: Path) -> None:
    asked = {**OF_EXAMPLES, "noise_multiplier": None, "epsilon": 3.0}
    run = trained(tmp_path, privacy=asked, rounds=12)
    assert 1.5 < summary_of(run)["training_privacy"]["epsilon"] <= 3.0
    planned = fedloom.privacy_cost(experiment(tmp_path, privacy=asked, rounds=12))
    assert planned.noise_multiplier == summary_of(run)["training_privacy"]["noise_multiplier"]
    assert (planned.examples, planned.batch, planned.unit) == (27, 8, "examples")
    assert planned.by_rounds[-1].to_readers == planned.by_rounds[-1].to_aggregator <= 3.0
    everywhere = fedloom.privacy_cost(experiment(tmp_path, privacy=asked, rounds=12), examples=500)
    assert everywhere.noise_multiplier < planned.noise_multiplier


def test_the_example_budget_ends_training_before_a_client_exceeds_it(tmp_path: Path) -> None:
    limit = epsilon_of({STEP: 4}, 1e-3)  # two visits of two steps
    run = trained(tmp_path, privacy={**OF_EXAMPLES, "budget": limit}, rounds=40)
    summary = summary_of(run)
    assert summary["ended_by"] == "budget"
    assert summary["training_privacy"]["epsilon"] == pytest.approx(limit)
    assert summary["training_privacy"]["sums"] == 4
