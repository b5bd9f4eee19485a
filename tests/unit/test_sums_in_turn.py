"""Two secure sums in one conversation: a client that is silent at the end of the first is lost for the second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from federations import IMAGE, clients, federation, problem_of
from test_summation import SIZES, summing
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
)
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.sums import SummedFields, sums_of
from fedloom.core.settings import Settings
from fedloom.messages import Message, Quantity, Replies, broadcast, rows
from fedloom.models.networks import MLP
from fedloom.models.predictors import Predictors, predictors_of
from fedloom.privacy.settings import SecureAggregation
from fedloom.runs.folder import RunFolder


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
