"""Registration of runs: requests that the registry's schema allows, one version per checkpoint, errors by class."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from facts import mentions, refusing
from kfp import dsl
from kfp.compiler import Compiler
from model_registry import StandIn, standing_in
from typer.testing import CliRunner

import fedloom
from fedloom.cli.main import app
from fedloom.errors import DataError, ExperimentError, FedloomError, RefusedError, StorageError
from fedloom.kubeflow import catalog, registration
from fedloom.kubeflow.registration import ModelRegistry, register_run
from fedloom.serving.saved_models import ModelFolder

pytestmark = pytest.mark.group("components")

URI = "s3://bucket/runs/reg"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run with private training."""
    root, rng = tmp_path_factory.mktemp("registration"), np.random.default_rng(0)
    x = rng.normal(0, 1, (80, 3)).astype(np.float32)
    clients = {str(number): (x[number::4], (x[number::4, 0] > 0).astype(int)) for number in range(4)}
    experiment = {
        "name": "reg_1",  # `_` matches any character in the registry's lookup
        "data": fedloom.Federated.from_arrays(clients, root=root / "data", held_out_fraction=0.0),
        "model": {"name": "mlp"},
        "algorithm": {"name": "fedavg", "weighting": "uniform", "local": {"steps": 1, "batch_size": 8, "lr": 0.05}},
        "federation": {
            "rounds": 2,
            "clients_per_round": 2,
            "privacy": {"clip": 1.0, "noise_multiplier": 2.0, "delta": 1e-3},
        },
        "runtime": {"workers": 0},
    }
    fedloom.run(experiment, out=root / "run", report=False, progress=False)
    return root / "run"


@pytest.fixture
def registry() -> Iterator[StandIn]:
    with standing_in() as started:
        yield started


def connected(registry: StandIn) -> ModelRegistry:
    return ModelRegistry(registry.url)


def fedloom_register(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["register", *arguments])


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return custom properties as Python values."""
    return {
        key: int(value["int_value"]) if "int_value" in value else value.get("double_value", value.get("string_value"))
        for key, value in values.items()
    }


def test_a_version_has_the_results_and_the_origin_of_the_run(
    run: Path, registry: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "namespace").write_text("team-a")
    monkeypatch.setattr(registration, "SERVICE_ACCOUNT", tmp_path)
    found = register_run(connected(registry), str(run), uri=URI, pipeline_run="7d1f")
    summary = json.loads((run / "summary.json").read_text())
    version, (artifact,) = registry.objects["model_versions"][0], registry.objects["artifacts"]
    assert (found.created, found.model, found.version) == (True, "reg_1", version["name"])
    reported = plain(version["customProperties"])
    claim = summary["training_privacy"]
    assert reported["epsilon"] == claim["epsilon"]
    assert (reported["delta"], reported["privacy_protects"]) == (claim["delta"], claim["unit"])
    assert reported["test_seen_accuracy_mean"] == summary["seen"]["accuracy_mean"]
    assert reported["test_global_log_loss_pooled"] == summary["global"]["metrics"]["log_loss"]["pooled"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert reported["validation_accuracy"] == lines[-1]["validation_pooled"]
    assert reported["experiment_sha256"] == hashlib.sha256((run / "experiment.yaml").read_bytes()).hexdigest()
    facts = {"algorithm": "fedavg", "dataset": "arrays", "round": 2, "seed": summary["seed"], "pipeline_run_id": "7d1f"}
    assert facts.items() <= reported.items()
    assert reported["fedloom_version"] == fedloom.__version__
    assert reported["checkpoint_digest"] == found_digest(run, 2) == digest_of(artifact)
    assert (artifact["uri"], artifact["modelFormatName"]) == (URI, "fedloom")
    source = {key: artifact[f"modelSource{key}"] for key in ("Kind", "Class", "Group", "Id")}
    assert source == {"Kind": "pipelines", "Class": "pipelinerun", "Group": "team-a", "Id": "7d1f"}


def found_digest(run: Path, round: int) -> str:
    """Return the digest of a checkpoint as recorded in models' cards."""
    from fedloom.runs.checkpoint import Checkpoints

    return Checkpoints(run / "checkpoints").load(round).digest


