"""Tables and figures of docs/results/comfedl.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from matplotlib.figure import Figure
from summaries import Evaluation, Run, Runs, after, difference, last, spread, table

from fedloom.reporting.drawing import FULL

COLUMNS = (
    "validation", "seen_mean", "seen_mean_sd", "seen_worst", "seen_worst_sd", "global_mean", "global_mean_sd",
)  # fmt: skip
WHOLE = ("*-fresh/*", "*/gamma/*", "*/tau/*", "*/methods/*", "*/chosen/*")
METHODS = {
    "fedavg-examples": ("FedAvg, by n_i", "#d55e00"),
    "fedavg-uniform": ("FedAvg, uniform", "#009e73"),
    "comfedl-largest": ("ComFedL, largest", "#e69f00"),
    "comfedl-normalized": ("ComFedL, normalized", "#0072b2"),
}
ADAPTING = {
    "fedavg": ("FedAvg, uniform, + 1 step", "#009e73"),
    "fedmaml": ("FedMAML", "#d55e00"),
    "comfedl": ("ComFedL-DAMAML", "#0072b2"),
    "damaml-first-order": ("ComFedL-DAMAML, first order", "#cc79a7"),
}
ADAPTING_RATES = ("0.05", "0.1", "0.2")
MIXES = {"iid": "all alike", "dominant": "half of one class", "two-classes": "two classes"}
RATES = ("0.001", "0.01", "0.05", "0.1", "0.2", "0.5", "1")
DECADES = ("0.01", "0.1", "1")
GAMMAS, TAUS = ("0.1", "0.2", "0.5", "1", "2", "5"), ("1", "2", "5", "10", "20")


def tables(runs: Runs) -> Iterator[str]:
    """Yield all tables in the page's order."""
    yield _fresh(runs, "fashion-mnist")
    yield _less_fedavg(runs, "fashion-mnist")
    for mix in reversed(MIXES):
        rows = []
        for method, (name, _) in METHODS.items():
            sweep = {rate: _seeds(runs, f"fashion-mnist/{mix}/{method}/lr={rate}") for rate in RATES}
            rows.append((name, *_cells(sweep, "seen_worst").values()))
        yield table((MIXES[mix], *RATES), rows)
    for part, symbol, key, values in (("gamma", "γ", "gamma", GAMMAS), ("tau", "τ", "steps", TAUS)):
        folder = f"fashion-mnist/{part}/{key}"
        rows = [(value, *_pairs(runs, f"{folder}={value}")) for value in values]
        yield table((symbol, "step size 0.01", "0.1", "1"), rows, left=0)
        rounds = (10, 20, 50, 100)
        over = [(value, [after(runs[f"{folder}={value},lr=0.01"], round) for round in rounds]) for value in values]
        rows = [(value, *(f"{line['seen_mean']:.1f}" for line in lines if line)) for value, lines in over]
        yield table((f"{symbol}, step size 0.01", *(f"{round} rounds" for round in rounds)), rows, left=0)
    yield _literal(runs, "fashion-mnist")
    yield _fresh(runs, "mnist")
    yield _less_fedavg(runs, "mnist")
    yield _both_sweeps(runs)
    yield _literal(runs, "mnist")
    yield from _damaml(runs)
    yield from _losses_on(runs)
    yield from _cifar10(runs)


def _seeds(runs: Runs, name: str) -> list[Evaluation]:
    """Return a setting's last evaluations, one per seed in their order, or one line that represents several."""
    found = [
        last(run) for other, run in runs.items() if other == name or other.startswith((f"{name},seed=", f"{name}/"))
    ]
    return sorted(found, key=lambda line: int(line.seed.partition("-")[0]))


def _cell(lines: Sequence[Evaluation], quantity: str) -> str:
    """Return mean ± deviation over seeds, or the round in which a run diverged."""
    left = [str(line.left) for line in lines if line.left is not None]
    if left:
        return f"left in {', '.join(left)}"
    if len(lines) == 1 and f"{quantity}_sd" in lines[0].values:
        return f"{lines[0][quantity]:.1f} ± {lines[0][f'{quantity}_sd']:.1f}"
    return spread([line[quantity] for line in lines])


