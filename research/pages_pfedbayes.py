"""Tables and figure of docs/results/pfedbayes.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from summaries import Evaluation, Run, Runs, chosen, difference, last, spread, table

from fedloom import experiment as experiments
from fedloom.algorithms.mean_field import MeanField
from fedloom.data.inputs import single
from fedloom.engine import assemble, run_data
from fedloom.models.predictors import Ensemble
from fedloom.reporting.drawing import FULL
from fedloom.runs.checkpoint import Checkpoints
from fedloom.runs.folder import RunFolder

UNCERTAINTY = ("ece", "entropy", "mutual_information")
_OF_TABLE = ("", *(f"_{name}" for name in UNCERTAINTY))
COLUMNS = (
    "validation", "global_validation", *(f"{of}{kind}" for of in ("seen", "global") for kind in _OF_TABLE),
    "seen_masked", "global_masked", "round_seconds", "chosen",
)  # fmt: skip
WHOLE = ("fashion-mnist/*", "mnist/*", "kept/*", "cifar10/*", "norm-small/*")
SIZES = ("small", "medium", "large")
PREDICTORS = {  # method and predictor: its name, its quantity, colour and dash
    ("pfedbayes", "PM"): ("pFedBayes, PM", "seen", "#0072b2", "-"),
    ("pfedbayes", "GM"): ("pFedBayes, GM", "global", "#0072b2", "--"),
    ("fedavg", "GM"): ("FedAvg, GM", "global", "#d55e00", "--"),
    ("local", "PM"): ("Local, PM", "seen", "#555555", ":"),
}
KEPT = {  # the same with Adam's moments kept
    ("kept", "PM"): ("pFedBayes, moments kept, PM", "seen", "#009e73", "-"),
    ("kept", "GM"): ("pFedBayes, moments kept, GM", "global", "#009e73", "--"),
}
PAPER = {  # Table 1, percent
    ("fashion-mnist", "pFedBayes, PM"): ("89.05", "91.95", "93.01"),
    ("fashion-mnist", "pFedBayes, GM"): ("80.17", "82.33", "83.30"),
    ("fashion-mnist", "FedAvg, GM"): ("81.51", "83.90", "85.42"),
    ("mnist", "pFedBayes, PM"): ("94.13", "97.09", "98.79"),
    ("mnist", "pFedBayes, GM"): ("90.44", "92.33", "94.39"),
    ("mnist", "FedAvg, GM"): ("87.38", "90.60", "92.39"),
    ("cifar10", "pFedBayes, PM"): ("61.37", "73.94", "83.46"),
    ("cifar10", "pFedBayes, GM"): ("47.71", "60.84", "64.40"),
    ("cifar10", "FedAvg, GM"): ("44.24", "56.73", "79.05"),
}

SIZES_IN_PAPER = ("small", "medium", "large")


def paper_figures() -> dict[str, dict[str, float]]:
    """Return the paper's figures of Table 1 by pattern of runs and quantity."""
    found: dict[str, dict[str, float]] = {}
    for (data, name), figures in PAPER.items():
        method, predictor = name.lower().split(", ")
        for size, figure in zip(SIZES_IN_PAPER, figures, strict=True):
            kept = [f"kept/{data}/{size}/*"] if method == "pfedbayes" and data != "cifar10" else []
            for folder in (f"{data}/{size}/{method}/*", *kept):
                found.setdefault(folder, {})["seen" if predictor == "pm" else "global"] = float(figure)
    return found


