"""The images, built and run: only with FEDLOOM_TEST_IMAGES=1 and Docker or Podman (docs/chart.md).

Containers run like pods: user 65532, a read-only root file system, no capabilities, nothing shared but a store.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from ports import free_port
from run_processes import experiment, until
from run_processes import fedloom as fedloom_here
from s3_support import S3Server

import fedloom
from fedloom.cluster.manifests import USER
from fedloom.data.manifest import Manifest
from fedloom.storage import Store, open_store

ROOT = Path(__file__).parents[2]
ASKED = os.environ.get("FEDLOOM_TEST_IMAGES") == "1"
BUILD_S, RUN_S = 1500.0, 600.0
INDEX_PORT = 17730
"""Fixed port: the address of the index is part of the key of the build's cache."""

TARGETS = ("worker", "aggregator", "components")
LIKE_A_POD = (
    "--read-only", "--tmpfs", "/tmp", "--tmpfs", "/work", "--user", f"{USER}:{USER}", "--cap-drop", "ALL",
    "--security-opt", "no-new-privileges",
)  # fmt: skip

LOOK = """
import importlib.util, json, os, pathlib, sys, fedloom, torch, fedloom.cli.main, fedloom.engine.worker
site = pathlib.Path(fedloom.__file__).parents[1]
imported = [pathlib.Path(getattr(module, "__file__", None) or "") for module in [*sys.modules.values()]]
files = [path for path in imported if path.suffix == ".py" and path.is_relative_to(site)]
known = ("minio", "matplotlib", "kubernetes", "kfp", "google/cloud", "hatchling", "pip", "uv")
print(json.dumps({
    "user": os.getuid(), "home": os.environ["HOME"], "opt": os.listdir("/opt"), "cuda": torch.version.cuda,
    "not compiled": [str(path) for path in files if not os.path.exists(importlib.util.cache_from_source(path))],
    "packages": [name for name in known if (site / name).is_dir()],
}))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.group("images"),
    pytest.mark.timeout(3 * BUILD_S),
    pytest.mark.skipif(not ASKED, reason="builds images, which takes minutes: set FEDLOOM_TEST_IMAGES=1"),
]


@dataclass(frozen=True)
class Engine:
    """Docker or Podman: a command line with ``build``, ``run``, ``stop``, ``wait``, ``logs`` and ``inspect``."""

    command: tuple[str, ...]

    def __call__(self, *arguments: object, code: int = 0, timeout_s: float = RUN_S) -> str:
        line = [*self.command, *map(str, arguments)]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == code, f"{shlex.join(line)[-1000:]}\n{(done.stdout + done.stderr)[-4000:]}"
        return done.stdout

    @contextlib.contextmanager
    def started(self, image: str, *arguments: object, environment: Mapping[str, str] | None = None) -> Iterator[str]:
        """Run a container for the duration of the block; yield its id, and remove it."""
        reported = [f"--env={name}={value}" for name, value in (environment or {}).items()]
        given = ("run", "--detach", "--pull", "never", "--network", "host", *LIKE_A_POD, *reported, image, *arguments)
        container = self(*given).strip()
        try:
            yield container
        finally:
            self("rm", "--force", container)

    def log(self, container: str) -> str:
        line = [*self.command, "logs", container]
        return subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60).stdout

    def ended(self, container: str, code: int = 0) -> str:
        """Wait for a container to end and return its output."""
        found = int(self("wait", container).split()[-1])
        output = self.log(container)
        assert found == code, f"exit code {found}\n{output[-4000:]}"
        return output


def first_that_answers() -> tuple[str, ...] | None:
    for name in ("docker", "podman"):
        if shutil.which(name) and not subprocess.run([name, "info"], capture_output=True, timeout=60).returncode:
            return (name,)
    return None


@contextlib.contextmanager
def index_of(folder: Path) -> Iterator[str]:
    """Serve a package index on this machine: the listing of a package's folder is a valid index page."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            return

    handler = partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", INDEX_PORT), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{INDEX_PORT}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def engine() -> Engine:
    reported = os.environ.get("FEDLOOM_TEST_IMAGES_ENGINE")
    command = tuple(shlex.split(reported)) if reported else first_that_answers()
    if command is None:
        pytest.skip("neither docker nor podman answers here; another command: FEDLOOM_TEST_IMAGES_ENGINE")
    return Engine(command)


