"""Client steps of users' modules (``model: module``): LeNet relative to the built-in one, others to bare loops.

    .venv/bin/python research/benchmarks/module_model.py [--json FILE]

Both sides of a comparison train from the same point on the same examples, in turns, with one thread. The figure is the
ratio of CPU times of pairs of turns, whose median depends least on other work on the machine. The final LeNets are
compared bit for bit. ResNet18 and the vision transformer are torchvision's, on images 3x32x32, and the MLP has three
layers; the bare loop is torch's module and ``torch.optim.SGD`` on the same batches.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from common import describe, machine, write_json
from local_training import BareLeNet
from torch import Tensor, nn

from fedloom.algorithms.batches import batches
from fedloom.algorithms.client import train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.data.federated import ClientData, Split
from fedloom.data.inputs import single
from fedloom.models import library
from fedloom.models.flat import FlatModel
from fedloom.models.lenet import LeNet
from fedloom.models.module import ModuleModel


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--resnet-turns", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = machine()
    print(describe(about))
    found = {"lenet": lenet(options.turns)}
    found["resnet18"] = against_bare("ResNet18", resnet18, (3, 32, 32), "pixels", options.resnet_turns)
    found["vit"] = against_bare("ViT", vit, (3, 32, 32), "pixels", options.turns // 2)
    found["mlp"] = against_bare("MLP", mlp, (32,), "features", options.turns)
    write_json(options.json, about, found)


def client(shape: tuple[int, ...]) -> ClientGroup:
    """Return a client with random images of 10 classes."""
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(640, *shape, generator=random), torch.randint(10, (640,), generator=random)
    data = ClientData("client", Split(x, y), Split(x, y), Split(x, y), 10)
    return ClientGroup([data], lambda client, purpose: torch.Generator().manual_seed(1))


def lenet(turns: int) -> dict[str, object]:
    """Compare the module LeNet with the built-in one."""
    models: dict[str, FlatModel] = {
        "built in": LeNet((1, 28, 28), 10),
        "module": ModuleModel(BareLeNet, (1, 28, 28), 10, "pixels", initial="drawn"),
    }
    group, settings = client((1, 28, 28)), LocalSGD(steps=20, lr=0.005)
    theta = models["built in"].init(torch.Generator().manual_seed(2))[None]
    sides = {name: lambda model=model: train(model, group, theta, settings).theta for name, model in models.items()}
    return compared("LeNet", sides, turns, 20, same_bits=True)


def resnet18() -> nn.Module:
    """Return torchvision's ResNet18."""
    from torchvision.models import resnet18 as make

    found: nn.Module = make(num_classes=10)
    return found


def vit() -> nn.Module:
    """Return a small vision transformer of torchvision."""
    return library.vit((3, 32, 32), 10, patch=4, width=64, layers=4, heads=4, dropout=0.0)


def mlp() -> nn.Module:
    """Return a network of three layers for 32 features."""
    return nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def against_bare(
    what: str, make: Callable[[], nn.Module], shape: tuple[int, ...], kind: str, turns: int
) -> dict[str, object]:
    """Compare a module in FedLoom with a bare loop of the same module on the same batches."""
    model, group, steps, bare = ModuleModel(make, shape, 10, kind), client(shape), 10, make().train()
    settings = LocalSGD(steps=steps, batch_size=32, lr=0.005, momentum=0.9)
    theta = model.init(torch.Generator().manual_seed(2))[None]
    x, y = group.clients[0].train.x, group.clients[0].train.y
    assert y is not None

    def loop() -> Tensor:
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.005, momentum=0.9)
        for index in batches(len(x), 32, steps, torch.Generator().manual_seed(1)):
            optimizer.zero_grad()
            F.cross_entropy(bare(single(x)[index]), y[index]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in bare.parameters()])

    sides = {"bare loop": loop, "module": lambda: train(model, group, theta, settings).theta}
    return compared(what, sides, turns, steps, same_bits=False)


def compared(
    what: str, sides: Mapping[str, Callable[[], Tensor]], turns: int, steps: int, *, same_bits: bool
) -> dict[str, object]:
    """Time both sides in turns, and print the steps a second and the median ratio of pairs."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(turns + 2):
        ends = []
        for name, side in sides.items():
            started = time.process_time()
            ends.append(side())
            if turn > 1:  # the first turns warm the caches
                seconds[name].append(time.process_time() - started)
        assert not same_bits or torch.equal(*ends), "the bits are not those of the other side"
    other = next(iter(sides))
    ratio = statistics.median(a / b for a, b in zip(seconds[other], seconds["module"], strict=True))
    for name, found in seconds.items():
        print(f"{what}, {name}: {steps / statistics.median(found):.3g} steps a second of CPU time")
    print(f"{what}, module: {ratio:.1%} of the speed of the {other}" + (", the same bits" if same_bits else ""))
    return {"seconds": seconds, "ratio": ratio}


if __name__ == "__main__":
    main()
