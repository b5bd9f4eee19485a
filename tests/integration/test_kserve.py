"""The objects of KServe on docs/serving.md match its published schema, and the container, run as a process, serves."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_schemas
import numpy as np
import pytest
import torch
import yaml
from facts import refusing
from forked import Popen
from run_processes import until
from typer.testing import CliRunner

import fedloom
from fedloom.cli.main import app
from fedloom.errors import ExperimentError
from fedloom.serving.client_models import client_models, save_models

CRDS = yaml.safe_load((Path(__file__).parents[1] / "fixtures" / "kserve.yaml").read_text())
WAIT_S = 240
PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
OBJECTS = [*yaml.safe_load_all(next(block for block in BLOCKS if "ServingRuntime" in block))]
CONTAINER, MOUNTED = "kserve-container", "/mnt/models"


def check(objects: list[dict[str, Any]]) -> None:
    """Check objects against the published schemas."""
    for one in objects:
        crd = CRDS[one["kind"]]
        assert one["apiVersion"] == f"{crd['group']}/{crd['version']}"
        jsonschema.validate(one, kubernetes_schemas.closed(crd["schema"]))


def deployed(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the pod that KServe creates from a runtime and a predictor, without the volume, in a Deployment."""
    runtime, service = (copy.deepcopy(one) for one in objects)
    spec, predictor = runtime["spec"], service["spec"]["predictor"]
    assert predictor.pop("model")["runtime"] == runtime["metadata"]["name"]
    pod = {key: spec[key] for key in ("containers", "volumes", "imagePullSecrets") if key in spec} | predictor
    labels = {"app": "isvc.x"}
    template = {"metadata": {"labels": labels}, "spec": pod}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "x", "labels": labels},
        "spec": {"selector": {"matchLabels": {"app": "isvc.x"}}, "template": template},
    }


def test_objects_match_kserves_schema_and_the_pod_is_restricted() -> None:
    check(OBJECTS)
    runtime, service = OBJECTS
    assert [one["kind"] for one in OBJECTS] == ["ServingRuntime", "InferenceService"]
    model = service["spec"]["predictor"]["model"]
    (served,) = runtime["spec"]["supportedModelFormats"]
    assert (model["modelFormat"]["name"], model["modelFormat"]["version"]) == (served["name"], served["version"])
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    deployment = deployed(OBJECTS)
    kubernetes_schemas.check(deployment)
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == CONTAINER
    assert [port["containerPort"] for port in container["ports"]] == [8080, 7734]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]


def test_the_schema_rejects_keys_that_kubernetes_would_drop() -> None:
    for path, key in (
        (("spec",), "protocols"),
        (("spec", "containers", 0), "argumente"),
        (("spec", "containers", 0, "ports", 0), "p"),
    ):
        runtime = copy.deepcopy(OBJECTS[0])
        place = runtime
        for step in path:
            place = place[step]
        place[key] = "x"
        with pytest.raises(jsonschema.ValidationError):
            check([runtime])


# ---- the container, as a process


