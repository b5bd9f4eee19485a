"""A Prometheus of Debian's that scrapes a federation: every expression of alerts and dashboard finds its data."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import debian
import helm
import pytest
import yaml
from ports import free_address
from run_processes import started, until
from test_alerts import AGGREGATOR, SERVE, WORKER, rules
from test_open_federation import CLASS_NAMES, GIVEN, Federation, members

from fedloom.security.certificates import make_ca, make_certificate

__all__ = ["members"]
pytestmark = [pytest.mark.slow, pytest.mark.group("prometheus")]

EXPERIMENT = f"""\
name: vowels
data:
  own: {{kind: features, input_shape: [9], classes: [{", ".join(CLASS_NAMES)}], normalization: {GIVEN}}}
model: {{name: mlp, hidden: [6]}}
algorithm: {{name: fedavg, local: {{epochs: 1, batch_size: 8, lr: 0.1}}}}
federation:
  rounds: 100000
  clients_per_round: 2
  min_clients: 2
  checkpoint_every_s: 0
  privacy: {{of: examples, clip: 1.0, noise_multiplier: 50.0, delta: 1.0e-5, budget: 1000}}
evaluation: {{every: 5, cohort: 2}}
runtime: {{workers: 0}}
"""
POLICY = {"privacy": {"unit": "examples", "noise_multiplier": 1.0, "epsilon": 1000.0, "delta": 1e-5}, "folder": "kept"}

SERVED = f'fedloom_served_round{{service="{SERVE["service"]}"}}'
NO_DATA = {
    'percent="false"': "the task's headline metric is a fraction",
    "fedloom_train_loss": "members send no losses with privacy of examples",
    "fedloom_refusals_total": "nothing is refused, unless an answer is late",
    "fedloom_worker_gpu_memory_bytes": "no GPU",
}
"""Selectors of the dashboard that may find nothing in this federation, and why."""


class Prometheus:
    """A server with its HTTP API, and the time that queries are about."""

    def __init__(self, address: str) -> None:
        self.url, self.time = f"http://{address}/api/v1", 0.0

    def get(self, path: str, **query: str) -> Any:
        """Return the data of an answer."""
        with urllib.request.urlopen(f"{self.url}/{path}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an instant vector."""
        result: list[dict[str, Any]] = self.get("query", query=expression, time=str(self.time))["result"]
        return result


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory, members: Path) -> Iterator[Prometheus]:
    """Yield a server that has scraped an aggregator under TLS, model serving and a member's worker for some rounds."""
    binary, folder = debian.program("prometheus", "prometheus"), tmp_path_factory.mktemp("prometheus")
    make_ca(folder / "ca")
    make_certificate("server", folder, folder / "ca", hosts=["127.0.0.1"])
    (folder / "server" / "ca.crt").unlink()  # peers need no certificate
    policy = folder / "policy.yaml"
    policy.write_text(yaml.safe_dump(POLICY))
    address, aggregator, worker, serve = (free_address() for _ in range(4))
    dial = ("--credentials", folder / "ca")
    targets = [(aggregator, AGGREGATOR), (worker, WORKER), (serve, SERVE)]
    scrapes = {
        "job_name": "fedloom",
        "static_configs": [
            {"targets": [target], "labels": {key: labels[key] for key in labels if key != "instance"}}
            for target, labels in targets
        ],
    }
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules("silos")))
    intervals = {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "2s"}
    (folder / "prometheus.yaml").write_text(
        yaml.safe_dump({"global": intervals, "rule_files": ["rules.yaml"], "scrape_configs": [scrapes]})
    )
    command = [binary, f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with contextlib.ExitStack() as processes, (folder / "log").open("wb") as log:
        federation = Federation(folder, members, processes, EXPERIMENT)
        federation.aggregator("--credentials", folder / "server", "--metrics", aggregator)
        federation.worker(0, name="w0", more=(*dial, "--metrics", worker, "--policy", policy))
        federation.worker(1, name="w1", more=dial)
        federation.more_rounds()
        served = ("--listen", "127.0.0.1:0", "--credentials", folder / "server", "--follow", "--metrics", serve)
        processes.enter_context(started("serve", federation.run, *served))
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
        processes.callback(process.wait)
        processes.callback(process.kill)
        server = Prometheus(address)

        def scraped() -> bool:
            server.time = time.time()  # a scrape that times out later is not seen
            with contextlib.suppress(OSError):
                return len(server.query("count_over_time(up[10m]) > 3 and up == 1")) == 3 and all(
                    server.query(each)
                    for each in ("fedloom_worker_headline", "fedloom_round > 3", "fedloom_durable_round", SERVED)
                )
            return False

        until(scraped, "scrapes of all three processes, after an evaluation")
        yield server


def test_alerts_are_evaluated_and_none_fires(prometheus: Prometheus) -> None:
    (group,) = prometheus.get("rules", type="alert")["groups"]
    assert [(rule["health"], rule.get("lastError")) for rule in group["rules"]] == 8 * [("ok", None)]
    assert [rule["name"] for rule in group["rules"] if rule["state"] == "firing"] == []


def test_every_selector_of_an_alert_finds_its_series(prometheus: Prometheus) -> None:
    for group in rules("silos")["groups"]:
        for rule in group["rules"]:
            selectors = re.findall(r"\w+\{[^}]*\}", rule["expr"])
            assert selectors
            assert [selector for selector in selectors if not prometheus.query(selector)] == []


def dashboard() -> dict[str, Any]:
    text = (helm.CHART / "files" / "dashboard.json").read_text()
    for name, value in {"namespace": "fl", "service": AGGREGATOR["service"], "worker": WORKER["pod"]}.items():
        text = text.replace(f"${name}", value)
    found: dict[str, Any] = json.loads(text)
    return found


def test_every_expression_of_the_dashboard_returns_data(prometheus: Prometheus) -> None:
    expressions = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    assert len(expressions) > 25
    empty = [expression for expression in expressions if not prometheus.query(expression)]
    assert [expression for expression in empty if not any(part in expression for part in NO_DATA)] == []


def test_legends_of_the_dashboard_tell_series_apart(prometheus: Prometheus) -> None:
    for panel in dashboard()["panels"]:
        names = [
            re.sub(r"\{\{(\w+)\}\}", lambda label: series["metric"][label[1]], target["legendFormat"])  # noqa: B023
            for target in panel.get("targets", ())
            for series in prometheus.query(target["expr"])
        ]
        assert len(names) == len(set(names)), panel["title"]


def test_the_dashboards_variables_have_values(prometheus: Prometheus) -> None:
    found = {}
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            ((selector, label),) = re.findall(r"label_values\((.+), (\w+)\)", variable["query"])
            found[variable["name"]] = prometheus.get(f"label/{label}/values", **{"match[]": selector})
    assert found == {"namespace": ["fl"], "service": [AGGREGATOR["service"]], "worker": [WORKER["pod"]]}
