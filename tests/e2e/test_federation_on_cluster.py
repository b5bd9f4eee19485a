"""Federations as pods, under faults of pods (docs/e2e.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e_places import Case, Place, until
from run_processes import final, scores

from fedloom.security.tokens import make_token

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.data,
    pytest.mark.timeout(1800),
    pytest.mark.group("e2e"),
]

TOLERANCE = 0.05
"""Largest difference of mean accuracies between nodes that do not compute the same bits (docs/design.md, section 4)."""


def assert_equals_reference(run: Path, case: Case) -> None:
    """Check that a run equals the one of a single pod: to the bit, where both computed in the same way."""
    assert scores(run)["rounds"] == case.rounds
    here, there = (json.loads((folder / "environment.json").read_text()) for folder in (run, case.reference))
    if here == there:
        assert final(run) == final(case.reference)
        assert scores(run) == scores(case.reference)
        return
    for group in ("seen", "unseen"):
        found, expected = (scores(folder)[group]["accuracy_mean"] for folder in (run, case.reference))
        assert abs(found - expected) <= TOLERANCE, f"{group}: {here} against {there}"


def finished(place: Place, launcher: str, run_id: str, folder: Path) -> tuple[Path, str]:
    """Wait for a launcher to succeed; return the folder of the run and the output."""
    code, output = place.ended(launcher)
    assert code == 0, output
    return place.fetch(f"launched/{place.run_id(run_id)}", folder / "run"), output


def under_way(place: Place, run_id: str, case: Case, component: str) -> set[str]:
    """Wait until some rounds are published, but not all; return the names of a component's pods."""
    until(lambda: place.published_round(run_id) >= 2, f"{run_id} is under way", place.patience_s)
    assert place.published_round(run_id) < case.rounds
    return names(place, run_id, component)


def names(place: Place, run_id: str, component: str) -> set[str]:
    """Return the names of a component's pods."""
    return {found["metadata"]["name"] for found in place.pods(run_id, component)}


def test_pods_give_the_results_of_one_process(place: Place, case: Case, tmp_path: Path) -> None:
    token = make_token().get_secret_value()
    shared = place.secret_with("token", token=token)
    whole = {"token_secret": shared, "aggregator": {}}  # with a report
    launcher = place.launch("whole", case.experiment, case.fingerprint, token=token, **whole)
    run, output = finished(place, launcher, "whole", tmp_path)
    assert_equals_reference(run, case)
    place.assert_all_gone("whole")
    for name in ("summary.json", "clients.csv", "journal.jsonl", "partition.json", "report.html"):
        assert (run / name).stat().st_size, name
    assert any(path.name.endswith(".log") for path in (run / "logs").iterdir())
    assert json.loads((run / "summary.json").read_text())["communication"]["wire_down"] > 0  # there was a federation
    assert f"after round {case.rounds}: " in output  # the launcher received the evaluation
    joins = [json.loads(line) for line in (run / "logs" / "audit.jsonl").read_text().splitlines()]
    assert {line["identity"] for line in joins if line["event"] == "join"} == {"shared-token"}
    assert token not in output + "".join(path.read_text() for path in (run / "logs").iterdir())


def test_replaced_client_pods_find_the_states_of_their_clients(place: Place, case: Case, tmp_path: Path) -> None:
    """One pod crashes, one is evicted. Each serves different clients, so the rounds wait for their replacements."""
    launcher = place.launch("client", case.experiment, case.fingerprint, clients_per_worker=6)
    crashed, evicted = before = sorted(under_way(place, "client", case, "worker"))
    place.crash(crashed)
    place.evict(evicted)
    until(lambda: len(names(place, "client", "worker") - set(before)) == 2, "both are replaced", place.patience_s)
    run, _ = finished(place, launcher, "client", tmp_path)
    assert_equals_reference(run, case)
    journal = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    assert not any(talk["lost"] for line in journal for talk in line["conversations"])
    place.assert_all_gone("client")


def test_a_killed_aggregator_pod_resumes_from_its_checkpoint(place: Place, case: Case, tmp_path: Path) -> None:
    launcher = place.launch("aggregator", case.experiment, case.fingerprint)
    (before,) = under_way(place, "aggregator", case, "aggregator")
    place.crash(before)
    run, _ = finished(place, launcher, "aggregator", tmp_path)
    assert_equals_reference(run, case)
    (second,) = [path for path in (run / "logs").glob("*-aggregator-*.log") if path.stem != before]
    assert "resuming after round" in second.read_text()
    place.assert_all_gone("aggregator")


def test_a_launcher_adopts_the_federation_of_a_killed_one(place: Place, case: Case, tmp_path: Path) -> None:
    first = place.launch("launcher", case.experiment, case.fingerprint)
    until(lambda: place.pods("launcher", "worker"), "the federation has begun", place.patience_s)
    before = names(place, "launcher", "aggregator") | names(place, "launcher", "worker")
    place.crash(first)
    second = place.launch("launcher", case.experiment, case.fingerprint, attempt=2)
    run, output = finished(place, second, "launcher", tmp_path)
    assert "adopted Job" in output
    assert "created Job" not in output
    assert {path.stem for path in (run / "logs").glob("fl-*.log")} <= before  # no pod was restarted
    assert_equals_reference(run, case)
    place.assert_all_gone("launcher")


@pytest.mark.parametrize(
    ("run_id", "settings", "device", "words"),
    [
        ("image", {"image": "registry.invalid/fedloom:none"}, "cpu", ["registry.invalid/fedloom:none"]),
        ("gpu", {"gpu": {"count": 1000}, "pending_timeout_s": 5}, "cuda", ["nvidia.com/gpu", "nodes are available"]),
    ],
    ids=["image that cannot be pulled", "GPU that cannot be scheduled"],
)
def test_a_federation_that_cannot_run_is_reported_and_removed(
    place: Place, case: Case, run_id: str, settings: dict[str, Any], device: str, words: list[str]
) -> None:
    tree = yaml.safe_load(case.experiment)
    text = yaml.safe_dump({**tree, "runtime": {**tree["runtime"], "device": device}})
    launcher = place.launch(run_id, text, case.fingerprint, **settings)
    code, output = place.ended(launcher)
    assert code not in (0, 1), output
    message = output[output.index("error: ") :]
    assert all(word in message for word in words), output
    place.assert_all_gone(run_id)