TABLE_2 = (  # ρ, ζ, η₁, η₂; percent: PM and GM
    ("-1", "10", "0.001", "0.001", "97.38", "91.61"),
    ("-1", "10", "0.001", "0.005", "97.12", "90.32"),
    ("-1", "10", "0.005", "0.001", "96.73", "91.34"),
    ("-1", "10", "0.005", "0.005", "96.78", "91.10"),
    ("-2", "10", "0.001", "0.001", "97.45", "92.40"),
    ("-2", "10", "0.001", "0.005", "97.42", "91.35"),
    ("-2", "10", "0.005", "0.001", "97.36", "91.27"),
    ("-2", "10", "0.005", "0.005", "97.28", "90.01"),
    ("-3", "10", "0.001", "0.001", "97.08", "92.16"),
    ("-3", "10", "0.001", "0.005", "96.35", "90.47"),
    ("-3", "10", "0.005", "0.001", "96.64", "87.34"),
    ("-3", "10", "0.005", "0.005", "97.28", "90.22"),
    ("-1.5", "10", "0.001", "0.001", "97.38", "92.31"),
    ("-2.5", "0.5", "0.001", "0.001", "97.13", "89.88"),
    ("-2.5", "1", "0.001", "0.001", "97.41", "91.24"),
    ("-2.5", "5", "0.001", "0.001", "97.38", "93.03"),
    ("-2.5", "10", "0.001", "0.001", "97.18", "93.22"),
    ("-2.5", "20", "0.001", "0.001", "97.04", "92.77"),
)
TABLE_3 = (  # method, its folder, the settings that tell its runs apart, as shown: η₁, η₂, λ or α; percent: PM and GM
    *(
        ("pFedMe", f"pfedme/{one}", {}, (one, two, "15"), pm, gm)
        for one, two, pm, gm in (
            ("0.0005", "0.001", "83.22", "80.86"), ("0.001", "0.001", "89.35", "86.86"),
            ("0.005", "0.005", "94.35", "89.17"), ("0.01", "0.01", "95.16", "89.31"), ("0.1", "0.1", "19.73", "9.90"),
        )
    ),
    *(
        ("HeurFedAMP", "heurfedamp", {"lr": rate, "self_weight": weight}, (rate, "–", weight), pm, "–")
        for weight, found in (
            ("0.1", ("89.73", "89.91", "89.41", "88.68", "10.03")),
            ("0.5", ("93.32", "94.04", "94.90", "94.95", "93.29")),
        )
        for rate, pm in zip(("0.0005", "0.001", "0.005", "0.01", "0.1"), found, strict=True)
    ),
    *(
        ("Per-FedAvg", f"per-fedavg/{rate}", {}, (rate, "–", "–"), pm, "–")
        for rate, pm in (
            ("0.0005", "94.71"), ("0.001", "94.95"), ("0.005", "95.31"), ("0.01", "95.35"), ("0.1", "19.94")
        )
    ),
    *(
        ("FedAvg", "fedavg", {"lr": rate}, ("–", rate, "–"), "–", gm)
        for rate, gm in (("0.0005", "87.65"), ("0.001", "89.19"), ("0.005", "90.08"), ("0.01", "90.66"))
    ),
    *(
        ("FedProx", "fedprox-mu", {"mu": mu}, ("–", "0.001", mu), "–", gm)
        for mu, gm in (("0.01", "89.24"), ("0.1", "87.79"), ("1", "76.79"))
    ),
    *(
        ("FedProx", "fedprox", {"lr": rate}, ("–", rate, "0.001"), "–", gm)
        for rate, gm in (("0.0005", "87.64"), ("0.001", "89.26"), ("0.005", "89.84"), ("0.01", "90.70"))
    ),
    *(
        ("BNFed (PFNM)", "bnfed", {"lr": rate}, ("–", rate, "–"), "–", gm)
        for rate, gm in zip(
            ("0.0005", "0.001", "0.005", "0.01", "0.1", "0.2", "0.5"),
            ("9.90", "9.90", "9.90", "9.94", "55.98", "74.47", "80.31"),
            strict=True,
        )
    ),
    *(
        ("pFedGP", f"pfedgp/{rate}", {}, (rate, "–", "–"), pm, "–")
        for rate, pm in (("0.01", "90.52"), ("0.05", "92.14"), ("0.1", "91.23"))
    ),
)  # fmt: skip


