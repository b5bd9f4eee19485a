"""Federations whose processes are of two versions: the released one before, from git's history, and this one.

They must give the bits of a federation of one version, and go on when one side after the other is upgraded.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from facts import tells
from ports import free_address
from run_processes import ended, fedloom, final, rounds, started, until
from vowel_data import vowel_examples

from fedloom import __version__
from fedloom.data.datasets import find_dataset
from fedloom.data.own import Own
from fedloom.data.pack import PackSettings, pack
from fedloom.data.pack.examples import Request

pytestmark = pytest.mark.slow

BEFORE = "9370e5c5"
"""Commit of the version before: protocol 9, package 0.1.0."""

NOW: dict[str, str] = {}
"""Environment of processes of this version."""

REPOSITORY = Path(__file__).parents[2]
CLASS_NAMES = find_dataset("vowel").spec.class_names
OWN = Own(kind="features", input_shape=(9,), classes=CLASS_NAMES)

EXPERIMENT = f"""\
name: upgrades
seed: 3
data: {{own: {{kind: features, input_shape: [9], classes: [{", ".join(CLASS_NAMES)}]}}}}
model: {{name: mlp, hidden: [6]}}
algorithm: {{name: fedavg, local: {{steps: 2, lr: 0.1}}}}
federation: {{rounds: ROUNDS, clients_per_round: 3, min_clients: 3, deadline_s: 200, checkpoint_every_s: 0, MORE}}
evaluation: {{every: EVERY}}
runtime: {{workers: 0}}
"""
PLAIN = "heartbeat_timeout_s: 600"
SECURE = f"{PLAIN}, secure_aggregation: {{signatures: none, examples: 1000}}"


@pytest.fixture(scope="session")
def before(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of processes of the version before."""
    archive = subprocess.run(["git", "-C", str(REPOSITORY), "archive", BEFORE, "src"], capture_output=True)
    if archive.returncode:
        pytest.skip(f"the version before is not here: git archive {BEFORE}: {archive.stderr.decode().strip()}")
    folder = tmp_path_factory.mktemp("before")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    # Another value of a PYTHON... variable: a real start, not a fork that has imported this version.
    return {"PYTHONPATH": str(folder / "src"), "PYTHONHASHSEED": "0", "RELEASE": "before"}


