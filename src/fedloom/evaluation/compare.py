"""What each client would get: finished runs side by side, one row for each kind of model (``fedloom compare``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom import experiment
from fedloom.errors import DataError
from fedloom.evaluation.run_folder import EXPERIMENT, RunFolder, human_bytes, is_masked

METHODS = {
    ("pefll", "personal"): "PeFLL",
    ("fedavg", "global"): "FedAvg",
    ("fedavg", "personal"): "FedAvg + fine-tuning",
    ("local", "personal"): "Local",
}
"""What a table calls the predictors of a method; others are called by algorithm and predictor."""

HEADINGS = (
    "what a client gets", "seen", "worst decile", "unseen", "worst decile", "client steps", "receives", "sends",
)  # fmt: skip
"""Columns of :func:`as_text`."""

Groups = dict[str, dict[str, Any] | None]


@dataclass(frozen=True)
class _Run:
    """One finished run: its settings without name and seed, and its summary."""

    folder: Path
    settings: str
    summary: dict[str, Any]


def comparison_table(run_folders: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Rows of the comparison: one for each (settings, predictor), in the order of the folders.

    Runs that differ in name and seed alone are merged. (If two of them have the same seed too, as a run and its
    replay, they are listed apart: merging would count one result twice.) A personal predictor whose statistics are
    those of the global one, as FedAvg's without fine-tuning, has no row of its own.

    Returns
    -------
    list of dict
        ``method``, ``algorithm``, ``predictor``, ``dataset``, ``model``, ``rounds``, ``masked`` (whether accuracies are
        those under the label mask), ``runs`` (folder names), ``seeds``; ``seen`` and ``unseen``, each None or
        {``clients``, ``accuracy_mean``, ``accuracy_std``, ``accuracy_worst_decile``, ``accuracy_pooled``,
        ``accuracy_mean_std``}: means over seeds of the summaries' values (``accuracy_std`` is over clients), and in
        ``accuracy_mean_std`` the standard deviation of ``accuracy_mean`` over seeds (of a sample, ddof = 1; None for
        one seed); and what a new client costs, None where the method did not say: ``client_steps`` (its own gradient
        steps), ``payload_down`` and ``payload_up`` (bytes it receives and sends).

    Raises
    ------
    DataError
        If a folder is not that of a finished run.
    ExperimentError
        If the experiment of a run cannot be read.
    """
    merged: dict[str, list[_Run]] = {}
    for folder in run_folders:
        run = _read(Path(folder))
        merged.setdefault(run.settings, []).append(run)
    rows = []
    for runs in merged.values():
        seeds = [run.summary["seed"] for run in runs]
        for group in [runs] if len(set(seeds)) == len(seeds) else [[run] for run in runs]:
            rows += _rows(group)
    return rows


def as_text(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Rows of :func:`comparison_table` as cells under :data:`HEADINGS`.

    Accuracies are in percent: mean ± standard deviation over seeds where there are several, else over clients. Rows
    that would read the same get the names of their runs.
    """
    names = [row["method"] for row in rows]
    cells: list[tuple[str, ...]] = []
    for row in rows:
        name = row["method"]
        if names.count(name) > 1:
            name = f"{name} ({', '.join(row['runs'])})"
        cells.append(
            (
                name,
                *_accuracy(row["seen"]),
                *_accuracy(row["unseen"]),
                "–" if row["client_steps"] is None else f"{row['client_steps']:g}",
                human_bytes(row["payload_down"]),
                human_bytes(row["payload_up"]),
            )
        )
    return cells


def _read(folder: Path) -> _Run:
    run = RunFolder.open(folder)
    if not (folder / "summary.json").exists():
        raise DataError(f"{folder}: has no summary.json, the run is not finished", hint="fedloom run ... --resume")
    summary = run.json("summary.json")
    missing = [key for key in ("algorithm", "dataset", "model", "seed", "rounds", "seen", "unseen", "global")
               if key not in summary]  # fmt: skip
    if missing:
        raise DataError(f"{folder / 'summary.json'}: has no key {missing[0]!r}")
    settings = experiment.load(folder / EXPERIMENT).model_copy(update={"name": "", "seed": 0})
    return _Run(folder, settings.shared_json(), summary)


def _rows(runs: Sequence[_Run]) -> list[dict[str, Any]]:
    """Rows of one run, or of several seeds: the global predictor's, then the personal one's."""
    first = runs[0].summary
    groups: dict[str, list[Groups]] = {}
    if first["global"] is not None:
        groups["global"] = [{key: run.summary["global"][key] for key in ("seen", "unseen")} for run in runs]
    personal = [{key: run.summary[key] for key in ("seen", "unseen")} for run in runs]
    if personal != groups.get("global"):
        groups["personal"] = personal
    algorithm = first["algorithm"]
    costs = first.get(algorithm, {}).get("new_client", {})
    return [
        {
            "method": METHODS.get((algorithm, predictor), f"{algorithm} ({predictor})"),
            "algorithm": algorithm,
            "predictor": predictor,
            "dataset": first["dataset"],
            "model": first["model"],
            "rounds": first["rounds"],
            "masked": any(is_masked(group) for group in found[0].values() if group is not None),
            "runs": [run.folder.resolve().name for run in runs],
            "seeds": [run.summary["seed"] for run in runs],
            "seen": _over_seeds([one["seen"] for one in found]),
            "unseen": _over_seeds([one["unseen"] for one in found]),
            **{key: costs.get(predictor, {}).get(key) for key in ("client_steps", "payload_down", "payload_up")},
        }
        for predictor, found in groups.items()
    ]


def _over_seeds(groups: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Means over seeds of a group's statistics; None unless every seed has them."""
    known = [group for group in groups if group is not None]
    if not known or len(known) < len(groups):
        return None
    n = len(known)
    keys = ("clients", "accuracy_mean", "accuracy_std", "accuracy_worst_decile", "accuracy_pooled")
    means = {key: math.fsum(group[key] for group in known) / n for key in keys}
    squares = math.fsum((group["accuracy_mean"] - means["accuracy_mean"]) ** 2 for group in known)
    return means | {"accuracy_mean_std": math.sqrt(squares / (n - 1)) if n > 1 else None}


def _accuracy(group: Mapping[str, Any] | None) -> tuple[str, str]:
    if group is None:
        return "–", "–"
    spread = group["accuracy_std"] if group["accuracy_mean_std"] is None else group["accuracy_mean_std"]
    return f"{100 * group['accuracy_mean']:.1f} ± {100 * spread:.1f}", f"{100 * group['accuracy_worst_decile']:.1f}"
