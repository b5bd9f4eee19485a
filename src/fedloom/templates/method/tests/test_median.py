"""The method against a loop of plain PyTorch."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import fedloom

ROUNDS, STEPS, LR, STEP = 2, 3, 0.1, 0.5
CLIENTS = {"a": 15, "b": 25, "c": 38}  # and their numbers of examples


def federated(tmp_path):
    """Return invented examples of three clients: four features, two classes."""
    random = np.random.default_rng(0)
    x = {client: random.normal(size=(n, 4)).astype(np.float32) for client, n in CLIENTS.items()}
    arrays = {client: (each, (each.sum(1) > 0).astype(np.int64)) for client, each in x.items()}
    return fedloom.Federated.from_arrays(arrays, root=tmp_path / "data")


def trained(data, folder, rounds):
    """Return the shared model, weight and bias, after some rounds of FedLoom."""
    experiment = {
        "name": "median",
        "model": {"name": "logistic"},
        "algorithm": {
            "name": "my-median",
            "step": STEP,
            # Batches of all examples, so that the loop below need not draw the same ones.
            "local": {"epochs": STEPS, "batch_size": 100, "lr": LR, "momentum": 0},
        },
        "federation": {"rounds": rounds, "clients_per_round": len(CLIENTS)},
        "runtime": {"workers": 0},
    }
    run = fedloom.run(experiment, data=data, out=folder / f"{rounds}-rounds", report=False)
    return list(run.models("a", predictor="global").state_dict().values())


def test_two_rounds_equal_a_loop_of_plain_pytorch(tmp_path):
    """The loop trains each client by SGD, and adds the median of the changes, times the step."""
    data = federated(tmp_path)
    opened = data.open(seed=1)
    splits = [opened.tensors(client) for client in CLIENTS]  # without the examples for validation and testing
    everything = torch.cat([split["train_x"] for split in splits])
    mean, std = everything.mean(0), everything.std(0, correction=0)  # features are standardized
    shared = trained(data, tmp_path, rounds=0)
    for _ in range(ROUNDS):
        changes = []
        for split in splits:
            network = nn.Linear(4, 2)
            network.load_state_dict(dict(zip(("weight", "bias"), shared, strict=True)))
            optimizer = torch.optim.SGD(network.parameters(), lr=LR)
            for _ in range(STEPS):
                optimizer.zero_grad()
                F.cross_entropy(network((split["train_x"] - mean) / std), split["train_y"]).backward()
                optimizer.step()
            changes.append([new.detach() - old for new, old in zip(network.parameters(), shared, strict=True)])
        medians = [torch.stack(each).median(0).values for each in zip(*changes, strict=True)]
        shared = [old + STEP * median for old, median in zip(shared, medians, strict=True)]
    for found, expected in zip(trained(data, tmp_path, ROUNDS), shared, strict=True):
        torch.testing.assert_close(found, expected)
