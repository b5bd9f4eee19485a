"""Open Inference Protocol, version 2 over REST, for the saved models of a run's clients (docs/serving.md).

The protocol is ``specification/protocol/inference_rest.md`` and ``open_inference_rest.yaml`` of
github.com/kserve/open-inference-protocol, commit d49cc23. A client's model is a version of the run's model:
``/v2/models/NAME/versions/CLIENT/infer``. Versions of a model share name and signature, as the clients' models do; the
published OpenAPI has no paths without a version; and a path, unlike a parameter in the body, can be matched by the
rules of a service mesh.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, FailFast, Field, SecretStr, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import fedloom
from fedloom.core.address import split_address
from fedloom.core.words import printable
from fedloom.data.spec import DTYPES, InputSpec
from fedloom.errors import DataError, ExperimentError, argument
from fedloom.security.access import Access, Action, Denied, Identity, PeerCredentials
from fedloom.security.audit import Audit
from fedloom.security.options import Protection
from fedloom.serving.saved_models import MODELS, ModelFolder, SavedModel
from fedloom.transport.http_server import HttpLimits, http_served
from fedloom.transport.limits import RateLimitFilter
from fedloom.transport.personalization import ModelServerSettings

log = logging.getLogger("fedloom.serving.open_inference")
log.addFilter(RateLimitFilter())

CONNECTIONS, CONNECTION_S = 128, 60.0
"""Maximum number of open connections, and of seconds to wait for a peer."""

MOST_WAITING = 96
"""Maximum number of requests that wait for their turn to be computed; the other connections answer probes."""

MOST_DISCARDED = 64 << 20
"""Number of bytes that are read of a too large body: a client that is still sending would not see the answer."""

DATATYPES: Mapping[str, str] = {"uint8": "UINT8", "int64": "INT64", "float32": "FP32", "float64": "FP64"}
"""Datatypes of the protocol by their names in NumPy."""

INPUT, OUTPUT = "x", "output"
"""Names of a single input and of the output, as in exported models."""


class InputTensor(BaseModel, strict=True):
    """Input tensor of a request; the data are flat, or nested according to the shape."""

    name: str
    shape: Annotated[list[int], Field(min_length=1, max_length=32)]
    datatype: str
    data: list[Any]


class OutputName(BaseModel, strict=True):
    """Output that a request asks for."""

    name: Literal["output"]


class InferenceRequest(BaseModel, strict=True):
    """Request for a prediction."""

    id: Annotated[str, Field(max_length=1024)] | None = None
    inputs: Annotated[list[InputTensor], Field(max_length=1024), FailFast()]
    outputs: Annotated[list[OutputName], Field(max_length=1024), FailFast()] = []

    def arrays(self, model: SavedModel) -> dict[str, NDArray[Any]]:
        """Return the inputs by the names of the model's; raise an error of the protocol if they do not fit."""
        specs = {name or INPUT: (name, spec) for name, spec in model.specs.items()}
        if sorted(each.name for each in self.inputs) != sorted(specs):
            _refuse(HTTPStatus.BAD_REQUEST, f"the inputs must be {', '.join(specs)}")
        arrays = {specs[each.name][0]: _array(each, specs[each.name][1], model.classes) for each in self.inputs}
        if len({len(array) for array in arrays.values()}) > 1:
            _refuse(HTTPStatus.BAD_REQUEST, "the inputs must have the same number of examples")
        return arrays