def measured_too(folder: Path) -> dict[str, float]:
    """Return quantities that runs do not record: the global distribution's validation accuracy, and time in rounds."""
    seconds = sum(float(line.get("seconds", 0.0)) for line in RunFolder.open(folder).lines("journal.jsonl"))
    e = experiments.load_experiment(folder / "experiment.yaml")
    if e.algorithm.name != "pfedbayes":
        return {"round_seconds": float(f"{seconds:.4g}")}
    dataset = run_data.make_partition(e)
    parts = assemble.make_parts(e, dataset.manifest)
    v = Checkpoints(folder / "checkpoints").load("last").state["v"]
    noise = torch.randn(parts.settings.draws, v.shape[-1], generator=torch.Generator().manual_seed(0), dtype=v.dtype)
    predictor = Ensemble(parts.setup.model, MeanField(v).sample(parts.settings.noise * noise))
    right = total = 0
    for entry in dataset.manifest.clients:
        split = dataset.client(entry.id).validation
        assert split.y is not None
        right += int(predictor.log_probabilities(single(split.x)).argmax(1).eq(split.y).sum())
        total += len(split)
    return {"global_validation": float(f"{100 * right / total:.6g}"), "round_seconds": float(f"{seconds:.4g}")}


def tables(runs: Runs) -> Iterator[str]:
    """Yield all tables in the page's order."""
    yield _table_1(runs, "fashion-mnist")
    yield _table_1(runs, "mnist")
    yield _masked(runs)
    yield _less_fresh(runs)
    yield _zeta(runs)
    yield from _search(runs)
    yield _choices(runs)
    yield _table_2(runs)
    yield _still(runs)
    yield _table_3(runs)
    yield _calibration(runs)
    yield _table_1(runs, "cifar10")
    yield from _batch_norm(runs)
    yield from _search_vgg(runs)


def _alike(runs: Runs, folder: str, settings: Mapping[str, str]) -> list[Run]:
    """Return a folder's runs with these settings, given by the keys' last parts: one per seed."""

    def has(line: Evaluation) -> bool:
        found = {key.rpartition(".")[2]: value for key, value in line.settings.items()}
        return all(key not in found or float(found[key]) == float(value) for key, value in settings.items())

    return [run for run in runs.under(folder) if has(last(run))]


def _cell(found: Sequence[Run], quantity: str) -> str:
    """Return mean ± deviation over seeds of the last round, or the round in which a run diverged."""
    if left := [last(run).left for run in found if last(run).left is not None]:
        return f"left in {left[0]}"
    return spread([last(run)[quantity] for run in found], 2) if found else "not run"


def _table_2(runs: Runs) -> str:
    """Return pFedBayes with Adam's moments kept, for each of the paper's settings."""
    rows = []
    for rho, zeta, personal, shared, pm, gm in TABLE_2:
        settings = {"rho": rho, "zeta": zeta, "lr_personal": personal, "lr_global": shared}
        mnist, fashion = (
            _alike(runs, f"table-2/{data}/{'zeta' if rho == '-2.5' else 'rho*'}", settings)
            for data in ("mnist", "fashion-mnist")
        )
        shown = (pm, _cell(mnist, "seen"), gm, _cell(mnist, "global"), _cell(fashion, "seen"), _cell(fashion, "global"))
        rows.append((rho.replace("-", "−"), zeta, personal, shared, *shown))
    header = ("ρ", "ζ", "η₁", "η₂", "MNIST: PM, paper", "PM", "GM, paper", "GM", "Fashion-MNIST: PM", "GM")
    return table(header, rows)


def _still(runs: Runs) -> str:
    """Return Table 2's rows of ρ at ζ = 10 and η = 0.001, with the paper's noise and with that of public code."""
    rows = []
    for rho, _, _, _, pm, gm in sorted(
        (row for row in TABLE_2 if row[1:4] == ("10", "0.001", "0.001")), key=lambda row: -float(row[0])
    ):
        settings = {"rho": rho, "zeta": "10", "lr_personal": "0.001", "lr_global": "0.001"}
        cells = []
        for data, papers in (("mnist", (pm, gm)), ("fashion-mnist", ("", ""))):
            drawn = _alike(runs, f"table-2/{data}/{'zeta' if rho == '-2.5' else 'rho*'}", settings)
            still = _alike(runs, f"table-2/{data}/still", settings)
            for of, paper in zip(("seen", "global"), papers, strict=True):
                cells += [paper] if paper else []
                cells += [_cell(found, of) for found in (drawn, still)]
        rows.append((rho.replace("-", "−"), *cells))
    both = ("`noise: 1`", "`noise: 0.001`")
    header = (
        "ρ",
        "MNIST: PM, paper",
        *both,
        "GM, paper",
        *both,
        "Fashion-MNIST: PM, `noise: 1`",
        both[1],
        "GM, `noise: 1`",
        both[1],
    )
    return table(header, rows)


