"""Files of `make kind-up` and of the workflow that runs it: pinned, valid, and consistent with the tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_schemas
import yaml
from facts import tells

ROOT = Path(__file__).parents[2]
KIND = ROOT / "images" / "kind"
WORKFLOW = ROOT / ".github" / "workflows" / "e2e.yaml"


def objects(path: Path) -> list[dict[str, Any]]:
    return [item for item in yaml.safe_load_all(path.read_text()) if item]


def test_the_object_store_is_valid_and_meets_the_restricted_standard() -> None:
    deployment, service = objects(KIND / "seaweedfs.yaml")
    kubernetes_schemas.check(deployment, service)
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    assert re.fullmatch(r"chrislusf/seaweedfs:\d+\.\d+", container["image"])
    ports = [
        mapping for node in objects(KIND / "cluster.yaml")[0]["nodes"] for mapping in node.get("extraPortMappings", [])
    ]
    assert [port["nodePort"] for port in service["spec"]["ports"]] == [port["containerPort"] for port in ports]


def test_all_images_and_tools_are_pinned() -> None:
    for node in objects(KIND / "cluster.yaml")[0]["nodes"]:
        assert re.fullmatch(r"kindest/node:v1\.\d+\.\d+@sha256:[0-9a-f]{64}", node["image"])
    (workflow,) = objects(WORKFLOW)
    used = [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert used
    assert all(re.fullmatch(r"[\w./-]+@(v\d+\.\d+\.\d+|[0-9a-f]{40})", action) for action in used), used
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {step["run"].split()[1] for job in workflow["jobs"].values() for step in job["steps"]
              if step.get("run", "").startswith("make ")}  # fmt: skip
    assert {"kind-up", "kind-test", "kind-down"} <= called <= targets


def test_script_tests_and_page_use_the_same_variables() -> None:
    page = set(re.findall(r"FEDLOOM_E2E_\w+", (ROOT / "docs" / "e2e.md").read_text()))
    script = set(re.findall(r"FEDLOOM_E2E_\w+", (KIND / "kind.sh").read_text()))
    places = (ROOT / "tests" / "e2e" / "e2e_places.py").read_text()
    read = {f"FEDLOOM_E2E_{name}" for name in re.findall(r"env(?:\.get\(|\[)['\"](\w+)", places)}
    assert script <= page
    assert read == page


def test_missing_programs_are_named(tmp_path: Path) -> None:
    def said(*arguments: str) -> tuple[int, str]:
        shell = shutil.which("sh")
        assert shell is not None
        done = subprocess.run(
            [shell, str(KIND / "kind.sh"), *arguments],
            env={"PATH": str(tmp_path), "KIND_NAME": "none", "PYTHON": str(tmp_path / "python")},
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        return done.returncode, done.stderr

    for tool in ("dirname", "mkdir"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    code, message = said("up")
    assert code == 1
    assert tells(message, "docker", "buildx", "kind 0.33", "kubectl")
    code, message = said("sideways")
    assert code == 2
    assert tells(message, "'sideways'", "up, test, down")
    if not (ROOT / ".kind").exists():
        code, message = said("test")
        assert code == 1
        assert "make kind-up" in message


def test_the_script_is_executable() -> None:
    assert os.access(KIND / "kind.sh", os.X_OK)
