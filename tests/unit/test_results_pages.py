"""Tables of docs/results are made from each page's compact file; experiments and figures of research programs."""

from __future__ import annotations

import csv
import json
import re
from itertools import groupby
from pathlib import Path

import baselines
import own_steps
import pages_own_steps
import pytest
import results
import summaries
from run_folders import put, write_run

from fedloom.experiment import load_experiment

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"


def tables_of(page: str) -> list[str]:
    lines = (RESULTS / f"{page}.md").read_text(encoding="utf-8").splitlines()
    return ["\n".join(those) for is_table, those in groupby(lines, lambda line: line.startswith("|")) if is_table]


@pytest.mark.parametrize("page", sorted(path.stem for path in RESULTS.glob("*.md")))
def test_tables_of_a_page_match_its_compact_file(page: str) -> None:
    made = list(results.PAGES[page].tables(results.published(page)))
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


@pytest.mark.parametrize("page", sorted(path.stem for path in RESULTS.glob("*.csv")))
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


@pytest.mark.slow
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