def _table_3(runs: Runs) -> str:
    """Return the same for the rival methods."""
    rows = []
    for name, folder, settings, shown, pm, gm in TABLE_3:
        cells = []
        for data in ("mnist", "fashion-mnist"):
            found = _alike(runs, f"table-3/{data}/{folder}", settings)
            if folder == "pfedme/0.1":  # λ times its step size is above 1
                cells.append(["refused"] * 2)
            else:
                cells.append([_cell(found, "seen") if pm != "–" else "–", _cell(found, "global") if gm != "–" else "–"])
        (own, shared), (fashion_own, fashion_shared) = cells
        rows.append((name, *shown, pm, own, gm, shared, fashion_own, fashion_shared))
    header = ("", "η₁", "η₂", "λ, α", "MNIST: PM, paper", "PM", "GM, paper", "GM", "Fashion-MNIST: PM", "GM")
    return table(header, rows)


def _over_seeds(runs: Runs, folder: str, quantity: str, kind: str) -> str:
    """Return mean ± deviation over seeds of ``_of``."""
    return spread([_of(run, quantity, kind) for run in runs.under(folder)], 2)


def _of(run: Run, quantity: str, kind: str) -> float:
    """Return test accuracy in the last round, the round chosen on validation, or the best round (the paper's figure).

    Of FedAvg and Local on CIFAR-10, only one evaluation was kept, which is all three.
    """
    if kind == "_highest":
        return max(line[quantity] for line in run)
    return (chosen(run) if kind == "_validated" and len(run) > 1 else last(run))[quantity]


def _table_1(runs: Runs, data: str) -> str:
    rows = []
    methods = PREDICTORS if data == "cifar10" else KEPT | PREDICTORS
    for i, size in enumerate(SIZES):
        for (method, _), (name, quantity, *_) in methods.items():
            folder = f"kept/{data}/{size}" if method == "kept" else f"{data}/{size}/{method}"
            best = [_of(run, quantity, "_highest") for run in runs.under(folder)]
            each = [", ".join(f"{value:.2f}" for value in best)] if len(best) > 1 else []
            paper = PAPER.get((data, name.replace(", moments kept", "")), ("–",) * 3)[i]
            highest, *over = (_over_seeds(runs, folder, quantity, kind) for kind in ("_highest", "_validated", ""))
            rows.append((size, name, paper, highest, *each, *over))
    each = ["each seed"] if len(rows[0]) == 7 else []
    header = ("size", "", "paper", "highest of all rounds", *each, "round picked on validation", "last round")
    made = table(header, rows, left=2)
    return made.replace("|---:|---:|---:|---:|---:|", "|---:|---:|---|---:|---:|", 1) if each else made


def _masked(runs: Runs) -> str:
    """Return results with moments kept in both readings, in the round chosen on validation, mean ± deviation."""
    rows = []
    for data in ("fashion-mnist", "mnist"):
        for i, size in enumerate(SIZES):
            cells: list[str] = []
            for (_, predictor), (_, quantity, *_) in KEPT.items():
                picked = [chosen(run) for run in runs.under(f"kept/{data}/{size}")]
                cells.append(PAPER[data, f"pFedBayes, {predictor}"][i])
                cells += [spread([line[of] for line in picked], 2) for of in (quantity, f"{quantity}_masked")]
            rows.append((data, size, *cells))
    return table(
        ("", "size", "PM: paper", "among all labels", "among its own", "GM: paper", "all", "own"), rows, left=2
    )


