"""Tables and figures of docs/results/pefll-cifar10.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from matplotlib.figure import Figure
from summaries import Evaluation, Run, Runs, after, chosen, difference, last, spread, table

from fedloom.reporting.drawing import FULL, HALF

COLUMNS = (
    "validation", "seen", "seen_worst_decile", "seen_masked", "unseen", "unseen_worst_decile", "unseen_masked",
    "seen_ece", "unseen_ece", "seen_loss", "unseen_loss", "train_loss", "sent_gb", "spearman", "seconds",
    "new_clients", "unseen_error", "unseen_masked_error", "class_sets", "by_class_set",
)  # fmt: skip
COLOURS = {"PeFLL": "#0072b2", "FedAvg": "#d55e00", "Local": "#009e73"}
RATES = ("0.0005", "0.001", "0.002", "0.005", "0.01", "0.02", "0.05", "0.1")
EIGHT = 8
ACCURACIES = ("seen", "unseen", "seen_masked", "unseen_masked")


def tables(runs: Runs) -> Iterator[str]:
    """Yield all tables in the page's order."""
    pefll, fedavg, local = (runs.one(f"table/{method}") for method in ("pefll", "fedavg", "local"))
    yield _table_1(pefll, fedavg, local)
    yield _regularized(runs)
    yield _authors(runs)
    yield _many(runs)
    yield from _resnet(runs)
    unlabelled = runs.one("unlabelled")
    yield _last_evaluations({"PeFLL": pefll, "FedAvg": fedavg, **_one_pass(runs), "PeFLL without labels": unlabelled})
    yield _fedavg(runs)
    rates = ("0.0001", "0.0003", "0.001", "0.003", "0.01")
    found = {rate: last(runs[f"search/fedavg-pixels/lr={rate}"])["validation"] for rate in rates}
    yield table(
        ("rate, pixels unscaled (200 rounds)", *rates), [("FedAvg, five passes", *(_bold(found, r) for r in rates))]
    )
    yield _new_clients(runs, "table/pefll/seed=1")
    yield _unlabelled(unlabelled)
    yield _new_clients(runs, "unlabelled/seed=1")
    yield _spearman({"Dirichlet(0.1)": runs.one("dirichlet"), "two classes": pefll})
    alphas = [f"{tenth / 10}" for tenth in range(1, 11)]
    mixes = [last(runs[f"extrapolation-{alpha}"])["unseen"] for alpha in alphas]
    yield table(("α", *alphas), [("PeFLL", *(f"{value:.1f}" for value in mixes))])
    yield _single_settings(runs)
    yield _search(runs)


def _at(run: Run, round: int) -> Evaluation:
    line = after(run, round)
    assert line is not None, f"{run[0].run}: not evaluated after round {round}"
    return line


def _one_pass(runs: Runs) -> dict[str, Run]:
    return {"FedAvg, one pass over its data": runs.one("ablation/fedavg-epoch")}


def _bold(found: Mapping[str, float], key: str) -> str:
    """Return a cell, bold if its value is the highest."""
    if key not in found:
        return ""
    shown = f"{found[key]:.1f}"
    return f"**{shown}**" if found[key] == max(found.values()) else shown


PAPER = {
    "table/pefll/*": {"seen": 89.0, "unseen": 89.3},
    "table/fedavg/*": {"seen": 47.5, "unseen": 48.6},
    "table/local/*": {"seen": 82.2, "unseen": 81.6},
    "many/pefll/*": {"seen": 87.8, "unseen": 88.5},
    "many/fedavg/*": {"seen": 51.9, "unseen": 51.7},
    "unlabelled/*": {"unseen": 84.5},
}
"""Figures of papers/001 by pattern of runs, for ``fedloom reproduce``; the tables have their deviations, too."""