def _mean(lines: Sequence[Evaluation], quantity: str) -> float:
    return statistics.fmean(line[quantity] for line in lines)


def _best(sweep: Mapping[str, Sequence[Evaluation]]) -> str:
    """Return the setting chosen on validation."""
    whole = {key: lines for key, lines in sweep.items() if lines and all(line.left is None for line in lines)}
    return max(whole, key=lambda key: _mean(whole[key], "validation"))


def _cells(sweep: Mapping[str, Sequence[Evaluation]], quantity: str) -> dict[str, str]:
    """Return a sweep's row without deviations; the setting chosen on validation is bold."""
    best = _best(sweep)
    cells = {}
    for key, lines in sweep.items():
        if any(line.left is not None for line in lines):
            cells[key] = _cell(lines, quantity)
        else:
            cells[key] = f"{_mean(lines, quantity):.1f}"
        if key == best:
            cells[key] = f"**{cells[key]}**"
    return cells


def _pairs(runs: Runs, name: str) -> Iterable[str]:
    """Yield mean / worst client at three step sizes."""
    sweep = {rate: _seeds(runs, f"{name},lr={rate}") for rate in DECADES}
    best = _best(sweep)
    for rate, lines in sweep.items():
        shown = f"{_mean(lines, 'seen_mean'):.1f} / {_mean(lines, 'seen_worst'):.1f}"
        yield f"**{shown}**" if rate == best else shown


def _fresh(runs: Runs, data: str) -> str:
    rows = []
    for mix, about in MIXES.items():
        for method, (name, _) in METHODS.items():
            lines = _seeds(runs, f"{data}/{mix}-fresh/{method}")
            rate = f"{float(lines[0].settings['algorithm.local.lr']):g}"
            cells = (_cell(lines, quantity) for quantity in ("seen_mean", "seen_worst"))
            rows.append((about if method == "fedavg-examples" else "", name, rate, *cells))
    return table(("clients' classes", "method", "step size", "mean", "worst client"), rows, left=2)


def _less_fedavg(runs: Runs, data: str) -> str:
    """Return ComFedL, normalized, minus FedAvg with the same seed, with intervals over the fresh seeds."""
    rows = []
    for mix, about in MIXES.items():
        by_seed = {
            method: _seeds(runs, f"{data}/{mix}-fresh/{method}")
            for method in ("comfedl-normalized", "fedavg-examples", "fedavg-uniform")
        }
        ours, *others = by_seed.values()
        rows.append((about, *(cell for other in others for cell in _less(ours, other))))
    return table(
        ("ComFedL, normalized", "minus FedAvg by n_i: mean", "worst", "minus FedAvg uniform: mean", "worst"), rows
    )


def _less(lines: Sequence[Evaluation], others: Sequence[Evaluation]) -> Iterator[str]:
    """Yield differences with the same seed in the mean and for the worst client, with intervals over seeds."""
    for quantity in ("seen_mean", "seen_worst"):
        yield difference([line[quantity] for line in lines], [line[quantity] for line in others])


def _literal(runs: Runs, data: str) -> str:
    rows = []
    for gamma in ("0.1", "0.2", "0.5", "1", "5"):
        halves = []
        for mix in ("iid", "two-classes"):
            lines = [_seeds(runs, f"{data}/literal/{mix}/gamma={gamma},lr={rate}") for rate in RATES]
            halves.append([_cell(line, "seen_mean").replace("left in", "in") for line in lines])
        rows.append((gamma, *halves[0], "", *halves[1]))
    return table(("γ", *RATES, "", *RATES), rows, left=0)


def _both_sweeps(runs: Runs) -> str:
    rows = []
    for i, gamma in enumerate(GAMMAS):
        row = [gamma, *_pairs(runs, f"mnist/gamma/gamma={gamma}"), ""]
        row += [TAUS[i], *_pairs(runs, f"mnist/tau/steps={TAUS[i]}")] if i < len(TAUS) else [""] * 4
        rows.append(row)
    return table(("γ", *DECADES, "", "τ", *DECADES), rows, left=0)


