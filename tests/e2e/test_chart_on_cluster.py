"""The chart on a cluster: installed, killed, tested, upgraded, rolled back, removed (docs/e2e.md)."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_places import release
from e2e_places import Case, Place
from kubernetes.client.exceptions import ApiException
from run_processes import until
from test_federation_on_cluster import assert_equals_reference

from fedloom.trust.tokens import add_token

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.data,
    pytest.mark.timeout(1800),
    pytest.mark.xdist_group("e2e"),
]


def values(place: Place, case: Case, folder: Path) -> dict[str, Any]:
    tokens = folder / "tokens.json"
    worker = add_token(tokens, "workers")[0].get_secret_value()
    repository, _, tag = place.image.rpartition(":")
    small = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}}
    port = int(place.s3_endpoint.rpartition(":")[2])
    return {
        "image": {"repository": repository, "tag": tag},
        "experiment": {"values": yaml.safe_load(case.experiment)},
        "state": {"kind": "objectStore"},
        "storage": {"url": place.storage, "endpoint": place.s3_endpoint, "existingSecret": place.secret},
        "tls": {"mode": "none"},
        "insecure": True,
        "auth": {"tokens": {"existingSecret": place.secret_with("tokens", **{"tokens.json": tokens.read_text()})}},
        "aggregator": {"resources": small, "report": False},
        "tracking": ["csv"],
        "workers": {
            "kind": "StatefulSet",
            "replicas": 2,
            "resources": small,
            "token": {"existingSecret": place.secret_with("worker", token=worker)},
            "partition": {"url": f"{place.storage}/partitions/{case.fingerprint}"},
        },
        "networkPolicy": {"store": {"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}], "port": port}},
    }


def published_round(place: Place, name: str) -> int:
    run = place.store.under(f"runs/{name}")
    records = [entry.name for entry in run.entries("published/")]
    return int(json.loads(run.read(records[-1]))["round"]) if records else -1


def test_a_release_lives_through_what_happens_to_it(place: Place, case: Case, tmp_path: Path) -> None:
    """The aggregator crashes in a round; the run is that of one process; it stays; it goes on with more rounds."""
    given = values(place, case, tmp_path)
    with release(place, tmp_path) as fed:
        aggregator = f"{fed.name}-aggregator-0"
        fed.upgrade(given)
        until(lambda: published_round(place, fed.name) >= 2, f"{fed.name} trains", place.patience_s)
        place.crash(aggregator)

        def over() -> bool:
            names = {entry.name for entry in place.store.under(f"runs/{fed.name}").entries()}
            return "summary.json" in names

        until(over, f"{fed.name} is over; it says: {log(place, aggregator)}", place.patience_s)
        assert_equals_reference(place.fetch(f"runs/{fed.name}", tmp_path / "run"), case)
        with (tmp_path / "run" / "tracking.csv").open(newline="") as file:  # what its tracker wrote came along
            rounds = [int(row["round"]) for row in csv.DictReader(file) if row["name"] == "train/loss"]
        assert rounds == [*range(1, case.rounds + 1)]
        assert "finished" in fed.test()  # it stays, and says so to whom it knows

        more = {**given, "experiment": {"values": yaml.safe_load(case.experiment)}}
        more["experiment"]["values"]["federation"]["rounds"] = case.rounds + 2
        fed.upgrade(more)
        until(lambda: published_round(place, fed.name) >= case.rounds + 2, "more rounds are made", place.patience_s)
        lines = [json.loads(line) for line in log(place, aggregator).splitlines() if line.startswith("{")]
        assert {"time", "level", "message", "run", "phase", "round"} <= set(lines[-1])

        before = uid(place, aggregator)
        fed.rollback()  # fewer rounds than it has made; nothing of them is lost
        until(lambda: uid(place, aggregator) not in (before, None), "the aggregator is another", place.patience_s)
        assert published_round(place, fed.name) == case.rounds + 2
    left = place.core.list_namespaced_pod(place.namespace, label_selector="app.kubernetes.io/part-of=fedloom").items
    assert [pod.metadata.name for pod in left if pod.metadata.name.startswith(fed.name)] == []


def uid(place: Place, pod: str) -> str | None:
    try:
        return str(place.core.read_namespaced_pod(pod, place.namespace).metadata.uid)
    except ApiException:
        return None


def log(place: Place, pod: str) -> str:
    try:
        return place.log(pod)
    except ApiException:
        return ""