def _less_fresh(runs: Runs) -> str:
    """Return results with moments kept minus fresh ones with the same seed."""
    rows = []
    for data in ("fashion-mnist", "mnist"):
        for size in SIZES:
            cells: list[str] = []
            for _, quantity, *_ in KEPT.values():
                for kind in ("_highest", "_validated"):
                    kept, fresh = (
                        [_of(run, quantity, kind) for run in runs.under(folder)]
                        for folder in (f"kept/{data}/{size}", f"{data}/{size}/pfedbayes")
                    )
                    cells.append(difference(kept, fresh))
            rows.append((data, size, *cells))
    header = ("PM, highest", "round picked on validation", "GM, highest", "round picked on validation")
    return table(("moments kept, minus fresh", "size", *header), rows, left=2)


def _zeta(runs: Runs) -> str:
    """Return validation accuracy on the small size after the last round, by ζ, seed 1."""
    rows = []
    for data in ("fashion-mnist", "mnist"):
        lower = (last(runs[f"kept-zeta/{data}/zeta={zeta},seed=1"]) for zeta in ("2.5", "1"))
        rows.append(
            (data, *(f"{line['validation']:.1f}" for line in (last(runs[f"kept/{data}/small/seed=1"]), *lower)))
        )
    return table(("small, seed 1, PM on validation", "ζ = 10", "2.5", "1"), rows)


def _tried(runs: Runs, folder: str, **settings: float) -> Evaluation | None:
    """Return a search's run with these settings, given by the keys' last parts."""

    def has(line: Evaluation) -> bool:
        found = {key.rpartition(".")[2]: value for key, value in line.settings.items()}
        return all(key in found and float(found[key]) == value for key, value in settings.items())

    return next((last(run) for run in runs.under(folder) if has(last(run))), None)


def _shown(found: Mapping[object, Evaluation | None], *, both: bool = False) -> dict[object, str]:
    """Return the settings' validation accuracy, the highest in bold; PM / GM if both were measured."""
    whole = [line for line in found.values() if line and line.left is None]
    best = max(whole, key=lambda line: (line.values.get("chosen", 0.0), line["validation"]))
    cells = {}
    for key, line in found.items():
        if line is None:
            cells[key] = ""
        elif line.left is not None:
            cells[key] = f"left in {line.left}"
        else:
            shown = f"{line['validation']:.1f}" + (f" / {line['global_validation']:.1f}" if both else "")
            cells[key] = f"**{shown}**" if line is best else shown
    return cells


def _search(runs: Runs) -> Iterator[str]:
    yield _search_of(runs, "tune/pfedbayes", "", (0.001, 0.003, 0.01))
    yield _search_of(runs, "tune/pfedbayes-kept", "moments kept", (0.001, 0.003, 0.01, 0.03))
    yield _grid(runs, "tune/fedavg", "η", (0.01, 0.03, 0.05, 0.1, 0.2, 0.3), "momentum", MOMENTA)
    steps = {300.0: "300 steps", 1000.0: "1000", 3000.0: "3000"}
    yield _grid(runs, "tune/local", "η", (0.01, 0.03, 0.1, 0.3, 0.5, 1), "steps", steps)


def _search_of(runs: Runs, folder: str, about: str, personal: Sequence[float]) -> str:
    zetas, shared = (1, 10), (0.001, 0.003, 0.01)
    found: dict[object, Evaluation | None] = {
        (z, p, g): _tried(runs, folder, zeta=z, lr_personal=p, lr_global=g)
        for p in personal
        for z in zetas
        for g in shared
    }
    cells = _shown(found, both=True)
    rows = [
        (f"η₁ = {p}" if p == personal[0] else f"{p}", *(cells[z, p, g] for z in zetas for g in shared))
        for p in personal
    ]
    return table((about, "ζ = 1, η₂ = 0.001", "0.003", "0.01", "ζ = 10, η₂ = 0.001", "0.003", "0.01"), rows)