def _sweep(runs: Runs, folder: str) -> dict[str, list[Evaluation]]:
    return {rate: _seeds(runs, f"fashion-mnist/{folder}/lr={rate}") for rate in ADAPTING_RATES}


def _over_three(runs: Runs, method: str, searched: str = "methods/{}", chosen: str = "chosen/{}") -> list[Evaluation]:
    """Return results at the chosen step size: the search's seed and two more (first order: the search's only)."""
    sweep = _sweep(runs, searched.format(method))
    return [*sweep[_best(sweep)], *_seeds(runs, f"fashion-mnist/{chosen.format(method)}")]


def _damaml(runs: Runs) -> Iterator[str]:
    rows = [(name, *_cells(_sweep(runs, f"methods/{m}"), "validation").values()) for m, (name, _) in ADAPTING.items()]
    yield table(("validation, seed 1", *ADAPTING_RATES), rows)
    over = {method: _over_three(runs, method) for method in ADAPTING}
    rows = []
    for method, lines in over.items():
        cells = (_cell(lines, quantity) for quantity in ("seen_mean", "seen_worst", "global_mean"))
        less = _less(lines, over["fedavg"]) if method in ("fedmaml", "comfedl") else ("", "")
        rows.append((ADAPTING[method][0], lines[0].settings["algorithm.local.lr"], *cells, *less))
    less = (f"minus FedAvg: {what}" for what in ("mean", "worst client"))
    yield table(("method", "step size", "mean", "worst client", "shared model, mean", *less), rows)
    named = {}
    for rho in ("0.1", "0.28", "0.46", "0.64", "0.82"):
        for method, about in (("fedavg", ", FedAvg"), ("comfedl", "")):
            named[f"ρ = {rho}{about}"] = _seeds(runs, f"fashion-mnist/rho/{rho}/{method}") or over[method][:1]
    named |= {f"γ = {gamma}": _seeds(runs, f"fashion-mnist/gamma/gamma={gamma}") for gamma in ("0.1", "1", "5")}
    named |= {f"τ = {tau}": _seeds(runs, f"fashion-mnist/tau/steps={tau}") for tau in ("1", "2", "10")}
    rows = []
    for name, lines in named.items():
        shown = [_cell(lines, quantity) for quantity in ("seen_mean", "seen_worst", "global_mean")]
        rows.append((name, *(shown if lines[0].left is None else (shown[0], "", ""))))
    yield table(("", "mean", "worst client", "shared model, mean"), rows)


def _losses_on(runs: Runs) -> Iterator[str]:
    """Yield tables of ComFedL-DAMAML with clients' factors from the loss of one batch, and of all their data."""
    folders = {
        "batch": ("methods/comfedl", "chosen/comfedl", "gamma"),
        "all": ("all/methods", "all/chosen", "all/gamma"),
    }
    three = {of: _over_three(runs, "", searched, chosen) for of, (searched, chosen, _) in folders.items()}
    rows: list[Sequence[str]] = []
    for of, (searched, _, _) in folders.items():
        cells = (_cell(three[of], quantity) for quantity in ("seen_mean", "seen_worst", "global_mean"))
        rows.append((f"`losses_on: {of}`", *_cells(_sweep(runs, searched), "validation").values(), *cells))
    rows.append(("`all` minus `batch`", "", "", "", *_less(three["all"], three["batch"]), ""))
    header = ("", "validation, seed 1: 0.05", "0.1", "0.2", "test: mean", "worst client", "shared model, mean")
    yield table(header, rows)
    rows = []
    for of, (_, _, gammas) in folders.items():
        at = {gamma: _seeds(runs, f"fashion-mnist/{gammas}/gamma={gamma}") for gamma in ("0.1", "1", "5")}
        shown = (
            _cell(lines, "seen_mean")
            if lines[0].left is not None
            else f"{_mean(lines, 'seen_mean'):.1f} / {_mean(lines, 'seen_worst'):.1f}"
            for lines in (at["0.1"], three[of][:1], at["1"], at["5"])
        )
        rows.append((f"`losses_on: {of}`", *shown))
    yield table(("mean / worst client, seed 1: γ", "0.1", "0.5", "1", "5"), rows)


