"""Client step of LeNet as a user's module (``model: module``) relative to the built-in LeNet, in one session.

    .venv/bin/python research/benchmarks/module_model.py [--json FILE]

FedLoom's trainer trains both from the same point on the same examples, in turns, with one thread. The figure is the
ratio of CPU times of pairs of turns, whose median depends least on other work on the machine. The final models are
compared bit for bit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import describe, machine, write_json
from local_training import BareLeNet

from fedloom.algorithms.base import ClientGroup
from fedloom.algorithms.client import train
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.data.federated import ClientData, Split
from fedloom.models.lenet import LeNet
from fedloom.models.module import ModuleModel

STEPS = 20


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = machine()
    print(describe(about))
    models = {
        "built in": LeNet((1, 28, 28), 10),
        "module": ModuleModel(BareLeNet, (1, 28, 28), 10, "pixels", initial="drawn"),
    }
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(640, 1, 28, 28, generator=random), torch.randint(10, (640,), generator=random)
    data = ClientData("client", Split(x, y), Split(x, y), Split(x, y), 10)
    group = ClientGroup([data], lambda client, purpose: torch.Generator().manual_seed(1))
    theta = models["built in"].init(torch.Generator().manual_seed(2))[None]
    settings = LocalSGD(steps=STEPS, lr=0.005)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(options.turns + 2):
        ends = []
        for name, model in models.items():
            started = time.process_time()
            ends.append(train(model, group, theta, settings).theta)
            if turn > 1:  # the first turns warm the caches
                seconds[name].append(time.process_time() - started)
        assert torch.equal(*ends), "the bits are not those of the built-in model"
    ratio = statistics.median(a / b for a, b in zip(seconds["built in"], seconds["module"], strict=True))
    for name, found in seconds.items():
        print(f"{name}: {STEPS / statistics.median(found):.0f} steps a second of CPU time")
    print(f"module: {ratio:.1%} of the built-in model's speed, the same bits")
    write_json(options.json, about, {"seconds": seconds, "ratio": ratio})


if __name__ == "__main__":
    main()
