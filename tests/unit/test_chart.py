"""The chart, by the real Helm: rendered objects, rejected values, and fields that must not change (docs/chart.md)."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import helm
import kubernetes_schemas
import pytest
import yaml
from facts import mentions
from helm import CHART, ROOT, SCENARIOS
from typer.main import get_command

import fedloom
from fedloom import experiment as experiments
from fedloom.cli.main import app
from fedloom.security.options import FILES

GOLDEN = ROOT / "tests" / "fixtures" / "chart"
CUSTOM = {"cert-manager.io", "gateway.networking.k8s.io", "monitoring.coreos.com"}
"""Groups whose schemas are no part of Kubernetes."""
IMMUTABLE = {
    "StatefulSet": ("selector", "serviceName", "podManagementPolicy", "volumeClaimTemplates"),
    "Deployment": ("selector",),
    "PersistentVolumeClaim": ("accessModes", "storageClassName"),
    "Service": ("clusterIP",),
}
"""Fields that the API server refuses to change, by kind."""


def sampled(names: Iterable[str], first: Collection[str]) -> list[Any]:
    """Return names as parameters: all but the first few only in the second tier."""
    return [pytest.param(name, marks=() if name in first else pytest.mark.cluster) for name in names]


pytestmark = pytest.mark.group("helm")


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate_chart", ROOT / "docs" / "generate_chart.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_kind(text: str, kind: str) -> list[dict[str, Any]]:
    return [item for item in helm.objects(text) if item["kind"] == kind]


def named(item: dict[str, Any]) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]


def one(text: str, kind: str, component: str) -> dict[str, Any]:
    """Return the only object of a kind for a component."""
    (found,) = [item for item in of_kind(text, kind) if item["metadata"]["name"].endswith(f"-{component}")]
    return found


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["containers"], *pod.get("initContainers", [])]


# ---- without Helm


def test_the_chart_readme_is_up_to_date() -> None:
    assert generator().readme() == (CHART / "README.md").read_text(), "make docs"


def test_every_value_has_a_schema_and_every_key_of_the_schema_a_value() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    refused = {"global", "enabled", "replicaCount", "persistence", "config", "secret", "token"}

    def compare(value: Any, rule: dict[str, Any], path: str) -> None:
        rule = schema["$defs"][rule["$ref"].rpartition("/")[2]] if "$ref" in rule else rule
        if not isinstance(value, dict) or "properties" not in rule:
            return
        assert rule["additionalProperties"] is False, path
        there = set(rule["properties"]) - (refused if not path else set())
        optional = {"requests", "limits"} if path.endswith("resources") else set()
        assert there - optional <= set(value) <= there, path
        for key, inside in value.items():
            compare(inside, rule["properties"][key], f"{path}.{key}")

    compare(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "")


def test_every_key_of_the_schema_has_a_description() -> None:
    text = (CHART / "values.schema.json").read_text()
    assert generator().schema() == text, "make docs"

    def without(node: Any, path: str) -> Iterator[str]:
        if isinstance(node, list):
            for item in node:
                yield from without(item, path)
        if isinstance(node, dict):
            for name, inside in node.items():
                yield from without(inside, f"{path}.{name}")
                if path.endswith(".properties") and not inside.get("description"):
                    yield f"{path}.{name}"

    assert list(without(json.loads(text), "")) == []


def test_chart_and_project_have_the_same_version() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["appVersion"] == fedloom.__version__
    assert "dependencies" not in about


# ---- rendered objects


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenarios_match_their_golden_files(scenario: str) -> None:
    """Compare with the golden files: ``FEDLOOM_GOLDEN=1`` rewrites them, to be reviewed before they are committed."""
    text = helm.rendered(scenario)
    golden = GOLDEN / f"{scenario}.yaml"
    if os.environ.get("FEDLOOM_GOLDEN"):
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_objects_are_valid_and_have_unique_names(scenario: str) -> None:
    found = helm.objects(helm.rendered(scenario))
    names = [(item["apiVersion"], item["kind"], item["metadata"]["name"]) for item in found]
    assert len(names) == len(set(names))
    for item in found:
        assert item["metadata"]["namespace"] == "fl"
        assert len(item["metadata"]["name"]) <= 63
        if item["apiVersion"].split("/")[0] not in CUSTOM:
            kubernetes_schemas.check(item)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_pods_meet_the_restricted_standard_and_have_no_rights(scenario: str) -> None:
    text = helm.rendered(scenario)
    assert not [item for item in helm.objects(text) if "rbac" in item["apiVersion"] or item["kind"] == "ServiceAccount"]
    for name, pod in helm.pods(text):
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        for container in containers(pod):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["requests"]
            assert "memory" in container["resources"]["limits"]
            assert not container["image"].endswith(":latest")
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted <= {volume["name"] for volume in pod["volumes"]}
            assert not any("subPath" in mount for mount in container["volumeMounts"])  # such mounts are never updated
        for volume in pod["volumes"]:
            assert set(volume) - {"name"} <= {"emptyDir", "configMap", "secret", "persistentVolumeClaim"}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_object_contains_a_secret(scenario: str) -> None:
    text = helm.rendered(scenario)
    assert not of_kind(text, "Secret")
    assert "BEGIN" not in text
    assert not re.search(r"fedloom_[0-9a-zA-Z]+_[0-9a-zA-Z_-]{43}", text)
    for name, pod in helm.pods(text):
        for container in containers(pod):
            for entry in container["env"]:
                if re.search(r"KEY_ID|ACCESS_KEY|PASSWORD|FEDLOOM_TOKEN$", entry["name"]):
                    assert "secretKeyRef" in entry["valueFrom"], (name, entry["name"])


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name != "member"])
def test_there_is_one_aggregator_with_reachable_probes(scenario: str) -> None:
    text = helm.rendered(scenario)
    aggregator = one(text, "StatefulSet", "aggregator")
    assert aggregator["spec"]["replicas"] == 1
    assert "volumeClaimTemplates" not in aggregator["spec"]
    pod = aggregator["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    arguments = dict(argument.partition("=")[::2] for argument in container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": ports["health"]}
    assert arguments["--listen"] == f"0.0.0.0:{ports['grpc']}"
    assert arguments["--health"] == f"0.0.0.0:{ports['health']}"
    assert arguments.get("--metrics") == (f"0.0.0.0:{ports['metrics']}" if "metrics" in ports else None)
    startup, liveness = container["startupProbe"], container["livenessProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 60
    assert pod["terminationGracePeriodSeconds"] >= 60
    if "--publish" not in arguments:
        assert arguments["--out"].startswith("/state/")


def serving_settings(container: dict[str, Any]) -> dict[str, str]:
    """Return the settings that `fedloom serve` receives by ``--set``."""
    given = [word.removeprefix("--set=") for word in container["args"] if word.startswith("--set=")]
    return dict(one.partition("=")[::2] for one in given)


def test_model_servers_scale_drain_and_spread() -> None:
    text = helm.rendered("silos")
    (serve,) = of_kind(text, "Deployment")
    (scaler,) = of_kind(text, "HorizontalPodAutoscaler")
    assert "replicas" not in serve["spec"]  # set by the autoscaler; otherwise each upgrade would reset it
    assert scaler["spec"]["scaleTargetRef"]["name"] == serve["metadata"]["name"]
    pod = serve["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    arguments = dict(argument.partition("=")[::2] for argument in container["args"])
    assert pod["terminationGracePeriodSeconds"] > int(serving_settings(container)["drain_s"])
    assert pod["topologySpreadConstraints"]
    assert container["resources"]["requests"]["cpu"]  # the base of its utilization
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert f"0.0.0.0:{container[probe]['httpGet']['port']}" == arguments["--health"]
    assert one(text, "Service", "serve")["spec"]["clusterIP"] == "None"
    aggregator = dict(helm.pods(text))["fed-fedloom-aggregator"]
    assert f"--publish={container['args'][1]}" in aggregator["containers"][0]["args"]
    secrets = {entry["valueFrom"]["secretKeyRef"]["name"] for entry in container["env"] if "valueFrom" in entry}
    assert secrets == {"store-readers"}
    startup = container["startupProbe"]  # waiting for the first round is not killed meanwhile
    assert startup["periodSeconds"] * startup["failureThreshold"] >= int(serving_settings(container)["wait_s"]) + 60


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_pods_are_spread_over_nodes_where_that_is_possible(scenario: str) -> None:
    """Only as a preference; for a Deployment, which has pods of two revisions during an upgrade, by revision."""
    text = helm.rendered(scenario)
    for item in (*of_kind(text, "StatefulSet"), *of_kind(text, "Deployment")):
        if item["metadata"]["name"].endswith(("-aggregator", "-seaweedfs")):
            assert "topologySpreadConstraints" not in item["spec"]["template"]["spec"]
            continue
        (constraint,) = item["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"
        assert constraint["topologyKey"] == "kubernetes.io/hostname"
        assert constraint["labelSelector"] == item["spec"]["selector"]
        revisions = ["pod-template-hash"] if item["kind"] == "Deployment" else None
        assert constraint.get("matchLabelKeys") == revisions


def test_custom_constraints_select_the_pods_of_their_component() -> None:
    zone = {"topologyKey": "topology.kubernetes.io/zone", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
    chosen = {**zone, "labelSelector": {"matchLabels": {"team": "a"}}}
    key = "topologySpreadConstraints"
    text = helm.rendered("silos", {f"workers.{key}": [zone, chosen]})
    selector = one(text, "StatefulSet", "worker")["spec"]["selector"]
    assert dict(helm.pods(text))["fed-fedloom-worker"][key] == [{**zone, "labelSelector": selector}, chosen]
    for name, pod in helm.pods(helm.rendered("silos", {f"workers.{key}": None, f"serve.{key}": None})):
        assert key not in pod, name


def test_workers_with_a_gpu_are_placed_by_node_labels() -> None:
    device, product = "nvidia.com/mig-1g.10gb", {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    own = {"resources": {"limits": {device: 1}}, "runtimeClassName": "nvidia", "nodeSelector": product}
    for name, pod in helm.pods(helm.rendered("trial", {"workers": {"device": "cuda", **own}})):
        given = {resource for resource in pod["containers"][0]["resources"]["limits"] if "/" in resource}
        if name == "fed-fedloom-worker":
            assert (pod["runtimeClassName"], pod["nodeSelector"]) == ("nvidia", product)
            assert given == {device}
            assert "--set=runtime.device=cuda" in pod["containers"][0]["args"]
        else:
            assert not {"runtimeClassName", "nodeSelector"} & set(pod)
            assert not given


def test_the_trial_store_and_the_test_pod_are_placed_by_their_values() -> None:
    taint = {"key": "dedicated", "operator": "Exists", "effect": "NoSchedule"}
    own = {part: {"nodeSelector": {"pool": part}, "tolerations": [taint]} for part in ("seaweedfs", "test")}
    pods = dict(helm.pods(helm.rendered("trial", own)))
    for part in own:
        pod = pods.pop(f"fed-fedloom-{part}")
        assert (pod["nodeSelector"], pod["tolerations"]) == ({"pool": part}, [taint])
        assert "topologySpreadConstraints" not in pod
    assert pods
    assert not any({"nodeSelector", "tolerations"} & set(pod) for pod in pods.values())


@pytest.mark.parametrize("more", [{}, {"enabled": True}, {"enabled": False}])
def test_the_chart_is_a_part_of_another(more: dict[str, bool], tmp_path: Path) -> None:
    """The parent's ``condition`` is a value of the part."""
    shutil.copytree(CHART, tmp_path / "parent" / "charts" / "fedloom")
    part = {"name": "fedloom", "version": ">=0", "condition": "fedloom.enabled"}
    about = {"apiVersion": "v2", "name": "parent", "version": "0.1.0", "dependencies": [part]}
    (tmp_path / "parent" / "Chart.yaml").write_text(yaml.safe_dump(about))
    given = {"global": {"x": 1}, "fedloom": {**helm.scenario_values("members"), **more}}
    done = helm.run("template", "fed", tmp_path / "parent", "-f", "-", "--kube-version", "1.35.0", given=given)
    assert done.returncode == 0, done.stderr
    assert bool(helm.objects(done.stdout)) is more.get("enabled", True)