@pytest.fixture(scope="module")
def images(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Build the images from this checkout; return target -> name."""
    arguments = ["--build-arg", "REVISION=test"]
    if base := os.environ.get("FEDLOOM_TEST_IMAGES_BASE"):
        arguments += ["--build-arg", f"BASE={base}"]
    names = {target: f"localhost/fedloom-test/{target}:{fedloom.__version__}" for target in TARGETS}
    with contextlib.ExitStack() as stack:
        if wheel := os.environ.get("FEDLOOM_TEST_IMAGES_TORCH"):
            folder = tmp_path_factory.mktemp("index")
            (folder / "torch").mkdir()
            shutil.copy(wheel, folder / "torch")
            url = stack.enter_context(index_of(folder))
            version = Path(wheel).name.split("-")[1].partition("+")[0]
            arguments += ["--network", "host", "--build-arg", f"TORCH_INDEX={url}"]
            arguments += ["--build-arg", f"TORCH_VERSION={version}"]
        for target, name in names.items():
            begun = time.monotonic()
            file = ("--file", "images/Dockerfile", "--target", target)
            engine("build", *file, "--tag", name, *arguments, ".", timeout_s=BUILD_S)
            size = int(engine("image", "inspect", name, "--format", "{{.Size}}"))
            print(f"{target}: {size / 1e6:.0f} MB, built in {time.monotonic() - begun:.0f} s")
    return names


@dataclass(frozen=True)
class Place:
    """A bucket with an experiment and its partition, and the settings a container needs to access it."""

    url: str
    partition: str
    environment: dict[str, str]

    @property
    def experiment(self) -> str:
        return f"{self.url}/experiments/small.yaml"

    def run(self, name: str) -> Store:
        return open_store(f"{self.url}/runs/{name}", self.environment)


@pytest.fixture(scope="module")
def place(s3_server: S3Server, fresh_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Use a method with client states, so that workers write to the store too."""
    folder = tmp_path_factory.mktemp("images")
    path = experiment(
        folder,
        fresh_root,
        algorithm={"name": "pfedbayes", "steps": 4, "batch_size": 16},
        federation={"rounds": 6, "clients_per_round": 6, "checkpoint_every_s": 0, "deadline_s": 200},
        evaluation={"every": 3, "cohort": 10},
    )
    fedloom_here("partition", path, "--out", folder / "partition")
    url = f"s3://{s3_server.new_bucket()}/team"
    open_store(url, s3_server.environment).upload("experiments/small.yaml", path)
    manifest = Manifest.from_json((folder / "partition" / "partition.json").read_text())
    partition = f"{url}/partitions/{manifest.fingerprint}"
    fedloom_here("partition", path, "--out", partition, environment=s3_server.environment)
    return Place(url, partition, s3_server.environment)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.mark.parametrize("target", TARGETS)
def test_images_match_the_dockerfile(engine: Engine, images: dict[str, str], target: str) -> None:
    config = json.loads(engine("image", "inspect", images[target]))[0]["Config"]
    assert config["User"] == f"{USER}:{USER}"
    assert (config.get("Entrypoint") or []) == ([] if target == "components" else ["fedloom"])
    labels = {name.rpartition(".")[2]: value for name, value in config["Labels"].items()}
    assert labels["title"] == f"FedLoom {target}"
    assert (labels["version"], labels["revision"]) == (fedloom.__version__, "test")
    word = ["fedloom"] if target == "components" else []
    output = engine("run", "--rm", "--pull", "never", *LIKE_A_POD, images[target], *word, "--version")
    assert output.startswith(f"fedloom {fedloom.__version__}, protocol ")


@pytest.mark.parametrize("target", TARGETS)
def test_images_have_their_packages_and_no_build_tools(engine: Engine, images: dict[str, str], target: str) -> None:
    """Images contain bytecode, since none can be written, but no installer, sources or packages of other images."""
    output = engine("run", "--rm", "--pull", "never", *LIKE_A_POD, "--entrypoint", "python", images[target], "-c", LOOK)
    found = json.loads(output)
    packages = {"worker": ["minio"], "aggregator": ["minio", "matplotlib"]}
    assert found["packages"] == packages.get(target, ["minio", "matplotlib", "kubernetes", "kfp"])
    assert (found["user"], found["home"], found["opt"], found["not compiled"]) == (USER, "/work", ["venv"], [])
    assert found["cuda"] is None


def test_a_federation_in_containers(engine: Engine, images: dict[str, str], place: Place, port: int) -> None:
    """An aggregator that is stopped and restarted, and two workers: the results of one process, to the bit."""
    alone, pods = place.run("alone"), place.run("pods")
    reported = {"environment": place.environment}
    common = ("--partition", place.partition, "--out", "/work/run", "--publish")
    command = ("run", place.experiment, *common, alone.url)
    with engine.started(images["aggregator"], *command, **reported) as one_process:
        engine.ended(one_process)

    at = ("--listen", f"127.0.0.1:{port}", "--resume")
    aggregator = (images["aggregator"], "aggregator", place.experiment, *common, pods.url, *at)
    worker = ("worker", "--aggregator", f"127.0.0.1:{port}", "--partition", place.partition, "--reconnect", "300")
    worker = (*worker, "--states", f"{pods.url}/states", "--name")
    with (
        engine.started(images["worker"], *worker, "worker-0", **reported) as first,
        engine.started(images["components"], "fedloom", *worker, "worker-1", **reported) as second,
    ):
        with engine.started(*aggregator, **reported) as container:
            until(lambda: len([*pods.entries("published/")]) >= 2, "round 1, published", RUN_S)
            engine("stop", "--time", "120", container)
            output = engine.ended(container, 130)
        assert "summary.json" not in {entry.name for entry in pods.entries()}, output
        with engine.started(*aggregator, **reported) as container:
            output = engine.ended(container)
        for each in (first, second):
            engine.ended(each)
    assert "resuming after round" in output
    last = "checkpoints/round-000006.safetensors"
    assert pods.read(last) == alone.read(last)
    summaries = [json.loads(store.read("summary.json")) for store in (pods, alone)]
    assert all(summaries[0][key] == summaries[1][key] for key in ("seen", "unseen", "global", "best", "rounds"))
    assert b"<svg" in pods.read("report.html")


def test_a_worker_stops_on_request(engine: Engine, images: dict[str, str], place: Place, port: int) -> None:
    """Handle signals as the first process of a container, which only receives those that it handles."""
    command = ("worker", "--aggregator", f"127.0.0.1:{port}", "--partition", place.partition, "--reconnect", "300")
    with engine.started(images["worker"], *command, environment=place.environment) as container:
        until(lambda: "no aggregator" in engine.log(container), "it looks for the aggregator", RUN_S)
        engine("stop", "--time", "120", container)
        engine.ended(container, 130)


def test_a_compiled_component_runs_in_its_image(engine: Engine, images: dict[str, str], tmp_path: Path) -> None:
    """Run a command of the compiled pipeline, with its placeholders filled in as Kubeflow does."""
    pipeline = next(yaml.safe_load_all((ROOT / "pipelines" / "personalized_federation.yaml").read_text()))
    container = pipeline["deploymentSpec"]["executors"]["exec-plan"]["container"]
    out = tmp_path / "out"
    out.mkdir()
    out.chmod(0o777)  # the container has another user
    tree = yaml.safe_load(experiment(tmp_path, tmp_path).read_text())
    outputs = {name: {"outputFile": f"/out/{name}"} for name in ("experiment", "data", "dataset", "root")}
    filled_in = {
        "inputs": {"parameterValues": {"experiment": yaml.safe_dump(tree), "overrides": ["federation.rounds=3"]}},
        "outputs": {"parameters": outputs, "outputFile": "/out/executor_output.json"},
    }
    arguments = [json.dumps(filled_in) if text == "{{$}}" else text for text in container["args"]]
    mounted = ("--volume", f"{out}:/out", "--pull", "never", *LIKE_A_POD, images["components"])
    engine("run", "--rm", *mounted, *container["command"], *arguments)
    values = json.loads((out / "executor_output.json").read_text())["parameterValues"]
    assert values["dataset"] == "fashion-mnist"
    assert json.loads(values["experiment"])["federation"]["rounds"] == 3
