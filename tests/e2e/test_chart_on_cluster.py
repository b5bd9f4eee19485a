"""The chart on a cluster: installed, killed, drained, tested, upgraded, rolled back, removed (docs/e2e.md)."""

from __future__ import annotations

import csv
import json
import ssl
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from chart_places import release
from e2e_places import Case, Place, until
from kubernetes.client.exceptions import ApiException
from run_processes import fedloom, started
from safetensors.numpy import load_file
from test_federation_on_cluster import assert_equals_reference
from vowel_data import vowel_examples

from fedloom.cluster.api import Api
from fedloom.cluster.progress_client import Tunnel
from fedloom.data.datasets import find_dataset
from fedloom.data.own import Own
from fedloom.data.pack import PackSettings, pack
from fedloom.data.pack.examples import Request
from fedloom.security.certificates import make_ca, make_certificate
from fedloom.security.tokens import add_token

CLASS_NAMES = find_dataset("vowel").spec.class_names

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.data,
    pytest.mark.timeout(1800),
    pytest.mark.group("e2e"),
]


SMALL = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}}
MEMBERS = 3
VOWELS: dict[str, Any] = {
    "name": "vowels",
    "data": {"own": {"kind": "features", "input_shape": [9], "classes": list(CLASS_NAMES)}},
    "model": {"name": "mlp", "hidden": [6]},
    "algorithm": {"name": "fedavg", "local": {"steps": 2, "lr": 0.1}, "personalize_steps": 3},
    "federation": {"rounds": 100_000, "clients_per_round": MEMBERS, "min_clients": 2, "deadline_s": 60},
    "evaluation": {"every": 20},
}


def values(place: Place, case: Case, folder: Path) -> dict[str, Any]:
    tokens = folder / "tokens.json"
    worker = add_token(tokens, "workers")[0].get_secret_value()
    return {
        **common(place),
        "experiment": {"values": yaml.safe_load(case.experiment)},
        "tls": {"mode": "none"},
        "insecure": True,
        "auth": {"tokens": {"existingSecret": place.secret_with("tokens", **{"tokens.json": tokens.read_text()})}},
        "tracking": ["csv"],
        "workers": {
            "kind": "StatefulSet",
            "replicas": 2,
            "resources": SMALL,
            "token": {"existingSecret": place.secret_with("worker", token=worker)},
            "partition": {"url": f"{place.storage}/partitions/{case.fingerprint}"},
        },
    }


