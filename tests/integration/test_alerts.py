"""Alerts of the chart in Prometheus' own evaluator: each fires when its page says so, and not otherwise."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import debian
import helm
import pytest
import yaml

ON = ("metrics.enabled", "metrics.serviceMonitor.enabled", "metrics.prometheusRule.enabled")
PEER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
HOUR, DAY = 60, 24 * 60
WORKING = {"phase": "training"}


def rules(scenario: str) -> dict[str, Any]:
    """Return the specification of a scenario's PrometheusRule, which is a file of rules for Prometheus."""
    text = helm.rendered(scenario, {**dict.fromkeys(ON, True), "networkPolicy.metrics": [PEER]})
    (rule,) = [item for item in helm.objects(text) if item["kind"] == "PrometheusRule"]
    spec: dict[str, Any] = rule["spec"]
    return spec


def promtool(*words: object) -> str:
    """Run promtool, which must succeed, and return its output."""
    command = [debian.program("promtool", "prometheus"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("scenario", helm.SCENARIOS)
def test_prometheus_accepts_the_rules(scenario: str, tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(rules(scenario)))
    count = sum(len(group["rules"]) for group in rules(scenario)["groups"])
    assert f"SUCCESS: {count} rules found" in promtool("check", "rules", "--lint-fatal", file)


# --- when they fire ---------------------------------------------------------------------------------------------------


def series(metric: str, target: dict[str, str], values: str, **labels: str) -> dict[str, str]:
    """Return a series of promtool: a value a minute, from minute 0."""
    matchers = ",".join(f'{name}="{value}"' for name, value in (target | labels).items())
    return {"series": f"{metric}{{{matchers}}}", "values": values}


def service(name: str, address: int = 1) -> dict[str, str]:
    """Return the labels that the operator gives to a pod scraped through a ServiceMonitor."""
    pod = f"fed-fedloom-{name}-0"
    return {"namespace": "fl", "service": f"fed-fedloom-{name}", "pod": pod, "instance": f"10.0.0.{address}:7736"}


def worker(index: int = 0) -> dict[str, str]:
    """Return the labels that the operator gives to a pod scraped through a PodMonitor."""
    return {"namespace": "fl", "pod": f"fed-fedloom-worker-{index}", "instance": f"10.0.1.{index}:7736"}


AGGREGATOR, SERVE, WORKER = service("aggregator"), service("serve"), worker()
BOTH = ("namespace", "service")
TARGET = ("namespace", "service", "pod", "instance")
OF_WORKER = ("namespace", "pod", "instance")


def restarts(*minutes: int) -> str:
    """Return an aggregator's start times, if it starts at these minutes."""
    starts = [max((each for each in minutes if each <= now), default=0) for now in range(2 * HOUR)]
    return " ".join(str(60 * start) for start in starts)


def stalled(durable: str, phase: str = "1x300", seconds: str = "0+60x300") -> list[dict[str, str]]:
    return [
        series("fedloom_durable_timestamp_seconds", AGGREGATOR, durable),
        series("fedloom_phase", AGGREGATOR, phase, **WORKING),
        series("fedloom_phase_seconds_total", AGGREGATOR, seconds, **WORKING),
    ]


def connection(connected: str, allowed: str = "1x300") -> list[dict[str, str]]:
    return [
        series("fedloom_worker_connected", WORKER, connected),
        series("fedloom_worker_allowed", WORKER, allowed),
    ]


def without_rounds(changed: str, connected: str = "1x300", phase: str = "1x300") -> list[dict[str, str]]:
    return [
        series("fedloom_worker_round_timestamp_seconds", WORKER, changed),
        series("fedloom_worker_connected", WORKER, connected),
        series("fedloom_worker_federation_phase", WORKER, phase, **WORKING),
    ]


class Case(NamedTuple):
    """Input of an alert, the minutes at which it fires and does not, and the labels of the input that it keeps."""

    alert: str
    series: list[dict[str, str]]
    fires: tuple[int, ...]
    silent: tuple[int, ...]
    keeps: tuple[str, ...] = BOTH
    target: dict[str, str] = AGGREGATOR


CASES = {
    "it answers": Case("FedLoomAggregatorDown", [series("up", AGGREGATOR, "1x300")], (), (5, 60, 290)),
    "it stops answering": Case("FedLoomAggregatorDown", [series("up", AGGREGATOR, "1x30 0x100")], (50, 120), (30, 40)),
    "there is no pod": Case("FedLoomAggregatorDown", [], (10, 60), (9,)),
    "it crashes again and again": Case(
        "FedLoomAggregatorDown", [series("up", AGGREGATOR, "1x30" + " 0 0 0 1" * 30)], (60, 140), (30, 40)
    ),
    "it restarts once": Case("FedLoomAggregatorDown", [series("up", AGGREGATOR, "1x30 0x4 1x60")], (), (35, 45, 90)),
    "its replacement never answers": Case(
        "FedLoomAggregatorDown",
        [series("up", AGGREGATOR, "1x30 stale"), series("up", service("aggregator", 2), "_x31 0x100")],
        (50, 120), (30, 40),
    ),
    "three restarts": Case(
        "FedLoomAggregatorRestarts", [series("process_start_time_seconds", AGGREGATOR, restarts(20, 30, 40))],
        (), (39, 41, 60, 110),
    ),
    "four restarts": Case(
        "FedLoomAggregatorRestarts", [series("process_start_time_seconds", AGGREGATOR, restarts(20, 30, 40, 50))],
        (52, 75), (49, 115),
    ),
    "four replaced pods": Case(
        "FedLoomAggregatorRestarts",
        [
            series("process_start_time_seconds", service("aggregator", 1 + i), f"_x{10 * i} {600 * i}x8 stale")
            for i in range(5)
        ],
        (43, 48), (39,),
    ),
    "rounds go on": Case("FedLoomRoundsStalled", stalled("0+60x300"), (), (10, 130, 290)),
    "no round is completed": Case("FedLoomRoundsStalled", stalled("0x300"), (126, 290), (119, 124), TARGET),
    "a pause of three hours": Case(
        "FedLoomRoundsStalled", stalled("0x300", "1x10 0x180 1x110", "0+60x10 600x180 600+60x110"),
        (298,), (195, 220, 285), TARGET,
    ),
    "training has ended": Case(
        "FedLoomRoundsStalled", stalled("0x300", "1x60 0x240", "0+60x60 3600x240"), (), (130, 290)
    ),
    "much ε is spent": Case(
        "FedLoomPrivacyBudgetNearlySpent",
        [
            series("fedloom_privacy_epsilon", AGGREGATOR, "0+0.1x100"),
            series("fedloom_privacy_budget", AGGREGATOR, "8x100"),
        ],
        (74, 99), (60, 72), TARGET,
    ),
    "ε without a budget": Case(
        "FedLoomPrivacyBudgetNearlySpent", [series("fedloom_privacy_epsilon", AGGREGATOR, "99x100")], (), (50,)
    ),
    "a certificate ends in three days": Case(
        "FedLoomCertificateEnds",
        [series("fedloom_certificate_end_timestamp_seconds", AGGREGATOR, f"{60 * 3 * DAY}x{3 * DAY}")],
        (DAY + HOUR + 1, 3 * DAY), (1, DAY, DAY + HOUR), TARGET,
    ),
    "it is renewed": Case(
        "FedLoomCertificateEnds",
        [series("fedloom_certificate_end_timestamp_seconds", SERVE, f"{60 * 2 * DAY}x30 {60 * 9 * DAY}x{2 * DAY}")],
        (), (25, 100, 2 * DAY),
    ),
    "one of two serves": Case(
        "FedLoomServeDown",
        [series("up", SERVE, "0x100"), series("up", service("serve", 3), "1x100"), series("up", AGGREGATOR, "1x100")],
        (), (50, 90),
    ),
    "none serves": Case(
        "FedLoomServeDown",
        [
            series("up", SERVE, "1x30 0x100"), series("up", AGGREGATOR, "1x130"),
            series("fedloom_durable_round", AGGREGATOR, "7x130"),
        ],
        (41, 120), (30, 39), BOTH, SERVE,
    ),
    "no pod serves, and the aggregator is down": Case(
        "FedLoomServeDown", [series("up", AGGREGATOR, "0x100")], (10, 90), (9,), BOTH, SERVE
    ),
    "no round is durable yet": Case(
        "FedLoomServeDown", [series("up", SERVE, "0x100"), series("up", AGGREGATOR, "1x100")], (), (50, 90)
    ),
    "a worker that is connected": Case("FedLoomWorkerDisconnected", connection("1x300"), (), (5, 100, 290)),
    "a worker that starts before its aggregator": Case(
        "FedLoomWorkerDisconnected", connection("0x10 1x100"), (), (3, 9, 12, 60)
    ),
    "a worker that loses its aggregator": Case(
        "FedLoomWorkerDisconnected", connection("1x30 0x100"), (51, 120), (31, 40, 44), OF_WORKER, WORKER
    ),
    "a worker that is restarted and does not connect": Case(
        "FedLoomWorkerDisconnected",
        connection("1x30" + " 0 0 0 stale _" * 20, "1x30" + " 1 1 1 stale _" * 20), (60, 120), (31, 40, 44),
        OF_WORKER, WORKER,
    ),
    "a worker outside of its hours": Case(
        "FedLoomWorkerDisconnected", connection("1x30 0x100 1x50", "1x30 0x100 1x50"), (), (60, 120, 131, 140, 170)
    ),
    "a worker that sees rounds": Case("FedLoomWorkerWithoutRounds", without_rounds("0+60x300"), (), (10, 130, 290)),
    "a worker that sees none": Case(
        "FedLoomWorkerWithoutRounds", without_rounds("0x300"), (126, 290), (119, 124), OF_WORKER, WORKER
    ),
    "a worker that was away for long": Case(
        "FedLoomWorkerWithoutRounds", without_rounds("0x160 9600+60x100", "0x160 1x100"), (), (150, 163, 200)
    ),
    "a worker of a federation that waits": Case(
        "FedLoomWorkerWithoutRounds", without_rounds("0x300", phase="0x300"), (), (130, 290)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_when_its_page_says_so_and_not_otherwise(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    (alert,) = [rule for group in rules("silos")["groups"] for rule in group["rules"] if rule["alert"] == case.alert]
    labels = alert["labels"] | {label: case.target[label] for label in case.keeps}
    firing = [{"exp_labels": labels, "exp_annotations": alert["annotations"]}]
    expected = [
        {"eval_time": f"{at}m", "alertname": case.alert, "exp_alerts": firing if at in case.fires else []}
        for at in (*case.fires, *case.silent)
    ]
    test = {"interval": "1m", "input_series": case.series, "alert_rule_test": expected}
    alone = {"groups": [{"name": "alone", "rules": [alert]}]}  # the others cost most of promtool's time
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(alone))
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}))
    promtool("test", "rules", file)


def test_every_alert_has_cases_in_which_it_fires_and_in_which_it_does_not() -> None:
    alerts = {rule["alert"] for group in rules("silos")["groups"] for rule in group["rules"]}
    assert {case.alert for case in CASES.values() if case.fires} == alerts
    assert {case.alert for case in CASES.values() if not case.fires} == alerts
