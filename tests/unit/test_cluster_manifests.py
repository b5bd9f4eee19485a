"""The objects of a federation: valid for each Kubernetes, strict about security, equal for equal settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import kubernetes_schemas
import pytest
import yaml

from fedloom.cluster.api import FORWARDING, NEEDED
from fedloom.cluster.manifests import (
    FederationSpec,
    aggregator_job,
    completed,
    identity,
    label,
    owner,
    owners_of_pod,
    resources,
    service,
    worker_job,
)
from fedloom.cluster.settings import ClusterSettings, Resources, TaskConfig

ROOT = Path(__file__).parents[2]

PLAIN = FederationSpec(
    run_id="0b8f0b0e-8d3f-4c8f-9f0e-3f1d5a0c9f11",
    task="federate",
    namespace="team-a",
    settings=ClusterSettings(image="fedloom:0.1.0", storage_secret="store"),
    task_config=TaskConfig(),
    experiment="name: small\n",
    run_url="s3://bucket/runs/small-1",
    partition_url="s3://bucket/partitions/ff",
    clients=25,
    device="cpu",
    threads=1,
    clients_at_once=1,
    save_every_s=60.0,
    storage_environment={"FEDLOOM_S3_ENDPOINT": "http://s3:8333"},
    orphan_after_s=600.0,
)

FULL = dataclasses.replace(
    PLAIN,
    settings=ClusterSettings.from_json(
        """{
        "image": "fedloom:0.1.0", "worker_image": "fedloom-cuda@sha256:00", "image_pull_secrets": ["pull"],
        "clients_per_worker": 10, "worker": {"requests": {"cpu": "2"}, "limits": {"memory": "8Gi"}},
        "aggregator": {"limits": {"cpu": 4}, "tolerations": [{"operator": "Exists"}], "node_selector": {"a": "b"}},
        "gpu": {"count": 2}, "runtime_class": "nvidia",
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "node_selector": {"disk": "fast"}, "affinity": {"nodeAffinity": {}}, "env": {"SSL_CERT_FILE": "/ca/ca.crt"},
        "volumes": [{"name": "ca", "configMap": {"name": "ca"}}], "volume_mounts": [{"name": "ca", "mountPath": "/ca"}],
        "service_account": "pods", "priority_class": "low", "queue_name": "team", "max_failed_workers": 7, "retries": 4,
        "storage_secret": "mlpipeline-minio-artifact", "labels": {"team": "a"}, "annotations": {"why": "not"},
        "storage_secret_keys": {"AWS_ACCESS_KEY_ID": "accesskey", "AWS_SECRET_ACCESS_KEY": "secretkey"}
        }"""
    ),
    task_config=TaskConfig.read(
        {
            "resources": {"limits": {"memory": "16Gi"}},
            "tolerations": [{"key": "spot", "operator": "Exists"}],
            "node_selector": {"zone": "x"},
            "env": [{"name": "LOG", "value": "1"}],
        }
    ),
    device="cuda",
    clients_at_once=16,
    save_every_s=None,
)  # fmt: skip


def objects(federation: FederationSpec) -> list[dict[str, Any]]:
    made = [aggregator_job(federation), service(federation), worker_job(federation)]
    root = {"metadata": {"name": "root", "uid": "1-2"}}
    return [completed(manifest, federation.digest(), [owner(root)], 2) for manifest in made]


def container(job: dict[str, Any]) -> dict[str, Any]:
    (found,) = job["spec"]["template"]["spec"]["containers"]
    return found


def environment(job: dict[str, Any]) -> dict[str, Any]:
    entries = container(job)["env"]
    names = [entry["name"] for entry in entries]
    assert len(names) == len(set(names))
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in entries}


@pytest.mark.parametrize("federation", [PLAIN, FULL], ids=["plain", "full"])
def test_manifests_are_valid(federation: FederationSpec) -> None:
    kubernetes_schemas.check(*objects(federation))


def test_the_role_is_valid_and_grants_only_a_launchers_rights_and_events() -> None:
    for file in ("rbac-pipeline-runner.yaml", "rbac.yaml"):
        role, binding = yaml.safe_load_all((ROOT / "components/federate" / file).read_text())
        kubernetes_schemas.check(role, binding)
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        # Without one, the subject is a service account of the namespace of the manifest.
        assert not any("namespace" in item for item in (role["metadata"], binding["metadata"], *binding["subjects"]))
    allowed = {
        (verb, group, resource)
        for rule in role["rules"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert allowed == {*NEEDED, *FORWARDING, ("list", "", "events")}


@pytest.mark.parametrize("federation", [PLAIN, FULL], ids=["plain", "full"])
def test_rules_between_fields_beyond_the_schema(federation: FederationSpec) -> None:
    aggregator, at, workers = objects(federation)
    for job in (aggregator, workers):
        spec, pod = job["spec"], job["spec"]["template"]["spec"]
        # Required by a pod failure policy.
        assert pod["restartPolicy"] == "Never"
        assert spec["podReplacementPolicy"] == "Failed"
        for rule in spec["podFailurePolicy"]["rules"]:
            assert ("onExitCodes" in rule) != ("onPodConditions" in rule)
            if "onExitCodes" in rule:
                assert rule["onExitCodes"]["containerName"] == container(job)["name"]
                assert 0 not in rule["onExitCodes"]["values"]
                assert sorted(rule["onExitCodes"]["values"]) == rule["onExitCodes"]["values"]
        mounted = {mount["name"] for mount in container(job)["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        limits, requests = (container(job)["resources"].get(key, {}) for key in ("limits", "requests"))
        assert all("/" not in resource or limits[resource] == requests[resource] for resource in requests)
        assert len(job["metadata"]["name"]) + len("-99999-abcde") <= 63
        assert spec["template"]["metadata"]["labels"].items() >= {"sidecar.istio.io/inject": "false"}.items()
    assert at["spec"]["selector"].items() <= aggregator["spec"]["template"]["metadata"]["labels"].items()
    assert not at["spec"]["selector"].items() <= workers["spec"]["template"]["metadata"]["labels"].items()
    # FailIndex and maxFailedIndexes require Indexed and a limit for each index.
    assert workers["spec"]["completionMode"] == "Indexed"
    assert workers["spec"]["backoffLimitPerIndex"] == federation.settings.retries
    assert workers["spec"]["maxFailedIndexes"] <= workers["spec"]["completions"] == workers["spec"]["parallelism"]
    assert "backoffLimit" not in workers["spec"]
    assert aggregator["spec"]["podFailurePolicy"]["rules"][0]["action"] == "FailJob"
    assert aggregator["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2, 3, 4, 8]
    assert workers["spec"]["podFailurePolicy"]["rules"][0]["action"] == "FailIndex"
    # 8: its aggregator is gone; a retry would hold its GPU for another pending_timeout_s
    assert workers["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2, 3, 4, 8]


@pytest.mark.parametrize("federation", [PLAIN, FULL], ids=["plain", "full"])
def test_pods_have_no_token_no_root_and_only_two_writable_empty_folders(federation: FederationSpec) -> None:
    for job in (aggregator_job(federation), worker_job(federation)):
        pod = job["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"] == {
            "runAsNonRoot": True, "runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        }  # fmt: skip
        assert container(job)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {mount["mountPath"] for mount in container(job)["volumeMounts"]} >= {"/work", "/tmp"}
        assert environment(job)["HOME"] == "/work"


def test_credentials_are_only_referenced() -> None:
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    for federation, keys in ((PLAIN, names), (FULL, ("accesskey", "secretkey"))):
        for job in (aggregator_job(federation), worker_job(federation)):
            found = environment(job)
            secret = federation.settings.storage_secret
            assert found["AWS_ACCESS_KEY_ID"] == {"secretKeyRef": {"name": secret, "key": keys[0]}}
            assert found["AWS_SECRET_ACCESS_KEY"] == {"secretKeyRef": {"name": secret, "key": keys[1]}}
            assert found["FEDLOOM_S3_ENDPOINT"] == "http://s3:8333"


def changed(**settings: Any) -> FederationSpec:
    """Return the plain federation with some settings changed."""
    made = ClusterSettings.model_validate({**PLAIN.settings.model_dump(), **settings})
    return dataclasses.replace(PLAIN, settings=made)


def test_workers_have_a_secret_of_their_own() -> None:
    federation = changed(worker_secret="workers")
    for job, secret in ((aggregator_job(federation), "store"), (worker_job(federation), "workers")):
        names = {value["secretKeyRef"]["name"] for value in environment(job).values() if isinstance(value, dict)}
        assert names == {secret}


def test_pods_mount_the_claims_of_their_storage() -> None:
    settings = PLAIN.settings.with_claims("pvc://shared/fed/runs/x")
    federation = dataclasses.replace(PLAIN, settings=settings, run_url="pvc://shared/fed/runs/x")
    for job in (aggregator_job(federation), worker_job(federation)):
        kubernetes_schemas.check(job)
        pod = job["spec"]["template"]["spec"]
        (volume,) = [one for one in pod["volumes"] if "persistentVolumeClaim" in one]
        assert volume["persistentVolumeClaim"] == {"claimName": "shared"}
        mounts = {one["name"]: one["mountPath"] for one in container(job)["volumeMounts"]}
        assert mounts[volume["name"]] == "/mnt/claims/shared"
        assert pod["securityContext"]["fsGroup"] == 65532
    assert settings.with_claims("pvc://shared") == settings
    assert PLAIN.settings.with_claims("s3://bucket") is PLAIN.settings


def test_only_the_aggregator_gets_trackers() -> None:
    own = {"env": {"FEDLOOM_TRACK": "wandb", "HOME": "/elsewhere"}, "env_secrets": ("tracker",)}
    federation = changed(aggregator=own)
    kubernetes_schemas.check(aggregator_job(federation))
    reported, alone = aggregator_job(federation), worker_job(federation)
    assert environment(reported)["FEDLOOM_TRACK"] == "wandb"
    assert [entry["value"] for entry in container(reported)["env"] if entry["name"] == "HOME"] == ["/elsewhere"]
    assert container(reported)["envFrom"] == [{"secretRef": {"name": "tracker"}}]
    assert "FEDLOOM_TRACK" not in environment(alone)
    assert "envFrom" not in container(alone)
    assert "envFrom" not in container(aggregator_job(PLAIN))


def test_a_token_comes_from_a_secret() -> None:
    for job in (aggregator_job, worker_job):
        found = job(changed(token_secret="federation"))
        assert environment(found)["FEDLOOM_TOKEN"] == {"secretKeyRef": {"name": "federation", "key": "token"}}
        assert "--insecure" in container(found)["args"]
        assert "FEDLOOM_TOKEN" not in environment(job(PLAIN))


def test_commands() -> None:
    name = PLAIN.name
    assert " ".join(container(aggregator_job(PLAIN))["args"]) == (
        "aggregator s3://bucket/runs/small-1/experiment.yaml --partition s3://bucket/partitions/ff --out /work/run "
        "--publish s3://bucket/runs/small-1 --resume --listen 0.0.0.0:7733 --wait 86400 --insecure "
        "--orphan-after 600"
    )
    assert " ".join(container(worker_job(PLAIN))["args"]) == (
        f"worker --aggregator {name}.team-a.svc:7733 --name worker-$(JOB_COMPLETION_INDEX) "
        "--partition s3://bucket/partitions/ff --states s3://bucket/runs/small-1/states --reconnect 600 "
        "--set runtime.device=cpu --set runtime.threads=1 --set runtime.clients_at_once=1 --set runtime.save_every_s=60"
    )
    never = dataclasses.replace(PLAIN, orphan_after_s=None)
    assert "--orphan-after" not in container(aggregator_job(never))["args"]


def test_each_worker_serves_a_block_of_clients() -> None:
    job = worker_job(FULL)  # 25 clients, 10 for each
    assert job["spec"]["completions"] == 3
    assert container(job)["args"][-2:] == ["--clients", "$(JOB_COMPLETION_INDEX)/3"]
    assert worker_job(PLAIN)["spec"]["completions"] == 2


def test_gpus_and_settings_of_the_task_apply_to_workers() -> None:
    aggregator, workers = aggregator_job(FULL), worker_job(FULL)
    assert container(workers)["resources"] == {
        "requests": {"cpu": "2"},
        "limits": {"memory": "16Gi", "nvidia.com/gpu": "2"},
    }
    assert container(aggregator)["resources"] == {"requests": {"memory": "1Gi"}, "limits": {"cpu": "4"}}
    pod = workers["spec"]["template"]["spec"]
    assert [toleration["key"] for toleration in pod["tolerations"]] == ["nvidia.com/gpu", "spot"]
    assert pod["nodeSelector"] == {"disk": "fast", "zone": "x"}
    assert environment(workers)["LOG"] == "1"
    assert (container(workers)["image"], container(aggregator)["image"]) == ("fedloom-cuda@sha256:00", "fedloom:0.1.0")
    assert aggregator["spec"]["template"]["spec"]["nodeSelector"] == {"a": "b"}
    assert "LOG" not in environment(aggregator)
    assert pod["topologySpreadConstraints"][0]["topologyKey"] == "kubernetes.io/hostname"
    assert pod["runtimeClassName"] == "nvidia"
    assert "runtimeClassName" not in aggregator["spec"]["template"]["spec"]
    for job in (aggregator, workers):
        assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
        assert environment(job)["SSL_CERT_FILE"] == "/ca/ca.crt"


@pytest.mark.parametrize(
    ("reported", "made"),
    [
        (None, [("kubernetes.io/hostname", 1, "ScheduleAnyway", "ours")]),
        ([], None),
        (
            [
                {"topologyKey": "topology.kubernetes.io/zone", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule"},
                {
                    "topologyKey": "rack", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": {"team": "a"}},
                },
            ],
            [
                ("topology.kubernetes.io/zone", 2, "DoNotSchedule", "ours"),
                ("rack", 1, "ScheduleAnyway", {"matchLabels": {"team": "a"}}),
            ],
        ),
    ],
)  # fmt: skip
def test_workers_are_spread_and_a_constraint_selects_only_them(
    reported: list[dict[str, Any]] | None, made: Any
) -> None:
    job = worker_job(changed(topology_spread=None if reported is None else tuple(reported)))
    kubernetes_schemas.check(job)
    template = job["spec"]["template"]
    found = template["spec"].get("topologySpreadConstraints")
    if made is None:
        assert found is None
        return
    for constraint, (key, skew, otherwise, selector) in zip(found, made, strict=True):
        found_here = [constraint[name] for name in ("topologyKey", "maxSkew", "whenUnsatisfiable")]
        assert found_here == [key, skew, otherwise]
        if selector == "ours":
            chosen = constraint["labelSelector"]["matchLabels"].items()
            assert chosen <= template["metadata"]["labels"].items()
            assert not chosen <= aggregator_job(PLAIN)["spec"]["template"]["metadata"]["labels"].items()
        else:
            assert constraint["labelSelector"] == selector


def test_environment_settings_of_the_task_override_the_defaults() -> None:
    task = TaskConfig.read({"env": [{"name": "AWS_ACCESS_KEY_ID", "value": "theirs"}]})
    assert environment(worker_job(dataclasses.replace(PLAIN, task_config=task)))["AWS_ACCESS_KEY_ID"] == "theirs"


@pytest.mark.parametrize(
    ("own", "gpu", "task", "expected"),
    [
        ({}, {}, None, {"requests": {"cpu": "500m", "memory": "1Gi"}}),
        # A default request above a limit would be rejected, so it is omitted with a limit.
        ({"limits": {"memory": "512Mi"}}, {}, None, {"requests": {"cpu": "500m"}, "limits": {"memory": "512Mi"}}),
        (
            {"requests": {"cpu": 1, "memory": "2Gi"}},
            {"amd.com/gpu": 1},
            {"requests": {"cpu": "3"}, "limits": {"cpu": "4"}},
            {"requests": {"cpu": "3", "memory": "2Gi"}, "limits": {"amd.com/gpu": "1", "cpu": "4"}},
        ),
    ],
)
def test_resources(own: dict[str, Any], gpu: dict[str, int], task: dict[str, Any] | None, expected: object) -> None:
    assert resources(Resources(**own), gpu, task) == expected


def test_digests_differ_only_for_different_specifications() -> None:
    digests = {
        PLAIN.digest(),
        dataclasses.replace(PLAIN, experiment="name: other\n").digest(),
        dataclasses.replace(PLAIN, settings=ClusterSettings(image="fedloom:0.1.1", storage_secret="store")).digest(),
        dataclasses.replace(PLAIN, partition_url="s3://bucket/partitions/ee").digest(),
        FULL.digest(),
    }
    assert len(digests) == 5
    assert dataclasses.replace(PLAIN, settings=PLAIN.settings.model_copy()).digest() == PLAIN.digest()


def test_names_are_built_from_run_and_task() -> None:
    assert dataclasses.replace(PLAIN, run_id="run", task="a").name == f"fl-{identity('run', 'a')}"
    assert len({identity("run", "a"), identity("run", "b"), identity("other", "a")}) == 3
    assert label("run-1") == "run-1"
    strange = label("a run/with words" * 9)
    assert strange != label("another/run")
    assert strange.isalnum()
    assert len(strange) <= 63


def test_the_owner_is_the_controller_of_the_launchers_pod() -> None:
    workflow = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "w", "uid": "9", "controller": True}
    other = {"apiVersion": "v1", "kind": "ConfigMap", "name": "c", "uid": "8"}
    (found,) = owners_of_pod({"metadata": {"ownerReferences": [other, workflow]}})
    # controller and blockOwnerDeletion would need rights on the workflow.
    assert found == {**workflow, "controller": False, "blockOwnerDeletion": False}
    assert owners_of_pod({"metadata": {}}) == []
