"""The check of manifests can fail, and every manifest on a page passes it."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import helm
import kubernetes_schemas
import pytest
import yaml
from kubernetes_schemas import VALUES, VERSIONS, definitions, faults

ROOT = Path(__file__).parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("[cei]*/**/*.md")})
BLOCK = re.compile(r"^ *```\w[^\n]*\n(.*?)^ *```", re.M | re.S)
OTHERS = {
    "argoproj.io", "cert-manager.io", "gateway.networking.k8s.io", "helm.toolkit.fluxcd.io", "istio.io",
    "kind.x-k8s.io", "kubeflow.org", "monitoring.coreos.com", "security.istio.io", "serving.kserve.io",
    "source.toolkit.fluxcd.io",
}  # fmt: skip
"""Groups of kinds that are no part of Kubernetes."""

JOB: dict[str, Any] = {
    "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "one", "labels": {"a": "b"}},
    "spec": {
        "completions": 2, "completionMode": "Indexed", "backoffLimitPerIndex": 1,
        "podFailurePolicy": {"rules": [{"action": "FailIndex", "onExitCodes": {"operator": "In", "values": [2]}}]},
        "template": {"spec": {
            "restartPolicy": "Never",
            "containers": [{"name": "main", "image": "image:1", "resources": {"limits": {"cpu": "1", "memory": 5}}}],
        }},
    },
}  # fmt: skip
REMOVED = {
    "CronJob": "batch/v1beta1",
    "HorizontalPodAutoscaler": "autoscaling/v2beta2",
    "Ingress": "networking.k8s.io/v1beta1",
    "PodDisruptionBudget": "policy/v1beta1",
}
"""Versions of APIs that have been removed, by kind."""


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the Job with another value at a path; None removes it."""
    made: Any = copy.deepcopy(JOB)
    *before, last = path.split(".")
    inner = made
    for key in before:
        inner = inner[int(key) if key.isdigit() else key]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return dict(made)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_wrong_manifest_is_rejected_at_the_wrong_field(version: str) -> None:
    assert faults(JOB, version) == []
    pod = "spec.template.spec"
    for path, value, where in (
        ("spec.backofLimit", 3, "$.spec"),
        (f"{pod}.containers.0.imag", "image:1", f"$.{pod}.containers[0]"),
        (f"{pod}.containers.0.name", None, f"$.{pod}.containers[0]"),
        (f"{pod}.containers", None, f"$.{pod}"),
        ("spec.template", None, "$.spec"),
        ("spec.completions", "2", "$.spec.completions"),
        ("metadata.labels.a", 1, "$.metadata.labels.a"),
        (f"{pod}.restartPolicy", "Nevr", f"$.{pod}.restartPolicy"),
        ("spec.completionMode", "indexed", "$.spec.completionMode"),
        ("spec.podFailurePolicy.rules.0.action", "Fail", "$.spec.podFailurePolicy.rules[0].action"),
    ):
        assert [error.json_path for error in faults(changed(path, value), version)] == [where], path
    for kind, api_version in REMOVED.items():
        assert faults({"apiVersion": api_version, "kind": kind, "metadata": {"name": "one"}}, version)
    with pytest.raises(AssertionError):
        kubernetes_schemas.check(changed("spec.x", 1), versions=[version])


@pytest.mark.parametrize("version", VERSIONS)
def test_listed_values_appear_in_the_fields_description(version: str) -> None:
    for path, values in VALUES.items():
        name, _, field = path.rpartition(".")
        described = definitions(version)[name]["properties"][field]["description"]
        assert set(values.split()) <= set(re.findall(r"\w+", described)), path


def documents() -> list[tuple[str, dict[str, Any]]]:
    """Return the page and content of every object in YAML that a page shows."""
    found = []
    for page in PAGES:
        for block in BLOCK.findall(page.read_text()):
            if "apiVersion:" in block:
                text = re.search(r"^ *apiVersion:.*?(?=^ *EOF$|\Z)", block, re.M | re.S)
                assert text is not None, page
                found += [(page.name, item) for item in yaml.safe_load_all(text[0]) if item]
    return found


def test_manifests_on_pages_are_accepted_by_kubernetes() -> None:
    assert documents()
    for page, item in documents():
        group = item["apiVersion"].rpartition("/")[0]
        if group not in OTHERS:
            kubernetes_schemas.check(item)
        assert item["metadata"]["name"], page


@pytest.mark.slow
def test_chart_values_on_pages_render_to_accepted_manifests(tmp_path: Path) -> None:
    """They are complete, or added to values such as those of a scenario."""
    keys = set(yaml.safe_load((helm.CHART / "values.yaml").read_text()))
    blocks = [
        block
        for page in PAGES
        for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.M | re.S)
        if isinstance(given := next(iter(yaml.safe_load_all(block))), dict) and given.keys() <= keys
    ]
    assert len(blocks) > 1
    file = tmp_path / "values.yaml"
    for block in blocks:
        file.write_text(block)
        for before in ([], *(["-f", helm.CHART / "ci" / f"{scenario}-values.yaml"] for scenario in helm.SCENARIOS)):
            done = helm.run("template", "fed", helm.CHART, "-n", "fl", *before, "-f", file, "--kube-version", "1.37.0")
            if done.returncode == 0:
                break
        assert done.returncode == 0, (block, done.stderr)
        for item in helm.objects(done.stdout):
            if item["apiVersion"].rpartition("/")[0] not in OTHERS:
                kubernetes_schemas.check(item)
