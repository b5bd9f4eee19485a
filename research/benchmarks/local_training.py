"""Client steps per second of ``fedloom run`` relative to a bare PyTorch loop of the same model, in one session.

    .venv/bin/python research/benchmarks/local_training.py [--json FILE]

Machines are noisy, so every figure is a ratio to the bare loop measured just before and just after it, and the median
over repetitions is reported. The bare loop is the fastest known way to write it (channels-last, ReLU after pooling,
``SGD(foreach=True)``, batches indexed from one tensor), on the data of one client of the same partition, with one
thread. ``fedloom run`` is the whole program, wire included; its rate is ``client_steps_per_s`` of ``summary.json``:
local SGD steps over the wall time of the training rounds, everything included. The gain from two workers is limited
to that of two bare loops run at once in two processes: cores of one machine share caches, memory and power.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from bare_models import BareLeNet
from common import ROOT, describe, import_torch_s, machine, write_json

from fedloom import experiment as experiments
from fedloom.data.inputs import single
from fedloom.engine.run_data import make_partition

EXPERIMENT = ROOT / "experiments" / "pefll-fashion-mnist.yaml"


def bare_rate(x: torch.Tensor, y: torch.Tensor, seconds: float) -> float:
    """Return the steps per second of the bare loop."""
    net = BareLeNet().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.005, momentum=0.9, foreach=True)
    x = x.to(memory_format=torch.channels_last)
    batches = torch.split(torch.randperm(len(x))[: len(x) // 32 * 32], 32)

    def steps(count: int) -> None:
        for t in range(count):
            index = batches[t % len(batches)]
            optimizer.zero_grad()
            F.cross_entropy(net(x[index]), y[index]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    steps(20)
    made, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        steps(10)
        made += 10
    return made / (time.perf_counter() - started)


def fedloom_run(out: Path, rounds: int, cohort: int, workers: int) -> dict[str, object]:
    """Run the experiment without intermediate evaluations; return its summary, phases and start-up time."""
    command = [sys.executable, "-m", "fedloom", "run", str(EXPERIMENT), "--out", str(out), "--workers", str(workers)]
    for setting in (
        f"federation.rounds={rounds}",
        f"federation.clients_per_round={cohort}",
        f"evaluation.every={rounds}",
    ):
        command += ["--set", setting]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    summary = json.loads((out / "summary.json").read_text())
    attempts = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
    phases: dict[str, float] = {}
    for attempt in attempts:
        for name, seconds in attempt["phases"].items():
            phases[name] = phases.get(name, 0.0) + seconds / len(attempts)
    log = (out / "logs" / "aggregator.jsonl").read_text()
    ready = re.search(r"ready to train after ([0-9.]+) s", log)
    evaluations = [float(s) for s in re.findall(r"evaluated \d+ clients after round \d+ in ([0-9.]+) s", log)]
    return {
        "rate": summary["client_steps_per_s"],
        "phases": phases,
        "ready_s": float(ready[1]) if ready else None,
        "evaluation_s": min(evaluations),
    }


def bare_at_once(processes: int, seconds: float) -> float:
    """Return the total steps per second of this many bare loops, each in its own process."""
    command = [sys.executable, __file__, "--bare", "--seconds", str(seconds)]
    loops = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    return sum(float(loop.communicate()[0]) for loop in loops)


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bare", action="store_true", help="only print the rate of the bare loop")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of each measurement of the bare loop")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dataset = make_partition(experiments.load_experiment(EXPERIMENT))
    client = dataset.client(dataset.manifest.roster[0])
    x, y = single(client.train.x), client.train.y
    assert y is not None
    if options.bare:
        print(bare_rate(x, y, options.seconds))
        return
    about = machine()
    print(describe(about))

    cases = {"1 worker, cohort 5": (5, 1), "1 worker, cohort 6": (6, 1), "2 workers, cohort 6": (6, 2)}
    ratios: dict[str, list[float]] = {name: [] for name in cases}
    last: dict[str, dict[str, object]] = {}
    torch_s = import_torch_s()
    bounds: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        before = bare_rate(x, y, options.seconds)
        for repetition in range(options.repetitions):
            bounds.append(bare_at_once(2, options.seconds) / bare_at_once(1, options.seconds))
            print(f"two bare loops at once against one: {bounds[-1]:.2f}x")
            for name, (cohort, workers) in cases.items():
                out = Path(scratch) / f"{repetition}-{cohort}-{workers}"
                last[name] = fedloom_run(out, options.rounds, cohort, workers)
                after = bare_rate(x, y, options.seconds)
                rate = last[name]["rate"]
                assert isinstance(rate, float)
                ratios[name].append(rate / ((before + after) / 2))
                print(f"{name}: {rate:.1f} steps/s, bare {before:.1f} and {after:.1f}: {ratios[name][-1]:.3f}")
                before = after
    print()
    figures = {name: statistics.median(values) for name, values in ratios.items()}
    for name, ratio in figures.items():
        phases = last[name]["phases"]
        assert isinstance(phases, dict)
        total = sum(phases.values())
        split = ", ".join(f"{phase} {1e3 * s:.0f} ms ({s / total:.1%})" for phase, s in phases.items())
        print(f"{name}: {ratio:.1%} of the bare loop; a round: {split}")
    pairs = [two / one for one, two in zip(ratios["1 worker, cohort 6"], ratios["2 workers, cohort 6"], strict=True)]
    print(f"two workers against one, cohort of 6: {statistics.median(pairs):.2f}x", end="; ")
    print(f"two bare loops at once against one: {statistics.median(bounds):.2f}x")
    one = last["1 worker, cohort 5"]
    print(f"import torch once: {torch_s:.1f} s; ready to train {one['ready_s']} s after the imports")
    print(f"evaluating 100 clients: {one['evaluation_s']} s with 1 worker, ", end="")
    print(f"{last['2 workers, cohort 6']['evaluation_s']} s with 2")
    write_json(options.json, about, {"ratios": ratios, "median": figures, "bounds": bounds, "last": last})


if __name__ == "__main__":
    main()
