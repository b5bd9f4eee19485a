"""Open Inference Protocol, version 2 over REST, for the saved models of a run's clients (docs/serving.md).

The protocol is ``specification/protocol/inference_rest.md`` and ``open_inference_rest.yaml`` of
github.com/kserve/open-inference-protocol, commit d49cc23. A client's model is a version of the run's model:
``/v2/models/NAME/versions/CLIENT/infer``. Versions of a model share name and signature, as the clients' models do; the
published OpenAPI has no paths without a version; and a path, unlike a parameter in the body, can be matched by the
rules of a service mesh.
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import SecretStr

import fedloom
from fedloom.core.words import printable
from fedloom.data.input_spec import DTYPES
from fedloom.errors import DataError, ExperimentError, argument
from fedloom.runner.bounded_http import http_served
from fedloom.runner.inference_request import (
    DATATYPES,
    INPUT,
    OUTPUT,
    RequestRefused,
    checked_request,
    request_body,
    request_inputs,
)
from fedloom.runner.saved_models import MODELS, ModelFolder, SavedModel
from fedloom.security.access import Access, Denied, PeerCredentials
from fedloom.security.audit import Audit, Value
from fedloom.security.identities import Action, Identity
from fedloom.security.options import Protection
from fedloom.transport.address import split_address
from fedloom.transport.limits import RateLimitFilter

log = logging.getLogger("fedloom.runner.open_inference")
log.addFilter(RateLimitFilter())

PLATFORM = "pytorch_export"
CONNECTIONS, CONNECTION_S = 128, 60.0
"""Maximum number of open connections, and of seconds to wait for a peer."""

MOST_WAITING = 96
"""Maximum number of requests that wait for their turn to be computed; the other connections answer probes."""

RETRY_AFTER_S = 1


@dataclass(frozen=True)
class InferenceLimits:
    """Limits of serving predictions.

    Attributes
    ----------
    body_bytes
        Largest body of a request, and number of outputs in an answer.
    wait_s
        Seconds that a request waits for others to be answered.
    drain_s
        Seconds that open requests have to end.
    """

    body_bytes: int = 4 << 20
    wait_s: float = 60.0
    drain_s: float = 10.0


class OpenInference:
    """WSGI application that serves the models of clients as versions of one model, by the protocol.

    With ``access`` rules, a bearer token is required, and ``audit`` logs the predictions; without them, everyone may
    ask. ``ready`` returns True between the start of the server and its end. The server is ready once :meth:`warm_up`
    has ended.
    """

    def __init__(
        self,
        name: str,
        models: ModelFolder,
        limits: InferenceLimits | None = None,
        access: Access | None = None,
        audit: Audit | None = None,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self._name, self._models = name, models
        self._limits = limits or InferenceLimits()
        self._access, self._audit, self._serving = access, audit or Audit(), ready
        self._computing, self._turns = threading.Lock(), threading.BoundedSemaphore(MOST_WAITING)
        self._warm = threading.Event()
        self._idle = threading.Condition()
        self._open = 0

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request."""
        with self._idle:
            self._open += 1
        try:
            status, headers, answer = self._answered(environ)
            content = json.dumps(answer, allow_nan=False).encode()
            headers = {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}
            start_response(f"{status.value} {status.phrase}", [*headers.items()])
            return _Answer(content, self._ended)
        except BaseException:
            self._ended()
            raise

    def warm_up(self) -> None:
        """Load a model: the first one of a process takes seconds. A model that cannot be loaded is logged."""
        with self._computing, suppress(DataError, KeyError, IndexError):
            self._models.of(self._models.clients()[0])
        self._warm.set()

    def drain(self) -> None:
        """Wait until open requests have been answered, at most ``drain_s``."""
        with self._idle:
            self._idle.wait_for(lambda: self._open == 0, self._limits.drain_s)

    def _ended(self) -> None:
        with self._idle:
            self._open -= 1
            self._idle.notify_all()

    def _answered(self, environ: Mapping[str, Any]) -> tuple[HTTPStatus, dict[str, str], dict[str, Any]]:
        try:
            return HTTPStatus.OK, {}, self._answer(environ)
        except RequestRefused as refused:
            return refused.status, refused.headers, {"error": printable(str(refused), 500)}
        except DataError as error:
            return HTTPStatus.INTERNAL_SERVER_ERROR, {}, {"error": printable(error.message, 500)}
        except Exception:
            log.exception("cannot answer a request")
            return HTTPStatus.INTERNAL_SERVER_ERROR, {}, {"error": "the server cannot answer; see its log"}

    def _answer(self, environ: Mapping[str, Any]) -> dict[str, Any]:
        path = environ["PATH_INFO"].rstrip("/")
        found = re.fullmatch(r"/v2/models/([^/]+)(?:/versions/([^/]+))?(?:/(ready|infer))?", path)
        wanted = "POST" if found is not None and found[3] == "infer" else "GET"
        plain = {"/v2": self._server, "/v2/health/live": self._live, "/v2/health/ready": self._ready}
        if found is None and path not in plain:
            raise RequestRefused(HTTPStatus.NOT_FOUND, "there is no such path; docs/serving.md lists them")
        if environ["REQUEST_METHOD"] != wanted:
            raise RequestRefused(HTTPStatus.METHOD_NOT_ALLOWED, f"the method must be {wanted}", Allow=wanted)
        if found is None:
            return plain[path]()
        name, client, what = found.groups()
        if what == "ready":
            return self._model_ready(name, client)
        identity = self._identity(environ)
        if what is None:
            return self._metadata(name, client, identity)
        if client is None:
            raise RequestRefused(
                HTTPStatus.BAD_REQUEST, f"name a client: /v2/models/{self._name}/versions/CLIENT/infer"
            )
        return self._prediction(name, client, identity, environ)

    # ---- the server

    def _server(self) -> dict[str, Any]:
        return {"name": "fedloom", "version": fedloom.__version__, "extensions": []}

    def _live(self) -> dict[str, Any]:
        return {"live": True}

    def _ready(self) -> dict[str, Any]:
        if not (self._serving() and self._warm.is_set()):
            raise _unavailable("the server is starting, or stopping")
        return {"ready": True}

    def _model_ready(self, name: str, client: str | None) -> dict[str, Any]:
        self._ready()
        try:
            if name != self._name:
                raise KeyError(name)
            if client is not None:
                self._loaded(client)
        except KeyError:
            raise RequestRefused(HTTPStatus.NOT_FOUND, "there is no such model") from None
        return {"name": self._name, "ready": True}

    # ---- models

    def _identity(self, environ: Mapping[str, Any]) -> Identity | None:
        """Return the identity of the peer; None if everyone may ask."""
        if self._access is None:
            return None
        scheme, _, token = str(environ.get("HTTP_AUTHORIZATION", "")).partition(" ")
        shown = SecretStr(token.strip()) if scheme.lower() == "bearer" and token.strip() else None
        self._access.refresh()
        try:
            return self._access.admit(PeerCredentials(token=shown), Action.PERSONALIZE).identity
        except Denied as denied:
            self._audit.refused(environ["REMOTE_ADDR"], "inference", reason=str(denied))
            if denied.identity is not None:
                raise RequestRefused(HTTPStatus.FORBIDDEN, str(denied)) from None
            raise RequestRefused(HTTPStatus.UNAUTHORIZED, str(denied), **{"WWW-Authenticate": "Bearer"}) from None

    def _check(self, name: str, client: str, identity: Identity | None) -> None:
        """Raise RequestRefused unless this is the model's name, and the peer may use the client's."""
        if name != self._name:
            raise RequestRefused(HTTPStatus.NOT_FOUND, f"there is no model {printable(name, 80)}; this is {self._name}")
        if identity is not None and not identity.speaks_for(client):
            raise RequestRefused(HTTPStatus.FORBIDDEN, f"{identity.name} may not act for {printable(client, 80)}")

    def _loaded(self, client: str) -> SavedModel:
        """Return a client's model; raise KeyError if there is none."""
        if (kept := self._models.kept(client)) is not None:
            return kept
        with self._turn():
            return self._models.of(client)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Load a model or compute in the block, one request at a time: a body takes more memory as Python's numbers.

        Raise RequestRefused if too many requests wait already, or the others take too long.
        """
        if not self._turns.acquire(blocking=False):
            raise _unavailable(f"{MOST_WAITING} requests are waiting")
        try:
            if not self._computing.acquire(timeout=self._limits.wait_s):
                raise _unavailable(f"other requests take longer than {self._limits.wait_s:g} s")
            try:
                yield
            finally:
                self._computing.release()
        finally:
            self._turns.release()

    def _metadata(self, name: str, client: str | None, identity: Identity | None) -> dict[str, Any]:
        clients = [each for each in self._models.clients() if identity is None or identity.speaks_for(each)]
        if client is None and not clients:
            raise RequestRefused(HTTPStatus.NOT_FOUND, "you may not use any of the models")
        self._check(name, client or clients[0], identity)
        try:
            model = self._loaded(client or clients[0])
        except KeyError:
            raise _no_model(client) from None
        inputs = [_described(name or INPUT, DTYPES[spec.kind], spec.shape) for name, spec in model.specs.items()]
        outputs = [_described(OUTPUT, model.dtype, model.outputs)]
        versions = clients if client is None else [client]
        return {"name": self._name, "versions": versions, "platform": PLATFORM, "inputs": inputs, "outputs": outputs}

    def _prediction(
        self, name: str, client: str, identity: Identity | None, environ: Mapping[str, Any]
    ) -> dict[str, Any]:
        self._check(name, client, identity)
        try:
            self._models.kept(client)
            body = request_body(environ, self._limits.body_bytes)
            with self._turn():
                model = self._models.of(client)
                request, found = self._computed(model, body)
        except KeyError:
            raise _no_model(client) from None
        if not np.isfinite(found).all():
            raise DataError(f"the model of {client} gives numbers that are not finite, which JSON cannot hold")
        if identity is not None:
            about: dict[str, Value] = {"client": client, "round": model.round, "digest": model.digest}
            self._audit.write("predicted", identity=identity.name, host=environ["REMOTE_ADDR"], **about)
        output = {
            "name": OUTPUT,
            "shape": [*found.shape],
            "datatype": DATATYPES[str(found.dtype)],
            "data": _flat(found),
        }
        return {
            "model_name": self._name,
            "model_version": client,
            **({"id": request["id"]} if "id" in request else {}),
            "parameters": {"round": model.round, "digest": model.digest},
            "outputs": [output],
        }

    def _computed(self, model: SavedModel, body: bytes) -> tuple[dict[str, Any], NDArray[Any]]:
        """Return the request in a body, and the model's outputs."""
        request = checked_request(body)
        x = {name: torch.from_numpy(array) for name, array in request_inputs(request["inputs"], model).items()}
        examples, most = len(next(iter(x.values()))), max(1, self._limits.body_bytes // math.prod(model.outputs))
        if examples > most:
            reason = f"the answer would be too large; ask for {most} examples at once (got {examples})"
            raise RequestRefused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, reason)
        with torch.no_grad():
            return request, model.predict(x.get("", x)).numpy()


