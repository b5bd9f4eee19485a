"""The Kubeflow Pipelines API as ``ml-pipeline`` serves it: v2beta1 REST over a socket, in memory.

It speaks for pipelines, versions, uploads, experiments, runs and recurring runs (:mod:`kfp_recurring`), with the API's
status codes and bodies, one user or many, tokens, and what networks do: answers that are broken or lost. It
checks an uploaded pipeline and a run's parameters as the API server does, and runs nothing: a test says how a run goes
on. Not covered: archiving, reports and artifacts.

A run looks as it does under Kubeflow Pipelines 2.17.0 with its stock configuration and Argo Workflows 4.0.5. Files are
those of kubeflow/pipelines, and of argoproj/argo-workflows where they begin with ``workflow/``:

- A run's tasks are the nodes of the workflow (``backend/src/apiserver/server/api_converter.go``, ``toModelTasks``). The
  compiler makes groups, drivers, executors and loops beside the author's tasks
  (``backend/src/v2/compiler/argocompiler/dag.go``, ``container.go``); the workflow itself is a node, with its own name.
- Each of them is there twice, as a Retry node and its attempt ``(0)``
  (``manifests/kustomize/third-party/argo/base/workflow-controller-configmap-patch.yaml``, ``retryStrategy``;
  ``workflow/controller/operator.go``, ``retryNodeName``), but for the group of a loop's iterations, whose items are
  ``iteration-iterations(0:0)`` (``generateNodeName``).
- A node that is Omitted, as what depends on a failed task is, has the state RUNTIME_STATE_UNSPECIFIED
  (``backend/src/apiserver/model/run.go``, ``ToV2``).
- ``error`` is absent, of a run and of its tasks: ``toApiRun`` and ``toApiPipelineTaskDetail`` set it only for data that
  they cannot convert.
- A container that runs a component ends with 1 whatever the component's exit code
  (``backend/src/v2/cmd/launcher-v2/main.go``, ``glog.Exit``).
- Of a pod, the API tells the node's id, as a child of another node; its name is made of the workflow, the template
  and the last part of that id (``backend/src/common/util/workflow.go``, ``RetrievePodName``).
- What a task printed is at ``/apis/v1alpha1/runs/RUN/nodes/POD/log``, from the container ``main`` or, once the pod is
  gone, from Argo's archive, where it is the artifact ``main-logs``
  (``backend/src/apiserver/resource/resource_manager.go``, ``ReadLog``; ``archive/log.go``). Where there is neither, the
  status is 200 all the same, and the text tells of an error (``backend/src/apiserver/server/run_log_server.go``). An
  installation for one user looks for the pod in a namespace without a name, and so has only the archive
  (``resource_manager.go``, ``getNamespaceFromRunId``, ``readRunLogFromPod``). The
  launcher publishes the same text as the artifact ``executor-logs-N`` of attempt N
  (``backend/src/v2/component/launcher_v2.go``, ``qualifyExecutorLogsURI``).
- A run that is stopped is CANCELING, then FAILED; one that has ended cannot be stopped
  (``backend/src/apiserver/storage/run_store.go``, ``TerminateRun``: "Row not found").
- Workflow and pods have the label ``pipeline/runid`` (``backend/src/apiserver/template/v2_template.go``).
- The pods of a task with labels or annotations have a template named by their numbers
  (``backend/src/v2/compiler/argocompiler/container.go``, ``metadata-``).
- A version with a platform's document is returned as ``pipeline_spec`` and ``platform_spec``
  (``backend/src/apiserver/server/api_util.go``, ``YamlStringToPipelineSpecStruct``).
- A right that its user lacks in a namespace is told with verb, resource and namespace; a run is its experiment's
  (``resource_manager.go``, ``IsAuthorized``; ``run_server.go``, ``canAccessRun``).
- The API reviews the token of a request, and tells nothing but that the identity is empty, whatever is wrong with it
  (``resource_manager.go``, ``IsAuthorized``); its health asks for none (``server/healthz_server.go``).
"""

from __future__ import annotations

import json
import re
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.parser import BytesParser
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import kfp_recurring
import yaml
from kfp_recurring import Json, Refused, listed

PREFIX = "/apis/v2beta1"
LOG = re.compile(r"/apis/v1alpha1/runs/([0-9a-f-]{36})/nodes/([a-z0-9-]+)/log")
HEALTH = "GET /healthz"
WORKFLOW = "personalized-federation-x7k2p"
EMPTY_IDENTITY = "Unauthenticated: Failed to check authorization. User identity is empty in the request header"