def test_a_store_needs_no_volume() -> None:
    """A lost node loses only files that a restart recreates: there is no claim, and no folder of the node."""
    text = helm.rendered("silos")
    assert not of_kind(text, "PersistentVolumeClaim")
    for name, pod in helm.pods(text):
        kinds = {kind for volume in pod["volumes"] for kind in set(volume) - {"name"}}
        assert kinds <= {"emptyDir", "secret", "configMap"}, name
    assert not any("volumeClaimTemplates" in item["spec"] for item in of_kind(text, "StatefulSet"))
    aggregator = dict(helm.pods(text))["fed-fedloom-aggregator"]
    assert {"--resume", "--out=/work/run", "--publish=s3://federations/silos/runs/fed-fedloom"} <= set(
        aggregator["containers"][0]["args"]
    )


def test_a_node_drain_is_never_blocked() -> None:
    """Every budget allows a disruption, also of a single pod, and of pods that are not ready."""
    for scenario in SCENARIOS:
        text = helm.rendered(scenario)
        for budget in of_kind(text, "PodDisruptionBudget"):
            assert budget["spec"]["maxUnavailable"]
            assert "minAvailable" not in budget["spec"]
            assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_an_external_member_installs_only_its_worker() -> None:
    text = helm.rendered("member")
    kinds = {named(item) for item in helm.objects(text)}
    assert kinds == {("NetworkPolicy", "north-worker"), ("Service", "north-worker"), ("StatefulSet", "north-worker")}
    ((_, pod),) = helm.pods(text)
    (container,) = pod["containers"]
    arguments = [argument.partition("=")[::2] for argument in container["args"]]
    reported = dict(arguments)
    assert reported["--aggregator"] == "fl.example.org:443"
    assert reported["--data"] == "/data/packed"
    assert not {"--partition", "--clients", "--insecure"} & set(reported)
    (policy,) = of_kind(text, "NetworkPolicy")
    assert policy["spec"]["ingress"] == []
    assert rule_of(policy, "egress", 443) == [{"ipBlock": {"cidr": "203.0.113.10/32"}}]
    assert not rule_of(policy, "egress", 7733)  # there is no aggregator here
    issued = helm.rendered("member", {"tls.mode": "certManager", "tls.certManager.issuerRef.name": "company"})
    (certificate,) = of_kind(issued, "Certificate")
    assert certificate["spec"]["uris"] == ["urn:fedloom:north-workers"]
    assert certificate["spec"]["issuerRef"]["name"] == "company"
    assert not of_kind(issued, "Issuer")


