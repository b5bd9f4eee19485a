"""``--json``: every command that finds facts prints them, and its errors, as one JSON document (docs/cli-json.md)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from facts import tells
from run_processes import fedloom as fedloom_in_process
from test_check import written
from test_control import Controlled

from fedloom.cli.main import app
from fedloom.errors import ExitCode

Fedloom = Callable[..., tuple[int, str, str]]

WITHOUT = {
    "cluster logs": "prints a pod's log as it is",
    "member schema": "prints a JSON schema",
    "schema": "prints a JSON schema",
    "serve": "serves until it is stopped",
    "ui": "serves until it is stopped",
}
"""Commands that print no facts of their own, with the reason."""

ELSEWHERE = {
    "cluster": "tests/integration/test_cluster_federate.py",
    "ledger": "tests/integration/test_own_data.py",
    "cluster clean": "tests/unit/test_storage_retention.py",
    "pipeline": "tests/pipelines/test_pipeline_json.py",
    "pipeline local": "tests/pipelines/test_pipelines_local.py",
    "register": "tests/pipelines/test_registration.py",
    "reproduce": "tests/integration/test_reproduce_command.py",
}
"""Commands that need an installation's stand-in, or more data: the files of the calls whose JSON is parsed."""

ENTRY = {"class", "message", "hint", "key", "found", "allowed", "exit_code"}
ROOT = Path(__file__).parents[2]


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield every command line with its command."""
    for name, command in (group or typer.main.get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        elif not command.hidden:
            yield " ".join((*path, name)), command


def takes_json(command: Any) -> bool:
    return any("--json" in each.opts for each in command.params)


JSON = sorted(name for name, command in commands() if takes_json(command))


def strict(text: str) -> Any:
    """Return the value of a text that is one JSON document, with finite numbers only."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def elsewhere(name: str) -> str | None:
    return ELSEWHERE.get(name) or ELSEWHERE.get(name.partition(" ")[0])


def calls(file: Path) -> dict[str, list[object]]:
    """Return a call of every command that needs no installation, in an order in which all succeed."""
    privacy = "federation.privacy={clip: 1.0, epsilon: 8, delta: 1e-3}"
    return {
        "new": ["new", "method", "begun"],
        "datasets": ["datasets"],
        "methods": ["methods"],
        "models": ["models"],
        "schemes": ["schemes"],
        "tasks": ["tasks"],
        "doctor": ["doctor"],
        "device": ["device", "cpu", "--clients", 2],
        "data fetch": ["data", "fetch", "vowel", "--from", file.parent / "data" / "datasets" / "vowel"],
        "partition": ["partition", file],
        "check": ["check", file],
        "privacy": ["privacy", file, "--set", privacy],
        "run": ["run", file, "--out", "runs/one", "--no-report"],
        "runs": ["runs"],
        "status": ["status", "runs/one"],
        "evaluate": ["evaluate", "runs/one", "--out", "statistics.json"],
        "audit": ["audit", "runs/one"],
        "report": ["report", "runs/one"],
        "compare": ["compare", "runs/one"],
        "search": ["search", file, "--space", "space.yaml", "--out", "found"],
        "personalize": ["personalize", "runs/one", "--out", "models"],
        "data pack": ["data", "pack", "rows.csv", "--out", "packed", "--set", "label=label"],
        "worker": ["worker", "--data", "packed", "--dry-run", "any"],
        "token": ["token", "new", "north"],
        "certificates ca": ["certificates", "ca"],
        "certificates new": ["certificates", "new", "north"],
        "member show": ["member", "show", "--states", "states"],
    }


REFUSED = {
    "member approve": (["member", "approve", "--states", "states"], ExitCode.EXPERIMENT),
    "member refuse": (["member", "refuse", "--states", "states"], ExitCode.EXPERIMENT),
}
"""Calls that find nothing to decide; ``test_member_policy.py`` has the others."""


def test_every_command_has_json_or_no_facts() -> None:
    known = {name for name, command in commands() if not takes_json(command)}
    assert known == set(WITHOUT)
    here = {*calls(Path("file.yaml")), *REFUSED, "federation", "aggregator"}
    assert here | {name for name in JSON if elsewhere(name)} == set(JSON)
    for path in ELSEWHERE.values():
        assert '"--json"' in (ROOT / path).read_text()


