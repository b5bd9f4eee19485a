"""Client algorithms of canaries: a fair coin decides whether a random direction is sent, or nothing.

G. Andrew, P. Kairouz, S. Oh, A. Oprea, H. B. McMahan, V. Suriyakumar, One-shot empirical privacy estimation for
federated learning, ICLR 2024, arXiv 2302.03098, Algorithm 1. Random directions of many dimensions are nearly orthogonal
to each other and to what honest clients send, so that the dot product of a direction with the change of the model shows
how often it was added, up to noise.

The gradient of a canary example is a random direction, too (T. Steinke, M. Nasr, M. Jagielski, NeurIPS 2023, arXiv
2305.08846, section 7, audit DP-SGD with such gradients). The gradient of one that is out is 0, so that batches and
their sizes do not depend on the coins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.algorithms.base import Algorithm, ClientAlgorithm, Conversation, ServerAlgorithm, Setup
from fedloom.algorithms.client_group import Batch, ClientGroup
from fedloom.algorithms.fedavg import FedAvg
from fedloom.attacks.canary_data import CanaryExample
from fedloom.attacks.canary_evidence import DrawLog, random_direction, random_directions, signals
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
        scores = [float(self.direction(i, len(change)).double() @ change) for i in range(len(self.names))]
        return np.array(scores)

    def record(self, log: DrawLog, cohort: Collection[str], released: Tensor, release: Release) -> None:
        """Record the canaries' signals in the released sum ``[d]`` over a cohort.

        ``release`` is this sum as the accountant counts it.
        """
        every, names_drawn, size = np.arange(len(self.names)), set(cohort), len(released)
        is_taken = np.array([name in names_drawn for name in self.names])
        parts = np.array_split(every, min(len(every), math.ceil(len(every) * size / MOST_NUMBERS)))
        x = np.concatenate([signals(random_directions(self.seed, part, size), released) for part in parts])
        log.add(every, x, is_taken, release.rate, 1 / release.noise_multiplier)


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

        Raise RuntimeError if a canary shares its group with others (``runtime.clients_at_once`` above 1).
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
                message = yield self._changed(answer, i)
                answer = conversation.send(message)
        except StopIteration as end:
            predictors: Predictors | None = end.value
            return predictors
        finally:
            conversation.close()

    def _changed(self, answer: Message, i: int) -> Message:
        tensors = answer.tensors()
        zeros = {f.name: torch.zeros_like(tensors[f.name]) for f in answer.fields() if f.quantity in CLEARED}
        if UPDATE in tensors and self._canaries.coins[i]:
            update = tensors[UPDATE]
            norm = float(update.norm()) if self._canaries.norm is None else self._canaries.norm
            zeros[UPDATE] = (norm * self._canaries.direction(i, update.shape[1])).to(update)[None]
        return type(answer)(**{**tensors, **zeros})


def sent_size(server: ServerAlgorithm, algorithm: Algorithm) -> int:
    """Return the length of the update that clients of a method send.

    Raise ExperimentError if its server does not add updates to one model, in which a canary's direction could be found.
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


@dataclass(frozen=True, eq=False)
class CanaryGradients:
    """Canary examples of one audit.

    Attributes
    ----------
    examples
        The canaries.
    coins
        ``[m]`` True for those that are in.
    seed
        Seed of the directions.
    norm
        ℓ2 norm of their gradients, before they are clipped.
    releases
        Function of a client's number of training examples that returns the noisy sums of a visit, for the accountant.
    log
        Recorder of the noisy sums.
    """

    examples: Sequence[CanaryExample]
    coins: NDArray[np.bool_]
    seed: int
    norm: float
    releases: Callable[[int], Mapping[Release, int]]
    log: DrawLog

    def of_client(self, client: str) -> NDArray[np.int64]:
        """Return the positions of a client's canaries."""
        return np.array([i for i, each in enumerate(self.examples) if each.client == client], dtype=np.int64)


class CanaryExampleAlgorithm(FollowingAlgorithm):
    """Client algorithm of a method whose noisy steps in training have the gradients of canaries.

    Parameters
    ----------
    inner
        The method's client algorithm.
    """

    def __init__(self, inner: ClientAlgorithm, canaries: CanaryGradients) -> None:
        super().__init__(inner)
        self._canaries = canaries

    def open(self, clients: ClientGroup, opening: Message) -> Conversation:
        """Start the method's conversation, in a training round with the client's canaries.

        Raise RuntimeError if there are several clients in a group (``runtime.clients_at_once`` above 1).
        """
        if clients.round is not None:
            if len(clients) > 1:
                raise RuntimeError(f"canaries of {clients.clients[0].id} are in a group of {len(clients)} clients")
            canaries = self._canaries.of_client(clients.clients[0].id)
            if len(canaries):
                clients.probe = _Probe(self._canaries, canaries, len(clients.clients[0].train))
        return self._inner.open(clients, opening)


class _Probe:
    """Canaries of one client in one conversation.

    Parameters
    ----------
    rows
        Positions of the client's canaries.
    size
        Number of its training examples.
    """

    def __init__(self, canaries: CanaryGradients, rows: NDArray[np.int64], size: int) -> None:
        self._canaries, self._chosen, self._size = canaries, rows, size
        self._rows = torch.tensor([canaries.examples[i].place for i in rows])
        self._order = torch.full((size,), -1)
        self._order[self._rows] = torch.arange(len(rows))
        self._scale = canaries.norm * torch.from_numpy(canaries.coins[rows]).float()
        self._releases = canaries.releases(size)
        self._directions: dict[int, Tensor] = {}
        self._last: Batch | None = None

    def chosen(self, batch: Batch, flat: list[Tensor]) -> list[Tensor]:
        """Return gradients ``[b, d]`` by leaf in which those of canaries are their directions, or 0."""
        assert batch.rows is not None
        sizes = [each.shape[-1] for each in flat]
        order = self._order[batch.rows.cpu()]
        of_canary, order = order >= 0, order[order >= 0]
        crafted = self._scale[order, None] * self._of_size(sum(sizes))[order]
        gradients = [each.clone() for each in flat]
        for each, part in zip(gradients, torch.split(crafted, sizes, dim=1), strict=True):
            each[of_canary.to(each.device)] = part.to(each)
        return gradients

    def released(self, batch: Batch, noisy: Tensor) -> None:
        """Record the signals of the canaries in a noisy sum ``[d]``."""
        assert batch.rows is not None
        assert batch.each is not None
        x = signals(self._of_size(len(noisy)), noisy)
        if batch is self._last:
            self._canaries.log.add_again(x)
            return
        self._last = batch
        rows_drawn = batch.rows[(batch.weight > 0).to(batch.rows.device)].cpu()
        rate = 1 / (float(batch.each[0]) * self._size)  # of several kinds of steps, those of this size
        release = min(self._releases, key=lambda known: abs(known.rate - rate))
        is_taken = torch.isin(self._rows, rows_drawn).numpy()
        self._canaries.log.add(self._chosen, x, is_taken, release.rate, 1 / release.noise_multiplier)

    def _of_size(self, size: int) -> Tensor:
        if size not in self._directions:
            self._directions[size] = random_directions(self._canaries.seed, self._chosen, size)
        return self._directions[size]
