"""Comparison of runs."""

from __future__ import annotations

import csv
import html
import json
import re
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from facts import tells
from run_folders import put, write_run
from scipy import stats
from typer.testing import CliRunner

from fedloom.cli.main import app
from fedloom.core.words import as_csv
from fedloom.data.manifest import read_manifest
from fedloom.errors import DataError, ExperimentError, StorageError
from fedloom.reporting.compare import COLOURS, RunComparison, compare_runs, line_styles
from fedloom.reporting.compare_figures import draw_curves
from fedloom.reporting.compare_page import write_comparison
from fedloom.reporting.compare_tables import (
    Finding,
    choice_table,
    findings,
    latex_table,
    own_steps_tables,
    pairs_as_csv,
    rows_as_csv,
    sentence,
    terminal_table,
)
from fedloom.reporting.page import escaped
from fedloom.reporting.significance import holm

pytestmark = pytest.mark.group("compare")
UNRENDERED = pytest.mark.usefixtures("unrendered")


def experiment(algorithm: str, seed: int, name: str, clients: int = 12, **more: Any) -> str:
    rounds = 0 if algorithm == "local" else 2
    name = re.sub(r"[^A-Za-z0-9._]", "-", name).strip("-")
    return json.dumps(  # JSON is YAML
        {
            "name": name,
            "seed": seed,
            "data": {
                "dataset": "fashion-mnist",
                "root": "/somewhere" if seed == 1 else None,
                "partition": {"scheme": "classes", "clients": clients, "classes_per_client": 2},
                "held_out_fraction": 0.25,
            },
            "model": {"name": "lenet"},
            "algorithm": {"name": algorithm, **more},
            "federation": {"rounds": rounds, "clients_per_round": 5},
            "runtime": {"workers": seed % 3},
        }
    )


def run(
    folder: Path,
    algorithm: str,
    *,
    seed: int = 1,
    settings: dict[str, Any] | None = None,
    clients: int = 12,
    unseen: int = 3,
    **more: Any,
) -> Path:
    text = experiment(algorithm, seed, folder.name, clients, **(settings or {}))
    more = {"rounds": (0, 1, 2, 4), **more}
    return write_run(folder, algorithm=algorithm, seed=seed, n=clients, unseen=unseen, experiment=text, **more)


def edit(folder: Path, **changes: Any) -> Path:
    """Change keys of a summary."""
    path = folder / "summary.json"
    put(path, json.dumps(json.loads(path.read_text()) | changes))
    return folder


