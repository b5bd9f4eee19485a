"""Tables and figure of docs/results/training-privacy.md: accuracy by ε, with seeds as the unit."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from matplotlib.figure import Figure
from summaries import Evaluation, Runs, difference, last, read, spread, table

from fedloom.engine.options import PrivacyQuestion
from fedloom.experiment.loading import of_run
from fedloom.ledger.privacy_cost import cost_of
from fedloom.reporting.drawing import FULL
from fedloom.runs.files import EXPERIMENT
from fedloom.runs.folder import RunFolder

COLUMNS = (
    "validation",
    "seen",
    "unseen",
    "global",
    "unseen_mean",
    "unseen_sd",
    "noise_multiplier",
    "parameters",
    "noise_to_clip",
)
SEARCHES = ("*/search/*",)
DATA = {"fashion-mnist": "Fashion-MNIST", "writers": "writers"}
METHODS = {"fedavg": "FedAvg", "fedrep": "FedRep"}
EPSILONS = ("8", "4", "2")
HEADINGS = [f"ε = {epsilon}" for epsilon in EPSILONS]
RATES = ("0.03", "0.1", "0.3")
CLIPS = ("0.2", "0.5", "1")
ROWS = (
    ("FedAvg, shared model", "fedavg", "global"),
    ("FedAvg, seen", "fedavg", "seen"),
    ("FedAvg, unseen", "fedavg", "unseen"),
    ("FedRep, seen", "fedrep", "seen"),
    ("FedRep, unseen", "fedrep", "unseen"),
)
"""Name, method and quantity of each row of results."""
DESCRIPTORS = Path(__file__).parents[1] / "docs" / "results" / "private-descriptors.csv"
"""Compact file with PeFLL's private descriptors."""
SERVED = ("none", "8", "4", "2")
"""ε of the descriptors, by its name in new-clients.json; none: without privacy."""


def cost(folder: Path) -> dict[str, float]:
    """Return the noise of a run: multiplier, coordinates, and norm on a round's mean relative to the clip."""
    files = RunFolder.open(folder)
    experiment = of_run(files.text(EXPERIMENT), str(folder / EXPERIMENT))
    if experiment.federation.privacy is None:
        return {}
    found = cost_of(experiment, PrivacyQuestion(clients=files.json("summary.json")["seen"]["clients"]))
    return {
        "noise_multiplier": float(f"{found.noise_multiplier:.4g}"),
        "parameters": float(found.parameters),
        "noise_to_clip": float(f"{found.noise_to_clip:.4g}"),
    }


def tables(runs: Runs) -> Iterator[str]:
    """Yield for each data set the accuracy and what privacy loses of it; then the noise, the search, descriptors."""
    for data in DATA:
        yield _accuracy(runs, data)
        yield _lost(runs, data)
    yield _noise(runs)
    yield _search(runs)
    yield _local_search(runs)
    yield _descriptors(runs)


def _lines(runs: Runs, data: str, method: str, epsilon: str) -> list[Evaluation]:
    """Return the last evaluation of each seed; ε of ``inf`` is training without privacy."""
    if epsilon == "inf":
        return [last(run) for run in runs.under(f"{data}/test/{method}-inf")]
    return [last(run) for run in runs.under(f"{data}/test/{method}") if f"epsilon={epsilon}," in run[0].run]


def _values(runs: Runs, data: str, method: str, epsilon: str, quantity: str) -> list[float]:
    return [line[quantity] for line in _lines(runs, data, method, epsilon)]


def _local(runs: Runs, data: str, quantity: str) -> list[float]:
    return [last(run)[quantity] for run in runs.under(f"{data}/test/local")]


def _accuracy(runs: Runs, data: str) -> str:
    """Return mean ± deviation over seeds by ε; training alone discloses nothing."""
    rows = [
        (name, *(spread(_values(runs, data, method, epsilon, quantity)) for epsilon in ("inf", *EPSILONS)))
        for name, method, quantity in ROWS
    ]
    rows += [(f"Local, {group}", spread(_local(runs, data, group)), "", "", "") for group in ("seen", "unseen")]
    return table((DATA[data], "without privacy", *HEADINGS), rows)


def _lost(runs: Runs, data: str) -> str:
    """Return differences with the same seed: from training without privacy, and from Local."""
    rows = []
    for name, method, quantity in ROWS:
        without = _values(runs, data, method, "inf", quantity)
        each = (_values(runs, data, method, epsilon, quantity) for epsilon in EPSILONS)
        rows.append((f"{name}: change due to privacy", *(difference(those, without) for those in each)))
    for method, name in METHODS.items():
        alone = _local(runs, data, "seen")
        each = (_values(runs, data, method, epsilon, "seen") for epsilon in EPSILONS)
        rows.append((f"{name} minus Local, seen", *(difference(those, alone) for those in each)))
    return table((DATA[data], *HEADINGS), rows)


def _noise(runs: Runs) -> str:
    """Return the noise multiplier z, and the norm of the noise on a round's mean relative to the clipping norm."""
    rows = []
    for data, title in DATA.items():
        for method, name in METHODS.items():
            lines = [_lines(runs, data, method, epsilon)[0] for epsilon in EPSILONS]
            cells = (f"{line['noise_multiplier']:.2f}, {line['noise_to_clip']:.2f}" for line in lines)
            rows.append((f"{title}, {name}", f"{lines[0]['parameters']:,.0f}", *cells))
    return table(("z, norm of noise / clip", "coordinates", *HEADINGS), rows)


