"""A method written for the kit: it does everything that the contract allows, and computes next to nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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
from fedloom.core.settings import Settings
from fedloom.messages import Message, Quantity, Replies, broadcast, rows
from fedloom.models.predictors import Predictors, predictors_of


class Begin(Message):
    theta: Tensor = broadcast(Quantity.MODEL)  # [d]


class GoOn(Message):
    push: Tensor = rows(Quantity.OTHER)  # [c, 1]


class Moved(Message):
    change: Tensor = rows(Quantity.MODEL_UPDATE, "d")  # [c, d]
    steps: Tensor = rows(Quantity.COUNT, 1)  # [c, 1] float64


class Show(Message):
    theta: Tensor = broadcast(Quantity.MODEL)  # [d]


class Server(ServerAlgorithm):
    """Server with two conversations per round, of two exchanges and one; part of its update waits for a round."""

    def __init__(self, settings: Settings, setup: Setup, generator: torch.Generator) -> None:
        super().__init__(settings, setup)
        self.state["theta"] = setup.model.init(generator, setup.dtype)
        self.state["late"] = torch.zeros_like(self.state["theta"])
        self.state["rounds"] = torch.zeros((), dtype=torch.int64)
        self._pending: Callable[[], None] | None = None

    def settle(self) -> None:
        """Apply the postponed part of the update."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending()

    def train_round(self, round: Round) -> Statistics:
        """Draw random numbers and two cohorts, of which the second always has one client."""
        theta = self.state["theta"]
        first = round.sample()
        one = first.send(Begin(theta), Moved, meanwhile=self.settle)
        two = first.send(GoOn(one.change[:, :1] * 0.5), Moved)
        second = round.sample(2, purpose="second", always=(self.setup.roster[0],))
        three = second.send(Begin(theta + two.mean(two.change)), Moved)
        noise = torch.randn(theta.shape, generator=round.generator("noise"), dtype=theta.dtype)
        late, push = self.state["late"], three.mean(three.change)
        self._pending = lambda: late.add_(push)
        self.state["theta"] = theta + two.mean(two.change, two.weights) + push + 0.01 * noise
        self.state["rounds"] = self.state["rounds"] + 1
        return {"client_steps": one.total(one.steps) + two.total(two.steps) + three.total(three.steps)}

    def personalize(self, cohort: Cohort) -> Replies[Any]:
        """Run one exchange."""
        self.settle()
        return cohort.send(Show(self.state["theta"] + self.state["late"]))


class Client(ClientAlgorithm):
    """Client with a vector to which every counted round adds."""

    stateful = True

    @conversation
    def train(self, clients: ClientGroup, opening: Begin) -> Conversation:
        """Answer each request from the stored vector, a random draw and the message."""
        theta = opening.theta.expand(len(clients), -1)
        remembered = clients.load_state("memory", torch.zeros_like(theta))
        steps = torch.tensor([[float(len(client.train))] for client in clients.clients], dtype=torch.float64)
        pushed: Tensor | float = 0.0
        while True:
            drawn = torch.stack(
                [torch.randn(theta.shape[1], generator=clients.generator(i, "draw")) for i in range(len(clients))]
            )
            change = 0.1 * (drawn - theta) + 0.3 * remembered + pushed
            remembered = 0.5 * remembered + change
            clients.save_state(memory=remembered)
            reported: GoOn = yield Moved(change, steps)
            pushed = reported.push

    @conversation
    def personalize(self, clients: ClientGroup, opening: Show) -> Predictors:
        """Return the sum of the shared and the stored vector."""
        theta = opening.theta.expand(len(clients), -1)
        remembered = clients.load_state("memory", torch.zeros_like(theta))
        return predictors_of(self.setup.model, personal=theta + remembered)


class Probe(Algorithm):
    """Algorithm made of this server and this client."""

    name = "probe"
    settings, server, client = Settings, Server, Client
    messages = (Begin, GoOn, Moved, Show)


PROBE = Probe()
