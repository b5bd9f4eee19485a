"""The privacy of training in status, report and comparison, and on the cards of models."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from facts import mentions, tells
from rich.console import Console
from run_folders import put, write_run

from fedloom.cli.status import status_lines
from fedloom.core.words import rounded_up
from fedloom.data.problem import Problem, TrainedPrivately
from fedloom.data.spec import DataSpec, InputSpec, Normalization
from fedloom.errors import DataError
from fedloom.federation.activity import Activity, PrivacySpent
from fedloom.privacy.accounting import EVERYONE, sampled
from fedloom.privacy.claim import claim
from fedloom.privacy.settings import TrainingPrivacy
from fedloom.reporting.compare import compare_runs
from fedloom.reporting.compare_page import write_comparison
from fedloom.reporting.compare_tables import rows_as_csv
from fedloom.reporting.report import write_report
from fedloom.reporting.status import RunStatus
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import SPENT, Attempt
from fedloom.runs.listing import has_ended
from fedloom.transport.control import from_wire, to_wire

pytestmark = pytest.mark.xdist_group("report")
SETTINGS = TrainingPrivacy(clip=0.5, noise_multiplier=2.0, delta=1e-5)
CLAIM = claim(SETTINGS, {EVERYONE: {sampled("poisson", 900, 45, 2.0): 4}}, simulated=False, covers=["Update.delta"])
SPENDING = PrivacySpent(1e-5, 4, CLAIM.epsilon, 8.0)


def made_private(folder: Path, found: Any = CLAIM) -> Path:
    """Give a run the privacy of a training."""
    summary = json.loads((folder / "summary.json").read_text())
    put(folder / "summary.json", json.dumps(summary | {"training_privacy": found.as_json(), "ended_by": "rounds"}))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["privacy"] = asdict(replace(SPENDING, epsilon=0.1 * line["round"], sums=line["round"]))
    put(folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    return folder


def run(folder: Path, algorithm: str = "pefll", seed: int = 1) -> Path:
    """Write a finished run of four rounds."""
    experiment = {
        "name": folder.name,
        "seed": seed,
        "data": {"dataset": "fashion-mnist", "partition": {"scheme": "iid", "clients": 12}},
        "model": {"name": "lenet"},
        "algorithm": {"name": algorithm},
        "federation": {"rounds": 4, "clients_per_round": 5},
    }
    text = json.dumps(experiment)
    write_run(folder, algorithm=algorithm, seed=seed, n=12, unseen=3, rounds=(0, 1, 2, 4), experiment=text)
    steps = {"client_steps": 5.0, "loss": 0.5}
    attempts = [Attempt(t, 1, statistics=steps, phases={"server": 0.5}, seconds=0.5) for t in range(1, 5)]
    put(folder / "journal.jsonl", "".join(json.dumps(asdict(attempt)) + "\n" for attempt in attempts))
    return folder


def text_of(now: Activity) -> str:
    return "\n".join(line.plain for line in status_lines(now, Console()))


def test_status_shows_the_privacy_spent_by_training() -> None:
    now = Activity("vowels", "fedavg", "training", 1_000.0, 970.0, round=3)
    assert "privacy" not in text_of(now)
    assert tells(text_of(replace(now, privacy=SPENDING)), "privacy", rounded_up(CLAIM.epsilon), "1e-05", "4", "8")
    lost = replace(SPENDING, epsilon=None, budget=None)
    assert "no guarantee" in text_of(replace(now, privacy=lost))


def test_status_is_sent_over_the_wire_and_read_from_files(tmp_path: Path) -> None:
    for spent in (None, SPENDING, replace(SPENDING, epsilon=None, budget=None)):
        now = Activity("vowels", "fedavg", "training", 1_000.0, 970.0, round=3, privacy=spent)
        assert from_wire(to_wire(now)).privacy == spent
    private = made_private(run(tmp_path / "run"))
    found = RunStatus(RunFolder(private)).activity().privacy
    assert found == replace(SPENDING, epsilon=0.4, sums=4)
    assert RunStatus(RunFolder(run(tmp_path / "plain"))).activity().privacy is None


def test_a_run_ended_by_its_budget_is_finished_and_not_failed(tmp_path: Path) -> None:
    private = made_private(run(tmp_path / "run"))
    folder = RunFolder(private)
    before = RunStatus(folder).activity()
    lines = (private / "journal.jsonl").read_text()
    put(private / "journal.jsonl", f"{lines}{json.dumps(asdict(Attempt(5, 1, outcome=SPENT)))}\n")
    after = RunStatus(folder).activity()
    assert "budget" in after.message
    assert after.totals.failed_attempts == before.totals.failed_attempts
    assert after.round == before.round
    experiment = {"federation": {"rounds": 100}}
    assert has_ended(experiment, {"rounds": 4, "ended_by": "budget"}, 4)
    assert not has_ended(experiment, {"rounds": 4, "ended_by": "budget"}, 5)
    assert not has_ended(experiment, {"rounds": 4}, 4)


@pytest.mark.slow
def test_the_report_shows_the_claim_and_its_course(tmp_path: Path) -> None:
    plain = write_report(run(tmp_path / "plain")).read_text()
    assert "<h2>Privacy</h2>" not in plain
    page = write_report(made_private(run(tmp_path / "run"))).read_text()
    assert page.index("<h2>Privacy</h2>") < page.index("<h2>Data</h2>")
    section = page[page.index("<h2>Privacy</h2>") :]
    section = section[: section.index("<h2>", 4)]
    assert mentions(section, rounded_up(CLAIM.epsilon), "0.4", "secret", "Update.delta", "poisson", "add-or-remove-one")
    head = page[: page.index("<main>")]
    assert rounded_up(CLAIM.epsilon) in head


@pytest.mark.usefixtures("unrendered")
def test_the_report_marks_a_damaged_claim(tmp_path: Path) -> None:
    private = made_private(run(tmp_path / "run"))
    summary = json.loads((private / "summary.json").read_text())
    del summary["training_privacy"]["statement"]
    put(private / "summary.json", json.dumps(summary))
    page = write_report(private).read_text()
    assert mentions(page, "summary.json", "statement")


@pytest.mark.usefixtures("unrendered")
def test_the_comparison_has_a_column_and_a_section(tmp_path: Path) -> None:
    private, plain = made_private(run(tmp_path / "private")), run(tmp_path / "plain", algorithm="fedavg")
    found = compare_runs([private, plain])
    rows = {row["algorithm"]: row["epsilon"] for row in csv.DictReader(rows_as_csv(found).splitlines())}
    assert float(rows["pefll"]) == CLAIM.epsilon
    assert rows["fedavg"] == ""
    page = write_comparison(found, tmp_path / "out").read_text()
    section = page[page.index("<h2>Privacy</h2>") :]
    assert mentions(section[: section.index("<h2>", 4)], rounded_up(CLAIM.epsilon), "not private", CLAIM.statement[0])
    without = compare_runs([plain])
    assert "epsilon" not in rows_as_csv(without).splitlines()[0]
    assert "<h2>Privacy</h2>" not in write_comparison(without, tmp_path / "other").read_text()


def test_a_row_with_an_unprotected_seed_has_no_guarantee(tmp_path: Path) -> None:
    lost = claim(SETTINGS, {}, simulated=False, unknown="it resumed")
    runs = [made_private(run(tmp_path / "1")), made_private(run(tmp_path / "2", seed=2), lost)]
    assert {row.epsilon() for row in compare_runs(runs).rows} == {None}
    assert {row.epsilon() for row in compare_runs(runs[:1]).rows} == {CLAIM.epsilon}


def test_the_problem_of_a_server_reveals_only_the_guarantee() -> None:
    private = TrainedPrivately.from_summary(CLAIM.as_json())
    assert private is not None
    assert mentions(str(private), rounded_up(CLAIM.epsilon), "1e-05", "clients")
    assert "seed" in str(replace(private, noise="seed"))
    assert TrainedPrivately.from_summary(None) is None
    spec = DataSpec({"": InputSpec("features", (2,), Normalization.identity(2))}, ("a", "b"))
    problem = json.loads(Problem("x", spec, 3).to_json())
    assert Problem.from_json(json.dumps(problem)).training_privacy is None
    reported = Problem.from_json(json.dumps(problem | {"training_privacy": asdict(private)})).training_privacy
    assert reported == private
    with pytest.raises(DataError):
        Problem.from_json(json.dumps(problem | {"training_privacy": asdict(private) | {"unit": "\x1b[2J"}}))