def _table_1(pefll: Run, fedavg: Run, local: Run) -> str:
    header = ("", "round", "validation", "seen", "paper", "unseen", "paper", "seen, masked", "unseen, masked")

    def row(name: str, round: str, line: Evaluation, paper: tuple[str, str], mark: str = "") -> tuple[str, ...]:
        validation, seen, unseen, *masked = (f"{line[q]:.1f}" for q in ("validation", *ACCURACIES))
        return name, round, validation, mark + seen + mark, paper[0], mark + unseen + mark, paper[1], *masked

    assert last(pefll) == chosen(pefll)
    return table(
        header,
        [
            row("PeFLL", f"{last(pefll).round} (last and best)", last(pefll), ("89.0", "89.3 ± 2.2"), "**"),
            row("FedAvg", f"{last(fedavg).round} (last)", last(fedavg), ("47.5", "48.6")),
            row("FedAvg", f"{chosen(fedavg).round} (best)", chosen(fedavg), ("", "")),
            row("Local", "200 epochs", last(local), ("82.2", "81.6")),
        ],
    )


WEIGHTS = {
    "regularized/decoupled": "λ_h = λ_v = 10⁻³ beside Adam, λ_θ = 0 (as in Table 1)",
    "regularized/l2": "no ReLU before the output",
    "regularized/l2-relu": "ReLU before the output",
    "regularized/official": "no λ on the server, λ_θ = 2.5·10⁻⁵, rate 0.002, float32 (official code; seed 1)",
}
"""Variants in the runs of 1000 rounds with a reserve."""


def _regularized(runs: Runs) -> str:
    """Return last rounds over seeds, and new clients from the reserve by whether a seen client has their classes."""

    def found(folder: str, which: str, of: str) -> list[float]:
        names = [run[0].run for run in runs.under(folder)]
        return [last(runs[f"{name}/new-clients/{which}"])[of] for name in names]

    shown: dict[str, dict[str, list[float]]] = {}
    for folder in (each for each in WEIGHTS if runs.under(each)):
        those = runs.under(folder)
        shown[folder] = {of: [last(run)[of] for run in those] for of in ("validation", *ACCURACIES)}
        shown[folder] |= {
            f"{of}, mean": [statistics.fmean(line[of] for line in run[-4:]) for run in those]
            for of in ("seen", "unseen")
        }
        shown[folder] |= {which: found(folder, which, "by_class_set") for which in ("all", "known", "0")}
    rows = [(WEIGHTS[folder], *map(spread, of.values())) for folder, of in shown.items()]
    base, relu = shown["regularized/l2"], shown["regularized/l2-relu"]
    rows.append(("effect of the ReLU", *(difference(relu[of], base[of]) for of in base)))
    ten = ("validation", "seen", "ten unseen", "seen, masked", "ten unseen, masked")
    means = ("mean of the last four: seen", "ten unseen")
    return table(("1000 rounds", *ten, *means, "45 pairs", "known pairs", "new pairs"), rows)


def _authors(runs: Runs) -> str:
    """Return validation accuracy over rounds for the authors' code and ours on the same clients."""
    theirs = runs["regularized/l2/seed=1/authors"]
    rounds = [line.round for line in theirs]
    named = {
        "theirs": (theirs, 0),
        "ours, with their rate, λ_θ and precision": (runs["regularized/official/seed=1"], 1),
        "ours, as above": (runs["regularized/l2/seed=1"], 1),
    }
    rows = []
    for name, (run, fewer) in named.items():  # the authors' code evaluates before it counts a round
        lines = [after(run, round - fewer) for round in rounds]
        rows.append((name, *(f"{line['validation']:.1f}" if line else "" for line in lines)))
    return table(("after rounds", *map(str, rounds)), rows)


def _many(runs: Runs) -> str:
    """Return the table for a thousand clients."""
    rows = []
    for method, name, paper in (
        ("pefll", "PeFLL", ("87.8 ± 0.4", "88.5 ± 0.3")),
        ("fedavg", "FedAvg", ("51.9 ± 0.7", "51.7 ± 0.7")),
    ):
        line = last(runs.one(f"many/{method}"))
        seen, unseen, *masked = (f"{line[q]:.1f}" for q in ACCURACIES)
        rows.append((name, f"{line['validation']:.1f}", seen, paper[0], unseen, paper[1], *masked))
    header = ("n = 1000", "validation", "seen", "paper", "unseen", "paper", "seen, masked", "unseen, masked")
    return table(header, rows)


