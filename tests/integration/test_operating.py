"""An open federation from the operator's side: processes, TLS, tokens and roles."""

from __future__ import annotations

import contextlib
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from facts import mentions, tells
from ports import free_address
from run_processes import ended, experiment, fedloom, rounds, started, until
from ui_support import asked

from fedloom.data.own import Own
from fedloom.data.pack import PackSettings, pack
from fedloom.data.pack.examples import Request
from fedloom.engine.options import RunOptions
from fedloom.engine.run_experiment import run_experiment
from fedloom.experiment import load_experiment
from fedloom.runs.checkpoint import Checkpoints
from fedloom.runs.folder import RunFolder
from fedloom.security.certificates import make_ca, make_certificate
from fedloom.security.tokens import add_token

OWN = Own(kind="features", input_shape=(4,), classes=("a", "b"))
MEMBERS = ("north", "south")

EXPERIMENT = """\
name: members
data: {own: {kind: features, input_shape: [4], classes: [a, b]}}
model: {name: mlp, hidden: [3]}
algorithm: {name: fedavg, local: {steps: 1, lr: 0.1}}
federation: {rounds: null, clients_per_round: 2, min_clients: 2, deadline_s: 60, checkpoint_every_s: 3600}
evaluation: {every: 1000}
runtime: {workers: 0}
"""

