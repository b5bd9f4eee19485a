"""Comparison of runs on data without classes: real runs of the noisy quadratic, compared by loss."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from facts import telling
from matplotlib.backends.backend_svg import FigureCanvasSVG
from run_folders import put, write_run
from scipy import stats
from typer.testing import CliRunner

from fedloom.cli.main import app
from fedloom.core.words import as_csv
from fedloom.errors import ExperimentError
from fedloom.reporting.compare import compare_runs
from fedloom.reporting.compare_page import write_comparison
from fedloom.reporting.compare_tables import latex_table, rows_as_csv, terminal_table
from fedloom.reporting.run_results import MeanStd
from fedloom.tasks.names import MODEL_LOSS

pytestmark = [pytest.mark.slow, pytest.mark.group("losses")]


def tree(root: Path, **algorithm: Any) -> dict[str, Any]:
    return {
        "name": "quadratic",
        "data": {
            "dataset": "gaussian",
            "root": str(root),
            "partition": {"scheme": "means", "clients": 12, "test_per_client": 50, "bias": 2.0},
            "held_out_fraction": 0.0,
        },
        "model": {"name": "quadratic"},
        "algorithm": {"name": "wga", "batch_size": 4, "steps_per_round": 5, **algorithm},
        "federation": {"rounds": 4, "clients_per_round": 12},
        "evaluation": {"every": 1},
        "runtime": {"workers": 0},
    }


def command(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "80"})


def run(root: Path, out: Path, *options: str, **algorithm: Any) -> str:
    """Run an experiment and return its output."""
    file = root / f"{out.name}.yaml"
    file.write_text(yaml.safe_dump(tree(root, **algorithm)))
    done = command("run", file, "--out", out, *options)
    assert done.exit_code == 0, (done.output, done.exception)
    return str(done.output)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run sweeps: ``one`` (user 0 alone, two rules, two seeds), ``all`` (all clients as user 0, three step sizes)."""
    root = tmp_path_factory.mktemp("losses")
    with pytest.MonkeyPatch.context() as unrendered:  # figures are created, and rendered only in tests of their content
        unrendered.setattr(FigureCanvasSVG, "print_svg", lambda canvas, file, **options: file.write("<svg />"))
        run(root, root / "one", "--seeds", "1-2", "--grid", "algorithm.rule=alone,bc")
        output = run(root, root / "all", "--grid", "algorithm.lr=0.001,0.05,0.2", rule="wga", users="all", block=12)
    assert "Validation loss" in output
    assert output.count("<- chosen") == 1
    return root


@pytest.fixture
def copied(real: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(real / "all", tmp_path / "all"))


