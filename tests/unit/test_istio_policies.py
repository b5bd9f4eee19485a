"""A federation in a profile whose mesh adds sidecars: policies against Istio's schemas, and admitted connections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import kubernetes_schemas
import pytest
import yaml
from test_cluster_manifests import PLAIN, objects

from fedloom.cluster.manifests import INJECT, PORT, FederationSpec

ROOT = Path(__file__).parents[2]
KUBEFLOW = ROOT / "tests" / "fixtures" / "kubeflow"
CRDS: dict[str, Any] = json.loads((KUBEFLOW / "istio_crds.json").read_text())
OURS = [*yaml.safe_load_all((ROOT / "components" / "federate" / "istio.yaml").read_text())]
PROFILE = [*yaml.safe_load_all((KUBEFLOW / "profile.yaml").read_text())]


@pytest.mark.parametrize(
    "policy", [*OURS, PROFILE[1]], ids=lambda policy: f"{policy['kind']}-{policy['metadata']['name']}"
)
def test_policies_are_valid_istio_resources(policy: dict[str, Any]) -> None:
    assert policy["apiVersion"] == "security.istio.io/v1"
    as_json = json.loads(json.dumps(policy["spec"]))  # with strings as keys
    jsonschema.validate(as_json, kubernetes_schemas.closed(CRDS[policy["kind"]]))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**as_json, "selectors": {}}, kubernetes_schemas.closed(CRDS[policy["kind"]]))


class Call(NamedTuple):
    """A connection: the source's namespace as known to the mesh (None without a sidecar), and its port."""

    namespace: str | None
    port: int


def admits(policies: list[dict[str, Any]], labels: dict[str, str], call: Call) -> bool:
    """Return True if a pod's sidecar admits a connection without HTTP: a rule of some policy matches all of it.

    Istio, "Authorization Policy": without policies all is admitted; a part of a rule that requires a principal, a path,
    a method or a header matches none here.
    """
    concern = [p for p in policies if p["spec"].get("selector", {}).get("matchLabels", {}).items() <= labels.items()]

    def matches(rule: dict[str, Any]) -> bool:
        when = all(w["key"] == "source.namespace" and call.namespace in w["values"] for w in rule.get("when", ()))
        to = [t["operation"] for t in rule.get("to", ())]
        ports = not to or any(set(one) == {"ports"} and str(call.port) in one["ports"] for one in to)
        return when and ports and "from" not in rule

    return not concern or any(matches(rule) for policy in concern for rule in policy["spec"]["rules"])


def pod_labels(manifest: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = manifest["spec"]["template"]["metadata"]["labels"]
    return found


def test_admission_by_a_profiles_policy_and_ours() -> None:
    """The launcher has no sidecar (kubeflow/pipelines, `v2_template.go`), so the mesh does not know its namespace."""
    aggregator, _, workers = (pod_labels(m) if "template" in m["spec"] else {} for m in objects(PLAIN))
    stock, ours = [PROFILE[1]], [OURS[0]]
    launcher, worker, other = Call(None, PORT), Call("team-a", PORT), Call(None, 7736)
    assert (admits(stock, aggregator, worker), admits(stock, aggregator, launcher)) == (True, False)
    assert admits([*stock, *ours], aggregator, launcher)
    assert not admits([*stock, *ours], aggregator, other)
    assert not admits([*stock, *ours], workers, launcher)
    for policy in OURS:
        assert policy["spec"]["selector"]["matchLabels"].items() <= aggregator.items()
    assert OURS[1]["spec"]["portLevelMtls"] == {PORT: {"mode": "PERMISSIVE"}}


def test_the_network_policy_admits_only_workers_and_tasks_to_the_aggregator() -> None:
    aggregator, _, workers = (pod_labels(m) if "template" in m["spec"] else {} for m in objects(PLAIN))
    admitting, refusing = yaml.safe_load_all((ROOT / "components" / "federate" / "networkpolicy.yaml").read_text())
    for policy, labels in ((admitting, aggregator), (refusing, workers)):
        kubernetes_schemas.check(policy)
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
        assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert refusing["spec"]["ingress"] == []
    (rule,) = admitting["spec"]["ingress"]
    assert rule["ports"] == [{"port": PORT, "protocol": "TCP"}]
    worker, task = (peer["podSelector"] for peer in rule["from"])
    assert worker["matchLabels"].items() <= workers.items()
    # kubeflow/pipelines 2.17.0, backend/src/common/util/consts.go: LabelKeyWorkflowRunId, set by v2_template.go.
    assert task == {"matchExpressions": [{"key": "pipeline/runid", "operator": "Exists"}]}


@pytest.mark.parametrize("asked", [None, "true"])
def test_pods_have_a_sidecar_only_if_requested(asked: str | None) -> None:
    labels = {} if asked is None else {INJECT: asked}
    settings = PLAIN.settings.model_copy(update={"labels": labels})
    federation = FederationSpec(**{**vars(PLAIN), "settings": settings})
    for manifest in objects(federation):
        if "template" in manifest["spec"]:
            metadata = manifest["spec"]["template"]["metadata"]
            assert {metadata[key][INJECT] for key in ("labels", "annotations")} == {asked or "false"}


def test_service_ports_declare_their_protocol() -> None:
    """Istio's `ConvertProtocol` and `Parse` (pkg/config/kube/conversion.go, pkg/config/protocol/instance.go).

    TLS that is not the mesh's own must not be declared as gRPC, which a sidecar would try to read.
    """
    _, service, _ = objects(PLAIN)
    assert [port["appProtocol"] for port in service["spec"]["ports"]] == ["grpc"]
    for golden in (ROOT / "tests" / "fixtures" / "chart").glob("*.yaml"):
        ports = [
            port
            for item in yaml.safe_load_all(golden.read_text())
            if item and item["kind"] == "Service"
            for port in item["spec"].get("ports", ())
            if port["name"] == "grpc"
        ]
        plain = golden.stem in ("trial", "plaintext-gateway")
        expected = set() if golden.stem == "member" else {"kubernetes.io/h2c" if plain else "tls"}
        assert {port["appProtocol"] for port in ports} == expected, golden
