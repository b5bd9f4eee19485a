"""Rights of the accounts that Kubeflow installs, against what a launcher and `fedloom pipeline` need."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp_api import Fault, KubeflowApi, serving
from run_processes import EXPERIMENT
from typer.testing import CliRunner

from fedloom.cli.main import app
from fedloom.cluster.api import FORWARDING, NEEDED
from fedloom.errors import StorageError

pytestmark = pytest.mark.group("components")
ROOT = Path(__file__).parents[2]
STOCK: dict[str, Any] = yaml.safe_load((ROOT / "tests/fixtures/kubeflow/rights.yaml").read_text())
EVENTS = ("list", "", "events")
"""Optional, as the header of rbac.yaml says."""

Right = tuple[str, str, str]


def allows(rules: Iterable[dict[str, Any]], right: Right) -> bool:
    """Return True if rules allow a right, as the API server reads them: `*` is any, subresources are separate."""
    keys = ("verbs", "apiGroups", "resources")
    return any(all({one, "*"} & {*rule[key]} for one, key in zip(right, keys, strict=True)) for rule in rules)


def shipped(name: str) -> list[dict[str, Any]]:
    documents = yaml.safe_load_all((ROOT / "components" / "federate" / name).read_text())
    return [rule for document in documents if document["kind"] == "Role" for rule in document["rules"]]


def test_stock_accounts_lack_only_the_rights_that_we_name() -> None:
    """The launcher of a pipeline runs in the cluster, and forwards no port."""
    needed = {*NEEDED, EVENTS}
    lacking = {
        account: {right for right in {*needed, *FORWARDING} if not allows(STOCK[account]["rules"], right)}
        for account in STOCK
    }
    assert lacking == {"pipeline-runner": {EVENTS, *FORWARDING}, "default-editor": set()}
    added = shipped("rbac-pipeline-runner.yaml")
    assert [(rule["apiGroups"], rule["resources"], rule["verbs"]) for rule in added] == [([""], ["events"], ["list"])]
    assert all(allows([*STOCK["pipeline-runner"]["rules"], *added], right) for right in needed)
    assert all(allows(shipped("rbac.yaml"), right) for right in {*needed, *FORWARDING})


def test_a_profile_editor_has_all_rights_the_commands_need(tmp_path: Path) -> None:
    """Also if a submission fails, and its objects are removed."""
    experiment, place = tmp_path / "experiment.yaml", tmp_path / "kubeflow.yaml"
    experiment.write_text(yaml.safe_dump(EXPERIMENT))
    with serving(KubeflowApi(namespaces=("team-a",))) as api:
        place.write_text(yaml.safe_dump({"host": api.host, "namespace": "team-a"}))

        def fedloom(*arguments: str) -> BaseException | None:
            return CliRunner().invoke(app, ["pipeline", "--kubeflow", str(place), *arguments]).exception

        submit = ("submit", "personalized_federation", str(experiment), "--param", "backend=local")
        api.faults = [Fault("POST /runs", drop="after", times=1)]
        assert isinstance(fedloom(*submit), StorageError)
        assert fedloom(*submit) is None
        (run,) = api.runs
        assert fedloom("stop", run) is None
        asked = {(verb, "pipelines.kubeflow.org", resource) for verb, resource in api.rights}
    assert {("create", "runs"), ("delete", "runs"), ("terminate", "runs")} <= api.rights
    assert [right for right in asked if not allows(STOCK["default-editor"]["rules"], right)] == []
