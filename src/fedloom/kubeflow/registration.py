"""Registration of a run's model in the Kubeflow Model Registry, with its metrics and its origin."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

import fedloom
from fedloom.cluster.settings import completed_from, settings_from_file
from fedloom.core.settings import Settings
from fedloom.data.problem import TrainedPrivately
from fedloom.errors import DataError, ExperimentError, argument
from fedloom.kubeflow.registry_api import ModelRegistry
from fedloom.runs.files import EXPERIMENT, SUMMARY
from fedloom.runs.folder import RunFolder
from fedloom.storage import is_url
from fedloom.storage.folder import read_file
from fedloom.tasks.headline import GROUPS, headline_of, metrics_of, validation_value

VARIABLES = {"url": "FEDLOOM_REGISTRY", "token": "FEDLOOM_REGISTRY_TOKEN", "ca_file": "SSL_CERT_FILE"}
"""Environment variables for keys that are not given."""

FORMAT, FORMAT_VERSION = "fedloom", "1"
"""Model format of a run's folder, in the registry and for KServe."""

DIGEST = "checkpoint_digest"
"""Property that distinguishes two registrations."""

NAME = re.compile(r"\S(?:.{0,126}\S)?")
"""Pattern of the names of models and versions."""

INT32 = 999_999_999
"""Largest whole number that the API's schema takes; larger ones are registered as text."""


class RegistrySettings(Settings):
    """Model registry, and access to it."""

    url: str | None = Field(default=None, description="URL of the registry, without the path of its API.")
    token: str | None = Field(default=None, description="Bearer token, or @FILE, which is reread for each request.")
    ca_file: str | None = Field(default=None, description="File of certificates to trust.")

    @classmethod
    def of(cls, where: str | None, environment: Mapping[str, str] = os.environ) -> RegistrySettings:
        """Return the settings given by a URL or a YAML file, completed from the environment.

        Raises
        ------
        ExperimentError
            If the file cannot be read, or a setting is invalid.
        """
        found = cls(url=where) if where is None or "://" in where else settings_from_file(cls, Path(where))
        return completed_from(found, VARIABLES, environment)

    def connect(self) -> ModelRegistry:
        """Return the registry.

        Raises
        ------
        ExperimentError
            If no URL is given, or a setting is invalid.
        """
        if self.url is None:
            raise ExperimentError(f"Give the URL of the model registry as {argument('registry')}.", key="registry")
        return ModelRegistry(self.url, self.token, self.ca_file)


@dataclass(frozen=True)
class Lineage:
    """Kubeflow run that a model comes from.

    Attributes
    ----------
    run_id, namespace, name
        Id of the run, its namespace (None if it is not known), and its name.
    """

    run_id: str
    namespace: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Registered:
    """Registered version of a model.

    Attributes
    ----------
    model, version
        Their names.
    model_id, version_id
        Their ids in the registry.
    created
        True if the version did not exist before.
    """

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
    lineage: Lineage | None = None,
) -> Registered:
    """Register a run's model: a RegisteredModel, a ModelVersion and a ModelArtifact.

    The same checkpoint under the same names is registered once, whatever happens in between.

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
    lineage
        Kubeflow run in which the model was trained.

    Raises
    ------
    DataError
        If the run is not finished, or has no such checkpoint.
    ExperimentError
        If a name is invalid, or the version exists with another checkpoint or URI.
    FedloomError
        As :class:`~fedloom.kubeflow.registry_api.ModelRegistry`.
    """
    folder = RunFolder.open(run)
    if not folder.is_finished:
        raise DataError(f"{run} is not finished: it has no {SUMMARY}.", hint="register it when it has ended")
    round, digest = _checkpoint(folder, checkpoint)
    summary = folder.json(SUMMARY)
    known = properties(folder, summary, round, digest, lineage)
    name, version = model or str(summary["name"]), version or f"round-{round}-{digest[:12]}"
    for key, text in (("name", name), ("version", version)):
        if not NAME.fullmatch(text):
            raise ExperimentError(
                f"{argument(key)} must have 1 to 128 characters, without spaces at its ends (got {text!r}).", key=key
            )
    if uri is None and is_url(run):
        uri = run.rstrip("/")
    described = f"{summary['algorithm']}, {summary['dataset']}, seed {summary['seed']}"
    found, _ = registry.model({"name": name, "description": f"Personalized federated model of {summary['dataset']}"})
    model_id = _id(found, name)
    body: dict[str, Any] = {"name": version, "registeredModelId": model_id, "state": "LIVE"}
    body |= {"description": f"{described}, round {round}", "customProperties": known}
    made, created = registry.version(body)
    if not created:
        _check_same(name, version, _text(made, DIGEST), digest, DIGEST)
    version_id = _id(made, version)
    artifact: dict[str, Any] = {"artifactType": "model-artifact", "name": version, "state": "LIVE"}
    artifact |= {"modelFormatName": FORMAT, "modelFormatVersion": FORMAT_VERSION, **_source(lineage)}
    artifact |= {"customProperties": {DIGEST: known[DIGEST]}, **({} if uri is None else {"uri": uri})}
    kept, _ = registry.artifact(version_id, artifact)
    _check_same(name, version, kept.get("uri"), uri, "uri")
    return Registered(name, version, model_id, version_id, created)


