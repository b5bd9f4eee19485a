"""``fedloom doctor``: findings about this machine, an aggregator, credentials, a store and a cluster."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from facts import mentions, tells
from fake_cluster import FakeCluster
from ports import free_address
from run_processes import fedloom
from s3_support import S3Server
from test_control import Controlled

from fedloom.security import certificates
from fedloom.security.certificates import make_ca, make_certificate
from fedloom.security.options import Protection, ServerOptions
from fedloom.storage import open_store

RULES = [{"apiGroups": ["", "batch"], "resources": ["services", "jobs", "pods", "pods/log"], "verbs": ["*"]}]


def doctor(*arguments: object, code: int = 0, **environment: str) -> dict[str, dict[str, Any]]:
    """Return the findings by subject; each problem must have stood in the text with its remedy."""
    found = json.loads(fedloom("doctor", *arguments, "--json", code=code, environment=environment))
    text = fedloom("doctor", *arguments, code=code, environment=environment)
    for finding in found:
        assert finding["subject"] in text
        assert finding["remedy"].partition("\n")[0] in text
    return {finding["subject"]: finding for finding in found}


def test_a_healthy_machine_has_no_error(tmp_path: Path) -> None:
    found = doctor(FEDLOOM_DATA=str(tmp_path))
    assert {"fedloom", "torch", "memory", "disk, data sets", "disk, this folder"} <= set(found)
    assert {finding["state"] for finding in found.values()} <= {"ok", "warning"}
    assert str(tmp_path) in found["disk, data sets"]["detail"]


def test_a_broken_plugin_is_an_error(tmp_path: Path) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fedloom.datasets]\nodd = broken_package:DATA\n")
    found = doctor(code=2, PYTHONPATH=str(tmp_path))["plugin odd"]
    assert tells(found["detail"], "broken_package")
    assert tells(found["remedy"], "broken")


@pytest.mark.slow
def test_an_aggregator_and_credentials_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = free_address()
    found = doctor("--aggregator", nobody, code=8)["aggregator"]
    assert tells(found["detail"], nobody)

    make_ca(tmp_path / "ca")
    make_certificate("server", tmp_path, tmp_path / "ca", hosts=["127.0.0.1"])
    make_certificate("north", tmp_path, tmp_path / "ca", days=40)
    make_certificate("soon", tmp_path, tmp_path / "ca", days=3)
    with monkeypatch.context() as past:
        past.setattr(certificates, "_now", lambda: datetime.now(UTC) - timedelta(days=50))
        make_certificate("late", tmp_path, tmp_path / "ca", days=10)
    make_ca(tmp_path / "other")
    make_certificate("thief", tmp_path, tmp_path / "other")

    options = ServerOptions.from_folder(tmp_path / "server", environment={})
    running = Controlled(tmp_path / "run", protection=Protection(options))
    address = running.address
    try:
        found = doctor("--aggregator", address, "--credentials", tmp_path / "north")
        assert mentions(found["credentials"]["detail"], "certificate")
        assert found["certificate"]["state"] == "ok"
        assert tells(found["aggregator"]["detail"], address, "0 workers")
        assert doctor("--credentials", tmp_path / "soon")["certificate"]["state"] == "warning"
        assert "expired" in doctor("--credentials", tmp_path / "late", code=4)["credentials"]["detail"]
        refused = doctor("--aggregator", address, "--credentials", tmp_path / "thief", code=4)
        assert refused["aggregator"]["state"] == "error"
        assert doctor("--aggregator", address, code=8)["aggregator"]["state"] == "error"  # plaintext
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 500)
        skewed = doctor("--aggregator", address, "--credentials", tmp_path / "north")["aggregator"]
        assert skewed["state"] == "warning"
        assert "ahead" in skewed["detail"]
    finally:
        running.aggregator.stop()


@pytest.mark.slow
def test_a_store_is_written_to(tmp_path: Path, s3_server: S3Server) -> None:
    url = f"s3://{s3_server.new_bucket()}/team"
    assert doctor("--store", url, **s3_server.environment)["store"]["state"] == "ok"
    wrong = {**s3_server.environment, "AWS_SECRET_ACCESS_KEY": "wrong"}
    assert doctor("--store", url, code=4, **wrong)["store"]["state"] == "error"
    assert doctor("--store", "s3://absent-bucket/x", code=6, **s3_server.environment)["store"]["state"] == "error"
    assert list(open_store(tmp_path).entries()) == []


@pytest.mark.slow
def test_rights_on_a_cluster_are_listed(tmp_path: Path) -> None:
    with FakeCluster(tmp_path / "cluster", images={}) as cluster:
        found = doctor("--cluster", KUBECONFIG=str(cluster.kubeconfig))
        assert {found[subject]["state"] for subject in found if subject.startswith(("cluster", "rights"))} == {"ok"}
        found = doctor("--cluster", KUBECONFIG=str(cluster.kubeconfig_for(RULES)))
        assert found["rights to show progress"]["state"] == "warning"
        assert "pods/portforward" in found["rights to show progress"]["detail"]
        found = doctor("--cluster", code=4, KUBECONFIG=str(cluster.kubeconfig_for([])))
        assert found["cluster"]["state"] == "error"
    assert doctor("--cluster", code=4, KUBECONFIG=str(tmp_path / "absent"), HOME=str(tmp_path))["cluster"]["remedy"]