@pytest.mark.slow
def test_facts_are_one_document(fedloom: Fedloom, tmp_path: Path) -> None:
    file = written(tmp_path)
    (tmp_path / "space.yaml").write_text(
        yaml.safe_dump({"parameters": {"algorithm.local.lr": {"choices": [0.1, 0.2]}}, "trials": 1})
    )
    rows = "".join(f"{i},{i % 5},{'ab'[i % 2]}\n" for i in range(20))
    (tmp_path / "rows.csv").write_text("u,v,label\n" + rows)
    (tmp_path / "states").mkdir()
    for name, words in calls(file).items():
        code, out, err = fedloom(*words, "--json")
        assert code == 0, (name, err)
        found = strict(out)
        assert isinstance(found, dict | list), name
        if name == "run":
            assert found.items() <= json.loads(Path("runs/one/summary.json").read_text()).items()
        if name == "evaluate":
            assert found == json.loads(Path("statistics.json").read_text())
    for words, code in REFUSED.values():
        found, out, err = fedloom(*words, "--json")
        assert (found, strict(out)["exit_code"]) == (code, code)
        assert strict(out)["errors"][0]["message"] in err


def test_a_federation_is_controlled_with_json(fedloom: Fedloom, tmp_path: Path) -> None:
    running = Controlled(tmp_path)
    try:
        for action in ("pause", "resume", "stop"):
            code, out, err = fedloom("federation", action, running.address, "--json")
            assert code == 0, err
            assert strict(out)["run"] == "run-1"
    finally:
        running.aggregator.stop()


@pytest.mark.slow
def test_a_sweep_with_failures_prints_both(fedloom: Fedloom, tmp_path: Path) -> None:
    file = written(tmp_path)
    grid = ["--grid", "algorithm.local.lr=0.1,1e30", "--out", "sweep", "--no-report"]
    code, out, err = fedloom("run", file, *grid, "--json")
    found = strict(out)
    assert (code, found["exit_code"]) == (ExitCode.QUORUM, ExitCode.QUORUM)
    assert [row["algorithm"] for row in found["rows"]] == ["fedavg"] * len(found["rows"]) != []
    assert found["errors"][0]["message"] in err


@pytest.mark.parametrize("name", JSON)
def test_an_unknown_option_is_an_error_in_json(fedloom: Fedloom, name: str) -> None:
    code, out, err = fedloom(*name.split(), "--nonsense", "--json")
    (entry,) = strict(out)["errors"]
    assert (code, strict(out)["exit_code"], entry["exit_code"]) == (ExitCode.EXPERIMENT,) * 3
    assert set(entry) == ENTRY
    assert (entry["class"], entry["key"]) == ("ExperimentError", "--nonsense")
    assert entry["message"] in err


@pytest.mark.parametrize(
    ("words", "code", "facts"),
    [
        ("data fetch nope", ExitCode.EXPERIMENT, {"class": "ExperimentError"}),
        ("runs nowhere", ExitCode.DATA, {"class": "DataError"}),
        ("evaluate nowhere", ExitCode.DATA, {}),
        ("new nothing there", ExitCode.EXPERIMENT, {"key": "template", "found": "nothing"}),
        ("device tpu", ExitCode.EXPERIMENT, {"key": "device"}),
        ("token new", ExitCode.EXPERIMENT, {"key": "name"}),
        ("check absent.yaml", ExitCode.EXPERIMENT, {}),
        ("certificates ca --out file/x", ExitCode.STORAGE, {"class": "StorageError"}),
        ("worker --json", ExitCode.EXPERIMENT, {"key": "json"}),
        ("cluster status --json", None, {}),
    ],
)
def test_errors_are_json_with_the_same_code(
    fedloom: Fedloom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, code: int | None, facts: Any
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    (tmp_path / "file").write_text("a file\n")
    found, out, err = fedloom(*words.split(), *([] if "--json" in words else ["--json"]))
    document = strict(out)
    assert document["exit_code"] == found == (found if code is None else code) != 0
    entry = document["errors"][0]
    assert set(entry) == ENTRY
    assert facts.items() <= entry.items()
    assert entry["message"].split("\n")[0] in err
    if "--json" not in words:
        plain, shown, again = fedloom(*words.split())
        assert (plain, shown, again) == (found, "", err)


PLUGIN = """\
from fedloom.cli.results import CommandResult


def odd(broken: bool = False) -> CommandResult:
    if broken:
        raise KeyError("of a test")
    return CommandResult({"odd": float("inf")}, "odd")
"""


def test_commands_of_other_packages_have_json_and_bugs_are_errors(tmp_path: Path) -> None:
    (tmp_path / "odd_package.py").write_text(PLUGIN)
    info = tmp_path / "odd-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fedloom.commands]\nodd = odd_package:odd\n")
    here = {"PYTHONPATH": str(tmp_path)}
    assert strict(fedloom_in_process("odd", "--json", environment=here)) == {"odd": None}
    assert fedloom_in_process("odd", environment=here) == "odd\n"
    words = [sys.executable, "-m", "fedloom", "odd", "--broken", "--json"]
    failed = subprocess.run(words, env=os.environ | here, capture_output=True, text=True, timeout=240)
    found = strict(failed.stdout)
    assert (failed.returncode, found["exit_code"], found["errors"][0]["class"]) == (1, 1, "KeyError")
    assert tells(failed.stderr, "Traceback", "KeyError")