def properties(
    folder: RunFolder, summary: Mapping[str, Any], round: int, digest: str, lineage: Lineage | None
) -> dict[str, dict[str, Any]]:
    """Return the custom properties of a version, as values of the registry's API.

    Metrics are those of the checkpoint's round: on test examples for each group of clients, and the headline metric on
    validation examples. A round that was not evaluated has none.
    """
    private = TrainedPrivately.of(summary.get("training_privacy"))
    known: dict[str, Any] = {key: summary[key] for key in ("algorithm", "dataset", "model", "seed", "rounds")}
    known |= {
        "run": summary["name"],
        "round": round,
        DIGEST: digest,
        "experiment_sha256": hashlib.sha256(read_file(folder.path / EXPERIMENT)).hexdigest(),
        "fedloom_version": fedloom.__version__,
        **({} if lineage is None else {"pipeline_run_id": lineage.run_id}),
        **_privacy(private),
        **_metrics(folder, round),
    }
    return {key: _value(value) for key, value in known.items() if value is not None and value != ""}


def _checkpoint(folder: RunFolder, checkpoint: str) -> tuple[int, str]:
    from fedloom.runner.trained import check_checkpoint  # imports torch
    from fedloom.runs.checkpoint import Checkpoints

    found = Checkpoints(folder.checkpoints).load(check_checkpoint(checkpoint))
    return found.round, found.digest


def _privacy(private: TrainedPrivately | None) -> dict[str, Any]:
    if private is None:
        return {"privacy": "not differentially private"}
    claim = {"privacy": str(private), "privacy_protects": private.unit, "privacy_neighbours": private.neighbouring}
    return claim | {"privacy_noise": private.noise, "epsilon": private.epsilon, "delta": private.delta}


def _metrics(folder: RunFolder, round: int) -> dict[str, float]:
    line = folder.evaluation_of(round)
    if line is None:
        return {}
    found = {
        f"test_{group}_{metric}_{statistic}": value
        for group in GROUPS
        for metric, values in metrics_of(line.get(group) or {}).items()
        for statistic, value in values._asdict().items()
        if statistic in ("mean", "worst", "pooled") and value is not None
    }
    if (validation := validation_value(line)) is not None:
        name = headline_of(line).name if line.get("validation_pooled") is not None else "loss"
        found[f"validation_{name}"] = validation
    return found


def _value(value: Any) -> dict[str, Any]:
    """Return a value as the API's MetadataValue."""
    if isinstance(value, float):
        return {"metadataType": "MetadataDoubleValue", "double_value": value}
    if isinstance(value, int) and abs(value) <= INT32:
        return {"metadataType": "MetadataIntValue", "int_value": str(value)}
    return {"metadataType": "MetadataStringValue", "string_value": str(value)}


def _source(lineage: Lineage | None) -> dict[str, str]:
    """Return the fields of a ModelArtifact that name the pipeline run, as its schema describes them."""
    if lineage is None:
        return {}
    named = {"modelSourceGroup": lineage.namespace, "modelSourceName": lineage.name}
    source = {"modelSourceKind": "pipelines", "modelSourceClass": "pipelinerun", "modelSourceId": lineage.run_id}
    return source | {key: value for key, value in named.items() if value}


def _id(found: Mapping[str, Any], name: str) -> str:
    if not isinstance(found.get("id"), str):
        raise DataError(f"The registry's answer about {name} has no id.")
    return str(found["id"])


def _text(found: Mapping[str, Any], key: str) -> str | None:
    """Return a custom property that is a text; None without."""
    match found.get("customProperties"):
        case {**known}:
            match known.get(key):
                case {"string_value": str(value)}:
                    return value
    return None


def _check_same(model: str, version: str, found: str | None, wanted: str | None, what: str) -> None:
    if found != wanted:
        raise ExperimentError(
            f"Version {version} of {model} is registered with {what} {found or 'unset'}, not {wanted or 'unset'}.",
            hint=f"give another name with {argument('version')}",
            key="version",
            found=found,
        )