def test_a_member_in_the_aggregators_cluster_may_have_own_data() -> None:
    own = {"workers": {"kind": "StatefulSet", "replicas": 1, "data": "/data"}}
    found = dict(helm.pods(helm.rendered("members", own)))
    assert not any("--partition" in argument for pod in found.values() for argument in pod["containers"][0]["args"])
    assert "--data=/data" in found["fed-fedloom-worker"]["containers"][0]["args"]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_network_policies_deny_by_default(scenario: str) -> None:
    text = helm.rendered(scenario)
    policies = of_kind(text, "NetworkPolicy")
    selected = {json.dumps(policy["spec"]["podSelector"], sort_keys=True) for policy in policies}
    labels = [pod["metadata"]["labels"] for pod in of_kind(text, "Pod")]
    chosen = [json.loads(each)["matchLabels"].items() for each in selected]
    assert all(any(each <= label.items() for each in chosen) for label in labels)
    for item in (*of_kind(text, "StatefulSet"), *of_kind(text, "Deployment")):
        assert json.dumps(item["spec"]["selector"], sort_keys=True) in selected
    for policy in policies:
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        for rule in (*policy["spec"]["ingress"], *policy["spec"]["egress"]):
            assert rule.get("from") or rule.get("to")
            assert rule["ports"]


def rule_of(policy: dict[str, Any], direction: str, port: int) -> list[dict[str, Any]]:
    rules = [r for r in policy["spec"][direction] if port in [entry["port"] for entry in r["ports"]]]
    return [peer for rule in rules for peer in rule.get("from", rule.get("to"))]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_network_policies_select_existing_pods(scenario: str) -> None:
    text = helm.rendered(scenario)
    components = {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in of_kind(text, "Pod")}
    components |= {
        item["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
        for item in (*of_kind(text, "StatefulSet"), *of_kind(text, "Deployment"))
    }
    for policy in of_kind(text, "NetworkPolicy"):
        named = [policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]]
        for rule in (*policy["spec"]["ingress"], *policy["spec"]["egress"]):
            for peer in rule.get("from", rule.get("to")):
                if "app.kubernetes.io/component" in peer.get("podSelector", {}).get("matchLabels", {}):
                    named.append(peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"])
        assert set(named) <= components, policy["metadata"]["name"]


def test_network_policies_allow_the_listed_connections() -> None:
    """Check the allowed connections of each component of ``silos``, port by port."""
    found = {policy["metadata"]["name"]: policy for policy in of_kind(helm.rendered("silos"), "NetworkPolicy")}
    store, monitoring = {"ipBlock": {"cidr": "198.51.100.7/32"}}, "kubernetes.io/metadata.name"
    aggregator, worker, serve, test = (found[f"fed-fedloom-{n}"] for n in ("aggregator", "worker", "serve", "test"))

    def component(peer: dict[str, Any]) -> str:
        return str(peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"])

    assert [component(peer) for peer in rule_of(aggregator, "ingress", 7733)] == ["worker", "test"]
    assert [component(peer) for peer in rule_of(worker, "egress", 7733)] == ["aggregator"]
    assert [component(peer) for peer in rule_of(test, "egress", 7733)] == ["aggregator"]
    assert [component(peer) for peer in rule_of(test, "egress", 7734)] == ["serve"]
    first, second = rule_of(serve, "ingress", 7734)
    assert component(first) == "test"
    assert second == {"namespaceSelector": {"matchLabels": {"team": "clinics"}}}
    for policy in (aggregator, worker, serve):
        (peer,) = rule_of(policy, "ingress", 7736)
        assert peer == {"namespaceSelector": {"matchLabels": {monitoring: "monitoring"}}}
    for policy in (aggregator, worker, serve):
        assert rule_of(policy, "egress", 443) == [store]
    for policy in (aggregator, worker):  # components with tracing
        assert rule_of(policy, "egress", 4317)
    for policy in (serve, test):
        assert not rule_of(policy, "egress", 4317)
    for policy in found.values():
        assert len(rule_of(policy, "egress", 53)) == 2  # kube-dns, and the cache of the node
    assert len(worker["spec"]["ingress"]) == 1  # of metrics
    assert test["spec"]["ingress"] == []
    assert not any(rule_of(policy, "ingress", 7735) for policy in found.values())  # used by the kubelet alone


def test_dns_may_use_another_port() -> None:
    text = helm.rendered("trial", {"networkPolicy.dns.port": 5353})
    for policy in of_kind(text, "NetworkPolicy"):
        if not policy["metadata"]["name"].endswith("-seaweedfs"):
            assert rule_of(policy, "egress", 5353)
            assert not rule_of(policy, "egress", 53)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_rejected_experiment_does_not_block_a_rollback(scenario: str) -> None:
    """With ``OrderedReady`` the controller waits for a pod that will never be ready (Kubernetes: forced rollback)."""
    for item in of_kind(helm.rendered(scenario), "StatefulSet"):
        assert item["spec"]["podManagementPolicy"] == "Parallel"


def test_servers_listen_on_the_port_of_the_headless_service() -> None:
    """The port of a headless Service is not translated: clients connect to the pods themselves."""
    text = helm.rendered("silos", {"serve.port": 8443})
    (serve,) = of_kind(text, "Deployment")
    pod = serve["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert "--listen=0.0.0.0:8443" in container["args"]
    assert {"name": "grpc", "containerPort": 8443, "protocol": "TCP"} in container["ports"]
    assert rule_of(one(text, "NetworkPolicy", "serve"), "ingress", 8443)
    assert rule_of(one(text, "NetworkPolicy", "test"), "egress", 8443)
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = int(serving_settings(container)["drain_s"])
    assert pod["terminationGracePeriodSeconds"] >= pause + drain + 10


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_mounts_of_secrets_and_settings_are_read_only_and_minimal(scenario: str) -> None:
    for name, pod in helm.pods(helm.rendered(scenario)):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in containers(pod):
            for mount in container["volumeMounts"]:
                volume = volumes[mount["name"]]
                if "secret" in volume or "configMap" in volume:
                    assert mount["readOnly"] is True, (name, mount)
                if mount["name"] in ("token", "tokens"):
                    assert len(volume["secret"]["items"]) == 1
                if "secret" in volume:
                    assert volume["secret"]["defaultMode"] == 0o440


@pytest.mark.parametrize("existing", [False, True])
def test_workers_have_their_members_policy(existing: bool) -> None:
    policy = {"configMap": {"name": "mine", "key": "policy.yaml"}} if existing else {"values": {"only_sums": True}}
    rendered = helm.rendered("member", {"workers.policy": policy})
    ((_, pod),) = [(name, pod) for name, pod in helm.pods(rendered) if "worker" in name]
    (container,) = pod["containers"]
    assert "--policy=/etc/fedloom/policy/policy.yaml" in container["args"]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "policy"]
    assert mount == {"name": "policy", "mountPath": "/etc/fedloom/policy", "readOnly": True}
    (volume,) = [volume["configMap"] for volume in pod["volumes"] if volume["name"] == "policy"]
    made = {each["metadata"]["name"]: each["data"] for each in of_kind(rendered, "ConfigMap")}
    assert volume == {"name": "mine"} if existing else yaml.safe_load(made[volume["name"]]["policy.yaml"])["only_sums"]


def test_signing_workers_have_their_key_and_the_register() -> None:
    signing = {"workers.signing": {"existingSecret": "signing", "key": "own.key"}, "workers.onlySums": True}
    text = helm.rendered("trial", {"experiment": {"configMap": {"name": "mine"}, "values": None}, **signing})
    pod = dict(helm.pods(text))["fed-fedloom-worker"]
    (container,) = pod["containers"]
    assert "--only-sums" in container["args"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "signing"]
    assert mount == {"name": "signing", "mountPath": "/etc/fedloom/signing", "readOnly": True}
    assert env[FILES["signing_key"]] == "/etc/fedloom/signing/own.key"
    assert env[FILES["register"]] == "/etc/fedloom/signing/signing-keys.txt"
    (volume,) = [volume["secret"] for volume in pod["volumes"] if volume["name"] == "signing"]
    assert volume["secretName"] == "signing"
    assert volume["defaultMode"] == 0o440
    assert [item["path"] for item in volume["items"]] == ["own.key", "signing-keys.txt"]


def test_certificates_cover_every_address_of_the_aggregator() -> None:
    routed = {"parentRefs": [{"name": "g"}], "hostnames": ["fl.example.org", "gw.example.org"]}
    ingress = {"enabled": True, "host": "in.example.org"}
    text = helm.rendered("members", {"ingress": ingress, "gateway": {**routed, "tlsRoute": {"enabled": True}}})
    names = one(text, "Certificate", "aggregator")["spec"]["dnsNames"]
    assert {"fed-fedloom.fl", "fed-fedloom.fl.svc", "fl.example.org", "gw.example.org", "in.example.org"} <= set(names)
    assert len(names) == len(set(names))


def test_custom_labels_appear_once() -> None:
    """The more specific of two values for a label is used: kubectl rejects YAML with a repeated key."""

    class Strict(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key) for key, _ in node.value]  # type: ignore[no-untyped-call]
            assert len(keys) == len(set(keys)), keys
            return super().construct_mapping(node, deep)

    more = {"commonLabels": {"release": "all", "team": "a"}, "aggregator": {"podLabels": {"team": "b"}}}
    found = [item for item in yaml.load_all(helm.rendered("members", more), Strict) if item]
    (monitor,) = [item for item in found if item["kind"] == "ServiceMonitor"]
    assert monitor["metadata"]["labels"] | {"release": "prometheus", "team": "a"} == monitor["metadata"]["labels"]
    (aggregator,) = [item for item in found if item["kind"] == "StatefulSet"]
    assert aggregator["spec"]["template"]["metadata"]["labels"]["team"] == "b"


A, B = "sha256:" + 64 * "a", "sha256:" + 64 * "b"


@pytest.mark.parametrize(
    ("common", "own", "aggregator", "worker"),
    [
        ({"tag": "1.2.3"}, {}, ":1.2.3", "fedloom/aggregator:1.2.3"),
        ({"tag": "1.2.3"}, {"tag": "9.9.9"}, ":1.2.3", "fedloom/aggregator:9.9.9"),
        ({"tag": "1.2.3"}, {"repository": "w"}, ":1.2.3", "w:1.2.3"),
        ({"digest": A}, {}, f"@{A}", f"fedloom/aggregator@{A}"),
        ({"digest": A}, {"tag": "9.9.9"}, f"@{A}", "fedloom/aggregator:9.9.9"),
        ({"digest": A}, {"repository": "w"}, f"@{A}", "w:0.1.0"),
        ({"tag": "1.2.3"}, {"digest": B, "tag": "9.9.9"}, ":1.2.3", f"fedloom/aggregator@{B}"),
    ],
)
def test_workers_use_the_aggregators_image_by_default(
    common: dict[str, str], own: dict[str, str], aggregator: str, worker: str
) -> None:
    text = helm.rendered("trial", {"image": common, "workers.image": own})
    found = {name: pod["containers"][0]["image"] for name, pod in helm.pods(text)}
    assert found["fed-fedloom-aggregator"] == f"fedloom/aggregator{aggregator}"
    assert found["fed-fedloom-worker"] == worker


def test_common_annotations_are_on_every_pod() -> None:
    text = helm.rendered("trial", {"commonAnnotations.team": "a"})
    for item in helm.objects(text):
        assert item["metadata"]["annotations"]["team"] == "a", named(item)
        if "template" in item.get("spec", {}):
            assert item["spec"]["template"]["metadata"]["annotations"]["team"] == "a", named(item)


def test_alerts_detect_a_crash_loop_and_ignore_a_stall_after_a_pause() -> None:
    text = helm.rendered("members", {"metrics.prometheusRule.stalledAfterSeconds": 600})
    (rule,) = of_kind(text, "PrometheusRule")
    alerts = {each["alert"]: each["expr"] for group in rule["spec"]["groups"] for each in group["rules"]}
    assert set(alerts) == {
        "FedLoomAggregatorDown", "FedLoomAggregatorRestarts", "FedLoomRoundsStalled", "FedLoomCertificateEnds",
        "FedLoomPrivacyBudgetNearlySpent",
    }  # fmt: skip
    assert re.search(
        r"avg_over_time\(max by \(namespace, service\) \(up\{.*?\}\)\[15m:1m\]\)", alerts["FedLoomAggregatorDown"]
    )
    assert "process_start_time_seconds{" in alerts["FedLoomAggregatorRestarts"]
    worked = r"increase\(fedloom_phase_seconds_total\{phase=~\"training.*?\}\[600s\]\)\) > 0.8 \* 600"
    assert re.search(worked, alerts["FedLoomRoundsStalled"])


RULES = ("metrics.serviceMonitor.enabled", "metrics.prometheusRule.enabled", "metrics.dashboard.enabled")
PEER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}