def digest_of(artifact: dict[str, Any]) -> str:
    return str(plain(artifact["customProperties"])["checkpoint_digest"])


def test_registering_a_checkpoint_again_is_idempotent_and_another_is_rejected(run: Path, registry: StandIn) -> None:
    api = connected(registry)
    first = register_run(api, str(run), version="v1", uri=URI)
    again = register_run(api, str(run), version="v1", uri=URI)
    assert (first.created, again.created, first.version_id) == (True, False, again.version_id)
    assert [len(kept) for kept in registry.objects.values()] == [1, 1, 1]
    with refusing(ExperimentError, "v1", found_digest(run, 2), found_digest(run, 0)) as refused:
        register_run(api, str(run), version="v1", checkpoint="0", uri=URI)
    assert refused.value.key == "version"  # type: ignore[attr-defined]
    with refusing(ExperimentError, "v1", URI, "s3://elsewhere"):
        register_run(api, str(run), version="v1", uri="s3://elsewhere")
    assert register_run(api, str(run), checkpoint="0", uri=URI).created
    assert [len(kept) for kept in registry.objects.values()] == [1, 2, 2]


@pytest.mark.slow
def test_an_interrupted_registration_is_completed(run: Path, registry: StandIn) -> None:
    api = connected(registry)
    register_run(api, str(run))
    for left in range(3):
        for kind in [*registry.objects][left:]:
            registry.objects[kind].clear()
        registry.failures = [503]
        with pytest.raises(StorageError):
            register_run(api, str(run))
        register_run(api, str(run))
        assert [len(kept) for kept in registry.objects.values()] == [1, 1, 1]


@pytest.mark.slow
def test_names_that_the_registry_confuses_are_distinguished(run: Path, registry: StandIn) -> None:
    api = connected(registry)
    for name in ("reg11", "regx1", "reg%"):
        assert register_run(api, str(run), model=name).model == name
    ids = [register_run(api, str(run), model=name).model_id for name in ("reg_1", "reg_1", "reg%", "reg11")]
    kept = {one["name"]: one["id"] for one in registry.objects["registered_models"]}
    assert ids == [kept["reg_1"], kept["reg_1"], kept["reg%"], kept["reg11"]]


def test_an_object_on_a_later_page_is_found(run: Path, registry: StandIn) -> None:
    api = connected(registry)
    found = register_run(api, str(run), version="a_a")
    others = [
        {"name": f"a{chr(0x400 + number)}a", ".parent": found.model_id, "id": f"{1000 + number}"}
        | {"registeredModelId": found.model_id}
        for number in range(250)  # that `a_a` matches
    ]
    registry.objects["model_versions"][:0] = others
    assert register_run(api, str(run), version="a_a").version_id == found.version_id


@pytest.mark.slow
def test_concurrent_registrations_of_a_run_create_one_version(run: Path, registry: StandIn) -> None:
    def register(_: int) -> bool:
        return register_run(connected(registry), str(run)).created

    with ThreadPoolExecutor(6) as pool:
        created = [*pool.map(register, range(6))]
    assert sum(created) == 1
    assert [len(kept) for kept in registry.objects.values()] == [1, 1, 1]


