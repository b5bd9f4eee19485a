"""Tiny experiments for trials, their processes, and the comparison of two runs."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from conformance_kit import MODELS, TINY
from forked import Popen, children
from run_processes import alive, final, losses, scores
from s3_support import S3Server

from fedloom import experiment as experiments
from fedloom.algorithms.base import available
from fedloom.engine import assemble, run_data
from fedloom.federation.states import States
from fedloom.runs.folder import RunFolder
from fedloom.runs.journal import Journal
from fedloom.storage import open_store

PROGRAM = Path(__file__).with_name("program.py")
PATIENCE_S = 120.0  # for a process to end; machines are busy
METHODS = tuple(name for name in sorted({*available(), *TINY}) if name.partition(":")[0] in available())
"""Every registered method, some with a second setting."""


class Broken(AssertionError):
    """Violation of a guarantee, with details."""


class Place:
    """A folder with a partition, experiments, and undisturbed runs of them to compare with.

    Parameters
    ----------
    root
        Data root with Fashion-MNIST.
    s3
        Store for trials that publish.
    rounds
        Rounds of the endurance trial.
    thorough
        Run cheap trials by the thousand.
    """

    def __init__(
        self, folder: Path, root: Path, s3: S3Server | None, rounds: int = 25_000, thorough: bool = True
    ) -> None:
        self.folder = folder
        self.s3 = s3
        self.rounds, self.thorough = rounds, thorough
        self._root = root
        self._truths: dict[tuple[Path, str], Path] = {}
        self._counts: dict[Path, int] = {}
        self._numbers = iter(range(1, 1 << 62))
        dataset = run_data.make_partition(experiments.load_experiment(self.experiment("fedavg")))
        self.partition = dataset.folder
        self.clients = [entry.id for entry in dataset.manifest.clients]

    def new(self) -> Path:
        """Return an unused path."""
        return self.folder / f"trial-{next(self._numbers)}"

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of the processes."""
        return {**os.environ, "OMP_NUM_THREADS": "1", **(self.s3.environment if self.s3 else {})}

    def other_partition(self) -> Path:
        """Return a partition that no experiment here uses."""
        other = experiments.load_experiment(self.experiment("fedavg"), ["seed=6"])
        return run_data.make_partition(other).folder

    def experiment(self, method: str, every: int = 3, **federation: Any) -> Path:
        """Write an experiment: six seen clients and two unseen, three in a cohort, evaluated every so many rounds."""
        name = method.partition(":")[0]
        tree = {
            "name": "faults",
            "seed": 5,
            "data": {
                "dataset": "fashion-mnist",
                "root": str(self._root),
                "partition": {
                    "scheme": "classes", "clients": 8, "classes_per_client": 2, "shares": [0.8, 0.2],
                    "train_per_client": 12, "test_per_client": 4,
                },
                "held_out_fraction": 0.25,
            },
            "model": MODELS.get(name, {"name": "mlp", "hidden": [4]}),
            "algorithm": {"name": name, **TINY.get(method, {})},
            "federation": {
                "rounds": 0 if name == "local" else 6, "clients_per_round": 3, "deadline_s": 300.0,
                "checkpoint_every_s": 0.0, **federation,
            },
            "evaluation": {"every": every, "cohort": 4, "batch_size": 16},
            "runtime": {"workers": 0},
        }  # fmt: skip
        text = yaml.safe_dump(tree)
        path = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.yaml"
        if not path.exists():
            path.write_text(text)
        return path

    def truth(self, experiment: Path, *, replay: Path | None = None) -> Path:
        """Return the folder of an undisturbed run, or of the replay of a disturbed one, in one process."""
        key = (experiment, str(replay))
        if key not in self._truths:
            out, count = self.new(), self.new()
            again = () if replay is None else ("--replay", replay)
            given = {"FAULTS_UNDER": str(out), "FAULTS_COUNT": str(count)}
            with self.start("run", experiment, "--out", out, "--partition", self.partition, *again, **given) as run:
                run.wait(0)
            self._truths[key], self._counts[out] = out, int(count.read_text())
        return self._truths[key]

    def operations(self, experiment: Path) -> int:
        """Return the number of file operations of an undisturbed run."""
        return self._counts[self.truth(experiment)]

    @contextmanager
    def start(self, *arguments: object, **given: str) -> Iterator[Running]:
        """Run ``fedloom`` with these arguments and additional environment; no process outlives the block."""
        running = Running(arguments, {**self.environment, **given}, self.new())
        try:
            yield running
        finally:
            running.end()

    def check(self, run: Path, experiment: Path, *, nobody_lost: bool = True) -> None:
        """Compare a disturbed run with the replay of its journal and, if no client was lost, with an undisturbed run.

        Raises
        ------
        Broken
            If anything differs, or a client was lost that should not have been.
        """
        lost = losses(run)
        if lost and nobody_lost:
            raise Broken(f"{len(lost)} rows were lost, first in round {lost[0][0]}: {lost[0][2]}")
        again = lost or any(line["attempt"] > 1 for line in RunFolder(run).lines("journal.jsonl"))
        truth = self.truth(experiment, replay=run if again else None)
        ours, theirs = self.outcome(run), self.outcome(truth)
        for what in theirs:
            if ours[what] != theirs[what]:
                raise Broken(f"{what} of {run} differs from {truth}")

    def outcome(self, run: Path) -> dict[str, Any]:
        """Return the parts that must be equal to the bit: the last checkpoint, evaluations, and clients' states."""
        numbers = ("round", "seen", "unseen", "global")
        lines = [{name: line[name] for name in numbers} for line in RunFolder(run).lines("metrics.jsonl")]
        return {
            "checkpoint": hashlib.sha256(final(run)).hexdigest(),
            "summary.json": scores(run),
            "metrics.jsonl": lines,
            "clients.csv": (run / "clients.csv").read_text(),
            "client states": dict(self._states(run)),
        }

    def _states(self, run: Path) -> Iterator[tuple[str, str]]:
        """Return a digest of each client's state after the last round."""
        where = assemble.states_of(RunFolder(run))
        store = open_store(where, self.environment)
        if next(iter(store.entries()), None) is None:
            return  # the method's clients keep none; otherwise the other run has them
        states = States(store)
        journal = Journal.read(RunFolder(run))
        for entry in RunFolder(run).manifest().clients:
            version = journal.version(entry.id, 1 << 30)
            kept = None if version is None else states.load(entry.id, version)
            if version is not None and kept is None:
                raise Broken(f"the state {version} of {entry.id} is gone")
            if kept is not None:
                digest = hashlib.sha256()
                for name in sorted(kept):
                    digest.update(name.encode() + kept[name].numpy().tobytes())
                yield entry.id, digest.hexdigest()


