"""Kubeflow installation: its settings, and requests to its Pipelines API by kfp's generated client.

``kfp.Client``, which wraps the same generated client, has no timeouts, repeats a failed first request for 25 s, keeps a
namespace in the home folder, and gives a run no description by which it is found again after a lost answer.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import Field

from fedloom.cluster.settings import settings_from_file
from fedloom.core.settings import Settings
from fedloom.core.urls import service_url
from fedloom.core.words import parsed_json
from fedloom.errors import ExperimentError, FedloomError, RefusedError, StorageError, argument

log = logging.getLogger("fedloom.kubeflow")

IN_CLUSTER = "in-cluster"
"""Host that stands for the API's Service, with the token that Kubeflow mounts into a pod."""
IN_CLUSTER_HOST = "http://ml-pipeline.kubeflow.svc.cluster.local:8888"
TOKEN_FILE = "/var/run/secrets/kubeflow/pipelines/token"
"""Default path of a pod's token for the Pipelines API; ``$KF_PIPELINES_SA_TOKEN_PATH`` overrides it."""

VARIABLES = {"host": "KF_PIPELINES_ENDPOINT", "ca_file": "SSL_CERT_FILE"}
TOKEN_VARIABLES = {"token": "FEDLOOM_KUBEFLOW_TOKEN"}
"""Environment variables for keys that are not given."""

TIMEOUT_S = (8, 60)
"""Timeouts in seconds: to connect, and for a response."""

COMMAND_S, TOKEN_S = 60.0, 300.0
"""Seconds that a command for a token may take, and for which its token is used; tokens last 10 minutes or longer."""

LOG_BYTES = 1 << 20
"""Bytes kept from the end of a log."""

PAGE_SIZE = 200
"""Most items that the API puts on a page of a list."""


class KubeflowSettings(Settings):
    """Kubeflow installation, and how runs are submitted to it."""

    host: str | None = Field(
        default=None, description="URL of Kubeflow Pipelines; or in-cluster: the API's Service, with the pod's token."
    )
    token: str | None = Field(
        default=None, repr=False, description="Bearer token, or @FILE, which is read for each request."
    )
    token_command: str | None = Field(
        default=None, description="Command that prints a bearer token, run without a shell every five minutes."
    )
    ca_file: str | None = Field(default=None, description="File of certificates to trust.")
    namespace: str | None = Field(default=None, description="Your profile's namespace, if Kubeflow has several users.")
    experiment: str = Field(
        default="fedloom", description="Kubeflow experiment that shows the runs; created if needed."
    )
    service_account: str | None = Field(default=None, description="Service account of the runs' pods.")
    pipeline_root: str | None = Field(default=None, description="URL for the runs' artifacts.")
    storage_secret: str | None = Field(default=None, description="Secret with the credentials of `storage`.")
    serve_secret: str | None = Field(
        default=None, description="Secret with the credentials for `serve`: ca.crt; tls.crt and tls.key, or token."
    )
    max_concurrency: int = Field(default=1, ge=1, le=10, description="Runs of a schedule in progress at once.")
    catch_up: bool = Field(default=False, description="Also start missed runs of a schedule, not only the latest.")

    @classmethod
    def from_option(cls, text: str | None, environment: Mapping[str, str] = os.environ) -> KubeflowSettings:
        """Return the settings of an installation, completed from the environment.

        Raise ExperimentError if the file cannot be read, or a setting is invalid.

        Parameters
        ----------
        text
            URL of Kubeflow Pipelines, ``in-cluster``, a YAML file with these settings, or None.
        """
        if text is None or text == IN_CLUSTER or "://" in text:
            settings = cls(host=text)
        else:
            settings = settings_from_file(cls, Path(text))
        identified = settings.token or settings.token_command or settings.host == IN_CLUSTER
        variables = VARIABLES if identified else VARIABLES | TOKEN_VARIABLES
        missing = {
            key: environment[name]
            for key, name in variables.items()
            if getattr(settings, key) is None and environment.get(name)
        }
        return settings.model_copy(update=missing)


def read_token(text: str) -> str:
    """Return a bearer token, read from its file if it is given as ``@FILE``.

    Raise RefusedError if it cannot be read, or is not one line of visible characters; the message does not show it.
    """
    source = text[1:] if text.startswith("@") else "the token"
    try:
        token = Path(source).read_text(encoding="utf-8").strip() if text.startswith("@") else text.strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise RefusedError(f"{source} has no token: {reason}", hint="docs/kubeflow.md#log-in") from None
    if not re.fullmatch(r"[!-~]+", token):
        raise RefusedError(f"{source} is not a token: it must be one line of visible ASCII characters.")
    return token


