"""Registration of a run's model in the Kubeflow Model Registry, with its metrics and its origin.

REST API v1alpha3: ``api/openapi/model-registry.yaml`` of github.com/kubeflow/model-registry, commit bd07139 (after
release 0.3.8). Its package ``model-registry`` (0.3.18) is not used: without a token it sends that of the pod's service
account to any registry; it takes the registry's matches by ``LIKE``, where ``_`` and ``%`` stand for other characters,
for the model of that name; and it cannot complete a registration that was interrupted.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlencode

from pydantic import BaseModel, Field, ValidationError

import fedloom
from fedloom.cluster.api import SERVICE_ACCOUNT
from fedloom.core.files import read_file
from fedloom.core.urls import is_url, service_url
from fedloom.core.words import parsed_json
from fedloom.data.problem import TrainedPrivately
from fedloom.errors import DataError, ExperimentError, FedloomError, RefusedError, StorageError, argument
from fedloom.kubeflow.client import read_token
from fedloom.kubeflow.steps import say, step
from fedloom.runs.files import EXPERIMENT, SUMMARY
from fedloom.runs.folder import RunFolder
from fedloom.tasks.names import GROUPS, headline_of, metrics_of, validation_value

API = "/api/model_registry/v1alpha3"
NEEDED = f"{argument('registry')} is the URL to which {API} is appended"
TIMEOUT_S = 30.0
"""Timeout to connect, and between two parts of an answer, in seconds."""
ANSWER_BYTES = 16 << 20
"""Largest answer that is read."""
PAGE, MOST_PAGES = 100, 10_000
"""Objects per page of a list, and pages that are read."""

TOKEN_VARIABLE = "FEDLOOM_REGISTRY_TOKEN"
"""Environment variable with the bearer token, or @FILE, which is read for each request."""

DIGEST = "checkpoint_digest"
"""Property that distinguishes two registrations."""

NAME = re.compile(r"\S(?:.{0,126}\S)?")
"""Pattern of the names of models and versions."""

INT32 = 999_999_999
"""Largest whole number that the API's schema takes; larger ones are registered as text."""


class _Conflict(ExperimentError):
    """An object of this name exists."""


class _Entry(BaseModel):
    """Object of the registry, as far as it is read."""

    id: str
    name: str | None = None
    uri: str | None = None
    properties: dict[str, dict[str, Any]] | None = Field(default=None, alias="customProperties")


class _Page(BaseModel):
    items: list[_Entry]
    next: str | None = Field(default=None, alias="nextPageToken")