def _search(runs: Runs) -> str:
    """Return validation accuracy on seed 0 by learning rate and clip, at ε = 8 and without privacy."""
    columns = [(rate, clip) for rate in RATES for clip in CLIPS]
    rows = []
    for data, title in DATA.items():
        for method, name in METHODS.items():
            folder = f"{data}/search/{method}"
            private = [_validation(runs, f"{folder}/lr={rate},clip={clip},seed=0") for rate, clip in columns]
            plain = [_validation(runs, f"{folder}-inf/lr={rate},seed=0") for rate in RATES]
            for i, rate in enumerate(RATES):
                cells = [_bold(one, private) for one in private[3 * i : 3 * i + 3]]
                rows.append((f"{title}, {name}", rate, *cells, _bold(plain[i], plain)))
    return table(("", "learning rate", *(f"clip {clip}" for clip in CLIPS), "without privacy"), rows, left=1)


def _local_search(runs: Runs) -> str:
    """Return validation accuracy of training alone by steps and learning rate, on seed 0."""
    rows = []
    for data, title in DATA.items():
        found = {
            (steps, rate): _validation(runs, f"{data}/search/local/lr={rate},steps={steps},seed=0")
            for steps in ("10", "100")
            for rate in RATES
        }
        for steps in ("10", "100"):
            rows.append((title, steps, *(_bold(found[steps, rate], list(found.values())) for rate in RATES)))
    return table(("Local", "steps", *(f"learning rate {rate}" for rate in RATES)), rows)


def _validation(runs: Runs, name: str) -> float | None:
    """Return a searched run's validation accuracy; None if it diverged."""
    return last(runs[name]).values.get("validation")


def _bold(value: float | None, among: Sequence[float | None]) -> str:
    if value is None:
        return "diverged"
    shown = f"{value:.1f}"
    return f"**{shown}**" if value == max(one for one in among if one is not None) else shown


def _served(runs: Runs, folder: str, few: bool, epsilon: str) -> list[float]:
    """Return new clients' accuracy by seed, with descriptors of this ε; ``few``: of at most 100 images."""
    size = "n=100,*" if few else "n=[!1]*"
    pattern = f"{folder}/*/new-clients/{size},eps={epsilon}"
    names = sorted(name for name in runs if fnmatch(name, pattern) and "/noisy/" not in name)
    return [last(runs[name])["unseen_mean"] for name in names]


def _served_clients(runs: Runs) -> Iterator[tuple[str, list[list[float]]]]:
    """Yield the name of clients that describe themselves, and their accuracies by ε and seed."""
    other = read(DESCRIPTORS)
    for name, of, folder, few in (
        ("Fashion-MNIST, 500 images", other, "fashion-mnist", False),
        ("Fashion-MNIST, 100 images", other, "fashion-mnist", True),
        ("writers, 42 to 49 digits", runs, "writers/descriptors", False),
    ):
        yield name, [_served(of, folder, few, epsilon) for epsilon in SERVED]


def _descriptors(runs: Runs) -> str:
    """Return new clients' accuracy with PeFLL's private descriptors, mean ± deviation over seeds, and the loss."""
    rows: list[tuple[str, ...]] = []
    for name, each in _served_clients(runs):
        rows.append((name, *(spread(of) if of else "" for of in each)))
        rows.append((f"{name}: change due to privacy", "", *(difference(of, each[0]) if of else "" for of in each[1:])))
    return table(("PeFLL, new clients", "without privacy", *HEADINGS), rows)


CURVES = (
    ("FedAvg, own steps", "fedavg", "seen", "#d55e00", "-"),
    ("FedAvg, shared model", "fedavg", "global", "#d55e00", "--"),
    ("FedRep", "fedrep", "seen", "#009e73", "-"),
)
"""Label, method, quantity, colour and line of the first two panels."""

SERVED_LINES = (("#0072b2", "-"), ("#0072b2", "--"), ("#cc79a7", "-"))
"""Colour and line of the clients in the third panel."""


def accuracy(runs: Runs) -> Figure:
    """Draw test accuracy by ε: means over seeds as lines, seeds as dots."""
    figure = Figure(figsize=(FULL, 3.2), layout="constrained")
    axes = figure.subplots(1, 3)
    ticks = (*reversed(EPSILONS), "inf")
    for panel, (data, title) in zip(axes, DATA.items(), strict=False):
        for label, method, quantity, colour, style in CURVES:
            each = [_values(runs, data, method, epsilon, quantity) for epsilon in ticks]
            panel.plot([statistics.fmean(of) for of in each], style, color=colour, label=label)
            for i, those in enumerate(each):
                panel.plot([i] * len(those), those, ".", color=colour, alpha=0.4)
        panel.axhline(statistics.fmean(_local(runs, data, "seen")), color="#777777", linestyle=":", label="Local")
        panel.set_title(f"{title}: ε of a client")
        panel.set_xticks(range(len(ticks)), [*ticks[:-1], "∞"])
    places = [ticks.index("inf" if epsilon == "none" else epsilon) for epsilon in SERVED]
    for (name, served), (colour, style) in zip(_served_clients(runs), SERVED_LINES, strict=True):
        points = sorted((x, values) for x, values in zip(places, served, strict=True) if values)
        axes[2].plot([x for x, _ in points], [statistics.fmean(v) for _, v in points], style, color=colour, label=name)
        for x, values in points:
            axes[2].plot([x] * len(values), values, ".", color=colour, alpha=0.4)
    axes[2].set_title("descriptors: ε of an image")
    axes[2].set_xticks(range(len(ticks)), [*ticks[:-1], "∞"])
    for panel in axes:
        panel.set_xlabel("ε")
    axes[0].legend(fontsize=7, loc="center", bbox_to_anchor=(0.5, 0.35))
    axes[2].legend(fontsize=7)
    axes[0].set_ylabel("test accuracy, %")
    return figure


FIGURES = {"accuracy": accuracy}
