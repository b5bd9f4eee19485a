"""A pipeline whose federations are pods: kfp's local runner, the fake cluster, a real S3 server, real data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_cluster import FakeCluster
from run_processes import experiment, fedloom
from s3_support import S3Server

from fedloom.cluster.api import Api
from fedloom.kubeflow import local

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.data,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.group("pipelines"),
    pytest.mark.usefixtures("forks"),
]

RULES = Path(__file__).parents[2] / "components" / "federate" / "rbac.yaml"
STATEFUL = {"name": "pfedbayes", "steps": 6, "batch_size": 16}
FEDERATION = {"rounds": 2, "clients_per_round": 6, "checkpoint_every_s": 0, "deadline_s": 300}


@pytest.fixture(scope="module")
def cluster(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCluster]:
    """Start a cluster on which launchers have exactly the rights of the Role that we ship."""
    rules = next(item for item in yaml.safe_load_all(RULES.read_text()) if item["kind"] == "Role")["rules"]
    with (
        FakeCluster(tmp_path_factory.mktemp("cluster"), images={"fedloom:1": []}) as one,
        pytest.MonkeyPatch.context() as p,
    ):
        keys = {"AWS_ACCESS_KEY_ID": s3_server.access_key, "AWS_SECRET_ACCESS_KEY": s3_server.secret_key}
        one.add_secret("fedloom-storage", keys)
        for name, value in {**s3_server.environment, "KUBECONFIG": str(one.kubeconfig_for(rules))}.items():
            p.setenv(name, value)
        yield one


def run(name: str, out: Path, path: Path, storage: str, cluster: dict[str, Any], **more: Any) -> list[str]:
    output: list[str] = []
    overrides = [f"storage={storage}", "runtime.workers=1"]
    arguments = {"experiment": path.read_text(), "overrides": overrides, "cluster": json.dumps(cluster), **more}
    local.run_pipeline(name, arguments, out, say=output.append, everything=False)
    return output


def numbers(run: Path) -> dict[str, Any]:
    """Return a summary without times, their digest, and bytes on the wire, which one process does not have."""
    found = json.loads((run / "summary.json").read_text())
    for key in ("duration_s", "client_steps_per_s", "digest"):
        found.pop(key)
    return found | {"communication": {k: v for k, v in found["communication"].items() if "wire" not in k}}


def test_the_pipeline_with_pods_gives_the_results_of_one_process(
    cluster: FakeCluster, s3_server: S3Server, fresh_root: Path, tmp_path: Path
) -> None:
    """Its clients have states, which stay in the store: the evaluation finds them there."""
    path = experiment(tmp_path / "experiment", fresh_root, algorithm=STATEFUL, federation=FEDERATION)
    settings = {"image": "fedloom:1", "workers": 2, "worker": {"requests": {"cpu": "100m", "memory": "100Mi"}}}
    storage = f"s3://{s3_server.new_bucket()}/fedloom"
    output = run("personalized_federation", tmp_path / "out", path, storage, settings)
    assert any("2 workers" in line for line in output), output
    assert any("after round 2" in line for line in output), output
    fedloom("run", path, "--out", tmp_path / "bare")
    assert numbers(tmp_path / "out" / "run") == numbers(tmp_path / "bare")
    measured = json.loads((tmp_path / "out" / "evaluate" / "metrics").read_text())
    bare = json.loads((tmp_path / "bare" / "summary.json").read_text())
    assert {key: measured[key] for key in ("seen", "unseen")} == {key: bare[key] for key in ("seen", "unseen")}
    assert not (tmp_path / "out" / "run" / "states").exists()
    assert list((tmp_path / "out" / "run" / "logs").glob("*"))
    assert Api().select("Job")[0] == Api().select("Service")[0] == []


def test_a_claim_in_place_of_a_bucket(
    cluster: FakeCluster, fresh_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No credentials of a bucket are needed; clients' states stay on the claim, and the evaluation finds them there."""
    claim = cluster.add_claim("shared")
    monkeypatch.setenv("FEDLOOM_CLAIMS", str(claim.parent))  # for the tasks, which are local processes here
    path = experiment(tmp_path / "experiment", fresh_root, algorithm=STATEFUL, federation=FEDERATION)
    settings = {"image": "fedloom:1", "workers": 2, "worker": {"requests": {"cpu": "100m", "memory": "100Mi"}}}
    storage = "pvc://shared/fedloom"
    run("personalized_federation", tmp_path / "out", path, storage, settings, storage_secret="there-is-none")
    fedloom("run", path, "--out", tmp_path / "bare")
    assert numbers(tmp_path / "out" / "run") == numbers(tmp_path / "bare")
    assert {one.name for one in (claim / "fedloom").iterdir()} == {"partitions", "runs"}
    assert list(claim.glob("fedloom/runs/*/states/*"))
    assert Api().select("Job")[0] == []


def test_parallel_federations_of_a_grid(
    cluster: FakeCluster, s3_server: S3Server, fresh_root: Path, tmp_path: Path
) -> None:
    """Federations of one pipeline run have separate names."""
    path = experiment(tmp_path / "experiment", fresh_root, federation=FEDERATION)
    settings = {"image": "fedloom:1", "workers": 1, "worker": {"requests": {"cpu": "100m", "memory": "100Mi"}}}
    storage = f"s3://{s3_server.new_bucket()}/fedloom"
    run("compare_methods", tmp_path / "out", path, storage, settings, seeds=[1, 2])
    runs = sorted((tmp_path / "out" / "runs").iterdir())
    assert [one.name for one in runs] == ["pefll-1-seed-1", "pefll-1-seed-2"]
    fedloom("run", path, "--seeds", "1-2", "--out", tmp_path / "bare")
    bare = {one["seed"]: one for one in (numbers(p.parent) for p in (tmp_path / "bare").glob("*/summary.json"))}
    assert {one["seed"]: one for one in map(numbers, runs)} == bare
    assert Api().select("Job")[0] == []
