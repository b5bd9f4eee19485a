"""Kinds of objects, admission of new ones, defaults of the API, and selectors."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

import kubernetes_schemas

Object = dict[str, Any]
SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
VERSION = "1.36"


@dataclass(frozen=True)
class Resource:
    """A kind, as named in URLs and in manifests."""

    plural: str
    kind: str
    group: str = ""
    version: str = "v1"
    schema: bool = True
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """Return group and version, as in a manifest."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """Return plural and group, as in the API's messages."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


RESOURCES = {
    resource.plural: resource
    for resource in (
        Resource("namespaces", "Namespace", namespaced=False),
        Resource("services", "Service"),
        Resource("pods", "Pod"),
        Resource("secrets", "Secret"),
        Resource("configmaps", "ConfigMap"),
        Resource("events", "Event"),
        Resource("jobs", "Job", "batch"),
        Resource("poddisruptionbudgets", "PodDisruptionBudget", "policy"),
        Resource("workflows", "Workflow", "argoproj.io", "v1alpha1", schema=False),  # an owner that is not executed
    )
}


class Invalid(Exception):
    """Error for an object that the API rejects: 422, with one line for each error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def admit(resource: Resource, namespace: str, given: Object, *, strict: bool = False) -> Object:
    """Validate a new object and fill in the API's defaults; unknown fields are dropped, or with ``strict`` refused.

    Raises
    ------
    Invalid
        Naming the field, as the API does.
    """
    if (given.get("apiVersion"), given.get("kind")) != (resource.api_version, resource.kind):
        raise Invalid(
            400,
            f"the API version in the data ({given.get('apiVersion')}, {given.get('kind')}) does not match the expected "
            f"API version ({resource.api_version}, {resource.kind})",
        )
    meta = given.setdefault("metadata", {})
    if resource.namespaced and meta.setdefault("namespace", namespace) != namespace:
        raise Invalid(400, "the namespace of the provided object does not match the namespace sent on the request")
    validate(resource, given, strict=strict)
    if resource.kind == "Job":
        _fill_job(given)
    elif resource.kind == "Pod":
        fill_pod(given["spec"])
        given["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
    return given


def validate(resource: Resource, item: Object, *, strict: bool) -> None:
    """Check an object against the schema of Kubernetes (rules between fields: tests/unit/test_cluster_manifests.py).

    A wrong type is refused when the object is decoded (400), a wrong value when it is validated (422).

    Raises
    ------
    Invalid
        Naming the field, as the API does.
    """
    meta, wrong, unknown = item["metadata"], [], []
    rule = DNS_LABEL if resource.kind == "Service" else SUBDOMAIN
    if not rule.fullmatch(meta.get("name", "")):
        wrong.append(f'metadata.name: Invalid value: "{meta.get("name", "")}": must be a DNS name')
    if resource.schema:
        undecodable = f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}: '
        for error in kubernetes_schemas.faults(item, VERSION):
            where = ".".join(str(part) for part in error.path)
            if error.validator == "type":
                raise Invalid(400, f"{undecodable}json: cannot unmarshal into field {where}: {error.message}")
            if error.validator == "additionalProperties":
                for name in error.instance.keys() - error.schema["properties"].keys():
                    unknown.append(f'unknown field "{f"{where}.{name}".lstrip(".")}"')
                    del error.instance[name]
            else:
                wrong.append(f"{where or resource.kind}: {error.message}")
        if unknown and strict:
            raise Invalid(400, f"{undecodable}strict decoding error: {', '.join(sorted(unknown))}")
    if wrong:
        named = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
        raise Invalid(422, f'{named} "{meta.get("name", "")}" is invalid: {", ".join(wrong)}')


def suffix() -> str:
    """Return the random end of a generated name."""
    return "".join(random.choices("bcdfghjklmnpqrstvwxz2456789", k=5))


def _fill_job(item: Object) -> None:
    spec = item["spec"]
    spec.setdefault("parallelism", 1)
    spec.setdefault("completionMode", "NonIndexed")
    if spec["completionMode"] == "NonIndexed" and "completions" not in spec:
        spec["completions"] = 1
    spec.setdefault("backoffLimit", 6 if spec.get("backoffLimitPerIndex") is None else 2**31 - 1)
    spec.setdefault("podReplacementPolicy", "Failed" if spec.get("podFailurePolicy") else "TerminatingOrFailed")
    for rule in (spec.get("podFailurePolicy") or {}).get("rules") or []:
        for pattern in rule.get("onPodConditions") or []:
            pattern.setdefault("status", "True")
    fill_pod(spec["template"]["spec"])
    item["status"] = {}


def fill_pod(spec: Object) -> None:
    """Fill in the API's defaults of a pod's ``spec``, as far as this cluster uses them."""
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("restartPolicy", "Always")
    for container in spec["containers"]:
        container.setdefault("terminationMessagePolicy", "File")
        container.setdefault("imagePullPolicy", "IfNotPresent")
        resources = container.setdefault("resources", {})
        if resources.get("limits"):
            resources["requests"] = {**resources["limits"], **(resources.get("requests") or {})}


UNITS = {
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "": 1.0,
}


def quantity(text: Any) -> float:
    """Return a quantity such as ``500m`` or ``1Gi`` as a number."""
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([A-Za-z]*)", str(text))
    if found is None or found[2] not in UNITS:
        raise Invalid(422, f"quantities must match the regular expression of the API, found {text!r}")
    return float(found[1]) * UNITS[found[2]]


def selects(labels: str | None, fields: str | None, item: Object) -> bool:
    """Return True if an object matches a label selector and a field selector, each of equalities as in a URL."""
    found = item["metadata"].get("labels") or {}
    if any(found.get(key) != value for key, value in _equalities(labels)):
        return False
    for path, wanted in _equalities(fields):
        value: Any = item
        for key in path.split("."):
            value = value.get(key, "") if isinstance(value, dict) else ""
        if str(value) != wanted:
            return False
    return True


def _equalities(selector: str | None) -> list[tuple[str, str]]:
    parts = [part.partition("=") for part in filter(None, (selector or "").split(","))]
    return [(key, value) for key, _, value in parts]
