"""``make images``: images for a CPU, built with the tools of this machine (docs/chart.md)."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_processes import experiment
from test_images import ASKED, BUILD_S, RUN_S, index_of

import fedloom
from fedloom.cluster.manifests import USER

ROOT = Path(__file__).parents[2]
MOST_BYTES = {"worker": 900_000_000, "aggregator": 1_000_000_000, "components": 1_050_000_000}
"""Unpacked; what fills them is in docs/chart.md."""
LOOK = """
import json, os
os.environ["_KFP_RUNTIME"] = "true"  # as the command of a component does
import fedloom, kubernetes.client, kfp.dsl, fedloom.kubeflow.steps
print(json.dumps({"version": fedloom.__version__, "user": os.getuid()}))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.group("images"),
    pytest.mark.timeout(BUILD_S),
    pytest.mark.skipif(not ASKED, reason="builds an image, which takes minutes: set FEDLOOM_TEST_IMAGES=1"),
]


def answers(command: str) -> bool:
    try:
        return not subprocess.run(shlex.split(command), capture_output=True, timeout=60, check=False).returncode
    except OSError:
        return False


def inspected(image: str, *, docker: bool) -> dict[str, Any]:
    """Return user, entry point, labels and size of an image."""
    line = ["docker", "image", "inspect", image] if docker else ["buildah", "inspect", "--type", "image", image]
    output = json.loads(subprocess.run(line, check=True, capture_output=True, text=True, timeout=60).stdout)
    if docker:
        return {**output[0]["Config"], "Size": output[0]["Size"]}
    listed = ["buildah", "images", "--json", image]
    size = json.loads(subprocess.run(listed, check=True, capture_output=True, text=True, timeout=60).stdout)[0]["size"]
    number, unit = size.split()
    return {**output["OCIv1"]["config"], "Size": float(number) * {"MB": 1e6, "GB": 1e9}[unit]}


RUN_AND_LOOK = """
import importlib.util, json, os, sys
from fedloom.cli.main import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
site = os.path.dirname(os.path.dirname(sys.modules["fedloom"].__file__))
files = {str(getattr(module, "__file__", "")) for module in [*sys.modules.values()]}
ours = [path for path in files if path.startswith(site) and path.endswith(".py")]
lacking = [path for path in ours if not os.path.exists(importlib.util.cache_from_source(path))]
print("LOOKED " + json.dumps({"imported": len(ours), "not compiled": lacking, "user": os.getuid()}))
"""


def written(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@contextlib.contextmanager
def within(image: str, folders: dict[str, str], *, docker: bool) -> Iterator[list[str]]:
    """Return a command line for a container of the image, with these folders mounted (host -> container)."""
    mounts = [word for here, there in folders.items() for word in ("--volume", f"{here}:{there}")]
    if docker:
        yield ["docker", "run", "--rm", "--network", "host", "--tmpfs", "/tmp", *mounts, "--entrypoint", "", image]
        return
    made = subprocess.run(["buildah", "from", image], check=True, capture_output=True, text=True, timeout=60)
    container = made.stdout.strip()
    try:
        yield ["buildah", "run", "--isolation", "chroot", "--network", "host", *mounts, container, "--"]
    finally:
        subprocess.run(["buildah", "rm", container], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("target", MOST_BYTES)
def test_make_images_builds_an_image(target: str, tmp_path: Path, fresh_root: Path) -> None:
    """The image also trains: rounds with workers over sockets; the modules of such a run are compiled."""
    docker = answers("docker buildx version") and answers("docker info")
    if not docker and not answers("buildah --version"):
        pytest.skip("neither docker with buildx nor buildah answers here")
    environment = {**os.environ, "REGISTRY": "localhost/", "REVISION": "test"}
    if base := os.environ.get("FEDLOOM_TEST_IMAGES_BASE"):
        environment["BASE"] = base

    def build() -> None:
        line = ["make", "images", f"TARGETS={target}"]
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
    image = f"localhost/fedloom/{target}:{fedloom.__version__}"
    found = inspected(image, docker=docker)
    print(f"{target}: {found['Size'] / 1e6:.0f} MB unpacked")
    assert found["User"] == f"{USER}:{USER}"
    assert (found.get("Entrypoint") or []) == ([] if target == "components" else ["fedloom"])
    assert found["Labels"]["org.opencontainers.image.version"] == fedloom.__version__
    assert found["Labels"]["org.opencontainers.image.revision"] == "test"
    assert found["Size"] < MOST_BYTES[target]

    reported = experiment(tmp_path, Path("/root-of-data"), federation={"rounds": 2, "checkpoint_every_s": 0})
    reported.chmod(0o644)
    tmp_path.chmod(0o777)
    for folder in tmp_path.parents:  # the container has another user, and pytest's folders are private
        if folder.is_relative_to("/tmp") and folder != Path("/tmp"):
            folder.chmod(0o755)
    data = tmp_path / "root"
    data.mkdir()
    (data / "partitions").mkdir(mode=0o777)
    (data / "partitions").chmod(0o777)
    shutil.copytree((fresh_root / "datasets").resolve() / "fashion-mnist", data / "datasets" / "fashion-mnist")
    folders = {str(tmp_path): "/given", str(data): "/root-of-data"}
    report = "no-report" if target == "worker" else "report"
    with within(image, folders, docker=docker) as line:
        for workers in (2, 0):
            options = ["run", "/given/experiment.yaml", "--workers", str(workers), "--out", f"/given/run-{workers}"]
            done = subprocess.run(
                [*line, "python", "-c", RUN_AND_LOOK, *options, f"--{report}"],
                capture_output=True, text=True, timeout=RUN_S, check=False,
            )  # fmt: skip
            assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
            looked = json.loads(done.stdout.partition("LOOKED ")[2])
            print(f"with {workers} workers: {looked['imported']} modules")
            assert looked["user"] == USER
            assert len(looked["not compiled"]) < looked["imported"] / 50, looked["not compiled"]
            assert ("<svg" in written(tmp_path / f"run-{workers}" / "report.html")) == (report == "report")
        if target == "components":
            done = subprocess.run(
                [*line, "python", "-c", LOOK], check=True, capture_output=True, text=True, timeout=RUN_S
            )
            assert json.loads(done.stdout) == {"version": fedloom.__version__, "user": USER}
    last = "checkpoints/round-000002.safetensors"
    assert (tmp_path / "run-2" / last).read_bytes() == (tmp_path / "run-0" / last).read_bytes()