T = TypeVar("T", _Entry, _Page)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Treat redirects as errors: a registry sends none, and a login page must not receive the token."""

    def redirect_request(self, *_: Any) -> None:
        """Follow no redirect."""


class ModelRegistry:
    """Model registry at a URL, with the token of ``$FEDLOOM_REGISTRY_TOKEN``; ``$SSL_CERT_FILE`` names certificates.

    Raise ExperimentError if the URL is missing or invalid.
    """

    def __init__(self, url: str | None) -> None:
        option, form = argument("registry"), "a URL such as https://registry.example"
        self.url = service_url(url or "", option, form, key="registry", path=True).removesuffix(API)
        self._opener = urllib.request.build_opener(_NoRedirect)

    def ensure(self, collection: str, path: str, body: Mapping[str, Any]) -> tuple[_Entry, bool]:
        """Find an object by its name in a list, or create it; return it, and True if it was created.

        Raise RefusedError if the registry denies access; StorageError if it cannot be reached or fails; ExperimentError
        if the URL is not a registry's, or it rejects the request; DataError if an answer is not of its API.

        Parameters
        ----------
        collection, path
            Paths of the list, and for the request that creates it.
        """
        if (existing := self._named(collection, body["name"])) is not None:
            return existing, False
        try:
            return self._call(_Entry, path, body), True
        except _Conflict:  # another process has just created it
            if (existing := self._named(collection, body["name"])) is None:
                raise
            return existing, False

    def _named(self, collection: str, name: str) -> _Entry | None:
        query = {"pageSize": str(PAGE)}
        for _ in range(MOST_PAGES):
            page = self._call(_Page, f"{collection}?{urlencode(query)}")
            if (entry := next((item for item in page.items if item.name == name), None)) is not None:
                return entry
            if not page.next:
                return None
            query["nextPageToken"] = page.next
        raise self._other_service(f"the list {collection} does not end")

    def _call(self, answer_type: type[T], path: str, body: Mapping[str, Any] | None = None) -> T:
        """Send a GET request or, with a body, a POST request, and return its answer."""
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{API}{path}", data, headers)
        if token := os.environ.get(TOKEN_VARIABLE):
            request.add_unredirected_header("Authorization", f"Bearer {read_token(token)}")
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                return answer_type.model_validate_json(answer.read(ANSWER_BYTES))
        except ValidationError as error:
            raise self._other_service(f"{error.errors()[0]['msg']} in an answer") from error
        except urllib.error.HTTPError as error:
            raise self._failure(f"{request.get_method()} {path.partition('?')[0]}", error) from error
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
            reason = getattr(error, "reason", None) or error
            raise StorageError(
                f"{self.url} cannot be reached: {reason}", hint="check the URL and the network"
            ) from error

    def _other_service(self, reason: str) -> DataError:
        return DataError(f"{self.url} does not answer as a model registry does: {reason}.", hint=NEEDED)

    def _failure(self, action: str, error: urllib.error.HTTPError) -> FedloomError:
        status, message = error.code, str(error.reason)
        with suppress(OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            message = parsed_json(error.read(ANSWER_BYTES))["message"]
        failure = f"{self.url}: {action}: {' '.join(str(message).split())[:500]} (status {status})"
        if status in (401, 403) or 300 <= status < 400:  # a redirect to a login page
            return RefusedError(failure, hint=f"set ${TOKEN_VARIABLE} to a valid token, or to @FILE")
        if 400 <= status < 500 and status != 429:
            return (_Conflict if status == 409 else ExperimentError)(failure, hint=NEEDED, key="registry")
        return StorageError(failure, hint="retry later")


class Registered(NamedTuple):
    """Registered version of a model: its names, its ids in the registry, and True if it did not exist before."""

    model: str
    version: str
    model_id: str
    version_id: str
    created: bool


def register_run(
    registry: ModelRegistry,
    run: str,
    *,
    model: str | None = None,
    version: str | None = None,
    checkpoint: str = "last",
    uri: str | None = None,
    pipeline_run: str | None = None,
) -> Registered:
    """Register a run's model: a RegisteredModel, a ModelVersion and a ModelArtifact.

    The same checkpoint under the same names is registered once, whatever happens in between.

    Raise DataError if the run is not finished, or has no such checkpoint; ExperimentError if a name is invalid, or the
    version exists with another checkpoint or URI; FedloomError as :meth:`ModelRegistry.ensure`.

    Parameters
    ----------
    run
        Folder of a finished run, or its URL.
    model, version
        Their names; None: the experiment's name, and ``round-R-`` with 12 digits of the checkpoint's digest.
    checkpoint
        ``last``, ``best`` or a round.
    uri
        URL of the run's folder for those who serve the model; None: the URL of a published run, else none.
    pipeline_run
        Id of the Kubeflow run in which the model was trained.
    """
    folder = RunFolder.open(run)
    if not folder.is_finished:
        raise DataError(f"{run} is not finished: it has no {SUMMARY}.", hint="register it when it has ended")
    round, digest = _checkpoint(folder, checkpoint)
    summary = folder.json(SUMMARY)
    name, version = model or str(summary["name"]), version or f"round-{round}-{digest[:12]}"
    for key, text in (("name", name), ("version", version)):
        if not NAME.fullmatch(text):
            raise ExperimentError(
                f"{argument(key)} must have 1 to 128 characters, without spaces at its ends (got {text!r}).", key=key
            )
    if uri is None and is_url(run):
        uri = run.rstrip("/")
    version_properties = properties(folder, summary, round, digest, pipeline_run)
    description = f"{summary['algorithm']}, {summary['dataset']}, seed {summary['seed']}"
    model_body = {"name": name, "description": f"Personalized federated model of {summary['dataset']}"}
    parent, _ = registry.ensure("/registered_models", "/registered_models", model_body)
    body: dict[str, Any] = {"name": version, "registeredModelId": parent.id, "state": "LIVE"}
    body |= {"description": f"{description}, round {round}", "customProperties": version_properties}
    entry, is_created = registry.ensure(f"/registered_models/{parent.id}/versions", "/model_versions", body)
    _check_same(name, version, ((entry.properties or {}).get(DIGEST) or {}).get("string_value"), digest, DIGEST)
    path = f"/model_versions/{entry.id}/artifacts"
    artifact: dict[str, Any] = {"artifactType": "model-artifact", "name": version, "state": "LIVE"}
    artifact |= {"modelFormatName": "fedloom", "modelFormatVersion": "1", **_source(pipeline_run)}
    artifact |= {"customProperties": {DIGEST: version_properties[DIGEST]}, **({} if uri is None else {"uri": uri})}
    _check_same(name, version, registry.ensure(path, path, artifact)[0].uri, uri, "uri")
    return Registered(name, version, parent.id, entry.id, is_created)


@step
def register_task(
    model: Path, registry: str, run_id: str, name: str = "", version: str = "", checkpoint: str = "last", uri: str = ""
) -> str:
    """Register a run's model as a task of a pipeline: see :func:`register_run`; return the version's id."""
    entry = register_run(
        ModelRegistry(registry),
        str(model),
        model=name or None,
        version=version or None,
        checkpoint=checkpoint,
        uri=uri or None,
        pipeline_run=run_id,
    )
    say(f"{entry.model} {entry.version}: version {entry.version_id} of model {entry.model_id} in {registry}")
    return entry.version_id


def properties(
    folder: RunFolder, summary: Mapping[str, Any], round: int, digest: str, pipeline_run: str | None
) -> dict[str, dict[str, Any]]:
    """Return the custom properties of a version, as values of the registry's API.

    Metrics are those of the checkpoint's round: on test examples for each group of clients, and the headline metric on
    validation examples. A round that was not evaluated has none.
    """
    private = TrainedPrivately.from_summary(summary.get("training_privacy"))
    result: dict[str, Any] = {key: summary[key] for key in ("algorithm", "dataset", "model", "seed", "rounds")}
    result |= {
        "run": summary["name"],
        "round": round,
        DIGEST: digest,
        "experiment_sha256": hashlib.sha256(read_file(folder.path / EXPERIMENT)).hexdigest(),
        "fedloom_version": fedloom.__version__,
        "pipeline_run_id": pipeline_run,
        **_privacy(private),
        **_metrics(folder, round),
    }
    return {key: _value(value) for key, value in result.items() if value is not None and value != ""}


def _checkpoint(folder: RunFolder, checkpoint: str) -> tuple[int, str]:
    from fedloom.engine.trained import check_checkpoint  # imports torch
    from fedloom.runs.checkpoint import Checkpoints

    state = Checkpoints(folder.checkpoints).load(check_checkpoint(checkpoint))
    return state.round, state.digest


def _privacy(private: TrainedPrivately | None) -> dict[str, Any]:
    if private is None:
        return {"privacy": "not differentially private"}
    claim = {"privacy": str(private), "privacy_protects": private.unit, "privacy_neighbours": private.neighbouring}
    return claim | {"privacy_noise": private.noise, "epsilon": private.epsilon, "delta": private.delta}


def _metrics(folder: RunFolder, round: int) -> dict[str, float]:
    line = folder.evaluation_of(round)
    if line is None:
        return {}
    scores = {
        f"test_{group}_{metric}_{statistic}": value
        for group in GROUPS
        for metric, values in metrics_of(line.get(group) or {}).items()
        for statistic, value in values._asdict().items()
        if statistic in ("mean", "worst", "pooled") and value is not None
    }
    if (validation := validation_value(line)) is not None:
        name = headline_of(line).name if line.get("validation_pooled") is not None else "loss"
        scores[f"validation_{name}"] = validation
    return scores


def _value(value: Any) -> dict[str, Any]:
    """Return a value as the API's MetadataValue."""
    if isinstance(value, float):
        return {"metadataType": "MetadataDoubleValue", "double_value": value}
    if isinstance(value, int) and abs(value) <= INT32:
        return {"metadataType": "MetadataIntValue", "int_value": str(value)}
    return {"metadataType": "MetadataStringValue", "string_value": str(value)}


def _source(pipeline_run: str | None) -> dict[str, str]:
    """Return the fields of a ModelArtifact that name the pipeline run, as its schema describes them."""
    if pipeline_run is None:
        return {}
    source = {"modelSourceKind": "pipelines", "modelSourceClass": "pipelinerun", "modelSourceId": pipeline_run}
    namespace = SERVICE_ACCOUNT / "namespace"  # of the pod, in a pipeline
    return source | ({"modelSourceGroup": namespace.read_text().strip()} if namespace.exists() else {})


def _check_same(model: str, version: str, actual: str | None, expected: str | None, name: str) -> None:
    if actual != expected:
        raise ExperimentError(
            f"Version {version} of {model} is registered with {name} {actual or 'unset'}, not {expected or 'unset'}.",
            hint=f"give another name with {argument('version')}",
            key="version",
            found=actual,
        )
