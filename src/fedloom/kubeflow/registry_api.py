"""Client of the Kubeflow Model Registry, REST API v1alpha3; every failure is a class of ``fedloom.errors``.

Source: ``api/openapi/model-registry.yaml`` of github.com/kubeflow/model-registry, commit bd07139 (after release 0.3.8).
The registry matches names by SQL's ``LIKE`` (``internal/db/service``), in which ``_`` and ``%`` stand for other
characters; what it finds is therefore compared with the name.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

from fedloom.core.urls import service_url
from fedloom.core.words import parsed_json
from fedloom.errors import DataError, ExperimentError, FedloomError, RefusedError, StorageError, argument
from fedloom.kubeflow.authentication import secret_text

API = "/api/model_registry/v1alpha3"
TIMEOUT_S = 30.0
"""Timeout to connect, and between two parts of an answer, in seconds."""

ANSWER_BYTES = 16 << 20
"""Largest answer that is read."""

PAGE, MOST_PAGES = 100, 10_000
"""Objects per page of a list, and pages that are read."""


class _NotFound(ExperimentError):
    """The registry has no such object."""


class _Conflict(ExperimentError):
    """An object of this name exists."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Treat redirects as errors: a registry sends none, and a login page must not receive the token."""

    def redirect_request(self, *_: Any) -> None:
        """Follow no redirect."""


class ModelRegistry:
    """Model registry at a URL.

    Every method raises ``RefusedError`` if the registry denies access, ``StorageError`` if it cannot be reached or
    fails, ``ExperimentError`` if the URL is not a registry's or it rejects a request, and ``DataError`` if an answer
    is not of its API.

    Parameters
    ----------
    url
        Its URL, such as ``https://registry.example``, without the path of the API.
    token
        Bearer token; ``@FILE`` is read again before each request. None if none is needed.
    ca_file
        Certificates to trust; None for the default ones.

    Raises
    ------
    ExperimentError
        If the URL or the file of certificates is invalid.
    """

    def __init__(self, url: str, token: str | None = None, ca_file: str | None = None) -> None:
        form = "a URL such as https://registry.example"
        self.url = service_url(url, argument("registry"), form, key="registry", path=True).removesuffix(API)
        self._token = token
        try:
            context = ssl.create_default_context(cafile=ca_file)
        except OSError as error:  # ssl.SSLError is one
            raise ExperimentError(
                f"{ca_file} is not a readable file of certificates: {error}", key="ca_file"
            ) from error
        self._opener = urllib.request.build_opener(_NoRedirect, urllib.request.HTTPSHandler(context=context))

    def model(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return the RegisteredModel of this name, and True if it was created from ``body``."""
        name = {"name": body["name"]}
        return self._found_or_made("/registered_model", name, "/registered_models", "/registered_models", body)

    def version(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return the ModelVersion of this name and ``registeredModelId``, and True if it was created from ``body``."""
        model = body["registeredModelId"]
        name = {"name": body["name"], "parentResourceId": model}
        listed = f"/registered_models/{model}/versions"
        return self._found_or_made("/model_version", name, listed, "/model_versions", body)

    def artifact(self, version: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return the ModelArtifact of this name of a ModelVersion, and True if it was created from ``body``."""
        path = f"/model_versions/{version}/artifacts"
        if (found := self._listed(path, body["name"])) is not None:
            return found, False
        return self._made_or_found(path, path, body)

    def _found_or_made(
        self, one: str, query: Mapping[str, str], listed: str, made: str, body: Mapping[str, Any]
    ) -> tuple[dict[str, Any], bool]:
        try:
            found = self._ask("GET", f"{one}?{urlencode(query)}")
            if found.get("name") == body["name"]:
                return found, False
        except _NotFound:  # no object matches, or several do
            pass
        return self._made_or_found(made, listed, body)

    def _made_or_found(self, made: str, listed: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        try:
            return self._ask("POST", made, body), True
        except _Conflict:  # several match, or another process has just created it
            if (exact := self._listed(listed, body["name"])) is None:
                raise
            return exact, False

    def _listed(self, path: str, name: str) -> dict[str, Any] | None:
        return next((item for item in self._items(path) if item.get("name") == name), None)

    def _items(self, path: str) -> Iterator[dict[str, Any]]:
        token = ""
        for _ in range(MOST_PAGES):
            query = {"pageSize": str(PAGE), **({"nextPageToken": token} if token else {})}
            page = self._ask("GET", f"{path}?{urlencode(query)}")
            items, token = page.get("items") or [], str(page.get("nextPageToken") or "")
            if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
                raise self._other(f"its list {path} has items of another kind")
            yield from items
            if not token:
                return
        raise self._other(f"its list {path} does not end")

    def _ask(self, verb: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request, and return the object that answers it."""
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        request = urllib.request.Request(f"{self.url}{API}{path}", data=data, method=verb)
        request.add_header("Accept", "application/json")
        if data is not None:
            request.add_header("Content-Type", "application/json")
        if self._token is not None:
            request.add_unredirected_header("Authorization", f"Bearer {_bearer(self._token)}")
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                content: bytes = answer.read(ANSWER_BYTES + 1)
        except urllib.error.HTTPError as error:
            raise self._failure(f"{verb} {path.partition('?')[0]}", error) from error
        except (OSError, http.client.HTTPException, ValueError) as error:  # URLError is an OSError
            why = getattr(error, "reason", None) or error
            raise StorageError(f"{self.url} cannot be reached: {why}", hint="check the URL and the network") from error
        found = _object(content)
        if found is None or len(content) > ANSWER_BYTES:
            raise self._other("an answer is not a JSON object")
        return found

    def _other(self, why: str) -> DataError:
        return DataError(f"{self.url} does not answer as a model registry does: {why}.", hint=self._needed)

    @property
    def _needed(self) -> str:
        return f"{argument('registry')} is the URL to which {API} is appended"

    def _failure(self, what: str, error: urllib.error.HTTPError) -> FedloomError:
        status = error.code
        try:
            reply = _object(error.read(ANSWER_BYTES)) or {}
        except (OSError, http.client.HTTPException):
            reply = {}
        message = " ".join(str(reply.get("message") or error.reason or "").split())[:500]
        failure = f"{self.url}: {what}: {message} (status {status})"
        if status == 404 and not {"code", "message"} <= set(reply):
            return ExperimentError(f"{failure}; this is not a model registry.", hint=self._needed, key="registry")
        if status == 401 or 300 <= status < 400:  # a redirect to a login page
            needed = "the token is not accepted" if self._token is not None else "it requires a token"
            return RefusedError(f"{failure}; {needed}", hint="give a valid one in the file of the registry's settings")
        if 400 <= status < 500 and status != 429:
            return _KINDS.get(status, ExperimentError)(failure)
        return StorageError(failure, hint="retry later")


_KINDS: Mapping[int, type[FedloomError]] = {403: RefusedError, 404: _NotFound, 409: _Conflict}
"""Classes of errors by status; of others, ExperimentError."""


def _bearer(token: str) -> str:
    """Return a bearer token, read from its file if it begins with ``@``; raise RefusedError if it is invalid."""
    found, where = secret_text(token), token[1:] if token.startswith("@") else "the token"
    if not re.fullmatch(r"[!-~]+", found):
        raise RefusedError(f"{where} is not a bearer token: it must have visible ASCII characters only.")
    return found


def _object(content: bytes) -> dict[str, Any] | None:
    """Return the JSON object of an answer; None for any other content."""
    try:
        found = parsed_json(content.decode("utf-8"))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