def _cifar10(runs: Runs) -> Iterator[str]:
    rates, inner = ("0.02", "0.05", "0.1"), ("0.01", "0.03")
    found: dict[str, dict[str, str]] = {}
    for method in ("search/fedmaml", "search/comfedl", "all/search"):
        sweep = {
            f"{i}/{rate}": _seeds(runs, f"cifar10/{method}/inner_lr={i},lr={rate}") for i in inner for rate in rates
        }
        found[method] = _cells(sweep, "validation")
    rows = [(i, *(found[method][f"{i}/{rate}"] for method in found for rate in rates)) for i in inner]
    header = ("inner step", "FedMAML, step size 0.02", "0.05", "0.1", "ComFedL-DAMAML, 0.02", "0.05", "0.1")
    header += ("`losses_on: all`, 0.02", "0.05", "0.1")  # type: ignore[assignment]
    yield table(header, rows, left=0)
    rates = ("0.01", "0.02", "0.05", "0.1", "0.2", "0.5")  # type: ignore[assignment]
    cells = _cells({rate: _seeds(runs, f"cifar10/search/fedavg/lr={rate}") for rate in rates}, "validation")
    yield table(("", *rates), [("FedAvg", *cells.values())])
    rows = []
    names = {f"chosen/{method}": ADAPTING[method][0] for method in ("fedavg", "fedmaml", "comfedl")}
    names["all/chosen"] = "ComFedL-DAMAML, `losses_on: all`, seed 1"
    for folder, name in names.items():
        lines = _seeds(runs, f"cifar10/{folder}")
        rows.append((name, *(_cell(lines, quantity) for quantity in ("seen_mean", "seen_worst", "global_mean"))))
    yield table(("method", "mean", "worst client", "shared model, mean"), rows)


def robust(runs: Runs) -> Figure:
    """Draw Experiment 1: the chosen step sizes with fresh seeds."""
    panels = {
        about: {
            name: (
                _over_seeds(runs.under(f"fashion-mnist/{mix}-fresh/{m}") or [runs[f"fashion-mnist/{mix}-fresh/{m}"]]),
                c,
            )
            for m, (name, c) in METHODS.items()
        }
        for mix, about in MIXES.items()
    }
    return _curves(panels)


def damaml(runs: Runs) -> Figure:
    """Draw Experiment 2: the chosen step sizes."""
    lines = {
        name: (_over_seeds([runs[line.run] for line in _over_three(runs, method)]), colour)
        for method, (name, colour) in ADAPTING.items()
    }
    return _curves({"one step from the shared model": lines})


Curves = Mapping[str, tuple[Mapping[int, tuple[float, float]], str]]
"""Mean and worst by round, and the colour, by label."""


def _over_seeds(found: Sequence[Run]) -> dict[int, tuple[float, float]]:
    rounds = [line.round for line in found[0] if line.round]
    by_round = {round: [line for run in found for line in run if line.round == round] for round in rounds}
    return {round: (_mean(lines, "seen_mean"), _mean(lines, "seen_worst")) for round, lines in by_round.items()}


def _curves(panels: Mapping[str, Curves]) -> Figure:
    figure = Figure(figsize=(FULL, 4.7), layout="constrained")
    axes = figure.subplots(2, len(panels), sharex="col", squeeze=False)
    for column, (title, lines) in enumerate(panels.items()):
        for row, label in enumerate(("mean over clients, %", "worst client, %")):
            for name, (points, colour) in lines.items():
                values = [both[row] for both in points.values()]
                axes[row][column].plot(list(points), values, label=name, color=colour, linewidth=1.1)
            if column == 0:
                axes[row][column].set_ylabel(label)
        axes[0][column].set_title(title)
        axes[-1][column].set_xlabel("round")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


FIGURES = {"robust": robust, "damaml": damaml}
