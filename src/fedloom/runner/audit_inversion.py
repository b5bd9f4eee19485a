"""Gradient inversion on a run's model: what one update of a client reveals, and what a sum of updates reveals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.attacks.inversion import (
    Target,
    best_matches,
    gradient_of_step,
    label_of,
    psnr,
    reconstruct,
)
from fedloom.data.federated import ClientData, FederatedDataset, Split
from fedloom.data.input_spec import InputSpec
from fedloom.data.own import OWN
from fedloom.errors import DataError, ExperimentError
from fedloom.federation.randomness import generator
from fedloom.privacy.examples import ExamplePrivacy
from fedloom.runner.assemble import RunContext
from fedloom.runner.examples import SIDE

BATCH = 32
"""Size of a mini-batch where a method's settings have none; and the most examples that are reconstructed together."""

RANGE = 5.0
"""Largest magnitude of a reconstructed feature, in standard deviations."""


@dataclass(frozen=True)
class _Scale:
    """Inverse of the normalization of inputs: pixels from 0 to 1, features in standard deviations."""

    spec: InputSpec

    @property
    def is_picture(self) -> bool:
        return self.spec.kind == "pixels" and len(self.spec.shape) == 3

    @property
    def limits(self) -> tuple[float, float]:
        if not self.is_picture:
            return -RANGE, RANGE
        pairs = zip(self.spec.normalization.mean, self.spec.normalization.std, strict=True)
        ends = [(-mean / std, (1 - mean) / std) for mean, std in pairs]
        return min(low for low, _ in ends), max(high for _, high in ends)

    def raw(self, x: Tensor) -> Tensor:
        """Return inputs ``[n, *shape]`` as they were before normalization, pixels between 0 and 1."""
        if not self.is_picture:
            return x
        mean, std = (
            torch.tensor(figures, dtype=torch.float32).reshape(self.spec.broadcast)
            for figures in (self.spec.normalization.mean, self.spec.normalization.std)
        )
        return (x * std + mean).clamp(0, 1)

    def peak(self, x: Tensor) -> float:
        return 1.0 if self.is_picture else max(float(x.max() - x.min()), 1e-9)

    def picture(self, x: Tensor) -> list[Any] | None:
        """Return an image as ``[h][w]`` or ``[h][w][3]`` of 0 to 255, thinned to a limited size; None for features."""
        if not self.is_picture:
            return None
        levels = (255 * self.raw(x[None])[0]).round().to(torch.int64)
        levels = levels if len(levels) == 3 else levels[:1]
        thin = slice(None, None, math.ceil(max(levels.shape[1:]) / SIDE))
        levels = levels[:, thin, thin]
        shown: list[Any] = (levels.permute(1, 2, 0) if len(levels) == 3 else levels[0]).tolist()
        return shown


