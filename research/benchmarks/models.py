"""Cost and initialization of each model: the figures of docs/models.md.

    .venv/bin/python research/benchmarks/models.py speed   ms of one SGD step, each in turn, and ratios within the run
    .venv/bin/python research/benchmarks/models.py start   training loss of the first steps, by initialization

``speed`` measures loss, ``autograd.grad`` and update of one batch of 32 on one thread, with random inputs. Since
machines are busy, it counts CPU seconds, the cases take turns, and medians are compared. ``start`` trains on
Fashion-MNIST (``fedloom data fetch fashion-mnist``), zero-padded to 32x32 for VGG, with SGD and momentum 0.9.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.data import datasets
from fedloom.models.flat import FlatModel, FlatNetwork
from fedloom.models.registry import MODELS, CNNSettings, Kind, ResNet20Settings, VGGSettings

BATCH = 32
SHAPES: dict[Kind, tuple[int, ...]] = {"pixels": (3, 32, 32), "features": (10,), "tokens": (80,)}
CLASSES = {"pixels": 10, "features": 11, "tokens": 80}


def step(forward: Callable[[Tensor], Tensor], leaves: list[Tensor], x: Tensor, y: Tensor) -> Callable[[], None]:
    """Return a function that makes one SGD step as in the local training of docs/benchmarks.md."""
    momentum = [torch.zeros_like(leaf) for leaf in leaves]

    def run() -> None:
        gradients = torch.autograd.grad(F.cross_entropy(forward(x), y), leaves)
        with torch.no_grad():
            torch._foreach_mul_(momentum, 0.9)
            torch._foreach_add_(momentum, gradients)
            torch._foreach_add_(leaves, momentum, alpha=-1e-4)

    return run


def flat_step(model: FlatModel, x: Tensor, y: Tensor, *, channels_last: bool = True) -> Callable[[], None]:
    """Return the step function of one of our models."""
    theta = model.init(torch.Generator().manual_seed(0))
    parameters = model.layout.leaves(theta)
    leaves = {
        name: (part if channels_last else part.contiguous()).requires_grad_() for name, part in parameters.items()
    }
    return step(lambda x: model.forward(leaves, x), list(leaves.values()), x, y)


class TorchLSTM(nn.Module):
    """Character model with torch's fused LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(80, 8), nn.LSTM(8, 256, 2, batch_first=True)
        self.fc = nn.Linear(256, 80)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        out: Tensor = self.fc(self.lstm(self.embedding(x.int()))[0][:, -1])
        return out


def inputs(kind: Kind) -> tuple[Tensor, Tensor]:
    """Return a random batch."""
    random = torch.Generator().manual_seed(1)
    shape, classes = SHAPES[kind], CLASSES[kind]
    if kind == "tokens":
        x = torch.randint(classes, (BATCH, *shape), generator=random).to(torch.uint8)
    else:
        x = torch.randn(BATCH, *shape, generator=random)
    return x, torch.randint(classes, (BATCH,), generator=random)


def speed(repetitions: int) -> None:
    """Print the median ms per step of every model, and ratios."""
    cases: dict[str, Callable[[], None]] = {}
    for choice in (choice for choice in MODELS if choice.classifies):
        for kind in choice.takes:
            x, y = inputs(kind)
            model = choice.build(SHAPES[kind], CLASSES[kind], kind)
            cases[f"{choice.name} ({kind})"] = flat_step(model, x, y)
            halved = choice.model_copy(update={"precision": "bfloat16"}).build(SHAPES[kind], CLASSES[kind], kind)
            cases[f"{choice.name} ({kind}, bfloat16)"] = flat_step(halved, x, y)
            if any(len(shape) == 4 for _, shape in model.layout.entries):
                cases[f"{choice.name} (kernels not channels-last)"] = flat_step(model, x, y, channels_last=False)
                last = x.contiguous(memory_format=torch.channels_last)
                cases[f"{choice.name} (inputs channels-last too)"] = flat_step(model, last, y)
    x, y = inputs("tokens")
    module = TorchLSTM()
    cases["torch.nn.LSTM (tokens)"] = step(module, list(module.parameters()), x, y)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for repetition in range(repetitions + 1):
        for name, run in cases.items():
            count = 1 if "LSTM" in name or "lstm" in name else 5
            started = time.process_time()
            for _ in range(count):
                run()
            if repetition:  # the first one warms up
                seconds[name].append((time.process_time() - started) / count)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        print(f"{name:45s} {1e3 * median:8.2f} ms  {median / medians['lenet (pixels)']:7.2f} x lenet")
    print(f"lstm against torch.nn.LSTM: {medians['lstm (tokens)'] / medians['torch.nn.LSTM (tokens)']:.2f} x")


def he(layout_entries: tuple[tuple[str, tuple[int, ...]], ...], generator: torch.Generator) -> Tensor:
    """Return He et al.'s initialization for all layers, with zero biases."""
    parts = []
    for _, shape in layout_entries:
        bound = math.sqrt(6 / math.prod(shape[1:])) if len(shape) > 1 else 0.0
        parts.append((2 * torch.rand(math.prod(shape), generator=generator) - 1) * bound)
    return torch.cat(parts)


def start(steps: int, lr: float) -> None:
    """Print mean training losses of the first steps."""
    official = datasets.load_dataset(datasets.find_dataset("fashion-mnist"), None)
    x = torch.tensor(official.train.inputs).float() / 255
    x, y = (x - x.mean()) / x.std(), torch.tensor(official.train.labels)
    for choice in (ResNet20Settings(), CNNSettings(), VGGSettings()):
        padded = F.pad(x, (2, 2, 2, 2)) if choice.name == "vgg" else x
        model = choice.build(tuple(padded.shape[1:]), 10)
        for name in ("PyTorch", "He", "ours"):
            generator = torch.Generator().manual_seed(0)
            if name == "PyTorch":
                theta = PlainInit(model).init(generator)
            else:
                theta = he(model.layout.entries, generator) if name == "He" else model.init(generator)
            parameters = model.layout.leaves(theta, requires_grad=True)
            leaves = list(parameters.values())
            momentum = [torch.zeros_like(leaf) for leaf in leaves]
            losses = []
            for _ in range(steps):
                index = torch.randint(len(y), (BATCH,), generator=generator)
                loss = F.cross_entropy(model.forward(parameters, padded[index]), y[index])
                gradients = torch.autograd.grad(loss, leaves)
                with torch.no_grad():
                    torch._foreach_mul_(momentum, 0.9)
                    torch._foreach_add_(momentum, gradients)
                    torch._foreach_add_(leaves, momentum, alpha=-lr)
                losses.append(loss.item())
            fifth = max(steps // 5, 1)
            means = [f"{statistics.mean(losses[i : i + fifth]):.2f}" for i in range(0, steps, fifth)]
            print(f"{choice.name:10s} {name:8s} lr {lr}: {' '.join(means)}", flush=True)


class PlainInit(FlatNetwork):
    """PyTorch's layer initialization for any layout."""

    def __init__(self, model: FlatModel) -> None:
        self.layout = model.layout


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["speed", "start"])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.01)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "speed":
        speed(options.repetitions)
    else:
        start(options.steps, options.lr)


if __name__ == "__main__":
    main()
