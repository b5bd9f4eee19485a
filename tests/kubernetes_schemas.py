"""Manifests against the OpenAPI schemas of Kubernetes, strictly, with the values that their descriptions state.

The schemas are those that ``kubernetes-validate`` carries, made from ``api/openapi-spec/swagger.json`` of
kubernetes/kubernetes, one set for each minor version. They refuse unknown fields, missing ones and wrong types. For
1.33 to 1.37 the fields of every kind are those of the models in the official Python client of that version
(``kubernetes`` 33.1.0 to 37.0.2 on PyPI). A field whose values Kubernetes checks in its code is a mere string there, so
:data:`VALUES` adds them.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Iterable
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from referencing import Registry, Resource

VERSIONS = tuple(f"1.{minor}" for minor in range(31, 38))
"""From the oldest that FedLoom supports to the newest that there is."""

BASE = "/api/_definitions.json"
VALUES = {
    "io.k8s.api.apps.v1.DeploymentStrategy.type": "Recreate RollingUpdate",
    "io.k8s.api.apps.v1.StatefulSetSpec.podManagementPolicy": "OrderedReady Parallel",
    "io.k8s.api.autoscaling.v2.MetricSpec.type": "ContainerResource External Object Pods Resource",
    "io.k8s.api.autoscaling.v2.MetricTarget.type": "Utilization Value AverageValue",
    "io.k8s.api.batch.v1.JobSpec.completionMode": "NonIndexed Indexed",
    "io.k8s.api.batch.v1.JobSpec.podReplacementPolicy": "TerminatingOrFailed Failed",
    "io.k8s.api.batch.v1.PodFailurePolicyOnExitCodesRequirement.operator": "In NotIn",
    "io.k8s.api.batch.v1.PodFailurePolicyRule.action": "FailJob FailIndex Ignore Count",
    "io.k8s.api.core.v1.Container.imagePullPolicy": "Always Never IfNotPresent",
    "io.k8s.api.core.v1.Container.terminationMessagePolicy": "File FallbackToLogsOnError",
    "io.k8s.api.core.v1.ContainerPort.protocol": "UDP TCP SCTP",
    "io.k8s.api.core.v1.PodSecurityContext.fsGroupChangePolicy": "OnRootMismatch Always",
    "io.k8s.api.core.v1.PodSpec.restartPolicy": "Always OnFailure Never",
    "io.k8s.api.core.v1.SeccompProfile.type": "Localhost RuntimeDefault Unconfined",
    "io.k8s.api.core.v1.ServicePort.protocol": "TCP UDP SCTP",
    "io.k8s.api.core.v1.ServiceSpec.type": "ExternalName ClusterIP NodePort LoadBalancer",
    "io.k8s.api.core.v1.Toleration.effect": "NoSchedule PreferNoSchedule NoExecute",
    "io.k8s.api.core.v1.Toleration.operator": "Exists Equal",
    "io.k8s.api.core.v1.TopologySpreadConstraint.whenUnsatisfiable": "DoNotSchedule ScheduleAnyway",
    "io.k8s.api.networking.v1.HTTPIngressPath.pathType": "Exact Prefix ImplementationSpecific",
    "io.k8s.api.networking.v1.NetworkPolicyPort.protocol": "TCP UDP SCTP",
    "io.k8s.api.policy.v1.PodDisruptionBudgetSpec.unhealthyPodEvictionPolicy": "IfHealthyBudget AlwaysAllow",
}
"""Values that the description of a field states, in every version."""


@functools.cache
def definitions(version: str) -> dict[str, Any]:
    """Return the definitions of a version by name, each strict about its fields and their values."""
    folder = importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema"
    file = folder / f"v{version}.0-local-strict" / "_definitions.json"
    found: dict[str, Any] = json.loads(file.read_text())["$defs"]
    for path, values in VALUES.items():
        name, _, field = path.rpartition(".")
        found[name]["properties"][field]["enum"] = [*values.split(), None]
    return found


@functools.cache
def validator(kind: str, api_version: str, version: str) -> Draft202012Validator | None:
    """Return the validator of a kind, None if that version has no such kind."""
    group, _, name = api_version.rpartition("/")
    wanted = {"group": group, "version": name, "kind": kind}
    for key, schema in definitions(version).items():
        if wanted in schema.get("x-kubernetes-group-version-kind", ()):
            return Draft202012Validator({"$ref": f"{BASE}#/$defs/{key}"}, registry=registry(version))
    return None


@functools.cache
def registry(version: str) -> Registry[Any]:
    content = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": BASE, "$defs": definitions(version)}
    return Registry().with_resource(BASE, Resource.from_contents(content))


def faults(manifest: Any, version: str) -> list[ValidationError]:
    """Return everything that a version of Kubernetes would reject in a manifest."""
    found = validator(manifest["kind"], manifest["apiVersion"], version)
    if found is None:
        return [ValidationError(f"Kubernetes {version} has no {manifest['apiVersion']} {manifest['kind']}")]
    return list(found.iter_errors(manifest))


def closed(schema: Any) -> Any:
    """Return the schema of a custom resource in which unknown properties, which Kubernetes would drop, are errors."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items() if key not in ("properties", "format")}
    if "properties" in schema:
        own = {name: closed(value) for name, value in schema["properties"].items()}
        found = {"additionalProperties": False, "properties": own, **found}
    if schema.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
    return found


def check(*manifests: Any, versions: Iterable[str] = VERSIONS) -> None:
    """Fail unless every version of Kubernetes accepts every manifest."""
    for manifest in manifests:
        for version in versions:
            found = [f"{error.json_path}: {error.message}" for error in faults(manifest, version)]
            assert not found, (version, manifest["kind"], manifest["metadata"], found)
