"""Compact file and tables of docs/results/own-tasks.md, from results of research/own_tasks.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from summaries import Evaluation, Run, Runs, spread, table

from fedloom.reporting.significance import t_interval

FOUND = "found.json"
NAMES = {
    "local": "Local",
    "fedavg": "FedAvg + fine-tuning",
    "ditto": "Ditto",
    "pefll": "PeFLL",
    "fedbn": "FedBN",
}
TITLES = {"rmse": "RMSE", "macro_auroc": "macro AUROC, %", "accuracy": "accuracy, %", "mean_iou": "mean IoU, %"}
COLUMNS = ("validation", "seen_mean", "seen_worst_decile", "unseen_mean", "unseen_worst_decile", "global_mean")


def folded(folder: Path) -> Runs:
    """Return ``PROBLEM/METHOD`` with a line per seed, and ``PROBLEM/METHOD/search`` with a line per step size."""
    runs = Runs()
    for path in sorted(folder.glob(f"*/{FOUND}")):
        found: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        for method, about in found.items():
            name, settings = f"{path.parent.name}/{method}", {"lr": f"{about['rate']:g}", "headline": about["headline"]}
            factor = 1 if about["headline"] == "rmse" else 100
            runs[name] = tuple(
                Evaluation(name, seed, settings, 0, None, {k: _rounded(factor * v) for k, v in values.items()}, {})
                for seed, values in about["tests"].items()
            )
            for rate, value in about["validation"].items():
                at = f"{name}/search/{rate}"
                runs[at] = (Evaluation(at, "1", {"lr": rate}, 0, None, {"validation": _rounded(factor * value)}, {}),)
    return runs


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def tables(runs: Runs) -> Iterator[str]:
    """Yield a table of each problem."""
    problems = dict.fromkeys(name.partition("/")[0] for name in runs)
    for problem in problems:
        yield of_one({method: runs[f"{problem}/{method}"] for method in NAMES if f"{problem}/{method}" in runs})


def of_one(methods: dict[str, Run]) -> str:
    """Return the table of one problem: statistics over clients, each with its spread over seeds."""
    headline = methods["fedavg"][0].settings["headline"]
    digits = 3 if headline == "rmse" else 1
    rows = []
    for method, run in methods.items():
        columns = [spread([line[key] for line in run], digits) for key in COLUMNS[1:4]]
        gain = "" if method == "fedavg" else _difference(run, methods["fedavg"], digits)
        rows.append((NAMES[method], run[0].settings["lr"], *columns, gain))
    header = ("", "step size", f"seen clients, {TITLES[headline]}", "worst tenth", "new clients", "less FedAvg's")
    return table(header, rows)


def _difference(of: Run, less: Run, digits: int) -> str:
    """Return the mean difference on new clients, with Student's 95 % interval over seeds."""
    each = [a["unseen_mean"] - b["unseen_mean"] for a, b in zip(of, less, strict=True)]
    low, high = t_interval(each)
    mean = sum(each) / len(each)
    return f"{mean:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})".replace("-", "−")
