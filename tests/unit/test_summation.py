"""Sums of answers through the round loop: in plain, and under secure aggregation, against plain averaging."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import mentions
from federations import IMAGE, clients, federation, problem_of
from torch import Tensor

from fedloom.algorithms.base import (
    Algorithm,
    ClientAlgorithm,
    Cohort,
    Conversation,
    Round,
    ServerAlgorithm,
    Setup,
    Statistics,
    conversation,
    find_algorithm,
)
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.sums import SummedFields, sums_of
from fedloom.core.settings import Settings
from fedloom.errors import ExitCode, ExperimentError, QuorumError
from fedloom.evaluation.group_statistics import groups
from fedloom.evaluation.summary import left_out
from fedloom.experiment import load_experiment
from fedloom.messages import Message, Quantity, Replies, SummedMetrics, broadcast, rows
from fedloom.models.networks import MLP
from fedloom.models.predictors import Predictors, predictors_of
from fedloom.privacy.settings import SecureAggregation
from fedloom.runs.folder import RunFolder
from fedloom.security.signing import NO_SIGNING
from fedloom.sums.held_answers import HeldAnswers
from fedloom.sums.summation import Summation

METHODS = (
    "fedavg", "scaffold", "fedrep", "pfedbayes", "comfedl", "fedadam", "q-fedavg", "feddyn", "ditto", "fedproto",
    "drfa", "fgdro-kl",
)  # fmt: skip
SIZES = (12, 7, 9, 16, 11)


def summing(method: Algorithm, settings: Any, secure: SecureAggregation | None) -> dict[str, Any]:
    """Return what both sides of a federation need for sums."""
    summation = Summation(method.sums(settings), secure, sizes={f"c{i}": n for i, n in enumerate(SIZES)})
    return {"summation": summation, "held": HeldAnswers(summation, NO_SIGNING)}


def trained(
    folder: Path, name: str, secure: SecureAggregation | None, *, sums: bool = True, **keys: Any
) -> Mapping[str, Tensor]:
    """Return the server's state after two rounds."""
    method = find_algorithm(name)
    settings = method.settings(**({"replace": False, "gamma": 0.0} if name == "drfa" else {}))
    data = clients(SIZES)
    problem = problem_of(MLP(IMAGE, (8,), 3), data, roster=tuple(c.id for c in data))
    made = summing(method, settings, secure) if sums else {}
    run = federation(folder, method, settings, problem, data, rounds=2, **made, **keys)
    run.loop.run()
    return run.loop.server.state


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_plain_and_masked_sums_equal_the_mean(name: str, tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", name, None, sums=False)
    clear = trained(tmp_path / "clear", name, None)
    masked = trained(tmp_path / "masked", name, SecureAggregation(bits=64, range=1000))
    for key, value in plain.items():
        torch.testing.assert_close(clear[key], value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(masked[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["fedavg", "pfedbayes"])
def test_summed_metrics_have_the_statistics_of_each_clients_metrics(name: str, tmp_path: Path) -> None:
    """Except those of the worst clients, which no sum provides."""
    method, data = find_algorithm(name), clients((12, 7, 9, 16, 11, 8))
    problem = problem_of(MLP(IMAGE, (8,), 3), data)
    unseen = [c.id for c in data[:3]]
    plain = federation(tmp_path / "plain", method, method.settings(), problem, data, unseen=unseen).run()
    fields = {**method.sums(method.settings()), **sums_of(SummedMetrics)}
    summation = Summation(fields, SecureAggregation(bits=64, examples=16), dtype=torch.float64)
    held = HeldAnswers(summation, NO_SIGNING)
    made = federation(
        tmp_path / "summed", method, method.settings(), problem, data, unseen=unseen, summation=summation, held=held
    )
    summed = made.run()
    expected, found = groups(plain, label_mask=False), groups(summed, label_mask=False)
    assert summed.measured == 6
    assert left_out(summed, label_mask=False) == left_out(plain, label_mask=False)
    compare(expected, found)


def test_more_members_than_32_bits_hold_are_rejected() -> None:
    """Statistics of 32-bit sums use parts of 16 bits, whose sums over 2^16 members just fit."""
    method = find_algorithm("fedavg")
    summation = Summation(method.sums(method.settings()))
    (answer,) = summation.fields
    shapes = {field.name: (1,) for field in answer.fields()}
    for bits, members in ((32, 1 << 16), (64, (1 << 16) + 1)):
        assert summation.vector(answer, shapes, SecureAggregation(bits=bits), None, members).bits == bits  # type: ignore[arg-type]
    with pytest.raises(ExperimentError) as refused:
        summation.vector(answer, shapes, SecureAggregation(bits=32), None, (1 << 16) + 1)
    assert refused.value.key == "federation.secure_aggregation.bits"


def compare(expected: Any, found: Any, key: str = "") -> None:
    """Check numbers in nested mappings, and that values known only of single clients are None."""
    if isinstance(expected, dict):
        assert found is not None, key
        for name, value in expected.items():
            compare(value, found[name], name)
    elif "worst" in key:
        assert found is None
    else:
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-4), key


# --- two sums in one conversation -------------------------------------------------------------------------------------


class Begin(Message):
    theta: Tensor = broadcast(Quantity.MODEL)  # [d]


class GoOn(Message):
    theta: Tensor = broadcast(Quantity.MODEL)  # [d]


class Show(Message):
    theta: Tensor = broadcast(Quantity.MODEL)  # [d]


class First(Message):
    change: Tensor = rows(Quantity.MODEL_UPDATE, "d")  # [c, d]


class Second(Message):
    change: Tensor = rows(Quantity.MODEL_UPDATE, "d")  # [c, d]


class Server(ServerAlgorithm):
    """Server with two means in a round, the second of answers to the first."""

    def __init__(self, settings: Settings, setup: Setup, generator: torch.Generator) -> None:
        super().__init__(settings, setup)
        self.state["theta"] = setup.model.init(generator, setup.dtype)
        self.state["mean"] = torch.zeros_like(self.state["theta"])

    def train_round(self, round: Round) -> Statistics:
        """Make two exchanges."""
        theta, cohort = self.state["theta"], round.sample()
        first = cohort.send(Begin(theta), First)
        self.state["mean"] = first.mean(first.change)
        second = cohort.send(GoOn(theta + self.state["mean"]), Second)
        self.state["theta"] = theta + second.mean(second.change)
        return {"client_steps": 0.0}

    def personalize(self, cohort: Cohort) -> Replies[Any]:
        """Send the shared vector."""
        return cohort.send(Show(self.state["theta"]))


class Client(ClientAlgorithm):
    """Client whose answers differ by the number of examples."""

    @conversation
    def train(self, clients: ClientGroup, opening: Begin) -> Conversation:
        """Answer both."""
        sizes = torch.tensor([[len(client.train) / 10] for client in clients.clients], dtype=opening.theta.dtype)
        reported: GoOn = yield First(sizes * (opening.theta + 1))
        yield Second(sizes * reported.theta)
        return None

    @conversation
    def personalize(self, clients: ClientGroup, opening: Show) -> Predictors:
        """Return the shared model."""
        return predictors_of(self.setup.model, personal=opening.theta.expand(len(clients), -1))


class Twice(Algorithm):
    """Algorithm of this server and this client."""

    name = "twice"
    settings, server, client = Settings, Server, Client
    messages = (Begin, GoOn, Show, First, Second)

    def sums(self, settings: Any) -> SummedFields:
        """Return plain sums of both answers."""
        return {**sums_of(First), **sums_of(Second)}


def ran(folder: Path, secure: SecureAggregation | None, lost: dict[int, int]) -> Any:
    """Return a federation after one round that loses these rows at these exchanges."""
    data, method = clients(SIZES), Twice()
    problem = problem_of(MLP(IMAGE, (8,), 3), data)
    made = federation(folder, method, Settings(), problem, data, lost=lost, **summing(method, Settings(), secure))
    made.run()
    return made


def test_a_client_silent_at_the_end_of_a_sum_is_not_asked_for_the_next(tmp_path: Path) -> None:
    secure, row = SecureAggregation(bits=64, range=1000), 1
    at, then = 4, 6  # Survivors, and GoOn
    plain = ran(tmp_path / "plain", None, {1: row})
    masked = ran(tmp_path / "masked", secure, {at: row})
    for name, expected in plain.state.items():
        torch.testing.assert_close(masked.state[name], expected, rtol=1e-9, atol=1e-9)
    (line,) = (line for line in RunFolder(tmp_path / "masked").lines("journal.jsonl") if line["round"] == 1)
    assert [(loss["row"], loss["exchange"]) for loss in line["conversations"][0]["lost"]] == [(row, then)]


# --- settings that make secure sums impossible ------------------------------------------------------------------------


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
