"""Client of the Kubernetes API for the launcher: objects are dictionaries, failures are FedLoom errors."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from fedloom.cluster.diagnosis import diagnose_refusal
from fedloom.cluster.manifests import Manifest
from fedloom.core.home import expanded
from fedloom.core.words import parsed_json
from fedloom.errors import ExperimentError, FedloomError, RefusedError, WorkerLostError

log = logging.getLogger("fedloom.cluster")

COLLECTIONS: Mapping[str, tuple[str, str]] = {
    "Service": ("/api/v1", "services"),
    "Job": ("/apis/batch/v1", "jobs"),
    "Pod": ("/api/v1", "pods"),
    "Event": ("/api/v1", "events"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "Workflow": ("/apis/argoproj.io/v1alpha1", "workflows"),  # Argo's, of a pipeline's run
}
NEEDED = (
    *((verb, "", "services") for verb in ("get", "list", "create", "delete")),
    *((verb, "batch", "jobs") for verb in ("get", "list", "watch", "create", "delete")),
    *((verb, "", "pods") for verb in ("get", "list")),
    ("get", "", "pods/log"),
)
"""Verb, API group and resource of everything a launcher does; components/federate/rbac.yaml allows these, and events.
"""
FORWARDING = (("get", "", "pods/portforward"), ("create", "", "pods/portforward"))
"""Rights needed to show progress outside of the cluster.

A connection begins with a GET; newer API servers also require create.
"""

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CONNECT_S, READ_S = 10.0, 30.0
PASSING = (429, 500, 502, 503, 504)
"""Status codes of an API server that is overloaded or being replaced."""
ROUTE = re.compile(r"/apis?/.*?/namespaces/[^/]+/(?P<resource>[^/]+)(?P<name>/[^/]+)?(?P<sub>/[^/]+)?")


class Unreachable(WorkerLostError):
    """No response from the API server; everything on the cluster keeps running."""


class LostRights(RefusedError):
    """Refusal of requests that were allowed before; everything on the cluster keeps running."""


AWAY = (Unreachable, LostRights)
"""Errors after which nothing is known about the cluster's objects."""


