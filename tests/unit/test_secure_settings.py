"""Settings that make secure sums impossible: the key, the value found, and the remedy; and runs that stop for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from facts import mentions
from federations import IMAGE, clients, federation, problem_of

from fedloom.algorithms.base import find_algorithm
from fedloom.algorithms.sums import sums_of
from fedloom.errors import ExitCode, ExperimentError, QuorumError
from fedloom.evaluation.group_statistics import groups
from fedloom.experiment import load_experiment
from fedloom.messages import SummedMetrics
from fedloom.models.networks import MLP
from fedloom.privacy.settings import SecureAggregation
from fedloom.runs.folder import RunFolder
from fedloom.security.signing import NO_SIGNING
from fedloom.sums.held_answers import HeldAnswers
from fedloom.sums.summation import Summation

SECURE = "federation.secure_aggregation"


def refused(tmp_path: Path, *overrides: str, algorithm: str = "{name: fedavg}") -> ExperimentError:
    """Return the error of reading an experiment with secure aggregation and these settings."""
    tree: dict[str, Any] = {
        "name": "bad",
        "data": {"dataset": "mnist", "partition": {"scheme": "iid", "clients": 12}},
        "model": {"name": "mlp", "hidden": [8]},
        "algorithm": {"name": "fedavg"},
        "federation": {"rounds": 2, "clients_per_round": 10, "secure_aggregation": {}},
    }
    path = tmp_path / "bad.yaml"
    path.write_text(json.dumps(tree))
    load_experiment(path)  # otherwise valid
    with pytest.raises(ExperimentError) as error:
        load_experiment(path, [f"algorithm={algorithm}", *overrides])
    assert error.value.exit_code is ExitCode.EXPERIMENT
    return error.value


@pytest.mark.parametrize(
    ("override", "key", "facts"),
    [
        ("federation.clients_per_round=1", "federation.clients_per_round", (1, 3)),
        ("federation.clients_per_round=2", "federation.clients_per_round", (2, 3)),
        (f"{SECURE}.range=0", f"{SECURE}.range", (0,)),
        (f"{SECURE}.bits=16", f"{SECURE}.bits", (16, 32, 64)),
        (f"{SECURE}.neighbours=3", f"{SECURE}.neighbours", (3, 2)),
        (f"{SECURE}.neighbours=10", f"{SECURE}.neighbours", (10, "clients_per_round", "null")),
        (f"{SECURE}={{threshold: 3}}", SECURE, ("threshold", "neighbours", 3)),
        (f"{SECURE}={{neighbours: 4, threshold: 2}}", SECURE, ("threshold", 2, 4)),
        (f"{SECURE}={{neighbours: 4, threshold: 5}}", SECURE, ("threshold", 5, 4)),
    ],
)
def test_invalid_settings_of_a_sum(tmp_path: Path, override: str, key: str, facts: tuple[object, ...]) -> None:
    error = refused(tmp_path, override)
    assert mentions(str(error), key, *facts)


@pytest.mark.parametrize(
    ("algorithm", "facts"),
    [
        ("{name: pefll}", ("pefll", "another method")),
        ("{name: wga}", ("wga",)),
        ("{name: afl}", ("afl", "drfa")),
        ("{name: pfnm}", ("pfnm",)),
        ("{name: drfa}", ("algorithm.replace", "false")),  # draws a client more than once
        ("{name: fedavg, weighting: uniform, trim: 0.1}", ("max_norm", "null", "trim", 0)),
        ("{name: fedavg, max_norm: 1.0}", ("max_norm", "null", "trim", 0)),
    ],
)
def test_methods_that_need_each_answer_are_rejected(tmp_path: Path, algorithm: str, facts: tuple[object, ...]) -> None:
    error = refused(tmp_path, algorithm=algorithm)
    assert error.key == SECURE
    assert mentions(str(error), SECURE, *facts)


def secure_run(folder: Path, range: float, sizes: tuple[int, ...] = (12, 7, 9, 16, 11), **keys: Any) -> Any:
    """Return a federation of FedAvg whose updates and metrics are summed securely."""
    method = find_algorithm("fedavg")
    settings, data = method.settings(), clients(sizes)
    problem = problem_of(MLP(IMAGE, (8,), 3), data)
    fields = {**method.sums(settings), **sums_of(SummedMetrics)}
    summation = Summation(fields, SecureAggregation(range=range, bits=64, examples=16))
    held = HeldAnswers(summation, NO_SIGNING)
    return federation(folder, method, settings, problem, data, rounds=1, summation=summation, held=held, **keys)


def test_a_range_too_small_for_all_clients_stops_the_run_and_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(QuorumError) as error:
        secure_run(tmp_path, 1e-9).run()
    assert error.value.exit_code is ExitCode.QUORUM
    assert mentions(str(error.value), f"{SECURE}.range", "delta_theta", "1e-09")


def test_the_aggregator_does_not_learn_the_size_of_a_rejected_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The client's own log has it, the journal does not."""
    with pytest.raises(QuorumError):
        secure_run(tmp_path, 1e-9).run()
    (output, *_) = (record.getMessage() for record in caplog.records if "magnitude" in record.getMessage())
    value = output.rpartition("magnitude ")[2].rstrip(")")
    assert float(value) > 1e-9
    lines = list(RunFolder(tmp_path).lines("journal.jsonl"))
    reasons = [loss["reason"] for line in lines for talk in line["conversations"] for loss in talk["lost"]]
    assert reasons
    assert not any("magnitude" in reason or value in reason for reason in reasons)


@pytest.mark.parametrize("unseen", [1, 2])
def test_groups_too_small_for_a_sum_are_not_measured_and_the_journal_has_the_reason(
    tmp_path: Path, unseen: int
) -> None:
    sizes = (12, 7, 9, 16, 11)
    ids = [client.id for client in clients(sizes)]
    made = secure_run(tmp_path, 100.0, sizes, unseen=ids[:unseen])
    found = groups(made.run(), label_mask=False)
    assert found["seen"] is not None
    assert found["unseen"] is None
    lines = [line for line in RunFolder(tmp_path).lines("journal.jsonl") if line["outcome"] == "evaluated"]
    lost = [loss for talk in lines[-1]["conversations"] for loss in talk["lost"]]
    assert {loss["client"] for loss in lost} == set(ids[:unseen])
    assert all(mentions(loss["reason"], 3, unseen, "data.held_out_fraction") for loss in lost)
