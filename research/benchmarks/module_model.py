"""Client steps of users' modules (``model: module``) relative to bare loops, and LeNet relative to the built-in one.

    .venv/bin/python research/benchmarks/module_model.py [--models LeNet ResNet18 ...] [--pairs 10] [--json FILE]

Speed: both sides of a comparison train from the same point on the same examples, in turns, with one thread. The figure
is the median ratio of CPU times of pairs of turns, which depends least on other work on the machine, and the range of
its middle half. The table says if the LeNets' bits differ. The bare loop is torch's module and ``torch.optim.SGD``.

Memory: peak resident memory of a fresh process that makes three visits: the bare loop, which imports torch and the
model's library, and a client's conversations of FedAvg, in a process that has imported all that a worker imports.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from bare_models import BATCH, EXAMPLES, LR, MODELS, MOMENTUM, Model, bare_loop
from common import MIB, describe, machine, resident_bytes, table, write_json
from torch import Tensor

VISITS = 3


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", choices=list(MODELS), nargs="*", default=list(MODELS))
    parser.add_argument("--pairs", type=int, default=20, help="number of pairs of measurements")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--visits-of", choices=["bare", "worker"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.visits_of:
        make = bare_visit if options.visits_of == "bare" else worker_visit
        visit = make(MODELS[options.models[0]])
        for _ in range(VISITS):
            visit()
        print(resident_bytes(os.getpid(), "VmHWM"))
        return
    about = machine()
    print(describe(about))
    found: dict[str, Any] = {}
    for name in options.models:
        found[name] = speed(name, options.pairs) | memory(name)
        print(".", end="", flush=True)
        write_json(options.json, about, found)
    head = ["", "ms a step, bare", "of the bare loop's speed", "of the built-in one's", "MiB, bare", "worker", "ratio"]
    print("\n\n" + table(head, [_line(name, figures) for name, figures in found.items()]))
    print("\nCPU time; median and middle half of the ratios of pairs; peak memory of a process")


def batches_of(model: Model) -> list[Tensor]:
    """Return the batches of a visit."""
    order = torch.split(torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(1)), BATCH)
    return [order[t % len(order)] for t in range(model.steps)]


def bare_visit(model: Model) -> Callable[[], Tensor]:
    """Return a visit of the bare loop."""
    return bare_loop(model, lambda: batches_of(model))


def group_of(model: Model) -> Any:
    """Return a group of one client."""
    from fedloom.algorithms.client_group import ClientGroup
    from fedloom.data.federated import ClientData, Split

    split = Split(*model.examples())
    client = ClientData("client", split, split, split, model.outputs)
    return ClientGroup([client], lambda client, purpose: torch.Generator().manual_seed(1))


def module_of(model: Model) -> Any:
    """Return FedLoom's model of a module."""
    from fedloom.models.module import ModuleModel
    from fedloom.models.module_call import SingleInput
    from fedloom.tasks.registry import OWN_TASKS

    shape: Any = model.shape
    tasks = {task.name: task for task in OWN_TASKS}
    if isinstance(shape, Mapping):
        shape = {name: SingleInput("integers", s, high) for name, (s, high) in shape.items()}
    return ModuleModel(
        model.make, shape, model.outputs, model.kind,
        task=tasks[model.task], target_shape=model.target_shape,
    )  # fmt: skip


def fedloom_visit(flat: Any, model: Model) -> Callable[[], Tensor]:
    """Return a visit of local training in FedLoom."""
    from fedloom.algorithms.client import train
    from fedloom.algorithms.local_sgd import LocalSGD

    group, settings = group_of(model), LocalSGD(steps=model.steps, batch_size=BATCH, lr=LR, momentum=MOMENTUM)
    theta = flat.init(torch.Generator().manual_seed(2))[None]
    return lambda: train(flat, group, theta, settings).theta


def worker_visit(model: Model) -> Callable[[], object]:
    """Return a client's conversation of FedAvg, from the message with θ to the answer with its change."""
    import fedloom.engine.worker  # noqa: F401  # all that a worker process has imported
    from fedloom.algorithms.base import Setup
    from fedloom.algorithms.fedavg import FEDAVG, SharedModel

    group, flat = group_of(model), module_of(model)
    local = {"steps": model.steps, "batch_size": BATCH, "lr": LR, "momentum": MOMENTUM}
    settings = FEDAVG.settings.model_validate({"local": local})
    side = FEDAVG.client(settings, Setup(flat, model.outputs, (), 1, roster=("client",)))
    theta = flat.init(torch.Generator().manual_seed(2))
    return lambda: next(side.open(group, SharedModel(theta)))


def speed(name: str, pairs: int) -> dict[str, Any]:
    """Return the CPU seconds of the visits of all sides, which take turns."""
    model = MODELS[name]
    sides = {"bare": bare_visit(model), "module": fedloom_visit(module_of(model), model)}
    if name == "LeNet":
        from fedloom.models.networks import LeNet

        sides["built in"] = fedloom_visit(LeNet((1, 28, 28), model.outputs), model)
    seconds, equal = {side: list[float]() for side in sides}, True
    for turn in range(pairs + 2):
        ends = {}
        for side in (*sides,) if turn % 2 else reversed((*sides,)):
            started = time.process_time()
            ends[side] = sides[side]()
            if turn > 1:  # the first turns warm the caches
                seconds[side].append(time.process_time() - started)
        equal &= torch.equal(ends["module"], ends.get("built in", ends["module"]))
    return {"seconds": seconds, "steps": model.steps, "equal_bits": equal}


def memory(name: str) -> dict[str, int]:
    """Return the peak memory of a process of each side."""
    command = [sys.executable, __file__, "--models", name, "--visits-of"]
    return {
        f"{side}_bytes": int(subprocess.run([*command, side], check=True, capture_output=True, text=True).stdout)
        for side in ("bare", "worker")
    }


def _line(name: str, figures: Mapping[str, Any]) -> list[str]:
    seconds, (bare, worker) = figures["seconds"], (figures["bare_bytes"], figures["worker_bytes"])
    step = 1000 * statistics.median(seconds["bare"]) / figures["steps"]
    built_in = _ratio(seconds["built in"], seconds["module"]) if "built in" in seconds else ""
    built_in += "" if figures["equal_bits"] else ", other bits"  # on some processors
    ratio = _ratio(seconds["bare"], seconds["module"])
    return [name, f"{step:.2f}", ratio, built_in, f"{bare / MIB:.0f}", f"{worker / MIB:.0f}", f"{worker / bare:.2f}"]


def _ratio(other: list[float], module: list[float]) -> str:
    ratios = [100 * a / b for a, b in zip(other, module, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.0f} % ({low:.0f}-{high:.0f})"


if __name__ == "__main__":
    main()