TABLE = """\
version: 1
identities:
  - {name: members, token: member, roles: [worker], clients: ["*"]}
  - {name: eye, token: eye, roles: [watch]}
  - {name: boss, token: boss, roles: [admin]}
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_paused_federation_survives_a_kill_and_its_replay_is_equal(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    for name in MEMBERS:
        np.savez(tmp_path / "source.npz", x=random.normal(size=(40, 4)), y=np.arange(40) % 2)
        pack(tmp_path / "source.npz", tmp_path / name, PackSettings(name, Request(OWN.spec)))
    (tmp_path / "members.yaml").write_text(EXPERIMENT)
    make_ca(tmp_path / "ca")
    make_certificate("server", tmp_path, tmp_path / "ca", hosts=["127.0.0.1"])
    (tmp_path / "server" / "ca.crt").unlink()  # peers authenticate by token
    (tmp_path / "server" / "identities.yaml").write_text(TABLE)
    stored = tmp_path / "server" / "tokens.json"
    tokens = {name: add_token(stored, name)[0].get_secret_value() for name in ("member", "eye", "boss")}
    address = free_address()
    run = tmp_path / "run"
    serve = ["aggregator", tmp_path / "members.yaml", "--listen", address, "--out", run, "--no-report"]
    serve += ["--credentials", tmp_path / "server"]

    def as_(name: str) -> dict[str, str]:
        return {"FEDLOOM_TLS_CA": str(tmp_path / "ca/ca.crt"), "FEDLOOM_TOKEN": tokens[name]}

    def asks(*arguments: object, name: str = "eye", code: int = 0) -> str:
        return fedloom(*arguments, environment=as_(name), code=code)

    def told() -> dict[str, Any]:
        return json.loads(asks("status", address, "--json"))

    with contextlib.ExitStack() as processes:
        aggregator = processes.enter_context(started(*serve))
        for name in MEMBERS:
            dials = ("worker", "--aggregator", address, "--name", f"w-{name}", "--reconnect", 200)
            processes.enter_context(started(*dials, "--data", tmp_path / name, environment=as_("member")))
        until(lambda: (run / "journal.jsonl").exists() and rounds(run) > 2, "rounds")
        now = told()
        assert (now["run"], now["phase"], now["clients"]["connected"]) == ("members", "training", 2)
        assert [(worker["name"], worker["identity"]) for worker in now["workers"]] == [
            ("w-north", "members"), ("w-south", "members"),
        ]  # fmt: skip
        assert tells(asks("status", "--clients", address), "north", "connected", "w-north", "south")
        assert tells(asks("federation", "pause", address, code=4), "error:", "eye", "control the federation")

        watching = ("ui", tmp_path, "--listen", "127.0.0.1:0", "--aggregator", address)
        site = processes.enter_context(started(*watching, environment=as_("eye")))
        assert site.stdout is not None
        port = int(site.stdout.readline().rpartition(":")[2].strip().rstrip("/"))

        def page() -> str:
            return unescape(re.sub(r"<[^>]+>", " ", asked(port, "/federation").text))

        assert mentions(page(), "members", address, "training", *MEMBERS, "w-north", "w-south")

        asks("federation", "pause", address, name="boss")
        until(lambda: told()["phase"] == "paused", "the pause")
        paused = told()
        assert mentions(page(), "paused", "boss", f"round {paused['round']}")
        assert (paused["durable_round"], paused["paused_by"]) == (paused["round"], "boss")
        aggregator.kill()
        aggregator.wait()
        assert mentions(page(), address, "nothing listens", "fedloom status RUN")
        assert "\\n" not in page()
        assert tells(asks("status", run), "interrupted", f"round {paused['round']}", "boss")

        aggregator = processes.enter_context(started(*serve, "--resume"))
        until(lambda: tells(fedloom_or("", "status", address, environment=as_("eye")), "paused"), "it is paused again")
        until(lambda: mentions(page(), "paused", "boss", *MEMBERS), "the page shows it again")
        assert told()["round"] == paused["round"]
        asks("federation", "resume", address, name="boss")
        until(lambda: rounds(run) > paused["round"] + 3, "more rounds")
        asks("federation", "stop", address, name="boss")
        assert tells(ended(aggregator, 130), "boss")
    events = [json.loads(line) for line in (run / "logs/audit.jsonl").read_text().splitlines()]
    assert [event["what"] for event in events if event["event"] == "control"] == ["pause", "resume", "stop"]
    lines = list(RunFolder(run).objects("journal.jsonl"))
    assert [line["paused"]["by"] for line in lines if "paused" in line] == ["boss"]
    stopped = json.loads(fedloom("status", run, "--json"))
    assert (stopped["phase"], stopped["durable_round"]) == ("interrupted", stopped["round"])

    data = tuple(tmp_path / name for name in MEMBERS)
    options = RunOptions(tmp_path / "again", replay=run, packed=data, report=False)
    run_experiment(load_experiment(tmp_path / "members.yaml"), options)
    made, again = (Checkpoints(folder / "checkpoints").load().state for folder in (run, tmp_path / "again"))
    assert made.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in made.items())


def fedloom_or(otherwise: str, *arguments: object, environment: dict[str, str] | None = None) -> str:
    """Return the output of a command, or ``otherwise`` if it fails."""
    try:
        return fedloom(*arguments, environment=environment)
    except AssertionError:
        return otherwise


@pytest.mark.slow
def test_a_staying_federation_gets_more_rounds_from_the_same_worker(fresh_root: Path, tmp_path: Path) -> None:
    """A service is replaced when its experiment changes, and its workers reconnect."""
    address = free_address()
    path, run = experiment(tmp_path, fresh_root, federation={"rounds": 2}), tmp_path / "run"
    fedloom("partition", path, "--out", tmp_path / "partition")
    serve = ["aggregator", path, "--partition", tmp_path / "partition", "--listen", address, "--out", run]
    serve += ["--no-report", "--stay", "--resume"]
    with contextlib.ExitStack() as processes:
        aggregator = processes.enter_context(started(*serve))
        dials = ("worker", "--aggregator", address, "--partition", tmp_path / "partition", "--reconnect", 200)
        worker = processes.enter_context(started(*dials))
        phase = lambda: fedloom_or("", "status", address, "--json")  # noqa: E731
        until(lambda: '"finished"' in phase(), "the end of the rounds")
        aggregator.terminate()
        ended(aggregator, 0)
        assert worker.poll() is None
        processes.enter_context(started(*serve, "--set", "federation.rounds=3"))
        until(lambda: rounds(run) == 3, "another round")
        assert worker.poll() is None
