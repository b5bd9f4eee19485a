"""Compact file and tables of docs/results/flowdup.md, from results of research/flowdup.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from flowdup import COSTS, FOUND, GRIDS, PROBLEMS
from pages_own_tasks import difference, values
from summaries import Evaluation, Runs, spread, table

NAMES = {
    "local": "Local",
    "fedavg": "FedAvg",
    "fine-tuning": "FedAvg + fine-tuning",
    "pefll": "PeFLL",
    "pefll-unlabelled": "PeFLL without labels",
    "pefll-subspace": "PeFLL in a subspace",
    "flowdup": "FLowDUP",
    "flowdup-half": "FLowDUP, half of the clients unlabelled",
}
NEEDS = {
    "fedavg": "nothing",
    "flowdup": "inputs",
    "flowdup-half": "inputs",
    "pefll-unlabelled": "inputs",
    "pefll": "labels",
    "pefll-subspace": "labels",
    "fine-tuning": "labels, steps",
    "local": "labels, steps",
}
"""Needs of a new client, in the order of rows."""

TITLES = {
    "fashion-mnist": "Fashion-MNIST, 3 classes a client",
    "qmnist": "QMNIST writers",
    "cifar10": "CIFAR-10, 2 classes a client",
    "mnist": "MNIST, rotated by 0, 90, 180 or 270 degrees",
}
MODELS = {"mlp": "MLP, d = 25,450", "lenet": "LeNet, d = 85,822"}
SENT = ("round_down", "round_up", "new_down", "new_up")
COLUMNS = ("validation", "seen_mean", "seen_worst", "unseen_mean", "unseen_worst", *SENT, "server_ms")
BESIDE = "flowdup"
"""Method that the others are compared with."""


def folded(folder: Path) -> Runs:
    """Return PROBLEM/search/METHOD/SETTING, PROBLEM/test/METHOD with a line per seed, and costs/MODEL/METHOD."""
    runs = Runs()

    def add(name: str, seed: str, settings: Mapping[str, str], found: Mapping[str, float]) -> None:
        line = Evaluation(name, seed, settings, 0, None, {k: float(f"{v:.6g}") for k, v in found.items()}, {})
        runs[name] = (*runs.get(name, ()), line)

    for path in sorted(folder.glob(f"*/{FOUND}")):
        for method, about in json.loads(path.read_text(encoding="utf-8")).items():
            for setting, validation in about["search"]:
                text, known = as_text(setting), {} if validation is None else {"validation": validation}
                add(
                    f"{path.parent.name}/search/{method}/{','.join(f'{k}={v}' for k, v in text.items())}",
                    "1",
                    text,
                    known,
                )
            for seed, found in about["tests"].items():
                add(f"{path.parent.name}/test/{method}", seed, as_text(about["chosen"]), found)
    if (path := folder / COSTS).exists():
        for model, costs in json.loads(path.read_text(encoding="utf-8")).items():
            for method, took in costs.items():
                add(f"costs/{model}/{method}", "0", {}, {"server_ms": took})
    return runs


def as_text(setting: Mapping[str, float]) -> dict[str, str]:
    """Return the values of a setting as the command line takes them."""
    return {key: f"{value:g}" for key, value in setting.items()}


def tables(runs: Runs) -> Iterator[str]:
    """Yield the test results of each problem, what is sent, the servers' time, and the search."""
    problems = [problem for problem in PROBLEMS if f"{problem}/test/{BESIDE}" in runs]
    for problem in problems:
        yield of_tests(runs, problem)
    yield of_costs(runs, problems[0])
    for problem in problems:
        yield of_search(runs, problem)


def of_tests(runs: Runs, problem: str) -> str:
    """Return accuracies, means over clients with their spread over seeds, and differences to one method."""
    other, rows = runs[f"{problem}/test/{BESIDE}"], []
    for method, needs in NEEDS.items():
        run = runs[f"{problem}/test/{method}"]
        cells = [spread(values(run, key)) for key in ("seen_mean", "unseen_mean", "unseen_worst")]
        less = [
            "" if method == BESIDE else difference(values(run, key), values(other, key), 1)
            for key in ("seen_mean", "unseen_mean")
        ]
        rows.append((NAMES[method], needs, *cells, *less))
    gains = [f"{group}, minus {NAMES[BESIDE]}" for group in ("seen", "new")]
    header = ("", "a new client needs", "seen clients, %", "new clients, %", "worst tenth", *gains)
    return table(header, rows, left=2)


def of_costs(runs: Runs, problem: str) -> str:
    """Return kilobytes of a client, and the server's CPU time in a round."""
    rows = []
    for method, needs in NEEDS.items():
        line = runs[f"{problem}/test/{method}"][0]
        sent = [f"{line[key]:.1f}" for key in SENT]
        name = method.removesuffix("-half") if method != "fine-tuning" else "fedavg"
        took = [runs.get(f"costs/{model}/{name}") for model in MODELS]
        rows.append(
            (NAMES[method], needs, *sent, *("" if run is None else f"{run[0]['server_ms']:.2f}" for run in took))
        )
    sends = ("kB per round, down", "up", "kB of a new client, down", "up")
    header = ("", "a new client needs", *sends, *(f"server, ms per round: {name}" for name in MODELS.values()))
    return table(header, rows, left=2)


def of_search(runs: Runs, problem: str) -> str:
    """Return validation results of all settings, the chosen ones in bold."""
    rows = []
    for method in GRIDS:
        chosen = runs[f"{problem}/test/{method}"][0].settings
        cells = []
        for name in (name for name in runs if name.startswith(f"{problem}/search/{method}/")):
            line = runs[name][0]
            value = f"{line['validation']:.1f}" if line.values else "diverged"
            cell = f"{', '.join(line.settings.values())}: {value}"
            cells.append(f"**{cell}**" if line.settings == chosen else cell)
        rows.append((NAMES[method], ", ".join(f"`{key}`" for key in chosen), "; ".join(cells)))
    return table((TITLES[problem], "keys", "settings, and validation accuracy, %"), rows, left=3)
