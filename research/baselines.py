"""Baselines for the papers' methods: the same number of settings per method, one chosen on validation and tested.

    .venv/bin/python research/baselines.py robust          papers/002, Experiment 1: two ways of distributing classes
    .venv/bin/python research/baselines.py adapt           papers/002, Experiment 2, both data sets
    .venv/bin/python research/baselines.py adapt-whole     Fashion-MNIST with the paper's network and all images
    .venv/bin/python research/baselines.py table-1         papers/003, Table 1; --tests selects parts of it
    .venv/bin/python research/baselines.py vowel           eighteen methods, speakers as clients
    .venv/bin/python research/baselines.py vowel-later     four more, which docs/results/baselines.md does not show
    .venv/bin/python research/baselines.py qmnist          the rows of papers/001, writers of digits as clients
    .venv/bin/python research/baselines.py cifar10         papers/001, Table 1, n = 100, 1000 rounds

A method's settings run with seed 1. The setting with the highest validation accuracy in the last round runs with the
test seeds and is tested there once. An interrupted script continues where it stopped. ``--methods`` selects methods;
``--searched`` takes the search from the compact file and runs only the tests. Every run equals `fedloom run` with the
regime's file and the overrides in this script. Tables and results: docs/results/baselines.md; compact file:
`python research/results.py fold baselines runs/baselines`.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from summaries import Evaluation, Runs, evaluations, read

from fedloom.engine.jobs import Job, JobObserver
from fedloom.engine.observer import RunObserver
from fedloom.engine.options import RunOptions
from fedloom.errors import InterruptedRun
from fedloom.experiment import Point, load_experiment
from fedloom.tuning.sweep import run_points

ROOT = Path(__file__).parents[1]
Setting = Mapping[str, object]
"""Values by key below ``algorithm``; a key may be a short form for several keys."""

BOTH = {"lr": ("local.lr", "personal.lr")}
"""Axis that sets one step size for both of a client's models."""


@dataclass(frozen=True)
class Method:
    """Method in a regime.

    ``algorithm`` is the value of that key (None: the file's), ``grid`` the values of each axis, ``axes`` the keys of an
    axis if they are not its name, and ``more`` other overrides.
    """

    algorithm: str | None
    grid: Mapping[str, Sequence[object]]
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    more: tuple[str, ...] = ()

    def settings(self) -> list[Setting]:
        """Return every point of the grid."""
        return [dict(zip(self.grid, point, strict=True)) for point in itertools.product(*self.grid.values())]

    def overrides(self, setting: Setting) -> list[str]:
        """Return the overrides for ``fedloom run --set``."""
        keys = [(key, value) for name, value in setting.items() for key in self.axes.get(name, (name,))]
        algorithm = [] if self.algorithm is None else [f"algorithm={self.algorithm}"]
        return [*algorithm, *self.more, *(f"algorithm.{key}={value}" for key, value in keys)]


@dataclass(frozen=True)
class Regime:
    """Regime in which methods are compared: the overrides of the search, and the tests with their seeds."""

    file: str
    methods: Mapping[str, Method]
    search: tuple[str, ...]
    tests: Mapping[str, tuple[str, ...]]
    seeds: Sequence[int]


def named(setting: Setting) -> str:
    """Return a folder name for a setting."""
    return ",".join(f"{key}={value}" for key, value in setting.items()) or "as-is"


# --- papers/002 -------------------------------------------------------------------------------------------------------

TAU = "steps: 5, batch_size: 32, momentum: 0.0, lr: 0.1"
RATES = (0.01, 0.1, 0.5)
ROBUST = {
    "fedavg-examples": Method(
        f"{{name: fedavg, local: {{{TAU}}}}}", {"local.lr": RATES, "local.momentum": (0.0, 0.5, 0.9)}
    ),
    "fedavg-uniform": Method(
        f"{{name: fedavg, weighting: uniform, local: {{{TAU}}}}}",
        {"local.lr": RATES, "local.momentum": (0.0, 0.5, 0.9)},
    ),
    "comfedl": Method(None, {"local.lr": RATES, "gamma": (0.1, 1, 5)}),
    "q-fedavg": Method(f"{{name: q-fedavg, local: {{{TAU}}}}}", {"local.lr": RATES, "q": (0.2, 0.5, 2)}),
    "drfa": Method(f"{{name: drfa, local: {{{TAU}}}}}", {"local.lr": RATES, "gamma": (0.008, 0.08, 0.8)}),
    "afl": Method(f"{{name: afl, local: {{{TAU}}}}}", {"local.lr": RATES, "weights_lr": (0.01, 0.1, 1)}),
    "fine-tuning": Method(
        f"{{name: fedavg, weighting: uniform, local: {{{TAU}}}}}",
        {"local.lr": RATES, "personalize_steps": (5, 20, 100)},
    ),
    "local": Method(
        f"{{name: local, local: {{{TAU}}}}}",
        {"local.lr": RATES, "local.steps": (50, 200, 500)},
        more=("federation.rounds=0",),
    ),
}


