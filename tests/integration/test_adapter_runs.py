"""Runs whose θ is an adapter: equal bits with workers, and after a kill."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from forked import run as run_process
from lazy import lazy_or_skip
from run_processes import ENVIRONMENT, WAIT_S, final, scores

import fedloom
from fedloom.models.factories import FACTORIES

peft = lazy_or_skip("peft")
lazy_or_skip("transformers")
import adapter_models  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(600)]

TESTS = Path(__file__).parents[1]
N, CLASSES, FACTORY = 24, 3, "adapter_models:bert"
RNG = np.random.default_rng(4)
PATHS = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
FACTORIES_HERE = {FACTORIES: FACTORY, "PYTHONPATH": PATHS, "FORKED_IMPORTS": "transformers.models.bert peft"}
PEFLL = {
    "name": "pefll",
    "local": {"steps": 2, "batch_size": 8, "lr": 0.1},
    "descriptor": {"size": 3},
    "embedding": {"network": "pretrained"},
    "hypernetwork": {"start": "model"},
    "server": {"rule": "adam", "lr": 0.01},
}


def people(count: int) -> dict[str, tuple[Any, Any]]:
    """Return sentences of random words, and labels."""
    tokens = RNG.integers(0, adapter_models.WORDS, (count, N, adapter_models.LENGTH))
    return {f"p{i}": (x, x[:, 0] % CLASSES) for i, x in enumerate(tokens)}


def experiment(folder: Path, rounds: int) -> Path:
    """Write an experiment on four clients."""
    data = fedloom.Federated.from_arrays(people(4), root=folder / "data")
    tree = {
        "name": "adapters",
        "seed": 1,
        "data": json.loads(json.dumps(data.section, default=str)),
        "model": {
            "name": "module",
            "factory": FACTORY,
            "lora": {"rank": 2, "targets": ["query"], "train": ["classifier"]},
        },
        "algorithm": PEFLL,
        "federation": {"rounds": rounds, "clients_per_round": 2, "checkpoint_every_s": 0, "deadline_s": 200},
        "evaluation": {"every": rounds},
        "runtime": {"workers": 0},
    }
    path = folder / "e.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def ends(code: int, out: Path, *arguments: object, **given: object) -> None:
    """Run a command as the trials of faults do; it must end with this code."""
    command = [sys.executable, str(TESTS / "faults" / "program.py"), *map(str, arguments), "--out", str(out)]
    environment = {**ENVIRONMENT, **FACTORIES_HERE, "FAULTS_UNDER": str(out)}
    environment |= {name: str(value) for name, value in given.items()}
    done = run_process(command, env=environment, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == code, done.stdout + done.stderr


def test_workers_and_a_kill_do_not_change_results(tmp_path: Path) -> None:
    path, whole, killed, count = experiment(tmp_path, rounds=3), *(tmp_path / name for name in ("whole", "killed", "n"))
    run = ("run", path, "--no-report")
    ends(0, whole, *run, FAULTS_COUNT=count)
    ends(0, tmp_path / "two", *run, "--workers", 2)
    ends(-signal.SIGKILL, killed, *run, FAULTS_DIE_AT=int(count.read_text()) // 2)
    ends(0, killed, *run, "--resume")
    for out in (tmp_path / "two", killed):
        assert final(out) == final(whole)
        assert scores(out) == scores(whole)