def _array(tensor: InputTensor, spec: InputSpec, classes: int) -> NDArray[Any]:
    """Return the array of an input, checked against its description."""
    name, shape, dtype = tensor.name, tuple(tensor.shape), DTYPES[spec.kind]
    fault = None
    if tensor.datatype != DATATYPES[str(dtype)]:
        fault = f"datatype must be {DATATYPES[str(dtype)]}"
    elif shape[0] < 1 or shape[1:] != spec.shape:
        fault = f"shape must be [{', '.join(['b', *map(str, spec.shape)])}] with b of at least 1"
    if fault is not None:
        _refuse(HTTPStatus.BAD_REQUEST, f"{name}: {fault}")
    try:
        numbers = np.array(tensor.data)
        if numbers.shape not in (shape, (math.prod(shape),)):
            raise ValueError(f"data have shape {list(numbers.shape)}; give them flat, or nested as {list(shape)}")
        if numbers.dtype.kind not in ("iu" if dtype.kind != "f" else "iuf"):
            raise ValueError(f"data must be numbers that fit into {tensor.datatype}")
        with np.errstate(over="ignore"):
            array = (numbers if dtype.kind != "f" else numbers.astype(np.float64)).astype(dtype).reshape(shape)
        if dtype.kind != "f" and not np.array_equal(array.ravel(), numbers.ravel()):
            raise ValueError(f"a number is out of the range of {tensor.datatype}")
    except ValueError as error:  # NumPy's own: ragged lists
        _refuse(HTTPStatus.BAD_REQUEST, f"{name}: {error}")
    fault = spec.values_fault(array, classes)
    if fault is None and spec.high is not None and int(array.max()) >= spec.high:
        fault = f"an integer is {array.max()}; it must be below {spec.high}"
    if fault is not None:
        _refuse(HTTPStatus.BAD_REQUEST, f"{name}: {fault}")
    return array


