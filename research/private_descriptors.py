"""Cost of descriptors with differential privacy to new clients of PeFLL runs.

See docs/results/private-descriptors.md.

    python research/private_descriptors.py choose RUN       C by validation accuracy of seen clients at ε = 1
    python research/private_descriptors.py measure RUN C    new clients' test accuracy by ε and number of images

Results are added to RUN/new-clients.json, and C to RUN/clip. The seed determines the noise, as in any simulation.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.pefll import PEFLL
from fedloom.core.files import write_atomically
from fedloom.data.federated import ClientData, FederatedDataset, Split
from fedloom.data.inputs import single
from fedloom.data.manifest import Manifest
from fedloom.engine import assemble
from fedloom.engine.assemble import RunContext
from fedloom.engine.trained import restore
from fedloom.evaluation.plan import EvaluationPlan
from fedloom.federation.evaluator import Evaluator
from fedloom.federation.randomness import generator
from fedloom.messages import Message
from fedloom.models.predictors import Predictors
from fedloom.privacy.gaussian_mechanism import noise_multiplier

DELTA = 1e-5
EPSILONS = (math.inf, 8.0, 4.0, 2.0, 1.0, 0.5)
CLIPS = (0.4, 0.6, 0.8, 1.0, 1.25)
FEW = 100
"""Number of images of a client with few; the other size is all of its images."""
DRAWS = 3


class Fewer:
    """Clients of a data set, with at most this many training examples each."""

    def __init__(self, dataset: FederatedDataset, most: int) -> None:
        self._dataset, self._most = dataset, most

    @property
    def manifest(self) -> Manifest:
        """Manifest of the whole data set."""
        return self._dataset.manifest

    def client(self, name: str) -> ClientData:
        """Return the data of one client."""
        c = self._dataset.client(name)
        assert c.train.y is not None
        kept = torch.randperm(len(c.train), generator=generator(0, "fewer", name))[: self._most]
        return dataclasses.replace(c, train=Split(single(c.train.x)[kept], c.train.y[kept]))


def accuracies(
    parts: RunContext, loop: Evaluator, dataset: Any, clients: Sequence[str], split: str, seed: int
) -> list[float]:
    """Return the accuracy of each client's model, in percent, with a seed's noise."""
    found: dict[str, float] = {}

    def keep(predictors: Predictors, group: ClientGroup) -> Message:
        for named, c in zip(predictors, group.clients, strict=True):
            data: Split = getattr(c, split)
            assert data.y is not None
            right = named["personal"].log_probabilities(single(data.x)).argmax(1) == data.y
            found[c.id] = 100 * float(right.double().mean())
        return EvaluationPlan.of_classes(parts.setup.classes).nothing(len(predictors), len(loop.predictors))

    experiment = parts.experiment.model_copy(update={"seed": seed})
    loop.transport = assemble.in_process(dataclasses.replace(parts, experiment=experiment), dataset, loop.folder, keep)
    lost = loop.personalize(list(clients))
    if lost:
        raise RuntimeError(f"clients without a model: {lost}")
    return [found[name] for name in clients]


def with_privacy(parts: RunContext, clip: float, epsilon: float) -> RunContext:
    """Return the parts of the run with clients whose descriptors have this (ε, δ)."""
    settings = PEFLL.private(parts.settings, clip, noise_multiplier(epsilon, DELTA), DELTA)
    choice = parts.experiment.algorithm.model_copy(update={"settings": settings})
    return dataclasses.replace(parts, experiment=parts.experiment.model_copy(update={"algorithm": choice}))


def draws(epsilon: float, of: Callable[[int], list[float]]) -> dict[str, float]:
    """Return the mean over clients and noise draws, and the deviation of client means over draws."""
    means = [statistics.fmean(of(seed)) for seed in range(1, 2 if math.isinf(epsilon) else 1 + DRAWS)]
    return {"mean": statistics.fmean(means)} | ({"sd": statistics.stdev(means)} if len(means) > 1 else {})


def main() -> None:
    """Run the requested command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("choose", "measure"))
    parser.add_argument("run", type=Path)
    parser.add_argument("clip", type=float, nargs="?")
    given = parser.parse_args()
    parts, loop, dataset = restore(given.run)
    entries, found = dataset.manifest.clients, {}
    if given.what == "choose":
        seen = [entry.id for entry in entries if entry.seen]
        for clip in CLIPS:
            made = with_privacy(parts, clip, 1.0)
            validation = statistics.fmean(accuracies(made, loop, dataset, seen, "validation", 1))
            found[f"C={clip:g}"] = {"validation": validation}
            print(f"C = {clip:g}: validation accuracy of seen clients at ε = 1: {validation:.2f}", flush=True)
        best = max(CLIPS, key=lambda clip: found[f"C={clip:g}"]["validation"])
        write_atomically(given.run / "clip", f"{best:g}\n".encode())
    else:
        new = [entry.id for entry in entries if not entry.seen]
        for size in (min(len(dataset.client(name).train) for name in new), FEW):
            fewer = Fewer(dataset, size)
            for epsilon in (None, *EPSILONS):
                made = parts if epsilon is None else with_privacy(parts, given.clip, epsilon)

                def one(seed: int, made: RunContext = made, fewer: Fewer = fewer) -> list[float]:
                    return accuracies(made, loop, fewer, new, "test", seed)

                cost = draws(math.inf if epsilon is None else epsilon, one)
                name = f"n={size},C={given.clip:g},eps={'none' if epsilon is None else f'{epsilon:g}'}"
                found[name] = {"unseen_mean": cost["mean"]} | ({"unseen_sd": cost["sd"]} if "sd" in cost else {})
                print(name, " ".join(f"{key} {value:.2f}" for key, value in found[name].items()), flush=True)
    file = given.run / "new-clients.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    write_atomically(file, (json.dumps(before | found, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