class Api:
    """Objects of one namespace.

    Credentials are those of $KUBECONFIG, else of the pod this process runs in, else of ``~/.kube/config``.

    Raise ExperimentError if the extra ``kubernetes`` is not installed, or the kubeconfig cannot be read; RefusedError
    if there are no credentials.

    Parameters
    ----------
    namespace
        Default: that of the pod, else of the kubeconfig's context, else ``default``.
    patience_s
        Seconds for which requests are repeated while the API server does not respond, is temporarily unavailable, or
        refuses what it has allowed before: for about a second after its start, it may know no roles
        (kubernetes/kubernetes#121635).
    say
        Called with a line for the user when rights are lost.
    """

    def __init__(
        self, namespace: str | None = None, *, patience_s: float = 20.0, say: Callable[[str], None] = log.warning
    ) -> None:
        try:
            from kubernetes import client
        except ModuleNotFoundError as error:
            raise ExperimentError(
                "backend kubernetes needs the package kubernetes, which is not installed",
                hint="pip install 'fedloom[kubernetes]'",
            ) from error
        own = self._connect()
        self._exceptions = client.exceptions.ApiException
        self.namespace = namespace or own
        self.patience_s = patience_s
        self._say = say
        self._allowed: set[str] = set()  # rights that these credentials have had, as in missing_rights
        self._lost = False  # the user knows that rights are lost

    def _connect(self) -> str:
        """Connect with the current credentials, and return their namespace."""
        from kubernetes import client

        configuration, own = _configuration(client.Configuration())
        configuration.retries = 0  # _call retries: more slowly, and only what may be repeated
        self._client = client.ApiClient(configuration)
        self.server = str(configuration.host)
        return own

    def create(self, manifest: Manifest) -> Manifest | None:
        """Create an object without unknown fields and return it; None if its name is taken."""
        path, strict = self._path(manifest["kind"]), [("fieldValidation", "Strict")]
        object: Manifest | None = self._call("POST", path, query=strict, body=manifest, tolerated=(409,))
        return object

    def read(self, kind: str, name: str) -> Manifest | None:
        """Return an object; None if there is none of that name."""
        existing: Manifest | None = self._call("GET", self._path(kind, name), tolerated=(404,))
        return existing

    def select(self, kind: str, labels: str = "", fields: str = "") -> tuple[list[Manifest], str]:
        """Return the objects that match the selectors, and the resource version from which to watch the collection."""
        query = [("labelSelector", labels), ("fieldSelector", fields)]
        answer = self._call("GET", self._path(kind), query=[(key, value) for key, value in query if value])
        return [*(answer.get("items") or ())], str(answer.get("metadata", {}).get("resourceVersion", ""))

    def delete(self, kind: str, name: str, uid: str | None = None) -> None:
        """Delete an object after the objects that it owns; deletion may continue after this returns.

        Parameters
        ----------
        uid
            Delete the object only if it has this uid, and not a newer one of the same name.
        """
        body: Manifest = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        self._call("DELETE", self._path(kind, name), body=body, tolerated=(404, 409))

    def log(self, pod: str, container: str, lines: int = 10_000) -> str:
        """Return the end of a container's log; empty if it does not exist, or no longer exists."""
        query = [("container", container), ("tailLines", str(lines))]
        path = f"{self._path('Pod', pod)}/log"
        with suppress(RefusedError):  # its node is lost: a missing log is not an error
            return self._call("GET", path, query=query, text=True, tolerated=(400, 404)) or ""
        return ""

    def follow_log(self, pod: str, container: str) -> Iterator[str]:
        """Yield the lines of a container's log, from the first, until the container ends."""
        from urllib3.exceptions import HTTPError

        query = [("container", container), ("follow", "true")]
        try:
            yield from self._lines(self._path("Pod", pod) + "/log", query, read_s=None)
        except self._exceptions as error:
            raise self._failure(error, f"the log of {pod}") from error
        except (HTTPError, OSError) as error:
            raise Unreachable(
                f"the log of {pod} was interrupted: {_innermost(error)}", hint="request the log again"
            ) from error

    def events(self, name: str) -> list[Manifest]:
        """Return the events of an object, oldest first; none if they cannot be read, or not now."""
        try:
            events, _ = self.select("Event", fields=f"involvedObject.name={name}")
        except FedloomError:
            return []
        return sorted(events, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))

    def forward(self, pod: str, port: int) -> Any:
        """Return a connection (``websocket.WebSocket``) to a port of a pod; each message begins with a channel number.

        Raise any exception of the underlying libraries if the connection fails.
        """
        from kubernetes.stream.ws_client import create_websocket, get_websocket_url

        configuration = self._client.configuration
        token = configuration.auth_settings().get("BearerToken", {}).get("value")
        url = get_websocket_url(f"{self.server}{self._path('Pod', pod)}/portforward", [("ports", str(port))])
        return create_websocket(configuration, url, {"authorization": token} if token else {})

    def wait_for_change(self, kind: str, labels: str, version: str, wait_s: float) -> None:
        """Wait until a selected object has changed since a version, or until a timeout."""
        from urllib3.exceptions import HTTPError

        query = [("labelSelector", labels), ("watch", "true"), ("timeoutSeconds", str(max(1, round(wait_s))))]
        query += [("resourceVersion", version)] if version else []
        began = time.monotonic()
        lines = self._lines(self._path(kind), query, read_s=wait_s + 5)
        with suppress(self._exceptions, HTTPError, OSError, ValueError), closing(lines):
            # An error is usually 410: the version is too old; listing gives a new one.
            if any(parsed_json(line).get("type") != "ERROR" for line in islice(lines, 1)):
                return
        # A watch that fails immediately must not become a busy loop.
        time.sleep(max(0.0, min(1.0, wait_s) - (time.monotonic() - began)))

    def missing_rights(self, rights: Sequence[tuple[str, str, str]] = NEEDED) -> list[str]:
        """Return the needed rights that these credentials lack, such as ``create jobs``."""
        missing = []
        for verb, group, name in rights:
            right = f"{verb} {name}"
            if right in self._allowed:
                continue
            resource, _, sub = name.partition("/")
            attributes = {"namespace": self.namespace, "verb": verb, "group": group, "resource": resource}
            review: Manifest = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": attributes | ({"subresource": sub} if sub else {})},
            }
            reviews = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
            answer = self._call("POST", reviews, body=review, tolerated=(403, 404))
            if answer is None:  # rights cannot be queried; then the first request that needs one fails
                return []
            if answer.get("status", {}).get("allowed", False):
                self._allowed.add(right)
            else:
                missing.append(right)
        return missing

    def _path(self, kind: str, name: str = "") -> str:
        group, plural = COLLECTIONS[kind]
        return f"{group}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    def _call(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: Manifest | None = None,
        text: bool = False,
        tolerated: Sequence[int] = (),
    ) -> Any:
        """Make a request, and repeat it while the server is unavailable; all our requests may be repeated.

        Return None if the answer has a tolerated status.
        """
        from urllib3.exceptions import HTTPError

        until, right = time.monotonic() + self.patience_s, _right(method, path)
        pause_s = 0.25
        while True:
            refusal, is_lost = None, False
            try:
                response = self._once(method, path, query, body, read_s=READ_S)
                self._allowed.add(right)
                self._lost = False
                return response.data.decode(errors="replace") if text else parsed_json(response.data)
            except self._exceptions as error:
                is_lost = self._has_lost(right, error)
                if error.status in tolerated and not is_lost:
                    return None
                refusal = self._failure(error, f"{method} {path}")
                if error.status not in PASSING and not is_lost:  # 0 means a rejected certificate
                    raise refusal from error
                if error.status == 401:
                    with suppress(FedloomError):  # the user may have logged in again
                        self._connect()
                problem = f"answers {error.status} {_message(error)}"
            except (HTTPError, OSError, ValueError) as error:
                problem = f"cannot be reached: {_innermost(error)}"
            if is_lost and not self._lost:
                self._lost = True
                self._say(f"the Kubernetes API at {self.server} {problem}; it has allowed this before: trying again")
            if time.monotonic() + pause_s > until:
                if refusal is not None and (is_lost or diagnose_refusal(problem)):
                    raise LostRights(refusal.message, hint=refusal.hint) if is_lost else refusal
                raise Unreachable(
                    f"the Kubernetes API at {self.server} {problem}",
                    hint="check KUBECONFIG, the network and the cluster; then start again with the same run id",
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 8.0)

    def _has_lost(self, right: str, error: Any) -> bool:
        """Return True if a request failed for want of a right that these credentials have had."""
        if error.status in (400, 404, 409, 422):  # the request was allowed
            self._allowed.add(right)
        is_known = bool(self._allowed) if error.status == 401 else error.status == 403 and right in self._allowed
        return is_known and diagnose_refusal(_message(error)) is None

    def _lines(self, path: str, query: Sequence[tuple[str, str]], read_s: float | None) -> Generator[str, None, None]:
        """Yield the lines of an answer as they arrive."""
        from kubernetes.watch.watch import iter_resp_lines

        response = self._once("GET", path, query, None, read_s=read_s, stream=True)
        try:
            yield from iter_resp_lines(response)
        finally:
            response.close()
            response.release_conn()

    def _once(
        self,
        method: str,
        path: str,
        query: Sequence[tuple[str, str]],
        body: Manifest | None,
        *,
        read_s: float | None,
        stream: bool = False,
    ) -> Any:
        response = self._client.call_api(
            path,
            method,
            query_params=[*query],
            header_params={"Accept": "*/*", "Content-Type": "application/json"},
            body=body,
            auth_settings=["BearerToken"],
            _return_http_data_only=True,
            _preload_content=False,
            _request_timeout=(CONNECT_S, read_s),
        )
        if not stream:
            response.read(cache_content=True)
        return response

    def _failure(self, error: Any, action: str) -> FedloomError:
        message, status = _message(error), error.status
        refusal = None if status in (404, 409) else diagnose_refusal(message)
        if status == 401 and refusal is None:
            return RefusedError(
                f"the Kubernetes API at {self.server} does not accept these credentials: {message}",
                hint="log in again, or set KUBECONFIG to a valid kubeconfig",
            )
        invalid = (ExperimentError, "change the cluster setting named above")
        kinds: Mapping[int, tuple[type[FedloomError], str | None]] = {
            400: invalid,
            403: (RefusedError, rights_hint(self.namespace)),
            404: (ExperimentError, f"kubectl create namespace {self.namespace}"),
            409: (ExperimentError, None),
            422: invalid,
        }
        kind, hint = refusal or kinds.get(status) or (RefusedError, None)
        is_known = refusal or status in kinds
        text = message if is_known else f"{action}: {status} {message}"
        return kind(f"Kubernetes, namespace {self.namespace}: {text}", hint=hint)