def imbalanced(mix: str) -> Regime:
    """Return the regime of Experiment 1: one client with 5000 images, nine with 20."""
    sizes = "scheme: imbalanced, clients: 10, large_size: 5000, small_size: 20, test_per_client: 200"
    where = f"data.partition={{{sizes}{mix}}}"
    last, every = "evaluation.every=100", "evaluation.every=20"
    return Regime("comfedl-robust", ROBUST, (last, where), {"test": (every, where)}, range(2, 9))


META = {"local.lr": (0.03, 0.05, 0.1), "inner_lr": (0.01, 0.05)}
ADAPT = {
    "one-step": Method(
        f"{{name: fedavg, weighting: uniform, personalize_steps: 1, local: {{{TAU}}}}}",
        {"local.lr": (0.01, 0.03, 0.05, 0.1, 0.2, 0.3)},
    ),
    "comfedl": Method(None, META, more=("algorithm.losses_on=all",)),
    "per-fedavg": Method(f"{{name: per-fedavg, weighting: uniform, hessian: exact, local: {{{TAU}}}}}", META),
    "tr-maml": Method(f"{{name: tr-maml, weights_lr: 0.08, hessian: exact, local: {{{TAU}}}}}", META),
    "ditto": Method(
        f"{{name: ditto, weighting: uniform, personalize_steps: 5, local: {{{TAU}}}, personal: {{{TAU}}}}}",
        {"lr": (0.05, 0.1, 0.2), "proximity": (0.1, 1)},
        axes=BOTH,
    ),
    "fine-tuning": Method(
        f"{{name: fedavg, weighting: uniform, local: {{{TAU}}}}}",
        {"local.lr": (0.05, 0.1, 0.2), "personalize_steps": (5, 50)},
    ),
    "local": Method(
        f"{{name: local, local: {{{TAU}}}}}",
        {"local.lr": (0.03, 0.1, 0.2), "local.steps": (125, 250)},
        more=("federation.rounds=0",),
    ),
}

WHOLE = ("model.filters=32", "data.partition.train_per_client=null", "data.partition.test_per_client=null")
"""Overrides for the paper's network and all images; the file has a version that runs in minutes."""

# --- papers/003 -------------------------------------------------------------------------------------------------------

TEN = "steps: 10, batch_size: 50, momentum: 0.0, lr: 0.1"
OWN = ("federation.rounds=0",)
TABLE_1 = {
    "fedavg": Method(
        f"{{name: fedavg, weighting: uniform, local: {{{TEN}}}}}",
        {"local.lr": (0.05, 0.1, 0.2, 0.3), "local.momentum": (0.5, 0.9)},
    ),
    "fedprox": Method(
        f"{{name: fedprox, weighting: uniform, local: {{{TEN}}}}}",
        {"local.lr": (0.1, 0.2), "local.momentum": (0.5, 0.9), "mu": (0.001, 0.01)},
    ),
    "per-fedavg": Method(
        f"{{name: per-fedavg, weighting: uniform, local: {{{TEN}}}}}",
        {"local.lr": (0.1, 0.3), "inner_lr": (0.01, 0.1), "personalize_steps": (1, 10)},
    ),
    "pfedme": Method(
        "{name: pfedme, weighting: uniform, steps: 10, batch_size: 50, proximity: 15, personalize_epochs: 10}",
        {"lr": (0.01, 0.05), "inner_lr": (0.01, 0.02, 0.03, 0.06)},
    ),
    "heurfedamp": Method(
        f"{{name: heurfedamp, local: {{{TEN}}}}}",
        {"local.lr": (0.03, 0.1), "local.momentum": (0.0, 0.9), "self_weight": (0.1, 0.5)},
    ),
    "pfnm": Method(
        f"{{name: pfnm, local: {{{TEN}}}}}",
        {"local.lr": (0.1, 0.5), "output": ("classes", "uniform"), "sigma0": (1, 10)},
    ),
    "fine-tuning": Method(
        f"{{name: fedavg, weighting: uniform, local: {{{TEN}}}}}",
        {"local.lr": (0.1, 0.2), "local.momentum": (0.5, 0.9), "personalize_steps": (20, 200)},
    ),
    "local": Method(
        f"{{name: local, local: {{{TEN}}}}}",
        {"local.lr": (0.1, 0.3), "local.steps": (300, 1000), "local.momentum": (0.0, 0.9)},
        more=OWN,
    ),
}

