"""Every command of the tutorials works as the page says: its shell blocks are run, in order, in an empty folder."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from ports import free_port
from run_processes import WAIT_S, ended, fedloom, started
from safetensors.torch import load_file

from fedloom.data import datasets
from fedloom.data.folders import data_root
from fedloom.errors import DataError

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"


class Shell:
    """Runner of shell blocks; ``fedloom`` runs as elsewhere in the tests, everything else in bash."""

    def __init__(self, folder: Path, processes: contextlib.ExitStack) -> None:
        self.folder, self._processes = folder, processes
        self._background: list[subprocess.Popen[str]] = []
        self.machines: dict[str, Sequence[str]] = {}  # prefixes of commands in folders that stand for other machines
        self.environment: dict[str, str] = {}
        self.said = ""

    def run(self, block: str) -> None:
        block = block.replace("\\\n", " ")
        if "<<'END'" in block:
            self._bash(block)
            return
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            match words:
                case []:
                    continue
                case ["export", *pairs]:
                    self.environment |= dict(pair.split("=", 1) for pair in pairs)
                case ["wait"]:
                    for process in self._background:
                        ended(process, 0)
                    self._background.clear()
                case ["fedloom", *rest, "&"]:
                    with contextlib.chdir(self.folder):
                        self._background.append(
                            self._processes.enter_context(
                                started(
                                    *rest, environment=self.environment, prefix=self.machines.get(self.folder.name, ())
                                )
                            )
                        )
                case ["fedloom", *rest]:
                    with contextlib.chdir(self.folder):
                        self.said += fedloom(*rest, environment=self.environment)
                case _:
                    self._bash(line)

    def _bash(self, script: str) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        command = ["bash", "-euc", f"{script}\npwd"]
        done = subprocess.run(
            command, cwd=self.folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=WAIT_S
        )
        assert done.returncode == 0, done.stderr
        self.folder = Path(done.stdout.splitlines()[-1])


def blocks_of(page: str) -> list[str]:
    """Return the shell blocks of a tutorial."""
    text = (TUTORIALS / page).read_text(encoding="utf-8")
    return re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.fixture
def other_machine() -> Iterator[tuple[str, Sequence[str]]]:
    """Yield this machine's address, and the prefix of commands on another one: a network namespace behind a cable.

    Where none can be made, which takes the rights of root, it is the same machine.
    """
    name, net = f"fl{os.getpid()}", f"10.{os.getpid() % 200 + 20}.77"
    script = f"""
        ip netns add {name}
        ip link add {name}a type veth peer name {name}b netns {name}
        ip address add {net}.1/24 dev {name}a && ip link set {name}a up
        ip -n {name} address add {net}.2/24 dev {name}b && ip -n {name} link set {name}b up
    """
    done = subprocess.run(["sh", "-euc", script], capture_output=True, text=True)
    try:
        if done.returncode:
            warnings.warn(f"one machine stands for both: {done.stderr.strip()}", stacklevel=1)
        yield ("localhost", ()) if done.returncode else (f"{net}.1", ("ip", "netns", "exec", name))
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.mark.slow
def test_the_tutorial(tmp_path: Path, other_machine: tuple[str, Sequence[str]]) -> None:
    address, prefix = other_machine
    port, blocks = free_port(), blocks_of("first-federation.md")
    assert len(blocks) > 10
    with contextlib.ExitStack() as processes:
        shell = Shell(tmp_path, processes)
        shell.machines["other-machine"] = prefix
        for block in blocks:
            shell.run(block.replace(":7733", f":{port}").replace("localhost", address))
    assert "Update.delta_theta" in shell.said
    folder = tmp_path / "first-federation"
    for which in ("last", "best"):
        made = folder / f"made-{which}.safetensors"
        fedloom("personalize", folder / "run", "--data", folder / "hospital-a", "--out", made, "--checkpoint", which)
        kept, model = load_file(folder / "models-of-a" / "hospital-a" / f"{which}.safetensors"), load_file(made)
        assert kept.keys() == model.keys()
        assert all(torch.equal(kept[name], model[name]) for name in model)
    assert {path.name for path in (folder / "models" / "hospital-a").iterdir()} == {
        "best.md", "best.safetensors", "last.md", "last.safetensors", "rounds.json",
    }  # fmt: skip
    for name in ("run", "second-run"):
        summary = json.loads((folder / name / "summary.json").read_text())
        assert (summary["rounds"], summary["seen"]["clients"]) == (20, 2)
        assert summary["seen"]["accuracy_mean"] > 0.8
    audit = (folder / "second-run" / "logs" / "audit.jsonl").read_text().splitlines()
    assert {event["identity"] for event in map(json.loads, audit) if event["event"] == "join"} == {
        "hospital-a",
        "hospital-b",
    }


@pytest.mark.data
@pytest.mark.exhaustive
def test_the_first_experiment(tmp_path: Path) -> None:
    try:
        datasets.fetch_dataset(datasets.find_dataset("vowel"), data_root())
    except DataError as error:
        pytest.skip(f"the vowels cannot be had here: {error}")
    with contextlib.ExitStack() as processes:
        shell = Shell(tmp_path, processes)
        for block in blocks_of("first-experiment.md"):
            shell.run(block)
    runs = shell.folder / "runs"
    unseen = {
        name: json.loads((runs / name / "summary.json").read_text())["unseen"]["accuracy_mean"]
        for name in ("fedavg", "local")
    }
    assert min(unseen.values()) > 0.7
    assert (shell.folder / "comparison" / "compare.html").exists()
    assert len(list((runs / "search").glob("*/summary.json"))) == 4


@pytest.mark.exhaustive
def test_a_new_client_gets_a_model(tmp_path: Path) -> None:
    port = free_port()
    with contextlib.ExitStack() as processes:
        shell = Shell(tmp_path, processes)
        *before, ask, use = blocks_of("newcomer.md")
        for block in before:
            shell.run(block.replace(":7734", f":{port}"))
        shell.run(ask.replace(":7734", f":{port}"))
        shell.run(use)
        done = subprocess.run(
            [sys.executable, "use.py"], cwd=shell.folder, capture_output=True, text=True, timeout=WAIT_S, check=True
        )
    no, yes = map(float, re.findall(r"\d\.\d+(?:e-\d+)?", done.stdout))
    assert 0.99 < no + yes < 1.01
    assert yes > 0.5