class TokenCommand:
    """Bearer token that a command prints; its output is never shown.

    Raise ExperimentError if it is not a command; RefusedError if it fails at first; later failures are
    ``StorageError``, since the network may return.
    """

    def __init__(self, command: str) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise ExperimentError(f"token_command is not a command: {error}", key="kubeflow.token_command") from error
        if not self._words:
            raise ExperimentError("token_command is empty.", key="kubeflow.token_command")
        self._token, self._until = "", 0.0
        self()

    def __call__(self) -> str:
        """Return the token, from a new run of the command every ``TOKEN_S`` seconds."""
        if time.monotonic() < self._until:
            return self._token
        try:
            process = subprocess.run(
                self._words, capture_output=True, timeout=COMMAND_S, stdin=subprocess.DEVNULL, check=True
            )
            self._token, self._until = read_token(process.stdout.decode()), time.monotonic() + TOKEN_S
        except (OSError, UnicodeDecodeError, subprocess.SubprocessError, RefusedError) as error:
            printed = (getattr(error, "stderr", None) or b"").decode(errors="replace")
            reason = " ".join(printed.split())[-300:] or getattr(error, "strerror", None) or type(error).__name__
            kind = StorageError if self._token else RefusedError
            raise kind(f"token_command {self._words[0]} failed: {reason}", hint="run it by hand") from None
        return self._token


def token_source(settings: KubeflowSettings) -> Callable[[], str] | None:
    """Return a function that reads the current token; None if none is given.

    Raise ExperimentError if two are given; RefusedError if it cannot be read.
    """
    token = settings.token
    if settings.host == IN_CLUSTER:
        token = token or f"@{os.environ.get('KF_PIPELINES_SA_TOKEN_PATH') or TOKEN_FILE}"
    if token is None:
        return None if settings.token_command is None else TokenCommand(settings.token_command)
    if settings.token_command is not None:
        raise ExperimentError("Give either token or token_command.", key="kubeflow.token")
    read_token(token)
    return functools.partial(read_token, token)


class Conflict(ExperimentError):
    """Name already taken."""