def right_of(method: str, path: str) -> tuple[str, str]:
    """Return verb and resource of the right that a request to the API needs.

    kubeflow/pipelines: ``server/pipeline_server.go``, where a version is its pipeline's, ``server/run_server.go``,
    and ``server/job_server.go``, where recurring runs are jobs.
    """
    parts = path.split("/")[1:]
    verb = {"GET": "get" if len(parts) % 2 == 0 else "list", "DELETE": "delete"}.get(method, "create")
    verb = path.rpartition(":")[2] if ":" in path else verb
    return verb, {"recurringruns": "jobs"}.get(parts[0], parts[0])


def denied(user: str, namespace: str, verb: str, resource: str) -> str:
    """Return the API's message for a missing right (``resource_manager.go``, ``IsAuthorized``)."""
    request = (
        f"&ResourceAttributes{{Namespace:{namespace},Verb:{verb},Group:pipelines.kubeflow.org,Version:v1beta1,"
        f"Resource:{resource},Subresource:,Name:,}}"
    )
    return f"PermissionDenied: User '{user}' is not authorized with reason:  (request: {request}): Unauthorized access"


@dataclass
class Fault:
    """Fault of requests whose method and path match: ``times`` of them, after ``skip``.

    ``status`` answers with an error, or with a redirect to ``location``; ``drop`` closes the connection, before or
    after the request is processed.
    """

    request: str
    status: int | None = None
    location: str | None = None
    drop: str = ""
    times: int = 10**6
    skip: int = 0