class Running:
    """A running command, with its output in a file."""

    def __init__(self, arguments: Sequence[object], environment: Mapping[str, str], said: Path) -> None:
        self.said_in = said
        no_report = ["--no-report"] if arguments[0] in ("run", "aggregator") else []
        with said.open("wb") as out:
            self.process = Popen(
                [sys.executable, str(PROGRAM), *map(str, arguments), *no_report],
                env=dict(environment), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                dies_with_parent=True,
            )  # fmt: skip
        self.pid: int = self.process.pid

    @property
    def said(self) -> str:
        """Return the output so far."""
        return self.said_in.read_text(errors="replace")

    def wait(self, *codes: int, patience_s: float = PATIENCE_S) -> int:
        """Wait for the process to end.

        Raises
        ------
        Broken
            If it does not end, or ends with another code than these.
        """
        try:
            code: int = self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise Broken(f"{self.process.args[2]} has not ended after {patience_s:g} s: {self.said[-300:]}") from None
        if code not in codes:
            raise Broken(f"{self.process.args[2]} ended with {code}, expected {codes}: {self.said[-500:]}")
        return code

    def ended_within(self, seconds: float) -> bool:
        """Return True if the process ends by itself in that time."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> bool:
        """Send SIGKILL; return True if the process was still running."""
        there = self.process.poll() is None
        self.process.kill()
        self.process.wait()
        return there

    def end(self) -> None:
        """Kill the process and its children."""
        family = [self.pid, *children(self.pid)]
        for pid in family:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()
        until = time.monotonic() + 10
        while any(alive(pid) for pid in family) and time.monotonic() < until:
            time.sleep(0.005)

    def memory_mb(self) -> float:
        """Return the peak memory of the process."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
        return 0.0

    def descriptors(self) -> int:
        """Return the number of its open files and connections."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))


def wait_until(condition: Any, what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds, or fail."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            raise Broken(f"it never happened in {patience_s:g} s: {what}")
        time.sleep(0.01)


def journal_lines(run: Path, up_to: int) -> list[str]:
    """Return the journal up to a round as text: seconds and incarnations show if a round was repeated."""
    return [
        json.dumps(line, sort_keys=True) for line in RunFolder(run).lines("journal.jsonl") if line["round"] <= up_to
    ]


def durable(run: Path) -> int:
    """Return the round of a run's last checkpoint; -1 without one."""
    names = (path.stem.removeprefix("round-") for path in (run / "checkpoints").glob("round-*.safetensors"))
    return max((int(name) for name in names), default=-1)
