"""The kinds of objects, what may be created, what the API fills in, and how objects are selected."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import Any

import kubernetes_validate

Object = dict[str, Any]
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
VERSION = "1.35"
COVERED_VOLUMES = {"emptyDir", "secret", "configMap"}


@dataclass(frozen=True)
class Resource:
    """A kind, as it stands in URLs and in manifests."""

    plural: str
    kind: str
    group: str = ""
    version: str = "v1"
    schema: bool = True
    namespaced: bool = True
    short: list[str] = field(default_factory=list, compare=False)

    @property
    def api_version(self) -> str:
        """As in a manifest."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """As in the API's messages."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def path(self) -> str:
        """As URLs begin."""
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"


RESOURCES = {
    resource.plural: resource
    for resource in (
        Resource("namespaces", "Namespace", namespaced=False, short=["ns"]),
        Resource("services", "Service", short=["svc"]),
        Resource("pods", "Pod", short=["po"]),
        Resource("secrets", "Secret"),
        Resource("configmaps", "ConfigMap", short=["cm"]),
        Resource("events", "Event", short=["ev"]),
        Resource("jobs", "Job", "batch"),
        Resource("workflows", "Workflow", "argoproj.io", "v1alpha1", schema=False),  # an owner, nothing runs it
    )
}