BAYES = {"lr_personal": (0.001, 0.003), "lr_global": (0.001, 0.003), "zeta": (1, 10)}
TABLE_1 |= {
    "pfedgp": Method("{name: pfedgp}", {"lr": (0.01, 0.03, 0.05, 0.1), "outputscale": (1, 8)}),
    "pfedbayes": Method(None, BAYES),
    "pfedbayes-kept": Method(None, BAYES, more=("algorithm.moments=kept",)),
}


def dealt(data: str, size: str) -> tuple[str, ...]:
    """Return the overrides for a partition of Table 1."""
    train, test = {"small": (50, 950), "medium": (200, 800)}[size]
    counts = (f"data.partition.train_per_class={train}", f"data.partition.test_per_class={test}")
    return (f"name=table-1-{data}-{size}", f"data.dataset={data}", *counts)


# --- speakers as clients ----------------------------------------------------------------------------------------------

SPEAKER = "epochs: 2, batch_size: 8, lr: 0.1, momentum: 0.0"
STEP = {"lr": (0.03, 0.1, 0.3, 0.6)}


def of_speakers(algorithm: str, *keys: str, more: tuple[str, ...] = ()) -> Method:
    """Return a method with four step sizes, each applied to ``keys``."""
    return Method(algorithm.replace("SGD", f"{{{SPEAKER}}}"), STEP, {"lr": keys or ("local.lr",)}, more)


VOWEL = {
    "local": of_speakers("{name: local, local: {epochs: 150, batch_size: 8, momentum: 0.0}}", more=OWN),
    "fedavg": of_speakers("{name: fedavg, local: SGD}"),
    "fine-tuning": of_speakers("{name: fedavg, local: SGD, personalize_steps: 100}"),
    "per-fedavg": of_speakers("{name: per-fedavg, local: SGD, personalize_steps: 10}", "local.lr", "inner_lr"),
    "fedrep": of_speakers("{name: fedrep, local: SGD, head: SGD}", "local.lr", "head.lr"),
    "pfedme": of_speakers("{name: pfedme, steps: 4, batch_size: 8, proximity: 1, inner_steps: 3}", "lr", "inner_lr"),
    "knn-per": of_speakers("{name: knn-per, scale: 1, local: SGD}"),
    "pfedhn": of_speakers("{name: pfedhn, local: SGD}"),
    "pefll": of_speakers(
        "{name: pefll, local: SGD, embedding: {network: mlp}, descriptor: {evaluate: all, standardize: first}, "
        "server: {rule: adam, lr: 0.001, clip: 50.0}}"
    ),
    "fedprox": of_speakers("{name: fedprox, local: SGD, personalize_steps: 100}"),
    "ditto": of_speakers("{name: ditto, local: SGD, personal: SGD, personalize_steps: 100}", "local.lr", "personal.lr"),
    "apfl": of_speakers("{name: apfl, local: SGD, personalize_steps: 100}"),
    "scaffold": of_speakers("{name: scaffold, local: {epochs: 2, batch_size: 8, lr: 0.1}, personalize_steps: 100}"),
    "fedadam": of_speakers("{name: fedadam, local: SGD, personalize_steps: 100}"),
    "fedper": of_speakers("{name: fedper, local: SGD}"),
    "fedbabu": of_speakers("{name: fedbabu, local: SGD, personalize_epochs: 50}"),
    "lg-fedavg": of_speakers("{name: lg-fedavg, local: SGD}"),
    "fedrod": of_speakers("{name: fedrod, local: SGD}"),
}

LATER = {
    "fedala": of_speakers("{name: fedala, local: SGD, personalize_steps: 100}"),
    "feddyn": of_speakers("{name: feddyn, local: SGD, personalize_steps: 100}"),
    "moon": of_speakers("{name: moon, local: SGD, personalize_steps: 100}"),
    "fedproto": of_speakers("{name: fedproto, local: SGD, personalize_steps: 100}"),
}