def alerts_of(scenario: str, **more: Any) -> dict[str, Any]:
    values = {**dict.fromkeys(("metrics.enabled", *RULES), True), "networkPolicy.metrics": [PEER], **more}
    (rule,) = of_kind(helm.rendered(scenario, values), "PrometheusRule")
    return {each["alert"]: each for group in rule["spec"]["groups"] for each in group["rules"]}


def test_every_alert_links_to_its_section_of_the_runbook() -> None:
    page = (ROOT / "docs" / "alerts.md").read_text()
    sections = {f"docs/alerts.md#{heading.lower()}" for heading in re.findall(r"^## (\w+)$", page, re.MULTILINE)}
    links = set()
    for scenario in SCENARIOS:
        for alert in alerts_of(scenario).values():
            links.add(alert["annotations"]["runbook_url"])
    assert links == sections
    url = "https://fl.example.org/alerts/"
    moved = alerts_of("silos", **{"metrics.prometheusRule.runbookUrl": url})
    for name, alert in moved.items():
        assert alert["annotations"]["runbook_url"] == f"{url}#{name.lower()}"


def test_a_members_release_is_monitored_without_the_aggregators_alerts() -> None:
    alerts = alerts_of("member")
    assert set(alerts) == {"FedLoomWorkerDisconnected", "FedLoomWorkerWithoutRounds"}
    for alert in alerts.values():
        assert 'pod=~"north-worker-.+"' in alert["expr"]
        assert alert["labels"]["severity"] == "warning"
    assert "fedloom_worker_allowed" in alerts["FedLoomWorkerDisconnected"]["expr"]
    values = {**dict.fromkeys(RULES, True), "networkPolicy.metrics": [PEER]}
    text = helm.rendered("member", values)
    assert not of_kind(text, "ServiceMonitor")
    (monitor,) = of_kind(text, "PodMonitor")
    ((_, pod),) = helm.pods(text)
    (container,) = pod["containers"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in [port["name"] for port in container["ports"]]
    (policy,) = of_kind(text, "NetworkPolicy")
    assert rule_of(policy, "ingress", 7736) == [PEER]


@pytest.mark.parametrize("metrics", [True, False])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_workers_have_probes_and_metrics(scenario: str, metrics: bool) -> None:
    off = {} if metrics else {**dict.fromkeys(RULES, False), "metrics.enabled": False}
    workers = [pod for name, pod in helm.pods(helm.rendered(scenario, off)) if name.endswith("-worker")]
    for pod in workers:
        (container,) = pod["containers"]
        arguments = dict(argument.partition("=")[::2] for argument in container["args"])
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert set(ports) == {"health", *(["metrics"] if metrics else [])}
        assert arguments["--health"] == f"0.0.0.0:{ports['health']}"
        assert arguments.get("--metrics") == (f"0.0.0.0:{ports['metrics']}" if metrics else None)
        for probe, path in (("startupProbe", "/healthz"), ("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
            assert container[probe]["httpGet"] == {"path": path, "port": ports["health"]}
        startup = container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800  # it verifies its clients' data before
    assert workers or scenario in ("members", "gateway", "plaintext-gateway")


def test_each_release_has_its_own_dashboard() -> None:
    first = one(helm.rendered("members"), "ConfigMap", "dashboard")
    second = one(helm.rendered("members", {"fullnameOverride": "other"}), "ConfigMap", "dashboard")
    boards = [json.loads(content) for item in (first, second) for content in item["data"].values()]
    assert len({board["uid"] for board in boards}) == len({board["title"] for board in boards}) == 2
    assert all(len(board["uid"]) <= 40 for board in boards)
    assert len({*first["data"], *second["data"]}) == 2


def test_an_ingress_terminates_tls_with_the_named_certificate() -> None:
    text = helm.rendered("plaintext-gateway", {"ingress.tlsSecret": "fl-old-tls"})
    (ingress,) = of_kind(text, "Ingress")
    assert ingress["spec"]["tls"] == [{"hosts": ["fl-old.example.org"], "secretName": "fl-old-tls"}]


def test_only_the_aggregator_gets_trackers_and_secret_references() -> None:
    token = {"valueFrom": {"secretKeyRef": {"name": "mlflow", "key": "token"}}}
    reported = [{"name": "MLFLOW_TRACKING_URI", "value": "https://m"}, {"name": "MLFLOW_TRACKING_TOKEN", **token}]
    changes = {"tracking": ["mlflow", "csv"], "aggregator.extraEnv": reported}
    for name, pod in helm.pods(helm.rendered("members", changes)):
        env = {entry["name"]: entry for entry in pod["containers"][0]["env"]}
        if name.endswith("-aggregator"):
            assert env["FEDLOOM_TRACK"]["value"] == "mlflow csv"
            assert env["MLFLOW_TRACKING_TOKEN"]["valueFrom"] == token["valueFrom"]
        else:
            assert not {"FEDLOOM_TRACK", "MLFLOW_TRACKING_TOKEN"} & set(env)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_selectors_match_the_intended_pods(scenario: str) -> None:
    text = helm.rendered(scenario)
    labels = [
        item["spec"]["template"]["metadata"]["labels"]
        for item in helm.objects(text)
        if "template" in item.get("spec", {})
    ]
    for item in helm.objects(text):
        spec = item.get("spec", {})
        selector = spec.get("selector", {}) if item["kind"] in ("Service", "PodDisruptionBudget") else {}
        selector = selector.get("matchLabels", selector)
        if selector:
            assert sum(selector.items() <= label.items() for label in labels) == 1, item["metadata"]["name"]
        if item["kind"] == "ServiceMonitor":
            chosen = [s for s in of_kind(text, "Service") if selector_of(item) <= s["metadata"]["labels"].items()]
            assert all("metrics" in [port["name"] for port in service["spec"]["ports"]] for service in chosen)
            assert len(chosen) == (2 if "HorizontalPodAutoscaler" in text else 1)


def selector_of(item: dict[str, Any]) -> Any:
    return item["spec"]["selector"]["matchLabels"].items()


@pytest.mark.parametrize("scenario", sampled(SCENARIOS, {"silos"}))
def test_an_upgrade_keeps_immutable_fields_and_restarts_nothing(scenario: str, tmp_path: Path) -> None:
    later = tmp_path / "fedloom"
    shutil.copytree(CHART, later)
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (later / "Chart.yaml").write_text(yaml.safe_dump({**about, "version": "0.2.0"}))
    before = {named(item): item for item in helm.objects(helm.rendered(scenario))}
    after = {named(item): item for item in helm.objects(helm.rendered(scenario, chart=later))}
    assert set(before) == set(after)
    for name, item in before.items():
        for key in IMMUTABLE.get(item["kind"], ()):
            assert item["spec"].get(key) == after[name]["spec"].get(key), (name, key)
        if "template" in item.get("spec", {}):
            assert item["spec"]["template"] == after[name]["spec"]["template"], name
    assert any(item["metadata"]["labels"]["helm.sh/chart"] == "fedloom-0.2.0" for item in after.values()
               if "helm.sh/chart" in item["metadata"].get("labels", {}))  # fmt: skip


def test_a_changed_experiment_restarts_only_the_aggregator() -> None:
    before = {named(item): item for item in helm.objects(helm.rendered("trial"))}
    changed = helm.rendered("trial", {"experiment.values.federation.rounds": 60})
    after = {named(item): item for item in helm.objects(changed)}
    assert [name for name in before if before[name] != after[name]] == [
        ("ConfigMap", "fed-fedloom-experiment"),
        ("StatefulSet", "fed-fedloom-aggregator"),
    ]
    both = (helm.rendered("silos"), helm.rendered("silos", {"experiment.revision": "8"}))
    was, now = (one(text, "StatefulSet", "aggregator") for text in both)
    assert was["spec"]["template"]["metadata"] != now["spec"]["template"]["metadata"]


def experiment_of(text: str, folder: Path) -> experiments.Experiment:
    """Return the experiment that a ConfigMap contains."""
    (config,) = [item for item in of_kind(text, "ConfigMap") if "experiment.yaml" in item["data"]]
    (folder / "rendered.yaml").write_text(config["data"]["experiment.yaml"])
    return experiments.load_experiment(folder / "rendered.yaml")


@pytest.mark.parametrize("scenario", ["members", "trial", "gateway"])
def test_the_config_map_contains_the_given_experiment(scenario: str, tmp_path: Path) -> None:
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(helm.scenario_values(scenario)["experiment"]["values"]))
    found = experiment_of(helm.rendered(scenario), tmp_path)
    assert experiments.load_experiment(tmp_path / "given.yaml") == found


def test_the_values_on_the_page_of_several_clusters_install(tmp_path: Path) -> None:
    """Its hub admits the named members, at the address to which its member connects."""
    _, _, page = (ROOT / "docs" / "cluster.md").read_text().partition("\n## A federation over several clusters\n")
    page, _, _ = page.partition("\n## ")
    hub, member = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.S))
    assert member == helm.scenario_values("member")
    done = helm.run("template", "fed", CHART, "-n", "fl", "-f", "-", given=hub)
    assert done.returncode == 0, done.stderr
    assert experiment_of(done.stdout, tmp_path).name == "hospitals"
    (route,) = of_kind(done.stdout, "TLSRoute")
    name, _, port = member["workers"]["aggregator"].partition(":")
    assert name in one(done.stdout, "Certificate", "aggregator")["spec"]["dnsNames"]
    assert route["spec"]["hostnames"] == [name]
    assert [rule["ports"][0]["port"] for rule in member["networkPolicy"]["workersEgress"]] == [int(port)]
    allowed = {entry["certificate"] for entry in hub["auth"]["identities"]}
    assert allowed == {f"URI:urn:fedloom:{member}" for member in ("north", "south", "east")}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_tools_without_cluster_access_render_the_same_objects(scenario: str) -> None:
    """Argo CD renders with the cluster's versions alone: other versions, and an upgrade, must give the same text."""
    cluster = ("--kube-version", "v1.33.5-eks-3025e55", "--api-versions", "monitoring.coreos.com/v1", "--include-crds")
    assert helm.rendered(scenario, {}, *cluster, "--is-upgrade") == helm.rendered(scenario)


