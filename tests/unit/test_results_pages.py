"""Tables of docs/results are made from each page's compact file; experiments and figures of research programs."""

from __future__ import annotations

import csv
import json
import re
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import baselines
import own_steps
import pages_own_steps
import pytest
import quickstart_expected
import results
import summaries
from facts import tells
from run_folders import put, write_run

from fedloom.experiment import load_experiment

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"


def tables_of(page: str) -> list[str]:
    lines = (RESULTS / f"{page}.md").read_text(encoding="utf-8").splitlines()
    return ["\n".join(those) for is_table, those in groupby(lines, lambda line: line.startswith("|")) if is_table]


@pytest.mark.parametrize("page", sorted(path.stem for path in RESULTS.glob("*.md")))
def test_tables_of_a_page_match_its_compact_file(page: str) -> None:
    made = list(results.PAGES[page].tables(summaries.read(RESULTS / f"{page}.csv")))
    on_page = tables_of(page)
    assert [table for table in made if table not in on_page] == []
    assert [table for table in on_page if table not in made] == []


def test_pages_show_exactly_the_existing_figures() -> None:
    shown = {
        name
        for path in [*RESULTS.glob("*.md"), ROOT / "README.md"]
        for name in re.findall(r"!\[[^]]*\]\((?:docs/results/)?([^/)]+)\)", path.read_text(encoding="utf-8"))
    }
    assert shown == {path.name for path in RESULTS.glob("*.svg")}


@pytest.mark.parametrize("page", sorted(results.PAGES))
def test_a_compact_file_round_trips(page: str) -> None:
    path = RESULTS / f"{page}.csv"
    assert summaries.written(summaries.read(path), results.PAGES[page].columns) == path.read_text(encoding="utf-8")


def runs_of_a_search(folder: Path) -> None:
    for rate in (0.01, 0.1, 1.0):
        for seed in (1, 2):
            text = f"name: x\nseed: {seed}\nalgorithm: {{name: pefll, local: {{lr: {rate}, momentum: 0.9}}}}\n"
            path = folder / "search" / f"lr={rate:g},seed={seed}"
            # seeds of write_run only change the noise: the step size determines the rounds, and so the quality
            write_run(path, seed=seed, n=10, unseen=2, rounds=(0, 50, 400 if rate == 0.1 else 100), experiment=text)
    left = folder / "search" / "lr=1,seed=2"
    (left / "summary.json").unlink()
    put(left / "journal.jsonl", '{"round": 7, "outcome": "abandoned"}\n')


def test_folding_keeps_the_last_and_the_chosen_evaluation_of_each_run(tmp_path: Path) -> None:
    runs_of_a_search(tmp_path)
    runs = summaries.fold(tmp_path)
    assert len(runs) == 6
    name = "search/lr=0.1,seed=2"
    lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    best = max(lines, key=lambda line: line["validation_pooled"])
    assert [line.round for line in runs[name]] == sorted({best["round"], 400})
    end = runs[name][-1]
    assert end.seed == "2"
    assert end.settings == {"algorithm.name": "pefll", "algorithm.local.lr": "0.1"}
    assert end["seen"] == pytest.approx(100 * lines[-1]["seen"]["accuracy_pooled"], rel=1e-5)
    assert end["unseen_masked"] == pytest.approx(100 * lines[-1]["unseen"]["masked"]["accuracy_pooled"], rel=1e-5)
    assert end["spearman"] == pytest.approx(lines[-1]["pefll"]["spearman"]["mean"], rel=1e-5)
    assert len(end.clients) == 10
    assert [line.round for line in summaries.fold(tmp_path, whole=("*seed=2",))[name]] == [0, 50, 400]
    left = runs["search/lr=1,seed=2"]
    assert [(line.left, line.values) for line in left] == [(7, {})]


def test_a_compact_file_contains_everything_folded(tmp_path: Path) -> None:
    runs_of_a_search(tmp_path)
    runs = summaries.fold(tmp_path)
    file = tmp_path / "page.csv"
    file.write_text(summaries.written(runs), encoding="utf-8")
    assert summaries.read(file).keys() == runs.keys()
    for name, run in summaries.read(file).items():
        assert [line.values for line in run] == [line.values for line in runs[name]]
        assert [(line.round, line.left, line.settings) for line in run] == [
            (line.round, line.left, line.settings) for line in runs[name]
        ]


def test_the_chosen_step_size_is_the_best_finite_one_on_validation(tmp_path: Path) -> None:
    runs_of_a_search(tmp_path)
    assert summaries.chosen_value(tmp_path / "search") == "0.1"


@pytest.mark.parametrize("page", [page for page, about in results.PAGES.items() if about.figures])
def test_figures_of_a_page_match_its_compact_file(page: str) -> None:
    runs = summaries.read(RESULTS / f"{page}.csv")
    for name, draw in results.PAGES[page].figures.items():
        made = results.compact(results.as_svg(draw)(runs))
        there = (RESULTS / f"{page}-{name}.svg").read_text(encoding="utf-8")
        assert re.findall(r">([^<>\n]+)</text>", made) == re.findall(r">([^<>\n]+)</text>", there)


