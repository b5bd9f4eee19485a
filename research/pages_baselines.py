"""Tables of docs/results/baselines.md, for every complete regime of baselines.py."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from baselines import REGIMES, Method, Setting, chosen, tried
from summaries import Evaluation, Runs, last, spread, table

COLUMNS = (
    "validation", "seen", "seen_mean", "seen_worst", "unseen_mean", "global", "global_mean", "global_worst",
    "global_seen_mean", "global_unseen_mean", "seen_masked", "unseen_masked", "seen_masked_worst", "global_masked",
)  # fmt: skip
SEARCHES = ("*/search/*/*",)

TITLES = {
    "afl": "AFL",
    "apfl": "APFL",
    "comfedl": "ComFedL",
    "ditto": "Ditto",
    "drfa": "DRFA",
    "fedadam": "FedAdam + fine-tuning",
    "fedala": "FedALA",
    "fedavg": "FedAvg",
    "fedavg-examples": "FedAvg, by n_i",
    "fedavg-uniform": "FedAvg, uniform",
    "fedbabu": "FedBABU",
    "feddyn": "FedDyn + fine-tuning",
    "fedper": "FedPer",
    "fedproto": "FedProto",
    "fedprox": "FedProx",
    "fedrep": "FedRep",
    "fedrod": "FedRoD",
    "fine-tuning": "FedAvg + fine-tuning",
    "heurfedamp": "HeurFedAMP",
    "knn-per": "kNN-Per",
    "lg-fedavg": "LG-FedAvg",
    "local": "Local",
    "moon": "MOON + fine-tuning",
    "one-step": "FedAvg + 1 step",
    "pefll": "PeFLL",
    "per-fedavg": "Per-FedAvg",
    "pfedbayes": "pFedBayes",
    "pfedbayes-kept": "pFedBayes, moments kept",
    "pfedgp": "pFedGP",
    "pfedhn": "pFedHN",
    "pfedme": "pFedMe",
    "pfnm": "BNFed (PFNM)",
    "q-fedavg": "q-FedAvg",
    "scaffold": "SCAFFOLD + fine-tuning",
    "tr-maml": "TR-MAML",
}
OTHERWISE = {
    ("adapt", "comfedl"): "ComFedL-DAMAML",
    ("adapt-mnist", "comfedl"): "ComFedL-DAMAML",
    ("adapt-whole", "comfedl"): "ComFedL-DAMAML",
    ("vowel", "fedprox"): "FedProx + fine-tuning",
}
"""Titles that differ between regimes."""

T = {3: 4.303, 5: 2.776, 7: 2.447}
"""Student's t at 97.5 % by number of seeds."""

GLOBAL_ALONE = ("fedavg", "fedprox", "pfnm")
"""Methods of Table 1 whose clients have no personal model."""

NOT_RUN = {("fashion-mnist-medium", "pfedgp"), ("mnist-medium", "pfedgp")}
"""Tests of Table 1 that a method is left out of: pFedGP's steps are cubic in a client's examples, 1000 there."""

PAPER: dict[str, dict[str, tuple[float | None, float | None]]] = {  # papers/003, Table 1: PM, GM
    "fashion-mnist-small": {
        "fedavg": (None, 81.51), "fedprox": (None, 81.53), "pfnm": (None, 66.54), "per-fedavg": (79.79, None),
        "pfedme": (88.63, 81.06), "heurfedamp": (86.38, None), "pfedgp": (86.99, None), "pfedbayes": (89.05, 80.17),
    },
    "mnist-small": {
        "fedavg": (None, 87.38), "fedprox": (None, 87.65), "pfnm": (None, 78.70), "per-fedavg": (89.29, None),
        "pfedme": (92.88, 87.35), "heurfedamp": (90.89, None), "pfedgp": (85.96, None), "pfedbayes": (94.13, 90.44),
    },
    "fashion-mnist-medium": {
        "fedavg": (None, 83.90), "fedprox": (None, 83.92), "pfnm": (None, 69.68), "per-fedavg": (84.90, None),
        "pfedme": (91.32, 83.45), "heurfedamp": (89.82, None), "pfedgp": (90.53, None), "pfedbayes": (91.95, 82.33),
    },
    "mnist-medium": {
        "fedavg": (None, 90.60), "fedprox": (None, 90.66), "pfnm": (None, 80.02), "per-fedavg": (95.19, None),
        "pfedme": (95.31, 89.67), "heurfedamp": (94.74, None), "pfedgp": (91.96, None), "pfedbayes": (97.09, 92.33),
    },
}  # fmt: skip


