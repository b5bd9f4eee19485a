"""Canary clients: members of a federation that send a random direction or nothing; a fair coin decides.

G. Andrew, P. Kairouz, S. Oh, A. Oprea, H. B. McMahan, V. Suriyakumar, One-shot empirical privacy estimation for
federated learning, ICLR 2024, arXiv 2302.03098, Algorithm 1. Random directions of many dimensions are nearly orthogonal
to each other and to what honest clients send, so that the dot product of a direction with the change of the model shows
how often it was added, up to noise.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.algorithms.base import Algorithm, ClientAlgorithm, Conversation, ServerAlgorithm, Setup
from fedloom.algorithms.client_group import ClientGroup
from fedloom.algorithms.fedavg import FedAvg
from fedloom.attacks.canary_draws import DrawLog, random_direction, random_directions, signals
from fedloom.errors import ExperimentError
from fedloom.messages import Message, Quantity
from fedloom.models.predictors import Predictors
from fedloom.privacy.accounting import Release

UPDATE = "delta_theta"
"""Field of an answer that the server averages into the model ``theta`` of its state."""

CLEARED = (Quantity.MODEL_UPDATE, Quantity.EMBEDDING_NETWORK_UPDATE, Quantity.DESCRIPTOR_UPDATE, Quantity.GRADIENT)
"""Quantities of which a canary sends zeros, except :data:`UPDATE`."""


MOST_NUMBERS = 1 << 25
"""Numbers of directions that are held at once, if there is more than one."""


@dataclass(frozen=True, eq=False)
class CanarySet:
    """Canary clients of one audit.

    Attributes
    ----------
    names
        Their ids.
    coins
        ``[m]`` True for those that are in: the others answer with zeros, so that cohorts and their sizes are the same
        for every outcome of the coins.
    seed
        Seed of the directions, drawn for the audit alone.
    norm
        ℓ2 norm of an update that is in; None: the norm of the update that the client would have sent.
    """

    names: tuple[str, ...]
    coins: NDArray[np.bool_]
    seed: int
    norm: float | None = None

    @property
    def places(self) -> Mapping[str, int]:
        """Position of each canary by id."""
        return {name: i for i, name in enumerate(self.names)}

    def direction(self, i: int, size: int) -> Tensor:
        """Return the i-th canary's direction, ``[size]`` float32 of norm 1."""
        return random_direction(self.seed, i, size)

    def scores(self, change: Tensor) -> NDArray[np.float64]:
        """Return the dot product of each direction with the change of the model ``[size]``, ``[m]``."""
        change = change.double()
        found = [float(self.direction(i, len(change)).double() @ change) for i in range(len(self.names))]
        return np.array(found)

    def record(self, log: DrawLog, cohort: Collection[str], released: Tensor, claimed: Release) -> None:
        """Record the canaries' signals in the released sum ``[d]`` over a cohort.

        ``claimed`` is this sum as the accountant counts it.
        """
        every, drawn, size = np.arange(len(self.names)), set(cohort), len(released)
        taken = np.array([name in drawn for name in self.names])
        parts = np.array_split(every, min(len(every), math.ceil(len(every) * size / MOST_NUMBERS)))
        x = np.concatenate([signals(random_directions(self.seed, part, size), released) for part in parts])
        log.add(every, x, taken, claimed.rate, 1 / claimed.noise_multiplier)


class FollowingAlgorithm(ClientAlgorithm):
    """Client algorithm that has the properties of another, whose conversations a subclass changes.

    Parameters
    ----------
    inner
        The other client algorithm.
    """

    def __init__(self, inner: ClientAlgorithm) -> None:
        super().__init__(inner.settings, inner.setup)
        self.predictors, self.stateful = inner.predictors, inner.stateful
        self._inner = inner

    def trains(self, opening: type[Message]) -> bool:
        """Return whether the method's client trains."""
        return self._inner.trains(opening)

    def personalization_steps(self, predictor: str, examples: int) -> int:
        """Return the method's steps."""
        return self._inner.personalization_steps(predictor, examples)


class CanaryClientAlgorithm(FollowingAlgorithm):
    """Client algorithm of a method in which canaries send their directions; all other clients follow the method.

    A canary takes part in a conversation as any client does, with all its messages and its state, and replaces the
    update in its answer. Whatever happens to an answer after that, such as clipping, happens to it, too.

    Parameters
    ----------
    inner
        The method's client algorithm.
    """

    def __init__(self, inner: ClientAlgorithm, canaries: CanarySet) -> None:
        super().__init__(inner)
        self._canaries, self._places = canaries, canaries.places

    def open(self, clients: ClientGroup, opening: Message) -> Conversation:
        """Start the method's conversation; in a training round a canary changes its answers.

        Raises
        ------
        RuntimeError
            If a canary shares its group with others (``runtime.clients_at_once`` above 1).
        """
        conversation = self._inner.open(clients, opening)
        among = [client.id for client in clients.clients if client.id in self._places]
        if clients.round is None or not among:
            return conversation
        if len(clients) > 1:
            raise RuntimeError(f"canary {among[0]} is one of a group of {len(clients)} clients")
        return self._answering(conversation, self._places[among[0]])

    def _answering(self, conversation: Conversation, i: int) -> Conversation:
        try:
            answer = next(conversation)
            while True:
                received = yield self._changed(answer, i)
                answer = conversation.send(received)
        except StopIteration as end:
            predictors: Predictors | None = end.value
            return predictors
        finally:
            conversation.close()

    def _changed(self, answer: Message, i: int) -> Message:
        sent = answer.tensors()
        zeros = {f.name: torch.zeros_like(sent[f.name]) for f in answer.fields() if f.quantity in CLEARED}
        if UPDATE in sent and self._canaries.coins[i]:
            update = sent[UPDATE]
            norm = float(update.norm()) if self._canaries.norm is None else self._canaries.norm
            zeros[UPDATE] = (norm * self._canaries.direction(i, update.shape[1])).to(update)[None]
        return type(answer)(**{**sent, **zeros})


def sent_size(server: ServerAlgorithm, algorithm: Algorithm) -> int:
    """Return the length of the update that clients of a method send.

    Raises
    ------
    ExperimentError
        If its server does not add updates to one model, in which a canary's direction could be found.
    """
    shapes = {field.shape for cls in algorithm.messages for field in cls.fields() if field.name == UPDATE}
    theta = server.state.get("theta")
    names = [size for shape in shapes for size in shape]
    size = server.sizes.get(str(names[0]), 0) if len(names) == 1 else 0
    if theta is None or theta.dim() != 1 or not 0 < size <= len(theta):
        raise ExperimentError(
            f"algorithm.name: canary clients need a method whose server adds updates to one shared model, and "
            f"{algorithm.name} does not; choose canaries of examples.",
            key="algorithm.name",
            found=algorithm.name,
        )
    return size


def sent_part(change: Tensor, size: int, algorithm: Algorithm, setup: Setup) -> Tensor:
    """Return the coordinates of a change of the server's model that clients send, ``[size]``."""
    if len(change) == size:
        return change
    assert isinstance(algorithm, FedAvg), "only such a method keeps more than it shares"
    return change[algorithm.division(setup, algorithm.settings()).sent]  # its division does not depend on settings
