"""Command line of scripts that run other authors' code on our clients, given their checkout and a run of ours."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedloom.data.federated import FederatedDataset
from fedloom.engine import run_data
from fedloom.experiment import load_experiment
from fedloom.runs.files import EXPERIMENT


def parser(doc: str | None, *, rounds: int, every: int, lr: float) -> argparse.ArgumentParser:
    """Return the common argument parser with one script's defaults."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("checkout", type=Path)
    made.add_argument("run", type=Path, help="folder of the run whose partition is used")
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--every", type=int, default=every)
    made.add_argument("--lr", type=float, default=lr)
    made.add_argument("--seed", type=int, default=1)
    return made


def opened(
    arguments: argparse.ArgumentParser, *, file: str, checkout: str
) -> tuple[argparse.Namespace, FederatedDataset]:
    """Return the arguments and the run's clients, and make ``file`` of the checkout importable.

    Exit with code 2 and a message if there is no such file or no such run.
    """
    given = arguments.parse_args()
    needed = ((given.checkout / file, checkout), (given.run / EXPERIMENT, "a run's folder"))
    for path, allowed in needed:
        if not path.exists():
            arguments.error(f"{path} does not exist; give {allowed}")
    sys.path.insert(0, str(given.checkout.resolve()))
    return given, run_data.make_partition(load_experiment(given.run / EXPERIMENT))