def test_a_token_from_a_file_is_read_for_each_request(
    run: Path, registry: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, registry.token = tmp_path / "token", "new.token"
    token.write_text("old.token\n")
    monkeypatch.setenv("FEDLOOM_REGISTRY_TOKEN", f"@{token}")
    api = connected(registry)
    with refusing(RefusedError, registry.url, "401"):
        register_run(api, str(run))
    token.write_text("new.token\n")
    assert register_run(api, str(run)).created
    token.write_text("two words")
    with refusing(RefusedError, token):
        register_run(api, str(run))


@pytest.mark.parametrize(
    ("trouble", "code", "facts"),
    [
        ({"token": "x"}, 4, ["401"]),
        ({"forbidden": True}, 4, ["403"]),
        ({"redirect": True}, 4, ["302"]),
        ({"failures": [503]}, 6, ["503"]),
        ({"failures": [409]}, 2, ["409"]),
        ({"failures": [400]}, 2, ["400"]),
        ({"failures": [429]}, 6, ["429"]),
    ],
)
def test_a_rejection_has_the_exit_code_of_its_class(
    run: Path, registry: StandIn, trouble: dict[str, Any], code: int, facts: list[str]
) -> None:
    vars(registry).update(trouble)
    ended = fedloom_register(str(run), "--registry", registry.url)
    assert isinstance(ended.exception, FedloomError)
    assert int(ended.exception.exit_code) == code
    assert mentions(str(ended.exception), registry.url, *facts)


@pytest.mark.parametrize(
    "answer",
    ["[]", "<html>", "{", "\xff", "{}", '{"id": 7}', '{"name": "reg_1"}', '{"items": [3], "name": "reg_1", "id": "1"}'],
)
def test_answers_of_another_service_are_reported(run: Path, answer: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer.encode("latin-1"))

        do_POST = do_GET

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises((DataError, ExperimentError)):
            register_run(ModelRegistry(f"http://127.0.0.1:{server.server_port}"), str(run))
        server.shutdown()


def test_an_address_of_another_service_is_reported(run: Path, registry: StandIn) -> None:
    with refusing(ExperimentError, "404"):
        register_run(ModelRegistry(f"{registry.url}/elsewhere"), str(run))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with refusing(StorageError, f"127.0.0.1:{taken.getsockname()[1]}"):
            register_run(ModelRegistry(f"http://127.0.0.1:{taken.getsockname()[1]}"), str(run))
    for url in ("", "registry:8080", "ftp://x", "https://", "http://x?y=1"):
        with refusing(ExperimentError, url):
            ModelRegistry(url)
    assert ModelRegistry(f"{registry.url}/api/model_registry/v1alpha3/").url == registry.url


def test_a_run_that_cannot_be_registered_is_rejected_before_any_request(
    run: Path, registry: StandIn, tmp_path: Path
) -> None:
    api = connected(registry)
    unfinished = tmp_path / "unfinished"
    shutil.copytree(run, unfinished)
    (unfinished / "summary.json").unlink()
    with refusing(DataError, "summary.json"):
        register_run(api, str(unfinished))
    with refusing(DataError, "round 7"):
        register_run(api, str(run), checkpoint="7")
    for name in ("", " x", "x" * 129, "a\nb"):
        if name:
            with pytest.raises(ExperimentError):
                register_run(api, str(run), version=name)
    assert registry.requests == []


def test_the_command_registers_with_the_environments_registry_and_token(
    run: Path, registry: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.token = "secret"
    monkeypatch.setenv("FEDLOOM_REGISTRY_TOKEN", "secret")
    ended = fedloom_register(str(run), "--registry", registry.url, "--version", "v")
    assert (ended.exit_code, mentions(ended.stdout, "reg_1", "v", registry.url)) == (0, True)
    monkeypatch.setenv("FEDLOOM_REGISTRY", registry.url)
    again = fedloom_register(str(run), "--version", "v", "--json")
    assert (json.loads(again.stdout)["version"], json.loads(again.stdout)["created"]) == ("v", False)
    assert len(registry.objects["model_versions"]) == 1
    monkeypatch.delenv("FEDLOOM_REGISTRY")
    assert isinstance(fedloom_register(str(run)).exception, ExperimentError)


def test_the_component_registers_with_the_artifacts_uri(
    run: Path, registry: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.token = "secret"
    monkeypatch.setenv("FEDLOOM_REGISTRY_TOKEN", "secret")
    one = catalog.component("register")
    artifact = dsl.Model(uri=str(run), metadata={})
    version = one.python_func(artifact, registry.url, "7d1f")
    assert version == registry.objects["model_versions"][0]["id"]
    kept = registry.objects["artifacts"][0]
    assert (kept["uri"], kept["modelSourceId"]) == (str(run), "7d1f")
    registry.token = "another"
    with pytest.raises(SystemExit) as ended:
        one.python_func(artifact, registry.url, "7d1f")
    assert ended.value.code == 4


@pytest.mark.slow
@pytest.mark.parametrize("model_format", ["fedloom", "onnx"])
def test_models_are_exported_in_the_layout_that_kserve_serves(run: Path, tmp_path: Path, model_format: str) -> None:
    shards = next(path.parent for path in (run.parent / "data" / "partitions").rglob("*.json"))
    served = dsl.Model(uri=str(tmp_path / "served"), metadata={})
    export = catalog.component("export").python_func
    export(dsl.Model(uri=str(run), metadata={"seed": 1}), dsl.Dataset(uri=str(shards)), served, "0", model_format)
    assert served.metadata == {"seed": 1, "format": model_format, "clients": 4}
    clients = [f"client-{number:04}" for number in range(4)]
    if model_format == "onnx":
        files = [path for path in (tmp_path / "served").rglob("*") if path.is_file()]
        assert sorted(files) == [tmp_path / "served" / client / "1" / "model.onnx" for client in clients]
        return
    found = ModelFolder(tmp_path / "served" / "models")
    assert found.clients() == clients
    assert (found.load(clients[0]).round, found.load(clients[0]).digest) == (0, found_digest(run, 0))
    assert {path.name for path in run.iterdir()} < {path.name for path in (tmp_path / "served").iterdir()}
    with pytest.raises(SystemExit) as ended:
        export(dsl.Model(uri=str(run)), dsl.Dataset(uri=str(shards)), served, "0", "h5")
    assert ended.value.code == 2


def test_the_component_compiles_without_packages_to_install(tmp_path: Path) -> None:
    Compiler().compile(catalog.component("register"), str(tmp_path / "register.yaml"))
    spec = yaml.safe_load((tmp_path / "register.yaml").read_text())
    inputs = spec["components"]["comp-register"]["inputDefinitions"]
    assert [*inputs["artifacts"]] == ["model"]
    assert {"registry", "run_id"} <= inputs["parameters"].keys()
    assert "pip install" not in str(spec["deploymentSpec"])


def test_the_registry_stand_in_is_as_strict_as_the_schema_and_the_registry(registry: StandIn) -> None:
    """Send requests that FedLoom never sends."""

    def sent(path: str, body: dict[str, Any]) -> int:
        url = f"{registry.url}/api/model_registry/v1alpha3/{path}"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert sent("registered_models", {"name": "m"}) == 201
    assert sent("registered_models", {"name": "m"}) == 409
    assert sent("registered_models", {"name": "n", "colour": "red"}) == 400
    assert sent("registered_models", {"name": "n", "id": "7"}) == 400
    assert sent("model_versions", {"name": "v"}) == 422
    assert sent("model_versions", {"name": "v", "registeredModelId": 1}) == 400
    wrong = {"metadataType": "MetadataIntValue", "int_value": 3}
    assert sent("model_versions", {"name": "v", "registeredModelId": "1", "customProperties": {"a": wrong}}) == 400
    assert sent("model_versions", {"name": "v", "registeredModelId": "1", "customProperties": {"a": 3}}) == 400
    assert sent("model_versions", {"name": "v", "registeredModelId": "1", "state": "GONE"}) == 400
    assert sent("model_versions", {"name": "v", "registeredModelId": "1"}) == 201
    assert sent("model_versions/2/artifacts", {"name": "a", "uri": "s3://x"}) == 400  # no type
    assert sent("model_versions/2/artifacts", {"artifactType": "model-artifact", "name": "a", "uri": "s3://x"}) == 201
    assert sent("model_versions/9/artifacts", {"artifactType": "model-artifact", "name": "a"}) == 404