CIFAR10 = {  # papers/001, Table 1, n = 90, after 5000 rounds: seen, unseen
    "local": (82.2, 81.6), "fedavg": (47.5, 48.6), "per-fedavg": (79.1, 77.6), "fedrep": (84.6, 81.8),
    "pfedme": (83.9, 78.4), "knn-per": (84.0, 82.4), "pfedhn": (87.8, 63.3), "pefll": (89.0, 89.3),
}  # fmt: skip


def paper_figures() -> dict[str, dict[str, float]]:
    """Return the papers' figures by pattern of runs and quantity."""
    found = {
        f"table-1/{test}/{method}/*": {of: v for of, v in (("seen", pm), ("global", gm)) if v is not None}
        for test, methods in PAPER.items()
        for method, (pm, gm) in methods.items()
    }
    of_cifar10 = {f"cifar10/test/{m}/*": {"seen": seen, "unseen_mean": new} for m, (seen, new) in CIFAR10.items()}
    return found | of_cifar10


def tables(runs: Runs) -> Iterator[str]:
    """Yield all tables in the page's order."""
    for mix in ("two-classes", "iid"):
        yield from _means_and_worst(runs, f"robust-{mix}", "fedavg-uniform")
    for regime in ("adapt", "adapt-mnist", "adapt-whole"):
        yield from _means_and_worst(runs, regime, "one-step")
    yield from _table_1(runs)
    for regime in ("vowel", "qmnist", "cifar10"):
        yield from _seen_and_unseen(runs, regime)


def title(regime: str, method: str) -> str:
    """Return the page's name for a method."""
    return OTHERWISE.get((regime, method), TITLES[method])


def of_seeds(runs: Runs, regime: str, test: str, method: str) -> list[Evaluation]:
    """Return the last evaluation of each seed."""
    return [last(runs[f"{regime}/{test}/{method}/seed={seed}"]) for seed in REGIMES[regime].seeds]


def whole(runs: Runs, regime: str, test: str) -> bool:
    """Return whether every method that is run at all was tested with every seed."""
    about = REGIMES[regime]
    methods = [method for method in about.methods if (test, method) not in NOT_RUN]
    return all(f"{regime}/{test}/{method}/seed={seed}" in runs for method in methods for seed in about.seeds)


def setting_of(runs: Runs, regime: str, method: str) -> Setting:
    """Return the setting chosen on validation."""
    return chosen(runs, f"{regime}/search/{method}", REGIMES[regime].methods[method])


def _search(runs: Runs, regime: str) -> str:
    rows = []
    for name, method in REGIMES[regime].methods.items():
        best = setting_of(runs, regime, name)
        cells = []
        for setting, line in tried(runs, f"{regime}/search/{name}", method):
            value = "left" if line is None else f"{line['validation']:.1f}"
            cell = f"{_values(setting)}: {value}"
            cells.append(f"**{cell}**" if setting == best else cell)
        rows.append((title(regime, name), _keys(method), "; ".join(cells)))
    return table(("method", "keys", "settings, and validation accuracy"), rows, left=3)


def _keys(method: Method) -> str:
    return ", ".join(f"`{key}`" for key in method.grid)


def _values(setting: Setting) -> str:
    return ", ".join(f"{value}" for value in setting.values())


