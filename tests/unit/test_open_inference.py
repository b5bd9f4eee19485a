"""Predictions of saved models over REST: FedLoom's to the bit, in the protocol's form; and the HTTP server."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import numpy as np
import pytest
import served_runs
import torch
import yaml
from facts import mentions, refusing
from starlette.exceptions import HTTPException
from torch import Tensor, nn

import fedloom
from fedloom.errors import DataError, ExperimentError
from fedloom.security.options import Protection, ServerOptions
from fedloom.security.tokens import add_token
from fedloom.serving.client_models import client_models, save_models
from fedloom.serving.open_inference import CONNECTIONS, MOST_WAITING, InferenceRequest, OpenInference, inference_served
from fedloom.serving.saved_models import ModelFolder, SavedModel
from fedloom.serving.serve import serve_run
from fedloom.transport.http_server import REQUEST_BYTES, HttpLimits, http_served
from fedloom.transport.personalization import ModelServerSettings

SPEC = yaml.safe_load((Path(__file__).parents[1] / "fixtures" / "open_inference.yaml").read_text())
RNG = np.random.default_rng(7)
N = 48
WAIT_S = 60

ROWS = RNG.normal(2, 3, (N, 4)).astype(np.float32)
IMAGES = RNG.integers(0, 256, (N, 3, 8, 8), dtype=np.uint8)
WORDS = RNG.integers(0, 20, (N, 5))


class Named(nn.Module):
    """Network of two named inputs, one of which is an index."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Embedding(20, 3)
        self.head = nn.Linear(7, 2)

    def forward(self, rows: Tensor, place: Tensor) -> Tensor:
        """Return logits."""
        found: Tensor = self.head(torch.cat([rows, self.place(place).mean(1)], 1))
        return found


FEDAVG = {"name": "fedavg", "local": {"steps": 2, "batch_size": 8, "lr": 0.05}, "personalize_steps": 3}
KNN = {"name": "knn-per", "local": {"steps": 2, "batch_size": 8, "lr": 0.05}}
PEFLL = {"name": "pefll", "local": {"steps": 1}, "embedding": {"network": "mlp"}, "descriptor": {"batch_size": 4}}
LABELS = (ROWS[:, 0] > 2).astype(int)
KINDS: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "pixels": (IMAGES, LABELS, nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2)), FEDAVG),
    "numbers": (ROWS, ROWS @ np.array([4.0, -2.0, 1.0, 3.0]) * 1000, nn.Linear(4, 1), FEDAVG),
    "named": ({"rows": ROWS, "place": WORDS}, LABELS, Named(), FEDAVG),
    "memory": (ROWS, LABELS, nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), KNN),
    "descriptors": (ROWS, LABELS, {"name": "mlp"}, PEFLL),
}  # fmt: skip


def rows_of(x: Any, rows: slice) -> Any:
    return {name: each[rows] for name, each in x.items()} if isinstance(x, dict) else x[rows]


def trained(folder: Path, kind: str, saved: str | None = None) -> Path:
    """Return a run of two clients with their saved models, or those of some of them."""
    x, y, model, algorithm = KINDS[kind]
    clients = {str(one): (rows_of(x, slice(one, None, 2)), y[one::2]) for one in range(2)}
    experiment = {
        "name": "run",
        "data": fedloom.Federated.from_arrays(clients, root=folder / "data", held_out_fraction=0.0),
        "algorithm": algorithm,
        "federation": {"rounds": 1, "clients_per_round": 2},
        "runtime": {"workers": 0},
    }
    own = {"model": model} if isinstance(model, nn.Module) else {}
    experiment |= {} if own else {"model": model}
    run = Path(fedloom.run(experiment, out=folder / "run", report=False, progress=False, **own).folder)
    save_models(run, run / "models", clients=saved, suffix=".pt2")  # an export takes seconds
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("inference"), "descriptors")


class Answer(NamedTuple):
    """Answer to a request."""

    status: int
    body: Any
    headers: dict[str, str]


class Client:
    """HTTP client of one server.

    Attributes
    ----------
    grpc
        Address of its gRPC service.
    """

    def __init__(self, port: int, grpc: str) -> None:
        self.port, self.grpc = port, grpc

    def ask(self, verb: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            connection.request(verb, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
            found = connection.getresponse()
            return Answer(
                found.status, json.loads(found.read()), {key.lower(): value for key, value in found.headers.items()}
            )
        finally:
            connection.close()

    def infer(self, client: str, body: Any, name: str = "run", **headers: str) -> Answer:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask("POST", f"/v2/models/{name}/versions/{client}/infer", content, **headers)


@contextmanager
def served(run: Path, **options: Any) -> Iterator[Client]:
    """Serve a run over REST, too, in a thread."""
    rest: list[str] = []
    with served_runs.served(run, say=rest.append, rest="127.0.0.1:0", **options) as address:
        client, end = Client(int(rest[0].rpartition(":")[2]), address), time.monotonic() + WAIT_S
        while client.ask("GET", "/v2/health/ready").status == 503 and time.monotonic() < end:
            time.sleep(0.02)
        yield client


def of_schema(found: Any, name: str) -> Any:
    """Check that an object matches a schema of the protocol, and return it."""
    jsonschema.validate(found, {"$ref": f"#/components/schemas/{name}", "components": SPEC["components"]})
    return found


DATATYPES = {np.dtype("float32"): "FP32", np.dtype("uint8"): "UINT8", np.dtype("int64"): "INT64"}


def requested(x: Any, *, nested: bool = True) -> dict[str, Any]:
    named = x if isinstance(x, dict) else {"x": x}
    inputs = [
        {"name": name, "shape": [*each.shape], "datatype": DATATYPES[each.dtype],
         "data": each.tolist() if nested else each.ravel().tolist()}
        for name, each in named.items()
    ]  # fmt: skip
    return {"inputs": inputs}


def predicted(answer: Answer) -> np.ndarray:
    assert answer.status == 200, answer.body
    (output,) = of_schema(answer.body, "inference_response")["outputs"]
    assert output["datatype"] == "FP32"
    return np.array(output["data"], np.float32).reshape(output["shape"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_predictions_equal_the_clients_model_to_the_bit(kind: str, tmp_path: Path) -> None:
    run = trained(tmp_path, kind, "client-0001")
    models = client_models(run, ["client-0001"])
    with served(run) as at:
        about = of_schema(at.ask("GET", "/v2/models/run").body, "metadata_model_response")
        assert about["versions"] == [*models]
        for client, model in models.items():
            for rows in (slice(0, 1), slice(3, 20)):
                x = rows_of(KINDS[kind][0], rows)
                own = model({name: torch.from_numpy(each) for name, each in x.items()} if isinstance(x, dict)
                            else torch.from_numpy(x)).numpy()  # fmt: skip
                for nested in (False, True):
                    request = of_schema(requested(x, nested=nested), "inference_request")
                    assert predicted(at.infer(client, request)).tobytes() == own.tobytes()
                (output,) = about["outputs"]
                assert output["shape"] == [-1, *own.shape[1:]]
            answer = at.infer(client, {"id": "7", **requested(x), "outputs": [{"name": "output"}]}).body
            assert (answer["id"], answer["model_name"], answer["model_version"]) == ("7", "run", client)
            assert answer["parameters"] == {"round": model.card.round, "digest": model.card.digest}
        named = x if isinstance(x, dict) else {"x": x}
        shapes = {one["name"]: (one["datatype"], one["shape"]) for one in about["inputs"]}
        assert shapes == {name: (DATATYPES[each.dtype], [-1, *each.shape[1:]]) for name, each in named.items()}


def test_every_path_of_the_protocol_responds(run: Path) -> None:
    with served(run, settings=ModelServerSettings(model_name="house")) as at:
        (client, _) = client_models(run)
        for template, item in SPEC["paths"].items():
            path = template.replace("${MODEL_NAME}", "house").replace("${MODEL_VERSION}", client)
            (verb,) = {"get", "post"} & item.keys()
            found = at.ask(verb.upper(), path, json.dumps(requested(ROWS[:1])).encode() if verb == "post" else None)
            assert found.status == 200, path
            schema = item[verb]["responses"]["200"].get("content", {}).get("application/json", {}).get("schema")
            if schema is not None:
                of_schema(found.body, schema["$ref"].rpartition("/")[2])
        assert at.ask("GET", "/v2").body["version"] == fedloom.__version__
        assert at.ask("GET", "/v2/models/house/ready").body == {"name": "house", "ready": True}
        assert at.ask("GET", f"/v2/models/house/versions/{client}").body["versions"] == [client]


def with_input(**changes: Any) -> dict[str, Any]:
    """Return a request whose input differs from a valid one."""
    request = requested(ROWS[:2])
    request["inputs"][0] |= changes
    return request


BAD: dict[str, Any] = {
    "not JSON": b"{",
    "not UTF-8": b'{"inputs": "\xff"}',
    "a list": [],
    "no inputs": {},
    "inputs of another kind": {"inputs": [3]},
    "no input": {"inputs": []},
    "two inputs of one name": {"inputs": requested(ROWS[:2])["inputs"] * 2},
    "deep": b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "an infinite number": json.dumps(with_input(data=[1.0] * 7 + [float("inf")])).encode(),
    "a number beyond doubles": json.dumps(requested(ROWS[:1])).replace("[[", "[[1e999, ").encode(),
    "a number beyond floats": with_input(data=[1e39] * 8),
    "an id that is a number": {**requested(ROWS[:2]), "id": 7},
    "half a character": b'{"inputs": [], "id": "\\ud800"}',
    "an id that is too long": {**requested(ROWS[:2]), "id": "7" * 1025},
    "another output": {**requested(ROWS[:2]), "outputs": [{"name": "logits"}]},
    "outputs of another kind": {**requested(ROWS[:2]), "outputs": "output"},
    "another name": with_input(name="y"),
    "another datatype": with_input(datatype="FP64"),
    "no datatype": with_input(datatype=None),
    "another rank": with_input(shape=[8]),
    "another shape": with_input(shape=[4, 2]),
    "no examples": with_input(shape=[0, 4], data=[]),
    "a negative size": with_input(shape=[-2, 4]),
    "a true size": with_input(shape=[True, 4], data=[1.0] * 4),
    "a huge size": with_input(shape=[2**62, 4]),
    "too few numbers": with_input(data=[1.0] * 7),
    "ragged": with_input(data=[[1.0] * 4, [1.0] * 3]),
    "nested more": with_input(data=[[[1.0] * 4] * 2]),
    "texts": with_input(data=["1"] * 8),
    "truths": with_input(data=[True] * 8),
    "nothing": with_input(data=None),
    "a huge whole number": with_input(data=[10**400] * 8),
}


@pytest.fixture(scope="module")
def at(run: Path) -> Iterator[Client]:
    with served(run, settings=ModelServerSettings(body_bytes=1 << 18)) as client:
        yield client


@pytest.mark.parametrize("what", BAD)
def test_a_bad_request_is_rejected_in_the_protocols_form(at: Client, run: Path, what: str) -> None:
    found = at.infer("client-0000", BAD[what])
    assert found.status == 400
    of_schema(found.body, "inference_error_response")
    assert found.body["error"]
    assert at.infer("client-0000", requested(ROWS[:2])).status == 200


def test_unknown_models_clients_paths_and_verbs_are_reported(at: Client, tmp_path: Path) -> None:
    good = requested(ROWS[:2])
    assert at.infer("client-0000", good).status == 200
    assert at.infer("nobody", good).status == 404
    assert at.infer("client-0000", good, name="other").status == 404
    for path in ("..%2f..%2fetc%2fpasswd", "..", "%00", "client-0000.pt2", "%ff", "a%20b"):
        assert at.infer(path, good).status == 404, path
    assert at.ask("GET", "/v1/models/run").status == 404
    assert at.ask("GET", "/v2/models/other").status == at.ask("GET", "/v2/models/other/ready").status == 404
    assert at.ask("GET", "/v2/models/run/versions/nobody/ready").status == 404
    assert at.ask("POST", "/v2/models/run/infer", b"{}").status == 400  # without a client
    wrong = at.ask("GET", "/v2/models/run/versions/client-0000/infer")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    assert at.ask("DELETE", "/v2/health/live").status == 405


def test_request_bodies_are_bounded(at: Client) -> None:
    assert at.infer("client-0000", b" " * ((1 << 18) + 1)).status == 413
    assert at.infer("client-0000", b" " * (5 << 20)).status == 413  # it sees the answer
    assert at.infer("client-0000", b"x", Content_Encoding="gzip").status == 415
    assert at.infer("client-0000", b"x", Inference_Header_Content_Length="1").status == 415
    with socket.create_connection(("127.0.0.1", at.port)) as raw:  # chunked, without a length
        raw.sendall(
            b"POST /v2/models/run/versions/client-0000/infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
            + (b"10000\r\n" + b" " * (1 << 16) + b"\r\n") * 5
            + b"0\r\n\r\n"
        )
        assert raw.recv(100).split()[1] == b"413"


def test_responses_are_bounded(run: Path) -> None:
    with served(run, settings=ModelServerSettings(body_bytes=2048)) as at:
        x = np.ones((200, 4), np.float32)
        assert at.infer("client-0000", requested(x[:64])).status == 200
        many = requested(x)
        many["inputs"][0]["data"] = [1] * 800
        assert len(json.dumps(many, separators=(",", ":"))) < 2048
        found = at.infer("client-0000", json.dumps(many, separators=(",", ":")).encode())
    assert found.status == 200  # 400 numbers
    model = ModelFolder(run / "models").load("client-0000")
    serving = OpenInference("run", ModelFolder(run / "models"), ModelServerSettings(body_bytes=2048))
    wide = replace(model, outputs=(100,))
    with pytest.raises(HTTPException) as refused:
        serving.outputs(InferenceRequest.model_validate(requested(x[:21])), wide)
    assert refused.value.status_code == 413


def test_the_server_is_ready_when_it_can_predict(run: Path) -> None:
    models = ModelFolder(run / "models")
    serving, asked = OpenInference("run", models), []

    def say(address: str) -> None:
        asked.append(Client(int(address.rpartition(":")[2]), "").ask("GET", "/v2/health/ready"))

    with inference_served("127.0.0.1:0", lambda: serving, Protection(), say):
        assert (asked[0].status, asked[0].headers["retry-after"]) == (503, "1")  # the first model is not loaded yet
    assert models.kept("client-0000") is not None
    with served(run) as at:
        assert at.ask("GET", "/v2/health/ready").status == 200


class SlowFolder(ModelFolder):
    """Folder whose models take as long to load as the test wants."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.released = threading.Event()

    def load(self, client: str) -> SavedModel:
        """Wait, and load a model."""
        assert self.released.wait(WAIT_S)
        return super().load(client)


def test_requests_wait_while_a_model_is_loaded(run: Path) -> None:
    models = SlowFolder(run / "models")
    serving = OpenInference("run", models, ModelServerSettings(deadline_s=WAIT_S))
    most = MOST_WAITING + 8
    with (
        http_served("rest", "127.0.0.1:0", serving, HttpLimits(CONNECTIONS, 0.5)) as port,  # a peer has half a second
        ThreadPoolExecutor(most) as pool,
    ):
        at = Client(port, "")
        asked = [pool.submit(at.infer, "client-0000", requested(ROWS[:2])) for _ in range(most)]
        refused = [found.result() for _, found in zip(range(8), as_completed(asked, WAIT_S), strict=False)]
        assert {(answer.status, answer.headers["retry-after"]) for answer in refused} == {(503, "1")}
        assert at.ask("GET", "/v2/health/live").status == 200
        time.sleep(1)
        models.released.set()
        assert sorted(found.result().status for found in asked) == [200] * MOST_WAITING + [503] * 8
    slow = SlowFolder(run / "models")
    with http_served("rest", "127.0.0.1:0", OpenInference("run", slow, ModelServerSettings(deadline_s=0.1))) as port:
        late = Client(port, "").infer("client-0000", requested(ROWS[:2]))
        slow.released.set()
    assert (late.status, late.headers["retry-after"]) == (503, "1")


def test_a_stopping_server_first_answers_open_requests(run: Path) -> None:
    models, answers = SlowFolder(run / "models"), []
    serving = OpenInference("run", models, ready=lambda: False)
    with http_served("rest", "127.0.0.1:0", serving, HttpLimits(drain_s=WAIT_S)) as port:
        asking = threading.Thread(
            target=lambda: answers.append(Client(port, "").infer("client-0000", requested(ROWS[:2])))
        )
        asking.start()
        assert Client(port, "").ask("GET", "/v2/health/ready").status == 503
        time.sleep(0.2)
        threading.Timer(0.5, models.released.set).start()
    asking.join(WAIT_S)
    assert answers[0].status == 200


def test_concurrent_requests_get_their_own_responses(at: Client, run: Path) -> None:
    models = client_models(run)

    def right(number: int) -> bool:
        client, x = [*models][number % 2], ROWS[number : number + 3]
        return (
            predicted(at.infer(client, requested(x))).tobytes() == models[client](torch.from_numpy(x)).numpy().tobytes()
        )

    expected = {client: model(torch.from_numpy(ROWS[:3])).numpy().tobytes() for client, model in models.items()}
    assert len(set(expected.values())) == 2
    with ThreadPoolExecutor(24) as pool:
        assert all(pool.map(lambda number: right(number % 40), range(72)))


def test_replaced_or_damaged_models_are_detected_and_few_are_cached(run: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    shutil.copytree(run / "models", models)
    first, second = sorted(path.stem for path in models.glob("*.pt2"))
    kept = ModelFolder(models, most=1)
    loaded = kept.load(first)
    assert kept.load(first) is loaded
    kept.load(second)
    assert kept.load(first) is not loaded
    settings = ModelServerSettings(models=str(models))
    with served(run, settings=settings) as at:
        before = predicted(at.infer(first, requested(ROWS[:3])))
        new = tmp_path / "new.pt2"
        client_models(run)[second].save(new)
        new.replace(models / f"{first}.pt2")  # the model of another client
        assert at.infer(first, requested(ROWS[:3])).status == 500
        assert at.ask("GET", f"/v2/models/run/versions/{first}/ready").status == 500
        (models / f"{first}.pt2").write_bytes(b"not a model")
        assert mentions(at.infer(first, requested(ROWS[:3])).body["error"], f"{first}.pt2")
        shutil.copy(run / "models" / f"{first}.pt2", models / f"{first}.pt2")
        assert np.array_equal(predicted(at.infer(first, requested(ROWS[:3]))), before)
        (models / f"{second}.pt2").unlink()
        assert at.infer(second, requested(ROWS[:3])).status == 404
        assert at.ask("GET", "/v2/models/run").body["versions"] == [first]
        (models / f"{first}.pt2").unlink()
        assert at.ask("GET", "/v2/models/run").status == 404


def test_a_token_selects_the_clients_whose_models_it_may_use(run: Path, tmp_path: Path) -> None:
    tokens, table = tmp_path / "tokens.json", tmp_path / "identities.yaml"
    secrets = {name: add_token(tokens, name)[0].get_secret_value() for name in ("one", "watcher")}
    table.write_text(
        "version: 1\nidentities:\n"
        "  - {name: one, roles: [personalize], clients: [client-0000], token: one}\n"
        "  - {name: watcher, roles: [watch], token: watcher}\n"
    )
    protection = Protection(ServerOptions(tokens=tokens, identities=table))
    audit, good = tmp_path / "audit.jsonl", requested(ROWS[:2])
    with served(run, protection=protection, audit=audit) as at:
        assert at.ask("GET", "/v2/health/ready").status == at.ask("GET", "/v2/models/run/ready").status == 200
        refused = at.infer("client-0000", good)
        assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
        bearer = {name: {"Authorization": f"Bearer {secret}"} for name, secret in secrets.items()}
        assert at.infer("client-0000", good, Authorization="Bearer nonsense").status == 401
        assert at.infer("client-0000", good, **bearer["watcher"]).status == 403
        assert at.infer("client-0001", good, **bearer["one"]).status == 403
        assert at.infer("client-0000", good, **bearer["one"]).status == 200
        assert at.ask("GET", "/v2/models/run").status == 401
        assert at.ask("GET", "/v2/models/run", **bearer["one"]).body["versions"] == ["client-0000"]
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [line["client"] for line in lines if line["event"] == "predicted"] == ["client-0000"]
    assert any(line["event"] == "refused" for line in lines)


def test_a_run_without_saved_models_or_an_open_address_is_rejected(run: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with refusing(DataError, empty, "fedloom personalize"):
        served(run, settings=ModelServerSettings(models=str(empty))).__enter__()
    bare = tmp_path / "run"
    shutil.copytree(run, bare, ignore=shutil.ignore_patterns("models"))
    with refusing(DataError, bare / "models"):
        served(bare).__enter__()
    for host in ("0.0.0.0:0", "[::]:0"):
        with pytest.raises(ExperimentError) as refused:
            serve_run(str(run), "127.0.0.1:0", rest=host, stop=threading.Event())
        assert refused.value.key == "rest"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with refusing(ExperimentError, taken.getsockname()[1]):
            serve_run(str(run), "127.0.0.1:0", rest=f"127.0.0.1:{taken.getsockname()[1]}", stop=threading.Event())


HOST = b"Host: a\r\n"


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the body, or do what the path says."""
    assert scope["type"] == "http"
    path, body, more = scope["path"], b"", True
    while path == "/echo" and more:
        event = await receive()
        body, more = body + event.get("body", b""), event.get("more_body", False)
    if path == "/slow":
        await asyncio.sleep(1.5)
    body = {"/large": bytes(32 << 20)}.get(path, body or path.encode())
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def port() -> Iterator[int]:
    with http_served("rest", "127.0.0.1:0", application, HttpLimits(4, 0.6)) as port:
        yield port


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)


def read_to_end(raw: socket.socket) -> bytes:
    """Return all that the server sends until it closes the connection."""
    found = b""
    try:
        while piece := raw.recv(1 << 16):
            found += piece
    except ConnectionResetError:
        pass
    return found


def test_a_connection_carries_several_requests(port: int) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)) as connection:
        sockets = set()
        for path, body in (("/echo", b"one"), ("/echo", b"two"), ("/a", None)):
            connection.request("POST", path, body)
            answer = connection.getresponse()
            sockets.add(id(connection.sock))
            assert (answer.version, answer.read()) == (11, body if path == "/echo" else path.encode())
        assert len(sockets) == 1
        connection.request("POST", "/echo", b"x" * 9, {"Expect": "100-continue"})
        assert connection.getresponse().read() == b"x" * 9


def test_answers_are_not_delayed(port: int) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)) as connection:
        spent = []
        for _ in range(20):
            began = time.monotonic()
            connection.request("GET", "/a")
            connection.getresponse().read()
            spent.append(time.monotonic() - began)
    assert sorted(spent)[10] < 0.03  # by Nagle's algorithm it would be 0.04 s


@pytest.mark.parametrize(
    "more", [b"Content-Length: 3\r\nContent-Length: 4\r\n", b"Content-Length: -1\r\n", b"x" * (REQUEST_BYTES + 1)]
)
def test_ambiguous_lengths_and_large_headers_are_refused(port: int, more: bytes) -> None:
    with connected(port) as raw:
        raw.sendall(b"POST /echo HTTP/1.1\r\n" + HOST + more + b"\r\nabcd")
        assert read_to_end(raw).split()[1] == b"400"


def test_a_slow_peer_is_cut_and_a_slow_answer_is_not(port: int) -> None:
    with connected(port) as idle, connected(port) as slow, connected(port) as computing, connected(port) as deaf:
        slow.sendall(b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nab")
        computing.sendall(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
        deaf.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        assert read_to_end(idle) == read_to_end(slow) == b""
        assert computing.recv(100).startswith(b"HTTP/1.1 200 OK")
        assert 0 < len(read_to_end(deaf)) < 32 << 20


def test_new_connections_replace_none_that_is_being_answered(port: int) -> None:
    answers: list[bytes] = []
    with connected(port) as computing:
        computing.sendall(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
        time.sleep(0.2)
        others = [connected(port) for _ in range(10)]  # four may be open
        reading = threading.Thread(target=lambda: answers.append(computing.recv(100)))
        reading.start()
        reading.join(WAIT_S)
    for other in others:
        other.close()
    assert answers[0].startswith(b"HTTP/1.1 200 OK")


def test_the_end_of_the_server_closes_connections_and_frees_the_port() -> None:
    with http_served("rest", "127.0.0.1:0", application, HttpLimits(4, WAIT_S)) as port:
        idle, partial = connected(port), connected(port)
        partial.sendall(b"GET")
        time.sleep(0.2)
    assert read_to_end(idle) == read_to_end(partial) == b""
    with http_served("rest", f"127.0.0.1:{port}", application):
        pass
