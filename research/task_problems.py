"""Five small federations with targets and inputs beyond one class per image: data drawn from a seed, and their modules.

Every client differs from the others in a stated way, so that one shared model is wrong for many of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator
from sklearn.datasets import load_digits
from torch import Tensor, nn

CLIENTS, PEOPLE, SITES = 24, 16, 12
CAMERAS = 8
Clients = Mapping[str, tuple[Any, Any]]
"""Inputs and targets by client."""


def each(seed: int, draw: Callable[[Generator], tuple[Any, Any]], clients: int = CLIENTS) -> Clients:
    """Draw every client's examples from a separate random stream."""
    return {f"c{i:02}": draw(np.random.default_rng([seed, i])) for i in range(clients)}


def regression(seed: int) -> Clients:
    """Return a smooth function of eight numbers, read by instruments of different scale and offset.

    y = s (sin(2 w₁·x) + w₂·x) + b + noise of a tenth of s, with w shared, log s uniform from log 0.5 to log 2 and b
    normal; 120 examples a client.
    """
    w = np.random.default_rng([seed, 10_000]).normal(size=(2, 8)) / np.sqrt(8)

    def draw(r: Generator) -> tuple[Any, Any]:
        scale, offset = np.exp(r.uniform(np.log(0.5), np.log(2))), r.normal()
        x = r.normal(size=(120, 8))
        y = scale * (np.sin(2 * x @ w[0]) + x @ w[1] + 0.1 * r.normal(size=120)) + offset
        return x.astype(np.float32), y.astype(np.float32)

    return each(seed, draw)


def signals(seed: int) -> Clients:
    """Return signals of three channels and 64 samples with up to four motifs, one label for each.

    Motif k is a burst in channel k mod 3, with a frequency that depends on k. Clients differ in the order of the
    channels and in their gains, from 0.5 to 2; 160 examples a client.
    """
    time = np.arange(64) / 64

    def draw(r: Generator) -> tuple[Any, Any]:
        order, gain = r.permutation(3), r.uniform(0.5, 2, size=3)
        y = r.integers(0, 2, size=(160, 4))
        x = 0.7 * r.normal(size=(160, 3, 64))
        for k in range(4):
            at, phase = r.uniform(0.2, 0.8, size=160), r.uniform(0, 2 * np.pi, size=160)
            burst = np.exp(-(((time - at[:, None]) / 0.12) ** 2)) * np.sin(
                2 * np.pi * (4 + 5 * k) * time + phase[:, None]
            )
            x[:, k % 3] += 1.5 * y[:, k, None] * burst
        return (x[:, order] * gain[order, None]).astype(np.float32), y

    return each(seed, draw, PEOPLE)


def shapes(seed: int) -> Clients:
    """Return images of 16 x 16 with a disc and a square on uneven ground, and the class of each pixel.

    Sites differ in contrast: brightness of disc, square and ground are three levels in an order that depends on the
    site; 50 images a client.
    """
    rows, columns = np.mgrid[:16, :16]

    def draw(r: Generator) -> tuple[Any, Any]:
        levels = r.permutation([60, 120, 180]) + r.integers(-15, 16, size=3)
        x, y = np.empty((50, 1, 16, 16), dtype=np.uint8), np.zeros((50, 16, 16), dtype=np.int64)
        for i in range(50):
            a, b, radius = *r.integers(3, 13, size=2), r.integers(2, 5)
            y[i][(rows - a) ** 2 + (columns - b) ** 2 <= radius**2] = 1
            a, b, half = *r.integers(3, 13, size=2), r.integers(1, 4)
            y[i][(abs(rows - a) <= half) & (abs(columns - b) <= half)] = 2
            slope = 20 * (r.normal() * (rows / 15 - 0.5) + r.normal() * (columns / 15 - 0.5))
            x[i, 0] = np.clip(levels[y[i]] + slope + 18 * r.normal(size=(16, 16)), 0, 255)
        return x, y

    return each(seed, draw, SITES)


def categories(seed: int) -> Clients:
    """Return rows of four numbers and two category codes (of 12 and 6 kinds) with three classes.

    A category shifts the class scores by values that are shared, and the first category by a client's own of the same
    size, too; 200 rows a client.
    """
    shared = np.random.default_rng([seed, 10_000])
    w, first, second = shared.normal(size=(4, 3)), shared.normal(size=(12, 3)), shared.normal(size=(6, 3))

    def draw(r: Generator) -> tuple[Any, Any]:
        own = r.normal(size=(12, 3))
        x, codes = r.normal(size=(200, 4)), np.stack([r.integers(0, 12, 200), r.integers(0, 6, 200)], axis=1)
        scores = x @ w + 1.5 * (first + own)[codes[:, 0]] + second[codes[:, 1]] + 0.5 * r.gumbel(size=(200, 3))
        return {"numbers": x.astype(np.float32), "codes": codes}, scores.argmax(1)

    return each(seed, draw)


def digits(seed: int) -> Clients:
    """Return scikit-learn's digits from 0 to 4, of 8 x 8 pixels, in the colours of a client's camera.

    Clients differ in the colours of ink and ground, which are uniform and at least 160 apart, with noise of deviation
    10. The 901 digits are distributed at random among eight clients.
    """
    images, labels = load_digits(n_class=5, return_X_y=True)
    owner = np.random.default_rng([seed, 10_000]).permutation(len(labels)) % CAMERAS

    def draw(i: int) -> tuple[Any, Any]:
        r = np.random.default_rng([seed, i])
        ink, ground = r.uniform(0, 255, size=(2, 3))
        while np.linalg.norm(ink - ground) < 160:
            ink, ground = r.uniform(0, 255, size=(2, 3))
        part = images[owner == i].reshape(-1, 1, 8, 8) / 16
        x = part * ink[:, None, None] + (1 - part) * ground[:, None, None]
        return np.clip(x + 10 * r.normal(size=x.shape), 0, 255).astype(np.uint8), labels[owner == i]

    return {f"c{i:02}": draw(i) for i in range(CAMERAS)}


class MixedTable(nn.Module):
    """Network for rows of numbers and category codes, given by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(12, 6), nn.Embedding(6, 4)
        self.hidden, self.out = nn.Linear(4 + 6 + 4, 32), nn.Linear(32, 3)

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """Return logits ``[b, 3]``."""
        h = torch.cat([numbers, self.first(codes[:, 0]), self.second(codes[:, 1])], dim=1)
        logits: Tensor = self.out(F.relu(self.hidden(h)))
        return logits


class SmallUNet(nn.Module):
    """U-Net of one level (O. Ronneberger et al., MICCAI 2015) with three outputs a pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.down = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.coarse, self.up = nn.Conv2d(16, 16, 3, padding=1), nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.joined, self.out = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(8, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits ``[b, 3, height, width]``."""
        fine = F.relu(self.fine(image))
        coarse = self.up(F.relu(self.coarse(F.relu(self.down(fine)))))
        logits: Tensor = self.out(F.relu(self.joined(torch.cat([fine, coarse], dim=1))))
        return logits


def regressor() -> nn.Module:
    """Return an MLP with one output."""
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))


def signal_network() -> nn.Module:
    """Return a 1-D CNN with batch normalization and four outputs."""
    return nn.Sequential(
        nn.Conv1d(3, 16, 9, stride=2), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 16, 5, stride=2),
        nn.BatchNorm1d(16), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip
