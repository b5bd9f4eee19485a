"""GPU-only measurements (`make cuda`), in parts of less than ten minutes and forty minutes in total.

    .venv/bin/python research/benchmarks/gpu.py                            all parts on the GPU, results in runs/cuda
    .venv/bin/python research/benchmarks/gpu.py agreement speed            some of them
    .venv/bin/python research/benchmarks/gpu.py --device cpu --tiny    the same code on a CPU in a minute, in tiny sizes

``agreement``: clients trained at once on the device against one after another on the CPU, in float64 and float32, and
likewise every method's conversation of a round; repeatability to the bit; memory per client. ``speed``: client steps
per second for 1 to 256 clients at once, compared with the same clients one after another and with a bare autograd
loop. ``table``: PeFLL's Table 1 on CIFAR-10 for three seeds (experiments/pefll-cifar10.yaml; requires
``fedloom data fetch cifar10``), stopped after ``--minutes`` and resumed by the next call. Each part writes
OUT/PART.json; the tables of all parts are OUT/gpu.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import describe, machine, table
from torch import Tensor

from fedloom.algorithms.base import Algorithm, Setup, find_algorithm
from fedloom.algorithms.client import train
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.local_sgd import LocalSGD
from fedloom.data.federated import ClientData, Split
from fedloom.data.inputs import single
from fedloom.engine.assemble import use_device
from fedloom.engine.device import CLASSES, IMAGE, TOKENS
from fedloom.engine.device import random_clients as clients
from fedloom.evaluation.plan import EvaluationPlan
from fedloom.federation.client_side import ClientConfig, ClientSide, InProcess
from fedloom.federation.cohort import RoundConfig
from fedloom.federation.loop import vocabulary
from fedloom.federation.randomness import generator
from fedloom.federation.round_attempt import RoundAttempt
from fedloom.federation.states import States, Versions
from fedloom.federation.validation import out_of_range
from fedloom.messages import answer_shapes
from fedloom.models.flat import FlatModel
from fedloom.models.networks import LSTM, MLP, LeNet, ResNet20
from fedloom.runs.journal import Attempt
from fedloom.storage import open_store

ROOT = Path(__file__).parents[2]
METHODS: dict[str, dict[str, Any]] = {
    "pefll": {"local": {"steps": 5}, "embedding": {"network": "mlp"}},
    "apfl": {"local": {"steps": 3}},
    "ditto": {"local": {"steps": 3}, "personal": {"steps": 3}},
    "fedavg": {"local": {"steps": 5}},
    "fedala": {"local": {"steps": 5}},
    "fedbabu": {"local": {"steps": 5}},
    "feddyn": {"local": {"steps": 5}},
    "fedper": {"local": {"steps": 5}},
    "fedproto": {"local": {"steps": 3}},
    "fedprox": {"local": {"steps": 5}, "mu": 0.1},
    "fedrep": {"head": {"steps": 3}, "local": {"steps": 3}},
    "fedrod": {"local": {"steps": 5}},
    "knn-per": {"local": {"steps": 5}},
    "lg-fedavg": {"local": {"steps": 5}},
    "moon": {"local": {"steps": 3}},
    "per-fedavg": {"local": {"steps": 3}, "hessian": "exact"},
    "pfedhn": {"local": {"steps": 5}},
    "pfedme": {"steps": 3, "inner_steps": 2},
    "pfedbayes": {"steps": 3, "optimizer": "adam"},
    "scaffold": {"local": {"steps": 5}},
    "comfedl": {"local": {"steps": 3}},
    "q-fedavg": {"local": {"steps": 3}},
    "drfa": {"local": {"steps": 3}},
    "afl": {},
    "tr-maml": {"local": {"steps": 3}},
    "heurfedamp": {"local": {"steps": 3}},
    "wga": {"users": "all", "steps_per_round": 2},
}


def models(tiny: bool) -> dict[str, FlatModel]:
    """Return the models to train: the image models, and the character model."""
    if tiny:
        return {"lenet": LeNet(IMAGE, CLASSES), "lstm": LSTM(TOKENS, 4, 8, 1)}
    return {"lenet": LeNet(IMAGE, CLASSES), "resnet20": ResNet20(IMAGE, CLASSES), "lstm": LSTM(TOKENS)}


def group(members: Sequence[ClientData]) -> ClientGroup:
    """Return a group as a worker makes it."""
    return ClientGroup(members, lambda client, purpose: generator(1, purpose, client, 1))


def starts(model: FlatModel, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a separate θ for every client, ``[count, d]``."""
    return torch.stack([model.init(torch.Generator().manual_seed(i), dtype) for i in range(count)]).to(device)


def farthest(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest value."""
    return float((found.double().cpu() - expected.double().cpu()).abs().max() / expected.double().abs().max())


# --- agreement --------------------------------------------------------------------------------------------------------


def agreement(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Compare clients trained at once on the device with clients trained one after another on a CPU."""
    count, steps = (3, 2) if tiny else (16, 20)
    s, cpu = LocalSGD(steps=steps, batch_size=16, lr=0.01), torch.device("cpu")
    training = []
    for name, model in models(tiny).items():
        for dtype in (torch.float64, torch.float32):
            start = starts(model, count, dtype, cpu)
            alone = [
                train(model, group([one]), start[i : i + 1], s).theta
                for i, one in enumerate(clients(model, count, dtype, cpu))
            ]
            there = clients(model, count, dtype, device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            first, again = (train(model, group(there), start.to(device), s).theta for _ in range(2))
            training.append(
                {
                    "model": name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "difference": farthest(first, torch.cat(alone)),
                    "same_bits_twice": torch.equal(first, again),
                    "bytes_per_client": torch.cuda.max_memory_allocated() // count if device.type == "cuda" else None,
                }
            )
    conversations = [
        {
            "method": method,
            "difference": max(
                farthest(one[key], other[key]) for key in one if one[key].is_floating_point() and one[key].abs().sum()
            ),
        }
        for method, settings in METHODS.items()
        for algorithm in [find_algorithm(method)]
        for one, other in [
            (
                one_round(algorithm, settings, device, at_once=8, count=count),
                one_round(algorithm, settings, cpu, at_once=1, count=count),
            )
        ]
    ]
    return {"training": training, "conversations": conversations}


def one_round(
    algorithm: Algorithm, settings: dict[str, Any], device: torch.device, *, at_once: int, count: int
) -> dict[str, Tensor]:
    """Return the server's state after a round with all clients."""
    model = MLP(IMAGE, [16], CLASSES)
    there = {client.id: client for client in clients(model, count, torch.float32, torch.device("cpu"))}
    setup = Setup(model, CLASSES, IMAGE, count, roster=tuple(there))
    chosen = algorithm.settings.model_validate(settings)
    server, half = algorithm.server(chosen, setup, torch.Generator().manual_seed(0)), algorithm.client(chosen, setup)
    with tempfile.TemporaryDirectory() as states, ThreadPoolExecutor(1) as helper:
        held = ClientSide(
            half,
            vocabulary(algorithm),
            there.__getitem__,
            lambda predictors, group: EvaluationPlan.of_classes(CLASSES).nothing(len(group), len(half.predictors)),
            ClientConfig(1, device, at_once),
            states=States(open_store(states)) if half.stateful else None,
        )
        sizes = {name: len(client.train) for name, client in there.items()}
        rules = RoundConfig(
            1, count, 60.0, count, answer_shapes(algorithm.messages, server.sizes), threading.Event(),
            lambda client, answer: out_of_range(answer, server.update_bounds(sizes[client])),
            (lambda ids: tuple(Versions(None, frozenset(), 0) for _ in ids)) if half.stateful else None,
        )  # fmt: skip
        session = RoundAttempt(
            Attempt(1, 1), "train", tuple(there), sizes, InProcess(held, torch.float32), rules, helper
        )
        server.train_round(session)
        session.close()
        server.settle()
    return server.state


# --- speed ------------------------------------------------------------------------------------------------------------


def speed(device: torch.device, tiny: bool, minutes: float) -> list[dict[str, Any]]:
    """Return client steps per second: several clients at once, one after another, and a bare loop."""
    deadline = time.monotonic() + 60 * minutes
    widths = (1, 2) if tiny else (1, 4, 16, 64, 256)
    return [
        row for name, model in models(tiny).items() for row in speed_of(name, model, device, widths, tiny, deadline)
    ]


def speed_of(
    name: str, model: FlatModel, device: torch.device, widths: Sequence[int], tiny: bool, deadline: float
) -> list[dict[str, Any]]:
    """Return the rows of one model; empty once the time is up."""
    steps = 2 if tiny else 20
    s = LocalSGD(steps=steps, batch_size=32, lr=0.01)
    members = clients(model, max(widths), torch.float32, device)
    start = starts(model, max(widths), torch.float32, device)

    def at_once(first: int, last: int) -> None:
        train(model, group(members[first:last]), start[first:last], s)

    few = min(4, max(widths))

    def in_turn() -> None:
        for i in range(few):
            at_once(i, i + 1)

    one_by_one = rate(device, in_turn, few * steps)
    bare = rate(device, lambda: bare_loop(model, members[0].train, start[0], s), steps)
    rows = []
    for g in widths:
        in_time = time.monotonic() < deadline
        rows.append(
            {
                "model": name,
                "clients_at_once": g,
                "steps_per_s": rate(device, partial(at_once, 0, g), g * steps) if in_time else None,
                "one_after_another": one_by_one,
                "bare_loop": bare,
            }
        )
    return rows


def bare_loop(model: FlatModel, split: Split, theta: Tensor, s: LocalSGD) -> None:
    """Run forward, ``autograd.grad`` and an update in place, and nothing else."""
    w = model.layout.leaves(theta, requires_grad=True)
    leaves = list(w.values())
    momentum = [torch.zeros_like(leaf) for leaf in leaves]
    x, y = single(split.x)[: s.batch_size], split.y[: s.batch_size] if split.y is not None else None
    assert y is not None
    for _ in range(s.steps or 0):
        gradients = torch.autograd.grad(F.cross_entropy(model.forward(w, x), y), leaves)
        with torch.no_grad():
            torch._foreach_mul_(momentum, s.momentum or 0.0)
            torch._foreach_add_(momentum, gradients)
            torch._foreach_add_(leaves, momentum, alpha=-s.lr)


def rate(device: torch.device, run: Callable[[], object], steps: int) -> float:
    """Return steps per second: the best of three, after a warm-up."""
    best = float("inf")
    for repetition in range(4):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if repetition:
            best = min(best, time.perf_counter() - started)
    return steps / best


# --- PeFLL's Table 1 --------------------------------------------------------------------------------------------------


def table_1(device: torch.device, tiny: bool, minutes: float, out: Path) -> list[dict[str, Any]]:
    """Run or resume three seeds of PeFLL on CIFAR-10; return their results so far."""
    deadline, rows = time.monotonic() + 60 * minutes, []
    for seed in (1,) if tiny else (1, 2, 3):
        run = out / "table-1" / f"seed={seed}"
        changes = [f"seed={seed}", f"runtime.device={device.type}", "runtime.workers=0"]
        if device.type == "cuda":
            changes.append("runtime.clients_at_once=5")
        if tiny:
            changes += [
                "federation.rounds=1", "data.dataset=fashion-mnist", "evaluation.every=1", "algorithm.local.steps=1",
                "data.partition={scheme: fixed, clients: 9, train_per_class: 4, "
                "test_per_class: 2, labels_per_client: 2}",
            ]  # fmt: skip
        command = [sys.executable, "-m", "fedloom", "run", str(ROOT / "experiments" / "pefll-cifar10.yaml")]
        command += ["--out", str(run), "--resume", *(part for change in changes for part in ("--set", change))]
        if not (run / "summary.json").exists() and time.monotonic() < deadline:
            with subprocess.Popen(command) as process:
                try:
                    process.wait(timeout=max(1.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGTERM)  # it writes a checkpoint before it ends
            if process.returncode not in (0, 130, 5):
                raise SystemExit(f"{' '.join(command)}: ended with {process.returncode}")
        lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
        last = json.loads(lines[-1]) if lines else {}
        rows.append(
            {
                "seed": seed,
                "round": last.get("round"),
                **{name: (last.get(name) or {}).get("accuracy_mean") for name in ("seen", "unseen")},
                "finished": (run / "summary.json").exists(),
            }
        )
    return rows


# --- pages ------------------------------------------------------------------------------------------------------------


def page(out: Path) -> str:
    """Return the tables of all parts that have results."""
    parts = {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("*.json"))}
    lines = []
    for name, part in parts.items():
        lines += [f"## {name}", "", f"{part['device']}; {describe(part['machine'])}", ""]
        figures = part["figures"]
        for rows in figures.values() if isinstance(figures, dict) else [figures]:
            head = list(rows[0])
            lines += [table(head, [[shown(row.get(key)) for key in head] for row in rows]), ""]
    return "\n".join(lines)


def shown(value: Any) -> str:
    """Return a figure with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def main() -> None:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("agreement", "speed", "table")
    parser.add_argument("parts", nargs="*", default=names, metavar="|".join(names))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for about a minute on a CPU")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of speed and of table")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "cuda")
    options = parser.parse_args()
    for part in options.parts:
        if part not in names:
            parser.error(f"parts must be some of {', '.join(names)} (got {part!r})")
    device = use_device(options.device, min(4, os.cpu_count() or 1))
    options.out.mkdir(parents=True, exist_ok=True)
    for part in options.parts:
        started = time.monotonic()
        figures = {
            "agreement": lambda: agreement(device, options.tiny),
            "speed": lambda: speed(device, options.tiny, options.minutes),
            "table": lambda: table_1(device, options.tiny, options.minutes, options.out),
        }[part]()  # type: ignore[no-untyped-call]
        kind = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        document = {"device": kind, "machine": machine(), "figures": figures}
        (options.out / f"{part}.json").write_text(json.dumps(document, indent=1) + "\n")
        print(f"{part}: {time.monotonic() - started:.0f} s", flush=True)
    (options.out / "gpu.md").write_text(page(options.out))
    print(page(options.out))


if __name__ == "__main__":
    main()