@dataclass(frozen=True)
class _Victim:
    """Client under attack, the θ ``[d]`` that it was sent, and the cohort whose updates are summed with its own."""

    parts: RunContext
    data: ClientData
    others: Sequence[ClientData]
    theta: Tensor
    scale: _Scale

    def examples(self, client: ClientData, count: int) -> Split:
        """Return the first examples of a client's train split."""
        x = client.train.x
        assert isinstance(x, Tensor)
        return Split(x[:count], None if client.train.y is None else client.train.y[:count])

    def case(self, name: str, clients: Sequence[ClientData], count: int, *, shown: bool) -> dict[str, Any]:
        """Attack the mean update of clients, each of ``count`` examples; return the results for the victim's."""
        model = self.parts.setup.model
        privacy = ExamplePrivacy.of(self.parts.experiment.federation.privacy)
        gradients = [gradient_of_step(model, self.theta, self.examples(each, count), each, privacy) for each in clients]
        own = self.examples(self.data, min(count, BATCH))
        x = own.x
        assert isinstance(x, Tensor)
        target = Target(model, self.theta, torch.stack(gradients).sum(0) / len(gradients), x.shape[1:], own.y)
        alone = len(clients) == 1 and len(x) == 1
        found, attack = reconstruct(target, *self.scale.limits, alone=alone)
        results: dict[str, Any] = {
            "update": name,
            "clients": len(clients),
            "examples": sum(min(count, len(each.train)) for each in clients),
            "attack": attack,
        }
        if alone and own.y is not None and (label := label_of(target)) is not None:
            results["label_found"] = label == int(own.y[0])
        return results | self._compared(x, found, shown=shown)

    def _compared(self, x: Tensor, found: Tensor, *, shown: bool) -> dict[str, Any]:
        """Return the similarity of reconstructions ``[k, ...]`` to inputs ``[n, ...]``, and pictures of the best."""
        originals, peak = self.scale.raw(x), self.scale.peak(x)
        matches = best_matches(originals, self.scale.raw(found), peak)
        values = [value for value, _ in matches]
        best = max(range(len(values)), key=values.__getitem__)
        mean = self.scale.raw(torch.zeros_like(x[:1]))
        results: dict[str, Any] = {
            "psnr_best": values[best],
            "psnr_mean": sum(values) / len(values),
            "psnr_of_mean_input": max(psnr(original, mean[0], peak) for original in originals),
        }
        pictures = (self.scale.picture(x[best]), self.scale.picture(found[matches[best][1]]))
        if shown and None not in pictures:
            results["original"], results["reconstruction"] = pictures
        return results


def inversion_document(parts: RunContext, dataset: FederatedDataset, client: str | None) -> dict[str, Any]:
    """Attack updates of a client: of one example, of one mini-batch, and summed with those of a cohort.

    Each update is one step of FedAvg from the initial model, where gradients are large, with noise if the run protects
    examples by noisy steps. With secure aggregation only the sum is attacked, since no single update reaches the
    aggregator.

    Raise ExperimentError if the input is not one tensor of pixels or features; DataError if there is no such client, or
    it has no training examples.
    """
    victim = _victim(parts, dataset, client)
    secure = parts.experiment.federation.secure_aggregation is not None
    batch = min(getattr(getattr(parts.settings, "local", None), "batch_size", BATCH), len(victim.data.train))
    cohort = [victim.data, *victim.others]
    shown = dataset.manifest.dataset != OWN  # data of a simulation, none of whose clients is private
    cases = [] if secure else [("one example", [victim.data], parts.setup.model.least_batch)]
    if not secure and batch > parts.setup.model.least_batch:
        cases.append(("one mini-batch", [victim.data], batch))
    cases.append(("sum of a cohort", cohort, batch))
    return {
        "client": victim.data.id,
        "model": parts.experiment.model.name,
        "secure_aggregation": secure,
        "noisy_steps": ExamplePrivacy.of(parts.experiment.federation.privacy) is not None,
        "cases": [victim.case(name, clients, count, shown=shown) for name, clients, count in cases],
    }


def _victim(parts: RunContext, dataset: FederatedDataset, client: str | None) -> _Victim:
    spec = parts.manifest.specs.get("")
    if spec is None or spec.kind == "tokens" or (spec.kind == "integers" and not parts.standardizes):
        kind = "named" if spec is None else spec.kind
        raise ExperimentError(
            f"Gradient inversion reconstructs one input of pixels or features, and this run's inputs are {kind}.",
            key="invert",
        )
    load, roster = parts.examples_of(dataset), dataset.manifest.roster
    first = roster[0] if client is None else dataset.manifest.named(client).id
    data = load(first)
    if not len(data.train):
        raise DataError(f"Client {first} has no training examples, so there is no gradient to invert.")
    size = max(1, parts.experiment.federation.clients_per_round)
    others = [each for each in map(load, [name for name in roster if name != first][: size - 1]) if len(each.train)]
    theta = parts.setup.model.init(generator(parts.experiment.seed, "init"), parts.setup.dtype)
    return _Victim(parts, data, others, theta, _Scale(spec))
