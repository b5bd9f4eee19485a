"""Tables and figures of docs/results/comfedl.md, from the folders that the two ComFedL scripts fill.

    python experiments/comfedl_results.py chosen FOLDER             the step size that validation chooses in a sweep
    python experiments/comfedl_results.py robust FOLDER [--out DIR]   Experiment 1: runs/comfedl-robust/fashion-mnist
    python experiments/comfedl_results.py damaml FOLDER [--out DIR]   Experiment 2: runs/comfedl-damaml/fashion-mnist
    python experiments/comfedl_results.py cifar10 FOLDER [--out DIR]  the same on CIFAR-10: runs/comfedl-damaml/cifar10

Of every method the setting is taken whose validation accuracy in the last round, mean over the seeds, is highest; one
that left the finite range on any seed is none. Test accuracy of other settings is printed in the sweeps, after it.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from fedloom.federation.folder import EXPERIMENT, RunFolder
from fedloom.reporting.figures import FULL, as_svg
from fedloom.reporting.significance import signed_rank_test

METHODS = {
    "fedavg-examples": ("FedAvg, by nᵢ", "#d55e00"),
    "fedavg-uniform": ("FedAvg, uniform", "#009e73"),
    "comfedl-largest": ("ComFedL, largest", "#e69f00"),
    "comfedl-normalized": ("ComFedL, normalized", "#0072b2"),
    "fedavg": ("FedAvg + 1 step", "#009e73"),
    "fedmaml": ("FedMAML", "#d55e00"),
    "comfedl": ("ComFedL-DAMAML", "#0072b2"),
    "damaml-first-order": ("ComFedL-DAMAML, first order", "#cc79a7"),
}
MIXES = {"iid": "all mixes alike", "dominant": "half of one class", "two-classes": "two classes"}
SHADES = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#000000")


@dataclass(frozen=True)
class Run:
    """A run: its settings that sweeps vary, and its evaluated rounds; ``left`` is the round it could not finish.

    Accuracies are percent; ``mean`` and ``worst`` are of the clients' own predictors on test, ``shared`` is the mean of
    the shared model.
    """

    seed: int
    rate: float
    gamma: float
    steps: int
    left: int | None
    rounds: tuple[int, ...]
    validation: tuple[float, ...]
    mean: tuple[float, ...]
    worst: tuple[float, ...]
    shared: tuple[float, ...]
    loss: tuple[float, ...]
    clients: Mapping[str, float]


@dataclass(frozen=True)
class Setting:
    """The runs of one setting, by seed."""

    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        """Any of them."""
        return self.runs[0]

    @property
    def whole(self) -> bool:
        """Whether none left the finite range."""
        return all(run.left is None for run in self.runs)

    def last(self, quantity: str) -> list[float]:
        """A quantity of the last round, by seed."""
        return [getattr(run, quantity)[-1] for run in self.runs]

    def shown(self, quantity: str) -> str:
        """Mean over seeds, ± the standard deviation where there are several; or when the run ended."""
        if not self.whole:
            return "left in " + ", ".join(str(run.left) for run in self.runs if run.left is not None)
        values = self.last(quantity)
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        return f"{statistics.fmean(values):.1f}{spread}"

    def curve(self, quantity: str) -> list[float]:
        """Mean over seeds, by evaluated round."""
        return [statistics.fmean(column) for column in zip(*(getattr(run, quantity) for run in self.runs), strict=True)]


def read(folder: Path) -> Run | None:
    """Read a run, also one that left the finite range; None if it was stopped."""
    files = RunFolder.open(folder)
    if not (folder / "metrics.jsonl").exists() or not (folder / "journal.jsonl").exists():
        return None
    e = yaml.safe_load(files.text(EXPERIMENT))
    algorithm = e["algorithm"]
    lines = files.metrics()
    rounds = [line["round"] for line in lines]
    left = None
    if not rounds or rounds[-1] < e["federation"]["rounds"]:
        attempts = files.lines("journal.jsonl")
        left = attempts[-1]["round"]
        if attempts[-1]["outcome"] in ("done", "evaluated"):
            return None
    rows = files.clients() if left is None else []
    return Run(
        seed=e["seed"],
        rate=algorithm["local"]["lr"],
        gamma=algorithm.get("gamma", math.inf),
        steps=algorithm["local"]["steps"],
        left=left,
        rounds=tuple(rounds),
        validation=tuple(100 * line["validation_pooled"] for line in lines),
        mean=tuple(100 * line["seen"]["accuracy_mean"] for line in lines),
        worst=tuple(100 * line["seen"]["accuracy_worst"] for line in lines),
        shared=tuple(100 * line["global"]["accuracy_mean"] for line in lines),
        loss=tuple(line["seen"]["loss_mean"] for line in lines),
        clients={row["id"]: 100 * float(row["personal_accuracy_unmasked"]) for row in rows},
    )


def runs_in(folder: Path) -> tuple[Run, ...]:
    """The runs of a sweep that ended, by seed."""
    runs = (read(path.parent) for path in folder.glob(f"*/{EXPERIMENT}"))
    return tuple(sorted((run for run in runs if run is not None), key=lambda run: run.seed))


def settings_in(folder: Path, key: Callable[[Run], Any] = lambda run: run.rate) -> dict[Any, Setting]:
    """The runs of a sweep by setting, in order."""
    found: dict[Any, list[Run]] = {}
    for run in runs_in(folder):
        found.setdefault(key(run), []).append(run)
    return {value: Setting(tuple(found[value])) for value in sorted(found)}


def chosen(settings: Iterable[Setting]) -> Setting:
    """The setting of highest validation accuracy in the last round; the first of equal ones.

    The mean is over the seeds that all settings were run with.
    """
    tried = list(settings)
    seeds = set.intersection(*({run.seed for run in s.runs} for s in tried))
    return max(
        (s for s in tried if s.whole),
        key=lambda s: statistics.fmean(run.validation[-1] for run in s.runs if run.seed in seeds),
    )


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table."""
    print("\n| " + " | ".join(headings) + " |")
    print("|---" + "|---:" * (len(headings) - 1) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


def name(method: str) -> str:
    """As tables have it."""
    return METHODS[method][0]


def against(better: Setting, other: Setting) -> str:
    """Paired differences: of the worst client by seed, and of all clients with p of the signed-rank test."""
    pairs = [(a, b) for a in better.runs for b in other.runs if a.seed == b.seed]
    worst = [a.worst[-1] - b.worst[-1] for a, b in pairs]
    clients = [a.clients[id] - b.clients[id] for a, b in pairs for id in a.clients]
    p = signed_rank_test(clients)
    return (
        f"worst {statistics.fmean(worst):+.1f} ({sum(d > 0 for d in worst)} of {len(worst)} seeds above, "
        f"{sum(d < 0 for d in worst)} below); clients {statistics.fmean(clients):+.1f} "
        f"({sum(d > 0 for d in clients)} of {len(clients)} above, {sum(d < 0 for d in clients)} below, p = {p:.2g})"
    )


Lines = Mapping[str, tuple[Setting, str]]
"""Label, setting and colour of each line of a panel."""


@as_svg
def curves(panels: Mapping[str, Lines], quantities: Mapping[str, str], *, legend_each: bool = False) -> Figure:
    """One column per panel, one row per quantity, one line per setting, over rounds after the first."""

    def draw(axis: Any, lines: Lines, quantity: str) -> None:
        for label, (setting, colour) in lines.items():
            points = list(zip(setting.first.rounds, setting.curve(quantity), strict=True))[1:]
            axis.plot(*zip(*points, strict=True), label=label, color=colour, linewidth=1.1)

    return _grid(panels, quantities, draw, "round", legend_each)


@as_svg
def over_rates(panels: Mapping[str, Mapping[str, tuple[Mapping[float, Setting], str]]]) -> Figure:
    """The last round's accuracies over step sizes; a dot marks the one that validation chooses."""

    def draw(axis: Any, lines: Mapping[str, tuple[Mapping[float, Setting], str]], quantity: str) -> None:
        for label, (sweep, colour) in lines.items():
            best = chosen(sweep.values())
            points = {rate: statistics.fmean(s.last(quantity)) for rate, s in sweep.items() if s.whole}
            axis.plot(list(points), list(points.values()), label=label, color=colour, linewidth=1.1)
            axis.plot([best.first.rate], [points[best.first.rate]], "o", color=colour, markersize=4)
        rates = sorted({rate for sweep, _ in lines.values() for rate in sweep})
        axis.set_xscale("log")
        axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axis.set_xticks([], minor=True)

    return _grid(panels, BOTH, draw, "step size", False)


def _grid(
    panels: Mapping[str, Any], quantities: Mapping[str, str], draw: Callable[..., None], x: str, legend_each: bool
) -> Figure:
    figure = Figure(figsize=(FULL, 2.1 * len(quantities) + 0.5), layout="constrained")
    axes = figure.subplots(len(quantities), len(panels), sharex="col", squeeze=False)
    for column, (title, lines) in enumerate(panels.items()):
        for row, (quantity, label) in enumerate(quantities.items()):
            draw(axes[row][column], lines, quantity)
            if column == 0:
                axes[row][column].set_ylabel(label)
        axes[0][column].set_title(title)
        axes[-1][column].set_xlabel(x)
        if legend_each:
            axes[0][column].legend(loc="lower right")
    if not legend_each:
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def save(out: Path | None, file: str, svg: Callable[[], str]) -> None:
    """Draw, if figures are wanted."""
    if out is not None:
        (out / file).write_text(svg(), encoding="utf-8")


BOTH = {"mean": "mean over clients, %", "worst": "worst client, %"}


def robust(runs: Path, out: Path | None) -> None:
    """Experiment 1."""
    methods = ("fedavg-examples", "fedavg-uniform", "comfedl-largest", "comfedl-normalized")
    sweeps = {
        mix: {m: settings_in(runs / mix / m) for m in methods if (runs / mix / m).is_dir()}
        for mix in MIXES
        if (runs / mix).is_dir()
    }
    panels = {}
    for mix, found in sweeps.items():
        print(f"\n## {mix}")
        for quantity in ("validation", *BOTH):
            print(f"\n{quantity}")
            _rates_by({name(m): sweep for m, sweep in found.items()}, "method", quantity)
        best = {m: chosen(sweep.values()) for m, sweep in found.items()}
        _methods(best)
        fresh = {m: Setting(those) for m in best if (those := runs_in(runs / f"{mix}-fresh" / m))}
        if fresh:
            print("\nseeds that had no part in choosing the step sizes")
            _methods(fresh)
        panels[MIXES[mix]] = {METHODS[m][0]: (setting, METHODS[m][1]) for m, setting in (fresh or best).items()}
    save(out, f"comfedl-robust-{runs.name}.svg", lambda: curves(panels, BOTH))
    by_rate = {
        MIXES[mix]: {METHODS[m][0]: (sweep, METHODS[m][1]) for m, sweep in found.items()}
        for mix, found in sweeps.items()
    }
    save(out, f"comfedl-robust-{runs.name}-rates.svg", lambda: over_rates(by_rate))
    for part, key, symbol in (("gamma", _gamma, "γ"), ("tau", _steps, "τ")):
        if (runs / part).is_dir():
            _swept(runs / part, key, symbol, out, f"comfedl-robust-{runs.name}-{part}.svg")
    for folder in sorted([*(runs / "literal").glob("*"), *(runs / "step").glob("*")]):
        for quantity in BOTH:
            print(f"\n{folder.parent.name}, {folder.name}: {quantity}")
            _rates_by(_by(folder, _gamma), "γ", quantity)


def damaml(runs: Path, out: Path | None) -> None:
    """Experiment 2: the grid is of seed 1, whose chosen runs the other seeds and the sweeps are put beside."""
    methods = [m for m in METHODS if (runs / "methods" / m).is_dir()]
    grid = {m: settings_in(runs / "methods" / m) for m in methods}
    for quantity in ("validation", "mean", "worst", "shared"):
        print(f"\n{quantity}, seed 1")
        _rates_by({name(m): sweep for m, sweep in grid.items()}, "method", quantity)
    one = {m: chosen(sweep.values()) for m, sweep in grid.items()}
    several = {m: Setting(s.runs + runs_in(runs / "chosen" / m)) for m, s in one.items()}
    _methods(several)
    panel = {METHODS[m][0]: (setting, METHODS[m][1]) for m, setting in several.items()}
    save(out, "comfedl-damaml-methods.svg", lambda: curves({"one step from the shared model": panel}, BOTH))
    by_rho = {0.28: {m: one[m] for m in ("fedavg", "comfedl")}}
    for folder in (runs / "rho").glob("*"):
        by_rho[float(folder.name)] = {
            m: Setting(those) for m in ("fedavg", "comfedl") if (those := runs_in(folder / m))
        }
    quantities = ("validation", "mean", "worst", "shared")
    rows = [
        [f"{rho:g}", name(m), *(s.shown(q) for q in quantities)]
        for rho, two in sorted(by_rho.items())
        for m, s in two.items()
    ]
    table(["ρ", "method", "validation", "test, mean", "test, worst", "shared model, mean"], rows)
    panels = {
        f"ρ = {rho:g}": {METHODS[m][0]: (s, METHODS[m][1]) for m, s in two.items()}
        for rho, two in sorted(by_rho.items())
    }
    save(out, "comfedl-damaml-rho.svg", lambda: curves(panels, BOTH))
    panels = {}
    for part, key, symbol in (("gamma", _gamma, "γ"), ("tau", _steps, "τ")):
        if not (runs / part).is_dir():
            continue
        values = settings_in(runs / part, key) | {key(one["comfedl"].first): one["comfedl"]}
        table(
            [symbol, "validation", "test, mean", "test, worst", "shared model, mean"],
            [[f"{value:g}", *(s.shown(q) for q in quantities)] for value, s in sorted(values.items())],
        )
        panels[f"{symbol}"] = {
            f"{symbol} = {value:g}": (s, colour)
            for (value, s), colour in zip(sorted(values.items()), SHADES, strict=False)
            if s.whole
        }
    if panels:
        save(out, "comfedl-damaml-sweeps.svg", lambda: curves(panels, BOTH, legend_each=True))


def cifar10(runs: Path, out: Path | None) -> None:
    """Experiment 2 on CIFAR-10: the runs at the settings that the short search chose."""
    found = {m: Setting(those) for m in METHODS if (those := runs_in(runs / "chosen" / m))}
    _methods(found)
    panel = {METHODS[m][0]: (setting, METHODS[m][1]) for m, setting in found.items()}
    save(out, "comfedl-cifar10-methods.svg", lambda: curves({"one step from the shared model": panel}, BOTH))


def _gamma(run: Run) -> float:
    return run.gamma


def _steps(run: Run) -> int:
    return run.steps


def _by(folder: Path, key: Callable[[Run], Any]) -> dict[Any, dict[float, Setting]]:
    """A sweep over a setting and step sizes: by that setting, then by step size."""
    found: dict[Any, dict[float, Setting]] = {}
    for (value, rate), setting in settings_in(folder, lambda run: (key(run), run.rate)).items():
        found.setdefault(value, {})[rate] = setting
    return found


def _rates_by(by_value: Mapping[Any, Mapping[float, Setting]], symbol: str, quantity: str) -> None:
    """A quantity by a setting and step size; the step size that validation chooses is bold."""
    rates = sorted({rate for sweep in by_value.values() for rate in sweep})
    rows = []
    for value, sweep in by_value.items():
        best = chosen(sweep.values()) if any(s.whole for s in sweep.values()) else None
        cells = [sweep[rate].shown(quantity) if rate in sweep else "" for rate in rates]
        bold = [
            f"**{c}**" if best is not None and sweep.get(r) is best else c for r, c in zip(rates, cells, strict=True)
        ]
        rows.append([value if isinstance(value, str) else f"{value:g}", *bold])
    table([f"{symbol} \\ step size", *(f"{rate:g}" for rate in rates)], rows)


def _methods(best: Mapping[str, Setting]) -> None:
    """What the chosen settings reach, and the last method against the others."""
    quantities = ("validation", "mean", "worst", "shared")
    rows = [[name(m), f"{s.first.rate:g}", *(s.shown(q) for q in quantities)] for m, s in best.items()]
    table(["method", "step size", "validation", "test, mean", "test, worst", "shared model, mean"], rows)
    ours = next((m for m in ("comfedl-normalized", "comfedl") if m in best), None)
    print()
    for method, setting in best.items():
        if ours is not None and method != ours:
            print(f"{name(ours)} less {name(method)}: {against(best[ours], setting)}")


def _swept(folder: Path, key: Callable[[Run], Any], symbol: str, out: Path | None, file: str) -> None:
    """A sweep over γ or τ: at each step size, and with the step size of each value chosen on validation."""
    by_value = _by(folder, key)
    rates = sorted({rate for sweep in by_value.values() for rate in sweep})
    for quantity in ("validation", *BOTH):
        print(f"\n{quantity}")
        _rates_by(by_value, symbol, quantity)
    best = {value: chosen(sweep.values()) for value, sweep in by_value.items()}
    columns = {f"step size {rate:g}": {v: sweep[rate] for v, sweep in by_value.items()} for rate in rates[:2]}
    columns["step size by validation"] = best
    panels = {
        title: {
            f"{symbol} = {value:g}": (setting, colour)
            for (value, setting), colour in zip(column.items(), SHADES, strict=False)
            if setting.whole
        }
        for title, column in columns.items()
    }
    save(out, file, lambda: curves(panels, BOTH))


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("chosen", "robust", "damaml", "cifar10"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="where figures go; without it there are none")
    given = parser.parse_args()
    if given.what == "chosen":
        print(f"{chosen(settings_in(given.folder).values()).first.rate:g}")
    elif given.what == "robust":
        robust(given.folder, given.out)
    else:
        {"damaml": damaml, "cifar10": cifar10}[given.what](given.folder, given.out)


if __name__ == "__main__":
    main()
