"""Whole rounds of a real method over connections that break all the time: no client is lost, and no bit changes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from transport_support import Proxy

from fedloom import experiment as experiments
from fedloom.engine import assemble, distributed, loops, run_data
from fedloom.engine.observer import RunObserver
from fedloom.engine.options import WorkerOptions
from fedloom.engine.worker import Worker
from fedloom.federation.evaluator import LoopHooks
from fedloom.federation.loop import vocabulary
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import Journal
from fedloom.transport.aggregator import Aggregator
from fedloom.transport.exchanges import ServedRun

EXPERIMENT: dict[str, Any] = {
    "name": "cut",
    "seed": 3,
    "data": {
        "dataset": "tiny",
        "partition": {"scheme": "classes", "clients": 8, "classes_per_client": 2, "shares": [0.8, 0.2]},
        "held_out_fraction": 0.25,
    },
    "model": {"name": "mlp", "hidden": [4]},
    "algorithm": {
        "name": "pefll",
        "embedding": {"network": "mlp"},
        "local": {"epochs": 1, "batch_size": 8, "lr": 0.02},
    },
    "federation": {"rounds": 5, "clients_per_round": 6, "deadline_s": 300.0, "checkpoint_every_s": 0.0},
    "evaluation": {"every": 5, "cohort": 8},
    "runtime": {"workers": 0},
}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_pefll_over_connections_cut_every_40_kilobytes(tiny_root: Path, tmp_path: Path) -> None:
    tree = {**EXPERIMENT, "data": {**EXPERIMENT["data"], "root": str(tiny_root)}}
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(tree))
    e = experiments.load_experiment(path)
    dataset = run_data.make_partition(e)
    parts = assemble.make_parts(e, dataset.manifest)

    def folder(name: str) -> RunFolder:
        made = RunFolder(tmp_path / name)
        made.make()
        return made

    def final(name: str) -> bytes:
        return sorted((tmp_path / name / "checkpoints").glob("round-*"))[-1].read_bytes()

    undisturbed = folder("undisturbed")
    transport = assemble.in_process(parts, dataset, undisturbed)
    loops.loop(parts, transport, undisturbed, LoopHooks(RunObserver())).run()

    algorithm = parts.algorithm
    run = ServedRun(
        name="cut",
        incarnation="a1",
        experiment=distributed.welcome(parts),
        algorithm=algorithm.name,
        version=algorithm.version,
        vocabulary=vocabulary(algorithm),
        dtype=assemble.DTYPE,
        clients=[entry.id for entry in dataset.manifest.clients],
    )
    aggregator = Aggregator(run)
    address = aggregator.start("127.0.0.1:0")
    stop = threading.Event()
    proxies = [Proxy(address, cut_after=40_000, seed=seed) for seed in range(2)]
    options = WorkerOptions(str(dataset.folder), reconnect_s=300)
    workers = [Worker(proxy.address, f"w{i}", options) for i, proxy in enumerate(proxies)]
    threads = [threading.Thread(target=worker.serve, args=(stop,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        aggregator.wait_for([entry.id for entry in dataset.manifest.clients], 60, workers=2)
        loops.loop(parts, aggregator, folder("cut"), LoopHooks(RunObserver())).run()
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
        aggregator.stop()
        for proxy in proxies:
            proxy.close()
    assert sum(proxy.cuts for proxy in proxies) >= 20
    attempts = Journal.read(RunFolder(tmp_path / "cut")).attempts
    assert [
        conversation.lost for attempt in attempts for conversation in attempt.conversations if conversation.lost
    ] == []
    assert final("cut") == final("undisturbed")