def common(place: Place) -> dict[str, Any]:
    """Return image, store and settings of the aggregator."""
    repository, _, tag = place.image.rpartition(":")
    port = int(place.s3_endpoint.rpartition(":")[2])
    return {
        "image": {"repository": repository, "tag": tag},
        "state": {"kind": "objectStore"},
        "storage": {"url": place.storage, "endpoint": place.s3_endpoint, "existingSecret": place.secret},
        "aggregator": {"resources": SMALL, "report": False},
        "networkPolicy": {"store": {"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}], "port": port}},
    }


def published_round(place: Place, name: str) -> int:
    run = place.store.under(f"runs/{name}")
    records = [entry.name for entry in run.entries("published/")]
    return int(json.loads(run.read(records[-1]))["round"]) if records else -1


def test_a_release_survives_crashes_upgrades_and_drains(place: Place, case: Case, tmp_path: Path) -> None:
    """The aggregator crashes, its node is drained, it completes the run of one process, stays and continues."""
    given = values(place, case, tmp_path)
    with release(place, tmp_path, "inside") as fed:
        aggregator = f"{fed.name}-aggregator-0"
        fed.upgrade(given)
        until(lambda: published_round(place, fed.name) >= 2, f"{fed.name} trains", place.patience_s)
        place.crash(aggregator)
        until(lambda: published_round(place, fed.name) >= 6, f"{fed.name} trains again", place.patience_s)
        drained = [aggregator, *(f"{fed.name}-worker-{i}" for i in range(2))]
        left = {pod: uid(place, pod) for pod in drained}
        for pod in drained:  # as a drain does: one worker after the other; the pods' folders are lost
            place.evict(pod)
        for pod, before in left.items():
            until(lambda pod=pod, before=before: uid(place, pod) not in (before, None), "another", place.patience_s)

        def over() -> bool:
            names = {entry.name for entry in place.store.under(f"runs/{fed.name}").entries()}
            return "summary.json" in names

        until(over, f"{fed.name} is over; it says: {log(place, aggregator)}", place.patience_s)
        assert_equals_reference(place.fetch(f"runs/{fed.name}", tmp_path / "run"), case)
        with (tmp_path / "run" / "tracking.csv").open(newline="") as file:  # its tracker's file was published too
            rounds = [int(row["round"]) for row in csv.DictReader(file) if row["name"] == "train/loss"]
        assert rounds == [*range(1, case.rounds + 1)]
        fed.test("finished")  # it stays, and reports this to authorized peers

        more = {**given, "experiment": {"values": yaml.safe_load(case.experiment)}}
        more["experiment"]["values"]["federation"]["rounds"] = case.rounds + 2
        workers = [life(place, f"{fed.name}-worker-{i}") for i in range(2)]
        fed.upgrade(more)
        until(lambda: published_round(place, fed.name) >= case.rounds + 2, "more rounds are made", place.patience_s)
        assert [life(place, f"{fed.name}-worker-{i}") for i in range(2)] == workers  # none was restarted
        lines = [json.loads(line) for line in log(place, aggregator).splitlines() if line.startswith("{")]
        assert {"time", "level", "message", "run", "phase", "round"} <= set(lines[-1])

        before = uid(place, aggregator)
        fed.rollback()  # fewer rounds than it has completed; none is lost
        until(lambda: uid(place, aggregator) not in (before, None), "the aggregator is another", place.patience_s)
        assert published_round(place, fed.name) == case.rounds + 2
    remaining = [pod["metadata"]["name"] for pod in place.selected("app.kubernetes.io/part-of=fedloom")]
    assert [name for name in remaining if name.startswith(fed.name)] == []


def packed(folder: Path) -> list[Path]:
    """Pack each speaker of the vowel data as a separate member."""
    x, y, owners = vowel_examples()
    kind = Request(Own(kind="features", input_shape=(9,), classes=CLASS_NAMES).spec)
    found = []
    for speaker in range(MEMBERS + 1):
        found.append(folder / f"s{speaker}")
        np.savez(folder / "source.npz", x=x[owners == speaker], y=y[owners == speaker])
        pack(folder / "source.npz", found[-1], PackSettings(f"speaker-{speaker}", kind))
    return found


def test_external_members_survive_new_certificates_and_a_new_client_gets_a_model(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members connect from outside; the aggregator is drained, its certificate rotated, its experiment changed."""
    monkeypatch.setenv("KUBECONFIG", place.kubeconfig)
    ca, ours = tmp_path / "ca", tmp_path / "certificates"
    authority = make_ca(ca).certificate
    *members, newcomer = packed(tmp_path)

    def secret(name: str, hosts: list[str]) -> str:
        made = make_certificate(name, ours, ca, hosts=hosts, replace=True)
        files = {"tls.crt": made.certificate, "tls.key": made.key, "ca.crt": authority}
        return place.secret_with(name, **{key: path.read_text() for key, path in files.items()})

    client = {f"{entry.stem}.{entry.suffix[1:]}": entry.read_bytes() for entry in newcomer.iterdir()}
    anyone = [{"ipBlock": {"cidr": "0.0.0.0/0"}}]
    given: dict[str, Any] = {
        **common(place),
        "experiment": {"values": VOWELS},
        "tls": {"mode": "secret", "secret": {"name": f"{place.token}-server"}},
        "workers": {"kind": "none", "tls": {"existingSecret": secret("member", [])}},
        "networkPolicy": {**common(place)["networkPolicy"], "peers": anyone, "servePeers": anyone},
        "serve": {"enabled": True, "replicas": 1, "autoscaling": {"enabled": False}, "resources": SMALL},
        "test": {
            "data": "/client",
            "extraVolumes": [{"name": "client", "secret": {"secretName": place.secret_with("client", **client)}}],
            "extraVolumeMounts": [{"name": "client", "mountPath": "/client"}],
        },
    }
    with release(place, tmp_path, "members") as fed, ExitStack() as stack:
        aggregator = f"{fed.name}-aggregator-0"

        def port_of(component: str, port: int) -> str:
            chosen = f"app.kubernetes.io/instance={fed.instance},app.kubernetes.io/component={component}"

            def pod() -> str | None:
                found = [one["metadata"] for one in place.selected(chosen)]
                return next((about["name"] for about in found if "deletionTimestamp" not in about), None)

            return stack.enter_context(Tunnel(Api(place.namespace), pod, port)).address

        def more_rounds() -> None:
            before = published_round(place, fed.name)
            until(lambda: published_round(place, fed.name) >= before + 2, "more rounds are made", place.patience_s)

        fed.upgrade(given)  # its pods wait for the certificate
        services = [fed.name, f"{fed.name}-serve"]
        found = [place.core.read_namespaced_service(name, place.namespace).spec.cluster_ip for name in services]
        hosts = [f"{name}.{place.namespace}.svc" for name in services] + [ip for ip in found if ip != "None"]
        secret("server", [*hosts, "127.0.0.1"])

        at = port_of("aggregator", 7733)
        for i, data in enumerate(members):
            made = make_certificate(f"member-{i}", ours, ca)
            mine = ("--credentials", made.certificate.parent)
            stack.enter_context(started("worker", "--aggregator", at, "--data", data, "--reconnect", 1000, *mine))
        more_rounds()

        before = uid(place, aggregator)
        place.evict(aggregator)
        until(lambda: uid(place, aggregator) not in (before, None), "the aggregator is another", place.patience_s)
        more_rounds()
        assert "resuming round" in log(place, aggregator)

        def certificate() -> str:
            try:
                host, _, port = at.partition(":")
                return ssl.get_server_certificate((host, int(port)), timeout=5)
            except OSError:
                return ""

        until(certificate, "it shows a certificate", place.patience_s)
        old, before = certificate(), uid(place, aggregator)
        secret("server", [*hosts, "127.0.0.1"])
        until(lambda: certificate() not in (old, ""), "it shows the new certificate", place.patience_s)
        more_rounds()
        assert life(place, aggregator) == (before, 0)  # nothing was restarted

        rounds = published_round(place, fed.name) + 300  # more than complete before the aggregator is replaced
        federation = {**VOWELS["federation"], "rounds": rounds}
        fed.upgrade({**given, "experiment": {"values": {**VOWELS, "federation": federation}}})
        until(lambda: uid(place, aggregator) not in (before, None), "the experiment is another", place.patience_s)
        until(lambda: published_round(place, fed.name) == rounds, "it is over", place.patience_s)

        serving, made = port_of("serve", 7734), make_certificate("newcomer", ours, ca)
        mine = ("--credentials", made.certificate.parent)
        of_store = tmp_path / "of-the-store.safetensors"
        fedloom(
            "personalize", f"{place.storage}/runs/{fed.name}", "--data", newcomer, "--out", of_store,
            environment=place.store_environment,
        )  # fmt: skip
        served = tmp_path / "served.safetensors"

        def same() -> bool:  # `serve` follows the run within seconds
            fedloom("personalize", serving, "--data", newcomer, "--out", served, *mine)
            here, there = load_file(served), load_file(of_store)
            served.unlink()
            return here.keys() == there.keys() and all(np.array_equal(here[key], there[key]) for key in here)

        until(same, "the newcomer is served the last round's model", place.patience_s)
        fed.test("finished", f"the model of speaker-{MEMBERS}: vowels, round {rounds}")


def uid(place: Place, pod: str) -> str | None:
    try:
        return str(place.pod(pod)["metadata"]["uid"])
    except ApiException:
        return None


def life(place: Place, pod: str) -> tuple[str, int]:
    """Return the identity of a pod, and the number of its container's restarts."""
    found = place.pod(pod)
    (status,) = found["status"]["containerStatuses"]
    return found["metadata"]["uid"], status["restartCount"]


def log(place: Place, pod: str) -> str:
    try:
        return place.log(pod)
    except ApiException:
        return ""