def _resnet(runs: Runs) -> Iterator[str]:
    """Yield tables of a ResNet20 over rounds, mean ± deviation over seeds, and of its search."""
    methods = {"pefll": "PeFLL", "fedavg": "FedAvg"}
    of = {method: runs.under(f"resnet/test/{method}") for method in methods}
    rounds = [line.round for line in of["pefll"][0] if line.round]
    rows = []
    for group in ("seen", "unseen"):
        over = {method: [[_at(run, round)[group] for run in those] for round in rounds] for method, those in of.items()}
        rows += [(f"{name}, {group}", *map(spread, over[method])) for method, name in methods.items()]
        rows.append((f"PeFLL minus FedAvg, {group}", *map(difference, over["pefll"], over["fedavg"])))
    yield table(("ResNet20, rounds", *map(str, rounds)), rows)
    rates = ("0.003", "0.01", "0.03")
    rows = []
    for method, name in methods.items():
        found = {
            last(run).settings["algorithm.local.lr"]: last(run)["validation"]
            for run in runs.under(f"resnet/search/{method}")
        }
        rows.append((name, *(_bold(found, rate) for rate in rates)))
    yield table(("ResNet20, rate", *rates), rows)


def _last_evaluations(named: Mapping[str, Run]) -> str:
    rows = []
    for name, run in named.items():
        cells = []
        for group in ("seen", "unseen"):
            values = [line[group] for line in run[-EIGHT:]]
            cells.append(f"{statistics.fmean(values):.1f} ({min(values):.1f} to {max(values):.1f})")
        rows.append((name, *cells))
    return table(("mean of the last eight evaluations (lowest to highest)", "seen", "unseen"), rows)


def _fedavg(runs: Runs) -> str:
    rounds = (125, 250, 500, 750, 1000, 2000, 3000, 5000)
    variants = {
        ("as in the table", "50"): "table/fedavg",
        ("without momentum", "50"): "ablation/fedavg",
        ("without momentum, one pass over its data", "12"): "ablation/fedavg-epoch",
        ("without momentum, five passes, pixels unscaled", "60"): "ablation/fedavg-pixels",
    }
    rows = []
    for about, folder in variants.items():
        lines = [after(runs.one(folder), round) for round in rounds]
        rows.append((*about, *(f"{line['validation']:.1f}" if line else "" for line in lines)))
    return table(("FedAvg", "local steps", "125 rounds", *map(str, rounds[1:])), rows)


def _new_clients(runs: Runs, run: str) -> str:
    rows = []
    for line in (last(runs[f"{run}/new-clients/{known}"]) for known in ("0", "1", "2", "3", "all")):
        known = line.settings["known"]
        accuracy, masked = (f"{line[q]:.1f} ± {line[f'{q}_error']:.1f}" for q in ("unseen", "unseen_masked"))
        rows.append((f"{known} or more" if known == "3" else known, f"{line['new_clients']:.0f}", accuracy, masked))
    return table(("seen clients with these classes", "new clients", "accuracy", "masked"), rows)


def _unlabelled(run: Run) -> str:
    header = ("", "round", "validation", "seen", "unseen", "paper", "seen, masked", "unseen, masked")
    rows = []
    for name, line, paper in (("last", last(run), "84.5"), ("best on validation", chosen(run), "")):
        validation, seen, unseen, *masked = (f"{line[q]:.1f}" for q in ("validation", *ACCURACIES))
        rows.append((name, str(line.round), validation, seen, unseen, paper, *masked))
    return table(header, rows)


def _spearman(named: Mapping[str, Run]) -> str:
    rows = []
    for name, run in named.items():
        least = min(run, key=lambda line: line["spearman"])
        start, *rest = (f"{_at(run, round)['spearman']:.2f}" for round in (0, 1000, 4000, 5000))
        rows.append((name, start, f"{least['spearman']:.2f} ({least.round})", *rest))
    return table(("", "round 0", "least", "round 1000", "round 4000", "round 5000"), rows)