@dataclass
class KubeflowApi:
    """An installation of Kubeflow Pipelines.

    Attributes
    ----------
    namespaces
        Profiles to which the token's owner has rights; empty on an installation for one user.
    token
        The only accepted token; None accepts any request.
    login_page
        Whether a gateway answers every request with a page to log in.
    rights, right
        Verb and resource of every right that was needed, and of the last.
    script
        Successive views of a run: state, and the author's tasks as (name, state, printed); the last view stays. A name
        that ends in ``(N)`` is an attempt after the first.
    archives
        Whether Argo archives the logs of pods.
    tag
        Release that the user interface, which passes requests on, adds to the health.
    """

    namespaces: tuple[str, ...] = ()
    token: str | None = None
    login_page: bool = False
    archives: bool = True
    tag: str = ""
    pipelines: dict[str, Json] = field(default_factory=dict)
    versions: dict[str, Json] = field(default_factory=dict)
    experiments: dict[str, Json] = field(default_factory=dict)
    runs: dict[str, Json] = field(default_factory=dict)
    recurring: dict[str, Json] = field(default_factory=dict)
    script: list[tuple[str, list[tuple[str, str, str]]]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    rights: set[tuple[str, str]] = field(default_factory=set)
    right: tuple[str, str] = ("", "")
    lock: threading.RLock = field(default_factory=threading.RLock)
    logs: dict[str, str] = field(default_factory=dict)
    host: str = ""
    clock: int = 0

    def counts(self) -> tuple[int, int, int, int]:
        """Return the number of pipelines, versions, experiments and runs."""
        return len(self.pipelines), len(self.versions), len(self.experiments), len(self.runs)

    # Requests, by method and path; arguments are the path's parts, the query and the body.

    def healthz(self, query: Json, body: Any) -> Json:
        told = {"apiServerReady": True, "frontendTagName": self.tag} if self.tag else {}
        return {"multi_user": bool(self.namespaces), "pipeline_store": "database", **told}

    def list_pipelines(self, query: Json, body: Any) -> Json:
        self.may(query.get("namespace"))
        mine = [p for p in self.pipelines.values() if p["namespace"] == query.get("namespace", "")]
        return listed("pipelines", mine, query)

    def create_pipeline(self, query: Json, body: Json) -> Json:
        namespace = body.get("namespace", "")
        self.may(namespace)
        if any(
            (p["display_name"], p["namespace"]) == (body["display_name"], namespace) for p in self.pipelines.values()
        ):
            raise Refused(409, 6, f"Already exist error: The name {body['display_name']} already exist.")
        return self.kept(self.pipelines, "pipeline_id", {"namespace": namespace, **body})

    def list_versions(self, pipeline: str, query: Json, body: Any) -> Json:
        self.may(self.found(self.pipelines, pipeline, "pipeline")["namespace"])
        mine = [v for v in self.versions.values() if v["pipeline_id"] == pipeline]
        return listed("pipeline_versions", mine, query)

    def upload_version(self, query: Json, body: bytes) -> Json:
        pipeline = self.found(self.pipelines, query["pipelineid"], "pipeline")
        self.may(pipeline["namespace"])
        documents = list(yaml.safe_load_all(body))
        spec, platform = documents[0], documents[1] if len(documents) > 1 else {}
        if not re.fullmatch(r"[a-z0-9-]{1,128}", spec["pipelineInfo"]["name"]) or "deploymentSpec" not in spec:
            raise Refused(400, 3, "Invalid input error: not a pipeline spec")
        if set(platform) - {"platforms"}:
            raise Refused(400, 3, "Invalid input error: not a platform spec")
        mine = [v for v in self.versions.values() if v["pipeline_id"] == query["pipelineid"]]
        if any(v["display_name"] == query["name"] for v in mine):
            raise Refused(409, 6, f"Already exist error: The version {query['name']} already exist.")
        version = {"pipeline_id": query["pipelineid"], "display_name": query["name"]}
        version |= {"name": query["name"], "description": query.get("description", "")}
        whole = {"pipeline_spec": spec, "platform_spec": platform} if platform else spec
        return self.kept(self.versions, "pipeline_version_id", version | {"pipeline_spec": whole})

    def get_version(self, pipeline: str, version: str, query: Json, body: Any) -> Json:
        self.may(self.found(self.pipelines, pipeline, "pipeline")["namespace"])
        return self.found(self.versions, version, "version")

    def list_experiments(self, query: Json, body: Any) -> Json:
        self.may(query.get("namespace"))
        mine = [e for e in self.experiments.values() if e["namespace"] == query.get("namespace", "")]
        return listed("experiments", mine, query)

    def create_experiment(self, query: Json, body: Json) -> Json:
        namespace = body.get("namespace", "")
        self.may(namespace)
        if namespace and not self.namespaces:
            raise Refused(400, 3, "In single-user mode, CreateExperimentRequest shouldn't contain namespace")
        if any(
            (e["display_name"], e["namespace"]) == (body["display_name"], namespace) for e in self.experiments.values()
        ):
            raise Refused(409, 6, f"Already exist error: The name {body['display_name']} already exist.")
        return self.kept(self.experiments, "experiment_id", {"namespace": namespace, **body})

    def create_run(self, query: Json, body: Json) -> Json:
        experiment = self.found(self.experiments, body["experiment_id"], "experiment")
        self.may(experiment["namespace"])
        self.check_parameters(body)
        return self.kept(self.runs, "run_id", {**body, "state": "PENDING", "looks": 0})

    def check_parameters(self, body: Json) -> None:
        """Reject a run, or a recurring run, whose version or parameters do not match the pipeline."""
        reference = body["pipeline_version_reference"]
        version = self.found(self.versions, reference["pipeline_version_id"], "version")
        spec = version["pipeline_spec"]
        spec = spec.get("pipeline_spec", spec)
        known = spec["root"].get("inputDefinitions", {}).get("parameters", {})
        given = body["runtime_config"]["parameters"]
        unknown = sorted(set(given) - set(known))
        missing = sorted(key for key, about in known.items() if not about.get("isOptional") and key not in given)
        if unknown or missing:
            raise Refused(400, 3, f"Invalid input error: parameters {unknown} are not known, {missing} are missing")
        kinds = {"STRING": str, "LIST": list}
        for key, value in given.items():
            if not isinstance(value, kinds[known[key]["parameterType"]]):
                raise Refused(400, 3, f"Invalid input error: parameter {key} is no {known[key]['parameterType']}")

    def list_runs(self, query: Json, body: Any) -> Json:
        self.may(query.get("namespace"))
        wanted = query.get("experiment_id")
        experiments = [e for e in self.experiments.values() if e["namespace"] == query.get("namespace", "")]
        ids = {e["experiment_id"] for e in experiments if wanted in (None, e["experiment_id"])}
        return listed("runs", [r for r in self.runs.values() if r["experiment_id"] in ids], query)

    def get_run(self, run: str, query: Json, body: Any) -> Json:
        found = self.found(self.runs, run, "run")
        if found["state"] == "CANCELING":
            found["state"] = "FAILED"
            return {key: value for key, value in found.items() if key != "looks"} | {"state": "CANCELING"}
        if found["state"] != "FAILED" and self.script:
            state, tasks = self.script[min(found["looks"], len(self.script) - 1)]
            found |= {"state": state, "run_details": {"task_details": self._nodes(run, tasks)}}
        found["looks"] += 1
        return {key: value for key, value in found.items() if key != "looks"}

    def _nodes(self, run: str, tasks: list[tuple[str, str, str]]) -> list[Json]:
        """Return the nodes of a workflow whose author defined these tasks, each behind a node for retries."""
        nodes: list[Json] = []

        def add(name: str, state: str, children: list[str]) -> str:
            identity = f"{WORKFLOW}-{len(nodes) + 1000}"
            task = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{run} {len(nodes)} {name}"))
            about = {"run_id": run, "task_id": task, "display_name": name, "state": state}
            nodes.append(about | {"child_tasks": [{"pod_name": child} for child in children]})
            return identity

        def retried(name: str, state: str, children: list[str]) -> str:
            attempt = re.search(r"\((\d+)\)$", name)
            bare = name[: attempt.start()] if attempt else name
            return add(bare, state, [add(f"{bare}({attempt[1] if attempt else 0})", state, children)])

        for name, state, printed in tasks:
            retried(f"{name.partition('(')[0]}-driver", "SUCCEEDED", [])
            executor = retried("executor", state, [])
            hashed = executor.rpartition("-")[2]
            self.logs[f"{WORKFLOW}-{self._template(run, name)}-{int(hashed) - 1}"] = printed
            retried(name, state, [executor])
        items = [retried(f"iteration-iterations(0:{i})", "RUNNING", []) for i in range(2)]
        add("iteration-iterations", "RUNNING", items)
        for group in ("exit-handler-1", "for-loop-2", "iteration-item", "condition-3", "exit-handler-1.onExit", "root"):
            retried(group, "RUNNING", [])
        retried(WORKFLOW, "RUNNING", [])
        return nodes

    def _template(self, run: str, task: str) -> str:
        """Return the template of the pod that runs a task's component."""
        version = self.versions.get(self.runs[run]["pipeline_version_reference"]["pipeline_version_id"], {})
        platform = version.get("pipeline_spec", {}).get("platform_spec", {"platforms": {}})["platforms"]
        executors = platform.get("kubernetes", {}).get("deploymentSpec", {}).get("executors", {})
        metadata = executors.get(f"exec-{task.partition('(')[0]}", {}).get("podMetadata")
        if metadata is None:
            return "system-container-impl"
        return (
            f"metadata-{len(metadata.get('annotations', ()))}-{len(metadata.get('labels', ()))}-system-container-impl"
        )

    def log(self, run: str, pod: str) -> bytes:
        """Return the output of a pod."""
        self.found(self.runs, run, "run")
        if pod not in self.logs or not (self.archives or self.namespaces):
            return json.dumps({"error_message": f"Failed to read logs from pod {pod}"}).encode()
        return self.logs[pod].encode()

    def terminate_run(self, run: str, query: Json, body: Any) -> Json:
        found = self.found(self.runs, run, "run")
        if found["state"] not in ("PENDING", "RUNNING", "PAUSED"):
            raise Refused(400, 3, f"Failed to terminate a run {run}. Row not found")
        found["state"] = "CANCELING"
        return {}

    def delete_run(self, run: str, query: Json, body: Any) -> Json:
        self.found(self.runs, run, "run")
        del self.runs[run]
        return {}

    def needs(self, method: str, path: str) -> None:
        """Record the right that a request needs; one for a run needs it in the namespace of its experiment."""
        self.right = right_of(method, path)
        if f"{method} {path}" != HEALTH:
            self.rights.add(self.right)
        if (found := re.match(f"/runs/{ID}", path)) and found[1] in self.runs:
            experiment = self.experiments.get(self.runs[found[1]].get("experiment_id", ""), {})
            self.may(experiment.get("namespace", ""))

    def may(self, namespace: str | None) -> None:
        if self.namespaces and namespace not in self.namespaces:
            user = f"system:serviceaccount:{self.namespaces[0]}:default-editor"
            raise Refused(403, 7, denied(user, namespace or "", *self.right))

    @staticmethod
    def found(kept: dict[str, Json], key: str, what: str) -> Json:
        if key not in kept:
            raise Refused(404, 5, f"ResourceNotFoundError: {what} {key} not found.")
        return kept[key]

    def kept(self, kept: dict[str, Json], key: str, body: Json) -> Json:
        """Store a new object, created a second after the previous one."""
        self.clock += 1
        made = {
            key: str(uuid.uuid4()),
            "created_at": f"2026-01-01T00:{self.clock // 60:02}:{self.clock % 60:02}Z",
            **body,
        }
        kept[made[key]] = made
        return made


ID = r"([0-9a-f-]{36})"
ROUTES: list[tuple[str, str, Callable[..., Json]]] = [
    ("GET", "/healthz", KubeflowApi.healthz),
    ("GET", "/pipelines", KubeflowApi.list_pipelines),
    ("POST", "/pipelines", KubeflowApi.create_pipeline),
    ("POST", "/pipelines/upload_version", KubeflowApi.upload_version),
    ("GET", f"/pipelines/{ID}/versions", KubeflowApi.list_versions),
    ("GET", f"/pipelines/{ID}/versions/{ID}", KubeflowApi.get_version),
    ("GET", "/experiments", KubeflowApi.list_experiments),
    ("POST", "/experiments", KubeflowApi.create_experiment),
    ("POST", "/runs", KubeflowApi.create_run),
    ("GET", "/runs", KubeflowApi.list_runs),
    ("GET", f"/runs/{ID}", KubeflowApi.get_run),
    ("POST", f"/runs/{ID}:terminate", KubeflowApi.terminate_run),
    ("DELETE", f"/runs/{ID}", KubeflowApi.delete_run),
    ("POST", "/recurringruns", kfp_recurring.create),
    ("GET", "/recurringruns", kfp_recurring.list_all),
    ("GET", f"/recurringruns/{ID}", kfp_recurring.read),
    ("POST", f"/recurringruns/{ID}:enable", kfp_recurring.enable),
    ("POST", f"/recurringruns/{ID}:disable", kfp_recurring.disable),
    ("DELETE", f"/recurringruns/{ID}", kfp_recurring.delete),
]


class Handler(BaseHTTPRequestHandler):
    """One connection to the API."""

    protocol_version = "HTTP/1.1"
    api: KubeflowApi

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def log_message(self, *arguments: Any) -> None:
        pass

    def _answer(self, method: str) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        request = f"{method} {unquote(url.path).removeprefix(PREFIX)}"
        with self.api.lock:
            self.api.asked.append(request)
            fault = self._fault(request)
        if fault is not None:
            if fault.drop == "before":
                self._close()
                return
            if fault.status is not None:
                reported = {"code": 13, "message": f"status {fault.status}, as the test wants it"}
                self._send(fault.status, reported, location=fault.location)
                return
        if self.api.login_page:
            self._send(200, None, b"<html>Log in to Kubeflow</html>")
            return
        try:
            sent = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            if request != HEALTH and self.api.token not in (None, sent):
                raise Refused(401, 16, EMPTY_IDENTITY)
            with self.api.lock:
                if printed := LOG.fullmatch(url.path):
                    self._send(200, None, self.api.log(*printed.groups()), kind="text/plain")
                    return
                status, answer = 200, self._route(method, url.path, url.query, content)
        except Refused as error:
            status, answer = error.status, {"error": str(error), "code": error.code, "message": str(error)}
        if fault is not None and fault.drop == "after":
            self._close()
            return
        self._send(status, answer)

    def _fault(self, request: str) -> Fault | None:
        for fault in self.api.faults:
            if re.fullmatch(fault.request, request) and fault.times:
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                return fault
        return None

    def _route(self, method: str, path: str, query: str, content: bytes) -> Json:
        if not path.startswith(PREFIX):
            raise Refused(404, 5, "Not Found")
        flat = {key: values[-1] for key, values in parse_qs(query).items()}
        for wanted, pattern, act in ROUTES:
            found = re.fullmatch(pattern, unquote(path).removeprefix(PREFIX))
            if wanted == method and found:
                self.api.needs(method, unquote(path).removeprefix(PREFIX))
                return act(self.api, *found.groups(), flat, self._body(content))
        raise Refused(404, 5, "Not Found")

    def _body(self, content: bytes) -> Any:
        kind = self.headers.get("Content-Type", "")
        if not kind.startswith("multipart/form-data"):
            return json.loads(content) if content else None
        whole = BytesParser(policy=HTTP).parsebytes(b"Content-Type: " + kind.encode() + b"\r\n\r\n" + content)
        parts = {part.get_param("name", header="Content-Disposition"): part for part in whole.iter_parts()}
        return parts["uploadfile"].get_payload(decode=True)

    def _send(
        self, status: int, answer: Json | None, page: bytes = b"", kind: str = "text/html", location: str | None = None
    ) -> None:
        body = page if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind if answer is None else "application/json")
        self.send_header("Content-Length", str(len(body)))
        if location is not None:
            self.send_header("Location", location)
        self.end_headers()
        self.wfile.write(body)

    def _close(self) -> None:
        self.close_connection = True
        self.connection.close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that disconnects during its answer; the message would be in another test's output."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def serving(api: KubeflowApi, port: int = 0) -> Iterator[KubeflowApi]:
    """Serve an installation on this machine; its ``host`` is set within the block."""
    handler = type("HandlerOfOne", (Handler,), {"api": api})
    server = _Server(("127.0.0.1", port), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    api.host = f"http://127.0.0.1:{server.server_port}"
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()