@pytest.mark.parametrize("tool", ["argocd", "flux"])
def test_gitops_examples_name_existing_files_and_install(tool: str, tmp_path: Path) -> None:
    """The tools themselves are not run: the values pass the schema and render, and the names agree."""
    text = (ROOT / "docs" / "examples" / "gitops" / f"{tool}.yaml").read_text()
    objects = {item["kind"]: item for item in yaml.safe_load_all(text)}
    if tool == "argocd":
        spec = objects["Application"]["spec"]
        path, tag, given = spec["source"]["path"], spec["source"]["targetRevision"], spec["source"]["helm"]
        release, values_given, namespace = given["releaseName"], given["valuesObject"], spec["destination"]["namespace"]
    else:
        source, helm_release = objects["GitRepository"], objects["HelmRelease"]
        spec = helm_release["spec"]
        reference = spec["chart"]["spec"]["sourceRef"]
        assert (reference["kind"], reference["name"]) == ("GitRepository", source["metadata"]["name"])
        path, tag = spec["chart"]["spec"]["chart"], source["spec"]["ref"]["tag"]
        release, values_given, namespace = helm_release["metadata"]["name"], spec["values"], "hospitals"
        assert {item["metadata"]["namespace"] for item in objects.values()} == {namespace}
    assert (ROOT / path / "Chart.yaml").is_file()
    assert tag == f"v{fedloom.__version__}"
    assert values_given["image"]["tag"] == fedloom.__version__
    done = helm.run("template", release, ROOT / path, "-n", namespace, "-f", "-", given=values_given)
    assert done.returncode == 0, done.stderr
    assert experiment_of(done.stdout, tmp_path).name == release
    store = helm.rendered("trial", {"seaweedfs.size": "1Gi"})
    claims = [*of_kind(done.stdout, "PersistentVolumeClaim"), *of_kind(store, "PersistentVolumeClaim")]
    assert len(claims) == 3
    for claim in claims:  # pruning and uninstalling keep the run, and the store
        assert claim["metadata"]["annotations"] == {
            "helm.sh/resource-policy": "keep",
            "argocd.argoproj.io/sync-options": "Delete=false,Prune=false",
        }


