"""Passwords in URLs are neither shown, logged nor passed on, whichever part of FedLoom or library quotes them."""

from __future__ import annotations

import json
import logging
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from test_local_data import TASK, people

import fedloom
from fedloom.cluster.settings import ClusterSettings
from fedloom.core.logs import JsonLines
from fedloom.core.processes import ChildReport, environment, python
from fedloom.core.words import printable, shortened
from fedloom.errors import ExperimentError, StorageError, from_json, without_secrets
from fedloom.experiment import of
from fedloom.kubeflow.client import Kubeflow, KubeflowSettings
from fedloom.kubeflow.registration import ModelRegistry
from fedloom.storage import open_store

SECRET = "http://ann:hunter2@127.0.0.1:9"
KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (SECRET, "http://127.0.0.1:9"),
        ("http://hunter2@h", "http://h"),
        ("see http://a:hunter2@h and 'https://b:hunter2@i/p'.", "see http://h and 'https://i/p'."),
        ("postgresql+psycopg://u:hun#ter2@h/db", "postgresql+psycopg://h/db"),
        ("http://ann:hun/ter2@h/x", "http://h/x"),
        ("http://ann:p@hunter2@h:1/a@b", "http://h:1/a@b"),
        ("http://h:80/a@b?c=d@e", "http://h:80/a@b?c=d@e"),
        ("http://[::1]:80/x@y", "http://[::1]:80/x@y"),
        ("s3://bucket/user@example.com/runs", "s3://bucket/user@example.com/runs"),
        ("registry.example:5000/worker:1@sha256:0a", "registry.example:5000/worker:1@sha256:0a"),
    ],
)
def test_only_user_information_is_removed(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_errors_words_and_logs_have_no_user_information() -> None:
    error = StorageError(f"{SECRET} failed", hint=f"try {SECRET}", found=SECRET, allowed=[SECRET])
    record = logging.LogRecord("fedloom", logging.INFO, "", 0, "%s", (SECRET,), (OSError, OSError(SECRET), None))
    for text in (
        f"{error} {error.found}",
        json.dumps(error.as_json()),
        str(from_json({**error.as_json(), "message": SECRET})),
        JsonLines().format(record),
        printable(SECRET),
        printable(SECRET, 15),
        shortened(SECRET, 15),
    ):
        assert "http://127.0" in text
        assert "hunt" not in text


@pytest.mark.parametrize(
    "use",
    [
        ModelRegistry,
        lambda url: ModelRegistry(f"{url}/?x=1"),
        lambda url: Kubeflow(KubeflowSettings(host=url)),
        lambda url: open_store("s3://bucket/x", {**KEYS, "FEDLOOM_S3_ENDPOINT": url}),
        lambda url: open_store(url.replace("http", "s3")),
        lambda url: ClusterSettings.from_json(json.dumps({"s3_endpoint": url})),
        lambda url: ClusterSettings.from_json(json.dumps({"aggregator": {"env": {"MLFLOW_TRACKING_URI": url}}})),
        lambda url: of(TASK, data={"dataset": "synthetic"}, storage=url),
    ],
)
@pytest.mark.parametrize("url", [SECRET, "http://ann:hun/ter2@127.0.0.1:9"])
def test_settings_refuse_a_password_without_showing_it(use: Callable[[str], object], url: str) -> None:
    with pytest.raises(ExperimentError) as refused:
        use(url)
    assert "ter2" not in str(refused.value)


@pytest.mark.usefixtures("forks")
def test_a_bug_in_a_task_of_a_pipeline_shows_no_password() -> None:
    code = f"from fedloom.kubeflow.steps import step\ndef task(): raise ValueError('{SECRET}')\nstep(task)()"
    done = subprocess.run(python("-c", code), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "ValueError: http://127.0.0.1:9" in done.stderr
    assert "hunter2" not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("more", [[], ["--verbose"], ["--log-format", "json"]])
def test_the_traceback_of_a_users_own_code_shows_no_password(tmp_path: Path, more: list[str]) -> None:
    (tmp_path / "nets.py").write_text(f"def net():\n    raise OSError(5, 'no answer of {SECRET}')\n")
    data = fedloom.Federated.from_arrays(people(), root=tmp_path / "data", held_out_fraction=0.25)
    e = json.loads(of(TASK, data=data).model_dump_json())
    (tmp_path / "e.yaml").write_text(json.dumps({**e, "model": {"name": "module", "factory": "nets:net"}}))
    words = ["-m", "fedloom", *more, "run", str(tmp_path / "e.yaml"), "--no-report", "--out", str(tmp_path / "run")]
    report = tmp_path / "report.jsonl"
    own = environment({"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)}, report)
    done = subprocess.run(python(*words), env=own, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert "no answer of http://127.0.0.1:9" in done.stderr
    assert ChildReport(report).failure is not None
    assert "hunter2" not in done.stdout + done.stderr + report.read_text()