class Kubeflow:
    """API of one installation.

    Raise ExperimentError if the settings name no installation, or kfp is not installed; RefusedError if the token
    cannot be read.
    """

    def __init__(self, settings: KubeflowSettings) -> None:
        try:
            import kfp_server_api
        except ModuleNotFoundError as error:
            raise ExperimentError(
                f"pipelines need the package {error.name}, which is not installed",
                hint="pip install 'fedloom[kubeflow]'",
            ) from error
        from urllib3 import Retry

        option = argument("kubeflow")
        if settings.host is None:
            raise ExperimentError(
                f"Give the URL of Kubeflow Pipelines as {option}, or {IN_CLUSTER} in a pod.", key="kubeflow.host"
            )
        self.settings, self.namespace = settings, settings.namespace
        form = "a URL such as https://kubeflow.example/pipeline"
        host = IN_CLUSTER_HOST if settings.host == IN_CLUSTER else settings.host
        self.host = service_url(host, option, form, key="kubeflow.host", path=True)
        configuration = kfp_server_api.Configuration(host=self.host)
        configuration.ssl_ca_cert = settings.ca_file
        if (token := token_source(settings)) is not None:
            configuration.api_key["authorization"] = ""  # the hook, which is called before each request, fills it in
            configuration.api_key_prefix["authorization"] = "Bearer"
            configuration.refresh_api_key_hook = lambda current: current.api_key.update(authorization=token())
        configuration.retries = Retry(
            total=5,  # about 15 s in all, in which a port-forward may restart
            backoff_factor=0.5,
            status_forcelist=(429, 502, 503, 504),
            allowed_methods=("GET", "DELETE"),  # a POST may have been received, and would be repeated
            raise_on_status=False,
            redirect=False,  # to a login page, or with another method
        )
        self.models: Any = kfp_server_api  # the generated client's classes, for the bodies of requests
        self._client = kfp_server_api.ApiClient(configuration)
        kinds = ("Healthz", "Pipeline", "PipelineUpload", "Experiment", "Run", "RecurringRun")
        self._services = [getattr(kfp_server_api, f"{kind}ServiceApi")(self._client) for kind in kinds]

    def check(self) -> None:
        """Check that this is Kubeflow Pipelines, and that a namespace is given exactly if it is needed.

        Raise FedloomError if another kind of server responds, or the namespace is missing or not allowed.
        """
        try:
            health = self.call("read its health", "healthz_service_get_healthz")
        except ExperimentError as error:
            raise error.with_hint("give the URL of Kubeflow Pipelines, which often ends in /pipeline") from error
        if bool(health.multi_user) != (self.namespace is not None):
            wrong = "multi-user: give your profile's namespace" if health.multi_user else "single-user: leave namespace"
            raise ExperimentError(
                f"This Kubeflow is {wrong} {'in' if health.multi_user else 'out of'} the file of {argument('kubeflow')}"
                f" (got {self.namespace}).",
                key="kubeflow.namespace",
                hint="docs/kubeflow.md#kubeflow-with-several-users",
            )

    def call(self, action: str, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of kfp's generated client; only GET and DELETE are repeated after a failure.

        Raise RefusedError if the installation denies access; StorageError if it cannot be reached or fails;
        ExperimentError if it rejects the request: :class:`Conflict` for a name that is taken.

        Parameters
        ----------
        action
            Description for messages: "cannot WHAT".
        method, arguments, options
            Name of the method, and what it is called with.
        """
        from urllib3.exceptions import HTTPError

        service = next(one for one in self._services if hasattr(one, method))
        try:
            answer = getattr(service, method)(*arguments, _request_timeout=TIMEOUT_S, **options)
        except self.models.ApiException as error:
            raise self._failure(action, error) from error
        except HTTPError as error:
            reason = getattr(error, "reason", None) or error
            raise StorageError(
                f"{self.host} cannot be reached: {reason}", hint="check the URL and the network"
            ) from error
        kind = str(self._client.last_response.getheader("Content-Type"))
        if "json" not in kind:  # it would be read as an object without values
            raise self._login_required(f"it answers with a page ({kind})")
        return answer

    def _failure(self, action: str, error: Any) -> FedloomError:
        """Return the error for an exception of the generated client."""
        headers, status = error.headers or {}, error.status
        text = error.body.decode(errors="replace") if isinstance(error.body, bytes) else str(error.body or error.reason)
        with suppress(ValueError, KeyError, TypeError):
            text = str(parsed_json(text)["message"])
        failure = f"{self}: cannot {action}: {' '.join(text.split())[:500]} (status {status})"
        if status == 401 or "html" in str(headers.get("Content-Type")):
            return self._login_required(failure)
        if 300 <= status < 400:
            return self._login_required(f"it redirects to {str(headers.get('Location')).partition('?')[0]}")
        if status == 403:
            return RefusedError(
                failure, hint=f"check namespace in the file of {argument('kubeflow')}, and the account's rights there"
            )
        if status == 409:
            return Conflict(failure)
        if 400 <= status < 500 and status != 429:
            return ExperimentError(failure)
        return StorageError(failure, hint="retry later")

    def _login_required(self, answer: str) -> RefusedError:
        return RefusedError(
            f"{self}: the request is not accepted without a valid token: {answer}",
            hint=f"check the URL, and give token_command in the file of {argument('kubeflow')}: kubectl create token "
            f"default-editor -n {self.namespace or 'PROFILE'} --audience=pipelines.kubeflow.org",
        )

    def __str__(self) -> str:
        """Return host and namespace."""
        return self.host + (f", namespace {self.namespace}" if self.namespace else "")

    def named(self, kind: str, name: str, *parents: str, **owner: str) -> Any:
        """Return the object of a kind, such as ``pipeline_version``, with this display name; None if there is none."""
        by_name = {"predicates": [{"operation": 1, "key": "display_name", "stringValue": name}]}  # 1: equals
        method = f"{kind.removesuffix('_version')}_service_list_{kind}s"
        page = self.call(f"look for {kind} {name}", method, *parents, filter=json.dumps(by_name), **owner)
        return next(iter(getattr(page, f"{kind}s") or ()), None)

    def recurring_runs(self, **owner: str) -> Iterator[Any]:
        """Yield the recurring runs of every page of their list."""
        token: str | None = ""
        while token is not None:
            method = "recurring_run_service_list_recurring_runs"
            page = self.call("list the schedules", method, page_token=token, page_size=PAGE_SIZE, **owner)
            yield from page.recurring_runs or ()
            token = page.next_page_token or None

    def in_namespace(self) -> dict[str, str]:
        """Return the argument ``namespace`` of a request, if there is any."""
        return {} if self.namespace is None else {"namespace": self.namespace}

    def version(self) -> str | None:
        """Return the release that the installation reports; None if there is none, as by the API's own port."""
        self.call("read its health", "healthz_service_get_healthz")
        health = parsed_json(self._client.last_response.data)
        names = ("apiServerTagName", "frontendTagName")  # frontend/server/handlers/healthz.ts
        return next((str(health[name]) for name in names if health.get(name)), None)

    def run(self, run: str) -> Any:
        """Return a run, with ``state``, ``error`` and ``run_details.task_details``; raises like :meth:`call`."""
        return self.call(f"read run {run}", "run_service_get_run", run)

    def log(self, run: str, pod: str) -> str:
        """Return the end of the log of a run's pod, even after the pod is deleted; empty if it cannot be read.

        The endpoint is not in the generated client: Kubeflow streams logs outside of its gRPC gateway.
        """
        from urllib3.exceptions import HTTPError

        path, end = "/apis/v1alpha1/runs/{run}/nodes/{pod}/log", b""
        request = {"auth_settings": ["Bearer"], "_preload_content": False, "_request_timeout": TIMEOUT_S}
        try:
            for piece in self._client.call_api(path, "GET", {"run": run, "pod": pod}, **request).stream(LOG_BYTES):
                end = (end + piece)[-LOG_BYTES:]
        except (self.models.ApiException, HTTPError, FedloomError) as error:  # the failure is reported without it
            log.debug("cannot read the log of %s: %s", pod, error)
        return end.decode(errors="replace")

    def link(self, identity: str, *, kind: str = "runs") -> str:
        """Return the URL of the page of a run or another object in the user interface."""
        return f"{self.host}/#/{kind}/details/{identity}"
