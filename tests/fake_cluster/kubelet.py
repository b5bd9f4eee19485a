"""The scheduler, and a kubelet whose containers are processes of this machine.

Sources in kubernetes/kubernetes: reasons and messages of waiting containers, ``pkg/kubelet/images/image_manager.go``
and ``pkg/kubelet/kuberuntime/kuberuntime_container.go``; messages from the end of a log,
``pkg/kubelet/container/runtime.go``; files of Secrets and ConfigMaps, ``pkg/volume/util/atomic_writer.go``.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from forked import Popen

from fake_cluster.network import Network
from fake_cluster.resources import RESOURCES, quantity
from fake_cluster.store import ApiError, Object, Store, emit, now

PODS, SECRETS, CONFIG_MAPS = (RESOURCES[name] for name in ("pods", "secrets", "configmaps"))
NODE = "node-0"
TICK_S = 0.03
RENEW_S = 0.5
"""Seconds between a pod's looks at changed Secrets; a minute or two on a real node."""
MESSAGE_BYTES = 2048
"""Bytes of a log that FallbackToLogsOnError keeps."""


class Waiting(Exception):
    """Reason and message of the waiting state of a container that cannot start yet."""

    def __init__(self, reason: str, message: str, event: str | None = None) -> None:
        super().__init__(message)
        self.reason, self.message, self.event = reason, message, event