# ---- rejected values

PAGE = {
    "ui.enabled": True,
    "ui.existingClaim": "runs",
    "auth.tokens.existingSecret": "t",
    "networkPolicy.uiPeers": [{"podSelector": {}}],
}
STORED = {"storage.url": "s3://bucket/p", "storage.existingSecret": "s"}
TO = [{"ipBlock": {"cidr": "198.51.100.7/32"}}]
PLAINTEXT = {"tls.mode": "none", "insecure": True}
TLS_OF_SECRET = {"tls.mode": "secret", "tls.secret": {"name": "t", "ca": ""}}
TOKENS = {"auth.tokens.existingSecret": "t"}
ROUTED = {"gateway.grpcRoute.enabled": True, "gateway.parentRefs": [{"name": "g"}]}
DEPLOYED = {**STORED, "workers.kind": "Deployment"}
ONE_MEMBER = {"workers": {"kind": "StatefulSet", "replicas": 1, "data": "/data"}}
OUTSIDE = {"workers.aggregator": "fl.example.org:443"}
SUMS = "experiment.values.federation.secure_aggregation"
CUDA = {"workers.device": "cuda"}
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "two aggregators": ({"aggregator.replicas": 2}, ("aggregator.replicas: ", "2", "1")),
    "no experiment": ({"experiment.values": None}, ("experiment: ", "experiment.values")),
    "a key of another chart": ({"replicaCount": 3}, ("replicaCount: ",)),
    "a secret": ({"token": "x"}, ("token: ",)),
    "a key that nobody knows": ({"aggregator.memory": "2Gi"}, ("'memory'",)),
    "a word for a number": ({"workers.replicas": "many"}, ("/workers/replicas",)),
    "no workers by number": ({"workers.replicas": 0}, ("/workers/replicas", "0", "1")),
    "latest": ({"image.tag": "latest"}, ("image.tag: ", "latest")),
    "a store without a URL": ({"state.kind": "objectStore"}, ("state.kind: ", "objectStore", "storage.url")),
    "workers without a store": ({"workers.kind": "StatefulSet"}, ("workers.kind: ", "StatefulSet", "storage.url")),
    "a store without credentials": ({"storage.url": "s3://bucket/p"}, ("storage.existingSecret: ",)),
    "a store that pods cannot reach": (STORED, ("networkPolicy.store.to: ",)),
    "a store that is no URL": ({"storage.url": "/data"}, ("/storage/url",)),
    "plaintext": ({"tls.mode": "none"}, ("tls.mode: ", "none", "insecure")),
    "strangers": ({"tls.mutual": False}, ("tls.mutual: ", "auth.tokens.existingSecret", "insecure")),
    "mutual TLS without authorities": (TLS_OF_SECRET, ("tls.secret.ca: ", "tls.mutual")),
    "TLS without a Secret": ({"tls.mode": "secret"}, ("tls.secret.name: ",)),
    "identities of nobody": (
        {"tls.mutual": False, "insecure": True, "auth.identities": [{"name": "a"}]},
        ("auth.identities: ", "tls.mutual"),
    ),
    "nobody may dial": ({"networkPolicy.peers": None}, ("networkPolicy.peers: ",)),
    "a peer without a place": ({"networkPolicy.peers": [{}]}, ("/networkPolicy/peers/0",)),
    "Prometheus may not read": (
        {"networkPolicy.metrics": None, "metrics.serviceMonitor.enabled": True}, ("networkPolicy.metrics: ",)
    ),
    "a monitor without metrics": (
        {"metrics.enabled": False, "metrics.dashboard.enabled": True}, ("metrics.enabled: ", "true")
    ),
    "traces to nobody": ({"tracing.enabled": True}, ("tracing.endpoint: ",)),
    "traces that cannot get out": (
        {"tracing": {"enabled": True, "endpoint": "http://collector:4317"}}, ("networkPolicy.collector.to: ",)
    ),
    "traces to a path": ({"tracing.endpoint": "http://collector:4318/v1/traces"}, ("/tracing/endpoint",)),
    "more than each round": ({"tracing.ratio": 2}, ("/tracing/ratio",)),
    "a route to nowhere": ({"gateway.tlsRoute.enabled": True}, ("gateway.parentRefs: ",)),
    "routes by names that are none": (
        {"gateway.hostnames": ["FL.example.org", "192.0.2.1"], "serve.hostnames": ["*"], "ingress.host": "192.0.2.1"},
        ("/gateway/hostnames/0", "/gateway/hostnames/1", "/serve/hostnames/0", "/ingress/host"),
    ),
    "TLS that ends where it does not": (ROUTED, ("gateway.grpcRoute.enabled: ", "tls.mode", "certManager")),
    "a GPU that is not asked for": (CUDA, ("workers.device: ", "cuda", "workers.resources.limits")),
    "a GPU that no worker would use": (
        {"workers.resources.limits": {"nvidia.com/mig-1g.10gb": 1}},
        ("workers.device: ", "cpu", "nvidia.com/mig-1g.10gb"),
    ),
    "other GPUs than the limit": (
        {**CUDA, "workers.resources": {"requests": {"amd.com/gpu": 2}, "limits": {"amd.com/gpu": 1}}},
        ("workers.resources.requests: ", "amd.com/gpu: 2", "1"),
    ),
    "a device without a limit": (
        {"serve.resources.requests": {"example.com/card": "1"}},
        ("serve.resources.requests: ", "example.com/card: 1", "not set"),
    ),
    "half a GPU": (
        {**CUDA, "workers.resources.limits": {"nvidia.com/gpu": "500m"}},
        ("/workers/resources/limits/nvidia.com~1gpu", "integer"),
    ),
    "one folder of clients and two workers": (
        {"workers": {"kind": "Deployment", "data": "/data"}},
        ("workers.data: ", "workers.kind Deployment", "workers.replicas 2"),
    ),
    "a partition and a folder of clients": (
        {**ONE_MEMBER, "workers.partition.url": "s3://bucket/partition"}, ("workers.data: ", "workers.partition.url")
    ),
    "a release of nothing": (
        {"aggregator.enabled": False},
        ("aggregator.enabled: ", "workers.kind", "workers.aggregator: ", "tls.certManager.issuerRef.name: "),
    ),
    "an experiment, and its aggregator elsewhere": (
        {"aggregator.enabled": False, "seaweedfs.enabled": True},
        ("experiment: ", "seaweedfs.enabled: ", "aggregator.enabled"),
    ),
    "a member without a certificate": (
        {**ONE_MEMBER, **OUTSIDE, "aggregator.enabled": False, "tls.mode": "secret"},
        ("workers.tls.existingSecret: ", "tls.mutual", "networkPolicy.workersEgress: "),
    ),
    "serving from nowhere": ({"serve.enabled": True}, ("serve.enabled: ", "storage.url")),
    "a page for everyone": ({**PAGE, "auth.tokens.existingSecret": ""}, ("ui.enabled: ", "auth.tokens.existingSecret")),
    "a page about a volume of another pod": ({**PAGE, "ui.existingClaim": ""}, ("ui.existingClaim: ", "ReadWriteMany")),
    "a page for nobody": ({**PAGE, "networkPolicy.uiPeers": []}, ("networkPolicy.uiPeers: ",)),
    "serving nobody": ({**STORED, "serve.enabled": True}, ("networkPolicy.servePeers: ",)),
    "more at least than at most": (
        {"serve.autoscaling.minReplicas": 9}, ("serve.autoscaling.minReplicas: ", "9", "maxReplicas", "8")
    ),
    "too little time to stop": (
        {"aggregator.terminationGracePeriodSeconds": 5}, ("/aggregator/terminationGracePeriodSeconds", "5", "60")
    ),
    "an environment variable without a name": (
        {"aggregator.extraEnv": [{"value": "x"}]}, ("missing property 'name'",)
    ),
    "alerts of what is not scraped": (
        {"metrics.prometheusRule.enabled": True},
        ("metrics.prometheusRule.enabled: ", "metrics.serviceMonitor.enabled"),
    ),
    "workers that cannot get out": (
        {**OUTSIDE, "workers.kind": "Deployment"},
        ("networkPolicy.workersEgress: ", "workers.aggregator", "fl.example.org:443"),
    ),
    "a label by which the chart finds its own": (
        {"aggregator.podLabels": {"app.kubernetes.io/component": "x"}},
        ("aggregator.podLabels: ", "app.kubernetes.io/component"),
    ),
    "certificates that are renewed before they are issued": (
        {"tls.certManager.duration": "24h", "tls.certManager.renewBefore": "24h"},
        ("tls.certManager.renewBefore: ", "24h", "tls.certManager.duration"),
    ),
    "certificates of minutes": (  # cert-manager refuses less than an hour
        {"tls.certManager.duration": "90m"}, ("/tls/certManager/duration", "h$")
    ),
    "a scaler of nothing": (
        {"serve.enabled": True, "serve.resources.requests.cpu": None},
        ("serve.resources.requests.cpu: ", "serve.autoscaling.enabled"),
    ),
    "serving where health is": ({"serve": {"enabled": True, "port": 7735}}, ("serve.port: ", "7735")),
    "serving where only root may": ({"serve.port": 443}, ("/serve/port", "443")),
    "an ingress that ends TLS that goes through": (
        {"ingress": {"enabled": True, "host": "a.example.org", "tlsSecret": "t"}},
        ("ingress.tlsSecret: ", "tls.mode", "certManager"),
    ),
    "a tracker with a space": ({"tracking": ["csv tensorboard"]}, ("/tracking/0",)),
    "a public route to an aggregator that asks nobody": (
        {**PLAINTEXT, **ROUTED}, ("auth.tokens.existingSecret: ", "gateway.grpcRoute.enabled")
    ),
    "an ingress to an aggregator that asks nobody": (
        {**PLAINTEXT, "ingress": {"enabled": True, "host": "a.example.org"}},
        ("auth.tokens.existingSecret: ", "ingress.enabled"),
    ),
    "a load balancer through which nobody comes": (
        {**DEPLOYED, "networkPolicy": {"peers": None, "store": {"to": TO}}},
        ("networkPolicy.peers: ", "service.type", "LoadBalancer"),
    ),
    "a store of another bucket than the one that is made": (
        {**STORED, "seaweedfs.enabled": True}, ("storage.url: ", "bucket", "seaweedfs.enabled", "fedloom")
    ),
    "workers that know no authority": (
        {**DEPLOYED, **TLS_OF_SECRET, **TOKENS, "tls.mutual": False, "workers.token.existingSecret": "w"},
        ("tls.secret.ca: ", "workers"),
    ),
    "workers that are nobody in the table": (
        {
            **DEPLOYED, **TOKENS, "tls.mutual": False, "workers.token.existingSecret": "w",
            "auth.identities": [{"name": "a", "token": "a", "roles": ["watch"]}],
        },
        ("auth.identities: ", "role worker"),
    ),
    "workers that are two in the table": (
        {
            **DEPLOYED, **TOKENS, "workers.token.existingSecret": "w",
            "auth.identities": [{"name": "a", "token": "a", "roles": ["worker"]}],
        },
        ("workers.token.existingSecret: ", "auth.identities"),
    ),
    "workers that would refuse their aggregator": (
        {**DEPLOYED, "workers.onlySums": True, SUMS: {"signatures": "none"}},
        ("workers.onlySums: ", f"{SUMS}.signatures", "keys", "certificates"),
    ),
    "workers without the key that they sign with": (
        {**DEPLOYED, SUMS: {"signatures": "keys"}},
        ("workers.signing.existingSecret: ", "signing.key", "signing-keys.txt"),
    ),
    "ingress without a host": ({"ingress.enabled": True}, ("ingress.host: ",)),
}  # fmt: skip