# --- papers/001 -------------------------------------------------------------------------------------------------------


def rows_of_table_1(sgd: str, alone: str, fine_tuning: int, rates: Sequence[float]) -> dict[str, Method]:
    """Return the eight rows of Table 1, and FedAvg + fine-tuning, with these step sizes."""

    def of(algorithm: str, *keys: str, more: tuple[str, ...] = ()) -> Method:
        return Method(algorithm.replace("SGD", f"{{{sgd}}}"), {"lr": rates}, {"lr": keys or ("local.lr",)}, more)

    return {
        "local": of(f"{{name: local, local: {{{alone}}}}}", more=OWN),
        "fedavg": of("{name: fedavg, local: SGD}"),
        "fine-tuning": of(f"{{name: fedavg, local: SGD, personalize_steps: {fine_tuning}}}"),
        "per-fedavg": of("{name: per-fedavg, local: SGD, personalize_steps: 10}", "local.lr", "inner_lr"),
        "fedrep": of(
            "{name: fedrep, local: {epochs: 1, batch_size: 32}, head: {epochs: 5, batch_size: 32}}",
            "local.lr",
            "head.lr",
        ),
        "pfedme": of("{name: pfedme, steps: 50, batch_size: 32, proximity: 15, inner_steps: 3}", "lr", "inner_lr"),
        "knn-per": of("{name: knn-per, local: SGD}"),
        "pfedhn": of("{name: pfedhn, local: SGD}"),
        "pefll": of(
            "{name: pefll, local: SGD, descriptor: {evaluate: all, standardize: first}, hypernetwork: "
            "{output_relu: false}, server: {rule: adam, lr: 0.0002, clip: 50.0}}"
        ),
    }


CIFAR10 = rows_of_table_1(
    "steps: 50, batch_size: 32, momentum: 0.9, clip: 50.0",
    "epochs: 200, batch_size: 32, momentum: 0.9, clip: 50.0",
    50,
    (0.001, 0.003, 0.01, 0.03),
)
QMNIST = rows_of_table_1(
    "steps: 20, batch_size: 16, clip: 50.0", "steps: 300, batch_size: 16, clip: 50.0", 20, (0.003, 0.01, 0.03, 0.06)
)

WRITERS = ("data.partition.clients=40", "federation.rounds=30", "evaluation.every=30")
"""A fifth of the file's writers and half of its rounds, for every method; all of them would take 80 CPU minutes."""

FLOAT32 = "model.precision=float32"
"""Precision in place of the file's bfloat16, which is faster only on processors with matrix instructions (AMX)."""

REGIMES = {
    "robust-two-classes": imbalanced(", classes_per_client: 2"),
    "robust-iid": imbalanced(""),
    "adapt": Regime(
        "comfedl-damaml",
        ADAPT,
        ("federation.rounds=25", "evaluation.every=25"),
        {"test": ("evaluation.every=10",)},
        (2, 3, 4),
    ),
    "adapt-mnist": Regime(
        "comfedl-damaml",
        ADAPT,
        ("data.dataset=mnist", "federation.rounds=25", "evaluation.every=25"),
        {"test": ("data.dataset=mnist", "evaluation.every=10")},
        (2, 3, 4),
    ),
    "adapt-whole": Regime(
        "comfedl-damaml",
        ADAPT,
        ("federation.rounds=25", "evaluation.every=25", *WHOLE),
        {"test": ("evaluation.every=10", *WHOLE)},
        (2, 3, 4),
    ),
    "table-1": Regime(
        "pfedbayes-fashion-mnist",
        TABLE_1,
        ("federation.rounds=25", "evaluation.every=25", *dealt("mnist", "small"), "data.partition.test_per_class=20"),
        {
            f"{data}-{size}": ("federation.rounds=100", "evaluation.every=100", *dealt(data, size))
            for data in ("fashion-mnist", "mnist")
            for size in ("small", "medium")
        },
        (1, 2, 3),
    ),
    "vowel": Regime("vowel", VOWEL, ("evaluation.every=150",), {"test": ("evaluation.every=150",)}, (2, 3, 4)),
    "vowel-later": Regime("vowel", LATER, ("evaluation.every=150",), {"test": ("evaluation.every=150",)}, (2, 3, 4)),
    "qmnist": Regime("qmnist-writers", QMNIST, WRITERS, {"test": WRITERS}, (2, 3, 4)),
    "cifar10": Regime(
        "pefll-cifar10",
        CIFAR10,
        ("federation.rounds=100", "evaluation.every=100", FLOAT32),
        {"test": ("federation.rounds=1000", "evaluation.every=1000", FLOAT32)},
        (1,),
    ),
}
PARTS = {"robust": ("robust-two-classes", "robust-iid"), "adapt": ("adapt", "adapt-mnist")}


