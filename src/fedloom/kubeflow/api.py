"""Client of the Kubeflow Pipelines API, v2beta1, for submitting; every failure is a class of ``fedloom.errors``."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from fedloom.errors import ExperimentError, FedloomError, StorageError, argument
from fedloom.kubeflow.authentication import (
    COOKIE,
    Credential,
    Place,
    asks_for_login,
    body_text,
    explain_denial,
    login_required,
    message_of,
)

log = logging.getLogger("fedloom.kubeflow")

TIMEOUT_S = (8, 60)
"""Timeouts in seconds: to connect, and for a response."""

OUTAGE_S = 30.0
"""Seconds for which requests to an installation that has answered before are repeated: a restarted port-forward."""

LOG_BYTES = 1 << 20
"""Bytes kept from the end of a log."""

EQUALS = 1

PAGE_SIZE = 200
"""Most items that the API puts on a page of a list."""


class Conflict(ExperimentError):
    """Name already taken."""


class Gone(ExperimentError):
    """Requested object not found."""


class Kubeflow:
    """API of one installation.

    Every method raises ``RefusedError`` if the installation denies access, ``StorageError`` if it cannot be reached or
    fails, and ``ExperimentError`` if it rejects a request as invalid.

    Parameters
    ----------
    host
        URL of the API, such as ``https://kubeflow.example/pipeline``.
    namespace
        Profile of the user; None on a single-user installation.
    credential
        Bearer token or cookie; None if none is needed.
    ca_file
        Certificates to trust; None for the default ones.

    Raises
    ------
    ExperimentError
        If kfp is not installed.
    """

    def __init__(
        self, host: str, namespace: str | None = None, credential: Credential | None = None, ca_file: str | None = None
    ) -> None:
        try:
            import kfp_server_api
        except ModuleNotFoundError as error:
            raise ExperimentError(
                f"pipelines need the package {error.name}, which is not installed",
                hint="pip install 'fedloom[kubeflow]'",
            ) from error
        from urllib3 import Retry

        configuration = kfp_server_api.Configuration()
        configuration.host = host
        configuration.ssl_ca_cert = ca_file
        is_cookie = credential is not None and credential.name == COOKIE
        self._credential, self._cookie = credential, credential if is_cookie else None
        if credential is not None and not is_cookie:
            configuration.api_key["authorization"] = ""  # the hook, which is called before each request, fills it in
            configuration.api_key_prefix["authorization"] = "Bearer"
            configuration.refresh_api_key_hook = credential.refresh_api_key_hook
        configuration.retries = Retry(
            total=3,
            backoff_factor=0.5,
            status_forcelist=(429, 502, 503, 504),
            allowed_methods=("GET", "DELETE"),  # a POST may have been received, and would be repeated
            raise_on_status=False,
            redirect=False,  # to a login page, or with another method
        )
        client = kfp_server_api.ApiClient(configuration)
        self.models: Any = kfp_server_api  # the generated client's classes, for the bodies of requests
        self._client = client
        self._health = kfp_server_api.HealthzServiceApi(client)
        self._pipelines = kfp_server_api.PipelineServiceApi(client)
        self._uploads = kfp_server_api.PipelineUploadServiceApi(client)
        self._experiments = kfp_server_api.ExperimentServiceApi(client)
        self._runs = kfp_server_api.RunServiceApi(client)
        self._place = Place(host, namespace)
        self._has_answered = False
        self.host = host
        self.namespace = namespace

    def check(self) -> None:
        """Check that this is Kubeflow Pipelines, and that a namespace is given exactly if it is needed.

        Raises
        ------
        ExperimentError
            If another kind of server responds, or the namespace is missing or not allowed.
        """
        from urllib3.exceptions import HTTPError, MaxRetryError, ProtocolError

        try:
            health, _, headers = self._send(
                self._health.healthz_service_get_healthz_with_http_info, _request_timeout=TIMEOUT_S
            )
        except self.models.ApiException as error:
            if error.status == 404:
                raise ExperimentError(self._not_kubeflow("has no such page")) from error
            if _is_xml(error.body):
                raise ExperimentError(self._not_kubeflow("looks like an object store (it answers in XML)")) from error
            raise self._failure("reach it", error) from error
        except HTTPError as error:
            cause = error.reason if isinstance(error, MaxRetryError) else error
            if isinstance(cause, ProtocolError):
                speaks = "does not speak HTTP/1.1; it may be a gRPC port"
                raise ExperimentError(self._not_kubeflow(speaks)) from error
            raise self._unreachable(error) from error
        self._has_answered = True
        if "json" not in str(headers.get("Content-Type")):
            raise ExperimentError(self._not_kubeflow(f"answers with a page of type {headers.get('Content-Type')}"))
        if health.multi_user and self.namespace is None:
            raise ExperimentError(
                f"This Kubeflow is multi-user: give your profile's namespace in the file of {argument('kubeflow')}.",
                key="kubeflow.namespace",
            )
        if not health.multi_user and self.namespace is not None:
            raise ExperimentError(
                f"This Kubeflow is single-user: leave namespace out of {argument('kubeflow')} (got {self.namespace}).",
                key="kubeflow.namespace",
            )

    def _not_kubeflow(self, found: str) -> str:
        return (
            f"{self.host}/apis/v2beta1/healthz {found}. Give the URL of Kubeflow Pipelines, which "
            f"often ends in /pipeline, and a token if it requires a login."
        )

    def pipeline(self, name: str) -> str | None:
        """Return the id of a pipeline, given its name; None if there is none."""
        find = self._pipelines.pipeline_service_list_pipelines
        found = self._named("pipeline", name, find, **self.in_namespace()).pipelines
        return found[0].pipeline_id if found else None

    def make_pipeline(self, name: str, description: str) -> str:
        """Create a pipeline without versions, and return its id."""
        body = self.models.V2beta1Pipeline(display_name=name, description=description, **self.in_namespace())
        made = self._ask(f"create the pipeline {name}", self._pipelines.pipeline_service_create_pipeline, body)
        return str(made.pipeline_id)

    def delete_pipeline(self, pipeline: str) -> None:
        """Delete a pipeline."""
        self._ask("delete a pipeline", self._pipelines.pipeline_service_delete_pipeline, pipeline)

    def version(self, pipeline: str, name: str) -> str | None:
        """Return the id of a version of a pipeline, given its name; None if there is none."""
        find = self._pipelines.pipeline_service_list_pipeline_versions
        found = self._named("version", name, find, pipeline).pipeline_versions
        return found[0].pipeline_version_id if found else None

    def upload(self, pipeline: str, name: str, file: Path, description: str) -> str:
        """Upload a version of a pipeline, and return its id."""
        made = self._ask(
            f"upload the version {name}",
            self._uploads.upload_pipeline_version,
            str(file),
            name=name,
            pipelineid=pipeline,
            description=description,
        )
        return str(made.pipeline_version_id)

    def version_spec(self, pipeline: str, version: str) -> Any:
        """Return the content of a version; with settings of pods, as ``pipeline_spec`` and ``platform_spec``."""
        get = self._pipelines.pipeline_service_get_pipeline_version
        return self._ask("read a version", get, pipeline, version).pipeline_spec

    def delete_version(self, pipeline: str, version: str) -> None:
        """Delete a version of a pipeline."""
        self._ask("delete a version", self._pipelines.pipeline_service_delete_pipeline_version, pipeline, version)

    def experiment(self, name: str) -> str | None:
        """Return the id of a Kubeflow experiment (a folder of runs), given its name; None if there is none."""
        find = self._experiments.experiment_service_list_experiments
        found = self._named("experiment", name, find, **self.in_namespace()).experiments
        return found[0].experiment_id if found else None

    def make_experiment(self, name: str) -> str:
        """Create a Kubeflow experiment, and return its id."""
        body = self.models.V2beta1Experiment(display_name=name, **self.in_namespace())
        made = self._ask(f"create the experiment {name}", self._experiments.experiment_service_create_experiment, body)
        return str(made.experiment_id)

    def delete_experiment(self, experiment: str) -> None:
        """Delete a Kubeflow experiment."""
        self._ask("delete an experiment", self._experiments.experiment_service_delete_experiment, experiment)

    def start(
        self,
        name: str,
        experiment: str,
        pipeline: str,
        version: str,
        arguments: dict[str, Any],
        service_account: str | None,
        root: str | None,
        description: str,
    ) -> str:
        """Start a run, and return its id."""
        body = self.models.V2beta1Run(
            display_name=name,
            description=description,
            experiment_id=experiment,
            pipeline_version_reference=self.models.V2beta1PipelineVersionReference(pipeline, version),
            runtime_config=self.models.V2beta1RuntimeConfig(parameters=arguments, pipeline_root=root),
            service_account=service_account,
        )
        return str(self._ask(f"start the run {name}", self._runs.run_service_create_run, body).run_id)

    def runs(self, name: str, experiment: str, description: str) -> list[str]:
        """Return the ids of the runs with a name and a description in a Kubeflow experiment."""
        find = self._runs.run_service_list_runs
        found = self._named("run", name, find, experiment_id=experiment, **self.in_namespace()).runs
        return [one.run_id for one in found or () if one.description == description]

    def run(self, run: str) -> Any:
        """Return a run, with ``state``, ``error`` and ``run_details.task_details``."""
        return self._ask(f"look at the run {run}", self._runs.run_service_get_run, run)

    def log(self, run: str, pod: str) -> str:
        """Return the log of a run's pod, even after the pod is deleted; empty if it cannot be read.

        The endpoint is not in the generated client: Kubeflow streams logs outside of its gRPC gateway.
        """
        from urllib3.exceptions import HTTPError

        path = "/apis/v1alpha1/runs/{run}/nodes/{pod}/log"
        end = b""  # end of the log, where a failure is recorded
        try:
            answer = self._send(
                self._client.call_api,
                path,
                "GET",
                {"run": run, "pod": pod},
                auth_settings=["Bearer"],
                _preload_content=False,
                _request_timeout=TIMEOUT_S,
            )
            for piece in answer.stream(LOG_BYTES):
                end = (end + piece)[-LOG_BYTES:]
        except (self.models.ApiException, HTTPError) as error:  # the run's failure is reported without it
            log.debug("cannot read the log of %s: %s", pod, error)
        return end.decode(errors="replace")

    def terminate(self, run: str) -> None:
        """Stop a run."""
        self._ask(f"stop the run {run}", self._runs.run_service_terminate_run, run)

    def delete_run(self, run: str) -> None:
        """Delete a run."""
        self._ask(f"delete the run {run}", self._runs.run_service_delete_run, run)

    def page(self, identity: str, *, kind: str = "runs") -> str | None:
        """Return the URL of the page of a run or another object; None if this host serves no user interface."""
        return f"{self.host}/#/{kind}/details/{identity}" if self._has_interface else None

    def link(self, run: str) -> str:
        """Return the URL of a run's page, or a description with its id if this host serves no user interface."""
        return self.page(run) or f"run {run} in the user interface"

    @cached_property
    def _has_interface(self) -> bool:
        """True if this host serves a user interface; a port-forward to the API's own port does not."""
        from urllib3.exceptions import HTTPError

        try:
            answer = self._send(
                self._client.call_api,
                "/",
                "GET",
                auth_settings=["Bearer"],
                _preload_content=False,
                _request_timeout=TIMEOUT_S,
            )
        except (self.models.ApiException, HTTPError):
            return False
        return answer.status == 200 and "html" in str(answer.headers.get("Content-Type"))

    def request(self, what: str, service: str, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of one of the generated services.

        Parameters
        ----------
        what
            Description for messages: "not allowed to WHAT".
        """
        return self._ask(what, getattr(getattr(self.models, service)(self._client), method), *arguments, **named)

    def pages(self, what: str, service: str, method: str, items: str, *arguments: Any, **named: Any) -> Iterator[Any]:
        """Yield the items of every page of a list."""
        token: str | None = ""
        while token is not None:
            paging = {"page_token": token, "page_size": PAGE_SIZE}
            found = self.request(what, service, method, *arguments, **paging, **named)
            yield from getattr(found, items) or ()
            token = found.next_page_token or None

    def in_namespace(self) -> dict[str, str]:
        """Return the argument ``namespace`` of a list, if there is any."""
        return {} if self.namespace is None else {"namespace": self.namespace}

    def _named(self, kind: str, name: str, find: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Return a list of the objects of a kind that have this name."""
        by_name = {"predicates": [{"operation": EQUALS, "key": "display_name", "stringValue": name}]}
        return self._ask(f"look for the {kind} {name}", find, *arguments, filter=json.dumps(by_name), **named)

    def _ask(self, what: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        from urllib3.exceptions import HTTPError, MaxRetryError

        until = time.monotonic() + (OUTAGE_S if self._has_answered else 0.0)
        while True:
            try:
                found = self._send(call, *arguments, _request_timeout=TIMEOUT_S, **named)
                break
            except self.models.ApiException as error:
                raise self._failure(what, error) from error
            except HTTPError as error:
                # urllib3 retries only what may be repeated, so this is not a POST that may have been received.
                if not isinstance(error, MaxRetryError) or time.monotonic() > until:
                    raise self._unreachable(error) from error
        if "html" in str(self._client.last_response.getheader("Content-Type")):  # read as an object without values
            raise login_required(self._place, "a login page", self._credential)
        return found

    def _send(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call the generated client; call it again if the credential was refused and has been replaced.

        A refused request was not carried out, whatever its method.
        """
        credential, cookie = self._credential, self._cookie
        self._client.cookie = None if cookie is None else cookie.value
        try:
            return call(*arguments, **named)
        except self.models.ApiException as error:
            if not asks_for_login(error) or credential is None or not credential.renew():
                raise
        self._client.cookie = None if cookie is None else cookie.value
        return call(*arguments, **named)

    def _unreachable(self, error: Any) -> StorageError:
        from urllib3.exceptions import MaxRetryError

        why = error.reason if isinstance(error, MaxRetryError) and error.reason is not None else error
        return StorageError(f"{self.host} cannot be reached: {why}", hint="check the URL and the network")

    def _failure(self, what: str, error: Any) -> FedloomError:
        if (denial := explain_denial(what, self._place, error, self._credential)) is not None:
            return denial
        status, message, where = error.status, message_of(error.body or error.reason), self._place
        if status == 404:
            return Gone(f"{where}: cannot {what}: {message}")
        if status == 409:
            return Conflict(f"{where}: cannot {what}: {message}")
        if 400 <= status < 500 and status != 429:
            return ExperimentError(f"{where}: cannot {what}: {message}")
        return StorageError(f"{where}: cannot {what}: status {status}: {message}", hint="retry later")


def _is_xml(body: Any) -> bool:
    """Return True if a response is XML, as object stores send."""
    return body_text(body).lstrip().startswith("<?xml")