@pytest.mark.parametrize("wrong", sampled(REFUSED, {"two aggregators", "plaintext", "latest"}))
def test_invalid_values_are_rejected_with_key_found_and_allowed(wrong: str) -> None:
    changes, facts = REFUSED[wrong]
    given = helm.change({**helm.scenario_values("members"), "metrics": {}}, changes)
    done = helm.run("template", "fed", CHART, "-f", "-", given=given)
    assert done.returncode != 0
    assert not done.stdout
    assert mentions(done.stderr, *facts)


def test_all_errors_are_listed() -> None:
    done = helm.run("template", "fed", CHART, "--set", "tls.mode=none")
    for key in ("experiment:", "tls.mode:", "tls.mutual:", "networkPolicy.peers:"):
        assert key in done.stderr


def test_an_older_kubernetes_is_rejected() -> None:
    values_file = CHART / "ci" / "members-values.yaml"
    done = helm.run("template", "fed", CHART, "-f", values_file, "--kube-version", "1.30.0")
    assert done.returncode != 0
    assert "1.31" in done.stderr


@pytest.mark.cluster
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_lint_finds_nothing_and_the_notes_fit_the_values(scenario: str) -> None:
    linted = helm.run("lint", "--strict", CHART, "-f", CHART / "ci" / f"{scenario}-values.yaml")
    assert linted.returncode == 0, linted.stdout
    shown = helm.rendered(scenario, {}, "--dry-run=client", command="install")
    manifests, _, notes = shown.partition("NOTES:")
    for name in re.findall(r"(?:statefulset/|service |claim )([a-z0-9-]+)", notes):
        assert name in manifests, name
    assert "<no value>" not in shown
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", notes, re.M)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_the_notes_give_the_address_of_the_charts_store() -> None:
    """The command that publishes a partition needs access to it, and its claim stays when the release is removed."""
    notes = notes_of("trial", {"workers.partition.prepare": False})
    for needed in ("port-forward service/fed-fedloom-seaweedfs 8333", "FEDLOOM_S3_ENDPOINT=", "AWS_SECRET_ACCESS_KEY="):
        assert needed in notes
    assert notes.index("port-forward") < notes.index("fedloom partition")
    assert "the claim fed-fedloom-seaweedfs" in notes