def measured(folder: Path, accuracies: Sequence[float], validation: float = 0.5) -> Path:
    """Set the personal accuracies of a run's seen clients, and its validation accuracy."""
    with (folder / "clients.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    seen = [row for row in rows if row["seen"] == "true"]
    for row, accuracy in zip(seen, accuracies, strict=True):
        row["personal_accuracy_unmasked"] = f"{accuracy:.6f}"
    put(folder / "clients.csv", as_csv(rows))
    summary = json.loads((folder / "summary.json").read_text())
    edit(folder, seen=summary["seen"] | {"accuracy_mean": statistics.mean(accuracies)})
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[-1]["validation_pooled"] = validation
    put(folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    return folder


def text_rows(comparison: RunComparison) -> list[list[str]]:
    ((_, rows),) = terminal_table(comparison).blocks
    return [[cell.text for cell in row.cells] for row in rows]


COSTS = {
    "personal": {"client_steps": 50, "payload_down": 343_000, "payload_up": 0},
    "global": {"client_steps": 0, "payload_down": 343_000, "payload_up": 0},
}


def lr(value: float) -> dict[str, Any]:
    return {"local": {"steps": 50, "lr": value}}


def stepped(folder: Path, means: dict[int, float]) -> Path:
    """Set the results of a run's unseen clients after numbers of own steps."""
    unseen = json.loads((folder / "summary.json").read_text())["unseen"]
    return edit(folder, own_steps=[{"steps": k, "unseen": unseen | {"accuracy_mean": m}} for k, m in means.items()])


# Rows


def test_each_kind_of_model_has_one_row(tmp_path: Path) -> None:
    folders = [
        run(tmp_path / "a", "pefll"),
        run(tmp_path / "b", "fedavg", predictors=("personal", "global"), new_client=COSTS),
        run(tmp_path / "c", "local", rounds=(0,)),
    ]
    found = compare_runs(folders)
    assert [row.label for row in found.rows] == ["PeFLL", "FedAvg", "FedAvg + fine-tuning", "Local"]
    summary = json.loads((folders[1] / "summary.json").read_text())
    fedavg, tuned = found.rows[1], found.rows[2]
    for row, groups in ((fedavg, summary["global"]), (tuned, summary)):
        for group in ("seen", "unseen"):
            statistic = row.over_seeds(group)
            assert statistic.mean == groups[group]["accuracy_mean"]
            assert statistic.std is None
    assert tuned.new_client == (50, 343_000, 0)
    assert found.rows[0].new_client == (None, None, None)
    cells = text_rows(found)
    assert all(len(row) == len(terminal_table(found).headings) for row in cells)
    assert cells[2][-3:] == ["50", "343 kB", "0 B"]
    assert cells[0][-3:] == ["–", "–", "–"]
    mean, std = summary["seen"]["accuracy_mean"], summary["seen"]["accuracy_std"]
    assert cells[2][:2] == ["FedAvg + fine-tuning", f"{100 * mean:.1f} ± {100 * std:.1f}"]


def test_seeds_are_merged(tmp_path: Path) -> None:
    folders = [run(tmp_path / f"seed-{seed}", "pefll", seed=seed) for seed in (1, 2, 3)]
    found = compare_runs(folders)
    (row,) = found.rows
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    means = [summary["seen"]["accuracy_mean"] for summary in summaries]
    assert row.seeds == (1, 2, 3)
    assert row.over_seeds("seen") == (pytest.approx(statistics.mean(means)), pytest.approx(statistics.stdev(means)))
    deciles = [summary["unseen"]["accuracy_worst_decile"] for summary in summaries]
    assert row.over_seeds("unseen", "worst_decile") == (
        pytest.approx(statistics.mean(deciles)),
        pytest.approx(statistics.stdev(deciles)),
    )
    masked = [summary["seen"]["masked"]["accuracy_mean"] for summary in summaries]
    other = row.over_seeds("seen", "other")
    assert other.mean == pytest.approx(statistics.mean(masked))
    assert f"± {100 * statistics.stdev(means):.1f}" in text_rows(found)[0][1]
    assert found.several_seeds
    assert found.notices == ()


def test_rows_of_a_method_are_labelled_by_their_differences(tmp_path: Path) -> None:
    settings = [lr(rate) | {"server": {"lr": 0.001}} for rate in (0.01, 0.05)]
    folders = [run(tmp_path / str(i), "pefll", settings=one) for i, one in enumerate(settings)]
    assert [row.details for row in compare_runs(folders).rows] == [("lr 0.01",), ("lr 0.05",)]
    settings[1]["server"] = {"lr": 0.002}
    folders = [run(tmp_path / f"both-{i}", "pefll", settings=one) for i, one in enumerate(settings)]
    found = compare_runs([*folders, run(tmp_path / "local", "local", rounds=(0,))])
    assert [row.label for row in found.rows] == [
        "PeFLL, local.lr 0.01, server.lr 0.001",
        "PeFLL, local.lr 0.05, server.lr 0.002",
        "Local",
    ]
    assert "algorithm.local.lr" in found.differing
    assert "data.partition.clients" not in found.differing


def test_a_folder_given_twice_counts_once_and_equal_seeds_are_not_merged(tmp_path: Path) -> None:
    folder = run(tmp_path / "c", "pefll")
    (row,) = compare_runs([folder, tmp_path / "." / "c", tmp_path]).rows
    assert len(row.runs) == 1
    found = compare_runs([folder, run(tmp_path / "d", "pefll")])
    assert [row.label for row in found.rows] == ["PeFLL, c", "PeFLL, d"]
    assert found.chosen == ()  # they are one setting
    assert [(pair.clients, pair.better, pair.worse, pair.p) for pair in found.pairs] == [(9, 0, 0, 1), (3, 0, 0, 1)]
    assert not {"name", "seed", "data.root", "runtime.workers"} & set(found.rows[0].settings)


def test_a_personal_model_equal_to_the_global_one_has_no_row(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", "fedavg", predictors=("personal", "global"))
    summary = json.loads((folder / "summary.json").read_text())
    edit(folder, seen=summary["global"]["seen"], unseen=summary["global"]["unseen"])
    assert [row.method for row in compare_runs([folder]).rows] == ["FedAvg"]


def test_a_method_without_results_for_unseen_clients(tmp_path: Path) -> None:
    found = compare_runs([edit(run(tmp_path / "a", "pefll"), unseen=None), run(tmp_path / "b", "local", rounds=(0,))])
    assert found.rows[0].over_seeds("unseen") is None
    assert text_rows(found)[0][3:5] == ["–", "–"]
    assert [pair.why for pair in found.pairs if pair.group == "unseen"] == ["PeFLL has no result for unseen clients"]


def test_different_data_give_separate_blocks(tmp_path: Path) -> None:
    folders = [
        run(tmp_path / "a", "pefll"),
        run(tmp_path / "b", "pefll", clients=20, unseen=5),
        run(tmp_path / "c", "local", rounds=(0,)),
    ]
    found = compare_runs(folders)
    assert [row.label for row in found.rows] == ["PeFLL", "Local", "PeFLL"]
    assert [found.labels[block] for block in found.blocks] == ["fashion-mnist, clients 12", "fashion-mnist, clients 20"]
    assert {(pair.first, pair.second) for pair in found.pairs} <= {(0, 1), (1, 0)}
    assert found.marks("seen")[2] == ""  # there is no other row to be better than
    assert any("never paired" in notice for notice in found.notices)


def test_different_machines_and_seeds_are_reported(tmp_path: Path) -> None:
    folders = [run(tmp_path / "a", "pefll"), run(tmp_path / "b", "pefll", seed=2), run(tmp_path / "c", "local")]
    environment = json.loads((folders[0] / "environment.json").read_text())
    put(folders[0] / "environment.json", json.dumps(environment | {"torch": "1.0"}))
    environments, seeds = compare_runs(folders).notices
    assert "torch" in environments
    assert "seeds" in seeds


# Folders


def test_a_parent_folder_stands_for_its_finished_runs(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    for value in (0.1, 0.02, 0.003):
        run(sweep / f"lr={value}", "pefll", settings=lr(value))
    (run(sweep / "lr=1", "pefll", settings=lr(1.0)) / "summary.json").unlink()
    (sweep / "comparison").mkdir()
    found = compare_runs([sweep])
    assert [row.details for row in found.rows] == [("lr 0.003",), ("lr 0.02",), ("lr 0.1",)]
    assert len(found.notices) == 1
    assert "lr=1" in found.notices[0]
    with pytest.raises(DataError, match=r"lr=1.*summary\.json"):
        compare_runs([sweep, sweep / "lr=1"])
    for folder in sweep.glob("lr=0*"):
        (folder / "summary.json").unlink()
    with pytest.raises(DataError, match="4 runs"):
        compare_runs([sweep])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("summary.json", "{", r"summary\.json is damaged"),
        ("summary.json", "{}", r"summary\.json.*best"),
        ("summary.json", '{"seen": 3, "unseen": null, "global": null}', r"summary\.json.*edited"),
        ("metrics.jsonl", "", r"metrics\.jsonl: "),
        ("partition.json", None, r"partition\.json"),
        ("environment.json", "[]", r"environment\.json is damaged"),
        ("experiment.yaml", "name: x\n", r"experiment\.yaml"),
        ("experiment.yaml", None, r"experiment\.yaml"),
    ],
)
def test_a_damaged_run_is_named(tmp_path: Path, file: str, content: str | None, message: str) -> None:
    folder = run(tmp_path / "a", "pefll")
    if content is None:
        (folder / file).unlink()
    elif content in ("{", "[]"):
        (folder / file).write_text(content)
    else:
        put(folder / file, content)
    with pytest.raises(DataError, match=message):
        compare_runs([folder])


# The paired test

BETTER = [0.9, 0.8, 0.85, 0.95, 0.7, 0.9, 0.6, 0.8, 0.9]
WORSE = [0.8, 0.7, 0.8, 0.9, 0.65, 0.7, 0.5, 0.75, 0.8]
SIMILAR = [0.9, 0.81, 0.84, 0.94, 0.71, 0.9, 0.6, 0.78, 0.9]


def three(tmp_path: Path) -> list[Path]:
    return [
        measured(run(tmp_path / "a", "pefll"), WORSE),
        measured(run(tmp_path / "b", "local"), BETTER),
        measured(run(tmp_path / "c", "fedavg"), SIMILAR),
    ]


def test_pairs_are_tested_over_clients_and_corrected(tmp_path: Path) -> None:
    found = compare_runs(three(tmp_path))
    pairs = {(pair.first, pair.second): pair for pair in found.pairs if pair.group == "seen"}
    assert set(pairs) == {(1, 0), (2, 0), (1, 2)}  # the better one first
    all_above = pairs[1, 0]
    assert (all_above.clients, all_above.better, all_above.worse, all_above.seeds) == (9, 9, 0, (1,))
    assert all_above.median == 0.1  # of 0.1 five times: rounding errors must not separate equal differences
    whole = [round(100 * (b - w)) for b, w in zip(BETTER, WORSE, strict=True)]
    assert all_above.p == pytest.approx(stats.wilcoxon(whole, method=stats.PermutationMethod(n_resamples=1e9)).pvalue)
    assert all_above.p == pytest.approx(2 / 2**9)
    second = pairs[2, 0]
    assert (all_above.p_holm, second.p_holm) == (pytest.approx(3 * 2 / 2**9), pytest.approx(3 * second.p))
    assert (pairs[1, 2].better, pairs[1, 2].worse) == (3, 2)
    assert pairs[1, 2].p_holm == pairs[1, 2].p  # the largest is multiplied by one
    turned = all_above.seen_from(0)
    low, high = all_above.bootstrap
    assert (turned.first, turned.second, turned.better, turned.worse, turned.median) == (0, 1, 0, 9, -0.1)
    assert turned.bootstrap == (-high, -low)
    assert turned.seen_from(1) == all_above
    # Validation, equal for all rows, prefers the first: the worst.
    assert [reference.row for reference in found.references.values()] == [0]
    assert all_above.p_against == pytest.approx(2 * 2 / 2**9)
    assert second.p_against == pytest.approx(max(2 * 2 / 2**9, second.p))
    assert pairs[1, 2].p_against is None
    assert found.marks("seen") == ["", "best", ""]  # both differ significantly from the first
    assert found.marks("seen", "pooled").count("tied") == 0


def test_the_reference_is_chosen_on_validation_or_by_name(tmp_path: Path) -> None:
    folders = three(tmp_path)
    measured(folders[2], SIMILAR, 0.6)
    found = compare_runs(folders)
    (reference,) = found.references.values()
    assert (reference.row, reference.because) == (2, "best on validation")
    assert found.marks("seen") == ["", "best", "tied"]  # the reference does not differ significantly from the best
    for name in ("Local", "local"):
        found = compare_runs(folders, name)
        assert [reference.row for reference in found.references.values()] == [1]
        assert found.marks("seen") == ["", "best", "tied"]
    with_it = [pair for pair in found.pairs if pair.group == "seen" and 1 in (pair.first, pair.second)]
    plain = [pair.p for pair in with_it if pair.p is not None]
    assert [pair.p_against for pair in with_it] == pytest.approx(holm(plain))
    lines = [line for line in csv.DictReader(pairs_as_csv(found).splitlines()) if line["group"] == "seen"]
    assert sorted(line["against"] for line in lines) == ["", "Local", "Local"]
    assert all(line["p_holm"] for line in lines)  # over all pairs, as before
    with pytest.raises(ExperimentError, match=r"against .*PeFLL, Local, FedAvg.*FedProx"):
        compare_runs(folders, "FedProx")


def test_the_best_of_several_settings_is_chosen_on_validation(tmp_path: Path) -> None:
    for value, validation in {0.01: 0.5, 0.02: 0.7, 0.04: 0.6}.items():
        measured(run(tmp_path / f"lr={value}", "pefll", settings=lr(value)), WORSE, validation)
    measured(run(tmp_path / "other", "local"), BETTER, 0.9)
    assert [r.row for r in compare_runs([tmp_path]).references.values()] == [3]
    assert [r.row for r in compare_runs([tmp_path], "pefll").references.values()] == [1]
    assert [r.row for r in compare_runs([tmp_path], "PeFLL, lr 0.04").references.values()] == [2]


def found_of(comparison: RunComparison, group: str) -> Finding:
    (finding,) = (finding for finding in findings(comparison) if finding.group == group)
    return finding


def test_a_winner_is_significantly_better_than_every_other_row(tmp_path: Path) -> None:
    found = compare_runs(three(tmp_path))
    seen = found_of(found, "seen")
    assert (seen.best.label, seen.others[0].label, seen.winner) == ("Local", "FedAvg + fine-tuning", None)
    assert [row.label for row in seen.close] == ["FedAvg + fine-tuning"]
    pair = next(pair for pair in found.pairs if pair.group == "seen" and (pair.first, pair.second) == (1, 2))
    assert (seen.pair, seen.p) == (pair, pair.p_holm)
    alone = compare_runs([tmp_path / "a", tmp_path / "b"])
    seen = found_of(alone, "seen")
    assert seen.winner is seen.best
    assert seen.p == pytest.approx(2 / 2**9)
    low, high = (f"{100 * end:+.1f}" for end in seen.pair.bootstrap)
    mean, lead = 100 * statistics.mean(BETTER), 100 * seen.pair.mean if seen.pair.mean else 0
    facts = ("Local", f"{mean:.1f} %", f"{lead:.1f} points", "PeFLL", f"{low} to {high}", "1 seed, 9 clients", "0.0039")
    assert tells(sentence(alone, seen), *facts)


@UNRENDERED
@pytest.mark.parametrize(
    ("against", "family", "rival"),
    [
        (None, "3 pairs of rows", "FedAvg + fine-tuning"),
        ("PeFLL", "2 pairs with PeFLL", "PeFLL"),  # the worst row was named
        ("Local", "2 pairs with Local", "FedAvg + fine-tuning"),  # the best
    ],
)
def test_a_page_has_one_family_of_tests(tmp_path: Path, against: str | None, family: str, rival: str) -> None:
    found = compare_runs(three(tmp_path), against)
    page = html.unescape(re.sub(r"<[^>]+>", " ", write_comparison(found, tmp_path / "page").read_text()))
    text, seen = re.sub(r"\s+", " ", page), found_of(found, "seen")
    assert (seen.best.label, seen.rival.label) == ("Local", rival)
    assert f"p = {seen.p:.2g}, by Holm's correction over {family}" in text
    assert f"Holm's correction over {family} for seen clients" in text  # of the table of pairs
    reference, compared = found.references[seen.block].row, {seen.best.label, seen.rival.label}
    for other, pair in found.pairs_of(reference, "seen").items():
        assert f"{found.p(pair):.3f}" in text
        if {found.rows[reference].label, found.rows[other].label} == compared:
            assert found.p(pair) == seen.p  # one comparison, one p
    assert ("Only differences to PeFLL are tested" in text) is (against == "PeFLL")


def test_too_few_clients_for_any_significance_are_counted(tmp_path: Path) -> None:
    found = compare_runs(three(tmp_path / "three"))
    assert found_of(found, "seen").too_few is None  # 3 · 2⁻⁸ = 0.012
    assert found_of(found, "unseen").too_few == 3
    folders = [run(tmp_path / f"x{i}", "pefll", settings=lr(0.01 * (i + 1))) for i in range(14)]
    found = compare_runs(folders)
    assert found_of(found, "seen").too_few == 9  # 91 · 2⁻⁸ = 0.36
    assert "9 clients" in sentence(found, found_of(found, "seen"))


def test_pairs_use_all_common_seeds(tmp_path: Path) -> None:
    folders = [run(tmp_path / f"p{seed}", "pefll", seed=seed) for seed in (1, 2, 3)]
    folders += [run(tmp_path / f"l{seed}", "local", seed=seed) for seed in (2, 3, 4)]
    found = compare_runs(folders)
    pair = next(pair for pair in found.pairs if pair.group == "seen")
    assert (pair.seeds, pair.clients, pair.over) == ((2, 3), 18, "seeds")
    assert found.tested_over == "seeds"


def test_several_seeds_are_the_observations(tmp_path: Path) -> None:
    """Use three seeds of nine clients each, in one of which the methods are equally good."""
    gains = {1: 0.1, 2: 0.05, 3: 0.0}  # of every client
    base = [0.8, 0.7, 0.8, 0.5, 0.65, 0.7, 0.5, 0.75, 0.8]
    folders = []
    for seed, gain in gains.items():
        folders.append(measured(run(tmp_path / f"a{seed}", "pefll", seed=seed), [value + gain for value in base]))
        folders.append(measured(run(tmp_path / f"b{seed}", "local", seed=seed), base))
    found = compare_runs(folders)
    pair = next(pair for pair in found.pairs if pair.group == "seen")
    means = list(gains.values())
    assert pair.mean == pytest.approx(0.05)
    assert pair.p == pytest.approx(stats.ttest_1samp(means, 0).pvalue)  # 0.23
    assert pair.interval == pytest.approx(stats.t.interval(0.95, 2, 0.05, stats.sem(means)))
    assert pair.p_of_seeds == pytest.approx((2 / 2**9, 2 / 2**9, 1))
    assert (pair.clients, pair.better, pair.worse) == (27, 18, 0)
    assert found.marks("seen") == ["best", "tied"]  # 18 of 27 clients are better, none is worse
    together = [gain for gain in means for _ in base]
    assert stats.wilcoxon(together, zero_method="pratt").pvalue < 1e-4  # pseudo-replication would find a difference
    (line,) = [row for row in csv.DictReader(pairs_as_csv(found).splitlines()) if row["group"] == "seen"]
    assert (line["test_over"], float(line["mean_difference"])) == ("seeds", pytest.approx(0.05))
    assert 0 <= float(line["bootstrap_low"]) <= pair.bootstrap[0] < 0.05 < float(line["bootstrap_high"]) <= 0.1
    assert float(line["t_low"]) < 0
    assert tells(sentence(found, found_of(found, "seen")), "PeFLL", "5.0 points", "Local", "3 seeds", f"{pair.p:.2g}")
    one = compare_runs(folders[:2])
    (alone,) = [pair for pair in one.pairs if pair.group == "seen"]
    assert (alone.over, alone.interval, alone.p) == ("clients", None, pytest.approx(2 / 2**9))
    assert alone.bootstrap == pytest.approx((0.1, 0.1))


def test_clients_of_different_partitions_are_not_paired(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", "pefll"), measured(run(tmp_path / "b", "local"), BETTER)
    partition = json.loads((b / "partition.json").read_text())
    partition["clients"][0]["sha256"] = "f" * 64
    put(b / "partition.json", json.dumps(partition))
    found = compare_runs([a, b])
    (why,) = {pair.why for pair in found.pairs}
    assert "partitions" in why
    assert all(pair.p is None and pair.clients == 0 for pair in found.pairs)
    assert sorted(found.marks("seen")) == ["", "best"]
    found = compare_runs([a, run(tmp_path / "c", "local", seed=2)])
    assert {pair.why for pair in found.pairs} == {"they have no seed in common"}
    for finding in findings(found):
        assert (finding.winner, finding.pair, finding.close) == (None, None, ())
        assert finding.untested == (finding.others[0],)
    assert found.rows[0].runs[0].partition == read_manifest(a).fingerprint


# Validation


def test_settings_are_chosen_on_validation_never_on_test(tmp_path: Path) -> None:
    values = {0.01: (0.5, WORSE), 0.02: (0.7, WORSE), 0.04: (0.6, BETTER)}
    for value, (validation, accuracies) in values.items():
        measured(run(tmp_path / f"lr={value}", "pefll", settings=lr(value)), accuracies, validation)
    measured(run(tmp_path / "other", "local"), BETTER)
    (choice,) = compare_runs([tmp_path]).chosen
    assert choice.row.details == ("lr 0.02",)
    assert (choice.candidates, choice.validation, choice.runner_up, choice.edges) == (3, 0.7, 0.6, ())
    measured(tmp_path / "lr=0.04", BETTER, 0.8)
    (choice,) = compare_runs([tmp_path]).chosen
    assert choice.edges == ("algorithm.local.lr",)
    cells = [cell.text for cell in choice_table(compare_runs([tmp_path])).blocks[0][1][0].cells]
    assert " ".join(cells[0].split()) == "PeFLL lr 0.04 (lr at the edge of its grid)"
    assert cells[1:4] == ["3", "80.0", "70.0"]


def test_settings_are_chosen_on_the_common_seeds(tmp_path: Path) -> None:
    validation = {(0.1, 1): 0.5, (0.1, 2): 0.9, (0.2, 1): 0.6}
    for (value, seed), accuracy in validation.items():
        folder = run(tmp_path / f"lr={value},seed={seed}", "pefll", seed=seed, settings=lr(value))
        measured(folder, BETTER, accuracy)
    (choice,) = compare_runs([tmp_path]).chosen
    assert (choice.seeds, choice.validation) == ((1,), 0.6)  # not 0.7, the mean of the other over both
    shutil.rmtree(tmp_path / "lr=0.1,seed=1")
    assert compare_runs([tmp_path]).chosen == ()


def test_the_best_round_is_shown_beside_the_last(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", "pefll", rounds=(0, 100, 200))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    best = lines[1]
    edit(folder, best={key: best[key] for key in ("round", "seen", "unseen", "global")})
    (row,) = compare_runs([folder]).rows
    assert row.validation(best=True) == (best["validation_pooled"], None)
    assert row.validation(best=False) == (lines[2]["validation_pooled"], None)
    assert row.at_best("unseen") == (best["unseen"]["accuracy_mean"], None)


# Written files


def test_csv_contains_everything_in_full_precision(tmp_path: Path) -> None:
    found = compare_runs(three(tmp_path))
    rows = list(csv.DictReader(rows_as_csv(found).splitlines()))
    assert [row["label"] for row in rows] == ["PeFLL", "Local", "FedAvg + fine-tuning"]
    assert float(rows[0]["seen_accuracy"]) == statistics.mean(WORSE)
    assert rows[0]["seen_accuracy_std"] == ""
    assert (rows[1]["seen_mark"], rows[2]["seen_mark"]) == ("best", "")
    assert rows[0]["algorithm.name"] == "pefll"
    pairs = list(csv.DictReader(pairs_as_csv(found).splitlines()))
    assert [float(pair["p"]) for pair in pairs] == [pair.p for pair in found.pairs]
    assert len(pairs) == 6


def test_latex_marks_the_best_and_escapes_special_characters(tmp_path: Path) -> None:
    expected = r"a\_b \& 5\% \#1 \{x\} \textasciitilde{}\textasciicircum{} \textbackslash{} \$"
    assert escaped("a_b & 5% #1 {x} ~^ \\ $") == expected
    text = latex_table(compare_runs(three(tmp_path), "Local"))
    assert f"Local & 1 & \\textbf{{{100 * statistics.mean(BETTER):.1f}}} $\\pm$" in text
    assert f"FedAvg + fine-tuning & 1 & \\underline{{{100 * statistics.mean(SIMILAR):.1f}}} $\\pm$" in text


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex with booktabs")
def test_latex_compiles(tmp_path: Path) -> None:
    folders = [run(tmp_path / "runs" / "a_b", "pefll"), run(tmp_path / "runs" / "c", "pefll")]
    folders += [run(tmp_path / "runs" / "d", "local", clients=20, unseen=5)]
    text = latex_table(compare_runs(folders))
    assert r"PeFLL, a\_b" in text
    special = escaped("\\ ~ ^ < > | \" ' & % $ # _ { } ± –")
    document = rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{text}{special}\end{{document}}"
    (tmp_path / "t.tex").write_text(document)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve runs: more rows than a figure can show."""
    sweep = tmp_path_factory.mktemp("sweep")
    for value in (0.01, 0.02, 0.03, 0.04, 0.05):
        for seed in (1, 2):
            run(sweep / f"lr={value},seed={seed}", "fedavg", seed=seed, settings=lr(value),
                predictors=("personal", "global"), new_client=COSTS)  # fmt: skip
    run(sweep / "pefll-1", "pefll")
    run(sweep / "pefll-2", "pefll", seed=2)
    return sweep


@pytest.fixture(scope="module")
def written(many: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_comparison(compare_runs([many]), tmp_path_factory.mktemp("out") / "comparison").parent


@UNRENDERED
def test_many_methods_are_counted_instead_of_listed(tmp_path: Path) -> None:
    names = ("apfl", "ditto", "fedavg", "fedper", "fedprox", "fedrep", "local", "pefll")
    for i, name in enumerate(names):  # one client's accuracy separates them, which no test considers a difference
        folder = run(tmp_path / name, name, rounds=(0,) if name == "local" else (0, 2))
        measured(folder, [0.5] * 8 + [0.5 + 0.01 * i], 0.5 + 0.01 * i)
    found = compare_runs([tmp_path])
    page = write_comparison(found, tmp_path / "out").read_text()
    assert "8 methods" in page[page.index("<h1>") : page.index("</h1>")]
    assert len(found_of(found, "seen").close) == 7
    assert 'data-group="seen" data-best="PeFLL" data-winner=""' in page
    table = page[page.index("<h2>Paired comparison") : page.index("<h2>Validation")]
    assert table.count('<th scope="col"') == 10  # without a column for the best, which is in every pair
    assert all(title.endswith("PeFLL") for title in re.findall(r'<th scope="rowgroup"[^>]*>([^<]*)', table))


def test_a_printed_comparison(many: Path, written: Path) -> None:
    files = sorted(str(path.relative_to(written)) for path in written.rglob("*") if path.is_file())
    figures = ["figures/accuracy.svg", "figures/clients.svg", "figures/pairs.svg"]
    assert files == ["compare.csv", "compare.html", "compare.tex", *figures, "pairs.csv"]
    page = (written / "compare.html").read_text()
    assert re.findall(r"<h2>(.*?)</h2>", page) == [
        "Results", "Learning curves", "Distribution over clients", "Paired comparison, client by client", "Validation",
        "Settings that differ", "Runs",
    ]  # fmt: skip
    assert len(page) < 1_000_000
    found = compare_runs([many])
    assert len(found.rows) == 11
    assert len(next(iter(found.featured.values()))) == 3
    assert "3 of 11 rows" in page
    row = found.rows[0].over_seeds("seen")
    assert f"{100 * row.mean:.1f} ± {100 * row.std:.1f}" in page
    addresses = set(re.findall(r"https?://[^\s\"'<]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # namespaces, never fetched
    assert not re.search(r"<script|<link|<img|@import|url\((?!#)", page)


def test_methods_keep_their_colours_in_every_figure(written: Path) -> None:
    assert len(set(line_styles(map(str, range(20))).values())) == 20
    page = (written / "compare.html").read_text()
    body = page[page.index("<main>") :]
    assert not any(colour in body for colour in COLOURS.values())
    assert {f"--{name}" for name in ("m0", "m1", "m2")} <= set(re.findall(r"var\((--m\d)\)", body))
    ids = re.findall(r' id="([^"]+)"', body)
    assert len(ids) == len(set(ids))
    for path in (written / "figures").iterdir():
        svg = path.read_text()
        ElementTree.fromstring(svg)
        assert "var(" not in svg


@pytest.mark.slow
def test_a_repeated_comparison_writes_equal_bytes(many: Path, written: Path) -> None:
    before = {path: path.read_bytes() for path in written.rglob("*") if path.is_file()}
    (written / "figures" / "left-over.svg").write_text("of an earlier version")
    write_comparison(compare_runs([many]), written)
    assert {path: path.read_bytes() for path in written.rglob("*") if path.is_file()} == before
    assert [path.name for path in written.parent.iterdir()] == [written.name]


@UNRENDERED
def test_the_folder_is_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare_runs([run(tmp_path / "a", "pefll")])
    write = Path.write_text

    def full_disk(self: Path, *args: Any, **more: Any) -> int:
        if self.name == "clients.svg":
            raise OSError(28, "No space left on device")
        return write(self, *args, **more)

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(StorageError, match="no space left on device"):
        write_comparison(found, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_other_files_in_the_folder_are_kept(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", "pefll")
    with pytest.raises(ExperimentError, match="folder"):
        write_comparison(compare_runs([folder]), folder)
    assert (folder / "summary.json").exists()


@UNRENDERED
def test_one_run_and_several_blocks_have_pages(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", "local", rounds=(0,), unseen=0)
    page = write_comparison(compare_runs([alone]), tmp_path / "one").read_text()
    assert "<h2>Paired comparison" not in page
    others = [run(tmp_path / f"<{name}>", name, clients=20, unseen=5) for name in ("pefll", "fedavg")]
    page = write_comparison(compare_runs([alone, *others]), tmp_path / "three").read_text()
    assert {path.name for path in (tmp_path / "three" / "figures").iterdir()} == {
        "accuracy-2.svg", "clients-1.svg", "clients-2.svg", "pairs-2.svg",
    }  # fmt: skip
    assert "&lt;pefll&gt;" in page
    assert "<pefll>" not in page


@pytest.mark.slow
def test_one_run_is_drawn_only_over_rounds(tmp_path: Path) -> None:
    one, two = run(tmp_path / "a", "pefll"), run(tmp_path / "b", "fedavg")
    for folders, over in (([one], {"rounds"}), ([one, two], {"rounds", "communication", "client steps"})):
        page = write_comparison(compare_runs(folders), tmp_path / "out").read_text()
        assert set(re.findall(r"Test accuracy over ([a-z ]+)<", page)) == over


# The command


def command(arguments: Sequence[str | Path], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "80")
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


@UNRENDERED
def test_output_fits_80_columns(many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = command([many, "--out", tmp_path / "c"], monkeypatch)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    table = [line for line in lines if not line.startswith("comparison:")]
    assert max(map(len, table)) <= 80
    assert not any("…" in line for line in table)
    assert sum(line.startswith("FedAvg + fine-tuning") for line in lines) == 6  # five rates, and the choice
    (finding,) = (finding for finding in findings(compare_runs([many])) if finding.group == "unseen")
    words = " ".join(done.output.split())
    assert tells(words, finding.best.label, "2 seeds")
    assert command([many, "--against", "PeFLL"], monkeypatch).exit_code == 0
    assert isinstance(command([many, "--against", "nobody"], monkeypatch).exception, ExperimentError)
    assert "Best on validation" in done.output
    assert (tmp_path / "c" / "compare.html").exists()


def test_invalid_options_fail_before_reading(many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = command([many, "--out", tmp_path], monkeypatch)
    assert isinstance(done.exception, ExperimentError)
    assert done.output == ""
    assert isinstance(command([tmp_path], monkeypatch).exception, DataError)


@pytest.mark.slow
def test_many_methods_are_drawn_with_enough_room(tmp_path: Path) -> None:
    """Leave room beside the legend, which alone once filled the figure of sixteen methods with two models each."""
    methods = ("apfl", "ditto", "fedavg", "fedbabu", "fedprox", "fedrod", "per-fedavg", "pfedme", "scaffold")
    folders = [run(tmp_path / name, name, predictors=("personal", "global")) for name in methods]
    found = compare_runs([*folders, run(tmp_path / "pefll", "pefll")])
    assert len(found.rows) == 19
    (shown,) = found.featured.values()
    assert [found.rows[i].predictor for i in shown] == ["personal"] * 10
    out = write_comparison(found, tmp_path / "out").parent
    assert "10 of 19 rows" in (out / "compare.html").read_text()
    rows = [found.rows[i] for i in shown]
    figure = draw_curves(rows, line_styles(row.label for row in rows)).figure
    heights = [axes.get_position().height * figure.get_figheight() for axes in figure.axes]
    assert min(heights) > 1.5  # inches


# New clients and their own steps


def with_steps(tmp_path: Path) -> list[Path]:
    fedavg = run(tmp_path / "f", "fedavg", predictors=("personal", "global"), new_client=COSTS)
    return [
        stepped(run(tmp_path / "p1", "pefll"), {0: 0.9, 5: 0.91}),
        stepped(run(tmp_path / "p2", "pefll", seed=2), {0: 0.8, 5: 0.93}),
        stepped(fedavg, {0: 0.5, 5: 0.91, 20: 0.7}),
        run(tmp_path / "l", "local", rounds=(0,)),
    ]


def test_own_steps_of_new_clients_are_one_line_per_run(tmp_path: Path) -> None:
    found = compare_runs(with_steps(tmp_path))
    (places,) = found.stepping.values()
    rows = [found.rows[i] for i in places]
    assert [row.label for row in rows] == ["PeFLL", "FedAvg + fine-tuning"]  # not the global model's row, not Local
    assert {k: v.mean for k, v in rows[0].own_steps.items()} == pytest.approx({0: 0.85, 5: 0.92})
    assert rows[0].own_steps[0].std == pytest.approx(0.0707, abs=1e-4)
    (table,) = own_steps_tables(found).values()
    lines = [[cell.text for cell in row.cells] for row in table.blocks[0][1]]
    assert table.headings[1:] == ("0", "5", "20")
    assert lines[0] == ["PeFLL", "85.0", "92.0", "–"]
    assert lines[1][1:] == ["50.0", "91.0", "70.0"]


@UNRENDERED
def test_own_steps_are_on_the_page_and_in_a_table(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_comparison(compare_runs(with_steps(tmp_path / "runs")), out)
    assert "New clients after local steps" in (out / "compare.html").read_text()
    assert (out / "figures" / "own-steps.svg").read_text().startswith("<svg")
    rows = list(csv.DictReader((out / "own_steps.csv").read_text().splitlines()))
    assert [(row["label"], row["seed"], row["steps"], row["accuracy"]) for row in rows] == [
        ("PeFLL", "1", "0", "0.9"),
        ("PeFLL", "1", "5", "0.91"),
        ("PeFLL", "2", "0", "0.8"),
        ("PeFLL", "2", "5", "0.93"),
        ("FedAvg + fine-tuning", "1", "0", "0.5"),
        ("FedAvg + fine-tuning", "1", "5", "0.91"),
        ("FedAvg + fine-tuning", "1", "20", "0.7"),
    ]
    plain = tmp_path / "plain"
    write_comparison(compare_runs([tmp_path / "runs" / "l"]), plain)
    assert not (plain / "own_steps.csv").exists()
    assert own_steps_tables(compare_runs([tmp_path / "runs" / "l"])) == {}