def test_own_steps_are_folded_from_runs_and_measured_lines(tmp_path: Path) -> None:
    for method in ("pefll", "fedavg"):
        for rate in (0.1, 0.2):
            text = f"name: x\nseed: 1\nalgorithm: {{name: {method}, local: {{lr: {rate}}}}}\n"
            path = tmp_path / "vowel" / "search" / method / f"lr={rate},seed=1"
            write_run(path, seed=1, n=10, unseen=2, rounds=(0, 10), experiment=text)
    lines = [
        own_steps.Measured(method, seed, 5, rate, 3, 0.5 + rate, 0.8 if rate == 0.2 else None, None, None)
        for method in ("pefll", "fedavg", "local")
        for seed in (2, 3)
        for rate in (0.1, 0.2)
    ]
    (tmp_path / "vowel" / "own-steps").mkdir()
    with (tmp_path / "vowel" / "own-steps" / "own-steps.csv").open("w", newline="") as file:
        csv.writer(file).writerows([own_steps.Measured._fields, *lines])
    runs = pages_own_steps.folded(tmp_path)
    assert {name.rsplit("/", 1)[0] for name in runs} == {
        f"vowel/{what}" for what in ("search/pefll", "search/fedavg")
    } | {f"vowel/{what}/{method}" for what in ("own", "test") for method in ("pefll", "fedavg", "local")}
    assert runs["vowel/own/local/0.2"][0].values == {"after_5": pytest.approx(70)}
    assert runs["vowel/test/fedavg/seed=3"][0].values == {"after_5": pytest.approx(80)}
    assert pages_own_steps.over_seeds(runs, "vowel", "pefll") == {5: pytest.approx([80, 80])}


@pytest.mark.parametrize("name", sorted(baselines.REGIMES))
def test_every_method_has_equally_many_settings_and_folders(name: str) -> None:
    methods = baselines.REGIMES[name].methods.values()
    assert len({len(method.settings()) for method in methods}) == 1
    assert all(len({baselines.named(s) for s in m.settings()}) == len(m.settings()) for m in methods)


@pytest.mark.parametrize("name", sorted(baselines.REGIMES))
def test_the_first_and_last_settings_of_every_grid_are_valid_with_equal_rounds(name: str) -> None:
    regime = baselines.REGIMES[name]
    file = baselines.ROOT / "experiments" / f"{regime.file}.yaml"
    for where in (regime.search, *regime.tests.values()):
        rounds = {
            load_experiment(file, [*where, *method.overrides(setting)]).federation.rounds
            for method in regime.methods.values()
            for setting in (method.settings()[0], method.settings()[-1])
        }
        assert len(rounds - {0}) == 1  # 0: Local


def test_a_setting_sets_all_keys_of_its_axis() -> None:
    regime = baselines.REGIMES["adapt"]
    ditto = regime.methods["ditto"]
    file = baselines.ROOT / "experiments" / f"{regime.file}.yaml"
    found = load_experiment(file, [*regime.search, *ditto.overrides({"lr": 0.2, "proximity": 1})]).algorithm.settings
    assert (found.local.lr, found.personal.lr, found.proximity) == (0.2, 0.2, 1)


QUICKSTART = Path(__file__).parents[2] / "docs" / "results" / "quickstart.csv"


def store(folder: Path, algorithm: str, seed: int, accuracies: dict[int, float]) -> None:
    """Write the part of a run's summary that is compared."""
    lines = [
        {"steps": k, "unseen": {"accuracy_mean": value / 100, "masked": {"accuracy_mean": 1.0}}}
        for k, value in accuracies.items()
    ]
    summary: dict[str, Any] = {"algorithm": algorithm, "seed": seed, "own_steps": lines}
    if algorithm == "local":
        summary |= {"local": {"new_client": {"personal": {"client_steps": 100}}}, "unseen": lines[0]["unseen"]}
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(summary))


def printed(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines of the table, by method and steps."""
    monkeypatch.setattr(sys, "argv", ["quickstart_expected.py", str(runs)])
    quickstart_expected.main()
    return capsys.readouterr().out.splitlines()


def test_a_run_is_shown_beside_what_is_expected_of_its_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store(tmp_path / "pefll", "pefll", 1, {0: 85.5, 20: 60.0})
    store(tmp_path / "local/seed=2", "local", 2, {100: 90.75})
    lines = printed(tmp_path, monkeypatch, capsys)
    shown = {tuple(line.split()[:2]): line for line in lines if line.split()[:1] in (["1"], ["2"])}
    assert len([line for line in lines if line.startswith("   1")]) == 2
    assert any(tells(line, "PeFLL", "0", "86.7", "85.5") and "outside" not in line for line in lines)
    assert any(tells(line, "PeFLL", "20", "60.0", "outside") for line in lines)
    assert tells(shown["2", "Local,"], "100", "90.7", "90.8")
    store(tmp_path / "other/pefll", "pefll", 9, {0: 85.5})
    assert tells(printed(tmp_path / "other", monkeypatch, capsys)[0], "No figures", "quickstart-expected.csv")


def test_what_is_expected_is_what_the_page_measured() -> None:
    with QUICKSTART.open(encoding="utf-8", newline="") as file:
        pages = {row["run"]: row for row in csv.DictReader(file)}
    with quickstart_expected.EXPECTED.open(encoding="utf-8", newline="") as file:
        expected = list(csv.DictReader(file))
    assert {row["seed"] for row in expected} == set("1234")
    for row in expected:
        if row["seed"] != "1":
            measured = pages[f"native/{row['method']}/seed={row['seed']}"][f"after_{row['steps']}"]
            assert float(row["accuracy"]) == float(measured)