def _single_settings(runs: Runs) -> str:
    variants = {
        "as in the table, with fewer images": "ablation/base/seed=1",
        "rate 0.002, λ_θ = 2.5·10⁻⁵, λ_h = λ_v = 0 (the official code's)": "ablation/official/seed=1",
        "descriptors not standardized (not stated in the paper)": "ablation/raw/seed=1",
        "float32": "ablation/float32/seed=1",
        "ReLU before the output (Table 5)": "ablation/relu/seed=1",
        "hypernetwork with one hidden layer (S, Table 7)": "ablation/small/seed=1",
    }
    rows = []
    for name, folder in variants.items():
        over = [after(runs[folder], round) for round in (100, 200, 300)]
        cells = [f"{line['validation']:.1f}" if line else "" for line in over]
        fresh, known = (runs.get(f"{folder}/new-clients/{which}") for which in ("0", "known"))
        new = f"{fresh[0]['unseen']:.1f} ± {fresh[0]['unseen_error']:.1f}" if fresh else ""
        rows.append((name, *cells, new, f"{known[0]['unseen']:.1f}" if known else ""))
    return table(("PeFLL", "100 rounds", "200", "300", "new clients, new pair", "known pair"), rows)


def _search(runs: Runs) -> str:
    relu = {name: run for name, run in runs.items() if name.startswith("search/pefll")}
    rows = {
        "PeFLL, no ReLU before the output": [run for name, run in relu.items() if "relu=false" in name],
        "PeFLL, ReLU before the output (Table 5)": [run for name, run in relu.items() if "relu=true" in name],
        "PeFLL without labels": runs.under("search/unlabelled"),
        "FedAvg": runs.under("search/fedavg"),
        "Local": runs.under("search/local"),
    }
    chosen_elsewhere = "PeFLL, ReLU before the output (Table 5)"
    shown = []
    for name, tried in rows.items():
        found = {last(run).settings["algorithm.local.lr"]: last(run)["validation"] for run in tried}
        cells = [
            (f"{found[rate]:.1f}" if rate in found else "") if name == chosen_elsewhere else _bold(found, rate)
            for rate in RATES
        ]
        shown.append((name, *cells))
    return table(("rate", *RATES), shown)


def curves(runs: Runs) -> Figure:
    """Draw test accuracy over rounds and communication, as in papers/001, Figure 8."""
    figure = Figure(figsize=(FULL, 5.0), layout="constrained")
    axes = figure.subplots(2, 2, sharey=True, sharex="col")
    for row, group in zip(axes, ("seen", "unseen"), strict=True):
        for name in ("PeFLL", "FedAvg"):
            run = runs.one(f"table/{name.lower()}")
            for panel, x in zip(row, ([line.round for line in run], [line["sent_gb"] for line in run]), strict=True):
                panel.plot(x, [line[group] for line in run], color=COLOURS[name], label=name)
        for panel in row:
            panel.axhline(last(runs.one("table/local"))[group], color=COLOURS["Local"], linestyle=":", label="Local")
        row[0].set_ylabel(f"{group} clients, %")
    axes[1][0].set_xlabel("rounds")
    axes[1][1].set_xlabel("tensors sent and received, GB")
    axes[0][0].legend()
    return figure


def descriptors(runs: Runs) -> Figure:
    """Draw the rank correlation of descriptors with class proportions over rounds, as in papers/001, Figure 3."""
    figure = Figure(figsize=(HALF, 2.8), layout="constrained")
    axes = figure.subplots()
    for (name, folder), colour in zip(
        {"Dirichlet(0.1)": "dirichlet", "two classes": "table/pefll"}.items(), COLOURS.values(), strict=False
    ):
        run = runs.one(folder)
        axes.plot([line.round for line in run], [line["spearman"] for line in run], color=colour, label=name)
    axes.set_xlabel("rounds")
    axes.set_ylabel("Spearman, unseen clients")
    axes.legend()
    return figure


FIGURES = {"curves": curves, "descriptors": descriptors}
