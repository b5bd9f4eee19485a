"""Reports, comparisons and tables of tasks other than classification, against made-up runs."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from facts import refusing
from run_folders import put, write_run
from task_runs import METRICS_OF, made_up, statistics_of, write_task_run
from typer.testing import CliRunner

from fedloom.api.run import Run
from fedloom.api.watch import Watch
from fedloom.cli.main import app
from fedloom.cli.tables import print_results
from fedloom.core.words import as_csv
from fedloom.errors import DataError, ExperimentError
from fedloom.experiment.sections import EarlyStopping
from fedloom.federation.activity import Activity, LastEvaluation
from fedloom.kubeflow import results as kubeflow_results
from fedloom.reporting.compare import compare_runs
from fedloom.reporting.compare_page import write_comparison
from fedloom.reporting.compare_tables import latex_table, pairs_as_csv, rows_as_csv
from fedloom.reporting.report import write_report
from fedloom.reporting.report_examples import examples
from fedloom.reporting.report_results import client_results, draw_distribution, draw_gains, result_table
from fedloom.runs.folder import RunFolder
from fedloom.runs.listing import list_runs
from fedloom.tasks.names import (
    ACCURACY,
    METRICS,
    MODEL_LOSS,
    Headline,
    headline_of,
    metric_heading,
    metrics_of,
    values_of,
)
from fedloom.trackers.numbers import evaluation_numbers
from fedloom.transport.control import from_wire, to_wire

TASKS = tuple(METRICS_OF)
SEEN, ALL = range(24), range(30)
UNRENDERED = pytest.mark.usefixtures("unrendered")


def headline(task: str) -> Headline:
    return METRICS[METRICS_OF[task][0]]


def shown(metric: Headline, value: float) -> str:
    return f"{100 * value:.1f}" if metric.percent else f"{value:.4g}"


def cells(row: Any) -> list[str]:
    return [cell.text for cell in row.cells]


@pytest.mark.parametrize("task", TASKS)
def test_the_report_has_every_metric(tmp_path: Path, task: str) -> None:
    run, metric = RunFolder(write_task_run(tmp_path / "run", task)), headline(task)
    part = result_table(run)
    results, every = part.tables
    assert ("Macro F1" in part.text) == ("macro_f1" in METRICS_OF[task])
    of_clients = [made_up(metric.name, i, 0.8) for i in SEEN]
    wanted = statistics_of(of_clients, metric.name)
    mean, std, *others = (shown(metric, value) for value in wanted.values())
    assert results.headings[0] == f"test {metric.heading}"
    assert cells(results.blocks[0][1][0])[1:6] == ["24", f"{mean} ± {std}", *others]
    assert len(results.blocks) == 1  # the last round is the best, and there is no label mask
    rows = {cells(row)[0]: cells(row)[1:] for row in every.blocks[0][1]}
    assert list(rows) == [*map(metric_heading, METRICS_OF[task])]
    for name in METRICS_OF[task]:
        values = statistics_of([made_up(name, i, 0.8) for i in SEEN], name)
        reported = [shown(METRICS[name], values[key]) for key in ("mean", "worst_decile", "pooled")]
        assert rows[metric_heading(name)][:3] == reported
    page = write_report(run.path).read_text()
    assert all(f"{title}</h2>" not in page for title in ("Confusion matrix", "Calibration", "Uncertainty"))
    assert f"test {metric.title}" in page
    assert 'role="img" aria-label="Clients: clients"' in page


@pytest.mark.parametrize("task", TASKS)
def test_clients_are_sorted_by_the_worst_headline(tmp_path: Path, task: str) -> None:
    part = client_results(RunFolder(write_task_run(tmp_path / "run", task, n=15, unseen=3)))
    worst, changed = part.tables
    assert worst.headings == ("client", *map(metric_heading, METRICS_OF[task]), "training examples")
    values = {f"client-{i:02d}": made_up(METRICS_OF[task][0], i, 0.8) for i in range(15)}
    expected = sorted(values, key=lambda client: (headline(task).sign * values[client], client))
    assert [cells(row)[0] for row in worst.blocks[0][1]] == expected
    first = cells(worst.blocks[0][1][0])
    assert first[1] == shown(headline(task), values[expected[0]])
    for row in changed.blocks[0][1]:  # the personalized model is better everywhere
        assert cells(row)[3].startswith("+")


@pytest.mark.parametrize("task", TASKS)
def test_client_figures_mark_the_worst_side(tmp_path: Path, task: str) -> None:
    rows = RunFolder(write_task_run(tmp_path / "run", task)).clients()
    metric = headline(task)
    worst = max if not metric.higher_is_better else min
    axes = draw_distribution(rows, metric, "unmasked").figure.axes[0]
    thick = [line for line in axes.lines if line.get_linewidth() == 3.6]
    assert worst(thick[0].get_xdata()) == pytest.approx(worst(made_up(metric.name, i, 0.8) for i in SEEN))
    texts = [text.get_text() for text in draw_gains(rows, metric, "unmasked").figure.axes[0].texts]
    assert sorted(texts) == ["global better: 0", "personalized better: 30"]


def test_the_best_round_of_a_lower_is_better_headline_is_the_lowest(tmp_path: Path) -> None:
    rounds = {0: 0.1, 10: 0.9, 20: 0.5, 30: 0.6}
    folder = write_task_run(tmp_path / "run", "regression", rounds=rounds)
    results, _ = result_table(RunFolder(folder)).tables
    best = statistics.fmean(made_up("rmse", i, 0.9) for i in SEEN)
    assert "10" in results.blocks[1][0]
    assert cells(results.blocks[1][1][0])[2].split(" ")[0] == shown(METRICS["rmse"], best)
    (own,) = (row for row in compare_runs([folder]).rows if row.predictor == "personal")
    assert own.results[0].best is not None
    assert own.results[0].best.round == 10
    assert own.validation(best=True).mean == made_up("rmse", 0, 0.9)  # type: ignore[union-attr]
    assert own.at_best("seen").mean == pytest.approx(best)  # type: ignore[union-attr]


@UNRENDERED
@pytest.mark.parametrize("task", TASKS)
def test_the_comparison_finds_the_better_method(tmp_path: Path, task: str) -> None:
    metric = headline(task)
    for seed in (1, 2, 3):
        for method, quality in (("ditto", 0.8), ("pefll", 0.6)):
            write_task_run(tmp_path / f"{method}-{seed}", task, method=method, quality=quality + 0.01 * seed, seed=seed)
    found = compare_runs([tmp_path])
    assert found.headline == metric
    assert found.groups == ("seen", "unseen")
    rows = {(row.runs[0].method, row.predictor): i for i, row in enumerate(found.rows)}
    good, bad = rows["ditto", "personal"], rows["pefll", "personal"]
    assert found.best(range(len(found.rows)), "seen") == [good]
    (pair,) = (p for p in found.pairs if p.group == "seen" and {p.first, p.second} == {good, bad})
    assert (pair.first, pair.clients, pair.better, pair.worse) == (good, 72, 72, 0)
    gap = statistics.fmean(
        made_up(metric.name, i, q + 0.8) - made_up(metric.name, i, q + 0.6) for q in (0.01, 0.02, 0.03) for i in SEEN
    )
    assert pair.mean == pytest.approx(gap)
    assert metric.sign * gap > 0
    assert pair.p is not None
    assert pair.p < 0.05
    assert found.references[found.rows[good].block].row == good  # on validation
    table = list(csv.DictReader(io.StringIO(rows_as_csv(found))))
    assert float(table[good][f"seen_{metric.name}"]) == pytest.approx(found.rows[good].mean("seen"))
    assert float(table[good]["seen_pooled"]) > 0
    assert {line["reading"] for line in table} == {metric.name}
    pairs = list(csv.DictReader(io.StringIO(pairs_as_csv(found))))
    assert all(
        int(line["clients"]) == int(line["first_better"]) + int(line["equal"]) + int(line["second_better"])
        for line in pairs
    )
    page = write_comparison(found, tmp_path / "out")
    assert (page.parent / "figures" / f"{metric.name}.svg").is_file()
    assert metric.title in page.read_text()
    assert metric.title in latex_table(found)
    assert "accurac" not in "".join(line for line in latex_table(found).splitlines() if "caption" in line)


def test_equal_error_differences_are_equal_floats(tmp_path: Path) -> None:
    write_task_run(tmp_path / "a", "regression")
    write_task_run(tmp_path / "b", "regression", lr=0.2)
    for name, off in (("a", 0.1), ("b", 0.3)):
        path = tmp_path / name / "clients.csv"
        rows = list(csv.DictReader(io.StringIO(path.read_text())))
        for i, row in enumerate(rows):
            row["personal_rmse_unmasked"] = f"{i + off:.1f}" if i % 2 else f"{i + off:.6f}"
        put(path, as_csv(rows))
    found = compare_runs([tmp_path])
    personal = {i for i, row in enumerate(found.rows) if row.predictor == "personal"}
    (pair,) = (p for p in found.pairs if p.group == "seen" and {p.first, p.second} <= personal)
    assert pair.median == pytest.approx(-0.2)
    assert pair.bootstrap[0] == pytest.approx(pair.bootstrap[1], abs=1e-15)


@pytest.mark.parametrize("task", ["regression", "segmentation"])
def test_a_setting_is_chosen_on_validation_in_the_metrics_direction(tmp_path: Path, task: str) -> None:
    for lr, quality in ((0.1, 0.5), (0.2, 0.8), (0.3, 0.7)):
        write_task_run(tmp_path / f"lr={lr}", task, lr=lr, quality=quality)
    (choice,) = compare_runs([tmp_path]).chosen
    row = choice.row
    assert row.settings["algorithm.lr"] == 0.2
    metric = METRICS_OF[task][0]
    assert (choice.validation, choice.runner_up) == (made_up(metric, 0, 0.8), made_up(metric, 0, 0.7))


def test_runs_with_different_or_damaged_metrics_are_not_compared(tmp_path: Path) -> None:
    one, two = (write_task_run(tmp_path / task, task) for task in ("regression", "segmentation"))
    with refusing(ExperimentError, "RMSE", "mean IoU", "regression", "segmentation"):
        compare_runs([one, two])
    summary = json.loads((one / "summary.json").read_text())
    del summary["seen"]["clients"]
    put(one / "summary.json", json.dumps(summary))
    with refusing(DataError, "summary.json", "clients"):
        compare_runs([one])


@UNRENDERED
def test_a_metric_without_clients_is_a_dash(tmp_path: Path) -> None:
    folder = write_task_run(tmp_path / "run", "multilabel")
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for results in (summary, *lines):
        results["unseen"]["metrics"]["auroc"] = None
    put(folder / "summary.json", json.dumps(summary))
    put(folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    results, _ = result_table(RunFolder(folder)).tables
    assert cells(results.blocks[0][1][1])[1:6] == ["6", "–", "–", "–", "–"]
    own = compare_runs([folder]).rows[0]
    assert own.over_seeds("seen") is not None
    write_report(folder)


def test_headline_of_results_of_older_versions() -> None:
    accurate = {"accuracy_mean": 0.5, "accuracy_std": 0.1, "loss_mean": 2.0}
    assert headline_of({"seen": accurate, "unseen": None, "global": None}) == ACCURACY
    assert values_of(accurate, ACCURACY)[:2] == (0.5, 0.1)
    lossy = {"accuracy_mean": None, "loss_mean": 2.0}
    assert headline_of({"seen": None, "unseen": lossy, "global": None}) == MODEL_LOSS
    assert metrics_of(lossy) == {"loss": values_of(lossy, MODEL_LOSS)}
    assert values_of(lossy, MODEL_LOSS).mean == 2.0


def last_line(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return found


@pytest.mark.parametrize("task", TASKS)
def test_status_shows_the_headline_locally_and_over_the_wire(tmp_path: Path, task: str) -> None:
    folder, metric = write_task_run(tmp_path / "run", task), headline(task)
    now = Activity("run", "ditto", "training", 2.0, 1.0, measured=LastEvaluation.from_line(last_line(folder)))
    reported = from_wire(to_wire(now))
    assert reported.measured == now.measured
    assert reported.measured.headline == metric
    wanted = statistics_of([made_up(metric.name, i, 0.8) for i in SEEN], metric.name)
    seen = reported.measured.groups["seen"]
    assert (seen.mean, seen.worst_decile, seen.pooled) == (wanted["mean"], wanted["worst_decile"], wanted["pooled"])
    assert seen.accuracy_mean is None
    done = CliRunner().invoke(app, ["status", str(folder)])
    assert done.exit_code == 0, done.output
    assert metric.title in done.output
    assert metric.exact(wanted["mean"]) in done.output


@pytest.mark.parametrize("task", TASKS)
def test_tables_and_lines_show_the_headline(tmp_path: Path, task: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder, metric = write_task_run(tmp_path / "run", task), headline(task)
    summary = json.loads((folder / "summary.json").read_text())
    wanted = statistics_of([made_up(metric.name, i, 0.8) for i in SEEN], metric.name)
    print_results(summary)
    printed = capsys.readouterr().out
    assert metric.title in printed
    assert f"{metric.exact(wanted['mean'])} ± {metric.exact(wanted['std'])}" in printed
    text = kubeflow_results.table_of_results(summary | {"round": 30})
    assert f"{metric.shown(wanted['mean'])} ± {metric.shown(wanted['std'])}" in text
    scores = kubeflow_results.scores(summary)
    assert scores[f"seen_{metric.name}_mean"] == wanted["mean"]
    assert "seen_accuracy_mean" not in scores
    assert f"{metric.title} {metric.shown(wanted['mean'])}" in Run(folder)._repr_html_()
    assert evaluation_numbers(last_line(folder))[f"seen/metrics/{metric.name}/mean"] == wanted["mean"]
    for choosing, value in ((False, wanted["pooled"]), (True, made_up(metric.name, 0, 0.8))):
        Watch(choosing=choosing).evaluated(last_line(folder))
        output = capsys.readouterr().err
        assert metric.title in output
        assert f"seen {metric.exact(value)}" in output


def test_the_list_of_runs_shows_each_runs_metric(tmp_path: Path) -> None:
    for task in TASKS:
        write_task_run(tmp_path / task, task)
    write_run(tmp_path / "classes", n=10, unseen=2, rounds=(0, 10))
    for entry in list_runs(tmp_path):
        task = Path(entry.path).name
        if task in TASKS:
            metric = headline(task)
            assert (entry.metric, entry.percent) == (metric.name, metric.percent)
            assert entry.seen == statistics.fmean(made_up(metric.name, i, 0.8) for i in SEEN)
    done = CliRunner().invoke(app, ["runs", str(tmp_path), "--json"])
    assert {line["metric"] for line in json.loads(done.output) if line["metric"]} >= {"rmse", "mean_iou"}
    done = CliRunner().invoke(app, ["runs", str(tmp_path)], env={"COLUMNS": "160"})
    assert "RMSE 19.7" in done.output


def test_a_threshold_follows_the_direction_of_the_metric() -> None:
    EarlyStopping(at_least=0.9).check(ACCURACY)
    EarlyStopping(at_most=3.5).check(METRICS["rmse"])
    for metric in (ACCURACY, METRICS["rmse"]):
        EarlyStopping(not_better_for=3).check(metric)
    for until, metric in ((EarlyStopping(at_least=0.9), METRICS["rmse"]), (EarlyStopping(at_most=0.1), ACCURACY)):
        with pytest.raises(ExperimentError) as error:
            until.check(metric)
        key = "at_least" if until.at_least is not None else "at_most"
        assert error.value.key == f"federation.until.{key}"
        assert error.value.found == getattr(until, key)


def test_a_run_ends_by_one_condition() -> None:
    for keys in ({}, {"at_least": 0.5, "at_most": 2.0}, {"at_most": 2.0, "not_better_for": 3}):
        with pytest.raises(ValueError, match="at_most"):
            EarlyStopping.model_validate(keys)
    until = EarlyStopping(at_most=3.5)  # scores are minus the error
    assert [until.is_reached(10, 10, -error) for error in (4.0, 3.6, 3.5, 1.0)] == [False, False, True, True]
    assert [EarlyStopping(at_least=0.5).is_reached(10, 10, score) for score in (0.4, 0.5)] == [False, True]
    patient = EarlyStopping(not_better_for=5)
    assert [patient.is_reached(number, 10, -2.0) for number in (10, 14, 15)] == [False, False, True]


def with_examples(folder: Path, task: str, clients: list[dict[str, Any]], outputs: int) -> None:
    document = {"round": 30, "task": task, "names": [], "outputs": outputs, "clients": clients}
    RunFolder(folder).write_json("examples.json", document)


@UNRENDERED
def test_the_report_of_regression_shows_residuals(tmp_path: Path) -> None:
    folder = write_task_run(tmp_path / "run", "regression")
    true = {"client-00": [1.0, 2.0, 4.0], "client-29": [10.0, 30.0]}
    off = {"client-00": [0.5, -0.5, 3.0], "client-29": [0.0, -4.0]}
    clients = [
        {"id": client, "seen": client == "client-00", "true": [[value] for value in values],
         "predicted": [[value + error] for value, error in zip(values, off[client], strict=True)]}
        for client, values in true.items()
    ]  # fmt: skip
    with_examples(folder, "regression", clients, 1)
    part = examples(RunFolder(folder))
    rows = [cells(row) for row in part.tables[0].blocks[0][1]]
    assert rows == [
        [client, f"{statistics.fmean(off[client]):.4g}", f"{math.hypot(*off[client]) / len(off[client]) ** 0.5:.4g}", n]
        for client, n in (("client-00", "3"), ("client-29", "2"))
    ]
    scatter, boxes = (panel.svg.figure.axes[0] for panel in part.panels)
    points = [tuple(point) for dots in scatter.collections for point in dots.get_offsets().tolist()]
    assert sorted(points) == sorted((t, t + e) for c in true for t, e in zip(true[c], off[c], strict=True))
    assert [label.get_text() for label in boxes.get_yticklabels()] == ["client-00", "client-29"]
    page = write_report(folder).read_text()
    assert 'aria-label="Examples: predictions"' in page
    assert 'aria-label="Examples: residuals"' in page


@UNRENDERED
def test_the_report_of_segmentation_shows_input_truth_and_prediction(tmp_path: Path) -> None:
    folder = write_task_run(tmp_path / "run", "segmentation")
    true, predicted = [[0, 1], [2, 255]], [[0, 2], [2, 0]]
    clients = [{"id": "client-00", "seen": True, "image": [[0, 100], [200, 255]], "true": true, "predicted": predicted}]
    with_examples(folder, "segmentation", clients, 3)
    part = examples(RunFolder(folder))
    (row,) = part.tables[0].blocks[0][1]
    assert cells(row) == ["client-00", f"{100 / 3:.1f}", "class 1"]  # one of three pixels with a class
    drawn = [axes.images[0].get_array().tolist() for axes in part.panels[0].svg.figure.axes]
    assert drawn == [clients[0][key] for key in ("image", "true", "predicted")]
    assert 'aria-label="Examples: examples"' in write_report(folder).read_text()


@UNRENDERED
def test_damaged_examples_give_a_note(tmp_path: Path) -> None:
    folder = write_task_run(tmp_path / "run", "segmentation")
    with_examples(folder, "segmentation", [{"id": "a", "seen": True, "true": [[0, 1]], "predicted": [[0]]}], 2)
    page = write_report(folder).read_text()
    assert "Left out: examples.json" in page