@pytest.fixture(scope="session")
def after(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of processes of this version, released under another version of the package."""
    source = tmp_path_factory.mktemp("after") / "src"
    shutil.copytree(REPOSITORY / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    package = source / "fedloom" / "__init__.py"
    package.write_text(package.read_text().replace(f'__version__ = "{__version__}"', '__version__ = "7.8.9"'))
    assert "7.8.9" in package.read_text()
    return {"PYTHONPATH": str(source), "PYTHONHASHSEED": "0"}


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return three packed speakers: ``s0`` to ``s2``."""
    root = tmp_path_factory.mktemp("members")
    x, y, owners = vowel_examples()
    for speaker in range(3):
        np.savez(root / "source.npz", x=x[owners == speaker], y=y[owners == speaker])
        pack(root / "source.npz", root / f"s{speaker}", PackSettings(f"speaker-{speaker}", Request(OWN.spec)))
    return root


class Federation:
    """An aggregator and three members, each of either version."""

    def __init__(self, folder: Path, members: Path, processes: contextlib.ExitStack, more: str, rounds: int) -> None:
        self.run, self.members, self._processes = folder / "run", members, processes
        self.experiment = folder / "upgrades.yaml"
        text = EXPERIMENT.replace("MORE", more).replace("ROUNDS", str(rounds)).replace("EVERY", str(rounds // 2))
        self.experiment.write_text(text)
        self.address = free_address()

    def aggregator(self, environment: dict[str, str], *arguments: object) -> subprocess.Popen[str]:
        at = ("aggregator", self.experiment, "--listen", self.address, "--out", self.run, "--no-report")
        return self._processes.enter_context(started(*at, *arguments, environment=environment))

    def member(self, i: int, environment: dict[str, str]) -> subprocess.Popen[str]:
        at = ("worker", "--aggregator", self.address, "--name", f"w{i}", "--reconnect", 200)
        folder = self.members / f"s{i}"
        return self._processes.enter_context(started(*at, "--data", folder, environment=environment))


@contextlib.contextmanager
def federation(folder: Path, members: Path, more: str = PLAIN, rounds: int = 4) -> Iterator[Federation]:
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as processes:
        yield Federation(folder, members, processes, more, rounds)


def completed(folder: Path, members: Path, more: str, aggregator: dict[str, str], *workers: dict[str, str]) -> bytes:
    """Run a federation of these versions to its end and return its last checkpoint."""
    with federation(folder, members, more) as its:
        server = its.aggregator(aggregator)
        joined = [its.member(i, version) for i, version in enumerate(workers)]
        ended(server, 0)
        outputs = [ended(worker, 0) for worker in joined]
        spoken = 9 if "RELEASE" in aggregator else 10
        for output, worker in zip(outputs, workers, strict=True):
            assert tells(output, f"protocol {spoken}") or "RELEASE" in worker
        return final(its.run)


@pytest.mark.parametrize("more", [PLAIN, SECURE], ids=["plain", "secure"])
def test_two_versions_give_the_bits_of_one(
    tmp_path: Path, members: Path, before: dict[str, str], after: dict[str, str], more: str
) -> None:
    bits = completed(tmp_path / "one", members, more, NOW, NOW, NOW, NOW)
    assert completed(tmp_path / "old-aggregator", members, more, before, after, after, NOW) == bits
    assert completed(tmp_path / "old-members", members, more, after, before, before, before) == bits
    assert completed(tmp_path / "mixed", members, more, NOW, after, before, NOW) == bits


def test_a_server_and_a_client_of_two_versions_exchange_the_same_model(
    tmp_path: Path, members: Path, before: dict[str, str], after: dict[str, str]
) -> None:
    completed(tmp_path, members, PLAIN, NOW, NOW, NOW, NOW)
    models = []
    for server, client in ((NOW, NOW), (before, after), (after, before)):
        address, model = free_address(), tmp_path / f"{len(models)}.safetensors"
        with started("serve", tmp_path / "run", "--listen", address, environment=server):
            fedloom("personalize", address, "--data", members / "s0", "--out", model, environment=client)
        models.append(model.read_bytes())
    assert models[0] == models[1] == models[2]


def test_the_status_is_shown_across_versions(tmp_path: Path, members: Path, before: dict[str, str]) -> None:
    for server, client in ((before, NOW), (NOW, before)):
        with federation(tmp_path / f"{bool(server)}", members) as its:
            its.aggregator(server)
            member = its.member(0, client)
            assert member.stdout is not None
            next(line for line in member.stdout if "joined run" in line)
            (worker,) = json.loads(fedloom("status", its.address, "--json", environment=client))["workers"]
            assert worker["name"] == "w0"
            assert tells(fedloom("status", its.address, "--once", environment=client), "w0", "1 client")


# ---- upgrades within a run

LONG = 600
"""Rounds of a run in which every process is replaced: it waits while a member is away."""


def upgraded(its: Federation, process: subprocess.Popen[str], start: Callable[[], Any], code: int = 130) -> Any:
    """Stop a process as an operator does, start its next version, and wait for more rounds."""
    before = rounds(its.run)
    until(lambda: rounds(its.run) >= before + 3, "rounds before the upgrade")
    process.terminate()
    ended(process, code)
    reached = rounds(its.run)
    assert reached < LONG
    new = start()
    until(lambda: rounds(its.run) >= reached + 3, "rounds after the upgrade")
    return new


@pytest.fixture(scope="module")
def bits(tmp_path_factory: pytest.TempPathFactory, members: Path) -> bytes:
    """Return the last checkpoint of the long run of one version."""
    with federation(tmp_path_factory.mktemp("long"), members, rounds=LONG) as its:
        server = its.aggregator(NOW)
        joined = [its.member(i, NOW) for i in range(3)]
        ended(server, 0)
        for worker in joined:
            ended(worker, 0)
        return final(its.run)


@pytest.mark.parametrize("first", ["members", "aggregator"])
def test_a_rolling_upgrade_keeps_the_bits(
    tmp_path: Path, members: Path, before: dict[str, str], bits: bytes, first: str
) -> None:
    with federation(tmp_path, members, rounds=LONG) as its:
        server = its.aggregator(before)
        joined = [its.member(i, before) for i in range(3)]
        until(lambda: (its.run / "journal.jsonl").exists(), "the journal")
        for step in ("members", "aggregator") if first == "members" else ("aggregator", "members"):
            if step == "aggregator":
                server = upgraded(its, server, lambda: its.aggregator(NOW, "--resume"))
            else:
                for i, worker in enumerate(joined):
                    joined[i] = upgraded(its, worker, functools.partial(its.member, i, NOW))
        ended(server, 0)
        for worker in joined:
            assert tells(ended(worker, 0), "protocol 10")
        assert final(its.run) == bits