class _Answer:
    """Content of an answer, which calls ``ended`` once it has been sent or the connection has broken."""

    def __init__(self, content: bytes, ended: Callable[[], None]) -> None:
        self._content, self._ended = content, ended

    def __iter__(self) -> Iterator[bytes]:
        yield self._content

    def close(self) -> None:
        """End the request; called by the server after the last byte."""
        self._ended()


def _unavailable(reason: str) -> RequestRefused:
    return RequestRefused(HTTPStatus.SERVICE_UNAVAILABLE, reason, **{"Retry-After": str(RETRY_AFTER_S)})


def _no_model(client: str | None) -> RequestRefused:
    return RequestRefused(HTTPStatus.NOT_FOUND, f"client {printable(client or '', 80)} has no saved model")


def _described(name: str, dtype: np.dtype[Any], shape: Sequence[int]) -> dict[str, Any]:
    return {"name": name, "datatype": DATATYPES[str(dtype)], "shape": [-1, *shape]}


def _flat(array: NDArray[Any]) -> list[Any]:
    """Return numbers in row-major order, as float64, whose shortest text in JSON keeps all bits."""
    numbers: list[Any] = array.astype(np.float64).ravel().tolist()
    return numbers


@contextmanager
def inference_served(
    address: str | None, application: Callable[[], OpenInference], protection: Protection, say: Callable[[str], None]
) -> Iterator[None]:
    """Serve predictions over HTTP at ``host:port``, in separate threads, for the duration of the block; None: do not.

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
    answering = application()
    with http_served("rest", address, answering, CONNECTIONS, CONNECTION_S) as server:
        say(f"{host}:{server.server_port}")
        warming = threading.Thread(target=answering.warm_up, name="warm-up", daemon=True)
        warming.start()
        try:
            yield
        finally:
            server.keeps_connections = False
            answering.drain()
            warming.join()  # torch must not be loading when the process ends


def models_folder(run: Path | None, given: str | None) -> Path:
    """Return the folder of clients' models: the one ``given``, or else that in a run's folder.

    Raise ExperimentError if none is given for a published run, which has no folder (``run`` is None).
    """
    if given is not None:
        return Path(given)
    if run is None:
        raise ExperimentError(
            f"A published run has no clients' models for {argument('rest')}: give their folder with "
            f"{argument('set')}models=DIR.",
            key="models",
        )
    return run / MODELS
