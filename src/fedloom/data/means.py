"""Scheme ``means``: Gaussian examples around a mean for each client, drawn from the seed."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from fedloom.core.keyed import make_rng
from fedloom.data.assignment import Assignment, PartitionSettings, draw_seen
from fedloom.data.datasets import Dataset, Pool, RawDataset
from fedloom.data.schemes import MeansScheme


def client_means(scheme: MeansScheme, seen: NDArray[np.bool_], seed: int) -> NDArray[np.float64]:
    """Return the mean of every client, ``[n, dimension]``: m_0 for the first seen one, m_0 plus a bias for others."""
    d = scheme.dimension
    own = scheme.distance * _direction(seed, d, "user")
    means = np.tile(own + scheme.bias * _direction(seed, d, "helpers"), (scheme.clients, 1))
    for client in range(scheme.clients):
        means[client] += scheme.spread * _direction(seed, d, "spread", client)
    means[int(np.flatnonzero(seen)[0])] = own
    return means


def draw_means(
    source: Dataset, scheme: MeansScheme, settings: PartitionSettings
) -> tuple[Dataset, RawDataset, Assignment]:
    """Draw examples and assign them; also return the source with the shape of the examples.

    A client's validation examples are the last ``validation_fraction`` of those not used for testing.
    """
    seen = draw_seen(scheme.clients, settings.held_out_fraction, settings.seed)
    means = client_means(scheme, seen, settings.seed)
    pools = {}
    for split, size in (("train", scheme.train_per_client), ("test", scheme.test_per_client)):
        examples = [
            mean + scheme.noise * _normals(settings.seed, (size, scheme.dimension), "examples", split, client)
            for client, mean in enumerate(means)
        ]
        inputs = np.concatenate(examples).astype(np.float32)
        pools[split] = Pool(inputs, np.zeros(len(inputs), dtype=np.int64))
    held_out = min(max(1, round(settings.validation_fraction * scheme.train_per_client)), scheme.train_per_client - 1)
    positions = np.arange(len(pools["train"])).reshape(scheme.clients, -1)
    cut = scheme.train_per_client - held_out
    test = len(pools["train"]) + np.arange(len(pools["test"])).reshape(scheme.clients, -1)
    split_positions = {"train": list(positions[:, :cut]), "validation": list(positions[:, cut:]), "test": list(test)}
    pool = np.sort(positions[:, :cut].reshape(-1))
    measured = np.sort(positions[seen, :cut].reshape(-1))
    assignment = Assignment(seen, split_positions, pool, measured, (None,) * scheme.clients)
    shaped = dataclasses.replace(source, spec=scheme.drawn_spec(source.spec))
    return shaped, RawDataset(pools["train"], pools["test"]), assignment


def _normals(seed: int, shape: tuple[int, ...], *purpose: str | int) -> NDArray[np.float64]:
    """Return standard normal numbers by Box-Muller: numpy keeps only its uniform stream stable across releases."""
    uniform = make_rng(seed, "means", *purpose).random((2, *shape))
    normals: NDArray[np.float64] = np.sqrt(-2 * np.log1p(-uniform[0])) * np.cos(2 * math.pi * uniform[1])
    return normals


def _direction(seed: int, dimension: int, *purpose: str | int) -> NDArray[np.float64]:
    """Return a random unit vector."""
    drawn = _normals(seed, (dimension,), "direction", *purpose)
    direction: NDArray[np.float64] = drawn / np.linalg.norm(drawn)
    return direction