PEFLL = {"name": "pefll", "local": {"steps": 1}, "embedding": {"network": "mlp"}, "descriptor": {"batch_size": 4}}
X = np.random.default_rng(2).normal(0, 1, (24, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kserve")
    clients = {str(one): (X[one::2], (X[one::2, 0] > 0).astype(int)) for one in range(2)}
    experiment = {
        "name": "kserve",
        "data": fedloom.Federated.from_arrays(clients, root=root / "data", held_out_fraction=0.0),
        "model": {"name": "mlp"},
        "algorithm": PEFLL,
        "federation": {"rounds": 1, "clients_per_round": 2},
        "runtime": {"workers": 0},
    }
    fedloom.run(experiment, out=root / "run", report=False, progress=False)
    save_models(root / "run", root / "run" / "models", suffix=".pt2")
    return root / "run"


class Container:
    """Process of the runtime's container.

    Attributes
    ----------
    rest, grpc
        Its addresses, on free ports of this machine.
    """

    def __init__(self, mounted: Path, work: Path) -> None:
        (container,) = deployed(OBJECTS)["spec"]["template"]["spec"]["containers"]
        text = json.dumps(container).replace("{{.Name}}", "flowers")
        for place, here in (
            (MOUNTED, mounted),
            ("/dev/termination-log", work / "termination-log"),
            ('"/work"', f'"{work}"'),
        ):
            text = text.replace(str(place), str(here))
        container = json.loads(re.sub(r"0\.0\.0\.0:\d+", "127.0.0.1:0", text))
        assert container["command"] == ["fedloom"]
        environment = {entry["name"]: entry["value"] for entry in container["env"]}
        self.told = work / "termination-log"
        self.process = Popen(
            [sys.executable, "-m", "fedloom", *container["args"]],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            cwd=work,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.rest = self.grpc = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"(predictions|serving).* at (127\.0\.0\.1:\d+)$", line.strip()):
                where = "rest" if found[1] == "predictions" else "grpc"
                setattr(self, where, found[2])
            if self.rest and self.grpc:
                break

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Return status and object of a response."""
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(f"http://{self.rest}{path}", data, timeout=WAIT_S) as answer:
                return int(answer.status), json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def infer(self, client: str) -> tuple[int, Any]:
        """Request predictions for all examples."""
        one = {"name": "x", "shape": [*X.shape], "datatype": "FP32", "data": X.tolist()}
        return self.ask(f"/v2/models/flowers/versions/{client}/infer", {"inputs": [one]})


@contextmanager
def running(mounted: Path, work: Path) -> Iterator[Container]:
    """Run the container for the duration of the block."""
    work.mkdir()
    container = Container(mounted, work)
    try:
        yield container
    finally:
        container.process.kill()
        container.process.communicate()


@pytest.mark.slow
def test_the_container_serves_a_mounted_run_over_rest_and_grpc(run: Path, tmp_path: Path) -> None:
    mounted = tmp_path / "mnt"
    mounted.symlink_to(run)
    files = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    own = client_models(run)
    with running(mounted, tmp_path / "work") as container:
        assert container.ask("/v2/health/live")[0] == 200
        until(lambda: container.ask("/v2/health/ready")[0] == 200, "the first model is loaded")
        assert container.ask("/v2/models/flowers/ready") == (200, {"name": "flowers", "ready": True})
        for client, model in own.items():
            status, answer = container.infer(client)
            assert status == 200
            (output,) = answer["outputs"]
            expected = model(torch.from_numpy(X)).numpy()
            assert np.array(output["data"], np.float32).reshape(output["shape"]).tobytes() == expected.tobytes()
        assert container.infer("nobody")[0] == 404
        newcomer = fedloom.personalize(container.grpc, X, (X[:, 0] > 0).astype(int), client="eve")
        assert torch.equal(newcomer(X), fedloom.personalize(str(run), X, (X[:, 0] > 0).astype(int), client="eve")(X))
        container.process.send_signal(signal.SIGTERM)
        assert container.process.wait(WAIT_S) == 0
        with pytest.raises(urllib.error.URLError):
            container.ask("/v2/health/live")
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == files  # KServe mounts it read-only


@pytest.mark.slow
def test_a_killed_container_restarts_and_one_without_models_gives_the_reason(run: Path, tmp_path: Path) -> None:
    with running(run, tmp_path / "first") as container:
        before = container.infer("client-0000")
        container.process.kill()
        container.process.wait(WAIT_S)
        with pytest.raises(urllib.error.URLError):
            container.infer("client-0000")
    with running(run, tmp_path / "second") as container:
        assert container.infer("client-0000") == before
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in run.iterdir():
        if path.name != "models":
            (bare / path.name).symlink_to(path)
    with running(bare, tmp_path / "third") as container:
        assert container.process.wait(WAIT_S) == 3
        failure = json.loads(container.told.read_text().splitlines()[-1])
    assert str(bare / "models") in json.dumps(failure)


@pytest.mark.slow
def test_the_command_in_the_hint_saves_the_models_of_the_run(run: Path, tmp_path: Path) -> None:
    with refusing(ExperimentError, "models"):
        save_models(run, run / "models", suffix=".pt2")  # a new folder
    made = CliRunner().invoke(app, ["personalize", str(run), "--out", str(tmp_path / "models"), "--set", "format=pt2"])
    assert made.exit_code == 0
    names = sorted(path.name for path in (tmp_path / "models").iterdir())
    assert names == sorted(path.name for path in (run / "models").iterdir())
