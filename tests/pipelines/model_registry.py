"""Stand-in for the Kubeflow Model Registry's REST API, which checks each request and each answer of its own.

The schema is a part of the published one (``tests/fixtures/model_registry.yaml``, whose head names its source). The
code of the same commit of github.com/kubeflow/model-registry shows the rest: a body with an unknown field is refused
with 400, one without a required field with 422 (``internal/server/openapi/type_asserts.go``, ``error.go``); names are
found by SQL's LIKE (``internal/db/service``), several that match are 404, and equal names are 409 (``internal/core``);
an unknown path is 404 in plain text (``routers.go``, chi); ids are whole numbers as text.

It does not have: databases, ``filterQuery``, ``orderBy``, updates, experiments, serving environments, the user
interface, and what Istio or an OAuth proxy in front of a real one answers, but for 401, 403 and a redirect.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonschema
import yaml

API = "/api/model_registry/v1alpha3"
SPEC = yaml.safe_load((Path(__file__).parents[1] / "fixtures" / "model_registry.yaml").read_text())

Object = dict[str, Any]


def resolved(schema: Any) -> Any:
    """Return a schema of OpenAPI 3.0 as JSON Schema, closed: an object has only the listed properties."""
    if "$ref" in schema:
        return resolved(SPEC["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    if "discriminator" in schema:
        key, chosen = schema["discriminator"]["propertyName"], schema["discriminator"]["mapping"]
        kinds = [
            {"if": {"properties": {key: {"const": value}}}, "then": resolved({"$ref": ref})}
            for value, ref in chosen.items()
        ]
        return {"type": "object", "required": [key], "properties": {key: {"enum": [*chosen]}}, "allOf": kinds}
    own = {name: resolved(value) for name, value in schema.get("properties", {}).items()}
    merged: Object = {"properties": {}, "required": []}
    for part in (*(resolved(part) for part in schema.get("allOf", ())), {**schema, "properties": own}):
        merged["required"] += part.get("required", [])
        merged["properties"] |= part.get("properties", {})
    if not merged["properties"]:
        found = {key: value for key, value in schema.items() if key not in ("format", "default", "nullable")}
        for key in ("items", "additionalProperties"):
            if isinstance(found.get(key), Mapping):
                found[key] = resolved(found[key])
        return found
    return {"type": "object", "additionalProperties": False, **merged}


def _component(kind: str, part: Object) -> Object:
    return SPEC["components"][kind][part["$ref"].rpartition("/")[2]] if "$ref" in part else part


def _json_schema(part: Object) -> Any:
    return resolved(part["content"]["application/json"]["schema"])


class StandIn:
    """Registry in this process.

    Attributes
    ----------
    url
        Its URL.
    token
        Bearer token that it requires; None: none. ``forbidden`` and ``redirect`` make it answer 403 and 302.
    requests
        Verbs and paths of the requests so far.
    failures
        Statuses with which to answer the next requests that change something.
    """

    def __init__(self) -> None:
        self.token: str | None = None
        self.forbidden = self.redirect = False
        self.requests: list[str] = []
        self.failures: list[int] = []
        self.objects: dict[str, list[Object]] = {"registered_models": [], "model_versions": [], "artifacts": []}
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self, "get")

            def do_POST(self) -> None:
                outer.answer(self, "post")

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, http: BaseHTTPRequestHandler, verb: str) -> None:
        """Answer one request."""
        body = http.rfile.read(int(http.headers.get("Content-Length") or 0))
        with self._lock:
            status, output = self._said(http, verb, body)
        content, kind = (
            (output.encode(), "text/plain") if isinstance(output, str) else (json.dumps(output).encode(), "json")
        )
        http.send_response(status)
        if status == 302:
            http.send_header("Location", f"{self.url}/dex/auth")
        http.send_header("Content-Type", kind if "/" in kind else f"application/{kind}; charset=UTF-8")
        http.send_header("Content-Length", str(len(content)))
        http.end_headers()
        http.wfile.write(content)

    def _said(self, http: BaseHTTPRequestHandler, verb: str, body: bytes) -> tuple[int, Any]:
        where = urlsplit(http.path)
        self.requests.append(f"{verb.upper()} {where.path.removeprefix(API)}")
        if self.redirect:
            return 302, "<a href>login</a>"
        if self.token is not None and http.headers.get("Authorization") != f"Bearer {self.token}":
            return 401, _error("Unauthorized", "no valid token")
        if self.forbidden:
            return 403, "RBAC: access denied"
        found = _operation(where.path, verb)
        if found is None:
            return 404, "404 page not found\n"
        if verb == "post" and self.failures:
            return (status := self.failures.pop(0)), _error(str(status), "told to fail")
        operation, parameters, ids = found
        query = {key: values[0] for key, values in parse_qs(where.query).items()}
        if unknown := set(query) - {_component("parameters", one)["name"] for one in parameters}:
            raise AssertionError(f"{http.path}: parameters not in the schema: {unknown}")
        status, output = self._created(operation, body, ids) if verb == "post" else self._got(operation, query, ids)
        answers = _component("responses", operation["responses"][str(status)])
        jsonschema.validate(output, _json_schema(answers))
        return status, output

    def _created(self, operation: Object, body: bytes, ids: Mapping[str, str]) -> tuple[int, Object]:
        schema = _json_schema(operation["requestBody"])
        try:
            sent = json.loads(body)
            errors = [*jsonschema.Draft202012Validator(schema).iter_errors(sent)]
        except ValueError as error:
            return 400, _error("Bad Request", str(error))
        if errors:
            missing = any(error.validator == "required" for error in errors) and "422" in operation["responses"]
            return (422 if missing else 400), _error("Bad Request", errors[0].message)
        name = operation["operationId"]
        kind = {"createRegisteredModel": "registered_models", "createModelVersion": "model_versions"}.get(
            name, "artifacts"
        )
        parent = sent.get("registeredModelId") or ids.get("modelversionId")
        above = {"model_versions": "registered_models", "artifacts": "model_versions"}.get(kind)
        if above and not any(one["id"] == parent for one in self.objects[above]):
            return (404 if kind == "artifacts" else 400), _error("Not Found", f"no {above} with id {parent}")
        if any(one["name"] == sent["name"] and one[".parent"] == parent for one in self.objects[kind]):
            return 409, _error("Conflict", f"{sent['name']} already exists")
        now = str(int(time.time() * 1000))
        made = {**sent, "id": str(1 + sum(map(len, self.objects.values()))), ".parent": parent}
        made |= {"createTimeSinceEpoch": now, "lastUpdateTimeSinceEpoch": now}
        self.objects[kind].append(made)
        return 201, _shown(made)

    def _got(self, operation: Object, query: Mapping[str, str], ids: Mapping[str, str]) -> tuple[int, Object]:
        name = operation["operationId"]
        kind = "registered_models" if "RegisteredModel" in name and "Versions" not in name else "model_versions"
        kind = "artifacts" if "Artifacts" in name else kind
        items = self.objects[kind]
        if name.startswith("find"):
            like = re.compile(_like(query["name"]))
            parent = query.get("parentResourceId")
            found = [one for one in items if like.fullmatch(one["name"]) and one[".parent"] == parent]
            return (200, _shown(found[0])) if len(found) == 1 else (404, _error("Not Found", f"{len(found)} found"))
        if ids:
            items = [one for one in items if one[".parent"] == next(iter(ids.values()))]
        start, size = int(query.get("nextPageToken") or 0), int(query.get("pageSize") or 20)
        shown = [_shown(one) for one in items[start : start + size]]
        more = str(start + size) if start + size < len(items) else ""
        return 200, {"items": shown, "nextPageToken": more, "pageSize": size, "size": len(shown)}


def _operation(path: str, verb: str) -> tuple[Object, list[Object], Mapping[str, str]] | None:
    for template, item in SPEC["paths"].items():
        matched = re.fullmatch(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(template)), path)
        if matched and verb in item:
            listed = [*item.get("parameters", ()), *item[verb].get("parameters", ())]
            return item[verb], listed, matched.groupdict()
    return None


def _like(name: str) -> str:
    return "".join({"%": ".*", "_": "."}.get(character, re.escape(character)) for character in name)


def _error(code: str, message: str) -> Object:
    return {"code": code, "message": message}


def _shown(one: Object) -> Object:
    return {key: value for key, value in one.items() if key != ".parent"}


@contextmanager
def standing_in() -> Iterator[StandIn]:
    """Start the stand-in for the duration of the block."""
    registry = StandIn()
    thread = threading.Thread(target=registry.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield registry
    finally:
        registry.server.shutdown()
        registry.server.server_close()
        thread.join()