def _right(method: str, path: str) -> str:
    """Return the right that a request needs, such as ``get pods/log``."""
    request = ROUTE.fullmatch(path)
    if request is None:
        return f"{method} {path}"
    verb = {"GET": "get" if request["name"] else "list", "POST": "create"}.get(method, method.lower())
    return f"{verb} {request['resource']}{request['sub'] or ''}"


def rights_hint(namespace: str) -> str:
    """Return the command that grants a launcher the rights it needs."""
    return f"kubectl apply -n {namespace} -f components/federate/rbac.yaml (its RoleBinding names the service account)"


def own_pod() -> str | None:
    """Return the name of this process's pod, from Kubeflow's variable or the hostname; None outside of a pod."""
    return os.environ.get("KFP_POD_NAME") or (os.environ.get("HOSTNAME") if in_cluster() else None)


def in_cluster() -> bool:
    """Return True if this process runs in a pod and should use its credentials."""
    return "KUBECONFIG" not in os.environ and (SERVICE_ACCOUNT / "token").is_file()


def _configuration(configuration: Any) -> tuple[Any, str]:
    """Fill in the API server and credentials; return the configuration and its default namespace."""
    from kubernetes import config

    if in_cluster():
        try:
            config.load_incluster_config(client_configuration=configuration)
            return configuration, (SERVICE_ACCOUNT / "namespace").read_text().strip()
        except (config.ConfigException, OSError) as error:
            raise RefusedError(f"{SERVICE_ACCOUNT} has no pod credentials: {error}") from error
    path = os.environ.get("KUBECONFIG") or str(expanded("~/.kube/config", "KUBECONFIG or HOME"))
    if not any(Path(part).is_file() for part in path.split(os.pathsep)):
        raise RefusedError(
            f"no Kubernetes cluster is configured: {path} does not exist, and this process is not in a pod with a "
            "service account token",
            hint="set KUBECONFIG, or use the backend local",
        )
    try:
        config.load_kube_config(config_file=path, client_configuration=configuration, persist_config=False)
        _, context = config.list_kube_config_contexts(config_file=path)
    except Exception as error:  # files may have any content, and plug-ins may raise anything
        raise ExperimentError(f"{path} is not a usable kubeconfig: {error}") from error
    return configuration, str(context.get("context", {}).get("namespace") or "default")


def _message(error: Any) -> str:
    """Return the API server's message, without the surrounding structure."""
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else str(error.body or "")
    try:
        message = parsed_json(body).get("message")
    except (ValueError, AttributeError):
        message = body.strip()[:200]
    return str(message or error.reason)


def _innermost(error: BaseException) -> str:
    """Return the innermost reason in an HTTP library's nested exceptions."""
    while isinstance(reason := getattr(error, "reason", None), BaseException):
        error = reason
    return str(error).rpartition(">: ")[2] or type(error).__name__