class OpenInference:
    """ASGI application that serves the models of clients as versions of one model, by the protocol.

    With ``access`` rules, a bearer token is required, and ``audit`` logs the predictions; without them, everyone may
    ask. ``ready`` returns True between the start of the server and its end. The server is ready once a model is
    loaded: the first one of a process takes seconds.
    """

    def __init__(
        self,
        name: str,
        models: ModelFolder,
        settings: ModelServerSettings | None = None,
        access: Access | None = None,
        audit: Audit | None = None,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self._name, self._models = name, models
        self._settings = settings or ModelServerSettings()
        self._access, self._audit, self._serving = access, audit or Audit(), ready
        self._computing, self._waiting, self._warm = asyncio.Lock(), 0, False
        model = "/v2/models/{name}"
        version = model + "/versions/{client}"
        self._app = Starlette(
            routes=[
                Route("/v2", self._server),
                Route("/v2/health/live", self._live),
                Route("/v2/health/ready", self._ready),
                *(Route(path, self._metadata) for path in (model, version)),
                *(Route(f"{path}/ready", self._model_ready) for path in (model, version)),
                *(Route(f"{path}/infer", self._infer, methods=["POST"]) for path in (model, version)),
            ],
            exception_handlers={HTTPException: _answer_refusal, DataError: _answer_error, Exception: _answer_error},
            lifespan=self._warm_up,
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] == "http":
            scope = {**scope, "path": scope["path"].rstrip("/")}  # the protocol's own paths end in one at times
        await self._app(scope, receive, send)

    @asynccontextmanager
    async def _warm_up(self, _: Any) -> AsyncIterator[None]:
        """Load a model while the server starts; one that cannot be loaded is logged."""

        async def warm_up() -> None:
            with suppress(DataError, KeyError, IndexError):
                async with self._computing:
                    await asyncio.to_thread(lambda: self._models.load(self._models.clients()[0]))
            self._warm = True

        warming = asyncio.create_task(warm_up())
        yield
        await warming  # torch must not be loading when the process ends

    # ---- the server

    async def _server(self, _: Request) -> JSONResponse:
        return JSONResponse({"name": "fedloom", "version": fedloom.__version__, "extensions": []})

    async def _live(self, _: Request) -> JSONResponse:
        return JSONResponse({"live": True})

    async def _ready(self, _: Request) -> JSONResponse:
        self._check_ready()
        return JSONResponse({"ready": True})

    def _check_ready(self) -> None:
        if not (self._serving() and self._warm):
            _refuse(HTTPStatus.SERVICE_UNAVAILABLE, "the server is starting, or stopping")

    # ---- models

    async def _model_ready(self, request: Request) -> JSONResponse:
        self._check_ready()
        self._check_name(request)
        if (client := request.path_params.get("client")) is not None:
            await self._loaded(client)
        return JSONResponse({"name": self._name, "ready": True})

    async def _metadata(self, request: Request) -> JSONResponse:
        identity = self._identity(request)
        self._check_name(request)
        clients = [each for each in self._models.clients() if identity is None or identity.speaks_for(each)]
        client = request.path_params.get("client")
        if client is None and not clients:
            _refuse(HTTPStatus.NOT_FOUND, "you may not use any of the models")
        self._check_client(client or clients[0], identity)
        model = await self._loaded(client or clients[0])
        return JSONResponse(
            {
                "name": self._name,
                "versions": clients if client is None else [client],
                "platform": "pytorch_export",
                "inputs": [
                    _described(name or INPUT, DTYPES[spec.kind], spec.shape) for name, spec in model.specs.items()
                ],
                "outputs": [_described(OUTPUT, model.dtype, model.outputs)],
            }
        )

    async def _infer(self, request: Request) -> JSONResponse:
        identity = self._identity(request)
        self._check_name(request)
        client = request.path_params.get("client")
        if client is None:
            _refuse(HTTPStatus.BAD_REQUEST, f"name a client: /v2/models/{self._name}/versions/CLIENT/infer")
        self._check_client(client, identity)
        self._kept(client)
        body = await self._body(request)
        async with self._turn():
            return await asyncio.to_thread(self._predict, client, identity, body, _host(request))

    def _predict(self, client: str, identity: Identity | None, body: bytes, host: str) -> JSONResponse:
        """Return the answer to a request in a body."""
        with _no_model(client):
            model = self._models.load(client)
        try:
            request = InferenceRequest.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            _refuse(HTTPStatus.BAD_REQUEST, f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}")
        outputs = self.outputs(request, model)
        if not np.isfinite(outputs).all():
            raise DataError(f"the model of {client} gives numbers that are not finite, which JSON cannot hold")
        if identity is not None:
            self._audit.write(
                "predicted", identity=identity.name, host=host, client=client, round=model.round, digest=model.digest
            )
        return JSONResponse(
            {
                "model_name": self._name,
                "model_version": client,
                **({} if request.id is None else {"id": request.id}),
                "parameters": {"round": model.round, "digest": model.digest},
                "outputs": [
                    {
                        "name": OUTPUT,
                        "shape": [*outputs.shape],
                        "datatype": DATATYPES[str(outputs.dtype)],
                        # As float64, whose shortest text in JSON keeps all bits.
                        "data": outputs.astype(np.float64).ravel().tolist(),
                    }
                ],
            }
        )

    def outputs(self, request: InferenceRequest, model: SavedModel) -> NDArray[Any]:
        """Return a model's outputs, ``[b, *model.outputs]``; raise an error of the protocol if they are too many."""
        x = {name: torch.from_numpy(array) for name, array in request.arrays(model).items()}
        examples, most = len(next(iter(x.values()))), max(1, self._settings.body_bytes // math.prod(model.outputs))
        if examples > most:
            reason = f"the answer would be too large; ask for {most} examples at once (got {examples})"
            _refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, reason)
        with torch.no_grad():
            outputs: NDArray[Any] = model.predict(x.get("", x)).numpy()
        return outputs

    def _kept(self, client: str) -> SavedModel | None:
        with _no_model(client):
            return self._models.kept(client)

    async def _loaded(self, client: str) -> SavedModel:
        """Return a client's model."""
        if (model := self._kept(client)) is not None:
            return model
        async with self._turn():
            with _no_model(client):
                return await asyncio.to_thread(self._models.load, client)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Load a model or compute in the block, one request at a time: a body takes more memory as Python's numbers."""
        if self._waiting >= MOST_WAITING:
            _refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"{MOST_WAITING} requests are waiting")
        self._waiting += 1
        try:
            try:
                async with asyncio.timeout(self._settings.deadline_s):
                    await self._computing.acquire()
            except TimeoutError:
                reason = f"other requests take longer than {self._settings.deadline_s:g} s"
                _refuse(HTTPStatus.SERVICE_UNAVAILABLE, reason)
            try:
                yield
            finally:
                self._computing.release()
        finally:
            self._waiting -= 1

    async def _body(self, request: Request) -> bytes:
        """Return the body of a request."""
        headers, most = request.headers, self._settings.body_bytes
        if headers.get("content-encoding", "identity") != "identity" or "inference-header-content-length" in headers:
            reason = "the body must be JSON, uncompressed and without binary tensors"
            _refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, reason)
        pieces, size = [], 0
        async for piece in request.stream():
            size += len(piece)
            if size <= most:
                pieces.append(piece)
            elif size > MOST_DISCARDED:
                break
        if size > most:
            _refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {most} bytes")
        return b"".join(pieces)

    # ---- access

    def _identity(self, request: Request) -> Identity | None:
        """Return the identity of the peer; None if everyone may ask."""
        if self._access is None:
            return None
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        shown = SecretStr(token.strip()) if scheme.lower() == "bearer" and token.strip() else None
        self._access.refresh()
        try:
            return self._access.admit(PeerCredentials(token=shown), Action.PERSONALIZE).identity
        except Denied as denied:
            self._audit.refused(_host(request), "inference", reason=str(denied))
            is_known = denied.identity is not None
            status = HTTPStatus.FORBIDDEN if is_known else HTTPStatus.UNAUTHORIZED
            raise HTTPException(status, str(denied), None if is_known else {"WWW-Authenticate": "Bearer"}) from None

    def _check_name(self, request: Request) -> None:
        if (name := request.path_params["name"]) != self._name:
            _refuse(HTTPStatus.NOT_FOUND, f"there is no model {printable(name, 80)}; this is {self._name}")

    def _check_client(self, client: str, identity: Identity | None) -> None:
        if identity is not None and not identity.speaks_for(client):
            _refuse(HTTPStatus.FORBIDDEN, f"{identity.name} may not act for {printable(client, 80)}")


