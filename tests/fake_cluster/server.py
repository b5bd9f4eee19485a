"""The API over HTTP, compatible with the Python client."""

from __future__ import annotations

import json
import re
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from fake_cluster.disruptions import Disruptions
from fake_cluster.kubelet import Kubelet
from fake_cluster.network import Network
from fake_cluster.portforward import accept, forward
from fake_cluster.quotas import Quotas
from fake_cluster.resources import RESOURCES, Invalid, Resource, admit, selects
from fake_cluster.store import ApiError, Object, Store, now

POLL_S = 0.2
ROUTE = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+)/(?P<version>[^/]+))"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/[^/]))?/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?"
)


@dataclass
class Identity:
    """User of a token, and its rules in the namespace (None: unrestricted)."""

    user: str
    rules: list[Object] | None = None

    def may(self, verb: str, group: str, resource: str) -> bool:
        """Return True if the rules allow a verb on a resource (``pods/log`` with its subresource)."""
        if self.rules is None:
            return True
        return any(
            {verb, "*"} & set(rule["verbs"])
            and {group, "*"} & set(rule["apiGroups"])
            and {resource, "*"} & set(rule["resources"])
            for rule in self.rules
        )


@dataclass
class Failure:
    """An answer that a test requests from the API."""

    verb: str
    resource: str
    error: ApiError
    times: int = 1


@dataclass
class Request:
    """A parsed request."""

    verb: str
    resource: Resource
    namespace: str
    name: str | None
    sub: str | None
    query: dict[str, str]
    body: Object

    @property
    def qualified(self) -> str:
        """Return the resource as named in rules."""
        return f"{self.resource.plural}/{self.sub}" if self.sub else self.resource.plural