# --- running ----------------------------------------------------------------------------------------------------------


def run(folder: Path, file: str, points: Mapping[str, Sequence[str]], parallel: int) -> None:
    """Start or resume runs, given their names and overrides; a run that diverges is a result too."""
    experiments = [
        Point(name, tuple(those), load_experiment(ROOT / "experiments" / f"{file}.yaml", those))
        for name, those in points.items()
    ]
    options = RunOptions(resume=True, report=False, signals=True)
    for name, error in run_points(experiments, folder, options, Tells(), parallel=parallel).items():
        print(f"{folder / name}: {error}", flush=True)


class Tells(JobObserver):
    """Observer that prints the start of each run."""

    def begins(self, job: Job, *, beside: bool) -> RunObserver:
        """Print the run's number and name."""
        print(f"{job.number} of {job.count}: {job.name}", flush=True)
        return RunObserver()


def finished(runs: Path, folder: str, method: Method) -> Runs:
    """Return the evaluations of all runs in a search, by their names in the compact file."""
    found = Runs()
    for setting in method.settings():
        name = f"{folder}/{named(setting)}"
        path = runs / name
        if (path / "experiment.yaml").exists() and (run := evaluations(path, name)[1]):
            found[name] = run
    return found


def tried(runs: Runs, folder: str, method: Method) -> list[tuple[Setting, Evaluation | None]]:
    """Return each setting with its last evaluation; None if it diverged or was not run."""
    there = [(setting, runs.get(f"{folder}/{named(setting)}")) for setting in method.settings()]
    return [(setting, None if run is None or run[-1].left is not None else run[-1]) for setting, run in there]


def chosen(runs: Runs, folder: str, method: Method) -> Setting:
    """Return the setting with the highest validation accuracy in the last round, the first on ties.

    Raises
    ------
    SystemExit
        If the search has no finished run.
    """
    there = [(setting, line) for setting, line in tried(runs, folder, method) if line is not None]
    if not there:
        raise SystemExit(f"{folder} has no finished run of the search; run it without --searched")
    return max(there, key=lambda both: both[1]["validation"])[0]


def main() -> None:
    """Run the searches and the tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, *REGIMES])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "baselines", help="folder of the runs")
    parser.add_argument("--methods", help="methods to run, separated by commas; by default all")
    parser.add_argument("--tests", help="tests to run, separated by commas; none: only the search")
    parser.add_argument("--parallel", type=int, default=1, help="number of parallel runs, each in its own process")
    parser.add_argument("--searched", type=Path, metavar="CSV", help="compact file with the results of the search")
    given = parser.parse_args()
    common = ("runtime.workers=0",)
    for name in PARTS.get(given.part, (given.part,)):
        regime, runs = REGIMES[name], given.runs / name
        methods = given.methods.split(",") if given.methods else list(regime.methods)
        for method in [] if given.searched else methods:
            about = regime.methods[method]
            points = {
                named(setting): (*common, "seed=1", *regime.search, *about.overrides(setting))
                for setting in about.settings()
            }
            print(name, "search", method, flush=True)
            run(runs / "search" / method, regime.file, points, given.parallel)
        tests = given.tests.split(",") if given.tests else list(regime.tests)
        for test, method in itertools.product([] if tests == ["none"] else tests, methods):
            about = regime.methods[method]
            search = f"{name}/search/{method}"
            known = read(given.searched) if given.searched else finished(given.runs, search, about)
            those = about.overrides(chosen(known, search, about))
            points = {f"seed={seed}": (*common, f"seed={seed}", *regime.tests[test], *those) for seed in regime.seeds}
            print(name, test, method, flush=True)
            run(runs / test / method, regime.file, points, given.parallel)


if __name__ == "__main__":
    try:
        main()
    except InterruptedRun as error:
        raise SystemExit(f"{error}; run the same command again to continue") from None
