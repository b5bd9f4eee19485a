"""Compact file, tables and figure of docs/results/own-tasks.md, from results of research/own_tasks.py."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from own_tasks import FOUND, GRIDS, GROUPS, KEYS, PROBLEMS
from summaries import Evaluation, Run, Runs, spread, table

from fedloom.reporting.drawing import COLOURS, FULL
from fedloom.reporting.significance import t_interval

NAMES = {
    "local": "Local",
    "fedavg": "FedAvg + fine-tuning",
    "fedavg-local-statistics": "local statistics + fine-tuning",
    "ditto": "Ditto",
    "pefll": "PeFLL",
    "fedbn": "FedBN",
}
AS_IT_IS = {
    "fedavg": "FedAvg's shared model",
    "fedavg-local-statistics": "shared weights, local statistics",
}
"""Names of the models that a method's clients share, before fine-tuning."""

HEADLINES = {"rmse": "RMSE", "auroc": "AUROC, %", "accuracy": "accuracy, %", "mean_iou": "mean IoU, %"}
TITLES = {
    "regression": "Regression",
    "signals": "Multilabel signals",
    "shapes": "Segmentation",
    "categories": "Numbers and categories",
    "cameras": "ResNet18, cameras",
}
COLUMNS = ("validation", *(f"{of}{group}_{key}" for of in ("", "global_") for group in GROUPS for key in KEYS))
BESIDE = "fedavg"
"""Method that the others are compared with."""


def folded(folder: Path) -> Runs:
    """Return PROBLEM/search/METHOD/SETTING with validation results, and PROBLEM/test/METHOD with a line per seed.

    Values other than RMSE are in percent. A run that diverged has no values.
    """
    runs = Runs()
    for path in sorted(folder.glob(f"*/{FOUND}")):
        problem = path.parent.name
        found: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        for method, about in found.items():
            factor = 1 if about["headline"] == "rmse" else 100
            for point in about["search"]:
                name = f"{problem}/search/{method}/{_named(point['setting'])}"
                values = {} if point["validation"] is None else {"validation": _rounded(factor * point["validation"])}
                runs[name] = (Evaluation(name, "1", _as_text(point["setting"]), 0, None, values, {}),)
            name = f"{problem}/test/{method}"
            settings = {"headline": about["headline"], **_as_text(about["chosen"])}
            runs[name] = tuple(
                Evaluation(name, seed, settings, 0, None, {k: _rounded(factor * v) for k, v in values.items()}, {})
                for seed, values in about["tests"].items()
            )
    return runs


def _as_text(setting: Mapping[str, float]) -> dict[str, str]:
    return {key: f"{value:g}" for key, value in setting.items()}


def _named(setting: Mapping[str, float]) -> str:
    return ",".join(f"{key}={value}" for key, value in _as_text(setting).items())


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def tables(runs: Runs) -> Iterator[str]:
    """Yield the test results and the search of each problem."""
    for problem in problems(runs):
        yield of_tests(runs, problem)
        yield of_search(runs, problem)


def problems(runs: Runs) -> list[str]:
    """Return the problems in the page's order."""
    return [problem for problem in PROBLEMS if f"{problem}/test/{BESIDE}" in runs]


def tests(runs: Runs, problem: str) -> dict[str, Run]:
    """Return each method's lines, one for each seed."""
    return {method: runs[f"{problem}/test/{method}"] for method in GRIDS[problem]}


def of_tests(runs: Runs, problem: str) -> str:
    """Return test results: statistics over clients, each with its spread over seeds, and differences to one method."""
    methods = tests(runs, problem)
    headline = methods[BESIDE][0].settings["headline"]
    digits = 3 if headline == "rmse" else 1
    other = {group: values(methods[BESIDE], f"{group}_mean") for group in GROUPS}
    rows = []
    for method, run in methods.items():
        shown = [("", NAMES[method])]
        if method in AS_IT_IS:
            shown.insert(0, ("global_", AS_IT_IS[method]))
        for of, name in shown:
            cells = [spread(values(run, f"{of}{group}_{key}"), digits) for group in GROUPS for key in KEYS]
            gains = [
                difference(values(run, f"{of}{group}_mean"), other[group], digits) if of or method != BESIDE else ""
                for group in GROUPS
            ]
            rows.append((name, *cells, *gains))
    seen = f"seen clients: {HEADLINES[headline]}"
    less = f"minus {NAMES[BESIDE]}"
    return table(("", seen, "worst tenth", "new clients", "worst tenth", f"seen, {less}", f"new, {less}"), rows)


def values(run: Run, key: str) -> list[float]:
    """Return a statistic of each seed."""
    return [line[key] for line in run]


def difference(of: Sequence[float], less: Sequence[float], digits: int) -> str:
    """Return the mean difference between results with the same seed, with Student's 95 % interval over seeds."""
    each = [a - b for a, b in zip(of, less, strict=True)]
    low, high = t_interval(each)
    shown = f"{statistics.fmean(each):+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"
    return shown.replace("-", "−")


def of_search(runs: Runs, problem: str) -> str:
    """Return validation results of all settings, the chosen ones in bold."""
    rows = []
    for method, run in tests(runs, problem).items():
        chosen = {key: value for key, value in run[0].settings.items() if key != "headline"}
        digits = 3 if run[0].settings["headline"] == "rmse" else 1
        cells = []
        for name in (name for name in runs if name.startswith(f"{problem}/search/{method}/")):
            line = runs[name][0]
            value = f"{line['validation']:.{digits}f}" if line.values else "diverged"
            cell = f"{', '.join(line.settings.values())}: {value}"
            cells.append(f"**{cell}**" if line.settings == chosen else cell)
        rows.append((NAMES[method], ", ".join(f"`{key}`" for key in chosen), "; ".join(cells)))
    return table(("method", "keys", "settings, and validation result"), rows, left=3)


def clients(runs: Runs) -> Figure:
    """Draw each problem's means over seen and over new clients, with a dot for each seed."""
    shown = problems(runs)
    figure = Figure(figsize=(FULL, 1.55 * len(shown)), layout="constrained")
    for axes, problem in zip(figure.subplots(len(shown), 1, squeeze=False)[:, 0], shown, strict=True):
        methods = tests(runs, problem)
        rows = [(AS_IT_IS[method], run, "global_") for method, run in methods.items() if method in AS_IT_IS]
        rows += [(NAMES[method], run, "") for method, run in methods.items()]
        for at, (_, run, of) in enumerate(rows):
            for group, shift in (("seen", -0.15), ("unseen", 0.15)):
                found = values(run, f"{of}{group}_mean")
                axes.plot(found, [at + shift] * len(found), ".", color=COLOURS[group], alpha=0.7)
                axes.plot([statistics.fmean(found)], [at + shift], "|", ms=11, mew=2, color=COLOURS[group])
        axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        headline = methods[BESIDE][0].settings["headline"]
        axes.set_title(f"{TITLES[problem]}: {HEADLINES[headline]}{' (lower is better)' if headline == 'rmse' else ''}")
    handles = [axes.plot([], [], ".", color=COLOURS[group], label=label)[0] for group, label in
               (("seen", "seen clients"), ("unseen", "new clients"))]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure
