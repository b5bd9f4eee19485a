"""A federation over three clusters and a machine outside: one release of the chart on each cluster.

The clusters are fake ones (``fake_cluster``), even if the environment names a real one. They share only the address
to which members connect, here that of the aggregator's Service (docs/cluster.md).
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_places import OnProcesses
from e2e_places import Place, processes, until
from helm import CHART
from run_processes import fedloom as run_fedloom
from run_processes import final, scores, started
from s3_support import S3Server
from test_chart_on_cluster import SMALL, VOWELS, common, log, packed, published_round, uid

from fedloom.security.certificates import make_ca, make_certificate

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.group("e2e")]

ROUNDS = 60
EXPERIMENT: dict[str, Any] = {
    **VOWELS,
    "seed": 3,
    "federation": {**VOWELS["federation"], "rounds": ROUNDS, "min_clients": 3, "heartbeat_timeout_s": 600},
}


def test_members_in_other_clusters_give_the_results_of_one_process(s3_server: S3Server, tmp_path: Path) -> None:
    """Mutual TLS end to end; a member may only act as its certificate names it; the aggregator's node is drained."""
    ca, ours = tmp_path / "ca", tmp_path / "certificates"
    authority = make_ca(ca).certificate
    data = packed(tmp_path)[:3]

    def certificate(place: Place, name: str, hosts: list[str]) -> str:
        made = make_certificate(name, ours, ca, hosts=hosts)
        files = {"tls.crt": made.certificate, "tls.key": made.key, "ca.crt": authority}
        return place.secret_with(name, **{key: path.read_text() for key, path in files.items()})

    with ExitStack() as stack:
        here, *elsewhere = (
            stack.enter_context(processes(tmp_path / name, s3_server)) for name in ("hub", "north", "south")
        )

        def install(place: Place, name: str, values: dict[str, Any]) -> OnProcesses:
            folder = tmp_path / f"release-{name}"
            folder.mkdir()
            made = OnProcesses(place, folder, name)
            stack.callback(made.uninstall)
            made.upgrade(values)
            return made

        members = ("north", "south", "east")
        identities = [
            {"name": name, "certificate": f"URI:urn:fedloom:{name}", "roles": ["worker"], "clients": [f"speaker-{i}"]}
            for i, name in enumerate(members)
        ]
        hub = install(
            here,
            "hub",
            {
                **common(here),
                "experiment": {"values": EXPERIMENT},
                "tls": {"mode": "secret", "secret": {"name": f"{here.token}-hub"}},
                "auth": {"identities": identities},
                "networkPolicy": {**common(here)["networkPolicy"], "peers": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]},
            },
        )
        service = here.core.read_namespaced_service("hub", here.namespace).spec
        at = f"{service.cluster_ip}:{service.ports[0].port}"
        certificate(here, "hub", [service.cluster_ip])  # its pod waits for it

        base = yaml.safe_load((CHART / "ci" / "member-values.yaml").read_text())
        for i, (name, place) in enumerate(zip(members, elsewhere, strict=False)):
            files = {f"{entry.stem}.{entry.suffix[1:]}": entry.read_bytes() for entry in data[i].iterdir()}
            shards = {"name": "data", "secret": {"secretName": place.secret_with("clients", **files)}}
            own = {
                **base["workers"], "aggregator": at, "data": "/data", "extraArgs": [], "resources": SMALL,
                "tls": {"existingSecret": certificate(place, name, [])}, "extraVolumes": [shards],
            }  # fmt: skip
            install(place, name, {**base, "image": common(place)["image"], "workers": own})
        outside = make_certificate(members[2], ours, ca).certificate.parent
        alone = ("--aggregator", at, "--data", data[2], "--reconnect", 1000, "--credentials", outside)
        stack.enter_context(started("worker", *alone))

        aggregator = f"{hub.name}-aggregator-0"
        until(lambda: published_round(here, hub.name) >= 2, "rounds are made", here.patience_s)
        before = uid(here, aggregator)
        here.evict(aggregator)
        until(lambda: uid(here, aggregator) not in (before, None), "the aggregator is another", here.patience_s)
        runs = here.store.under(f"runs/{hub.name}")

        def over() -> bool:
            return "summary.json" in {entry.name for entry in runs.entries()}

        until(over, f"the rounds are over; the aggregator says: {log(here, aggregator)}", here.patience_s)
        run = here.fetch(f"runs/{hub.name}", tmp_path / "run")
        for name, place in zip(members, elsewhere, strict=False):
            assert [pod["metadata"]["name"] for pod in place.selected("")] == [f"{name}-worker-0"]  # no aggregator

    joins = [json.loads(line) for line in (run / "logs" / "audit.jsonl").read_text().splitlines()]
    assert {line["identity"] for line in joins if line["event"] == "join"} == set(members)
    reference = tmp_path / "experiment.yaml"
    reference.write_text(yaml.safe_dump(EXPERIMENT))
    folders = [word for folder in data for word in ("--data", folder)]
    run_fedloom("run", reference, *folders, "--out", tmp_path / "alone", "--no-report")
    assert scores(run)["rounds"] == ROUNDS
    assert final(run) == final(tmp_path / "alone")
    assert scores(run) == scores(tmp_path / "alone")
