"""Privacy cost of a training: before it runs, and in statuses, reports, comparisons and descriptions of servers."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from facts import mentions, refusing, tells
from rich.console import Console
from run_folders import put, write_run

import fedloom
from fedloom import experiment as experiments
from fedloom.cli.status import status_lines
from fedloom.core.words import rounded_up
from fedloom.data.problem import Problem, TrainedPrivately
from fedloom.data.spec import DataSpec, InputSpec, Normalization
from fedloom.engine.training_privacy import Planned, Population, with_multiplier, with_noise
from fedloom.errors import DataError, ExperimentError
from fedloom.experiment.sections import Experiment
from fedloom.federation.activity import Activity, PrivacySpent
from fedloom.privacy.accounting import EVERYONE, Release, epsilon_of, least_multiplier, sampled
from fedloom.privacy.claim import claim
from fedloom.privacy.gaussian_mechanism import gaussian_epsilon
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

Fedloom = Callable[..., tuple[int, str, str]]
PRIVACY: dict[str, Any] = {"clip": 0.5, "noise_multiplier": 2.0, "delta": 1e-5}
TREE: dict[str, Any] = {
    "name": "small",
    "data": {"dataset": "fashion-mnist", "partition": {"scheme": "iid", "clients": 1000}, "held_out_fraction": 0.1},
    "model": {"name": "logistic"},
    "algorithm": {"name": "fedavg", "weighting": "uniform"},
    "federation": {"rounds": 400, "clients_per_round": 45, "privacy": PRIVACY},
}


def cost(**rest: Any) -> Any:
    privacy = {**PRIVACY, **rest.pop("privacy", {})}
    return fedloom.privacy_cost(TREE, federation__privacy=privacy, **rest)


def test_the_privacy_cost_of_an_experiment_follows_from_its_settings() -> None:
    """900 of 1,000 clients train; no data are on this machine."""
    found = cost()
    assert (found.clients, found.cohort, found.rounds, found.sampling) == (900, 45, 400, "poisson")
    assert [at.rounds for at in found.by_rounds] == [1, 100, 200, 400]
    for at in found.by_rounds:
        assert at.to_readers == epsilon_of({sampled("poisson", 900, 45, 2.0): at.rounds}, 1e-5)
        assert at.to_aggregator is None
    assert found.parameters == 7850
    assert found.noise_to_clip == pytest.approx(2.0 * math.sqrt(7850) / 45)


def test_noise_shares_protect_from_the_aggregator_without_sampling() -> None:
    found = cost(privacy={"noise": "distributed"}, federation__secure_aggregation={})
    assert found.by_rounds[-1].to_aggregator == pytest.approx(gaussian_epsilon(2.0, 1e-5, 400), rel=1e-6)


@pytest.mark.parametrize(("noise", "less"), [("central", 1.0), ("distributed", math.sqrt(29 / 30))])
def test_a_member_of_secure_sums_has_a_figure_of_its_own(noise: str, less: float) -> None:
    """45 of 900 clients in each of 400 rounds: 20 cohorts are expected, in each of which 30 or more clients survive."""
    found = cost(privacy={"noise": noise}, federation__secure_aggregation={})
    release = sampled("poisson", 900, 45, 2.0)
    known = Release(1.0, 2.0 * less, None, None, "all")
    assert (
        found.by_rounds[-1].to_members == epsilon_of({release: 380, known: 20}, 1e-5) > found.by_rounds[-1].to_readers
    )
    assert found.by_rounds[-1].cohorts == 20
    assert mentions(str(found), "20 of 400 rounds")
    without = cost()
    assert without.by_rounds[-1].to_members == without.by_rounds[-1].to_readers
    assert "20 of 400" not in str(without)


@pytest.mark.slow
def test_two_of_epsilon_noise_and_rounds_determine_the_third() -> None:
    release = sampled("poisson", 900, 45, 2.0)
    by_noise = cost(noise_multiplier=3.0, federation__rounds=200)
    assert by_noise.by_rounds[-1].to_readers == epsilon_of({sampled("poisson", 900, 45, 3.0): 200}, 1e-5)
    by_epsilon = cost(epsilon=4.0)
    assert by_epsilon.noise_multiplier == least_multiplier(
        4.0, lambda z: epsilon_of({dataclasses.replace(release, noise_multiplier=z): 400}, 1e-5)
    )
    assert by_epsilon.asked_epsilon == 4.0
    both = cost(epsilon=4.0, noise_multiplier=2.0)
    assert epsilon_of({release: both.rounds}, 1e-5) <= 4.0 < epsilon_of({release: both.rounds + 1}, 1e-5)
    asked = cost(privacy={"noise_multiplier": None, "epsilon": 4.0})
    assert asked.noise_multiplier == by_epsilon.noise_multiplier
    with refusing(ExperimentError, "clients", "-1"):
        cost(clients=-1)


def test_noise_that_exceeds_the_signal_is_reported() -> None:
    assert cost().noise_to_clip > 1
    hopeless, fine = cost(), cost(clients=1_000_000, federation__clients_per_round=800)
    assert fine.noise_to_clip < 0.3
    assert any("swamps" in sentence for sentence in hopeless.statement)
    assert not any("swamps" in sentence for sentence in fine.statement)
    assert str(fine) == "\n".join(fine.statement)


def test_a_delta_that_allows_a_leak_is_reported() -> None:
    assert any("δ" in sentence for sentence in cost(privacy={"delta": 1e-2}).statement)
    assert not any("δ" in sentence for sentence in cost().statement)


def test_full_participation_has_no_sampling() -> None:
    found = cost(clients=45)
    assert found.sampling == "all"
    assert found.by_rounds[-1].to_readers == pytest.approx(gaussian_epsilon(2.0, 1e-5, 400), rel=1e-6)


def test_missing_values_are_requested() -> None:
    public = {**TREE, "federation": {"rounds": 4}}
    with pytest.raises(ExperimentError) as refused:
        fedloom.privacy_cost(public)
    assert refused.value.key == "federation.privacy"
    natural = {"dataset": "femnist", "partition": {"scheme": "natural"}}
    with pytest.raises(ExperimentError) as refused:
        cost(data=natural)
    assert refused.value.key == "clients"
    assert cost(data=natural, clients=3000).clients == 3000
    own = {"own": {"kind": "features", "input_shape": [4], "classes": ["a", "b"], "normalization": "measured"}}
    with pytest.raises(ExperimentError) as refused:
        cost(data=own)
    assert refused.value.key == "clients"
    assert cost(data=own, federation__min_clients=200).clients == 200
    assert cost(data=own, clients=300).clients == 300


def test_the_command_prints_a_table_and_json(tmp_path: Path, fedloom: Fedloom) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(experiments.as_yaml(TREE))
    code, out, _ = fedloom("privacy", path)
    assert code == 0
    assert mentions(out, "400", "none", "trusted", "900", "7,850")
    code, out, _ = fedloom("privacy", path, "--epsilon", "4", "--set", "federation.rounds=100", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["asked_epsilon"] == 4
    assert found["by_rounds"][-1]["rounds"] == 100
    assert 3.9 < found["by_rounds"][-1]["to_readers"] <= 4
    code, _, err = fedloom("privacy", path, "--set", "federation.privacy=null")
    assert code == 2
    assert mentions(err, "federation.privacy", "--set")
    code, _, err = fedloom("privacy", path, "--clients", "0")
    assert code == 2
    assert mentions(err, "--clients", "0")


# --- before a run -----------------------------------------------------------------------------------------------------


def experiment(**privacy: Any) -> Experiment:
    settings = {"clip": 0.5, "delta": 1e-5, **privacy}
    tree = {**TREE, "federation": {**TREE["federation"], "privacy": settings}}
    return experiments.of(tree)


def planned(e: Experiment, clients: int = 900) -> Planned:
    return Planned(e, Population(clients))


def test_noise_for_an_epsilon_is_calibrated_before_the_run() -> None:
    e = experiment(epsilon=4.0)
    found = with_noise(e, None)
    privacy = found.federation.privacy
    assert privacy.noise_multiplier == planned(e).noise_multiplier(4.0, 400)
    assert privacy.epsilon == 4.0
    assert with_noise(found, None) is found  # type: ignore[arg-type]  # and again on resume
    assert experiments.parse_experiment(found.resolved_yaml()) == found
    begun = with_noise(experiment(epsilon=4.0), None, stored=with_multiplier(e, 1.01 * privacy.noise_multiplier))
    assert begun.federation.privacy.noise_multiplier == 1.01 * privacy.noise_multiplier
    plain = experiment(noise_multiplier=1.0)
    assert with_noise(plain, None) is plain  # type: ignore[arg-type]
    with pytest.raises(ExperimentError) as refused:
        with_noise(experiment(epsilon=4.0, noise_multiplier=0.5), None)
    assert refused.value.key == "federation.privacy.noise_multiplier"


def test_visits_of_a_client_are_planned_above_their_mean() -> None:
    p = planned(experiment(epsilon=1.0))
    assert 400 * 0.05 < p.visits(400) < 400 * 0.12
    assert p.visits(1) == 1
    assert planned(experiment(epsilon=1.0), clients=45).visits(400) == 400


def example_of_the_page() -> str:
    """Return the complete example of the page on privacy."""
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text()
    return page.partition("## A complete example")[2].partition("```yaml\n")[2].partition("```")[0]


def test_the_complete_example_of_the_page_costs_what_the_page_says() -> None:
    e = experiments.parse_experiment(example_of_the_page())
    last = fedloom.privacy_cost(e).by_rounds[-1]
    assert (last.rounds, round(last.to_readers, 2)) == (300, 4.14)
    assert 19 < last.to_members < 20 < 164 < last.to_aggregator < 166


@pytest.mark.slow
def test_an_epsilon_for_examples_of_clients_that_join_later_names_what_to_copy() -> None:
    text = example_of_the_page().replace(
        "{of: clients, clip: 0.5, noise_multiplier: 1.2,", "{of: examples, clip: 0.5, epsilon: 4,"
    )
    e = experiments.parse_experiment(text.replace(", noise: distributed, budget: 6", ""))
    with refusing(ExperimentError, "federation.privacy.epsilon") as refused:
        with_noise(e, None)
    assert mentions(str(refused.value.hint), "fedloom privacy", "--examples", "4")
    assert fedloom.privacy_cost(e, examples=2000).noise_multiplier > 0.5


pytestmark = pytest.mark.group("report")
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
