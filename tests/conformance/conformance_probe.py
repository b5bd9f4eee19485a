"""A method written for the kit: it does in a round whatever the contract allows, and computes next to nothing."""

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
    """Two conversations in a round, of two exchanges and one; a part of its update waits for the next round."""

    def __init__(self, settings: Settings, setup: Setup, generator: torch.Generator) -> None:
        super().__init__(settings, setup)
        self.state["theta"] = setup.model.init(generator, setup.dtype)
        self.state["late"] = torch.zeros_like(self.state["theta"])
        self.state["rounds"] = torch.zeros((), dtype=torch.int64)
        self._pending: Callable[[], None] | None = None

    def settle(self) -> None:
        """Do what was put off."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending()

    def train_round(self, round: Round) -> Statistics:
        """Draws of its own, and two cohorts of which the second has one client for certain."""
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
        """One exchange."""
        self.settle()
        return cohort.send(Show(self.state["theta"] + self.state["late"]))


class Client(ClientAlgorithm):
    """Remembers a vector, to which every round that counts it adds."""

    stateful = True

    @conversation
    def train(self, clients: ClientGroup, opening: Begin) -> Conversation:
        """Answers as often as it is asked, from what it remembers, what it draws and what it is told."""
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
            told: GoOn = yield Moved(change, steps)
            pushed = told.push

    @conversation
    def personalize(self, clients: ClientGroup, opening: Show) -> Predictors:
        """The shared vector and what the client remembers."""
        theta = opening.theta.expand(len(clients), -1)
        remembered = clients.load_state("memory", torch.zeros_like(theta))
        return predictors_of(self.setup.model, personal=theta + remembered)


class Probe(Algorithm):
    """The method of these two halves."""

    name = "probe"
    settings, server, client = Settings, Server, Client
    messages = (Begin, GoOn, Moved, Show)


PROBE = Probe()