TEST_TLS = {"test.tls.existingSecret": "own"}
TEST_TOKEN = {"test.token": {"existingSecret": "own", "key": "own.token"}}
WORKERS_TLS, WORKERS_TOKEN = {"workers.tls.existingSecret": "w"}, {"workers.token.existingSecret": "w"}
TABLE_OF_WORKERS = {"auth.identities": [{"name": "w", "token": "w", "roles": ["worker"]}]}
OWN_TOKEN = ("own", "own.token")


@pytest.mark.parametrize(
    ("scenario", "given", "shown"),
    [
        ("silos", {}, ("fed-fedloom-test-tls", None)),
        ("members", TOKENS, ("fed-fedloom-test-tls", None)),
        ("gateway", {}, None),
        ("gateway", TEST_TLS, ("own", None)),
        ("gateway", {**TEST_TLS, **TEST_TOKEN}, ("own", OWN_TOKEN)),
        ("gateway", WORKERS_TLS, ("w", None)),
        ("gateway", {**WORKERS_TLS, **TEST_TLS, **WORKERS_TOKEN}, ("own", None)),
        ("plaintext-gateway", {}, None),
        ("plaintext-gateway", TEST_TOKEN, (None, OWN_TOKEN)),
        ("trial", {}, (None, ("trial-worker", "token"))),
        ("trial", {**TEST_TOKEN, **TABLE_OF_WORKERS}, (None, OWN_TOKEN)),
    ],
)
def test_the_helm_test_uses_its_own_credential_or_the_workers(
    scenario: str, given: dict[str, Any], shown: tuple[str | None, tuple[str, str] | None] | None
) -> None:
    """Never the workers' token beside a certificate of its own: that would be two identities."""
    pods = of_kind(helm.rendered(scenario, given), "Pod")
    if shown is None:
        assert not pods
        return
    (pod,) = pods
    secrets = {volume["name"]: volume["secret"] for volume in pod["spec"]["volumes"] if "secret" in volume}
    certificate, token = shown
    assert secrets.get("tls", {}).get("secretName") == certificate
    assert secrets.get("token", {}).get("secretName") == (token and token[0])
    for container in pod["spec"]["containers"]:
        env = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert env.get("FEDLOOM_TOKEN_FILE") == (token and f"/etc/fedloom/token/{token[1]}")


def test_the_identity_file_lists_usable_chart_identities() -> None:
    def names(changes: dict[str, Any]) -> list[str]:
        configs = of_kind(helm.rendered("silos", changes), "ConfigMap")
        (config,) = [item for item in configs if "identities.yaml" in item["data"]]
        return [entry["name"] for entry in yaml.safe_load(config["data"]["identities.yaml"])["identities"]]

    assert names({}) == ["operator", "fed-fedloom-workers", "fed-fedloom-test"]
    assert names({"tls.mutual": False, **TOKENS, **WORKERS_TOKEN, **TABLE_OF_WORKERS}) == ["w"]


SHOWN = "--credentials DIR"


@pytest.mark.parametrize(
    ("scenario", "given", "worker", "personalize"),
    [
        ("members", {}, f"HOST:7733 {SHOWN}", None),
        ("members", {"tls.mutual": False, **TOKENS}, f"HOST:7733 {SHOWN}", None),
        ("members", {**PLAINTEXT, **TOKENS}, f"HOST:7733 {SHOWN} --insecure", None),
        ("gateway", {}, f"fl.example.org:443 {SHOWN}", None),
        ("plaintext-gateway", {}, f"fl.example.org:443 {SHOWN}", f"{SHOWN} --insecure"),
        ("silos", {}, None, SHOWN),
    ],
)
def test_commands_in_the_notes_can_connect(
    scenario: str, given: dict[str, Any], worker: str | None, personalize: str | None
) -> None:
    notes = notes_of(scenario, given)
    commands: Any = get_command(app)
    lines = [line.split() for line in notes.splitlines() if line.startswith("     fedloom ")]
    for _, called, *words in lines:
        known = {word for option in commands.commands[called].params for word in option.opts}
        assert {word for word in words if word.startswith("--")} <= known
    reported = {words[1]: " ".join(words[2:]) for words in lines}
    assert reported.get("worker") == (worker and f"--aggregator {worker} --data DIR")
    at = "fed-fedloom-serve.fl.svc:7734"
    assert reported.get("personalize") == (personalize and f"{at} {personalize} --data DIR --out model.pt2")
    certified = scenario == "members" and given.get("tls.mode") != "none"
    assert ("tls.certManager.dnsNames" in notes) is certified
    assert ("helm test" in notes) is bool(of_kind(helm.rendered(scenario, given), "Pod"))


def notes_of(scenario: str, changes: dict[str, Any]) -> str:
    return helm.rendered(scenario, changes, "--dry-run=client", command="install").partition("NOTES:")[2]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_commands_and_variables_exist_in_the_command_line(scenario: str) -> None:
    commands: Any = get_command(app)
    known = {"FEDLOOM_S3_ENDPOINT", "FEDLOOM_TRACING", *(each.envvar for each in commands.params)}
    for name, pod in helm.pods(helm.rendered(scenario)):
        for container in containers(pod):
            if container["command"] != ["fedloom"]:
                continue
            called, *arguments = container["args"]
            options = commands.commands[called].params
            allowed = {word for option in options for word in (*option.opts, *option.secondary_opts)}
            words = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
            assert words <= allowed, name
            named = {entry["name"] for entry in container["env"] if entry["name"].startswith("FEDLOOM_")}
            connects = {"FEDLOOM_CREDENTIALS"} <= {option.envvar for option in options}
            files = set(FILES.values()) if connects else set()
            assert named <= known | {option.envvar for option in options} | files, name