MOMENTA = {0.0: "no momentum", 0.5: "0.5", 0.9: "0.9"}


def _grid(runs: Runs, folder: str, corner: str, rates: Sequence[float], key: str, values: Mapping[float, str]) -> str:
    found: dict[object, Evaluation | None] = {
        (value, rate): _tried(runs, folder, **{key: value, "lr": rate}) for value in values for rate in rates
    }
    cells = _shown(found)
    first = "η = " if corner != "η" else ""
    header = (corner, *(f"{first}{rate:g}" if rate == rates[0] else f"{rate:g}" for rate in rates))
    return table(header, [(name, *(cells[value, rate] for rate in rates)) for value, name in values.items()])


def _choices(runs: Runs) -> str:
    changes = {
        "R = 5": ("steps", "steps=5"),
        "R = 20": ("steps", "steps=20"),
        "b = 20": ("batch_size", "batch_size=20"),
        "b = 100": ("batch_size", "batch_size=100"),
        "K = 2": ("samples", "samples=2"),
        "q_i starts at the global distribution at every visit (`reset`)": ("reset", "reset=true"),
        "moments matched (`aggregation: moments`, Lemma A.2)": ("aggregation", "aggregation=moments"),
        "β = 0.5": ("beta", "beta=0.5"),
    }
    used = _tried(runs, "tune/pfedbayes", zeta=1, lr_personal=0.003, lr_global=0.003)
    named = {"settings of the tables: R = 10, b = 50, K = 1, β = 1, q_i kept, (μ, ρ) averaged": used}
    named |= {name: last(runs[f"choices/algorithm.{folder}/{run}"]) for name, (folder, run) in changes.items()}
    rows = []
    for name, line in named.items():
        assert line is not None
        seconds = f"{line['round_seconds']:.0f}"
        about = ("about " if line is used else "") + seconds
        rows.append((name, f"{line['validation']:.1f}", f"{line['global_validation']:.1f}", about))
    return table(("", "PM", "GM", "CPU s in rounds"), rows)


def _calibration(runs: Runs) -> str:
    rows = []
    for size in SIZES:
        for (method, _), (name, quantity, *_) in PREDICTORS.items():
            cells = []
            for data in ("fashion-mnist", "mnist"):
                lines = [last(run) for run in runs.under(f"{data}/{size}/{method}")]
                for what in UNCERTAINTY:
                    values = [line[f"{quantity}_{what}"] for line in lines if f"{quantity}_{what}" in line.values]
                    cells.append(f"{statistics.fmean(values):.3f}")
            rows.append((size, name, *cells))
    three = ("entropy", "mutual information")
    return table(("size", "", "Fashion-MNIST: ECE", *three, "MNIST: ECE", *three), rows, left=2)


def _search_vgg(runs: Runs) -> Iterator[str]:
    rhos = {
        -2.5: "ρ = −2.5 (σ = 0.079, the paper's)",
        -3.25: "ρ = −3.25 (0.038)",
        -4.0: "ρ = −4 (0.018)",
        -5.0: "ρ = −5 (0.007)",
    }
    rates, folder = (0.001, 0.003, 0.01), "tune-cifar10/pfedbayes"

    def shown(line: Evaluation | None) -> str:
        return f"{line['validation']:.1f}" if line else ""

    rows = [
        (name, *(shown(_tried(runs, folder, rho=rho, lr_personal=rate, zeta=1)) for rate in rates))
        for rho, name in rhos.items()
    ]
    yield table(("pFedBayes, ζ = 1, η₂ = 0.003", "η₁ = 0.001", "0.003", "0.01"), rows)
    zetas = (0.03, 0.1, 0.3, 1, 10)
    cells = _shown({zeta: _tried(runs, folder, rho=-4, lr_personal=0.003, zeta=zeta) for zeta in zetas})
    header = ("pFedBayes, ρ = −4, η₁ = η₂ = 0.003", "ζ = 0.03", *(f"{zeta:g}" for zeta in zetas[1:]))
    yield table(header, [("", *cells.values())])
    yield _grid(runs, "tune-cifar10/fedavg", "FedAvg", (0.01, 0.03, 0.05, 0.1, 0.2), "momentum", MOMENTA)
    local = Runs({name: run for name, run in runs.items() if name.startswith("tune-cifar10/local/")})
    short = Runs({name: run for name, run in local.items() if not name.endswith("steps=1000")})
    made = _grid(short, "tune-cifar10/local", "Local", (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2), "momentum", MOMENTA)
    long = last(local["tune-cifar10/local/steps=1000"])["validation"]
    at_300 = _tried(short, "tune-cifar10/local", lr=0.005, momentum=0.9)
    assert at_300 is not None
    cell = f"| {at_300['validation']:.1f}; 1000 steps: **{long:.1f}** |"
    yield made.replace(f"| **{at_300['validation']:.1f}** |", cell, 1)