def _host(request: Request) -> str:
    return "" if request.client is None else request.client.host


def _refuse(status: HTTPStatus, reason: str) -> NoReturn:
    headers = {"Retry-After": "1"} if status is HTTPStatus.SERVICE_UNAVAILABLE else None
    raise HTTPException(status, reason, headers)


@contextmanager
def _no_model(client: str) -> Iterator[None]:
    try:
        yield
    except KeyError:
        _refuse(HTTPStatus.NOT_FOUND, f"client {printable(client, 80)} has no saved model")


def _answer_refusal(_: Request, error: Any) -> JSONResponse:
    return JSONResponse({"error": printable(error.detail, 500)}, error.status_code, error.headers)


def _answer_error(_: Request, error: Exception) -> JSONResponse:
    reason = error.message if isinstance(error, DataError) else "the server cannot answer; see its log"
    return JSONResponse({"error": printable(reason, 500)}, HTTPStatus.INTERNAL_SERVER_ERROR)


def _described(name: str, dtype: np.dtype[Any], shape: Sequence[int]) -> dict[str, Any]:
    return {"name": name, "datatype": DATATYPES[str(dtype)], "shape": [-1, *shape]}


@contextmanager
def inference_served(
    address: str | None, application: Callable[[], OpenInference], protection: Protection, say: Callable[[str], None]
) -> Iterator[None]:
    """Serve predictions over HTTP at ``host:port``, in a separate thread, for the duration of the block; None: do not.

    ``application`` creates the application, and ``say`` receives the address. The port is plaintext, and identifies
    peers by tokens alone.

    Raise ExperimentError if the address is invalid or cannot be bound, other machines could reach it in plaintext, or
    ``protection`` needs certificates; DataError if there are no models.
    """
    if address is None:
        yield
        return
    host, _ = split_address(address, what=argument("rest"), lowest=0)
    protection.check_plaintext(host, "rest")
    serving = application()
    limits = HttpLimits(CONNECTIONS, CONNECTION_S, serving._settings.drain_s)
    with http_served("rest", address, serving, limits) as port:
        say(f"{host}:{port}")
        yield


def models_folder(run: Path | None, folder: str | None) -> Path:
    """Return the folder of clients' models: the one ``folder``, or else that in a run's folder.

    Raise ExperimentError if none is given for a published run, which has no folder (``run`` is None).
    """
    if folder is not None:
        return Path(folder)
    if run is None:
        raise ExperimentError(
            f"A published run has no clients' models for {argument('rest')}: give their folder with "
            f"{argument('set')}models=DIR.",
            key="models",
        )
    return run / MODELS
