"""``fedloom pipeline ... --json``: the facts of a submission, of runs and of schedules."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kfp_api import KubeflowApi
from typer.testing import Result


def facts(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_submissions_runs_and_schedules(
    api: KubeflowApi, submit: Callable[..., Result], pipeline: Callable[..., Result]
) -> None:
    told = facts(submit("--json"))
    run = told["run"]
    assert set(api.runs) == {run}
    assert run in told["link"]
    assert facts(pipeline("stop", run, "--json"))["state"] == "stopping"
    schedule = facts(submit("--schedule", "1d", "--json"))["schedule"]
    (listed,) = facts(pipeline("schedules", "list", "--json"))
    assert (listed["schedule"], listed["state"]) == (schedule, "active")
    assert facts(pipeline("schedules", "pause", schedule, "--json"))["schedule"] == schedule
    refused = pipeline("stop", "nothing", "--json")
    assert json.loads(refused.stdout)["exit_code"] == 2


@pytest.mark.slow
def test_waiting_gives_the_outcome(
    api: KubeflowApi, submit: Callable[..., Result], pipeline: Callable[..., Result]
) -> None:
    api.script = [("SUCCEEDED", [])]
    run = facts(submit("--wait", "--json"))["run"]
    assert facts(pipeline("wait", run, "--json"))["state"] == "succeeded"


@pytest.mark.slow
def test_compiled_pipelines(pipeline: Callable[..., Result], tmp_path: Path) -> None:
    (told,) = facts(pipeline("compile", "unseen_clients", "--json", "--out", str(tmp_path)))
    assert told["file"] == str(tmp_path / "unseen_clients.yaml")