def _means_and_worst(runs: Runs, regime: str, beside: str) -> Iterator[str]:
    if not whole(runs, regime, "test"):
        return
    rows = []
    other = of_seeds(runs, regime, "test", beside)
    masked = {"seen_masked": "masked: mean", "seen_masked_worst": "worst client"} if _masked(other) else {}
    for name in REGIMES[regime].methods:
        lines = of_seeds(runs, regime, "test", name)
        cells = [spread([line[of] for line in lines]) for of in ("seen_mean", "seen_worst", *masked)]
        shared = "global_mean" in lines[0].values
        cells.append(spread([line["global_mean"] for line in lines]) if shared else "–")
        gains = [interval(lines, other, of) if name != beside else "" for of in ("seen_mean", "seen_worst")]
        rows.append((title(regime, name), _values(setting_of(runs, regime, name)), *cells, *gains))
    less = f"minus {title(regime, beside)}"
    header = ("method", "setting", "mean", "worst client", *masked.values(), "shared model, mean")
    yield table((*header, f"mean, {less}", f"worst, {less}"), rows, left=2)
    yield _search(runs, regime)


def _masked(lines: Sequence[Evaluation]) -> bool:
    """Return whether clients lack classes, so that masking makes a difference."""
    known = all("seen_masked" in line.values for line in lines)
    return known and any(line["seen_masked"] != line["seen"] for line in lines)


def interval(lines: Sequence[Evaluation], other: Sequence[Evaluation], of: str) -> str:
    """Return the difference to another method: mean over seeds with Student's 95 % interval."""
    gains = [a[of] - b[of] for a, b in zip(lines, other, strict=True)]
    mean, width = statistics.fmean(gains), T[len(gains)] * statistics.stdev(gains) / len(gains) ** 0.5
    return f"{mean:+.1f} ({mean - width:+.1f} to {mean + width:+.1f})".replace("-", "−")


def _table_1(runs: Runs) -> Iterator[str]:
    tests = [test for test in REGIMES["table-1"].tests if whole(runs, "table-1", test)]
    for test in tests:
        rows = []
        columns = {"seen": "PM", "global": "GM"}
        if _masked(of_seeds(runs, "table-1", test, "fedavg")):
            columns |= {"seen_masked": "masked: PM", "global_masked": "GM"}
        for name in REGIMES["table-1"].methods:
            paper = [_paper(value) for value in PAPER[test].get(name, (None, None))]
            if (test, name) in NOT_RUN:
                rows.append((TITLES[name], "not run", *paper, *("–" for _ in columns)))
                continue
            lines = of_seeds(runs, "table-1", test, name)
            there = set(lines[0].values) - ({"seen", "seen_masked"} if name in GLOBAL_ALONE else set())
            cells = [spread([line[of] for line in lines]) if of in there else "–" for of in columns]
            rows.append((TITLES[name], _values(setting_of(runs, "table-1", name)), *paper, *cells))
        yield table(("method", "setting", "paper, PM", "GM", *columns.values()), rows, left=2)
    if tests:
        yield _search(runs, "table-1")


def _paper(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _seen_and_unseen(runs: Runs, regime: str) -> Iterator[str]:
    if not whole(runs, regime, "test"):
        return
    columns = {
        "seen_mean": "seen",
        "seen_worst": "worst seen",
        "unseen_mean": "unseen",
        "seen_masked": "seen, masked",
        "unseen_masked": "unseen, masked",
        "global_seen_mean": "shared model: seen",
        "global_unseen_mean": "unseen",
    }
    tested = {name: of_seeds(runs, regime, "test", name) for name in REGIMES[regime].methods}
    if not any(map(_masked, tested.values())):
        columns = {of: head for of, head in columns.items() if not of.endswith("_masked")}
    columns = {of: head for of, head in columns.items() if any(of in lines[0].values for lines in tested.values())}
    printed = ("paper: seen", "unseen") if regime == "cifar10" else ()
    rows: list[tuple[float, Sequence[str]]] = []
    for name, lines in tested.items():
        paper = [_paper(value) for value in CIFAR10.get(name, (None, None))] if printed else []
        cells = [spread([line[of] for line in lines]) if of in lines[0].values else "–" for of in columns]
        best = statistics.fmean(line["seen_mean"] for line in lines)
        rows.append((best, (title(regime, name), _values(setting_of(runs, regime, name)), *paper, *cells)))
    rows.sort(key=lambda both: -both[0])
    yield table(("method", "step size", *printed, *columns.values()), [row for _, row in rows])
    yield _search(runs, regime)
