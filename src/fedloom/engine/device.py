"""Check of a computing device: it must compute what a CPU computes, and the same bits twice (``fedloom device``)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.algorithms.client import train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.data.federated import ClientData, Split
from fedloom.federation.randomness import generator
from fedloom.models.flat import FlatModel
from fedloom.models.networks import LSTM, MLP, LeNet

IMAGE, CLASSES, TOKENS = (3, 32, 32), 10, 80
SETTINGS = LocalSGD(steps=5, batch_size=16, lr=0.01)
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-3}
"""Largest difference from a CPU after one local training, relative to the largest parameter, for each data type."""


@dataclass(frozen=True)
class DeviceCheck:
    """Clients that train together on a device, compared with the same clients one after another on a CPU.

    Attributes
    ----------
    model, dtype
        Name of the model, and data type of its parameters.
    difference, limit
        Largest difference of a parameter, relative to the largest one, and the largest that passes.
    repeats
        True if a second training gave the same bits.
    steps_per_s
        Client steps per second of the second training.
    bytes_per_client
        Largest memory on the device during training, divided by the number of clients; None on a CPU.
    """

    model: str
    dtype: str
    difference: float
    limit: float
    repeats: bool
    steps_per_s: float
    bytes_per_client: int | None

    @property
    def passes(self) -> bool:
        """True if the device computes what a CPU computes, and the same bits twice."""
        return self.difference <= self.limit and self.repeats


def check_device(device: torch.device, count: int) -> list[DeviceCheck]:
    """Train clients together on a device, and one after another on a CPU; return a comparison for each case.

    The cases are a perceptron, a convolutional and a recurrent network, each in float64 and float32. ``count`` clients
    train together. :func:`fedloom.engine.assemble.use_device` has set up the device.
    """
    models: dict[str, FlatModel] = {
        "mlp": MLP(IMAGE, [64], CLASSES), "lenet": LeNet(IMAGE, CLASSES), "lstm": LSTM(TOKENS, 8, 32, 1),
    }  # fmt: skip
    return [check_model(name, model, dtype, device, count) for name, model in models.items() for dtype in LIMITS]


def check_model(name: str, model: FlatModel, dtype: torch.dtype, device: torch.device, count: int) -> DeviceCheck:
    """Return the comparison of one model in one data type."""
    cpu = torch.device("cpu")
    start = torch.stack([model.init(torch.Generator().manual_seed(i), dtype) for i in range(count)])
    on_device = start.to(device)
    alone = [
        train(model, _group([one]), start[i : i + 1], SETTINGS).theta
        for i, one in enumerate(random_clients(model, count, dtype, cpu))
    ]
    members = random_clients(model, count, dtype, device)
    first = train(model, _group(members), on_device, SETTINGS).theta
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    started_at = time.perf_counter()
    repeated_theta = train(model, _group(members), on_device, SETTINGS).theta
    if device.type == "cuda":
        torch.cuda.synchronize()
    elapsed_s = time.perf_counter() - started_at
    expected = torch.cat(alone)
    return DeviceCheck(
        model=name,
        dtype=str(dtype).removeprefix("torch."),
        difference=float((first.double().cpu() - expected.double()).abs().max() / expected.double().abs().max()),
        limit=LIMITS[dtype],
        repeats=torch.equal(first, repeated_theta),
        steps_per_s=count * (SETTINGS.steps or 0) / elapsed_s,
        bytes_per_client=torch.cuda.max_memory_allocated() // count if device.type == "cuda" else None,
    )


def random_clients(model: FlatModel, count: int, dtype: torch.dtype, device: torch.device) -> list[ClientData]:
    """Return clients with 96 to 128 random examples: sequences of 20 characters, or images."""
    clients = []
    for i in range(count):
        random, n = torch.Generator().manual_seed(i), 96 + i % 33
        x: Tensor
        if isinstance(model, LSTM):
            x, classes = torch.randint(TOKENS, (n, 20), generator=random).to(torch.uint8), TOKENS
        else:
            x, classes = torch.randn(n, *IMAGE, generator=random, dtype=torch.float64).to(dtype), CLASSES
        split = Split(x.to(device), torch.randint(classes, (n,), generator=random).to(device))
        clients.append(ClientData(f"client-{i:04d}", split, split, split, classes))
    return clients


def _group(members: Sequence[ClientData]) -> ClientGroup:
    return ClientGroup(members, lambda client, purpose: generator(1, purpose, client, 1))
