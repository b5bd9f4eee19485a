"""How a PeFLL run does on new clients whose classes no seen client has together, and on those whose some have.

    python experiments/pefll_pairs.py runs/pefll-cifar10/table/pefll/seed=1 PARTITION... [--split validation]

The clients of the partitions (of the same data, dealt from other seeds) are all new to the run. Shown, by how many
seen clients have just their classes: the clients, and their mean accuracy in percent with its standard error.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from fedloom.cli.use import measured
from fedloom.data.federated import Manifest
from fedloom.evaluation.measure import CORRECT, READINGS, SPLITS, TOTAL
from fedloom.reporting.run_folder import RunFolder

MOST = 3
"""Class sets of this many seen clients or more are shown together."""


def class_sets(manifest: Manifest) -> dict[str, frozenset[int]]:
    """The classes in each client's train split."""
    return {
        entry.id: frozenset(c for c, count in enumerate(entry.class_counts["train"]) if count)
        for entry in manifest.clients
    }


def accuracies(run: Path, partitions: Sequence[Path], split: str) -> dict[int, list[tuple[float, ...]]]:
    """Unmasked and masked accuracy of each new client, by how many seen clients have its classes."""
    trained = Manifest.from_json(RunFolder.open(run).text("partition.json"), where=str(run))
    own = class_sets(trained)
    known = Counter(own[entry.id] for entry in trained.clients if entry.seen)
    found: dict[int, list[tuple[float, ...]]] = defaultdict(list)
    for folder in partitions:
        held = class_sets(Manifest.from_json((folder / "partition.json").read_text(), where=str(folder)))
        evaluation = measured(run, partition=folder).evaluation
        counts = evaluation.counts[:, evaluation.predictors.index("personal"), SPLITS.index(split)]  # [n, readings, 3]
        for client, both in zip(evaluation.clients, counts[..., CORRECT] / counts[..., TOTAL], strict=True):
            found[min(known[held[client]], MOST)].append(tuple(100 * both.double()))
    return dict(sorted(found.items()))


def with_error(values: Sequence[float]) -> str:
    """Mean over clients and its standard error."""
    error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{error}"


def rows(found: Mapping[int, Sequence[tuple[float, ...]]]) -> list[list[str]]:
    """One row for each number of seen clients, and one for all clients."""
    groups = {f"{n} or more" if n == MOST else str(n): clients for n, clients in found.items()}
    groups["all"] = [client for clients in found.values() for client in clients]
    return [
        [name, str(len(clients)), *(with_error([float(c[i]) for c in clients]) for i in range(len(READINGS)))]
        for name, clients in groups.items()
    ]


def main() -> None:
    """Print the table, in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("partitions", type=Path, nargs="+", metavar="PARTITION")
    parser.add_argument("--split", choices=SPLITS, default="test")
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    print("| seen clients with these classes | new clients | accuracy | masked |\n|---|---:|---:|---:|")
    for row in rows(accuracies(given.run, given.partitions, given.split)):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
