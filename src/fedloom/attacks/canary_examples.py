"""Canary examples of a training whose steps are noisy: the gradient of one that is in is a random direction.

T. Steinke, M. Nasr, M. Jagielski, NeurIPS 2023, arXiv 2305.08846, section 7, audit DP-SGD with such gradients. One that
is out has gradient 0, so that batches and their sizes do not depend on the coins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.algorithms.base import ClientAlgorithm, Conversation
from fedloom.algorithms.batches import Batch
from fedloom.algorithms.client_group import ClientGroup
from fedloom.attacks.canary_clients import FollowingAlgorithm
from fedloom.attacks.canary_data import CanaryExample
from fedloom.attacks.canary_draws import DrawLog, random_directions, signals
from fedloom.messages import Message
from fedloom.privacy.accounting import Release


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

        Raises
        ------
        RuntimeError
            If there are several clients in a group (``runtime.clients_at_once`` above 1).
        """
        if clients.round is not None:
            if len(clients) > 1:
                raise RuntimeError(f"canaries of {clients.clients[0].id} are in a group of {len(clients)} clients")
            chosen = self._canaries.of_client(clients.clients[0].id)
            if len(chosen):
                clients.probe = _Probe(self._canaries, chosen, len(clients.clients[0].train))
        return self._inner.open(clients, opening)


class _Probe:
    """Canaries of one client in one conversation.

    Parameters
    ----------
    chosen
        Positions of the client's canaries.
    size
        Number of its training examples.
    """

    def __init__(self, canaries: CanaryGradients, chosen: NDArray[np.int64], size: int) -> None:
        self._canaries, self._chosen, self._size = canaries, chosen, size
        self._rows = torch.tensor([canaries.examples[i].place for i in chosen])
        self._order = torch.full((size,), -1)
        self._order[self._rows] = torch.arange(len(chosen))
        self._scale = canaries.norm * torch.from_numpy(canaries.coins[chosen]).float()
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
        found = [each.clone() for each in flat]
        for each, part in zip(found, torch.split(crafted, sizes, dim=1), strict=True):
            each[of_canary.to(each.device)] = part.to(each)
        return found

    def released(self, batch: Batch, noisy: Tensor) -> None:
        """Record the signals of the canaries in a noisy sum ``[d]``."""
        assert batch.rows is not None
        assert batch.each is not None
        x = signals(self._of_size(len(noisy)), noisy)
        if batch is self._last:
            self._canaries.log.add_again(x)
            return
        self._last = batch
        drawn = batch.rows[(batch.weight > 0).to(batch.rows.device)].cpu()
        rate = 1 / (float(batch.each[0]) * self._size)  # of several kinds of steps, those of this size
        release = min(self._releases, key=lambda known: abs(known.rate - rate))
        taken = torch.isin(self._rows, drawn).numpy()
        self._canaries.log.add(self._chosen, x, taken, release.rate, 1 / release.noise_multiplier)

    def _of_size(self, size: int) -> Tensor:
        if size not in self._directions:
            self._directions[size] = random_directions(self._canaries.seed, self._chosen, size)
        return self._directions[size]
