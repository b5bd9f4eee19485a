"""Accuracy of a PeFLL run on new clients, by whether some seen clients have exactly their classes.

    python research/pefll_pairs.py runs/pefll-cifar10/regularized/l2/seed=1 PARTITION... [--split validation]

The clients come from partitions of the same data, made from the reserve of the run's partition
(data.partition.reserve). They and their images must be new to the run, or they are refused. Results go to
RUN/new-clients.json, by the number of seen clients with exactly their classes (``3``: three or more): the number of
new clients and of class sets among them, the clients' mean accuracy in percent with its standard error, and the mean
over class sets of their clients' mean, which weighs all sets equally; `research/results.py fold` reads them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from fedloom.data.federated import Manifest
from fedloom.engine.trained import evaluate
from fedloom.evaluation.plan import SPLITS
from fedloom.runs.folder import RunFolder
from fedloom.tasks.base import CORRECT, TOTAL

MOST = 3
"""Class sets of at least this many seen clients are shown together."""


def class_sets(manifest: Manifest) -> dict[str, frozenset[int]]:
    """Return the set of classes in each client's train split."""
    return {
        entry.id: frozenset(c for c, count in enumerate(entry.class_counts["train"]) if count)
        for entry in manifest.clients
    }


Client = tuple[frozenset[int], tuple[float, ...]]
"""Classes of a client, and its unmasked and masked accuracy in percent."""


def accuracies(run: Path, partitions: Sequence[Path], split: str) -> dict[int, list[Client]]:
    """Return each new client by the number of seen clients with the same classes."""
    trained = Manifest.from_json(RunFolder.open(run).text("partition.json"), source=str(run))
    own = class_sets(trained)
    known = Counter(own[entry.id] for entry in trained.clients if entry.seen)
    found: dict[int, list[Client]] = defaultdict(list)
    for folder in partitions:
        held = class_sets(Manifest.from_json((folder / "partition.json").read_text(), source=str(folder)))
        measured = evaluate(run, partition=folder)
        evaluation, overlap = measured.evaluation, measured.statistics["overlap"]
        if overlap is None or overlap["clients"]:
            sys.exit(
                f"{folder} must be a partition made from the reserve of {run}, without examples of its training "
                f"(overlap: {overlap})"
            )
        counts = evaluation.counts[:, evaluation.predictors.index("personal"), SPLITS.index(split)]  # [n, readings, 3]
        for client, both in zip(evaluation.clients, counts[..., CORRECT] / counts[..., TOTAL], strict=True):
            classes = held[client]
            found[min(known[classes], MOST)].append((classes, tuple((100 * both.double()).tolist())))
    return dict(sorted(found.items()))


def summary(found: Mapping[int, Sequence[Client]]) -> dict[str, dict[str, float]]:
    """Return results by number of seen clients, for new clients whose classes some seen client has, and for all."""
    groups = {str(n): list(clients) for n, clients in found.items()}
    groups["known"] = [client for n, clients in found.items() if n for client in clients]
    groups["all"] = [client for clients in found.values() for client in clients]
    return {name: described(clients) for name, clients in groups.items() if clients}


def described(clients: Sequence[Client]) -> dict[str, float]:
    """Return one line of the page's compact file."""
    found = {"new_clients": float(len(clients)), "class_sets": float(len({classes for classes, _ in clients}))}
    of_sets: dict[frozenset[int], list[tuple[float, ...]]] = defaultdict(list)
    for classes, accuracies in clients:
        of_sets[classes].append(accuracies)
    means = [statistics.fmean(unmasked for unmasked, _ in those) for those in of_sets.values()]
    found["by_class_set"] = round(statistics.fmean(means), 4)
    both = zip(*(accuracies for _, accuracies in clients), strict=True)
    for name, values in zip(("unseen", "unseen_masked"), both, strict=True):
        found[name] = round(statistics.fmean(values), 4)
        if len(values) > 1:
            found[f"{name}_error"] = round(statistics.stdev(values) / len(values) ** 0.5, 4)
    return found


def main() -> None:
    """Write new-clients.json to the run's folder and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("partitions", type=Path, nargs="+", metavar="PARTITION")
    parser.add_argument("--split", choices=SPLITS, default="test")
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    text = json.dumps(summary(accuracies(given.run, given.partitions, given.split)), indent=1)
    (given.run / "new-clients.json").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