@dataclass
class Api:
    """Request handler of the API.

    Parameters
    ----------
    identities
        Token -> identity.
    """

    store: Store
    kubelet: Kubelet
    network: Network
    quotas: Quotas
    disruptions: Disruptions
    identities: dict[str, Identity] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Verb and resource of every request, oldest first."""
    started: float = 0.0
    """Moment from which the server knows its roles, or its accounts if ``starts_with`` is 401."""
    starts_with: int = 403

    def check_started(self, identity: Identity, what: str) -> None:
        """Refuse a user of roles for as long as the server has not read them after its start.

        As real ones do (kubernetes/kubernetes#121635): bindings are read before roles. A user without rules is one of
        the group system:masters, which needs no role.
        """
        if identity.rules is None or time.monotonic() >= self.started:
            return
        if self.starts_with == 401:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        role = (
            '[clusterrole.rbac.authorization.k8s.io "system:basic-user" not found, role "fedloom-launcher" not found]'
        )
        raise ApiError(403, "Forbidden", f"{what}: RBAC: {role}")

    def answer(self, request: Request, identity: Identity) -> Object | Iterator[bytes] | str:
        """Return one answer: an object, a stream, or text.

        Raises
        ------
        ApiError
            For every failure.
        """
        self.requests.append((request.verb, request.qualified))
        self.check_started(identity, self._forbidden(request, identity))
        needed = {request.verb, *(["create"] if request.sub == "portforward" else [])}  # as in newer API servers
        if not all(identity.may(verb, request.resource.group, request.qualified) for verb in needed):
            raise ApiError(403, "Forbidden", self._forbidden(request, identity))
        for failure in self.failures:
            if (failure.verb, failure.resource) == (request.verb, request.qualified) and failure.times > 0:
                failure.times -= 1
                raise failure.error
        if request.sub:
            return self._sub(request)
        verbs: dict[str, Callable[[Request], Object | Iterator[bytes]]] = {
            "get": self._get, "list": self._list, "watch": self._watch, "create": self._create, "delete": self._delete,
        }  # fmt: skip
        try:
            return verbs[request.verb](request)
        except Invalid as error:
            raise ApiError(error.code, {422: "Invalid"}.get(error.code, "BadRequest"), str(error)) from None

    def review(self, spec: Object, identity: Identity) -> Object:
        """Answer a SelfSubjectAccessReview."""
        named = "selfsubjectaccessreviews.authorization.k8s.io"
        self.check_started(
            identity,
            f'{named} is forbidden: User "{identity.user}" cannot create resource "selfsubjectaccessreviews" in API '
            'group "authorization.k8s.io" at the cluster scope',
        )
        asked = spec.get("resourceAttributes") or {}
        resource = asked.get("resource", "") + (f"/{asked['subresource']}" if asked.get("subresource") else "")
        allowed = identity.may(asked.get("verb", ""), asked.get("group", ""), resource)
        return {
            "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "metadata": {}, "spec": spec,
            "status": {"allowed": allowed, **({} if allowed else {"reason": "no RBAC policy matched"})},
        }  # fmt: skip

    def _forbidden(self, request: Request, identity: Identity) -> str:
        named = request.resource.qualified + (f' "{request.name}"' if request.name else "")
        return (
            f'{named} is forbidden: User "{identity.user}" cannot {request.verb} resource "{request.qualified}" in API '
            f'group "{request.resource.group}" in the namespace "{request.namespace}"'
        )

    def _terminating(self, request: Request) -> str:
        """Reject what Kubernetes rejects (apiserver/pkg/admission/plugin/namespace/lifecycle/admission.go)."""
        named = f'{request.resource.qualified} "{request.body["metadata"]["name"]}" is forbidden'
        return f"{named}: unable to create new content in namespace {request.namespace} because it is being terminated"

    def _named(self, request: Request) -> tuple[Resource, str, str]:
        return request.resource, request.namespace, request.name or ""

    def _get(self, request: Request) -> Object:
        return self.store.get(*self._named(request))

    def _list(self, request: Request) -> Object:
        items, version = self.store.list(request.resource, request.namespace)
        chosen = [item for item in items if self._chosen(request, item)]
        for item in chosen:  # the API omits them from the items of a list
            del item["kind"], item["apiVersion"]
        resource = request.resource
        return {
            "kind": f"{resource.kind}List", "apiVersion": resource.api_version,
            "metadata": {"resourceVersion": str(version)}, "items": chosen,
        }  # fmt: skip

    def _chosen(self, request: Request, item: Object | None) -> bool:
        if item is None or request.namespace not in ("", item["metadata"].get("namespace", "")):
            return False
        return selects(request.query.get("labelSelector"), request.query.get("fieldSelector"), item)

    def _watch(self, request: Request) -> Iterator[bytes]:
        until = time.monotonic() + float(request.query.get("timeoutSeconds", 1800))
        given = request.query.get("resourceVersion") or "0"
        begin = int(given)
        with self.store.changed:
            items, version = self.store.list(request.resource, request.namespace)
            seen = version if begin == 0 else begin
        if begin == 0:
            for item in items:
                if self._chosen(request, item):
                    yield _line("ADDED", item)
        while time.monotonic() < until and not self.kubelet.stopping.is_set():
            with self.store.changed:
                if seen < self.store.compacted:
                    yield _line("ERROR", ApiError(410, "Expired", f"too old resource version: {seen}").status())
                    return
                changes = list(self.store.since(seen, request.resource))
                if not changes:
                    self.store.changed.wait(POLL_S)
            if not changes:
                yield b""  # lets the server detect a closed connection
            for change in changes:
                seen = change.version
                was, now_chosen = self._chosen(request, change.before), self._chosen(request, change.object)
                if change.type == "DELETED" or (was and not now_chosen):
                    if was:
                        yield _line("DELETED", change.object)
                elif now_chosen:
                    yield _line("MODIFIED" if was else "ADDED", change.object)

    def _create(self, request: Request) -> Object:
        if request.resource.namespaced:
            namespace = self.store.get(RESOURCES["namespaces"], "", request.namespace)
            if "deletionTimestamp" in namespace["metadata"]:
                raise ApiError(403, "Forbidden", self._terminating(request))
        strict = request.query.get("fieldValidation") == "Strict"
        made = admit(request.resource, request.namespace, request.body, strict=strict)
        self.quotas.charge(request.resource, made)
        if request.resource.kind == "Service":
            made["spec"]["clusterIP"] = self.network.address()
            made["spec"]["clusterIPs"] = [made["spec"]["clusterIP"]]
            for port in made["spec"]["ports"]:
                port.setdefault("targetPort", port["port"])
                port.setdefault("protocol", "TCP")
        try:
            return self.store.create(request.resource, made)
        except ApiError:
            if request.resource.kind == "Service":
                self.network.release(made["spec"]["clusterIP"])
            raise

    def _delete(self, request: Request) -> Object:
        options = request.body or {}
        propagation = options.get("propagationPolicy") or request.query.get("propagationPolicy")
        grace = options.get("gracePeriodSeconds", request.query.get("gracePeriodSeconds"))
        uid = (options.get("preconditions") or {}).get("uid")
        named = self._named(request)
        if request.resource.kind == "Pod":
            pod = self.store.get(*named)
            if pod["status"]["phase"] in ("Succeeded", "Failed"):
                grace = 0
        gone = self.store.delete(*named, propagation, None if grace is None else int(grace), uid)
        if request.resource.kind in ("Pod", "Service"):
            return gone
        details = {"name": request.name, "kind": request.resource.plural, "uid": gone["metadata"]["uid"]}
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}

    def _sub(self, request: Request) -> Object | Iterator[bytes] | str:
        kind = (request.resource.kind, request.sub, request.verb)
        if kind == ("Pod", "log", "get"):
            return self._log(request)
        if kind == ("Pod", "portforward", "get"):
            pod = self.store.get(*self._named(request))
            if pod["status"]["phase"] != "Running":
                raise ApiError(400, "BadRequest", f"pod is not running. Current status={pod['status']['phase']}")
            return f"{pod['status']['podIP']}:{request.query['ports']}"
        if kind == ("Pod", "eviction", "create"):
            return self._evict(request)
        raise ApiError(404, "NotFound", f"the fake cluster covers no {request.verb} of {request.qualified}")

    def _evict(self, request: Request) -> Object:
        named = self._named(request)

        def disrupt(pod: Object) -> None:
            pod["status"].setdefault("conditions", []).append({
                "type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
                "message": "Eviction API: evicting", "lastTransitionTime": now(),
            })  # fmt: skip

        with self.store.changed:  # two evictions at once must not both find the other's pod healthy
            self.disruptions.check(self.store.get(*named))
            self.store.modify(*named, disrupt)
            grace = (request.body.get("deleteOptions") or {}).get("gracePeriodSeconds")
            self.store.delete(*named, grace_s=grace)
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

    def _log(self, request: Request) -> Iterator[bytes] | str:
        pod = self.store.get(*self._named(request))
        name, query = pod["metadata"]["name"], request.query
        if not pod["spec"].get("nodeName"):  # pkg/registry/core/pod/strategy.go: there is no kubelet to ask
            return ""
        waiting = ApiError(
            400,
            "BadRequest",
            f'container "{query.get("container", "")}" in pod "{name}" is waiting to start: ContainerCreating',
        )
        try:
            container = self.kubelet.run_of(name).container(query.get("container"))
        except ApiError as error:
            raise waiting if error.code == 404 else error from None
        if container.process is None and container.code is None:
            reason = container.status()["state"]["waiting"]["reason"]
            waiting.message = f'container "{container.name}" in pod "{name}" is waiting to start: {reason}'
            raise waiting
        text = container.said()
        if "tailLines" in query:
            lines = int(query["tailLines"])
            text = "".join(text.splitlines(keepends=True)[-lines:]) if lines else ""
        if query.get("follow") not in ("true", "True", "1"):
            return text

        def follow() -> Iterator[bytes]:
            output = container.said()
            yield text.encode()
            while True:
                ended = not container.running
                more = container.said()
                yield more[len(output) :].encode()
                output = more
                if ended or self.kubelet.stopping.is_set():
                    return
                time.sleep(POLL_S)

        return follow()


def _line(kind: str, item: Object) -> bytes:
    return json.dumps({"type": kind, "object": item}).encode() + b"\n"


class Server(ThreadingHTTPServer):
    """HTTP server on the socket that the network has reserved."""

    daemon_threads = True

    def __init__(self, api: Api) -> None:
        self.api = api
        super().__init__(api.network.api.getsockname(), Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = api.network.api

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect during a request."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Handler of one connection."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: tests check ``Api.requests``."""

    def do_GET(self) -> None:
        """Handle reads, lists, watches and logs."""
        self._do()

    do_POST = do_DELETE = do_GET

    def _do(self) -> None:
        try:
            answer = self._answer()
            if self.headers.get("Upgrade", "").lower() == "websocket":
                self._forward(str(answer))
                return
        except ApiError as error:
            answer, code = error.status(), error.code
        else:
            code = 201 if self.command == "POST" else 200
        with suppress(OSError):
            if isinstance(answer, dict):
                self._send(code, "application/json", json.dumps(answer).encode())
            elif isinstance(answer, str):
                self._send(code, "text/plain", answer.encode())
            else:
                self._stream(answer)

    def _answer(self) -> Object | Iterator[bytes] | str:
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length)
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        identity = self.server.api.identities.get(token if scheme == "Bearer" else "")  # "" is the anonymous user
        if identity is None:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        try:
            body = json.loads(raw) if raw else {}
        except json.JSONDecodeError as error:
            raise ApiError(400, "BadRequest", f"the object provided is unrecognized: {error}") from None
        url = urlsplit(self.path)
        path = unquote(url.path).rstrip("/")
        if path == "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews" and self.command == "POST":
            return self.server.api.review(body.get("spec") or {}, identity)
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        return self.server.api.answer(self._request(path, query, body), identity)

    def _request(self, path: str, query: dict[str, str], body: Object) -> Request:
        found = ROUTE.fullmatch(path)
        resource = RESOURCES.get(found["plural"]) if found else None
        if found is None or resource is None or found["group"] not in (None, resource.group):
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        watching = query.get("watch") in ("1", "true", "True")
        verb = {
            "GET": "get" if found["name"] else "watch" if watching else "list",
            "POST": "create", "DELETE": "delete",
        }[self.command]  # fmt: skip
        return Request(verb, resource, found["namespace"] or "", found["name"], found["sub"], query, body)

    def _forward(self, address: str) -> None:
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", accept(self.headers["Sec-WebSocket-Key"]))
        self.send_header("Sec-WebSocket-Protocol", "v4.channel.k8s.io")
        self.end_headers()
        self.close_connection = True
        host, _, port = address.rpartition(":")
        forward(self.connection, self.rfile, host, int(port))

    def _send(self, code: int, media: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", media)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, parts: Iterator[bytes]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in parts:
            if part:
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                self.wfile.flush()
            elif self._left():
                self.close_connection = True
                return
        self.wfile.write(b"0\r\n\r\n")

    def _left(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