def _batch_norm(runs: Runs) -> Iterator[str]:
    """Yield tables of the VGG with batch normalization: the search, and the small size with full participation."""
    rows = []
    for zeta, rho in ((1.0, -2.5), (1.0, -4.0), (0.1, -4.0)):
        for rate in (0.001, 0.003):
            both = (
                _tried(runs, f"tune-cifar10/{folder}", zeta=zeta, rho=rho, lr_personal=rate)
                for folder in ("pfedbayes", "norm-pfedbayes")
            )
            cells = (f"{line['validation']:.1f}" if line else "" for line in both)
            rows.append((f"{zeta:g}", f"{rho:g}".replace("-", "−"), f"{rate}", *cells))
    yield table(("ζ", "ρ", "η₁", "original VGG", "with batch normalization"), rows, left=0)
    momenta = {value: name for value, name in MOMENTA.items() if value}
    fedavg = "FedAvg, batch normalization"
    yield _grid(runs, "tune-cifar10/norm-fedavg", fedavg, (0.03, 0.05, 0.1), "momentum", momenta)
    local = "Local, batch normalization"
    yield _grid(runs, "tune-cifar10/norm-local", local, (0.005, 0.01, 0.02), "momentum", momenta)
    rows = []
    for (method, _), (name, quantity, *_) in PREDICTORS.items():
        paper = PAPER.get(("cifar10", name), ("–",))[0]
        as_is = _over_seeds(runs, f"cifar10/small/{method}", quantity, "")
        with_it = (_over_seeds(runs, f"norm-small/{method}", quantity, kind) for kind in ("_validated", ""))
        rows.append((name, paper, as_is, *with_it))
    header = ("small", "paper", "as in the table above, last round", "round picked on validation", "last round")
    yield table(header, rows)


def curves(runs: Runs) -> Figure:
    """Draw test accuracy over rounds, mean over seeds; circles are the paper's values (filled PM, open GM)."""
    figure = Figure(figsize=(FULL, 5.2), layout="constrained")
    grid = figure.subplots(2, 3, sharey="row")
    for data, row in zip(("fashion-mnist", "mnist"), grid, strict=True):
        for i, (size, axes) in enumerate(zip(SIZES, row, strict=True)):
            for (method, predictor), (name, quantity, colour, dash) in PREDICTORS.items():
                found = runs.under(f"{data}/{size}/{method}")
                lines = [line for run in found for line in run if quantity in line.values]
                rounds = sorted({line.round for line in lines})
                means = [statistics.fmean(line[quantity] for line in lines if line.round == r) for r in rounds]
                if method == "local":
                    axes.axhline(means[-1], color=colour, linestyle=dash, label=name)
                else:
                    start = 1 if rounds[0] == 0 else 0
                    axes.plot(rounds[start:], means[start:], color=colour, linestyle=dash, label=name)
                if method == "pfedbayes":
                    fill = "full" if predictor == "PM" else "none"
                    axes.plot([rounds[-1]], [float(PAPER[data, name][i])], "o", color=colour, fillstyle=fill)
            axes.set(title=f"{data}, {size}", xlabel="round")
        row[0].set_ylabel("test accuracy, %")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


FIGURES = {"curves": curves}