def summaries(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*/summary.json"))]


def losses(run_folder: Path) -> list[float]:
    with (run_folder / "clients.csv").open(newline="") as file:
        return [float(row["personal_loss_unmasked"]) for row in csv.DictReader(file)]


def with_losses(run_folder: Path, values: Sequence[float], validation: float) -> None:
    """Set a run's losses of clients, and its validation loss."""
    with (run_folder / "clients.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row, value in zip(rows, values, strict=True):
        row["personal_loss_unmasked"] = f"{value:.6f}"
    put(run_folder / "clients.csv", as_csv(rows))
    path = run_folder / "summary.json"
    summary = json.loads(path.read_text())
    summary["seen"]["loss_mean"] = statistics.fmean(values)
    summary["wga"]["users"] = summary["seen"]
    put(path, json.dumps(summary))
    path = run_folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1]["validation_loss"] = validation
    put(path, "".join(json.dumps(line) + "\n" for line in lines))


def test_rows_contain_the_losses_of_their_runs(real: Path) -> None:
    found = compare_runs([real / "one"])
    assert found.headline == MODEL_LOSS
    assert [row.label for row in found.rows] == ["Alone", "Bias Correction"]
    assert found.groups == ("users", "seen")
    assert found.chosen == ()  # validation is over all clients, the models are for user 0
    for row, rule in zip(found.rows, ("alone", "bc"), strict=True):
        folders = [real / "one" / f"rule={rule},seed={seed}" for seed in (1, 2)]
        wanted = [json.loads((folder / "summary.json").read_text()) for folder in folders]
        for group, values in {
            "seen": [summary["seen"]["loss_mean"] for summary in wanted],
            "users": [summary["wga"]["users"]["loss_mean"] for summary in wanted],
        }.items():
            assert row.over_seeds(group) == (
                pytest.approx(statistics.mean(values)),
                pytest.approx(statistics.stdev(values)),
            )
        spreads = [statistics.pstdev(losses(folder)) for folder in folders]
        over_clients = row.over_seeds("seen", "std")
        assert over_clients.mean == pytest.approx(statistics.mean(spreads))
        worst = [statistics.mean(sorted(losses(folder))[-2:]) for folder in folders]  # a tenth of 12, rounded up
        decile = row.over_seeds("seen", "worst_decile")
        assert decile.mean == pytest.approx(statistics.mean(worst))


def test_a_common_user_0_has_no_column(real: Path) -> None:
    found = compare_runs([real / "all"])
    assert found.groups == ("seen",)
    assert terminal_table(found).headings[1:3] == ("seen", "worst decile")
    assert [row.method for row in found.rows] == ["WGA, mean of all", "WGA"] * 3
    (choice,) = found.chosen
    (chosen,) = choice.row.runs
    scores = {path.parent: json.loads(path.read_text().splitlines()[-1])["validation_loss"]
              for path in (real / "all").glob("*/metrics.jsonl")}  # fmt: skip
    assert chosen.path == min(scores, key=lambda folder: scores[folder]).resolve()
    assert (choice.validation, choice.runner_up) == tuple(sorted(scores.values())[:2])


LOW = [1.0, 1.1, 0.9, 1.2, 1.0, 1.3, 0.8, 1.0, 1.1, 1.2, 1.0, 0.9]
HIGH = [1.1, 1.3, 1.0, 1.1, 1.2, 1.4, 0.9, 1.2, 1.2, 1.5, 1.1, 1.2]


def test_lower_losses_are_better(copied: Path) -> None:
    shutil.rmtree(copied / "lr=0.2")
    with_losses(copied / "lr=0.001", HIGH, 0.4)
    with_losses(copied / "lr=0.05", LOW, 0.6)
    found = compare_runs([copied])
    low, high = (next(i for i, row in enumerate(found.rows) if row.label == f"WGA, lr {lr}") for lr in (0.05, 0.001))
    pair = next(p for p in found.pairs if {p.first, p.second} == {low, high} and p.group == "seen")
    assert (pair.first, pair.second) == (low, high)
    assert (pair.clients, pair.better, pair.worse) == (12, 11, 1)
    assert pair.median == -0.1  # of -0.1 five times: rounding errors must not separate equal differences
    whole = [round(10 * (a - b)) for a, b in zip(LOW, HIGH, strict=True)]
    exact = stats.wilcoxon(whole, method=stats.PermutationMethod(n_resamples=math.inf))
    assert pair.p == pytest.approx(exact.pvalue)
    assert found.marks("seen", "worst_decile")[low] == "best"
    (choice,) = found.chosen  # on validation alone, where the other is better
    assert (choice.row, choice.validation, choice.runner_up) == (found.rows[high], 0.4, 0.6)


def test_the_lowest_losses_are_marked(real: Path) -> None:
    found = compare_runs([real / "one"])
    means = [row.over_seeds("users") for row in found.rows]
    values = [mean.mean for mean in means if mean is not None]
    assert found.marks("users") == ["best" if value == min(values) else "" for value in values]
    ((_, rows),) = terminal_table(found).blocks
    assert [row.cells[1].mark for row in rows] == found.marks("users")


def test_the_printed_table_has_no_accuracy(real: Path, tmp_path: Path) -> None:
    one = write_comparison(compare_runs([real / "one"]), tmp_path / "one")
    page = one.read_text()
    assert "Test loss over rounds" in page
    assert "accurac" not in page.lower()
    assert "The data have no classes" in page
    assert "best, user 0" in page
    assert "best, seen" not in page
    assert {path.name for path in (tmp_path / "one" / "figures").iterdir()} == {
        "clients.svg", "loss.svg", "pairs.svg",
    }  # fmt: skip
    with (tmp_path / "one" / "compare.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = compare_runs([real / "one"]).rows
    for row, wanted in zip(rows, found, strict=True):
        for group in ("users", "seen"):
            spread = wanted.over_seeds(group)
            assert float(row[f"{group}_loss"]) == spread.mean
    assert "seen_accuracy" not in rows[0]
    assert "seen_pooled" not in rows[0]
    latex = (tmp_path / "one" / "compare.tex").read_text()
    assert r"\caption{Test loss, mean over clients" in latex
    lines = [line for line in latex.splitlines() if line.count("&") > 3 and "multicolumn" not in line]
    assert {line.count("&") for line in lines} == {7}
    assert r"\begin{tabular}{@{}lrrrrrrr@{}}" in latex
    assert r"\cmidrule(lr){3-3}\cmidrule(lr){4-5}\cmidrule(l){6-8}" in latex
    everybody = write_comparison(compare_runs([real / "all"]), tmp_path / "all").read_text()
    assert "accurac" not in everybody.lower()


def test_output_fits_80_columns(real: Path) -> None:
    done = command("compare", real / "one")
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= 80
    assert "test loss, ± over seeds" in done.output
    assert "…" not in done.output
    spread = compare_runs([real / "one"]).rows[0].over_seeds("users")
    assert spread.shown(MODEL_LOSS) in re.sub(r" +", " ", done.output)


def test_losses_of_different_models_are_not_compared(real: Path, copied: Path) -> None:
    other = copied / "lr=0.05"
    text = (other / "experiment.yaml").read_text()
    settings = yaml.safe_load(text)
    settings["model"]["curvature"] = 3.0
    (other / "experiment.yaml").write_text(yaml.safe_dump(settings))
    found = compare_runs([copied, real / "one"])
    assert [found.labels[block] for block in found.blocks] == ["gaussian, curvature 1.0", "gaussian, curvature 3.0"]
    assert any("models" in notice for notice in found.notices)
    assert len(rows_as_csv(found).splitlines()) == 1 + len(found.rows)
    assert all(latex_table(found).count(label) for label in found.labels.values())


def test_runs_with_and_without_classes_are_not_mixed(real: Path, tmp_path: Path) -> None:
    text = {"name": "x", "seed": 1, "data": {"dataset": "fashion-mnist", "partition": {"scheme": "iid", "clients": 6}},
            "model": {"name": "lenet"}, "algorithm": {"name": "pefll"}, "federation": {"rounds": 1}}  # fmt: skip
    other = write_run(tmp_path / "classes", n=6, unseen=2, rounds=(0, 1), experiment=yaml.safe_dump(text))
    with telling(ExperimentError, "lr=0.001", "lr=0.2", "classes"):
        compare_runs([real / "all", other])
    assert isinstance(command("compare", real / "one", other).exception, ExperimentError)


def test_rounding_of_losses() -> None:
    values = {9.29: "9.2900", 0.0024412: "0.0024412", 123456.0: "1.2346e+05", 12345.0: "12345"}
    assert {value: MeanStd(value, None).shown(MODEL_LOSS) for value in values} == values
    assert MeanStd(1.0, 0.6).shown(MODEL_LOSS) == "1.0000 ± 0.60"
    assert MeanStd(100.0, 12.0).shown(MODEL_LOSS) == "100.00 ± 12"
    assert (MODEL_LOSS.shown_difference(-0.25), MODEL_LOSS.shown_difference(0.0)) == ("-0.25", "0")
