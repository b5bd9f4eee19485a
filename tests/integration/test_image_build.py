"""``make images``: the worker's image, built with what is here (docs/images.md)."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_images import ASKED, BUILD_S, index_of

import fedloom
from fedloom.cluster.manifests import USER

ROOT = Path(__file__).parents[2]
MOST_BYTES = 1_400_000_000
"""Unpacked; what fills it is in docs/images.md."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("images"),
    pytest.mark.timeout(BUILD_S),
    pytest.mark.skipif(not ASKED, reason="builds an image, which takes minutes: set FEDLOOM_TEST_IMAGES=1"),
]


def answers(command: str) -> bool:
    try:
        return not subprocess.run(shlex.split(command), capture_output=True, timeout=60, check=False).returncode
    except OSError:
        return False


def inspected(image: str, *, docker: bool) -> dict[str, Any]:
    """User, entry point, labels and size of an image."""
    line = ["docker", "image", "inspect", image] if docker else ["buildah", "inspect", "--type", "image", image]
    said = json.loads(subprocess.run(line, check=True, capture_output=True, text=True, timeout=60).stdout)
    if docker:
        return {**said[0]["Config"], "Size": said[0]["Size"]}
    listed = ["buildah", "images", "--json", image]
    size = json.loads(subprocess.run(listed, check=True, capture_output=True, text=True, timeout=60).stdout)[0]["size"]
    number, unit = size.split()
    return {**said["OCIv1"]["config"], "Size": float(number) * {"MB": 1e6, "GB": 1e9}[unit]}


def test_make_images_builds_the_worker(tmp_path: Path) -> None:
    docker = answers("docker buildx version") and answers("docker info")
    if not docker and not answers("buildah --version"):
        pytest.skip("neither docker with buildx nor buildah answers here")
    environment = {**os.environ, "REGISTRY": "localhost/", "REVISION": "test"}
    if base := os.environ.get("FEDLOOM_TEST_IMAGES_BASE"):
        environment["BASE"] = base

    def build() -> None:
        line = ["make", "images", "TARGETS=worker"]
        done = subprocess.run(
            line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=BUILD_S, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]

    if wheel := os.environ.get("FEDLOOM_TEST_IMAGES_TORCH"):
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / Path(wheel).name).symlink_to(wheel)
        with index_of(tmp_path) as url:
            version = Path(wheel).name.split("-")[1].partition("+")[0]
            environment |= {"TORCH_INDEX": url, "TORCH_VERSION": version, "BUILDAH_OPTIONS": "--network host"}
            build()
    else:
        build()
    found = inspected(f"localhost/fedloom/worker:{fedloom.__version__}", docker=docker)
    print(f"worker: {found['Size'] / 1e6:.0f} MB unpacked")
    assert found["User"] == f"{USER}:{USER}"
    assert found["Entrypoint"] == ["fedloom"]
    assert found["Labels"]["org.opencontainers.image.version"] == fedloom.__version__
    assert found["Labels"]["org.opencontainers.image.revision"] == "test"
    assert found["Size"] < MOST_BYTES
