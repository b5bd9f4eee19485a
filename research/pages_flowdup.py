"""Compact file and tables of docs/results/flowdup.md, from results of research/flowdup.py."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from flowdup import COSTS, FOUND, PROBLEMS
from pages_own_tasks import difference, values
from summaries import Evaluation, Runs, spread, table

NAMES = {
    "local": "Local",
    "fedavg": "FedAvg",
    "fine-tuning": "FedAvg + fine-tuning",
    "fedavg-subspace": "FedAvg in the subspace",
    "flowdup": "FLowDUP, θ₀ fixed",
    "flowdup-trained": "FLowDUP, θ₀ trained",
    "flowdup-half": "FLowDUP, θ₀ trained, half of the clients unlabelled",
    "pefll": "PeFLL without labels",
}
NEEDS = {
    "fedavg": "nothing",
    "fedavg-subspace": "nothing",
    "flowdup": "inputs",
    "flowdup-trained": "inputs",
    "flowdup-half": "inputs",
    "pefll": "inputs",
    "fine-tuning": "labels, steps",
    "local": "labels, steps",
}
"""Needs of a new client, in the order of rows."""

TITLES = {
    "fashion-mnist": "Fashion-MNIST, 3 classes a client",
}
MODELS = {"mlp": "MLP, d = 25,450", "lenet": "LeNet, d = 85,822"}
SENT = ("round_down", "round_up", "new_down", "new_up")
SPREADS = ("seen_spread", "unseen_spread")
COLUMNS = ("validation", "seen_mean", "seen_worst", "unseen_mean", "unseen_worst", *SPREADS, *SENT, "server_ms")
BESIDE = "fedavg"
"""Method that the others are compared with."""

SHOWN = ("fedavg-subspace", "flowdup", "flowdup-trained", "flowdup-half", "pefll")
"""Methods whose spread at every step size is shown."""


def folded(folder: Path) -> Runs:
    """Return PROBLEM/search/METHOD/lr=RATE, PROBLEM/test/METHOD with a line per seed, and costs/MODEL/METHOD."""
    runs = Runs()

    def add(name: str, seed: str, settings: Mapping[str, str], found: Mapping[str, float]) -> None:
        line = Evaluation(name, seed, settings, 0, None, {k: float(f"{v:.6g}") for k, v in found.items()}, {})
        runs[name] = (*runs.get(name, ()), line)

    for path in sorted(folder.glob(f"*/{FOUND}")):
        for method, about in json.loads(path.read_text(encoding="utf-8")).items():
            for rate, found in about["search"]:
                kept = {} if found is None else {key: found[key] for key in ("validation", "unseen_spread")}
                add(f"{path.parent.name}/search/{method}/lr={rate:g}", "1", {"lr": f"{rate:g}"}, kept)
            for seed, found in about["tests"].items():
                add(f"{path.parent.name}/test/{method}", seed, {"lr": f"{about['chosen']:g}"}, found)
    if (path := folder / COSTS).exists():
        for model, costs in json.loads(path.read_text(encoding="utf-8")).items():
            for method, took in costs.items():
                add(f"costs/{model}/{method}", "0", {}, {"server_ms": took})
    return runs


def tables(runs: Runs) -> Iterator[str]:
    """Yield the test results of each problem, what is sent, the servers' time, and the search."""
    problems = [problem for problem in PROBLEMS if f"{problem}/test/{BESIDE}" in runs]
    for problem in problems:
        yield of_tests(runs, problem)
    yield of_costs(runs, problems[0])
    for problem in problems:
        yield of_search(runs, problem, NEEDS, "validation", "validation accuracy, %")
        yield of_search(runs, problem, SHOWN, "unseen_spread", "spread of the new clients' models, %")


def of_tests(runs: Runs, problem: str) -> str:
    """Return accuracies and spreads, means over clients with their deviation over seeds, and differences."""
    other, rows = runs[f"{problem}/test/{BESIDE}"], []
    for method, needs in NEEDS.items():
        run = runs[f"{problem}/test/{method}"]
        cells = [spread(values(run, key)) for key in ("seen_mean", "unseen_mean", "unseen_worst", "unseen_spread")]
        less = [
            "" if method == BESIDE else difference(values(run, key), values(other, key), 1)
            for key in ("seen_mean", "unseen_mean")
        ]
        rows.append((NAMES[method], needs, *cells, *less))
    gains = [f"{group}, minus {NAMES[BESIDE]}" for group in ("seen", "new")]
    header = ("", "a new client needs", "seen clients, %", "new clients, %", "worst tenth", "spread, %", *gains)
    return table(header, rows, left=2)


def of_costs(runs: Runs, problem: str) -> str:
    """Return kilobytes of a client, and the server's CPU time in a round."""
    rows = []
    for method, needs in NEEDS.items():
        line = runs[f"{problem}/test/{method}"][0]
        sent = [f"{line[key]:.1f}" for key in SENT]
        name = {"fine-tuning": "fedavg", "flowdup-half": "flowdup-trained"}.get(method, method)
        took = [runs.get(f"costs/{model}/{name}") for model in MODELS]
        rows.append(
            (NAMES[method], needs, *sent, *("" if run is None else f"{run[0]['server_ms']:.2f}" for run in took))
        )
    sends = ("kB per round, down", "up", "kB of a new client, down", "up")
    header = ("", "a new client needs", *sends, *(f"server, ms per round: {name}" for name in MODELS.values()))
    return table(header, rows, left=2)


def of_search(runs: Runs, problem: str, methods: Iterable[str], quantity: str, title: str) -> str:
    """Return a quantity of every step size on the seed of the search; that of the chosen one in bold."""
    rates = {method: runs.under(f"{problem}/search/{method}") for method in methods}
    columns = sorted({float(run[0].settings["lr"]) for found in rates.values() for run in found})
    rows = []
    for method, found in rates.items():
        chosen = runs[f"{problem}/test/{method}"][0].settings
        by_rate = {float(run[0].settings["lr"]): run[0] for run in found}
        shown = (by_rate[rate] for rate in columns)
        cells = [f"{line[quantity]:.1f}" if line.values else "diverged" for line in shown]
        bold = columns.index(float(chosen["lr"]))
        cells[bold] = f"**{cells[bold]}**"
        rows.append((NAMES[method], *cells))
    return table((f"{TITLES[problem]}: {title}", *(f"{rate:g}" for rate in columns)), rows, left=1)
