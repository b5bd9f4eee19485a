"""Predictors of clients, which predict and can be saved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.errors import DataError
from fedloom.models.flat import FlatModel


class Predictor(Protocol):
    """Predictor of a client."""

    def log_probabilities(self, x: Tensor) -> Tensor:
        """Return log-probabilities of the classes, ``[b, ...] -> [b, C]``."""

    def probabilities(self, x: Tensor) -> Tensor:
        """Return probabilities, ``[b, ...] -> [b, C]``; rows sum to one."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save, from which the predictor can be restored."""

    def named(self) -> dict[str, Tensor]:
        """Return all tensors used for prediction, by the model's own names."""

    def predict(self, named: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return log-probabilities ``[b, ...] -> [b, C]`` as a function of :meth:`named`."""


Predictors: TypeAlias = list[dict[str, Predictor]]
"""One dict per client of the group: ``personal`` and, if it exists, ``global``."""


def predictor_of(client: str, named: Mapping[str, Predictor], name: str) -> Predictor:
    """Return one of a client's predictors.

    Raises
    ------
    DataError
        If the client has none of that name, because it has no examples to train on.
    """
    if name not in named:
        raise DataError(
            f"client {client} has no {name} model, which needs labelled training examples. Pack some, or request the "
            f"{' or the '.join(named)} model."
        )
    return named[name]


class ModelPredictor:
    """Predictor with a fixed θ."""

    def __init__(self, model: FlatModel, theta: Tensor) -> None:
        self.model = model
        self.theta = theta
        self.parameters = model.layout.leaves(theta)

    @torch.no_grad()
    def log_probabilities(self, x: Tensor) -> Tensor:
        """Return log-probabilities, ``[b, ...] -> [b, C]``."""
        return ModelPredictor.predict(self, self.parameters, x)

    def probabilities(self, x: Tensor) -> Tensor:
        """Return probabilities, ``[b, ...] -> [b, C]``; rows sum to one."""
        return self.log_probabilities(x).exp()

    @torch.no_grad()
    def losses(self, x: Tensor, y: Tensor | None) -> Tensor:
        """Return the model's loss of each example, ``[b, ...], [b] -> [b]``, which evaluates data without classes."""
        return self.model.loss(self.parameters, x, y)

    def tensors(self) -> dict[str, Tensor]:
        """Return θ ``[d]``."""
        return {"theta": self.theta}

    def named(self) -> dict[str, Tensor]:
        """Return the entries of the layout, and the model's constants that its own ``state_dict`` has."""
        saved = {name: t for name, t in self.model.constants.items() if name not in self.model.unsaved}
        return {**self.parameters, **{name: t.to(self.theta.device) for name, t in saved.items()}}

    def predict(self, named: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return log-probabilities, ``[b, ...] -> [b, C]``."""
        return F.log_softmax(self.model.forward(named, x), dim=1)


def predictors_of(model: FlatModel, **thetas: Tensor) -> list[dict[str, Predictor]]:
    """Return a dict of predictors per client, given one fixed model per client and name (``personal=theta [g, d]``).

    Two names of the same tensor share one predictor, which is then evaluated once.
    """
    g = next(iter(thetas.values())).shape[0]
    different = {id(theta): theta for theta in thetas.values()}
    made = [{key: ModelPredictor(model, theta[i]) for key, theta in different.items()} for i in range(g)]
    return [{name: each[id(theta)] for name, theta in thetas.items()} for each in made]


class Ensemble:
    """Mean of the class probabilities of S networks (Bayesian model averaging if they are draws).

    Parameters
    ----------
    thetas
        ``[S, d]``.
    tensors
        Tensors to save, from which the ensemble can be restored.
    """

    def __init__(self, model: FlatModel, thetas: Tensor, **tensors: Tensor) -> None:
        self.networks = [model.layout.leaves(theta) for theta in thetas]
        self._model = model
        self._tensors = tensors

    @torch.no_grad()
    def draws_log_probabilities(self, x: Tensor) -> Tensor:
        """Return each network's log-probabilities, ``[b, ...] -> [S, b, C]``."""
        return torch.stack([F.log_softmax(self._model.forward(network, x), dim=1) for network in self.networks])

    def log_probabilities(self, x: Tensor) -> Tensor:
        """Return the log of the mean probabilities, ``[b, ...] -> [b, C]``."""
        return self.draws_log_probabilities(x).logsumexp(0) - math.log(len(self.networks))

    def probabilities(self, x: Tensor) -> Tensor:
        """Return probabilities, ``[b, ...] -> [b, C]``; rows sum to one."""
        return self.log_probabilities(x).exp()

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that the ensemble was made from."""
        return self._tensors

    def named(self) -> dict[str, Tensor]:
        """Return the networks' entries, as ``networks.0.fc1.weight``."""
        return {f"networks.{i}.{name}": t for i, leaves in enumerate(self.networks) for name, t in leaves.items()}

    def predict(self, named: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return log-probabilities, ``[b, ...] -> [b, C]``."""
        names = self._model.layout.entries
        networks = [{name: named[f"networks.{i}.{name}"] for name, _ in names} for i in range(len(self.networks))]
        draws = torch.stack([F.log_softmax(self._model.forward(network, x), dim=1) for network in networks])
        return draws.logsumexp(0) - math.log(len(self.networks))