class Scheduler:
    """Scheduler of one node: a pod waits until its requested resources are free.

    Parameters
    ----------
    capacity
        Resource -> quantity of the node.
    claims
        Folder of the PersistentVolumeClaims.
    """

    def __init__(self, store: Store, capacity: Mapping[str, str], claims: Path) -> None:
        self._store, self._claims = store, claims
        self.capacity = dict(capacity)

    def tick(self) -> None:
        """Bind the pods that fit; record the reason for the others."""
        pods = self._store.list(PODS)[0]
        used: dict[str, float] = {}
        for pod in pods:
            if pod["spec"].get("nodeName") and pod["status"]["phase"] in ("Pending", "Running"):
                for kind, amount in requests(pod).items():
                    used[kind] = used.get(kind, 0.0) + amount
        for pod in pods:
            if pod["spec"].get("nodeName") or pod["status"]["phase"] != "Pending" or _leaving(pod):
                continue
            wanted = requests(pod)
            lacking = [
                f"1 Insufficient {kind}"
                for kind, amount in wanted.items()
                if used.get(kind, 0.0) + amount > quantity(self.capacity.get(kind, "0"))
            ]
            absent = [name for name in claims(pod) if not (self._claims / name).is_dir()]
            if absent:
                message = f'0/1 nodes are available: persistentvolumeclaim "{absent[0]}" not found. not found'
                self._condition(pod, "False", "Unschedulable", message)
            elif lacking:
                message = (
                    f"0/1 nodes are available: {', '.join(lacking)}. no new claims to deallocate, preemption: "
                    "0/1 nodes are available: 1 No preemption victims found for incoming pod."
                )
                self._condition(pod, "False", "Unschedulable", message)
            else:
                used = {kind: used.get(kind, 0.0) + wanted.get(kind, 0.0) for kind in used.keys() | wanted.keys()}
                self._condition(pod, "True", None, None)

    def _condition(self, pod: Object, status: str, reason: str | None, message: str | None) -> None:
        before = next((c for c in pod["status"].get("conditions", []) if c["type"] == "PodScheduled"), None)
        if before and (before["status"], before.get("message")) == (status, message):
            return
        made: Object = {"type": "PodScheduled", "status": status, "lastProbeTime": None, "lastTransitionTime": now()}
        if reason:
            made |= {"reason": reason, "message": message}

        def change(found: Object) -> None:
            others = [c for c in found["status"].get("conditions", []) if c["type"] != "PodScheduled"]
            found["status"]["conditions"] = [*others, made]
            if status == "True":
                found["spec"]["nodeName"] = NODE

        if reason:
            emit(self._store, pod, "Warning", "FailedScheduling", str(message))
        else:
            name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
            emit(self._store, pod, "Normal", "Scheduled", f"Successfully assigned {name} to {NODE}")
        with suppress(ApiError):
            self._store.modify(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"], change)


class Kubelet:
    """Kubelet that runs every pod in a thread of its own.

    Parameters
    ----------
    images
        Image -> command in place of its entrypoint. Looked up each time, so an image may appear later.
    environment
        Environment of every image.
    resolve
        Function that replaces host names of Services in a text by their addresses.
    """

    def __init__(
        self,
        store: Store,
        network: Network,
        root: Path,
        images: Mapping[str, list[str]],
        environment: Mapping[str, str],
        resolve: Callable[[str], str],
        backoff_s: float,
    ) -> None:
        self.store, self.network, self.root = store, network, root
        self.images, self.environment, self.resolve, self.backoff_s = images, environment, resolve, backoff_s
        self.claims = root.parent / "claims"
        self.stopping = threading.Event()
        self.runs: dict[str, PodRun] = {}
        self.ended_logs: dict[str, str] = {}
        """What containers of pods that are gone had said: ``POD/CONTAINER`` -> log."""

    def tick(self) -> None:
        """Start the pods that are new on this node."""
        if self.stopping.is_set():
            return
        for pod in self.store.list(PODS)[0]:
            uid = pod["metadata"]["uid"]
            if uid not in self.runs and (pod["spec"].get("nodeName") or _leaving(pod)):
                self.runs[uid] = PodRun(self, pod)

    def run_of(self, name: str) -> PodRun:
        """Return the newest run of the pod of a name."""
        found = [run for run in [*self.runs.values()] if run.name == name]
        if not found:
            raise ApiError(404, "NotFound", f'pods "{name}" not found')
        return found[-1]

    def stop(self) -> None:
        """Kill all pods."""
        with self.store.changed:  # the loop that looks for new pods holds this lock, too
            self.stopping.set()
            runs = [*self.runs.values()]
        for run in runs:
            run.thread.join(30)


class PodRun:
    """One pod, from its placement until its object may be deleted."""

    def __init__(self, kubelet: Kubelet, pod: Object) -> None:
        self.kubelet = kubelet
        self.pod = pod
        self.name, self.namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        self.address = ""
        self.folder = kubelet.root / f"{self.name}-{pod['metadata']['uid'][:8]}"
        self.containers = [Container(self, spec) for spec in pod["spec"]["containers"]]
        self._told: Any = None
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self.thread.start()

    def container(self, name: str | None) -> Container:
        """Return a container of the pod; by default the first."""
        for container in self.containers:
            if name in (None, "", container.name):
                return container
        raise ApiError(400, "BadRequest", f"container {name} is not valid for pod {self.name}")

    def current(self) -> Object | None:
        """Return the pod's object, or None once it is deleted."""
        try:
            found = self.kubelet.store.get(PODS, self.namespace, self.name)
        except ApiError:
            return None
        return found if found["metadata"]["uid"] == self.pod["metadata"]["uid"] else None

    def _run(self) -> None:
        try:
            if self.pod["spec"].get("nodeName"):
                self._live()
            for container in self.containers:
                container.kill()
            self._tell("ended")
            self._wait_for_deletion()
        finally:
            for container in self.containers:
                container.kill()
                self.kubelet.ended_logs[f"{self.name}/{container.name}"] = container.said()
            shutil.rmtree(self.folder, ignore_errors=True)
            if self.address:
                self.kubelet.network.release(self.address)

    def _live(self) -> None:
        self.address = self.kubelet.network.address()
        self.folder.mkdir(parents=True)
        retry_at = renew_at = 0.0
        while not self.kubelet.stopping.is_set():
            pod = self.current()
            if pod is None or _leaving(pod):
                self._terminate(pod)
                return
            self.pod = pod
            if any(container.process is None for container in self.containers) and time.monotonic() >= retry_at:
                for container in self.containers:
                    container.try_to_start()
                retry_at = time.monotonic() + self.kubelet.backoff_s
            for container in self.containers:
                container.look()
            if all(container.code is not None for container in self.containers):
                return
            if time.monotonic() >= renew_at:
                for container in self.containers:
                    container.renew()
                renew_at = time.monotonic() + RENEW_S
            self._tell("live")
            time.sleep(TICK_S)

    def _terminate(self, pod: Object | None) -> None:
        """Send SIGTERM, and SIGKILL after the grace period; at once for a pod that was removed by force."""
        began = time.monotonic()
        for container in self.containers:
            container.signal(signal.SIGTERM)
        while pod is not None and any(container.running for container in self.containers):
            grace = pod["metadata"].get("deletionGracePeriodSeconds", 0)
            if time.monotonic() - began > grace or self.kubelet.stopping.is_set():
                break
            time.sleep(TICK_S)
            for container in self.containers:
                container.look()
            pod = self.current()
        for container in self.containers:
            container.kill()

    def _wait_for_deletion(self) -> None:
        """Keep the folder and log of an ended pod until it is deleted."""
        while not self.kubelet.stopping.is_set() and (pod := self.current()) is not None:
            if _leaving(pod) and pod["metadata"].get("deletionGracePeriodSeconds"):
                with suppress(ApiError):
                    self.kubelet.store.delete(PODS, self.namespace, self.name, grace_s=0, uid=pod["metadata"]["uid"])
            with self.kubelet.store.changed:
                self.kubelet.store.changed.wait(0.2)

    def _tell(self, moment: str, **extra: str) -> None:
        """Write the pod's status if it has changed."""
        ready = moment == "live" and all(container.running for container in self.containers)
        started = any(container.process is not None for container in self.containers)
        phase = "Running" if started else "Pending"
        if moment == "ended":
            phase = "Succeeded" if all(container.code == 0 for container in self.containers) else "Failed"
        wanted = {
            "Initialized": True, "PodReadyToStartContainers": started, "ContainersReady": ready, "Ready": ready,
        }  # fmt: skip

        statuses = [container.status() for container in self.containers]
        if (told := (moment, wanted, statuses, extra)) == self._told:
            return
        self._told = told

        def change(found: Object) -> None:
            status = found["status"]
            before = {c["type"]: c for c in status.get("conditions", [])}
            for kind, value in wanted.items():
                if before.get(kind, {}).get("status") != str(value):
                    before[kind] = {"type": kind, "status": str(value), "lastTransitionTime": now()}
                    if not value and kind in ("Ready", "ContainersReady"):
                        unready = [container.name for container in self.containers if not container.running]
                        reason = "PodCompleted" if phase == "Succeeded" else "ContainersNotReady"
                        before[kind] |= {"reason": reason, "message": f"containers with unready status: {unready}"}
            if status["phase"] not in ("Succeeded", "Failed"):
                status.update(phase=phase, **extra)
            status["conditions"] = list(before.values())
            status["containerStatuses"] = statuses
            if self.address:
                status.update(podIP=self.address, podIPs=[{"ip": self.address}], hostIP="127.0.0.1")
                status.setdefault("startTime", now())

        with suppress(ApiError):
            self.kubelet.store.modify(PODS, self.namespace, self.name, change, uid=self.pod["metadata"]["uid"])


class Container:
    """One container: its process, its log, and its state in the API's form."""

    def __init__(self, run: PodRun, spec: Object) -> None:
        self.run, self.spec = run, spec
        self.name: str = spec["name"]
        self.process: subprocess.Popen[bytes] | None = None
        self.code: int | None = None
        self.killed_for: str | None = None
        """Why it was killed, as ``OOMKilled``."""
        self._log = run.folder / f"{self.name}.log"
        self._waiting: tuple[str, str] = ("ContainerCreating", "")
        self._told = ""
        self._mounted: dict[Path, tuple[Object, dict[str, bytes]]] = {}
        self._started_at = self._finished_at = ""

    @property
    def running(self) -> bool:
        """Return True while its process runs."""
        return self.process is not None and self.code is None

    def said(self) -> str:
        """Return its log."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def try_to_start(self) -> None:
        """Start the container, or raise with the reason why it must wait."""
        if self.process is not None or self.code is not None:
            return
        pod, store = self.run.pod, self.run.kubelet.store
        try:
            command, environment, folder = self._prepare()
        except Waiting as waiting:
            before, reported = self._waiting[0], waiting.message == self._told
            self._waiting = (waiting.reason, "" if waiting.event else waiting.message)
            self._told = waiting.message
            if waiting.reason == "ErrImagePull" and before in ("ErrImagePull", "ImagePullBackOff"):
                self._waiting = (
                    "ImagePullBackOff",
                    f'Back-off pulling image "{self.spec["image"]}": {waiting.message}',
                )
                emit(store, pod, "Normal", "BackOff", f'Back-off pulling image "{self.spec["image"]}"')
            elif not reported:
                emit(store, pod, "Warning", waiting.event or "Failed", waiting.message)
            return
        program = shutil.which(command[0], path=environment["PATH"])
        self._started_at = now()
        if program is None:
            self._log.write_text("")
            self._finish(128, f'exec: "{command[0]}": executable file not found in $PATH: unknown', "StartError")
            return
        with self._log.open("wb") as log:
            self.process = Popen(
                [program, *command[1:]],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                dies_with_parent=True,  # no process is ever left behind
            )
        emit(store, pod, "Normal", "Started", f"Started container {self.name}")

    def look(self) -> None:
        """Detect the end of the process."""
        if self.process is None or self.code is not None:
            return
        code = self.process.poll()
        if code is not None:
            self._finish(code if code >= 0 else 128 - code, None, self.killed_for)
            self._kill_group()
            return

    def signal(self, number: int) -> None:
        """Signal the container's first process."""
        if self.running and self.process is not None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill the container and its child processes at once."""
        if self.process is None or self.code is not None:
            return
        self._kill_group()
        self.process.wait()
        self.look()

    def status(self) -> Object:
        """Return its entry in the pod's ``containerStatuses``."""
        state: Object = {"waiting": {"reason": self._waiting[0]}}
        if self._waiting[1]:
            state["waiting"]["message"] = self._waiting[1]
        if self.code is not None:
            state = {"terminated": self._terminated}
        elif self.process is not None:
            state = {"running": {"startedAt": self._started_at}}
        return {
            "name": self.name, "image": self.spec["image"], "imageID": self.spec["image"], "ready": self.running,
            "restartCount": 0, "started": self.running, "state": state, "lastState": {},
        }  # fmt: skip

    def _finish(self, code: int, message: str | None, reason: str | None) -> None:
        self.code = code
        self._finished_at = now()
        if message is None and self._termination_log().exists():
            message = self._termination_log().read_text(encoding="utf-8")[-MESSAGE_BYTES:] or None
        if message is None and code != 0 and self.spec["terminationMessagePolicy"] == "FallbackToLogsOnError":
            message = self.said()[-MESSAGE_BYTES:]
        self._terminated: Object = {
            "exitCode": code, "reason": reason or ("Completed" if code == 0 else "Error"),
            "startedAt": self._started_at, "finishedAt": self._finished_at,
        }  # fmt: skip
        if message:
            self._terminated["message"] = message

    def _termination_log(self) -> Path:
        return self.run.folder / f"{self.name}-termination-log"

    def _kill_group(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def _prepare(self) -> tuple[list[str], dict[str, str], Path]:
        """Return command, environment and working directory, as a container runtime and a network would provide them.

        Raises
        ------
        Waiting
            If something that it needs does not exist.
        """
        image = self.spec["image"]
        entrypoint = self.run.kubelet.images.get(image)
        if entrypoint is None:
            raise Waiting(
                "ErrImagePull",
                f'failed to pull and unpack image "{image}": failed to resolve reference "{image}": {image}: not found',
            )
        mounts = self._mounts()
        if path := self.spec.get("terminationMessagePath"):
            mounts[path] = self._termination_log()
        given = self._variables()
        command = self.spec.get("command") or entrypoint
        arguments = self.spec.get("args") or []
        words = [self._localize(expand(word, given), mounts) for word in (*command, *arguments)]
        if not words:
            raise Waiting("CreateContainerError", "no command specified")
        if "/tmp" in mounts:
            given.setdefault("TMPDIR", "/tmp")  # programs use /tmp by default
        given.setdefault("FEDLOOM_CLAIMS", str(self.run.folder / "claims"))
        environment = {name: self._localize(value, mounts) for name, value in given.items()}
        beside = str(Path(sys.executable).parent)
        base = {"PATH": f"{beside}:{os.environ.get('PATH', '')}", "LANG": "C.UTF-8", "HOME": str(self.run.folder)}
        hostname = self.run.pod["spec"].get("hostname", self.run.name)
        folder = Path(self._localize(self.spec.get("workingDir") or str(self.run.folder), mounts))
        folder.mkdir(parents=True, exist_ok=True)
        return words, {**base, "HOSTNAME": hostname, **self.run.kubelet.environment, **environment}, folder

    def _mounts(self) -> dict[str, Path]:
        """Return the real folder of each of the container's mount paths."""
        volumes = {volume["name"]: volume for volume in self.run.pod["spec"].get("volumes") or []}
        found = {}
        for mount in self.spec.get("volumeMounts") or []:
            volume = volumes[mount["name"]]
            if "persistentVolumeClaim" in volume:
                found[mount["mountPath"].rstrip("/")] = self._claim(volume["persistentVolumeClaim"]["claimName"])
                continue
            folder = self.run.folder / "volumes" / mount["name"]
            if not folder.exists():
                try:
                    content = self._content(volume)
                except ApiError as error:
                    message = f'MountVolume.SetUp failed for volume "{mount["name"]}" : {error.message}'
                    raise Waiting("ContainerCreating", message, "FailedMount") from None
                folder.mkdir(parents=True)
                if content:
                    project(folder, content)
                    self._mounted[folder] = (volume, content)
            found[mount["mountPath"].rstrip("/")] = folder / mount.get("subPath", "")
            found[mount["mountPath"].rstrip("/")].mkdir(parents=True, exist_ok=True)
        return found

    def _claim(self, name: str) -> Path:
        """Return the folder of a claim, shared by all pods; programs find it by its name, as below ``/mnt/claims``."""
        shared, mounted = self.run.kubelet.claims / name, self.run.folder / "claims" / name
        if not mounted.exists():
            mounted.parent.mkdir(parents=True, exist_ok=True)
            mounted.symlink_to(shared)
        return mounted

    def _content(self, volume: Object) -> dict[str, bytes]:
        """Return the files of a volume that is a Secret or a ConfigMap."""
        if "secret" in volume:
            held = self._held(SECRETS, volume["secret"]["secretName"])
            return {key: b64decode(value) for key, value in held.items()}
        if "configMap" in volume:
            held = self._held(CONFIG_MAPS, volume["configMap"]["name"])
            return {key: value.encode() for key, value in held.items()}
        return {}

    def renew(self) -> None:
        """Update mounted Secrets and ConfigMaps: one volume at each tick, as they change one after another."""
        for folder, (volume, before) in self._mounted.items():
            with suppress(ApiError):
                content = self._content(volume)
                if content != before:
                    project(folder, content)
                    self._mounted[folder] = (volume, content)
                    return

    def _variables(self) -> dict[str, str]:
        made: dict[str, str] = {}
        for source in self.spec.get("envFrom") or []:
            if "secretRef" not in source:
                raise Waiting("CreateContainerConfigError", f"the fake cluster covers no {list(source)}")
            name = source["secretRef"]["name"]
            try:
                keys = [*self._held(SECRETS, name)]
            except ApiError:
                raise Waiting("CreateContainerConfigError", f'secret "{name}" not found') from None
            made |= {key: self._secret_key({"name": name, "key": key}) or "" for key in keys}
        for entry in self.spec.get("env") or []:
            value_from = entry.get("valueFrom")
            if not value_from:
                made[entry["name"]] = expand(entry.get("value", ""), made)
                continue
            value: str | None
            if "secretKeyRef" in value_from:
                value = self._secret_key(value_from["secretKeyRef"])
            elif "fieldRef" in value_from:
                value = self._field(value_from["fieldRef"]["fieldPath"])
            else:
                raise Waiting("CreateContainerConfigError", f"the fake cluster covers no {list(value_from)}")
            if value is not None:
                made[entry["name"]] = value
        return made

    def _secret_key(self, reference: Object) -> str | None:
        try:
            held = self._held(SECRETS, reference["name"])
        except ApiError:
            if reference.get("optional"):
                return None
            raise Waiting("CreateContainerConfigError", f'secret "{reference["name"]}" not found') from None
        if reference["key"] in held:
            return b64decode(held[reference["key"]]).decode()
        if reference.get("optional"):
            return None
        where = f"{self.run.namespace}/{reference['name']}"
        raise Waiting("CreateContainerConfigError", f"couldn't find key {reference['key']} in Secret {where}")

    def _held(self, resource: Any, name: str) -> dict[str, str]:
        return self.run.kubelet.store.get(resource, self.run.namespace, name).get("data") or {}

    def _field(self, path: str) -> str:
        pod = {**self.run.pod, "status": {**self.run.pod["status"], "podIP": self.run.address, "hostIP": "127.0.0.1"}}
        if keyed := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
            return str((pod["metadata"].get(keyed[1]) or {}).get(keyed[2], ""))
        found: Any = pod
        for key in path.split("."):
            found = found.get(key, "")
        return str(found)

    def _localize(self, text: str, mounts: Mapping[str, Path]) -> str:
        """Replace the container's folders and addresses in a text of the manifest by those of this machine."""
        if mounts:
            paths = "|".join(re.escape(mount) for mount in sorted(mounts, key=len, reverse=True))
            own = re.escape(str(self.run.kubelet.root.parent))  # a path of this machine is left unchanged
            text = re.sub(rf"(?<![\w./~-])(?!{own})({paths})(?![\w.-])", lambda found: str(mounts[found[1]]), text)
        return self.run.kubelet.resolve(text.replace("0.0.0.0", self.run.address).replace("[::]", self.run.address))


def project(folder: Path, content: Mapping[str, bytes]) -> None:
    """Update the files of a volume atomically, by a link to a folder of them (``..data``) that is replaced.

    As ``pkg/volume/util/atomic_writer.go`` of kubernetes/kubernetes does: a file removed from the Secret is removed
    here, files of one volume never differ in age, and those of two volumes do.
    """
    made, link = Path(tempfile.mkdtemp(prefix="..", dir=folder)), folder / "..data"
    for key, value in content.items():
        (made / key).write_bytes(value)
    before = link.readlink() if link.is_symlink() else None
    (folder / "..data_tmp").symlink_to(made.name)
    (folder / "..data_tmp").replace(link)
    shown = {path.name for path in folder.iterdir() if not path.name.startswith("..")}
    for key in content.keys() - shown:
        (folder / key).symlink_to(f"..data/{key}")
    for key in shown - content.keys():
        (folder / key).unlink()
    if before is not None:
        shutil.rmtree(folder / before)


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Expand ``$(NAME)`` of known variables and keep others; ``$$(NAME)`` is the text ``$(NAME)``."""
    return re.sub(
        r"\$(\$|\(([^)]*)\))", lambda found: "$" if found[1] == "$" else variables.get(found[2], found[0]), text
    )


def claims(pod: Object) -> list[str]:
    """Return the names of the PersistentVolumeClaims that a pod mounts."""
    volumes = pod["spec"].get("volumes") or []
    return [volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume]


def requests(pod: Object) -> dict[str, float]:
    """Return the resources that a pod requests of a node."""
    total: dict[str, float] = {"pods": 1.0}
    for container in pod["spec"]["containers"]:
        for kind, amount in (container["resources"].get("requests") or {}).items():
            total[kind] = total.get(kind, 0.0) + quantity(amount)
    return total


def _leaving(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]