class Invalid(Exception):
    """An object that the API refuses: 422, with one line for each thing that is wrong."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def admit(resource: Resource, namespace: str, given: Object) -> Object:
    """Check an object that is to be created, and fill in what the API fills in.

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
    if "name" not in meta and meta.get("generateName"):
        meta["name"] = meta["generateName"] + suffix()
    if resource.namespaced and meta.setdefault("namespace", namespace) != namespace:
        raise Invalid(400, "the namespace of the provided object does not match the namespace sent on the request")
    validate(resource, given)
    if resource.kind == "Job":
        _fill_job(given)
    elif resource.kind == "Pod":
        fill_pod(given["spec"])
        given["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
    elif resource.kind == "Secret":
        import base64

        text = given.pop("stringData", None) or {}
        data = {key: base64.b64encode(value.encode()).decode() for key, value in text.items()}
        given["data"] = {**(given.get("data") or {}), **data}
    return given


def validate(resource: Resource, item: Object) -> None:
    """Check an object against the schema of Kubernetes and the rules that no schema holds.

    Raises
    ------
    Invalid
        Naming the field, as the API does.
    """
    meta, wrong = item["metadata"], []
    rule = DNS_LABEL if resource.kind == "Service" else SUBDOMAIN
    if not rule.fullmatch(meta.get("name", "")):
        wrong.append(f'metadata.name: Invalid value: "{meta.get("name", "")}": must be a DNS name')
    if resource.schema:
        try:
            kubernetes_validate.validate(item, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            where = ".".join(str(part) for part in error.path)
            wrong.append(f"{where or resource.kind}: {error.message}")
    if not wrong:
        wrong += _labels("metadata.labels", meta.get("labels") or {})
        if resource.kind == "Job":
            wrong += _job(item)
        elif resource.kind == "Pod":
            wrong += _pod("spec", item["spec"])
        elif resource.kind == "Service":
            wrong += _service(item["spec"])
    if wrong:
        named = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
        raise Invalid(422, f'{named} "{meta.get("name", "")}" is invalid: {", ".join(wrong)}')


def suffix() -> str:
    """The random end of a generated name."""
    return "".join(random.choices("bcdfghjklmnpqrstvwxz2456789", k=5))


def _labels(where: str, labels: dict[str, str]) -> list[str]:
    return [f'{where}: Invalid value: "{value}"' for value in labels.values() if not LABEL.fullmatch(value)]


def _service(spec: Object) -> list[str]:
    wrong = []
    if not spec.get("ports"):
        wrong.append("spec.ports: Required value")
    if len(spec.get("ports") or []) > 1 and any("name" not in port for port in spec["ports"]):
        wrong.append("spec.ports[0].name: Required value")
    if spec.get("clusterIP") == "None" or not spec.get("selector"):
        wrong.append("spec: the fake cluster covers neither headless Services nor Services without selector")
    return wrong


def _pod(where: str, spec: Object) -> list[str]:
    wrong = []
    names = [container["name"] for container in spec["containers"]]
    if len(set(names)) < len(names):
        wrong.append(f"{where}.containers: Duplicate value")
    if spec.get("initContainers"):
        wrong.append(f"{where}.initContainers: the fake cluster covers none")
    if spec.get("restartPolicy", "Always") != "Never":
        wrong.append(f'{where}.restartPolicy: Unsupported value: the fake cluster covers "Never"')
    volumes = {volume["name"]: volume for volume in spec.get("volumes") or []}
    for name, volume in volumes.items():
        if not COVERED_VOLUMES & volume.keys():
            wrong.append(f"{where}.volumes[{name}]: the fake cluster covers {', '.join(sorted(COVERED_VOLUMES))}")
    for i, container in enumerate(spec["containers"]):
        at = f"{where}.containers[{i}]"
        if not container.get("image"):
            wrong.append(f"{at}.image: Required value")
        for mount in container.get("volumeMounts") or []:
            if mount["name"] not in volumes:
                wrong.append(f'{at}.volumeMounts: Not found: "{mount["name"]}"')
        resources = container.get("resources") or {}
        limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
        for kind, limit in limits.items():
            if kind in requests and quantity(requests[kind]) > quantity(limit):
                wrong.append(f"{at}.resources.requests: Invalid value: must be less than or equal to {kind} limit")
            if "/" in kind and kind in requests and quantity(requests[kind]) != quantity(limit):
                wrong.append(f"{at}.resources.requests: Invalid value: must be equal to {kind} limit")
    return wrong


def _job(item: Object) -> list[str]:
    spec = item["spec"]
    pod = spec["template"]["spec"]
    policy = (spec.get("podFailurePolicy") or {}).get("rules") or []
    indexed = spec.get("completionMode") == "Indexed"
    wrong = _pod("spec.template.spec", pod)
    wrong += _labels("spec.template.metadata.labels", (spec["template"].get("metadata") or {}).get("labels") or {})
    if "selector" in spec and "uid" not in item["metadata"]:
        wrong.append("spec.selector: Invalid value: `selector` will be auto-generated")
    if pod.get("restartPolicy") is None:
        wrong.append('spec.template.spec.restartPolicy: Required value: valid values: "OnFailure", "Never"')
    if indexed and spec.get("completions") is None:
        wrong.append("spec.completions: Required value: when completion mode is Indexed")
    if spec.get("backoffLimitPerIndex") is not None and not indexed:
        wrong.append("spec.backoffLimitPerIndex: Invalid value: requires indexed completion mode")
    if spec.get("maxFailedIndexes") is not None:
        if spec.get("backoffLimitPerIndex") is None:
            wrong.append("spec.backoffLimitPerIndex: Required value: when maxFailedIndexes is specified")
        if spec["maxFailedIndexes"] > (spec.get("completions") or 0):
            wrong.append("spec.maxFailedIndexes: Invalid value: must be less than or equal to completions")
    if policy and spec.get("podReplacementPolicy", "Failed") != "Failed":
        wrong.append('spec.podReplacementPolicy: Unsupported value: supported values: "Failed"')
    if spec.get("successPolicy"):
        wrong.append("spec.successPolicy: the fake cluster covers none")
    containers = {container["name"] for container in pod["containers"]}
    for i, rule in enumerate(policy):
        at = f"spec.podFailurePolicy.rules[{i}]"
        if rule["action"] == "FailIndex" and spec.get("backoffLimitPerIndex") is None:
            wrong.append(f'{at}.action: Invalid value: "FailIndex": requires the backoffLimitPerIndex to be set')
        codes = rule.get("onExitCodes")
        if bool(codes) == bool(rule.get("onPodConditions")):
            wrong.append(f"{at}: Invalid value: specifying one of OnExitCodes and OnPodConditions is required")
        if codes and codes.get("containerName") not in {None, *containers}:
            wrong.append(f'{at}.onExitCodes.containerName: Invalid value: "{codes["containerName"]}"')
        if codes and codes["operator"] == "In" and 0 in codes["values"]:
            wrong.append(f"{at}.onExitCodes.values: Invalid value: must not be 0 for the In operator")
    return wrong


def _fill_job(item: Object) -> None:
    spec = item["spec"]
    spec.setdefault("parallelism", 1)
    spec.setdefault("completionMode", "NonIndexed")
    if spec["completionMode"] == "NonIndexed" and "completions" not in spec:
        spec["completions"] = 1
    spec.setdefault("backoffLimit", 6 if spec.get("backoffLimitPerIndex") is None else 2**31 - 1)
    spec.setdefault("podReplacementPolicy", "Failed" if spec.get("podFailurePolicy") else "TerminatingOrFailed")
    spec.setdefault("suspend", False)
    for rule in (spec.get("podFailurePolicy") or {}).get("rules") or []:
        for pattern in rule.get("onPodConditions") or []:
            pattern.setdefault("status", "True")
    fill_pod(spec["template"]["spec"])
    item["status"] = {}


def fill_pod(spec: Object) -> None:
    """What the API fills into a pod's ``spec``, as far as this cluster uses it."""
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
    """A quantity such as ``500m`` or ``1Gi`` as a number."""
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([A-Za-z]*)", str(text))
    if found is None or found[2] not in UNITS:
        raise Invalid(422, f"quantities must match the regular expression of the API, found {text!r}")
    return float(found[1]) * UNITS[found[2]]


def selects(labels: str | None, fields: str | None, item: Object) -> bool:
    """Whether a label selector and a field selector, as in a URL, both choose an object."""
    found = item["metadata"].get("labels") or {}
    for part in re.findall(r"[^,(]+(?:\([^)]*\))?", labels or ""):
        if among := re.fullmatch(r"\s*(\S+)\s+(in|notin)\s+\(([^)]*)\)\s*", part):
            chosen = found.get(among[1]) in [value.strip() for value in among[3].split(",")]
            if chosen != (among[2] == "in"):
                return False
        elif equal := re.fullmatch(r"\s*([^=!\s]+)\s*(=|==|!=)\s*(\S*)\s*", part):
            if (found.get(equal[1]) == equal[3]) != (equal[2] != "!="):
                return False
        elif (part.strip().lstrip("!") in found) == part.strip().startswith("!"):
            return False
    for part in filter(None, (fields or "").split(",")):
        path, unequal, wanted = re.fullmatch(r"([^=!]+)(!?)==?(.*)", part).groups()  # type: ignore[union-attr]
        value: Any = item
        for key in path.split("."):
            value = value.get(key, "") if isinstance(value, dict) else ""
        if (str(value) == wanted) == bool(unequal):
            return False
    return True
